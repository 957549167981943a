"""Multilayer perceptrons, softmax regression and deep linear networks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import nn

from lambdahat._core.check import require, require_choice, require_count
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


def mlp(
    sizes: Sequence[int], activation: str = "relu", seed: int = 0, dropout: float = 0.0
) -> nn.Sequential:
    """Linear layers of the given ``sizes`` (inputs, hidden …, outputs) with an activation between
    each two.

    ``dropout`` is the share of hidden units that training switches off.

    >>> sum(p.numel() for p in mlp([64, 32, 10]).parameters())
    2410
    """
    _require_sizes(sizes)
    kind = ACTIVATIONS[require_choice(activation, "activation", ACTIVATIONS)]
    between = [kind, *dropouts(dropout)]
    layers: list[nn.Module] = []
    # the layers' own initialisation would draw from the global generator
    with torch.device("meta"):
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), *(make() for make in between)]
        model = nn.Sequential(*layers[: -len(between)])
    initialize(model, seed, "mlp")
    return model


def softmax_regression(inputs: int = 784, classes: int = 10, seed: int = 0) -> nn.Sequential:
    """One linear layer: 7,850 parameters for the images of MNIST.

    >>> sum(p.numel() for p in softmax_regression().parameters())
    7850
    """
    return mlp([inputs, classes], seed=seed)


def deep_linear(sizes: Sequence[int], bias: bool = False, seed: int = 0) -> nn.Sequential:
    """A product of matrices W_L … W_1 of the given ``sizes`` (H_0, …, H_L): linear in its input,
    not in its weights.

    >>> sum(p.numel() for p in deep_linear([5, 3, 5]).parameters())
    30
    """
    _require_sizes(sizes)
    with torch.device("meta"):
        model = nn.Sequential(
            *(nn.Linear(inputs, outputs, bias=bias) for inputs, outputs in pairwise(sizes))
        )
    initialize(model, seed, "deep_linear")
    return model


def dropouts(rate: float) -> list[Callable[[], nn.Module]]:
    """No layer at rate 0, else one that drops this share."""
    require_share(rate)
    return [lambda: nn.Dropout(rate)] if rate else []


def require_share(rate: float) -> None:
    """Refuse a rate of dropout outside [0, 1)."""
    require(0.0 <= rate < 1.0, "dropout", "be a share in [0, 1)", repr(rate))


def _require_sizes(sizes: Sequence[int]) -> None:
    require(len(sizes) >= 2, "sizes", "name at least the inputs and the outputs", repr(sizes))
    for size in sizes:
        require_count(size, "sizes")
