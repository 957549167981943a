"""Small graphs with known spectra."""

from __future__ import annotations

import networkx as nx
import numpy as np

from lambdahat.graphs import graph


def cliques(sizes, links=()):
    """Complete graphs side by side, and links between nodes by number."""
    made = nx.disjoint_union_all([nx.complete_graph(size) for size in sizes])
    made.add_edges_from(links)
    return graph(made)


def planted(count, seed=0, inside=0.5, outside=0.1, least=20, most=40):
    """networkx's random partition graph: clusters of 20 to 40 nodes, ``outside`` links out of
    each node on average.
    """
    sizes = np.random.default_rng(seed).integers(least, most + 1, count)
    return graph(
        nx.random_partition_graph([int(s) for s in sizes], inside, outside / sizes.sum(), seed=seed)
    )
