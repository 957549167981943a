"""Readings of rows over seeds, for claims, tables and charts: means, differences of two
settings, curves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lambdahat.experiments.experiment import Rows
from lambdahat.experiments.statistics import Reading, mean_of, paired_difference
from lambdahat.results.charts import Series


def logs(rows: Rows, name: str) -> dict[Any, float]:
    """log₁₀ of a column for each seed; NaN where it is not positive."""
    return {
        seed: math.log10(value) if value > 0 else math.nan
        for seed, value in rows.paired(name).items()
    }


def decades(upper: Rows, lower: Rows, name: str) -> Reading:
    """log₁₀ of the ratio of two settings, seed by seed."""
    return paired_difference(logs(upper, name), logs(lower, name))


def gap(upper: Rows, lower: Rows, name: str) -> Reading:
    """The difference of two settings, seed by seed."""
    return paired_difference(upper.paired(name), lower.paired(name))


def over_seeds(rows: Rows, name: str) -> Reading:
    """The mean of a column over the seeds."""
    return mean_of(list(rows.paired(name).values()))


def curve(label: str, rows: Rows, name: str, x: str = "epoch") -> Series:
    """The mean over seeds at each x, with its error where there is more than one seed."""
    places = sorted({row[x] for row in rows if row.get(name) is not None})
    readings = [over_seeds(rows.where(**{x: place}), name) for place in places]
    return Series(label, places, [reading.value for reading in readings], errors(readings))


def errors(readings: Sequence[Reading]) -> list[float | None]:
    """Standard errors, None where there is none."""
    return [reading.stderr if math.isfinite(reading.stderr) else None for reading in readings]


def stems(label: str, row: Mapping[str, Any]) -> Series:
    """The Ritz values of one row."""
    return Series(label, row["nodes"], row["weights"], style="stems")
