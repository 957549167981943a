"""KFAC against dense Kronecker formulas in float64, and what it reduces to."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, jacrev

import lambdahat as lh
from lambdahat.optim import KFAC
from lambdahat.optim.kronecker_layers import apply, refresh
from tests.cases import with_eigenvalues
from tests.operators.kronecker_cases import MODELS

DAMPING = 0.03


@pytest.fixture(autouse=True)
def _draws():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        yield


def batch(shape, count=6, classes=3):
    return torch.randn(count, *shape, dtype=torch.float64), torch.randint(classes, (count,))


def train(optimizer, model, x, y, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def moved(model, step):
    """The parameters before and after a call, as the difference θ − θ' for each."""
    before = [p.detach().clone() for p in model.parameters()]
    step()
    return [old - p.detach() for old, p in zip(before, model.parameters(), strict=True)]


def joined(module, tensors):
    return torch.cat([tensor.reshape(len(tensor), -1) for tensor in tensors], dim=1)


def layer_rows(model, at, x, y):
    """For each sample the inputs a (R, n) and output gradients g (R, m) of layer ``at``, with
    nothing unfolded.

    The inputs at an output position are the derivative of that output by the weight's first row.
    """
    layer, rows = model[at], []
    axis = -1 if isinstance(layer, nn.Linear) else 0
    named = dict(layer.named_parameters())
    for sample, target in zip(x, y, strict=True):
        h = model[:at](sample[None]).detach()

        def first_row(parameters, h=h):
            return functional_call(layer, parameters, (h,))[0].movedim(axis, 0)[0].reshape(-1)

        jacobian = jacrev(first_row)(named)
        a = torch.cat(
            [jacobian[name][:, 0].reshape(len(jacobian[name]), -1) for name in named], dim=1
        )
        out = layer(h).detach().requires_grad_()
        loss = F.cross_entropy(model[at + 1 :](out.clone()), target[None])
        (g,) = torch.autograd.grad(loss, out)
        rows.append((a.detach(), g[0].movedim(axis, -1).reshape(-1, len(layer.weight))))
    return rows


def dense_factors(rows, sharing):
    """A and G of the rows of all samples."""
    if sharing == "reduce":
        rows = [(a.mean(0, keepdim=True), g.sum(0, keepdim=True)) for a, g in rows]
    A = sum(a.T @ a for a, _ in rows) / sum(len(a) for a, _ in rows)
    return A, sum(g.T @ g for _, g in rows) / len(rows)


def dense_direction(A, G, D, damping=DAMPING):
    """The Kronecker product of the damped factors, inverted whole."""
    pi = ((A.trace() / len(A)) / (G.trace() / len(G))).sqrt()
    eye_a, eye_g = torch.eye(len(A), dtype=A.dtype), torch.eye(len(G), dtype=A.dtype)
    K = torch.kron(G + damping**0.5 / pi * eye_g, A + pi * damping**0.5 * eye_a)
    return torch.linalg.solve(K, D.reshape(-1)).reshape(D.shape)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", MODELS)
def test_first_step_is_the_dense_kronecker_formula(name, sharing):
    make, shape, layers = MODELS[name]
    model = make().double()
    x, y = batch(shape)
    grads = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    by_parameter = dict(zip(model.parameters(), grads, strict=True))
    expected = {}
    for at in layers:
        A, G = dense_factors(layer_rows(model, at, x, y), sharing)
        D = joined(model[at], [by_parameter[p] for p in model[at].parameters()])
        expected[at] = dense_direction(A, G, D)
    optimizer = KFAC(model, lr=1.0, damping=DAMPING, sharing=sharing)
    change = dict(
        zip(model.parameters(), moved(model, lambda: train(optimizer, model, x, y)), strict=True)
    )
    for at in layers:
        found = joined(model[at], [change[p] for p in model[at].parameters()])
        torch.testing.assert_close(found, expected[at], rtol=1e-8, atol=1e-10)


def test_groups_of_a_convolution_are_blocks_of_their_own():
    joint = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(24, 3)).double()
    x, y = batch((4, 4, 4))
    apart = nn.ModuleList([nn.Conv2d(2, 3, 3), nn.Conv2d(2, 3, 3)]).double()
    for k, part in enumerate(apart):
        part.weight.data = joint[0].weight[3 * k : 3 * k + 3].detach().clone()
        part.bias.data = joint[0].bias[3 * k : 3 * k + 3].detach().clone()

    class Apart(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts, self.last = apart, copy.deepcopy(joint[2])

        def forward(self, x):
            return self.last(
                torch.cat(
                    [p(h) for p, h in zip(self.parts, x.chunk(2, 1), strict=True)], 1
                ).flatten(1)
            )

    other = Apart()
    one = moved(joint, lambda: train(KFAC(joint, 1.0, DAMPING), joint, x, y))
    two = moved(other, lambda: train(KFAC(other, 1.0, DAMPING), other, x, y))
    torch.testing.assert_close(one[0], torch.cat([two[0], two[2]]))
    torch.testing.assert_close(one[1], torch.cat([two[1], two[3]]))


@pytest.mark.parametrize("kind", ["kfac", "ekfac"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_convolution_at_one_position_is_a_linear_layer(kind, sharing):
    conv = nn.Sequential(nn.Conv2d(2, 5, 3), nn.Tanh(), nn.Flatten(), nn.Linear(5, 3)).double()
    linear = nn.Sequential(nn.Flatten(), nn.Linear(18, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    for target, source in zip(linear.parameters(), conv.parameters(), strict=True):
        target.data = source.detach().reshape(target.shape).clone()
    x, y = batch((2, 3, 3))
    settings = {
        "lr": 0.1,
        "damping": DAMPING,
        "momentum": 0.9,
        "kind": kind,
        "factor_every": 1,
        "inverse_every": 1,
    }
    train(KFAC(conv, sharing=sharing, **settings), conv, x, y, 4)
    train(KFAC(linear, sharing=sharing, **settings), linear, x, y, 4)
    for one, other in zip(conv.parameters(), linear.parameters(), strict=True):
        torch.testing.assert_close(one.flatten(), other.flatten(), rtol=1e-7, atol=1e-9)


class OneHot(nn.Module):
    """Words as one-hot inputs of a linear layer, or as an embedding."""

    def __init__(self, embedding):
        super().__init__()
        self.embed = nn.Embedding(7, 4) if embedding else nn.Linear(7, 4, bias=False)
        self.last = nn.Linear(12, 3)

    def forward(self, words):
        lookup = isinstance(self.embed, nn.Embedding)
        h = self.embed(words if lookup else F.one_hot(words, 7).to(self.last.weight.dtype))
        return self.last(torch.tanh(h).flatten(1))


@pytest.mark.parametrize("kind", ["kfac", "ekfac"])
def test_embedding_is_a_linear_layer_of_one_hot_inputs(kind):
    table, linear = OneHot(True).double(), OneHot(False).double()
    linear.embed.weight.data = table.embed.weight.detach().T.clone()
    linear.last.load_state_dict(table.last.state_dict())
    words, y = torch.randint(7, (6, 3)), torch.randint(3, (6,))
    words[0] = 2  # a sample that has one word three times
    for model in (table, linear):
        settings = {"kind": kind, "momentum": 0.5, "factor_every": 1, "inverse_every": 2}
        train(KFAC(model, 0.1, DAMPING, **settings), model, words, y, 5)
    torch.testing.assert_close(table.embed.weight, linear.embed.weight.T, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(table.last.weight, linear.last.weight, rtol=1e-7, atol=1e-9)


def test_padding_counts_neither_as_input_nor_as_gradient():
    model = nn.Sequential(nn.Embedding(5, 2, padding_idx=0), nn.Flatten(), nn.Linear(6, 3)).double()
    words, y = torch.tensor([[0, 1, 2], [3, 4, 1]]), torch.tensor([0, 2])
    optimizer = KFAC(model, 1.0, DAMPING)
    train(optimizer, model, words, y)
    state = optimizer.state[model[0].weight]
    torch.testing.assert_close(
        state["A"][0] * 6, torch.tensor([0.0, 2, 1, 1, 1], dtype=torch.float64)
    )
    model.zero_grad()
    h = model[0](words).detach().requires_grad_()
    (g,) = torch.autograd.grad(F.cross_entropy(model[1:](h), y), h)
    g[0, 0] = 0.0
    again = KFAC(model, 0.0, DAMPING)
    train(again, model, words, y)
    torch.testing.assert_close(
        again.state[model[0].weight]["G"][0], 2 * torch.einsum("bri,brj->ij", g, g)
    )


NORMS = {
    "layer": (nn.LayerNorm(4), (5, 4), (4,)),
    "layer of two axes": (nn.LayerNorm((5, 4)), (5, 4), (5, 4)),
    "batch": (nn.BatchNorm1d(4), (4, 5), (4, 1)),
    "batch, flat": (nn.BatchNorm1d(4), (4,), (4,)),
    "group": (nn.GroupNorm(2, 4), (4, 5), (4, 1)),
    "instance": (nn.InstanceNorm1d(4, affine=True), (4, 5), (4, 1)),
    "rms": (nn.RMSNorm(4), (5, 4), (4,)),
    "no bias": (nn.LayerNorm(4, bias=False), (5, 4), (4,)),
}


@pytest.mark.parametrize("name", NORMS)
def test_norm_layer_has_the_dense_block_of_each_unit(name):
    layer, shape, units = NORMS[name]
    layer = copy.deepcopy(layer).double()
    nn.init.uniform_(layer.weight, 0.5, 2.0)
    x, y = batch(shape)
    model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(x[0].numel(), 3)).double()
    plain = copy.deepcopy(layer)
    nn.init.ones_(plain.weight)
    lead = (len(x), *(1,) * (x.ndim - 1 - len(units)), *units)
    own = {
        n: p.detach().reshape(units).expand(lead).clone().requires_grad_()
        for n, p in layer.named_parameters()
    }
    # a weight and a bias for every sample
    h = plain(x).detach() * own["weight"] + own.get("bias", 0.0)
    grads = torch.autograd.grad(F.cross_entropy(model[1:](h), y), list(own.values()))
    # (b, units, k), of each sample's own loss
    each = torch.stack([g.flatten(1) for g in grads], dim=2) * len(x)
    block = torch.einsum("buk,bul->ukl", each, each) / len(x) + DAMPING * torch.eye(
        len(own), dtype=torch.float64
    )
    expected = torch.linalg.solve(block, each.mean(0).unsqueeze(-1))[..., 0]
    change = moved(model, lambda: train(KFAC(model, 1.0, DAMPING), model, x, y))
    found = torch.stack([part.flatten() for part in change[: len(own)]], dim=1)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("name", ["mlp", "conv2d", "sequence"])
def test_ekfac_is_the_dense_formula_in_the_eigenbasis(name):
    make, shape, layers = MODELS[name]
    model = make().double()
    x, y = batch(shape)
    optimizer = KFAC(model, 0.0, DAMPING, kind="ekfac", factor_every=1, inverse_every=1)
    train(optimizer, model, x, y)
    optimizer.param_groups[0]["lr"] = 1.0
    at = layers[0]
    rows = layer_rows(model, at, x, y)
    A, G = dense_factors(rows, "expand")
    samples = torch.stack([(g.T @ a).reshape(-1) for a, g in rows])  # per-sample gradients
    U = torch.kron(torch.linalg.eigh(G).eigenvectors, torch.linalg.eigh(A).eigenvectors)
    # KFAC's own values at the first step, then the mean of those and the samples'
    first = torch.kron(G, A)
    squares = 0.5 * torch.diagonal(U.T @ first @ U) + 0.5 * (samples @ U).square().mean(0)
    expected = U @ ((U.T @ samples.mean(0)) / (squares + DAMPING))
    change = dict(
        zip(model.parameters(), moved(model, lambda: train(optimizer, model, x, y)), strict=True)
    )
    found = joined(model[at], [change[p] for p in model[at].parameters()])
    torch.testing.assert_close(found.reshape(-1), expected, rtol=1e-6, atol=1e-9)


def test_ekfac_keeps_its_matrix_when_the_basis_turns():
    draws = [torch.randn(1, k, k, dtype=torch.float64) for k in (3, 4, 3, 4)]
    G0, A0, G1, A1 = (m @ m.mT for m in draws)
    state = {"A": A0, "G": G0}
    refresh(state, 0.0, None, True, "layer")
    state["squares"] = torch.rand(1, 3, 4, dtype=torch.float64)
    U = torch.kron(state["G_basis"][0], state["A_basis"][0])
    matrix = U @ torch.diag(state["squares"].reshape(-1)) @ U.T
    state.update(A=A1, G=G1)
    refresh(state, 0.0, None, True, "layer")
    V = torch.kron(torch.linalg.eigh(G1[0]).eigenvectors, torch.linalg.eigh(A1[0]).eigenvectors)
    torch.testing.assert_close(state["squares"].reshape(-1), torch.diagonal(V.T @ matrix @ V))


def test_identity_factors_are_sgd():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    other = copy.deepcopy(model)
    x, y = batch((4,))
    optimizer = KFAC(model, 0.3, 0.0, momentum=0.9, factor_every=100, inverse_every=1)
    optimizer.param_groups[0]["step"] = 101  # so that no moments are due
    for layer in (model[0], model[2]):
        A, G = (
            torch.eye(k, dtype=torch.float64)[None]
            for k in (layer.in_features + 1, layer.out_features)
        )
        optimizer.state[layer.weight].update(A=A, G=G, updates=1)
    train(optimizer, model, x, y, 5)
    train(torch.optim.SGD(other.parameters(), 0.3, momentum=0.9), other, x, y, 5)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["kfac", "ekfac"])
def test_infinite_damping_is_sgd_at_rate_over_damping(kind):
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)
    ).double()
    other = copy.deepcopy(model)
    x, y = batch((1, 4, 4))
    train(KFAC(model, 0.1e14, 1e14, kind=kind), model, x, y, 3)
    train(torch.optim.SGD(other.parameters(), 0.1), other, x, y, 3)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


def regression(outputs, count=50):
    x = torch.randn(count, 3, dtype=torch.float64) @ torch.randn(3, 3, dtype=torch.float64)
    return x, torch.randn(count, outputs, dtype=torch.float64), nn.Linear(3, outputs).double()


@pytest.mark.parametrize("kind", ["kfac", "ekfac"])
def test_exact_fisher_of_a_linear_gaussian_model_is_newtons_step(kind):
    x, y, model = regression(2)
    optimizer = KFAC(model, 1.0, 0.0, kind=kind, fisher="exact")
    optimizer.observe(lh.Problem(model, "mse", (x, y), batch_size=20))
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    rows = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
    best = torch.linalg.lstsq(rows, y).solution
    torch.testing.assert_close(
        torch.cat([model.weight.T, model.bias[None]]), best, rtol=1e-9, atol=1e-10
    )


def test_monte_carlo_fisher_is_the_natural_gradient_within_its_noise():
    x, y, model = regression(1, count=800)
    optimizer = KFAC(model, 1.0, 0.0, fisher="monte_carlo", seed=1)
    optimizer.observe(lh.Problem(model, "mse", (x, y)))
    F.mse_loss(model(x), y).backward()
    rows = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
    best = torch.linalg.lstsq(rows, y).solution[:, 0]
    start = torch.cat([model.weight[0], model.bias]).detach().clone()
    optimizer.step()
    newton, found = best - start, torch.cat([model.weight[0], model.bias]).detach() - start
    torch.testing.assert_close(found / found.norm(), newton / newton.norm())
    error = (2 / len(x)) ** 0.5  # of the mean square of 800 normal draws
    assert abs(float(newton.norm() / found.norm()) - 1) < 4 * error


def test_exact_and_empirical_moments_agree_with_the_operator():
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(32, 3)
    ).double()
    x, y = batch((1, 4, 4), 7)
    problem = lh.Problem(model, "cross_entropy", (x, y), batch_size=7)
    exact = KFAC(model, 0.0, fisher="exact")
    exact.observe(problem)
    recorded = KFAC(model, 0.0)
    train(recorded, model, x, y)
    for kind, optimizer in (("exact", exact), ("empirical", recorded)):
        for name, block in lh.kfac(problem, kind=kind).blocks.items():
            state = optimizer.state[model[int(name)].weight]
            torch.testing.assert_close(state["A"], block.A)
            torch.testing.assert_close(state["G"], block.G)


def test_a_layer_called_twice_counts_its_samples_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(torch.tanh(self.layer(x)))

    model = Twice().double()
    x, y = batch((4,), 6, 4)
    optimizer = KFAC(model, 0.0)
    train(optimizer, model, x, y)
    first = model.layer(x).detach().requires_grad_()
    second = model.layer(torch.tanh(first))
    g1, g2 = (6 * g for g in torch.autograd.grad(F.cross_entropy(second, y), (first, second)))
    one = torch.ones(6, 1, dtype=torch.float64)
    a1, a2 = torch.cat([x, one], 1), torch.cat([torch.tanh(first).detach(), one], 1)
    state = optimizer.state[model.layer.weight]
    torch.testing.assert_close(state["A"][0], (a1.T @ a1 + a2.T @ a2) / 12)
    torch.testing.assert_close(state["G"][0], (g1.T @ g1 + g2.T @ g2) / 6)


def test_moments_are_averaged_plainly_at_first_and_then_with_decay():
    model = nn.Linear(1, 2, bias=False).double()
    optimizer = KFAC(model, 0.0, decay=0.6, factor_every=1)
    seen = [1.0, 4.0, 2.0, 8.0]
    for size in seen:
        train(
            optimizer, model, torch.full((3, 1), size, dtype=torch.float64), torch.tensor([0, 1, 0])
        )
    expected = (1 + 16) / 2
    for size in seen[2:]:
        expected = 0.6 * expected + 0.4 * size**2  # 1 − 1/3 and 1 − 1/4 lie above the decay
    assert float(optimizer.state[model.weight]["A"]) == pytest.approx(expected)


def test_low_rank_is_exact_where_the_factor_has_that_rank():
    x, y = batch((5,), 12)
    x = x @ torch.randn(5, 40, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(40, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    whole = copy.deepcopy(model)
    optimizer = KFAC(model, 0.1, DAMPING, rank=8, factor_every=1, inverse_every=1)
    train(optimizer, model, x, y, 4)
    assert optimizer.state[model[0].weight]["A_vectors"].shape == (1, 41, 8)
    train(KFAC(whole, 0.1, DAMPING, factor_every=1, inverse_every=1), whole, x, y, 4)
    for one, two in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-7, atol=1e-9)


def test_low_rank_leaves_the_mean_of_the_other_eigenvalues():
    values = torch.cat([torch.tensor([50.0, 20.0, 10.0]), torch.full((20,), 0.5)]).double()
    moment = with_eigenvalues(values)[None]
    state = {
        "A": moment,
        "G": torch.eye(2, dtype=torch.float64)[None] * moment.diagonal(dim1=1, dim2=2).mean(),
    }
    D = torch.randn(2, 23, dtype=torch.float64)
    for _ in range(20):
        refresh(state, DAMPING, 3, False, "layer")
    found = apply(state, D[None], DAMPING)[0]
    torch.testing.assert_close(
        found, dense_direction(moment[0], state["G"][0], D), rtol=1e-8, atol=1e-10
    )


def test_clip_bounds_the_change_in_the_fishers_norm():
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)).double()
    other, loose = copy.deepcopy(model), copy.deepcopy(model)
    x, y = batch((4,))
    free = moved(model, lambda: train(KFAC(model, 0.5, DAMPING), model, x, y))
    total = sum(
        float((0.5 * change * p.grad).sum())
        for change, p in zip(free, model.parameters(), strict=True)
    )
    bound = 0.3 * total  # lr² dᵀg with change = lr d
    clipped = moved(other, lambda: train(KFAC(other, 0.5, DAMPING, kl_clip=bound), other, x, y))
    for one, two in zip(clipped, free, strict=True):
        torch.testing.assert_close(one, 0.3**0.5 * two, rtol=1e-6, atol=1e-9)
    untouched = moved(
        loose, lambda: train(KFAC(loose, 0.5, DAMPING, kl_clip=1.1 * total), loose, x, y)
    )
    for one, two in zip(untouched, free, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("shares", [(None, 0.3), (0.3, None), (0.3, 0.6), (1.1, 0.2), (None, None)])
def test_each_group_is_clipped_by_its_own_bound(shares):
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    other = copy.deepcopy(model)
    x, y = batch((4,))
    free = moved(model, lambda: train(KFAC(model, 0.5, DAMPING), model, x, y))
    changes = [
        float((0.5 * d * p.grad).sum()) for d, p in zip(free, model.parameters(), strict=True)
    ]
    totals = sum(changes[:2]), sum(changes[2:])
    groups = [
        {"params": layer.parameters(), "kl_clip": share and share * total}
        for layer, share, total in zip((other[0], other[2]), shares, totals, strict=True)
    ]
    found = moved(other, lambda: train(KFAC(other, 0.5, DAMPING, parameters=groups), other, x, y))
    for index, (one, two) in enumerate(zip(found, free, strict=True)):
        torch.testing.assert_close(
            one, min(1.0, shares[index // 2] or 1.0) ** 0.5 * two, rtol=1e-6, atol=1e-9
        )
