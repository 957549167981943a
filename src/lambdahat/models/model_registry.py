"""Every network by name, made to fit the data."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from lambdahat._core.check import require, require_choice, require_count
from lambdahat.models.convolutional import all_cnn, lenet5, vgg16
from lambdahat.models.language import gpt, lstm
from lambdahat.models.perceptrons import deep_linear, mlp, softmax_regression
from lambdahat.models.residual import preresnet, resnet50, resnet101, resnext29, wide_resnet


@dataclass(frozen=True)
class Entry:
    """A network: how to build it, what a sample of its data is ("vectors", "images" or "tokens"),
    and its options.

    ``side`` is the height and width of its images where it takes no others.
    """

    build: Callable[..., nn.Module]
    takes: str
    description: str
    side: int | None = None

    @property
    def options(self) -> tuple[str, ...]:
        """What may be chosen beyond what the data decide."""
        decided = {"inputs", "channels", "classes", "vocabulary", "seed"}
        fixed = self.build.keywords if isinstance(self.build, partial) else {}
        return tuple(
            name
            for name in inspect.signature(self.build).parameters
            if name not in decided | set(fixed)
        )


def _perceptron(
    inputs: int,
    classes: int,
    widths: Sequence[int] = (128,),
    activation: str = "relu",
    dropout: float = 0.0,
    seed: int = 0,
) -> nn.Sequential:
    return mlp([inputs, *widths, classes], activation, seed, dropout)


def _deep_linear(
    inputs: int, classes: int, widths: Sequence[int] = (32, 32), seed: int = 0
) -> nn.Sequential:
    return deep_linear([inputs, *widths, classes], seed=seed)


MODELS: dict[str, Entry] = {
    "softmax": Entry(softmax_regression, "vectors", "softmax regression"),
    "mlp": Entry(_perceptron, "vectors", "multilayer perceptron"),
    "deep_linear": Entry(_deep_linear, "vectors", "deep linear network"),
    "lenet5": Entry(lenet5, "images", "LeNet-5", 28),
    "all_cnn": Entry(all_cnn, "images", "All-CNN-C, nine convolutions"),
    "vgg16": Entry(partial(vgg16, batch_norm=False), "images", "VGG-16", 32),
    "vgg16bn": Entry(partial(vgg16, batch_norm=True), "images", "VGG-16 with batch norm", 32),
    "preresnet110": Entry(partial(preresnet, depth=110), "images", "pre-activation ResNet-110"),
    "preresnet164": Entry(partial(preresnet, depth=164), "images", "pre-activation ResNet-164"),
    "wide_resnet": Entry(wide_resnet, "images", "WideResNet, 28×10 unless told"),
    "resnext29": Entry(resnext29, "images", "ResNeXt-29, 8 × 64d unless told"),
    "resnet50": Entry(resnet50, "images", "ResNet-50"),
    "resnet101": Entry(resnet101, "images", "ResNet-101"),
    "lstm": Entry(lstm, "tokens", "three-layer LSTM language model"),
    "gpt": Entry(gpt, "tokens", "small GPT"),
}


def make_model(
    name: str, shape: Sequence[int] = (3, 32, 32), classes: int = 10, seed: int = 0, **options: Any
) -> nn.Module:
    """The network ``name`` for samples of ``shape`` and ``classes`` outputs.

    ``shape`` is that of one sample without the batch: (64,), or (channels, height, width). Networks
    that take vectors flatten images first. For language models ``classes`` is the size of the
    vocabulary and ``shape`` plays no part. ``MODELS`` lists the names; the options are the
    arguments of the function of the same name.

    >>> sum(p.numel() for p in make_model("softmax", shape=(1, 28, 28)).parameters())
    7850
    """
    entry = MODELS[require_choice(name, "name", MODELS)]
    require_count(classes, "classes")
    unknown = sorted(set(options) - set(entry.options))
    known = ", ".join(entry.options) or "none"
    require(not unknown, "options", f"be among those of {name!r}: {known}", ", ".join(unknown))
    if entry.takes == "tokens":
        return entry.build(vocabulary=classes, seed=seed, **options)
    for size in shape:
        require_count(size, "shape")
    if entry.takes == "images":
        sides = "height, width" if entry.side is None else f"{entry.side}, {entry.side}"
        fits = len(shape) == 3 and (
            entry.side is None or tuple(shape[1:]) == (entry.side, entry.side)
        )
        require(fits, "shape", f"be (channels, {sides}) for {name!r}", repr(tuple(shape)))
        return entry.build(channels=shape[0], classes=classes, seed=seed, **options)
    model = entry.build(inputs=math.prod(shape), classes=classes, seed=seed, **options)
    assert isinstance(model, nn.Sequential)
    return model if len(shape) == 1 else nn.Sequential(nn.Flatten(), *model)
