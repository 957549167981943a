"""The markup by which a reader finds the way: links within sections, settings beside titles,
what a status means.
"""

import dataclasses
import re

from lambdahat.experiments.kit.claims import UNTESTED, Verdict
from lambdahat.report.page import page, write_page
from lambdahat.results import Estimate, Status
from lambdahat.results.charts import Chart, Series
from tests.report.pages import an_experiment
from tests.report.test_figures import RESULTS


def test_a_section_leads_to_its_parts_and_says_what_statuses_mean(tmp_path):
    told = Verdict("ours", "", UNTESTED, "1 ± 2; not testable: SGD is NOT_A_MINIMUM in 3 of 4")
    section = dataclasses.replace(an_experiment(1), verdicts=(told,))
    text = write_page([section, an_experiment(2)], tmp_path / "page.html", "").read_text(
        encoding="utf-8"
    )
    jumps = re.findall(r'<p class="jumps">(.*?)</p>', text, re.DOTALL)[0]
    assert re.findall(r'href="#(.*?)">(.*?)<', jumps) == [
        ("experiment-1-cpu--claims", "Claims (1)"),
        ("experiment-1-cpu--figures", "Figures (1)"),
        ("experiment-1-cpu--tables", "Tables (1)"),
        ("experiment-1-cpu--assumptions", "Assumptions (1)"),
        ("experiment-1-cpu--run-it-again", "Run it again"),
    ]
    assert text.count(f'<p class="meaning">NOT_A_MINIMUM: {Status.NOT_A_MINIMUM.value}</p>') == 1
    assert '<p class="meaning">NOT_MIXED' not in text
    assert "1\u00a0±\u00a02; not testable" in text


def test_the_statuses_of_hollow_points_are_explained(tmp_path):
    curve = Series("λ̂", [1, 2], [3.0, 4.0], statuses=("CONVERGED", "NOT_MIXED"))
    section = dataclasses.replace(an_experiment(1), charts=(Chart("λ̂", series=(curve,)),))
    text = write_page([section], tmp_path / "page.html", "").read_text(encoding="utf-8")
    assert re.findall('class="meaning">(.*?):', text) == ["NOT_MIXED"]


def test_sections_of_one_title_are_told_apart_by_their_setting(tmp_path):
    one = an_experiment(1)
    other = dataclasses.replace(one, setting="paper scale", name="experiment-1-paper")
    text = write_page([one, other, an_experiment(2)], tmp_path / "page.html", "").read_text(
        encoding="utf-8"
    )
    assert re.findall(r'class="setting">(.*?)<', text) == ["cpu scale", "paper scale"]
    assert re.findall(r'<section id="(.*?)"', text)[1:3] == [
        "experiment-1-cpu",
        "experiment-1-paper",
    ]


def test_the_overview_of_results_has_all_of_them_and_what_is_wrong(tmp_path):
    text = page(RESULTS, tmp_path / "page.html").read_text(encoding="utf-8")
    overview = text[text.index('<section id="overview"') : text.index("<details")]
    assert re.findall(r'href="#(.*?)"', overview) == list(RESULTS)
    assert f"NOT_CONVERGED: {Status.NOT_CONVERGED.value}" in overview
    assert "scalar = 103.2 ± 1.3".replace(" ± ", "\u00a0±\u00a0") in overview


def test_a_page_of_one_result_begins_with_its_answer(tmp_path):
    text = page({"llc": Estimate(3.0, 0.1)}, tmp_path / "page.html").read_text(encoding="utf-8")
    assert 'id="overview"' not in text
    main = text[text.index("<main") :]
    assert re.findall(r'<p class="headline">(.*?)</p>', main) == ["λ̂ = 3.00\u00a0±\u00a00.1"]
