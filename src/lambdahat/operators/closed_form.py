"""Traces and diagonals of Gauss–Newton matrices in closed form, layer by layer.

With M_i = Σ_k c_ik s_ik s_ikᵀ at the output, tr (1/n) Σ_i J_iᵀM_iJ_i = (1/n) Σ_ik c_ik ‖J_iᵀ s_ik‖², and J_iᵀ s_ik is
the gradient of s_ikᵀ z_i: for a linear layer the outer product of the signal δ that comes back and the input a that
came in, so that its squared norm is ‖δ‖²‖a‖² and no per-sample gradient is formed. Convolutions and batch-norm in eval
mode have forms alike; any other parameter goes through per-sample gradients. All of it holds where samples do not mix,
in the model and in the loss; where they do, there are no factors.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.func import grad, vmap

from lambdahat._progress import report
from lambdahat._rng import generator
from lambdahat.batches import Batch, rows_of, take
from lambdahat.operators.linearise import graph_nodes, twice_differentiable
from lambdahat.operators.output_factors import Factors, samples_separate, tolerance
from lambdahat.problem import Problem
from lambdahat.results import Estimate, Status, student_quantile

CHUNK = {"cpu": 512, "cuda": 2048}  # samples sent through together at the most …
CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 1 << 30}  # … and the signals that come back for them, which a cache should hold
PROBE = 3
MIN_ROUNDS, MAX_ROUNDS = 8, 256
SIGNAL_BYTES = 512 << 20
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

Squares = dict[str, Tensor]
Inspect = Callable[[Batch, Tensor], None]  # looks at the output of each part of the data, with its graph


@dataclass
class _Call:
    """One use of a layer in the forward pass: what entered (normalised, for batch-norm) and the edge it left by."""

    layer: nn.Module
    entered: Tensor
    left: Any
    width: int


def trace_of(problem: Problem, leaves: dict[str, Tensor], factors: Factors, inspect: Inspect | None = None) -> float:
    """tr (1/n) Σ_i J_iᵀ M_i J_i, exactly."""
    layered = _trusted_layers(problem, leaves)
    return float(sum(_accumulate(problem, leaves, factors, layered, False, inspect).values()))


def diagonal_of(
    problem: Problem, leaves: dict[str, Tensor], factors: Factors, inspect: Inspect | None = None
) -> Tensor:
    """diag (1/n) Σ_i J_iᵀ M_i J_i, exactly, (P,) in float64."""
    layered = _trusted_layers(problem, leaves)
    squares = _accumulate(problem, leaves, factors, layered, True, inspect)
    return torch.cat([squares[name].reshape(-1) for name in problem.space.names])


def sampled_trace(
    problem: Problem, leaves: dict[str, Tensor], tol: float, seed: int, inspect: Inspect | None = None
) -> Estimate | None:
    """The trace with one random factor a sample in place of all, E[s sᵀ] = M, in independent rounds over the data.

    Rounds are added until the 95 % interval is within ``tol`` of the value; the error is that between rounds.
    None where samples mix.
    """
    loss = problem.loss_function
    assert loss is not None
    if not samples_separate(problem):
        return None

    def factors(index: int) -> Factors:
        def drawn(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
            stream = generator(seed, "sampled trace", index, batch.index)
            factor = loss.random_factor(output, problem.target(batch), stream)
            return factor.unsqueeze(0), factor.new_ones(1, len(factor))

        return Factors(1, drawn)

    layered = _trusted_layers(problem, leaves)
    rounds: list[float] = []
    while True:
        target = MIN_ROUNDS if not rounds else 2 * len(rounds)
        for index in range(len(rounds), target):
            squares = _accumulate(problem, leaves, factors(index), layered, False, None if rounds else inspect)
            rounds.append(float(sum(squares.values())))
            report("sampled trace", len(rounds))
        values = torch.tensor(rounds, dtype=torch.float64)
        mean, stderr = float(values.mean()), float(values.std() / math.sqrt(len(values)))
        close = student_quantile(0.95, len(values) - 1) * stderr <= tol * abs(mean)
        if close or target >= MAX_ROUNDS:
            status = Status.CONVERGED if close else Status.SAMPLES_SPENT
            return Estimate(mean, stderr, 0, status, len(values) - 1)


def _accumulate(
    problem: Problem,
    leaves: dict[str, Tensor],
    factors: Factors,
    layered: set[str],
    diagonal: bool,
    inspect: Inspect | None,
) -> Squares:
    """Σ_b (w_b/B) Σ_ik c_ik (J_iᵀ s_ik)², summed over each parameter's elements unless ``diagonal``."""
    total = {
        name: torch.zeros(leaf.shape if diagonal else (), dtype=torch.float64, device=leaf.device)
        for name, leaf in leaves.items()
    }
    with twice_differentiable():
        for part, share in _parts(problem, factors, _chunk(problem, leaves, factors)):
            squares: Squares = {}
            if layered or inspect is not None:
                output, calls = _recorded(problem, leaves, part)
                if inspect is not None:
                    inspect(part, output)
                squares = _layered_squares(leaves, part, output, calls, factors, layered, diagonal)
            rest = [name for name in leaves if name not in squares]
            if rest:
                squares |= _sample_squares(problem, leaves, part, factors, rest, diagonal)
            for name, square in squares.items():
                total[name].add_(square.double(), alpha=share)
    if problem.ranks.size == 1:
        return total
    whole = problem.ranks.sum(torch.cat([part.reshape(-1) for part in total.values()]), "the squares of a trace")
    pieces = whole.split([part.numel() for part in total.values()])
    return {name: piece.view(total[name].shape) for name, piece in zip(total, pieces, strict=True)}


def _chunk(problem: Problem, leaves: dict[str, Tensor], factors: Factors) -> int:
    """How many samples to send through together."""
    _, calls = _recorded(
        problem, leaves, take(problem.batches.first(), torch.zeros(1, dtype=torch.long, device=problem.device))
    )
    width = sum(call.width for found in calls.values() for call in found)
    kind = problem.device.type if problem.device.type in CHUNK else "cpu"
    room = CHUNK_BYTES[kind] // max(1, factors.count * width * problem.dtype.itemsize)
    return max(1, min(CHUNK[kind], room))


def _parts(problem: Problem, factors: Factors, most: int) -> Iterator[tuple[Batch, float]]:
    """The data in parts small enough for their back-propagated signals, each with the weight of one of its samples."""
    loss = problem.loss_function
    assert loss is not None
    count = -1 - problem.ranks.rank
    for weight, batch in problem.share:
        if batch.size <= most or not factors.parts:
            yield batch, weight / batch.size
            continue
        terms = loss.terms(problem.target(batch), batch.size)
        for where in torch.arange(batch.size, device=problem.device).split(most):
            part = replace(take(batch, where), index=count)  # a place of its own, that no batch has, and no other rank
            count -= problem.ranks.size
            yield part, weight * loss.terms(problem.target(part), part.size) / terms / part.size


def _trusted_layers(problem: Problem, leaves: dict[str, Tensor]) -> set[str]:
    """The parameters whose layer form agrees with per-sample gradients, for a random signal from a few samples.

    Agreement in numbers guards against everything a look at modules cannot see: hooks that change what a layer gives,
    inputs whose first dimension is not the batch.
    """

    def drawn(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        noise = torch.randn(output.shape, generator=generator(0, "trusted layers"), dtype=torch.float64).to(output)
        return noise.unsqueeze(0), noise.new_ones(1, len(noise))

    first = problem.batches.first()
    few = take(first, torch.arange(min(PROBE, first.size), device=problem.device))
    with twice_differentiable():
        output, calls = _recorded(problem, leaves, few)
        layered = _layered_squares(leaves, few, output, calls, Factors(1, drawn), None, False)
        exact = _sample_squares(problem, leaves, few, Factors(1, drawn), list(layered), False) if layered else {}
    allowed = tolerance(problem)
    return {
        name for name, square in layered.items()
        if abs(float(square - exact[name])) <= allowed * max(abs(float(exact[name])), 1e-300)
    }  # fmt: skip


def _recorded(problem: Problem, leaves: dict[str, Tensor], batch: Batch) -> tuple[Tensor, dict[str, list[_Call]]]:
    """The output for a batch and the uses of its layers, by the layer's name."""
    with _recording(problem, leaves) as calls:
        output: Tensor = problem.output(leaves, batch)
    return output, calls


def _layered_squares(
    leaves: dict[str, Tensor],
    batch: Batch,
    output: Tensor,
    calls: dict[str, list[_Call]],
    factors: Factors,
    wanted: set[str] | None,
    diagonal: bool,
) -> Squares:
    """The squares of the parameters that enter once, through a layer that has a closed form and the batch first."""
    uses = _uses(output)
    fit = {name for name, leaf in leaves.items() if uses[id(leaf)] == 1 and (wanted is None or name in wanted)}
    once = {
        prefix: found[0] for prefix, found in calls.items()
        if len(found) == 1 and len(found[0].entered) == batch.size and _names(prefix, found[0].layer, leaves) & fit
    }  # fmt: skip
    if not once:
        return {}
    signals, signs = factors.make(output.detach(), batch)
    squares: Squares = {}
    edges = [call.left for call in once.values()]
    for start in range(0, len(signals), step := _step(signals, once)):
        part = slice(start, start + step)
        back = _signals(output, edges, signals[part])
        for (prefix, call), deltas in zip(once.items(), back, strict=True):
            for key, square in _squares(call.layer, call.entered, deltas, signs[part], diagonal).items():
                name = f"{prefix}.{key}" if prefix else key
                if name in fit:
                    squares[name] = squares[name] + square if name in squares else square
    return squares


def _uses(output: Tensor) -> Counter[int]:
    """How often each leaf enters the graph of the output."""
    children = (child for node in graph_nodes([output]) for child, _ in node.next_functions)
    return Counter(id(child.variable) for child in children if type(child).__name__ == "AccumulateGrad")


def _signals(output: Tensor, edges: list[Any], seeds: Tensor) -> list[tuple[Tensor, ...]]:
    """δ (B, …) at each edge, for each of K seeds at the output."""
    columns = [torch.autograd.grad(output, edges, seed, retain_graph=True) for seed in seeds]
    return list(zip(*columns, strict=True))


def _step(signals: Tensor, calls: dict[str, _Call]) -> int:
    """How many factors to send back together, so that their signals stay within the budget."""
    row = sum(call.entered.numel() for call in calls.values()) * signals.element_size()
    return int(max(1, min(len(signals), SIGNAL_BYTES // max(row, 1))))


@contextmanager
def _recording(problem: Problem, leaves: dict[str, Tensor]) -> Iterator[dict[str, list[_Call]]]:
    """Record what enters and leaves every layer that has a closed form, while the block runs."""
    model = problem.model
    assert model is not None
    calls: dict[str, list[_Call]] = {}
    handles = []
    for prefix, layer in model.named_modules():
        known = type(layer) in (nn.Linear, *CONVOLUTIONS, *BATCH_NORMS)
        if not known or not _names(prefix, layer, leaves):
            continue

        def note(layer: nn.Module, args: Any, kwargs: Any, left: Tensor, prefix: str = prefix) -> None:
            # the edge, not the tensor: a later in-place operation changes what the tensor is
            if left.requires_grad:
                value = (args[0] if args else kwargs["input"]).detach()
                value = _standardised(layer, value) if isinstance(layer, BATCH_NORMS) else value
                calls.setdefault(prefix, []).append(_Call(layer, value, get_gradient_edge(left), left.numel()))

        handles.append(layer.register_forward_hook(note, with_kwargs=True))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _names(prefix: str, layer: nn.Module, leaves: dict[str, Tensor]) -> set[str]:
    own = (f"{prefix}.{key}" if prefix else key for key, _ in layer.named_parameters(recurse=False))
    return {name for name in own if name in leaves}


def _squares(layer: nn.Module, entered: Tensor, deltas: Sequence[Tensor], signs: Tensor, diagonal: bool) -> Squares:
    """Σ_ik c_ik (J_iᵀ s_ik)² of a layer's parameters from its input (B, …), K signals (B, …) and signs (K, B).

    Squares and their sums are taken in single precision at least.
    """
    wide = torch.promote_types(entered.dtype, torch.float32)
    entered, signs, deltas = entered.to(wide), signs.to(wide), [delta.to(wide) for delta in deltas]
    if isinstance(layer, nn.Linear) and entered.ndim == 2:
        return _linear_squares(entered, deltas, signs, diagonal)
    if isinstance(layer, nn.Linear):
        a, ds = entered.flatten(1, -2).transpose(1, 2), [d.flatten(1, -2).transpose(1, 2) for d in deltas]
        return _shared_squares(a, ds, signs, 1, tuple(layer.weight.shape), diagonal)
    if isinstance(layer, CONVOLUTIONS):
        patches, ds = _patches(layer, entered), [d.flatten(2) for d in deltas]
        return _shared_squares(patches, ds, signs, layer.groups, tuple(layer.weight.shape), diagonal)
    return _norm_squares(entered, torch.stack(tuple(deltas)), signs, diagonal)


def _linear_squares(entered: Tensor, deltas: Sequence[Tensor], signs: Tensor, diagonal: bool) -> Squares:
    """One position a sample: (δaᵀ)² = δ²(a²)ᵀ."""
    if diagonal:
        squares = sum(d.square() * sign.unsqueeze(1) for d, sign in zip(deltas, signs, strict=True))
        assert isinstance(squares, Tensor)
        return {"weight": squares.T @ entered.square(), "bias": squares.sum(dim=0)}
    lengths = torch.stack([torch.linalg.vector_norm(d, dim=1) for d in deltas])
    sizes = (lengths.square() * signs).sum(dim=0)
    return {"weight": sizes @ torch.linalg.vector_norm(entered, dim=1).square(), "bias": sizes.sum()}


def _shared_squares(
    entered: Tensor, deltas: Sequence[Tensor], signs: Tensor, groups: int, shape: tuple[int, ...], diagonal: bool
) -> Squares:
    """A weight shared over L positions: G_ik = Σ_l δ_l a_lᵀ from a (B, g·I, L) and K signals (B, g·O, L).

    A row of ones beside a gives the bias's gradient in the same product.
    """
    count, (size, width, length) = len(deltas), deltas[0].shape
    a = F.pad(entered.reshape(size * groups, -1, length), (0, 0, 0, 1), value=1.0)
    d = torch.empty(size * groups, count, width // groups, length, dtype=a.dtype, device=a.device)
    for k, delta in enumerate(deltas):
        d[:, k] = delta.reshape(size * groups, width // groups, length)
    per_sample = torch.bmm(d.flatten(1, 2), a.transpose(1, 2)).reshape(size, groups, count, width // groups, -1)
    weight, bias = per_sample[..., :-1], per_sample[..., -1]
    if diagonal:
        squares = torch.einsum("bgkoi,kb->goi", weight.square(), signs).reshape(shape)
        return {"weight": squares, "bias": torch.einsum("bgko,kb->go", bias.square(), signs).flatten()}
    sizes = torch.linalg.vector_norm(weight, dim=(3, 4)).square().sum(dim=1)
    offsets = torch.linalg.vector_norm(bias, dim=3).square().sum(dim=1)
    return {"weight": (sizes * signs.T).sum(), "bias": (offsets * signs.T).sum()}


def _standardised(layer: nn.Module, entered: Tensor) -> Tensor:
    """x̂ = (x − mean)/√(var + ε) by the running statistics in use during the call, which may not be the layer's own."""
    mean, variance = layer.running_mean, layer.running_var
    assert isinstance(mean, Tensor)
    assert isinstance(variance, Tensor)
    spread = [1, -1] + [1] * (entered.ndim - 2)
    root = (variance.to(entered) + layer.eps).sqrt()  # type: ignore[operator]
    return (entered - mean.to(entered).reshape(spread)) / root.reshape(spread)


def _norm_squares(scaled: Tensor, delta: Tensor, signs: Tensor, diagonal: bool) -> Squares:
    """Batch-norm with running statistics, z = γ·x̂ + β."""
    weight, bias = (part.reshape(*delta.shape[:3], -1).sum(dim=3) for part in (delta * scaled, delta))
    form = "kbo,kb->o" if diagonal else "kbo,kb->"
    return {
        "weight": torch.einsum(form, weight.square(), signs),
        "bias": torch.einsum(form, bias.square(), signs),
    }


def _patches(layer: nn.Module, entered: Tensor) -> Tensor:
    """What each output position of a convolution sees: (B, C·k, L), channels outermost."""
    assert isinstance(layer, CONVOLUTIONS)
    sizes, steps, holes = layer.kernel_size, layer.stride, layer.dilation
    if isinstance(layer, nn.Conv2d) and layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
        return F.unfold(entered, sizes, holes, layer.padding, steps)
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = F.pad(entered, layer._reversed_padding_repeated_twice, mode=mode)
    dims = len(sizes)
    for axis, (size, step, hole) in enumerate(zip(sizes, steps, holes, strict=True), start=2):
        padded = padded.unfold(axis, hole * (size - 1) + 1, step)[..., ::hole]
    order = [0, 1, *range(2 + dims, 2 + 2 * dims), *range(2, 2 + dims)]
    moved = padded.permute(order)
    return moved.reshape(len(entered), entered.shape[1] * math.prod(sizes), -1)


def _sample_squares(
    problem: Problem, leaves: dict[str, Tensor], batch: Batch, factors: Factors, names: list[str], diagonal: bool
) -> Squares:
    """The squares of any parameters, from per-sample gradients, a few samples at a time."""
    with torch.no_grad():
        output = problem.output(leaves, batch)
    signals, signs = factors.make(output.detach(), batch)
    gradients = _sample_gradients(problem, leaves, names)
    rows = max(1, SIGNAL_BYTES // (sum(leaves[name].numel() for name in names) * output.element_size()))
    squares: Squares = {}
    for start in range(0, batch.size, rows):
        part = take(batch, torch.arange(start, min(start + rows, batch.size), device=problem.device))
        for signal, sign in zip(signals, signs, strict=True):
            found = gradients(part, signal[start : start + rows])
            for name, tensor in found.items():
                wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
                weighted = torch.einsum("b...,b->...", wide.square(), sign[start : start + rows].to(wide))
                square = weighted if diagonal else weighted.sum()
                squares[name] = squares[name] + square if name in squares else square
    return squares


def _sample_gradients(
    problem: Problem, leaves: dict[str, Tensor], names: list[str]
) -> Callable[[Batch, Tensor], dict[str, Tensor]]:
    """(samples, signals (b, …)) ↦ J_iᵀ s_i of every sample (b, …) by parameter: by vmap where the model takes it."""
    fixed = {name: leaf.detach() for name, leaf in leaves.items()}
    chosen = {name: fixed[name] for name in names}

    def along(parameters: dict[str, Tensor], sample: Batch, signal: Tensor) -> Tensor:
        output: Tensor = problem.output({**fixed, **parameters}, sample)
        return (output * signal.unsqueeze(0)).sum()

    def one(sample: Batch, signal: Tensor) -> tuple[Tensor, ...]:
        inputs = [leaves[name] for name in names]
        output = problem.output(leaves, sample)
        return torch.autograd.grad(output, inputs, signal.unsqueeze(0), materialize_grads=True)

    def gradients(part: Batch, signals: Tensor) -> dict[str, Tensor]:
        columns, single = rows_of(part)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="There is a performance drop")
                each_of = vmap(lambda signal, *rows: grad(along)(chosen, single(*rows), signal))
                return each_of(signals, *columns)  # type: ignore[no-any-return]
        except RuntimeError:  # an operation that vmap does not take
            where = torch.arange(part.size, device=problem.device).split(1)
            each = [one(take(part, i), signal) for i, signal in zip(where, signals, strict=True)]
            return {name: torch.stack(parts) for name, parts in zip(names, zip(*each, strict=True), strict=True)}

    return gradients
