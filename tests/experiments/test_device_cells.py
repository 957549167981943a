"""benchmarks/device_cells.py: cells of several runs end in one store."""

import importlib.util
import queue
import sqlite3
import sys
from unittest.mock import Mock

import pytest

from lambdahat.experiments.averaging.averaged_training import training_of
from lambdahat.experiments.kit.cells import key_of
from lambdahat.experiments.kit.store import Store
from lambdahat.experiments.kit.sweeps import Outcome, sweep
from tests.documents import ROOT
from tests.experiments.toys import Config, toy


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location(
        "device_cells", ROOT / "benchmarks" / "device_cells.py"
    )
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "device_cells", module)
    spec.loader.exec_module(module)
    return module


def test_fold_adds_cells_and_drops_those_outside_the_grid(script, monkeypatch, tmp_path):
    before, today = toy(cpu=Config(1, (0.5, 3.0))), toy(cpu=Config(2))
    sweep(before, tmp_path / "stored", scale="cpu", command="lambdahat reproduce toy")
    sweep(
        today, tmp_path / "run", scale="cpu", only="rate=2.0", command=f"{tmp_path}/device_cells.py"
    )
    monkeypatch.setattr(script, "find", lambda name: today)
    script.fold(tmp_path / "run", tmp_path / "stored")

    stored, run = (Store(tmp_path / name, "toy", "cpu") for name in ("stored", "run"))
    kept = [cell for cell in today.grid("cpu") if cell["rate"] == 2.0 or cell["seed"] == 0]
    assert stored.finished() == {key_of(cell) for cell in kept}
    assert list(stored.rows().where(rate=2.0)) == list(run.rows())
    assert stored.rows().distinct("rate") == [0.5, 2.0]
    with sqlite3.connect(stored.path) as connection:
        assert connection.execute("SELECT COUNT(*) FROM cells").fetchone() == (
            len(today.grid("cpu")),
        )
    assert stored.about()["command"] == "lambdahat reproduce toy --scale cpu"


def test_fold_leaves_a_store_alone_for_which_nothing_has_finished(script, monkeypatch, tmp_path):
    experiment = toy(cpu=Config(2))
    Store(tmp_path / "run", "toy", "cpu").open(experiment.grid("cpu"))
    monkeypatch.setattr(script, "find", lambda name: experiment)
    script.fold(tmp_path / "run", tmp_path / "stored")
    assert not (tmp_path / "stored").exists()


def test_cells_of_one_training_come_together_in_the_order_of_the_first(script):
    specs = ["gadam-image@cuda", "averaging-starts@cuda", "averaging-schedules@cuda"]
    given = [work for spec in specs for work in script.works(spec, {})]
    found = script.bundles(given)
    assert sum(map(len, found)) == len(given)
    assert all(len({training_of(work.cell) for work in bundle}) == 1 for bundle in found)
    assert len(found) == len({training_of(work.cell) for work in given}) < len(given)
    assert found[0][0].cell["optimizer"] == given[0].cell["optimizer"]
    flat = next(bundle for bundle in found if bundle[0].cell.get("run") == "AdamW, flat")
    assert [work.name for work in flat] == ["averaging-schedules", "averaging-starts"]


def test_a_run_stores_each_cell_once_and_begins_none_that_is_too_long(
    script, tmp_path, monkeypatch, capsys
):
    # its processes import the script by its name
    monkeypatch.syspath_prepend(ROOT / "benchmarks")

    def run(*specs, guess):
        options = [
            "--out",
            str(tmp_path),
            "--seconds=300",
            "--gpu=0",
            "--cpu=1",
            f"--guess={guess}",
        ]
        monkeypatch.setattr(sys, "argv", [script.__file__, "run", *specs, *options])
        script.main()
        return capsys.readouterr().out

    one, other = "deep-linear-toy/smoke@cpu", "vector-fields/smoke@cpu"
    store, cells = Store(tmp_path, "deep-linear-toy", "smoke"), script.works(one, {})
    assert f"0 of {len(cells)} cells" in run(one, guess=600)
    assert not store.finished()
    run(one, guess=1)
    assert store.finished() == {key_of(work.cell) for work in cells}
    more = len(script.works(other, {}))
    assert f"{more} cells in {more} bundles" in run(one, other, guess=1)


def test_cells_of_known_stores_are_not_run_again(script, tmp_path, monkeypatch, capsys):
    spec, known = "deep-linear-toy/smoke@cpu", tmp_path / "known"
    cells = [work.cell for work in script.works(spec, {})]
    store = Store(known, "deep-linear-toy", "smoke")
    store.open(cells)
    for cell in cells:
        store.add(cell, [], 1.0)
    arguments = [spec, "--seconds=60", "--gpu=0", "--cpu=1", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", [script.__file__, "run", *arguments, "--known", str(known)])
    script.main()
    assert "0 cells in 0 bundles" in capsys.readouterr().out


def test_the_plan_is_of_cells_that_are_not_stored(script):
    words = [
        word
        for line in (ROOT / "benchmarks" / "device_plan.txt").read_text().splitlines()
        for word in script.Parser().convert_arg_line_to_args(line)
    ]
    assert len(words) > 5
    for word in words:
        given = script.works(word, {})
        name, scale = given[0].name, given[0].scale
        there = Store(ROOT / "benchmarks" / "results" / "reproductions", name, scale)
        done = there.finished() if there.path.exists() else set()
        assert {key_of(work.cell) for work in given} - done, f"{word} has run"


@pytest.mark.parametrize(("error", "tries"), [("CUDA out of memory", 2), ("ValueError", 1)])
def test_a_cell_that_ran_out_of_memory_runs_once_more_at_the_end(
    script, tmp_path, monkeypatch, capsys, error, tries
):
    asked, answers = [], queue.Queue()

    def put(bundle):
        for work in bundle:
            asked.append(key_of(work.cell))
            rows, why = (None, error) if work.cell == first else ([], "")
            answers.put((0, work, Outcome(work.cell, rows, 1.0, why)))
        answers.put((0, None, None))

    context = Mock(Queue=Mock(side_effect=[answers, Mock(put=put)]))
    monkeypatch.setattr(script.multiprocessing, "get_context", lambda _: context)
    works = script.works("deep-linear-toy/smoke@cpu", {})
    first = works[0].cell
    script.run(tmp_path, ["deep-linear-toy/smoke@cpu"], 60, 0, 1, {}, False, 30, 1)
    assert asked == [key_of(work.cell) for work in works] + [key_of(first)] * (tries - 1)
    assert f"{len(works) - 1} of {len(works)} cells, {tries} failures" in capsys.readouterr().out
