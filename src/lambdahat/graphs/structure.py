"""``Graph``: one undirected graph as a symmetric CSR matrix, and its matrices as operators."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from lambdahat._core.check import require
from lambdahat._core.rng import generator
from lambdahat.graphs.edges import require_weights
from lambdahat.operators.base import LinearOperator
from lambdahat.operators.matrix import Matrix

ROWS = 1 << 16


@dataclass(frozen=True, eq=False)
class Graph:
    """An undirected graph of n nodes: ``adjacency`` W (n, n), a symmetric
    ``scipy.sparse.csr_array`` of weights > 0.

    A matrix that is not symmetric, or has entries that are negative or not finite, is refused. Two
    graphs are equal only if they are one object. ``names`` (n,) are the nodes' names where they are
    not 0 … n − 1, and ``name`` says what the graph is in tables and figures. A node without edges
    has degree 0; its row of the normalised Laplacian is 0, so that it counts as a component, and a
    cluster, of its own.

    >>> Graph.of(np.array([[0, 1, 0], [1, 0, 0], [0, 0, 0]]))
    Graph(3 nodes, 1 edge, 1 isolated)
    """

    adjacency: Any
    names: NDArray[Any] | None = None
    name: str = field(default="graph")

    @classmethod
    def of(cls, adjacency: Any, name: str = "graph") -> Graph:
        """A graph of a symmetric matrix as it is; ``graphs.graph`` takes any source and says how
        to treat it.
        """
        matrix = scipy.sparse.csr_array(adjacency, dtype=np.float64, copy=True)
        matrix.sum_duplicates()
        matrix.eliminate_zeros()
        return cls(matrix, None, name)

    def __post_init__(self) -> None:
        matrix = self.adjacency
        fits = scipy.sparse.issparse(matrix) and matrix.format == "csr" and matrix.dtype.kind == "f"
        require(
            fits,
            "adjacency",
            "be a csr_array of floats",
            matrix,
            "Graph.of(matrix) makes it one",
            TypeError,
        )
        n = matrix.shape[0]
        require(n == matrix.shape[1], "adjacency", "be square", f"shape {tuple(matrix.shape)}")
        require(n > 0, "the graph", "have at least two nodes", "an empty one")
        require(n > 1, "the graph", "have at least two nodes", "a single node")
        require(self.names is None or len(self.names) == n, "names", f"have length {n}", self.names)
        require_weights(matrix.data)
        require(
            _symmetric(matrix),
            "adjacency",
            "be symmetric",
            "a matrix that is not",
            'graphs.graph(matrix, directed="max") makes it so',
        )

    def __len__(self) -> int:
        return int(self.adjacency.shape[0])

    def __repr__(self) -> str:
        alone = int((self.degrees == 0).sum())
        edges = f"{self.num_edges:,} edge" + ("" if self.num_edges == 1 else "s")
        return f"Graph({len(self):,} nodes, {edges}" + (f", {alone:,} isolated)" if alone else ")")

    @cached_property
    def degrees(self) -> NDArray[np.float64]:
        """d_i = Σ_j w_ij (n,), Eq. 3.1 of the spectral thesis."""
        # of another dtype it would copy the matrix
        ones = np.ones(len(self), dtype=self.adjacency.dtype)
        return np.asarray(self.adjacency @ ones, dtype=np.float64)

    @cached_property
    def num_edges(self) -> int:
        """Edges, each counted once, loops too."""
        loops = int(np.count_nonzero(self.adjacency.diagonal()))
        return (int(self.adjacency.nnz) + loops) // 2

    @cached_property
    def components(self) -> NDArray[np.int32]:
        """The number 0, 1, … of each node's connected component, (n,)."""
        return symmetric_components(self.adjacency)

    def without_isolated(self) -> Graph:
        """The graph of the nodes that have an edge."""
        kept = np.flatnonzero(self.degrees > 0)
        require(len(kept) > 1, "the graph", "have an edge between two nodes", repr(self))
        names = kept if self.names is None else self.names[kept]
        return Graph(self.adjacency[kept][:, kept], names, self.name)

    def normalized(self, dtype: Any = np.float64) -> Any:
        """D^{−1/2} W D^{−1/2} as a ``csr_array``, with 1 on the diagonal of an isolated node: I
        − L_norm, Eq. 3.3.
        """
        degrees = self.degrees
        scale = 1.0 / np.sqrt(np.where(degrees > 0, degrees, 1.0))
        scale = scale.astype(dtype)
        data, indices, indptr = (
            self.adjacency.data.astype(dtype),
            self.adjacency.indices,
            self.adjacency.indptr,
        )
        # not at once: that would take the memory of the graph once more
        for first in range(0, len(self), ROWS):
            rows = indptr[first : first + ROWS + 1]
            part = slice(rows[0], rows[-1])
            data[part] *= np.repeat(scale[first : first + ROWS], np.diff(rows))
            data[part] *= scale[indices[part]]
        matrix = scipy.sparse.csr_array((data, indices, indptr), shape=self.adjacency.shape)
        alone = degrees == 0
        return (
            matrix + scipy.sparse.diags_array(alone.astype(dtype), format="csr")
            if alone.any()
            else matrix
        )

    def adjacency_operator(self) -> LinearOperator:
        """W as an operator."""
        return Matrix(csr_tensor(self.adjacency, torch.float64), symmetric=True, psd=False)

    def laplacian(self) -> LinearOperator:
        """L = D − W as an operator, Eq. 3.2."""
        matrix = scipy.sparse.diags_array(self.degrees, format="csr") - self.adjacency
        return Matrix(csr_tensor(matrix, torch.float64), symmetric=True, psd=True)

    def normalized_laplacian(self) -> LinearOperator:
        """L_norm = D^{−1/2}(D − W)D^{−1/2} as an operator, Eq. 3.3: its spectrum lies in [0, 2].

        0^{−1/2} is taken as 0, so that an isolated node has eigenvalue 0, as in networkx.
        """
        matrix = scipy.sparse.eye_array(len(self), format="csr") - self.normalized()
        return Matrix(csr_tensor(matrix, torch.float64), symmetric=True, psd=True)


def symmetric_components(matrix: Any) -> NDArray[np.int32]:
    """The number 0, 1, … of each row's connected component, (n,), in order of the first rows.

    In a symmetric matrix these are the strong components, which SciPy finds without a transposed
    copy.
    """
    _, found = connected_components(matrix, directed=True, connection="strong")
    _, first, labels = np.unique(found, return_index=True, return_inverse=True)
    order = np.empty(len(first), dtype=np.int32)
    order[np.argsort(first)] = np.arange(len(first), dtype=np.int32)
    return order[labels]


def _symmetric(matrix: Any) -> bool:
    """Whether Wx = Wᵀx for a random x of small whole numbers: two products, where W − Wᵀ would
    be a second graph.
    """
    probe = (
        torch.randint(1, 64, (matrix.shape[0],), generator=generator(0, "symmetry"))
        .numpy()
        .astype(matrix.dtype)
    )
    image = matrix @ probe
    return bool(
        (np.abs(image - matrix.T @ probe) <= 256 * np.finfo(matrix.dtype).eps * image).all()
    )


def csr_tensor(matrix: Any, dtype: torch.dtype) -> Tensor:
    """A SciPy CSR matrix as a torch one; its indices stay 32-bit where they are, as MKL wants
    them.
    """
    parts = (
        torch.from_numpy(matrix.indptr),
        torch.from_numpy(matrix.indices),
        torch.from_numpy(matrix.data).to(dtype),
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse")
        return torch.sparse_csr_tensor(*parts, size=matrix.shape, check_invariants=False)
