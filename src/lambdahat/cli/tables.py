"""Tables of measurements: on the terminal, as text, as Markdown, as JSON."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from lambdahat.measurements import Measurement
from lambdahat.report.style import value_text
from lambdahat.results import Estimate, LearningCoefficient, Result, Status
from lambdahat.singular.criteria import BayesCriteria
from lambdahat.singular.temperatures import TemperatureRegression

HEADER = ("quantity", "value ± error", "products", "status")
SAMPLED = LearningCoefficient, BayesCriteria, TemperatureRegression  # whose cost counts gradients
NOTE = "± is one standard error; for eigenvalues, a bound: an eigenvalue lies that near."


def rows_of(measurement: Measurement) -> list[tuple[str, str, str, str]]:
    """One row per number, in words; what is more than numbers has a row that says where it is."""
    sampled = {name for name, result in leaves(measurement.results) if isinstance(result, SAMPLED)}
    rows = [
        (row["quantity"], value_text(Estimate(row["value"], row["stderr"])),
         f"{row['cost']:,}" + (" gradients" if row["quantity"].split(".")[0] in sampled else ""), row["status"])
        for row in measurement.table()
    ]  # fmt: skip
    for name, result in leaves(measurement.results):
        if isinstance(result, Estimate) and isinstance(result.value, Tensor):
            rows.append((name, f"{result.value.numel():,} elements", f"{result.cost:,}", result.status.name))
    return rows


def leaves(results: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Result]]:
    """Every result by name, those inside mappings too."""
    for name, result in results.items():
        if isinstance(result, Mapping):
            yield from leaves(result, f"{prefix}{name}.")
        else:
            yield prefix + name, result


def statuses(measurement: Measurement) -> list[Status]:
    """The status of every result that has one."""
    return [result.status for _, result in leaves(measurement.results) if hasattr(result, "status")]


def remedies(measurement: Measurement) -> list[str]:
    """What to do about each result that has not converged."""
    found = ((name, getattr(result, "status", Status.CONVERGED)) for name, result in leaves(measurement.results))
    return [f"{name}: {status.name}. {status.value}" for name, status in found if not status.ok]


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """A table on standard output."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title or None, title_justify="left")
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i in (0, len(header) - 1) else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console(file=sys.stdout)
    console.print(table) if console.is_terminal else print(text_table(header, rows, title))


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> str:
    """Plain text, columns aligned."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    rule = ["-" * width for width in widths]
    lines = [_aligned(row, widths) for row in (header, rule, *rows)]
    return "\n".join([title, *lines] if title else lines)


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *middle, last = row
    cells = [
        first.ljust(widths[0]),
        *(cell.rjust(width) for cell, width in zip(middle, widths[1:-1], strict=True)),
        last,
    ]
    return "  ".join(cells)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    marks = [":--" if i in (0, len(header) - 1) else "--:" for i in range(len(header))]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, marks, *rows)) + "\n"


def print_json(document: Any) -> None:
    """One JSON document on standard output; numbers that JSON lacks become null."""
    print(json.dumps(_plain(document), indent=1, ensure_ascii=False, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
