"""Tables of measurements: on the terminal, as text, as Markdown, as JSON."""

from __future__ import annotations

import json
import math
import re
import sys
import textwrap
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from lambdahat.results import Estimate, LearningCoefficient, Result, Status
from lambdahat.results.charts import value_text
from lambdahat.results.measurement import Measurement
from lambdahat.singular.bayes import BayesCriteria, TemperatureRegression
from lambdahat.singular.curves import CoefficientCurve

# whose cost counts gradients
SAMPLED = LearningCoefficient, CoefficientCurve, BayesCriteria, TemperatureRegression
NUMBER = re.compile(r"\s*(at (least|most) )?[-+−±<>≤≥≈~]?\s*(\.?\d|(nan|inf)\b)")
WORD = re.compile(r"[^\W\d_]{2,}")
NOTHING = ("", "-", "–", "—")  # an empty cell
WIDTH = 80  # columns of a terminal
SETTINGS = {"nβ": "nbeta", "γ": "localization"}
NOTE = "± is one standard error; for eigenvalues, a bound: an eigenvalue lies within it."


def table_of(measurement: Measurement) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The header and one row per number, in words; what is more than numbers has a row of its own.

    nβ and γ have columns where a number depends on them, as λ̂ does.
    """
    sampled = {name for name, result in leaves(measurement.results) if isinstance(result, SAMPLED)}
    lines = measurement.table()
    columns = {
        label: name
        for label, name in SETTINGS.items()
        if any(row.get(name) is not None for row in lines)
    }
    rows = [
        (
            row["quantity"],
            value_text(Estimate(row["value"], row["stderr"])),
            *(_setting(row[name]) for name in columns.values()),
            f"{row['cost']:,}"
            + (" gradients" if re.split(r"[.\[]", row["quantity"])[0] in sampled else ""),
            row["status"],
        )
        for row in lines
    ]
    for name, result in leaves(measurement.results):
        if isinstance(result, Estimate) and isinstance(result.value, Tensor):
            count = f"{result.value.numel():,} elements"
            rows.append((name, count, *[""] * len(columns), f"{result.cost:,}", result.status.name))
    return ("quantity", "value ± error", *columns, "products", "status"), rows


def settings_text(settings: Mapping[str, Any]) -> str:
    """nβ and γ, where there are such: "nβ = 120, γ = 0.25"."""
    pairs = [(label, settings.get(name)) for label, name in SETTINGS.items()]
    return ", ".join(f"{label} = {_setting(value)}" for label, value in pairs if value is not None)


def _setting(value: float | str | None) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:.5g}"


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
    statuses = (
        (name, getattr(result, "status", Status.CONVERGED))
        for name, result in leaves(measurement.results)
    )
    return [f"{name}: {status.name}. {status.value}" for name, status in statuses if not status.ok]


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """A table on standard output."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title or None, title_justify="left")
    for name, right in zip(header, _numeric(header, rows), strict=True):
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console(file=sys.stdout)
    console.print(table) if console.is_terminal else print(text_table(header, rows, title))


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> str:
    """Plain text, columns aligned."""
    widths = [max(_width(row[i]) for row in (header, *rows)) for i in range(len(header))]
    rights = _numeric(header, rows)
    lines = []
    for row in (header, ["-" * width for width in widths], *rows):
        spaces = [" " * (width - _width(cell)) for cell, width in zip(row, widths, strict=True)]
        parts = zip(row, spaces, rights, strict=True)
        lines.append(
            "  ".join(
                space + cell if right else cell + space for cell, space, right in parts
            ).rstrip()
        )
    return "\n".join([textwrap.fill(title, WIDTH), *lines] if title else lines)


def _width(text: str) -> int:
    """Letters as they are seen: the hat of λ̂ takes no place."""
    return sum(not unicodedata.combining(letter) for letter in text)


def _numeric(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[bool]:
    """Which columns stand to the right: those of numbers, after the first, which names the rows."""
    return [i > 0 and _all_numbers([row[i] for row in rows]) for i in range(len(header))]


def _all_numbers(cells: Sequence[str]) -> bool:
    """Whether a column holds numbers with few words: "12.3 ± 0.4", "3 of 4", "1,200 gradients"."""
    written = [cell for cell in cells if cell.strip() not in NOTHING]
    return len(written) > 0 and all(
        NUMBER.match(cell) and len(WORD.findall(cell)) <= 2 for cell in written
    )


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    marks = ["--:" if right else ":--" for right in _numeric(header, rows)]
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
