"""The edge of stability in one setting over batch sizes: found by sections, and its slope in
logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import least_squares
from torch import Tensor

from lambdahat._core.storage import Result
from lambdahat.experiments.kit.claims import Reading, mean_of

Array = NDArray[np.float64]
Passes = Callable[[Tensor], Tensor]
MARGIN = 0.2  # of a slope that counts as the one claimed
FEWEST = 3  # batch sizes that a slope is fitted to


@dataclass(frozen=True)
class Section:
    """Where to look: at ``points`` values from ``low`` to ``high``, then at as many between two
    neighbours.

    ``rounds`` counts both.
    """

    low: float
    high: float
    points: int = 8
    rounds: int = 2

    @property
    def resolution(self) -> float:
        """The ratio of the two values that the last round leaves the edge between."""
        first = (self.high / self.low) ** (1 / (self.points - 1))
        return float(first ** (1 / (self.points + 1) ** (self.rounds - 1)))


def largest_passing(passes: Passes, section: Section, seeds: int) -> Tensor:
    """The edge (S,) above which nothing passes: the geometric mean of the last value that does and
    the next.

    ``passes`` maps values (S, R) to whether each does. Values that fail below one that passes do
    not count: at tiny rates nothing is learnt in a given time. NaN where no value passes, infinite
    where the largest does.
    """
    logs = torch.linspace(
        math.log(section.low), math.log(section.high), section.points, dtype=torch.float64
    )
    grid = logs.expand(seeds, -1)
    below = torch.full((seeds,), math.nan, dtype=torch.float64)
    above = torch.full((seeds,), math.inf, dtype=torch.float64)
    for number in range(section.rounds):
        if number:
            shares = torch.arange(1, section.points + 1, dtype=torch.float64) / (section.points + 1)
            known = below.isfinite() & above.isfinite()
            low, high = below.where(known, logs[0]), above.where(known, logs[0])
            grid = low[:, None] + (high - low)[:, None] * shares
        below, above = _narrowed(grid, passes(grid.exp()), below, above, first=number == 0)
    return torch.where(below.isnan(), math.nan, ((below + above) / 2).exp())


def _narrowed(
    grid: Tensor, passed: Tensor, below: Tensor, above: Tensor, first: bool
) -> tuple[Tensor, Tensor]:
    """The new bracket of every seed: the largest value that passed, and the next one above it."""
    for row, (values, good) in enumerate(zip(grid, passed.cpu(), strict=True)):
        if not first and not (below[row].isfinite() and above[row].isfinite()):
            continue
        places = good.nonzero().flatten()
        place = int(places[-1]) if len(places) else -1
        if place >= 0:
            below[row] = values[place]
        if place + 1 < len(values) and (place >= 0 or not first):
            above[row] = values[place + 1]
    return below, above


@dataclass(frozen=True)
class Frontier(Result):
    """The edges (sizes, S) of one quantity over batch sizes and seeds, for one network,
    optimiser and criterion.
    """

    network: str
    optimizer: str
    criterion: str
    batch_sizes: tuple[int, ...]
    edges: Tensor
    resolution: float

    def centre(self) -> Tensor:
        """Geometric means (sizes,) over the seeds whose edge was found; NaN where none was."""
        logs, found = self._logs()
        return (logs.sum(1) / found.sum(1)).exp()

    def at(self, batch_size: int) -> float:
        """The geometric mean at one batch size."""
        return float(self.centre()[self.batch_sizes.index(batch_size)])

    def stderr(self) -> Tensor:
        """Their relative standard errors: of the logarithm over seeds, and of the last section;
        NaN for one seed.
        """
        logs, found = self._logs()
        count = found.sum(1)
        around = (logs - (logs.sum(1) / count)[:, None]).where(found, 0.0).square().sum(1)
        spread = around / (count - 1) / count
        return (spread + math.log(self.resolution) ** 2 / (12 * count)).sqrt()

    def cell(self, batch_size: int) -> str:
        """The mean at one batch size with its relative error, and how many seeds have no edge,
        and why.
        """
        place = self.batch_sizes.index(batch_size)
        known, seeds = int(self._logs()[1][place].sum()), self.edges.shape[1]
        missing = self._missing(place)
        if not known:
            return next(iter(missing)) if len(missing) == 1 else _counted(missing)
        text = f"{self.at(batch_size):.3g}"
        text += f" ± {100 * float(self.stderr()[place]):.0f} %" if known > 1 else ""
        return text if known == seeds else f"{text} ({known} of {seeds} seeds; {_counted(missing)})"

    def _missing(self, place: int) -> dict[str, int]:
        """How many seeds have no edge, by what ``largest_passing`` says of them; the least of a
        value 1/v is 0.
        """
        edges = self.edges[place]
        counts = {
            "nothing is steady" if self.criterion == "steady" else "nothing trains": int(
                edges.isnan().sum()
            ),
            "below the search": int((edges == 0).sum()),
            "above the search": int(edges.isposinf().sum()),
        }
        return {reason: count for reason, count in counts.items() if count}

    def _logs(self) -> tuple[Tensor, Tensor]:
        """log edges, 0 where none was found, and where one was."""
        logs = self.edges.log()
        return logs.where(logs.isfinite(), 0.0), logs.isfinite()

    def slope(self, low: float = 0, high: float = math.inf) -> Reading:
        """d log edge/d log B over the batch sizes in [low, high], mean over seeds; NaN with too
        few sizes or seeds.
        """
        inside = [low <= size <= high for size in self.batch_sizes]
        logs = torch.tensor(self.batch_sizes, dtype=torch.float64).log()[inside]
        found = []
        for values in self.edges.log()[inside].T:
            fine = values.isfinite()
            if int(fine.sum()) >= FEWEST:
                found.append(float(np.polyfit(logs[fine], values[fine], 1)[0]))
        return mean_of(found if len(found) > 1 else [])

    def turning(self, power: float = 1.0) -> tuple[float, float]:
        """The batch size B₀ of edge = a·(1 + B₀/B)^−power, and the standard error of its logarithm
        over seeds.

        Below B₀ the edge grows as B^power, above it it is constant. 0 where it does not grow,
        infinite where it never stops.
        """
        sizes = np.asarray(self.batch_sizes, dtype=float)
        found = [_turning(sizes, values.numpy(), power) for values in self.edges.log().T]
        kept = np.asarray([value for value in found if math.isfinite(value)])
        if len(kept) < 2:
            return math.nan, math.nan
        return float(np.exp(kept.mean())), float(kept.std(ddof=1) / math.sqrt(len(kept)))


def _counted(missing: Mapping[str, int]) -> str:
    return ", ".join(f"{reason}: {count}" for reason, count in missing.items())


def _turning(sizes: Array, logs: Array, power: float) -> float:
    """log B₀ by least squares, within a factor 16 of the batch sizes that were run."""
    fine = np.isfinite(logs)
    if fine.sum() < FEWEST:
        return math.nan
    sizes, logs = sizes[fine], logs[fine]
    low, high = math.log(sizes.min() / 16), math.log(sizes.max() * 16)

    def misfit(at: Array) -> Array:
        return np.asarray(at[0] - power * np.log1p(np.exp(at[1]) / sizes) - logs)

    starts = np.linspace(low, high, 5)[1:-1]
    fits = [
        least_squares(misfit, (logs.max(), start), bounds=((-np.inf, low), (np.inf, high)))
        for start in starts
    ]
    return float(min(fits, key=lambda fit: fit.cost).x[1])
