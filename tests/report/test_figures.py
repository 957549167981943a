"""Figures: what they say, that they come from results alone, and that they change nothing else."""

import io
import subprocess
import sys

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

import lambdahat as lh
from lambdahat.report.figures import draw, plot
from lambdahat.report.spectral_charts import pool_probes
from lambdahat.report.style import level_texts, new_figure
from lambdahat.results import (
    Density,
    Eigenpairs,
    Estimate,
    Landscape,
    Moments,
    Result,
    Spectrum,
    Status,
    Variance,
)
from lambdahat.results.charts import Chart, Heat, Series, charts_of, value_text
from lambdahat.results.measurement import Measurement

OFFSETS = np.linspace(-1, 1, 21)
ACROSS, UP = np.meshgrid(OFFSETS, OFFSETS, indexing="ij")


def a_spectrum(probes=1):
    nodes = np.tile([-0.5, 0.0, 0.1, 4.0], (probes, 1))
    nodes[:, 2] += 0.05 * np.arange(probes)
    return Spectrum(
        nodes, np.tile([0.01, 0.6, 0.38, 0.01], (probes, 1)), np.full_like(nodes, 1e-6), dim=100
    )


def a_density():
    grid = np.linspace(-5, 5, 400)
    values = np.exp(-(grid**2) / 2) / np.sqrt(2 * np.pi)
    return Density(grid, values, 0.1 * values, 0.3)


def some_pairs(converged=(True, True, False)):
    status = Status.CONVERGED if all(converged) else Status.NOT_CONVERGED
    return Eigenpairs(
        torch.tensor([3.0, 2.0, -1.0]),
        torch.eye(3),
        torch.tensor([1e-6, 1e-3, 0.2]),
        torch.tensor(converged),
        9,
        status,
    )


def a_line():
    return Landscape(OFFSETS, 0.1 + OFFSETS + 0.3 * OFFSETS**2, 0.2 + OFFSETS**2, ("v₁",), (0.6,))


def a_plane():
    return Landscape(
        OFFSETS, 0.1 + 3 * ACROSS**2 + UP**2, 0.2 + 2 * ACROSS**2 + UP**2, ("v₁", "v₂")
    )


def caption(axes):
    """The small letters below a frame, in one line."""
    return " ".join(" ".join(text.get_text() for text in axes.texts).split())


RESULTS = {
    "spectrum": a_spectrum(),
    "probes": a_spectrum(3),
    "density": a_density(),
    "eigenpairs": some_pairs(),
    "line": a_line(),
    "plane": a_plane(),
    "moments": Moments(
        np.array([1.0, 0.5, 0.3]), np.array([0.0, 0.1, 0.1]), np.eye(3), "power", (0.0, 1.0), 5
    ),
    "scalar": Estimate(103.2, 1.3, 20, dof=9),
    "exact": Estimate(103.2),
    "elements": Estimate(torch.linspace(-1, 1, 50) ** 3, torch.full((50,), 0.1)),
}
LABELS = {
    "spectrum": ("eigenvalue λ", "share of eigenvalues"),
    "probes": ("eigenvalue λ", "share of eigenvalues"),
    "density": ("eigenvalue λ", "density of eigenvalues, per unit λ"),
    "eigenpairs": ("rank", "eigenvalue λ"),
    "line": ("offset along v₁", "loss, mean per sample"),
    "plane": ("offset along v₁", "offset along v₂"),
    "moments": ("order k", "tr Aᵏ / P"),
    "scalar": ("value", ""),
    "exact": ("value", ""),
    "elements": ("value of the element", "elements"),
}


@pytest.mark.parametrize("name", RESULTS)
def test_every_result_is_drawn_from_disk_with_its_labels(name, tmp_path):
    stored = Result.load(RESULTS[name].save(tmp_path / name))
    axes = plot(stored)
    assert (axes.get_xlabel(), axes.get_ylabel()) == LABELS[name]
    assert axes.get_title()
    axes.figure.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 2000


@pytest.mark.parametrize("name", RESULTS)
def test_a_given_axes_is_used(name):
    axes = new_figure().add_subplot()
    assert plot(RESULTS[name], axes) is axes


def test_the_caption_is_below_the_label_where_the_figure_has_room_for_it():
    axes = plot(a_spectrum())
    axes.set_title("A title of the reader's own")
    axes.figure.canvas.draw()
    (small,) = axes.texts
    assert small.get_text() == "P = 100, 1 probe, depth 4."
    assert small.get_window_extent().y1 <= axes.xaxis.label.get_window_extent().y0
    assert small.get_window_extent().y0 >= 0
    plain = Figure().add_subplot()  # would write over what is below
    assert plot(a_spectrum(), plain).texts[:] == []


GLOBAL_STATE = """
import sys
from lambdahat.report.figures import plot
from lambdahat.results import Estimate
assert "matplotlib" not in sys.modules
import matplotlib as mpl
before = mpl.rcParams.copy()
plot(Estimate(1.0, 0.1)).figure.canvas.draw()
assert "matplotlib.pyplot" not in sys.modules
assert mpl.rcParams.copy() == before
"""


def test_figures_import_matplotlib_late_and_leave_global_state_alone():
    subprocess.run([sys.executable, "-c", GLOBAL_STATE], check=True)


def test_the_callers_settings_are_respected():
    with mpl.rc_context({"axes.titlesize": 20}):
        before = dict(mpl.rcParams)
        plot(a_plane())
        assert dict(mpl.rcParams) == before


def test_stems_stand_at_the_nodes_with_log_weights():
    axes = plot(a_spectrum())
    (points,) = [line for line in axes.lines if line.get_marker() == "o"]
    np.testing.assert_allclose(points.get_xdata(), [-0.5, 0.0, 0.1, 4.0])
    np.testing.assert_allclose(points.get_ydata(), [0.01, 0.6, 0.38, 0.01])
    assert axes.get_yscale() == "log"
    assert axes.get_ylim()[0] < 0.01


def test_probes_are_pooled_into_one_measure():
    nodes, weights = pool_probes(a_spectrum(3))
    assert weights.sum() == pytest.approx(1.0)
    assert (nodes @ weights) == pytest.approx(float(a_spectrum(3).mean))
    # what every probe sees is one stem
    np.testing.assert_allclose(nodes, [-0.5, 0.0, 0.1, 0.15, 0.2, 4.0])
    assert weights[-1] == pytest.approx(0.01)


def test_density_band_is_the_interval_and_every_peak_is_in_sight():
    grid = np.linspace(-1, 10, 500)
    values = np.exp(-(grid**2) / 0.02) + 1e-5 * np.exp(-((grid - 9) ** 2) / 0.02)
    axes = plot(Density(grid, values, 0.1 * values, 0.1))
    assert axes.get_ylim()[0] < 1e-5
    band = axes.collections[0].get_paths()[0].vertices
    assert band[:, 1].max() == pytest.approx(1.196 * values.max(), rel=1e-3)


def test_eigenvalues_are_bars_with_residuals_and_the_unconverged_show():
    axes = plot(some_pairs())
    assert sorted(bar.get_height() for bar in axes.patches) == [-1.0, 2.0, 3.0]
    hollow = [bar.get_height() for bar in axes.patches if bar.get_facecolor()[:3] == (1, 1, 1)]
    assert hollow == [-1.0]
    assert "NOT_CONVERGED" in axes.get_title()
    whiskers = [segment for bars in axes.collections for segment in bars.get_segments()]
    assert whiskers[2][1][1] - whiskers[2][0][1] == pytest.approx(0.4, rel=1e-6)
    assert caption(axes).startswith("Bars: ± residual")
    assert caption(axes).endswith("Hollow: not converged (NOT_CONVERGED).")
    assert "Hollow" not in caption(plot(some_pairs((True,) * 3)))


def test_eigenvalues_of_both_ends_are_counted_from_the_end_that_they_are_of():
    matrix = torch.diag(torch.linspace(-3.0, 5.0, 40, dtype=torch.float64))

    def chart(which, k=2):
        (found,) = charts_of(lh.eigenpairs(matrix, k=k, which=which))
        return found

    both = chart("both", 3)
    assert list(both.series[0].x) == ["1", "2", "3", "P−2", "P−1", "P"]
    assert both.series[0].y[-1] == pytest.approx(-3.0)
    assert both.caption == "P = 40."
    for which, label in (
        ("largest", "rank"),
        ("smallest", "rank from the smallest"),
        ("magnitude", "rank by magnitude"),
    ):
        assert (chart(which).x_label, list(chart(which).series[0].x)) == (label, [1, 2])
    # all of them have their rank
    assert list(chart("both", 40).series[0].x) == list(range(1, 41))


def test_line_has_both_losses_and_the_parabola_of_the_curvature():
    axes = plot(a_line())
    lines = {line.get_label(): line for line in axes.lines}
    np.testing.assert_allclose(lines["training"].get_ydata(), a_line().loss)
    np.testing.assert_allclose(lines["held out"].get_ydata(), a_line().held_out)
    parabola = lines["parabola, vᵀHv = 0.6"]
    np.testing.assert_allclose(np.interp(OFFSETS, *parabola.get_data()), a_line().loss, atol=1e-4)


def test_plane_lays_the_first_direction_across():
    tilted = Landscape(OFFSETS, 1.0 + ACROSS, None, ("v₁", "v₂"))
    axes = plot(tilted)
    filled = axes.collections[0]
    lowest = next(path for path in filled.get_paths() if len(path.vertices))
    assert lowest.vertices[:, 0].max() < 0  # the low end of the loss is at the left
    assert np.ptp(lowest.vertices[:, 1]) == pytest.approx(2.0)


def test_the_centre_of_a_plane_does_not_set_the_marks_of_its_axis():
    axes = plot(a_plane())
    axes.figure.canvas.draw()
    assert len(axes.get_xticks()) > 3
    (centre,) = [line for line in axes.lines if line.get_label() == "centre"]
    assert centre.get_xydata().tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(("points", "place"), [(5, 2.0), (6, 2.5), (7, 3.0)])
def test_the_centre_of_a_coarse_plane_is_in_the_middle_of_its_cells(points, place):
    offsets = np.linspace(-3, 3, points)
    axes = plot(Landscape(offsets, np.add.outer(offsets**2, offsets**2)))
    (centre,) = [line for line in axes.lines if line.get_label() == "centre"]
    assert centre.get_xydata()[0] == pytest.approx([place, place])
    assert axes.get_xlim() == axes.get_ylim() == (-0.5, points - 0.5)


def test_a_place_among_cells_is_found_by_its_label():
    marks = Series("m", [0.1, 5.5, 20.0], [2.0, 1.0, 1.0], style="points")
    heat = Heat([10.0, 1.0, 0.1], [1.0, 2.0], [[1, 2, 3], [4, 5, 6]])
    axes = draw(Chart("", "x", "y", (marks,), heat=heat, x_lines=(("", 1.0),)))
    # half of the way between two labels, and none beyond the last
    np.testing.assert_allclose(axes.lines[0].get_xdata(), [2.0, 0.5, np.nan])
    np.testing.assert_allclose(axes.lines[0].get_ydata(), [1.0, 0.0, 0.0])
    assert list(axes.lines[1].get_xdata()) == [1.0, 1.0]
    named = Series("m", ["b"], ["c"], style="points")
    axes = draw(Chart("", "x", "y", (named,), heat=Heat(["a", "b"], ["c"], [[1, 2]])))
    assert axes.lines[0].get_xydata().tolist() == [[1.0, 0.0]]


def test_levels_of_a_shallow_plane_have_labels_of_their_own():
    axes = plot(Landscape(OFFSETS, 2.4 + 0.01 * (ACROSS**2 + UP**2)))
    texts = [text.get_text() for text in axes.texts if text.get_text()[:2] == "2."]
    assert len(texts) > 2
    assert all(len(text) > 4 for text in texts)
    assert len({*texts}) >= 3


@pytest.mark.parametrize(
    ("levels", "texts"),
    [
        ([2.35, 2.4, 2.45], ["2.35", "2.4", "2.45"]),
        ([0.0, 0.25, 0.5], ["0", "0.25", "0.5"]),
        ([-10.0, 0.0, 10.0], ["-10", "0", "10"]),
        ([0.0123, 1.0, 1234.0], ["0.012", "1", "1.2e+03"]),
        ([3.0, 3.0], ["3", "3"]),
    ],
)
def test_levels_have_as_many_digits_as_tell_them_apart(levels, texts):
    assert level_texts(levels) == texts


def test_plane_becomes_a_surface_on_three_dimensional_axes():
    axes = new_figure().add_subplot(projection="3d")
    assert plot(a_plane(), axes) is axes
    assert axes.get_zlabel() == "loss, mean per sample"
    axes.figure.canvas.draw()


def test_plane_of_a_loss_that_is_flat_or_overflows():
    steep = np.exp(8 * ACROSS**2)
    steep[0, 0] = np.inf
    for loss in (np.ones((21, 21)), steep):
        axes = plot(Landscape(OFFSETS, loss))
        axes.figure.canvas.draw()
        assert axes.get_xlim() == (OFFSETS[0], OFFSETS[-1])


def test_scalar_shows_its_students_interval():
    axes = plot(RESULTS["scalar"])
    (segment,) = axes.collections[0].get_segments()
    assert tuple(segment[:, 0]) == pytest.approx(RESULTS["scalar"].interval(0.95))
    assert axes.get_title() == "103.2 ± 1.3"
    assert plot(RESULTS["exact"]).get_title() == "103.2 (exact)"
    assert not plot(RESULTS["exact"]).collections
    plot(Estimate(1.0, float("inf"))).figure.canvas.draw()


@pytest.mark.parametrize(
    ("estimate", "text"),
    [
        (Estimate(103.2, 20.0), "103 ± 20"),
        (Estimate(1.23e-7, 2e-9), "1.230e-07 ± 2e-09"),
        (Estimate(0.0, 0.5), "0.00 ± 0.5"),
        (Estimate(float("nan"), 0.5), "nan ± 0.5"),
        (Estimate(-2.0), "-2 (exact)"),
        (Estimate(-2.0, float("nan")), "-2 (error unknown)"),
        (Estimate(-2.0, float("inf")), "at least -2"),
    ],
)
def test_value_text(estimate, text):
    assert value_text(estimate) == text


def test_a_group_of_estimates_is_a_list():
    ones = [Estimate(float(i), 0.5) for i in range(6)]
    cells = plot(Variance(*ones)).tables[0].get_celld()
    assert cells[0, 0].get_text().get_text() == "gradient_mean_norm"
    assert len(cells) == 12


def test_moments_show_their_students_interval():
    axes = plot(RESULTS["moments"])
    segments = axes.collections[0].get_segments()
    assert tuple(segments[1][:, 1]) == pytest.approx(RESULTS["moments"][1].interval(0.95))


def test_measurement_is_a_grid_of_panels_and_a_list_of_numbers(tmp_path):
    results = {  # two numbers, two panels
        "trace": Estimate(103.2, 1.3),
        "parts": {"a": Estimate(2.0)},
        "spectrum": a_spectrum(),
        "eigenpairs": some_pairs(),
    }
    measurement = Measurement(results, {"parameters": 100, "samples": 7, "loss": "cross_entropy"})
    measurement.save(tmp_path)
    figure = plot(Measurement.load(tmp_path))
    assert len(figure.axes) == 3
    assert [axes.get_title().split(":")[0] for axes in figure.axes[:2]] == [
        "spectrum",
        "eigenpairs",
    ]
    cells = [cell.get_text().get_text() for cell in figure.axes[2].tables[0].get_celld().values()]
    assert cells == ["trace", "103.2 ± 1.3", "parts.a", "2 (exact)"]
    figure.canvas.draw()


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(TypeError, match=r"result must be a result, got 3.0; .*charts_of\.register"):
        plot(3.0)
    with pytest.raises(ValueError, match="ax must be None for a Measurement"):
        plot(Measurement({"trace": Estimate(1.0)}), new_figure().add_subplot())
    with pytest.raises(ValueError, match="hold at least one result"):
        plot(Measurement({}))


@pytest.mark.parametrize("kind", ["one panel", "several"])
def test_a_notebook_shows_the_figure(kind):
    """IPython asks an object for its picture by this method; the figure is in no pyplot list."""
    estimate = Estimate(2.0, 0.1)
    drawn = plot(estimate if kind == "one panel" else {"a": estimate, "b": estimate})
    image = Image.open(io.BytesIO(drawn._repr_png_()))
    assert image.format == "PNG"
    assert min(image.size) > 100
