"""Traces and diagonals of Gauss–Newton matrices and Hessians in closed form, layer by layer.

With M_i = Σ_k c_ik s_ik s_ikᵀ at the output, tr (1/n) Σ_i J_iᵀM_iJ_i = (1/n) Σ_ik c_ik ‖J_iᵀ
s_ik‖². For a linear layer J_iᵀ s_ik is the outer product of the signal δ that comes back and the
input a, of squared norm ‖δ‖²‖a‖²: no per-sample gradient is formed. Convolutions and batch-norm in
eval mode have similar forms; other parameters go through per-sample gradients. All of it holds
where samples do not mix, in the model and in the loss; where they do, there are no factors. The
Hessian has besides what smooth activations add (``residuals.py``).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap

from lambdahat._core.device import pull_back
from lambdahat._core.progress import report
from lambdahat._core.rng import generator
from lambdahat.operators import linearise
from lambdahat.operators.exact import layer_squares, validity
from lambdahat.operators.exact.layer_squares import (
    Form,
    Part,
    Squares,
    Trusted,
    pull_squares,
    trace_layers,
)
from lambdahat.operators.exact.residuals import Residuals, SampledResiduals, verify
from lambdahat.operators.exact.validity import (
    Factors,
    Few,
    Kinks,
    ModelForm,
    form_of,
    no_form,
    separate_output,
)
from lambdahat.operators.linearise import Leaves, twice_differentiable
from lambdahat.problem import Problem
from lambdahat.problem.batches import Batch, free_memory, rows_of, take
from lambdahat.problem.memory import PASS
from lambdahat.results import Estimate, Status, student_quantile

CHUNK = {"cpu": 512, "cuda": 8192}  # samples sent through together at the most
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
MOST_COLUMNS = 1024  # signals of smooth activations, beyond which there is no closed form

# looks at each part of the data, and may add to the squares of its parameters
Extra = Callable[[Part], Squares]


class ClosedForm:
    """Trace and diagonal of (1/n) Σ_i J_iᵀ M_i J_i without products, where they have a closed form.

    ``kind`` of M is that of ``exact_factors``. What it takes is found when it is asked for.
    """

    def __init__(self, problem: Problem, kind: str, samples: int = 1, seed: int = 0) -> None:
        self.problem, self._kind = problem, (kind, samples, seed)
        # about how much each sample adds where no unit is dead, and how near it is to a kink by
        # rounding (``Kinks``), if they are many
        self.lengths: list[Tensor] = []
        self.margins: list[Tensor] = []
        # what each sample of this rank added to the last trace, and its size, (2, n) in float64
        self.by_sample: Tensor | None = None

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
        found = validity.trusted_layers(self.few)
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
        if not isinstance(self.few.output, Tensor):
            return validity.not_one_tensor(self.few.output)
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

    def sums(self, diagonal: bool = False, extra: Extra | None = None) -> Tensor | None:
        """The diagonal (P,) in float64 or its sum over each parameter, and what ``extra`` adds."""
        if self.factors is None:
            return None
        form: Form = "diagonal" if diagonal else "samples"
        sizes = [leaf.numel() if diagonal else 1 for leaf in self.leaves.values()]
        total = torch.zeros(sum(sizes), dtype=torch.float64, device=self.problem.device)
        seen: list[Tensor] = []
        try:
            for batch, share, squares in self._squares(self.factors, form, extra):
                if not squares:
                    continue
                if diagonal:
                    pairs = zip(self.leaves, sizes, strict=True)
                    parts = [
                        squares[name].reshape(-1) if name in squares else total.new_zeros(size)
                        for name, size in pairs
                    ]
                    total.add_(torch.cat(parts), alpha=share)
                    continue
                rows = self._rows(squares, batch)
                total.add_(rows.sum(dim=1, dtype=torch.float64), alpha=share)
                if self.problem.reduced:
                    added = rows.sum(dim=0, dtype=torch.float64)
                    seen.append(share * torch.stack([added, torch.linalg.vector_norm(rows, dim=0)]))
        except linearise.CoupledLoss:
            self.factors = None  # the few samples of the checks did not show it
        ranks, device = self.problem.ranks, self.problem.device
        if not ranks.least(float(self.factors is not None), "a look at all losses", device):
            self.factors = None
            return None
        self.by_sample = torch.cat(seen, dim=1) if seen else None
        return ranks.sum(total, "the squares of a trace")

    def sums_by_sample(self, factors: Factors, extra: Extra | None = None) -> Tensor:
        """The sums over each parameter of what each sample adds, (L, n) in float64."""
        parts = [
            share * self._rows(squares, batch).double()
            for batch, share, squares in self._squares(factors, "samples", extra)
        ]
        return torch.cat(parts, dim=1)

    def _rows(self, squares: Squares, batch: Batch) -> Tensor:
        """The squares of all parameters, (L, B)."""
        rows = [
            squares[name] if name in squares else torch.zeros(batch.size, device=leaf.device)
            for name, leaf in self.leaves.items()
        ]
        return torch.stack(rows)

    def random_signals(self, seed: int, rounds: range) -> Factors:
        """One random signal a round in the place of all factors: s = Ru, R Rᵀ = M, u normal.

        Not random signs: a sample that is torn between two classes would add 0 or twice its share,
        and where it makes up the trace a few equal rounds would show no spread at all. Samples draw
        from one stream, in their order.
        """
        loss = self.problem.loss_function
        assert loss is not None
        stream = generator(seed, "sampled trace", rounds.start, self.problem.ranks.rank)

        def draw(problem: Problem, output: Tensor, batch: Batch) -> tuple[Tensor, None]:
            shape = (len(output), len(rounds), *output.shape[1:])
            normal = torch.randn(shape, generator=stream).transpose(0, 1).to(output)
            return loss.root_product(output, problem.target(batch), normal), None

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
                for batch, share, squares in self._squares(factors, "rounds", added):
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

    def _squares(
        self, factors: Factors, form: Form, extra: Extra | None
    ) -> Iterator[tuple[Batch, float, Squares]]:
        """The parts of the data with the weight of a sample and Σ_ik c_ik (J_iᵀ s_ik)² of each
        parameter.
        """
        problem, leaves, trusted = self.problem, self.leaves, self.trusted
        kind = problem.device.type if problem.device.type in CHUNK else "cpu"
        # bytes for signals, and again for what is formed of them: at most those of a pass
        signal = factors.count * trusted.width * problem.dtype.itemsize
        room, chunk = layer_squares.SIGNAL_BYTES, layer_squares.part_bytes(problem.device)
        if problem.memory is not None:
            room = min(room, int(PASS * problem.memory))
        elif kind == "cuda" and signal * problem.num_samples > chunk:
            # a part for each few samples would leave a large GPU waiting for launches
            room = chunk = max(room, free_memory(problem.device) // MEMORY_PARTS)
        # samples that are sent through together, by what their signals take
        most = max(1, min(CHUNK[kind], min(chunk, room) // max(1, signal)))
        # with a budget of memory there is no comparison
        weighed = problem.reduced and problem.memory is None
        weighed = weighed and problem.num_samples > COMPARED_WHOLE
        self.lengths, self.margins = [], []
        done, total_samples = 0, problem.num_samples if problem.ranks.size == 1 else None
        with twice_differentiable():
            for batch, share in _parts(problem, factors, most):
                squares: Squares = {}
                kinks = Kinks(batch.size, problem.device)
                watch: Any = kinks if weighed else nullcontext()
                if trusted.names or extra is not None:
                    with watch:
                        part = trace_layers(problem, leaves, batch, trusted, share, room)
                    # parameters that enter once, through a layer with a closed form
                    if factors.count and part.layered:
                        signals, signs = factors.make(problem, part.output.detach(), batch)
                        if weighed:
                            self.lengths.append(share * _sample_lengths(signals, part))
                        squares = pull_squares([part.output], [signals], signs, part, form)
                    if extra is not None and not part.straight:
                        squares = layer_squares.add(squares, extra(part))
                    watch = nullcontext()
                rest = [name for name in leaves if name not in squares] if factors.count else []
                if rest:
                    with watch, torch.no_grad():
                        output = problem.output(leaves, batch)
                    signals, signs = factors.make(problem, output.detach(), batch)
                    found = _sample_squares(
                        problem, leaves, batch, signals, signs, rest, form, room
                    )
                    squares |= found
                if weighed:
                    self.margins.append(kinks.margins)
                yield batch, share, squares
                done += batch.size
                if batch.size < problem.num_samples:  # or nothing is left to wait for
                    report("closed form", done, total_samples)


def _sample_lengths(signals: Tensor, part: Part) -> Tensor:
    """About Σ_k ‖J_iᵀs_ik‖² of each sample (B,), as if layers kept the lengths of signals: ‖s‖²
    times Σ(1 + ‖a‖²) over the layers' inputs a.
    """
    norm = torch.linalg.vector_norm
    squares = norm(signals.flatten(2), dim=2).double().square().sum(dim=0)
    inputs = [norm(call.entered.flatten(1), dim=1) for call in part.layers.values()]
    lengths: Tensor = squares * (1 + torch.stack(inputs).double().square()).sum(dim=0)
    return lengths


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


def _parts(problem: Problem, factors: Factors, most: int) -> Iterator[tuple[Batch, float]]:
    """The data in parts whose signals fit, each with the weight of a sample."""
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


def _sample_squares(
    problem: Problem,
    leaves: Leaves,
    batch: Batch,
    signals: Tensor,
    signs: Tensor | None,
    names: list[str],
    form: Form,
    room: int,
) -> Squares:
    """The squares of any parameters, from per-sample gradients, a few samples at a time."""
    signs = signals.new_ones(signals.shape[:2]) if signs is None else signs
    gradients = _sample_gradients(problem, leaves, names)
    numbers = sum(leaves[name].numel() for name in names)
    rows = max(1, room // (numbers * signals.element_size()))
    squares: Squares = {}
    for start in range(0, batch.size, rows):
        where = slice(start, start + rows)
        part = take(batch, where)
        for place, (signal, sign) in enumerate(zip(signals, signs, strict=True)):
            for name, tensor in gradients(part, signal[where]).items():
                wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32)).square()
                if form == "diagonal":
                    found = torch.einsum("b...,b->...", wide, sign[where].to(wide))
                    squares = layer_squares.add(squares, {name: found})
                    continue
                each = squares.setdefault(name, wide.new_zeros(signs.shape))
                sums = wide.reshape(len(wide), -1).sum(dim=1)  # a parameter may have no dimensions
                each[place, where] = sums * sign[where].to(wide)
    if form == "samples":
        return {name: each.sum(dim=0) for name, each in squares.items()}
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


class HessianForm:
    """The closed form of ∂²L/∂θ²: that of the Gauss–Newton matrix, and what activations add."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.gauss_newton = problem, ClosedForm(problem, "hessian")
        # what each sample of this rank added to the last trace, and its size, (2, n) in float64
        self.by_sample: Tensor | None = None

    @cached_property
    def form(self) -> ModelForm:
        """What prevents a closed form of the diagonal, and the signals it takes."""
        if self.problem.loss_function is None:
            return no_form("the problem has no separate model output")
        gauss_newton, few = self.gauss_newton, self.gauss_newton.few
        form = form_of(few)
        if form.refused:
            gauss_newton.forget()
        # without one there is nothing to guard
        if form.refused or not form.bends or not gauss_newton.trace_by:
            return ModelForm(form.curved, form.refused)
        if not few.plain:
            few.mixed(twice=True)  # before what does with less
        return verify(form, few, gauss_newton.trusted)

    @property
    def trace_by(self) -> str:
        """How the trace is found: in "closed form", by "rounds" of random signals, or "" if not."""
        if self.form.refused:
            return ""
        many = self.form.columns > MANY_COLUMNS
        return "rounds" if many and self.gauss_newton.trace_by else self.gauss_newton.trace_by

    @property
    def closed_diagonal(self) -> bool:
        """Whether the diagonal is known without products."""
        few = not self.form.refused and self.form.columns <= MOST_COLUMNS
        return few and self.gauss_newton.factors is not None

    def why_not(self) -> str:
        """Why there is no closed form, where that is known."""
        if self.form.refused or self.form.columns <= MOST_COLUMNS:
            return self.form.refused or self.gauss_newton.why_not()
        return f"{self.form.curved}, which takes {self.form.columns} signals a sample"

    def like(self, problem: Problem) -> HessianForm:
        """The form of the same model and loss on other data or in another precision, unchecked."""
        other = HessianForm(problem)
        other.gauss_newton, other.form = self.gauss_newton.like(problem), self.form
        return other

    def sums(self, diagonal: bool = False) -> Tensor | None:
        """The diagonal (P,) in float64, or its sum over each parameter; None without a form."""
        if not self.closed_diagonal:
            return None
        gauss_newton = self.gauss_newton
        form: Form = "diagonal" if diagonal else "samples"
        extra = Residuals(self.problem, gauss_newton.leaves, form)
        sums = gauss_newton.sums(diagonal, extra)
        # the Gauss–Newton matrix may be asked for its own trace
        self.by_sample, gauss_newton.by_sample = gauss_newton.by_sample, None
        return None if self._differs(extra) else sums

    def sums_by_sample(self, factors: Factors) -> Tensor:
        """The sums over each parameter of what each sample adds, (L, n) in float64."""
        extra = Residuals(self.problem, self.gauss_newton.leaves)
        sums = self.gauss_newton.sums_by_sample(factors, extra)
        if self._differs(extra):
            raise ValueError("the closed form does not hold on these samples")
        return sums

    def sample(self, tol: float, seed: int, limit: int | None = None) -> Estimate | None:
        """The trace by random signals, where all would be too many."""
        if self.trace_by != "rounds":
            return None
        gauss_newton, seen = self.gauss_newton, list[Residuals]()

        def signs(rounds: range) -> Residuals:
            """Random signs at the activations, in the rounds of those at the output."""
            seen.append(SampledResiduals(self.problem, gauss_newton.leaves, seed, rounds))
            return seen[-1]

        offset, signals = None, math.inf
        if gauss_newton.factors is not None and self.form.columns <= MOST_COLUMNS:
            signals = self.form.columns
            signals += gauss_newton.factors.count if gauss_newton.many else 0
        if not gauss_newton.many:
            base = gauss_newton.sums()
            if base is None:
                return None
            offset = float(base.sum())
        found = gauss_newton.sample(tol, seed, limit, signs, offset, signals)
        return None if found is None or self._differs(*seen) else found

    def _differs(self, *seen: Residuals) -> bool:
        """Whether some data, on any rank, have no closed form; the form is updated."""
        refused = next((extra.refused for extra in seen if extra.refused), "")
        curved = self.form.curved or next((extra.curved for extra in seen if extra.curved), "")
        columns = max(self.form.columns, *(extra.columns for extra in seen))
        flat = self.problem.ranks.least(
            0.0 if refused else 1.0, "a look at all outputs", self.problem.device
        )
        if not flat:
            refused = refused or "an output that another rank saw is curved"
        self.form = ModelForm(curved or refused, refused, columns=columns)
        return bool(refused)
