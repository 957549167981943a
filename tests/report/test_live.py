"""The live view without a browser: what the server tells, to whom, and how little of it."""

import http.client
import json
import os
import threading
import time
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
import torch

import lambdahat as lh
from lambdahat._core.progress import ProgressFile, report
from lambdahat.experiments.kit.store import Store
from lambdahat.report import live
from lambdahat.report.live import Board, LiveServer, ThinnedRows
from lambdahat.training.history import Metrics


@contextmanager
def serving(folder, **options):
    with LiveServer(folder, **options) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(20)


def ask(server, path=None, method="GET", host=None, **headers):
    """The status, the headers and the body of an answer."""
    port = server.server_port
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    named = {"Host": f"127.0.0.1:{port}" if host is None else host, **headers}
    try:
        connection.request(
            method, urlsplit(server.url).path if path is None else path, headers=named
        )
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def row(step, **values):
    return {"kind": "epoch", "epoch": step, "step": step, "progress": float(step), **values}


def metrics(folder, steps=3, first=1):
    """A run whose loss is 1/step."""
    written = Metrics(folder)
    for step in range(first, first + steps):
        written.add(row(step, loss=1 / step, accuracy=0.1, learning_rate=0.5))
    return written


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Every question is answered anew."""
    monkeypatch.setattr(live, "FRESH", 0.0)
    monkeypatch.setattr(live, "SCAN", 0.0)


def test_the_page_and_its_parts_need_the_token(tmp_path):
    with serving(tmp_path) as server:
        base = f"/{server.token}/"
        for name in ("", "live.js", "live.css", "page.css", "charts.js", "plotly.js", "state"):
            status, headers, body = ask(server, base + name)
            assert (status, len(body) > 0) == (200, True), name
            assert "default-src 'none'" in headers["Content-Security-Policy"]
            assert headers["Referrer-Policy"] == "no-referrer"  # it would hold the token
        assert len(server.token) >= 20
        for path in ("/", "/state", "/wrong/", "/wrong/state", f"/{server.token[:-1]}/state", "*"):
            status, _, body = ask(server, path)
            assert status == 403, path
            assert b"token" in body
        assert ask(server, base[:-1])[0] == 301


def test_other_names_for_this_machine_are_refused(tmp_path):
    with serving(tmp_path) as server:
        port = server.server_port
        for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}"):
            assert ask(server, host=host)[0] == 200, host
        other = ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}")
        for host in (*other, f"192.168.0.7:{port}", "", f"127.0.0.1.evil.example:{port}", "a:b:c"):
            assert ask(server, host=host)[0] == 403, host


def test_another_host_is_served_on_only_if_asked_for(tmp_path):
    with serving(tmp_path, host="0.0.0.0") as server:
        port = server.server_port
        assert ask(server, host=f"192.168.0.7:{port}")[0] == 200
        assert ask(server, host=f"evil.example:{port}")[0] == 403


def test_it_can_only_be_read(tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    with serving(tmp_path) as server:
        base = f"/{server.token}/"
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            assert ask(server, base + "state", method)[0] == 405
        status, headers, body = ask(server, base + "live.js", "HEAD")
        assert (status, body) == (200, b"")
        assert int(headers["Content-Length"]) == len(ask(server, base + "live.js")[2])
        inside = ("secret.txt", "../secret.txt", "%2e%2e/secret.txt", "..%2fsecret.txt", "live.py")
        for name in (*inside, "live.js/", "/etc/passwd", "assets/live.js"):
            assert ask(server, base + name)[0] == 404, name


def test_a_page_is_packed_for_those_who_can_unpack_it(tmp_path):
    with serving(tmp_path) as server:
        path = f"/{server.token}/plotly.js"
        _, headers, packed = ask(server, path, **{"Accept-Encoding": "gzip"})
        assert headers["Content-Encoding"] == "gzip"
        assert len(packed) < 2_000_000 < len(ask(server, path)[2])


def test_an_empty_folder_has_nothing_and_a_missing_one_is_an_error(tmp_path):
    assert Board(tmp_path).state({})["sources"] == []
    with pytest.raises(FileNotFoundError, match="folder must be an existing folder"):
        Board(tmp_path / "missing")


def test_only_what_is_new_is_sent(tmp_path):
    rows, board = metrics(tmp_path / "run", 300), Board(tmp_path)
    whole = board.state({0: 0})
    (source,) = whole["sources"]
    assert (source["name"], source["kind"], source["rows"]) == ("run", "training run", 300)
    loss = whole["charts"][0]["charts"]["loss, mean per sample"]
    assert loss["figure"]["data"][0]["y"] == [pytest.approx(1 / i, rel=1e-6) for i in range(1, 301)]
    have = {0: whole["charts"][0]["version"]}
    nothing = board.state(have)
    assert nothing["charts"] == {}
    rows.add(row(301, loss=0.5, accuracy=0.1, learning_rate=0.5))
    more = board.state(have)
    grown = more["charts"][0]["charts"]["loss, mean per sample"]["figure"]["data"]
    assert grown == [{"from": 300, "grow": {"x": [301], "y": [0.5]}}]
    sizes = [len(json.dumps(one)) for one in (whole, nothing, more)]
    assert sizes[1] < 1000
    assert sizes[2] < sizes[0] / 5
    assert board.state({})["charts"] == {}  # of what nobody asked for nothing is sent
    # a page that was away for long gets everything
    assert "grow" not in json.dumps(board.state({0: 77})["charts"])


def test_half_a_row_is_not_read_and_a_resumed_run_is_read_anew(tmp_path):
    rows, board = metrics(tmp_path, 4), Board(tmp_path)
    board.state({})
    with open(tmp_path / "metrics.jsonl", "ab") as stream:
        stream.write(b'{"kind": "epoch", "pro')
    assert board.state({})["sources"][0]["rows"] == 4
    rows.keep_steps(2)
    rows.add(row(3, loss=7.0))
    found = board.state({0: 0})
    assert found["sources"][0]["rows"] == 3
    loss = found["charts"][0]["charts"]["loss, mean per sample"]
    assert loss["figure"]["data"][0]["y"] == [1, 0.5, 7]


def test_long_runs_are_thinned_and_rare_measurements_kept(tmp_path):
    rows = Metrics(tmp_path)
    for step in range(1, 5001):
        rare = {"llc": 3.0, "llc_stderr": 0.1} if step % 1000 == 0 else {}
        rows.add(row(step, loss=1 / step, **rare))
    board = Board(tmp_path)
    found = board.state({0: 0})
    charts = found["charts"][0]["charts"]
    loss = charts["loss, mean per sample"]["figure"]["data"][0]
    assert 300 < len(loss["x"]) <= live.ROWS + 7
    assert loss["x"][-1] == 5000
    (llc,) = (one for name, one in charts.items() if name.startswith("learning coefficient"))
    assert llc["figure"]["data"][-1]["x"] == [1000, 2000, 3000, 4000, 5000]
    assert len(json.dumps(found)) < 100_000
    rows.add(row(5001, loss=1.0))
    rows.add(row(5002, loss=1.0))
    more = board.state({0: found["charts"][0]["version"]})["charts"][0]["charts"]
    (grown,) = more["loss, mean per sample"]["figure"]["data"]
    assert len(grown["grow"]["x"]) <= 8  # the last row of each kind is not among those that stay


def test_thinned_rows_keep_their_order_and_the_last():
    thinned = ThinnedRows()
    for number in range(10 * live.ROWS + 3):
        thinned.add(number, number)
    numbers = [number for number, _ in thinned.rows()]
    assert numbers == sorted(set(numbers))
    assert (numbers[0], numbers[-1]) == (0, 10 * live.ROWS + 2)
    assert len(numbers) <= live.ROWS + 1


def test_a_run_tells_its_state_and_the_time_left(tmp_path, monkeypatch):
    metrics(tmp_path)
    board = Board(tmp_path)
    path = tmp_path / "progress.json"
    with ProgressFile(path, kind="training"):
        report("training", 0, 100)
        report("training", 25, 100)
        told = json.loads(path.read_text())
        told |= {"updated": time.time(), "tasks": {"training": [time.time() - 10, 0, 25, 100, ""]}}
        path.write_text(json.dumps(told))
        (source,) = board.state({})["sources"]
        assert source["state"] == "running"
        assert source["tasks"][0]["left"] == pytest.approx(30, abs=5)
        path.write_text(json.dumps(told | {"pid": 2**22 + 1}))  # no process has this number
        assert board.state({})["sources"][0]["state"] == "stopped"
    assert board.state({})["sources"][0]["state"] == "finished"
    with pytest.raises(ValueError, match="broke"), ProgressFile(path, kind="training"):
        raise ValueError("broke")
    assert board.state({})["sources"][0]["state"] == "failed: ValueError"


def test_sharpness_stands_beside_two_over_the_rate_and_spectra_are_a_map(tmp_path):
    rows = Metrics(tmp_path)
    for step in range(1, 4):
        spectrum = [[-0.1, 0.2], [0.0, 0.5], [float(step), 0.3]]
        rows.add(row(step, top_1=float(step), top_2=0.5, learning_rate=0.5, spectrum=spectrum))
    charts = Board(tmp_path).state({0: 0})["charts"][0]["charts"]
    traces = {one["name"]: one for one in charts["largest eigenvalues"]["figure"]["data"]}
    assert traces["2 / learning rate"]["y"] == [4, 4, 4]
    (heat,) = charts["Spectrum over time"]["figure"]["data"]
    assert (heat["type"], heat["x"]) == ("heatmap", [1, 2, 3])
    for place in range(3):
        column = [line[place] or 0.0 for line in heat["customdata"]]
        assert sum(column) == pytest.approx(1)
        assert heat["y"][max(i for i, mass in enumerate(column) if mass)] == pytest.approx(
            place + 1, abs=3.1 / 60
        )


def test_a_real_run_is_followed(tmp_path):
    model = lh.models.mlp([4, 5, 3], seed=0)
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    problem = lh.Problem(model, "cross_entropy", (x, x[:, :3].argmax(1)))
    board, seen = Board(tmp_path), []

    class Looks:
        name, every, unit = "looks", 1, "epoch"

        def measure(self, problem, optimizer=None, epoch=0, step=0):
            seen.append(board.state({0: 0})["sources"])
            return {"looks": 1.0}

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trackers = [Looks(), lh.training.make_tracker("norms")]
    lh.training.fit(problem, optimizer, 3, batch_size=8, trackers=trackers, folder=tmp_path / "run")
    assert [[source["rows"] for source in sources] for sources in seen] == [[0], [1], [2]]
    assert seen[2][0]["state"] == "running"
    assert seen[2][0]["tasks"][0]["total"] == 9
    (last,) = board.state({0: 0})["sources"]
    assert (last["rows"], last["state"]) == (3, "finished")
    assert "loss" in [fact["label"] for fact in last["facts"]]


def test_a_measurement_is_followed(tmp_path, monkeypatch):
    from lambdahat import _measure

    x = torch.eye(3)
    problem = lh.Problem(torch.nn.Linear(3, 1, bias=False), "mse", (x, x[:, :1]))
    board, seen, known = Board(tmp_path), [], dict(_measure.QUANTITIES)

    def looking(name):
        def measured(*arguments):
            seen.append(board.state({0: 0})["sources"])
            return known[name](*arguments)

        return measured

    for name in ("trace", "spectrum"):
        monkeypatch.setitem(_measure.QUANTITIES, name, looking(name))
    lh.measure(problem, ("trace", "spectrum"), depth=3, folder=tmp_path / "found")
    facts = [{one["label"]: one for one in sources[0]["facts"]} for sources in seen]
    assert [one["trace"]["status"] for one in facts] == ["measuring", "CONVERGED"]
    assert [one["spectrum"]["status"] for one in facts] == ["waiting", "measuring"]
    found = board.state({0: 0})
    (source,) = found["sources"]
    assert (source["kind"], source["state"]) == ("measurement", "finished")
    assert len(found["charts"][0]["charts"]) >= 1


def test_a_sweep_is_followed_cell_by_cell(tmp_path):
    store = Store(tmp_path, "unknown-one", "cpu")
    cells = [{"seed": seed, "rate": 0.1} for seed in range(3)]
    store.open(cells)
    board = Board(tmp_path)

    def facts():
        (source,) = board.state({0: 0})["sources"]
        assert source["fault"] == ""
        return {one["label"]: (one["value"], one["status"]) for one in source["facts"]}

    assert facts() == {"cells": ("0 of 3", "")}
    store.add(cells[0], [{"loss": 1.0}], 2.5)
    store.fail(cells[1], "Traceback\nValueError: no")
    assert facts() == {"cells": ("1 of 3", ""), "seed=0": ("2.5 s", ""), "seed=1": ("", "raised")}
    store.fail(cells[2], "Traceback\nValueError: no")
    assert facts()["2 cells"] == ("", "raised")
    with ProgressFile(store.path.with_suffix(".progress.json"), kind="sweep"):
        pass
    assert board.state({})["sources"][0]["state"] == "incomplete"
    store.add(cells[1], [{"loss": 1.0}], 1.0)
    store.add(cells[2], [{"loss": 1.0}], 1.0)
    found = board.state({0: 0})
    assert found["sources"][0]["state"] == "finished"
    assert found["charts"][0]["charts"]["cells"]["figure"]["data"][-1]["y"] == [1, 2, 3]


def test_a_damaged_part_is_told_and_the_rest_shown(tmp_path):
    (tmp_path / "bad-cpu.sqlite").write_bytes(b"no database at all")
    metrics(tmp_path / "run")
    bad, good = Board(tmp_path).state({0: 0, 1: 0})["sources"]
    assert "bad-cpu.sqlite" in bad["fault"]
    assert (good["rows"], good["fault"]) == (3, "")


def test_links_are_not_followed_and_checkpoints_not_searched(tmp_path):
    metrics(tmp_path / "outside")
    inside = tmp_path / "inside"
    inside.mkdir()
    os.symlink(tmp_path / "outside", inside / "link")
    metrics(inside / "checkpoints" / "run")
    assert Board(inside).state({})["sources"] == []
