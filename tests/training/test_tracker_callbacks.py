"""The trackers as callbacks of Lightning and of Hugging Face: the real ones where they are
installed.
"""

import importlib.util
import re
import sys
import types

import pytest
import torch
from torch import nn

import lambdahat as lh
from lambdahat.training import HuggingFaceTracker, LightningTracker, make_tracker, read_rows


def network():
    return lh.models.mlp([4, 5, 3], seed=0)


def data():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(24, 4, generator=generator), torch.randint(0, 3, (24,), generator=generator)


def problem_of(model):
    return lh.Problem(model, "cross_entropy", data())


def trackers():
    return [make_tracker("edge", every=2, unit="step"), make_tracker("norms")]


class FakeTrainer:
    """As much of Lightning's trainer as a callback sees."""

    def __init__(self, callback, module, optimizer):
        self.callback, self.module, self.optimizers = callback, module, [optimizer]
        self.global_step = self.current_epoch = 0
        self.is_global_zero, self.loggers, self.logged = True, [self], []

    def log_metrics(self, row, step):
        self.logged.append((step, row))

    def fit(self, epochs, accumulate=2):
        """Three optimiser steps an epoch, each of ``accumulate`` batches."""
        x, y = data()
        self.callback.on_train_start(self, self.module)
        for _ in range(epochs):
            for batch in range(3 * accumulate):
                (nn.functional.cross_entropy(self.module.network(x), y) / accumulate).backward()
                if batch % accumulate == accumulate - 1:
                    self.optimizers[0].step()
                    self.optimizers[0].zero_grad()
                    self.global_step += 1
                self.callback.on_train_batch_end(self, self.module, None, None, batch)
            self.callback.on_train_epoch_end(self, self.module)
            self.current_epoch += 1


@pytest.fixture
def fake_lightning(monkeypatch):
    package, inner = types.ModuleType("lightning"), types.ModuleType("lightning.pytorch")
    inner.Callback = type("Callback", (), {})
    package.pytorch = inner
    monkeypatch.setitem(sys.modules, "lightning", package)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", inner)


@pytest.mark.parametrize(
    ("make", "package", "module"),
    [
        (LightningTracker, "lightning", "lightning.pytorch"),
        (HuggingFaceTracker, "transformers", "transformers"),
    ],
)
def test_a_framework_that_is_not_installed_is_named_with_its_extra(
    monkeypatch, make, package, module
):
    monkeypatch.setitem(sys.modules, module, None)
    cure = re.escape(f'needs {package}, which is not installed; pip install "lambdahat[{package}]"')
    with pytest.raises(ModuleNotFoundError, match=cure):
        make(["trace"], problem_of)


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = network()


@pytest.mark.usefixtures("fake_lightning")
def test_lightning_hooks_measure_at_steps_and_epochs(tmp_path):
    module = Module()
    callback = LightningTracker(trackers(), lambda m: problem_of(m.network), tmp_path / "run")
    trainer = FakeTrainer(callback, module, torch.optim.SGD(module.parameters(), lr=0.1))
    trainer.fit(2)
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    seen = [(row["kind"], row["epoch"], row["step"]) for row in rows]
    assert seen == [
        ("start", 0, 0),
        ("step", 0, 2),
        ("epoch", 1, 3),
        ("step", 1, 4),
        ("step", 1, 6),
        ("epoch", 2, 6),
    ]
    assert [step for step, _ in trainer.logged] == [0, 2, 3, 4, 6, 6]
    assert trainer.logged[1][1]["edge"] == rows[1]["edge"] > 0
    assert all(
        isinstance(value, int | float) for _, row in trainer.logged for value in row.values()
    )


class Own:
    """A logger of one's own."""

    def __init__(self):
        self.steps, self.closed = [], 0

    def log(self, step, values):
        self.steps.append(step)

    def close(self):
        self.closed += 1


@pytest.mark.usefixtures("fake_lightning")
def test_lightning_loggers_get_every_row(tmp_path):
    module, own = Module(), Own()
    callback = LightningTracker(
        trackers(), lambda m: problem_of(m.network), tmp_path / "run", [own, "csv"]
    )
    trainer = FakeTrainer(callback, module, torch.optim.SGD(module.parameters(), lr=0.1))
    trainer.fit(1)
    callback.on_exception(trainer, module, KeyboardInterrupt())
    callback.on_train_end(trainer, module)
    assert own.steps == [0, 2, 3]
    assert own.closed == 1
    assert len((tmp_path / "run" / "log.csv").read_text().splitlines()) == 4
    with pytest.raises(ValueError, match="loggers must be one of 'csv', 'tensorboard'"):
        LightningTracker("norms", problem_of, loggers=["comet"])


@pytest.mark.usefixtures("fake_lightning")
def test_lightning_checkpoints_resume_the_same_rows(tmp_path):
    def made(folder):
        module = Module()
        callback = LightningTracker(trackers(), lambda m: problem_of(m.network), folder)
        return callback, FakeTrainer(callback, module, torch.optim.SGD(module.parameters(), lr=0.1))

    _, whole = made(tmp_path / "whole")
    whole.fit(2)
    callback, first = made(tmp_path / "parts")
    first.fit(1)
    again, second = made(tmp_path / "parts")
    second.module.load_state_dict(first.module.state_dict())
    second.global_step, second.current_epoch = first.global_step, first.current_epoch
    again.load_state_dict(callback.state_dict())
    second.fit(1)

    def plain(folder):
        rows = read_rows(folder / "metrics.jsonl")
        return [{k: v for k, v in row.items() if "seconds" not in k and v == v} for row in rows]

    assert plain(tmp_path / "parts") == plain(tmp_path / "whole")


@pytest.mark.usefixtures("fake_lightning")
def test_other_ranks_measure_nothing(tmp_path):
    module = Module()
    callback = LightningTracker(trackers(), lambda m: problem_of(m.network), tmp_path / "run")
    trainer = FakeTrainer(callback, module, torch.optim.SGD(module.parameters(), lr=0.1))
    trainer.is_global_zero = False
    trainer.fit(1)
    assert callback.state_dict() == {}
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("fake_lightning")
def test_a_problem_in_place_of_a_function_is_refused():
    with pytest.raises(TypeError, match="problem_fn must be a function of the module"):
        LightningTracker("norms", problem_of(network()))


@pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="lightning is not installed"
)
@pytest.mark.filterwarnings("ignore")
def test_a_lightning_trainer_with_trackers_is_one_without(tmp_path):
    import lightning.pytorch as pl

    class Lit(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network()

        def training_step(self, batch, index):
            x, y = batch
            return nn.functional.cross_entropy(self.network(x), y)

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.01)

    def parameters(callbacks):
        module = Lit()
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data()), batch_size=8)
        options = {
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "accelerator": "cpu",
        }
        trainer = pl.Trainer(
            max_epochs=2, callbacks=callbacks, enable_model_summary=False, **options
        )
        trainer.fit(module, loader)
        return torch.nn.utils.parameters_to_vector(module.parameters())

    callback = LightningTracker(trackers(), lambda m: problem_of(m.network), tmp_path / "run")
    assert torch.equal(parameters([callback]), parameters([]))
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [(r["kind"], r["epoch"], r["step"]) for r in rows] == [
        ("start", 0, 0),
        ("step", 0, 2),
        ("epoch", 1, 3),
        ("step", 1, 4),
        ("step", 1, 6),
        ("epoch", 2, 6),
    ]
    assert rows[-1]["norms_status"] == rows[-2]["edge_status"] == "CONVERGED"


@pytest.mark.filterwarnings("ignore")
def test_hugging_face_callbacks_are_called_by_their_own_handler(tmp_path):
    callback_module = pytest.importorskip("transformers.trainer_callback")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = types.SimpleNamespace(optimizer=optimizer)  # as accelerate hands it out
    own = Own()
    callback = HuggingFaceTracker(trackers(), problem_of, tmp_path / "run", [own])
    handler = callback_module.CallbackHandler([callback], model, None, wrapped, None)
    state, control = callback_module.TrainerState(), callback_module.TrainerControl()
    x, y = data()
    handler.on_train_begin(None, state, control)
    for epoch in range(2):
        for step in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            state.global_step, state.epoch = state.global_step + 1, epoch + (step + 1) / 3
            handler.on_step_end(None, state, control)
        handler.on_epoch_end(None, state, control)
    handler.on_train_end(None, state, control)
    assert own.steps == [0, 2, 3, 4, 6, 6]
    assert own.closed == 1
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    seen = [(row["kind"], row["epoch"], row["step"]) for row in rows]
    assert seen == [
        ("start", 0, 0),
        ("step", 0, 2),
        ("epoch", 1, 3),
        ("step", 1, 4),
        ("step", 1, 6),
        ("epoch", 2, 6),
    ]
    assert rows[-1]["norms_l2"] == pytest.approx(float(problem_of(model).vector.norm()), rel=1e-6)
    assert rows[1]["edge_threshold"] == 2.0
    assert [entry["step"] for entry in state.log_history] == [0, 2, 3, 4, 6, 6]


@pytest.mark.filterwarnings("ignore")
def test_a_hugging_face_trainer_with_trackers_is_one_without(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network()

        def forward(self, x, labels):
            logits = self.network(x)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    rows = [{"x": x, "labels": y} for x, y in zip(*data(), strict=True)]

    def parameters(callbacks):
        model = Net()
        args = transformers.TrainingArguments(
            str(tmp_path / "out"),
            num_train_epochs=2,
            per_device_train_batch_size=8,
            report_to=[],
            seed=0,
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        transformers.Trainer(model, args, train_dataset=rows, callbacks=callbacks).train()
        return torch.nn.utils.parameters_to_vector(model.parameters())

    callback = HuggingFaceTracker(trackers(), lambda m: problem_of(m.network), tmp_path / "run")
    assert torch.equal(parameters([callback]), parameters([]))
    found = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [(r["kind"], r["epoch"], r["step"]) for r in found] == [
        ("start", 0, 0),
        ("step", 0, 2),
        ("epoch", 1, 3),
        ("step", 1, 4),
        ("step", 1, 6),
        ("epoch", 2, 6),
    ]
    assert found[1]["edge_status"] == "CONVERGED"
