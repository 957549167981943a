"""Figures of training runs."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from lambdahat.report.figures import plot
from lambdahat.report.style import new_axes
from lambdahat.results import Status
from lambdahat.training.history import Run


def run(**options):
    rows = tuple(
        {
            "kind": "epoch",
            "epoch": i,
            "step": 10 * i,
            "progress": float(i),
            "loss": 1.0 / i**3,
            "accuracy": 0.1 * i,
            "validation_loss": 1.0 / i,
            "validation_accuracy": 0.09 * i,
            "update_norm": 0.5,
            "gradient_norm": 0.5,
            "norm": 3.0 + i,
            "max_norm": 1.0,
            "distance": float(i),
            "learning_rate": 0.1,
            "seconds": float(i),
            "trace": 5.0 * i,
            "trace_stderr": 0.5,
            "trace_cost": 3.0,
            "trace_status": "CONVERGED",
        }
        for i in range(1, 6)
    )
    return Run(rows, best=rows[3], **options)


def test_a_panel_for_each_part():
    figure = plot(run())
    assert isinstance(figure, Figure)
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert labels == ["loss, mean per sample", "accuracy", "norm", "trace"]
    loss = figure.axes[0]
    lines = {line.get_label(): line for line in loss.get_lines()}
    assert lines["training"].get_ydata() == pytest.approx([1.0 / i**3 for i in range(1, 6)])
    assert lines["validation"].get_ydata() == pytest.approx([1.0 / i for i in range(1, 6)])
    assert (lines["best"].get_xdata()[0], lines["best"].get_ydata()[0]) == (4.0, 0.25)
    assert loss.get_yscale() == "log"
    (bars,) = figure.axes[3].containers
    (segments,) = [item.get_segments() for item in bars[2]]
    assert np.ptp(segments[0][:, 1]) == pytest.approx(2 * 1.96 * 0.5, rel=1e-4)


def test_one_panel_on_given_axes_says_how_it_ended():
    axes = new_axes()
    assert plot(run(ended="diverged", status=Status.TRAINING_DIVERGED), axes) is axes
    assert "diverged [TRAINING_DIVERGED]" in axes.get_title()


def test_a_run_without_accuracy_or_epochs():
    nan = float("nan")
    rows = tuple({**row, "accuracy": nan, "validation_accuracy": nan} for row in run().history)
    assert [axes.get_ylabel() for axes in plot(Run(rows)).axes] == [
        "loss, mean per sample",
        "norm",
        "trace",
    ]
    assert len(plot(Run(())).axes) == 1


def test_measurements_of_a_loop_of_ones_own_are_drawn_over_its_steps():
    rows = tuple(
        {"kind": "step", "epoch": 0, "step": i, "progress": float(i), "edge": 0.1 * i}
        for i in range(4)
    )
    (axes,) = plot(Run(rows, about={"progress": "step"})).axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "learning rate × sharpness")
