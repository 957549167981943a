"""Claims of a paper as code: what it says, its figure, ours with an error, and whether it holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lambdahat._check import require_choice
from lambdahat.experiments.reproduction import (
    BARRIERS,
    FAILS,
    HOLDS,
    OPEN,
    PRECONDITION,
    UNTESTED,
    Verdict,
)
from lambdahat.experiments.statistics import LEVEL, MOST_SEEDS, Reading, holm

DIRECTIONS = ("above", "below", "within")


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper, and our reading of it.

    It holds when the reading is significantly "above" or "below" ``bound``, or "within" ``margin``
    of it; it fails when the opposite is significant; else it is undecided. ``published`` is the
    paper's own figure, in words.

    ``unmet`` says why the run is not what the claim is about ("NGD's loss is 2.1, at chance"): such
    a claim is not judged, and does not count in Holm's correction. ``barrier`` is the kind of that
    reason, one of BARRIERS. ``own`` marks a claim that the paper does not make; such claims are a
    family of their own in that correction.

    ``general`` marks what the paper says of any network or matrix, such as a theorem: it can be
    tested on any. What is said of a network is tested on that network alone, and its ``sentence``
    begins with the name of ours.
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
    general: bool = False
    barrier: str = PRECONDITION

    def __post_init__(self) -> None:
        require_choice(self.direction, "direction", DIRECTIONS)
        require_choice(self.barrier, "barrier", BARRIERS)

    def p_values(self) -> tuple[float, float]:
        """The p-values for the claim and against it; small ones speak for it, or against it; NaN
        where it is not met.

        A tie without an error speaks for neither side: 0 = 0 is not "below 0", and does not refute
        it either.
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
        low, high = (
            reading.p_above(self.bound - self.margin),
            reading.p_above(self.bound + self.margin),
        )
        return max(low, 1 - high), min(1 - low, high)

    @property
    def edge(self) -> float:
        """The bound that a decision hangs on: "within" has two, of which the nearer counts."""
        side = math.copysign(self.margin, self.reading.value - self.bound)
        return self.bound + side if self.direction == "within" else self.bound

    def outlook(self, level: float) -> tuple[float, float]:
        """The power that this many seeds had at a level, and the seeds that POWER takes; infinite
        beyond MOST_SEEDS.

        Both take the reading's value and spread for the true ones. NaN where it has no spread, or
        lies on the bound.
        """
        reading = self.reading
        if not reading.stderr > 0 or reading.count < 2 or not reading.value - self.edge:
            return math.nan, math.nan
        return (
            reading.power(self.edge, level, reading.count),
            reading.planned(self.edge, level) or math.inf,
        )

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

    Holm's correction keeps the level over two families, each by itself: the paper's claims, and
    those that we added. What we ask besides does not cost the paper's claims their power.
    """
    for_it, against = (_corrected(claims, side) for side in (0, 1))
    out = []
    for claim, support, contrary in zip(claims, for_it, against, strict=True):
        decided = HOLDS if support <= level else FAILS if contrary <= level else OPEN
        verdict = UNTESTED if claim.unmet else decided
        barrier = claim.barrier if claim.unmet else ""
        plan = _plan(claim, level / len(_family(claims, claim.own))) if verdict == OPEN else ""
        said = (claim.ours, claim.published, claim.own, barrier, plan)
        out.append(Verdict(claim.sentence, claim.source, verdict, *said))
    return out


def _family(claims: Sequence[Claim], own: bool) -> list[int]:
    """The places of the claims that are corrected together: those of the paper, or ours, that
    can be tested.
    """
    return [index for index, claim in enumerate(claims) if claim.own == own and not claim.unmet]


def _plan(claim: Claim, level: float) -> str:
    """How many seeds would decide a claim with POWER, at a level that is right whatever Holm's
    order comes to be.
    """
    power, count = claim.outlook(level)
    if math.isnan(power):
        return "not known"
    return (
        f"{f'n = {count:,.0f}' if math.isfinite(count) else f'n > {MOST_SEEDS:,}'} (power so far"
        f" {power:.0%})"
    )


def _corrected(claims: Sequence[Claim], side: int) -> list[float]:
    """The corrected p-values for the claims (``side`` 0) or against them (1), family by family."""
    out = [math.nan] * len(claims)
    for own in (False, True):
        family = _family(claims, own)
        corrected = holm([claims[index].p_values()[side] for index in family])
        for index, value in zip(family, corrected, strict=True):
            out[index] = value
    return out
