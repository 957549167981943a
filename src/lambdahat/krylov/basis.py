"""Where the vectors of a Krylov basis are kept: on the device, on the host, or in half as many
bytes.

On the host they are streamed through the device once for each Gram–Schmidt pass. In half the bytes
(bfloat16 for float32, float32 for float64) a basis does for that pass: rounding errs by e with
|e_i| ≤ ε'|q_i|, of random sign, so a pass leaves w·e behind, about ε'/√P where eigenvectors spread
over all parameters: below the √ε that semi-orthogonality asks for (Simon 1984) from P = 10⁵ on.
What it comes to is in the noise that a run reports. The two newest vectors, which the recurrence
needs, are kept whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lambdahat._core.check import require_choice

PLACES = ("auto", "device", "host", "half")
HALF = {torch.float32: torch.bfloat16, torch.float64: torch.float32}
GEMV_RUN = 4096
FEW = 4  # rows on the host that are on the device at a time
CHUNK = 1 << 20  # elements of a basis that are combined together
# elements that are widened together, and of a short basis no more than this part
WIDENED, WIDENED_PART = 1 << 18, 16
# elements: all rows start alike in memory, for cuDNN looks for its kernels anew at every other
# alignment
STRIDE = 64


def basis_bytes(count: int, dim: int, dtype: torch.dtype, place: str) -> int:
    """What ``count`` vectors take on the device; whole ones beside them where they are kept
    elsewhere or rounded.

    What is widened meanwhile, an eighth of the rounded ones at most, has the room of a product,
    made before or after.
    """
    if place == "host":
        return (2 + FEW) * dim * dtype.itemsize
    if place == "half":
        return count * dim * HALF[dtype].itemsize + 2 * dim * dtype.itemsize
    return count * _padded(dim) * dtype.itemsize


def chosen_place(
    count: int, dim: int, dtype: torch.dtype, device: torch.device, room: float, asked: str
) -> str:
    """The place asked for or, for "auto", the first that fits: the device, half the bytes, the host
    of a GPU.

    The host of a CPU is the device.
    """
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
    """Rows (capacity, P), written one by one, and what Gram–Schmidt and Rayleigh–Ritz do with
    them.
    """

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
        stride = _padded(dim) if place == "device" else dim
        self.rows = torch.empty(
            capacity,
            stride,
            dtype=stored,
            device="cpu" if host else device,
            pin_memory=host and device.type == "cuda",
        )[:, :dim]
        self._whole: dict[int, Tensor] = {}

    def __getitem__(self, j: int) -> Tensor:
        """Row j (P,), whole if it is among the newest two."""
        if self.place == "device":
            return self.rows[j]
        found = self._whole.get(j)
        return self.rows[j].to(self.device, self.dtype) if found is None else found

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
        if self.place == "host":
            blocks = self.rows[:count].split(FEW)
            return torch.cat(
                [self._remove(block.to(self.device, non_blocking=True), w) for block in blocks]
            )
        newest = [self._whole[j] for j in range(count) if j in self._whole]
        if not newest:
            return self._remove(self.rows[:count], w)
        older = self._widened(self.rows[: count - len(newest)], w)
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
        if w.is_cuda and len(rows) < FEW:
            overlaps = torch.stack([torch.dot(row, w) for row in rows])
            for row, overlap in zip(rows, overlaps, strict=True):
                w.addcmul_(row, overlap, value=-1)
            return overlaps
        overlaps = _overlaps(rows, w)
        w.addmv_(rows.T, overlaps.to(w.dtype), alpha=-1)
        return overlaps

    def _widened(self, rows: Tensor, w: Tensor) -> Tensor:
        """The same for rows of fewer bits, widened a chunk of columns at a time."""
        step = _widened_columns(len(rows), self.dim)
        columns = [slice(left, left + step) for left in range(0, self.dim, step)]
        parts = [_overlaps(rows[:, where].to(w.dtype), w[where]).double() for where in columns]
        overlaps = torch.stack(parts).sum(0)
        for where in columns:
            w[where].addmv_(rows[:, where].T.to(w.dtype), overlaps.to(w.dtype), alpha=-1)
        return overlaps


def _padded(dim: int) -> int:
    """Elements from the start of a row to that of the next."""
    return -(-dim // STRIDE) * STRIDE


def _widened_columns(count: int, dim: int) -> int:
    """Columns of ``count`` rows that are widened together."""
    return min(max(GEMV_RUN, WIDENED // max(1, count)), -(-dim // WIDENED_PART))


def _overlaps(rows: Tensor, w: Tensor) -> Tensor:
    """Qᵀw for Qᵀ (m, P). A float32 gemv on a CPU runs down each row and errs by 1e-6 on P = 10⁵;
    short runs, summed in float64, err by 1e-7 at the same memory traffic. On a GPU the reduction is
    a tree already.
    """
    if w.is_cuda or w.dtype == torch.float64:
        return rows @ w
    parts = zip(rows.split(GEMV_RUN, dim=1), w.split(GEMV_RUN), strict=True)
    return torch.stack([a @ b for a, b in parts]).sum(0, dtype=torch.float64)
