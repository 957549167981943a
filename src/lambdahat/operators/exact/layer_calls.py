"""The uses of layers in a forward pass: what entered each, and the edge of the autograd graph
that it left by.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lambdahat.operators.linearise import graph_nodes
from lambdahat.problem import Problem
from lambdahat.problem.batches import Batch

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
KNOWN = (nn.Linear, *CONVOLUTIONS, *BATCH_NORMS)


@dataclass(frozen=True)
class Call:
    """One use of a layer in the forward pass: what entered (normalised, for batch-norm) and the
    edge it left by.

    ``came`` is the edge that the input came by, None for a constant one. ``slope`` is W (O, I) of a
    linear layer and γ/√(var + ε) (C,) of batch-norm, None of others.
    """

    layer: nn.Module
    entered: Tensor
    left: GradientEdge
    width: int
    came: GradientEdge | None
    slope: Tensor | None

    @property
    def samples(self) -> int:
        """The length of the first dimension; 0 where that is no batch's, for the layer took one
        sample without it.
        """
        own = len(self.layer.kernel_size) + 1 if isinstance(self.layer, CONVOLUTIONS) else 1
        return len(self.entered) if self.entered.ndim > own else 0


Calls = dict[str, list[Call]]


def recorded(problem: Problem, leaves: dict[str, Tensor], batch: Batch) -> tuple[Tensor, Calls]:
    """The output for a batch and the uses of its layers, by the layer's name."""
    with _recording(problem, leaves) as calls:
        output: Tensor = problem.output(leaves, batch)
    return output, calls


def uses_of_leaves(output: Tensor) -> Counter[int]:
    """How often each leaf enters the graph of the output, by its id."""
    children = (child for node in graph_nodes([output]) for child, _ in node.next_functions)
    return Counter(
        id(child.variable) for child in children if type(child).__name__ == "AccumulateGrad"
    )


def names_in(prefix: str, layer: nn.Module, leaves: dict[str, Tensor]) -> set[str]:
    """The leaves that are a layer's own parameters."""
    own = (
        full_name(prefix, key) for key, tensor in layer._parameters.items() if tensor is not None
    )
    return {name for name in own if name in leaves}


def full_name(prefix: str, key: str) -> str:
    """The name of a layer's parameter in the model."""
    return f"{prefix}.{key}" if prefix else key


def owner(name: str) -> str:
    """The prefix of the layer that a parameter belongs to."""
    return name.rpartition(".")[0]


@contextmanager
def _recording(problem: Problem, leaves: dict[str, Tensor]) -> Iterator[Calls]:
    """Record what enters and leaves every layer that has a closed form, while the block runs.

    Linear layers are recorded with their weights held constant too: what bends above them reaches
    the layers below.
    """
    calls: Calls = {}
    handles = []
    for prefix, layer in () if problem.model is None else problem.model.named_modules():
        if type(layer) not in KNOWN or not (
            type(layer) is nn.Linear or names_in(prefix, layer, leaves)
        ):
            continue

        def note(
            layer: nn.Module, args: Any, kwargs: Any, left: Tensor, prefix: str = prefix
        ) -> None:
            if left.requires_grad:
                calls.setdefault(prefix, []).append(
                    _call(layer, args[0] if args else kwargs["input"], left)
                )

        # before the user's hooks, which may change what the layer gives
        handles.append(layer.register_forward_hook(note, with_kwargs=True, prepend=True))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _call(layer: nn.Module, given: Tensor, left: Tensor) -> Call:
    """Edges, not tensors: a later in-place operation changes what a tensor is."""
    entered, slope = given.detach(), None
    if isinstance(layer, nn.Linear):
        slope = layer.weight.detach()
    if isinstance(layer, BATCH_NORMS):
        entered, slope = _standardised(layer, entered)
    came = get_gradient_edge(given) if given.requires_grad else None
    return Call(layer, entered, get_gradient_edge(left), left.numel(), came, slope)


def _standardised(layer: nn.Module, entered: Tensor) -> tuple[Tensor, Tensor]:
    """x̂ = (x − mean)/√(var + ε) by the running statistics in use during the call, which may not be
    the layer's own.

    The slope is that of z = γ·x̂ + β in x.
    """
    mean, variance = layer.running_mean, layer.running_var
    assert isinstance(mean, Tensor)
    assert isinstance(variance, Tensor)
    spread = [1, -1] + [1] * (entered.ndim - 2)
    root = (variance.to(entered) + layer.eps).sqrt()  # type: ignore[operator]
    weight = layer.weight
    slope = weight.detach() / root if isinstance(weight, Tensor) else root.reciprocal()
    return (entered - mean.to(entered).reshape(spread)) / root.reshape(spread), slope
