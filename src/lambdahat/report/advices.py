"""Figures of advice: what batches of every size show, and the learning rate or damping that follows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from lambdahat.randommatrix.advice import Advice
from lambdahat.randommatrix.advice_rules import GRADIENT, Request, expected_limit
from lambdahat.randommatrix.noise_levels import BatchLevels, NoiseLevels
from lambdahat.randommatrix.rate_limits import propagated
from lambdahat.randommatrix.spikes import Additive, effective_batch, noise_scale
from lambdahat.report.style import AMBER, BLUE, GREEN, GREY, VERMILION, new_figure, tidy
from lambdahat.results import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 60
Curve = Callable[[float], Estimate]  # of the effective batch b


def draw_advice_figure(advice: Advice) -> Figure:
    """λ₁ of batches, and the largest stable rate (or the least damping), against the batch size."""
    figure = new_figure(10.4, 4.0)
    draw_sharpness(advice, tidy(figure.add_subplot(1, 2, 1)))
    draw_advice(advice, tidy(figure.add_subplot(1, 2, 2)))
    return figure


def draw_sharpness(advice: Advice, axes: Axes) -> None:
    """λ₁ of batches: measured means with 95 % intervals, and two predictions with bands."""
    levels = advice.levels
    if isinstance(levels, NoiseLevels):
        _draw_predictions(levels, axes)
    _draw_points(axes, {view.batch_size: view.measured for view in levels.views}, VERMILION, "o", "batches, measured")
    _finish(axes, "λ₁ of a batch", f"Largest eigenvalue of the {levels.operator}")


def _draw_predictions(levels: NoiseLevels, axes: Axes) -> None:
    _draw_curve(levels, axes, lambda b: _isotropic(levels, b), AMBER, "isotropic noise, Theorem 14")
    _draw_curve(levels, axes, lambda b: _plus(levels.largest, levels.expected_excess(b)), BLUE, "λ₁ + τ²/(bλ₁)")
    axes.axhline(float(levels.largest), color=GREY, linestyle="--", linewidth=0.9, label="all data")


def draw_advice(advice: Advice, axes: Axes) -> None:
    """The largest stable rate against the batch size, or for adaptive and second-order methods the least ε or δ."""
    levels, rates = advice.levels, advice.optimizer in GRADIENT or isinstance(advice.levels, BatchLevels)
    if isinstance(levels, BatchLevels):
        _draw_batch_rates(advice, axes)
    elif rates:
        _draw_rates(advice, levels, axes)
    else:
        _draw_damping(advice, levels, axes)
    trained = {each.batch_size: each.value for each in advice.recommendations if each.name == "stable rate by training"}
    if rates and trained:
        _draw_points(axes, trained, GREEN, "s", "by training")
    _finish(axes, "learning rate" if rates else "damping", advice.rule)


def _draw_batch_rates(advice: Advice, axes: Axes) -> None:
    """What single batches tell, with nothing between their sizes."""
    names = {each.name for each in advice.recommendations if each.name.startswith("largest stable rate")}
    for name, colour in zip(sorted(names), (VERMILION, BLUE), strict=False):
        _draw_points(axes, _advised(advice, name), colour, "o", name)


def _draw_rates(advice: Advice, levels: NoiseLevels, axes: Axes) -> None:
    request = Request(advice.optimizer, (), None, advice.momentum)
    whole = expected_limit(levels, request, math.inf)
    _draw_curve(levels, axes, lambda b: expected_limit(levels, request, b), BLUE, "largest stable, from τ²")
    axes.axhline(float(whole), color=GREY, linestyle="--", linewidth=0.9, label="all data")
    _draw_points(axes, _advised(advice, "largest stable rate"), VERMILION, "o", "largest stable, from batches")
    end = advice["end of scaling"]
    axes.axvline(float(end), color=GREY, linestyle=":", linewidth=0.9, label="end of scaling")


def _draw_damping(advice: Advice, levels: NoiseLevels, axes: Axes) -> None:
    names = {each.name for each in advice.recommendations if each.name.startswith("least")}
    for name, colour in zip(sorted(names), (BLUE, VERMILION, AMBER), strict=True):
        found = _advised(advice, name)
        size, value = next(iter(found.items()))
        b = levels.view(size).effective

        def inverse(at: float, value: Estimate = value, b: float = b) -> Estimate:
            return propagated(lambda level: level * b / at, value)

        if np.isfinite(b) and not name.endswith("overlap"):
            _draw_curve(levels, axes, inverse, colour, name)
        _draw_points(axes, found, colour, "o", name if name.endswith("overlap") else "")


def _advised(advice: Advice, name: str) -> dict[int, Estimate]:
    return {each.batch_size: each.value for each in advice.recommendations if each.name == name}


def _isotropic(levels: NoiseLevels, b: float) -> Estimate:
    """λ₁ + s²/λ₁ beyond s = σ√(P/b), else 2s."""

    def seen(variance: float, true: float) -> float:
        return float(Additive(noise_scale(max(variance, 0.0), levels.parameters, b)).outlier(true))

    return propagated(seen, levels.variance, levels.largest)


def _plus(first: Estimate, second: Estimate) -> Estimate:
    return propagated(lambda x, y: x + y, first, second)


def _draw_curve(levels: NoiseLevels, axes: Axes, curve: Curve, colour: str, label: str) -> None:
    """A line with the band of its 95 % intervals."""
    total = levels.population
    sizes = np.unique(np.geomspace(1, max(total - 1, 1), POINTS).round().astype(int))
    found = [curve(effective_batch(int(size), total)) for size in sizes]
    ends = np.array([each.interval() for each in found])
    axes.plot(sizes, [float(each) for each in found], color=colour, label=label, linewidth=1.3)
    axes.fill_between(sizes, ends[:, 0], ends[:, 1], color=colour, alpha=0.2, linewidth=0)


def _draw_points(axes: Axes, found: dict[int, Estimate], colour: str, mark: str, label: str) -> None:
    values = np.array([float(each) for each in found.values()])
    ends = np.array([each.interval() for each in found.values()])
    half = np.abs(ends.T - values)
    axes.errorbar(list(found), values, yerr=half, fmt=mark, color=colour, markersize=5, capsize=3, label=label or None)


def _finish(axes: Axes, quantity: str, heading: str) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("batch size B")
    axes.set_ylabel(quantity)
    axes.set_title(heading, fontsize="medium")
    axes.legend(frameon=False, fontsize="small")
