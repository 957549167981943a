"""Training for a fixed number of epochs at several batch sizes, the rate or the damping scaled by a
rule.

Figures 5.7a, 5.8a and 5.11–5.16 of the spectral thesis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lambdahat._core.storage import Result
from lambdahat.experiments.kit.claims import Table
from lambdahat.experiments.minibatch.rate_subjects import Ground
from lambdahat.experiments.minibatch.stacked_networks import Cells, Settings

LEAST = 16  # batch size: smaller ones take long and nobody scales down to them


@dataclass(frozen=True)
class ScalingRuns(Result):
    """Runs under every rule and batch size: ``values`` (rules, sizes) of what is scaled, and per
    seed (rules, sizes, S) what came of it.

    ``training_loss`` is over the training samples that learning is judged on, ``distance`` is ‖θ −
    θ₀‖₂. Values are NaN where a run diverged.
    """

    network: str
    optimizer: str
    scaled: str
    reference: int
    epochs: int
    rules: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    values: Tensor
    validation_error: Tensor
    training_loss: Tensor
    distance: Tensor

    def table(self) -> Table:
        """Validation error and distance by batch size, means over the seeds."""
        rows = []
        for place, size in enumerate(self.batch_sizes):
            cells = [
                f"{_mean(100 * self.validation_error[rule, place])}"
                f" ({_mean(self.distance[rule, place])})"
                for rule in range(len(self.rules))
            ]
            rows.append((str(size), *cells))
        base = float(self.values[0, self.batch_sizes.index(self.reference)])
        what = f"validation error in % (distance from the start) after {self.epochs} epochs"
        title = (
            f"{self.network}, {self.optimizer}: {what}, {self.scaled} {base:.3g} at B ="
            f" {self.reference}"
        )
        return Table(title, ("B", *self.rules), tuple(rows))


# validation error, training loss and distance, (rules, S) each
Outcome = tuple[Tensor, Tensor, Tensor]


def scaling_runs(
    ground: Ground,
    optimizer: str,
    scaled: str,
    base: float,
    rules: Mapping[str, float],
    run: Callable[[int, Tensor], Outcome],
) -> ScalingRuns:
    """All rules, each a power of B, at all batch sizes, from the value ``base`` at the reference.

    ``run(size, values)`` trains every seed at the values (rules,) of one batch size.
    """
    subject = ground.subject
    sizes = tuple(size for size in subject.batch_sizes if size >= min(LEAST, subject.reference))
    values = torch.tensor(
        [[base * (size / subject.reference) ** power for size in sizes] for power in rules.values()]
    )
    found = [run(size, values[:, place]) for place, size in enumerate(sizes)]
    errors, losses, distances = (torch.stack(parts, dim=1) for parts in zip(*found, strict=True))
    return ScalingRuns(
        subject.network,
        optimizer,
        scaled,
        subject.reference,
        subject.epochs,
        tuple(rules),
        sizes,
        values,
        errors,
        losses,
        distances,
    )


def steps_of(ground: Ground, size: int) -> int:
    """The steps of the subject's epochs at a batch size."""
    return max(1, ground.subject.epochs * (len(ground.train[0]) // size))


def outcome(ground: Ground, settings: Settings, size: int, seed: int) -> Outcome:
    """Stacked training at the settings of one batch size."""
    cells = Cells(ground.models, ground.train, settings)
    task = f"{ground.subject.network}, {settings.optimizer}, rules at B = {size}"
    cells.train(size, steps_of(ground, size), seed, task)
    _, error = cells.judged(ground.test)
    loss, _ = cells.judged(ground.probe)
    distance = cells.distances().where(loss.isfinite(), torch.nan)
    return error.T, loss.T, distance.T


def _mean(values: Tensor) -> str:
    found = values[values.isfinite()]
    if len(found) == 0:
        return "diverged"
    error = f" ± {float(found.std()) / math.sqrt(len(found)):.1g}" if len(found) > 1 else ""
    lost = len(values) - len(found)
    return f"{float(found.mean()):.3g}{error}" + (f", {lost} diverged" if lost else "")
