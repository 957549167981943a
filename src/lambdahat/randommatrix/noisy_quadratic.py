"""Averaging the iterates of a noisy quadratic: exact laws, bounds and when averaging wins
(§7.5–7.6, spectral thesis).

L(w) = ½Σ_j λ_j w_j² is descended by w ← w − α(λw + ε), ε of variance σ², independently along each
eigenvector. With φ = 1 − αλ and V = ασ²/(λ(2 − αλ)), after n steps from w₀

    final      mean φⁿw₀                              variance V(1 − φ²ⁿ)
    average    mean w₀φ(1 − φⁿ)/(nαλ)                 variance σ²/(λn)²·Σ_{k≤n}(1 − φᵏ)²  →
               σ²/(λ²n)
    EMA        mean w₀(ρⁿ + (1−ρ)φ(φⁿ − ρⁿ)/(φ − ρ))  variance  →  V(1−ρ)(1+ρφ)/((1+ρ)(1−ρφ))

for the average of w₁ … w_n and the moving average a ← ρa + (1−ρ)w from a = w₀. The thesis prints
other variances for all three (``NoisyQuadratic.printed``). A preconditioned method, w ← w − αB⁻¹(Hw
+ ε) with B diagonal in the eigenbasis, has the rate α/B_j along direction j.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.optimize import brentq

from lambdahat._core.check import require, require_choice, require_count, require_number
from lambdahat._core.progress import report
from lambdahat._core.rng import generator
from lambdahat._core.storage import Result
from lambdahat.results import Array

KINDS = ("final", "average", "ema")
GRID = 2**0.125  # ratio of the steps at which losses are compared


@dataclass(frozen=True)
class IterateLaw(Result):
    """The Gaussian law of a point: ``mean`` and ``variance`` along each eigenvector, all (P,)."""

    mean: Array
    variance: Array
    curvatures: Array

    @property
    def loss(self) -> float:
        """E L(w) = ½Σ_j λ_j(mean² + variance)."""
        return float(0.5 * (self.curvatures * (self.mean**2 + self.variance)).sum())

    @property
    def squared_norm(self) -> float:
        """E‖w‖² = Σ_j (mean² + variance), near ‖w‖² for large P (Theorem 18, spectral thesis)."""
        return float((self.mean**2 + self.variance).sum())

    @property
    def norm_spread(self) -> float:
        """The standard deviation of ‖w‖, to first order in that of ‖w‖²."""
        spread = math.sqrt(float((2 * self.variance**2 + 4 * self.mean**2 * self.variance).sum()))
        return spread / (2 * math.sqrt(self.squared_norm)) if spread else 0.0


class Trajectories(NamedTuple):
    """Simulated points, each (replicas, P)."""

    final: Array
    average: Array
    ema: Array


class NoisyQuadratic:
    """Descent at a fixed ``rate`` on a quadratic with ``curvatures`` λ ≥ 0 (P,), with noise.

    ``rate``, ``noise`` (the variance of a batch's gradient, σ²/B) and ``start`` are numbers, or
    (P,) along the eigenvectors.

    >>> NoisyQuadratic([1.0, 10.0], rate=0.1).final(1000).variance.round(4)
    array([0.0526, 0.01  ])
    """

    def __init__(
        self, curvatures: ArrayLike, rate: ArrayLike, noise: ArrayLike = 1.0, start: ArrayLike = 0.0
    ) -> None:
        self.curvatures = np.asarray(curvatures, dtype=np.float64)
        fine = self.curvatures.ndim == 1 and self.curvatures.size > 0
        fine = fine and bool((self.curvatures >= 0).all())
        require(fine, "curvatures", "be a list of numbers of at least 0", self.curvatures)
        size = len(self.curvatures)
        self.rate, self.noise = _along(rate, "rate", size), _along(noise, "noise", size)
        self.start = _along(start, "start", size)
        stable = bool((self.rate > 0).all() and (self.rate * self.curvatures < 2).all())
        expected = f"lie in (0, 2/λ) along each direction, λ up to {self.curvatures.max():.4g}"
        got = f"up to {self.rate.max():.4g}"
        require(stable, "rate", expected, got, "the iterates run away beyond it")
        require(bool((self.noise >= 0).all()), "noise", "be a variance, at least 0", self.noise)

    @property
    def contraction(self) -> Array:
        """φ = 1 − αλ, (P,)."""
        return 1.0 - self.rate * self.curvatures

    @property
    def stationary_variance(self) -> Array:
        """V = ασ²/(λ(2 − αλ)) (P,): the final iterate's variance; infinite where λ = 0 < σ²."""
        with np.errstate(divide="ignore", invalid="ignore"):
            out = self.rate * self.noise / (self.curvatures * (2.0 - self.rate * self.curvatures))
        return np.where(self.noise == 0, 0.0, out)

    def stationary_ema_variance(self, decay: float) -> Array:
        """V(1−ρ)(1+ρφ)/((1+ρ)(1−ρφ)), (P,): the moving average's variance after many steps."""
        rho, phi = require_number(decay, "decay", "[0, 1)"), self.contraction
        final = self.stationary_variance
        return final * (1 - rho) * (1 + rho * phi) / ((1 + rho) * (1 - rho * phi))

    def final(self, steps: int) -> IterateLaw:
        """The law of w_n."""
        return self._law(*self._running(0.0, 1.0, 0.0, steps))

    def average(self, steps: int, with_start: bool = False) -> IterateLaw:
        """The law of (w₁ + … + w_n)/n, or with the start of (w₀ + … + w_n)/(n + 1)."""
        mean, variance = self._running(1.0, 1.0, 1.0 if with_start else 0.0, steps)
        count = steps + with_start
        return self._law(mean / count, variance / count**2)

    def ema(self, steps: int, decay: float) -> IterateLaw:
        """The law of a_n, a ← ρa + (1 − ρ)w from a = w₀, ρ = ``decay``."""
        rho = require_number(decay, "decay", "[0, 1)")
        return self._law(*self._running(rho, 1.0 - rho, 1.0, steps))

    def printed(self, kind: str, steps: int, decay: float = 0.0) -> IterateLaw:
        """The laws as §7.5 and §7.5.2 of the thesis print them; simulation disagrees with them."""
        require_choice(kind, "kind", KINDS)
        require_count(steps, "steps", least=2)
        fine = bool((self.curvatures > 0).all())
        require(fine, "curvatures", "be above 0 for the printed laws", self.curvatures)
        phi, scale = self.contraction, self.rate * self.noise / self.curvatures
        left, share = 1 - phi ** (steps - 2), 1 / (steps * self.rate * self.curvatures)
        if kind == "final":
            return self._law(phi**steps * self.start, scale * left)
        if kind == "average":
            return self._law(left * share * self.start, scale / steps)
        rho = require_number(decay, "decay", "[0, 1)")
        apart = np.where(phi == rho, np.inf, phi - rho)
        power = steps - 1
        tail = np.where(phi == rho, power * rho ** (power - 1), (phi**power - rho**power) / apart)
        mean = (1 - rho) * self.start * phi**2 * tail
        return self._law(mean, (1 - rho) / (1 + rho) * scale * left)

    def simulate(
        self, steps: int, replicas: int = 1000, decay: float = 0.9, seed: int = 0
    ) -> Trajectories:
        """Final iterate, average and moving average of ``replicas`` independent runs."""
        require_count(steps, "steps")
        require_count(replicas, "replicas")
        rho = require_number(decay, "decay", "[0, 1)")
        rng = generator(seed, "noisy quadratic")
        w = np.broadcast_to(self.start, (replicas, len(self.start))).copy()
        total, moving, deviation = np.zeros_like(w), w.copy(), np.sqrt(self.noise)
        for step in range(steps):
            draw = torch.randn(w.shape, generator=rng, dtype=torch.float64).numpy()
            w -= self.rate * (self.curvatures * w + deviation * draw)
            total += w
            moving += (1 - rho) * (w - moving)
            report("noisy quadratic", step + 1, steps)
        return Trajectories(w, total / steps, moving)

    def _law(self, mean: Array, variance: Array) -> IterateLaw:
        return IterateLaw(mean, variance, self.curvatures)

    def _running(self, forget: float, take: float, begin: float, steps: int) -> tuple[Array, Array]:
        """Mean and variance (P,) of a_n, a ← forget·a + take·w from a = begin·w₀.

        (w, a) is a linear recursion driven by noise; n steps are composed by doubling, which is
        exact where the closed forms cancel, as for λ → 0 or φ → ρ.
        """
        require_count(steps, "steps")
        phi, zero = self.contraction, np.zeros_like(self.contraction)
        one = np.array([[phi, zero], [take * phi, zero + forget]]).transpose(2, 0, 1)
        push = (self.rate * np.sqrt(self.noise))[:, None] * np.array([1.0, take])
        kick = push[:, :, None] * push[:, None, :]
        power, spread = np.broadcast_to(np.eye(2), one.shape), np.zeros_like(one)
        for bit in bin(steps)[2:]:
            power, spread = power @ power, spread + power @ spread @ power.transpose(0, 2, 1)
            if bit == "1":
                power, spread = one @ power, one @ spread @ one.transpose(0, 2, 1) + kick
        return (power[:, 1, 0] + begin * power[:, 1, 1]) * self.start, spread[:, 1, 1]


def average_loss_bound(quadratic: NoisyQuadratic, steps: int) -> float:
    """Martens's bound on the expected loss of the average of w₀ … w_n for αB⁻¹H ≤ 1 (Eq. 7.38).

    min(Tr(H⁻¹Σ)/(n+1), ½Tr(αB⁻¹Σ)) + min(‖H^{−½}Bw₀‖²/((n+1)α)², ‖B^½w₀‖²/((n+1)α), 3L(w₀)), Σ the
    noise. Only the rates α/B_j enter. SGD is α_j = α (Eq. 7.39), Adam with B = H^½ is α_j = α/√λ_j
    (Eq. 7.40). The bound is about twice ``quadratic.average(n, with_start=True).loss`` for large n.
    """
    require_count(steps, "steps")
    curvatures, rate, count = quadratic.curvatures, quadratic.rate, steps + 1
    squares = quadratic.start**2
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = np.where(quadratic.noise > 0, quadratic.noise / curvatures, 0.0).sum()
        bent = np.where(squares > 0, squares / (curvatures * (count * rate) ** 2), 0.0).sum()
    noise = min(inverse / count, 0.5 * (rate * quadratic.noise).sum())
    start = min(bent, (squares / rate).sum() / count, 1.5 * (curvatures * squares).sum())
    return float(noise + start)


def final_loss_bound(quadratic: NoisyQuadratic) -> float:
    """½Tr(αB⁻¹Σ), the bound on the expected loss of the last of many iterates for αB⁻¹H ≤ 1.

    The limit itself is ½Σ_j α_jσ²/(2 − α_jλ_j), which for SGD is Eq. 7.26. §7.6 of the spectral
    thesis prints ¼Tr(αB⁻¹Σ): that is below it.
    """
    return float(0.5 * (quadratic.rate * quadratic.noise).sum())


def matching_rate(curvatures: ArrayLike, steps: int, noise: ArrayLike = 1.0) -> float:
    """The rate below which the last of many iterates beats an average of n (Theorem 19, exactly).

    The root of Eq. 7.27, Σ_j ασ_j²/(2 − αλ_j) = Σ_j σ_j²/(λ_j(n + 1)), on (0, 2/λ₁): it falls as
    1/n. The printed solution, 2/(2 + n)·mean(1/λ) (Eq. 7.28), is correct if all λ are equal, and
    may otherwise be beyond 2/λ₁.
    """
    require_count(steps, "steps")
    require(np.size(curvatures) > 0, "curvatures", "be one or more numbers", "none")
    rate = 1e-3 / max(float(np.max(np.asarray(curvatures))), 1e-300)
    given = NoisyQuadratic(curvatures, rate, noise)
    values, sigma = given.curvatures, given.noise
    require(bool((values > 0).all()), "curvatures", "be above 0", values)
    target, most = float((sigma / values).sum()) / (steps + 1), 2 / float(values.max())

    def excess(rate: float) -> float:
        return float((rate * sigma / (2 - rate * values)).sum()) - target

    return float(brentq(excess, 0.0, most * (1 - 1e-12), xtol=1e-14 * most))


def crossing_steps(quadratic: NoisyQuadratic) -> int:
    """The n from which the average of n iterates has a lower expected loss than the n-th iterate.

    Both by their exact laws, at the quadratic's own rate and start, which the final iterate forgets
    as φⁿ and the average as 1/n.
    """
    noisy = bool((quadratic.noise * quadratic.curvatures > 0).any())
    expected = "be above 0 in a direction that bends"
    require(noisy, "noise", expected, quadratic.noise, "without it no average wins")
    bends = quadratic.curvatures > 0  # the rest has no loss
    parts = quadratic.curvatures, quadratic.rate, quadratic.noise, quadratic.start
    quadratic, grid = NoisyQuadratic(*(part[bends] for part in parts)), [2]

    def noise_loss(steps: int) -> float:
        """The final iterate's loss by noise alone, which only grows with the steps."""
        return float(0.5 * (quadratic.curvatures * quadratic.final(steps).variance).sum())

    def average_wins(steps: int) -> bool:
        return quadratic.average(steps).loss < quadratic.final(steps).loss

    # nothing changes beyond
    while 8 * average_loss_bound(quadratic, grid[-1]) > noise_loss(grid[-1]):
        grid.append(max(grid[-1] + 1, round(grid[-1] * GRID)))
    good = grid.pop()
    while grid and average_wins(grid[-1]):
        good = grid.pop()
    bad = grid[-1] if grid else 1  # where both are w₁
    while good - bad > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if average_wins(middle) else (good, middle)
    return good


def _along(value: ArrayLike, name: str, size: int) -> Array:
    """A number or (P,) as (P,)."""
    array = np.asarray(value, dtype=np.float64)
    fine = array.shape in ((), (size,)) and bool(np.isfinite(array).all())
    expected = f"be a finite number, or {size} of them"
    require(fine, name, expected, array if array.ndim else repr(value))
    return np.broadcast_to(array, (size,)).copy()
