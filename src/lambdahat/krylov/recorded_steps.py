"""Lanczos steps on a GPU as replays of one CUDA graph: on small problems a step is bound by its
thirty launches.

The number of the step is on the device, and Gram–Schmidt runs over the whole basis, whose unwritten
rows are zeros, so that every step does the same operations on the same memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lambdahat._core.capture import Replay
from lambdahat.krylov.basis import Basis
from lambdahat.operators.base import LinearOperator

MOST_BYTES = 1 << 26  # of a basis: from here on reading all of it costs more than the launches
LEAST_STEPS = 16  # recording takes as long as a few steps


class RecordedSteps:
    """Steps of one Krylov decomposition: A q_j, the recurrence, Gram–Schmidt twice, and row j + 1
    of the basis.

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
    ) -> RecordedSteps | None:
        """For an operator whose products can be recorded and a basis that is small; None for
        others.
        """
        small = (
            basis.rows.numel() * basis.rows.element_size() <= MOST_BYTES
            and len(basis.rows) > LEAST_STEPS
        )
        if basis.device.type != "cuda" or basis.place != "device" or not small:
            return None
        found = operator.recordable()
        return None if found is None else cls(basis, found[0], operator.dtype, scalars, found[1])

    def step(self, number: int) -> None:
        """Step number j of the decomposition, whose rows 0 … j are there; not the one after a
        thick restart.
        """
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
