"""Groups of nodes that a short random walk does not leave: a guess at clusters that costs a few products."""

from __future__ import annotations

import numpy as np
import scipy.sparse
import torch
from scipy.sparse.csgraph import connected_components

from lambdahat._rng import generator
from lambdahat.graphs.block_moments import Partition
from lambdahat.graphs.structure import Graph, csr_tensor

STEPS = 40
STARTS = 16
EDGES = 1 << 16  # whose ends are compared at once: a few MiB, whatever the graph
APART = 0.5  # of the mean length: independent directions differ by √2


def walk_partition(graph: Graph, seed: int) -> Partition:
    """The components of the graph without the edges whose ends a lazy random walk tells apart.

    Y = (½(I + D⁻¹W))^40 R/√d for Gaussian R (n, 16) is nearly constant on a cluster that the walk hardly leaves and
    differs between clusters. An edge is cut where ‖Y_i − Y_j‖ is above half of the mean of ‖Y_i‖ and ‖Y_j‖.
    Any partition gives unbiased moments; a good one gives precise ones.
    """
    normal = csr_tensor(graph.normalized(np.float32), torch.float32)
    block = torch.randn(len(graph), STARTS, generator=generator(seed, "walk"), dtype=torch.float32)
    for _ in range(STEPS):
        torch.addmm(block, normal, block, beta=0.5, alpha=0.5, out=(image := torch.empty_like(block)))
        block = image
    scale = 1.0 / np.sqrt(np.where(graph.degrees > 0, graph.degrees, 1.0)).astype(np.float32)
    places = block.numpy() * scale[:, None]
    lengths = np.linalg.norm(places, axis=1)
    adjacency = graph.adjacency
    rows = np.repeat(np.arange(len(graph), dtype=np.int32), np.diff(adjacency.indptr))
    columns = adjacency.indices
    near = np.empty(len(rows), dtype=bool)
    for first in range(0, len(rows), EDGES):
        part = slice(first, first + EDGES)
        i, j = rows[part], columns[part]
        apart = np.linalg.norm(places[i] - places[j], axis=1)
        near[part] = apart < APART / 2 * (lengths[i] + lengths[j])
    kept = scipy.sparse.csr_array((near[near], (rows[near], columns[near])), shape=adjacency.shape)
    count, labels = connected_components(kept, directed=False)
    whole = count == int(graph.components.max()) + 1
    return Partition(graph.components if whole else labels.astype(np.int32), whole)
