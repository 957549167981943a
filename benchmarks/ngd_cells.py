r"""The NGD paper's experiments at its size on one GPU: seeds trained together, points measured by
several processes.

    python benchmarks/ngd_cells.py unpack carry/mnist DATA/mnist
    python benchmarks/ngd_cells.py run --out OUT --runs RUNS --seconds 520 --workers 6 \
        ngd-vs-sgd:data=mnist ngd-widths
    python benchmarks/ngd_cells.py behind /tmp/ngd --watch 560 --pack OUT/ngd.tar \
        --seconds 1400 --workers 4 ngd-epochs

``run`` takes cells of experiments at paper scale (``NAME``, or ``NAME:only`` with the words of
``reproduce --only``) in the order given. The runs that they need are trained first, those of one
network and optimiser stacked, and kept in RUNS; a cell is measured by one of the processes as soon
as its runs are there, and written to a store in OUT at once. Cells that OUT or a folder of
``--known`` has are not run again. Cells whose data set is not there yet wait for it. At the
deadline what is running is ended. Another call with the same folders goes on. ``--tiny`` makes
every cell small, for a trial on a CPU.

``behind`` is for machines that are available for a few minutes at a time: it unpacks the folder
``carry``, starts ``run`` in a session of its own, which outlives the command, and for ``--watch``
seconds prints its output and packs its stores into one archive. Called again, it continues to
watch, or restarts a run that has ended with time left. ``benchmarks/device_cells.py fold`` adds the
stores to others.
"""

from __future__ import annotations

import argparse
import bz2
import multiprocessing
import os
import queue
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from device_cells import _shared_gpu
from ngd_stacks import StackedRun, kept_in, train_together, upto

from lambdahat._core.progress import progress
from lambdahat.data.catalogue import locate
from lambdahat.data.sources import VARIABLE
from lambdahat.experiments.kit.cells import Cell, key_of
from lambdahat.experiments.kit.store import Store
from lambdahat.experiments.kit.sweeps import Outcome, matches, run_cell
from lambdahat.experiments.ngd.ngd_runs import Way
from lambdahat.experiments.ngd.switch import FIGURES
from lambdahat.experiments.published import find

# what members of a stack have in common
SHARED = ("data", "training", "batch", "network", "layers", "width")
TINY = {
    "training": 300,
    "held_out": 100,
    "epochs": 2,
    "before": 1,
    "approach": 2,
    "sampled_batch": 64,
    "batch": 50,
    "tol": 0.5,
    "max_gradients": 1600,
}
WIDTHS = {16: 4, 64: 5, 256: 6}


@dataclass
class Work:
    """A cell of an experiment, and the trainings that it needs: number of each, and how many
    epochs.
    """

    name: str
    cell: Cell
    needs: list[tuple[int, int]] = field(default_factory=list)
    tried: bool = False


@dataclass
class Training:
    """Runs that are trained together: members and optimiser, or the cells of a chain of stages;
    epochs to stop at.
    """

    optimizer: str
    members: list[StackedRun]
    milestones: set[int]
    chain: str = ""
    reached: int = 0
    started: bool = False
    tried: bool = False


def works(spec: str, tiny: bool) -> list[Work]:
    """The cells of a word of the command line, low seeds first."""
    name, _, only = spec.partition(":")
    cells = [cell for cell in find(name).grid("paper") if matches(cell, only or None)]
    if tiny:
        cells = [_tiny(cell) for cell in cells]
    return [Work(name, cell) for cell in sorted(cells, key=lambda cell: int(cell["seed"]))]


def _tiny(cell: Cell) -> Cell:
    small = {key: TINY.get(key, value) for key, value in cell.items()}
    return (
        small
        | {"width": WIDTHS.get(cell["width"], 0)}
        | ({"points": 2} if "points" in cell else {})
    )


def trainings(given: list[Work]) -> list[Training]:
    """What has to be trained, in the order of the cells; each run once."""
    found: list[Training] = []
    places: dict[Any, int] = {}  # by member: which training
    stacks: dict[Any, int] = {}
    for work in given:
        for optimizer, changes in _requests(work):
            member = StackedRun(work.cell, changes=tuple(changes.items()))
            about = {name: work.cell[name] for name in ("rate", "alpha", "epsilon")} | changes
            rule = (about["alpha"], about["epsilon"]) if optimizer == "ngd" else ()
            shared = tuple(work.cell[name] for name in SHARED)
            own = (shared, optimizer, work.cell["seed"], about["rate"], *rule)
            if own not in places:
                stack = (
                    work.name,
                    shared,
                    optimizer,
                    *(() if work.name == "ngd-smoothing" else rule),
                )
                if stack not in stacks:
                    stacks[stack] = len(found)
                    found.append(Training(optimizer, [], set()))
                places[own] = stacks[stack]
                found[places[own]].members.append(member)
            found[places[own]].milestones.add(work.cell["epochs"])
            work.needs.append((places[own], work.cell["epochs"]))
        if not _requests(work):
            stack = (work.name, tuple(work.cell[name] for name in SHARED))
            if stack not in stacks:
                stacks[stack] = len(found)
                found.append(Training("sgd", [], {1}, work.name))
            found[stacks[stack]].members.append(StackedRun(work.cell))
            work.needs.append((stacks[stack], 1))
    return found


def _requests(work: Work) -> list[tuple[str, dict[str, float]]]:
    """The runs of a cell from its start: optimiser and changed settings; none for those that
    split.
    """
    if work.name.startswith("ngd-switch"):
        return []
    if work.name == "ngd-smoothing":
        return [
            ("sgd", {}),
            *(("ngd", {work.cell["sweep"]: value}) for value in work.cell["values"]),
        ]
    return [("sgd", {}), ("ngd", {})]


def train(training: Training, device: str, folder: Path, reached: Any) -> None:
    """Train what is not in the folder yet."""
    if training.chain:
        _train_chain(training, device, folder)
        reached(1)
        return
    goals = sorted(training.milestones)
    if min(upto(member, training.optimizer, folder) for member in training.members) >= goals[-1]:
        reached(goals[-1])
        return
    train_together(training.members, training.optimizer, device, folder, goals, reached)


def _train_chain(training: Training, device: str, folder: Path) -> None:
    """SGD before a split, at two rates in ``switch_late``, and the branches after it."""
    cells = [member.cell for member in training.members]
    first = cells[0]
    ends: list[Any] = [None] * len(cells)
    if "approach" in first:
        members = [StackedRun(cell, None, "approach", (("rate", cell["quick"]),)) for cell in cells]
        ends = _ends(_runs(members, "sgd", device, folder, first["approach"]))
    members = [StackedRun(cell, end, "before") for cell, end in zip(cells, ends, strict=True)]
    splits = _ends(_runs(members, "sgd", device, folder, first["before"]))
    for optimizer in ("sgd", "ngd"):
        rates = [
            factor * first["rate"] for kind, factor in FIGURES[first["figure"]] if kind == optimizer
        ]
        members = [
            StackedRun(cell, split, "after", (("rate", rate),))
            for rate in rates
            for cell, split in zip(cells, splits, strict=True)
        ]
        _runs(members, optimizer, device, folder, first["epochs"])


def _runs(
    members: list[StackedRun], optimizer: str, device: str, folder: Path, epochs: int
) -> list[Way]:
    return train_together(members, optimizer, device, folder, (epochs,))


def _ends(ways: list[Way]) -> list[Any]:
    return [way.end.vector for way in ways]


def run(
    out: Path,
    runs: Path,
    known: list[Path],
    specs: list[str],
    seconds: float,
    workers: int,
    training: int,
    device: str,
    mps: bool,
    tiny: bool,
) -> None:
    """Train and measure until all cells are done or the time is over."""
    begun, end = time.monotonic(), time.monotonic() + seconds
    given = [work for spec in specs for work in works(spec, tiny)]
    stores = {
        name: Store(out, name, "paper") for name in dict.fromkeys(work.name for work in given)
    }
    for name, store in stores.items():
        chosen = [work.cell for work in given if work.name == name]
        store.open(chosen if tiny else find(name).grid("paper"), " ".join(sys.argv))
    done = {name: store.finished() for name, store in stores.items()}
    for name in stores:
        for store in (Store(folder, name, "paper") for folder in known):
            done[name] |= store.finished() if store.path.is_file() else set()
    left = [work for work in given if key_of(work.cell) not in done[work.name]]
    jobs = trainings(left)
    members = sum(len(job.members) for job in jobs)
    print(
        f"{len(left)} of {len(given)} cells left, {members} runs in {len(jobs)} stacks", flush=True
    )
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with _shared_gpu(mps):
        asks = [context.Queue() for _ in range(workers)]
        processes = [
            context.Process(target=_serve, args=(number, ask, answers, device, runs, 0.9 / workers))
            for number, ask in enumerate(asks)
        ]
        for process in processes:
            process.start()
        idle, busy = list(range(workers)), dict[int, Any]()
        while (left or busy) and time.monotonic() < end:
            while idle and (
                task := _next(
                    jobs, left, sum(kind == "train" for kind, _ in busy.values()), training
                )
            ):
                busy[number := idle.pop(0)] = task
                asks[number].put(
                    (task[0], jobs[task[1]] if task[0] == "train" else task[1], task[1])
                )
            if not busy:
                if any(not job.started for job in jobs):  # its data set may still come
                    time.sleep(1.0)
                    continue
                break  # what is left waits for a training that failed
            try:
                number, kind, what, outcome = answers.get(timeout=1.0)
            except queue.Empty:
                for number in [number for number in busy if not processes[number].is_alive()]:
                    kind, what = busy.pop(number)
                    print(f"process {number} has died of {kind} {what}", flush=True)
                    lost = what if kind == "cell" else jobs[what]
                    if not lost.tried:  # once more, by another process
                        lost.tried = True
                        if kind == "cell":
                            left.append(what)
                        else:
                            lost.started = False
                continue
            at = f"{time.monotonic() - begun:5.0f} s"
            if kind == "reached":
                jobs[what].reached = max(jobs[what].reached, outcome)
                continue
            busy.pop(number)
            if not (kind == "cell" and _lost(outcome)):
                idle.append(number)
            if kind == "train":
                job = jobs[what]
                label = (
                    f"{len(job.members)} × {job.chain or job.optimizer}"
                    f" {_short(job.members[0].cell)}"
                )
                print(f"{at}: trained {label}: {outcome}", flush=True)
            else:
                store = stores[what.name]
                if outcome.rows is None:
                    store.fail(what.cell, outcome.error)
                    print(
                        f"{at}: failed {what.name} {_short(what.cell)}: {outcome.error[-900:]}",
                        flush=True,
                    )
                else:
                    store.add(what.cell, outcome.rows, outcome.seconds, outcome.made)
                    statuses = [
                        row[name] for row in outcome.rows for name in row if name.endswith("status")
                    ]
                    told = " ".join(
                        f"{status}:{statuses.count(status)}" for status in dict.fromkeys(statuses)
                    )
                    print(
                        f"{at}: {what.name} {_short(what.cell)} in {outcome.seconds:.0f} s {told}",
                        flush=True,
                    )
        for process in processes:
            process.kill()
    for name, store in stores.items():
        print(f"{name}: {len(store.finished())} cells finished", flush=True)
    print(f"{time.monotonic() - begun:.0f} s", flush=True)


def _next(
    jobs: list[Training], left: list[Work], running: int, most: int
) -> tuple[str, Any] | None:
    """A training while fewer than ``most`` run, else a cell whose runs are there, else one more
    training.
    """
    waiting = next(
        (number for number, job in enumerate(jobs) if not job.started and _there(job)), None
    )
    ready = next(
        (work for work in left if all(jobs[job].reached >= epochs for job, epochs in work.needs)),
        None,
    )
    if waiting is not None and (running < most or (ready is None and running < 2 * most)):
        jobs[waiting].started = True
        return "train", waiting
    if ready is not None:
        left.remove(ready)
        return "cell", ready
    return None


def _there(job: Training) -> bool:
    """Whether the data set of a training is in place."""
    return locate(job.members[0].cell["data"]) is not None


def _serve(number: int, ask: Any, answers: Any, device: str, runs: Path, share: float) -> None:
    """Trainings and cells one after another."""
    import torch

    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(share)
    parent = os.getppid()
    while True:
        try:
            kind, task, what = ask.get(timeout=5.0)
        except queue.Empty:
            if os.getppid() != parent:
                return  # whoever asked was killed
            continue
        if kind == "train":
            begun = time.monotonic()

            def reached(epochs: int, what: int = what) -> None:
                answers.put((number, "reached", what, epochs))

            told = _Pace(begun)
            try:
                with progress(told):
                    train(task, device, runs, reached)
                outcome = f"{time.monotonic() - begun:.0f} s {told}"
            except Exception:
                outcome = traceback.format_exc(limit=-4)[-1500:]
            answers.put((number, "train", what, outcome))
        else:
            with kept_in(runs):
                outcome = run_cell(task.cell, find(task.name), device, 1)
            answers.put((number, "cell", task, outcome))
            if _lost(outcome):
                return
        if device == "cuda":
            torch.cuda.empty_cache()


def _lost(outcome: Outcome) -> bool:
    """Whether a cell failed in a way after which its process can use the GPU no more."""
    return outcome.rows is None and "CUDA error" in outcome.error


class _Pace:
    """Hears of epochs, and says what one takes; a line now and then."""

    def __init__(self, begun: float) -> None:
        self._first = self._last = (begun, 0)
        self._said = begun

    def __call__(self, task: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        if done == 1:
            self._first = (now, 1)
        self._last = (now, done)
        if now - self._said > 30:
            self._said = now
            print(f"         {task}: {done} of {total}, {self}", flush=True)

    def __str__(self) -> str:
        (start, first), (end, last) = self._first, self._last
        return f"{(end - start) / (last - first):.3f} s an epoch" if last > first else ""


def _short(cell: Cell) -> str:
    told = ("data", "network", "layers", "width", "alpha", "sweep", "seed")
    return " ".join(str(cell[name]) for name in told if name in cell)


def behind(
    base: Path, carry: Path, pack: Path, watch: float, seconds: float, options: list[str]
) -> None:
    """Have ``run`` go on in a session of its own, and watch it for a while."""
    begun, end = base / "begun", time.monotonic() + watch
    for source in sorted(path for path in carry.iterdir() if any(path.glob("*-ubyte.bz2"))):
        if not (base / "data" / source.name).exists():
            unpack(source, base / "data" / source.name)
    if not begun.exists():
        begun.write_text(str(time.time()))
    left, log = seconds - (time.time() - float(begun.read_text())), base / "log"
    if not _alive(base / "pid") and left > 0:
        command = [
            sys.executable,
            "-u",
            __file__,
            "run",
            "--out",
            str(base / "stores"),
            "--runs",
            str(base / "runs"),
            f"--seconds={left:.0f}",
            *options,
        ]
        with log.open("a") as lines:
            process = subprocess.Popen(
                command,
                stdout=lines,
                stderr=lines,
                start_new_session=True,
                env={**os.environ, VARIABLE: str(base / "data")},
            )
        (base / "pid").write_text(str(process.pid))
    said, packed = 0, -1.0
    while True:
        alive, over = _alive(base / "pid"), time.monotonic() > end
        with log.open() as lines:
            lines.seek(said)
            print(lines.read(), end="", flush=True)
            said = lines.tell()
        stores = sorted((base / "stores").glob("*.sqlite"))
        changed = max((path.stat().st_mtime for path in stores), default=-1.0)
        if changed > packed or over or not alive:
            packed = changed
            _pack(stores, log, pack)
        if over or not alive:
            print("goes on" if alive else "has ended", flush=True)
            return
        time.sleep(2.0)


def _alive(pid: Path) -> bool:
    """Whether the process of this number runs; one that has ended and was started here is waited
    for.
    """
    if not pid.is_file():
        return False
    number = int(pid.read_text())
    with suppress(ChildProcessError):
        os.waitpid(number, os.WNOHANG)
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


def _pack(stores: list[Path], log: Path, pack: Path) -> None:
    """The stores, each between two transactions, and the log in one archive."""
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / pack.name
        with tarfile.open(whole, "w") as archive:
            archive.add(log, log.name)
            for path in stores:
                copy = Path(folder) / path.name
                with (
                    closing(sqlite3.connect(path)) as source,
                    closing(sqlite3.connect(copy)) as target,
                ):
                    source.backup(target)
                archive.add(copy, path.name)
        shutil.copyfile(whole, pack)


def unpack(source: Path, target: Path) -> None:
    """Files as they are, those that end in .bz2 without it."""
    partial = target.with_name(f"{target.name}.partial")  # a folder that is there is whole
    partial.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        packed = path.suffix == ".bz2"
        there = partial / (path.stem if packed else path.name)
        there.write_bytes(bz2.decompress(path.read_bytes()) if packed else path.read_bytes())
    partial.replace(target)
    print(f"{target}: {', '.join(path.name for path in sorted(target.iterdir()))}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--out", type=Path, required=True)
    runs.add_argument("--runs", type=Path, required=True)
    behind_it = commands.add_parser("behind")
    behind_it.add_argument("base", type=Path, help="folder that stays between commands")
    behind_it.add_argument(
        "--watch", type=float, required=True, help="seconds that this command takes"
    )
    behind_it.add_argument("--pack", type=Path, required=True)
    behind_it.add_argument(
        "--carry", type=Path, default=Path("carry"), help="a folder for each packed data set"
    )
    for parser_of_run in (runs, behind_it):
        parser_of_run.add_argument("specs", nargs="+")
        parser_of_run.add_argument("--seconds", type=float, required=True)
        parser_of_run.add_argument(
            "--known", type=Path, nargs="*", default=[], help="folders of stores"
        )
        parser_of_run.add_argument("--workers", type=int, default=6)
        parser_of_run.add_argument(
            "--training",
            type=int,
            default=2,
            help="trainings at a time while there are cells to measure",
        )
        parser_of_run.add_argument("--device", default="cuda")
        parser_of_run.add_argument(
            "--mps",
            action="store_true",
            help="let processes share the GPU by CUDA's multi-process service",
        )
        parser_of_run.add_argument("--tiny", action="store_true")
    packed = commands.add_parser("unpack")
    packed.add_argument("source", type=Path)
    packed.add_argument("target", type=Path)
    args = parser.parse_args()
    if args.command == "run":
        run(
            args.out,
            args.runs,
            args.known,
            args.specs,
            args.seconds,
            args.workers,
            args.training,
            args.device,
            args.mps,
            args.tiny,
        )
    elif args.command == "behind":
        options = [f"--{name}={getattr(args, name)}" for name in ("workers", "training", "device")]
        options += [f"--{name}" for name in ("mps", "tiny") if getattr(args, name)]
        options += [*args.specs, "--known", *map(str, args.known)]
        behind(args.base, args.carry, args.pack, args.watch, args.seconds, options)
    else:
        unpack(args.source, args.target)


if __name__ == "__main__":
    main()
