"""Preconditioners with a known determinant: log det A = log det P + log det(P^{−½} A P^{−½})."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lambdahat._check import require, require_choice, require_count
from lambdahat._progress import report
from lambdahat.krylov import working_dtype
from lambdahat.operators.base import LinearOperator, Scaled, Sum
from lambdahat.operators.kernels import KernelMatrix
from lambdahat.operators.matrix import Matrix

KINDS = ("auto", "none", "jacobi", "cholesky")
UNEVEN = 4.0  # a diagonal that varies by less is left alone
DEFAULT_RANK = 200


@dataclass(frozen=True)
class Preconditioned:
    """``operator`` is P^{−½} A P^{−½}, ``logdet`` log det P, ``cost`` the products spent; ``name`` says what P is."""

    original: LinearOperator
    operator: LinearOperator
    logdet: float = 0.0
    cost: int = 0
    name: str = ""


def preconditioned(operator: LinearOperator, kind: str, rank: int | None) -> Preconditioned:
    """The operator behind the preconditioner of ``kind``.

    "jacobi" divides by the square roots of the diagonal. "cholesky" is a partial Cholesky factorisation with the
    largest pivots, P = LLᵀ + δI of rank ``rank``, one column a rank; δ is the lower bound of the spectrum where one is
    known. "auto" is Jacobi where the diagonal is known and uneven; Cholesky for a kernel matrix, dropped where its
    columns leave more than half of what as many of a diagonal matrix would; else none.
    """
    require_precondition(kind, rank, operator.dim)
    chosen = _chosen(operator) if kind == "auto" else kind
    if chosen == "none":
        return Preconditioned(operator, operator)
    if chosen == "jacobi":
        return _jacobi(operator)
    return _cholesky(operator, rank, sure=kind == "cholesky")


def require_precondition(kind: str, rank: int | None, dim: int) -> None:
    """Refuse a preconditioner that is not known, and a rank that it does not have."""
    require_choice(kind, "precondition", KINDS)
    if rank is not None:
        fits = kind in ("auto", "cholesky")
        require(fits, "rank", "come with precondition='cholesky'", f"{rank!r} with {kind!r}")
        require_count(rank, "rank", 1, dim)


def _chosen(operator: LinearOperator) -> str:
    if _has_kernel(operator):
        return "cholesky"
    diagonal = operator.known_diagonal()
    if diagonal is None or not bool((diagonal > 0).all()):
        return "none"
    return "jacobi" if float(diagonal.max()) > UNEVEN * float(diagonal.min()) else "none"


def _has_kernel(operator: LinearOperator) -> bool:
    """Whether it is a kernel matrix, a multiple of one, or a sum with one."""
    if isinstance(operator, Sum):
        return _has_kernel(operator.first) or _has_kernel(operator.second)
    return _has_kernel(operator.inner) if isinstance(operator, Scaled) else isinstance(operator, KernelMatrix)


def _diagonal(operator: LinearOperator, kind: str) -> Tensor:
    """The diagonal, which must be known and, for a positive definite matrix, positive."""
    diagonal = operator.known_diagonal()
    require(diagonal is not None, "precondition", "be 'none' where no diagonal is known", f"{kind!r}")
    assert diagonal is not None
    least = float(diagonal.min())
    require(least > 0, "the operator of logdet", "be positive definite", f"the diagonal entry {least:.3g}",
            "add a shift: operator + delta * identity(operator)")  # fmt: skip
    return diagonal


class Rescaled(LinearOperator):
    """D A D with a diagonal D."""

    def __init__(self, inner: LinearOperator, scale: Tensor) -> None:
        super().__init__(inner.dim, inner.dtype, inner.device, symmetric=inner.symmetric, psd=inner.psd)
        self.inner, self.scale = inner, scale[:, None]

    def _apply(self, block: Tensor) -> Tensor:
        return self.scale * self.inner._multiply(self.scale * block)

    def known_diagonal(self) -> Tensor | None:
        diagonal = self.inner.known_diagonal()
        return None if diagonal is None else diagonal * self.scale[:, 0] ** 2


def _jacobi(operator: LinearOperator) -> Preconditioned:
    diagonal = _diagonal(operator, "jacobi")
    scale = diagonal.rsqrt()
    scaled = operator.rescaled(scale) if isinstance(operator, Matrix) else Rescaled(operator, scale)
    return Preconditioned(operator, scaled, float(diagonal.double().log().sum()), 0, "Jacobi scaling")


class Whitened(LinearOperator):
    """P^{−½} A P^{−½} for P = U diag(s) Uᵀ + δI with orthonormal U (n, r): one product with A a product."""

    def __init__(self, inner: LinearOperator, basis: Tensor, values: Tensor, shift: float, low: float) -> None:
        super().__init__(inner.dim, inner.dtype, inner.device, psd=inner.psd)
        self.inner, self.basis, self.shift, self.low = inner, basis, shift, low
        self.factors = ((shift + values).rsqrt() - shift**-0.5)[:, None]

    def _half(self, block: Tensor) -> Tensor:
        """P^{−½} block."""
        spread: Tensor = self.basis @ (self.factors * (self.basis.T @ block))
        return spread.add_(block, alpha=self.shift**-0.5)

    def _apply(self, block: Tensor) -> Tensor:
        return self._half(self.inner._multiply(self._half(block)))

    def known_bounds(self) -> tuple[float, float]:
        low, high = super().known_bounds()
        return max(self.low, low), high


def _cholesky(operator: LinearOperator, rank: int | None, sure: bool) -> Preconditioned:
    """P = LLᵀ + δI with L of A − aI, a the known lower bound of the spectrum, and δ the mean of what L leaves.

    A ≥ LLᵀ + aI, so that P^{−½}AP^{−½} is at least a/δ.
    """
    most = min(DEFAULT_RANK, operator.dim // 4 + 1) if rank is None else rank
    known = operator.known_bounds()[0]
    floor = known if 0 < known < math.inf else 0.0
    before = operator.matvecs
    diagonal = _diagonal(operator, "cholesky").double() - floor
    left, rest = _pivoted(operator, diagonal, floor, most)
    if not sure and float(rest.mean()) > 0.5 * (1 - left.shape[1] / operator.dim) * float(diagonal.mean()):
        return Preconditioned(operator, operator, cost=operator.matvecs - before)
    shift = floor + float(rest.clamp_min(0.0).mean()) or float(torch.finfo(operator.dtype).eps)
    basis, singular, _ = torch.linalg.svd(left, full_matrices=False)
    values = singular.square()
    logdet = float((values + shift).log().sum()) + (operator.dim - len(values)) * math.log(shift)
    dtype = working_dtype(operator)
    whitened = Whitened(operator, basis.to(dtype), values.to(dtype), shift, min(1.0, floor / shift))
    spent, name = operator.matvecs - before, f"a Cholesky factor of rank {len(values)}"
    return Preconditioned(operator, whitened, logdet, spent, name)


def _pivoted(operator: LinearOperator, diagonal: Tensor, floor: float, rank: int) -> tuple[Tensor, Tensor]:
    """L (n, r) of A − floor·I by largest pivots, in float64, and the diagonal of what is left.

    It ends early where rounding is all that is left.
    """
    left = diagonal.new_zeros(operator.dim, rank)
    noise = 4.0 * float(torch.finfo(operator.dtype).eps) * float(diagonal.max()) * math.sqrt(operator.dim)
    for step in range(rank):
        pivot = int(diagonal.argmax())
        size = float(diagonal[pivot])
        if size <= noise:
            return left[:, : max(step, 1)], diagonal
        column = operator.columns([pivot])[:, 0].double()
        column[pivot] -= floor
        column -= left[:, :step] @ left[pivot, :step]
        left[:, step] = column / math.sqrt(size)
        diagonal = diagonal - left[:, step].square()
        diagonal[pivot] = 0.0
        report("preconditioner", step + 1, rank)
    return left, diagonal
