"""What a page says at a glance: the answer in a sentence, the forest plot of the claims, what did
not converge, and what the bands are.
"""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from lambdahat.experiments import kit
from lambdahat.experiments.kit.cells import Rows
from lambdahat.experiments.kit.claims import (
    FAILS,
    HOLDS,
    OPEN,
    STAND_IN,
    UNTESTED,
    Claim,
    Reading,
    Verdict,
    judge,
)
from lambdahat.experiments.kit.sweeps import sweep
from lambdahat.report.figures import draw, plot
from lambdahat.report.page import cut, forest, page, page_of_stores, write_page
from lambdahat.report.plotly_charts import figure_of
from lambdahat.report.sections import headline_claim, section_of_store
from lambdahat.results import Estimate, Landscape, LearningCoefficient, Status
from lambdahat.results.charts import Chart, Series, charts_of, headline_of, share_axes
from lambdahat.results.measurement import Comparison, Measurement
from tests.experiments.toys import Config, toy
from tests.report.kinds import KINDS, made, numbers_in
from tests.report.pages import Reader, an_experiment
from tests.report.test_figures import RESULTS, caption


def test_the_answer_of_a_gap_has_both_sides():
    """Means 6.5 and 4.1 with standard deviation 0.2 over four seeds."""
    rows = Rows(
        [
            {"seed": seed, "by": by, "llc": mean + shift}
            for by, mean in (("NGD", 6.5), ("SGD", 4.1))
            for seed, shift in enumerate((-0.2, -0.1, 0.1, 0.2))
        ]
    )
    gap = kit.gap(rows.where(by="NGD"), rows.where(by="SGD"), "llc")
    (verdict,) = judge([Claim("NGD ends at a higher λ̂ than SGD", "Figure 1", "higher", gap)])
    assert (verdict.verdict, verdict.answer) == (HOLDS, "6.500 ± 0.091 against 4.100 ± 0.091")


def test_a_mark_is_the_t_interval_and_the_claimed_range():
    reading, half = Reading(3.0, 0.5, 4, 5), 0.5 * stats.t.ppf(0.975, 4)
    ends = (3.0, pytest.approx(3 - half), pytest.approx(3 + half))
    bounds = {"above": (1.0, math.inf), "below": (-math.inf, 1.0), "within": (0.75, 1.25)}
    for direction, claimed in bounds.items():
        claim = Claim("c", "", "", reading, direction, 1.0, 0.25 if direction == "within" else 0.0)
        assert claim.marks == ((*ends, *claimed),)
    assert replace(claim, unmet="nothing has learnt").marks == ()
    assert kit.jointly("both", "", "", {"a": claim, "b": claim}).marks == claim.marks * 2


@pytest.mark.parametrize(
    ("mark", "expected"),
    [
        # the interval ends 3 from the bound, 1.1 times which is the reach of the scale
        ((2.0, 1.0, 3.0, 0.0, math.inf), (160.6, 130.3, 190.9, 100.0, 100.0, [100.0])),
        ((-2.0, -3.0, -1.0, -math.inf, 0.0), (39.4, 9.1, 69.7, 0.0, 100.0, [100.0])),
        ((0.0, -1.0, 1.0, -2.0, 2.0), (100.0, 54.5, 145.5, 9.1, 181.8, [9.1, 190.9])),
        ((1.0, math.nan, math.nan, 0.0, math.inf), (190.9, None, None, 100.0, 100.0, [100.0])),
    ],
)
def test_a_line_of_the_forest_plot_has_a_scale_of_its_own(mark, expected):
    (line,) = forest(Verdict("c", "", HOLDS, "", marks=(mark,)))
    assert tuple(line[key] for key in ("x", "low", "high", "left", "width", "edges")) == expected


def test_a_forest_plot_tells_its_numbers_in_words():
    (line,) = forest(Verdict("c", "", HOLDS, "", marks=((-2.0, -3.0, -1.0, -math.inf, 0.0),)))
    assert line["words"] == "−2, 95 % interval −3 to −1; claimed: below 0"
    assert forest(Verdict("c", "", UNTESTED, "")) == []


def test_claims_are_grouped_and_those_that_cannot_be_tested_have_no_mark(tmp_path):
    mark = ((2.0, 1.0, 3.0, 0.0, math.inf),)
    verdicts = (
        Verdict("untested", "", UNTESTED, "", barrier=STAND_IN),
        Verdict("our own", "", OPEN, "", own=True, marks=mark),
        Verdict("of the paper", "", FAILS, "", marks=mark * 2),
    )
    section = replace(an_experiment(1), verdicts=verdicts)
    text = write_page([section], tmp_path / "page.html", "").read_text(encoding="utf-8")
    table = text[text.index("forests") :]
    table = table[: table.index("</table>")]
    parts = re.findall(r'colspan="5">(.*?)<|<circle|<th scope="row">([\w ]+)', table)
    heads = [head for head, _ in parts if head]
    assert [head.partition(",")[0] for head in heads] == [
        "Claims of the paper",
        "Our own claims",
        "Claims of the paper",
    ]
    assert [name.strip() for _, name in parts if name] == ["Of the paper", "Our own", "Untested"]
    assert table.count("<circle") == 3
    assert table.count('class="forest fails"') == table.count('class="forest open"') == 1


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([(OPEN, False), (HOLDS, True), (FAILS, False)], 2),  # the paper's first that is decided
        ([(OPEN, False), (HOLDS, True)], 1),
        ([(UNTESTED, False), (OPEN, False)], 1),
        ([(UNTESTED, False)], None),
    ],
)
def test_the_headline_is_the_first_claim_that_is_decided(given, expected):
    found = [Verdict(str(i), "", verdict, "", own=own) for i, (verdict, own) in enumerate(given)]
    assert headline_claim(found) == (None if expected is None else found[expected])


def test_an_experiment_can_declare_its_headline(tmp_path):
    def claims(rows):
        reading = kit.mean_of([2.0, 2.1, 1.9])
        return [
            Claim("first", "", "", reading),
            Claim("second", "", "", reading, headline=True, own=True),
        ]

    experiment = replace(toy(cpu=Config(3)), claims=claims)
    section = section_of_store(sweep(experiment, tmp_path, scale="cpu"), experiment)
    assert section.headline == "Second: 2.000 ± 0.058"
    assert section.lead.verdict == HOLDS


def test_the_key_chart_is_that_of_the_headline(tmp_path):
    def charts(rows):
        return [Chart(name, "rate", name, (Series("a", [1], [1.0]),)) for name in ("loss", "value")]

    experiment = replace(toy(cpu=Config(3)), charts=charts)
    experiment = replace(
        experiment, claims=lambda rows: [Claim("the value rises", "", "", kit.mean_of([1.0, 1.1]))]
    )
    section = section_of_store(sweep(experiment, tmp_path, scale="cpu"), experiment)
    assert [chart.title for chart in section.charts] == ["value", "loss"]


def test_smoke_runs_are_grey_and_count_nowhere(tmp_path):
    for scale in ("smoke", "cpu"):
        sweep(toy(smoke=Config(2), cpu=Config(3)), tmp_path / scale, scale=scale)
    find = {"toy": toy(smoke=Config(2), cpu=Config(3))}.__getitem__
    alone = page_of_stores(tmp_path / "smoke", tmp_path / "p.html", find=find).read_text("utf-8")
    body = alone[alone.index("<body>") :]
    assert not re.search(r'class="badge (holds|fails|open|untested)"|class="count', body)
    assert body.count('class="badge smoke"') == 2  # of the section and of its claim
    both = page_of_stores([tmp_path / "smoke", tmp_path / "cpu"], tmp_path / "p.html", find=find)
    body = both.read_text("utf-8")
    assert re.findall(r"<strong>(\d+)</strong>", body) == ["1", "0", "0", "0"]
    assert body.count("<tr data-paper") == 1


def test_results_have_a_headline_with_a_number():
    for name in KINDS:
        told = headline_of(made(name), name)
        assert told, name
    known = {
        "scalar": 103.2,
        "coefficient": 1.9,
        "comparison": 6.5,
        "eigenpairs": 3.0,
        "free energy": 210.0,
        "measurement": 103.2,
        "spectrum": 4.0,
        "plane": RESULTS["plane"].loss.max(),
    }
    for name, number in known.items():
        assert any(
            found == pytest.approx(number, rel=1e-3)
            for found in numbers_in(headline_of(made(name), name))
        ), headline_of(made(name), name)


def test_a_line_between_two_checkpoints_tells_both_ends_and_the_barrier():
    offsets, loss = np.linspace(0.0, 1.0, 5), np.array([0.019, 0.03, 0.044, 0.03, 0.017])
    told = headline_of(Landscape(offsets, loss), "line")
    assert told == "The loss goes from 0.019 at offset 0 to 0.017 at offset 1, and is 0.044 at most"
    told = headline_of(Landscape(np.array([-0.1, 0.0, 0.1, 0.2]), loss[:4]), "line")
    assert told == "The loss goes from 0.03 at the centre to 0.044 within a distance of 0.2"


def test_a_comparison_says_which_is_larger_only_where_it_is_known():
    def told(one, other):
        return headline_of(Comparison({"llc": {"SGD": (one,), "NGD": (other,)}}), "")

    far = told(Estimate(4.1, 0.1), Estimate(6.5, 0.2))
    assert far == "λ̂: NGD is above SGD: 6.50 ± 0.2 against 4.10 ± 0.1"
    near = told(Estimate(4.1, 0.1), Estimate(4.2, 0.2))
    assert near == "λ̂: NGD and SGD do not differ beyond their errors: 4.20 ± 0.2 against 4.10 ± 0.1"


def test_a_measurement_begins_with_the_learning_coefficient():
    llc = LearningCoefficient(2.5, 0.1, nbeta=100.0, localization=2.0)
    told = headline_of(Measurement({"trace": Estimate(3.0, 0.1), "llc": llc}), "m")
    assert told == "λ̂ = 2.50 ± 0.1 at nβ = 100, γ = 2; trace = 3.00 ± 0.1"


MIXED = Series(
    "a", [1, 2, 3], [1.0, 2.0, 3.0], [0.1] * 3, "joined", statuses=["CONVERGED", "NOT_MIXED", ""]
)


@pytest.mark.parametrize("style", ["joined", "points", "line", "bars"])
def test_what_did_not_converge_is_hollow_in_both(style):
    chart = Chart("", "x", "y", (replace(MIXED, style=style),))
    axes = draw(chart, caption=True)
    if style == "bars":
        white = [bar.get_x() + 0.4 for bar in axes.patches if bar.get_facecolor()[:3] == (1, 1, 1)]
    else:
        (line,) = [line for line in axes.lines if line.get_markerfacecolor() == "white"]
        white = list(line.get_xdata())
    assert white == pytest.approx([2.0])
    assert caption(axes) == "Hollow: not converged (NOT_MIXED)."
    *_, main, over = figure_of(chart)["data"]
    assert (over["x"], over["y"], over["marker"]["color"]) == ([2], [2], "@paper")
    assert over["hovertext"] == ["NOT_MIXED"]
    assert (over["showlegend"], over["legendgroup"]) == (False, main["legendgroup"])
    assert main["x"] == [1, 2, 3]  # the table of numbers has all
    assert main["marker"]["color"] != "@paper"


def legend_faces(axes):
    """The fill of every entry in the legend, by its name."""
    legend = axes.get_legend()
    faces = {}
    for handle, text in zip(legend.legend_handles, legend.get_texts(), strict=True):
        face = handle.get_facecolor() if hasattr(handle, "get_facecolor") else None
        faces[text.get_text()] = handle.get_markerfacecolor() if face is None else face[:3]
    return faces


@pytest.mark.parametrize("style", ["joined", "points", "line", "bars"])
@pytest.mark.parametrize("statuses", [["NOT_MIXED"] * 3, ["NOT_MIXED", "", ""]])
def test_the_legend_is_hollow_where_no_point_converged(style, statuses):
    series = replace(MIXED, style=style, error=None, statuses=statuses)
    lone = replace(series, x=series.x[:1], y=series.y[:1], statuses=statuses[:1], name="b")
    chart = Chart("", "x", "y", (series, lone))
    faces = legend_faces(draw(chart))
    white = (1, 1, 1) if style == "bars" else "white"
    assert faces["b"] == white
    assert (faces["a"] == white) is all(statuses)
    fills = [one["marker"]["color"] for one in figure_of(chart)["data"] if "legendgroup" in one]
    assert (fills[0] == "@paper") is all(statuses)
    assert fills[2] == "@paper"


def test_every_chart_with_errors_says_what_they_are():
    for name in KINDS:
        for chart in charts_of(made(name)):
            errors = [one for one in chart.series if one.error is not None and any(one.error)]
            known = re.search("95 %|standard|residual", chart.below)
            assert not errors or known, (name, chart.title)


def test_bands_of_several_kinds_are_named():
    band = Series("mean", [1, 2], [1.0, 2.0], [0.1, 0.1], band="95 % interval over 4 chains")
    bars = replace(band, name="λ̂", style="points", band="± residual")
    chart = Chart("", "x", "y", (band, bars), caption="At γ = 1.")
    assert chart.below == (
        "At γ = 1. Bands of mean: 95 % interval over 4 chains. Bars of λ̂: ± residual."
    )


def test_curves_over_seeds_say_how_many_and_which_did_not_converge():
    rows = [
        {"seed": seed, "epoch": epoch, "llc": seed + epoch, "llc_status": status}
        for epoch, status in ((1, "CONVERGED"), (2, "NOT_MIXED"))
        for seed in range(3)
    ]
    found = kit.curve("SGD", Rows(rows), "llc")
    assert found.band == "± standard error of the mean over 3 seeds"
    assert found.hollow == [1]


def stems(*places):
    return Chart("", "eigenvalue", "share", (Series("s", places, [0.5] * len(places)),), y_log=True)


def test_spectra_that_are_shown_together_share_their_axes():
    one, other = share_axes([stems(0.0, 1.0), stems(-1.0, 3.0)])
    assert one.x_range == other.x_range == (pytest.approx(-1.12), pytest.approx(3.12))
    assert one.y_range == other.y_range
    far = [stems(0.0, 1.0), stems(0.0, 100.0)]
    assert share_axes(far) == far  # one would be a line
    loss = replace(stems(0.0, 1.0), x_label="epoch")
    assert share_axes([loss, loss]) == [loss, loss]
    figure = plot({"a": RESULTS["spectrum"], "b": replace(RESULTS["spectrum"], dim=7)})
    first, second = figure.axes[:2]
    assert (first.get_xlim(), first.get_ylim()) == (second.get_xlim(), second.get_ylim())


def test_spectra_of_several_results_share_their_axes_on_the_page(tmp_path):
    wider = replace(RESULTS["spectrum"], nodes=2 * RESULTS["spectrum"].nodes)
    path = page({"a": RESULTS["spectrum"], "b": wider}, tmp_path / "p.html")
    seen = Reader(path.read_text(encoding="utf-8"))
    ranges = [seen.payload(name)["charts"][0]["layout"]["xaxis"]["range"] for name in "ab"]
    assert ranges[0] == ranges[1]


def test_text_in_vector_files_stays_text(tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    for drawn in (plot(Estimate(103.2, 1.3)), plot({"a": RESULTS["line"], "b": RESULTS["line"]})):
        drawn.savefig(tmp_path / "f.svg")
        drawn.savefig(tmp_path / "f.pdf")
        svg = (tmp_path / "f.svg").read_text(encoding="utf-8")
        assert re.search(r"<text[^>]*>(103.2 ± 1.3|a: Loss along a line)</text>", svg)
        pdf = (tmp_path / "f.pdf").read_bytes()
        assert b"/FontFile2" in pdf  # TrueType, which can be edited and searched
        assert b"/Subtype /Type3" not in pdf
    assert dict(matplotlib.rcParams) == before


def test_a_figure_shows_itself_once_in_a_notebook():
    formatters = pytest.importorskip("IPython.core.formatters")
    for result in (Estimate(1.0, 0.1), RESULTS["spectrum"], made("chains")):
        data, _ = formatters.DisplayFormatter().format(plot(result))
        assert data["image/png"].startswith(b"\x89PNG")
        assert sorted(data) == ["image/png", "text/plain"]


def test_a_long_text_is_cut_between_words():
    first, rest = cut("word " * 60, 100)
    assert len(first) <= 100
    assert not first.endswith(" ")
    assert f"{first} {rest}" == "word " * 60
    assert cut("short", 100) == ("short", "")


def test_the_status_of_a_result_is_told_beside_its_answer(tmp_path):
    bad = Estimate(2.0, 0.5, 3, Status.BUDGET_SPENT)
    results = {"trace": bad, "other": Estimate(1.0)}
    text = page(results, tmp_path / "p.html").read_text(encoding="utf-8")
    overview = text[text.index('id="overview"') : text.index("</section>")]
    assert re.findall(r'class="remedy">(.*?):', overview) == ["BUDGET_SPENT"]
