"""The live view in a real browser: rows appear as they are written, runs overlay, nothing leaves
the machine.
"""

import json
import threading
import time
from contextlib import contextmanager

import pytest

from lambdahat.report.live import LiveServer
from lambdahat.training.history import Metrics
from tests.report.browser import CHROMIUM
from tests.training.small_runs import Setup

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium here: apt-get install chromium"
)
LOSS = "[...document.querySelectorAll('figure')].find((one) => /^Loss/.test(one.textContent))"
CHART = f"{LOSS}?.querySelector('.chart')"
POINTS = f"({CHART}?.data?.[0]?.y?.length || 0)"


@contextmanager
def shown(browser, folder, width=1200):
    """The page of a folder, once its first answer is there."""
    with LiveServer(folder) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            browser.open(server.url, width)
            browser.until("Number(document.documentElement.dataset.polls) >= 2")
            yield server
            # every request went to this server, and nothing was complained of
            asked = [one for one in browser.complaints() if isinstance(one, str)]
            assert asked
            assert all(url.startswith(server.url) for url in asked)
            assert [one for one in browser.complaints() if not isinstance(one, str)] == []
        finally:
            browser.call("Page.navigate", url="about:blank")
            server.shutdown()
            thread.join(20)


def add(rows, step, loss, **more):
    place = {"kind": "epoch", "epoch": step, "step": step, "progress": float(step)}
    rows.add({**place, "loss": loss, "learning_rate": 0.5, **more})


def set_input(browser, name, value):
    browser.evaluate(
        f"(() => {{ const one = document.getElementById('{name}');"
        f" one.type === 'checkbox' ? (one.checked = {json.dumps(value)}) : (one.value ="
        f" {json.dumps(value)});"
        " for (const kind of ['input', 'change']) one.dispatchEvent(new Event(kind)); })()"
    )


def test_rows_of_a_run_in_progress_are_seen_within_two_seconds(browser, tmp_path):
    """A real run, which waits after its second epoch until it is let go."""
    go = threading.Event()

    class Waits:
        name, every, unit = "waits", 1, "epoch"

        def measure(self, problem, optimizer=None, epoch=0, step=0):
            if epoch == 3:
                assert go.wait(60)
            return {}

    with shown(browser, tmp_path):
        assert "waits for the rows" in browser.evaluate(
            "document.getElementById('waiting').textContent"
        )
        run = threading.Thread(
            target=lambda: Setup("sgd").fit(4, tmp_path / "run", trackers=[Waits()])
        )
        run.start()
        browser.until(f"{POINTS} === 2")
        browser.until("/training \\d+ of 20/.test(document.getElementById('runs').textContent)")
        assert "running" in browser.evaluate("document.getElementById('runs').textContent")
        polls = int(browser.evaluate("document.documentElement.dataset.polls"))
        go.set()
        run.join(60)
        written = time.time()
        browser.until(f"{POINTS} === 4")
        late = time.time() - written
        more = int(browser.evaluate("document.documentElement.dataset.polls")) - polls
        assert late < 2 or more <= 3, f"{late:.1f} s, {more} questions"
        browser.until("/finished/.test(document.getElementById('runs').textContent)")


@pytest.fixture
def three(tmp_path):
    """Three runs with losses 8·0.5^step, 4·0.5^step and 2·0.5^step, the last of them noisy."""
    for place, name in enumerate(("first", "second", "third")):
        rows = Metrics(tmp_path / name)
        for step in range(1, 31):
            noise = 1 + 0.5 * (-1) ** step if name == "third" else 1.0
            loss = noise * 0.5 ** (place + step / 6)
            add(rows, step, loss, llc=3.0 + place, llc_stderr=0.1 * step / 30, validation_loss=loss)
    return tmp_path


def curves(browser):
    """Name, colour, dash and y of the curves of the loss chart."""
    return browser.evaluate(
        f"{CHART}.data.map(({{ name, line, y, opacity, showlegend }}) => ({{ name, colour:"
        " line?.color, dash: line?.dash, y, faint: opacity !== undefined, legend: showlegend }))"
    )


def test_runs_overlay_in_colours_of_their_own_and_are_switched_off(browser, three):
    with shown(browser, three):
        browser.until(f"{CHART}?.data?.length === 6")
        found = curves(browser)
        assert [one["name"] for one in found] == ["first"] * 2 + ["second"] * 2 + ["third"] * 2
        assert len({one["colour"] for one in found}) == 3
        assert [one["dash"] for one in found] == ["solid", "dash"] * 3
        assert [one["legend"] for one in found] == [True, False] * 3
        assert "solid: training, dashed: validation" in browser.evaluate(f"{LOSS}.textContent")
        browser.evaluate("document.querySelectorAll('.runs input')[1].click()")
        browser.until(f"{CHART}.data.length === 4")
        assert {one["name"] for one in curves(browser)} == {"first", "third"}
        set_input(browser, "overlay", False)
        browser.until("document.querySelectorAll('figure').length === 2 * 2")
        titles = browser.evaluate("[...document.querySelectorAll('h4')].map((h) => h.textContent)")
        assert titles[:2] == ["Loss: first", "Loss: third"]
        # charts of one quantity have the same axes
        browser.until("[...document.querySelectorAll('.chart')].every((one) => one._fullLayout)")
        both = "[...document.querySelectorAll('.chart')].slice(0, 2).map((one) => one._fullLayout"
        for axis in ("xaxis", "yaxis"):
            one, other = browser.evaluate(f"{both}.{axis}.range)")
            assert one == other


def test_smoothing_is_an_average_without_bias_and_keeps_the_curve(browser, three):
    with shown(browser, three):
        browser.until(f"{CHART}?.data?.length === 6")
        raw = curves(browser)[4]["y"]
        set_input(browser, "smoothing", 0.6)
        browser.until(f"{CHART}.data.length === 12")
        faint, smooth = curves(browser)[8:10]
        assert (faint["faint"], faint["y"]) == (True, raw)
        total = mass = 0.0
        for value, found in zip(raw, smooth["y"], strict=True):
            total, mass = 0.6 * total + 0.4 * value, 0.6 * mass + 0.4
            assert found == pytest.approx(total / mass)
        # λ̂ has a band, which would not be that of an average: it stays as it is
        bands = "[...document.querySelectorAll('.chart')][1].data"
        assert browser.evaluate(f"{bands}.length") == 6
        assert browser.evaluate(f"{bands}.filter((one) => one.fill === 'toself').length") == 3
        set_input(browser, "smoothing", 0)
        browser.until(f"{CHART}.data.length === 6")


def test_axes_are_logarithmic_on_demand_and_a_zoom_is_shared(browser, three):
    with shown(browser, three):
        browser.until("document.querySelectorAll('.chart.drawn').length === 2")
        kinds = f"{CHART}._fullLayout.yaxis.type + {CHART}._fullLayout.xaxis.type"
        assert browser.evaluate(kinds) == "loglinear"
        set_input(browser, "y-axis", "linear")
        browser.until(f"{kinds} === 'linearlinear'")
        set_input(browser, "x-axis", "log")
        browser.until(f"{kinds} === 'linearlog'")
        set_input(browser, "x-axis", "")
        browser.until(f"{kinds} === 'linearlinear'")
        zoom = "{ 'xaxis.range[0]': 5, 'xaxis.range[1]': 9 }"
        browser.evaluate(f"void Plotly.relayout({CHART}, {zoom})")
        other = "document.querySelectorAll('.chart')[1]._fullLayout.xaxis.range"
        browser.until(f"{other}.join() === '5,9'")


def test_it_fits_a_phone_and_is_dark_on_demand(browser, three):
    with shown(browser, three, 390):
        browser.until(f"{CHART}?.data?.length === 6")
        assert (
            browser.evaluate(
                "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
            == 0
        )
        paper = "getComputedStyle(document.body).backgroundColor"
        before = browser.evaluate(paper)
        browser.evaluate("document.getElementById('theme').click()")
        assert browser.evaluate(paper) != before
        assert (
            browser.evaluate("document.getElementById('theme').textContent")
            == "Switch to the light theme"
        )
        browser.evaluate("localStorage.clear()")


def test_names_are_text_and_an_end_of_the_server_is_told(browser, tmp_path):
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    for place in (folder, tmp_path / "<a href='javascript:0'>other</a>"):
        add(Metrics(place), 1, 0.5)
    with shown(browser, tmp_path) as server:
        browser.until("document.querySelector('.runs label')")
        assert folder.name in browser.evaluate("document.querySelector('.runs').textContent")
        browser.until(f"{CHART}?.querySelector('.legendtext')")
        assert browser.evaluate("document.querySelectorAll('img, main a').length") == 0
        legend = browser.evaluate(f"{CHART}.querySelector('.legend').textContent")
        assert "<a href='javascript:0'>other" in legend
        wrong = server.url.replace(server.token, "0" * len(server.token))
        assert browser.evaluate(f"fetch({wrong!r}).then((answer) => answer.status)") == 403
        server.token = "another"
        browser.until("document.getElementById('link').textContent === 'error: 403'")
        browser.events.clear()  # the refusals are on the console, as they should be
        server.token = server.url  # nothing is left to check
        browser.events.append(
            {"method": "Network.requestWillBeSent", "params": {"request": {"url": server.url}}}
        )
