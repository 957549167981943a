"""What every reproduction hands back: tables, verdicts on the paper's claims, and what was assumed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lambdahat.storage import Result

HOLDS, FAILS, OPEN = "holds", "does not hold", "undecided"
SURE = 2.0  # standard errors


@dataclass(frozen=True)
class Verdict(Result):
    """A claim, where it was made, whether it holds here, and the figures that say so.

    ``verdict`` is "holds", "does not hold", or "undecided" where the figures do not tell. ``evidence`` has our figures,
    ``published`` the paper's, where it gives any.
    """

    claim: str
    source: str
    verdict: str
    evidence: str
    published: str = ""


@dataclass(frozen=True)
class Table(Result):
    """A table in words: ``title``, ``header`` and ``rows``."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Reproduction(Result, ABC):
    """Base of the results of ``lambdahat reproduce``: a frozen dataclass with these fields, and ``tables()``."""

    name: str
    verdicts: tuple[Verdict, ...]
    assumptions: tuple[str, ...]
    seed: int

    @abstractmethod
    def tables(self) -> tuple[Table, ...]:
        """What was measured, beside what was published."""


def judged(gap: float, stderr: float) -> str:
    """The verdict on "gap > 0" from its estimate; no gap at any seed is none."""
    if gap == 0 and stderr == 0:
        return FAILS
    if math.isnan(gap) or abs(gap) <= SURE * stderr:
        return OPEN
    return HOLDS if gap > 0 else FAILS


def paired_gap(lower: Tensor, upper: Tensor) -> tuple[float, float]:
    """Mean and standard error of upper − lower over the seeds (S,) at which both are finite; NaN if fewer than two."""
    gaps = (upper - lower).double()
    gaps = gaps[gaps.isfinite()]
    if len(gaps) < 2:
        return math.nan, math.nan
    return float(gaps.mean()), float(gaps.std()) / math.sqrt(len(gaps))


def worst(verdicts: Sequence[str]) -> str:
    """The verdict on "all of these"."""
    return next((verdict for verdict in (FAILS, OPEN) if verdict in verdicts), HOLDS)
