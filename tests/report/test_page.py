"""The page as a file: its structure, its data, what it does with hostile names, and where its
parts come from.
"""

import dataclasses
import itertools
import json
import math
import re

import pytest
import torch

from lambdahat.experiments.kit.claims import VERDICTS, Table, Verdict
from lambdahat.experiments.kit.sweeps import sweep
from lambdahat.report.page import ASSETS, page, page_of_stores, write_page
from lambdahat.report.plotly_charts import figure_of
from lambdahat.report.sections import Card, Section, saved_in, section_of_store
from lambdahat.report.style import sentence
from lambdahat.results import Estimate
from lambdahat.results.charts import Chart, Series
from lambdahat.results.measurement import Measurement
from tests.experiments.toys import Config, toy
from tests.report.pages import HOSTILE, Reader, an_experiment, experiments, with_own_claims
from tests.report.test_figures import RESULTS


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_page(
        experiments(), tmp_path_factory.mktemp("page") / "deep" / "report.html", "A title"
    )


@pytest.fixture(scope="module")
def seen(written):
    return Reader(written.read_text(encoding="utf-8"))


def test_it_is_one_small_file_that_asks_for_nothing(written, seen):
    assert [path.name for path in written.parent.iterdir()] == ["report.html"]
    assert written.stat().st_size < 3_000_000
    for _, attributes in seen.elements:
        for name in ("src", "href", "action", "data", "srcset"):
            assert (attributes.get(name) or "#").startswith("#"), attributes
    assert not seen.all("link", "iframe", "object")
    assert "url(" not in (ASSETS / "page.css").read_text()
    for script in ("charts.js", "inflate.js", "page.js"):
        assert not re.search(r"https?:|fetch\(|import\(", (ASSETS / script).read_text())


def test_elements_close_and_names_are_distinct_and_known(seen):
    assert seen.open == []
    names = [attributes["id"] for _, attributes in seen.elements if "id" in attributes]
    assert len(names) == len(set(names))
    for _, attributes in seen.elements:
        for name in (attributes.get("aria-labelledby"), attributes.get("data-chart")):
            assert name is None or name in names
    assert {link["href"][1:] for link in seen.all("a")} <= set(names)


def test_headings_come_in_order(seen):
    levels = [int(tag[1]) for tag, _ in seen.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_it_has_landmarks_labels_and_a_way_past_the_contents(seen):
    assert all(
        len(seen.all(tag)) == 1 for tag in ("header", "nav", "main", "footer", "h1", "title")
    )
    assert seen.all("html")[0]["lang"] == "en"
    assert next(attributes for tag, attributes in seen.elements if tag == "a")["href"] == "#main"
    assert seen.all("nav")[0]["aria-label"] == "Contents"
    charts = [
        attributes
        for attributes in seen.all("div")
        if (attributes.get("class") or "").startswith("chart")
    ]
    assert len(charts) == 6
    assert all(chart["role"] == "img" and len(chart["aria-label"]) > 20 for chart in charts)
    assert len([one for one in seen.all("details") if one.get("class") == "data"]) == 6
    assert all(
        one["tabindex"] == "0" and one["aria-label"]
        for one in seen.all("div")
        if one.get("role") == "region"
    )


def test_every_table_has_headers_with_scopes(written, seen):
    assert len(seen.all("table")) == len(seen.all("caption")) == len(seen.all("thead")) == 12
    assert all(head["scope"] in ("col", "row") for head in seen.all("th"))
    for table in re.findall(r"<table.*?</table>", written.read_text(encoding="utf-8"), re.DOTALL):
        columns = table.count('scope="col"')
        for row in re.findall(r"<tbody>(.*?)</tbody>", table, re.DOTALL)[0].split("</tr>")[:-1]:
            assert row.count("<td") + row.count('scope="row"') == columns


def test_the_overview_has_every_claim_with_its_paper_and_verdict(seen):
    rows = [attributes for attributes in seen.all("tr") if "data-verdict" in attributes]
    assert [row["data-verdict"] for row in rows] == [
        "holds",
        "undecided",
        "does not hold",
        "undecided",
        "holds",
        "undecided",
    ]
    assert [row["data-paper"] for row in rows[1:3]] == ["A paper", "Another paper"]
    assert seen.texts["strong"] == ["2", "1", "3", "0"]
    assert [
        button["data-only"] for button in seen.all("button") if button.get("class") == "count"
    ] == ["holds", "does not hold", "undecided", "not testable here"]
    assert [option["value"] for option in seen.all("option")] == [
        "",
        "A paper",
        "Another paper",
        "",
        "holds",
        "does not hold",
        "undecided",
    ]


def test_our_own_claims_count_apart_and_an_experiment_at_two_scales_once(tmp_path):
    text = write_page(with_own_claims(), tmp_path / "page.html", "").read_text(encoding="utf-8")
    seen = Reader(text)
    # of the papers: those of the paper scale and of the other experiment; our own: those of the
    # paper scale
    assert seen.texts["strong"] == ["1", "0", "2", "1", "1", "0", "0", "1"]
    asked = [
        (one["data-only"], one["data-whose"])
        for one in seen.all("button")
        if one.get("class") == "count"
    ]
    assert asked[3] == ("not testable here", "of the papers")
    assert asked[4] == ("holds", "our own")
    rows = [row for row in seen.all("tr") if "data-verdict" in row]
    assert [row["data-whose"] for row in rows] == ["of the papers"] * 2 + ["our own"] * 2 + [
        "of the papers"
    ] * 2 + ["our own", "of the papers", "of the papers"]
    assert {row["data-run"] for row in rows[:4]} == {"largest of each experiment"}
    assert {row["data-run"] for row in rows[4:7]} == {"smaller ones"}
    assert text.count("counts once in the totals") == 1
    # in the overview and in the sections
    assert text.count('Ours is faster <span class="own"') == 6
    heading = re.findall(r"<h3>(A paper .*?)</h3>", text, re.DOTALL)[0]
    assert re.findall(r"</span> (\d+)<span class=\"hidden\"> ([\w ]+)<|(>ours<)", heading) == [
        ("1", "holds", ""),
        ("2", "undecided", ""),
        ("1", "not testable here", ""),
        ("", "", ">ours<"),
        ("1", "holds", ""),
        ("1", "not testable here", ""),
    ]


def test_without_claims_of_our_own_nothing_is_said_of_them(written):
    text = written.read_text(encoding="utf-8")
    assert 'class="own"' not in text
    assert 'data-filter="whose"' not in text
    assert "counts once" not in text
    assert all(f"{verdict}: " in text.lower() for verdict in VERDICTS)  # what each means


def test_the_overview_and_the_contents_go_paper_by_paper(written):
    text = written.read_text(encoding="utf-8")
    overview = text[text.index('<section id="overview"') : text.index('id="claims"')]
    places = [
        overview.index(f">{words}")
        for words in ("A paper ", "Experiment 1", "Another paper ", "Experiment 2")
    ]
    assert places == sorted(places)
    tables = re.findall(r"<h3>(.*?)</h3>", overview, re.DOTALL)
    assert [
        re.findall(r"</span> (\d+)<span class=\"hidden\"> ([\w ]+)<", one) for one in tables
    ] == [
        [("1", "holds"), ("1", "undecided")],
        [("1", "holds"), ("1", "does not hold"), ("2", "undecided")],
    ]
    contents = text[text.index("<nav") : text.index("</nav>")]
    assert re.findall(r'class="group">(.*?)<', contents) == ["A paper", "Another paper"]
    assert re.findall(r'href="#(.*?)"', contents) == [
        "overview",
        *(f"experiment-{i}-cpu" for i in (1, 2, 3)),
    ]


@pytest.mark.parametrize(("count", "shown"), [(4, True), (5, False)])
def test_many_sections_are_closed_at_first(tmp_path, count, shown):
    seen = Reader(
        write_page([an_experiment(i) for i in range(count)], tmp_path / "page.html", "").read_text(
            "utf-8"
        )
    )
    parts = [one for one in seen.all("details") if one.get("class") == "part" and "id" not in one]
    assert len(parts) == count
    assert all(("open" in one) is shown for one in parts)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the loss falls", "The loss falls"),
        ("λ̂ rises", "λ̂ rises"),
        ("k = 3", "k = 3"),
        ("SGD wins", "SGD wins"),
        ("", ""),
    ],
)
def test_a_sentence_begins_with_a_capital_where_it_is_a_word(text, expected):
    assert sentence(text) == expected


def test_the_data_come_back(seen):
    found = seen.payload("experiment-2-cpu")
    section = an_experiment(2)
    assert found["charts"] == [figure_of(chart) for chart in section.charts]
    assert found["rows"]["columns"] == ["seed", "loss", "name", "extra"]
    assert found["rows"]["values"] == [
        [0, 1],
        [0.5, {"number": "nan"}],
        ['a,"b"\nc', None],
        [None, [1, 2.5, {"number": "inf"}]],
    ]


def test_hostile_names_are_only_names(tmp_path):
    bad = HOSTILE
    section = Section(
        bad,
        bad,
        bad,
        (Verdict(bad, bad, bad, bad, bad, True),),
        (Card(bad, bad, bad, bad),),
        (
            Chart(
                bad,
                bad,
                bad,
                (Series(bad, [bad], [1.0]),),
                source=bad,
                caption=bad,
                lines=((bad, 1.0),),
            ),
        ),
        (Table(bad, (bad, bad), ((bad, bad),)),),
        (bad,),
        (bad,),
        {bad: bad},
        bad,
        [{bad: bad}],
        bad,
        bad,
        bad,
        bad,
        bad,
        1,
        bad,
        Verdict(bad, bad, bad, bad),
        True,
    )
    assert all(getattr(section, field.name) for field in dataclasses.fields(section))
    hostile = [section, dataclasses.replace(section, smoke=False)]  # and with an overview
    seen = Reader(write_page(hostile, tmp_path / "page.html", bad).read_text(encoding="utf-8"))
    plain = [an_experiment(1), an_experiment(2)]
    good = Reader(write_page(plain, tmp_path / "good.html", "good").read_text(encoding="utf-8"))
    assert seen.open == []
    assert not seen.all("img")
    assert len(seen.all("script")) == len(good.all("script")) == 4
    assert not [
        name for _, attributes in seen.elements for name in attributes if name.startswith("on")
    ]
    assert next(row["data-paper"] for row in seen.all("tr") if "data-paper" in row) == bad
    name, _ = [key for key in seen.scripts if key.startswith("data-")]
    assert seen.payload(name.removeprefix("data-"))["rows"] == {"columns": [bad], "values": [[bad]]}


def contrast(one, other):
    """WCAG 2.2's ratio of two colours."""

    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (
            p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_can_be_read_in_both_themes():
    css = (ASSETS / "page.css").read_text()
    blocks = re.findall(r"\{([^{}]*--paper: [^{}]*)\}", css)
    themes = [dict(re.findall(r"(--[\w-]+): (#\w{6})", block)) for block in blocks]
    assert len(themes) == 3
    assert themes[1] == themes[2]  # by the system's wish and by the button
    for theme in themes:
        for back in ("--paper", "--raised"):
            for ink in ("--ink", "--muted", "--accent"):
                assert contrast(theme[ink], theme[back]) >= 4.5
        for kind in ("good", "bad", "open"):
            assert contrast(theme[f"--{kind}"], theme[f"--{kind}-back"]) >= 4.5
        assert contrast(theme["--bad"], theme["--raised"]) >= 4.5
        assert ".untested { color: var(--muted); background: var(--paper);" in css
        for number in range(8):
            assert contrast(theme[f"--s{number}"], theme["--paper"]) >= 3.0  # of graphics


def find(name):
    if name != "toy":
        raise ValueError(name)
    return toy(smoke=Config(3))


def test_the_page_of_stores_comes_from_the_stores_alone(tmp_path):
    store = sweep(
        find("toy"),
        tmp_path / "runs",
        scale="smoke",
        command="lambdahat reproduce toy --scale smoke",
    )
    seen = Reader(
        page_of_stores(tmp_path / "runs", tmp_path / "p.html", find=find).read_text(
            encoding="utf-8"
        )
    )
    assert "no paper · Table 1 · smoke scale" in seen.texts["p"]
    assert seen.texts["code"] == ["lambdahat reproduce toy --scale smoke"]
    rows = seen.payload("toy-smoke")["rows"]
    by_row = zip(*rows["values"], strict=True)
    assert [dict(zip(rows["columns"], row, strict=True)) for row in by_row] == list(store.rows())
    section = section_of_store(store, find("toy"))
    assert section.verdicts[0].verdict == "not testable here"  # a smoke run decides nothing
    assert section.facts["seeds"] == "0, 1, 2"
    assert section.facts["cells"] == "6 of 6"
    assert section.facts["config: rate"] == "0.5 / 2.0"
    assert (section.experiment, section.size) == ("toy", 0)
    assert section.ran in seen.texts["p"]
    assert section.ran == "seeds: 3 · rate: 0.5 / 2 · broken: -1"
    assert section.smoke
    assert section.headline.startswith("A smoke run")
    assert section.lead is None
    assert not section.notes


def test_a_sweep_that_still_runs_is_shown_as_far_as_it_is(tmp_path):
    broken = toy(smoke=Config(2, broken=1))
    store = sweep(broken, tmp_path, scale="smoke", only="rate=0.5")
    section = section_of_store(store, broken)
    assert section.notes[0].startswith("1 cell raised")
    assert "this cell is broken" in section.notes[0]
    assert section.notes[1].startswith("1 of 4 cells have finished")
    assert section.charts[0].series[0].x == [0.5]
    assert section.command == "lambdahat reproduce toy --scale smoke"


def test_a_figure_that_cannot_be_made_costs_no_other(tmp_path):
    def charts(rows):
        raise KeyError("width")

    store = sweep(find("toy"), tmp_path, scale="smoke")
    section = section_of_store(store, dataclasses.replace(find("toy"), charts=charts))
    assert section.notes == ("The charts could not be made from these rows: KeyError: 'width'",)
    assert section.tables
    assert section.verdicts


def test_the_rows_of_an_unknown_experiment_are_kept(tmp_path):
    store = sweep(find("toy"), tmp_path / "runs", scale="smoke")
    store.path.rename(store.path.with_name("later-smoke.sqlite"))
    seen = Reader(page(tmp_path / "runs", tmp_path / "p.html").read_text(encoding="utf-8"))
    assert len(seen.payload("later-smoke")["rows"]["values"][0]) == 18
    assert any("does not know the experiment" in text for text in seen.texts["p"])


def test_any_results_make_a_page(tmp_path):
    folder = tmp_path / "saved"
    for name, result in RESULTS.items():
        result.save(folder / name)
    measured = Measurement(
        {"trace": Estimate(3.0, 0.1), "spectrum": RESULTS["spectrum"]}, {"samples": 10}
    )
    measured.save(folder / "run" / "measured")
    (folder / "other.json").write_text('{"not": "ours"}')
    (folder / "broken.json").write_text("{")
    with pytest.warns(RuntimeWarning, match=r"broken\.json is left out"):
        seen = Reader(page(folder, tmp_path / "page.html").read_text(encoding="utf-8"))
    titles = [text for text in seen.texts["h2"] if text != "Overview"]
    assert titles == sorted([*RESULTS, "run/measured"])
    (folder / "broken.json").unlink()
    path = Estimate(1.0).save(folder / "cut")
    path.write_text(path.read_text()[:60])
    with pytest.raises(ValueError, match=r"cut\.json is not a lambdahat result, or a damaged one"):
        list(saved_in(folder))
    assert [column[0] for column in seen.payload("run-measured")["rows"]["values"]][:3] == [
        "trace",
        3.0,
        0.1,
    ]
    assert any("spectrum: Ritz values" in text for text in seen.texts["h3"])  # the key figure


def test_results_are_named_by_the_caller_or_by_kind(tmp_path):
    def titles(results):
        seen = Reader(page(results, tmp_path / "page.html").read_text(encoding="utf-8"))
        return [text for text in seen.texts["h2"] if text != "Overview"]

    assert titles({"here": Estimate(1.0)}) == ["here"]
    assert titles(Estimate(1.0)) == ["Estimate"]
    assert titles([Estimate(1.0), RESULTS["line"], Estimate(math.nan)]) == [
        "Estimate 1",
        "Landscape",
        "Estimate 2",
    ]


MISUSES = {
    "no such folder": (
        lambda at: page(at / "none", at / "p.html"),
        FileNotFoundError,
        "results must name a folder",
    ),
    "nothing to show": (
        lambda at: page([], at / "p.html"),
        ValueError,
        "the page must have something to show",
    ),
    "an empty folder": (
        lambda at: page(at, at / "p.html"),
        ValueError,
        "name a folder with saved results or with",
    ),
    "no results": (
        lambda at: page(3, at / "p.html"),
        TypeError,
        "results must be a result, several, or a folder",
    ),
    "no stores": (
        lambda at: page_of_stores([at], at / "p.html"),
        ValueError,
        "something to show, got no results",
    ),
}


@pytest.mark.parametrize(("call", "error", "text"), MISUSES.values(), ids=MISUSES)
def test_misuse(call, error, text, tmp_path):
    with pytest.raises(error, match=text):
        call(tmp_path)
    assert not (tmp_path / "p.html").exists()


ESTIMATE = {"type": "Estimate", "fields": {"value": 1.0}}


@pytest.mark.parametrize(
    "document",
    [
        {"result": {"type": "Estimate", "fields": {"value": "abc"}}},
        {"result": {"type": "Estimate", "fields": {"value": {"float": "abc"}}}},
        {"result": {"type": "Estimate", "fields": {"value": None}}},
        {
            "result": {
                "type": "Estimate",
                "fields": {"value": 1.0, "stderr": "<script>alert(1)</script>"},
            }
        },
        {"result": {"type": "Estimate", "fields": {"value": 1.0, "status": [1]}}},
        {"result": {"type": "Estimate", "fields": [1]}},
        {"result": {"type": ["Estimate"], "fields": {}}},
        {
            "result": {
                "type": "Spectrum",
                "fields": {"nodes": 1.0, "weights": 1.0, "residuals": 1.0, "dim": 2},
            }
        },
        {"result": [1, 2]},
        {"result": ESTIMATE, "arrays": {"file": "../other.npz", "sha256": ""}},
        {"result": ESTIMATE, "arrays": 3},
    ],
)
def test_a_crafted_result_is_named(tmp_path, document):
    (tmp_path / "crafted.json").write_text(
        json.dumps({"format": "lambdahat", "version": 1, **document})
    )
    with pytest.raises(ValueError, match=r"crafted\.json"):
        page(tmp_path, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_saving_over_a_crafted_result_removes_no_file_but_its_own(tmp_path):
    (tmp_path / "precious.npz").write_bytes(b"precious")
    document = {
        "format": "lambdahat",
        "version": 1,
        "result": {},
        "arrays": {"file": "precious.npz", "sha256": ""},
    }
    (tmp_path / "one.json").write_text(json.dumps(document))
    Estimate(torch.ones(3)).save(tmp_path / "one")
    Estimate(torch.zeros(3)).save(tmp_path / "one")
    assert (tmp_path / "precious.npz").read_bytes() == b"precious"
    assert len(list(tmp_path.glob("one.*.npz"))) == 1
