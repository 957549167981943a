"""Spectral SGD on quadratics whose best rate, momentum and convergence factor are known."""

import io
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lambdahat as lh
from lambdahat.models import mlp
from lambdahat.optim import SpectralSGD
from lambdahat.optim.spectral_sgd import curvature_range
from lambdahat.results import Spectrum
from tests.cases import quadratic, with_eigenvalues

LOW, HIGH = 0.5, 32.0
KAPPA = HIGH / LOW
FACTOR = (math.sqrt(KAPPA) - 1) / (math.sqrt(KAPPA) + 1)
EXPECTED = {
    False: (4 / (math.sqrt(HIGH) + math.sqrt(LOW)) ** 2, FACTOR**2),
    True: (1 / HIGH, FACTOR),
}


def convex(seed=0):
    values = torch.linspace(LOW, HIGH, 24, dtype=torch.float64)
    theta = nn.Parameter(torch.ones(24, dtype=torch.float64))
    return with_eigenvalues(values, seed), theta


def run(matrix, theta, optimizer, steps):
    """The distance from the minimum after every step."""
    distances = []
    for _ in range(steps):
        theta.grad = matrix @ theta.detach()
        optimizer.step()
        distances.append(float(theta.detach().norm()))
    return np.array(distances)


@pytest.mark.parametrize("nesterov", [False, True])
def test_rate_and_momentum_of_a_quadratic(nesterov):
    matrix, theta = convex()
    optimizer = SpectralSGD([theta], nesterov=nesterov, depth=24)
    optimizer.observe(quadratic(matrix, theta=theta))
    rate, momentum = EXPECTED[nesterov]
    assert optimizer.param_groups[0]["rate"] == pytest.approx(rate, rel=1e-9)
    assert optimizer.param_groups[0]["momentum"] == pytest.approx(momentum, rel=1e-9)


@pytest.mark.parametrize("nesterov", [False, True])
def test_converges_at_the_best_factor(nesterov):
    matrix, theta = convex()
    optimizer = SpectralSGD([theta], nesterov=nesterov, depth=24)
    optimizer.observe(quadratic(matrix, theta=theta))
    distances = run(matrix, theta, optimizer, 120)
    # (√κ − 1)/(√κ + 1) for the heavy ball, 1 − 1/√κ for Nesterov; a double root adds a factor
    # linear in t
    factor = 1 - 1 / math.sqrt(KAPPA) if nesterov else FACTOR
    measured = (distances[119] / distances[59] * 60 / 120) ** (1 / 60)
    assert measured == pytest.approx(factor, rel=0.01)


@pytest.mark.parametrize("nesterov", [False, True])
def test_steps_are_those_of_torch_sgd(nesterov):
    matrix, theta = convex()
    other = nn.Parameter(theta.detach().clone())
    optimizer = SpectralSGD([theta], nesterov=nesterov, depth=24, weight_decay=0.02, lr=0.5)
    optimizer.observe(quadratic(matrix, theta=theta))
    rate, momentum = EXPECTED[nesterov]
    sgd = torch.optim.SGD(
        [other], 0.5 * rate, momentum=momentum, nesterov=nesterov, weight_decay=0.02
    )
    run(matrix, theta, optimizer, 10)
    run(matrix, other, sgd, 10)
    torch.testing.assert_close(theta, other, rtol=1e-8, atol=1e-9)


def test_the_null_space_is_left_out():
    values = torch.cat(
        [torch.zeros(150), torch.linspace(2.0, 18.0, 17), torch.full((3,), -1.0)]
    ).double()
    theta = nn.Parameter(torch.ones(170, dtype=torch.float64))
    optimizer = SpectralSGD([theta], depth=19)  # as many as there are different eigenvalues
    optimizer.observe(quadratic(with_eigenvalues(values), theta=theta))
    assert optimizer.param_groups[0]["rate"] == pytest.approx(
        4 / (math.sqrt(18) + math.sqrt(2)) ** 2, rel=1e-6
    )


SPECTRA = {
    "half of the mass is removed": ([0.001, 1.0, 4.0, 9.0], [0.51, 0.2, 0.2, 0.09], (1.0, 9.0)),
    "less is kept": ([0.001, 1.0, 4.0, 9.0], [0.49, 0.2, 0.2, 0.11], (0.001, 9.0)),
    "only the heaviest goes": ([1e-4, 0.01, 1.0, 4.0], [0.6, 0.2, 0.1, 0.1], (0.01, 4.0)),
    "negative values do not count": ([-5.0, -0.1, 1.0, 4.0], [0.3, 0.3, 0.2, 0.2], (1.0, 4.0)),
    "nor does rounding": ([1e-9, 0.5, 1.0, 4.0], [0.4, 0.2, 0.2, 0.2], (0.5, 4.0)),
    "nor nodes without weight": ([0.5, 1.0, 4.0, 4.0], [0.4, 0.4, 0.2, 0.0], (0.5, 4.0)),
    "one eigenvalue stays": ([2.0, 2.0], [1.0, 0.0], (2.0, 2.0)),
}


@pytest.mark.parametrize("name", SPECTRA)
def test_mass_rule(name):
    nodes, weights, expected = SPECTRA[name]
    rows = (np.array([nodes]), np.array([weights]), np.zeros((1, len(nodes))))
    assert curvature_range(Spectrum(*rows, dim=100, resolution=1e-6)) == expected


def test_due_and_schedulers():
    matrix, theta = convex()
    optimizer = SpectralSGD([theta], every=3, depth=24)
    problem = quadratic(matrix, theta=theta)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    seen = []
    for _ in range(7):
        seen.append(optimizer.due)
        if optimizer.due:
            optimizer.observe(problem)
        run(matrix, theta, optimizer, 1)
        schedule.step()
    assert seen == [True, False, False, True, False, False, True]
    assert optimizer.rate(optimizer.param_groups[0]) == pytest.approx(EXPECTED[False][0] / 2**7)
    once = SpectralSGD([theta], depth=24)
    assert once.due
    once.observe(problem)
    run(matrix, theta, once, 3)
    assert not once.due


@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
def test_resumes_bit_for_bit(curvature):
    x, y = torch.randn(30, 4), torch.randint(3, (30,))

    def build(model):
        return SpectralSGD(
            model.parameters(), every=3, lr=0.2, nesterov=True, depth=8, curvature=curvature
        )

    def advance(model, optimizer, steps):
        for _ in range(steps):
            if optimizer.due:
                optimizer.observe(lh.Problem(model, "cross_entropy", (x, y)))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    model, other = mlp([4, 5, 3], seed=0), mlp([4, 5, 3], seed=1)
    optimizer, again = build(model), build(other)
    advance(model, optimizer, 4)
    buffer = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], buffer)
    buffer.seek(0)
    weights, state = torch.load(buffer)
    other.load_state_dict(weights)
    again.load_state_dict(state)
    advance(model, optimizer, 5)
    advance(other, again, 5)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def concave():
    theta = nn.Parameter(torch.ones(8, dtype=torch.float64))
    SpectralSGD([theta]).observe(
        quadratic(with_eigenvalues(torch.linspace(-4, -1, 8)), theta=theta)
    )


MISUSES = {
    "no observation": (
        lambda t: SpectralSGD([t]).step(),
        RuntimeError,
        r"observe\(problem\) must be called before",
    ),
    "every 0 steps": (
        lambda t: SpectralSGD([t], every=0),
        ValueError,
        "every must be an integer of at least 1",
    ),
    "no depth": (
        lambda t: SpectralSGD([t], depth=0),
        ValueError,
        "depth must be an integer of at least 1",
    ),
    "unknown curvature": (
        lambda t: SpectralSGD([t], curvature="fisher"),
        ValueError,
        "curvature must be one of 'hes",
    ),
    "negative rate": (
        lambda t: SpectralSGD([t], lr=-1.0),
        ValueError,
        "lr must be a finite number of at least 0",
    ),
    "concave": (
        lambda t: concave(),
        ValueError,
        "the curvature must have a positive eigenvalue.*larger batch",
    ),
    "a model": (
        lambda t: SpectralSGD([t]).observe(nn.Linear(2, 2)),
        TypeError,
        "problem must be a lambdahat.Problem",
    ),
    "another point": (
        lambda t: SpectralSGD([t]).observe(quadratic(torch.eye(3))),
        ValueError,
        "present parameters.*in training",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_refused_with_the_cure(name):
    call, error, text = MISUSES[name]
    with pytest.raises(error, match=text):
        call(nn.Parameter(torch.ones(3)))
