"""What one more edge does to the spectrum of the normalised Laplacian (Theorem 3, Corollary 3.1,
spectral thesis).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lambdahat._core.check import require, require_count
from lambdahat._core.storage import Result
from lambdahat.graphs.spectra import require_graph
from lambdahat.graphs.structure import Graph
from lambdahat.results import Array


@dataclass(frozen=True)
class EdgePerturbation(Result):
    """``bound``: no eigenvalue moves farther, by Weyl (Eq. 3.14). ``first_order``: Theorem 3's
    expression, Eq. 3.13.
    """

    bound: float
    first_order: float


def edge_perturbation(graph: Graph, first: int, second: int) -> EdgePerturbation:
    """How far the eigenvalues of L_norm can move when an edge of weight 1 between two nodes is
    added.

    ``bound`` is ‖L' − L‖₂, exact, in time and memory linear in the two nodes' neighbours.
    ``first_order`` is |s_1/2d_1 + s_2/2d_2 − 2/√(d_1d_2)| with s_i = Σ_{g~i} 1/√(d_id_g), Eq. 3.13
    with the factors 1/2d that its proof has and its print leaves out: only with them two clusters
    of degree d give the 1/d of Corollary 3.1. Its terms have different signs and may cancel, so
    that for very unequal degrees it is no bound.
    """
    require_graph(graph)
    for name, node in (("first", first), ("second", second)):
        require_count(node, name, 0, len(graph) - 1)
    degrees = graph.degrees
    apart = first != second and graph.adjacency[first, second] == 0
    require(apart, "second", "be another node, without an edge to first yet", str(second))
    alone = degrees[first] == 0 or degrees[second] == 0
    require(
        not alone,
        "first and second",
        "have an edge each",
        "an isolated node",
        "its eigenvalue 0 can become up to 2",
    )
    terms = [_share(graph, node) / (2 * degrees[node] ** 1.5) for node in (first, second)]
    middle = 2 / np.sqrt(degrees[first] * degrees[second])
    return EdgePerturbation(_norm_of_change(graph, first, second), float(abs(sum(terms) - middle)))


def _norm_of_change(graph: Graph, first: int, second: int) -> float:
    """‖L' − L‖₂, where L' − L = −Σ_i (e_i c_iᵀ + c_i e_iᵀ) over the two nodes has rank 4 at most.

    c_i is what the new edge makes of row i of D^{−1/2}WD^{−1/2}, its diagonal halved, the new entry
    in c_1 only. With (e_1 e_2 c_1 c_2) = QR on the nodes that these touch, the norm is that of R(0
    I; I 0)Rᵀ, 4 × 4.
    """
    nodes = np.unique(
        np.concatenate([[first, second], *(_row(graph, node)[0] for node in (first, second))])
    )
    columns = np.zeros((len(nodes), 4))
    for i, node in enumerate((first, second)):
        near, weights = _row(graph, node)
        degree = graph.degrees[near]
        raised = degree + np.isin(near, (first, second))  # a loop
        before, after = graph.degrees[node], graph.degrees[node] + 1
        change = weights / np.sqrt(after * raised) - weights / np.sqrt(before * degree)
        columns[np.searchsorted(nodes, node), i] = 1.0
        columns[np.searchsorted(nodes, near), 2 + i] = np.where(near == node, change / 2, change)
    columns[np.searchsorted(nodes, second), 2] = 1 / np.sqrt(
        (graph.degrees[[first, second]] + 1).prod()
    )
    factor = np.asarray(np.linalg.qr(columns, mode="r"))
    swap = np.roll(np.eye(4), 2, axis=0)
    return float(np.abs(np.linalg.eigvalsh(factor @ swap @ factor.T)).max())


def _row(graph: Graph, node: int) -> tuple[Any, Array]:
    """The neighbours of a node and the weights of its edges."""
    part = slice(*graph.adjacency.indptr[node : node + 2])
    return graph.adjacency.indices[part], graph.adjacency.data[part].astype(np.float64)


def _share(graph: Graph, node: int) -> float:
    """Σ_g w_g/√d_g over the neighbours of a node."""
    near, weights = _row(graph, node)
    return float((weights / np.sqrt(graph.degrees[near])).sum())
