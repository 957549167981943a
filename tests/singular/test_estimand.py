"""The localization γ: decided by the problem and nβ before the first step, and what λ̂ is with
it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from lambdahat._core.rng import generator
from lambdahat.models import mlp
from lambdahat.operators.curvature import hessian
from lambdahat.problem import Problem
from lambdahat.singular import exact, llc
from lambdahat.singular._llc import default_localization, inverse_temperature
from lambdahat.singular.known_cases import logistic_expectation, logistic_minimum
from tests.cases import classifier
from tests.singular.test_llc_settings import bowl, data_of, half_square, regression


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=generator(0, "estimand"), dtype=torch.float64)


def logistic(samples: int = 2000, width: int = 11) -> Problem:
    """Logistic regression at its minimum."""
    x = normal(samples, width)
    chance = torch.rand(samples, generator=generator(1, "estimand"), dtype=torch.float64)
    y = (chance < x[:, :3].sum(1).sigmoid()).double()
    return Problem.from_function(cross_entropy, {"w": logistic_minimum(x, y)}, (x, y))


def cross_entropy(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    return torch.nn.functional.binary_cross_entropy_with_logits(batch[0] @ params["w"], batch[1])


LOSSES = {logistic: cross_entropy, regression: half_square}


def at_defaults(problem: Problem) -> float:
    return inverse_temperature("n/log n", problem.num_samples, 1)[0]


def network() -> Problem:
    """A classifier of 43 parameters on 20 samples: most directions are flat."""
    return classifier()


# γ is a function of the problem and nβ


@pytest.mark.parametrize(
    "settings",
    [
        {"seed": 3, "chains": 2, "tol": 0.5, "mode": "sequential"},
        {"batch_size": 100},
        {"kernel": "sgld", "batch_size": 64},
        {"kernel": "sgnht"},
        {"step_size": 1e-5, "draws": 20, "burn_in": 0},
    ],
    ids=str,
)
def test_no_setting_of_the_chains_changes_the_localization(settings: dict[str, Any]):
    problem = regression(width=20)
    wanted, reason = default_localization(problem, at_defaults(problem))
    found = llc(problem, **{"max_gradients": 1000, **settings})
    assert found.localization == wanted
    assert found.chains.reasons["localization"] == reason


@pytest.mark.parametrize(
    "make", [regression, logistic, network], ids=["regression", "logistic", "network"]
)
def test_single_precision_has_the_same_localization(make):
    """The factor is a power of two, so that only ‖w*‖² is rounded."""
    whole = make().subset(range(make().num_samples), make().num_samples)
    nbeta = at_defaults(whole)
    data = tuple(
        part.float() if part.is_floating_point() else part for part in whole.batches.first().data
    )
    if make is network:
        single = Problem(mlp((4, 5, 3), "relu", 0).float(), "cross_entropy", data)
    else:
        single = Problem.from_function(LOSSES[make], {"w": whole.vector.float()}, data)
    assert single.dtype is torch.float32
    wanted = default_localization(whole, nbeta)[0]
    assert default_localization(single, nbeta)[0] == pytest.approx(wanted, rel=1e-6)


def test_the_probes_of_a_large_spectrum_are_always_the_same():
    problem = classifier((20, 30, 10), samples=400, batch_size=100)
    assert problem.num_parameters > 300
    found = {default_localization(problem.at(problem.vector), 50.0) for _ in range(2)}
    assert len(found) == 1


# What γ is


def test_a_network_keeps_the_scale_of_its_parameters():
    problem = network()
    gamma, reason = default_localization(problem, at_defaults(problem))
    assert gamma == pytest.approx(problem.num_parameters / float(problem.vector.square().sum()))
    assert reason == "P/‖w*‖²"


@pytest.mark.parametrize("make", [regression, logistic], ids=["linear", "logistic"])
def test_a_regular_model_has_a_weak_localization_by_a_power_of_two(make):
    problem = make()
    gamma, reason = default_localization(problem, at_defaults(problem))
    factor = problem.num_parameters / float(problem.vector.square().sum()) / gamma
    assert factor == pytest.approx(128)
    assert "divided by 128: the data determine 100% of the directions" in reason


def test_at_the_origin_the_scale_is_one():
    assert default_localization(bowl((1e-9,) * 5), 1000.0) == (1.0, "1, for w* = 0")
    gamma, reason = default_localization(bowl((1.0, 3.0)), 1000.0)
    assert gamma == 1 / 128
    assert reason.startswith("1, for w* = 0, divided by 128")


def test_directions_that_the_data_leave_open_keep_the_localization_strong():
    """Of 10 directions 9 are flat: β is 0.9 at least, and γ = γ₀·β² rounds to γ₀."""
    assert default_localization(bowl((1.0,) + (0.0,) * 9), 1000.0)[0] == 1.0
    half = default_localization(bowl((1.0,) * 5 + (0.0,) * 5), 1e9)[0]
    assert half == 0.25, "β = ½"


def test_a_loss_that_can_be_differentiated_once_keeps_the_scale():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, w: Tensor) -> Tensor:
            ctx.save_for_backward(w)
            return w.square().sum()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 2 * grad * ctx.saved_tensors[0]

    problem = Problem.from_function(
        lambda p: Once.apply(p["w"]), {"w": torch.full((4,), 0.5).double()}, num_samples=99
    )
    assert default_localization(problem, 10.0) == (4.0, "P/‖w*‖²")


# Equivariance


@pytest.mark.parametrize("factor", [1e-2, 7.0])
@pytest.mark.parametrize("make", [regression, network], ids=["regression", "network"])
def test_parameters_in_another_unit_have_another_localization(make, factor):
    """L'(w') = L(w'/c): γ' = γ/c²."""
    problem = make()
    nbeta = at_defaults(problem)
    moved = rescaled(problem, factor)
    assert moved.loss() == pytest.approx(problem.loss())
    plain = default_localization(problem, nbeta)[0]
    assert default_localization(moved, nbeta)[0] * factor**2 == pytest.approx(plain, rel=1e-9)


def rescaled(problem: Problem, factor: float) -> Problem:
    """The same problem with its parameters multiplied by ``factor``, and divided again where
    they are used.
    """

    whole = problem.subset(range(problem.num_samples), problem.num_samples)
    batch = whole.batches.first()
    return Problem.from_function(
        lambda p: whole.batch_loss(whole.named(p["w"] / factor), batch).reshape(()),
        {"w": factor * whole.vector},
        num_samples=whole.num_samples,
    )


@cache
def in_unit(unit, kernel):
    """The coefficient of a regression whose parameters are ``unit`` times as large."""
    x, y = normal(300, 6), normal(300)
    start = {"w": unit * torch.linalg.lstsq(x, y).solution}
    problem = Problem.from_function(
        lambda p, b: 0.5 * (b[1] - b[0] @ p["w"] / unit).square().mean(), start, (x, y)
    )
    return llc(problem, kernel=kernel, max_gradients=2400)


@pytest.mark.parametrize("kernel", ["kinetic", "sgld", "hmc"])
@pytest.mark.parametrize("factor", [1e9, 1e-9])
def test_parameters_in_another_unit_have_the_same_coefficient(kernel, factor):
    plain, moved = in_unit(1.0, kernel), in_unit(factor, kernel)
    assert moved.localization * factor**2 == pytest.approx(plain.localization)
    length = factor if kernel == "kinetic" else factor**2
    assert moved.step_size == pytest.approx(length * plain.step_size, rel=1e-3)
    assert moved.value == pytest.approx(plain.value, rel=1e-3), (
        "the same random numbers in another unit"
    )


# What it takes off λ̂


def test_regular_models_have_half_their_parameters():
    """λ̂ = ½Σ nβh/(nβh + γ) of a linear regression is exact, that of a logistic regression its
    Laplace approximation.
    """
    for problem in (regression(width=11), logistic()):
        nbeta = at_defaults(problem)
        gamma = default_localization(problem, nbeta)[0]
        values = torch.linalg.eigvalsh(hessian(problem).dense()).tolist()
        assert exact.quadratic(values, nbeta, gamma) == pytest.approx(5.5, rel=0.03)


def test_a_logistic_regression_has_half_its_parameters():
    problem = logistic()
    found = llc(problem, kernel="kinetic", max_gradients=5000)
    x, y = data_of(problem)
    truth = logistic_expectation(x, y, problem.vector, found.nbeta, found.localization, draws=2000)
    assert float(truth) == pytest.approx(5.5, rel=0.03)
    assert abs(found.value - float(truth)) < 4 * found.stderr
    assert found.stderr < 0.03 * found.value
