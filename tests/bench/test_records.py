"""Records of the benchmark: ratios, what is to be explained, and what counts as a regression."""

import math

import pytest

from lambdahat.bench import BenchResult, BenchRow, regressions
from lambdahat.bench.records import OURS, UNIT, failures, merged
from lambdahat.report.figures import plot
from lambdahat.results import Result


def record(ours=2.0, peer=4.0, work="HVP", error=1e-7, accuracy=1e-3, limit=math.nan, **others):
    costs = {UNIT: 1.0, OURS: ours, "peer": peer, **others}
    known, limits = {"error": error, "accuracy": accuracy}, {OURS: limit}
    rows = [
        BenchRow(work, "mlp", by, 0.01 * cost, cost, limit=limits.get(by, math.nan), **known)
        for by, cost in costs.items()
    ]
    return BenchResult(tuple(rows), {"chip": "a chip", "torch": "2.6"})


def joined(*records):
    return BenchResult(tuple(row for one in records for row in one.rows), records[0].about)


def test_ratios_and_what_is_to_be_explained():
    found = record(ours=2.0, peer=4.0, quick=1.0, limit=1.0)
    rows = found.of("HVP", "mlp")
    assert found.ratio(rows["peer"]) == 0.5
    assert found.faster_peers() == [rows["quick"]]
    assert found.far_from_limit() == [rows[OURS]]
    assert found.far_from_limit(2.0) == []
    assert found.tasks() == [("HVP", "mlp")]
    assert len(found) == 4
    assert record(ours=2.0, peer=1.0, error=0.1).faster_peers() == []  # for what it says is wrong


def test_the_machine_s_limit_is_the_slower_of_arithmetic_and_traffic():
    row = BenchRow("HVP", "mlp", OURS, seconds=6.0, flop_seconds=2.0, byte_seconds=3.0)
    assert row.over_machine == 2.0
    assert math.isnan(BenchRow("HVP", "mlp", OURS, seconds=6.0).over_machine)


def test_a_record_is_stored_and_drawn(tmp_path):
    found = record(limit=1.1, broken=math.nan)
    stored = Result.load(found.save(tmp_path / "bench"))
    assert [row.cost for row in stored.rows][:3] == [1.0, 2.0, 4.0]
    axes = plot(stored)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["HVP (mlp)"]
    points = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert points == {"peer": [[4.0, 0.0]], OURS: [[2.0, 0.0]], "limit": [[1.1, 0.0]]}


@pytest.mark.parametrize(
    ("now", "slower"),
    [
        (record(), []),
        (record(ours=2.29, peer=4.0), []),  # 14.5 %
        (record(ours=2.4, peer=4.0), [1.2]),
        (record(ours=2.4, peer=4.8), []),  # only the unit says so: it was the unit that was faster
        (record(ours=2.0, peer=3.0), []),  # the peer became faster, ours did not become slower
        (record(ours=2.6, peer=math.nan), [1.3]),
        (joined(record(work="another", ours=9.0), record()), []),
    ],
)
def test_slower_than_on_record_in_every_ratio(now, slower):
    assert [one.growth for one in regressions(now, record())] == pytest.approx(slower)


def test_a_task_of_ours_that_raised_fails():
    broken = BenchRow("HVP", "mlp", OURS, note="ValueError: no")
    now = BenchResult((*(row for row in record().rows if row.by != OURS), broken), record().about)
    (one,) = regressions(now, record())
    assert str(one) == "HVP, mlp: no answer, ValueError: no"
    assert failures(now) == [one]
    assert merged(now, record()).of("HVP", "mlp")[OURS].cost == 2.0  # a second look that worked
    assert failures(record()) == []


def test_only_runs_of_one_kind_are_compared():
    with pytest.raises(
        ValueError, match=r"the record must have a task in common with this run, got none$"
    ):
        regressions(record(work="another"), record())
    quick = BenchResult(record().rows, {"quick": True})
    with pytest.raises(
        ValueError,
        match=r"the record must be of a run with quick True, as this one, got None; compare",
    ):
        regressions(quick, record())


def test_an_answer_that_is_not_accurate_fails_whatever_its_time():
    (one,) = regressions(record(ours=1.0, error=0.1), record())
    assert str(one) == "HVP, mlp: the error is 0.1, more than was asked for"
    (one,) = regressions(record(ours=3.0), record())
    assert str(one) == "HVP, mlp: 1.50 times what is on record"


def test_a_second_look_keeps_the_better_run_of_each_task():
    first = joined(record(ours=3.0), record(ours=1.0, work="trace"))
    again = joined(record(ours=2.1), record(ours=1.5, work="trace"))
    both = merged(first, again)
    assert [both.of(work, "mlp")[OURS].cost for work in ("HVP", "trace")] == [2.1, 1.0]
    assert regressions(both, joined(record(), record(ours=1.0, work="trace"))) == []


def test_tolerance_must_be_positive():
    with pytest.raises(ValueError, match="tolerance must be a finite number above 0, got 0"):
        regressions(record(), record(), 0)
