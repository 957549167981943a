"""From moments to the density of maximum entropy, or of maximum relative entropy to a prior."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike

from lambdahat._core.check import require, require_choice, require_interval, require_positive
from lambdahat._core.storage import Status
from lambdahat.maxent.bases import BASES, Array, chebyshev_table
from lambdahat.maxent.dense import product, solve_triangle
from lambdahat.maxent.densities import Density, MaxentDensity
from lambdahat.maxent.dual import Solution, hessian_factor, masses, solve
from lambdahat.maxent.feasibility import require_feasible
from lambdahat.maxent.grids import Grid

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
    """The density of maximum entropy with the given moments (Algorithm 1, spectral thesis).

    ``moments`` is what ``lh.moments`` returns, or φ_0 … φ_m (m + 1,) of ``basis`` on ``bounds``,
    exact or with ``stderr``. With a ``prior`` q₀, a density or a positive function of λ, the
    entropy relative to it is maximised (Eq. 2.24, Appendix A). Moments are matched to ``tol``, or
    where that is hard to a hundredth of their standard error. What no positive measure has is an
    error that names the first such moment; where the moments are so nearly those of a few atoms
    that no density can be found, the status of the nearest one is MISMATCH.

    Near such moments the dual is penalised by ½v‖α‖², with the largest v that matches them well
    enough. Densities of other v are not comparable: a ``penalty`` is taken for v as it is, 0 for
    none.

    >>> semicircle = fit([1, 0, -0.5, 0, 0, 0, 0])
    >>> round(float(semicircle.evaluate(0.0)), 3)
    0.648
    """
    values, covariance, bounds, hint = in_chebyshev(moments, basis, bounds, stderr)
    require_positive(tol, "tol")
    plain = penalty is None or penalty == 0
    penalty = (
        penalty
        if plain
        else require_positive(penalty, "penalty", "pass 0 for none, None for what is needed")
    )
    errors = np.sqrt(np.diag(covariance).clip(0.0))
    require_feasible(values, errors, hint)
    count = len(values) - 1
    log_prior = None if prior is None else _mapped(prior, bounds)
    if log_prior is not None:
        log_prior = _normalised(log_prior)
    grid = Grid(count, log_prior)
    solution = solve(grid, values[1:], tol, np.maximum(tol, SHARE * errors[1:]), penalty)
    return density_of(grid, solution, values, covariance, bounds, prior is not None, tol)


def in_chebyshev(
    moments: MeasuredMoments | ArrayLike,
    basis: str,
    bounds: tuple[float, float],
    stderr: ArrayLike | None,
) -> tuple[Array, Array, tuple[float, float], str]:
    """Chebyshev moments, their covariance, the bounds, and a hint for when they turn out
    infeasible.
    """
    if isinstance(moments, MeasuredMoments):
        basis, bounds, covariance = moments.basis, moments.bounds, moments.covariance
        values = np.asarray(moments.values, np.float64)
    else:
        values = _numbers(moments, "moments")
        covariance = np.zeros((values.size, values.size))
    require_choice(basis, "basis", BASES)
    require(
        values.ndim == 1 and values.size >= 2,
        "moments",
        "be a 1-D array φ_0 … φ_m with m of at least 1",
        values,
    )
    require(bool(np.isfinite(values).all()), "moments", "be finite", "NaN or infinity")
    require(
        abs(values[0] - 1) <= 1e-6,
        "moments",
        "begin with φ_0 = 1",
        f"{values[0]:.6g}",
        "divide all of them by it: each probe by its own zᵀz",
    )
    bounds = require_interval(bounds, "bounds")
    if stderr is not None:
        given = _numbers(stderr, "stderr")
        fine = given.shape == values.shape and bool((given >= 0).all())
        require(fine, "stderr", f"be {values.size} numbers of at least 0", given)
        covariance = np.diag(given**2)
    table = chebyshev_table(basis, values.size - 1)
    return (
        table @ values,
        product(product(table, covariance), table.T),
        bounds,
        HINT if basis == "power" else "",
    )


def _numbers(values: ArrayLike, name: str) -> Array:
    """Real numbers of any array-like as float64."""
    try:
        found = np.asarray(values)
        real = found.dtype.kind in "biuf"
    except ValueError:  # ragged
        real = False
    require(real, name, "be a 1-D array of real numbers", values, error=TypeError)
    return np.asarray(found, np.float64)


def _mapped(prior: Prior, bounds: tuple[float, float]) -> Callable[[Array], Array]:
    """log q₀ as a function of x in [−1, 1]."""
    function = prior.evaluate if isinstance(prior, Density) else prior
    require(callable(function), "prior", "be a Density or a function of λ", prior, error=TypeError)

    def log_prior(x: Array) -> Array:
        places = bounds[0] + (x + 1) / 2 * (bounds[1] - bounds[0])
        readings = np.asarray(function(places), np.float64)
        fine = readings.shape == x.shape and bool((np.isfinite(readings) & (readings > 0)).all())
        require(
            fine,
            "prior",
            f"be element-wise, finite and above 0 on ({bounds[0]:.3g}, {bounds[1]:.3g})",
            "other values",
            "give it a small floor, or narrow the bounds",
        )
        return np.log(readings)

    return log_prior


def _normalised(log_prior: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """The same prior with ∫ q₀ dx = 1, on a grid that resolves it."""
    grid = Grid(1, log_prior)
    nothing = np.zeros(1)
    while grid.refine(masses(grid, nothing)[0], 1e-10):
        pass
    _, log_mass = masses(grid, nothing)
    return lambda x: log_prior(x) - log_mass


def density_of(
    grid: Grid,
    solution: Solution,
    values: Array,
    covariance: Array,
    bounds: tuple[float, float],
    with_prior: bool,
    tol: float,
) -> MaxentDensity:
    """The solution on x in [−1, 1] as a density of λ, with the error that the moments' errors
    give it.
    """
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
    prior = grid.log_prior - np.log(half) if with_prior else None
    return MaxentDensity(
        bounds[0] + (grid.points + 1) * half,
        density,
        density * relative,
        0.0,
        grid.weights * half,
        bounds,
        alpha,
        values,
        errors,
        residuals,
        prior,
        solution.penalty,
        solution.steps,
        Status.CONVERGED if matched else Status.MISMATCH,
    )
