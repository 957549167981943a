"""What the benchmark found: one row for each task and who did it, and all rows of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
        """The time over what arithmetic or traffic, whichever is more, takes at the machine's
        own rates.
        """
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
        """The rows of peers that took less time than ours for an answer as accurate as was asked
        for.
        """
        return [
            row
            for row in self.rows
            if row.by not in (OURS, UNIT) and row.accurate and self.ratio(row) > 1
        ]

    def far_from_limit(self, factor: float = 1.3) -> list[BenchRow]:
        """Our rows that cost more than ``factor`` times their limit."""
        return [row for row in self.rows if row.by == OURS and row.over_limit > factor]
