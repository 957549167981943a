"""The page in a real browser, headless: it loads without complaint, its charts are drawn, its
controls work.
"""

import base64
import csv
import dataclasses
import io
import json

import pytest

from lambdahat.experiments.kit.claims import HOLDS, Verdict
from lambdahat.report.page import page, write_page
from lambdahat.report.sections import Section
from lambdahat.results.charts import Chart, Series
from tests.report.browser import CHROMIUM
from tests.report.kinds import KINDS, made
from tests.report.pages import HOSTILE, an_experiment, with_own_claims

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium here: apt-get install chromium"
)
DRAWN = (
    "[...document.querySelectorAll('.chart')].every((one) => one.querySelector('.main-svg,"
    " canvas'))"
)
CAPTURE = """
window.files = [];
URL.createObjectURL = (blob) => (window.files.push(blob.arrayBuffer()), '#');
HTMLAnchorElement.prototype.click = function () { window.named = this.download; };
"""


def overflow(browser):
    return browser.evaluate(
        "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )


def draw_all(browser):
    """Bring every chart near the screen, one after another as a reader would."""
    count = browser.evaluate("document.querySelectorAll('.chart').length")
    for number in range(count):
        browser.evaluate(f"document.querySelectorAll('.chart')[{number}].scrollIntoView()")
        browser.until(f"document.querySelectorAll('.chart')[{number}].querySelector('.main-svg')")
    assert browser.evaluate(DRAWN)


@pytest.mark.parametrize("width", [390, 1280])
def test_it_loads_and_draws_without_complaint_and_fits(browser, written, width):
    browser.open(written, width)
    draw_all(browser)
    assert overflow(browser) == 0
    assert browser.complaints() == []
    assert (
        browser.evaluate("document.querySelectorAll('.chart .scatterlayer .trace').length") >= 3 * 3
    )


def test_charts_far_down_wait(browser, written):
    browser.open(written, 1280, 400)
    browser.until("typeof Plotly === 'object'")
    browser.evaluate("new Promise((done) => setTimeout(done, 300))")
    assert browser.evaluate("document.querySelectorAll('.chart.drawn').length") < 6


@pytest.mark.slow
def test_results_of_every_kind_are_drawn(browser, tmp_path):
    path = page({name: made(name) for name in KINDS}, tmp_path / "page.html")
    for width in (390, 1280):
        browser.open(path, width)
        browser.evaluate(
            "document.querySelectorAll('details.part').forEach((part) => { part.open = true })"
        )
        draw_all(browser)
        assert overflow(browser) == 0
    assert browser.complaints() == []


def paper_and_ink(browser):
    return browser.evaluate(
        "[getComputedStyle(document.body).backgroundColor,"
        " getComputedStyle(document.querySelector('.chart .xtick text')).fill]"
    )


def test_the_theme_follows_the_system_and_the_button(browser, written):
    looks = {}
    for dark in (False, True):
        browser.open(written, 1280, dark=dark)
        browser.evaluate("localStorage.clear(); document.querySelector('.chart').scrollIntoView()")
        browser.until("document.querySelector('.chart .xtick text')")
        looks[dark] = paper_and_ink(browser)
    assert looks[False] == ["rgb(255, 255, 255)", "rgb(27, 31, 36)"]
    assert looks[True] == ["rgb(20, 23, 27)", "rgb(230, 233, 237)"]
    words = "document.getElementById('theme').textContent"
    assert browser.evaluate(words) == "Switch to the light theme"
    browser.evaluate("document.getElementById('theme').click()")
    browser.until(
        "getComputedStyle(document.querySelector('.chart .xtick text')).fill === 'rgb(27, 31, 36)'"
    )
    assert paper_and_ink(browser) == looks[False]
    assert browser.evaluate(words) == "Switch to the dark theme"
    browser.open(written, 1280, dark=True)  # it is remembered
    assert browser.evaluate("document.documentElement.dataset.theme") == "light"
    browser.evaluate("localStorage.clear()")


def shown(browser):
    rows = "[...document.querySelectorAll('#claims tbody tr')]"
    return browser.evaluate(
        f"{rows}.filter((row) => row.offsetParent).map((row) => row.cells[0].textContent)"
    )


def choose(browser, name, value):
    browser.evaluate(
        f"(() => {{ const one = document.querySelector('[data-filter={name}]');"
        f" one.value = {value!r}; one.dispatchEvent(new Event('input')); }})()"
    )


def test_numbers_are_sorted_by_value(browser, tmp_path):
    values = [12.5, -3.0, 1.5, -20.0]
    found = tuple(Verdict(f"claim {value}", "", HOLDS, f"{value} ± 0.5") for value in values)
    sections = [dataclasses.replace(an_experiment(1), verdicts=found), Section("other")]
    browser.open(write_page(sections, tmp_path / "page.html", ""), 1280)
    shown = (
        "[...document.querySelectorAll('#claims tbody tr')].map((row) => row.cells[3].textContent)"
    )
    assert len(browser.evaluate(shown)) == 4
    browser.evaluate("document.querySelectorAll('#claims .sort')[3].click()")
    order = [float(text.split()[0].replace("−", "-")) for text in browser.evaluate(shown)]
    assert order == sorted(values)


def test_claims_are_filtered_and_sorted(browser, written):
    browser.open(written, 1280)
    assert len(shown(browser)) == 6
    choose(browser, "paper", "Another paper")
    assert shown(browser) == ["Claim 2", "A second claim", "Claim 3", "A second claim"]
    choose(browser, "verdict", "holds")
    assert shown(browser) == ["Claim 3"]
    assert browser.evaluate("document.getElementById('shown').textContent") == "1 of 6 claims"
    choose(browser, "paper", "")
    choose(browser, "verdict", "")
    choose(browser, "words", "SECOND")
    assert shown(browser) == ["A second claim"] * 3
    browser.evaluate("document.querySelector('.count[data-only=\\'does not hold\\']').click()")
    assert shown(browser) == ["Claim 2"]  # the other filters are undone
    choose(browser, "verdict", "")
    assert len(shown(browser)) == 6
    for way, first in (("ascending", "A second claim"), ("descending", "Claim 3")):
        browser.evaluate("document.querySelector('#claims .sort').click()")
        assert shown(browser)[0] == first
        assert (
            browser.evaluate("document.querySelector('#claims th').getAttribute('aria-sort')")
            == way
        )


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """A page of five sections, which are closed."""
    return write_page(
        [an_experiment(i) for i in range(5)],
        tmp_path_factory.mktemp("long") / "report.html",
        "Long",
    )


def opened(browser):
    return browser.evaluate(
        "[...document.querySelectorAll('section > details')].map((one) => one.open)"
    )


def test_sections_open_by_links_by_keys_and_all_at_once(browser, long):
    browser.open(long, 1280)
    assert opened(browser)[1:] == [False] * 5
    browser.evaluate("document.querySelector('nav a[href=\\'#experiment-3-cpu\\']').click()")
    browser.until("document.querySelector('#experiment-3-cpu .chart .main-svg')")
    assert opened(browser)[1:] == [False, False, False, True, False]
    assert (
        abs(
            browser.evaluate(
                "document.getElementById('experiment-3-cpu').getBoundingClientRect().top"
            )
            - 72
        )
        < 2
    )
    browser.evaluate("document.querySelector('#experiment-3-cpu summary').focus()")
    for kind in ("keyDown", "keyUp"):
        browser.call(
            "Input.dispatchKeyEvent",
            type=kind,
            key="Enter",
            code="Enter",
            windowsVirtualKeyCode=13,
            text="\r",
        )
    browser.until("!document.querySelector('#experiment-3-cpu details').open")
    browser.until("!document.querySelector('.chart.drawn')")  # its charts are let go
    # the address is the same
    browser.evaluate("document.querySelector('nav a[href=\\'#experiment-3-cpu\\']').click()")
    browser.until("document.querySelector('#experiment-3-cpu .chart .main-svg')")
    for label, state in (("Close all sections", True), ("Open all sections", False)):
        browser.evaluate("document.getElementById('unfold').click()")
        browser.until(f"document.getElementById('unfold').textContent === {label!r}")
        assert opened(browser)[1:] == [state] * 5
    assert browser.complaints() == []


def test_an_address_opens_its_section(browser, long):
    browser.open(long, 390)
    browser.evaluate("location.hash = '#experiment-4-cpu'")
    browser.until("document.querySelector('#experiment-4-cpu .chart .main-svg')")
    assert overflow(browser) == 0


def test_a_long_legend_is_whole(browser, tmp_path):
    names = [f"a rule of a rather long name, number {i}" for i in range(12)]
    chart = Chart(
        "Many", "x", "y", tuple(Series(name, [0, 1], [i, i]) for i, name in enumerate(names))
    )
    path = write_page(
        [dataclasses.replace(an_experiment(1), charts=(chart,))], tmp_path / "page.html", "Many"
    )
    for width in (390, 1280):
        browser.open(path, width)
        draw_all(browser)
        inside = (
            "(() => { const box = document.querySelector('.chart').getBoundingClientRect(); const"
            " texts = [...document.querySelectorAll('.legendtext')].map((one) =>"
            " one.getBoundingClientRect()); return texts.length === 12 && texts.every((one) =>"
            " one.top >= box.top && one.bottom <= box.bottom); })()"
        )
        browser.until(inside)
        browser.until("document.querySelector('.chart')._fullLayout._size.h > 150")


def downloaded(browser, kind):
    browser.evaluate(CAPTURE)
    browser.evaluate(f"document.querySelector('.download[data-kind={kind}]').click()")
    browser.until("window.files.length === 1 && window.named")
    coded = browser.evaluate(
        "window.files[0].then((bytes) => btoa(String.fromCharCode(...new Uint8Array(bytes))))"
    )
    return browser.evaluate("window.named"), base64.b64decode(coded).decode()


def test_rows_are_downloaded(browser, written):
    browser.open(written, 1280)
    name, text = downloaded(browser, "csv")
    assert name == "experiment-1-cpu.csv"
    rows = list(csv.reader(io.StringIO(text, newline="")))
    assert rows[0] == ["seed", "loss", "name", "extra"]
    assert rows[1] == ["0", "0.5", 'a,"b"\nc', ""]
    assert rows[2][:3] == ["1", "nan", ""]
    browser.open(written, 1280)
    name, text = downloaded(browser, "json")
    assert name == "experiment-1-cpu.json"
    first, second = json.loads(text)
    assert first == {"seed": 0, "loss": 0.5, "name": 'a,"b"\nc', "extra": None}
    assert second == {"seed": 1, "loss": None, "name": None, "extra": [1, 2.5, None]}


def test_a_name_in_the_legend_hides_its_curve_and_band(browser, written):
    browser.open(written, 1280)
    browser.evaluate("document.querySelector('.chart').scrollIntoView()")
    browser.until("document.querySelector('.chart .legendtoggle')")
    seen = "document.querySelector('.chart')._fullData.map((trace) => [trace.name, trace.visible])"
    assert browser.evaluate(seen)[:2] == [["SGD", True], ["SGD", True]]
    x, y = browser.evaluate(
        "(() => { const box = document.querySelector('.chart"
        " .legendtoggle').getBoundingClientRect(); return [box.x + box.width / 2, box.y +"
        " box.height / 2]; })()"
    )
    for kind in ("mousePressed", "mouseReleased"):
        browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    browser.until(f"{seen}[0][1] === 'legendonly'")
    assert browser.evaluate(seen)[:4] == [
        ["SGD", "legendonly"],
        ["SGD", "legendonly"],
        ["NGD", True],
        ["NGD", True],
    ]


def test_the_numbers_of_a_chart_are_a_table(browser, written):
    browser.open(written, 1280)
    browser.evaluate("document.querySelector('details.data').open = true")
    browser.until("document.querySelector('details.data tbody tr')")
    table = "document.querySelector('details.data table')"
    assert browser.evaluate(f"[...{table}.rows[0].cells].map((cell) => cell.textContent)") == [
        "series",
        "epoch",
        "loss",
        "±",
    ]
    assert browser.evaluate(f"[...{table}.rows[1].cells].map((cell) => cell.textContent)") == [
        "SGD",
        "0",
        "1",
        "0.02",
    ]
    assert browser.evaluate(f"{table}.rows.length") == 1 + 50 + 50 + 1
    assert (
        browser.evaluate(f"{table}.rows[0].cells[0].scope + {table}.rows[1].cells[0].scope")
        == "colrow"
    )
    assert browser.evaluate(f"{table}.rows[101].cells[0].textContent") == "SGD, paper (published)"
    browser.evaluate("document.querySelectorAll('details.data')[1].open = true")
    browser.until("document.querySelectorAll('details.data')[1].querySelector('tbody tr')")
    table = "document.querySelectorAll('details.data')[1].querySelector('table')"
    assert browser.evaluate(
        f"[...{table}.rows].slice(0, 2).map((row) => row.cells[0].textContent)"
    ) == ["y \\ x", "-1"]
    assert browser.evaluate(f"{table}.rows[1].cells[1].textContent") == "2"  # x = y = −1


def test_the_keyboard_reaches_the_content_first(browser, written):
    browser.open(written, 1280)
    for kind in ("rawKeyDown", "keyUp"):
        browser.call(
            "Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9
        )
    assert browser.evaluate("document.activeElement.className") == "skip"
    assert browser.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
    for kind in ("keyDown", "keyUp"):
        browser.call(
            "Input.dispatchKeyEvent",
            type=kind,
            key="Enter",
            code="Enter",
            windowsVirtualKeyCode=13,
            text="\r",
        )
    browser.until("document.activeElement.id === 'main'")


@pytest.mark.parametrize(("page_name", "count"), [("written", 6), ("long", 2)])
def test_paper_has_every_chart_of_open_sections_in_light_colours(
    browser, page_name, count, request
):
    browser.open(request.getfixturevalue(page_name), 1280, dark=True)
    browser.evaluate("document.querySelector('section:not(#overview) details').open = true")
    before = opened(browser)
    browser.until("typeof Plotly === 'object'")
    browser.evaluate("new Promise((done) => setTimeout(done, 500))")

    drawn = "document.querySelectorAll('.chart .svg-container').length"
    browser.evaluate(
        "addEventListener('beforeprint', () => { window.printed ="
        f" [document.documentElement.dataset.theme, {drawn},"
        " getComputedStyle(document.body).backgroundColor,"
        " document.getElementById('claims').open]; })"
    )
    browser.evaluate(
        "addEventListener('beforeprint', () => { window.told ="
        " document.querySelector('details[open] > .facts').open })"
    )
    browser.evaluate("document.getElementById('claims').open = false")
    before[0] = False
    assert browser.pdf().startswith(b"%PDF")
    assert browser.evaluate("window.printed") == ["light", count, "rgb(255, 255, 255)", True]
    assert browser.evaluate("window.told")  # configurations are on paper, and closed afterwards
    assert not browser.evaluate("document.querySelector('.facts[open]')")
    assert browser.evaluate("document.documentElement.dataset.theme") is None
    assert opened(browser) == before
    assert browser.complaints() == []


def test_paper_does_not_wait_for_what_is_still_being_unpacked(browser, written):
    never = (
        "window.DecompressionStream = function () { return new TransformStream("
        "{ transform: () => new Promise(() => {}) }); };"
    )
    script = browser.call("Page.addScriptToEvaluateOnNewDocument", source=never)["identifier"]
    try:
        browser.open(written, 1280)
        browser.evaluate(
            "addEventListener('beforeprint', () => { window.printed ="
            " document.querySelectorAll('.chart .main-svg').length })"
        )
        assert not browser.evaluate("Boolean(window.Plotly)")
        assert browser.pdf().startswith(b"%PDF")
    finally:
        browser.call("Page.removeScriptToEvaluateOnNewDocument", identifier=script)
    assert browser.evaluate("window.printed") >= 6
    assert browser.complaints() == []


@pytest.mark.parametrize(("kind", "start"), [("svg", b"<svg"), ("png", b"\x89PNG")])
def test_a_chart_is_saved_as_a_picture(browser, written, kind, start):
    browser.open(written, 1280)
    browser.evaluate("document.querySelector('.chart').scrollIntoView()")
    browser.until("document.querySelector('.chart .main-svg')")
    # a picture of points is made from one of shapes, which must have an address
    browser.evaluate("window.make = URL.createObjectURL.bind(URL)")
    browser.evaluate(CAPTURE.replace("'#'", "window.make(blob)"))
    browser.evaluate(f"document.querySelector('.image[data-kind={kind}]').click()")
    browser.until("window.named")
    coded = browser.evaluate(
        "window.files.at(-1).then((bytes) => btoa([...new Uint8Array(bytes)].map((byte) =>"
        " String.fromCharCode(byte)).join('')))"
    )
    content = base64.b64decode(coded)
    assert browser.evaluate("window.named") == f"curves.{kind}"
    assert content.startswith(start)
    if kind == "svg":
        assert ">epoch</text>" in content.decode()  # text stays text


def test_paper_says_that_closed_sections_are_not_printed(browser, long):
    browser.open(long, 1280)
    said = "getComputedStyle(document.querySelector('.printed')).display"
    assert browser.evaluate(said) == "none"
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert browser.evaluate(said) == "block"
    browser.evaluate(
        "document.querySelectorAll('main > section > details').forEach((one) => (one.open = true))"
    )
    assert browser.evaluate(said) == "none"
    browser.call("Emulation.setEmulatedMedia", media="")


def test_a_total_asks_for_the_claims_it_counts(browser, tmp_path):
    browser.open(write_page(with_own_claims(), tmp_path / "page.html", ""), 1280)
    buttons = browser.evaluate("document.querySelectorAll('.count').length")
    assert buttons == 8
    for number in range(buttons):
        browser.evaluate(f"document.querySelectorAll('.count')[{number}].click()")
        count = browser.evaluate(
            f"document.querySelectorAll('.count strong')[{number}].textContent"
        )
        assert len(shown(browser)) == int(count)


def test_hostile_names_run_nothing(browser, tmp_path):
    section = dataclasses.replace(
        an_experiment(1), title=HOSTILE, about=HOSTILE, command=HOSTILE, facts={"a": HOSTILE}
    )
    hostile = [
        dataclasses.replace(chart, title=HOSTILE, x_label=HOSTILE) for chart in section.charts
    ]
    section = dataclasses.replace(section, charts=tuple(hostile))
    browser.open(write_page([section], tmp_path / "page.html", HOSTILE), 390)
    draw_all(browser)
    assert browser.evaluate("document.title") == HOSTILE
    assert browser.evaluate("document.querySelectorAll('img, a[href^=http]').length") == 0
    assert overflow(browser) == 0
    assert browser.complaints() == []
