"""``lambdahat advise``: its tables, its files, its exit codes."""

import json
import os
import re
import sys
import time

import pytest
from typer.testing import CliRunner

import lambdahat as lh
from lambdahat.cli.app import app
from lambdahat.randommatrix import Advice, advise

FACTORY = """
import torch
from lambdahat._core.rng import generator
from lambdahat.problem import Problem

def rows():
    return torch.randn(40, 3, generator=generator(0, "rows"), dtype=torch.float64)

def make_problem(sign=1.0):
    start = {"theta": torch.ones(3, dtype=torch.float64)}
    loss = lambda p, x: sign * (x @ p["theta"]).square().mean()
    return Problem.from_function(loss, start, rows())

def normed():
    layers = torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
    net = torch.nn.Sequential(*layers).double()
    data = rows(), (rows()[:, 0] > 0).long()
    return Problem(net, "cross_entropy", data, norm="train", batch_size=10)

def classifier():
    net = torch.nn.Linear(3, 2).double()
    torch.nn.init.zeros_(net.weight)
    torch.nn.init.zeros_(net.bias)
    return Problem(net, "cross_entropy", (rows(), (rows()[:, 0] > 0).long()))

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
    result = call(
        f"{project}:make_problem",
        "--optimizer",
        "momentum",
        "--batch-size",
        4,
        "--new-batch-size",
        16,
        "--learning-rate",
        0.01,
    )
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert re.fullmatch(
        r"use lr ≈ \S+ \(\S+ to \S+\) at batch 16, for this point of training", lines[0]
    )
    assert lines[2] == "momentum 0.9: 3 parameters, 40 samples"
    for part in (
        "largest eigenvalue, hessian of all data",
        "batches of 16, predicted from the noise along sharp directions, τ²",
        "variance of an element over samples",
    ):
        assert part in result.stdout
    rows = [line for line in lines if line.startswith("largest stable rate ")]
    assert [row.split()[3] for row in rows[:2]] == ["4", "16"]
    assert any(line.startswith("learning rate (16): 0.01 is ") for line in lines)
    assert "docs/" not in result.stdout  # a file that an installed package does not have
    assert result.stderr == ""


def test_json_holds_the_same_numbers_as_the_library(project):
    result = call(f"{project}:make_problem", "--batch-size", 4, "--seed", 2, "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    sys.path.insert(0, os.getcwd())
    found = advise(__import__(project).make_problem(), "sgd", 4, seed=2)
    assert document["advice"][0]["value"] == float(found["largest stable rate"])
    assert document["measured"]["largest"]["value"] == float(found.levels.largest)
    assert document["about"] == {
        "optimizer": "sgd",
        "momentum": 0.0,
        "learning_rate": None,
        "curvature": "hessian",
        "parameters": 3,
        "samples": 40,
    }
    assert document["cautions"] == list(found.cautions)


def test_options_reach_the_advice(project):
    result = call(
        f"{project}:make_problem",
        "--batch-size",
        4,
        "--optimizer",
        "adam",
        "--samples",
        20,
        "--variance-samples",
        10,
        "--batches",
        3,
        "--steps",
        5,
        "--json",
    )
    document = json.loads(result.stdout)
    assert document["about"]["samples"] == 20
    assert [row["name"] for row in document["advice"]][-1] == "stable rate by training"
    assert document["measured"]["tau2"]["stderr"] > 0


@pytest.mark.parametrize(
    ("size", "samples", "share", "told"),
    [
        (4, 40, "", ""),
        (4, 20, "", ""),
        (8, 20, "40%", "1.7 times the noise seen here"),
        (20, 20, "100%", "noise, and none is seen here"),
    ],
)
def test_a_batch_that_is_large_beside_the_samples_taken_is_minded(
    project, size, samples, share, told
):
    """1/(1 − 8/20) = 1.7. Without --samples all data are all data, whatever the batch."""
    arguments = (f"{project}:make_problem", "--batch-size", size, "--json")
    found = json.loads(call(*arguments, "--samples", samples).stdout)["cautions"]
    words = (
        f"a batch of {size} is {share} of the {samples} samples taken, which count as all data in b"
        " = B/(1 − B/N): "
    )
    expected = [f"{words}with far more data it has {told}; take more --samples"] if told else []
    assert [caution for caution in found if "samples taken" in caution] == expected
    assert not any(
        "samples taken" in caution for caution in json.loads(call(*arguments).stdout)["cautions"]
    )


def test_of_a_gauss_newton_matrix_the_mean_eigenvalue_is_told(project):
    """Its smallest is only known not to be below 0."""
    result = call(f"{project}:classifier", "--optimizer", "kfac", "--batch-size", 8, "--batches", 3)
    assert result.exit_code == 0, result.output
    sys.path.insert(0, os.getcwd())
    problem = __import__(project).classifier()
    (row,) = [line for line in result.stdout.splitlines() if line.startswith("mean λ")]
    assert row.endswith("ggn of all data, tr/P; none is below 0")
    expected = float(lh.ggn(problem).dense().trace()) / problem.num_parameters
    assert float(row.split()[2]) == pytest.approx(expected, rel=0.1)
    assert "λ_P" not in result.stdout


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
    document = json.loads(
        call(f"{project}:normed", "--batch-size", 10, "--batches", 3, "--json").stdout
    )
    assert document["measured"] == document["batches"][0]["predicted"] == {}
    assert document["batches"][0]["overlap"]["value"] is None


def test_quiet_prints_nothing(project):
    assert call(f"{project}:make_problem", "--batch-size", 4, "--quiet").output == ""


@pytest.mark.parametrize(
    ("factory", "arguments", "text"),
    [
        (
            "make_problem",
            ("--batch-size", 64),
            "error: batch_size must be an integer in [1, 40], got 64; a batch cannot",
        ),
        (
            "make_problem",
            ("--batch-size", 4, "--optimizer", "lion"),
            "error: optimizer must be one of 'sgd', 'momentum'",
        ),
        (
            "a_maximum",
            ("--batch-size", 4),
            "error: the largest eigenvalue of the hessian must be above 0",
        ),
        ("missing", ("--batch-size", 4), "error: FACTORY: module"),
    ],
)
def test_bad_input_exits_with_2_and_one_line(project, factory, arguments, text):
    result = call(f"{project}:{factory}", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith(text)
