"""Deflation: an orthonormal basis Q of the dominant directions, on which the answer is computed
and not sampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lambdahat._core.precision import full_precision
from lambdahat.estimators.control import Pilot
from lambdahat.estimators.probes import Probes, block_sizes, crowded
from lambdahat.estimators.sequential import MINIMUM, NORMAL_QUANTILE, Goal, Mean, Meter, mean_until
from lambdahat.operators.base import LinearOperator

SKETCHED = 4.0  # vectors for each column of a block and of a sketch of it, beside a product


@dataclass(frozen=True)
class Sketch:
    """Q (P, r) with orthonormal columns, and AQ."""

    basis: Tensor
    image: Tensor

    @classmethod
    def empty(cls, operator: LinearOperator) -> Sketch:
        """No directions, r = 0."""
        dtype = torch.promote_types(operator.dtype, torch.float32)
        nothing = torch.empty(operator.dim, 0, dtype=dtype, device=operator.device)
        return cls(nothing, nothing)

    def extended(self, operator: LinearOperator, columns: Tensor) -> Sketch:
        """With the directions of ``columns`` (P, k) too, by one product for each."""
        fresh = orthonormal_beside(self.basis, columns.to(self.basis.dtype))[0]
        image = (operator @ fresh).to(self.image.dtype)
        return Sketch(torch.cat([self.basis, fresh], dim=1), torch.cat([self.image, image], dim=1))

    @full_precision()
    def core(self) -> Tensor:
        """QᵀAQ (r, r) in float64 on the CPU."""
        return (self.basis.T @ self.image).double().cpu()

    @full_precision()
    def gram(self) -> Tensor:
        """(AQ)ᵀAQ (r, r) in float64 on the CPU."""
        return (self.image.T @ self.image).double().cpu()

    @full_precision()
    def residual_probes(self, probes: Probes, count: int) -> Tensor:
        """(I − QQᵀ)z for the next probes; on the sphere, uniform on that of radius √(P − r) in
        the complement of Q.
        """
        block = probes.draw(count)
        block = block - self.basis @ (self.basis.T @ block)
        if probes.kind == "sphere":
            block *= (probes.dim - self.basis.shape[1]) ** 0.5 / torch.linalg.vector_norm(
                block, dim=0
            )
        return block


@full_precision()
def orthonormal_beside(basis: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """F, W, R with columns = basis·W + F·R, F orthonormal and orthogonal to ``basis``: block
    Gram–Schmidt, twice.
    """
    first = basis.T @ columns
    fresh, upper = torch.linalg.qr(columns - basis @ first)
    again = basis.T @ fresh
    fresh, correction = torch.linalg.qr(fresh - basis @ again)
    return fresh, first + again @ upper, correction @ upper


@dataclass(frozen=True)
class Quantity:
    """What is estimated: ``known(sketch)`` plus the mean of ``sample(U, AU)`` (k,) over residual
    probes U (P, k).

    Samples (k, C) have further columns, which the goal's ``error`` reads.

    ``removed(sketch, mean)`` is how much less half the variance of a sample is than without the
    sketch, given the mean of the samples without it. ``inflation`` multiplies the standard error of
    samples that were kept because they looked as if no further deflation paid.
    """

    known: Callable[[Sketch], Tensor]
    sample: Callable[[Tensor, Tensor], Tensor]
    removed: Callable[[Sketch, float], float]
    inflation: float = 1.0


def deflated_mean(
    quantity: Quantity, pilot: Pilot, probes: Probes, goal: Goal, meter: Meter, always: bool = False
) -> Mean:
    """The quantity, by samples alone where those are few, and otherwise by as large a sketch as
    pays.

    The products of a block of probes serve once more: as the columns of a sketch, which cost one
    more product each. The samples of that block are then dropped and fresh probes drawn, which the
    sketch has not seen: given Q the estimate is unbiased and its standard error true. What a block
    saves is known exactly once it is there, though the variance that is left is not (Persson,
    Cortinovis & Kressner 2022, §2): the rank stops growing with the first block that saves fewer
    products than it cost, or that a budget of memory does not hold. ``always`` makes the first
    block whether or not it promises to pay.
    """
    target, price = pilot.target, pilot.price
    sketch, images, samples = (
        Sketch.empty(target),
        pilot.image,
        _columns(quantity.sample(pilot.block, pilot.image)),
    )
    whole = float(samples[:, 0].mean())
    allowed = goal.tol * max(abs(float(goal.offset) + whole), float(goal.floor))
    per_unit = 2 * (NORMAL_QUANTILE / allowed) ** 2 if allowed > 0 else 0.0
    now, saved, gained, cost = goal, 0.0, math.inf, 1.0
    while always or (gained > cost and _promises(now.judge(samples), cost / gained, meter, price)):
        width = images.shape[1]
        if not always and crowded(target, width, SKETCHED, 2.0 * sketch.basis.shape[1]):
            break
        wider = sketch.extended(target, images)
        gained, cost = (
            per_unit * quantity.removed(wider, whole) - saved,
            2.0 * width if saved else float(width),
        )
        if gained <= width and not always:
            break
        sketch, saved, always = wider, saved + gained, False
        now = replace(goal.beyond(quantity.known(sketch)), inflation=quantity.inflation)
        block = sketch.residual_probes(probes, min(MINIMUM, meter.left // price))
        images = target @ block
        samples = _columns(quantity.sample(block, images))

    def draw(count: int) -> Tensor:
        held = 2.0 * (pilot.block.shape[1] + sketch.basis.shape[1])
        blocks = (
            sketch.residual_probes(probes, size) for size in block_sizes(count, target, held=held)
        )
        return torch.cat([_columns(quantity.sample(block, target @ block)) for block in blocks])

    return mean_until(draw, samples, now, meter, price)


def _columns(samples: Tensor) -> Tensor:
    """Samples (k,) as (k, 1)."""
    return samples[:, None] if samples.ndim == 1 else samples


def _promises(mean: Mean, rate: float, meter: Meter, price: int) -> bool:
    """Whether one more block may pay: the samples missing cost more than it and the fresh ones
    after it, and it can be afforded; and blocks that go on saving samples at ``rate`` products each
    come to fewer products than P.
    """
    count = mean.dof + 1
    missing, step = mean.wanted - count, count + MINIMUM
    in_all = meter.spent + max(missing * rate, step) * price
    return not mean.reached and missing > step and step * price <= meter.left and in_all < meter.dim
