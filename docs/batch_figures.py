"""The figure of minibatch-results.md, from the batches that ``benchmarks/minibatch_eigenvalues.py`` has measured."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import LogLocator, NullFormatter

from lambdahat.report.style import AMBER, BLUE, GREEN, GREY, new_figure, tidy

BATCHES = Path(__file__).parents[1] / "benchmarks" / "results" / "batch-eigenvalues.csv"
MODELS = {"additive": (AMBER, "o"), "multiplicative": (GREEN, "s"), "directional": (BLUE, "^")}
WIDE = 100  # a range beyond which only powers of ten have room for a label
Row = dict[str, str]


def batches() -> dict[str, list[Row]]:
    """Every batch of each network's Hessian, by epoch and size."""
    found: dict[str, list[Row]] = {}
    with BATCHES.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["operator"] == "hessian" and row["part"] == "batch":
                found.setdefault(row["network"], []).append(row)
    return found


def means(rows: list[Row], what: str) -> Iterator[tuple[int, int, float, float, dict[str, float]]]:
    """Epoch, B, the batches' mean and standard deviation, and what each model says."""
    for (epoch, size), group in groupby(rows, key=lambda row: (int(row["epoch"]), int(row["batch_size"]))):
        some = list(group)
        values = np.array([float(row[what]) for row in some])
        told = {model: float(some[0][f"{model} {what}"]) for model in MODELS}
        yield epoch, size, float(values.mean()), float(values.std(ddof=1)), told


def draw_eigenvalues(axes: Any, rows: list[Row]) -> None:
    """λ'₁ as predicted against as measured, at all epochs and sizes."""
    found = list(means(rows, "largest"))
    seen = [mean for _, _, mean, _, _ in found]
    for model, (colour, mark) in MODELS.items():
        told = [predicted[model] for *_, predicted in found]
        axes.loglog(seen, told, mark, color=colour, markersize=3.5, label=model)
    ends = [min(seen), max(seen)]
    axes.plot(ends, ends, color=GREY, linewidth=0.9)
    epochs = sorted({epoch for epoch, *_ in found})
    axes.set_title(f"{rows[0]['network']}\nepochs {', '.join(map(str, epochs))}", fontsize="medium")
    between = (1.0,) if ends[1] > WIDE * ends[0] else (1.0, 3.0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=between))
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("λ'₁ of batches, mean")


def draw_overlaps(axes: Any, rows: list[Row]) -> None:
    """(φ̂₁ᵀφ₁)² over the batch size at the last epoch, with the standard deviation between batches."""
    last = max(int(row["epoch"]) for row in rows)
    found = list(means([row for row in rows if int(row["epoch"]) == last], "overlaps"))
    sizes = [size for _, size, *_ in found]
    for model, (colour, _) in MODELS.items():
        axes.plot(sizes, [predicted[model] for *_, predicted in found], color=colour)
    values, spreads = ([each[place] for each in found] for place in (2, 3))
    axes.errorbar(sizes, values, yerr=spreads, fmt="o", color="black", markersize=3, capsize=2, label="batches")
    axes.set_title(f"epoch {last}", fontsize="medium")
    axes.set(xscale="log", xlabel="batch size B", ylim=(-0.05, 1.08))


def eigenvalues() -> Any:
    """Predicted against measured λ'₁ of every network through training (Figure 5.6), and overlaps (Theorem 17)."""
    found = batches()
    figure = new_figure(2.3 * len(found), 5.4)
    for column, rows in enumerate(found.values(), start=1):
        above, below = (tidy(figure.add_subplot(2, len(found), place)) for place in (column, column + len(found)))
        draw_eigenvalues(above, rows)
        draw_overlaps(below, rows)
        if column == 1:
            for axes, name in ((above, "λ'₁ predicted"), (below, "overlap (φ̂₁ᵀφ₁)²")):
                axes.set_ylabel(name)
                axes.legend(frameon=False, fontsize="small")
    return above
