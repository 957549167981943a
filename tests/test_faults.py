"""A sample of every kind of fault of benchmarks/faults.py: nothing is lost."""

import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from lambdahat.data.image_files import unpickle

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "faults.py"
spec = importlib.util.spec_from_file_location("faults", SCRIPT)
faults = importlib.util.module_from_spec(spec)
sys.modules["faults"] = faults
spec.loader.exec_module(faults)


SLOW = (
    "bombs",
    "full disks",
    "full disks under commands",
    "pages of many results",
    "leaks",
    "workers and threads",
    "memory budgets",
    "dead ranks",
    "killed sweeps",  # test_kills_lose_nothing in experiments/test_sweeps.py kills more of them
)  # many processes, or many results


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in faults.KINDS],
)
def test_nothing_is_lost(name, tmp_path):
    kind = faults.KINDS[name]
    tried, survived, lost, notes = kind.run(kind.sample, tmp_path)
    assert (lost, survived) == (0, tried), notes
    assert tried >= min(kind.sample, 5) or notes == ["this machine lets nobody make a small disk"]


def test_a_change_that_no_digest_shows_is_counted_as_lost(tmp_path, monkeypatch):
    monkeypatch.setattr("lambdahat._core.storage._digest_of", lambda document: "0" * 32)
    monkeypatch.setattr("lambdahat._core.storage.digest", lambda data: "0" * 64)
    _, _, lost, notes = faults.flips(46, tmp_path)
    assert lost > 0
    assert any("read as something else without a word" in note for note in notes)


@pytest.mark.parametrize("number", range(len(faults.good_pickles())))
def test_good_pickles_are_read_as_python_reads_them(tmp_path, number):
    data = faults.good_pickles()[number]
    (tmp_path / "batch").write_bytes(data)
    expected = {
        k.decode() if isinstance(k, bytes) else k: value for k, value in pickle.loads(data).items()
    }
    found = unpickle(tmp_path / "batch")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(found[name], value)
        assert type(found[name]) is type(value)


def test_a_process_that_dies_is_counted_as_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(
        faults,
        "CHILD",
        "import os, sys; open(sys.argv[5] + '/now', 'w').write('4 four'); os.abort()",
    )
    tried, survived, lost, notes = faults.pickles(5, tmp_path)
    assert (tried, survived, lost) == (5, 4, 1)
    assert "ended with -6" in notes[1]


DRIVER = """
import os, subprocess, sys, time
from lambdahat.experiments.kit.sweeps import ending_descendants
with ending_descendants():
    inner = "import subprocess, time; subprocess.Popen(['sleep', '600'], start_new_session=True)"
    inner += "; print('started', flush=True); time.sleep(600)"
    started = subprocess.Popen(
        [sys.executable, "-c", inner], start_new_session=True, stdout=subprocess.PIPE
    )
    started.stdout.readline()
    time.sleep(2)  # until the process that watches has seen them
    print("ready", flush=True)
    time.sleep(float(sys.argv[1]))
"""


@pytest.mark.skipif(not os.path.isfile("/proc/self/stat"), reason="needs /proc")
@pytest.mark.parametrize("killed", [True, False])
def test_descendants_end_with_a_driver_that_is_killed(killed):
    """As ray's agents do: in sessions of their own, started by a process that is started for us."""
    command = [sys.executable, "-c", DRIVER, "600" if killed else "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as driver:
        driver.stdout.readline()
        family = set(faults.descendants(driver.pid))
        assert len(family) == 3  # both, and the one that watches
        if killed:
            driver.kill()
    deadline = time.monotonic() + 5
    while (
        len(left := family & set(faults.running())) > (0 if killed else 2)
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert len(left) == (0 if killed else 2)
