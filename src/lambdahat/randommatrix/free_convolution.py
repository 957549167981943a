"""Free additive convolution of a known spectrum with a law of noise, by subordination.

With S_μ the Stieltjes transform of the known spectrum, that of the sum is S(z) = S_μ(ω(z)), and ω
inverts

    H(ω) = ω + R(S_μ(ω)) = ω + c + Σ_j ρ_j/(ω − p_j),  ρ_j > 0.

Im H(u + iv) = v·(1 − Σ_j ρ_j/((u − p_j)² + v²)) vanishes for each real u at one height v(u) at
most, and x(u) = H(u + iv(u)) grows with u (Biane 1997 for the semicircle). So every reading is a
monotone search: none of the fixed points that converge slowly near the real axis, and edges are
roots between known poles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from lambdahat._core.check import require, require_count
from lambdahat.randommatrix.bulk import bulk_within
from lambdahat.randommatrix.cumulants import cumulants_of, moments_of
from lambdahat.randommatrix.laws import Complex, Law
from lambdahat.randommatrix.secular import Secular
from lambdahat.results import Array, Spectrum

ROUNDING = 1e-12  # of a mass, or of an eigenvalue to the whole spectrum
TINY = 1e-200


@dataclass(frozen=True)
class Outlier:
    """An eigenvalue ``value`` of the sum that stands apart, the ``spike`` it comes from, and
    |⟨φ', φ⟩|² of the two.
    """

    spike: float
    value: float
    overlap: float


@dataclass(frozen=True, eq=False)
class FreeSum:
    """The spectrum of A + W: A with eigenvalues ``nodes`` in shares ``weights``, W noise with
    spectrum ``law``.

    ``spikes`` are eigenvalues of A too few to carry a share of the spectrum. Made by ``free_sum``.
    """

    nodes: Array
    weights: Array
    law: Law
    spikes: tuple[float, ...] = ()
    _secular: Secular = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "_secular", Secular(*self.law.partial_fractions(self.nodes, self.weights))
        )

    @cached_property
    def edges(self) -> tuple[tuple[float, float], ...]:
        """The intervals that carry the density, from left to right."""
        return tuple((float(low), float(high)) for low, high in self._secular.support)

    @cached_property
    def atoms(self) -> tuple[tuple[float, float], ...]:
        """(place, mass) of what stays degenerate: λ with weight w + atom − 1, where that is
        positive.
        """
        left = self.weights + self.law.atom - 1
        return tuple(
            (float(node), float(mass))
            for node, mass in zip(self.nodes, left, strict=True)
            if mass > ROUNDING
        )

    @cached_property
    def masses(self) -> tuple[float, ...]:
        """The share of eigenvalues in each of ``edges``."""
        ends = self._level(self._secular.ends.ravel().astype(np.complex128)).reshape(-1, 2)
        return tuple(float(mass) for mass in ends[:, 1] - ends[:, 0])

    @cached_property
    def outliers(self) -> tuple[Outlier, ...]:
        """Where the spikes appear, if beyond the bulk: λ' = H(λ) with overlap H'(λ), largest first.

        Exists where H'(λ) > 0 (Benaych-Georges and Nadakuditi 2011; Belinschi et al. 2017). For A =
        λφφᵀ and a semicircle these are λ + s²/λ and 1 − s²/λ² beyond |λ| > s (Theorems 14 and 17,
        spectral thesis).
        """
        spikes = np.array(sorted(self.spikes, reverse=True))
        values, overlaps = self._secular.value(spikes), self._secular.slope(spikes)
        found = zip(spikes, values, overlaps, strict=True)
        return tuple(
            Outlier(float(at), float(value), float(overlap))
            for at, value, overlap in found
            if overlap > 0
        )

    @property
    def edge_slope(self) -> float:
        """c in ρ(x) → (c/π)·√(λ₊ − x) at the uppermost edge λ₊: |S_μ'(u)|·√(2/H''(u)) where
        H'(u) = 0.
        """
        u = float(self._secular.ends[-1, 1])
        return float(
            (self.weights / (u - self.nodes) ** 2).sum() * math.sqrt(2 / self._secular.bend(u))
        )

    def density(self, x: ArrayLike) -> Array:
        """ρ at ``x``, without atoms and outliers."""
        return np.maximum(-self.stieltjes(x).imag / math.pi, 0.0)

    def cdf(self, x: ArrayLike) -> Array:
        """The share of eigenvalues at or below ``x``; outliers carry none.

        In closed form: −∫S dz = −∫S_μ dH, and ∫S_μ dH = Σ_j w_j·log(ω − λ_j) + S·R(S) − ∫R dS.
        """
        at = np.asarray(x, np.float64)
        flat, (low, high) = at.ravel(), np.array(self.edges).T[..., None]
        jumps = [*zip(high[:, 0], self.masses, strict=True), *self.atoms]
        found = sum(
            (np.where(flat >= place, mass, 0.0) for place, mass in jumps), np.zeros_like(flat)
        )
        inside = ((low < flat) & (flat < high)).any(axis=0)
        found[inside] = self._level(self._secular.preimage(flat[inside]))
        return np.asarray(np.clip(found, 0.0, 1.0).reshape(at.shape))

    def stieltjes(self, x: ArrayLike) -> Complex:
        """S at real ``x``, its limit from above: the principal value of ∫ρ/(x − λ) less iπρ(x)."""
        at = np.asarray(x, np.float64)
        require(bool(np.isfinite(at).all()), "x", "be finite", at)
        return self._bare(self._secular.preimage(at.ravel())).reshape(at.shape)

    def moment(self, order: int) -> float:
        """∫λᵏ of the sum, k = ``order``: its free cumulants are those of A plus those of W."""
        k = require_count(order, "order", least=0)
        plain = np.array([float(self.weights @ self.nodes**power) for power in range(k + 1)])
        noise = np.array([0.0, *(self.law.free_cumulant(power) for power in range(1, k + 1))])
        return float(moments_of(cumulants_of(plain) + noise)[k])

    def _bare(self, omega: Complex) -> Complex:
        """S_μ(ω), as many as ω."""
        return np.asarray([(self.weights / self._gaps(at)).sum() for at in omega], np.complex128)

    def _level(self, omega: Complex) -> Array:
        """The share of eigenvalues below H(ω), by the closed form of ``cdf``."""
        s = self._bare(omega)
        logs = np.array(
            [(self.weights * np.log(self._gaps(at))).sum() for at in omega], np.complex128
        )
        potential = logs + s * self.law.r_transform(s) - self.law.r_integral(s)
        return np.asarray(1 - potential.imag / math.pi)

    def _gaps(self, at: complex) -> Complex:
        """ω − λ_j; where ω meets an eigenvalue, at an atom or the hard edge of a square matrix,
        next to it.
        """
        gaps = at - self.nodes
        return np.where(gaps == 0, TINY, gaps)


def free_sum(
    spectrum: Spectrum | ArrayLike,
    law: Law,
    weights: ArrayLike | None = None,
    spikes: ArrayLike = (),
) -> FreeSum:
    """The spectrum of A + W for a known symmetric A and free noise W with spectrum ``law``.

    ``spectrum`` holds eigenvalues of A (n,), in equal shares or ``weights`` (n,), or is a
    ``Spectrum``, whose outliers then are spikes. ``spikes`` are eigenvalues that are too few to
    carry a share, such as the largest of a Hessian.

    >>> from lambdahat.randommatrix import Semicircle
    >>> free_sum(0.0, Semicircle(1.0), spikes=[2.0]).outliers
    (Outlier(spike=2.0, value=2.5, overlap=0.75),)
    """
    require(isinstance(law, Law), "law", "be a Semicircle or MarchenkoPastur", law, error=TypeError)
    extra = np.atleast_1d(np.asarray(spikes, np.float64))
    if isinstance(spectrum, Spectrum):
        require(weights is None, "weights", "be None with a Spectrum, which has its own", weights)
        nodes, shares, found = _without_outliers(spectrum)
        extra = np.append(extra, found)
    else:
        nodes = np.atleast_1d(np.asarray(spectrum, np.float64))
        shares = (
            np.ones_like(nodes)
            if weights is None
            else np.atleast_1d(np.asarray(weights, np.float64))
        )
    require(nodes.ndim == 1 and nodes.size > 0, "spectrum", "hold eigenvalues (n,)", nodes)
    require(bool(np.isfinite(nodes).all()), "spectrum", "be finite", "NaN or infinity")
    require(
        shares.shape == nodes.shape,
        "weights",
        f"have shape {nodes.shape}, one for each eigenvalue",
        shares,
    )
    sound = bool(np.isfinite(shares).all()) and bool((shares >= 0).all()) and shares.sum() > 0
    require(sound, "weights", "be finite, none negative, not all 0", shares)
    require(
        extra.ndim == 1 and bool(np.isfinite(extra).all()),
        "spikes",
        "be finite eigenvalues (k,)",
        extra,
    )
    return FreeSum(
        *_merged(nodes, shares / shares.sum(), law), law, tuple(float(spike) for spike in extra)
    )


def _merged(nodes: Array, shares: Array, law: Law) -> tuple[Array, Array]:
    """Distinct eigenvalues in increasing order with their shares; those that rounding can hardly
    part become one.
    """
    order = np.argsort(nodes[shares > 0])
    places, mass = nodes[shares > 0][order], shares[shares > 0][order]
    scale = np.abs(places).max() + math.sqrt(law.free_cumulant(2))
    group = np.concatenate([[0], (np.diff(places) > ROUNDING * scale).cumsum()])
    total = np.asarray(np.bincount(group, mass), np.float64)
    return np.bincount(group, mass * places) / total, total


def _without_outliers(spectrum: Spectrum) -> tuple[Array, Array, Array]:
    """Bulk nodes and weights of all probes, and the outliers: each is one eigenvalue, whatever
    its probes' weights.
    """
    found = np.array([float(outlier) for outlier in spectrum.outliers()])
    nodes, weights = bulk_within(spectrum, found)
    if nodes.size:
        return nodes, weights, found
    # each eigenvalue is known, and has its share
    return spectrum.nodes.ravel(), spectrum.weights.ravel(), found[:0]
