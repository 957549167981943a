"""Figures of what batches show: every number in them is the result's."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lambdahat.randommatrix import BatchComparison, BatchEigenvalues, predict
from lambdahat.report.figures import plot
from lambdahat.results import Eigenpairs
from lambdahat.results.charts import charts_of, headline_of
from tests.report.kinds import made
from tests.report.test_figures import caption


@pytest.fixture
def pairs():
    values = torch.tensor([3.0, -2.0], dtype=torch.float64)
    return Eigenpairs(
        values, torch.eye(100, 2, dtype=torch.float64), torch.zeros(2), torch.tensor([True, True])
    )


def measured(size, largest):
    largest = np.array(largest, dtype=np.float64)[:, None]
    return BatchEigenvalues(size, 200, 100, "hessian", largest, -largest)


@pytest.fixture
def comparison(pairs):
    predictions = tuple(predict(pairs, 1e-3, size, 200) for size in (10, 40))
    return BatchComparison(
        predictions, (measured(10, [3.0, 3.1, 9.0]), measured(40, [3.0, 3.0, 3.0]))
    )


def test_a_comparison_shows_the_prediction_and_every_batch(comparison):
    axes = plot(comparison)
    line, points, full = axes.get_lines()
    assert list(line.get_xdata()) == [10, 40]
    assert list(line.get_ydata()) == [float(each.largest) for each in comparison.predictions]
    assert points.get_xydata().tolist() == [
        [10, 3.0],
        [10, 3.1],
        [10, 9.0],
        [40, 3.0],
        [40, 3.0],
        [40, 3.0],
    ]
    assert set(full.get_ydata()) == {3.0}
    share = f"additive: {float(comparison.within('additive')):.0%} within 1 sd"
    assert share in [text.get_text() for text in axes.get_legend().get_texts()]


def test_a_prediction_shows_its_bulk_and_outliers(pairs):
    found = predict(pairs, 1e-3, 10, 200)
    axes = plot(found)
    (span,) = axes.patches
    assert span.get_x() == pytest.approx(float(found.edges[0]))
    assert span.get_width() == pytest.approx(float(found.edges[1]) - float(found.edges[0]))
    seen = next(line for line in axes.get_lines() if line.get_marker() == "o")
    assert list(seen.get_xdata()) == [float(each.batch) for each in found.outliers]
    assert list(seen.get_ydata()) == [float(each) for each in found.overlaps]


def test_a_bulk_is_parted_from_its_outliers():
    fit = made("bulk")
    assert len(fit.outliers) == 2
    whole, near, doubts = charts_of(fit)
    assert whole.title == "2 outliers"
    bulk, outliers = whole.series
    assert list(outliers.x) == pytest.approx([float(one) for one in fit.outliers[::-1]])
    low, high = float(fit.lower), float(fit.upper)
    assert all(low <= x <= high for x in bulk.x)
    assert whole.x_bands == near.x_bands == (("edges of the bulk", low, high),)
    assert near.x_range[0] < low < high < near.x_range[1]
    assert (doubts.page_only, list(doubts.series[0].y)) == (True, list(fit.confidences))
    assert headline_of(fit, "fit").startswith("The bulk lies from -1.989 ± ")
    assert headline_of(fit, "fit").endswith(", with 2 outliers")
    assert len(plot(fit).axes) == 2
    # as one that was saved before nodes were kept
    bare = replace(fit, nodes=np.zeros((0, 0)), weights=np.zeros((0, 0)), dim=0)
    assert charts_of(bare) == [replace(doubts, page_only=False)]
    assert plot(bare).get_title() == "2 outliers"


def test_batches_show_both_ends():
    axes = plot(measured(10, [3.0, 4.0]))
    assert [list(line.get_ydata()) for line in axes.get_lines() if line.get_marker() == "o"] == [
        [3.0, 4.0],
        [-3.0, -4.0],
    ]
    assert axes.get_title() == "Eigenvalues of batches, hessian"
    assert caption(axes) == "Batches of 10 of 200 samples."
