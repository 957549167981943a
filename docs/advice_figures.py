"""The figure of the page on batch and step, which ``figures.py`` draws."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

import lambdahat as lh
from lambdahat.randommatrix import advise, largest_stable_rate
from lambdahat.randommatrix.advice_rules import AdviceRequest, expected_limit
from lambdahat.report.style import BLUE, GREY, VERMILION, new_figure, tidy


def batch_and_step() -> Any:
    """The largest stable rate, predicted and measured in training: constant curvature on the left,
    a network on the right.
    """
    x, y = lh.data.digits_split(seed=0)[0]
    linear = lh.models.mlp([64, 10]), "mse", (x, nn.functional.one_hot(y, 10).float())
    network = lh.models.mlp([64, 32, 10]), "cross_entropy", (x, y)
    figure = new_figure(10.4, 4.2)
    for place, (name, parts) in enumerate(
        (("linear regression", linear), ("a network of 2,410 parameters", network))
    ):
        axes = tidy(figure.add_subplot(1, 2, place + 1))
        draw_stable_rates(lh.Problem(*parts), axes)
        axes.set_title(f"{name}, 100 steps from the start", fontsize="medium")
    return figure


def draw_stable_rates(problem: lh.Problem, axes: Any) -> None:
    """Rates measured in training, with standard errors, and predicted, with and without
    momentum.
    """
    levels = advise(problem, "sgd", 32).levels
    sizes, grid = (8, 32, 128, 512), np.geomspace(4, 1000)
    effective = grid / (1 - grid / levels.population)
    kinds = ("sgd", "SGD", 0.0, BLUE), ("momentum", "SGD with momentum", 0.9, VERMILION)
    for name, words, rho, colour in kinds:
        predicted = [
            float(expected_limit(levels, AdviceRequest(name, (), None, rho), b)) for b in effective
        ]
        axes.loglog(grid, predicted, color=colour, label=f"{words}, predicted")
        rates = [largest_stable_rate(problem, name, size, start=predicted[-1]) for size in sizes]
        values, errors = [float(rate) for rate in rates], [float(rate.stderr) for rate in rates]
        axes.errorbar(
            sizes,
            values,
            yerr=errors,
            fmt="o",
            color=colour,
            capsize=3,
            label=f"{words}, measured in training",
        )
    seen = float(levels.largest) + float(levels.expected_excess(1.0)) / effective
    axes.loglog(
        grid, 2 * 1.9 / seen, "--", color=GREY, linewidth=1, label="2(1 + ρ)/λ₁ of the batch"
    )
    axes.set_xlabel("batch size B")
    axes.set_ylabel("largest stable learning rate")
    axes.legend(frameon=False, fontsize="small")
