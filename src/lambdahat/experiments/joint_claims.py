"""Claims that several things are so at once: "sharper and better"."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lambdahat.experiments.claims import Claim


@dataclass(frozen=True)
class JointClaim(Claim):
    """A claim that holds when all of its parts do, and fails when one of them does; ``jointly``
    makes one.

    For it the p-value is the largest of its k parts' (the intersection–union test: no correction is
    needed, for every part must be significant). Against it the p-value is k times the smallest
    (Bonferroni: any of the parts may fail).
    """

    parts: tuple[tuple[str, Claim], ...] = ()

    def p_values(self) -> tuple[float, float]:
        """The p-values for all parts together, and against them; a part that is not known leaves
        the first unknown.
        """
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
    def ours(self) -> str:
        """The figures of all parts, in words."""
        figures = ", ".join(f"{words} {part.reading}{part.unit}" for words, part in self.parts)
        seeds = f" (n = {self.reading.count})" if self.reading.count > 1 else ""
        reason = f"; not testable: {self.unmet}" if self.unmet else ""
        return f"{figures}{seeds}{reason}"


def jointly(sentence: str, source: str, published: str, parts: Mapping[str, Claim]) -> JointClaim:
    """The claim that all of ``parts`` hold, each with the words for its figure; unmet where one
    of them is.
    """
    unmet = next((part.unmet for part in parts.values() if part.unmet), "")
    fewest = min((part.reading for part in parts.values()), key=lambda reading: reading.count)
    return JointClaim(sentence, source, published, fewest, unmet=unmet, parts=tuple(parts.items()))
