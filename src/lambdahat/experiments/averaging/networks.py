"""The networks of the Gadam chapter, and a small one of any width that does with and without
batch norm.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from lambdahat._core.check import require, require_choice, require_count
from lambdahat.experiments.kit.training import NETWORKS as LARGE
from lambdahat.models import preresnet, resnet50, wide_resnet
from lambdahat.models.initial import he, initialize

NETWORKS: dict[str, Callable[..., nn.Module]] = {
    **LARGE,
    "PreResNet-20": partial(preresnet, 20),
    "ResNet-50": resnet50,
    "WideResNet-16×4": partial(wide_resnet, 16, 4),
}
SMALL = re.compile(r"VGG-4×(\d+)(-BN)?")


def small_vgg(
    width: int = 16, batch_norm: bool = True, channels: int = 3, classes: int = 10, seed: int = 0
) -> nn.Sequential:
    """Three 3 × 3 convolutions of w, 2w and 4w filters, pooled between, a mean over places and a
    linear layer.

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
        model = nn.Sequential(
            *layers[:-1], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)
        )
    initialize(model, seed, f"small_vgg{width}", he)
    return model


def network(name: str, shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
    """A network of ``NETWORKS``, or ``small_vgg`` by its width: "VGG-4×16", "VGG-4×16-BN"."""
    small = SMALL.fullmatch(name)
    require(len(shape) == 3, "shape", "be (channels, height, width)", repr(shape))
    if small is not None:
        return small_vgg(int(small[1]), small[2] is not None, shape[0], classes, seed)
    make = NETWORKS[require_choice(name, "network", NETWORKS, 'or "VGG-4×16-BN" of any width')]
    return make(channels=shape[0], classes=classes, seed=seed)


def family(name: str) -> str:
    """The first word of a network's name: "VGG" of "VGG-16-BN"."""
    return name.split("-")[0]


def parameters_of(model: nn.Module) -> int:
    """P."""
    return sum(parameter.numel() for parameter in model.parameters())
