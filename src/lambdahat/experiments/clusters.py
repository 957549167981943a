"""Where the cells of a sweep run: processes of this machine, a dask cluster, or a ray cluster.

Each backend takes a task, the cells it is to run on, how many at once, an address and the device
that the task uses. It hands back what comes of a cell as soon as it is there: what is handed back
is written, and a killed sweep loses only the cells that were running. The task must pickle; on a
cluster the workers need the same ``lambdahat``. Processes that a sweep starts end within seconds
after it, however it ends; those of a cluster at an address stay, and finish the cells that they
run.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeVar

from lambdahat._check import require
from lambdahat.sampling.workers import ending_with

Cell = dict[str, Any]
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
            # an early joblib ignores the initializer: its workers are watched from their first cell
            # on
            with parallel_config(backend="loky", initializer=begin):
                yield from _through_joblib(partial(_call_after, begin, task), cells, jobs)
        finally:
            get_reusable_executor().shutdown(wait=True)


def on_dask(
    task: Task[T], cells: Sequence[Cell], jobs: int, address: str | None, device: str
) -> Iterator[T]:
    """All workers of the cluster at the address, or ``jobs`` workers of a cluster of our own on
    this machine.
    """
    _require_package("dask")
    from dask.distributed import Client
    from joblib import parallel_config

    with ending_descendants():
        # port 0 is any that is free: another sweep may have the usual one
        with _reached("dask", address):
            client = (
                Client(address)
                if address
                else Client(n_workers=jobs, threads_per_worker=1, dashboard_address=":0")
            )
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

    with ending_descendants():
        with _reached(
            "ray", address, "a cluster with tokens wants RAY_AUTH_MODE=token in the environment"
        ):
            _join_ray(jobs, address)
        try:
            # ray hides its GPUs from a task that asks for none; jobs share them
            share = (
                0.0 if device == "cpu" else min(1.0, ray.cluster_resources().get("GPU", 0.0) / jobs)
            )
            remote = ray.remote(num_cpus=1, num_gpus=share)(_call)
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
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as stream:
                parts = stream.read().rpartition(")")[2].split()
        except OSError:
            continue
        found[int(name)] = int(parts[1]), parts[19]
    return found

def family(now, found):  # with all that they have started
    new = found
    while new:
        new = {pid for pid, (parent, _) in now.items() if parent in new} - found - {os.getpid()}
        found = found | new
    return found

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
    """End all processes that this one starts inside, and all that those start, if this one is
    killed.

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
    """One cell at a time in a process, so that a finished one is not held back by others of its
    batch.
    """
    from joblib import Parallel, delayed

    run = Parallel(
        n_jobs=jobs, batch_size=1, pre_dispatch="2*n_jobs", return_as="generator_unordered"
    )
    yield from run(delayed(task)(cell) for cell in cells)


def _join_ray(jobs: int, address: str | None) -> None:
    import ray

    where = address or os.environ.get("RAY_ADDRESS", "local")
    own = {"num_cpus": jobs, "include_dashboard": False} if where == "local" else {}
    ray.init(address=where, log_to_driver=False, logging_level=logging.ERROR, **own)


def _call(task: Task[T], cell: Cell) -> T:
    return task(cell)


def _call_after(begin: Callable[[], None], task: Task[T], cell: Cell) -> T:
    begin()
    return task(cell)


def _require_package(name: str) -> None:
    require(
        find_spec(name) is not None,
        "backend",
        f"have {name} installed",
        "no such package",
        f'pip install "lambdahat[{name}]"',
    )


@contextmanager
def _reached(name: str, address: str | None, cure: str = "") -> Iterator[None]:
    """No cluster at the address is a wrong address, not an error inside."""
    try:
        yield
    except OSError:
        require(
            address is None,
            "address",
            f"be that of a {name} cluster",
            f"{address!r}, where none answers",
            cure,
        )
        raise
