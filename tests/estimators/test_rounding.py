"""Rounding inside a model is in every error bar: against the same network in float64, dense."""

from __future__ import annotations

import copy
import math
import threading
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lambdahat as lh
from lambdahat.operators.rounding import errors_of, rounding_of
from lambdahat.problem import batches
from lambdahat.results import Eigenpairs, Estimate, Status

_spectrum = cache(lambda operator: lh.spectrum(operator, probes=20))
ESTIMATORS = {
    "trace": lambda A: (lh.trace(A), lambda D: D.trace()),
    "hutchinson": lambda A: (lh.trace(A, method="hutchinson", tol=1e-3), lambda D: D.trace()),
    "frobenius_norm": lambda A: (lh.frobenius_norm(A, tol=1e-3), lambda D: D.norm()),
    "spectral_norm": lambda A: (lh.spectral_norm(A), lambda D: torch.linalg.matrix_norm(D, 2)),
    "spectrum.trace": lambda A: (_spectrum(A).trace, lambda D: D.trace()),
    "spectrum.frobenius": lambda A: (_spectrum(A).frobenius, lambda D: D.norm()),
    "spectrum.extremes": lambda A: (
        lh.spectrum(A).extremes[1],
        lambda D: torch.linalg.eigvalsh(D)[-1],
    ),
    "moments": lambda A: (lh.moments(A, 2)[1], lambda D: D.trace() / len(D)),
}


def _plain() -> tuple[nn.Module, Tensor]:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 10), nn.Tanh(), nn.Linear(10, 4)), torch.randn(
        64, 8, generator=generator
    )


def _cancelling() -> tuple[nn.Module, Tensor]:
    """Hidden units in pairs of the same output, whose weights of ±3·10⁴ cancel."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4)
    )
    with torch.no_grad():
        model[0].weight[6:], model[0].bias[6:] = (
            model[0].weight[:6].clone(),
            model[0].bias[:6].clone(),
        )
        model[2].weight[:, :6] += 3e4
        model[2].weight[:, 6:] -= 3e4
    return model, _plain()[1]


def _problems(
    which: str, dtype: torch.dtype = torch.float32, count: int = 64
) -> tuple[lh.Problem, lh.Problem]:
    """One network and data, with numbers that ``dtype`` holds, in that dtype and in float64."""
    model, x = _cancelling() if which == "cancelling" else _plain()
    model, x = model.to(dtype).float(), x.to(dtype).float()
    x = x.repeat(count // 64, 1) * torch.linspace(0.5, 1.5, count)[:, None].to(dtype).float()
    x = x.to(dtype).float()
    y = torch.arange(count) % 4
    return tuple(
        lh.Problem(model, "cross_entropy", (x, y), dtype=kind) for kind in (dtype, torch.float64)
    )


def _dense(problem: lh.Problem) -> Tensor:
    matrix = lh.hessian(problem).dense()
    return (matrix + matrix.T) / 2


@cache
def _case(which: str, dtype: torch.dtype) -> tuple[lh.LinearOperator, Tensor]:
    """The Hessian in a dtype, and dense in float64."""
    reduced, double = _problems(which, dtype)
    return lh.hessian(reduced), _dense(double)


CASES = [("plain", torch.float32), ("cancelling", torch.float32), ("plain", torch.bfloat16)]


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize(("which", "dtype"), CASES)
def test_no_error_bar_is_smaller_than_the_rounding_of_the_model(
    which: str, dtype: torch.dtype, name: str
) -> None:
    operator, matrix = _case(which, dtype)
    found, truth = ESTIMATORS[name](operator)
    assert isinstance(found, Estimate)
    assert abs(float(found) - float(truth(matrix))) <= 4 * float(found.stderr)


@pytest.mark.parametrize(("which", "dtype"), CASES)
def test_residuals_of_eigenpairs_are_those_of_float64(which: str, dtype: torch.dtype) -> None:
    reduced, double = _problems(which, dtype)
    matrix = _dense(double)
    for found in (
        lh.eigenpairs(lh.hessian(reduced), k=4),
        lh.power_iteration(lh.hessian(reduced), k=1),
    ):
        vectors = found.vectors.double()
        residuals = (matrix @ vectors - vectors * found.values).norm(dim=0)
        assert bool((residuals <= 2 * found.residuals).all())


def test_a_tolerance_below_the_rounding_is_not_called_reached() -> None:
    reduced, double = _problems("cancelling")
    operator, matrix = lh.hessian(reduced), _dense(double)
    values = torch.linalg.eigvalsh(matrix).flip(0)
    found = lh.eigenpairs(operator, k=2, tol=1e-5)
    assert float((found.values - values[:2]).abs().max()) > 1e-5 * float(values.abs().max())
    assert found.status is Status.PRECISION_LIMIT
    assert not bool(found.converged.any())
    assert "float64" in found.status.value
    assert lh.spectral_norm(operator).status is Status.PRECISION_LIMIT
    assert lh.power_iteration(operator, k=1, tol=1e-4).status is Status.PRECISION_LIMIT
    assert lh.trace(operator, tol=1e-5).status is Status.PRECISION_LIMIT
    assert lh.frobenius_norm(operator, tol=1e-3).status is Status.PRECISION_LIMIT
    assert lh.diagonal(operator, tol=1e-4).status is Status.PRECISION_LIMIT
    assert all(
        part.status is Status.PRECISION_LIMIT
        for part in lh.trace_per_layer(operator, tol=1e-6).values()
    )
    assert lh.eigenpairs(lh.hessian(double), k=2, tol=1e-5).status is Status.CONVERGED


def test_a_diagonal_has_the_rounding_of_each_parameter() -> None:
    reduced, double = _problems("cancelling")
    found = lh.diagonal(lh.hessian(reduced))
    errors = (found.value.double() - _dense(double).diagonal()).abs()
    assert float(errors.norm()) <= float(found.stderr.norm())
    assert float((errors <= 3 * found.stderr).double().mean()) > 0.95


@pytest.mark.parametrize("settings", [{"depth": 30}, {"tol": 0.01}, {"method": "exact"}], ids=str)
@pytest.mark.parametrize(("which", "dtype"), CASES)
def test_log_determinants_hold_the_rounding_of_the_model(
    which: str, dtype: torch.dtype, settings: dict
) -> None:
    reduced, double = _problems(which, dtype)
    matrix = _dense(double)
    values = torch.linalg.eigvalsh(matrix)
    shift = float(1e-3 * values[-1] - 1.1 * values[0])
    operator = lh.hessian(reduced)
    found = lh.logdet(operator + shift * lh.identity(operator), **settings)
    assert abs(float(found) - float((values + shift).log().sum())) <= 4 * float(found.stderr)


def test_ordinary_float32_networks_stay_converged() -> None:
    reduced, _ = _problems("plain")
    for make in (lh.hessian, lh.ggn):
        operator = make(reduced)
        assert lh.eigenpairs(operator, k=4).status is Status.CONVERGED
        assert lh.power_iteration(operator, k=1).status is Status.CONVERGED
        for estimate in (lh.trace, lh.frobenius_norm, lh.spectral_norm, lh.spectrum, lh.diagonal):
            assert estimate(operator).status is Status.CONVERGED
        assert lh.moments(operator, 4).status is Status.CONVERGED
        exact = lh.trace(operator)
        assert 0 < float(exact.stderr) < 1e-5 * float(exact)


class _Counted(nn.Module):
    """A network that counts the samples it is given, in each precision."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.seen = _plain()[0], {torch.float32: 0, torch.float64: 0}

    def forward(self, x: Tensor) -> Tensor:
        self.seen[x.dtype] += len(x)
        return self.inner(x)


def test_the_comparison_takes_few_passes_in_float64_and_is_made_once() -> None:
    _, x = _plain()
    x = x.repeat(100, 1)
    model = _Counted()
    problem = lh.Problem(model, "cross_entropy", (x, torch.arange(len(x)) % 4))
    counted = problem.model
    assert isinstance(counted, _Counted)
    operator = lh.ggn(problem)
    before = counted.seen[torch.float32]
    lh.trace(operator)
    # of 6,400 samples: 128 in float64, and two in which casts are looked for; in float32 all of
    # them, the same 128, and a few for the checks of the closed form
    assert 0 < counted.seen[torch.float64] <= 130
    assert counted.seen[torch.float32] - before <= len(x) + 128 + 64
    rounding_of(operator)
    looked = counted.seen[torch.float64]
    # a few passes over at most 256 samples: the checks of a problem, and the graphs of products
    assert 130 < looked <= 10 * 256
    lh.trace(operator)
    lh.frobenius_norm(operator)
    assert counted.seen[torch.float64] == looked
    before = operator.matvecs
    lh.eigenpairs(operator, k=2)
    assert counted.seen[torch.float64] - looked <= 10 * 4096
    found = lh.eigenpairs(operator, k=2)
    # the products of the comparison are not among them
    assert found.cost == (operator.matvecs - before) / 2


def _perceptron(which: str, seed: int) -> tuple[nn.Module, str, Tensor, Tensor]:
    """A network of 1,500 samples with more rounding than usual, or with it in few samples."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        first, last = nn.Linear(12, 16), nn.Linear(16, 4)
        x, y = torch.randn(1500, 12), torch.randint(0, 4, (1500,))
    act = nn.Tanh() if "tanh" in which else nn.ReLU()
    with torch.no_grad():
        if which == "ill-conditioned":
            first.weight *= torch.logspace(-4, 4, 12)
        elif which == "large inputs":
            x *= 1e4
        elif which == "unbalanced layers":
            first.weight *= 1e4
            last.weight *= 1e-4
        elif "cancellation" in which:
            x[-75:] += 1e5
            first.weight[:, 0] = -first.weight[:, 1:].sum(dim=1)
            if "before" in which:
                first = nn.Sequential(first, nn.Linear(16, 16))
        elif which == "kinks within rounding":
            x += 1e4
            first.weight -= first.weight.mean(dim=1, keepdim=True)
        elif which == "tanh with targets far off":
            return nn.Sequential(first, act, last), "mse", x, 1e3 + x[:, :4]
    return nn.Sequential(first, act, last), "cross_entropy", x, y


FEW_DECIDE = [
    "ill-conditioned",
    "large inputs",
    "unbalanced layers",
    "cancellation in few samples",
    "cancellation before the layer with kinks",
    "kinks within rounding",
    "tanh",
    "tanh with targets far off",
]


@pytest.mark.parametrize("kind", ["hessian", "empirical"])
@pytest.mark.parametrize("which", FEW_DECIDE)
def test_exact_traces_cover_float64_where_few_samples_decide(which: str, kind: str) -> None:
    make = lh.hessian if kind == "hessian" else partial(lh.gradient_covariance, centred=False)
    for seed in range(6):
        model, loss, x, y = _perceptron(which, seed)
        found, truth = (
            lh.trace(make(lh.Problem(model, loss, (x, y), dtype=dtype)), method="exact")
            for dtype in (torch.float32, torch.float64)
        )
        assert abs(float(found) - float(truth)) <= 4 * float(found.stderr)
        # not by saying nothing: at most some thirty times the error, or a few roundings
        error = max(abs(float(found) - float(truth)), 1e-7 * abs(float(truth)))
        assert float(found.stderr) <= 100 * error


@pytest.mark.parametrize("classes", [3, 40])
def test_samples_that_are_dead_by_rounding_alone_are_in_the_error(classes: int) -> None:
    """All hidden units of 20 samples of 4,000 are 0 up to rounding: in float32 they add nothing.

    40 classes are sampled by rounds of random signals.
    """
    missed = 0
    for seed in range(4):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            first, last = nn.Linear(6, 4), nn.Linear(4, classes)
            x, y = torch.randn(4000, 6), torch.randint(classes, (4000,))
        with torch.no_grad():
            first.bias *= 20
            weight, bias = first.weight.double(), first.bias.double()
            x[7::200] = (torch.linalg.pinv(weight) @ -bias).float()
        model = nn.Sequential(first, nn.ReLU(), last)
        found, truth = (
            lh.trace(lh.hessian(lh.Problem(model, "cross_entropy", (x, y), dtype=dtype)), method=by)
            for dtype, by in ((torch.float32, "auto"), (torch.float64, "exact"))
        )
        error = abs(float(found) - float(truth))
        assert error <= 4 * float(found.stderr)
        missed += error > 1e-3 * float(truth)
    assert missed, "no seed has such samples"


class _Kinked(nn.Module):
    """A convolution, a piecewise linear operation and a linear layer; ``before`` gives numbers that
    are 0 on a kink.
    """

    def __init__(self, kink: str) -> None:
        super().__init__()
        self.kink, self.first = kink, nn.Conv2d(2, 4, 3, padding=1)
        self.last = nn.Linear(36 if kink == "pooling" else 144, 40)

    def before(self, x: Tensor) -> Tensor:
        z = self.first(x)
        return z[..., ::2, ::2] - z[..., ::2, 1::2] if self.kink == "pooling" else z

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x)
        kinked = {
            "relu": lambda: nn.functional.relu(z, inplace=True),
            "relu of a sum": lambda: torch.relu(z + 0.0 * z.detach()),
            "pooling": lambda: nn.functional.max_pool2d(z, 2),
            "comparison": lambda: z * (z > 0),
        }
        return self.last(kinked[self.kink]().flatten(1))


@pytest.mark.parametrize("kink", ["relu", "relu of a sum", "pooling", "comparison"])
@pytest.mark.parametrize("every", [10, 75])
def test_samples_on_a_kink_are_in_the_error(kink: str, every: int) -> None:
    """Few samples or many, of 600, one number of which is 0 up to rounding."""
    shown = 0
    for seed in range(3):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = _Kinked(kink)
            x, y = torch.randn(600, 2, 6, 6), torch.randint(40, (600,))
        double = copy.deepcopy(model).double()
        for place in range(3, 600, every):
            sample = x[place : place + 1].double().requires_grad_()
            for _ in range(3):
                number = double.before(sample).flatten()[place % 36]
                (slope,) = torch.autograd.grad(number, sample)
                sample = (sample - slope * number / slope.square().sum()).detach().requires_grad_()
            x[place] = sample.detach().float()[0]
        found, truth = (
            lh.trace(
                lh.ggn(lh.Problem(model, "cross_entropy", (x, y), dtype=dtype)), method="exact"
            )
            for dtype in (torch.float32, torch.float64)
        )
        error = abs(float(found) - float(truth))
        assert error <= 2.5 * float(found.stderr)
        assert float(found.stderr) <= 100 * max(error, 1e-7 * float(truth))
        shown += error > 1e-6 * float(truth)
    assert shown, "no seed has samples whose rounding matters"


@pytest.mark.parametrize(
    "which",
    ["ill-conditioned", "large inputs", "cancellation in few samples", "kinks within rounding"],
)
def test_probes_cover_float64_where_few_samples_decide(which: str) -> None:
    """256 random samples miss those few: errors of up to 2,700 standard errors without them."""
    for seed in range(4):
        model, loss, x, y = _perceptron(which, seed)
        reduced, double = (
            lh.hessian(lh.Problem(model, loss, (x, y), dtype=dtype))
            for dtype in (torch.float32, torch.float64)
        )
        matrix = double.dense()
        for found, truth in (
            (lh.trace(reduced, method="hutchinson", tol=1e-3), float(matrix.trace())),
            (lh.frobenius_norm(reduced, tol=1e-3), float(matrix.norm())),
        ):
            error = abs(float(found) - truth)
            assert error <= 4 * float(found.stderr)
            # an error bar that says something, or that of the probes
            assert float(found.stderr) <= max(100 * error, 1e-3 * truth)


@pytest.mark.parametrize("seed", [7, 10])
def test_products_cover_float64_where_one_sample_is_on_a_kink(seed: int) -> None:
    """Behind a norm of inputs with a large mean, where other samples err more, all a little."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        x, y = torch.randn(1200, 12) + 1e4, torch.randint(0, 4, (1200,))
        first, last, norm = nn.Linear(12, 16), nn.Linear(16, 4), nn.BatchNorm1d(16)
    with torch.no_grad():
        z = first(x)
        norm.running_mean.copy_(z.mean(0))
        norm.running_var.copy_(z.var(0))
    model = nn.Sequential(first, norm, nn.ReLU(), last)
    for make in (lh.hessian, partial(lh.gradient_covariance, centred=False)):
        reduced, double = (
            make(lh.Problem(model, "cross_entropy", (x, y), dtype=dtype))
            for dtype in (torch.float32, torch.float64)
        )
        assert reduced.known_trace() is None  # for samples seem to mix
        found, truth = lh.trace(reduced), lh.trace(double)
        assert abs(found.value - truth.value) <= 4 * math.hypot(found.stderr, truth.stderr)


def test_drawn_targets_are_the_same_in_both_precisions() -> None:
    """A batch of over 128 samples is not cut: each has the draws of its place in the batch."""
    reduced, _ = _problems("plain", count=192)
    for estimate in (lh.trace, lh.frobenius_norm):
        found = estimate(lh.fisher(reduced, kind="monte_carlo"))
        assert found.status is Status.CONVERGED
        assert float(found.stderr) <= 0.01 * float(found)


def test_a_hessian_and_its_gauss_newton_matrix_are_compared_by_what_each_is_made_of() -> None:
    """They share a closed form, which knows what samples added to the trace that it gave last."""
    problem = _problems("plain")[0]
    operator = lh.hessian(problem)
    inner = operator.control()
    assert inner is not None
    assert operator.known_trace() != inner.known_trace()
    for each, alone in ((operator, lh.hessian(problem)), (inner, lh.ggn(problem))):
        assert float(lh.trace(each).stderr) == pytest.approx(float(lh.trace(alone).stderr), rel=0.5)


def test_the_diagonal_of_a_gauss_newton_matrix_that_is_zero_is_zero_in_every_precision() -> None:
    """Of a loss that is linear in the output; its products are refused, and not asked for."""
    model, x = _plain()
    for dtype in (torch.float32, torch.float64):
        problem = lh.Problem(model, lambda z, _: z.sum(dim=1).mean(), (x, x), dtype=dtype)
        for found in (lh.diagonal(lh.ggn(problem)), lh.trace(lh.ggn(problem))):
            assert not torch.as_tensor(found.value).any()
            assert not torch.as_tensor(found.stderr).any()
            assert found.status is Status.CONVERGED


def test_a_diagonal_that_float32_takes_for_zero_has_an_error() -> None:
    """Of probabilities that are 1 up to rounding."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 4), nn.Sigmoid()), _plain()[1]
    with torch.no_grad():
        model[0].bias += 25
    single, double = (
        lh.diagonal(lh.hessian(lh.Problem(model, nn.BCELoss(), (x, torch.ones(64, 4)), dtype=kind)))
        for kind in (torch.float32, torch.float64)
    )
    assert not single.value.any()
    assert double.value.any()
    assert (single.value - double.value).norm() <= 4 * single.stderr.norm()
    assert single.status is Status.PRECISION_LIMIT


class _Once(torch.autograd.Function):
    """tanh, whose gradient autograd cannot differentiate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.tanh())
        return x.tanh()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return g * (1 - y.square())


class _OnceDifferentiable(nn.Module):
    def __init__(self, kinked: bool, tanh: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 2)
        self.kinked, self.tanh = kinked, tanh

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x)
        return self.last(self.tanh(z.relu() if self.kinked else z))


@pytest.mark.filterwarnings("ignore:products by finite differences")
@pytest.mark.parametrize("kinked", [False, True])
@pytest.mark.parametrize("samples", [40, 4000])
def test_finite_differences_in_float64_have_an_error(kinked: bool, samples: int) -> None:
    """Kinks between the two points move products by any amount, and many samples have some."""
    for seed in range(4):
        torch.manual_seed(seed)
        x, y = torch.randn(samples, 3).double(), torch.randint(0, 2, (samples,))
        torch.manual_seed(seed)
        once = _OnceDifferentiable(kinked, _Once.apply).double()
        twice = _OnceDifferentiable(kinked, torch.tanh).double()
        twice.load_state_dict(once.state_dict())
        operator = lh.hessian(lh.Problem(once, "cross_entropy", (x, y), batch_size=samples))
        matrix = lh.hessian(lh.Problem(twice, "cross_entropy", (x, y))).dense()
        assert operator.mode == "finite"
        for found, truth in (
            (lh.trace(operator), float(matrix.trace())),
            (lh.frobenius_norm(operator), float(matrix.norm())),
        ):
            error, kinks = abs(float(found) - truth), kinked and samples > 40
            assert error <= (10 if kinks else 4) * found.stderr
            assert found.status is (Status.PRECISION_LIMIT if kinks else Status.CONVERGED)


def test_float64_and_matrices_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    _, double = _problems("plain")
    matrix = lh.operator(torch.diag(torch.arange(1.0, 121.0)))
    assert rounding_of(lh.hessian(double)) is None
    assert rounding_of(matrix) is None
    assert rounding_of(lh.identity(matrix) + 2.0 * matrix) is None
    monkeypatch.setattr(
        lh.Problem, "in_double", lambda *_, **__: pytest.fail("float64 was asked for")
    )
    lh.eigenpairs(lh.hessian(double), k=2)
    assert float(lh.trace(matrix).stderr) == 0.0


@pytest.mark.parametrize("which", ["plain", "cancelling"])
def test_a_sample_of_the_data_stands_for_all_of_it(which: str) -> None:
    """256 of 6,400 samples tell the error of a product with all to an order of magnitude."""
    reduced, double = _problems(which, count=6400)
    operator, exact = lh.ggn(reduced), lh.ggn(double)
    found = rounding_of(operator)
    assert found is not None
    z = torch.randn(operator.dim, generator=torch.Generator().manual_seed(3))
    z /= z.norm()
    truth = float(((operator @ z).double() - exact @ z.double()).norm())
    assert truth / 3 <= found.random.error <= 30 * truth
    assert errors_of(operator, z) is not None


def test_composites_have_the_rounding_of_their_parts() -> None:
    reduced, double = _problems("cancelling")
    operator, exact = lh.hessian(reduced), lh.hessian(double)
    v = torch.randn(operator.dim, generator=torch.Generator().manual_seed(0))
    indices = list(range(0, operator.dim, 3))
    pairs = [
        (2.5 * operator, 2.5 * exact),
        (operator + 3.0 * lh.identity(operator), exact + 3.0 * lh.identity(exact)),
        (operator.restrict(indices), exact.restrict(indices)),
        (operator.block_diagonal(), exact.block_diagonal()),
        (operator @ operator, exact @ exact),
    ]
    for part, truth in pairs:
        w = v[: part.dim]
        error, counted = errors_of(part, w), operator.matvecs
        assert error is not None
        expected = (part @ w).double() - truth @ w.double()
        assert float((error - expected).norm()) <= 1e-2 * float(expected.norm())
        assert operator.matvecs >= counted


def test_a_model_that_cannot_run_in_float64_is_perturbed_instead() -> None:
    """Weights that the function holds in float32 cannot be multiplied with float64."""
    (model, x), count = _cancelling(), 64
    held = [part.detach() for part in (model[0].weight, model[2].weight)]

    def loss(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        hidden = torch.tanh((batch[0] * params["scale"]).float() @ held[0].T)
        logits = torch.tanh(hidden @ held[1].T) @ params["head"]
        return nn.functional.cross_entropy(logits, batch[1])

    params = {
        "scale": torch.ones(8),
        "head": torch.randn(12, 4, generator=torch.Generator().manual_seed(0)),
    }
    problem = lh.Problem.from_function(loss, params, (x, torch.arange(count) % 4))
    with pytest.raises((RuntimeError, TypeError), match="dtype"):
        lh.hessian(problem.in_double()).dense()
    found = rounding_of(lh.hessian(problem))
    assert found is not None
    assert found.random.error > 100 * torch.finfo(torch.float32).eps * found.random.size


def test_a_budget_of_memory_leaves_the_comparison_out() -> None:
    (model, x), count = _plain(), 64
    operator = lh.hessian(
        lh.Problem(model, "cross_entropy", (x, torch.arange(count) % 4), memory="1MiB")
    )
    assert rounding_of(operator) is None


def test_rounding_in_later_batches_is_seen_with_batch_statistics():
    """Inputs of the later half have a mean of 10⁴, which batch normalisation takes off in
    float32.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 4))
        x, y = torch.randn(2048, 6), torch.randint(0, 4, (2048,))
    x[1024:] += 1e4
    parts = list(zip(x.split(256), y.split(256), strict=True))
    truth = float(
        lh.hessian(lh.Problem(model, "cross_entropy", parts, norm="train", dtype=torch.float64))
        .dense()
        .trace()
    )
    found = lh.trace(lh.hessian(lh.Problem(model, "cross_entropy", parts, norm="train")), tol=0.01)
    assert abs(float(found) - truth) <= 4 * float(found.stderr)
    assert found.status is Status.PRECISION_LIMIT


def test_other_threads_multiply_by_the_whole_operator_while_precisions_are_compared():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))
        x, y, v = torch.randn(6000, 6), torch.randint(0, 4, (6000,)), torch.randn(114)
    H = lh.hessian(lh.Problem(model, "cross_entropy", (x, y)))
    expected, products, done = H @ v, [], threading.Event()

    def multiply() -> None:
        while not done.is_set():
            products.append(H @ v)

    worker = threading.Thread(target=multiply)
    worker.start()
    try:
        for seed in range(4):
            lh.eigenpairs(H, 3, seed=seed)
    finally:
        done.set()
        worker.join()
    assert len(products) > 4
    assert torch.backends.cudnn.benchmark is False
    assert torch.backends.mha.get_fastpath_enabled()
    assert all(torch.allclose(found, expected, rtol=1e-4, atol=1e-6) for found in products)


@pytest.mark.parametrize("seed", [11, 18, 26, 36])
def test_a_curvature_that_a_random_vector_misses_has_an_error(seed: int) -> None:
    """Of rank 1 and a little: the vectors of its rounding are all but orthogonal to it."""

    def quartic(z: Tensor, y: Tensor) -> Tensor:
        return (z - y).pow(4).mean() + z.sum(dim=1).square().mean()

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4, bias=False), nn.Linear(4, 1))
        data = torch.randn(3, 2), torch.randn(3, 1)
    reduced, double = (
        lh.Problem(model, quartic, data, dtype=kind, parameters="0.*")
        for kind in (torch.float32, torch.float64)
    )
    for make in (lh.ggn, lambda p: lh.gradient_covariance(p, centred=False)):
        found, truth = lh.diagonal(make(reduced)), lh.diagonal(make(double)).value
        assert float((found.value - truth).norm()) <= 3 * float(found.stderr.norm())
        assert found.status is Status.CONVERGED


def test_an_error_in_one_direction_is_not_missed_by_chance() -> None:
    """cos(10⁴w) has a curvature that float32 does not know, in one entry of sixty."""
    worst = 0.0
    for place in range(40):

        def loss(params: dict[str, Tensor], place: int = place) -> Tensor:
            w = params["w"]
            return w.square().sum() / 2 + 1e-8 * (1e4 * w[place]).cos()

        matrices = [
            lh.hessian(lh.Problem.from_function(loss, {"w": torch.linspace(1, 2, 60)}, dtype=dtype))
            for dtype in (torch.float32, torch.float64)
        ]
        single, double = (matrix.dense().double() for matrix in matrices)
        rounding = rounding_of(matrices[0])
        assert rounding is not None
        worst = max(worst, float((single - double).norm()) / rounding.frobenius)
    assert worst < 8


def test_a_parameter_of_one_entry_has_an_error():
    """The one reading of its row can be 0 by chance; 20 networks, float64 diagonals for truth."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.shift = (
                nn.Parameter(torch.tensor(1.3)),
                nn.Parameter(torch.tensor([0.2])),
            )
            self.inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * self.scale + self.shift

    for seed in range(20):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model, x, y = Scaled(), torch.randn(60, 6), torch.randint(0, 3, (60,))
        problems = [
            lh.Problem(model, "cross_entropy", (x, y), dtype=kind)
            for kind in (torch.float32, torch.float64)
        ]
        found, truth = (
            lh.diagonal(lh.hessian(problems[0]), tol=1e-6),
            lh.hessian(problems[1]).dense().diagonal(),
        )
        assert bool((found.stderr > 0).all())
        assert bool(((found.value.double() - truth).abs() <= 4 * found.stderr)[:2].all())


class _Casting(nn.Module):
    """The same network, computed in float32 whatever it is given."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        parameters = {name: each.float() for name, each in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, parameters, (x.float(),)).to(x.dtype)  # type: ignore[no-any-return]


@pytest.mark.parametrize("which", ["plain", "cancelling"])
def test_a_model_that_casts_to_float32_does_not_hide_its_rounding(which: str) -> None:
    (model, x), y = (_cancelling if which == "cancelling" else _plain)(), torch.arange(64) % 4
    exact = _dense(lh.Problem(model, "cross_entropy", (x, y), dtype=torch.float64))
    operator = lh.hessian(lh.Problem(_Casting(model), "cross_entropy", (x, y)))
    for found, truth in (
        (lh.trace(operator), exact.trace()),
        (lh.frobenius_norm(operator, tol=1e-3), exact.norm()),
    ):
        assert abs(float(found) - float(truth)) <= 4 * float(found.stderr)
        assert found.status is (
            Status.PRECISION_LIMIT if which == "cancelling" else Status.CONVERGED
        )


class _PartlyShort(nn.Module):
    """Two layers in bfloat16 around a norm in float32; given ``exact``, all in what it is given."""

    def __init__(self, exact: bool, size: int = 0) -> None:
        super().__init__()
        self.exact, self.size = exact, size
        self.below, self.norm, self.above = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3)
        for layer in (self.below, self.above):
            layer.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        if self.exact:
            return self.above(self.norm(self.below(x)).relu())
        assert self.size in (0, len(x))
        wide = self.norm(self.below(x.bfloat16()).float()).relu()
        return self.above(wide.bfloat16()).float()


@pytest.mark.parametrize(("samples", "size"), [(60, 0), (60, 60), (300, 0)])
def test_parts_in_bfloat16_that_do_not_run_in_float64_are_in_the_error(
    samples: int, size: int
) -> None:
    """The parameters are perturbed instead, by as much as those parts feel; also where the model
    takes a ``size`` of batches only.
    """
    torch.manual_seed(0)
    model, exact = _PartlyShort(False, size), _PartlyShort(True)
    exact.load_state_dict(model.state_dict())
    x, y = torch.randn(samples, 3).bfloat16(), torch.arange(samples) % 3
    reduced = lh.Problem(model, "cross_entropy", (x.float(), y))
    double = lh.Problem(exact, "cross_entropy", (x, y), dtype=torch.float64)
    for make in (lh.hessian, lh.ggn, lambda p: lh.gradient_covariance(p, centred=False)):
        found, truth = lh.trace(make(reduced)), float(lh.trace(make(double)))
        assert abs(found.value - truth) <= 4 * found.stderr
        assert found.stderr <= 0.5 * truth


def test_later_batches_that_are_not_in_memory_are_compared_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inputs of the later batches have a mean of 10⁵, which the weights of the first layer take
    off in float32.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))
        x, y = torch.randn(2048, 6), torch.randint(0, 4, (2048,))
        # so that they sum to 0 in any precision
        model[0].weight.data = (model[0].weight * 1024).round() / 1024
        model[0].weight.data[:, 0] = -model[0].weight.data[:, 1:].sum(dim=1)
    x[512:] += 1e5
    with monkeypatch.context() as patched:
        patched.setattr(batches, "free_memory", lambda device: 0)
        problem = lh.Problem(model, "cross_entropy", (x, y), batch_size=256)
    operator, v = lh.hessian(problem), torch.randn(136, generator=torch.Generator().manual_seed(0))
    v /= v.norm()
    assert not problem.batches.in_memory
    exact = lh.hessian(lh.Problem(model, "cross_entropy", (x, y), dtype=torch.float64)) @ v.double()
    truth = float(((operator @ v).double() - exact).norm())
    assert truth > 1e-5 * float(exact.norm())
    found = rounding_of(operator)
    assert found is not None
    assert truth / 3 <= found.random.error <= 30 * truth


class _Block(nn.Module):
    """A residual block of two convolutions with batch normalisation."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        )
        self.second = nn.Sequential(
            nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        )
        self.short = (
            nn.Identity() if stride == 1 else nn.Conv2d(before, after, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))) + self.short(x))


def _residual_network(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A trained network with one activation of each inner channel of a block on its kink, to 12
    digits.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        blocks = _Block(3, 3, 1), _Block(3, 6, 2), _Block(6, 12, 2)
        head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 10)
        model = nn.Sequential(
            nn.Conv2d(3, 3, 3, 1, 1, bias=False), nn.BatchNorm2d(3), nn.ReLU(), *blocks, *head
        )
        x, y = torch.randn(32, 3, 8, 8), torch.randint(0, 10, (32,))
        optimizer = torch.optim.Adam(model.parameters(), 5e-3)
        for _ in range(60):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        model = model.eval().double()
        with torch.no_grad():
            hidden = x.double()
            for layer in model:
                if isinstance(layer, _Block):
                    entered = layer.first(hidden)
                    # of sample and position, the same for all channels
                    place = entered.abs().amax(dim=1).argmin()
                    layer.first[1].bias -= entered.movedim(1, 0).flatten(1)[:, place]
                hidden = layer(hidden)
    return model, x.double(), y


def test_residuals_of_a_residual_network_hold_activations_near_their_kink(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """float32 puts activations on the other side of 0, which no residual in float32 knows."""
    unseen = 0
    for seed in range(4):
        model, x, y = _residual_network(seed)
        exact = lh.hessian(lh.Problem(model, "cross_entropy", (x, y)))
        operator = lh.hessian(lh.Problem(model, "cross_entropy", (x, y), dtype=torch.float32))

        def residuals(pairs: Eigenpairs, exact: lh.LinearOperator = exact) -> Tensor:
            vectors = pairs.vectors.double()
            return (exact @ vectors - vectors * pairs.values).norm(dim=0)

        found = lh.eigenpairs(operator, k=3, tol=1e-4)
        true = residuals(found)
        assert bool((true <= 2 * found.residuals).all()) or found.status is Status.PRECISION_LIMIT
        assert bool((true <= 5 * found.residuals).all())
        with monkeypatch.context() as patched:
            patched.setattr("lambdahat.estimators._eigenpairs.errors_of", lambda *_: None)
            before = lh.eigenpairs(operator, k=3, tol=1e-4)
        unseen += int(bool((residuals(before) > 5 * before.residuals).any()))
    assert unseen >= 2  # without the comparison


class _Slope(torch.autograd.Function):
    """2xg, with derivatives in float32 alone."""

    @staticmethod
    def forward(ctx, x, g):
        ctx.save_for_backward(x, g)
        return 2 * x * g

    @staticmethod
    def backward(ctx, v):
        x, g = ctx.saved_tensors
        if x.dtype == torch.float64:
            raise RuntimeError("second derivatives are for float32")
        return 2 * g * v, 2 * x * v


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, g):
        return _Slope.apply(*ctx.saved_tensors, g)


def test_second_derivatives_that_fail_in_float64_are_perturbed_instead() -> None:
    _, x = _plain()
    params = {"weight": torch.randn(8, 4, generator=torch.Generator().manual_seed(0))}

    def loss(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        hidden = _Square.apply(batch[0] @ params["weight"])
        return nn.functional.cross_entropy(hidden, batch[1])

    problem = lh.Problem.from_function(loss, params, (x, torch.arange(64) % 4))
    found = rounding_of(lh.hessian(problem, mode="reverse"))
    assert found is not None
    assert 0 < found.random.error < 1e-3 * found.random.size


class _Order(TorchDispatchMode):
    """The operations inside in their order; those in float64 end in 64."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = any(isinstance(a, torch.Tensor) and a.dtype == torch.float64 for a in args)
        self.names.append(func._schema.name.removeprefix("aten::") + ("64" if wide else ""))
        return func(*args, **(kwargs or {}))


def test_an_exact_trace_is_read_when_all_has_been_started():
    """A GPU works on it meanwhile, and sorts no samples."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    problem = lh.Problem(net, "cross_entropy", (torch.randn(400, 6), torch.randint(3, (400,))))
    with _Order() as seen:
        found = lh.trace(lh.hessian(problem))
    assert found.cost == 0
    wide = [i for i, name in enumerate(seen.names) if name in ("addmm64", "mm64")]
    first = seen.names.index("topk")  # of what samples added to the trace
    read = [i for i, name in enumerate(seen.names) if name.startswith("_local") and i > first]
    assert wide
    assert read
    assert max(wide) < min(read)
    assert not any("sort" in name for name in seen.names)
