"""Traces and diagonals of Gauss–Newton matrices in closed form, layer by layer.

With M_i = Σ_k c_ik s_ik s_ikᵀ at the output, tr (1/n) Σ_i J_iᵀM_iJ_i = (1/n) Σ_ik c_ik ‖J_iᵀ
s_ik‖², and J_iᵀ s_ik is the gradient of s_ikᵀ z_i: for a linear layer the outer product of the
signal δ that comes back and the input a that came in, so that its squared norm is ‖δ‖²‖a‖² and no
per-sample gradient is formed. Convolutions and batch-norm in eval mode have forms alike; any other
parameter goes through per-sample gradients. All of it holds where samples do not mix, in the model
and in the loss; where they do, there are no factors.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import grad, vmap

from lambdahat._core.progress import report
from lambdahat._core.rng import generator
from lambdahat.operators.exact import layer_squares
from lambdahat.operators.exact.few_samples import Few, few_of
from lambdahat.operators.exact.layer_calls import (
    Call,
    Calls,
    full_name,
    names_in,
    owner,
    recorded,
    uses_of_leaves,
)
from lambdahat.operators.exact.layer_squares import Squares, add_squares, pulled_squares
from lambdahat.operators.exact.output_factors import Factors, tolerance
from lambdahat.operators.linearise import twice_differentiable
from lambdahat.problem import Problem
from lambdahat.problem.batches import Batch, rows_of, take
from lambdahat.problem.memory import PASS
from lambdahat.results import Estimate, Status, student_quantile

CHUNK = {"cpu": 512, "cuda": 8192}  # samples sent through together at the most …
# … and the signals that come back for them, which a cache should hold
CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 1 << 29}
MIN_ROUNDS, MAX_ROUNDS = 8, 256


@dataclass(frozen=True)
class Part:
    """Some of the data gone through the model: the output with its graph, and the uses of layers in
    it.

    ``share`` is the weight of one of its samples; ``once`` are the uses of layers whose parameters
    enter once, and ``layered`` those parameters; ``room`` the bytes that signals sent back through
    it may take, if not the usual.
    """

    batch: Batch
    share: float
    output: Tensor
    once: dict[str, Call]
    layered: set[str]
    room: int | None = None


# looks at each part of the data, and may add to the squares of its parameters
Extra = Callable[[Part], Squares]


@dataclass(frozen=True)
class Trusted:
    """The parameters whose layer form agrees with per-sample gradients; the numbers that leave
    all layers, a sample.
    """

    names: set[str]
    width: int


def trace_of(
    problem: Problem,
    leaves: dict[str, Tensor],
    factors: Factors,
    extra: Extra | None = None,
    trusted: Trusted | None = None,
) -> float:
    """tr (1/n) Σ_i J_iᵀ M_i J_i, exactly, and what ``extra`` adds."""
    trusted = trusted or trusted_layers(few_of(problem, leaves))
    return float(accumulate(problem, leaves, factors, trusted, False, extra).sum())


def diagonal_of(
    problem: Problem,
    leaves: dict[str, Tensor],
    factors: Factors,
    extra: Extra | None = None,
    trusted: Trusted | None = None,
) -> Tensor:
    """diag (1/n) Σ_i J_iᵀ M_i J_i, exactly, and what ``extra`` adds: (P,) in float64."""
    trusted = trusted or trusted_layers(few_of(problem, leaves))
    return accumulate(problem, leaves, factors, trusted, True, extra)


def sampled_trace(
    problem: Problem,
    leaves: dict[str, Tensor],
    tol: float,
    seed: int,
    extra: Callable[[int], Extra] | None = None,
    trusted: Trusted | None = None,
) -> Estimate:
    """The trace with one random factor a sample in place of all, E[s sᵀ] = M, in independent rounds
    over the data.

    Samples must not mix. ``extra`` makes what is added in a round.
    """
    loss = problem.loss_function
    assert loss is not None
    trusted = trusted or trusted_layers(few_of(problem, leaves))

    def one(index: int) -> float:
        def drawn(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
            stream = generator(seed, "sampled trace", index, batch.index)
            factor = loss.random_factor(output, problem.target(batch), stream)
            return factor.unsqueeze(0), factor.new_ones(1, len(factor))

        added = None if extra is None else extra(index)
        return float(accumulate(problem, leaves, Factors(1, drawn), trusted, False, added).sum())

    return mean_of_rounds(lambda indices: [one(index) for index in indices], tol)


def mean_of_rounds(
    more: Callable[[range], Sequence[float]], tol: float, offset: float = 0.0
) -> Estimate:
    """``offset`` plus the mean of independent rounds, ``more(indices)`` giving the values of some.

    Rounds are added until the 95 % interval is within ``tol`` of the value; the error is that
    between rounds.
    """
    rounds: list[float] = []
    while True:
        target = MIN_ROUNDS if not rounds else 2 * len(rounds)
        rounds += more(range(len(rounds), target))
        report("sampled trace", len(rounds))
        values = torch.tensor(rounds, dtype=torch.float64)
        mean, stderr = offset + float(values.mean()), float(values.std() / math.sqrt(len(values)))
        close = student_quantile(0.95, len(values) - 1) * stderr <= tol * abs(mean)
        if close or target >= MAX_ROUNDS:
            status = Status.CONVERGED if close else Status.SAMPLES_SPENT
            return Estimate(mean, stderr, 0, status, len(values) - 1)


def accumulate(
    problem: Problem,
    leaves: dict[str, Tensor],
    factors: Factors,
    trusted: Trusted,
    diagonal: bool,
    extra: Extra | None,
) -> Tensor:
    """Σ_b (w_b/B) Σ_ik c_ik (J_iᵀ s_ik)² in float64: (P,) if ``diagonal``, else summed for each
    parameter.
    """
    sizes = [leaf.numel() if diagonal else 1 for leaf in leaves.values()]
    total = torch.zeros(sum(sizes), dtype=torch.float64, device=problem.device)
    with twice_differentiable():
        for batch, share in _parts(problem, factors, _chunk(problem, factors, trusted)):
            squares: Squares = {}
            if trusted.names or extra is not None:
                output, calls = recorded(problem, leaves, batch)
                once, fit = used_once(leaves, batch, output, calls, trusted.names)
                if factors.count:
                    squares = _layered_squares(
                        batch, output, once, fit, factors, diagonal, _room(problem)
                    )
                if extra is not None:
                    add_squares(
                        squares, extra(Part(batch, share, output, once, fit, _room(problem)))
                    )
            rest = [name for name in leaves if name not in squares] if factors.count else []
            if rest:
                squares |= _sample_squares(problem, leaves, batch, factors, rest, diagonal)
            if squares:
                parts = [
                    squares[name].reshape(-1) if name in squares else total.new_zeros(size)
                    for name, size in zip(leaves, sizes, strict=True)
                ]
                total.add_(torch.cat(parts), alpha=share)
    return problem.ranks.sum(total, "the squares of a trace")


def _chunk(problem: Problem, factors: Factors, trusted: Trusted) -> int:
    """How many samples to send through together."""
    kind = problem.device.type if problem.device.type in CHUNK else "cpu"
    room = min(CHUNK_BYTES[kind], _room(problem)) // max(
        1, factors.count * trusted.width * problem.dtype.itemsize
    )
    return max(1, min(CHUNK[kind], room))


def _room(problem: Problem) -> int:
    """Bytes for signals, and again for what is formed of them: each at most what a pass over a
    batch may take.
    """
    most = layer_squares.SIGNAL_BYTES
    return most if problem.memory is None else min(most, int(PASS * problem.memory))


def _parts(problem: Problem, factors: Factors, most: int) -> Iterator[tuple[Batch, float]]:
    """The data in parts small enough for their back-propagated signals, each with the weight of
    one of its samples.
    """
    loss = problem.loss_function
    assert loss is not None
    count = -1 - problem.ranks.rank
    for weight, batch in problem.share:
        if batch.size <= most or not factors.parts:
            yield batch, weight / batch.size
            continue
        terms = loss.terms(problem.target(batch), batch.size) or 1.0  # none may count
        for start in range(0, batch.size, most):
            # a place of its own, that no batch has, and no other rank
            part = replace(take(batch, slice(start, start + most)), index=count)
            count -= problem.ranks.size
            yield part, weight * loss.terms(problem.target(part), part.size) / terms / part.size


def trusted_layers(few: Few) -> Trusted:
    """Which layers give the gradient of a random mix of the outputs, from signals that keep samples
    apart.

    Agreement in numbers guards against everything a look at modules cannot see: hooks that change
    what a layer gives, inputs whose first dimension is not the batch. With a mix u_i for each
    sample a layer's form gives Σ_i J_iᵀu_i, and with d_i u_i in its place the signal of sample i is
    d_i times what it was. Both come back in one pass too, by which those of factors will: torch's
    rules for vmap are not all right, that of cdist for one.
    """
    output, leaves = few.output, few.leaves
    width = sum(call.width for found in few.calls.values() for call in found) // few.batch.size
    once, fit = used_once(leaves, few.batch, output, few.calls, None)
    within = _holding(once, fit)
    if not within:
        return Trusted(set(), width)
    mixed = few.mixed()
    powers = torch.arange(len(output), device=output.device)
    # 1 and d_i, exact, whatever they multiply
    factors = 2.0 ** torch.stack([torch.zeros_like(powers), powers])
    edges = [call.left for call in within.values()]
    seeds = _by_rows(mixed.mix, factors)
    with twice_differentiable():
        scaled = layer_squares.in_one_pass([output], edges, [seeds])
        if scaled is None:
            alone = torch.autograd.grad(
                output, edges, seeds[1], retain_graph=True, allow_unused=True
            )
            scaled = [None if part is None else part.unsqueeze(0) for part in alone]
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for (prefix, call), other in zip(within.items(), scaled, strict=True):
        if other is not None and prefix in mixed.signals:
            delta = mixed.signals[prefix].detach()
            pairs[f"{prefix}."] = (_by_rows(delta, factors[-len(other) :]), other)
            own = (
                (full_name(prefix, key), said)
                for key, said in layer_squares.gradients(call, delta).items()
            )
            pairs |= {
                name: (said, mixed.slopes[name].detach())
                for name, said in own
                if name in mixed.slopes
            }
    close = _close(pairs, tolerance(few.problem))
    return Trusted({name for name in fit if name in close and f"{owner(name)}." in close}, width)


def _by_rows(tensor: Tensor, factors: Tensor) -> Tensor:
    """(K, B, …), of a tensor (B, …) and factors (K, B)."""
    return tensor * factors.to(tensor.dtype).reshape(*factors.shape, *[1] * (tensor.ndim - 1))


def _close(pairs: dict[str, tuple[Tensor, Tensor]], allowed: float) -> set[str]:
    """The names of tensors that agree, all read at once."""
    if not pairs:
        return set()
    said = [pair[0] for pair in pairs.values()]
    found = [slope.to(like.dtype) for like, slope in pairs.values()]
    norms = torch._foreach_norm([*torch._foreach_sub(said, found), *found])
    gaps, sizes = torch.stack(norms).view(2, -1).tolist()
    return {
        name for name, gap, size in zip(pairs, gaps, sizes, strict=True) if gap <= allowed * size
    }


def used_once(
    leaves: dict[str, Tensor], batch: Batch, output: Tensor, calls: Calls, wanted: set[str] | None
) -> tuple[dict[str, Call], set[str]]:
    """The uses of layers with the batch first that are their only ones, and the parameters that
    enter by them alone.
    """
    uses = uses_of_leaves(output)
    once = {
        prefix: found[0]
        for prefix, found in calls.items()
        if len(found) == 1 and found[0].samples == batch.size
    }
    own = set().union(*(names_in(prefix, call.layer, leaves) for prefix, call in once.items()))
    return once, {
        name for name in own if uses[id(leaves[name])] == 1 and (wanted is None or name in wanted)
    }


def _holding(once: dict[str, Call], fit: set[str]) -> dict[str, Call]:
    """The uses of the layers that some parameters belong to."""
    owners = {owner(name) for name in fit}
    return {prefix: call for prefix, call in once.items() if prefix in owners}


def _layered_squares(
    batch: Batch,
    output: Tensor,
    once: dict[str, Call],
    fit: set[str],
    factors: Factors,
    diagonal: bool,
    room: int,
) -> Squares:
    """The squares of the parameters that enter once, through a layer that has a closed form and
    the batch first.
    """
    within = _holding(once, fit)
    if not within:
        return {}
    signals, signs = factors.make(output.detach(), batch)
    found = pulled_squares([output], [signals], signs, within, diagonal, room)
    return {name: square for name, square in found.items() if name in fit}


def _sample_squares(
    problem: Problem,
    leaves: dict[str, Tensor],
    batch: Batch,
    factors: Factors,
    names: list[str],
    diagonal: bool,
) -> Squares:
    """The squares of any parameters, from per-sample gradients, a few samples at a time."""
    with torch.no_grad():
        output = problem.output(leaves, batch)
    signals, signs = factors.make(output.detach(), batch)
    gradients = _sample_gradients(problem, leaves, names)
    rows = max(
        1, _room(problem) // (sum(leaves[name].numel() for name in names) * output.element_size())
    )
    squares: Squares = {}
    for start in range(0, batch.size, rows):
        part = take(batch, slice(start, start + rows))
        for signal, sign in zip(signals, signs, strict=True):
            found = gradients(part, signal[start : start + rows])
            for name, tensor in found.items():
                wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
                weighted = torch.einsum(
                    "b...,b->...", wide.square(), sign[start : start + rows].to(wide)
                )
                add_squares(squares, {name: weighted if diagonal else weighted.sum()})
    return squares


def _sample_gradients(
    problem: Problem, leaves: dict[str, Tensor], names: list[str]
) -> Callable[[Batch, Tensor], dict[str, Tensor]]:
    """(samples, signals (b, …)) ↦ J_iᵀ s_i of every sample (b, …) by parameter: by vmap where
    the model takes it.
    """
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
            singles = (take(part, slice(i, i + 1)) for i in range(part.size))
            each = [one(single, signal) for single, signal in zip(singles, signals, strict=True)]
            return {
                name: torch.stack(parts)
                for name, parts in zip(names, zip(*each, strict=True), strict=True)
            }

    return gradients
