"""What an experiment is: a grid of cells at three scales, a function from a cell to rows, and claims about the rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

from lambdahat._check import require, require_choice
from lambdahat.experiments.claims import Claim
from lambdahat.experiments.reproduction import Table
from lambdahat.results.charts import Chart

Cell = dict[str, Any]
Row = dict[str, Any]

SCALES = ("smoke", "cpu", "paper")


class Rows(Sequence[Row]):
    """The rows of an experiment, each a flat record that holds its cell's settings and what was measured there.

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
            if isinstance(value, list | tuple | set | frozenset):
                kept = [row for row in kept if row.get(name) in value]
            else:
                kept = [row for row in kept if row.get(name) == value]
        return Rows(kept)

    def values(self, name: str) -> list[Any]:
        """A column, without the rows that lack it."""
        return [row[name] for row in self._records if row.get(name) is not None]

    def distinct(self, name: str) -> list[Any]:
        """The values of a column, each once, in order of appearance."""
        return list(dict.fromkeys(self.values(name)))

    def paired(self, name: str, by: str = "seed") -> dict[Any, float]:
        """One number for each value of ``by``: the mean of the column over its rows."""
        groups: dict[Any, list[float]] = {}
        for row in self._records:
            if row.get(name) is not None:
                groups.setdefault(row[by], []).append(float(row[name]))
        return {key: sum(found) / len(found) for key, found in groups.items()}

    def frame(self) -> Any:
        """The same as a ``pandas.DataFrame``."""
        from pandas import DataFrame  # type: ignore[import-untyped]

        return DataFrame(self._records)


@dataclass(frozen=True)
class Experiment:
    """A published experiment that can be run again.

    ``paper`` is one of ``papers``, and ``part`` says where in it: sections, tables and figures.
    ``scales`` has a frozen configuration for each of ``SCALES``; ``cells`` makes the grid of one; ``run`` measures a
    cell on a device and returns rows of JSON values; ``claims``, ``tables`` and ``charts`` read the rows of all cells.
    ``run`` of one cell must not depend on another: cells run in any order, on any machine. ``size`` says what the paper
    ran, for comparison with what was run here.
    """

    name: str
    title: str
    paper: str
    part: str
    scales: Mapping[str, Any]
    cells: Callable[[Any], list[Cell]]
    run: Callable[[Cell, str], list[Row]]
    claims: Callable[[Rows], list[Claim]]
    tables: Callable[[Rows], list[Table]]
    charts: Callable[[Rows], list[Chart]]
    assumptions: tuple[str, ...] = ()
    size: str = ""

    def grid(self, scale: str) -> list[Cell]:
        """The cells of a scale; no two are the same."""
        require_choice(scale, "scale", SCALES)
        cells = self.cells(self.scales[scale])
        keys = {key_of(cell) for cell in cells}
        require(len(keys) == len(cells), f"the cells of {self.name}", "differ", f"{len(cells) - len(keys)} repeated")
        return cells


@dataclass(frozen=True)
class Scale:
    """The settings that all experiments which train have at each scale; a configuration adds its own.

    ``training`` and ``held_out`` are numbers of samples of the set ``data``.
    """

    data: str
    training: int
    held_out: int
    epochs: int
    seeds: int
    _: KW_ONLY
    batch: int = 128


def settings_of(config: Any, *varied: str) -> Cell:
    """The fields of a configuration that all its cells share: without those whose members tell cells apart."""
    return {field.name: getattr(config, field.name) for field in fields(config) if field.name not in varied}


def key_of(cell: Cell) -> str:
    """A short name of a cell that depends on its settings alone."""
    text = json.dumps(cell, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def label_of(cell: Cell) -> str:
    """The settings of a cell in words, as --only matches them: "alpha=0.1 seed=3"."""
    return " ".join(f"{name}={value}" for name, value in cell.items())
