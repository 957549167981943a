"""Averages of a model's weights beside any optimiser, and the batch-norm statistics that they
need.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from lambdahat._core.check import require, require_choice, require_count

KINDS = ("average", "ema")
UNITS = ("epoch", "step")


class IterateAverage:
    """The mean (``kind="average"``) or exponential moving average (``"ema"``) of a model's
    iterates.

    Call ``update()`` once per ``unit`` (an epoch or a step); calls number ``start``, ``start +
    every``, … are averaged. The mean is θ̄ ← θ̄ + (θ − θ̄)/(n + 1), the other θ̄ ← ρθ̄ + (1 − ρ)θ
    with ρ = ``decay``; both begin at the first iterate averaged (``torch.optim.swa_utils``). The
    spectral thesis averages once per epoch from epoch 161 on.
    """

    def __init__(
        self,
        model: nn.Module,
        kind: str = "average",
        *,
        unit: str = "epoch",
        start: int = 1,
        every: int = 1,
        decay: float = 0.999,
    ) -> None:
        self.kind, self.unit = (
            require_choice(kind, "kind", KINDS),
            require_choice(unit, "unit", UNITS),
        )
        self.start, self.every = require_count(start, "start"), require_count(every, "every")
        require(0 <= decay < 1, "decay", "lie in [0, 1)", repr(decay))
        self.calls = 0
        self._live = model
        self._averaged = AveragedModel(
            model, multi_avg_fn=get_ema_multi_avg_fn(decay) if kind == "ema" else None
        )
        self._averaged.requires_grad_(False)

    @property
    def count(self) -> int:
        """How many iterates have been averaged."""
        return max(0, (self.calls - self.start) // self.every + 1)

    @property
    def model(self) -> nn.Module:
        """The averaged model, a copy; before the first average the model itself."""
        return self._averaged.module if self.count else self._live

    def update(self) -> None:
        """Count a unit and average the model's weights if it is their turn."""
        self.calls += 1
        if self.calls >= self.start and (self.calls - self.start) % self.every == 0:
            self._averaged.update_parameters(self._live)

    def refresh_batch_norm(self, batches: Iterable[Any], limit: int | None = None) -> None:
        """Batch-norm statistics of the averaged weights, which no average of statistics gives
        (§7.3.1).
        """
        refresh_batch_norm(self.model, batches, limit)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls, "averaged": self._averaged.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._averaged.load_state_dict(state["averaged"])
        self.calls = int(state["calls"])


def refresh_batch_norm(model: nn.Module, batches: Iterable[Any], limit: int | None = None) -> None:
    """Renew ``model``'s batch-norm statistics from the first ``limit`` batches, by default all; a
    batch is x or (x, …).

    Where passing all the data would double an epoch's cost a sample does (§7.3.1, spectral thesis).
    """
    if limit is not None:
        require_count(limit, "limit")
    update_bn(islice(batches, limit), model)
