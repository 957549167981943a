"""A quadrature grid on [−1, 1] that clusters at the ends and is refined where a density needs
it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.polynomial import legendre

from lambdahat.maxent.bases import Array

ORDER = 16
LEAST_PANELS = 32
MOST_NODES = 8192
_NODES, _WEIGHTS = (np.asarray(part) for part in legendre.leggauss(ORDER))
_COEFFICIENTS = (
    legendre.legvander(_NODES, ORDER - 1).T * _WEIGHTS * (np.arange(ORDER) + 0.5)[:, None]
)
_UP_TO_NODES = np.stack(
    [legendre.legval(_NODES, legendre.legint(row, lbnd=-1)) for row in _COEFFICIENTS.T], axis=1
)


def running_mass(mass: Array) -> Array:
    """The mass below every node (N,) of a grid, from that at the nodes: exact where a panel's
    polynomial is.
    """
    panels = mass.reshape(-1, ORDER)
    before = np.append(0.0, np.cumsum(panels.sum(axis=1))[:-1])
    return np.asarray((before[:, None] + (panels / _WEIGHTS) @ _UP_TO_NODES.T).ravel())


class Grid:
    """Gauss–Legendre panels in t with x = −cos t: ascending nodes x (N,), as fine as Δt² at both
    ends of [−1, 1].

    ``log_base`` is log(w·q₀) with the weights w of ∫ dx and the prior q₀ (flat by default), and
    ``features`` (N, m) are T_1 … T_m, exact at the ends too, for there x carries fewer digits than
    t.
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
        """Halve the panels on which a density with ``mass`` (N,) at the nodes is not resolved to
        ``tol``.

        False when all are, or when the grid would become larger than ``MOST_NODES``: ask
        ``exhausted`` which.
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
