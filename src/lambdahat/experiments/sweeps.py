"""The runner: cells through joblib, on one core or a cluster, each finished cell written at once."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lambdahat._check import require, require_choice, require_count
from lambdahat._progress import report
from lambdahat.experiments.experiment import Cell, Experiment, Row, key_of, label_of
from lambdahat.experiments.store import Store

BACKENDS = ("loky", "dask", "ray")


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


def run_cell(experiment: Experiment, cell: Cell, device: str, threads: int | None) -> Outcome:
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
    if jobs == 1 and backend == "loky":
        yield from (run_cell(experiment, cell, device, None) for cell in cells)
        return
    from joblib import Parallel, delayed

    tasks = [delayed(run_cell)(experiment, cell, device, 1) for cell in cells]
    with CLUSTERS[backend](jobs, address):
        # one cell at a time: a killed sweep loses no finished one
        yield from Parallel(n_jobs=jobs, batch_size=1, pre_dispatch="2*n_jobs", return_as="generator_unordered")(tasks)


def _loky(jobs: int, address: str | None) -> AbstractContextManager[Any]:
    """Processes of this machine, which end with the sweep."""
    require(
        address is None, "address", "be left out with the loky backend", repr(address), "pass --backend dask or ray"
    )
    from joblib.externals.loky import get_reusable_executor

    return _Cluster(nullcontext(), lambda: get_reusable_executor().shutdown(wait=True))


def _dask(jobs: int, address: str | None) -> AbstractContextManager[Any]:
    """A cluster at an address, or one of our own on this machine."""
    _needed("dask.distributed", "dask")
    from dask.distributed import Client
    from joblib import parallel_config

    client = Client(address) if address else Client(n_workers=jobs, threads_per_worker=1, dashboard_address=None)
    return _Cluster(parallel_config(backend="dask"), client.close)


def _ray(jobs: int, address: str | None) -> AbstractContextManager[Any]:
    """A cluster at an address, or one of our own on this machine."""
    _needed("ray", "ray")
    import ray
    from joblib import parallel_config
    from ray.util.joblib import register_ray

    ray.init(address=address, num_cpus=None if address else jobs, include_dashboard=None if address else False,
             log_to_driver=False)  # fmt: skip
    register_ray()
    return _Cluster(parallel_config(backend="ray"), ray.shutdown)


CLUSTERS: dict[str, Callable[[int, str | None], AbstractContextManager[Any]]] = {
    "loky": _loky,
    "dask": _dask,
    "ray": _ray,
}


class _Cluster(AbstractContextManager[Any]):
    """A joblib backend that is left when the block ends, and what it ran on closed."""

    def __init__(self, config: Any, close: Callable[[], Any]) -> None:
        self._config, self._close = config, close

    def __enter__(self) -> Any:
        return self._config.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._config.__exit__(*exception)
        self._close()


def _needed(module: str, extra: str) -> None:
    from importlib.util import find_spec

    top = module.partition(".")[0]
    require(find_spec(top) is not None, "backend", f"have {top} installed", "no such package",
            f'pip install "lambdahat[{extra}]"', ImportError)  # fmt: skip
