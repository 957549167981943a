"""The matrices of a graph against networkx's, and the convention for isolated nodes."""

import networkx as nx
import numpy as np
import pytest
import scipy.sparse
import torch

from lambdahat.graphs import Graph, graph
from tests.graphs.made import cliques
from tests.operators.contract import OperatorContract

WEIGHTED = nx.gnm_random_graph(30, 70, seed=1)
for u, v in WEIGHTED.edges:
    WEIGHTED[u][v]["weight"] = 1.0 + ((u * v) % 5)
WEIGHTED.add_node(30)
ORDER = sorted(WEIGHTED)


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("name", "oracle"),
    [
        ("adjacency_operator", nx.to_numpy_array),
        ("laplacian", lambda g: nx.laplacian_matrix(g).toarray()),
        ("normalized_laplacian", lambda g: nx.normalized_laplacian_matrix(g).toarray()),
    ],
)
def test_matrices_are_those_of_networkx(name, oracle):
    found = getattr(graph(WEIGHTED), name)()
    assert found.symmetric
    assert torch.allclose(
        found.dense(), torch.as_tensor(oracle(WEIGHTED), dtype=torch.float64), atol=1e-12
    )


@pytest.mark.parametrize("loops", ["drop", "keep"])
def test_the_normalised_laplacian_lies_in_0_to_2(loops):
    made = WEIGHTED.copy()
    made.add_edge(3, 3, weight=2.0)
    values = torch.linalg.eigvalsh(graph(made, loops=loops).normalized_laplacian().dense())
    assert float(values[0]) == pytest.approx(0.0, abs=1e-12)
    assert float(values[-1]) <= 2.0


def test_an_isolated_node_is_a_component_of_eigenvalue_0():
    one = cliques([4, 1, 3, 1])
    values = torch.linalg.eigvalsh(one.normalized_laplacian().dense())
    assert int((values.abs() < 1e-12).sum()) == 4 == int(one.components.max()) + 1
    kept = torch.linalg.eigvalsh(one.without_isolated().normalized_laplacian().dense())
    assert int((kept.abs() < 1e-12).sum()) == 2


def test_degrees_edges_and_repr():
    one = graph(np.array([[0.0, 2.0, 0.0], [2.0, 0.0, 3.0], [0.0, 3.0, 4.0]]), loops="keep")
    assert one.num_edges == 3
    assert np.array_equal(one.degrees, [2.0, 5.0, 7.0])
    assert repr(cliques([3, 3])) == "Graph(6 nodes, 6 edges)"


MATRICES = {
    "asymmetric": ([[0, 1], [0, 0]], ValueError, 'adjacency must be symmetric, .*directed="max"'),
    "nearly symmetric": (
        [[0, 1, 1], [1, 0, 1], [1, 1 + 1e-6, 0]],
        ValueError,
        "adjacency must be symmetric",
    ),
    "negative": ([[0, -1], [-1, 0]], ValueError, "the weights must be at least 0, got -1"),
    "NaN": ([[0, np.nan], [np.nan, 0]], ValueError, "the weights must be finite, got nan"),
    "no matrix": (
        nx.path_graph(3),
        ValueError,
        r"adjacency must be square, got shape .*graphs\.graph\(source\) reads networkx graphs",
    ),
    "not square": (np.ones((2, 3)), ValueError, r"adjacency must be square, got shape \(2, 3\)"),
}


@pytest.mark.parametrize(("matrix", "error", "message"), MATRICES.values(), ids=MATRICES.keys())
def test_a_matrix_of_no_graph_is_refused(matrix, error, message):
    with pytest.raises(error, match=message):
        Graph.of(matrix)
    with pytest.raises(error, match=message):
        Graph(scipy.sparse.csr_array(np.array(matrix, dtype=np.float64)))


def test_one_direction_missing_is_found_beside_a_hub():
    """One edge of 20,000 from a node of degree 20,000, in single precision."""
    star = nx.to_scipy_sparse_array(nx.star_graph(20_000), dtype=np.float32, format="csr")
    assert len(Graph(star)) == 20_001
    star.data[7] = 0.0
    with pytest.raises(ValueError, match="adjacency must be symmetric"):
        Graph(star)


@pytest.mark.parametrize(
    "matrix", [np.eye(3), scipy.sparse.eye_array(3, dtype=np.int8, format="csr"), [[0, 1]]]
)
def test_what_is_no_sparse_matrix_of_floats_is_refused(matrix):
    with pytest.raises(
        TypeError,
        match=r"adjacency must be a csr_array of floats, .*Graph.of\(matrix\) makes it one",
    ):
        Graph(matrix)


def test_of_leaves_the_matrix_alone_and_stored_zeros_out():
    matrix = scipy.sparse.csr_array(
        ([1.0, 1.0, 0.0, 0.0], ([0, 1, 1, 2], [1, 0, 2, 1])), shape=(3, 3)
    )
    assert repr(Graph.of(matrix)) == "Graph(3 nodes, 1 edge, 1 isolated)"
    assert matrix.nnz == 4


def test_graphs_compare_and_hash_as_objects():
    one, other = graph([(0, 1)]), graph([(0, 1)])
    assert one == one
    assert one != other
    assert len({one, other, one}) == 2


class TestNormalizedLaplacian(OperatorContract):
    """The contract of every operator."""

    @pytest.fixture
    def operator(self):
        return graph(WEIGHTED).normalized_laplacian()

    @pytest.fixture
    def dense(self):
        return torch.as_tensor(nx.normalized_laplacian_matrix(WEIGHTED).toarray())
