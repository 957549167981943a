"""Stand-ins for layers whose derivatives torch gives wrongly, or in a form of their own.

The kernel of w = g·v/‖v‖ (weight norm) holds ‖v‖ constant when its gradient is differentiated:
Hessians come out unsymmetric. The same in plain operations is right to any order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from lambdahat._core.check import require

KERNEL = "WeightNormInterfaceBackward"


def true_derivatives(model: nn.Module) -> None:
    """Have the layers of a private copy give the derivatives of the loss.

    Those with weight norm as above. Embeddings may scale their gradient by the frequency of a
    token, which is then the gradient of no function, and may give it as a sparse tensor; with
    ``max_norm`` they write to their weight in the forward pass, and are differentiated as if they
    had not. The row of ``padding_idx`` is a constant, which torch forgets in forward mode. Bags of
    equal length go by plain operations, for their kernel can be differentiated but once. Layers
    with a forward of their own are left as they are.
    """
    for holder, name, stand_in in _normed(model):
        setattr(holder, name, stand_in)
    held = Counter(
        id(parameter) for layer in model.modules() for parameter in layer._parameters.values()
    )
    for layer in model.modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            layer.sparse = layer.scale_grad_by_freq = False
            bounded = layer.max_norm is not None
            require(
                not (bounded and held[id(layer.weight)] > 1),
                "an embedding with max_norm",
                "have a weight of its own",
                "one that another layer reads after it was shortened",
                "leave out max_norm, or give the other layer a weight of its own",
            )
            if isinstance(layer, nn.EmbeddingBag):
                if _has_forward_of(layer, nn.EmbeddingBag):
                    layer.forward = partial(_bags, layer)  # type: ignore[method-assign]
            elif (bounded or layer.padding_idx is not None) and _has_forward_of(
                layer, nn.Embedding
            ):
                layer.forward = partial(_rows, layer)  # type: ignore[method-assign]


@contextmanager
def true_second_derivatives(model: nn.Module | None) -> Iterator[None]:
    """Within, losses of the model can be differentiated more than once; the model is then as it
    was.

    Only the forward pass need be inside. For ``batch_product`` of a model with weight norm, whose
    own kernel has a wrong second derivative.
    """
    put = [] if model is None else _normed(model)
    try:
        for holder, name, stand_in in put:
            setattr(holder, name, stand_in)
        yield
    finally:
        for holder, name, _ in put:
            vars(holder).pop(name, None)


def require_true_second_derivative(loss: Tensor) -> None:
    """Raise where the graph of a loss holds the kernel of weight norm."""
    seen: set[Any] = set()
    left = [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        require(
            not node.name().startswith(KERNEL),
            "loss",
            "have a true second derivative",
            "one through torch's weight_norm, whose kernel holds ‖v‖ constant in it",
            "run the model within lambdahat.optim.true_second_derivatives(model)",
        )
        left += [following for following, _ in node.next_functions]


def recomputed_weights(model: nn.Module) -> list[Tensor]:
    """Weights that old-style hooks of normed weights put into a layer before every pass, with
    the graph of the last.
    """
    hooks = [
        (layer, hook) for layer in model.modules() for hook in layer._forward_pre_hooks.values()
    ]
    found = (
        vars(layer).get(hook.name)
        for layer, hook in hooks
        if isinstance(hook, WeightNorm | SpectralNorm)
    )
    return [weight for weight in found if isinstance(weight, Tensor)]


def _normed(model: nn.Module) -> list[tuple[Any, str, Any]]:
    """What computes normed weights: (its holder, the method's name, what stands in for it)."""
    found: list[tuple[Any, str, Any]] = []
    for layer in model.modules():
        if isinstance(layer, _WeightNorm) and _has_forward_of(layer, _WeightNorm):
            found.append((layer, "forward", partial(_weight_norm, layer.dim)))
        hooks = [hook for hook in layer._forward_pre_hooks.values() if isinstance(hook, WeightNorm)]
        found += [
            (hook, "compute_weight", partial(_hooked_weight, hook.name, hook.dim))
            for hook in hooks
            if "compute_weight" not in vars(hook)
        ]
    return found


def _has_forward_of(layer: nn.Module, kind: type[nn.Module]) -> bool:
    return type(layer).forward is kind.forward and "forward" not in vars(layer)


def _hooked_weight(name: str, dim: int, layer: nn.Module) -> Tensor:
    return _weight_norm(dim, getattr(layer, f"{name}_g"), getattr(layer, f"{name}_v"))


def _weight_norm(dim: int, weight_g: Tensor, weight_v: Tensor) -> Tensor:
    places = range(weight_v.ndim)
    # -1 is torch's none
    across = None if dim == -1 else [place for place in places if place != dim % weight_v.ndim]
    length: Tensor = torch.linalg.vector_norm(weight_v, dim=across, keepdim=dim != -1)
    return weight_v * (weight_g / length)


def _rows(layer: nn.Embedding, input: Tensor) -> Tensor:
    rows = functional.embedding(
        input, layer.weight if layer.max_norm is None else _shortened(layer)
    )
    if layer.padding_idx is None:
        return rows
    return torch.where((input == layer.padding_idx).unsqueeze(-1), rows.detach(), rows)


def _bags(
    layer: nn.EmbeddingBag,
    input: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
) -> Tensor:
    weight = layer.weight if layer.max_norm is None else _shortened(layer)
    if input.ndim != 2 or layer.mode == "max":
        return functional.embedding_bag(
            input,
            weight,
            offsets,
            mode=layer.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=layer.include_last_offset,
            padding_idx=layer.padding_idx,
        )
    counted = (
        torch.ones_like(input, dtype=weight.dtype)
        if layer.padding_idx is None
        else input != layer.padding_idx
    )
    shares = (
        counted.to(weight.dtype) if per_sample_weights is None else counted * per_sample_weights
    )
    total = (functional.embedding(input, weight) * shares.unsqueeze(-1)).sum(1)
    return total / counted.sum(1, keepdim=True).clamp_min(1) if layer.mode == "mean" else total


def _shortened(layer: nn.Embedding | nn.EmbeddingBag) -> Tensor:
    """The weight, rows longer than ``max_norm`` scaled down to it, as a function of the weight.

    A row that torch has scaled has that length up to rounding. It counts as inside, where torch's
    own gradient is.
    """
    assert layer.max_norm is not None
    weight = layer.weight
    lengths: Tensor = torch.linalg.vector_norm(
        weight.detach(), layer.norm_type, dim=1, keepdim=True
    )
    long = lengths > layer.max_norm * (1 + 4 * torch.finfo(weight.dtype).eps)
    # a length has no second derivative at 0
    rows = torch.where(long, weight, torch.ones_like(weight))
    scale = layer.max_norm / (
        torch.linalg.vector_norm(rows, layer.norm_type, dim=1, keepdim=True) + 1e-7
    )
    return torch.where(long, weight * scale, weight)
