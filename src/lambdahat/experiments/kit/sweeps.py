"""The runner: cells on one core, several, or a cluster; each finished cell is written at once.

Each backend takes a task, the cells to run it on, how many at once, an address and the device
that the task uses. It hands back what comes of a cell as soon as it is there, so that a killed
sweep loses only the cells that were running. The task must pickle; on a cluster the workers need
the same ``lambdahat``. Processes that a sweep starts end within seconds after it, however it ends;
those of a cluster at an address stay, and finish the cells that they run.
"""

from __future__ import annotations

import logging
import math
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch

from lambdahat._core.check import message, require, require_choice, require_count
from lambdahat._core.progress import ProgressFile, report
from lambdahat.data.catalogue import noting_data
from lambdahat.experiments.kit.cells import Cell, Row, key_of, label_of, without_seeds
from lambdahat.experiments.kit.experiment import Experiment
from lambdahat.experiments.kit.store import Store, changed_data, data_of, made_with
from lambdahat.sampling.backends.workers import ending_with

T = TypeVar("T")
Task = Callable[[Cell], T]


def on_processes(
    task: Task[T], cells: Sequence[Cell], jobs: int, address: str | None, device: str
) -> Iterator[T]:
    """Processes of this machine, which end with the sweep, even if it is killed."""
    from joblib import parallel_config
    from joblib.externals.loky import get_reusable_executor

    begin = ending_with(os.getpid())
    with ending_descendants():
        try:
            # an early joblib ignores the initializer: it watches workers from their first cell on
            with parallel_config(backend="loky", initializer=begin):
                yield from _through_joblib(partial(_call, task, begin=begin), cells, jobs)
        finally:
            get_reusable_executor().shutdown(wait=True)


def on_dask(
    task: Task[T], cells: Sequence[Cell], jobs: int, address: str | None, device: str
) -> Iterator[T]:
    """All workers of the cluster at the address, or ``jobs`` workers of our own on this machine."""
    _require_package("dask")
    from dask.distributed import Client
    from joblib import parallel_config

    with ending_descendants():
        # port 0 is any that is free: another sweep may have the usual one
        own = {"n_workers": jobs, "threads_per_worker": 1, "dashboard_address": ":0"}
        with _reach("dask", address):
            client = Client(address) if address else Client(**own)
        with client, parallel_config(backend="dask"):
            yield from _through_joblib(task, cells, jobs)


def on_ray(
    task: Task[T], cells: Sequence[Cell], jobs: int, address: str | None, device: str
) -> Iterator[T]:
    """All of the cluster at the address ("auto": the one that runs here), or ``jobs`` processes of
    one of our own.

    Not through joblib: its ray backend hands nothing back before every cell is done.
    """
    _require_package("ray")
    import ray

    where = address or os.environ.get("RAY_ADDRESS", "local")
    own = {"num_cpus": jobs, "include_dashboard": False} if where == "local" else {}
    cure = "a cluster with tokens wants RAY_AUTH_MODE=token in the environment"
    with ending_descendants():
        with _reach("ray", address, cure):
            ray.init(address=where, log_to_driver=False, logging_level=logging.ERROR, **own)
        try:
            # ray hides its GPUs from a task that asks for none; jobs share them
            gpus = 0.0 if device == "cpu" else ray.cluster_resources().get("GPU", 0.0)
            remote = ray.remote(num_cpus=1, num_gpus=min(1.0, gpus / jobs))(_call)
            shared = ray.put(task)
            waiting = [remote.remote(shared, cell) for cell in cells]
            while waiting:
                (done,), waiting = ray.wait(waiting)
                yield ray.get(done)
        finally:
            ray.shutdown()


BACKENDS: dict[str, Callable[..., Iterator[Any]]] = {
    "loky": on_processes,
    "dask": on_dask,
    "ray": on_ray,
}


GUARD = """
import os, select, signal, sys, time

def processes():  # (parent, start) by number
    table = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as stream:
                parts = stream.read().rpartition(")")[2].split()
        except OSError:
            continue
        table[int(name)] = int(parts[1]), parts[19]
    return table

def family(now, members):  # with all that they have started
    new = members
    while new:
        new = {pid for pid, (parent, _) in now.items() if parent in new} - members - {os.getpid()}
        members = members | new
    return members

seen = {}
while not select.select([sys.stdin], [], [], 0.3)[0]:
    now, driver = processes(), int(sys.argv[1])
    seen |= {pid: now[pid][1] for pid in family(now, {driver} & set(now)) - {driver}}
if not sys.stdin.read(1):  # it was killed; else it says that it has ended
    until = time.monotonic() + 2
    while time.monotonic() < until:
        now = processes()
        for pid in family(now, {pid for pid in now if seen.get(pid) == now[pid][1]}):
            seen[pid] = now[pid][1]
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        time.sleep(0.2)
"""


@contextmanager
def ending_descendants() -> Iterator[None]:
    """End all processes that this one starts inside, and their own, if this one is killed.

    Workers that are still importing do not watch their parent yet, on a busy machine for many
    seconds, and ray's agents outlive a killed driver by a minute. So a process of our own notes who
    they are, waits for the end of this one, and ends them. Only where there is /proc, as on Linux.
    """
    if not os.path.isfile("/proc/self/stat"):
        yield
        return
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", GUARD, str(os.getpid())],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield
    finally:
        guard.communicate(b".")


def _through_joblib(task: Task[T], cells: Sequence[Cell], jobs: int) -> Iterator[T]:
    from joblib import Parallel, delayed

    # batches of one, so that a finished cell is not held back by others of its batch
    order = {"pre_dispatch": "2*n_jobs", "return_as": "generator_unordered"}
    run = Parallel(n_jobs=jobs, batch_size=1, **order)
    yield from run(delayed(task)(cell) for cell in cells)


def _call(task: Task[T], cell: Cell, begin: Callable[[], None] | None = None) -> T:
    if begin is not None:
        begin()
    return task(cell)


def _require_package(name: str) -> None:
    cure = f'pip install "lambdahat[{name}]"'
    there = find_spec(name) is not None
    require(there, "backend", f"have {name} installed", "no such package", cure)


@contextmanager
def _reach(name: str, address: str | None, cure: str = "") -> Iterator[None]:
    """No cluster at the address is a wrong address, not an error inside."""
    try:
        yield
    except OSError:
        came = f"{address!r}, where none answers"
        require(address is None, "address", f"be that of a {name} cluster", came, cure)
        raise


PROGRESS = ".progress.json"  # in place of the suffix of a store
SHORT = 1, 3  # epochs of the runs by which cells are forecast


@dataclass(frozen=True)
class Outcome:
    """The outcome of one cell: its rows or its error, and the versions and data behind them."""

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
    cell that raises is recorded as failed, and the others continue; a sweep that is killed loses
    only the cells that were running. With ``resume=False`` it starts over.

    Raises:
        ValueError: If the store has cells of data that have changed since; cells stored by early
            versions cannot be checked.
    """
    require_count(jobs, "jobs")
    require_choice(backend, "backend", BACKENDS)
    alone = address is None or backend != "loky"
    cure = "pass --backend dask or ray"
    require(alone, "address", "be left out with the loky backend", repr(address), cure)
    if address is None:  # else the workers may have what this machine lacks
        _require_device(device)
    cells = experiment.grid(scale)
    chosen = cells if only is None else [cell for cell in cells if matches(cell, only)]
    if not chosen:
        # the settings in which cells differ are those by which one is chosen
        values: dict[str, dict[str, None]] = {}
        for cell in cells:
            for name, value in cell.items():
                values.setdefault(name, {})[str(value)] = None
        texts = [f"{name}={'|'.join(each)}" for name, each in values.items() if len(each) > 1]
        cure = f"cells differ in {', '.join(texts)}" if texts else "there is one cell"
        cure += f" and read like {label_of(cells[0])!r}"
        raise ValueError(message("only", "match a cell", repr(only), cure))
    store = Store(folder, experiment.name, scale)
    store.open(cells, command, keep=resume)
    made = store.made()
    if address is None:  # else the data are where the workers are
        changed = dict.fromkeys(text for cell, facts in made for text in changed_data(cell, facts))
        same = "have been made with the data that are here"
        cure = "put the data back, or run all cells anew with --fresh (resume=False)"
        require(not changed, str(store.path), same, ", ".join(changed), cure)
    used = {key: digest for each in made for key, digest in data_of(*each).items()}
    done = dict(store.times())
    left = [cell for cell in chosen if key_of(cell) not in done]
    task, total = f"{experiment.name} ({scale})", len(chosen)
    fixed = {name for name in chosen[0] if all(c.get(name) == chosen[0][name] for c in chosen)}
    path = store.path.with_suffix(PROGRESS) if left else None
    with ProgressFile(path, kind="sweep"):
        report(task, total - len(left), total)
        if not left or (jobs == 1 and backend == "loky"):
            outcomes: Iterator[Outcome] = (
                run_cell(cell, experiment, device, None) for cell in left
            )
        else:
            run = partial(run_cell, experiment=experiment, device=device, threads=1)
            outcomes = BACKENDS[backend](run, left, jobs, address, device)
        for finished, outcome in enumerate(outcomes, total - len(left) + 1):
            data = data_of(outcome.cell, outcome.made)
            others = [
                f"{key[0]} ({data[key]})" for key in data if key in used and used[key] != data[key]
            ]
            if outcome.rows is None or others:
                reason = f"made with other data than the cells before: {', '.join(others)}"
                store.fail(outcome.cell, outcome.error or reason)
            else:
                used |= data
                store.add(outcome.cell, outcome.rows, outcome.seconds, outcome.made)
            varied = {name: outcome.cell[name] for name in outcome.cell if name not in fixed}
            report(task, finished, total, label_of(varied))
    return store


@dataclass(frozen=True)
class CellForecast:
    """The unfinished ``cells`` of a setting, and the seconds of one (NaN if not known)."""

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
) -> Iterator[CellForecast]:
    """Forecast the time of the unfinished cells, setting by setting; nothing is stored.

    Taken from finished cells of the setting on the same kind of device, else from one cell cut to
    one and to three epochs, from which its whole length is extrapolated. Cells that do not count
    epochs cannot be cut.
    """
    _require_device(device)
    store = Store(folder, experiment.name, scale)
    there = store.path.is_file()
    times = dict(store.times()) if there else {}
    machines = {key_of(cell): made.get("gpu", "") for cell, made in store.made()} if there else {}
    groups: dict[str, list[Cell]] = {}
    for cell in experiment.grid(scale):
        if matches(cell, only):
            groups.setdefault(label_of(without_seeds(cell)), []).append(cell)
    wanted = torch.cuda.get_device_name(device) if device.startswith("cuda") else ""
    warm = False
    for cells in groups.values():
        left = [cell for cell in cells if key_of(cell) not in times]
        if not left:
            continue
        known = [times[key_of(cell)] for cell in cells if machines.get(key_of(cell)) == wanted]
        if known:
            seconds, source = math.fsum(known) / len(known), f"{len(known)} finished"
        else:
            seconds, source = _time_cell(experiment, left[0], device, warm)
            warm = True
        yield CellForecast(without_seeds(left[0]), len(left), seconds, source)


def _time_cell(experiment: Experiment, cell: Cell, device: str, warm: bool) -> tuple[float, str]:
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
            error = outcome.error.strip().splitlines()[-1]
            return math.nan, f"not known: cut to {count} epochs it raises {error}"
        seconds.append(outcome.seconds)
    start, end = seconds[-2:]
    pace = max((end - start) / (more - few), 0.0)
    return start + (epochs - few) * pace, f"from {few} and {more} of {epochs} epochs"


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
        any(_is_written_as(value, text.strip()) for value in values[name]) for name, text in pairs
    )


def _is_written_as(value: Any, text: str) -> bool:
    """Whether a text is a setting's value; a number may be written in any way."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        return str(value) == text or (number and float(text) == value)
    except ValueError:
        return False


def _require_device(device: str) -> None:
    """One error before the sweep instead of one for each cell."""
    kind, _, index = device.partition(":")
    require(kind in ("cpu", "cuda"), "device", 'be "cpu" or "cuda"', repr(device))
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        there = index.isdigit() and int(index) < count if index else count > 0
        came = f"{device!r}, and torch sees {count} CUDA devices"
        cure = 'pass "cpu", or install torch for CUDA'
        require(there, "device", "be one that is there", came, cure)


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
