"""Vector–Jacobian products on the CPU that do not wait for what torch imports.

At the first ``torch.autograd.grad`` with ``grad_outputs`` torch imports sympy, to compare shapes
that may be symbolic; that takes longer than many a measurement. The gradient of a scalar needs no
vectors, so here the outputs are joined into a scalar of value 0 whose derivative in each of them is
the vector wanted.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge


class _Joined(torch.autograd.Function):
    """A scalar whose gradient by the outputs is what ``vectors`` holds in the backward pass."""

    @staticmethod
    def forward(ctx: Any, vectors: list[Tensor], *outputs: Tensor) -> Tensor:
        ctx.vectors = vectors
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.vectors


class Pullback:
    """v ↦ Jᵀv for the outputs of a graph, tensors or edges; tensors are not held.

    It is made outside of vmap and may be called within. Threads take turns.
    """

    def __init__(self, outputs: Sequence[Any]) -> None:
        # apart from self, which would be a cycle through the graph that no collector sees
        self._vectors: list[Tensor] = []
        self._lock = threading.Lock()
        self._edges, self._scalar = outputs, None
        # functorch has rules of its own for functions
        if torch._C._are_functorch_transforms_active():
            return
        # an edge cannot be joined, and on a GPU further kernels would be started at every call
        if not outputs or not all(
            isinstance(z, Tensor) and z.device.type == "cpu" for z in outputs
        ):
            self._edges = [get_gradient_edge(z) if _live(z) else z for z in outputs]
            return
        self._edges = ()
        with torch.enable_grad():
            self._scalar = cast(Any, _Joined.apply)(self._vectors, *outputs)

    def __call__(
        self, inputs: Sequence[Any], vectors: Sequence[Tensor], **options: Any
    ) -> tuple[Any, ...]:
        """The gradients of Σ vᵀz at the inputs; ``options`` are those of autograd.grad."""
        if self._scalar is None:
            return torch.autograd.grad(self._edges, inputs, vectors, **options)
        with self._lock:
            self._vectors[:] = vectors
            try:
                return torch.autograd.grad(self._scalar, inputs, **options)
            finally:
                self._vectors.clear()


def _live(output: Any) -> bool:
    return isinstance(output, Tensor) and output.requires_grad


def pull_back(
    outputs: Sequence[Any], inputs: Sequence[Any], vectors: Sequence[Tensor], **options: Any
) -> tuple[Any, ...]:
    """The gradients of Σ vᵀz at the inputs, of outputs z that are pulled back once."""
    return Pullback(outputs)(inputs, vectors, **options)
