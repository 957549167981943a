"""What the experiments of the Gadam chapter share: a network on its data, a training run,
readings of its rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lambdahat.data.augmentation import augment
from lambdahat.experiments.averaging.networks import network, parameters_of
from lambdahat.experiments.averaging.recipes import FULL, make_optimizer, schedule_of
from lambdahat.experiments.kit.cells import Cell, Row, Rows
from lambdahat.experiments.kit.claims import Reading, mean_of, paired_difference
from lambdahat.experiments.kit.training import Watch, images
from lambdahat.problem import Problem
from lambdahat.problem.batches import Batches
from lambdahat.training import fit
from lambdahat.training.stepping import joint_norm

REFRESHED = 10_000  # samples for the batch-norm statistics of an average (§7.3.1)
JUDGED = 1024  # samples at once: a batch of all would fill a GPU that several processes share


@dataclass(frozen=True)
class Task:
    """A network with the loss on its training data, and batches that are held out."""

    model: nn.Module
    problem: Problem
    held_out: Batches

    def training(self, size: int) -> Iterator[Any]:
        """Inputs of the first training samples, for the statistics of batch norm."""
        batches, left = self.problem.batches, REFRESHED
        for batch in batches:
            for part in batch.data[0].split(size):
                if left > 0 and len(part) > 1:
                    left -= len(part)
                    yield part


@dataclass(frozen=True)
class Trained:
    """A run: a row for each epoch, and the network that the optimiser hands back: its average,
    where it keeps one.
    """

    rows: list[Row]
    solution: nn.Module
    optimizer: Optimizer

    @property
    def end(self) -> Row:
        """The last epoch's row as one of the end, with the iterate's accuracy where averaging
        began ("before").
        """
        last = {**self.rows[-1], "kind": "end", "stopped": self.rows[-1]["epoch"]}
        begun = [row for row in self.rows if row["averaged"]]
        before = begun[0] if begun else self.rows[-1]
        return {**last, "begun": before["epoch"], "before": before["iterate accuracy"]}


def image_task(cell: Cell, device: str, start: int | None = None) -> Task:
    """A cell's network on a part of its data set, which follows the cell's seed; ``start`` is
    that of the weights.
    """
    found = images(cell, device)
    model = network(
        cell["network"], found.shape, found.classes, cell["seed"] if start is None else start
    ).to(device)
    if device.startswith("cuda"):
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # what tensor cores read
    problem = Problem(model, "cross_entropy", found.training, batch_size=JUDGED)
    return Task(model, problem, problem.on(found.held_out, JUDGED).batches)


def train(cell: Cell, task: Task, trackers: Sequence[Any] = ()) -> Trained:
    """Train a task's network in place as the cell says."""
    model, batch = task.model, cell["batch"]
    optimizer = make_optimizer(
        cell, model.parameters(), math.ceil(task.problem.num_samples / batch)
    )
    watch = Watch(lambda: {"average norm": _average_norm(optimizer)}, 1)
    run = fit(
        task.problem,
        optimizer,
        cell["epochs"],
        batch_size=batch,
        schedule=schedule_of(cell, optimizer),
        validation=task.held_out,
        augment=augment if cell.get("augmented") else None,
        clip=cell.get("clip"),
        trackers=[watch, *trackers],
        precision=cell.get("precision", FULL),
        seed=cell["seed"],
    )
    rows = [_epoch(row, seen) for row, seen in zip(run.epochs, [*watch.rows, {}], strict=False)]
    solution = model
    if getattr(optimizer, "averaging", False):
        with torch.no_grad():
            solution = optimizer.averaged_model(model, task.training(batch))  # type: ignore[attr-defined]
    return Trained(rows, solution, optimizer)


def _average_norm(optimizer: Any) -> float | None:
    return (
        float(joint_norm(optimizer.averaged_parameters))
        if getattr(optimizer, "averaging", False)
        else None
    )


def _epoch(row: Any, seen: Row) -> Row:
    """An epoch in our words; "accuracy" and "loss" are the average's from when there is one."""
    averaged = "average_validation_loss" in row
    kind = "average_validation" if averaged else "validation"
    norm, rate = row["norm"], row["learning_rate"]
    mean_norm = seen.get("average norm") if averaged else None
    return {
        "kind": "epoch",
        "epoch": row["epoch"],
        "averaged": averaged,
        "rate now": rate,
        "training loss": row["loss"],
        "training accuracy": 100 * row["accuracy"],
        "iterate accuracy": 100 * row.get("validation_accuracy", math.nan),
        "iterate loss": row.get("validation_loss", math.nan),
        "accuracy": 100 * row.get(f"{kind}_accuracy", math.nan),
        "loss": row.get(f"{kind}_loss", math.nan),
        "norm": norm,
        "max norm": row["max_norm"],
        "effective rate": rate / norm**2,
        "average norm": mean_norm,
        "solution norm": mean_norm if averaged else norm,
    }


@torch.no_grad()
def judged(model: nn.Module, batches: Batches, top: int = 1) -> float:
    """The share of held-out samples, in per cent, whose label is among the ``top`` largest
    logits.
    """
    was, hits, count = model.training, 0, 0
    model.eval()
    for batch in batches:
        x, y = batch.data
        logits = model(x)
        best = logits.topk(min(top, logits.shape[-1]), dim=-1).indices
        hits += int((best == y.unsqueeze(-1)).sum())
        count += y.numel()
    model.train(was)
    return 100 * hits / count


def size_of(task: Task) -> Row:
    """P, for tables."""
    return {"parameters": parameters_of(task.model)}


def pairs(rows: Rows, name: str) -> dict[tuple[Any, Any], float]:
    """A column for each network and seed, its mean over what else differs: claims "in all cases"
    are read over both.
    """
    groups: dict[tuple[Any, Any], list[float]] = {}
    for row in rows:
        if row.get(name) is not None:
            groups.setdefault((row.get("network"), row["seed"]), []).append(float(row[name]))
    return {key: sum(found) / len(found) for key, found in groups.items()}


def gap(upper: Rows, lower: Rows, name: str) -> Reading:
    """The difference of two settings, network by network and seed by seed."""
    return paired_difference(pairs(upper, name), pairs(lower, name))


def mean(rows: Rows, name: str) -> Reading:
    """The mean of a column over networks and seeds."""
    return mean_of(list(pairs(rows, name).values()))


def change(rows: Rows, after: str, before: str) -> Reading:
    """One column less another of the same rows, over networks and seeds."""
    return paired_difference(pairs(rows, after), pairs(rows, before))


def decades(upper: Rows, lower: Rows, name: str) -> Reading:
    """log₁₀ of the ratio of two settings, network by network and seed by seed; what has no
    logarithm is left out.
    """
    logs = [
        {
            key: math.log10(value) if value > 0 else math.nan
            for key, value in pairs(part, name).items()
        }
        for part in (upper, lower)
    ]
    return paired_difference(*logs)


def against_best(of: dict[str, Rows], name: str, column: str = "accuracy") -> tuple[str, Reading]:
    """The best of the others by its mean, and how far ``name`` is above it."""
    others = {other: mean(part, column).value for other, part in of.items() if other != name}
    rival = max(others, key=others.__getitem__)
    return rival, gap(of[name], of[rival], column)


def tuned_start(averages: Rows, name: str, lowest: bool = False) -> dict[Any, float]:
    """A column at the start of averaging that is best over the other seeds: no seed chooses for
    itself.
    """
    seeds, best = averages.distinct("seed"), min if lowest else max
    out: dict[Any, float] = {}
    for seed in seeds:
        others = averages.where(seed=[other for other in seeds if other != seed])
        means = others.paired(name, by="start")
        if means:
            chosen = averages.where(seed=seed, start=best(means, key=means.__getitem__))
            out |= chosen.paired(name)
    return out
