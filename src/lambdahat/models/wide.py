"""Wide residual networks for images of 32 × 32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lambdahat._core.check import require, require_count
from lambdahat.models.initial import he, initialize
from lambdahat.models.perceptrons import dropouts


class WideBlock(nn.Module):
    """x + W₂ relu(bn(W₁ relu(bn(x)))), both convolutions 3 × 3; the second has the stride."""

    def __init__(self, inputs: int, outputs: int, stride: int, bias: bool, dropout: float) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.BatchNorm2d(inputs),
            nn.ReLU(),
            nn.Conv2d(inputs, outputs, 3, 1, 1, bias=bias),
            *(make() for make in dropouts(dropout)),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, stride, 1, bias=bias),
        )
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.shortcut(x) + self.branch(x)
        return out


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
    with torch.device("meta"):
        layers: list[nn.Module] = [nn.Conv2d(channels, 16, 3, padding=1, bias=bias)]
        inputs = 16
        for outputs, stride in ((16 * width, 1), (32 * width, 2), (64 * width, 2)):
            for block in range(blocks):
                layers.append(
                    WideBlock(inputs, outputs, stride if block == 0 else 1, bias, dropout)
                )
                inputs = outputs
        head = [
            nn.BatchNorm2d(inputs),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(inputs, classes),
        ]
        model = nn.Sequential(*layers, *head)
    initialize(model, seed, f"wide_resnet{depth}x{width}", he)
    return model
