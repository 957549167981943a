"""``fit``: the training loop, its settings, and the checkpoints from which it resumes."""

from __future__ import annotations

import inspect
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lambdahat._core.check import describe, require, require_choice, require_count, require_positive
from lambdahat._core.progress import report
from lambdahat._core.rng import derived_seed
from lambdahat.problem import DEFAULT_BATCH, Problem, require_problem
from lambdahat.problem.batches import Batch, Batches, make_batches, rng_untouched
from lambdahat.problem.network import BATCH_NORMS, accumulating
from lambdahat.results import Status
from lambdahat.training.checkpoints import Checkpoint, Checkpoints, alone_in, read, write_tensors
from lambdahat.training.feeding import Augment, Feed, contents, same_contents
from lambdahat.training.history import BestSoFar, EarlyStopping, Run
from lambdahat.training.metrics import Metrics, make_loggers, require_loggers
from lambdahat.training.stepping import (
    PRECISIONS,
    Diverged,
    Judge,
    Stepper,
    Tally,
    TrainingSubject,
    chain,
    joint_norm,
    modes,
)
from lambdahat.training.trackers import described_tracker

# statistics of more samples cost a pass and change little (§7.3.1, spectral thesis)
REFRESH_SAMPLES = 10_000


def averaged_model(
    subject: TrainingSubject, optimizer: Any, averaging: Any, feed: Feed
) -> nn.Module | None:
    """A copy of the averaged model with its own batch-norm statistics; None without one."""
    model: nn.Module | None = None
    if averaging is not None and averaging.count:
        model = averaging.model
    elif subject.model is not None and getattr(optimizer, "averaging", False):
        model = optimizer.averaged_model(subject.model)
    if model is not None:
        _refresh(subject, model, feed)
    return model


@torch.no_grad()
def _refresh(subject: TrainingSubject, model: nn.Module, feed: Feed) -> None:
    """Recompute batch-norm statistics for the averaged weights (§7.3.1)."""
    layers = [
        layer
        for layer in model.modules()
        if isinstance(layer, BATCH_NORMS) and layer.track_running_stats
    ]
    if not layers:
        return
    with modes(model, training=False), accumulating(layers):
        for layer in layers:
            layer.reset_running_stats()
        for batch in _some(feed):
            subject.forward(batch, model)


def _some(feed: Feed) -> Iterator[Batch]:
    """Batches of about ``REFRESH_SAMPLES`` samples."""
    for group in islice(feed.epoch(0), max(1, REFRESH_SAMPLES // feed.step_samples)):
        yield from group


UNITS = ("epoch", "step")
MOVED = ("lr", "momentum", "betas", "average_start")  # by schedules, SpectralSGD, start_averaging()
LATER = ("contents", "trackers")  # which runs of early versions do not tell
# may change from one call to the next
HOW_LONG = ("epochs", "keep", "checkpoint_every", "checkpoint_steps")


@dataclass(frozen=True)
class FitSettings:
    """Numbers and names that ``fit`` takes; see there."""

    epochs: int
    batch_size: int | None = 128
    precision: str = "float32"
    accumulate: int = 1
    clip: float | None = None
    schedule_unit: str = "epoch"
    curvature_samples: int | None = None
    seed: int = 0
    keep: int = 2
    checkpoint_every: int = 1
    checkpoint_steps: int | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "accumulate", "keep", "checkpoint_every"):
            require_count(getattr(self, name), name)
        for name in ("batch_size", "curvature_samples", "checkpoint_steps"):
            if getattr(self, name) is not None:
                require_count(getattr(self, name), name)
        if self.clip is not None:
            require_positive(self.clip, "clip")
        require_count(self.seed, "seed", least=0)
        require_choice(self.precision, "precision", PRECISIONS)
        require_choice(self.schedule_unit, "schedule_unit", UNITS)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What decides the numbers."""
        return {name: value for name, value in asdict(self).items() if name not in HOW_LONG}


def optimizer_settings(optimizer: Any) -> dict[str, Any]:
    """What the optimiser was made with, by name, a value for each parameter group.

    Of what a schedule or the optimiser itself moves it is the value at construction.
    """
    names: dict[str, None] = {}
    inner = optimizer
    while inner is not None:
        names |= dict.fromkeys(inspect.signature(type(inner)).parameters)
        inner = getattr(inner, "base", None)
    return {
        name: [_initial(optimizer, group, name) for group in optimizer.param_groups]
        for name in names
        if name in optimizer.param_groups[0] and name != "params"
    }


def _initial(optimizer: Any, group: Mapping[str, Any], name: str) -> str:
    value = optimizer.defaults.get(name, group.get(name)) if name in MOVED else group.get(name)
    return repr(group.get(f"initial_{name}", value))


def described(rule: Any) -> str:
    """An object in words that are the same in another process."""
    return (
        repr(rule)
        if any("__repr__" in vars(kind) for kind in type(rule).__mro__[:-1])
        else type(rule).__name__
    )


def require_same_run(stored: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise unless a stored run had the settings, data and model of this one."""
    for name, value in now.items():
        if name in LATER and name not in stored:
            continue
        was = stored.get(name)
        if name == "contents":
            if was is None or not same_contents(was, value):
                raise ValueError(
                    "folder must hold a run on the same data, got one on other samples or labels;"
                    " give the data of that run, or choose another folder"
                )
            continue
        if name == "optimizer settings" and isinstance(was, Mapping):
            require_same_run(was, value)
            continue
        if was != value:
            raise ValueError(
                f"folder must hold a run with {name} = {value}, got one with {name} = {was}; call"
                " fit as that run did, or choose another folder"
            )


class Trainer:
    """One run: everything ``fit`` was given, and where it has got to."""

    def __init__(
        self,
        problem: Problem,
        optimizer: Any,
        settings: FitSettings,
        *,
        schedule: Any,
        regularizers: Sequence[Any],
        averaging: Any,
        validation: Any,
        early_stopping: EarlyStopping | None,
        trackers: Sequence[Any],
        loggers: Sequence[Any],
        augment: Augment | None,
        accuracy: Judge | None,
        folder: Path | None,
    ) -> None:
        self.problem, self.optimizer, self.settings = problem, optimizer, settings
        self.schedule, self.averaging, self.early_stopping = schedule, averaging, early_stopping
        self.trackers, self.folder, self._asked_loggers = list(trackers), folder, loggers
        self.loggers: list[Any] = []
        self.subject = TrainingSubject(problem, settings.precision, accuracy)
        self.feed = Feed(problem, settings.batch_size, settings.accumulate, settings.seed, augment)
        self.stepper = Stepper(
            self.subject,
            optimizer,
            self.feed,
            precision=settings.precision,
            clip=settings.clip,
            regularizers=regularizers,
            curvature_samples=settings.curvature_samples,
        )
        self.validation = None if validation is None else _held_out(problem, validation)
        self.metrics = Metrics(folder)
        self.checkpoints = (
            None if folder is None else Checkpoints(folder / "checkpoints", settings.keep)
        )
        metric = "validation_loss" if validation is not None else "loss"
        least = 0.0 if early_stopping is None else early_stopping.least
        self.about = self._about()
        self.best = BestSoFar(metric if early_stopping is None else early_stopping.metric, least)
        self.epoch = self.batch = self.step = 0
        self.tally = Tally(problem.device)
        self.watch = Stopwatch()
        self.ended = ""
        self.averaged: dict[str, Any] = {}
        self._initial: list[Tensor] = []
        self._initial_digest = ""
        self._best_tensors: dict[str, Tensor] = {}

    def run(self, resume: bool) -> Run:
        """Train to the end, from the beginning or from the newest whole checkpoint."""
        with (
            alone_in(self.folder),
            modes(self.subject.model, True),
            own_randomness(self.settings.seed),
        ):
            try:
                self._begin(resume)
                while not self.ended:
                    self._train_epoch()
            finally:
                for logger in self.loggers:
                    getattr(logger, "close", lambda: None)()
        if self.early_stopping is not None and self.early_stopping.restore:
            self._restore_best()
        run = self._result()
        if self.folder is not None:
            self._write_average(self.folder / "averaged.safetensors")
            run.save(self.folder / "training.json")
        return run

    def _write_average(self, path: Path) -> None:
        """The averaged weights, where there are any, as a state dict."""
        average = averaged_model(self.subject, self.optimizer, self.averaging, self.feed)
        if average is not None:
            write_tensors(path, average.state_dict(), sealed=True)

    def _begin(self, resume: bool) -> None:
        found = None
        if self.checkpoints is not None:
            used = bool(self.checkpoints.paths()) or self.metrics.length > 0
            if not resume and used:
                raise ValueError(
                    f"folder must be new or empty, got {self.folder}, which holds a run; pass"
                    " resume=True (--resume) to go on with it, or choose another folder"
                )
            found = self.checkpoints.newest(self._fault) if resume else None
        if found is None:
            self._initial = [parameter.detach().clone() for parameter in self.stepper.parameters]
            if self.checkpoints is not None:
                self._initial_digest = self.checkpoints.write_initial(self._named(self._initial))
                self.metrics.cut(0)
        else:
            self._resume(found)
        self._place_trackers()
        self.loggers = make_loggers(
            self._asked_loggers, self.folder, self.step, self.settings.fingerprint
        )

    def _place_trackers(self) -> None:
        for tracker in self.trackers:
            if self.folder is not None and hasattr(tracker, "folder"):
                tracker.folder = self.folder / "measurements"

    def _fault(self, state: Mapping[str, Any]) -> str:
        """Why a whole checkpoint cannot be gone on from: its rows are no longer all there."""
        return (
            ""
            if self.metrics.covers(state["metrics"])
            else "counts on rows that metrics.jsonl does not hold"
        )

    def _resume(self, found: Checkpoint) -> None:
        if found.damaged:
            warnings.warn(
                f"{'; '.join(found.damaged)}: resuming from {found.path.name}",
                RuntimeWarning,
                stacklevel=5,
            )
        state = found.state
        require_same_run(state["settings"], self.about)
        assert self.checkpoints is not None
        self._initial_digest = state["initial"]
        initial = self.checkpoints.read_initial(self._initial_digest)
        self._initial = [
            initial[str(i)].to(p.device) for i, p in enumerate(self.stepper.parameters)
        ]
        self._load(state)
        self.checkpoints.forget_after(found.step)  # nothing on disk is changed before all is read
        self.checkpoints.name_best(self.best.row.get("step"))
        self.metrics.cut(state["metrics"])

    def _named(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        return {str(i): tensor for i, tensor in enumerate(tensors)}

    def _about(self) -> dict[str, Any]:
        """What must be the same for a run to go on, as it is before the first step."""
        stopping = self.early_stopping
        return {
            **self.settings.fingerprint,
            "samples": self.problem.num_samples,
            "data": self.feed.digest(),
            "contents": contents(self.problem) if self.folder is not None else None,
            "trackers": [described_tracker(tracker) for tracker in self.trackers],
            "optimizer": type(self.optimizer).__name__,
            "optimizer settings": optimizer_settings(self.optimizer),
            "regularizers": [described(rule) for rule in self.stepper.regularizers],
            "early stopping": None if stopping is None else asdict(stopping),
            "parameters": {
                name: tuple(tensor.shape) for name, tensor in self.subject.tensors.items()
            },
        }

    def _parts(self) -> dict[str, Any]:
        """What has a state of its own, by name."""
        found = {
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "averaging": self.averaging,
            "scaler": self.stepper.scaler,
            "best": self.best,
        }
        found |= {
            f"tracker {i} ({tracker.name})": tracker for i, tracker in enumerate(self.trackers)
        }
        found |= {f"regularizer {i}": rule for i, rule in enumerate(self.stepper.regularizers)}
        return {name: part for name, part in found.items() if hasattr(part, "state_dict")}

    def _state(self) -> dict[str, Any]:
        device = self.problem.device
        cuda = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
        return {
            "settings": self.about,
            "epoch": self.epoch,
            "batch": self.batch,
            "step": self.step,
            "ended": self.ended,
            "seconds": self.watch.seconds,
            "metrics": self.metrics.sync(),
            "initial": self._initial_digest,
            "averaged": self.averaged,
            "tally": self.tally.state_dict(),
            "rng": {"cpu": torch.get_rng_state(), "cuda": cuda},
            "model": self.subject.tensors,
            "parts": {name: part.state_dict() for name, part in self._parts().items()},
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.batch, self.step = state["epoch"], state["batch"], state["step"]
        self.watch.seconds, self.averaged = state["seconds"], state["averaged"]
        stopped = state["ended"] not in ("", "epochs")
        self.ended = state["ended"] if stopped or self.epoch >= self.settings.epochs else ""
        self.subject.load(state["model"])
        self.tally.load_state_dict(state["tally"])
        parts, stored = self._parts(), state["parts"]
        strange = sorted(set(parts) ^ set(stored))
        if strange:
            raise ValueError(
                "folder must hold a run of the same parts, got one"
                f" {'with' if strange and strange[0] in stored else 'without'}"
                f" {', '.join(strange)}; call fit as that run did"
            )
        for name, part in parts.items():
            part.load_state_dict(stored[name])
        torch.set_rng_state(state["rng"]["cpu"])
        for cuda in state["rng"]["cuda"]:
            torch.cuda.set_rng_state(cuda, self.problem.device)

    def _train_epoch(self) -> None:
        total = self.settings.epochs * self.feed.steps
        note, diverged = _note(self.metrics.rows), False
        with self.watch.running():
            for group in self.feed.epoch(self.epoch, self.batch):
                try:
                    self.stepper(group, self.step, self.tally)
                except Diverged:
                    diverged = True
                    break
                self.step, self.batch = self.step + 1, self.batch + 1
                self._advance("step")
                report("training", self.step, total, note)
                with self.watch.paused():
                    self._between()
                if self.ended:
                    return
            means = self.tally.read()  # waits for the device
        self._end_epoch({**means, "loss": math.nan} if diverged else means)

    def _advance(self, unit: str) -> None:
        """Move the schedule and the average that count in this unit."""
        if self.schedule is not None and self.settings.schedule_unit == unit and not self._plateau:
            self.schedule.step()
        if self.averaging is not None and self.averaging.unit == unit:
            self.averaging.update()

    @property
    def _plateau(self) -> bool:
        return isinstance(self.schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)

    def _between(self) -> None:
        """After a step: what is measured every few steps, and a checkpoint within the epoch."""
        found = self._track("step", self.step)
        if found:
            self._log(
                {
                    "kind": "step",
                    "epoch": self.epoch + 1,
                    "step": self.step,
                    "progress": self.epoch + self.batch / self.feed.steps,
                    **found,
                }
            )
        every = self.settings.checkpoint_steps
        if (
            self.checkpoints is not None
            and every
            and self.step % every == 0
            and self.batch < self.feed.steps
        ):
            if bool(self.tally.is_finite()):
                self.checkpoints.write(self.step, self._state())
            else:
                self._end_epoch(self.tally.read())

    def _track(self, unit: str, count: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for tracker in self.trackers:
            if tracker.unit == unit and count % tracker.every == 0:
                with rng_untouched():
                    found |= tracker.measure(
                        self.problem, self.optimizer, self.epoch + 1, self.step
                    )
        return found

    def _log(self, row: Mapping[str, Any]) -> None:
        kept = self.metrics.add(row)
        for logger in self.loggers:
            logger.log(kept)

    def _end_epoch(self, means: Mapping[str, float]) -> None:
        rate = float(self.optimizer.param_groups[0]["lr"])
        self._advance("epoch")
        diverged = not math.isfinite(means["loss"])
        row: dict[str, Any] = {
            "kind": "epoch",
            "epoch": self.epoch + 1,
            "step": self.step,
            "progress": float(self.epoch + 1),
            **means,
        }
        if not diverged:
            row |= self._validated()
        row |= {**self._norms(), "learning_rate": rate, "seconds": self.watch.seconds}
        if self._plateau:
            self.schedule.step(row.get("validation_loss", row["loss"]))
        if not diverged:
            row |= self._track("epoch", self.epoch + 1)
        self._log(row)
        if diverged:
            self.ended = "diverged"
            return
        improved = self.best.look(row, self._may_come(self.best.metric))
        self.epoch, self.batch = self.epoch + 1, 0
        self.tally = Tally(self.problem.device)
        self.ended = self._verdict()
        self._keep(improved)

    def _may_come(self, metric: str) -> bool:
        """Whether another epoch can have a tracker's or an average's column that this one lacks."""
        averages = self.averaging is not None or hasattr(self.optimizer, "averaged_parameters")
        if self.validation is not None and averages and metric.startswith("average_validation_"):
            return True
        early = any(
            tracker.unit == "epoch" and self.epoch + 1 < tracker.every for tracker in self.trackers
        )
        return early or any(row["kind"] == "epoch" and metric in row for row in self.metrics.rows)

    def _validated(self) -> dict[str, float]:
        """Loss and accuracy on held-out data, of the model and of its average."""
        if self.validation is None:
            return {}
        row = {
            f"validation_{name}": value
            for name, value in self.subject.evaluate(self.validation).items()
        }
        average = averaged_model(self.subject, self.optimizer, self.averaging, self.feed)
        if average is not None:
            found = self.subject.evaluate(self.validation, average)
            self.averaged = {f"average_validation_{name}": value for name, value in found.items()}
            row |= self.averaged
        if self.optimizer.param_groups[0].get("patience") and hasattr(self.optimizer, "record"):
            self.optimizer.record(row.get("average_validation_loss", row["validation_loss"]))
        return row

    @torch.no_grad()
    def _norms(self) -> dict[str, float]:
        parameters = [parameter.detach() for parameter in self.stepper.parameters]
        moved = list(torch._foreach_sub(parameters, self._initial))
        largest = torch.stack(
            [parameter.abs().max().double() for parameter in parameters if parameter.numel()]
        ).max()
        found = torch.stack([joint_norm(parameters), largest, joint_norm(moved)]).tolist()
        return dict(zip(("norm", "max_norm", "distance"), found, strict=True))

    def _verdict(self) -> str:
        waited = (
            self.early_stopping is not None and self.best.waited >= self.early_stopping.patience
        )
        if waited or getattr(self.optimizer, "stopped", False):
            return "early stopping"
        return "epochs" if self.epoch >= self.settings.epochs else ""

    def _keep(self, improved: bool) -> None:
        """Write a checkpoint if one is due: every few epochs, at the end, and at a new best."""
        restore = self.early_stopping is not None and self.early_stopping.restore
        if improved and restore and self.checkpoints is None:
            self._best_tensors = {
                name: tensor.detach().clone() for name, tensor in self.subject.tensors.items()
            }
        due = self.epoch % self.settings.checkpoint_every == 0 or bool(self.ended)
        if self.checkpoints is not None and (due or improved):
            self.checkpoints.write(self.step, self._state(), best=improved)

    def _restore_best(self) -> None:
        path = None if self.checkpoints is None else self.checkpoints.best()
        tensors = self._best_tensors if path is None else read(path)[1]["model"]
        if tensors:
            self.subject.load(tensors)
        elif self.best.row:
            warnings.warn(
                "the checkpoint of the best epoch is gone: the model stays at its last",
                RuntimeWarning,
                stacklevel=4,
            )

    def _result(self) -> Run:
        status = Status.TRAINING_DIVERGED if self.ended == "diverged" else Status.CONVERGED
        return Run(
            tuple(self.metrics.rows),
            self.ended,
            self.best.row,
            self.averaged,
            "" if self.folder is None else str(self.folder),
            self.about,
            status,
        )


class Stopwatch:
    """Seconds spent in training steps, without what is measured between them."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time inside the block."""
        self._since = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - self._since

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within ``running``: leave out the time inside the block."""
        self.seconds += time.perf_counter() - self._since
        try:
            yield
        finally:
            self._since = time.perf_counter()


@contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """Seed torch's global generators, which dropout uses; the caller's are restored afterwards."""
    with rng_untouched():
        torch.manual_seed(derived_seed(seed, "training"))
        yield


def _held_out(problem: Problem, validation: Any) -> Batches:
    if isinstance(validation, Problem):
        return validation.batches
    if isinstance(validation, Batches):
        return validation
    default = DEFAULT_BATCH.get(problem.device.type, 1024)
    return make_batches(validation, None, default, problem.device, None)


def _note(rows: Sequence[Mapping[str, Any]]) -> str:
    """The last epoch in a few words."""
    last = next((row for row in reversed(rows) if row["kind"] == "epoch"), None)
    if last is None:
        return ""
    accuracy = last.get("validation_accuracy", last["accuracy"])
    return f"epoch {last['epoch']}, loss {last['loss']:.4g}" + (
        f", accuracy {accuracy:.1%}" if accuracy == accuracy else ""
    )


def fit(
    problem: Problem,
    optimizer: torch.optim.Optimizer,
    epochs: int,
    *,
    batch_size: int | None = 128,
    schedule: Any = None,
    schedule_unit: str = "epoch",
    regularizers: Sequence[Any] = (),
    averaging: Any = None,
    validation: Any = None,
    early_stopping: EarlyStopping | int | None = None,
    precision: str = "float32",
    accumulate: int = 1,
    clip: float | None = None,
    augment: Augment | None = None,
    accuracy: Judge | None = None,
    trackers: Sequence[Any] = (),
    loggers: Sequence[Any] = (),
    curvature_samples: int | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    keep: int = 2,
    checkpoint_every: int = 1,
    checkpoint_steps: int | None = None,
    seed: int = 0,
) -> Run:
    """Train the model of ``problem``, in place, for ``epochs`` passes over the problem's data.

    The model runs in training mode, with dropout and batch-norm statistics, and gets its modes back
    at the end. Each epoch sees the samples in an order that ``(seed, epoch)`` decides, in batches
    of ``batch_size``, ``accumulate`` of them to a step; ``batch_size=None`` takes the problem's own
    batches. What the model draws from torch's generators comes from ``seed`` too, and the caller's
    generators are left as they were.

    - ``schedule``: a torch learning-rate scheduler, stepped once per ``schedule_unit``, "epoch" or
      "step".
    - ``regularizers``, ``averaging``: from ``lambdahat.optim``. An optimiser that measures
      curvature is given a problem on ``curvature_samples`` samples (as many as a step has), drawn
      anew, whenever it is ``due``.
    - ``validation``: held-out data, evaluated after every epoch. ``early_stopping``: an
      ``EarlyStopping``, or its patience.
    - ``precision``: "bfloat16" and "float16" run the forward pass under ``torch.autocast``, the
      latter with a scaled loss. ``clip`` bounds the norm of the gradient.
    - ``augment(inputs, generator)`` changes the inputs of each batch; ``accuracy(output, target)``
      says which targets were met, where that is not what the loss suggests.
    - ``trackers`` measure along the way; ``loggers`` are "tensorboard", "wandb" or objects with
      ``log(row)``.
    - ``folder``: rows go to ``metrics.jsonl`` and ``metrics.csv`` there, checkpoints to
      ``checkpoints``, the ``keep`` newest and the best, every ``checkpoint_every`` epochs and
      ``checkpoint_steps`` steps. With ``resume`` a run that was killed goes on from the newest
      whole one, to the same bits on the same machine; the call must be the same but for ``epochs``.

    A loss that is not finite ends the run at the end of its epoch, with the status
    ``TRAINING_DIVERGED``.
    """
    require_problem(problem)
    settings = FitSettings(
        epochs,
        batch_size,
        precision,
        accumulate,
        clip,
        schedule_unit,
        curvature_samples,
        seed,
        keep,
        checkpoint_every,
        checkpoint_steps,
    )
    _require_trainable(problem, optimizer)
    _require_schedule(schedule, optimizer)
    _require_parts(regularizers, averaging, trackers)
    require_loggers(loggers)
    if resume and folder is None:
        raise ValueError("resume must come with the folder of the run, got no folder")
    if checkpoint_steps is not None and folder is None:
        raise ValueError("checkpoint_steps must come with a folder, got none")
    patient = any(group.get("patience") for group in optimizer.param_groups) and hasattr(
        optimizer, "record"
    )
    if patient and validation is None:
        raise ValueError("validation must be given to an optimiser with a patience, got None")
    trainer = Trainer(
        problem,
        optimizer,
        settings,
        schedule=schedule,
        regularizers=regularizers,
        averaging=averaging,
        validation=validation,
        early_stopping=_stopping(early_stopping, validation),
        trackers=trackers,
        loggers=loggers,
        augment=_callable(augment, "augment"),
        accuracy=_callable(accuracy, "accuracy"),
        folder=None if folder is None else Path(folder),
    )
    return trainer.run(resume)


def _require_trainable(problem: Problem, optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {describe(optimizer)}; such as"
            " torch.optim.SGD(model.parameters(), lr=0.1)"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "optimizer must step without a closure, got LBFGS; it evaluates the loss many times a"
            " step"
        )
    if problem._theta is not None:
        raise ValueError(
            "problem must follow its model, got one made by at(), which is at other parameters;"
            " load them into the model"
        )
    held = {parameter.device for group in optimizer.param_groups for parameter in group["params"]}
    if held != {problem.device}:
        raise ValueError(
            f"problem must be on the device of the parameters, {', '.join(map(str, held))}, got"
            f" {problem.device}; move the model with model.to(device), then make problem and"
            " optimizer"
        )
    if problem._cast is not None:
        raise ValueError(
            f"problem must have its model's own dtype, got dtype={problem._cast}; cast the model"
            " itself, or pass precision="
        )


def _require_schedule(schedule: Any, optimizer: Any) -> None:
    if schedule is None:
        return
    if not callable(getattr(schedule, "step", None)) or not hasattr(schedule, "state_dict"):
        raise TypeError(
            f"schedule must be a scheduler made for the optimizer, got {describe(schedule)}; such"
            " as lh.optim.schedules.cosine(optimizer, epochs)"
        )
    theirs = getattr(schedule, "optimizer", None)
    if theirs is not None and not any(theirs is inner for inner in chain(optimizer)):
        raise ValueError(
            "schedule must be of this optimizer, got one of another optimizer; make it with"
            " schedule(optimizer, …)"
        )


def _require_parts(regularizers: Any, averaging: Any, trackers: Any) -> None:
    for name, parts, wanted in (
        ("regularizers", regularizers, ("add_to", "needs_product")),
        ("trackers", trackers, ("measure", "every", "unit")),
    ):
        if not isinstance(parts, Sequence) or isinstance(parts, str):
            raise TypeError(f"{name} must be a list, got {describe(parts)}")
        for part in parts:
            missing = [each for each in wanted if not hasattr(part, each)]
            if missing:
                raise TypeError(
                    f"{name} must have {', '.join(wanted)}, got {describe(part)}; it lacks"
                    f" {', '.join(missing)}"
                )
    for tracker in trackers:
        if tracker.unit not in UNITS:
            raise ValueError(f'trackers must have the unit "epoch" or "step", got {tracker.unit!r}')
    missing = [
        each
        for each in ("update", "unit", "model")
        if averaging is not None and not hasattr(averaging, each)
    ]
    require(not missing, "averaging", "be an IterateAverage", averaging, "", TypeError)


def _stopping(asked: EarlyStopping | int | None, validation: Any) -> EarlyStopping | None:
    if asked is None or isinstance(asked, EarlyStopping):
        stopping = asked
    else:
        stopping = EarlyStopping(require_count(asked, "early_stopping"))
    held_out = stopping is not None and stopping.metric.startswith("validation")
    if held_out and validation is None:
        raise ValueError(
            "validation must be given for early stopping to watch, got None; or watch another"
            ' column: EarlyStopping(metric="loss")'
        )
    return stopping


def _callable(given: Any, name: str) -> Callable[..., Any] | None:
    require(given is None or callable(given), name, "be a function", given, "", TypeError)
    return given  # type: ignore[no-any-return]
