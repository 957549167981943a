"""The runner: cells on one core, several or a cluster, each finished cell written at once."""

from __future__ import annotations

import math
import re
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lambdahat._check import require, require_choice, require_count
from lambdahat._progress import report
from lambdahat.data.files import noting_data
from lambdahat.experiments.clusters import BACKENDS
from lambdahat.experiments.experiment import Cell, Experiment, Row, key_of, label_of
from lambdahat.experiments.provenance import changed_data, data_of, made_with
from lambdahat.experiments.store import Store

SHORT = 1, 3  # epochs of the runs by which cells are forecast


@dataclass(frozen=True)
class Outcome:
    """What came of one cell: its rows, or the error it raised; and what it was made with."""

    cell: Cell
    rows: list[Row] | None
    seconds: float
    error: str = ""
    made: dict[str, str] = field(default_factory=dict)


def sweep(
    experiment: Experiment,
    folder: str | Path,
    *,
    scale: str = "cpu",
    jobs: int = 1,
    backend: str = "loky",
    address: str | None = None,
    only: str | None = None,
    device: str = "cpu",
    resume: bool = True,
    command: str = "",
) -> Store:
    """Run the cells of an experiment that its store does not have yet, and return the store.

    ``only`` keeps the cells that have all settings of it, as "alpha=0.1 seed=3" (``matches``). A
    cell that raises is noted and the others go on; a killed sweep loses the cells that were
    running. With ``resume=False`` it starts anew.

    Raises: ValueError: If the store has cells of data that have changed since; cells of early
        versions do not tell.
    """
    require_count(jobs, "jobs")
    require_choice(backend, "backend", BACKENDS)
    require(
        address is None or backend != "loky",
        "address",
        "be left out with the loky backend",
        repr(address),
        "pass --backend dask or ray",
    )
    if address is None:  # else the workers may have what this machine lacks
        _require_device(device)
    cells = experiment.grid(scale)
    chosen = [cell for cell in cells if matches(cell, only)]
    require(
        bool(chosen), "only", "match a cell", repr(only), f"cells read like {label_of(cells[0])!r}"
    )
    store = Store(folder, experiment.name, scale)
    store.open(cells, command, keep=resume)
    if address is None:  # else the data are where the workers are
        _require_same_data(store)
    used = {key: digest for cell, made in store.made() for key, digest in _data_of(cell, made)}
    done = store.finished()
    left = [cell for cell in chosen if key_of(cell) not in done]
    finished, task = len(chosen) - len(left), f"{experiment.name} ({scale})"
    report(task, finished, len(chosen))
    for outcome in _outcomes(experiment, left, jobs, backend, address, device):
        data = dict(_data_of(outcome.cell, outcome.made))
        others = [
            f"{name} ({digest})"
            for (name, folder), digest in data.items()
            if used.get((name, folder), digest) != digest
        ]
        if outcome.rows is None or others:
            error = (
                outcome.error or f"made with other data than the cells before: {', '.join(others)}"
            )
            store.fail(outcome.cell, error)
        else:
            used |= data
            store.add(outcome.cell, outcome.rows, outcome.seconds, outcome.made)
        finished += 1
        report(task, finished, len(chosen), label_of(outcome.cell))
    return store


@dataclass(frozen=True)
class Forecast:
    """What the unfinished cells of one setting would take: how many there are, seconds of one, and
    how that is known.

    The seconds are NaN where it is not known.
    """

    setting: Cell
    cells: int
    seconds: float
    source: str

    @property
    def total(self) -> float:
        """The seconds of all cells, one after the other."""
        return self.cells * self.seconds


def forecast(
    experiment: Experiment,
    folder: str | Path,
    *,
    scale: str,
    only: str | None = None,
    device: str = "cpu",
) -> Iterator[Forecast]:
    """What the cells that are left would take, for each setting but for seeds; nothing is stored.

    Taken from finished cells of the setting on the same kind of device, else from one cell cut to
    one and to three epochs, from which its whole length is extrapolated. Cells that do not count
    epochs cannot be cut.
    """
    _require_device(device)
    store = Store(folder, experiment.name, scale)
    there = store.path.is_file()
    done, times = (store.finished(), dict(store.times())) if there else (set(), {})
    machines = {key_of(cell): made.get("gpu", "") for cell, made in store.made()} if there else {}
    groups: dict[str, list[Cell]] = {}
    for cell in experiment.grid(scale):
        if matches(cell, only):
            groups.setdefault(label_of(_without_seeds(cell)), []).append(cell)
    wanted = torch.cuda.get_device_name(device) if device.startswith("cuda") else ""
    warm = False
    for cells in groups.values():
        left = [cell for cell in cells if key_of(cell) not in done]
        if not left:
            continue
        known = [times[key_of(cell)] for cell in cells if machines.get(key_of(cell)) == wanted]
        if known:
            seconds, source = math.fsum(known) / len(known), f"{len(known)} finished"
        else:
            seconds, source = _timed(experiment, left[0], device, warm)
            warm = True
        yield Forecast(_without_seeds(left[0]), len(left), seconds, source)


def _without_seeds(cell: Cell) -> Cell:
    return {name: value for name, value in cell.items() if name not in ("seed", "seeds")}


def _timed(experiment: Experiment, cell: Cell, device: str, warm: bool) -> tuple[float, str]:
    """Seconds of a cell from runs of few epochs, and how they are known.

    The first run of a process, which also loads and sets up, is not counted.
    """
    epochs, (few, more) = cell.get("epochs"), SHORT
    if not isinstance(epochs, int) or epochs <= more:
        return math.nan, "not known: no epochs to cut; run one cell with --only"
    seconds = []
    for count in (few, more) if warm else (few, few, more):
        outcome = run_cell({**cell, "epochs": count}, experiment, device, None)
        if outcome.rows is None:
            return (
                math.nan,
                (
                    f"not known: cut to {count} epochs it raises"
                    f" {outcome.error.strip().splitlines()[-1]}"
                ),
            )
        seconds.append(outcome.seconds)
    start, end = seconds[-2:]
    pace = max((end - start) / (more - few), 0.0)
    return start + (epochs - few) * pace, f"from {few} and {more} of {epochs} epochs"


def _data_of(cell: Cell, made: Mapping[str, str]) -> list[tuple[tuple[str, Any], str]]:
    """The digests of a cell's data, by their name and the folder that the cell names."""
    return [((name, cell.get("folder")), digest) for name, digest in data_of(made).items()]


def _require_same_data(store: Store) -> None:
    """Rows of a data set that has changed are not those of this one, and must not stand beside
    them.
    """
    changed = dict.fromkeys(
        text for cell, made in store.made() for text in changed_data(made, cell)
    )
    require(
        not changed,
        str(store.path),
        "have been made with the data that are here",
        ", ".join(changed),
        "put the data back, or run all cells anew with --fresh (resume=False)",
    )


def matches(cell: Cell, only: str | None) -> bool:
    """Whether a cell has all settings of ``only``: whole words name=value, in any order.

    "seed=3" is also a setting of a cell that has "seeds=[2, 3]": such a cell runs its seeds
    together.

    >>> [matches({"rate": 0.5, "seed": seed}, "seed=1 rate=0.5") for seed in (1, 11)]
    [True, False]
    """
    if only is None:
        return True
    values = {name: [value] for name, value in cell.items()}
    for name, value in cell.items():
        if isinstance(value, list | tuple) and name.endswith("s"):
            values.setdefault(name[:-1], []).extend(value)
    names = "|".join(re.escape(name) for name in sorted(values, key=len, reverse=True))
    # by names, since a value may have spaces
    before, *asked = re.split(rf"(?:^|\s)({names})=", only)
    pairs = zip(asked[::2], asked[1::2], strict=True)
    return not before.strip() and all(
        any(_reads(value, text.strip()) for value in values[name]) for name, text in pairs
    )


def _reads(value: Any, text: str) -> bool:
    """Whether a setting is written so; a number in any way."""
    if str(value) == text:
        return True
    try:
        return (
            isinstance(value, int | float) and not isinstance(value, bool) and float(text) == value
        )
    except ValueError:
        return False


def _require_device(device: str) -> None:
    """One error before the sweep instead of one for each cell."""
    kind, _, index = device.partition(":")
    require(kind in ("cpu", "cuda"), "device", 'be "cpu" or "cuda"', repr(device))
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        there = index.isdigit() and int(index) < count if index else count > 0
        require(
            there,
            "device",
            "be one that is there",
            f"{device!r}, and torch sees {count} CUDA devices",
            'pass "cpu", or install torch for CUDA',
        )


def run_cell(cell: Cell, experiment: Experiment, device: str, threads: int | None) -> Outcome:
    """One cell, in whatever process; it never raises, so that one bad cell does not end a sweep."""
    if threads is not None:
        torch.set_num_threads(threads)
    start = time.perf_counter()
    try:
        with noting_data() as data:
            rows = experiment.run(cell, device)
        seconds, made = time.perf_counter() - start, made_with(device, data)
    except Exception:
        return Outcome(cell, None, time.perf_counter() - start, traceback.format_exc(limit=-4))
    return Outcome(cell, rows, seconds, made=made)


def _outcomes(
    experiment: Experiment,
    cells: list[Cell],
    jobs: int,
    backend: str,
    address: str | None,
    device: str,
) -> Iterator[Outcome]:
    """The outcomes as they come."""
    if not cells or (jobs == 1 and backend == "loky"):
        return (run_cell(cell, experiment, device, None) for cell in cells)
    task = partial(run_cell, experiment=experiment, device=device, threads=1)
    return BACKENDS[backend](task, cells, jobs, address, device)
