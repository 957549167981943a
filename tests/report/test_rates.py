"""Figures of learning rates, damping and LanczosOPT hold what the results hold."""

import numpy as np
import pytest

from lambdahat.experiments import run_damping, run_lanczos_opt, run_stable_rates
from lambdahat.report.figures import plot
from lambdahat.report.style import new_axes


@pytest.fixture(scope="module")
def rates():
    return run_stable_rates("smoke")


def curves(axes):
    """The y values of everything drawn."""
    return [np.asarray(line.get_ydata(), dtype=float) for line in axes.lines]


def drawn(axes, values):
    values = np.asarray(values, dtype=float)
    return any(len(y) == len(values) and np.allclose(y, values, equal_nan=True) for y in curves(axes))


def test_stable_rates_have_a_column_for_each_network(rates):
    figure = plot(rates)
    first, *below = figure.axes
    assert first.get_title() == "softmax, digits"
    assert [axes.get_title() for axes in below] == [
        "softmax, digits, momentum: rate scaled", "softmax, digits, adam: rate scaled", "softmax, digits, momentum",
    ]  # fmt: skip
    for frontier in rates.frontiers:
        assert drawn(first, frontier.centre())
    for rule in rates.rules:
        assert drawn(first, rule.rates("sgd"))
        assert drawn(first, rule.rates("momentum"))
    errors = 100 * rates.scaling[0].validation_error[0].mean(1)
    assert drawn(below[0], errors)
    assert drawn(below[2], 100 * rates.scaling[0].validation_error[0].flatten())


def test_given_axes_get_the_rates(rates):
    axes = new_axes()
    assert plot(rates, axes) is axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("batch size B", "learning rate")


def test_damping_is_drawn_with_the_rule():
    found = run_damping("smoke")
    figure = plot(found)
    assert [axes.get_ylabel() for axes in figure.axes] == ["least damping at α = 1"] + ["validation error, %"] * 2
    for frontier in found.frontiers:
        assert drawn(figure.axes[0], frontier.centre())
    axes = new_axes()
    plot(found, axes)
    assert len(axes.lines) >= 4


def test_heat_maps_hold_the_errors_above_the_least():
    found = run_lanczos_opt("smoke")
    train, test, curve = plot(found).axes
    for axes, measure in ((train, "training error"), (test, "test error")):
        errors = 100 * found.final(measure).mean(0)
        expected = (errors - errors.min()).numpy()
        assert np.allclose(axes.images[0].get_array(), expected)
        assert [text.get_text() for text in axes.texts] == [f"{value:.1f}" for value in expected.flatten()]
    assert drawn(curve, 100 * found.descent["test error"].mean(1))
    axes = new_axes()
    assert plot(found, axes) is axes
    assert axes.get_title() == "test error above the least, %"
