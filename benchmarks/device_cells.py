"""Cells of several experiments on one machine: some processes on its GPU, others on its CPU cores,
until a deadline.

    python benchmarks/device_cells.py run --out OUT --seconds 500 --gpu 6 --cpu 9 \\
        mlp-decay@cuda xor@cpu
    python benchmarks/device_cells.py fold OUT benchmarks/results/reproductions

``run`` takes the cells of each experiment (``NAME@DEVICE``, or ``NAME/SCALE@DEVICE:only`` with the
words of ``reproduce --only``) in the order given, those of low seeds first, and writes each
finished cell to a store in OUT at once. Cells of chapter 7 that train alike share the run. Cells
wait for their data set, and one that would not end before the deadline is not begun. At the
deadline the running cells are ended and what is stored stays; cells that OUT or a folder of
``--known`` has are not run again. A cell that ran out of memory runs once more, after all others.
"@FILE" stands for the words in a file, such as benchmarks/device_plan.txt; a # begins a comment.

With ``--mps`` never kill a process while it computes: this ends all others that share the GPU. Stop
it with SIGSTOP first, and kill it once its kernels have ended.
``fold`` adds the cells of these stores to those of another folder and drops what is no longer in a
grid. ``unpack`` restores CIFAR-100 from its packed chunks.
"""

from __future__ import annotations

import argparse
import bz2
import json
import multiprocessing
import os
import pickle
import queue
import shlex
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from lambdahat._core.progress import progress
from lambdahat.data.catalogue import locate
from lambdahat.experiments.averaging.averaged_training import sharing_runs, training_of
from lambdahat.experiments.kit.cells import Cell, key_of, label_of
from lambdahat.experiments.kit.experiment import WHOLE
from lambdahat.experiments.kit.store import Store, read_record, stores_in
from lambdahat.experiments.kit.sweeps import Outcome, matches, run_cell
from lambdahat.experiments.published import find
from lambdahat.training import stepping

CHUNKS = 10  # of 5,000 training images each


@dataclass(frozen=True)
class Work:
    """One cell of an experiment at a scale, on a device."""

    name: str
    scale: str
    device: str
    cell: Cell


def works(spec: str, changes: dict[str, Any]) -> list[Work]:
    """The cells that a word of the command line stands for, changed by ``--set``."""
    head, _, only = spec.partition(":")
    place, _, device = head.partition("@")
    name, _, scale = place.partition("/")
    scale = scale or "paper"
    cells = [cell for cell in find(name).grid(scale) if matches(cell, only or None)]
    cells = [{key: changes.get(key, value) for key, value in cell.items()} for cell in cells]
    return [Work(name, scale, device or "cuda", cell) for cell in sorted(cells, key=_seed)]


def _seed(cell: Cell) -> int:
    seeds = cell.get("seeds", cell.get("seed", 0))  # several that run together, or how many do
    return int(min(seeds) if isinstance(seeds, list) else cell.get("group", seeds))


def bundles(given: list[Work]) -> list[list[Work]]:
    """Cells that share a training run together, in the order of the first of each; others alone.

    In a bundle the experiments come by name: averaging-schedules keeps more averages of a run than
    averaging-starts.
    """
    found: dict[str, list[Work]] = {}
    for work in given:
        shared = find(work.name).run.__module__.startswith("lambdahat.experiments.averaging")
        key = training_of(work.cell) if shared else f"{work.name} {work.scale} {key_of(work.cell)}"
        found.setdefault(f"{work.device} {key}", []).append(work)
    return [
        sorted(bundle, key=lambda work: (work.name, "part" in work.cell))
        for bundle in found.values()
    ]


def ready(work: Work) -> bool:
    """Whether the data set of a cell is in place; those that are not files are."""
    name = work.cell.get("data")
    found = locate(name) if name in WHOLE else None
    return name not in WHOLE or (found is not None and not found.missing)


class Pace:
    """What bundles took, and so what others will take: the longest of the same kind, or a guess."""

    def __init__(self, guess: float) -> None:
        self.guess = guess
        self._longest: dict[tuple[Any, ...], float] = {}

    def add(self, bundle: list[Work], seconds: float) -> None:
        """Note a finished bundle."""
        kind = self._kind(bundle)
        self._longest[kind] = max(seconds, self._longest.get(kind, 0.0))

    def __call__(self, bundle: list[Work]) -> float:
        return self._longest.get(self._kind(bundle), self.guess)

    def _kind(self, bundle: list[Work]) -> tuple[Any, ...]:
        told = ("network", "part", "kind", "graph", "epoch", "epochs", "training", "operator")
        return tuple((work.name, *(str(work.cell.get(name)) for name in told)) for work in bundle)


def run(
    out: Path,
    specs: list[str],
    seconds: float,
    gpu: int,
    cpu: int,
    changes: dict[str, Any],
    mps: bool,
    every: float,
    guess: float,
    known: Sequence[Path] = (),
) -> None:
    """Run until all cells are done or the time is over.

    A cell that would not end by then is not begun.
    """
    begun, end = time.monotonic(), time.monotonic() + seconds
    given = list(
        {
            (work.name, work.scale, key_of(work.cell)): work
            for spec in specs
            for work in works(spec, changes)
        }.values()
    )
    stores = {}
    for name, scale in dict.fromkeys((work.name, work.scale) for work in given):
        store = stores[name, scale] = Store(out, name, scale)
        store.open(
            [work.cell for work in given if (work.name, work.scale) == (name, scale)],
            " ".join(sys.argv),
        )
    there = {pair: store.finished() for pair, store in stores.items()}
    for folder, pair in product(known, there):
        if (store := Store(folder, *pair)).path.exists():
            there[pair] |= store.finished()
    given = [work for work in given if key_of(work.cell) not in there[work.name, work.scale]]
    left, pace, done, failed = bundles(given), Pace(guess), 0, 0
    again: set[str] = set()  # cells that ran out of memory, which others may have taken
    print(f"{len(given)} cells in {len(left)} bundles", flush=True)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    kinds = ["cuda"] * gpu + ["cpu"] * cpu
    with _shared_gpu(mps):
        asks = [context.Queue() for _ in kinds]
        workers = [
            context.Process(
                target=_serve, args=(number, ask, answers, every, kind, 0.95 / max(gpu, 1))
            )
            for number, (ask, kind) in enumerate(zip(asks, kinds, strict=True))
        ]
        for worker in workers:
            worker.start()
        busy: dict[int, tuple[list[Work], float]] = {}
        lost: set[int] = set()
        while (left or busy) and time.monotonic() < end:
            for number, kind in enumerate(kinds):
                if number in busy or number in lost:
                    continue
                room = end - time.monotonic()
                mine = (
                    each
                    for each in left
                    if each[0].device == kind and ready(each[0]) and pace(each) < room
                )
                if (bundle := next(mine, None)) is not None:
                    left.remove(bundle)
                    busy[number] = bundle, time.monotonic()
                    asks[number].put(bundle)
            if not busy and all(ready(bundle[0]) for bundle in left):
                break  # the rest is too long
            try:
                number, work, outcome = answers.get(timeout=1.0)
            except queue.Empty:
                for number in [number for number in busy if not workers[number].is_alive()]:
                    lost.add(number)
                    print(f"process {number} has died of {_told(busy.pop(number)[0])}", flush=True)
                continue
            if work is None:
                bundle, start = busy.pop(number)
                pace.add(bundle, time.monotonic() - start)
                continue
            store = stores[work.name, work.scale]
            if outcome.rows is None:
                store.fail(work.cell, outcome.error)
                failed += 1
                if "out of memory" in outcome.error and key_of(work.cell) not in again:
                    again.add(key_of(work.cell))
                    left.append([work])
            else:
                done += 1
                store.add(work.cell, outcome.rows, outcome.seconds, outcome.made)
            state = "failed" if outcome.rows is None else "done"
            told = f"{state} in {outcome.seconds:.0f} s: {work.name} {_short(work.cell)}"
            print(f"{time.monotonic() - begun:5.0f} s: {told} {outcome.error[-600:]}", flush=True)
        for worker in workers:
            worker.kill()
    told = f"{done} of {len(given)} cells, {failed} failures"
    print(f"{told}, {end - time.monotonic():.0f} s left", flush=True)


def _serve(number: int, ask: Any, answers: Any, every: float, device: str, share: float) -> None:
    """Bundles of cells one after another, with a line of progress now and then."""
    import torch

    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = (
        False  # curvature is in float32; trainings name their own precision
    )
    if (
        device == "cuda" and torch.cuda.is_available()
    ):  # else the workspace of convolutions takes all memory
        torch.cuda.set_per_process_memory_fraction(share)
    # residual networks of 100 layers and more are thousands of small kernels: record their steps,
    # though the activations take more than the library would hold between steps
    stepping.MOST_BYTES = 4 << 30
    parent = os.getppid()
    while True:
        try:
            bundle = ask.get(timeout=5.0)
        except queue.Empty:
            if os.getppid() != parent:
                return  # whoever asked was killed
            continue
        with sharing_runs():
            for work in bundle:
                outcome = _run_cell(work, every)
                answers.put((number, work, outcome))
                if outcome.rows is None and "CUDA error" in outcome.error:
                    return  # after it a process can use the GPU no more
        if device == "cuda" and torch.cuda.is_available():
            torch.cuda.empty_cache()
        answers.put((number, None, None))


def _run_cell(work: Work, every: float) -> Outcome:
    started = said = time.monotonic()

    def listen(task: str, done: int, total: int | None) -> None:
        nonlocal said
        if time.monotonic() - said > every:
            said = time.monotonic()
            print(
                f"{said - started:.0f} s: {work.name} {_short(work.cell)}: {task} {done}/{total}",
                flush=True,
            )

    with progress(listen):
        return run_cell(work.cell, find(work.name), work.device, 1)


def _told(bundle: list[Work]) -> str:
    return "; ".join(f"{work.name} {_short(work.cell)}" for work in bundle)


def _short(cell: Cell) -> str:
    told = (
        "network",
        "run",
        "activation",
        "rules",
        "optimizer",
        "decay",
        "epoch",
        "operator",
        "kind",
        "graph",
        "seed",
        "seeds",
    )
    return label_of({name: cell[name] for name in told if name in cell})[:90]


@contextmanager
def _shared_gpu(wanted: bool) -> Iterator[None]:
    """CUDA's multi-process service, so that kernels of several processes run side by side;
    without it if it fails.
    """
    if not wanted:
        yield
        return
    places = {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/mps", "CUDA_MPS_LOG_DIRECTORY": "/tmp/mps"}
    Path("/tmp/mps").mkdir(exist_ok=True)
    os.environ.update(places)
    try:
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, timeout=20)
        probe = "import torch; print(float(torch.ones(8, device='cuda').sum()))"
        subprocess.run([sys.executable, "-c", probe], check=True, timeout=60)
        print("processes share the GPU")
    except (OSError, subprocess.SubprocessError) as error:
        print(f"no multi-process service: {error}")
        _quit_service()
        for name in places:
            os.environ.pop(name)
    try:
        yield
    finally:
        _quit_service()


def _quit_service() -> None:
    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run(
            ["nvidia-cuda-mps-control"], input="quit\n", text=True, timeout=20, check=False
        )


def fold(source: Path, target: Path) -> None:
    """Add the finished cells of the stores in ``source`` to those in ``target``, which keep
    today's grid alone.
    """
    for found in stores_in(source):
        if not found.finished():
            continue
        store = Store(target, found.experiment, found.scale)
        grid = find(found.experiment).grid(found.scale)
        store.open(grid, f"lambdahat reproduce {found.experiment} --scale {found.scale}")
        settings = {json.dumps(cell, sort_keys=True): cell for cell in grid}
        added = 0
        for key, text, seconds, facts in _finished(found.path):
            cell = settings.get(json.dumps(json.loads(text), sort_keys=True))
            if cell is None:
                print(f"{found.path.name}: not in the grid: {text}")
                continue
            with sqlite3.connect(found.path) as connection:
                records = connection.execute(
                    "SELECT record FROM rows WHERE key = ? ORDER BY number", (key,)
                ).fetchall()
            store.add(
                cell,
                [read_record(record) for (record,) in records],
                seconds,
                json.loads(facts) if facts else None,
            )
            added += 1
        with sqlite3.connect(store.path) as connection:
            for table, name in (("rows", "key"), ("made", "key"), ("digests", "name")):
                connection.execute(
                    f"DELETE FROM {table} WHERE {name} IN (SELECT key FROM cells WHERE position"
                    " < 0)"
                )
            connection.execute("DELETE FROM cells WHERE position < 0")
        with sqlite3.connect(store.path) as connection:
            connection.execute("VACUUM")
        print(f"{store.path}: {added} cells added, {len(store.finished())} of {len(grid)} there")


def _finished(path: Path) -> list[tuple[str, str, float, str | None]]:
    with sqlite3.connect(path) as connection:
        return connection.execute(
            "SELECT key, settings, seconds, facts FROM cells LEFT JOIN made USING (key) WHERE"
            " finished IS NOT NULL"
        ).fetchall()


def unpack(folders: list[Path], out: Path, jobs: int) -> None:
    """The folder ``cifar-100-python`` of packed chunks; without test images the first chunk's
    stand in their place.
    """
    chunks = sorted(path for folder in folders for path in folder.glob("train-*.med"))
    if len(chunks) != CHUNKS:  # else every cell would be refused for want of images
        sys.exit(f"{len(chunks)} of the {CHUNKS} chunks of training images are in {folders}")
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        images = pool.map(_decoded, chunks)
    labels = [list(path.with_suffix(".labels").read_bytes()) for path in chunks]
    folder = out / "partial"  # a folder of the right name is whole
    folder.mkdir(parents=True, exist_ok=True)
    # experiments hold out a part of the training images
    parts = {"train": slice(None), "test": slice(1)}
    for name, part in parts.items():
        kept = [label for found in labels[part] for label in found]
        data = {
            b"data": np.concatenate(images[part]),
            b"fine_labels": kept,
            b"coarse_labels": [0] * len(kept),
        }
        (folder / name).write_bytes(pickle.dumps(data, protocol=2))
    (folder / "meta").write_bytes(
        pickle.dumps({b"fine_label_names": [b"%d" % i for i in range(100)]}, protocol=2)
    )
    folder.replace(out / "cifar-100-python")
    print(f"{sum(map(len, labels))} images")


def _decoded(path: Path) -> np.ndarray[Any, Any]:
    """(n, 3072) bytes: bz2, zigzag residuals of the median edge predictor, green subtracted."""
    buffer = path.read_bytes()
    _, n, height, width = struct.unpack("<4sIII", buffer[:16])
    residual = (
        np.frombuffer(bz2.decompress(buffer[16:]), np.uint8)
        .reshape(3, n, height, width)
        .astype(np.int16)
    )
    residual = np.where(residual & 1, (511 - residual) >> 1, residual >> 1)
    residual = np.ascontiguousarray(residual.transpose(2, 3, 0, 1))
    planes = np.empty((height, width, 3, n), np.int16)
    start = np.full((3, n), 128, np.int16)
    for y in range(height):
        for x in range(width):
            left = planes[y, x - 1] if x else (planes[y - 1, 0] if y else start)
            up = planes[y - 1, x] if y else left
            corner = (planes[y - 1, x - 1] if x else planes[y - 1, 0]) if y else left
            low, high = np.minimum(left, up), np.maximum(left, up)
            guess = np.where(corner >= high, low, np.where(corner <= low, high, left + up - corner))
            planes[y, x] = (residual[y, x] + guess) & 255
    green = planes[:, :, 0]
    rgb = np.stack(
        [(planes[:, :, 1] + green - 128) & 255, green, (planes[:, :, 2] + green - 128) & 255], 0
    )
    return np.ascontiguousarray(rgb.astype(np.uint8).transpose(3, 0, 1, 2)).reshape(n, -1)


class Parser(argparse.ArgumentParser):
    """A parser that reads files of words with comments."""

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        """The words of a line."""
        return shlex.split(arg_line, comments=True)


def main() -> None:
    parser = Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        fromfile_prefix_chars="@",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("specs", nargs="+")
    runs.add_argument("--out", type=Path, required=True)
    runs.add_argument("--known", type=Path, nargs="*", default=[])
    runs.add_argument("--seconds", type=float, required=True)
    runs.add_argument("--gpu", type=int, default=1)
    runs.add_argument("--cpu", type=int, default=1)
    runs.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", dest="changes")
    runs.add_argument(
        "--mps",
        action="store_true",
        help="let processes share the GPU by CUDA's multi-process service",
    )
    runs.add_argument(
        "--guess", type=float, default=60.0, help="seconds of cells of which none has ended yet"
    )
    runs.add_argument(
        "--every",
        type=float,
        default=30.0,
        help="seconds between two lines of progress of a process",
    )
    folds = commands.add_parser("fold")
    folds.add_argument("source", type=Path)
    folds.add_argument("target", type=Path)
    packed = commands.add_parser("unpack")
    packed.add_argument("folders", nargs="+", type=Path)
    packed.add_argument("--out", type=Path, required=True)
    packed.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    if args.command == "run":
        changes = {
            name: json.loads(value)
            for name, _, value in (change.partition("=") for change in args.changes)
        }
        run(
            args.out,
            args.specs,
            args.seconds,
            args.gpu,
            args.cpu,
            changes,
            args.mps,
            args.every,
            args.guess,
            args.known,
        )
    elif args.command == "fold":
        fold(args.source, args.target)
    else:
        unpack(args.folders, args.out, args.jobs)


if __name__ == "__main__":
    main()
