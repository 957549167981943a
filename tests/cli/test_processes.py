"""The command under torchrun: two processes share the data, and one prints and writes what one
process would.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from lambdahat._measure import measure
from lambdahat.cli.exits import MEASURED, of_torchrun, own_folder, rank
from lambdahat.cli.loading import call_factory
from lambdahat.results.measurement import Measurement

FACTORY = """
from pathlib import Path
from lambdahat.data import digits_split
from lambdahat.models import mlp
from lambdahat.problem import Problem

def make_problem():
    (x, y), _ = digits_split()
    problem = Problem(mlp([64, 4, 10]).double(), "cross_entropy", (x[:101].double(), y[:101]))
    share = sum(batch.size for _, batch in problem.share)
    Path(f"share-{problem.ranks.rank}").write_text(str(share))
    return problem
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
EVERYTHING = "trace,eigenpairs,spectrum,llc"
MEASURE = (
    "-m",
    "lambdahat",
    "measure",
    "two_ranks:make_problem",
    "--json",
    "--depth",
    "8",
    "--top",
    "2",
    "--what",
    EVERYTHING,
    "--out",
    "two",
)
SAMPLING = {
    "chains": 2,
    "draws": 20,
    "burn_in": 10,
    "step_size": 1e-4,
    "localization": 10.0,
    "kernel": "sgld",
    "batch_size": 50,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("ranks")
    (place / "two_ranks.py").write_text(FACTORY, encoding="utf-8")
    return place


@pytest.fixture(scope="module")
def one(folder):
    """Everything in this process, and the trace alone in the folder that two processes go on
    with.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        problem, settings = (
            call_factory("two_ranks:make_problem"),
            {"depth": 8, "top": 2, "keep_vectors": False},
        )
        measure(problem, "trace", folder="two", sampling=SAMPLING, **settings)
        return measure(problem, EVERYTHING.split(","), sampling=SAMPLING, **settings)


@pytest.fixture(scope="module")
def two(folder, one):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    chains = [
        word
        for name, value in SAMPLING.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    command = [sys.executable, *TORCHRUN, *MEASURE, *chains]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 1, done.stderr[-3000:]
    return done


def test_two_processes_measure_what_one_does(folder, one, two):
    compare(Measurement.load(folder / "two").table(), one.table(), "")


def compare(ours, theirs, path):
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            if key != "seconds":
                compare(ours[key], theirs[key], f"{path}.{key}")
    elif isinstance(theirs, list):
        for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            compare(a, b, f"{path}.{number}")
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, rel=1e-7, abs=1e-10, nan_ok=True), path
    else:
        assert ours == theirs, path


def test_one_document_is_printed(one, two):
    assert len(json.loads(two.stdout)["results"]) == len(one.table()) == 13
    assert two.stderr.count("llc: NOT_A_MINIMUM") == 1
    assert two.stderr.count(MEASURED) == 1
    assert two.stderr.index(MEASURED) < two.stderr.index(
        "ChildFailedError"
    )  # torchrun's report of exit code 1


def test_each_rank_has_its_share_of_the_data(folder, one, two):
    assert [(folder / f"share-{number}").read_text(encoding="utf-8") for number in (0, 1)] == [
        "50",
        "51",
    ]


def test_other_commands_are_for_one_process(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as end, of_torchrun(["train", "--model", "mlp"]):
        raise AssertionError("not reached")
    assert end.value.code == 2
    assert "train is for one process" in capsys.readouterr().err


def test_a_process_alone_is_left_alone(tmp_path):
    with of_torchrun(["train"]), own_folder(tmp_path) as place:
        assert place == tmp_path
        assert rank() == 0
