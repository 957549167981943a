"""The law of Tracy and Widom: how the largest eigenvalue of real symmetric noise varies about
the edge.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq
from scipy.special import airy

from lambdahat._core.check import require, require_count
from lambdahat.randommatrix.free_convolution import FreeSum
from lambdahat.randommatrix.laws import Law, MarchenkoPastur
from lambdahat.results import Array

LEFT, RIGHT = -10.0, 16.0  # less than 1e-16 of the mass lies beyond
ORDER = 40  # nodes of the Fredholm determinant, which then is right to 2e-14
REACH = 16.0  # Ai(16) = 4e-20


@dataclass(frozen=True)
class TracyWidom:
    """The law TW₁ of the largest eigenvalue of real symmetric noise, centred and scaled by
    ``edge_fluctuation``.

    F(s) = det(1 − K_s) with K_s(x, y) = Ai(x + y + s) on L²(0, ∞) (Ferrari and Spohn 2005), by
    Gauss–Legendre quadrature (Bornemann 2010): the error falls exponentially with the number of
    nodes.

    >>> round(TracyWidom().mean, 4), round(TracyWidom().std, 4)
    (-1.2065, 1.268)
    """

    def cdf(self, x: ArrayLike) -> Array:
        """P(TW₁ ≤ x)."""
        return self._each(x, 0)

    def density(self, x: ArrayLike) -> Array:
        """F' = −F·tr((1 − K_s)⁻¹·∂K_s/∂s)."""
        return self._each(x, 1)

    def quantile(self, share: float) -> float:
        """x with P(TW₁ ≤ x) = ``share``."""
        require(0 < share < 1, "share", "lie between 0 and 1", repr(share))
        return float(brentq(lambda x: _distribution(x)[0] - share, LEFT, RIGHT, xtol=1e-12))

    @property
    def mean(self) -> float:
        """−1.2065…"""
        return _moments()[0]

    @property
    def std(self) -> float:
        """1.2680…"""
        return math.sqrt(_moments()[1])

    def _each(self, x: ArrayLike, part: int) -> Array:
        at = np.asarray(x, np.float64)
        require(not bool(np.isnan(at).any()), "x", "be numbers", "NaN")
        return np.array([_distribution(float(s))[part] for s in at.ravel()]).reshape(at.shape)


def edge_fluctuation(law: Law | FreeSum, dimension: int) -> tuple[float, float]:
    """(centre, scale): the largest eigenvalue of P × P noise is centre + scale·TW₁, up to
    O(P^(−2/3)) of the scale.

    Where ρ(x) → (c/π)·√(λ₊ − x), centre → λ₊ and scale → (Pc)^(−2/3): s·P^(−2/3) for a semicircle.
    For the two laws both have the corrections for finite sizes of Johnstone and Ma (2012): P and T
    less ½. Of a ``FreeSum`` it is the edge of the bulk; an outlier beyond it varies by O(P^(−1/2))
    instead.
    """
    size = require_count(dimension, "dimension")
    require(
        isinstance(law, Law | FreeSum),
        "law",
        "be a Semicircle, MarchenkoPastur or FreeSum",
        law,
        error=TypeError,
    )
    if isinstance(law, MarchenkoPastur):
        return _covariance(law, size)
    scale = float((size * law.edge_slope) ** (-2 / 3))
    if isinstance(law, FreeSum):
        return law.edges[-1][1], scale
    return law.edges[1] * math.sqrt(1 - 0.5 / size), scale


def _covariance(law: MarchenkoPastur, size: int) -> tuple[float, float]:
    """Centre σ²(√P' + √T')²/T and scale σ²(√P' + √T')(1/√P' + 1/√T')^⅓/T with P' = P − ½, T' = T
    − ½.
    """
    columns = max(size / law.ratio, 1.0)
    p, t = math.sqrt(size - 0.5), math.sqrt(columns - 0.5)
    unit = law.variance * (p + t) / columns
    return unit * (p + t), unit * (1 / p + 1 / t) ** (1 / 3)


def _distribution(s: float) -> tuple[float, float]:
    """F(s) and F'(s)."""
    if not LEFT < s < RIGHT:
        return float(s >= RIGHT), 0.0
    nodes, weights = _rule()
    half = (REACH - s) / 2
    x, root = half * (nodes + 1), np.sqrt(half * weights)
    value, slope, _, _ = airy(x[:, None] + x + s)
    kernel = np.eye(ORDER) - root[:, None] * value * root
    change = np.linalg.solve(kernel, root[:, None] * slope * root)
    share = min(max(float(np.linalg.det(kernel)), 0.0), 1.0)
    return share, max(-share * float(np.trace(change)), 0.0)


@cache
def _rule() -> tuple[Array, Array]:
    nodes, weights = np.polynomial.legendre.leggauss(ORDER)
    return nodes, weights


@cache
def _moments() -> tuple[float, float]:
    """Mean and variance."""
    nodes, weights = np.polynomial.legendre.leggauss(100)
    half = (RIGHT - LEFT) / 2
    at = LEFT + half * (nodes + 1)
    mass = half * weights * TracyWidom().density(at)
    mean = float(mass @ at)
    return mean, float(mass @ (at - mean) ** 2)
