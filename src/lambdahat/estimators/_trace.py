"""The trace of an operator: exact where its structure gives it, by random probes otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lambdahat._core.check import message, require, require_choice, require_count, require_positive
from lambdahat._core.device import default_context, full_precision
from lambdahat.estimators._diagonal import dense_diagonal, diagonal_work
from lambdahat.estimators.estimator_registry import estimator
from lambdahat.estimators.probes import (
    KINDS,
    Probes,
    block_columns,
    block_sizes,
    column_dots,
    crowded,
)
from lambdahat.estimators.quantities import MeasureSettings, Work, products, quantity
from lambdahat.estimators.sequential import (
    MINIMUM,
    SKETCHED,
    SMALL,
    Goal,
    Mean,
    Meter,
    ProbePilot,
    Quantity,
    Sketch,
    deflated_mean,
    mean_until,
    orthonormal_beside,
    plain_pilot,
    standard_error,
    with_control,
)
from lambdahat.operators.base import LinearOperator, Normalised
from lambdahat.operators.curvature import GaussNewton, Hessian
from lambdahat.operators.exact import MAX_ROUNDS, MIN_ROUNDS
from lambdahat.operators.matrix import OperatorLike, as_operator
from lambdahat.operators.rounding import closed_form_rounding, rounding_of, with_rounding
from lambdahat.problem import Problem
from lambdahat.results import Estimate, Status


class ExchangeableTrace:
    """n probes Ω, with AΩ = QR and AQ: each probe serves to deflate for all the others.

    With Q₍ᵢ₎ a basis of the columns of AΩ but the i-th, the i-th basic estimate (Eq. 2.3, ibid.) is

        tr(Q₍ᵢ₎ᵀAQ₍ᵢ₎) + cᵢ·uᵢᵀAuᵢ,   uᵢ = (I − Q₍ᵢ₎Q₍ᵢ₎ᵀ)ωᵢ,

    and the estimate is their mean. cᵢ is 1, or (P − n + 1)/‖uᵢ‖² for probes on the sphere (§2.3,
    ibid.). Small matrices give each of them, as Q₍ᵢ₎Q₍ᵢ₎ᵀ = Q(I − sᵢsᵢᵀ)Qᵀ with sᵢ the i-th column
    of R⁻ᵀ, normalised.
    """

    def __init__(self, operator: LinearOperator, probes: Probes) -> None:
        self.operator, self.probes = operator, probes
        self.omega = probes.draw(0)
        self.basis, self.image = self.omega, self.omega
        self.upper = torch.zeros(0, 0, dtype=torch.float64)

    def extend(self, count: int) -> None:
        """Add ``count`` probes, at two products each."""
        omega = self.probes.draw(count)
        columns = (self.operator @ omega).to(self.basis.dtype)
        fresh, above, corner = orthonormal_beside(self.basis, columns)
        rank = self.basis.shape[1]
        upper = torch.zeros(rank + count, rank + count, dtype=torch.float64)
        upper[:rank, :rank] = self.upper
        upper[:rank, rank:] = above.cpu()
        upper[rank:, rank:] = corner.cpu()
        self.upper = upper
        self.omega = torch.cat([self.omega, omega], dim=1)
        self.basis = torch.cat([self.basis, fresh], dim=1)
        self.image = torch.cat([self.image, (self.operator @ fresh).to(self.image.dtype)], dim=1)

    @full_precision()
    def estimates(self) -> tuple[Tensor, float]:
        """The n basic estimates (n,), float64, and the factor for the standard error of their mean.

        They share their probes, so that their mean varies more than n independent ones would. The
        variance is taken to be that of independent ones times 1.2 + 0.7f, f the part of the
        variance of ωᵀAω that the deflation removed (measured: 1.1 to 2.4 over flat, decaying,
        indefinite and network-like spectra).
        """
        core = (self.basis.T @ self.image).double().cpu()
        seen = (self.basis.T @ self.omega).double().cpu()
        # The unit vectors sᵢ, as columns: orthogonal to all columns of R but the i-th. Where the
        # diagonal of R is below rounding, any small number gives a direction on which A vanishes.
        tiny = torch.finfo(torch.float64).eps * (float(self.upper.abs().max()) or 1.0)
        repair = torch.where(self.upper.diagonal().abs() < tiny, tiny, 0.0)
        eye = torch.eye(len(self.upper), dtype=self.upper.dtype)
        lower = (self.upper + torch.diag(repair)).T
        inverse = torch.linalg.solve_triangular(lower, eye, upper=False)
        away = inverse / torch.linalg.vector_norm(inverse, dim=0)
        used = seen - (away * seen).sum(dim=0) * away
        plain = (seen * self.upper).sum(dim=0)
        quadratic = plain - 2 * (used * self.upper).sum(dim=0) + (used * (core @ used)).sum(dim=0)
        if self.probes.kind == "sphere":
            lengths = column_dots(self.omega, self.omega) - (used * used).sum(dim=0)
            quadratic = quadratic * (self.operator.dim - len(self.upper) + 1) / lengths
        basic: Tensor = core.trace() - (away * (core @ away)).sum(dim=0) + quadratic
        left = float(basic.var() / plain.var()) if float(plain.var()) > 0 else 0.0
        return basic, math.sqrt(1.2 + 0.7 * max(0.0, 1.0 - left))


METHODS = ("auto", "exact", "hutchinson", "hutch++", "xtrace")
BLOCKS, MEMORY_SHARE = 6, 0.25
# vectors that XTrace has for each probe: itself, its direction, that one's product, and a copy
EXCHANGED = 4.0


@estimator(torch.trace, method="hutchinson", tol=0.05)
@default_context()
def trace(
    operator: OperatorLike,
    tol: float = 0.01,
    method: str = "auto",
    max_matvecs: int | None = None,
    probe: str | None = None,
    seed: int = 0,
) -> Estimate:
    """Estimate the trace of an operator to a relative ``tol``, with as few products as possible.

    The half-width of the 95 % interval is at most tol·max(|tr A|, ‖A‖_F). The Frobenius norm guards
    operators whose trace is close to 0; for a positive semi-definite A it is never the larger. If
    the probes would cost P products or more, the dense diagonal is computed with P. The default
    ``max_matvecs`` is the smaller of 2P and 4000; if it is spent first, the status says so.

    Methods:

    - "exact": the trace that the structure of the operator gives, without products, or an error.
    - "hutchinson": the mean of zᵀAz (Hutchinson 1990), of variance 2‖A‖²_F for Gaussian probes.
    - "hutch++": tr(QᵀAQ) plus Hutchinson on the rest, (I − QQᵀ)A(I − QQᵀ), with Q an orthonormal
      basis of AΩ (Meyer, Musco, Musco & Woodruff 2021), its rank chosen on the way (Persson,
      Cortinovis & Kressner 2022).
    - "xtrace": the same with every probe used for both, in turn (Epperly, Tropp & Webber 2024).
    - "auto": exact if known, or from rounds of random signals, fresh for each sample, if a network
      has many classes or deep smooth activations and these rounds are forecast to be fewer than
      half the signals of the exact trace. A round is a backward pass over the data and counts as a
      product. Otherwise, or if rounds do not reach ``tol``, Hutchinson until a sketch promises to
      save more products than it costs, then Hutch++; with the operator's control variate C, tr C +
      tr(A − C), if a pilot shows that it pays.

    ``probe`` is "rademacher", "gaussian" or "sphere"; by default Rademacher, and sphere for XTrace.

    For a model below float64 the error includes its rounding, measured on at most 256 samples by
    the closed form or by four products in each precision, which ``cost`` does not count; the status
    is PRECISION_LIMIT if rounding dominates. An exact trace of such a model has no other error.

    >>> from lambdahat.operators import operator
    >>> trace(operator([[2.0, 1.0], [1.0, 3.0]]))
    Estimate(value=5, stderr=0, cost=0, status=CONVERGED, dof=inf)
    """
    operator = as_operator(operator)
    require_positive(tol, "tol")
    require_choice(method, "method", METHODS)
    fits = operator.symmetric or method not in ("hutch++", "xtrace")
    require(fits, "method", "be 'hutchinson' for an operator that is not symmetric", repr(method))
    probe = probe or ("sphere" if method == "xtrace" else "rademacher")
    require_choice(probe, "probe", KINDS)
    require_count(seed, "seed", least=0)
    estimate, by = _estimate(operator, tol, method, max_matvecs, probe, seed)
    known = None if by == "products" else closed_form_rounding(operator, by == "rounds")
    if known is None:
        rounding = rounding_of(operator)
        known = None if rounding is None else (rounding.trace, rounding.size)
    if known is None:
        return estimate
    error, size = known
    return with_rounding(estimate, error, tol * max(abs(float(estimate.value)), size))


def _estimate(
    operator: LinearOperator,
    tol: float,
    method: str,
    max_matvecs: int | None,
    probe: str,
    seed: int,
) -> tuple[Estimate, str]:
    """The trace with the error of the probes; by "closed form", "rounds" or "products"."""
    sampled = operator.sampled_trace(tol, seed, max_matvecs) if method == "auto" else None
    if sampled is not None and sampled.status.ok:
        return sampled, "rounds"
    if method == "exact" or (method == "auto" and sampled is None):
        # before the trace is read, for which a GPU is waited for; it is kept for later
        closed_form_rounding(operator)
        known = operator.known_trace()
        if known is not None:
            cure = "look for a NaN loss or parameter"
            require(math.isfinite(known), "the operator", "have a finite trace", repr(known), cure)
            return Estimate(known), "closed form"
        reason = operator.why_no_trace() if method == "exact" else ""
        got = f"{operator!r}: {reason}" if reason else repr(operator)
        expected = "not be 'exact' where the structure does not give the trace in closed form"
        cure = "call trace(operator, method='auto') to estimate it"
        require(method != "exact", "method", expected, got, cure)
    rounds = 0 if sampled is None else int(sampled.cost)
    if max_matvecs is not None and sampled is not None:
        max_matvecs -= rounds
        if max_matvecs < MINIMUM and max_matvecs < operator.dim:
            return sampled, "rounds"
    control = operator.control() if method == "auto" else None
    meter = Meter("trace", max_matvecs, operator, control)
    if operator.dim <= min(SMALL, meter.limit):
        return _dense(operator, meter), "products"
    unit, probes = Normalised(operator), Probes(operator, probe, seed, "trace")
    scaled_control = None if control is None else Normalised(control, unit)
    mean = _ESTIMATORS[method](_Task(unit, scaled_control, probes, meter, tol))
    if not mean.reached and operator.dim <= meter.left:
        return _dense(operator, meter, control), "products"
    estimate = unit.restored(mean.estimate(meter))
    estimate = replace(estimate, cost=estimate.cost + rounds)
    if sampled is not None and not mean.reached and sampled.stderr < estimate.stderr:
        return replace(sampled, cost=estimate.cost), "rounds"
    return estimate, "products"


@default_context()
def trace_per_layer(
    operator: OperatorLike, tol: float = 0.05, max_matvecs: int | None = None, seed: int = 0
) -> dict[str, Estimate]:
    """Estimate the trace of each layer's diagonal block, all from one set of probes.

    For Rademacher z, z_lᵀ(Az)_l has mean tr A_ll. Every layer is estimated to ``tol`` relative to
    the larger of |tr A_ll| and ‖A_l‖_F, A_l the rows of the layer. The cost of each estimate is
    that of all together. Rounding inside a model is in the errors as in ``trace``.
    """
    operator = as_operator(operator)
    require_positive(tol, "tol")
    if (space := operator.space) is None:
        cure = "call trace for the whole"
        raise ValueError(message("operator", "have named parameters", repr(operator), cure))
    where = {layer: space.indices(names) for layer, names in space.layers().items()}
    placed = {layer: indices.to(operator.device) for layer, indices in where.items()}
    estimates = _estimate_layers(operator, placed, tol, max_matvecs, seed)
    rounding = rounding_of(operator)
    if rounding is None:
        return estimates
    rows, sizes = rounding.row_norms()
    for layer, indices in where.items():
        error, size = (float(part[indices].norm()) for part in (rows, sizes))
        allowed = tol * max(abs(float(estimates[layer])), size)
        estimates[layer] = with_rounding(estimates[layer], math.sqrt(2.0) * error, allowed)
    return estimates


def _estimate_layers(
    operator: LinearOperator,
    where: dict[str, Tensor],
    tol: float,
    max_matvecs: int | None,
    seed: int,
) -> dict[str, Estimate]:
    """The traces of the layers, at the indices ``where``, with the errors of the probes."""
    control = operator.control()
    meter = Meter("trace per layer", max_matvecs, operator, control)
    known = operator.known_diagonal()
    if known is not None:
        return _sum_layers(known, where, meter)
    if operator.dim <= min(SMALL, meter.limit):
        return _sum_layers(dense_diagonal(operator), where, meter)
    unit, stream = Normalised(operator), Probes(operator, "rademacher", seed, "trace per layer")
    scaled_control = None if control is None else Normalised(control, unit)
    mean = _sampled_layers(unit, scaled_control, where, stream, meter, tol)
    if not mean.reached and operator.dim <= meter.left:
        return _sum_layers(dense_diagonal(operator, control), where, meter)
    status = Status.CONVERGED if mean.reached else Status.BUDGET_SPENT
    return {
        layer: unit.restored(Estimate(float(value), float(stderr), meter.spent, status, mean.dof))
        for layer, value, stderr in zip(where, mean.value, mean.stderr, strict=True)
    }


@dataclass(frozen=True)
class _Task:
    """What every method works on."""

    operator: LinearOperator
    control: LinearOperator | None
    probes: Probes
    meter: Meter
    tol: float

    @property
    def crowded(self) -> bool:
        """Whether a pilot and a sketch of it are too large to hold at once."""
        blocks = BLOCKS * MINIMUM * self.operator.dim * self.operator.dtype.itemsize
        full = blocks > self.operator.room(MEMORY_SHARE)
        return full or _crowded(self.operator, self.control)

    def goal(self, images: Tensor, error: Callable[[Tensor], Tensor] | None = None) -> Goal:
        """The tolerance, with ‖A‖_F estimated from products AZ (P, k)."""
        floor = column_dots(images, images).mean().sqrt() if images.shape[1] else torch.zeros(())
        return Goal(self.tol, torch.zeros(1, dtype=torch.float64), floor.double()[None], error)


def _dense(
    operator: LinearOperator, meter: Meter, control: LinearOperator | None = None
) -> Estimate:
    value = float(dense_diagonal(operator, control).double().sum())
    return Estimate(value, cost=meter.spent)


def _quantity(probes: Probes) -> Quantity:
    """tr(QᵀAQ), and Hutchinson's zᵀAz."""

    def variance_reduction(sketch: Sketch, trace: float) -> float:
        """By how much deflation lowers half the variance of zᵀAz, 2‖AQ‖²_F − ‖QᵀAQ‖²_F if Gaussian.

        The variance of Rademacher and sphere probes is lower by (tr A)²/P from the start, of which
        deflation leaves (tr A − tr QᵀAQ)²/P.
        """
        core = sketch.core()
        lower = 2 * float(sketch.image.square().sum(dtype=torch.float64))
        lower -= float(core.square().sum())
        if probes.kind != "gaussian":
            lower -= (trace**2 - (trace - float(core.trace())) ** 2) / len(sketch.basis)
        return lower

    return Quantity(lambda sketch: sketch.core().trace(), _whole, variance_reduction)


# zᵀ(Az), or its part of each layer, and beside these ‖Az‖², or its part, (k, 2L) from the columns
# of Z and AZ (P, k)
Forms = Callable[[Tensor, Tensor], Tensor]


def _whole(block: Tensor, image: Tensor) -> Tensor:
    return torch.stack([column_dots(block, image), column_dots(image, image)], dim=1)


def _error(samples: Tensor) -> Tensor:
    """The standard errors (L,) of the means of forms.

    A few forms of Rademacher probes may be equal by chance, and would show no spread at all. So if
    there are few, 2‖A‖²_F, a bound of their variance, counts as the square of one more.
    """
    forms, sizes = samples.chunk(2, dim=1)
    count, error = len(forms), standard_error(forms)
    if count >= MINIMUM:
        return error
    return (((count - 1) * error.square() + 2 * sizes.mean(dim=0) / count) / count).sqrt()


def _stream(
    operator: LinearOperator, forms: Forms, probes: Probes, meter: Meter, tol: float, width: int
) -> Mean:
    """Hutchinson's samples by narrow blocks, where a pilot would fill the memory."""

    def draw(count: int) -> Tensor:
        samples, expected = [], meter.spent + count
        for start in range(0, count, width):
            block = probes.draw(min(width, count - start))
            samples.append(forms(block, operator @ block))
            meter.tell(expected)
        return torch.cat(samples)

    first = draw(min(MINIMUM, meter.limit))
    floor = first.chunk(2, dim=1)[1].mean(dim=0).sqrt()
    return mean_until(draw, first, Goal(tol, torch.zeros_like(floor), floor, _error), meter)


def _sample(pilot: ProbePilot, forms: Forms, probes: Probes, goal: Goal, meter: Meter) -> Mean:
    """Hutchinson's samples of the pilot's target; those of the pilot are the first."""

    def draw(count: int) -> Tensor:
        held, samples = 2.0 * pilot.block.shape[1], []
        expected = meter.spent + count * pilot.price
        for size in block_sizes(count, pilot.target, held=held):
            block = probes.draw(size)
            samples.append(forms(block, pilot.target @ block))
            meter.tell(expected)
        return torch.cat(samples)

    return mean_until(draw, forms(pilot.block, pilot.image), goal, meter, pilot.price)


def _hutchinson(task: _Task) -> Mean:
    if task.crowded:
        return _stream(task.operator, _whole, task.probes, task.meter, task.tol, 1)
    pilot = plain_pilot(task.operator, task.probes, min(MINIMUM, task.meter.limit))
    return _sample(pilot, _whole, task.probes, task.goal(pilot.image, _error), task.meter)


def _hutch_plus_plus(task: _Task) -> Mean:
    if task.meter.limit < 4 or task.crowded:
        return _hutchinson(task)
    pilot = plain_pilot(task.operator, task.probes, min(MINIMUM, task.meter.limit // 4))
    goal = task.goal(pilot.image, _error)
    return deflated_mean(_quantity(task.probes), pilot, task.probes, goal, task.meter, always=True)


def _adaptive(task: _Task) -> Mean:
    if task.crowded:
        return _hutchinson(task)
    pilot = plain_pilot(task.operator, task.probes, min(MINIMUM, task.meter.limit))
    goal = task.goal(pilot.image, _error)
    control, affordable = task.control, pilot.block.shape[1] <= task.meter.left
    if (
        control is not None
        and affordable
        and not goal.judge(_whole(pilot.block, pilot.image)).reached
    ):
        known = control.known_trace()
        if known is not None:
            pilot = with_control(pilot, control, lambda z, y: float(column_dots(z, y).var()))
        if known is not None and pilot.control is not None:  # samples of A − C, with tr C known
            goal = goal.beyond(torch.tensor(known, dtype=torch.float64))
    if not pilot.target.symmetric:
        return _sample(pilot, _whole, task.probes, goal, task.meter)
    return deflated_mean(_quantity(task.probes), pilot, task.probes, goal, task.meter)


def _xtrace(task: _Task) -> Mean:
    meter = task.meter
    require_count(meter.limit, "max_matvecs", least=4, cure="method='hutchinson' does with 2")
    first = min(MINIMUM, meter.limit // 2)
    fits = not crowded(task.operator, first, SKETCHED)
    expected = (
        f"be 'auto' or 'hutchinson' where the problem's memory={task.operator.budget()} holds no "
        f"sketch of {first} vectors"
    )
    require(fits, "method", expected, "'xtrace'", "raise memory")
    state = ExchangeableTrace(task.operator, task.probes)
    state.extend(first)
    before: tuple[int, float] | None = None
    while True:
        samples, inflation = state.estimates()
        mean, count = task.goal(state.upper).judge(samples[:, None], inflation), len(samples)
        missing = 0.0 if mean.reached else 2 * (_forecast(before, count, mean.wanted) - count)
        meter.tell(meter.spent + missing)
        more = min(count // 2, meter.left // 2)
        if crowded(task.operator, more, SKETCHED, EXCHANGED * count):
            return mean
        dense_is_cheaper = max(missing / 2, meter.spent + 2 * more) >= meter.dim <= meter.left
        if mean.reached or more < 1 or dense_is_cheaper:
            return mean
        before = count, mean.wanted
        state.extend(more)


def _forecast(before: tuple[int, float] | None, count: int, wanted: float) -> float:
    """The n at which XTrace reaches its goal if its error goes on falling as between two looks.

    ``wanted`` is (error/allowed)²·n. Without an earlier look it is the next one: the error may fall
    fast.
    """
    if before is None or not math.isfinite(wanted):
        return 1.5 * count
    ratio = math.sqrt(wanted / count)
    earlier = math.sqrt(before[1] / before[0])
    rate = math.log(earlier / ratio) / math.log(count / before[0])
    return min(count * math.exp(math.log(ratio) / max(rate, 0.5)), 1e12)


_ESTIMATORS: dict[str, Callable[[_Task], Mean]] = {
    "auto": _adaptive,
    "hutchinson": _hutchinson,
    "hutch++": _hutch_plus_plus,
    "xtrace": _xtrace,
}


def _sum_layers(diagonal: Tensor, where: dict[str, Tensor], meter: Meter) -> dict[str, Estimate]:
    sums = {layer: float(diagonal[index].double().sum()) for layer, index in where.items()}
    return {layer: Estimate(value, cost=meter.spent) for layer, value in sums.items()}


def _crowded(operator: LinearOperator, control: LinearOperator | None) -> bool:
    """Whether the memory budget is too small for a pilot and a sketch."""
    if operator.budget() is None or control is None or crowded(operator, MINIMUM, SKETCHED):
        return crowded(operator, MINIMUM, SKETCHED)
    return crowded(operator - control, MINIMUM, SKETCHED)


def _sampled_layers(
    operator: LinearOperator,
    control: LinearOperator | None,
    where: dict[str, Tensor],
    probes: Probes,
    meter: Meter,
    tol: float,
) -> Mean:
    def dots(first: Tensor, second: Tensor) -> Tensor:
        each = [column_dots(first[index], second[index]) for index in where.values()]
        return torch.stack(each, dim=1)

    def forms(block: Tensor, image: Tensor) -> Tensor:
        return torch.cat([dots(block, image), dots(image, image)], dim=1)

    if _crowded(operator, control):
        return _stream(operator, forms, probes, meter, tol, block_columns(operator))
    pilot = plain_pilot(operator, probes, min(MINIMUM, meter.limit))
    floor = dots(pilot.image, pilot.image).mean(dim=0).sqrt()
    offset = torch.zeros_like(floor)
    base = None if control is None else control.known_diagonal()
    if control is not None and base is not None and pilot.block.shape[1] <= meter.left:
        unit = floor.square().clamp_min(torch.finfo(torch.float64).tiny)
        pilot = with_control(
            pilot, control, lambda z, y: float((dots(z, y).var(dim=0) / unit).sum())
        )
    if pilot.control is not None and base is not None:
        offset = torch.stack([base[index].double().sum().cpu() for index in where.values()])
    return _sample(pilot, forms, probes, Goal(tol, offset, floor, _error), meter)


@quantity("trace", lambda _, operator, settings: trace(operator, seed=settings.seed))
def trace_work(problem: Problem, operator: LinearOperator, settings: MeasureSettings) -> Work:
    """The closed form, or rounds of random signals where that takes too many products."""
    if isinstance(operator, Hessian | GaussNewton) and operator.exact.trace_by == "rounds":
        return products(operator, MIN_ROUNDS, MAX_ROUNDS, 2)
    return diagonal_work(problem, operator, settings)
