"""Deep linear networks at their deepest singularity: the model, its population loss, and an exact sampler of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import pairwise

import torch
from torch import Tensor

from lambdahat._check import require, require_count, require_positive
from lambdahat._progress import report
from lambdahat._rng import generator
from lambdahat.problem import Problem
from lambdahat.results import Estimate, Status
from lambdahat.sampling.diagnostics import RHAT

GAUGE_MOVES = 2  # of each kind at each hidden layer in a sweep


def checked_widths(widths: Sequence[int], rank: int) -> tuple[int, ...]:
    """The widths (H_0, …, H_L) as integers, and a rank that such a network can have."""
    several = isinstance(widths, Sequence) and len(widths) > 1
    require(several, "widths", "be a list of two layer widths or more, the input's first", widths, error=TypeError)
    checked = tuple(require_count(width, "widths") for width in widths)
    require_count(rank, "rank", 0, min(checked), "no product through the narrowest layer has more")
    return checked


def balanced_weights(widths: Sequence[int], rank: int) -> list[Tensor]:
    """W_s = [[I_r, 0], [0, 0]] (H_s, H_{s−1}) for s = 1 … L: of the true parameters, the most singular."""
    widths = checked_widths(widths, rank)
    weights = [torch.zeros(high, low, dtype=torch.float64) for low, high in pairwise(widths)]
    for weight in weights:
        weight[:rank, :rank] = torch.eye(rank)
    return weights


def deep_linear_problem(widths: Sequence[int], rank: int, num_samples: int) -> Problem:
    """L = ½‖W_L ⋯ W_1 − T‖²_F at ``balanced_weights``, where it is 0: the population loss for white inputs, in float64.

    The mean of ½‖W_L ⋯ W_1 x − Tx‖² over x of identity covariance is this, without its noise. ``num_samples`` is the n
    that it stands for. Two layers are reduced-rank regression.
    """
    weights = balanced_weights(widths, rank)
    target = reduce(lambda below, weight: weight @ below, weights)
    names = [f"layers.{index}.weight" for index in range(len(weights))]

    def loss(parameters: Mapping[str, Tensor]) -> Tensor:
        output = parameters[names[0]]
        for name in names[1:]:
            output = parameters[name] @ output
        return 0.5 * (output - target).square().sum()

    return Problem.from_function(loss, dict(zip(names, weights, strict=True)), num_samples=num_samples)


def deep_linear_reference(
    widths: Sequence[int],
    rank: int,
    nbeta: float,
    localization: float,
    sweeps: int = 600,
    seed: int = 0,
    chains: int = 64,
) -> Estimate:
    """nβ·E[L] of ``deep_linear_problem`` under p(w) ∝ exp(−nβ·L(w) − (γ/2)‖w − w*‖²), with neither step size nor bias.

    Given the other layers each layer is Gaussian, and is drawn from that in turn (block Gibbs). Moves along the
    symmetry W_{s+1}W_s = (W_{s+1}G⁻¹)(GW_s) keep L and mix what single layers cannot. Each layer's draw is replaced by
    E[L | the others], in closed form. All ``chains`` start from the Gaussian around w*, wider than the posterior; the
    first quarter of the sweeps is left out, and the error is the spread of the chains' own means. NOT_MIXED says that
    the chains' losses or distances from w* do not agree: raise ``sweeps``. ``cost`` counts drawn layers.
    """
    centre = balanced_weights(widths, rank)
    require_positive(nbeta, "nbeta")
    require_positive(localization, "localization", "without it the posterior has no mass")
    require_count(sweeps, "sweeps", least=16)
    require_count(chains, "chains", least=2)
    sampler = _Gibbs(centre, nbeta, localization, chains, seed)
    observed = []
    for done in range(1, sweeps + 1):
        observed.append(sampler.sweep())
        report("deep linear reference", done, sweeps)
    kept = torch.stack(observed[sweeps // 4 :], dim=1)  # (chains, sweeps, 1 + L)
    means = kept[..., 0].mean(dim=1)
    status = Status.CONVERGED if _worst_rhat(kept) < RHAT else Status.NOT_MIXED
    stderr = float(means.std()) / math.sqrt(chains)
    return Estimate(float(means.mean()), stderr, sweeps * chains * len(centre), status, chains - 1)


class _Gibbs:
    """Chains of all layers' weights, each (chains, H_s, H_{s−1}), and the moves that leave the posterior as it is."""

    def __init__(self, centre: list[Tensor], nbeta: float, localization: float, chains: int, seed: int) -> None:
        self.centre, self.nbeta, self.localization, self.chains = centre, nbeta, localization, chains
        self.target = reduce(lambda below, weight: weight @ below, centre)
        self.rng = generator(seed, "deep linear reference")
        self.weights = [at + self._normal(*at.shape) / math.sqrt(localization) for at in centre]

    def sweep(self) -> Tensor:
        """Every layer once, then the symmetry; nβ·E[L | others], mean over layers, and each ‖W_s − W_s*‖²."""
        above = self._products_above()
        below = torch.eye(self.centre[0].shape[1], dtype=torch.float64).expand(self.chains, -1, -1)
        expected = []
        for layer in range(len(self.centre)):
            expected.append(self._draw(layer, above[layer], below))
            below = self.weights[layer] @ below
        for layer in range(len(self.centre) - 1):
            for _ in range(GAUGE_MOVES):
                self._shear(layer)
                self._rescale(layer)
        distances = [_inner(w - at, w - at).view(-1) for w, at in zip(self.weights, self.centre, strict=True)]
        return torch.stack([torch.stack(expected).mean(dim=0), *distances], dim=-1)

    def _products_above(self) -> list[Tensor]:
        """W_L ⋯ W_{s+1} for every layer s, the identity for the last."""
        product = torch.eye(len(self.centre[-1]), dtype=torch.float64).expand(self.chains, -1, -1)
        out = [product]
        for weight in reversed(self.weights[1:]):
            product = product @ weight
            out.append(product)
        return out[::-1]

    def _draw(self, layer: int, above: Tensor, below: Tensor) -> Tensor:
        """Draw X from exp(−(nβ/2)‖AXB − T‖² − (γ/2)‖X − X*‖²); returns nβ·E[L] under it (chains,).

        Its precision nβ·(BBᵀ ⊗ AᵀA) + γI is diagonal in the eigenvectors U of AᵀA and V of BBᵀ: p_ij = nβ·a_i·b_j + γ.
        """
        a, u = torch.linalg.eigh(above.mT @ above)
        b, v = torch.linalg.eigh(below @ below.mT)
        stiffness = self.nbeta * a.clamp_min(0.0).unsqueeze(-1) * b.clamp_min(0.0).unsqueeze(-2)
        precision = stiffness + self.localization
        pull = self.nbeta * above.mT @ self.target @ below.mT + self.localization * self.centre[layer]
        mean = (u.mT @ pull @ v) / precision
        self.weights[layer] = u @ (mean + self._normal(*mean.shape[1:]) / precision.sqrt()) @ v.mT
        misfit = above @ (u @ mean @ v.mT) @ below - self.target
        determined: Tensor = (stiffness / precision).sum(dim=(-2, -1))
        return 0.5 * (self.nbeta * _inner(misfit, misfit).view(-1) + determined)

    def _shear(self, layer: int) -> None:
        """G = I + t·uvᵀ with random u ⊥ v: G⁻¹ = I − t·uvᵀ, so that t is Gaussian, and drawn."""
        low, high = self.weights[layer], self.weights[layer + 1]
        width = low.shape[-2]
        if width == 1:
            return
        u, v = self._normal(width, 1), self._normal(width, 1)
        v = v - u * (_inner(u, v) / _inner(u, u))
        step_low, step_high = u @ (v.mT @ low), -(high @ u) @ v.mT
        precision = self.localization * (_inner(step_low, step_low) + _inner(step_high, step_high))
        slope = _inner(low - self.centre[layer], step_low) + _inner(high - self.centre[layer + 1], step_high)
        t = -self.localization * slope / precision + self._normal(1, 1) / precision.sqrt()
        self.weights[layer], self.weights[layer + 1] = low + t * step_low, high + t * step_high

    def _rescale(self, layer: int) -> None:
        """G = I + (±e^t − 1)·uuᵀ for a random unit u, as likely as its inverse: accepted or not by Metropolis.

        |det G| = e^t, so that the volume of (GW_s, W_{s+1}G⁻¹) changes by e^{t(H_{s−1} − H_{s+1})}.
        """
        low, high = self.weights[layer], self.weights[layer + 1]
        u = self._normal(low.shape[-2], 1)
        u = u / u.norm(dim=-2, keepdim=True)
        t = self._normal(1, 1) * 10 ** (-1.5 * self._uniform())  # long and short steps: no one size fits every γ
        sign = torch.where(self._uniform() < 0.5, 1.0, -1.0)
        new_low = low + (sign * t.exp() - 1) * u @ (u.mT @ low)
        new_high = high + (sign * (-t).exp() - 1) * (high @ u) @ u.mT
        energies = [
            _inner(a - self.centre[layer], a - self.centre[layer])
            + _inner(b - self.centre[layer + 1], b - self.centre[layer + 1])
            for a, b in ((low, high), (new_low, new_high))
        ]
        volume = t * (low.shape[-1] - high.shape[-2])
        accept = self._uniform().log() < 0.5 * self.localization * (energies[0] - energies[1]) + volume
        self.weights[layer] = torch.where(accept, new_low, low)
        self.weights[layer + 1] = torch.where(accept, new_high, high)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(self.chains, *shape, generator=self.rng, dtype=torch.float64)

    def _uniform(self) -> Tensor:
        return torch.rand(self.chains, 1, 1, generator=self.rng, dtype=torch.float64)


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """Σ a_ij·b_ij of each chain, (chains, 1, 1)."""
    return (a * b).sum(dim=(-2, -1), keepdim=True)


def _worst_rhat(observed: Tensor) -> float:
    """The largest rank-normalised split R-hat over observables that vary, (chains, draws, observables)."""
    from arviz_stats.base import array_stats  # type: ignore[attr-defined]

    vary = [column.numpy() for column in observed.unbind(-1) if float(column.std() / column.abs().mean()) > 1e-9]
    return max((float(array_stats.rhat(column, chain_axis=0, draw_axis=1)) for column in vary), default=1.0)
