"""The runner and its store: whole cells or nothing, no cell twice, the same rows whoever runs
them.
"""

import gzip
import json
import multiprocessing
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import lambdahat
from lambdahat._core.storage import Damaged
from lambdahat.data.image_files import NAMES
from lambdahat.experiments.kit import store, sweeps
from lambdahat.experiments.kit.cells import Rows, key_of
from lambdahat.experiments.kit.experiment import SCALES, Experiment
from lambdahat.experiments.kit.store import Store, stores_in
from lambdahat.experiments.kit.sweeps import BACKENDS, forecast, matches, sweep
from lambdahat.experiments.published import find
from tests.experiments.toys import Config, toy, watched


def records(store: Store) -> list[dict]:
    return list(store.rows())


def test_rows_hold_their_cells_in_the_order_of_the_grid(tmp_path):
    experiment = toy()
    rows = sweep(experiment, tmp_path, scale="smoke").rows()
    assert [(row["rate"], row["seed"], row["step"]) for row in rows] == [
        (rate, seed, step) for rate in (0.5, 2.0) for seed in range(2) for step in range(3)
    ]


def test_two_workers_give_the_rows_of_one(tmp_path, monkeypatch):
    """And keep which data they read."""
    monkeypatch.setenv("LAMBDAHAT_DATA", str(tmp_path / "data"))
    write_images(tmp_path / "data" / "mnist", 7)
    alone = sweep(on_images(), tmp_path / "one", scale="cpu")
    together = sweep(on_images(), tmp_path / "two", scale="cpu", jobs=2)
    assert records(alone) == records(together)
    assert [facts["threads"] for facts in made(together)] == ["1"] * 8
    (used,) = {facts[store.DATA] for facts in made(alone) + made(together)}
    assert used.startswith("mnist ")
    assert not multiprocessing.active_children()
    write_images(tmp_path / "data" / "mnist", 9)
    with pytest.raises(ValueError, match="must have been made with the data that are here"):
        sweep(on_images(), tmp_path / "two", scale="cpu", jobs=2)


def test_a_finished_cell_is_not_run_again(tmp_path):
    calls = []
    experiment = toy()

    def counted(cell, device):
        calls.append(key_of(cell))
        return inner(cell, device)

    inner = experiment.run
    object.__setattr__(experiment, "run", counted)
    sweep(experiment, tmp_path, scale="smoke", only="rate=2.0")
    sweep(experiment, tmp_path, scale="smoke")
    assert len(calls) == len(set(calls)) == 4
    sweep(experiment, tmp_path, scale="smoke", resume=False)
    assert len(calls) == 8


def test_only_runs_the_cells_that_match(tmp_path):
    store = sweep(toy(), tmp_path, scale="smoke", only="rate=0.5 seed=1")
    assert {(row["rate"], row["seed"]) for row in store.rows()} == {(0.5, 1)}
    with pytest.raises(ValueError, match="only must match a cell"):
        sweep(toy(), tmp_path, scale="smoke", only="rate=7")


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        ("seed=1", True),
        ("seed=11", False),
        ("seed=1 rate=0.0001", True),
        ("rate=1e-4", True),
        ("rate=1e-4 seed=2", False),
        ("seed", False),
        ("ed=1", False),
        ("seed=1 width=3", False),
        ("run=SGD, flat  seed=1", True),
        ("run=SGD", False),
        ("norm layers=with batch norm exact=True", True),
        ("exact=1", False),
        ("rule=L2", True),
        ("rules=['SGD', 'L2']", True),
        ("rule=L", False),
    ],
)
def test_only_takes_whole_settings(only, expected):
    cell = {
        "seed": 1,
        "rate": 1e-4,
        "run": "SGD, flat",
        "norm layers": "with batch norm",
        "exact": True,
    }
    assert matches(cell | {"rules": ["SGD", "L2"]}, only) == expected


def test_a_seed_is_found_among_seeds_that_run_together():
    assert [matches({"seeds": seeds}, "seed=3") for seeds in ([2, 3], (3,), [13], [])] == [
        True,
        True,
        False,
        False,
    ]


def test_cells_that_left_the_grid_are_not_read(tmp_path):
    wide = sweep(toy(smoke=Config(3, rates=(0.5, 2.0))), tmp_path, scale="smoke")
    narrow = toy(smoke=Config(2, rates=(2.0,), broken=1))
    store = sweep(narrow, tmp_path, scale="smoke")
    assert {(row["rate"], row["seed"]) for row in store.rows()} == {(2.0, 0)}
    assert (len(store.finished()), len(store.errors())) == (1, 1)
    with sqlite3.connect(store.path) as connection:
        assert connection.execute("SELECT COUNT(*) FROM records").fetchone() == (3,)
    back = toy(smoke=Config(3))
    object.__setattr__(back, "run", lambda cell, device: pytest.fail("all of it has run"))
    assert len(sweep(back, tmp_path, scale="smoke").rows()) == 18
    assert wide.errors() == []


def test_a_store_of_an_early_version_is_read_and_continued(tmp_path):
    """Before there was a table of what each cell was made with, and one of digests."""
    store = sweep(toy(), tmp_path, scale="smoke", only="rate=2.0", command="first")
    with sqlite3.connect(store.path) as connection:
        connection.execute("DROP TABLE made")
        connection.execute("DROP TABLE digests")
        connection.execute("UPDATE about SET value = '1.0' WHERE name = 'torch'")
    assert (len(store.rows()), len(store.finished()), store.about()["torch"]) == (6, 2, "1.0")
    sweep(toy(), tmp_path, scale="smoke", command="second")
    assert len(store.rows()) == 12
    assert store.about()["torch"] == f"{torch.__version__}, 1.0"
    assert store.about()["command"] == "second"


def test_nothing_is_written_where_nothing_runs(tmp_path):
    store = sweep(toy(), tmp_path, scale="smoke", command="lambdahat reproduce toy")
    before = store.path.read_bytes()
    sweep(toy(), tmp_path, scale="smoke", command="lambdahat reproduce toy --jobs 2")
    assert store.path.read_bytes() == before


def made(store: Store) -> list[dict]:
    with sqlite3.connect(store.path) as connection:
        return [json.loads(facts) for (facts,) in connection.execute("SELECT facts FROM made")]


def test_each_cell_says_what_it_was_made_with(tmp_path):
    store = sweep(toy(), tmp_path, scale="smoke")
    found = made(store)
    assert len(found) == 4
    for facts in found:
        assert facts["lambdahat"] == lambdahat.__version__
        assert facts["torch"] == torch.__version__
        assert facts["threads"] == str(torch.get_num_threads())
        assert facts["processor"]
        assert "gpu" not in facts
    assert not any(
        str(Path.home()) in text or str(tmp_path) in text for text in store.about().values()
    )
    assert store.about()["threads"] == found[0]["threads"]


def test_the_commit_is_that_of_our_own_checkout_only(tmp_path, monkeypatch):
    def git(*words):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words],
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )

    place = tmp_path / "provenance.py"
    place.touch()
    monkeypatch.setattr(store, "__file__", str(place))
    commit = store._commit.__wrapped__
    assert commit() == ""  # no checkout
    git("init")
    git("commit", "--allow-empty", "-m", "theirs")
    assert commit() == ""  # installed inside another project
    git("add", "provenance.py")
    git("commit", "-m", "ours")
    assert len(commit()) == 12
    place.write_text("changed")
    assert commit().endswith("-dirty")


def test_a_cell_that_raises_is_noted_and_tried_again(tmp_path):
    broken = toy(smoke=Config(2, broken=1))
    store = sweep(broken, tmp_path, scale="smoke")
    assert len(store.finished()) == 2
    assert [cell["seed"] for cell, _ in store.errors()] == [1, 1]
    assert "this cell is broken" in store.errors()[0][1]
    object.__setattr__(broken, "run", lambda cell, device: [{"value": 0.0}])
    assert len(sweep(broken, tmp_path, scale="smoke").finished()) == 4
    assert store.errors() == []


def test_progress_names_only_the_settings_that_vary(tmp_path, monkeypatch):
    notes = []
    monkeypatch.setattr(sweeps, "report", lambda task, done, total, note="": notes.append(note))
    sweep(toy(), tmp_path, scale="smoke", only="rate=2.0")
    assert notes == ["", "seed=0", "seed=1"]


def test_numbers_that_json_lacks_come_back(tmp_path):
    experiment = toy()
    object.__setattr__(
        experiment,
        "run",
        lambda cell, device: [{"a": float("inf"), "b": [1.0, float("nan")], "c": None}],
    )
    row, *_ = sweep(experiment, tmp_path, scale="smoke").rows()
    assert row["a"] == float("inf")
    assert row["b"][0] == 1.0
    assert row["b"][1] != row["b"][1]
    assert row["c"] is None


def test_the_store_is_plain_sqlite_and_says_where_it_was_made(tmp_path):
    store = sweep(toy(), tmp_path, scale="smoke", command="lambdahat reproduce toy")
    with sqlite3.connect(store.path) as connection:
        found = [
            json.loads(record) for (record,) in connection.execute("SELECT record FROM records")
        ]
    assert found == records(store)
    assert set(found[0]) >= {"rate", "seed", "step", "value"}
    assert store.about()["command"] == "lambdahat reproduce toy"
    (tmp_path / "another.sqlite").touch()  # not a store: it has no scale
    assert [found.experiment for found in stores_in(tmp_path)] == ["toy"]


def test_rows_of_a_thousand_characters_take_little_more_room(tmp_path):
    experiment = toy()
    object.__setattr__(
        experiment,
        "run",
        lambda cell, device: [{"curve": [1.2345] * 150, "seed": s} for s in range(9)],
    )
    store = sweep(experiment, tmp_path, scale="paper")
    told = sum(len(json.dumps(row["curve"])) for row in store.rows())
    assert told > 120_000
    assert store.path.stat().st_size < 1.5 * told


def test_rows_select_and_pair():
    rows = Rows([{"a": 1, "seed": 0, "v": 1.0}, {"a": 2, "seed": 0, "v": 3.0}, {"a": 2, "seed": 1}])
    assert rows.where(a=[1, 2], seed=0).values("v") == [1.0, 3.0]
    assert rows.distinct("a") == [1, 2]
    assert rows.paired("v") == {0: 2.0}
    assert list(rows.frame().columns) == ["a", "seed", "v"]
    assert len(rows[:2]) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scale": "huge"}, "scale must be one of 'smoke', 'cpu', 'paper'"),
        ({"jobs": 0}, "jobs must be an integer of at least 1"),
        ({"backend": "spark"}, "backend must be one of 'loky', 'dask', 'ray'"),
        ({"address": "tcp://x"}, "address must be left out with the loky backend"),
        ({"device": "gpu"}, 'device must be "cpu" or "cuda", got \'gpu\''),
        ({"device": "cuda:99"}, "device must be one that is there, got 'cuda:99', and torch sees"),
    ],
)
def test_misuse_is_named(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        sweep(toy(), tmp_path, **({"scale": "smoke"} | settings))


def test_a_store_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="the store must exist"):
        Store(tmp_path, "toy", "cpu").rows()


@pytest.mark.parametrize("damage", ["half", "other"])
def test_a_broken_store_is_named(tmp_path, damage):
    store = sweep(toy(), tmp_path, scale="smoke")
    data = store.path.read_bytes()
    store.path.write_bytes(
        data[: len(data) // 2] if damage == "half" else b"no database, but long enough " * 50
    )
    for read in (store.rows, store.about, lambda: sweep(toy(), tmp_path, scale="smoke")):
        with pytest.raises(
            ValueError, match=r"toy-smoke\.sqlite must be a whole store .* delete it and run"
        ):
            read()
    assert len(sweep(toy(), tmp_path, scale="smoke", resume=False).rows()) == 12


@pytest.mark.parametrize(
    "statement",
    [
        (
            "UPDATE rows SET record = REPLACE(record, '\"step\": 1', '\"step\": 7') WHERE key ="
            " '{key}'"
        ),
        "DELETE FROM rows WHERE key = '{key}' AND number = 1",
        (
            "UPDATE cells SET settings = REPLACE(settings, '\"seed\": 0', '\"seed\": 1') WHERE key"
            " = '{key}'"
        ),
        "UPDATE cells SET seconds = seconds + 1 WHERE key = '{key}'",
        "UPDATE cells SET position = 9 WHERE key = '{key}'",
        "DELETE FROM cells WHERE key = '{key}'",
        "DELETE FROM made WHERE key = '{key}'",
        "UPDATE about SET value = 'other' WHERE name = 'command'",
    ],
)
def test_changed_rows_are_named_and_run_again(tmp_path, statement):
    store = sweep(toy(), tmp_path, scale="smoke", command="lambdahat reproduce toy")
    before = records(store)
    key, *_ = [key_of(cell) for cell in toy().grid("smoke")]
    with sqlite3.connect(store.path) as connection:
        assert connection.execute(statement.format(key=key)).rowcount == (
            3 if "REPLACE(record" in statement else 1
        )
    fresh = Store(tmp_path, "toy", "smoke")
    part = (
        "the about"
        if "about" in statement
        else "the grid"
        if "position" in statement
        else f"cell {key}"
    )
    with pytest.raises(
        Damaged, match=rf"toy-smoke\.sqlite is damaged in .*{part}.*lambdahat reproduce toy .*again"
    ):
        fresh.rows()
    with pytest.warns(
        RuntimeWarning, match=rf"toy-smoke\.sqlite is damaged in .*{part}.*damaged cells run again"
    ):
        again = sweep(toy(), tmp_path, scale="smoke")
    assert records(again) == before
    assert len(again.finished()) == 4


def test_a_store_killed_before_its_first_write_has_no_rows(tmp_path):
    store = Store(tmp_path, "toy", "smoke")
    store.path.touch()
    assert (len(store.rows()), store.seconds(), store.about()) == (0, 0.0, {})
    assert len(sweep(toy(), tmp_path, scale="smoke").rows()) == 12


@pytest.mark.parametrize("below", ["", "run"])
def test_a_folder_that_is_a_file_is_named(tmp_path, below):
    (tmp_path / "file").touch()
    with pytest.raises(
        ValueError, match=r"the folder of the store must be one that can be made, got .*file"
    ):
        sweep(toy(), tmp_path / "file" / below, scale="smoke")


STARTER = """
import os, sys
from tests.experiments.toys import Config, toy, watched
from lambdahat.experiments.kit.sweeps import sweep
folder, seeds, jobs = sys.argv[1:]
for _ in sys.stdin:  # a line for each sweep, in a process group of its own
    child = os.fork()
    if child == 0:
        os.setsid()
        experiment = watched(toy(cpu=Config(int(seeds))), folder + "/log", pause=0.05)
        sweep(experiment, folder, scale="cpu", jobs=int(jobs))
        os._exit(0)
    print(child, flush=True)
    os.waitpid(child, 0)
    print("ended", flush=True)
"""


@pytest.mark.parametrize(
    ("jobs", "kills", "seeds"),
    [(1, 8, 50), (2, 1, 20), pytest.param(2, 20, 150, marks=pytest.mark.slow)],
)
def test_kills_lose_nothing(tmp_path, jobs, kills, seeds):
    """Kill the sweep at random moments: the store ends complete, nothing twice, no row other than
    uninterrupted.

    A process that has imported everything forks one for each sweep: with one job a kill costs what
    its cells take.
    """
    folder = tmp_path / "killed"
    folder.mkdir()
    log, store, moments = folder / "log", Store(folder, "toy", "cpu"), random.Random(0)
    before = []  # at each kill: the finished cells, and how many have begun
    command = [sys.executable, "-c", STARTER, str(folder), str(seeds), str(jobs)]
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        command, cwd=root, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as starter:
        for _ in range(kills):
            known = len(store.finished()) if store.path.is_file() else 0
            print(file=starter.stdin, flush=True)
            child = int(starter.stdout.readline())
            while not store.path.is_file() or len(store.finished()) == known:
                time.sleep(0.005)
            time.sleep(moments.uniform(0, 0.3))
            os.killpg(child, signal.SIGKILL)
            assert starter.stdout.readline() == "ended\n"
            before.append((store.finished(), len(log.read_text().split())))
        starter.stdin.close()
    experiment = toy(cpu=Config(seeds))
    finished = sweep(watched(experiment, str(log), pause=0.0), folder, scale="cpu")
    begun = log.read_text().split()
    assert len(before) == kills
    assert all(0 < len(done) < 2 * seeds for done, _ in before)
    assert all(done.isdisjoint(begun[count:]) for done, count in before)
    assert len(set(begun)) == 2 * seeds
    # of so many kills some hit a running cell, which ran again
    assert len(begun) > 2 * seeds or kills < 8
    assert records(finished) == records(sweep(experiment, tmp_path / "whole", scale="cpu"))


# dask comes with the development tools, ray does not
RAY = pytest.param("ray", marks=pytest.mark.slow)


@pytest.mark.parametrize("backend", ["dask", RAY])
def test_clusters_give_the_same_rows(tmp_path, backend):
    pytest.importorskip(backend)
    alone = sweep(toy(), tmp_path / "one", scale="cpu")
    there = sweep(toy(), tmp_path / "two", scale="cpu", jobs=2, backend=backend)
    assert records(alone) == records(there)
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_published_experiment_gives_the_same_rows_everywhere(tmp_path):
    experiment = find("power-method")
    alone = records(sweep(experiment, tmp_path / "alone", scale="smoke"))
    assert records(sweep(experiment, tmp_path / "loky", scale="smoke", jobs=2)) == alone
    for backend in ("dask", "ray"):
        pytest.importorskip(backend)
        assert (
            records(sweep(experiment, tmp_path / backend, scale="smoke", jobs=2, backend=backend))
            == alone
        )


@pytest.mark.slow
def test_a_dask_cluster_at_an_address_is_used_and_left_running(tmp_path):
    distributed = pytest.importorskip("dask.distributed")
    alone = records(sweep(toy(), tmp_path / "one", scale="cpu"))
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=None
    ) as cluster:
        address = cluster.scheduler_address
        assert (
            records(sweep(toy(), tmp_path / "two", scale="cpu", backend="dask", address=address))
            == alone
        )
        with distributed.Client(address) as client:
            assert len(client.ncores()) == 2


@pytest.mark.parametrize("backend", ["loky", pytest.param("dask", marks=pytest.mark.slow), RAY])
def test_a_finished_cell_is_handed_back_while_another_runs(tmp_path, backend):
    """The second cell waits for a file that is written once the first has come back."""
    pytest.importorskip({"loky": "joblib"}.get(backend, backend))
    sign = tmp_path / "sign"

    def task(cell):
        for _ in range(1200):
            if cell["seed"] == 0 or sign.exists():
                return cell["seed"]
            time.sleep(0.05)
        return None

    found = BACKENDS[backend](task, [{"seed": seed} for seed in range(2)], 2, None, "cpu")
    assert next(found) == 0
    sign.touch()
    assert list(found) == [1]


def test_a_package_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sweeps, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r'backend must have ray installed, .* pip install "lambdahat\[ray\]"'
    ):
        sweep(toy(), tmp_path, scale="smoke", backend="ray")


@pytest.mark.slow
def test_an_address_where_nothing_answers_is_named(tmp_path):
    dask = pytest.importorskip("dask")
    short = dask.config.set({"distributed.comm.timeouts.connect": "1s"})
    with (
        short,
        pytest.raises(ValueError, match="address must be that of a dask cluster, got 'tcp:"),
    ):
        sweep(toy(), tmp_path, scale="smoke", backend="dask", address="tcp://127.0.0.1:9")


def test_nothing_is_started_for_no_cells(tmp_path, monkeypatch):
    sweep(toy(), tmp_path, scale="smoke")
    monkeypatch.setitem(BACKENDS, "dask", lambda *_: pytest.fail("there is nothing left to run"))
    sweep(toy(), tmp_path, scale="smoke", backend="dask")


def on_images(**changes) -> Experiment:
    """Cells that also load a data set below LAMBDAHAT_DATA, and a file that may be there."""
    experiment = toy(**changes)
    rows_of = experiment.run

    def run(cell, device):
        from lambdahat.data.catalogue import load
        from lambdahat.experiments.kit.store import outside_file

        x, _ = load("mnist", verify=False, normalization="raw").train
        there = outside_file("graphs", "a-graph") is not None
        mean = float(x.float().mean()) + cell["rate"]
        return [{**row, "mean": mean, "there": there} for row in rows_of(cell, device)]

    object.__setattr__(experiment, "run", run)
    return experiment


def write_images(folder: Path, value: int, packed: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    images = np.full((4, 28, 28), value, np.uint8), np.arange(4, dtype=np.uint8)
    for name, array in zip(NAMES, (*images, *images), strict=True):
        head = bytes((0, 0, 8, array.ndim)) + b"".join(
            size.to_bytes(4, "big") for size in array.shape
        )
        blob = head + array.tobytes()
        (folder / f"{name}{'.gz' if packed else ''}").write_bytes(
            gzip.compress(blob) if packed else blob
        )


def test_rows_of_other_data_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("LAMBDAHAT_DATA", str(tmp_path / "data"))
    write_images(tmp_path / "data" / "mnist", 7)
    first = sweep(on_images(), tmp_path / "out", scale="smoke", only="rate=0.5")
    assert {row["mean"] for row in first.rows()} == {7.5}
    (used,) = {facts[store.DATA] for facts in made(first)}
    assert used.startswith("mnist ")
    assert used.endswith("graphs/a-graph absent")
    write_images(tmp_path / "data" / "mnist", 9)
    with pytest.raises(
        ValueError,
        match=r"toy-smoke\.sqlite must have been made with the data that are here, got m",
    ):
        sweep(on_images(), tmp_path / "out", scale="smoke")
    write_images(tmp_path / "data" / "mnist", 7, packed=True)  # the same data again
    assert len(sweep(on_images(), tmp_path / "out", scale="smoke").rows()) == 12
    graphs = tmp_path / "data" / "graphs"
    graphs.mkdir()
    (graphs / "a-graph.txt").write_text("0 1\n")
    with pytest.raises(ValueError, match="graphs/a-graph"):
        sweep(on_images(), tmp_path / "out", scale="smoke")
    fresh = sweep(on_images(), tmp_path / "out", scale="smoke", resume=False)
    assert {row["there"] for row in fresh.rows()} == {True}
    shutil.rmtree(tmp_path / "data")  # what is stored can be read without the data
    assert len(sweep(on_images(), tmp_path / "out", scale="smoke").rows()) == 12


def test_a_worker_with_other_data_adds_no_rows(tmp_path, monkeypatch):
    """As on a cluster whose machines have files of their own: what this machine has is not
    asked.
    """
    places = []
    for value in (7, 9):
        places.append(tmp_path / str(value))
        write_images(places[-1] / "mnist", value)

    def elsewhere(task, cells, jobs, address, device):
        for number, cell in enumerate(cells):
            monkeypatch.setenv("LAMBDAHAT_DATA", str(places[number == 1]))
            yield task(cell)

    monkeypatch.setitem(sweeps.BACKENDS, "dask", elsewhere)
    store = sweep(on_images(), tmp_path / "out", scale="smoke", backend="dask", address="there")
    assert {row["mean"] - row["rate"] for row in store.rows()} == {7.0}
    ((_, error),) = store.errors()
    assert "made with other data than the cells before: mnist" in error


def test_stores_of_early_versions_do_not_know_their_data(tmp_path, monkeypatch):
    monkeypatch.setenv("LAMBDAHAT_DATA", str(tmp_path / "data"))
    write_images(tmp_path / "data" / "mnist", 7)
    store = sweep(on_images(), tmp_path / "out", scale="smoke")
    with sqlite3.connect(store.path) as connection:
        connection.execute("DROP TABLE made")
        connection.execute("DROP TABLE digests")
    write_images(tmp_path / "data" / "mnist", 9)
    assert {
        row["mean"] - row["rate"]
        for row in sweep(on_images(), tmp_path / "out", scale="smoke").rows()
    } == {7.0}


def paced(setup: float, pace: float) -> tuple[Experiment, SimpleNamespace]:
    """Cells that take some seconds and some for each epoch, and the clock that they move."""

    cells = [{"rate": rate, "epochs": 40, "seed": seed} for rate in (0.5, 2.0) for seed in range(4)]

    def run(cell, device):
        clock.now += setup + cell["rate"] * pace * cell["epochs"]
        return [{"value": cell["rate"]}]

    clock = SimpleNamespace(now=0.0)
    clock.perf_counter = lambda: clock.now
    return replace(toy(), scales=dict.fromkeys(SCALES, cells), run=run), clock


def test_a_forecast_extrapolates_from_few_epochs_and_stores_nothing(tmp_path, monkeypatch):
    experiment, clock = paced(setup=5.0, pace=0.25)
    monkeypatch.setattr(sweeps.time, "perf_counter", clock.perf_counter)
    found = list(forecast(experiment, tmp_path, scale="cpu"))
    assert [(row.setting["rate"], row.cells) for row in found] == [(0.5, 4), (2.0, 4)]
    assert [row.seconds for row in found] == pytest.approx([5 + 0.5 * 0.25 * 40, 5 + 2 * 0.25 * 40])
    assert [row.source for row in found] == ["from 1 and 3 of 40 epochs"] * 2
    assert not list(tmp_path.iterdir())


def test_a_forecast_takes_the_time_of_finished_cells(tmp_path, monkeypatch):
    experiment, clock = paced(setup=5.0, pace=0.25)
    monkeypatch.setattr(sweeps.time, "perf_counter", clock.perf_counter)
    sweep(experiment, tmp_path, scale="cpu", only="seed=1")
    found = list(forecast(experiment, tmp_path, scale="cpu"))
    assert [(row.cells, row.source) for row in found] == [(3, "1 finished")] * 2
    assert [row.total for row in found] == pytest.approx([3 * 10, 3 * 25])
    sweep(experiment, tmp_path, scale="cpu")
    assert not list(forecast(experiment, tmp_path, scale="cpu"))


def test_a_forecast_says_what_it_cannot_know(tmp_path):
    found = list(forecast(toy(), tmp_path, scale="smoke"))
    assert [np.isnan(row.seconds) for row in found] == [True, True]
    assert found[0].source.startswith("not known: no epochs to cut")

    def fail(cell, device):
        raise RuntimeError("too short")

    broken = replace(paced(1.0, 1.0)[0], run=fail)
    assert (
        "raises RuntimeError: too short" in next(forecast(broken, tmp_path, scale="smoke")).source
    )
