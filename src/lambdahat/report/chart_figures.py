"""Charts drawn with matplotlib, for image files and the documentation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from lambdahat._check import require_choice
from lambdahat.report.landscapes import COLOURS as SHADES
from lambdahat.report.plotly_charts import MARKED, STYLES, TEXTED, colour_of, is_field, look_of
from lambdahat.report.style import (
    AMBER,
    BLUE,
    GREEN,
    GREY,
    PURPLE,
    SKY,
    VERMILION,
    minus,
    new_figure,
    text_colour,
    tidy,
)
from lambdahat.results.charts import Chart, Heat, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PALETTE = (BLUE, VERMILION, GREEN, PURPLE, AMBER, SKY)
# of those that share a colour
DASHES = ("-", "--", ":", "-.")
SYMBOLS = ("o", "s", "^", "X")
HATCHES = ("", "//", "xx", "..")
LEGEND = 8  # so many names fit beside the curves


def draw(chart: Chart, ax: Axes | None = None) -> Axes:
    """Draw a chart and return its axes; a surface needs three-dimensional ones where ``ax`` is given."""
    three = chart.heat is not None and chart.surface
    axes: Any = _new_axes(three) if ax is None else ax
    if chart.heat is not None:
        _draw_surface(chart.heat, axes) if three else _draw_map(chart.heat, axes)
    else:
        _draw_series(chart, axes)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.set_title(chart.title, fontsize="medium")
    return axes  # type: ignore[no-any-return]


def _new_axes(three: bool) -> Axes:
    figure = new_figure()
    return figure.add_subplot(projection="3d") if three else tidy(figure.add_subplot())


def _draw_series(chart: Chart, axes: Axes) -> None:
    if chart.x_log:
        axes.set_xscale("log")
    if chart.y_log:
        axes.set_yscale("log")
    bars = [number for number, series in enumerate(chart.series) if series.style == "bars"]
    for number, series in enumerate(chart.series):
        require_choice(series.style, f"the style of series {series.name!r}", STYLES)
        place, turn = look_of(colour_of(chart, number), len(PALETTE))
        look = {"color": GREY if place is None else PALETTE[place], "label": series.name}
        if series.style == "bars":
            hatched = look | ({"hatch": HATCHES[turn]} if turn else {})
            _draw_bars(series, axes, hatched, bars.index(number), len(bars))
        else:
            _draw_one(series, axes, look, turn)
    for label, height in chart.lines:
        axes.axhline(height, color=GREY, linewidth=0.9, linestyle="--", label=label)
    named = len(chart.series) + len(chart.lines)
    if 1 < named <= LEGEND or any(series.published for series in chart.series):
        axes.legend(frameon=False, fontsize="small")


def _columns(series: Series) -> tuple[Any, Any, Any]:
    """x as it is, y and errors as numbers, NaN where there are none."""
    y = np.array([math.nan if value is None else value for value in series.y], float)
    found = series.error if series.error is not None else [0.0] * len(y)
    error = np.array([0.0 if value is None or not math.isfinite(value) else value for value in found], float)
    named = any(isinstance(value, str) for value in series.x)
    return [str(value) for value in series.x] if named else np.array(series.x, float), y, error


def _draw_one(series: Series, axes: Axes, look: dict[str, Any], turn: int) -> None:
    """``turn`` says which of the dashes and marks."""
    x, y, error = _columns(series)
    hollow = SYMBOLS[turn] if turn else "D"
    marks: dict[str, Any] = {"marker": hollow if series.published else SYMBOLS[turn]}
    marks["markersize"] = 6 if series.published else 4
    marks["markerfacecolor"] = "none" if series.published else look["color"]
    loose = series.style in ("points", "stems") or len(y) == 1
    if loose:
        axes.errorbar(x, y, yerr=error if error.any() else None, linestyle="none", capsize=3, elinewidth=1,
                      **marks, **look)  # fmt: skip
        if series.style == "stems":
            axes.vlines(x, axes.get_ylim()[0], y, color=look["color"], linewidth=1.1)
        return
    if series.style == "segments" or (len(y) > MARKED and not series.published):
        marks = {}
    way: dict[str, Any] = {"drawstyle": "steps-post"} if series.style == "step" else {}
    dash = "--" if series.published else DASHES[turn]
    axes.plot(x, y, linestyle=dash, linewidth=1.5, **marks, **way, **look)
    if error.any():
        edge: Any = {"step": "post"} if series.style == "step" else {}
        axes.fill_between(x, y - error, y + error, color=look["color"], alpha=0.18, linewidth=0, **edge)


def _draw_bars(series: Series, axes: Axes, look: dict[str, Any], place: int, count: int) -> None:
    """Bars of several series stand side by side."""
    x, y, error = _columns(series)
    named = isinstance(x, list)
    where = np.arange(len(x), dtype=float) if named else x
    gap = float(np.diff(np.unique(where)).min()) if len(np.unique(where)) > 1 else 1.0
    width = 0.8 * gap / count
    fill = {"facecolor": "none", "edgecolor": look["color"], "label": look["label"]} if series.published else look
    centres = where + (place - (count - 1) / 2) * width
    axes.bar(centres, y, width, yerr=error if error.any() else None, capsize=3, **fill)
    if named:
        axes.set_xticks(where, x)


def _matrix(heat: Heat) -> Any:
    return np.array([[math.nan if value is None else value for value in line] for line in heat.values], float)


def _draw_map(heat: Heat, axes: Any) -> None:
    values = _matrix(heat)
    if is_field(heat):
        shown = axes.contourf(heat.x, heat.y, values, levels=16, cmap=SHADES)
    else:
        shown = axes.imshow(values, cmap=SHADES, origin="lower", aspect="auto")
        axes.grid(visible=False)
        axes.set_xticks(range(len(heat.x)), [_word(x) for x in heat.x])
        axes.set_yticks(range(len(heat.y)), [_word(y) for y in heat.y])
        if max(values.shape) <= TEXTED:
            for (row, column), value in np.ndenumerate(values):
                if math.isfinite(value):
                    shade = text_colour(shown.to_rgba(value)[:3])
                    axes.text(column, row, minus(f"{value:.3g}"), ha="center", va="center", fontsize=7, color=shade)
    axes.figure.colorbar(shown, ax=axes, label=heat.name)


def _draw_surface(heat: Heat, axes: Any) -> None:
    across, up = np.meshgrid(np.array(heat.x, float), np.array(heat.y, float))
    axes.plot_surface(across, up, _matrix(heat), cmap=SHADES, linewidth=0, rstride=1, cstride=1)
    axes.set_zlabel(heat.name)
    axes.set_box_aspect(None, zoom=0.85)


def _word(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
