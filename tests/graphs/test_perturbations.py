"""What one edge does to a spectrum: the bound holds, and Corollary 3.1 with it."""

import tracemalloc

import networkx as nx
import numpy as np
import pytest

from lambdahat.graphs import edge_perturbation, graph
from lambdahat.graphs.spectra import eigenvalues


def moved(made, edge):
    """How far each eigenvalue moves when the edge is added, and its predictions."""
    before = eigenvalues(graph(made))
    found = edge_perturbation(graph(made), *edge)
    after = made.copy()
    after.add_edge(*edge)
    return np.abs(eigenvalues(graph(after)) - before), found, graph(after)


@pytest.mark.parametrize("seed", range(8))
def test_no_eigenvalue_moves_beyond_the_bound(seed):
    made = nx.disjoint_union(
        nx.gnp_random_graph(12, 0.5, seed=seed), nx.barabasi_albert_graph(15, 2, seed=seed)
    )
    shifts, found, after = moved(made, (3, 14))
    assert shifts.max() <= found.bound + 1e-12
    before = graph(made).normalized().toarray()
    exact = np.linalg.norm(after.normalized().toarray() - before, 2)
    assert found.bound == pytest.approx(exact, abs=1e-12)


@pytest.mark.parametrize("degree", [4, 10, 30])
def test_corollary_for_clusters_of_one_degree(degree):
    clusters = [nx.random_regular_graph(degree, 2 * degree, seed=seed) for seed in range(2)]
    shifts, found, _ = moved(nx.disjoint_union_all(clusters), (0, 2 * degree))
    assert found.first_order == pytest.approx(1 / degree, rel=1e-12)  # Corollary 3.1
    assert shifts[1] <= 1 / degree  # the second zero eigenvalue
    assert shifts.max() <= found.bound <= 1 / degree


def test_several_edges_scale_as_their_number():
    degree, extra = 12, 5
    made = nx.disjoint_union(*[nx.random_regular_graph(degree, 40, seed=seed) for seed in range(2)])
    before = eigenvalues(graph(made))
    made.add_edges_from((i, 40 + i) for i in range(extra))
    assert np.abs(eigenvalues(graph(made)) - before)[1] <= extra / degree


def test_the_first_order_expression_is_no_bound_for_unequal_degrees():
    """Its terms cancel between a pair of nodes and the hub of a star: an eigenvalue moves
    farther than it says.
    """
    made = nx.disjoint_union(nx.path_graph(2), nx.star_graph(16))
    shifts, found, _ = moved(made, (0, 2))
    assert found.first_order < shifts.max() <= found.bound


def test_weights_count():
    made = nx.disjoint_union(nx.cycle_graph(5), nx.cycle_graph(6))
    for u, v in made.edges:
        made[u][v]["weight"] = 2.0 + (u % 3)
    before, found = graph(made).normalized().toarray(), edge_perturbation(graph(made), 1, 7)
    made.add_edge(1, 7, weight=1.0)
    assert found.bound == pytest.approx(
        np.linalg.norm(graph(made).normalized().toarray() - before, 2), abs=1e-12
    )


@pytest.mark.parametrize("pair", [(0, 8), (3, 9)])
def test_loops_and_shared_neighbours_count(pair):
    made = nx.wheel_graph(8)
    made.add_edges_from([(8, 9), (8, 3), (3, 3), (8, 8)], weight=1.5)
    one = graph(made, loops="keep")
    before, found = one.normalized().toarray(), edge_perturbation(one, *pair)
    made.add_edge(*pair)
    exact = np.linalg.norm(graph(made, loops="keep").normalized().toarray() - before, 2)
    assert found.bound == pytest.approx(exact, abs=1e-12)


def test_memory_is_linear_in_the_degrees():
    """Two stars of 3,000 leaves: a matrix of the nodes that change would have 36 million
    entries, 288 MB.
    """
    stars = graph(nx.disjoint_union(nx.star_graph(3000), nx.star_graph(3000)))
    tracemalloc.start()
    found = edge_perturbation(stars, 0, 3001)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5e6
    assert 0 < found.bound < 0.01
