"""``plot``: the charts of a result, drawn with matplotlib."""

from __future__ import annotations

import dataclasses
import io
import math
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lambdahat._core.check import describe, require
from lambdahat._core.storage import write_atomically
from lambdahat.report import coefficient_charts, run_charts, spectral_charts  # noqa: F401  (registers the charts)
from lambdahat.report.style import (
    AMBER,
    BLUE,
    GREEN,
    GREY,
    MARKED,
    PURPLE,
    SKY,
    TEXTED,
    VERMILION,
    all_hollow,
    is_field,
    level_texts,
    look_of,
    minus,
    names_of,
    new_figure,
    place_text,
    sentence,
    side_by_side,
    text_colour,
    tidy,
)
from lambdahat.results import Array, LearningCoefficient
from lambdahat.results.charts import (
    FIRST,
    INTERVAL,
    Chart,
    Heat,
    Series,
    charts_of,
    headline_of,
    interval_series,
    label_text,
    larger_text,
)
from lambdahat.results.measurement import Comparison, Measurement
from lambdahat.training.history import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


PALETTE = (BLUE, VERMILION, GREEN, PURPLE, AMBER, SKY)  # in the order of COLOURS
SHADES = "cividis"  # even in lightness, and the same to colour-blind readers
# of those that share a colour
DASHES = ("-", "--", ":", "-.")
RULES = ("--", ":", "-.", (0, (8, 3)))  # lines across the frame
SYMBOLS = ("o", "s", "^", "X")
PUBLISHED = ("D", "d", "P", "*")
HATCHES = ("", "//", "xx", "..")
MARKS: dict[str, dict[str, Any]] = {
    "hollow": {"marker": "o", "markerfacecolor": "white", "markersize": 5, "zorder": 4},
    "star": {"marker": "*", "markersize": 12, "zorder": 4},
    "cross": {"marker": "x", "markersize": 7, "markeredgewidth": 1.8, "zorder": 4},
    "tick": {"marker": "|", "markersize": 12, "markeredgewidth": 1.5},
    "diamond": {"marker": "D", "markersize": 6, "zorder": 4},
}
# a legend of more or longer names stands beside the frame; of too many there is none
INSIDE, LETTERS, MOST = 8, 36, 24
ACROSS = 4  # names in a row of a legend above the frame
LEVELS = 10  # of contours
CROWD = 300  # from so many points on their marks are small
LINE = 0.28  # inches of height for each name down the left side
CELL = 0.55, 0.35  # inches of a cell that has its number written in
NAMED = 45  # letters of all names below an axis, beyond which they are slanted
PER_INCH = 15  # letters of a caption


def draw(chart: Chart, ax: Axes | None = None, caption: bool = False) -> Axes:
    """Draw a chart and return its axes; for a surface a given ``ax`` must be three-dimensional."""
    axes: Any = ax
    if ax is None:
        figure = new_figure(*size_of(chart))
        solid = chart.surface
        axes = figure.add_subplot(projection="3d") if solid else tidy(figure.add_subplot())
    if chart.rows:
        _draw_list(chart.rows, axes)
    elif chart.heat is not None and chart.surface:
        _draw_surface(chart.heat, axes)
    else:
        if chart.heat is not None:
            _draw_map(chart.heat, axes)
        _draw_series(chart, axes)
    labels = chart.x_label, chart.y_label
    across, up = reversed(labels) if chart.horizontal else labels
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    # between the frame and the title is the legend of a crowded frame
    names = {one.name for one in chart.series if one.legend}
    crowded = any(one.faint for one in chart.series) and 1 < len(names) <= INSIDE
    lift = 6.0 + (16.0 * math.ceil(len(names) / ACROSS) if crowded else 0.0)
    axes.set_title(minus(chart.title), fontsize="medium", pad=lift)
    # draw the warning and the caption in small letters below the x label
    parts = [(chart.warning, VERMILION)] + ([(chart.below, GREY)] if caption else [])
    width = int(PER_INCH * axes.get_window_extent().width / axes.figure.dpi)
    look: dict[str, Any] = {"ha": "center", "va": "top", "fontsize": "small"}
    look["textcoords"] = "offset points"
    below = 3.0
    for text, colour in parts if axes.figure.get_layout_engine() is not None else []:
        lines = textwrap.wrap(minus(text), max(width, 20))
        place = {"xy": (0.5, 0.0), "xycoords": axes.xaxis.label, "xytext": (0, -below)}
        if lines:
            axes.annotate("\n".join(lines), **place, **look, color=colour)
        below += 12.0 * len(lines)
    return axes  # type: ignore[no-any-return]


def size_of(chart: Chart) -> tuple[float, float]:
    """Width and height in inches of a chart, with room for names and the numbers in cells."""
    heat = chart.heat
    if heat is not None and not is_field(heat) and max(len(heat.x), len(heat.y)) <= TEXTED:
        names = 0.08 * max(len(_word(y)) for y in heat.y)
        width, height = CELL[0] * len(heat.x), CELL[1] * len(heat.y)
        return max(6.4, 1.6 + names + width), max(4.0, 1.2 + 0.6 * names + height)
    if not chart.horizontal:
        return 6.4, 4.0
    count = len(names_of(chart))
    return (6.4, 1.9) if count == 1 else (8.4, 1.5 + LINE * count)


class _Frame:
    """Axes on which the x of a horizontal chart runs down the left side."""

    def __init__(self, axes: Axes, chart: Chart) -> None:
        self.axes, self.flipped = axes, chart.horizontal
        self.x_axis, self.y_axis = self.orient("x", "y")
        self.names = names_of(chart)
        # the x of series are numbers, not names
        self.numbered = not self.names or bool(chart.x_names)
        heat = chart.heat
        # a table's cells lie at 0, 1, … whatever their labels are
        self.cells = heat if heat is not None and not (is_field(heat) or heat.cells) else None

    def orient(self, x: Any, y: Any) -> tuple[Any, Any]:
        return (y, x) if self.flipped else (x, y)

    def set(self, axis: str, what: str, *values: Any, **options: Any) -> None:
        getattr(self.axes, f"set_{axis}{what}")(*values, **options)

    def columns(self, series: Series) -> tuple[Array, Array, Any, Any]:
        """x, y and their errors as numbers, NaN for what is unknown and None for no errors."""
        if self.cells is not None:  # its errors have no length between cells of any spacing
            return self.among("x", series.x), self.among("y", series.y), None, None
        numbered, names = self.numbered, self.names
        places = series.x if numbered else [names.index(place_text(at)) for at in series.x]
        x = np.array(places, float)
        y = np.array(series.y, float)
        above, below, across = map(_errors, (series.error, series.below, series.x_error))
        half = above if below is None or above is None else np.array([below, above])
        return x, y, half, across

    def among(self, axis: str, places: Sequence[Any]) -> Array:
        """Where places of an axis lie among the cells of a table: between two numbers in
        proportion, NaN beyond the first and the last label.
        """
        labels = self.cells.x if axis == "x" else self.cells.y  # type: ignore[union-attr]
        if any(isinstance(label, str) for label in labels):
            texts = {place_text(label): at for at, label in enumerate(labels)}
            return np.array([texts.get(place_text(place), math.nan) for place in places], float)
        known = np.array(labels, float)
        order = np.argsort(known)
        found = np.interp(np.array(places, float), known[order], order, math.nan, math.nan)
        return np.asarray(found, float)

    def plot(self, x: Any, y: Any, **look: Any) -> None:
        self.axes.plot(*self.orient(x, y), **look)

    def error_bars(self, x: Array, y: Array, half: Any, across: Any, **look: Any) -> None:
        if half is None and across is None:
            self.plot(x, y, **look)
            return
        (first, second), (xerr, yerr) = self.orient(x, y), self.orient(across, half)
        self.axes.errorbar(first, second, xerr=xerr, yerr=yerr, capsize=3, elinewidth=1, **look)

    def fill(self, x: Array, low: Any, high: Any, **look: Any) -> None:
        fill = self.axes.fill_betweenx if self.flipped else self.axes.fill_between
        fill(x, low, high, linewidth=0, **look)

    def write(self, x: Array, y: Array, texts: Sequence[str]) -> None:
        """Texts to the right of points."""
        look: Any = {"va": "center", "fontsize": "small", "annotation_clip": False}
        look["textcoords"] = "offset points"
        for at, value, text in zip(x, y, texts, strict=False):
            self.axes.annotate(text, self.orient(at, value), (6, 0), **look)

    def mark(self, axis: str, at: float, **look: Any) -> None:
        """A line across the frame at a place of one axis."""
        if self.cells is not None:
            at = float(self.among(axis, [at])[0])
        (self.axes.axvline if axis == "x" else self.axes.axhline)(at, **look)

    def shade(self, axis: str, low: float, high: float, **look: Any) -> None:
        if self.cells is not None:
            low, high = map(float, self.among(axis, [low, high]))
        (self.axes.axvspan if axis == "x" else self.axes.axhspan)(low, high, linewidth=0, **look)


def _errors(values: Sequence[float | None] | None) -> Any:
    """Half-widths, 0 where they are unknown; None where all are."""
    if values is None:
        return None
    known = np.nan_to_num(np.array(values, float), nan=0.0, posinf=0.0, neginf=0.0)
    return known if known.any() else None


def _draw_series(chart: Chart, axes: Axes) -> None:
    frame = _Frame(axes, chart)
    if chart.heat is None or is_field(chart.heat):
        _scale(chart, frame)
    bars = [number for number, series in enumerate(chart.series) if series.style == "bars"]
    beside = bars if side_by_side(chart) else []
    for number, series in enumerate(chart.series):
        place, turn = look_of(chart, number, len(PALETTE))
        colour = "black" if series.colour == "ink" else GREY
        look: dict[str, Any] = {"color": colour if place is None else PALETTE[place]}
        look["label"] = series.name if series.legend else None
        if series.style == "bars":
            hatched = look | ({"hatch": HATCHES[turn]} if turn else {})
            count = max(len(beside), 1)
            shift = beside.index(number) - (count - 1) / 2 if beside else 0.0
            _draw_bars(series, frame, hatched, shift, count)
        else:
            _draw_one(chart, series, frame, look, turn)
    named = 0
    for axis, lines in ((frame.y_axis, chart.lines), (frame.x_axis, chart.x_lines)):
        for label, at in lines:
            # what the legend names is told apart there by its dashes
            dash = RULES[named % len(RULES)] if label else RULES[0]
            named += bool(label)
            dashed = {"color": GREY, "linewidth": 0.9, "linestyle": dash, "zorder": 1}
            frame.mark(axis, at, label=label or None, **dashed)
    for axis, bands in ((frame.y_axis, chart.bands), (frame.x_axis, chart.x_bands)):
        for label, low, high in bands:
            frame.shade(axis, low, high, color=AMBER, alpha=0.15, label=label or None, zorder=0)
    _limit(chart, frame)
    _draw_legend(chart, axes)


def _scale(chart: Chart, frame: _Frame) -> None:
    places = [place for series in chart.series for place in series.x]
    whole = bool(places) and all(
        not isinstance(place, str) and float(place).is_integer() for place in places
    )
    if chart.x_log:
        binary = whole and all(int(place).bit_count() == 1 and int(place) > 0 for place in places)
        frame.set(frame.x_axis, "scale", "log", base=2 if binary else 10)
    elif chart.x_root:
        roots = (lambda x: np.sqrt(np.maximum(x, 0)), lambda y: y**2)
        frame.set(frame.x_axis, "scale", "function", functions=roots)
    if chart.y_log:
        frame.set(frame.y_axis, "scale", "log")
    if frame.names:
        small = {"fontsize": "small"} if chart.horizontal else {}
        frame.set(frame.x_axis, "ticks", range(len(frame.names)), frame.names, **small)
        if chart.horizontal:
            frame.axes.grid(axis="y", visible=False)
        elif sum(map(len, frame.names)) > NAMED:
            frame.axes.tick_params(axis="x", labelrotation=40)
            for label in frame.axes.get_xticklabels():
                label.set_horizontalalignment("right")
    elif whole and not chart.x_log and chart.heat is None:
        from matplotlib.ticker import MaxNLocator

        axis = getattr(frame.axes, f"{frame.x_axis}axis")
        axis.set_major_locator(MaxNLocator(12, integer=True, min_n_ticks=1))


def _limit(chart: Chart, frame: _Frame) -> None:
    """The ends of the axes that the chart gives; the first name of a horizontal chart is on top."""
    for axis, (low, high) in ((frame.x_axis, chart.x_range), (frame.y_axis, chart.y_range)):
        if low is not None or high is not None:
            frame.set(axis, "lim", low, high)
    if chart.horizontal and frame.names:
        frame.set(frame.x_axis, "lim", len(frame.names) - 0.4, -0.6)
    if chart.x_root:
        ticks = [0.01, 0.1, 0.5, 1.0, 1.5, 2.0]
        frame.set(frame.x_axis, "ticks", ticks, [f"{tick:g}" for tick in ticks])


def _draw_legend(chart: Chart, axes: Axes) -> None:
    """The names of series, lines and bands in this order, inside the frame where they fit."""
    handles, labels = axes.get_legend_handles_labels()
    order = [series.name for series in chart.series]
    order += [label for label, _ in (*chart.lines, *chart.x_lines)]
    pairs = sorted(
        zip(handles, labels, strict=True),
        key=lambda pair: order.index(pair[1]) if pair[1] in order else len(order),
    )
    unnamed = any(series.published or not series.legend for series in chart.series)
    needed = len(labels) > 1 or unnamed
    if not labels or not needed or len(labels) > MOST:
        return
    place: dict[str, Any] = {}
    if chart.heat is not None:
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.13), "ncols": len(labels)}
    elif chart.horizontal or len(labels) > INSIDE or max(map(len, labels)) > LETTERS:
        place = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
    elif any(series.faint for series in chart.series):  # draws fill the frame: above it
        place = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": ACROSS}
        place |= {"columnspacing": 1.0, "borderaxespad": 0.2}
    axes.legend(*zip(*pairs, strict=True), frameon=False, fontsize="small", **place)


def _draw_one(chart: Chart, series: Series, frame: _Frame, look: dict[str, Any], turn: int) -> None:
    """``turn`` says which of the dashes and marks."""
    x, y, half, across = frame.columns(series)
    marks = _marks(series, look["color"], turn)
    whole = series.style != "rug" and all_hollow(series)
    if whole:  # so is its entry in the legend
        marks = marks | {"markerfacecolor": "white"}
    if series.style == "rug":
        upper: Any = {"linestyle": "none", "transform": frame.axes.get_xaxis_transform()}
        frame.axes.plot(x, np.full(len(x), 0.97), **look, **marks, **upper)
    elif series.style in ("points", "stems") or (len(y) == 1 and series.style != "area"):
        if series.style == "stems":
            floor, positive = chart.y_range[0], y[y > 0]
            if floor is None:
                floor = positive.min() / 3 if chart.y_log and positive.size else 0.0
            frame.axes.vlines(x, floor, np.maximum(y, floor), color=look["color"], linewidth=1.1)
        frame.error_bars(x, y, half, across, linestyle="none", **marks, **look)
    else:
        _draw_curve(chart, series, frame, look, marks, turn)
    if (places := series.hollow) and series.style != "rug" and not whole:
        mark = {"marker": "o", "markersize": 5} | {
            key: value for key, value in marks.items() if key != "zorder"
        }
        mark |= {"markerfacecolor": "white", "color": look["color"], "zorder": 5}
        frame.plot(x[places], y[places], linestyle="none", **mark)
    frame.write(x, y, series.texts)


def _marks(series: Series, colour: str, turn: int) -> dict[str, Any]:
    if series.mark:
        return MARKS[series.mark]
    if series.published:
        return {"marker": PUBLISHED[turn], "markersize": 6}
    size = 2 if len(series.x) >= CROWD else 4
    return {"marker": SYMBOLS[turn], "markersize": size, "markerfacecolor": colour}


def _draw_curve(
    chart: Chart,
    series: Series,
    frame: _Frame,
    look: dict[str, Any],
    marks: dict[str, Any],
    turn: int,
) -> None:
    x, y, half, across = frame.columns(series)
    crowd = len(y) > MARKED and not (series.published or all_hollow(series))
    if series.style == "segments" or series.faint or crowd:
        marks = {}
    dash = "--" if series.published or series.dashed else DASHES[turn]
    line = {"linestyle": dash, "linewidth": 1.5}
    if series.faint:
        line |= {"linewidth": 0.5, "alpha": 0.25}
    elif series.style == "segments":
        # a short one is a fit or a tangent, over other marks
        line["linewidth"] = 1.1 if len(y) > MARKED else 1.9
    if series.style == "area":
        frame.fill(x, 0.0, y, color=look["color"], alpha=0.12)
    if series.style in ("joined", "area"):
        frame.error_bars(x, y, half, across, **line, **marks, **look)
        return
    way: dict[str, Any] = {"drawstyle": "steps-post"} if series.style == "step" else {}
    frame.plot(x, y, **line, **marks, **way, **look)
    if half is not None:
        below, above = half if half.ndim == 2 else (half, half)
        positive = y[y > 0]
        floor = 0.1 * positive.min() if chart.y_log and positive.size else -math.inf
        edge: Any = {"step": "post"} if series.style == "step" else {}
        low, high = np.maximum(y - below, floor), np.maximum(y + above, floor)
        frame.fill(x, low, high, color=look["color"], alpha=0.18, **edge)


def _draw_bars(
    series: Series, frame: _Frame, look: dict[str, Any], shift: float, count: int
) -> None:
    """Bars of several series that share places stand side by side."""
    x, y, half, _ = frame.columns(series)
    gap = float(np.diff(np.unique(x)).min()) if len(np.unique(x)) > 1 else 1.0
    width = (1.0 if len(x) > MARKED else 0.8) * gap / count
    fill = look
    if series.published:
        fill = {"facecolor": "none", "edgecolor": look["color"], "hatch": "///"}
        fill["label"] = look["label"]
    bar, error = (frame.axes.barh, "xerr") if frame.flipped else (frame.axes.bar, "yerr")
    bars = bar(x + shift * width, y, width, **{error: half}, capsize=3, **fill)
    for place in series.hollow:
        bars[place].set(facecolor="white", edgecolor=look["color"], linewidth=1.5)
    if 0 in series.hollow and not all_hollow(series) and look["label"]:
        bars.set_label("_nolegend_")  # the legend would show the first bar, which is hollow
        frame.axes.fill_between([], [], linewidth=0, **fill)
    frame.write(x, y, series.texts)


def _matrix(values: Sequence[Sequence[float | None]]) -> Array:
    return np.array([np.array(line, float) for line in values])


def _levels(values: Array, log: bool) -> tuple[Array, Any]:
    """Round levels, or levels spaced by ratio, and the colours that go with them."""
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    if log and 0 < low < high:
        return np.geomspace(low, high, LEVELS + 1), LogNorm(low, high)
    levels = np.asarray(MaxNLocator(LEVELS).tick_values(low, high))
    return (levels if len(levels) > 1 else np.array([low - 0.5, low + 0.5])), None


def _draw_map(heat: Heat, axes: Any) -> None:
    values = _matrix(heat.values)
    contours = is_field(heat) and not heat.cells
    shown = _draw_field(heat, values, axes) if contours else _draw_cells(heat, values, axes)
    bar = axes.figure.colorbar(shown, ax=axes, label=heat.name)
    if contours and heat.log:
        bar.set_ticks(shown.levels[::2], labels=level_texts(shown.levels)[::2])
        bar.minorticks_off()


def _draw_field(heat: Heat, values: Array, axes: Any) -> Any:
    """Filled contours with labelled lines; the second matrix as dashed lines at the same levels."""
    from matplotlib.patheffects import withStroke

    levels, norm = _levels(values, heat.log)
    shown = axes.contourf(heat.x, heat.y, values, levels=levels, norm=norm, cmap=SHADES)
    lines = axes.contour(heat.x, heat.y, values, levels=levels, colors="white", linewidths=0.7)
    names = dict(zip(map(float, levels), level_texts(levels), strict=True))
    texts: Any = {"fontsize": 8, "colors": "black", "fmt": names}
    for label in axes.clabel(lines, levels[1:-1:2], **texts):
        label.set_path_effects([withStroke(linewidth=2, foreground="white")])
    if heat.beside is not None:
        dashed = {"colors": "black", "linewidths": 0.9, "linestyles": "--"}
        axes.contour(heat.x, heat.y, _matrix(heat.beside), levels=levels, **dashed)
        # lines of contours have no entry in a legend
        label = f"{heat.beside_name}, same levels"
        axes.plot([], [], color="black", linestyle="--", linewidth=0.9, label=label)
    if list(heat.x) == list(heat.y):
        axes.set_box_aspect(1)
    return shown


def _draw_cells(heat: Heat, values: Array, axes: Any) -> Any:
    from matplotlib.colors import LogNorm

    positive = values[values > 0]
    # one value spans no logarithmic scale
    several = positive.size > 0 and positive.min() < positive.max()
    norm = LogNorm(positive.min(), positive.max(), clip=True) if heat.log and several else None
    if heat.cells:
        return axes.pcolormesh(heat.x, heat.y, values, cmap=SHADES, norm=norm, shading="nearest")
    shown = axes.imshow(values, cmap=SHADES, origin="lower", aspect="auto", norm=norm)
    axes.grid(visible=False)
    names = [_word(x) for x in heat.x]
    slanted = {"rotation": 40, "ha": "right"} if sum(map(len, names)) > NAMED else {}
    axes.set_xticks(range(len(heat.x)), names, **slanted)
    axes.set_yticks(range(len(heat.y)), [_word(y) for y in heat.y])
    if max(values.shape) <= TEXTED:
        for (row, column), value in np.ndenumerate(values):
            if math.isfinite(value):
                shade = text_colour(shown.to_rgba(np.array([value]))[0][:3])
                look = {"ha": "center", "va": "center", "fontsize": 7, "color": shade}
                axes.text(column, row, minus(f"{value:.3g}"), **look)
    return shown


def _draw_surface(heat: Heat, axes: Any) -> None:
    across, up = np.meshgrid(np.array(heat.x, float), np.array(heat.y, float))
    fine = {"linewidth": 0, "rstride": 1, "cstride": 1}
    axes.plot_surface(across, up, _matrix(heat.values), cmap=SHADES, **fine)
    if heat.beside is not None:
        look = {"color": VERMILION, "linewidth": 0.5, "label": heat.beside_name}
        axes.plot_wireframe(across, up, _matrix(heat.beside), **look)
        axes.legend(fontsize="small", frameon=False)
    axes.set_zlabel(heat.name)
    axes.locator_params(nbins=5)
    axes.set_box_aspect(None, zoom=0.85)


def _draw_list(rows: Sequence[tuple[str, str]], axes: Any) -> None:
    """Names and values as a table without a frame around it."""
    axes.set_axis_off()
    left, right = (max(len(row[place]) for row in rows) for place in (0, 1))
    share = min(max((left + 2) / (left + right + 2), 0.4), 0.7)
    table = axes.table(
        [[minus(text) for text in row] for row in rows],
        cellLoc="left",
        edges="horizontal",
        loc="upper center",
        colWidths=[share, 1 - share],
    )
    table.auto_set_font_size(False)
    table.set_fontsize(9)
    table.scale(1.0, 1.4)
    for cell in table.get_celld().values():
        cell.set_edgecolor("0.8")


def _word(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


PANEL = 5.2, 3.6  # inches
FEW_POINTS = 8  # of a series, below which a notebook shows numbers alone


def save_figure(drawn: Any, path: Path, dpi: int = 150) -> None:
    """Write a figure, or the one that axes are in, whole or not at all."""
    buffer = io.BytesIO()
    getattr(drawn, "figure", drawn).savefig(buffer, dpi=dpi, format=path.suffix.removeprefix("."))
    write_atomically(path, buffer.getvalue())


def plot(result: Any, ax: Axes | None = None) -> Any:
    """Plot any result and return its ``Axes``, or a ``Figure`` if it has several panels.

    Those are ``Measurement``, ``Chains``, ``LearningCoefficient``, ``Sweep``, ``Run``,
    ``Similarity``, ``Advice``, and mappings of several results. With ``ax`` all but the first draw
    the most informative panel: the running λ̂ with its band, λ̂ over step sizes, the loss over
    epochs, the rates.

    Without ``ax`` the figure is a new one outside pyplot, so no display is needed and no global
    setting changes: ``plot(result).savefig("figure.svg")``; a notebook shows it. Text in PDF and
    SVG files stays text. Settings and the meaning of error bars are in a caption below the frame; a
    figure of your own needs ``layout="constrained"`` to have room for it. A plane ``Landscape``
    becomes a surface on three-dimensional axes (``figure.add_subplot(projection="3d")``). A result
    type of your own is drawn from the charts that a function registered with
    ``lambdahat.results.charts.charts_of`` gives.

    Args:
        result: The result, or a mapping from names to results.
        ax: Axes to draw on; by default a new figure.

    Returns:
        The axes, or a figure where there are several panels and ``ax`` is None.

    Raises:
        TypeError: If ``result`` has no charts.
        ValueError: If ``ax`` is given for a ``Measurement``, which is a figure of its own.
    """
    if isinstance(result, Measurement):
        expected = "be None for a Measurement, which is a figure of its own"
        cure = "draw one of its results: plot(measurement['spectrum'], ax)"
        require(ax is None, "ax", expected, ax, cure)
        require(bool(result.results), "result", "hold at least one result", "an empty Measurement")
    charts = charts_of(result)
    cure = "draw several with lh.page(results, 'page.html'), or one at a time; give your own type"
    cure += " charts with lambdahat.results.charts.charts_of.register"
    require(bool(charts), "result", "be a result", describe(result), cure, TypeError)
    if ax is not None:
        alike = [chart for chart in charts if chart.surface is (ax.name == "3d")]
        return draw([*alike, *charts][0], ax, caption=True)
    shown = [chart for chart in charts if not chart.page_only]
    alone = len(shown) == 1 and not isinstance(result, Run | Measurement)
    drawn: Any = draw(shown[0], caption=True) if alone else _draw_panels(shown, _heading(result))
    # Notebooks show what has this method; axes, and figures outside pyplot, have none of their own.
    figure = drawn.figure if alone else drawn
    drawn._repr_png_ = figure._repr_png_ = partial(_png, figure)
    drawn.savefig = figure.savefig
    return drawn


def thumbnail(result: Any) -> bytes:
    """A small figure of a result as PNG; empty where it has no curve, map or comparison to show."""
    for chart in charts_of(result):
        many = any(len(series.x) >= FEW_POINTS for series in chart.series)
        if not chart.page_only and (many or chart.heat or isinstance(result, Comparison)):
            flat = dataclasses.replace(chart, surface=False)
            figure = new_figure(*(0.75 * side for side in size_of(flat)))
            draw(flat, tidy(figure.add_subplot()))
            return _png(figure, 80)
    return b""


def _png(figure: Figure, dpi: float | str = "figure") -> bytes:
    """A figure as PNG of 256 colours, a third of the size of one with all."""
    from PIL import Image

    buffer, small = io.BytesIO(), io.BytesIO()
    figure.savefig(buffer, format="png", bbox_inches="tight", dpi=dpi)
    Image.open(buffer).convert("RGB").quantize(256).save(small, "png", optimize=True)
    return small.getvalue()


def _draw_panels(charts: Sequence[Chart], heading: str) -> Figure:
    """A grid of charts in one figure."""
    count = len(charts)
    columns = 2 if count in (2, 4) else min(count, 3 if count <= 6 else 4)
    rows = math.ceil(count / columns)
    # a chart is drawn smaller here than alone, unless it says that it needs the room
    sizes = np.array([size_of(chart) for chart in charts]) * PANEL / (6.4, 4.0)
    widths = [max(PANEL[0], *sizes[column::columns, 0]) for column in range(columns)]
    heights = [max(PANEL[1], *sizes[row * columns :][:columns, 1]) for row in range(rows)]
    figure = new_figure(sum(widths), sum(heights))
    grid = figure.add_gridspec(rows, columns, width_ratios=widths, height_ratios=heights)
    for place, chart in enumerate(charts):
        draw(chart, tidy(figure.add_subplot(grid[place // columns, place % columns])), caption=True)
    if heading:
        figure.suptitle(heading)
    return figure


def _heading(result: Any) -> str:
    about = result.about if isinstance(result, Measurement) else {}
    if "loss" not in about or "parameters" not in about:
        return ""
    return f"{about['parameters']:,} parameters, {about['samples']:,} samples, {about['loss']}"


@charts_of.register
def _(measurement: Measurement) -> list[Chart]:
    return charts_of(measurement.results)


@charts_of.register
def _(comparison: Comparison) -> list[Chart]:
    """A forest plot for each quantity; estimates that did not converge are hollow."""
    return [_forest(comparison, quantity) for quantity in comparison.readings]


def _forest(comparison: Comparison, quantity: str) -> Chart:
    names, words = comparison.names, label_text(quantity)
    seeds = len(comparison.readings[quantity][names[0]])
    over = f"{INTERVAL} of " + (f"the mean of {seeds} seeds" if seeds > 1 else "one problem each")
    estimates = [(place, comparison.value(quantity, name)) for place, name in enumerate(names)]
    series = interval_series(words, estimates, colour="blue", band=over)
    settings = ", ".join(
        f"{letter} = {comparison.settings[key]:.4g}"
        for letter, key in (("nβ", "nbeta"), ("γ", "localization"))
        if quantity.startswith("llc") and isinstance(comparison.settings.get(key), float)
    )
    look: Any = {"caption": f"At {settings}." if settings else "", "x_names": names}
    look["page_only"] = quantity == "llc.wbic" or (quantity[-1] == "]" and quantity[-3:] != "[1]")
    return Chart(words, y_label=words, series=(series,), horizontal=True, **look)


@headline_of.register
def _(comparison: Comparison, name: str) -> str:
    """The two ends of the first quantity."""
    quantity, names = next(iter(comparison.readings)), comparison.names
    by_value = sorted(names, key=lambda one: float(comparison.value(quantity, one)))
    least, most = by_value[0], by_value[-1]
    values = {one: comparison.value(quantity, one) for one in names}
    apart = comparison.difference(quantity, most, least)
    text = larger_text(most, values[most], least, values[least], apart)
    return f"{sentence(label_text(quantity))}: {text}"


@headline_of.register
def _(measurement: Measurement, name: str) -> str:
    """λ̂ where there is one, and the first of the other results."""
    results = measurement.results
    order = sorted(results, key=lambda one: not isinstance(results[one], LearningCoefficient))
    headlines = (headline_of(results[one], one) for one in order)
    first, *rest = [*filter(None, headlines)][:FIRST] or [""]
    lower = (one[0].lower() + one[1:] if one[1:2].islower() else one for one in rest)
    return "; ".join([first, *lower])
