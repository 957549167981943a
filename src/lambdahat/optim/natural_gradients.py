"""The gradient of a tensor preconditioned along each of its axes in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lambdahat.optim.online_fisher import (
    OnlineFisher,
    Seen,
    Smoothing,
    default_rank,
    inner_of,
    joint_of,
    power_of,
    precondition,
    start,
    update,
)

FIRST_UPDATES = 10
TINY = 1e-60  # for gradients of zeros

AxisFishers = dict[int, OnlineFisher]


class Rule(NamedTuple):
    """How gradients are preconditioned: the smoothing, the rank (None: min(⌈d/2⌉, 80)), and
    whether norms are kept.
    """

    smoothing: Smoothing
    rank: int | None
    rescale: bool


class Directions(NamedTuple):
    """The preconditioned stacks: ``tensors``, each (S, *shape), times ``factors``, with squared
    norms ``powers``.

    The last two are in float64, for all members of all stacks one after the other.
    """

    tensors: list[Tensor]
    factors: Tensor
    powers: Tensor


def updating(step: int, period: int) -> bool:
    """Whether step t = 0, 1, … updates the estimates: the first ten do, then one in ``period``."""
    return step < FIRST_UPDATES or step % period == 0


def natural_gradients(
    stacks: Sequence[AxisFishers], gradients: Sequence[Tensor], rule: Rule, update_now: bool
) -> Directions:
    """The preconditioned gradients (S, *shape) of several stacks, and an update of all estimates
    where it is due.

    The first call starts the estimates, one for each axis longer than 1. An update sees the
    gradient as the axes before it left it, and changes what later calls do.
    """
    tensors, seen = list(gradients), []
    before = power = _powers(tensors)
    gain = torch.ones_like(before)
    last = max(tensor.ndim for tensor in tensors) - 2
    for axis in range(last + 1):
        for index in _longer(tensors, axis):
            rows, fishers = _rows(tensors[index], axis), stacks[index]
            if axis not in fishers:
                fishers[axis] = _started(rows, _members(gain, tensors, index), rule)
            inner = inner_of(fishers[axis], rows)
            if update_now:
                met = (_members(scalar, tensors, index) for scalar in (power, gain))
                seen.append(Seen(fishers[axis], joint_of(inner, rows), rows.shape[1], *met))
            own = tensors[index] is not gradients[index]
            tensors[index] = _restored(
                precondition(fishers[axis], rows, inner, own), axis, tensors[index]
            )
        if update_now or axis == last:  # between axes only an update asks for the norms
            power = _powers(tensors)
            gain = (before + TINY) / (power + TINY) if rule.rescale else gain
    if seen:
        update(seen, rule.smoothing)
    return Directions(tensors, gain.sqrt(), gain * power)


def _longer(tensors: list[Tensor], axis: int) -> list[int]:
    """The stacks (S, *shape) whose tensors have this axis, of length above 1."""
    return [
        index
        for index, tensor in enumerate(tensors)
        if tensor.ndim > axis + 1 and tensor.shape[axis + 1] > 1
    ]


def _members(values: Tensor, stacks: list[Tensor], index: int) -> Tensor:
    """The part of ``values`` that belongs to the stack at ``index``."""
    start = sum(stack.shape[0] for stack in stacks[:index])
    return values[start : start + stacks[index].shape[0]]


def _started(rows: Tensor, gain: Tensor, rule: Rule) -> OnlineFisher:
    scaled = rows * gain.sqrt()[:, None, None].to(rows.dtype)
    return start(
        scaled, default_rank(rows.shape[-1], rule.rank), rule.smoothing, rows.device.type == "cpu"
    )


def _powers(stacks: list[Tensor]) -> Tensor:
    """The squared norms of all members of all stacks, in float64."""
    if stacks[0].device.type == "cpu":  # cheaper than a norm
        members = [member.reshape(-1) for stack in stacks for member in stack.unbind()]
        return torch.stack([torch.dot(member, member) for member in members]).double()
    return torch.cat([power_of(stack) for stack in stacks])


def _rows(tensor: Tensor, axis: int) -> Tensor:
    """A stack (S, *shape) as (S, N, d) with d the length of ``axis``; the first and the last
    axis without a copy.
    """
    if tensor.ndim == 3:
        return tensor if axis else tensor.mT
    stack, size = tensor.shape[0], tensor.shape[axis + 1]
    if axis == tensor.ndim - 2:
        return tensor.reshape(stack, -1, size)
    if axis == 0:
        return tensor.reshape(stack, size, -1).mT
    return tensor.movedim(axis + 1, -1).reshape(stack, -1, size)


def _restored(rows: Tensor, axis: int, like: Tensor) -> Tensor:
    """The inverse of ``_rows``."""
    if like.ndim == 3:
        return rows if axis else rows.mT
    if axis == like.ndim - 2:
        return rows.reshape(like.shape)
    if axis == 0:
        return rows.mT.reshape(like.shape)
    return rows.reshape(like.movedim(axis + 1, -1).shape).movedim(-1, axis + 1)
