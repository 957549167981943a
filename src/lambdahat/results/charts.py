"""Charts: what a figure shows, as plain data without a drawing library, and the charts of each
result by its type.

``lh.plot`` draws charts with matplotlib and ``lh.page`` with plotly. Register a function with
``charts_of`` to give a result type of your own its figure in both.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import numpy as np
from torch import Tensor

from lambdahat._core.check import require, require_choice
from lambdahat.results import Array, Estimate, LearningCoefficient, Status, student_quantile
from lambdahat.results.measurement import number_rows

STYLES = ("line", "points", "joined", "bars", "step", "stems", "segments", "area", "rug")
BANDED = ("line", "step", "segments")  # whose errors are a band, and not bars
COLOURS = ("blue", "vermilion", "green", "purple", "amber", "sky")
MARKS = ("", "hollow", "star", "cross", "tick", "diamond")
INTERVAL = "95 % interval"
WIDE = 20.0  # values that vary by more than this factor are shown on a logarithmic axis
PLOTTED = 2000  # elements: a longer array is summed up in a line of the list
Mark = tuple[str, float]  # label and place of a line
Band = tuple[str, float, float]  # label and both ends


@dataclass(frozen=True)
class Series:
    """One curve or set of points: y over x.

    ``style`` is one of "line", "points", "joined" (points with error bars, joined by a line),
    "bars", "step", "stems", "segments" (lines without marks, interrupted where y is None), "area"
    (filled down to zero) and "rug" (marks along the upper edge; y is not used). ``error`` is the
    half-width of the uncertainty of y, drawn as a band around lines, steps and segments, else as
    bars; ``below`` is its lower half where that differs; ``x_error`` is the half-width of x.
    ``published`` marks what a paper printed; such a series takes the colour of ours where its name
    begins with the name of ours.
    """

    name: str
    x: Sequence[float | str]
    y: Sequence[float | None]
    error: Sequence[float | None] | None = None
    style: str = "line"
    published: bool = False
    below: Sequence[float | None] | None = None
    x_error: Sequence[float | None] | None = None
    colour: str = ""  # of COLOURS, or "ink" or "muted"; by default the next one that is free
    mark: str = ""  # of MARKS; by default a dot
    dashed: bool = False
    faint: bool = False  # thin and pale, such as single draws behind their mean
    legend: bool = True  # whether its name is in the legend
    texts: Sequence[str] = ()  # written beside the points
    band: str = ""  # what the error is, for the caption: "95 % interval over 4 chains"
    # of every point that of its estimate: all but "" and "CONVERGED" are drawn hollow
    statuses: Sequence[str] = ()

    @property
    def hollow(self) -> list[int]:
        """The places of the points that did not converge."""
        known = ("", Status.CONVERGED.name)
        return [place for place, status in enumerate(self.statuses) if status not in known]

    def __post_init__(self) -> None:
        name, counts = f"series {self.name!r}", (len(self.x), len(self.y))
        require(counts[0] == counts[1], name, "have as many x as y", "{}, {}".format(*counts))
        require_choice(self.style, f"the style of {name}", STYLES)
        require_choice(self.mark, f"the mark of {name}", MARKS)
        require_choice(self.colour, f"the colour of {name}", ("", "ink", "muted", *COLOURS))


@dataclass(frozen=True)
class Heat:
    """A matrix of values over two sets of labels: ``values[i][j]`` lies at ``y[i]`` and ``x[j]``.

    ``beside`` is a second matrix on the same grid, drawn as contour lines or as a second surface.
    """

    x: Sequence[float | str]
    y: Sequence[float | str]
    values: Sequence[Sequence[float | None]]
    name: str = ""
    # colours by the logarithm; what is not positive has the colour of the least positive value
    log: bool = False
    beside: Sequence[Sequence[float | None]] | None = None
    beside_name: str = ""
    cells: bool = False  # a field of single cells, which contours would smear


@dataclass(frozen=True)
class Chart:
    """A figure: its series, its heat map or its list of numbers; its axes, lines and bands."""

    title: str
    x_label: str = ""
    y_label: str = ""
    series: tuple[Series, ...] = ()
    heat: Heat | None = None
    surface: bool = False  # draw the heat map as a surface in three dimensions
    x_log: bool = False
    y_log: bool = False
    source: str = ""  # the figure of a paper that it stands beside
    caption: str = ""
    lines: tuple[Mark, ...] = ()  # horizontal lines; one without a label is not in the legend
    x_lines: tuple[Mark, ...] = ()
    bands: tuple[Band, ...] = ()  # shaded ranges of y
    x_bands: tuple[Band, ...] = ()
    x_range: tuple[float | None, float | None] = (None, None)
    y_range: tuple[float | None, float | None] = (None, None)
    x_names: tuple[str, ...] = ()  # of the places 0, 1, … on the x axis
    x_root: bool = False  # a square-root axis where the drawing library has one
    horizontal: bool = False  # x runs down the left side and y along the bottom
    rows: tuple[tuple[str, str], ...] = ()  # a list of names and values in place of a frame
    warning: str = ""  # why something is missing
    page_only: bool = False  # a further view, which the page has room for and ``lh.plot`` does not

    @property
    def below(self) -> str:
        """The caption, then what the bands and bars are, and what is hollow and why."""
        bands: dict[str, dict[str, list[str]]] = {}
        for one in self.series:
            if one.error is not None and one.band and any(one.error):
                shape = "bands" if one.style in BANDED and len(one.x) > 1 else "bars"
                bands.setdefault(one.band, {}).setdefault(shape, []).append(one.name)
        parts = [self.caption]
        for band, shapes in bands.items():
            names = list(dict.fromkeys(name for each in shapes.values() for name in each))
            of = f" of {', '.join(names)}" if len(bands) > 1 and len(names) <= 3 else ""
            parts.append(f"{' and '.join(shapes).capitalize()}{of}: {band}.")
        each = (one.statuses[place] for one in self.series for place in one.hollow)
        if statuses := dict.fromkeys(each):
            parts.append(f"Hollow: not converged ({', '.join(statuses)}).")
        return " ".join(filter(None, parts))

    def with_name(self, name: str) -> Chart:
        """The same chart with ``name`` before its title."""
        return dataclasses.replace(self, title=f"{name}: {self.title}")


@singledispatch
def charts_of(result: Any) -> list[Chart]:
    """The charts of a result, the most informative first.

    ``@charts_of.register`` on a function that takes your own result type and returns its charts
    gives the type its figure in ``lh.plot`` and ``lh.page``. An unregistered dataclass is a list of
    its numbers, and a chart for each array and each part that has one; what is no dataclass has no
    charts.
    """
    if not dataclasses.is_dataclass(result) or isinstance(result, type):
        return []
    status = getattr(result, "status", Status.CONVERGED)
    return _charts_of_parts(type(result).__name__, _fields(result), status)


@charts_of.register
def _(results: Mapping) -> list[Chart]:  # type: ignore[type-arg]
    return _charts_of_parts("value ± error", results, Status.CONVERGED)


def _fields(result: Any) -> dict[str, Any]:
    """What a result holds, but for its cost and its status, which titles and tables show."""
    names = [field.name for field in dataclasses.fields(result)]
    return {name: getattr(result, name) for name in names if name not in ("cost", "status")}


def _charts_of_parts(title: str, parts: Mapping[str, Any], status: Status) -> list[Chart]:
    """The charts of every part, of which ``lh.plot`` shows the first, and a list of the numbers
    among them.
    """
    rows: list[tuple[str, str]] = []
    charts: list[Chart] = []
    for name, part in leaves(parts):
        if isinstance(part, str | bool | int | float):
            rows.append((name, f"{part:.6g}" if isinstance(part, float) else str(part)))
        elif is_number(part) or isinstance(part, LearningCoefficient):
            text, label = value_text(part), label_text(name)
            rows.append((label, text if part.status.ok else f"{text} [{part.status.name}]"))
            if at := settings_text(part):
                rows.append((f"{label}, measured at", at))
        if isinstance(part, np.ndarray | Tensor) or _is_numbers(part):
            charts += _array_charts(name, numpy_of(part))
        elif not is_number(part):
            drawn = charts_of(part)
            rest = [dataclasses.replace(chart, page_only=True) for chart in drawn[1:]]
            charts += [chart.with_name(name) for chart in (*drawn[:1], *rest)]
    charts = share_axes(charts)
    return [*charts, *([Chart(with_status(title, status), rows=tuple(rows))] if rows else [])]


def share_axes(charts: Sequence[Chart]) -> list[Chart]:
    """Spectra that are shown together on the same axes, so that they can be compared by eye.

    They are charts over eigenvalues with the same labels and scales. Where one is much narrower
    than all together it would be a line: then each keeps its own axes.
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    for place, chart in enumerate(charts):
        named = any(isinstance(x, str) for one in chart.series for x in one.x)
        if chart.series and chart.x_label.startswith("eigenvalue") and not named:
            key = (chart.x_label, chart.y_label, chart.x_log, chart.y_log, chart.x_root)
            groups.setdefault(key, []).append(place)
    shared = list(charts)
    for places in (each for each in groups.values() if len(each) > 1):
        across, up = zip(*(_extent(charts[place]) for place in places), strict=True)
        (left, right), (bottom, top) = (
            (min(low for low, _ in ends), max(high for _, high in ends)) for ends in (across, up)
        )
        if min(high - low for low, high in across) * WIDE >= right - left:
            ends: Any = {"x_range": (left, right), "y_range": (bottom, top)}
            for place in places:
                shared[place] = dataclasses.replace(charts[place], **ends)
    return shared


def _extent(chart: Chart) -> tuple[tuple[float, float], tuple[float, float]]:
    """The ends of both axes: those that are given, else those of the numbers with some room."""
    x, y = (
        [float(value) for one in chart.series for value in getattr(one, name) if value is not None]
        for name in ("x", "y")
    )
    limits = []
    for values, given, log in ((x, chart.x_range, chart.x_log), (y, chart.y_range, chart.y_log)):
        known = [each for each in values if math.isfinite(each) and (each > 0 or not log)] or [1.0]
        low, high = min(known), max(known)
        room = 0.03 * (high - low)
        ends = (low / 1.2, 1.2 * high) if log else (low - room, high + room)
        pairs = zip(given, ends, strict=True)
        low, high = (near if end is None else end for end, near in pairs)
        limits.append((low, high))
    return limits[0], limits[1]


def _is_numbers(part: Any) -> bool:
    """Whether a sequence is one of numbers, or of equally long sequences of them."""
    if not isinstance(part, tuple | list) or not part:
        return False
    if all(isinstance(each, int | float) for each in part):
        return True
    return all(map(_is_numbers, part)) and len({len(each) for each in part}) == 1


def _array_charts(name: str, values: Array) -> list[Chart]:
    """The elements over their index, a series for each row of a matrix; many elements as a
    histogram.
    """
    if values.size == 0 or values.ndim == 0:
        return []
    if values.size > PLOTTED:
        return [histogram(values, f"{name}: {values.size:,} elements")]
    table = values.reshape(-1, values.shape[-1])
    series = []
    for place, row in enumerate(table[: len(COLOURS)], start=1):
        label = name if len(table) == 1 else f"{name}, row {place}"
        series.append(Series(label, list(range(len(row))), numbers(row), style="points"))
    return [Chart(name, "index", name, tuple(series))]


def leaves(parts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The parts by name; mappings, sequences of results and unregistered results among them are
    opened.
    """
    for name, part in parts.items():
        inner: Mapping[str, Any] | None = part if isinstance(part, Mapping) else None
        if isinstance(part, tuple | list) and part and all(map(dataclasses.is_dataclass, part)):
            inner = {str(place): each for place, each in enumerate(part, start=1)}
        elif is_group(part):
            inner = _fields(part)
        if inner is None:
            yield f"{prefix}{name}", part
        else:
            yield from leaves(inner, f"{prefix}{name}.")


def is_group(result: Any) -> bool:
    """Whether a result is a dataclass without charts of its own, so that its fields are shown
    one by one.
    """
    plain = dataclasses.is_dataclass(result) and not isinstance(result, type)
    return plain and charts_of.dispatch(type(result)) is charts_of.dispatch(object)


def is_number(result: Any) -> bool:
    """Whether a result is one number with its error and nothing more, which a table shows better
    than a figure.
    """
    if not isinstance(result, Estimate) or isinstance(result.value, Tensor):
        return False
    if isinstance(result, LearningCoefficient):
        return result.chains is None
    return charts_of.dispatch(type(result)) is charts_of.dispatch(Estimate)


WORDS = {  # what figures and tables call the quantities that code names so
    "llc": "λ̂",
    "coefficient": "λ̂",
    "learning_coefficient": "λ̂",
    "wbic": "WBIC",
    "bic": "BIC",
    "d/dlnγ": "dλ̂/d ln γ",
    "d/dlnnβ": "dλ̂/d ln nβ",
    "frobenius": "Frobenius norm",
    "negative_mass": "share of negative eigenvalues",
    "degeneracy": "share of eigenvalues near 0",
    "smallest": "smallest eigenvalue",
    "largest": "largest eigenvalue",
    "trace": "trace",
    "spectral_norm": "spectral norm",
    "fisher_rao": "Fisher–Rao norm",
}
FIRST = 3  # numbers in the sentence of a result of many


def label_text(name: str) -> str:
    """The name of a quantity in the words of the field; other names stay as they are.

    >>> [label_text(name) for name in ("llc.wbic", "eigenpairs[2]", "spectrum.negative_mass")]
    ['WBIC', 'eigenvalue λ₂', 'spectrum: share of negative eigenvalues']
    """
    *before, last = name.split(".")
    stem, _, index = last.partition("[")
    rank = index.removesuffix("]")
    if stem in ("eigenpairs", "eigenvalues") and rank.isdigit():
        words = f"eigenvalue λ{rank.translate(str.maketrans('0123456789', '₀₁₂₃₄₅₆₇₈₉'))}"
    elif stem not in WORDS:
        return name.removeprefix(".")
    else:
        words = WORDS[stem] + (f", {rank}" if rank else "")
    return ": ".join([*(part for part in before if part not in ("", "llc")), words])


@singledispatch
def headline_of(result: Any, name: str) -> str:
    """What a result answers, in one sentence with its number; ``name`` is what the caller calls it.

    ``@headline_of.register`` gives a result type of your own its sentence. By default it has the
    first numbers of the result, or the title of its first chart.
    """
    parts = result if isinstance(result, Mapping) else {"": result}
    values = []
    for row in number_rows(parts)[:FIRST]:
        value = value_text(Estimate(row["value"], row["stderr"]))
        values.append(f"{label_text(row['quantity'])} = {value}")
    charts = [] if values else charts_of(result)
    return "; ".join(values) or (charts[0].title if charts else "")


@headline_of.register
def _(estimate: Estimate, name: str) -> str:
    if not isinstance(estimate.value, Tensor):
        return f"{label_text(name)} = {value_text(estimate)}"
    values = numpy_of(estimate.value)
    return f"{values.size:,} elements from {values.min():.4g} to {values.max():.4g}"


@headline_of.register
def _(coefficient: LearningCoefficient, name: str) -> str:
    return f"λ̂ = {value_text(coefficient)}{settings_text(coefficient, ' at ')}"


def larger_text(one: str, first: Estimate, other: str, second: Estimate, apart: Estimate) -> str:
    """Which of two is larger, with both numbers; ``apart`` is first − second with its error."""
    low, high = (float(end) for end in apart.interval())
    values = f"{value_text(first)} against {value_text(second)}"
    if low > 0 or high < 0:
        return f"{one} is {'above' if low > 0 else 'below'} {other}: {values}"
    return f"{one} and {other} do not differ beyond their errors: {values}"


def histogram(values: Array, title: str, bins: int = 60, caption: str = "") -> Chart:
    """A histogram of the finite elements on a logarithmic count axis."""
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    # a bin must be wider than the numbers around it are apart
    wide = high - low > bins * np.spacing(max(abs(low), abs(high)))
    around = (low, high) if wide else (low - abs(low or 1.0) / 2, low + abs(low or 1.0) / 2)
    counts, edges = np.histogram(finite, bins=bins, range=around)
    centres = numbers((edges[1:] + edges[:-1]) / 2)
    series = Series("elements", centres, numbers(counts), style="bars")
    look: Any = {"y_range": (0.7, None), "x_lines": (("", 0.0),), "caption": caption}
    return Chart(title, "value of the element", "elements", (series,), y_log=True, **look)


def interval_series(
    name: str, estimates: Iterable[tuple[float, Estimate]], style: str = "points", **look: Any
) -> Series:
    """Estimates over their places with their 95 % intervals; hollow where they did not converge."""
    listed = list(estimates)
    statuses = [each.status.name for _, each in listed]
    look = {"band": INTERVAL, "statuses": statuses} | look
    values = [float(each) for _, each in listed]
    ends = [each.interval() for _, each in listed]
    above = [float(high) - value for (_, high), value in zip(ends, values, strict=True)]
    below = [value - float(low) for (low, _), value in zip(ends, values, strict=True)]
    return Series(name, [place for place, _ in listed], values, above, style, below=below, **look)


def half_width(estimate: Estimate) -> float:
    """Half the width of the 95 % confidence interval."""
    return student_quantile(0.95, estimate.dof) * float(estimate.stderr)


def is_wide(values: Iterable[float | None]) -> bool:
    """Whether positive values vary by so much that their axis should be logarithmic."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return bool(known) and 0 < min(known) < max(known) / WIDE


def with_status(title: str, status: Status) -> str:
    """A title, which also says when the result is not to be trusted as it is."""
    return title if status.ok else f"{title} [{status.name}]"


def numbers(values: Any) -> list[float]:
    """An array as plain numbers."""
    return [float(value) for value in values]


def numpy_of(values: Any) -> Array:
    """A tensor or an array as double precision on the host."""
    return np.asarray(
        values.detach().cpu().double() if isinstance(values, Tensor) else values, dtype=np.float64
    )


def count_text(number: int, noun: str) -> str:
    """A text such as "1 probe", "1,200 parameters"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def settings_text(estimate: Estimate, before: str = "") -> str:
    """The nβ and γ of a learning coefficient, after ``before``; nothing for other numbers."""
    if not isinstance(estimate, LearningCoefficient) or not math.isfinite(estimate.nbeta):
        return ""
    return f"{before}nβ = {estimate.nbeta:.4g}, γ {gamma_text(estimate.localization)}"


def gamma_text(localization: float | Tensor) -> str:
    """The text "= 1", or the range where it differs between parameters."""
    if not isinstance(localization, Tensor):
        return f"= {localization:.3g}"
    low, high = float(localization.min()), float(localization.max())
    return f"= {low:.3g}" if low == high else f"from {low:.3g} to {high:.3g}"


def value_text(estimate: Estimate) -> str:
    """As "12.3 ± 0.4", "12.3 (exact)" where there is no error, "at least 12.3" where it is
    infinite.

    As many digits as the error leaves.
    """
    value, error = float(estimate), float(estimate.stderr)
    if error == math.inf:
        return f"at least {value:.6g}"
    if not math.isfinite(error):
        return f"{value:.6g} (error unknown)"
    if error == 0 or not math.isfinite(value):
        return f"{value:.6g}" + (" (exact)" if error == 0 else f" ± {error:.2g}")
    lead = math.floor(math.log10(abs(value))) if value else 0
    digits = min(max(lead - math.floor(math.log10(error)) + 2, 2), 10)
    return f"{value:#.{digits}g}".removesuffix(".") + f" ± {error:.2g}"
