"""Traces and diagonals of Gauss–Newton matrices in closed form, layer by layer.

With M_i = Σ_k c_ik s_ik s_ikᵀ at the output, tr (1/n) Σ_i J_iᵀM_iJ_i = (1/n) Σ_ik c_ik ‖J_iᵀ s_ik‖², and J_iᵀ s_ik is the
gradient of s_ikᵀ z_i: for a linear layer the outer product of the signal δ that comes back and the input a that came in, so
that its squared norm is ‖δ‖²‖a‖² and no per-sample gradient is formed. Convolutions and batch-norm in eval mode have forms
alike; any other parameter goes through per-sample gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.func import grad, vmap
from torch.utils._pytree import tree_map

from lambdahat._rng import generator
from lambdahat.batches import Batch, take
from lambdahat.operators.linearise import empirical_residuals, monte_carlo_residuals, twice_differentiable
from lambdahat.problem import Problem
from lambdahat.results import Estimate, Status, student_quantile

CHUNK = {"cpu": 256, "cuda": 2048}
PROBE = 3
MIN_ROUNDS, MAX_ROUNDS = 8, 256
SIGNAL_BYTES = 512 << 20
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

Squares = dict[str, Tensor]


@dataclass(frozen=True)
class Factors:
    """``make(output, batch)`` gives S (K, B, …) and signs (K, B) with Σ_k c_k s_k s_kᵀ = M for each sample; K = ``count``."""

    count: int
    make: Callable[[Tensor, Batch], tuple[Tensor, Tensor]]


@dataclass
class _Call:
    """One use of a layer in the forward pass."""

    layer: nn.Module
    entered: Tensor
    left: Any


def exact_factors(problem: Problem, kind: str, samples: int = 1, seed: int = 0) -> Factors | None:
    """Factors of M for the Hessian of the loss at the output, or of the sampled Fishers; None where there are none."""
    if problem.loss_function is None or problem.norm == "train":  # batch statistics couple the samples
        return None
    first = take(problem.batches.first(), torch.zeros(1, dtype=torch.long, device=problem.device))
    with torch.no_grad():
        output = problem.output(problem.named(problem.vector), first)
    if not isinstance(output, Tensor) or output.ndim < 1:
        return None
    if kind != "hessian":
        residuals = (
            empirical_residuals(problem) if kind == "empirical" else monte_carlo_residuals(problem, samples, seed)
        )

        def drawn(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
            stacked = torch.stack([draw[0] for draw in residuals(output, batch)])
            return stacked, torch.full(
                stacked.shape[:2], 1.0 / len(stacked), dtype=stacked.dtype, device=stacked.device
            )

        return Factors(samples if kind == "monte_carlo" else 1, drawn)
    closed = problem.loss_function.factors(output, problem.target(first))
    if closed is not None:
        return Factors(len(closed), lambda output, batch: _closed(problem, output, batch))
    if output.ndim == 2 and problem.loss_function.product(output, problem.target(first)) is None:
        return Factors(output.shape[1], lambda output, batch: _by_eigenvectors(problem, output, batch))
    return None


def trace_of(problem: Problem, leaves: dict[str, Tensor], factors: Factors) -> float:
    """tr (1/n) Σ_i J_iᵀ M_i J_i, exactly."""
    return float(sum(part.sum() for part in _accumulate(problem, leaves, factors, False).values()))


def diagonal_of(problem: Problem, leaves: dict[str, Tensor], factors: Factors) -> Tensor:
    """diag (1/n) Σ_i J_iᵀ M_i J_i, exactly, (P,) in float64."""
    squares = _accumulate(problem, leaves, factors, True)
    return torch.cat([squares[name].reshape(-1) for name in problem.space.names])


def sampled_trace(problem: Problem, leaves: dict[str, Tensor], tol: float, seed: int) -> Estimate:
    """The trace with one random factor a sample in place of all, E[s sᵀ] = M, in independent rounds over the data.

    Rounds are added until the 95 % interval is within ``tol`` of the value; the error is that between rounds.
    """
    loss = problem.loss_function
    assert loss is not None
    rounds: list[float] = []
    while True:
        target = MIN_ROUNDS if not rounds else 2 * len(rounds)
        for index in range(len(rounds), target):

            def drawn(output: Tensor, batch: Batch, index: int = index) -> tuple[Tensor, Tensor]:
                stream = generator(seed, "sampled trace", index, batch.index)
                factor = loss.random_factor(output, problem.target(batch), stream)
                return factor.unsqueeze(0), factor.new_ones(1, len(factor))

            rounds.append(trace_of(problem, leaves, Factors(1, drawn)))
        values = torch.tensor(rounds, dtype=torch.float64)
        mean, stderr = float(values.mean()), float(values.std() / math.sqrt(len(values)))
        close = student_quantile(0.95, len(values) - 1) * stderr <= tol * abs(mean)
        if close or target >= MAX_ROUNDS:
            status = Status.CONVERGED if close else Status.BUDGET_SPENT
            return Estimate(mean, stderr, 0, status, len(values) - 1)


def _closed(problem: Problem, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    assert problem.loss_function is not None
    factors = problem.loss_function.factors(output, problem.target(batch))
    assert factors is not None
    return factors, factors.new_ones(factors.shape[:2])


def _by_eigenvectors(problem: Problem, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Signed factors √|λ|·v of the loss's Hessian at each sample's output, for a loss without a closed form."""
    point = output.detach().requires_grad_()
    (slope,) = torch.autograd.grad(problem.output_loss(point, batch), point, create_graph=True)
    eye = torch.eye(output.shape[1], dtype=output.dtype, device=output.device)
    rows = [torch.zeros_like(output)] * len(eye)
    if slope.requires_grad:
        rows = [torch.autograd.grad(slope, point, e.expand_as(output), retain_graph=True)[0] for e in eye]
    values, vectors = torch.linalg.eigh(torch.stack(rows, dim=1).double() * batch.size)
    factors = (vectors * values.abs().sqrt().unsqueeze(1)).permute(2, 0, 1)
    return factors.to(output.dtype), values.sign().T.to(output.dtype)


def _accumulate(problem: Problem, leaves: dict[str, Tensor], factors: Factors, diagonal: bool) -> Squares:
    """Σ_b (w_b/B) Σ_ik c_ik (J_iᵀ s_ik)², summed over each parameter's elements unless ``diagonal``."""
    with twice_differentiable():
        return _accumulate_plainly(problem, leaves, factors, diagonal)


def _accumulate_plainly(problem: Problem, leaves: dict[str, Tensor], factors: Factors, diagonal: bool) -> Squares:
    layered = _trusted_layers(problem, leaves, factors)
    total = {
        name: torch.zeros(leaf.shape if diagonal else (), dtype=torch.float64, device=leaf.device)
        for name, leaf in leaves.items()
    }
    for weight, batch in problem.weighted():
        for part in _chunks(problem, batch, factors.count):
            squares = _layered_squares(problem, leaves, part, factors, layered, diagonal)
            rest = [name for name in leaves if name not in layered]
            if rest:
                squares |= _sample_squares(problem, leaves, part, factors, rest, diagonal)
            for name, square in squares.items():
                total[name].add_(square.double(), alpha=weight / batch.size)
    return total


def _chunks(problem: Problem, batch: Batch, count: int) -> Iterator[Batch]:
    """A batch in parts small enough for their back-propagated signals; whole where the batch itself matters."""
    size = batch.size if problem.norm == "train" else CHUNK.get(problem.device.type, 256)
    if size >= batch.size:
        yield batch
        return
    for start in range(0, batch.size, size):
        where = torch.arange(start, min(start + size, batch.size), device=problem.device)
        yield take(batch, where)


def _trusted_layers(problem: Problem, leaves: dict[str, Tensor], factors: Factors) -> set[str]:
    """The parameters whose layer form agrees with per-sample gradients on a few samples of the first batch.

    Agreement in numbers guards against everything a look at modules cannot see: weights used outside their layer, inputs whose
    first dimension is not the batch, layers called twice.
    """
    if problem.norm == "train":  # a sample's gradient is not its own: only J as a whole is known
        return set()
    first = problem.batches.first()
    few = take(first, torch.arange(min(PROBE, first.size), device=problem.device))
    layered = _layered_squares(problem, leaves, few, factors, None, False)
    if not layered:
        return set()
    exact = _sample_squares(problem, leaves, few, factors, list(layered), False)
    tolerance = 1e3 * torch.finfo(problem.dtype).eps
    return {
        name for name, square in layered.items()
        if abs(float(square - exact[name])) <= tolerance * max(abs(float(exact[name])), 1e-300)
    }  # fmt: skip


def _layered_squares(
    problem: Problem,
    leaves: dict[str, Tensor],
    batch: Batch,
    factors: Factors,
    wanted: set[str] | None,
    diagonal: bool,
) -> Squares:
    """The squares of the parameters of layers that have a closed form."""
    if wanted is not None and not wanted:
        return {}
    with _recording(problem, leaves) as calls:
        output = problem.output(leaves, batch)
    once = {prefix: uses[0] for prefix, uses in calls.items() if len(uses) == 1}
    once = {
        prefix: call for prefix, call in once.items()
        if call.entered.shape[0] == batch.size and (wanted is None or _names(prefix, call.layer, leaves) & wanted)
    }  # fmt: skip
    if not once or not output.requires_grad:
        return {}
    signals, signs = factors.make(output.detach(), batch)
    squares: Squares = {}
    for start in range(0, len(signals), step := _step(signals, once)):
        part = slice(start, start + step)
        edges = [call.left for call in once.values()]
        back = _signals(output, edges, signals[part])
        for (prefix, call), delta in zip(once.items(), back, strict=True):
            for key, square in _squares(call.layer, call.entered, delta, signs[part], diagonal).items():
                name = f"{prefix}.{key}" if prefix else key
                if name in leaves and (wanted is None or name in wanted):
                    squares[name] = squares[name] + square if name in squares else square
    return squares


def _signals(output: Tensor, edges: list[Any], seeds: Tensor) -> list[Tensor]:
    """δ (K, B, …) at each edge, for each of K seeds at the output: batched where autograd can, else one by one."""
    columns = [torch.autograd.grad(output, edges, seed, retain_graph=True) for seed in seeds]
    return [torch.stack(parts) for parts in zip(*columns, strict=True)]


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

        def note(layer: nn.Module, entered: Any, left: Tensor, prefix: str = prefix) -> None:
            # the edge, not the tensor: a later in-place operation changes what the tensor is
            edge = get_gradient_edge(left) if left.requires_grad else None
            if edge is not None:
                calls.setdefault(prefix, []).append(_Call(layer, entered[0].detach(), edge))

        handles.append(layer.register_forward_hook(note))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _names(prefix: str, layer: nn.Module, leaves: dict[str, Tensor]) -> set[str]:
    own = (f"{prefix}.{key}" if prefix else key for key, _ in layer.named_parameters(recurse=False))
    return {name for name in own if name in leaves}


def _squares(layer: nn.Module, entered: Tensor, delta: Tensor, signs: Tensor, diagonal: bool) -> Squares:
    """Σ_ik c_ik (J_iᵀ s_ik)² of a layer's parameters from its input (B, …), signals (K, B, …) and signs (K, B)."""
    if isinstance(layer, nn.Linear) and entered.ndim == 2:
        return _linear_squares(entered, delta, signs, diagonal)
    if isinstance(layer, nn.Linear):
        middle = entered.flatten(1, -2).transpose(1, 2), delta.flatten(2, -2).transpose(2, 3)
        return _shared_squares(*middle, signs, 1, tuple(layer.weight.shape), diagonal)
    if isinstance(layer, CONVOLUTIONS):
        patches = _patches(layer, entered)
        return _shared_squares(patches, delta.flatten(3), signs, layer.groups, tuple(layer.weight.shape), diagonal)
    return _norm_squares(layer, entered, delta, signs, diagonal)


def _linear_squares(entered: Tensor, delta: Tensor, signs: Tensor, diagonal: bool) -> Squares:
    """One position a sample: (δaᵀ)² = δ²(a²)ᵀ."""
    if diagonal:
        squares = torch.einsum("kbo,kb->bo", delta.square(), signs)
        return {"weight": squares.T @ entered.square(), "bias": squares.sum(dim=0)}
    sizes = torch.einsum("kbo,kbo,kb->b", delta, delta, signs)
    return {"weight": (sizes * entered.square().sum(dim=1)).sum(), "bias": sizes.sum()}


def _shared_squares(
    entered: Tensor, delta: Tensor, signs: Tensor, groups: int, shape: tuple[int, ...], diagonal: bool
) -> Squares:
    """A weight shared over L positions: G_ik = Σ_l δ_l a_lᵀ from a (B, g·I, L) and δ (K, B, g·O, L)."""
    count, size, width, length = delta.shape
    a = entered.reshape(size, groups, -1, length)
    d = delta.reshape(count, size, groups, width // groups, length)
    stacked = d.permute(1, 2, 0, 3, 4).reshape(size * groups, -1, length)
    per_sample = torch.bmm(stacked, a.reshape(size * groups, -1, length).transpose(1, 2))
    per_sample = per_sample.reshape(size, groups, count, width // groups, -1)
    bias = delta.sum(dim=3)
    if diagonal:
        weight = torch.einsum("bgkoi,kb->goi", per_sample.square(), signs).reshape(shape)
        return {"weight": weight, "bias": torch.einsum("kbo,kb->o", bias.square(), signs)}
    sizes = torch.einsum("bgkoi,bgkoi->kb", per_sample, per_sample)
    return {"weight": (sizes * signs).sum(), "bias": torch.einsum("kbo,kbo,kb->", bias, bias, signs)}


def _norm_squares(layer: nn.Module, entered: Tensor, delta: Tensor, signs: Tensor, diagonal: bool) -> Squares:
    """Batch-norm with running statistics, z = γ·x̂ + β."""
    assert isinstance(layer.running_mean, Tensor) and isinstance(layer.running_var, Tensor)
    spread = [1, -1] + [1] * (entered.ndim - 2)
    mean = layer.running_mean.to(entered).reshape(spread)
    root = (layer.running_var.to(entered) + layer.eps).sqrt().reshape(spread)  # type: ignore[operator]
    scaled = (entered - mean) / root
    positions = tuple(range(3, delta.ndim))
    weight = (delta * scaled).sum(dim=positions) if positions else delta * scaled
    bias = delta.sum(dim=positions) if positions else delta
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
        return F.unfold(entered, sizes, holes, layer.padding, steps)  # type: ignore[arg-type]
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
    """The squares of any parameters, from per-sample gradients by vmap, a few samples at a time."""
    if problem.norm == "train":
        return _coupled_squares(problem, leaves, batch, factors, names, diagonal)
    fixed = {name: leaf.detach() for name, leaf in leaves.items()}
    chosen = {name: fixed[name] for name in names}
    with torch.no_grad():
        output = problem.output(fixed, batch)
    signals, signs = factors.make(output.detach(), batch)

    def along(parameters: dict[str, Tensor], sample: Any, signal: Tensor) -> Tensor:
        single = tree_map(lambda leaf: leaf.unsqueeze(0) if isinstance(leaf, Tensor) else leaf, sample)
        return (problem.output({**fixed, **parameters}, Batch(single, 1)) * signal.unsqueeze(0)).sum()

    gradients = vmap(grad(along), in_dims=(None, 0, 0))
    rows = max(1, SIGNAL_BYTES // (sum(tensor.numel() for tensor in chosen.values()) * output.element_size()))
    squares: Squares = {}
    for start in range(0, batch.size, rows):
        part = take(batch, torch.arange(start, min(start + rows, batch.size), device=problem.device))
        for signal, sign in zip(signals, signs, strict=True):
            found = gradients(chosen, part.data, signal[start : start + rows])
            for name, tensor in found.items():
                weighted = torch.einsum("b...,b->...", tensor.square(), sign[start : start + rows])
                square = weighted if diagonal else weighted.sum()
                squares[name] = squares[name] + square if name in squares else square
    return squares


def _coupled_squares(
    problem: Problem, leaves: dict[str, Tensor], batch: Batch, factors: Factors, names: list[str], diagonal: bool
) -> Squares:
    """The same where batch statistics couple the samples: one backward pass for every factor of every sample."""
    output = problem.output(leaves, batch)
    signals, signs = factors.make(output.detach(), batch)
    chosen = [leaves[name] for name in names]
    squares: Squares = {}
    for signal, sign in zip(signals, signs, strict=True):
        for i in range(batch.size):
            seed = torch.zeros_like(output)
            seed[i] = signal[i]
            found = torch.autograd.grad(output, chosen, seed, retain_graph=True, materialize_grads=True)
            for name, tensor in zip(names, found, strict=True):
                weighted = sign[i] * tensor.square()
                square = weighted if diagonal else weighted.sum()
                squares[name] = squares[name] + square if name in squares else square
    return squares
