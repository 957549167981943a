"""The table of goals in docs/bench.md: what the stored results say, and nothing else."""

import importlib.util
import json
import sys

import pytest

from lambdahat.bench import BenchResult
from lambdahat.bench.records import OURS, BenchRow
from tests.documents import DOCS, ROOT


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location(
        "speed_figures", ROOT / "benchmarks" / "speed_figures.py"
    )
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "speed_figures", module)  # its dataclass looks its module up
        spec.loader.exec_module(module)
        yield module


def lines(table):
    """The rows of the table by goal."""
    cells = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]
    ]
    return {row[1]: row for row in cells}


def stored(folder, machine, rows):
    BenchResult(tuple(BenchRow(*row) for row in rows)).save(folder / f"bench-{machine}.json")


def test_the_page_has_what_the_script_writes(script):
    page = (DOCS / "bench.md").read_text(encoding="utf-8")
    assert script.written(page) == page


def test_verdicts_are_those_of_the_machine_asked_for(script, tmp_path):
    stored(tmp_path, "cpu", [("HVP", "mlp", OURS, 1.0, 1.5), ("HVP", "lenet5", OURS, 1.0, 2.0)])
    stored(
        tmp_path, "h200", [("HVP", "mlp", OURS, 1.0, 0.5), ("HVP", "mlp", "curvlinops", 1.0, 6.0)]
    )
    found = lines(script.table(tmp_path))
    assert found["HVP, mlp: at most 1.4 gradients on the CPU"][3:] == ["1.5", "0.5", "**missed**"]
    assert found["HVP, lenet5: at most 2.4 gradients on the CPU"][5] == "met"
    goal = "HVP, mlp, 8,192 images on the H200: at least 10 times as fast as curvlinops"
    assert found[goal][4:] == ["12×", "met"]


def test_what_is_not_measured_has_its_command(script, tmp_path):
    found = lines(script.table(tmp_path))
    assert {row[5] for row in found.values()} == {"not measured"}
    command = "lambdahat bench --peers{} --only products"
    assert found["GGN product, mlp: at most 1.1 gradients on the CPU"][3:5] == [
        f"— `{command.format('')}`",
        f"— `{command.format(' --device cuda')}`",
    ]
    road = found["100 moments, 100 probes, road graph of 114,599 nodes: under 10 s"]
    assert road[3:5] == ["— `python benchmarks/graphs.py speed`", "—"]


def test_an_older_result_is_named(script, tmp_path):
    row = {"case": "lenet5", "chains": 4, "by": "lambdahat, auto", "gradients": 0.9}
    (tmp_path / "sampling_lenet_cpu.json").write_text(json.dumps({"rows": [row]}))
    goal = "chain-step, lenet5, 4 chains: at most 1.15 gradients on the CPU"
    assert lines(script.table(tmp_path))[goal][3::2] == ["0.9 (`sampling.py`)", "met"]
    stored(tmp_path, "cpu", [("chain-step", "lenet5, 4 chains", OURS, 1.0, 1.2)])
    assert lines(script.table(tmp_path))[goal][3::2] == ["1.2", "**missed**"]


def test_every_row_of_the_benchmark_that_is_read_is_there(script):
    """A row that is renamed would show as not measured: of those stored on the CPU none that was
    read is lost.
    """
    found = lines(script.table())
    unmeasured = [row for row in found.values() if "--only" in row[3]]
    assert not unmeasured
