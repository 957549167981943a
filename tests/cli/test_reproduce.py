"""``lambdahat reproduce``: its tables, its files, its errors."""

import json
from functools import partial

import pytest
from typer.testing import CliRunner

from lambdahat.cli import reproduce
from lambdahat.cli.app import app
from lambdahat.experiments import EXPERIMENTS, SCALED, run_xor, run_xord
from lambdahat.experiments.regularization import RegularizationResult


def call(*arguments):
    return CliRunner().invoke(app, ["reproduce", *(str(argument) for argument in arguments)])


@pytest.fixture(autouse=True)
def brief(monkeypatch, tmp_path):
    """The same experiments, in a moment."""
    monkeypatch.chdir(tmp_path)
    quick = {"xor": partial(run_xor, seeds=2, epochs=2), "xord": partial(run_xord, seeds=2, epochs=1)}
    monkeypatch.setattr(reproduce, "EXPERIMENTS", quick)
    assert set(quick) <= set(EXPERIMENTS)


@pytest.mark.parametrize("name", ["xor", "xord"])
def test_tables_claims_and_assumptions_are_printed(name):
    result = call(name)
    assert result.exit_code == 0, result.output
    assert f"{name.upper()}, tanh: mean ± sd over 2 seeds [thesis]" in result.stdout
    assert "L2 Stopped Selective" in result.stdout
    assert "Kendall's τ" in result.stdout
    assert "verdict" in result.stdout
    assert "Assumed where the text is silent:" in result.stdout


def test_everything_is_written(tmp_path):
    result = call("xor", "--out", "run")
    assert result.exit_code == 0, result.output
    names = {path.suffix for path in (tmp_path / "run").iterdir()}
    assert names == {".json", ".npz", ".png", ".txt", ".md"}
    assert RegularizationResult.load(tmp_path / "run" / "xor.json").seeds == 2
    assert result.stdout.strip().endswith("written to run")


def test_json_is_all_there_is_on_standard_output():
    document = json.loads(call("xord", "--json", "--seed", 3).stdout)
    assert (document["experiment"], document["seed"]) == ("xord", 3)
    assert document["tables"][0]["rows"][0]["rule"] == "SGD Small"
    assert {"claim", "source", "verdict", "evidence"} == set(document["claims"][0])


def test_quiet_prints_nothing():
    assert call("xor", "--quiet").output == ""


def test_an_unknown_experiment_lists_them():
    result = call("mnist")
    assert result.exit_code == 2
    assert result.stderr.strip() == "error: EXPERIMENT must be one of xor, xord, got 'mnist'"


def test_a_scale_is_for_experiments_that_have_them():
    result = call("xor", "--scale", "cpu")
    assert result.exit_code == 2
    assert result.stderr.strip() == "error: --scale must be left out for 'xor', got 'cpu'; pass --full for more seeds"


@pytest.mark.parametrize(
    ("options", "scale"),
    [([], "cpu"), (["--scale", "smoke"], "smoke"), (["--full"], "paper"), (["--full", "--scale", "smoke"], "paper")],
)
def test_the_scale_reaches_the_experiment(monkeypatch, options, scale):
    seen = []

    def run(**given):
        seen.append(given)
        return run_xor(seeds=2, epochs=1)

    name = next(iter(SCALED))
    monkeypatch.setattr(reproduce, "EXPERIMENTS", {name: run})
    assert call(name, *options, "--seed", 5, "--quiet").exit_code == 0
    assert seen == [{"scale": scale, "seed": 5}]
