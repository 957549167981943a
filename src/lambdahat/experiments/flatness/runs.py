"""What the experiments of the flatness paper share: training by Eq. 12, and how sharp the end
is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lambdahat.batches import rng_untouched
from lambdahat.data.augmentation import augment
from lambdahat.estimators.norms import frobenius_norm
from lambdahat.estimators.spectra import spectrum
from lambdahat.experiments.kit import Cell, Row, short
from lambdahat.experiments.kit.training import Images, Pair
from lambdahat.operators.base import LinearOperator
from lambdahat.operators.curvature import hessian
from lambdahat.optim.schedules import linear_decay
from lambdahat.problem import Problem
from lambdahat.training import Run, fit

MOMENTUM = 0.9
# images that are evaluated at once: 8,192 take 20 GB in VGG-16, and several processes share a GPU
PIECE = 1024
NORM_TOLERANCE = 0.1  # of the Frobenius norm, so about 20 % of its square at 95 % confidence


class Watch:
    """A tracker that keeps what ``look()`` says after every ``every``-th epoch, beside the
    number of the epoch.
    """

    name, unit = "watch", "epoch"

    def __init__(self, look: Callable[[], Row], every: int) -> None:
        self.look, self.every = look, every
        self.rows: list[Row] = []

    def measure(
        self, problem: Problem, optimizer: Any = None, epoch: int = 0, step: int = 0
    ) -> dict[str, float]:
        """Look; nothing goes into the run's own rows."""
        with rng_untouched(), torch.enable_grad():
            self.rows.append({"epoch": epoch, **self.look()})
        return {}


def descend(
    model: nn.Module, found: Images, cell: Cell, decay: float, trackers: Sequence[Any] = ()
) -> Run:
    """Train in place by SGD with momentum 0.9, L2 decay and the schedule of Eq. 12."""
    optimizer = torch.optim.SGD(
        model.parameters(), lr=cell["rate"], momentum=MOMENTUM, weight_decay=decay
    )
    return run_fit(model, found, cell, optimizer, linear_decay(optimizer, cell["epochs"]), trackers)


def run_fit(
    model: nn.Module,
    found: Images,
    cell: Cell,
    optimizer: Any,
    schedule: Any,
    trackers: Sequence[Any] = (),
) -> Run:
    """``fit`` with the cell's epochs, batch size, seed and, where it says so, crops and flips
    and another precision.
    """
    problem = Problem(model, "cross_entropy", found.training, batch_size=PIECE)
    return fit(
        problem,
        optimizer,
        cell["epochs"],
        batch_size=cell["batch"],
        schedule=schedule,
        validation=found.held_out,
        augment=augment if cell.get("augmented") else None,
        precision=cell.get("precision", "float32"),
        trackers=trackers,
        seed=cell["seed"],
    )


def curvature_problem(model: nn.Module, found: Images, cell: Cell, norm: str = "eval") -> Problem:
    """The loss on the first ``samples`` training images, in batches of the training's size where
    they matter.
    """
    x, y = found.training
    count = min(cell["samples"], len(x))
    # its activations fill the memory
    deep = any(isinstance(layer, nn.Conv2d) for layer in model.modules())
    size = min(cell["batch"] if norm == "train" else 256 if deep else 2000, count)
    # a last batch of a few has statistics of its own
    whole = count - count % size if norm == "train" else count
    return Problem(model, "cross_entropy", (x[:whole], y[:whole]), batch_size=size, norm=norm)


def measured(problem: Problem, cell: Cell) -> Row:
    """λ₁, the "Frobenius norm" of the paper, and the Ritz values of its spectrum, by Lanczos
    from one random vector.
    """
    curvature = hessian(problem)
    shape = spectrum(curvature, depth=min(cell["depth"], problem.num_parameters), seed=cell["seed"])
    return {
        "parameters": problem.num_parameters,
        "curvature loss": problem.loss(),
        "largest": float(shape.extremes[1]),
        "largest residual": float(shape.extremes[1].stderr),
        "smallest": float(shape.extremes[0]),
        **mean_square(curvature, cell["seed"]),
        "nodes": short(shape.nodes[0]),
        "weights": short(shape.weights[0]),
    }


def mean_square(curvature: LinearOperator, seed: int) -> Row:
    """tr(H²)/P with its error: what the paper calls the Frobenius norm, for its figures lie
    below λ₁.
    """
    norm = frobenius_norm(curvature, NORM_TOLERANCE, seed=seed)
    value = float(norm)
    return {
        "frobenius": value**2 / curvature.dim,
        "frobenius stderr": 2 * value * float(norm.stderr) / curvature.dim,
    }


@torch.no_grad()
def judged(model: nn.Module, pair: Pair) -> tuple[float, float]:
    """Mean loss and accuracy in per cent, in evaluation mode."""
    was, loss, hits = model.training, 0.0, 0
    model.eval()
    for x, y in zip(pair[0].split(1000), pair[1].split(1000), strict=True):
        logits = model(x)
        loss += float(nn.functional.cross_entropy(logits, y, reduction="sum"))
        hits += int((logits.argmax(-1) == y).sum())
    model.train(was)
    return loss / len(pair[1]), 100 * hits / len(pair[1])


def ends(model: nn.Module, found: Images) -> Row:
    """Losses and accuracies on both parts, and the length of the weights."""
    (loss, accuracy), (held_loss, held_accuracy) = (
        judged(model, found.training),
        judged(model, found.held_out),
    )
    norm = math.sqrt(sum(float(p.detach().double().square().sum()) for p in model.parameters()))
    return {
        "loss": loss,
        "training accuracy": accuracy,
        "validation loss": held_loss,
        "accuracy": held_accuracy,
        "norm": norm,
    }


def titled(words: str) -> str:
    """With a capital; λ stays as it is."""
    return words if words.startswith("λ") else words[0].upper() + words[1:]
