"""Figures of loss landscapes: curves along a line; contours or a surface over a plane."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lambdahat.report.style import BLUE, GREY, VERMILION, title
from lambdahat.results import Array, Landscape

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import LogNorm

COLOURS = "cividis"  # even in lightness, and the same to colour-blind readers
LEVELS = 10
WIDE = 30.0  # a loss that varies by more than this factor has levels spaced by ratio


def draw_landscape(landscape: Landscape, axes: Axes) -> None:
    """A line as curves, a plane as contours, or as a surface where ``axes`` are three-dimensional."""
    if landscape.loss.ndim == 1:
        _draw_line(landscape, axes)
    elif axes.name == "3d":
        _draw_surface(landscape, axes)
    else:
        _draw_plane(landscape, axes)


def direction_label(landscape: Landscape, index: int) -> str:
    """The text "offset along v"."""
    name = landscape.labels[index] if index < len(landscape.labels) else f"direction {index + 1}"
    return f"offset along {name}"


def _draw_line(landscape: Landscape, axes: Axes) -> None:
    marker = "o" if len(landscape.offsets) <= 60 else None
    axes.plot(landscape.offsets, landscape.loss, color=BLUE, marker=marker, markersize=3, label="training")
    shown = [landscape.loss]
    if landscape.held_out is not None:
        axes.plot(landscape.offsets, landscape.held_out, color=VERMILION, marker="s" if marker else None, markersize=3,
                  label="held out")  # fmt: skip
        shown.append(landscape.held_out)
    if landscape.curvature:
        _draw_parabola(landscape, axes)
    finite = np.concatenate(shown)
    finite = finite[np.isfinite(finite)]
    low, high = float(finite.min()), float(finite.max())
    pad = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
    axes.set_ylim(low - pad, high + pad)  # the parabola may leave the frame: the loss sets the scale
    axes.set_xlabel(direction_label(landscape, 0))
    axes.set_ylabel("loss, mean per sample")
    axes.legend(frameon=False, fontsize="small")
    title(axes, "Loss along a line", landscape.status)


def _draw_parabola(landscape: Landscape, axes: Axes) -> None:
    """L(0) + g·t + ½·vᵀHv·t², the slope g taken from the two points beside the centre."""
    offsets, loss, curvature = landscape.offsets, landscape.loss, landscape.curvature[0]
    centre = int(np.abs(offsets).argmin())
    if offsets[centre] != 0 or not 0 < centre < len(offsets) - 1:
        return
    slope = (loss[centre + 1] - loss[centre - 1]) / (offsets[centre + 1] - offsets[centre - 1])
    fine = np.linspace(offsets[0], offsets[-1], 401)
    parabola = loss[centre] + slope * fine + 0.5 * curvature * fine**2
    axes.plot(
        fine, parabola, color=GREY, linestyle="--", linewidth=1.2, zorder=1, label=f"parabola, vᵀHv = {curvature:.3g}"
    )


def contour_levels(values: Array) -> tuple[Array, LogNorm | None]:
    """Round levels, and logarithmic colours where the loss is positive and varies by a large factor."""
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    finite = values[np.isfinite(values)]
    low, high = float(finite.min()), float(finite.max())
    if low > 0 and high > WIDE * low:
        return np.geomspace(low, high, LEVELS + 1), LogNorm(low, high)
    levels = np.asarray(MaxNLocator(LEVELS).tick_values(low, high))
    return (levels if len(levels) > 1 else np.array([low - 0.5, low + 0.5])), None


def _draw_plane(landscape: Landscape, axes: Axes) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patheffects import withStroke

    x = y = landscape.offsets
    loss = landscape.loss.T  # loss[i, j] lies at offset i of the first direction, which is drawn across
    levels, norm = contour_levels(landscape.loss)
    axes.contourf(x, y, loss, levels=levels, norm=norm, cmap=COLOURS)
    lines = axes.contour(x, y, loss, levels=levels, colors="white", linewidths=0.7)
    for label in axes.clabel(lines, levels[1:-1:2], fontsize=8, colors="black", fmt=lambda level: f"{level:.2g}"):
        label.set_path_effects([withStroke(linewidth=2, foreground="white")])
    handles = [Line2D([], [], marker="+", color=VERMILION, linestyle="none", label="centre")]
    axes.plot(0, 0, "+", color=VERMILION, markersize=9, markeredgewidth=1.8)
    if landscape.held_out is not None:
        axes.contour(x, y, landscape.held_out.T, levels=levels, colors="black", linewidths=0.9, linestyles="--")
        handles.append(Line2D([], [], color="black", linestyle="--", label="held out, same levels"))
    axes.set_xlabel(direction_label(landscape, 0))
    axes.set_ylabel(direction_label(landscape, 1))
    axes.set_box_aspect(1)
    axes.legend(handles=handles, fontsize="small", frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    title(axes, "Training loss, mean per sample", landscape.status)


def _draw_surface(landscape: Landscape, axes: Any) -> None:
    across, up = np.meshgrid(landscape.offsets, landscape.offsets, indexing="ij")
    axes.plot_surface(across, up, landscape.loss, cmap=COLOURS, linewidth=0, rstride=1, cstride=1)
    if landscape.held_out is not None:
        axes.plot_wireframe(across, up, landscape.held_out, color=VERMILION, linewidth=0.5, label="held out")
        axes.legend(fontsize="small", frameon=False)
    axes.set_xlabel(direction_label(landscape, 0), labelpad=8)
    axes.set_ylabel(direction_label(landscape, 1), labelpad=8)
    axes.set_zlabel("loss, mean per sample")
    axes.locator_params(nbins=5)
    axes.set_box_aspect(None, zoom=0.85)
    title(axes, "Training loss", landscape.status)
