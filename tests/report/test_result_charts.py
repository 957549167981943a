"""The contract of every kind of result: charts, both drawings of them, and the result's own
numbers in each.
"""

import json
import math
from dataclasses import dataclass

import numpy as np
import pytest

import lambdahat as lh
from lambdahat.report.figures import draw, plot
from lambdahat.report.page import slug
from lambdahat.report.plotly_charts import figure_of
from lambdahat.report.sections import fields_table, section_of_result, tables_of
from lambdahat.results import Estimate, Result, Status
from lambdahat.results.charts import Chart, Series, charts_of, is_number
from tests.report.kinds import KINDS, kinds_of_library, made, numbers_in, numbers_of
from tests.report.pages import Reader
from tests.report.test_chains import a_coefficient
from tests.report.test_coefficients import a_curve, a_sweep, a_trajectory
from tests.report.test_figures import RESULTS, caption
from tests.report.test_training import run as a_run


def kinds_without_charts():
    """The result classes that no function is registered for, by name."""
    return sorted(set(kinds_of_library()) - {type(made(name)).__name__ for name in KINDS})


def drawn_by_matplotlib(result):
    """Every number in the figure: of lines, bars, error bars, maps and contours, and those that
    are written.
    """
    figure = plot(result).figure
    figure.canvas.draw()
    found, texts = [], [figure.get_suptitle()]
    for axes in figure.axes:
        found += [number for line in axes.lines for number in np.ravel(line.get_xydata())]
        found += [number for bar in axes.patches for number in (bar.get_height(), bar.get_width())]
        for each in axes.collections:
            paths = each.get_paths() if hasattr(each, "get_paths") else []
            found += [number for path in paths for number in np.ravel(path.vertices)]
            found += [getattr(each, "zmin", math.nan), getattr(each, "zmax", math.nan)]
        found += [number for image in axes.images for number in np.ravel(image.get_array())]
        texts += [text.get_text() for text in (axes.title, *axes.texts)]
        texts += axes.get_legend_handles_labels()[1]
        texts += [
            cell.get_text().get_text()
            for table in axes.tables
            for cell in table.get_celld().values()
        ]
    return found, " ".join(texts)


def drawn_on_the_page(result):
    """Every number in the figures of the section, and those that its cards, lists, titles and
    captions tell.
    """
    section = section_of_result("name", result)
    found = []
    for chart in section.charts:
        figure = json.loads(json.dumps(figure_of(chart), allow_nan=False))
        parts = [
            trace.get(key, []) for trace in figure["data"] for key in ("x", "y", "customdata", "z")
        ]
        found += [
            number for part in parts for number in flat(part) if isinstance(number, int | float)
        ]
        found += [
            shape[key] for shape in figure["layout"].get("shapes", []) for key in ("x0", "y0")
        ]
    texts = [
        text
        for chart in section.charts
        for text in (chart.title, chart.caption, *sum(chart.rows, ()))
    ]
    texts += [one.name for chart in section.charts for one in chart.series]
    texts += [text for chart in section.charts for one in chart.series for text in one.texts]
    return found, " ".join([*texts, *(card.value for card in section.cards)])


def flat(part):
    return (
        [number for inner in part for number in flat(inner)] if isinstance(part, list) else [part]
    )


def check_numbers(name, drawn):
    found, text = drawn(made(name))
    found = np.array([number for number in found if math.isfinite(number)])
    written, expected = np.array(numbers_in(text)), numbers_of(name)
    assert expected or name in ("Table", "Verdict")  # these two are texts
    for number in expected:
        near = (
            np.isclose(found, number, rtol=1e-6, atol=1e-12).any()
            or np.isclose(written, number, rtol=1e-5).any()
        )
        assert near, f"{number} is not in the figure of {name}"


def check_charts(name):
    result = made(name)
    charts = charts_of(result)
    assert charts
    for chart in charts:
        assert chart.title
        assert chart.rows or chart.y_label
        assert chart.rows or chart.x_label or chart.horizontal
        assert chart.rows or figure_of(chart)["data"]
    section = section_of_result("name", result)
    assert section.cards if is_number(result) else section.charts or section.cards
    titles = [chart.title for chart in section.charts]
    assert is_number(result) or titles == [chart.title for chart in charts if chart.title in titles]


@pytest.mark.parametrize("drawn", [drawn_by_matplotlib, drawn_on_the_page])
@pytest.mark.parametrize("name", KINDS)
def test_both_figures_of_every_kind_hold_the_numbers_of_the_result(name, drawn):
    check_numbers(name, drawn)


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_has_charts_with_titles_and_labels(name):
    check_charts(name)


def test_results_without_charts_of_their_own_show_their_numbers_all_the_same():
    names = kinds_without_charts()
    assert len(names) > 20
    for name in names:
        check_charts(name)
        check_numbers(name, drawn_by_matplotlib)
        check_numbers(name, drawn_on_the_page)


def test_the_page_has_a_figure_of_every_kind_that_is_more_than_a_number(tmp_path):
    path = lh.page({name: made(name) for name in KINDS}, tmp_path / "page.html")
    reader = Reader(path.read_text(encoding="utf-8"))
    places = [
        str(attributes["data-section"])
        for attributes in reader.all("div")
        if "data-section" in attributes
    ]
    for name in KINDS:
        section = slug(name)
        assert places.count(section) == len(reader.payload(section)["charts"])
        assert section in places or is_number(made(name)), f"{name} has no figure on the page"


def test_every_registered_kind_has_an_example():
    kinds = {kind for kind in charts_of.registry if kind.__module__.startswith("lambdahat.")}
    assert kinds <= {parent for name in KINDS for parent in type(made(name)).__mro__}
    assert {type(made(name)).__name__ for name in KINDS if isinstance(made(name), Result)} <= set(
        kinds_of_library()
    )


@dataclass(frozen=True)
class Trend(Result):
    slope: Estimate
    years: tuple[int, ...]
    values: tuple[float, ...]


def test_one_function_gives_a_type_of_ones_own_both_figures(tmp_path):
    trend = Trend(Estimate(0.5, 0.1), (2001, 2002), (1.25, 1.75))
    # before it is registered
    assert [chart.title for chart in charts_of(trend)] == ["years", "values", "Trend"]

    @charts_of.register
    def _(trend: Trend) -> list[Chart]:
        points = Series("measured", trend.years, trend.values, style="points")
        return [Chart("A trend", "year", "value", (points,), caption=f"Slope {trend.slope}.")]

    axes = lh.plot(trend)
    (line,) = axes.lines
    assert line.get_xydata().tolist() == [[2001, 1.25], [2002, 1.75]]
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == ("A trend", "year", "value")
    assert caption(axes) == f"Slope {trend.slope}."
    page = Reader(lh.page({"mine": trend}, tmp_path / "page.html").read_text(encoding="utf-8"))
    (figure,) = page.payload("mine")["charts"]
    assert (figure["data"][0]["x"], figure["data"][0]["y"]) == ([2001, 2002], [1.25, 1.75])
    assert f"Slope {trend.slope}." in page.texts["p"]
    measured = lh.plot({"mine": trend, "other": Estimate(2.0)})  # inside other results as well
    assert measured.axes[0].get_title() == "mine: A trend"


def series(result, place=0):
    return {one.name: one for one in charts_of(result)[place].series}


def test_eigenvalues_have_their_residuals():
    found = series(RESULTS["eigenpairs"])
    assert found["eigenvalues"].y == [3.0, 2.0, -1.0]
    assert found["eigenvalues"].hollow == [2]
    assert found["eigenvalues"].error[:2] == pytest.approx([1e-6, 1e-3])


def test_stems_are_the_spectrum():
    stems = series(RESULTS["spectrum"])["Ritz values"]
    assert (stems.x, stems.y) == ([-0.5, 0.0, 0.1, 4.0], [0.01, 0.6, 0.38, 0.01])


def test_a_density_keeps_its_peak():
    density = RESULTS["density"]
    drawn = series(density)["density"]
    assert max(drawn.y, key=lambda y: y or 0.0) == density.values.max()
    assert drawn.error[0] == pytest.approx(1.96 * density.stderr[0], rel=1e-3)


def test_a_line_has_both_losses_and_its_parabola():
    line = RESULTS["line"]
    found = series(line)
    assert found["training"].y == line.loss.tolist()
    assert found["held out"].y == line.held_out.tolist()
    drawn = found["parabola, vᵀHv = 0.6"]
    told = [0.1 + x + 0.3 * x * x for x in drawn.x]  # the loss is one itself
    assert drawn.y == pytest.approx(told)


def test_a_plane_lies_the_right_way_round():
    plane = RESULTS["plane"]
    contours, surface = charts_of(plane)
    assert (contours.surface, surface.surface) == (False, True)
    assert contours.heat.values[0][3] == plane.loss[3, 0]
    assert contours.heat.beside[0][3] == plane.held_out[3, 0]


def test_the_running_mean_ends_at_the_mean_and_lambda_stands_beside_it():
    coefficient = a_coefficient()
    found = series(coefficient)
    assert found["all chains"].y[-1] == pytest.approx(coefficient.chains.energies.mean())
    assert found["chain 2"].y[-1] == pytest.approx(coefficient.chains.energies[1].mean())
    final = found["λ̂ = 1.90 ± 0.1"]
    assert (final.x, final.y) == ([200], [1.9])
    assert final.error == pytest.approx(
        [(coefficient.interval()[1] - coefficient.interval()[0]) / 2]
    )


def test_what_diverged_is_a_gap_and_warnings_have_a_name():
    assert math.isnan(series(a_sweep())["nβ = 900 (n/log n, n = 8000)"].y[-1])
    assert series(a_trajectory())["λ̂"].statuses[0] == "NOT_A_MINIMUM"


def test_a_curve_has_its_tangents_the_rule_and_a_table():
    found = series(a_curve())
    assert found["λ̂"].y == [3.0, 2.8, 2.0]
    assert found["λ̂"].hollow == [2]
    tangents = found["slope dλ̂/d ln γ"]
    assert [y is None for y in tangents.y] == [False, False, True, False, False]
    assert (tangents.y[0] + tangents.y[1]) / 2 == pytest.approx(3.0)
    (chart,) = charts_of(a_curve())
    assert chart.x_lines == (("default γ = 4", 4.0),)
    assert chart.below.startswith("At nβ = 100 (n/log n, n = 647). Bands: 95 % interval.")
    drawn = {trace["name"]: trace for trace in figure_of(chart)["data"]}
    assert drawn[tangents.name]["mode"] == "lines"
    hollow = 1
    assert len(draw(chart).lines) == len(chart.series) + len(chart.x_lines) + hollow
    assert tables_of("", a_curve())[0].rows[0][:2] == ("1", "100")
    section = section_of_result("curve", a_curve())
    assert section.notes == (f"NOT_MIXED: {Status.NOT_MIXED.value}",)


def test_gamma_stands_beside_the_coefficient():
    (card,) = section_of_result("llc", a_coefficient()).cards
    assert card.detail.endswith("; nβ = 100, γ = 2")
    assert ("nβ, γ", "100, 2") in charts_of(a_coefficient())[-1].rows
    assert charts_of(a_trajectory())[0].caption == "At nβ = 100 (n/log n, n = 647), γ = 10."
    assert "γ = 1, " in charts_of(a_sweep())[0].caption


def test_a_run_has_what_it_tracked_with_its_error():
    charts = {chart.y_label: chart for chart in charts_of(a_run())}
    assert list(charts) == ["loss, mean per sample", "accuracy", "norm", "trace"]
    assert charts["loss, mean per sample"].y_log
    assert charts["trace"].series[0].error == pytest.approx([1.96 * 0.5] * 5, rel=1e-4)
    assert section_of_result("run", a_run()).rows[2]["trace"] == 15.0


def test_numbers_are_cards_and_groups_are_opened():
    bad = Estimate(2.0, 0.5, 3, Status.BUDGET_SPENT)
    (card,) = section_of_result("trace", bad).cards
    assert (card.label, card.value) == ("trace", "2.00 ± 0.5")
    assert card.detail == "95 %: 1.02 to 2.98"
    assert card.remedy.startswith("BUDGET_SPENT: ")
    (fine,) = section_of_result("trace", Estimate(5.2634894, 1.1e-6)).cards
    assert fine.detail == "95 %: 5.26348724 to 5.26349156"
    cards = section_of_result("layers", {"a": Estimate(1.0), "b": Estimate(2.0)}).cards
    assert [card.label for card in cards] == ["a", "b"]


def test_an_unknown_kind_is_its_table_of_fields():
    table = fields_table({"what": "text", "matrix": np.zeros((2, 3))})
    assert table.rows == (("what", "text"), ("matrix", "ndarray of shape (2, 3)"))
