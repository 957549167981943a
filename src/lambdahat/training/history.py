"""``Run``, the result of training, and early stopping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lambdahat._core.check import require, require_choice, require_count, require_type
from lambdahat.results import Array, Result, Status


@dataclass(frozen=True)
class Run(Result):
    """A training run: ``history`` has a row for every epoch and for every measurement between
    epochs.

    An epoch's row holds ``epoch`` (from 1), ``step``, ``loss`` and ``accuracy`` over the batches of
    the epoch, ``validation_loss`` and ``validation_accuracy``, ``update_norm`` and
    ``gradient_norm`` (means over batches), ``norm`` ‖θ‖₂, ``max_norm`` ‖θ‖_∞, ``distance`` ‖θ −
    θ₀‖₂, ``learning_rate``, ``seconds`` since the start, and what trackers measured. ``ended`` is
    "epochs", "early stopping" or "diverged"; ``best`` is the best epoch's row.
    """

    history: tuple[Mapping[str, Any], ...]
    ended: str = "epochs"
    best: Mapping[str, Any] = field(default_factory=dict)
    averaged: Mapping[str, Any] = field(default_factory=dict)
    folder: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)
    status: Status = Status.CONVERGED

    @property
    def epochs(self) -> tuple[Mapping[str, Any], ...]:
        """The rows of epochs."""
        return tuple(row for row in self.history if row["kind"] == "epoch")

    @property
    def last(self) -> Mapping[str, Any]:
        """The last epoch's row."""
        require(bool(self.epochs), "the run", "have at least one epoch", "none")
        return self.epochs[-1]

    def column(self, name: str) -> tuple[Array, Array]:
        """One quantity over the run: epochs, fractions between them included, and values."""
        known = dict.fromkeys(key for row in self.history for key in row)
        require_choice(name, "name", list(known))
        rows = [row for row in self.history if _is_finite(row.get(name))]
        progress, values = ([row[key] for row in rows] for key in ("progress", name))
        return np.array(progress, float), np.array(values, float)

    def __len__(self) -> int:
        return len(self.epochs)

    def __str__(self) -> str:
        last = self.epochs[-1] if self.epochs else {}
        names = ("loss", "accuracy", "validation_loss", "validation_accuracy")
        known = [f"{name} {last[name]:.4g}" for name in names if _is_finite(last.get(name))]
        parts = [f"{len(self)} epochs", *known]
        text = ", ".join(parts) + ("" if self.ended == "epochs" else f" ({self.ended})")
        return text if self.status.ok else f"{text} [{self.status.name}: {self.status.value}]"


@dataclass(frozen=True)
class EarlyStopping:
    """Stop when ``metric`` has not improved by more than ``least`` for ``patience`` epochs.

    Accuracies are to rise and all else to fall. With ``restore`` the model ends at its best epoch,
    not at its last.
    """

    patience: int = 10
    metric: str = "validation_loss"
    least: float = 0.0
    restore: bool = False

    def __post_init__(self) -> None:
        require_count(self.patience, "patience")
        require_type(self.metric, str, "metric", "be the name of a column")
        require(self.least >= 0, "least", "be at least 0", repr(self.least))


@dataclass
class BestSoFar:
    """The best epoch by one metric, and how many epochs ago it was."""

    metric: str
    least: float = 0.0
    row: dict[str, Any] = field(default_factory=dict)
    waited: int = 0

    def look(self, row: Mapping[str, Any]) -> bool:
        """Whether this epoch is the best so far."""
        value = row.get(self.metric)
        if value is None:
            raise ValueError(
                f"the metric of early stopping must be one of {', '.join(row)}, got"
                f" {self.metric!r}; a validation metric needs validation="
            )
        sign = -1.0 if self.metric.endswith("accuracy") else 1.0
        better = _is_finite(value)
        if better and self.row:
            better = sign * (self.row[self.metric] - value) > self.least
        self.row, self.waited = (dict(row), 0) if better else (self.row, self.waited + 1)
        return better

    def state_dict(self) -> dict[str, Any]:
        """The best row and the wait."""
        return {"row": self.row, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        self.row, self.waited = dict(state["row"]), state["waited"]


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
