"""Trackers in a training loop of your own, in Lightning and in the Hugging Face ``Trainer``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from lambdahat._core.check import require, require_count, require_type
from lambdahat._core.progress import ProgressFile
from lambdahat._core.storage import make_folder, read_json, unseal, write_sealed
from lambdahat.problem import Problem, require_problem
from lambdahat.problem.distributed import on_one_rank
from lambdahat.training._loop import require_same_run
from lambdahat.training.feeding import contents
from lambdahat.training.history import Metrics, Run
from lambdahat.training.loggers import Loggers, numbers, require_loggers
from lambdahat.training.trackers import Row, Tracker, describe_tracker, gather_trackers

MEASUREMENTS = "measurements"  # the folder of the full results, as ``fit`` names it


class Tracking:
    """Counts steps and epochs, measures what is due and keeps the rows; see ``tracking``."""

    def __init__(
        self,
        problem: Problem,
        trackers: str | Sequence[Tracker | str],
        optimizer: Any = None,
        folder: str | Path | None = None,
        steps_per_epoch: int | None = None,
        loggers: Sequence[Any] = (),
    ) -> None:
        require_problem(problem)
        self.loggers = Loggers(loggers)
        self.problem, self.optimizer = problem, optimizer
        self.trackers = _make_all(trackers)
        self._descriptions = [describe_tracker(each) for each in self.trackers]
        if steps_per_epoch is not None:
            require_count(steps_per_epoch, "steps_per_epoch")
        self.steps_per_epoch = steps_per_epoch
        self.folder = None if folder is None else Path(folder)
        self.metrics = Metrics(self.folder)
        self.steps = self.epochs = 0
        for tracker in self.trackers:
            if self.folder is not None and hasattr(tracker, "folder"):
                tracker.folder = self.folder / MEASUREMENTS

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows so far."""
        return self.metrics.rows

    @property
    def run(self) -> Run:
        """The rows so far as a result, which ``lh.plot`` draws."""
        by_step = self.steps_per_epoch is None and self.steps > 0
        about = {"progress": "step" if by_step else "epoch"}
        folder = "" if self.folder is None else str(self.folder)
        return Run(tuple(self.rows), folder=folder, about=about)

    def start(self) -> Row | None:
        """Measure everything once, before the first step."""
        return self._record("start", self.trackers, {})

    def step(self, **metrics: float) -> Row | None:
        """Count a step and measure what is due; your own ``metrics`` go into the row."""
        return self.reach("step", self.steps + 1, self.epochs, metrics)

    def epoch(self, **metrics: float) -> Row | None:
        """Count the end of an epoch and measure what is due."""
        return self.reach("epoch", self.steps, self.epochs + 1, metrics)

    def reach(
        self, unit: str, steps: int, epochs: int, metrics: Mapping[str, float] | None = None
    ) -> Row | None:
        """Measure what is due at the end of a step or an epoch (``unit``), given both totals."""
        self.steps, self.epochs = steps, epochs
        count = steps if unit == "step" else epochs
        own = [tracker for tracker in self.trackers if tracker.unit == unit]
        return self._record(unit, [each for each in own if count % each.every == 0], metrics or {})

    def _record(
        self, kind: str, due: Sequence[Tracker], metrics: Mapping[str, float]
    ) -> Row | None:
        if not due and not metrics:
            return None
        # epochs, and fractions of them where their length is known; else steps
        length = self.steps_per_epoch
        progress = self.steps / length if length else float(self.steps or self.epochs)
        row: dict[str, Any] = {"kind": kind, "epoch": self.epochs, "step": self.steps}
        row |= {"progress": progress, **metrics}
        groups = getattr(self.optimizer, "param_groups", None)
        if groups and "lr" in groups[0]:
            row.setdefault("learning_rate", float(groups[0]["lr"]))
        for tracker in due:
            row |= tracker.measure(self.problem, self.optimizer, self.epochs, self.steps)
        kept = self.metrics.add(row)
        self.loggers.log(kept)
        return kept

    def state_dict(self) -> dict[str, Any]:
        """The counters, the length of the rows on disk, and the trackers' own states."""
        states: list[Any] = [getattr(each, "state_dict", dict)() for each in self.trackers]
        counts = {"steps": self.steps, "epochs": self.epochs, "metrics": self.metrics.length}
        return {**counts, "trackers": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; rows written later are dropped, as they will come again."""
        count, came = len(self.trackers), len(state["trackers"])
        cure = "make the same trackers as then"
        require(came == count, "state", f"hold {count} trackers", str(came), cure)
        self.steps, self.epochs = state["steps"], state["epochs"]
        self.metrics.cut(state["metrics"])
        self._open_loggers()
        for tracker, own in zip(self.trackers, state["trackers"], strict=True):
            getattr(tracker, "load_state_dict", lambda _: None)(own)

    def begin(self, resume: bool = False, upto: int | None = None) -> Row | None:
        """Measure the start, or with ``resume`` continue the rows in the folder up to ``upto``."""
        length = self.metrics.length
        came = f"{self.folder}, which holds a run"
        cure = "go on with it by resuming, or choose another folder"
        require(resume or length == 0, "folder", "be new or empty", came, cure)
        if self.folder is not None:
            # note in `tracking.json` what is tracked; refuse rows of other data or trackers
            path = self.folder / "tracking.json"
            now = {"contents": contents(self.problem), "trackers": self._descriptions}
            if length and path.is_file():
                require_same_run(unseal(read_json(path), path, sealed=False), now)
            make_folder(self.folder)
            write_sealed(path, {"format": "lambdahat-tracking", **now})
        if length == 0:
            self._open_loggers()
            return self.start()
        self.metrics.keep_steps(upto)
        if self.rows:
            self.steps, self.epochs = self.rows[-1]["step"], self.rows[-1]["epoch"]
        self._open_loggers()
        return None

    def _open_loggers(self) -> None:
        self.loggers.open(self.folder, self.steps, {"trackers": self._descriptions})


@contextmanager
def tracking(
    problem: Problem,
    trackers: str | Sequence[Tracker | str],
    optimizer: Any = None,
    folder: str | Path | None = None,
    *,
    steps_per_epoch: int | None = None,
    resume: bool = False,
    loggers: Sequence[Any] = (),
) -> Iterator[Tracking]:
    """Track quantities in your own training loop: call ``step()`` and ``epoch()`` at the end of
    each.

    The problem is one of the model that is trained: it shares the parameters, so it follows them.
    ``trackers`` are trackers or their names ("edge,trace"). Everything is measured once at the
    start. Rows are in ``rows``, and with a ``folder`` also in ``metrics.jsonl`` and ``metrics.csv``
    there; at the end ``training.json`` holds them as a ``Run``, which ``lh.plot`` draws over
    ``progress``: epochs where ``steps_per_epoch`` tells their length, else steps. ``loggers`` are
    those of ``fit``.

    ``resume`` goes on after the last row in the folder. For the same numbers to the last digit,
    save ``state_dict()`` with the model and load it within the block.
    """
    track = Tracking(problem, trackers, optimizer, folder, steps_per_epoch, loggers)
    with closing(track.loggers):
        track.begin(resume)
        path = None if track.folder is None else track.folder / "progress.json"
        try:
            with ProgressFile(path, kind="training"):
                yield track
        finally:
            if track.folder is not None:
                track.run.save(track.folder / "training.json")


def _make_all(trackers: str | Sequence[Tracker | str]) -> list[Tracker]:
    """Trackers from trackers and names."""
    made: list[Tracker] = gather_trackers(trackers)
    for tracker in made:
        has, cure = "have name, every, unit and measure", 'make one with make_tracker("trace")'
        require_type(tracker, Tracker, "trackers", has, cure)
    require(bool(made), "trackers", "hold at least one", "none")
    known = [tracker.name for tracker in made]
    twice = sorted({name for name in known if known.count(name) > 1})
    expected = "be one of a kind, for a kind has one set of columns"
    require(not twice, "trackers", expected, ", ".join(twice))
    return made


def _not_installed(tracker: str, package: str) -> ModuleNotFoundError:
    """The error for a tracker whose framework is missing, with the command that installs it."""
    cure = f'pip install "lambdahat[{package}]"'
    return ModuleNotFoundError(f"{tracker} needs {package}, which is not installed; {cure}")


def LightningTracker(
    trackers: str | Sequence[Tracker | str],
    problem_fn: Callable[[Any], Problem],
    folder: str | Path | None = None,
    loggers: Sequence[Any] = (),
) -> Any:
    """A ``lightning.pytorch.Callback`` that measures during training and logs to the trainer's
    loggers.

    ``problem_fn(module)`` makes the problem when training starts. Give it the network inside the
    module, as ``lambda module: lh.Problem(module.network, "cross_entropy", data)``: a module also
    holds its trainer, which would be copied. Steps are those of the optimiser, and of several
    optimisers the first counts. On several devices the first measures. With ``folder`` the rows are
    also written there; the trackers' states are part of Lightning's checkpoints. ``loggers`` are
    those of ``fit``, beside the trainer's own.
    """
    try:
        from lightning.pytorch import Callback
    except ModuleNotFoundError as error:
        raise _not_installed("LightningTracker", "lightning") from error

    example = 'such as lambda module: lh.Problem(module.network, "cross_entropy", data)'
    require_type(problem_fn, Callable, "problem_fn", "be a function of the module", example)
    require_loggers(loggers)

    class Measuring(Callback):  # type: ignore[misc,unused-ignore]
        """Measures at the start, after steps and after epochs."""

        def __init__(self) -> None:
            self.tracking: Tracking | None = None
            self._loaded: dict[str, Any] = {}

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if not trainer.is_global_zero:
                return
            with on_one_rank():
                problem = problem_fn(pl_module)
            optimizer = trainer.optimizers[0]
            self.tracking = Tracking(problem, trackers, optimizer, folder, loggers=loggers)
            if self._loaded:
                self.tracking.load_state_dict(self._loaded)
            else:
                self._log(trainer, self.tracking.begin())

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            track = self.tracking
            # not within accumulated gradients
            if track is not None and trainer.global_step > track.steps:
                self._log(trainer, track.reach("step", trainer.global_step, track.epochs))

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if self.tracking is not None:
                epochs = trainer.current_epoch + 1
                self._log(trainer, self.tracking.reach("epoch", trainer.global_step, epochs))

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            if self.tracking is not None:
                self.tracking.loggers.close()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self.on_train_end(trainer, pl_module)

        def state_dict(self) -> dict[str, Any]:
            return {} if self.tracking is None else self.tracking.state_dict()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self._loaded = dict(state_dict)

        def _log(self, trainer: Any, row: Row | None) -> None:
            values = {} if row is None else numbers(row)
            for logger in trainer.loggers if values else ():
                logger.log_metrics(values, step=trainer.global_step)

    return Measuring()


def HuggingFaceTracker(
    trackers: str | Sequence[Tracker | str],
    problem_fn: Callable[[Any], Problem],
    folder: str | Path | None = None,
    loggers: Sequence[Any] = (),
) -> Any:
    """A ``transformers.TrainerCallback`` that measures during training and adds to
    ``state.log_history``.

    ``problem_fn(model)`` makes the problem when training starts: ``lambda model: lh.Problem(model,
    "model", batches)``, batches a list of dicts of tensors. Steps are those of the optimiser. On
    several processes the first measures. With ``folder`` the rows are also written there, and a run
    resumed from a checkpoint goes on after its step. ``loggers`` are those of ``fit``.
    """
    try:
        from transformers import TrainerCallback
    except ModuleNotFoundError as error:
        raise _not_installed("HuggingFaceTracker", "transformers") from error

    example = 'such as lambda model: lh.Problem(model, "model", batches)'
    require_type(problem_fn, Callable, "problem_fn", "be a function of the model", example)
    require_loggers(loggers)

    class Measuring(TrainerCallback):  # type: ignore[misc,unused-ignore]
        """Measures at the start, after steps and after epochs."""

        def __init__(self) -> None:
            self.tracking: Tracking | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if not state.is_world_process_zero:
                return
            with on_one_rank():
                problem = problem_fn(given["model"])
            self.tracking = Tracking(problem, trackers, None, folder, loggers=loggers)
            step = state.global_step
            self._follow(given)
            self._log(state, self.tracking.begin(resume=step > 0, upto=step))

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self._reach(state, given, "step")

        def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self._reach(state, given, "epoch")

        def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if self.tracking is not None:
                self.tracking.loggers.close()

        def _reach(self, state: Any, given: Any, unit: str) -> None:
            if self.tracking is not None:
                self._follow(given)
                epochs = self.tracking.epochs if unit == "step" else round(state.epoch)
                self._log(state, self.tracking.reach(unit, state.global_step, epochs))

        def _follow(self, given: Any) -> None:
            """Find the trainer's optimiser inside accelerate's wrapper, once it exists."""
            optimizer = given.get("optimizer")
            if self.tracking is not None:
                self.tracking.optimizer = getattr(optimizer, "optimizer", optimizer)

        def _log(self, state: Any, row: Row | None) -> None:
            if row is not None:
                state.log_history.append({**numbers(row), "step": state.global_step})

    return Measuring()
