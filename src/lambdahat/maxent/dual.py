"""The dual of entropy maximisation under moment constraints, solved by Newton's method.

With p_α = q₀·exp(−Σ_{k≥1} α_kT_k)/Z the dual of Eq. 2.25 (spectral thesis), freed of α₀, is F(α) =
log Z + Σ_k α_kμ_k; its gradient is μ − ⟨T⟩ (Eq. 2.26) and its Hessian the covariance of T under p_α
(Eq. 2.27).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lambdahat.maxent.bases import Array
from lambdahat.maxent.dense import product, solve_triangle, triangle
from lambdahat.maxent.grids import Grid

STEPS = 25
HALVINGS = 30
NEGLIGIBLE = 1e-30  # mass below this changes no entry of the Hessian
FIRST_PENALTY, LAST_PENALTY = 1e-2, 1e-24
EXACT = 1e-10


@dataclass(frozen=True)
class Solution:
    """``coefficients`` α_1 … α_m, log Z over x in [−1, 1], the ``penalty`` taken (0: none) and
    Newton steps made.
    """

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

    Its rows are the polynomials orthonormal under the current density; the condition number of
    Cov(T) is never squared as a formed matrix would have it.
    """
    there = mass > NEGLIGIBLE
    centred = grid.features[there] - product(mass, grid.features)
    ridge = np.sqrt(penalty + NEGLIGIBLE) * np.eye(grid.count)
    return triangle(np.vstack([np.sqrt(mass[there])[:, None] * centred, ridge]))


def solve(
    grid: Grid, target: Array, tol: float, enough: Array, penalty: float | None = None
) -> Solution:
    """α with |μ_k − ⟨T_k⟩| ≤ ``tol`` for ``target`` μ_1 … μ_m, where that can be had.

    Plain Newton is tried first. Where it does not arrive, because the density is nearly a set of
    atoms, the path of the penalised problems F + ½v‖α‖² is followed from large to small v, each
    started at the one before, until the mismatch v|α_k| is ``enough`` (m,), or the grid can follow
    no more: then the last point of the path is returned. With a ``penalty`` the path ends there, to
    ``EXACT``, and 0 is plain Newton.
    """
    edges, steps = grid.edges, 0
    if not penalty:
        best, steps = _settle(grid, target, np.zeros(grid.count), 0.0, np.full(grid.count, tol))
        if best is not None:
            return Solution(*best, 0.0, steps)
        grid.place(edges)
    return _path(grid, target, enough, penalty or None, steps)


def _path(grid: Grid, target: Array, enough: Array, wanted: float | None, steps: int) -> Solution:
    """The end of the path of penalties: the one ``wanted``, or the first at which the mismatch
    is ``enough``.
    """
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
        reached = Solution(*best, penalty, steps)
        if penalty <= last or (wanted is None and bool((penalty * np.abs(start) <= enough).all())):
            break
        penalty = max(penalty / 10, last)
    grid.place(edges)
    return reached or Solution(start, masses(grid, start)[1], penalty, steps)


def _settle(
    grid: Grid, target: Array, start: Array, penalty: float, tol: Array
) -> tuple[tuple[Array, float] | None, int]:
    """(α, log Z) at one penalty, on a grid refined until it resolves the density; None where
    that fails.
    """
    steps = 0
    while True:
        found, more = _newton(grid, target, start, penalty, tol)
        steps += more
        if found is None:
            return None, steps
        mass, log_z = masses(grid, found)
        if not grid.refine(mass, max(1e-11, 1e-2 * float(tol.min()))):
            return (None if grid.exhausted else (found, log_z)), steps
        start = found


def _newton(
    grid: Grid, target: Array, alpha: Array, penalty: float, tol: Array
) -> tuple[Array | None, int]:
    """Damped Newton on one grid: no step is longer than 2 in the norm of the Hessian, and each
    lowers F.
    """

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
