"""The figures of minibatch-rates.md, from the results that ``benchmarks/minibatch_rates.py`` has
stored.
"""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.ticker import LogLocator, NullFormatter
from torch import Tensor

from lambdahat.experiments import Rows, Store, find
from lambdahat.experiments.kit.claims import mean_of
from lambdahat.experiments.minibatch.least_damping import RATE, expected_damping
from lambdahat.experiments.minibatch.stability_edges import (
    Frontier,
    RateRule,
    ScalingRuns,
    frontiers_of,
    rules_of,
    scaling_of,
)
from lambdahat.report.figures import draw
from lambdahat.report.style import (
    AMBER,
    BLUE,
    GREEN,
    GREY,
    PURPLE,
    SKY,
    VERMILION,
    new_figure,
    tidy,
)

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
NETWORKS = {
    "softmax-mnist": "softmax, MNIST",
    "mlp-mnist": "MLP, MNIST",
    "lenet5-cifar10": "LeNet-5, CIFAR-10",
}
OPTIMIZERS = {"sgd": "SGD", "momentum": "momentum", "adam": "Adam"}
CRITERIA = {"trains": (BLUE, BLUE, "o"), "steady": (VERMILION, "none", "s")}  # colour, face, mark
MEASURED = {"trains": "measured, loss falls", "steady": "measured, no rise"}
POINTS = {"at the start": (GREEN, "-"), "trained": (AMBER, "--")}
RULES = {
    "linear": (BLUE, "o"),
    "square root": (VERMILION, "s"),
    "inverse": (BLUE, "o"),
    "constant": (GREEN, "^"),
}
GUESS = 0.9  # the error of ten classes guessed, which a run that diverged counts as
FEW_DECADES = 300.0  # a range below which threes have room for a label
# dampings whose runs are drawn step by step
WAYS = {1e-4: BLUE, 1e-3: SKY, 1e-2: GREEN, 1e-1: AMBER, 1.0: VERMILION}
BATCH_NORM = (
    "VGG-4×16-BN, γ = 0.0005: error over batch sizes",
    "VGG-4×16, γ = 0.0005: error over batch sizes",
    "WideResNet-10×1, γ = 0.0005: error over epochs, α ∝ B",
    "Rates at B = 128",
)


def rows_of(part: str) -> Rows:
    """The rows of a stored result."""
    piece = runpy.run_path(str(BENCHMARKS / "minibatch_pieces.py"))["Piece"]
    return Rows(piece.load(BENCHMARKS / "results" / f"minibatch-rates-{part}.json").rows())


def stable_rates() -> Any:
    """The largest stable rate over batch sizes by training and by the rule: networks down,
    optimisers across.
    """
    figure, axes = new_figure(9.4, 8.2), None
    for row, (part, network) in enumerate(NETWORKS.items()):
        rows = rows_of(f"stable-rates-{part}")
        for column, (optimizer, words) in enumerate(OPTIMIZERS.items()):
            axes = tidy(
                figure.add_subplot(3, 3, 3 * row + column + 1, sharex=axes if column else None)
            )
            _edges(axes, [each for each in frontiers_of(rows) if each.optimizer == optimizer])
            if optimizer == "adam":
                _root(axes, next(each for each in frontiers_of(rows) if each.optimizer == "adam"))
            else:
                for rule in rules_of(rows):
                    colour, dash = POINTS[rule.point]
                    axes.plot(
                        rule.batch_sizes,
                        rule.rates(optimizer),
                        dash,
                        color=colour,
                        label=f"rule, {rule.point}",
                    )
            axes.set_title(f"{network}, {words}", fontsize="medium")
            axes.set_xlabel("batch size B" if row == 2 else "")
            _logs(axes, both=True)
            if column == 0:
                axes.set_ylabel("largest stable rate")
            if row == 0 and column != 1:
                axes.legend(frameon=False, fontsize="small", loc="lower right")
    return axes


def _edges(axes: Any, frontiers: Sequence[Frontier]) -> None:
    """Geometric means over seeds with their standard errors."""
    for frontier in frontiers:
        colour, face, mark = CRITERIA.get(frontier.criterion, CRITERIA["trains"])
        centre = frontier.centre()
        factor = frontier.stderr().nan_to_num().exp()  # errors are those of logarithms
        bars = torch.stack([centre - centre / factor, centre * factor - centre])
        axes.errorbar(
            frontier.batch_sizes,
            centre,
            yerr=bars,
            fmt=mark,
            color=colour,
            markerfacecolor=face,
            markersize=4.5,
            capsize=2,
            elinewidth=1,
            label=MEASURED.get(frontier.criterion, "measured"),
        )


def _root(axes: Any, frontier: Frontier) -> None:
    """∝ √B through the middle of the edges."""
    sizes, centre = np.array(frontier.batch_sizes, dtype=float), frontier.centre().numpy()
    height = np.exp(np.nanmean(np.log(centre / np.sqrt(sizes))))
    axes.plot(sizes, height * np.sqrt(sizes), ":", color=GREY, label="∝ √B")


def scaling_momentum() -> Any:
    """Error and distance over batch sizes as the rate of SGD with momentum is scaled (Figures
    5.7–5.10).
    """
    return _scaling("momentum")


def scaling_adam() -> Any:
    """The same for Adam (Figures 5.15, 5.16)."""
    return _scaling("adam")


def _scaling(optimizer: str) -> Any:
    """Networks across; down, error and distance over batch sizes, and error over the share of
    the largest rate.
    """
    figure = new_figure(9.4, 7.6)
    names = ("validation error, %", "distance from the start", "validation error, %")
    for column, part in enumerate(NETWORKS, start=1):
        rows = rows_of(f"stable-rates-{part}")
        (runs,) = (each for each in scaling_of(rows) if each.optimizer == optimizer)
        (edge,) = (
            each
            for each in frontiers_of(rows)
            if (each.optimizer, each.criterion) == (optimizer, "trains")
        )
        panels = [
            tidy(figure.add_subplot(3, 3, place)) for place in (column, column + 3, column + 6)
        ]
        wrong = 100 * runs.validation_error.nan_to_num(nan=GUESS)
        _outcomes(panels[0], runs, wrong)
        _outcomes(panels[1], runs, runs.distance)
        _shares(panels[2], runs, wrong, edge)
        panels[0].set_title(f"{runs.network}, {OPTIMIZERS[optimizer]}", fontsize="medium")
        for axes, name in zip(panels, names, strict=True):
            _logs(axes, both=axes is panels[1])
            axes.set_xlabel(
                "rate / the largest stable one" if axes is panels[2] else "batch size B"
            )
            if column == 1:
                axes.set_ylabel(name)
        panels[0].set_ylim(bottom=0)
        panels[2].set_ylim(panels[0].get_ylim())
        if column == 1:
            panels[0].legend(
                frameon=False, fontsize="small", title="rate, in B", title_fontsize="small"
            )
    return axes


def _shares(axes: Any, runs: ScalingRuns, wrong: Tensor, edge: Frontier) -> None:
    """The mean error at every rule and batch size over the rate as a share of the edge there."""
    edges = torch.tensor([edge.at(size) for size in runs.batch_sizes])
    axes.axvline(1.0, color=GREY, linewidth=0.8, linestyle=":")
    for rule, rates, found in zip(runs.rules, runs.values, wrong, strict=True):
        colour, mark = RULES[rule]
        axes.plot(rates / edges, found.mean(1), mark, color=colour, markersize=4.5)


def _outcomes(axes: Any, runs: ScalingRuns, values: Tensor) -> None:
    """Means over seeds (rules, sizes, S) with their standard errors; the size that all rules
    start from in grey.
    """
    axes.axvline(runs.reference, color=GREY, linewidth=0.8, linestyle=":")
    for rule, found in zip(runs.rules, values, strict=True):
        colour, mark = RULES[rule]
        readings = [mean_of(each.tolist()) for each in found]
        axes.errorbar(
            runs.batch_sizes,
            [reading.value for reading in readings],
            yerr=[np.nan_to_num(reading.stderr) for reading in readings],
            marker=mark,
            color=colour,
            markersize=4.5,
            capsize=2,
            elinewidth=1,
            linewidth=1.3,
            label="∝ 1/B" if rule == "inverse" else rule,
        )


def _logs(axes: Any, both: bool = False) -> None:
    """Batch sizes, or both axes, in logarithms with numbers as text; threes too where there are
    few tens.
    """
    axes.set(xscale="log", yscale="log" if both else "linear")
    for axis in (axes.xaxis, axes.yaxis) if both else (axes.xaxis,):
        low, high = axis.get_view_interval()
        few = high < FEW_DECADES * low
        axis.set_major_locator(LogLocator(subs=(1.0, 3.0) if few else (1.0,)))
        if few or axis is axes.xaxis:
            axis.set_major_formatter(lambda value, _: f"{value:,g}" if value >= 1 else f"{value:g}")
        axis.set_minor_formatter(NullFormatter())


def damping() -> Any:
    """The least damping with the rule's, then validation error and distance: KFAC above, Adam
    below.
    """
    rows, figure = rows_of("damping"), new_figure(9.4, 5.4)
    (rule,) = rules_of(rows)
    for row, (optimizer, words) in enumerate({"kfac": "KFAC's δ", "adam": "Adam's ε"}.items()):
        least, error, distance = (
            tidy(figure.add_subplot(2, 3, 3 * row + place)) for place in (1, 2, 3)
        )
        _edges(least, [each for each in frontiers_of(rows) if each.optimizer == optimizer])
        _told(least, rule, optimizer)
        least.set_ylabel(f"smallest stable {words.split()[-1]}")
        _logs(least, both=True)
        (runs,) = (each for each in scaling_of(rows) if each.optimizer == optimizer)
        _outcomes(error, runs, 100 * runs.validation_error.nan_to_num(nan=GUESS))
        _outcomes(distance, runs, runs.distance)
        error.set(ylabel="validation error, %", ylim=(0, 95))
        distance.set_ylabel("distance from the start")
        _logs(error)
        _logs(distance, both=True)
        for axes in (least, error, distance):
            axes.set_title(f"{runs.network}, {words}", fontsize="medium")
            axes.set_xlabel("batch size B" if row else "")
        if row == 0:
            least.set_ylim(bottom=1e-8)  # room for the legend
            least.legend(frameon=False, fontsize="small", loc="lower left")
            error.legend(
                frameon=False, fontsize="small", title="damping, in B", title_fontsize="small"
            )
    return distance


def _told(axes: Any, rule: RateRule, optimizer: str) -> None:
    """Eq. 5.36 with Pσ² and with τ², and the damping from λ₁ of batches; a gap where batches add
    nothing to λ₁.
    """
    lines = {
        "from λ₁ of batches": (expected_damping(rule, optimizer), GREEN, "-"),
        "τ² for Pσ²": (rule.dampings(RATE, "directional"), PURPLE, "-."),
        "Eq. 5.36, Pσ²": (rule.dampings(RATE, "additive"), AMBER, "--"),
    }
    for name, (values, colour, dash) in lines.items():
        axes.plot(
            rule.batch_sizes,
            values.where(values > 0, torch.nan),
            dash,
            marker=".",
            color=colour,
            label=name,
        )


def lanczos_opt() -> Any:
    """Both errors of LanczosOPT over damping and η, the test error on the way, and at equal
    training loss.
    """
    rows, figure = rows_of("lanczos-opt"), new_figure(9.4, 8.2)
    maps = [chart for chart in find("lanczos-opt").charts(rows) if chart.heat is not None]
    for place, chart in enumerate(maps, start=1):
        draw(replace(chart, x_label="", y_label=""), figure.add_subplot(2, 2, place))
    way, fit = (tidy(figure.add_subplot(2, 2, place)) for place in (3, 4))
    for delta, colour in WAYS.items():
        part = rows.where(method="LanczosOPT", damping=delta)
        _way(way, part.where(eta=1.0), "step", f"δ = {delta:g}", colour)
        _way(fit, part.where(eta=1.0), "training loss", "η = 1" if delta == 1.0 else None, colour)
        _way(
            fit,
            part.where(eta=10.0),
            "training loss",
            "η = 10" if delta == 1.0 else None,
            colour,
            "s--",
            "none",
        )
    _way(way, rows.where(method="GD"), "step", "gradient descent", GREY)
    way.set_title("Test error during training, η = 1", fontsize="medium")
    fit.set_title("Test error over training loss", fontsize="medium")
    way.set_xlabel("step")
    fit.set(xlabel="training loss, from right to left", xscale="log")
    for axes in (way, fit):
        axes.set(ylabel="test error, %", yscale="log")
        axes.set_yticks([12, 15, 20, 30, 50], ["12", "15", "20", "30", "50"])
        axes.tick_params(which="minor", axis="y", left=False, labelleft=False)
        axes.legend(frameon=False, fontsize="small")
    return axes


def _way(
    axes: Any,
    rows: Rows,
    column: str,
    name: str | None,
    colour: str,
    style: str = "o-",
    face: str | None = None,
) -> None:
    """The mean test error at every look over the mean of a column, with standard errors over
    seeds.
    """
    looks = [rows.where(step=step) for step in rows.distinct("step")]
    places = [mean_of(look.values(column)).value for look in looks]
    readings = [mean_of([100 * value for value in look.values("test error")]) for look in looks]
    values, errors = ([getattr(each, part) for each in readings] for part in ("value", "stderr"))
    axes.errorbar(
        places,
        values,
        errors,
        fmt=style,
        markersize=3.5,
        color=colour,
        markerfacecolor=face or colour,
        capsize=2,
        elinewidth=1,
        linewidth=1.2,
        label=name,
    )


def batch_norm_rates() -> Any:
    """Error over batch sizes with and without batch norm, of a residual network on the way, and
    over rates.
    """
    runs = Store(BENCHMARKS / "results" / "reproductions", "batch-norm-rates", "cpu").rows()
    charts = {chart.title: chart for chart in find("batch-norm-rates").charts(runs)}
    figure, axes = new_figure(9.4, 7.4), None
    for place, title in enumerate(BATCH_NORM, start=1):
        axes = draw(charts[title], tidy(figure.add_subplot(2, 2, place)))
    return axes
