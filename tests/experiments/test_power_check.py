"""The power method's check, and the vector fields, of the regularization thesis."""

import numpy as np
import pytest
import torch

from lambdahat.experiments.kit.cells import Rows
from lambdahat.experiments.kit.claims import judge
from lambdahat.experiments.regularization.power_check import EXPERIMENT as POWER
from lambdahat.experiments.regularization.power_check import run as run_power
from lambdahat.experiments.regularization.vector_fields import EXPERIMENT as FIELDS
from lambdahat.experiments.regularization.vector_fields import _cosines, _loss, _uneven
from lambdahat.experiments.regularization.vector_fields import run as run_fields


def rows_of(experiment):
    return Rows(
        cell | row for cell in experiment.grid("smoke") for row in experiment.run(cell, "cpu")
    )


@pytest.fixture(scope="module")
def power():
    return rows_of(POWER)


@pytest.fixture(scope="module")
def fields():
    return rows_of(FIELDS)


def test_the_power_method_finds_the_eigenvalues_of_the_dense_matrix(power):
    for row in power:
        assert row["power"] == pytest.approx(row["exact"], rel=1e-3)
    assert [verdict.verdict for verdict in judge(POWER.claims(power))] == ["holds", "holds"]
    (table,) = POWER.tables(power)
    assert len(table.rows) == len(power.distinct("seed"))
    (chart,) = POWER.charts(power)
    assert chart.series[0].y == power.where(seed=0).values("exact")


def test_too_few_products_do_not_match(power):
    """The claim can fail: one sweep over a random basis is far from the eigenvalues."""
    cells = [cell | {"products": cell["k"]} for cell in POWER.grid("smoke")]
    rows = Rows(cell | row for cell in cells for row in run_power(cell, "cpu"))
    assert judge(POWER.claims(rows))[0].verdict == "does not hold"


def test_mnist_that_is_not_at_hand_raises_and_the_grid_stays():
    before = POWER.grid("cpu")
    assert POWER.grid("cpu") == before
    with pytest.raises(FileNotFoundError, match="run `lambdahat data fetch mnist`"):
        run_power(before[0], "cpu")


def test_the_metric_of_a_linear_path_has_its_closed_form(fields):
    """L = ½m(θ₁θ₂ − 1)², m = mean x²: Hθ = m(3θ₁θ₂ − 1)·(θ₂, θ₁)."""
    part = fields.where(activation="identity")
    second = 1 + 2 / (part[0]["samples"] - 1)  # the mean of x² on an even grid over [−√3, √3]
    for row in part:
        one, two = row["first"], row["second"]
        factor = second * (3 * one * two - 1)
        np.testing.assert_allclose(row["Metric"], [-factor * two, -factor * one], atol=1e-10)
        np.testing.assert_allclose(row["L2"], [-one, -two])
        assert row["loss"] == pytest.approx(0.5 * second * (one * two - 1) ** 2, abs=1e-10)


def test_the_teacher_has_no_loss():
    for cell in FIELDS.grid("smoke"):
        assert float(_loss(cell)(torch.ones(2, dtype=torch.float64))) == pytest.approx(
            0.0, abs=1e-15
        )


def test_what_the_figure_shows_holds(fields):
    assert {verdict.verdict for verdict in judge(FIELDS.claims(fields))} == {"holds"}
    (table,) = FIELDS.tables(fields)
    assert [row[:2] for row in table.rows] == [
        (a, f) for a in ("identity", "tanh") for f in ("L2", "Metric")
    ]


def test_claims_can_fail(fields):
    """Were Metric L2, it would point inward everywhere and spare neither parameter."""
    same = Rows(row | {"Metric": row["L2"]} for row in fields)
    assert [verdict.verdict for verdict in judge(FIELDS.claims(same))] == [
        "holds",
        *["does not hold"] * 2,
    ] * 2


def test_angles_and_shares():
    points = np.array([[1.0, 0.0], [0.0, 2.0], [8.0, 1.0]])
    steps = np.array([[-3.0, 0.0], [1.0, 0.0], [-0.1, -1.0]])
    np.testing.assert_allclose(_cosines(points, steps)[:2], [1.0, 0.0])
    assert _uneven(points[2:], steps[2:]) == 1.0
    assert _uneven(points[2:], steps[2:, ::-1] * 8) == 0.0


def test_arrows_start_at_the_points(fields):
    loss, decay, metric = FIELDS.charts(fields)[:3]
    assert loss.surface
    assert (
        loss.heat.values[0][-1]
        == fields.where(activation="identity", first=2.0, second=-2.0)[0]["loss"]
    )
    for chart in (decay, metric):
        strokes, tips = chart.series
        assert strokes.x[0::3] == fields.where(activation="identity").values("first")
        assert strokes.y[1::3] == tips.y
        assert set(strokes.y[2::3]) == {None}
    inward = np.array(decay.series[1].x) * np.array(decay.series[0].x[0::3])
    assert (inward >= 0).all()  # L2 shortens without passing the origin at this scale


def test_a_cell_is_a_function_of_its_settings():
    cell = FIELDS.grid("smoke")[1]
    assert run_fields(cell, "cpu") == run_fields(dict(cell), "cpu")
