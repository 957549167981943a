"""Loggers: CSV and the protocol always, the other targets by the real package where it is
installed.
"""

import csv
import importlib.util
import math
import struct
import warnings

import pytest
import torch

from lambdahat import Problem
from lambdahat.training import LOGGERS, CSVLogger, Logger, make_trackers, tracking
from lambdahat.training import loggers as module
from tests.training.small_runs import Setup, StepCount, plain

SPECTRUM = [[-1.0, 0.25], [0.0, 0.5], [3.0, 0.25]]


class Own:
    """A logger of one's own."""

    def __init__(self):
        self.rows, self.closed = [], 0

    def log(self, step, values):
        self.rows.append((step, dict(values)))

    def close(self):
        self.closed += 1


class Fails(Own):
    def log(self, step, values):
        super().log(step, values)
        raise OSError("disk full")


def needs(package):
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


def test_a_logger_gets_every_row_and_is_closed():
    own = Own()
    assert isinstance(own, Logger)
    run = Setup("sgd").fit(2, loggers=[own], trackers=[StepCount(3, "step")])
    assert [step for step, _ in own.rows] == [3, 5, 6, 9, 10]
    assert own.rows[-1][1] == {k: v for k, v in run.last.items() if k not in ("step", "kind")}
    assert own.closed == 1


def test_it_is_closed_after_an_error_too():
    class Stops:
        name, every, unit = "stops", 7, "step"

        def measure(self, problem, optimizer, epoch, step):
            raise RuntimeError("stop")

    own = Own()
    with pytest.raises(RuntimeError, match="stop"):
        Setup("sgd").fit(2, loggers=[own], trackers=[Stops()])
    assert [step for step, _ in own.rows] == [5]
    assert own.closed == 1


def test_one_that_fails_is_dropped_and_the_others_go_on():
    failing, own = Fails(), Own()
    with pytest.warns(RuntimeWarning, match="Fails gets no more rows: it failed at step 5"):
        run = Setup("sgd").fit(2, loggers=[failing, own])
    assert len(run) == len(own.rows) == 2
    assert len(failing.rows) == 1


def rows_of(path):
    with open(path, newline="") as stream:
        return list(csv.DictReader(stream))


def test_csv_has_the_rows_of_the_history(tmp_path):
    Setup("sgd").fit(2, tmp_path, loggers=["csv"], trackers=[StepCount(3, "step")])
    run = Setup("sgd").fit(
        3, tmp_path, loggers=["csv"], trackers=[StepCount(3, "step")], resume=True
    )
    rows = rows_of(tmp_path / "log.csv")
    assert [int(row["step"]) for row in rows] == [row["step"] for row in run.history]
    losses = [float(row["loss"]) for row in rows if row["loss"]]
    assert losses == [row["loss"] for row in run.epochs]
    # an epoch has columns that the step before it had not
    assert rows[0]["loss"] == ""
    assert rows[0]["count_step"] == "1.0"


def test_rows_after_the_step_are_dropped_and_new_columns_filled(tmp_path):
    logger = CSVLogger(tmp_path)
    for step in (1, 2, 3):
        logger.log(step, {"loss": step / 10, "status": "CONVERGED, or not", "spectrum": SPECTRUM})
    again = CSVLogger(tmp_path, step=2)
    again.log(5, {"loss": 0.5, "accuracy": 1})
    assert rows_of(tmp_path / "log.csv") == [
        {"step": "1", "status": "CONVERGED, or not", "loss": "0.1", "accuracy": ""},
        {"step": "2", "status": "CONVERGED, or not", "loss": "0.2", "accuracy": ""},
        {"step": "5", "status": "", "loss": "0.5", "accuracy": "1"},
    ]


def test_only_finite_numbers_are_logged():
    row = {"loss": 1.5, "epoch": 2, "error": math.inf, "gap": -math.inf, "norm": math.nan}
    assert module.numbers({**row, "status": "CONVERGED"}) == {"loss": 1.5, "epoch": 2}


def test_runs_without_a_folder_have_places_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        Setup("sgd").fit(1, loggers=["csv"])
    assert [len(rows_of(path)) for path in tmp_path.glob("runs/*/log.csv")] == [1, 1]


def test_a_missing_package_is_one_line_that_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    for name in ("tensorboard", "wandb", "mlflow"):
        with pytest.raises(ValueError, match="installed") as caught:
            Setup("sgd").fit(1, tmp_path, loggers=[name])
        assert f'pip install "lambdahat[{name}]"' in str(caught.value)
        assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []  # before anything was trained


def test_every_target_is_an_extra():
    import tomllib

    from tests.documents import ROOT

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = [kind.package for kind in LOGGERS.values() if hasattr(kind, "package")]
    assert set(packages) <= set(extras["optional-dependencies"])


def tracked(folder, loggers):
    """A model with a spectrum, λ̂ and an own metric, logged."""
    model = plain()
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    problem = Problem(model, "cross_entropy", (x, x[:, :10].argmax(1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trackers = make_trackers("spectrum,norms", samples=None)
    with tracking(problem, trackers, optimizer, folder, loggers=loggers) as track:
        track.epoch(loss=0.5)
    return track.rows


def test_tracking_logs_spectra_and_statuses(tmp_path):
    own = Own()
    rows = tracked(tmp_path / "run", [own, "csv"])
    assert [step for step, _ in own.rows] == [0, 0]
    spectrum = own.rows[0][1]["spectrum"]
    assert sum(weight for _, weight in spectrum) == pytest.approx(1, rel=1e-4)
    assert sum(node * weight for node, weight in spectrum) * 1210 == pytest.approx(
        rows[0]["spectrum_trace"], rel=1e-3
    )
    assert own.rows[0][1]["spectrum_status"] == "CONVERGED"
    assert own.closed == 1
    assert rows_of(tmp_path / "run" / "log.csv")[1]["loss"] == "0.5"
    assert "spectrum" not in rows_of(tmp_path / "run" / "metrics.csv")[0]


@needs("tensorboard")
def test_tensorboard_reads_back_scalars_texts_and_histograms(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = tracked(tmp_path, ["tensorboard"])
        seen = EventAccumulator(str(tmp_path / "tensorboard"), {"tensors": 0}).Reload()
        names = seen.Tags()
        assert {"norms_l2", "spectrum_largest", "spectrum_largest_stderr"} <= set(names["scalars"])
        (entry, _) = seen.Scalars("norms_l2")
        assert entry.value == pytest.approx(rows[0]["norms_l2"], rel=1e-6)
        assert names["histograms"] == ["spectrum"]
        found = seen.Histograms("spectrum")[0].histogram_value
        assert sum(found.bucket) == pytest.approx(1, rel=1e-4)
        assert found.min == pytest.approx(min(node for node, _ in rows[0]["spectrum"]))
        (text,) = seen.Tensors("spectrum_status/text_summary")
        assert text.tensor_proto.string_val == [b"CONVERGED"]


@needs("tensorboard")
def test_a_resumed_run_goes_on_in_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Setup("sgd").fit(2, tmp_path, loggers=["tensorboard"])
        run = Setup("sgd").fit(3, tmp_path, loggers=["tensorboard"], resume=True)
        found = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("loss")
    assert [entry.step for entry in found] == [row["step"] for row in run.epochs]


def wandb_records(path):
    """The records of a run's file: LevelDB's log format after a header of seven bytes."""
    from wandb.proto import wandb_internal_pb2

    blob, place, part = path.read_bytes(), 7, b""
    while place < len(blob):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack("<HB", blob[place + 4 : place + 7])
        part += blob[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            part = b""
            yield record


@pytest.mark.slow  # a process of its own is started
@needs("wandb")
def test_wandb_writes_the_run_offline(tmp_path, monkeypatch):
    import json

    monkeypatch.delenv("WANDB_MODE", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = tracked(tmp_path, ["wandb"])
        (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
        records = [one.history for one in wandb_records(path) if one.HasField("history")]
    items = {
        ".".join(item.nested_key) or item.key: json.loads(item.value_json)
        for item in records[0].item
    }
    assert items["norms_l2"] == pytest.approx(rows[0]["norms_l2"])
    assert items["spectrum_status"] == "CONVERGED"
    assert items["spectrum._type"] == "histogram"
    assert sum(items["spectrum.values"]) == pytest.approx(1, rel=1e-4)


@pytest.mark.slow  # the database of MLflow is made in seconds
@needs("mlflow")
@needs("sqlalchemy")
def test_mlflow_has_the_run_in_its_database(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow import MlflowClient

        Setup("sgd").fit(1, tmp_path, loggers=["mlflow"], trackers=make_trackers("norms"))
        run = Setup("sgd").fit(
            2, tmp_path, loggers=["mlflow"], trackers=make_trackers("norms"), resume=True
        )
        client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
        experiment = client.get_experiment_by_name("lambdahat")
        (found,) = client.search_runs([experiment.experiment_id])
        history = client.get_metric_history(found.info.run_id, "loss")
    assert [(one.step, one.value) for one in history] == [
        (row["step"], row["loss"]) for row in run.epochs
    ]
    assert found.data.tags["norms_status"] == "CONVERGED"
    assert found.data.params["batch_size"] == "64"
    assert found.info.status == "FINISHED"
