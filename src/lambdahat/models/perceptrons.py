"""Multilayer perceptrons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import nn

from lambdahat._check import require, require_choice, require_count
from lambdahat.models.initial import initialize

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "sigmoid": nn.Sigmoid,
    "identity": nn.Identity,
}


def mlp(sizes: Sequence[int], activation: str = "relu", seed: int = 0) -> nn.Sequential:
    """Linear layers of the given ``sizes`` (inputs, hidden …, outputs) with an activation between each two.

    >>> sum(p.numel() for p in mlp([64, 32, 10]).parameters())
    2410
    """
    require(len(sizes) >= 2, "sizes", "name at least the inputs and the outputs", repr(sizes))
    for size in sizes:
        require_count(size, "sizes")
    kind = ACTIVATIONS[require_choice(activation, "activation", ACTIVATIONS)]
    layers: list[nn.Module] = []
    with torch.device("meta"):  # the layers' own initialisation would draw from the global generator
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), kind()]
        model = nn.Sequential(*layers[:-1])
    initialize(model, seed, "mlp")
    return model
