"""``graph``: a file, a networkx graph, a matrix or pairs of nodes as one ``Graph``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

from lambdahat._check import describe, require, require_choice
from lambdahat.graphs.edges import Chunk, Rules, adjacency_of
from lambdahat.graphs.structure import Graph
from lambdahat.graphs.text_files import PACKED, edge_list, gml, open_text

FORMATS = ("edges", "gml", "mtx", "npz")
SUFFIXES = {".gml": "gml", ".mtx": "mtx", ".npz": "npz"}


def graph(
    source: Any,
    *,
    format: str | None = None,
    weighted: bool = True,
    loops: str = "drop",
    duplicates: str = "max",
    directed: str = "max",
    name: str | None = None,
) -> Graph:
    """An undirected ``Graph`` of a file, a networkx graph, a SciPy or dense adjacency matrix, or pairs (m, 2) of nodes.

    Files (also packed: .gz, .bz2, .xz) are read by their suffix, or as ``format`` says: "gml", "mtx" (Matrix Market),
    "npz" (``scipy.sparse.save_npz``), and "edges" for everything else: two or three columns separated by spaces, tabs,
    commas or semicolons, with comments after #, % or //, as SNAP writes them, and perhaps a header.
    The third column of pairs is the weight. What ``weighted``, ``loops``, ``duplicates`` and ``directed`` do is in
    ``Rules``; by default an edge listed twice, or in both directions, is one edge with the larger weight.

    Nodes are those the file or object names: an edge list knows no isolated nodes but those with a loop.

    >>> graph([(0, 1), (1, 2), (2, 2), (1, 0)])
    Graph(3 nodes, 2 edges)
    """
    rules = Rules(weighted, loops, duplicates, directed)
    if isinstance(source, Graph):
        return source
    if isinstance(source, str | Path):
        return _file(Path(source), format, rules, name)
    require(format is None, "format", "be None for what is not a file", repr(format))
    if hasattr(source, "is_multigraph"):
        return _networkx(source, rules, name or source.name or "graph")
    if scipy.sparse.issparse(source):
        return _matrix(source, rules, name or "graph")
    try:
        array = np.asarray(source)
    except ValueError:
        array = np.zeros(0, dtype=object)
    pairs = array.ndim == 2 and array.shape[1] in (2, 3) and array.shape[0] != array.shape[1]
    known = array.ndim == 2 and array.dtype.kind in ("iufb" if not pairs else "iufbU")
    require(known, "source", "be a file, a networkx graph, an adjacency matrix or pairs (m, 2) of nodes",
            describe(source), error=TypeError)  # fmt: skip
    return _pairs(array, rules, name or "graph") if pairs else _matrix(array, rules, name or "graph")


def _file(path: Path, format: str | None, rules: Rules, name: str | None) -> Graph:
    require(path.is_file(), "source", "name a file", f"{path} (no such file)", "", FileNotFoundError)
    plain = path.with_suffix("") if path.suffix in PACKED else path
    kind = SUFFIXES.get(plain.suffix, "edges") if format is None else require_choice(format, "format", FORMATS)
    name = name or plain.stem
    if kind == "mtx":
        return _market(path, rules, name)
    if kind == "npz":
        return _matrix(scipy.sparse.load_npz(path), rules, name)
    if kind == "gml":
        labels, edges, one_way = gml(path)
        matrix, _ = adjacency_of([edges], rules, len(labels), one_way)
        return Graph(matrix, np.array(labels), name)
    matrix, names = adjacency_of(edge_list(path, rules.weighted), rules)
    return Graph(matrix, names, name)


def _market(path: Path, rules: Rules, name: str) -> Graph:
    """A Matrix Market file; its own header says whether it is symmetric."""
    import scipy.io

    with open_text(path) as stream:
        banner = stream.readline().lower()
    require(banner.startswith("%%matrixmarket"), "the file", "begin with %%MatrixMarket", repr(banner[:40]))
    require("complex" not in banner, "the matrix", "be real", "a complex one")
    try:
        matrix = scipy.io.mmread(path, spmatrix=False)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{path.name} must be a Matrix Market file, got one that cannot be read: {error}") from error
    return _matrix(matrix, rules, name)


def _matrix(matrix: Any, rules: Rules, name: str) -> Graph:
    """An adjacency matrix, dense or sparse: its entries are the edges, each in its direction."""
    shape = tuple(matrix.shape)
    require(len(shape) == 2 and shape[0] == shape[1], "an adjacency matrix", "be square", f"shape {shape}",
            "for pairs of nodes pass an array (m, 2)")  # fmt: skip
    require(not np.iscomplexobj(matrix), "an adjacency matrix", "be real", str(matrix.dtype))
    entries = scipy.sparse.coo_array(matrix)
    chunk: Chunk = entries.row, entries.col, entries.data.astype(np.float64)
    adjacency, _ = adjacency_of([chunk], rules, shape[0])
    return Graph(adjacency, None, name)


def _pairs(array: Any, rules: Rules, name: str) -> Graph:
    weights = None
    if array.shape[1] == 3 and array.dtype.kind in "iuf":
        weights = np.asarray(array[:, 2], dtype=np.float64)
    nodes = array[:, :2]
    if nodes.dtype.kind == "f":
        whole = bool((nodes == np.floor(nodes)).all())
        require(whole, "the nodes of pairs", "be whole numbers", "fractions or NaN", "give weights as a third column")
        nodes = nodes.astype(np.int64)
    matrix, names = adjacency_of([(nodes[:, 0], nodes[:, 1], weights)], rules)
    return Graph(matrix, names, name)


def _networkx(source: Any, rules: Rules, name: str) -> Graph:
    """A networkx graph of any kind; the attribute "weight" is the weight."""
    place = {node: i for i, node in enumerate(source)}
    heavy = rules.weighted and any("weight" in data for _, _, data in source.edges(data=True))
    count = source.number_of_edges()
    ends: Iterable[int] = (place[node] for u, v in source.edges() for node in (u, v))
    pairs = np.fromiter(ends, dtype=np.int64, count=2 * count).reshape(-1, 2)
    weights = None
    if heavy:
        weights = np.fromiter((data.get("weight", 1.0) for _, _, data in source.edges(data=True)), np.float64, count)
    chunk: Chunk = pairs[:, 0], pairs[:, 1], weights
    matrix, _ = adjacency_of([chunk], rules, len(place), source.is_directed())
    plain = all(node == i for node, i in place.items())
    return Graph(matrix, None if plain else np.array([str(node) for node in place]), name)
