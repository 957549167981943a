"""Initial weights from a seed, leaving the global random state alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from lambdahat._core.rng import generator

Draw = Callable[[nn.Module, torch.Generator], None]
Model = TypeVar("Model", bound=nn.Module)


def uniform(layer: nn.Module, rng: torch.Generator) -> None:
    """PyTorch's default: weights and biases uniform on ±1/√fan_in."""
    if isinstance(layer, nn.Linear | nn.Conv2d):
        bound = 1.0 / math.sqrt(layer.weight[0].numel())
        for parameter in layer.parameters(recurse=False):
            parameter.uniform_(-bound, bound, generator=rng)


def he(layer: nn.Module, rng: torch.Generator) -> None:
    """Convolutions N(0, 2/fan_out) with biases 0 (He et al., 2015); the rest uniform."""
    if isinstance(layer, nn.Conv2d):
        fan_out = layer.weight[:, 0].numel() // layer.groups
        layer.weight.normal_(0.0, math.sqrt(2.0 / fan_out), generator=rng)
        if layer.bias is not None:
            layer.bias.zero_()
    else:
        uniform(layer, rng)


def initialize(model: Model, seed: int, name: str, draw: Draw = uniform) -> Model:
    """The model with every layer drawn in place by ``draw(layer, rng)`` from ``(seed, name)``.

    Norms start as the identity. A module made on the meta device, where nothing draws from torch's
    generator, gets memory first.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device="cpu")
    rng = generator(seed, name)
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d | nn.LayerNorm):
                layer.reset_parameters()
            else:
                draw(layer, rng)
    return model
