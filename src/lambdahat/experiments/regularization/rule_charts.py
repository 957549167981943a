"""Tables and charts of runs under the learning rules: Tables 5.1 and 5.2 beside ours, curves,
norms, eigenvalues, first-layer vectors, norm and generalisation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from scipy.stats import kendalltau

from lambdahat.experiments.kit.cells import Row, Rows
from lambdahat.experiments.kit.claims import Table
from lambdahat.experiments.regularization.learning_rules import (
    DROPOUT,
    PUBLISHED,
    RULES,
    printed_as,
    quantities_of,
    score_of,
)
from lambdahat.results.charts import Chart, Series

DATA = {
    "xor": "XOR",
    "xord": "XORD",
    "mnist": "MNIST",
    "synthetic": "synthetic regression",
    "cifar10": "CIFAR-10",
    "digits": "8 × 8 digits",
}


def tables_of(task: str, rows: Rows) -> Iterator[Table]:
    """Mean ± standard deviation over the seeds, the published mean in brackets, by activation;
    then Kendall's τ.
    """
    for activation in rows.distinct("activation"):
        part = rows.where(activation=activation)
        names = [
            name
            for name in (*quantities_of(task), "training accuracy", "test accuracy", "vectors")
            if part.values(name)
        ]
        names = list(dict.fromkeys(names))
        lines = tuple(
            (
                rule,
                *(_cell(task, activation, rule, part.where(rule=rule), name) for name in names),
                _top(part, rule),
            )
            for rule in part.distinct("rule")
        )
        seeds = len(part.distinct("seed"))
        title = f"{_data(task, part)}, {activation}: mean ± sd over {seeds} seeds [thesis]"
        yield Table(title, ("rule", *names, "λ₁"), lines)
    ranks = agreement(task, rows)
    cells = tuple(
        (f"{activation}, {name}", f"{tau:+.2f}") for (activation, name), tau in ranks.items()
    )
    yield Table(
        "Order of the rules' means against the thesis's", ("quantity", "Kendall's τ"), cells
    )


def agreement(task: str, rows: Rows) -> dict[tuple[str, str], float]:
    """Kendall's τ between our means and the thesis's over its eight rule–regime pairs: 1 for the
    same order.
    """
    out = {}
    for activation in rows.distinct("activation"):
        printed = PUBLISHED[task, activation]
        for name in quantities_of(task):
            ours = {
                rule: mean_and_deviation(rows.where(activation=activation, rule=rule), name)[0]
                for rule in printed
            }
            kept = [rule for rule in printed if math.isfinite(ours[rule])]
            pairs = [(ours[rule], printed[rule][name]) for rule in kept]
            tau = kendalltau(*zip(*pairs, strict=True)).statistic if len(kept) > 1 else math.nan
            out[activation, name] = float(tau)
    return out


def mean_and_deviation(rows: Rows, name: str) -> tuple[float, float]:
    """Over the seeds that did not diverge; NaN where there are too few."""
    found = np.array([value for value in rows.values(name) if math.isfinite(value)])
    return (
        float(found.mean()) if len(found) else math.nan,
        float(found.std(ddof=1)) if len(found) > 1 else math.nan,
    )


def _data(task: str, rows: Rows) -> str:
    """The data set; another one where the thesis's was not at hand."""
    used = rows[0].get("data", task)
    return DATA[task] if used == task else f"{DATA[used]} in place of {DATA[task]}"


def _cell(task: str, activation: str, rule: str, rows: Rows, name: str) -> str:
    mean, deviation = mean_and_deviation(rows, name)
    text = f"{mean:.3g}" + ("" if math.isnan(deviation) else f" ± {deviation:.2g}")
    lost = sum(not math.isfinite(value) for value in rows.values(name))
    text += f" ({lost} diverged)" if lost else ""
    published = PUBLISHED[task, activation].get(printed_as(rule), {}).get(name)
    return text if published is None else f"{text} [{published:g}]"


def _top(rows: Rows, rule: str) -> str:
    tops = [values[0] for values in rows.where(rule=rule).values("eigenvalues") if values]
    return f"{np.mean(tops):.3g}" if tops else "–"


BAND = "Mean over the seeds whose curves are stored; the band is 2 standard deviations."
FIGURES = {
    "xor": {"tanh": "Figures 5.3–5.5", "relu": "Figures 5.6–5.8"},
    "xord": {"tanh": "Figures 5.9–5.12", "relu": "Figures 5.13–5.16"},
    "mnist": {"tanh": "Figures 5.17–5.19", "relu": "Figures 5.20–5.22"},
    "synthetic": {"tanh": "Figures 5.23–5.25", "relu": "Figures 5.26–5.28"},
    "cifar10": {"tanh": "Figures 5.29–5.31", "relu": "Figures 5.32–5.34"},
}
VECTORS = {  # of which the thesis has a panel for each rule
    "xor": {"tanh": "Figure 5.5", "relu": "Figure 5.8"},
    "xord": {"tanh": "Figure 5.12", "relu": "Figure 5.16"},
}
EIGENVALUES = {
    "xor": "Figure 5.35",
    "mnist": "Figure 5.36",
    "synthetic": "Figure 5.37",
    "cifar10": "Figure 5.38",
}


def charts_of(task: str, rows: Rows) -> Iterator[Chart]:
    """For each activation the curves, norms and eigenvalues; where weights are pairs, they too;
    then Figure 5.39.
    """
    for activation in rows.distinct("activation"):
        part, source = rows.where(activation=activation), FIGURES[task][activation]
        yield from [
            _curves(part.where(rule=RULES), name, activation, source)
            for name in quantities_of(task)
        ]
        if DROPOUT in part.distinct("rule"):  # which the thesis has not, so that it stands apart
            beside = part.where(rule=["SGD Large", DROPOUT])
            yield from [
                _curves(beside, name, f"{activation}, with dropout", "")
                for name in quantities_of(task)
            ]
        yield _bars(task, part, activation)
        yield _eigenvalues(part.where(rule=RULES), activation, EIGENVALUES.get(task, ""))
        yield from [
            _vectors(row, activation, VECTORS[task][activation])
            for row in part
            if row.get("weights")
        ]
    yield from [_norms(task, rows)] if task != "xor" else []


def _curves(rows: Rows, name: str, activation: str, source: str) -> Chart:
    series = []
    for rule in rows.distinct("rule"):
        part = Rows(row for row in rows.where(rule=rule) if f"{name} curve" in row)
        table = np.array(part.values(f"{name} curve"), float)
        means, deviations = _over_seeds(table)
        series.append(Series(rule, part[0]["recorded"], means, [2 * value for value in deviations]))
    log = "error" in name
    title = f"{name.capitalize()}, {activation}"
    return Chart(title, "epoch", name, tuple(series), y_log=log, source=source, caption=BAND)


def _over_seeds(table: np.ndarray) -> tuple[list[float | None], list[float]]:
    """Means and deviations over the seeds (S, …) that had not diverged; None where none is left."""
    means: list[float | None] = []
    deviations = []
    for column in table.T:
        kept = column[np.isfinite(column)]
        means.append(float(kept.mean()) if len(kept) else None)
        deviations.append(float(kept.std(ddof=1)) if len(kept) > 1 else 0.0)
    return means, deviations


def _bars(task: str, rows: Rows, activation: str) -> Chart:
    rules = rows.distinct("rule")
    found = [mean_and_deviation(rows.where(rule=rule), "norm") for rule in rules]
    printed = PUBLISHED[task, activation]
    ours = Series(
        "ours",
        rules,
        _known([mean for mean, _ in found]),
        _known([2 * sd for _, sd in found]),
        "bars",
    )
    theirs = Series(
        "thesis",
        rules,
        [printed.get(rule, {}).get("norm") for rule in rules],
        style="bars",
        published=True,
    )
    title = f"Norm at the end, {activation}"
    caption = "Error bars are 2 standard deviations over the seeds."
    return Chart(
        title, "rule", "‖θ‖₂", (ours, theirs), y_log=True, source="Tables 5.1, 5.2", caption=caption
    )


def _known(values: Sequence[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


def _eigenvalues(rows: Rows, activation: str, source: str) -> Chart:
    series = []
    for rule in rows.distinct("rule"):
        tops = [values for values in rows.where(rule=rule).values("eigenvalues") if values]
        if tops:
            means, deviations = _over_seeds(np.array(tops, float))
            places = [str(place + 1) for place in range(len(means))]
            series.append(Series(rule, places, means, [2 * value for value in deviations], "bars"))
    title = f"Largest eigenvalues of the Hessian, {activation}"
    caption = "Of the loss alone, at the end; bars of 2 standard deviations."
    return Chart(title, "place", "eigenvalue", tuple(series), source=source, caption=caption)


def _vectors(row: Row, activation: str, source: str) -> Chart:
    """The first-layer weights of one rule as strokes from the origin, as a panel of the thesis
    has them.
    """
    x = [part for first, _ in row["weights"] for part in (0.0, first, first)]
    y: list[float | None] = []
    for _, second in row["weights"]:
        y += [0.0, second, None]  # None ends the stroke
    caption = (
        f"Every vector of seed 0. Of {len(row['weights'])}, {row['vectors']:.1f} count:"
        " (Σ‖w‖²)²/Σ‖w‖⁴."
    )
    return Chart(
        f"First-layer weights, {activation}, {row['rule']}",
        "weight of the first input",
        "weight of the second",
        (Series(row["rule"], x, y),),
        source=source if row["rule"] in RULES else "",
        caption=caption,
    )


def _norms(task: str, rows: Rows) -> Chart:
    """Figure 5.39: each rule's norm and test score relative to the largest; an error is turned
    into 1 − error.
    """
    score, sign = score_of(task)
    series = []
    for activation in rows.distinct("activation"):
        part = rows.where(activation=activation)
        ours = [
            tuple(mean_and_deviation(part.where(rule=rule), name)[0] for name in ("norm", score))
            for rule in RULES
        ]
        series.append(_relative(activation, ours, sign, False))
        printed = PUBLISHED[task, activation]
        theirs = [(printed[rule]["norm"], printed[rule][score]) for rule in RULES]
        series.append(_relative(f"{activation}, thesis", theirs, sign, True))
    title = "Norm against generalisation"
    curves = tuple(series)
    caption = "A point for each of the eight rules."
    words = "relative test performance"
    return Chart(title, "relative norm", words, curves, source="Figure 5.39", caption=caption)


def _relative(name: str, points: Sequence[tuple[float, ...]], sign: int, published: bool) -> Series:
    kept = np.array([point for point in points if all(map(math.isfinite, point))], float).reshape(
        -1, 2
    )
    shares = kept / kept.max(0) if len(kept) else kept
    scores = shares[:, 1] if sign > 0 else 1 - shares[:, 1]
    return Series(name, shares[:, 0].tolist(), scores.tolist(), style="points", published=published)
