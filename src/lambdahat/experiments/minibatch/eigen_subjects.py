"""Which networks the mini-batch experiment trains, on what data, where it stops to measure, and
at what cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lambdahat._core.rng import derived_seed, generator
from lambdahat.data.loading import load
from lambdahat.data.splits import Split
from lambdahat.models.registry import make_model
from lambdahat.problem import Problem
from lambdahat.training.loop import fit

MOMENTUM = 0.9
TRAINING_BATCH = 128
SIDE = 28  # of the images that LeNet-5 takes
SIZES = tuple(2**power for power in range(4, 13))  # 16 … 4,096


@dataclass(frozen=True)
class Effort:
    """What measuring one point may cost.

    ``pairs`` of the full data's largest eigenpairs, to ``tol``; ``batches`` batches of each size by
    ``steps`` products each; spectra by ``depth`` products; variances from ``probes`` vectors and
    the eigenvectors, on ``samples`` samples (None: all).
    """

    pairs: int = 10
    tol: float = 1e-4
    batches: int = 10
    steps: int = 40
    depth: int = 100
    probes: int = 8
    samples: int | None = None


@dataclass(frozen=True)
class Subject:
    """A network on a data set: how it is trained, the ``epochs`` after which it is measured, and
    the batch sizes.

    ``samples`` of the training images are the full data (None: all); ``chunk`` of them are
    evaluated at a time.
    """

    network: str
    model: str
    data: str
    epochs: tuple[int, ...]
    rate: float
    samples: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    batch_sizes: tuple[int, ...] = SIZES
    effort: Effort = field(default_factory=Effort)
    operators: tuple[str, ...] = ("hessian", "ggn")
    chunk: int | None = None


Device = torch.device | str


def sgd(model: nn.Module, rate: float) -> Optimizer:
    """SGD with momentum 0.9, no decay."""
    return torch.optim.SGD(model.parameters(), rate, momentum=MOMENTUM)


def training_stops(
    subject: Subject,
    split: Split,
    seed: int,
    device: Device,
    make: Callable[[nn.Module, float], Optimizer] = sgd,
) -> Iterator[tuple[int, Problem]]:
    """The network's problem after each of ``subject.epochs``, by the optimiser of ``make`` on
    batches of 128.
    """
    start, data = derived_seed(seed, subject.network), _full_data(subject, split, seed, device)
    model = make_model(
        subject.model, tuple(data[0].shape[1:]), split.classes, start, **subject.options
    ).to(device)
    problem = Problem(model, "cross_entropy", data, batch_size=subject.chunk)
    optimizer = make(model, subject.rate)
    done = 0
    for epoch in subject.epochs:
        if epoch > done:
            fit(
                problem,
                optimizer,
                epoch - done,
                batch_size=TRAINING_BATCH,
                seed=derived_seed(seed, "training", epoch),
            )
        done = epoch
        yield epoch, problem.at(problem.vector)


def _full_data(subject: Subject, split: Split, seed: int, device: Device) -> tuple[Tensor, Tensor]:
    x, y = split.train
    if subject.samples is not None and subject.samples < len(x):
        chosen = torch.randperm(len(x), generator=generator(seed, "full data"))[: subject.samples]
        x, y = x[chosen], y[chosen]
    return cut(x, subject.model).to(device), y.to(device)


def cut(x: Tensor, model: str) -> Tensor:
    """The middle of images (n, C, H, W) that are larger than what LeNet-5 takes; of other
    networks' all.
    """
    if model != "lenet5" or x.shape[-1] == SIDE:
        return x
    edge = (x.shape[-1] - SIDE) // 2
    return x[..., edge : edge + SIDE, edge : edge + SIDE]


def load_split(name: str) -> Split:
    """A data set of the catalogue, images with mean 0 and deviation 1 per channel."""
    if name == "digits":
        return load(name)
    # CIFAR-10 in another order passes too
    return load(name, verify=name != "cifar10", normalization="standard")


QUICK = Effort(pairs=3, batches=3, steps=20, depth=20, probes=2, samples=64)
CPU = Effort(steps=30, probes=4, samples=1024)
CONVOLUTIONS = Effort(pairs=5, tol=1e-3, steps=20, depth=40, probes=4, samples=512)
PAPER = Effort(steps=25, probes=4, samples=2048)
LARGE = Effort(pairs=4, tol=1e-2, steps=10, depth=24, probes=4, samples=128)
ONE = ("hessian",)  # of a linear model the GGN is the Hessian
FEW = (16, 64, 128, 512, 4096)

SCALES: dict[str, tuple[Subject, ...]] = {
    "smoke": (
        Subject("softmax", "softmax", "digits", (5,), 0.1, 400, {}, (16, 128), QUICK, ONE),
        Subject("MLP", "mlp", "digits", (0, 5), 0.1, 400, {"widths": (6,)}, (16, 128), QUICK),
    ),
    "cpu": (
        Subject("softmax", "softmax", "mnist", (0, 1, 20), 0.02, 10_000, effort=CPU, operators=ONE),
        Subject("MLP", "mlp", "mnist", (0, 1, 20), 0.02, 10_000, {"widths": (32,)}, effort=CPU),
        Subject(
            "LeNet-5",
            "lenet5",
            "mnist",
            (0, 10),
            0.02,
            4000,
            {},
            (16, 64, 128, 256, 1024),
            CONVOLUTIONS,
        ),
    ),
    "paper": (
        Subject("softmax", "softmax", "mnist", (0, 1, 30), 0.02, effort=PAPER, operators=ONE),
        Subject("MLP", "mlp", "mnist", (0, 1, 30), 0.02, None, {"widths": (128,)}, effort=PAPER),
        Subject("LeNet-5", "lenet5", "mnist", (0, 1, 30), 0.02, 20_000, effort=PAPER),
        Subject("LeNet-5, CIFAR-10", "lenet5", "cifar10", (0, 1, 30), 0.02, 20_000, effort=PAPER),
        Subject(
            "VGG-16",
            "vgg16",
            "cifar10",
            (0, 5, 30),
            0.01,
            10_000,
            {"dropout": 0.0},
            FEW,
            LARGE,
            chunk=2000,
        ),
    ),
}
