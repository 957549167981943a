"""The figures of minibatch-results.md.

From the batches that ``benchmarks/minibatch_eigenvalues.py`` has measured, and a stored run of
``lambdahat reproduce``.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import LogLocator, NullFormatter

from lambdahat.experiments import Store
from lambdahat.experiments.kit.claims import mean_of
from lambdahat.experiments.minibatch.batch_eigenvalues import batches_near_claim
from lambdahat.experiments.minibatch.batch_points import TrainingPoint
from lambdahat.experiments.minibatch.eigenvalues_through_training import (
    OPTIMIZERS,
    Courses,
    courses_of,
)
from lambdahat.report.style import AMBER, BLUE, GREEN, GREY, VERMILION, new_figure, tidy

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
BATCHES = RESULTS / "batch-eigenvalues.csv"
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
    for (epoch, size), group in groupby(
        rows, key=lambda row: (int(row["epoch"]), int(row["batch_size"]))
    ):
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
    """(φ̂₁ᵀφ₁)² over the batch size at the last epoch, with the standard deviation between
    batches.
    """
    last = max(int(row["epoch"]) for row in rows)
    found = list(means([row for row in rows if int(row["epoch"]) == last], "overlaps"))
    sizes = [size for _, size, *_ in found]
    for model, (colour, _) in MODELS.items():
        axes.plot(sizes, [predicted[model] for *_, predicted in found], color=colour)
    values, spreads = ([each[place] for each in found] for place in (2, 3))
    axes.errorbar(
        sizes,
        values,
        yerr=spreads,
        fmt="o",
        color="black",
        markersize=3,
        capsize=2,
        label="batches",
    )
    axes.set_title(f"epoch {last}", fontsize="medium")
    axes.set(xscale="log", xlabel="batch size B", ylim=(-0.05, 1.08))


def eigenvalues() -> Any:
    """Predicted against measured λ'₁ of every network through training (Figure 5.6), and
    overlaps (Theorem 17).
    """
    found = batches()
    figure = new_figure(2.3 * len(found), 5.4)
    for column, rows in enumerate(found.values(), start=1):
        above, below = (
            tidy(figure.add_subplot(2, len(found), place))
            for place in (column, column + len(found))
        )
        draw_eigenvalues(above, rows)
        draw_overlaps(below, rows)
        if column == 1:
            for axes, name in ((above, "λ'₁ predicted"), (below, "overlap (φ̂₁ᵀφ₁)²")):
                axes.set_ylabel(name)
                axes.legend(frameon=False, fontsize="small")
    return above


def through_training() -> Any:
    """λ₁ of full data, batches and predictions through training by SGD and KFAC, and σ (Figure
    5.6).
    """
    every = courses_of(
        Store(RESULTS / "reproductions", "eigenvalues-through-training", "cpu").rows()
    )
    networks = list(dict.fromkeys(courses.first[0]["network"] for courses in every))
    figure = new_figure(2.3 * len(networks), 7.0)
    for column, network in enumerate(networks):
        places = [column + 1 + row * len(networks) for row in range(3)]
        upper = tidy(figure.add_subplot(3, len(networks), places[0]))
        lower = tidy(figure.add_subplot(3, len(networks), places[1], sharey=upper))
        last = tidy(figure.add_subplot(3, len(networks), places[2]))
        mine = [courses for courses in every if courses.first[0]["network"] == network]
        for axes, optimizer in zip((upper, lower), OPTIMIZERS, strict=True):
            draw_course(axes, next(courses for courses in mine if courses.optimizer == optimizer))
            axes.set_ylabel(f"λ₁, {optimizer}" if column == 0 else "")
        draw_deviations(last, mine)
        upper.set_title(network, fontsize="medium")
        last.set(ylabel="σ" if column == 0 else "", xlabel="epoch")
    figure.legend(
        *upper.get_legend_handles_labels(), loc="outside upper center", ncols=5, frameon=False
    )
    figure.legend(
        *last.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False
    )
    return last


def draw_course(axes: Any, courses: Courses) -> None:
    """λ₁ of one operator, means over seeds; bars are the standard deviation between batches."""
    stops = range(len(courses.epochs))
    for model, (colour, mark) in MODELS.items():
        told = over_seeds(courses, partial(_told, model=model))
        axes.plot(stops, told, mark + "-", color=colour, markersize=3.5, linewidth=1.1, label=model)
    axes.plot(
        stops,
        over_seeds(courses, lambda point: point["full largest"]),
        "--",
        color=GREY,
        label="full data",
    )
    seen = over_seeds(courses, lambda point: batches_near_claim(point).mean("largest").value)
    between = over_seeds(courses, lambda point: batches_near_claim(point).deviation("largest"))
    axes.errorbar(
        stops,
        seen,
        yerr=between,
        fmt="o",
        color="black",
        markersize=3,
        capsize=2,
        label="batches of 128",
    )
    _stops(axes, courses)


def _told(point: TrainingPoint, model: str) -> float:
    return batches_near_claim(point).prediction(model, "largest").value


def draw_deviations(axes: Any, every: list[Courses]) -> None:
    """σ of both operators by both optimisers, means over seeds with their standard errors."""
    for courses in every:
        colour = BLUE if courses.optimizer == "SGD" else VERMILION
        points = [
            [math.sqrt(point["variance"]) for point in courses.at(epoch)]
            for epoch in courses.epochs
        ]
        readings = [mean_of(values) for values in points]
        operator = courses.name.split(", ")[-1]
        axes.errorbar(
            range(len(readings)),
            [reading.value for reading in readings],
            yerr=[reading.stderr for reading in readings],
            color=colour,
            capsize=2,
            linewidth=1.1,
            linestyle="-" if operator == "Hessian" else "--",
            label=f"{courses.optimizer}, {operator}",
        )
        _stops(axes, courses)


def _stops(axes: Any, courses: Courses) -> None:
    """Epochs side by side, whatever lies between them, and heights in logarithms with numbers as
    text.
    """
    axes.set_xticks(range(len(courses.epochs)), map(str, courses.epochs))
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(
        LogLocator(subs=(1.0,) if high > WIDE * low else (1.0, 2.0, 3.0, 5.0))
    )
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def over_seeds(courses: Courses, value: Callable[[TrainingPoint], float]) -> list[float]:
    """The mean over seeds at every stop."""
    return [
        mean_of([value(point) for point in courses.at(epoch)]).value for epoch in courses.epochs
    ]
