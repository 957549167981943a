"""The classical algorithm for maximum entropy, which the thesis compares with (BMxnt)."""

from __future__ import annotations

from math import comb

import numpy as np
from numpy.polynomial import chebyshev, polynomial
from numpy.typing import ArrayLike

from lambdahat._core.check import require, require_count, require_positive
from lambdahat.maxent.bases import Array
from lambdahat.maxent.densities import MaxentDensity
from lambdahat.maxent.dual import Solution, masses
from lambdahat.maxent.fitting import MeasuredMoments, density_of, in_chebyshev
from lambdahat.maxent.grids import Grid


def fit_classical(
    moments: MeasuredMoments | ArrayLike,
    basis: str = "chebyshev",
    bounds: tuple[float, float] = (-1.0, 1.0),
    sweeps: int = 1000,
    tol: float = 1e-8,
) -> MaxentDensity:
    """Maximum entropy by the scheme of Bandyopadhyay et al. (2005), BMxnt in Figure 2.1 of the
    spectral thesis.

    Power moments on u in [0, 1]; one multiplier after the other is moved by log(μ_i/⟨uⁱ⟩), as
    Fitzsimons et al. (2017) do, until all moments match to ``tol`` or after ``sweeps`` rounds. It
    is here for comparison: the moves shrink as powers grow alike, so that with more than a few
    moments it stops short of the maximum.
    """
    values, covariance, bounds, _ = in_chebyshev(moments, basis, bounds, None)
    require_count(sweeps, "sweeps")
    require_positive(tol, "tol")
    count = len(values) - 1
    wanted = _powers(values)
    require(
        bool((wanted > 0).all()),
        "moments",
        "have positive power moments on the bounds",
        f"{wanted.min():.3g}",
        "pass bounds that hold the spectrum",
    )
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
    _, log_z = masses(grid, alpha[1:])
    return density_of(
        grid, Solution(alpha[1:], log_z, 0.0, steps), values, covariance, bounds, False, tol
    )


def _powers(values: Array) -> Array:
    """Moments of u = (1 + x)/2 from Chebyshev moments of x: uⁿ = 4⁻ⁿ·(C(2n, n) + 2 Σ_k C(2n, n −
    k) T_k).
    """
    count = len(values) - 1
    table = [
        [comb(2 * n, n - k) / 4**n * (2 if k else 1) if k <= n else 0.0 for k in range(count + 1)]
        for n in range(count + 1)
    ]
    return np.asarray(table) @ values
