"""The packages of the library, and the two walks through them: the figure of architecture.md."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

TRACE, LLC, BOTH = "#0072b2", "#d55e00", "#444444"
# name: centre, half-width, what lives there
ROOMS: dict[str, tuple[float, float, float, str]] = {
    "problem": (1.7, 3.0, 1.35, "model, loss and data\nas one function of\nflat parameters"),
    "operators": (
        5.2,
        4.3,
        1.35,
        "Hessian, Gauss–Newton,\nFisher, KFAC, matrices;\nexact/: closed forms",
    ),
    "estimators": (8.7, 4.3, 1.35, "trace, eigenpairs,\nspectrum, log det, …"),
    "sampling": (5.2, 1.7, 1.35, "kernels, backends,\ntuning, diagnostics"),
    "singular": (8.7, 1.7, 1.35, "llc, WBIC, evidence,\nexact answers"),
    "results": (12.2, 3.0, 1.35, "frozen values with error,\ncost and status; charts"),
    "report": (15.5, 3.0, 1.15, "matplotlib, plotly,\nthe page"),
}
ABOVE = (
    "cli · bench · experiments (a kit, and one file per published experiment) · training · optim"
    " · models · data · graphs"
)
BELOW = (
    "krylov · maxent · randommatrix    and, under everything,    _core: errors, random streams,"
    " storage, devices, progress"
)
ARROWS = (
    ("problem", "operators", TRACE),
    ("operators", "estimators", TRACE),
    ("estimators", "results", TRACE),
    ("problem", "sampling", LLC),
    ("sampling", "singular", LLC),
    ("singular", "results", LLC),
    ("results", "report", BOTH),
)


def rooms() -> Figure:
    """Boxes for packages, arrows for the way of ``lh.trace`` (blue) and of ``lh.llc`` (orange)."""
    figure, axes = plt.subplots(figsize=(11, 4.2))
    for name, (x, y, half, contents) in ROOMS.items():
        _box(axes, x, y, half, 0.85)
        axes.text(x, y + 0.52, name, ha="center", va="center", weight="bold", fontsize=10)
        axes.text(x, y - 0.2, contents, ha="center", va="center", fontsize=8)
    for y, text in ((6.0, ABOVE), (-0.05, BELOW)):
        _box(axes, 8.5, y, 8.15, 0.35)
        axes.text(8.5, y, text, ha="center", va="center", fontsize=8)
    for start, end, colour in ARROWS:
        (x0, y0, half0, _), (x1, y1, half1, _) = ROOMS[start], ROOMS[end]
        ends = (x0 + half0, y0 + 0.25 * (y1 - y0)), (x1 - half1, y1 + 0.25 * (y0 - y1))
        axes.add_patch(
            FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=14, color=colour, lw=1.8)
        )
    axes.text(6.95, 5.3, "lh.trace(lh.hessian(problem))", color=TRACE, ha="center", fontsize=9)
    axes.text(6.95, 0.5, "lh.llc(problem)", color=LLC, ha="center", fontsize=9)
    axes.set(xlim=(0.1, 16.9), ylim=(-0.6, 6.5))
    axes.axis("off")
    figure.tight_layout(pad=0.2)
    return figure


def _box(axes: Any, x: float, y: float, half: float, tall: float) -> None:
    box = FancyBboxPatch(
        (x - half, y - tall),
        2 * half,
        2 * tall,
        boxstyle="round,pad=0.02,rounding_size=0.12",
        facecolor="#f4f4f4",
        edgecolor="#888888",
    )
    axes.add_patch(box)
