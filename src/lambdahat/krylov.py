"""Krylov methods on symmetric operators: Lanczos, its thick restart, simultaneous power iteration, conjugate gradients.

Vectors are kept in the operator's dtype, scalars in float64: float32 dot products would cap the accuracy of
Lanczos at about 2e-5. A basis is stored one vector a row, so that reorthogonalisation is two contiguous gemv.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lambdahat._check import require, require_count, require_positive
from lambdahat._progress import report
from lambdahat._rng import generator
from lambdahat.operators.base import LinearOperator, identity

BREAKDOWN = 10.0  # β below this many roundings of the spectral scale ends a Krylov space
ROUNDING = 8.0  # the residual that rounding leaves, in roundings of the spectral scale
GEMV_RUN = 4096
CHUNK = 1 << 20  # elements per float64 copy

Select = Callable[[Tensor, int], Tensor]
"""(values (m,), k) -> the indices of the k wanted values in output order, or of all when there are fewer."""


def require_symmetric(operator: LinearOperator, name: str) -> None:
    """Refuse what is no operator, or no symmetric one, by the name of the caller."""
    known = isinstance(operator, LinearOperator)
    require(known, "operator", "be a LinearOperator", operator, "wrap a matrix with lh.operator(matrix)", TypeError)
    require(operator.symmetric, f"the operator of {name}", "be symmetric", repr(operator),
            "use its symmetric part, or A.T @ A for singular values")  # fmt: skip


def require_finite(products: Tensor) -> None:
    """Refuse NaN and infinity in what products gave."""
    require(bool(torch.isfinite(products).all()), "a product of the operator", "be finite", "NaN or infinity",
            "check the loss and the parameters for NaN")  # fmt: skip


def working_dtype(operator: LinearOperator) -> torch.dtype:
    """The dtype of basis vectors: the operator's own, and float32 for half precision."""
    return operator.dtype if operator.dtype in (torch.float32, torch.float64) else torch.float32


def random_vector(operator: LinearOperator, seed: int, *names: object) -> Tensor:
    """A unit vector (P,), uniform on the sphere: drawn on the CPU, then moved to the operator's device."""
    draw: Tensor = torch.randn(operator.dim, generator=generator(seed, *names), dtype=torch.float64)
    return draw.div_(torch.linalg.vector_norm(draw)).to(operator.device, working_dtype(operator))


class Krylov:
    """A decomposition A Q = Q T + β q eᵀ that grows by one product at a time in a preallocated basis.

    ``rows[:size]`` is Qᵀ and ``rows[size]`` the next vector q. T has ``alpha`` on its diagonal; ``beta[j]`` couples
    vector j to j + 1, or, for the first ``kept`` vectors (those that a thick restart kept), to vector ``kept``.
    The vectors from ``origin`` on come from the newest random start: those before it span a (nearly) invariant space.
    """

    def __init__(self, operator: LinearOperator, start: Tensor, capacity: int) -> None:
        self.operator, self.capacity = operator, capacity
        self.rows = torch.empty(capacity + 1, operator.dim, dtype=working_dtype(operator), device=operator.device)
        self.rows[0] = start.to(self.rows) / torch.linalg.vector_norm(start, dtype=torch.float64)
        self.alpha = torch.zeros(capacity, dtype=torch.float64, device=operator.device)
        self.beta, self.drift = torch.zeros_like(self.alpha), torch.zeros_like(self.alpha)
        self.size = self.kept = self.origin = 0
        self.products = 0
        self._checked = 0

    @property
    def rounding(self) -> float:
        """Relative rounding of one product."""
        return float(torch.finfo(self.operator.dtype).eps)

    def extend(self) -> None:
        """One Lanczos step: one product, then Gram–Schmidt against the whole basis.

        After the three-term recurrence only rounding is left to remove, so the second pass is skipped where the
        first one changed little ("twice is enough", Parlett 1998, §6.9); on a GPU asking would cost more than doing.
        """
        j, rows = self.size, self.rows
        image = (self.operator @ rows[j]).to(rows.dtype)
        alpha = dot(image, rows[j])
        w = torch.addcmul(image, rows[j], alpha.to(rows.dtype), value=-1)
        if j == self.kept and j > 0:
            w.addmv_(rows[:j].T, self.beta[:j].to(rows.dtype), alpha=-1)
        elif j > 0:
            w.addcmul_(rows[j - 1], self.beta[j - 1].to(rows.dtype), value=-1)
        before = torch.linalg.vector_norm(w, dtype=torch.float64)
        correction = self._orthogonalise(w, j + 1)
        self.drift[j] = torch.linalg.vector_norm(correction, dtype=torch.float64)
        alpha = alpha + correction[j]
        if w.is_cuda or float(self.drift[j]) > 0.1 * float(before):
            alpha = alpha + self._orthogonalise(w, j + 1)[j]
        self.alpha[j] = alpha
        self.beta[j] = torch.linalg.vector_norm(w, dtype=torch.float64)
        # a zero β stays a zero vector until the next call of broke_down
        torch.div(w, self.beta[j].clamp_min(torch.finfo(rows.dtype).tiny).to(rows.dtype), out=rows[j + 1])
        self.size, self.products = j + 1, self.products + 1

    def _orthogonalise(self, w: Tensor, count: int) -> Tensor:
        """w − QQᵀw in place over the first ``count`` vectors; returns Qᵀw."""
        overlaps = _overlaps(self.rows[:count], w)
        w.addmv_(self.rows[:count].T, overlaps.to(w.dtype), alpha=-1)
        return overlaps

    def broke_down(self) -> bool:
        """Look for a vanished β since the last look; if there is one, cut the decomposition back to it.

        A β that is not quite rounding but fell by far in one step is an end too, seen through amplified rounding,
        which from there on serves as a random start: ``origin`` notes it. This is the only host synchronisation of a
        run: on a GPU, call it every few steps.
        """
        alpha, beta = self.alpha[: self.size].cpu(), self.beta[: self.size].cpu()
        require_finite(torch.stack([alpha, beta]))
        scale = float(torch.maximum(alpha.abs(), beta).max())
        fresh = torch.arange(self.size) >= max(self._checked, self.kept)
        small = torch.nonzero(fresh & (beta <= BREAKDOWN * self.rounding * scale)).flatten()
        fell = beta <= 0.01 * torch.cat([beta[:1], beta[:-1]])
        fell = torch.nonzero(fresh & fell & (beta <= math.sqrt(self.rounding) * scale)).flatten()
        if len(fell) and int(fell[-1]) > self.kept:
            self.origin = int(fell[-1]) + 1
        if len(small):
            self.size = int(small[0]) + 1
        self._checked = self.size
        return len(small) > 0

    def start_again(self, vector: Tensor) -> None:
        """Continue from a new random direction, decoupled from what is there: how repeated eigenvalues are found."""
        w = vector.to(self.rows)
        for _ in range(2):
            self._orthogonalise(w, self.size)
        self.rows[self.size] = w / torch.linalg.vector_norm(w, dtype=torch.float64)
        self.beta[self.size - 1] = 0.0
        if self.size == self.kept:  # the arrow of a restart ends here too
            self.beta[: self.size] = 0.0
        self.origin = self.size

    def projected(self) -> Tensor:
        """T (m, m) on the host, float64."""
        m, kept = self.size, self.kept
        matrix = torch.diag(self.alpha[:m].cpu())
        beta = self.beta[:m].cpu()
        for j in range(m - 1 if m > kept else 0):
            other = kept if j < kept else j + 1
            matrix[j, other] = matrix[other, j] = beta[j]
        return matrix

    def ritz(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ritz values (m,), their vectors in the basis (m, m) and couplings β s_m (m,) to the next vector, on the host."""
        values, vectors = torch.linalg.eigh(self.projected())
        return values, vectors, vectors[-1] * float(self.beta[self.size - 1])

    def noise(self) -> float:
        """How far the products are from those of one symmetric matrix: max_j ‖Qᵀ(Aq_j − Tq_j)‖, free by-product."""
        return float(self.drift[: self.size].max())

    def combine(self, weights: Tensor, out: Tensor) -> None:
        """out (k, P) = weightsᵀ (k, m) Qᵀ, by column chunks so that ``out`` may be the first rows of the basis."""
        weights = weights.T.to(self.rows)
        step = max(1, CHUNK // max(1, self.size))
        for left in range(0, self.operator.dim, step):
            out[:, left : left + step] = weights @ self.rows[: self.size, left : left + step]

    def restart(self, values: Tensor, weights: Tensor, couplings: Tensor) -> None:
        """Thick restart (Wu and Simon 2000): keep some Ritz vectors, the last residual couples them all."""
        count, last = len(values), self.rows[self.size]
        self.combine(weights, self.rows[:count])
        self.rows[count] = last
        self.alpha[:count], self.beta[:count] = values.to(self.alpha), couplings.to(self.beta)
        self.drift[0] = self.noise()
        self.size = self.kept = self._checked = count
        self.origin = min(self.origin, 1) * count


def dot(first: Tensor, second: Tensor) -> Tensor:
    """Σ_i a_i b_i in float64 on the device, of two vectors (P,) or column by column of two blocks (P, k)."""
    pairs = zip(first.split(CHUNK), second.split(CHUNK), strict=True)
    return torch.stack([(a.double() * b.double()).sum(0) for a, b in pairs]).sum(0)


def _overlaps(rows: Tensor, w: Tensor) -> Tensor:
    """Qᵀw for Qᵀ (m, P). A float32 gemv on a CPU runs down each row and errs by 1e-6 on P = 10⁵; short runs, summed in
    float64, err by 1e-7 at the same memory traffic. On a GPU the reduction is a tree already."""
    if w.is_cuda or w.dtype == torch.float64:
        return rows @ w
    parts = zip(rows.split(GEMV_RUN, dim=1), w.split(GEMV_RUN), strict=True)
    return torch.stack([a @ b for a, b in parts]).sum(0, dtype=torch.float64)


@dataclass(frozen=True)
class Lanczos:
    """A Q = Q T + residual·q eᵀ: orthonormal ``basis`` Q (P, m), T tridiagonal of ``alpha`` (m,) and ``beta`` (m−1,).

    ``alpha`` and ``beta`` are float64 on the host; m is less than the depth asked for when an invariant subspace was
    found. ``noise`` is how far the products were from those of one symmetric matrix.
    """

    basis: Tensor
    alpha: Tensor
    beta: Tensor
    residual: float
    noise: float
    products: int

    def ritz(self, depth: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Ritz values (m,), Gauss weights (m,) and residuals (m,) of the leading ``depth`` steps (default: all)."""
        m = len(self.alpha) if depth is None else min(depth, len(self.alpha))
        off = self.beta[: m - 1]
        values, vectors = torch.linalg.eigh(torch.diag(self.alpha[:m]) + torch.diag(off, 1) + torch.diag(off, -1))
        last = self.residual if m == len(self.alpha) else float(self.beta[m - 1])
        return values, vectors[0] ** 2, (last * vectors[-1]).abs()


def lanczos(
    operator: LinearOperator, start: Tensor, depth: int, task: str = "lanczos", progress: tuple[int, int] | None = None
) -> Lanczos:
    """``depth`` steps from ``start`` (P,) with full reorthogonalisation; fewer when an invariant subspace is met.

    One product a step. Golub and Van Loan, Algorithm 10.3.1, with classical Gram–Schmidt against all of Q. Progress is
    reported for ``task``, as part of ``progress`` = (products done before, total).
    """
    require_symmetric(operator, task)
    require_count(depth, "depth", 1, operator.dim, "at this size op.dense() is exact")
    require(start.shape == (operator.dim,), "start", f"have shape ({operator.dim},)", start)
    before, total = progress or (0, depth)
    state = Krylov(operator, start, depth)
    for step in range(1, depth + 1):
        state.extend()
        report(task, before + step, total)
        if (step % _look_every(operator) == 0 or step == depth) and state.broke_down():
            break
    m = state.size
    alpha, beta = state.alpha[:m].cpu(), state.beta[:m].cpu()
    return Lanczos(state.rows[:m].T, alpha, beta[:-1], float(beta[-1]), state.noise(), state.products)


def _look_every(operator: LinearOperator) -> int:
    """Steps between looks at β: each is a synchronisation on a GPU, and free elsewhere."""
    return 16 if operator.device.type == "cuda" else 1


@dataclass(frozen=True)
class RitzPairs:
    """Approximate eigenpairs: ``values`` (k,), ``vectors`` (P, k), ``residuals`` (k,), ``errors`` of the values (k,).

    ``errors`` estimates |θ − λ| by min(r, r²/gap); ``noise`` is the rounding of the values that no further product
    removes; ``scale`` is the largest |Ritz value| seen.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    errors: Tensor
    noise: float
    scale: float
    products: int


def thick_restart_lanczos(
    operator: LinearOperator, select: Select, k: int, *, tol: float, max_matvecs: int, capacity: int, seed: int,
    task: str = "eigenpairs",
) -> RitzPairs:  # fmt: skip
    """The ``k`` eigenpairs that ``select`` wants, to a relative accuracy ``tol`` of the values.

    Thick-restart Lanczos (Wu and Simon 2000), which is Krylov–Schur for symmetric matrices: at most ``capacity`` + 1
    vectors are stored. Stops when min(r, r²/gap) ≤ max(tol·max|θ|, rounding) for all wanted pairs, or when
    ``max_matvecs`` products are spent. After an invariant subspace it goes on from a random vector, until that finds
    nothing better: this is how repeated eigenvalues are found.
    """
    state = Krylov(operator, random_vector(operator, seed, task, 0), capacity)
    starts, look = 0, state.size
    while True:
        state.extend()
        report(task, state.products, max_matvecs)
        full = state.size == capacity
        spent = state.products >= max_matvecs
        if not (full or spent or state.size >= look or operator.device.type != "cuda"):
            continue
        broke = state.broke_down()
        if not (broke or full or spent or state.size >= look):
            continue
        pairs = _Projection.of(state)
        if spent or pairs.finished(select, k, tol, operator.dim, broke):
            return pairs.extract(select, k)
        if full and state.size == capacity:
            pairs.restart(select, k)
        if broke:
            starts += 1
            state.start_again(random_vector(operator, seed, task, starts))
        look = state.size + max(4 if operator.device.type == "cuda" else 1, state.size // 16)


@dataclass(frozen=True)
class _Projection:
    """The Ritz pairs of a decomposition at one moment, and what to do next."""

    state: Krylov
    values: Tensor
    weights: Tensor
    couplings: Tensor
    errors: Tensor

    @classmethod
    def of(cls, state: Krylov) -> _Projection:
        values, weights, couplings = state.ritz()
        return cls(state, values, weights, couplings, value_errors(values, couplings.abs()))

    @property
    def noise(self) -> float:
        return max(self.state.noise(), self.state.rounding * self.scale)

    @property
    def scale(self) -> float:
        return float(self.values.abs().max())

    def finished(self, select: Select, k: int, tol: float, dim: int, broke: bool) -> bool:
        """True when the wanted pairs are accurate, and no repeated eigenvalue can be missing."""
        if self.state.size == dim:
            return True
        wanted, target = select(self.values, k), max(tol * self.scale, self.noise)
        if len(wanted) < k or bool((self.errors[wanted] > target).any()):
            return False
        return not broke if self.state.origin == 0 else self._nothing_new(select, k, target)

    def _nothing_new(self, select: Select, k: int, target: float) -> bool:
        """True when the newest start, whose best value has converged, changes none of the wanted values.

        That best value bounds all that the earlier starts have left out, copies of their eigenvalues among them.
        """
        matrix, cut = self.state.projected(), self.state.origin
        if cut < k or cut == self.state.size:
            return False
        values, weights = torch.linalg.eigh(matrix[cut:, cut:])
        errors = value_errors(values, (weights[-1] * float(self.state.beta[self.state.size - 1])).abs())
        older = torch.linalg.eigvalsh(matrix[:cut, :cut])
        changes = self.values[select(self.values, k)] - older[select(older, k)]
        return bool((errors[select(values, 1)] <= target).all() and (changes.abs() <= target).all())

    def extract(self, select: Select, k: int) -> RitzPairs:
        wanted = select(self.values, k)
        vectors = self.state.rows.new_empty(len(wanted), self.state.operator.dim)
        self.state.combine(self.weights[:, wanted], vectors)
        residuals = torch.hypot(self.couplings[wanted], torch.tensor(ROUNDING * self.noise, dtype=torch.float64))
        return RitzPairs(self.values[wanted], vectors.T, residuals, self.errors[wanted], self.noise, self.scale,
                         self.state.products)  # fmt: skip

    def restart(self, select: Select, k: int) -> None:
        """Keep the wanted pairs, and their next neighbours in half of the room that is left."""
        keep = select(self.values, k + (self.state.size - k) // 2)
        self.state.restart(self.values[keep], self.weights[:, keep], self.couplings[keep])


def value_errors(values: Tensor, residuals: Tensor) -> Tensor:
    """min(r, r²/gap): how far Ritz values (m,) in ascending order are from eigenvalues (Parlett 1998, Theorem 11.7.1).

    The gap is to the nearest other Ritz value, less that value's own residual.
    """
    if len(values) < 2:
        return residuals.clone()
    distance = (values[:, None] - values[None, :]).abs() - residuals[None, :]
    gap = distance.fill_diagonal_(math.inf).amin(dim=1).clamp_min(0.0)
    return torch.where(gap > residuals, residuals**2 / gap.clamp_min(1e-300), residuals)


def simultaneous_power_iteration(
    operator: LinearOperator, k: int, *, tol: float, max_matvecs: int, seed: int
) -> RitzPairs:
    """The k eigenpairs of largest magnitude: Q, R = QR(A Q) until Q stands still.

    Algorithm 1 of "Generalizing Regularization of Neural Networks to Correlated Parameter Spaces", which stops when
    Σ(Q − Q_prev)² ≤ tol for successive Q (as printed, Q_prev is never refreshed). The sign of each column is matched
    to its predecessor, for those of negative eigenvalues flip at every step. The values are Rayleigh quotients on the
    last Q, not diag R, and the residuals are true ones: both come from products already made. ``errors`` are the
    squared changes of the columns.
    """
    draws = [random_vector(operator, seed, "power_iteration", column) for column in range(k)]
    basis = torch.linalg.qr(torch.stack(draws, dim=1)).Q
    products = 0
    while True:
        image = (operator @ basis).to(basis.dtype)
        products += k
        report("power_iteration", products, max_matvecs)
        require_finite(image)
        following = torch.linalg.qr(image).Q
        following = following * torch.where((following * basis).sum(0) < 0, -1.0, 1.0).to(basis.dtype)
        changes = ((following - basis).double() ** 2).sum(0).cpu()
        if float(changes.sum()) <= tol or products + k > max_matvecs:
            return _rayleigh_ritz(operator, basis, image, changes, products)
        basis = following


def _rayleigh_ritz(operator: LinearOperator, basis: Tensor, image: Tensor, changes: Tensor, products: int) -> RitzPairs:
    """Ritz pairs on an orthonormal ``basis`` (P, k) with known ``image`` A·basis, by descending magnitude."""
    gram = (basis.double().T @ image.double()).cpu()
    values, weights = torch.linalg.eigh((gram + gram.T) / 2)
    order = values.abs().argsort(descending=True, stable=True)
    values, weights = values[order], weights[:, order]
    turn = weights.to(basis)
    vectors = basis @ turn
    gone = (image @ turn).double() - vectors.double() * values.to(vectors.device)
    scale = float(values.abs().max())
    noise = float(torch.finfo(operator.dtype).eps) * scale
    return RitzPairs(values, vectors, gone.norm(dim=0).cpu(), changes, noise, scale, products)


@dataclass(frozen=True)
class Solution:
    """X (P,) or (P, k) with AX ≈ B: ``residuals`` ‖B − AX‖/‖B‖ by the recurrence, per right-hand side.

    ``curvature`` is the least pᵀAp/pᵀp met; at or below 0 the operator is not positive definite.
    """

    solution: Tensor
    residuals: Tensor
    converged: Tensor
    curvature: float
    cost: int


def conjugate_gradients(
    operator: LinearOperator, rhs: Tensor, tol: float = 1e-8, max_matvecs: int | None = None,
    preconditioner: LinearOperator | None = None,
) -> Solution:  # fmt: skip
    """Solve A X = B for a positive definite A, each column on its own, all products in blocks.

    Hestenes and Stiefel (1952) with float64 scalars; ``max_matvecs`` is per right-hand side (default: 10·P, at most
    10,000). A column stops at ‖r‖ ≤ tol·‖b‖, or when a direction of non-positive curvature shows that A is not positive
    definite. ``preconditioner`` is an operator near A⁻¹.
    """
    require_symmetric(operator, "conjugate_gradients")
    require_positive(tol, "tol")
    limit = min(10 * operator.dim + 10, 10_000) if max_matvecs is None else require_count(max_matvecs, "max_matvecs")
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
        direction = z if direction is None or old is None else z + direction * (new / old).to(r.dtype)
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
    relative = torch.where(size > 0, left / size, 0.0).cpu()
    return Solution(solution.reshape(rhs.shape), relative, relative <= tol, curvature, cost)


class Inverse(LinearOperator):
    """(A + damping·I)⁻¹ by conjugate gradients: one product of it costs as many of A as CG takes."""

    def __init__(self, inner: LinearOperator, damping: float, tol: float, max_matvecs: int | None) -> None:
        super().__init__(inner.dim, inner.dtype, inner.device, psd=inner.psd, space=inner.space)
        self.inner, self.damping, self.tol, self.max_matvecs = inner, damping, tol, max_matvecs

    def _apply(self, block: Tensor) -> Tensor:
        damped = self.inner + self.damping * identity(self.inner) if self.damping else self.inner
        found = conjugate_gradients(damped, block, self.tol, self.max_matvecs)
        met, left = found.curvature, float(found.residuals.max())
        require(met > 0, "the operator of inverse", "be positive definite", f"curvature {met:.3g}", "raise damping")
        require(bool(found.converged.all()), "conjugate gradients", f"reach a residual of {self.tol:g}",
                f"{left:.2g} after {found.cost} products", "raise max_matvecs, tol or damping")  # fmt: skip
        return found.solution.to(self.dtype)


def inverse(
    operator: LinearOperator, damping: float = 0.0, tol: float = 1e-8, max_matvecs: int | None = None
) -> Inverse:
    """(A + damping·I)⁻¹ as an operator, by conjugate gradients to relative residual ``tol``.

    A product raises an error when A + damping·I is not positive definite, or when ``max_matvecs`` products a right-hand
    side do not reach ``tol``.
    """
    require_symmetric(operator, "inverse")
    require(math.isfinite(damping) and damping >= 0, "damping", "be a finite number of at least 0", repr(damping))
    return Inverse(operator, float(damping), require_positive(tol, "tol"), max_matvecs)
