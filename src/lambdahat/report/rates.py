"""Figures of learning rates and damping over batch sizes, and of LanczosOPT."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lambdahat.experiments.minibatch.damping import DampingResult
from lambdahat.experiments.minibatch.damping_claims import expected_damping
from lambdahat.experiments.minibatch.frontiers import Frontier
from lambdahat.experiments.minibatch.lanczos import LanczosResult
from lambdahat.experiments.minibatch.rate_rules import HELD
from lambdahat.experiments.minibatch.rates import StableRatesResult
from lambdahat.experiments.minibatch.scaling_runs import ScalingRuns
from lambdahat.report.style import AMBER, BLUE, GREEN, GREY, PURPLE, SKY, VERMILION, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"sgd": BLUE, "momentum": GREEN, "adam": VERMILION, "kfac": PURPLE}
RULE_COLOURS = {"linear": BLUE, "inverse": BLUE, "square root": AMBER, "constant": GREY}


def draw_stable_rates(result: StableRatesResult) -> Figure:
    """A column for each network: its largest stable rates, what comes of scaling them, and how far that leads."""
    networks = list(dict.fromkeys(frontier.network for frontier in result.frontiers))
    most = max(sum(runs.network == network for runs in result.scaling) for network in networks)
    rows = 1 + most + (most > 0)
    figure = new_figure(4.6 * len(networks) + 0.6, 3.4 * rows)
    for column, network in enumerate(networks, start=1):
        draw_rates(result, tidy(figure.add_subplot(rows, len(networks), column)), network)
        mine = [runs for runs in result.scaling if runs.network == network]
        for row, runs in enumerate(mine, start=1):
            draw_errors(runs, tidy(figure.add_subplot(rows, len(networks), row * len(networks) + column)))
        if mine:
            draw_distances(mine[0], tidy(figure.add_subplot(rows, len(networks), (rows - 1) * len(networks) + column)))
    return figure


def draw_rates(result: StableRatesResult, axes: Axes, network: str | None = None) -> None:
    """The largest stable rates of one network over batch sizes, with the rule's from λ₁ of batches at the start."""
    name = network or result.frontiers[0].network
    for frontier in (frontier for frontier in result.frontiers if frontier.network == name):
        steady = frontier.criterion == "steady"
        _draw_frontier(frontier, axes, "D" if steady else "o", f"{frontier.optimizer}, {frontier.criterion}")
    for rule in (rule for rule in result.rules if rule.network == name):
        for optimizer in HELD:
            label = f"rule, {optimizer}, {rule.point}"
            style = "--" if rule.point == "trained" else ":"
            axes.plot(rule.batch_sizes, rule.rates(optimizer), style, color=COLOURS[optimizer], label=label)
    _finish(axes, "learning rate", name)


def draw_damping(result: DampingResult) -> Figure:
    """The least damping over batch sizes, and what comes of scaling it, for each network and optimiser."""
    networks = list(dict.fromkeys(frontier.network for frontier in result.frontiers))
    most = max(sum(runs.network == network for runs in result.scaling) for network in networks)
    figure = new_figure(4.6 * (1 + most), 3.4 * len(networks))
    for row, network in enumerate(networks):
        draw_dampings(result, tidy(figure.add_subplot(len(networks), 1 + most, 1 + row * (1 + most))), network)
        for place, runs in enumerate(runs for runs in result.scaling if runs.network == network):
            draw_errors(runs, tidy(figure.add_subplot(len(networks), 1 + most, 2 + place + row * (1 + most))))
    return figure


def draw_dampings(result: DampingResult, axes: Axes, network: str | None = None) -> None:
    """The least damping of each optimiser over batch sizes, the rule's dotted."""
    name = network or result.frontiers[0].network
    rule = next(rule for rule in result.rules if rule.network == name)
    for frontier in (frontier for frontier in result.frontiers if frontier.network == name):
        _draw_frontier(frontier, axes, "o", frontier.optimizer)
        axes.plot(rule.batch_sizes, expected_damping(rule, frontier.optimizer), ":", color=COLOURS[frontier.optimizer],
                  label=f"rule, {frontier.optimizer}")  # fmt: skip
    _finish(axes, "least damping at α = 1", name)


def draw_errors(runs: ScalingRuns, axes: Axes) -> None:
    """Validation error over batch sizes under each rule: mean and standard error over seeds."""
    for place, rule in enumerate(runs.rules):
        values = 100 * runs.validation_error[place].numpy()
        finite = np.isfinite(values)
        count = finite.sum(1)
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = np.where(finite, values, 0).sum(1) / count
            spread = np.sqrt(np.where(finite, (values - mean[:, None]) ** 2, 0).sum(1) / (count - 1) / count)
        colour = RULE_COLOURS[rule]
        axes.errorbar(runs.batch_sizes, mean, spread, fmt="o-", color=colour, markersize=4, linewidth=1, label=rule)
    axes.axvline(runs.reference, color=GREY, linewidth=0.8, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("batch size B")
    axes.set_ylabel("validation error, %")
    axes.set_title(f"{runs.network}, {runs.optimizer}: {runs.scaled} scaled", fontsize="medium")
    axes.legend(frameon=False, fontsize="small")


def draw_distances(runs: ScalingRuns, axes: Axes) -> None:
    """Validation error over the distance from the start, a point for each run (Figure 5.8)."""
    for place, rule in enumerate(runs.rules):
        far, wrong = runs.distance[place].flatten(), 100 * runs.validation_error[place].flatten()
        axes.plot(far, wrong, "o", color=RULE_COLOURS[rule], markersize=4, label=rule)
    axes.set_xscale("log")
    axes.set_xlabel("distance from the start")
    axes.set_ylabel("validation error, %")
    axes.set_title(f"{runs.network}, {runs.optimizer}", fontsize="medium")
    axes.legend(frameon=False, fontsize="small")


def draw_lanczos(result: LanczosResult) -> Figure:
    """Heat maps of both errors over δ and η (Figure 6.4), and the test error on the way at each δ (Figure 6.2)."""
    figure = new_figure(13.0, 3.6)
    for place, measure in enumerate(("training error", "test error"), start=1):
        draw_heat(result, figure.add_subplot(1, 3, place), measure)
    axes = tidy(figure.add_subplot(1, 3, 3))
    shades = [SKY, BLUE, GREEN, AMBER, VERMILION, PURPLE]
    curves = 100 * result.measures["test error"][..., 0].mean(1)
    for column, damping in enumerate(result.dampings):
        colour = shades[column % len(shades)]
        axes.plot(result.steps, curves[:, column], color=colour, linewidth=1.2, label=f"δ = {damping:g}")
    axes.plot(result.steps, 100 * result.descent["test error"].mean(1), "--", color=GREY, label="GD")
    axes.set_xlabel("step")
    axes.set_ylabel("test error, %, η = 1")
    axes.legend(frameon=False, fontsize="x-small", ncols=2)
    return figure


def draw_heat(result: LanczosResult, axes: Axes, measure: str = "test error") -> None:
    """One error above its least over the grid, in percent; a cell that diverged at a seed is empty."""
    found = 100 * result.final(measure).mean(0).numpy()
    found = found - np.nanmin(found)
    axes.imshow(found, cmap="Greys", aspect="auto", norm="symlog" if np.nanmax(found) > 20 else None)
    for row, column in np.ndindex(*found.shape):
        if np.isfinite(found[row, column]):
            dark = found[row, column] > 0.5 * np.nanmax(found)
            text = f"{found[row, column]:.1f}"
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")
    axes.set_xticks(range(len(result.etas)), [f"{eta:g}" for eta in result.etas])
    axes.set_yticks(range(len(result.dampings)), [f"{damping:g}" for damping in result.dampings])
    axes.set_xlabel("η")
    axes.set_ylabel("δ")
    axes.set_title(f"{measure} above the least, %", fontsize="medium")


def _draw_frontier(frontier: Frontier, axes: Axes, marker: str, label: str) -> None:
    centre, relative = frontier.centre().numpy(), frontier.stderr().nan_to_num(0.0).numpy()
    colour = COLOURS[frontier.optimizer]
    inside = "none" if marker == "D" else colour
    axes.errorbar(frontier.batch_sizes, centre, yerr=centre * relative, fmt=f"{marker}-", color=colour, markersize=4,
                  linewidth=1, label=label, markerfacecolor=inside)  # fmt: skip


def _finish(axes: Axes, quantity: str, network: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("batch size B")
    axes.set_ylabel(quantity)
    axes.set_title(network, fontsize="medium")
    axes.legend(frameon=False, fontsize="x-small")
