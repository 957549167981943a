"""The free energy of the localised posterior by thermodynamic integration, with nothing left to
asymptotics.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import optimize, special

from lambdahat._core.check import require, require_count
from lambdahat._core.progress import report
from lambdahat._core.rng import derived_seed, generator
from lambdahat.problem import Problem, require_problem
from lambdahat.results import Array, Chains, Estimate, Result, Status
from lambdahat.sampling.automatic import Drawn
from lambdahat.sampling.diagnostics import standard_error
from lambdahat.sampling.estimation import combined_degrees
from lambdahat.sampling.kernels import Localization
from lambdahat.sampling.running import localization_tensor
from lambdahat.singular.tempered import reading_of, tempered

PRIOR_DRAWS = 1000
SPACING = 1.0  # in ln β


@dataclass(frozen=True)
class FreeEnergy(Result):
    """F = −ln ∫ exp(−n·L_n(w)) φ(w) dw with the prior φ = N(w*, γ⁻¹), and the λ̂(β) that were
    integrated.

    ``energies`` are λ̂(β) = nβ·E^β[L_n − L_n*] with their ``errors`` at ``nbetas``, rising to n.
    The error of ``value`` holds that of the draws and of the quadrature, ``quadrature_error``.
    ``prior_ess`` is the effective number of the prior draws that make up the part below the first
    of them. ``cost`` counts gradients.
    """

    value: Estimate
    nbetas: Array
    energies: Array
    errors: Array
    quadrature_error: float
    prior_ess: float
    cost: int = 0
    status: Status = Status.CONVERGED


def free_energy(
    problem: Problem,
    localization: Localization = 1.0,
    temperatures: int | None = None,
    seed: int = 0,
    **settings: Any,
) -> FreeEnergy:
    """The free energy of the posterior exp(−n·L_n)·N(w*, γ⁻¹), γ the ``localization``, by
    thermodynamic integration.

    F − n·L_n* = ∫₀¹ n·E^β[L_n − L_n*] dβ = ∫ λ̂(β) d ln β (Gelman and Meng 1998): below some β₀ by
    draws of the prior, −ln E_φ exp(−nβ₀(L_n − L_n*)), β₀ such that half of them are effective; from
    there to 1 by chains at ``temperatures`` values of β (an odd number; by default one for each
    unit of ln β), with the trapezoidal rule and its end correction. For that d λ̂/d ln β = λ̂ −
    Var[nβL] where the losses are those of the whole data; losses of batches vary by their own noise
    too, and the slope is that of a parabola through three points instead. The error of the rule is
    that against every other point, by Richardson. ``settings`` as for ``llc``.
    """
    require_problem(problem)
    frozen = problem.at(problem.vector)
    low, bottom, prior_ess = _prior_part(frozen, localization, seed)
    high = math.log(frozen.num_terms)
    count = _points(temperatures, high - low)
    nbetas = np.exp(np.linspace(low, high, count))
    runs: list[Drawn] = []
    for number, nbeta in enumerate(nbetas):
        report("temperatures", number, count)
        own = derived_seed(seed, "temperature", number)
        runs.append(tempered(frozen, float(nbeta), seed=own, localization=localization, **settings))
    report("temperatures", count, count)
    step = (high - low) / (count - 1)
    found = [reading_of(run) for run in runs]
    means, errors = (
        np.array([float(each) for each in found]),
        np.array([float(each.stderr) for each in found]),
    )
    ends = None
    if all(_whole(run.chains) for run in (runs[0], runs[-1])):
        ends = _variance(runs[0].chains), _variance(runs[-1].chains)
    degrees = np.array([each.dof for each in found])
    part = _integral(means, errors, degrees, ends, step)
    coarse = _integral(means[::2], errors[::2], degrees[::2], ends, 2 * step)
    quadrature = abs(float(part) - float(coarse)) / 15
    parts = np.array([float(part.stderr), quadrature, float(bottom.stderr)])
    stderr = float(np.linalg.norm(parts))
    dof = combined_degrees(parts, np.array([part.dof, math.inf, PRIOR_DRAWS - 1.0]))
    status = next((each.status for each in found if not each.status.ok), Status.CONVERGED)
    cost = sum(each.cost for each in found)
    whole = frozen.num_terms * frozen.loss() + float(bottom) + float(part)
    return FreeEnergy(
        Estimate(whole, stderr, cost, status, dof),
        nbetas,
        means,
        errors,
        quadrature,
        prior_ess,
        cost,
        status,
    )


def _points(temperatures: int | None, width: float) -> int:
    """How many temperatures: odd, so that every other one makes a rule too."""
    if temperatures is None:
        return 2 * max(math.ceil(width / (2 * SPACING)), 1) + 1
    require_count(temperatures, "temperatures", 3)
    require(
        temperatures % 2 == 1,
        "temperatures",
        "be odd",
        temperatures,
        "every other one serves to judge the error",
    )
    return temperatures


def _prior_part(
    problem: Problem, localization: Localization, seed: int
) -> tuple[float, Estimate, float]:
    """ln nβ₀, −ln E_φ exp(−nβ₀(L − L*)) and the effective number of draws in it, half of them
    where β₀ < 1 allows.
    """
    centre = problem.vector
    gamma = torch.as_tensor(localization_tensor(localization, problem.space, centre)).to(centre)
    require(
        bool((gamma > 0).all()),
        "localization",
        "be above 0 for every parameter",
        localization,
        "without it there is no prior to integrate over",
    )
    noise = generator(seed, "prior")
    rises = np.empty(PRIOR_DRAWS)
    base = problem.loss()
    for i in range(PRIOR_DRAWS):
        draw = torch.randn(len(centre), generator=noise, dtype=torch.float64).to(centre)
        rises[i] = problem.loss(centre + draw / gamma.sqrt()) - base
    return _cut(np.nan_to_num(rises, nan=np.inf), problem.num_terms)


def _cut(rises: Array, count: int) -> tuple[float, Estimate, float]:
    """``_prior_part`` of losses above the centre's; an infinite one has weight 0."""
    finite = rises[np.isfinite(rises)]
    require(
        len(finite) > 1,
        "localization",
        "give prior draws of finite loss",
        "draws of infinite loss",
        "raise it",
    )

    def half(log_nbeta: float) -> float:
        return _effective(math.exp(log_nbeta) * finite) - len(finite) / 2

    high = math.log(count) - SPACING
    low = min(-30.0 - math.log(float(np.abs(finite).max()) or 1.0), high)
    found = high if half(high) >= 0 else float(optimize.brentq(half, low, high, xtol=1e-3))
    exponents = -math.exp(found) * rises
    weights = np.exp(exponents - exponents.max())
    error = float(weights.std(ddof=1) / weights.mean() / math.sqrt(len(weights)))
    value = math.log(len(rises)) - float(special.logsumexp(exponents))
    return found, Estimate(value, error), _effective(-exponents)


def _effective(energies: Array) -> float:
    """1/Σw² of the weights exp(−energy), normalised."""
    weights = special.softmax(-energies)
    return 1.0 / float((weights**2).sum())


def _integral(
    means: Array, errors: Array, degrees: Array, ends: tuple[Estimate, Estimate] | None, step: float
) -> Estimate:
    """∫ g = h·Σ'g + (h²/12)·(g'_first − g'_last) for λ̂ in ln β; Σ' takes half of the first and
    last.

    g' = λ̂ − Var with the variances of the ``ends``, or that of the parabola through the last three
    points (Gregory's rule; the line through two has none). The standard error is that of
    independent terms, with their ``degrees``.
    """
    weights = np.full(len(means), step)
    weights[[0, -1]] = step / 2
    bend, extra, known = step**2 / 12, np.zeros(0), np.zeros(0)
    if ends is not None:
        weights[0], weights[-1] = weights[0] + bend, weights[-1] - bend
        extra = bend * np.array([-float(ends[0]), float(ends[1])])
        known = bend * np.array([float(end.stderr) for end in ends])
    elif len(means) > 2:
        slope = np.array([-3.0, 4.0, -1.0]) / (2 * step)
        weights[:3] += bend * slope
        weights[-3:] += bend * slope[::-1]
    spread = np.concatenate([weights * errors, known])
    dof = combined_degrees(spread, np.concatenate([degrees, degrees[[0, -1]][: len(known)]]))
    return Estimate(float(weights @ means + extra.sum()), float(np.linalg.norm(spread)), dof=dof)


def _whole(chains: Chains) -> bool:
    """Whether the chains hold losses of the whole data."""
    return chains.full_losses is not None or chains.batch_size == chains.num_samples


def _variance(chains: Chains) -> Estimate:
    """Var[nβL] over the draws."""
    energies = chains.energies if chains.full_losses is None else chains.full_energies
    kept = energies[~chains.diagnostics.diverged]
    require(
        kept.size > 0,
        "chains",
        "have draws of finite loss",
        f"only diverged ones at nβ = {chains.nbeta:.3g}",
        chains.status.value,
    )
    squares = (kept - kept.mean()) ** 2
    return Estimate(float(squares.mean()), standard_error(squares))
