"""Everything measured of one problem, the comparison of several, and numbers as tables."""

from __future__ import annotations

import base64
import dataclasses
import html
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from lambdahat._core.check import require_choice
from lambdahat.results import (
    Chains,
    Eigenpairs,
    Estimate,
    LearningCoefficient,
    Result,
    Spectrum,
    Status,
)

NO_SETTINGS: dict[str, Any] = {"nbeta": None, "localization": None}


@dataclass(frozen=True)
class Measurement(Result):
    """Named results of one problem, and what they were measured on."""

    results: Mapping[str, Any]
    about: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        if name not in self.results:
            held = ", ".join(map(repr, self.results)) or "nothing"
            raise KeyError(f"{name!r} was not measured; the results are {held}")
        return self.results[name]

    def table(self) -> list[dict[str, Any]]:
        """One row per number: quantity, value, stderr, cost, status.

        Where numbers such as λ̂ depend on the temperature and the localization of chains, rows also
        have ``nbeta`` and ``localization`` (a number, or "by parameter"), None for other numbers.
        """
        return number_rows(self.results)

    def save(self, path: str | Path) -> Path:
        """Write into folder ``path``: one file per result, then the index ``measurement.json``."""
        folder = Path(path)
        for name, result in self.results.items():
            if isinstance(result, Result):
                result.save(folder / f"{name}.json")
        return super().save(folder / "measurement.json")


@dataclass(frozen=True)
class Comparison(Result):
    """The same quantities of several problems, such as the ends of several trainings.

    ``readings`` has for each quantity and name one estimate per problem: one, or one for each seed,
    in the same order for every name. ``settings`` are nβ and γ, common to all, where there is a λ̂.
    """

    readings: Mapping[str, Mapping[str, tuple[Estimate, ...]]]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """What is compared."""
        return tuple(next(iter(self.readings.values()), {}))

    @property
    def status(self) -> Status:
        """That of the first estimate which did not converge."""
        every = (one for part in self.readings.values() for each in part.values() for one in each)
        return Status.joint(one.status for one in every)

    def value(self, quantity: str, name: str) -> Estimate:
        """The estimate of one problem; of several, their mean and its standard error over them."""
        return _mean(self._parts(quantity, name))

    def difference(self, quantity: str, name: str, other: str) -> Estimate:
        """``name`` minus ``other``.

        With several problems the differences are taken seed by seed, and the error is that of their
        mean over seeds. With one each it is the error of measuring these two, which says nothing
        about other trainings.
        """
        pairs = zip(self._parts(quantity, name), self._parts(quantity, other), strict=True)
        bounds = quantity.startswith("eigenvalues")
        return _mean([_less(one, two, bounds) for one, two in pairs])

    def _parts(self, quantity: str, name: str) -> tuple[Estimate, ...]:
        require_choice(quantity, "quantity", self.readings)
        return self.readings[quantity][require_choice(name, "name", self.names)]

    def table(self) -> list[dict[str, Any]]:
        """One row per quantity and name, and after them one per difference to the first name:
        quantity, name, value, stderr, n and status.
        """
        first, *others = self.names
        rows = []
        for quantity, by_name in self.readings.items():
            values = {name: self.value(quantity, name) for name in by_name}
            for name in others:
                values[f"{name} − {first}"] = self.difference(quantity, name, first)
            for name, one in values.items():
                row: dict[str, Any] = {"quantity": quantity, "name": name, "value": float(one)}
                row |= {"stderr": float(one.stderr), "n": len(by_name[first])}
                rows.append({**row, "status": one.status.name})
        return rows

    def __str__(self) -> str:
        lines = []
        for quantity in self.readings:
            values = [self.value(quantity, name) for name in self.names]
            parts = zip(self.names, values, strict=True)
            texts = []
            for name, value in parts:
                text = str(value).partition(" [")[0]
                status = "" if value.status.ok else f" [{value.status.name}]"
                texts.append(f"{name} {text}{status}")
            lines.append(f"{quantity}: {', '.join(texts)}")
        pairs = self.settings.items()
        words = [(key, f"{x:.5g}" if isinstance(x, float) else str(x)) for key, x in pairs]
        given = ", ".join(f"{key} {text}" for key, text in words)
        return "\n".join([*lines, *([f"at {given}"] if given else [])])


def _less(one: Estimate, two: Estimate, bounds: bool) -> Estimate:
    """The difference of two independent estimates, with Welch's degrees of freedom; errors that are
    ``bounds`` add up.
    """
    squares = [float(each.stderr) ** 2 for each in (one, two)]
    pairs = zip(squares, (one.dof, two.dof), strict=True)
    parts = [square**2 / dof for square, dof in pairs if 0 < square < math.inf]
    total = math.fsum(squares)
    dof = total**2 / math.fsum(parts) if math.isfinite(total) and any(parts) else math.inf
    status = Status.joint((one.status, two.status))
    # less a lower bound, whose error is infinite, the difference is no lower bound
    error = float(one.stderr) + float(two.stderr) if bounds else math.sqrt(total)
    error = math.nan if squares[1] == math.inf else error
    return Estimate(float(one) - float(two), error, one.cost + two.cost, status, max(dof, 1.0))


def _mean(estimates: Sequence[Estimate]) -> Estimate:
    """The mean over problems, its error from the spread between them; one estimate as it is."""
    if len(estimates) == 1:
        only = estimates[0]
        return Estimate(only.value, only.stderr, only.cost, only.status, only.dof)
    values = [float(one) for one in estimates]
    status = Status.joint(one.status for one in estimates)
    error = statistics.stdev(values) / math.sqrt(len(values))
    # the spread of lower bounds, whose errors are infinite, is no error
    unknown = [float(one.stderr) for one in estimates if not math.isfinite(float(one.stderr))]
    error = sum(unknown) if unknown else error
    cost = sum(one.cost for one in estimates)
    return Estimate(statistics.fmean(values), error, cost, status, len(values) - 1)


def number_rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a table of named results; see ``Measurement.table``."""
    readings = [one for part in results.items() for one in _readings(*part, NO_SETTINGS)]
    sampled = any(settings is not NO_SETTINGS for _, _, settings in readings)
    rows = []
    for label, one, settings in readings:
        row = {"quantity": label, "value": float(one), "stderr": float(one.stderr)}
        row |= {"cost": one.cost, "status": one.status.name}
        rows.append({**row, **(settings if sampled else {})})
    return rows


def frame_of(result: Result) -> Any:
    """The table of a result as a data frame, or its arrays of one dimension and one length."""
    try:
        from pandas import DataFrame  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError("frame() needs pandas: pip install pandas") from error
    return DataFrame(rows_of(result))


def rows_of(result: Result) -> list[dict[str, Any]]:
    """The table of a result; of one that holds arrays alone, its columns; else its fields.

    Columns are the arrays of the most common shape. Those of several dimensions are flattened,
    with the place of each element beside them, or what an array along these dimensions says of it.
    """
    if rows := result.table():
        return rows
    fields = dataclasses.fields(result)  # type: ignore[arg-type]
    values = {part.name: getattr(result, part.name) for part in fields}
    arrays = {
        name: np.array(value.tolist() if isinstance(value, Tensor) else value)
        for name, value in values.items()
        if isinstance(value, Tensor | np.ndarray)
    }
    shapes = [array.shape for array in arrays.values() if array.size and array.ndim]
    if not shapes:
        plain = {name: x for name, x in values.items() if isinstance(x, int | float | str)}
        return [plain] if plain else []
    shape = max(shapes, key=lambda one: (shapes.count(one), len(one)))
    columns: dict[str, Any] = {}
    if len(shape) > 1:
        along = [name for name, array in arrays.items() if {array.shape} == {(n,) for n in shape}]
        for axis, places in enumerate(np.indices(shape)):
            known = {f"{name}_{axis + 1}": arrays[name][places] for name in along}
            name = result.axes[axis] if axis < len(result.axes) else f"axis_{axis + 1}"
            columns |= known or {name: places}
    columns |= {name: array for name, array in arrays.items() if array.shape == shape}
    flat = {name: column.ravel().tolist() for name, column in columns.items()}
    return [dict(zip(flat, row, strict=True)) for row in zip(*flat.values(), strict=True)]


LEFT = 'style="text-align: left; vertical-align: top"'
SHOWN = 12  # rows of a table in a notebook


def html_of(result: Result, fields: Mapping[str, str], picture: bytes) -> str:
    """The table of a result as HTML without scripts, with remedies, a figure and its ``fields``.

    Inline alignment is the only style, so that any notebook shows it in its own colours.
    """
    rows = result.table()
    own = type(result).__str__ is not object.__str__ and "\n" not in str(result)
    summary = re.sub(r" \[[A-Z_]+: [^\]]*\]", "", str(result)) if own else ""
    name = html.escape(type(result).__name__)
    listed = "".join(_html_row((key, text)) for key, text in fields.items())
    listed = f"<table><tbody>{listed}</tbody></table>"
    parts = [f"<div><b>{name}</b> {html.escape(summary)}</div>"]
    if rows:
        hidden = {"nbeta", "localization"}  # in the summary, or among the fields
        keys = [key for key in rows[0] if key not in hidden]
        head = _html_row([key.replace("stderr", "standard error") for key in keys], "th")
        body = [_html_row([_cell(key, row[key], name) for key in keys]) for row in rows]
        notes = [f"… and {len(rows) - SHOWN} more: see frame()"] if len(rows) > SHOWN else []
        met = {getattr(result, "status", Status.CONVERGED).name, *(row["status"] for row in rows)}
        notes += [f"{one.name}: {one.value}" for one in Status if one.name in met and one.value]
        wide = f'<tr><td colspan="{len(keys)}" {LEFT}>{{}}</td></tr>'
        body = body[:SHOWN] + [wide.format(html.escape(note)) for note in notes]
        parts += [f"<table><thead>{head}</thead><tbody>{''.join(body)}</tbody></table>"]
        listed = f"<details><summary>all fields</summary>{listed}</details>"
    if picture:
        data = base64.b64encode(picture).decode()
        parts.append(f'<img alt="figure of the {name}" src="data:image/png;base64,{data}"/>')
    return f"<div>{''.join(parts)}{listed}</div>"


def _html_row(texts: Sequence[str], rest: str = "td") -> str:
    tags = ["th"] + [rest] * (len(texts) - 1)
    cells = [
        f"<{tag} {LEFT}>{html.escape(text)}</{tag}>" for tag, text in zip(tags, texts, strict=True)
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _cell(key: str, value: Any, kind: str) -> str:
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value).removeprefix(f"{kind}.")
    if key == "stderr":
        return {0.0: "exact", math.inf: "a lower bound"}.get(value, f"{value:.2g}")
    return f"{value:.6g}"


def latex_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a LaTeX tabular with the rules of booktabs.

    >>> print(latex_of([{"quantity": "top_1", "value": 4.123, "stderr": 0.08}]), end="")
    \\begin{tabular}{ll}
    \\toprule
    quantity & value \\\\
    \\midrule
    top\\_1 & $4.123 \\pm 0.080$ \\\\
    \\bottomrule
    \\end{tabular}
    """
    header = list(dict.fromkeys(key for row in rows for key in row))
    if "value" in header and "stderr" in header:
        header.remove("stderr")  # it stands beside the value
    lines = [[_latex_cell(row, key) for key in header] for row in rows]
    body = [" & ".join(line) + r" \\" for line in lines]
    names = " & ".join(map(_escape, header)) + r" \\"
    rules = [r"\toprule", names, r"\midrule", *body, r"\bottomrule", r"\end{tabular}", ""]
    return "\n".join([rf"\begin{{tabular}}{{{'l' * len(header)}}}", *rules])


def _latex_cell(row: Mapping[str, Any], key: str) -> str:
    value, error = row.get(key), row.get("stderr") or 0.0
    if value is None:
        return ""
    if not isinstance(value, float):
        return _escape(str(value))
    if key != "value" or not 0 < error < math.inf:
        return f"${value:.6g}$" if math.isfinite(value) else _escape(f"{value}")
    digits = max(0, 1 - math.floor(math.log10(error)))
    return f"${value:.{digits}f} \\pm {error:.{digits}f}$"


def _escape(text: str) -> str:
    words = {
        "−": "$-$",
        "\\": r"\textbackslash{}",
        "^": r"\textasciicircum{}",
        "~": r"\textasciitilde{}",
    }
    return "".join(
        words.get(letter, f"\\{letter}" if letter in "&%$#_{}" else letter) for letter in text
    )


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
            readings = {"wbic": result.wbic}
            if result.sensitivity is not None:
                readings |= {
                    "d/dlnγ": result.sensitivity.localization,
                    "d/dlnnβ": result.sensitivity.nbeta,
                }
            for label, part in readings.items():
                if part is not None and math.isfinite(part.value):
                    whole = dataclasses.replace(part, cost=result.cost, status=result.status)
                    yield f"{name}.{label}", whole, settings
    elif isinstance(result, Eigenpairs):
        for i, (estimate, _) in enumerate(result, start=1):
            whole = dataclasses.replace(estimate, cost=result.cost, status=result.status)
            yield f"{name}[{i}]", whole, settings
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
    return {"nbeta": nbeta, "localization": localization_value(gamma)}


def localization_value(gamma: float | Tensor) -> float | str:
    """A number, or "by parameter" for a localization that differs between parameters."""
    if not isinstance(gamma, Tensor):
        return gamma
    low, high = float(gamma.min()), float(gamma.max())
    return low if low == high else "by parameter"
