"""Results of the benchmark: a row for each task and library, and all rows of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lambdahat._core.check import require, require_positive
from lambdahat._core.storage import Result

OURS, UNIT = "lambdahat", "unit"
UNKNOWN = math.nan


@dataclass(frozen=True)
class BenchRow(Result):
    """One task on one case by one library; NaN is what is not known or does not apply.

    ``cost`` is the time in ``unit``\\ s (one gradient over the same data, where nothing else is
    said), the median over interleaved rounds of the ratio within a round. ``error`` is relative,
    against the exact answer. ``memory`` is the MiB by which the peak rose. ``limit`` is what the
    task must cost at least, in units, and ``limit_why`` where that comes from; ``flop_seconds`` and
    ``byte_seconds`` are its least arithmetic and traffic at the rates of this machine. ``note``
    says why a task has no time, or what its time means.
    """

    work: str
    case: str
    by: str
    seconds: float = UNKNOWN
    cost: float = UNKNOWN
    unit: str = "gradient"
    error: float = UNKNOWN
    accuracy: float = UNKNOWN
    memory: float = UNKNOWN
    limit: float = UNKNOWN
    limit_why: str = ""
    flop_seconds: float = UNKNOWN
    byte_seconds: float = UNKNOWN
    note: str = ""

    @property
    def over_limit(self) -> float:
        """The cost over the limit, both in units."""
        return self.cost / self.limit

    @property
    def over_machine(self) -> float:
        """The time over that of the arithmetic or traffic at the machine's rates."""
        least = [part for part in (self.flop_seconds, self.byte_seconds) if part > 0]
        return self.seconds / max(least) if least else UNKNOWN

    @property
    def label(self) -> str:
        """Who did it, in words."""
        return f"one {self.unit}" if self.by == UNIT else self.by

    @property
    def accurate(self) -> bool:
        """False where the error is larger than was asked for."""
        return not self.error > self.accuracy


@dataclass(frozen=True)
class BenchResult(Result):
    """The rows of a run in their order; ``about`` describes machine, versions and sizes."""

    rows: tuple[BenchRow, ...]
    about: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    def tasks(self) -> list[tuple[str, str]]:
        """Every (work, case) in order."""
        return list(dict.fromkeys((row.work, row.case) for row in self.rows))

    def of(self, work: str, case: str) -> dict[str, BenchRow]:
        """The rows of one task, by who did it."""
        return {row.by: row for row in self.rows if (row.work, row.case) == (work, case)}

    def ratio(self, row: BenchRow) -> float:
        """Our cost over that of ``row`` in the same task: below 1 we are the faster."""
        ours = self.of(row.work, row.case).get(OURS)
        return UNKNOWN if ours is None else ours.cost / row.cost

    def faster_peers(self) -> list[BenchRow]:
        """The peers that took less time than ours at the accuracy asked for."""
        peers = [row for row in self.rows if row.by not in (OURS, UNIT)]
        return [row for row in peers if row.accurate and self.ratio(row) > 1]

    def far_from_limit(self, factor: float = 1.3) -> list[BenchRow]:
        """Our rows that cost more than ``factor`` times their limit."""
        return [row for row in self.rows if row.by == OURS and row.over_limit > factor]


TOLERANCE = 0.15
# of two runs that can be compared
ALIKE = ("device", "quick", "samples", "batch size", "hidden width")


@dataclass(frozen=True)
class Regression:
    """A task that takes ``growth`` times what is on record, or, where ``growth`` is 0, whose error
    is too large.

    ``failed`` says why there is no answer at all.
    """

    work: str
    case: str
    growth: float
    error: float
    failed: str = ""

    def __str__(self) -> str:
        where = f"{self.work}, {self.case}"
        if self.failed:
            return f"{where}: no answer, {self.failed}"
        if self.growth:
            return f"{where}: {self.growth:.2f} times what is on record"
        return f"{where}: the error is {self.error:.2g}, more than was asked for"


def regressions(
    now: BenchResult, record: BenchResult, tolerance: float = TOLERANCE
) -> list[Regression]:
    """The tasks of ours that are slower than on record by more than ``tolerance``, or not accurate.

    A time says nothing on another day, so only ratios are compared: ours to one unit of work and
    ours to every peer that both runs timed. A real loss shows in all of them, noise of one
    reference does not: the smallest growth counts. Tasks that are in one run only are passed over,
    but some must be in both. A task of ours that raised counts.
    """
    require_positive(tolerance, "tolerance")
    require_alike(now.about, record)
    common = set(now.tasks()) & set(record.tasks())
    require(bool(common), "the record", "have a task in common with this run", "none")
    found = failures(now)
    for work, case in now.tasks():
        new, old = now.of(work, case), record.of(work, case)
        if OURS not in new or _has_failed(new[OURS]):
            continue
        if not new[OURS].accurate:
            found.append(Regression(work, case, 0.0, new[OURS].error))
        # the least growth of ours over the unit and over each peer; 0 if none compare
        growths = []
        for by in (UNIT, *new):
            if by == OURS or by not in new or by not in old or OURS not in old:
                continue
            ratios = [rows[OURS].cost / rows[by].cost for rows in (new, old)]
            if all(ratio > 0 for ratio in ratios):  # also False for NaN
                growths.append(ratios[0] / ratios[1])
        growth = min(growths, default=0.0)
        if growth > 1 + tolerance:
            found.append(Regression(work, case, growth, new[OURS].error))
    return found


def failures(now: BenchResult) -> list[Regression]:
    """The tasks of ours that have no time, and what was raised."""
    rows = [row for row in now.rows if row.by == OURS and _has_failed(row)]
    return [Regression(row.work, row.case, 0.0, row.error, row.note or "no time") for row in rows]


def _has_failed(row: BenchRow) -> bool:
    return not row.seconds > 0  # also of NaN


def require_alike(about: Mapping[str, Any], record: BenchResult) -> None:
    """Raise unless the record is of a run on the same kind of device and of the same sizes."""
    for name in ALIKE:
        mine, theirs = about.get(name), record.about.get(name)
        expected = f"be of a run with {name} {mine!r}, as this one"
        cure = "compare with a record that `lambdahat bench --out` made with the same options"
        require(mine == theirs, "the record", expected, repr(theirs), cure)


def merged(first: BenchResult, again: BenchResult) -> BenchResult:
    """For every task the run in which ours was cheaper, after slow tasks were run again."""
    rows: list[BenchRow] = []
    for work, case in first.tasks():
        old, new = first.of(work, case), again.of(work, case)
        both = OURS in new and OURS in old
        better = both and (_has_failed(old[OURS]) or new[OURS].cost < old[OURS].cost)
        rows += (new if better else old).values()
    return BenchResult(tuple(rows), first.about)
