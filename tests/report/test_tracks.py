"""What trackers measured, drawn: which columns share a panel, and that the lines are the
numbers.
"""

import math

import numpy as np
import pytest

from lambdahat.report.figures import plot
from lambdahat.report.page import page
from lambdahat.report.run_charts import tracked_panels
from lambdahat.results.charts import charts_of
from lambdahat.training import TRACKERS, Run, make_tracker

OWN = {"kind", "epoch", "step", "progress", "loss"}


def run_of(columns, rows=3, **about):
    history = tuple(
        {
            "kind": "step",
            "epoch": 0,
            "step": i,
            "progress": float(i),
            "loss": 1.0,
            **{
                name: values[i] if isinstance(values, list) else values
                for name, values in columns.items()
            },
        }
        for i in range(rows)
    )
    return Run(history, about=about)


def test_every_column_of_every_tracker_has_a_panel_with_a_name_of_its_own():
    for name in TRACKERS:
        columns = make_tracker(name).columns
        panels = tracked_panels(run_of(dict.fromkeys(columns, 1.0)), OWN)
        assert sorted(c for names in panels.values() for c in names) == sorted(
            c for c in columns if not c.endswith(("_stderr", "_nbeta", "_localization"))
        )
        assert not set(panels) & set(columns) - {"trace"}, "a column without a label fell through"


def test_columns_that_share_an_axis_share_a_panel_and_others_stand_alone():
    found = {
        "edge": 1.0,
        "edge_threshold": 2.0,
        "edge_cost": 9.0,
        "edge_status": "CONVERGED",
        "top_1": 3.0,
        "top_2": 1.0,
        "top_drift": math.nan,
        "top_overlap": 0.5,
        "mine": 4.0,
        "llc": math.nan,
    }
    assert tracked_panels(run_of(found), OWN) == {
        "learning rate × sharpness": ["edge", "edge_threshold"],
        "largest eigenvalues": ["top_1", "top_2"],
        "span of the largest eigenvalues": ["top_overlap"],
        "mine": ["mine"],
    }


@pytest.mark.parametrize(
    ("gammas", "label"),
    [(2.0, ", γ = 2"), ([2.0, math.nan, 3.0], ", γ from 2 to 3"), (math.nan, "")],
)
def test_the_panel_of_the_learning_coefficient_says_at_which_gamma(gammas, label):
    run = run_of({"llc": 1.0, "llc_localization": gammas, "llc_nbeta": 9.0})
    assert tracked_panels(run, OWN) == {f"learning coefficient λ̂{label}": ["llc"]}


def panel(run, label):
    (axes,) = [axes for axes in plot(run).axes if axes.get_ylabel() == label]
    return axes


def test_lines_are_the_numbers_with_their_intervals():
    run = run_of(
        {"edge": [0.5, math.nan, 1.5], "edge_stderr": 0.1, "edge_threshold": 2.0}, progress="step"
    )
    axes = panel(run, "learning rate × sharpness")
    (line, _, (bars,)) = axes.containers[0]
    assert line.get_xydata().tolist() == [[0.0, 0.5], [2.0, 1.5]]
    ends = np.array([segment[:, 1] for segment in bars.get_segments()])
    assert ends == pytest.approx(
        np.array([[0.5 - 0.196, 0.5 + 0.196], [1.5 - 0.196, 1.5 + 0.196]]), rel=1e-4
    )
    (threshold,) = [each for each in axes.get_lines() if each.get_linestyle() == "--"]
    assert threshold.get_ydata().tolist() == [2.0, 2.0, 2.0]
    assert axes.get_xlabel() == "step"
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {"edge", "threshold"}


FAULT = "ValueError: max_gradients must be at least 1600"


@pytest.mark.parametrize(
    ("statuses", "told"),
    [
        ([FAULT] * 3, "Not measured: ValueError: max_gradients"),
        (["CONVERGED", FAULT, "NOT_MIXED"], "1 of 3 not measured: ValueError: max_gradients"),
    ],
)
def test_a_panel_says_why_nothing_was_measured(statuses, told):
    values = [math.nan if status == FAULT else 2.0 for status in statuses]
    run = run_of(
        {"llc": values, "wbic": values, "llc_localization": math.nan, "llc_status": statuses}
    )
    axes = panel(run, "learning coefficient λ̂")
    assert told in " ".join(" ".join(text.get_text() for text in axes.texts).split())
    (chart,) = [each for each in charts_of(run) if each.y_label == "learning coefficient λ̂"]
    assert chart.warning.startswith(told)
    assert len(chart.series) == math.isfinite(values[0])


def test_the_page_has_the_panel_of_a_tracker_that_failed(tmp_path):
    run = run_of({"llc": math.nan, "llc_status": FAULT})
    assert (
        "Not measured: ValueError: max_gradients" in page(run, tmp_path / "page.html").read_text()
    )


@pytest.mark.parametrize(
    ("values", "scale"),
    [([1.0, 2.0, 3.0], "linear"), ([0.001, 1.0, 2.0], "log"), ([-1.0, 0.001, 2.0], "linear")],
)
def test_values_of_many_sizes_are_drawn_by_their_logarithms(values, scale):
    axes = panel(run_of({"trace": values}), "trace")
    assert axes.get_yscale() == scale
    assert axes.get_xlabel() == "epoch"
