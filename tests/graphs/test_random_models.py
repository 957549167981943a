"""Parameters of random graphs found again, and the model that made a graph."""

import networkx as nx
import numpy as np
import pytest

from lambdahat.graphs import fit_model, graph, random_models, which_model
from lambdahat.graphs.random_models import Model, _search, _search_whole
from lambdahat.maxent import fit


@pytest.mark.parametrize(
    ("model", "made", "truth"),
    [
        ("erdos_renyi", nx.gnp_random_graph(60, 0.6, seed=2), 0.6),
        ("watts_strogatz", nx.watts_strogatz_graph(60, 8, 0.4, seed=2), 0.4),
        ("barabasi_albert", nx.barabasi_albert_graph(60, 24, seed=2), 24),
    ],
)
def test_parameters_are_recovered(model, made, truth):
    found = fit_model(graph(made), model, moments=20, draws=6)
    assert 0 < found.stderr < 0.2 * truth
    assert abs(float(found) - truth) < 3.5 * found.stderr
    assert found.divergence < 0.2
    assert (found.model, found.size) == (model, 60)
    assert found.neighbours == (8 if model == "watts_strogatz" else 0)


@pytest.mark.parametrize("rewired", [0, 1])
def test_the_error_does_not_collapse_at_the_end_of_the_range(rewired):
    """Of 240 edges none or one was rewired: p is known to about 1/240, whatever the bootstrap's
    own graphs show.
    """
    made = nx.watts_strogatz_graph(60, 8, 0.0)
    if rewired:
        made.remove_edge(0, 1)
        made.add_edge(0, 30)
    found = fit_model(graph(made), "watts_strogatz", moments=20, draws=4)
    assert float(found) < 0.012
    assert 0.5 / 240 < found.stderr < 5 / 240


def test_the_error_is_never_0():
    """Complete graphs and trees of one leaf each: every graph of the bootstrap is the same, at
    the end of the range.
    """
    for made, model in (
        (nx.complete_graph(30), "erdos_renyi"),
        (nx.star_graph(20), "barabasi_albert"),
    ):
        assert fit_model(graph(made), model, moments=10, draws=2).stderr > 0


def test_spectra_of_one_fit_share_a_penalty(monkeypatch):
    seen = []

    def fitted(*args, **options):
        density = fit(*args, **options)
        seen.append(density.penalty)
        return density

    monkeypatch.setattr(random_models, "fit", fitted)
    fit_model(graph(nx.barabasi_albert_graph(60, 2, seed=2)), "watts_strogatz", moments=12, draws=2)
    assert len(set(seen[1:])) == 1  # the first fit finds it


def test_a_sparse_graph_is_compared_with_all_models():
    found = which_model(graph(nx.gnm_random_graph(100, 40, seed=0)), moments=8, draws=2, size=30)
    assert {one.model for one in found.fits} == {"erdos_renyi", "watts_strogatz", "barabasi_albert"}


@pytest.mark.slow
def test_the_spread_is_that_of_repetition():
    made = [graph(nx.gnp_random_graph(40, 0.5, seed=seed)) for seed in range(10)]
    fits = [
        fit_model(one, "erdos_renyi", moments=10, draws=6, seed=seed)
        for seed, one in enumerate(made)
    ]
    seen = np.std([float(f) for f in fits], ddof=1)
    assert 0.5 < seen / np.mean([f.stderr for f in fits]) < 2.0


@pytest.mark.parametrize(
    ("made", "best"),
    [
        (nx.barabasi_albert_graph(400, 2, seed=0), "barabasi_albert"),
        (nx.watts_strogatz_graph(400, 8, 0.1, seed=0), "watts_strogatz"),
        (nx.gnp_random_graph(400, 0.01, seed=0), "erdos_renyi"),
    ],
)
def test_a_graph_is_known_by_its_spectrum(made, best):
    found = which_model(graph(made), moments=16, draws=2, size=100)
    assert found.best == best
    first, *others = found.fits
    assert all(other.divergence > 3 * first.divergence for other in others)
    assert first.divergence < 10 * first.typical
    assert [fit.divergence for fit in found.fits] == sorted(fit.divergence for fit in found.fits)


def test_searches_find_minima():
    assert _search(lambda p: (p - 0.3141) ** 2, 0.0, 1.0) == pytest.approx(0.3141, abs=1e-3)
    assert _search(lambda p: abs(np.log(p / 0.02)), 0.001, 1.0) == pytest.approx(0.02, rel=2e-2)
    for low, high, best in [(1, 300, 137), (1, 8, 1), (1, 49, 49), (1, 49, 20)]:
        assert _search_whole(lambda r, best=best: (r - best) ** 2, low, high) == best


def test_draws_are_reproducible_and_have_the_size_asked_for():
    model = Model("watts_strogatz", 30, 4)
    first, again, other = model.draw(0.3, 0), model.draw(0.3, 0), model.draw(0.3, 1)
    assert np.array_equal(first.adjacency.toarray(), again.adjacency.toarray())
    assert not np.array_equal(first.adjacency.toarray(), other.adjacency.toarray())
    assert len(first) == 30
    assert first.num_edges == 60
