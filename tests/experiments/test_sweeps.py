"""The runner and its store: whole cells or nothing, no cell twice, the same rows whoever runs them."""

import json
import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lambdahat.experiments import clusters
from lambdahat.experiments.clusters import BACKENDS
from lambdahat.experiments.experiment import Rows, key_of
from lambdahat.experiments.registry import find
from lambdahat.experiments.store import Store, stores_in
from lambdahat.experiments.sweeps import matches, sweep
from tests.experiments.toys import Config, toy


def records(store: Store) -> list[dict]:
    return list(store.rows())


def test_rows_hold_their_cells_in_the_order_of_the_grid(tmp_path):
    experiment = toy()
    rows = sweep(experiment, tmp_path, scale="smoke").rows()
    assert [(row["rate"], row["seed"], row["step"]) for row in rows] == [
        (rate, seed, step) for rate in (0.5, 2.0) for seed in range(2) for step in range(3)
    ]


def test_two_workers_give_the_rows_of_one(tmp_path):
    alone = sweep(toy(), tmp_path / "one", scale="cpu")
    together = sweep(toy(), tmp_path / "two", scale="cpu", jobs=2)
    assert records(alone) == records(together)
    assert not multiprocessing.active_children()


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
    assert matches({"seed": 11}, "seed=1")  # a part of a word is enough
    with pytest.raises(ValueError, match="only must match a cell"):
        sweep(toy(), tmp_path, scale="smoke", only="rate=7")


def test_a_cell_that_raises_is_noted_and_tried_again(tmp_path):
    broken = toy(smoke=Config(2, broken=1))
    store = sweep(broken, tmp_path, scale="smoke")
    assert len(store.finished()) == 2
    assert [cell["seed"] for cell, _ in store.errors()] == [1, 1]
    assert "this cell is broken" in store.errors()[0][1]
    object.__setattr__(broken, "run", lambda cell, device: [{"value": 0.0}])
    assert len(sweep(broken, tmp_path, scale="smoke").finished()) == 4
    assert store.errors() == []


def test_numbers_that_json_lacks_come_back(tmp_path):
    experiment = toy()
    object.__setattr__(
        experiment, "run", lambda cell, device: [{"a": float("inf"), "b": [1.0, float("nan")], "c": None}]
    )
    (row, *_) = sweep(experiment, tmp_path, scale="smoke").rows()
    assert row["a"] == float("inf")
    assert row["b"][0] == 1.0
    assert row["b"][1] != row["b"][1]
    assert row["c"] is None


def test_the_store_is_plain_sqlite_and_says_where_it_was_made(tmp_path):
    store = sweep(toy(), tmp_path, scale="smoke", command="lambdahat reproduce toy")
    with sqlite3.connect(store.path) as connection:
        found = [json.loads(record) for (record,) in connection.execute("SELECT record FROM records")]
    assert found == records(store)
    assert set(found[0]) >= {"rate", "seed", "step", "value"}
    assert store.about()["command"] == "lambdahat reproduce toy"
    assert [found.experiment for found in stores_in(tmp_path)] == ["toy"]


def test_rows_of_a_thousand_characters_take_little_more_room(tmp_path):
    experiment = toy()
    object.__setattr__(experiment, "run", lambda cell, device: [{"curve": [1.2345] * 150, "seed": s} for s in range(9)])
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
    ],
)
def test_misuse_is_named(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        sweep(toy(), tmp_path, **({"scale": "smoke"} | settings))


def test_a_store_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="the store must exist"):
        Store(tmp_path, "toy", "cpu").rows()


SCRIPT = """
import sys
sys.path.insert(0, {here!r})
from tests.experiments.toys import Config, toy
from lambdahat.experiments.sweeps import sweep
sweep(toy(cpu=Config(10, pause=0.05)), {folder!r}, scale="cpu", jobs=2)
"""


@pytest.mark.slow
def test_twenty_kills_lose_nothing(tmp_path):
    """Kill the sweep at random moments: the store ends complete, nothing twice, no row other than uninterrupted."""
    script = SCRIPT.format(here=str(Path(__file__).parents[2]), folder=str(tmp_path / "killed"))
    moments = random.Random(0)
    kills = 0
    for _ in range(20):
        run = subprocess.Popen([sys.executable, "-c", script], start_new_session=True, stderr=subprocess.DEVNULL)
        time.sleep(moments.uniform(1.5, 4.0))
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            kills += 1
        run.wait()
    assert kills >= 3
    experiment = toy(cpu=Config(10, pause=0.05))
    finished = sweep(experiment, tmp_path / "killed", scale="cpu")
    whole = sweep(experiment, tmp_path / "whole", scale="cpu")
    assert records(finished) == records(whole)


RAY = pytest.param("ray", marks=pytest.mark.slow)  # dask comes with the development tools, ray does not


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
        assert records(sweep(experiment, tmp_path / backend, scale="smoke", jobs=2, backend=backend)) == alone


@pytest.mark.slow
def test_a_dask_cluster_at_an_address_is_used_and_left_running(tmp_path):
    distributed = pytest.importorskip("dask.distributed")
    alone = records(sweep(toy(), tmp_path / "one", scale="cpu"))
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        address = cluster.scheduler_address
        assert records(sweep(toy(), tmp_path / "two", scale="cpu", backend="dask", address=address)) == alone
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
    monkeypatch.setattr(clusters, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'backend must have ray installed, .* pip install "lambdahat\[ray\]"'):
        sweep(toy(), tmp_path, scale="smoke", backend="ray")


@pytest.mark.slow
def test_an_address_where_nothing_answers_is_named(tmp_path):
    dask = pytest.importorskip("dask")
    short = dask.config.set({"distributed.comm.timeouts.connect": "1s"})
    with short, pytest.raises(ValueError, match="address must be that of a dask cluster, got 'tcp:"):
        sweep(toy(), tmp_path, scale="smoke", backend="dask", address="tcp://127.0.0.1:9")


def test_nothing_is_started_for_no_cells(tmp_path, monkeypatch):
    sweep(toy(), tmp_path, scale="smoke")
    monkeypatch.setitem(BACKENDS, "dask", lambda *_: pytest.fail("there is nothing left to run"))
    sweep(toy(), tmp_path, scale="smoke", backend="dask")
