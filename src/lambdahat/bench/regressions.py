"""Has anything become slower? Costs of a run against those on record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lambdahat._core.check import require, require_positive
from lambdahat.bench.records import OURS, UNIT, BenchResult, BenchRow

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
        if OURS not in new or _failed(new[OURS]):
            continue
        if not new[OURS].accurate:
            found.append(Regression(work, case, 0.0, new[OURS].error))
        growth = smallest_growth(new, old)
        if growth > 1 + tolerance:
            found.append(Regression(work, case, growth, new[OURS].error))
    return found


def failures(now: BenchResult) -> list[Regression]:
    """The tasks of ours that have no time, and what was raised."""
    rows = [row for row in now.rows if row.by == OURS and _failed(row)]
    return [Regression(row.work, row.case, 0.0, row.error, row.note or "no time") for row in rows]


def _failed(row: BenchRow) -> bool:
    return not row.seconds > 0  # also of NaN


def require_alike(about: Mapping[str, Any], record: BenchResult) -> None:
    """Raise unless the record is of a run on the same kind of device and of the same sizes."""
    for name in ALIKE:
        mine, theirs = about.get(name), record.about.get(name)
        require(
            mine == theirs,
            "the record",
            f"be of a run with {name} {mine!r}, as this one",
            repr(theirs),
            "compare with a record that `lambdahat bench --out` made with the same options",
        )


def smallest_growth(new: dict[str, BenchRow], old: dict[str, BenchRow]) -> float:
    """The least of the growths of ours over the unit and over each peer; 0 where there is
    nothing to compare.
    """
    growths = []
    for by in (UNIT, *new):
        if by == OURS or by not in new or by not in old or OURS not in old:
            continue
        ratios = [rows[OURS].cost / rows[by].cost for rows in (new, old)]
        if all(ratio > 0 for ratio in ratios):  # also False for NaN
            growths.append(ratios[0] / ratios[1])
    return min(growths, default=0.0)


def merged(first: BenchResult, again: BenchResult) -> BenchResult:
    """Of every task the run in which ours cost less: what a second look at a slow task leaves."""
    rows: list[BenchRow] = []
    for work, case in first.tasks():
        old, new = first.of(work, case), again.of(work, case)
        better = (
            OURS in new and OURS in old and (_failed(old[OURS]) or new[OURS].cost < old[OURS].cost)
        )
        rows += (new if better else old).values()
    return BenchResult(tuple(rows), first.about)
