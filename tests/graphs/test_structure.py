"""The matrices of a graph against networkx's, and the convention for isolated nodes."""

import networkx as nx
import numpy as np
import pytest
import torch

from lambdahat.graphs import graph
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
    assert torch.allclose(found.dense(), torch.as_tensor(oracle(WEIGHTED), dtype=torch.float64), atol=1e-12)


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
    one = graph([[0.0, 2.0, 0.0], [2.0, 0.0, 3.0], [0.0, 3.0, 4.0]], loops="keep")
    assert one.num_edges == 3
    assert np.array_equal(one.degrees, [2.0, 5.0, 7.0])
    assert repr(cliques([3, 3])) == "Graph(6 nodes, 6 edges)"


class TestNormalizedLaplacian(OperatorContract):
    """The contract of every operator."""

    @pytest.fixture
    def operator(self):
        return graph(WEIGHTED).normalized_laplacian()

    @pytest.fixture
    def dense(self):
        return torch.as_tensor(nx.normalized_laplacian_matrix(WEIGHTED).toarray())
