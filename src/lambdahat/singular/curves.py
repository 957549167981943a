"""The learning coefficient along training, one checkpoint after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from lambdahat._check import require
from lambdahat._progress import report
from lambdahat.problem import Problem, require_problem
from lambdahat.results import Array, LearningCoefficient, Result
from lambdahat.sampling.kernels import Kernel
from lambdahat.singular.coefficient import llc

Checkpoint = Tensor | Mapping[str, Tensor]


@dataclass(frozen=True)
class Trajectory(Result):
    """λ̂ at each checkpoint: ``labels`` (steps or epochs, as numbers) and the ``results`` there."""

    labels: Array
    results: tuple[LearningCoefficient, ...]

    @property
    def values(self) -> Array:
        """λ̂ at each checkpoint."""
        return np.array([float(result) for result in self.results])

    @property
    def stderr(self) -> Array:
        """The standard error of each."""
        return np.array([float(result.stderr) for result in self.results])

    def __len__(self) -> int:
        return len(self.results)


def llc_along(
    problem: Problem, checkpoints: Mapping[float, Checkpoint] | Sequence[Checkpoint], **settings: Any
) -> Trajectory:
    """λ̂ of the problem at each checkpoint: flat vectors, or state dicts, by step or in order.

    All points are at one nβ and one γ, so that they can be compared: those given, else those of the first checkpoint by
    the rule of ``llc``. ``settings`` are those of ``llc``.
    """
    require_problem(problem)
    steps = dict(checkpoints) if isinstance(checkpoints, Mapping) else dict(enumerate(checkpoints))
    require(len(steps) > 0, "checkpoints", "hold at least one", "none")
    results: list[LearningCoefficient] = []
    for done, (step, checkpoint) in enumerate(steps.items()):
        report("checkpoints", done, len(steps))
        results.append(llc(_at(problem, checkpoint, step), **settings))
        if not isinstance(settings.get("kernel"), Kernel):
            settings["localization"] = results[0].localization
    report("checkpoints", len(steps), len(steps))
    return Trajectory(np.array([float(step) for step in steps]), tuple(results))


def _at(problem: Problem, checkpoint: Checkpoint, step: float) -> Problem:
    """The problem there: of a state dict all that the problem has, buffers and held parameters included."""
    if isinstance(checkpoint, Tensor):
        return problem.at(checkpoint)
    missing = [name for name in problem.space.names if name not in checkpoint]
    require(
        not missing, f"checkpoints[{step}]", "hold the problem's parameters", f"one without {', '.join(missing[:3])}"
    )
    known = {*problem.space.names, *problem.held_names}  # a tied parameter has other names, too
    return problem.at({name: tensor for name, tensor in checkpoint.items() if name in known})
