"""Chebyshev moments of the normalised Laplacian: exact ones in closed form, probed ones within
their errors.
"""

import tracemalloc

import networkx as nx
import numpy as np
import pytest
import scipy.sparse
import torch

from lambdahat.graphs import graph, spectra
from lambdahat.graphs.spectra import (
    Partition,
    components,
    eigenvalues,
    exact_moments,
    probed_moments,
    walk_partition,
)
from lambdahat.graphs.structure import csr_tensor
from tests.graphs.made import cliques, planted


def chebyshev(values, count):
    return np.polynomial.chebyshev.chebvander(np.asarray(values) - 1.0, count)


def clique_moments(sizes, count):
    """A complete graph of s nodes has eigenvalue 0 once and s/(s − 1) otherwise."""
    values = [v for s in sizes for v in [0.0] + [s / (s - 1) if s > 1 else 0.0] * (s - 1)]
    return chebyshev(values, count).mean(axis=0)


def test_exact_moments_of_complete_graphs():
    found = exact_moments(eigenvalues(cliques([5, 8, 3])), 20)
    assert np.allclose(found.values, clique_moments([5, 8, 3], 20), atol=1e-12)
    assert not found.stderr.any()
    assert found.bounds == (0.0, 2.0)


def test_cliques_of_one_size_have_moments_without_error():
    """Outside the null space, which is taken out exactly, there is one eigenvalue only: every
    probe agrees.
    """
    found = probed_moments(cliques([6] * 4), 21, 8, 0, components(cliques([6] * 4)))
    assert np.allclose(found.values, clique_moments([6] * 4, 21), atol=1e-10)
    assert float(found.stderr.max()) < 1e-10
    assert found.cost == 8 * 11


@pytest.mark.parametrize("count", [2, 3, 40, 41])
def test_probed_moments_agree_within_their_errors(count):
    one = planted(6, outside=1.0)
    exact, found = (
        exact_moments(eigenvalues(one), count),
        probed_moments(one, count, 200, 1, components(one)),
    )
    assert found.values.shape == (count + 1,)
    off = (found.values - exact.values)[1:] / found.stderr[1:]
    assert float(np.abs(off).max()) < 4.5
    assert found.values[0] == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("kind", ["walk", "random", "one group"])
def test_any_partition_gives_unbiased_moments(kind):
    one = planted(6, outside=1.0)
    n = len(one)
    labels = {"random": np.random.default_rng(0).permutation(n) % 7, "one group": np.zeros(n, int)}
    partition = (
        walk_partition(one, 0)
        if kind == "walk"
        else Partition(labels[kind].astype(np.int32), False)
    )
    exact = exact_moments(eigenvalues(one), 30)
    found = [probed_moments(one, 30, 80, seed, partition) for seed in range(12)]
    mean = np.mean([m.values for m in found], axis=0)
    error = np.sqrt(np.mean([m.stderr**2 for m in found], axis=0) / len(found))
    assert float(np.abs((mean - exact.values)[1:] / error[1:]).max()) < 4.5


def test_a_walk_finds_the_clusters_and_takes_most_of_the_error_away():
    one = planted(40, outside=0.1)
    guess = walk_partition(one, 0)
    assert 36 <= guess.count <= 44
    wide, narrow = (probed_moments(one, 60, 100, 0, p) for p in (components(one), guess))
    low = np.polynomial.chebyshev.chebfit(
        np.linspace(-1, 1, 400), np.linspace(-1, 1, 400) < -0.9, 60
    )
    spreads = [float(np.sqrt(low @ m.covariance @ low)) for m in (wide, narrow)]
    assert spreads[1] < spreads[0] / 4


def test_a_walk_that_cuts_nothing_leaves_the_components():
    one = cliques([6, 7, 1])
    guess = walk_partition(one, 0)
    assert guess.exact
    assert guess.count == 3


def test_a_walk_compares_the_ends_of_some_edges_at_a_time(monkeypatch):
    """The places of all ends of 400,000 edges at once would be 77 MB."""
    one, few = graph(nx.gnm_random_graph(4000, 200_000, seed=0)), planted(12, outside=0.5)
    whole = walk_partition(few, 0).labels
    monkeypatch.setattr(spectra, "EDGES", 4096)
    assert np.array_equal(walk_partition(few, 0).labels, whole)
    tracemalloc.start()
    walk_partition(one, 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 15e6


def test_single_precision_is_as_good_as_double(monkeypatch):
    one = planted(8)
    double = probed_moments(one, 60, 16, 0, components(one))
    monkeypatch.setattr(spectra, "SINGLE_NODES", 1)
    single = probed_moments(one, 60, 16, 0, components(one))
    assert single.values.dtype == np.float64
    assert float(np.abs(single.values - double.values).max()) < 6 * float(double.stderr.max())


def test_the_recurrence_itself_in_single_precision():
    """The same probe in both precisions: rounding grows no faster than the order."""
    one = planted(8)
    start = torch.randn(
        len(one), 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    rows = {}
    for dtype, kind in ((torch.float64, np.float64), (torch.float32, np.float32)):
        matrix = csr_tensor(one.normalized(kind), dtype)
        found = spectra._paired_moments(matrix, start.to(dtype, copy=True), 100)
        rows[dtype] = found / found[:, :1]
    off = (rows[torch.float32] - rows[torch.float64]).abs()
    assert float(off.max()) < 2e-5


def test_long_sums_in_single_precision():
    """On B = I every moment is zᵀz: 300,000 squares added one after the other would be off by
    some 1e-4.
    """
    start = torch.randn(300_000, 3, generator=torch.Generator().manual_seed(0))
    exact = start.double().square().sum(0)
    matrix = csr_tensor(
        scipy.sparse.eye_array(len(start), format="csr", dtype=np.float32), torch.float32
    )
    found = spectra._paired_moments(matrix, start, 5)
    assert found.shape == (3, 6)
    assert found.dtype == torch.float64
    assert float((found / exact[:, None] - 1).abs().max()) < 1e-6


def test_the_width_of_a_block_changes_no_draw(monkeypatch):
    one = planted(8)
    wide = probed_moments(one, 40, 40, 3, components(one))
    monkeypatch.setattr(spectra, "ELEMENTS", 1)
    narrow = probed_moments(one, 40, 40, 3, components(one))
    assert np.allclose(wide.values, narrow.values, atol=1e-13)
    assert np.allclose(wide.stderr, narrow.stderr, atol=1e-13)


def test_progress_is_reported(monkeypatch):
    from lambdahat import progress

    monkeypatch.setattr(spectra, "ELEMENTS", 1)
    seen = []
    with progress(lambda *report: seen.append(report)):
        probed_moments(cliques([5, 5]), 4, 20, 0, components(cliques([5, 5])))
    assert seen == [("moments", 16, 20), ("moments", 20, 20)]
