"""The settings of a run, checked once; those that decide its numbers must agree when it is
resumed.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lambdahat._core.check import require, require_choice, require_count, require_positive
from lambdahat.training.feeding import same_contents
from lambdahat.training.subjects import PRECISIONS

UNITS = ("epoch", "step")
MOVED = ("lr", "momentum", "betas", "average_start")  # by schedules, SpectralSGD, start_averaging()
LATER = ("contents", "trackers")  # which runs of early versions do not tell
# may change from one call to the next
HOW_LONG = ("epochs", "keep", "checkpoint_every", "checkpoint_steps")


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


def optimizer_settings(optimizer: Any) -> dict[str, Any]:
    """What the optimiser was made with, by name, a value for each parameter group.

    Of what a schedule or the optimiser itself moves it is the value at construction.
    """
    names: dict[str, None] = {}
    inner = optimizer
    while inner is not None:
        names |= dict.fromkeys(inspect.signature(type(inner)).parameters)
        inner = getattr(inner, "base", None)
    return {
        name: [_initial(optimizer, group, name) for group in optimizer.param_groups]
        for name in names
        if name in optimizer.param_groups[0] and name != "params"
    }


def _initial(optimizer: Any, group: Mapping[str, Any], name: str) -> str:
    value = optimizer.defaults.get(name, group.get(name)) if name in MOVED else group.get(name)
    return repr(group.get(f"initial_{name}", value))


def described(rule: Any) -> str:
    """An object in words that are the same in another process."""
    return (
        repr(rule)
        if any("__repr__" in vars(kind) for kind in type(rule).__mro__[:-1])
        else type(rule).__name__
    )


def require_same_run(stored: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise unless a stored run had the settings, data and model of this one."""
    for name, value in now.items():
        if name in LATER and name not in stored:
            continue
        was = stored.get(name)
        if name == "contents":
            same = was is not None and same_contents(was, value)
            require(
                same,
                "folder",
                "hold a run on the same data",
                "one on other samples or labels",
                "give the data of that run, or choose another folder",
            )
            continue
        if name == "optimizer settings" and isinstance(was, Mapping):
            require_same_run(was, value)
            continue
        require(
            was == value,
            "folder",
            f"hold a run with {name} = {value}",
            f"one with {name} = {was}",
            "call fit as that run did, or choose another folder",
        )
