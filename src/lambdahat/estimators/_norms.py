"""The Frobenius norm of an operator."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from lambdahat._core.check import require_positive
from lambdahat._core.device import default_context, full_precision
from lambdahat.estimators.estimator_registry import estimator
from lambdahat.estimators.probes import Probes, block_sizes, column_dots, crowded, unit_blocks
from lambdahat.estimators.quantities import quantity
from lambdahat.estimators.sequential import (
    MINIMUM,
    SKETCHED,
    Goal,
    Meter,
    Quantity,
    Sketch,
    deflated_mean,
    mean_until,
    plain_pilot,
    sampled_work,
)
from lambdahat.operators.base import LinearOperator, Normalised
from lambdahat.operators.matrix import OperatorLike, as_operator
from lambdahat.operators.rounding import rounding_of, with_rounding
from lambdahat.results import Estimate

SKEW = math.sqrt(8.0)  # the skewness of a square of a normal variable
WIDENING = 1.5  # the relative widening of an interval, in units of γ²/n
# inflation of errors after deflation: blocks that saw much are deflated, those that saw little kept
SELECTION = 1.06


@estimator(torch.linalg.matrix_norm, tol=0.05)
@default_context()
def frobenius_norm(
    operator: OperatorLike, tol: float = 0.01, max_matvecs: int | None = None, seed: int = 0
) -> Estimate:
    """Estimate the Frobenius norm ‖A‖_F to a relative ``tol`` at 95 % confidence.

    A few outliers dominate the norm of a network's Hessian and make ‖Az‖² skewed, so they are
    deflated: for Q an orthonormal basis of AΩ,

        ‖A‖²_F = ‖AQ‖²_F + ‖A(I − QQᵀ)‖²_F,

    where the first term is computed and the second is the mean of ‖Au‖² over probes u uniform on
    the sphere of radius √(P − r) in the complement of Q. The rank r grows while that saves
    products. The standard error of the norm is that of its square over 2‖A‖_F (delta method). If
    probes would cost P products or more, all P columns are computed. For a model below float64 the
    error includes its rounding, measured on at most 256 samples; the status is PRECISION_LIMIT if
    rounding dominates.

    >>> from lambdahat.operators import operator
    >>> frobenius_norm(operator([[3.0, 0.0], [0.0, 4.0]])).value
    5.0
    """
    operator = as_operator(operator)
    require_positive(tol, "tol")
    norm, rounding = _estimate(operator, tol, max_matvecs, seed), rounding_of(operator)
    return norm if rounding is None else with_rounding(norm, rounding.frobenius, tol * float(norm))


def _estimate(operator: LinearOperator, tol: float, max_matvecs: int | None, seed: int) -> Estimate:
    """The norm with the error of the probes."""
    meter = Meter("Frobenius norm", max_matvecs, operator)
    if operator.dim <= min(MINIMUM, meter.limit):
        return _dense(operator, meter)
    unit = Normalised(operator)
    probes = Probes(operator, "sphere", seed, "frobenius norm")
    nothing = torch.zeros(1, dtype=torch.float64)
    goal = Goal(2 * tol, nothing, nothing, lambda samples: _error_of_squares(samples, operator.dim))
    first = min(MINIMUM, meter.limit)

    def draw(count: int) -> Tensor:
        blocks = (probes.draw(size) for size in block_sizes(count, operator))
        return torch.cat([_squares(unit @ block) for block in blocks])

    if crowded(operator, first, SKETCHED):
        squared = mean_until(draw, draw(first), goal, meter)
    else:
        squared = deflated_mean(_SQUARED, plain_pilot(unit, probes, first), probes, goal, meter)
    if not squared.reached and operator.dim <= meter.left:
        return _dense(operator, meter)
    value = math.sqrt(float(squared.value))
    stderr = float(squared.stderr) / (2 * value) if value > 0 else 0.0
    return unit.restored(dataclasses.replace(squared.estimate(meter), value=value, stderr=stderr))


def _variance_reduction(sketch: Sketch, squared: float) -> float:
    """By how much deflation lowers half the variance of ‖Au‖².

    That is ‖M‖²_F − (tr M)²/P for M = A² outside Q, of which ‖QᵀA²Q‖²_F is a known lower bound.
    The variance of sphere probes is lower by (tr A²)²/P from the start.
    """
    gram = sketch.gram()
    free = (squared**2 - (squared - float(gram.trace())) ** 2) / len(sketch.basis)
    return float(gram.square().sum()) - free


@full_precision()
def _squares(image: Tensor) -> Tensor:
    """‖y‖², and the means of (y·y')² and (y·y')(y'·y'')(y''·y) over others, of each column (k, 3).

    The means are NaN if there are no others.
    """
    count = image.shape[1]
    between = (image.T @ image).double().cpu()
    between.fill_diagonal_(0.0)
    pairs, triples = between.square().sum(dim=1), ((between @ between) * between).sum(dim=1)
    missing = torch.full_like(pairs, torch.nan)
    pairs = pairs / (count - 1) if count > 1 else missing
    triples = triples / ((count - 1) * (count - 2)) if count > 2 else missing
    return torch.stack([column_dots(image, image), pairs, triples], dim=1)


def _error_of_squares(samples: Tensor, dim: int) -> Tensor:
    """The standard error of the mean of ‖Au‖², from the products of different probes.

    For probes on the sphere Var‖Au‖² = 2P/(P + 2)·(tr M² − (tr M)²/P) with M = A². Different probes
    have E[(Au·Au')²] = tr M² and E[(Au·Au')(Au'·Au'')(Au''·Au)] = tr M³: n²/2 pairs and n³/6
    triples know the variance and the skewness γ far better than n samples do if a few directions
    dominate. An interval is widened for γ as in ``standard_error``.
    """
    count = len(samples)
    mean, square, cube = (float(part) for part in samples.nanmean(dim=0))
    centred = square - mean**2 / dim
    own = samples[:, 0].var()
    if not centred > 0:
        return (own / count).sqrt()[None]
    variance = 2 * dim / (dim + 2) * centred
    third = cube - 3 * square * mean / dim + 2 * mean**3 / dim**2
    skewness = SKEW * max(third, 0.0) / centred**1.5 if math.isfinite(third) else 0.0
    error = math.sqrt(variance / count) * (1 + WIDENING * skewness**2 / count)
    return torch.tensor([error], dtype=torch.float64)


_SQUARED = Quantity(
    lambda sketch: sketch.gram().trace(),
    lambda _, image: _squares(image),
    _variance_reduction,
    SELECTION,
)


def _dense(operator: LinearOperator, meter: Meter) -> Estimate:
    """From all columns of A, by P products."""
    norm = 0.0
    for _, block in unit_blocks(operator):
        image = (operator @ block).double()
        size = float(image.abs().max())
        if size > 0:
            norm = math.hypot(norm, size * float(torch.linalg.vector_norm(image / size)))
    return Estimate(norm, cost=meter.spent)


quantity("frobenius", lambda _, operator, settings: frobenius_norm(operator, seed=settings.seed))(
    sampled_work
)
