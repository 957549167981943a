"""Figure 5.6 in tables and charts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from lambdahat.experiments.kit.cells import Rows
from lambdahat.experiments.kit.claims import Table, mean_of
from lambdahat.experiments.minibatch.eigen_claims import near_claimed, share_within
from lambdahat.experiments.minibatch.eigen_rows import Batches, Point
from lambdahat.experiments.minibatch.evolution_rows import Courses, courses_of, miss
from lambdahat.results.charts import Chart, Series


def tables(rows: Rows) -> list[Table]:
    """The full data through training; batches and predictions through training; shares within
    deviations.
    """
    every = courses_of(rows)
    return [_full(every), *_batches(every), _shares(every)]


def _full(every: Sequence[Courses]) -> Table:
    header = (
        "network, operator",
        "optimiser",
        "epoch",
        "loss",
        "σ²",
        "error of one",
        "τ²/(Pσ²)",
        "λ₁",
        "λ_P",
    )
    lines = []
    for courses, epoch, points in _stops(every):
        shown = [_mean(points, column) for column in ("loss", "variance")]
        error = float(np.mean([point["variance error"] / point["variance"] for point in points]))
        rest = [_mean(points, column) for column in ("anisotropy", "full largest", "full smallest")]
        lines.append((courses.name, courses.optimizer, str(epoch), *shown, f"{error:.0%}", *rest))
    seeds = max((len(courses.seeds) for courses in every), default=0)
    return Table(
        f"The full data through training: mean ± standard deviation over {seeds} seeds",
        header,
        tuple(lines),
    )


def _batches(every: Sequence[Courses]) -> Iterator[Table]:
    """For each batch size λ'₁ and λ'_P of batches beside λ₁ and the predictions, over epochs."""
    for size in sorted({batches.size for courses in every for batches in courses.first[0].batches}):
        models = every[0].models
        header = (
            "network, operator",
            "optimiser",
            "epoch",
            "λ₁",
            "λ'₁ of batches",
            "sd between them",
            *models,
            "λ'_P of batches",
        )
        lines = []
        for courses, epoch, points in _stops(every):
            found = [
                batches for point in points for batches in point.batches if batches.size == size
            ]
            if found:
                lines.append(
                    (
                        courses.name,
                        courses.optimizer,
                        str(epoch),
                        _mean(points, "full largest"),
                        _shown([each.mean("largest").value for each in found]),
                        f"{np.mean([each.deviation('largest') for each in found]):.2g}",
                        *(
                            _shown([each.told(model, "largest").value for each in found])
                            for model in models
                        ),
                        _shown([each.mean("smallest").value for each in found]),
                    )
                )
        title = (
            f"Batches of {size} through training: mean of them and prediction, ± standard deviation"
            " over seeds"
        )
        yield Table(title, header, tuple(lines))


def _shares(every: Sequence[Courses]) -> Table:
    header = (
        "network, operator",
        "optimiser",
        "B",
        "model",
        "1 sd predicted",
        "2 sd",
        "1 sd measured",
        "2 sd ",
        "predicted/measured",
    )
    lines = []
    for courses in every:
        points = [point for seed in courses.seeds.values() for point in seed]
        for size in [batches.size for batches in points[0].batches]:
            found = [
                batches for point in points for batches in point.batches if batches.size == size
            ]
            lines += [
                (courses.name, courses.optimizer, str(size), model, *_share(found, model))
                for model in courses.models
            ]
    title = (
        "Share of batches whose λ'₁ lies within one and two standard deviations of the prediction,"
        " all seeds and epochs"
    )
    return Table(title, header, tuple(lines))


def _share(found: Sequence[Batches], model: str) -> tuple[str, ...]:
    rulers = [(ruler, times) for ruler in ("predicted", "measured") for times in (1, 2)]
    shares = [
        f"{share_within(found, model, 'largest', times, ruler):.0%}" for ruler, times in rulers
    ]
    ratios = [math.exp(miss(each, model)) for each in found]
    return (*shares, f"{min(ratios):.2f} … {max(ratios):.2f}")


def _stops(every: Sequence[Courses]) -> Iterator[tuple[Courses, int, list[Point]]]:
    for courses in every:
        for epoch in courses.epochs:
            yield courses, epoch, courses.at(epoch)


def _mean(points: Sequence[Point], column: str) -> str:
    return _shown([float(point[column]) for point in points])


def _shown(values: Sequence[float]) -> str:
    mean, spread = float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return f"{mean:.3g} ± {spread:.1g}" if spread > 0 else f"{mean:.3g}"


def charts(rows: Rows) -> list[Chart]:
    """For each network and operator λ₁ of full data, batches and predictions through each
    training, and both's σ.
    """
    every = courses_of(rows)
    out = [_largest(courses) for courses in every]
    for name in dict.fromkeys(courses.name for courses in every):
        both = tuple(
            _series(
                courses, courses.optimizer, lambda point: math.sqrt(max(point["variance"], 0.0))
            )
            for courses in every
            if courses.name == name
        )
        out.append(
            Chart(
                f"{name}: standard deviation of an element of the curvature",
                "epoch",
                "σ",
                both,
                y_log=True,
                source="Figures 5.5, 5.6",
                caption="Mean and standard error over seeds.",
            )
        )
    return out


def _largest(courses: Courses) -> Chart:
    size = near_claimed(courses.first[0]).size
    full = _series(courses, "full data", lambda point: float(point["full largest"]))
    seen = _series(
        courses, f"batches of {size}", lambda point: near_claimed(point).mean("largest").value
    )
    between = _series(courses, "", lambda point: near_claimed(point).deviation("largest")).y
    told = [_predicted(courses, model) for model in courses.models]
    caption = (
        "Means over seeds with their standard error; of batches the standard deviation between"
        " them."
    )
    return Chart(
        f"{courses.name}: λ₁ through training by {courses.optimizer}",
        "epoch",
        "λ₁",
        (full, replace(seen, error=between), *told),
        y_log=True,
        source="Figure 5.6",
        caption=caption,
    )


def _predicted(courses: Courses, model: str) -> Series:
    return _series(courses, model, lambda point: near_claimed(point).told(model, "largest").value)


def _series(courses: Courses, name: str, value: Callable[[Point], float]) -> Series:
    readings = [mean_of([value(point) for point in courses.at(epoch)]) for epoch in courses.epochs]
    errors = [reading.stderr if math.isfinite(reading.stderr) else 0.0 for reading in readings]
    return Series(name, courses.epochs, [reading.value for reading in readings], errors)
