"""Groups of nodes that a short random walk does not leave: a guess at clusters that costs a few
products.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray

from lambdahat._core.rng import generator
from lambdahat.graphs.block_moments import Partition
from lambdahat.graphs.structure import Graph, csr_tensor, symmetric_components

STEPS = 40
STARTS = 16
EDGES = 1 << 16  # whose ends are compared at once: a few MiB, whatever the graph
APART = 0.5  # of the mean length: independent directions differ by √2


def walk_partition(graph: Graph, seed: int) -> Partition:
    """The components of the graph without the edges whose ends a lazy random walk tells apart.

    Y = (½(I + D⁻¹W))^40 R/√d for Gaussian R (n, 16) is nearly constant on a cluster that the walk
    hardly leaves and differs between clusters. An edge is cut where ‖Y_i − Y_j‖ is above half of
    the mean of ‖Y_i‖ and ‖Y_j‖. Any partition gives unbiased moments; a good one gives precise
    ones.
    """
    normal = csr_tensor(graph.normalized(np.float32), torch.float32)
    block = torch.randn(len(graph), STARTS, generator=generator(seed, "walk"), dtype=torch.float32)
    for _ in range(STEPS):
        torch.addmm(
            block, normal, block, beta=0.5, alpha=0.5, out=(image := torch.empty_like(block))
        )
        block = image
    del normal
    scale = 1.0 / np.sqrt(np.where(graph.degrees > 0, graph.degrees, 1.0))
    places = block.mul_(torch.as_tensor(scale.astype(np.float32))[:, None]).numpy()
    labels = symmetric_components(_near(graph.adjacency, places))
    count = int(labels.max()) + 1
    whole = count == int(graph.components.max()) + 1
    return Partition(graph.components if whole else labels, whole)


def _near(adjacency: Any, places: NDArray[np.float32]) -> Any:
    """The edges whose ends the places (n, starts) do not tell apart, some at a time."""
    indptr, indices = adjacency.indptr, adjacency.indices
    lengths = np.sqrt(np.einsum("ij,ij->i", places, places))
    ends, columns, size = np.zeros_like(indptr), np.empty_like(indices), 0
    for first in range(0, len(indices), EDGES):
        j = indices[first : first + EDGES]
        i = np.searchsorted(indptr, np.arange(first, first + len(j)), side="right") - 1
        apart = np.linalg.norm(places[i] - places[j], axis=1)
        near = apart < APART / 2 * (lengths[i] + lengths[j])
        np.add.at(ends, i[near] + 1, 1)
        columns[size : size + int(near.sum())] = j[near]
        size += int(near.sum())
    np.cumsum(ends, out=ends)
    return scipy.sparse.csr_array(
        (np.ones(size, dtype=bool), columns[:size], ends), shape=adjacency.shape
    )
