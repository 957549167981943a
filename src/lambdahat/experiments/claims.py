"""Claims of a paper as code: what it says, its figure, ours with an error, and whether it holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lambdahat._check import require_choice
from lambdahat.experiments.reproduction import FAILS, HOLDS, OPEN, UNTESTED, Verdict
from lambdahat.experiments.statistics import LEVEL, Reading, holm

DIRECTIONS = ("above", "below", "within")


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper, and our reading of it.

    It holds when the reading is significantly "above" or "below" ``bound``, or "within" ``margin`` of it; it fails when
    the opposite is significant; else it is undecided. ``published`` is the paper's own figure, in words.

    ``unmet`` says why the run is not what the claim is about ("NGD's loss is 2.1, at chance"): such a claim is not
    judged, and does not count in Holm's correction. ``own`` marks a claim that the paper does not make; such claims
    are a family of their own in that correction.
    """

    sentence: str
    source: str
    published: str
    reading: Reading
    direction: str = "above"
    bound: float = 0.0
    margin: float = 0.0
    unit: str = ""
    unmet: str = ""
    own: bool = False

    def __post_init__(self) -> None:
        require_choice(self.direction, "direction", DIRECTIONS)

    def p_values(self) -> tuple[float, float]:
        """The p-values for the claim and against it; small ones speak for it, or against it; NaN where it is not met.

        A tie without an error speaks for neither side: 0 = 0 is not "below 0", and does not refute it either.
        """
        reading = self.reading
        if self.unmet:
            return math.nan, math.nan
        if self.direction != "within" and reading.stderr == 0 and reading.value == self.bound:
            return 1.0, 1.0
        above = reading.p_above(self.bound)
        if self.direction == "above":
            return above, 1 - above
        if self.direction == "below":
            below = reading.p_below(self.bound)
            return below, 1 - below
        low, high = reading.p_above(self.bound - self.margin), reading.p_above(self.bound + self.margin)
        return max(low, 1 - high), min(1 - low, high)

    @property
    def ours(self) -> str:
        """Our figure, in words."""
        effect = self.reading.effect
        tail = f", effect {effect:+.2g}" if math.isfinite(effect) else ""
        seeds = f" (n = {self.reading.count}{tail})" if self.reading.count > 1 else ""
        reason = f"; not testable: {self.unmet}" if self.unmet else ""
        return f"{self.reading}{self.unit}{seeds}{reason}"


def judge(claims: Sequence[Claim], level: float = LEVEL) -> list[Verdict]:
    """The verdicts on the claims of an experiment.

    Holm's correction keeps the level over two families, each by itself: the paper's claims, and those that we added.
    What we ask besides does not cost the paper's claims their power.
    """
    for_it, against = (_corrected(claims, side) for side in (0, 1))
    out = []
    for claim, support, contrary in zip(claims, for_it, against, strict=True):
        decided = HOLDS if support <= level else FAILS if contrary <= level else OPEN
        verdict = UNTESTED if claim.unmet else decided
        out.append(Verdict(claim.sentence, claim.source, verdict, claim.ours, claim.published, claim.own))
    return out


def _corrected(claims: Sequence[Claim], side: int) -> list[float]:
    """The corrected p-values for the claims (``side`` 0) or against them (1), family by family."""
    out = [math.nan] * len(claims)
    for own in (False, True):
        family = [index for index, claim in enumerate(claims) if claim.own == own]
        corrected = holm([claims[index].p_values()[side] for index in family])
        for index, value in zip(family, corrected, strict=True):
            out[index] = value
    return out
