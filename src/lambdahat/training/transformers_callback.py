"""The trackers as a callback of the Hugging Face ``Trainer``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lambdahat._core.check import require
from lambdahat.problem import Problem
from lambdahat.problem.distributed import on_one_rank
from lambdahat.training.loggers import numbers
from lambdahat.training.measuring_base import Row, Tracker
from lambdahat.training.tracked_loops import Tracking


def HuggingFaceTracker(
    trackers: str | Sequence[Tracker | str],
    problem_fn: Callable[[Any], Problem],
    folder: str | Path | None = None,
) -> Any:
    """A ``transformers.TrainerCallback`` that measures along training; its numbers join
    ``state.log_history``.

    ``problem_fn(model)`` makes the problem when training starts: ``lambda model: lh.Problem(model,
    "model", batches)``, batches a list of dicts of tensors. Steps are those of the optimiser. On
    several processes the first measures. With ``folder`` the rows are also written there, and a run
    resumed from a checkpoint goes on after its step.
    """
    from transformers import TrainerCallback

    require(
        callable(problem_fn),
        "problem_fn",
        "be a function of the model",
        problem_fn,
        'such as lambda model: lh.Problem(model, "model", batches)',
        TypeError,
    )

    class Measuring(TrainerCallback):  # type: ignore[misc,unused-ignore]
        """Measures at the start, after steps and after epochs."""

        def __init__(self) -> None:
            self.tracking: Tracking | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if not state.is_world_process_zero:
                return
            with on_one_rank():
                problem = problem_fn(given["model"])
            self.tracking = Tracking(problem, trackers, None, folder)
            self._follow(given)
            self._log(
                state, self.tracking.begin(resume=state.global_step > 0, upto=state.global_step)
            )

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if self.tracking is not None:
                self._follow(given)
                self._log(
                    state, self.tracking.reach("step", state.global_step, self.tracking.epochs)
                )

        def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if self.tracking is not None:
                self._follow(given)
                self._log(
                    state, self.tracking.reach("epoch", state.global_step, round(state.epoch))
                )

        def _follow(self, given: Any) -> None:
            """The trainer's optimiser, without what accelerate wraps it in; it may not be made
            yet at the start.
            """
            optimizer = given.get("optimizer")
            if self.tracking is not None:
                self.tracking.optimizer = getattr(optimizer, "optimizer", optimizer)

        def _log(self, state: Any, row: Row | None) -> None:
            if row is not None:
                state.log_history.append({**numbers(row), "step": state.global_step})

    return Measuring()
