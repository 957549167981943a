"""Charts as plotly.js figures: dictionaries with names such as "@s0" for theme colours."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from functools import partial
from html import escape
from typing import Any

from lambdahat.report import style
from lambdahat.results.charts import BANDED, Chart, Heat, Series

COLOURS = 8  # of the page's themes: --s0 … --s7
# beyond COLOURS series the next so many have these: with one colour, dashes, marks and hatching
# tell them apart
DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "triangle-up", "x")
PUBLISHED = ("diamond", "diamond-wide", "diamond-tall", "star-diamond")
HATCHES = ("", "/", "x", ".")
MARKS = {"hollow": "circle", "star": "star", "cross": "x-thin", "diamond": "diamond"}
MARKS["tick"] = "line-ns"
DIGITS = 7
CROWD = 300  # from so many points on their marks are small
LETTERS = 14  # of a line of a name below an axis
WIDE = 30.0  # beyond this factor the marks of a logarithmic axis are powers of 10
# from this factor up to WIDE they are 1, 2 and 5 times those; below it plotly's own do
NARROW = 4.0
TICKS = 8  # powers of 10 that are marked, at most
# an axis over more than FAR powers of 10 opens at its upper DEEP: the rest is rounding
FAR, DEEP = 30, 12
BAND = 0.18  # opacity
LEVELS = 10  # of contours that two fields share
CAMERA = {"eye": {"x": 1.9, "y": 1.9, "z": 1.1}, "center": {"x": 0, "y": 0, "z": -0.15}}
ROW = 24  # pixels of each name down the left side
ACROSS = ("x", "error_x", "xaxis", "x0", "x1", "xref", "xanchor")  # what flips with its y

Trace = dict[str, Any]


def figure_of(chart: Chart) -> dict[str, Any]:
    """``data`` and ``layout`` as ``Plotly.newPlot`` takes them; the page makes the table of numbers
    from them.

    A list of numbers is no figure here: the page writes it as a table.
    """
    data = []
    if chart.heat is not None:
        data = _surfaces(chart.heat) if chart.surface else _maps(chart.heat)
    if not chart.surface:
        data += [trace for number in range(len(chart.series)) for trace in _traces(chart, number)]
    figure = {"data": data, "layout": _layout(chart)}
    return _flip(figure) if chart.horizontal else figure


def describe_chart(chart: Chart) -> str:
    """The chart in words, for readers who do not see it."""
    if chart.heat is not None:
        cells = [_number(value) for line in chart.heat.values for value in line]
        what = f"{'Surface' if chart.surface else 'Map'} of {chart.heat.name or chart.title}"
        return f"{what} over {chart.x_label} and {chart.y_label}: {_range(cells)}."
    names = style.names_of(chart) if chart.x_names else []
    parts = [_in_words(series, names) for series in chart.series if not series.faint]
    lines, bands = (*chart.lines, *chart.x_lines), (*chart.bands, *chart.x_bands)
    parts += [f"a line at {at:.4g} marks {label}" for label, at in lines if label]
    parts += [f"{label} from {low:.4g} to {high:.4g}" for label, low, high in bands if label]
    hollow = sum(len(series.hollow) for series in chart.series)
    parts += [f"{hollow} did not converge"] if hollow else []
    parts += [chart.warning] if chart.warning else []
    axes = " over ".join(filter(None, (chart.y_label, chart.x_label)))
    return f"{axes}. {'; '.join(parts)}."


def _in_words(series: Series, names: Sequence[str]) -> str:
    pairs = zip(series.x, map(_number, series.y), strict=True)
    known = [(x, value) for x, value in pairs if value is not None]
    name = series.name + (", published" if series.published else "")
    if not known:
        return f"{name}: no values"
    ends = []
    for x, value in known[:: max(len(known) - 1, 1)]:
        place = names[int(x)] if names and x in range(len(names)) else style.place_text(x)
        ends.append(f"{value:.4g} at {place}")
    span = f", {_range([value for _, value in known])}" if len(known) > 2 else ""
    return f"{name}: {' to '.join(ends)}{span}"


def _range(values: Sequence[Any]) -> str:
    known = [value for value in values if value is not None]
    return f"between {min(known):.4g} and {max(known):.4g}" if known else "no values"


def _number(value: Any) -> Any:
    """A number of few digits for JSON: None for NaN and infinities; texts as they are."""
    if value is None or isinstance(value, str):
        return value
    plain = float(value)
    if not math.isfinite(plain):
        return None
    return int(plain) if plain.is_integer() and abs(plain) < 1e15 else float(f"{plain:.{DIGITS}g}")


def _text(value: str) -> str:
    """Text for plotly, which reads tags and links out of it."""
    return escape(value, quote=False)


def _places(values: Sequence[Any], names: Sequence[str] = ()) -> list[Any]:
    """The values of an axis, all texts if one is; ``names`` replace the places 0, 1, …"""
    if names:
        return [_text(names[int(value)]) for value in values]
    if any(isinstance(value, str) for value in values):
        return [_text(style.place_text(value)) for value in values]
    return [_number(value) for value in values]


def _only_names(chart: Chart) -> bool:
    """Whether every place has a unique name: not so for the joints of a tree."""
    places = [x for series in chart.series for x in series.x]
    return len(set(chart.x_names)) == len(chart.x_names) and all(
        x in range(len(chart.x_names)) for x in places
    )


def _numbers(values: Sequence[Any] | None) -> list[Any] | None:
    return None if values is None else [_number(value) for value in values]


def _traces(chart: Chart, number: int) -> list[Trace]:
    """A series, and its band or its stems below it."""
    series = chart.series[number]
    place, turn = style.look_of(chart, number, COLOURS)
    colour = f"@s{place}" if place is not None else "@muted" if series.colour == "muted" else "@ink"
    names = chart.x_names if _only_names(chart) else ()
    x, y = _places(series.x, names), [_number(value) for value in series.y]
    trace: Trace = {"name": _text(series.name), "x": x, "y": y, "legendgroup": str(number)}
    trace["hovertemplate"] = "%{x}: %{y:.5g}<extra>%{fullData.name}</extra>"
    if series.published:
        trace["meta"] = "published"
    if series.style == "bars":
        mark: dict[str, Any] = {"color": f"{colour}/0.85", "line": {"color": colour, "width": 1.5}}
        if series.published:
            mark["pattern"] = {"shape": "/", "fgcolor": colour, "bgcolor": "@paper", "size": 6}
        elif turn:
            mark["pattern"] = {"shape": HATCHES[turn], "fillmode": "overlay", "fgcolor": "@paper"}
            mark["pattern"]["size"] = 6
        trace |= {"type": "bar", "marker": mark}
    else:
        trace |= {"type": "scatter", "mode": _mode(series), "marker": _mark(colour, turn, series)}
        dash = "dash" if series.published or series.dashed else DASHES[turn]
        trace["line"] = {"color": colour, "width": 1 if series.faint else 2, "dash": dash}
    if series.style == "step":
        trace["line"]["shape"] = "hv"
    if series.style == "area":
        trace |= {"fill": "tozeroy", "fillcolor": f"{colour}/0.12"}
    if series.style == "rug":
        trace |= {"y": [0.97] * len(x), "yaxis": "y2"}
        trace["hovertemplate"] = "%{x}<extra>%{fullData.name}</extra>"
    if series.faint:
        trace |= {"opacity": 0.3, "hoverinfo": "skip"}
    if series.faint or not series.legend:
        trace["showlegend"] = False
    if series.texts:
        trace |= {"text": [_text(text) for text in series.texts], "textposition": "middle right"}
        if series.style == "bars":
            trace["textposition"] = "outside"
        else:
            trace["mode"] += "+text"
    below = _uncertainty(chart, series, trace, colour)
    if series.style == "bars":
        trace["offsetgroup"] = str(number)
    if not series.hollow:
        return [*below, trace]
    hollow = _hollow(trace, series, colour)
    if style.all_hollow(series):
        trace["marker"] = hollow["marker"]
    return [*below, trace, hollow]


def _uncertainty(chart: Chart, series: Series, trace: Trace, colour: str) -> list[Trace]:
    """Put error bars on a trace, or return its band; stems are drawn below the series."""
    x, y, extra = trace["x"], trace["y"], []
    error, below = _numbers(series.error), _numbers(series.below)
    bars = {"color": "@ink" if series.style == "bars" else colour, "thickness": 1.3, "width": 4}
    if error is not None:
        trace["customdata"] = error
        trace["hovertemplate"] = "%{x}: %{y:.5g} ± %{customdata:.2g}<extra>%{fullData.name}</extra>"
        if series.style in BANDED and len(series.x) > 1:
            extra = [_band(trace, x, y, below or error, error, colour, chart.y_log)]
        else:
            trace["error_y"] = {"type": "data", "array": error, **bars}
            if below is not None:
                trace["error_y"] |= {"symmetric": False, "arrayminus": below}
    if series.x_error is not None:
        trace["error_x"] = {"type": "data", "array": _numbers(series.x_error), **bars}
    if series.style == "stems":
        # a thin upright from the floor to every point
        least = min((value for value in y if value is not None and value > 0), default=1.0)
        floor = (
            chart.y_range[0] if chart.y_range[0] is not None else least / 3 if chart.y_log else 0.0
        )
        feet = [part for value in y for part in (floor, value, None)]
        line = {"color": colour, "width": 1.2}
        extra = [_below_trace(trace, [place for place in x for _ in range(3)], feet, line=line)]
    return extra


def _mode(series: Series) -> str:
    if series.style in ("points", "stems", "rug") or len(series.x) == 1:
        return "markers"
    if series.style == "segments" or series.faint:
        return "lines"
    return "lines" if len(series.x) > style.MARKED and not series.published else "lines+markers"


def _mark(colour: str, turn: int, series: Series) -> dict[str, Any]:
    """What is published are diamonds, what did not converge is hollow; marks of a crowd are
    small.
    """
    if series.mark:
        hollow = series.mark == "hollow"
        size = 13 if series.mark in ("star", "tick") else 9
        edge = {"color": colour, "width": 1 if series.mark == "star" else 1.8}
        mark = {"symbol": MARKS[series.mark], "size": size}
        return mark | {"color": "@paper" if hollow else colour, "line": edge}
    published = series.published
    symbol = (PUBLISHED if published else SYMBOLS)[turn]
    size = 3 if len(series.x) >= CROWD else 9 if published else 8 if turn else 6
    return {"color": colour, "size": size, "symbol": symbol}


def _hollow(trace: Trace, series: Series, colour: str) -> Trace:
    """Empty marks or bars over those of the points that did not converge; hovering names the
    status. The legend shows the series filled if some of its points converged.
    """
    places = series.hollow

    def part(values: Any) -> Any:
        return [values[place] for place in places] if isinstance(values, list) else values

    hollow = {key: part(value) for key, value in trace.items() if key not in ("fill", "text")}
    marker = {key: value for key, value in trace["marker"].items() if key != "pattern"}
    hollow["marker"] = marker | {"color": "@paper", "line": {"color": colour, "width": 1.8}}
    if trace["type"] == "scatter":
        hollow["mode"] = "markers"
        hollow["marker"]["size"] = max(marker["size"], 7)
    for side in ("error_x", "error_y"):
        if side in trace:
            hollow[side] = {key: part(value) for key, value in trace[side].items()}
    hollow["hovertext"] = [series.statuses[place] for place in places]
    hover = trace["hovertemplate"].replace("<extra>", " %{hovertext}<extra>")
    return hollow | {"hovertemplate": hover, "showlegend": False}


def _below_trace(trace: Trace, x: list[Any], y: list[Any], **look: Any) -> Trace:
    """A part of a series that is switched off with it and has no name of its own."""
    shared = {"hoverinfo": "skip", "showlegend": False, "legendgroup": trace["legendgroup"]}
    shared["name"] = trace["name"]
    return {"type": "scatter", "x": x, "y": y, "mode": "lines", **shared, **look}


def _band(
    trace: Trace,
    x: list[Any],
    y: list[Any],
    below: list[Any],
    above: list[Any],
    colour: str,
    log: bool,
) -> Trace:
    """The region between y − below and y + above as one polygon for each stretch without gaps."""
    least = min((value for value in y if value is not None and value > 0), default=1.0)
    floor = 0.1 * least if log else -math.inf
    corners_x: list[Any] = []
    corners_y: list[Any] = []
    stretch: list[tuple[Any, float, float]] = []
    for place, value, low, high in [*zip(x, y, below, above, strict=True), [None] * 4]:
        if value is not None:
            ends = value - (low or 0.0), value + (high or 0.0)
            stretch.append((place, *(max(end, floor) for end in ends)))
        elif stretch:
            places, lower, upper = zip(*stretch, strict=True)
            corners_x += [*places, *reversed(places), None]
            corners_y += [*lower, *reversed(upper), None]
            stretch = []
    fill = {"line": {"width": 0}, "fill": "toself", "fillcolor": f"{colour}/{BAND}"}
    return _below_trace(trace, corners_x[:-1], corners_y[:-1], **fill)


def _grid(heat: Heat, values: Sequence[Sequence[float | None]]) -> dict[str, Any]:
    """The numbers of a map; with a logarithmic scale z are logarithms, ``customdata`` numbers."""
    plain = [[_number(value) for value in line] for line in values]
    grid = {"x": _places(heat.x), "y": _places(heat.y), "z": plain, "colorscale": "Cividis"}
    grid["hovertemplate"] = "%{x}, %{y}: %{z:.5g}<extra></extra>"
    positive = [value for line in plain for value in line if value is not None and value > 0]
    if not heat.log or not positive:
        return grid
    least = min(positive)
    grid |= {"customdata": plain, "hovertemplate": "%{x}, %{y}: %{customdata:.5g}<extra></extra>"}
    grid["z"] = [
        [None if value is None else _number(math.log10(max(value, least))) for value in line]
        for line in plain
    ]
    return grid


def _maps(heat: Heat) -> list[Trace]:
    grid = _grid(heat, heat.values)
    log = "customdata" in grid
    title = {"text": _text(heat.name), "side": "right"}
    bar: dict[str, Any] = {"thickness": 12, "outlinewidth": 0, "title": title}
    if log:
        known = [value for line in grid["z"] for value in line if value is not None]
        ticks = [min(known) + part * (max(known) - min(known)) / 4 for part in range(5)]
        bar |= {"tickvals": ticks, "ticktext": style.level_texts([10**tick for tick in ticks])}
    if heat.cells:
        return [{"type": "heatmap", **grid, "colorbar": bar}]
    if not style.is_field(heat):
        trace = {"type": "heatmap", **grid, "colorbar": bar, "xgap": 1, "ygap": 1}
        if max(len(heat.x), len(heat.y)) <= style.TEXTED:
            trace["texttemplate"] = "%{text}" if log else "%{z:.3g}"
            if log:
                trace["text"] = [
                    ["" if value is None else f"{value:.3g}" for value in line]
                    for line in grid["customdata"]
                ]
        return [trace]
    line = {"width": 0.7, "color": "#ffffff"}
    field: Trace = {"type": "contour", **grid, "ncontours": 16, "line": line, "colorbar": bar}
    known = [value for row in grid["z"] for value in row if value is not None]
    if heat.beside is None or not known:
        return [field]
    step = (max(known) - min(known)) / LEVELS or 1.0
    levels = {"start": min(known) + step, "end": max(known) - step / 2, "size": step}
    dashed = {"width": 1, "color": "#000000", "dash": "dash"}
    second = {"type": "contour", **_grid(heat, heat.beside), "line": dashed, "showlegend": True}
    second |= {"name": _text(f"{heat.beside_name}, same levels")}
    second |= {"contours": {**levels, "coloring": "none"}}
    return [field | {"contours": levels}, second]


def _surfaces(heat: Heat) -> list[Trace]:
    look = {"type": "surface", "showscale": False, "contours": {"z": {"show": True, "width": 1}}}
    plain = dict(zip(("x", "y"), (_places(heat.x), _places(heat.y)), strict=True))
    shared = look | plain | {"hovertemplate": "%{x}, %{y}: %{z:.5g}<extra></extra>"}
    first = {**shared, "z": [_numbers(line) for line in heat.values], "colorscale": "Cividis"}
    if heat.beside is None:
        return [first]
    second = {"z": [_numbers(line) for line in heat.beside], "name": _text(heat.beside_name)}
    return [first, shared | second | {"colorscale": "Oranges", "opacity": 0.5}]


def _layout(chart: Chart) -> dict[str, Any]:
    heat = chart.heat
    if heat is not None and chart.surface:
        titles = {"xaxis": chart.x_label, "yaxis": chart.y_label, "zaxis": heat.name}
        scene: Any = {axis: {"title": {"text": _text(title)}} for axis, title in titles.items()}
        scene["zaxis"]["type"] = "log" if chart.y_log else "linear"
        return {"scene": scene | {"aspectmode": "cube", "camera": CAMERA}, "height": 440}
    names = style.names_of(chart)
    across: Sequence[Any] = names or [x for series in chart.series for x in series.x]
    up: Sequence[Any] = [y for series in chart.series for y in series.y if series.style != "rug"]
    height = 110 + max(ROW * len(names), 60) if chart.horizontal else 340
    if heat is not None:
        across, up, height = heat.x, heat.y, 380
    x_axis = _axis(chart.x_label, across, chart.x_log, chart.x_range, heat) | _ticks(chart, names)
    layout: dict[str, Any] = {
        "xaxis": x_axis,
        "yaxis": _axis(chart.y_label, up, chart.y_log, chart.y_range, heat),
        "height": height,
    }
    labelled = [series for series in chart.series if series.legend and not series.faint]
    if heat is None:
        unnamed = any(series.published or not series.legend for series in chart.series)
        layout["showlegend"] = len(labelled) > 1 or unnamed
        layout["barmode"] = "group" if style.side_by_side(chart) else "overlay"
        layout["shapes"], layout["annotations"] = _marks(chart)
    elif labelled or heat.beside is not None:
        layout["showlegend"] = True
    if any(series.style == "rug" for series in chart.series):
        hidden = {"visible": False, "fixedrange": True}
        layout["yaxis2"] = {"overlaying": "y", "range": [0, 1], **hidden}
    if chart.warning and not chart.series:
        text = "<br>".join(map(_text, textwrap.wrap(chart.warning, 50)))
        note = {"text": text, "showarrow": False}
        layout["annotations"] = [note | {"xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5}]
    return layout


def _axis(
    label: str,
    places: Sequence[Any],
    log: bool,
    ends: tuple[float | None, float | None],
    heat: Heat | None,
) -> dict[str, Any]:
    """A map of cells has equal cells, whatever its labels."""
    named = any(isinstance(place, str) for place in places)
    named = named or (heat is not None and not style.is_field(heat))
    kind = "category" if named else "log" if log else "linear"
    title = {"text": _text(label), "standoff": 8}
    axis: dict[str, Any] = {"title": title, "type": kind, "automargin": True}
    if kind == "log":
        axis |= {"exponentformat": "power", "tickfont": {"size": 10}} | _log_ticks(places, ends)
    elif kind == "linear":
        axis |= {} if ends == (None, None) else {"range": list(ends)}
        known = [number for number in map(_number, places) if number is not None]
        whole = known and all(isinstance(number, int) for number in known)
        if whole and max(known) - min(known) <= TICKS:
            axis["dtick"] = 1  # plotly would mark halves as well
    return axis


def _log_ticks(places: Sequence[Any], ends: tuple[float | None, float | None]) -> dict[str, Any]:
    numbers = [place for place in places if not isinstance(place, str)]
    values = [place for place in numbers if _number(place) is not None and place > 0]
    low, high = (math.log10(edge(values)) if values else 0.0 for edge in (min, max))
    axis: dict[str, Any] = {}
    if ends != (None, None):
        low = low if ends[0] is None else math.log10(ends[0])
        high = high if ends[1] is None else math.log10(ends[1])
        axis["range"] = [low, high + (0.05 * (high - low) if ends[1] is None else 0.0)]
    elif high - low > FAR:
        low = high - DEEP
        axis["range"] = [low, high + 0.5]
    # whole powers alone: plotly labels a 2 or a 5 between them so
    if high - low > math.log10(WIDE):
        axis["dtick"] = math.ceil((high - low) / TICKS)
    elif high - low > math.log10(NARROW):  # whole numbers: plotly labels 20 as 2
        axis |= {"dtick": "D2", "tickformat": "~g"}
    return axis


def _ticks(chart: Chart, names: Sequence[str]) -> dict[str, Any]:
    """Names below an axis in short lines, slanted where they do not fit side by side; nothing for
    numbers.

    The places keep their names as they are: hovering and the table of numbers show them so.
    """
    if not names:
        return {}
    width = 10 * LETTERS if chart.horizontal else LETTERS
    wrap = partial(textwrap.wrap, width=width, break_long_words=False, break_on_hyphens=False)
    texts = ["<br>".join(map(_text, wrap(name))) for name in names]
    if chart.x_names and not _only_names(chart):
        return {"type": "linear", "tickvals": list(range(len(names))), "ticktext": texts}
    ticks: dict[str, Any] = {"tickvals": [_text(name) for name in names], "ticktext": texts}
    ticks |= {"categoryorder": "array", "categoryarray": ticks["tickvals"]}
    return ticks | ({} if chart.horizontal else {"autotickangles": [0, -40, -90]})


def _marks(chart: Chart) -> tuple[list[Trace], list[Trace]]:
    """Lines and bands across the frame, and their labels at its right and upper ends."""
    shapes: list[Trace] = []
    notes: list[Trace] = []
    look = {"color": "@muted", "size": 11}
    sides = (
        ("y", "x", chart.lines, chart.bands, chart.y_log),
        ("x", "y", chart.x_lines, chart.x_bands, chart.x_log),
    )
    for axis, other, lines, bands, log in sides:
        whole = {f"{other}ref": "paper", f"{other}0": 0, f"{other}1": 1}
        ends = {"xanchor": "left", "yanchor": "top"}
        if axis == "y":
            ends = {"xanchor": "right", "yanchor": "bottom"}
        for label, low, high in (*((label, at, at) for label, at in lines), *bands):
            if not (math.isfinite(low) and math.isfinite(high)):
                continue
            shape = {"type": "line", "line": {"color": "@muted", "width": 1.2, "dash": "dash"}}
            if low != high:
                shape = {"type": "rect", "line": {"width": 0}}
                shape |= {"fillcolor": "@s4/0.18", "layer": "below"}
            shapes.append({**shape, **whole, f"{axis}0": low, f"{axis}1": high})
            # an annotation on a logarithmic axis is placed by its logarithm, a shape by its value
            if label:
                at = math.log10(low) if log and low > 0 else low
                place = {f"{other}ref": "paper", other: 1, axis: at, **ends}
                notes.append({"text": _text(label), "showarrow": False, "font": look, **place})
    return shapes, notes


def _flip(figure: dict[str, Any]) -> dict[str, Any]:
    """The figure with x down the left side, its first place on top."""
    data = [_swap(trace) for trace in figure["data"]]
    for trace in data:
        hover = trace.get("hovertemplate", "").replace("%{x", "%{·").replace("%{y", "%{x")
        trace["hovertemplate"] = hover.replace("%{·", "%{y")
        if trace["type"] == "bar":
            trace["orientation"] = "h"
    layout = _swap(figure["layout"])
    names = layout["yaxis"].get("tickvals", ())
    if len(names) > 1:
        layout["yaxis"]["range"] = [len(names) - 0.4, -0.6]
    else:
        layout["yaxis"]["autorange"] = "reversed"
    for part in ("shapes", "annotations"):
        layout[part] = [_swap(each) for each in layout.get(part, [])]
    for note in layout["annotations"]:
        note |= {"xanchor": "left", "yanchor": "top"} if note.get("yref") == "paper" else {}
    return {"data": data, "layout": layout}


def _swap(part: dict[str, Any]) -> dict[str, Any]:
    both = {name: name.replace("x", "y", 1) for name in ACROSS}
    both |= {value: key for key, value in both.items()}
    return {both.get(key, key): value for key, value in part.items()}
