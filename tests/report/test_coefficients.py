"""Figures of curves, sweeps, volumes, temperatures and verifications."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from lambdahat.report.figures import plot
from lambdahat.report.style import new_figure
from lambdahat.results import Estimate, LearningCoefficient, Result, Sensitivity, Status
from lambdahat.singular.bayes import FreeEnergy, TemperatureRegression
from lambdahat.singular.curves import CoefficientCurve, Sweep, Trajectory
from lambdahat.singular.verification import CheckedCase, Verification
from lambdahat.singular.volumes import VolumeScaling
from tests.report.test_figures import caption

FINE, MIXING, GONE = Status.CONVERGED, Status.NOT_MIXED, Status.DIVERGED


def a_sweep():
    values = np.array([[2.0, 2.1, 2.4], [5.0, 5.5, np.nan]])
    return Sweep(
        np.array([1e-5, 1e-4, 1e-3]),
        np.array([80.0, 900.0]),
        ("B/log B, B = 512", "n/log n, n = 8000"),
        values,
        0.1 * values,
        np.array([[0.99, 0.9, 0.4], [0.95, 0.6, np.nan]]),
        ((MIXING, FINE, FINE), (MIXING, FINE, GONE)),
        (1e-4, 900.0),
        Estimate(5.2, 0.2, 100, FINE, 15.0),
        1.0,
        512,
        1000,
    )


def a_scaling(multiplicity=1, slope=1.5):
    log_volumes = -math.log(2) * np.arange(1.0, 21.0)
    noise = np.random.default_rng(0).normal(0.0, 0.05, (16, 20))
    log_levels = log_volumes / slope + noise
    return VolumeScaling(
        Estimate(slope, 0.02, 10), log_volumes, log_levels, multiplicity, 1.0, 10, FINE
    )


def a_regression():
    betas = np.array([0.1, 0.2, 0.4])
    return TemperatureRegression(
        Estimate(1.5, 0.1),
        Estimate(700.0, 0.5),
        betas,
        700.0 + 1.5 / betas,
        np.array([0.3, 0.2, 0.1]),
        0.8,
        1.0,
    )


def a_trajectory():
    settings = {
        "dof": 15.0,
        "nbeta": 100.0,
        "temperature": "n/log n, n = 647",
        "localization": 10.0,
    }
    statuses = (Status.NOT_A_MINIMUM, FINE, FINE)
    results = [
        LearningCoefficient(v, 0.1, 10, s, **settings)
        for v, s in zip((-1.0, 2.0, 3.0), statuses, strict=True)
    ]
    return Trajectory(np.array([0.0, 10.0, 20.0]), tuple(results))


def a_curve(axis="localization"):
    """λ̂ at three points, the last with a warning and the second without a slope."""
    grid, unknown = np.array([1.0, 4.0, 16.0]), Estimate(math.nan, math.nan)
    slopes = (Estimate(-0.1, 0.01), unknown, Estimate(-0.5, 0.01))
    results = []
    for place, value, slope, status in zip(
        grid, (3.0, 2.8, 2.0), slopes, (FINE, FINE, MIXING), strict=True
    ):
        settings = {"nbeta": 100.0, "localization": 10.0, axis: float(place)}
        results.append(
            LearningCoefficient(
                value,
                0.1,
                10,
                status,
                15.0,
                **settings,
                temperature="n/log n, n = 647",
                sensitivity=Sensitivity(slope, slope),
            )
        )
    return CoefficientCurve(
        axis, grid, tuple(results), 100.0 if axis == "localization" else 10.0, 4.0
    )


def a_free_energy():
    nbetas = np.array([1.0, 10.0, 100.0])
    return FreeEnergy(
        Estimate(210.0, 0.4), nbetas, np.array([0.5, 1.2, 1.5]), np.full(3, 0.05), 0.01, 500.0
    )


def row(name, error, truth=2.0, stderr=0.04, asymptotic=math.nan, truth_stderr=0.0):
    estimate = Estimate(truth * (1 + error), stderr, 1000, FINE, 15.0)
    return CheckedCase(
        name, estimate, Estimate(truth, truth_stderr), asymptotic, 100.0, 1.0, 2.0, 0
    )


def a_verification():
    rows = (
        row("quadratic", 0.01, asymptotic=2.1),
        row("crossing", 0.06, asymptotic=4.0),
        row("rank", -0.2),
        row("sampled", 0.02, truth_stderr=0.05),
    )
    return Verification(rows, 0, False)


@pytest.mark.parametrize(
    "make", [a_curve, a_sweep, a_scaling, a_regression, a_trajectory, a_free_energy, a_verification]
)
def test_they_are_drawn_from_disk_and_on_given_axes(make, tmp_path):
    stored = Result.load(make().save(tmp_path / "result"))
    plot(stored).figure.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 8000
    axes = new_figure().add_subplot()
    assert plot(stored, axes) is axes
    assert axes.get_xlabel()
    assert axes.get_title()


def labels(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_a_sweep_has_a_line_for_each_temperature_and_marks_the_choice():
    values, acceptance = plot(a_sweep()).axes
    assert labels(values) == [
        "nβ = 80 (B/log B, B = 512)",
        "nβ = 900 (n/log n, n = 8000)",
        "diverged",
        "chosen by llc: λ̂ = 5.20 ± 0.2",
    ]
    (star,) = [line for line in values.lines if line.get_marker() == "*"]
    assert (star.get_xdata()[0], star.get_ydata()[0]) == (1e-4, 5.2)
    (cross,) = [line for line in values.lines if line.get_marker() == "x"]
    assert cross.get_xdata()[0] == 1e-3
    hollow = [line for line in values.lines if line.get_markerfacecolor() == "white"]
    assert [line.get_ydata()[0] for line in hollow] == [2.0, 5.0]
    assert "Hollow: not converged (" in caption(values)
    assert (values.get_xscale(), values.get_ylabel()) == ("log", "λ̂")
    assert (acceptance.get_xlabel(), acceptance.get_ylabel()) == ("step size ε", "acceptance")
    assert acceptance.get_title() == "Acceptance of MALA steps"
    np.testing.assert_allclose(acceptance.lines[0].get_ydata(), a_sweep().acceptance[0])


def test_a_sweep_that_runs_over_decades_is_logarithmic():
    narrow = a_sweep()
    wide = dataclasses.replace(narrow, values=narrow.values * np.array([1.0, 10.0, 100.0]))
    negative = dataclasses.replace(wide, values=wide.values - 3)
    assert [plot(each).axes[0].get_yscale() for each in (narrow, wide, negative)] == [
        "linear",
        "log",
        "linear",
    ]


@pytest.mark.parametrize("multiplicity", [1, 2])
def test_volumes_have_the_fitted_slope_over_the_lower_half(multiplicity):
    scaling = a_scaling(multiplicity)
    axes = plot(scaling)
    (line,) = [line for line in axes.lines if line.get_label().startswith("slope")]
    np.testing.assert_allclose(line.get_xdata(), scaling.levels[10:])
    logs = np.log(line.get_ydata()) - (multiplicity - 1) * np.log(
        np.log(scaling.levels[0] / scaling.levels[10:])
    )
    np.testing.assert_allclose(np.diff(logs) / np.diff(np.log(line.get_xdata())), 1.5)
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert line.get_label() == "slope λ = 1.500 ± 0.02" + (", m = 2" if multiplicity == 2 else "")


def test_volumes_without_a_slope_are_drawn():
    axes = plot(
        VolumeScaling(
            Estimate(math.nan, math.nan),
            np.array([-0.7, -1.4]),
            np.zeros((16, 2)) - 1.0,
            1,
            1.0,
            10,
            Status.PRECISION_LIMIT,
        )
    )
    axes.figure.canvas.draw()
    assert "[PRECISION_LIMIT]" in axes.get_title()


def test_temperatures_lie_above_the_intercept_on_the_line():
    axes = plot(a_regression())
    (points,) = [line for line in axes.lines if line.get_marker() == "o"]
    (line,) = [line for line in axes.lines if line.get_label().startswith("slope")]
    np.testing.assert_allclose(points.get_xdata(), [10.0, 5.0, 2.5])
    np.testing.assert_allclose(points.get_ydata(), [15.0, 7.5, 3.75])
    np.testing.assert_allclose(
        np.interp([2.5, 10.0], line.get_xdata(), line.get_ydata()), [3.75, 15.0]
    )
    assert caption(axes).startswith("Intercept 700.00 ± 0.5, χ² per degree of freedom 0.8. ")


def test_a_trajectory_shows_every_checkpoint_and_what_is_wrong_with_it():
    axes = plot(a_trajectory())
    np.testing.assert_allclose(axes.lines[0].get_data(), [[0.0, 10.0, 20.0], [-1.0, 2.0, 3.0]])
    assert tuple(axes.collections[0].get_segments()[1][:, 1]) == pytest.approx(
        a_trajectory().results[1].interval(0.95)
    )
    (hollow,) = [line for line in axes.lines if line.get_markerfacecolor() == "white"]
    np.testing.assert_allclose(hollow.get_data(), [[0.0], [-1.0]])
    assert axes.get_title() == "λ̂ along training"
    assert caption(axes).startswith("At nβ = 100 (n/log n, n = 647), γ = 10. ")
    assert caption(axes).endswith("Hollow: not converged (NOT_A_MINIMUM).")


def test_a_curve_has_its_band_tangents_warnings_and_the_rule():
    curve = a_curve()
    axes = plot(curve)
    assert (axes.get_xscale(), axes.get_xlabel(), axes.get_ylabel()) == (
        "log",
        "localization γ",
        "λ̂",
    )
    assert axes.get_title() == "λ̂ over γ"
    assert caption(axes) == (
        "At nβ = 100 (n/log n, n = 647). Bands: 95 % interval. Hollow: not converged (NOT_MIXED)."
    )
    assert labels(axes) == ["λ̂", "slope dλ̂/d ln γ", "default γ = 4"]
    low, high = curve.results[0].interval(0.95)
    edges = axes.collections[0].get_paths()[0].vertices
    assert {low, high} <= set(edges[edges[:, 0] == 1.0][:, 1])
    named = {line.get_label(): line for line in axes.lines}
    np.testing.assert_allclose(named["λ̂"].get_data(), [[1.0, 4.0, 16.0], [3.0, 2.8, 2.0]])
    pieces = named["slope dλ̂/d ln γ"].get_xydata()
    assert np.isnan(pieces[2, 1])  # a gap between the two tangents whose slope is known
    for piece, place, slope in zip((pieces[:2], pieces[3:]), (0, 2), (-0.1, -0.5), strict=True):
        x, y = np.log(piece[:, 0]), piece[:, 1]
        assert np.diff(y)[0] / np.diff(x)[0] == pytest.approx(slope)
        assert (x.mean(), y.mean()) == pytest.approx(
            (np.log(curve.grid[place]), curve.values[place])
        )
    (hollow,) = [line for line in axes.lines if line.get_markerfacecolor() == "white"]
    assert list(hollow.get_xdata()) == [16.0]
    assert list(named["default γ = 4"].get_xdata()) == [4.0, 4.0]


def test_a_curve_over_temperatures_says_which_gamma():
    axes = plot(a_curve("nbeta"))
    assert axes.get_title() == "λ̂ over nβ"
    assert caption(axes).startswith("At γ = 10. ")
    assert "n/ln n = 4" in labels(axes)
    bare = dataclasses.replace(a_curve("nbeta"), default=math.nan)
    assert not [label for label in labels(plot(bare)) if label.startswith("n/ln n")]


def test_a_curve_of_one_point_is_drawn(tmp_path):
    curve = a_curve()
    one = CoefficientCurve(
        curve.axis, curve.grid[:1], curve.results[:1], curve.fixed, curve.default
    )
    plot(one).figure.savefig(tmp_path / "one.png")


def test_the_free_energy_is_the_area_under_the_coefficient():
    axes = plot(a_free_energy())
    assert axes.get_xscale() == "log"
    np.testing.assert_allclose(axes.lines[0].get_ydata(), [0.5, 1.2, 1.5])
    assert axes.get_title() == "Free energy 210.00 ± 0.4"


def test_a_verification_shows_relative_deviations_by_verdict():
    axes = plot(a_verification())
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        "quadratic",
        "crossing",
        "rank",
        "sampled",
    ]
    assert labels(axes) == ["agrees (2)", "near (1)", "fails (1)", "λ as n → ∞", "± 15 %"]
    shown = {
        line.get_ydata()[0]: line.get_xdata()[0] for line in axes.lines if line.get_marker() == "o"
    }
    assert shown[1] == pytest.approx(6.0)
    assert shown[2] == pytest.approx(-20.0)
    (limit,) = [line for line in axes.lines if line.get_marker() == "D"]
    assert limit.get_xdata()[0] == pytest.approx(5.0)
    # what lies beyond the axis is told
    assert [text.get_text() for text in axes.texts][:2] == ["", "+100 %"]
    told = "2 of 4 intervals contain the exact value; median error 4.0%, largest 20.0%."
    assert caption(axes).endswith(f"{told} Bars: 95 % interval.")


def test_the_bars_hold_the_errors_of_both():
    axes = plot(Verification((row("sampled", 0.02, stderr=0.03, truth_stderr=0.04),), 0, False))
    (segment,) = axes.collections[0].get_segments()
    # Welch: 116 degrees of freedom
    half = 100 * stats.t.ppf(0.975, 0.05**4 / (0.03**4 / 15)) * 0.05 / 2.0
    assert tuple(segment[:, 0]) == pytest.approx((2.0 - half, 2.0 + half), rel=1e-3)
