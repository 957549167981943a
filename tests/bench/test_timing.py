"""Timing: medians of ratios within rounds, what fails says so, and memory is seen. No test asks
a clock.
"""

import math

import pytest
import torch

from lambdahat.bench.timing import ENDURANCE, PATIENCE, Clocked, Peak, compare


def clock(times, value=None, log=None, name=""):
    """A task that says itself how long it took, the next of ``times`` at each call."""
    left = iter(times)

    def run():
        if log is not None:
            log.append(name)
        return Clocked(next(left), value)

    return lambda: run


def test_the_cost_is_the_median_ratio_within_a_round():
    # two calls of each prepare: the warm-up, and one that shows that the task times itself
    unit = clock([0.9, 0.9, 0.1, 1.0, 0.1, 0.1, 0.1])
    task = clock([0.9, 0.9, 0.2, 2.0, 0.2, 0.8, 0.2], "answer")
    found = compare({"unit": unit, "task": task}, "unit", rounds=5)
    assert found["task"].cost == 2.0
    assert found["task"].seconds == 0.2
    assert found["task"].value == "answer"
    assert found["unit"].cost == 1.0


def test_the_unit_is_the_best_of_five_samples_and_tasks_are_taken_once(monkeypatch):
    """Its first sample after another task is slow, and does not count."""
    unit = iter([0.5, 0.5, 0.5, *[0.9, 0.5, 0.6, 0.5, 0.7] * 2])
    task = iter([3.0, 1.0, 2.0])
    monkeypatch.setattr("lambdahat.bench.timing.seconds", lambda run, number=1: (run(), None))
    makers = {"unit": lambda: lambda: next(unit), "task": lambda: lambda: next(task)}
    found = compare(makers, "unit", rounds=2)
    assert found["unit"].seconds == 0.5
    assert found["task"].cost == 3.0  # (1/0.5 + 2/0.5)/2
    assert next(unit, None) is None


def test_rounds_are_interleaved():
    log = []
    makers = {name: clock([0.5] * 9, log=log, name=name) for name in "abc"}
    compare(makers, "a", rounds=3)
    assert log[-9:] == list("abc") * 3


@pytest.mark.parametrize(
    ("calls", "seconds"),
    [
        ([2 * PATIENCE, PATIENCE], PATIENCE),  # a first call may search for its kernels
        ([2 * PATIENCE, 3 * PATIENCE], 2 * PATIENCE),
        ([2 * ENDURANCE], 2 * ENDURANCE),
    ],
)
def test_a_long_task_is_run_twice_and_a_very_long_one_once(calls, seconds):
    log = []
    slow = clock(calls, "slow", log, "slow")
    found = compare({"unit": clock([1.0, 1.0, 2.0, 2.0, 2.0]), "slow": slow}, "unit", rounds=3)
    assert log == ["slow"] * len(calls)
    assert found["slow"].cost == seconds / 2
    assert found["slow"].value == "slow"


def test_a_broken_task_has_a_note_and_the_rest_its_times():
    def broken():
        raise ImportError("no module named\n peer")

    found = compare(
        {"unit": clock([1.0] * 9), "peer": broken, "ours": clock([3.0] * 9)}, "unit", rounds=2
    )
    assert found["peer"].note == "ImportError: no module named peer"
    assert math.isnan(found["peer"].cost)
    assert found["ours"].cost == 3.0


def test_without_its_unit_nothing_can_be_said():
    def broken():
        raise RuntimeError("no gradient")

    with pytest.raises(RuntimeError, match="no gradient"):
        compare({"unit": broken}, "unit", rounds=1)


def test_short_tasks_fill_a_sample_and_their_answers_are_kept():
    calls = []
    found = compare(
        {"unit": lambda: lambda: calls.append(1) or len(calls)}, "unit", rounds=1, sample_s=1e-4
    )
    assert found["unit"].value == len(calls) > 3
    assert found["unit"].cost == 1.0


def test_peak_memory_is_seen():
    with Peak() as peak:
        torch.ones(2**23, dtype=torch.float32)  # 32 MiB, freed at once
    if math.isnan(peak.mebibytes):
        pytest.skip("this system does not tell the peak memory of a process")
    assert 30 < peak.mebibytes < 60
