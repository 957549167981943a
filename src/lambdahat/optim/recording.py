"""Hooks on a model that see each layer's input and output gradient, and leave no trace in copies
of it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class Listener(Protocol):
    """Who wants to know what the layers of a model see."""

    def wanted(self) -> bool:
        """Whether the forward pass that runs now is of interest."""

    def receive(self, index: int, x: Tensor, g: Tensor, samples: int, forward_pass: object) -> None:
        """Take the input of module ``index`` and the gradient at its output."""


class Recorder:
    """Calls ``listener.receive(index, x, g, samples, forward_pass)`` in a backward pass for every
    call of a module.

    x is the input of ``modules[index]`` and g the gradient at its output; ``samples`` is the batch
    size of the model's own input, and ``forward_pass`` the same object for all calls in one forward
    pass of the model. Passes in eval mode or without gradients are not seen, nor those of
    ``create_graph=True``, nor those that are not ``wanted()``. The hooks hold the recorder weakly
    and are removed with it, or by ``close``; so does the recorder its listener.
    """

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module], listener: Listener) -> None:
        self.modules, self._listener = tuple(modules), weakref.ref(listener)
        self._current: tuple[int, object] | None = None
        handles = [model.register_forward_pre_hook(_Hook(self, "begin"), with_kwargs=True)]
        for index, module in enumerate(self.modules):
            handles.append(
                module.register_forward_hook(_Hook(self, "called", index), with_kwargs=True)
            )
        # last, for the model may be a layer itself
        handles.append(
            model.register_forward_hook(_Hook(self, "end"), with_kwargs=True, always_call=True)
        )
        self.close = weakref.finalize(self, _remove, handles)

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward pass of the whole model starts: its first tensor tells the number of
        samples.
        """
        first = args[0] if args else None
        leaves = (
            [first] if isinstance(first, Tensor) and first.ndim > 0 else tree_leaves((args, kwargs))
        )
        sizes = [len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim > 0]
        self._current = (sizes[0], object()) if sizes else None

    def end(self, *_: Any) -> None:
        """It is over."""
        self._current = None

    def called(
        self,
        index: int,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        """One layer was called: watch for the gradient at its output."""
        listener = self._listener()
        seen = module is self.modules[index] and module.training and torch.is_grad_enabled()
        if not (
            seen
            and isinstance(output, Tensor)
            and output.requires_grad
            and listener
            and listener.wanted()
        ):
            return
        x = (args[0] if args else kwargs["input"]).detach()
        samples, forward_pass = self._current or (len(x), object())
        held, waiting = self._listener, [x]  # emptied by the first backward pass

        def hook(g: Tensor) -> None:
            listener, rest = held(), waiting.copy()
            waiting.clear()
            if listener is not None and rest and not torch.is_grad_enabled():
                listener.receive(index, rest[0], g, samples, forward_pass)

        output.register_hook(hook)


class _Hook:
    """A weak call of one of the recorder's methods; a copied or unpickled one does nothing."""

    def __init__(self, recorder: Recorder, method: str, *first: Any) -> None:
        self.recorder, self.method, self.first = weakref.ref(recorder), method, first

    def __call__(self, *args: Any) -> None:
        recorder = self.recorder()
        if recorder is not None:
            getattr(recorder, self.method)(*self.first, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        # a callable of the standard library that ignores its arguments, so that a model that was
        # saved while it was being trained loads where lambdahat is not installed
        return getattr, (contextlib.nullcontext(), "__exit__")


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()
