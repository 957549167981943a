"""The limit on gradients: pilots and every attempt count, small limits shorten them, smaller ones are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lambdahat.problem import Problem
from lambdahat.results import Status
from lambdahat.sampling import langevin_pilot
from lambdahat.sampling.budgets import dealt
from lambdahat.sampling.langevin_pilot import SHORTEST_PILOT, Lengths
from lambdahat.singular import llc
from tests.sampling.test_automatic import bowl, regression


def twisted() -> Problem:
    """A valley that no chain mixes in at a weak localization: a stronger one is tried, and again."""
    return Problem.from_function(
        lambda p: 100 * (p["w"][0] - 0.5 * torch.sin(8 * p["w"][1])) ** 2 + 1e-3 * p["w"][1] ** 4,
        {"w": torch.zeros(2, dtype=torch.float64)}, num_samples=100_000,
    )  # fmt: skip


@pytest.mark.parametrize(("make", "budget"), [(bowl, 1600), (bowl, 3000), (twisted, 1600), (twisted, 12_000)])
def test_hmc_keeps_within_its_gradients(make, budget):
    """Warm-ups, trials of a mass and every attempt at a stronger localization count."""
    found = llc(make(), max_gradients=budget)
    assert found.chains.kernel == "HMC"
    assert found.cost <= budget
    assert found.chains.losses.shape[1] >= 8
    assert math.isfinite(found.value)


GIVEN: list[dict[str, Any]] = [
    {}, {"localization": 5.0}, {"burn_in": 100}, {"draws": 50}, {"draws": 20, "burn_in": 5}, {"step_size": 1e-5},
    {"step_size": 1e-5, "localization": 5.0}, {"step_size": 10.0, "localization": 5.0, "burn_in": 20},
]  # fmt: skip


@pytest.mark.parametrize(("settings", "budget"), [*((given, 1300) for given in GIVEN), ({}, 3000)])
def test_sgld_keeps_within_its_gradients(settings, budget):
    found = llc(regression(), max_gradients=budget, **settings)
    assert found.chains.kernel == "SGLD"
    assert found.cost <= budget
    assert math.isfinite(found.value)
    assert found.chains.losses.shape[1] == settings.get("draws", found.chains.losses.shape[1])


@pytest.mark.parametrize("settings", [{"step_size": 1e-4}, {"step_size": 1e-4, "draws": 30}, {"draws": 5000}])
def test_hmc_of_given_steps_or_draws_keeps_within_its_gradients(settings):
    found = llc(bowl(), kernel="hmc", max_gradients=4000, **settings)
    assert found.cost <= 4000
    assert found.status is (Status.GRADIENTS_SPENT if settings.get("draws") == 5000 else found.status)


def test_too_few_gradients_are_refused_by_name_and_the_least_suffice():
    with pytest.raises(ValueError, match=r"max_gradients must be at least 1600 for 4 chains of HMC, got 1000"):
        llc(bowl(), max_gradients=1000)
    with pytest.raises(ValueError, match=r"max_gradients must be at least (\d+) for 4 chains, got 400; pilot") as told:
        llc(regression(), max_gradients=400)
    least = int(str(told.value).split("at least ")[1].split()[0])
    assert llc(regression(), max_gradients=least).cost <= least
    with pytest.raises(ValueError, match=r"max_gradients must be at least \d+ for 4 chains, got 4000"):
        llc(regression(), max_gradients=4000, draws=1000)
    with pytest.raises(ValueError, match=r"burn_in must be \d+ trajectories at most with these max_gradients, got 500"):
        llc(bowl(), max_gradients=4000, burn_in=500)


def test_a_pilot_shrinks_with_its_steps():
    assert Lengths.within(10_000, 0) == Lengths()
    for steps in range(SHORTEST_PILOT, 2000, 7):
        part = Lengths.within(steps, 0)
        taken = part.most_windows * part.window + sum(part.looks) + sum(part.stronger)
        assert taken <= steps
        assert part.most_windows >= langevin_pilot.WINDOWS + langevin_pilot.AGAIN


def test_steps_are_dealt_out():
    free = dealt(4, None, None, None, SHORTEST_PILOT)
    assert (free.most, free.burn_in, free.round) == (4000, 1100, 900)
    asked = dealt(4, 300, 50, 4000, SHORTEST_PILOT)
    assert (asked.most, asked.burn_in, asked.round, asked.pilot) == (1000, 300, 50, 650)
    assert dealt(4, 3000, None, None, SHORTEST_PILOT).round == 900, "a long burn-in takes nothing from the draws"
