"""What one more edge does to the spectrum of the normalised Laplacian (Theorem 3, Corollary 3.1, spectral thesis)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lambdahat._check import require, require_count
from lambdahat.graphs.spectra import require_graph
from lambdahat.graphs.structure import Graph
from lambdahat.results import Array
from lambdahat.storage import Result


@dataclass(frozen=True)
class EdgePerturbation(Result):
    """``bound``: no eigenvalue moves farther, by Weyl (Eq. 3.14). ``first_order``: Theorem 3's expression, Eq. 3.13."""

    bound: float
    first_order: float


def edge_perturbation(graph: Graph, first: int, second: int) -> EdgePerturbation:
    """How far the eigenvalues of L_norm can move when an edge of weight 1 between two nodes is added.

    ``bound`` is ‖L' − L‖₂, exact: the difference lives on the two nodes and their neighbours. ``first_order`` is
    |s_1/2d_1 + s_2/2d_2 − 2/√(d_1d_2)| with s_i = Σ_{g~i} 1/√(d_id_g), Eq. 3.13 with the factors 1/2d that its proof
    has and its print leaves out: only with them two clusters of degree d give the 1/d of Corollary 3.1. Its terms have
    different signs and may cancel, so that for very unequal degrees it is no bound.
    """
    require_graph(graph)
    for name, node in (("first", first), ("second", second)):
        require_count(node, name, 0, len(graph) - 1)
    adjacency, degrees = graph.adjacency, graph.degrees
    apart = first != second and adjacency[first, second] == 0
    require(apart, "second", "be another node, without an edge to first yet", str(second))
    alone = degrees[first] == 0 or degrees[second] == 0
    require(
        not alone, "first and second", "have an edge each", "an isolated node", "its eigenvalue 0 can become up to 2"
    )
    ends = (first, second)
    near = sorted({int(g) for node in ends for g in _neighbours(graph, node)} - set(ends))
    nodes = np.array([*ends, *near])
    local = adjacency[nodes][:, nodes].toarray().astype(np.float64)
    before = _scaled(local, degrees[nodes])
    local[0, 1] = local[1, 0] = 1.0
    raised = degrees[nodes].copy()
    raised[:2] += 1
    change = _scaled(local, raised) - before
    change[2:, 2:] = 0.0
    terms = [_share(graph, node) / (2 * degrees[node] ** 1.5) for node in ends]
    middle = 2 / np.sqrt(degrees[first] * degrees[second])
    return EdgePerturbation(float(np.linalg.norm(change, 2)), float(abs(sum(terms) - middle)))


def _neighbours(graph: Graph, node: int) -> Array:
    start, end = graph.adjacency.indptr[node : node + 2]
    return graph.adjacency.indices[start:end]  # type: ignore[no-any-return]


def _share(graph: Graph, node: int) -> float:
    """Σ_g w_g/√d_g over the neighbours of a node."""
    near = slice(*graph.adjacency.indptr[node : node + 2])
    weights = graph.adjacency.data[near].astype(np.float64)
    return float((weights / np.sqrt(graph.degrees[graph.adjacency.indices[near]])).sum())


def _scaled(local: Array, degrees: Array) -> Array:
    """D^{−1/2}WD^{−1/2} of a few nodes with the degrees they have in the whole graph."""
    scale = 1 / np.sqrt(degrees)
    return local * np.outer(scale, scale)
