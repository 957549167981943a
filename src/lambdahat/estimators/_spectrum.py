"""Spectral densities, traces of functions and moments, all by random probes on the unit sphere."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from lambdahat._core.check import (
    describe,
    message,
    require,
    require_choice,
    require_count,
    require_interval,
    require_type,
)
from lambdahat._core.device import default_context
from lambdahat._core.progress import report
from lambdahat.estimators.estimator_registry import estimator
from lambdahat.estimators.probes import FOURTH_MOMENTS, Probes, block_sizes, crowded, probes_for
from lambdahat.estimators.quantities import MeasureSettings, Work, products, quantity
from lambdahat.estimators.sequential import skewness_widening
from lambdahat.krylov import (
    BREAKDOWN,
    Basis,
    Lanczos,
    basis_bytes,
    chosen_place,
    dot,
    lanczos,
    random_vector,
    require_symmetric,
    working_dtype,
)
from lambdahat.krylov.lanczos import CHUNK
from lambdahat.maxent import MaxentDensity
from lambdahat.maxent.bases import BASES, Bounds, legendre_in_chebyshev
from lambdahat.operators.base import LinearOperator, Normalised
from lambdahat.operators.matrix import OperatorLike, operator
from lambdahat.operators.rounding import MANY, Rounding, rounding_of
from lambdahat.problem import Problem
from lambdahat.results import Array, Estimate, Moments, Spectrum, Status

SMALL = 0.05


@dataclass(frozen=True)
class GaussLimit:
    """The limit of the Gauss rules of log: the last rule, the best guess, and bounds."""

    gauss: float
    value: float
    low: float
    high: float

    def distance(self, guess: float) -> float:
        """How far the limit may be from a guess."""
        return max(guess - self.low, self.high - guess, 0.0)


def limit_of(runs: list[Lanczos], low: float, sure: bool) -> GaussLimit:
    """The limit of the mean Gauss rule of log over the runs, per eigenvalue.

    The rules fall with the depth, and the Gauss–Radau rule with a node at a lower bound ``low`` > 0
    of the spectrum stays below the limit (Golub and Meurant 2010, §6): these two always bracket it.
    The rules of the four quarters of the depth say more. If the last changed the mean by at most
    0.05, and by half of what the one before did, they fall geometrically: the limit is as far on as
    Aitken's series says, and within twice that. Otherwise they fall as a power of the depth at
    best, whose doublings are such a series. That series, and the Gauss–Radau rule with a node at
    the extrapolated least eigenvalue, widen both.

    If ``low`` is not ``sure`` to be a bound, as the rounding of the dtype is not, the rules count
    as settled only if the smallest Ritz values have; otherwise the limit is taken to lie within
    twice what both series and that rule say.
    """
    depth = max(len(run.alpha) for run in runs)

    def rule(depth: int) -> float:
        """The mean of zᵀlog(A)z by the Gauss rules of the first ``depth`` steps."""
        rules = (run.ritz(max(1, depth)) for run in runs)
        return float(np.mean([float(weights @ nodes.log()) for nodes, weights, _ in rules]))

    quarter, half, most, gauss = (rule(k * depth // 4) for k in (1, 2, 3, 4))
    likely_low = max(low, min(_extrapolated_least(run) for run in runs))
    gap = float(np.mean([_gap(run, low) for run in runs]))
    likely = float(np.mean([_gap(run, likely_low) for run in runs]))
    before, last = half - most, most - gauss
    if gap == 0 or (depth >= 4 and abs(last) <= 1e-12 * max(1.0, abs(gauss))):
        return GaussLimit(gauss, gauss, gauss - abs(last) * (gap > 0), gauss)
    geometric, doubled = _beyond(before, last), _beyond(quarter - half, half - gauss)
    settled = last <= SMALL and 2 * last <= before and gap <= 1
    if settled and (sure or all(bounded_away(run) for run in runs)):
        reach = min(gap, max(2 * geometric, doubled, likely))
        return GaussLimit(gauss, gauss - min(geometric, reach / 2), gauss - reach, gauss)
    if sure:
        return GaussLimit(gauss, gauss - min(geometric, gap / 2), gauss - gap, gauss)
    reach = min(gap, 2 * max(geometric, doubled, likely))
    return GaussLimit(gauss, gauss - min(doubled, 2 * likely, reach / 2), gauss - reach, gauss)


def bounded_away(run: Lanczos) -> bool:
    """Whether the smallest Ritz value exceeds its residual: its eigenvalue is then above 0."""
    nodes, _, residuals = run.ritz()
    return float(nodes[0]) > float(residuals[0])


def _beyond(before: float, last: float) -> float:
    """The rest of a geometric series after its terms ``before`` and ``last`` (Aitken)."""
    return last * last / (before - last) if before > last > 0 else math.inf


def _extrapolated_least(run: Lanczos) -> float:
    """A guess at the smallest eigenvalue, extrapolated from the second half of the run."""
    nodes, _, residuals = run.ritz()
    least, before = float(nodes[0]), float(run.ritz(max(1, len(nodes) // 2))[0][0])
    return max(least - float(residuals[0]), least * least / max(before, least))


def _gap(run: Lanczos, low: float) -> float:
    """The Gauss rule of log less the Gauss–Radau rule with a node at ``low``.

    0 if the Krylov space is whole, or if a node already sits at ``low`` up to rounding.
    """
    nodes, weights, _ = run.ritz()
    rounding = float(torch.finfo(run.basis.dtype).eps) * float(nodes[-1])
    whole = len(nodes) == len(run.basis) or run.residual <= rounding
    if whole or float(nodes[0]) - low <= rounding:
        return 0.0
    others, masses = run.radau(low)
    return max(0.0, float(weights @ nodes.log()) - float(masses @ others.clamp_min(low).log()))


def rule_of(density: MaxentDensity, depth: int) -> Lanczos:
    """The Gauss rule of a density, shared by every measure with its first 2·depth moments."""
    mass = density.weights * density.values
    line = operator(scipy.sparse.diags_array(density.grid).tocsr())
    return lanczos(line, torch.as_tensor(np.sqrt(mass)), min(depth, len(mass)), "bias")


DEFAULT_DEPTH = 100
RULES = 0.01  # of the largest eigenvalue, from which on its rounding is worth a warning
BOUNDS_DEPTH = 30
DEFAULT_PROBES = 50
# vectors for each column of a block: three of the recurrence, and what they are made of
MOMENTS = 6
MARGIN = 0.02  # by which bounds are widened first, of half their width
WIDENINGS = 12  # of bounds that moments have shown to be too narrow
MOST_EXPONENT = 1020  # of two, for a number that float64 holds with all its digits
HUGE = 1e12  # a Chebyshev moment of a recurrence that runs away
GROWTH = 0.05  # T_k(1 + δ) = cosh(k√(2δ)): what this argument adds to 1 nobody minds
WORKING = 2  # vectors beside a basis: a product and room to work in


@estimator(torch.trace, lambda found: (found.trace.value, found.trace.stderr), depth=20, probes=10)
@default_context()
def spectrum(
    operator: OperatorLike,
    depth: int | None = None,
    probes: int = 1,
    seed: int = 0,
    *,
    basis: str = "auto",
) -> Spectrum:
    """Estimate the spectral density by stochastic Lanczos quadrature.

    The method is that of Golub and Meurant, and of Ubaru et al. (2017).

    Each probe is uniform on the unit sphere and costs ``depth`` products (default: 100, or P if
    that is less). Its Ritz values and squared first components are the Gauss rule of the probe's
    spectral measure: Σ_j w_j θ_j^k = zᵀAᵏz for k ≤ 2·depth − 1. If a probe's Krylov space ends
    early, its row is padded with nodes of weight 0.

    ``basis`` says where the ``depth`` vectors of a run are stored: "device", "half" (as bfloat16
    for float32, half the bytes), "host" (host memory, streamed through the GPU), or "auto", the
    first of these that fits.

    For a model below float64, residuals and the errors of moments include its rounding, measured by
    four products in each precision on at most 4,096 samples, which ``cost`` does not count. The
    status is PRECISION_LIMIT if rounding changes the trace by more than the probes do, or the
    largest eigenvalue by more than 1 %.
    """
    operator = require_symmetric(operator, "spectrum")
    unit = Normalised(operator)
    runs = lanczos_runs(unit, depth, probes, seed, "spectrum", basis)
    found = quadrature(unit, runs)
    if unit.exponent or unit.repeated:  # that of the operator itself
        found = dataclasses.replace(
            found,
            nodes=np.ldexp(found.nodes, unit.exponent),
            residuals=np.ldexp(found.residuals, unit.exponent),
            resolution=unit.restore(found.resolution),
            cost=found.cost + unit.repeated,
        )
    return _with_rounding(found, rounding_of(operator, MANY))


@estimator(lambda matrix: torch.linalg.eigvalsh(matrix).sqrt().sum(), function=np.sqrt, depth=20)
@default_context()
def trace_function(
    operator: OperatorLike,
    function: Callable[[Array], Array],
    depth: int | None = None,
    probes: int = 10,
    seed: int = 0,
) -> Estimate:
    """Estimate tr f(A) for a ``function`` of the eigenvalues, by stochastic Lanczos quadrature.

    The status is QUADRATURE if three quarters of the depth give a value that differs by more than
    the standard error, and PRECISION_LIMIT if rounding inside a model, measured as in ``spectrum``,
    dominates that.
    """
    operator = require_symmetric(operator, "trace_function")
    expected, cure = "take a NumPy array of eigenvalues", "such as numpy.log"
    require_type(function, Callable, "function", expected, cure)
    try:
        function(np.ones(1))
    except TypeError as error:
        raise TypeError(message("function", expected, describe(function), cure)) from error
    unit = Normalised(operator)
    runs = lanczos_runs(unit, depth, probes, seed, "trace_function")
    trace = _trace_of(unit, runs, lambda nodes: function(np.ldexp(nodes, unit.exponent)))
    return dataclasses.replace(trace, cost=trace.cost + unit.repeated)


@estimator(
    lambda matrix: torch.stack([matrix.trace(), (matrix @ matrix).trace()]) / len(matrix),
    lambda found: (found.values[1:], found.stderr[1:]),
    count=2,
)
@default_context()
def moments(
    operator: OperatorLike,
    count: int,
    basis: str = "power",
    probes: int | None = None,
    seed: int = 0,
    bounds: tuple[float, float] | None = None,
    probe: str = "sphere",
    tol: float | None = None,
) -> Moments:
    """Estimate the spectral moments tr φ_k(A)/P for k = 0 … ``count``.

    φ_k is xᵏ, or the Chebyshev or Legendre polynomial.

    ``bounds`` is the interval that is mapped to [−1, 1] first; it must contain the spectrum.
    Without it the two polynomial bases estimate it by a short Lanczos run, widen it if the moments
    reveal eigenvalues outside, and measure again (``cost`` counts both); power moments are those of
    A itself. Each product gives two moments by (φ_i z)·(φ_j z), so ``count`` moments cost ⌈count/2⌉
    products per probe. Legendre moments are convex combinations of Chebyshev moments, so no
    accuracy is lost.

    ``probe`` is "sphere" (as is "gaussian": each probe is divided by its own zᵀz, which makes the
    moments those of a positive measure), "rademacher" or "orthogonal": mutually orthogonal probes
    on the sphere, whose variance falls like that of a sample without replacement, to 0 for P of
    them. Errors include the rounding inside a model, as in ``spectrum``. The number of probes is
    ``probes`` (50), or as many as bound the standard error of every moment by ``tol`` (Lemma 1,
    spectral thesis); for powers of a positive semi-definite A itself ``tol`` is relative to the
    moment (Eq. 2.34).
    """
    operator = require_symmetric(operator, "moments")
    require_count(count, "count", least=1)
    require_choice(basis, "basis", BASES)
    require_choice(probe, "probe", tuple(FOURTH_MOMENTS))
    powers = count if basis == "power" and bounds is None else 0
    probes = _number_of_probes(operator, probes, probe, tol, powers)
    if bounds is not None:
        bounds = require_interval(bounds, "bounds")

    def refuse(value: float | None) -> None:
        seen = "a Chebyshev moment above 1" if value is None else f"a Ritz value of {value:.6g}"
        cure = "pass wider bounds, or leave them out"
        require(own, "bounds", "hold the whole spectrum", f"{bounds} and {seen}", cure)

    own = bounds is None
    return moments_within(operator, count, basis, probes, seed, bounds, refuse, probe)


def moments_within(
    operator: LinearOperator,
    count: int,
    basis: str,
    probes: int,
    seed: int,
    bounds: Bounds | None,
    refuse: Callable[[float | None], None],
    probe: str = "sphere",
    least: float = -math.inf,
) -> Moments:
    """The moments on ``bounds``, or on those that a short Lanczos run finds.

    If the moments show eigenvalues outside, ``refuse`` is called with a Ritz value that lies there,
    or with None if only their size shows it. If that raises nothing, the bounds are widened, but
    not below ``least``, and the moments are measured again, which ``cost`` counts.
    """
    unit, used = Normalised(operator), 0
    plain = basis == "power" and bounds is None  # of A itself
    if bounds is None and not plain:
        (low, high), used = spectral_bounds(unit, seed)
        bounds = unit.restore(low), unit.restore(high)
    bounds = bounds or (-1.0, 1.0)
    for attempt in range(WIDENINGS + 1):
        blocks, within = _starts(operator, probe, probes, seed), None if plain else bounds
        readings = _probe_moments(unit, count, basis == "power", blocks, probes, within)
        used += probes * ((count + 1) // 2)
        outside = None if basis == "power" else _outside(readings, operator)
        if outside is None:
            break
        low, high = _widen(outside, bounds, attempt, refuse)
        bounds = max(low, least), high
    cure = "lower count, or give bounds so that A is scaled to [-1, 1]"
    require(bool(np.isfinite(readings).all()), "the moments", "be finite", "NaN or infinity", cure)
    if plain:
        powers, sizes = unit.exponent * np.arange(count + 1), np.abs(readings).max(axis=0)
        exponents = powers + np.log2(np.where(sizes > 0, sizes, 1.0))
        fits = (sizes == 0) | (np.abs(exponents) <= MOST_EXPONENT)
        got = f"that of order {np.argmin(fits)} beyond it"
        require(bool(fits.all()), "the moments", "fit into float64", got, cure)
        readings = np.ldexp(readings, powers)
    if basis == "legendre":
        readings = readings @ legendre_in_chebyshev(count).T
    # by powers of two, for the squares of very small or large moments leave the range
    scale = np.ldexp(1.0, np.frexp(np.abs(readings).max(axis=0))[1] - 1)
    covariance = np.zeros((count + 1, count + 1))
    # else they are a basis, and the moments exact
    if probe != "orthogonal" or probes < operator.dim:
        spread = torch.cov(torch.as_tensor((readings / scale).T)).numpy()
        covariance = spread.reshape(covariance.shape) / probes
    if probe == "orthogonal":
        covariance *= (operator.dim - probes) / operator.dim
    drawn = scale * np.sqrt(np.diag(covariance).clip(0.0))
    with np.errstate(over="ignore", under="ignore"):
        covariance = covariance * scale * scale[:, None]
    values, status = readings.mean(0), Status.CONVERGED
    model = rounding_of(operator, MANY)
    if model is not None:
        errors = _moment_errors(values, model, None if plain else bounds)
        rules = errors[1] > drawn[1] and errors[1] > 0
        drawn = np.hypot(drawn, errors)
        covariance = covariance + np.diag(errors**2)
        status = Status.PRECISION_LIMIT if rules else status
    stderr = drawn * skewness_widening(torch.as_tensor(readings)).numpy()
    return Moments(values, stderr, covariance, basis, bounds, probes, used + unit.repeated, status)


def _widen(
    outside: Bounds, bounds: Bounds, attempt: int, refuse: Callable[[float | None], None]
) -> Bounds:
    """Bounds that hold the ``outside`` ends too, unless ``refuse`` raises for those."""
    middle, half = (bounds[0] + bounds[1]) / 2, (bounds[1] - bounds[0]) / 2
    seen = [end for end in outside if abs(end) > 1]
    places: list[float | None] = [middle + half * end for end in seen]
    for place in places or [None]:
        refuse(place)
    name, expected = "the operator of moments", "be one symmetric matrix at every product"
    got, cure = f"products whose spectrum outgrows {bounds}", "fix its batches and random numbers"
    require(attempt < WIDENINGS, name, expected, got, cure)
    # a Ritz value lies inside of its eigenvalue: go half as far again, and by a margin that doubles
    margin = MARGIN * 2.0**attempt
    low, high = (
        math.copysign(margin + 1.5 * abs(end) - 0.5, end) if abs(end) > 1 or not seen else end
        for end in outside
    )
    return middle + half * low, middle + half * high


def _moment_errors(values: Array, model: Rounding, bounds: Bounds | None) -> Array:
    """Errors of moments (count + 1,) by a model's rounding: k·ρ, or k·ρ·|μ_{k−1}| for powers."""
    orders, shift = np.arange(len(values)), model.trace / model.dim
    if bounds is not None:
        return np.asarray(orders * (2 * shift / (bounds[1] - bounds[0])))
    before = np.concatenate([[0.0], np.abs(values[:-1])])
    between = np.sqrt(np.abs(values[2::2] * values[:-1:2][: len(values[2::2])]))
    before[2::2] = np.maximum(before[2::2], between)
    return np.asarray(orders * (shift * before + model.relative * np.abs(values)))


@dataclasses.dataclass(frozen=True)
class Ends:
    """Both ends of a spectrum by a short Lanczos run: Ritz values, residuals, products."""

    low: float
    high: float
    low_residual: float
    high_residual: float
    cost: int
    run: Lanczos
    whole: bool  # the Krylov space came to its end: the spectrum has no values but those of the run


def spectral_ends(operator: LinearOperator, seed: int = 0) -> Ends:
    """The extreme Ritz values of 30 steps of Lanczos, or of as many as a budget of memory holds."""
    steps = min(BOUNDS_DEPTH, operator.dim)
    if operator.budget() is not None:
        vector = basis_bytes(1, operator.dim, working_dtype(operator), "device")
        steps = max(1, min(steps, int(_beside_work(operator, operator.room(1.0)) // vector) - 1))
    run = lanczos(operator, random_vector(operator, seed, "bounds"), steps, "bounds")
    nodes, _, residuals = run.ritz()
    ends = float(nodes[0]), float(nodes[-1]), float(residuals[0]), float(residuals[-1])
    return Ends(*ends, run.products, run, whole=len(run.alpha) < steps)


def spectral_bounds(operator: LinearOperator, seed: int = 0) -> tuple[Bounds, int]:
    """An interval that holds the spectrum (a short Lanczos run plus margins), and its cost."""
    ends = spectral_ends(operator, seed)
    margin = 0.01 * (ends.high - ends.low) or 1e-3 * abs(ends.high) or 1.0
    left, right = ends.low - ends.low_residual - margin, ends.high + ends.high_residual + margin
    return (max(left, 0.0) if operator.psd and ends.high > 0 else left, right), ends.cost


def lanczos_runs(
    operator: LinearOperator,
    depth: int | None,
    probes: int,
    seed: int,
    task: str,
    basis: str | Basis = "auto",
    first: int = 0,
) -> list[Lanczos]:
    """One Lanczos run per probe, from number ``first`` on, whose bases all take the same memory."""
    require_symmetric(operator, task)
    require_count(probes, "probes")
    steps = min(DEFAULT_DEPTH, operator.dim) if depth is None else depth
    require_count(steps, "depth", 1, operator.dim, "at this size op.dense() is exact")
    store, runs = basis_for(operator, steps, basis) if isinstance(basis, str) else basis, []
    for probe in range(probes):
        done = probe * steps, probes * steps
        start = random_vector(operator, seed, "sphere", first + probe)
        run = lanczos(operator, start, steps, task, done, store)
        runs.append(without_basis(run))
    return runs


def without_basis(run: Lanczos) -> Lanczos:
    """The run without its vectors, which take the memory."""
    return dataclasses.replace(run, basis=run.basis[:, :0].clone())


def basis_for(operator: LinearOperator, steps: int, basis: str) -> Basis:
    """Room for the vectors of ``steps`` steps; an error where they do not fit."""
    dtype, free, budget = working_dtype(operator), operator.room(1.0), operator.budget()
    room = _beside_work(operator, free)
    place = chosen_place(steps + 1, operator.dim, dtype, operator.device, room, basis)
    needed = basis_bytes(steps + 1, operator.dim, dtype, place)
    where = "the free memory"
    if budget is not None:
        where = f"what the problem's memory={budget:,} leaves for vectors"
    others = ["raise memory"] * (budget is not None) + ["leave basis to 'auto'"] * (basis != "auto")
    expected = f"fit into {where}, {free:,.0f} bytes"
    got = f"{steps}, which needs {needed + free - room:,.0f} with basis={place!r}"
    require(needed <= max(room, 0.0), "depth", expected, got, " or ".join(["lower depth", *others]))
    return Basis(steps + 1, operator.dim, dtype, operator.device, place)


def _beside_work(operator: LinearOperator, free: float) -> float:
    """What is left of ``free`` bytes for a basis."""
    return free - WORKING * operator.dim * working_dtype(operator).itemsize


def quadrature(operator: LinearOperator, runs: list[Lanczos], depth: int | None = None) -> Spectrum:
    """The Gauss rules of several probes as one spectrum, padded with nodes of weight 0."""
    rules = [run.ritz(depth) for run in runs]
    width = max(len(nodes) for nodes, _, _ in rules)
    nodes, weights, residuals = (np.zeros((len(rules), width)) for _ in range(3))
    for row, (theta, mass, residual) in enumerate(rules):
        m = len(theta)
        nodes[row, :m] = theta.numpy()
        weights[row, :m] = mass.numpy()
        residuals[row, :m] = residual.numpy()
        nodes[row, m:], residuals[row, m:] = nodes[row, m - 1], residuals[row, m - 1]
    weights /= weights.sum(axis=1, keepdims=True)
    cost = sum(run.products for run in runs)
    # a bound by the recurrence alone would promise more than the products hold
    noise = rounding(operator, runs)
    residuals = np.hypot(residuals, noise)
    return Spectrum(nodes, weights, residuals, operator.dim, operator.psd, noise, cost)


def rounding(operator: LinearOperator, runs: list[Lanczos]) -> float:
    """The size below which a Ritz value is rounding: of the dtype, the products, or a model."""
    scale = max(float(torch.cat([run.alpha.abs(), run.beta]).max()) for run in runs)
    model = rounding_of(operator, MANY)
    inside = 0.0 if model is None else model.random.error
    dtype = BREAKDOWN * float(torch.finfo(operator.dtype).eps) * scale
    return max(dtype, inside, *(run.noise for run in runs))


def _with_rounding(spectrum: Spectrum, model: Rounding | None) -> Spectrum:
    """The spectrum with a model's rounding in its residuals and errors."""
    if model is None:
        return spectrum
    noise = np.maximum(model.random.error, model.relative * np.abs(spectrum.nodes))
    rounded = dataclasses.replace(
        spectrum,
        residuals=np.hypot(spectrum.residuals, noise),
        resolution=max(spectrum.resolution, model.random.error),
        rounding=model.trace / model.dim,
        relative_rounding=model.relative,
    )
    probes = float(spectrum.trace.stderr)
    rules = float(rounded.trace.stderr) > math.sqrt(2.0) * probes or model.relative > RULES
    return dataclasses.replace(rounded, status=Status.PRECISION_LIMIT) if rules else rounded


def _trace_of(
    operator: LinearOperator, runs: list[Lanczos], function: Callable[[Array], Array]
) -> Estimate:
    """tr f(A), and QUADRATURE when the rule of three quarters of the depth disagrees."""

    def checked(nodes: Array) -> Array:
        with np.errstate(all="ignore"):
            readings = np.asarray(function(nodes), dtype=np.float64)
        fine = readings.shape == nodes.shape and bool(np.isfinite(readings).all())
        ends = float(nodes.min()), float(nodes.max())
        low, high = (math.ldexp(end, getattr(operator, "exponent", 0)) for end in ends)
        where = f"be element-wise and finite on [{low:.3g}, {high:.3g}]"
        cure = "shift the operator, or pass a function defined there"
        require(fine, "function", where, "other values", cure)
        return readings

    shorter = max(1, 3 * max(len(run.alpha) for run in runs) // 4)
    full = quadrature(operator, runs).expectation(checked, operator.dim)
    short = quadrature(operator, runs, shorter).expectation(checked, operator.dim)
    unsettled = abs(float(full) - float(short)) > max(float(full.stderr), 1e-12 * abs(float(full)))
    trace = dataclasses.replace(full, status=Status.QUADRATURE if unsettled else Status.CONVERGED)
    model = rounding_of(operator, MANY)
    if model is None:
        return trace
    joined = _with_rounding(quadrature(operator, runs), model).rounded(function, operator.dim)
    rules = float(joined.stderr) > math.sqrt(2.0) * float(full.stderr) and not unsettled
    status = Status.PRECISION_LIMIT if rules else trace.status
    return dataclasses.replace(trace, stderr=joined.stderr, dof=joined.dof, status=status)


def _number_of_probes(
    operator: LinearOperator, probes: int | None, probe: str, tol: float | None, powers: int
) -> int:
    """As many as asked for, or as ``tol`` needs; it is relative for ``powers`` of A itself."""
    if tol is not None:
        expected = "come without probes, whose number it sets"
        require(probes is None, "tol", expected, f"{tol!r} and {probes!r} probes")
        fine = operator.psd or not powers
        expected = "come with bounds that map A to [-1, 1]"
        got = "power moments of an A that may be indefinite"
        require(fine, "tol", expected, got, "pass bounds, or declare A positive semi-definite")
        condition = None
        if powers:  # an upper bound of that of Aᵖ
            low, high = operator.known_bounds()
            condition = math.inf
            if 0 < low and high < math.inf:
                condition = math.exp(min(powers * math.log(high / low), 300.0))
        probes = probes_for(tol, operator.dim, probe, condition)
    probes = DEFAULT_PROBES if probes is None else probes
    if probe != "orthogonal":
        return require_count(probes, "probes", 2, cure="the standard error comes from their spread")
    probes = min(probes, operator.dim) if tol is not None else probes
    least = min(2, operator.dim)
    return require_count(probes, "probes", least, operator.dim, "no more can be orthogonal")


def _starts(operator: LinearOperator, probe: str, probes: int, seed: int) -> Iterator[Tensor]:
    """The probes in blocks (P, b)."""
    vector = operator.dim * working_dtype(operator).itemsize
    # dots are made in float64, by chunks
    work = MOMENTS + 3 * 8 * min(operator.dim, CHUNK >> 4) / vector
    held = 4.0 * probes * 8 / working_dtype(operator).itemsize if probe == "orthogonal" else 0.0
    if held:
        fits = not crowded(operator, 1, work, held)
        expected = f"fit into the problem's memory={operator.budget()}"
        got = f"{probes} orthogonal ones, made together"
        require(fits, "probes", expected, got, "take fewer, or probe='sphere'")
    sizes = block_sizes(probes, operator, work, held)
    if probe == "rademacher":
        stream = Probes(operator, probe, seed, "moments")
        yield from (stream.draw(size).to(working_dtype(operator)) for size in sizes)
        return
    vectors = (random_vector(operator, seed, "sphere", j) for j in range(probes))
    if probe == "orthogonal":
        draws = torch.stack([vector.double() for vector in vectors], dim=1)
        yield from torch.linalg.qr(draws).Q.to(working_dtype(operator)).split(sizes, dim=1)
        return
    for size in sizes:
        yield torch.stack(list(itertools.islice(vectors, size)), dim=1)


def _probe_moments(
    operator: Normalised,
    count: int,
    power: bool,
    blocks: Iterator[Tensor],
    probes: int,
    bounds: Bounds | None,
) -> Array:
    """zᵀφ_k(B)z/zᵀz (probes, count + 1) for each probe z, B the operator mapped to [−1, 1].

    Without ``bounds`` B is the normalised operator itself.
    """
    products, readings, done = (count + 1) // 2, [], 0
    for block in blocks:
        values: list[Tensor] = []
        for pair in _paired_moments(operator, block, power, bounds, products):
            values += pair
            done += block.shape[1]
            report("moments", done, probes * products)
        start = dot(block, block)
        readings.append((torch.stack([start, *values[:count]], dim=1) / start[:, None]).cpu())
    return np.asarray(torch.cat(readings).numpy())


def _paired_moments(
    operator: Normalised, start: Tensor, power: bool, bounds: Bounds | None, products: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """The moments of orders (1, 2), (3, 4), … for a block (P, b), one product a pair.

    With v_i = φ_i(B)z: zᵀB^{i+j}z = v_i·v_j, and zᵀT_{i+j}z = 2 v_i·v_j − zᵀT_{|i−j|}z.
    """
    before, now = start, start
    zeroth, first = dot(start, start), torch.zeros(0)
    for step in range(1, products + 1):
        image = (operator @ now).to(now.dtype)
        if bounds is not None:
            low, high = (math.ldexp(end, -operator.exponent) for end in bounds)
            image = (image - (low + high) / 2 * now) / ((high - low) / 2)
        before, now = now, image if power or step == 1 else 2 * image - before
        odd, even = dot(before, now), dot(now, now)
        first = odd if step == 1 else first
        odd = odd if power or step == 1 else 2 * odd - first
        yield odd, even if power else 2 * even - zeroth


def _outside(readings: Array, operator: LinearOperator) -> Bounds | None:
    """The ends of the spectrum, at least −1 and 1, or None if Chebyshev moments show none outside.

    |T_k| ≤ 1 on [−1, 1], so that a larger moment of a probe shows it. So does a Ritz value, from
    the Gram matrix of T_0(B)z, T_1(B)z, … and that of B between them, which the moments hold. A few
    eigenvalues slightly outside make no moment larger than 1, but spoil what is fitted to the
    moments.
    """
    known = np.isfinite(readings).all(axis=0) & (np.abs(np.nan_to_num(readings)).max(axis=0) < HUGE)
    # before the recurrence ran away
    finite = readings[:, : len(known) if known.all() else int(np.argmin(known))]
    rounding = float(torch.finfo(operator.dtype).eps) * len(known)
    exceeded = not known.all() or float(np.abs(finite).max()) > 1 + 1e3 * len(known) * rounding
    looked = [finite.mean(axis=0)]
    if exceeded:
        looked.append(finite[np.abs(finite).max(axis=1).argmax()])
    ends = [_ritz_ends(values, math.sqrt(rounding)) for values in looked]
    low, high = min(-1.0, *(end[0] for end in ends)), max(1.0, *(end[1] for end in ends))
    slack = max(math.sqrt(rounding), 0.5 * (GROWTH / len(known)) ** 2)
    return (low, high) if exceeded or low < -1 - slack or high > 1 + slack else None


def _ritz_ends(moments: Array, least: float) -> Bounds:
    """The least and largest Ritz value of B on the span of T_0(B)z … by the Chebyshev moments of z.

    Directions shorter than ``least`` of the longest are left out, being mostly rounding.
    """
    size = len(moments) // 2
    if size == 0:
        return -1.0, 1.0
    row, column = np.indices((size, size))

    def gram(i: NDArray[np.int64], j: NDArray[np.int64]) -> Array:
        # T_iT_j = (T_{i+j} + T_{|i−j|})/2
        return np.asarray((moments[i + j] + moments[np.abs(i - j)]) / 2)

    inner, image = gram(row, column), (gram(row, column + 1) + gram(row, np.abs(column - 1))) / 2
    lengths = np.maximum(np.sqrt(np.diag(inner).clip(0.0)), least)
    scale = np.outer(lengths, lengths)
    squares, turn = np.linalg.eigh(inner / scale)
    long = squares > least * squares[-1]
    kept = turn[:, long] / np.sqrt(squares[long])
    values = np.linalg.eigvalsh(kept.T @ ((image + image.T) / 2 / scale) @ kept)
    return float(values[0]), float(values[-1])


def _to_depth(_: Problem, operator: LinearOperator, settings: MeasureSettings) -> Spectrum:
    """The spectrum; at a depth of P it is all that there is."""
    depth = min(settings.depth, operator.dim)
    return spectrum(operator, depth, settings.probes, seed=settings.seed)


@quantity("spectrum", _to_depth)
def spectrum_work(problem: Problem, operator: LinearOperator, settings: MeasureSettings) -> Work:
    """``depth`` products for each probe."""
    depth = min(settings.depth, operator.dim)
    return products(operator, depth * settings.probes, depth * settings.probes, depth + 1)
