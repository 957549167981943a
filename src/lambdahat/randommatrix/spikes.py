"""Outliers seen through sampling noise, and damping as linear shrinkage (§6.3.2, spectral thesis).

A batch shows H̄ + noise, or G^{½}WG^{½} with W a Wishart matrix. Both have one form: with the
bulk's eigenvalues λ_j an eigenvalue ℓ beyond it is seen at ψ(ℓ), as long as ψ'(ℓ) > 0; where ψ'
reaches 0 it drowns in the noisy bulk's edge.

    additive         ψ(ℓ) = ℓ + s²·(1/P)Σ_j 1/(ℓ − λ_j),       overlap² ψ'(ℓ)
    multiplicative   ψ(ℓ) = ℓ·(1 + (1/b)Σ_j λ_j/(ℓ − λ_j)),    overlap² ℓψ'(ℓ)/ψ(ℓ)

With the bulk at 0 the first is Theorems 14 and 17 of the spectral thesis: λ + s²/λ beyond s, else
±2s, overlap² 1 − s²/λ². With a flat bulk σ² the second is the spiked covariance σ²(1+θ)(1 + q/θ)
that its Theorem 16 means (Baik and Silverstein 2006; Paul 2007; for any bulk Bai and Yao 2012,
Benaych-Georges and Nadakuditi 2011).

A step along (Ĥ + δI)⁻¹g at rate α is one along (βĤ + (1−β)tI)⁻¹g at rate αβ, with δ = t(1−β)/β. The
thesis has t = 1 (Eq. 6.5), which is right for curvature in units of its mean eigenvalue alone; t =
tr H̄/P has the right units always.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq

from lambdahat._core.check import (
    require,
    require_count,
    require_finite,
    require_number,
    require_positive,
    require_type,
)
from lambdahat._core.storage import Result
from lambdahat.randommatrix.rate_limits import propagate
from lambdahat.results import Array, Estimate, Spectrum


def effective_batch(batch_size: int, population: int | None = None) -> float:
    """b = B/(1 − B/N): the number of independent draws as noisy as B of N without replacement.

    Eq. 5.5 of the spectral thesis. Infinite at B = N; B itself without ``population``.

    >>> effective_batch(100, 200)
    200.0
    """
    batch_size = require_count(batch_size, "batch_size")
    if population is None:
        return float(batch_size)
    population = require_count(population, "population")
    fine = batch_size <= population
    expected = f"be at most the population, {population}"
    require(fine, "batch_size", expected, repr(batch_size), "a batch is drawn without replacement")
    return math.inf if batch_size == population else batch_size / (1.0 - batch_size / population)


def noise_scale(variance: float, dimension: int, batch: float) -> float:
    """s = σ√(P/b): a batch's noise has a semicircle of radius 2s (Theorem 13, spectral thesis).

    ``variance`` is σ², that of one element over samples; ``batch`` the effective b.
    """
    require_number(variance, "variance", "[0, inf]")
    require_number(batch, "batch", "(0, inf]")
    return math.sqrt(variance * require_count(dimension, "dimension") / batch)


class SpikedModel(ABC):
    """A noisy bulk and its effect on eigenvalues outside it.

    ``thresholds`` (lower, upper) are the true eigenvalues beyond which one stands apart, ``edges``
    those of the noisy bulk. Methods take numbers or arrays and give arrays of the same shape.
    """

    nodes: Array
    weights: Array

    @abstractmethod
    def _sum(self, at: Array, power: int) -> Array:
        """The sum over the bulk, so that ψ' = 1 − _sum(ℓ, 2)."""

    @abstractmethod
    def _seen(self, at: Array) -> Array:
        """ψ(ℓ)."""

    @abstractmethod
    def _shrinkage(self, at: Array) -> Array:
        """The factor between ψ' and the overlap²."""

    @abstractmethod
    def _brackets(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Two intervals that hold the lower and the upper threshold."""

    @abstractmethod
    def coupling(self, first: ArrayLike, second: ArrayLike) -> Array:
        """The variance between batches of the noise's element between two true eigenvectors."""

    @property
    @abstractmethod
    def edge_scales(self) -> tuple[float, float]:
        """The units of Tracy–Widom fluctuations at both edges; 0 in the limit of infinite size."""

    @cached_property
    def thresholds(self) -> tuple[float, float]:
        """The true eigenvalues (lower, upper) beyond which one stands apart: ψ' = 0 there."""
        lower, upper = self._brackets()
        return self._root(*lower), self._root(*upper)

    @cached_property
    def edges(self) -> tuple[float, float]:
        """The ends of the noisy bulk, ψ at the thresholds."""
        return self._at_threshold(0), self._at_threshold(1)

    @property
    def threshold(self) -> float:
        """The upper threshold."""
        return self.thresholds[1]

    @property
    def edge(self) -> float:
        """The upper edge."""
        return self.edges[1]

    def stands_apart(self, eigenvalue: ArrayLike) -> NDArray[np.bool_]:
        """Whether a true eigenvalue is beyond the thresholds."""
        values = np.asarray(eigenvalue, dtype=np.float64)
        return np.asarray((values > self.thresholds[1]) | (values < self.thresholds[0]))

    def outlier(self, eigenvalue: ArrayLike) -> Array:
        """The position at which a true eigenvalue is observed: ψ(ℓ), or the nearer edge if it does
        not stand apart.
        """
        lower, upper = self.thresholds

        def hidden(values: Array) -> Array:
            return np.where(values >= (lower + upper) / 2, self.edges[1], self.edges[0])

        return self._where_apart(eigenvalue, self._seen, hidden)

    def overlap(self, eigenvalue: ArrayLike) -> Array:
        """|φ̂ᵀφ|² of the observed and the true eigenvector; 0 if the eigenvalue does not stand
        apart.
        """
        return self._where_apart(eigenvalue, lambda x: self._slope(x) * self._shrinkage(x))

    def spread(self, eigenvalue: ArrayLike) -> Array:
        """Standard deviation √(2vψ') of the observed eigenvalue between batches; 0 inside the bulk.

        v is its own coupling. For Gaussian noise, whose diagonal varies twice as much as the rest
        (Capitaine et al. 2009; Bai and Yao 2008).
        """
        return self._where_apart(
            eigenvalue, lambda x: np.sqrt(2.0 * self.coupling(x, x) * self._slope(x))
        )

    def relative_shift(self, eigenvalue: ArrayLike) -> Array:
        """(ψ(ℓ) − ℓ)/ℓ outside the true bulk: the effect of noise, proportional to 1/b."""
        values = np.asarray(eigenvalue, dtype=np.float64)
        return np.asarray((self._seen(values) - values) / values)

    def closeness(self, eigenvalue: ArrayLike) -> Array:
        """1 − ψ'(ℓ) outside the true bulk, proportional to 1/b: 1 where an eigenvalue is hidden in
        the bulk.
        """
        return self._sum(np.asarray(eigenvalue, dtype=np.float64), 2)

    def inverse(self, observed: ArrayLike) -> Array:
        """The true eigenvalue of one observed beyond the edges; NaN inside the bulk."""
        values, (lower, upper), (low, high) = np.asarray(observed), self.thresholds, self.edges
        require(not np.isinf(values).any(), "observed", "be finite", "infinity")
        true = np.full(values.size, math.nan)
        for i, seen in enumerate(values.ravel().astype(np.float64).tolist()):
            ends = (upper, seen) if seen > high else (seen, lower)
            if seen > high or (seen < low and seen < lower):

                def excess(x: float, seen: float = seen) -> float:
                    return float(self._seen(np.array(x))) - seen

                true[i] = brentq(excess, *ends, xtol=1e-14)
        return true.reshape(values.shape)

    def _slope(self, at: Array) -> Array:
        return 1.0 - self._sum(at, 2)

    def _where_apart(
        self,
        eigenvalue: ArrayLike,
        beyond: Callable[[Array], Array],
        inside: Callable[[Array], Array] = np.zeros_like,
    ) -> Array:
        values = np.asarray(eigenvalue, dtype=np.float64)
        require_finite(values, "eigenvalue")
        out = np.asarray(inside(values), dtype=np.float64).copy()
        apart = self.stands_apart(values)
        out[apart] = beyond(values[apart])
        return out

    def _root(self, low: float, high: float) -> float:
        """Where ψ' = 0 in an interval that holds one root, or has no width."""
        if high - low <= 1e-15 * max(abs(low), abs(high)):
            return (low + high) / 2
        slopes = [float(self._slope(np.array(end))) for end in (low, high)]
        if slopes[0] * slopes[1] >= 0:  # the root is an end, up to rounding
            return low if abs(slopes[0]) < abs(slopes[1]) else high
        precision = 1e-15 * (high - low) + 1e-300
        return float(brentq(lambda x: float(self._slope(np.array(x))), low, high, xtol=precision))

    def _at_threshold(self, side: int) -> float:
        at = self.thresholds[side]
        return at if at in self.nodes else float(self._seen(np.array(at)))


class Additive(SpikedModel):
    """Symmetric noise on top: H̄ + s·W, W of the GOE with spectrum in [−2, 2].

    ``scale`` is s = σ√(P/b) (``noise_scale``). By default the bulk of H̄ is at 0, as in Theorem 14
    of the spectral thesis; ``eigenvalues`` and ``weights`` (their shares, of any sum) give any
    other. The fluctuations depend on ``dimension``, P, and vanish at its default, infinity.

    >>> model = Additive(1.0)
    >>> float(model.outlier(2.0)), float(model.overlap(2.0)), model.edge, float(model.outlier(-0.5))
    (2.5, 0.75, 2.0, -2.0)
    """

    def __init__(
        self,
        scale: float,
        eigenvalues: ArrayLike = 0.0,
        weights: ArrayLike | None = None,
        dimension: float = math.inf,
    ) -> None:
        self.scale = require_number(scale, "scale", "[0, inf)")
        self.dimension = float(dimension)
        self.nodes, counts = _measure(eigenvalues, weights)
        self.weights = counts / counts.sum()

    def _sum(self, at: Array, power: int) -> Array:
        return np.asarray(self.scale**2 * ((at[..., None] - self.nodes) ** -power @ self.weights))

    def _seen(self, at: Array) -> Array:
        return np.asarray(at + self._sum(at, 1))

    def _shrinkage(self, at: Array) -> Array:
        return np.ones_like(at)

    def _brackets(self) -> tuple[tuple[float, float], tuple[float, float]]:
        # 1/(ℓ − λ)² of all the mass is at most that of its end, and at least that of the end's own
        # share
        near = self.scale * np.sqrt(self.weights[[0, -1]])
        low, high = float(self.nodes[0]), float(self.nodes[-1])
        return (low - self.scale, low - float(near[0])), (high + float(near[1]), high + self.scale)

    def coupling(self, first: ArrayLike, second: ArrayLike) -> Array:
        """s²/P, the same for all."""
        shape = np.broadcast_shapes(np.shape(first), np.shape(second))
        return np.full(shape, self.scale**2 / self.dimension)

    @property
    def edge_scales(self) -> tuple[float, float]:
        """s²·(mean 1/|ℓ* − λ_j|³)^{1/3}·P^{−2/3}; s·P^{−2/3} for a bulk at 0."""
        if self.scale == 0:
            return 0.0, 0.0
        cubes = np.abs(self._sum(np.array(self.thresholds), 3))
        low, high = (self.scale**4 * cubes) ** (1 / 3) * self.dimension ** (-2 / 3)
        return float(low), float(high)


class Multiplicative(SpikedModel):
    """The covariance of ``samples`` Gaussian vectors of true covariance with bulk ``eigenvalues``.

    ``weights`` says how many eigenvalues each stands for (one, by default); ``samples`` is b, and
    need not be whole. Zeros are part of the bulk; negative eigenvalues are refused. With all other
    eigenvalues in the bulk ψ is Lawley's (1956) mean of a sample eigenvalue to order 1/b. For a
    flat bulk σ² of P, q = P/b:

    >>> model = Multiplicative([2.0], [100], samples=50)
    >>> float(model.outlier(2.0 * (1 + 3.0))), 2.0 * (1 + 3.0) * (1 + 2.0 / 3.0)
    (13.333333333333332, 13.333333333333332)
    """

    def __init__(
        self, eigenvalues: ArrayLike, weights: ArrayLike | None = None, samples: float = math.inf
    ) -> None:
        self.samples = require_number(samples, "samples", "(0, inf]")
        self.nodes, self.weights = _measure(eigenvalues, weights)
        fine = bool((self.nodes >= 0).all())
        got = f"{self.nodes[0]:.3g}"
        require(fine, "eigenvalues", "be at least 0", got, "use Additive for an indefinite matrix")

    def _sum(self, at: Array, power: int) -> Array:
        positive = self.nodes > 0  # zeros add nothing, also to an eigenvalue at 0
        nodes = self.nodes[positive]
        ratios = nodes / (at[..., None] - nodes)
        return np.asarray(ratios**power @ self.weights[positive] / self.samples)

    def _seen(self, at: Array) -> Array:
        return np.asarray(at * (1.0 + self._sum(at, 1)))

    def inverse(self, observed: ArrayLike) -> Array:
        """The true eigenvalue of one observed beyond the edges; NaN inside the bulk."""
        values = np.asarray(observed, dtype=np.float64)
        rounding = 1e-12 * self.edges[1]
        least = float(values.min(initial=math.inf))
        expected = "be at least 0, as eigenvalues of a covariance are"
        cure = "use Additive for an indefinite matrix"
        require(not least < -rounding, "observed", expected, f"{least:.3g}", cure)
        return super().inverse(np.maximum(values, 0.0))

    def _shrinkage(self, at: Array) -> Array:
        return np.asarray(1.0 / (1.0 + self._sum(at, 1)))

    def _brackets(self) -> tuple[tuple[float, float], tuple[float, float]]:
        # λ/(ℓ − λ) is monotone in λ on either side of the bulk, so that its ends bound the sum of
        # squares
        positive = self.nodes > 0
        if not positive.any():
            return (0.0, 0.0), (0.0, 0.0)
        nodes, weights = self.nodes[positive], self.weights[positive]
        (low, high), near = nodes[[0, -1]], np.sqrt(weights[[0, -1]] / self.samples)
        far = math.sqrt(weights.sum() / self.samples)
        least = (low if far <= 1 else high) * (1 - far)
        most = low * (1 - (near[0] if far <= 1 else far))
        above = float(high * (1 + near[1])), float(high * (1 + far))
        return (float(least), float(most)), above

    def coupling(self, first: ArrayLike, second: ArrayLike) -> Array:
        """λ_mλ_j/b."""
        product = np.asarray(first, np.float64) * np.asarray(second, np.float64)
        return np.asarray(product / self.samples)

    @property
    def edge_scales(self) -> tuple[float, float]:
        """|ℓ*|·|1 + (1/b)Σ_j (λ_j/(ℓ* − λ_j))³|^{1/3}·b^{−2/3} (El Karoui 2007)."""
        if math.isinf(self.samples) or not self.nodes.any():
            return 0.0, 0.0
        at = np.array(self.thresholds)
        cubes = np.abs(1.0 + self._sum(at, 3)) ** (1 / 3)
        low, high = np.abs(at) * cubes * self.samples ** (-2 / 3)
        return float(low), float(high)


def _measure(eigenvalues: ArrayLike, weights: ArrayLike | None) -> tuple[Array, Array]:
    """Nodes in ascending order with positive weights."""
    nodes = np.asarray(eigenvalues, dtype=np.float64).ravel()
    counts = np.ones_like(nodes) if weights is None else np.asarray(weights, np.float64).ravel()
    fits = nodes.size > 0 and bool(np.isfinite(nodes).all())
    require(fits, "eigenvalues", "be finite, one or more", nodes)
    fits = counts.shape == nodes.shape
    require(fits, "weights", f"be as many as the eigenvalues, {nodes.size}", counts)
    fine = bool((counts >= 0).all()) and 0 < counts.sum() < math.inf
    require(fine, "weights", "be at least 0, not all 0, and finite", counts)
    order = np.argsort(nodes)
    kept = order[counts[order] > 0]
    return nodes[kept], counts[kept]


class Shrinkage(NamedTuple):
    """1/(λ + δ) = 1/(κ(βλ + (1−β)t)): ``kappa`` divides the rate, ``beta`` weighs the estimate."""

    kappa: float
    beta: float


def damping_as_shrinkage(damping: float, target: float = 1.0) -> Shrinkage:
    """κ = 1 + δ/t and β = 1/κ: the effect of a ``damping`` δ (Eq. 6.5 at t = ``target`` = 1).

    >>> damping_as_shrinkage(0.25)
    Shrinkage(kappa=1.25, beta=0.8)
    """
    require_number(damping, "damping", "[0, inf)")
    kappa = 1.0 + damping / require_positive(target, "target")
    return Shrinkage(kappa, 1.0 / kappa)


def shrinkage_as_damping(beta: float, target: float = 1.0) -> float:
    """δ = t(1−β)/β: the damping that shrinks as β towards ``target``·I does."""
    require_number(beta, "beta", "(0, 1]")
    return require_positive(target, "target") * (1.0 - beta) / beta


@dataclass(frozen=True)
class LinearShrinkage(Result):
    """The β of least expected error ‖βĤ + (1−β)tI − H̄‖_F² for a batch's Ĥ, and its ``damping`` δ.

    ``signal`` is ‖H̄ − tI‖_F², ``noise`` E‖Ĥ − H̄‖_F² and ``target`` t = tr H̄/P. ``damping`` is
    NaN if the trace is not positive: then no positive damping shrinks towards it.
    """

    beta: Estimate
    damping: Estimate
    target: Estimate
    signal: Estimate
    noise: Estimate


def linear_shrinkage(
    spectrum: Spectrum, variance: Estimate | float, batch_size: int, population: int | None = None
) -> LinearShrinkage:
    """The optimal shrinkage of a batch's curvature, β = signal/(signal + noise).

    Ledoit and Wolf 2004. ``spectrum`` is that of the full data's curvature H̄, ``variance`` σ² that
    of an element of it over samples (``lh.variance``), ``population`` the N samples that the batch
    is drawn from. With Ĥ = H̄ + E and mean E = 0, E‖βĤ + (1−β)tI − H̄‖_F² = β²·noise +
    (1−β)²·signal, noise = P²σ²/b, signal = ‖H̄ − tI‖_F² = tr H̄² − (tr H̄)²/P, which this β
    minimises. Its error is that of the spectrum's probes and of σ².
    """
    cure = "take it with lh.spectrum(lh.hessian(problem))"
    require_type(spectrum, Spectrum, "spectrum", "be a Spectrum", cure)
    element = variance if isinstance(variance, Estimate) else Estimate(float(variance))
    fine = 0 <= float(element) < math.inf
    require(fine, "variance", "be a finite number of at least 0", str(element))
    size, batch = spectrum.dim, effective_batch(batch_size, population)
    target = spectrum.mean
    signal = spectrum.expectation(lambda nodes: (nodes - float(target)) ** 2, size)
    spread = size**2 * float(element) / batch, size**2 * float(element.stderr) / batch
    noise = Estimate(*spread, dof=element.dof)
    cure = "a multiple of the identity is its own target"
    require(float(signal) > 0, "spectrum", "have some spread", "one eigenvalue, P times", cure)
    beta = propagate(lambda kept, lost: kept / (kept + lost), signal, noise)
    damping = Estimate(math.nan, math.nan)
    if float(target) > 0:
        damping = propagate(lambda mean, kept, lost: mean * lost / kept, target, signal, noise)
    return LinearShrinkage(beta, damping, target, signal, noise)
