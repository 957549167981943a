"""Bayesian readings of a solution: WAIC and its kin at β = 1, WBIC, λ from several temperatures,
and the free energy by thermodynamic integration.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy
import torch
from torch import Tensor

from lambdahat._core.check import message, require, require_count, require_positive
from lambdahat._core.progress import track
from lambdahat._core.rng import derived_seed, generator
from lambdahat.estimators.quantities import Compute, MeasureSettings, Work, quantity
from lambdahat.operators.base import LinearOperator
from lambdahat.problem import Problem, require_problem
from lambdahat.results import Array, Chains, Estimate, Result, Status
from lambdahat.sampling._sample import SamplingRun, localization_tensor
from lambdahat.sampling.backends.minibatches import SampleLosses
from lambdahat.sampling.diagnostics import combined_degrees, standard_error
from lambdahat.sampling.kernels import Kernel, Localization
from lambdahat.singular._llc import (
    chain_work,
    default_localization,
    draw,
    forecast_runs,
    inverse_temperature,
)
from lambdahat.singular.observables import (
    STRETCHES,
    finite_chains,
    in_stretches,
    jackknife,
    join_stretches,
    mean_energy,
    reweighted,
)

FACTORS = (0.5, 0.7, 1.0, 1.4, 2.0)  # of 1/ln n, the temperatures of the regression
IMPROBABLE = 1e-3  # the probability of so large a χ² below which the points are not on a line
PRIOR_DRAWS = 1000
SPACING = 1.0  # in ln β


@dataclass(frozen=True)
class BayesCriteria(Result):
    """Bayesian criteria of the posterior at β = 1 over n samples, ℓ_i(w) = −log p(x_i|w), E over
    its draws.

    ``bayes_training_loss`` T = −(1/n) Σ log E[p(x_i|w)], ``gibbs_training_loss`` (1/n) Σ E[ℓ_i],
    ``functional_variance`` V = Σ Var[ℓ_i], ``waic`` T + V/n and ``singular_fluctuation`` ν = V/2
    are those of the training data: their errors come from the finite number of draws.

    ``bayes_generalisation_loss`` −E_x log E[p(x|w)] and ``gibbs_generalisation_loss`` E_x E[ℓ(x,
    w)] are means over the held-out samples; their errors include those of the draws and of the
    finite number of samples. ``g_n`` is E[F_{n+1}] − F_n, F_n the free energy, which is −E_x log
    E[p(x|w)] too: the Bayes generalisation loss where there are held-out data, else the WAIC with
    the error of n samples added; ``g_n_from`` tells which. ``g_n_draws_error`` is the part of its
    error that more draws would remove.

    ``how`` is "own chains" (sampled at nβ = n) or "reweighted" (from chains at another nβ); ``ess``
    is the effective number of draws of the chains, or of their weights. ``cost`` counts gradients.
    """

    waic: Estimate
    functional_variance: Estimate
    singular_fluctuation: Estimate
    bayes_training_loss: Estimate
    gibbs_training_loss: Estimate
    g_n: Estimate
    g_n_from: str
    g_n_draws_error: float
    how: str
    ess: float
    chains: Chains
    bayes_generalisation_loss: Estimate | None = None
    gibbs_generalisation_loss: Estimate | None = None
    cost: int = 0
    status: Status = Status.CONVERGED


def bayes_criteria(
    problem: Problem, held_out: Any = None, chains: int | Chains = 4, seed: int = 0, **settings: Any
) -> BayesCriteria:
    """WAIC, functional variance, Bayes and Gibbs losses and G_n of the posterior around the
    problem's parameters w*.

    The loss is read as ℓ(x, w) = −log p(x|w). A constant missing from it shifts the losses alike; a
    factor, such as that of "mse", which is the likelihood of a Gaussian with variance ½ for each
    output, is another temperature. The localization γ is the prior, N(w*, γ⁻¹): where it is not
    weak against nβ times the curvature, V is too small and WAIC too near the training loss, because
    the prior is centred on the trained parameters.

    ``held_out`` is other data, or a problem of the same model on them. ``chains`` is a number, to
    sample at nβ = n with ``settings`` as for ``llc``, or existing chains with ``parameters``
    (``keep_parameters=True``): those at another temperature are reweighted, which fails for all but
    the smallest λ; the status is then FEW_WEIGHTS.

    At another β, WAIC is T + βV/n and ν = βV/2; E[G_n − L(w₀)] is ((λ − ν)/β + ν)/n and the Gibbs
    loss has (λ/β + ν)/n (Watanabe 2009, "Algebraic geometry and statistical learning theory",
    chapter 6; WAIC: Watanabe 2010, "Asymptotic equivalence of Bayes cross validation and widely
    applicable information criterion"). G_n: Eq. 28, the NGD paper.
    """
    require_problem(problem)
    frozen = problem.at(problem.vector)
    sets = [_Rises(frozen)]
    if held_out is not None:
        if isinstance(held_out, Problem):
            same, cure = held_out.space == frozen.space, "pass the data alone, or problem.on(data)"
            require(same, "held_out", "have the problem's parameters", held_out, cure)
            other = held_out.at(frozen.vector)
        else:
            other = frozen.on(held_out)
        sets.append(_Rises(other, "held_out"))
    if isinstance(chains, Chains):
        require(not settings, "settings", "be left out where chains are given", ", ".join(settings))
        return _criteria_of_draws(frozen, sets, chains)
    require_count(chains, "chains")
    averages = {f"rises {number}": rises for number, rises in enumerate(sets)}
    nbeta = float(frozen.num_samples)
    run = draw(frozen, nbeta, chains=chains, seed=seed, averages=averages, **settings).chains
    kept = finite_chains(run)
    sums = join_stretches([run.averages[name][kept] for name in averages], run.stretches)
    lean = dataclasses.replace(run, averages={}, stretches=())
    return _criteria(sets, sums, lean, "own chains", lean.diagnostics.ess_bulk, lean.status)


class _Rises:
    """θ ↦ [exp(−δ), δ, δ²] of every sample, (3, n), δ = ℓ(θ) − ℓ(w*), which does not underflow."""

    def __init__(self, problem: Problem, name: str = "problem") -> None:
        cure = "WAIC and its kin compare samples"
        require(problem.has_data, name, "have data", "a loss without any", cure)
        self._losses = SampleLosses(problem)
        self._centre = self._losses(problem.vector).double()
        self.centre = self._centre.cpu().numpy()  # ℓ(w*) of every sample, (n,)

    def __call__(self, theta: Tensor) -> Tensor:
        rises = self._losses(theta).double() - self._centre
        return torch.stack([torch.exp(-rises), rises, rises.square()])


def _criteria_of_draws(problem: Problem, sets: Sequence[_Rises], chains: Chains) -> BayesCriteria:
    """The criteria from draws, weighted where they are of another temperature."""
    parameters, count, size = chains.parameters, problem.num_samples, problem.num_parameters
    if parameters is None:
        cure = "sample with keep_parameters=True, or pass the number of chains"
        expected = "hold the parameters of their draws"
        raise ValueError(message("chains", expected, "chains without", cure))
    ours = parameters.shape[-1] == size and chains.num_samples == count
    got = f"{parameters.shape[-1]} parameters, {chains.num_samples} samples"
    expected = f"be of a problem with {size} parameters and {count} samples"
    require(ours, "chains", expected, got)
    how, ess, status = "own chains", chains.diagnostics.ess_bulk, chains.status
    weights: Array = np.ones(chains.losses.shape)
    if not math.isclose(chains.nbeta, count, rel_tol=1e-9):
        weighting = reweighted(chains, count)
        how, ess, status = "reweighted", weighting.ess, weighting.status
        weights = weighting.weights * weighting.weights.size
    kept = finite_chains(chains)
    parameters, weights = parameters[torch.from_numpy(kept)], weights[kept]
    draws = weights.shape[1]
    cuts = np.array_split(np.arange(draws), min(STRETCHES, draws))

    def total(rises: _Rises, chain: int, cut: Any) -> Array:
        places = ((float(weights[chain, i]), parameters[chain, i]) for i in cut)
        parts = [weight * rises(theta.to(problem.device)) for weight, theta in places]
        mean = torch.stack(parts).sum(0) * (len(cuts) / draws)
        return np.asarray(mean.cpu().numpy(), dtype=np.float64)

    sums = [in_stretches(weights)]  # (chains, stretches), and (chains, stretches, 3, n) of each set
    for rises in sets:
        rows = [[total(rises, chain, cut) for cut in cuts] for chain in range(len(weights))]
        sums.append(np.array(rows))
    return _criteria(sets, sums, chains, how, ess, status)


def _criteria(
    sets: Sequence[_Rises],
    sums: Sequence[Array],
    chains: Chains,
    how: str,
    ess: float,
    status: Status,
) -> BayesCriteria:
    """All readings, with the jackknife over stretches for the errors."""

    def by_sample(weight: Array, *parts: Array) -> list[tuple[Array, Array, Array]]:
        """−log E[p], E[ℓ] and Var[ℓ] of every sample, from the sums of exp(−δ), δ and δ²."""
        rows = []
        for part, rises in zip(parts, sets, strict=True):
            likelihood, rise, square = part / weight
            loss = rises.centre - np.log(likelihood), rises.centre + rise
            rows.append((*loss, square - rise**2))
        return rows

    def readings(*pooled: Array) -> Array:
        (bayes, gibbs, variance), *elsewhere = by_sample(*pooled)
        others = [row.mean() for part in elsewhere for row in part[:2]]
        return np.asarray(
            [bayes.mean(), gibbs.mean(), variance.sum(), (bayes + variance).mean(), *others]
        )

    bayes, gibbs, variance, waic, *others = (
        dataclasses.replace(estimate, cost=chains.cost, status=status)
        for estimate in jackknife(readings, sums)
    )
    train, *held_out = by_sample(*[part.mean(axis=(0, 1)) for part in sums])
    rows = held_out[0][:2] if held_out else ()
    losses = [_over_samples(loss, row) for loss, row in zip(others, rows, strict=True)]
    half, error = float(variance) / 2, float(variance.stderr) / 2
    return BayesCriteria(
        waic=waic,
        functional_variance=variance,
        singular_fluctuation=dataclasses.replace(variance, value=half, stderr=error),
        bayes_training_loss=bayes,
        gibbs_training_loss=gibbs,
        g_n=losses[0] if losses else _over_samples(waic, train[0] + train[2]),
        g_n_from="held-out data" if losses else "WAIC",
        g_n_draws_error=float((others[0] if losses else waic).stderr),
        how=how,
        ess=ess,
        chains=chains,
        bayes_generalisation_loss=losses[0] if losses else None,
        gibbs_generalisation_loss=losses[1] if losses else None,
        cost=chains.cost,
        status=status,
    )


def _over_samples(estimate: Estimate, by_sample: Array) -> Estimate:
    """The estimate as a mean over all possible samples: the error of so many is added."""
    count = len(by_sample)
    among = float(by_sample.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan
    errors = np.array([float(estimate.stderr), among])
    dof = combined_degrees(errors, np.array([estimate.dof, max(count - 1, 1)]))
    return dataclasses.replace(estimate, stderr=math.hypot(*errors), dof=dof)


@dataclass(frozen=True)
class TemperatureRegression(Result):
    """λ as the slope of E^β[n·L_n] over 1/β: ``learning_coefficient``; the ``intercept`` is n·L_n
    at 1/β = 0.

    The points are ``losses`` E^β[n·L_n] with their ``errors`` at ``betas``, sampled with the same
    ``localization``. ``misfit`` is χ² per degree of freedom of the line; if it is above 1, the
    errors are multiplied by its root. If a χ² as large has a probability below 1e-3, the status is
    MISFIT. ``cost`` counts gradients.
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
        run = draw(source, log_temperature(source.num_terms), **settings)
        return _free_energy(run.chains, source.num_terms, run.estimate)
    wanted = log_temperature(source.num_samples)
    same, got = math.isclose(source.nbeta, wanted, rel_tol=1e-6), f"chains at {source.nbeta:.6g}"
    cure = "sample at that nbeta, or read local_free_energy(chains)"
    require(same, "chains", f"be at nβ = n/ln n = {wanted:.6g}", got, cure)
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
    if betas is None:
        inverse = np.array(FACTORS) * log_temperature(count) / count
    else:
        inverse = np.array([require_positive(beta, "betas") for beta in betas])
        several = len(np.unique(inverse)) >= 2
        require(several, "betas", "hold two different inverse temperatures or more", betas)
    if settings.get("localization") is None and not isinstance(settings.get("kernel"), Kernel):
        settings["localization"], _ = default_localization(problem, log_temperature(count))
    runs, rises, errors, degrees, cost, status = _runs(problem, count * inverse, seed, settings)
    values, errors = rises / inverse, errors / inverse
    slope, intercept, misfit = _line(1 / inverse, values, errors, degrees)
    bent = bool((errors > 0).all()) and _is_misfit(misfit, len(inverse) - 2)
    status = Status.MISFIT if bent and status.ok else status
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


def _runs(
    problem: Problem, nbetas: Array, seed: int, settings: Mapping[str, Any]
) -> tuple[list[SamplingRun], Array, Array, Array, int, Status]:
    """Runs at every nβ: λ̂, errors, degrees of freedom, cost, and the first bad status."""
    runs = [
        draw(problem, nbeta, seed=derived_seed(seed, "temperature", number), **settings)
        for number, nbeta in enumerate(track("temperatures", nbetas.tolist()))
    ]
    estimates = [run.estimate for run in runs]
    rows = [(float(each), float(each.stderr), each.dof) for each in estimates]
    values, errors, degrees = np.array(rows).T
    status = Status.joint(each.status for each in estimates)
    return runs, values, errors, degrees, sum(each.cost for each in estimates), status


def _is_misfit(misfit: float, freedom: int) -> bool:
    """Whether χ² = misfit·freedom is improbably large for points on a line."""
    return freedom > 0 and float(scipy.special.chdtrc(freedom, misfit * freedom)) < IMPROBABLE


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
    fit = shares @ y
    freedom = len(y) - 2
    misfit = float((weights * (y - design @ fit) ** 2).sum() / freedom) if freedom else math.nan
    scale = 1.0 if known else misfit
    if known and freedom and misfit > 1:
        scale = misfit
    spread = np.sqrt(scale * np.diag(covariance))
    dofs = [
        float(freedom) if scale != 1.0 else combined_degrees(share * errors, degrees)
        for share in shares
    ]
    slope, intercept = (
        Estimate(float(v), float(e), dof=d) for v, e, d in zip(fit, spread, dofs, strict=True)
    )
    return slope, intercept, misfit


@dataclass(frozen=True)
class FreeEnergy(Result):
    """F = −ln ∫ exp(−n·L_n(w)) φ(w) dw with the prior φ = N(w*, γ⁻¹), and the λ̂(β) that were
    integrated.

    ``energies`` are λ̂(β) = nβ·E^β[L_n − L_n*] with their ``errors`` at ``nbetas``, rising to n.
    The error of ``value`` combines that of the draws and that of the quadrature,
    ``quadrature_error``. ``prior_ess`` is the effective number of the prior draws that make up the
    part below the first of them. ``cost`` counts gradients.
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
    count = temperatures
    if count is None:  # odd, so that every other one makes a rule too
        count = 2 * max(math.ceil((high - low) / (2 * SPACING)), 1) + 1
    require_count(count, "temperatures", 3)
    cure = "every other one serves to judge the error"
    require(count % 2 == 1, "temperatures", "be odd", count, cure)
    nbetas, step = np.exp(np.linspace(low, high, count)), (high - low) / (count - 1)
    settings["localization"] = localization
    runs, means, errors, degrees, cost, status = _runs(frozen, nbetas, seed, settings)
    ends = None
    first, last = runs[0].chains, runs[-1].chains
    if all(
        chains.full_losses is not None or chains.batch_size == chains.num_samples
        for chains in (first, last)
    ):
        ends = _variance(first), _variance(last)
    part = _integral(means, errors, degrees, ends, step)
    coarse = _integral(means[::2], errors[::2], degrees[::2], ends, 2 * step)
    quadrature = abs(float(part) - float(coarse)) / 15
    parts = np.array([float(part.stderr), quadrature, float(bottom.stderr)])
    dof = combined_degrees(parts, np.array([part.dof, math.inf, PRIOR_DRAWS - 1.0]))
    whole = frozen.num_terms * frozen.loss() + float(bottom) + float(part)
    value = Estimate(whole, float(np.linalg.norm(parts)), cost, status, dof)
    return FreeEnergy(value, nbetas, means, errors, quadrature, prior_ess, cost, status)


def _prior_part(
    problem: Problem, localization: Localization, seed: int
) -> tuple[float, Estimate, float]:
    """ln nβ₀, −ln E_φ exp(−nβ₀(L − L*)), and the effective number of prior draws in it."""
    centre = problem.vector
    gamma = torch.as_tensor(localization_tensor(localization, problem.space, centre)).to(centre)
    tied, cure = bool((gamma > 0).all()), "without it there is no prior to integrate over"
    require(tied, "localization", "be above 0 for every parameter", localization, cure)
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
    expected, got = "give prior draws of finite loss", "draws of infinite loss"
    require(len(finite) > 1, "localization", expected, got, "raise it")

    def half(log_nbeta: float) -> float:
        return _effective(math.exp(log_nbeta) * finite) - len(finite) / 2

    high = math.log(count) - SPACING
    low = min(-30.0 - math.log(float(np.abs(finite).max()) or 1.0), high)
    start = high if half(high) >= 0 else float(scipy.optimize.brentq(half, low, high, xtol=1e-3))
    exponents = -math.exp(start) * rises
    weights = np.exp(exponents - exponents.max())
    error = float(weights.std(ddof=1) / weights.mean() / math.sqrt(len(weights)))
    value = math.log(len(rises)) - float(scipy.special.logsumexp(exponents))
    return start, Estimate(value, error), _effective(-exponents)


def _effective(energies: Array) -> float:
    """1/Σw² of the weights exp(−energy), normalised."""
    weights = scipy.special.softmax(-energies)
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


def _variance(chains: Chains) -> Estimate:
    """Var[nβL] over the draws."""
    energies = chains.energies if chains.full_losses is None else chains.full_energies
    kept = energies[finite_chains(chains, f"only diverged ones at nβ = {chains.nbeta:.3g}")]
    squares = (kept - kept.mean()) ** 2
    return Estimate(float(squares.mean()), standard_error(squares))


# the logarithm of a rise in loss over the prior beyond which a free energy takes more temperatures
STEEPEST = 5.0


def _with_chains(function: Callable[..., Result]) -> Compute:
    """Measures what has temperatures of its own, by the settings of chains."""
    return lambda problem, _, settings: function(
        problem,
        seed=settings.seed,
        **{name: value for name, value in settings.sampling.items() if name != "nbeta"},
    )


quantity("bayes_criteria", _with_chains(bayes_criteria))(forecast_runs())
quantity("temperature_regression", _with_chains(temperature_regression))(
    forecast_runs(len(FACTORS), len(FACTORS))
)


@quantity("free_energy", _with_chains(free_energy))
def free_energy_work(problem: Problem, operator: LinearOperator, settings: MeasureSettings) -> Work:
    """A run for each unit of ln β, from where the prior itself is enough."""
    most = 2 * math.ceil((math.log(problem.num_samples) + STEEPEST) / 2) + 1
    return chain_work(problem, settings.sampling, (3, most))
