"""What is lost when files are hostile, disks are full and processes die? For each kind: tried, survived, lost.

    python benchmarks/faults.py                  # all kinds, minutes
    python benchmarks/faults.py pickles --long   # some kinds, as many cases as there is patience for

A kind is a function of a number of cases and an empty folder. It returns (tried, survived, lost, notes). A case
survives if it ends as docs/reliability.md promises: in the right answer, or in an error that names file or argument.
Everything else is lost: a crash, a wrong answer without a word, a file that is damaged or gone, gigabytes of memory.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Tally = tuple[int, int, int, list[str]]


@dataclass(frozen=True)
class Kind:
    """A kind of fault: the function, and how many cases of it a test, a usual run and a long run try."""

    run: Callable[[int, Path], Tally]
    sample: int
    usual: int
    long: int


KINDS: dict[str, Kind] = {}


def kind(name: str, sample: int, usual: int, long: int) -> Callable[[Any], Any]:
    """Register a function as a kind of fault."""

    def add(function: Callable[[int, Path], Tally]) -> Callable[[int, Path], Tally]:
        KINDS[name] = Kind(function, sample, usual, long)
        return function

    return add


def tally(outcomes: list[tuple[str, str]]) -> Tally:
    """From (case, what went wrong or "") to a tally; the notes name the first few cases that were lost."""
    lost = [f"{case}: {fault}" for case, fault in outcomes if fault]
    return len(outcomes), len(outcomes) - len(lost), len(lost), lost[:5]


# Damaged files


def a_problem(seed: int = 0, headless: bool = False) -> Any:
    """A perceptron on random data; ``headless`` has a last layer of 0, so that its loss is ln 3 on any data."""
    import torch

    from lambdahat import Problem
    from lambdahat.models import mlp

    model = mlp([6, 8, 3], seed=0)
    if headless:
        with torch.no_grad():
            for parameter in list(model.parameters())[-2:]:
                parameter.zero_()
    rng = torch.Generator().manual_seed(seed)
    data = torch.randn(40, 6, generator=rng), torch.randint(3, (40,), generator=rng)
    return Problem(model, "cross_entropy", data)


def measured(folder: Path, problem: Any = None) -> Any:
    """Three quantities of a problem, kept in a folder."""
    from lambdahat.measuring import measure

    return measure(a_problem() if problem is None else problem, ("trace", "eigenpairs", "spectrum"), folder=folder)


def an_experiment(cells: int, pause: float = 0.0, log: str = "") -> Any:
    """An experiment of so many cells, each with a few rows from its own stream; nested, so that workers get it."""
    from lambdahat.experiments.claims import Claim
    from lambdahat.experiments.experiment import Experiment
    from lambdahat.experiments.reproduction import Table
    from lambdahat.experiments.statistics import mean_of

    def run(cell: dict[str, Any], device: str) -> list[dict[str, Any]]:
        import time

        import torch

        from lambdahat._rng import generator

        if log:
            with open(log, "a") as file:
                file.write(f"{cell['seed']}\n")
        time.sleep(pause)
        draws = torch.randn(3, generator=generator(cell["seed"], "faults"), dtype=torch.float64)
        return [{"step": i, "value": 2.0 + 0.1 * float(draw)} for i, draw in enumerate(draws)]

    def claims(rows: Any) -> list[Any]:
        return [Claim("values are above one", "", "2", mean_of(rows.values("value")), bound=1.0)]

    def tables(rows: Any) -> list[Any]:
        return [Table("Values", ("mean",), ((str(mean_of(rows.values("value"))),),))]

    scales = dict.fromkeys(("smoke", "cpu", "paper"), cells)
    return Experiment("faults", "Faults", "none", "none", scales, lambda count: [{"seed": i} for i in range(count)],
                      run, claims, tables, lambda rows: [])  # fmt: skip


def plain(value: Any) -> Any:
    """A value as nested tuples that compare by all bits."""
    import torch

    from lambdahat.results import Result

    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    if hasattr(value, "tobytes"):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, Result):
        return type(value).__name__, plain(vars(value))
    if isinstance(value, Mapping):
        return tuple((key, plain(item)) for key, item in value.items())
    if isinstance(value, tuple | list):
        return tuple(plain(item) for item in value)
    return repr(value)


def library(folder: Path) -> dict[str, tuple[str, Callable[[Path], Any]]]:
    """Write one file or folder of every kind that is read back: by name, the place and the function that reads it."""
    import torch

    from lambdahat.cli.loading import read_checkpoint
    from lambdahat.experiments.findings import findings
    from lambdahat.experiments.store import Store
    from lambdahat.experiments.sweeps import sweep
    from lambdahat.optim import IterateAverage
    from lambdahat.results import Result
    from lambdahat.training import Checkpoints, fit, read_rows
    from lambdahat.training.folders import Recipe, read_recipe, weights
    from lambdahat.training.metrics import Metrics

    run, problem = folder / "run", a_problem()
    optimizer = torch.optim.Adam(problem.source.parameters(), lr=0.01)
    fit(problem, optimizer, 3, batch_size=10, folder=run, averaging=IterateAverage(problem.source))
    Recipe("mlp", "digits", settings={"lr": 0.01}).save(run)
    measured(folder / "measured")
    experiment = an_experiment(12)
    sweep(experiment, folder / "store", scale="smoke", command="lambdahat reproduce faults")

    def newest(place: Path) -> Any:
        found = Checkpoints(place / "run" / "checkpoints").newest()
        if found.damaged:
            warnings.warn("; ".join(found.damaged), RuntimeWarning, stacklevel=1)
        return found.step, found.state

    length = newest(folder)[1]["metrics"]
    initial = newest(folder)[1]["initial"]

    def rows(place: Path) -> Any:
        found = read_rows(place / "run" / "metrics.jsonl")
        if not Metrics(place / "run").covers(length):
            raise ValueError("metrics.jsonl is short: an earlier checkpoint is taken")  # as resuming does
        return found

    def stored(place: Path) -> Any:
        store = Store(place / "store", "faults", "smoke")
        found = findings(experiment, store)
        return (
            list(store.rows()),
            store.about(),
            sorted(store.finished()),
            store.errors(),
            store.seconds(),
            found.verdicts,
        )

    def again(place: Path) -> Any:
        found = measured(place / "measured")
        return {**found.results, "seconds": 0}

    readers: dict[str, tuple[str, Callable[[Path], Any]]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"):
        name = str(path.relative_to(folder))
        if path.parent.name == "checkpoints" and path.name.startswith("step"):
            readers[name] = name, newest
        elif path.name == "initial.safetensors":
            readers[name] = name, lambda place: Checkpoints(place / "run" / "checkpoints").read_initial(initial)
        elif path.name == "best.json":
            readers[name] = name, lambda place: weights(place / "run", "best")
        elif path.name == "metrics.jsonl":
            readers[name] = name, rows
        elif path.name == "config.json":
            readers[name] = name, lambda place: vars(read_recipe(place / "run"))
        elif path.name == "averaged.safetensors":
            readers[name] = name, lambda place: read_checkpoint(place / "run" / "averaged.safetensors")
        elif path.suffix == ".sqlite":
            readers[name] = name, stored
        elif path.parent.name == "measured":
            readers[name] = name, again
            if path.suffix == ".json" and path.name != "run.json":
                readers[f"{name}, loaded"] = name, lambda place, name=name: Result.load(place / name)
        elif path.name == "training.json":
            readers[name] = name, lambda place: Result.load(place / "run" / "training.json")
    return readers


def damage_files(count: int, folder: Path, damage: Callable[[random.Random, bytes], bytes]) -> Tally:
    """Damage a file of every kind in turn: the same is read, or the damage is named with the file."""
    from lambdahat.cli.exits import InputError

    readers = library(folder / "whole")
    names, dice = list(readers), random.Random(0)
    right = {name: plain(read(folder / "whole")) for name, (_, read) in readers.items()}
    outcomes, same, named = [], 0, 0
    for number in range(count):
        name = names[number % len(names)]
        file, read = readers[name]
        place = folder / "damaged"
        shutil.copytree(folder / "whole", place)
        path = place / file
        blob = path.read_bytes()
        path.write_bytes(damage(dice, blob))
        fault = ""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                found = plain(read(place))
                told = any(_names(str(warning.message), path) for warning in caught)
                if found == right[name]:
                    same += 1
                elif told:
                    named += 1
                else:
                    fault = "read as something else without a word"
            except (ValueError, OSError, InputError) as error:
                named += 1
                fault = "" if _names(str(error), path) else f"an error without the file: {error}"[:200]
            except BaseException as error:
                fault = f"{type(error).__name__}: {error}"[:200]
        outcomes.append((f"{name}, case {number}", fault))
        shutil.rmtree(place)
    tried, survived, lost, notes = tally(outcomes)
    return tried, survived, lost, [f"{len(names)} readings; {named:,} named, {same:,} changed nothing", *notes]


def _names(text: str, path: Path) -> bool:
    """Whether a message names a file, or its other half."""
    return path.name in text or path.with_suffix(".json").name in text or path.stem.split(".")[0] + "." in text


def flip(dice: random.Random, blob: bytes) -> bytes:
    """One bit changed."""
    place = dice.randrange(8 * len(blob))
    data = bytearray(blob)
    data[place // 8] ^= 1 << place % 8
    return bytes(data)


@kind("bit flips", sample=46, usual=1000, long=20_000)
def flips(count: int, folder: Path) -> Tally:
    """One random bit in one file of every kind that is read back."""
    return damage_files(count, folder, flip)


@kind("truncations", sample=23, usual=200, long=4000)
def truncations(count: int, folder: Path) -> Tally:
    """One file of every kind that is read back, cut short at a random place."""
    return damage_files(count, folder, lambda dice, blob: blob[: dice.randrange(len(blob))])


# Results of something else


@kind("other problems", sample=6, usual=60, long=2000)
def other_problems(count: int, folder: Path) -> Tally:
    """Measure another problem of the same parameters and the same loss into the folder of the first."""
    import torch

    from lambdahat import Problem

    dice, outcomes = random.Random(0), []
    first = a_problem(headless=True)
    measured(folder / "first", first)
    (x, y), model = next(iter(first.batches)).data, first.source
    for number in range(count):
        one, other, labels = x.clone(), x.clone(), y.clone()
        one[dice.randrange(40), dice.randrange(6)] += dice.choice((1e-6, 1e-3, 1.0))
        labels[dice.randrange(40)] += dice.choice((1, 2))
        other = other[torch.randperm(40, generator=torch.Generator().manual_seed(number))]
        weighted = torch.nn.CrossEntropyLoss(weight=torch.full((3,), dice.uniform(0.1, 0.9)))
        case, changed = (
            ("one pixel", lambda: Problem(model, "cross_entropy", (one, y))),  # noqa: B023
            ("one label", lambda: Problem(model, "cross_entropy", (x, labels % 3))),  # noqa: B023
            ("another order", lambda: Problem(model, "cross_entropy", (other, y))),  # noqa: B023
            ("other data", lambda: a_problem(number + 1, headless=True)),  # noqa: B023
            ("other weights of classes", lambda: Problem(model, weighted, (x, y))),  # noqa: B023
            ("the same", lambda: Problem(model, "cross_entropy", (x, y), batch_size=dice.randint(1, 40))),
        )[number % 6]
        try:
            found = measured(folder / "first", changed())
            right = case == "the same" and float(found["trace"]) == float(measured(folder / "first", first)["trace"])
            fault = "" if right else "the first problem's result"
        except ValueError as error:
            fault = "" if "folder must hold results of this run" in str(error) and case != "the same" else str(error)
        outcomes.append((f"{case}, case {number}", fault))
    return tally(outcomes)


# Killed processes


CALL = "import sys; sys.path.insert(0, sys.argv[1]); import faults; getattr(faults, sys.argv[2])(*sys.argv[3:])"


def child(function: str, *arguments: Any) -> subprocess.Popen[bytes]:
    """A function of this file in a process of its own."""
    command = [sys.executable, "-c", CALL, str(Path(__file__).parent), function, *map(str, arguments)]
    quiet = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=quiet, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def sweep_child(folder: str, cells: str, jobs: str, backend: str, pause: str) -> None:
    """Run the experiment, each cell with a line in a log."""
    from lambdahat.experiments.sweeps import sweep

    sweep(an_experiment(int(cells), float(pause), f"{folder}/log"), folder, scale="cpu", jobs=int(jobs),
          backend=backend)  # fmt: skip


def measure_child(folder: str, quantity: str) -> None:
    """Measure; "chains" runs long chains in processes of their own."""
    if quantity == "chains":
        from lambdahat import sample
        from lambdahat.sampling import sgld

        Path(folder, "log").write_text("begun")
        sample(a_problem(), sgld(1e-5, 10.0, 10.0), chains=2, burn_in=10**8, batch_size=10, mode="processes")
    else:
        measured(Path(folder))


def _killed_sweep(folder: Path, cells: int, kills: int, jobs: int, writers: int = 1) -> list[tuple[str, str]]:
    """Kill sweeps at random moments after a newly finished cell, then finish; nothing is lost, twice or different."""
    from lambdahat.experiments.findings import findings
    from lambdahat.experiments.store import Store
    from lambdahat.experiments.sweeps import sweep

    folder.mkdir(parents=True)
    log, store, dice, outcomes = folder / "log", Store(folder, "faults", "cpu"), random.Random(kills), []
    before: list[tuple[set[str], int]] = []
    for number in range(kills):
        known = len(store.finished()) if store.path.is_file() else 0
        started = [child("sweep_child", folder, cells, jobs, "loky", 0.05) for _ in range(writers)]
        while not (store.path.is_file() and len(store.finished()) > known) and started[0].poll() is None:
            time.sleep(0.01)
        time.sleep(dice.uniform(0, 0.3))
        for process in started:
            process.send_signal(signal.SIGKILL)
            process.wait()
        time.sleep(1.5 if jobs > 1 else 0)  # until its workers have gone
        done = store.finished()
        before.append((done, len(log.read_text().split())))
        outcomes.append((f"kill {number}", "" if len(done) > known or len(done) == cells else "no progress"))
    experiment = an_experiment(cells, 0.0, str(log))
    found = sweep(experiment, folder, scale="cpu")
    whole = sweep(an_experiment(cells), folder / "whole", scale="cpu")
    keys = {row["seed"]: key for row, key in zip(experiment.grid("cpu"), _keys(experiment), strict=True)}
    begun = [keys[int(seed)] for seed in log.read_text().split()]
    again = any(not done.isdisjoint(begun[count:]) for done, count in before)
    same = plain(list(found.rows())) == plain(list(whole.rows()))
    verdicts = findings(experiment, found).verdicts == findings(experiment, whole).verdicts
    outcomes += [("finished cells", "run again" if again else ""), ("rows", "" if same else "others"),
                 ("verdicts", "" if verdicts else "others")]  # fmt: skip
    return outcomes


def _keys(experiment: Any) -> list[str]:
    from lambdahat.experiments.experiment import key_of

    return [key_of(cell) for cell in experiment.grid("cpu")]


@kind("killed sweeps", sample=1, usual=6, long=20)
def killed_sweeps(count: int, folder: Path) -> Tally:
    """Sweeps over ten cells for each kill, with one and with two jobs, killed by SIGKILL and resumed."""
    alone = _killed_sweep(folder / "one", max(10 * count, 20), count, jobs=1)
    return tally([*alone, *_killed_sweep(folder / "two", max(10 * count, 20), count, jobs=2)])


@kind("two writers", sample=1, usual=3, long=20)
def two_writers(count: int, folder: Path) -> Tally:
    """Two sweeps on one store at the same time, both killed, and finished by a third."""
    outcomes = _killed_sweep(folder / "both", max(10 * count, 20), count, jobs=1, writers=2)
    return tally([outcome for outcome in outcomes if outcome[0] != "finished cells"])  # both may begin the same cell


@kind("killed measurements", sample=2, usual=10, long=200)
def killed_measurements(count: int, folder: Path) -> Tally:
    """``measure`` killed at a random moment and resumed: the numbers of one that was not."""
    whole, dice, outcomes = measured(folder / "whole"), random.Random(0), []
    for number in range(count):
        place = folder / str(number)
        process = child("measure_child", place, "numbers")
        while not place.is_dir() and process.poll() is None:
            time.sleep(0.005)
        time.sleep(dice.uniform(0, 0.3))
        process.kill()
        process.wait()
        found = plain(measured(place).results)
        outcomes.append((f"kill {number}", "" if found == plain(whole.results) else "other numbers"))
    return tally(outcomes)


def running() -> dict[int, tuple[str, str]]:
    """The parent and the start of every process that runs, by its number."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat=,lstart="], capture_output=True, text=True, check=True)
    lines = [line.split(maxsplit=3) for line in listed.stdout.splitlines()]
    return {int(pid): (parent, start) for pid, parent, stat, start in lines if not stat.startswith("Z")}


def descendants(parent: int) -> dict[int, tuple[str, str]]:
    """Those of the processes that a process has started, and those that these have."""
    everything, found = running(), {}
    new = {parent}
    while new:
        new = {pid for pid, (above, _) in everything.items() if int(above) in new}
        found |= {pid: everything[pid] for pid in new}
    return found


@kind("orphans", sample=1, usual=3, long=40)
def orphans(count: int, folder: Path) -> Tally:
    """After SIGKILL of a sweep or of chains in processes, at a random moment: all its children end within 5 s."""
    from importlib.util import find_spec

    backends = [name for name in ("loky", "dask", "ray") if name == "loky" or (find_spec(name) and count > 1)]
    dice, outcomes, slowest = random.Random(0), [], 0.0
    for number in range(count):
        for name in [*backends, "chains"]:
            place = folder / f"{name}-{number}"
            place.mkdir()
            process = (
                child("measure_child", place, name)
                if name == "chains"
                else child("sweep_child", place, 20, 2, name, 60)
            )
            early = number % 3 == 2  # before the first cell has begun
            while not (place / "log").is_file() and process.poll() is None:
                time.sleep(0.02)
                if early and descendants(process.pid):
                    break
            time.sleep(dice.uniform(0, min(count, 3)))
            ended = process.poll() is not None
            left = {} if ended else descendants(process.pid)
            process.kill()
            process.wait()
            start = time.monotonic()
            while left and time.monotonic() - start < 5:
                time.sleep(0.05)
                left = {pid: each for pid, each in running().items() if left.get(pid, ("", ""))[1] == each[1]}
            slowest = max(slowest, time.monotonic() - start)
            fault = "ended by itself" if ended else f"{len(left)} children after 5 s" if left else ""
            outcomes.append((f"{name} {number}", fault))
            for pid in left:
                os.kill(pid, signal.SIGKILL)
    tried, survived, lost, notes = tally(outcomes)
    return tried, survived, lost, [f"{', '.join(backends)} and chains; at most {slowest:.1f} s", *notes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help=f"kinds of faults: {', '.join(KINDS)} (default: all)")
    parser.add_argument("--long", action="store_true", help="hours rather than minutes")
    parser.add_argument("--quick", action="store_true", help="the sample that the tests try")
    args = parser.parse_args()
    unknown = sorted(set(args.kinds) - set(KINDS))
    if unknown:
        parser.error(f"kinds must be among {', '.join(KINDS)}, got {', '.join(unknown)}")
    print("| kind | tried | survived | lost | seconds | notes |\n| --- | --: | --: | --: | --: | --- |", flush=True)
    total = 0
    for name in args.kinds or KINDS:
        chosen = KINDS[name]
        folder = Path(tempfile.mkdtemp(prefix="faults-"))
        start = time.monotonic()
        try:
            tried, survived, lost, notes = chosen.run(
                chosen.sample if args.quick else chosen.long if args.long else chosen.usual, folder
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        total += lost
        seconds = time.monotonic() - start
        print(f"| {name} | {tried:,} | {survived:,} | {lost:,} | {seconds:.0f} | {'; '.join(notes)} |", flush=True)
    sys.exit(1 if total else 0)


if __name__ == "__main__":
    main()
