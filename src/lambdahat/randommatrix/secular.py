"""The function H(ω) = ω + c + Σ_j ρ_j/(ω − p_j), ρ_j > 0, and its inverse on the upper
half-plane.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lambdahat.results import Array

EPS = float(np.finfo(np.float64).eps)
CHUNK = 1 << 21  # elements of a table (points, poles)
HALVINGS = 200  # more than float64 needs to part any two numbers


class Secular:
    """H with its ``shift`` c, ``residues`` ρ (n,) and ``poles`` p (n,).

    In the closed upper half-plane the curve Im H = 0 is a graph over the real axis: v(u) > 0 where
    Σρ_j/(u − p_j)² > 1, else 0. ``ends`` (k, 2) holds the intervals of u with v > 0, ``support``
    (k, 2) their images.
    """

    def __init__(self, shift: float, residues: Array, poles: Array) -> None:
        total = float(residues.sum())
        self.scale = float(np.abs(poles).max()) + np.sqrt(total) + abs(shift)
        kept = residues > (4 * EPS * self.scale) ** 2  # less widens the real axis by rounding only
        order = np.argsort(poles[kept])
        self.shift, self.residues, self.poles = shift, residues[kept][order], poles[kept][order]

    def value(self, u: ArrayLike) -> Array:
        """H at real ``u``."""
        at = np.asarray(u, np.float64)
        with np.errstate(divide="ignore"):
            return np.asarray(
                at + self.shift + (self.residues / (at[..., None] - self.poles)).sum(axis=-1)
            )

    def slope(self, u: ArrayLike) -> Array:
        """H' = 1 − Σρ_j/(u − p_j)² at real ``u``: −∞ at a pole."""
        at = np.asarray(u, np.float64)
        with np.errstate(divide="ignore"):
            return np.asarray(1 - (self.residues / (at[..., None] - self.poles) ** 2).sum(axis=-1))

    def bend(self, u: ArrayLike) -> Array:
        """H'' = 2Σρ_j/(u − p_j)³ at real ``u``."""
        at = np.asarray(u, np.float64)
        return np.asarray(2 * (self.residues / (at[..., None] - self.poles) ** 3).sum(axis=-1))

    @cached_property
    def ends(self) -> Array:
        """Roots of H' = 0, (k, 2): one beyond each end of the poles, two in a gap where H' gets
        positive, else none.
        """
        poles, cubes = self.poles, np.cbrt(self.residues)
        reach = np.sqrt(self.residues.sum()) * (1 + 4 * EPS)
        first = _root(lambda u: -self.slope(u), poles[:1] - reach, poles[:1])
        last = _root(self.slope, poles[-1:], poles[-1:] + reach)
        # the two poles beside narrower gaps close them
        wide = np.diff(poles) ** 2 > (cubes[:-1] + cubes[1:]) ** 3
        left, right = poles[:-1][wide], poles[1:][wide]
        middle = _root(lambda u: -self.bend(u), left, right)  # H' is concave in a gap
        open_ = self.slope(middle) > 0
        left, middle, right = left[open_], middle[open_], right[open_]
        rising, falling = (
            _root(self.slope, left, middle),
            _root(lambda u: -self.slope(u), middle, right),
        )
        inner = np.stack([rising, falling], axis=1).ravel()
        return np.concatenate([first, inner, last]).reshape(-1, 2)

    @cached_property
    def support(self) -> Array:
        """H(ends): the intervals that carry a density, (k, 2)."""
        return self.value(self.ends)

    def preimage(self, x: Array) -> NDArray[np.complex128]:
        """ω(x) in the closed upper half-plane with H(ω) = x, for real ``x`` (m,)."""
        rows = max(1, CHUNK // len(self.poles))
        parts = [self._solve(x[start : start + rows]) for start in range(0, len(x), rows)]
        return np.concatenate(parts) if parts else np.zeros(0, np.complex128)

    def _solve(self, x: Array) -> NDArray[np.complex128]:
        """Newton on x(u), which grows, kept in a bracket that shrinks."""
        low, high = self._brackets(x)
        u, omega = (low + high) / 2, np.zeros(len(x), np.complex128)
        active = np.arange(len(x))
        for step in range(HALVINGS):
            at = u[active]
            omega[active] = point = at + 1j * self._height(at)
            gaps = point[:, None] - self.poles
            ratios = self.residues / gaps
            error = point.real + self.shift + ratios.sum(axis=1).real - x[active]
            low[active] = np.where(error < 0, at, low[active])
            high[active] = np.where(error > 0, at, high[active])
            with np.errstate(divide="ignore", invalid="ignore"):  # H' = 0 at an edge
                newton = at - error * (1 / (1 - (ratios / gaps).sum(axis=1))).real
            a, b = low[active], high[active]
            # every fourth step halves, come what may
            inside = (a < newton) & (newton < b) & (step % 4 < 3)
            u[active] = np.where(inside, newton, (a + b) / 2)
            done = (np.abs(error) <= EPS * self.scale) | (
                b - a <= EPS * np.maximum(np.abs(a), np.abs(b))
            )
            active = active[~done]
            if not len(active):
                break
        return omega

    def _brackets(self, x: Array) -> tuple[Array, Array]:
        """Real u on either side of Re ω(x): the ends that x lies between, and beyond the last
        ones H(u) ≷ u + c.
        """
        ends, marks = self.ends.ravel(), self.support.ravel()
        place = np.searchsorted(marks, x)
        low = np.where(
            place > 0, ends[np.maximum(place - 1, 0)], np.minimum(x - self.shift, ends[0])
        )
        high = np.where(
            place < len(ends),
            ends[np.minimum(place, len(ends) - 1)],
            np.maximum(x - self.shift, ends[-1]),
        )
        return low, high

    def _height(self, u: Array) -> Array:
        """v(u): the root y = v² of g(y) = Σρ_j/((u − p_j)² + y) = 1, or 0 where g(0) ≤ 1.

        1/g is concave in y, so Newton from below never passes the root; for one pole a step is
        exact.
        """
        squares = (u[:, None] - self.poles) ** 2
        y = (self.residues - squares).max(axis=1).clip(0.0)  # each term alone is at most 1
        for _ in range(HALVINGS):
            distance = squares + y[:, None]
            terms = self.residues / distance
            total = terms.sum(axis=1)
            step = np.maximum(total * (total - 1) / (terms / distance).sum(axis=1), 0.0)
            y += step
            if bool((step <= 4 * EPS * y).all()):
                break
        return np.asarray(np.sqrt(y))


def _root(function: Callable[[Array], Array], low: Array, high: Array) -> Array:
    """Where a function goes from negative at ``low`` to positive at ``high``, for many brackets
    at once.
    """
    low, high = low.astype(np.float64), high.astype(np.float64)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if bool(((middle == low) | (middle == high)).all()):
            break
        below = function(middle) < 0
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return (low + high) / 2
