"""``fit``: the training loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lambdahat._core.check import require, require_count
from lambdahat.problem import Problem, require_problem
from lambdahat.training.feeding import Augment
from lambdahat.training.loggers import require_loggers
from lambdahat.training.runs import EarlyStopping, Run
from lambdahat.training.settings import UNITS, Settings
from lambdahat.training.stepping import chain
from lambdahat.training.subjects import Judge
from lambdahat.training.trainer import Trainer


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
    """Train the model that ``problem`` was made of, in place, for ``epochs`` passes over the
    problem's data.

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
    settings = Settings(
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
    require(
        not resume or folder is not None, "resume", "come with the folder of the run", "no folder"
    )
    require(
        checkpoint_steps is None or folder is not None,
        "checkpoint_steps",
        "come with a folder",
        "none",
    )
    patient = any(group.get("patience") for group in optimizer.param_groups) and hasattr(
        optimizer, "record"
    )
    require(
        not patient or validation is not None,
        "validation",
        "be given to an optimiser with a patience",
        None,
    )
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
    require(
        isinstance(optimizer, torch.optim.Optimizer),
        "optimizer",
        "be a torch.optim.Optimizer",
        optimizer,
        "such as torch.optim.SGD(model.parameters(), lr=0.1)",
        TypeError,
    )
    closure = isinstance(optimizer, torch.optim.LBFGS)
    require(
        not closure,
        "optimizer",
        "step without a closure",
        "LBFGS",
        "it evaluates the loss many times a step",
    )
    require(
        problem._theta is None,
        "problem",
        "follow its model",
        "one made by at(), which is at other parameters",
        "load them into the model",
    )
    held = {parameter.device for group in optimizer.param_groups for parameter in group["params"]}
    require(
        held == {problem.device},
        "problem",
        f"be on the device of the parameters, {', '.join(map(str, held))}",
        str(problem.device),
        "move the model with model.to(device), then make problem and optimizer",
    )
    require(
        problem._cast is None,
        "problem",
        "have its model's own dtype",
        f"dtype={problem._cast}",
        "cast the model itself, or pass precision=",
    )


def _require_schedule(schedule: Any, optimizer: Any) -> None:
    if schedule is None:
        return
    ready = callable(getattr(schedule, "step", None)) and hasattr(schedule, "state_dict")
    require(
        ready,
        "schedule",
        "be a scheduler made for the optimizer",
        schedule,
        "such as lh.optim.schedules.cosine(optimizer, epochs)",
        TypeError,
    )
    theirs = getattr(schedule, "optimizer", None)
    own = theirs is None or any(theirs is inner for inner in chain(optimizer))
    require(
        own,
        "schedule",
        "be of this optimizer",
        "one of another optimizer",
        "make it with schedule(optimizer, …)",
    )


def _require_parts(regularizers: Any, averaging: Any, trackers: Any) -> None:
    for name, parts, wanted in (
        ("regularizers", regularizers, ("add_to", "needs_product")),
        ("trackers", trackers, ("measure", "every", "unit")),
    ):
        require(
            isinstance(parts, Sequence) and not isinstance(parts, str),
            name,
            "be a list",
            parts,
            error=TypeError,
        )
        for part in parts:
            missing = [each for each in wanted if not hasattr(part, each)]
            require(
                not missing,
                name,
                f"have {', '.join(wanted)}",
                part,
                f"it lacks {', '.join(missing)}",
                TypeError,
            )
    for tracker in trackers:
        require(
            tracker.unit in UNITS, "trackers", 'have the unit "epoch" or "step"', repr(tracker.unit)
        )
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
    require(
        not held_out or validation is not None,
        "validation",
        "be given for early stopping to watch",
        None,
        'or watch another column: EarlyStopping(metric="loss")',
    )
    return stopping


def _callable(given: Any, name: str) -> Callable[..., Any] | None:
    require(given is None or callable(given), name, "be a function", given, "", TypeError)
    return given  # type: ignore[no-any-return]
