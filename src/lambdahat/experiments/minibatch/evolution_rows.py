"""Rows of Figure 5.6, and a view of them: the course of one training run through one operator."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from lambdahat.experiments.kit.cells import Row, Rows
from lambdahat.experiments.minibatch.eigen_claims import near_claimed
from lambdahat.experiments.minibatch.eigen_rows import (
    SEEN,
    Batches,
    Point,
    batch_rows,
    points_of,
    where,
)
from lambdahat.experiments.minibatch.points import CurvaturePoint

OPTIMIZERS = ("SGD", "KFAC")


def rows_of(points: Sequence[CurvaturePoint]) -> list[Row]:
    """A row for every point, and one for the batches of each size there, which keeps a store of
    many runs small.
    """
    return [_short(row) for point in points for row in (_point_row(point), *_sizes(point))]


def _short(row: Row) -> Row:
    """Six digits of each number, far beyond the spread of batches."""
    return json.loads(json.dumps(row), parse_float=lambda text: float(f"{float(text):.6g}"))  # type: ignore[no-any-return]


def _sizes(point: CurvaturePoint) -> Iterator[Row]:
    """What batches of a size show, batch by batch in lists, and what each model predicts."""
    for _, group in groupby(batch_rows(point), key=lambda row: row["batch_size"]):
        rows = list(group)
        seen = {what: [row[what] for row in rows] for what in SEEN}
        yield {name: value for name, value in rows[0].items() if name != "batch"} | seen


def _single(rows: Rows) -> Rows:
    """The same with a row for each batch; predictions stay with the first."""
    found: list[Row] = []
    for row in rows:
        if row["part"] != "batch":
            found.append(row)
            continue
        shared = {
            name: row[name] for name in ("network", "epoch", "operator", "part", "batch_size")
        }
        found += [
            {**(shared if batch else row), "batch": batch, **dict(zip(SEEN, values, strict=True))}
            for batch, values in enumerate(zip(*(row[what] for what in SEEN), strict=True))
        ]
    return Rows(found)


def _point_row(point: CurvaturePoint) -> Row:
    return {
        **where(point),
        "part": "point",
        "population": point.samples,
        "parameters": point.parameters,
        "loss": point.loss,
        "variance": float(point.variance),
        "variance error": float(point.variance.stderr),
        "anisotropy": point.anisotropy,
        "full largest": point.largest,
        "full smallest": point.smallest,
    }


@dataclass(frozen=True)
class Courses:
    """The runs of one network by one optimiser, seen through one operator: the points of each
    seed by epoch.
    """

    optimizer: str
    seeds: dict[int, list[Point]]

    @property
    def first(self) -> list[Point]:
        """The points of one seed."""
        return next(iter(self.seeds.values()))

    @property
    def name(self) -> str:
        """Network and operator."""
        return self.first[0].name

    @property
    def epochs(self) -> list[int]:
        """Where they were measured."""
        return [point["epoch"] for point in self.first]

    @property
    def models(self) -> list[str]:
        """The models with predictions."""
        return self.first[0].models

    def by_seed(self, value: Callable[[list[Point]], float]) -> dict[int, float]:
        """A number for each seed, of its points."""
        return {seed: value(points) for seed, points in self.seeds.items()}

    def at(self, epoch: int) -> list[Point]:
        """The points of all seeds at one epoch."""
        return [
            point for points in self.seeds.values() for point in points if point["epoch"] == epoch
        ]


def courses_of(rows: Rows) -> list[Courses]:
    """Network by network and operator by operator, SGD's and then KFAC's; both begin with the start
    they share.

    Runs whose start is not among the rows are left out.
    """
    starts: dict[tuple[str, str, int], Point] = {}
    found: dict[tuple[str, str, str], dict[int, list[Point]]] = {}
    for optimizer in OPTIMIZERS:
        for seed in rows.distinct("seed"):
            for point in points_of(_single(rows.where(optimizer=optimizer, seed=seed))):
                place = (point["network"], point["operator"])
                if point["epoch"] == 0:
                    starts[(*place, seed)] = point
                elif (*place, seed) in starts:
                    begun = [starts[(*place, seed)]]
                    found.setdefault((*place, optimizer), {}).setdefault(seed, begun).append(point)
    networks = rows.distinct("network")
    places = sorted(found, key=lambda place: (networks.index(place[0]), place[1] == "ggn"))
    return [Courses(place[2], found[place]) for place in places]


def excess(point: Point) -> float:
    """λ'₁ − λ₁: what batches show beyond the full data, on average."""
    return near_claimed(point).mean("largest").value - float(point["full largest"])


def distance(batches: Batches, model: str) -> float:
    """|predicted − mean of the batches| over their standard deviation; NaN where they do not
    differ.
    """
    spread = batches.deviation("largest")
    gap = abs(batches.told(model, "largest").value - batches.mean("largest").value)
    return gap / spread if spread > 0 else math.nan


def miss(batches: Batches, model: str) -> float:
    """ln(predicted/mean of the batches)."""
    told, seen = batches.told(model, "largest").value, batches.mean("largest").value
    return math.log(told / seen) if told > 0 and seen > 0 else math.nan
