"""The mini-batch experiments in one piece (benchmarks/): what they save, and the page made of
it.
"""

import importlib
import re
import sys

import pytest
import torch

from lambdahat.experiments.kit.cells import Rows
from lambdahat.experiments.kit.store import Store
from lambdahat.experiments.minibatch import batch_eigenvalues, lanczos_opt
from lambdahat.problem import Problem
from lambdahat.randommatrix import advise
from tests.documents import DOCS, ROOT
from tests.experiments.minibatch.made import assert_same_rows

RESULTS = ROOT / "benchmarks" / "results"
ROWS = torch.arange(1.0, 21.0)[:, None]


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
    assert loaded.rows() == lanczos_opt.rows_at(lanczos_opt.SCALES["smoke"], 0)
    assert loaded.verdicts == found.verdicts != ()


@pytest.mark.documents
def test_the_page_of_rates_is_that_of_the_stored_results(script):
    stored = [
        script("minibatch_pieces").Piece.load(path)
        for path in sorted(RESULTS.glob("minibatch-rates-*.json"))
    ]
    rates = script("minibatch_rates")
    page = (DOCS / "minibatch-rates.md").read_text(encoding="utf-8")
    shown = page.partition(rates.BEGIN)[2].partition(rates.END)[0]
    assert shown.strip() == rates.markdown(stored).strip()


@pytest.mark.documents
def test_the_caution_about_damping_has_the_figures_of_the_stored_results(script):
    """What training needed at α = 1 over what the rule has by τ² and by Pσ², to the digits that
    the advice prints.
    """
    stored = script("minibatch_pieces").Piece.load(RESULTS / "minibatch-rates-damping.json")
    (rule,), needed = (
        stored.rules,
        {frontier.optimizer: frontier.centre() for frontier in stored.frontiers},
    )
    assert (rule.batch_sizes[0], rule.batch_sizes[3]) == (16, 1024)
    kfac, adam = (
        needed[optimizer] / rule.dampings(1.0, "directional") for optimizer in ("kfac", "adam")
    )
    isotropic = max(
        float((each / rule.dampings(1.0, "additive")).nan_to_num().max())
        for each in needed.values()
    )
    expected = [float(kfac[0]), float(kfac[3]), float(adam.min()), float(adam.max()), isotropic]
    words = (
        r"KFAC needed (\S+) \(B = 16\) to (\S+) \(B = 1,024\) of that by τ², and Adam (\S+) to"
        r" ([\d.]+), but up "
        r"to (\S+) times that by isotropic noise"
    )
    problem = Problem.from_function(
        lambda p, x: 0.5 * (x @ p["w"]).square().mean(), {"w": torch.ones(1)}, ROWS
    )
    for optimizer in ("lanczos-newton", "adam"):
        shown = re.search(words, advise(problem, optimizer, 4).cautions[0]).groups()
        digits = [len(text.replace(".", "").strip("0")) for text in shown]
        assert [float(text) for text in shown] == [
            float(f"{value:.{n}g}") for value, n in zip(expected, digits, strict=True)
        ]
    assert not any("damping" in each for each in advise(problem, "sgd", 4).cautions)


@pytest.mark.slow
def test_what_was_measured_elsewhere_becomes_cells(script, tmp_path):
    pieces, kept = script("minibatch_pieces"), []
    pieces.measure_networks("smoke", 0, "cpu", {}, ["softmax"], kept.append)
    found = pieces.concluded(kept[-1:])
    assert script("minibatch_store").keep(found, tmp_path, "smoke", "a file") == 1
    rows = Store(tmp_path, "batch-eigenvalues", "smoke").rows()
    grid = batch_eigenvalues.EXPERIMENT.grid("smoke")
    assert_same_rows(rows, batch_eigenvalues.EXPERIMENT.run(grid[0], "cpu"), rel=1e-4)
    text = script("minibatch_eigenvalues").markdown(Rows(rows))
    assert "softmax: mean ± sd over batches" in text
