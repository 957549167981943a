"""The networks of the XOR and XOR-detection tasks, and the small and large initialisation
regimes.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from lambdahat._core.check import require, require_choice, require_count, require_positive
from lambdahat.models.initial import initialize
from lambdahat.models.perceptrons import ACTIVATIONS


def draw_weights(model: nn.Module, variance: float, seed: int = 0) -> nn.Module:
    """Redraw weights and biases of every linear and convolution layer from N(0, ``variance``), in
    place.

    Geiger et al. (2020): a network that starts small learns features and generalises, one that
    starts large barely moves. The variance decides which; that of each experiment is in Table 4.2
    of the regularization thesis.
    """
    deviation = math.sqrt(require_positive(variance, "variance"))

    def normal(layer: nn.Module, rng: torch.Generator) -> None:
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d):
            for parameter in layer.parameters(recurse=False):
                parameter.normal_(0.0, deviation, generator=rng)

    initialize(model, seed, "weights", normal)
    return model


def xor_network(
    width: int = 64,
    activation: str = "tanh",
    variance: float = 0.03,
    dropout: float = 0.0,
    seed: int = 0,
) -> nn.Sequential:
    """One hidden layer on two inputs, two logits (Figure 4.4 of the regularization thesis, which
    prints no width).

    >>> sum(p.numel() for p in xor_network().parameters())
    322
    """
    require_count(width, "width")
    return _drawn(
        [nn.Linear(2, width, device="meta")],
        nn.Linear(width, 2, device="meta"),
        activation,
        variance,
        dropout,
        seed,
    )


def xord_network(
    pairs: int = 5,
    width: int = 32,
    activation: str = "tanh",
    variance: float = 0.4,
    dropout: float = 0.0,
    seed: int = 0,
) -> nn.Sequential:
    """``width`` filters of size and stride 2, so that each sees one pair at a time, and one linear
    output (Fig. 4.5).

    >>> tuple(xord_network()(torch.ones(3, 10)).shape)
    (3, 1)
    """
    require_count(pairs, "pairs")
    require_count(width, "width")
    hidden = [
        nn.Unflatten(1, (1, 2 * pairs)),
        nn.Conv1d(1, width, 2, stride=2, device="meta"),
        nn.Flatten(),
    ]
    return _drawn(
        hidden, nn.Linear(pairs * width, 1, device="meta"), activation, variance, dropout, seed
    )


def _drawn(
    hidden: list[nn.Module],
    output: nn.Module,
    activation: str,
    variance: float,
    dropout: float,
    seed: int,
) -> nn.Sequential:
    kind = ACTIVATIONS[require_choice(activation, "activation", ACTIVATIONS)]
    require(0 <= dropout < 1, "dropout", "lie in [0, 1)", repr(dropout))
    model = nn.Sequential(*hidden, kind(), *([nn.Dropout(dropout)] if dropout else []), output)
    draw_weights(model, variance, seed)
    return model
