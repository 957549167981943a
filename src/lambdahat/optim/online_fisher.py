"""The online Fisher estimate of Povey, Zhang and Khudanpur (2015): low rank plus a multiple of the
identity, in stacks.

One estimate F = RᵀDR + ρI belongs to one axis of one tensor; the other axes are the N rows of X,
(N, d). Everything works on stacks of S of them at once, and nothing waits for the device. In place
of the authors' W = E^½R, R and ER are kept: any rotation of R's rows then serves, with D and E
rotated along.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from lambdahat._core.device import multiply_stacks
from lambdahat._core.rng import generator

CONVERGED = 1e-9
# how far below δ the eigenvalues of Z^½ may fall, relative to the largest, after one great gradient
SPIKE = 1e-3
# eigenvalues nearer to the floor than this, relative to the largest, may end on either side of it
NEAR = 1e-6
MARGIN = 1.02


class FisherTask(NamedTuple):
    """The inputs of an update beside RY/rate; tensors are (S,) in float64.

    ``rate`` is η/N, ``mass`` tr Y, ``least`` the floor ρ(1 − η) of the singular values of RY.
    """

    rate: Tensor
    mass: Tensor
    least: Tensor
    size: Tensor
    alpha: float | Tensor
    delta: float
    epsilon: float | Tensor


class Next(NamedTuple):
    """R' = ``turn``·RY/rate, with ``turn`` (S, R, R); D' and ``share`` E' = D'(D' + β'I)⁻¹, (S, R)
    where diagonal, else (S, R, R); ``rest`` ρ', (S,). All in float64.
    """

    turn: Tensor
    weights: Tensor
    share: Tensor
    rest: Tensor


def by_eigenvectors(images: list[Tensor], task: FisherTask) -> Next:
    """Z = (RY)(RY)ᵀ = UCUᵀ, R' = C^{−½}Uᵀ·RY and D' = max(C^½ − ρ', floor) for stacks (S, R, d) of
    RY/rate, of one R.

    The eigenvalues of Z span the square of those of F, and NGD lifts the small ones: an eigensolver
    in float32 is accurate to the largest and turns the direction by several percent. The entries of
    Z may be float32 sums: their errors are relative to the rows of RY that they come from.
    """
    square = torch.cat([multiply_stacks(image, image.mT) for image in images]).double()
    # a member that has diverged must not stop the others
    values, vectors = _eigenpairs(square.nan_to_num_(0.0, 0.0, 0.0))
    rate = task.rate.unsqueeze(-1)
    root = torch.maximum(values.clamp_min(0.0).sqrt() * rate, task.least.unsqueeze(-1))
    rest = (task.mass - root.sum(-1)) / (task.size - root.shape[-1])
    floor = torch.clamp(task.delta * root[:, -1], min=task.epsilon)
    weights = torch.maximum(root - rest.unsqueeze(-1), floor.unsqueeze(-1))
    rest = torch.maximum(rest, floor)
    beta = smoothing_level(weights.sum(-1), rest, task.size, task.alpha).unsqueeze(-1)
    return Next(vectors.mT * (rate / root).unsqueeze(-1), weights, weights / (weights + beta), rest)


SPREAD = 1 << 14  # entries of matrices from which a second thread pays


def _eigenpairs(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of a stack (S, R, R) on a CPU.

    LAPACK solves them one by one and, at such orders, on one thread: half of them go to another,
    where PyTorch may use one.
    """
    half = len(matrices) // 2
    if not half or matrices.numel() < SPREAD or torch.get_num_threads() == 1:
        values, vectors = torch.linalg.eigh(matrices)
        return values, vectors
    others = _second_thread().submit(torch.linalg.eigh, matrices[:half])
    own = torch.linalg.eigh(matrices[half:])
    pairs = zip(others.result(), own, strict=True)
    values, vectors = (torch.cat(parts) for parts in pairs)
    return values, vectors


@cache
def _second_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "lambdahat-eigenpairs")


def smoothing_level(trace: Tensor, rest: Tensor, size: Tensor, alpha: float | Tensor) -> Tensor:
    """β = ρ + κ = ρ(1 + α) + α·tr(D)/d."""
    return rest * (1.0 + alpha) + alpha * trace / size


def by_products(images: list[Tensor], task: FisherTask) -> Next:
    """The same by R' = Z^{−½}RY and D' = max(Z^½ − ρ'I, floor·I), for stacks of any R."""
    square, real = _pad_and_stack([torch.bmm(image, image.mT) for image in images])
    scale = _column(torch.linalg.matrix_norm(square))
    eye = torch.eye(square.shape[-1], dtype=scale.dtype, device=scale.device)
    # rounding leaves eigenvalues below 0 where the floor is this low
    square = square / scale + 1e-15 * eye
    root, whiten = _roots(square, eye, SPIKE * task.delta)
    root, whiten = root * scale.sqrt() * _column(task.rate), whiten / scale.sqrt()
    largest = (_largest(square) * scale[:, 0, 0]).sqrt() * task.rate
    rest = (task.mass - _trace(root, real)) / (task.size - real.sum(-1))
    floor = torch.clamp(task.delta * largest, min=task.epsilon)
    weights = _raise_to_floor(root - _column(rest) * eye, floor, largest + rest.abs(), eye)
    rest = torch.maximum(rest, floor)
    beta = smoothing_level(_trace(weights, real), rest, task.size, task.alpha)
    bound = MARGIN * torch.maximum(largest, floor) + beta
    # β' ≥ ρ' ≥ floor and D' ≥ floor, so that D' + β' ≥ 2δ of its largest eigenvalue
    inverse = _inverse((weights + _column(beta) * eye) / _column(bound), eye, 0.5 * task.delta)
    return Next(whiten, weights, eye - _column(beta / bound) * inverse, rest)


def _pad_and_stack(squares: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Matrices of several orders as one stack (S, R, R), and 1 for each real row, (S, R)."""
    most = max(square.shape[-1] for square in squares)
    filled, real = [], []
    for square in squares:
        lack = most - square.shape[-1]
        # rows that fill up are eigenvectors of an eigenvalue that is not the largest
        diagonal = pad(torch.zeros_like(square[..., 0]), (0, lack), value=1.0) * square[:, :1, 0]
        filled.append(pad(square, (0, lack, 0, lack)) + torch.diag_embed(diagonal))
        real.append(pad(torch.ones_like(square[..., 0]), (0, lack)))
    return torch.cat(filled), torch.cat(real)


def _raise_to_floor(matrices: Tensor, floor: Tensor, bound: Tensor, eye: Tensor) -> Tensor:
    """max(X, floor·I) of symmetric X, ‖X‖ ≤ ``bound``: floor + (K + K·sign K)/2, K = X − floor."""
    above = matrices - _column(floor) * eye
    sign = _sign(above / _column(MARGIN * (bound + floor)))
    above = 0.5 * (above + torch.bmm(above, sign))
    return 0.5 * (above + above.mT) + _column(floor) * eye


def _column(values: Tensor) -> Tensor:
    return values[:, None, None]


def _trace(matrices: Tensor, real: Tensor | None = None) -> Tensor:
    diagonal = matrices.diagonal(dim1=-2, dim2=-1)
    return (diagonal if real is None else diagonal * real).sum(-1)


def _schedule(low: float) -> list[float]:
    """Scales c of the cubic cx(3 − c²x²)/2 that take [low, 1] to 1 fastest (Chen & Chow, 2014)."""
    scales = []
    while 1.0 - low > CONVERGED:
        scale = math.sqrt(3.0 / (1.0 + low + low * low))
        scales.append(scale)
        low = 0.5 * scale * low * (3.0 - (scale * low) ** 2)
    return scales


def _roots(square: Tensor, eye: Tensor, low: float) -> tuple[Tensor, Tensor]:
    """Z^½ and Z^{−½}, eigenvalues in [low², 1], by coupled Newton–Schulz (Higham 2008, 6.35)."""
    root, inverse = square, eye.expand_as(square)
    for scale in _schedule(max(low, 1e-8)):
        product = torch.bmm(inverse, root)
        keep, take = 1.5 * scale, -0.5 * scale**3
        root = torch.baddbmm(root, root, product, beta=keep, alpha=take)
        inverse = torch.baddbmm(inverse, product, inverse, beta=keep, alpha=take)
    return root, inverse


def _sign(matrices: Tensor) -> Tensor:
    """sign(X) of symmetric X, ‖X‖ ≤ 1; eigenvalues within ``NEAR`` of 0 stay in between."""
    for scale in _schedule(NEAR):
        square, keep, take = torch.bmm(matrices, matrices), 1.5 * scale, -0.5 * scale**3
        matrices = torch.baddbmm(matrices, matrices, square, beta=keep, alpha=take)
    return matrices


def _inverse(matrices: Tensor, eye: Tensor, low: float) -> Tensor:
    """X⁻¹ for eigenvalues in [low, 1]: Newton–Schulz (Hotelling, Schulz), scaled."""
    inverse = eye.expand_as(matrices)
    while 1.0 - low > CONVERGED:
        scale = 2.0 / (1.0 + low)
        product, keep, take = torch.bmm(matrices, inverse), 2 * scale, -(scale**2)
        inverse = torch.baddbmm(inverse, inverse, product, beta=keep, alpha=take)
        low = 4.0 * low / (1.0 + low) ** 2
    return inverse


def _largest(square: Tensor) -> Tensor:
    """The largest eigenvalue of Z, ‖Z‖_F = 1: tr(Z·Z^k)/tr(Z^k), k = 2¹⁵, by squaring."""
    power = square
    for _ in range(3):
        power = power / _column(_trace(power))
        for _ in range(5):
            power = torch.bmm(power, power)
    return (square * power).sum((-2, -1)) / _trace(power)


MOST_RANK = 80
START_UPDATES, START_ETA = 5, 0.9


class Smoothing(NamedTuple):
    """α of κ = (α/d)·tr F, η of the running mean, the floors δ (relative) and ε (absolute).

    α and ε are one number, or one for each member, (S,).
    """

    alpha: float | Tensor
    eta: float
    delta: float
    epsilon: float | Tensor


@dataclass
class OnlineFisher:
    """S estimates F = RᵀDR + ρI of order d; ``update`` changes them in place.

    ``basis`` R, (S, R, d), has orthonormal rows; ``shared`` is ER with E = D(D + βI)⁻¹, β = ρ(1 +
    α) + α·tr(D)/d; ``weights`` D is (S, R) on a CPU, where it is diagonal, else (S, R, R); ``rest``
    is ρ, (S,). D and ρ are float64.
    """

    basis: Tensor
    shared: Tensor
    weights: Tensor
    rest: Tensor

    @property
    def diagonal(self) -> bool:
        """Whether D is kept as its diagonal."""
        return self.weights.ndim == 2

    def with_diagonal(self, diagonal: bool) -> OnlineFisher:
        """The same estimates with D as asked: a state may come from another kind of device."""
        if diagonal == self.diagonal:
            return self
        if not diagonal:
            return OnlineFisher(self.basis, self.shared, torch.diag_embed(self.weights), self.rest)
        weights, vectors = torch.linalg.eigh(self.weights)
        turn = vectors.mT.to(self.basis.dtype)
        return OnlineFisher(turn @ self.basis, turn @ self.shared, weights, self.rest)

    def trace(self) -> Tensor:
        """tr D, (S,)."""
        return (self.weights if self.diagonal else self.weights.diagonal(dim1=-2, dim2=-1)).sum(-1)

    def dense(self) -> Tensor:
        """F, (S, d, d) in float64."""
        basis = self.basis.double()
        inner = torch.diag_embed(self.weights) if self.diagonal else self.weights
        eye = torch.eye(basis.shape[-1], dtype=basis.dtype, device=basis.device)
        return basis.mT @ inner @ basis + self.rest[:, None, None] * eye


class Seen(NamedTuple):
    """The statistics of N rows √gain·X: ``joint`` RXᵀX, (S, R, d), overwritten by an update."""

    fisher: OnlineFisher
    joint: Tensor
    samples: int
    power: Tensor
    gain: Tensor


def default_rank(size: int, rank: int | None = None) -> int:
    """R = min(⌈d/2⌉, 80), or ``rank``, below d."""
    return min(math.ceil(size / 2), MOST_RANK) if rank is None else min(rank, size - 1)


def start(rows: Tensor, rank: int, smoothing: Smoothing, diagonal: bool) -> OnlineFisher:
    """The estimate after five updates with the first rows X (S, N, d) and η = 0.9.

    It starts at the multiple of the identity with the trace of XᵀX/N, on random orthonormal rows.
    """
    stack, count, size = rows.shape
    basis = _random_rows(rank, size).to(rows).repeat(stack, 1, 1)
    power = power_of(rows)
    level = torch.clamp(power / (2 * count * size), min=smoothing.epsilon)
    weights = level.unsqueeze(-1).repeat(1, rank)
    weights = weights if diagonal else torch.diag_embed(weights)
    fisher = OnlineFisher(basis, torch.zeros_like(basis), weights, level)
    for _ in range(START_UPDATES):
        joint = multiply_stacks(multiply_stacks(fisher.basis, rows.mT), rows)
        seen = Seen(fisher, joint, count, power, torch.ones_like(power))
        update([seen], smoothing._replace(eta=START_ETA))
    return fisher


@cache
def _random_rows(rank: int, size: int) -> Tensor:
    """Random orthonormal rows (R, d), the same for all, so that a stack equals its members."""
    rng = generator(0, "online fisher", rank, size)
    draw = torch.randn(size, rank, generator=rng, dtype=torch.float64)
    rows: Tensor = torch.linalg.qr(draw).Q.mT
    return rows.contiguous()


def precondition(
    fisher: OnlineFisher, rows: Tensor, inner: Tensor, in_place: bool = False
) -> Tensor:
    """X̂ = X − XRᵀER = β·X(F + κI)⁻¹ for X (S, N, d), whose H = RXᵀ (S, R, N) is known."""
    if rows.stride(-1) == 1:
        return multiply_stacks(inner.mT, fisher.shared, rows, -1.0, overwrite=in_place)
    # columns of a tensor that lies the other way in memory: the same product from the left
    return multiply_stacks(fisher.shared.mT, inner, rows.mT, -1.0, overwrite=in_place).mT


def update(seen: Sequence[Seen], smoothing: Smoothing) -> None:
    """F ← ηXᵀX/N + (1 − η)F, cut to R directions; stacks solve their small problems together."""
    pools: dict[int, list[Seen]] = {}
    for one in seen:
        pools.setdefault(one.joint.shape[1] if one.fisher.diagonal else 0, []).append(one)
    for pool in pools.values():
        _update(pool, smoothing)


def _update(pool: list[Seen], smoothing: Smoothing) -> None:
    """Update estimates that are solved together; vectors hold a number per member."""
    fishers, eta, device = [one.fisher for one in pool], smoothing.eta, pool[0].power.device
    stacks = [one.power.shape[0] for one in pool]
    samples = _constants(tuple(one.samples for one in pool), tuple(stacks), device)
    size = _constants(tuple(one.joint.shape[2] for one in pool), tuple(stacks), device)
    rest = torch.cat([fisher.rest for fisher in fishers])
    trace = torch.cat([fisher.trace() for fisher in fishers])
    rate = eta * torch.cat([one.gain for one in pool]) / samples
    mass = rate * torch.cat([one.power for one in pool]) + (1.0 - eta) * (size * rest + trace)
    alpha, epsilon = (
        torch.cat([value] * len(pool)) if isinstance(value, Tensor) else value
        for value in (smoothing.alpha, smoothing.epsilon)
    )
    task = FisherTask(rate, mass, (1.0 - eta) * rest, size, alpha, smoothing.delta, epsilon)
    images = _images(pool, stacks, (1.0 - eta) / rate, rest)
    new = by_eigenvectors(images, task) if fishers[0].diagonal else by_products(images, task)
    turns, shares = (part.to(images[0].dtype).split(stacks) for part in (new.turn, new.share))
    weights = list(new.weights.split(stacks))
    for i, (fisher, image, turn, share) in enumerate(
        zip(fishers, images, turns, shares, strict=True)
    ):
        if fisher.diagonal:
            fisher.basis.copy_(multiply_stacks(turn, image))
            torch.mul(fisher.basis, share.unsqueeze(-1), out=fisher.shared)
            continue
        rank = image.shape[1]  # what was solved may be padded to a larger order
        basis = torch.bmm(turn[:, :rank, :rank], image)
        fisher.basis.copy_(basis)
        fisher.shared.copy_(torch.bmm(share[:, :rank, :rank], basis))
        weights[i] = weights[i][:, :rank, :rank]
    torch._foreach_copy_([fisher.weights for fisher in fishers], weights)
    torch._foreach_copy_([fisher.rest for fisher in fishers], list(new.rest.split(stacks)))


@cache
def _constants(values: tuple[int, ...], stacks: tuple[int, ...], device: torch.device) -> Tensor:
    """Each value once per member, on the device; sent once, as captured steps cannot send."""
    spread = np.repeat(np.array(values, float), stacks)
    return torch.tensor(spread, dtype=torch.float64, device=device)


def _images(pool: list[Seen], stacks: list[int], keep: Tensor, rest: Tensor) -> list[Tensor]:
    """RXᵀX + keep·(D + ρI)R = (N/η)·RY, (S, R, d), keep = N(1 − η)/η; float64 where D is full."""
    fishers = [one.fisher for one in pool]
    if fishers[0].diagonal:
        weights = torch.cat([fisher.weights for fisher in fishers])
        kept = keep.unsqueeze(-1) * (weights + rest.unsqueeze(-1))
        scales = kept.unsqueeze(-1).to(pool[0].joint.dtype).split(stacks)
        parts = zip(pool, scales, fishers, strict=True)
        return [one.joint.addcmul_(scale, fisher.basis) for one, scale, fisher in parts]
    images = []
    for one, scale in zip(pool, keep[:, None, None].split(stacks), strict=True):
        level = one.fisher.rest.unsqueeze(-1).expand(-1, one.joint.shape[1])
        inner = scale * (one.fisher.weights + torch.diag_embed(level))
        images.append(torch.baddbmm(one.joint.double(), inner, one.fisher.basis.double()))
    return images


def power_of(tensor: Tensor) -> Tensor:
    """The squared norm of each member of a stack, (S,) in float64."""
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=tuple(range(1, tensor.ndim)))
    return norms.double().square()
