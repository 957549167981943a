"""Deep linear networks and matrix factorizations: a population loss, and exact samplers of any."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import pairwise

import torch
from torch import Tensor

from lambdahat._core.check import require, require_count, require_positive
from lambdahat._core.progress import report
from lambdahat._core.rng import generator
from lambdahat.problem import Problem
from lambdahat.results import Estimate, Status
from lambdahat.sampling.diagnostics import RHAT

GAUGE_MOVES = 2  # of each kind at each hidden layer in a sweep


def checked_widths(widths: Sequence[int], rank: int) -> tuple[int, ...]:
    """The widths (H_0, …, H_L) as integers, and a rank that such a network can have."""
    several = isinstance(widths, Sequence) and len(widths) > 1
    wanted = "be a list of two layer widths or more, the input's first"
    require(several, "widths", wanted, widths, error=TypeError)
    checked = tuple(require_count(width, "widths") for width in widths)
    require_count(rank, "rank", 0, min(checked), "no product through the narrowest layer has more")
    return checked


def balanced_weights(widths: Sequence[int], rank: int) -> list[Tensor]:
    """W_s = [[I_r, 0], [0, 0]] (H_s, H_{s−1}), s = 1 … L: the most singular true parameters."""
    widths = checked_widths(widths, rank)
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

    The expectation is under p(w) ∝ exp(−nβ·L(w) − (γ/2)‖w − w*‖²). For data (x, y) the mean of
    ½‖y − W_L ⋯ W_1 x‖² is this L plus a constant, with C = (xᵀx/n)^½ and T = (yᵀx/n)·C⁻¹.

    Given the other layers each layer is Gaussian, and is drawn from that in turn (block Gibbs).
    Moves along the symmetry W_{s+1}W_s = (W_{s+1}G⁻¹)(GW_s) keep L and mix what single layers
    cannot. Each layer's draw is replaced by E[L | the others], in closed form. All chains start
    from the Gaussian around w*, which is wider than the posterior. The first quarter of the sweeps
    is left out, and the error is the spread of the chains' own means.

    Args:
        centre: The layers' weights at w*, each (H_s, H_{s−1}), the first layer first.
        inputs: C, (H_0, any).
        target: T, (H_L, the columns of C).
        nbeta: The inverse temperature nβ.
        localization: The localization γ.
        sweeps: Sweeps of each chain over all layers.
        seed: Seed of the draws.
        chains: Independent chains.

    Returns:
        The expectation with its standard error. NOT_MIXED says that the chains' losses or distances
        from w* do not agree: raise ``sweeps``. ``cost`` counts drawn layers.
    """
    draws = _GaugedChains(centre, localization, chains, seed)
    require_positive(nbeta, "nbeta")
    layers = _LinearLayers(draws, inputs.double(), target.double(), nbeta)
    return _expectation(layers.sweep, draws, sweeps)


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

    For samples (i, j, value) with loss ½(value − u_i·v_j)², c_ij is the share of the samples at
    entry (i, j) and m_ij their mean value; L then differs from the mean loss by a constant. Given
    all v_j the u_i are independent Gaussians, and the other way round. Otherwise as
    ``linear_network_expectation``.

    Args:
        centre: u (rows, h) and v (columns, h) at w*.
        shares: c, (rows, columns).
        means: m, (rows, columns); where c is 0 it does not matter.
        nbeta: The inverse temperature nβ.
        localization: The localization γ.
        sweeps: Sweeps of each chain over both factors.
        seed: Seed of the draws.
        chains: Independent chains.

    Returns:
        The expectation with its standard error. ``cost`` counts drawn factors.
    """
    u, v = centre
    draws = _GaugedChains([v.mT, u], localization, chains, seed)
    require_positive(nbeta, "nbeta")
    factors = _Factors(draws, shares.double(), means.double(), nbeta)
    return _expectation(factors.sweep, draws, sweeps)


def _expectation(sweep: Callable[[], Tensor], draws: _GaugedChains, sweeps: int) -> Estimate:
    """Run all sweeps; each returns nβ·E[L − L* | …] of every chain, the mean of its draws."""
    require_count(sweeps, "sweeps", least=16)
    observed = []
    for done in range(1, sweeps + 1):
        energy = sweep()
        draws.move_along_symmetry()
        observed.append(torch.stack([energy, *draws.distances()], dim=-1))
        report("linear network reference", done, sweeps)
    kept = torch.stack(observed[sweeps // 4 :], dim=1)  # (chains, sweeps, 1 + L)
    means = kept[..., 0].mean(dim=1)
    status = Status.CONVERGED if _worst_rhat(kept) < RHAT else Status.NOT_MIXED
    stderr = float(means.std()) / math.sqrt(draws.chains)
    cost = sweeps * draws.chains * len(draws.centre)
    return Estimate(float(means.mean()), stderr, cost, status, draws.chains - 1)


class _GaugedChains:
    """Chains of all layers' weights, each (chains, H_s, H_{s−1}), and moves along their symmetry.

    The moves replace W_s by GW_s and W_{s+1} by W_{s+1}G⁻¹. No loss of the product changes, so that
    only the distance from the centre decides about them.
    """

    def __init__(
        self, centre: Sequence[Tensor], localization: float, chains: int, seed: int
    ) -> None:
        cure = "without it the posterior has no mass"
        self.localization = require_positive(localization, "localization", cure)
        self.chains = require_count(chains, "chains", least=2)
        self.centre = [at.double() for at in centre]
        self.rng = generator(seed, "deep linear reference")
        scale = math.sqrt(localization)
        self.weights = [at + self.normal(*at.shape) / scale for at in self.centre]

    def distances(self) -> list[Tensor]:
        """‖W_s − W_s*‖² of each layer."""
        pairs = zip(self.weights, self.centre, strict=True)
        return [_inner(w - at, w - at).view(-1) for w, at in pairs]

    def move_along_symmetry(self) -> None:
        """Shear and rescale the basis of every hidden layer."""
        for layer in range(len(self.centre) - 1):
            for _ in range(GAUGE_MOVES):
                self._shear(layer)
                self._rescale(layer)

    def _shear(self, layer: int) -> None:
        """Draw t for G = I + t·uvᵀ with random u ⊥ v; G⁻¹ = I − t·uvᵀ, so that t is Gaussian."""
        low, high = self.weights[layer], self.weights[layer + 1]
        width = low.shape[-2]
        if width == 1:
            return
        u, v = self.normal(width, 1), self.normal(width, 1)
        v = v - u * (_inner(u, v) / _inner(u, u))
        step_low, step_high = u @ (v.mT @ low), -(high @ u) @ v.mT
        precision = self.localization * (_inner(step_low, step_low) + _inner(step_high, step_high))
        away_low, away_high = low - self.centre[layer], high - self.centre[layer + 1]
        slope = _inner(away_low, step_low) + _inner(away_high, step_high)
        t = -self.localization * slope / precision + self.normal(1, 1) / precision.sqrt()
        self.weights[layer], self.weights[layer + 1] = low + t * step_low, high + t * step_high

    def _rescale(self, layer: int) -> None:
        """Propose G = I + (±e^t − 1)·uuᵀ for a random unit u; Metropolis accepts or rejects it.

        G is as likely as its inverse, and |det G| = e^t, so that the volume of (GW_s, W_{s+1}G⁻¹)
        changes by e^{t(H_{s−1} − H_{s+1})}.
        """
        low, high = self.weights[layer], self.weights[layer + 1]
        u = self.normal(low.shape[-2], 1)
        u = u / u.norm(dim=-2, keepdim=True)
        t = self.normal(1, 1) * 10 ** (-1.5 * self._uniform())  # no one step size fits every γ
        sign = torch.where(self._uniform() < 0.5, 1.0, -1.0)
        new_low = low + (sign * t.exp() - 1) * u @ (u.mT @ low)
        new_high = high + (sign * (-t).exp() - 1) * (high @ u) @ u.mT
        energies = [
            _inner(a - self.centre[layer], a - self.centre[layer])
            + _inner(b - self.centre[layer + 1], b - self.centre[layer + 1])
            for a, b in ((low, high), (new_low, new_high))
        ]
        volume = t * (low.shape[-1] - high.shape[-2])
        change = 0.5 * self.localization * (energies[0] - energies[1])
        accept = self._uniform().log() < change + volume
        self.weights[layer] = torch.where(accept, new_low, low)
        self.weights[layer + 1] = torch.where(accept, new_high, high)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers (chains, *shape)."""
        return torch.randn(self.chains, *shape, generator=self.rng, dtype=torch.float64)

    def _uniform(self) -> Tensor:
        return torch.rand(self.chains, 1, 1, generator=self.rng, dtype=torch.float64)


class _LinearLayers:
    """Block Gibbs over the layers of a network with L = ½‖W_L ⋯ W_1·C − T‖²."""

    def __init__(self, draws: _GaugedChains, inputs: Tensor, target: Tensor, nbeta: float) -> None:
        self.draws, self.inputs, self.target, self.nbeta = draws, inputs, target, nbeta
        misfit = reduce(lambda below, weight: weight @ below, draws.centre, inputs) - target
        self.centre_energy = 0.5 * nbeta * float(misfit.square().sum())

    def sweep(self) -> Tensor:
        """Draw every layer; returns nβ·E[L − L* | the other layers], mean over layers (chains,)."""
        weights = self.draws.weights
        above = self._products_above()
        below = self.inputs.expand(self.draws.chains, -1, -1)
        energies = []
        for layer in range(len(weights)):
            energies.append(self._draw(layer, above[layer], below))
            below = weights[layer] @ below
        return torch.stack(energies).mean(dim=0) - self.centre_energy

    def _products_above(self) -> list[Tensor]:
        """W_L ⋯ W_{s+1} for every layer s, the identity for the last."""
        identity = torch.eye(len(self.target), dtype=torch.float64)
        product = identity.expand(self.draws.chains, -1, -1)
        out = [product]
        for weight in reversed(self.draws.weights[1:]):
            product = product @ weight
            out.append(product)
        return out[::-1]

    def _draw(self, layer: int, above: Tensor, below: Tensor) -> Tensor:
        """Draw X from exp(−(nβ/2)‖AXB − T‖² − (γ/2)‖X − X*‖²); returns nβ·E[L] under it (chains,).

        Its precision nβ·(BBᵀ ⊗ AᵀA) + γI is diagonal in the eigenvectors U of AᵀA and V of BBᵀ:
        p_ij = nβ·a_i·b_j + γ.
        """
        localization = self.draws.localization
        a, u = torch.linalg.eigh(above.mT @ above)
        b, v = torch.linalg.eigh(below @ below.mT)
        stiffness = self.nbeta * a.clamp_min(0.0).unsqueeze(-1) * b.clamp_min(0.0).unsqueeze(-2)
        precision = stiffness + localization
        pull = self.nbeta * above.mT @ self.target @ below.mT
        pull = pull + localization * self.draws.centre[layer]
        mean = (u.mT @ pull @ v) / precision
        noise = self.draws.normal(*mean.shape[1:]) / precision.sqrt()
        self.draws.weights[layer] = u @ (mean + noise) @ v.mT
        misfit = above @ (u @ mean @ v.mT) @ below - self.target
        determined: Tensor = (stiffness / precision).sum(dim=(-2, -1))
        return 0.5 * (self.nbeta * _inner(misfit, misfit).view(-1) + determined)


class _Factors:
    """Block Gibbs over the two factors of a matrix with L = ½·Σ c_ij·(m_ij − u_i·v_j)²."""

    def __init__(self, draws: _GaugedChains, shares: Tensor, means: Tensor, nbeta: float) -> None:
        self.draws, self.shares, self.means, self.nbeta = draws, shares, means, nbeta
        v, u = draws.centre
        self.centre_energy = 0.5 * nbeta * float((shares * (means - u @ v).square()).sum())

    def sweep(self) -> Tensor:
        """Draw both factors; returns nβ·E[L − L* | the other factor], mean over both (chains,)."""
        weights, (v_centre, u_centre) = self.draws.weights, self.draws.centre
        v, v_energy = self._draw(weights[1], v_centre.mT, self.shares.mT, self.means.mT)
        weights[0] = v.mT.contiguous()
        weights[1], u_energy = self._draw(v, u_centre, self.shares, self.means)
        return (u_energy + v_energy) / 2 - self.centre_energy

    def _draw(
        self, fixed: Tensor, centre: Tensor, shares: Tensor, means: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Draw all x_i (chains, rows, h) given ``fixed`` (chains, columns, h); returns nβ·E[L] too.

        The precision of x_i is nβ·Σ_j c_ij·v_j·v_jᵀ + γI.
        """
        width, localization = fixed.shape[-1], self.draws.localization
        identity = torch.eye(width, dtype=torch.float64)
        outer = (fixed.unsqueeze(-1) * fixed.unsqueeze(-2)).flatten(-2)
        stiffness = self.nbeta * (shares @ outer).unflatten(-1, (width, width))
        pull = self.nbeta * (shares * means) @ fixed + localization * centre
        root = torch.linalg.cholesky(stiffness + localization * identity)
        mean = torch.cholesky_solve(pull.unsqueeze(-1), root).squeeze(-1)
        noise = self.draws.normal(*mean.shape[1:]).unsqueeze(-1)
        drawn = mean + torch.linalg.solve_triangular(root.mT, noise, upper=True).squeeze(-1)
        covariance = torch.cholesky_inverse(root)
        determined = (stiffness * covariance).sum(dim=(-3, -2, -1))
        misfit = (shares * (means - mean @ fixed.mT).square()).sum(dim=(-2, -1))
        return drawn, 0.5 * (self.nbeta * misfit + determined)


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """Σ a_ij·b_ij of each chain, (chains, 1, 1)."""
    return (a * b).sum(dim=(-2, -1), keepdim=True)


def _worst_rhat(observed: Tensor) -> float:
    """The largest rank-normalised split R-hat of all observables (chains, draws, …) that vary."""
    from arviz_stats.base import array_stats  # type: ignore[attr-defined]

    columns = observed.unbind(-1)
    vary = [one.numpy() for one in columns if float(one.std() / one.abs().mean()) > 1e-9]
    rhats = (float(array_stats.rhat(one, chain_axis=0, draw_axis=1)) for one in vary)
    return max(rhats, default=1.0)
