"""Diagnostics against chains whose mixing, drift and acceptance are known."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from arviz_stats.base import array_stats

from lambdahat.problem import Problem
from lambdahat.results import Diagnostics, Estimate, Status
from lambdahat.sampling import mala, rmsprop_sgld, sample, sghmc, sgld, sgnht
from lambdahat.sampling.diagnostics import (
    PROBE_SAMPLES,
    AcceptanceProbe,
    diagnose,
    drift,
    standard_error,
    verdict,
)
from tests.cases import classifier

AXES = {"chain_axis": 0, "draw_axis": 1}


def autoregressive(rho: float, chains: int = 4, draws: int = 2000, seed: int = 0) -> np.ndarray:
    """x ← ρx + √(1 − ρ²)·ξ from its stationary law: variance 1, ESS of the mean N(1 − ρ)/(1 +
    ρ).
    """
    noise = np.random.default_rng(seed).standard_normal((chains, draws))
    values = noise.copy()
    for i in range(1, draws):
        values[:, i] = rho * values[:, i - 1] + math.sqrt(1 - rho**2) * noise[:, i]
    return values


def diagnosed(energies: np.ndarray) -> Diagnostics:
    return diagnose(energies, np.ones_like(energies), 0.9, np.zeros(len(energies), np.int64))


# Mixing


def test_the_effective_sample_size_does_not_depend_on_the_unit():
    """ArviZ takes values that differ by less than 1e-15 for equal ones."""
    values = autoregressive(0.9)
    found, tiny = diagnosed(values), diagnosed(2.0**-80 * values)
    assert (tiny.ess_mean, tiny.ess_bulk, tiny.ess_tail) == (
        found.ess_mean,
        found.ess_bulk,
        found.ess_tail,
    )


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_mixing_is_arviz_own_and_near_what_is_known(rho):
    values = autoregressive(rho)
    found = diagnosed(values)
    assert found.rhat == array_stats.rhat(values, method="rank", **AXES)
    assert found.ess_bulk == array_stats.ess(values, method="bulk", **AXES)
    assert found.ess_mean == array_stats.ess(values, method="mean", **AXES)
    assert found.ess_tail == array_stats.ess(values, method="tail", prob=(0.05, 0.95), **AXES)
    exact = values.size * (1 - rho) / (1 + rho)
    assert found.ess_mean == pytest.approx(exact, rel=0.15)
    assert found.ess_bulk == pytest.approx(exact, rel=0.15)
    assert found.rhat < 1.02
    assert verdict(found, moved=True) is Status.CONVERGED


def test_the_standard_error_of_a_mean_covers_it():
    """The mean of an AR(1) has variance (1 + ρ)/(1 − ρ)/N: z is standard normal over many runs."""
    runs = [autoregressive(0.7, draws=300, seed=seed) for seed in range(200)]
    errors = np.array([standard_error(values) for values in runs])
    assert errors.mean() == pytest.approx(math.sqrt(1.7 / 0.3 / 1200), rel=0.05)
    z = np.array([values.mean() for values in runs]) / errors
    assert np.mean(np.abs(z) < 1.96) == pytest.approx(0.95, abs=4 * math.sqrt(0.05 * 0.95 / 200))


def test_chains_that_disagree_have_a_larger_error():
    apart = autoregressive(0.5) + np.array([[0.0], [3.0], [0.0], [3.0]])
    assert standard_error(apart) > 0.5
    found = diagnosed(apart)
    assert found.rhat > 1.5
    assert verdict(found, moved=True) is Status.NOT_MIXED


def test_small_samples_have_an_answer():
    assert standard_error(np.ones((3, 10))) == 0.0
    assert standard_error(np.ones((1, 1))) == 0.0
    few = np.array([[1.0, 2.0], [3.0, 4.0]])
    assert standard_error(few) == pytest.approx(np.std([1.5, 3.5], ddof=1) / math.sqrt(2))
    assert math.isnan(standard_error(few[:1]))
    assert math.isnan(drift(np.ones((3, 5))).value)
    short = diagnosed(few)
    assert math.isnan(short.rhat)
    assert diagnosed(autoregressive(0.5, chains=1)).rhat < 1.02, (
        "the halves of a chain are compared"
    )


# Drift


def test_drift_does_not_misfire():
    """Its z is standard normal on chains that do not drift."""
    found = [drift(autoregressive(0.7, draws=300, seed=seed)) for seed in range(200)]
    z = np.array([float(estimate) / float(estimate.stderr) for estimate in found])
    assert np.mean(np.abs(z) < 1.96) == pytest.approx(0.95, abs=4 * math.sqrt(0.05 * 0.95 / 200))
    assert np.abs(z).max() < 4, "no false alarm"
    assert abs(z.mean()) < 4 / math.sqrt(200)


def test_a_trend_is_found_and_measured():
    """A rise of 1 over the run is 2/3 from the middle of the first third to that of the last."""
    rising = autoregressive(0.5, draws=900) + np.linspace(0, 1, 900)
    found = drift(rising)
    assert abs(float(found) - 2 / 3) < 4 * float(found.stderr)
    assert float(found) > 4 * float(found.stderr)
    assert verdict(diagnosed(rising), moved=True) is Status.NOT_MIXED


# The verdict


def test_the_verdict_names_the_worst_first():
    fine = diagnosed(autoregressive(0.5))
    lost, bounded = np.array([True] + 3 * [False]), np.array([0, 2, 0, 0])
    assert verdict(fine, moved=False) is Status.NOT_MOVING
    assert verdict(dataclasses.replace(fine, bounded=bounded), moved=True) is Status.BOUNDED
    assert (
        verdict(dataclasses.replace(fine, diverged=lost, bounded=bounded), moved=False)
        is Status.DIVERGED
    )
    assert verdict(dataclasses.replace(fine, rhat=1.2), moved=True) is Status.NOT_MIXED
    assert (
        verdict(dataclasses.replace(fine, drift=Estimate(5.0, 1.0)), moved=True) is Status.NOT_MIXED
    )
    assert (
        verdict(dataclasses.replace(fine, drift=Estimate(3.0, 1.0)), moved=True) is Status.CONVERGED
    )


def test_diverged_chains_are_left_out_of_the_rest():
    values = autoregressive(0.5)
    clean = diagnosed(values)
    for bad in (math.nan, math.inf, 1e200):
        broken = np.concatenate([values, values[:1]])
        broken[4, 1500:] = bad
        found = diagnosed(broken)
        assert found.diverged.tolist() == 4 * [False] + [True]
        assert (found.rhat, found.ess_bulk, float(found.drift)) == (
            clean.rhat,
            clean.ess_bulk,
            float(clean.drift),
        )
        assert verdict(found, moved=True) is Status.DIVERGED
    nothing = diagnosed(np.full((2, 50), math.nan))
    assert nothing.diverged.all()
    assert math.isnan(nothing.rhat)
    assert math.isnan(float(nothing.drift))


# The acceptance probe


def line(h: float = 1.0) -> Problem:
    return Problem.from_function(
        lambda p: 0.5 * h * p["w"].square().sum(), {"w": torch.zeros(1).double()}
    )


def look(probe, positions):
    """One probe of chains that are all in this process."""
    probe.probe(positions, range(len(positions)), lambda rows: rows)


@pytest.mark.parametrize("epsilon", [0.2, 1.0, 2.0])
def test_the_probe_has_the_acceptance_of_mala_on_a_line(epsilon):
    """E[min(1, exp(−ΔH))] over w and the momentum, both standard normal, by quadrature."""
    chains = 2000
    probe = AcceptanceProbe(line(), sgld(epsilon, 1.0), seed=0)
    assert math.isnan(probe.acceptance)
    at = torch.from_numpy(np.random.default_rng(0).standard_normal((chains, 1)))
    look(probe, at)
    w, p = np.meshgrid(*2 * [np.linspace(-7, 7, 801)])
    half = p - math.sqrt(epsilon) / 2 * w
    there = w + math.sqrt(epsilon) * half
    last = half - math.sqrt(epsilon) / 2 * there
    weight = np.exp(-(w**2 + p**2) / 2)
    values = np.exp(-np.maximum((there**2 + last**2 - w**2 - p**2) / 2, 0))
    exact = (weight * values).sum() / weight.sum()
    spread = math.sqrt((weight * values**2).sum() / weight.sum() - exact**2)
    assert abs(probe.acceptance - exact) < 4 * spread / math.sqrt(chains)
    assert (exact < 0.99) == (epsilon > 0.5)


def test_the_probe_of_a_run_agrees_with_mala_itself():
    """From draws of the same law, the probe of SGLD at a small step reads MALA's own acceptance."""
    problem = line(2.0)
    probe = sample(problem, sgld(0.1, 3.0), chains=50, draws=100, burn_in=100)
    itself = sample(problem, mala(0.1, 3.0), chains=50, draws=100, burn_in=100)
    assert probe.diagnostics.acceptance == pytest.approx(itself.diagnostics.acceptance, abs=0.02)
    assert itself.diagnostics.acceptance == itself.acceptances.mean()
    assert (probe.acceptances == 1).all(), "SGLD accepts all"
    alike = sample(problem, sghmc(0.1, 3.0, friction=1.0), chains=50, draws=100, burn_in=100)
    assert alike.diagnostics.acceptance == probe.diagnostics.acceptance, (
        "without memory of its velocity it is SGLD"
    )


@pytest.mark.parametrize("kernel", [rmsprop_sgld(0.1, 3.0), sghmc(0.1, 3.0), sgnht(0.1, 3.0)])
def test_kernels_that_take_other_steps_than_mala_have_no_acceptance(kernel):
    found = sample(line(2.0), kernel, chains=2, draws=20)
    assert math.isnan(found.diagnostics.acceptance)
    assert found.reasons == {
        "acceptance": f"not known: {found.kernel} does not take the steps of MALA"
    }


def test_the_probe_neither_moves_chains_nor_takes_their_noise():
    """From the centre of ½w² with ε = 1 the acceptance is exp(−p²/8): it tells the momentum p."""
    position = torch.zeros(1, 1).double()
    probe = AcceptanceProbe(line(), sgld(1.0, 1.0), seed=0)
    look(probe, position)
    momentum = math.sqrt(-8 * math.log(probe.acceptance))
    assert torch.equal(position, torch.zeros(1, 1).double())
    chain = sample(line(), sgld(1.0, 1.0), chains=1, draws=2, keep_parameters=True)
    # the first step from the centre is the first noise
    noise = abs(float(chain.parameters[0, 1, 0]))
    assert 0 < momentum != pytest.approx(noise)


def test_the_probe_leaves_lost_chains_out_and_large_data_to_a_part():
    probe = AcceptanceProbe(line(), sgld(1.0, 1.0), seed=0)
    look(probe, torch.full((2, 1), math.nan).double())
    assert math.isnan(probe.acceptance)
    look(probe, torch.tensor([[math.inf], [0.0]]).double())
    assert 0 < probe.acceptance <= 1
    few = AcceptanceProbe(
        classifier(samples=PROBE_SAMPLES + 5, batch_size=None), sgld(1.0, 1.0), seed=0
    )
    assert few._problem.num_samples == PROBE_SAMPLES


def test_a_probe_sees_the_step():
    seen = []
    for step in (1e-4, 2.5):
        probe = AcceptanceProbe(line(), sgld(step, 1.0), seed=0)
        look(probe, torch.ones(200, 1).double())
        seen.append(probe.acceptance)
    assert seen[0] > 0.999
    assert seen[1] < 0.95
