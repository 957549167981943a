"""Figures of advice: their panels, labels and points, from the result alone."""

import numpy as np
import pytest
import torch
from torch import nn

from lambdahat._core.rng import generator
from lambdahat.problem import Problem
from lambdahat.randommatrix import advise
from lambdahat.report.figures import plot
from lambdahat.report.style import new_axes
from lambdahat.results import Result
from lambdahat.results.charts import charts_of


@pytest.fixture(scope="module")
def problem():
    rows = torch.randn(40, 3, generator=generator(0, "rows"), dtype=torch.float64)
    start = {"theta": torch.ones(3, dtype=torch.float64)}
    return Problem.from_function(lambda p, x: (x @ p["theta"]).square().mean(), start, rows)


def curves(axes):
    return {line.get_label(): line.get_xydata() for line in axes.get_lines()}


def test_two_panels_with_the_measured_points(problem, tmp_path):
    advice = advise(problem, "momentum", 4, 16)
    advice.save(tmp_path / "advice")
    rates, sharpness = plot(Result.load(tmp_path / "advice")).axes
    assert sharpness.get_xlabel() == rates.get_xlabel() == "batch size B"
    assert (sharpness.get_ylabel(), rates.get_ylabel()) == ("λ₁ of a batch", "learning rate")
    whole = curves(rates)["all data"]
    assert np.allclose(whole[:, 1], 2 * 1.9 / float(advice.levels.largest))
    (points,) = [
        box for box in rates.containers if box.get_label() == "largest stable, from batches"
    ]
    assert np.allclose(
        points[0].get_ydata(), [float(advice["largest stable rate", size]) for size in (4, 16)]
    )
    rule = curves(rates)["largest stable, from τ²"]
    assert (np.diff(rule[:, 1]) > 0).all()
    assert rule[-1, 1] <= whole[0, 1]


@pytest.mark.parametrize(
    ("optimizer", "label"), [("adam", "least epsilon"), ("lanczos-newton", "least damping")]
)
def test_damping_falls_as_the_inverse_of_the_effective_batch(problem, optimizer, label):
    advice = advise(problem, optimizer, 4, 16)
    axes = plot(advice, new_axes())
    assert axes.get_ylabel() == "damping"
    sizes, values = curves(axes)[label].T
    product = values * sizes / (1 - sizes / 40)
    assert np.allclose(product, product[0])
    assert np.isclose(np.interp(4, sizes, product), float(advice[label, 4]) * 4 / (1 - 4 / 40))


def test_of_single_batches_there_are_points_and_no_curves():
    x = torch.randn(24, 2, generator=generator(0, "normed"), dtype=torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 2)).double()
    normed = Problem(net, "cross_entropy", (x, (x[:, 0] > 0).long()), norm="train", batch_size=6)
    advice = advise(normed, "momentum", 6, 12, batches=3)
    rates, sharpness = plot(advice).axes
    assert [box.get_label() for box in sharpness.containers] == ["batches, measured"]
    names = ["largest stable rate, all noise", "largest stable rate, no noise"]
    assert [box.get_label() for box in rates.containers] == names
    assert (sharpness.get_ylabel(), rates.get_ylabel()) == ("λ₁ of a batch", "learning rate")
    first = charts_of(advice)[1]
    assert first.lines == ()
