"""Free additive convolution of a known spectrum with a law of noise, by subordination.

With S_μ the Stieltjes transform of the known spectrum, that of the sum is S(z) = S_μ(ω(z)), and ω
inverts

    H(ω) = ω + R(S_μ(ω)) = ω + c + Σ_j ρ_j/(ω − p_j),  ρ_j > 0.

Im H(u + iv) = v·(1 − Σ_j ρ_j/((u − p_j)² + v²)) vanishes for each real u at one height v(u) at
most, and x(u) = H(u + iv(u)) grows with u (Biane 1997 for the semicircle). So every reading is a
monotone search: none of the fixed points that converge slowly near the real axis, and edges are
roots between known poles.

The law of Tracy and Widom, also here, says how the largest eigenvalue varies about the edge.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import airy

from lambdahat._core.check import require, require_count, require_number, require_type
from lambdahat.randommatrix.bulk import bulk_within
from lambdahat.randommatrix.laws import Complex, Law, MarchenkoPastur
from lambdahat.results import Array, Spectrum

EPS = float(np.finfo(np.float64).eps)
CHUNK = 1 << 21  # elements of a table (points, poles)
HALVINGS = 200  # more than float64 needs to part any two numbers
ROUNDING = 1e-12  # of a mass, or of an eigenvalue to the whole spectrum
TINY = 1e-200
LEFT, RIGHT = -10.0, 16.0  # less than 1e-16 of the mass lies beyond
ORDER = 40  # nodes of the Fredholm determinant, which then is right to 2e-14
REACH = 16.0  # Ai(16) = 4e-20
NODES, WEIGHTS = np.polynomial.legendre.leggauss(ORDER)


def moments_of(cumulants: Array) -> Array:
    """m_0 … m_k from κ_1 … κ_k: m_n = Σ_{s≤n} κ_s·[z^{n−s}] M(z)^s with M(z) = Σ_n m_n zⁿ."""
    moments = np.zeros(len(cumulants))
    moments[0] = 1.0
    for n in range(1, len(cumulants)):
        moments[n] = _by_parts(cumulants, moments, n) + cumulants[n]
    return moments


def cumulants_of(moments: Array) -> Array:
    """κ_0 = 0, κ_1 … κ_k from m_0 … m_k, by the same relation."""
    cumulants = np.zeros(len(moments))
    for n in range(1, len(moments)):
        cumulants[n] = moments[n] - _by_parts(cumulants, moments, n)
    return cumulants


def _by_parts(cumulants: Array, moments: Array, n: int) -> float:
    """Σ_{s=1}^{n−1} κ_s·[z^{n−s}] M(z)^s: everything but κ_n, whose factor is 1."""
    total, power = 0.0, np.eye(1, n + 1)[0]
    for s in range(1, n):
        power = np.convolve(power, moments[: n + 1])[: n + 1]
        total += cumulants[s] * power[n - s]
    return float(total)


class Secular:
    """H(ω) = ω + c + Σ_j ρ_j/(ω − p_j) with ``shift`` c, ``residues`` ρ (n,) and ``poles`` p (n,).

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
            terms = self.residues / (at[..., None] - self.poles)
        return np.asarray(at + self.shift + terms.sum(axis=-1))

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
        """Roots of H' = 0, (k, 2): one beyond each end of the poles, two in each open gap."""
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
        rising = _root(self.slope, left, middle)
        falling = _root(lambda u: -self.slope(u), middle, right)
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
            done = np.abs(error) <= EPS * self.scale
            done |= b - a <= EPS * np.maximum(np.abs(a), np.abs(b))
            active = active[~done]
            if not len(active):
                break
        return omega

    def _brackets(self, x: Array) -> tuple[Array, Array]:
        """Real u on either side of Re ω(x): neighbouring ends, or H(u) ≷ u + c beyond them."""
        ends, marks = self.ends.ravel(), self.support.ravel()
        place = np.searchsorted(marks, x)
        beyond, last = x - self.shift, len(ends) - 1
        low = np.where(place > 0, ends[np.maximum(place - 1, 0)], np.minimum(beyond, ends[0]))
        high = np.where(place <= last, ends[np.minimum(place, last)], np.maximum(beyond, ends[-1]))
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
    """Zeros of a rising function in many brackets at once, by bisection."""
    low, high = low.astype(np.float64), high.astype(np.float64)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if bool(((middle == low) | (middle == high)).all()):
            break
        below = function(middle) < 0
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return (low + high) / 2


@dataclass(frozen=True)
class Outlier:
    """An outlier ``value`` of the sum, the ``spike`` it comes from, and ``overlap`` |⟨φ', φ⟩|²."""

    spike: float
    value: float
    overlap: float


@dataclass(frozen=True, eq=False)
class FreeSum:
    """The spectrum of A + W: A with eigenvalues ``nodes`` in shares ``weights``, W of ``law``.

    ``spikes`` are eigenvalues of A too few to carry a share of the spectrum. Made by ``free_sum``.
    """

    nodes: Array
    weights: Array
    law: Law
    spikes: tuple[float, ...] = ()
    _secular: Secular = field(init=False, repr=False)

    def __post_init__(self) -> None:
        secular = Secular(*self.law.partial_fractions(self.nodes, self.weights))
        object.__setattr__(self, "_secular", secular)

    @cached_property
    def edges(self) -> tuple[tuple[float, float], ...]:
        """The intervals that carry the density, from left to right."""
        return tuple((float(low), float(high)) for low, high in self._secular.support)

    @cached_property
    def atoms(self) -> tuple[tuple[float, float], ...]:
        """(place, mass) of what stays degenerate: λ with mass w + atom − 1 > 0."""
        left = self.weights + self.law.atom - 1
        kept = np.stack([self.nodes, left], axis=1)[left > ROUNDING]
        return tuple((float(node), float(mass)) for node, mass in kept)

    @cached_property
    def masses(self) -> tuple[float, ...]:
        """The share of eigenvalues in each of ``edges``."""
        ends = self._level(self._secular.ends.ravel().astype(np.complex128)).reshape(-1, 2)
        return tuple(float(mass) for mass in ends[:, 1] - ends[:, 0])

    @cached_property
    def outliers(self) -> tuple[Outlier, ...]:
        """Where the spikes appear, if beyond the bulk: λ' = H(λ) with overlap H'(λ), largest first.

        They exist where H'(λ) > 0 (Benaych-Georges and Nadakuditi 2011; Belinschi et al. 2017). For
        A = λφφᵀ and a semicircle these are λ + s²/λ and 1 − s²/λ² beyond |λ| > s (Theorems 14 and
        17, spectral thesis).
        """
        spikes = np.array(sorted(self.spikes, reverse=True))
        values, overlaps = self._secular.value(spikes), self._secular.slope(spikes)
        rows = np.stack([spikes, values, overlaps], axis=1)[overlaps > 0]
        return tuple(Outlier(*(float(part) for part in row)) for row in rows)

    @property
    def edge_slope(self) -> float:
        """c in ρ(x) → (c/π)·√(λ₊ − x) at the upper edge: |S_μ'(u)|·√(2/H''(u)) where H'(u) = 0."""
        u = float(self._secular.ends[-1, 1])
        slope = (self.weights / (u - self.nodes) ** 2).sum()
        return float(slope * math.sqrt(2 / self._secular.bend(u)))

    def density(self, x: ArrayLike) -> Array:
        """ρ at ``x``, without atoms and outliers."""
        return np.maximum(-self.stieltjes(x).imag / math.pi, 0.0)

    def cdf(self, x: ArrayLike) -> Array:
        """The share of eigenvalues at or below ``x``; outliers carry none.

        In closed form: −∫S dz = −∫S_μ dH, and ∫S_μ dH = Σ_j w_j·log(ω − λ_j) + S·R(S) − ∫R dS.
        """
        at = np.asarray(x, np.float64)
        flat, (low, high) = at.ravel(), np.array(self.edges).T[..., None]
        shares = np.zeros_like(flat)
        for place, mass in [*zip(high[:, 0], self.masses, strict=True), *self.atoms]:
            shares += np.where(flat >= place, mass, 0.0)
        inside = ((low < flat) & (flat < high)).any(axis=0)
        shares[inside] = self._level(self._secular.preimage(flat[inside]))
        return np.asarray(np.clip(shares, 0.0, 1.0).reshape(at.shape))

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
        sums = [(self.weights * np.log(self._gaps(at))).sum() for at in omega]
        logs = np.array(sums, np.complex128)
        potential = logs + s * self.law.r_transform(s) - self.law.r_integral(s)
        return np.asarray(1 - potential.imag / math.pi)

    def _gaps(self, at: complex) -> Complex:
        """ω − λ_j, kept off 0, which occurs at an atom or at a hard edge."""
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
    require_type(law, Law, "law", "be a Semicircle or MarchenkoPastur")
    extra = np.atleast_1d(np.asarray(spikes, np.float64))
    if isinstance(spectrum, Spectrum):
        require(weights is None, "weights", "be None with a Spectrum, which has its own", weights)
        outliers = np.array([float(outlier) for outlier in spectrum.outliers()])
        nodes, shares = bulk_within(spectrum, outliers)
        if nodes.size:
            extra = np.append(extra, outliers)
        else:  # each eigenvalue is known, and has its share
            nodes, shares = spectrum.nodes.ravel(), spectrum.weights.ravel()
    else:
        nodes = np.atleast_1d(np.asarray(spectrum, np.float64))
        shares = np.atleast_1d(
            np.ones_like(nodes) if weights is None else np.asarray(weights, np.float64)
        )
    require(nodes.ndim == 1 and nodes.size > 0, "spectrum", "hold eigenvalues (n,)", nodes)
    require(bool(np.isfinite(nodes).all()), "spectrum", "be finite", "NaN or infinity")
    fine = shares.shape == nodes.shape
    require(fine, "weights", f"have shape {nodes.shape}, one for each eigenvalue", shares)
    sound = bool(np.isfinite(shares).all()) and bool((shares >= 0).all()) and shares.sum() > 0
    require(sound, "weights", "be finite, none negative, not all 0", shares)
    fine = extra.ndim == 1 and bool(np.isfinite(extra).all())
    require(fine, "spikes", "be finite eigenvalues (k,)", extra)
    merged = _merge(nodes, shares / shares.sum(), law)
    return FreeSum(*merged, law, tuple(float(spike) for spike in extra))


def _merge(nodes: Array, shares: Array, law: Law) -> tuple[Array, Array]:
    """Distinct eigenvalues in increasing order with their shares, merged up to rounding."""
    order = np.argsort(nodes[shares > 0])
    places, mass = nodes[shares > 0][order], shares[shares > 0][order]
    scale = np.abs(places).max() + math.sqrt(law.free_cumulant(2))
    group = np.concatenate([[0], (np.diff(places) > ROUNDING * scale).cumsum()])
    total = np.asarray(np.bincount(group, mass), np.float64)
    return np.bincount(group, mass * places) / total, total


@dataclass(frozen=True)
class TracyWidom:
    """The law TW₁ of the largest eigenvalue of real symmetric noise, standardised.

    ``edge_fluctuation`` gives centre and scale. F(s) = det(1 − K_s) with K_s(x, y) = Ai(x + y + s)
    on L²(0, ∞) (Ferrari and Spohn 2005), by Gauss–Legendre quadrature (Bornemann 2010): the error
    falls exponentially with the number of nodes.

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
        require_number(share, "share", "(0, 1)")
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
    """(centre, scale): the largest eigenvalue of P × P noise is centre + scale·TW₁ for large P.

    Where ρ(x) → (c/π)·√(λ₊ − x), centre → λ₊ and scale → (Pc)^(−2/3): s·P^(−2/3) for a semicircle.
    For the two laws both have the corrections for finite sizes of Johnstone and Ma (2012): P and T
    less ½. For a ``FreeSum`` it is the edge of the bulk; an outlier beyond it varies by O(P^(−1/2))
    instead.
    """
    size = require_count(dimension, "dimension")
    require_type(law, Law | FreeSum, "law", "be a Semicircle, MarchenkoPastur or FreeSum")
    if isinstance(law, MarchenkoPastur):
        columns = max(size / law.ratio, 1.0)
        p, t = math.sqrt(size - 0.5), math.sqrt(columns - 0.5)
        unit = law.variance * (p + t) / columns
        return unit * (p + t), unit * (1 / p + 1 / t) ** (1 / 3)
    scale = float((size * law.edge_slope) ** (-2 / 3))
    if isinstance(law, FreeSum):
        return law.edges[-1][1], scale
    return law.edges[1] * math.sqrt(1 - 0.5 / size), scale


def _distribution(s: float) -> tuple[float, float]:
    """F(s) and F'(s)."""
    if not LEFT < s < RIGHT:
        return float(s >= RIGHT), 0.0
    half = (REACH - s) / 2
    x, root = half * (NODES + 1), np.sqrt(half * WEIGHTS)
    value, slope, _, _ = airy(x[:, None] + x + s)
    kernel = np.eye(ORDER) - root[:, None] * value * root
    change = np.linalg.solve(kernel, root[:, None] * slope * root)
    share = min(max(float(np.linalg.det(kernel)), 0.0), 1.0)
    return share, max(-share * float(np.trace(change)), 0.0)


@cache
def _moments() -> tuple[float, float]:
    """Mean and variance."""
    nodes, weights = np.polynomial.legendre.leggauss(100)
    half = (RIGHT - LEFT) / 2
    at = LEFT + half * (nodes + 1)
    mass = half * weights * TracyWidom().density(at)
    mean = float(mass @ at)
    return mean, float(mass @ (at - mean) ** 2)
