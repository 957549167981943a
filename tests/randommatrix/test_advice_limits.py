"""The advised rate against the exact limit: where second moments of the coupled recursion begin
to grow.
"""

import functools

import numpy as np
import pytest
import torch
from scipy.optimize import brentq

from lambdahat._core.rng import generator
from lambdahat.problem import Problem
from lambdahat.randommatrix import advise
from lambdahat.randommatrix.rate_limits import PositiveEstimate, coupled_limit
from lambdahat.results import Estimate

N = 60


def exact_limit(rows, size, rho):
    """The least rate at which the spectral radius of x xᵀ ↦ E[A x xᵀ Aᵀ] is 1, A a step on a
    random batch.
    """
    matrices = np.einsum("ni,nj->nij", rows, rows)
    total, order = rows.shape
    mean = matrices.mean(0)
    apart = matrices - mean
    noise = np.einsum("nij,nkl->ikjl", apart, apart).reshape(order**2, order**2) / total
    noise *= (total - size) / (size * (total - 1))
    eye = np.eye(order)
    # the map takes symmetric matrices to symmetric ones, and grows the most on one of them: by the
    # entries on and above the diagonal alone, its matrix is a quarter of the whole
    row, column = np.triu_indices(2 * order)
    upper, lower = 2 * order * row + column, 2 * order * column + row
    # of the noisy x among (x, x_before)
    places = np.add.outer(2 * order * np.arange(order), np.arange(order)).ravel()

    def growth(rate):
        step = np.block([[(1 + rho) * eye - rate * mean, -rho * eye], [eye, 0 * eye]])
        moments = np.kron(step, step)
        moments[np.ix_(places, places)] += rate**2 * noise
        halved = moments[np.ix_(upper, upper)]
        halved += np.where(row < column, moments[np.ix_(upper, lower)], 0.0)
        return np.abs(np.linalg.eigvals(halved)).max() - 1

    highest = 2 * (1 + rho) / np.linalg.eigvalsh(mean)[-1]
    rates = np.geomspace(1e-3 * highest, highest, 20)
    above = next((i for i, rate in enumerate(rates) if growth(rate) > 1e-9), None)
    return highest if above is None else brentq(growth, rates[above - 1], rates[above], rtol=1e-5)


def _sets(seed=1):
    rng = np.random.default_rng(seed)
    rare = np.eye(4)[rng.choice(4, N, p=[0.6, 0.3, 0.07, 0.03])] * np.array([1, 1.5, 3, 5.0])
    return {
        "one sharp direction": rng.normal(size=(N, 4)) * [3, 1, 1, 1],
        "all alike": rng.normal(size=(N, 4)),
        "heavy tails": rng.standard_t(3, size=(N, 4)),
        "rare features": rare,
        "one constant, three rare": np.concatenate(
            [np.full((N, 1), 2.0), (rng.random((N, 3)) < 0.05) * 4.0], axis=1
        ),
    }


SETS = _sets()
CASES = [(name, size, rho) for name in SETS for size in (1, 4, 16) for rho in (0.0, 0.9)]
IDS = [f"{name}, {size}, {rho}" for name, size, rho in CASES]


def least_squares(rows):
    start = {"theta": torch.ones(rows.shape[1], dtype=torch.float64)}
    return Problem.from_function(
        lambda p, x: 0.5 * (x @ p["theta"]).square().mean(),
        start,
        torch.as_tensor(rows, dtype=torch.float64),
    )


@functools.cache
def truth(name, size, rho):
    return exact_limit(SETS[name], size, rho)


@pytest.mark.parametrize(("name", "size", "rho"), CASES, ids=IDS)
def test_the_rate_is_the_exact_one(name, size, rho):
    """All directions are known, so that their coupled second moments are."""
    found = advise(least_squares(SETS[name]), "sgd", size, momentum=rho, batches=4)[
        "largest stable rate"
    ]
    exact = truth(name, size, rho)
    low, high = found.interval()
    assert 0 < low <= exact <= high < 1.01 * low


def simulated_growth(rows, size, rate, rho, steps=60, chains=40_000):
    """ln of the growth of E‖x‖² per step of Nesterov's recursion over the last half of the
    steps, by simulation.
    """
    rng = np.random.default_rng(0)
    x = before = rng.normal(size=(chains, rows.shape[1]))
    sizes = []
    for _ in range(steps):
        chosen = (
            rows[rng.integers(0, len(rows), (chains, size))]
            if size > 1
            else rows[rng.integers(0, len(rows), chains)][:, None]
        )
        y = x + rho * (x - before)
        gradient = np.einsum("cbi,cbj,cj->ci", chosen, chosen, y) / size
        x, before = y - rate * gradient, x
        sizes.append(np.square(x).sum(1).mean())
    return (np.log(sizes[-1]) - np.log(sizes[steps // 2])) / (steps // 2 - 1)


def test_nesterov_s_coupled_limit_is_where_simulated_second_moments_begin_to_grow():
    """Gaussian-free: bounded rows, so that a simulation sees the second moment."""
    rng = np.random.default_rng(3)
    rows = rng.choice([-1.0, 1.0], size=(40, 2)) * [1.5, 1.0]
    matrices = np.einsum("ni,nj->nij", rows, rows)
    values, vectors = np.linalg.eigh(matrices.mean(0))
    limit = coupled_limit(
        values, vectors.T @ (matrices - matrices.mean(0)) @ vectors, 1.0, 0.5, nesterov=True
    )
    assert (
        simulated_growth(rows, 1, 0.9 * limit, 0.5)
        < 0
        < simulated_growth(rows, 1, 1.1 * limit, 0.5)
    )


@pytest.mark.parametrize(("size", "rho", "seed"), [(2, 0.0, 0), (16, 0.0, 1), (16, 0.9, 0)])
def test_the_interval_holds_the_exact_limit_where_not_all_directions_are_known(size, rho, seed):
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(80, 14)) * np.geomspace(3, 0.5, 14)
    found = advise(least_squares(rows), "sgd", size, momentum=rho, batches=4)
    assert not found.levels.complete
    assert found.levels.quadratic
    low, high = found["largest stable rate"].interval()
    assert 0 < low <= exact_limit(rows, size, rho) <= high < 10 * low


COVERAGE = [
    ("one sharp direction", 4, 0.0, None),
    ("rare features", 1, 0.0, None),
    ("all alike", 16, 0.9, None),
    ("one sharp direction", 4, 0.9, 20),
]


@pytest.mark.parametrize(("name", "size", "rho", "samples"), COVERAGE)
def test_the_interval_covers_the_exact_limit_at_nine_seeds_of_ten(name, size, rho, samples):
    problem, exact, held, above = least_squares(SETS[name]), truth(name, size, rho), 0, 0
    for seed in range(20):
        found = advise(problem, "sgd", size, momentum=rho, seed=seed, batches=6, samples=samples)
        low, high = found["largest stable rate"].interval()
        held, above = held + (low <= exact <= high), above + (low > exact)
    assert held >= 18
    assert above <= 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "rho"), CASES, ids=IDS)
def test_the_interval_covers_the_exact_limit(name, size, rho):
    problem, exact = least_squares(SETS[name]), truth(name, size, rho)
    held = 0
    for seed in range(40):
        found = advise(problem, "sgd", size, momentum=rho, seed=seed)["largest stable rate"]
        low, high = found.interval()
        held += low <= exact <= high
    assert held >= 36


def test_directions_alike_are_coupled():
    """The sharpest of a batch is the largest of several, which no one direction's τ² knows."""
    rows = torch.randn(200, 8, generator=generator(0, "alike"), dtype=torch.float64)
    found = advise(least_squares(rows), "sgd", 20, momentum=0.9)
    rate, levels = found["largest stable rate"], found.levels
    assert float(levels.excess(20)) > 1.5 * float(levels.expected_excess(levels.view(20).effective))
    low, high = rate.interval()
    assert low <= exact_limit(rows.numpy(), 20, 0.9) <= high


def test_an_interval_is_positive_however_large_the_error():
    for error, doubt in ((5.0, (0.0, 0.0)), (0.0, (0.5, 1.3)), (1e6, (3.0, 3.0))):
        low, high = PositiveEstimate.of(Estimate(2.0, error), doubt).interval()
        assert 0 < low < 2.0 < high < np.inf
    low, high = PositiveEstimate.of(Estimate(2.0, 0.02)).interval()
    assert np.allclose([low, high], Estimate(2.0, 0.02).interval(), rtol=1e-3)


def test_a_network_has_an_interval_for_all_data_too():
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(3, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)
    ).double()
    x = torch.randn(40, 3, dtype=torch.float64)
    found = advise(Problem(net, "cross_entropy", (x, (x[:, 0] > 0).long())), "sgd", 40)
    rate = found["largest stable rate"]
    low, high = rate.interval()
    assert not found.levels.quadratic
    assert 0 < low < 0.6 * float(rate) < 2 * float(rate) < high
    first = str(found).splitlines()[0]
    assert (
        first
        == f"use lr ≈ {float(rate) / 2:.3g} ({low / 2:.3g} to {high / 2:.3g}) at batch 40, for this"
        " point of training"
    )


def test_a_sample_unlike_all_of_the_subset_is_in_the_error():
    """One row in 90 carries most of τ²; a third of the rows tells of it by its mean, which is
    not that of all data.
    """
    rng = np.random.default_rng(5)
    rows = rng.normal(size=(90, 3))
    rows[40] *= 8
    exact, apart = exact_limit(rows, 8, 0.0), []
    for seed in range(12):
        found = advise(least_squares(rows), "sgd", 8, samples=30, seed=seed, batches=4)
        low, high = found["largest stable rate"].interval()
        assert low <= exact <= high
        apart.append(float(found["largest stable rate"]) / exact)
    assert max(apart) > 2  # some subsets miss the row
