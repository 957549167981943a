"""Convolutions whose second derivative runs at the speed of the first.

PyTorch differentiates the gradient of a convolution by convolutions of odd shapes (batch and
channels exchanged, images as kernels), which libraries serve badly. Here a convolution y = x ∗ w is
given by its three kernels, forward, gradient of the input and gradient of the weight, and so is
every derivative of them; a Hessian–vector product then costs six such kernels a layer against the
gradient's three.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

Geometry = tuple[list[int], list[int], list[int], int]  # stride, padding, dilation, groups
DIMENSIONS: dict[Callable[..., Tensor], int] = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}


class PlainConvolutions(TorchFunctionMode):
    """While active, convolutions of the model are built from ``_Convolution``."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in DIMENSIONS:
            prepared = _prepare(DIMENSIONS[func], *args, **kwargs)
            if prepared is not None:
                return _Convolution.apply(*prepared)  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)


def _prepare(
    dims: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None, Geometry] | None:
    """The arguments in one form; None for those that torch has to take itself (padding by name,
    no batch dimension).
    """
    if isinstance(padding, str) or x.ndim != dims + 2:
        return None
    stride, padding, dilation = (_tuple(value, dims) for value in (stride, padding, dilation))
    return x, weight, bias, (stride, padding, dilation, groups)


def _tuple(value: Any, dims: int) -> list[int]:
    values = [value] * dims if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    stride, padding, dilation, groups = geometry
    zeros = [0] * len(stride)
    options = stride, padding, dilation, False, zeros, groups
    return torch.ops.aten.convolution(x, weight, bias, *options)  # type: ignore[no-any-return]


def _backward(
    g: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, mask: list[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of input, weight and bias, those that ``mask`` asks for."""
    stride, padding, dilation, groups = geometry
    zeros, sizes = [0] * len(stride), [weight.shape[0]]
    return torch.ops.aten.convolution_backward(  # type: ignore[no-any-return]
        g, x, weight, sizes, stride, padding, dilation, False, zeros, groups, mask
    )


class _Convolution(torch.autograd.Function):
    """y = x ∗ w + b."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry = geometry
        return _forward(x, weight, bias, geometry)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        mask = list(ctx.needs_input_grad[:3])
        if not torch.is_grad_enabled():
            return (*_backward(g, x, weight, ctx.geometry, mask), None)
        return (*_Gradient.apply(g, x, weight, ctx.geometry, mask), None)  # type: ignore[no-untyped-call]


class _Gradient(torch.autograd.Function):
    """(∂x, ∂w, ∂b) of a convolution as a function of the signal g, the input and the weight."""

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, mask: list[bool]
    ) -> tuple[Tensor | None, ...]:
        ctx.save_for_backward(g, x, weight)
        ctx.geometry = geometry
        ctx.set_materialize_grads(False)
        return _backward(g, x, weight, geometry, mask)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, a: Tensor | None, b: Tensor | None, c: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """For tangents a, b, c of the three gradients: ∂g = a∗w + x∗b + c, ∂x and ∂w from g with
        b and with a.
        """
        g, x, weight = ctx.saved_tensors
        signal = entered = own = None
        if ctx.needs_input_grad[0]:
            signal = _signal(g, a, b, c, x, weight, ctx.geometry)
        if ctx.needs_input_grad[1] and b is not None:
            entered = _backward(g, x, b, ctx.geometry, [True, False, False])[0]
        if ctx.needs_input_grad[2] and a is not None:
            own = _backward(g, a, weight, ctx.geometry, [False, True, False])[1]
        return signal, entered, own, None, None


def _signal(
    g: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    c: Tensor | None,
    x: Tensor,
    weight: Tensor,
    geometry: Geometry,
) -> Tensor:
    """a∗w + x∗b + c, what is there of it."""
    parts = [] if a is None else [_forward(a, weight, None, geometry)]
    parts += [] if b is None else [_forward(x, b, None, geometry)]
    parts += [] if c is None else [c.reshape(1, -1, *[1] * (g.ndim - 2)).expand_as(g)]
    return torch.zeros_like(g) if not parts else sum(parts[1:], parts[0])
