"""Log-determinants of positive definite operators, with one error bar for the probes and the truncation together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.polynomial import chebyshev

from lambdahat._check import require_choice, require_count, require_interval
from lambdahat._precision import no_autocast
from lambdahat.estimators.factorisations import exact_logdet, require_positive_eigenvalue
from lambdahat.estimators.gauss_limits import Limit, bounded_away, limit_of, rule_of
from lambdahat.estimators.preconditioning import Preconditioned, preconditioned, require_precondition
from lambdahat.estimators.spectra import (
    DEFAULT_DEPTH,
    lanczos_runs,
    moments,
    quadrature,
    rounding,
    spectral_ends,
)
from lambdahat.krylov import BREAKDOWN, require_symmetric
from lambdahat.maxent import MaxentDensity, fit
from lambdahat.maxent.bases import to_unit
from lambdahat.operators.base import LinearOperator, Normalised
from lambdahat.operators.matrix import Matrix
from lambdahat.results import Array, Estimate, Moments, Spectrum, Status

METHODS = ("slq", "maxent", "chebyshev", "exact")
MOMENT_DEPTH = 25


@no_autocast()
def logdet(
    operator: LinearOperator,
    method: str = "slq",
    depth: int | None = None,
    probes: int = 10,
    seed: int = 0,
    precondition: str = "auto",
    rank: int | None = None,
    bounds: tuple[float, float] | None = None,
) -> Estimate:
    """log det A = tr log A of a positive definite operator.

    "slq" is stochastic Lanczos quadrature, "maxent" the expectation of log λ under the density of maximum entropy with
    2·``depth`` Chebyshev moments (MEMe, Algorithm 3 of the spectral thesis), "chebyshev" the Chebyshev series of log
    to that degree (Han, Malioutov and Shin 2015): each makes ``depth`` products for each of ``probes`` probes, and
    the last two up to 30 more for the bounds. "exact" is a Cholesky factorisation in float64, sparse if the matrix is;
    it stands in for the others where P is at most 100 and no ``depth`` is given, for then it takes fewer products.

    ``precondition`` and ``rank`` are as in ``preconditioned``: the determinant of P is exact, and only that of
    P^{−½}AP^{−½} is estimated. ``bounds`` holds the spectrum of the latter; without it the lower end is what is known
    (Gershgorin's circles, the noise of a kernel matrix). The standard error is that of the probes and, in quadrature,
    of the truncation; QUADRATURE when the second is larger. A positive lower end bounds the truncation from both
    sides. Where none is known only the way in which it falls with the depth tells of it, and an eigenvalue near 0 that
    the products do not show is not in the error bar: POSITIVITY where no Ritz value at the lower end has settled above
    0 either. An eigenvalue that is not positive is an error that names it.
    """
    require_choice(method, "method", METHODS)
    require_symmetric(operator, "logdet")
    depth = None if depth is None else require_count(depth, "depth")
    require_count(probes, "probes", 2 if method in ("maxent", "chebyshev") else 1)
    require_precondition(precondition, rank, operator.dim)
    bounds = None if bounds is None else require_interval(bounds, "bounds", least=0.0)
    if method == "exact" or (depth is None and operator.dim <= DEFAULT_DEPTH):
        return exact_logdet(operator)
    unit = Normalised(operator)
    unit.settle()
    if unit.exponent:  # squares of such entries leave the dtype
        half = unit.exponent // 2
        factor = 2.0 ** (-2 * half)
        root = torch.full((operator.dim,), 2.0**-half, dtype=operator.dtype, device=operator.device)
        scaled = operator.rescaled(root) if isinstance(operator, Matrix) else factor * operator
        within = None if bounds is None else (bounds[0] * factor, bounds[1] * factor)
        found = logdet(scaled, method, depth, probes, seed, precondition, rank, within)
        value = float(found) + operator.dim * 2 * half * math.log(2.0)
        return dataclasses.replace(found, value=value, cost=found.cost + unit.matvecs + unit.repeated)
    ready = preconditioned(operator, precondition, rank)
    found = _ESTIMATES[method](ready, bounds, depth, probes, seed)
    return dataclasses.replace(
        found, value=float(found) + ready.logdet, cost=found.cost + ready.cost + unit.matvecs + unit.repeated
    )


def _slq(
    ready: Preconditioned, bounds: tuple[float, float] | None, depth: int | None, probes: int, seed: int
) -> Estimate:
    """Gauss rules of log, corrected for what more depth would still change."""
    inner = ready.operator
    runs = lanczos_runs(inner, depth, probes, seed, "logdet")
    measure, least = quadrature(inner, runs), min(float(run.ritz()[0][0]) for run in runs)
    _require_positive(least, ready)
    known, noise = inner.known_bounds()[0] if bounds is None else bounds[0], rounding(inner, runs)
    polynomial, mean = _control(inner, measure)
    found = measure.expectation(lambda nodes: np.log(nodes) - polynomial(nodes), inner.dim)
    limit = limit_of(runs, known if known > 0 else noise, known > 0)
    value = float(found) + inner.dim * (mean + limit.value - limit.gauss)
    status = Status.CONVERGED
    if least <= noise:
        status = Status.PRECISION_LIMIT
    elif known <= 0 and not all(bounded_away(run) for run in runs):
        status = Status.POSITIVITY
    # each product errs by the noise of the operator, which changes log λ by noise/λ
    unsure = limit.distance(limit.value) + noise * float((measure.weights / measure.nodes).sum() / len(runs))
    return _with_bias(dataclasses.replace(found, value=value, status=status), inner.dim * unsure)


def _control(inner: LinearOperator, measure: Spectrum) -> tuple[Callable[[Array], Array], float]:
    """The polynomial nearest to log under the measure whose mean over the spectrum is known exactly, and that mean.

    tr A and tr A² are free where the entries are there; what varies from probe to probe is then only log less it.
    """
    trace, squares = inner.known_trace(), inner.known_squares()
    exact = [value / inner.dim for value in (trace, squares) if value is not None]
    exact = exact if trace is not None and measure.nodes.shape[1] > len(exact) else []
    root, nodes = np.sqrt(measure.weights.ravel() / len(measure.nodes)), measure.nodes.ravel()
    scale = float(nodes.max())
    design = np.stack([(nodes / scale) ** k for k in range(len(exact) + 1)], axis=1)
    found = np.linalg.lstsq(root[:, None] * design, root * np.log(nodes), rcond=None)[0]
    slopes = [float(c) / scale ** (k + 1) for k, c in enumerate(found[1:])]
    mean = float(sum(slope * value for slope, value in zip(slopes, exact, strict=True)))
    return lambda x: np.asarray(sum(c * x ** (k + 1) for k, c in enumerate(slopes)) + np.zeros_like(x)), mean


def _maxent(
    ready: Preconditioned, bounds: tuple[float, float] | None, depth: int | None, probes: int, seed: int
) -> Estimate:
    """Algorithm 3: moments, density, expectation of log λ; the truncation by the rules that the same moments fix."""
    inner = ready.operator
    ends = _interval(ready, bounds, seed)
    found = _measured(inner, ends.interval, depth, probes, seed)
    density = fit(found)
    slopes = density.sensitivity(np.log)
    change, stderr = _steadied(inner, found, slopes, density.moments(len(found) + 1, "chebyshev"))
    value = density.expectation(np.log)
    unmatched = float(np.abs(slopes * density.residuals[1:]).sum())  # moments are matched to a tolerance only
    unsure = _limit(density, len(found), ends).distance(value) + unmatched
    status = density.status if density.status is not Status.CONVERGED else ends.status
    parts = inner.dim * (value + change), inner.dim * stderr, found.cost + ends.cost, status
    return _with_bias(Estimate(*parts, dof=float(probes - 1)), inner.dim * unsure)


def _chebyshev(
    ready: Preconditioned, bounds: tuple[float, float] | None, depth: int | None, probes: int, seed: int
) -> Estimate:
    """Σ_k c_kμ_k with log λ = c_0 + Σ_k c_kT_k, c_k = 2(−1)^{k+1}ρᵏ/k, ρ = (√b − √a)/(√b + √a) on [a, b].

    What is left out is at most 2Σ_{k>m}ρᵏ/k an eigenvalue where [a, b] holds the spectrum. Where a is only where the
    spectrum seems to begin, or that is more than the noise, the Gauss rules of the density with the same moments, those
    on an interval that does hold it, say what is left out.
    """
    inner = ready.operator
    ends = _interval(ready, bounds, seed)
    found = _measured(inner, ends.interval, depth, probes, seed)
    orders = np.arange(1, len(found))
    a, b = math.sqrt(ends.guess), math.sqrt(ends.interval[1])
    rho = (b - a) / (b + a)
    series = np.append(2 * math.log((a + b) / 2), -2.0 * (-rho) ** orders / orders)
    series = _moved(series, (ends.guess, ends.interval[1]), ends.interval)
    change, stderr = _steadied(inner, found, series[1:], np.append(found.values, found.values[-2:]))
    value = float(series @ found.values)
    rest = 2.0 * (-math.log1p(-rho) - float((rho**orders / orders).sum()))
    bound = rest if ends.guess == ends.interval[0] else math.inf
    unsure = bound if bound <= stderr else min(bound, _limit(fit(found), len(found), ends).distance(value))
    cost = found.cost + ends.cost
    estimate = Estimate(inner.dim * (value + change), inner.dim * stderr, cost, ends.status, dof=float(probes - 1))
    return _with_bias(estimate, inner.dim * unsure)


def _moved(series: Array, first: tuple[float, float], second: tuple[float, float]) -> Array:
    """The coefficients on the interval ``second`` of a Chebyshev series (m + 1,) on ``first``: the same polynomial."""
    if first == second:
        return series
    nodes = chebyshev.chebpts1(len(series))
    places = (second[0] + second[1]) / 2 + nodes * (second[1] - second[0]) / 2
    readings = chebyshev.chebval(to_unit(places, first), series)
    table = chebyshev.chebvander(nodes, len(series) - 1)  # orthogonal on the nodes
    return np.asarray(table.T @ readings / (table**2).sum(axis=0))


def _limit(density: MaxentDensity, count: int, ends: _Ends) -> Limit:
    """Where the Gauss rules go that all measures with the moments of ``density`` share."""
    low = ends.interval[0] if ends.sure else BREAKDOWN * float(np.finfo(np.float64).eps) * ends.interval[1]
    return limit_of([rule_of(density, count // 2)], low, ends.sure)


def _steadied(inner: LinearOperator, found: Moments, slopes: Array, means: Array) -> tuple[float, float]:
    """What the exact first two moments, where they are known, change in Σ_k slopes_k μ_k, and its standard error.

    They are control variates: their weights fit Σ_k slopes_k T_k by T_1 and T_2 under the moments ``means`` (m + 3,),
    with T_jT_k = (T_{j+k} + T_{|j−k|})/2. They are left out where the probes do not bear them out.
    """
    exact = _first_moments(inner, found.bounds)
    used, orders = np.arange(1, len(exact) + 1), np.arange(1, len(found))
    products = (means[used[:, None] + orders] + means[np.abs(used[:, None] - orders)]) / 2
    joint = products - np.outer(means[used], means[orders])
    weights = np.linalg.lstsq(joint[:, : len(exact)], joint @ slopes, rcond=None)[0] if exact else np.zeros(0)
    left, covariance = slopes.copy(), found.covariance[1:, 1:]
    left[: len(exact)] -= weights
    before, after = (max(0.0, float(part @ covariance @ part)) for part in (slopes, left))
    change = float(weights @ (np.asarray(exact) - found.values[used]))
    return (change, math.sqrt(after)) if after < before else (0.0, math.sqrt(before))


def _first_moments(inner: LinearOperator, bounds: tuple[float, float]) -> list[float]:
    """The first one or two Chebyshev moments on ``bounds``, exact, as far as tr A and tr A² are known."""
    middle, half = (bounds[0] + bounds[1]) / 2, (bounds[1] - bounds[0]) / 2
    trace, squares = inner.known_trace(), inner.known_squares()
    if trace is None:
        return []
    first = (trace / inner.dim - middle) / half
    if squares is None:
        return [first]
    second = (squares / inner.dim - 2 * middle * trace / inner.dim + middle**2) / half**2
    return [first, 2 * second - 1]


def _measured(inner: LinearOperator, bounds: tuple[float, float], depth: int | None, probes: int, seed: int) -> Moments:
    """2·depth Chebyshev moments, by ``depth`` products a probe; rounding, which no spread shows, is in their error."""
    found = moments(inner, 2 * (MOMENT_DEPTH if depth is None else depth), "chebyshev", probes, seed, bounds)
    size = float(torch.finfo(inner.dtype).eps) * max(map(abs, bounds)) / (bounds[1] - bounds[0])
    covariance = found.covariance + np.diag((4 * size * np.arange(len(found))) ** 2)
    return dataclasses.replace(found, covariance=covariance, stderr=np.sqrt(np.diag(covariance)))


@dataclasses.dataclass(frozen=True)
class _Ends:
    """An ``interval`` that holds the spectrum, the products spent on it, and whether its lower end is ``sure``.

    Where it is not, that is 0. ``guess`` is where the spectrum seems to begin.
    """

    interval: tuple[float, float]
    guess: float
    sure: bool
    status: Status = Status.CONVERGED
    cost: int = 0


def _interval(ready: Preconditioned, bounds: tuple[float, float] | None, seed: int) -> _Ends:
    """The ends of the spectrum by what is known, and by Lanczos."""
    if bounds is not None:
        return _Ends(bounds, bounds[0], True)
    inner = ready.operator
    ends, known = spectral_ends(inner, seed), inner.known_bounds()
    _require_positive(ends.low, ready)
    high = min(known[1], ends.high + ends.high_residual + 0.01 * (ends.high - ends.low) + 1e-3 * ends.high)
    settled = ends.low_residual < 0.5 * ends.low
    seen = ends.low - ends.low_residual if settled else 0.0
    if known[0] > 0:
        low = min(known[0], 0.9 * high)  # an interval too short for the rounding of the dtype holds nothing
        return _Ends((low, high), max(low, min(seen, 0.9 * high)), True, cost=ends.cost)
    status = Status.CONVERGED if ends.low_residual < ends.low else Status.POSITIVITY
    return _Ends((0.0, high), seen or 0.1 * ends.low, False, status, ends.cost)


def _with_bias(estimate: Estimate, bound: float) -> Estimate:
    """Adds a bias known only to lie within ±``bound``, as the uniform distribution's deviation, bound/√3.

    A 95 % interval then holds the whole of it, 1.96/√3 > 1. The degrees of freedom are Satterthwaite's.
    """
    noise, bias = float(estimate.stderr), bound / math.sqrt(3.0)
    total = math.hypot(noise, bias)
    dof = math.inf if noise == 0 or math.isinf(estimate.dof) else estimate.dof * (total / noise) ** 4
    settled = bias <= max(noise, 1e-12 * abs(float(estimate)))
    passed = estimate.status in (Status.CONVERGED, Status.POSITIVITY)
    status = estimate.status if settled or not passed else Status.QUADRATURE
    return dataclasses.replace(estimate, stderr=total, dof=dof, status=status)


def _require_positive(least: float, ready: Preconditioned) -> None:
    """Raise where a Ritz value is not positive; that of A itself, where a few products with it show one too."""
    if least > 0:
        return
    plain = spectral_ends(ready.original).low if ready.name else least
    if plain <= 0:
        require_positive_eigenvalue(plain, "Ritz value")
    require_positive_eigenvalue(least, "Ritz value", f" after {ready.name}")


_ESTIMATES = {"slq": _slq, "maxent": _maxent, "chebyshev": _chebyshev}
