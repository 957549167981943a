"""Probability densities of eigenvalues: on a grid, and of maximum entropy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeGuard

import numpy as np
from numpy.polynomial import chebyshev
from numpy.typing import ArrayLike

from lambdahat._core.check import require, require_choice, require_count, require_type
from lambdahat._core.storage import Result, Status
from lambdahat.maxent.bases import (
    BASES,
    Array,
    least_squares,
    polynomials,
    product,
    running_mass,
    to_unit,
)

TINY = 1e-300


@dataclass(frozen=True)
class Density(Result):
    """A probability density on a grid with its pointwise standard error; linear in between.

    ``width`` is that of the kernel if one smoothed it. Integrals are by the trapezoidal rule.
    """

    grid: Array
    values: Array
    stderr: Array
    width: float = 0.0

    @property
    def support(self) -> tuple[float, float]:
        """The interval outside which the density is 0."""
        return float(self.grid[0]), float(self.grid[-1])

    def evaluate(self, points: ArrayLike) -> Array:
        """p at any ``points``."""
        at = np.asarray(points, np.float64)
        return np.interp(at, self.grid, self.values, left=0.0, right=0.0)

    def integral(self) -> float:
        """The mass on the grid: 1 when the grid covers the support."""
        return float(self._masses().sum())

    def expectation(self, function: Callable[[Array], Array]) -> float:
        """∫ f(λ) p(λ) dλ for an element-wise ``function``."""
        readings = np.asarray(function(self.grid), dtype=np.float64)
        require(readings.shape == self.grid.shape, "function", "be element-wise", readings)
        mass = self._masses()
        return float((np.where(mass > 0, readings, 0.0) * mass).sum())

    def integrate(self, low: float, high: float) -> float:
        """The mass between ``low`` and ``high``."""
        require(low <= high, "low", "be at most high", f"{low!r} and {high!r}")
        below = self.cumulative([low, high])
        return float(below[1] - below[0])

    def moments(
        self, count: int, basis: str = "power", bounds: tuple[float, float] | None = None
    ) -> Array:
        """∫ φ_k(λ) p(λ) dλ for k = 0 … ``count``.

        Powers are of λ itself unless ``bounds`` are mapped to [−1, 1]; other bases map the support.
        """
        require_count(count, "count", 0)
        require_choice(basis, "basis", BASES)
        plain = bounds is None and basis == "power"
        x = self.grid if plain else to_unit(self.grid, self.support if bounds is None else bounds)
        return product(self._masses(), polynomials(basis, x, count))

    def entropy(self) -> float:
        """The differential entropy −∫ p log p dλ."""
        return -float((self._masses() * np.log(np.maximum(self.values, TINY))).sum())

    def kl(self, other: Density) -> float:
        """The Kullback–Leibler divergence ∫ p log(p/q) dλ to another density (Eq. 3.5).

        By quadrature; infinite where ``other`` is 0 and this one is not.
        """
        require_type(other, Density, "other", "be a Density")
        mass, there = self._masses(), self.values > 0
        ratio = np.log(self.values[there]) - other._logarithm(self.grid[there])
        return float((mass[there] * ratio).sum())

    def symmetric_kl(self, other: Density) -> float:
        """½ (KL(p‖q) + KL(q‖p))."""
        return (self.kl(other) + other.kl(self)) / 2

    def cumulative(self, points: ArrayLike) -> Array:
        """The share of the mass at or below each of ``points``."""
        places, shares = self._distribution()
        return np.asarray(np.interp(np.asarray(points, np.float64), places, shares), np.float64)

    def quantile(self, levels: ArrayLike) -> Array:
        """Where the share of the mass below reaches each of ``levels``."""
        wanted = np.asarray(levels, np.float64)
        fine = bool(((0 <= wanted) & (wanted <= 1)).all())
        require(fine, "levels", "lie in [0, 1]", repr(levels))
        places, shares = self._distribution()
        rising = np.concatenate([[True], np.diff(shares) > 0])
        return np.asarray(np.interp(wanted, shares[rising], places[rising]), np.float64)

    def _logarithm(self, points: Array) -> Array:
        """log p at ``points``, −∞ where p is 0."""
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(self.evaluate(points)))

    def _masses(self) -> Array:
        """p times the weight of every grid point."""
        gaps = np.diff(self.grid) / 2
        return np.asarray(self.values * (np.append(gaps, 0.0) + np.append(0.0, gaps)), np.float64)

    def _distribution(self) -> tuple[Array, Array]:
        """Places and the share of the mass below them."""
        steps = np.diff(self.grid) * (self.values[1:] + self.values[:-1]) / 2
        below = np.append(0.0, np.cumsum(steps))
        return self.grid, below / below[-1]


@dataclass(frozen=True)
class MaxentDensity(Density):
    """p(λ) = q₀(λ)·exp(−1 − Σ_k α_kT_k(x)), x = λ mapped from ``bounds`` to [−1, 1].

    Eqs. 2.28 and 3.9. ``coefficients`` are α_0 … α_m, ``targets`` the Chebyshev moments μ_0 … μ_m
    asked for, ``errors`` their standard errors, and ``residuals`` μ_k less those of p. ``weights``
    make ∫ f p dλ = Σ_i weights_i·values_i·f(grid_i). ``log_prior`` is log q₀ on the grid, None for
    q₀ = 1. ``penalty`` is the regularisation that was used. The status is MISMATCH if a residual is
    beyond both the tolerance and the error of its moment.
    """

    weights: Array = field(default_factory=lambda: np.zeros(0))
    bounds: tuple[float, float] = (-1.0, 1.0)
    coefficients: Array = field(default_factory=lambda: np.zeros(0))
    targets: Array = field(default_factory=lambda: np.zeros(0))
    errors: Array = field(default_factory=lambda: np.zeros(0))
    residuals: Array = field(default_factory=lambda: np.zeros(0))
    log_prior: Array | None = None
    penalty: float = 0.0
    steps: int = 0
    status: Status = Status.CONVERGED

    @property
    def support(self) -> tuple[float, float]:
        """The bounds."""
        return self.bounds

    @property
    def matched(self) -> Array:
        """The Chebyshev moments that the density has."""
        return self.targets - self.residuals

    def evaluate(self, points: ArrayLike) -> Array:
        """p at any ``points``, 0 outside the bounds."""
        return np.exp(self._logarithm(np.asarray(points, np.float64)))

    def _logarithm(self, points: Array) -> Array:
        inside = (self.bounds[0] <= points) & (points <= self.bounds[1])
        unit = np.clip(to_unit(points, self.bounds), -1.0, 1.0)
        exponent = -1.0 - chebyshev.chebval(unit, self.coefficients)
        if self.log_prior is not None:
            exponent = exponent + np.interp(points, self.grid, self.log_prior)
        return np.where(inside, exponent, -np.inf)

    def entropy(self) -> float:
        """The differential entropy −∫ p log p dλ = 1 + Σ_k α_kμ_k − ∫ p log q₀ dλ (Eq. 3.10)."""
        prior = 0.0 if self.log_prior is None else float(self._masses() @ self.log_prior)
        return self.relative_entropy() - prior

    def relative_entropy(self) -> float:
        """−∫ p log(p/q₀) dλ = 1 + Σ_k α_kμ_k, the maximised quantity (Eq. 2.24)."""
        return 1.0 + float(self.coefficients @ self.matched)

    def kl(self, other: Density, numeric: bool = False) -> float:
        """KL(p‖q) = −Σ_k (α_k − β_k)μ_k for the same bounds and prior (Eq. 3.11).

        Otherwise, or with ``numeric``, by quadrature.
        """
        if numeric or not self._comparable(other):
            return super().kl(other)
        moments, apart = self._moments_to(other), self._coefficients_beyond(other)
        return -float(apart @ moments[: len(apart)])

    def symmetric_kl(self, other: Density, numeric: bool = False) -> float:
        """½ Σ_k (α_k − β_k)(μ_k^q − μ_k^p) (Eq. 3.12), or by quadrature."""
        require_type(other, Density, "other", "be a Density")
        if numeric or not self._comparable(other):
            back = other.kl(self, numeric) if isinstance(other, MaxentDensity) else other.kl(self)
            return (self.kl(other, numeric) + back) / 2
        between = other._moments_to(self) - self._moments_to(other)
        return float(self._coefficients_beyond(other) @ between) / 2

    def sensitivity(self, function: Callable[[Array], Array]) -> Array:
        """d ∫ f p dλ / dμ_k, k = 1 … m: the least-squares fit of f by T_1 … T_m under p."""
        count, mass = len(self.coefficients) - 1, self._masses()
        features = polynomials("chebyshev", to_unit(self.grid, self.bounds), count)[:, 1:]
        readings = np.asarray(function(self.grid), dtype=np.float64)
        root = np.sqrt(mass)
        centred, rest = features - product(mass, features), readings - mass @ readings
        rows = np.vstack([root[:, None] * centred, np.sqrt(self.penalty) * np.eye(count)])
        return least_squares(rows, np.append(root * rest, np.zeros(count)), 1e-13)

    def _comparable(self, other: Density) -> TypeGuard[MaxentDensity]:
        """Whether two densities share bounds and prior, so that only their coefficients differ."""
        if not isinstance(other, MaxentDensity) or other.bounds != self.bounds:
            return False
        return self.log_prior is None and other.log_prior is None

    def _coefficients_beyond(self, other: MaxentDensity) -> Array:
        """The differences of the coefficients, with zeros where one has fewer."""
        longest = max(len(self.coefficients), len(other.coefficients))
        own, theirs = (
            np.pad(each, (0, longest - len(each)))
            for each in (self.coefficients, other.coefficients)
        )
        return own - theirs

    def _moments_to(self, other: MaxentDensity) -> Array:
        """Chebyshev moments of this density to the higher of both orders."""
        count = max(len(self.coefficients), len(other.coefficients)) - 1
        return self.moments(count, "chebyshev") if count >= len(self.coefficients) else self.matched

    def _masses(self) -> Array:
        return self.weights * self.values

    def _distribution(self) -> tuple[Array, Array]:
        places = np.concatenate([[self.bounds[0]], self.grid, [self.bounds[1]]])
        inside = np.maximum.accumulate(running_mass(self._masses()).clip(0.0, 1.0))
        below = np.concatenate([[0.0], inside, [1.0]])
        # nodes at the ends are closer than the digits of λ
        apart = np.append(True, np.diff(places) > 0)
        places, below = places[apart], below[apart]
        below[-1] = 1.0
        return places, below
