"""Curves of runs under the learning rules, and how fast a rule trains, which is read off them."""

from __future__ import annotations

import math

from lambdahat.experiments.kit.cells import Row
from lambdahat.experiments.regularization.published import EARLY

QUARTER = 0.25  # of the run, over which the speed of training is read
WITH_CURVES = 5  # seeds whose curves are stored: those of 100 seeds take several megabytes


def early(row: Row, quantity: str) -> float:
    """The mean of a curve over the first quarter of its epochs, without the start; NaN where it
    diverged.
    """
    if quantity in row:
        return float(row[quantity])
    last = QUARTER * row["recorded"][-1]
    points = zip(row["recorded"], row[f"{EARLY[quantity]} curve"], strict=True)
    kept = [value for epoch, value in points if 0 < epoch <= last]
    return sum(kept) / len(kept) if kept else math.nan


def shortened(row: Row) -> Row:
    """The row as it is stored: six digits, and beyond the first seeds the speed in place of the
    curves.
    """
    short = {
        name: float(f"{value:.6g}") if isinstance(value, float) else value
        for name, value in row.items()
    }
    if row["seed"] < WITH_CURVES:
        return short
    speeds = {
        name: float(f"{early(row, name):.6g}") for name, of in EARLY.items() if f"{of} curve" in row
    }
    dropped = ["recorded", *(name for name in row if name.endswith(" curve"))]
    return {name: value for name, value in short.items() if name not in dropped} | speeds
