"""The figures of minibatch-rates.md, on the digits that come with the package."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lambdahat.experiments import Experiment, Rows
from lambdahat.experiments.minibatch import lanczos_experiment, rate_experiment
from lambdahat.experiments.minibatch.lanczos import Scale
from lambdahat.experiments.minibatch.rate_subjects import Subject
from lambdahat.report.chart_figures import draw
from lambdahat.report.style import new_figure, tidy


def rows_of(experiment: Experiment, config: Any) -> Rows:
    """The rows of all cells of a configuration of one's own."""
    return Rows(cell | row for cell in experiment.cells(config) for row in experiment.run(cell, "cpu"))


def stable_rates() -> Any:
    """The largest stable rates of SGD, with and without momentum, over batch sizes, with the rule's."""
    sizes = (4, 16, 64, 256, 1024)
    digits = Subject("MLP 64-16-10, digits", "mlp", "digits", 1024, sizes, 100, 3, 0, 16, {"widths": (16,)})
    experiment = rate_experiment.EXPERIMENT
    chart = experiment.charts(rows_of(experiment, rate_experiment.Config((digits,))))[0]
    ruled = tuple(series for series in chart.series if not series.name.startswith("adam"))
    return draw(replace(chart, series=ruled), tidy(new_figure(7.0, 4.4).add_subplot()))


def lanczos_opt() -> Any:
    """Both errors of LanczosOPT over damping and η, and the test error on the way."""
    setting = Scale("digits", 200, (1e-4, 1e-3, 1e-2, 1e-1), 100, 20, 10, 8)
    experiment = lanczos_experiment.EXPERIMENT
    figure = new_figure(13.0, 3.6)
    charts = experiment.charts(rows_of(experiment, lanczos_experiment.Config(setting, together=8)))
    for place, chart in enumerate(charts, start=1):
        axes = draw(chart, figure.add_subplot(1, 3, place))
    return axes
