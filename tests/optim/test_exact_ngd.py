"""The natural gradient with the whole Fisher matrix, against closed forms and dense float64."""

import copy
import math

import pytest
import torch
from torch import nn

from lambdahat._core.rng import generator
from lambdahat.models import mlp
from lambdahat.operators.curvature import fisher
from lambdahat.optim import ExactNGD
from lambdahat.problem import Problem
from tests.cases import classifier

KINDS = ("exact", "empirical", "monte_carlo")


def regression(outputs=2):
    """A linear model with Gaussian noise: the negative log-likelihood is half the squared error."""
    rng = generator(0, "linear gaussian")
    x = torch.randn(40, 5, generator=rng, dtype=torch.float64) * torch.logspace(
        0, -2, 5, dtype=torch.float64
    )
    y = x @ torch.randn(5, outputs, generator=rng, dtype=torch.float64) + torch.randn(
        40, outputs, generator=rng, dtype=torch.float64
    )
    return mlp([5, outputs]).double(), (x, y)


def small():
    """A classifier whose model is in the optimiser's hands, and its problem."""
    model = mlp([4, 5, 3], "tanh").double()
    rng = generator(0, "small")
    data = (
        torch.randn(30, 4, generator=rng, dtype=torch.float64),
        torch.randint(0, 3, (30,), generator=rng),
    )
    return model, Problem(model, "cross_entropy", data), data


def back(model, data, optimizer):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(data[0]), data[1])
    loss.backward()
    return loss


def flat(model):
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


@pytest.mark.parametrize("solver", ["dense", "cg"])
def test_a_linear_gaussian_model_takes_one_step(solver):
    model, (x, y) = regression()
    problem = Problem(model, "mse", (x, y))
    optimizer = ExactNGD(model.parameters(), lr=1.0, alpha=0.0, solver=solver, tol=1e-13)
    optimizer.observe(problem)
    for parameter, part in zip(
        model.parameters(), problem.space.split(problem.gradient()), strict=True
    ):
        parameter.grad = part.clone()
    optimizer.step()
    best = torch.linalg.lstsq(torch.cat([x, torch.ones(40, 1, dtype=x.dtype)], 1), y).solution
    torch.testing.assert_close(model[0].weight.detach(), best[:-1].T, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(model[0].bias.detach(), best[-1], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("solver", ["dense", "cg"])
@pytest.mark.parametrize("alpha", [1.0, 1e-3])
def test_a_step_solves_the_damped_system(kind, solver, alpha):
    model, problem, data = small()
    optimizer = ExactNGD(
        model.parameters(), lr=0.5, alpha=alpha, fisher=kind, solver=solver, tol=1e-12, seed=3
    )
    before = flat(model)
    assert optimizer.due
    optimizer.observe(problem)
    back(model, data, optimizer)
    gradient = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])
    optimizer.step()
    step = (before - flat(model)) / 0.5
    size = len(before)
    if kind != "monte_carlo":  # drawn targets are the optimiser's own
        F = fisher(problem.at(before), kind).dense()
        kappa = alpha / size * float(F.trace())
        assert math.isclose(optimizer.damping, kappa, rel_tol=1e-6 if solver == "dense" else 0.02)
        F = F + optimizer.damping * torch.eye(size, dtype=F.dtype)
        torch.testing.assert_close(F @ step, gradient, rtol=1e-6, atol=1e-8)
    assert math.isclose(float(optimizer.update_norm), float(step.norm()), rel_tol=1e-9)
    assert float(step @ gradient) > 0
    assert optimizer.due


@pytest.mark.parametrize("solver", ["dense", "cg"])
def test_infinite_smoothing_is_sgd_at_rate_over_kappa(solver):
    model, problem, data = small()
    other = copy.deepcopy(model)
    optimizer = ExactNGD(model.parameters(), lr=1e9, alpha=1e9, solver=solver)
    optimizer.observe(problem)
    plain = torch.optim.SGD(other.parameters(), lr=1e9 / optimizer.damping)
    for net, one in ((model, optimizer), (other, plain)):
        back(net, data, one)
        one.step()
    torch.testing.assert_close(flat(model), flat(other), rtol=1e-6, atol=1e-9)


def test_a_tiny_trace_is_floored():
    model, problem, _ = small()
    optimizer = ExactNGD(model.parameters(), lr=1.0, alpha=2.0, epsilon=1e6)
    optimizer.observe(problem)
    assert math.isclose(optimizer.damping, 2.0 / problem.num_parameters * 1e6)


def test_it_is_due_every_so_often_and_refuses_to_step_before():
    model, problem, data = small()
    optimizer = ExactNGD(model.parameters(), lr=0.1, every=3)
    back(model, data, optimizer)
    with pytest.raises(
        RuntimeError, match=r"observe\(problem\) must be called before this step.*optimizer\.due"
    ):
        optimizer.step()
    seen = []
    for _ in range(7):
        seen.append(optimizer.due)
        if optimizer.due:
            optimizer.observe(problem)
        back(model, data, optimizer)
        optimizer.step()
    assert seen == [True, False, False, True, False, False, True]


def test_a_loaded_state_continues_bit_for_bit():
    model, problem, data = small()
    model, data = model.float(), (data[0].float(), data[1])
    problem = Problem(model, "cross_entropy", data)
    options = {"lr": 0.3, "alpha": 0.1, "every": 4, "momentum": 0.5, "weight_decay": 1e-2}
    optimizer = ExactNGD(model.parameters(), **options)

    def run(net, one, own, steps):
        for _ in range(steps):
            if one.due:
                one.observe(own)
            back(net, data, one)
            one.step()

    run(model, optimizer, problem, 6)
    other = copy.deepcopy(model)
    resumed = ExactNGD(other.parameters(), **options)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(model, optimizer, problem, 5)
    run(other, resumed, Problem(other, "cross_entropy", data), 5)
    assert torch.equal(flat(model), flat(other))


def test_it_trains_faster_than_gradient_descent():
    losses = {}
    for kind in (ExactNGD, torch.optim.SGD):
        model, problem, data = small()
        optimizer = kind(model.parameters(), lr=0.5)
        for _ in range(20):
            if kind is ExactNGD:
                optimizer.observe(problem)
            loss = back(model, data, optimizer)
            optimizer.step()
        losses[kind] = loss.item()
    assert losses[ExactNGD] < 0.5 * losses[torch.optim.SGD]


W = [nn.Parameter(torch.ones(2))]
ERRORS = {
    "negative alpha": (
        lambda: ExactNGD(W, lr=0.1, alpha=-1.0),
        ValueError,
        "alpha must be a finite number",
    ),
    "negative rate": (
        lambda: ExactNGD(W, lr=-0.1),
        ValueError,
        "lr must be a finite number of at least 0",
    ),
    "epsilon of 0": (
        lambda: ExactNGD(W, lr=0.1, epsilon=0.0),
        ValueError,
        "epsilon must be a finite number above 0",
    ),
    "unknown Fisher": (
        lambda: ExactNGD(W, lr=0.1, fisher="kfac"),
        ValueError,
        "fisher must be one of 'exact', 'monte",
    ),
    "unknown solver": (
        lambda: ExactNGD(W, lr=0.1, solver="lu"),
        ValueError,
        "solver must be one of 'dense', 'cg'",
    ),
    "a matrix that is not kept": (
        lambda: ExactNGD(W, lr=0.1, solver="cg", every=2),
        ValueError,
        "every must be 1",
    ),
    "another model's problem": (
        lambda: ExactNGD(W, lr=0.1).observe(classifier()),
        ValueError,
        "problem must have",
    ),
    "a model for a problem": (
        lambda: ExactNGD(W, lr=0.1).observe(nn.Linear(1, 1)),
        TypeError,
        "be a lambdahat.Prob",
    ),
    "singular": (
        lambda: _singular(),
        ValueError,
        r"F \+ κI must be positive definite.*raise alpha",
    ),
}


def _singular():
    model, problem, _ = small()
    ExactNGD(model.parameters(), lr=0.1, alpha=0.0, fisher="empirical").observe(
        problem.subset([0, 1])
    )


@pytest.mark.parametrize("case", ERRORS, ids=str)
def test_misuse_is_named(case):
    call, error, text = ERRORS[case]
    with pytest.raises(error, match=text):
        call()
