"""VGG-16 for images of 32 × 32."""

from __future__ import annotations

import torch
from torch import nn

from lambdahat.models.initial import he, initialize
from lambdahat.models.perceptrons import dropouts

WIDTHS = (64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512)


def vgg16(
    channels: int = 3,
    classes: int = 10,
    batch_norm: bool = False,
    dropout: float = 0.5,
    seed: int = 0,
) -> nn.Sequential:
    """VGG-16 (Simonyan and Zisserman, 2015) in the form for CIFAR of the
    stochastic-weight-averaging code.

    Thirteen convolutions with biases in five groups, each closed by max pooling, then three linear
    layers of 512, 512 and ``classes``. At 100 classes 15,291,300 parameters without batch norm, the
    count the spectral thesis prints, and 15,299,748 with it.
    """
    drop = dropouts(dropout)
    layers: list[nn.Module] = []
    with torch.device("meta"):
        inputs = channels
        for group in WIDTHS:
            for outputs in group:
                norm = [nn.BatchNorm2d(outputs)] if batch_norm else []
                layers += [nn.Conv2d(inputs, outputs, 3, padding=1), *norm, nn.ReLU()]
                inputs = outputs
            layers.append(nn.MaxPool2d(2))
        layers.append(nn.Flatten())
        for _ in range(2):
            layers += [*(make() for make in drop), nn.Linear(512, 512), nn.ReLU()]
        model = nn.Sequential(*layers, nn.Linear(512, classes))
    initialize(model, seed, "vgg16", he)
    return model
