"""Data, networks by name and the training run of experiments on images.

``images`` and ``network`` make what a cell names, ``train`` is the training run of every
experiment, and ``loss_and_accuracy``, ``final_row`` and ``hessian_row`` measure its result.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from lambdahat._core.check import require, require_choice, require_count
from lambdahat._core.rng import generator
from lambdahat.data.catalogue import load
from lambdahat.data.splits import augment
from lambdahat.estimators import frobenius_norm, spectrum
from lambdahat.experiments.kit.cells import Cell, Row, Rows, short
from lambdahat.models import all_cnn, lenet5, make_model, preresnet, resnet50, vgg16, wide_resnet
from lambdahat.models.initial import he, initialize
from lambdahat.operators.base import LinearOperator
from lambdahat.operators.curvature import hessian
from lambdahat.optim.schedules import linear_decay
from lambdahat.problem import Problem
from lambdahat.problem.batches import rng_untouched
from lambdahat.problem.network import BATCH_NORMS
from lambdahat.training import Run, fit

Pair = tuple[Tensor, Tensor]

MOMENTUM = 0.9
# images that are evaluated at once: 1,024 take 25 GB in PreResNet-164, and several processes share
# a GPU
PIECE = 256
LEAST_NETWORKS = 3  # networks that have learnt, below which nothing is judged
# of the training accuracy, per cent; the other sets have ten classes
CHANCE = {"cifar100": 1.0, "imagenet32": 0.1, "imagenet": 0.1}
TEN_CLASSES = 10.0
LEARNT_RATIO = 2.0  # times chance
NORM_TOLERANCE = 0.1  # of the Frobenius norm, so about 20 % of its square at 95 % confidence
PHOTOGRAPHS = ("cifar10", "cifar100")
NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "All-CNN": all_cnn,
    "LeNet-5": lenet5,
    "PreResNet-11": partial(preresnet, 11),
    "PreResNet-110": partial(preresnet, 110),
    "PreResNet-164": partial(preresnet, 164),
    "PreResNet-20": partial(preresnet, 20),
    "ResNet-50": resnet50,
    "VGG-16": vgg16,
    "VGG-16-BN": partial(vgg16, batch_norm=True),
    "WideResNet-10×1": partial(wide_resnet, 10, 1),
    "WideResNet-16×4": partial(wide_resnet, 16, 4),
    "WideResNet-28×10": partial(wide_resnet, 28, 10),
}
SMALL = re.compile(r"VGG-4×(\d+)(-BN)?")


class Images(NamedTuple):
    """Inputs (n, C, H, W) and labels to train on and to judge by."""

    training: Pair
    held_out: Pair
    classes: int

    def problem(self, model: nn.Module) -> Problem:
        """The loss of a network on the training images."""
        return Problem(model, "cross_entropy", self.training, batch_size=PIECE)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one image."""
        return tuple(self.training[0].shape[1:])


def images(cell: Cell, device: str) -> Images:
    """The first ``training`` and the next ``held_out`` images of a data set's training part, in the
    seed's order; digits and MNIST in [−1, 1], photographs standardised by channel.

    ``side``, unless 0, pools them to that height and width; ``parity`` makes their classes even and
    odd.
    """
    name, count, held_out = cell["data"], cell["training"], cell["held_out"]
    # CIFAR's images in another order than the archive's are taken too
    options: dict[str, Any] = {"verify": name not in PHOTOGRAPHS, "normalization": "raw"}
    split = load(name, **({} if name == "digits" else options))
    (x, y), classes = split.train, split.classes
    x = x.view(-1, 1, 8, 8) if name == "digits" else x
    together = f"be at most {len(x):,} together"
    enough, came = count + held_out <= len(x), f"{count:,} and {held_out:,}"
    require(enough, "training and held_out", together, came)
    chosen = torch.randperm(len(x), generator=generator(cell["seed"], "split"))[: count + held_out]
    x, y = x[chosen].to(device), y[chosen].to(device)
    if name in PHOTOGRAPHS:
        deviation, mean = torch.std_mean(x.float(), (0, 2, 3), keepdim=True)
        x = (x.float() - mean) / deviation
    else:
        x = 2 * x - 1 if x.is_floating_point() else x.float() / 127.5 - 1
    if cell.get("side"):
        x = adaptive_avg_pool2d(x, cell["side"])
    if cell.get("parity"):
        y, classes = y % 2, 2
    return Images((x[:count], y[:count]), (x[count:], y[count:]), classes)


def small_vgg(
    width: int = 16, batch_norm: bool = True, channels: int = 3, classes: int = 10, seed: int = 0
) -> nn.Sequential:
    """Three 3 × 3 convolutions of w, 2w and 4w filters, each pooled, and a linear layer.

    For images of at least 4 × 4, where VGG-16 needs 32 × 32.

    >>> tuple(small_vgg(4)(torch.zeros(2, 3, 8, 8)).shape)
    (2, 10)
    """
    require_count(width, "width")
    layers: list[nn.Module] = []
    # the layers' own initialisation would draw from the global generator
    with torch.device("meta"):
        inputs = channels
        for outputs in (width, 2 * width, 4 * width):
            norm = [nn.BatchNorm2d(outputs)] if batch_norm else []
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), *norm, nn.ReLU(), nn.MaxPool2d(2)]
            inputs = outputs
        head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)
        model = nn.Sequential(*layers[:-1], *head)
    initialize(model, seed, f"small_vgg{width}", he)
    return model


def network(
    name: str, shape: tuple[int, ...], classes: int, seed: int, device: str | torch.device = "cpu"
) -> nn.Module:
    """A network of ``NETWORKS``, a perceptron by its hidden widths ("MLP-100", "MLP-64-32"), or
    ``small_vgg`` by its width: "VGG-4×16", "VGG-4×16-BN".
    """
    if name.startswith("MLP-"):
        widths = tuple(int(width) for width in name.split("-")[1:])
        return make_model("mlp", shape, classes, seed, widths=widths).to(device)
    if small := SMALL.fullmatch(name):
        model: nn.Module = small_vgg(int(small[1]), small[2] is not None, shape[0], classes, seed)
    else:
        cure = 'or "MLP-100" or "VGG-4×16-BN" of any width'
        make = NETWORKS[require_choice(name, "network", NETWORKS, cure)]
        model = make(channels=shape[0], classes=classes, seed=seed)
    model.to(device)
    if torch.device(device).type == "cuda":  # channels last, as tensor cores read
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def model_and_images(cell: Cell, device: str) -> tuple[nn.Module, Images]:
    """A cell's network, initialised by its seed, and its images."""
    data = images(cell, device)
    return network(cell["network"], data.shape, data.classes, cell["seed"], device), data


def parameters_of(model: nn.Module) -> int:
    """The number of parameters of a network."""
    return sum(parameter.numel() for parameter in model.parameters())


def modes_of(model: nn.Module) -> tuple[str, ...]:
    """The modes of batch norm in which curvature is taken: the paper's two, or one without it."""
    normed = any(isinstance(layer, BATCH_NORMS) for layer in model.modules())
    return ("train", "eval") if normed else ("eval",)


class Watch:
    """A tracker that keeps ``look()`` and the epoch after every ``every``-th epoch."""

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


def train(
    problem: Problem,
    cell: Cell,
    optimizer: Any,
    schedule: Any = None,
    validation: Any = None,
    trackers: Sequence[Any] = (),
) -> Run:
    """``fit`` the model of a problem in place as a cell says.

    The cell has ``epochs``, ``batch`` and ``seed``, and may have ``augmented`` (crops and flips),
    ``clip`` and ``precision``.
    """
    return fit(
        problem,
        optimizer,
        cell["epochs"],
        batch_size=cell["batch"],
        schedule=schedule,
        validation=validation,
        augment=augment if cell.get("augmented") else None,
        clip=cell.get("clip"),
        precision=cell.get("precision", "float32"),
        trackers=trackers,
        seed=cell["seed"],
    )


def train_by_sgd(
    model: nn.Module, data: Images, cell: Cell, decay: float, trackers: Sequence[Any] = ()
) -> Run:
    """Train by SGD with momentum 0.9, L2 decay and the schedule of Eq. 12 of the flatness paper."""
    optimizer = torch.optim.SGD(
        model.parameters(), lr=cell["rate"], momentum=MOMENTUM, weight_decay=decay
    )
    schedule = linear_decay(optimizer, cell["epochs"])
    return train(data.problem(model), cell, optimizer, schedule, data.held_out, trackers)


def curvature_problem(model: nn.Module, data: Images, cell: Cell, norm: str = "eval") -> Problem:
    """The loss on the first ``samples`` training images; in mode "train" batches as in training."""
    x, y = data.training
    count = min(cell["samples"], len(x))
    # its activations fill the memory
    deep = any(isinstance(layer, nn.Conv2d) for layer in model.modules())
    size = min(cell["batch"] if norm == "train" else 128 if deep else 2000, count)
    # a last batch of a few has statistics of its own
    whole = count - count % size if norm == "train" else count
    return Problem(model, "cross_entropy", (x[:whole], y[:whole]), batch_size=size, norm=norm)


def hessian_row(problem: Problem, cell: Cell) -> Row:
    """λ₁, the paper's "Frobenius norm" and the Ritz values, by Lanczos from one random vector."""
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
    """tr(H²)/P with its error: what the paper calls the Frobenius norm, for it lies below λ₁."""
    norm = frobenius_norm(curvature, NORM_TOLERANCE, seed=seed)
    value = float(norm)
    return {
        "frobenius": value**2 / curvature.dim,
        "frobenius stderr": 2 * value * float(norm.stderr) / curvature.dim,
    }


def learnt_rows(rows: Rows) -> tuple[Rows, str]:
    """The rows of the seeds whose networks have learnt, and why they are too few to judge, or "".

    A network that trains to less than twice the accuracy of guessing has not; where all have, any
    number of them is judged.
    """
    name = "training accuracy"
    last = {row["seed"]: row[name] for row in rows if row.get(name) is not None}
    chance = CHANCE.get(rows[0].get("data", ""), TEN_CLASSES)
    failed = [seed for seed, accuracy in last.items() if accuracy < LEARNT_RATIO * chance]
    kept = [seed for seed in last if seed not in failed]
    if not failed:
        return rows, ""
    few = f"{len(kept)} of {len(last)} networks have learnt (training accuracy above"
    reason = f"{few} {LEARNT_RATIO * chance:g} %), fewer than {LEAST_NETWORKS}"
    reason = reason if len(kept) < LEAST_NETWORKS else ""
    return (rows.where(seed=kept) if kept else rows), reason


@torch.no_grad()
def loss_and_accuracy(model: nn.Module, pair: Pair) -> tuple[float, float]:
    """Mean loss and accuracy in per cent, in evaluation mode."""
    was, loss, hits = model.training, 0.0, 0
    model.eval()
    for x, y in zip(pair[0].split(1000), pair[1].split(1000), strict=True):
        logits = model(x)
        loss += float(nn.functional.cross_entropy(logits, y, reduction="sum"))
        hits += int((logits.argmax(-1) == y).sum())
    model.train(was)
    return loss / len(pair[1]), 100 * hits / len(pair[1])


def final_row(model: nn.Module, data: Images) -> Row:
    """Losses and accuracies on both parts, and the length of the weights."""
    loss, accuracy = loss_and_accuracy(model, data.training)
    held_loss, held_accuracy = loss_and_accuracy(model, data.held_out)
    norm = math.sqrt(sum(float(p.detach().double().square().sum()) for p in model.parameters()))
    return {
        "loss": loss,
        "training accuracy": accuracy,
        "validation loss": held_loss,
        "accuracy": held_accuracy,
        "norm": norm,
    }
