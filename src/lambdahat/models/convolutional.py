"""Convolutional networks without shortcuts: LeNet-5, All-CNN-C and VGG-16."""

from __future__ import annotations

import torch
from torch import nn

from lambdahat.models.initial import he, initialize
from lambdahat.models.model_registry import register_model
from lambdahat.models.perceptrons import dropouts


@register_model("all_cnn", "images", "All-CNN-C, nine convolutions", {100: 1_387_108})
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
    # (outputs, kernel, stride, padding) by Tables 1 and 2 of Springenberg et al.
    plan = [(96, 3, 1, 1), (96, 3, 1, 1), (96, 3, 2, 1), (192, 3, 1, 1), (192, 3, 1, 1)]
    plan += [(192, 3, 2, 1), (192, 3, 1, 0), (192, 1, 1, 0), (classes, 1, 1, 0)]
    drop = dropouts(dropout)
    with torch.device("meta"):
        layers: list[nn.Module] = []
        inputs = channels
        for outputs, size, stride, padding in plan:
            layers += [nn.Conv2d(inputs, outputs, size, stride, padding), nn.ReLU()]
            layers += [make() for make in drop if stride == 2]
            inputs = outputs
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return initialize(model, seed, "all_cnn", he)


@register_model("lenet5", "images", "LeNet-5", {10: 61_706}, side=28)
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
            *(nn.Conv2d(channels, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()),
            nn.Linear(84, classes),
        )
    return initialize(model, seed, "lenet5")


WIDTHS = (64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512)


@register_model(
    "vgg16bn", "images", "VGG-16 with batch norm", {100: 15_299_748}, side=32, batch_norm=True
)
@register_model("vgg16", "images", "VGG-16", {100: 15_291_300}, side=32, batch_norm=False)
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
    return initialize(model, seed, "vgg16", he)
