"""Charts of training runs and what was tracked along them, of advice, and of the benchmark."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from lambdahat.bench.records import OURS, UNIT, BenchResult
from lambdahat.randommatrix.advice import Advice
from lambdahat.randommatrix.advice_rules import GRADIENT, AdviceRequest, expected_limit
from lambdahat.randommatrix.noise_levels import BatchLevels, NoiseLevels
from lambdahat.randommatrix.rate_limits import propagate
from lambdahat.randommatrix.spikes import Additive, effective_batch, noise_scale
from lambdahat.results import NORMAL_QUANTILE, Estimate
from lambdahat.results.charts import (
    INTERVAL,
    Chart,
    Heat,
    Mark,
    Series,
    charts_of,
    count_text,
    headline_of,
    interval_series,
    is_wide,
    with_status,
)
from lambdahat.training.history import Run, is_finite
from lambdahat.training.trackers import is_failure

LOSSES = {"loss": "training", "validation_loss": "validation"}
LOSSES["average_validation_loss"] = "average, validation"
ACCURACIES = {name.replace("loss", "accuracy"): text for name, text in LOSSES.items()}
NORMS = {"norm": "‖θ‖", "distance": "‖θ − θ₀‖", "update_norm": "update"}
LOSS = "loss, mean per sample"
OWN = {"kind", "epoch", "step", "progress", "gradient_norm", "max_norm", "learning_rate", "seconds"}
OWN |= {*LOSSES, *ACCURACIES, *NORMS}
ASIDE = ("_stderr", "_cost", "_seconds", "_status", "_nbeta", "_localization")
PANELS = {  # label and the columns that share its axis
    "learning rate × sharpness": r"edge(_threshold)?",
    "largest eigenvalues": r"top_\d+",
    "span of the largest eigenvalues": r"top_(overlap|drift)",
    "ends of the spectrum": r"spectrum_(largest|smallest)",
    "share of eigenvalues": r"spectrum_(degeneracy|negative)",
    "trace": r"(spectrum_)?trace",
    "learning coefficient λ̂": r"llc",
    "WBIC": r"wbic",
    "variance of an element": r"variance_\w+",
    "norms": r"norms_\w+",
    "effective learning rate α/‖w‖²": r"effective_rate",
}
# panels that 2/α belongs to, if it is at most so many times the largest eigenvalue there
EIGENVALUES = {"largest eigenvalues": 20.0, "ends of the spectrum": 5.0}
BINS, SPECTRA = 60, 200  # of a map of spectra: along the axis, and over time at most
LEAST_SHARE = 1e-8  # share of eigenvalues that is shown
UNSEEN = 0.005  # of the range of a curve: bars below that are caps without a bar
BATCH = "batch size B"
POINTS = 60  # of a predicted curve


@charts_of.register
def _(run: Run) -> list[Chart]:
    """Loss, accuracy and norms over epochs, as far as known, and a chart for each thing that was
    tracked.
    """
    panels = {LOSS: LOSSES, "accuracy": ACCURACIES, "norm": NORMS}
    for label, names in tracked_panels(run, OWN).items():
        panels[label] = dict(zip(names, names, strict=True))
    faults = failed_trackers(run, OWN)
    panels |= {label: {} for label in faults if label not in panels}
    charts = []
    for label, columns in panels.items():
        curves = [_curve(run, name, text) for name, text in columns.items()]
        series = [curve for curve in curves if curve is not None]
        if label in EIGENVALUES:
            series += _stability(run, columns, EIGENVALUES[label])
        wide = is_wide(value for one in series for value in one.y)
        if label == LOSS and series:
            series += _best(run)
        if series or label in faults:
            title = label.partition(",")[0]
            title = title[:1].upper() + title[1:]
            if label == LOSS:
                ended = "" if run.ended == "epochs" else f", {run.ended}"
                title = with_status(f"{title}, {count_text(len(run), 'epoch')}{ended}", run.status)
            about = str(run.about.get("progress", "epoch"))
            fault = faults.get(label, "")
            charts.append(Chart(title, about, label, tuple(series), y_log=wide, warning=fault))
    charts += _spectra(run)
    return charts or [Chart(with_status("No epochs", run.status), "epoch", LOSS)]


def _curve(run: Run, name: str, text: str) -> Series | None:
    rows = [row for row in run.history if is_finite(row.get(name))]
    if not rows:
        return None
    errors = [row.get(f"{name}_stderr", math.nan) for row in rows]
    half = [NORMAL_QUANTILE * error if is_finite(error) else 0.0 for error in errors]
    x, y = ([row[column] for row in rows] for column in ("progress", name))
    error = half if max(half) > UNSEEN * float(np.ptp(y)) else None
    if name.endswith("_threshold"):
        return Series("threshold", x, y, error, style="segments", colour="muted", dashed=True)
    keys = [f"{key}_status" for key in (name, name.partition("_")[0])]  # of top_1 that of top
    statuses = [str(row.get(keys[0], row.get(keys[1], ""))) for row in rows]
    style = "line" if name in ("llc", "wbic") else "joined"
    return Series(text, x, y, error, style, band=INTERVAL, statuses=statuses)


def _stability(run: Run, columns: Mapping[str, str], most: float) -> list[Series]:
    """2/α, the largest eigenvalue at which steps of gradient descent are stable; nothing where it
    is more than ``most`` times the largest, for it would squeeze the others.
    """
    rows = [row for row in run.history if any(is_finite(row.get(name)) for name in columns)]
    known = [
        row for row in rows if is_finite(row.get("learning_rate")) and row["learning_rate"] > 0
    ]
    largest = max((row.get(name, 0.0) for row in known for name in columns), default=0.0)
    limits = [2 / row["learning_rate"] for row in known]
    if not known or min(limits) > most * largest:
        return []
    progress = [row["progress"] for row in known]
    name = "2 / learning rate"
    return [Series(name, progress, limits, style="segments", colour="muted", dashed=True)]


def _spectra(run: Run) -> list[Chart]:
    """The spectra over time as a map; at most ``SPECTRA`` of them, evenly spread."""
    rows = [row for row in run.history if row.get("spectrum")]
    if len(rows) < 2:
        return []
    rows = rows[:: -(-len(rows) // SPECTRA)]
    spectra = [np.array(row["spectrum"], float).T for row in rows]
    nodes = np.concatenate([places for places, _ in spectra])
    edges = np.linspace(nodes.min(), nodes.max(), BINS + 1)
    masses = np.array([np.histogram(places, edges, weights=mass)[0] for places, mass in spectra]).T
    values = [[float(mass) if mass > LEAST_SHARE else None for mass in line] for line in masses]
    centres = [float(centre) for centre in (edges[1:] + edges[:-1]) / 2]
    progress = [row["progress"] for row in rows]
    heat = Heat(progress, centres, values, "share of eigenvalues", log=True, cells=True)
    about = str(run.about.get("progress", "epoch"))
    caption = "Ritz values of the Hessian with their weights; cells without any are empty."
    title = "Spectrum over time"
    return [Chart(title, about, "eigenvalue", heat=heat, caption=caption, page_only=True)]


@headline_of.register
def _(run: Run, name: str) -> str:
    losses = [row["loss"] for row in run.history if is_finite(row.get("loss"))]
    if not losses:
        return "No epoch was finished"
    fell = f"Training loss {losses[0]:.4g} → {losses[-1]:.4g} in {count_text(len(run), 'epoch')}"
    best = {key: run.best[key] for key in ACCURACIES if is_finite(run.best.get(key))}
    accuracies = [f"{ACCURACIES[key]} accuracy {value:.4g}" for key, value in best.items()]
    return "; ".join([fell, *accuracies])


def _best(run: Run) -> list[Series]:
    """A star at the best epoch."""
    metric = "validation_loss" if "validation_loss" in run.best else "loss"
    if metric not in run.best:
        return []
    place = [run.best["progress"]], [run.best[metric]]
    return [Series("best", *place, style="points", mark="star", colour="muted")]


def tracked_panels(run: Run, aside: set[str]) -> dict[str, list[str]]:
    """The columns of each panel by its label, without those in ``aside``."""
    names = dict.fromkeys(
        key for row in run.history for key in row if key not in aside and not key.endswith(ASIDE)
    )
    panels: dict[str, list[str]] = {}
    for name in names:
        if any(is_finite(row.get(name)) for row in run.history):
            panels.setdefault(_label([name], name) + _at_gamma(run, name), []).append(name)
    return panels


def failed_trackers(run: Run, aside: set[str]) -> dict[str, str]:
    """Why trackers measured nothing at some time, by the label of their panel."""
    notes: dict[str, str] = {}
    names = dict.fromkeys(key for row in run.history for key in row)
    for name in (key.removesuffix("_status") for key in names if key.endswith("_status")):
        statuses = [row[f"{name}_status"] for row in run.history if f"{name}_status" in row]
        faults = [status for status in statuses if is_failure(status)]
        if faults:
            own = [key for key in names if f"{key}_".startswith(f"{name}_") and key not in aside]
            columns = [key for key in own if not key.endswith(ASIDE)]
            count = f"{len(faults)} of {len(statuses)} not measured"
            count = "Not measured" if len(faults) == len(statuses) else count
            notes[_label(columns or [name], name) + _at_gamma(run, name)] = f"{count}: {faults[-1]}"
    return notes


def _label(columns: list[str], name: str) -> str:
    """The label of the first panel that has one of the columns, else ``name``."""
    pairs = ((key, label) for key in columns for label in PANELS)
    return next((label for key, label in pairs if re.fullmatch(PANELS[label], key)), name)


def _at_gamma(run: Run, name: str) -> str:
    """At which localization a quantity was measured, for the label of its panel; often nothing."""
    values = [row.get(f"{name}_localization") for row in run.history]
    known = sorted({float(gamma) for gamma in values if gamma is not None and is_finite(gamma)})
    if not known:
        return ""
    span = f"= {known[0]:.3g}" if len(known) == 1 else f"from {known[0]:.3g} to {known[-1]:.3g}"
    return f", γ {span}"


@charts_of.register
def _(advice: Advice) -> list[Chart]:
    """The largest stable rate or the least damping over the batch size, and λ₁ of batches."""
    levels = advice.levels
    series, lines = [], []
    if isinstance(levels, NoiseLevels):

        def by_direction(b: float) -> Estimate:
            return propagate(operator.add, levels.largest, levels.expected_excess(b))

        series = [
            _prediction(levels, partial(_isotropic, levels), "isotropic noise model", "amber"),
            _prediction(levels, by_direction, "λ₁ + τ²/(bλ₁)", "blue"),
        ]
        lines = [("all data", float(levels.largest))]
    views = [(view.batch_size, view.measured) for view in levels.views]
    series.append(interval_series("batches, measured", views, colour="vermilion"))
    title = f"Largest eigenvalue of the {levels.operator.replace('hessian', 'Hessian')}"
    rates = advice.optimizer in GRADIENT or isinstance(levels, BatchLevels)
    marks: list[Mark] = []
    ends: list[Mark] = []
    if isinstance(levels, BatchLevels):
        # what single batches tell, with nothing between their sizes
        names = sorted({each.name for each in advice.recommendations})
        names = [name for name in names if name.startswith("largest stable rate")]
        limits = [interval_series(name, _advice_for(advice, name)) for name in names]
    elif rates:
        limits, marks, ends = _rates(advice, levels)
    else:
        limits = _damping(advice, levels)
    trained = _advice_for(advice, "stable rate by training")
    if rates and trained:
        limits.append(interval_series("measured by training", trained, colour="green"))
    bound = "Largest stable learning rate" if rates else "Least stable damping"
    labels = (f"{bound}, {advice.rule}", BATCH, "learning rate" if rates else "damping")
    log: dict[str, Any] = {"x_log": True, "y_log": True}
    return [
        Chart(*labels, tuple(limits), lines=tuple(marks), x_lines=tuple(ends), **log),
        Chart(title, BATCH, "λ₁ of a batch", tuple(series), lines=tuple(lines), **log),
    ]


def _rates(advice: Advice, levels: NoiseLevels) -> tuple[list[Series], list[Mark], list[Mark]]:
    request = AdviceRequest(advice.optimizer, (), None, advice.momentum)
    whole = expected_limit(levels, request, math.inf)
    limit = partial(expected_limit, levels, request)
    curve = _prediction(levels, limit, "largest stable, from τ²", "blue")
    measured = _advice_for(advice, "largest stable rate")
    points = interval_series("largest stable, from batches", measured, colour="vermilion")
    end = ("end of scaling", float(advice["end of scaling"]))
    return [curve, points], [("all data", float(whole))], [end]


def _damping(advice: Advice, levels: NoiseLevels) -> list[Series]:
    """The least damping over the effective batch; only without overlaps is it a 1/B law."""
    series = []
    names = sorted({each.name for each in advice.recommendations if each.name.startswith("least")})
    for name, colour in zip(names, ("blue", "vermilion", "amber"), strict=True):
        advised = _advice_for(advice, name)
        size, value = advised[0]
        b = levels.view(int(size)).effective

        def inverse(at: float, value: Estimate = value, b: float = b) -> Estimate:
            return propagate(lambda level: level * b / at, value)

        curved = math.isfinite(b) and not name.endswith("overlap")
        if curved:
            series.append(_prediction(levels, inverse, name, colour))
        series.append(interval_series(name, advised, colour=colour, legend=not curved))
    return series


def _advice_for(advice: Advice, name: str) -> list[tuple[float, Estimate]]:
    return [(each.batch_size, each.value) for each in advice.recommendations if each.name == name]


def _isotropic(levels: NoiseLevels, b: float) -> Estimate:
    """λ₁ + s²/λ₁ beyond s = σ√(P/b), else 2s."""

    def outlier(variance: float, true: float) -> float:
        return float(Additive(noise_scale(max(variance, 0.0), levels.parameters, b)).outlier(true))

    return propagate(outlier, levels.variance, levels.largest)


def _prediction(
    levels: NoiseLevels, curve: Callable[[float], Estimate], name: str, colour: str
) -> Series:
    """A function of the effective batch b over batch sizes, with the band of its 95 % intervals."""
    total = levels.population
    sizes = np.unique(np.geomspace(1, max(total - 1, 1), POINTS).round().astype(int))
    points = [(int(size), curve(effective_batch(int(size), total))) for size in sizes]
    return interval_series(name, points, "segments", colour=colour)


@charts_of.register
def _(result: BenchResult) -> list[Chart]:
    """One line for each task: our cost, each peer's, and the limit as a tick, in units of the
    task.
    """
    tasks = result.tasks()
    peers = [by for by in dict.fromkeys(row.by for row in result.rows) if by not in (OURS, UNIT)]
    series = []
    for by in (OURS, *peers):
        rows = [result.of(*task).get(by) for task in tasks]
        costs = {place: row.cost for place, row in enumerate(rows) if row is not None}
        series.append(_task_points(by, costs))
    ours = [result.of(*task).get(OURS) for task in tasks]
    limits = {place: row.limit for place, row in enumerate(ours) if row is not None}
    series.append(_task_points("limit", limits, mark="tick", colour="muted"))
    series = [each for each in series if each.x]
    title = f"{result.about.get('chip', '')}, torch {result.about.get('torch', '')}"
    label = "cost, in units of the task (mostly one gradient over the same data)"
    names = tuple(f"{work} ({case})" for work, case in tasks)
    return [Chart(title, "", label, tuple(series), y_log=True, x_names=names, horizontal=True)]


def _task_points(name: str, costs: Mapping[int, float], **look: Any) -> Series:
    """The finite costs of tasks by their places."""
    known = {place: cost for place, cost in costs.items() if math.isfinite(cost)}
    return Series(name, list(known), list(known.values()), style="points", **look)
