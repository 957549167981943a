"""Means of random samples, taken until the error is small enough or the products are spent.

Stopping when the error looks small picks the moments at which it looks smaller than it is. Three
things keep the intervals true: a minimum number of samples, few looks (each at the number of
samples the last one asked for), and Student's t with a correction for skewness.

A pilot, the first block of probes, decides whether a control variate pays. Deflation computes the
answer on an orthonormal basis Q of the dominant directions and samples only the rest.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lambdahat._core.check import require, require_count
from lambdahat._core.device import full_precision
from lambdahat._core.progress import report
from lambdahat.estimators.probes import Probes, block_sizes, crowded
from lambdahat.estimators.quantities import MeasureSettings, Work, products
from lambdahat.operators.base import LinearOperator
from lambdahat.problem import Problem
from lambdahat.results import NORMAL_QUANTILE, Estimate, Status, student_quantile

LEVEL = 0.95
MINIMUM = 16
# a pilot, its sketch and fresh probes take as many products as the dense diagonal of this order
SMALL = 3 * MINIMUM
LARGEST_DEFAULT = 4000


class Meter:
    """Counts the products with some operators of one order against a limit.

    The default limit is the smaller of 2P, which always leaves room for the dense answer, and 4000.
    """

    def __init__(
        self,
        task: str,
        limit: int | None,
        operator: LinearOperator,
        control: LinearOperator | None = None,
    ) -> None:
        self.task, self.dim = task, operator.dim
        self.operators = [operator] if control is None else [operator, control]
        default = min(2 * self.dim, LARGEST_DEFAULT)
        self.limit = default if limit is None else require_count(limit, "max_matvecs", least=2)
        self._before = sum(each.matvecs for each in self.operators)

    @property
    def spent(self) -> int:
        """Products made so far."""
        return sum(operator.matvecs for operator in self.operators) - self._before

    @property
    def left(self) -> int:
        """Products still allowed."""
        return self.limit - self.spent

    def tell(self, expected: float) -> None:
        """Report progress towards ``expected`` products in all."""
        report(self.task, self.spent, min(self.limit, math.ceil(expected)))


@dataclass(frozen=True)
class Mean:
    """Sample means (L,) plus an offset, standard errors (L,), and whether the goal was reached."""

    value: Tensor
    stderr: Tensor
    dof: int
    wanted: float
    reached: bool

    def estimate(self, meter: Meter) -> Estimate:
        """The one mean of L = 1, with the products spent on it."""
        status = Status.CONVERGED if self.reached else Status.BUDGET_SPENT
        return Estimate(float(self.value), float(self.stderr), meter.spent, status, self.dof)


@dataclass(frozen=True)
class Goal:
    """t·stderr ≤ tol·max(|offset + mean|, floor) at 95 %, for each of the L means.

    ``error`` gives the standard errors (L,) of the means from all samples, which may have further
    columns for it; ``inflation`` multiplies them.
    """

    tol: float
    offset: Tensor
    floor: Tensor
    error: Callable[[Tensor], Tensor] | None = None
    inflation: float = 1.0

    def beyond(self, known: Tensor) -> Goal:
        """The same with ``known`` already computed."""
        return dataclasses.replace(self, offset=self.offset + known)

    def judge(self, samples: Tensor, inflation: float = 1.0) -> Mean:
        """The means of ``samples`` (n, L), n > 1, and how many samples the goal needs."""
        finite = bool(torch.isfinite(samples[:, : self.offset.numel()]).all())
        cure = "look for a NaN loss or parameter"
        require(finite, "the operator", "give finite products", "NaN or infinity", cure)
        count, columns = len(samples), self.offset.numel()
        value = self.offset + samples[:, :columns].mean(dim=0)
        spread = standard_error(samples) if self.error is None else self.error(samples)
        stderr = inflation * self.inflation * spread
        allowed = self.tol * torch.maximum(value.abs(), self.floor)
        ratio = torch.where(stderr > 0, student_quantile(LEVEL, count - 1) * stderr / allowed, 0.0)
        wanted = count * float(ratio.max()) ** 2
        return Mean(value, stderr, count - 1, wanted, wanted <= count)


def standard_error(samples: Tensor) -> Tensor:
    """The standard error of the mean of samples (n, L), s/√n·(1 + 2g²/n) with g their skewness.

    For samples of skewness γ an interval of ±1.96 s/√n covers less than it says by 0.25γ²/n (the
    Edgeworth expansion, Hall 1992, §2.5), which a width larger by 1.1γ²/n makes up for. The
    skewness g of a small sample falls short of γ, hence 2: zᵀAz is skewed where a few eigenvalues
    dominate.
    """
    return samples.std(dim=0) / math.sqrt(len(samples)) * skewness_widening(samples)


def skewness_widening(samples: Tensor) -> Tensor:
    """1 + 2g²/n for samples (n, L) of skewness g, as in ``standard_error``."""
    centred = samples - samples.mean(dim=0)
    largest = centred.abs().amax(dim=0)  # squares of moments of high order may leave the range
    unit = centred / torch.where(largest > 0, largest, 1.0)
    second, third = unit.square().mean(dim=0), unit.pow(3).mean(dim=0)
    skewness = torch.where(second > 0, third / second.pow(1.5), 0.0)
    return 1 + 2 * skewness.square() / len(samples)


def mean_until(
    draw: Callable[[int], Tensor], samples: Tensor, goal: Goal, meter: Meter, price: int = 1
) -> Mean:
    """Add samples (n, L) from ``draw(n)``, ``price`` products each, until the goal is reached.

    Gives up when the limit is spent, or when the samples still wanted cost more than the P products
    of the dense answer and those are affordable.
    """
    while True:
        mean = goal.judge(samples)
        count = len(samples)
        meter.tell(meter.spent + price * max(0.0, min(mean.wanted, 1e12) - count))
        affordable = meter.left // price
        dense_is_cheaper = (mean.wanted - count) * price >= meter.dim <= meter.left
        if mean.reached or affordable < 1 or dense_is_cheaper:
            return mean
        ask = min(max(1.05 * mean.wanted - count, count / 4), 2 * count, affordable)
        samples = torch.cat([samples, draw(math.ceil(ask))])


TRIAL = 4

Spread = Callable[[Tensor, Tensor], float]


@dataclass(frozen=True)
class ProbePilot:
    """Probes Z (P, k) and their products with ``target``: A, or A − C for a control variate C."""

    target: LinearOperator
    control: LinearOperator | None
    block: Tensor
    image: Tensor

    @property
    def price(self) -> int:
        """2 with a control variate, else 1."""
        return 1 if self.control is None else 2


def plain_pilot(operator: LinearOperator, probes: Probes, count: int) -> ProbePilot:
    """``count`` products with the operator itself."""
    block = probes.draw(count)
    return ProbePilot(operator, None, block, operator @ block)


def with_control(pilot: ProbePilot, control: LinearOperator, spread: Spread) -> ProbePilot:
    """The same probes with A − C if that halves the variance, since a product then costs two.

    ``spread(Z, AZ)`` is the variance to compare, on a few of the probes first, then on all.
    """
    block, image = pilot.block[:, :TRIAL], pilot.image[:, :TRIAL]
    difference = image - (control @ block)
    if 2 * spread(block, difference) >= spread(block, image):
        return pilot
    rest = pilot.image[:, TRIAL:] - (control @ pilot.block[:, TRIAL:])
    difference = torch.cat([difference, rest], dim=1)
    if 2 * spread(pilot.block, difference) >= spread(pilot.block, pilot.image):
        return pilot
    return ProbePilot(pilot.target - control, control, pilot.block, difference)


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

    def extend(self, operator: LinearOperator, columns: Tensor) -> Sketch:
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
        """(I − QQᵀ)z for the next probes; sphere probes are rescaled to the length √(P − r)."""
        block = probes.draw(count)
        block = block - self.basis @ (self.basis.T @ block)
        if probes.kind == "sphere":
            radius = (probes.dim - self.basis.shape[1]) ** 0.5
            block *= radius / torch.linalg.vector_norm(block, dim=0)
        return block


@full_precision()
def orthonormal_beside(basis: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """F, W, R with columns = basis·W + F·R and F ⟂ ``basis``: block Gram–Schmidt, twice."""
    first = basis.T @ columns
    fresh, upper = torch.linalg.qr(columns - basis @ first)
    again = basis.T @ fresh
    fresh, correction = torch.linalg.qr(fresh - basis @ again)
    return fresh, first + again @ upper, correction @ upper


@dataclass(frozen=True)
class Quantity:
    """What is estimated: ``known(sketch)`` plus the mean of ``sample(U, AU)`` over probes U.

    The probes are residual, orthogonal to the sketch. Samples are (k,), or (k, C) with further
    columns for the goal's ``error``. ``removed(sketch, mean)`` is how much the sketch lowers half
    the variance of a sample, given their mean without it. ``inflation`` multiplies the standard
    error of samples that were kept because no further deflation seemed to pay.
    """

    known: Callable[[Sketch], Tensor]
    sample: Callable[[Tensor, Tensor], Tensor]
    removed: Callable[[Sketch, float], float]
    inflation: float = 1.0


def deflated_mean(
    quantity: Quantity,
    pilot: ProbePilot,
    probes: Probes,
    goal: Goal,
    meter: Meter,
    always: bool = False,
) -> Mean:
    """The quantity, by samples alone if few suffice, and otherwise by as large a sketch as pays.

    The products of a block of probes serve as the columns of a sketch, at one more product each.
    The samples of that block are then dropped and fresh probes drawn, independent of the sketch:
    given Q the estimate is unbiased and its standard error true. The rank stops growing with the
    first block that saves fewer products than it cost (Persson, Cortinovis & Kressner 2022, §2), or
    that the memory budget does not hold. ``always`` makes the first block in any case.
    """
    target, price = pilot.target, pilot.price
    sketch = Sketch.empty(target)
    images = pilot.image
    samples = _columns(quantity.sample(pilot.block, pilot.image))
    whole = float(samples[:, 0].mean())
    allowed = goal.tol * max(abs(float(goal.offset) + whole), float(goal.floor))
    per_unit = 2 * (NORMAL_QUANTILE / allowed) ** 2 if allowed > 0 else 0.0
    now, saved, gained, cost = goal, 0.0, math.inf, 1.0
    while always or (gained > cost and _promises(now.judge(samples), cost / gained, meter, price)):
        width = images.shape[1]
        if not always and crowded(target, width, SKETCHED, 2.0 * sketch.basis.shape[1]):
            break
        wider = sketch.extend(target, images)
        gained = per_unit * quantity.removed(wider, whole) - saved
        cost = 2.0 * width if saved else float(width)
        if gained <= width and not always:
            break
        sketch, saved, always = wider, saved + gained, False
        now = replace(goal.beyond(quantity.known(sketch)), inflation=quantity.inflation)
        block = sketch.residual_probes(probes, min(MINIMUM, meter.left // price))
        images = target @ block
        samples = _columns(quantity.sample(block, images))

    def draw(count: int) -> Tensor:
        held = 2.0 * (pilot.block.shape[1] + sketch.basis.shape[1])
        parts, expected = [], meter.spent + count * price
        for size in block_sizes(count, target, held=held):
            block = sketch.residual_probes(probes, size)
            parts.append(_columns(quantity.sample(block, target @ block)))
            meter.tell(expected)
        return torch.cat(parts)

    return mean_until(draw, samples, now, meter, price)


def _columns(samples: Tensor) -> Tensor:
    """Samples (k,) as (k, 1)."""
    return samples[:, None] if samples.ndim == 1 else samples


def _promises(mean: Mean, rate: float, meter: Meter, price: int) -> bool:
    """Whether one more block may pay.

    The missing samples must cost more than the block and fresh samples after it, both must be
    affordable, and going on at ``rate`` products per saved sample must cost fewer than P products.
    """
    count = mean.dof + 1
    missing, step = mean.wanted - count, count + MINIMUM
    in_all = meter.spent + max(missing * rate, step) * price
    return not mean.reached and missing > step and step * price <= meter.left and in_all < meter.dim


def sampled_work(problem: Problem, operator: LinearOperator, settings: MeasureSettings) -> Work:
    """A pilot at least, and then probes until the tolerance or the default limit is reached."""
    most = min(2 * operator.dim, LARGEST_DEFAULT)
    return products(operator, min(MINIMUM, operator.dim), most, min(operator.dim, 256))
