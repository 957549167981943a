"""How far the products of a model in reduced precision are from those in float64.

A product goes through the forward and the backward passes of the model, and the rounding in there
can be far above that of the dtype: sums of large terms that cancel, normalisation of inputs with a
large mean, activations near a kink. No spread of an estimator shows it, for it is nearly the same
in all products. So a few products are made again in float64.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lambdahat._core.device import OperationWatch, default_context, pull_back
from lambdahat._core.rng import generator
from lambdahat.operators.base import LinearOperator, Normalised
from lambdahat.operators.curvature import Covariance, Curvature, Hessian
from lambdahat.operators.exact import COMPARED_WHOLE, HessianForm
from lambdahat.operators.exact.validity import Kinks
from lambdahat.operators.linearise import hessian_map, loss_slopes, twice_differentiable
from lambdahat.problem import Problem
from lambdahat.problem.batches import FITS, Batch, Batches, free_memory, rng_untouched, take
from lambdahat.problem.losses import NAMED
from lambdahat.results import NORMAL_QUANTILE, Estimate, Status

# samples on which products are compared; of larger data sets, those that weigh most and, for the
# rest, others drawn at random
FEW, MANY = 256, 4096
WEIGHTIEST = 0.25  # share of the first among them
# into which the others are cut, to tell errors that all samples share from those that average out
PARTS = 4
PERTURBED = 2.0  # roundings of the parameters that show which samples depend on them
WIDE = 1 << 24  # entries of an output up to which it is taken in float64
DRAWS = 4  # random vectors that show how curved the loss is at each output
# samples that a trace in closed form is compared on: those that add most, those nearest to a kink,
# and random ones of all others within rounding of a kink, and of the rest
LEADING, NEAREST, SUSPECTS, OTHERS = 48, 24, 24, 32
LONGER = 3.0  # by how much the sums over all samples may err more than those over the samples drawn
SPARSE = 8  # rows below which the root mean square of a parameter's rows may be near 0 by chance
# random vectors: a single one may all but miss an error that is in few directions
RANDOM = 3
VECTORS = 20  # of float64 that a comparison takes
MEMORY_SHARE = 0.25


@dataclass(frozen=True)
class RoundedProduct:
    """For the error E of A at a unit vector x: ``error`` ‖Ex‖, ``form`` |xᵀEx|, ``size`` ‖Ax‖."""

    error: float
    form: float
    size: float


@dataclass(frozen=True)
class Rounding:
    """The errors E of an operator A on ``random`` unit vectors z, and on one near ``leading`` ones.

    By named parameter, or for all rows: ``rows``, the root mean square of √P·Ez, which is the norm
    of a row of E, and of Ev at least; ``row_sizes``, the same of A; ``lengths``, the numbers of
    rows.
    """

    dim: int
    random: RoundedProduct
    leading: RoundedProduct
    rows: tuple[float, ...]
    row_sizes: tuple[float, ...]
    lengths: tuple[int, ...]

    @property
    def frobenius(self) -> float:
        """About ‖E‖_F."""
        return max(math.sqrt(self.dim) * self.random.error, self.leading.error)

    @property
    def size(self) -> float:
        """About ‖A‖_F."""
        return max(math.sqrt(self.dim) * self.random.size, self.leading.size)

    @property
    def trace(self) -> float:
        """About |tr E|: P·zᵀEz, which has the standard deviation √2·‖E‖_F."""
        return math.hypot(self.dim * self.random.form, math.sqrt(2.0) * self.frobenius)

    @property
    def relative(self) -> float:
        """‖Ev‖ over ‖Av‖."""
        return self.leading.error / self.leading.size if self.leading.size > 0 else 0.0

    def scaled(self, factor: float) -> Rounding:
        """That of a multiple of the operator."""
        rows, sizes = (tuple(factor * row for row in part) for part in (self.rows, self.row_sizes))
        random, leading = (
            RoundedProduct(factor * each.error, factor * each.form, factor * each.size)
            for each in (self.random, self.leading)
        )
        return Rounding(self.dim, random, leading, rows, sizes, self.lengths)

    def row_norms(self) -> tuple[Tensor, Tensor]:
        """The norms of the rows of E and of A, (P,) each, constant within a parameter."""
        lengths, both = torch.tensor(self.lengths), (self.rows, self.row_sizes)
        errors, sizes = (torch.tensor(part, dtype=torch.float64) for part in both)
        return errors.repeat_interleave(lengths), sizes.repeat_interleave(lengths)


def rounding_of(operator: LinearOperator, samples: int = FEW) -> Rounding | None:
    """The rounding of an operator's products; None if exact by definition, or without memory.

    A matrix is what its entries say. Models below float64 are compared with float64 on at most so
    many samples, by four products in each precision, once per operator. Finite differences in
    float64 are compared with those of a longer step.
    """
    if isinstance(operator, Normalised):
        inner = rounding_of(operator.inner, samples)
        return None if inner is None else inner.scaled(math.ldexp(1.0, -operator.exponent))
    kept: dict[int, Rounding | None] = vars(operator).setdefault("_roundings", {})
    known = [count for count in kept if count >= samples]
    if known:
        return kept[known[0]]
    comparison = PrecisionComparison.of(operator, samples)
    if comparison is None:
        return None  # maybe no product was made yet
    kept[samples] = _measure(operator, comparison)
    return kept[samples]


def with_rounding(estimate: Estimate, error: float | Tensor, allowed: float) -> Estimate:
    """An estimate with the rounding ``error`` in its standard error; PRECISION_LIMIT if that takes
    more than half of the ``allowed`` half-width.
    """
    before = estimate.stderr
    if isinstance(before, Tensor):
        error = torch.as_tensor(error, dtype=torch.float64, device=before.device)
        total: float | Tensor = torch.hypot(before.double(), error)
        share = float(before.norm()) / max(float(torch.as_tensor(total).norm()), 1e-300)
        size = float(error.norm())
    else:
        size, total = float(error), math.hypot(float(before), float(error))
        share = float(before) / total if total > 0 else 1.0
    # a share so small that its power would leave the range
    dof = math.inf if share < 1e-60 or math.isinf(estimate.dof) else estimate.dof / share**4
    rules = size > 0 and 2 * NORMAL_QUANTILE * size > allowed
    status = Status.PRECISION_LIMIT if rules else estimate.status
    return replace(estimate, stderr=total, dof=dof, status=status)


def closed_form_rounding(
    operator: LinearOperator, sampled: bool = False
) -> tuple[float, float] | None:
    """About |tr E| of a trace in closed form, and a lower bound of ‖A‖_F; None where neither is
    known, or nothing is rounded.

    Of a ``sampled`` trace one round is evaluated in their place, with the same random signals.

    What samples added to the trace is compared with the closed form in float64: of all samples if
    they are few, and otherwise of those that add most or lie nearest to a kink, whose errors count
    as they are, and of random ones of the others, whose mean stands for the rest with its standard
    error; those within rounding of a kink are sampled apart. Traces of large logits are made by few
    samples, which a random part would miss; a sample whose units are dead by rounding alone adds
    nothing, but would if they were not, and counts by that too.
    """
    if not isinstance(operator, Curvature):
        return None
    if isinstance(operator, Covariance) and operator.centred:
        return None  # what is subtracted is rounded too
    if not operator.problem.reduced or not _fits(operator):
        return None
    kept: dict[bool, tuple[float, float]] = vars(operator).setdefault("_closed_form_rounding", {})
    if sampled in kept:
        return kept[sampled]
    problem, form = operator.problem.alone(), operator.exact
    gauss_newton = form.gauss_newton if isinstance(form, HessianForm) else form
    # what activations add is not sampled in this way
    curved = isinstance(form, HessianForm) and bool(form.form.curved)
    if curved if sampled else operator.closed_sums is None:
        return None
    factors, added = gauss_newton.factors, None if sampled else form.by_sample
    if added is not None and added.shape[1] < problem.num_samples:
        added = None  # other ranks have the rest
    few, share, parts = problem, 1.0, [(problem.num_samples, problem.num_samples)]
    chosen: Tensor | None = None
    if problem.num_samples > COMPARED_WHOLE:
        ranked = [] if added is None else [added[1]]
        if sum(map(len, gauss_newton.lengths)) == problem.num_samples:
            ranked.append(torch.cat(gauss_newton.lengths))
        margins = torch.cat([*gauss_newton.margins, torch.zeros(0, device=problem.device)])
        chosen, parts = choose_samples(problem, ranked, margins)
        few, share = problem.on_samples(chosen)

    if factors is None or not factors.parts:
        added = None  # factors depend on what other samples are there

    def sums(of: Problem) -> Tensor:
        """The sums over each parameter of what each sample adds, (L, samples)."""
        same = gauss_newton.like(of)
        factors = same.random_signals(0, range(1)) if sampled else same.factors
        assert factors is not None
        return share * form.like(of).sums_by_sample(factors)

    with rng_untouched(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            double = run_in_double(few, sums)
            if added is None:
                own = sums(few).sum(dim=0)
            else:
                own = added[0] if chosen is None else added[0, chosen]
        except (ValueError, torch.OutOfMemoryError):
            return None
    # by part, what each parameter adds, the error and its square: read at once, for which a GPU is
    # waited for
    gaps = own - double.sum(dim=0)
    numbers = torch.cat([double, gaps[None], gaps[None].square()]).split([n for n, _ in parts], 1)
    sums_of_parts = torch.stack([part.sum(dim=1) for part in numbers]).tolist()
    traces = [0.0] * len(double)
    for (count, stands_for), (*columns, _, _) in zip(parts, sums_of_parts, strict=True):
        times = stands_for / max(count, 1)
        traces = [trace + times * column for trace, column in zip(traces, columns, strict=True)]
    error = error_of_sum(parts, [part[-2:] for part in sums_of_parts])
    # no more than the diagonal's norm
    lengths = map(math.prod, problem.space.shapes)
    size = math.sqrt(sum(x * x / length for x, length in zip(traces, lengths, strict=True)))
    # errors may cancel by chance
    error = max(error, torch.finfo(operator.dtype).eps * sum(map(abs, traces)))
    if not (math.isfinite(error) and math.isfinite(size)):
        return None
    kept[sampled] = (error, size)
    return error, size


def error_of_sum(parts: Sequence[tuple[int, int]], gaps: Sequence[Sequence[float]]) -> float:
    """About how far a sum over all samples is off, from the sum and the sum of squares of the
    errors in each part, as ``choose_samples`` gives them.
    """
    error = variance = 0.0
    for (count, stands_for), (gap, square) in zip(parts, gaps, strict=True):
        error += stands_for / max(count, 1) * gap
        if stands_for > count > 1:
            spread = max(0.0, square - gap * gap / count) / (count - 1)
            variance += stands_for * (stands_for - count) / count * spread
    return abs(error) if len(parts) == 1 else LONGER * math.hypot(error, math.sqrt(variance))


def choose_samples(
    problem: Problem, sizes: Sequence[Tensor], margins: Tensor
) -> tuple[Tensor, list[tuple[int, int]]]:
    """The samples to compare, in parts: how many each has, and how many of the data it stands for.

    The first part stands for itself: what adds most by any of the ``sizes``, and the samples of the
    least ``margins`` from a kink.
    """
    stream = generator(0, "rounding", device=problem.device)
    order = torch.rand(problem.num_samples, generator=stream, device=problem.device)
    suspect = torch.zeros_like(order, dtype=torch.bool)
    if len(margins) == problem.num_samples:
        nearest = margins.topk(NEAREST, largest=False).indices
        suspect = margins < 1
        order[nearest[margins[nearest].isfinite()]] = 2.0
    if sizes:
        order[_lead(torch.stack(list(sizes)), LEADING)] = 2.0
    sure = order == 2.0
    strata = (sure, len(order)), (suspect & ~sure, SUSPECTS), (~suspect & ~sure, OTHERS)
    places = [part.nonzero()[:, 0] for part, _ in strata]
    drawn = [
        where[order[where].topk(min(most, len(where))).indices]
        for where, (_, most) in zip(places, strata, strict=True)
    ]
    return torch.cat(drawn), [(len(x), len(y)) for x, y in zip(drawn, places, strict=True)]


def _lead(sizes: Tensor, count: int) -> Tensor:
    """The samples that come first in any row of sizes (k, n), (count,).

    Not by sorting all of them, for which a GPU starts thirty kernels.
    """
    places = sizes.topk(count, dim=1).indices
    ranks = torch.arange(count, device=sizes.device).expand_as(places)
    first = ranks.new_full((sizes.shape[1],), count)
    first.scatter_reduce_(0, places.flatten(), ranks.flatten(), "amin")
    # of two that come first alike the one before
    keys = first * len(first) + torch.arange(len(first), device=sizes.device)
    return keys.topk(count, largest=False).indices


def errors_of(operator: LinearOperator, vector: Tensor) -> Tensor | None:
    """E·v (P,) in float64, from at most 4,096 samples; None as in ``rounding_of``."""
    comparison = PrecisionComparison.of(operator, MANY)
    return None if comparison is None else comparison.multiply(vector[:, None])[1][:, 0]


def _measure(operator: LinearOperator, comparison: PrecisionComparison) -> Rounding | None:
    shape, stream = (RANDOM, operator.dim), generator(0, "rounding")
    draw = torch.randn(shape, generator=stream, dtype=torch.float32).T
    z = (draw / torch.linalg.vector_norm(draw, dim=0)).to(operator.device)
    image, error = comparison.multiply(z)
    v, image_v, error_v = z[:, :1], image[:, :1], error[:, :1]
    size = torch.linalg.vector_norm(image_v)
    if 0 < float(size) < math.inf:  # the product turns z towards the leading eigenvectors
        v = (image_v / size).to(operator.dtype)
        image_v, error_v = comparison.multiply(v)
    lengths = (
        (operator.dim,) if operator.space is None else tuple(map(math.prod, operator.space.shapes))
    )
    root = math.sqrt(operator.dim)
    # a row is as long as it is along v, which z may all but miss
    rows, sizes = (
        tuple(
            max(root * float(a.square().mean().sqrt()), float(b.square().mean().sqrt()))
            for a, b in zip(by_z.split(lengths), by_v.split(lengths), strict=True)
        )
        for by_z, by_v in ((error, error_v), (image, image_v))
    )
    # A closed form adds up other terms than a product, in another order: neither is known better
    # than to the last digit, however close this product comes.
    eps = torch.finfo(operator.dtype).eps
    rows = tuple(max(row, eps * size) for row, size in zip(rows, sizes, strict=True))
    # One reading can be 0 by chance, so that errors of parameters with few rows are raised to what
    # is usual in this operator: the relative error of all rows, and the rounding of a row of the
    # usual size, for entries that cancel are made of such.
    whole, total = (
        sum(n * each**2 for each, n in zip(part, lengths, strict=True)) for part in (sizes, rows)
    )
    if whole > 0:
        relative = math.sqrt(total / whole)
        usual = eps * math.sqrt(whole / sum(lengths))
        rows = tuple(
            max(row, relative * size, usual) if n < SPARSE else row
            for row, size, n in zip(rows, sizes, lengths, strict=True)
        )
    # root mean squares over the vectors, and the mean of the forms
    random, leading = (
        RoundedProduct(
            max(float(e.norm()), eps * float(y.norm())) / math.sqrt(x.shape[1]),
            float((x.double() * e).sum().abs()) / x.shape[1],
            float(y.norm()) / math.sqrt(x.shape[1]),
        )
        for x, y, e in ((z, image, error), (v, image_v, error_v))
    )
    finite = all(map(math.isfinite, (random.error, random.size, leading.error, leading.size)))
    return Rounding(operator.dim, random, leading, rows, sizes, lengths) if finite else None


@dataclass(frozen=True)
class _Twins:
    """Two operators of the same samples: in the model's own precision, and in float64.

    Their batches are ``parts`` of a ``copies``-th of the data; 0 parts where they are all samples.
    The first has a ``share`` of the loss to itself unless that is 0, and the others stand for the
    rest.
    """

    own: Curvature
    double: Curvature
    parts: int
    copies: float
    share: float


class PrecisionComparison:
    """Products of an operator in its own precision and with its models in float64."""

    def __init__(self, operator: LinearOperator, models: list[Curvature], samples: int) -> None:
        self.operator = operator
        self._twins = [(model, _twins_of(model, samples)) for model in models]
        # parts of several models are multiplied together, so that they must mean the same
        if len({(twins.parts, twins.share) for _, twins in self._twins}) > 1:
            self._twins = [(model, _twins_of(model, samples, False)) for model in models]

    @classmethod
    def of(cls, operator: LinearOperator, samples: int) -> PrecisionComparison | None:
        """None if all models are exact in float64, or without the memory to compare."""
        curvatures = [part for part in _parts_of(operator) if isinstance(part, Curvature)]
        models = [model for model in curvatures if model.problem.reduced or _is_finite(model)]
        if not models:
            return None
        if not all(map(_fits, models)):
            return None
        with default_context(), rng_untouched(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return cls(operator, models, samples)
            except torch.OutOfMemoryError:
                return None if samples <= FEW else cls.of(operator, FEW)

    def multiply(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """A·block and its error, both (P, k) in float64.

        Errors e_b of sampled parts have a shared mean and a spread that averages out: ‖e‖² is about
        Σ_{b≠c} e_b·e_c/(s(s−1)) + spread/N for N parts in all. The error of the samples that weigh
        most counts as it is beside those. The sum gets the norm so found, times what longer sums
        may add.
        """
        block = block.to(self.operator.dtype)
        count = max(1, *(twins.parts for _, twins in self._twins))
        with default_context(), rng_untouched(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            own = [self._product(block, part, double=False) for part in range(count)]
            try:
                doubles = [self._product(block, part, double=True) for part in range(count)]
            except torch.OutOfMemoryError:
                raise
            except Exception:  # whatever a model raises whose second derivatives are in float32
                for place, (model, twins) in enumerate(self._twins):
                    moved = _perturb_all(twins.own.problem.alone())
                    self._twins[place] = (model, replace(twins, double=model.like(moved)))
                doubles = [self._product(block, part, double=True) for part in range(count)]
        share = self._twins[0][1].share
        images, errors = torch.stack(doubles), torch.stack(own) - torch.stack(doubles)
        if count == 1:
            return images[0], errors[0]
        first, rest = (1, count - 1) if share > 0 else (0, count)
        leading = share * errors[:first].sum(dim=0)
        image = share * images[:first].sum(dim=0) + (1 - share) * images[first:].mean(dim=0)
        errors = (1 - share) * errors[first:]
        mean = errors.mean(dim=0)
        squares = errors.square().sum(dim=(0, 1))
        shared = ((rest * mean).square().sum(dim=0) - squares).clamp_min(0.0) / (rest * (rest - 1))
        spread = (squares / rest - shared).clamp_min(0.0)
        copies = min(twins.copies for _, twins in self._twins)
        others = shared + spread / (rest * copies)
        # in the direction of ``mean``, of the length that the sum over all others may have
        mean = mean * (others.sqrt() / mean.norm(dim=0).clamp_min(1e-300))
        error = leading + mean
        size = LONGER * (leading.square().sum(dim=0) + others).sqrt()
        # sums over all are longer
        size = size.maximum(torch.finfo(self.operator.dtype).eps * image.norm(dim=0))
        norm = error.norm(dim=0)
        return image, error * torch.where(norm > 0, size / norm.clamp_min(1e-300), 0.0)

    def _product(self, block: Tensor, part: int, double: bool) -> Tensor:
        """By the twins of the models, on one part of the samples; it is not counted."""
        counted = {id(each): (each, each.matvecs) for each in _parts_of(self.operator)}
        try:
            for model, twins in self._twins:
                twin = twins.double if double else twins.own
                only = part % twins.parts if twins.parts else None
                model.stand_in = None if twin is model else (twin, only)
            return self.operator._apply(block).double()
        finally:
            for model, _ in self._twins:
                model.stand_in = None
            for each, before in counted.values():
                each.matvecs = before


def _parts_of(operator: LinearOperator) -> list[LinearOperator]:
    """The operator and all that it is made of."""
    found: dict[int, LinearOperator] = {}
    left = [operator]
    while left:
        each = left.pop()
        if id(each) in found:
            continue
        found[id(each)] = each
        # a curvature multiplies by its own graphs alone; the Gauss–Newton matrix that a Hessian
        # keeps for its closed forms is no part of its products
        for value in () if isinstance(each, Curvature) else vars(each).values():
            inner = value.values() if isinstance(value, dict) else value
            several = inner if isinstance(value, dict | list) else [value]
            left += [part for part in several if isinstance(part, LinearOperator)]
    return list(found.values())


def _fits(model: Curvature) -> bool:
    """Whether there is room for the vectors of a comparison; a problem's budget is kept for its
    estimators.
    """
    problem = model.problem
    if problem.memory is not None:
        return False
    taken = VECTORS * torch.float64.itemsize * model.dim
    if taken <= FITS:
        return True
    free = problem.ranks.least(free_memory(problem.device), "the free memory", problem.device)
    return taken <= MEMORY_SHARE * free


def _is_finite(model: Curvature) -> TypeGuard[Hessian]:
    return isinstance(model, Hessian) and model.finite


def _twins_of(model: Curvature, samples: int, weighed: bool = True) -> _Twins:
    if not model.problem.reduced and _is_finite(model):
        return _Twins(model, model.with_longer_steps(), 0, 1.0, 0.0)
    whole = model.problem.alone()
    few, parts, share = _sample_of(whole, samples, weighed)
    own = model if few is whole else model.like(few)
    # halves of a batch are the same operator unless its samples meet in the loss, or their targets
    # were drawn for the whole batch
    separate = type(whole.loss_function) in NAMED.values() and "monte_carlo" not in model.exact_kind

    mode = own.prepare(None if model._products is None else model.mode).mode

    def make(wide: Problem) -> Curvature:
        double = model.like(wide)
        double.prepare(mode)
        return double

    double = run_in_double(few, make, halved=parts == 0 and separate)
    return _Twins(own, double, parts, whole.num_samples / few.num_samples, share)


def run_in_double(problem: Problem, run: Callable[[Problem], Any], halved: bool = False) -> Any:
    """``run`` of the problem in float64 or, where not all of it runs so, of a perturbed one."""
    try:
        wide = problem.in_double(halved)
        seen = _dtypes_of(wide)
        return run(_perturb(wide, seen.eps) if seen.casts else wide)
    except torch.OutOfMemoryError:
        raise
    # whatever a model raises that does not run in float64, or on a device without it
    except Exception:
        return run(_perturb_all(problem))


def _dtypes_of(problem: Problem) -> _Dtypes:
    """In what the model and the loss compute, by one pass of two samples."""
    batch, seen = problem.batches.first(), _Dtypes()  # type: ignore[no-untyped-call]
    if type(problem.loss_function) in NAMED.values() and problem.chain(batch) is not None:
        return seen
    few = batch if problem.norm == "train" else take(batch, slice(0, 2))
    with torch.no_grad(), seen:
        try:
            problem.batch_loss(problem.named(problem.vector), few)
        except Exception:  # whatever a model for one batch size only raises
            problem.batch_loss(problem.named(problem.vector), batch)
    return seen


def _perturb_all(problem: Problem) -> Problem:
    """The problem with each parameter changed by one rounding of the shortest dtype in use: a part
    in bfloat16 does not feel the last digit of float32.
    """
    return _perturb(problem, max(torch.finfo(problem.vector.dtype).eps, _dtypes_of(problem).eps))


def _perturb(problem: Problem, eps: float) -> Problem:
    """The problem with each parameter changed by one rounding, where not all runs in float64."""
    vector, stream = problem.vector, generator(0, "perturbation")
    signs = torch.randint(0, 2, vector.shape, generator=stream).mul_(2).sub_(1).to(vector)
    return problem.at(vector * (1 + eps * signs))


class _Dtypes(OperationWatch):
    """Whether any operation turned numbers of float64 into less, and the largest ``eps`` of what
    operations on real numbers give.
    """

    casts, eps = False, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        left, entered = (
            {x.dtype for x in tree_leaves(of) if isinstance(x, Tensor) and x.is_floating_point()}
            for of in (out, args)
        )
        if entered:
            self.eps = max([self.eps, *(torch.finfo(dtype).eps for dtype in left)])
            shorter = any(dtype.itemsize < torch.float64.itemsize for dtype in left)
            self.casts |= shorter and torch.float64 in entered
        return out


def _sample_of(problem: Problem, samples: int, weighed: bool) -> tuple[Problem, int, float]:
    """The problem on a few samples in parts, how many (0 for all samples), and the share of the
    loss that the first has to itself, 0 unless its samples were chosen by their weight.

    If the samples of a batch share their statistics, the parts are whole batches.
    """
    batches = problem.batches
    if problem.norm == "train":
        most = max(4, samples // batches.first().size)
        if len(batches) <= most:
            return problem, 0, 0.0
        # later ones may be others
        spread = torch.linspace(0, len(batches) - 1, most).round().long().tolist()
        chosen = [batch.data for batch in batches.some(spread)]
        few = problem.on_checked(Batches(lambda: chosen, problem.device, batches.dtype))
        return few, most, 0.0
    if batches.num_samples <= samples:
        return problem, 0, 0.0
    stream, count = generator(0, "rounding"), int(WEIGHTIEST * samples)
    leading = _weightiest(problem, count) if weighed else None
    count = 0 if leading is None else count
    order, sizes = torch.randperm(problem.num_samples, generator=stream), PARTS * [0]
    if leading is not None:
        order, sizes = torch.cat([leading, order[~torch.isin(order, leading)]]), [count, *sizes]
    sizes[-PARTS:] = PARTS * [max(1, (samples - count) // PARTS)]
    whole, ends = batches.gather(order[: sum(sizes)]), list(accumulate(sizes, initial=0))
    parts = [take(whole, slice(*pair)) for pair in pairwise(ends)]
    data = [part.data for part in parts if part.size]
    few = problem.on_checked(Batches(lambda: data, problem.device, batches.dtype))
    # of no batch of the data, so that its weight is counted anew
    share = problem.sample_share(replace(parts[0], index=-1)) * count / problem.num_samples
    return few, len(sizes), share


def _weightiest(problem: Problem, count: int) -> Tensor | None:
    """The samples that should add most to products or to their errors, (count,); None where samples
    have no output and loss of their own.

    A quarter by tr(∂²ℓ/∂z²)·(1 + ‖x‖² + ‖z‖²) for inputs x and outputs z, a measure of their
    Gauss–Newton matrices, a quarter by ‖∂ℓ/∂z‖²·(1 + ‖x‖² + ‖z‖²), one of their gradients: if
    outputs are saturated, both are made by few samples. A quarter by how much ∂z/∂x changes with
    the last digit of the parameters, and a quarter by how near they are to a kink by rounding.
    """
    if problem.loss_function is None:
        return None
    stream = generator(0, "weights", device=problem.device)
    moved = _perturb(problem, PERTURBED * torch.finfo(problem.vector.dtype).eps)
    points = [each.named(each.vector) for each in (problem, moved)]
    found = []
    with twice_differentiable():
        for weight, batch in problem.share:
            for wide in (True, False):
                try:
                    found.append(weight * _weights_of(problem, batch, points, stream, wide))
                    break
                except (RuntimeError, ValueError, IndexError):  # a loss in one dtype only
                    if not wide:
                        return None
    weights = torch.cat(found, dim=1)
    if weights.shape[1] != problem.num_samples or not bool(weights.isfinite().all()):
        return None
    return _lead(weights, count).cpu()


def _weights_of(
    problem: Problem, batch: Batch, points: list[Any], stream: torch.Generator, wide: bool
) -> Tensor:
    """The four weights of the samples of a batch, (4, B), up to a factor of the batch's own."""

    def real(value: Any) -> bool:
        return isinstance(value, Tensor) and value.ndim > 0 and value.is_floating_point()

    def rows(parts: Sequence[Tensor]) -> list[Tensor]:
        return [part.reshape(batch.size, -1) for part in parts]

    def squares(parts: Sequence[Tensor]) -> Tensor:
        sums = [torch.linalg.vector_norm(part, dim=1).double().square() for part in rows(parts)]
        return sum(sums, torch.zeros(batch.size, dtype=torch.float64, device=problem.device))

    leaves = tree_map(lambda x: x.detach().requires_grad_() if real(x) else x, batch.data)
    entered = [x for x in tree_leaves(leaves) if real(x)]
    with Kinks(batch.size, problem.device) as kinks:
        live = problem.output(points[0], replace(batch, data=leaves))
    output = tree_map(lambda z: z.detach() if isinstance(z, Tensor) else z, live)
    # probabilities near 1 have differences that float32 has not
    if wide and sum(z.numel() for z in tree_leaves(output) if real(z)) <= WIDE:
        output = tree_map(lambda z: z.double() if real(z) else z, output)
    left = [z for z in tree_leaves(output) if real(z)]
    multiply, curved = hessian_map(problem)(output, batch), squares([])
    for _ in range(DRAWS):
        u = [torch.randn(z.shape, generator=stream, device=z.device, dtype=z.dtype) for z in left]
        pairs = zip(rows(u), rows(multiply(u)), strict=True)
        curved += sum((x * y).double().sum(dim=1) for x, y in pairs)
    curved = curved.abs()
    slopes = squares(loss_slopes(problem, output, batch)) / batch.size

    # of the size that the loss's curvature gives to signals
    signals = [
        (curved.sqrt()[:, None] * part).reshape(z.shape)
        for part, z in zip(rows(u), left, strict=True)
    ]

    def pull(live: Any) -> list[Tensor]:
        """∂(s·z)/∂x for signals s."""
        smooth = [z for z in tree_leaves(live) if real(z)]
        pairs = [
            (z, s.to(z.dtype)) for z, s in zip(smooth, signals, strict=True) if z.requires_grad
        ]
        if not (entered and pairs):
            return []
        ends, given = zip(*pairs, strict=True)
        return list(pull_back(ends, entered, given, materialize_grads=True))

    moved = problem.output(points[1], replace(batch, data=leaves))
    changes = squares([x - y for x, y in zip(pull(live), pull(moved), strict=True)])
    weights = torch.stack([curved, slopes, changes]) * (1 + squares([*entered, *left])).detach()
    return torch.cat([weights, kinks.margins.double().clamp(min=1e-300).reciprocal()[None]])
