"""The rows of one experiment on disk, in SQLite: one writer, any number of readers, whole cells or
nothing.

Why SQLite and not Parquet: docs/decisions/0008-store.md. Only the process that runs the sweep
writes; a cell's rows and the mark that it is finished go in with one transaction, so that a kill
leaves a cell either whole or absent. A cell's settings are written once; the view ``records`` has
them in every row. What a cell was made with is in ``made``, which stores of early versions lack.
Cells that have left the grid stay, at position −1, and are not read.

The table ``digests`` has a digest of each cell with its rows, of the grid and of what is said about
it; stores of early versions lack it, or lack those of early cells. A store that differs from what
was written is refused by name when it is read; a sweep drops the cells that are damaged, says so,
and runs them again.
"""

from __future__ import annotations

import json
import math
import platform
import sqlite3
import subprocess
import sys
import time
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from lambdahat._core.storage import Damaged, digest
from lambdahat.data.catalogue import data_digest, note_data
from lambdahat.data.sources import file_digest, roots
from lambdahat.experiments.kit.cells import Cell, Row, Rows, key_of

SUFFIX = ".sqlite"
TABLES = """
CREATE TABLE IF NOT EXISTS cells (
    key TEXT PRIMARY KEY, position INTEGER NOT NULL, settings TEXT NOT NULL,
    seconds REAL, finished REAL, error TEXT);
CREATE TABLE IF NOT EXISTS rows (
    key TEXT NOT NULL REFERENCES cells (key), number INTEGER NOT NULL, record TEXT NOT NULL,
    PRIMARY KEY (key, number));
CREATE TABLE IF NOT EXISTS made (key TEXT PRIMARY KEY REFERENCES cells (key), facts TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS digests (name TEXT PRIMARY KEY, digest TEXT NOT NULL) WITHOUT ROWID
"""
GRID, ABOUT = "grid", "about"  # names in ``digests`` beside the keys of cells
CONTENTS = {  # what the digests are of; every value is part of them, with its type
    GRID: "SELECT key, position FROM cells WHERE position >= 0 ORDER BY position",
    ABOUT: "SELECT name, value FROM about ORDER BY name",
}
CELLS = "SELECT key, settings, seconds, finished, error FROM cells"
ROWS = "SELECT key, number, record FROM rows"
MADE = "SELECT key, facts FROM made"
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
        self._checked: tuple[int, ...] = ()  # the state of the file that was last found undamaged

    def open(self, cells: list[Cell], command: str = "", keep: bool = True) -> None:
        """Create the store, or with ``keep`` continue an existing one; rows are then those of these
        cells only.

        A store that has this grid is left as it is: ``command`` goes in with the first cell that
        runs. Cells that are damaged are taken out, with a warning that names them, so that they run
        again.
        """
        self._command = command
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"the folder of the store must be one that can be made, got {folder}"
                f" ({error.strerror}); name another"
            ) from error
        if not keep:
            for tail in ("", "-journal", "-wal", "-shm"):
                self.path.with_name(self.path.name + tail).unlink(missing_ok=True)
        known = [(key_of(cell), index, _text(cell)) for index, cell in enumerate(cells)]
        damaged, grid = self._examine(CONTENTS[GRID]) if self.path.is_file() else ([], [])
        if damaged:
            text = f"{self._damage(damaged)}; damaged cells run again"
            warnings.warn(text, RuntimeWarning, stacklevel=3)
        elif [key for key, _ in grid] == [key for key, *_ in known]:
            return
        started = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        here = {"experiment": self.experiment, "scale": self.scale}
        here |= {"command": command, "started": started, **versions()}
        with self._connection(write=True) as connection:
            for statement in VIEW.split(";"):
                connection.execute(statement)
            places = {"rows": "key", "made": "key", "cells": "key", "digests": "name"}
            for table, name in places.items():
                delete = f"DELETE FROM {table} WHERE {name} = ?"
                connection.executemany(delete, [(part,) for part in damaged])
            connection.execute("UPDATE cells SET position = -1")
            connection.executemany(
                "INSERT INTO cells (key, position, settings) VALUES (?, ?, ?)"
                " ON CONFLICT (key) DO UPDATE SET position = excluded.position",
                known,
            )
            if ABOUT in damaged:
                connection.execute("DELETE FROM about")
            connection.executemany("INSERT OR IGNORE INTO about VALUES (?, ?)", list(here.items()))
            sealed = {name for (name,) in connection.execute("SELECT name FROM digests")}
            new = [key for key, *_ in known if key not in sealed]
            finished = connection.execute("SELECT key FROM cells WHERE finished IS NOT NULL")
            early = {key for (key,) in finished}
            self._seal(connection, *(key for key in new if key not in early), GRID, ABOUT)

    def add(
        self, cell: Cell, rows: list[Row], seconds: float, made: dict[str, str] | None = None
    ) -> None:
        """Add a finished cell, its rows, and what they were computed with (``made_with``), if
        known.
        """
        key = key_of(cell)
        with self._connection(write=True) as connection:
            connection.execute("DELETE FROM rows WHERE key = ?", (key,))
            records = [(key, number, _text(row)) for number, row in enumerate(rows)]
            connection.executemany("INSERT INTO rows VALUES (?, ?, ?)", records)
            connection.execute(
                "UPDATE cells SET seconds = ?, finished = ?, error = NULL WHERE key = ?",
                (seconds, time.time(), key),
            )
            if made:
                connection.execute("INSERT OR REPLACE INTO made VALUES (?, ?)", (key, _text(made)))
            self._seal(connection, key, ABOUT, command=self._command)

    def fail(self, cell: Cell, error: str) -> None:
        """Record a cell that raised; the next run tries it again."""
        with self._connection(write=True) as connection:
            connection.execute("UPDATE cells SET error = ? WHERE key = ?", (error, key_of(cell)))
            self._seal(connection, key_of(cell), ABOUT, command=self._command)

    def finished(self) -> set[str]:
        """The keys of the cells of the grid whose rows are here."""
        return {key for key, _ in self.times()}

    def errors(self) -> list[tuple[Cell, str]]:
        """The cells of the grid that raised when they were last tried."""
        query = "SELECT settings, error FROM cells WHERE error IS NOT NULL AND position >= 0"
        failed = self._read(f"{query} ORDER BY position")
        return [(self._parse(settings), error) for settings, error in failed]

    def seconds(self) -> float:
        """The total time of the finished cells."""
        totals = self._read("SELECT TOTAL(seconds) FROM cells WHERE position >= 0")
        return float(sum(seconds for (seconds,) in totals))

    def times(self) -> list[tuple[str, float]]:
        """The key of each finished cell of the grid, and the seconds that it took."""
        query = "SELECT key, seconds FROM cells"
        return self._read(f"{query} WHERE finished IS NOT NULL AND position >= 0")

    def peek(self) -> list[tuple[Cell, float | None, float | None, str | None]]:
        """The settings of every cell of the grid, its seconds, when it finished, and its error.

        For watching a running sweep: digests are not checked, since that takes long.
        """
        if self.path.stat().st_size == 0:  # its grid is about to be written
            return []
        with self._connection() as connection:
            query = "SELECT settings, seconds, finished, error FROM cells WHERE position >= 0"
            cells = connection.execute(f"{query} ORDER BY position").fetchall()
        return [(self._parse(settings), *rest) for settings, *rest in cells]

    def about(self) -> dict[str, str]:
        """Where and with what the rows were computed: what each cell says, otherwise what was
        written when the store was created. Where cells differ, each value once, separated by
        commas.
        """
        whole = dict(self._read(CONTENTS[ABOUT]))
        cells = [whole if facts is None else self._parse(facts) for _, facts in self._made_cells()]
        names = {name: None for cell in cells if cell is not whole for name in cell}
        return whole | {
            name: ", ".join(dict.fromkeys(cell[name] for cell in cells if name in cell))
            for name in names
        }

    def made(self) -> list[tuple[Cell, dict[str, str]]]:
        """The finished cells of the grid that state what they were computed with, and that."""
        known = [pair for pair in self._made_cells() if pair[1] is not None]
        return [(self._parse(settings), self._parse(facts)) for settings, facts in known]

    def _made_cells(self) -> list[tuple[str, str | None]]:
        """Settings and facts of the finished cells, as JSON; early stores have no facts."""
        if not self._read("SELECT name FROM sqlite_master WHERE name = 'made'"):
            return []
        return self._read(
            "SELECT settings, facts FROM cells LEFT JOIN made USING (key)"
            " WHERE finished IS NOT NULL AND position >= 0 ORDER BY position"
        )

    def rows(self, without: Collection[str] = ()) -> Rows:
        """The rows of finished cells with their settings, in the grid's order, ``without`` some."""
        records = self._read(
            "SELECT key, settings, record FROM rows JOIN cells USING (key) WHERE position >= 0 "
            "ORDER BY position, number"
        )
        kept = ((settings, record) for key, settings, record in records if key not in without)
        return Rows(self._parse(settings) | self._parse(record) for settings, record in kept)

    def _read(self, query: str) -> list[Any]:
        if not self.path.is_file():
            raise FileNotFoundError(
                f"the store must exist, got {self.path} (no such file); run the experiment first"
            )
        damaged, answer = self._examine(query)
        if damaged:
            raise Damaged(
                f"{self._damage(damaged)}; `lambdahat reproduce {self.experiment} --scale"
                f" {self.scale}` runs damaged cells again; or put back a copy of the file"
            )
        return answer

    def _examine(self, query: str) -> tuple[list[str], list[Any]]:
        """The names of the digests that do not match: keys of cells, "grid", "about"; and, if there
        are none, what a query finds. A file that has not changed is not checked twice.
        """
        file = self.path.stat()
        state = file.st_ino, file.st_size, file.st_mtime_ns
        if file.st_size == 0:  # a sweep is about to write its grid, or was killed then
            return [], []
        with self._connection() as connection:
            connection.execute("BEGIN")  # the check and the query see one state of the file
            if state != self._checked:
                (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
                if verdict != "ok":
                    raise sqlite3.DatabaseError(" ".join(str(verdict).split()))
                tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
                digests = "SELECT name, digest FROM digests"
                sealed = dict(connection.execute(digests)) if "digests" in tables else {}
                now = _digests(connection, list(sealed))
                damaged = [str(name) for name in sealed if sealed[name] != now.get(name)]
                if damaged:
                    return damaged, []
                self._checked = state
            return [], connection.execute(query).fetchall()

    def _damage(self, parts: list[str]) -> str:
        named = [f"the {part}" if part in CONTENTS else f"cell {part}" for part in parts[:5]]
        more = f" and {len(parts) - 5} more" if len(parts) > 5 else ""
        listed = ", ".join(named) + more
        return f"{self.path} is damaged in {listed}: what it says does not match its digests"

    def _seal(self, connection: sqlite3.Connection, *names: str, command: str = "") -> None:
        """Write the digests of cells, of the grid or of what is said about it, as they are now.

        The last ``command`` that ran a cell is the one to run again.
        """
        if command:
            connection.execute("INSERT OR REPLACE INTO about VALUES ('command', ?)", (command,))
        digests = _digests(connection, list(names))
        connection.executemany("INSERT OR REPLACE INTO digests VALUES (?, ?)", [*digests.items()])

    def _parse(self, text: Any) -> Row:
        """A JSON object of the store."""
        try:
            return read_record(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise Damaged(f"{self.path} is damaged: an entry is not JSON ({error})") from error

    @contextmanager
    def _connection(self, write: bool = False) -> Iterator[sqlite3.Connection]:
        """A connection whose statements are one transaction; errors name the file.

        To ``write``, it locks the store and makes the tables that it lacks.
        """
        try:
            connection = sqlite3.connect(self.path, timeout=60)
            try:
                with connection:
                    if write:
                        connection.execute("BEGIN IMMEDIATE")
                        for statement in TABLES.split(";"):  # executescript would commit
                            connection.execute(statement)
                    yield connection
            finally:
                connection.close()
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            own = sqlite3.DatabaseError, sqlite3.OperationalError, UnicodeDecodeError
            if type(error) not in own:
                raise  # no fault of the file
            raise Damaged(
                f"{self.path} must be a whole store that can be opened, got: {error}; "
                "if it is broken, delete it and run the experiment again"
            ) from error


def stores_in(folder: str | Path) -> list[Store]:
    """The stores in a folder, by name."""
    paths = sorted(Path(folder).glob(f"*-*{SUFFIX}"))
    return [Store(path.parent, *path.stem.rpartition("-")[::2]) for path in paths]


def _text(record: dict[str, Any]) -> str:
    """JSON without NaN: SQLite's own JSON functions and other readers refuse it."""
    return json.dumps(_plain(record), ensure_ascii=False, allow_nan=False)


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


def read_record(text: str) -> Row:
    """A row from its JSON, in which numbers that JSON lacks are objects of their own."""

    def number(entry: Row) -> Any:
        return float(entry["number"]) if set(entry) == {"number"} else entry

    return dict(json.loads(text, object_hook=number))


def _digests(connection: sqlite3.Connection, names: list[str]) -> dict[str, str]:
    """The digests of the cells, grid and facts with these names, as they are in the store."""
    parts = {
        name: connection.execute(CONTENTS[name]).fetchall() for name in names if name in CONTENTS
    }
    keys = [name for name in names if name not in CONTENTS]
    few = len(keys) == 1  # as when a cell is added: then not all of the store is read
    cells: dict[str, list[Any]] = {}
    for query in (CELLS, MADE, ROWS) if keys else ():
        chosen = f"{query} WHERE key = ?" if few else query
        order = " ORDER BY key, number" if query is ROWS else ""
        for key, *values in connection.execute(chosen + order, keys if few else ()):
            if query is CELLS:
                cells[key] = [values]
            elif key in cells:
                cells[key].append(values)
    parts |= {key: cells[key] for key in keys if key in cells}
    return {name: digest(repr((name, part)).encode())[:32] for name, part in parts.items()}


DATA = "data digests"  # the fact that has those of all data that a cell has loaded


def made_with(device: str, data: Mapping[str, str] | None = None) -> dict[str, str]:
    """The facts of this process for a cell on ``device`` that are known; no path is among them.

    ``data`` has the digests of what the cell has loaded (``noting_data``).
    """
    facts = versions() | {"processor": _processor(), "threads": str(torch.get_num_threads())}
    facts["gpu"] = torch.cuda.get_device_name(device) if device.startswith("cuda") else ""
    facts["commit"] = _commit()
    facts[DATA] = ", ".join(f"{name} {digest}" for name, digest in (data or {}).items())
    return {name: text for name, text in facts.items() if text}


def data_of(cell: Cell, made: Mapping[str, str]) -> dict[tuple[str, str | None], str]:
    """The digests of a cell's data, by their name and the folder that the cell names; none for
    cells of early versions.
    """
    parts = [part.rpartition(" ") for part in made.get(DATA, "").split(", ") if part]
    return {(name, cell.get("folder") or None): digest for name, _, digest in parts}


def changed_data(cell: Cell, made: Mapping[str, str]) -> list[str]:
    """The data of a cell that have changed, as "name (was …, is …)"; absent data are left out."""
    changed = []
    for (name, own), before in data_of(cell, made).items():
        folder, _, stem = name.rpartition("/")
        with suppress(FileNotFoundError):
            now = outside_digest(folder, stem) if folder else data_digest(name, own)
            if now not in (None, ABSENT, before):
                changed.append(f"{name} (was {before[:12]}, is {now[:12]})")
    return changed


@cache
def versions() -> dict[str, str]:
    """The versions of this package, torch and Python, and the machine type."""
    own = sys.modules["lambdahat"].__version__  # importing the package here would be a circle
    return {
        "lambdahat": own,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


@cache
def _processor() -> str:
    """The model's name; ``platform`` does not know it on Linux."""
    listed = Path("/proc/cpuinfo")
    text = listed.read_text(encoding="utf-8", errors="replace") if listed.is_file() else ""
    lines = [line for line in text.splitlines() if line.startswith("model name")]
    return lines[0].partition(":")[2].strip() if lines else platform.processor()


@cache
def _commit() -> str:
    """The commit of this file's checkout, "-dirty" where tracked files differ; "" without one."""
    own = Path(__file__).resolve()
    # this file may be installed inside some other project's checkout
    tracked = ["git", "ls-files", "--error-unmatch", own.name]
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    run = partial(subprocess.run, cwd=own.parent, capture_output=True, timeout=30, check=True)
    try:
        run(tracked)
        return str(run(describe, text=True).stdout).strip()
    except (OSError, subprocess.SubprocessError):
        return ""


# in place of the digest of a file that was not there, so that something else was measured
ABSENT = "absent"


def outside_file(folder: str, stem: str) -> Path | None:
    """``<stem>.*`` in ``folder`` below LAMBDAHAT_DATA or the user's own cache, if there is one."""
    note_data(f"{folder}/{stem}", lambda: outside_digest(folder, stem))
    return _find(folder, stem)


def outside_digest(folder: str, stem: str) -> str:
    """A digest of the file as it is now."""
    path = _find(folder, stem)
    return ABSENT if path is None else file_digest(path)[:32]


def _find(folder: str, stem: str) -> Path | None:
    paths = (path for root in roots() for path in sorted((root / folder).glob(f"{stem}.*")))
    return next(paths, None)
