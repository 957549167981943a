"""``lambdahat bench``: it runs at tiny sizes, and with a record it fails on what became slower."""

import json

import pytest
from typer.testing import CliRunner

from lambdahat.bench import FAMILIES, BenchResult, BenchRow
from lambdahat.bench.records import OURS, UNIT
from lambdahat.cli import bench_command
from lambdahat.cli.app import app

SIZES = {"quick": False, "samples": 2048, "batch size": 512, "hidden width": 256}
ABOUT = {"device": "cpu", "chip": "a chip", "threads": 1, "torch": "2.6", **SIZES}


def call(*arguments):
    return CliRunner().invoke(app, ["bench", *(str(argument) for argument in arguments)])


def record(ours, peer=4.0):
    rows = [
        BenchRow("HVP", "mlp", by, 0.01 * cost, cost)
        for by, cost in ((UNIT, 1.0), (OURS, ours), ("peer", peer))
    ]
    return BenchResult(tuple(rows), ABOUT)


@pytest.fixture
def runs(monkeypatch):
    """``run`` answers with these costs of ours, one after the other."""
    costs = []

    def answer(plan, only="*", watch=None):
        found = record(costs.pop(0))
        if watch is not None:
            watch(found)
        return found

    monkeypatch.setattr(bench_command, "run", answer)
    return costs


def test_families_run_at_tiny_sizes(tmp_path):
    """Estimates, chains and optimisers; the other families: tests/bench/test_suite.py."""
    result = call("--quick", "--only", "[eco]*", "--json", "--quiet", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    works = {row["work"] for row in document["rows"]}
    assert {
        "trace to 1 %",
        "top-3 eigenvalues",
        "density, depth 20",
        "chain-step",
        "kinetic step",
        "λ̂ to 30 %",
        "NGD step",
        "KFAC step",
        "KFAC, factors and inverse",
    } <= works
    inaccurate = [
        row for row in document["rows"] if (row["error"] or 0) > (row["accuracy"] or float("inf"))
    ]
    assert not inaccurate
    assert len(BenchResult.load(tmp_path / "bench.json")) == len(document["rows"])
    assert {path.name for path in tmp_path.iterdir()} == {
        "bench.json",
        "table.txt",
        "table.md",
        "bench.png",
    }


def test_the_table_names_who_did_what(runs, tmp_path):
    runs.append(2.0)
    result = call("--out", tmp_path)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["HVP", "mlp", "one", "gradient", "10", "1"] in lines
    assert ["HVP", "mlp", "lambdahat", "20", "2"] in lines
    assert ["HVP", "mlp", "peer", "40", "4", "0.5"] in lines
    assert "| HVP | mlp | peer | 40 | 4 | 0.5 |" in (tmp_path / "table.md").read_text()


def test_slower_than_on_record_exits_with_1_after_a_second_look(runs, tmp_path):
    path = record(2.0).save(tmp_path / "record.json")
    runs += [2.6, 2.7]
    result = call("--against", path)
    assert result.exit_code == 1
    assert result.stderr.strip() == "HVP, mlp: 1.30 times what is on record"
    runs += [2.6, 2.1]
    assert call("--against", path).exit_code == 0
    runs += [2.6]
    assert call("--against", path, "--tolerance", 0.5).exit_code == 0
    assert not runs


def test_what_is_to_be_explained_is_stated():
    rows = [
        *record(5.0).rows[1:],
        BenchRow("trace", "mlp", OURS, cost=3.0, limit=2.0, limit_why="least measured"),
    ]
    assert bench_command.findings(BenchResult(tuple(rows), ABOUT)) == [
        "peer is faster at HVP (mlp): ours takes 1.25 times as long",
        "trace (mlp) costs 1.5 times the limit, 2 × one gradient (least measured)",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "none"], "only must match a family of rows: " + ", ".join(FAMILIES)),
        (["--device", "tpu"], "--device must be cpu or cuda, got 'tpu'"),
        (["--device", "cpu:7"], "--device must be cpu or cuda, got 'cpu:7'; there is one cpu"),
        (
            ["--out", "record.json"],
            "--out must be a folder that can be written to, got 'record.json' (it is a file)",
        ),
        (
            ["--against", "nowhere.json"],
            "--against must name a bench.json, got nowhere.json (no such file)",
        ),
        (
            ["--tolerance", "0", "--against", "record.json"],
            "tolerance must be a finite number above 0",
        ),
    ],
)
def test_bad_arguments_are_explained(runs, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record(2.0).save("record.json")
    runs.append(2.0)
    if "--only" in arguments:
        monkeypatch.undo()
    result = call(*([] if "--tolerance" in arguments else ["--quick"]), *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_record_of_another_kind_of_run_is_refused_before_anything_is_measured(runs, tmp_path):
    result = call("--quick", "--against", record(2.0).save(tmp_path / "record.json"))
    assert result.exit_code == 2
    assert "the record must be of a run with quick True, as this one, got False" in result.stderr


def test_a_task_of_ours_that_raises_is_told_by_the_exit_code(monkeypatch):
    broken = BenchRow("HVP", "mlp", OURS, note="ValueError: no")
    monkeypatch.setattr(
        bench_command, "run", lambda *_: BenchResult((record(2.0).rows[0], broken), ABOUT)
    )
    result = call()
    assert result.exit_code == 1
    assert result.stderr.strip() == "HVP, mlp: no answer, ValueError: no"
