"""The diagonal of an operator: exact where its structure gives it, by random probes otherwise."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from lambdahat._core.check import require, require_count, require_positive
from lambdahat._core.device import default_context
from lambdahat.estimators.estimator_registry import estimator
from lambdahat.estimators.probes import COLUMN, Probes, block_columns, crowded, unit_blocks
from lambdahat.estimators.quantities import MeasureSettings, Work, products, quantity
from lambdahat.estimators.sequential import (
    MINIMUM,
    SMALL,
    Meter,
    plain_pilot,
    sampled_work,
    with_control,
)
from lambdahat.operators.base import LinearOperator, Normalised
from lambdahat.operators.curvature import GaussNewton, Hessian
from lambdahat.operators.exact import ClosedForm
from lambdahat.operators.matrix import OperatorLike, as_operator
from lambdahat.operators.rounding import rounding_of, with_rounding
from lambdahat.problem import Problem
from lambdahat.results import NORMAL_QUANTILE, Estimate, Status

MOMENTS = 4  # vectors of float64: running sums, and what they are made of


@estimator(torch.diagonal, probes=60)
@default_context()
def diagonal(
    operator: OperatorLike, tol: float = 0.1, probes: int | None = None, seed: int = 0
) -> Estimate:
    """Estimate the diagonal of an operator, (P,), with the standard error of each element.

    Exact if the operator provides it. Otherwise the mean of z⊙Az over Rademacher probes (Bekas,
    Kokiopoulou & Saad 2007, with z⊙z = 1), each element of variance Σ_{j≠i} a_ij². If the operator
    has a control variate C with known diagonal, diag(A − C) is sampled if a pilot shows this to be
    cheaper.

    ``tol`` is the root-mean-square error relative to that of the diagonal: ‖stderr‖ ≤ tol·‖diag A‖.
    ``probes`` fixes the number of probes instead. If ``tol`` would take P products or more, the
    exact diagonal is computed with P products.

    For a model below float64 the errors include its rounding: for each parameter tensor the root
    mean square over the rows of the error matrix, measured on at most 256 samples. The status is
    PRECISION_LIMIT if rounding dominates.

    >>> from lambdahat.operators import operator
    >>> diagonal(operator([[2.0, 1.0], [1.0, 3.0]])).value
    tensor([2., 3.], dtype=torch.float64)
    """
    operator = as_operator(operator)
    require_positive(tol, "tol")
    if probes is not None:
        require_count(probes, "probes", 2, cure="one probe shows no spread, so no standard error")
    estimate = _estimate(operator, tol, probes, seed)
    value = torch.as_tensor(estimate.value)
    # the matrix of a loss that is linear in the output is 0, and has no products to compare
    rounded = operator if isinstance(operator, GaussNewton) and operator.problem.reduced else None
    exact = None if rounded is None else rounded.exact
    factors = exact.factors if isinstance(exact, ClosedForm) else None
    rounding = None if factors is not None and factors.linear else rounding_of(operator)
    if rounding is None:
        return estimate
    allowed = NORMAL_QUANTILE * tol * float(value.double().norm())
    return with_rounding(estimate, rounding.row_norms()[0].to(value.device), allowed)


def _estimate(operator: LinearOperator, tol: float, probes: int | None, seed: int) -> Estimate:
    """The diagonal with the errors of the probes."""
    known = operator.known_diagonal()
    if known is not None:
        _require_finite(known)
        return Estimate(known, torch.zeros_like(known))
    control = operator.control()
    meter = Meter("diagonal", None, operator, control)
    if probes is None and operator.dim <= SMALL:
        return _dense(operator, None, meter)
    unit = Normalised(operator)
    scaled_control = None if control is None else Normalised(control, unit)
    sampled = _sample(unit, scaled_control, meter, tol, probes, seed)
    return _dense(operator, control, meter) if sampled is None else unit.restored(sampled)


def dense_diagonal(operator: LinearOperator, control: LinearOperator | None = None) -> Tensor:
    """The diagonal (P,) by P products, without holding the matrix."""
    out = torch.empty(operator.dim, dtype=operator.dtype, device=operator.device)
    for where, block in unit_blocks(operator, control):
        out[where] = (operator @ block)[where].diagonal()
    return out


def _dense(operator: LinearOperator, control: LinearOperator | None, meter: Meter) -> Estimate:
    value = dense_diagonal(operator, control)
    return Estimate(value, torch.zeros_like(value), meter.spent)


class _Moments:
    """Running mean and spread of samples (P,), in float64 (Chan, Golub & LeVeque 1983)."""

    def __init__(self, like: Probes) -> None:
        self.count = 0
        self.mean = torch.zeros(like.dim, dtype=torch.float64, device=like.device)
        self.squares = torch.zeros_like(self.mean)

    def add(self, samples: Tensor) -> None:
        """Take in the columns of ``samples`` (P, k)."""
        samples = samples.double()
        fresh, count = samples.mean(dim=1), samples.shape[1]
        shift, total = fresh - self.mean, self.count + count
        within = (samples - fresh[:, None]).square_().sum(dim=1)
        self.squares += within + shift**2 * (self.count * count / total)
        self.mean += shift * (count / total)
        self.count = total

    def stderr(self) -> Tensor:
        """Of the mean, element by element."""
        return (self.squares / (self.count * (self.count - 1))).sqrt()


def _sample(
    operator: LinearOperator,
    control: LinearOperator | None,
    meter: Meter,
    tol: float,
    probes: int | None,
    seed: int,
) -> Estimate | None:
    """Estimate by probes; None if P products would be fewer."""
    stream = Probes(operator, "rademacher", seed, "diagonal")
    moments, first = _Moments(stream), MINIMUM if probes is None else min(MINIMUM, probes)
    target = operator
    work = COLUMN, MOMENTS * torch.float64.itemsize / stream.dtype.itemsize
    if control is None or control.known_diagonal() is None or crowded(operator, first, *work):
        control = None
    both = operator if control is None else operator - control
    if crowded(both, first, COLUMN + work[0], work[1]):
        while moments.count < first:
            block = stream.draw(min(block_columns(both, *work), first - moments.count))
            moments.add(block * (operator @ block))
    else:
        pilot = plain_pilot(operator, stream, first)
        if control is not None:
            pilot = with_control(pilot, control, lambda z, y: float((z * y).var(dim=1).sum()))
        moments.add(pilot.block * pilot.image)
        target = pilot.target
        del pilot
    base = None if control is None else control.known_diagonal()  # the scale is known only now
    columns, price = block_columns(both, *work), 1 if target is operator else 2
    while True:
        value, stderr = moments.mean, moments.stderr()
        if price > 1 and base is not None:
            value = value + base.double()
        _require_finite(value)
        error = float(stderr.norm())
        size = math.sqrt(max(float(value.norm()) ** 2 - error**2, 0.0))
        allowed = tol * size
        if probes is not None:
            wanted: float = probes
        elif error <= allowed:
            wanted = 0
        else:
            wanted = moments.count * (error / allowed) ** 2 if allowed > 0 else math.inf
        missing = wanted - moments.count
        meter.tell(meter.spent + price * min(missing, 1e12))
        if missing <= 0:
            return Estimate(value, stderr, meter.spent, dof=moments.count - 1)
        if probes is None and missing * price >= operator.dim <= meter.left:
            return None
        if probes is None and meter.left < price:
            return Estimate(value, stderr, meter.spent, Status.BUDGET_SPENT, moments.count - 1)
        most = min(missing, meter.left // price) if probes is None else missing
        block = stream.draw(max(1, math.ceil(min(columns, most))))
        moments.add(block * (target @ block))


def _require_finite(diagonal: Tensor) -> None:
    finite = bool(torch.isfinite(diagonal).all())
    expected = "give finite products"
    require(finite, "the operator", expected, "NaN or infinity", "look for a NaN loss or parameter")


@quantity("diagonal", lambda _, operator, settings: diagonal(operator, seed=settings.seed))
def diagonal_work(problem: Problem, operator: LinearOperator, settings: MeasureSettings) -> Work:
    """No products where the network's structure gives a closed form."""
    if isinstance(operator, Hessian | GaussNewton) and operator.exact.closed_diagonal:
        return products(operator, 0, 0, 2)
    return replace(sampled_work(problem, operator, settings), fewest=0)
