"""Log-determinants of positive definite operators, with one error bar for the probes and the truncation together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import scipy.sparse
import torch

from lambdahat._check import require, require_choice, require_count
from lambdahat.batches import free_memory
from lambdahat.estimators.gauss_limits import limit_of, rule_of
from lambdahat.estimators.preconditioning import Preconditioned, preconditioned
from lambdahat.estimators.spectra import lanczos_runs, moments, quadrature, rounding, spectral_ends
from lambdahat.krylov import require_finite, require_symmetric
from lambdahat.maxent import fit
from lambdahat.operators.base import LinearOperator
from lambdahat.operators.matrix import Matrix
from lambdahat.results import Array, Estimate, Moments, Spectrum, Status

METHODS = ("slq", "maxent", "chebyshev", "exact")
MOMENT_DEPTH = 25
CURE = "add a shift: operator + delta * identity(operator)"


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
    the last two up to 30 more for the bounds. "exact" is a Cholesky factorisation in float64, sparse if the matrix is.

    ``precondition`` and ``rank`` are as in ``preconditioned``: the determinant of P is exact, and only that of
    P^{−½}AP^{−½} is estimated. ``bounds`` holds the spectrum of the latter; without it the lower end is what is known
    (Gershgorin's circles, the noise of a kernel matrix), and else what Lanczos sees. The standard error is that of the
    probes and, in quadrature, of the truncation, bounded from both sides; QUADRATURE when the second is larger. An
    eigenvalue that is not positive is an error that names it.
    """
    require_choice(method, "method", METHODS)
    require_symmetric(operator, "logdet")
    if method == "exact":
        return _exact(operator)
    ready = preconditioned(operator, precondition, rank)
    found = _ESTIMATES[method](ready, _checked(bounds), depth, probes, seed)
    return dataclasses.replace(found, value=float(found) + ready.logdet, cost=found.cost + ready.cost)


def _checked(bounds: tuple[float, float] | None) -> tuple[float, float] | None:
    if bounds is None:
        return None
    pair = isinstance(bounds, tuple | list) and len(bounds) == 2 and all(math.isfinite(b) for b in bounds)
    require(pair and 0 < bounds[0] < bounds[1], "bounds", "be two finite numbers 0 < low < high", repr(bounds))
    return float(bounds[0]), float(bounds[1])


def _slq(
    ready: Preconditioned, bounds: tuple[float, float] | None, depth: int | None, probes: int, seed: int
) -> Estimate:
    """Gauss rules of log, corrected for what more depth would still change."""
    inner = ready.operator
    runs = lanczos_runs(inner, depth, probes, seed, "logdet")
    measure, least = quadrature(inner, runs), min(float(run.ritz()[0][0]) for run in runs)
    _require_positive(least, "Ritz value", ready)
    low = inner.known_bounds()[0] if bounds is None else bounds[0]
    polynomial, mean = _control(inner, measure)
    found = measure.expectation(lambda nodes: np.log(nodes) - polynomial(nodes), inner.dim)
    limit = limit_of(runs, low)
    status = Status.PRECISION_LIMIT if least <= rounding(inner, runs) else Status.CONVERGED
    value = float(found) + inner.dim * (mean + limit.value - limit.gauss)
    return _with_bias(dataclasses.replace(found, value=value, status=status), inner.dim * limit.distance(limit.value))


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
    (low, high), spent = _interval(ready, bounds, seed, floor=0.0)
    found = _measured(inner, (low, high), depth, probes, seed)
    density = fit(found)
    change, stderr = _steadied(inner, found, density.sensitivity(np.log), density.moments(len(found) + 1, "chebyshev"))
    value = density.expectation(np.log)
    limit = limit_of([rule_of(density, len(found) // 2)], max(low, 0.0))
    parts = inner.dim * (value + change), inner.dim * stderr, found.cost + spent, density.status
    return _with_bias(Estimate(*parts, dof=float(probes - 1)), inner.dim * limit.distance(value))


def _chebyshev(
    ready: Preconditioned, bounds: tuple[float, float] | None, depth: int | None, probes: int, seed: int
) -> Estimate:
    """Σ_k c_kμ_k with log λ = c_0 + Σ_k c_kT_k, c_k = 2(−1)^{k+1}ρᵏ/k, ρ = (√b − √a)/(√b + √a) on [a, b].

    What is left out is at most 2Σ_{k>m}ρᵏ/k an eigenvalue.
    """
    inner = ready.operator
    (low, high), spent = _interval(ready, bounds, seed, floor=None)
    found = _measured(inner, (low, high), depth, probes, seed)
    orders = np.arange(1, len(found))
    a, b = math.sqrt(low), math.sqrt(high)
    rho = (b - a) / (b + a)
    slopes = -2.0 * (-rho) ** orders / orders
    change, stderr = _steadied(inner, found, slopes, np.append(found.values, found.values[-2:]))
    value = 2 * math.log((a + b) / 2) + float(slopes @ found.values[1:]) + change
    rest = 2.0 * (-math.log1p(-rho) - float((rho**orders / orders).sum()))
    estimate = Estimate(inner.dim * value, inner.dim * stderr, found.cost + spent, dof=float(probes - 1))
    return _with_bias(estimate, inner.dim * rest)


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
    """2·depth Chebyshev moments, by ``depth`` products a probe."""
    steps = MOMENT_DEPTH if depth is None else require_count(depth, "depth")
    return moments(inner, 2 * steps, "chebyshev", probes, seed, bounds)


def _interval(
    ready: Preconditioned, bounds: tuple[float, float] | None, seed: int, floor: float | None
) -> tuple[tuple[float, float], int]:
    """An interval that holds the spectrum, by Lanczos and what is known, and the products spent.

    Where no positive lower bound is known it begins at ``floor``, or, without one, at what Lanczos sees.
    """
    if bounds is not None:
        return bounds, 0
    inner = ready.operator
    ends, known = spectral_ends(inner, seed), inner.known_bounds()
    _require_positive(ends.low, "Ritz value", ready)
    high = min(known[1], ends.high + ends.high_residual + 0.01 * (ends.high - ends.low) + 1e-3 * ends.high)
    low = known[0] if known[0] > 0 else (0.1 * ends.low if floor is None else floor)
    if floor is None and ends.low_residual < 0.5 * ends.low:
        low = max(low, ends.low - ends.low_residual)
    return (low if low < high else 0.999 * low, high), ends.cost


def _with_bias(estimate: Estimate, bound: float) -> Estimate:
    """Adds a bias known only to lie within ±``bound``, as the uniform distribution's deviation, bound/√3.

    A 95 % interval then holds the whole of it, 1.96/√3 > 1. The degrees of freedom are Satterthwaite's.
    """
    noise, bias = float(estimate.stderr), bound / math.sqrt(3.0)
    total = math.hypot(noise, bias)
    dof = math.inf if noise == 0 or math.isinf(estimate.dof) else estimate.dof * (total / noise) ** 4
    settled = bias <= max(noise, 1e-12 * abs(float(estimate)))
    status = estimate.status if settled or not estimate.status.ok else Status.QUADRATURE
    return dataclasses.replace(estimate, stderr=total, dof=dof, status=status)


def _exact(operator: LinearOperator) -> Estimate:
    """By Cholesky, or LU without exchanges for a sparse matrix, whose pivots are positive exactly for positive A."""
    if isinstance(operator, Matrix) and operator.matrix.layout != torch.strided:
        return Estimate(_sparse_logdet(operator))
    need, free = 3 * 8 * operator.dim**2, free_memory(operator.device)
    require(need <= free, "method", f"fit into the free memory, {free:,.0f} bytes", f"'exact', which needs {need:,}",
            'call logdet(operator, "slq")')  # fmt: skip
    before, matrix = operator.matvecs, operator.dense().double()
    require_finite(matrix)
    matrix = (matrix + matrix.T) / 2
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if int(failed):
        _require_positive(min(float(torch.linalg.eigvalsh(matrix)[0]), 0.0), "eigenvalue")
    return Estimate(2.0 * float(factor.diagonal().log().sum()), cost=operator.matvecs - before)


def _sparse_logdet(operator: Matrix) -> float:
    """Σ log of the pivots of SuperLU in symmetric mode."""
    from scipy.sparse.linalg import splu

    entries = operator.matrix.to_sparse_coo().coalesce().cpu()
    places, values = entries.indices().numpy(), entries.values().double().numpy()
    matrix = scipy.sparse.csc_array((values, places), shape=operator.shape)
    try:
        factors = splu(matrix, permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options={"SymmetricMode": True})
    except RuntimeError:  # a pivot of exactly 0
        _require_positive(0.0, "pivot")
        raise
    pivots = factors.U.diagonal()
    kept = bool((factors.perm_r == factors.perm_c).all())
    _require_positive(float(pivots.min()) if kept else 0.0, "pivot")
    return float(np.log(pivots).sum())


def _require_positive(least: float, kind: str, ready: Preconditioned | None = None) -> None:
    """Raise where an eigenvalue is known not to be positive; of A itself, where a few products with it show one too."""
    if least > 0:
        return
    after = ""
    if ready is not None and ready.name:
        plain = spectral_ends(ready.original).low
        least, after = (plain, "") if plain <= 0 else (least, f" after {ready.name}")
    require(False, "the operator of logdet", "be positive definite", f"the {kind} {least:.3g}{after}", CURE)


_ESTIMATES = {"slq": _slq, "maxent": _maxent, "chebyshev": _chebyshev}
