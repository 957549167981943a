"""Convolutions of one channel for many chains at once, as matrix products.

Mapped over chains, a convolution becomes one with a group for each chain; of a single channel, as
the first of a network for grey images, it becomes a depthwise one, which libraries serve badly.
Here the patches of each image are the columns of a matrix, and the convolution is a batched matrix
product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lambdahat.problem import Problem


class UnfoldedConvolutions(TorchFunctionMode):
    """While active, two-dimensional convolutions of one channel are unfolded."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.conv2d:
            found = _unfolded(*args, **kwargs)
            if found is not None:
                return found
        return func(*args, **kwargs)


def has_unfoldable(problem: Problem) -> bool:
    """Whether there is anything to unfold."""
    layers = () if problem.model is None else problem.model.modules()
    return any(
        isinstance(layer, nn.Conv2d) and layer.in_channels == layer.groups == 1 for layer in layers
    )


def _unfolded(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    """The convolution as a product with the patches, or None for those that are not plain and of
    one channel.
    """
    if (
        groups != 1
        or weight.shape[1] != 1
        or isinstance(padding, str)
        or x.ndim != 4
        or _pair(dilation) != (1, 1)
    ):
        return None
    (down, right), (high, wide), size = _pair(stride), _pair(padding), weight.shape[2:]
    padded = F.pad(x, (wide, wide, high, high)) if high or wide else x
    windows = padded.unfold(2, size[0], down).unfold(3, size[1], right)  # (B, 1, H, W, k, k)
    shape = windows.shape[2:4]
    patches = windows.permute(0, 1, 4, 5, 2, 3).flatten(4, 5).flatten(1, 3)
    out = weight.flatten(1) @ patches
    image: Tensor = (out if bias is None else out + bias.unsqueeze(1)).unflatten(2, tuple(shape))
    return image


def _pair(value: Any) -> tuple[int, int]:
    values = (value, value) if isinstance(value, int) else tuple(value)
    return (values[0], values[1]) if len(values) == 2 else (values[0], values[0])
