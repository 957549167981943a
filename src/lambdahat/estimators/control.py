"""The pilot: a first block of probes, and from it whether a control variate pays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lambdahat.estimators.probes import Probes
from lambdahat.operators.base import LinearOperator

TRIAL = 4

Spread = Callable[[Tensor, Tensor], float]


@dataclass(frozen=True)
class Pilot:
    """Probes Z (P, k) and their products with ``target``: the operator A, or A − C with the control
    variate C.

    ``price`` is the number of products with A and C that one with the target takes.
    """

    target: LinearOperator
    near: LinearOperator | None
    block: Tensor
    image: Tensor

    @property
    def price(self) -> int:
        """2 with a control variate, else 1."""
        return 1 if self.near is None else 2


def plain_pilot(operator: LinearOperator, probes: Probes, count: int) -> Pilot:
    """``count`` products with the operator itself."""
    block = probes.draw(count)
    return Pilot(operator, None, block, operator @ block)


def with_control(pilot: Pilot, near: LinearOperator, spread: Spread) -> Pilot:
    """The same probes with A − C, if that is cheaper: a product costs two, so it must halve the
    variance.

    ``spread(Z, AZ)`` is the variance of what the probes are for, compared on the same probes: a few
    first, then all.
    """
    trial = slice(0, TRIAL)
    difference = pilot.image[:, trial] - (near @ pilot.block[:, trial])
    if 2 * spread(pilot.block[:, trial], difference) >= spread(
        pilot.block[:, trial], pilot.image[:, trial]
    ):
        return pilot
    rest = pilot.image[:, TRIAL:] - (near @ pilot.block[:, TRIAL:])
    difference = torch.cat([difference, rest], dim=1)
    if 2 * spread(pilot.block, difference) >= spread(pilot.block, pilot.image):
        return pilot
    return Pilot(pilot.target - near, near, pilot.block, difference)
