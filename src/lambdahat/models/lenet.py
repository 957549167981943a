"""LeNet-5."""

from __future__ import annotations

import torch
from torch import nn

from lambdahat.models.initial import initialize


def lenet5(channels: int = 1, classes: int = 10, seed: int = 0) -> nn.Sequential:
    """LeNet-5 with ReLU and max pooling, for images of 28 × 28 (LeCun et al., 1998; the first layer
    pads by 2).

    61,706 parameters at one channel and ten classes.

    >>> tuple(lenet5()(torch.zeros(2, 1, 28, 28)).shape)
    (2, 10)
    """
    # the layers' own initialisation would draw from the global generator
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Conv2d(channels, 6, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(400, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, classes),
        )
    initialize(model, seed, "lenet5")
    return model
