"""The live view: training runs, sweeps and measurements of a folder, drawn in a browser as they
grow.

The server reads what runs write anyway, and only what is new: the rows of ``metrics.jsonl``, the
store of a sweep, the results of a measurement, and ``progress.json``. The page asks once a second
and gets what has changed since it last asked, as figures of ``plotly_charts``.
"""

from __future__ import annotations

import gzip
import hmac
import ipaddress
import json
import math
import os
import secrets
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import takewhile
from operator import itemgetter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lambdahat._core.check import require, require_count, why_not
from lambdahat._core.progress import host_mark
from lambdahat.experiments.kit.cells import label_of
from lambdahat.experiments.kit.experiment import findings
from lambdahat.experiments.kit.store import SUFFIX, Store
from lambdahat.experiments.kit.sweeps import PROGRESS
from lambdahat.report import figures  # noqa: F401  (registers the charts)
from lambdahat.report.plotly_charts import describe_chart, figure_of
from lambdahat.report.sections import experiment_of
from lambdahat.report.style import minus
from lambdahat.results import Result, Status
from lambdahat.results.charts import Chart, Series, charts_of, count_text, label_text
from lambdahat.results.measurement import Measurement
from lambdahat.training.history import Run, is_finite, parse_rows
from lambdahat.training.trackers import is_failure

ROWS = 600  # of one kind that are drawn: of more, every second, fourth, …
DEPTH = 5  # folders below the one that is watched
SCAN = 1.0  # seconds between looks for new runs
FRESH = 0.2  # seconds for which an answer is good
SHARE = 0.2  # of the time that may go into the charts of a sweep
PATIENCE = 0.3  # seconds that an answer waits for them
KEPT = 6  # earlier states of a run, from which changes are told
SKIPPED = {"checkpoints", "measurements", "tensorboard", "wandb", "mlruns"}
LISTS = ("x", "y", "customdata", "text", "hovertext")  # parts of a trace that grow
LABELS = {  # of columns of trackers
    "edge": "rate × sharpness",
    "top_1": "largest eigenvalue",
    "spectrum_largest": "upper end of spectrum",
    "trace": "trace",
    "llc": "λ̂",
}
# titles of the charts of a run that come before others
FIRST: tuple[str, ...] = ("Loss", "Accuracy", "Learning coefficient", "Learning rate ×")
FIRST += ("Largest eigenvalues", "Spectrum over time")
Payload = dict[str, Any]


class ThinnedRows:
    """Rows of one kind, of which every 1st, 2nd, 4th, … is kept, and the last."""

    def __init__(self) -> None:
        self._kept: list[tuple[int, Any]] = []
        self._last: tuple[int, Any] | None = None
        self._stride, self._count = 1, 0

    def add(self, number: int, row: Any) -> None:
        """Add a row, of which ``number`` is the place among all."""
        if self._count % self._stride == 0:
            self._kept.append((number, row))
        self._last, self._count = (number, row), self._count + 1
        if len(self._kept) > ROWS:
            self._kept, self._stride = self._kept[::2], 2 * self._stride

    def rows(self) -> list[tuple[int, Any]]:
        """The rows that are kept with their places."""
        ends = [] if self._last is None or self._kept[-1] == self._last else [self._last]
        return [*self._kept, *ends]


class LiveSource(ABC):
    """Something that grows on disk: ``look`` reads what is new, ``charts`` and ``facts`` show it.

    A fact is a label, a value, a status and its remedy, the last two often empty.
    """

    kind: str

    def __init__(self, name: str, path: Path, progress: Path) -> None:
        self.name, self.path, self._progress_path = name, path, progress
        self.version, self._drawn, self.updated = 0, 0, 0.0
        self._faults: dict[str, str] = {}  # what is wrong with the file, and with its charts
        self._facts: list[dict[str, str]] = []  # of the version that was last looked at
        self._states: dict[int, Payload] = {}
        self._progress: dict[str, Any] = {}
        self._progress_read = 0

    @abstractmethod
    def look(self) -> bool:
        """Read what is new; whether anything is."""

    @abstractmethod
    def charts(self) -> list[tuple[str, Chart]]:
        """What is drawn, each with a name of its own."""

    @abstractmethod
    def facts(self) -> list[dict[str, str]]:
        """Numbers and statuses."""

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """Whether the results say that nothing is left to do."""

    def refresh(self) -> None:
        """Read what is new; what goes wrong is shown in its place."""
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            stamp = self._progress_path.stat().st_mtime_ns
            if stamp != self._progress_read:
                progress = json.loads(self._progress_path.read_text(encoding="utf-8"))
                tasks = progress["tasks"].values()
                if float(progress["updated"]) and all(len(task) == 5 for task in tasks):
                    self._progress, self._progress_read = progress, stamp
        with self._noting("file"):
            if self.look() or not self.version:
                self.version += 1

    def view(self, since: int) -> tuple[list[dict[str, str]], Payload | None]:
        """The facts, and the charts as they differ from an earlier version; None if they do not.

        Charts are made when they are asked for: of a hundred runs a page shows a few.
        """
        if self.version and self.version != self._drawn:
            self._drawn = self.version
            with self._noting("charts"):
                self._states[self.version] = {
                    key: {
                        "title": chart.title,
                        "caption": " ".join(filter(None, (chart.warning, chart.below))),
                        "words": describe_chart(chart),
                        "figure": figure_of(chart),
                    }
                    for key, chart in self.charts()
                }
                self._facts = self.facts()
            while len(self._states) > KEPT:
                del self._states[next(iter(self._states))]
        if since == self.version or self.version not in self._states:
            return self._facts, None
        new, old = self._states[self.version], self._states.get(since, {})
        changed = {key: _chart_update(old.get(key), chart) for key, chart in new.items()}
        charts = {key: chart for key, chart in changed.items() if chart}
        return self._facts, {"version": self.version, "order": list(new), "charts": charts}

    @contextmanager
    def _noting(self, part: str) -> Iterator[None]:
        """Note an error inside: of a file that is damaged, or gone since."""
        try:
            yield
            self._faults[part] = ""
        except Exception as error:
            self._faults[part] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"

    def summary(self) -> dict[str, Any]:
        """Name, faults, and how far it is: its state, the tasks under way, units done and in all,
        seconds left.
        """
        progress, tasks, updated = self._progress, [], float(self._progress.get("updated", 0.0))
        age = time.time() - max(updated, self.updated)
        for name, (start, first, done, total, note) in progress.get("tasks", {}).items():
            left = None
            if total and done > first:
                left = max((updated - start) * (total - done) / (done - first) - age, 0.0)
            task = {"task": name, "done": done, "total": total, "note": note, "left": left}
            tasks.append(task)
        state = "finished" if self.is_complete else ""
        if progress:
            ended = str(progress.get("ended", ""))
            gone = progress.get("host") == host_mark() and not _is_alive(progress.get("pid"))
            running = "stopped" if gone else "running"
            state = {"": running, "KeyboardInterrupt": "interrupted"}.get(ended, ended)
            if state not in ("running", "stopped", "finished", "interrupted"):
                state = f"failed: {state}"
        return {
            "name": self.name,
            "kind": self.kind,
            "version": self.version,
            "fault": " ".join(self._faults.values()).strip(),
            "state": state,
            "tasks": tasks if state in ("running", "") else [],
            "age": age,
        }


def _is_alive(pid: Any) -> bool:
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (OSError, TypeError, ValueError):  # another user's, which is alive
        return True
    return True


def _chart_update(old: Payload | None, new: Payload) -> Payload | None:
    """A chart as the page needs it that has ``old``: whole, or the points that are new."""
    if old is None:
        return new
    if old == new:
        return None
    before, now = old["figure"]["data"], new["figure"]["data"]
    pairs = zip([*before, *[{}] * len(now)], now, strict=False)
    traces = [_trace_update(*pair) for pair in pairs]
    return {**new, "figure": {"data": traces, "layout": new["figure"]["layout"]}}


def _trace_update(old: Mapping[str, Any], new: Mapping[str, Any]) -> Payload:
    """A trace whole, or, if it begins like the old one, the points ``from`` which they differ."""
    lists = [key for key in LISTS if isinstance(new.get(key), list)]
    rest, before = ({k: v for k, v in one.items() if k not in lists} for one in (new, old))
    if rest != before or any(not isinstance(old.get(key), list) for key in lists):
        return dict(new)
    pairs = [zip(old[key], new[key], strict=False) for key in lists]
    alike = [sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], each)) for each in pairs]
    start = min(alike, default=0)
    return {"from": start, "grow": {key: new[key][start:] for key in lists}}


class RunSource(LiveSource):
    """A training run: the rows of its ``metrics.jsonl``."""

    kind = "training run"

    def __init__(self, name: str, path: Path) -> None:
        super().__init__(name, path, path.with_name("progress.json"))
        self._start()

    def _start(self) -> None:
        self._offset, self._inode, self._count = 0, 0, 0
        self._groups: dict[frozenset[str], ThinnedRows] = {}
        self._last: dict[str, Any] = {}

    def look(self) -> bool:
        file = self.path.stat()
        self.updated = file.st_mtime
        if file.st_ino != self._inode or file.st_size < self._offset:  # resumed, or begun anew
            self._start()
            self._inode = file.st_ino
        if file.st_size == self._offset:
            return False
        with open(self.path, "rb") as stream:
            stream.seek(self._offset)
            blob = stream.read(file.st_size - self._offset)
        whole = blob[: blob.rfind(b"\n") + 1]  # the last row may be half written
        self._offset += len(whole)
        rows = [row for _, row in parse_rows(whole, self.path)[0]]
        for row in rows:
            if isinstance(row.get("progress"), int | float):
                self._groups.setdefault(frozenset(row), ThinnedRows()).add(self._count, row)
                self._last |= row
                self._count += 1
        return bool(rows)

    def charts(self) -> list[tuple[str, Chart]]:
        kept = [pair for group in self._groups.values() for pair in group.rows()]
        kept.sort(key=itemgetter(0))
        last = self._last
        by_step = bool(last) and last["progress"] == last.get("step") != last.get("epoch")
        run = Run(tuple(row for _, row in kept), about={"progress": "step" if by_step else "epoch"})
        charts = [chart for chart in charts_of(run) if chart.series or chart.heat or chart.warning]
        charts.sort(key=_rank)
        # the number of epochs in a title would be that of the rows that are kept
        shown = [replace(chart, title=chart.title.partition(",")[0]) for chart in charts]
        names = [chart.title if chart.heat else chart.y_label for chart in charts]
        return list(zip(names, shown, strict=True))

    def facts(self) -> list[dict[str, str]]:
        last, facts = self._last, []
        shown = ("loss", "accuracy", "validation_loss", "validation_accuracy", "learning_rate")
        trackers = [key.removesuffix("_status") for key in last if key.endswith("_status")]
        for key in (*shown, *LABELS):
            value = last.get(key)
            if not is_finite(value):
                continue
            error = last.get(f"{key}_stderr")
            text = _short(value, error if isinstance(error, int | float) else math.nan)
            if key == "edge" and "edge_threshold" in last:
                text += f" of {last['edge_threshold']:.4g}"
            facts.append(_fact(LABELS.get(key, key.replace("_", " ")), text))
        for name in trackers:
            status = str(last[f"{name}_status"])
            if status != Status.CONVERGED.name:
                remedy = "" if is_failure(status) else Status[status].value
                facts.append(_fact(name, "", status, remedy))
        return facts

    @property
    def is_complete(self) -> bool:
        return self.path.with_name("training.json").is_file()

    def summary(self) -> dict[str, Any]:
        place = {key: self._last.get(key) for key in ("epoch", "step")}
        return super().summary() | {"rows": self._count, **place}


def _short(value: float, error: float) -> str:
    """A number for a small place; an error below 1 % is left out."""
    exact = not math.isfinite(error) or error <= 0.01 * abs(value)
    return minus(f"{value:.4g}" if exact else f"{value:.4g} ± {error:.2g}")


def _rank(chart: Chart) -> int:
    """The place of a chart among those of a run."""
    titles = (place for place, title in enumerate(FIRST) if chart.title.startswith(title))
    return next(titles, len(FIRST))


def _fact(label: str, value: str, status: str = "", remedy: str = "") -> dict[str, str]:
    return {"label": label, "value": value, "status": status, "remedy": remedy}


class SweepSource(LiveSource):
    """A sweep: its cells at once, and the charts of its experiment as often as they are cheap."""

    kind = "sweep"

    def __init__(self, name: str, path: Path) -> None:
        super().__init__(name, path, path.with_suffix(PROGRESS))
        self._store = Store(path.parent, *path.stem.rpartition("-")[::2])
        self._experiment = experiment_of(self._store)
        self._stamp: tuple[int, int] = (0, 0)
        self._cells: list[tuple[dict[str, Any], float | None, float | None, str | None]] = []
        self._found: list[tuple[str, Chart]] = []
        self._behind, self._due, self._note = True, 0.0, ""
        self._reader: threading.Thread | None = None

    def look(self) -> bool:
        file = self.path.stat()
        self.updated, stamp = file.st_mtime, (file.st_size, file.st_mtime_ns)
        new = stamp != self._stamp
        if new:
            self._cells, self._stamp, self._behind = self._store.peek(), stamp, True
        if self._behind and self._reader is None and time.monotonic() >= self._due:
            self._behind = False
            self._reader = threading.Thread(target=self._read_charts, daemon=True)
            self._reader.start()
            self._reader.join(PATIENCE)
        if self._reader is not None and not self._reader.is_alive():
            self._reader, new = None, True
        return new

    def _read_charts(self) -> None:
        """Read all rows, in a thread: a large store takes longer than a page should wait."""
        start = time.monotonic()
        try:
            if self._experiment is not None and self._cells:
                outcome = findings(self._experiment, self._store)
                self._note = outcome.notes[0] if outcome.notes else ""
                self._found = [
                    (f"{place} {chart.title}", chart) for place, chart in enumerate(outcome.charts)
                ]
        except Exception as error:  # a store that is damaged
            self._note = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        self._due = start + (time.monotonic() - start) / SHARE

    def charts(self) -> list[tuple[str, Chart]]:
        times = sorted(at for _, _, at, _ in self._cells if at is not None)
        shown = [(i, at) for i, at in enumerate(times, start=1)]
        shown = shown[:: -(-len(shown) // ROWS) or 1]
        minutes = [(at - times[0]) / 60 for _, at in shown]
        done = Series("finished", minutes, [i for i, _ in shown], style="step")
        progress = Chart("Cells", "minutes", "cells finished", (done,) if shown else ())
        return [("cells", progress), *self._found] if shown else self._found

    def facts(self) -> list[dict[str, str]]:
        done = [cell for cell in self._cells if cell[2] is not None]
        facts = [_fact("cells", f"{len(done):,} of {len(self._cells):,}")]
        for settings, seconds, _, _ in sorted(done, key=lambda cell: cell[2] or 0.0)[:-4:-1]:
            facts.append(_fact(self._label(settings), f"{seconds or 0.0:.3g} s"))
        raised: dict[str, list[str]] = {}  # cells by the last line of their error
        for settings, _, _, error in self._cells:
            if error is not None:
                last = (error.strip().splitlines() or [""])[-1][:300]
                raised.setdefault(last, []).append(self._label(settings))
        for error, cells in raised.items():
            name = cells[0] if len(cells) == 1 else count_text(len(cells), "cell")
            facts.append(_fact(name, "", "raised", error))
        return [*facts, *([_fact("charts", self._note)] if self._note else [])]

    def summary(self) -> dict[str, Any]:
        """A sweep that has ended without some cells is not finished."""
        summary = super().summary()
        ended = summary["state"] == "finished" and not self.is_complete
        return summary | ({"state": "incomplete"} if ended else {})

    def _label(self, settings: dict[str, Any]) -> str:
        """A cell by the settings in which cells differ."""
        first, others = self._cells[0][0], [other for other, *_ in self._cells]
        varying = [name for name in settings if any(o.get(name) != first.get(name) for o in others)]
        return label_of({name: settings[name] for name in varying}) or "cell"

    @property
    def is_complete(self) -> bool:
        return bool(self._cells) and all(at is not None for _, _, at, _ in self._cells)


class MeasurementSource(LiveSource):
    """A measurement: the results that its ``run.json`` names, each read once."""

    kind = "measurement"

    def __init__(self, name: str, path: Path) -> None:
        super().__init__(name, path, path.with_name("progress.json"))
        self._results: dict[str, tuple[int, Any]] = {}
        self._stamp, self._asked = 0, tuple[str, ...]()

    def look(self) -> bool:
        asked = tuple(map(str, self._progress.get("what", ())))
        new, self._asked = asked != self._asked, asked
        if not self.path.is_file():
            return new
        state = self.path.stat()
        self.updated = state.st_mtime
        if state.st_mtime_ns == self._stamp:
            return new
        self._stamp = state.st_mtime_ns
        for name in json.loads(self.path.read_text(encoding="utf-8"))["seconds"]:
            file = self.path.with_name(f"{name}.json")
            stamp = file.stat().st_mtime_ns
            if self._results.get(name, (0,))[0] != stamp:
                stored = Result.load(file)
                parts = stored.results if isinstance(stored, Measurement) else stored
                self._results[name] = stamp, parts
        return True

    def charts(self) -> list[tuple[str, Chart]]:
        results = {name: result for name, (_, result) in self._results.items()}
        charts = [chart for chart in charts_of(results) if not chart.rows]
        return [(f"{place} {chart.title}", chart) for place, chart in enumerate(charts)]

    def facts(self) -> list[dict[str, str]]:
        facts, seen = [], set[tuple[str, Status]]()
        for row in Measurement({name: one for name, (_, one) in self._results.items()}).table():
            status, quantity = Status[row["status"]], str(row["quantity"])
            whole = quantity.replace("[", ".").partition(".")[0]
            repeated = (whole, status) in seen  # the parts of a result have its status
            seen.add((whole, status))
            text = _short(row["value"], row["stderr"])
            words = ("", "") if repeated else (status.name, status.value)
            facts.append(_fact(label_text(quantity), text, *words))
        left = [name for name in self._asked if name not in self._results]
        return facts + [
            _fact(label_text(name), "", "measuring" if place == 0 else "waiting")
            for place, name in enumerate(left)
        ]

    @property
    def is_complete(self) -> bool:
        return self.path.with_name("measurement.json").is_file()

    def summary(self) -> dict[str, Any]:
        """Quantities differ in cost: only that which is measured now can tell the time left."""
        summary = super().summary()
        for task in summary["tasks"][:1]:
            task["left"] = None
        return summary


class Board:
    """Everything below one folder; ``state`` is what the page asks for."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        why = why_not(self.folder, "folder")
        expected, got = "be an existing folder", f"{self.folder} ({why})"
        cure = "make it, or name the --out of a run"
        require(self.folder.is_dir(), "folder", expected, got, cure, FileNotFoundError)
        self.sources: list[LiveSource] = []  # in the order in which they were found
        self._known: set[Path] = set()
        self._lock = threading.Lock()
        self._scan_due = self._fresh_until = 0.0

    def state(self, have: Mapping[int, int]) -> dict[str, Any]:
        """All sources, and of those that ``have`` names what is newer than the version there."""
        with self._lock:
            now = time.monotonic()
            if now >= self._scan_due:
                self._scan()
                self._scan_due = time.monotonic() + max(SCAN, 5 * (time.monotonic() - now))
            if now >= self._fresh_until:
                for source in self.sources:
                    source.refresh()
                self._fresh_until = time.monotonic() + FRESH
            charts, summaries = {}, []
            for place, source in enumerate(self.sources):
                summary = {"id": place, **source.summary()}
                if place in have:
                    summary["facts"], changes = source.view(have[place])
                    if changes:
                        charts[place] = changes
                summaries.append(summary)
        name = self.folder.resolve().name or str(self.folder)
        return {"folder": name, "sources": summaries, "charts": charts}

    def _scan(self) -> None:
        for path in _files(self.folder, DEPTH):
            if path in self._known:
                continue
            self._known.add(path)
            name = str(path.parent.relative_to(self.folder))
            name = self.folder.resolve().name if name == "." else name
            if path.name == "metrics.jsonl":
                self.sources.append(RunSource(name, path))
            elif path.suffix == SUFFIX:
                parts = path.parent.relative_to(self.folder) / path.stem
                self.sources.append(SweepSource(str(parts), path))
            else:
                self.sources.append(MeasurementSource(name, path))


def _files(folder: Path, depth: int) -> Iterator[Path]:
    """Files that a run, a sweep or a measurement grows in; links are not followed."""
    folders = []
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    names = {entry.name for entry in entries}
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            if depth and not entry.name.startswith(".") and entry.name not in SKIPPED:
                folders.append(Path(entry.path))
        elif entry.name == "metrics.jsonl" or entry.name.endswith(SUFFIX):
            yield Path(entry.path)
        elif (
            entry.name in ("progress.json", "run.json")  # of a measurement either may come first
            and "metrics.jsonl" not in names
            and _kind_of(Path(entry.path)) in ("measurement", "lambdahat-measure")
        ):
            yield Path(entry.path).with_name("run.json")
    for each in folders:
        yield from _files(each, depth - 1)


def _kind_of(path: Path) -> str:
    """What a JSON file says that it is."""
    with suppress(OSError, ValueError, AttributeError):
        document = json.loads(path.read_text(encoding="utf-8"))
        return str(document.get("kind") or document.get("format"))
    return ""


ASSETS = Path(__file__).parent / "assets"
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
PAGE = ("live.html", "live.js", "live.css", "page.css", "charts.js")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:"
    " blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class LiveServer(ThreadingHTTPServer):
    """Serves the live view of a folder: read-only, to whoever knows the token in its address.

    Nothing in an address is a path of the disk. Requests whose ``Host`` is another name are
    refused: a page elsewhere could have its name point here to read what is shown.
    """

    daemon_threads = True
    allow_reuse_address = os.name == "posix"

    def __init__(self, folder: str | Path, host: str = "127.0.0.1", port: int = 0) -> None:
        require_count(port, "port", 0, 65535)
        require(bool(host.strip()), "host", "be an address", repr(host), "such as 127.0.0.1")
        self.board, self.token, self.bound = Board(folder), secrets.token_urlsafe(16), host
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        """The address of the page."""
        host = f"[{self.bound}]" if ":" in self.bound else self.bound
        return f"http://{host}:{self.server_port}/{self.token}/"

    def allows(self, host: str) -> bool:
        """Whether a request's ``Host`` is this machine by number, or by the name it was given."""
        try:
            address = urlsplit(f"//{host}")
            name, port = (address.hostname or "").lower(), address.port or 80
        except ValueError:
            return False
        if port != self.server_port:
            return False
        if name in ("localhost", self.bound.lower()):
            return True
        try:
            number = ipaddress.ip_address(name)
        except ValueError:
            return False
        bound = str(self.server_address[0]).partition("%")[0]
        return number.is_loopback or not ipaddress.ip_address(bound).is_loopback

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle of an answer is no error."""


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _refuse_method(self) -> None:
        self.close_connection = True
        self._send(b"GET and HEAD only\n", "text/plain", HTTPStatus.METHOD_NOT_ALLOWED)

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = _refuse_method

    def _answer(self, body: bool) -> None:
        path, _, query = self.path.partition("?")
        token, *names = path.removeprefix("/").split("/")
        if not self.server.allows(self.headers.get("Host", "")):
            return self._send(b"wrong host\n", "text/plain", HTTPStatus.FORBIDDEN, body)
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            text = b"wrong token: use the address that lambdahat watch printed\n"
            return self._send(text, "text/plain", HTTPStatus.FORBIDDEN, body)
        name = "/".join(names)
        if not names:
            self.send_response(HTTPStatus.MOVED_PERMANENTLY)
            self.send_header("Location", f"/{self.server.token}/")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif name == "state":
            state = self.server.board.state(_versions(query.removeprefix("have=")))
            answer = json.dumps(state, ensure_ascii=False, separators=(",", ":")).encode()
            self._send(answer, "application/json", body=body)
        elif name == "plotly.js":
            self._send(_plotly(), "text/javascript", body=body, packed=True)
        elif name == "" or name in PAGE:
            asset = ASSETS / (name or PAGE[0])
            self._send(asset.read_bytes(), KINDS[asset.suffix], body=body)
        else:
            self._send(b"not found\n", "text/plain", HTTPStatus.NOT_FOUND, body)

    def _send(
        self,
        data: bytes,
        kind: str,
        status: HTTPStatus = HTTPStatus.OK,
        body: bool = True,
        packed: bool = False,
    ) -> None:
        takes = "gzip" in self.headers.get("Accept-Encoding", "")
        if takes and not packed and len(data) > 10_000:
            data, packed = gzip.compress(data, 1), True
        elif packed and not takes:
            data, packed = gzip.decompress(data), False
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        if packed:
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        if body:
            self.wfile.write(data)

    def version_string(self) -> str:
        return "lambdahat"

    def log_message(self, format: str, *args: Any) -> None:
        """Only the command line prints."""


def _versions(text: str) -> dict[int, int]:
    """What the page has, from "0:17,3:4": the versions of sources."""
    versions = {}
    for part in text.split(",") if text else ():
        with suppress(ValueError):
            place, _, version = part.partition(":")
            versions[int(place)] = int(version)
    return versions


@cache
def _plotly() -> bytes:
    from plotly.offline import get_plotlyjs

    return gzip.compress(get_plotlyjs().encode(), 6)
