"""Readings of tempered posteriors: WBIC, the local free energy, and λ from several temperatures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from lambdahat._core.check import require, require_positive
from lambdahat._core.progress import report
from lambdahat._core.rng import derived_seed
from lambdahat.problem import Problem, require_problem
from lambdahat.results import Array, Chains, Estimate, Result, Status
from lambdahat.sampling.automatic import Drawn
from lambdahat.sampling.estimand import default_localization, inverse_temperature
from lambdahat.sampling.estimation import combined_degrees
from lambdahat.sampling.kernels import Kernel
from lambdahat.singular.stretches import mean_energy
from lambdahat.singular.tempered import reading_of, tempered

FACTORS = (0.5, 0.7, 1.0, 1.4, 2.0)  # of 1/ln n, the temperatures of the regression
IMPROBABLE = 1e-3  # the probability of so large a χ² below which the points are not on a line


@dataclass(frozen=True)
class TemperatureRegression(Result):
    """λ as the slope of E^β[n·L_n] over 1/β: ``learning_coefficient``; the ``intercept`` is n·L_n
    at 1/β = 0.

    The points are ``losses`` E^β[n·L_n] with their ``errors`` at ``betas``, sampled with the same
    ``localization``. ``misfit`` is χ² per degree of freedom of the line; where it is above 1 the
    errors are larger by its root. Where χ² is as large with a probability below 1e-3 only, the
    status is MISFIT. ``cost`` counts gradients.
    """

    learning_coefficient: Estimate
    intercept: Estimate
    betas: Array
    losses: Array
    errors: Array
    misfit: float
    localization: Any
    cost: int = 0
    status: Status = Status.CONVERGED


def wbic(source: Chains | Problem, **settings: Any) -> Estimate:
    """WBIC = n·E[L_n(w)] at β = 1/ln n (Watanabe 2013; Eq. 18, the NGD paper), n the size of the
    data set.

    From chains at nβ = n/ln n, or from a problem, sampled with ``settings`` as for ``llc``. Losses
    of mini-batches are paired with the centre's: n·L_n(w*) + n·E[L_b(w) − L_b(w*)]. What the steps
    of SGLD add is taken off where the chains know it and their step size was found, as in ``llc``;
    else it is part of the error, or not known.
    """
    if not isinstance(source, Chains):
        require_problem(source)
        found = tempered(source, log_temperature(source.num_terms), **settings)
        return _free_energy(found.chains, source.num_terms, reading_of(found))
    wanted = log_temperature(source.num_samples)
    require(
        math.isclose(source.nbeta, wanted, rel_tol=1e-6),
        "chains",
        f"be at nβ = n/ln n = {wanted:.6g}",
        f"chains at {source.nbeta:.6g}",
        "sample at that nbeta, or read local_free_energy(chains)",
    )
    return local_free_energy(source)


def local_free_energy(chains: Chains) -> Estimate:
    """F ≈ n·L_n(w*) + λ̂·ln n with λ̂ = nβ·E[L − L*] from the chains (Lau et al. 2023; Eq. 27, the
    NGD paper).

    At nβ = n/ln n it is the WBIC. ``free_energy`` has what this leaves out: −(m − 1)·ln ln n and
    the prior's constant. The bias of SGLD's steps is treated as there.
    """
    return _free_energy(chains, chains.num_samples, mean_energy(chains))


def _free_energy(chains: Chains, count: int, energy: Estimate) -> Estimate:
    value, error = (math.log(count) * float(number) for number in (energy.value, energy.stderr))
    return dataclasses.replace(energy, value=count * chains.initial_loss + value, stderr=error)


def log_temperature(count: int) -> float:
    """nβ = n/ln n."""
    return inverse_temperature("n/log n", count, count)[0]


def temperature_regression(
    problem: Problem, betas: Sequence[float] | None = None, seed: int = 0, **settings: Any
) -> TemperatureRegression:
    """λ from chains at several β near 1/ln n, without the loss at the minimum.

    E^β[n·L_n(w)] = n·L_n(w₀) + λ/β + O_p(√(1/β)) (Watanabe 2013, Theorem 4), so that the slope over
    1/β is λ even where the centre w* is not a minimum. ``betas`` are by default 0.5, 0.7, 1, 1.4
    and 2 times 1/ln n. Weighted least squares with the standard errors of the chains. ``settings``
    as for ``llc``; all temperatures are at one localization, by default the γ that ``llc`` takes at
    n/ln n. It bends the line and lowers the slope unless γ is small against nβ times the curvature;
    a line that is bent for sure has the status MISFIT.
    """
    require_problem(problem)
    count = problem.num_terms
    inverse = _betas(betas, count)
    if settings.get("localization") is None and not isinstance(settings.get("kernel"), Kernel):
        settings["localization"], _ = default_localization(problem, log_temperature(count))
    runs: list[Drawn] = []
    for number, beta in enumerate(inverse):
        report("temperatures", number, len(inverse))
        own = derived_seed(seed, "temperature", number)
        runs.append(tempered(problem, count * float(beta), seed=own, **settings))
    report("temperatures", len(inverse), len(inverse))
    rises = [reading_of(run) for run in runs]
    values = np.array([float(rise) for rise in rises]) / inverse
    errors = np.array([float(rise.stderr) for rise in rises]) / inverse
    cost = sum(rise.cost for rise in rises)
    slope, intercept, misfit = _line(
        1 / inverse, values, errors, np.array([rise.dof for rise in rises])
    )
    bent = bool((errors > 0).all()) and _is_misfit(misfit, len(inverse) - 2)
    line = Status.MISFIT if bent else Status.CONVERGED
    status = next((rise.status for rise in rises if not rise.status.ok), line)
    base = count * runs[0].chains.initial_loss
    return TemperatureRegression(
        dataclasses.replace(slope, cost=cost, status=status),
        dataclasses.replace(intercept, value=base + float(intercept), cost=cost, status=status),
        inverse,
        base + values,
        errors,
        misfit,
        runs[0].chains.localization,
        cost,
        status,
    )


def _betas(betas: Sequence[float] | None, count: int) -> Array:
    if betas is None:
        return np.array(FACTORS) * log_temperature(count) / count
    found = np.array([require_positive(beta, "betas") for beta in betas])
    require(
        len(np.unique(found)) >= 2,
        "betas",
        "hold two different inverse temperatures or more",
        betas,
    )
    return found


def _is_misfit(misfit: float, freedom: int) -> bool:
    """Whether χ² = misfit·freedom is improbably large for points on a line."""
    return freedom > 0 and float(stats.chi2.sf(misfit * freedom, freedom)) < IMPROBABLE


def _line(x: Array, y: Array, errors: Array, degrees: Array) -> tuple[Estimate, Estimate, float]:
    """Slope, intercept and χ² per degree of freedom of y over x by weighted least squares (equal
    weights if an error is 0); the errors of both grow with the misfit where that is above 1 (Birge
    1932).

    The degrees of freedom are those of the misfit then, else what the ``degrees`` of the points'
    errors make of theirs.
    """
    known = bool((errors > 0).all())
    weights = 1 / errors**2 if known else np.ones_like(y)
    design = np.stack([x, np.ones_like(x)], axis=1)
    covariance = np.linalg.inv(design.T @ (weights[:, None] * design))
    shares = covariance @ (design.T * weights)  # of each point in slope and intercept
    found = shares @ y
    freedom = len(y) - 2
    misfit = float((weights * (y - design @ found) ** 2).sum() / freedom) if freedom else math.nan
    scale = (
        (misfit if not known or misfit > 1 else 1.0) if freedom else (1.0 if known else math.nan)
    )
    spread = np.sqrt(scale * np.diag(covariance))
    dofs = [
        float(freedom) if scale != 1.0 else combined_degrees(share * errors, degrees)
        for share in shares
    ]
    slope, intercept = (
        Estimate(float(v), float(e), dof=d) for v, e, d in zip(found, spread, dofs, strict=True)
    )
    return slope, intercept, misfit
