"""The largest learning rate at which training does not diverge, found by training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from lambdahat._core.check import describe, require, require_choice, require_count, require_positive
from lambdahat._core.progress import report
from lambdahat._core.rng import generator
from lambdahat.problem import Problem, require_problem
from lambdahat.problem.batches import Batch, concatenate, take
from lambdahat.randommatrix.rate_limits import PositiveEstimate
from lambdahat.results import Array

MakeOptimizer = Callable[[list[Tensor], float], Optimizer]
Parts = list[tuple[float, Batch]]  # a batch in parts, each with its share of the mean

NAMED: dict[str, MakeOptimizer] = {
    "sgd": lambda parameters, rate: torch.optim.SGD(parameters, rate),
    "momentum": lambda parameters, rate: torch.optim.SGD(parameters, rate, momentum=0.9),
    "nesterov": lambda parameters, rate: torch.optim.SGD(
        parameters, rate, momentum=0.9, nesterov=True
    ),
    "adam": lambda parameters, rate: torch.optim.Adam(parameters, rate),
}
# times the first loss; heavy ball at its limit passes (2/(1 − ρ))², 4·10⁴ at ρ = 0.99, and returns
BEYOND_RETURN = 1e8
STRIDE = 4.0
MOST_STRIDES = 30
SMALL = 1 / 4  # of the rate to start with: where what noise adds to the loss is measured
MARGIN = 2.0


class NoLimitError(ValueError):
    """The search met no rate at which stability ends."""


@dataclass(frozen=True)
class StableRate(PositiveEstimate):
    """The largest stable learning rate, the geometric mean over ``per_run``, runs with other batch
    orders.

    ``stderr`` is of the runs and of the bisection's last interval, in quadrature. ``cost`` counts
    gradients of batches of ``batch_size`` samples. A run is stable if ``steps`` steps end at a loss
    below ``factor`` times the first, or, for None, below what noise lets expect.
    """

    per_run: Array = field(default_factory=lambda: np.zeros(0))
    batch_size: int = 0
    steps: int = 0
    factor: float | None = 1.0


def largest_stable_rate(
    problem: Problem,
    optimizer: str | MakeOptimizer = "sgd",
    batch_size: int | None = None,
    *,
    steps: int = 100,
    start: float = 0.1,
    tol: float = 0.05,
    runs: int = 3,
    factor: float | None = 1.0,
    seed: int = 0,
) -> StableRate:
    """The largest learning rate at which ``steps`` steps from the problem's parameters do not
    diverge.

    A run diverges if the loss of a batch is not finite, or if the loss of all data ends above
    ``factor`` times the first. A network that dies ends near the loss of chance, so at the start of
    training a factor below 1 asks that it learns. Near a minimum noise alone raises the loss: with
    None a run diverges if it ends above the first loss by 2·4² times as much as runs at a quarter
    of ``start`` do, (α/start)² of that at rates α below ``start``, which is then to be the limit as
    far as known. ``optimizer`` is "sgd", "momentum" or "nesterov" (both 0.9), "adam", or a function
    ``(parameters, rate) -> torch.optim.Optimizer``. ``batch_size`` samples a step (default: all)
    are drawn without replacement, a new order each epoch.

    From ``start`` the rate goes by factors of 4 until one is stable and the next is not, then by
    bisection of its logarithm until the two are within ``tol``. Each of ``runs`` has its own order
    of the data; with all data there is one. On a quadratic a rate above the limit by a part δ lets
    the loss along the sharpest direction grow as e^(4δt): if that direction has a share s of the
    first loss, the limit found is high by up to ln(1/s)/(4·steps).
    """
    require_problem(problem)
    make = _maker(optimizer)
    total = problem.num_samples
    size = (
        total
        if batch_size is None
        else require_count(
            batch_size, "batch_size", 1, total, "a batch cannot hold more samples than the data"
        )
    )
    require_count(steps, "steps")
    require_count(runs, "runs", 2, cure="one run shows no error")
    for value, name in (
        (start, "start"),
        (tol, "tol"),
        (1.0 if factor is None else factor, "factor"),
    ):
        require_positive(value, name)
    first = problem.loss()
    require(math.isfinite(first), "the loss at the start", "be finite", f"{first:.6g}")
    cure = "shift it, for growth is judged by its ratio, or pass factor=None"
    require(
        factor is None or first > 0, "the loss at the start", "be above 0", f"{first:.6g}", cure
    )
    work = _Trials(problem, make, size, steps, first, factor, seed)
    found: list[tuple[float, float]] = []
    runs = 1 if size == total else runs
    if factor is None:
        work.know_noise(start, runs)
    for run in range(runs):
        guess = start if not found else math.sqrt(found[0][0] * found[0][1])
        found.append(bisected(lambda rate, run=run: work.stable(rate, run), guess, tol))  # type: ignore[misc]
        report("stable rate", run + 1, runs)
    return _summed_up(found, work)


def bisected(
    stable: Callable[[float], bool], start: float, tol: float = 0.05
) -> tuple[float, float]:
    """(low, high) with ``low`` stable, ``high`` not and high ≤ (1 + tol)·low, by bisection in the
    logarithm.

    Where stability comes and goes more than once, one of the places where it goes.

    >>> low, high = bisected(lambda rate: rate < 2.0, 0.1, 0.01)
    >>> low < 2.0 <= high <= 1.01 * low
    True
    """
    good = stable(start)
    low = high = start
    for _ in range(MOST_STRIDES):
        low, high = (high, high * STRIDE) if good else (low / STRIDE, low)
        if stable(high if good else low) != good:
            break
    else:
        edge = f"{high:.3g} is stable" if good else f"{low:.3g} diverges"
        require(
            False,
            "the optimiser",
            "be stable at some rates and not at others",
            f"one that at {edge}",
            "" if good else "near a minimum pass factor=None",
            NoLimitError,
        )
    while high > (1 + tol) * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if stable(middle) else (low, middle)
    return low, high


def _maker(optimizer: str | MakeOptimizer) -> MakeOptimizer:
    if isinstance(optimizer, str):
        cure = "for others pass a function (parameters, rate) -> torch.optim.Optimizer"
        return NAMED[require_choice(optimizer, "optimizer", NAMED, cure)]
    made = callable(optimizer) and not isinstance(optimizer, Optimizer)
    known = (
        f"be one of {', '.join(NAMED)}, or a function (parameters, rate) -> torch.optim.Optimizer"
    )
    require(made, "optimizer", known, describe(optimizer), "", TypeError)
    return optimizer


class _Trials:
    """Training runs from one point, each with its learning rate and its order of the data."""

    def __init__(
        self,
        problem: Problem,
        make: MakeOptimizer,
        size: int,
        steps: int,
        first: float,
        factor: float | None,
        seed: int,
    ) -> None:
        self.problem, self.make, self.size, self.steps, self.seed = problem, make, size, steps, seed
        self.first, self.factor = first, factor
        # what noise adds to the loss at the rate to start with
        self.noise, self.start = 0.0, math.inf
        self.gradients = 0
        self._columns = None if size == problem.num_samples else _joined(problem)

    def know_noise(self, start: float, runs: int) -> None:
        """Measure by how much runs at a small rate end above the first loss, at most; at first
        it grows as α².
        """
        ends = [self._end(SMALL * start, run) for run in range(runs)]
        self.start = start
        self.noise = (
            max([0.0, *(end - self.first for end in ends if math.isfinite(end))]) / SMALL**2
        )

    def stable(self, rate: float, run: int) -> bool:
        """Whether training at ``rate`` does not diverge."""
        if self.factor is None:
            return (
                self._end(rate, run)
                <= self.first + MARGIN * self.noise * min(rate / self.start, 1.0) ** 2
            )
        return self._end(rate, run) < self.factor * self.first

    def _end(self, rate: float, run: int) -> float:
        """The loss of all data after training; NaN where it ran away."""
        named = {
            n: t.detach().clone().requires_grad_()
            for n, t in self.problem.named(self.problem.vector).items()
        }
        optimizer = self.make(list(named.values()), rate)
        require(
            isinstance(optimizer, Optimizer),
            "optimizer",
            "return a torch.optim.Optimizer",
            optimizer,
            "",
            TypeError,
        )
        scale = abs(self.first) + self.noise or 1.0
        for parts in self._batches(run):
            loss = optimizer.step(lambda parts=parts: self._backward(optimizer, named, parts))  # type: ignore[misc]
            self.gradients += 1
            if not (isinstance(loss, float) and abs(loss) < BEYOND_RETURN * scale):
                return math.nan
        theta = self.problem.space.flatten(
            {name: tensor.detach() for name, tensor in named.items()}
        )
        return self.problem.loss(theta) if bool(torch.isfinite(theta).all()) else math.nan

    def _backward(self, optimizer: Optimizer, named: dict[str, Tensor], parts: Parts) -> float:
        optimizer.zero_grad()
        total = 0.0
        for weight, batch in parts:
            loss = weight * self.problem.batch_loss(named, batch)
            loss.backward()
            total += float(loss.detach())
        return total

    def _batches(self, run: int) -> Iterator[Parts]:
        """The batches of ``steps`` steps: epochs in random order, without the few samples that
        fill no batch.
        """
        total, each = self.problem.num_samples, self.problem.num_samples // self.size
        for step in range(self.steps):
            if self.size == total:
                yield list(self.problem.weighted())
                continue
            epoch, place = divmod(step, each)
            if place == 0:
                order = torch.randperm(
                    total, generator=generator(self.seed, "stable rate", run, epoch)
                )
            yield self._chosen(order[place * self.size : (place + 1) * self.size])

    def _chosen(self, indices: Tensor) -> Parts:
        if self._columns is None:
            return list(
                self.problem.subset(
                    indices, self.size if self.problem.norm == "train" else None
                ).weighted()
            )
        return [(1.0, take(self._columns, indices.to(self.problem.device)))]


def _joined(problem: Problem) -> Batch | None:
    """All data as one batch, or None where it is not in memory or its batches do not fit
    together.
    """
    if not problem.batches.in_memory:
        return None
    try:
        return Batch(concatenate([batch.data for batch in problem.batches]), problem.num_samples)
    except (RuntimeError, ValueError):  # batches padded to different lengths
        return None


def _summed_up(found: list[tuple[float, float]], work: _Trials) -> StableRate:
    """The geometric mean; a limit is uniform in its last interval, of variance width²/12."""
    logs = np.array([0.5 * (math.log(low) + math.log(high)) for low, high in found])
    width = max(math.log(high / low) for low, high in found)
    spread = float(logs.var(ddof=1)) / len(logs) if len(logs) > 1 else 0.0
    value = float(np.exp(logs.mean()))
    error = math.sqrt(spread + width**2 / 12)
    return StableRate(
        value,
        value * error,
        work.gradients,
        log_error=error,
        dof=len(logs) - 1 if len(logs) > 1 else math.inf,
        per_run=np.exp(logs),
        batch_size=work.size,
        steps=work.steps,
        factor=work.factor,
    )
