"""Trackers: they measure the geometry of the loss while a model trains, and change nothing."""

from __future__ import annotations

import math
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from lambdahat._core.check import require, require_choice, require_count, require_type
from lambdahat.problem import Problem, require_problem
from lambdahat.problem.batches import rng_untouched
from lambdahat.results import Estimate, Result, Status

UNITS = ("step", "epoch")
SAMPLES = 1000
BATCH = 1024  # samples of the sample's own batches, at most

NOT_FINITE = "not finite"

Pairs = list[list[float]]  # of a value and its weight
Row = dict[str, float | str | Pairs]


def is_failure(status: Any) -> bool:
    """Whether a row's status is a failure: an error, or numbers that are not finite."""
    return isinstance(status, str) and status not in Status.__members__


@runtime_checkable
class Tracker(Protocol):
    """Measures every ``every`` steps or epochs (``unit``); its numbers go into a row of metrics.

    ``measure`` returns numbers by column, the standard error of ``x`` under ``x_stderr``, and never
    raises. A tracker that remembers anything from one time to the next also has ``state_dict`` and
    ``load_state_dict``.
    """

    every: int
    unit: str

    @property
    def name(self) -> str: ...

    def measure(
        self, problem: Problem, optimizer: Any = None, epoch: int = 0, step: int = 0
    ) -> Row: ...


@dataclass(frozen=True)
class Cost:
    """Cost of one measurement, in products or gradients over ``samples`` samples.

    0 products are a closed form: the time of a few gradients.
    """

    fewest: int
    most: int
    unit: str
    samples: int

    def __str__(self) -> str:
        count = f"{self.fewest:,}" + (f" to {self.most:,}" if self.most != self.fewest else "")
        return f"{count} {self.unit} over {self.samples:,} samples"


@dataclass(frozen=True)
class TrackerReading:
    """One measurement; ``settings`` are numbers that the values depend on, with own columns, and
    ``distributions`` are columns of pairs of a value and its weight.
    """

    values: Mapping[str, float | Estimate]
    cost: int = 0
    status: Status = Status.CONVERGED
    result: Result | None = None
    settings: Mapping[str, float] = field(default_factory=dict)
    distributions: Mapping[str, Pairs] = field(default_factory=dict)


class SampledTracker(ABC):
    """Base of the trackers here: each measures on the same ``samples`` samples of the data, drawn
    once from ``seed``.

    ``samples=None`` takes all data. With ``keep`` the full results are saved as
    ``<name>-<step>.json`` in ``folder``, which whoever runs the tracker sets;
    ``lh.plot(lh.Result.load(path))`` draws them. What goes wrong in a measurement does not end the
    training: the row then has NaN, and the error as its status; the first time there is a warning.
    """

    name: ClassVar[str]
    unit_of_cost: ClassVar[str] = "products"

    def __init__(
        self,
        every: int = 1,
        unit: str = "epoch",
        samples: int | None = SAMPLES,
        seed: int = 0,
        keep: bool = False,
    ) -> None:
        self.every = require_count(every, "every")
        self.unit = require_choice(unit, "unit", UNITS)
        self.samples = None if samples is None else require_count(samples, "samples", least=2)
        self.seed = require_count(seed, "seed", least=0)
        require_type(keep, bool, "keep", "be True or False", "the folder is that of the run")
        self.keep = keep
        self.folder: Path | None = None
        self._drawn: tuple[weakref.ref[Problem], Problem] | None = None
        self._warned = False

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """The columns that every row has, failed or not."""

    @abstractmethod
    def _read(self, sample: Problem, optimizer: Any) -> TrackerReading:
        """Measure on the sample."""

    @abstractmethod
    def _bounds(self, sample: Problem) -> tuple[int, int]:
        """The fewest and the most products or gradients of one measurement."""

    def cost(self, problem: Problem) -> Cost:
        """The expected cost of one measurement."""
        with _apart(problem):
            sample = self.sample_of(problem)
            return Cost(*self._bounds(sample), self.unit_of_cost, sample.num_samples)

    def measure(
        self, problem: Problem, optimizer: Any = None, epoch: int = 0, step: int = 0
    ) -> Row:
        """Numbers by column, then ``<name>_cost``, ``<name>_seconds`` and ``<name>_status``."""
        start = time.perf_counter()
        row: Row = dict.fromkeys(self.columns, math.nan)
        try:
            require_problem(problem)
            with _apart(problem):
                reading = self._read(self.sample_of(problem), optimizer)
            flat = _flat(reading.values)
            row.update({**flat, **reading.settings, **reading.distributions})
            lost = not any(math.isfinite(value) for value in flat.values())
            cost, status = reading.cost, NOT_FINITE if lost else reading.status.name
            if self.keep and self.folder is not None and reading.result is not None:
                reading.result.save(self.folder / f"{self.name}-{step:08d}.json")
        except Exception as error:
            cost, status = 0, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if is_failure(status) and not self._warned:
            self._warned = True
            failed = f"the tracker {self.name!r} could not measure at step {step} ({status})"
            goes_on = "its columns are NaN there, and training goes on"
            later = "Later failures are in its status column only"
            warnings.warn(f"{failed}; {goes_on}. {later}", RuntimeWarning, stacklevel=2)
        seconds = time.perf_counter() - start
        own: Row = {"cost": float(cost), "seconds": seconds, "status": status}
        return row | {f"{self.name}_{key}": value for key, value in own.items()}

    def sample_of(self, problem: Problem) -> Problem:
        """The problem on the tracker's samples; it shares the parameters being trained."""
        if self._drawn is None or self._drawn[0]() is not problem:
            self._drawn = weakref.ref(problem), _sample_of(problem, self.samples, self.seed)
        return self._drawn[1]

    def state_dict(self) -> dict[str, Any]:
        """The state that the next measurement starts from: tensors and plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that ``state_dict`` gave."""
        del state  # nothing is remembered

    def __repr__(self) -> str:
        when = f"every={self.every}, unit={self.unit!r}"
        return f"{type(self).__name__}({when}, samples={self.samples}, seed={self.seed})"


def describe_tracker(tracker: Any) -> str:
    """A text that identifies a tracker, without how often it measures and what it keeps."""
    free = ("every", "unit", "keep", "folder")
    settings = vars(tracker) if isinstance(tracker, SampledTracker) else {}
    names = [name for name in settings if name not in free and not name.startswith("_")]
    text = ", ".join(f"{name}={settings[name]!r}" for name in names)
    return f"{type(tracker).__name__}({text})"


def _sample_of(problem: Problem, samples: int | None, seed: int) -> Problem:
    """A part of the data in few large batches; with batch statistics, in the problem's own."""
    if samples is None or not problem.has_data or samples >= problem.num_samples:
        return problem
    size = problem.batches.sizes[0] if problem.norm == "train" else BATCH
    try:
        return problem.subsample(samples, seed, min(size, samples))
    except RuntimeError:  # batches of other shapes, such as padded sequences, stay as they are
        return problem.subsample(samples, seed)


@contextmanager
def _apart(problem: Problem) -> Iterator[None]:
    """Measure in full precision with gradients on, and leave the RNG as it was."""
    with rng_untouched(), torch.enable_grad(), torch.autocast(problem.device.type, enabled=False):
        yield


def _flat(values: Mapping[str, float | Estimate]) -> dict[str, float]:
    """Estimates as two columns each, the value and its standard error."""
    row: dict[str, float] = {}
    for column, value in values.items():
        row[column] = float(value)
        if isinstance(value, Estimate):
            row[f"{column}_stderr"] = float(value.stderr)
    return row


def with_errors(*columns: str) -> tuple[str, ...]:
    """Columns, each followed by that of its standard error."""
    return tuple(name for column in columns for name in (column, f"{column}_stderr"))


TRACKERS: dict[str, type[SampledTracker]] = {}
"""The registered trackers by name."""


def register(*columns: str) -> Callable[[type[SampledTracker]], type[SampledTracker]]:
    """Register a tracker class under its name and under ``columns`` that may be asked for."""

    def add(kind: type[SampledTracker]) -> type[SampledTracker]:
        TRACKERS.update(dict.fromkeys((kind.name, *columns), kind))
        return kind

    return add


def make_tracker(
    name: str,
    every: int = 1,
    unit: str = "epoch",
    samples: int | None = SAMPLES,
    seed: int = 0,
    **settings: Any,
) -> SampledTracker:
    """The tracker of a quantity: one measurement every ``every`` epochs or steps, on ``samples``
    samples.

    What comes of the same computation has one tracker: "degeneracy" is a column of "spectrum",
    "overlap" and "drift" are columns of "top", and "wbic" is one of "llc". ``settings`` are those
    of the tracker, such as ``k=10`` for "top", and ``keep=True`` for all.

    >>> make_tracker("edge", every=10, unit="step")
    EdgeTracker(every=10, unit='step', samples=1000, seed=0)
    """
    kind = TRACKERS[require_choice(name, "name", TRACKERS)]
    # the named arguments of a tracker and its bases, apart from when and on what to measure
    names: dict[str, None] = {}
    for each in kind.__mro__:
        if issubclass(each, SampledTracker) and "__init__" in vars(each):
            names |= dict.fromkeys(signature(each.__init__).parameters)
    when = ("self", "common", "every", "unit", "samples", "seed")
    own = tuple(name for name in names if name not in when)
    strange = ", ".join(sorted(set(settings) - set(own)))
    expected = f"be those of {kind.__name__}: {', '.join(own)}"
    require(not strange, "settings", expected, strange, error=TypeError)
    return kind(every=every, unit=unit, samples=samples, seed=seed, **settings)


def make_trackers(names: str | Sequence[str], **common: Any) -> list[SampledTracker]:
    """The trackers of the named quantities, given as a list or a string such as "llc,trace".

    >>> [tracker.name for tracker in make_trackers("trace, llc, wbic")]
    ['trace', 'llc']
    """
    parts = [part.strip() for part in names.split(",")] if isinstance(names, str) else list(names)
    cure = f"choose from {', '.join(TRACKERS)}"
    require(bool(parts), "names", "name at least one tracker", "none", cure)
    trackers: dict[str, SampledTracker] = {}
    for part in parts:
        tracker = make_tracker(part, **common)
        trackers.setdefault(tracker.name, tracker)
    return list(trackers.values())


def gather_trackers(trackers: str | Sequence[Any]) -> list[Any]:
    """Trackers from trackers and names, such as "edge,trace"; those of names come last."""
    parts = trackers.split(",") if isinstance(trackers, str) else trackers
    require_type(parts, Sequence, "trackers", "be a list of trackers or names")
    names = [part for part in parts if isinstance(part, str)]
    made = [part for part in parts if not isinstance(part, str)]
    return [*made, *make_trackers(names)] if names else made
