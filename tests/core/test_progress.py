"""Progress goes to whoever listens, and to nobody else."""

import io
import sys

import pytest
import rich.console
import rich.progress

from lambdahat._core import progress as module
from lambdahat._core.progress import progress, report


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_nobody_listens_by_default(capsys):
    report("trace", 1, 2)
    assert capsys.readouterr() == ("", "")


def test_a_callable_gets_every_report():
    seen = []
    with progress(lambda *what: seen.append(what)):
        report("trace", 1, 2)
        report("trace", 2)
    report("trace", 3)
    assert seen == [("trace", 1, 2), ("trace", 2, None)]


def test_the_inner_listener_wins_and_the_outer_comes_back():
    outer, inner = [], []
    with progress(lambda *what: outer.append(what)):
        with progress(lambda *what: inner.append(what)):
            report("a", 1)
        report("b", 1)
    assert (len(outer), len(inner)) == (1, 1)
    assert outer[0][0] == "b"


@pytest.mark.parametrize("stop", [ValueError, KeyboardInterrupt])
def test_listeners_are_dropped_after_an_exception(stop):
    seen = []
    with pytest.raises(stop), progress(lambda *what: seen.append(what)):
        raise stop
    report("late", 1)
    assert seen == []


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_a_pipe_gets_one_line_every_five_seconds(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", pipe := io.StringIO())
    with progress():
        for done in range(25):
            report("sample", done, 24, note="λ̂ 3.1")
            clock[0] += 0.5
    assert pipe.getvalue().splitlines() == [
        "sample 10/24 (λ̂ 3.1), 0:05, about 0:07 left",
        "sample 20/24 (λ̂ 3.1), 0:10, about 0:02 left",
    ]


def test_a_choice_without_a_block_holds_from_there_on(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", pipe := io.StringIO())
    try:
        progress()
        for done in range(3):
            report("trace", done, 900)
            clock[0] += 2700
        assert pipe.getvalue().splitlines() == [
            "trace 1/900, 45:00, about 674:15:00 left",
            "trace 2/900, 1:30:00, about 673:30:00 left",
        ]
        seen = []
        with progress(lambda *what: seen.append(what)):
            report("inner", 1)
        progress(False)
        report("trace", 3, 900)
    finally:
        module._chosen = None
    assert seen == [("inner", 1, None)]
    assert pipe.getvalue().count("\n") == 2


def test_a_task_stays_on_the_line_while_it_contains_others(clock):
    class Kept(module.Tasks):
        wait = every = 0.0

        def __init__(self):
            super().__init__()
            self.lines = []

        def show(self):
            self.lines.append((self.line().partition(",")[0], self.share()))

    kept = Kept()
    with progress(kept):
        report("measure", 0, 2)
        report("lanczos", 1, 100)  # converges after three of at most 100 products
        report("lanczos", 3, 100)
        report("measure", 1, 2)
        report("burn-in", 0, 4)
        report("burn-in", 4, 4)
        report("sample", 1, 2)
        report("measure", 2, 2)
        report("trace", 7)
    texts, shares = zip(*kept.lines, strict=True)
    assert texts == (
        "measure 0/2",
        "measure 0/2 · lanczos 1/100",
        "measure 0/2 · lanczos 3/100",
        "measure 1/2",
        "measure 1/2 · burn-in 0/4",
        "measure 1/2 · burn-in 4/4",
        "measure 1/2 · sample 1/2",
        "measure 2/2",
        "trace 7",
    )
    assert shares == (0, 0.005, 0.015, 0.5, 0.5, 1.0, 0.75, 1.0, 1.0)


def test_a_bar_on_a_terminal(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with progress():
        report("trace", 1, 4)
        report("spectrum", 3, None)
        report("trace", 4, 4)
    text = stream.getvalue()
    assert "trace" in text
    assert "spectrum" in text
    assert "4/4" in text
    report("trace", 1, 4)
    assert stream.getvalue() == text


def test_the_time_left_is_known_where_a_step_takes_minutes(monkeypatch):
    clock, made = [0.0], []

    class Seen(rich.progress.Progress):
        def __init__(self, *columns, **settings):
            super().__init__(*columns, **settings)
            made.append(self)

    monkeypatch.setattr(rich.console, "monotonic", lambda: clock[0])
    monkeypatch.setattr(rich.progress, "Progress", Seen)
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress():
        for done in range(4):
            report("cells", done, 10)
            clock[0] += 300
        (task,) = made[0].tasks
        assert task.time_remaining == pytest.approx(7 * 300)
