"""Trackers in a loop of one's own: what is measured when, what is written, and going on."""

import json
import math

import pytest
import torch

import lambdahat as lh
from lambdahat.training import Run, make_tracker, read_rows, tracking
from lambdahat.training.callbacks import Tracking
from tests.cases import classifier


class Counting:
    """A tracker of one's own, without any state."""

    name = "counting"

    def __init__(self, every, unit):
        self.every, self.unit, self.calls = every, unit, []

    def measure(self, problem, optimizer=None, epoch=0, step=0):
        self.calls.append((epoch, step))
        return {"counting": float(len(self.calls))}


def trained(problem, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        named = dict(problem.model.named_parameters())
        sum(
            weight * problem.batch_loss(named, batch) for weight, batch in problem.weighted()
        ).backward()
        optimizer.step()
        yield


def small():
    problem = classifier(samples=30, batch_size=None)
    return problem, torch.optim.SGD(problem.model.parameters(), lr=0.1)


def test_what_is_due_is_measured():
    problem, optimizer = small()
    by_step, by_epoch = Counting(3, "step"), Counting(2, "epoch")
    by_epoch.name = "other"
    with tracking(problem, [by_step, by_epoch], optimizer, steps_per_epoch=4) as track:
        for epoch in range(3):
            for _ in trained(problem, optimizer, 4):
                track.step()
            row = track.epoch(loss=0.5) if epoch == 2 else track.epoch()
    assert by_step.calls == [(0, 0), (0, 3), (1, 6), (2, 9), (2, 12)]
    assert by_epoch.calls == [(0, 0), (2, 8)]
    place = {"kind": "epoch", "epoch": 3, "step": 12, "progress": 3.0}
    assert row == {**place, "loss": 0.5, "learning_rate": 0.1}
    kinds = [(row["kind"], row["progress"]) for row in track.rows]
    assert kinds == [
        ("start", 0.0),
        ("step", 0.75),
        ("step", 1.5),
        ("epoch", 2.0),
        ("step", 2.25),
        ("step", 3.0),
        ("epoch", 3.0),
    ]


def test_rows_follow_the_training_and_are_on_disk(tmp_path):
    problem, optimizer = small()
    folder = tmp_path / "run"
    with tracking(problem, "norms,edge", optimizer, folder) as track:
        for _ in trained(problem, optimizer, 2):
            track.epoch()
            assert track.rows[-1]["norms_l2"] == pytest.approx(float(problem.vector.norm()))
            assert len(read_rows(folder / "metrics.jsonl")) == len(track.rows)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [0, 1, 2]
    run = Run.load(folder / "training.json")
    progress, values = run.column("edge")
    assert list(progress) == [0.0, 1.0, 2.0]
    assert list(values) == [row["edge"] for row in track.rows]
    assert (folder / "metrics.csv").read_text().count("\n") == 4


def test_full_results_are_kept_beside_the_rows(tmp_path):
    problem, optimizer = small()
    with tracking(
        problem, [make_tracker("spectrum", keep=True, unit="step")], optimizer, tmp_path / "run"
    ) as track:
        for _ in trained(problem, optimizer, 2):
            track.step()
    kept = sorted(path.name for path in (tmp_path / "run" / "measurements").glob("*.json"))
    assert kept == [f"spectrum-0000000{step}.json" for step in range(3)]
    assert isinstance(lh.Result.load(tmp_path / "run" / "measurements" / kept[-1]), lh.Spectrum)


def without_seconds(rows):
    return [
        {k: v if v == v else None for k, v in row.items() if "seconds" not in k} for row in rows
    ]


def test_a_loaded_state_goes_on_to_the_same_rows(tmp_path):
    """Saved after two steps, lost after three: rows later than the state are written again, with
    the same numbers.
    """
    problem, optimizer = small()
    names = [make_tracker(name, unit="step") for name in ("top", "edge", "trace")]
    with tracking(problem, names, optimizer, tmp_path / "whole") as whole:
        for _ in trained(problem, optimizer, 4):
            whole.step()
    problem, optimizer = small()
    names = [make_tracker(name, unit="step") for name in ("top", "edge", "trace")]
    kept = {}
    with tracking(problem, names, optimizer, tmp_path / "broken") as track:
        for number, _ in enumerate(trained(problem, optimizer, 3), start=1):
            track.step()
            if number == 2:
                kept = {"theta": problem.vector, "track": track.state_dict()}
    problem, optimizer = small()
    torch.nn.utils.vector_to_parameters(kept["theta"], problem.model.parameters())
    names = [make_tracker(name, unit="step") for name in ("top", "edge", "trace")]
    with tracking(problem, names, optimizer, tmp_path / "broken", resume=True) as track:
        track.load_state_dict(kept["track"])
        for _ in trained(problem, optimizer, 2):
            track.step()
    assert without_seconds(track.rows) == without_seconds(whole.rows)
    assert without_seconds(read_rows(tmp_path / "broken" / "metrics.jsonl")) == without_seconds(
        whole.rows
    )


def test_resuming_without_a_state_counts_on_from_the_last_row(tmp_path):
    problem, optimizer = small()
    with tracking(problem, "norms", optimizer, tmp_path) as track:
        track.step()
        track.epoch()
    with tracking(problem, "norms", optimizer, tmp_path, resume=True) as track:
        track.step()
        track.epoch()
    assert [(row["epoch"], row["step"]) for row in track.rows] == [(0, 0), (1, 1), (2, 2)]


def test_rows_up_to_a_step_are_taken_up(tmp_path):
    problem, optimizer = small()
    with tracking(problem, [make_tracker("norms", unit="step")], optimizer, tmp_path) as track:
        for _ in range(4):
            track.step()
    again = Tracking(problem, "norms", optimizer, tmp_path)
    again.begin(resume=True, upto=2)
    assert [row["step"] for row in again.rows] == [0, 1, 2]
    assert again.steps == 2


def test_an_error_in_the_loop_passes_and_the_rows_stay(tmp_path):
    problem, optimizer = small()

    def loop():
        with tracking(problem, "norms", optimizer, tmp_path) as track:
            track.epoch()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert len(Run.load(tmp_path / "training.json").history) == 2


@pytest.mark.parametrize("change", ["data", "settings", "nothing"])
def test_rows_of_other_data_or_trackers_are_not_gone_on_with(change, tmp_path):
    problem, optimizer = small()
    with tracking(problem, [make_tracker("top", k=2, unit="step")], optimizer, tmp_path) as track:
        track.step()
    x, y = next(iter(problem.batches)).data
    other = problem.on((x, y.flip(0))) if change == "data" else problem
    trackers = [make_tracker("top", k=3 if change == "settings" else 2, every=5)]
    if change == "nothing":
        with tracking(other, trackers, optimizer, tmp_path, resume=True) as track:
            assert track.steps == 1
        return
    named = "a run on the same data" if change == "data" else "a run with trackers = "
    with (
        pytest.raises(ValueError, match=f"folder must hold {named}"),
        tracking(other, trackers, optimizer, tmp_path, resume=True),
    ):
        pass


def test_an_optimizer_is_needed_only_by_those_that_ask_for_it():
    problem, _ = small()
    with (
        pytest.warns(RuntimeWarning, match="the tracker 'effective_rate' could not measure"),
        tracking(problem, "trace,effective_rate") as track,
    ):
        pass
    assert math.isfinite(track.rows[0]["trace"])
    assert track.rows[0]["effective_rate_status"].startswith("TypeError: optimizer must be")


def test_fit_with_trackers_is_fit_without(tmp_path):
    """The library's own loop: the same parameters to the last bit, and the columns in its rows."""
    found = []
    for trackers in (
        [],
        [make_tracker("edge"), make_tracker("top", every=2, unit="step", keep=True)],
    ):
        problem = classifier(samples=40, batch_size=None)
        optimizer = torch.optim.SGD(problem.model.parameters(), lr=0.1, momentum=0.9)
        run = lh.training.fit(
            problem,
            optimizer,
            2,
            batch_size=10,
            trackers=trackers,
            folder=tmp_path / f"run{len(trackers)}",
        )
        found.append(problem.vector)
    assert torch.equal(*found)
    assert len(run.column("edge")[0]) == 2
    assert len(run.column("top_1")[0]) == 4
    assert len(list((tmp_path / "run2").glob("**/top-*.json"))) == 4


MISUSES = {
    "a model": (
        lambda p: tracking(p.model, "trace"),
        TypeError,
        "problem must be a lambdahat.Problem",
    ),
    "no trackers": (lambda p: tracking(p, []), ValueError, "trackers must hold at least one"),
    "an unknown name": (lambda p: tracking(p, "trace,lambda"), ValueError, "name must be one of"),
    "what is no tracker": (
        lambda p: tracking(p, [3]),
        TypeError,
        "trackers must have name, every, unit and measure",
    ),
    "a number": (
        lambda p: tracking(p, 3),
        TypeError,
        "trackers must be a list of trackers or names",
    ),
    "a tracker twice": (
        lambda p: tracking(p, ["trace", make_tracker("trace")]),
        ValueError,
        "trackers must be one of a kind.*got trace",
    ),
    "epochs of no steps": (
        lambda p: tracking(p, "trace", steps_per_epoch=0),
        ValueError,
        "steps_per_epoch must be",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse(name):
    make, error, message = MISUSES[name]
    with pytest.raises(error, match=message), make(small()[0]):
        pass


def test_a_folder_with_a_run_in_it_is_refused(tmp_path):
    problem, _ = small()
    with tracking(problem, "norms", folder=tmp_path):
        pass
    with (
        pytest.raises(ValueError, match=r"folder must be new or empty.*which holds a run"),
        tracking(problem, "norms", folder=tmp_path),
    ):
        pass
