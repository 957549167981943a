"""Residual networks for images of 32 × 32: ResNet, ResNeXt, PreResNet and WideResNet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from lambdahat._core.check import require, require_choice, require_count
from lambdahat.models.initial import he, initialize
from lambdahat.models.model_registry import register_model
from lambdahat.models.perceptrons import dropouts


class Residual(nn.Module):
    """shortcut(x) + branch(x)."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch, self.shortcut = branch, shortcut

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.shortcut(x) + self.branch(x)
        return out


class Bottleneck(Residual):
    """relu(shortcut(x) + branch(x)): convolutions 1 × 1, 3 × 3 (stride, groups), 1 × 1, with bn."""

    def __init__(self, inputs: int, inner: int, outputs: int, stride: int, groups: int = 1) -> None:
        branch = nn.Sequential(
            *(nn.Conv2d(inputs, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU()),
            nn.Conv2d(inner, inner, 3, stride, 1, groups=groups, bias=False),
            *(nn.BatchNorm2d(inner), nn.ReLU()),
            *(nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            projection = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            shortcut = nn.Sequential(projection, nn.BatchNorm2d(outputs))
        super().__init__(branch, shortcut)
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.activation(super().forward(x))
        return out


@register_model("resnet50", "images", "ResNet-50", {1000: 25_557_032})
def resnet50(
    channels: int = 3, classes: int = 1000, stem: str = "imagenet", seed: int = 0
) -> nn.Sequential:
    """ResNet-50 (He et al., 2016; the stride in the 3 × 3 convolution): 25,557,032 parameters at
    1,000 classes.

    ``stem="cifar"`` starts with one 3 × 3 convolution and no pooling, for images of 32 × 32.
    """
    return _resnet((3, 4, 6, 3), channels, classes, stem, seed, "resnet50")


@register_model("resnet101", "images", "ResNet-101", {1000: 44_549_160})
def resnet101(
    channels: int = 3, classes: int = 1000, stem: str = "imagenet", seed: int = 0
) -> nn.Sequential:
    """ResNet-101, as ``resnet50``: 44,549,160 parameters at 1,000 classes."""
    return _resnet((3, 4, 23, 3), channels, classes, stem, seed, "resnet101")


@register_model(
    "resnext29",
    "images",
    "ResNeXt-29, 8 × 64d by default",
    small={"cardinality": 2, "base_width": 4},
)
def resnext29(
    channels: int = 3, classes: int = 10, cardinality: int = 8, base_width: int = 64, seed: int = 0
) -> nn.Sequential:
    """ResNeXt-29, ``cardinality`` × ``base_width``d, for images of 32 × 32 (Xie et al., 2017).

    34.4 M parameters at 8 × 64d and 68.1 M at 16 × 64d, as they print for ten classes.

    >>> tuple(resnext29(cardinality=2, base_width=4)(torch.zeros(2, 3, 32, 32)).shape)
    (2, 10)
    """
    first = require_count(cardinality, "cardinality") * require_count(base_width, "base_width")
    with torch.device("meta"):
        stages = [(first * 2**i, 256 * 2**i, 3, 1 if i == 0 else 2) for i in range(3)]
        blocks = _stages(64, stages, cardinality)
        model = nn.Sequential(*_stem("cifar", channels), *blocks, *_head(1024, classes))
    return initialize(model, seed, f"resnext29_{cardinality}x{base_width}d", he)


def _resnet(
    counts: Sequence[int], channels: int, classes: int, stem: str, seed: int, name: str
) -> nn.Sequential:
    with torch.device("meta"):
        places = enumerate(counts)
        stages = [(64 * 2**i, 256 * 2**i, count, 1 if i == 0 else 2) for i, count in places]
        model = nn.Sequential(*_stem(stem, channels), *_stages(64, stages), *_head(2048, classes))
    return initialize(model, seed, name, he)


def _stem(kind: str, channels: int) -> list[nn.Module]:
    if require_choice(kind, "stem", ("imagenet", "cifar")) == "cifar":
        return [nn.Conv2d(channels, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    first = nn.Conv2d(channels, 64, 7, 2, 3, bias=False)
    return [first, nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]


def _stages(
    inputs: int, stages: Sequence[tuple[int, int, int, int]], groups: int = 1
) -> list[nn.Module]:
    """Blocks for every (inner width, outputs, how many, stride of the first)."""
    blocks: list[nn.Module] = []
    for inner, outputs, count, stride in stages:
        for block in range(count):
            blocks.append(Bottleneck(inputs, inner, outputs, stride if block == 0 else 1, groups))
            inputs = outputs
    return blocks


def _head(inputs: int, classes: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]


def _preactivation(
    stem: nn.Module,
    width: int,
    blocks: int,
    make: Callable[[int, int, int], nn.Module],
    expansion: int,
    classes: int,
) -> nn.Sequential:
    """Three stages of ``blocks`` blocks ``make(inputs, width, stride)``, each twice as wide."""
    layers, inputs = [stem], 16
    for stage in range(3):
        for block in range(blocks):
            layers.append(make(inputs, width * 2**stage, 2 if stage and block == 0 else 1))
            inputs = expansion * width * 2**stage
    return nn.Sequential(*layers, nn.BatchNorm2d(inputs), nn.ReLU(), *_head(inputs, classes))


EXPANSION = 4


def _shortcut(inputs: int, outputs: int, stride: int, bias: bool = False) -> nn.Module:
    """The identity, or a 1 × 1 convolution where the shape changes."""
    same = stride == 1 and inputs == outputs
    return nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=bias)


def _bottleneck(inputs: int, width: int, stride: int) -> Residual:
    """x + W₃ relu(bn(W₂ relu(bn(W₁ relu(bn(x)))))), with 1 × 1, 3 × 3 and 1 × 1 convolutions."""
    outputs = EXPANSION * width
    branch = nn.Sequential(
        *(nn.BatchNorm2d(inputs), nn.ReLU(), nn.Conv2d(inputs, width, 1, bias=False)),
        *(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, stride, 1, bias=False)),
        *(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, outputs, 1, bias=False)),
    )
    return Residual(branch, _shortcut(inputs, outputs, stride))


@register_model("preresnet164", "images", "pre-activation ResNet-164", {100: 1_726_388}, depth=164)
@register_model("preresnet110", "images", "pre-activation ResNet-110", depth=110)
def preresnet(
    depth: int = 164, channels: int = 3, classes: int = 10, seed: int = 0
) -> nn.Sequential:
    """A pre-activation residual network of ``depth`` = 9n + 2 layers: three stages of n bottlenecks
    (He et al., 2016).

    PreResNet-164 has 1,726,388 parameters at 100 classes, as the flatness paper prints.
    PreResNet-110 is that of the stochastic-weight-averaging code, bottlenecks too.

    >>> tuple(preresnet(11)(torch.zeros(2, 3, 32, 32)).shape)
    (2, 10)
    """
    blocks, rest = divmod(depth - 2, 9)
    require(rest == 0 and blocks > 0, "depth", "be 9n + 2, such as 110 or 164", repr(depth))
    with torch.device("meta"):
        stem = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        model = _preactivation(stem, 16, blocks, _bottleneck, EXPANSION, classes)
    return initialize(model, seed, f"preresnet{depth}", he)


def _wide_block(inputs: int, outputs: int, stride: int, bias: bool, dropout: float) -> Residual:
    """x + W₂ relu(bn(W₁ relu(bn(x)))), both convolutions 3 × 3; the second has the stride."""
    branch = nn.Sequential(
        *(nn.BatchNorm2d(inputs), nn.ReLU(), nn.Conv2d(inputs, outputs, 3, 1, 1, bias=bias)),
        *(make() for make in dropouts(dropout)),
        *(nn.BatchNorm2d(outputs), nn.ReLU()),
        nn.Conv2d(outputs, outputs, 3, stride, 1, bias=bias),
    )
    return Residual(branch, _shortcut(inputs, outputs, stride, bias))


@register_model(
    "wide_resnet",
    "images",
    "WideResNet, 28×10 by default",
    {100: 36_546_980},
    small={"depth": 10, "width": 1},
)
def wide_resnet(
    depth: int = 28,
    width: int = 10,
    channels: int = 3,
    classes: int = 10,
    bias: bool = True,
    dropout: float = 0.0,
    seed: int = 0,
) -> nn.Sequential:
    """WideResNet-``depth``×``width``, depth = 6n + 4 (Zagoruyko and Komodakis, 2016).

    With convolution biases, as in the code the flatness paper used, WideResNet-28×10 has 36,546,980
    parameters at 100 classes; without, 36,536,884.

    >>> tuple(wide_resnet(10, 1)(torch.zeros(2, 3, 32, 32)).shape)
    (2, 10)
    """
    blocks, rest = divmod(depth - 4, 6)
    require(rest == 0 and blocks > 0, "depth", "be 6n + 4, such as 28", repr(depth))
    require_count(width, "width")
    make = partial(_wide_block, bias=bias, dropout=dropout)
    with torch.device("meta"):
        stem = nn.Conv2d(channels, 16, 3, padding=1, bias=bias)
        model = _preactivation(stem, 16 * width, blocks, make, 1, classes)
    return initialize(model, seed, f"wide_resnet{depth}x{width}", he)
