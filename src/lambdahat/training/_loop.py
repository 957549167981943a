"""``fit``: the training loop, its settings, and the checkpoints from which it resumes."""

from __future__ import annotations

import inspect
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lambdahat._core import check
from lambdahat._core.progress import ProgressFile, report
from lambdahat._core.rng import derived_seed
from lambdahat.problem import DEFAULT_BATCH, Problem, require_problem
from lambdahat.problem.batches import Batches, make_batches, rng_untouched
from lambdahat.problem.network import BATCH_NORMS, accumulating
from lambdahat.results import Status
from lambdahat.training import stepping
from lambdahat.training.checkpoints import (
    Checkpoint,
    Checkpoints,
    alone_in,
    read,
    require_new,
    write_tensors,
)
from lambdahat.training.feeding import Augment, Feed, contents, same_contents
from lambdahat.training.history import BestSoFar, EarlyStopping, Metrics, Run
from lambdahat.training.loggers import Loggers
from lambdahat.training.trackers import describe_tracker, gather_trackers

# statistics of more samples cost a pass and change little (§7.3.1, spectral thesis)
REFRESH_SAMPLES = 10_000
UNITS = ("epoch", "step")
# by schedules, SpectralSGD, start_averaging()
SCHEDULED_SETTINGS = ("lr", "momentum", "betas", "average_start")
LATER_FIELDS = ("contents", "trackers")  # which runs of early versions do not tell
# the settings that determine the numbers; the others may change from one call to the next
FINGERPRINT = (
    "batch_size",
    "precision",
    "accumulate",
    "clip",
    "schedule_unit",
    "curvature_samples",
    "seed",
)


class FitSettings(SimpleNamespace):
    """What ``fit`` takes; see there. A wrong argument raises an error that names it."""

    folder: Any
    loggers: Any
    early_stopping: Any
    trackers: Any

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        require_problem(self.problem)
        for name in ("epochs", "accumulate", "keep", "checkpoint_every"):
            check.require_count(given[name], name)
        for name in ("batch_size", "curvature_samples", "checkpoint_steps"):
            if given[name] is not None:
                check.require_count(given[name], name)
        if self.clip is not None:
            check.require_positive(self.clip, "clip")
        check.require_count(self.seed, "seed", least=0)
        check.require_choice(self.precision, "precision", stepping.PRECISIONS)
        check.require_choice(self.schedule_unit, "schedule_unit", UNITS)
        self._require_parts()
        for name in ("resume", "checkpoint_steps"):
            where = "the folder of the run" if name == "resume" else "a folder"
            fits = not given[name] or self.folder is not None
            check.require(fits, name, f"come with {where}", "no folder", "pass folder= (--out)")
        self.folder = None if self.folder is None else Path(self.folder)

    def _require_parts(self) -> None:
        """Raise unless every object has the methods that a run calls."""
        example = "such as torch.optim.SGD(model.parameters(), lr=0.1)"
        kind = torch.optim.Optimizer
        check.require_type(self.optimizer, kind, "optimizer", "be a torch.optim.Optimizer", example)
        closed, cure = torch.optim.LBFGS, "it evaluates the loss many times a step"
        fits = not isinstance(self.optimizer, closed)
        check.require(fits, "optimizer", "step without a closure", "LBFGS", cure)
        if self.schedule is not None:
            self._require_schedule()
        self.trackers = gather_trackers(self.trackers)
        wants = {"regularizers": "add_to, needs_product", "trackers": "measure, every, unit"}
        for name, wanted in wants.items():
            parts = getattr(self, name)
            if not isinstance(parts, Sequence) or isinstance(parts, str):
                raise TypeError(f"{name} must be a list, got {check.describe(parts)}")
            for part in parts:
                missing = [each for each in wanted.split(", ") if not hasattr(part, each)]
                cure = f"it lacks {', '.join(missing)}"
                check.require(not missing, name, f"have {wanted}", part, cure, TypeError)
        for tracker in self.trackers:
            expected = 'have the unit "epoch" or "step"'
            check.require(tracker.unit in UNITS, "trackers", expected, repr(tracker.unit))
        average = all(hasattr(self.averaging, name) for name in ("update", "unit", "model"))
        fits = self.averaging is None or average
        check.require(fits, "averaging", "be an IterateAverage", self.averaging, "", TypeError)
        self.loggers = Loggers(self.loggers)
        for name in ("augment", "accuracy"):
            given = getattr(self, name)
            fits = given is None or callable(given)
            check.require(fits, name, "be a function", given, "", TypeError)
        if self.early_stopping is not None and not isinstance(self.early_stopping, EarlyStopping):
            patience = check.require_count(self.early_stopping, "early_stopping")
            self.early_stopping = EarlyStopping(patience)
        if self.validation is None:  # refuse parts that wait for its loss
            waits = any(group.get("patience") for group in self.optimizer.param_groups)
            fits = not (waits and hasattr(self.optimizer, "record"))
            check.require(fits, "validation", "be given to an optimiser with a patience", "None")
            watched = self.early_stopping.metric if self.early_stopping else ""
            cure = 'or watch another column: EarlyStopping(metric="loss")'
            fits = not watched.startswith("validation")
            check.require(fits, "validation", "be given for early stopping to watch", "None", cure)

    def _require_schedule(self) -> None:
        expected = "be a scheduler made for the optimizer"
        cure = "such as lh.optim.schedules.cosine(optimizer, epochs)"
        steps = callable(getattr(self.schedule, "step", None))
        fits = steps and hasattr(self.schedule, "state_dict")
        check.require(fits, "schedule", expected, self.schedule, cure, TypeError)
        theirs = getattr(self.schedule, "optimizer", None)
        own = theirs is None or any(theirs is inner for inner in stepping.chain(self.optimizer))
        cure = "make it with schedule(optimizer, …)"
        check.require(own, "schedule", "be of this optimizer", "one of another optimizer", cure)


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
    accuracy: stepping.Judge | None = None,
    trackers: str | Sequence[Any] = (),
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
    - ``trackers``, or their names ("edge,trace"), measure along the way; ``loggers`` are "csv",
      "tensorboard", "wandb", "mlflow", or objects with ``log(step, values)`` and ``close()``. A
      logger that fails is dropped with a warning.
    - ``folder``: rows go to ``metrics.jsonl`` and ``metrics.csv`` there, checkpoints to
      ``checkpoints``, the ``keep`` newest and the best, every ``checkpoint_every`` epochs and
      ``checkpoint_steps`` steps. With ``resume`` a run that was killed goes on from the newest
      whole one, to the same bits on the same machine; the call must be the same but for ``epochs``.

    A loss that is not finite ends the run at the end of its epoch, with the status
    ``TRAINING_DIVERGED``.
    """
    return Trainer(FitSettings(**locals())).run()


def optimizer_settings(optimizer: Any) -> dict[str, Any]:
    """The constructor settings of the optimiser by name, a value per parameter group.

    Of what a schedule or the optimiser itself moves it is the value at construction.
    """
    groups, settings = optimizer.param_groups, {}
    signatures = (inspect.signature(type(inner)).parameters for inner in stepping.chain(optimizer))
    for name in (name for signature in signatures for name in signature):
        if name in groups[0] and name != "params":
            first = optimizer.defaults if name in SCHEDULED_SETTINGS else {}
            values = (first.get(name, group.get(name)) for group in groups)
            pairs = zip(groups, values, strict=True)
            settings[name] = [repr(group.get(f"initial_{name}", value)) for group, value in pairs]
    return settings


def require_same_run(stored: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise unless a stored run had the settings, data and model of this one."""
    for name, value in now.items():
        if name in LATER_FIELDS and name not in stored:
            continue
        was = stored.get(name)
        if name == "contents":
            cure = "give the data of that run, or choose another folder"
            same, came = (
                was is not None and same_contents(was, value),
                "one on other samples or labels",
            )
            check.require(same, "folder", "hold a run on the same data", came, cure)
        elif name == "optimizer settings" and isinstance(was, Mapping):
            require_same_run(was, value)
        else:
            cure = "call fit as that run did, or choose another folder"
            came, expected = f"one with {name} = {was}", f"hold a run with {name} = {value}"
            check.require(was == value, "folder", expected, came, cure)


class Trainer:
    """One run: everything ``fit`` was given, and where it has got to."""

    def __init__(self, settings: FitSettings) -> None:
        self.settings, self.problem = settings, settings.problem
        self.optimizer, self.schedule = settings.optimizer, settings.schedule
        self.averaging, self.early_stopping = settings.averaging, settings.early_stopping
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
        self._plateau = isinstance(settings.schedule, plateau)
        self.trackers, self.loggers = list(settings.trackers), settings.loggers
        self.folder = settings.folder
        self.subject = stepping.TrainingSubject(self.problem, settings.precision, settings.accuracy)
        batches = settings.batch_size, settings.accumulate
        self.feed = Feed(self.problem, *batches, settings.seed, settings.augment)
        self.stepper = stepping.Stepper(
            self.subject,
            self.optimizer,
            self.feed,
            precision=settings.precision,
            clip=settings.clip,
            regularizers=settings.regularizers,
            curvature_samples=settings.curvature_samples,
        )
        held_out, stopping = settings.validation, self.early_stopping
        if held_out is not None and not isinstance(held_out, Problem | Batches):
            default = DEFAULT_BATCH.get(self.problem.device.type, 1024)
            held_out = make_batches(held_out, None, default, self.problem.device, None)
        self.validation = held_out.batches if isinstance(held_out, Problem) else held_out
        self.metrics, self.checkpoints = Metrics(self.folder), None
        if self.folder is not None:
            self.checkpoints = Checkpoints(self.folder / "checkpoints", settings.keep)
        self.fingerprint = {name: getattr(settings, name) for name in FINGERPRINT}
        tensors = self.subject.tensors
        self.about = {  # must match for a run to be resumed, as of the first step
            **self.fingerprint,
            "samples": self.problem.num_samples,
            "data": self.feed.digest(),
            "contents": contents(self.problem) if self.folder is not None else None,
            "trackers": [describe_tracker(tracker) for tracker in self.trackers],
            "optimizer": type(self.optimizer).__name__,
            "optimizer settings": optimizer_settings(self.optimizer),
            "regularizers": [_describe_rule(rule) for rule in self.stepper.regularizers],
            "early stopping": None if stopping is None else asdict(stopping),
            "parameters": {name: tuple(tensor.shape) for name, tensor in tensors.items()},
        }
        metric = "loss" if self.validation is None else "validation_loss"
        best = (metric,) if stopping is None else (stopping.metric, stopping.least)
        self.best = BestSoFar(*best)
        self.epoch = self.batch = self.step = 0
        self.tally, self.ended = stepping.Tally(self.problem.device), ""
        self.seconds = 0.0  # in training steps, without what is measured between them
        self.averaged: dict[str, Any] = {}
        self._initial: list[Tensor] = []
        self._initial_digest = ""
        self._best_tensors: dict[str, Tensor] = {}

    def run(self) -> Run:
        """Train to the end, from the beginning or from the newest whole checkpoint."""
        lock = nullcontext() if self.folder is None else alone_in(self.folder)
        with lock, stepping.modes(self.subject.model, True), rng_untouched():
            # torch's global generators, which dropout uses
            torch.manual_seed(derived_seed(self.settings.seed, "training"))
            try:
                self._begin()
                path = None if self.folder is None else self.folder / "progress.json"
                with ProgressFile(path, kind="training", epochs=self.settings.epochs):
                    while not self.ended:
                        self._train_epoch()
            finally:
                self.loggers.close()
        if self.early_stopping is not None and self.early_stopping.restore:
            self._restore_best()
        status = Status.TRAINING_DIVERGED if self.ended == "diverged" else Status.CONVERGED
        place = "" if self.folder is None else str(self.folder)
        rows = tuple(self.metrics.rows)
        run = Run(rows, self.ended, self.best.row, self.averaged, place, self.about, status)
        if self.folder is not None:
            average = self._averaged_model()
            if average is not None:
                path = self.folder / "averaged.safetensors"
                write_tensors(path, average.state_dict(), sealed=True)
            run.save(self.folder / "training.json")
        return run

    def _begin(self) -> None:
        newest, resume = None, self.settings.resume
        if self.checkpoints is not None:
            require_new(self.folder, resume)
            newest = self.checkpoints.newest(self.metrics.length) if resume else None
        if newest is not None:
            self._resume(newest)
        else:
            self._initial = [parameter.detach().clone() for parameter in self.stepper.parameters]
            if self.checkpoints is not None:
                named = {str(i): tensor for i, tensor in enumerate(self._initial)}
                self._initial_digest = self.checkpoints.write_initial(named)
                self.metrics.cut(0)
        for tracker in self.trackers:
            if self.folder is not None and hasattr(tracker, "folder"):
                tracker.folder = self.folder / "measurements"
        self.loggers.open(self.folder, self.step, self.fingerprint)

    def _resume(self, newest: Checkpoint) -> None:
        if newest.damaged:
            text = f"{'; '.join(newest.damaged)}: resuming from {newest.path.name}"
            warnings.warn(text, RuntimeWarning, stacklevel=5)
        state = newest.state
        require_same_run(state["settings"], self.about)
        assert self.checkpoints is not None
        self._initial_digest = state["initial"]
        initial = self.checkpoints.read_initial(self._initial_digest)
        places = enumerate(self.stepper.parameters)
        self._initial = [initial[str(i)].to(parameter.device) for i, parameter in places]
        self._load(state)
        self.checkpoints.forget_after(newest.step)  # nothing on disk is changed before all is read
        self.checkpoints.name_best(self.best.row.get("step"))
        self.metrics.cut(state["metrics"])

    def _stateful_parts(self) -> dict[str, Any]:
        """The parts of the run with a state of their own, by name."""
        parts = {name: getattr(self, name) for name in ("optimizer", "schedule", "averaging")}
        parts |= {"scaler": self.stepper.scaler, "best": self.best}
        parts |= {f"tracker {i} ({each.name})": each for i, each in enumerate(self.trackers)}
        parts |= {f"regularizer {i}": rule for i, rule in enumerate(self.stepper.regularizers)}
        return {name: part for name, part in parts.items() if hasattr(part, "state_dict")}

    def _state(self) -> dict[str, Any]:
        device = self.problem.device
        cuda = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
        return {
            "settings": self.about,
            "epoch": self.epoch,
            "batch": self.batch,
            "step": self.step,
            "ended": self.ended,
            "seconds": self.seconds,
            "metrics": self.metrics.sync(),
            "initial": self._initial_digest,
            "averaged": self.averaged,
            "tally": self.tally.state_dict(),
            "rng": {"cpu": torch.get_rng_state(), "cuda": cuda},
            "model": self.subject.tensors,
            "parts": {name: part.state_dict() for name, part in self._stateful_parts().items()},
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.batch, self.step = state["epoch"], state["batch"], state["step"]
        self.seconds, self.averaged = state["seconds"], state["averaged"]
        stopped, done = state["ended"] not in ("", "epochs"), self.epoch >= self.settings.epochs
        self.ended = state["ended"] if stopped else "epochs" if done else ""
        self.subject.load(state["model"])
        self.tally.load_state_dict(state["tally"])
        parts, stored = self._stateful_parts(), state["parts"]
        other = sorted(set(parts) ^ set(stored))
        came = f"one {'with' if {*other[:1]} & {*stored} else 'without'} {', '.join(other)}"
        expected, cure = "hold a run of the same parts", "call fit as that run did"
        check.require(not other, "folder", expected, came, cure)
        for name, part in parts.items():
            part.load_state_dict(stored[name])
        if type(self.schedule) is torch.optim.lr_scheduler.LambdaLR:
            _follow(self.schedule)
        torch.set_rng_state(state["rng"]["cpu"])
        for cuda in state["rng"]["cuda"]:
            torch.cuda.set_rng_state(cuda, self.problem.device)

    def _train_epoch(self) -> None:
        total = self.settings.epochs * self.feed.steps
        note, diverged = _note(self.metrics.rows), False
        since = time.perf_counter()
        for group in self.feed.epoch(self.epoch, self.batch):
            try:
                self.stepper(group, self.step, self.tally)
            except stepping.Diverged:
                diverged = True
                break
            self.step, self.batch = self.step + 1, self.batch + 1
            self._advance("step")
            report("training", self.step, total, note)
            self.seconds += time.perf_counter() - since
            self._end_step()
            since = time.perf_counter()
            if self.ended:
                return
        means = self.tally.read()  # waits for the device
        self.seconds += time.perf_counter() - since
        self._end_epoch({**means, "loss": math.nan} if diverged else means)

    def _advance(self, unit: str) -> None:
        """Move the schedule and the average that count in this unit."""
        if self.schedule is not None and self.settings.schedule_unit == unit and not self._plateau:
            self.schedule.step()
        if self.averaging is not None and self.averaging.unit == unit:
            self.averaging.update()

    def _end_step(self) -> None:
        """Measure what is due every few steps, and write a checkpoint within the epoch."""
        measured = self._track("step", self.step)
        if measured:
            progress = self.epoch + self.batch / self.feed.steps
            rate = {"learning_rate": float(self.optimizer.param_groups[0]["lr"])}
            place = {"kind": "step", "epoch": self.epoch + 1, "step": self.step}
            row = self.metrics.add({**place, "progress": progress, **rate, **measured})
            self.loggers.log(row)
        every = self.settings.checkpoint_steps
        due = every and self.step % every == 0 and self.batch < self.feed.steps
        if self.checkpoints is not None and due:
            if bool(self.tally.sums[0].isfinite()):  # the loss; norms may overflow harmlessly
                self.checkpoints.write(self.step, self._state())
            else:
                self._end_epoch(self.tally.read())

    def _track(self, unit: str, count: int) -> dict[str, Any]:
        row: dict[str, Any] = {}
        for tracker in self.trackers:
            if tracker.unit == unit and count % tracker.every == 0:
                with rng_untouched():
                    row |= tracker.measure(self.problem, self.optimizer, self.epoch + 1, self.step)
        return row

    def _end_epoch(self, means: Mapping[str, float]) -> None:
        rate = float(self.optimizer.param_groups[0]["lr"])
        self._advance("epoch")
        diverged = not math.isfinite(means["loss"])
        row: dict[str, Any] = {"kind": "epoch", "epoch": self.epoch + 1, "step": self.step}
        row |= {"progress": float(self.epoch + 1), **means}
        if not diverged and self.validation is not None:
            row |= self._validate(self.validation)
        row |= {**self._norms(), "learning_rate": rate, "seconds": self.seconds}
        if self._plateau:
            self.schedule.step(row.get("validation_loss", row["loss"]))
        if not diverged:
            row |= self._track("epoch", self.epoch + 1)
        self.loggers.log(self.metrics.add(row))
        if diverged:
            self.ended = "diverged"
            return
        due = self.best.metric in row or not self._may_come(self.best.metric)
        improved = due and self.best.look(row)
        self.epoch, self.batch = self.epoch + 1, 0
        self.tally = stepping.Tally(self.problem.device)
        stopping = self.early_stopping
        waited = stopping is not None and self.best.waited >= stopping.patience
        if waited or getattr(self.optimizer, "stopped", False):
            self.ended = "early stopping"
        elif self.epoch >= self.settings.epochs:
            self.ended = "epochs"
        # a checkpoint every few epochs, at the end, and at a new best
        restore = stopping is not None and stopping.restore
        if improved and restore and self.checkpoints is None:
            tensors = self.subject.tensors.items()
            self._best_tensors = {name: tensor.detach().clone() for name, tensor in tensors}
        kept = self.epoch % self.settings.checkpoint_every == 0 or bool(self.ended) or improved
        if self.checkpoints is not None and kept:
            self.checkpoints.write(self.step, self._state(), best=improved)

    def _may_come(self, metric: str) -> bool:
        """Whether another epoch can have a tracker's or an average's column that this one lacks."""
        averages = self.averaging is not None or hasattr(self.optimizer, "averaged_parameters")
        if self.validation is not None and averages and metric.startswith("average_validation_"):
            return True
        late = [each.every for each in self.trackers if each.unit == "epoch"]
        epochs = [row for row in self.metrics.rows if row["kind"] == "epoch"]
        return self.epoch + 1 < max(late, default=0) or any(metric in row for row in epochs)

    def _validate(self, batches: Batches) -> dict[str, float]:
        """Loss and accuracy on held-out data, of the model and of its average."""
        means = self.subject.evaluate(batches)
        row = {f"validation_{name}": value for name, value in means.items()}
        average = self._averaged_model()
        if average is not None:
            means = self.subject.evaluate(batches, average)
            self.averaged = {f"average_validation_{name}": value for name, value in means.items()}
            row |= self.averaged
        if self.optimizer.param_groups[0].get("patience") and hasattr(self.optimizer, "record"):
            self.optimizer.record(row.get("average_validation_loss", row["validation_loss"]))
        return row

    def _averaged_model(self) -> nn.Module | None:
        """A copy of the averaged model with its own batch-norm statistics; None without one."""
        model: nn.Module | None = None
        if self.averaging is not None and self.averaging.count:
            model = self.averaging.model
        elif self.subject.model is not None and getattr(self.optimizer, "averaging", False):
            model = self.optimizer.averaged_model(self.subject.model)
        layers = [] if model is None else [m for m in model.modules() if isinstance(m, BATCH_NORMS)]
        layers = [layer for layer in layers if layer.track_running_stats]
        if layers:  # statistics of the averaged weights (§7.3.1)
            with torch.no_grad(), stepping.modes(model, training=False), accumulating(layers):
                for layer in layers:
                    layer.reset_running_stats()
                steps = max(1, REFRESH_SAMPLES // self.feed.step_samples)
                for group in islice(self.feed.epoch(0), steps):
                    for batch in group:
                        self.subject.forward(batch, model)
        return model

    @torch.no_grad()
    def _norms(self) -> dict[str, float]:
        parameters = [parameter.detach() for parameter in self.stepper.parameters]
        moved = list(torch._foreach_sub(parameters, self._initial))
        sizes = [parameter.abs().max().double() for parameter in parameters if parameter.numel()]
        norm, distance = map(stepping.joint_norm, (parameters, moved))
        values = torch.stack([norm, torch.stack(sizes).max(), distance]).tolist()
        return dict(zip(("norm", "max_norm", "distance"), values, strict=True))

    def _restore_best(self) -> None:
        path = None if self.checkpoints is None else self.checkpoints.best()
        tensors = self._best_tensors if path is None else read(path)[1]["model"]
        if tensors:
            self.subject.load(tensors)
        elif self.best.row:
            text = "the checkpoint of the best epoch is gone: the model stays at its last"
            warnings.warn(text, RuntimeWarning, stacklevel=4)


def _describe_rule(rule: Any) -> str:
    """An object in words that are the same in another process."""
    own = any("__repr__" in vars(kind) for kind in type(rule).__mro__[:-1])
    return repr(rule) if own else type(rule).__name__


def _follow(schedule: torch.optim.lr_scheduler.LambdaLR) -> None:
    """Set the rates of this schedule where the checkpoint has those of one for other epochs."""
    parts = zip(schedule.base_lrs, schedule.lr_lambdas, schedule._last_lr, strict=True)
    rates = [(base * factor(schedule.last_epoch), last) for base, factor, last in parts]
    for group, (rate, last) in zip(schedule.optimizer.param_groups, rates, strict=True):
        if float(group["lr"]) == float(last):  # nothing else has moved it since
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate
    schedule._last_lr = [rate for rate, _ in rates]


def _note(rows: Sequence[Mapping[str, Any]]) -> str:
    """The last epoch in a few words."""
    last = next((row for row in reversed(rows) if row["kind"] == "epoch"), None)
    if last is None:
        return ""
    accuracy = last.get("validation_accuracy", last["accuracy"])
    shown = "" if math.isnan(accuracy) else f", accuracy {accuracy:.1%}"
    return f"epoch {last['epoch']}, loss {last['loss']:.4g}{shown}"
