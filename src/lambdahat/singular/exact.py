"""Exact answers of singular learning theory: learning coefficients in closed form, and what λ̂
is at finite nβ, γ, ε.

There are normal crossings K(w) = ∏ w_i^{2k_i}, the local form of every analytic loss, deep linear
networks and matrix factorizations, and quadratic losses.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import combinations, pairwise
from operator import mul

import numpy as np
import torch
from torch import Tensor

from lambdahat._core.check import require, require_count, require_number, require_positive
from lambdahat._core.progress import report
from lambdahat._core.rng import generator
from lambdahat.problem import Problem
from lambdahat.results import Array, Estimate, Result, Status
from lambdahat.sampling.diagnostics import AXES, RHAT

# In s = ln|w| every factor is analytic in the strip |Im s| < π/4, so that the trapezoidal rule of
# step h is exact up to exp(−2π·(π/4)/h) = 1e-20 here.
STEP = 0.1
TAIL = 42.0  # e^−42 = 6e-19: what lies farther out than this many e-foldings is below rounding
GAUGE_MOVES = 2  # of each kind at each hidden layer in a sweep


def check_exponents(exponents: Sequence[int]) -> tuple[int, ...]:
    """The k_i as integers, at least one above 0; a k_i of 0 is a dead parameter."""
    some = isinstance(exponents, Sequence) and len(exponents) > 0
    expected = "be a list of integers k_i, for K = ∏ w_i^{2k_i}"
    require(some, "exponents", expected, exponents, error=TypeError)
    checked = tuple(require_count(k, "exponents", least=0) for k in exponents)
    cure = "a K that is constant has nothing to learn"
    require(max(checked) > 0, "exponents", "have one above 0", checked, cure)
    return checked


def crossing_expectation(exponents: Sequence[int], nbeta: float, localization: float) -> float:
    """nβ·E[K] under p(w) ∝ exp(−nβ·K(w) − (γ/2)‖w‖²), K = ∏ w_i^{2k_i}: the exact λ̂ at this
    temperature.

    K depends on s = Σ k_i·ln|w_i| alone, whose density under the Gaussian is a convolution of
    one-dimensional ones; both that and the last integral over s are done by the trapezoidal rule,
    which converges exponentially here. As nβ → ∞ the value tends to λ = 1/(2·max k_i), by no more
    than 1/ln(nβ) when the multiplicity is above 1. Without localization the integral exists for one
    exponent only, and is 1/(2k).
    """
    active = [k for k in check_exponents(exponents) if k]
    require_positive(nbeta, "nbeta")
    if localization == 0 and len(active) == 1:
        return 1.0 / (2 * active[0])
    cure = "several exponents need it: without it the posterior has no mass"
    require_positive(localization, "localization", cure)
    # in units of the Gaussian's own width the constant in front of K is nβ·γ^{−Σk}
    log_scale = math.log(nbeta) - sum(active) * math.log(localization)
    # beyond it the Gaussian is below e^{−2·TAIL}
    tops = [k * 0.5 * math.log(4 * TAIL) for k in active]
    bottom = -0.5 * max(log_scale, 0.0) - TAIL * max(active) - sum(tops)
    first = math.floor(bottom / STEP)  # all grids share the points STEP·i
    densities = []  # of k·ln|w| for standard normal w, without its constant
    for k, top in zip(active, tops, strict=True):
        s = STEP * np.arange(first, math.floor(top / STEP) + 2)
        densities.append(np.exp(s / k - 0.5 * np.exp(2 * s / k)))
    density = densities[0]
    for other in densities[1:]:
        # all terms are positive, so that sums lose no digits (an FFT would, in the tail)
        density = np.convolve(density, other)
        density = density / density.max()
    place = len(active) * first + np.arange(len(density))
    energy = np.exp(np.minimum(log_scale + 2 * STEP * place, 700.0))
    weight = density * np.exp(-energy)
    return float((weight * energy).sum() / weight.sum())


def crossing_problem(exponents: Sequence[int], num_samples: int) -> Problem:
    """The loss K(w) = ∏ w_i^{2k_i} of ``num_samples`` samples at w = 0, in float64."""
    active = {i: k for i, k in enumerate(check_exponents(exponents)) if k}

    def loss(parameters: Mapping[str, Tensor]) -> Tensor:
        w = parameters["w"]
        root = reduce(mul, (w[i] if k == 1 else w[i] ** k for i, k in active.items()))
        return root * root

    start = {"w": torch.zeros(len(exponents), dtype=torch.float64)}
    return Problem.from_function(loss, start, num_samples=num_samples)


def check_widths(widths: Sequence[int], rank: int) -> tuple[int, ...]:
    """The widths (H_0, …, H_L) as integers, and a rank that such a network can have."""
    several = isinstance(widths, Sequence) and len(widths) > 1
    wanted = "be a list of two layer widths or more, the input's first"
    require(several, "widths", wanted, widths, error=TypeError)
    checked = tuple(require_count(width, "widths") for width in widths)
    require_count(rank, "rank", 0, min(checked), "no product through the narrowest layer has more")
    return checked


def balanced_weights(widths: Sequence[int], rank: int) -> list[Tensor]:
    """W_s = [[I_r, 0], [0, 0]] (H_s, H_{s−1}), s = 1 … L: the most singular true parameters."""
    widths = check_widths(widths, rank)
    weights = [torch.zeros(high, low, dtype=torch.float64) for low, high in pairwise(widths)]
    for weight in weights:
        weight[:rank, :rank] = torch.eye(rank)
    return weights


def deep_linear_problem(widths: Sequence[int], rank: int, num_samples: int) -> Problem:
    """L = ½‖W_L ⋯ W_1 − T‖²_F at ``balanced_weights``, where it is 0, in float64.

    This is the population loss for white inputs: the mean of ½‖W_L ⋯ W_1 x − Tx‖² over x of
    identity covariance. ``num_samples`` is the n that it stands for. Two layers are reduced-rank
    regression.
    """
    weights = balanced_weights(widths, rank)
    target = reduce(lambda below, weight: weight @ below, weights)
    names = [f"layers.{index}.weight" for index in range(len(weights))]

    def loss(parameters: Mapping[str, Tensor]) -> Tensor:
        output = parameters[names[0]]
        for name in names[1:]:
            output = parameters[name] @ output
        return 0.5 * (output - target).square().sum()

    parameters = dict(zip(names, weights, strict=True))
    return Problem.from_function(loss, parameters, num_samples=num_samples)


def deep_linear_reference(
    widths: Sequence[int],
    rank: int,
    nbeta: float,
    localization: float,
    sweeps: int = 600,
    seed: int = 0,
    chains: int = 64,
) -> Estimate:
    """nβ·E[L] of ``deep_linear_problem`` under exp(−nβ·L(w) − (γ/2)‖w − w*‖²), by Gibbs sampling.

    This is ``linear_network_expectation`` for white inputs and a target that the centre fits
    exactly.

    Args:
        widths: The widths (H_0, …, H_L), the input's first.
        rank: The rank of the true map.
        nbeta: The inverse temperature nβ.
        localization: The localization γ.
        sweeps: Sweeps of each chain over all layers.
        seed: Seed of the draws.
        chains: Independent chains; their spread is the error.

    Returns:
        The expectation with its standard error; NOT_MIXED asks for more sweeps.
    """
    centre = balanced_weights(widths, rank)
    white = torch.eye(centre[0].shape[1], dtype=torch.float64)
    target = reduce(lambda below, weight: weight @ below, centre)
    settings = nbeta, localization, sweeps, seed, chains
    return linear_network_expectation(centre, white, target, *settings)


def linear_network_expectation(
    centre: Sequence[Tensor],
    inputs: Tensor,
    target: Tensor,
    nbeta: float,
    localization: float,
    sweeps: int = 600,
    seed: int = 0,
    chains: int = 64,
) -> Estimate:
    """nβ·E[L(w) − L(w*)] of deep linear networks with L = ½‖W_L ⋯ W_1·C − T‖²_F, by Gibbs sampling.

    The expectation is under p(w) ∝ exp(−nβ·L(w) − (γ/2)‖w − w*‖²). ``centre`` has the layers at w*,
    each (H_s, H_{s−1}), the first layer first; ``inputs`` is C (H_0, any) and ``target`` T. For
    data (x, y) the mean of ½‖y − W_L ⋯ W_1 x‖² is this L plus a constant, with C = (xᵀx/n)^½ and
    T = (yᵀx/n)·C⁻¹.

    Given the other layers each layer is Gaussian, and is drawn from that in turn (block Gibbs).
    Moves along the symmetry W_{s+1}W_s = (W_{s+1}G⁻¹)(GW_s) keep L and mix what single layers
    cannot. Each layer's draw is replaced by E[L | the others], in closed form. All chains start
    from the Gaussian around w*, which is wider than the posterior. The first quarter of the sweeps
    is left out, and the error is the spread of the chains' own means. NOT_MIXED says that the
    chains' losses or distances from w* do not agree: raise ``sweeps``. ``cost`` counts drawn
    layers.
    """
    layers = _LinearLayers(centre, nbeta, localization, chains, seed)
    return layers.expectation(inputs.double(), target.double(), sweeps)


def factorization_expectation(
    centre: tuple[Tensor, Tensor],
    shares: Tensor,
    means: Tensor,
    nbeta: float,
    localization: float,
    sweeps: int = 600,
    seed: int = 0,
    chains: int = 64,
) -> Estimate:
    """nβ·E[L(w) − L(w*)] of a matrix factorization, L = ½·Σ_ij c_ij·(m_ij − u_i·v_j)², by Gibbs.

    ``centre`` is u (rows, h) and v (columns, h) at w*. For samples (i, j, value) with loss ½(value
    − u_i·v_j)², c_ij (``shares``) is the share of the samples at entry (i, j) and m_ij (``means``)
    their mean value; L then differs from the mean loss by a constant. Given all v_j the u_i are
    independent Gaussians, and the other way round. Otherwise as ``linear_network_expectation``.
    """
    u, v = centre
    factors = _Factors([v.mT, u], nbeta, localization, chains, seed)
    return factors.expectation(shares.double(), means.double(), sweeps)


class _GaugedChains(ABC):
    """Block Gibbs chains of all layers' weights, each (chains, H_s, H_{s−1}), with moves along
    their symmetry.

    The moves replace W_s by GW_s and W_{s+1} by W_{s+1}G⁻¹. No loss of the product changes, so that
    only the distance from the centre decides about them.
    """

    def __init__(
        self, centre: Sequence[Tensor], nbeta: float, localization: float, chains: int, seed: int
    ) -> None:
        cure = "without it the posterior has no mass"
        self.localization = require_positive(localization, "localization", cure)
        self.chains = require_count(chains, "chains", least=2)
        self.nbeta, self.centre = require_positive(nbeta, "nbeta"), [at.double() for at in centre]
        self.rng = generator(seed, "deep linear reference")
        scale = math.sqrt(localization)
        self.weights = [at + self._normal(*at.shape) / scale for at in self.centre]

    @abstractmethod
    def sweep(self, first: Tensor, second: Tensor) -> Tensor:
        """Draw every layer; returns nβ·E[L | the other layers], the mean over layers (chains,)."""

    @abstractmethod
    def centre_loss(self, first: Tensor, second: Tensor) -> Tensor:
        """L at the centre."""

    def expectation(self, first: Tensor, second: Tensor, sweeps: int) -> Estimate:
        """nβ·E[L − L*] by so many sweeps, of the loss that two matrices of statistics decide."""
        from arviz_stats.base import array_stats  # type: ignore[attr-defined]

        require_count(sweeps, "sweeps", least=16)
        centre_energy = self.nbeta * float(self.centre_loss(first, second))
        observed = []
        for done in range(1, sweeps + 1):
            energy = self.sweep(first, second) - centre_energy
            for layer in range(len(self.centre) - 1):
                for _ in range(GAUGE_MOVES):
                    self._shear(layer)
                    self._rescale(layer)
            pairs = zip(self.weights, self.centre, strict=True)
            distances = [_inner(w - at, w - at).view(-1) for w, at in pairs]
            observed.append(torch.stack([energy, *distances], dim=-1))
            report("linear network reference", done, sweeps)
        kept = torch.stack(observed[sweeps // 4 :], dim=1)  # (chains, sweeps, 1 + L)
        vary = (one for one in kept.unbind(-1) if float(one.std() / one.abs().mean()) > 1e-9)
        rhats = (float(array_stats.rhat(one.numpy(), **AXES)) for one in vary)
        status = Status.CONVERGED if max(rhats, default=1.0) < RHAT else Status.NOT_MIXED
        means = kept[..., 0].mean(dim=1)
        stderr, cost = float(means.std()) / math.sqrt(self.chains), sweeps * self.chains
        return Estimate(
            float(means.mean()), stderr, cost * len(self.centre), status, self.chains - 1
        )

    def _shear(self, layer: int) -> None:
        """Draw t for G = I + t·uvᵀ with random u ⊥ v; G⁻¹ = I − t·uvᵀ, so that t is Gaussian."""
        low, high = self.weights[layer], self.weights[layer + 1]
        width = low.shape[-2]
        if width == 1:
            return
        u, v = self._normal(width, 1), self._normal(width, 1)
        v = v - u * (_inner(u, v) / _inner(u, u))
        step_low, step_high = u @ (v.mT @ low), -(high @ u) @ v.mT
        precision = self.localization * (_inner(step_low, step_low) + _inner(step_high, step_high))
        away_low, away_high = low - self.centre[layer], high - self.centre[layer + 1]
        slope = _inner(away_low, step_low) + _inner(away_high, step_high)
        t = -self.localization * slope / precision + self._normal(1, 1) / precision.sqrt()
        self.weights[layer], self.weights[layer + 1] = low + t * step_low, high + t * step_high

    def _rescale(self, layer: int) -> None:
        """Propose G = I + (±e^t − 1)·uuᵀ for a random unit u; Metropolis accepts or rejects it.

        G is as likely as its inverse, and |det G| = e^t, so that the volume of (GW_s, W_{s+1}G⁻¹)
        changes by e^{t(H_{s−1} − H_{s+1})}.
        """
        low, high = self.weights[layer], self.weights[layer + 1]
        u = self._normal(low.shape[-2], 1)
        u = u / u.norm(dim=-2, keepdim=True)
        t = self._normal(1, 1) * 10 ** (-1.5 * self._uniform())  # no one step size fits every γ
        sign = torch.where(self._uniform() < 0.5, 1.0, -1.0)
        new_low = low + (sign * t.exp() - 1) * u @ (u.mT @ low)
        new_high = high + (sign * (-t).exp() - 1) * (high @ u) @ u.mT

        def square(a: Tensor, b: Tensor) -> Tensor:
            first, second = a - self.centre[layer], b - self.centre[layer + 1]
            return _inner(first, first) + _inner(second, second)

        volume = t * (low.shape[-1] - high.shape[-2])
        change = 0.5 * self.localization * (square(low, high) - square(new_low, new_high))
        accept = self._uniform().log() < change + volume
        self.weights[layer] = torch.where(accept, new_low, low)
        self.weights[layer + 1] = torch.where(accept, new_high, high)

    def _normal(self, *shape: int) -> Tensor:
        """Standard normal numbers (chains, *shape)."""
        return torch.randn(self.chains, *shape, generator=self.rng, dtype=torch.float64)

    def _uniform(self) -> Tensor:
        return torch.rand(self.chains, 1, 1, generator=self.rng, dtype=torch.float64)


class _LinearLayers(_GaugedChains):
    """The layers of a network with L = ½‖W_L ⋯ W_1·C − T‖²; the statistics are C and T."""

    def centre_loss(self, inputs: Tensor, target: Tensor) -> Tensor:
        misfit = reduce(lambda below, weight: weight @ below, self.centre, inputs) - target
        return 0.5 * misfit.square().sum()

    def sweep(self, inputs: Tensor, target: Tensor) -> Tensor:
        identity = torch.eye(len(target), dtype=torch.float64)
        # W_L ⋯ W_{s+1} for every layer s, the last first
        above = [identity.expand(self.chains, -1, -1)]
        for weight in reversed(self.weights[1:]):
            above.append(above[-1] @ weight)
        below = inputs.expand(self.chains, -1, -1)
        energies = []
        for layer in range(len(self.weights)):
            energies.append(self._draw(layer, above.pop(), below, target))
            below = self.weights[layer] @ below
        return torch.stack(energies).mean(dim=0)

    def _draw(self, layer: int, above: Tensor, below: Tensor, target: Tensor) -> Tensor:
        """Draw X from exp(−(nβ/2)‖AXB − T‖² − (γ/2)‖X − X*‖²); returns nβ·E[L] under it (chains,).

        Its precision nβ·(BBᵀ ⊗ AᵀA) + γI is diagonal in the eigenvectors U of AᵀA and V of BBᵀ:
        p_ij = nβ·a_i·b_j + γ.
        """
        a, u = torch.linalg.eigh(above.mT @ above)
        b, v = torch.linalg.eigh(below @ below.mT)
        stiffness = self.nbeta * a.clamp_min(0.0).unsqueeze(-1) * b.clamp_min(0.0).unsqueeze(-2)
        precision = stiffness + self.localization
        pull = self.nbeta * above.mT @ target @ below.mT
        pull = pull + self.localization * self.centre[layer]
        mean = (u.mT @ pull @ v) / precision
        noise = self._normal(*mean.shape[1:]) / precision.sqrt()
        self.weights[layer] = u @ (mean + noise) @ v.mT
        misfit = above @ (u @ mean @ v.mT) @ below - target
        determined: Tensor = (stiffness / precision).sum(dim=(-2, -1))
        return 0.5 * (self.nbeta * _inner(misfit, misfit).view(-1) + determined)


class _Factors(_GaugedChains):
    """The two factors of a matrix with L = ½·Σ c_ij·(m_ij − u_i·v_j)²; the statistics are c and
    m.
    """

    def centre_loss(self, shares: Tensor, means: Tensor) -> Tensor:
        v, u = self.centre
        return 0.5 * (shares * (means - u @ v).square()).sum()

    def sweep(self, shares: Tensor, means: Tensor) -> Tensor:
        weights, (v_centre, u_centre) = self.weights, self.centre
        v, v_energy = self._draw(weights[1], v_centre.mT, shares.mT, means.mT)
        weights[0] = v.mT.contiguous()
        weights[1], u_energy = self._draw(v, u_centre, shares, means)
        return (u_energy + v_energy) / 2

    def _draw(
        self, fixed: Tensor, centre: Tensor, shares: Tensor, means: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Draw all x_i (chains, rows, h) given ``fixed`` (chains, columns, h); returns nβ·E[L] too.

        The precision of x_i is nβ·Σ_j c_ij·v_j·v_jᵀ + γI.
        """
        width, localization = fixed.shape[-1], self.localization
        identity = torch.eye(width, dtype=torch.float64)
        outer = (fixed.unsqueeze(-1) * fixed.unsqueeze(-2)).flatten(-2)
        stiffness = self.nbeta * (shares @ outer).unflatten(-1, (width, width))
        pull = self.nbeta * (shares * means) @ fixed + localization * centre
        root = torch.linalg.cholesky(stiffness + localization * identity)
        mean = torch.cholesky_solve(pull.unsqueeze(-1), root).squeeze(-1)
        noise = self._normal(*mean.shape[1:]).unsqueeze(-1)
        drawn = mean + torch.linalg.solve_triangular(root.mT, noise, upper=True).squeeze(-1)
        covariance = torch.cholesky_inverse(root)
        determined = (stiffness * covariance).sum(dim=(-3, -2, -1))
        misfit = (shares * (means - mean @ fixed.mT).square()).sum(dim=(-2, -1))
        return drawn, 0.5 * (self.nbeta * misfit + determined)


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """Σ a_ij·b_ij of each chain, (chains, 1, 1)."""
    return (a * b).sum(dim=(-2, -1), keepdim=True)


@dataclass(frozen=True)
class Coefficient(Result):
    """A learning coefficient λ, known exactly, and its multiplicity m: V(ε) ∝ ε^λ·(−ln ε)^{m−1} as
    ε → 0.

    The free energy is nβ·L* + λ·ln(nβ) − (m − 1)·ln ln(nβ) + O(1), so that nβ·E[L − L*] is near λ −
    (m − 1)/ln(nβ).

    >>> float(reduced_rank(5, 3, 5, rank=0))
    6.5
    """

    value: float
    multiplicity: int = 1

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        return f"{self.value:g} (multiplicity {self.multiplicity})"


def regular(dimension: int) -> Coefficient:
    """λ = d/2: the loss is a positive definite quadratic form of d parameters near its minimum."""
    return Coefficient(require_count(dimension, "dimension") / 2)


def normal_crossing(exponents: Sequence[int]) -> Coefficient:
    """λ = 1/(2·max k_i) of K = ∏ w_i^{2k_i} at 0; the multiplicity counts the i that attain the
    maximum (Watanabe 2009).

    >>> print(normal_crossing([1, 2, 2]))
    0.25 (multiplicity 2)
    """
    checked = check_exponents(exponents)
    return Coefficient(1 / (2 * max(checked)), checked.count(max(checked)))


def reduced_rank(inputs: int, hidden: int, outputs: int, rank: int) -> Coefficient:
    """λ of y = BAx, A (hidden, inputs) and B (outputs, hidden), when the true BA has rank ``rank``.

    Aoyagi and Watanabe (2005), their four cases. The multiplicity is that of the two-layer
    ``deep_linear``.
    """
    m, h, n = check_widths((inputs, hidden, outputs), rank)
    r = rank
    if m + h < n + r:
        value = (h * m - h * r + n * r) / 2
    elif n + h < m + r:
        value = (h * n - h * r + m * r) / 2
    elif m + n < h + r:
        value = m * n / 2
    else:
        parity = (m + h + n + r) % 2
        value = (-((h + r) ** 2) - m**2 - n**2 + 2 * (h + r) * (m + n) + 2 * m * n + parity) / 8
    return Coefficient(value, deep_linear((m, h, n), rank).multiplicity)


def deep_linear(widths: Sequence[int], rank: int) -> Coefficient:
    """λ of a deep linear network of ``widths`` (H_0, …, H_L) whose true map has rank r (Aoyagi
    2024).

    With M_s = H_s − r and S the bottleneck, ℓ + 1 of the smallest M_s (see ``_bottleneck``), a = ΣS
    − (⌈ΣS/ℓ⌉ − 1)·ℓ: λ = (r(H_0 + H_L) − r²)/2 + a(ℓ − a)/(4ℓ) − (ℓ(ℓ − 1)/4)·(ΣS/ℓ)² + ½·Σ_{i<j∈S}
    M_i·M_j, m = a(ℓ − a) + 1. It is the smallest λ of all true parameters, that of
    ``deep_linear_problem``'s w*.
    """
    widths = check_widths(widths, rank)
    tight = _bottleneck([width - rank for width in widths])
    l, total = len(tight) - 1, sum(tight)
    a = total - (math.ceil(total / l) - 1) * l
    ends = rank * (widths[0] + widths[-1] - rank)
    pairs = sum(first * second for first, second in combinations(tight, 2))
    times_4l = 2 * l * (ends + pairs) + a * (l - a) - (l - 1) * total**2
    return Coefficient(times_4l / (4 * l), a * (l - a) + 1)


def _bottleneck(excess: list[int]) -> list[int]:
    """The ℓ + 1 smallest with max S < min(rest), ΣS ≥ ℓ·max S, ΣS < ℓ·min(rest): unique."""
    ordered = sorted(excess)
    for l in range(1, len(ordered)):
        chosen, total = ordered[: l + 1], sum(ordered[: l + 1])
        rest = ordered[l + 1] if l + 1 < len(ordered) else math.inf
        if chosen[-1] < rest and l * chosen[-1] <= total < l * rest:
            return chosen
    raise AssertionError(f"no bottleneck in {excess}")


def quadratic(
    eigenvalues: Sequence[float], nbeta: float, localization: float, step_size: float = 0.0
) -> float:
    """E[λ̂] = ½·Σ nβh_i / [a_i(1 − εa_i/4)], a_i = nβh_i + γ: full-batch SGLD of step ε on L = ½·Σ
    h_i·w_i², w* = 0.

    ``step_size`` 0 is the posterior itself. Without γ and ε this is d/2: the formula separates the
    bias of each.
    """
    return float(0.5 * _ratios(eigenvalues, nbeta, localization, step_size).sum())


def quadratic_variance(
    eigenvalues: Sequence[float], nbeta: float, localization: float, step_size: float = 0.0
) -> float:
    """Var[nβ(L − L*)] = ½·Σ (nβh_i / [a_i(1 − εa_i/4)])² of one draw of ``quadratic``."""
    return float(0.5 * np.square(_ratios(eigenvalues, nbeta, localization, step_size)).sum())


def _ratios(
    eigenvalues: Sequence[float], nbeta: float, localization: float, step_size: float
) -> Array:
    """nβh_i·Var(w_i): w ← (1 − εa/2)·w + √ε·N(0, 1) has the stationary variance 1/[a(1 − εa/4)]."""
    h = _checked_eigenvalues(eigenvalues)
    require_number(localization, "localization", "[0, inf)")
    require_number(step_size, "step_size", "[0, inf)")
    a = require_positive(nbeta, "nbeta") * h + localization
    got = f"{localization!r} with a smallest eigenvalue of {h.min():g}"
    expected = "exceed −nβ·h of every eigenvalue h"
    require(bool((a > 0).all()), "localization", expected, got, "raise it")
    stable, expected = bool((step_size * a < 4).all()), f"be below 4/(nβ·h + γ) = {4 / a.max():.4g}"
    require(stable, "step_size", expected, repr(step_size), "the chain diverges")
    return np.asarray(nbeta * h / (a * (1 - step_size * a / 4)))


def _checked_eigenvalues(eigenvalues: Sequence[float]) -> Array:
    values = np.asarray(eigenvalues, dtype=np.float64)
    fine = values.ndim == 1 and values.size > 0 and bool(np.isfinite(values).all())
    require(fine, "eigenvalues", "be a list of finite numbers", eigenvalues)
    return values


def quadratic_problem(eigenvalues: Sequence[float], num_samples: int) -> Problem:
    """The loss L = ½·Σ h_i·w_i² of ``num_samples`` samples at w = 0, in float64."""
    h = torch.from_numpy(_checked_eigenvalues(eigenvalues))

    def loss(parameters: Mapping[str, Tensor]) -> Tensor:
        w = parameters["w"]
        return 0.5 * (h * w * w).sum()

    return Problem.from_function(loss, {"w": torch.zeros_like(h)}, num_samples=num_samples)
