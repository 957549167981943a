"""Lanczos on a symmetric operator, its basis kept orthonormal to a tenth of √ε or better.

Vectors are kept in the operator's dtype, scalars in float64: float32 dot products would cap the
accuracy at about 2e-5. A basis is stored one vector a row, so that reorthogonalisation is two
contiguous gemv, on the device, on the host or in half as many bytes. On the host it is streamed
through the device once for each Gram–Schmidt pass. In half the bytes (bfloat16 for float32, float32
for float64) rounding errs by |e_i| ≤ ε'|q_i| with random signs, so a pass leaves w·e behind, about
ε'/√P for spread-out eigenvectors: below the √ε that semi-orthogonality asks for (Simon 1984) from
P = 10⁵ on. It is part of the noise that a run reports. The two newest vectors are kept whole.

On a GPU the steps of small problems, bound by their thirty launches, are replays of one CUDA graph:
the number of the step is on the device, and Gram–Schmidt runs over the whole basis, whose unwritten
rows are zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lambdahat._core.check import require, require_choice, require_count
from lambdahat._core.device import Replay, full_precision
from lambdahat._core.progress import report
from lambdahat._core.rng import generator
from lambdahat.operators.base import LinearOperator
from lambdahat.operators.matrix import OperatorLike, as_operator

PLACES = ("auto", "device", "host", "half")
HALF = {torch.float32: torch.bfloat16, torch.float64: torch.float32}
GEMV_RUN = 4096
ROWS_MOVED = 4  # rows of a basis on the host that are on the device at a time
CHUNK = 1 << 20  # elements of a basis that are combined together
DRAWN = 1 << 24  # numbers of a random vector from one stream
# elements that are widened together, and of a short basis no more than this part
WIDENED, WIDENED_PART = 1 << 18, 16
# elements: all rows start alike in memory, for cuDNN looks for its kernels anew at every other
# alignment
STRIDE = 64


def basis_bytes(count: int, dim: int, dtype: torch.dtype, place: str) -> int:
    """Bytes of ``count`` vectors on the device, with whole ones beside those kept elsewhere.

    What is widened meanwhile has the room of a product, made before or after.
    """
    if place == "host":
        return (2 + ROWS_MOVED) * dim * dtype.itemsize
    if place == "half":
        return count * dim * HALF[dtype].itemsize + 2 * dim * dtype.itemsize
    return count * _padded(dim) * dtype.itemsize


def chosen_place(
    count: int, dim: int, dtype: torch.dtype, device: torch.device, room: float, asked: str
) -> str:
    """The place asked for or, for "auto", the first that fits: device, half the bytes, host."""
    require_choice(asked, "basis", PLACES)
    if asked == "host" and device.type == "cpu":
        return "device"
    if asked != "auto":
        return asked
    if basis_bytes(count, dim, dtype, "device") <= room:
        return "device"
    fits = basis_bytes(count, dim, dtype, "half") <= room
    return "half" if fits or device.type == "cpu" else "host"


class Basis:
    """Rows (capacity, P), written one by one, for Gram–Schmidt and Rayleigh–Ritz."""

    def __init__(
        self,
        capacity: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
        place: str = "device",
    ) -> None:
        self.dtype, self.device, self.place, self.dim = dtype, device, place, dim
        host, stored = place == "host", HALF[dtype] if place == "half" else dtype
        shape = capacity, _padded(dim) if place == "device" else dim
        pinned = host and device.type == "cuda"
        rows = torch.empty(
            *shape, dtype=stored, device="cpu" if host else device, pin_memory=pinned
        )
        self.rows = rows[:, :dim]
        self._whole: dict[int, Tensor] = {}

    def __getitem__(self, j: int) -> Tensor:
        """Row j (P,), whole if it is among the newest two."""
        if self.place == "device":
            return self.rows[j]
        whole = self._whole.get(j)
        return self.rows[j].to(self.device, self.dtype) if whole is None else whole

    def put(self, j: int, vector: Tensor, divisor: Tensor | None = None) -> None:
        """Write vector/divisor to row j."""
        if self.place == "device":
            torch.div(vector, 1.0 if divisor is None else divisor, out=self.rows[j])
            return
        # before there are three
        self._whole = {k: kept for k, kept in self._whole.items() if k == j - 1}
        self._whole[j] = vector.clone() if divisor is None else vector / divisor
        self.rows[j].copy_(self._whole[j])

    def orthogonalise(self, w: Tensor, count: int) -> Tensor:
        """w − QQᵀw in place over the first ``count`` rows; returns Qᵀw."""
        rows = self.rows[:count]
        if self.place == "host":
            moved = (few.to(self.device, non_blocking=True) for few in rows.split(ROWS_MOVED))
            return torch.cat([self._remove(few, w) for few in moved])
        newest = [self._whole[j] for j in range(count) if j in self._whole]
        if not newest:
            return self._remove(rows, w)
        older = self._widened(rows[: count - len(newest)], w)
        return torch.cat([older, *(self._remove(row[None], w).to(older) for row in newest)])

    def subtract(self, w: Tensor, weights: Tensor, count: int) -> None:
        """w − Σ_j weights_j q_j in place, over the first ``count`` rows."""
        if self.place == "device":
            w.addmv_(self.rows[:count].T, weights.to(w.dtype), alpha=-1)
            return
        for j in range(count):
            w.addcmul_(self[j], weights[j].to(w.dtype), value=-1)

    def combine(self, weights: Tensor, count: int) -> Tensor:
        """weightsᵀ (k, m) Qᵀ of the first m = ``count`` rows, (k, P) on the device."""
        out = torch.empty(weights.shape[1], self.dim, dtype=self.dtype, device=self.device)
        self._combine(weights, count, out)
        return out

    def replace(self, weights: Tensor, count: int) -> None:
        """The first k rows by weightsᵀ (k, m) Qᵀ of the first m = ``count``."""
        self._whole = {}
        self._combine(weights, count, self.rows[: weights.shape[1]])

    def _combine(self, weights: Tensor, count: int, out: Tensor) -> None:
        """By chunks of columns, so that ``out`` may be rows of the basis."""
        turn, step = weights.T.to(self.device, self.dtype), max(1, CHUNK // max(1, count))
        for left in range(0, self.dim, step):
            part = self.rows[:count, left : left + step].to(self.device, self.dtype)
            out[:, left : left + step] = turn @ part

    def _remove(self, rows: Tensor, w: Tensor) -> Tensor:
        # cuBLAS takes seconds for a matrix of two or three rows of 10⁷
        if w.is_cuda and len(rows) < ROWS_MOVED:
            overlaps = torch.stack([torch.dot(row, w) for row in rows])
            for row, overlap in zip(rows, overlaps, strict=True):
                w.addcmul_(row, overlap, value=-1)
            return overlaps
        overlaps = _overlaps(rows, w)
        w.addmv_(rows.T, overlaps.to(w.dtype), alpha=-1)
        return overlaps

    def _widened(self, rows: Tensor, w: Tensor) -> Tensor:
        """The same for rows of fewer bits, widened a chunk of columns at a time."""
        step = min(max(GEMV_RUN, WIDENED // max(1, len(rows))), -(-self.dim // WIDENED_PART))
        columns = [slice(left, left + step) for left in range(0, self.dim, step)]
        parts = [_overlaps(rows[:, where].to(w.dtype), w[where]).double() for where in columns]
        overlaps = torch.stack(parts).sum(0)
        for where in columns:
            w[where].addmv_(rows[:, where].T.to(w.dtype), overlaps.to(w.dtype), alpha=-1)
        return overlaps


def _padded(dim: int) -> int:
    """Elements from the start of a row to that of the next."""
    return -(-dim // STRIDE) * STRIDE


def _overlaps(rows: Tensor, w: Tensor) -> Tensor:
    """Qᵀw for Qᵀ (m, P). A float32 gemv on a CPU runs down each row and errs by 1e-6 on P = 10⁵;
    short runs, summed in float64, err by 1e-7 at the same memory traffic. On a GPU the reduction is
    a tree already.
    """
    if w.is_cuda or w.dtype == torch.float64:
        return rows @ w
    parts = zip(rows.split(GEMV_RUN, dim=1), w.split(GEMV_RUN), strict=True)
    return torch.stack([a @ b for a, b in parts]).sum(0, dtype=torch.float64)


MOST_BYTES = 1 << 26  # of a basis: from here on reading all of it costs more than the launches
LEAST_STEPS = 16  # capturing takes as long as a few steps


class CapturedSteps:
    """Steps of one Krylov decomposition as a CUDA graph: A q_j, Gram–Schmidt twice, row j + 1.

    ``scalars`` are α, β and the drifts of the steps, (capacity,) each, float64 on the device.
    """

    def __init__(
        self,
        basis: Basis,
        product: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
        scalars: tuple[Tensor, Tensor, Tensor],
        stream: torch.cuda.Stream | None,
    ) -> None:
        self._rows, self._product, self._dtype = basis.rows, product, dtype
        self._alpha, self._beta, self._drift = scalars
        self._rows[1:].zero_()  # fresh memory may hold NaN, which no mask removes
        self._numbers = torch.arange(len(self._rows), device=basis.device)
        self._place = torch.zeros(1, dtype=torch.int64, device=basis.device)
        self._next = 0
        self.replay = Replay(basis.device, stream)

    @classmethod
    def of(
        cls, basis: Basis, operator: LinearOperator, scalars: tuple[Tensor, Tensor, Tensor]
    ) -> CapturedSteps | None:
        """For an operator whose products can be captured and a small basis, else None."""
        rows = basis.rows
        small = rows.numel() * rows.element_size() <= MOST_BYTES and len(rows) > LEAST_STEPS
        if basis.device.type != "cuda" or basis.place != "device" or not small:
            return None
        parts = operator.capturable_product()
        return None if parts is None else cls(basis, parts[0], operator.dtype, scalars, parts[1])

    def step(self, number: int) -> None:
        """Step j of the decomposition, with rows 0 … j there; not after a thick restart."""
        if number != self._next:  # after a restart, or what was cut off
            self._place.fill_(number)
        self.replay("step", self._work)
        self._next = number + 1

    def _work(self) -> None:
        place, rows = self._place, self._rows
        before = (place - 1).clamp_min(0)
        last = rows.index_select(0, place)[0]
        w = self._product(last.to(self._dtype)).to(rows.dtype)
        alpha = (w * last).sum(dtype=torch.float64).reshape(1)
        w = w.addcmul(last, alpha.to(rows.dtype), value=-1)
        coupling = torch.where(place > 0, self._beta.index_select(0, before), 0.0)
        w = w.addcmul(rows.index_select(0, before)[0], coupling.to(rows.dtype), value=-1)
        written = self._numbers <= place
        first = self._removed(w, written)
        alpha = alpha + first.index_select(0, place)
        second = self._removed(w, written)
        alpha = alpha + second.index_select(0, place)
        beta = torch.linalg.vector_norm(w, dtype=torch.float64).reshape(1)
        drift = torch.linalg.vector_norm(first, dtype=torch.float64).reshape(1)
        for values, value in ((self._alpha, alpha), (self._beta, beta), (self._drift, drift)):
            values.index_copy_(0, place, value)
        divisor = beta.clamp_min(torch.finfo(rows.dtype).tiny).to(rows.dtype)
        rows.index_copy_(0, place + 1, (w / divisor).unsqueeze(0))
        place.add_(1)

    def _removed(self, w: Tensor, written: Tensor) -> Tensor:
        """w − QQᵀw in place, and Qᵀw, 0 for rows that are not part of the basis."""
        overlaps = torch.where(written, self._rows @ w, 0.0)
        w.addmv_(self._rows.T, overlaps, alpha=-1)
        return overlaps


BREAKDOWN = 10.0  # β below this many roundings of the spectral scale ends a Krylov space
FIRST_LOOK = 8  # steps before a run is asked whether it is long enough
SEMI = 0.1  # of √ε: overlaps up to which vectors are left alone
FALL = 0.01  # of β in one step: the end of a Krylov space seen through amplified rounding


def require_symmetric(given: OperatorLike, name: str) -> LinearOperator:
    """The operator, or matrix, that ``name`` was called with; it must be symmetric."""
    operator, cure = as_operator(given), "pass its symmetric part, lh.operator((M + M.T) / 2)"
    require(operator.symmetric, f"the operator of {name}", "be symmetric", repr(operator), cure)
    return operator


def require_finite(products: Tensor | bool) -> None:
    """Refuse NaN and infinity in what products gave."""
    finite = products if isinstance(products, bool) else bool(torch.isfinite(products).all())
    name, cure = "a product of the operator", "check the loss and the parameters for NaN"
    require(finite, name, "be finite", "NaN or infinity", cure)


def working_dtype(operator: LinearOperator) -> torch.dtype:
    """The dtype of basis vectors: the operator's own, and float32 for half precision."""
    return operator.dtype if operator.dtype in (torch.float32, torch.float64) else torch.float32


def random_vector(operator: LinearOperator, seed: int, *names: object) -> Tensor:
    """A unit vector (P,), uniform on the sphere, drawn on the CPU.

    torch draws in one thread, 23 ns a number. Every ``DRAWN`` of them have a stream of their own,
    so that those of a large network are drawn in parallel, the same for any number of threads.
    """
    draw = torch.empty(operator.dim, dtype=torch.float64)

    def fill(place: int) -> None:
        own = generator(seed, *names, *(("part", place) if place else ()))
        parts[place].normal_(generator=own)

    parts = draw.split(DRAWN)
    if len(parts) == 1:
        fill(0)
    else:
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(fill, range(len(parts))))
    draw.div_(torch.linalg.vector_norm(draw))
    return draw.to(working_dtype(operator)).to(operator.device)


class Krylov:
    """A decomposition A Q = Q T + β q eᵀ that grows by one product at a time.

    ``rows[:size]`` is Qᵀ and ``rows[size]`` the next vector q. T has ``alpha`` on its diagonal;
    ``beta[j]`` couples vector j to j + 1 or, for the first ``kept`` (of a thick restart), to vector
    ``kept``. The vectors from ``origin`` on come from the newest random start, decoupled from those
    before, which span a space that is invariant to within ``slack``.
    """

    def __init__(
        self, operator: LinearOperator, start: Tensor, capacity: int, place: str | Basis = "device"
    ) -> None:
        self.operator, self.capacity, dtype = operator, capacity, working_dtype(operator)
        if isinstance(place, str):
            place = Basis(capacity + 1, operator.dim, dtype, operator.device, place)
        self.basis, self.rows = place, place.rows  # as they are stored, (capacity + 1, P)
        self.rounding = float(torch.finfo(operator.dtype).eps)  # of one product, relative
        length = torch.linalg.vector_norm(start, dtype=torch.float64)
        self.basis.put(0, start.to(operator.device, dtype), length)
        self.alpha = torch.zeros(capacity, dtype=torch.float64, device=operator.device)
        self.beta, self.drift = torch.zeros_like(self.alpha), torch.zeros_like(self.alpha)
        # fresh memory costs more than the arithmetic done in it
        self.scratch = torch.empty_like(self.basis[0])
        self.size = self.kept = self.origin = self.products = self._checked = 0
        self.slack = 0.0
        self.cycles: list[tuple[Tensor, Tensor]] = []
        self.captured = CapturedSteps.of(self.basis, operator, (self.alpha, self.beta, self.drift))

    def extend(self, orthogonalise: bool = True) -> None:
        """One Lanczos step: one product, then Gram–Schmidt against the whole basis unless told not
        to.

        The second pass is skipped where the first changed little ("twice is enough", Parlett 1998,
        §6.9); on a GPU asking would cost more than doing.
        """
        j, basis = self.size, self.basis
        if self.captured is not None and (j != self.kept or j == 0):
            self.operator.matvecs += 1
            self.captured.step(j)
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
        beta = torch.zeros(()) if orthogonalise else norm(w)
        # a β that fell by far leaves a vector of rounding, which the next step would blow up, and a
        # small one after larger ones blows up the overlaps of the last vector that was left alone
        seen = float(self.drift[j - 1]) / (SEMI * self.rounding**0.5)
        if orthogonalise or float(beta) <= max(FALL * float(self.beta[j - 1]), seen):
            correction = basis.orthogonalise(w, j + 1)
            alpha, beta = alpha + correction[j], norm(w)
            self.drift[j] = torch.linalg.vector_norm(correction, dtype=torch.float64)
            if self.rows.is_cuda or float(self.drift[j]) > 0.1 * float(beta):
                alpha = alpha + basis.orthogonalise(w, j + 1)[j]
                beta = norm(w)
        self.alpha[j], self.beta[j] = alpha, beta
        # a zero β stays a zero vector until the next call of broke_down
        basis.put(j + 1, w, beta.clamp_min(torch.finfo(basis.dtype).tiny).to(basis.dtype))
        self.size, self.products = j + 1, self.products + 1

    def nearly_orthogonal(self) -> bool:
        """Whether the next vector will be orthogonal to a tenth of √ε without being made so.

        Overlaps below √ε keep T exact to rounding (Simon 1984). They grow by a factor g each step
        they are left alone: ε·g was measured at this step, or ε·g² if the last was left alone.
        """
        j = self.size - 1
        # a CUDA device would wait for the answer
        if self.rows.is_cuda or j < 1 or float(self.drift[j]) == 0.0:
            return False
        measured = float(self.drift[j] / self.beta[j])
        if float(self.drift[j - 1]) == 0.0:
            measured = (self.rounding * measured) ** 0.5
        return bool(measured <= SEMI * self.rounding**0.5)

    def broke_down(self) -> bool:
        """Look for a vanished β since the last look, and cut the decomposition back to it.

        A β that fell by far in one step counts too: an end seen through amplified rounding. This is
        a run's only host synchronisation: on a GPU, call it every few steps.
        """
        alpha, beta = (part[: self.size].tolist() for part in (self.alpha, self.beta))
        require_finite(all(map(math.isfinite, alpha[self._checked :] + beta[self._checked :])))
        scale, first = max(map(abs, alpha + beta)), max(self._checked, self.kept)
        for j in range(first, self.size):
            # nothing to fall from at a start
            fall = FALL * beta[j - 1] if j > max(self.kept, self.origin) else 0.0
            fall = min(fall, self.rounding**0.6 * scale)
            if beta[j] <= max(BREAKDOWN * self.rounding * scale, fall):
                self.size = self._checked = j + 1
                self.slack = max(self.slack, beta[j])
                return True
        self._checked = self.size
        return False

    def start_again(self, vector: Tensor) -> None:
        """Continue from a new, decoupled random direction, to find repeated eigenvalues."""
        w = vector.to(self.basis.device, self.basis.dtype)
        for _ in range(2):
            self.basis.orthogonalise(w, self.size)
        self.basis.put(self.size, w, torch.linalg.vector_norm(w, dtype=torch.float64))
        self.beta[self.size - 1] = 0.0
        if self.size == self.kept:  # the arrow of a restart ends here too
            self.beta[: self.size] = 0.0
        self.origin, self.cycles = self.size, []

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
        """Ritz values (m,), their vectors in the basis (m, m) and couplings β s_m (m,).

        The two sides of ``origin`` are diagonalised apart, so that equal values do not mix.
        """
        matrix, m = self.projected(), self.size
        values, vectors = matrix.new_empty(m), matrix.new_zeros(m, m)
        for part in (slice(0, self.origin), slice(self.origin, m)):
            if part.stop > part.start:
                values[part], vectors[part, part] = torch.linalg.eigh(matrix[part, part])
        return values, vectors, vectors[-1] * float(self.beta[m - 1])

    def noise(self, parts: int = 1) -> float:
        """How far the products are from those of one symmetric matrix: max_j ‖Qᵀ(Aq_j − Tq_j)‖.

        Over the steps whose own vector was made orthogonal; the least of so many parts of them.
        """
        drift = self.drift[: self.size].tolist()
        made = zip([1.0, *drift], drift, strict=False)
        shown, length = [now if before > 0 else 0.0 for before, now in made], -(-self.size // parts)
        return min(max(shown[j : j + length]) for j in range(0, self.size, length))

    @full_precision()
    def combine(self, weights: Tensor) -> Tensor:
        """weightsᵀ (k, m) Qᵀ, (k, P)."""
        return self.basis.combine(weights, self.size)

    @full_precision()
    def restart(self, values: Tensor, weights: Tensor, couplings: Tensor, origin: int) -> None:
        """Thick restart (Wu and Simon 2000): keep some Ritz vectors, coupled by the last residual.

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
    """Σ_i a_i b_i in float64 on the device, of vectors (P,) or by column of blocks (P, k)."""
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
    rest = vector[head.numel() :].sum(dtype=torch.float64)
    return head.sum(dim=1).sum(dtype=torch.float64) + rest


def _whole(vector: Tensor) -> bool:
    """Whether a sum in float64 needs no runs: float64 input, or a small vector on a GPU."""
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

    @property
    def tridiagonal(self) -> Tensor:
        """T = QᵀAQ, (m, m)."""
        return _tridiagonal(self.alpha, self.beta)

    def ritz(self, depth: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Ritz values, Gauss weights and residuals, (m,) each, after ``depth`` steps."""
        m = len(self.alpha) if depth is None else min(depth, len(self.alpha))
        if m not in self._rules:
            values, vectors = torch.linalg.eigh(_tridiagonal(self.alpha[:m], self.beta[: m - 1]))
            last = self.residual if m == len(self.alpha) else float(self.beta[m - 1])
            self._rules[m] = values, vectors[0] ** 2, (last * vectors[-1]).abs()
        return self._rules[m]

    def leading(self, depth: int) -> Lanczos:
        """The run as it was after ``depth`` steps."""
        if depth >= len(self.alpha):
            return self
        alpha, beta, last = self.alpha[:depth], self.beta[: depth - 1], float(self.beta[depth - 1])
        return Lanczos(self.basis[:, :depth], alpha, beta, last, self.noise, depth)

    def radau(self, end: float) -> tuple[Tensor, Tensor]:
        """Nodes and weights (m + 1,) of the Gauss–Radau rule with a node at ``end``, below all
        Ritz values.

        Golub and Meurant (2010), §6.2. For a function whose odd derivatives are positive on the
        spectrum and whose even ones are negative, such as log, this rule errs downwards where
        ``end`` is a lower bound, and the Gauss rule upwards.
        """
        pivot = math.inf  # of T − end·I, all positive: the last solves for the added entry
        for alpha, beta in zip(self.alpha.tolist(), [0.0, *self.beta.tolist()], strict=True):
            pivot = alpha - end - beta * beta / pivot
        added = self.residual**2 / pivot
        off = torch.cat([self.beta, torch.tensor([self.residual], dtype=self.beta.dtype)])
        diagonal = torch.cat([self.alpha, self.alpha.new_tensor([end + added])])
        values, vectors = torch.linalg.eigh(_tridiagonal(diagonal, off))
        return values, vectors[0] ** 2


def _tridiagonal(alpha: Tensor, beta: Tensor) -> Tensor:
    return torch.diag(alpha) + torch.diag(beta, 1) + torch.diag(beta, -1)


def lanczos(
    operator: OperatorLike,
    start: Tensor,
    depth: int,
    task: str = "lanczos",
    progress: tuple[int, int] | None = None,
    place: str | Basis = "device",
    enough: Callable[[Lanczos], bool] | None = None,
) -> Lanczos:
    """``depth`` steps from ``start`` (P,), semi-orthogonal; fewer at an invariant subspace.

    One product a step. Golub and Van Loan, Algorithm 10.3.1, with classical Gram–Schmidt against
    all of Q at every step, or where the basis is not on a GPU at every other step while the
    overlaps measured stay below a tenth of √ε. Progress is reported for ``task``, as part of
    ``progress`` = (products done before, total). ``place`` says where the basis is kept, or is that
    of an earlier run, which is written over: fresh memory costs more than the arithmetic done in
    it. ``enough`` looks at the run so far, from 8 steps on and after each quarter more, and may end
    it.
    """
    operator = require_symmetric(operator, task)
    require_count(depth, "depth", 1, operator.dim, "at this size op.dense() is exact")
    require(start.shape == (operator.dim,), "start", f"have shape ({operator.dim},)", start)
    before, total = progress or (0, depth)
    # steps between looks at β: each is a synchronisation on a GPU, and free elsewhere
    every = 16 if operator.device.type == "cuda" else 1
    state, look = Krylov(operator, start, depth, place), FIRST_LOOK
    del start  # a vector less, where the caller does not hold it either
    for step in range(1, depth + 1):
        state.extend(orthogonalise=not state.nearly_orthogonal())
        report(task, before + step, total)
        if (step % every == 0 or step == depth) and state.broke_down():
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
    noise = state.noise(4 if m >= 8 else 1)
    return Lanczos(state.rows[:m].T, alpha, beta[:-1], float(beta[-1]), noise, state.products)
