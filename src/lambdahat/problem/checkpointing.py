"""Activation checkpointing in the passes of a problem: parts of the model that rerun in backward.

``torch.utils.checkpoint`` cannot be left alone here. When it reruns a part, the parameters that the
pass was called with are no longer in the modules, so that the gradient would silently be that at
the model's own. Neither does it take forward mode, and a kept graph of gradients keeps all that was
recomputed. So a checkpointed part is a plain call, and within ``recomputing()`` one that is rerun
at the parameters of its pass, in the backward pass of a gradient and of dual numbers alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from types import FunctionType
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.utils.checkpoint as checkpointing
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lambdahat._core.device import AsWritten, pull_back

HANDLER = "_lambdahat_checkpoint"
_CHECKPOINT = inspect.unwrap(checkpointing.checkpoint)
OPTIONS = {
    "preserve_rng_state",
    *(
        name
        for name, parameter in inspect.signature(_CHECKPOINT).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    ),
}
_ORIGINAL = FunctionType(
    _CHECKPOINT.__code__, _CHECKPOINT.__globals__, "checkpoint", _CHECKPOINT.__defaults__
)
_ORIGINAL.__kwdefaults__ = _CHECKPOINT.__kwdefaults__
Tensors = Sequence[Any]
Run = Callable[[Tensors], tuple[Tensor, ...]]
Check = Callable[[list[Tensor]], None]


_saving: ContextVar[Check | None] = ContextVar("lambdahat_recomputing", default=None)


@contextmanager
def recomputing(on: bool = True, check: Check = lambda _: None) -> Iterator[None]:
    """Checkpointed parts keep nothing for the backward pass; gradients inside are taken once.

    ``check`` sees a part's gradients before they are differentiated for dual numbers.
    """
    token = _saving.set(check if on else None)
    try:
        yield
    finally:
        _saving.reset(token)


@contextmanager
def checkpoints_of(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[list[None]]:
    """Calls of ``torch.utils.checkpoint.checkpoint`` inside are ours, at the tensors given.

    Yields a list with an entry for each call. Models know the function by many names but it is one
    object, so its code is exchanged while any thread's pass runs; other threads get torch's.
    """
    met: list[None] = []

    def handler(part: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        met.append(None)
        kwargs = {name: value for name, value in kwargs.items() if name not in OPTIONS}
        check = _saving.get()
        if check is None or not torch.is_grad_enabled():
            return part(*args, **kwargs)
        return _Part(model, tensors, part, (args, kwargs))(check)

    global _passes
    token = _handler.set(handler)
    with _lock:
        _passes += 1
        setattr(checkpointing, HANDLER, _called)
        _CHECKPOINT.__code__ = _exchanged.__code__
    try:
        yield met
    finally:
        with _lock:
            _passes -= 1
            if not _passes:
                _CHECKPOINT.__code__ = _ORIGINAL.__code__
        _handler.reset(token)


_handler: ContextVar[Callable[..., Any] | None] = ContextVar("lambdahat_checkpoint", default=None)
_lock, _passes = Lock(), 0


def _called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call of ``checkpoint``: ours within a pass of this thread, torch's outside."""
    return (_handler.get() or _ORIGINAL)(function, *args, **kwargs)


def _exchanged(function, *args, **kwargs):  # type: ignore[no-untyped-def]
    """The code that runs in place of the library's, among its names."""
    return _lambdahat_checkpoint(function, *args, **kwargs)  # type: ignore[name-defined]  # noqa: F821


class _Within(nn.Module):
    """A part of a model as a module, to be called with other tensors in the whole."""

    def __init__(self, model: nn.Module, part: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.part = model, part

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.part(*args, **kwargs)


class _Part:
    """One checkpointed call: a function of the model's live tensors and its own arguments."""

    def __init__(
        self, model: nn.Module, tensors: Mapping[str, Tensor], part: Callable[..., Any], given: Any
    ) -> None:
        self._within = _Within(model, part)
        self._names = [name for name, tensor in tensors.items() if tensor.requires_grad]
        self._fixed = {name: part for name, part in tensors.items() if not part.requires_grad}
        leaves, self._spec = tree_flatten(given)
        self._where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._leaves: list[Any] = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._inputs = [*(tensors[name] for name in self._names), *(leaves[i] for i in self._where)]
        device = self._inputs[0].device.type if self._inputs else "cpu"
        self._autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        self._rest: list[Any] = []
        self._form: TreeSpec | None = None

    def __call__(self, check: Check) -> Any:
        # the graph alone holds them, and lets them go as it runs
        inputs, self._inputs = self._inputs, []
        outputs = iter(_Recomputed.apply(self.run, check, *inputs))  # type: ignore[no-untyped-call]
        assert self._form is not None
        leaves = [next(outputs) if leaf is None else leaf[0] for leaf in self._rest]
        return tree_unflatten(leaves, self._form)

    def run(self, values: Tensors) -> tuple[Tensor, ...]:
        """The tensors that the part gives; what else it gives is kept aside."""
        own, rest = values[: len(self._names)], iter(values[len(self._names) :])
        leaves = [next(rest) if i in self._where else leaf for i, leaf in enumerate(self._leaves)]
        args, kwargs = tree_unflatten(leaves, self._spec)
        inner = {**self._fixed, **dict(zip(self._names, own, strict=True))}
        tensors = {f"model.{name}": value for name, value in inner.items()}
        device, dtype, enabled = self._autocast
        with (
            AsWritten(),
            recomputing(False),
            checkpoints_of(self._within.model, inner),
            torch.autocast(device, dtype, enabled=enabled),
        ):
            output = functional_call(self._within, tensors, args, kwargs)
        flat, self._form = tree_flatten(output)
        self._rest = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in flat]
        return tuple(leaf for leaf in flat if isinstance(leaf, Tensor))


class _Recomputed(torch.autograd.Function):
    """A part that keeps its inputs alone, with their tangents where there are some."""

    @staticmethod
    def forward(ctx: Any, run: Run, check: Check, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.run, ctx.check = run, check
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)
        # an input that is handed on has no tangent here
        held = {tensor.untyped_storage()._cdata for tensor in inputs}
        return tuple(z.clone() if z.untyped_storage()._cdata in held else z for z in run(inputs))

    @staticmethod
    @torch.no_grad()
    def jvp(ctx: Any, _: None, __: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Tangents of the outputs; without a graph, for the backward pass makes its own."""
        with forward_ad._set_fwd_grad_enabled(True):
            pairs = zip(ctx.saved_tensors, tangents, strict=True)
            duals = [
                p.detach() if t is None else forward_ad.make_dual(p.detach(), t) for p, t in pairs
            ]
            outputs = [forward_ad.unpack_dual(output) for output in ctx.run(duals)]
        return tuple(
            torch.zeros_like(point) if tangent is None and point.is_floating_point() else tangent
            for point, tangent in outputs
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Jᵀg and, with tangents ẋ and ġ, its tangent ∂(Jᵀg)/∂x ẋ + Jᵀġ, by a second backward pass.

        Dual numbers through a graph would be simpler, but their tangents hold the graph in a circle
        that only the end of the dual level opens.
        """
        needed = ctx.needs_input_grad[2:]
        pairs = [_parts(tensor) for tensor in ctx.saved_tensors]
        seeds = [(None, None) if grad is None else _parts(grad) for grad in grads]
        points = [point.detach() for point, _ in pairs]
        wanted = [p.requires_grad_() for p, need in zip(points, needed, strict=True) if need]
        tangents = [tangent for (_, tangent), need in zip(pairs, needed, strict=True) if need]
        moving = any(tangent is not None for _, tangent in (*pairs, *seeds))
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(False):
            every = ((z, *seed) for z, seed in zip(ctx.run(points), seeds, strict=True))
            live = [(z, g, dg) for z, g, dg in every if z.requires_grad and g is not None]
            tops, signals = [z for z, _, _ in live], [g for _, g, _ in live]
            gradients = pull_back(tops, wanted, signals, allow_unused=True, create_graph=moving)
            if moving:
                outputs = [(z, dg) for z, _, dg in live]
                along = _along(ctx.check, wanted, gradients, tangents, outputs)
        if moving:
            gradients = tuple(
                None if g is None else forward_ad.make_dual(g.detach(), t)
                for g, t in zip(gradients, along, strict=True)
            )
        results = iter(gradients)
        return None, None, *(next(results) if need else None for need in needed)


def _along(
    check: Check,
    points: list[Tensor],
    gradients: Tensors,
    tangents: Tensors,
    outputs: list[tuple[Tensor, Tensor | None]],
) -> list[Tensor | None]:
    """The tangents of ``gradients`` at ``points``, which move along ``tangents``."""
    pairs = zip(gradients, tangents, strict=True)
    moving = [(g, t) for g, t in pairs if g is not None and g.requires_grad and t is not None]
    moving += [(z, t) for z, t in outputs if t is not None]
    slopes, seeds = [g for g, _ in moving], [t for _, t in moving]
    check(slopes)
    reached = [point for point, g in zip(points, gradients, strict=True) if g is not None]
    if not moving:
        return [None if g is None else torch.zeros_like(g) for g in gradients]
    parts = iter(pull_back(slopes, reached, seeds, materialize_grads=True))
    return [None if g is None else next(parts) for g in gradients]


def _parts(tensor: Tensor) -> tuple[Tensor, Tensor | None]:
    """Values and tangents, where there are some."""
    if forward_ad._current_level < 0:
        return tensor, None
    point, tangent = forward_ad.unpack_dual(tensor)
    return point, None if tangent is None else tangent.detach()
