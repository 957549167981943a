"""Spectral clustering: each node's cluster from the eigenvectors of the smallest eigenvalues."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.cluster.vq import kmeans2

from lambdahat._core.check import require_count
from lambdahat._core.rng import derived_seed
from lambdahat.estimators import eigenpairs
from lambdahat.graphs.structure import Graph, csr_tensor
from lambdahat.operators.matrix import Matrix

STARTS = 5


def cluster_labels(graph: Graph, count: int, seed: int = 0) -> NDArray[np.int64]:
    """The cluster 0 … ``count`` − 1 of each node, (n,), by normalised spectral clustering (Ng,
    Jordan and Weiss 2001).

    The rows of the ``count`` eigenvectors of L_norm with the smallest eigenvalues, made unit
    vectors, are grouped by k-means, the best of five starts. Where there are as many clusters as
    components, these are the clusters.
    """
    require_count(count, "count", 1, len(graph))
    if count == int(graph.components.max()) + 1:
        return graph.components.astype(np.int64)
    adjacency = Matrix(csr_tensor(graph.normalized(), torch.float64), symmetric=True, psd=False)
    vectors = eigenpairs(adjacency, count, "largest", seed=seed).vectors.numpy()
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    rows = vectors / np.where(lengths > 0, lengths, 1.0)
    best, least = np.zeros(len(graph), dtype=np.int64), np.inf
    for start in range(STARTS):
        rng = np.random.default_rng(derived_seed(seed, "k-means", start))
        centres, labels = kmeans2(rows, count, minit="++", rng=rng, missing="warn")
        spread = float(((rows - centres[labels]) ** 2).sum())
        if spread < least:
            best, least = labels.astype(np.int64), spread
    return best
