"""Figures of reproduced experiments hold every rule's mean and the thesis's."""

import pytest

from lambdahat.experiments import run_xor, run_xord
from lambdahat.experiments.regularization_claims import PUBLISHED, RULES
from lambdahat.report.figures import plot
from lambdahat.report.style import new_axes


@pytest.mark.parametrize(
    ("run", "panels"), [(run_xor, ["training accuracy", "norm"]), (run_xord, ["test error", "norm"])]
)
def test_a_panel_for_each_quantity(run, panels):
    result = run(seeds=2, epochs=1)
    figure = plot(result)
    assert [axes.get_xlabel() for axes in figure.axes] == panels
    labels = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert labels == [*RULES, "Dropout Large"]
    for axes, name in zip(figure.axes, panels, strict=True):
        drawn = [float(line.get_xdata()[0]) for line in axes.lines if len(line.get_xdata()) == 1]
        for row in result.runs:
            assert row.mean(name) in drawn
        for activation in ("tanh", "relu"):
            assert {row[name] for row in PUBLISHED[result.name, activation].values()} <= set(drawn)


def test_given_axes_get_the_norms():
    axes = new_axes()
    assert plot(run_xor(seeds=2, epochs=1), axes) is axes
    assert axes.get_xlabel() == "norm"
