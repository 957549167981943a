"""A run that stops and goes on ends at the same bits, with the same rows, as one that never
stopped.
"""

import json
import os
import shutil

import pytest
import torch

from lambdahat import optim
from lambdahat.problem import Problem
from lambdahat.results import Result
from lambdahat.training import EarlyStopping, Run, fit, read_rows
from lambdahat.training.checkpoints import weights
from tests.training.small_runs import KINDS, TEST, TRAIN, Setup, StepCount, plain, same, timeless


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    """Nobody pulls the plug here: what the system has taken is as good as on the disk."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def trackers():
    return [StepCount(3, "step"), StepCount(1, "epoch")]


def whole_run(kind, folder, **options):
    setup = Setup(kind)
    run = setup.fit(3, folder, trackers=trackers(), keep=100, checkpoint_steps=2, **options)
    return setup, run


def copy_up_to(folder, target, step):
    """The folder as it was when the checkpoint of ``step`` had just been written, and a little
    later.
    """
    shutil.copytree(folder, target)
    (target / "training.json").unlink()
    for path in (target / "checkpoints").glob("step-*"):
        if int(path.stem.removeprefix("step-")) > step:
            path.unlink()


def steps_of(folder):
    return sorted(
        int(path.stem.removeprefix("step-"))
        for path in (folder / "checkpoints").glob("step-*.json")
    )


EVERY = [2, 4, 5, 6, 8, 10, 12, 14, 15]  # five steps an epoch: in the middle and at the end
SOME = {kind: EVERY if kind in ("sgd", "averaged") else [4, 6, 10] for kind in KINDS}


@pytest.mark.parametrize(("kind", "stops"), SOME.items())
def test_resumes_bit_for_bit_from_checkpoints(kind, stops, tmp_path):
    whole, run = whole_run(kind, tmp_path / "whole")
    assert same(whole.tensors, _unsaved(kind).tensors)  # writing checkpoints changes nothing
    assert steps_of(tmp_path / "whole") == EVERY
    for step in stops:
        folder = tmp_path / f"from-{step}"
        copy_up_to(tmp_path / "whole", folder, step)
        setup = Setup(kind)
        with torch.no_grad():
            for parameter in setup.model.parameters():  # what the model starts from must not matter
                parameter.add_(1.0)
        torch.manual_seed(step)
        again = setup.fit(3, folder, trackers=trackers(), keep=100, checkpoint_steps=2, resume=True)
        assert same(setup.tensors, whole.tensors)
        assert timeless(again.history) == timeless(run.history)
        assert timeless(read_rows(folder / "metrics.jsonl")) == timeless(run.history)
        assert again.averaged == run.averaged
        assert timeless([again.best]) == timeless([run.best])
        assert steps_of(folder) == EVERY
        if setup.options.get("averaging"):
            averages = [s.options["averaging"].model.state_dict() for s in (setup, whole)]
            assert same(*averages)


def _unsaved(kind):
    setup = Setup(kind)
    setup.fit(3, trackers=trackers())
    return setup


def test_a_run_stopped_by_an_error_goes_on(tmp_path):
    class Stops:
        name, every, unit = "stops", 1, "step"

        def __init__(self, at):
            self.at = at

        def measure(self, problem, optimizer, epoch, step):
            if step == self.at:
                raise KeyboardInterrupt
            return {}

    whole = Setup("sgd")
    run = whole.fit(3, tmp_path / "whole", trackers=[Stops(0)])
    for at in (1, 5, 6, 14):
        setup = Setup("sgd")
        with pytest.raises(KeyboardInterrupt):
            setup.fit(3, tmp_path / f"{at}", trackers=[Stops(at)])
        setup = Setup("sgd")
        again = setup.fit(3, tmp_path / f"{at}", trackers=[Stops(0)], resume=True)
        assert same(setup.tensors, whole.tensors)
        assert timeless(again.history) == timeless(run.history)


def test_a_finished_run_is_read_and_can_be_prolonged(tmp_path):
    long, short = Setup("averaged"), Setup("averaged")
    run = long.fit(4, tmp_path / "long")
    short.fit(2, tmp_path / "short")
    again = Setup("averaged")
    read = again.fit(2, tmp_path / "short", resume=True)
    assert (len(read), read.ended) == (2, "epochs")
    assert same(again.tensors, short.tensors)
    more = Setup("averaged")
    prolonged = more.fit(4, tmp_path / "short", resume=True)
    assert same(more.tensors, long.tensors)
    assert timeless(prolonged.history) == timeless(run.history)
    assert timeless(Result.load(tmp_path / "short" / "training.json").history) == timeless(
        run.history
    )


@pytest.mark.parametrize("step", [8, 10])
def test_a_killed_run_is_not_prolonged_beyond_the_epochs_asked_for(step, tmp_path):
    """It was to have three epochs, and stopped in the middle or at the end of the second."""
    _, run = whole_run("sgd", tmp_path / "whole")
    for epochs in (1, 2):
        folder = tmp_path / f"for-{epochs}"
        copy_up_to(tmp_path / "whole", folder, step)
        setup = Setup("sgd")
        options = {"trackers": trackers(), "keep": 100, "checkpoint_steps": 2}
        again = setup.fit(epochs, folder, resume=True, **options)
        there = max(epochs, step // 5)
        assert (len(again), again.ended) == (there, "epochs")
        assert timeless(again.epochs) == timeless(run.epochs[:there])


class Centred(torch.nn.Module):
    """It puts a new tensor in place of a buffer in every pass, as is common."""

    def __init__(self):
        super().__init__()
        self.inner = plain()
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.inner(x - self.mean)


def test_buffers_that_are_replaced_resume(tmp_path):
    def train(folder, epochs, resume=False):
        model = Centred()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        problem = Problem(model, "cross_entropy", TRAIN)
        fit(problem, optimizer, epochs, folder=folder, resume=resume)
        return model.state_dict()

    whole = train(tmp_path / "whole", 3)
    train(tmp_path / "two", 2)
    assert same(train(tmp_path / "two", 3, resume=True), whole)
    assert same(
        weights(tmp_path / "two"), {name: whole[name] for name in weights(tmp_path / "two")}
    )
    assert whole["mean"].any()


def test_early_stopping_resumes_with_its_patience_and_restores_the_best(tmp_path):
    def train(folder, epochs, resume=False):
        model = plain()
        problem = Problem(model, "cross_entropy", TRAIN)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        stopping = EarlyStopping(2, "validation_accuracy", restore=True)
        run = fit(
            problem,
            optimizer,
            epochs,
            validation=TEST,
            early_stopping=stopping,
            folder=folder,
            resume=resume,
        )
        return model, run

    model, run = train(tmp_path / "whole", 200)
    assert run.ended == "early stopping"
    train(tmp_path / "parts", run.best["epoch"] + 1)
    parts, again = train(tmp_path / "parts", 200, resume=True)
    assert same(parts.state_dict(), model.state_dict())
    assert timeless(again.history) == timeless(run.history)
    ended, once_more = train(tmp_path / "parts", 200, resume=True)
    assert once_more.ended == "early stopping"
    assert same(ended.state_dict(), model.state_dict())


def test_patience_of_an_optimiser_resumes(tmp_path):
    def train(folder, epochs, resume=False):
        model = plain()
        optimizer = optim.GadamAuto(model.parameters(), lr=0.3, patience=2)
        problem = Problem(model, "cross_entropy", TRAIN)
        return model, fit(problem, optimizer, epochs, validation=TEST, folder=folder, resume=resume)

    model, run = train(tmp_path / "whole", 100)
    for epochs in range(1, len(run)):
        train(tmp_path / "parts", epochs, resume=True)
    parts, again = train(tmp_path / "parts", 100, resume=True)
    assert same(parts.state_dict(), model.state_dict())
    assert timeless(again.history) == timeless(run.history)


def test_resume_in_an_empty_folder_begins(tmp_path):
    first, second = Setup("sgd"), Setup("sgd")
    first.fit(1, tmp_path / "new", resume=True)
    second.fit(1)
    assert same(first.tensors, second.tensors)


def test_rows_on_disk_are_those_of_the_run(tmp_path):
    run = Setup("sgd").fit(2, tmp_path, trackers=[StepCount(2, "step")])
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert timeless(rows) == timeless(run.history)
    header, *lines = (tmp_path / "metrics.csv").read_text().splitlines()
    columns = header.split(",")
    assert len(lines) == len(rows)
    assert set(columns) == {key for row in rows for key in row}
    last = dict(zip(columns, lines[-1].split(","), strict=True))
    assert float(last["loss"]) == run.last["loss"]
    assert last["count_step_nan"] == ""
    with open(tmp_path / "metrics.jsonl", encoding="utf-8") as stream:
        assert json.loads(stream.readline())["count_step_nan"] is None
    assert isinstance(Result.load(tmp_path / "training.json"), Run)


def test_only_the_last_and_the_best_stay(tmp_path):
    model = plain()
    problem = Problem(model, "cross_entropy", TRAIN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    watch = EarlyStopping(6, "validation_accuracy")
    run = fit(
        problem,
        optimizer,
        200,
        batch_size=300,
        validation=TEST,
        early_stopping=watch,
        folder=tmp_path,
        keep=2,
    )
    last, best = run.last["step"], run.best["step"]
    assert steps_of(tmp_path) == sorted({best, last - 1, last})
    assert last - best == 6
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {
        "best.json",
        "initial.safetensors",
        *(
            f"step-{step:08d}.{kind}"
            for step in {best, last - 1, last}
            for kind in ("json", "safetensors")
        ),
    }


def test_a_diverged_run_keeps_what_was_good(tmp_path):
    model = plain()
    problem = Problem(model, "cross_entropy", TRAIN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda epoch: 1.0 if epoch < 2 else 1e35
    )
    run = fit(problem, optimizer, 5, schedule=schedule, folder=tmp_path)
    assert run.ended == "diverged"
    last_good = json.loads((tmp_path / "checkpoints" / "best.json").read_text())["checkpoint"]
    assert steps_of(tmp_path)[-1] == run.epochs[-2]["step"]
    assert last_good == f"step-{run.epochs[1]['step']:08d}.json"


def test_a_schedule_for_more_epochs_goes_on_as_the_longer_one(tmp_path):
    def rates(epochs, resume=False):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        problem = Problem(model, "mse", (torch.ones(8, 3), torch.ones(8, 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = optim.schedules.cosine(optimizer, epochs)
        run = fit(problem, optimizer, epochs, schedule=schedule, folder=tmp_path, resume=resume)
        return [row["learning_rate"] for row in run.epochs]

    rates(3)
    longer = rates(5, resume=True)[3:]
    shutil.rmtree(tmp_path)
    assert longer == rates(5)[3:]
