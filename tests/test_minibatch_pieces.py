"""The mini-batch experiments in one piece (benchmarks/): what they save, and the page made of it."""

import importlib
import sys

import pytest

from lambdahat.experiments.experiment import Rows
from lambdahat.experiments.minibatch import eigen_experiment, lanczos
from lambdahat.experiments.store import Store
from tests.documents import DOCS, ROOT
from tests.experiments.minibatch_made import assert_same_rows

RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def script(monkeypatch):
    """A script of benchmarks/, which import each other by name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if "benchmarks" in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_a_saved_piece_has_the_rows_of_the_cells(script, tmp_path):
    pieces = script("minibatch_pieces")
    found = pieces.run_lanczos_opt("smoke", 0, None, "cpu")
    found.save(tmp_path / "found")
    loaded = pieces.Piece.load(tmp_path / "found")
    assert type(loaded).__name__ == "LanczosResult"
    assert loaded.rows() == lanczos.rows_at(lanczos.SCALES["smoke"], 0)
    assert loaded.verdicts == found.verdicts != ()


def test_the_page_of_rates_is_that_of_the_stored_results(script):
    stored = [script("minibatch_pieces").Piece.load(path) for path in sorted(RESULTS.glob("minibatch-rates-*.json"))]
    rates = script("minibatch_rates")
    page = (DOCS / "minibatch-rates.md").read_text(encoding="utf-8")
    shown = page.partition(rates.BEGIN)[2].partition(rates.END)[0]
    assert shown.strip() == rates.markdown(stored).strip()


@pytest.mark.slow
def test_what_was_measured_elsewhere_becomes_cells(script, tmp_path):
    pieces, kept = script("minibatch_pieces"), []
    pieces.measure_networks("smoke", 0, "cpu", {}, ["softmax"], kept.append)
    found = pieces.concluded(kept[-1:])
    assert script("minibatch_store").keep(found, tmp_path, "smoke", "a file") == 1
    rows = Store(tmp_path, "batch-eigenvalues", "smoke").rows()
    grid = eigen_experiment.EXPERIMENT.grid("smoke")
    assert_same_rows(rows, eigen_experiment.EXPERIMENT.run(grid[0], "cpu"), rel=1e-4)
    text = script("minibatch_eigenvalues").markdown(Rows(rows))
    assert "softmax: mean ± sd over batches" in text
