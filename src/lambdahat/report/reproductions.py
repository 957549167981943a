"""Figures of reproduced experiments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lambdahat.experiments.regularization.published import PUBLISHED
from lambdahat.experiments.regularization.stored import RegularizationResult
from lambdahat.report.style import BLUE, VERMILION, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = ("training accuracy", "test error", "norm")
COLOURS = {"tanh": BLUE, "relu": VERMILION}


def draw_rules(result: RegularizationResult, axes: Axes, quantity: str = "norm") -> None:
    """One quantity: a row for each rule, mean and standard deviation over the seeds, the thesis's mean hollow."""
    labels = list(dict.fromkeys(run.label for run in result.runs))
    for run in result.runs:
        colour, mean, deviation = COLOURS[run.activation], run.mean(quantity), run.deviation(quantity)
        row = labels.index(run.label) + (0.15 if run.activation == "relu" else -0.15)
        axes.errorbar(mean, row, xerr=deviation, fmt="o", color=colour, markersize=4, linewidth=1)
        published = PUBLISHED[result.name, run.activation].get(run.label, {}).get(quantity)
        if published is not None:
            axes.plot(published, row, "D", markerfacecolor="none", color=colour, markersize=6)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    if "accuracy" not in quantity:
        axes.set_xscale("log")
    axes.set_xlabel(quantity)


def draw_regularization(result: RegularizationResult) -> Figure:
    """A panel for each quantity that the thesis compares."""
    quantities = [name for name in SHOWN if name in result.runs[0].values and (name, result.name) != (SHOWN[0], "xord")]
    figure = new_figure(4.2 * len(quantities) + 1, 3.8)
    for place, quantity in enumerate(quantities, start=1):
        axes = tidy(figure.add_subplot(1, len(quantities), place))
        draw_rules(result, axes, quantity)
        if place > 1:
            axes.set_yticklabels([])
    for name, colour in COLOURS.items():
        axes.errorbar([], [], xerr=[], fmt="o", color=colour, markersize=4, label=f"{name}, {result.seeds} seeds")
    axes.plot([], [], "D", markerfacecolor="none", color="0.3", markersize=6, label="thesis, mean")
    axes.legend(frameon=False, fontsize="small", loc="best")
    figure.suptitle(f"{result.name.upper()}: the learning rules of Table 4.1", fontsize="medium")
    return figure
