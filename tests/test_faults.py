"""A sample of every kind of fault of benchmarks/faults.py: nothing is lost."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "faults.py"
spec = importlib.util.spec_from_file_location("faults", SCRIPT)
faults = importlib.util.module_from_spec(spec)
sys.modules["faults"] = faults
spec.loader.exec_module(faults)


@pytest.mark.parametrize("name", faults.KINDS)
def test_nothing_is_lost(name, tmp_path):
    kind = faults.KINDS[name]
    tried, survived, lost, notes = kind.run(kind.sample, tmp_path)
    assert (lost, survived) == (0, tried), notes
    assert tried >= min(kind.sample, 5)


def test_a_change_that_no_digest_shows_is_counted_as_lost(tmp_path, monkeypatch):
    monkeypatch.setattr("lambdahat.storage._digest_of", lambda document: "0" * 32)
    monkeypatch.setattr("lambdahat.storage.digest", lambda data: "0" * 64)
    _, _, lost, notes = faults.flips(46, tmp_path)
    assert lost > 0
    assert any("read as something else without a word" in note for note in notes)
