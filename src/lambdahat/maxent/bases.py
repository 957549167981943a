"""Polynomial bases on [−1, 1], and the way between their moments."""

from __future__ import annotations

import numpy as np
from numpy.polynomial import chebyshev, legendre, polynomial
from numpy.typing import NDArray
from scipy.linalg import solve_triangular

Array = NDArray[np.float64]

BASES = ("power", "chebyshev", "legendre")
_VALUES = {
    "power": polynomial.polyvander,
    "chebyshev": chebyshev.chebvander,
    "legendre": legendre.legvander,
}


def polynomials(basis: str, points: Array, count: int) -> Array:
    """φ_0 … φ_count at ``points`` (N,) of [−1, 1], as (N, count + 1), by the basis's three-term
    recurrence.
    """
    return np.asarray(_VALUES[basis](points, count), dtype=np.float64)


def to_unit(points: Array, bounds: tuple[float, float]) -> Array:
    """``points`` of ``bounds`` mapped to [−1, 1]."""
    return (points - (bounds[0] + bounds[1]) / 2) / ((bounds[1] - bounds[0]) / 2)


def legendre_in_chebyshev(count: int) -> Array:
    """P_n = Σ_k c_nk T_k (count + 1, count + 1): P_n(cos t) = Σ_j a_j a_{n−j} cos((n − 2j)t),
    a_j = C(2j, j)/4ʲ.
    """
    a = np.cumprod([1.0] + [(2 * j - 1) / (2 * j) for j in range(1, count + 1)])
    table = np.zeros((count + 1, count + 1))
    for n in range(count + 1):
        for j in range(n + 1):
            table[n, abs(n - 2 * j)] += a[j] * a[n - j]
    return table


def chebyshev_table(basis: str, count: int) -> Array:
    """The matrix that turns moments of ``basis`` into Chebyshev moments, (count + 1, count + 1).

    From Legendre it is well conditioned. From powers it loses a factor of about 2.4 of accuracy
    with every order.
    """
    if basis == "chebyshev":
        return np.eye(count + 1)
    if basis == "legendre":
        return np.asarray(
            solve_triangular(legendre_in_chebyshev(count), np.eye(count + 1), lower=True)
        )
    table = np.zeros((count + 1, count + 1))
    for k in range(count + 1):
        table[k, : k + 1] = chebyshev.cheb2poly([0.0] * k + [1.0])
    return table
