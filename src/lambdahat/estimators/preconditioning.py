"""Preconditioners with a known determinant: log det A = log det P + log det(P^{−½} A P^{−½})."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lambdahat._core.check import message, require, require_choice, require_count
from lambdahat._core.progress import report
from lambdahat.krylov import Lanczos, working_dtype
from lambdahat.operators.base import LinearOperator, Scaled, Sum, multiple_of_identity
from lambdahat.operators.kernel_matrix import KernelMatrix
from lambdahat.operators.matrix import FromTorchOperator, Matrix

KINDS = ("auto", "none", "jacobi", "cholesky")
UNEVEN = 4.0  # a diagonal that varies by less is left alone
DEFAULT_RANK = 200
# roundings of the largest eigenvalue above which one is known well enough to divide by
RESOLVED = 1e3
# shares of the variance: of one eigenvalue to be deflated, and of all of them together
STANDS_OUT, GAIN = 0.05, 0.3
ISOLATED = 0.01  # the residual of a pair that is one eigenvalue, over the distance to the next
WEIGHT = 20.0  # P times the weight of one eigenvalue, χ² with one degree of freedom, at most
MOST_DEFLATED, LARGE = 20, 1e4


@dataclass(frozen=True)
class Preconditioned:
    """``operator`` is P^{−½} A P^{−½}, ``logdet`` log det P, ``cost`` the products spent.

    ``name`` says what P is; its eigenvalues lie in [``least``, ``largest``].
    """

    original: LinearOperator
    operator: LinearOperator
    logdet: float = 0.0
    cost: int = 0
    name: str = ""
    least: float = 1.0
    largest: float = 1.0

    @cached_property
    def bounds(self) -> tuple[float, float]:
        """What the operator knows of its bounds, asked for once: it reads all entries."""
        return self.operator.known_bounds()

    @cached_property
    def moments(self) -> tuple[float | None, float | None]:
        """The trace of the operator and that of its square as far as they are known."""
        return self.operator.known_trace(), self.operator.known_squares()

    def inside(self, bounds: tuple[float, float]) -> tuple[float, float]:
        """Bounds of the spectrum of P^{−½} A P^{−½} from those of A."""
        low, high = self.bounds
        return max(bounds[0] / self.largest, low), min(bounds[1] / self.least, high)


def preconditioned(
    operator: LinearOperator, kind: str, rank: int | None, scale: float = 1.0
) -> Preconditioned:
    """The operator behind the preconditioner of ``kind``.

    "jacobi" divides by the square roots of the diagonal. "cholesky" is a partial Cholesky
    factorisation with the largest pivots, P = LLᵀ + δI of rank ``rank``, one column a rank; δ is
    the lower bound of the spectrum if one is known. "auto" is Cholesky if columns are cheap, for
    kernel matrices and dense ones, dropped if it leaves more than half of what it would of a
    diagonal matrix; else Jacobi if the diagonal is known and uneven; else none. Errors quote
    entries times ``scale``.
    """
    require_precondition(kind, rank, operator.dim)
    if kind == "none":
        return Preconditioned(operator, operator)
    if kind == "jacobi":
        return _jacobi(operator, scale)
    if kind == "cholesky":
        return _cholesky(operator, rank, sure=True, scale=scale)
    diagonal = operator.known_diagonal()
    if diagonal is None or not bool((diagonal > 0).all()):
        return Preconditioned(operator, operator)
    factor = Preconditioned(operator, operator)
    if _has_columns(operator):
        factor = _cholesky(operator, rank, sure=False)
    if not factor.name and float(diagonal.max()) > UNEVEN * float(diagonal.min()):
        return replace(_jacobi(operator), cost=factor.cost)
    return factor


def require_precondition(kind: str, rank: int | None, dim: int) -> None:
    """Refuse a preconditioner that is not known, and a rank that it does not have."""
    require_choice(kind, "precondition", KINDS)
    if rank is not None:
        fits = kind in ("auto", "cholesky")
        require(fits, "rank", "come with precondition='cholesky'", f"{rank!r} with {kind!r}")
        require_count(rank, "rank", 1, dim)


def _has_columns(operator: LinearOperator) -> bool:
    """Whether columns are cheap: kernels, dense matrices, and sums of such with the identity."""
    if isinstance(operator, Sum):
        parts = operator.first, operator.second
        known = all(_has_columns(part) or multiple_of_identity(part) for part in parts)
        return known and any(map(_has_columns, parts))
    if isinstance(operator, Scaled):
        return _has_columns(operator.inner)
    dense = isinstance(operator, Matrix) and operator.matrix.layout == torch.strided
    return dense or isinstance(operator, KernelMatrix | FromTorchOperator)


def _diagonal(operator: LinearOperator, kind: str, scale: float) -> Tensor:
    """The diagonal, which must be known and, for a positive definite matrix, positive."""
    diagonal = operator.known_diagonal()
    if diagonal is None:
        expected = "be 'none' where no diagonal is known"
        raise ValueError(message("precondition", expected, repr(kind)))
    least = float(diagonal.min())
    got = f"the diagonal entry {scale * least:.3g}"
    cure = "add a shift: operator + delta * identity(operator)"
    require(least > 0, "the operator of logdet", "be positive definite", got, cure)
    return diagonal


class Rescaled(LinearOperator):
    """D A D with a diagonal D."""

    def __init__(self, inner: LinearOperator, scale: Tensor) -> None:
        super().__init__(
            inner.dim, inner.dtype, inner.device, symmetric=inner.symmetric, psd=inner.psd
        )
        self.inner, self.scale = inner, scale[:, None]

    def _apply(self, block: Tensor) -> Tensor:
        return self.scale * self.inner._multiply(self.scale * block)

    def known_diagonal(self) -> Tensor | None:
        diagonal = self.inner.known_diagonal()
        return None if diagonal is None else diagonal * self.scale[:, 0] ** 2

    def known_bounds(self) -> tuple[float, float]:
        least, largest = (float(end) ** 2 for end in self.scale.aminmax())
        low, high = self.inner.known_bounds()
        ends = low * (least if low > 0 else largest), high * (largest if high > 0 else least)
        own = super().known_bounds()
        return max(own[0], ends[0]), min(own[1], ends[1])


def _jacobi(operator: LinearOperator, scale_of_errors: float = 1.0) -> Preconditioned:
    diagonal = _diagonal(operator, "jacobi", scale_of_errors)
    scale = diagonal.rsqrt()
    scaled = operator.rescaled(scale) if isinstance(operator, Matrix) else Rescaled(operator, scale)
    logdet = float(diagonal.double().log().sum())
    ends = (float(diagonal.min()), float(diagonal.max()))
    return Preconditioned(operator, scaled, logdet, 0, "Jacobi scaling", *ends)


class Whitened(LinearOperator):
    """P^{−½} A P^{−½} for P = U diag(s) Uᵀ + δ(I − UUᵀ) with orthonormal U (n, r).

    ``trace`` and ``squares`` are its trace and that of its square, if known.
    """

    def __init__(
        self,
        inner: LinearOperator,
        basis: Tensor,
        values: Tensor,
        shift: float,
        low: float,
        trace: float | None = None,
        squares: float | None = None,
    ) -> None:
        super().__init__(inner.dim, inner.dtype, inner.device, psd=inner.psd)
        self.inner, self.basis, self.shift, self.low = inner, basis, shift, low
        self.factors = (values.double().rsqrt() - shift**-0.5).to(basis.dtype)[:, None]
        self.trace, self.squares = trace, squares

    def _half(self, block: Tensor) -> Tensor:
        """P^{−½} block."""
        spread: Tensor = self.basis @ (self.factors * (self.basis.T @ block))
        return spread.add_(block, alpha=self.shift**-0.5)

    def _apply(self, block: Tensor) -> Tensor:
        return self._half(self.inner._multiply(self._half(block)))

    def known_trace(self) -> float | None:
        return self.trace

    def known_squares(self) -> float | None:
        return self.squares

    def known_bounds(self) -> tuple[float, float]:
        low, high = super().known_bounds()
        return max(self.low, low), high


@dataclass(frozen=True)
class Outliers:
    """Isolated Ritz pairs: ``values`` (k,), ``residuals`` (k,), and vectors in a basis (m, k).

    ``middle`` is the geometric mean of the other eigenvalues.
    """

    values: Tensor
    residuals: Tensor
    vectors: Tensor
    middle: float

    def change(self) -> float:
        """Σ |log(θ/c)|: what log det would change by if they were in the middle."""
        return float((self.values.log() - math.log(self.middle)).abs().sum())

    def squares(self) -> float:
        """Σ log²(θ/c): half the variance that they give to the log det of one probe."""
        return float((self.values.log() - math.log(self.middle)).square().sum())


def outliers(operator: LinearOperator, run: Lanczos) -> Outliers | None:
    """Isolated eigenvalues that make much of the variance of a probe's log det, or None."""
    nodes, vectors = torch.linalg.eigh(run.tridiagonal)
    residuals, weights = (run.residual * vectors[-1]).abs(), vectors[0].square()
    if float(nodes[0]) <= 0:
        return None
    logs, noise = nodes.log(), RESOLVED * float(torch.finfo(operator.dtype).eps) * float(nodes[-1])
    middle = float(weights @ logs)
    infinite = nodes.new_full((1,), math.inf)
    gaps = torch.minimum(torch.cat([infinite, nodes.diff()]), torch.cat([nodes.diff(), infinite]))
    close = residuals <= ISOLATED * gaps
    close &= residuals.square() <= ISOLATED * nodes * math.exp(middle)
    settled = close & (nodes > max(noise, run.noise)) & (operator.dim * weights <= WEIGHT)
    apart = (logs - middle).square()
    # a settled pair is one eigenvalue of P, whatever weight this probe gives it
    share = torch.where(settled, apart, operator.dim * weights * apart)
    chosen = (settled & (share >= STANDS_OUT * float(share.sum()))).nonzero().flatten()
    chosen = chosen[share[chosen].argsort(descending=True)[:MOST_DEFLATED]]
    if not 0 < len(chosen) < len(nodes) or float(share[chosen].sum()) < GAIN * float(share.sum()):
        return None
    rest = torch.ones(len(nodes), dtype=torch.bool).index_fill_(0, chosen, False)
    centre = math.exp(float((weights * logs)[rest].sum() / weights[rest].sum()))
    return Outliers(nodes[chosen], residuals[chosen], vectors[:, chosen], centre)


def deflate(ready: Preconditioned, run: Lanczos, found: Outliers) -> Preconditioned:
    """The operator with the outliers of ``run`` moved to its middle.

    A probe sees an eigenvalue with a random weight, so that one far from all others makes log det
    vary by |log(θ/c)|, and a polynomial of low degree does not follow the logarithm down to a small
    one. P = c(I − UUᵀ) + U diag(θ) Uᵀ, with the pairs (θ, u) and c the middle, has an exact
    determinant for any orthonormal U, and P^{−½} A P^{−½} has the eigenvalue 1 in place of θ.
    """
    inner, values, shift = ready.operator, found.values, found.middle
    basis = torch.linalg.qr(run.basis @ found.vectors.to(run.basis)).Q
    inverse, (trace, squares) = 1 / values - 1 / shift, ready.moments
    if float(values.max()) > LARGE * shift:  # the sums below would cancel
        trace = squares = None
    trace = None if trace is None else trace / shift + float(inverse @ values)
    if squares is not None:
        mixed = 2 / shift * (inverse @ (values.square() + found.residuals.square()))
        squares = squares / shift**2 + float(mixed + inverse.square() @ values.square())
    least, largest = min(shift, float(values.min())), max(shift, float(values.max()))
    low = max(ready.bounds[0], 0.0) / largest
    whitened = Whitened(inner, basis, values.to(basis.device), shift, low, trace, squares)
    logdet = float(values.log().sum()) + (inner.dim - len(values)) * math.log(shift)
    deflation = f"deflation of {len(values)} eigenvalues"
    name = f"{ready.name} and {deflation}" if ready.name else deflation
    ends, spent = (ready.least * least, ready.largest * largest), ready.cost + run.products
    return Preconditioned(ready.original, whitened, ready.logdet + logdet, spent, name, *ends)


def _cholesky(
    operator: LinearOperator, rank: int | None, sure: bool, scale: float = 1.0
) -> Preconditioned:
    """P = LLᵀ + δI with L of A − aI, a the known lower bound of the spectrum; δ is the mean rest.

    A ≥ LLᵀ + aI, so that P^{−½}AP^{−½} is at least a/δ.
    """
    most = min(DEFAULT_RANK, operator.dim // 4 + 1) if rank is None else rank
    known = operator.known_bounds()[0]
    floor = known if 0 < known < math.inf else 0.0
    before = operator.matvecs
    diagonal = _diagonal(operator, "cholesky", scale).double() - floor
    left, rest = _pivoted_cholesky(operator, diagonal, floor, most)
    # what a diagonal matrix would leave
    others = diagonal.sort().values[: operator.dim - left.shape[1]]
    if not sure and float(rest.sum()) > 0.5 * float(others.sum()):
        return Preconditioned(operator, operator, cost=operator.matvecs - before)
    shift = floor + float(rest.clamp_min(0.0).mean()) or float(torch.finfo(operator.dtype).eps)
    basis, singular, _ = torch.linalg.svd(left, full_matrices=False)
    values = singular.square() + shift
    logdet = float(values.log().sum()) + (operator.dim - len(values)) * math.log(shift)
    basis = basis.to(working_dtype(operator))
    whitened = Whitened(operator, basis, values, shift, min(1.0, floor / shift))
    spent, name = operator.matvecs - before, f"a Cholesky factor of rank {len(values)}"
    return Preconditioned(operator, whitened, logdet, spent, name, shift, float(values.max()))


def _pivoted_cholesky(
    operator: LinearOperator, diagonal: Tensor, floor: float, rank: int
) -> tuple[Tensor, Tensor]:
    """L (n, r) of A − floor·I by largest pivots in float64, and the diagonal of the rest.

    It ends early if only rounding is left.
    """
    left = diagonal.new_zeros(operator.dim, rank)
    eps, size = float(torch.finfo(operator.dtype).eps), float(diagonal.max())
    noise = 4.0 * eps * size * math.sqrt(operator.dim)
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
