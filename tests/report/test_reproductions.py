"""Figures of stored reproductions hold every rule's mean and the thesis's."""

import pytest
import torch

from lambdahat.experiments.regularization.learning_rules import RULES
from lambdahat.experiments.regularization.published import PUBLISHED, quantities_of
from lambdahat.experiments.regularization.stored import RegularizationResult, RuleRun
from lambdahat.report.figures import plot
from lambdahat.report.style import new_axes


def made(name):
    """Two seeds of every rule, around numbers of their own."""
    runs = tuple(
        RuleRun(activation, rule, {quantity: torch.tensor([1.0, 2.0]) + place for quantity in quantities_of(name)})
        for activation in ("tanh", "relu")
        for place, rule in enumerate([*RULES, "Dropout Large"])
    )
    return RegularizationResult(name, runs, (), (), 2, 0)


@pytest.mark.parametrize(("name", "panels"), [("xor", ["training accuracy", "norm"]), ("xord", ["test error", "norm"])])
def test_a_panel_for_each_quantity(name, panels):
    result = made(name)
    figure = plot(result)
    assert [axes.get_xlabel() for axes in figure.axes] == panels
    labels = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert labels == [*RULES, "Dropout Large"]
    for axes, quantity in zip(figure.axes, panels, strict=True):
        drawn = [float(line.get_xdata()[0]) for line in axes.lines if len(line.get_xdata()) == 1]
        for row in result.runs:
            assert row.mean(quantity) in drawn
        for activation in ("tanh", "relu"):
            assert {row[quantity] for row in PUBLISHED[name, activation].values()} <= set(drawn)


def test_given_axes_get_the_norms():
    axes = new_axes()
    assert plot(made("xor"), axes) is axes
    assert axes.get_xlabel() == "norm"
