"""Charts as plotly and matplotlib draw them: the numbers are those of the chart, and gaps stay
gaps.
"""

import dataclasses
import json
import math

import numpy as np
import pytest

from lambdahat.report.figures import draw
from lambdahat.report.page import align, write_page
from lambdahat.report.plotly_charts import COLOURS, describe_chart, figure_of
from lambdahat.report.sections import Section
from lambdahat.results.charts import Chart, Heat, Series
from tests.report.pages import Reader

NAN = math.nan
LINES = Chart(
    "Loss",
    "epoch",
    "loss",
    (
        Series("SGD", [1, 2, 3, 4], [4.0, None, 2.0, 1.0], [0.5, 0.5, NAN, 0.25]),
        Series("NGD", [1, 2], [3.0, 1.5], style="points"),
        Series("SGD, paper", [2], [2.5], style="points", published=True),
        Series("other", [2], [2.5], style="points", published=True),
    ),
    y_log=True,
    lines=(("chance", 2.3),),
)
OURS = Series("tanh", ["a", "b"], [1.0, 2.0], [0.1, 0.2], "bars")
BARS = Chart(
    "Norms",
    "rule",
    "norm",
    (OURS, Series("tanh (thesis)", ["a", "b"], [1.5, NAN], None, "bars", True)),
)
CELLS = Chart(
    "Cells", "α", "ε", heat=Heat([0.1, 1.0, 10.0], ["low", "high"], [[1, 2, 3], [4, NAN, 6]], "λ̂")
)
OFFSETS = [float(x) for x in np.linspace(-1, 1, 9)]
FIELD = Heat(OFFSETS, OFFSETS, [[x * x + 2 * y for x in OFFSETS] for y in OFFSETS], "loss")
STEMS = Chart(
    "Stems", "λ", "share", (Series("Ritz", [0.0, 2.0], [0.9, 0.1], style="stems"),), y_log=True
)
STEPS = Chart(
    "Steps", "step", "rate", (Series("rate", [0, 1, 2], [1.0, 0.5, 0.1], [0.1, 0.1, 0.1], "step"),)
)
ALL = {
    "lines": LINES,
    "bars": BARS,
    "cells": CELLS,
    "stems": STEMS,
    "steps": STEPS,
    "contours": Chart("Field", "x", "y", heat=FIELD),
    "surface": Chart("Field", "x", "y", heat=FIELD, surface=True),
}


@pytest.mark.parametrize("chart", ALL.values(), ids=ALL)
def test_a_figure_is_json_without_nan(chart):
    json.dumps(figure_of(chart), allow_nan=False)


def traces(chart):
    return {
        trace["name"]: trace for trace in figure_of(chart)["data"] if trace.get("showlegend", True)
    }


def test_a_line_has_its_numbers_its_gaps_and_a_band_in_two_parts():
    sgd = traces(LINES)["SGD"]
    assert (sgd["x"], sgd["y"], sgd["mode"]) == ([1, 2, 3, 4], [4, None, 2, 1], "lines+markers")
    (band,) = [trace for trace in figure_of(LINES)["data"] if trace.get("fill") == "toself"]
    assert band["legendgroup"] == sgd["legendgroup"]  # switched off together
    assert band["x"] == [1, 1, None, 3, 4, 4, 3]
    assert band["y"] == [3.5, 4.5, None, 2, 0.75, 1.25, 2]


def test_a_band_on_a_logarithmic_axis_stays_above_zero():
    low = Chart("", "x", "y", (Series("s", [1, 2], [1.0, 2.0], [5.0, 0.5]),), y_log=True)
    assert figure_of(low)["data"][0]["y"] == [0.1, 1.5, 2.5, 6]


def test_published_points_are_diamonds_in_the_colour_of_what_they_stand_beside():
    found = traces(LINES)
    assert found["SGD, paper"]["marker"] == {"color": "@s0", "size": 9, "symbol": "diamond"}
    assert found["NGD"]["marker"]["color"] == "@s1"
    assert found["other"]["marker"]["color"] == "@ink"
    assert traces(BARS)["tanh (thesis)"]["marker"]["pattern"]["fgcolor"] == "@s0"


def test_a_mark_on_a_logarithmic_axis_is_where_plotly_wants_it():
    layout = figure_of(LINES)["layout"]
    assert layout["shapes"][0]["y0"] == 2.3
    assert layout["annotations"][0]["y"] == pytest.approx(math.log10(2.3))
    assert layout["yaxis"]["type"] == "log"


def test_errors_of_bars_and_names_of_cells():
    assert traces(BARS)["tanh"]["error_y"]["array"] == [0.1, 0.2]
    assert figure_of(BARS)["layout"]["xaxis"]["type"] == "category"
    (cells,) = figure_of(CELLS)["data"]
    assert (cells["type"], cells["x"], cells["z"]) == (
        "heatmap",
        [0.1, 1, 10],
        [[1, 2, 3], [4, None, 6]],
    )
    assert figure_of(CELLS)["layout"]["xaxis"]["type"] == "category"


def test_a_fine_grid_is_contours_or_a_surface():
    kinds = [figure_of(ALL[name])["data"][0] for name in ("contours", "surface")]
    assert [trace["type"] for trace in kinds] == ["contour", "surface"]
    assert all(trace["z"][0][-1] == pytest.approx(1 - 2) for trace in kinds)  # x = 1, y = −1


def test_names_are_no_markup():
    hostile = Chart("", "<b>x</b>", "y", (Series('<a href="http://x">', [1], [1.0]),))
    found = figure_of(hostile)
    assert found["data"][0]["name"] == '&lt;a href="http://x"&gt;'
    assert found["layout"]["xaxis"]["title"]["text"] == "&lt;b&gt;x&lt;/b&gt;"


@pytest.mark.parametrize("style", ["line", "points", "bars"])
def test_no_two_of_many_series_look_alike(style):
    many = Chart(
        "",
        "x",
        "y",
        tuple(Series(f"s{i}", [1, 2], [i, i], style=style) for i in range(4 * COLOURS)),
    )
    looks = [json.dumps([trace["marker"], trace.get("line")]) for trace in traces(many).values()]
    assert len(set(looks)) == 4 * COLOURS
    marks = [json.dumps(trace["marker"]) for trace in traces(many).values()]
    assert len(set(marks)) == 4 * COLOURS  # without lines, too


def test_what_is_published_of_many_series_has_their_marks():
    ours = [Series(f"series {i:02}", [1], [1.0], style="points") for i in range(COLOURS + 1)]
    told = [
        Series(f"series {i:02}, paper", [1], [1.0], style="points", published=True)
        for i in (0, COLOURS)
    ]
    found = traces(Chart("", "x", "y", (*ours, *told)))
    assert [found[one.name]["marker"] for one in told] == [
        {"color": "@s0", "size": 9, "symbol": "diamond"},
        {"color": "@s0", "size": 9, "symbol": "diamond-wide"},
    ]


@pytest.mark.parametrize("style", ["line", "points"])
def test_matplotlib_draws_no_two_of_many_alike(style):
    many = Chart(
        "", "x", "y", tuple(Series(f"s{i}", [1, 2], [i, i], style=style) for i in range(20))
    )
    lines = [
        line
        for line in draw(many).get_lines()
        if line.get_marker() != "None" and len(line.get_xdata()) == 2
    ]
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == 20


def test_words_hold_the_numbers():
    words = describe_chart(LINES)
    assert words.startswith(
        "loss over epoch. SGD: 4 at 1 to 1 at 4, between 1 and 4; NGD: 3 at 1 to 1.5 at 2"
    )
    assert words.endswith("a line at 2.3 marks chance.")
    assert describe_chart(CELLS) == "Map of λ̂ over α and ε: between 1 and 6."
    assert "no values" in describe_chart(Chart("", "x", "y", (Series("s", [1], [NAN]),)))


def test_an_unknown_style_is_refused():
    for what, name in (("style", "pie"), ("mark", "moon"), ("colour", "pink")):
        with pytest.raises(
            ValueError, match=rf"the {what} of series 's' must be one of '.*got '{name}'"
        ):
            Series("s", [1], [1.0], **{what: name})


@pytest.mark.parametrize("chart", ALL.values(), ids=ALL)
def test_matplotlib_draws_the_same(chart, tmp_path):
    axes = draw(chart)
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == (
        chart.title,
        chart.x_label,
        chart.y_label,
    )
    axes.figure.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 4000


def test_matplotlib_has_the_numbers():
    axes = draw(LINES)
    (line,) = [one for one in axes.get_lines() if one.get_label() == "SGD"]
    assert np.array_equal(line.get_ydata(), [4.0, NAN, 2.0, 1.0], equal_nan=True)
    assert axes.get_yscale() == "log"
    bars = draw(BARS)
    assert [patch.get_height() for patch in bars.patches[:3]] == [1.0, 2.0, 1.5]
    assert [label.get_text() for label in bars.get_xticklabels()] == ["a", "b"]
    assert draw(STEMS).collections[0].get_segments()[1][1].tolist() == [2.0, 0.1]
    assert draw(LINES, axes) is axes


def test_names_below_an_axis_are_in_short_lines_and_stay_whole_in_the_data():
    names = ["FFNN 2 × 64 on Fashion-MNIST", "a<b", 3]
    layout = figure_of(Chart("", "net", "loss", (Series("s", names, [1, 2, 3], style="bars"),)))[
        "layout"
    ]
    assert layout["xaxis"]["tickvals"] == ["FFNN 2 × 64 on Fashion-MNIST", "a&lt;b", "3"]
    assert layout["xaxis"]["ticktext"] == ["FFNN 2 × 64 on<br>Fashion-MNIST", "a&lt;b", "3"]
    assert (
        figure_of(Chart("", "net", "", (Series("s", names, [1, 2, 3]),)))["data"][0]["x"][0]
        == names[0]
    )
    heat = figure_of(CELLS)["layout"]
    assert "ticktext" not in heat["xaxis"]  # numbers
    assert "ticktext" not in heat["yaxis"]  # beside an axis two lines would be too many


@pytest.mark.parametrize(("count", "size"), [(299, 6), (300, 3)])
def test_marks_of_a_crowd_are_small(count, size):
    places = list(range(count))
    (trace,) = figure_of(Chart("", "x", "y", (Series("s", places, places, style="points"),)))[
        "data"
    ]
    assert trace["marker"]["size"] == size


def test_a_chart_without_a_name_across_is_described_without_it():
    assert describe_chart(Chart("", "", "Tr H", (Series("SGD", ["a"], [1.0]),))).startswith(
        "Tr H. SGD: 1 at a"
    )


def test_numbers_on_a_map_can_be_read_on_every_shade():
    """Contrast of 4.5 and more (WCAG 2.1, AA) from the darkest cell to the lightest."""
    values = [[-4.0 + 0.5 * (4 * row + column) for column in range(4)] for row in range(4)]
    axes = draw(Chart("m", "x", "y", heat=Heat(list("abcd"), list("efgh"), values)))
    image = axes.images[0]
    found = {text.get_position(): text for text in axes.texts}
    assert found[0, 0].get_text() == "−4"
    for row in range(4):
        for column in range(4):
            light = [
                part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
                for part in image.to_rgba(values[row][column])[:3]
            ]
            ground = 0.2126 * light[0] + 0.7152 * light[1] + 0.0722 * light[2] + 0.05
            ink = {"black": 0.05, "white": 1.05}[found[column, row].get_color()]
            assert max(ground, ink) / min(ground, ink) >= 4.5


def test_numbers_of_a_table_are_aligned_at_the_point():
    rows = [("-1 of 3-5", "-0.5 ± 0.25"), ("b", "12"), ("c", "1.25e-05 ± 1"), ("d", "")]
    lines, numeric = align(rows)
    assert numeric == [False, True]
    assert [line[0] for line in lines] == ["−1 of 3-5", "b", "c", "d"]
    assert lines[0][1] == "−0.5\u2007\u2007\u2007\u2007\u2007\u00a0±\u00a00.25"
    assert lines[1][1] == "12\u2008" + "\u2007" * 6 + "\u2008" + "\u2007" * 6
    assert lines[3][1] == ""


CASES = Chart(
    "Cases",
    "",
    "deviation, %",
    (Series("near", [0, 2], [1.0, -3.0], [0.5, 0.25], "points", texts=("", "far")),),
    lines=(("", 0.0),),
    bands=(("± 2 %", -2.0, 2.0),),
    x_names=("a", "b", "c"),
    horizontal=True,
)


def test_a_horizontal_chart_has_its_names_down_the_left_side():
    axes = draw(CASES)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b", "c"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("deviation, %", "")
    (line, _, (bars,)) = axes.containers[0]
    assert line.get_xydata().tolist() == [[1.0, 0.0], [-3.0, 2.0]]
    assert [segment[:, 0].tolist() for segment in bars.get_segments()] == [
        [0.5, 1.5],
        [-3.25, -2.75],
    ]
    (band,) = axes.patches
    assert (band.get_x(), band.get_width()) == (-2.0, 4.0)
    (trace,), layout = (figure_of(CASES)[part] for part in ("data", "layout"))
    assert (trace["x"], trace["y"], trace["error_x"]["array"]) == ([1, -3], ["a", "c"], [0.5, 0.25])
    assert trace["hovertemplate"].startswith("%{y}: %{x:.5g} ± %{customdata:.2g}<extra>")
    assert layout["yaxis"]["categoryarray"] == ["a", "b", "c"]
    assert layout["yaxis"]["range"] == [2.6, -0.6]  # the first name on top
    assert [(shape["x0"], shape["x1"], shape["yref"]) for shape in layout["shapes"]] == [
        (0, 0, "paper"),
        (-2, 2, "paper"),
    ]
    assert describe_chart(CASES) == "deviation, %. near: 1 at a to -3 at c; ± 2 % from -2 to 2."


def test_two_places_of_one_name_stay_apart():
    twins = dataclasses.replace(CASES, x_names=("a", "b", "a"))
    (trace,) = figure_of(twins)["data"]
    assert trace["y"] == [0, 2]
    assert figure_of(twins)["layout"]["yaxis"]["ticktext"] == ["a", "b", "a"]
    assert [label.get_text() for label in draw(twins).get_yticklabels()] == ["a", "b", "a"]


def test_lines_and_bands_across_and_marks_along_the_edge():
    rug = Series("gone", [10.0], [None], style="rug", mark="cross")
    chart = Chart(
        "",
        "ε",
        "y",
        (Series("s", [1.0, 10.0], [2.0, 3.0], [1.0, 1.0], below=[0.5, 0.25]), rug),
        x_log=True,
        x_lines=(("chosen", 10.0),),
        x_bands=(("gap", 1.0, 3.0),),
    )
    layout = figure_of(chart)["layout"]
    assert [(shape["x0"], shape["x1"]) for shape in layout["shapes"]] == [(10.0, 10.0), (1.0, 3.0)]
    assert [note["x"] for note in layout["annotations"]] == [1.0, 0.0]  # by their logarithms
    band, _, marks = figure_of(chart)["data"]
    assert band["y"] == [1.5, 2.75, 4, 3]
    assert (marks["x"], marks["yaxis"]) == ([10], "y2")
    axes = draw(chart)
    (cross,) = [line for line in axes.lines if line.get_marker() == "x"]
    assert cross.get_xdata().tolist() == [10.0]
    assert cross.get_transform() == axes.get_xaxis_transform()
    edges = axes.collections[0].get_paths()[0].vertices
    assert {1.5, 3.0, 2.75, 4.0} <= set(edges[:, 1])


def test_named_lines_across_a_frame_have_dashes_of_their_own():
    lines, x_lines = (("a", 1.0), ("", 2.0)), (("b", 1.0), ("c", 2.0))
    chart = Chart("", "x", "y", (Series("s", [0, 3], [0.0, 3.0]),), lines=lines, x_lines=x_lines)
    dashes = {line.get_label(): line.get_linestyle() for line in draw(chart).lines}
    assert len({dashes[name] for name in "abc"}) == 3


def test_a_map_with_logarithmic_colours_keeps_its_numbers():
    heat = Heat(["a", "b"], ["c", "d"], [[0.0, 10.0], [1000.0, None]], "KL", log=True)
    (cells,) = figure_of(Chart("", "x", "y", heat=heat))["data"]
    assert cells["customdata"] == [[0, 10], [1000, None]]
    assert cells["z"] == [[1, 1], [3, None]]  # zero has the colour of the least positive number
    assert cells["text"] == [["0", "10"], ["1e+03", ""]]
    assert [text.get_text() for text in draw(Chart("", "x", "y", heat=heat)).texts] == [
        "0",
        "10",
        "1e+03",
    ]


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("side", [2, 12], ids=["cells", "field"])
@pytest.mark.parametrize("fill", [0.0, 3.0, None, "one"])
def test_maps_of_a_single_value_are_drawn(log, side, fill):
    values = [[0.0 if fill == "one" else fill] * side for _ in range(side)]
    if fill == "one":
        values[0][1] = 2.5
    chart = Chart("", "x", "y", heat=Heat(range(side), range(side), values, "KL", log=log))
    draw(chart).figure.canvas.draw()
    assert figure_of(chart)["data"]


def test_bars_that_share_no_place_are_as_wide_as_if_alone():
    apart = Chart(
        "",
        "rank",
        "λ",
        (Series("a", [1, 2], [3, 2], style="bars"), Series("b", [3], [1], style="bars")),
    )
    assert figure_of(apart)["layout"]["barmode"] == "overlay"
    assert [bar.get_x() + bar.get_width() / 2 for bar in draw(apart).patches] == [1.0, 2.0, 3.0]
    assert figure_of(BARS)["layout"]["barmode"] == "group"


def test_a_list_is_a_table_in_both(tmp_path):
    chart = Chart("Numbers", rows=(("trace", "1.5 ± 0.1"), ("rank", "3")))
    cells = [cell.get_text().get_text() for cell in draw(chart).tables[0].get_celld().values()]
    assert cells == ["trace", "1.5 ± 0.1", "rank", "3"]
    page = Reader(
        write_page([Section("s", charts=(chart,))], tmp_path / "p.html", "P").read_text(
            encoding="utf-8"
        )
    )
    assert [text.rstrip() for text in page.texts["td"]] == ["1.5\u00a0±\u00a00.1", "3"]
    assert page.payload("s")["charts"] == []
