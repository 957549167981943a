"""Means of random samples, taken until the error is small enough or the products are spent.

Stopping when the error looks small picks the moments at which it looks smaller than it is. Three
things keep the intervals true: a minimum number of samples, few looks (each at the number of
samples the last one asked for), and Student's t with a correction for skewness.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lambdahat._core.check import require, require_count
from lambdahat._core.progress import report
from lambdahat.operators.base import LinearOperator
from lambdahat.results import Estimate, Status, student_quantile

LEVEL = 0.95
NORMAL_QUANTILE = student_quantile(LEVEL, math.inf)
MINIMUM = 16
# a pilot, its sketch and fresh probes take as many products as the dense diagonal of this order
SMALL = 3 * MINIMUM
LARGEST_DEFAULT = 4000


class Meter:
    """Counts the products with some operators of one order against a limit.

    The default limit is the smaller of 2P, which always leaves room for the dense answer, and 4000.
    """

    def __init__(self, task: str, limit: int | None, *operators: LinearOperator) -> None:
        self.task, self.operators, self.dim = task, operators, operators[0].dim
        default = min(2 * self.dim, LARGEST_DEFAULT)
        self.limit = default if limit is None else require_count(limit, "max_matvecs", least=2)
        self._before = sum(operator.matvecs for operator in operators)

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


def with_rounding(estimate: Estimate, error: float | Tensor, allowed: float) -> Estimate:
    """An estimate with the rounding ``error`` of the model's products in its standard error.

    PRECISION_LIMIT where that alone takes more than half of the half-width that is ``allowed``.
    """
    before = estimate.stderr
    if isinstance(before, Tensor):
        joined = torch.hypot(
            before.double(), torch.as_tensor(error, dtype=torch.float64, device=before.device)
        )
        size, share = (
            float(torch.as_tensor(error).norm()),
            float(before.norm()) / max(float(joined.norm()), 1e-300),
        )
        total: float | Tensor = joined
    else:
        size, total = float(error), math.hypot(float(before), float(error))
        share = float(before) / total if total > 0 else 1.0
    dof = math.inf if share == 0 or math.isinf(estimate.dof) else estimate.dof / share**4
    rules = size > 0 and 2 * NORMAL_QUANTILE * size > allowed
    status = Status.PRECISION_LIMIT if rules else estimate.status
    return dataclasses.replace(estimate, stderr=total, dof=dof, status=status)


@dataclass(frozen=True)
class Mean:
    """Sample means (L,) plus an offset, their standard errors (L,), and whether the goal was
    reached.
    """

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

    ``error`` gives the standard errors (L,) of the means from all samples; these may have further
    columns for it. They are multiplied by ``inflation``.
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
        """The means of ``samples`` (n, L), n > 1, and how many samples the goal wants for their
        spread.
        """
        finite = bool(torch.isfinite(samples[:, : self.offset.numel()]).all())
        require(
            finite,
            "the operator",
            "give finite products",
            "NaN or infinity",
            "look for a NaN loss or parameter",
        )
        count, columns = len(samples), self.offset.numel()
        value = self.offset + samples[:, :columns].mean(dim=0)
        inflation *= self.inflation
        stderr = inflation * (
            standard_error(samples) if self.error is None else self.error(samples)
        )
        allowed = self.tol * torch.maximum(value.abs(), self.floor)
        ratio = torch.where(stderr > 0, student_quantile(LEVEL, count - 1) * stderr / allowed, 0.0)
        wanted = count * float(ratio.max()) ** 2
        return Mean(value, stderr, count - 1, wanted, wanted <= count)


def standard_error(samples: Tensor) -> Tensor:
    """The standard error of the mean of samples (n, L), s/√n·(1 + 2g²/n) with g their skewness.

    An interval of ±1.96 s/√n covers less than it says by 0.25γ²/n for samples of skewness γ (the
    Edgeworth expansion, Hall 1992, §2.5), which a width larger by 1.1γ²/n makes up for. The
    skewness g of a small sample falls short of γ, hence 2: zᵀAz is skewed where a few eigenvalues
    dominate.
    """
    count = len(samples)
    centred = samples - samples.mean(dim=0)
    second, third = centred.square().mean(dim=0), centred.pow(3).mean(dim=0)
    skewness = torch.where(second > 0, third / second.pow(1.5), 0.0)
    return samples.std(dim=0) / math.sqrt(count) * (1 + 2 * skewness.square() / count)


def mean_until(
    draw: Callable[[int], Tensor], samples: Tensor, goal: Goal, meter: Meter, price: int = 1
) -> Mean:
    """Add samples (n, L) from ``draw(n)``, ``price`` products each, until the goal is reached.

    Gives up when the limit is spent, or when the samples still wanted cost more than the P products
    of the dense answer and those can be afforded.
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
