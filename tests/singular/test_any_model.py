"""``llc`` takes any model unchanged: regression, batch-norm in both modes, a language model, a
bare function.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from lambdahat._core.rng import generator
from lambdahat.problem import Problem
from lambdahat.results import LearningCoefficient, Status
from lambdahat.singular._llc import llc
from tests.cases import LanguageModel, sentences

SHORT = {"chains": 2, "max_gradients": 800, "localization": 10.0}
# HMC on the whole data, as problems so small have it
AUTOMATIC = pytest.param(None, marks=pytest.mark.slow)
# as so short a run may end; not DIVERGED
SOUND = (Status.CONVERGED, Status.GRADIENTS_SPENT, Status.NOT_MIXED)


def trained(problem_of, model, loss_of, steps=150, rate=0.02):
    """The problem at parameters near a minimum, found by Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    return problem_of(model)


def measured(
    problem: Problem, model: nn.Module | None = None, **settings: object
) -> LearningCoefficient:
    """``llc``, after which the model and the global generator must be as they were."""
    before = (
        {} if model is None else {name: value.clone() for name, value in model.state_dict().items()}
    )
    mode = None if model is None else model.training
    state = torch.get_rng_state()
    found = llc(problem, seed=0, **{**SHORT, **settings})
    assert torch.equal(state, torch.get_rng_state())
    if model is not None:
        assert model.training is mode
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert all(parameter.grad is None for parameter in model.parameters())
    return found


def assert_sound(found: LearningCoefficient, problem: Problem) -> None:
    assert math.isfinite(found.value)
    assert 0 < found.stderr < math.inf
    # no more than a regular model has
    assert 0 < found.value < problem.num_parameters / 2 + 4 * found.stderr
    assert found.status in SOUND
    assert np.isfinite(found.chains.losses).all()
    assert found.initial_loss == pytest.approx(problem.loss(), rel=1e-5)
    assert found.nbeta == pytest.approx(problem.num_samples / math.log(problem.num_samples))
    assert found.wbic is not None


def clean(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.grad = None
    return model


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize("kernel", [None, "sgld"])
def test_regression_model(kernel):
    rng = generator(0, "regression")
    x = torch.randn(600, 3, generator=rng)
    y = torch.sin(x[:, :1]) + 0.3 * torch.randn(600, 1, generator=rng)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    loss = nn.MSELoss()
    problem = trained(lambda m: Problem(clean(m), "mse", (x, y)), model, lambda m: loss(m(x), y))
    assert_sound(measured(problem, model, kernel=kernel), problem)


@pytest.mark.parametrize("kernel", [AUTOMATIC, "sgld"])
@pytest.mark.parametrize("norm", ["eval", "train"])
def test_image_classifier_with_batch_norm(norm, kernel):
    rng = generator(0, "images")
    x = torch.randn(512, 1, 6, 6, generator=rng)
    y = (x[:, 0, :3].mean((1, 2)) > x[:, 0, 3:].mean((1, 2))).long()
    y = torch.where(torch.rand(512, generator=rng) < 0.1, 1 - y, y)  # so that no weights fit all
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2)
    )
    loss = nn.CrossEntropyLoss()
    options = {"norm": norm, "batch_size": 128}
    problem = trained(
        lambda m: Problem(clean(m), "cross_entropy", (x, y), **options),
        model,
        lambda m: loss(m(x), y),
        100,
    )
    found = measured(problem, model, kernel=kernel)
    assert_sound(found, problem)
    if norm == "train" and kernel == "sgld":
        # a sample's loss depends on its batch: the problem's own are drawn
        assert found.chains.batch_size == 128


@pytest.mark.parametrize("kernel", [AUTOMATIC, "sgld"])
@pytest.mark.parametrize("loss", ["cross_entropy", "model"])
def test_language_model_with_token_losses_and_dict_batches(loss, kernel):
    columns, model = sentences(count=60), LanguageModel()
    problem = trained(
        lambda m: Problem(clean(m), loss, columns, batch_size=10),
        model,
        lambda m: m(**columns).loss,
        200,
    )
    assert_sound(measured(problem, model, kernel=kernel), problem)


@pytest.mark.parametrize("kernel", [None, "sgld"])
def test_function_with_data(kernel):
    rng = generator(0, "function")
    x = torch.rand(500, generator=rng)
    y = 2 * torch.exp(-0.7 * x) + 0.1 * torch.randn(500, generator=rng)
    start = {"a": torch.tensor(2.0), "k": torch.tensor(0.7)}

    def loss(parameters, batch):
        x, y = batch
        return (parameters["a"] * torch.exp(-parameters["k"] * x) - y).square().mean()

    problem = Problem.from_function(loss, start, (x, y))
    found = measured(problem, kernel=kernel, localization=1.0)
    assert {name: float(value) for name, value in start.items()} == pytest.approx(
        {"a": 2.0, "k": 0.7}
    )
    assert_sound(found, problem)


def test_function_without_data():
    problem = Problem.from_function(
        lambda p: p["w"].square().sum() / 2, {"w": torch.zeros(4)}, num_samples=1000
    )
    found = measured(problem, localization=None)
    assert found.chains.kernel == "HMC"
    assert_sound(found, problem)
    nbeta = 1000 / math.log(1000)
    exact = 2 * nbeta / (nbeta + found.localization)
    assert abs(found.value - exact) < 4 * found.stderr
