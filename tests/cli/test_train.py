"""``lambdahat train``: what it writes, how it resumes, and that other commands read its folder."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from typer.testing import CliRunner

from lambdahat import optim
from lambdahat.cli.app import app
from lambdahat.cli.train import extra_options, literal, named_options
from lambdahat.data import digits_split
from lambdahat.data.catalogue import load
from lambdahat.models import make_model
from lambdahat.operators import hessian
from lambdahat.problem import Problem
from lambdahat.results import Result
from lambdahat.results.measurement import Measurement
from lambdahat.training import fit, load_run, read_rows
from lambdahat.training.checkpoints import weights
from tests.training.small_runs import same, timeless

BASIC = (
    "train",
    "--model",
    "mlp",
    "--data",
    "digits",
    "--model-option",
    "widths=(16,)",
    "--samples",
    "300",
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def one_line_error(*arguments):
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()
    return line


def test_trains_as_fit_does_and_writes_a_folder(folder):
    result = call(
        *BASIC,
        "--optimizer",
        "ngd",
        "--lr",
        0.1,
        "--alpha",
        0.1,
        "--momentum",
        0.9,
        "--epochs",
        2,
        "--schedule",
        "linear",
        "--regularizer",
        "l2:rate=0.001",
        "--averaging",
        "ema:unit=step,decay=0.9",
        "--track",
        "trace",
        "--out",
        "run",
        "--seed",
        4,
    )
    assert result.exit_code == 0, result.output
    assert "2 epochs, loss" in result.stdout
    assert "written to run" in result.stdout
    (x, y), test = digits_split()
    model = make_model("mlp", (64,), 10, 4, widths=(16,))
    optimizer = optim.NGD(model.parameters(), lr=0.1, alpha=0.1, momentum=0.9)
    run = fit(
        Problem(model, "cross_entropy", (x[:300], y[:300])),
        optimizer,
        2,
        validation=test,
        seed=4,
        schedule=optim.schedules.linear_decay(optimizer, 2),
        regularizers=[optim.L2(0.001)],
        averaging=optim.IterateAverage(model, "ema", unit="step", decay=0.9),
    )
    assert same(weights("run"), model.state_dict())
    rows = read_rows(folder / "run" / "metrics.jsonl")
    assert [row["validation_loss"] for row in rows] == [
        row["validation_loss"] for row in run.epochs
    ]
    problem = load_run("run")
    assert rows[-1]["trace"] == pytest.approx(
        float(Result.load("run/measurements/trace-00000006.json"))
    )
    assert torch.equal(problem.vector, Problem(model, "cross_entropy", (x[:300], y[:300])).vector)
    names = {path.name for path in (folder / "run").iterdir()}
    assert names == {
        ".lock",
        "averaged.safetensors",
        "checkpoints",
        "config.json",
        "measurements",
        "metrics.csv",
        "metrics.jsonl",
        "progress.json",
        "training.json",
        "training.png",
    }
    config = json.loads((folder / "run" / "config.json").read_text())
    assert config["model_options"] == {"widths": [16]}
    assert config["free"]["epochs"] == 2
    assert config["settings"]["options"] == {"lr": 0.1, "alpha": 0.1, "momentum": 0.9}


def test_the_defaults_learn_and_what_was_tracked_is_printed(folder):
    result = call(
        "train", "--model", "mlp", "--data", "digits", "--track", "trace,top", "--out", "run"
    )
    assert result.exit_code == 0, result.output
    last = read_rows(folder / "run" / "metrics.jsonl")[-1]
    assert last["validation_accuracy"] > 0.9
    assert last["accuracy"] > 0.9
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line}
    assert {"epoch", "1", "10", "status"} < set(lines["quantity"].split())
    assert float(lines["trace"].split()[4]) == pytest.approx(last["trace"], rel=1e-4)
    assert lines["trace"].endswith("CONVERGED")
    assert lines["top_1"].endswith("CONVERGED")
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_resumes_and_refuses(folder):
    common = (*BASIC, "--optimizer", "adam", "--lr", 0.01, "--out", "run", "--quiet")
    assert call(*common, "--epochs", 4, "--out", "whole").exit_code == 0
    assert call(*common, "--epochs", 2).exit_code == 0
    kept = (folder / "run" / "config.json").read_bytes()
    assert "pass resume=True" in one_line_error(*common, "--epochs", 4)
    assert (folder / "run" / "config.json").read_bytes() == kept
    assert "with seed = 0, not 1" in one_line_error(*common, "--epochs", 4, "--seed", 1, "--resume")
    assert "batch_size = 128, not 7" in one_line_error(
        *common, "--epochs", 4, "--batch-size", 7, "--resume"
    )
    assert "options = {'lr': 0.01}, not {'lr': 0.02}" in one_line_error(
        *common, "--lr", 0.02, "--resume"
    )
    assert call(*common, "--epochs", 4, "--resume").exit_code == 0
    assert same(weights("run"), weights("whole"))
    assert timeless(read_rows("run/metrics.jsonl")) == timeless(read_rows("whole/metrics.jsonl"))


def test_a_killed_command_goes_on(folder):
    words = [
        *map(str, BASIC),
        "--optimizer",
        "sgd",
        "--lr",
        "0.1",
        "--momentum",
        "0.9",
        "--epochs",
        "8",
        "--quiet",
        "--track",
        "norms",
        "--track-samples",
        "50",
        "--track-unit",
        "step",
        "--checkpoint-steps",
        "2",
        "--batch-size",
        "50",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        [sys.executable, "-m", "lambdahat", *words, "--out", "killed"], env=environment
    )
    while child.poll() is None and not list((folder / "killed").glob("checkpoints/step-*.json")):
        time.sleep(0.001)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert call(*words, "--out", "killed", "--resume").exit_code == 0
    assert call(*words, "--out", "whole").exit_code == 0
    assert same(weights("killed"), weights("whole"))
    assert timeless(read_rows("killed/metrics.jsonl")) == timeless(read_rows("whole/metrics.jsonl"))


def test_measure_and_landscape_read_a_run(folder):
    assert (
        call(
            *BASIC,
            "--lr",
            0.5,
            "--epochs",
            3,
            "--optimizer",
            "swa",
            "--average-start",
            3,
            "--out",
            "run",
            "--quiet",
        ).exit_code
        == 0
    )
    result = call("measure", "run", "--what", "trace", "--curvature", "ggn", "--out", "measured")
    assert result.exit_code == 0, result.output
    problem = load_run("run")
    assert problem.num_samples == 300
    found = call("measure", "run", "--what", "eigenpairs", "--top", 1, "--json")
    value = json.loads(found.stdout)["results"][0]["value"]
    assert value == pytest.approx(
        float(torch.linalg.eigvalsh(hessian(problem).dense())[-1]), rel=1e-3
    )
    assert isinstance(Measurement.load("measured"), Measurement)
    losses = {}
    for which in ("last", "best", "averaged"):
        found = call("measure", "run", "--checkpoint", which, "--what", "trace", "--json")
        losses[which] = json.loads(found.stdout)["about"]["loss_value"]
    assert losses["last"] == pytest.approx(problem.loss(), rel=1e-6)
    assert losses["averaged"] != losses["last"]
    line = call(
        "landscape",
        "run",
        "--towards",
        "averaged",
        "--held-out",
        "test",
        "--points",
        3,
        "--out",
        "lines",
    )
    assert line.exit_code == 0, line.output
    stored = Result.load("lines/landscape-towards.json")
    assert stored.loss[0] == pytest.approx(losses["last"], rel=1e-5)
    assert stored.loss[-1] == pytest.approx(losses["averaged"], rel=1e-5)
    assert stored.held_out[0] == pytest.approx(
        read_rows("run/metrics.jsonl")[-1]["validation_loss"], rel=1e-5
    )


def test_a_run_of_fit_is_a_checkpoint_for_ones_own_factory(folder, monkeypatch):
    (folder / "own_model.py").write_text(
        "from lambdahat import data, models\nfrom lambdahat.problem import Problem\n\n"
        "def make_problem():\n"
        "    return Problem(models.mlp([64, 8, 10]), 'cross_entropy', data.digits_split()[0])\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    from own_model import make_problem

    problem = make_problem()
    fit(problem, torch.optim.SGD(problem.source.parameters(), lr=0.5), 1, folder="run")
    found = call(
        "measure", "own_model:make_problem", "--checkpoint", "run", "--what", "trace", "--json"
    )
    assert json.loads(found.stdout)["about"]["loss_value"] == pytest.approx(
        problem.loss(), rel=1e-6
    )
    assert "--checkpoint FOLDER" in one_line_error("measure", "run")
    del sys.modules["own_model"]


def test_json_and_divergence():
    result = call(*BASIC, "--lr", 1e30, "--epochs", 3, "--batch-size", 50, "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert (document["ended"], document["status"], document["last"]["loss"]) == (
        "diverged",
        "TRAINING_DIVERGED",
        None,
    )
    assert "TRAINING_DIVERGED. The training loss" in result.stderr


def test_a_damaged_checkpoint_is_said_on_standard_error(folder):
    common = (*BASIC, "--lr", 0.1, "--out", "run", "--quiet")
    assert call(*common, "--epochs", 2).exit_code == 0
    newest = sorted((folder / "run" / "checkpoints").glob("step-*.safetensors"))[-1]
    newest.write_bytes(b"")
    result = call(*common, "--epochs", 3, "--resume")
    assert result.exit_code == 0
    assert "warning: " in result.stderr
    assert "resuming from step-00000003.json" in result.stderr


def test_the_loss_comes_from_the_data(folder):
    result = call(
        "train",
        "--model",
        "mlp",
        "--data",
        "synthetic-regression",
        "--model-option",
        "widths=(8,)",
        "--optimizer",
        "adam",
        "--lr",
        0.01,
        "--epochs",
        2,
        "--samples",
        200,
        "--out",
        "run",
    )
    assert result.exit_code == 0, result.output
    split = load("synthetic-regression")
    model = make_model("mlp", (256,), 1, 0, widths=(8,))
    problem = Problem(model, "mse", (split.train[0][:200], split.train[1][:200]))
    fit(problem, torch.optim.Adam(model.parameters(), lr=0.01), 2)
    assert same(weights("run"), model.state_dict())
    assert json.loads((folder / "run" / "config.json").read_text())["loss"] == "mse"
    assert load_run("run").loss() == pytest.approx(problem.loss(), rel=1e-6)
    text = one_line_error("train", "--model", "gpt", "--data", "digits")
    assert (
        "--model must take the inputs of 'digits', real numbers, got 'gpt', which takes tokens"
        in text
    )


def test_selective_rules_know_the_layers(folder):
    assert (
        call(
            *BASIC,
            "--lr",
            0.1,
            "--epochs",
            1,
            "--regularizer",
            "selective-l2:rate=0.1,omega=0.5",
            "--out",
            "run",
            "--quiet",
        ).exit_code
        == 0
    )
    (x, y), _ = digits_split()
    ends = []
    for layers in (True, False):
        model = make_model("mlp", (64,), 10, 0, widths=(16,))
        rule = optim.SelectiveL2(0.1, 0.5, layers=optim.layers_of(model) if layers else None)
        problem = Problem(model, "cross_entropy", (x[:300], y[:300]))
        fit(problem, torch.optim.SGD(model.parameters(), lr=0.1), 1, regularizers=[rule])
        ends.append(same(weights("run"), model.state_dict()))
    assert ends == [True, False]


def test_errors_are_one_line(folder):
    assert "samples must be at most the 1,438 training samples" in one_line_error(
        *BASIC, "--samples", 1439
    )
    assert "error: --model must be one of 'softmax'" in one_line_error(
        "train", "--model", "nope", "--data", "digits"
    )
    assert "error: --data must be one of 'digits'" in one_line_error(
        "train", "--model", "mlp", "--data", "nope"
    )
    assert "options of 'sgd' must be among lr" in one_line_error(*BASIC, "--alpha", 0.1)
    assert "did you mean 'momentum'?" in one_line_error(*BASIC, "--momentun", 0.9)
    told = one_line_error(*BASIC, "--momentum", -2)
    assert told.endswith("--optimizer sgd: Invalid momentum value: -2")
    assert "must be written as --name value, got '0.1'" in one_line_error(*BASIC, "0.1")
    assert "must be written as name=value" in one_line_error(*BASIC, "--regularizer", "l2:0.1")
    assert "--device must be available" in one_line_error(*BASIC, "--device", "tpu9")
    assert "error: --schedule must be one of 'flat'" in one_line_error(
        *BASIC, "--schedule", "circle"
    )
    assert "error: --log must be one of 'csv'" in one_line_error(*BASIC, "--log", "csv,comet")
    assert "error: --track must be one of 'trace'" in one_line_error(*BASIC, "--track", "curve")
    assert "error: --optimizer must be one of 'sgd'" in one_line_error(*BASIC, "--optimizer", "sdg")
    assert "error: --regularizer must be one of" in one_line_error(
        *BASIC, "--regularizer", "l3:rate=0.1"
    )
    assert "resume must come with the folder" in one_line_error(*BASIC, "--resume")
    (folder / "file").write_text("")
    assert "it is a file" in one_line_error(*BASIC, "--out", "file")


def test_options_as_text():
    assert extra_options(
        ["--alpha", "0.1", "--nesterov", "--betas=0.9,0.99", "--weight-decay", "-1e-4"]
    ) == {"alpha": 0.1, "nesterov": True, "betas": (0.9, 0.99), "weight_decay": -1e-4}
    assert named_options("step:milestones=(1, 2),factor=0.5") == (
        "step",
        {"milestones": (1, 2), "factor": 0.5},
    )
    assert named_options("cosine") == ("cosine", {})
    assert [literal(text) for text in ("None", "true", "3", "monte_carlo", "1e-3")] == [
        None,
        True,
        3,
        "monte_carlo",
        1e-3,
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--momentum", "abc"], "momentum must be a number, got 'abc'"),
        (["--lr", "nan"], "lr must be a number, got nan"),
        (["--lr", "inf"], "lr must be a finite number, got inf"),
        (["--nesterov", "3"], "nesterov must be True or False, got 3"),
        (["--lr", "-1"], "--optimizer sgd: Invalid learning rate: -1.0"),
        (["--nesterov", "--momentum", "0"], "--optimizer sgd: Nesterov momentum requires a mom"),
        (
            ["--optimizer", "adam", "--betas", "abc"],
            "betas must be numbers such as (0.9, 0.999), got 'abc'",
        ),
        (
            ["--optimizer", "adam", "--betas", "(0.9, nan)"],
            "betas must be numbers such as (0.9, 0.999), got '(0.9, nan)'",
        ),
        (
            ["--schedule", "cosine:ratio=abc"],
            "--schedule with ratio='abc': ratio must be a number, got 'abc'",
        ),
        (["--regularizer", "l2:rate=abc"], "--regularizer with rate='abc': rate must be a number"),
        (["--averaging", "nan"], "--averaging must be one of 'average', 'ema', got 'nan'"),
        (
            ["--averaging", "average:start=abc"],
            "--averaging with start='abc': start must be an integer of at least 1",
        ),
        (["--model-option", "widths=(1000000000000,)"], "--model with widths=(1000000000000,): "),
        (["--model-option", f"widths={'(' * 9999}"], "--model with widths=str '((((("),
        (["--data-option", "held_out=abc"], "--data with held_out='abc': "),
    ],
)
def test_options_of_the_wrong_kind_are_named(arguments, message):
    command = ["train", "--model", "mlp", "--data", "digits", "--epochs", "1", *arguments]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {message}"), line
