"""Charts of training runs, of graphs and of advice."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lambdahat.graphs import Clusters, GraphSpectrum, ModelChoice, Similarity
from lambdahat.randommatrix import Advice, NoiseLevels
from lambdahat.report.spectral_charts import PER_UNIT, listed
from lambdahat.report.style import counted, value_text
from lambdahat.report.tracks import WIDE, failed_trackers, tracked_panels
from lambdahat.report.training import ACCURACIES, LOSSES, NORMS, OWN
from lambdahat.results import Estimate
from lambdahat.results.charts import Chart, Heat, Series
from lambdahat.training.runs import Run

LAPLACIAN = "eigenvalue λ of the normalised Laplacian"
POINTS = 600  # of a graph's density
DECADES = 6


def run_charts(run: Run) -> list[Chart]:
    """Loss, accuracy and norms over epochs, as far as known, and a chart for each thing that was tracked."""
    groups = {"loss, mean per sample": LOSSES, "accuracy": ACCURACIES, "norm": NORMS}
    named = {label: {name: text for name, (text, _) in group.items()} for label, group in groups.items()}
    named |= {label: {name: name for name in names} for label, names in tracked_panels(run, OWN).items()}
    faults, charts = failed_trackers(run, OWN), []
    named |= {label: {} for label in faults if label not in named}
    for label, columns in named.items():
        series = tuple(found for name, text in columns.items() if (found := _curve(run, name, text)) is not None)
        if series or label in faults:
            bands = "Bands: 95 % intervals." if any(one.error is not None for one in series) else ""
            fault = faults.get(label, "")
            caption = " ".join(filter(None, (bands, fault[:1].upper() + fault[1:])))
            title = label.partition(",")[0]
            charts.append(Chart(title[:1].upper() + title[1:], str(run.about.get("progress", "epoch")), label, series,
                                y_log=_wide(series), caption=caption))  # fmt: skip
    return charts


def _curve(run: Run, name: str, text: str) -> Series | None:
    rows = [row for row in run.history if _finite(row.get(name))]
    if not rows:
        return None
    errors = [row.get(f"{name}_stderr", math.nan) for row in rows]
    half = [1.96 * error if _finite(error) else 0.0 for error in errors]
    return Series(text, [row["progress"] for row in rows], [row[name] for row in rows], half if any(half) else None)


def _wide(series: tuple[Series, ...]) -> bool:
    values = [value for one in series for value in one.y if value is not None]
    return bool(values) and 0 < min(values) < max(values) / WIDE


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def graph_charts(found: GraphSpectrum) -> list[Chart]:
    """The density over [0, 2] on a logarithmic axis."""
    places = 1 - np.cos(np.linspace(0.0, math.pi, POINTS))
    values = found.density.evaluate(places)
    shown = [value if value > values.max() * 10.0**-DECADES else None for value in listed(values)]
    size = f"{counted(found.nodes, 'node')}, {counted(found.edges, 'edge')}, {len(found.moments) - 1} moments."
    series = Series("density", listed(places), shown)
    return [Chart(f"Spectrum of {found.name}", LAPLACIAN, PER_UNIT, (series,), y_log=True, caption=size)]


def cluster_charts(found: Clusters) -> list[Chart]:
    """The density, whose gap parts the clusters' eigenvalues from the rest."""
    if found.spectrum is None:
        return []
    (chart,) = graph_charts(found.spectrum)
    count = f"{value_text(found)} clusters below λ* = {found.cut:.3g}. " if math.isfinite(found.cut) else "No gap. "
    return [Chart(chart.title, chart.x_label, chart.y_label, chart.series, y_log=True, caption=count + chart.caption)]


def similarity_charts(found: Similarity) -> list[Chart]:
    """The divergences as a map, like graphs beside each other."""
    order = found.order()
    names = [found.names[place] for place in order]
    heat = Heat(names, names, [listed(line) for line in found.divergences[np.ix_(order, order)]], "divergence")
    return [Chart("Symmetric KL divergence between spectra", "graph", "graph", heat=heat)]


def choice_charts(found: ModelChoice) -> list[Chart]:
    """The divergence left by every model at its nearest parameter."""
    labels = [f"{one.model}, {one.parameter} = {value_text(one)}" for one in found.fits]
    series = Series("divergence", labels, [one.divergence for one in found.fits], style="bars")
    title = f"{found.name}: nearest to {found.best}"
    return [Chart(title, "model", "symmetric KL divergence of the spectra", (series,))]


def advice_charts(advice: Advice) -> list[Chart]:
    """λ₁ of batches beside all data's, and every recommendation that is given for several batch sizes."""
    levels = advice.levels
    whole = (("all data", float(levels.largest)),) if isinstance(levels, NoiseLevels) else ()
    sharpness = _points("batches", {view.batch_size: view.measured for view in levels.views})
    charts = [Chart(f"Largest eigenvalue of the {levels.operator}", "batch size B", "λ₁ of a batch", (sharpness,),
                    x_log=True, y_log=True, lines=whole, caption="Bars: 95 % intervals.")]  # fmt: skip
    named: dict[str, dict[int, Estimate]] = {}
    for each in advice.recommendations:
        if each.batch_size:
            named.setdefault(each.name, {})[each.batch_size] = each.value
    told = tuple(_points(name, found) for name, found in named.items() if len(found) > 1)
    if told:
        charts.append(Chart(f"Advice for {advice.rule}", "batch size B", "value", told, x_log=True, y_log=True))
    return charts


def _points(name: str, found: dict[int, Estimate]) -> Series:
    half = [(each.interval()[1] - each.interval()[0]) / 2 for each in found.values()]
    return Series(name, list(found), [float(each) for each in found.values()], half, "points")
