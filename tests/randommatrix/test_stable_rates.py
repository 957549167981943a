"""The largest stable rate by bisection, where it is known exactly."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from lambdahat._core.rng import generator
from lambdahat.problem import Problem
from lambdahat.randommatrix.stable_rates import StableRate, bisect_rate, largest_stable_rate
from lambdahat.results import Result
from tests.cases import classifier

FINE = 0.02


def least_squares(rows, theta):
    """½ of the mean of (x_iᵀθ)², which vanishes at θ = 0: H̄ = XᵀX/n, H_i = x_i x_iᵀ."""
    return Problem.from_function(
        lambda p, x: 0.5 * (x @ p["theta"]).square().mean(),
        {"theta": torch.as_tensor(theta).double()},
        rows,
        batch_size=3,
    )


@pytest.fixture(scope="module")
def regression():
    """Ten samples in three dimensions, started along the sharpest direction and a little beside
    it.
    """
    rows = torch.randn(10, 3, generator=generator(0, "regression"), dtype=torch.float64)
    values, vectors = torch.linalg.eigh(rows.T @ rows / 10)
    return least_squares(rows, vectors[:, 2] + 0.1 * vectors[:, 0]), float(values[2])


def heavy_ball(momentum, nesterov=False):
    return lambda parameters, rate: torch.optim.SGD(
        parameters, rate, momentum=momentum, nesterov=nesterov
    )


RHO = 0.7
LIMITS = {
    "sgd": ("sgd", 2.0),
    "momentum": ("momentum", 2 * 1.9),
    "nesterov": ("nesterov", 2 * 1.9 / 2.8),
    "other momentum": (heavy_ball(RHO), 2 * (1 + RHO)),
    "other nesterov": (heavy_ball(RHO, nesterov=True), 2 * (1 + RHO) / (1 + 2 * RHO)),
}


@pytest.mark.parametrize("name", LIMITS)
def test_with_all_data_the_limit_is_the_textbook_one(regression, name):
    problem, sharpest = regression
    optimizer, limit = LIMITS[name]
    found = largest_stable_rate(problem, optimizer, steps=100, tol=FINE)
    assert math.isclose(float(found), limit / sharpest, rel_tol=FINE)
    assert abs(float(found) - limit / sharpest) < 3 * float(found.stderr)
    assert (found.batch_size, found.steps, len(found.per_run)) == (10, 100, 1)
    assert found.cost > 100


@pytest.mark.parametrize("start", [1e-3, 1e3])
def test_where_the_search_starts_does_not_matter(regression, start):
    problem, sharpest = regression
    found = largest_stable_rate(problem, steps=100, tol=FINE, start=start)
    assert math.isclose(float(found), 2 / sharpest, rel_tol=FINE)


def test_one_sample_a_step_has_the_limit_of_its_own_curvature():
    """Samples along the axes never mix: each step multiplies one coordinate by 1 − αd, and H̄ =
    I has limit 2.
    """
    size = 5
    problem = least_squares(
        math.sqrt(size) * torch.eye(size, dtype=torch.float64), torch.ones(size)
    )
    found = largest_stable_rate(problem, batch_size=1, steps=100, tol=FINE)
    assert math.isclose(float(found), 2 / size, rel_tol=FINE)
    assert len(found.per_run) == 3
    assert math.isclose(float(largest_stable_rate(problem, steps=100, tol=FINE)), 2.0, rel_tol=FINE)


def test_the_error_is_of_the_runs_and_of_the_last_interval():
    problem = classifier(samples=20)
    found = largest_stable_rate(problem, batch_size=5, steps=20, tol=0.3, runs=4, seed=1)
    logs = np.log(found.per_run)
    spread = logs.var(ddof=1) / 4
    assert spread > 0
    assert spread < (float(found.stderr) / float(found)) ** 2 <= spread + math.log(1.3) ** 2 / 12
    assert math.isclose(float(found), math.exp(logs.mean()))
    assert found.dof == 3


def test_the_same_seed_gives_the_same_rate_and_the_model_is_untouched(tmp_path):
    problem = classifier()
    before = problem.vector
    first, again = (
        largest_stable_rate(problem, "adam", 5, steps=10, tol=0.5, runs=2) for _ in range(2)
    )
    assert float(first) == float(again)
    assert torch.equal(problem.vector, before)
    first.save(tmp_path / "rate")
    assert float(Result.load(tmp_path / "rate").per_run[1]) == float(first.per_run[1])
    assert isinstance(Result.load(tmp_path / "rate"), StableRate)


def test_batches_are_epochs_without_replacement():
    seen = []

    def loss(params, x):
        seen.append(x.flatten().tolist())
        return (params["w"] * x).square().mean()

    problem = Problem.from_function(
        loss, {"w": torch.ones(1).double()}, torch.arange(1.0, 8.0).double()[:, None]
    )
    seen.clear()
    largest_stable_rate(problem, batch_size=3, steps=4, tol=1.0, runs=2)
    steps = [batch for batch in seen if len(batch) == 3]
    assert len(steps) >= 8
    assert len(set(steps[0] + steps[1])) == 6
    assert len(set(steps[2] + steps[3])) == 6
    assert steps[0] + steps[1] != steps[2] + steps[3]


def test_batches_padded_to_different_lengths_are_drawn_too():
    data = [(torch.ones(4, 3).double(),), (2 * torch.ones(4, 2).double(),)]
    problem = Problem.from_function(
        lambda p, x: (p["w"] * x[0]).square().mean(), {"w": torch.ones(1).double()}, data
    )
    found = largest_stable_rate(problem, batch_size=2, steps=20, tol=0.1, runs=2)
    assert 1 / 8 <= float(found) <= 1.0


def test_a_dead_network_is_told_from_one_that_learns_by_the_factor():
    """tanh saturates: at any rate the loss stays below a bound, so only a factor below 1 finds a
    limit.
    """
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Tanh()).double()
    with torch.no_grad():
        net[0].weight.fill_(0.1)
    x = torch.linspace(-1, 1, 8, dtype=torch.float64)[:, None]
    problem = Problem(net, "mse", (x, torch.tanh(0.5 * x)))
    with pytest.raises(
        ValueError, match="the optimiser must be stable at some rates and not at others"
    ):
        largest_stable_rate(problem, lambda p, rate: torch.optim.SGD(p, rate), steps=1, factor=1e6)
    assert float(largest_stable_rate(problem, steps=5, factor=0.5)) > 0


def test_bisection_brackets():
    low, high = bisect_rate(lambda rate: rate <= 0.3, 7.0, 1e-3)
    assert low <= 0.3 < high <= 1.001 * low


BOWL = Problem.from_function(lambda p: p["w"].square().sum(), {"w": torch.ones(2).double()})
MISUSES = {
    "a model": (
        lambda: largest_stable_rate(nn.Linear(1, 1)),
        TypeError,
        "problem must be a lambdahat.Problem",
    ),
    "unknown name": (
        lambda: largest_stable_rate(BOWL, "kfac"),
        ValueError,
        r"be one of 'sgd'.*pass a f",
    ),
    "an optimiser": (
        lambda: largest_stable_rate(BOWL, torch.optim.SGD([torch.ones(1)], 0.1)),
        TypeError,
        r"a function \(parameters, rate\)",
    ),
    "a number": (
        lambda: largest_stable_rate(BOWL, 3),
        TypeError,
        "optimizer must be one of sgd, momentum",
    ),
    "another thing returned": (
        lambda: largest_stable_rate(BOWL, lambda p, rate: rate),
        TypeError,
        "optimizer must return a torch.optim.Optimizer, got 0.1",
    ),
    "batch beyond the data": (
        lambda: largest_stable_rate(BOWL, batch_size=2),
        ValueError,
        r"batch_size must be an integer in \[1, 1\].*than the data",
    ),
    "no steps": (
        lambda: largest_stable_rate(BOWL, steps=0),
        ValueError,
        "steps must be an integer of at least 1",
    ),
    "one run": (
        lambda: largest_stable_rate(BOWL, runs=1),
        ValueError,
        "runs must be .* 2, got 1; one run shows no",
    ),
    "no tolerance": (
        lambda: largest_stable_rate(BOWL, tol=0.0),
        ValueError,
        "tol must be a finite number above 0",
    ),
    "start below 0": (
        lambda: largest_stable_rate(BOWL, start=-1.0),
        ValueError,
        "start must be a finite number",
    ),
    "from a minimum": (
        lambda: largest_stable_rate(BOWL.at(torch.zeros(2))),
        ValueError,
        "loss at the start must be above 0, got 0",
    ),
    "a negative loss": (
        lambda: largest_stable_rate(
            Problem.from_function(
                lambda p: p["w"].square().sum() - 5, {"w": torch.ones(2).double()}
            )
        ),
        ValueError,
        "shift it",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse(name):
    call, error, text = MISUSES[name]
    with pytest.raises(error, match=text):
        call()
