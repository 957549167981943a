"""What SGLD's finite, noisy steps add to λ̂, against the stationary variance of a quadratic."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lambdahat.problem import Problem
from lambdahat.results import Chains
from lambdahat.sampling import sample, sgld
from lambdahat.sampling.diagnostics import blocked_error, combined_degrees, read, step_shares

NBETA, BATCH = 100.0, 10


def noisy(width: int = 4) -> tuple[Problem, float]:
    """L = ½‖w‖² − w·(mean of the batch), whose noise does not depend on w: the variance of one
    coordinate of it.
    """
    x = (
        torch.randn(400, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        * 2.0
    )
    x = x - x.mean(dim=0)

    def loss(params, batch):
        return (0.5 * params["w"].square().sum() - batch @ params["w"]).mean()

    start = {"w": torch.zeros(width, dtype=torch.float64)}
    return Problem.from_function(loss, start, x), float(x.square().mean()) / BATCH


@pytest.mark.parametrize("gamma", [1.0, NBETA, 4 * NBETA])
def test_the_bias_is_right_for_any_localization(gamma):
    """v = (1 + εs²/4)/(a(1 − εa/4)) with a = nβh + γ and s² the variance of a coordinate of nβ∇L
    over batches.
    """
    problem, variance = noisy()
    epsilon, stiff, noise = 0.08 / (NBETA + gamma), NBETA + gamma, NBETA**2 * variance
    found = sample(
        problem, sgld(epsilon, NBETA, gamma), 50, 1000, burn_in=300, batch_size=BATCH, forces=True
    )
    exact = 4 * 0.5 * NBETA / stiff
    wanted = exact * ((1 + epsilon * noise / 4) / (1 - epsilon * stiff / 4) - 1)
    _, bias = step_shares(epsilon, gamma, found.work, found.heat, float(found.energies.mean()))
    assert wanted > 0.1 * exact
    assert bias == pytest.approx(wanted, rel=0.12 if gamma <= NBETA else 0.3)
    heat = epsilon / 8 * float(found.heat.mean())
    assert (heat > 1.5 * wanted) == (gamma >= NBETA), (
        "without the localization's part it is too much"
    )
    reading = read(found, 4)
    assert abs(reading.raw - exact - wanted) < 5 * reading.stderr


def test_degrees_of_freedom_of_a_sum():
    assert combined_degrees(np.array([1.0, 0.0]), np.array([15.0, 3.0])) == pytest.approx(15)
    assert combined_degrees(np.array([1.0, 1.0]), np.array([15.0, 15.0])) == pytest.approx(30)
    assert combined_degrees(np.zeros(2), np.array([15.0, 3.0])) == math.inf


def test_losses_of_the_whole_data_can_be_read():
    problem, _ = noisy()
    found = sample(
        problem,
        sgld(1e-3, NBETA, 1.0),
        4,
        400,
        burn_in=100,
        batch_size=BATCH,
        forces=True,
        baseline="both",
    )
    assert isinstance(found, Chains)
    full, paired = read(found, 4, full=True), read(found, 4)
    assert full.raw == pytest.approx(found.full_energies.mean())
    assert paired.raw == pytest.approx(found.energies.mean())
    assert full.raw != paired.raw
    assert full.per_chain.std() > 0


def test_errors_count_what_hardly_moves_within_a_chain():
    """White noise hides levels that change four times a chain from autocorrelations, not from
    long blocks.
    """
    level, chains, draws = 0.04, 8, 4000
    errors = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        levels = np.repeat(rng.standard_normal((chains, 4)), draws // 4, axis=1)
        errors.append(blocked_error(rng.standard_normal((chains, draws)) + level * levels))
    truth = math.sqrt(1 / (chains * draws) + level**2 / (4 * chains))
    assert 0.97 < np.mean(errors) / truth < 1.1  # 0.89 by autocorrelations alone
