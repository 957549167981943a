"""The rows of one experiment on disk, in SQLite: one writer, any number of readers, whole cells or nothing.

Why SQLite and not Parquet: docs/decisions/0008-store.md. Only the process that runs the sweep writes; a cell's rows and
the mark that it is finished go in with one transaction, so that a kill leaves a cell either whole or absent. A cell's
settings are written once; the view ``records`` has them in every row.
"""

from __future__ import annotations

import json
import math
import platform
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from lambdahat._check import require
from lambdahat.experiments.experiment import Cell, Row, Rows, key_of

SUFFIX = ".sqlite"
TABLES = """
CREATE TABLE IF NOT EXISTS cells (
    key TEXT PRIMARY KEY, position INTEGER NOT NULL, settings TEXT NOT NULL, seconds REAL, finished REAL, error TEXT);
CREATE TABLE IF NOT EXISTS rows (
    key TEXT NOT NULL REFERENCES cells (key), number INTEGER NOT NULL, record TEXT NOT NULL,
    PRIMARY KEY (key, number));
CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE VIEW IF NOT EXISTS records AS
    SELECT key, number, json_patch(settings, record) AS record FROM rows JOIN cells USING (key)
    ORDER BY position, number;
"""


class Store:
    """The store of one experiment at one scale: ``<folder>/<experiment>-<scale>.sqlite``."""

    def __init__(self, folder: str | Path, experiment: str, scale: str) -> None:
        self.path = Path(folder) / f"{experiment}-{scale}{SUFFIX}"
        self.experiment, self.scale = experiment, scale

    def open(self, cells: list[Cell], command: str = "", keep: bool = True) -> None:
        """Make the file, or with ``keep`` go on with one that is there; write down the grid and where it was run."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not keep:
            for path in (self.path, *(self.path.with_name(self.path.name + tail) for tail in ("-wal", "-shm"))):
                path.unlink(missing_ok=True)
        with self._connection() as connection:
            connection.executescript(TABLES)
            known = [(key_of(cell), index, _text(cell)) for index, cell in enumerate(cells)]
            connection.executemany(
                "INSERT INTO cells (key, position, settings) VALUES (?, ?, ?)"
                " ON CONFLICT (key) DO UPDATE SET position = excluded.position",
                known,
            )
            here = {"experiment": self.experiment, "scale": self.scale, "command": command} | versions()
            connection.executemany("INSERT OR REPLACE INTO about VALUES (?, ?)", list(here.items()))

    def add(self, cell: Cell, rows: list[Row], seconds: float) -> None:
        """A finished cell and its rows."""
        key = key_of(cell)
        with self._connection() as connection:
            connection.execute("DELETE FROM rows WHERE key = ?", (key,))
            records = [(key, number, _text(row)) for number, row in enumerate(rows)]
            connection.executemany("INSERT INTO rows VALUES (?, ?, ?)", records)
            connection.execute(
                "UPDATE cells SET seconds = ?, finished = ?, error = NULL WHERE key = ?", (seconds, time.time(), key)
            )

    def fail(self, cell: Cell, error: str) -> None:
        """A cell that raised: the next run tries it again."""
        with self._connection() as connection:
            connection.execute("UPDATE cells SET error = ? WHERE key = ?", (error, key_of(cell)))

    def finished(self) -> set[str]:
        """The keys of the cells whose rows are here."""
        return {key for (key,) in self._read("SELECT key FROM cells WHERE finished IS NOT NULL")}

    def errors(self) -> list[tuple[Cell, str]]:
        """The cells that raised when they were last tried."""
        found = self._read("SELECT settings, error FROM cells WHERE error IS NOT NULL ORDER BY position")
        return [(json.loads(settings), error) for settings, error in found]

    def seconds(self) -> float:
        """What the finished cells took, together."""
        return float(self._read("SELECT TOTAL(seconds) FROM cells")[0][0])

    def about(self) -> dict[str, str]:
        """Where and with what the rows were made."""
        return dict(self._read("SELECT name, value FROM about ORDER BY name"))

    def rows(self) -> Rows:
        """All rows of finished cells with their settings, in the order of the grid, whichever finished first."""
        found = self._read("SELECT settings, record FROM rows JOIN cells USING (key) ORDER BY position, number")
        return Rows(_record(settings) | _record(record) for settings, record in found)

    def _read(self, query: str) -> list[Any]:
        require(self.path.is_file(), "the store", "exist", f"{self.path} (no such file)", "run the experiment first",
                FileNotFoundError)  # fmt: skip
        with self._connection() as connection:
            return connection.execute(query).fetchall()

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """A connection whose statements are one transaction."""
        connection = sqlite3.connect(self.path, timeout=60)
        try:
            with connection:
                yield connection
        finally:
            connection.close()


def stores_in(folder: str | Path) -> list[Store]:
    """The stores in a folder, by name."""
    found = []
    for path in sorted(Path(folder).glob(f"*{SUFFIX}")):
        experiment, _, scale = path.stem.rpartition("-")
        found.append(Store(path.parent, experiment, scale))
    return found


def versions() -> dict[str, str]:
    """What the rows were made with."""
    try:
        own = version("lambdahat")
    except PackageNotFoundError:  # run from its source folder
        own = "not installed"
    return {
        "lambdahat": own,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "started": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def _text(record: dict[str, Any]) -> str:
    """JSON without NaN: SQLite's own JSON functions and other readers refuse it."""
    return json.dumps({name: _plain(value) for name, value in record.items()}, ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    elif hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {"number": str(value)}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return value


def _record(text: str) -> Row:
    return dict(
        json.loads(text, object_hook=lambda found: float(found["number"]) if set(found) == {"number"} else found)
    )
