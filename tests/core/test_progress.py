"""Progress goes to whoever listens, and to nobody else."""

import io
import sys

import pytest
import rich.console
import rich.progress

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


def test_silent_where_there_is_no_terminal(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress():
        report("trace", 1, 2)
    assert stream.getvalue() == ""


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
