"""``Run``, the result of training; its rows of numbers in memory and on disk; early stopping."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from torch import Tensor

from lambdahat._core.check import require, require_choice, require_count, require_type
from lambdahat._core.storage import Damaged, make_folder, seal, unseal, write_atomically
from lambdahat.results import Array, Result, Status

Row = dict[str, Any]
LEFT = re.compile(r"[0-9a-f]{32}")  # a digest whose key is damaged


@dataclass(frozen=True)
class Run(Result):
    """A training run: ``history`` has a row for every epoch and for every measurement between
    epochs.

    An epoch's row holds ``epoch`` (from 1), ``step``, ``loss`` and ``accuracy`` over the batches of
    the epoch, ``validation_loss`` and ``validation_accuracy``, ``update_norm`` and
    ``gradient_norm`` (means over batches), ``norm`` ‖θ‖₂, ``max_norm`` ‖θ‖_∞, ``distance`` ‖θ −
    θ₀‖₂, ``learning_rate``, ``seconds`` since the start, and what trackers measured. ``ended`` is
    "epochs", "early stopping" or "diverged"; ``best`` is the best epoch's row.
    """

    history: tuple[Mapping[str, Any], ...]
    ended: str = "epochs"
    best: Mapping[str, Any] = field(default_factory=dict)
    averaged: Mapping[str, Any] = field(default_factory=dict)
    folder: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)
    status: Status = Status.CONVERGED

    @property
    def epochs(self) -> tuple[Mapping[str, Any], ...]:
        """The rows of epochs."""
        return tuple(row for row in self.history if row["kind"] == "epoch")

    @property
    def last(self) -> Mapping[str, Any]:
        """The last epoch's row."""
        require(bool(self.epochs), "the run", "have at least one epoch", "none")
        return self.epochs[-1]

    def column(self, name: str) -> tuple[Array, Array]:
        """One quantity over the run: epochs, fractions between them included, and values."""
        known = dict.fromkeys(key for row in self.history for key in row)
        require_choice(name, "name", list(known))
        rows = [row for row in self.history if is_finite(row.get(name))]
        progress, values = ([row[key] for row in rows] for key in ("progress", name))
        return np.array(progress, float), np.array(values, float)

    def __len__(self) -> int:
        return len(self.epochs)

    def __str__(self) -> str:
        last = self.epochs[-1] if self.epochs else {}
        names = ("loss", "accuracy", "validation_loss", "validation_accuracy")
        known = [f"{name} {last[name]:.4g}" for name in names if is_finite(last.get(name))]
        parts = [f"{len(self)} epochs", *known]
        text = ", ".join(parts) + ("" if self.ended == "epochs" else f" ({self.ended})")
        return text if self.status.ok else f"{text} [{self.status.name}: {self.status.value}]"


@dataclass(frozen=True)
class EarlyStopping:
    """Stop when ``metric`` has not improved by more than ``least`` for ``patience`` epochs.

    Accuracies are to rise and all else to fall. With ``restore`` the model ends at its best epoch,
    not at its last.
    """

    patience: int = 10
    metric: str = "validation_loss"
    least: float = 0.0
    restore: bool = False

    def __post_init__(self) -> None:
        require_count(self.patience, "patience")
        require_type(self.metric, str, "metric", "be the name of a column")
        require(self.least >= 0, "least", "be at least 0", repr(self.least))


@dataclass
class BestSoFar:
    """The best epoch by one metric, and how many epochs ago it was."""

    metric: str
    least: float = 0.0
    row: dict[str, Any] = field(default_factory=dict)
    waited: int = 0

    def look(self, row: Mapping[str, Any]) -> bool:
        """Whether this epoch is the best so far."""
        value = row.get(self.metric)
        if value is None:
            raise ValueError(
                f"the metric of early stopping must be one of {', '.join(row)}, got"
                f" {self.metric!r}; a validation metric needs validation="
            )
        sign = -1.0 if self.metric.endswith("accuracy") else 1.0
        better = is_finite(value)
        if better and self.row:
            better = sign * (self.row[self.metric] - value) > self.least
        self.row, self.waited = (dict(row), 0) if better else (self.row, self.waited + 1)
        return better

    def state_dict(self) -> dict[str, Any]:
        """The best row and the wait."""
        return {"row": self.row, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        self.row, self.waited = dict(state["row"]), state["waited"]


def is_finite(value: Any) -> TypeGuard[float]:
    """Whether an entry of a row is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


@dataclass(eq=False)
class Metrics:
    """Rows in memory and, with a ``folder``, on disk as they come."""

    folder: Path | None = None
    rows: list[Row] = field(default_factory=list)
    _columns: list[str] = field(default_factory=list)

    def add(self, values: Mapping[str, Any]) -> Row:
        """Keep a row of plain values, NaN for what is not finite, and write it."""
        row = {}
        for key, value in values.items():
            plain = value.item() if isinstance(value, Tensor | np.generic) else value
            infinite = isinstance(plain, float) and not math.isfinite(plain)
            row[key] = math.nan if infinite else plain
        self.rows.append(row)
        if self.folder is not None:
            make_folder(self.folder)
            sealed = seal({key: None if value != value else value for key, value in row.items()})
            append_bytes(self._jsonl, (json.dumps(sealed, ensure_ascii=False) + "\n").encode())
            if any(key not in self._columns for key in _scalars(row)):  # a new header
                self._rewrite_csv()
            else:
                append_bytes(self.folder / "metrics.csv", csv_lines(self._columns, [row]))
        return row

    def sync(self) -> int:
        """Wait until all rows are on disk, as a checkpoint requires; return ``length``."""
        if self.length:
            with open(self._jsonl, "rb") as stream:
                try:
                    os.fsync(stream.fileno())
                except OSError as error:
                    raise OSError(error.errno, error.strerror, str(self._jsonl)) from error
        return self.length

    @property
    def length(self) -> int:
        """Bytes of ``metrics.jsonl``."""
        there = self.folder is not None and self._jsonl.is_file()
        return self._jsonl.stat().st_size if there else 0

    def cut(self, length: int) -> None:
        """Keep the first ``length`` bytes and read their rows.

        Damaged rows are left out with a warning that names them: no state depends on a row.
        """
        expected = f"hold at least {length} bytes"
        require(self.length >= length, "metrics.jsonl", expected, f"{self.length} bytes")
        if self.folder is None:
            return
        make_folder(self.folder)
        kept = self._jsonl.read_bytes()[:length] if length else b""
        lines, damaged = parse_rows(kept, self._jsonl)
        if kept and not kept.endswith(b"\n"):
            damaged.append(f"{self._jsonl} is damaged: its last row is not whole")
        self._go_on(lines, damaged)

    def keep_steps(self, upto: int | None = None) -> None:
        """Continue after the rows on disk, up to step ``upto``; damaged rows are dropped."""
        lines, damaged = parse_rows(self._jsonl.read_bytes(), self._jsonl)
        self._go_on([pair for pair in lines if upto is None or pair[1]["step"] <= upto], damaged)

    def _go_on(self, lines: list[tuple[bytes, Row]], damaged: list[str]) -> None:
        if damaged:
            text = f"{'; '.join(damaged)}: these rows are left out"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        write_atomically(self._jsonl, b"".join(line + b"\n" for line, _ in lines))
        self.rows = [row for _, row in lines]
        self._columns = []
        self._rewrite_csv()

    @property
    def _jsonl(self) -> Path:
        assert self.folder is not None
        return self.folder / "metrics.jsonl"

    def _rewrite_csv(self) -> None:
        assert self.folder is not None
        known = [*self._columns, *(key for row in self.rows for key in _scalars(row))]
        self._columns = list(dict.fromkeys(known))
        header = ",".join(self._columns).encode() + b"\n" if self._columns else b""
        write_atomically(self.folder / "metrics.csv", header + csv_lines(self._columns, self.rows))


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a ``metrics.jsonl``; null becomes NaN, and an incomplete last line is skipped.

    Raises:
        Damaged: If a line is not as it was written; the message names the file and the line.
    """
    rows, damaged = parse_rows(Path(path).read_bytes(), Path(path))
    if damaged:
        raise Damaged("; ".join(damaged))
    return [row for _, row in rows]


def parse_rows(blob: bytes, path: Path) -> tuple[list[tuple[bytes, Row]], list[str]]:
    """The whole lines with their rows, and what is wrong with those that are damaged."""
    lines, damaged = [], []
    for number, line in enumerate(blob.split(b"\n")[:-1], start=1):
        place = f"{path}, line {number},"
        try:
            row = unseal(json.loads(line), place, sealed=False)
            if any(isinstance(value, str) and LEFT.fullmatch(value) for value in row.values()):
                raise Damaged(f"{place} is damaged: its digest has no name")
        except Damaged as error:
            damaged.append(str(error))
        except (ValueError, RecursionError) as error:
            damaged.append(f"{place} is damaged: it is not JSON ({error})")
        else:
            pairs = row.items()
            lines.append((line, {key: math.nan if v is None else v for key, v in pairs}))
    return lines, damaged


def _scalars(row: Row) -> list[str]:
    """The columns that fit into a cell: not distributions such as a spectrum."""
    return [key for key, value in row.items() if not isinstance(value, list | tuple)]


def csv_lines(columns: list[str], rows: list[Row]) -> bytes:
    """Rows as lines of CSV; what is missing, or not a number, is empty."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    for row in rows:
        cells = (row.get(column, "") for column in columns)
        writer.writerow(["" if cell != cell else cell for cell in cells])
    return stream.getvalue().encode()


def append_bytes(path: Path, data: bytes) -> None:
    """Append to a file, so that a reader sees whole rows or the beginning of the last."""
    # never through a link to another file
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(path, flags, 0o644), "ab") as stream:
        stream.write(data)
