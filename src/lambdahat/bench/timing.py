"""Timing: one process, interleaved rounds, medians of ratios to a unit, peak memory."""

from __future__ import annotations

import ctypes
import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

# seconds; a longer first call is repeated once, one longer still is the only one
PATIENCE, ENDURANCE = 4.0, 20.0
# seconds before a sample: so long the threads of another task's BLAS spin on, and take its cores
SETTLE = 0.1
BEST_OF = 5  # samples of the unit in a round: the first after another task finds its caches cold
Run = Callable[[], Any]
Maker = Callable[[], Run]  # set-up, which is not timed; what it returns is


@dataclass(frozen=True)
class Clocked:
    """The result of a task that times itself: its seconds and its answer."""

    seconds: float
    value: Any = None


@dataclass(frozen=True)
class Timed:
    """Median seconds, cost in units, peak MiB and last answer of a call; or why there is none."""

    seconds: float = math.nan
    cost: float = math.nan
    memory: float = math.nan
    value: Any = None
    note: str = ""


def synchronize() -> None:
    """Wait for the GPU, where one is in use."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def seconds(run: Run, number: int = 1) -> tuple[float, Any]:
    """The time of a call, over ``number`` calls, and the last answer."""
    synchronize()
    start = time.perf_counter()
    for _ in range(number):
        value = run()
    synchronize()
    if isinstance(value, Clocked):
        return value.seconds, value.value
    return (time.perf_counter() - start) / number, value


def compare(
    makers: Mapping[str, Maker], unit: str, rounds: int, sample_s: float = 0.05
) -> dict[str, Timed]:
    """Every task timed, in rounds that run each once, so that drift of the machine falls on all
    alike.

    The first call, set-up included, shows the memory and warms up; short tasks fill a sample of
    ``sample_s`` with several calls. A pause is before each sample, so that no one pays for the
    threads of the one before. The cost is the median over rounds of the ratio to ``unit``, one of
    the tasks, whose time in a round is the best of five samples in a row, so that it does not
    depend on its neighbours; what takes longer than some seconds has no rounds but a second call,
    for a first may load libraries or search for kernels. A task that raises has a note instead.
    """
    runs: dict[str, tuple[Run, int]] = {}
    single: dict[str, tuple[float, Any]] = {}
    memory: dict[str, float] = {}
    notes: dict[str, str] = {}
    for name, make in makers.items():
        try:
            with Peak() as peak:
                run = make()
                first = seconds(run)
            memory[name] = peak.mebibytes
            if first[0] > PATIENCE and name != unit:
                single[name] = (
                    first if first[0] > ENDURANCE else min(first, seconds(run), key=itemgetter(0))
                )
            else:
                runs[name] = run, _number(run, first, sample_s)
        except Exception as error:  # a peer may break in any way
            if name == unit:
                raise
            notes[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    samples, values = _rounds(runs, rounds, SETTLE if sample_s else 0.0, unit)
    found = {}
    for name, times in samples.items():  # ratios to the unit of the same round
        ratios = (spent / one for spent, one in zip(times, samples[unit], strict=True))
        found[name] = statistics.median(times), statistics.median(ratios)
    for name, (spent, value) in single.items():
        found[name], values[name] = (spent, spent / found[unit][0]), value
    return {
        name: Timed(*found[name], memory[name], values[name])
        if name in found
        else Timed(note=notes[name])
        for name in makers
    }


def _number(run: Run, first: tuple[float, Any], sample_s: float) -> int:
    """The number of calls that fill a sample; 0 for a task that is long or times itself."""
    if first[0] > 1.0 or sample_s == 0:
        return 0
    if isinstance(run(), Clocked):
        return 0
    return max(1, math.ceil(sample_s / max(seconds(run)[0], 1e-7)))


def _rounds(
    runs: Mapping[str, tuple[Run, int]], rounds: int, pause: float, unit: str
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    samples: dict[str, list[float]] = {name: [] for name in runs}
    values: dict[str, Any] = {}
    for _ in range(rounds):
        for name, (run, number) in runs.items():
            time.sleep(pause)
            spent, values[name] = seconds(run, max(number, 1))
            for _ in range(BEST_OF - 1 if name == unit and number else 0):
                again, values[name] = seconds(run, number)
                spent = min(spent, again)
            samples[name].append(spent)
    return samples, values


class Peak:
    """By how many MiB memory rose at most inside the block: of CUDA's allocator in use, else of the
    process (Linux).

    NaN where neither can be known.
    """

    mebibytes = math.nan

    def __enter__(self) -> Peak:
        gc.collect()
        self.cuda = torch.cuda.is_initialized()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated() / 2**20
        else:
            with suppress(OSError, AttributeError):
                # what was freed before goes back, so that its use anew shows
                ctypes.CDLL(None).malloc_trim(0)
                # the high-water mark falls to what is held now
                Path("/proc/self/clear_refs").write_text("5")
            self.before = _resident("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        after = torch.cuda.max_memory_allocated() / 2**20 if self.cuda else _resident("VmHWM")
        self.mebibytes = after - self.before


def _resident(field: str) -> float:
    """A line of the process's status, in MiB."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return math.nan
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(field)), math.nan)
