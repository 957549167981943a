"""The page in a real browser on a phone and on paper: nothing is cut, and nothing is too small
to read.
"""

import dataclasses

import pytest

from lambdahat.experiments.kit.claims import UNTESTED, Table, Verdict
from lambdahat.report.page import write_page
from lambdahat.results.charts import Chart, Series
from tests.report.browser import CHROMIUM
from tests.report.pages import an_experiment
from tests.report.test_page_browser import draw_all, overflow

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium here: apt-get install chromium"
)


def test_long_names_leave_room_for_the_chart(browser, tmp_path):
    names = [
        f"{net} on {data}"
        for net in ("FFNN 2 × 64", "LeNet-5")
        for data in ("MNIST", "Fashion-MNIST")
    ]
    label = "a mean squared eigenvalue, per parameter"
    chart = Chart("Bars", "net", label, (Series("SGD", names, [1, 2, 3, 4], style="bars"),))
    path = write_page(
        [dataclasses.replace(an_experiment(1), charts=(chart,))], tmp_path / "page.html", ""
    )
    browser.open(path, 390)
    draw_all(browser)
    browser.until("document.querySelector('.chart')._fullLayout._size.h >= 210")
    assert browser.evaluate("document.querySelector('.chart')._fullLayout._size.w") > 250
    inside = (
        "(() => { const box = document.querySelector('.chart').getBoundingClientRect(); const texts"
        " = [...document.querySelectorAll('.chart text')].map((one) =>"
        " one.getBoundingClientRect()); return texts.every((one) => one.top >= box.top - 1 &&"
        " one.bottom <= box.bottom + 1 && one.left >= box.left - 1 && one.right <= box.right + 1);"
        " })()"
    )
    browser.until(inside)


def test_no_cell_is_taller_than_five_lines_on_a_phone(browser, tmp_path):
    long = " ".join(f"setting {i} of 60,000 samples;" for i in range(40))
    verdict = Verdict("a claim of a usual length about λ̂", "Figure 1", UNTESTED, long, "1.1")
    table = Table("Reasons", ("setting", "why", "n"), ((long, long, "3"), ("rate", "short", "12")))
    section = dataclasses.replace(an_experiment(1), verdicts=(verdict,), tables=(table,))
    sections = [section, dataclasses.replace(section, facts={"config": long}, name="other")]
    browser.open(write_page(sections, tmp_path / "page.html", ""), 390)
    browser.evaluate("document.querySelectorAll('.facts').forEach((one) => (one.open = true))")
    lines = (
        "[...document.querySelectorAll('td, th')].map((cell) => { const look ="
        " getComputedStyle(cell); return (cell.clientHeight - parseFloat(look.paddingTop) -"
        " parseFloat(look.paddingBottom)) / parseFloat(look.lineHeight) })"
    )
    assert max(browser.evaluate(lines)) < 5.5
    assert overflow(browser) == 0
    browser.evaluate("document.querySelector('.more summary').click()")  # and the rest is there
    browser.until("document.querySelector('.more[open]').textContent.includes('setting 39 of')")


@pytest.mark.parametrize(("width", "way"), [(390, "h"), (1280, "v")])
def test_the_bar_of_a_map_lies_above_it_on_a_phone(browser, written, width, way):
    browser.open(written, width)
    draw_all(browser)
    assert (
        browser.evaluate("document.querySelectorAll('.chart')[1]._fullData[0].colorbar.orientation")
        == way
    )


def test_a_wide_table_does_not_make_the_paper_smaller(browser, tmp_path):
    header = tuple(f"a rather long name {i}" for i in range(12))
    wide = Table("Wide", header, (tuple("0.12345 ± 0.0012" for _ in header),))
    section = dataclasses.replace(
        an_experiment(1), tables=(wide,), command="lambdahat reproduce " + "x" * 300
    )
    browser.open(write_page([section], tmp_path / "page.html", ""), 390)
    assert overflow(browser) == 0
    assert (
        browser.evaluate(
            "(() => { const one = document.querySelector('pre'); return one.scrollWidth -"
            " one.clientWidth; })()"
        )
        == 0
    )
    browser.evaluate("dispatchEvent(new Event('beforeprint'))")
    browser.size(718)  # a page of A4 within its margins
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert overflow(browser) == 0
    sizes = (
        "[...document.querySelectorAll('.scroll > table')].map((one) => one.style.fontSize !== '')"
    )
    assert browser.evaluate(sizes).count(True) == 1
    browser.call("Emulation.setEmulatedMedia", media="")
    browser.evaluate("dispatchEvent(new Event('afterprint'))")
    assert not any(browser.evaluate(sizes))


def test_a_command_is_selected_where_it_cannot_be_copied(browser, written):
    browser.open(written, 1280)
    browser.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    browser.evaluate("document.querySelector('.copy').click()")
    browser.until("document.querySelector('.copy').textContent === 'Selected'")
    assert (
        browser.evaluate("getSelection().toString().trim()")
        == "lambdahat reproduce one --scale cpu"
    )
    assert browser.complaints() == []


def test_an_address_of_a_part_opens_its_section(browser, tmp_path):
    path = write_page([an_experiment(i) for i in range(5)], tmp_path / "page.html", "")
    browser.open(path, 1280, 400)
    browser.evaluate("location.hash = '#experiment-2-cpu--tables'")
    browser.until("document.querySelector('#experiment-2-cpu details').open")
    browser.until(
        "Math.abs(document.getElementById('experiment-2-cpu--tables').getBoundingClientRect().top -"
        " 72) < 5"
    )
