"""Claims of a paper as code: what it says, its figure, ours with an error, and whether it holds.

The tests behind them are paired t-tests over seeds, with Holm's correction.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import stats

from lambdahat._core.check import require_choice
from lambdahat._core.storage import Result
from lambdahat.results import Estimate
from lambdahat.results.charts import value_text

LEVEL = 0.05
POWER = 0.8  # that a planned number of seeds is to have
MOST_SEEDS = 1000


@dataclass(frozen=True)
class Reading:
    """A number with its standard error and degrees of freedom (infinite for a known error)."""

    value: float
    stderr: float
    dof: float = math.inf
    count: int = 1
    effect: float = math.nan  # Cohen's d of a difference
    sides: tuple[Reading, Reading] | None = None  # the two means that a difference is between

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """The ends of the confidence interval; NaN where the error is not known."""
        if not self.stderr > 0:
            return self.value, self.value + self.stderr
        tailed = math.isfinite(self.dof)
        tail = (1 - level) / 2
        half = self.stderr * float(stats.t.isf(tail, self.dof) if tailed else stats.norm.isf(tail))
        return self.value - half, self.value + half

    def p_above(self, threshold: float) -> float:
        """The p-value of the test that the true value is not above the threshold."""
        if math.isnan(self.value) or math.isnan(self.stderr):
            return math.nan
        if self.stderr == 0:
            return 0.0 if self.value > threshold else 1.0
        score, tailed = (self.value - threshold) / self.stderr, math.isfinite(self.dof)
        return float(stats.t.sf(score, self.dof) if tailed else stats.norm.sf(score))

    def p_below(self, threshold: float) -> float:
        """The same for "not below"; a value equal to the threshold, without error, is neither."""
        return Reading(-self.value, self.stderr, self.dof).p_above(-threshold)

    def power(self, threshold: float, level: float, count: int) -> float:
        """The probability that ``count`` seeds show on which side of the threshold the value lies.

        The value and the spread of this reading are assumed to be the true ones; the t-test is
        one-sided at ``level``.
        """
        spread = self.stderr * math.sqrt(self.count)
        shift = abs(self.value - threshold) / spread * math.sqrt(count)
        if math.isinf(self.dof):
            return float(stats.norm.sf(stats.norm.isf(level) - shift))
        dof = count - (self.count - self.dof)
        return float(stats.nct.sf(stats.t.isf(level, dof), dof, shift)) if dof > 0 else math.nan

    def seeds_for(self, threshold: float, level: float) -> int | None:
        """The number of seeds that reaches POWER; None beyond MOST_SEEDS."""

        def enough(count: int) -> bool:
            return self.power(threshold, level, count) >= POWER

        fewest = 2 + bisect_left(range(2, MOST_SEEDS + 1), True, key=enough)
        return fewest if fewest <= MOST_SEEDS else None

    @property
    def short(self) -> str:
        """The value with as many digits as its error leaves."""
        return value_text(Estimate(self.value, self.stderr)) if self.stderr > 0 else str(self)

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "not known"
        return f"{self.value:.4g} ± {self.stderr:.2g}" if self.stderr > 0 else f"{self.value:.4g}"


UNKNOWN = Reading(math.nan, math.nan, math.nan, 0)


def mean_of(values: Sequence[float]) -> Reading:
    """The mean over seeds; with one seed its error is not known."""
    finite = np.asarray([value for value in values if math.isfinite(value)], dtype=float)
    if len(finite) == 0:
        return UNKNOWN
    error = float(finite.std(ddof=1) / math.sqrt(len(finite))) if len(finite) > 1 else math.nan
    return Reading(float(finite.mean()), error, len(finite) - 1, len(finite))


def paired_difference(upper: Mapping[Any, float], lower: Mapping[Any, float]) -> Reading:
    """The mean of upper − lower over the seeds that have both, with its paired t-test."""
    gaps = [value - lower[key] for key, value in upper.items() if key in lower]
    gaps = [gap for gap in gaps if math.isfinite(gap)]
    mean = mean_of(gaps)
    deviation = float(np.std(gaps, ddof=1)) if len(gaps) > 1 else math.nan
    return replace(mean, effect=mean.value / deviation if deviation else math.nan)


def slope(x: Sequence[float], y: Sequence[float]) -> Reading:
    """The slope of a straight line through points, by least squares, with its standard error."""
    pairs = [(a, b) for a, b in zip(x, y, strict=True) if math.isfinite(a) and math.isfinite(b)]
    if len(pairs) < 3:
        return Reading(math.nan, math.nan, math.nan, len(pairs))
    fit = stats.linregress(*zip(*pairs, strict=True))
    return Reading(float(fit.slope), float(fit.stderr), len(pairs) - 2, len(pairs))


def correlation(x: Sequence[float], y: Sequence[float]) -> Reading:
    """Spearman's rank correlation; its error is 1.03·(1 − r²)/√(n − 3), by Fisher's transform."""
    pairs = [(a, b) for a, b in zip(x, y, strict=True) if math.isfinite(a) and math.isfinite(b)]
    if len(pairs) < 4:
        return Reading(math.nan, math.nan, math.nan, len(pairs))
    rho = float(stats.spearmanr(*zip(*pairs, strict=True)).statistic)
    return Reading(rho, 1.03 * (1 - rho**2) / math.sqrt(len(pairs) - 3), math.inf, len(pairs))


def holm(values: Sequence[float]) -> list[float]:
    """Holm's (1979) corrected p-values of a family; a NaN stays one and counts for nothing.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    known = sorted((value, index) for index, value in enumerate(values) if not math.isnan(value))
    out, running = [math.nan] * len(values), 0.0
    for rank, (value, index) in enumerate(known):
        running = max(running, min(1.0, value * (len(known) - rank)))
        out[index] = running
    return out


HOLDS, FAILS, OPEN, UNTESTED = "holds", "does not hold", "undecided", "not testable here"
VERDICTS = (HOLDS, FAILS, OPEN, UNTESTED)
# why a claim is not testable: the run is not what it speaks of, other networks or data were run, or
# data are missing
PRECONDITION, STAND_IN, MISSING = BARRIERS = "precondition", "stand-in", "missing data"
Mark = tuple[float, float, float, float, float]  # value, its 95 % interval, the claimed range


@dataclass(frozen=True)
class Verdict(Result):
    """The verdict on a claim: its source, whether it holds here, and the numbers behind it.

    ``verdict`` is "holds", "does not hold", "undecided" if the numbers do not decide it, or "not
    testable here" where the run is not what the claim is about. ``evidence`` has our numbers,
    ``published`` those of the paper, if it gives any. An ``own`` claim is one of ours, which the
    paper does not make: it is judged like the others and counted apart. ``barrier`` is one of
    BARRIERS where the claim is not testable, else "". ``plan`` says of an undecided one how many
    seeds would decide it. ``answer`` has our numbers in short, both sides of a difference;
    ``marks`` are what a forest plot shows, and none where the claim is not testable; ``headline``
    marks the claim that answers the question of the experiment.
    """

    claim: str
    source: str
    verdict: str
    evidence: str
    published: str = ""
    own: bool = False
    barrier: str = ""
    plan: str = ""
    answer: str = ""
    marks: tuple[Mark, ...] = ()
    headline: bool = False

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


def table(title: str, header: str | Iterable[str], lines: Iterable[Iterable[Any]]) -> Table:
    """A table of any cells; ``header`` has the names of its columns, or one text of them.

    >>> table("Runs", "B | loss", [(128, "0.1 ± 0.02")]).rows
    (('128', '0.1 ± 0.02'),)
    """
    names = header.split(" | ") if isinstance(header, str) else header
    return Table(title, tuple(names), tuple(tuple(map(str, line)) for line in lines))


DIRECTIONS = ("above", "below", "within")


@dataclass(frozen=True)
class Claim:
    """A claim of a paper and the statistic that tests it.

    It holds when the reading is significantly "above" or "below" ``bound``, or "within" ``margin``
    of it; it fails when the opposite is significant; else it is undecided. ``published`` is the
    paper's own figure, in words.

    ``unmet`` says why the run is not what the claim is about ("NGD's loss is 2.1, at chance"): such
    a claim is not judged, and does not count in Holm's correction. ``barrier`` is the kind of that
    reason, one of BARRIERS. ``own`` marks a claim that the paper does not make; such claims are a
    family of their own in that correction.

    ``general`` marks what the paper says of any network or matrix, such as a theorem: it can be
    tested on any. A claim about a network is tested on that network only; its ``sentence`` begins
    with the name of the network that was run. ``headline`` marks the one that answers the
    experiment's question: a page begins with it, else with the first that is decided.
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
    headline: bool = False

    def __post_init__(self) -> None:
        require_choice(self.direction, "direction", DIRECTIONS)
        require_choice(self.barrier, "barrier", BARRIERS)

    def p_values(self) -> tuple[float, float]:
        """The p-values for the claim and against it; NaN where its condition is unmet.

        A tie without an error supports neither side: 0 = 0 is not "below 0", and does not refute it
        either.
        """
        reading = self.reading
        if self.unmet:
            return math.nan, math.nan
        if self.direction == "within":
            low, high = (reading.p_above(self.bound + side * self.margin) for side in (-1, 1))
            return max(low, 1 - high), min(1 - low, high)
        if reading.stderr == 0 and reading.value == self.bound:
            return 1.0, 1.0
        p_value = reading.p_above if self.direction == "above" else reading.p_below
        support = p_value(self.bound)
        return support, 1 - support

    @property
    def edge(self) -> float:
        """The bound that decides; "within" has two, of which the nearer counts."""
        side = math.copysign(self.margin, self.reading.value - self.bound)
        return self.bound + side if self.direction == "within" else self.bound

    def outlook(self, level: float) -> tuple[float, float]:
        """The power that this many seeds had at a level, and the seeds that POWER takes; infinite
        beyond MOST_SEEDS.

        Both assume that the value and the spread of the reading are the true ones. NaN where it has
        no spread, or lies on the bound.
        """
        reading, edge = self.reading, self.edge
        if not reading.stderr > 0 or reading.count < 2 or not reading.value - edge:
            return math.nan, math.nan
        seeds = reading.seeds_for(edge, level) or math.inf
        return reading.power(edge, level, reading.count), seeds

    @property
    def answer(self) -> str:
        """Our figure in short: "6.5 ± 0.2 against 4.1 ± 0.1" for a difference of two means."""
        if self.reading.sides is None:
            return f"{self.reading.short}{self.unit}"
        return " against ".join(side.short for side in self.reading.sides)

    @property
    def marks(self) -> tuple[Mark, ...]:
        """The value with its 95 % interval and the range that the claim says it is in."""
        low, high = -math.inf, math.inf
        if self.direction != "below":
            low = self.bound - self.margin
        if self.direction != "above":
            high = self.bound + self.margin
        known = math.isfinite(self.reading.value) and not self.unmet
        return ((self.reading.value, *self.reading.interval(), low, high),) if known else ()

    @property
    def ours(self) -> str:
        """Our figure, in words."""
        effect = self.reading.effect
        tail = f", effect {effect:+.2g}" if math.isfinite(effect) else ""
        seeds = f" (n = {self.reading.count}{tail})" if self.reading.count > 1 else ""
        reason = f"; not testable: {self.unmet}" if self.unmet else ""
        return f"{self.reading}{self.unit}{seeds}{reason}"


def judge(claims: Iterable[Claim], level: float = LEVEL) -> list[Verdict]:
    """The verdicts on the claims of an experiment.

    Holm's correction keeps the level over two families, each by itself: the paper's claims, and
    those that we added. Our additional claims therefore do not reduce the power of the paper's.
    """
    claims = list(claims)
    verdicts: dict[int, Verdict] = {}
    for own in (False, True):
        places = [index for index, claim in enumerate(claims) if claim.own == own]
        tested = [index for index in places if not claims[index].unmet]
        sides = zip(*(claims[index].p_values() for index in tested), strict=True)
        corrected = dict(zip(tested, zip(*map(holm, sides), strict=True), strict=True))
        for index in places:
            claim, verdict, barrier, plan = claims[index], UNTESTED, claims[index].barrier, ""
            if not claim.unmet:
                support, contrary = corrected[index]
                verdict = HOLDS if support <= level else FAILS if contrary <= level else OPEN
                barrier = ""
            if verdict == OPEN:  # at a level that is right whatever Holm's order comes to be
                plan = _plan(claim, level / len(tested))
            said = (claim.ours, claim.published, own, barrier, plan)
            shown = (claim.answer, claim.marks, claim.headline)
            verdicts[index] = Verdict(claim.sentence, claim.source, verdict, *said, *shown)
    return [verdicts[index] for index in range(len(claims))]


def _plan(claim: Claim, level: float) -> str:
    """The number of seeds that decides a claim with POWER at this level, in words."""
    power, count = claim.outlook(level)
    if math.isnan(power):
        return "not known"
    seeds = f"n = {count:,.0f}" if math.isfinite(count) else f"n > {MOST_SEEDS:,}"
    return f"{seeds} (power so far {power:.0%})"


@dataclass(frozen=True)
class JointClaim(Claim):
    """A claim that holds when all of its parts do, and fails when one of them does.

    For it the p-value is the largest of its k parts' (the intersection–union test: no correction is
    needed, for every part must be significant). Against it the p-value is k times the smallest
    (Bonferroni: any of the parts may fail).
    """

    parts: tuple[tuple[str, Claim], ...] = ()

    def p_values(self) -> tuple[float, float]:
        """The p-values for all parts together, and against them; the first needs all parts."""
        if self.unmet:
            return math.nan, math.nan
        support, contrary = zip(*(part.p_values() for _, part in self.parts), strict=True)
        known = [value for value in contrary if not math.isnan(value)]
        together = math.nan if any(map(math.isnan, support)) else max(support)
        return together, min(1.0, len(self.parts) * min(known)) if known else math.nan

    def outlook(self, level: float) -> tuple[float, float]:
        """The least power of a part, and the most seeds that one takes: all parts are needed."""
        powers, counts = zip(*(part.outlook(level) for _, part in self.parts), strict=True)
        known = not any(map(math.isnan, powers))
        return (min(powers), max(counts)) if known else (math.nan, math.nan)

    @property
    def answer(self) -> str:
        """The figures of all parts, in words."""
        return ", ".join(f"{words} {part.reading.short}{part.unit}" for words, part in self.parts)

    @property
    def marks(self) -> tuple[Mark, ...]:
        """Those of all parts."""
        return () if self.unmet else tuple(mark for _, part in self.parts for mark in part.marks)

    @property
    def ours(self) -> str:
        """The figures of all parts, and over how many seeds."""
        figures = ", ".join(f"{words} {part.reading}{part.unit}" for words, part in self.parts)
        seeds = f" (n = {self.reading.count})" if self.reading.count > 1 else ""
        reason = f"; not testable: {self.unmet}" if self.unmet else ""
        return f"{figures}{seeds}{reason}"


def jointly(sentence: str, source: str, published: str, parts: Mapping[str, Claim]) -> JointClaim:
    """The claim that all of ``parts`` hold, each named by the words for its figure."""
    unmet = next((part.unmet for part in parts.values() if part.unmet), "")
    fewest = min((part.reading for part in parts.values()), key=lambda reading: reading.count)
    return JointClaim(sentence, source, published, fewest, unmet=unmet, parts=tuple(parts.items()))


NEGLIGIBLE = 0.1  # of a printed change: a smaller one is none
LEAST_EFFECT = (
    "Where two values are printed, a change counts if it is at least a tenth of the printed one."
    " This was set after the runs, for all such claims."
)


def least(low: float, high: float) -> float:
    """The least change that counts where the paper prints these two, with its sign."""
    return NEGLIGIBLE * (high - low)


def least_decades(low: float, high: float) -> float:
    """The same in decades."""
    return NEGLIGIBLE * math.log10(high / low)
