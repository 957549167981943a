"""From moments to the density of maximum entropy, or of maximum relative entropy to a prior.

On [−1, 1] with x = cos t the Chebyshev moments μ_k are the Fourier coefficients of a measure on the
circle. They are those of a positive one exactly if the Toeplitz matrix μ_{|i−j|} is positive
semi-definite (Carathéodory, Toeplitz), which Levinson's recursion checks order by order.

With p_α = q₀·exp(−Σ_{k≥1} α_kT_k)/Z the dual of Eq. 2.25 (spectral thesis), without α₀, is F(α) =
log Z + Σ_k α_kμ_k; its gradient is μ − ⟨T⟩ (Eq. 2.26) and its Hessian the covariance of T under p_α
(Eq. 2.27). It is solved by Newton's method.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import comb
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.polynomial import chebyshev, polynomial
from numpy.typing import ArrayLike

from lambdahat._core.check import (
    require,
    require_choice,
    require_count,
    require_interval,
    require_positive,
    require_type,
)
from lambdahat._core.storage import Status
from lambdahat.maxent.bases import (
    BASES,
    Array,
    Bounds,
    Grid,
    chebyshev_table,
    product,
    solve_triangle,
    triangle,
)
from lambdahat.maxent.density import Density, MaxentDensity

SIGMAS = 5.0
ROUNDING = 1e-9


def require_feasible(moments: Array, stderr: Array, hint: str = "") -> None:
    """Refuse Chebyshev moments (μ_0 = 1) of no positive measure on [−1, 1], beyond their errors.

    Given those of lower order, μ_k lies within E of a centre c: c = −Σ_j a_jμ_{k−j} and E = Σ_j
    a_jμ_j with Levinson's predictor a. If E vanishes the lower moments are those of at most k
    atoms, and all others follow from them.
    """
    predictor = np.ones(1)
    for order in range(1, len(moments)):
        room = float(predictor @ moments[:order])
        centre = -float(predictor[1:] @ moments[order - 1 : 0 : -1])
        slack = SIGMAS * (stderr[order] + float(np.abs(predictor[1:]) @ stderr[order - 1 : 0 : -1]))
        slack += ROUNDING * float(np.abs(predictor).sum())
        off = abs(float(moments[order]) - centre)
        low, high = max(centre - room, -1.0), min(centre + room, 1.0)
        fine = off <= room + slack
        got = (
            f"{moments[order]:.6g} as Chebyshev moment {order}, where those below it allow"
            f" [{low:.6g}, {high:.6g}]"
        )
        cure = "pass bounds that hold the spectrum, and probes all divided by their own zᵀz" + hint
        require(fine, "moments", "be those of a positive measure on the bounds", got, cure)
        if room <= slack:
            return
        reflection = (centre - float(moments[order])) / room
        padded = np.append(predictor, 0.0)
        predictor = padded + reflection * padded[::-1]


STEPS = 25
HALVINGS = 30
NEGLIGIBLE = 1e-30  # mass below this changes no entry of the Hessian
FIRST_PENALTY, LAST_PENALTY = 1e-2, 1e-24
EXACT = 1e-10


@dataclass(frozen=True)
class DualSolution:
    """``coefficients`` α_1 … α_m, log Z on [−1, 1], the ``penalty`` (0: none) and Newton steps."""

    coefficients: Array
    log_z: float
    penalty: float
    steps: int


def masses(grid: Grid, coefficients: Array) -> tuple[Array, float]:
    """The mass of p_α at every node (N,), summing to 1, and log Z."""
    exponent = grid.log_base - product(grid.features, coefficients)
    top = float(exponent.max())
    mass = np.exp(exponent - top)
    total = float(mass.sum())
    return mass / total, top + float(np.log(total))


def hessian_factor(grid: Grid, mass: Array, penalty: float) -> Array:
    """Upper triangular R (m, m) with RᵀR = Cov(T) + penalty·I, by QR.

    So the condition number of Cov(T) is never squared.
    """
    there = mass > NEGLIGIBLE
    centred = grid.features[there] - product(mass, grid.features)
    ridge = np.sqrt(penalty + NEGLIGIBLE) * np.eye(grid.count)
    return triangle(np.vstack([np.sqrt(mass[there])[:, None] * centred, ridge]))


def solve(
    grid: Grid, target: Array, tol: float, enough: Array, penalty: float | None = None
) -> DualSolution:
    """α with |μ_k − ⟨T_k⟩| ≤ ``tol`` for ``target`` μ_1 … μ_m, if possible.

    Plain Newton is tried first. If it fails, because the density is nearly a set of atoms, the path
    of the penalised problems F + ½v‖α‖² is followed from large to small v, each started at the one
    before, until the mismatch v|α_k| is ``enough`` (m,), or the grid can follow no more: then the
    last point of the path is returned. With a ``penalty`` the path ends there, to ``EXACT``, and 0
    is plain Newton.
    """
    edges, steps = grid.edges, 0
    if not penalty:
        best, steps = _settle(grid, target, np.zeros(grid.count), 0.0, np.full(grid.count, tol))
        if best is not None:
            return DualSolution(*best, 0.0, steps)
        grid.place(edges)
    return _path(grid, target, enough, penalty or None, steps)


def _path(
    grid: Grid, target: Array, enough: Array, wanted: float | None, steps: int
) -> DualSolution:
    """The end of the path of penalties: at ``wanted``, or once the mismatch is ``enough``."""
    last = LAST_PENALTY if wanted is None else wanted
    start, edges = np.zeros(grid.count), grid.edges
    penalty, reached = max(FIRST_PENALTY, last), None
    while True:
        precision = np.maximum(enough, 1e-3 * penalty * np.abs(start))
        # α itself is wanted, and slopes of ``enough`` would leave it open by their inverse
        if penalty == wanted:
            precision = np.full(grid.count, EXACT)
        best, more = _settle(grid, target, start, penalty, precision)
        steps += more
        if best is None:
            break
        start, edges = best[0], grid.edges
        reached = DualSolution(*best, penalty, steps)
        if penalty <= last or (wanted is None and bool((penalty * np.abs(start) <= enough).all())):
            break
        penalty = max(penalty / 10, last)
    grid.place(edges)
    return reached or DualSolution(start, masses(grid, start)[1], penalty, steps)


def _settle(
    grid: Grid, target: Array, start: Array, penalty: float, tol: Array
) -> tuple[tuple[Array, float] | None, int]:
    """(α, log Z) at one penalty on a grid that resolves the density, or None."""
    steps = 0
    while True:
        alpha, more = _newton(grid, target, start, penalty, tol)
        steps += more
        if alpha is None:
            return None, steps
        mass, log_z = masses(grid, alpha)
        if not grid.refine(mass, max(1e-11, 1e-2 * float(tol.min()))):
            return (None if grid.exhausted else (alpha, log_z)), steps
        start = alpha


def _newton(
    grid: Grid, target: Array, alpha: Array, penalty: float, tol: Array
) -> tuple[Array | None, int]:
    """Damped Newton on one grid: steps of at most 2 in the Hessian's norm, each lowering F."""

    def objective(at: Array) -> tuple[float, Array]:
        mass, log_z = masses(grid, at)
        return log_z + float(at @ target) + 0.5 * penalty * float(at @ at), mass

    value, mass = objective(alpha)
    for step in range(STEPS):
        slope = target - product(mass, grid.features) + penalty * alpha
        if bool((np.abs(slope) <= tol).all()):
            return alpha, step
        factor = hessian_factor(grid, mass, penalty)
        half = solve_triangle(factor, slope, transposed=True)
        move, decrement = -solve_triangle(factor, half), float(half @ half)
        if not np.isfinite(decrement):
            return None, step
        length = 1.0 if decrement < 1 else 2.0 / (1.0 + decrement**0.5)
        for _ in range(HALVINGS):
            below, mass = objective(alpha + length * move)
            if below <= value - 1e-4 * length * decrement + 1e-13 * (1 + abs(value)):
                break
            length /= 2
        else:
            return None, step
        alpha, value = alpha + length * move, below
    return None, STEPS


Prior = Callable[[Array], Any] | Density
TOLERANCE = 1e-8
SHARE = 0.01  # how well moments are matched, in standard errors
HINT = "; power moments lose their digits by order 20: take basis='chebyshev'"


@runtime_checkable
class MeasuredMoments(Protocol):
    """What ``lh.moments`` returns."""

    @property
    def values(self) -> Array: ...
    @property
    def covariance(self) -> Array: ...
    @property
    def basis(self) -> str: ...
    @property
    def bounds(self) -> tuple[float, float]: ...


def fit(
    moments: MeasuredMoments | ArrayLike,
    basis: str = "chebyshev",
    bounds: tuple[float, float] = (-1.0, 1.0),
    stderr: ArrayLike | None = None,
    prior: Prior | None = None,
    tol: float = TOLERANCE,
    penalty: float | None = None,
) -> MaxentDensity:
    """The maximum-entropy density with the given moments (Algorithm 1, spectral thesis).

    ``moments`` is what ``lh.moments`` returns, or φ_0 … φ_m (m + 1,) of ``basis`` on ``bounds``,
    exact or with ``stderr``. With a ``prior`` q₀, a density or a positive function of λ, the
    entropy relative to it is maximised (Eq. 2.24, Appendix A). Moments are matched to ``tol``, or
    if that is hard to a hundredth of their standard error. Moments that no positive measure has
    raise an error that names the first of them; if they are so nearly those of a few atoms that no
    density can be found, the status of the nearest one is MISMATCH.

    Near such moments the dual is penalised by ½v‖α‖², with the largest v that matches them well
    enough. Densities of different v are not comparable: ``penalty`` sets v, 0 for none.

    >>> semicircle = fit([1, 0, -0.5, 0, 0, 0, 0])
    >>> round(float(semicircle.evaluate(0.0)), 3)
    0.648
    """
    values, covariance, bounds, hint = in_chebyshev(moments, basis, bounds, stderr)
    require_positive(tol, "tol")
    if penalty:
        penalty = require_positive(penalty, "penalty", "pass 0 for none, None for what is needed")
    errors = np.sqrt(np.diag(covariance).clip(0.0))
    require_feasible(values, errors, hint)
    count = len(values) - 1
    grid = Grid(count, None if prior is None else _prior_on_unit(prior, bounds))
    solution = solve(grid, values[1:], tol, np.maximum(tol, SHARE * errors[1:]), penalty)
    return density_of(grid, solution, values, covariance, bounds, prior is not None, tol)


def in_chebyshev(
    moments: MeasuredMoments | ArrayLike, basis: str, bounds: Bounds, stderr: ArrayLike | None
) -> tuple[Array, Array, Bounds, str]:
    """Chebyshev moments, their covariance, the bounds, and a hint for infeasible moments."""
    if isinstance(moments, MeasuredMoments):
        basis, bounds, covariance = moments.basis, moments.bounds, moments.covariance
        values = np.asarray(moments.values, np.float64)
    else:
        values = _numbers(moments, "moments")
        covariance = np.zeros((values.size, values.size))
    require_choice(basis, "basis", BASES)
    fits = values.ndim == 1 and values.size >= 2
    require(fits, "moments", "be a 1-D array φ_0 … φ_m with m of at least 1", values)
    require(bool(np.isfinite(values).all()), "moments", "be finite", "NaN or infinity")
    cure = "divide all of them by it: each probe by its own zᵀz"
    require(abs(values[0] - 1) <= 1e-6, "moments", "begin with φ_0 = 1", f"{values[0]:.6g}", cure)
    bounds = require_interval(bounds, "bounds")
    if stderr is not None:
        given = _numbers(stderr, "stderr")
        fine = given.shape == values.shape and bool((given >= 0).all())
        require(fine, "stderr", f"be {values.size} numbers of at least 0", given)
        covariance = np.diag(given**2)
    table = chebyshev_table(basis, values.size - 1)
    hint, spread = HINT if basis == "power" else "", product(product(table, covariance), table.T)
    return table @ values, spread, bounds, hint


def _numbers(values: ArrayLike, name: str) -> Array:
    """Real numbers of any array-like as float64."""
    try:
        array = np.asarray(values)
        real = array.dtype.kind in "biuf"
    except ValueError:  # ragged
        real = False
    require(real, name, "be a 1-D array of real numbers", values, error=TypeError)
    return np.asarray(array, np.float64)


def _prior_on_unit(prior: Prior, bounds: Bounds) -> Callable[[Array], Array]:
    """log q₀ as a function of x in [−1, 1], with ∫ q₀ dx = 1."""
    function = prior.evaluate if isinstance(prior, Density) else prior
    require_type(function, Callable, "prior", "be a Density or a function of λ")

    def log_prior(x: Array) -> Array:
        places = bounds[0] + (x + 1) / 2 * (bounds[1] - bounds[0])
        readings = np.asarray(function(places), np.float64)
        fine = readings.shape == x.shape and bool((np.isfinite(readings) & (readings > 0)).all())
        expected = f"be element-wise, finite and above 0 on ({bounds[0]:.3g}, {bounds[1]:.3g})"
        got = "other values"
        require(fine, "prior", expected, got, "give it a small floor, or narrow the bounds")
        return np.log(readings)

    grid, nothing = Grid(1, log_prior), np.zeros(1)
    while grid.refine(masses(grid, nothing)[0], 1e-10):
        pass
    _, log_mass = masses(grid, nothing)
    return lambda x: log_prior(x) - log_mass


def density_of(
    grid: Grid,
    solution: DualSolution,
    values: Array,
    covariance: Array,
    bounds: Bounds,
    with_prior: bool,
    tol: float,
) -> MaxentDensity:
    """The solution on x in [−1, 1] as a density of λ, with its standard error."""
    half = (bounds[1] - bounds[0]) / 2
    mass, log_z = masses(grid, solution.coefficients)
    density, means = mass / grid.weights / half, product(mass, grid.features)
    residuals = np.append(values[0] - 1.0, values[1:] - means)
    errors = np.sqrt(np.diag(covariance).clip(0.0))
    relative = np.zeros_like(density)
    if errors.any():
        factor = hessian_factor(grid, mass, solution.penalty)
        inverse = solve_triangle(factor, np.eye(grid.count))
        change = product(product(grid.features - means, inverse), inverse.T)
        relative = np.sqrt((product(change, covariance[1:, 1:]) * change).sum(axis=1).clip(0.0))
    shift = log_z + np.log(half) if not with_prior else log_z
    alpha = np.append(shift - 1.0, solution.coefficients)
    matched = bool((np.abs(residuals) <= np.maximum(10 * tol, errors)).all())
    return MaxentDensity(
        bounds[0] + (grid.points + 1) * half,
        density,
        density * relative,
        weights=grid.weights * half,
        bounds=bounds,
        coefficients=alpha,
        targets=values,
        errors=errors,
        residuals=residuals,
        log_prior=grid.log_prior - np.log(half) if with_prior else None,
        penalty=solution.penalty,
        steps=solution.steps,
        status=Status.CONVERGED if matched else Status.MISMATCH,
    )


def fit_classical(
    moments: MeasuredMoments | ArrayLike,
    basis: str = "chebyshev",
    bounds: tuple[float, float] = (-1.0, 1.0),
    sweeps: int = 1000,
    tol: float = 1e-8,
) -> MaxentDensity:
    """Maximum entropy by the scheme of Bandyopadhyay et al. (2005), BMxnt in Figure 2.1.

    Power moments on u in [0, 1]; one multiplier after the other is moved by log(μ_i/⟨uⁱ⟩), as
    Fitzsimons et al. (2017) do, until all moments match to ``tol`` or after ``sweeps`` rounds. It
    is provided for comparison: high powers are nearly equal to each other, so that with more than a
    few moments it stops short of the maximum.
    """
    values, covariance, bounds, _ = in_chebyshev(moments, basis, bounds, None)
    require_count(sweeps, "sweeps")
    require_positive(tol, "tol")
    count = len(values) - 1
    # moments of u = (1 + x)/2: uⁿ = 4⁻ⁿ·(C(2n, n) + 2 Σ_k C(2n, n − k) T_k)
    table = np.zeros((count + 1, count + 1))
    for n in range(count + 1):
        for k in range(n + 1):
            table[n, k] = comb(2 * n, n - k) / 4**n * (2 if k else 1)
    wanted = table @ values
    fine = bool((wanted > 0).all())
    expected = "have positive power moments on the bounds"
    require(fine, "moments", expected, f"{wanted.min():.3g}", "pass bounds that hold the spectrum")
    grid = Grid(count)
    powers = polynomial.polyvander((grid.points + 1) / 2, count)
    exponents, exponent = np.zeros(count + 1), np.full(grid.points.size, -1.0)
    steps = 0
    while steps < sweeps:
        steps += 1
        for i in range(count + 1):
            move = float(np.log(wanted[i] / ((grid.weights * np.exp(exponent)) @ powers[:, i])))
            exponents[i] += move
            exponent += move * powers[:, i]
        if np.abs((grid.weights * np.exp(exponent)) @ powers - wanted).max() <= tol:
            break
    in_x = polynomial.Polynomial(exponents)(polynomial.Polynomial([0.5, 0.5])).coef
    alpha: Array = -chebyshev.poly2cheb(np.pad(in_x, (0, count + 1 - len(in_x)))).astype(np.float64)
    solution = DualSolution(alpha[1:], masses(grid, alpha[1:])[1], 0.0, steps)
    return density_of(grid, solution, values, covariance, bounds, False, tol)
