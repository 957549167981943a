"""Figures of the mini-batch experiment show every batch and every model."""

import numpy as np
import pytest

from lambdahat.experiments.minibatch.eigenvalues import BatchEigenvaluesResult
from lambdahat.report.figures import plot
from lambdahat.report.style import new_axes
from tests.experiments.minibatch_made import cell, point

TEN = np.arange(10.0) + 3
TOLD = {"additive": (8.0, 1.0, 0.3), "multiplicative": (7.5, 0.5, 0.4), "directional": (7.0, 0.2, 0.6)}


@pytest.fixture(scope="module")
def result():
    points = []
    for network in ("one", "other"):
        for epoch in (0, 3):
            cells = [cell(size, TEN / size, TOLD) for size in (16, 64, 256)]
            points += [point(cells, epoch, network=network), point(cells, epoch, network=network, operator="ggn")]
    return BatchEigenvaluesResult("batch-eigenvalues", "smoke", tuple(points), (), (), 0)


def drawn(axes):
    """What each named line shows, and the points without a name."""
    return {line.get_label(): np.asarray(line.get_ydata(), dtype=float) for line in axes.lines}


def test_a_column_for_each_network(result):
    figure = plot(result)
    assert len(figure.axes) == 8
    titles = [axes.get_title() for axes in figure.axes]
    assert sum(title.startswith("one, P = 400") for title in titles) == 1
    largest = next(axes for axes in figure.axes if axes.get_title().startswith("other"))
    lines = drawn(largest)
    assert {"additive", "multiplicative", "directional", "batches", "full data"} <= set(lines)
    np.testing.assert_allclose(lines["additive"], [8.0] * 3)
    np.testing.assert_allclose(lines["batches"], TEN / 256)
    overlaps = next(axes for axes in figure.axes if axes.get_ylabel().startswith("|φ̂₁ᵀφ₁|²"))
    np.testing.assert_allclose(drawn(overlaps)["directional"], [0.6] * 3)
    variances = next(axes for axes in figure.axes if axes.get_ylabel() == "σ² per element")
    assert variances.get_xlabel() == "epoch"
    assert any(axes.get_xlabel() == "eigenvalue λ; shaded: the bulk, weights of 5/P or more" for axes in figure.axes)


def test_given_axes_get_the_first_network(result):
    axes = new_axes()
    assert plot(result, axes) is axes
    assert axes.get_title() == "one: largest eigenvalue of a batch"
