"""What the experiments of the flatness paper share: images, networks, training by Eq. 12, and how sharp the end is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from lambdahat._check import require, require_choice
from lambdahat._rng import generator
from lambdahat.batches import rng_untouched
from lambdahat.data.augmentation import augment
from lambdahat.data.loading import load
from lambdahat.estimators.norms import frobenius_norm
from lambdahat.estimators.spectra import spectrum
from lambdahat.experiments.charts import Series
from lambdahat.experiments.experiment import Cell, Row, Rows
from lambdahat.experiments.statistics import Reading, mean_of, paired_difference
from lambdahat.models import all_cnn, lenet5, make_model, preresnet, vgg16, wide_resnet
from lambdahat.network import BATCH_NORMS
from lambdahat.operators.base import LinearOperator
from lambdahat.operators.curvature import hessian
from lambdahat.optim.schedules import linear_decay
from lambdahat.problem import Problem
from lambdahat.training import Run, fit

PAPER = "Flatness is a false friend"
MOMENTUM = 0.9
NORM_TOLERANCE = 0.1  # of the Frobenius norm, so about 20 % of its square at 95 % confidence
Pair = tuple[Tensor, Tensor]

NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "All-CNN": all_cnn,
    "LeNet-5": lenet5,
    "PreResNet-11": partial(preresnet, 11),
    "PreResNet-110": partial(preresnet, 110),
    "PreResNet-164": partial(preresnet, 164),
    "VGG-16": vgg16,
    "VGG-16-BN": partial(vgg16, batch_norm=True),
    "WideResNet-10×1": partial(wide_resnet, 10, 1),
    "WideResNet-28×10": partial(wide_resnet, 28, 10),
}


class Images(NamedTuple):
    """Inputs (n, C, H, W) and labels to train on and to judge by."""

    training: Pair
    held_out: Pair
    classes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """That of one image."""
        return tuple(self.training[0].shape[1:])


def images(cell: Cell, device: str) -> Images:
    """The first ``training`` and the next ``held_out`` images of a data set's training part, in the seed's order.

    ``side``, unless 0, pools them to that height and width; ``parity`` makes their classes even and odd.
    """
    x, y, classes = _loaded(cell["data"])
    count, held_out = cell["training"], cell["held_out"]
    enough = count + held_out <= len(x)
    require(enough, "training and held_out", f"be at most {len(x):,} together", f"{count:,} and {held_out:,}")
    chosen = torch.randperm(len(x), generator=generator(cell["seed"], "split"))[: count + held_out]
    x, y = _scaled(x[chosen].to(device), cell["data"]), y[chosen].to(device)
    if cell.get("side"):
        x = adaptive_avg_pool2d(x, cell["side"])
    if cell.get("parity"):
        y, classes = y % 2, 2
    return Images((x[:count], y[:count]), (x[count:], y[count:]), classes)


def _loaded(name: str) -> tuple[Tensor, Tensor, int]:
    """The images as they are stored: bytes, of which a part is soon made numbers."""
    if name == "digits":
        split = load(name)
        return split.train[0].view(-1, 1, 8, 8), split.train[1], split.classes
    split = load(name, verify=name != "cifar10", normalization="raw")  # CIFAR-10 in another order passes too
    return *split.train, split.classes


def _scaled(x: Tensor, name: str) -> Tensor:
    """Digits and MNIST in [−1, 1], as in the softmax experiment; photographs standardised by channel."""
    if name != "cifar10":
        return 2 * x - 1 if x.is_floating_point() else x.float() / 127.5 - 1
    pixels = x.float()
    deviation, mean = torch.std_mean(pixels, (0, 2, 3), keepdim=True)
    return (pixels - mean) / deviation


def network(name: str, found: Images, seed: int) -> nn.Module:
    """A network of ``NETWORKS``, or a perceptron by its hidden widths: "MLP-100", "MLP-64-32"."""
    device = found.training[0].device
    if name.startswith("MLP-"):
        widths = tuple(int(width) for width in name.split("-")[1:])
        return make_model("mlp", found.shape, found.classes, seed, widths=widths).to(device)
    make = NETWORKS[require_choice(name, "network", NETWORKS)]
    return make(channels=found.shape[0], classes=found.classes, seed=seed).to(device)


def modes_of(model: nn.Module) -> tuple[str, ...]:
    """The ways to hold its batch norm when its curvature is taken: the paper's two, or one where there is none."""
    return ("train", "eval") if any(isinstance(layer, BATCH_NORMS) for layer in model.modules()) else ("eval",)


class Watch:
    """A tracker that keeps what ``look()`` says after every ``every``-th epoch, beside the number of the epoch."""

    name, unit = "watch", "epoch"

    def __init__(self, look: Callable[[], Row], every: int) -> None:
        self.look, self.every = look, every
        self.rows: list[Row] = []

    def measure(self, problem: Problem, optimizer: Any = None, epoch: int = 0, step: int = 0) -> dict[str, float]:
        """Look; nothing goes into the run's own rows."""
        with rng_untouched(), torch.enable_grad():
            self.rows.append({"epoch": epoch, **self.look()})
        return {}


def descend(model: nn.Module, found: Images, cell: Cell, decay: float, trackers: Sequence[Any] = ()) -> Run:
    """Train in place by SGD with momentum 0.9, L2 decay and the schedule of Eq. 12."""
    optimizer = torch.optim.SGD(model.parameters(), lr=cell["rate"], momentum=MOMENTUM, weight_decay=decay)
    return run_fit(model, found, cell, optimizer, linear_decay(optimizer, cell["epochs"]), trackers)


def run_fit(
    model: nn.Module, found: Images, cell: Cell, optimizer: Any, schedule: Any, trackers: Sequence[Any] = ()
) -> Run:
    """``fit`` with the cell's epochs, batch size, seed and, where it says so, crops and flips and another precision."""
    problem = Problem(model, "cross_entropy", found.training)
    return fit(
        problem, optimizer, cell["epochs"], batch_size=cell["batch"], schedule=schedule, validation=found.held_out,
        augment=augment if cell.get("augmented") else None, precision=cell.get("precision", "float32"),
        trackers=trackers, seed=cell["seed"],
    )  # fmt: skip


def curvature_problem(model: nn.Module, found: Images, cell: Cell, norm: str = "eval") -> Problem:
    """The loss on the first ``samples`` training images, in batches of the training's size where they matter."""
    x, y = found.training
    count = min(cell["samples"], len(x))
    deep = any(isinstance(layer, nn.Conv2d) for layer in model.modules())  # its activations fill the memory
    size = min(cell["batch"] if norm == "train" else 256 if deep else 2000, count)
    whole = count - count % size if norm == "train" else count  # a last batch of a few has statistics of its own
    return Problem(model, "cross_entropy", (x[:whole], y[:whole]), batch_size=size, norm=norm)


def measured(problem: Problem, cell: Cell) -> Row:
    """λ₁, the "Frobenius norm" of the paper, and the Ritz values of its spectrum, by Lanczos from one random vector."""
    curvature = hessian(problem)
    shape = spectrum(curvature, depth=min(cell["depth"], problem.num_parameters), seed=cell["seed"])
    return {
        "parameters": problem.num_parameters, "curvature loss": problem.loss(),
        "largest": float(shape.extremes[1]), "largest residual": float(shape.extremes[1].stderr),
        "smallest": float(shape.extremes[0]), **mean_square(curvature, cell["seed"]),
        "nodes": short(shape.nodes[0]), "weights": short(shape.weights[0]),
    }  # fmt: skip


def mean_square(curvature: LinearOperator, seed: int) -> Row:
    """tr(H²)/P with its error: what the paper calls the Frobenius norm, for its figures lie below λ₁."""
    norm = frobenius_norm(curvature, NORM_TOLERANCE, seed=seed)
    value = float(norm)
    return {
        "frobenius": value**2 / curvature.dim,
        "frobenius stderr": 2 * value * float(norm.stderr) / curvature.dim,
    }


def short(values: Any) -> list[float]:
    """Four digits of each: a figure needs no more."""
    return [float(f"{float(value):.4g}") for value in values]


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
    (loss, accuracy), (held_loss, held_accuracy) = judged(model, found.training), judged(model, found.held_out)
    norm = math.sqrt(sum(float(p.detach().double().square().sum()) for p in model.parameters()))
    return {
        "loss": loss, "training accuracy": accuracy, "validation loss": held_loss, "accuracy": held_accuracy,
        "norm": norm,
    }  # fmt: skip


def logs(rows: Rows, name: str) -> dict[Any, float]:
    """log₁₀ of a column for each seed; NaN where it is not positive."""
    return {seed: math.log10(value) if value > 0 else math.nan for seed, value in rows.paired(name).items()}


def decades(upper: Rows, lower: Rows, name: str) -> Reading:
    """log₁₀ of the ratio of two settings, seed by seed."""
    return paired_difference(logs(upper, name), logs(lower, name))


def gap(upper: Rows, lower: Rows, name: str) -> Reading:
    """The difference of two settings, seed by seed."""
    return paired_difference(upper.paired(name), lower.paired(name))


def over_seeds(rows: Rows, name: str) -> Reading:
    """The mean of a column over the seeds."""
    return mean_of(list(rows.paired(name).values()))


def curve(label: str, rows: Rows, name: str, x: str = "epoch") -> Series:
    """The mean over seeds at each x, with its error where there is more than one seed."""
    places = sorted({row[x] for row in rows if row.get(name) is not None})
    readings = [over_seeds(rows.where(**{x: place}), name) for place in places]
    return Series(label, places, [reading.value for reading in readings], errors(readings))


def errors(readings: Sequence[Reading]) -> list[float | None]:
    """Standard errors, None where there is none."""
    return [reading.stderr if math.isfinite(reading.stderr) else None for reading in readings]


def titled(words: str) -> str:
    """With a capital; λ stays as it is."""
    return words if words.startswith("λ") else words[0].upper() + words[1:]


def stems(label: str, row: Mapping[str, Any]) -> Series:
    """The Ritz values of one row."""
    return Series(label, row["nodes"], row["weights"], style="stems")
