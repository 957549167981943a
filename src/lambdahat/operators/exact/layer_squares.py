"""The calls of a model's layers, and Σ_ik c_ik (J_iᵀ s_ik)² of a layer's parameters from its inputs
and the signals that are pulled back to its outputs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import vmap

from lambdahat._core.pullback import Pullback
from lambdahat.operators.linearise import CONVOLUTIONS, Leaves, windows
from lambdahat.problem import Problem
from lambdahat.problem.batches import Batch

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
KNOWN = (nn.Linear, *CONVOLUTIONS, *BATCH_NORMS)


@dataclass(frozen=True)
class LayerCall:
    """One use of a layer: its input (normalised, for batch-norm), and the edge that its output left
    by.

    ``came`` is the edge of the input, None if constant. ``slope`` is W (O, I) of a linear layer and
    γ/√(var + ε) (C,) of batch-norm, None of others.
    """

    layer: nn.Module
    entered: Tensor
    left: GradientEdge
    width: int
    came: GradientEdge | None
    slope: Tensor | None


Calls = dict[str, list[LayerCall]]


def record_layers(problem: Problem, leaves: Leaves, batch: Batch) -> tuple[Tensor, Calls]:
    """The output for a batch, and the uses of layers that have a closed form, by layer.

    Linear layers with constant weights are included: what bends above them reaches those below.
    """
    calls: Calls = {}

    def note(prefix: str, layer: nn.Module, args: Any, kwargs: Any, left: Tensor) -> None:
        if not left.requires_grad:
            return
        given = args[0] if args else kwargs["input"]
        entered, slope = given.detach(), None
        if isinstance(layer, nn.Linear):
            slope = layer.weight.detach()
        if isinstance(layer, BATCH_NORMS):
            entered, slope = _standardise(layer, entered)
        # edges, not tensors: a later in-place operation changes what a tensor is
        came = get_gradient_edge(given) if given.requires_grad else None
        edge = get_gradient_edge(left)
        call = LayerCall(layer, entered, edge, left.numel(), came, slope)
        calls.setdefault(prefix, []).append(call)

    handles = [
        # before the user's hooks, which may change what the layer gives
        layer.register_forward_hook(partial(note, prefix), with_kwargs=True, prepend=True)
        for prefix, layer in (() if problem.model is None else problem.model.named_modules())
        if type(layer) in KNOWN and (type(layer) is nn.Linear or names_in(prefix, layer, leaves))
    ]
    try:
        return problem.output(leaves, batch), calls
    finally:
        for handle in handles:
            handle.remove()


def names_in(prefix: str, layer: nn.Module, leaves: Leaves) -> set[str]:
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


def _standardise(layer: nn.Module, entered: Tensor) -> tuple[Tensor, Tensor]:
    """x̂ = (x − mean)/√(var + ε) by the running statistics in use, and the slope of γ·x̂ + β in x."""
    mean, variance = layer.running_mean, layer.running_var
    assert isinstance(mean, Tensor)
    assert isinstance(variance, Tensor)
    spread = [1, -1] + [1] * (entered.ndim - 2)
    root = (variance.to(entered) + layer.eps).sqrt()  # type: ignore[operator]
    weight = layer.weight
    slope = weight.detach() / root if isinstance(weight, Tensor) else root.reciprocal()
    return (entered - mean.to(entered).reshape(spread)) / root.reshape(spread), slope


# for the signals of some factors, and again for what is formed of them at a layer, …
SIGNAL_BYTES = 512 << 20
FORMED_BYTES = 16 << 20  # … on a CPU no more than a cache should hold
# numbers that come back for all seeds, up to which a CPU takes one pass for all as well
FEW_SIGNALS = 1 << 18

Squares = dict[str, Tensor]
# "diagonal": as the parameter, summed over signals and samples; "sums": one number; "samples":
# (K, B), summed over the parameter alone
Form = Literal["diagonal", "sums", "samples"]
Deltas = Sequence[Tensor] | Tensor  # K signals (B, …), or one tensor (K, B, …)


def pull_squares(
    tops: Sequence[Any],
    seeds: Sequence[Tensor],
    signs: Tensor,
    calls: dict[str, LayerCall],
    form: Form,
    room: int | None = None,
) -> Squares:
    """The squares of the layers called, for K seeds (K, B, …) at places above and signs (K, B).

    By parameter, in the ``form`` asked for. Signals take ``room`` bytes at most, and what is formed
    of them as many again; ``SIGNAL_BYTES`` if not given.
    """
    squares: Squares = {}
    edges, width = [call.left for call in calls.values()], sum(c.width for c in calls.values())
    room = SIGNAL_BYTES if room is None else room
    # factors that go back in one pass: where launching kernels dominates
    together = len(signs) if seeds[0].is_cuda else FEW_SIGNALS // max(1, width)
    # as many factors together as keep their signals within the budget, at a layer's output and, on
    # the way there, at its input; half as many where one pass makes all of them, which holds those
    # of two layers at a time beside the ones that are kept
    row = sum(max(call.entered.numel(), call.width) for call in calls.values())
    row *= seeds[0].element_size()
    step = max(1, min(len(seeds[0]), room // max(1, row)))
    if 1 < step <= together:
        step = max(1, min(step, room // max(1, 2 * row)))
    for start in range(0, len(signs), step):
        part = slice(start, start + step)
        some = [seed[part] for seed in seeds]
        back: Sequence[Deltas | None] | None = None
        if 1 < len(some[0]) <= together:
            back = in_one_pass(tops, edges, some)
        if back is None:
            pull = Pullback(tops)
            columns = [
                pull(edges, seed, retain_graph=True, allow_unused=True)
                for seed in zip(*some, strict=True)
            ]
            back = [None if found[0] is None else found for found in zip(*columns, strict=True)]
        found: Squares = {}
        for (prefix, call), deltas in zip(calls.items(), back, strict=True):
            own = {} if deltas is None else _squares(call, deltas, signs[part], form, room)
            found |= {full_name(prefix, key): square for key, square in own.items()}
        if form == "samples":
            squares = _concatenate(squares, found, dim=0)
            continue
        if form == "sums" and found:  # of all parameters at once
            sums = torch.stack(list(found.values())).sum(dim=(1, 2))
            found = dict(zip(found, sums.unbind(), strict=True))
        add_squares(squares, found)
    return squares


def _concatenate(first: Squares, second: Squares, dim: int) -> Squares:
    """Of the same parameters, or of none so far."""
    if not first:
        return second
    return {name: torch.cat([square, second[name]], dim=dim) for name, square in first.items()}


def gradients(call: LayerCall, delta: Tensor) -> Squares:
    """Σ_i J_iᵀδ_i of a layer's parameters by their name in it, for a signal δ (B, …)."""
    wide = torch.promote_types(call.entered.dtype, torch.float32)
    layer, a, d = call.layer, call.entered.to(wide), delta.to(wide)
    if isinstance(layer, nn.Linear):
        rows = d.flatten(0, -2)
        return {"weight": rows.T @ a.flatten(0, -2), "bias": rows.sum(dim=0)}
    others = [0, *range(2, d.ndim)]
    if not isinstance(layer, CONVOLUTIONS):
        return {"weight": (d * a).sum(dim=others), "bias": d.sum(dim=others)}
    seen = patches(layer, a).unflatten(1, (layer.groups, -1))
    weight = torch.einsum("bgol,bgil->goi", d.flatten(2).unflatten(1, (layer.groups, -1)), seen)
    return {"weight": weight.reshape(layer.weight.shape), "bias": d.sum(dim=others)}


def add_squares(total: Squares, more: Squares) -> None:
    """Into the total, in place."""
    for name, square in more.items():
        total[name] = total[name] + square if name in total else square


def in_one_pass(
    tops: Sequence[Any], inputs: Sequence[Any], seeds: Sequence[Tensor]
) -> list[Tensor | None] | None:
    """What comes back to each input for K seeds (K, …) at the tops; None if vmap fails.

    ``is_grads_batched`` has no rules for convolutions and pooling and would loop over the seeds.
    """
    below: list[bool] = []
    pull = Pullback(tops)

    def back(*seed: Tensor) -> tuple[Tensor, ...]:
        found = pull(inputs, seed, retain_graph=True, allow_unused=True)
        below[:] = [part is not None for part in found]
        return tuple(part for part in found if part is not None)

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")
            found = iter(vmap(back)(*seeds))
    except Exception:
        # a user's backward or hook may raise anything at a batched tensor; what is the user's own
        # error, not ours, the pass that goes seed by seed raises again
        return None
    return [next(found) if there else None for there in below]


@dataclass(frozen=True)
class _Shared:
    """A weight of g groups of O outputs and I inputs that a sample uses at L positions.

    ``single``: whether the gradient is one outer product. ``by_positions``: whether L×L products of
    positions cost less than O×I gradients.
    """

    groups: int
    outputs: int
    inputs: int
    length: int
    single: bool
    by_positions: bool


def _squares(call: LayerCall, deltas: Deltas, signs: Tensor, form: Form, room: int) -> Squares:
    """The squares of one layer from its input (B, …), K signals (B, …) and signs (K, B), in chunks:
    the diagonal, or (K, B).

    Squares and their sums are taken in single precision at least.
    """
    diagonal = form == "diagonal"
    size, layer, shared = len(call.entered), call.layer, None
    wide = torch.promote_types(call.entered.dtype, torch.float32)
    numbers = 2 * len(signs) * call.width // max(1, size)
    if isinstance(layer, (nn.Linear, *CONVOLUTIONS)):  # not batch-norm
        groups, outputs = getattr(layer, "groups", 1), len(layer.weight)
        length, inputs = call.width // max(1, size * outputs), layer.weight[0].numel()
        outputs //= groups
        by_positions = length * (outputs + inputs) <= outputs * inputs
        kinds = length == groups == 1, by_positions
        shared = _Shared(groups, outputs, inputs, length, *kinds)
        # the numbers that all factors of one sample take
        count = len(signs)
        numbers = groups * length * (count * outputs + 2 * (inputs + 1))
        if not shared.single and by_positions and not diagonal:
            numbers += groups * (count + 1) * length**2
        elif not shared.single:
            numbers += groups * count * outputs * (inputs + 1)
    room = room if signs.is_cuda else min(room, FORMED_BYTES)
    rows = max(1, room // max(1, numbers * wide.itemsize))
    if rows >= size:
        return _rows_squares(layer, call.entered, deltas, signs, shared, diagonal)
    total: Squares = {}
    for start in range(0, size, rows):
        part = slice(start, start + rows)
        some = deltas[:, part] if isinstance(deltas, Tensor) else [delta[part] for delta in deltas]
        found = _rows_squares(layer, call.entered[part], some, signs[:, part], shared, diagonal)
        if diagonal:
            add_squares(total, found)
        else:
            total = _concatenate(total, found, dim=1)
    return total


def _rows_squares(
    layer: nn.Module,
    entered: Tensor,
    deltas: Deltas,
    signs: Tensor,
    shared: _Shared | None,
    diagonal: bool,
) -> Squares:
    """Of some samples together."""
    wide, linear = torch.promote_types(entered.dtype, torch.float32), isinstance(layer, nn.Linear)
    a, signs = entered.to(wide), signs.to(wide)
    ds = _map_signals(deltas, lambda delta, _: delta.to(wide))
    if shared is None:
        stacked = ds if isinstance(ds, Tensor) else torch.stack(tuple(ds))
        return _norm_squares(a, stacked, signs, diagonal)
    if linear and shared.single:
        ds = _map_signals(ds, lambda delta, batch: delta.flatten(batch + 1))
        return _linear_squares(a.flatten(1), ds, signs, diagonal)
    if linear:
        a = a.flatten(1, -2).transpose(1, 2)
        ds = _map_signals(ds, lambda delta, batch: delta.flatten(batch + 1, -2).transpose(-1, -2))
    else:
        a = patches(layer, a)
        ds = _map_signals(ds, lambda delta, batch: delta.flatten(batch + 2))
    if shared.single:
        ds = _map_signals(ds, lambda delta, _: delta.squeeze(-1))
        squares = _linear_squares(a.squeeze(2), ds, signs, diagonal)
    elif shared.by_positions and not diagonal:
        return _position_squares(a, ds, signs, shared)
    else:
        squares = _shared_squares(a, ds, signs, shared, diagonal)
    if diagonal:
        squares["weight"] = squares["weight"].reshape(layer.weight.shape)  # type: ignore[arg-type]
    return squares


def _map_signals(deltas: Deltas, change: Callable[[Tensor, int], Tensor]) -> Deltas:
    """``change(signals, dimension of the batch)`` of all."""
    if isinstance(deltas, Tensor):
        return change(deltas, 1)
    return [change(delta, 0) for delta in deltas]


def _linear_squares(entered: Tensor, deltas: Deltas, signs: Tensor, diagonal: bool) -> Squares:
    """One position a sample: (δaᵀ)² = δ²(a²)ᵀ."""
    if diagonal and isinstance(deltas, Tensor):
        return one_position(entered, deltas.square().mul_(signs.unsqueeze(2)).sum(dim=0), True)
    if diagonal:
        each = (d.square().mul_(sign.unsqueeze(1)) for d, sign in zip(deltas, signs, strict=True))
        return one_position(entered, reduce(Tensor.add_, each), True)
    lengths = _map_signals(deltas, lambda d, batch: torch.linalg.vector_norm(d, dim=batch + 1))
    stacked = lengths if isinstance(lengths, Tensor) else torch.stack(list(lengths))
    sizes = stacked.square() * signs
    return {"weight": sizes * torch.linalg.vector_norm(entered, dim=1).square(), "bias": sizes}


def one_position(entered: Tensor, curvature: Tensor, diagonal: bool) -> Squares:
    """The squares of a linear layer, ∂²ℓ_i/∂W_oj² = a_j²·``curvature``_io, (B, O)."""
    if diagonal:
        return {"weight": curvature.T @ entered.square(), "bias": curvature.sum(dim=0)}
    sizes = curvature.sum(dim=1)
    return {
        "weight": sizes @ torch.linalg.vector_norm(entered, dim=1).square(),
        "bias": sizes.sum(),
    }


def _shared_squares(
    entered: Tensor, deltas: Deltas, signs: Tensor, shared: _Shared, diagonal: bool
) -> Squares:
    """A weight shared over L positions: G_ik = Σ_l δ_l a_lᵀ, a (B, g·I, L), K signals (B, g·O, L).

    A row of ones beside a gives the bias's gradient in the same product.
    """
    count, size, groups = len(deltas), len(entered), shared.groups
    a = F.pad(entered.reshape(size * groups, -1, shared.length), (0, 0, 0, 1), value=1.0)
    rows = size * groups, shared.outputs, shared.length
    if isinstance(deltas, Tensor):
        d = deltas.reshape(count, *rows).transpose(0, 1)
    else:
        d = torch.stack([delta.reshape(rows) for delta in deltas], dim=1)
    product = torch.bmm(d.flatten(1, 2), a.transpose(1, 2))
    per_sample = product.reshape(size, groups, count, shared.outputs, -1)
    if diagonal:
        squares = per_sample.square_().mul_(signs.T[:, None, :, None, None]).sum(dim=(0, 2))
        return {"weight": squares[..., :-1], "bias": squares[..., -1].flatten()}
    weight, bias = per_sample[..., :-1], per_sample[..., -1]
    sizes = torch.linalg.vector_norm(weight, dim=(3, 4)).square().sum(dim=1)
    offsets = torch.linalg.vector_norm(bias, dim=3).square().sum(dim=1)
    return {"weight": sizes.T * signs, "bias": offsets.T * signs}


def _position_squares(entered: Tensor, deltas: Deltas, signs: Tensor, shared: _Shared) -> Squares:
    """Their sizes (K, B) without the gradients: ‖Σ_l δ_l a_lᵀ‖² = Σ_lm (δ_l·δ_m)(a_l·a_m).

    The rounding is that of Σ_lm |δ_l·δ_m||a_l·a_m|, which is larger where positions cancel.
    """
    d = deltas if isinstance(deltas, Tensor) else torch.stack(tuple(deltas))
    count, size, pairs = len(d), len(entered) * shared.groups, shared.length**2
    d = d.reshape(count * size, shared.outputs, shared.length)
    a = entered.reshape(size, shared.inputs, shared.length)
    ours = torch.bmm(d.mT, d).reshape(count, size, pairs)
    theirs = torch.bmm(a.mT, a).reshape(size, pairs)
    sizes = torch.einsum("knp,np->kn", ours, theirs)
    offsets = torch.linalg.vector_norm(d.sum(dim=2), dim=1).square()
    weight, bias = (
        part.reshape(count, -1, shared.groups).sum(dim=2) * signs for part in (sizes, offsets)
    )
    return {"weight": weight, "bias": bias}


def _norm_squares(scaled: Tensor, delta: Tensor, signs: Tensor, diagonal: bool) -> Squares:
    """Batch-norm with running statistics, z = γ·x̂ + β."""
    form = "kbo,kb->o" if diagonal else "kbo,kb->kb"
    weight, bias = (
        torch.einsum(form, part.reshape(*delta.shape[:3], -1).sum(dim=3).square(), signs)
        for part in (delta * scaled, delta)
    )
    return {"weight": weight, "bias": bias}


def patches(layer: Any, entered: Tensor) -> Tensor:
    """What each output position of a convolution sees: (B, C·k, L), channels outermost."""
    dims = len(layer.kernel_size)
    order = [0, 1, *range(2 + dims, 2 + 2 * dims), *range(2, 2 + dims)]
    moved = windows(layer, entered).permute(order)
    return moved.reshape(len(entered), entered.shape[1] * math.prod(layer.kernel_size), -1)
