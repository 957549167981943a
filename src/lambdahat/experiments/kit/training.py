"""What experiments on images train: a part of a data set, and a network by its name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from lambdahat._check import require, require_choice
from lambdahat._rng import generator
from lambdahat.data.loading import load
from lambdahat.experiments.kit.cells import Cell
from lambdahat.models import all_cnn, lenet5, make_model, preresnet, vgg16, wide_resnet
from lambdahat.network import BATCH_NORMS

Pair = tuple[Tensor, Tensor]

PHOTOGRAPHS = ("cifar10", "cifar100")
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
    """The first ``training`` and the next ``held_out`` images of a data set's training part, in the
    seed's order.

    ``side``, unless 0, pools them to that height and width; ``parity`` makes their classes even and
    odd.
    """
    x, y, classes = _loaded(cell["data"])
    count, held_out = cell["training"], cell["held_out"]
    enough = count + held_out <= len(x)
    require(
        enough,
        "training and held_out",
        f"be at most {len(x):,} together",
        f"{count:,} and {held_out:,}",
    )
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
    # CIFAR's images in another order than the archive's are taken too
    split = load(name, verify=name not in PHOTOGRAPHS, normalization="raw")
    return *split.train, split.classes


def _scaled(x: Tensor, name: str) -> Tensor:
    """Digits and MNIST in [−1, 1], as in the softmax experiment; photographs standardised by
    channel.
    """
    if name not in PHOTOGRAPHS:
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
    """The ways to hold its batch norm when its curvature is taken: the paper's two, or one where
    there is none.
    """
    return (
        ("train", "eval")
        if any(isinstance(layer, BATCH_NORMS) for layer in model.modules())
        else ("eval",)
    )
