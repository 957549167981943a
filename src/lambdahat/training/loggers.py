"""Where rows of a run can also go: TensorBoard, Weights & Biases, or any object with
``log(row)``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from lambdahat._core.check import require

LOGGERS = ("tensorboard", "wandb")


class Logger(Protocol):
    """Takes rows as they come; ``close`` at the end is optional."""

    def log(self, row: Mapping[str, Any]) -> None: ...


class TensorBoard:
    """Every number of a row as a scalar at its step, in ``folder/tensorboard``; steps after
    ``step`` are purged.
    """

    def __init__(self, folder: Path | None, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        place = "runs" if folder is None else str(folder / "tensorboard")
        self._writer = SummaryWriter(log_dir=place, purge_step=step + 1 if step else None)

    def log(self, row: Mapping[str, Any]) -> None:
        """Write the row's numbers."""
        for name, value in numbers(row).items():
            self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandB:
    """Rows to Weights & Biases; a resumed run goes on in the same one, which its folder's name
    decides.
    """

    def __init__(self, folder: Path | None, about: Mapping[str, Any]) -> None:
        import wandb  # type: ignore[import-not-found,unused-ignore]

        named = (
            {}
            if folder is None
            else {
                "dir": str(folder),
                "name": folder.name,
                "resume": "allow",
                "id": hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16],
            }
        )
        self._run = wandb.init(project="lambdahat", config=dict(about), **named)

    def log(self, row: Mapping[str, Any]) -> None:
        """Send the row's numbers."""
        self._run.log(numbers(row), step=row["step"])

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a row."""
    return {
        key: value
        for key, value in row.items()
        if isinstance(value, int | float) and value == value
    }


def make_loggers(
    asked: Sequence[Any], folder: Path | None, step: int, about: Mapping[str, Any]
) -> list[Any]:
    """Loggers by name, or as they are given."""
    return [
        TensorBoard(folder, step)
        if each == "tensorboard"
        else WandB(folder, about)
        if each == "wandb"
        else each
        for each in asked
    ]


def require_loggers(asked: Any) -> None:
    """Raise unless every logger is a name or has ``log``."""
    require(
        isinstance(asked, Sequence) and not isinstance(asked, str),
        "loggers",
        "be a list",
        asked,
        'such as ["tensorboard"]',
        TypeError,
    )
    for each in asked:
        known = each in LOGGERS if isinstance(each, str) else callable(getattr(each, "log", None))
        require(known, "loggers", f"be among {', '.join(LOGGERS)}, or have a method log(row)", each)
