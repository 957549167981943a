"""The state of a training run and how it moves: epochs, rows, checkpoints, the end."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lambdahat._core.check import require
from lambdahat._core.progress import report
from lambdahat._core.rng import derived_seed
from lambdahat.problem import DEFAULT_BATCH, Problem
from lambdahat.problem.batches import Batches, make_batches, rng_untouched
from lambdahat.results import Status
from lambdahat.training.averages import averaged_model
from lambdahat.training.checkpoints import Checkpoint, Checkpoints, alone_in, read, write_tensors
from lambdahat.training.feeding import Augment, Feed, contents
from lambdahat.training.loggers import make_loggers
from lambdahat.training.measuring_base import described_tracker
from lambdahat.training.metrics import Metrics
from lambdahat.training.runs import BestSoFar, EarlyStopping, Run
from lambdahat.training.settings import Settings, described, optimizer_settings, require_same_run
from lambdahat.training.stepping import Diverged, Stepper, Tally, joint_norm
from lambdahat.training.subjects import Judge, Subject, modes


class Trainer:
    """One run: everything ``fit`` was given, and where it has got to."""

    def __init__(
        self,
        problem: Problem,
        optimizer: Any,
        settings: Settings,
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
        self.subject = Subject(problem, settings.precision, accuracy)
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
            require(
                resume or not used,
                "folder",
                "be new or empty",
                f"{self.folder}, which holds a run",
                "pass resume=True (--resume) to go on with it, or choose another folder",
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
        require(
            not strange,
            "folder",
            "hold a run of the same parts",
            f"one {'with' if strange and strange[0] in stored else 'without'} {', '.join(strange)}",
            "call fit as that run did",
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
        """Whether a column that an epoch lacks can be in another: of a tracker, or of an average
        yet to begin.
        """
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
        """A checkpoint, where it is time for one: every few epochs, at the end, and whenever
        this is the best.
        """
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
    """Torch's global generators, which dropout draws from, as the seed decides; the caller's
    come back afterwards.
    """
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
