"""Figure of the benchmark: the cost of every task by everyone, on one logarithmic axis."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lambdahat.bench.records import OURS, UNIT, BenchResult
from lambdahat.report.style import AMBER, BLUE, GREEN, GREY, PURPLE, SKY, VERMILION, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PEER_COLOURS = (VERMILION, GREEN, AMBER, PURPLE, SKY, "#000000", "#999933", "#882255", GREY)
MARKERS = "sD^vP*Xhd"


def bench_axes(result: BenchResult) -> Axes:
    """Axes with room for one line of text for every task."""
    return tidy(new_figure(9.0, 1.4 + 0.3 * len(result.tasks())).add_subplot())


def draw_bench(result: BenchResult, axes: Axes) -> None:
    """One line for each task: our cost, each peer's, and the limit as a tick, in units of the task."""
    tasks = result.tasks()
    peers = list(dict.fromkeys(row.by for row in result.rows if row.by not in (OURS, UNIT)))
    styles = {by: (PEER_COLOURS[i % len(PEER_COLOURS)], MARKERS[i % len(MARKERS)]) for i, by in enumerate(peers)}
    styles[OURS] = BLUE, "o"
    for by in (*peers, OURS):
        colour, marker = styles[by]
        points = [(row.cost, place) for place, task in enumerate(tasks) if (row := result.of(*task).get(by))]
        _scatter(axes, points, by, colour, marker, 42 if by == OURS else 26)
    limits = [(row.limit, i) for i, task in enumerate(tasks) if (row := result.of(*task).get(OURS))]
    _scatter(axes, limits, "limit", GREY, "|", 160)
    axes.set_xscale("log")
    axes.set_yticks(range(len(tasks)), [f"{work} ({case})" for work, case in tasks], fontsize="small")
    axes.set_ylim(len(tasks) - 0.5, -0.5)
    axes.set_xlabel("cost, in units of the task (mostly one gradient over the same data)")
    axes.legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    about = result.about
    axes.set_title(f"{about.get('chip', '')}, torch {about.get('torch', '')}", fontsize="medium")


def _scatter(axes: Axes, points: list[tuple[float, int]], label: str, colour: str, marker: str, size: float) -> None:
    """The points whose cost is known."""
    known = [point for point in points if math.isfinite(point[0])]
    if known:
        costs, places = zip(*known, strict=True)
        axes.scatter(costs, places, s=size, color=colour, marker=marker, label=label, zorder=3)
