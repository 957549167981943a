"""Products of one batch with a vector: what is kept between products, and how each mode makes them.

A *product* is built once for a batch at fixed parameters and then called with tangents, one tensor
per parameter, or with a block of them along a leading dimension. Building runs the model; calling a
kept product is backward passes only.

PyTorch differentiates the gradient of a layer by many small operations, that of a convolution by
convolutions of odd shapes, which libraries serve badly. Here a linear layer, a convolution or a
frozen batch norm is given by its three kernels, forward, gradient of the input and gradient of the
weight, and so is every derivative: a Hessian–vector product costs six such kernels a layer against
the gradient's three, and a block of vectors six larger ones.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, cast

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.func import grad, jvp, vmap
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lambdahat._core.check import require_choice
from lambdahat._core.device import Pullback, linear, multiply, pull_back
from lambdahat._core.rng import generator
from lambdahat.operators.curved_layers import CURVE, BlockRule, CurvedLayers, Gradients
from lambdahat.problem import Problem
from lambdahat.problem.batches import Batch, as_tree, rows_of, take
from lambdahat.problem.checkpointing import recomputing
from lambdahat.problem.losses import NAMED
from lambdahat.problem.memory import LiveBytes
from lambdahat.problem.problem import Space

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def windows(layer: Any, entered: Tensor) -> Tensor:
    """What each position of a convolution sees: (B, C, positions…, kernel…).

    By strided windows and one copy: F.unfold starts a kernel for each sample on a GPU, and is
    slower on a CPU. Zeros are padded by the layer's settings as they are now, as torch does, for
    users change them; other borders as the layer was made.
    """
    if layer.padding_mode != "zeros":
        borders = list(layer._reversed_padding_repeated_twice)
    elif layer.padding == "same":
        sizes = zip(layer.kernel_size, layer.dilation, strict=True)
        totals = [hole * (size - 1) for size, hole in sizes]
        borders = [part for all in reversed(totals) for part in (all // 2, all - all // 2)]
    else:
        sides = () if layer.padding == "valid" else layer.padding
        borders = [side for side in reversed(sides) for _ in range(2)]
    if any(borders):
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        entered = F.pad(entered, borders, mode=mode)
    steps = zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)
    for axis, (size, step, hole) in enumerate(steps, start=2):
        entered = entered.unfold(axis, hole * (size - 1) + 1, step)[..., ::hole]
    return entered


class PlainLayers(CurvedLayers):
    """While active, layers of the model are built from the functions below.

    These are linear layers, convolutions, frozen batch norms, ReLU, max-pooling, GELU, SiLU, layer
    norms and attention. While
    ``signals_alone``, gradients are differentiated in the signals and not in inputs and weights:
    enough for Jv, and less work. A gradient that the model takes itself is never cut so.

    In a ``one_pass`` a layer adds the gradient of its weight to ``sums``, if they are given and the
    weight is one of the ``parameters``, and the gradient of its input to that of its second
    derivative, which is ``deferred`` until then. Autograd's own sums would be further passes over
    the largest tensors, and would hold one as large as the input for every layer.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__()
        self.adds = False
        self.sums: ProductSums | None = None
        # the input, the signal and the tangent of the weight whose product it is, by layer
        self.deferred: dict[_Linear, tuple[Tensor, Tensor, Tensor]] = {}
        self._slots = {id(parameter): i for i, parameter in enumerate(parameters)}
        self._lock = threading.Lock()

    @contextmanager
    def one_pass(self, sums: ProductSums | None) -> Iterator[None]:
        """A backward pass, one at a time, in which layers add in place."""
        with self._lock:
            self.adds, self.sums = True, sums
            try:
                yield
            finally:
                self.adds, self.sums = False, None
                self.deferred.clear()

    def second(self, kernels: _Linear) -> Tensor | None:
        """The gradient of a layer's input that was deferred, if one was."""
        if kernels not in self.deferred:
            return None
        x, g, tangent = self.deferred.pop(kernels)
        only_input = (True, False, False)
        return _Backward.call(kernels, g, x, tangent, only_input, None, None)[0]  # type: ignore[no-any-return]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch._C._are_functorch_transforms_active():  # which the model uses itself
            return func(*args, **kwargs)
        if func in SELECT:
            selected = SELECT[func](*args, **kwargs)
            return func(*args, **kwargs) if selected is None else selected
        if func in CURVE:
            curved = CURVE[func](self, *args, **kwargs)
            return func(*args, **kwargs) if curved is None else curved
        prepared = PREPARE[func](*args, **kwargs) if func in PREPARE else None
        # gradients of complex layers conjugate, which the kernels do not
        if prepared is None or not prepared[0].is_floating_point():
            return func(*args, **kwargs)
        if not (prepared[0].numel() and prepared[1].numel()):
            return func(*args, **kwargs)
        prepared[-1].slot = self._slots.get(id(prepared[1]))
        return _Layer.apply(*prepared, self)  # type: ignore[no-untyped-call]


class ProductSums:
    """Σ_b w_b A_b V as it grows from batch to batch: views of one tensor, one for each parameter.

    ``weight`` is that of the batch whose products are added.
    """

    def __init__(self, space: Space, like: Tensor) -> None:
        self.flat, self.weight = torch.zeros_like(like), 1.0
        self.views = space.split(self.flat)

    def add(self, parts: Sequence[Tensor | None]) -> None:
        """Add the products of a batch, but for those that layers have added already."""
        pairs = [(v, part) for v, part in zip(self.views, parts, strict=True) if part is not None]
        if pairs:
            views, given = zip(*pairs, strict=True)
            same = [part.to(self.flat.dtype) for part in given]
            torch._foreach_add_(views, same, alpha=self.weight)

    def add_outer(self, slot: int, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Add gᵀx for the weight of a linear layer, one pair for each vector.

        Not as one product with the sum as its start, which would round the terms of every sample to
        the sum of all batches: the error would grow as √n.
        """
        view = self.views[slot]
        for part, (g, x) in zip(view.reshape(-1, *view.shape[-2:]), pairs, strict=True):
            rows = g.reshape(-1, g.shape[-1]).T
            part.add_(multiply(rows, x.reshape(-1, x.shape[-1])), alpha=self.weight)


class _Linear:
    """The kernels of y = x ∗ w + b for a linear layer; other layers override them.

    ``axis`` is the place of the channels, ``stacks`` says whether several weights can be stacked as
    channels, ``slope`` is the part of the layer that is linear in x, and ``slot`` the place of the
    weight among the parameters. Each call of a layer has kernels of its own.
    """

    stacks, slope = True, property(lambda self: self)
    slot: int | None = None

    def axis(self, like: Tensor) -> int:
        return like.ndim - 1

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x, weight, bias)

    def add(self, signal: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """A signal + x ∗ w, maybe in its place; its channels may be those of several vectors."""
        total, rows = signal.view(-1, len(weight)), x.reshape(-1, x.shape[-1])
        return multiply(rows, weight.T, total, overwrite=True).view_as(signal)

    def backward(self, g: Tensor, x: Tensor, weight: Tensor, mask: Sequence[bool]) -> Gradients:
        """(∂x, ∂w, ∂b), those that ``mask`` asks for."""
        rows = g.reshape(-1, g.shape[-1])
        own = multiply(rows.T, x.reshape(-1, x.shape[-1])) if mask[1] else None
        entered = multiply(rows, weight).view(*g.shape[:-1], -1) if mask[0] else None
        return entered, own, rows.sum(0) if mask[2] else None

    def add_input(self, began: Tensor, g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """``began`` + ∂x, maybe in its place; both may be those of several vectors."""
        if not began.is_contiguous():
            return began.add_(g @ weight)
        total, rows = began.view(-1, weight.shape[1]), g.reshape(-1, len(weight))
        return multiply(rows, weight, total, overwrite=True).view_as(began)

    def sums(self, layers: PlainLayers, like: Tensor) -> ProductSums | None:
        """Where the gradient of the weight is added, if it is."""
        if layers.sums is None or self.slot is None or layers.sums.flat.dtype != like.dtype:
            return None
        return layers.sums


class _Convolve(_Linear):
    def __init__(self, stride: Any, padding: Any, dilation: Any, groups: int, dims: int) -> None:
        steps = [_tuple(value, dims) for value in (stride, padding, dilation)]
        self.options, self.stacks = (*steps, False, [0] * dims, groups), groups == 1

    def axis(self, like: Tensor) -> int:
        return 1

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.ops.aten.convolution(x, weight, bias, *self.options)  # type: ignore[no-any-return]

    def add(self, signal: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return signal.add_(self.forward(x, weight).reshape(signal.shape))

    def backward(self, g: Tensor, x: Tensor, weight: Tensor, mask: Sequence[bool]) -> Gradients:
        options = [len(weight)], *self.options, list(mask)
        return tuple(torch.ops.aten.convolution_backward(g, x, weight, *options))

    def add_input(self, began: Tensor, g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return began.add_(cast(Tensor, self.backward(g, x, weight, (True, False, False))[0]))

    def sums(self, layers: PlainLayers, like: Tensor) -> None:
        return None


class _FrozenNorm(_Convolve):
    """Batch norm with given statistics, a scale for each channel."""

    def __init__(self, mean: Tensor, variance: Tensor, eps: float) -> None:
        self.mean, self.variance, self.eps, self.stacks = mean, variance, eps, False

    @property
    def slope(self) -> _FrozenNorm:
        return _FrozenNorm(torch.zeros_like(self.mean), self.variance, self.eps)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.batch_norm(x, self.mean, self.variance, weight, bias, eps=self.eps)

    def add(self, signal: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        scale = weight * (self.variance + self.eps).rsqrt()
        return signal.addcmul_(x, scale.reshape(-1, *[1] * (x.ndim - 2)))

    def backward(self, g: Tensor, x: Tensor, weight: Tensor, mask: Sequence[bool]) -> Gradients:
        saved = g.new_empty(0)  # CUDA's kernel wants them, though it reads none
        options = self.mean, self.variance, saved, saved, False, self.eps, list(mask)
        return tuple(torch.ops.aten.native_batch_norm_backward(g, x, weight, *options))


Prepared = tuple[Tensor, Tensor, Tensor | None, _Linear] | None


def _prepare_convolution(dims: int) -> Callable[..., Prepared]:
    """A function of a convolution's arguments; None for padding by name or no batch."""

    def prepare(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Prepared:
        if isinstance(padding, str) or input.ndim != dims + 2:
            return None
        return input, weight, bias, _Convolve(stride, padding, dilation, groups, dims)

    return prepare


def _prepare_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Prepared:
    plain = input.dtype == weight.dtype and not torch.is_autocast_enabled(input.device.type)
    plain = plain and input.ndim > 1 and weight.ndim == 2
    return (input, weight, bias, _Linear()) if plain else None


def _prepare_addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **options: Any) -> Prepared:
    """A linear layer whose weight is stored as (inputs, outputs), as in GPT-2."""
    return None if options or input.ndim != 1 else _prepare_linear(mat1, mat2.T, input)


def _prepare_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
) -> Prepared:
    given = running_mean, running_var, weight
    if training or any(part is None or part.dtype != input.dtype for part in given):
        return None
    mean, variance, scale = cast(tuple[Tensor, Tensor, Tensor], given)
    if mean.requires_grad or variance.requires_grad:
        return None
    return input, scale, bias, _FrozenNorm(mean, variance, eps)


PREPARE: dict[Any, Callable[..., Prepared]] = {
    F.conv1d: _prepare_convolution(1),
    F.conv2d: _prepare_convolution(2),
    F.conv3d: _prepare_convolution(3),
    F.linear: _prepare_linear,
    F.batch_norm: _prepare_norm,
    torch.addmm: _prepare_addmm,
}


def _tuple(value: Any, dims: int) -> list[int]:
    values = [value] * dims if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


class _Layer(torch.autograd.Function):
    """y = x ∗ w + b, whose derivatives of all orders use the kernels of the first."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kernels: _Linear,
        layers: PlainLayers,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.kernels, ctx.layers = kernels, layers
        y = kernels.forward(x, weight, bias)
        # F.linear of several positions gives a view, and autograd lets no one write to a function's
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Gradients:
        x, weight = ctx.saved_tensors
        mask, none = ctx.needs_input_grad[:3], (None, None)
        if not torch.is_grad_enabled():
            began = ctx.layers.second(ctx.kernels)
            sums = ctx.kernels.sums(ctx.layers, g)
            return (*_Backward.call(ctx.kernels, g, x, weight, mask, sums, began), *none)
        if ctx.layers.signals_alone:
            x, weight = x.detach(), weight.detach()
        given = ctx.kernels, g, x, weight, mask, ctx.layers
        return (*cast(Any, _Gradient.apply)(*given), *none)


class _Gradient(torch.autograd.Function):
    """(∂x, ∂w, ∂b) of a layer as a function of the signal g, the input and the weight."""

    @staticmethod
    def forward(
        ctx: Any,
        kernels: _Linear,
        g: Tensor,
        x: Tensor,
        weight: Tensor,
        mask: Sequence[bool],
        layers: PlainLayers,
    ) -> Gradients:
        ctx.save_for_backward(g, x, weight)
        ctx.kernels, ctx.layers = kernels, layers
        ctx.set_materialize_grads(False)
        return kernels.backward(g, x, weight, mask)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, a: Tensor | None, b: Tensor | None, c: Tensor | None) -> Gradients:
        """From tangents a, b, c of the gradients: ∂g = a∗w + x∗b + c, and ∂x, ∂w."""
        g, x, weight = ctx.saved_tensors
        kernels, needs = ctx.kernels, ctx.needs_input_grad
        call, backward = _Signal.call, _Backward.call
        signal = entered = own = None
        if needs[1]:
            if a is not None or b is not None:
                signal = call(kernels, a, weight, x, b, c)
            if b is None and c is not None:
                c = c.reshape(-1, *[1] * (g.ndim - 1 - kernels.axis(g)))
                signal = c.expand_as(g) if signal is None else signal + c
        if needs[2] and b is not None:
            ctx.layers.deferred[kernels] = x, g, b
            if not ctx.layers.adds:
                entered = ctx.layers.second(kernels)
        if needs[3] and a is not None:
            mask, sums = (False, True, False), kernels.sums(ctx.layers, g)
            own = backward(kernels.slope, g, a, weight, mask, sums, None)[1]
        return None, signal, entered, own, None, None


def _relu(input: Tensor, inplace: bool = False) -> Tensor | None:
    if inplace and input._is_view():
        return None
    run = Tensor.relu_ if inplace else Tensor.relu
    rules = lambda x: [run(x)] * 2, lambda g, y: torch.ops.aten.threshold_backward(g, y, 0), None
    return cast(Tensor, cast(Any, _Select.apply)(input, *rules))


def _max_pool(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    if return_indices or input.ndim != 4:
        return None
    size = _tuple(kernel_size, 2)
    steps = size, _tuple(stride, 2) if stride else size, _tuple(padding, 2), _tuple(dilation, 2)

    def run(x: Tensor) -> tuple[Tensor, ...]:
        y, indices = torch.ops.aten.max_pool2d_with_indices(x, *steps, ceil_mode)
        return y, x, indices

    def pull(g: Tensor, x: Tensor, indices: Tensor) -> Tensor:
        backward = torch.ops.aten.max_pool2d_with_indices_backward
        return backward(g, x, *steps, ceil_mode, indices)  # type: ignore[no-any-return]

    def push(a: Tensor, x: Tensor, indices: Tensor) -> Tensor:
        return a.flatten(-2).gather(-1, indices.flatten(-2)).reshape(indices.shape)

    return cast(Tensor, cast(Any, _Select.apply)(input, run, pull, push))


SELECT: dict[Any, Callable[..., Tensor | None]] = {
    F.relu: _relu,
    torch.relu: _relu,
    Tensor.relu: _relu,
    torch.max_pool2d: _max_pool,
}


class _Select(torch.autograd.Function):
    """A function that selects, so that its gradient is linear and its curvature 0.

    ``run`` gives the value and the tensors by which ``pull``, the gradient, and ``push``, its
    adjoint (None: the same), know the selection. PyTorch's second derivative is a tensor of zeros,
    which is filled and added.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Any, pull: Any, push: Any) -> Tensor:
        y, *kept = cast(tuple[Tensor, ...], run(x))
        if y is x:
            ctx.mark_dirty(x)
        ctx.save_for_backward(*kept)
        ctx.rules = pull, push or pull
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Gradients:
        kept, (pull, push), none = ctx.saved_tensors, ctx.rules, (None, None, None)
        if not torch.is_grad_enabled():
            return pull(g, *kept), *none
        kept = [tensor.detach() for tensor in kept]
        return cast(Any, _Selected.apply)(pull, push, g, *kept), *none


class _Selected(torch.autograd.Function):
    """The gradient of ``_Select``."""

    @staticmethod
    def forward(ctx: Any, pull: Any, push: Any, g: Tensor, *kept: Tensor) -> Tensor:
        ctx.save_for_backward(*kept)
        ctx.push = push
        return pull(g, *kept)  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, a: Tensor) -> Gradients:
        kept = ctx.saved_tensors
        return None, None, ctx.push(a, *kept), *[None] * len(kept)


class _Signal(BlockRule):
    """a∗w + x∗b + c, or a∗w where no b is given."""

    @staticmethod
    def forward(
        kernels: _Linear,
        a: Tensor | None,
        weight: Tensor,
        x: Tensor,
        b: Tensor | None,
        c: Tensor | None,
    ) -> Tensor:
        """Also for a block: ``a`` with its vectors in the batch, ``b`` and ``c`` stacked."""
        if b is None:
            assert a is not None
            return cast(Tensor, kernels.slope.forward(a, weight))
        signal = kernels.forward(x, b, c)
        return signal if a is None else kernels.add(signal, a, weight)

    @staticmethod
    def vmap(info: Any, dims: Any, *args: Any) -> tuple[Any, Any]:
        kernels, a, weight, x, b, c = args
        if not kernels.stacks or dims[2] is not None or dims[3] is not None:
            return _Signal.one_by_one(info, dims, *args)
        vectors, axis = info.batch_size, kernels.axis(x)
        a = None if a is None else _with_vectors(a, dims[1], vectors, axis)
        folded = a.flatten(0, 1) if a is not None and axis == 1 else a
        b, c = (
            None if t is None else _with_vectors(t, d, vectors, 0).flatten(0, 1)
            for t, d in ((b, dims[4]), (c, dims[5]))
        )
        signal = _Signal.forward(kernels, folded, weight, x, b, c)
        if b is not None:  # with vectors · channels
            return signal.unflatten(axis, (vectors, len(weight))), axis
        return signal if a is None or axis > 1 else signal.unflatten(0, a.shape[:2]), axis


class _Backward(BlockRule):
    """(∂x, ∂w, ∂b) of a layer from the signal g; those that ``mask`` asks for.

    ∂w is added to ``sums`` and ∂x to what ``began``, where they are given.
    """

    @staticmethod
    def forward(
        kernels: _Linear,
        g: Tensor,
        x: Tensor,
        weight: Tensor,
        mask: Sequence[bool],
        sums: ProductSums | None,
        began: Tensor | None,
    ) -> Gradients:
        if sums is not None and mask[1]:
            assert kernels.slot is not None
            # a block whose vectors all have this part has it in each row
            count = sums.views[kernels.slot].numel() // weight.numel()
            sums.add_outer(kernels.slot, [(g, x)] * count)
            mask = mask[0], False, mask[2]
        if began is None:
            return kernels.backward(g, x, weight, mask)
        _, own, bias = kernels.backward(g, x, weight, (False, *mask[1:]))
        return kernels.add_input(began, g, x, weight), own, bias

    @staticmethod
    def vmap(info: Any, dims: Any, *args: Any) -> tuple[Any, Any]:
        kernels, g, x, weight, mask, sums, began = args
        which = [i for i in (1, 2, 3, 6) if dims[i] is not None]
        vectors, axis = info.batch_size, kernels.axis(x if 1 in which else g)
        if sums is not None and mask[1]:
            of_g, of_x = (
                [t] * vectors if d is None else t.unbind(d) for t, d in ((g, dims[1]), (x, dims[2]))
            )
            sums.add_outer(kernels.slot, zip(of_g, of_x, strict=True))
            mask = mask[0], False, mask[2]
        if which not in ([1], [1, 6], [2], [3]) or not kernels.stacks:
            args = kernels, g, x, weight, mask, None, began
            return _Backward.one_by_one(info, dims, *args)
        entered = own = bias = None
        parts: Gradients
        if 1 in which:  # a second pass: a signal for each vector
            g = g.movedim(dims[1], axis)
            if mask[0]:
                folded = g.flatten(0, 1) if axis == 1 else g
                like = x.new_empty(1).expand(len(folded), *x.shape[1:])
                if began is None:
                    only_input = (True, False, False)
                    entered = cast(Tensor, kernels.backward(folded, like, weight, only_input)[0])
                else:
                    began = began.movedim(dims[6], axis)
                    began = began.flatten(0, 1) if axis == 1 else began
                    entered = kernels.add_input(began, folded, like, weight)
                entered = entered.unflatten(0, g.shape[:2]) if axis == 1 else entered
            if mask[1] or mask[2]:
                wide = weight.new_empty(vectors * len(weight), *weight.shape[1:])
                g = g.flatten(axis, axis + 1)
                _, own, bias = (
                    None if t is None else t.unflatten(0, (vectors, len(weight)))
                    for t in kernels.backward(g, x, wide, (False, *mask[1:]))
                )
            parts, places = (entered, own, bias), (axis, 0, 0)
        else:
            if which == [2]:  # ∂w of a tangent's input
                inputs = weight.shape[1]
                x = x.movedim(dims[2], axis).flatten(axis, axis + 1)
                weight = weight.new_empty(len(weight), vectors * inputs, *weight.shape[2:])
            else:  # ∂x by a tangent's weight
                inputs = weight.shape[1 if dims[3] > 1 else 2]
                weight = weight.movedim(dims[3], 1).flatten(1, 2)
                x = x.new_empty(1).expand(*x.shape[:axis], vectors * inputs, *x.shape[axis + 1 :])
            places = (axis, 1, 0)
            parts = tuple(
                None if t is None else t.unflatten(d, (vectors, inputs))
                for t, d in zip(kernels.backward(g, x, weight, mask), places, strict=True)
            )
        # where the vectors of the block are in each part
        return parts, tuple(None if t is None else d for t, d in zip(parts, places, strict=True))


def _with_vectors(tensor: Tensor, dim: int | None, vectors: int, axis: int) -> Tensor:
    """A tensor of a block with its vectors at ``axis``; one without is repeated."""
    if dim is not None:
        return tensor.movedim(dim, axis)
    tensor = tensor.unsqueeze(axis)
    return tensor.expand(*tensor.shape[:axis], vectors, *tensor.shape[axis + 1 :])


Tangents = Sequence[Tensor]
Leaves = dict[str, Tensor]
# one tensor per parameter; None where a layer has added it to the sums
Parts = list[Any]
Product = Callable[..., Parts]  # (tangents, batched=False, sums=None)
Builder = Callable[[Problem, Leaves, Batch], Product]
OutputMap = Callable[[list[Tensor]], list[Tensor]]


class _Flag:
    """A global setting of torch that is held at one value while any thread needs it."""

    def __init__(self, read: Callable[[], bool], write: Callable[[bool], Any], value: bool) -> None:
        self._read, self._write, self._value = read, write, value
        self._lock, self._users, self._before = threading.Lock(), 0, value

    @contextmanager
    def held(self) -> Iterator[None]:
        with self._lock:
            if not self._users:
                self._before = self._read()
                self._write(self._value)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._write(self._before)


_PLAIN_ATTENTION = _Flag(
    torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False
)
_SEARCH = _Flag(
    lambda: bool(torch.backends.cudnn.benchmark),
    lambda value: setattr(torch.backends.cudnn, "benchmark", value),
    True,
)


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """The context of an operator's passes: gradients on, and plain attention.

    Fused attention kernels have no second derivative, forward mode or batching rule.
    """
    with _PLAIN_ATTENTION.held(), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        yield


@contextmanager
def repeated() -> Iterator[None]:
    """The same for passes that repeat, so that cuDNN's search for fast kernels pays."""
    with _SEARCH.held(), twice_differentiable():
        yield


def nodes_below(roots: Iterable[Any]) -> Iterator[Any]:
    """Some nodes of an autograd graph and every node below them, once, after all it depends on."""
    done: set[Any] = {None}
    stack = [(root, False) for root in roots]
    while stack:
        node, ready = stack.pop()
        if node in done:
            continue
        if ready:
            done.add(node)
            yield node
            continue
        stack.append((node, True))
        stack.extend((child, False) for child, _ in node.next_functions if child not in done)


def kind_of(node: Any) -> str:
    """What a node does, by its name; the name of a custom function says nothing."""
    name = type(node).__name__
    if isinstance(node, BackwardCFunction):
        return f"the custom function {name.removesuffix('Backward')}"
    return _without_number(name)


@cache
def _without_number(name: str) -> str:
    kind, _, number = name.rpartition("Backward")
    return kind if number.isdigit() else name


def require_graph(tensors: Sequence[Tensor]) -> None:
    """Raise where a node has no derivative: autograd would silently treat it as constant."""
    names = (type(node).__name__ for node in nodes_below([tensor.grad_fn for tensor in tensors]))
    if any(name in ("Error", "NotImplemented") for name in names):
        raise NotImplementedError("an operation of the model can be differentiated only once")


# the gradients of norms by the statistics of their input
NORMS = ("NativeLayerNormBackward", "NativeBatchNormBackward", "CudnnBatchNormBackward")


def through_norms(nodes: Iterable[Any]) -> bool:
    """Whether some of the nodes are gradients of layer norms, or of norms by a batch's statistics.

    PyTorch has their first derivative right, but holds the statistics constant in the second.
    """
    return any(kind_of(node) in NORMS and getattr(node, "_saved_train", True) for node in nodes)


def kinds_below(loss: Tensor) -> set[str]:
    """What the nodes of a loss do; raises where its second derivative would be wrong."""
    nodes = list(nodes_below([loss.grad_fn]))
    if through_norms(nodes):
        raise NotImplementedError("PyTorch's third derivative of layer and batch norms is wrong")
    return {kind_of(node) for node in nodes}


def saved_bytes(run: Callable[[], Any], held: Iterable[Tensor] = ()) -> tuple[Any, int]:
    """What ``run`` gives and the bytes its autograd graph saved, each storage once.

    The tensors ``held`` are kept without the graph and do not count. A model that calls
    ``torch.func`` allows no look at what is saved: then all that it makes counts.
    """
    # held weakly, so that the address of one that was freed is not taken for it again
    seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def note(tensor: Tensor) -> tuple[Tensor, int]:
        storage = tensor.untyped_storage()
        seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        # with its own node it would be a cycle that no collector sees; unpacking puts it back
        return tensor.detach(), 0 if tensor.is_inference() else tensor._version

    def unpack(kept: tuple[Tensor, int]) -> Tensor:
        """Refuses tensors that changed, as autograd does without hooks."""
        tensor, version = kept
        if version != (0 if tensor.is_inference() else tensor._version):
            raise RuntimeError(
                f"a tensor {tuple(tensor.shape)} that products need, maybe of the data, was changed"
                " in place; make the operator again"
            )
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(note, unpack):
            result = run()
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        with LiveBytes() as live:
            result = run()
        return result, int(live.peak)
    for tensor in held:
        seen.pop(tensor.untyped_storage()._cdata, None)
    return result, sum(size for _, size in seen.values())


def leaves_of(problem: Problem, theta: Tensor) -> dict[str, Tensor]:
    """The parameters at θ as leaves of new autograd graphs."""
    values = problem.named(theta.detach())
    leaves = {name: torch.empty_like(value) for name, value in values.items()}
    torch._foreach_copy_(list(leaves.values()), list(values.values()))  # one operation for all
    return {name: leaf.requires_grad_() for name, leaf in leaves.items()}


def hessian_reverse(problem: Problem, leaves: Leaves, batch: Batch) -> Product:
    """Reverse over reverse: the graph of ∇L is kept, and Hv is one backward pass through it."""
    parameters = list(leaves.values())
    with (layers := PlainLayers(parameters)):
        loss = problem.batch_loss(leaves, batch)
    kinds_below(loss)
    grads = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    live = [i for i, g in enumerate(grads) if g is not None and g.requires_grad]
    require_graph([grads[i] for i in live])
    # does not hold the gradients themselves, a vector for each batch
    kept = Pullback([grads[i] for i in live]) if live else None

    def product(
        tangents: Tangents, batched: bool = False, sums: ProductSums | None = None
    ) -> Parts:
        if kept is None:  # a loss linear in every parameter
            return [torch.zeros_like(t) for t in tangents]
        return _pull(kept, parameters, [tangents[i] for i in live], batched, layers, sums)

    return product


def hessian_forward(problem: Problem, leaves: Leaves, batch: Batch) -> Product:
    """Forward over reverse: dual numbers through the gradient; nothing is kept."""
    names = list(leaves)

    def gradient(*parameters: Tensor) -> tuple[Tensor, ...]:
        def loss(leaves: tuple[Tensor, ...]) -> Tensor:
            return problem.batch_loss(dict(zip(names, leaves, strict=True)), batch)

        return grad(loss)(parameters)  # type: ignore[no-any-return]

    def product(
        tangents: Tangents, batched: bool = False, sums: ProductSums | None = None
    ) -> Parts:
        points = tuple(leaf.detach() for leaf in leaves.values())
        if batched:
            return list(vmap(lambda *t: jvp(gradient, points, t)[1])(*tangents))
        with forward_ad.dual_level():
            pairs = zip(points, tangents, strict=True)
            duals = [forward_ad.make_dual(p, t).requires_grad_() for p, t in pairs]
            with recomputing(problem.recomputes, require_graph):
                loss = problem.batch_loss(dict(zip(names, duals, strict=True)), batch)
            # without a graph, gradients of solves and determinants read saved factors as constants
            kinds = kinds_below(loss)
            if "CholeskyInverse" in kinds:
                raise NotImplementedError("PyTorch's tangent of cholesky_inverse is wrong")
            factors = any(kind.startswith("Linalg") for kind in kinds)
            grads = torch.autograd.grad(loss, duals, create_graph=factors, allow_unused=True)
            found = [None if g is None else forward_ad.unpack_dual(g).tangent for g in grads]
            return [
                torch.zeros_like(p) if t is None else t.detach()
                for t, p in zip(found, points, strict=True)
            ]

    return product


def hessian_finite(
    problem: Problem, leaves: Leaves, batch: Batch, lengthened: float = 1.0
) -> Product:
    """Central differences (∇L(θ + hv) − ∇L(θ − hv))/2h, for models differentiable once.

    h = ε^{1/3}·(1 + ‖θ‖)/‖v‖ balances truncation O(h²) and rounding O(ε/h): error ε^{2/3}. A kink
    between the two points adds its jump over 2h; more are met by a ``lengthened`` step.
    """
    names, points = list(leaves), [leaf.detach() for leaf in leaves.values()]
    scale = 1.0 + torch.stack([point.double().norm() for point in points]).norm()

    def gradient(step: Tensor, tangents: Tangents) -> list[Tensor]:
        pairs = zip(points, tangents, strict=True)
        moved = [(p + step.to(p.dtype) * t).requires_grad_() for p, t in pairs]
        with recomputing(problem.recomputes):
            loss = problem.batch_loss(dict(zip(names, moved, strict=True)), batch)
        return list(torch.autograd.grad(loss, moved, materialize_grads=True))

    def product(
        tangents: Tangents, batched: bool = False, sums: ProductSums | None = None
    ) -> Parts:
        if batched:
            return _one_by_one(product, tangents)
        size = torch.stack([t.double().norm() for t in tangents]).norm()
        size = torch.where(size > 0, size, torch.ones_like(size))
        step = lengthened * torch.finfo(points[0].dtype).eps ** (1 / 3) * scale / size
        ahead, behind = gradient(step, tangents), gradient(-step, tangents)
        return [(a - b) / (2 * step).to(a.dtype) for a, b in zip(ahead, behind, strict=True)]

    return product


def _one_by_one(product: Product, tangents: Tangents) -> list[Tensor]:
    """The products of a block, column after column."""
    columns = [product([t[i] for t in tangents]) for i in range(len(tangents[0]))]
    return [torch.stack(parts) for parts in zip(*columns, strict=True)]


def gauss_newton_reverse(make_map: Callable[[Any, Batch], OutputMap]) -> Builder:
    """JᵀMJv with the graphs of z and Jᵀu kept: Jv = ∂(Jᵀu·v)/∂u is one backward pass."""

    def build(problem: Problem, leaves: Leaves, batch: Batch) -> Product:
        parameters = list(leaves.values())
        with (layers := PlainLayers(parameters)):
            flat, spec = tree_flatten(as_tree(problem.output(leaves, batch)))
        outputs = [z for z in flat if isinstance(z, Tensor) and z.requires_grad]
        constant = [z.detach() if isinstance(z, Tensor) else z for z in flat]
        multiply = _between_live(flat, make_map(tree_unflatten(constant, spec), batch))
        seeds = [torch.zeros_like(z, requires_grad=True) for z in outputs]
        layers.signals_alone = True
        grads = pull_back(outputs, parameters, seeds, create_graph=True, allow_unused=True)
        live = [i for i, g in enumerate(grads) if g is not None and g.requires_grad]
        require_graph([grads[i] for i in live])
        jacobian, transposed = Pullback([grads[i] for i in live]), Pullback(outputs)

        def product(
            tangents: Tangents, batched: bool = False, sums: ProductSums | None = None
        ) -> Parts:
            forward = _pull(jacobian, seeds, [tangents[i] for i in live], batched)
            if batched:
                forward = list(vmap(lambda *u: tuple(multiply(list(u))))(*forward))
            else:
                forward = multiply(forward)
            return _pull(transposed, parameters, forward, batched, layers, sums)

        return product

    return build


def gauss_newton_forward(make_map: Callable[[Any, Batch], OutputMap]) -> Builder:
    """JᵀMJv with dual numbers for Jv and one backward pass for Jᵀ; nothing is kept."""

    def build(problem: Problem, leaves: Leaves, batch: Batch) -> Product:
        def product(
            tangents: Tangents, batched: bool = False, sums: ProductSums | None = None
        ) -> Parts:
            if batched:
                return _one_by_one(product, tangents)
            parameters = [leaf.detach().requires_grad_() for leaf in leaves.values()]
            with forward_ad.dual_level():
                pairs = zip(parameters, tangents, strict=True)
                duals = [forward_ad.make_dual(p, t) for p, t in pairs]
                with recomputing(problem.recomputes):
                    output = problem.output(dict(zip(leaves, duals, strict=True)), batch)
                flat, spec = tree_flatten(as_tree(output))
                both = [
                    tuple(forward_ad.unpack_dual(z)) if isinstance(z, Tensor) else (z, None)
                    for z in flat
                ]
            points = [z for z, _ in both]
            constant = [z.detach() if isinstance(z, Tensor) else z for z in points]
            live = [(z, t) for z, t in both if isinstance(z, Tensor) and z.requires_grad]
            forward = [torch.zeros_like(z) if t is None else t.detach() for z, t in live]
            multiply = _between_live(points, make_map(tree_unflatten(constant, spec), batch))
            return _pull(Pullback([z for z, _ in live]), parameters, multiply(forward), False)

        return product

    return build


def sample_gradients(problem: Problem, leaves: Leaves, batch: Batch) -> Product:
    """(1/B) Σ_i g_i (g_iᵀv) with the per-sample gradients kept, by vmap where possible."""
    points = {name: leaf.detach() for name, leaf in leaves.items()}
    columns, single = rows_of(batch)

    def gradient(*rows: Tensor) -> Tensor:
        def loss(parameters: Leaves) -> Tensor:
            return problem.batch_loss(parameters, single(*rows)).reshape(())

        found = grad(loss)(points)
        return torch.cat([found[name].reshape(-1) for name in leaves])

    try:
        rows = vmap(gradient)(*columns)
    # control flow that depends on the data, an operation without a batching rule
    except RuntimeError:
        rows = torch.stack([gradient(*sample) for sample in zip(*columns, strict=True)])
    sizes = [point.numel() for point in points.values()]

    def product(
        tangents: Tangents, batched: bool = False, sums: ProductSums | None = None
    ) -> Parts:
        lead = (len(tangents[0]),) if batched else ()
        flat = torch.cat([t.reshape(*lead, -1) for t in tangents], dim=-1)
        pieces = ((flat @ rows.T) @ rows / batch.size).split(sizes, dim=-1)
        pairs = zip(pieces, points.values(), strict=True)
        return [piece.reshape(*lead, *point.shape) for piece, point in pairs]

    return product


def hessian_map(problem: Problem) -> Callable[[Any, Batch], OutputMap]:
    """u ↦ ∂²L_batch/∂z² u: the loss's own closed form, or two backward passes at the output."""

    def make(output: Any, batch: Batch) -> OutputMap:
        loss = problem.loss_function
        closed = loss.product(output, problem.target(batch)) if loss is not None else None
        if closed is not None:
            return lambda u: [closed(u[0]) / batch.size]
        live, slopes = _loss_slopes(problem, output, batch, create_graph=True)
        curved = [i for i, slope in enumerate(slopes) if slope.requires_grad]
        if not curved:
            raise ValueError(
                "loss must be curved in the model's output for a Gauss–Newton product, got one that"
                ' is linear in it; return logits from the model and use "cross_entropy"'
            )
        kept = Pullback([slopes[i] for i in curved])
        return lambda u: _pull(kept, live, [u[i] for i in curved], False)

    return make


def _loss_slopes(
    problem: Problem, output: Any, batch: Batch, create_graph: bool = False
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """The real tensors of an output as leaves, and ∂L_batch/∂z at each."""
    flat, spec = tree_flatten(output)
    points = [z.detach().requires_grad_() if _smooth(z) else z for z in flat]
    live = [z for z in points if isinstance(z, Tensor) and z.requires_grad]
    value = problem.output_loss(tree_unflatten(points, spec), batch)
    return live, torch.autograd.grad(value, live, create_graph=create_graph, materialize_grads=True)


def fisher_map(problem: Problem) -> Callable[[Any, Batch], OutputMap]:
    """u ↦ F u/B for a loss whose Fisher F at the output is diagonal and not its Hessian there."""

    def make(output: Any, batch: Batch) -> OutputMap:
        loss = problem.loss_function
        diagonal = None if loss is None else loss.fisher(output, problem.target(batch))
        assert diagonal is not None
        return lambda u: [w * part / batch.size for w, part in zip(diagonal, u, strict=True)]

    return make


def rank_one_map(
    residuals: Callable[[Any, Batch], list[list[Tensor]]],
) -> Callable[[Any, Batch], OutputMap]:
    """u ↦ (1/KB) Σ_k r_ik (r_ikᵀ u_i) per sample i, for K residuals r of a batch."""

    def make(output: Any, batch: Batch) -> OutputMap:
        draws = residuals(output, batch)

        def multiply(u: list[Tensor]) -> list[Tensor]:
            total = [torch.zeros_like(part) for part in u]
            for draw in draws:
                along: Any = sum(
                    (r * part).flatten(1).sum(dim=1) for r, part in zip(draw, u, strict=True)
                )
                for i, r in enumerate(draw):
                    total[i] = total[i] + r * along.reshape(-1, *[1] * (r.ndim - 1))
            return [part / (len(draws) * batch.size) for part in total]

        return multiply

    return make


def loss_slopes(problem: Problem, output: Any, batch: Batch) -> list[Tensor]:
    """∂ℓ/∂z of a batch times its size, for every tensor of the output."""
    return [slope * batch.size for slope in _loss_slopes(problem, output, batch)[1]]


def empirical_residuals(problem: Problem) -> Callable[[Any, Batch], list[list[Tensor]]]:
    """The residual r_i = n ∂L/∂z_i of the empirical Fisher at the data's own target.

    It lacks the root of the batch's share, which is in the batch's weight.
    """

    def residuals(output: Any, batch: Batch) -> list[list[Tensor]]:
        root = math.sqrt(problem.sample_share(batch))
        return [[slope * root for slope in loss_slopes(problem, output, batch)]]

    return residuals


def monte_carlo_residuals(
    problem: Problem, samples: int, seed: int
) -> Callable[[Any, Batch], list[list[Tensor]]]:
    """``samples`` residuals with E[r rᵀ] = M, from predicted targets; the same at every call."""

    def residuals(output: Any, batch: Batch) -> list[list[Tensor]]:
        loss = problem.loss_function
        assert loss is not None
        stream = generator(seed, "monte carlo fisher", batch.index)
        target = problem.target(batch)
        fixed = tree_map(lambda z: z.detach() if isinstance(z, Tensor) else z, output)
        return [loss.random_factors(fixed, target, stream) for _ in range(samples)]

    return residuals


def _between_live(outputs: Sequence[Any], multiply: OutputMap) -> OutputMap:
    """A map of tangents on all real outputs as one on those that depend on parameters."""
    smooth = [z for z in outputs if _smooth(z)]
    if all(z.requires_grad for z in smooth):
        return multiply

    def between(u: list[Tensor]) -> list[Tensor]:
        given = iter(u)
        every = [next(given) if z.requires_grad else torch.zeros_like(z) for z in smooth]
        pairs = zip(multiply(every), smooth, strict=True)
        return [part for part, z in pairs if z.requires_grad]

    return between


def _smooth(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _pull(
    outputs: Pullback,
    inputs: Sequence[Tensor],
    seeds: Sequence[Tensor],
    batched: bool,
    layers: PlainLayers | None = None,
    sums: ProductSums | None = None,
) -> Parts:
    """A backward pass that keeps its graph; inputs that are not reached get zeros.

    With ``sums`` they get None, and so do those whose gradients the ``layers`` added to ``sums``.
    """
    reached, options = list(range(len(inputs))), {"retain_graph": True, "allow_unused": True}

    def pull(*seeds: Tensor) -> tuple[Tensor, ...]:
        nonlocal reached
        grads: Parts = list(outputs(inputs, seeds, **options))
        # of a layer whose own backward pass did not come afterwards, as where the loss is linear
        while layers is not None and layers.deferred:
            left = [x for x, *_ in layers.deferred.values()]
            entered = [cast(Tensor, layers.second(layer)) for layer in list(layers.deferred)]
            pairs = zip(grads, pull_back(left, inputs, entered, **options), strict=True)
            grads = [b if a is None else a if b is None else a + b for a, b in pairs]
        if sums is None:
            every = zip(grads, inputs, strict=True)
            return tuple(torch.zeros_like(z) if g is None else g for g, z in every)
        reached = [i for i, g in enumerate(grads) if g is not None]
        # vmap wants to return something
        return (*(g for g in grads if g is not None), seeds[0].new_zeros(()))

    with nullcontext() if layers is None else layers.one_pass(sums):
        # not is_grads_batched, whose vmap is an older one with fewer rules
        found = (vmap(pull) if batched else pull)(*seeds)
    parts: Parts = [None] * len(inputs)
    for i, part in zip(reached, found, strict=False):
        parts[i] = part
    return parts


KINDS = {
    "exact": ("type-2", "type2", "type-1", "true", "ggn"),
    "monte_carlo": ("mc", "sampled", "monte-carlo", "montecarlo"),
    "empirical": ("ef", "emp"),
}
PROBE = 8  # samples on which a loss is compared with those of single samples
WIDEST_CUSTOM = 256  # outputs up to which the Hessian of a loss without closed form is computed


def require_kind(kind: Any) -> str:
    """One of the kinds of Fisher; for names that other libraries use the error gives ours."""
    other = kind.lower() if isinstance(kind, str) else None
    ours = next((name for name, others in KINDS.items() if other in others), None)
    return require_choice(kind, "kind", tuple(KINDS), f"use kind={ours!r}" if ours else "")


def tolerance(problem: Problem) -> float:
    """How far apart, relative, two ways to one number may come out in the arithmetic in use."""
    eps = torch.finfo(problem.dtype).eps
    if problem.device.type == "cuda" and problem.dtype == torch.float32:
        short = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
        eps = 2.0**-11 if short else eps
    return float(min(10 * eps**0.7, 0.1))


def require_separable(problem: Problem) -> None:
    """Raise unless the loss of a batch is the mean of its samples' own losses, on a few samples.

    Targets that do not count leave a sample less weight in the mean. That is right where its
    gradient is taken within the batch; a loss without an output is differentiated sample by sample,
    so that there the weights must be even.
    """
    if problem.norm == "train":
        raise ValueError(
            'norm must be "eval" or "frozen" for per-sample gradients, got "train"; batch'
            " statistics couple the samples"
        )
    parameters, few = problem.named(problem.vector), take(problem.batches.first(), slice(PROBE))
    singles = [take(few, slice(i, i + 1)) for i in range(few.size)]
    terms, even = problem._evaluate.terms, problem.loss_function is None
    each = terms(singles[0]) if even else 0.0
    if even and any(terms(batch) != each * batch.size for batch in problem.batches):
        raise ValueError(
            "the labels must have as many that count (not −100) in every sample for per-sample"
            ' gradients, got samples of uneven weight; use loss="cross_entropy", or samples of'
            " one length"
        )
    weights = [1.0 if even else terms(single) for single in singles]
    try:
        with torch.no_grad(), twice_differentiable():
            together = float(problem.batch_loss(parameters, few))
            found = [float(problem.batch_loss(parameters, single)) for single in singles]
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
        return  # a model for one batch size only: nothing to compare
    shares, alone = (torch.tensor(part, dtype=torch.float64) for part in (weights, found))
    total = torch.where(shares > 0, shares * alone, 0.0).sum()
    mean = float(total / shares.sum().clamp(min=1e-300))
    allowed = tolerance(problem) * (1.0 + float(alone.abs().nan_to_num().max()))
    got = f"{together:.6g}, and {mean:.6g} from single samples"
    if abs(together - mean) <= allowed:
        got = compare_halves(problem, tolerance(problem))
    if got:
        raise ValueError(
            "the loss of a batch must be the mean of its samples' own losses for per-sample"
            f" gradients, got {got}; a loss that compares samples, or gives them uneven weights,"
            " has none"
        )


def compare_halves(problem: Problem, allowed: float) -> str:
    """A batch's loss and the mean of those of its random halves, where they differ by more than a
    relative ``allowed``; "" if none does, or the loss is known to be a mean.

    A loss that compares samples of one class may compare none of the first few.
    """
    if type(problem.loss_function) in NAMED.values():
        return ""
    parameters = problem.named(problem.vector)
    with twice_differentiable(), torch.no_grad():
        for batch in problem.batches:
            order = torch.randperm(batch.size, generator=generator(0, "halves", batch.index))
            halves = [take(batch, half) for half in order.to(problem.device).chunk(2)]
            losses = [float(problem.batch_loss(parameters, part)) for part in (batch, *halves)]
            pairs = zip(halves, losses[1:], strict=True)
            mean = sum(half.size * loss for half, loss in pairs) / batch.size
            if not abs(losses[0] - mean) <= allowed * (1.0 + abs(losses[0])):
                return f"{losses[0]:.6g}, and {mean:.6g} from two halves of it"
    return ""


class CoupledLoss(ValueError):
    """The loss of a batch is not a sum over its samples."""


def eigen_factors(problem: Problem, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Factors √|λ|·v (D, B, …) of the loss's Hessian at each output, and the signs of λ (D, B).

    Raises ``CoupledLoss`` where this batch's loss is not a sum over samples. A root of a mean never
    is; a loss that compares samples may be in batches whose samples are all of one class, or each
    of another.
    """
    blocks, product = _loss_blocks(problem, output, batch)
    stream = generator(0, "loss separates")
    draw = torch.randn(output.shape, generator=stream, dtype=torch.float64).to(output)
    apart = torch.einsum("bij,bj->bi", blocks, draw.reshape(len(output), -1)).reshape(output.shape)
    together = product(draw)
    if not bool((apart - together).abs().max() <= tolerance(problem) * together.abs().max()):
        raise CoupledLoss("the loss must be a sum over samples")
    values, vectors = torch.linalg.eigh(blocks.double() * batch.size)
    factors = (vectors * values.abs().sqrt().unsqueeze(1)).permute(2, 0, 1)
    return factors.to(output.dtype).reshape(-1, *output.shape), values.sign().T.to(output.dtype)


def is_linear(problem: Problem, output: Any, batch: Batch) -> bool:
    """Whether the loss is linear in the output, as a KL divergence is in log-probabilities."""
    slopes = _loss_slopes(problem, output, batch, create_graph=True)[1]
    return not any(slope.requires_grad for slope in slopes)


def _loss_blocks(
    problem: Problem, output: Tensor, batch: Batch
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """∂²L_batch/∂z_i² (B, D, D), and the product with ∂²L_batch/∂z²."""
    point = output.detach().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(problem.output_loss(point, batch), point, create_graph=True)

    def product(u: Tensor) -> Tensor:
        if not slope.requires_grad:
            return torch.zeros_like(u)
        (found,) = pull_back([slope], [point], [u], retain_graph=True, materialize_grads=True)
        return cast(Tensor, found)

    eye = torch.eye(output[0].numel(), dtype=output.dtype, device=output.device)
    units = (unit.reshape(output.shape[1:]).expand_as(output) for unit in eye)
    return torch.stack([product(u).reshape(len(output), -1) for u in units], dim=1), product
