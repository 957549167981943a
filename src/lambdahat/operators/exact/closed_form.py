"""Traces and diagonals of Gauss–Newton matrices and Hessians in closed form, layer by layer.

With M_i = Σ_k c_ik s_ik s_ikᵀ at the output, tr (1/n) Σ_i J_iᵀM_iJ_i = (1/n) Σ_ik c_ik ‖J_iᵀ
s_ik‖². For a linear layer J_iᵀ s_ik is the outer product of the signal δ that comes back and the
input a, of squared norm ‖δ‖²‖a‖²: no per-sample gradient is formed. Convolutions and batch-norm in
eval mode have similar forms; other parameters go through per-sample gradients. All of it holds
where samples do not mix, in the model and in the loss; where they do, there are no factors.

Where a network is linear, piecewise linear or a product in everything but activations a = φ(z) of
single elements, ∂²ℓ/∂θ_j² has besides the Gauss–Newton term Σ_k Σ_i r_ki (∂z_ki/∂θ_j)², with r_k =
φ''(z_k)·∂ℓ/∂a_k: as much as Gauss–Newton matrices of the "outputs" z_k, with M = diag(r_k). At the
layer z = Wa + b itself the matrix is diag(r), and one linear map further down, z' = Wφ(z) + b, its
diagonal is φ'(z)²·(W∘W)ᵀr: one product for all columns. Below, columns √|r_i|·e_i are sent back one
by one or, in their place, all times normal numbers u: E[(Σ_i u_i √r_i J_ij)²] = Σ_i r_i J_ij², for
r > 0 and r < 0 apart, independent from sample to sample.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.func import grad, vmap

from lambdahat._core.progress import report
from lambdahat._core.pullback import pull_back
from lambdahat._core.rng import generator
from lambdahat.operators import linearise
from lambdahat.operators.exact import layer_squares, validity
from lambdahat.operators.exact.layer_squares import (
    Calls,
    Form,
    LayerCall,
    Squares,
    add_squares,
    names_in,
    owner,
    pull_squares,
)
from lambdahat.operators.exact.validity import Factors, Few, separate_output
from lambdahat.operators.linearise import (
    Leaves,
    kind_of,
    loss_slopes,
    nodes_below,
    twice_differentiable,
)
from lambdahat.problem import Problem
from lambdahat.problem.batches import Batch, free_memory, rows_of, take
from lambdahat.problem.memory import PASS
from lambdahat.results import Estimate, Status, student_quantile

CHUNK = {"cpu": 512, "cuda": 8192}  # samples sent through together at the most …
# … and the signals that come back for them, which a cache should hold
CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 1 << 29}
MEMORY_PARTS = 16  # of a GPU's free memory, one of which the signals may take instead
# rounds of random signals: at first, at most, and those that one forward pass serves
MIN_ROUNDS, MAX_ROUNDS, JOINT_ROUNDS = 16, 256, 16
# rounds that the bound of the spread counts as if one sample makes up the trace, and the degrees of
# freedom of the spread below which no error is believed
PRIOR_ROUNDS, MIN_DOF = 8.0, 15.0
# samples up to which a closed form below float64 is compared with float64 on all of them
COMPARED_WHOLE = 256
# signals sent back for each sample, beyond which it is tried whether sampling takes fewer: those of
# the loss at the output, and those of smooth activations
MANY_FACTORS, MANY_COLUMNS = 32, 128
MOST_SIGNALS = 1024  # that an exact trace takes where sampling it would take more


@dataclass(frozen=True)
class Part:
    """Some of the data after a forward pass: the output with its graph, and the uses of layers.

    ``share`` is the weight of a sample; ``once`` are the uses of layers whose parameters enter
    once, ``layered`` those parameters; ``room`` the bytes that signals may take, if not the usual.
    """

    batch: Batch
    share: float
    output: Tensor
    once: dict[str, LayerCall]
    layered: set[str]
    room: int | None = None


# looks at each part of the data, and may add to the squares of its parameters
Extra = Callable[[Part], Squares]


@dataclass(frozen=True)
class Trusted:
    """The parameters whose layer form was verified, and the numbers all layers give a sample."""

    names: set[str]
    width: int


class ClosedForm:
    """Trace and diagonal of (1/n) Σ_i J_iᵀ M_i J_i without products, where they have a closed form.

    ``kind`` of M is that of ``exact_factors``. What it takes is found when it is asked for.
    """

    def __init__(self, problem: Problem, kind: str, samples: int = 1, seed: int = 0) -> None:
        self.problem, self._kind = problem, (kind, samples, seed)
        # about how much each sample of this rank added to the last trace, if they are many
        self.sample_weights: list[Tensor] = []

    @cached_property
    def leaves(self) -> dict[str, Tensor]:
        """Products have leaves of their own, which are tied to the stream of a CUDA graph."""
        return linearise.leaves_of(self.problem, self.problem.vector)

    @cached_property
    def few(self) -> Few:
        """What the checks look at; it holds a graph, and goes when the last has looked."""
        return validity.few_of(self.problem, self.leaves)

    @cached_property
    def trusted(self) -> Trusted:
        """The parameters that enter through layers with a closed form."""
        found = trusted_layers(self.few)
        del self.few
        return found

    @cached_property
    def factors(self) -> Factors | None:
        """The factors of M_i, where there are such."""
        if self.problem.loss_function is None:
            return None
        found = validity.exact_factors(self.few, *self._kind)
        if found is None:
            del self.few
        return found

    @cached_property
    def many(self) -> bool:
        """Whether factors are so many, or so unknown, that random sums of all may replace them."""
        loss, factors = self.problem.loss_function, self.factors
        if self._kind[0] != "hessian" or loss is None or not loss.likelihood:
            return False
        return factors is None or factors.count > MANY_FACTORS

    @cached_property
    def trace_by(self) -> str:
        """How the trace is found: in "closed form", by "rounds" of random signals, or "" if not."""
        if self.many and (self.factors is not None or separate_output(self.few) is not None):
            return "rounds"
        return "" if self.factors is None else "closed form"

    @property
    def closed_diagonal(self) -> bool:
        """Whether the diagonal is known without products."""
        return self.factors is not None

    def why_not(self) -> str:
        """Why there is no closed form, where that is known."""
        if self.factors is not None or self.problem.loss_function is None:
            return ""
        if self.few.failed:
            return self.few.failed
        mixed = separate_output(self.few) is None
        return "samples mix in the model" if mixed else "the loss has no factors at this output"

    def forget(self) -> None:
        """Let go of what takes memory."""
        for kept in ("few", "leaves"):
            self.__dict__.pop(kept, None)

    def like(self, problem: Problem) -> ClosedForm:
        """The form of the same model and loss on other data or in another precision, unchecked."""
        other = ClosedForm(problem, *self._kind)
        other.factors, other.trusted = self.factors, self.trusted
        return other

    def sums(
        self, diagonal: bool = False, extra: Extra | None = None, only: Batch | None = None
    ) -> Tensor | None:
        """The diagonal (P,) in float64 or its sum over each parameter, and what ``extra`` adds.

        With ``only``, those of the mean loss of one batch.
        """
        if self.factors is None:
            return None
        return self.accumulate(self.factors, diagonal, extra, only)

    def random_signals(self, seed: int, rounds: range) -> Factors:
        """One random signal a round in the place of all factors: s = Ru, R Rᵀ = M, u normal.

        Not random signs: a sample that is torn between two classes would add 0 or twice its share,
        and where it makes up the trace a few equal rounds would show no spread at all. Samples draw
        from one stream, in their order.
        """
        loss = self.problem.loss_function
        assert loss is not None
        stream = generator(seed, "sampled trace", rounds.start, self.problem.ranks.rank)

        def draw(problem: Problem, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
            shape = (len(output), len(rounds), *output.shape[1:])
            normal = torch.randn(shape, generator=stream).transpose(0, 1).to(output)
            found = loss.root_product(output, problem.target(batch), normal)
            return found, found.new_ones(found.shape[:2])

        return Factors(len(rounds), draw)

    def sample(
        self,
        tol: float,
        seed: int,
        limit: int | None = None,
        extra: Callable[[range], Extra] | None = None,
        offset: float | None = None,
        signals: float | None = None,
    ) -> Estimate | None:
        """The trace with one random signal a sample, E[s sᵀ] = M, in rounds over the data.

        ``extra`` makes what is added in some rounds; with an ``offset``, the output's part of the
        trace, that is all. An exact trace takes ``signals`` (default: the factors). None where
        rounds are not needed, or where those still missing are forecast to be more than half as
        many as that. A round counts as a product: it takes a backward pass, and up to
        ``JOINT_ROUNDS`` share a forward pass.
        """
        if offset is None and self.trace_by != "rounds":
            return None
        if signals is None:
            signals = math.inf if self.factors is None else self.factors.count
        most = MAX_ROUNDS if limit is None else max(2, min(limit, MAX_ROUNDS))
        rounds, target = Rounds(self.problem), min(MIN_ROUNDS, most)
        while True:
            for start in range(rounds.count, target, JOINT_ROUNDS):
                report("sampled trace", start, target)
                some, parts = range(start, min(start + JOINT_ROUNDS, target)), []
                factors = self.random_signals(seed, some)
                if offset is not None:
                    factors = replace(factors, count=0)
                added = None if extra is None else extra(some)
                for batch, share, squares in self._squares(factors, "samples", added, None):
                    part = torch.zeros(len(some), batch.size, dtype=torch.float64)
                    part = part.to(self.problem.device)
                    for square in squares.values():
                        part += square
                    parts.append(share * part)
                rounds.add(parts, len(some))
            report("sampled trace", target, target)
            estimate, wanted = rounds.judge(tol, offset or 0.0)
            if estimate.status.ok or target >= most:
                return estimate
            if signals <= min(MOST_SIGNALS, 2 * (wanted - rounds.count)):
                return None
            target = min(most, max(math.ceil(1.1 * wanted), 2 * rounds.count))

    def accumulate(
        self, factors: Factors, diagonal: bool, extra: Extra | None, only: Batch | None = None
    ) -> Tensor:
        """Σ_b (w_b/B) Σ_ik c_ik (J_iᵀ s_ik)² in float64: (P,), or summed over each parameter."""
        leaves = self.leaves
        sizes = [leaf.numel() if diagonal else 1 for leaf in leaves.values()]
        total = torch.zeros(sum(sizes), dtype=torch.float64, device=self.problem.device)
        form: Form = "diagonal" if diagonal else "sums"
        for _, share, squares in self._squares(factors, form, extra, only):
            if squares:
                parts = [
                    squares[name].reshape(-1) if name in squares else total.new_zeros(size)
                    for name, size in zip(leaves, sizes, strict=True)
                ]
                total.add_(torch.cat(parts), alpha=share)
        return self.problem.ranks.sum(total, "the squares of a trace")

    def sums_by_sample(self, factors: Factors) -> Tensor:
        """The sums over each parameter of what each sample adds, (L, n) in float64."""
        parts = [
            share * torch.stack([squares[name] for name in self.leaves]).double().sum(dim=1)
            for _, share, squares in self._squares(factors, "samples", None, None)
        ]
        return torch.cat(parts, dim=1)

    def _squares(
        self, factors: Factors, form: Form, extra: Extra | None, only: Batch | None
    ) -> Iterator[tuple[Batch, float, Squares]]:
        """The parts of the data with the weight of a sample and Σ_ik c_ik (J_iᵀ s_ik)² of each
        parameter.
        """
        problem, leaves, trusted = self.problem, self.leaves, self.trusted
        kind = problem.device.type if problem.device.type in CHUNK else "cpu"
        # bytes for signals, and again for what is formed of them: at most those of a pass
        signal = factors.count * trusted.width * problem.dtype.itemsize
        room, part_bytes = layer_squares.SIGNAL_BYTES, CHUNK_BYTES[kind]
        if problem.memory is not None:
            room = min(room, int(PASS * problem.memory))
        elif kind == "cuda" and signal * problem.num_samples > part_bytes:
            # a part for each few samples would leave a large GPU waiting for launches
            room = part_bytes = max(room, free_memory(problem.device) // MEMORY_PARTS)
        # samples that are sent through together, by what their signals take
        most = max(1, min(CHUNK[kind], min(part_bytes, room) // max(1, signal)))
        self.sample_weights, weighed = [], problem.reduced and problem.num_samples > COMPARED_WHOLE
        done, total_samples = 0, problem.num_samples if problem.ranks.size == 1 else None
        with twice_differentiable():
            for batch, share in _parts(problem, factors, most, only):
                squares: Squares = {}
                if trusted.names or extra is not None:
                    output, calls = layer_squares.record_layers(problem, leaves, batch)
                    once, fit, within = single_uses(leaves, batch, output, calls, trusted.names)
                    # parameters that enter once, through a layer with a closed form
                    if factors.count and within:
                        signals, signs = factors.make(problem, output.detach(), batch)
                        if weighed:
                            self.sample_weights.append(share * _sample_sizes(signals, within))
                        found = pull_squares([output], [signals], signs, within, form, room)
                        squares = {name: square for name, square in found.items() if name in fit}
                    if extra is not None:
                        add_squares(squares, extra(Part(batch, share, output, once, fit, room)))
                rest = [name for name in leaves if name not in squares] if factors.count else []
                if rest:
                    squares |= _sample_squares(problem, leaves, batch, factors, rest, form, room)
                yield batch, share, squares
                if only is None:
                    done += batch.size
                    report("closed form", done, total_samples)


def _sample_sizes(signals: Tensor, calls: dict[str, LayerCall]) -> Tensor:
    """About Σ_k ‖J_iᵀs_ik‖² of each sample (B,), as if layers kept the lengths of signals: ‖s‖²
    times Σ(1 + ‖a‖²) over the layers' inputs a.
    """
    norm = torch.linalg.vector_norm
    lengths = norm(signals.flatten(2), dim=2).double().square().sum(dim=0)
    inputs = [norm(call.entered.flatten(1), dim=1).double() for call in calls.values()]
    sizes: Tensor = lengths * (1 + torch.stack(inputs).square()).sum(dim=0)
    return sizes


class Rounds:
    """The totals of independent rounds, and for each sample the sums of powers of what it added.

    Samples are independent too, so that the variance of the trace is the sum of theirs: a few
    rounds show it with as many degrees of freedom as samples share it (Satterthwaite 1946).
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.count = problem, 0
        self.centre, self.powers = torch.zeros(()), torch.zeros(())

    def add(self, parts: Sequence[Tensor], count: int) -> None:
        """Some more rounds: what samples added, (R, B) for each part of the data."""
        nothing = torch.zeros(count, 0, dtype=torch.float64, device=self.problem.device)
        values = torch.cat([nothing, *parts], dim=1)
        if self.count == 0:
            self.centre, self.powers = values.mean(dim=0), values.new_zeros(3, values.shape[1])
        gaps = values - self.centre
        self.powers += torch.stack([gaps.pow(power).sum(dim=0) for power in (1, 2, 3)])
        self.count += count

    def judge(self, tol: float, offset: float) -> tuple[Estimate, float]:
        """``offset`` plus the mean of the rounds, and how many rounds the tolerance needs.

        The standard error is corrected for skewness, as that of any mean of few values.
        """
        count = self.count
        first, second, third = (self.powers / count).unbind()
        variance = (second - first.square()).clamp(min=0.0)
        skewed = third - 3 * first * second + 2 * first.pow(3)
        means = self.centre + first
        each = [means, variance, skewed, variance.square(), means.square()]
        sums = self.problem.ranks.sum(torch.stack(each).sum(dim=1), "the rounds of a trace")
        total, spread, skew, squared, weight = sums.tolist()
        dof = (count - 1) * max(1.0, spread**2 / squared) if squared > 0 else math.inf
        # If few samples make up the trace, its variance may look small by chance. One of mean m
        # has a variance of at most 2m² under normal signals, and this bound then counts as a few
        # more rounds.
        bound = max(spread, 2 * weight)
        if total:
            prior = PRIOR_ROUNDS * weight / total**2
            spread = (count * spread + prior * bound) / (count + prior)
        skewness = skew / spread**1.5 / math.sqrt(count) if spread > 0 else 0.0
        stderr = math.sqrt(spread / (count - 1)) * (1 + 2 * skewness**2)
        value = offset + total
        # Stopping as soon as the variance happens to be small would bias the value, so the stopping
        # rule uses the mean of the variance and its bound.
        careful = stderr * math.sqrt(max(1.0, (spread + bound) / 2 / spread)) if spread > 0 else 0.0
        ratio = student_quantile(0.95, dof) * careful / (tol * abs(value)) if careful > 0 else 0.0
        close = ratio <= 1 and (dof >= MIN_DOF or stderr == 0)
        status = Status.CONVERGED if close else Status.SAMPLES_SPENT
        return Estimate(value, stderr, count, status, dof), count * ratio**2


def _parts(
    problem: Problem, factors: Factors, most: int, only: Batch | None
) -> Iterator[tuple[Batch, float]]:
    """The data, or one batch, in parts whose signals fit, each with the weight of a sample."""
    loss = problem.loss_function
    assert loss is not None
    count = -1 - problem.ranks.rank
    for weight, batch in problem.share if only is None else [(1.0, only)]:
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
    """Which layers give the gradient of a random mix of the outputs, sample by sample.

    Agreement in numbers guards against what modules do not show: hooks, inputs without the batch
    first. With a mix u_i a layer's form gives Σ_i J_iᵀu_i, and with d_i u_i the signal of sample i
    is d_i times what it was. Both come back in one pass, as factors will: not all of torch's vmap
    rules are right.
    """
    output, leaves = few.output, few.leaves
    width = sum(call.width for found in few.calls.values() for call in found) // few.batch.size
    _, fit, within = single_uses(leaves, few.batch, output, few.calls, None)
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
            alone = pull_back([output], edges, [seeds[1]], retain_graph=True, allow_unused=True)
            scaled = [None if part is None else part.unsqueeze(0) for part in alone]
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for (prefix, call), other in zip(within.items(), scaled, strict=True):
        if other is not None and prefix in mixed.signals:
            delta = mixed.signals[prefix].detach()
            pairs[f"{prefix}."] = (_by_rows(delta, factors[-len(other) :]), other)
            for key, said in layer_squares.gradients(call, delta).items():
                name = layer_squares.full_name(prefix, key)
                if name in mixed.slopes:
                    pairs[name] = (said, mixed.slopes[name].detach())
    if not pairs:
        return Trusted(set(), width)
    own = [pair[0] for pair in pairs.values()]
    slopes = [slope.to(like.dtype) for like, slope in pairs.values()]
    norms = torch._foreach_norm([*torch._foreach_sub(own, slopes), *slopes])
    gaps, sizes = torch.stack(norms).view(2, -1).tolist()  # all read at once
    allowed, rows = linearise.tolerance(few.problem), zip(pairs, gaps, sizes, strict=True)
    close = {name for name, gap, size in rows if gap <= allowed * size}
    return Trusted({name for name in fit if name in close and f"{owner(name)}." in close}, width)


def _by_rows(tensor: Tensor, factors: Tensor) -> Tensor:
    """(K, B, …), of a tensor (B, …) and factors (K, B)."""
    return tensor * factors.to(tensor.dtype).reshape(*factors.shape, *[1] * (tensor.ndim - 1))


def single_uses(
    leaves: Leaves, batch: Batch, output: Tensor, calls: Calls, wanted: set[str] | None
) -> tuple[dict[str, LayerCall], set[str], dict[str, LayerCall]]:
    """The only uses of layers that put the batch first, the parameters used by them alone, and
    their layers' uses.
    """
    # how often each leaf enters the graph of the output, by its id
    below = (child for node in nodes_below([output.grad_fn]) for child, _ in node.next_functions)
    uses = Counter(id(node.variable) for node in below if type(node).__name__ == "AccumulateGrad")
    once = {}
    for prefix, found in calls.items():
        layer, entered = found[0].layer, found[0].entered
        # a layer may take one sample without a dimension for the batch
        own = len(layer.kernel_size) + 1 if isinstance(layer, linearise.CONVOLUTIONS) else 1
        if len(found) == 1 and entered.ndim > own and len(entered) == batch.size:
            once[prefix] = found[0]
    names = set().union(*(names_in(prefix, call.layer, leaves) for prefix, call in once.items()))
    fit = {
        name for name in names if uses[id(leaves[name])] == 1 and (wanted is None or name in wanted)
    }
    owners = {owner(name) for name in fit}
    return once, fit, {prefix: call for prefix, call in once.items() if prefix in owners}


def _sample_squares(
    problem: Problem,
    leaves: Leaves,
    batch: Batch,
    factors: Factors,
    names: list[str],
    form: Form,
    room: int,
) -> Squares:
    """The squares of any parameters, from per-sample gradients, a few samples at a time."""
    with torch.no_grad():
        output = problem.output(leaves, batch)
    signals, signs = factors.make(problem, output.detach(), batch)
    gradients = _sample_gradients(problem, leaves, names)
    numbers = sum(leaves[name].numel() for name in names)
    rows = max(1, room // (numbers * output.element_size()))
    squares: Squares = {}
    for start in range(0, batch.size, rows):
        where = slice(start, start + rows)
        part = take(batch, where)
        for place, (signal, sign) in enumerate(zip(signals, signs, strict=True)):
            for name, tensor in gradients(part, signal[where]).items():
                wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32)).square()
                if form == "samples":
                    each = squares.setdefault(name, wide.new_zeros(signs.shape))
                    each[place, where] = wide.flatten(1).sum(dim=1) * sign[where].to(wide)
                    continue
                found = torch.einsum("b...,b->...", wide, sign[where].to(wide))
                add_squares(squares, {name: found if form == "diagonal" else found.sum()})
    return squares


def _sample_gradients(
    problem: Problem, leaves: Leaves, names: list[str]
) -> Callable[[Batch, Tensor], dict[str, Tensor]]:
    """(samples, signals (b, …)) ↦ J_iᵀ s_i of every sample, by vmap where possible."""
    fixed = {name: leaf.detach() for name, leaf in leaves.items()}
    chosen = {name: fixed[name] for name in names}

    def along(parameters: Leaves, sample: Batch, signal: Tensor) -> Tensor:
        output: Tensor = problem.output({**fixed, **parameters}, sample)
        return (output * signal.unsqueeze(0)).sum()

    def one(sample: Batch, signal: Tensor) -> tuple[Tensor, ...]:
        inputs = [leaves[name] for name in names]
        output = problem.output(leaves, sample)
        return pull_back([output], inputs, [signal.unsqueeze(0)], materialize_grads=True)

    def gradients(part: Batch, signals: Tensor) -> dict[str, Tensor]:
        columns, single = rows_of(part)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="There is a performance drop")
                each_of = vmap(lambda signal, *rows: grad(along)(chosen, single(*rows), signal))
                return each_of(signals, *columns)  # type: ignore[no-any-return]
        except RuntimeError:  # an operation that vmap does not take
            each = [one(take(part, slice(i, i + 1)), signals[i]) for i in range(part.size)]
            stacked = (torch.stack(parts) for parts in zip(*each, strict=True))
            return dict(zip(names, stacked, strict=True))

    return gradients


# Autograd nodes by name. These move elements, or leave some out:
_MOVES = """
    Alias ChannelShuffle Clone Flip Permute PixelShuffle PixelUnshuffle ReshapeAlias Roll Select
    Slice Squeeze T ToCopy Transpose UnsafeView Unsqueeze View"""
# The output depends, element by element, on one element of the only input that is no constant:
_ELEMENTWISE = """
    Abs Add Clamp ClampMax ClampMin Div Hardshrink Hardtanh LeakyRelu MaskedFill Mul Neg Relu
    Rsub Softshrink Sub Threshold"""

MOVES, ELEMENTWISE = frozenset(_MOVES.split()), validity.SMOOTH | frozenset(_ELEMENTWISE.split())


@dataclass(frozen=True)
class Bend:
    """A smooth activation a = φ(z): the edge that z came by, and r = φ''(z)·∂ℓ/∂a (B, …).

    ``near``: diagonals (B, O) of Jᵀdiag(r)J at layers that at most one linear map separates from z.
    ``far``: the layers below, which take the whole matrix.
    """

    edge: GradientEdge
    residual: Tensor
    near: dict[str, Tensor]
    far: tuple[str, ...]

    @property
    def columns(self) -> int:
        """How many signals the far layers take."""
        return self.residual[0].numel() if self.far else 0


@dataclass(eq=False)
class Residuals:
    """Σ_k Σ_i r_ki (∂z_ki/∂θ_j)² for each part of the data that it is called with, exactly.

    It keeps ``curved``, the first smooth activation; ``refused``, why a part has no such form; and
    ``columns``, the largest number of signals for far layers.
    """

    problem: Problem
    leaves: Leaves
    diagonal: bool = False
    curved: str = ""
    refused: str = ""
    columns: int = 0

    def __call__(self, part: Part) -> Squares:
        bends = self.bends(part, lambda: loss_slopes(self.problem, part.output, part.batch)[0])
        return self.squares_of(bends, part) if bends else {}

    def squares_of(self, bends: Sequence[Bend], part: Part) -> Squares:
        """Of these activations, and of the parameters that enter by layers alone."""
        found = [_near_squares(bends, part.once, self.diagonal)]
        found += [_far_squares(bend, part, self.diagonal) for bend in bends if bend.far]
        total: Squares = {}
        for squares in found:
            add_squares(total, {k: square for k, square in squares.items() if k in part.layered})
        return total

    def bends(self, part: Part, slope: Callable[[], Tensor]) -> list[Bend]:
        """The smooth activations of a part, given ∂ℓ/∂z (B, …) at its output; none if refused."""
        form = validity.form_of_graph(self.problem, self.leaves, part.batch, part.output)
        outside = sorted(set(self.leaves) - part.layered) if form.bends else []
        if outside and not form.refused and not self.refused:
            self.refused = (
                f"{form.curved}, and {outside[0]} does not enter once, through a linear,"
                " convolution or batch-norm layer"
            )
        self.curved, self.refused = self.curved or form.curved, self.refused or form.refused
        found = [] if self.refused or not form.bends else list(_bends(form.bends, part, slope()))
        self.columns = max(self.columns, sum(bend.columns for bend in found))
        return found


class SampledResiduals(Residuals):
    """The same of each sample by random signals, as {"": (R, B)} for R rounds."""

    def __init__(self, problem: Problem, leaves: Leaves, seed: int, rounds: range) -> None:
        super().__init__(problem, leaves)
        self.seed, self.rounds = seed, rounds

    def squares_of(self, bends: Sequence[Bend], part: Part) -> Squares:
        """All activations and all columns of a round in two signals, u∘√r₊ and u∘√r₋ with
        independent normal numbers u.
        """
        edges, each = [bend.edge for bend in bends], []
        for index in self.rounds:
            seeds, rng = [], generator(self.seed, "sampled residuals", index, part.batch.index)
            for bend in bends:
                normal = torch.randn(bend.residual.shape, generator=rng).to(bend.residual)
                halves = (bend.residual, -bend.residual)
                root = [half.clamp(min=0).sqrt() * normal for half in halves]
                seeds.append(torch.stack(root))
            signs = seeds[0].new_ones(2, len(bends[0].residual))
            signs[1] = -1.0
            found = pull_squares(edges, seeds, signs, part.once, "samples", part.room)
            own = [square.double() for name, square in found.items() if name in part.layered]
            each.append(torch.stack(own).sum(dim=(0, 1)))
        return {"": torch.stack(each)}


def _bends(nodes: Sequence[Any], part: Part, slope: Tensor) -> Iterator[Bend]:
    tops = [GradientEdge(node, 0) for node in nodes]
    deltas = pull_back([part.output], tops, [slope.to(part.output.dtype)], retain_graph=True)
    lefts = {(call.left.node, call.left.output_nr): prefix for prefix, call in part.once.items()}
    for node, delta in zip(nodes, deltas, strict=True):
        edge = GradientEdge(*node.next_functions[0])
        residual = second_slope(node, delta, edge)
        near, stop = _descend(edge, residual, lefts, part.once)
        below = set(nodes_below([stop]))
        far = tuple(prefix for (left, _), prefix in lefts.items() if left in below)
        yield Bend(edge, residual, near, far)


def second_slope(node: Any, delta: Tensor, edge: GradientEdge) -> Tensor:
    """φ''(z)·δ: the derivative of φ'(z)·δ, which the node computes, with the graph of z."""
    slope = node(delta)
    if not slope.requires_grad:
        return torch.zeros_like(slope)
    (found,) = pull_back(
        [slope], [edge], [torch.ones_like(slope)], retain_graph=True, allow_unused=True
    )
    return torch.zeros_like(slope) if found is None else found


@torch.no_grad()
def _descend(
    edge: GradientEdge,
    residual: Tensor,
    lefts: dict[tuple[Any, int], str],
    once: dict[str, LayerCall],
) -> tuple[dict[str, Tensor], Any]:
    """The diagonal of Jᵀdiag(r)J at the layers where it suffices, and the node below which it does
    not.

    A second linear map on the way down would take the whole matrix.
    """
    q = residual.to(torch.promote_types(residual.dtype, torch.float32))
    near: dict[str, Tensor] = {}
    place, mixed = (edge.node, edge.output_nr), False
    while place[0] is not None:
        prefix = lefts.get(place)
        if prefix is None:
            moved = _through(place[0], q)
            if moved is None:
                return near, place[0]
            place, q = moved
            continue
        call = once[prefix]
        if call.slope is None or q.ndim != 2:
            return near, place[0]
        near[prefix] = q
        if call.came is None:
            return near, None
        place, linear = (call.came.node, call.came.output_nr), isinstance(call.layer, nn.Linear)
        if linear and mixed:
            return near, place[0]
        square = call.slope.to(q.dtype).square()
        q, mixed = (q @ square, True) if linear else (q * square, mixed)
    return near, None


def _through(node: Any, q: Tensor) -> tuple[tuple[Any, int], Tensor] | None:
    """The edge below a node that moves or maps single elements, and the diagonal there."""
    kind, children = kind_of(node), enumerate(node.next_functions)
    inputs = [(index, child) for index, child in children if child[0] is not None]
    if len(inputs) != 1 or not (kind in MOVES or kind in ELEMENTWISE):
        return None
    (index, place), dtype = inputs[0], node._input_metadata[0].dtype
    found = node((q if kind in MOVES else torch.ones_like(q)).to(dtype))
    found = (found[index] if isinstance(found, tuple) else found).to(q.dtype)
    if kind in MOVES:
        return place, found
    return (place, q * found.square()) if found.shape == q.shape else None


def _near_squares(bends: Sequence[Bend], once: dict[str, LayerCall], diagonal: bool) -> Squares:
    """From the diagonals at the layers' outputs, of all activations together."""
    total: dict[str, Tensor] = {}
    for bend in bends:
        for prefix, q in bend.near.items():
            total[prefix] = total[prefix] + q if prefix in total else q
    squares: Squares = {}
    for prefix, q in total.items():
        entered = once[prefix].entered.to(q.dtype)
        if isinstance(once[prefix].layer, nn.Linear):
            found = layer_squares.one_position(entered, q, diagonal)
        else:
            found = {"weight": (q * entered.square()).sum(dim=0), "bias": q.sum(dim=0)}
            found = found if diagonal else {key: square.sum() for key, square in found.items()}
        squares |= {layer_squares.full_name(prefix, key): square for key, square in found.items()}
    return squares


def _far_squares(bend: Bend, part: Part, diagonal: bool) -> Squares:
    """By one signal √|r_i|·e_i a column, as many at a time as the budget allows."""
    flat = bend.residual.flatten(1)
    size, width = flat.shape
    root, sign = flat.abs().sqrt(), flat.sign()
    room = min(CHUNK_BYTES.get(flat.device.type, CHUNK_BYTES["cpu"]), part.room or math.inf)
    step = int(max(1, min(width, room // max(1, flat.numel() * flat.element_size()))))
    calls = {prefix: part.once[prefix] for prefix in bend.far}
    squares: Squares = {}
    for start in range(0, width, step):
        where = torch.arange(start, min(start + step, width), device=flat.device)
        seeds = flat.new_zeros(len(where), size, width)
        seeds[torch.arange(len(where), device=flat.device), :, where] = root[:, where].T
        seeds = seeds.reshape(-1, *bend.residual.shape)
        form: Form = "diagonal" if diagonal else "sums"
        found = pull_squares([bend.edge], [seeds], sign[:, where].T, calls, form, part.room)
        add_squares(squares, found)
    return squares
