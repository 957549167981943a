"""Fully connected networks: perceptrons, softmax regression, deep linear and XOR networks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import nn

from lambdahat._core import check
from lambdahat.models.initial import Model, initialize
from lambdahat.models.model_registry import register_model

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
    """Linear layers of the given ``sizes`` (inputs, hidden …, outputs) with activations in between.

    ``dropout`` is the share of hidden units that training switches off.

    >>> sum(p.numel() for p in mlp([64, 32, 10]).parameters())
    2410
    """
    _require_sizes(sizes)
    kind = ACTIVATIONS[check.require_choice(activation, "activation", ACTIVATIONS)]
    between = [kind, *dropouts(dropout)]
    layers: list[nn.Module] = []
    # the layers' own initialisation would draw from the global generator
    with torch.device("meta"):
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), *(make() for make in between)]
        model = nn.Sequential(*layers[: -len(between)])
    return initialize(model, seed, "mlp")


@register_model("softmax", "vectors", "softmax regression", {10: 7_850})
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
        model = nn.Sequential(*(nn.Linear(n, m, bias=bias) for n, m in pairwise(sizes)))
    return initialize(model, seed, "deep_linear")


@register_model(
    "mlp", "vectors", "multilayer perceptron", small={"widths": (5,), "activation": "tanh"}
)
def _perceptron(
    inputs: int,
    classes: int,
    widths: Sequence[int] = (128,),
    activation: str = "relu",
    dropout: float = 0.0,
    seed: int = 0,
) -> nn.Sequential:
    return mlp([inputs, *widths, classes], activation, seed, dropout)


@register_model("deep_linear", "vectors", "deep linear network", small={"widths": (3,)})
def _deep_linear(
    inputs: int, classes: int, widths: Sequence[int] = (32, 32), seed: int = 0
) -> nn.Sequential:
    return deep_linear([inputs, *widths, classes], seed=seed)


def dropouts(rate: float) -> list[Callable[[], nn.Module]]:
    """No layer at rate 0, else one that drops this share."""
    check.require_number(rate, "dropout", "[0, 1)")
    return [lambda: nn.Dropout(rate)] if rate else []


def _require_sizes(sizes: Sequence[int]) -> None:
    expected, cure = "name at least the inputs and the outputs", "such as [784, 256, 10]"
    listed = isinstance(sizes, Sequence) and len(sizes) >= 2
    check.require(listed, "sizes", expected, repr(sizes), cure)
    for size in sizes:
        check.require_count(size, "sizes")


def draw_weights(model: Model, variance: float, seed: int = 0) -> Model:
    """Redraw weights and biases of every linear and convolution layer from N(0, ``variance``), in
    place.

    Geiger et al. (2020): a network that starts small learns features and generalises, one that
    starts large barely moves. The variance decides which; that of each experiment is in Table 4.2
    of the regularization thesis.
    """
    deviation = math.sqrt(check.require_positive(variance, "variance"))

    def normal(layer: nn.Module, rng: torch.Generator) -> None:
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d):
            for parameter in layer.parameters(recurse=False):
                parameter.normal_(0.0, deviation, generator=rng)

    return initialize(model, seed, "weights", normal)


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
    check.require_count(width, "width")
    hidden: list[nn.Module] = [nn.Linear(2, width, device="meta")]
    output = nn.Linear(width, 2, device="meta")
    return _thesis_network(hidden, output, activation, variance, dropout, seed)


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
    check.require_count(pairs, "pairs")
    check.require_count(width, "width")
    filters = nn.Conv1d(1, width, 2, stride=2, device="meta")
    hidden = [nn.Unflatten(1, (1, 2 * pairs)), filters, nn.Flatten()]
    output = nn.Linear(pairs * width, 1, device="meta")
    return _thesis_network(hidden, output, activation, variance, dropout, seed)


def _thesis_network(
    hidden: list[nn.Module],
    output: nn.Module,
    activation: str,
    variance: float,
    dropout: float,
    seed: int,
) -> nn.Sequential:
    kind = ACTIVATIONS[check.require_choice(activation, "activation", ACTIVATIONS)]
    model = nn.Sequential(*hidden, kind(), *(make() for make in dropouts(dropout)), output)
    return draw_weights(model, variance, seed)
