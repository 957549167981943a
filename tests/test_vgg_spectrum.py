"""The page on bulks says what the stored spectra of VGG-16 hold, and the few products of a batch
are told from many.
"""

import importlib
import json
import sys

import numpy as np
import pytest

import lambdahat as lh
from lambdahat.randommatrix import fit_bulk
from tests.documents import DOCS, ROOT

STORED = json.loads(
    (ROOT / "benchmarks" / "results" / "vgg16-spectrum.json").read_text(encoding="utf-8")
)
NAMES = {"hessian": "Hessian", "ggn": "Gauss–Newton"}


@pytest.fixture
def lanczos_steps(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    return importlib.import_module("lanczos_steps")


@pytest.mark.parametrize("row", STORED, ids=lambda row: f"{row['epoch']}-{row['operator']}")
def test_the_table_is_that_of_the_stored_spectra(row):
    found = lh.Spectrum(
        *(np.array([row[name]]) for name in ("nodes", "weights", "residuals")), row["dim"]
    )
    fit = fit_bulk(found)
    edge = float(fit.upper)
    above = sum(float(outlier) > edge for outlier in fit.outliers)
    line = (
        f"| {row['epoch']} | {NAMES[row['operator']]} | {found.nodes.max():.3g} | {edge:.3g} ±"
        f" {fit.upper.stderr:.2g} | {above} | {fit.weight_edges[1]:.2g} | `{fit.status.name}` |"
    )
    assert line in (DOCS / "shrinkage.md").read_text(encoding="utf-8")
    assert found.weights.sum() == pytest.approx(1.0, abs=1e-4)


def test_few_products_of_a_spectrum_are_those_of_a_shorter_run(lanczos_steps):
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((60, 60))
    matrix = (matrix + matrix.T) / 2
    whole, short = (lh.spectrum(lh.operator(matrix), depth=depth, seed=0) for depth in (20, 6))
    largest, cosine, smallest = lanczos_steps.few_over_many(whole, 6)
    assert largest == pytest.approx(short.nodes.max() / whole.nodes.max(), rel=1e-6)
    assert smallest == pytest.approx(short.nodes.min() / whole.nodes.min(), rel=1e-6)
    assert 0 < cosine < 1
