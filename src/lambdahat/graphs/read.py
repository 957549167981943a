"""``graph``: a file, a networkx graph, a matrix or edges as one ``Graph``."""

from __future__ import annotations

import contextlib
import json
import numbers
import re
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
import torch

from lambdahat._core.check import describe, require, require_choice, why_not
from lambdahat._core.storage import require_modest, unpacked_size
from lambdahat.graphs.edge_lists import (
    PACKED,
    edge_list,
    gml,
    market_entries,
    market_header,
    open_bytes,
    open_text,
)
from lambdahat.graphs.structure import Chunk, Graph, Rules, adjacency_of

FORMATS = ("edges", "gml", "mtx", "npz", "npy", "graphml", "gexf", "pajek", "json")
SUFFIXES = {f".{kind}": kind for kind in FORMATS[1:]} | {".net": "pajek", ".paj": "pajek"}
_KNOWN_BUT_NOT_READ = {
    "an adjacency list": ".adjlist .multiline_adjlist",
    "graph6": ".g6 .graph6",
    "sparse6": ".s6 .sparse6",
    "Graphviz DOT": ".dot .gv",
    "zipped GraphML": ".graphmlz",
    "Trivial Graph Format": ".tgf",
    "DIMACS": ".col .clq .dimacs",
    "METIS": ".metis .graph",
    "MATLAB": ".mat",
    "a pickle": ".pkl .pickle .gpickle",
    "a torch file": ".pt .pth",
    "HDF5": ".h5 .hdf5",
    "Parquet": ".parquet",
    "Feather": ".feather",
    "Excel": ".xlsx .xls",
    "an archive": ".zip .tar .tgz .7z",
    "packed by Zstandard": ".zst",
}
UNREAD = {end: kind for kind, ends in _KNOWN_BUT_NOT_READ.items() for end in ends.split()}
SIGNATURES = (
    (b"\x93NUMPY", "npy"),
    (b"PK\x03\x04", "npz"),
    (b"%%MatrixMarket", "mtx"),
    (b"<", "xml"),
    (b"{", "json"),
    (b"[", "json"),
    (b"*", "pajek"),
)
HEAD_BYTES = 4096
NODE_BYTES = 32  # what reading a sparse matrix takes at least for a node, be it isolated
ENTRY_BYTES = 2  # what a text file takes at least for an entry: a digit and a space
KNOWN = "be a file, a networkx graph, an adjacency matrix, or edges as tuples or an array (m, 2)"


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
    """Read an undirected ``Graph`` from a file, a networkx graph, an adjacency matrix, or edges.

    Files (also packed: .gz, .bz2, .xz) are read by their suffix, by how they begin, or as
    ``format`` says: "gml", "mtx" (Matrix Market), "npz" (``scipy.sparse.save_npz``), "npy",
    "graphml", "gexf", "pajek", "json" (networkx's node-link, adjacency and Cytoscape data, or a
    list of edges), and "edges" for everything else: two or three columns separated by spaces, tabs,
    commas or semicolons, with comments after #, % or //, as SNAP and ``networkx.write_edgelist``
    write them, and perhaps a header. Formats that are known but not read are refused by name. Edges
    are tuples (from, to) or (from, to, weight) of whole numbers or of names, an array (m, 2) or
    (m, 3), or PyG's ``edge_index`` (2, m) or ``Data``; a square array is an adjacency matrix.
    ``Rules`` explains ``weighted``, ``loops``, ``duplicates`` and ``directed``; by default an edge
    listed twice, or in both directions, is one edge with the larger weight. ``name`` is by default
    the file's. The nodes of an edge list are those it names.

    >>> graph([(0, 1), (1, 2), (2, 2), (1, 0)])
    Graph(3 nodes, 2 edges)
    >>> graph([("a", "b", 5.0), ("b", "c", 2.0)]).degrees
    array([5., 7., 2.])
    """
    rules = Rules(weighted, loops, duplicates, directed)
    if isinstance(source, str | Path):
        return _file(Path(source), format, rules, name)
    require(format is None, "format", "be None for what is not a file", repr(format))
    if isinstance(source, Graph):
        return _apply_rules(source, rules, name or source.name)
    if hasattr(source, "is_multigraph"):
        return _networkx(source, rules, name or source.name or "graph")
    if hasattr(source, "edge_index"):
        return _pyg(source, rules, name or "graph")
    if scipy.sparse.issparse(source):
        return _matrix(source, rules, name or "graph")
    if not hasattr(source, "__array__"):
        return _rows(source, rules, name or "graph")
    return _array(source, rules, name or "graph")


def _array(source: Any, rules: Rules, name: str) -> Graph:
    """Read a dense adjacency matrix, edges (m, 2) or (m, 3), or PyG's ``edge_index`` (2, m)."""
    tensor = isinstance(source, torch.Tensor)
    array = source.detach().cpu().numpy() if tensor else np.asarray(source)
    require(array.ndim == 2, "source", KNOWN, describe(source), error=TypeError)
    (high, wide), kind = array.shape, array.dtype.kind
    if high == 2 and kind in "iu" and (wide > 3 or (wide == 3 and tensor)):
        return _edges_of(array[0], array[1], None, rules, name)
    if high == wide or wide not in (2, 3):
        got = str(array.dtype)
        require(kind in "iufcb", "an adjacency matrix", "hold numbers", got, error=TypeError)
        return _matrix(array, rules, name)
    if kind not in "iufb":
        return _edges([tuple(row) for row in array.tolist()], rules, name)
    weights = array[:, 2] if wide == 3 else None
    return _edges_of(array[:, 0], array[:, 1], weights, rules, name)


def _apply_rules(source: Graph, rules: Rules, name: str) -> Graph:
    """A graph by other rules: without its loops, or its weights."""
    looped = rules.loops == "drop" and bool(source.adjacency.diagonal().any())
    if rules.weighted and not looped:
        return source if name == source.name else Graph(source.adjacency, source.names, name)
    upper = scipy.sparse.triu(source.adjacency, format="coo")
    chunk: Chunk = upper.row, upper.col, upper.data
    matrix, _ = adjacency_of([chunk], rules, len(source), directed=False)
    return Graph(matrix, source.names, name)


def _file(path: Path, format: str | None, rules: Rules, name: str | None) -> Graph:
    fine = path.is_file()
    require(fine, "source", "name a file", f"{path} ({why_not(path)})", "", FileNotFoundError)
    plain = path.with_suffix("") if path.suffix in PACKED else path
    if format is not None:
        require_choice(format, "format", FORMATS)
    try:
        return _read(path, format or _kind(path, plain.suffix.lower()), rules, name or plain.stem)
    except MemoryError:
        raise
    except Exception as error:  # libraries that read damaged and hostile files fail in a dozen ways
        system = isinstance(error, OSError) and error.errno is not None
        if system or (isinstance(error, ValueError) and path.name in str(error)):
            raise
        raise ValueError(
            f"{path.name} cannot be read: {' '.join(str(error).split())[:400]}"
        ) from error


def _read(path: Path, kind: str, rules: Rules, name: str) -> Graph:
    """A file of a known format."""
    if kind in ("graphml", "gexf", "pajek"):
        return _by_networkx(path, kind, rules, name)
    if kind == "json":
        return _json(path, rules, name)
    if kind == "npy":
        errors = ValueError, EOFError, OSError, MemoryError
        with open_bytes(path) as stream, _readable(path, "a file of numpy.save", *errors):
            array = np.load(stream, allow_pickle=False)
        return _array(array, rules, name)
    if kind == "mtx":
        return _market(path, rules, name)
    if kind == "npz":
        return _matrix(_sparse(path), rules, name)
    if kind == "gml":
        labels, edges, one_way = gml(path)
        matrix, _ = adjacency_of([edges], rules, len(labels), one_way)
        return Graph(matrix, np.array(labels), name)
    chunks, table = edge_list(path, rules.weighted)
    matrix, names = adjacency_of(chunks, rules)
    return Graph(matrix, table.names if table else names, name)


@contextlib.contextmanager
def _readable(path: Path, kind: str, *errors: type[Exception]) -> Iterator[None]:
    """Raise what a library raises as an error that names the file and what it must be."""
    try:
        yield
    except errors as error:
        raise ValueError(f"{path.name} must be {kind}, got another: {error}") from error


def _kind(path: Path, suffix: str) -> str:
    """The format of a file by its suffix, else by its first bytes."""
    expected = f"be a file in one of the formats {', '.join(FORMATS)}"
    cure = (
        "read it with its own library, and pass a networkx graph, a matrix "
        'or edges; or pass format="edges" if it is a list of edges'
    )
    require(suffix not in UNREAD, "source", expected, f"{path.name} ({UNREAD.get(suffix)})", cure)
    if suffix in SUFFIXES:
        return SUFFIXES[suffix]
    with open_bytes(path) as stream:
        head = stream.read(HEAD_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    kind = next((kind for start, kind in SIGNATURES if head.startswith(start)), "edges")
    if kind != "xml":
        return kind
    dialect = next((kind for kind in ("graphml", "gexf") if f"<{kind}".encode() in head), None)
    require(dialect is not None, "source", "be GraphML or GEXF if it is XML", path.name)
    return str(dialect)


def _by_networkx(path: Path, kind: str, rules: Rules, name: str) -> Graph:
    """Read GraphML, GEXF or Pajek; GEXF's labels name the nodes if they are unique."""
    import networkx as nx

    errors = nx.NetworkXException, SyntaxError, ValueError, KeyError, TypeError, IndexError
    with open_bytes(path) as stream, _readable(path, f"a {kind} file", *errors):
        made = getattr(nx, f"read_{kind}")(stream)
    labels = {node: data.get("label") for node, data in made.nodes(data=True)}
    if kind == "gexf" and None not in labels.values() and len(set(labels.values())) == len(labels):
        made = nx.relabel_nodes(made, labels)
    if kind == "pajek":
        with open_text(path) as text:
            declared = re.search(r"(?im)^[^\S\n]*\*vertices\s+(\d+)", text.read())
        count = int(declared.group(1)) if declared else len(made)
        got = f"{count} vertices with {len(made)} labels"
        cure = "number the labels that occur twice"
        require(count == len(made), "every Pajek vertex", "have a label of its own", got, cure)
    return _networkx(made, rules, name)


def _json(path: Path, rules: Rules, name: str) -> Graph:
    """Read node-link, adjacency or Cytoscape data as networkx writes it, or a list of edges."""
    import networkx as nx

    forms = "node-link, adjacency or Cytoscape data as networkx writes them, or a list of edges"
    errors = nx.NetworkXException, ValueError, KeyError, TypeError, IndexError, AttributeError
    with open_text(path) as stream, _readable(path, f"JSON with {forms}", *errors):
        document = json.load(stream)
        if isinstance(document, list):
            edges = [tuple(row) for row in document]
            require(bool(edges), "a list of edges", "hold one", "none")
            return _edges(edges, rules, name)
        key = next((key for key in ("links", "edges") if key in document), None)
        if "nodes" in document and key is not None:
            made = nx.node_link_graph(document, edges=key)
        elif "adjacency" in document:
            made = nx.adjacency_graph(document)
        elif "elements" in document:
            made = nx.cytoscape_graph(document)
        else:
            raise ValueError(f"keys {', '.join(sorted(document)[:6])}")
    return _networkx(made, rules, name, ("weight", "value"))


def _pyg(source: Any, rules: Rules, name: str) -> Graph:
    """Read PyG's ``Data``: ``edge_index`` (2, m), ``edge_weight`` (m,) if any, ``num_nodes``."""
    index, weights = (getattr(source, key, None) for key in ("edge_index", "edge_weight"))
    cure = "pass one edge type of a HeteroData"
    require(index is not None, "source.edge_index", "be a tensor (2, m)", "None", cure, TypeError)
    pairs = np.asarray(index.detach().cpu() if isinstance(index, torch.Tensor) else index)
    fits = pairs.ndim == 2 and len(pairs) == 2 and pairs.dtype.kind in "iu"
    require(fits, "source.edge_index", "be whole numbers (2, m)", describe(index), error=TypeError)
    if weights is not None:
        plain = weights.detach().cpu() if isinstance(weights, torch.Tensor) else weights
        weights = np.asarray(plain, dtype=np.float64)
        fine = weights.shape == pairs.shape[1:]
        require(fine, "source.edge_weight", f"have shape ({pairs.shape[1]},)", describe(weights))
    count = max(int(getattr(source, "num_nodes", 0) or 0), int(pairs.max(initial=-1)) + 1)
    low = int(pairs.min(initial=0))
    require(low >= 0, "the nodes", "have numbers of at least 0", str(low))
    matrix, _ = adjacency_of([(*pairs.astype(np.int64), weights)], rules, count)
    return Graph(matrix, None, name)


def _sparse(path: Path) -> Any:
    errors = ValueError, KeyError, OSError, MemoryError, zipfile.BadZipFile
    with open_bytes(path) as stream, _readable(path, "a file of scipy.sparse.save_npz", *errors):
        if path.suffix not in PACKED:  # of others the stream itself is bounded
            require_modest(path)
        matrix = scipy.sparse.load_npz(stream)
        # of CSR, CSC and BSR the conversion trusts where rows begin
        if hasattr(matrix, "check_format"):
            matrix.check_format(full_check=True)
    _require_nodes(max(matrix.shape), path)
    return matrix


def _market(path: Path, rules: Rules, name: str) -> Graph:
    """A Matrix Market file; its own header says whether it is symmetric."""
    header = market_header(path)
    size = unpacked_size(path.stat().st_size) if path.suffix in PACKED else path.stat().st_size
    fine = ENTRY_BYTES * header.entries <= size
    expected = "hold as many entries as its header says"
    require(fine, path.name, expected, f"{header.entries:,} in {size:,} bytes")
    fine = header.rows == header.columns
    cure = "for edges pass tuples, or an array (m, 2)"
    require(fine, "an adjacency matrix", "be square", f"shape {header.rows, header.columns}", cure)
    if not header.dense:
        _require_nodes(header.rows, path)
    matrix, _ = adjacency_of(market_entries(path, header), rules, header.rows)
    return Graph(matrix, None, name)


def _require_nodes(count: int, path: Path) -> None:
    """Refuse a sparse matrix with so many rows that isolated nodes would fill the memory."""
    most = unpacked_size(path.stat().st_size) // NODE_BYTES
    expected = f"have at most {most:,} nodes, for its size"
    require(count <= most, path.name, expected, f"{count:,}", "take out the isolated nodes")


def _matrix(matrix: Any, rules: Rules, name: str) -> Graph:
    """An adjacency matrix, dense or sparse: its entries are the edges, each in its direction."""
    shape = tuple(matrix.shape)
    fine = len(shape) == 2 and shape[0] == shape[1]
    cure = "for edges pass tuples, or an array (m, 2)"
    require(fine, "an adjacency matrix", "be square", f"shape {shape}", cure)
    require(not np.iscomplexobj(matrix), "an adjacency matrix", "be real", str(matrix.dtype))
    entries = scipy.sparse.coo_array(matrix)
    chunk: Chunk = entries.row, entries.col, entries.data.astype(np.float64)
    adjacency, _ = adjacency_of([chunk], rules, shape[0])
    return Graph(adjacency, None, name)


def _rows(source: Any, rules: Rules, name: str) -> Graph:
    """Read nested sequences: tuples are edges; lists are edges or an adjacency matrix."""
    rows = list(source) if isinstance(source, Iterable) else []
    sizes = {len(row) if isinstance(row, tuple | list) else -1 for row in rows}
    require(len(sizes) == 1 and -1 not in sizes, "source", KNOWN, describe(source), error=TypeError)
    (wide,) = sizes
    listed = not any(isinstance(row, tuple) for row in rows)
    if wide in (2, 3):
        clear = not listed or wide != len(rows)
        expected = "say whether it holds edges or a matrix"
        cure = "pass tuples for edges, np.array(source) for a matrix"
        require(clear, "source", expected, f"{wide} lists of {wide}", cure)
        return _edges([tuple(row) for row in rows], rules, name)
    expected = "be a tuple (from, to) or (from, to, weight)"
    got = describe(rows[0])
    require(listed, "an edge", expected, got, "for a matrix pass np.array(source)", TypeError)
    return _array(np.array(rows), rules, name)


def _edges(rows: list[tuple[Any, ...]], rules: Rules, name: str) -> Graph:
    """Edges between numbers, or between names, which are numbered as they come."""
    weights = None if len(rows[0]) == 2 else [require_number(row[2], "the weights") for row in rows]
    nodes = [node for row in rows for node in row[:2]]
    texts = [isinstance(node, str) for node in nodes]
    fine = all(texts) or not any(texts)
    require(fine, "the nodes", "be all whole numbers, or all names", "both", error=TypeError)
    if not any(texts):
        numbers = np.array([require_number(node, "the nodes") for node in nodes])
        return _edges_of(numbers[::2], numbers[1::2], weights, rules, name)
    table: dict[str, int] = {}
    places = np.array([table.setdefault(node, len(table)) for node in nodes])
    made = _edges_of(places[::2], places[1::2], weights, rules, name)
    kept = list(table) if made.names is None else [list(table)[i] for i in made.names]
    return Graph(made.adjacency, np.array(kept, dtype=object), name)


def _edges_of(first: Any, second: Any, weights: Any, rules: Rules, name: str) -> Graph:
    """Edges between numbers, (m,) each."""
    nodes = np.stack([first, second])
    if nodes.dtype.kind == "f":
        whole = bool((nodes == np.floor(nodes)).all() and np.isfinite(nodes).all())
        cure = "give weights as a third column"
        require(whole, "the nodes of pairs", "be whole numbers", "fractions or NaN", cure)
    low = int(nodes.min(initial=0))
    expected = "have numbers of at least 0"
    require(low >= 0, "the nodes", expected, str(low), "name them by text if these are names")
    heavy = None if weights is None else np.asarray(weights, dtype=np.float64)
    matrix, names = adjacency_of([(*nodes.astype(np.int64, copy=False), heavy)], rules)
    return Graph(matrix, names, name)


def require_number(value: Any, name: str) -> Any:
    """A real number, or text that is one."""
    real = isinstance(value, numbers.Real | np.bool_)
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return float(value)
    require(real, name, "be numbers", repr(value), error=TypeError)
    return value


def _networkx(source: Any, rules: Rules, name: str, keys: tuple[str, ...] = ("weight",)) -> Graph:
    """Read a networkx graph; the first of ``keys`` that an edge has is the weight of all."""
    place = {node: i for i, node in enumerate(source)}
    used = [key for key in keys if any(key in data for _, _, data in source.edges(data=True))]
    count = source.number_of_edges()
    ends: Iterable[int] = (place[node] for u, v in source.edges() for node in (u, v))
    pairs = np.fromiter(ends, dtype=np.int64, count=2 * count).reshape(-1, 2)
    weights = None
    if rules.weighted and used:
        given = (weight for _, _, weight in source.edges(data=used[0], default=1.0))
        weights = np.array([require_number(weight, "the weights") for weight in given], np.float64)
    chunk: Chunk = pairs[:, 0], pairs[:, 1], weights
    matrix, _ = adjacency_of([chunk], rules, len(place), source.is_directed())
    plain = all(node == i for node, i in place.items())
    return Graph(matrix, None if plain else np.array([str(node) for node in place]), name)
