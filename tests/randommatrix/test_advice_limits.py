"""The advised rate against the exact limit: where second moments of the coupled recursion begin to grow."""

import functools
import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import brentq

from lambdahat._rng import generator
from lambdahat.problem import Problem
from lambdahat.randommatrix import advise
from lambdahat.randommatrix.advice_rules import MODEL
from lambdahat.randommatrix.rate_limits import limit_of
from lambdahat.results import Estimate

N = 60


def exact_limit(rows, size, rho):
    """The least rate at which the spectral radius of x xᵀ ↦ E[A x xᵀ Aᵀ] is 1, A a step on a random batch."""
    matrices = np.einsum("ni,nj->nij", rows, rows)
    total, order = rows.shape
    mean = matrices.mean(0)
    apart = matrices - mean
    noise = np.einsum("nij,nkl->ikjl", apart, apart).reshape(order**2, order**2) / total
    noise *= (total - size) / (size * (total - 1))
    eye = np.eye(order)
    places = np.add.outer(2 * order * np.arange(order), np.arange(order)).ravel()  # of the noisy x among (x, x_before)

    def growth(rate):
        step = np.block([[(1 + rho) * eye - rate * mean, -rho * eye], [eye, 0 * eye]])
        moments = np.kron(step, step)
        moments[np.ix_(places, places)] += rate**2 * noise
        return np.abs(np.linalg.eigvals(moments)).max() - 1

    highest = 2 * (1 + rho) / np.linalg.eigvalsh(mean)[-1]
    rates = np.geomspace(1e-3 * highest, highest, 60)
    above = next((i for i, rate in enumerate(rates) if growth(rate) > 1e-9), None)
    return highest if above is None else brentq(growth, rates[above - 1], rates[above], rtol=1e-6)


def _sets(seed=1):
    rng = np.random.default_rng(seed)
    rare = np.eye(4)[rng.choice(4, N, p=[0.6, 0.3, 0.07, 0.03])] * np.array([1, 1.5, 3, 5.0])
    return {
        "one sharp direction": rng.normal(size=(N, 4)) * [3, 1, 1, 1],
        "all alike": rng.normal(size=(N, 4)),
        "heavy tails": rng.standard_t(3, size=(N, 4)),
        "rare features": rare,
        "one constant, three rare": np.concatenate([np.full((N, 1), 2.0), (rng.random((N, 3)) < 0.05) * 4.0], axis=1),
    }


SETS = _sets()
CASES = [(name, size, rho) for name in SETS for size in (1, 4, 16) for rho in (0.0, 0.9)]
IDS = [f"{name}, {size}, {rho}" for name, size, rho in CASES]


def least_squares(rows):
    start = {"theta": torch.ones(rows.shape[1], dtype=torch.float64)}
    return Problem.from_function(
        lambda p, x: 0.5 * (x @ p["theta"]).square().mean(), start, torch.as_tensor(rows, dtype=torch.float64)
    )


@functools.cache
def truth(name, size, rho):
    return exact_limit(SETS[name], size, rho)


@pytest.mark.parametrize(("name", "size", "rho"), CASES, ids=IDS)
def test_the_rate_is_the_exact_one_within_its_interval(name, size, rho):
    found = advise(least_squares(SETS[name]), "sgd", size, momentum=rho, batches=4)["largest stable rate"]
    exact = truth(name, size, rho)
    low, high = found.interval()
    assert low <= exact <= high or abs(float(found) / exact - 1) < 0.05
    assert float(found) < 1.25 * exact


COVERAGE = [("one sharp direction", 4, 0.0, None), ("rare features", 1, 0.0, None), ("all alike", 16, 0.9, None),
            ("one sharp direction", 4, 0.9, 20)]  # fmt: skip


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
def test_the_interval_covers_sets_on_which_its_width_was_not_chosen():
    """MODEL was chosen on ``SETS``. Here: 104 of 114 inside, none wholly above the exact limit, ratios 0.74 to 1.07."""
    inside = []
    for seed in (11, 12, 13, 14):
        for rows in _sets(seed).values():
            matrices = np.einsum("ni,nj->nij", rows, rows)
            values, vectors = np.linalg.eigh(matrices.mean(0))
            tau2 = np.square((matrices - matrices.mean(0)) @ vectors).sum(1).mean(0)
            if values[0] < 1e-6:  # a feature that no sample has
                continue
            for size, rho in itertools.product((1, 4, 16), (0.0, 0.9)):
                noises = (N - size) / (size * (N - 1)) * tau2 / values
                limits = [
                    limit_of(Estimate(v), Estimate(n, MODEL * n), rho) for v, n in zip(values, noises, strict=True)
                ]
                low, high = min(limits, key=float).interval()
                exact = exact_limit(rows, size, rho)
                assert low <= exact
                inside.append(exact <= high)
    assert len(inside) > 100
    assert np.mean(inside) >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "rho"), CASES, ids=IDS)
def test_the_interval_covers_the_exact_limit(name, size, rho):
    problem, exact = least_squares(SETS[name]), truth(name, size, rho)
    held = 0
    for seed in range(40):
        found = advise(problem, "sgd", size, momentum=rho, seed=seed)["largest stable rate"]
        low, high = found.interval()
        held += low <= exact <= high or abs(float(found) / exact - 1) < 0.05
    assert held >= 36


def test_batches_that_show_more_noise_lower_the_rate_and_widen_its_error():
    """Directions alike: the sharpest of a batch is the largest of several, which no one direction's τ² knows."""
    rows = torch.randn(400, 12, generator=generator(0, "alike"), dtype=torch.float64)
    found = advise(least_squares(rows), "sgd", 40, momentum=0.9)
    rate, levels = found["largest stable rate"], found.levels
    b = levels.view(40).effective
    assert float(levels.excess(40)) > 1.5 * float(levels.expected_excess(b))
    assert float(rate) < 0.9 * exact_limit(rows[:, :2].numpy(), 40, 0.9)
    assert float(rate.stderr) > 0.1 * float(rate)
