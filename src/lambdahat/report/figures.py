"""``plot``: a figure of any result, from the result alone."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lambdahat._core.check import describe, require
from lambdahat._core.storage import write_atomically
from lambdahat.report import coefficient_charts, run_charts, spectral_charts  # noqa: F401  (registers the charts)
from lambdahat.report.matplotlib_charts import draw, size_of
from lambdahat.report.style import new_figure, tidy
from lambdahat.results.charts import Chart, charts_of
from lambdahat.results.measurement import Measurement
from lambdahat.training.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL = 5.2, 3.6  # inches


def save_figure(drawn: Any, path: Path, dpi: int = 150) -> None:
    """Write a figure, or the one that axes are in, whole or not at all."""
    buffer = io.BytesIO()
    getattr(drawn, "figure", drawn).savefig(buffer, dpi=dpi, format=path.suffix.removeprefix("."))
    write_atomically(path, buffer.getvalue())


def plot(result: Any, ax: Axes | None = None) -> Any:
    """Draw any result and return its ``Axes``; what has several panels is returned as a ``Figure``.

    Those are ``Measurement``, ``Chains``, ``LearningCoefficient``, ``Sweep``, ``Run``,
    ``Similarity``, ``Advice``, and mappings of several results. With ``ax`` all but the first draw
    the panel that tells most: the running λ̂ with its band, λ̂ over step sizes, the loss over
    epochs, the rates.

    Without ``ax`` the figure is a new one outside pyplot, so no display is needed and no global
    setting changes: ``plot(result).figure.savefig("figure.png")``. Settings and the meaning of
    error bars stand in a caption below the frame; a figure of your own needs
    ``layout="constrained"`` to have room for it. A plane ``Landscape`` becomes a surface on
    three-dimensional axes (``figure.add_subplot(projection="3d")``). A result type of your own is
    drawn from the charts that a function registered with ``lambdahat.results.charts.charts_of``
    gives.

    Args:
        result: The result, or a mapping from names to results.
        ax: Axes to draw on; by default a new figure.

    Returns:
        The axes, or a figure where there are several panels and ``ax`` is None.

    Raises:
        TypeError: If nothing is known of how to draw ``result``.
        ValueError: If ``ax`` is given for a ``Measurement``, which is a figure of its own.
    """
    if isinstance(result, Measurement):
        expected, cure = (
            "be None for a Measurement, which is a figure of its own",
            "draw one of its results: ",
        )
        require(ax is None, "ax", expected, ax, f"{cure}plot(measurement['spectrum'], ax)")
        require(bool(result.results), "result", "hold at least one result", "an empty Measurement")
    charts = charts_of(result)
    cure = "register a function that gives its charts with lambdahat.results.charts.charts_of"
    require(
        bool(charts),
        "result",
        "be a result, or of a type with charts",
        describe(result),
        cure,
        TypeError,
    )
    if ax is not None:
        solid = ax.name == "3d"
        return draw(
            next((chart for chart in charts if chart.surface is solid), charts[0]), ax, caption=True
        )
    shown = [chart for chart in charts if not chart.page_only]
    if len(shown) == 1 and not isinstance(result, Run | Measurement):
        return draw(shown[0], caption=True)
    return _draw_panels(shown, _heading(result))


def _draw_panels(charts: Sequence[Chart], heading: str) -> Figure:
    """A grid of charts in one figure."""
    count = len(charts)
    columns = 2 if count in (2, 4) else min(count, 3 if count <= 6 else 4)
    rows = math.ceil(count / columns)
    # a chart is drawn smaller here than alone, unless it says that it needs the room
    sizes = [
        (PANEL[0] * size_of(chart)[0] / 6.4, PANEL[1] * size_of(chart)[1] / 4.0) for chart in charts
    ]
    widths = [
        max(PANEL[0], *(size[0] for size in sizes[column::columns])) for column in range(columns)
    ]
    heights = [
        max(PANEL[1], *(size[1] for size in sizes[row * columns :][:columns]))
        for row in range(rows)
    ]
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
