"""Edges as they come, in chunks of (from, to, weight), into one symmetric CSR matrix, without a second copy of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from lambdahat._check import require, require_choice

Chunk = tuple[NDArray[Any], NDArray[Any], NDArray[np.float64] | None]

LOOPS = ("drop", "keep")
DUPLICATES = ("max", "sum", "mean", "refuse")
DIRECTED = ("max", "sum", "mean", "mutual", "refuse")


@dataclass(frozen=True)
class Rules:
    """How edges become an undirected graph.

    ``weighted=False`` gives every edge the weight 1. ``loops`` are dropped or kept. ``duplicates`` says what the
    weight of an edge is that is listed several times in one direction, ``directed`` what it is where the two
    directions differ, an edge listed in one direction only having weight 0 in the other: "mutual" is the smaller of the
    two, "max", "mean" and "sum" what they say, and "refuse" an error.
    """

    weighted: bool = True
    loops: str = "drop"
    duplicates: str = "max"
    directed: str = "max"

    def __post_init__(self) -> None:
        require_choice(self.loops, "loops", LOOPS)
        require_choice(self.duplicates, "duplicates", DUPLICATES)
        require_choice(self.directed, "directed", DIRECTED)


def adjacency_of(chunks: Iterable[Chunk], rules: Rules, num_nodes: int | None = None, directed: bool = True) -> Any:
    """The adjacency and the names of nodes (None where they are 0 … n − 1).

    With ``num_nodes`` the nodes are 0 … num_nodes − 1, and all are there; without, those that a chunk names.
    ``directed=False`` says that every edge stands for both directions already.
    """
    kept, weighted = _collect(chunks, rules)
    names, count = _numbered(kept) if num_nodes is None else (None, num_nodes)
    require(count > 1, "the graph", "have at least two nodes", "an empty one" if count == 0 else "a single node")
    way = rules if directed else replace(rules, directed="max")
    if not directed:
        kept = [(np.minimum(u, v), np.maximum(u, v), w) for u, v, w in kept]  # so that duplicates have one direction
    if not weighted and (way.duplicates, way.directed) == ("max", "max"):
        return _united(kept, count, way), names
    return _combined(kept, count, way), names


def _collect(chunks: Iterable[Chunk], rules: Rules) -> tuple[list[Chunk], bool]:
    """Checked chunks with 32-bit node numbers where they fit, and whether any edge has a weight other than 1."""
    kept: list[Chunk] = []
    weighted = False
    for u, v, w in chunks:
        if rules.weighted:
            require_weights(w)
        elif w is not None:
            u, v, w = u[w != 0], v[w != 0], None  # an entry of 0 is no edge
        weighted = weighted or (w is not None and bool((w != 1).any()))
        kept.append((_narrow(u), _narrow(v), w))
    return kept, weighted


def require_weights(weights: NDArray[Any] | None) -> None:
    """Refuse weights that are NaN, infinite or negative."""
    if weights is None or not len(weights):
        return
    bad = weights[~np.isfinite(weights)]
    require(not len(bad), "the weights", "be finite", f"{bad[:1]}".strip("[]"), "pass weighted=False to leave them out")
    least = weights.min()
    require(bool(least >= 0), "the weights", "be at least 0", f"{least:g}",
            "take absolute values first, or pass weighted=False")  # fmt: skip


def _narrow(nodes: NDArray[Any]) -> NDArray[Any]:
    if nodes.dtype.kind not in "iu":
        return nodes
    low, high = (int(nodes.min()), int(nodes.max())) if len(nodes) else (0, 0)
    require(low >= 0, "the nodes", "have numbers of at least 0", str(low))
    return nodes.astype(np.int32, copy=False) if high < 2**31 else nodes


def _numbered(chunks: list[Chunk]) -> tuple[NDArray[Any] | None, int]:
    """Give the nodes numbers 0 … n − 1, in place; their names, sorted, where these are others, and n."""
    ends = [part for u, v, _ in chunks for part in (u, v) if len(part)]
    if not ends:
        return None, 0
    if all(part.dtype.kind in "iu" for part in ends):
        high = max(int(part.max()) for part in ends)
        if high < sum(len(part) for part in ends):  # a table of all numbers is no larger than the edges
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
    """Replace the nodes chunk by chunk: a second list of chunks would be twice the file."""
    for i, (u, v, w) in enumerate(chunks):
        chunks[i] = number(u), number(v), w


def _united(chunks: list[Chunk], count: int, rules: Rules) -> Any:
    """Every edge in both directions with weight 1, written chunk by chunk into the arrays of the result."""
    degrees = np.zeros(count, dtype=np.int64)
    for u, v, _ in chunks:
        degrees += np.bincount(u, minlength=count)
        degrees += np.bincount(v, minlength=count)
        loops = u[u == v]
        np.subtract.at(degrees, loops, 2 if rules.loops == "drop" else 1)
    indptr = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(degrees, out=indptr[1:])
    free, indices = indptr[:-1].copy(), np.empty(indptr[-1], dtype=np.int32)
    while chunks:
        u, v, _ = chunks.pop()
        apart = u != v
        u, v = (u[apart], v[apart]) if rules.loops == "drop" else (u, v)
        _place(u, v, free, indices)
        other = u != v
        _place(v[other], u[other], free, indices)
    indptr = indptr.astype(np.int32) if indptr[-1] < 2**31 else indptr
    matrix = scipy.sparse.csr_array((np.ones(len(indices), dtype=np.float32), indices, indptr), shape=(count, count))
    matrix.sum_duplicates()
    matrix.data.fill(1.0)
    return matrix


def _place(rows: NDArray[Any], columns: NDArray[Any], free: NDArray[np.int64], indices: NDArray[np.int32]) -> None:
    """Write the columns of a chunk behind what their rows hold so far; ``free`` is where each row goes on."""
    if not len(rows):
        return
    order = np.argsort(rows, kind="stable")
    rows = rows[order]
    first = np.flatnonzero(np.concatenate([[True], rows[1:] != rows[:-1]]))
    lengths = np.diff(np.append(first, len(rows)))
    rank = np.arange(len(rows)) - np.repeat(first, lengths)
    indices[free[rows] + rank] = columns[order]
    free[rows[first]] += lengths


def _combined(chunks: list[Chunk], count: int, rules: Rules) -> Any:
    """Weighted edges: duplicates of one direction first, then the two directions."""
    rows, columns = (np.concatenate([chunk[i] for chunk in chunks] or [np.zeros(0, int)]) for i in (0, 1))
    data = np.concatenate([np.ones(len(u)) if w is None else w for u, _, w in chunks] or [np.zeros(0)])
    chunks.clear()
    kept = data != 0 if rules.loops == "keep" else (data != 0) & (rows != columns)
    one_way = _one_way(rows[kept], columns[kept], data[kept], count, rules.duplicates)
    return both_ways(one_way, rules.directed)


def _one_way(rows: Any, columns: Any, data: Any, count: int, duplicates: str) -> Any:
    order = np.lexsort((columns, rows))
    rows, columns, data = rows[order], columns[order], data[order]
    new = np.concatenate([[True], (rows[1:] != rows[:-1]) | (columns[1:] != columns[:-1])])[: len(rows)]
    first = np.flatnonzero(new)
    require(duplicates != "refuse" or bool(new.all()), "duplicates", "not occur",
            f"{len(rows) - len(first)} of them", 'pass duplicates="max", "sum" or "mean"')  # fmt: skip
    if len(first):
        reduce = np.maximum if duplicates == "max" else np.add
        data = reduce.reduceat(data, first)
        data = data / np.diff(np.append(first, len(rows))) if duplicates == "mean" else data
    return scipy.sparse.coo_array((data, (rows[first], columns[first])), shape=(count, count)).tocsr()


def both_ways(matrix: Any, directed: str) -> Any:
    """A symmetric matrix of one whose (i, j) and (j, i) may differ."""
    other = matrix.T.tocsr()
    if directed == "refuse":
        apart = abs(matrix - other)
        same = apart.nnz == 0 or float(apart.max()) <= 1e-12 * float(matrix.max())
        require(same, "the edges", "be the same in both directions", "directed ones",
                'pass directed="max", "sum", "mean" or "mutual"')  # fmt: skip
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
