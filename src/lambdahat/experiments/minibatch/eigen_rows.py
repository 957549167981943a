"""The mini-batch experiment as flat rows, and a view of them: a point of training, and the batches
of one size there.

A row with ``part`` "batch" has what one batch shows, and the first of each size what each model
predicts of them all; one with "point" what the full data show at an epoch, and the Ritz values
behind the bulks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lambdahat.experiments.kit.cells import Row, Rows
from lambdahat.experiments.kit.claims import Reading, mean_of
from lambdahat.experiments.minibatch.points import ENDS, MODELS, BatchCell, CurvaturePoint
from lambdahat.randommatrix.bulk import continuous_region
from lambdahat.randommatrix.spikes import effective_batch
from lambdahat.results import Array, Spectrum

SEEN = (*ENDS, "overlaps")


def rows_of(points: Sequence[CurvaturePoint]) -> list[Row]:
    """A row for every point, and one for every batch there."""
    return [row for point in points for row in (_point_row(point), *batch_rows(point))]


def _point_row(point: CurvaturePoint) -> Row:
    edges = (point.bulk.lower, point.bulk.upper)
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
        "indefinite": point.indefinite,
        "width": point.width,
        "width size": point.batch_size,
        "batch widths": [high - low for low, high in map(continuous_region, point.batch_spectra)],
        "bulk": [float(edge) for edge in edges],
        "bulk errors": [float(edge.stderr) for edge in edges],
        "outliers": [float(value) for value in point.bulk.outliers],
        **_ritz(point.spectrum, ""),
        **_ritz(point.batch_spectra[0], "batch "),
    }


def where(point: CurvaturePoint) -> Row:
    """Which point of training a row is of."""
    return {"network": point.network, "epoch": point.epoch, "operator": point.operator}


def _ritz(spectrum: Spectrum, name: str) -> Row:
    """Ritz values and weights to four digits: a figure shows no more."""
    return {
        f"{name}nodes": [float(f"{node:.4g}") for node in spectrum.nodes[0]],
        f"{name}weights": [float(f"{weight:.4g}") for weight in spectrum.weights[0]],
    }


def batch_rows(point: CurvaturePoint) -> Iterator[Row]:
    """What each batch shows, and with the first of each size what each model predicts."""
    for cell in point.cells:
        told = _told(cell)
        for batch in range(len(cell.measured)):
            seen = {what: float(cell.values(what)[batch]) for what in SEEN}
            more = told if batch == 0 else {}
            yield {
                **where(point),
                "part": "batch",
                "batch_size": cell.batch_size,
                "batch": batch,
                **seen,
                **more,
            }


def _told(cell: BatchCell) -> Row:
    """What each model predicts, with the error of the prediction and the spread of one batch
    about it.
    """
    found: Row = {}
    for model in cell.predictions:
        for what in SEEN:
            told = cell.predicted(model, what)
            found |= {f"{model} {what}": float(told), f"{model} {what} error": float(told.stderr)}
        found |= {f"{model} {end} spread": cell.spread(model, end) for end in ENDS}
    return found


@dataclass(frozen=True)
class Batches:
    """The batches of one size at one point."""

    size: int
    population: int
    rows: Rows

    @property
    def effective(self) -> float:
        """b = B/(1 − B/N)."""
        return effective_batch(self.size, self.population)

    def values(self, what: str) -> Array:
        """The "largest", "smallest" or "overlaps" of every batch, (n,)."""
        return np.asarray(self.rows.values(what), dtype=np.float64)

    def mean(self, what: str) -> Reading:
        """Its mean over the batches."""
        return mean_of(self.values(what).tolist())

    def deviation(self, what: str) -> float:
        """Its standard deviation between batches."""
        return float(self.values(what).std(ddof=1))

    def told(self, model: str, what: str) -> Reading:
        """What a model predicts; an error that is not known counts as none."""
        error = self.rows[0][f"{model} {what} error"]
        return Reading(self.rows[0][f"{model} {what}"], error if math.isfinite(error) else 0.0)

    def spread(self, model: str, end: str) -> float:
        """The standard deviation of one batch about the prediction."""
        return float(self.rows[0][f"{model} {end} spread"])


@dataclass(frozen=True)
class Point:
    """One network after one epoch through one operator; ``row`` has what the full data show."""

    row: Row
    batches: tuple[Batches, ...]

    def __getitem__(self, name: str) -> Any:
        return self.row[name]

    @property
    def name(self) -> str:
        """Network and operator."""
        return f"{self['network']}, {'GGN' if self['operator'] == 'ggn' else 'Hessian'}"

    @cached_property
    def models(self) -> list[str]:
        """The models with predictions."""
        return [model for model in MODELS if f"{model} largest" in self.batches[0].rows[0]]


def points_of(rows: Rows) -> list[Point]:
    """The points whose rows are whole, in order of the epochs."""
    batches: dict[tuple[str, int, str], dict[int, list[Row]]] = {}
    for row in rows.where(part="batch"):
        batches.setdefault(_key(row), {}).setdefault(row["batch_size"], []).append(row)
    found = []
    for row in rows.where(part="point"):
        sizes = sorted(batches[_key(row)].items())
        found.append(
            Point(row, tuple(Batches(size, row["population"], Rows(part)) for size, part in sizes))
        )
    return sorted(found, key=lambda point: int(point["epoch"]))


def groups_of(rows: Rows) -> list[list[Point]]:
    """The points of each network and operator, by epoch."""
    points = points_of(rows)
    keys = dict.fromkeys((row["network"], row["operator"]) for row in rows.where(part="point"))
    return [
        [point for point in points if (point["network"], point["operator"]) == key] for key in keys
    ]


def _key(row: Row) -> tuple[str, int, str]:
    return row["network"], row["epoch"], row["operator"]
