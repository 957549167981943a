"""KFAC and EKFAC against dense Kronecker products, the dense Gauss–Newton matrix, and curvlinops."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel

from lambdahat.models import mlp
from lambdahat.operators import kronecker_factors
from lambdahat.operators.kronecker import KFAC, ekfac, kfac
from lambdahat.problem import Problem

LOSSES = {"cross_entropy": F.cross_entropy, "mse": F.mse_loss, "bce_with_logits": F.binary_cross_entropy_with_logits}
DAMPING = 0.05
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def data(inputs: tuple[int, ...], outputs: int, loss: str = "cross_entropy", count: int = 7) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, *inputs, dtype=torch.float64)
    if loss == "mse":
        return x, torch.randn(count, outputs, dtype=torch.float64)
    if loss == "bce_with_logits":
        return x, (torch.rand(count, outputs) < 0.5).double()
    return x, torch.randint(outputs, (count,))


def make(model: nn.Module, x: Tensor, y: Tensor, loss: str = "cross_entropy", **options) -> Problem:
    options = {"batch_size": 3, **options}  # 7 samples: two full batches and a short one
    return Problem(model.double(), loss, (x, y), **options)


def curvature_at_output(loss: str, z: Tensor, y: Tensor) -> Tensor:
    """M of one sample, (C, C), by automatic differentiation of the loss."""
    return hessian(lambda output: LOSSES[loss](output[None], y[None]))(z)


def dense_ggn(problem: Problem, loss: str, x: Tensor, y: Tensor) -> Tensor:
    """(1/n) Σ J_iᵀ M_i J_i from per-sample Jacobians."""
    model, space = problem.model, problem.space

    def output(theta: Tensor, sample: Tensor) -> Tensor:
        return functional_call(model, space.unflatten(theta), (sample[None],))[0]

    total = torch.zeros(space.size, space.size, dtype=torch.float64)
    for sample, target in zip(x, y, strict=True):
        J = jacrev(output)(problem.vector, sample)
        total += J.T @ curvature_at_output(loss, output(problem.vector, sample), target) @ J / len(x)
    return total


def explicit_block(
    model: nn.Sequential, at: int, loss: str, x: Tensor, y: Tensor, group: int = 0
) -> tuple[Tensor, Tensor]:
    """(A, G) of layer ``at`` of a sequential model, in one group, from Jacobians of the layer and of what follows it.

    The inputs at an output position are the derivative of that output by the weight's row, so that nothing is unfolded.
    """
    layer, before, after = model[at], model[:at], model[at + 1 :]
    groups = getattr(layer, "groups", 1)
    rows = range(group * len(layer.weight) // groups, (group + 1) * len(layer.weight) // groups)
    axis = -1 if isinstance(layer, nn.Linear) else 0
    A: Tensor | float = 0.0
    G: Tensor | float = 0.0
    for sample, target in zip(x, y, strict=True):
        h = before(sample[None]).detach()
        named = dict(layer.named_parameters())
        out = layer(h)[0].detach()

        def row_zero(parameters, h=h):
            return functional_call(layer, parameters, (h,))[0].movedim(axis, 0)[rows[0]].reshape(-1)

        jacobian = jacrev(row_zero)(named)
        parts = [jacobian["weight"][:, rows[0]].flatten(1)]
        if "bias" in named:
            parts.append(jacobian["bias"][:, rows[0], None])
        a = torch.cat(parts, dim=1)  # (R, n)
        J = jacrev(lambda out: after(out[None])[0])(out)  # (C, *out)
        M = curvature_at_output(loss, after(out[None])[0], target)
        J = J.movedim(axis if axis == -1 else 1, 1)[:, list(rows)].reshape(len(J), len(rows), -1)  # (C, m, R)
        A = A + a.T @ a / len(a) / len(x)
        G = G + torch.einsum("cmr,cd,dor->mo", J, M, J) / len(x)
    return A.detach().contiguous(), G.detach().contiguous()


def relative(found: Tensor, true: Tensor) -> float:
    return float((found - true).norm() / true.norm())


def deterministic_vectors(problem: Problem, columns: int = 5) -> Tensor:
    return torch.randn(problem.num_parameters, columns, dtype=torch.float64)


def layer_matrix(K: KFAC, label: str, names: list[str]) -> Tensor:
    """K's own submatrix of a layer, from products, in the order of [W | b] by rows."""
    whole = K.dense()
    space = K.space
    parts = [torch.arange(s.start, s.stop).reshape(space.shapes[space.names.index(n)][0], -1)
             for n, s in space.slices.items() if n in names]  # fmt: skip
    order = torch.cat(parts, dim=1).reshape(-1)
    return whole[order][:, order]


MODELS = {
    "mlp": (lambda: mlp([4, 5, 3], "tanh"), (4,), (0, 2)),
    "no bias": (lambda: nn.Sequential(nn.Linear(4, 5, bias=False), nn.ReLU(), nn.Linear(5, 3)), (4,), (0, 2)),
    "sequence": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2), nn.Flatten(), nn.Linear(10, 3)),
        (5, 4),
        (0, 2, 4),
    ),
    "conv1d": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 3, 3, stride=2, padding=1, dilation=2), nn.Tanh(), nn.Flatten(), nn.Linear(9, 3)
        ),
        (2, 8),
        (0, 3),
    ),
    "conv2d": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0)),
            nn.ReLU(inplace=True),
            nn.Conv2d(3, 2, 2, bias=False, padding="same"),
            nn.Tanh(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(8, 3),
        ),
        (2, 5, 4),
        (0, 2, 6),
    ),
    "circular": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(32, 3)),
        (1, 4, 4),
        (0, 2),
    ),
    "conv3d": (
        lambda: nn.Sequential(nn.Conv3d(1, 2, 2, dilation=(1, 2, 1)), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)),
        (1, 3, 4, 3),
        (0, 3),
    ),
}


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("loss", LOSSES)
def test_product_is_that_of_the_dense_kronecker_product(case: str, loss: str) -> None:
    build, shape, layers = MODELS[case]
    model = build().double()
    x, y = data(shape, 3, loss)
    problem = make(model, x, y, loss)
    K = kfac(problem)
    assert K.psd
    assert K.symmetric
    plain = copy.deepcopy(model)
    for layer in plain:
        if isinstance(layer, nn.ReLU):
            layer.inplace = False
    expected = torch.zeros(K.dim, K.dim, dtype=torch.float64)
    for at in layers:
        A, G = explicit_block(plain, at, loss, x, y)
        names = [f"{at}.{name}" for name, _ in plain[at].named_parameters()]
        where = problem.space.slices
        parts = [torch.arange(where[n].start, where[n].stop).reshape(len(plain[at].weight), -1) for n in names]
        order = torch.cat(parts, dim=1).reshape(-1)
        expected[order[:, None], order] = torch.kron(G, A)
    V = deterministic_vectors(problem)
    before = K.matvecs
    assert relative(K @ V, expected @ V) < 1e-9
    assert K.matvecs - before == 5
    assert relative(K @ V[:, 0], expected @ V[:, 0]) < 1e-9


def test_groups_have_a_kronecker_product_each() -> None:
    model = nn.Sequential(nn.Conv2d(4, 6, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(24, 3)).double()
    x, y = data((4, 3, 3), 3)
    K = kfac(make(model, x, y))
    found = layer_matrix(K, "0", ["0.weight", "0.bias"])
    blocks = [torch.kron(G, A) for A, G in (explicit_block(model, 0, "cross_entropy", x, y, g) for g in range(2))]
    assert relative(found, torch.block_diag(*blocks)) < 1e-9
    assert K.structure()["0"] == "kronecker 3×3 ⊗ 9×9, in each of 2 groups"


def test_one_sample_makes_every_layer_exact() -> None:
    x, y = data((4,), 3, count=1)
    problem = make(mlp([4, 5, 3], "tanh"), x, y)
    F_dense = dense_ggn(problem, "cross_entropy", x, y)
    K = kfac(problem)
    for names in problem.space.layers().values():
        where = problem.space.indices(names)
        assert relative(K.dense()[where][:, where], F_dense[where][:, where]) < 1e-12


def test_deep_linear_network_with_square_loss_is_exact_in_each_layer() -> None:
    x, y = data((4,), 2, "mse", count=9)
    problem = make(mlp([4, 3, 2], "identity"), x, y, "mse")
    F_dense, K = dense_ggn(problem, "mse", x, y), kfac(problem).dense()
    for names in problem.space.layers().values():
        where = problem.space.indices(names)
        assert relative(K[where][:, where], F_dense[where][:, where]) < 1e-12


class Mixed(nn.Module):
    """An embedding, a norm, a loose parameter, a convolution and linear layers; ``tied`` shares a weight."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.randn(4))
        self.mix = nn.Conv1d(4, 4, 3, padding=1, groups=2)
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.norm(self.embed(tokens)) * self.scale
        h = self.mix(h.transpose(1, 2)).transpose(1, 2)
        return self.head(torch.tanh(self.hidden(h)).mean(dim=1))


def mixed_problem(tied: bool) -> tuple[Problem, Tensor, Tensor]:
    x, y = torch.randint(6, (7, 5)), torch.randint(6, (7,))
    return make(Mixed(tied), x, y), x, y


@pytest.mark.parametrize("tied", [False, True])
def test_other_parameters_keep_the_exact_diagonal(tied: bool) -> None:
    problem, x, y = mixed_problem(tied)
    K, F_dense = kfac(problem), dense_ggn(problem, "cross_entropy", x, y)
    loose = {"embed.weight": "diagonal (tied)" if tied else "diagonal (not in a linear or convolution layer)"}
    loose |= dict.fromkeys(("norm.weight", "norm.bias", "scale"), "diagonal (not in a linear or convolution layer)")
    structure = K.structure()
    assert {name: text for name, text in structure.items() if text.startswith("diagonal")} == loose
    assert set(structure) - set(loose) == ({"mix", "hidden"} if tied else {"mix", "hidden", "head"})
    where = problem.space.indices(list(loose))
    block = K.dense()[where][:, where]
    assert relative(block, torch.diag(F_dense.diagonal()[where])) < 1e-9


def test_diagonal_is_the_same_where_vmap_cannot_go(monkeypatch: pytest.MonkeyPatch) -> None:
    class Branching(Mixed):
        def forward(self, tokens: Tensor) -> Tensor:
            out = super().forward(tokens)
            return out if float(out.detach().sum()) < 1e9 else -out  # a Python number from data

    problem, x, y = mixed_problem(False)
    branching = Branching()
    branching.load_state_dict(problem.model.state_dict())
    same = kfac(make(branching, x, y))
    V = deterministic_vectors(problem)
    assert relative(same @ V, kfac(problem) @ V) < 1e-12
    monkeypatch.setattr(kronecker_factors, "_squares_by_vmap", lambda *_: pytest.fail("vmap was used"))
    with pytest.raises(pytest.fail.Exception):
        kfac(problem)


def test_batch_norm_in_eval_and_frozen_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    x, y = data((4,), 3)
    problem = make(model, x, y)
    F_dense, K = dense_ggn(problem, "cross_entropy", x, y), kfac(problem)
    where = problem.space.indices(["1.weight", "1.bias"])
    assert relative(K.dense()[where][:, where], torch.diag(F_dense.diagonal()[where])) < 1e-9
    assert set(kfac(make(model, x, y, norm="frozen")).structure()) == {"0", "3"}
    with pytest.raises(ValueError, match=r"norm must be .*refresh_statistics"):
        kfac(make(model, x, y, norm="train"))


@pytest.mark.parametrize("build", [kfac, ekfac])
def test_inverse_and_spectrum_are_those_of_the_dense_matrix(build) -> None:
    problem, _, _ = mixed_problem(False)
    K = build(problem)
    D = K.dense()
    eye = torch.eye(K.dim, dtype=torch.float64)
    assert relative(D, D.T) < 1e-14
    assert relative(K.inverse(DAMPING).dense(), torch.linalg.inv(D + DAMPING * eye)) < 1e-9
    assert K.logdet(DAMPING) == pytest.approx(float(torch.linalg.slogdet(D + DAMPING * eye)[1]), rel=1e-12)
    assert relative(K.eigenvalues(), torch.linalg.eigvalsh(D)) < 1e-12
    assert relative(K.known_diagonal(), D.diagonal()) < 1e-12
    assert K.known_trace() == pytest.approx(float(D.trace()), rel=1e-12)
    for label, block in K.blocks.items():
        where = block.indices.reshape(-1)
        assert relative(block.dense(), D[where][:, where]) < 1e-12, label


def test_without_damping_a_singular_operator_says_so() -> None:
    x, y = data((4,), 3, count=2)  # two samples cannot span five inputs
    K = kfac(make(mlp([4, 3], "tanh"), x, y))
    assert K.logdet() == -math.inf
    with pytest.raises(ValueError, match=r"damping must make the operator positive definite, got 0.0.*raise damping"):
        K.inverse(0.0)
    with pytest.raises(ValueError, match="damping must be a finite number of at least 0"):
        K.logdet(-1.0)


def test_undamped_inverse_where_there_is_one() -> None:
    x, y = data((3,), 2, "mse", count=12)
    K = kfac(make(mlp([3, 2], "identity"), x, y, "mse"))
    eye = torch.eye(K.dim, dtype=torch.float64)
    assert relative(K.inverse(0.0) @ (K @ eye), eye) < 1e-10
    assert K.logdet() == pytest.approx(float(K.dense().logdet()), rel=1e-12)


def test_factored_damping_is_that_of_martens_and_grosse() -> None:
    x, y = data((4,), 3)
    problem = make(mlp([4, 5, 3], "tanh"), x, y)
    K = kfac(problem)
    inverse = K.inverse(DAMPING, factored=True).dense()
    for block in K.blocks.values():
        A, G = block.A[0], block.G[0]
        pi = ((A.trace() / len(A)) / (G.trace() / len(G))).sqrt()
        eyes = torch.eye(len(A)).double(), torch.eye(len(G)).double()
        expected = torch.kron(torch.linalg.inv(G + math.sqrt(DAMPING) / pi * eyes[1]),
                              torch.linalg.inv(A + math.sqrt(DAMPING) * pi * eyes[0]))  # fmt: skip
        where = block.indices.reshape(-1)
        assert relative(inverse[where][:, where], expected) < 1e-9
    with pytest.raises(ValueError, match="factored must be False for EKFAC"):
        ekfac(problem).inverse(DAMPING, factored=True)


@pytest.mark.parametrize("case", MODELS)
def test_ekfac_has_the_fishers_diagonal_in_the_kronecker_eigenbasis(case: str) -> None:
    build, shape, _ = MODELS[case]
    model = build()
    x, y = data(shape, 3)
    problem = make(model, x, y)
    for layer in problem.model.modules():
        if isinstance(layer, nn.ReLU):
            layer.inplace = False
    F_dense = dense_ggn(problem, "cross_entropy", x, y)
    plain, corrected = kfac(problem), ekfac(problem)
    gain = 0.0
    for label, block in corrected.blocks.items():
        where = block.indices.reshape(-1)
        own = F_dense[where][:, where]
        U = torch.kron(block.basis[3][0], block.basis[1][0])
        assert relative(block.values.reshape(-1), (U.T @ own @ U).diagonal()) < 1e-9, label
        gain += float((own - plain.blocks[label].dense()).norm() - (own - block.dense()).norm())
    assert (F_dense - corrected.dense()).norm() <= (F_dense - plain.dense()).norm()
    assert gain > 0
    assert corrected.known_trace() == pytest.approx(float(F_dense.trace()), rel=1e-10)  # a basis change keeps the trace


def test_ekfac_of_grouped_and_repeated_layers_keeps_the_trace() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(4, 4, 3, padding=1, groups=2)
            self.head = nn.Linear(20, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.conv(torch.tanh(self.conv(x)))).flatten(1))

    x, y = data((4, 5), 3)
    problem = make(Twice(), x, y)
    K = ekfac(problem)
    assert all(text.startswith("kronecker") for text in K.structure().values())
    F_dense = dense_ggn(problem, "cross_entropy", x, y)
    assert K.known_trace() == pytest.approx(float(F_dense.trace()), rel=1e-10)
    assert (F_dense - K.dense()).norm() <= (F_dense - kfac(problem).dense()).norm()


def test_chunks_do_not_change_the_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    build, shape, _ = MODELS["conv2d"]
    problem = make(build(), *data(shape, 3), batch_size=7)
    V = deterministic_vectors(problem)
    whole = kfac(problem) @ V, ekfac(problem) @ V
    monkeypatch.setattr(kronecker_factors, "CHUNK_ELEMENTS", 1)
    assert relative(kfac(problem) @ V, whole[0]) < 1e-12
    assert relative(ekfac(problem) @ V, whole[1]) < 1e-12


def test_empirical_uses_the_datas_own_labels() -> None:
    x, y = data((4,), 3)
    problem = make(mlp([4, 3], "identity"), x, y)
    z = problem.model(x).detach()
    g = z.softmax(dim=1) - F.one_hot(y, 3)
    a = torch.cat([x, torch.ones(7, 1)], dim=1)
    found = layer_matrix(kfac(problem, kind="empirical"), "0", ["0.weight", "0.bias"])
    assert relative(found, torch.kron(g.T @ g / 7, a.T @ a / 7)) < 1e-12


@pytest.mark.parametrize("loss", LOSSES)
def test_monte_carlo_is_unbiased_in_its_trace_and_fixed_by_its_seed(loss: str) -> None:
    problem = make(mlp([4, 5, 3], "tanh"), *data((4,), 3, loss), loss, batch_size=7)
    exact = kfac(problem).known_trace()
    traces = torch.tensor([kfac(problem, kind="monte_carlo", seed=seed).known_trace() for seed in range(100)])
    assert abs(float(traces.mean()) - exact) < 4 * float(traces.std()) / 10
    assert float(traces.std()) > 0
    V = deterministic_vectors(problem)
    again = kfac(problem, kind="monte_carlo", seed=1)
    assert torch.equal(again @ V, kfac(problem, kind="monte_carlo", seed=1) @ V)
    assert ekfac(problem, kind="monte_carlo", samples=400).known_trace() == pytest.approx(exact, rel=0.1)


def test_only_chosen_parameters_are_in_it() -> None:
    x, y = data((4,), 3)
    model = mlp([4, 5, 3], "tanh")
    whole = kfac(make(model, x, y))
    G = whole.blocks["0"].G[0]
    bias = kfac(make(model, x, y, parameters="0.bias"))
    assert relative(bias.dense(), G) < 1e-12
    weight = kfac(make(model, x, y, parameters="0.weight"))
    assert relative(weight.dense(), torch.kron(G, whole.blocks["0"].A[0, :-1, :-1])) < 1e-12


def test_weight_used_outside_its_layer_gets_the_exact_diagonal() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = nn.MultiheadAttention(4, 2, batch_first=True)  # reads out_proj.weight, never calls out_proj
            self.again = nn.Linear(4, 4)
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.attend(x, x, x, need_weights=False)[0]
            return self.head((self.again(h) @ self.again.weight).mean(dim=1))

    x, y = data((5, 4), 3)
    problem = make(Attention(), x, y)
    K = kfac(problem)
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernel has no batching rule for jacrev
        F_dense = dense_ggn(problem, "cross_entropy", x, y)
    reason = "diagonal (not used through its layer alone)"
    assert {K.structure()[name] for name in ("attend.out_proj.weight", "again.weight", "again.bias")} == {reason}
    assert K.structure()["head"].startswith("kronecker")
    where = problem.space.indices([name for name in problem.space.names if not name.startswith("head")])
    assert relative(K.dense()[where][:, where], torch.diag(F_dense.diagonal()[where])) < 1e-9


def test_the_model_is_left_alone_even_after_an_error() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls_left = nn.Linear(4, 3), 100

        def forward(self, x: Tensor) -> Tensor:
            self.calls_left -= 1
            if self.calls_left < 0:
                raise KeyboardInterrupt
            return self.layer(x)

    model = Fails()
    problem = make(model, *data((4,), 3))
    before = copy.deepcopy(model.state_dict())
    kfac(problem)
    problem.model.calls_left = 2  # the probe and one batch, then the interruption
    with pytest.raises(KeyboardInterrupt):
        kfac(problem)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    for module in (*model.modules(), *problem.model.modules()):
        assert not module._forward_hooks


def test_training_afterwards_does_not_change_it() -> None:
    model = mlp([4, 3])
    K = kfac(make(model, *data((4,), 3)))
    before = K.dense()
    with torch.no_grad():
        model[0].weight.add_(1.0)
    assert torch.equal(before, K.dense())


def test_single_precision_and_bfloat16_have_float32_factors() -> None:
    x, y = data((4,), 3)
    model = mlp([4, 5, 3], "tanh")
    exact = kfac(make(model, x, y))
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        K = kfac(Problem(copy.deepcopy(model).to(dtype), "cross_entropy", (x.to(dtype), y), batch_size=3))
        assert K.dtype == torch.float32
        assert relative(K.dense().double(), exact.dense()) < tolerance
        assert K.logdet(DAMPING) == pytest.approx(exact.logdet(DAMPING), rel=tolerance)


def test_sequences_of_logits_by_monte_carlo() -> None:
    x, y = torch.randint(6, (4, 5)), torch.randint(6, (4, 5))
    problem = make(nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 6)), x, y)
    with pytest.raises(ValueError, match=r'kind must be "monte_carlo" or "empirical" for the loss'):
        kfac(problem)
    loss = torch.nn.CrossEntropyLoss()
    z = problem.model(x).detach().reshape(-1, 6)
    h = hessian(lambda z: loss(z, y.reshape(-1)))(z)
    trace_M = float(torch.einsum("rcrc->", h))  # head bias: its Fisher's trace is that of M over all positions
    found = [
        float(kfac(problem, kind="monte_carlo", samples=4, seed=seed).blocks["1"].G[0].trace()) for seed in range(40)
    ]
    mean, error = torch.tensor(found).mean(), torch.tensor(found).std() / math.sqrt(40)
    assert abs(float(mean) - trace_M) < 4 * float(error)


def test_misuse_is_named() -> None:
    x, y = data((4,), 3)
    problem = make(mlp([4, 3]), x, y)
    with pytest.raises(ValueError, match="kind must be one of 'exact'"):
        kfac(problem, kind="type-2")
    with pytest.raises(ValueError, match=r"samples must be left out unless kind is \"monte_carlo\""):
        kfac(problem, samples=3)
    with pytest.raises(TypeError, match="problem must be made of a model and a loss"):
        kfac(Problem.from_function(lambda p: p["w"].square().sum(), {"w": torch.ones(2)}))

    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.layer(x.transpose(0, 1))).mean(dim=0))

    sequences = make(TimeFirst(), *data((5, 4), 3))
    assert kfac(sequences).structure()["layer"].startswith("kronecker")
    with pytest.raises(ValueError, match="the input of layer 'layer' must have the 3 samples first"):
        ekfac(sequences)


@pytest.mark.oracle
@pytest.mark.parametrize("case", ["mlp", "cnn"])
@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_agrees_with_curvlinops(case: str, loss: str) -> None:
    curvlinops = pytest.importorskip("curvlinops")
    model, shape = mlp([4, 5, 3], "tanh").double(), (4,)
    if case == "cnn":
        conv = (
            nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0)),
            nn.ReLU(),
            nn.Conv2d(3, 2, 2, dilation=2, bias=False),
        )
        model, shape = nn.Sequential(*conv, nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)).double(), (2, 7, 5)
    x, y = data(shape, 3, loss, count=6)
    problem = make(model, x, y, loss)
    their_loss = nn.CrossEntropyLoss() if loss == "cross_entropy" else nn.MSELoss()
    parameters = list(model.parameters())
    batches = [(x[:3], y[:3]), (x[3:], y[3:])]
    V = deterministic_vectors(problem)
    columns = [part.movedim(0, -1) for part in problem.space.split(V.T.contiguous())]
    for ours, theirs in ((kfac, "KFACLinearOperator"), (ekfac, "EKFACLinearOperator")):
        for kind, name in (("exact", "type-2"), ("empirical", "empirical")):
            peer = getattr(curvlinops, theirs)(
                model, their_loss, parameters, batches, fisher_type=name, separate_weight_and_bias=False,
                check_deterministic=False,
            )  # fmt: skip
            expected = torch.cat([part.flatten(0, -2).detach() for part in peer @ columns])
            scale = 3.0 if loss == "mse" and kind == "empirical" else 1.0
            # curvlinops scales the empirical gradients of a mean square by √C; a sample's gradient has no such factor
            assert relative(scale * (ours(problem, kind=kind) @ V), expected) < 1e-9, (theirs, kind)


@pytest.mark.gpu
def test_the_same_on_cuda() -> None:
    problem, x, y = mixed_problem(False)
    on_gpu = Problem(problem.model, "cross_entropy", (x, y), batch_size=3, device="cuda")
    V = deterministic_vectors(problem)
    for build in (kfac, ekfac):
        assert relative((build(on_gpu) @ V.cuda()).cpu(), build(problem) @ V) < 1e-9
        assert relative((build(on_gpu).inverse(DAMPING) @ V.cuda()).cpu(), build(problem).inverse(DAMPING) @ V) < 1e-9
