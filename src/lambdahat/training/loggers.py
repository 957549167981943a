"""Loggers: the rows of a run, sent to CSV, TensorBoard, Weights & Biases or MLflow as they come."""

from __future__ import annotations

import csv
import hashlib
import math
import os
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from lambdahat._core.check import describe, require, require_choice
from lambdahat._core.storage import make_folder, write_atomically
from lambdahat.training.history import append_bytes, csv_lines

BINS = 40  # of a histogram
PROJECT = "lambdahat"  # of Weights & Biases, and experiment of MLflow
PLACE = Path("runs")  # has a folder for every run that has none of its own


@runtime_checkable
class Logger(Protocol):
    """Receives the values of every row with the step they belong to.

    A value is a number, a text such as a status, or a distribution: a list of pairs of a value and
    its weight, such as the spectrum of the Hessian.
    """

    def log(self, step: int, values: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers among the values."""
    kept = {key: value for key, value in values.items() if isinstance(value, int | float)}
    return {key: value for key, value in kept.items() if math.isfinite(value)}


def texts(values: Mapping[str, Any]) -> dict[str, str]:
    """The texts among the values."""
    return {key: value for key, value in values.items() if isinstance(value, str)}


def histograms(values: Mapping[str, Any]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The distributions among the values, each as the mass (n,) and the edges (n + 1,) of bins."""
    bins = {}
    for key, pairs in values.items():
        if isinstance(pairs, list | tuple) and len(pairs):
            places, weights = np.array(pairs, float).T
            bins[key] = np.histogram(places, BINS, weights=weights)
    return bins


LOGGERS: dict[str, type[Any]] = {}
"""The registered loggers by name."""


def register_logger(name: str) -> Callable[[type[Any]], type[Any]]:
    """Register a class whose constructor takes the run's folder, its step and its settings."""

    def add(kind: type[Any]) -> type[Any]:
        LOGGERS[name] = kind
        return kind

    return add


@register_logger("csv")
class CSVLogger:
    """Write the numbers and texts of every row to ``folder/log.csv``.

    The rows up to ``step`` of a file that is there are kept. A column that is new is added to the
    rows before, as an empty one.
    """

    def __init__(
        self, folder: str | Path, step: int = 0, about: Mapping[str, Any] | None = None
    ) -> None:
        del about  # the file has rows alone
        self.path, self._columns = Path(folder) / "log.csv", ["step"]
        make_folder(self.path.parent)
        kept = [row for row in self._read() if int(row["step"]) <= step] if step else []
        self._columns = list(kept[0]) if kept else self._columns
        self._rewrite(kept)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Append a row."""
        row = {"step": step, **texts(values), **numbers(values)}
        new = [key for key in row if key not in self._columns]
        if new:
            self._columns += new
            self._rewrite(self._read())
        append_bytes(self.path, csv_lines(self._columns, [row]))

    def close(self) -> None:
        """Nothing is left open between rows."""

    def _read(self) -> list[dict[str, Any]]:
        if not self.path.is_file():
            return []
        with open(self.path, newline="", encoding="utf-8") as stream:
            return list(csv.DictReader(stream))

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        header = csv_lines(self._columns, [dict(zip(self._columns, self._columns, strict=True))])
        write_atomically(self.path, header + csv_lines(self._columns, rows))


@register_logger("tensorboard")
class TensorBoardLogger:
    """Write scalars, statuses as text and spectra as histograms to ``folder/tensorboard``.

    What an earlier run logged there after ``step`` is marked as obsolete.
    """

    package: ClassVar[str] = "tensorboard"

    def __init__(
        self, folder: str | Path, step: int = 0, about: Mapping[str, Any] | None = None
    ) -> None:
        require_package("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        del about  # hyperparameters would be a session of their own
        place = str(Path(folder) / "tensorboard")
        self._writer = SummaryWriter(place, purge_step=step + 1 if step else None, flush_secs=5)
        self._told: dict[str, str] = {}

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Write the row's values; a text only where it differs from the one before."""
        for name, value in numbers(values).items():
            self._writer.add_scalar(name, value, step)
        for name, text in texts(values).items():
            if self._told.get(name) != text:
                self._writer.add_text(name, text, step)
            self._told[name] = text
        for name, (mass, edges) in histograms(values).items():
            centres = (edges[1:] + edges[:-1]) / 2
            moments = float(mass @ centres), float(mass @ centres**2)
            bounds = float(edges[0]), float(edges[-1])
            figures = (*bounds, int(mass.sum() + 0.5), *moments)
            self._writer.add_histogram_raw(name, *figures, edges[1:].tolist(), mass.tolist(), step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


@register_logger("wandb")
class WandBLogger:
    """Log to Weights & Biases: offline in ``folder/wandb``, unless ``WANDB_MODE`` says otherwise.

    The folder decides the run that is resumed.
    """

    package: ClassVar[str] = "wandb"

    def __init__(
        self, folder: str | Path, step: int = 0, about: Mapping[str, Any] | None = None
    ) -> None:
        require_package("wandb")
        import wandb

        mode: Any = os.environ.get("WANDB_MODE") or "offline"
        place = Path(folder)
        make_folder(place)
        self._histogram = wandb.Histogram
        self._run = wandb.init(
            project=PROJECT,
            mode=mode,
            dir=str(place),
            name=place.resolve().name,
            id=_mark(place),
            resume="allow",
            config=dict(about or {}),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Log the row's values."""
        bins = histograms(values)
        spectra = {name: self._histogram(np_histogram=bins[name]) for name in bins}
        self._run.log({**numbers(values), **texts(values), **spectra}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


@register_logger("mlflow")
class MLflowLogger:
    """Log to MLflow: to ``folder/mlflow.db``, or where ``MLFLOW_TRACKING_URI`` says.

    Scalars are metrics, statuses are tags that hold the last one. MLflow has no histograms, so
    spectra are left out. The folder decides the run that is resumed.
    """

    package: ClassVar[str] = "mlflow"

    def __init__(
        self, folder: str | Path, step: int = 0, about: Mapping[str, Any] | None = None
    ) -> None:
        require_package("mlflow")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param, RunTag

        self._metric, self._tag = Metric, RunTag
        place = Path(folder).resolve()
        make_folder(place)
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{place / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=uri)
        known = self._client.get_experiment_by_name(PROJECT)
        number = known.experiment_id if known else self._client.create_experiment(PROJECT)
        tags = {"lambdahat.folder": _mark(place)}
        asked = f"tags.`lambdahat.folder` = '{_mark(place)}'"
        earlier = self._client.search_runs([number], asked) if step else []
        if earlier:
            self._id = earlier[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._client.create_run(number, tags=tags, run_name=place.name).info.run_id
            params = [Param(_key(name), str(value)[:500]) for name, value in (about or {}).items()]
            self._client.log_batch(self._id, params=params)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Log the row's numbers and statuses."""
        now = int(1000 * time.time())
        scalars = numbers(values).items()
        metrics = [self._metric(_key(name), value, now, step) for name, value in scalars]
        tags = [self._tag(_key(name), text) for name, text in texts(values).items()]
        self._client.log_batch(self._id, metrics=metrics, tags=tags)

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)


def _mark(folder: Path) -> str:
    """A name for the run of a folder, the same when the run is resumed."""
    return hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]


def _key(name: str) -> str:
    """A name with the characters that MLflow takes."""
    return re.sub(r"[^\w\-./ ]", "-", name)


def require_package(name: str) -> None:
    """Raise unless the package of a logger is installed; the error says how to install it."""
    cure = f'pip install "lambdahat[{name}]"'
    there = find_spec(name) is not None
    require(there, "loggers", f"have {name} installed", "no such package", cure)


def require_loggers(asked: Any) -> None:
    """Raise unless every logger is a known name whose package is there, or has ``log`` and
    ``close``.
    """
    listed = isinstance(asked, Sequence) and not isinstance(asked, str)
    require(listed, "loggers", "be a list", describe(asked), 'such as ["csv"]', TypeError)
    for each in asked:
        if isinstance(each, str):
            package = getattr(LOGGERS[require_choice(each, "loggers", LOGGERS)], "package", None)
            if package is not None:
                require_package(package)
        else:
            has = f"be among {', '.join(LOGGERS)}, or have log(step, values) and close()"
            require(isinstance(each, Logger), "loggers", has, each, error=TypeError)


class Loggers:
    """The loggers of one run, by name or as given; made with ``open``, when the run begins.

    A logger that fails is dropped with a warning: a full disk elsewhere does not end a training.
    """

    def __init__(self, asked: Sequence[Any]) -> None:
        require_loggers(asked)
        self._asked = asked
        self._open: list[Any] = []

    def open(self, folder: Path | None, step: int, about: Mapping[str, Any]) -> None:
        """Make those that are named, to go on after ``step`` in the run's folder."""
        named = any(isinstance(each, str) for each in self._asked)
        place = _new_place() if folder is None and named else folder
        for each in self._asked:
            self._open.append(LOGGERS[each](place, step, about) if isinstance(each, str) else each)

    def log(self, row: Mapping[str, Any]) -> None:
        """Send a row to all."""
        values = {key: value for key, value in row.items() if key not in ("step", "kind")}
        for logger in list(self._open):
            try:
                logger.log(int(row["step"]), values)
            except Exception as error:
                self._open.remove(logger)
                _warn(logger, f"gets no more rows: it failed at step {row['step']}", error)

    def close(self) -> None:
        """Close all."""
        while self._open:
            logger = self._open.pop()
            try:
                logger.close()
            except Exception as error:
                _warn(logger, "could not be closed", error)


def _warn(logger: Any, what: str, error: Exception) -> None:
    text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    words = f"the logger {type(logger).__name__} {what} ({text})"
    warnings.warn(words, RuntimeWarning, stacklevel=3)


def _new_place() -> Path:
    """A folder of its own for a run without one."""
    base = place = PLACE / time.strftime("%Y-%m-%d-%H%M%S")
    number = 1
    while place.exists():
        number += 1
        place = base.with_name(f"{base.name}-{number}")
    return place
