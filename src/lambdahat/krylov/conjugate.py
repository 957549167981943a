"""Conjugate gradients, and the damped inverse of an operator by them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lambdahat._core.check import require, require_count, require_number, require_positive
from lambdahat._core.device import default_context
from lambdahat._core.progress import report
from lambdahat.krylov.lanczos import dot, require_finite, require_symmetric, working_dtype
from lambdahat.operators.base import LinearOperator
from lambdahat.operators.matrix import OperatorLike, identity

ROUNDING = 10.0  # how far rounding may leave the true residual above the tolerance


@dataclass(frozen=True)
class Solution:
    """X (P,) or (P, k) with AX ≈ B, and the ``residuals`` ‖B − AX‖/‖B‖ by a last product.

    ``converged``: where the recurrence reached the tolerance, and the last product ten times that.
    ``curvature`` is the least pᵀAp/pᵀp met; at or below 0 A is not positive definite.
    """

    solution: Tensor
    residuals: Tensor
    converged: Tensor
    curvature: float
    cost: int


@default_context()
def conjugate_gradients(
    operator: OperatorLike,
    rhs: Tensor,
    tol: float | None = None,
    max_matvecs: int | None = None,
    preconditioner: LinearOperator | None = None,
) -> Solution:
    """Solve A X = B for a positive definite A, each column on its own, all products in blocks.

    Hestenes and Stiefel (1952) with float64 scalars; ``max_matvecs`` is per right-hand side
    (default: 10·P, at most 10,000). A column stops at ‖r‖ ≤ tol·‖b‖ (default: 1e-8 in float64, 1e-5
    in float32), or when a direction of non-positive curvature shows that A is not positive
    definite. One more product for each column, beyond ``max_matvecs``, measures the true residual.
    ``preconditioner`` is an operator near A⁻¹.
    """
    operator = require_symmetric(operator, "conjugate_gradients")
    tol = default_tolerance(operator) if tol is None else require_positive(tol, "tol")
    limit = min(10 * operator.dim + 10, 10_000)
    limit = limit if max_matvecs is None else require_count(max_matvecs, "max_matvecs")
    fits = rhs.ndim in (1, 2) and rhs.shape[0] == operator.dim
    require(fits, "rhs", f"have shape ({operator.dim},) or ({operator.dim}, k)", rhs)
    residual = rhs.reshape(operator.dim, -1).to(working_dtype(operator), copy=True)
    solution, size = torch.zeros_like(residual), dot(residual, residual).sqrt()
    left, curvature, cost = size.clone(), math.inf, 0
    direction = old = None
    active = torch.nonzero(left > tol * size).flatten()
    while len(active) and cost < limit * residual.shape[1]:
        r = residual[:, active]
        z = r if preconditioner is None else (preconditioner @ r).to(r.dtype)
        new = dot(r, z)
        if direction is None or old is None:
            direction = z
        else:
            direction = z + direction * (new / old).to(r.dtype)
        image = (operator @ direction).to(r.dtype)
        cost += len(active)
        bend = dot(direction, image)
        require_finite(bend)
        curvature = min(curvature, float((bend / dot(direction, direction)).min()))
        step = torch.where(bend > 0, new / bend, 0.0).to(r.dtype)
        solution[:, active] += direction * step
        residual[:, active] = r - image * step
        left[active] = dot(residual[:, active], residual[:, active]).sqrt()
        report("conjugate_gradients", cost)
        on = (left[active] > tol * size[active]) & (bend > 0)
        active, direction, old = active[on], direction[:, on], new[on]
    if cost:
        image = (operator @ solution).to(solution.dtype)
        residual = rhs.reshape(operator.dim, -1).to(solution) - image
        cost += residual.shape[1]
    true = dot(residual, residual).sqrt()
    converged = (left <= tol * size) & (true <= ROUNDING * tol * size)
    relative = torch.where(size > 0, true / size, 0.0).cpu()
    return Solution(solution.reshape(rhs.shape), relative, converged.cpu(), curvature, cost)


def default_tolerance(operator: LinearOperator) -> float:
    """A relative residual within reach of the dtype that the operator works in."""
    return 1e-8 if working_dtype(operator) == torch.float64 else 1e-5


class Inverse(LinearOperator):
    """(A + damping·I)⁻¹ by conjugate gradients: a product costs as many of A as CG takes."""

    def __init__(
        self, inner: LinearOperator, damping: float, tol: float, max_matvecs: int | None
    ) -> None:
        super().__init__(inner.dim, inner.dtype, inner.device, psd=inner.psd, space=inner.space)
        self.inner, self.damping, self.tol, self.max_matvecs = inner, damping, tol, max_matvecs

    def _apply(self, block: Tensor) -> Tensor:
        damped = self.inner + self.damping * identity(self.inner) if self.damping else self.inner
        solved = conjugate_gradients(damped, block, self.tol, self.max_matvecs)
        met, left, name = solved.curvature, float(solved.residuals.max()), "the operator of inverse"
        require(met > 0, name, "be positive definite", f"curvature {met:.3g}", "raise damping")
        done, expected = bool(solved.converged.all()), f"reach a residual of {self.tol:g}"
        got, cure = f"{left:.2g} after {solved.cost} products", "raise max_matvecs, tol or damping"
        require(done, "conjugate gradients", expected, got, cure)
        return solved.solution.to(self.dtype)


def inverse(
    operator: OperatorLike,
    damping: float = 0.0,
    tol: float | None = None,
    max_matvecs: int | None = None,
) -> Inverse:
    """(A + damping·I)⁻¹ as an operator, by conjugate gradients to relative residual ``tol``.

    The default ``tol`` is 1e-8 in float64 and 1e-5 in float32. A product raises an error when A +
    damping·I is not positive definite, when ``max_matvecs`` products a right-hand side do not reach
    ``tol``, or when one more shows that rounding has left the true residual above ten times that.
    """
    operator = require_symmetric(operator, "inverse")
    require_number(damping, "damping", "[0, inf)")
    tol = default_tolerance(operator) if tol is None else require_positive(tol, "tol")
    return Inverse(operator, float(damping), tol, max_matvecs)
