"""The nine-layer convolutional network without pooling."""

from __future__ import annotations

import torch
from torch import nn

from lambdahat.models.initial import he, initialize
from lambdahat.models.perceptrons import dropouts


def all_cnn(
    channels: int = 3, classes: int = 10, dropout: float = 0.0, seed: int = 0
) -> nn.Sequential:
    """All-CNN-C: nine convolutions, three of them with stride 2 in place of pooling (Springenberg
    et al., 2015).

    Images of 32 × 32. ``dropout`` acts after each stride (0.5 in their paper, 0.2 on their input).
    1,387,108 parameters at 100 classes, the "CNN" of the flatness paper.

    >>> tuple(all_cnn()(torch.zeros(2, 3, 32, 32)).shape)
    (2, 10)
    """
    drop = dropouts(dropout)
    with torch.device("meta"):
        layers: list[nn.Module] = []
        for inputs, outputs, size, stride, padding in _plan(channels, classes):
            layers += [nn.Conv2d(inputs, outputs, size, stride, padding), nn.ReLU()]
            if stride == 2:
                layers += [make() for make in drop]
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    initialize(model, seed, "all_cnn", he)
    return model


def _plan(channels: int, classes: int) -> list[tuple[int, int, int, int, int]]:
    """(inputs, outputs, kernel, stride, padding) of each convolution: Table 1 and 2 of
    Springenberg et al.
    """
    return [
        (channels, 96, 3, 1, 1),
        (96, 96, 3, 1, 1),
        (96, 96, 3, 2, 1),
        (96, 192, 3, 1, 1),
        (192, 192, 3, 1, 1),
        (192, 192, 3, 2, 1),
        (192, 192, 3, 1, 0),
        (192, 192, 1, 1, 0),
        (192, classes, 1, 1, 0),
    ]
