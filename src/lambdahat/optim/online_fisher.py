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
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from lambdahat._core.rng import generator
from lambdahat.optim.spectral_functions import Task, by_eigenvectors, by_products

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

    def settled(self, diagonal: bool) -> OnlineFisher:
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

    def renew(self, image: Tensor, turn: Tensor, share: Tensor) -> None:
        """Write R' = T·RY and E'R' over the old; where full, T and E' may be filled up to the
        order of others.
        """
        if self.diagonal:
            torch.bmm(turn, image, out=self.basis)
            torch.mul(self.basis, share.unsqueeze(-1), out=self.shared)
            return
        rank = image.shape[1]
        basis = torch.bmm(turn[:, :rank, :rank], image)
        self.basis.copy_(basis)
        self.shared.copy_(torch.bmm(share[:, :rank, :rank], basis))

    def dense(self) -> Tensor:
        """F, (S, d, d) in float64."""
        basis = self.basis.double()
        inner = torch.diag_embed(self.weights) if self.diagonal else self.weights
        eye = torch.eye(basis.shape[-1], dtype=basis.dtype, device=basis.device)
        return basis.mT @ inner @ basis + self.rest[:, None, None] * eye


class Seen(NamedTuple):
    """What a stack of estimates keeps of N rows √gain·X: ``joint`` RXᵀX, (S, R, d), which an
    update uses up.
    """

    fisher: OnlineFisher
    joint: Tensor
    samples: int
    power: Tensor
    gain: Tensor


def default_rank(size: int, rank: int | None = None) -> int:
    """R = min(⌈d/2⌉, 80), or ``rank``, below d."""
    return min(math.ceil(size / 2), MOST_RANK) if rank is None else min(rank, size - 1)


def start(rows: Tensor, rank: int, smoothing: Smoothing, diagonal: bool) -> OnlineFisher:
    """The estimate after five updates with the first rows X (S, N, d) and η = 0.9, from random
    orthonormal rows.

    The start is the multiple of the identity with the trace of XᵀX/N, split evenly between D and ρ.
    """
    stack, count, size = rows.shape
    basis = _random_rows(rank, size).to(rows).repeat(stack, 1, 1)
    power = power_of(rows)
    level = torch.clamp(power / (2 * count * size), min=smoothing.epsilon)
    weights = level.unsqueeze(-1).repeat(1, rank)
    weights = weights if diagonal else torch.diag_embed(weights)
    fisher = OnlineFisher(basis, torch.zeros_like(basis), weights, level)
    for _ in range(START_UPDATES):
        seen = Seen(
            fisher, joint_of(inner_of(fisher, rows), rows), count, power, torch.ones_like(power)
        )
        update([seen], smoothing._replace(eta=START_ETA))
    return fisher


@cache
def _random_rows(rank: int, size: int) -> Tensor:
    """Random orthonormal rows (R, d): the same for every estimate, so that a stack is its
    members one by one.
    """
    draw = torch.randn(
        size, rank, generator=generator(0, "online fisher", rank, size), dtype=torch.float64
    )
    rows: Tensor = torch.linalg.qr(draw).Q.mT
    return rows.contiguous()


def inner_of(fisher: OnlineFisher, rows: Tensor) -> Tensor:
    """H = RXᵀ, (S, R, N), for X (S, N, d)."""
    return torch.bmm(fisher.basis, rows.mT)


def joint_of(inner: Tensor, rows: Tensor) -> Tensor:
    """J = HX = RXᵀX, (S, R, d)."""
    return torch.bmm(inner, rows)


def precondition(
    fisher: OnlineFisher, rows: Tensor, inner: Tensor, in_place: bool = False
) -> Tensor:
    """X̂ = X − XRᵀER = β·X(F + κI)⁻¹ for X (S, N, d), whose H = RXᵀ is known."""
    if rows.stride(-1) == 1:
        add = rows.baddbmm_ if in_place else rows.baddbmm
        return add(inner.mT, fisher.shared, alpha=-1)
    # columns of a tensor that lies the other way in memory: the same product from the left
    add = rows.mT.baddbmm_ if in_place else rows.mT.baddbmm
    return add(fisher.shared.mT, inner, alpha=-1).mT


def update(seen: Sequence[Seen], smoothing: Smoothing) -> None:
    """F ← ηXᵀX/N + (1 − η)F, of which R directions are kept; the small problems of many stacks
    are solved together.
    """
    pools: dict[int, list[Seen]] = {}
    for one in seen:
        pools.setdefault(one.joint.shape[1] if one.fisher.diagonal else 0, []).append(one)
    for pool in pools.values():
        _update(pool, smoothing)


def _update(pool: list[Seen], smoothing: Smoothing) -> None:
    """One update of estimates that are solved together; vectors hold a number for each member of
    each stack.
    """
    fishers, eta, stacks = (
        [one.fisher for one in pool],
        smoothing.eta,
        [one.power.shape[0] for one in pool],
    )
    device = pool[0].power.device
    samples, size = (
        _constants(tuple(numbers), tuple(stacks), device)
        for numbers in zip(*((one.samples, one.joint.shape[2]) for one in pool), strict=True)
    )
    rest, trace = (
        torch.cat([fisher.rest for fisher in fishers]),
        torch.cat([fisher.trace() for fisher in fishers]),
    )
    rate = eta * torch.cat([one.gain for one in pool]) / samples
    mass = rate * torch.cat([one.power for one in pool]) + (1.0 - eta) * (size * rest + trace)
    alpha, epsilon = (
        torch.cat([value] * len(pool)) if isinstance(value, Tensor) else value
        for value in (smoothing.alpha, smoothing.epsilon)
    )
    task = Task(rate, mass, (1.0 - eta) * rest, size, alpha, smoothing.delta, epsilon)
    images = _images(pool, stacks, (1.0 - eta) / rate, rest)
    new = by_eigenvectors(images, task) if fishers[0].diagonal else by_products(images, task)
    turns, shares = (
        matrices.to(images[0].dtype).split(stacks) for matrices in (new.turn, new.share)
    )
    for fisher, image, turn, share in zip(fishers, images, turns, shares, strict=True):
        fisher.renew(image, turn, share)
    weights = new.weights.split(stacks)
    if not fishers[0].diagonal:
        weights = tuple(
            w[:, : i.shape[1], : i.shape[1]] for w, i in zip(weights, images, strict=True)
        )
    torch._foreach_copy_([fisher.weights for fisher in fishers], list(weights))
    torch._foreach_copy_([fisher.rest for fisher in fishers], list(new.rest.split(stacks)))


@cache
def _constants(values: tuple[int, ...], stacks: tuple[int, ...], device: torch.device) -> Tensor:
    """Each value as often as its stack has members, on a device, sent there once: a recorded
    step cannot send any.
    """
    spread = [
        float(value) for value, count in zip(values, stacks, strict=True) for _ in range(count)
    ]
    return torch.tensor(spread, dtype=torch.float64, device=device)


def _images(pool: list[Seen], stacks: list[int], keep: Tensor, rest: Tensor) -> list[Tensor]:
    """RXᵀX + keep·(D + ρI)R, (S, R, d), with keep = N(1 − η)/η: that is N/η times RY, Y the
    full-rank successor of F.

    Where D is full, in float64: on a GPU that is no dearer.
    """
    fishers = [one.fisher for one in pool]
    if fishers[0].diagonal:
        weights = torch.cat([fisher.weights for fisher in fishers])
        kept = (
            (keep.unsqueeze(-1) * (weights + rest.unsqueeze(-1)))
            .unsqueeze(-1)
            .to(pool[0].joint.dtype)
        )
        parts = zip(pool, kept.split(stacks), fishers, strict=True)
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
