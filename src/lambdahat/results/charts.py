"""What a figure shows, without a drawing library: the page and the image files draw the same chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lambdahat._check import require


@dataclass(frozen=True)
class Series:
    """One curve or set of points: y over x, with ``error`` its half-width of uncertainty, a band on lines.

    ``style`` is "line", "points", "bars", "stems", "step" or "segments", which are lines without marks, interrupted
    where y is None; ``published`` marks what a paper printed, and takes the colour of ours where its name begins with
    the name of ours.
    """

    name: str
    x: Sequence[float | str]
    y: Sequence[float | None]
    error: Sequence[float | None] | None = None
    style: str = "line"
    published: bool = False

    def __post_init__(self) -> None:
        require(
            len(self.x) == len(self.y), f"series {self.name!r}", "have as many x as y", f"{len(self.x)}, {len(self.y)}"
        )


@dataclass(frozen=True)
class Heat:
    """A matrix of values over two sets of labels: ``values[i][j]`` lies at ``y[i]`` and ``x[j]``."""

    x: Sequence[float | str]
    y: Sequence[float | str]
    values: Sequence[Sequence[float | None]]
    name: str = ""


@dataclass(frozen=True)
class Chart:
    """A figure: its series or its heat map, axes, and which figure of the paper it stands beside."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...] = ()
    heat: Heat | None = None
    surface: bool = False  # draw the heat map as a surface in three dimensions
    x_log: bool = False
    y_log: bool = False
    source: str = ""
    caption: str = ""
    lines: tuple[tuple[str, float], ...] = field(default=())  # horizontal marks: label and height


def short(values: Any) -> list[float]:
    """Four digits of each: a figure needs no more."""
    return [float(f"{float(value):.4g}") for value in values]
