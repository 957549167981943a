"""A model made ready for a problem: a private copy in the mode asked for, the choice of its
parameters, and stand-ins for layers whose derivatives torch gives wrongly.

The kernel of w = g·v/‖v‖ (weight norm) holds ‖v‖ constant when its gradient is differentiated, so
that Hessians come out unsymmetric. The same in plain operations is right to any order.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils.checkpoint import checkpoint

from lambdahat._core.check import message, require
from lambdahat._core.device import COMPILED
from lambdahat._core.storage import digest_tensors
from lambdahat.problem.distributed import is_sharded, without_sharding

Pattern = str | Sequence[str] | Callable[[str], bool]
T = TypeVar("T")


def matcher(pattern: Pattern) -> Callable[[str], bool]:
    """A test of names from a glob ("layers.0.*"), several globs, or a callable."""
    if callable(pattern):
        return pattern
    single = isinstance(pattern, str) or not isinstance(pattern, Iterable)
    globs: list[Any] = [pattern] if single else list(pattern)
    if not all(isinstance(glob, str) for glob in globs):
        expected = "be a glob, a list of globs or a callable"
        cure = 'pass names, as in parameters="head.*", not the tensors'
        raise TypeError(message("parameters", expected, pattern, cure))
    return lambda name: any(name == glob or fnmatchcase(name, glob) for glob in globs)


def true_derivatives(model: nn.Module) -> None:
    """Have the layers of a private copy give the derivatives of the loss.

    Weight norm as above. Embeddings: no scaling by frequency, no sparse gradients, ``max_norm`` as
    a function of the weight, a constant row at ``padding_idx`` in forward mode too; bags of equal
    length by plain operations. Layers with a forward of their own are left as they are.

    GPT-2's activation in transformers, eight operations that keep as many tensors, by the one of
    torch that it equals. Hard sigmoid, whose kernel can be differentiated only once, by ReLU6.
    """
    for holder, name, stand_in in _weight_norms(model):
        setattr(holder, name, stand_in)
    weights = [weight for layer in model.modules() for weight in layer._parameters.values()]
    held = Counter(map(id, weights))
    for layer in model.modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            layer.sparse = layer.scale_grad_by_freq = False
            bounded = layer.max_norm is not None
            if bounded and held[id(layer.weight)] > 1:
                raise ValueError(
                    "an embedding with max_norm must have a weight of its own, got one that"
                    " another layer reads after it was shortened; leave out max_norm, or give the"
                    " other layer a weight of its own"
                )
            bags = isinstance(layer, nn.EmbeddingBag)
            plain = _has_forward_of(layer, nn.EmbeddingBag if bags else nn.Embedding)
            if plain and (bags or bounded or layer.padding_idx is not None):
                layer.forward = partial(_bags if bags else _rows, layer)  # type: ignore[method-assign, arg-type]
        if isinstance(layer, nn.Hardsigmoid) and _has_forward_of(layer, nn.Hardsigmoid):
            layer.forward = _hard_sigmoid  # type: ignore[method-assign]
        if type(layer).__name__ == "NewGELUActivation" and _is_tanh_gelu(layer):
            layer.forward = partial(functional.gelu, approximate="tanh")


def _hard_sigmoid(input: Tensor) -> Tensor:
    return functional.relu6(input + 3) / 6


@torch.no_grad()
def _is_tanh_gelu(layer: nn.Module) -> bool:
    points = torch.linspace(-8, 8, 129, dtype=torch.float64)
    truth = functional.gelu(points, approximate="tanh")
    return torch.allclose(layer.forward(points), truth, rtol=1e-12, atol=1e-14)


@contextmanager
def true_second_derivatives(model: nn.Module | None) -> Iterator[None]:
    """Context in which losses of the model can be differentiated more than once; the model is
    restored on exit.

    Only the forward pass need be inside. For ``batch_product`` of a model with weight norm, whose
    own kernel has a wrong second derivative.
    """
    put = [] if model is None else _weight_norms(model)
    try:
        for holder, name, stand_in in put:
            setattr(holder, name, stand_in)
        yield
    finally:
        for holder, name, _ in put:
            vars(holder).pop(name, None)


def _weight_norms(model: nn.Module) -> list[tuple[Any, str, Any]]:
    """What computes normed weights: (its holder, the method's name, what stands in for it)."""
    norms: list[tuple[Any, str, Any]] = []
    for layer in model.modules():
        if isinstance(layer, _WeightNorm) and _has_forward_of(layer, _WeightNorm):
            norms.append((layer, "forward", partial(_weight_norm, layer.dim)))
        for hook in layer._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm) and "compute_weight" not in vars(hook):
                weight = partial(_hooked_weight, hook.name, hook.dim)
                norms.append((hook, "compute_weight", weight))
    return norms


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
    rows = functional.embedding(input, _bounded_weight(layer))
    if layer.padding_idx is None:
        return rows
    return torch.where((input == layer.padding_idx).unsqueeze(-1), rows.detach(), rows)


def _bags(
    layer: nn.EmbeddingBag,
    input: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
) -> Tensor:
    weight, padding = _bounded_weight(layer), layer.padding_idx
    if input.ndim != 2 or layer.mode == "max":
        return functional.embedding_bag(
            input,
            weight,
            offsets,
            mode=layer.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=layer.include_last_offset,
            padding_idx=padding,
        )
    counted = torch.ones_like(input) if padding is None else input != padding
    counted = counted.to(weight.dtype)
    shares = counted if per_sample_weights is None else counted * per_sample_weights
    total = (functional.embedding(input, weight) * shares.unsqueeze(-1)).sum(1)
    return total / counted.sum(1, keepdim=True).clamp_min(1) if layer.mode == "mean" else total


def _bounded_weight(layer: nn.Embedding | nn.EmbeddingBag) -> Tensor:
    """The weight with rows longer than ``max_norm`` scaled down, as a function of the weight.

    A row that torch has scaled counts as inside, as in torch's own gradient.
    """
    weight, most, order = layer.weight, layer.max_norm, layer.norm_type
    if most is None:
        return weight
    lengths: Tensor = torch.linalg.vector_norm(weight.detach(), order, dim=1, keepdim=True)
    long = lengths > most * (1 + 4 * torch.finfo(weight.dtype).eps)
    # a length has no second derivative at 0
    rows = torch.where(long, weight, torch.ones_like(weight))
    scale = most / (torch.linalg.vector_norm(rows, order, dim=1, keepdim=True) + 1e-7)
    return torch.where(long, weight * scale, weight)


BATCH_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
NORMS = (*BATCH_NORMS, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)

CUDNN_WAS = "cudnn_was"


def own_names(tensors: Mapping[str, T], known: Collection[str]) -> dict[str, T]:
    """The same under the model's own names: what ``torch.compile`` and wrappers for parallel
    training put before them is left out.
    """
    wrappers = rf"^((module|{COMPILED})\.)+|\b{COMPILED}\."
    names = (name if name in known else re.sub(wrappers, "", name) for name in tensors)
    return dict(zip(names, tensors.values(), strict=True))


def untied(tensors: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """The same with each tied parameter once, under its first name."""
    first, kept = first_names(model), dict[str, Any]()
    for name, tensor in tensors.items():
        own = first.get(name, name)
        there = kept.setdefault(own, tensor)
        same = there is tensor or (isinstance(tensor, Tensor) and torch.equal(there, tensor))
        require(same, name, f"equal {own}, to which the model ties it", "other numbers")
    return kept


def first_names(model: nn.Module) -> dict[str, str]:
    """The first name of every parameter by each of its names: tied ones have several."""
    first = {id(tensor): name for name, tensor in model.named_parameters()}
    everywhere = model.named_parameters(remove_duplicate=False)
    return {name: first[id(tensor)] for name, tensor in everywhere}


def private_copy(model: nn.Module, norm: str) -> nn.Module:
    """A copy of the module tree that shares the tensors, set to the evaluation mode asked for."""
    expected, cure = "be a module of Python", "pass the model that it was made from"
    compiled = isinstance(model, torch.jit.ScriptModule)
    require(not compiled, "model", expected, "a ScriptModule of torch.jit", cure, TypeError)
    parallel = nn.parallel.DistributedDataParallel, nn.DataParallel
    while isinstance(model, parallel) or COMPILED in model._modules:
        model = model.get_submodule("module" if isinstance(model, parallel) else COMPILED)
    model = without_sharding(model) if is_sharded(model) else model
    memo = {id(tensor): tensor for tensor in named_tensors(model).values()}
    for layer in model.modules():  # weights that old-style hooks compute before every pass
        for hook in layer._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm | SpectralNorm):
                weight = vars(layer).get(hook.name)
                memo |= {id(weight): weight.detach()} if isinstance(weight, Tensor) else {}
    try:
        private = copy.deepcopy(model, memo)
    except (TypeError, RuntimeError, AttributeError) as error:
        raise TypeError(
            f"model must survive copy.deepcopy, got {type(error).__name__}: {error}; "
            "drop cached tensors or handles kept as attributes"
        ) from error
    for layer in list(private.modules()):
        for name, part in layer._modules.items():
            while part is not None and COMPILED in part._modules:
                part = layer._modules[name] = part._modules[COMPILED]
    private.eval()
    users = {id(getattr(layer, "config", None)) for layer in model.modules()}
    for layer in private.modules():
        # transformers' layers are to checkpoint where asked to; else only training does
        kinds = {kind.__name__ for kind in type(layer).__mro__}
        asked = getattr(layer, "gradient_checkpointing", False)
        if asked and "GradientCheckpointingLayer" in kinds:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        # key-value caches cost memory, and parts could not rerun
        config = getattr(layer, "config", None)
        if getattr(config, "use_cache", False) is True:
            if id(config) in users:  # one that copies share
                config = copy.copy(config)
                layer.config = config  # type: ignore[assignment]
            config.use_cache = False  # type: ignore[union-attr]
    true_derivatives(private)
    for name, layer in private.named_modules():
        coupled = isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_mean is None
        if coupled and norm != "train":
            raise ValueError(
                f'norm must be "train": layer {name!r} keeps no running statistics, got {norm!r};'
                " or set track_running_stats=True in the layer"
            )
        if norm == "train":
            layer.training = isinstance(layer, BATCH_NORMS)
        if isinstance(layer, nn.RNNBase):
            layer.register_forward_pre_hook(_leave_cudnn)
            layer.register_forward_hook(_return_to_cudnn, always_call=True)
    return private


def _leave_cudnn(layer: nn.Module, inputs: Any) -> None:
    """cuDNN's recurrent kernels have no backward pass in eval mode; torch's own have."""
    # copies of copies have it twice
    layer.__dict__.setdefault(CUDNN_WAS, []).append(torch.backends.cudnn.enabled)
    torch.backends.cudnn.enabled = False


def _return_to_cudnn(layer: nn.Module, inputs: Any, output: Any) -> None:
    torch.backends.cudnn.enabled = layer.__dict__[CUDNN_WAS].pop()


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, tied ones once, under their first name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def structure(part: Any) -> str:
    """A text that identifies a model, a loss or a function: its layers, settings and code.

    Torch's own code is left out, and so are attributes of a model, which a pass may change.
    """
    if isinstance(part, nn.Module):
        kinds = dict.fromkeys(type(layer) for layer in part.modules())
        foreign = [kind for kind in kinds if kind.__module__.partition(".")[0] != "torch"]
        return f"{part!r} {[_code(kind.forward) for kind in foreign]}"
    if callable(part) and not hasattr(part, "value"):
        return _code(part)
    settings = {} if part is None else {k: v for k, v in vars(part).items() if k != "name"}
    return f"{type(part).__qualname__} {[(k, _setting(v)) for k, v in sorted(settings.items())]}"


def _setting(value: Any) -> str:
    if isinstance(value, Tensor):
        return digest_tensors({"": value})
    if isinstance(value, nn.Module) or callable(value):
        return structure(value)
    return re.sub(r"0x[0-9a-f]+", "", repr(value))


def _code(function: Any) -> str:
    """A function's name with its code and constants; for other callables their class's."""
    if isinstance(function, partial):
        arguments = {str(i): value for i, value in enumerate(function.args)} | function.keywords
        return f"{_code(function.func)} {[(k, _setting(v)) for k, v in arguments.items()]}"
    code = getattr(function, "__code__", getattr(type(function), "__code__", None))
    name = getattr(function, "__qualname__", type(function).__qualname__)
    if code is None:
        return str(name)
    constants = []
    for value in code.co_consts:
        if isinstance(value, frozenset):  # its order differs from process to process
            value = sorted(map(repr, value))
        inner = getattr(value, "co_code", None)
        constants.append(repr(value) if inner is None else inner.hex())
    return f"{name} {code.co_code.hex()} {code.co_names} {constants}"


def select_parameters(model: nn.Module, pattern: Pattern | None, norm: str) -> dict[str, Tensor]:
    """The parameters that make up the vector, in the model's order."""
    everything = dict(model.named_parameters())
    require(bool(everything), "model", "have parameters", f"{type(model).__name__} without any")
    fixed: set[str] = set()
    for name, layer in model.named_modules() if norm == "frozen" else ():
        if isinstance(layer, NORMS):
            fixed.update(key for key, _ in layer.named_parameters(name, recurse=False))
    asked = set(everything)
    if pattern is not None:
        match = matcher(pattern)
        asked = {first for name, first in first_names(model).items() if match(name)}
        some = ", ".join(list(everything)[:6]) + (", …" if len(everything) > 6 else "")
        require(bool(asked), "parameters", f"match at least one of {some}", repr(pattern))
    asked -= fixed
    chosen = {k: part for k, part in everything.items() if part.requires_grad and k in asked}
    if not chosen:
        raise ValueError(
            "parameters must select at least one parameter that requires a gradient, got only"
            " frozen, integer or excluded ones; call requires_grad_(True) on those to measure"
        )
    for name, part in chosen.items():
        if not part.is_floating_point() or nn.parameter.is_lazy(part):
            raise ValueError(
                f"parameter {name!r} must be real floating point and initialised, got"
                f" {type(part).__name__}, {part.dtype}; run a lazy model once, or leave it out with"
                " parameters="
            )
    return dict(chosen)


def device_of(tensors: Mapping[str, Tensor], asked: torch.device | str | None) -> torch.device:
    """The device asked for, or the one that all the tensors are on."""
    devices = {tensor.device for tensor in tensors.values()}
    expected, real = "be on one device, with data", all(each.type != "meta" for each in devices)
    cure = "fill it: model.to_empty(device='cpu') and load_state_dict"
    require(real, "model", expected, "meta, where parameters have shapes alone", cure)
    if asked is None:
        places = ", ".join(sorted(map(str, devices)))
        require(len(devices) == 1, "model", expected, places, "pass device=")
        return devices.pop()
    real = not isinstance(asked, str | torch.device) or str(asked) != "meta"
    got, cure = "'meta', which has shapes alone", 'use "cpu" or "cuda"'
    require(real, "device", "be one that computes", got, cure)
    try:
        torch.empty(0, device=asked)
    except (RuntimeError, AssertionError, TypeError) as error:
        why = str(error).partition(".")[0].partition(" at start of ")[0]
        why = f"torch knows no device {asked!r}" if "Expected one of" in why else why
        other = "cuda" if torch.cuda.is_available() else "cpu"
        cure = f'use "{other}" ({why})'
        raise ValueError(message("device", "be available", repr(asked), cure)) from error
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
