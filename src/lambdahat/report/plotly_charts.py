"""Charts as plotly.js figures: plain dictionaries, with names such as "@s0" where the page puts its theme's colours."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from html import escape
from typing import Any

from lambdahat._check import require_choice
from lambdahat.results.charts import Chart, Heat, Series

STYLES = ("line", "points", "bars", "step", "stems", "segments")
COLOURS = 8  # of the page's themes: --s0 … --s7
# beyond COLOURS series the next so many have these: with one colour, dashes, marks and hatching tell them apart
DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "triangle-up", "x")
HATCHES = ("", "/", "x", ".")
DIGITS = 7
MARKED = 40  # a line of more points has no marks
CROWD = 300  # from so many points on their marks are small
LETTERS = 14  # of a line of a name below an axis
FINE = 8  # a map with at least so many numbers along both sides is a field, drawn as contours
TEXTED = 12  # a map with at most so many cells along a side has its values written in
WIDE = 30.0  # beyond this factor the marks of a logarithmic axis are powers of 10
NARROW = 4.0  # from this factor up to WIDE they are 1, 2 and 5 times those; below it plotly's own do
MARKS = 8  # powers of 10 that are marked, at most
FAR, DEEP = 30, 12  # an axis over more than FAR powers of 10 opens at its upper DEEP: the rest is rounding
BAND = 0.18  # opacity
CAMERA = {"eye": {"x": 1.9, "y": 1.9, "z": 1.1}, "center": {"x": 0, "y": 0, "z": -0.15}}

Trace = dict[str, Any]


def figure_of(chart: Chart) -> dict[str, Any]:
    """``data`` and ``layout`` as ``Plotly.newPlot`` takes them; the page makes the table of numbers from them."""
    if chart.heat is not None:
        data = [_surface(chart.heat) if chart.surface else _map(chart.heat)]
    else:
        data = [trace for number in range(len(chart.series)) for trace in _traces(chart, number)]
    return {"data": data, "layout": _layout(chart)}


def described(chart: Chart) -> str:
    """The chart in words, for readers who do not see it."""
    if chart.heat is not None:
        cells = [_number(value) for line in chart.heat.values for value in line]
        kind = "Surface" if chart.surface else "Map"
        return f"{kind} of {chart.heat.name or chart.title} over {chart.x_label} and {chart.y_label}: {_range(cells)}."
    parts = [_in_words(series) for series in chart.series]
    parts += [f"a line at {height:.4g} marks {label}" for label, height in chart.lines]
    return " over ".join(filter(None, (chart.y_label, chart.x_label))) + ". " + "; ".join(parts) + "."


def _in_words(series: Series) -> str:
    known = [(x, value) for x, y in zip(series.x, series.y, strict=True) if (value := _number(y)) is not None]
    name = series.name + (", published" if series.published else "")
    if not known:
        return f"{name}: no values"
    (first, low), (last, high) = known[0], known[-1]
    ends = f"{low:.4g} at {_word(first)}" + (f" to {high:.4g} at {_word(last)}" if len(known) > 1 else "")
    return f"{name}: {ends}" + (f", {_range([value for _, value in known])}" if len(known) > 2 else "")


def _range(values: Sequence[Any]) -> str:
    known = [value for value in values if value is not None]
    return f"between {min(known):.4g} and {max(known):.4g}" if known else "no values"


def _number(value: Any) -> Any:
    """A number of few digits that JSON can hold: None for NaN and the infinities; texts as they are."""
    if value is None or isinstance(value, str):
        return value
    plain = float(value)
    if not math.isfinite(plain):
        return None
    return int(plain) if plain.is_integer() and abs(plain) < 1e15 else float(f"{plain:.{DIGITS}g}")


def _word(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


def _text(value: str) -> str:
    """Text for plotly, which reads tags and links out of it."""
    return escape(value, quote=False)


def _places(values: Sequence[Any]) -> list[Any]:
    """What goes on an axis; one text makes all of them texts."""
    if any(isinstance(value, str) for value in values):
        return [_text(_word(value)) for value in values]
    return [_number(value) for value in values]


def colour_of(chart: Chart, number: int) -> int | None:
    """Which colour a series has; a published one that of the series whose name begins its own, else none."""
    ours = [index for index, series in enumerate(chart.series) if not series.published]
    series = chart.series[number]
    if not series.published:
        return ours.index(number)
    alike = [place for place, index in enumerate(ours) if series.name.startswith(chart.series[index].name)]
    return max(alike, key=lambda place: len(chart.series[ours[place]].name), default=None)


def look_of(place: int | None, colours: int) -> tuple[int | None, int]:
    """Which of the colours, and how often they were used up before: which dash, mark and hatching goes with it."""
    return (None, 0) if place is None else (place % colours, place // colours % len(DASHES))


def _traces(chart: Chart, number: int) -> list[Trace]:
    """A series, and its band below it where it is a line with errors."""
    series = chart.series[number]
    require_choice(series.style, f"the style of series {series.name!r}", STYLES)
    place, turn = look_of(colour_of(chart, number), COLOURS)
    colour = "@ink" if place is None else f"@s{place}"
    x, y = _places(series.x), [_number(value) for value in series.y]
    error = None if series.error is None else [_number(value) for value in series.error]
    trace: Trace = {"name": _text(series.name), "x": x, "y": y, "legendgroup": str(number)}
    trace["hovertemplate"] = "%{x}: %{y:.5g}<extra>%{fullData.name}</extra>"
    if series.published:
        trace["meta"] = "published"
    if series.style == "bars":
        trace |= {"type": "bar", "marker": _bar(colour, turn, series.published)}
    else:
        trace |= {"type": "scatter", "mode": _mode(series), "marker": _mark(colour, turn, series)}
        trace["line"] = {"color": colour, "width": 2, "dash": "dash" if series.published else DASHES[turn]}
    if series.style == "step":
        trace["line"]["shape"] = "hv"
    extra: list[Trace] = []
    if error is not None:
        trace |= {"customdata": error}
        trace["hovertemplate"] = "%{x}: %{y:.5g} ± %{customdata:.2g}<extra>%{fullData.name}</extra>"
        if series.style in ("line", "step") and len(series.x) > 1:
            extra = [_band(trace, x, y, error, colour, chart.y_log)]
        else:
            trace["error_y"] = {"type": "data", "array": error, "color": colour, "thickness": 1.3, "width": 4}
    if series.style == "stems":
        extra = [_stems(trace, x, y, colour, chart.y_log)]
    return [*extra, trace]


def _mode(series: Series) -> str:
    if series.style in ("points", "stems") or len(series.x) == 1:
        return "markers"
    if series.style == "segments":
        return "lines"
    return "lines" if len(series.x) > MARKED and not series.published else "lines+markers"


def _mark(colour: str, turn: int, series: Series) -> dict[str, Any]:
    """What is published is hollow; marks of a crowd are small."""
    published = series.published
    symbol = f"{SYMBOLS[turn] if turn else 'diamond'}-open" if published else SYMBOLS[turn]
    return {"color": colour, "size": 3 if len(series.x) >= CROWD else 9 if published else 8 if turn else 6,
            "symbol": symbol}  # fmt: skip


def _bar(colour: str, turn: int, published: bool) -> dict[str, Any]:
    mark: dict[str, Any] = {"color": f"{colour}/{0.0 if published else 0.85}", "line": {"color": colour, "width": 1.5}}
    if turn:
        mark["pattern"] = {"shape": HATCHES[turn], "fillmode": "overlay", "fgcolor": "@paper", "size": 6}
    return mark


def _band(trace: Trace, x: list[Any], y: list[Any], error: list[Any], colour: str, log: bool) -> Trace:
    """The region y ± error as one polygon for each stretch without gaps."""
    floor = 0.1 * min((value for value in y if value is not None and value > 0), default=1.0) if log else -math.inf
    corners_x: list[Any] = []
    corners_y: list[Any] = []
    stretch: list[tuple[Any, float, float]] = []
    for place, value, half in [*zip(x, y, error, strict=True), (None, None, None)]:
        if value is not None:
            half = half or 0.0
            stretch.append((place, max(value - half, floor), max(value + half, floor)))
        elif stretch:
            corners_x += [point[0] for point in stretch] + [point[0] for point in reversed(stretch)] + [None]
            corners_y += [point[1] for point in stretch] + [point[2] for point in reversed(stretch)] + [None]
            stretch = []
    return {
        "type": "scatter", "x": corners_x[:-1], "y": corners_y[:-1], "mode": "lines", "line": {"width": 0},
        "fill": "toself", "fillcolor": f"{colour}/{BAND}", "hoverinfo": "skip", "showlegend": False,
        "legendgroup": trace["legendgroup"], "name": trace["name"],
    }  # fmt: skip


def _stems(trace: Trace, x: list[Any], y: list[Any], colour: str, log: bool) -> Trace:
    """A thin upright from the floor to every point."""
    floor = min((value for value in y if value is not None and value > 0), default=1.0) / 3 if log else 0.0
    feet = [part for value in y for part in (floor, value, None)]
    return {
        "type": "scatter", "x": [place for place in x for _ in range(3)], "y": feet, "mode": "lines",
        "line": {"color": colour, "width": 1.2}, "hoverinfo": "skip", "showlegend": False,
        "legendgroup": trace["legendgroup"], "name": trace["name"],
    }  # fmt: skip


def _grid(heat: Heat) -> dict[str, Any]:
    values = [[_number(value) for value in line] for line in heat.values]
    return {"x": _places(heat.x), "y": _places(heat.y), "z": values, "colorscale": "Cividis",
            "hovertemplate": "%{x}, %{y}: %{z:.5g}<extra></extra>"}  # fmt: skip


def _map(heat: Heat) -> Trace:
    bar = {"thickness": 12, "outlinewidth": 0, "title": {"text": _text(heat.name), "side": "right"}}
    if is_field(heat):
        return {"type": "contour", **_grid(heat), "ncontours": 16, "line": {"width": 0.7, "color": "#ffffff"},
                "colorbar": bar}  # fmt: skip
    trace = {"type": "heatmap", **_grid(heat), "colorbar": bar, "xgap": 1, "ygap": 1}
    if max(len(heat.x), len(heat.y)) <= TEXTED:
        trace["texttemplate"] = "%{z:.3g}"
    return trace


def _surface(heat: Heat) -> Trace:
    return {"type": "surface", **_grid(heat), "showscale": False, "contours": {"z": {"show": True, "width": 1}}}


def is_field(heat: Heat) -> bool:
    """Whether a map is a function sampled on a fine grid rather than a table of cells."""
    return min(len(heat.x), len(heat.y)) >= FINE and not any(isinstance(v, str) for v in (*heat.x, *heat.y))


def _layout(chart: Chart) -> dict[str, Any]:
    if chart.heat is not None and chart.surface:
        scene = {"xaxis": {"title": {"text": _text(chart.x_label)}}, "yaxis": {"title": {"text": _text(chart.y_label)}},
                 "zaxis": {"title": {"text": _text(chart.heat.name)}, "type": "log" if chart.y_log else "linear"},
                 "aspectmode": "cube", "camera": CAMERA}  # fmt: skip
        return {"scene": scene, "height": 440}
    heat = chart.heat
    across = heat.x if heat is not None else [x for series in chart.series for x in series.x]
    up: Sequence[Any] = heat.y if heat is not None else [y for series in chart.series for y in series.y]
    layout: dict[str, Any] = {
        "xaxis": _axis(chart.x_label, across, chart.x_log, heat) | _named(across),
        "yaxis": _axis(chart.y_label, up, chart.y_log, heat),
        "height": 380 if heat is not None else 340,
    }
    if heat is None:
        layout["showlegend"] = len(chart.series) > 1 or any(series.published for series in chart.series)
        layout["barmode"] = "group"
        layout["shapes"], layout["annotations"] = _marks(chart)
    return layout


def _axis(label: str, places: Sequence[Any], log: bool, heat: Heat | None) -> dict[str, Any]:
    """A map of cells has equal cells, whatever its labels."""
    named = any(isinstance(place, str) for place in places) or (heat is not None and not is_field(heat))
    kind = "category" if named else "log" if log else "linear"
    axis: dict[str, Any] = {"title": {"text": _text(label), "standoff": 8}, "type": kind, "automargin": True}
    values = [place for place in places if not isinstance(place, str) and _number(place) is not None and place > 0]
    if kind == "log":
        axis |= {"exponentformat": "power", "tickfont": {"size": 10}}
        low, high = (math.log10(edge(values)) if values else 0.0 for edge in (min, max))
        if high - low > FAR:
            low = high - DEEP
            axis["range"] = [low, high + 0.5]
        if high - low > math.log10(WIDE):  # whole powers alone: plotly labels a 2 or a 5 between them so
            axis["dtick"] = math.ceil((high - low) / MARKS)
        elif high - low > math.log10(NARROW):  # whole numbers: plotly labels 20 as 2
            axis |= {"dtick": "D2", "tickformat": "~g"}
    return axis


def _named(places: Sequence[Any]) -> dict[str, Any]:
    """Names below an axis in short lines, slanted where they do not fit side by side; nothing for numbers.

    The places keep their names as they are: hovering and the table of numbers show them so.
    """
    if not any(isinstance(place, str) for place in places):
        return {}
    names = list(dict.fromkeys(map(_word, places)))
    lines = [textwrap.wrap(name, LETTERS, break_long_words=False, break_on_hyphens=False) for name in names]
    return {"tickvals": [_text(name) for name in names], "ticktext": ["<br>".join(map(_text, each)) for each in lines],
            "autotickangles": [0, -40, -90]}  # fmt: skip


def _marks(chart: Chart) -> tuple[list[Trace], list[Trace]]:
    """Horizontal lines across the frame, and their labels at its right end."""
    known = [(label, height) for label, height in chart.lines if math.isfinite(height)]
    shapes = [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": height, "y1": height,
               "line": {"color": "@muted", "width": 1.2, "dash": "dash"}} for _, height in known]  # fmt: skip
    # an annotation on a logarithmic axis is placed by its logarithm, a shape by its value
    notes = [{"text": _text(label), "xref": "paper", "x": 1, "xanchor": "right", "yanchor": "bottom",
              "y": math.log10(height) if chart.y_log and height > 0 else height, "showarrow": False,
              "font": {"color": "@muted", "size": 11}} for label, height in known]  # fmt: skip
    return shapes, notes
