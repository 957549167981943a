"""The rows of one experiment on disk, in SQLite: one writer, any number of readers, whole cells or nothing.

Why SQLite and not Parquet: docs/decisions/0008-store.md. Only the process that runs the sweep writes; a cell's rows and
the mark that it is finished go in with one transaction, so that a kill leaves a cell either whole or absent. A cell's
settings are written once; the view ``records`` has them in every row. What a cell was made with is in ``made``, which
stores of early versions lack. Cells that have left the grid stay, at position −1, and are not read.
"""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lambdahat._check import require
from lambdahat.experiments.experiment import Cell, Row, Rows, key_of
from lambdahat.experiments.provenance import versions

SUFFIX = ".sqlite"
TABLES = """
CREATE TABLE IF NOT EXISTS cells (
    key TEXT PRIMARY KEY, position INTEGER NOT NULL, settings TEXT NOT NULL, seconds REAL, finished REAL, error TEXT);
CREATE TABLE IF NOT EXISTS rows (
    key TEXT NOT NULL REFERENCES cells (key), number INTEGER NOT NULL, record TEXT NOT NULL,
    PRIMARY KEY (key, number));
CREATE TABLE IF NOT EXISTS made (key TEXT PRIMARY KEY REFERENCES cells (key), facts TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT NOT NULL)
"""
VIEW = """
DROP VIEW IF EXISTS records;
CREATE VIEW records AS
    SELECT key, number, json_patch(settings, record) AS record FROM rows JOIN cells USING (key)
    WHERE position >= 0 ORDER BY position, number
"""


class Store:
    """The store of one experiment at one scale: ``<folder>/<experiment>-<scale>.sqlite``."""

    def __init__(self, folder: str | Path, experiment: str, scale: str) -> None:
        self.path = Path(folder) / f"{experiment}-{scale}{SUFFIX}"
        self.experiment, self.scale = experiment, scale
        self._command = ""

    def open(self, cells: list[Cell], command: str = "", keep: bool = True) -> None:
        """Make the file, or with ``keep`` go on with one that is there; rows are then those of these cells alone.

        A store that has this grid is left as it is: ``command`` goes in with the first cell that runs.
        """
        self._command = command
        self._make_folder()
        if not keep:
            for tail in ("", "-journal", "-wal", "-shm"):
                self.path.with_name(self.path.name + tail).unlink(missing_ok=True)
        known = [(key_of(cell), index, _text(cell)) for index, cell in enumerate(cells)]
        if self.path.is_file() and self._grid() == [key for key, *_ in known]:
            return
        started = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        here = {"experiment": self.experiment, "scale": self.scale, "command": command, "started": started} | versions()
        with self._writing() as connection:
            for statement in VIEW.split(";"):
                connection.execute(statement)
            connection.execute("UPDATE cells SET position = -1")
            connection.executemany(
                "INSERT INTO cells (key, position, settings) VALUES (?, ?, ?)"
                " ON CONFLICT (key) DO UPDATE SET position = excluded.position",
                known,
            )
            connection.executemany("INSERT OR IGNORE INTO about VALUES (?, ?)", list(here.items()))

    def add(self, cell: Cell, rows: list[Row], seconds: float, made: dict[str, str] | None = None) -> None:
        """A finished cell, its rows, and what they were made with (``provenance.made_with``), where that is known."""
        key = key_of(cell)
        with self._writing() as connection:
            connection.execute("DELETE FROM rows WHERE key = ?", (key,))
            records = [(key, number, _text(row)) for number, row in enumerate(rows)]
            connection.executemany("INSERT INTO rows VALUES (?, ?, ?)", records)
            connection.execute(
                "UPDATE cells SET seconds = ?, finished = ?, error = NULL WHERE key = ?", (seconds, time.time(), key)
            )
            if made:
                connection.execute("INSERT OR REPLACE INTO made VALUES (?, ?)", (key, _text(made)))
            self._leave_command(connection)

    def fail(self, cell: Cell, error: str) -> None:
        """A cell that raised: the next run tries it again."""
        with self._writing() as connection:
            connection.execute("UPDATE cells SET error = ? WHERE key = ?", (error, key_of(cell)))
            self._leave_command(connection)

    def finished(self) -> set[str]:
        """The keys of the cells of the grid whose rows are here."""
        return {key for (key,) in self._read("SELECT key FROM cells WHERE finished IS NOT NULL AND position >= 0")}

    def errors(self) -> list[tuple[Cell, str]]:
        """The cells of the grid that raised when they were last tried."""
        found = self._read(
            "SELECT settings, error FROM cells WHERE error IS NOT NULL AND position >= 0 ORDER BY position"
        )
        return [(json.loads(settings), error) for settings, error in found]

    def seconds(self) -> float:
        """What the finished cells took, together."""
        return float(sum(time for (time,) in self._read("SELECT TOTAL(seconds) FROM cells WHERE position >= 0")))

    def about(self) -> dict[str, str]:
        """Where and with what the rows were made: what each cell says, else what was written when the store was made.

        Where cells differ, each value once, parted by commas.
        """
        told = dict(self._read("SELECT name, value FROM about ORDER BY name"))
        if not self._read("SELECT name FROM sqlite_master WHERE name = 'made'"):
            return told
        found = self._read(
            "SELECT facts FROM cells LEFT JOIN made USING (key)"
            " WHERE finished IS NOT NULL AND position >= 0 ORDER BY position"
        )
        cells = [told if facts is None else json.loads(facts) for (facts,) in found]
        names = {name: None for cell in cells if cell is not told for name in cell}
        return told | {name: ", ".join(dict.fromkeys(cell[name] for cell in cells if name in cell)) for name in names}

    def rows(self, without: Collection[str] = ()) -> Rows:
        """All rows of finished cells with their settings, in the order of the grid, whichever finished first.

        Those of the cells with the keys ``without`` are left out.
        """
        found = self._read(
            "SELECT key, settings, record FROM rows JOIN cells USING (key) WHERE position >= 0 "
            "ORDER BY position, number"
        )
        return Rows(_record(settings) | _record(record) for key, settings, record in found if key not in without)

    def _grid(self) -> list[str]:
        return [key for (key,) in self._read("SELECT key FROM cells WHERE position >= 0 ORDER BY position")]

    def _read(self, query: str) -> list[Any]:
        require(self.path.is_file(), "the store", "exist", f"{self.path} (no such file)", "run the experiment first",
                FileNotFoundError)  # fmt: skip
        if self.path.stat().st_size == 0:  # a sweep is about to write its grid, or was killed before it did
            return []
        with self._connection() as connection:
            return connection.execute(query).fetchall()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction, in a store whose tables are all there."""
        with self._connection() as connection:
            connection.execute("BEGIN IMMEDIATE")
            for statement in TABLES.split(";"):  # executescript would commit
                connection.execute(statement)
            yield connection

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """A connection whose statements are one transaction; errors name the file."""
        try:
            connection = sqlite3.connect(self.path, timeout=60)
            try:
                with connection:
                    yield connection
            finally:
                connection.close()
        except sqlite3.DatabaseError as error:
            if type(error) not in (sqlite3.DatabaseError, sqlite3.OperationalError):
                raise  # no fault of the file
            raise ValueError(
                f"{self.path} must be a whole store that can be opened, got: {error}; "
                "if it is broken, delete it and run the experiment again"
            ) from error

    def _leave_command(self, connection: sqlite3.Connection) -> None:
        """The last command that ran a cell is the one to run again."""
        if self._command:
            connection.execute("INSERT OR REPLACE INTO about VALUES ('command', ?)", (self._command,))

    def _make_folder(self) -> None:
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"the folder of the store must be one that can be made, got {folder} ({error.strerror}); name another"
            ) from error


def stores_in(folder: str | Path) -> list[Store]:
    """The stores in a folder, by name."""
    found = []
    for path in sorted(Path(folder).glob(f"*{SUFFIX}")):
        experiment, _, scale = path.stem.rpartition("-")
        found.append(Store(path.parent, experiment, scale))
    return found


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
