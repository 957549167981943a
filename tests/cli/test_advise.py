"""``lambdahat advise``: its tables, its files, its exit codes."""

import json
import os
import sys
import time

import pytest
from typer.testing import CliRunner

from lambdahat.cli.app import app
from lambdahat.randommatrix import Advice, advise

FACTORY = """
import torch
from lambdahat._rng import generator
from lambdahat.problem import Problem

def rows():
    return torch.randn(40, 3, generator=generator(0, "rows"), dtype=torch.float64)

def make_problem(sign=1.0):
    start = {"theta": torch.ones(3, dtype=torch.float64)}
    return Problem.from_function(lambda p, x: sign * (x @ p["theta"]).square().mean(), start, rows())

def normed():
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)).double()
    return Problem(net, "cross_entropy", (rows(), (rows()[:, 0] > 0).long()), norm="train", batch_size=10)

def a_maximum():
    return make_problem(-1.0)
"""


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """A folder with the user's module in it, as the current directory."""
    name = f"users_{os.getpid()}_{time.monotonic_ns()}"
    (tmp_path / f"{name}.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    return name


def call(name, *arguments):
    return CliRunner().invoke(app, ["advise", name, *(str(argument) for argument in arguments)])


def test_it_prints_what_was_measured_what_follows_and_why(project):
    result = call(f"{project}:make_problem", "--optimizer", "momentum", "--batch-size", 4, "--new-batch-size", 16,
                  "--learning-rate", 0.01)  # fmt: skip
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "momentum 0.9: 3 parameters, 40 samples"
    for part in ("the hessian of all data", "batches of 16, predicted, directional", "an element, over samples"):
        assert part in result.stdout
    rows = [line for line in lines if line.startswith("largest stable rate ")]
    assert [row.split()[3] for row in rows[:2]] == ["4", "16"]
    assert any(line.startswith("learning rate (16): 0.01 is ") for line in lines)
    assert result.stderr == ""


def test_json_holds_the_same_numbers_as_the_library(project):
    result = call(f"{project}:make_problem", "--batch-size", 4, "--seed", 2, "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    sys.path.insert(0, os.getcwd())
    found = advise(__import__(project).make_problem(), "sgd", 4, seed=2)
    assert document["advice"][0]["value"] == float(found["largest stable rate"])
    assert document["measured"]["largest"]["value"] == float(found.levels.largest)
    assert document["about"] == {"optimizer": "sgd", "momentum": 0.0, "learning_rate": None, "curvature": "hessian",
                                 "parameters": 3, "samples": 40}  # fmt: skip
    assert document["cautions"] == list(found.cautions)


def test_options_reach_the_advice(project):
    result = call(f"{project}:make_problem", "--batch-size", 4, "--optimizer", "adam", "--samples", 20,
                  "--variance-samples", 10, "--batches", 3, "--steps", 5, "--json")  # fmt: skip
    document = json.loads(result.stdout)
    assert document["about"]["samples"] == 20
    assert [row["name"] for row in document["advice"]][-1] == "stable rate by training"
    assert document["measured"]["tau2"]["stderr"] > 0


def test_everything_is_written(project, tmp_path):
    result = call(f"{project}:make_problem", "--batch-size", 4, "--out", "run")
    assert result.exit_code == 0, result.output
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names >= {"advice.json", "advice.png", "table.txt", "table.md"}
    assert Advice.load(tmp_path / "run" / "advice").optimizer == "sgd"
    assert (tmp_path / "run" / "table.txt").read_text().strip() in result.stdout
    assert result.stdout.strip().endswith("written to run")


def test_with_batch_statistics_it_tells_what_batches_alone_tell(project):
    result = call(f"{project}:normed", "--batch-size", 10, "--batches", 3)
    assert result.exit_code == 0, result.output
    assert "batches of 10" in result.stdout
    assert "all data\n" not in result.stdout
    assert "nothing is predicted from all data" in result.stdout
    document = json.loads(call(f"{project}:normed", "--batch-size", 10, "--batches", 3, "--json").stdout)
    assert document["measured"] == document["batches"][0]["predicted"] == {}
    assert document["batches"][0]["overlap"]["value"] is None


def test_quiet_prints_nothing(project):
    assert call(f"{project}:make_problem", "--batch-size", 4, "--quiet").output == ""


@pytest.mark.parametrize(("factory", "arguments", "text"), [
    ("make_problem", ("--batch-size", 64), "error: batch_size must be an integer in [1, 40], got 64; a batch cannot"),
    ("make_problem", ("--batch-size", 4, "--optimizer", "lion"), "error: optimizer must be one of 'sgd', 'momentum'"),
    ("a_maximum", ("--batch-size", 4), "error: the largest eigenvalue of the hessian must be above 0"),
    ("missing", ("--batch-size", 4), "error: FACTORY: module"),
])  # fmt: skip
def test_bad_input_exits_with_2_and_one_line(project, factory, arguments, text):
    result = call(f"{project}:{factory}", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith(text)
