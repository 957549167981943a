"""Residual networks with the norm and activation before each convolution, for images of 32 × 32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lambdahat._core.check import require
from lambdahat.models.initial import he, initialize

EXPANSION = 4


class Bottleneck(nn.Module):
    """x + W₃ relu(bn(W₂ relu(bn(W₁ relu(bn(x)))))), with 1 × 1, 3 × 3 and 1 × 1 convolutions."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.branch = nn.Sequential(
            nn.BatchNorm2d(inputs),
            nn.ReLU(),
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False),
        )
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.shortcut(x) + self.branch(x)
        return out


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
        layers: list[nn.Module] = [nn.Conv2d(channels, 16, 3, padding=1, bias=False)]
        inputs = 16
        for width, stride in ((16, 1), (32, 2), (64, 2)):
            for block in range(blocks):
                layers.append(Bottleneck(inputs, width, stride if block == 0 else 1))
                inputs = EXPANSION * width
        head = [
            nn.BatchNorm2d(inputs),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(inputs, classes),
        ]
        model = nn.Sequential(*layers, *head)
    initialize(model, seed, f"preresnet{depth}", he)
    return model
