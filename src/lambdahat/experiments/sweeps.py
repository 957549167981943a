"""The runner: cells on one core, several or a cluster, each finished cell written at once."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from lambdahat._check import require, require_choice, require_count
from lambdahat._progress import report
from lambdahat.experiments.clusters import BACKENDS
from lambdahat.experiments.experiment import Cell, Experiment, Row, key_of, label_of
from lambdahat.experiments.store import Store


@dataclass(frozen=True)
class Outcome:
    """What came of one cell: its rows, or the error it raised."""

    cell: Cell
    rows: list[Row] | None
    seconds: float
    error: str = ""


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

    ``only`` keeps the cells whose settings, as "alpha=0.1 seed=3", contain every word of it. A cell that raises is
    noted and the others go on; a killed sweep loses the cells that were running. With ``resume=False`` it starts anew.
    """
    require_count(jobs, "jobs")
    require_choice(backend, "backend", BACKENDS)
    require(address is None or backend != "loky", "address", "be left out with the loky backend", repr(address),
            "pass --backend dask or ray")  # fmt: skip
    cells = experiment.grid(scale)
    chosen = [cell for cell in cells if matches(cell, only)]
    require(bool(chosen), "only", "match a cell", repr(only), f"cells read like {label_of(cells[0])!r}")
    store = Store(folder, experiment.name, scale)
    store.open(cells, command, keep=resume)
    done = store.finished()
    left = [cell for cell in chosen if key_of(cell) not in done]
    finished, task = len(chosen) - len(left), f"{experiment.name} ({scale})"
    report(task, finished, len(chosen))
    for outcome in _outcomes(experiment, left, jobs, backend, address, device):
        if outcome.rows is None:
            store.fail(outcome.cell, outcome.error)
        else:
            store.add(outcome.cell, outcome.rows, outcome.seconds)
        finished += 1
        report(task, finished, len(chosen), label_of(outcome.cell))
    return store


def matches(cell: Cell, only: str | None) -> bool:
    """Whether every word of ``only`` is part of the cell's settings."""
    words = label_of(cell).split()
    return only is None or all(any(word in setting for setting in words) for word in only.split())


def run_cell(cell: Cell, experiment: Experiment, device: str, threads: int | None) -> Outcome:
    """One cell, in whatever process; it never raises, so that one bad cell does not end a sweep."""
    if threads is not None:
        torch.set_num_threads(threads)
    start = time.perf_counter()
    try:
        rows = experiment.run(cell, device)
    except Exception:
        return Outcome(cell, None, time.perf_counter() - start, traceback.format_exc(limit=-4))
    return Outcome(cell, rows, time.perf_counter() - start)


def _outcomes(
    experiment: Experiment, cells: list[Cell], jobs: int, backend: str, address: str | None, device: str
) -> Iterator[Outcome]:
    """The outcomes as they come."""
    if not cells or (jobs == 1 and backend == "loky"):
        return (run_cell(cell, experiment, device, None) for cell in cells)
    task = partial(run_cell, experiment=experiment, device=device, threads=1)
    return BACKENDS[backend](task, cells, jobs, address, device)
