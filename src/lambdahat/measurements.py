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


@dataclass(frozen=True)
class Measurement(Result):
    """Everything measured of one problem: named results and what they were measured on."""

    results: Mapping[str, Any]
    about: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.results[name]

    def table(self) -> list[dict[str, Any]]:
        """One row per number: quantity, value, stderr, cost, status."""
        rows = []
        for name, result in self.results.items():
            for label, estimate in _readings(name, result):
                rows.append(
                    {
                        "quantity": label,
                        "value": float(estimate),
                        "stderr": float(estimate.stderr),
                        "cost": estimate.cost,
                        "status": estimate.status.name,
                    }
                )
        return rows

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


def _readings(name: str, result: Any) -> Iterator[tuple[str, Estimate]]:
    """The scalar numbers of a result, for tables."""
    if isinstance(result, Estimate) and not isinstance(result.value, Tensor):
        yield name, result
        if isinstance(result, LearningCoefficient):
            found = {"wbic": result.wbic}
            if result.sensitivity is not None:
                found |= {"d/dlnγ": result.sensitivity.localization, "d/dlnnβ": result.sensitivity.nbeta}
            for label, part in found.items():
                if part is not None and math.isfinite(part.value):
                    yield f"{name}.{label}", dataclasses.replace(part, cost=result.cost, status=result.status)
    elif isinstance(result, Eigenpairs):
        for i, (estimate, _) in enumerate(result, start=1):
            yield f"{name}[{i}]", dataclasses.replace(estimate, cost=result.cost, status=result.status)
    elif isinstance(result, Spectrum):
        low, high = result.extremes
        for label, estimate in {
            "trace": result.trace, "frobenius": result.frobenius, "smallest": low, "largest": high,
            "negative_mass": result.negative_mass, "degeneracy": result.degeneracy(),
        }.items():  # fmt: skip
            yield f"{name}.{label}", estimate
    elif isinstance(result, Result) and not isinstance(result, Chains):
        for field_ in dataclasses.fields(result):  # type: ignore[arg-type]
            yield from _readings(f"{name}.{field_.name}", getattr(result, field_.name))
    elif isinstance(result, Mapping):
        for key, value in result.items():
            yield from _readings(f"{name}.{key}", value)
