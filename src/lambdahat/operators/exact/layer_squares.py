"""The calls of a model's layers, the signals that are pulled back to them, and Σ_ik c_ik (J_iᵀ
s_ik)² of a layer's parameters from its inputs and these signals.

All signals of a sample go back at once, with a leading dimension, node by node through the autograd
graph: for a small network on a GPU a backward pass for each would take longer to start than to
compute. What the few kinds of node in usual networks do to a signal is written down here; other
nodes are called through vmap, and where that fails the engine takes one signal after the other. The
checks of the closed forms compare all of it with the engine.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import vmap

from lambdahat._core.device import Pullback
from lambdahat.operators.linearise import CONVOLUTIONS, Leaves, kind_of, nodes_below, windows
from lambdahat.problem import Problem
from lambdahat.problem.batches import Batch
from lambdahat.problem.evaluators import run_layer

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


@dataclass(frozen=True)
class Trusted:
    """The parameters whose layer form was verified, and the numbers all layers give a sample.

    ``together``: whether it was with the signals that went back together.
    """

    names: set[str]
    width: int
    together: bool = True


Calls = dict[str, list[LayerCall]]


@dataclass(frozen=True)
class Part:
    """Some of the data after a forward pass: the output with its graph, and the uses of layers.

    ``once`` are the only uses of layers that put the batch first, ``layered`` the parameters that
    enter by them alone, ``nodes`` those of the graph, upwards. ``share`` is the weight of a sample,
    ``room`` the bytes that signals may take. ``together``: whether they go back so; ``plain``:
    whether the model is a chain, whose graph shows all that it does, of nodes with rules here.
    """

    batch: Batch
    output: Any
    calls: Calls
    once: dict[str, LayerCall]
    layered: set[str]
    nodes: list[Any]
    plain: bool
    together: bool
    share: float
    room: int

    @property
    def layers(self) -> dict[str, LayerCall]:
        """The uses of layers whose parameters enter by them alone."""
        owners = {owner(name) for name in self.layered}
        return {prefix: call for prefix, call in self.once.items() if prefix in owners}

    @property
    def straight(self) -> bool:
        """Whether it is known from the kinds of layers that the output is piecewise linear."""
        return self.plain and SMOOTH.isdisjoint(map(kind_of, self.nodes))


# for the signals of some factors, and again for what is formed of them at a layer, …
SIGNAL_BYTES = 512 << 20
FORMED_BYTES = 16 << 20  # … on a CPU no more than a cache should hold
# and of the signals that come back for some samples together
CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 1 << 29}


def part_bytes(device: torch.device) -> int:
    """Bytes of the signals that come back for some samples together."""
    return CHUNK_BYTES.get(device.type, CHUNK_BYTES["cpu"])


def trace_layers(
    problem: Problem,
    leaves: Leaves,
    batch: Batch,
    trusted: Trusted | None = None,
    share: float = 1.0,
    room: int | None = None,
) -> Part:
    """A forward pass for a batch; with no layers but those ``trusted``, if they are known."""
    chain = problem.chain(batch)
    if chain is None:
        output, calls = _run_model(problem, leaves, batch)
    else:
        output, calls = _run_chain(*chain, problem.tensors(leaves), leaves)
    nodes = list(nodes_below([getattr(output, "grad_fn", None)]))
    # how often each leaf enters the graph of the output, by its id
    below = (child for node in nodes for child, _ in node.next_functions)
    uses = Counter(id(node.variable) for node in below if kind_of(node) == "AccumulateGrad")
    once, names = {}, set[str]()
    for prefix, found in calls.items():
        layer, entered = found[0].layer, found[0].entered
        # a layer may take one sample without a dimension for the batch
        own = len(layer.kernel_size) + 1 if isinstance(layer, CONVOLUTIONS) else 1
        if len(found) == 1 and entered.ndim > own and entered.shape[0] == batch.size:
            once[prefix] = found[0]
            names |= names_in(prefix, layer, leaves)
    names = names if trusted is None else names & trusted.names
    layered = {name for name in names if uses[id(leaves[name])] == 1}
    plain = chain is not None and RULED.issuperset(map(kind_of, nodes))
    kinds = plain, trusted is None or trusted.together
    sizes = share, SIGNAL_BYTES if room is None else room
    return Part(batch, output, calls, once, layered, nodes, *kinds, *sizes)


def _run_model(problem: Problem, leaves: Leaves, batch: Batch) -> tuple[Any, Calls]:
    """The output for a batch, and the uses of layers that have a closed form, by layer."""
    calls: Calls = {}

    def note(prefix: str, layer: nn.Module, args: Any, kwargs: Any, left: Tensor) -> None:
        own, given = layer._parameters | layer._buffers, args[0] if args else kwargs["input"]
        _note(calls, prefix, layer, own, given, left)

    handles = [
        # before the user's hooks, which may change what the layer gives
        layer.register_forward_hook(partial(note, prefix), with_kwargs=True, prepend=True)
        for prefix, layer in (() if problem.model is None else problem.model.named_modules())
        if _is_known(prefix, layer, leaves)
    ]
    try:
        return problem.output(leaves, batch), calls
    finally:
        for handle in handles:
            handle.remove()


def _run_chain(
    layers: Sequence[tuple[str, nn.Module]], given: Tensor, tensors: Leaves, leaves: Leaves
) -> tuple[Tensor, Calls]:
    """The same of a chain, layer by layer: torch's calls of modules take longer than small ones."""
    calls: Calls = {}
    for prefix, layer in layers:
        names = {key: full_name(prefix, key) for key in (*layer._parameters, *layer._buffers)}
        own = {key: tensors[name] for key, name in names.items() if name in tensors}
        left = run_layer(layer, own, given)
        if _is_known(prefix, layer, leaves):
            _note(calls, prefix, layer, own, given, left)
        given = left
    return given, calls


def _is_known(prefix: str, layer: nn.Module, leaves: Leaves) -> bool:
    """Linear layers with constant weights too: what bends above them reaches those below."""
    linear = type(layer) is nn.Linear
    return linear or (type(layer) in KNOWN and bool(names_in(prefix, layer, leaves)))


def _note(
    calls: Calls, prefix: str, layer: nn.Module, own: Any, given: Tensor, left: Tensor
) -> None:
    if not left.requires_grad:
        return
    # none of its own where an old-style hook computes the weight, as spectral_norm's
    entered, slope = given.detach(), own.get("weight") if isinstance(layer, nn.Linear) else None
    if isinstance(layer, BATCH_NORMS):
        # x̂ = (x − mean)/√(var + ε) by the running statistics in use, and the slope of γ·x̂ + β in x
        spread, weight = [1, -1] + [1] * (entered.ndim - 2), own.get("weight")
        root = (own["running_var"].to(entered) + layer.eps).sqrt()
        slope = root.reciprocal() if weight is None else weight.detach() / root
        mean = own["running_mean"].to(entered)
        entered = (entered - mean.reshape(spread)) / root.reshape(spread)
    # edges, not tensors: a later in-place operation changes what a tensor is
    came = get_gradient_edge(given) if given.requires_grad else None
    call = LayerCall(layer, entered, get_gradient_edge(left), left.numel(), came, slope)
    calls.setdefault(prefix, []).append(call)


Signals = list[Tensor]  # (K', B, …), of K signals in all

# Autograd nodes by name. One function of each element, that has a second derivative:
_SMOOTH = """
    Acos Acosh Asin Asinh Atan Atanh Celu Cos Cosh Elu Erf Erfc Exp Exp2 Expm1 Gelu Hardswish Log
    Log10 Log1P Log2 LogSigmoid Logit Mish Pow Reciprocal Rsqrt Sigmoid Silu Sin Sinc Sinh
    Softplus Sqrt Tan Tanh"""
# The output depends, element by element, on one element of the only input that is no constant:
_PIECEWISE = """
    Abs Add Clamp ClampMax ClampMin Div Hardshrink Hardtanh LeakyRelu MaskedFill Mul Neg Relu
    Rsub Softshrink Sub Threshold"""
# They do to several signals at once what they do to one:
_BROADCAST = "Add Alias Clone Div LeakyRelu Mul Neg Relu Rsub Sigmoid Sub Tanh Threshold ToCopy"

SMOOTH, BROADCAST = frozenset(_SMOOTH.split()), frozenset(_BROADCAST.split())
ELEMENTWISE = SMOOTH | frozenset(_PIECEWISE.split())


def pull_signals(
    tops: Sequence[Any],
    edges: Sequence[GradientEdge],
    seeds: Sequence[Tensor],
    nodes: Sequence[Any] | None,
) -> list[Signals | None]:
    """What comes back to each edge for K seeds (K, B, …) at the tops; None where nothing does.

    Together through the ``nodes`` of the graph, upwards, or one after the other without.
    """
    found: list[Tensor | None] | None = None
    # a user's backward may raise anything at several signals; what is the user's own error, not
    # ours, the engine raises again
    with suppress(Exception):
        if nodes is not None:
            found = _pull_together(tops, edges, seeds, nodes)
    if found is not None:
        return [None if part is None else [part] for part in found]
    pull = Pullback(tops)
    options = {"retain_graph": True, "allow_unused": True}
    each = [pull(edges, seed, **options) for seed in zip(*seeds, strict=True)]
    columns = zip(*each, strict=True)
    return [None if part[0] is None else [z.unsqueeze(0) for z in part] for part in columns]


@torch.no_grad()
def _pull_together(
    tops: Sequence[Any],
    edges: Sequence[GradientEdge],
    seeds: Sequence[Tensor],
    nodes: Sequence[Any],
) -> list[Tensor | None]:
    """All signals, node by node; raises where a node takes but one."""
    above = {edge.node for edge in edges}  # the nodes from which signals reach an edge
    for node in nodes:
        for child, _ in node.next_functions:
            if child in above:
                above.add(node)
                break
    signals: dict[Any, dict[int, Tensor]] = {}  # by node and the number of its output

    def send(place: tuple[Any, int], signal: Tensor) -> None:
        node, number = place
        own = signals.setdefault(node, {})
        own[number] = own[number] + signal if number in own else signal

    for top, seed in zip(tops, seeds, strict=True):
        node = top.grad_fn if isinstance(top, Tensor) else top.node
        send((node, top.output_nr), seed)
    found, ends = dict[Any, dict[int, Tensor]](), {edge.node for edge in edges}
    for node in reversed(nodes):
        if node not in above or node not in signals:
            continue
        deltas, inputs = signals.pop(node), node.next_functions
        if node in ends:
            found[node] = deltas
        live = [i for i, (child, _) in enumerate(inputs) if child in above]
        if live:
            for i, signal in zip(live, _through(node, deltas, live), strict=True):
                if signal is not None:
                    send(inputs[i], signal)
    return [found.get(edge.node, {}).get(edge.output_nr) for edge in edges]


def _through(node: Any, deltas: dict[int, Tensor], live: Sequence[int]) -> list[Tensor | None]:
    """The signals (K, …) that a node passes on to its inputs ``live`` from those at its outputs."""
    kind, delta, inputs = kind_of(node), deltas.get(0), node.next_functions
    shapes = [inputs[i][0]._input_metadata[inputs[i][1]].shape for i in live]
    found: list[Tensor | None]
    if delta is None or len(deltas) > 1:
        found = _by_vmap(node, deltas, live)
    elif kind in RULES and live == [RULES[kind][0]]:
        found = [RULES[kind][1](node, delta, shapes[0])]
    elif kind in BROADCAST:
        back = node(delta)
        found = [back[i] for i in live] if isinstance(back, tuple) else [back]
    elif kind in ELEMENTWISE and len(inputs) == 1:
        found = [delta * node(torch.ones_like(delta[0]))]
    else:
        found = _by_vmap(node, deltas, live)
    pairs = zip(found, shapes, strict=True)
    return [None if signals is None else _sum_to(signals, shape) for signals, shape in pairs]


def _sum_to(signals: Tensor, shape: torch.Size) -> Tensor:
    """The sum over what was broadcast from ``shape``, which nodes leave to the engine."""
    if signals.shape[1:] == shape:
        return signals
    spread = [1] * (signals.ndim - 1 - len(shape))
    return signals.sum_to_size(len(signals), *spread, *shape).reshape(-1, *shape)


def _by_vmap(node: Any, deltas: dict[int, Tensor], live: Sequence[int]) -> list[Tensor | None]:
    """By the rules that torch has for the node's operations, not all of which are right."""
    there: list[bool] = []

    def back(*some: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(deltas, some, strict=True))
        found = node(*(given.get(i) for i in range(len(node._input_metadata))))
        parts = [found[i] for i in live] if isinstance(found, tuple) else [found]
        there[:] = [part is not None for part in parts]
        return tuple(part for part in parts if part is not None)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        parts = iter(vmap(back)(*deltas.values()))
    return [next(parts) if here else None for here in there]


def _matrix(node: Any, delta: Tensor, shape: torch.Size) -> Tensor:
    signals: Tensor = delta @ node._saved_mat2.mT
    return signals if getattr(node, "_saved_alpha", 1) == 1 else signals * node._saved_alpha


def _convolution(node: Any, delta: Tensor, shape: torch.Size) -> Tensor:
    # of the input no more than the size is read
    like = delta.new_empty(1).expand(len(delta) * shape[0], *shape[1:])
    steps = node._saved_stride, node._saved_padding, node._saved_dilation
    shifts = node._saved_transposed, node._saved_output_padding, node._saved_groups
    found = torch.ops.aten.convolution_backward(
        delta.flatten(0, 1), like, node._saved_weight, None, *steps, *shifts, [True, False, False]
    )
    return found[0].unflatten(0, (len(delta), -1))  # type: ignore[no-any-return]


def _max_pool(node: Any, delta: Tensor, shape: torch.Size) -> Tensor:
    dims = len(node._saved_kernel_size)
    places = node._saved_result1.flatten(-dims).expand(len(delta), *[-1] * (len(shape) - dims + 1))
    found = delta.new_zeros(len(delta), *shape).flatten(-dims)
    return found.scatter_add_(-1, places, delta.flatten(-dims)).reshape(-1, *shape)


def _reshape(node: Any, delta: Tensor, shape: torch.Size) -> Tensor:
    return delta.reshape(len(delta), *shape)


# the input whose signal they give, and the rule for a signal (K, …) and the shape of that input
RULES: dict[str, tuple[int, Callable[[Any, Tensor, torch.Size], Tensor]]] = {
    "Addmm": (1, _matrix),
    "Mm": (0, _matrix),
    "Convolution": (0, _convolution),
    "MaxPool2DWithIndices": (0, _max_pool),
    "MaxPool3DWithIndices": (0, _max_pool),
    **dict.fromkeys(("ReshapeAlias", "Squeeze", "UnsafeView", "Unsqueeze", "View"), (0, _reshape)),
}

# not vmap: what has rules here, and what the weights of layers go through
RULED = frozenset({*RULES, "AccumulateGrad", "T"}) | BROADCAST | ELEMENTWISE

Squares = dict[str, Tensor]
# of each parameter: "diagonal", as the parameter, summed over signals and samples; "samples", (B,),
# summed over signals and the parameter; "rounds", (K, B), over the parameter alone
Form = Literal["diagonal", "samples", "rounds"]


def pull_squares(
    tops: Sequence[Any],
    seeds: Sequence[Tensor],
    signs: Tensor | None,
    part: Part,
    form: Form,
    below: Container[str] | None = None,
) -> Squares:
    """The squares of the parameters ``layered``, for K seeds (K, B, …) at places above.

    ``signs`` (K, B) are 1 where they are not given; ``below`` leaves out other layers. Signals take
    half the room at most, and what is formed of them as much as the room again.
    """
    calls = {k: call for k, call in part.layers.items() if below is None or k in below}
    edges, squares = [call.left for call in calls.values()], Squares()
    nodes = part.nodes if part.together else None
    # as many signals together as the room holds at the input and the output of all layers: a pass
    # keeps those at the outputs, and those of two layers at a time besides
    row = sum(max(call.entered.numel(), call.width) for call in calls.values())
    step = max(1, part.room // max(1, 2 * row * seeds[0].element_size()))
    for start in range(0, len(seeds[0]), step):
        some = slice(start, start + step)
        signed = None if signs is None else signs[some]
        back = pull_signals(tops, edges, [seed[some] for seed in seeds], nodes)
        found: Squares = {}
        for (prefix, call), deltas in zip(calls.items(), back, strict=True):
            if deltas is None:
                continue
            own = _of_layer(call, deltas, signed, form == "diagonal", part.room)
            names = ((full_name(prefix, key), square) for key, square in own.items())
            found |= {name: square for name, square in names if name in part.layered}
        if form != "diagonal" and found:  # of all parameters at once
            whole = torch.stack(list(found.values())).square_()
            whole = whole if signed is None else whole.mul_(signed)
            whole = whole if form == "rounds" else whole.sum(dim=1)
            found = dict(zip(found, whole.unbind(), strict=True))
        squares = _concatenate(squares, found, 0) if form == "rounds" else add(squares, found)
    return squares


def add(total: Squares, more: Squares) -> Squares:
    """The sums of squares by parameter."""
    return total | {k: total[k] + square if k in total else square for k, square in more.items()}


def _concatenate(first: Squares, second: Squares, dim: int) -> Squares:
    """Of the same parameters, or of none so far."""
    if not first:
        return second
    return {name: torch.cat([square, second[name]], dim=dim) for name, square in first.items()}


def gradients(call: LayerCall, delta: Tensor) -> Squares:
    """Σ_i J_iᵀδ_i of a layer's parameters by their name in it, for a signal δ (B, …)."""
    layer, a, d = call.layer, _wide(call.entered), _wide(delta)
    if isinstance(layer, nn.Linear):
        rows = d.flatten(0, -2)
        return {"weight": rows.T @ a.flatten(0, -2), "bias": rows.sum(dim=0)}
    others = [0, *range(2, d.ndim)]
    if not isinstance(layer, CONVOLUTIONS):
        return {"weight": (d * a).sum(dim=others), "bias": d.sum(dim=others)}
    seen = patches(layer, a).unflatten(1, (layer.groups, -1))
    weight = torch.einsum("bgol,bgil->goi", d.flatten(2).unflatten(1, (layer.groups, -1)), seen)
    return {"weight": weight.reshape(layer.weight.shape), "bias": d.sum(dim=others)}


def _wide(tensor: Tensor) -> Tensor:
    """In single precision at least."""
    return tensor.float() if tensor.element_size() < torch.float32.itemsize else tensor


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


def _of_layer(
    call: LayerCall, deltas: Signals, signs: Tensor | None, diagonal: bool, room: int
) -> Squares:
    """The squares of one layer, summed over samples and K signals (B, …), or ``diagonal`` not,
    the norms (K, B) of its parameters' gradients; in chunks, and in single precision at least.
    """
    size, layer, shared = call.entered.shape[0], call.layer, None
    count = sum(delta.shape[0] for delta in deltas)
    numbers = 2 * count * call.width // max(1, size)
    if isinstance(layer, (nn.Linear, *CONVOLUTIONS)):  # not batch-norm
        groups, (outputs, *sizes) = getattr(layer, "groups", 1), layer.weight.shape
        length, inputs = call.width // max(1, size * outputs), math.prod(sizes)
        outputs //= groups
        by_positions = length * (outputs + inputs) <= outputs * inputs
        kinds = length == groups == 1, by_positions
        shared = _Shared(groups, outputs, inputs, length, *kinds)
        # the numbers that all signals of one sample take
        numbers = groups * length * (count * outputs + 2 * (inputs + 1))
        if not shared.single and by_positions and not diagonal:
            numbers += groups * (count + 1) * length**2
        elif not shared.single:
            numbers += groups * count * outputs * (inputs + 1)
    room = room if call.entered.is_cuda else min(room, FORMED_BYTES)
    item = max(call.entered.element_size(), torch.float32.itemsize)
    rows = max(1, room // max(1, numbers * item))
    if rows >= size:
        return _of_rows(layer, call.entered, deltas, signs, shared, diagonal)
    total: Squares = {}
    for start in range(0, size, rows):
        some = slice(start, start + rows)
        given, signed = (
            [delta[:, some] for delta in deltas],
            signs if signs is None else signs[:, some],
        )
        found = _of_rows(layer, call.entered[some], given, signed, shared, diagonal)
        total = add(total, found) if diagonal else _concatenate(total, found, 1)
    return total


def _of_rows(
    layer: nn.Module,
    entered: Tensor,
    deltas: Signals,
    signs: Tensor | None,
    shared: _Shared | None,
    diagonal: bool,
) -> Squares:
    """The same of some samples together."""
    a, d = _wide(entered), _wide(deltas[0] if len(deltas) == 1 else torch.cat(deltas))
    signs = None if signs is None else signs.to(d.dtype)
    if shared is None:
        return _of_norm(a, d, signs, diagonal)
    if isinstance(layer, nn.Linear):
        if shared.single:
            return _linear_squares(a.flatten(1), d.flatten(2), signs, diagonal)
        a, d = a.flatten(1, -2).mT, d.flatten(2, -2).mT
    else:
        a, d = patches(layer, a), d.flatten(3)
    if shared.single:
        squares = _linear_squares(a.squeeze(2), d.squeeze(3), signs, diagonal)
    elif shared.by_positions and not diagonal:
        return _position_norms(a, d, shared)
    else:
        squares = _shared_squares(a, d, signs, shared, diagonal)
    if diagonal:
        squares["weight"] = squares["weight"].reshape(layer.weight.shape)  # type: ignore[arg-type]
    return squares


def _linear_squares(a: Tensor, d: Tensor, signs: Tensor | None, diagonal: bool) -> Squares:
    """One position a sample: (δaᵀ)² = δ²(a²)ᵀ."""
    if diagonal:
        squares = d.square()
        squares = squares if signs is None else squares.mul_(signs.unsqueeze(2))
        return one_position(a, squares.sum(dim=0), True)
    norms = torch.linalg.vector_norm(d, dim=2)
    return {"weight": norms * torch.linalg.vector_norm(a, dim=1), "bias": norms}


def one_position(entered: Tensor, curvature: Tensor, diagonal: bool) -> Squares:
    """The squares of a linear layer, ∂²ℓ_i/∂W_oj² = a_j²·``curvature``_io, (B, O); those of each
    sample, (B,), if not the ``diagonal``.
    """
    if diagonal:
        return {"weight": curvature.T @ entered.square(), "bias": curvature.sum(dim=0)}
    sizes = curvature.sum(dim=1)
    return {"weight": sizes * entered.square().sum(dim=1), "bias": sizes}


def _shared_squares(
    a: Tensor, d: Tensor, signs: Tensor | None, shared: _Shared, diagonal: bool
) -> Squares:
    """A weight shared over L positions: G_ik = Σ_l δ_l a_lᵀ, a (B, g·I, L), signals (K, B, g·O, L).

    A row of ones beside a gives the bias's gradient in the same product.
    """
    count, size, groups = len(d), len(a), shared.groups
    a = F.pad(a.reshape(size * groups, -1, shared.length), (0, 0, 0, 1), value=1.0)
    d = d.reshape(count, size * groups, shared.outputs, shared.length).transpose(0, 1)
    product = torch.bmm(d.flatten(1, 2), a.transpose(1, 2))
    per_sample = product.reshape(size, groups, count, shared.outputs, -1)
    if diagonal:
        squares = per_sample.square_()
        squares = squares if signs is None else squares.mul_(signs.T[:, None, :, None, None])
        squares = squares.sum(dim=(0, 2))
        return {"weight": squares[..., :-1], "bias": squares[..., -1].flatten()}
    weight = torch.linalg.vector_norm(per_sample[..., :-1], dim=(1, 3, 4))
    return {"weight": weight.T, "bias": torch.linalg.vector_norm(per_sample[..., -1], dim=(1, 3)).T}


def _position_norms(a: Tensor, d: Tensor, shared: _Shared) -> Squares:
    """The norms (K, B) without the gradients: ‖Σ_l δ_l a_lᵀ‖² = Σ_lm (δ_l·δ_m)(a_l·a_m).

    The rounding is that of Σ_lm |δ_l·δ_m||a_l·a_m|, which is larger where positions cancel.
    """
    count, size, pairs = len(d), len(a) * shared.groups, shared.length**2
    d = d.reshape(count * size, shared.outputs, shared.length)
    a = a.reshape(size, shared.inputs, shared.length)
    ours = torch.bmm(d.mT, d).reshape(count, size, pairs)
    theirs = torch.bmm(a.mT, a).reshape(size, pairs)
    sizes = torch.einsum("knp,np->kn", ours, theirs).reshape(count, -1, shared.groups).sum(dim=2)
    sums = d.sum(dim=2).reshape(count, size // shared.groups, -1)
    return {"weight": sizes.clamp_min_(0.0).sqrt_(), "bias": torch.linalg.vector_norm(sums, dim=2)}


def _of_norm(scaled: Tensor, d: Tensor, signs: Tensor | None, diagonal: bool) -> Squares:
    """Batch-norm with running statistics, z = γ·x̂ + β."""
    products = {"weight": d * scaled, "bias": d}
    sums = {key: part.reshape(*d.shape[:3], -1).sum(dim=3) for key, part in products.items()}
    if not diagonal:
        return {key: torch.linalg.vector_norm(part, dim=2) for key, part in sums.items()}
    found = {}
    for key, part in sums.items():
        squares = part.square() if signs is None else part.square() * signs.unsqueeze(2)
        found[key] = squares.sum(dim=(0, 1))
    return found


def patches(layer: Any, entered: Tensor) -> Tensor:
    """What each output position of a convolution sees: (B, C·k, L), channels outermost."""
    dims = len(layer.kernel_size)
    order = [0, 1, *range(2 + dims, 2 + 2 * dims), *range(2, 2 + dims)]
    moved = windows(layer, entered).permute(order)
    return moved.reshape(len(entered), entered.shape[1] * math.prod(layer.kernel_size), -1)
