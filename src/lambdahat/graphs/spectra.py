"""The entropic graph spectrum: the density of maximum entropy with the moments of the normalised
Laplacian.
"""

from __future__ import annotations

from dataclasses import dataclass

from lambdahat._core.check import require, require_count
from lambdahat._core.storage import Result, Status
from lambdahat.graphs.block_moments import (
    DEFAULT_PROBES,
    EXACT_NODES,
    Partition,
    components,
    eigenvalues,
    exact_moments,
    probed_moments,
)
from lambdahat.graphs.structure import Graph
from lambdahat.maxent import MaxentDensity, fit
from lambdahat.results import Moments

TOLERANCE = 1e-4


@dataclass(frozen=True)
class GraphSpectrum(Result):
    """The spectral ``density`` of a graph of ``nodes`` and ``edges`` on [0, 2], and the
    ``moments`` it came from.
    """

    density: MaxentDensity
    moments: Moments
    nodes: int
    edges: int
    name: str = "graph"

    @property
    def status(self) -> Status:
        """That of the density."""
        return self.density.status

    @property
    def cost(self) -> int:
        """Products with the normalised Laplacian."""
        return self.moments.cost


def spectrum(
    graph: Graph,
    moments: int = 100,
    probes: int | None = None,
    seed: int = 0,
    tol: float = TOLERANCE,
) -> GraphSpectrum:
    """The spectrum of the normalised Laplacian as a smooth density (Algorithm 4, spectral thesis).

    Its Chebyshev moments are exact for graphs of up to 1,000 nodes, by a dense decomposition, and
    come from 100 random ``probes`` beyond, ⌈moments/2⌉ products each; given ``probes`` are used for
    any graph. The density of maximum entropy matches them to ``tol``, or to a hundredth of their
    error if that is more. Atoms of the spectrum, such as that at 1 of a tree-like graph, become
    peaks of width π/moments in arccos(1 − λ), and their height depends on ``tol``: compare spectra
    of equal ``moments`` and ``tol`` only.
    """
    require_graph(graph)
    require_count(moments, "moments", least=2)
    found = graph_moments(graph, moments, probes, seed, components(graph))
    return GraphSpectrum(fit(found, tol=tol), found, len(graph), graph.num_edges, graph.name)


def graph_moments(
    graph: Graph, count: int, probes: int | None, seed: int, partition: Partition
) -> Moments:
    """Chebyshev moments as ``probes`` says: exact for small graphs where it is None."""
    if probes is None and len(graph) <= EXACT_NODES:
        return exact_moments(eigenvalues(graph), count)
    return probed_moments(
        graph, count, DEFAULT_PROBES if probes is None else probes, seed, partition
    )


def require_graph(graph: object) -> None:
    """Refuse what is no ``Graph``."""
    require(
        isinstance(graph, Graph),
        "graph",
        "be a lambdahat graph",
        graph,
        "make one with lh.graphs.graph(source)",
        TypeError,
    )
