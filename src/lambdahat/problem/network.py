"""A model made ready for a problem: a private copy in the mode asked for, the choice of its
parameters, and stand-ins for layers whose derivatives torch gives wrongly.

The kernel of w = g·v/‖v‖ (weight norm) holds ‖v‖ constant when its gradient is differentiated, so
that Hessians come out unsymmetric. The same in plain operations is right to any order.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils.checkpoint import checkpoint

from lambdahat._core.check import require
from lambdahat._core.storage import digest_tensors
from lambdahat.problem.distributed import is_sharded, without_sharding
from lambdahat.problem.space import Pattern, matcher

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
    """Context in which losses of the model can be differentiated more than once; the model is
    restored on exit.

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


BATCH_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
NORMS = (
    *BATCH_NORMS,
    nn.LayerNorm,
    nn.GroupNorm,
    *((nn.RMSNorm,) if hasattr(nn, "RMSNorm") else ()),
)

CUDNN_WAS = "cudnn_was"


def private_copy(model: nn.Module, norm: str) -> nn.Module:
    """A copy of the module tree that shares the tensors, set to the evaluation mode asked for."""
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        model = model.module
    model = without_sharding(model) if is_sharded(model) else model
    memo = {id(tensor): tensor for tensor in named_tensors(model).values()}
    memo |= {id(tensor): tensor.detach() for tensor in recomputed_weights(model)}
    try:
        private = copy.deepcopy(model, memo)
    except (TypeError, RuntimeError, AttributeError) as error:
        raise TypeError(
            f"model must survive copy.deepcopy, got {type(error).__name__}: {error}; "
            "drop cached tensors or handles kept as attributes"
        ) from error
    private.eval()
    _checkpoint_layers(private)
    true_derivatives(private)
    _cache_nothing(private, model)
    for name, layer in private.named_modules():
        coupled = isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_mean is None
        require(
            not coupled or norm == "train",
            "norm",
            f'be "train": layer {name!r} keeps no running statistics',
            repr(norm),
            "or set track_running_stats=True in the layer",
        )
    if norm == "train":
        for layer in private.modules():
            layer.training = isinstance(layer, BATCH_NORMS)
    for layer in private.modules():
        if isinstance(layer, nn.RNNBase):
            layer.register_forward_pre_hook(_leave_cudnn)
            layer.register_forward_hook(_return_to_cudnn, always_call=True)
    return private


def _cache_nothing(private: nn.Module, model: nn.Module) -> None:
    """Have no part of a copy keep keys and values for generation: they cost memory, and parts
    cannot be run again.
    """
    users = {id(getattr(layer, "config", None)) for layer in model.modules()}
    for layer in private.modules():
        config = getattr(layer, "config", None)
        if getattr(config, "use_cache", False) is True:
            if id(config) in users:  # one that copies share
                config = copy.copy(config)
                layer.config = config  # type: ignore[assignment]
            config.use_cache = False  # type: ignore[union-attr]


def _leave_cudnn(layer: nn.Module, inputs: Any) -> None:
    """cuDNN's recurrent kernels have no backward pass in evaluation mode, and never a second
    one; torch's own have.
    """
    # copies of copies have it twice
    layer.__dict__.setdefault(CUDNN_WAS, []).append(torch.backends.cudnn.enabled)
    torch.backends.cudnn.enabled = False


def _return_to_cudnn(layer: nn.Module, inputs: Any, output: Any) -> None:
    torch.backends.cudnn.enabled = layer.__dict__[CUDNN_WAS].pop()


def _checkpoint_layers(model: nn.Module) -> None:
    """Have the layers of transformers checkpoint where they were asked to: by themselves they do
    in training alone.
    """
    for layer in model.modules():
        kinds = {kind.__name__ for kind in type(layer).__mro__}
        if "GradientCheckpointingLayer" in kinds and getattr(
            layer, "gradient_checkpointing", False
        ):
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, tied ones once, under their first name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def structure(part: Any) -> str:
    """A model, a loss or a function in words that another one does not have: its layers, its
    settings, its code.

    The code of torch's own classes is left out, and so are attributes of a model, which a forward
    pass may change.
    """
    if isinstance(part, nn.Module):
        kinds = dict.fromkeys(type(layer) for layer in part.modules())
        return f"{part!r} {[_code(kind.forward) for kind in kinds if not _of_torch(kind)]}"
    if callable(part) and not hasattr(part, "value"):
        return _code(part)
    settings = (
        {}
        if part is None
        else {name: value for name, value in vars(part).items() if name != "name"}
    )
    return (
        f"{type(part).__qualname__}"
        f" {[(name, _setting(value)) for name, value in sorted(settings.items())]}"
    )


def _setting(value: Any) -> str:
    if isinstance(value, Tensor):
        return digest_tensors({"": value})
    if isinstance(value, nn.Module) or callable(value):
        return structure(value)
    return re.sub(r"0x[0-9a-f]+", "", repr(value))


def _of_torch(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"


def _code(function: Any) -> str:
    """The name of a function with its code and constants; for other callables that of their
    class.
    """
    if isinstance(function, partial):
        arguments = {str(i): value for i, value in enumerate(function.args)} | function.keywords
        return (
            f"{_code(function.func)}"
            f" {[(name, _setting(value)) for name, value in arguments.items()]}"
        )
    code = getattr(function, "__code__", getattr(type(function), "__code__", None))
    name = getattr(function, "__qualname__", type(function).__qualname__)
    if code is None:
        return str(name)
    return (
        f"{name} {code.co_code.hex()} {code.co_names}"
        f" {[_constant(each) for each in code.co_consts]}"
    )


def _constant(value: Any) -> str:
    """A constant of some code; the order of a set differs from process to process."""
    if hasattr(value, "co_code"):
        return str(value.co_code.hex())
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)


def select_parameters(model: nn.Module, pattern: Pattern | None, norm: str) -> dict[str, Tensor]:
    """The parameters that make up the vector, in the model's order."""
    everything = dict(model.named_parameters())
    require(bool(everything), "model", "have parameters", f"{type(model).__name__} without any")
    fixed: set[str] = set()
    if norm == "frozen":
        layers = [
            (name, layer) for name, layer in model.named_modules() if isinstance(layer, NORMS)
        ]
        fixed = {
            f"{name}.{key}" if name else key
            for name, layer in layers
            for key, _ in layer.named_parameters(recurse=False)
        }
    first_name = {id(tensor): name for name, tensor in everything.items()}
    asked = None
    if pattern is not None:
        match = matcher(pattern)
        aliases = model.named_parameters(remove_duplicate=False)
        asked = {first_name[id(tensor)] for name, tensor in aliases if match(name)}
        some = ", ".join(list(everything)[:6]) + (", …" if len(everything) > 6 else "")
        require(bool(asked), "parameters", f"match at least one of {some}", repr(pattern))
    chosen: dict[str, Tensor] = {
        name: tensor
        for name, tensor in everything.items()
        if tensor.requires_grad and name not in fixed and (asked is None or name in asked)
    }
    require(
        bool(chosen),
        "parameters",
        "select at least one parameter that requires a gradient",
        "only frozen, integer or excluded ones",
        "call requires_grad_(True) on those to measure",
    )
    for name, tensor in chosen.items():
        ready = tensor.is_floating_point() and not nn.parameter.is_lazy(tensor)
        require(
            ready,
            f"parameter {name!r}",
            "be real floating point and initialised",
            f"{type(tensor).__name__}, {tensor.dtype}",
            "run a lazy model once, or leave it out with parameters=",
        )
    return chosen


def device_of(tensors: Mapping[str, Tensor], asked: torch.device | str | None) -> torch.device:
    """The device asked for, or the one that all the tensors are on."""
    found = {tensor.device for tensor in tensors.values()}
    require(
        all(device.type != "meta" for device in found),
        "model",
        "be on one device, with data",
        "meta, where parameters have shapes alone",
        "fill it: model.to_empty(device='cpu') and load_state_dict",
    )
    if asked is None:
        places = ", ".join(sorted(map(str, found)))
        require(len(found) == 1, "model", "be on one device, with data", places, "pass device=")
        return found.pop()
    meta = isinstance(asked, str | torch.device) and str(asked) == "meta"
    require(
        not meta,
        "device",
        "be one that computes",
        "'meta', which has shapes alone",
        'use "cpu" or "cuda"',
    )
    try:
        torch.empty(0, device=asked)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(f'device must be available, got {asked!r}; use "cpu" ({error})') from error
    return torch.device(asked)


@contextmanager
def accumulating(layers: Any) -> Iterator[None]:
    """Batch-norm layers in train mode with cumulative averages, put back afterwards."""
    before = [(layer, layer.training, layer.momentum) for layer in layers]
    try:
        for layer, _, _ in before:
            layer.training, layer.momentum = True, None
        yield
    finally:
        for layer, training, momentum in before:
            layer.training, layer.momentum = training, momentum
