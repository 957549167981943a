"""Tests on figures over seeds: paired and Welch t-tests, effect sizes, Holm's correction."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

LEVEL = 0.05
POWER = 0.8  # that a planned number of seeds is to have
MOST_SEEDS = 1000


@dataclass(frozen=True)
class Reading:
    """A number with its standard error and degrees of freedom; infinite ones where the error is
    known.
    """

    value: float
    stderr: float
    dof: float = math.inf
    count: int = 1
    effect: float = math.nan  # Cohen's d of a difference

    def p_above(self, threshold: float) -> float:
        """The p-value of the test that the true value is not above the threshold; 0 or 1 where
        the error is 0.
        """
        if math.isnan(self.value) or math.isnan(self.stderr):
            return math.nan
        if self.stderr == 0:
            return 0.0 if self.value > threshold else 1.0
        score = (self.value - threshold) / self.stderr
        return float(
            stats.t.sf(score, self.dof) if math.isfinite(self.dof) else stats.norm.sf(score)
        )

    def p_below(self, threshold: float) -> float:
        """The same for "not below"; a value that is the threshold, with no error, is neither
        above nor below it.
        """
        return Reading(-self.value, self.stderr, self.dof).p_above(-threshold)

    def power(self, threshold: float, level: float, count: int) -> float:
        """The probability that ``count`` seeds show on which side of the threshold the value lies.

        The value and the spread of this reading are taken for the true ones; the t-test is
        one-sided at ``level``.
        """
        shift = (
            abs(self.value - threshold) / (self.stderr * math.sqrt(self.count)) * math.sqrt(count)
        )
        if math.isinf(self.dof):
            return float(stats.norm.sf(stats.norm.isf(level) - shift))
        dof = count - (self.count - self.dof)
        return float(stats.nct.sf(stats.t.isf(level, dof), dof, shift)) if dof > 0 else math.nan

    def planned(self, threshold: float, level: float, power: float = POWER) -> int | None:
        """How many seeds reach that power; None if more than MOST_SEEDS would."""
        counts = range(2, MOST_SEEDS + 1)
        place = bisect_left(
            counts, True, key=lambda count: self.power(threshold, level, count) >= power
        )
        return counts[place] if place < len(counts) else None

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "not known"
        return f"{self.value:.4g} ± {self.stderr:.2g}" if self.stderr > 0 else f"{self.value:.4g}"


def mean_of(values: Sequence[float]) -> Reading:
    """The mean over seeds; with one seed its error is not known."""
    found = np.asarray([value for value in values if math.isfinite(value)], dtype=float)
    if len(found) == 0:
        return Reading(math.nan, math.nan, math.nan, 0)
    error = float(found.std(ddof=1) / math.sqrt(len(found))) if len(found) > 1 else math.nan
    return Reading(float(found.mean()), error, len(found) - 1, len(found))


def paired_difference(upper: Mapping[Any, float], lower: Mapping[Any, float]) -> Reading:
    """The mean of upper − lower over the seeds that both have (paired t-test; effect: mean over
    deviation).
    """
    common = [
        key
        for key in upper
        if key in lower and math.isfinite(upper[key]) and math.isfinite(lower[key])
    ]
    gaps = [upper[key] - lower[key] for key in common]
    found = mean_of(gaps)
    deviation = float(np.std(gaps, ddof=1)) if len(gaps) > 1 else math.nan
    effect = found.value / deviation if deviation else math.nan
    return Reading(found.value, found.stderr, found.dof, found.count, effect)


def welch_difference(upper: Sequence[float], lower: Sequence[float]) -> Reading:
    """The difference of two means over different seeds, with Welch's error and degrees of
    freedom.
    """
    one, other = mean_of(upper), mean_of(lower)
    squares = [one.stderr**2, other.stderr**2]
    total = sum(squares)
    weights = sum(
        square**2 / found.dof
        for square, found in zip(squares, (one, other), strict=True)
        if found.dof > 0
    )
    spread = math.sqrt((squares[0] * one.count + squares[1] * other.count) / 2)
    gap = one.value - other.value
    dof = total**2 / weights if weights else math.inf
    return Reading(
        gap, math.sqrt(total), dof, one.count + other.count, gap / spread if spread else math.nan
    )


def slope(x: Sequence[float], y: Sequence[float]) -> Reading:
    """The slope of a straight line through points, by least squares, with its standard error."""
    pairs = [(a, b) for a, b in zip(x, y, strict=True) if math.isfinite(a) and math.isfinite(b)]
    if len(pairs) < 3:
        return Reading(math.nan, math.nan, math.nan, len(pairs))
    fit = stats.linregress(*zip(*pairs, strict=True))
    return Reading(float(fit.slope), float(fit.stderr), len(pairs) - 2, len(pairs))


def correlation(x: Sequence[float], y: Sequence[float]) -> Reading:
    """Spearman's rank correlation; its error from Fisher's transform, 1.03/√(n − 3) times 1 −
    r².
    """
    pairs = [(a, b) for a, b in zip(x, y, strict=True) if math.isfinite(a) and math.isfinite(b)]
    if len(pairs) < 4:
        return Reading(math.nan, math.nan, math.nan, len(pairs))
    found = float(stats.spearmanr(*zip(*pairs, strict=True)).statistic)
    return Reading(found, 1.03 * (1 - found**2) / math.sqrt(len(pairs) - 3), math.inf, len(pairs))


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
