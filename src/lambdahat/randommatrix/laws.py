"""The semicircle and Marchenko–Pastur laws: spectra of pure noise, symmetric and positive
(spectral thesis, §4.5).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import eigh
from torch import Tensor

from lambdahat._core.check import require, require_count, require_positive
from lambdahat._core.rng import generator
from lambdahat.results import Array

Complex = NDArray[np.complex128]


class Law(ABC):
    """The limiting spectrum of a large random matrix: a density on ``edges``, an ``atom`` at 0.

    Transforms follow Eqs. 5.11 and 5.12 of the spectral thesis: S(z) = ∫ρ(λ)/(z − λ)dλ and R(w) =
    B(w) − 1/w with S(B(w)) = w. Under free addition R transforms add. Both laws are freely
    infinitely divisible, on which ``free_sum`` rests.
    """

    @property
    @abstractmethod
    def edges(self) -> tuple[float, float]:
        """The ends of the interval that carries the density."""

    @property
    @abstractmethod
    def atom(self) -> float:
        """The share of eigenvalues that are exactly 0."""

    @property
    @abstractmethod
    def edge_slope(self) -> float:
        """c in ρ(x) → (c/π)·√(λ₊ − x) at the upper edge λ₊."""

    @abstractmethod
    def density(self, x: ArrayLike) -> Array:
        """ρ at ``x``, without the atom."""

    @abstractmethod
    def cdf(self, x: ArrayLike) -> Array:
        """The share of eigenvalues at or below ``x``, the atom included."""

    @abstractmethod
    def moment(self, order: int) -> float:
        """∫λᵏ of the law, atom included, k = ``order``."""

    @abstractmethod
    def free_cumulant(self, order: int) -> float:
        """κ_k of R(w) = Σ_k κ_k·w^(k−1), k = ``order`` ≥ 1."""

    @abstractmethod
    def stieltjes(self, z: ArrayLike) -> Complex:
        """S(z); for real z its limit from above, so that Im S = −πρ."""

    @abstractmethod
    def r_transform(self, w: ArrayLike) -> Complex:
        """R(w), for complex ``w`` too."""

    @abstractmethod
    def r_integral(self, w: ArrayLike) -> Complex:
        """∫₀ʷ R, for w in the lower half-plane or real (as the limit from there)."""

    @abstractmethod
    def partial_fractions(self, nodes: Array, weights: Array) -> tuple[float, Array, Array]:
        """c, ρ (n,), p (n,) with R(S(ω)) = c + Σ_j ρ_j/(ω − p_j) for S(ω) = Σ_j w_j/(ω − λ_j).

        ``nodes`` λ are distinct and increasing, ``weights`` w positive. All ρ are positive.
        """

    @abstractmethod
    def sample(self, dimension: int, seed: int = 0) -> Tensor:
        """A random symmetric matrix (P, P), float64, whose spectrum follows the law for large P."""


@dataclass(frozen=True)
class Semicircle(Law):
    """Wigner's law of symmetric noise with elements of variance s²/P: ρ(x) = √(4s² − x²)/(2πs²).

    Theorem 9 of the spectral thesis has s = ``scale`` = 1. A batch's noise has s = σ√(P/b).

    >>> Semicircle(0.5).edges
    (-1.0, 1.0)
    """

    scale: float

    def __post_init__(self) -> None:
        require_positive(self.scale, "scale")

    @property
    def edges(self) -> tuple[float, float]:
        return -2 * self.scale, 2 * self.scale

    @property
    def atom(self) -> float:
        return 0.0

    @property
    def edge_slope(self) -> float:
        return float(self.scale**-1.5)

    def density(self, x: ArrayLike) -> Array:
        unit = np.asarray(x, np.float64) / self.scale
        return np.sqrt(np.maximum(4 - unit**2, 0.0)) / (2 * math.pi * self.scale)

    def cdf(self, x: ArrayLike) -> Array:
        unit = np.clip(np.asarray(x, np.float64) / self.scale, -2.0, 2.0)
        up, down = np.sqrt(2 + unit), np.sqrt(2 - unit)
        return np.asarray((unit * up * down / 4 + 2 * np.arctan2(up, down)) / math.pi)

    def moment(self, order: int) -> float:
        """0 for odd k, and s^k times the Catalan number of k/2 for even ones."""
        half, odd = divmod(require_count(order, "order", least=0), 2)
        return 0.0 if odd else self.scale**order * math.comb(order, half) / (half + 1)

    def free_cumulant(self, order: int) -> float:
        return self.scale**2 if require_count(order, "order") == 2 else 0.0

    def stieltjes(self, z: ArrayLike) -> Complex:
        """2/(z + √(z² − 4s²)), the branch of Eq. 5.15 with S(z) → 1/z."""
        at = np.asarray(z, np.complex128)
        return np.asarray(2 / (at + root(at, *self.edges)))

    def r_transform(self, w: ArrayLike) -> Complex:
        """s²w (Eq. 5.16)."""
        return np.asarray(self.scale**2 * np.asarray(w, np.complex128))

    def r_integral(self, w: ArrayLike) -> Complex:
        return np.asarray(self.scale**2 / 2 * np.asarray(w, np.complex128) ** 2)

    def partial_fractions(self, nodes: Array, weights: Array) -> tuple[float, Array, Array]:
        return 0.0, self.scale**2 * weights, nodes

    def sample(self, dimension: int, seed: int = 0) -> Tensor:
        """Of the Gaussian orthogonal ensemble: variance s²/P beside the diagonal, 2s²/P on it."""
        size = require_count(dimension, "dimension")
        draw = torch.randn(size, size, generator=generator(seed, "semicircle"), dtype=torch.float64)
        return (draw + draw.T).mul_(self.scale / math.sqrt(2 * size))


@dataclass(frozen=True)
class MarchenkoPastur(Law):
    """The law of XXᵀ/T, X (P, T) with independent elements of ``variance`` σ², ``ratio`` q = P/T.

    ρ(x) = √((λ₊ − x)(x − λ₋))/(2πqσ²x) with λ± = σ²(1 ± √q)², and for q > 1 an atom 1 − 1/q at 0.
    Eq. 4.17 of the spectral thesis prints another denominator, whose mass is not 1.

    >>> MarchenkoPastur(ratio=4.0).edges, MarchenkoPastur(ratio=4.0).atom
    ((1.0, 9.0), 0.75)
    """

    variance: float = 1.0
    ratio: float = 1.0

    def __post_init__(self) -> None:
        require_positive(self.variance, "variance")
        require_positive(self.ratio, "ratio", "it is P/T, rows over columns of X")

    @property
    def edges(self) -> tuple[float, float]:
        low, high = ((1 + sign * math.sqrt(self.ratio)) ** 2 for sign in (-1, 1))
        return self.variance * low, self.variance * high

    @property
    def atom(self) -> float:
        return max(0.0, 1 - 1 / self.ratio)

    @property
    def edge_slope(self) -> float:
        return float(self.ratio**-0.75 / (math.sqrt(self.variance) * self.edges[1]))

    def density(self, x: ArrayLike) -> Array:
        at, (low, high) = np.asarray(x, np.float64), self.edges
        inside = (low < at) & (at < high)
        safe = np.where(inside, at, high)
        shape = np.sqrt((high - safe) * (safe - low)) / safe
        shape = np.where((at == 0) & (low == 0), math.inf, shape)  # q = 1: ρ grows as 1/√x
        return np.asarray(shape / (2 * math.pi * self.ratio * self.variance))

    def cdf(self, x: ArrayLike) -> Array:
        """By the elementary integral of √((b − x)(x − a))/x; arctan keeps both ends sharp."""
        at, (a, b) = np.asarray(x, np.float64), self.edges
        t = np.clip(at, a, b)
        up, down = np.sqrt(t - a), np.sqrt(b - t)
        area = up * down + (a + b) * np.arctan2(up, down)
        area -= 2 * math.sqrt(a * b) * np.arctan2(math.sqrt(b) * up, math.sqrt(a) * down)
        area /= 2 * math.pi * self.ratio * self.variance
        return np.asarray(np.where(at >= 0, self.atom, 0.0) + area)

    def moment(self, order: int) -> float:
        """σ^{2k}·Σ_r q^{k−r}·N(k, r), with the Narayana numbers N(k, r) = C(k, r)·C(k, r−1)/k."""
        k = require_count(order, "order", least=0)
        narayana = [math.comb(k, r) * math.comb(k, r - 1) // k for r in range(1, k + 1)]
        terms = [self.ratio ** (k - r) * number for r, number in enumerate(narayana, start=1)]
        total = sum(terms) if k else 1.0
        return float(self.variance**k * total)

    def free_cumulant(self, order: int) -> float:
        return float(self.ratio ** (require_count(order, "order") - 1) * self.variance**order)

    def stieltjes(self, z: ArrayLike) -> Complex:
        """(A − √D)/(2qσ²z) with A = z − σ²(1 − q), D = (z − λ₋)(z − λ₊), without cancellation."""
        at = np.asarray(z, np.complex128)
        linear, square = at - self.variance * (1 - self.ratio), root(at, *self.edges)
        plus, minus = linear + square, linear - square
        first = np.abs(plus) >= np.abs(minus)
        with np.errstate(divide="ignore", invalid="ignore"):  # the atom, at z = 0
            other = minus / (2 * self.ratio * self.variance * at)
            return np.asarray(np.where(first, 2 / plus, other))

    def r_transform(self, w: ArrayLike) -> Complex:
        """σ²/(1 − qσ²w)."""
        scaled = self.ratio * self.variance * np.asarray(w, np.complex128)
        return np.asarray(self.variance / (1 - scaled))

    def r_integral(self, w: ArrayLike) -> Complex:
        scaled = self.ratio * self.variance * np.asarray(w, np.complex128)
        return np.asarray(-np.log(1 - scaled) / self.ratio)

    def partial_fractions(self, nodes: Array, weights: Array) -> tuple[float, Array, Array]:
        """By the eigenpairs of diag(λ) + qσ²·√w√wᵀ and the formula of Sherman and Morrison."""
        scale, vector = self.ratio * self.variance, np.sqrt(weights)
        poles, vectors = eigh(np.diag(nodes) + scale * np.outer(vector, vector))
        return self.variance, scale * self.variance * (vector @ vectors) ** 2, poles

    def sample(self, dimension: int, seed: int = 0) -> Tensor:
        """XXᵀ/T with Gaussian X (P, T), T the whole number nearest to P/q."""
        size = require_count(dimension, "dimension")
        columns = round(size / self.ratio)
        fine = columns >= 1
        require(fine, "dimension", "be at least ratio/2, so that X has a column", repr(dimension))
        rng = generator(seed, "marchenko-pastur")
        draw = torch.randn(size, columns, generator=rng, dtype=torch.float64)
        return (draw @ draw.T).mul_(self.variance / columns)


def root(z: Complex, low: float, high: float) -> Any:
    """√((z − a)(z − b)) with its cut on [a, b] and ~ z at infinity; on the cut from above."""
    return np.sqrt(z - low) * np.sqrt(z - high)
