"""What an experiment ends with: tables, and verdicts on the paper's claims."""

from __future__ import annotations

from dataclasses import dataclass

from lambdahat.storage import Result

HOLDS, FAILS, OPEN, UNTESTED = "holds", "does not hold", "undecided", "not testable here"
VERDICTS = (HOLDS, FAILS, OPEN, UNTESTED)
# why a claim is not testable: the run is not what it speaks of, other networks or data were run, or
# data are missing
PRECONDITION, STAND_IN, MISSING = BARRIERS = "precondition", "stand-in", "missing data"


@dataclass(frozen=True)
class Verdict(Result):
    """A claim, where it was made, whether it holds here, and the figures that say so.

    ``verdict`` is "holds", "does not hold", "undecided" where the figures do not tell, or "not
    testable here" where the run is not what the claim is about. ``evidence`` has our figures,
    ``published`` the paper's, where it gives any. An ``own`` claim is one of ours, which the paper
    does not make: it is judged like the others and counted apart. ``barrier`` is one of BARRIERS
    where the claim is not testable, else "". ``plan`` says of an undecided one how many seeds would
    decide it.
    """

    claim: str
    source: str
    verdict: str
    evidence: str
    published: str = ""
    own: bool = False
    barrier: str = ""
    plan: str = ""

    @property
    def cited(self) -> str:
        """The source, in tables that have no other mark for a claim of our own."""
        return ", ".join(filter(None, [self.source, "ours"])) if self.own else self.source


@dataclass(frozen=True)
class Table(Result):
    """A table in words: ``title``, ``header`` and ``rows``."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
