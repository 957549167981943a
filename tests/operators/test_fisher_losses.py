"""Gauss–Newton, Fishers, KFAC and EKFAC of losses with options, against dense float64 matrices.

The reference knows nothing of batches, factors or closed forms: with z the outputs of all samples
and J their Jacobian, the Gauss–Newton matrix is Jᵀ (∂²L/∂z²) J for torch's own loss L of all data.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev

import lambdahat as lh
from tests.operators.kronecker_cases import relative

WEIGHTS = torch.tensor([0.3, 1.0, 2.5], dtype=torch.float64)
OPTIONS = nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2, ignore_index=1)


class Attention(nn.Module):
    """A language model whose positions see each other; classes last."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        scores = (self.mix(h) @ h.mT).softmax(-1)
        return self.head(torch.tanh(scores @ h))


class Pair(nn.Module):
    """Means and variances as a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.mean, self.spread = nn.Linear(4, 5), nn.Linear(5, 2), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return self.mean(h), F.softplus(self.spread(h)) + 0.1


def flat(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs))


def image(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, outputs, 1))


def seeded(build: Any, *args: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build(*args).double()


def draws(name: str, count: int = 7) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(count, 4, generator=rng, dtype=torch.float64)
    y = torch.randint(3, (count,), generator=rng)
    if name == "image":
        x = torch.randn(count, 2, 3, 2, generator=rng, dtype=torch.float64)
        y = torch.randint(3, (count, 3, 2), generator=rng)
    if name == "language":
        x, y = (
            torch.randint(6, (count, 4), generator=rng),
            torch.randint(3, (count, 4), generator=rng),
        )
    return x, y


def some_ignored(y: Tensor, mark: int = -100) -> Tensor:
    y = y.clone()
    y.view(-1)[::3] = mark
    return y


def binary(shape: tuple[int, ...]) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.4).double()


X, Y = draws("flat")
IMAGES, MASKS = draws("image")
TOKENS, TAGS = draws("language")
# name: model, loss, inputs, targets, whether the classes come last
CASES: dict[str, tuple[Any, Any, Tensor, Tensor, bool]] = {
    "smoothed": ((flat, 3), nn.CrossEntropyLoss(label_smoothing=0.3), X, Y, False),
    "class weights": ((flat, 3), nn.CrossEntropyLoss(weight=WEIGHTS), X, Y, False),
    "ignore_index": ((flat, 3), nn.CrossEntropyLoss(ignore_index=2), X, Y, False),
    "all options": ((flat, 3), OPTIONS, X, Y, False),
    "pos_weight": ((flat, 3), nn.BCEWithLogitsLoss(pos_weight=WEIGHTS), X, binary((7, 3)), False),
    "pos_weight of images": (
        (image, 2),
        nn.BCEWithLogitsLoss(pos_weight=WEIGHTS[:2, None, None]),
        IMAGES,
        binary((7, 2, 3, 2)),
        False,
    ),
    "segmentation": ((image, 3), nn.CrossEntropyLoss(), IMAGES, MASKS, False),
    "segmentation, all options": ((image, 3), OPTIONS, IMAGES, some_ignored(MASKS, 1), False),
    "language": ((Attention,), nn.CrossEntropyLoss(), TOKENS, TAGS, True),
    "language, padded": (
        (Attention,),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        TOKENS,
        some_ignored(TAGS),
        True,
    ),
    "images, mean square": ((image, 2), nn.MSELoss(), IMAGES, binary((7, 2, 3, 2)), False),
    "huber": ((flat, 3), nn.HuberLoss(delta=10.0), X, binary((7, 3)), False),
}


def parts(case: str) -> tuple[nn.Module, Any, Tensor, Tensor, bool]:
    build, loss, x, y, last = CASES[case]
    return seeded(*build), loss, x, y, last


def outputs(model: nn.Module, space: Any, theta: Tensor, x: Tensor) -> Tensor:
    z = functional_call(model, space.unflatten(theta), (x,))
    return torch.cat([part.flatten(1) for part in z], dim=1) if isinstance(z, tuple) else z


def dense(
    problem: lh.Problem, model: nn.Module, loss: Any, x: Tensor, y: Tensor, last: bool
) -> Tensor:
    """Jᵀ (∂²L/∂z²) J over all data at once."""
    space, theta = problem.space, problem.vector
    z = outputs(model, space, theta, x).detach()
    J = jacrev(lambda t: outputs(model, space, t, x))(theta).reshape(-1, len(theta))
    H = hessian(lambda z: loss(z.movedim(-1, 1) if last else z, y))(z).reshape(z.numel(), z.numel())
    return J.T @ H @ J


@pytest.mark.parametrize("case", CASES)
def test_gauss_newton_and_exact_fisher(case: str) -> None:
    model, loss, x, y, last = parts(case)
    problem = lh.Problem(model, loss, (x, y), batch_size=3)
    truth = dense(problem, model, loss, x, y, last)
    G = lh.ggn(problem)
    assert relative(G.dense(), truth) < 1e-12
    assert relative(lh.diagonal(G).value, truth.diagonal()) < 1e-10
    if case != "huber":
        assert relative(lh.fisher(problem).dense(), truth) < 1e-12
        assert G.psd


# each loss and each shape of the output once, with all options of a loss at a time
DRAWN = [
    "all options",
    "pos_weight of images",
    "segmentation, all options",
    "language, padded",
    "images, mean square",
]


@pytest.mark.parametrize("case", DRAWN)
def test_monte_carlo_fisher_has_the_exact_one_for_its_mean(case: str) -> None:
    model, loss, x, y, last = parts(case)
    problem = lh.Problem(model, loss, (x, y), batch_size=3)
    truth = dense(problem, model, loss, x, y, last)
    v = torch.randn(
        problem.num_parameters, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    found = torch.tensor(
        [float(v @ (lh.fisher(problem, "monte_carlo", seed=seed) @ v)) for seed in range(60)]
    )
    assert abs(float(found.mean()) - float(v @ truth @ v)) < 4 * float(found.std()) / math.sqrt(60)


def blocks(
    problem: lh.Problem, truth: Tensor, K: lh.operators.kronecker.KFAC
) -> dict[str, tuple[Tensor, Tensor]]:
    """Each layer's block of KFAC in the order of its matrix [W | b], and the same block of the
    dense Fisher.
    """
    whole, found = K.dense(), {}
    for name, block in K.blocks.items():
        where = block.indices.reshape(-1)
        found[name] = whole[where][:, where], truth[where][:, where]
    return found


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("case", CASES)
def test_ekfac_is_the_dense_fishers_diagonal_in_its_basis(case: str, sharing: str) -> None:
    model, loss, x, y, last = parts(case)
    problem = lh.Problem(model, loss, (x, y), batch_size=3)
    truth = dense(problem, model, loss, x, y, last)
    K, E = lh.kfac(problem, sharing=sharing), lh.ekfac(problem, sharing=sharing)
    assert E.known_trace() == pytest.approx(float(truth.trace()), rel=1e-10)
    for name, (ours, own) in blocks(problem, truth, E).items():
        block = E.blocks[name]
        if isinstance(block, lh.operators.kronecker.DiagonalBlock):
            assert relative(block.values, own.diagonal()) < 1e-10, name
            continue
        U = torch.kron(block.basis[3][0], block.basis[1][0])
        assert relative(ours, U @ torch.diag((U.T @ own @ U).diagonal()) @ U.T) < 1e-9, name
    assert (truth - E.dense()).norm() <= (truth - K.dense()).norm() * (1 + 1e-12)


@pytest.mark.parametrize("batch_size", [7, 3])
@pytest.mark.parametrize("case", CASES)
def test_empirical_fisher_is_made_of_parts_of_the_whole_mean(case: str, batch_size: int) -> None:
    """g_i = n ∂L/∂z_i J_i with L the loss of all data, whatever the batches."""
    model, loss, x, y, last = parts(case)
    problem = lh.Problem(model, loss, (x, y), batch_size=batch_size)
    space, theta = problem.space, problem.vector
    z = outputs(model, space, theta, x).detach().requires_grad_()
    (slope,) = torch.autograd.grad(loss(z.movedim(-1, 1) if last else z, y), z)
    J = jacrev(lambda t: outputs(model, space, t, x))(theta).flatten(1, -2)  # (n, D, P)
    g = len(x) * torch.einsum("nd,ndp->np", slope.flatten(1), J)
    second = g.T @ g / len(x)
    assert relative(lh.fisher(problem, "empirical").dense(), second) < 1e-12
    assert lh.trace(lh.fisher(problem, "empirical")).value == pytest.approx(
        float(second.trace()), rel=1e-10
    )
    covariance = torch.cov(g.T, correction=0)
    assert relative(lh.gradient_covariance(problem).dense(), covariance) < 1e-10
    assert lh.ekfac(problem, kind="empirical").known_trace() == pytest.approx(
        float(second.trace()), rel=1e-10
    )


@pytest.mark.parametrize(
    "case", ["all options", "pos_weight", "class weights", "smoothed", "ignore_index", "huber"]
)
def test_kfac_of_the_last_layer_is_the_product_of_the_dense_moments(case: str) -> None:
    """The last layer's output gradients are the factors of M: G is the mean of M over samples."""
    model, loss, x, y, _ = parts(case)
    problem = lh.Problem(model, loss, (x, y), batch_size=3)
    z = model(x).detach()
    H = hessian(lambda z: loss(z, y))(z)
    G = torch.einsum("bibj->ij", H)  # Σ_i ∂²L/∂z_i², the mean of M
    a = torch.cat([model[:-1](x), torch.ones(len(x), 1)], dim=1).detach()
    block = lh.kfac(problem).blocks["2"]
    assert relative(block.G[0], G) < 1e-12
    assert relative(block.A[0], a.T @ a / len(x)) < 1e-12


@pytest.mark.parametrize("case", CASES)
def test_kfac_does_not_depend_on_the_batches(case: str) -> None:
    model, loss, x, y, _ = parts(case)
    whole, cut = (
        lh.kfac(lh.Problem(model, loss, (x, y), batch_size=size)).dense() for size in (7, 2)
    )
    assert relative(cut, whole) < 1e-12


def gaussian(form: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A model of means and variances, and the Jacobian and Fisher's square root that a user
    would write down.
    """
    rng = torch.Generator().manual_seed(4)
    x, y = (torch.randn(7, width, generator=rng, dtype=torch.float64) for width in (4, 2))
    return seeded(Pair) if form == "pair" else seeded(flat, 4), x, y


@pytest.mark.parametrize("form", ["pair", "tensor"])
def test_fishers_of_gaussian_nll(form: str) -> None:
    """The expectation over targets of the gradients' outer products, by Gauss–Hermite quadrature
    for each number.
    """
    model, x, y = gaussian(form)
    problem = lh.Problem(model, "gaussian_nll", (x, y), batch_size=3)
    space, theta = problem.space, problem.vector
    points, weights = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(7))
    weights = weights / weights.sum()
    truth = torch.zeros(len(theta), len(theta), dtype=torch.float64)
    for sample in x:

        def moments(t: Tensor, sample: Tensor = sample) -> tuple[Tensor, Tensor]:
            z = functional_call(model, space.unflatten(t), (sample[None],))
            mean, variance = z if isinstance(z, tuple) else (z[:, :2], z[:, 2:].exp())
            return mean[0], variance[0]

        mean, variance = (part.detach() for part in moments(theta))
        for d in range(2):

            def term(t: Tensor, target: Tensor, d: int = d) -> Tensor:
                m, v = moments(t)
                return 0.5 * (v[d].log() + (target - m[d]).square() / v[d])

            for point, weight in zip(points, weights, strict=True):
                slope = jacrev(term)(theta, mean[d] + variance[d].sqrt() * point)
                # the mean over two numbers a sample
                truth += weight * torch.outer(slope, slope) / 2 / len(x)
    exact = lh.fisher(problem)
    assert exact.psd
    assert relative(exact.dense(), truth) < 1e-10
    assert lh.trace(
        exact, method="exact" if form == "tensor" else "auto", tol=1e-3
    ).value == pytest.approx(float(truth.trace()), rel=1e-3 if form == "pair" else 1e-10)
    E = lh.ekfac(problem)
    assert E.known_trace() == pytest.approx(float(truth.trace()), rel=1e-10)
    v = torch.randn(len(theta), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    for drawn in (
        lambda seed: lh.fisher(problem, "monte_carlo", seed=seed),
        lambda seed: lh.fisher(problem, "monte_carlo", seed=seed, mode="forward"),
    ):
        found = torch.tensor([float(v @ (drawn(seed) @ v)) for seed in range(60)])
        assert abs(float(found.mean()) - float(v @ truth @ v)) < 4 * float(found.std()) / math.sqrt(
            60
        )


@pytest.mark.parametrize("form", ["pair", "tensor"])
def test_kfac_of_gaussian_nll_with_one_sample_is_exact_in_the_last_layers(form: str) -> None:
    model, x, y = gaussian(form)
    problem = lh.Problem(model, "gaussian_nll", (x[:1], y[:1]))
    F_dense = lh.fisher(problem).dense()
    for name, (ours, own) in blocks(problem, F_dense, lh.kfac(problem)).items():
        assert relative(ours, own) < 1e-12, name
    empirical = lh.fisher(problem, "empirical").dense()
    for name, (ours, own) in blocks(problem, empirical, lh.kfac(problem, kind="empirical")).items():
        assert relative(ours, own) < 1e-12, name


def test_the_trace_of_a_monte_carlo_fisher_of_many_samples_is_its_own() -> None:
    model, loss, x, y, _ = parts("class weights")
    F_mc = lh.fisher(lh.Problem(model, loss, (x, y)), "monte_carlo", samples=200)
    assert lh.trace(F_mc, method="exact").value == pytest.approx(
        float(F_mc.dense().trace()), rel=1e-10
    )


def test_refusals_name_the_cure() -> None:
    x, y = X, binary((7, 3))
    concave = lh.Problem(
        seeded(flat, 3), lambda z, t: (z * t).cos().mean() + z.square().mean() * 1e-3, (x, y)
    )
    with pytest.raises(
        ValueError, match=r'loss must be convex in the model\'s output for KFAC.*kind="empirical"'
    ):
        lh.kfac(concave)
    with pytest.raises(
        ValueError, match=r'kind must be "exact" or "empirical" for the loss \'HuberLoss\''
    ):
        lh.kfac(lh.Problem(seeded(flat, 3), nn.HuberLoss(), (x, y)), kind="monte_carlo")
    with pytest.raises(
        ValueError,
        match=r"loss must be a negative log-likelihood for the Fisher.*lh\.ggn\(problem\)",
    ):
        lh.fisher(lh.Problem(seeded(flat, 3), nn.HuberLoss(), (x, y)))
    root = lh.Problem(seeded(flat, 3), lambda z, t: (z - t).square().mean().sqrt(), (x, y))
    with pytest.raises(ValueError, match="loss must be a sum over samples for KFAC"):
        lh.kfac(root)
    for build in (lh.fisher, lh.kfac):
        with pytest.raises(
            ValueError, match=r"kind must be one of .* got 'mc'; use kind='monte_carlo'"
        ):
            build(lh.Problem(seeded(flat, 3), "mse", (x, y)), kind="mc")
    with pytest.raises(
        ValueError, match="sharing must be one of 'expand', 'reduce', got 'reduced'; did you mean"
    ):
        lh.kfac(root, sharing="reduced")


def test_too_many_outputs_for_exact_factors_are_sent_to_sampling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lh.operators.kronecker_factors, "MOST_PASSES", 5)
    model, loss, x, y, _ = parts("segmentation")
    problem = lh.Problem(model, loss, (x, y))
    with pytest.raises(
        ValueError, match=r'kind must be "monte_carlo" or "empirical".*"exact", which takes 12'
    ):
        lh.kfac(problem)
    assert lh.kfac(problem, kind="monte_carlo").dim == problem.num_parameters


@pytest.mark.parametrize(("dtype", "logit"), [(torch.float32, 22.0), (torch.float64, 45.0)])
def test_saturated_logits_have_the_curvature_of_both_classes(
    dtype: torch.dtype, logit: float
) -> None:
    """σ(z) is 1 up to rounding, and its curvature e^−z all the same."""
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.fill_(logit)
    x = torch.tensor([[1.0], [2.0]])
    problem = lh.Problem(model, "bce_with_logits", (x, torch.ones(2, 1)), dtype=dtype)
    truth = (2.0 + 5.0) / 2 * math.exp(-logit) / (1 + math.exp(-logit)) ** 2
    for operator in (lh.ggn(problem), lh.hessian(problem)):
        found = lh.trace(operator, method="exact")
        assert found.value / truth == pytest.approx(1.0, rel=1e-5)
        assert found.stderr <= 1e-5 * truth
