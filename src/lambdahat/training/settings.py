"""The settings of a run, checked once; those that decide its numbers must agree when it is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lambdahat._check import require, require_choice, require_count, require_positive
from lambdahat.training.subjects import PRECISIONS

UNITS = ("epoch", "step")
HOW_LONG = ("epochs", "keep", "checkpoint_every", "checkpoint_steps")  # may change from one call to the next


@dataclass(frozen=True)
class Settings:
    """Numbers and names that ``fit`` takes; see there."""

    epochs: int
    batch_size: int | None = 128
    precision: str = "float32"
    accumulate: int = 1
    clip: float | None = None
    schedule_unit: str = "epoch"
    curvature_samples: int | None = None
    seed: int = 0
    keep: int = 2
    checkpoint_every: int = 1
    checkpoint_steps: int | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "accumulate", "keep", "checkpoint_every"):
            require_count(getattr(self, name), name)
        for name in ("batch_size", "curvature_samples", "checkpoint_steps"):
            if getattr(self, name) is not None:
                require_count(getattr(self, name), name)
        if self.clip is not None:
            require_positive(self.clip, "clip")
        require_count(self.seed, "seed", least=0)
        require_choice(self.precision, "precision", PRECISIONS)
        require_choice(self.schedule_unit, "schedule_unit", UNITS)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What decides the numbers."""
        return {name: value for name, value in asdict(self).items() if name not in HOW_LONG}


def require_same_run(stored: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise unless a stored run had the settings, data and model of this one."""
    for name, value in now.items():
        was = stored.get(name)
        require(was == value, "folder", f"hold a run with {name} = {value}", f"one with {name} = {was}",
                "call fit as that run did, or choose another folder")  # fmt: skip
