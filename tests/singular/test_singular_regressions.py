"""Singular regressions with data: their truths against quadrature, HMC on the data, and
Hessians.
"""

import math

import numpy as np
import pytest
import torch
from torch.func import functional_call, grad_and_value, vmap

from lambdahat.operators.curvature import hessian
from lambdahat.singular import singular_regressions as module
from lambdahat.singular.exact import (
    crossing_expectation,
    factorization_expectation,
    linear_network_expectation,
)
from lambdahat.singular.singular_regressions import OneLayer, singular_regressions

CASES = {case.name: case for case in singular_regressions()}
FLAT = "data-tanh-zero", "data-tanh-zero-bias", "data-linear-2-2-2-2-r0-exact"  # no Hessian at w*
BRIEF = "data-linear-3-3-3-3-r1-noisy", "data-factors-8x6-r1-h2", "data-tanh-twins"


def nbeta_of(problem):
    return problem.num_samples / math.log(problem.num_samples)


def natural_localization(problem):
    """P/‖w*‖², or 1 at w* = 0."""
    square = float(problem.vector.double().square().sum())
    return problem.num_parameters / square if square else 1.0


def data_of(problem):
    x, y = (torch.cat(parts) for parts in zip(*(b.data for b in problem.batches), strict=True))
    return x, y.double()


def compressed(problem):
    """Few x, y and weights whose Σ weight·½‖y − f(x)‖² is the loss of a problem, less a constant.

    Samples of equal inputs become one with their mean target. The loss of a linear network is the
    same on the triangular factor of (x, y), because that has the same second moments.
    """
    x, y = data_of(problem)
    if "linear" in type_of(problem):
        triangle = torch.linalg.qr(torch.cat([x.double(), y], dim=1)).R
        weights = torch.full((len(triangle),), 1 / len(x), dtype=torch.float64)
        return triangle[:, : x.shape[1]], triangle[:, x.shape[1] :], weights
    distinct, index, counts = x.unique(dim=0, return_inverse=True, return_counts=True)
    sums = torch.zeros(len(distinct), y.shape[1], dtype=torch.float64).index_add_(0, index, y)
    distinct = distinct.double() if distinct.is_floating_point() else distinct
    return distinct, sums / counts.unsqueeze(1), counts.double() / len(x)


def type_of(problem):
    layers = list(problem.model.children())
    return "linear" if all(isinstance(layer, torch.nn.Linear) for layer in layers) else "other"


class Hamiltonian:
    """HMC on the compressed data in float64, which shares nothing with the library's samplers."""

    def __init__(self, problem, localization, chains):
        self.problem, self.localization, self.nbeta = problem, localization, nbeta_of(problem)
        self.centre, self.rng = problem.vector.double(), torch.Generator().manual_seed(0)
        self.shapes = {name: value.shape for name, value in problem.model.named_parameters()}
        self.data = compressed(problem)
        self.evaluate = vmap(grad_and_value(self.energy, has_aux=True))
        curvature = float(torch.linalg.eigvalsh(hessian(problem).dense().double()).max())
        self.step = 1.0 / math.sqrt(self.nbeta * max(curvature, 1.0) + localization)
        start = torch.randn(chains, len(self.centre), generator=self.rng, dtype=torch.float64)
        self.at = self.centre + self.step * start
        self.lowest = self.loss(self.centre)

    def loss(self, w):
        x, y, weights = self.data
        parts = w.split([shape.numel() for shape in self.shapes.values()])
        pairs = zip(self.shapes.items(), parts, strict=True)
        named = {name: part.view(shape) for (name, shape), part in pairs}
        output = functional_call(self.problem.model, named, (x,))
        return 0.5 * self.nbeta * (weights * (y - output).square().sum(dim=1)).sum()

    def energy(self, w):
        loss = self.loss(w)
        return loss + 0.5 * self.localization * (w - self.centre).square().sum(), loss

    def trajectory(self, steps):
        """One proposal of every chain; returns the share accepted and nβ(L − L*)."""
        gradient, (energy, loss) = self.evaluate(self.at)
        momentum = torch.randn(self.at.shape, generator=self.rng, dtype=torch.float64)
        random = 0.5 + torch.rand(len(self.at), 1, generator=self.rng, dtype=torch.float64)
        size = self.step * random
        start, at = energy + 0.5 * momentum.square().sum(1), self.at
        for _ in range(steps):
            momentum = momentum - 0.5 * size * gradient
            at = at + size * momentum
            gradient, (energy, new_loss) = self.evaluate(at)
            momentum = momentum - 0.5 * size * gradient
        uniform = torch.rand(len(at), generator=self.rng, dtype=torch.float64)
        accept = uniform.log() < start - energy - 0.5 * momentum.square().sum(1)
        self.at = torch.where(accept.unsqueeze(1), at, self.at)
        return float(accept.double().mean()), torch.where(accept, new_loss, loss) - self.lowest

    def expectation(self, trajectories):
        """nβ·E[L − L*] and its standard error, by the second half of the trajectories."""
        for _ in range(trajectories // 2):
            share, _ = self.trajectory(10)
            self.step *= 1.1 if share > 0.8 else 0.9
        kept = torch.stack([self.trajectory(20)[1] for _ in range(trajectories // 2)])
        means = kept.mean(dim=0)
        return float(means.mean()), float(means.std()) / math.sqrt(len(means))


def test_there_are_enough_regressions_and_each_has_enough_data():
    assert len(CASES) >= 12
    assert sum(name.endswith("-noisy") for name in CASES) >= 6
    for case in CASES.values():
        problem = case.make()
        assert 10_000 <= problem.num_samples <= 50_000
        assert problem.dtype == torch.float32
        assert problem.model is not None
        assert case.asymptotic < problem.num_parameters / 2


@pytest.mark.parametrize("name", [name for name in CASES if name not in FLAT])
def test_truths_near_the_centre_follow_from_the_hessian_of_the_data(name, monkeypatch):
    """Where γ leaves only the quadratic form, ½·Σ nβh/(nβh + γ), and chains differ little."""
    monkeypatch.setattr(module, "SWEEPS", (40,))
    problem = CASES[name].make()
    stiffness = nbeta_of(problem) * torch.linalg.eigvalsh(hessian(problem).dense().double())
    gamma = 1e6
    expected = 0.5 * float((stiffness / (stiffness + gamma)).sum())
    found = CASES[name].truth(nbeta_of(problem), gamma)
    assert abs(float(found) - expected) < 4 * float(found.stderr) + 0.003 * expected
    assert float(found.stderr) < 0.02 * expected


@pytest.mark.parametrize(
    ("name", "gamma"), [("data-linear-1-1-1-r0-noisy", 100.0), ("data-linear-1-1-1-r1-noisy", 1.0)]
)
def test_block_gibbs_on_data_agrees_with_quadrature(name, gamma):
    """The network abx is one layer with the identity for its activation."""
    problem = CASES[name].make()
    x, y, weights = compressed(problem)
    b, a = (part.view(1, 1) for part in problem.vector.double())
    exact = OneLayer(torch.clone, x, weights, y, b, a).expectation(nbeta_of(problem), gamma)
    found = CASES[name].truth(nbeta_of(problem), gamma)
    error = math.hypot(float(found.stderr), float(exact.stderr))
    assert exact.status.ok
    assert abs(float(found) - float(exact)) < 4 * error
    assert float(found.stderr) < 0.005 * float(exact)


def test_a_factorization_of_equal_shares_is_a_linear_network():
    """Two Gibbs samplers of the same posterior that draw from their conditionals in different
    ways.
    """
    rng = torch.Generator().manual_seed(1)
    u, v, target = (
        torch.randn(*shape, generator=rng).double() for shape in ((5, 2), (4, 2), (5, 4))
    )
    shares = torch.full((5, 4), 1 / 20, dtype=torch.float64)
    scale = math.sqrt(1 / 20)
    white = scale * torch.eye(4, dtype=torch.float64)
    first = factorization_expectation((u, v), shares, target, 500.0, 2.0, sweeps=300)
    second = linear_network_expectation(
        [v.mT, u], white, scale * target, 500.0, 2.0, sweeps=300, seed=1
    )
    error = math.hypot(float(first.stderr), float(second.stderr))
    assert abs(float(first) - float(second)) < 4 * error
    assert error < 0.01 * abs(float(first))


def test_quadrature_agrees_with_a_plain_grid_over_all_parameters():
    problem = CASES["data-tanh-zero"].make()
    nbeta, gamma = nbeta_of(problem), 10.0
    x, y, weights = (part.numpy() for part in compressed(problem))
    axis = np.linspace(-3.0, 3.0, 3001)
    units = np.tanh(axis[:, None] * x[:, 0])
    second, first = units**2 @ weights, units @ (weights * y[:, 0])
    a = axis[:, None]
    energy = 0.5 * nbeta * (a**2 * second - 2 * a * first)
    density = np.exp(-energy - 0.5 * gamma * (a**2 + axis**2))
    expected = (density * energy).sum() / density.sum()
    found = CASES["data-tanh-zero"].truth(nbeta, gamma)
    assert float(found) == pytest.approx(expected, rel=1e-6)


def test_a_tanh_unit_close_to_zero_is_a_normal_crossing():
    """½·E[x²]·a²b² at nβ is the crossing a²b² at nβ·E[x²]/2."""
    problem = CASES["data-tanh-zero"].make()
    x, _ = data_of(problem)
    nbeta, gamma = 1e6, 1e4
    expected = crossing_expectation((1, 1), nbeta * float(x.double().square().mean()) / 2, gamma)
    assert float(CASES["data-tanh-zero"].truth(nbeta, gamma)) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "regular"),
    [("data-tanh-zero-bias", 0.5), ("data-relu-twins", 0.5), ("data-relu-dead", 0.5)],
)
def test_truths_without_logarithms_tend_to_the_asymptotic_value(name, regular):
    assert CASES[name].asymptotic == regular
    assert float(CASES[name].truth(3e4, 0.1)) == pytest.approx(regular, rel=0.02)


@pytest.mark.parametrize("name", BRIEF)
def test_truths_agree_with_hamiltonian_monte_carlo_on_the_data(name, monkeypatch):
    monkeypatch.setattr(module, "SWEEPS", (200,))
    problem = CASES[name].make()
    assert_agreement(name, 2 * natural_localization(problem), 60, chains=48, error=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_all_truths_agree_with_hamiltonian_monte_carlo_on_the_data(name):
    problem = CASES[name].make()
    assert_agreement(name, natural_localization(problem), 600, chains=128, error=0.02)


def assert_agreement(name, gamma, trajectories, chains, error):
    problem = CASES[name].make()
    truth = CASES[name].truth(nbeta_of(problem), gamma)
    value, stderr = Hamiltonian(problem, gamma, chains).expectation(trajectories)
    assert truth.status.ok
    assert float(truth.stderr) < 0.005 * float(truth)
    assert stderr < error * float(truth)
    assert abs(value - float(truth)) < 4 * math.hypot(stderr, float(truth.stderr))


@pytest.mark.slow
@pytest.mark.parametrize("gamma", [0.1, 1.0, 10.0, 100.0])
@pytest.mark.parametrize("name", CASES)
def test_truths_are_known_well_at_any_localization(name, gamma):
    problem = CASES[name].make()
    truth = CASES[name].truth(nbeta_of(problem), gamma)
    assert truth.status.ok
    assert 0 < float(truth) < problem.num_parameters / 2
    assert float(truth.stderr) <= 0.005 * float(truth)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("data-l", "data-f"))])
def test_long_runs_of_the_gibbs_samplers_agree_with_short_ones(name, monkeypatch):
    problem = CASES[name].make()
    gamma = natural_localization(problem)
    brief = CASES[name].truth(nbeta_of(problem), gamma)
    monkeypatch.setattr(module, "SWEEPS", (5000,))
    near = CASES[name].truth(nbeta_of(problem), gamma * (1 + 1e-9))  # another key of its cache
    assert abs(float(near) - float(brief)) < 4 * math.hypot(float(near.stderr), float(brief.stderr))
