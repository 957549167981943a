"""The Frobenius norm of an operator."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from lambdahat._check import require_positive
from lambdahat.estimators.control import plain_pilot
from lambdahat.estimators.deflation import SKETCHED, Quantity, Sketch, deflated_mean
from lambdahat.estimators.probes import Probes, block_sizes, column_dots, crowded, unit_blocks
from lambdahat.estimators.sequential import MINIMUM, Goal, Meter, mean_until
from lambdahat.operators.base import LinearOperator, Normalised, require_operator
from lambdahat.results import Estimate


def frobenius_norm(
    operator: LinearOperator, tol: float = 0.01, max_matvecs: int | None = None, seed: int = 0
) -> Estimate:
    """‖A‖_F, within ``tol`` relative at 95 % confidence.

    A few outliers dominate the norm of a network's Hessian, and make ‖Az‖² skewed. So they are deflated: for Q
    an orthonormal basis of AΩ,

        ‖A‖²_F = ‖AQ‖²_F + ‖A(I − QQᵀ)‖²_F,

    the first computed, the second the mean of ‖Au‖² over probes u that Q has not seen, uniform on the sphere of radius
    √(P − r) in the complement of Q. The rank r grows while that saves products. The standard error of the norm is that
    of its square over 2‖A‖_F (delta method). Where probes would cost P products or more, all P columns are computed.

    >>> from lambdahat.operators import operator
    >>> frobenius_norm(operator([[3.0, 0.0], [0.0, 4.0]])).value
    5.0
    """
    require_operator(operator)
    require_positive(tol, "tol")
    meter = Meter("Frobenius norm", max_matvecs, operator)
    if operator.dim <= min(MINIMUM, meter.limit):
        return _dense(operator, meter)
    unit = Normalised(operator)
    probes = Probes(operator, "sphere", seed, "frobenius norm")
    nothing = torch.zeros(1, dtype=torch.float64)
    goal, first = Goal(2 * tol, nothing, nothing), min(MINIMUM, meter.limit)

    def draw(count: int) -> Tensor:
        blocks = (probes.draw(size) for size in block_sizes(count, operator))
        return torch.cat([column_dots(image, image) for image in (unit @ block for block in blocks)])[:, None]

    if crowded(operator, first, SKETCHED):
        squared = mean_until(draw, draw(first), goal, meter)
    else:
        squared = deflated_mean(_SQUARED, plain_pilot(unit, probes, first), probes, goal, meter)
    if not squared.reached and operator.dim <= meter.left:
        return _dense(operator, meter)
    value = math.sqrt(float(squared.value))
    stderr = float(squared.stderr) / (2 * value) if value > 0 else 0.0
    return unit.restored(dataclasses.replace(squared.estimate(meter), value=value, stderr=stderr))


def _removed(sketch: Sketch, squared: float) -> float:
    """What deflation takes off half the variance of ‖Au‖².

    That is ‖M‖²_F − (tr M)²/P for M = A² outside Q. Of ‖A²‖²_F the sketch takes 2‖A²Q‖²_F − ‖QᵀA²Q‖²_F, of which
    ‖QᵀA²Q‖²_F, a lower bound, is known. Sphere probes have (tr A²)²/P off already.
    """
    gram = sketch.gram()
    free = (squared**2 - (squared - float(gram.trace())) ** 2) / len(sketch.basis)
    return float(gram.square().sum()) - free


_SQUARED = Quantity(lambda sketch: sketch.gram().trace(), lambda _, image: column_dots(image, image), _removed)


def _dense(operator: LinearOperator, meter: Meter) -> Estimate:
    """From all columns of A, by P products."""
    norm = 0.0
    for _, block in unit_blocks(operator):
        image = (operator @ block).double()
        size = float(image.abs().max())
        norm = math.hypot(norm, size * float(torch.linalg.vector_norm(image / size)) if size > 0 else 0.0)
    return Estimate(norm, cost=meter.spent)
