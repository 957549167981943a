"""The trackers as a callback of Lightning's ``Trainer``."""

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


def LightningTracker(
    trackers: str | Sequence[Tracker | str],
    problem_fn: Callable[[Any], Problem],
    folder: str | Path | None = None,
) -> Any:
    """A ``lightning.pytorch.Callback`` that measures along training and logs the numbers to the
    trainer's loggers.

    ``problem_fn(module)`` makes the problem when training starts. Give it the network inside the
    module, as ``lambda module: lh.Problem(module.network, "cross_entropy", data)``: a module also
    holds its trainer, which would be copied. Steps are those of the optimiser, and of several
    optimisers the first counts. On several devices the first measures. With ``folder`` the rows are
    also written there; the trackers' states are part of Lightning's checkpoints.
    """
    from lightning.pytorch import Callback

    require(
        callable(problem_fn),
        "problem_fn",
        "be a function of the module",
        problem_fn,
        'such as lambda module: lh.Problem(module.network, "cross_entropy", data)',
        TypeError,
    )

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
            self.tracking = Tracking(problem, trackers, trainer.optimizers[0], folder)
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
                self._log(
                    trainer,
                    self.tracking.reach("epoch", trainer.global_step, trainer.current_epoch + 1),
                )

        def state_dict(self) -> dict[str, Any]:
            return {} if self.tracking is None else self.tracking.state_dict()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self._loaded = dict(state_dict)

        def _log(self, trainer: Any, row: Row | None) -> None:
            found = {} if row is None else numbers(row)
            for logger in trainer.loggers if found else ():
                logger.log_metrics(found, step=trainer.global_step)

    return Measuring()
