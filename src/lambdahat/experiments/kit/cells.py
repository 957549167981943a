"""Cells of a grid, their rows, and what is read off them over seeds: means, gaps, curves."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from lambdahat.experiments.kit.claims import (
    Reading,
    Table,
    mean_of,
    paired_difference,
    slope,
    table,
)
from lambdahat.results.charts import Chart, Series

Cell = dict[str, Any]
Row = dict[str, Any]


class Rows(Sequence[Row]):
    """The rows of an experiment: flat records of a cell's settings and what was measured there.

    >>> rows = Rows([{"seed": 0, "loss": 1.0}, {"seed": 1, "loss": 2.0}])
    >>> rows.where(seed=1).values("loss")
    [2.0]
    """

    def __init__(self, records: Iterable[Row]) -> None:
        self._records = list(records)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: Any) -> Any:
        return Rows(self._records[index]) if isinstance(index, slice) else self._records[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._records)

    def where(self, **settings: Any) -> Rows:
        """The rows with these settings; a list, tuple or set stands for any of its members."""
        kept = self._records
        for name, value in settings.items():
            wanted = value if isinstance(value, list | tuple | set | frozenset) else (value,)
            kept = [row for row in kept if row.get(name) in wanted]
        return Rows(kept)

    def values(self, name: str) -> list[Any]:
        """A column, without the rows that lack it."""
        return [row[name] for row in self._records if row.get(name) is not None]

    def distinct(self, name: str) -> list[Any]:
        """The values of a column, each once, in order of appearance."""
        return list(dict.fromkeys(self.values(name)))

    def groups(self, *names: str) -> Iterator[tuple[Any, Rows]]:
        """The rows of each value of a column, or of each tuple of values of several, with it.

        In order of appearance, without rows that lack one of the columns.
        """
        groups: dict[tuple[Any, ...], list[Row]] = {}
        for row in self._records:
            groups.setdefault(tuple(row.get(name) for name in names), []).append(row)
        for key, part in groups.items():
            if None not in key:
                yield key if len(names) > 1 else key[0], Rows(part)

    def by(self, name: str, labels: str | Iterable[Any] = "{}") -> dict[str, Rows]:
        """The rows of each value of a column, under a label.

        ``labels`` is a format of the value; or the values that are wanted, in their order, as a
        mapping with a label for each.

        >>> rows = Rows([{"rate": 0.1}, {"rate": 1.0}])
        >>> [*rows.by("rate", "rate {:g}")], [*rows.by("rate", {1.0: "fast"})]
        (['rate 0.1', 'rate 1'], ['fast'])
        """
        if isinstance(labels, str):
            return {labels.format(value): part for value, part in self.groups(name)}
        named = labels if isinstance(labels, Mapping) else {value: str(value) for value in labels}
        return {label: self.where(**{name: value}) for value, label in named.items()}

    def paired(self, name: str, by: str | tuple[str, ...] = "seed") -> dict[Any, float]:
        """One number for each value of ``by``, or tuple of values: the column's mean there."""
        groups: dict[Any, list[float]] = {}
        for row in self._records:
            if row.get(name) is not None:
                key = row[by] if isinstance(by, str) else tuple(row.get(each) for each in by)
                groups.setdefault(key, []).append(float(row[name]))
        return {key: sum(values) / len(values) for key, values in groups.items()}

    def frame(self) -> Any:
        """The same as a ``pandas.DataFrame``."""
        from pandas import DataFrame  # type: ignore[import-untyped]

        return DataFrame(self._records)


def setting(
    data: str, training: int, held_out: int, epochs: int, *, batch: int = 128, **more: Any
) -> Cell:
    """What cells that train share: a data set, how many of its samples are trained on and held out,
    epochs, batch size, and ``more``.
    """
    samples = {"data": data, "training": training, "held_out": held_out}
    return {**samples, "epochs": epochs, "batch": batch, **more}


def image_setting(
    data: str, training: int, held_out: int, epochs: int, *, side: int = 0, **more: Any
) -> Cell:
    """The same of images: pooled to ``side`` unless 0, cropped and flipped if ``augmented``."""
    return setting(data, training, held_out, epochs, **{"side": side, "augmented": False, **more})


def grid(base: Mapping[str, Any], **axes: Iterable[Any]) -> list[Cell]:
    """The cells that share ``base`` and differ in the axes, the last of which goes fastest.

    A value that is a dict stands for all of its settings.

    >>> grid({"epochs": 3}, decay=(0, 1), seed=range(2))[1]
    {'epochs': 3, 'decay': 0, 'seed': 1}
    >>> grid({}, by=[{"rule": "SGD", "rate": 0.1}], seed=[4])
    [{'rule': 'SGD', 'rate': 0.1, 'seed': 4}]
    """
    cells = []
    for place in product(*axes.values()):
        cell = dict(base)
        for name, value in zip(axes, place, strict=True):
            cell |= value if isinstance(value, Mapping) else {name: value}
        cells.append(cell)
    return cells


def more_seeds(cells: Iterable[Cell], seeds: Sequence[int], **wanted: Sequence[Any]) -> list[Cell]:
    """Further seeds of the cells whose settings are among those ``wanted``.

    >>> more_seeds(grid({}, rule=("SGD", "Adam"), seed=range(2)), [2, 3], rule=["Adam"])
    [{'rule': 'Adam', 'seed': 2}, {'rule': 'Adam', 'seed': 3}]
    """
    chosen = [cell for cell in cells if all(cell[name] in among for name, among in wanted.items())]
    settings = {key_of(without_seeds(cell)): cell for cell in chosen}
    return [{**cell, "seed": seed} for cell in settings.values() for seed in seeds]


def without_seeds(cell: Cell) -> Cell:
    """The settings of a cell without its seeds."""
    return {name: value for name, value in cell.items() if name not in ("seed", "seeds")}


def key_of(cell: Cell) -> str:
    """A short name of a cell that depends on its settings alone."""
    text = json.dumps(cell, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def label_of(cell: Cell) -> str:
    """The settings of a cell in words, as --only matches them: "alpha=0.1 seed=3"."""
    return " ".join(f"{name}={value}" for name, value in cell.items())


By = str | tuple[str, ...]  # the columns that tell runs apart


def logs(rows: Rows, name: str, by: By = "seed") -> dict[Any, float]:
    """log₁₀ of a column for each seed; NaN where it is not positive."""
    pairs = rows.paired(name, by).items()
    return {seed: math.log10(value) if value > 0 else math.nan for seed, value in pairs}


def decades(upper: Rows, lower: Rows, name: str, by: By = "seed") -> Reading:
    """log₁₀ of the ratio of two settings, seed by seed."""
    return paired_difference(logs(upper, name, by), logs(lower, name, by))


def gap(upper: Rows, lower: Rows, name: str, by: By = "seed") -> Reading:
    """The difference of two settings, seed by seed."""
    high, low = upper.paired(name, by), lower.paired(name, by)
    both = [seed for seed in high if seed in low]
    sides = mean_of([high[seed] for seed in both]), mean_of([low[seed] for seed in both])
    return replace(paired_difference(high, low), sides=sides)


def gap_of_gaps(upper: tuple[Rows, Rows], lower: tuple[Rows, Rows], *names: str) -> Reading:
    """The difference of two differences, seed by seed.

    Each is that of a column of two settings, or of two columns of a setting that is given twice.
    """
    gaps = []
    for one, other in (upper, lower):
        high, low = one.paired(names[0]), other.paired(names[-1])
        gaps.append({seed: high[seed] - low[seed] for seed in high if seed in low})
    return paired_difference(*gaps)


def over_seeds(rows: Rows, name: str, by: By = "seed") -> Reading:
    """The mean of a column over the seeds."""
    return mean_of(list(rows.paired(name, by).values()))


def by_seed(rows: Rows, statistic: Callable[[Rows], float]) -> Reading:
    """The mean over seeds of a number that is computed from the rows of each."""
    return mean_of([statistic(part) for _, part in rows.groups("seed")])


def exponent(rows: Rows, column: str, x: str) -> Reading:
    """The slope of log₁₀ of a column over log₁₀ of another, seed by seed."""

    def fit(part: Rows) -> float:
        logs = (np.log10(part.values(name)).tolist() for name in (x, column))
        return slope(*logs).value

    return by_seed(rows, fit)


def means(rows: Rows, *names: str) -> list[str]:
    """The means of columns over the seeds with their errors, in words, for the line of a table."""
    return [str(over_seeds(rows, name)) for name in names]


def means_table(
    title: str, first: str, parts: Mapping[Any, Rows], columns: Mapping[str, str]
) -> Table:
    """A line for each part with the means of columns over the seeds, below their headings.

    ``first`` is the heading of the parts' labels, or the headings of labels that are tuples.
    """
    labels = [label if isinstance(label, tuple) else (label,) for label in parts]
    readings = (means(part, *columns) for part in parts.values())
    lines = [(*label, *line) for label, line in zip(labels, readings, strict=True)]
    return table(title, (*first.split(" | "), *columns.values()), lines)


def curve(label: str, rows: Rows, name: str, x: str = "epoch") -> Series:
    """The mean over seeds at each x, with its error where there is more than one seed."""
    places = sorted({row[x] for row in rows if row.get(name) is not None})
    parts = [rows.where(**{x: place}) for place in places]
    return series_of(label, places, parts, name)


def curves(
    parts: Rows | Mapping[str, Rows], columns: str | Mapping[str, str], x: str = "epoch"
) -> tuple[Series, ...]:
    """A curve for each part of the rows and each column, named by the labels that these have."""
    named = {"": parts} if isinstance(parts, Rows) else parts
    labels = {columns: ""} if isinstance(columns, str) else columns
    return tuple(
        curve(", ".join(filter(None, (name, words))), part, column, x)
        for name, part in named.items()
        for column, words in labels.items()
    )


def series_of(
    label: str, x: Sequence[float | str], parts: Sequence[Rows], name: str, style: str = "line"
) -> Series:
    """The means of a column over the seeds of each part, hollow where a seed did not converge.

    The status of what a column holds is in the column ``<name>_status``, if it has one.
    """
    series = reading_series(label, x, [over_seeds(part, name) for part in parts], style)
    known = [[row.get(f"{name}_status") or "" for row in part] for part in parts]
    failed = [sorted(set(part) - {"", "CONVERGED"}) for part in known]
    return replace(series, statuses=[" ".join(status) for status in failed])


def reading_series(
    label: str, x: Sequence[float | str], readings: Sequence[Reading], style: str = "line"
) -> Series:
    """Readings over x, with their standard errors where they have one."""
    counts = sorted({reading.count for reading in readings if reading.stderr > 0})
    number = " to ".join(dict.fromkeys(map(str, counts[:1] + counts[-1:])))
    look: Any = {"band": f"± standard error of the mean over {number} seeds"}
    values = [reading.value for reading in readings]
    return Series(label, x, values, errors(readings), style, **look)


def errors(readings: Sequence[Reading]) -> list[float | None]:
    """Standard errors, None where there is none."""
    return finite([reading.stderr for reading in readings])


def finite(values: Iterable[float]) -> list[float | None]:
    """The numbers of a chart, None where one is not finite."""
    return [value if math.isfinite(value) else None for value in values]


def short(values: Any, digits: int = 4) -> list[float]:
    """Some digits of each: a figure needs no more than four."""
    return [float(f"{float(value):.{digits}g}") for value in values]


def stems(label: str, row: Mapping[str, Any]) -> Series:
    """The Ritz values of one row."""
    return Series(label, row["nodes"], row["weights"], style="stems")


def spectra(title: str, rows: Iterable[Row], label: str, source: str, caption: str = "") -> Chart:
    """The Ritz values of some rows; ``label`` names a row by its columns: "decay {decay:g}"."""
    series = tuple(stems(label.format(**row), row) for row in rows)
    axes = "eigenvalue", "weight"
    return Chart(title, *axes, series, y_log=True, source=source, caption=caption)


def points(label: str, groups: Mapping[str, Rows], name: str) -> Series:
    """The mean of a column over the seeds of each group, as points with errors."""
    return series_of(label, list(groups), list(groups.values()), name, "points")


def printed_points(label: str, printed: Mapping[Any, float]) -> Series:
    """The values that a paper prints, by x, as points."""
    return Series(label, list(printed), list(printed.values()), style="points", published=True)


def capitalize(words: str) -> str:
    """With a capital; λ stays as it is."""
    return words if words.startswith("λ") else words[0].upper() + words[1:]
