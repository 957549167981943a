"""Everything measured of one problem, and its numbers as a table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from lambdahat.results import Chains, Eigenpairs, Estimate, LearningCoefficient, Result, Spectrum

NO_SETTINGS: dict[str, Any] = {"nbeta": None, "localization": None}


@dataclass(frozen=True)
class Measurement(Result):
    """Named results of one problem, and what they were measured on."""

    results: Mapping[str, Any]
    about: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.results[name]

    def table(self) -> list[dict[str, Any]]:
        """One row per number: quantity, value, stderr, cost, status.

        Where numbers such as λ̂ depend on the temperature and the localization of chains, rows also
        have ``nbeta`` and ``localization`` (a number, or "by parameter"), None for other numbers.
        """
        parts = self.results.items()
        readings = [one for part in parts for one in _readings(*part, NO_SETTINGS)]
        sampled = any(settings is not NO_SETTINGS for _, _, settings in readings)
        return [
            {
                "quantity": label,
                "value": float(estimate),
                "stderr": float(estimate.stderr),
                "cost": estimate.cost,
                "status": estimate.status.name,
                **(settings if sampled else {}),
            }
            for label, estimate, settings in readings
        ]

    def save(self, path: str | Path) -> Path:
        """Write into folder ``path``: one file per result, then the index ``measurement.json``."""
        folder = Path(path)
        for name, result in self.results.items():
            if isinstance(result, Result):
                result.save(folder / f"{name}.json")
        return super().save(folder / "measurement.json")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read the folder that ``save`` wrote."""
        folder = Path(path)
        return super().load(folder / "measurement.json" if folder.is_dir() else folder)


# name, number, and the settings that it depends on
Reading = tuple[str, Estimate, Mapping[str, Any]]


def _readings(name: str, result: Any, settings: Mapping[str, Any]) -> Iterator[Reading]:
    """The scalar numbers of a result, for tables; ``settings`` hold unless the result has its
    own.
    """
    settings = _settings(result) or settings
    if isinstance(result, Estimate) and not isinstance(result.value, Tensor):
        yield name, result, settings
        if isinstance(result, LearningCoefficient):
            found = {"wbic": result.wbic}
            if result.sensitivity is not None:
                found |= {
                    "d/dlnγ": result.sensitivity.localization,
                    "d/dlnnβ": result.sensitivity.nbeta,
                }
            for label, part in found.items():
                if part is not None and math.isfinite(part.value):
                    told = dataclasses.replace(part, cost=result.cost, status=result.status)
                    yield f"{name}.{label}", told, settings
    elif isinstance(result, Eigenpairs):
        for i, (estimate, _) in enumerate(result, start=1):
            told = dataclasses.replace(estimate, cost=result.cost, status=result.status)
            yield f"{name}[{i}]", told, settings
    elif isinstance(result, Spectrum):
        low, high = result.extremes
        for label, estimate in {
            "trace": result.trace,
            "frobenius": result.frobenius,
            "smallest": low,
            "largest": high,
            "negative_mass": result.negative_mass,
            "degeneracy": result.degeneracy(),
        }.items():
            yield f"{name}.{label}", estimate, settings
    elif isinstance(result, Result) and not isinstance(result, Chains):
        for field_ in dataclasses.fields(result):  # type: ignore[arg-type]
            value = getattr(result, field_.name)
            if isinstance(value, tuple):  # such as the points of a curve
                for i, part in enumerate(value, start=1):
                    yield from _readings(f"{name}[{i}]", part, settings)
            else:
                yield from _readings(f"{name}.{field_.name}", value, settings)
    elif isinstance(result, Mapping):
        for key, value in result.items():
            yield from _readings(f"{name}.{key}", value, settings)


def _settings(result: Any) -> dict[str, Any]:
    """nβ and γ of a result that has them; empty for others."""
    nbeta, gamma = (getattr(result, name, None) for name in NO_SETTINGS)
    if not isinstance(gamma, int | float | Tensor):
        return {}
    if isinstance(gamma, Tensor):
        low, high = float(gamma.min()), float(gamma.max())
        gamma = low if low == high else "by parameter"
    return {"nbeta": nbeta, "localization": gamma}
