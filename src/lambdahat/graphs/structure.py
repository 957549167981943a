"""``Graph``: an undirected graph as a symmetric CSR matrix, and how edges become one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from lambdahat._core.check import require, require_choice
from lambdahat._core.rng import generator
from lambdahat.operators.base import LinearOperator
from lambdahat.operators.matrix import Matrix

Chunk = tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None]

LOOPS = ("drop", "keep")
DUPLICATES = ("max", "sum", "mean", "refuse")
DIRECTED = ("max", "sum", "mean", "mutual", "refuse")
BLOCK = 1 << 13  # edges handled at once: what is kept of them on the way is small beside the graph
# edges kept in one array: many small ones leave memory in pieces too small for the graph's arrays
JOINED = 1 << 18
REPEATED = (
    "duplicates",
    "not occur",
    "an edge that is listed again",
    'pass duplicates="max", "sum" or "mean"',
)


@dataclass(frozen=True)
class Rules:
    """How edges become an undirected graph.

    ``weighted=False`` gives every edge the weight 1. ``loops`` are dropped or kept. ``duplicates``
    merges an edge that is listed several times in one direction, ``directed`` the two directions,
    of which a missing one has weight 0: "mutual" is the smaller of the two, "max", "mean" and "sum"
    are as named, and "refuse" raises an error.
    """

    weighted: bool = True
    loops: str = "drop"
    duplicates: str = "max"
    directed: str = "max"

    def __post_init__(self) -> None:
        require_choice(self.loops, "loops", LOOPS)
        require_choice(self.duplicates, "duplicates", DUPLICATES)
        require_choice(self.directed, "directed", DIRECTED)


def adjacency_of(
    chunks: Iterable[Chunk], rules: Rules, num_nodes: int | None = None, directed: bool = True
) -> Any:
    """The adjacency and the numbers of nodes (None where they are 0 … n − 1).

    With ``num_nodes`` the nodes are 0 … num_nodes − 1, and all are there; without, those that a
    chunk names. ``directed=False`` says that every edge stands for both directions already.
    """
    kept, weighted = _collect(chunks, rules)
    names, count = _number_nodes(kept) if num_nodes is None else (None, num_nodes)
    require_nodes(count)
    alike = rules.duplicates == rules.directed and rules.directed in ("max", "sum")
    if alike or not directed:  # the order of merging does not matter: both directions at once
        heavy = weighted or rules.duplicates == "sum"
        placed = _place_edges(kept, count, rules.loops, heavy, both=True)
        return merge_duplicates(placed, rules.duplicates, heavy), names
    one_way = merge_duplicates(
        _place_edges(kept, count, rules.loops, True, both=False), rules.duplicates, True
    )
    return symmetrise(one_way, rules.directed), names


def _collect(chunks: Iterable[Chunk], rules: Rules) -> tuple[list[Chunk], bool]:
    """Checked chunks with 32-bit node numbers where they fit; whether any weight is not 1."""
    kept: list[Chunk] = []
    recent: list[Chunk] = []
    weighted = False
    for u, v, w in chunks:
        if rules.weighted:
            require_weights(w)
        elif w is not None:
            u, v, w = u[w != 0], v[w != 0], None  # an entry of 0 is no edge
        weighted = weighted or (w is not None and bool((w != 1).any()))
        if w is not None:  # in float32 where that is exact, as for counts, to save memory
            with np.errstate(over="ignore"):
                single = w.astype(np.float32)
            w = single if bool((single == w).all()) else w
        recent.append((_narrow(u), _narrow(v), w))
        if len(recent) > 1 and sum(len(part) for part, _, _ in recent) >= JOINED:
            first, second, weights = zip(*recent, strict=True)
            joined = None if weights[0] is None else np.concatenate(weights)
            recent = [(np.concatenate(first), np.concatenate(second), joined)]
        if len(recent[0][0]) >= JOINED:
            kept += _cut(recent.pop(0))
    return kept + [block for chunk in recent for block in _cut(chunk)], weighted


def _cut(chunk: Chunk) -> list[Chunk]:
    """Views of few rows each."""
    u, v, w = chunk
    parts = [slice(first, first + BLOCK) for first in range(0, len(u), BLOCK)]
    return [(u[part], v[part], None if w is None else w[part]) for part in parts]


def require_weights(weights: NDArray[Any] | None) -> None:
    """Refuse weights that are NaN, infinite or negative."""
    if weights is None or not len(weights):
        return
    bad = weights[~np.isfinite(weights)]
    got = f"{bad[:1]}".strip("[]")
    require(not len(bad), "the weights", "be finite", got, "pass weighted=False to leave them out")
    least = weights.min()
    cure = "take absolute values first, or pass weighted=False"
    require(bool(least >= 0), "the weights", "be at least 0", f"{least:g}", cure)


def require_nodes(count: int) -> None:
    """Refuse graphs of fewer than two nodes."""
    expected = "have at least two nodes"
    require(count > 1, "the graph", expected, "an empty one" if count == 0 else "a single node")


def _narrow(nodes: NDArray[Any]) -> NDArray[Any]:
    low, high = (int(nodes.min()), int(nodes.max())) if len(nodes) else (0, 0)
    return nodes.astype(np.int32, copy=False) if -(2**31) <= low and high < 2**31 else nodes


def _number_nodes(chunks: list[Chunk]) -> tuple[NDArray[Any] | None, int]:
    """Renumber the nodes 0 … n − 1 in place; return their old numbers if others, and n."""
    ends = [part for u, v, _ in chunks for part in (u, v)]
    if not ends:
        return None, 0
    low, high = min(int(part.min()) for part in ends), max(int(part.max()) for part in ends)
    # a table of all numbers is no larger than the edges
    if low >= 0 and high < sum(len(part) for part in ends):
        seen = np.zeros(high + 1, dtype=bool)
        for part in ends:
            seen[part] = True
        names = np.flatnonzero(seen)
        if len(names) == high + 1:
            return None, len(names)
        table = np.cumsum(seen, dtype=np.int32)
        table -= 1
        _map(chunks, lambda nodes: table[nodes])
        return names, len(names)
    names = np.unique(np.concatenate([np.unique(part) for part in ends]))
    _map(chunks, lambda nodes: np.searchsorted(names, nodes).astype(np.int32))
    return names, len(names)


def _map(chunks: list[Chunk], number: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
    """Replace the nodes in their own arrays if possible: new ones would fragment the memory."""
    for i, (u, v, w) in enumerate(chunks):
        nodes = []
        for old in (u, v):
            new = number(old)
            if old.dtype == new.dtype:
                old[:] = new
            nodes.append(old if old.dtype == new.dtype else new)
        chunks[i] = nodes[0], nodes[1], w


def _place_edges(chunks: list[Chunk], count: int, loops: str, heavy: bool, both: bool) -> Any:
    """A CSR matrix with duplicates: every edge, in ``both`` directions if asked for.

    The chunks are used up on the way. Weights are float64 if ``heavy``, else ones in float32.
    """
    kind: Any = np.int32 if 2 * sum(len(u) for u, _, _ in chunks) < 2**31 else np.int64
    degrees = np.zeros(count, dtype=kind)
    for chunk in chunks:
        u, v, _ = _without(chunk, loops)
        np.add.at(degrees, u, kind(1))  # a plain 1 would be int64, and cast one by one
        if both:
            np.add.at(degrees, v[u != v], kind(1))
    indptr = np.zeros(count + 1, dtype=degrees.dtype)
    np.cumsum(degrees, out=indptr[1:])
    free, total = np.subtract(indptr[1:], degrees, out=degrees), int(indptr[-1])
    indices, data = np.empty(total, dtype=np.int32), np.empty(total) if heavy else None
    while chunks:
        u, v, w = _without(chunks.pop(), loops)
        _place(u, v, w, free, indices, data)
        if both:
            apart = u != v
            _place(v[apart], u[apart], None if w is None else w[apart], free, indices, data)
    indptr = indptr.astype(np.int32, copy=False) if total < 2**31 else indptr
    values = np.ones(total, dtype=np.float32) if data is None else data
    return scipy.sparse.csr_array((values, indices, indptr), shape=(count, count))


def _without(chunk: Chunk, loops: str) -> Chunk:
    """The chunk without edges of weight 0, and without loops where they are dropped."""
    u, v, w = chunk
    kept = np.ones(len(u), dtype=bool) if w is None else w != 0
    kept &= (u != v) | (loops == "keep")
    return chunk if kept.all() else (u[kept], v[kept], None if w is None else w[kept])


def _place(
    rows: Any, columns: Any, weights: Any, free: NDArray[Any], indices: Any, data: Any
) -> None:
    """Write a chunk behind what its rows hold so far; ``free`` is where each row goes on."""
    if not len(rows):
        return
    order = np.argsort(rows, kind="stable")
    rows = rows[order]
    first = np.flatnonzero(np.concatenate([[True], rows[1:] != rows[:-1]]))
    lengths = np.diff(np.append(first, len(rows)))
    places = np.arange(len(rows)) - np.repeat(first, lengths) + free[rows]
    indices[places] = columns[order]
    if data is not None:
        data[places] = 1.0 if weights is None else weights[order]
    free[rows[first]] += lengths


def merge_duplicates(matrix: Any, duplicates: str, heavy: bool) -> Any:
    """Merge equal entries in place: their sum, mean or maximum, or an error."""
    if not heavy or duplicates == "sum":
        before = matrix.nnz
        matrix.sum_duplicates()
        if not heavy:
            matrix.data.fill(1.0)
        require(duplicates != "refuse" or matrix.nnz == before, *REPEATED)
        return matrix
    matrix.sort_indices()
    indptr, indices, data = matrix.indptr, matrix.indices, matrix.data
    new = np.ones(len(indices), dtype=bool)
    new[1:] = indices[1:] != indices[:-1]
    new[indptr[:-1][np.diff(indptr) > 0]] = True
    if new.all():
        return matrix
    require(duplicates != "refuse", *REPEATED)
    rows = np.unique(
        np.append(np.searchsorted(indptr, np.arange(0, len(indices), BLOCK)), len(indptr) - 1)
    )
    low, size = 0, 0
    # runs of rows, into the arrays' own front
    for start, stop in zip(np.append(0, rows[:-1]), rows, strict=True):
        high = int(indptr[stop])
        first = np.flatnonzero(new[low:high])
        ends = indptr[start + 1 : stop + 1] - low
        if len(first) and duplicates == "max":
            data[size : size + len(first)] = np.maximum.reduceat(data[low:high], first)
        elif len(first):
            lengths = np.diff(np.append(first, high - low))
            data[size : size + len(first)] = np.add.reduceat(data[low:high], first) / lengths
        indices[size : size + len(first)] = indices[low:high][first]
        indptr[start + 1 : stop + 1] = size + np.searchsorted(first, ends)
        low, size = high, size + len(first)
    matrix.prune()
    matrix.has_canonical_format = True
    return matrix


def symmetrise(matrix: Any, directed: str) -> Any:
    """A symmetric matrix of one whose (i, j) and (j, i) may differ."""
    other = matrix.T.tocsr()
    if directed == "refuse":
        apart = abs(matrix - other)
        same = apart.nnz == 0 or float(apart.max()) <= 1e-12 * float(matrix.max())
        cure = 'pass directed="max", "sum", "mean" or "mutual"'
        require(same, "the edges", "be the same in both directions", "directed ones", cure)
        return matrix
    if directed in ("sum", "mean"):
        diagonal = scipy.sparse.diags_array(matrix.diagonal(), format="csr")
        total = matrix + other - diagonal  # a loop has one direction
        result = total if directed == "sum" else (matrix + other) * 0.5
    else:
        result = matrix.maximum(other) if directed == "max" else matrix.minimum(other)
    result = scipy.sparse.csr_array(result)
    result.eliminate_zeros()
    result.sort_indices()
    return result


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
        """A graph of a symmetric matrix as it is; ``graphs.graph`` reads any source."""
        matrix = scipy.sparse.csr_array(adjacency, dtype=np.float64, copy=True)
        matrix.sum_duplicates()
        matrix.eliminate_zeros()
        return cls(matrix, None, name)

    def __post_init__(self) -> None:
        matrix = self.adjacency
        fits = scipy.sparse.issparse(matrix) and matrix.format == "csr" and matrix.dtype.kind == "f"
        expected = "be a csr_array of floats"
        require(fits, "adjacency", expected, matrix, "Graph.of(matrix) makes it one", TypeError)
        n = matrix.shape[0]
        square, got = matrix.shape == (n, n), f"shape {tuple(matrix.shape)}"
        cure = "graphs.graph(source) reads networkx graphs, edges and files"
        require(square, "adjacency", "be square", got, cure)
        require_nodes(n)
        require(self.names is None or len(self.names) == n, "names", f"have length {n}", self.names)
        require_weights(matrix.data)
        # by Wx = Wᵀx for a random integer x: W − Wᵀ would take the memory of a second graph
        draw = torch.randint(1, 64, (n,), generator=generator(0, "symmetry"))
        probe = draw.numpy().astype(matrix.dtype)
        image, rounding = matrix @ probe, 256 * np.finfo(matrix.dtype).eps
        fits = bool((np.abs(image - matrix.T @ probe) <= rounding * image).all())
        cure = 'graphs.graph(matrix, directed="max") makes it so'
        require(fits, "adjacency", "be symmetric", "a matrix that is not", cure)

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
        """D^{−1/2} W D^{−1/2}, with 1 on the diagonal of isolated nodes: I − L_norm, Eq. 3.3."""
        degrees = self.degrees
        scale = 1.0 / np.sqrt(np.where(degrees > 0, degrees, 1.0))
        scale = scale.astype(dtype)
        data = self.adjacency.data.astype(dtype)
        indices = self.adjacency.indices
        indptr = self.adjacency.indptr
        # not at once: that would take the memory of the graph once more
        for first in range(0, len(self), ROWS):
            rows = indptr[first : first + ROWS + 1]
            part = slice(rows[0], rows[-1])
            data[part] *= np.repeat(scale[first : first + ROWS], np.diff(rows))
            data[part] *= scale[indices[part]]
        matrix = scipy.sparse.csr_array((data, indices, indptr), shape=self.adjacency.shape)
        alone = degrees == 0
        if not alone.any():
            return matrix
        return matrix + scipy.sparse.diags_array(alone.astype(dtype), format="csr")

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
    _, strong = connected_components(matrix, directed=True, connection="strong")
    _, first, labels = np.unique(strong, return_index=True, return_inverse=True)
    order = np.empty(len(first), dtype=np.int32)
    order[np.argsort(first)] = np.arange(len(first), dtype=np.int32)
    return order[labels]


def csr_tensor(matrix: Any, dtype: torch.dtype) -> Tensor:
    """A SciPy CSR matrix as a torch one; 32-bit indices are kept, as MKL wants them."""
    starts, columns = torch.from_numpy(matrix.indptr), torch.from_numpy(matrix.indices)
    values = torch.from_numpy(matrix.data).to(dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse")
        return torch.sparse_csr_tensor(
            starts, columns, values, size=matrix.shape, check_invariants=False
        )
