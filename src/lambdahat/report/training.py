"""Figures of training runs: loss and accuracy over epochs, norms, and what trackers measured."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from lambdahat.report.style import AMBER, BLUE, GREEN, GREY, VERMILION, new_figure, tidy, title
from lambdahat.report.tracks import draw_failure, draw_tracked, failed_trackers, tracked_panels
from lambdahat.training.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOSSES = {"loss": ("training", BLUE), "validation_loss": ("validation", VERMILION),
          "average_validation_loss": ("average, validation", GREEN)}  # fmt: skip
ACCURACIES = {"accuracy": ("training", BLUE), "validation_accuracy": ("validation", VERMILION),
              "average_validation_accuracy": ("average, validation", GREEN)}  # fmt: skip
NORMS = {"norm": ("‖θ‖", BLUE), "distance": ("‖θ − θ₀‖", GREEN), "update_norm": ("update", AMBER)}
OWN = {"kind", "epoch", "step", "progress", "gradient_norm", "max_norm", "learning_rate", "seconds",
       *LOSSES, *ACCURACIES, *NORMS}  # fmt: skip
WIDE = 20.0  # values that vary by more than this factor are shown by their logarithms


def draw_run_figure(run: Run) -> Figure:
    """Loss, accuracy and norms over epochs, as far as known, and a panel for each thing that was tracked."""
    groups = {"accuracy": ACCURACIES, "norm": NORMS}
    shown = {label: group for label, group in groups.items() if any(len(_values(run, name)[1]) for name in group)}
    tracked, faults = tracked_panels(run, OWN), failed_trackers(run, OWN)
    empty = {label: reason for label, reason in faults.items() if label not in tracked}
    losses = any(len(_values(run, name)[1]) for name in LOSSES) or not (shown or tracked or empty)
    count = losses + len(shown) + len(tracked) + len(empty)
    columns = 2 if count in (2, 4) else min(count, 3)
    rows = math.ceil(count / columns)
    figure = new_figure(4.2 * columns, 3.2 * rows)
    panels = iter([tidy(figure.add_subplot(rows, columns, place)) for place in range(1, count + 1)])
    if losses:
        draw_run(run, next(panels))
    for label, group in shown.items():
        _draw_lines(run, next(panels), group, label)
    for label, names in tracked.items():
        draw_tracked(run, next(panels), label, names, faults.get(label, ""))
    for label, reason in empty.items():
        draw_failure(run, next(panels), label, reason)
    return figure


def draw_run(run: Run, axes: Axes) -> None:
    """The loss on training and held-out data over epochs; the best epoch is a star."""
    _draw_lines(run, axes, LOSSES, "loss, mean per sample")
    metric = "validation_loss" if "validation_loss" in run.best else "loss"
    if metric in run.best:
        axes.plot(run.best["progress"], run.best[metric], "*", color=GREY, markersize=11, label="best", zorder=4)
        axes.legend(frameon=False, fontsize="small")
    title(axes, f"{len(run)} epochs" + ("" if run.ended == "epochs" else f", {run.ended}"), run.status)


def _draw_lines(run: Run, axes: Axes, columns: dict[str, tuple[str, str]], label: str) -> None:
    seen: list[Any] = []
    for name, (text, colour) in columns.items():
        epochs, values = _values(run, name)
        if len(values):
            axes.plot(epochs, values, color=colour, marker="o" if len(values) <= 30 else None, markersize=3, label=text)
            seen.append(values)
    _scale(axes, seen)
    axes.set_xlabel(run.about.get("progress", "epoch"))
    axes.set_ylabel(label)
    if len(seen) > 1:
        axes.legend(frameon=False, fontsize="small")


def _scale(axes: Axes, values: list[Any]) -> None:
    if values and 0 < (low := min(part.min() for part in values)) < max(part.max() for part in values) / WIDE:
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.8 * low)


def _values(run: Run, name: str) -> tuple[Any, Any]:
    rows = [row for row in run.history if _finite(row.get(name))]
    return np.array([row["progress"] for row in rows], float), np.array([row[name] for row in rows], float)


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
