"""What an experiment ends with: tables, and verdicts on the paper's claims."""

from __future__ import annotations

from dataclasses import dataclass

from lambdahat.storage import Result

HOLDS, FAILS, OPEN = "holds", "does not hold", "undecided"


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
