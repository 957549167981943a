"""TensorBoard and Weights & Biases get the numbers of every row, by stand-ins for both."""

import sys
import types
from typing import ClassVar

import pytest

from tests.training.small_runs import Setup, StepCount


class Writer:
    made: ClassVar[list["Writer"]] = []

    def __init__(self, log_dir, purge_step=None):
        self.log_dir, self.purge_step, self.scalars, self.closed = log_dir, purge_step, [], False
        Writer.made.append(self)

    def add_scalar(self, name, value, step):
        self.scalars.append((name, value, step))

    def close(self):
        self.closed = True


@pytest.fixture
def tensorboard(monkeypatch):
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(Writer, "made", [])
    return Writer.made


@pytest.fixture
def wandb(monkeypatch):
    module, calls = types.ModuleType("wandb"), []
    run = types.SimpleNamespace(
        log=lambda row, step: calls.append(("log", row, step)),
        finish=lambda: calls.append(("finish",)),
    )
    module.init = lambda **options: calls.append(("init", options)) or run
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


def test_tensorboard(tensorboard, tmp_path):
    run = Setup("sgd").fit(2, tmp_path, loggers=["tensorboard"], trackers=[StepCount(3, "step")])
    (writer,) = tensorboard
    assert writer.log_dir == str(tmp_path / "tensorboard")
    assert writer.closed
    assert writer.purge_step is None
    assert [entry for entry in writer.scalars if entry[0] == "loss"] == [
        ("loss", row["loss"], row["step"]) for row in run.epochs
    ]
    assert [step for name, _, step in writer.scalars if name == "count_step"] == [3, 6, 9]
    assert not any(name in ("kind", "count_step_nan") for name, _, _ in writer.scalars)
    Setup("sgd").fit(
        3, tmp_path, loggers=["tensorboard"], trackers=[StepCount(3, "step")], resume=True
    )
    assert tensorboard[1].purge_step == 11


def test_wandb(wandb, tmp_path):
    run = Setup("sgd").fit(2, tmp_path, loggers=["wandb"])
    Setup("sgd").fit(3, tmp_path, loggers=["wandb"], resume=True)
    starts = [call[1] for call in wandb if call[0] == "init"]
    assert starts[0]["id"] == starts[1]["id"]
    assert starts[0]["resume"] == "allow"
    assert starts[0]["config"]["batch_size"] == 64
    logged = [call for call in wandb if call[0] == "log"]
    assert [step for _, _, step in logged] == [5, 10, 15]
    assert logged[1][1]["loss"] == run.last["loss"]
    assert wandb[-1] == ("finish",)


def test_a_logger_of_ones_own_is_closed_after_an_error():
    class Own:
        rows, closed = (), 0

        def log(self, row):
            self.rows = (*self.rows, row["step"])

        def close(self):
            self.closed += 1

    class Stops:
        name, every, unit = "stops", 7, "step"

        def measure(self, problem, optimizer, epoch, step):
            raise RuntimeError("stop")

    own = Own()
    with pytest.raises(RuntimeError, match="stop"):
        Setup("sgd").fit(2, loggers=[own], trackers=[Stops()])
    assert own.rows == (5,)
    assert own.closed == 1
