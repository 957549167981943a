"""WBIC, local free energy, λ over temperatures and thermodynamic integration, against linear
regression.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from lambdahat.problem import Problem
from lambdahat.results import Estimate, Result, Status
from lambdahat.sampling import hmc, sample, sgld
from lambdahat.singular._llc import llc
from lambdahat.singular.bayes import (
    FACTORS,
    _cut,
    _integral,
    _line,
    free_energy,
    local_free_energy,
    log_temperature,
    temperature_regression,
    wbic,
)
from tests.singular.regression import regression

KNOWN = regression(30, 3, gamma=5.0)
SETTINGS = {"kernel": "hmc", "step_size": 0.04, "burn_in": 20, "localization": KNOWN.gamma}

FREE = {"kernel": "hmc", "step_size": 0.04, "burn_in": 10}


def exact_points(betas) -> np.ndarray:
    return np.array([KNOWN.energy(beta) for beta in betas])


def test_wbic_is_the_mean_loss_at_the_log_temperature():
    wanted = KNOWN.energy(1 / math.log(30))
    found = [wbic(KNOWN.problem, seed=seed, draws=150, **SETTINGS) for seed in range(3)]
    z = [(float(e) - wanted) / float(e.stderr) for e in found]
    assert 0.1 < math.sqrt(np.mean(np.square(z))) < 2.2
    assert all(0 < float(e.stderr) < 0.5 and e.cost > 0 and e.status.ok for e in found)


def test_wbic_of_mini_batches_is_paired():
    chains = sample(
        KNOWN.problem, sgld(0.01, log_temperature(30), KNOWN.gamma), 2, 40, batch_size=4
    )
    found = wbic(chains)
    rise = (chains.losses - chains.centre_losses).mean()
    assert float(found) == pytest.approx(30 * (KNOWN.problem.loss() + rise), rel=1e-12)
    still = wbic(
        sample(KNOWN.problem, sgld(0.0, log_temperature(30), KNOWN.gamma), 2, 40, batch_size=4)
    )
    assert float(still) == pytest.approx(30 * KNOWN.problem.loss(), rel=1e-12)
    assert float(still.stderr) < 1e-12


def test_wbic_refuses_another_temperature():
    chains = sample(KNOWN.problem, hmc(0.02, 30.0, 5.0), 1, 4)
    with pytest.raises(
        ValueError, match=r"chains must be at nβ = n/ln n = 8.82\d+, got chains at 30; sample at"
    ):
        wbic(chains)
    with pytest.raises(TypeError, match=r"problem must be a lambdahat\.Problem"):
        wbic("chains")


def test_local_free_energy_is_the_wbic_at_its_temperature():
    chains = sample(KNOWN.problem, hmc(0.02, log_temperature(30), 5.0), 2, 20)
    assert local_free_energy(chains) == wbic(chains)
    cold = sample(KNOWN.problem, hmc(0.02, 30.0, 5.0), 2, 20)
    wanted = 30 * KNOWN.problem.loss() + math.log(30) * cold.energies.mean()
    assert float(local_free_energy(cold)) == pytest.approx(wanted, rel=1e-12)


def test_regression_over_temperatures():
    found = temperature_regression(KNOWN.problem, draws=200, **SETTINGS)
    assert found.betas == pytest.approx(np.array(FACTORS) / math.log(30))
    wanted = exact_points(found.betas)
    assert math.sqrt(np.mean(((found.losses - wanted) / found.errors) ** 2)) < 2.2
    slope, intercept = np.polyfit(1 / found.betas, wanted, 1, w=1 / found.errors)
    assert abs(float(found.learning_coefficient) - slope) < 3 * float(
        found.learning_coefficient.stderr
    )
    assert abs(float(found.intercept) - intercept) < 3 * float(found.intercept.stderr)
    assert float(found.learning_coefficient.stderr) < 0.2
    assert found.cost > 0
    assert found.status is Status.MISFIT, (
        "so strong a localization bends the line by several of these errors"
    )


def test_slope_does_not_need_a_minimum():
    """From a centre where λ̂ would be negative: a regular model of one parameter has slope ½ all
    the same.
    """
    problem = Problem.from_function(
        lambda p: 0.5 * p["w"].square().sum(), {"w": torch.tensor([0.2]).double()}, num_samples=1000
    )
    found = temperature_regression(
        problem, draws=100, kernel="hmc", step_size=0.005, localization=0.01
    )
    assert (
        abs(float(found.learning_coefficient) - 0.5)
        < 3 * float(found.learning_coefficient.stderr)
        < 0.4
    )
    assert abs(float(found.intercept)) < 3 * float(found.intercept.stderr)
    assert (found.losses < 1000 * problem.loss()).all()


def test_one_localization_serves_at_all_temperatures():
    found = temperature_regression(
        KNOWN.problem, betas=(0.3, 1.0), draws=10, **{**SETTINGS, "localization": {"w": 5.0}}
    )
    assert torch.equal(found.localization, torch.full((3,), 5.0, dtype=torch.float64))
    assert math.isnan(found.misfit)
    assert math.isfinite(float(found.learning_coefficient.stderr))


def test_line_through_points_with_errors():
    x, errors = np.array([1.0, 2.0, 4.0, 7.0]), np.array([0.1, 0.2, 0.1, 0.3])
    y = 3 * x - 2 + np.array([0.05, -0.2, 0.1, 0.1])
    slope, intercept, misfit = _line(x, y, errors, np.full(4, 15.0))
    fit, covariance = np.polyfit(x, y, 1, w=1 / errors, cov="unscaled")
    assert [float(slope), float(intercept)] == pytest.approx(list(fit))
    chi = (((y - np.polyval(fit, x)) / errors) ** 2).sum() / 2
    assert misfit == pytest.approx(chi)
    grown = math.sqrt(max(chi, 1.0))
    assert [slope.stderr, intercept.stderr] == pytest.approx(
        list(np.sqrt(np.diag(covariance)) * grown)
    )
    bent = _line(x, y + x**2, errors, np.full(4, 15.0))
    assert bent[0].stderr == pytest.approx(math.sqrt(covariance[0, 0] * bent[2]))
    assert bent[0].dof == 2


def test_a_straight_line_has_the_degrees_of_freedom_of_its_points():
    """Two points: the slope is their difference, whose error is that of Welch's test."""
    slope, intercept, _ = _line(
        np.array([0.0, 1.0]), np.array([1.0, 2.0]), np.array([0.3, 0.4]), np.array([15.0, 7.0])
    )
    assert slope.stderr == pytest.approx(0.5)
    assert slope.dof == pytest.approx(0.5**4 / (0.3**4 / 15 + 0.4**4 / 7))
    assert intercept.dof == pytest.approx(15)


def test_chains_that_cannot_move_have_slope_zero():
    found = temperature_regression(
        KNOWN.problem, draws=8, kernel="hmc", step_size=0.0, chains=2, burn_in=0
    )
    assert float(found.learning_coefficient) == float(found.learning_coefficient.stderr) == 0
    assert found.status is Status.NOT_MOVING


def test_free_energy_of_regression():
    wanted = KNOWN.free_energy()
    found = [free_energy(KNOWN.problem, KNOWN.gamma, seed=s, draws=60, **FREE) for s in range(3)]
    z = [(float(f.value) - wanted) / float(f.value.stderr) for f in found]
    assert 0.1 < math.sqrt(np.mean(np.square(z))) < 2.2
    assert all(float(f.value.stderr) < 0.25 and f.quadrature_error < 0.05 for f in found)
    assert all(f.nbetas[-1] == pytest.approx(30) and f.prior_ess >= 499 for f in found)
    energies = [
        nbeta * (KNOWN.energy(nbeta / 30) / 30 - KNOWN.problem.loss()) for nbeta in found[0].nbetas
    ]
    assert np.abs((found[0].energies - energies) / found[0].errors).max() < 4


def test_integral_of_energies_that_are_known():
    """λ̂(β) = ½·β/(β + c) of one Gaussian direction: the energy has the variance 2λ̂²."""
    step, c = 1.0, math.exp(-2)
    grid = np.arange(-6.0, 0.5, step)
    means = 0.5 * np.exp(grid) / (np.exp(grid) + c)
    ends = Estimate(2 * means[0] ** 2, 0.3), Estimate(2 * means[-1] ** 2, 0.4)
    errors, degrees = np.full(len(means), 0.1), np.full(len(means), 15.0)
    total = _integral(means, errors, degrees, ends, step)
    parts = [*[0.1] * 5, 0.1 * (1 / 2 + 1 / 12), 0.1 * (1 / 2 - 1 / 12), 0.3 / 12, 0.4 / 12]
    assert total.stderr == pytest.approx(math.hypot(*parts))
    assert total.dof == pytest.approx(15 * sum(p**2 for p in parts) ** 2 / sum(p**4 for p in parts))
    wanted = 0.5 * math.log((1 + c) / (math.exp(-6) + c))
    assert float(total) == pytest.approx(wanted, abs=3e-4)
    plain = step * (means.sum() - means[0] / 2 - means[-1] / 2)
    assert abs(plain - wanted) > 3e-3
    parabolas = _integral(means, errors, degrees, None, step)
    assert float(parabolas) == pytest.approx(wanted, abs=1.5e-3)
    assert float(_integral(grid**2, errors, degrees, None, step)) == pytest.approx(6.0**3 / 3), (
        "exact for a parabola"
    )


def test_free_energy_from_batches_does_not_take_their_noise_for_the_energys_variance():
    """Var[nβL] of paired batches holds the noise of the batches: at nβ = n that alone bent the
    result by some units.
    """
    known = regression(2000, 2, gamma=50.0)
    settings = {
        "kernel": "sgld",
        "batch_size": 20,
        "draws": 300,
        "burn_in": 100,
        "chains": 2,
        "temperatures": 5,
    }
    found = free_energy(known.problem, known.gamma, step_size=1e-4, **settings)
    assert abs(float(found.value) - known.free_energy()) < 4 * float(found.value.stderr)
    assert float(found.value.stderr) < 1.5
    assert 5 < found.value.dof < 40


def test_readings_of_sgld_chains_are_those_of_llc():
    """What the steps add is taken off where the step size was found, and is in the error where
    it was given.
    """
    known = regression(3000, 3, gamma=5.0)
    found = llc(known.problem, kernel="sgld", batch_size=256, max_gradients=4000)
    assert found.discretisation_bias > 0.03 * found.value
    ours = local_free_energy(found.chains)
    assert float(ours) == pytest.approx(float(found.wbic), rel=1e-9)
    assert float(ours.stderr) >= math.log(3000) * float(found.chains.step_bias.stderr)
    assert ours.dof == found.dof
    given = dataclasses.replace(found.chains, step_bias=None)
    plain = 3000 * found.initial_loss + math.log(3000) * found.raw
    assert float(wbic(given)) == pytest.approx(plain)
    assert float(wbic(given).stderr) > 0.5 * math.log(3000) * found.discretisation_bias


def test_prior_draws_reach_to_half_their_number():
    rises = np.linspace(0, 10, 1000)
    low, bottom, ess = _cut(rises, 10_000)
    nbeta = math.exp(low)
    assert ess == pytest.approx(500, rel=0.01)
    assert float(bottom) == pytest.approx(-math.log(np.exp(-nbeta * rises).mean()))
    low, _, ess = _cut(np.full(1000, 1e-9), 100)
    assert low == pytest.approx(math.log(100) - 1)
    assert ess == pytest.approx(1000)
    _, half, _ = _cut(np.where(np.arange(1000) < 500, 1e-9, np.inf), 100)
    assert float(half) == pytest.approx(math.log(2))


def test_bad_input_is_refused_by_name():
    with pytest.raises(
        ValueError, match=r"localization must be above 0 for every parameter, got 0\.0; without it"
    ):
        free_energy(KNOWN.problem, 0.0, **FREE)
    with pytest.raises(ValueError, match="temperatures must be odd, got 4"):
        free_energy(KNOWN.problem, 5.0, temperatures=4, **FREE)
    with pytest.raises(
        ValueError, match=r"kernel must have nbeta = 9, got one at 8; give its name"
    ):
        temperature_regression(KNOWN.problem, betas=(0.3, 0.4), kernel=hmc(0.02, 8.0))
    with pytest.raises(
        ValueError, match="betas must hold two different inverse temperatures or more"
    ):
        temperature_regression(KNOWN.problem, betas=(0.3, 0.3), step_size=0.02)
    with pytest.raises(ValueError, match="betas must be a finite number above 0"):
        temperature_regression(KNOWN.problem, betas=(0.3, -1.0), step_size=0.02)
    with pytest.raises(ValueError, match="nbeta must be a number for so little data"):
        wbic(KNOWN.problem.subset([0]), step_size=0.02)


def test_results_go_to_disk_and_back(tmp_path):
    found = temperature_regression(KNOWN.problem, betas=(0.3, 1.0), draws=8, **SETTINGS)
    again = Result.load(found.save(tmp_path / "regression"))
    assert again.learning_coefficient == found.learning_coefficient
    assert np.array_equal(again.losses, found.losses)
    energy = free_energy(KNOWN.problem, 5.0, temperatures=3, draws=8, **FREE)
    assert Result.load(energy.save(tmp_path / "energy")).value == energy.value
