"""Networks of the NGD paper, trained by SGD and by NGD from the same start on the same batches, with their way kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from lambdahat._check import require_choice
from lambdahat._rng import derived_seed, generator
from lambdahat.data.loading import load
from lambdahat.experiments.experiment import Cell
from lambdahat.models.lenet import lenet5
from lambdahat.models.perceptrons import mlp
from lambdahat.optim.ngd import NGD
from lambdahat.problem import Problem
from lambdahat.training.loop import fit

Pair = tuple[Tensor, Tensor]
Net = tuple[str, int, int]  # "ffnn" with so many hidden layers of so many nodes, or ("lenet5", 0, 0)
SIDE = 28  # pixels of LeNet-5's images
POINTS = 100  # of a run that are kept, about


@dataclass(frozen=True)
class Setting:
    """What all runs of a cell share: the data, how long and how fast to train, and how to sample λ̂.

    α and ε are Eq. 7's. Each chain of λ̂ takes ``burn_in`` + ``draws`` steps of SGLD on batches of ``sampled_batch``:
    a chain that finds lower loss than the centre goes on falling, so that its length must not differ between runs.
    A pilot finds the step size where it is not given.
    """

    data: str
    training: int
    held_out: int
    epochs: int
    rate: float = 0.01
    alpha: float = 0.1
    epsilon: float = 1e-10
    batch: int = 128
    chains: int = 4
    draws: int = 500
    burn_in: int = 500
    sampled_batch: int = 512
    localization: float = 100.0
    step_size: float | None = None


@dataclass(frozen=True)
class Point:
    """A place on the way of a run: after ``epoch`` epochs, with L_n over all training data and the parameters (P,)."""

    epoch: float
    loss: float
    vector: Tensor


@dataclass(frozen=True)
class Way:
    """A run: its points, the last one its end, and the update norm of each epoch, ‖∇L‖ or ‖F_s⁻¹∇L‖ (§3.3)."""

    optimizer: str
    points: tuple[Point, ...]
    update_norms: tuple[float, ...]
    diverged: bool = False

    @property
    def end(self) -> Point:
        """Where the run ended."""
        return self.points[-1]

    def at(self, epoch: float) -> Point:
        """The point nearest to an epoch."""
        return min(self.points, key=lambda point: abs(point.epoch - epoch))


class Snapshots:
    """A tracker that keeps the parameters and the loss over all training data every ``every`` steps while finite."""

    unit, name = "step", "snapshots"

    def __init__(self, every: int, steps: int) -> None:
        self.every, self._steps = every, steps
        self.points: list[Point] = []

    def measure(self, problem: Problem, optimizer: Any = None, epoch: int = 0, step: int = 0) -> dict[str, float | str]:
        """Keep where the run is; it gives the row nothing."""
        point = Point(step / self._steps, float(problem.loss()), problem.vector.detach().clone())
        if math.isfinite(point.loss):
            self.points.append(point)
        return {}


@dataclass(frozen=True)
class Subject:
    """A cell's data on a device, its training problem, and the model inside it."""

    setting: Setting
    seed: int
    problem: Problem
    held_out: Problem

    @property
    def model(self) -> nn.Module:
        """The network that training moves."""
        model = self.problem.model
        assert model is not None
        return model

    def place(self, vector: Tensor) -> None:
        """Put the model at parameters (P,)."""
        with torch.no_grad():
            for name, tensor in self.problem.space.unflatten(vector).items():
                self.model.get_parameter(name).copy_(tensor)


def grid(setting: Setting, data: Sequence[str], networks: Sequence[Net], seeds: int) -> list[Cell]:
    """A cell for every data set, network and seed."""
    return [
        {**asdict(replace(setting, data=name)), "network": kind, "layers": layers, "width": width, "seed": seed}
        for name in data
        for kind, layers, width in networks
        for seed in range(seeds)
    ]


def setting_of(cell: Cell) -> Setting:
    """The setting in a cell's fields."""
    return Setting(**{name: cell[name] for name in Setting.__dataclass_fields__})


def subject_of(cell: Cell, device: str) -> Subject:
    """The network of a cell at its start, with images that the cell's seed drew."""
    setting, seed = setting_of(cell), cell["seed"]
    training, held_out, classes = images(setting, cell["network"], seed)
    hidden = [cell["width"]] * cell["layers"]
    model = network(cell["network"], hidden, math.prod(training[0].shape[1:]), classes, seed).to(device)
    near, far = (tuple(part.to(device) for part in pair) for pair in (training, held_out))
    problem = Problem(model, "cross_entropy", near, batch_size=10_000)
    return Subject(setting, seed, problem, problem.on(far))


def images(setting: Setting, network: str, seed: int) -> tuple[Pair, Pair, int]:
    """So many training and held-out images of mean 0 and deviation 1, and the classes; 28 × 28 for LeNet-5."""
    options: dict[str, Any] = {} if setting.data == "digits" else {"normalization": "standard"}
    split = load(setting.data, **options)
    pairs = []
    for (x, y), count, name in zip(split, (setting.training, setting.held_out), ("training", "held out"), strict=True):
        rows = torch.randperm(len(x), generator=generator(seed, name))[:count]
        part = x[rows]
        if setting.data == "digits":
            part = (part - split.train[0].mean()) / split.train[0].std()
        pairs.append((_squares(part) if network == "lenet5" else part.flatten(1), y[rows]))
    return pairs[0], pairs[1], split.classes


def _squares(x: Tensor) -> Tensor:
    """Images (n, 1, 28, 28), enlarged where they are smaller."""
    side = math.isqrt(x[0].numel())
    square = x.view(len(x), 1, side, side)
    return square if side == SIDE else interpolate(square, size=(SIDE, SIDE))


def network(name: str, hidden: Sequence[int], inputs: int, classes: int, seed: int) -> nn.Module:
    """ "ffnn" with these hidden widths, or "lenet5" (§2.1)."""
    if require_choice(name, "network", ("ffnn", "lenet5")) == "lenet5":
        return lenet5(classes=classes, seed=seed)
    return mlp([inputs, *hidden, classes], seed=seed)


def trained(
    subject: Subject,
    optimizer: str,
    start: Tensor | None = None,
    stage: str = "",
    **changes: Any,
) -> Way:
    """Train by "sgd" or "ngd" from ``start`` (the model's parameters as they are).

    ``changes`` replace rate, alpha, epsilon or epochs of the setting. Runs of the same ``stage`` see the same batches.
    """
    setting = subject.setting
    chosen = {name: changes.get(name, getattr(setting, name)) for name in ("rate", "alpha", "epsilon", "epochs")}
    if start is not None:
        subject.place(start)
    parameters = list(subject.model.parameters())
    if require_choice(optimizer, "optimizer", ("sgd", "ngd")) == "sgd":
        rule: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=chosen["rate"])
    else:
        rule = NGD(parameters, lr=chosen["rate"], alpha=chosen["alpha"], epsilon=chosen["epsilon"])
    steps = math.ceil(subject.problem.num_samples / setting.batch)
    total = steps * chosen["epochs"]
    every = next(k for k in range(max(total // POINTS, 1), total + 1) if total % k == 0)  # the end is a point
    kept = Snapshots(every, steps)
    kept.measure(subject.problem)
    run = fit(subject.problem, rule, chosen["epochs"], batch_size=setting.batch, trackers=[kept],
              seed=derived_seed(subject.seed, "order", stage))  # fmt: skip
    norms = tuple(float(row["update_norm"]) for row in run.epochs)
    return Way(optimizer, tuple(kept.points), norms, run.ended == "diverged")


def at_equal_loss(ways: Sequence[Way]) -> list[Point]:
    """A point of each run, all at the highest loss at which any of them ended."""
    goal = max(way.end.loss for way in ways)
    return [min(way.points, key=lambda point: abs(math.log(point.loss / goal))) for way in ways]
