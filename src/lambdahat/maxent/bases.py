"""Polynomial bases on [−1, 1], quadrature grids, and dense linear algebra on numpy arrays.

The linear algebra is torch's: numpy's and SciPy's BLAS have threads of their own, which spin for up
to a tenth of a second after a call and take the core that torch's next operation waits for.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import scipy
import torch
from numpy.polynomial import chebyshev, legendre, polynomial
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]
Bounds = tuple[float, float]

BASES = ("power", "chebyshev", "legendre")
_VALUES = {
    "power": polynomial.polyvander,
    "chebyshev": chebyshev.chebvander,
    "legendre": legendre.legvander,
}


def polynomials(basis: str, points: Array, count: int) -> Array:
    """φ_0 … φ_count at ``points`` (N,) of [−1, 1], as (N, count + 1), by recurrence."""
    return np.asarray(_VALUES[basis](points, count), dtype=np.float64)


def to_unit(points: Array, bounds: Bounds) -> Array:
    """``points`` of ``bounds`` mapped to [−1, 1]."""
    return (points - (bounds[0] + bounds[1]) / 2) / ((bounds[1] - bounds[0]) / 2)


def legendre_in_chebyshev(count: int) -> Array:
    """P_n = Σ_k c_nk T_k: P_n(cos t) = Σ_j a_j a_{n−j} cos((n − 2j)t), a_j = C(2j, j)/4ʲ."""
    a = np.cumprod([1.0] + [(2 * j - 1) / (2 * j) for j in range(1, count + 1)])
    table = np.zeros((count + 1, count + 1))
    for n in range(count + 1):
        for j in range(n + 1):
            table[n, abs(n - 2 * j)] += a[j] * a[n - j]
    return table


def chebyshev_table(basis: str, count: int) -> Array:
    """The matrix that turns moments of ``basis`` into Chebyshev moments, (count + 1, count + 1).

    From powers it loses a factor of about 2.4 of accuracy with every order.
    """
    if basis == "chebyshev":
        return np.eye(count + 1)
    if basis == "legendre":
        matrix = legendre_in_chebyshev(count)
        return np.asarray(scipy.linalg.solve_triangular(matrix, np.eye(count + 1), lower=True))
    table = np.zeros((count + 1, count + 1))
    for k in range(count + 1):
        table[k, : k + 1] = chebyshev.cheb2poly([0.0] * k + [1.0])
    return table


def product(first: Array, second: Array) -> Array:
    """``first`` @ ``second``, of matrices and vectors."""
    return np.asarray((_tensor(first) @ _tensor(second)).numpy())


def triangle(rows: Array) -> Array:
    """Upper triangular R (m, m) with RᵀR = AᵀA for ``rows`` A (N, m), N ≥ m, by QR."""
    return np.asarray(torch.linalg.qr(_tensor(rows), mode="r").R.numpy())


def solve_triangle(factor: Array, right: Array, transposed: bool = False) -> Array:
    """R⁻¹b, or R⁻ᵀb, for ``factor`` R (m, m) upper triangular and ``right`` b (m,) or (m, k).

    Where R is singular it is not finite.
    """
    matrix, columns = _tensor(factor), _tensor(right if right.ndim == 2 else right[:, None])
    matrix = matrix.T if transposed else matrix
    solution = torch.linalg.solve_triangular(matrix, columns, upper=not transposed)
    return np.asarray(solution.reshape(right.shape).numpy())


def least_squares(rows: Array, right: Array, cutoff: float) -> Array:
    """The shortest x that minimises ‖Ax − b‖ for ``rows`` A (N, m), N > m, and ``right`` b (N,).

    Singular values of A below ``cutoff`` times the largest count as 0. The last column of the
    triangle of (A, b) is Qᵀb. LAPACK's own driver ends torch with an internal error if b has a NaN.
    """
    joint = _tensor(triangle(np.column_stack([rows, right])))
    left, values, back = torch.linalg.svd(joint[:-1, :-1])
    kept = values > cutoff * values[0]
    return np.asarray((back[kept].T @ ((left.T @ joint[:-1, -1])[kept] / values[kept])).numpy())


def _tensor(array: Array) -> Tensor:
    """The same memory as a tensor; a copy of arrays that torch refuses or warns of."""
    return torch.from_numpy(np.require(array, np.float64, ("C", "W")))


ORDER = 16
LEAST_PANELS = 32
MOST_NODES = 8192
_NODES, _WEIGHTS = (np.asarray(part) for part in legendre.leggauss(ORDER))
_NORMS = (np.arange(ORDER) + 0.5)[:, None]
_COEFFICIENTS = legendre.legvander(_NODES, ORDER - 1).T * _WEIGHTS * _NORMS
_INTEGRALS = (legendre.legint(row, lbnd=-1) for row in _COEFFICIENTS.T)
_UP_TO_NODES = np.stack([legendre.legval(_NODES, each) for each in _INTEGRALS], axis=1)


def running_mass(mass: Array) -> Array:
    """The mass below every node (N,) of a grid; exact where a panel's polynomial is."""
    panels = mass.reshape(-1, ORDER)
    before = np.append(0.0, np.cumsum(panels.sum(axis=1))[:-1])
    return np.asarray((before[:, None] + (panels / _WEIGHTS) @ _UP_TO_NODES.T).ravel())


class Grid:
    """Gauss–Legendre panels in t with x = −cos t: ascending nodes x (N,), finest at both ends.

    ``log_base`` is log(w·q₀) with the weights w of ∫ dx and the prior q₀ (flat by default), and
    ``features`` (N, m) are T_1 … T_m, exact at the ends too, where x carries fewer digits than t.
    """

    def __init__(self, count: int, log_prior: Callable[[Array], Array] | None = None) -> None:
        self.count, self._log_prior, self.exhausted = count, log_prior, False
        self.place(np.linspace(0.0, np.pi, max(LEAST_PANELS, count // 2) + 1))

    def place(self, edges: Array) -> None:
        """Lay the panels anew between ``edges`` of t in [0, π]."""
        centre, half = (edges[1:] + edges[:-1]) / 2, np.diff(edges) / 2
        angle = (centre[:, None] + half[:, None] * _NODES).ravel()
        self.edges, self.points, self._stretch = edges, -np.cos(angle), np.sin(angle)
        self.weights = (half[:, None] * _WEIGHTS).ravel() * self._stretch
        self.log_prior = (
            np.zeros_like(angle) if self._log_prior is None else self._log_prior(self.points)
        )
        self.log_base = np.log(self.weights) + self.log_prior
        orders = np.arange(1, self.count + 1)
        self.features = np.cos(np.outer(np.pi - angle, orders))

    def refine(self, mass: Array, tol: float) -> bool:
        """Halve the panels on which a density with ``mass`` (N,) is not resolved to ``tol``.

        False if all are, or if the grid would exceed ``MOST_NODES``, which ``exhausted`` then says.
        """
        density = (mass / self.weights * self._stretch).reshape(-1, ORDER)
        tail = np.abs(density @ _COEFFICIENTS.T)[:, -3:].sum(axis=1) * np.diff(self.edges)
        rough = tail > tol
        self.exhausted = self.points.size + ORDER * int(rough.sum()) > MOST_NODES
        if not rough.any() or self.exhausted:
            return False
        middle = (self.edges[1:] + self.edges[:-1])[rough] / 2
        self.place(np.sort(np.concatenate([self.edges, middle])))
        return True
