"""Signals that are pulled back together, against those that the engine pulls back one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lambdahat.operators.exact import layer_squares
from lambdahat.operators.exact.layer_squares import pull_signals
from lambdahat.operators.linearise import nodes_below

K, B = 3, 4
Function = Callable[[Tensor], Tensor]
ROWS = torch.randn(B, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def refuse(*_: Any) -> Any:
    """In the place of what takes several signals at once."""
    raise RuntimeError


def nodes_of(output: Tensor) -> list[Any]:
    return list(nodes_below([output.grad_fn]))


def agree(output: Tensor, edges: list[GradientEdge]) -> None:
    seeds = torch.randn(K, *output.shape, dtype=output.dtype)
    each = [
        torch.autograd.grad(output, edges, seed, retain_graph=True, allow_unused=True)
        for seed in seeds
    ]
    pulled = layer_squares._pull_together([output], edges, [seeds], nodes_of(output))
    for found, columns in zip(pulled, zip(*each, strict=True), strict=True):
        assert (found is None) == (columns[0] is None)
        if found is not None:
            torch.testing.assert_close(found, torch.stack(columns), rtol=1e-10, atol=1e-12)


OF_TORCH = "abs asinh atan cos cosh erf erfc exp expm1 sigmoid sin sinc sinh tanh"
OF_LAYERS = """celu elu gelu hardshrink hardswish hardtanh leaky_relu logsigmoid mish relu relu6
    selu silu softplus softshrink tanhshrink"""
OF_ELEMENTS: dict[str, Function] = {
    name: getattr(library, name)
    for library, names in ((torch, OF_TORCH), (F, OF_LAYERS))
    for name in names.split()
}
OTHERS: dict[str, Function] = {
    "GELU by tanh": lambda h: F.gelu(h, approximate="tanh"),
    "power": lambda h: h**3,
    "root": lambda h: (h * h + 1).sqrt(),
    "logarithm": lambda h: (h.abs() + 1).log(),
    "threshold": lambda h: F.threshold(h, 0.1, -1.0),
    "clamp": lambda h: h.clamp(-0.5, 0.5),
    "clamp by tensors": lambda h: h.clamp(ROWS - 1, ROWS + 1),
    "masked": lambda h: h.masked_fill(h < 0, 0.0),
    "where": lambda h: torch.where(h > 0, h, 0.1 * h),
    "negative": lambda h: -h,
    "subtracted": lambda h: 1 - h,
    "scaled by columns": lambda h: h * ROWS[0],
    "divided by rows": lambda h: h / (1 + ROWS[:, :1].abs()),
    "product": lambda h: h * h.tanh(),
    "added twice": lambda h: h + h,
    "broadcast sum": lambda h: h + h.sum(dim=1, keepdim=True),
    "broadcast product": lambda h: h * h[:, :1],
    "broadcast vector": lambda h: h + h.sum(dim=0),
    "quotient": lambda h: h / (2 + h.abs()),
    "double": lambda h: h.float().double(),
    "clone": lambda h: h.clone(),
    "matrix": lambda h: h @ ROWS.T,
    "scaled matrix": lambda h: torch.addmm(h, h, ROWS.T @ ROWS, alpha=0.5, beta=2.0),
    "matrix from the left": lambda h: ROWS.T @ h,
    "outer": lambda h: h @ h.T,
    "softmax": lambda h: h.softmax(dim=1),
    "log-softmax": lambda h: h.log_softmax(dim=1),
    "layer norm": lambda h: F.layer_norm(h, (5,)),
    "sorted": lambda h: h.sort(dim=1).values,
    "turned": lambda h: h.flip(1).T,
    "joined": lambda h: torch.cat([h, h.tanh()], dim=1),
    "stacked": lambda h: torch.stack([h, 2 * h], dim=2).transpose(1, 2),
    "two of five": lambda h: h[:, [0, 0, 2]],
    "split": lambda h: torch.mul(*h[:, :4].chunk(2, dim=1)),
    "variance": lambda h: h.var(dim=1),
}
PICTURES: dict[str, Function] = {
    "max pooling": lambda h: F.max_pool2d(h, 2),
    "overlapping max pooling": lambda h: F.max_pool2d(h, 3, stride=1, padding=1),
    "max pooling in one dimension": lambda h: F.max_pool1d(h.flatten(2), 3),
    "max pooling in three": lambda h: F.max_pool3d(h.unsqueeze(1), (1, 2, 2)),
    "max pooling without channels": lambda h: F.max_pool2d(h[:, 0], 2),
    "average pooling": lambda h: F.avg_pool2d(h, 2, padding=1),
    "adaptive pooling": lambda h: F.adaptive_avg_pool2d(h, 3),
    "mean": lambda h: h.mean(dim=(2, 3)),
    "flattened": lambda h: h.flatten(1),
    "channels last": lambda h: h.permute(0, 2, 3, 1),
    "padded": lambda h: F.pad(h, (1, 2, 0, 1), mode="reflect"),
    "convolution": nn.Conv2d(2, 4, 3, stride=2, padding=1, dilation=2).double(),
    "groups": nn.Conv2d(2, 4, (3, 1), groups=2, bias=False).double(),
    "transposed": nn.ConvTranspose2d(2, 4, 3, stride=2, output_padding=1, groups=2).double(),
    "series": lambda h: nn.Conv1d(2, 3, 5, padding="same").double()(h.flatten(2)),
    "batch norm": nn.BatchNorm2d(2).double().eval(),
    "linear on positions": nn.Linear(6, 3).double(),
    "linear without bias": nn.Linear(6, 3, bias=False).double(),
    "linear across": lambda h: nn.Linear(6, 3).double()(h.transpose(2, 3)),
}


@pytest.mark.parametrize("name", [*OF_ELEMENTS, *OTHERS, *PICTURES])
def test_signals_through_one_operation(name: str) -> None:
    torch.manual_seed(0)
    shape = (B, 2, 6, 6) if name in PICTURES else (B, 5)
    function = (OF_ELEMENTS | OTHERS | PICTURES)[name]
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    h = x * 1.0
    agree(function(h), [get_gradient_edge(h)])


def test_signals_at_several_places_of_a_network() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 6).double() for _ in range(3)]
    x, other = torch.randn(B, 5, dtype=torch.float64), torch.ones(2, requires_grad=True)
    a, b = layers[0](x), layers[1](x)
    c = layers[2](x)
    z = (a.relu() + b.tanh()) * b + a
    agree(z, [get_gradient_edge(place) for place in (a, b, c, z, other)])


def test_a_hook_is_left_to_the_checks() -> None:
    """Nodes are called without the hooks that the engine runs."""
    x = torch.ones(3, requires_grad=True)
    h = x * 1.0
    h.register_hook(lambda signal: 2 * signal)
    place, seeds = get_gradient_edge(h), torch.eye(3)
    output = h * 3
    (found,) = pull_signals([output], [place], [seeds], nodes_of(output))
    assert torch.equal(torch.cat(found), 3 * seeds)
    (apart,) = pull_signals([output], [place], [seeds], None)
    assert torch.equal(torch.cat(apart), 6 * seeds)


def test_one_after_the_other_where_several_are_refused() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Tensor) -> Tensor:
            return 2 * h

        @staticmethod
        def backward(ctx: Any, delta: Tensor) -> Tensor:
            return 2 * delta

    x = torch.ones(3, requires_grad=True)
    h = x * 1.0
    output = Doubled.apply(h)
    (found,) = pull_signals([output], [get_gradient_edge(h)], [torch.eye(3)], nodes_of(output))
    assert found is not None
    assert torch.equal(torch.cat(found), 2 * torch.eye(3))
    assert len(found) == 3
