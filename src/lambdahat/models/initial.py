"""Initial weights from a seed, leaving the global random state alone."""

from __future__ import annotations

import math

import torch
from torch import nn

from lambdahat._rng import generator


def initialize(model: nn.Module, seed: int, name: str) -> None:
    """Draw linear and convolution layers as PyTorch does by default, from the stream ``(seed, name)``.

    Weights and biases are uniform on ±1/√fan_in (LeCun et al., 1998, up to the constant). A module made on the meta
    device is first given memory.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device="cpu")
    rng = generator(seed, name)
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                bound = 1.0 / math.sqrt(layer.weight[0].numel())
                for parameter in layer.parameters(recurse=False):
                    parameter.uniform_(-bound, bound, generator=rng)
