"""Singular regressions on data whose λ̂ is known: linear networks, factorizations, small networks.

Every regression has 10,000 samples or more, so that ``llc`` samples it by mini-batches, and stands
at an exact minimiser of its empirical loss ½‖y − f(x)‖². What λ̂ should be follows from a few
statistics of the data: by block Gibbs for linear networks and matrix factorizations, by quadrature
for networks with one nonlinear layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial, reduce
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lambdahat._core.rng import generator
from lambdahat.problem import Problem
from lambdahat.results import Estimate, Status
from lambdahat.singular.exact import (
    deep_linear,
    factorization_expectation,
    linear_network_expectation,
)
from lambdahat.singular.verification import KnownCase

SWEEPS = 1000, 8000  # of the Gibbs samplers; the second where chains do not agree after the first
NODES = 10  # of the Gauss–Legendre rule on each panel
PANELS = 0.3, 0.2, 0.1, 0.05  # widths of the panels, tried until two agree
SETTLED = 1e-3  # the relative difference at which they do
FINEST = 0.1  # nodes are even in b below it, and even in ln b above it
REACH = 9.0  # standard deviations of the localizing Gaussian that the grid covers
LOCATIONS = 21  # distinct inputs of the small networks
LINEAR_NETWORKS: tuple[tuple[tuple[int, ...], int, int, float], ...] = (
    # widths, rank of the true map, samples, standard deviation of the noise
    ((1, 1, 1), 0, 20_000, 1.0),
    ((1, 1, 1), 1, 20_000, 1.0),
    ((5, 3, 5), 0, 20_000, 1.0),
    ((4, 3, 4), 1, 10_000, 1.0),
    ((6, 4, 6), 2, 50_000, 1.0),
    ((8, 5, 3), 2, 20_000, 1.0),
    ((2, 2, 2, 2), 0, 10_000, 0.0),
    ((3, 3, 3, 3), 1, 20_000, 1.0),
    ((5, 4, 4, 5), 2, 30_000, 0.0),
    ((4, 4, 4, 4, 4), 1, 10_000, 1.0),
)
FACTORIZATIONS = (  # rows and columns, rank of the true matrix, width of the model, samples
    ((8, 6), 1, 2, 10_000),
    ((12, 10), 2, 3, 20_000),
    ((10, 10), 0, 2, 30_000),
)


@cache
def singular_regressions() -> tuple[KnownCase, ...]:
    """Linear networks, matrix factorizations, and networks of tanh or ReLU units, all with data.

    The truths take a second or so, and are kept for the next call at the same nβ and γ. Their
    ``asymptotic`` is λ at the true parameters as n → ∞; at finite n noise in the targets moves λ̂
    by terms of order 1/ln n, to above λ too.
    """
    line = tuple(np.linspace(-2.0, 2.0, LOCATIONS).tolist())
    positive = tuple(np.linspace(0.1, 2.0, LOCATIONS).tolist())
    five = [[a, 0.0] for a in (0.6, -0.5, 0.4, 0.3, -0.2)]
    return (
        *(_linear_network(*shape) for shape in LINEAR_NETWORKS),
        *(_factorization(*shape) for shape in FACTORIZATIONS),
        # one hidden layer without biases, at true parameters that have units to spare; K is near
        # a²b² at 0
        _network("tanh-zero", nn.Tanh, line, [[0.0]], [[0.0]], 10_000, 0.5),
        # a²(b² + c²), where c is a bias: a weight of the constant input
        _network("tanh-zero-bias", nn.Tanh, line, [[0.0, 0.0]], [[0.0]], 10_000, 0.5, bias=True),
        # two regular directions beside a²b²
        _network("tanh-spare", nn.Tanh, line, [[1.0], [0.0]], [[1.0, 0.0]], 20_000, 1.5),
        # Σ aᵢ and Σ aᵢbᵢ are regular; b₁ − b₂ enters to the fourth power
        _network("tanh-twins", nn.Tanh, line, [[1.0], [1.0]], [[0.5, 0.5]], 20_000, 1.25),
        # six regular directions beside |A|²b² with five A
        _network("tanh-5-outputs", nn.Tanh, line, [[1.0], [0.0]], five, 40_000, 3.5),
        # where b₂ > 0 only the three numbers A₁b₁ + A₂b₂ matter, where b₂ < 0 so does |A₂|²b₂²
        _network("relu-spare", nn.ReLU, line, [[1.0], [0.0]], five[:3], 20_000, 1.5),
        # two units share the sum a₁b₁ + a₂b₂ = 1
        _network("relu-twins", nn.ReLU, line, [[1.0], [1.0]], [[0.5, 0.5]], 20_000, 0.5),
        # all inputs are positive and the second unit's weight is negative
        _network("relu-dead", nn.ReLU, positive, [[1.0], [-0.5]], [[1.0, 0.5]], 10_000, 0.5),
    )


def half_squared_error(output: Tensor, target: Tensor) -> Tensor:
    """The mean of ½‖target − output‖²: −ln of a Gaussian density of unit variance."""
    return 0.5 * (target - output).square().flatten(1).sum(dim=1).mean()


def _linear_network(widths: tuple[int, ...], rank: int, samples: int, noise: float) -> KnownCase:
    """y = Tx + noise with T of rank r, at the balanced weights of least loss."""

    def model(*weights: Tensor) -> nn.Module:
        with torch.device("meta"):  # initialisation would draw from the global generator
            layers = [nn.Linear(low, high, bias=False) for low, high in pairwise(widths)]
        network = nn.Sequential(*layers)
        named = {f"{index}.weight": weight for index, weight in enumerate(weights)}
        network.load_state_dict(named, assign=True)
        return network

    kind = "noisy" if noise else "exact"
    name = f"data-linear-{'-'.join(map(str, widths))}-r{rank}-{kind}"
    data = partial(_linear_data, name, widths, rank, samples, noise)
    asymptotic = float(deep_linear(widths, rank))
    return _gibbs_case(name, data, model, linear_network_expectation, asymptotic)


def _gibbs_case(
    name: str,
    data: Callable[[], tuple[Any, Any, Any]],
    model: Callable[..., nn.Module],
    expectation: Callable[..., Estimate],
    asymptotic: float,
) -> KnownCase:
    """A case whose truth is by block Gibbs; ``data`` returns pairs, statistics and w*."""

    def make() -> Problem:
        pairs, _, centre = data()
        return Problem(model(*(weight.float() for weight in centre)), half_squared_error, pairs)

    @cache
    def truth(nbeta: float, localization: float) -> Estimate:
        _, statistics, centre = data()
        for sweeps in SWEEPS:  # more of them only where the chains do not agree
            estimate = expectation(centre, *statistics, nbeta, localization, sweeps)
            if estimate.status.ok:
                break
        return estimate

    return KnownCase(name, make, truth, asymptotic)


@cache
def _linear_data(
    name: str, widths: tuple[int, ...], rank: int, samples: int, noise: float
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    """Draw inputs of unequal variance and the targets; solve for the minimiser in closed form.

    Returns the data (x, y), the statistics (C, T) that decide the loss, and the layers at w*: with
    W_sW_sᵀ = W_{s+1}ᵀW_{s+1}, in random hidden bases.

    With C = (xᵀx/n)^½ the loss is ½‖MC − T‖² plus a constant, where T = (yᵀx/n)·C⁻¹ and M is the
    product of the layers. Its minimiser over all M of the rank that the network allows is the
    truncated singular value decomposition of T times C⁻¹ (Eckart and Young). Without noise that has
    the true rank.
    """
    rng = generator(0, name)
    scales = torch.from_numpy(np.geomspace(1.4, 0.7, widths[0]))
    x = torch.randn(samples, widths[0], generator=rng, dtype=torch.float64) * scales
    left, right = _orthogonal(widths[-1], rng)[:, :rank], _orthogonal(widths[0], rng)[:, :rank]
    true = (left * torch.from_numpy(np.geomspace(1.2, 0.8, rank))) @ right.mT
    y = x.float().double() @ true.mT
    y += noise * torch.randn(samples, widths[-1], generator=rng, dtype=torch.float64)
    x, y = x.float(), y.float()
    values, vectors = torch.linalg.eigh(x.double().mT @ x.double() / samples)
    inputs = (vectors * values.sqrt()) @ vectors.mT
    inverse = (vectors / values.sqrt()) @ vectors.mT
    target = (y.double().mT @ x.double() / samples) @ inverse
    u, s, v = torch.linalg.svd(target, full_matrices=False)
    keep = min(widths) if noise else rank
    product = (u[:, :keep] * s[:keep]) @ v[:keep] @ inverse
    u, s, v = torch.linalg.svd(product, full_matrices=False)
    root = s[:keep] ** (1 / (len(widths) - 1))
    bases = [_orthogonal(width, rng)[:, :keep] for width in widths]
    bases[0], bases[-1] = v[:keep].mT, u[:, :keep]
    layers = tuple((high * root) @ low.mT for low, high in pairwise(bases))
    return (x, y), (inputs, target), layers


def _orthogonal(size: int, rng: torch.Generator) -> Tensor:
    q: Tensor = torch.linalg.qr(torch.randn(size, size, generator=rng, dtype=torch.float64)).Q
    return q


class MatrixFactors(nn.Module):
    """The model u_i·v_j of rows and columns (i, j), given as integers (batch, 2)."""

    def __init__(self, u: Tensor, v: Tensor) -> None:
        super().__init__()
        self.u = nn.Embedding.from_pretrained(u, freeze=False)
        self.v = nn.Embedding.from_pretrained(v, freeze=False)

    def forward(self, entries: Tensor) -> Tensor:
        """Return u_i·v_j, (batch, 1)."""
        u, v = self.u(entries[:, 0]), self.v(entries[:, 1])
        return torch.sum(u * v, dim=1, keepdim=True)


def _factorization(shape: tuple[int, int], rank: int, width: int, samples: int) -> KnownCase:
    """Noisy entries of a matrix of rank r, some seen more often, and u_i·v_j of width h."""
    name = f"data-factors-{shape[0]}x{shape[1]}-r{rank}-h{width}"
    data = partial(_entries, name, shape, rank, width, samples)
    asymptotic = float(deep_linear((shape[1], width, shape[0]), rank))
    return _gibbs_case(name, data, MatrixFactors, factorization_expectation, asymptotic)


@cache
def _entries(
    name: str, shape: tuple[int, int], rank: int, width: int, samples: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Draw entries, some rows and columns more often, and solve for the minimiser.

    Returns the entries with their values, their shares and means by place, and the factors at w*.
    """
    rng = generator(0, name)
    rows, columns = shape
    odds = torch.outer(*(torch.from_numpy(np.geomspace(1.0, 0.4, size)) for size in shape))
    places = torch.multinomial(odds.flatten(), samples, replacement=True, generator=rng)
    left, right = (_orthogonal(size, rng)[:, :rank] for size in shape)
    true = math.sqrt(rows * columns) * left @ right.mT
    noise = torch.randn(samples, generator=rng, dtype=torch.float64)
    values = (true.flatten()[places] + noise).float().double()
    counts = places.bincount(minlength=rows * columns).double()
    sums = places.bincount(values, minlength=rows * columns)
    means = (sums / counts.clamp_min(1)).view(shape)
    shares = (counts / samples).view(shape)
    entries = torch.stack([places // columns, places % columns], dim=1)
    centre = _least_factors(shares, means, width)
    return (entries, values.float().unsqueeze(1)), (shares, means), centre


def _least_factors(shares: Tensor, means: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Balanced u and v of least Σ c_ij·(m_ij − u_i·v_j)², by alternating least squares."""
    _, s, right = torch.linalg.svd(means, full_matrices=False)
    v = right[:width].mT * s[:width].sqrt()
    change = math.inf
    while change > 1e-12:
        u, before = _least_rows(shares, means, v), v
        v = _least_rows(shares.mT, means.mT, u)
        change = float((v - before).abs().max())
    left, s, right = torch.linalg.svd(u @ v.mT, full_matrices=False)
    root = s[:width].sqrt()
    return left[:, :width] * root, right[:width].mT * root


def _least_rows(shares: Tensor, means: Tensor, v: Tensor) -> Tensor:
    """The rows x_i of least Σ_j c_ij·(m_ij − x_i·v_j)²."""
    normal = torch.einsum("ij,ja,jb->iab", shares, v, v)
    rows: Tensor = torch.linalg.solve(normal, ((shares * means) @ v).unsqueeze(-1)).squeeze(-1)
    return rows


@dataclass(frozen=True)
class OneLayer:
    """f(x) = A·σ(Bx) on finitely many inputs x_k, and the mean target ȳ_k at each of them.

    The loss ½·Σ_k p_k·‖A·σ(Bx_k) − ȳ_k‖² is quadratic in A, so that only B needs quadrature.

    ``activation`` is σ, ``x`` the distinct inputs (K, inputs), ``shares`` p_k (K,) the share of the
    samples at each, ``means`` ȳ_k (K, outputs), ``first`` B (units, inputs) and ``second`` A
    (outputs, units) at w*.
    """

    activation: Callable[[Tensor], Tensor]
    x: Tensor
    shares: Tensor
    means: Tensor
    first: Tensor
    second: Tensor

    def expectation(self, nbeta: float, localization: float) -> Estimate:
        """nβ·E[L(w) − L(w*)] under exp(−nβ·L(w) − (γ/2)‖w − w*‖²).

        A is integrated out in closed form and B by Gauss–Legendre panels that are even in
        asinh(b/FINEST), which resolves what varies near b = 0 and reaches far where γ is small. A
        panel ends at b = 0, where ReLU has its kink. The error is the difference from a coarser
        grid; ``cost`` counts grid points.
        """
        coarse, _ = self._integral(nbeta, localization, PANELS[0])
        for width in PANELS[1:]:
            fine, points = self._integral(nbeta, localization, width)
            error, coarse = abs(fine - coarse), fine
            if error < SETTLED * abs(fine):
                return Estimate(fine, error, points)
        return Estimate(fine, error, points, Status.QUADRATURE)

    def _integral(self, nbeta: float, localization: float, width: float) -> tuple[float, int]:
        axes = [_panels(float(b), localization, width) for b in self.first.flatten()]
        nodes = torch.cartesian_prod(*(axis[0] for axis in axes)).view(-1, *self.first.shape)
        weights = reduce(torch.outer, (axis[1] for axis in axes)).flatten()
        parts = [self._conditional(part, nbeta, localization) for part in nodes.split(100_000)]
        density, energy = (torch.cat(columns) for columns in zip(*parts, strict=True))
        share = weights * (density - density.max()).exp()
        centre = 0.5 * nbeta * self.misfit(self.first.unsqueeze(0), self.second.unsqueeze(0))
        return float((share @ energy) / share.sum() - centre), len(weights)

    def misfit(self, first: Tensor, second: Tensor) -> Tensor:
        """Σ_k p_k·‖A·σ(Bx_k) − ȳ_k‖², B (points, units, inputs), A (points, outputs, units)."""
        output = second @ self.activation(first @ self.x.mT)
        return (self.shares * (output - self.means.mT).square().sum(dim=-2)).sum(dim=-1)

    def _conditional(
        self, first: Tensor, nbeta: float, localization: float
    ) -> tuple[Tensor, Tensor]:
        """ln of the density of B (points, units, inputs) with A integrated out, and nβ·E[L | B].

        Given B each row of A is Gaussian with precision Q = nβ·G + γI, G the second moments of the
        units.
        """
        features = self.activation(first @ self.x.mT)
        moments = (features * self.shares) @ features.mT
        pull = nbeta * (features * self.shares) @ self.means + localization * self.second.mT
        identity = torch.eye(first.shape[1], dtype=torch.float64)
        root = torch.linalg.cholesky(nbeta * moments + localization * identity)
        mean = torch.cholesky_solve(pull, root)
        outputs = len(self.second)
        covariance = torch.cholesky_inverse(root)
        spread = nbeta * (moments * covariance).sum(dim=(-2, -1))
        energy = 0.5 * (nbeta * self.misfit(first, mean.mT) + outputs * spread)
        log_root = root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        tie = localization * (first - self.first).square().sum(dim=(-2, -1))
        exponent = 0.5 * ((pull * mean).sum(dim=(-2, -1)) - tie)
        return exponent - outputs * log_root, energy


def _panels(centre: float, localization: float, width: float) -> tuple[Tensor, Tensor]:
    """Nodes and weights of ∫ db wherever exp(−(γ/2)(b − b*)²) counts, in t = asinh(b/FINEST)."""
    reach = REACH / math.sqrt(localization)
    width = width * min(1.0, reach / math.hypot(centre, FINEST))  # fine where γ is large
    low, high = (math.asinh((centre + side * reach) / FINEST) for side in (-1, 1))
    first, last = math.floor(low / width), math.ceil(high / width)
    node, weight = (torch.from_numpy(part) for part in np.polynomial.legendre.leggauss(NODES))
    starts = width * torch.arange(first, last, dtype=torch.float64)
    t = (starts.unsqueeze(1) + width * (node + 1) / 2).flatten()
    return FINEST * t.sinh(), weight.repeat(len(starts)) * FINEST * width / 2 * t.cosh()


def _network(
    label: str,
    activation: type[nn.Module],
    locations: tuple[float, ...],
    first: list[list[float]],
    second: list[list[float]],
    samples: int,
    asymptotic: float | None,
    bias: bool = False,
) -> KnownCase:
    """A network with one hidden layer at its true parameters.

    The noise of all samples at the same input sums to 0, so that the true parameters minimise the
    empirical loss, while the gradients of mini-batches are as noisy as those of independent noise.
    """
    name = f"data-{label}"
    layer = activation()
    b, a = (torch.tensor(rows, dtype=torch.float64) for rows in (first, second))

    @cache
    def data() -> tuple[Tensor, Tensor, OneLayer]:
        points = torch.tensor(locations, dtype=torch.float32).unsqueeze(1)
        points = torch.cat([points, torch.ones_like(points)], dim=1) if bias else points
        parts = np.array_split(np.arange(samples), len(points))
        repeats = torch.tensor([len(part) for part in parts])
        index = torch.repeat_interleave(torch.arange(len(points)), repeats)
        means = layer(points.double() @ b.mT) @ a.mT
        rng = generator(0, name)
        noise = torch.randn(samples, len(a), generator=rng, dtype=torch.float64)
        sums = torch.zeros_like(means).index_add_(0, index, noise)
        noise -= (sums / repeats.unsqueeze(1))[index]
        exact = OneLayer(layer, points.double(), repeats.double() / samples, means, b, a)
        order = torch.randperm(samples, generator=rng)
        return points[index][order], (means[index] + noise)[order].float(), exact

    def make() -> Problem:
        x, y, _ = data()
        with torch.device("meta"):
            hidden = nn.Linear(b.shape[1], len(b), bias=False)
            model = nn.Sequential(hidden, activation(), nn.Linear(len(b), len(a), bias=False))
        model.load_state_dict({"0.weight": b.float(), "2.weight": a.float()}, assign=True)
        return Problem(model, half_squared_error, (x, y))

    @cache
    def truth(nbeta: float, localization: float) -> Estimate:
        return data()[2].expectation(nbeta, localization)

    return KnownCase(name, make, truth, asymptotic)
