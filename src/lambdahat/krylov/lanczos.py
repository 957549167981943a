"""Lanczos on a symmetric operator, its basis kept orthonormal to a tenth of √ε or better.

Vectors are kept in the operator's dtype, scalars in float64: float32 dot products would cap the
accuracy of Lanczos at about 2e-5. A basis is stored one vector a row, so that reorthogonalisation
is two contiguous gemv; ``basis`` says where else it may be.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lambdahat._core.check import require, require_count
from lambdahat._core.precision import full_precision
from lambdahat._core.progress import report
from lambdahat._core.rng import generator
from lambdahat.krylov.basis import CHUNK, GEMV_RUN, Basis
from lambdahat.krylov.recorded_steps import RecordedSteps
from lambdahat.operators.base import LinearOperator
from lambdahat.operators.matrix import OperatorLike, as_operator

BREAKDOWN = 10.0  # β below this many roundings of the spectral scale ends a Krylov space
FIRST_LOOK = 8  # steps before a run is asked whether it is long enough
FALL = 0.01  # of β in one step: the end of a Krylov space seen through amplified rounding


def require_symmetric(given: OperatorLike, name: str) -> LinearOperator:
    """The operator that a caller of this ``name`` was given, or the matrix as one, which must be
    symmetric.
    """
    operator = as_operator(given)
    require(
        operator.symmetric,
        f"the operator of {name}",
        "be symmetric",
        repr(operator),
        "pass its symmetric part, lh.operator((M + M.T) / 2)",
    )
    return operator


def require_finite(products: Tensor) -> None:
    """Refuse NaN and infinity in what products gave."""
    _require_finite(bool(torch.isfinite(products).all()))


def _require_finite(finite: bool) -> None:
    require(
        finite,
        "a product of the operator",
        "be finite",
        "NaN or infinity",
        "check the loss and the parameters for NaN",
    )


def working_dtype(operator: LinearOperator) -> torch.dtype:
    """The dtype of basis vectors: the operator's own, and float32 for half precision."""
    return operator.dtype if operator.dtype in (torch.float32, torch.float64) else torch.float32


def random_vector(operator: LinearOperator, seed: int, *names: object) -> Tensor:
    """A unit vector (P,), uniform on the sphere: drawn on the CPU, then moved to the operator's
    device.
    """
    draw: Tensor = torch.randn(operator.dim, generator=generator(seed, *names), dtype=torch.float64)
    return draw.div_(torch.linalg.vector_norm(draw)).to(operator.device, working_dtype(operator))


class Krylov:
    """A decomposition A Q = Q T + β q eᵀ that grows by one product at a time in a basis
    preallocated at ``place``.

    ``rows[:size]`` is Qᵀ and ``rows[size]`` the next vector q. T has ``alpha`` on its diagonal;
    ``beta[j]`` couples vector j to j + 1, or, for the first ``kept`` vectors (those that a thick
    restart kept), to vector ``kept``. The vectors from ``origin`` on come from the newest random
    start: T is decoupled there, for those before it span a space that is invariant to within
    ``slack``.
    """

    def __init__(
        self, operator: LinearOperator, start: Tensor, capacity: int, place: str = "device"
    ) -> None:
        self.operator, self.capacity, dtype = operator, capacity, working_dtype(operator)
        self.basis = Basis(capacity + 1, operator.dim, dtype, operator.device, place)
        self.basis.put(
            0,
            start.to(operator.device, dtype),
            torch.linalg.vector_norm(start, dtype=torch.float64),
        )
        self.alpha = torch.zeros(capacity, dtype=torch.float64, device=operator.device)
        self.beta, self.drift = torch.zeros_like(self.alpha), torch.zeros_like(self.alpha)
        # fresh memory costs more than the arithmetic done in it
        self.scratch = torch.empty_like(self.basis[0])
        self.size = self.kept = self.origin = self.products = self._checked = 0
        self.slack = 0.0
        self.recorded = RecordedSteps.of(self.basis, operator, (self.alpha, self.beta, self.drift))

    @property
    def rows(self) -> Tensor:
        """The basis as it is stored, (capacity + 1, P)."""
        return self.basis.rows

    @property
    def rounding(self) -> float:
        """Relative rounding of one product."""
        return float(torch.finfo(self.operator.dtype).eps)

    def extend(self, orthogonalise: bool = True) -> None:
        """One Lanczos step: one product, then Gram–Schmidt against the whole basis unless told to
        leave it out.

        After the three-term recurrence only rounding is left to remove, so the second pass is
        skipped where the first one changed little ("twice is enough", Parlett 1998, §6.9); on a GPU
        asking would cost more than doing.
        """
        j, basis = self.size, self.basis
        if self.recorded is not None and (j != self.kept or j == 0):
            self.operator.matvecs += 1
            self.recorded.step(j)
            self.size, self.products = j + 1, self.products + 1
            return
        last = basis[j]
        w = (self.operator @ last).to(basis.dtype)  # a product is the caller's to change
        alpha = sum_of(torch.mul(w, last, out=self.scratch))
        w.addcmul_(last, alpha.to(basis.dtype), value=-1)
        if j == self.kept and j > 0:
            basis.subtract(w, self.beta[:j], j)
        elif j > 0:
            w.addcmul_(basis[j - 1], self.beta[j - 1].to(basis.dtype), value=-1)
        if not orthogonalise and float(beta := norm(w)) > FALL * float(self.beta[j - 1]):
            self._append(w, alpha, beta)
            return
        # a β that fell by far leaves a vector of rounding, which the next step would blow up
        correction = basis.orthogonalise(w, j + 1)
        alpha, beta = alpha + correction[j], norm(w)
        self.drift[j] = torch.linalg.vector_norm(correction, dtype=torch.float64)
        if self.rows.is_cuda or float(self.drift[j]) > 0.1 * float(beta):
            alpha = alpha + basis.orthogonalise(w, j + 1)[j]
            beta = norm(w)
        self._append(w, alpha, beta)

    def _append(self, w: Tensor, alpha: Tensor, beta: Tensor) -> None:
        j, dtype = self.size, self.basis.dtype
        self.alpha[j], self.beta[j] = alpha, beta
        # a zero β stays a zero vector until the next call of broke_down
        self.basis.put(j + 1, w, beta.clamp_min(torch.finfo(dtype).tiny).to(dtype))
        self.size, self.products = j + 1, self.products + 1

    def nearly_orthogonal(self) -> bool:
        """Whether the next vector will be orthogonal to a tenth of √ε without being made so.

        Semi-orthogonality, overlaps below √ε, keeps T exact to rounding (Simon 1984). Overlaps grow
        by some factor g each step they are left alone: ε·g was measured at this step, or ε·g² where
        the last step was left alone.
        """
        j = self.size - 1
        # a CUDA device would wait for the answer
        if self.rows.is_cuda or j < 1 or float(self.drift[j]) == 0.0:
            return False
        measured = float(self.drift[j] / self.beta[j])
        if float(self.drift[j - 1]) == 0.0:
            measured = (self.rounding * measured) ** 0.5
        return bool(measured <= 0.1 * self.rounding**0.5)

    def broke_down(self) -> bool:
        """Look for a vanished β since the last look; if there is one, cut the decomposition back to
        it.

        A β that is not quite rounding, but fell by far in one step, is such an end seen through
        amplified rounding. This is the only host synchronisation of a run: on a GPU, call it every
        few steps.
        """
        alpha, beta = (part[: self.size].tolist() for part in (self.alpha, self.beta))
        _require_finite(all(map(math.isfinite, alpha[self._checked :] + beta[self._checked :])))
        scale, first = max(map(abs, alpha + beta)), max(self._checked, self.kept)
        for j in range(first, self.size):
            # nothing to fall from at a start
            fall = FALL * beta[j - 1] if j > max(self.kept, self.origin) else 0.0
            if beta[j] <= max(
                BREAKDOWN * self.rounding * scale, min(fall, self.rounding**0.6 * scale)
            ):
                self.size = self._checked = j + 1
                self.slack = max(self.slack, beta[j])
                return True
        self._checked = self.size
        return False

    def start_again(self, vector: Tensor) -> None:
        """Continue from a new random direction, decoupled from what is there: how repeated
        eigenvalues are found.
        """
        w = vector.to(self.basis.device, self.basis.dtype)
        for _ in range(2):
            self.basis.orthogonalise(w, self.size)
        self.basis.put(self.size, w, torch.linalg.vector_norm(w, dtype=torch.float64))
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
        """Ritz values (m,), their vectors in the basis (m, m) and couplings β s_m (m,) to the next
        one, on the host.

        The two sides of ``origin`` are diagonalised apart, in ascending order each, so that equal
        values do not mix.
        """
        matrix, m = self.projected(), self.size
        values, vectors = (
            torch.empty(m, dtype=torch.float64),
            torch.zeros(m, m, dtype=torch.float64),
        )
        for part in (slice(0, self.origin), slice(self.origin, m)):
            if part.stop > part.start:
                values[part], vectors[part, part] = torch.linalg.eigh(matrix[part, part])
        return values, vectors, vectors[-1] * float(self.beta[m - 1])

    def noise(self, steps: Tensor | None = None) -> float:
        """How far the products are from those of one symmetric matrix: max_j ‖Qᵀ(Aq_j − Tq_j)‖,
        free by-product.

        Over the steps, or those of ``steps``, whose own vector was made orthogonal, for the others
        show what their vector lacks as well.
        """
        drift = self.drift[: self.size]
        made = torch.cat([torch.ones_like(drift[:1]), drift[:-1]]) > 0
        shown = drift * made
        return float((shown if steps is None else shown[steps.to(shown.device)]).max())

    @full_precision()
    def combine(self, weights: Tensor) -> Tensor:
        """weightsᵀ (k, m) Qᵀ, (k, P)."""
        return self.basis.combine(weights, self.size)

    @full_precision()
    def restart(self, values: Tensor, weights: Tensor, couplings: Tensor, origin: int) -> None:
        """Thick restart (Wu and Simon 2000): keep some Ritz vectors, the last residual couples them
        all.

        The first ``origin`` of them belong to earlier starts.
        """
        count, last = len(values), self.basis[self.size].clone()
        self.basis.replace(weights, self.size)
        self.basis.put(count, last)
        self.alpha[:count], self.beta[:count] = values.to(self.alpha), couplings.to(self.beta)
        self.drift[0] = self.noise()
        self.size = self.kept = self._checked = count
        self.origin = origin


def dot(first: Tensor, second: Tensor) -> Tensor:
    """Σ_i a_i b_i in float64 on the device, of two vectors (P,) or column by column of two
    blocks (P, k).
    """
    run = CHUNK if first.is_cuda else CHUNK >> 4  # on a CPU the copies stay in the cache
    pairs = zip(first.split(run), second.split(run), strict=True)
    return torch.stack([(a.double() * b.double()).sum(0) for a, b in pairs]).sum(0)


def norm(vector: Tensor) -> Tensor:
    """‖v‖ of a vector (P,), summed in float64 over short runs; on a GPU over long ones."""
    if _whole(vector):
        runs = vector
    elif vector.is_cuda:
        runs = torch.stack([norm(part) for part in vector.split(CHUNK)])
    else:
        head = vector[: vector.numel() // GEMV_RUN * GEMV_RUN].view(-1, GEMV_RUN)
        rest = torch.linalg.vector_norm(vector[head.numel() :]).reshape(1)
        runs = torch.cat([torch.linalg.vector_norm(head, dim=1), rest])
    joined: Tensor = torch.linalg.vector_norm(runs, dtype=torch.float64)
    return joined


def sum_of(vector: Tensor) -> Tensor:
    """Σ v_i of a vector (P,), in float64 over short runs; on a GPU over long ones."""
    if _whole(vector):
        return vector.sum(dtype=torch.float64)
    if vector.is_cuda:
        return torch.stack([sum_of(part) for part in vector.split(CHUNK)]).sum()
    head = vector[: vector.numel() // GEMV_RUN * GEMV_RUN].view(-1, GEMV_RUN)
    return head.sum(dim=1).sum(dtype=torch.float64) + vector[head.numel() :].sum(
        dtype=torch.float64
    )


def _whole(vector: Tensor) -> bool:
    """Whether a sum in float64 needs no runs: of float64, and where the copy that a GPU makes
    for it is small.
    """
    return vector.dtype == torch.float64 or (vector.is_cuda and vector.numel() <= CHUNK)


@dataclass(frozen=True)
class Lanczos:
    """A Q = Q T + residual·q eᵀ: ``basis`` Q (P, m), T tridiagonal of ``alpha`` (m,) and ``beta``
    (m−1,).

    QᵀQ = I to a tenth of √ε, which leaves T exact to rounding (Simon 1984). ``alpha`` and ``beta``
    are float64 on the host; m is less than the depth asked for when an invariant subspace was
    found. ``noise`` is how far the products were from those of one symmetric matrix.
    """

    basis: Tensor
    alpha: Tensor
    beta: Tensor
    residual: float
    noise: float
    products: int
    _rules: dict[int, tuple[Tensor, Tensor, Tensor]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def ritz(self, depth: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Ritz values (m,), Gauss weights (m,) and residuals (m,) of the leading ``depth`` steps
        (default: all).
        """
        m = len(self.alpha) if depth is None else min(depth, len(self.alpha))
        if m not in self._rules:
            self._rules[m] = self._rule(m)
        return self._rules[m]

    def leading(self, depth: int) -> Lanczos:
        """The run as it was after ``depth`` steps."""
        if depth >= len(self.alpha):
            return self
        alpha, beta, residual = (
            self.alpha[:depth],
            self.beta[: depth - 1],
            float(self.beta[depth - 1]),
        )
        return Lanczos(self.basis[:, :depth], alpha, beta, residual, self.noise, depth)

    def _rule(self, m: int) -> tuple[Tensor, Tensor, Tensor]:
        off = self.beta[: m - 1]
        values, vectors = torch.linalg.eigh(
            torch.diag(self.alpha[:m]) + torch.diag(off, 1) + torch.diag(off, -1)
        )
        last = self.residual if m == len(self.alpha) else float(self.beta[m - 1])
        return values, vectors[0] ** 2, (last * vectors[-1]).abs()

    def radau(self, end: float) -> tuple[Tensor, Tensor]:
        """Nodes and weights (m + 1,) of the Gauss–Radau rule with one node at ``end``, below all
        Ritz values.

        Golub and Meurant (2010), §6.2. For a function whose odd derivatives are positive on the
        spectrum and whose even ones are negative, such as log, this rule errs downwards where
        ``end`` is a lower bound, and the Gauss rule upwards.
        """
        m, off = (
            len(self.alpha),
            torch.cat([self.beta, torch.tensor([self.residual], dtype=self.beta.dtype)]),
        )
        inner = torch.diag(self.alpha - end) + torch.diag(self.beta, 1) + torch.diag(self.beta, -1)
        unit = torch.zeros(m, 1, dtype=self.alpha.dtype)
        unit[-1] = self.residual**2
        added = end + torch.linalg.solve(inner, unit)[-1]
        diagonal = torch.cat([self.alpha, added])
        values, vectors = torch.linalg.eigh(
            torch.diag(diagonal) + torch.diag(off, 1) + torch.diag(off, -1)
        )
        return values, vectors[0] ** 2


def lanczos(
    operator: OperatorLike,
    start: Tensor,
    depth: int,
    task: str = "lanczos",
    progress: tuple[int, int] | None = None,
    place: str = "device",
    enough: Callable[[Lanczos], bool] | None = None,
) -> Lanczos:
    """``depth`` steps from ``start`` (P,), semi-orthogonal; fewer when an invariant subspace is
    met.

    One product a step. Golub and Van Loan, Algorithm 10.3.1, with classical Gram–Schmidt against
    all of Q at every step, or where the basis is not on a GPU at every other step while the
    overlaps measured stay below a tenth of √ε. Progress is reported for ``task``, as part of
    ``progress`` = (products done before, total). ``place`` says where the basis is kept. ``enough``
    looks at the run so far, from 8 steps on and after each quarter more, and ends it.
    """
    operator = require_symmetric(operator, task)
    require_count(depth, "depth", 1, operator.dim, "at this size op.dense() is exact")
    require(start.shape == (operator.dim,), "start", f"have shape ({operator.dim},)", start)
    before, total = progress or (0, depth)
    state, look = Krylov(operator, start, depth, place), FIRST_LOOK
    del start  # a vector less, where the caller does not hold it either
    for step in range(1, depth + 1):
        state.extend(orthogonalise=not state.nearly_orthogonal())
        report(task, before + step, total)
        if (step % _look_every(operator) == 0 or step == depth) and state.broke_down():
            break
        if enough is not None and step == look and step < depth:
            look += max(1, step // 4)
            if state.broke_down() or enough(_result(state)):
                break
    return _result(state)


def _result(state: Krylov) -> Lanczos:
    m = state.size
    alpha, beta = state.alpha[:m].cpu(), state.beta[:m].cpu()
    # noise is everywhere; overlaps of vectors that were left alone, blown up by a small β, look
    # like it in some steps
    noise = min(state.noise(part) for part in torch.arange(m).chunk(4 if m >= 8 else 1))
    return Lanczos(state.rows[:m].T, alpha, beta[:-1], float(beta[-1]), noise, state.products)


def _look_every(operator: LinearOperator) -> int:
    """Steps between looks at β: each is a synchronisation on a GPU, and free elsewhere."""
    return 16 if operator.device.type == "cuda" else 1
