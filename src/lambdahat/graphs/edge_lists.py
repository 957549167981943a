"""Edges from text: lists separated by spaces, tabs or commas (SNAP, CSV), and GML."""

from __future__ import annotations

import ast
import bz2
import csv
import gzip
import io
import itertools
import lzma
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.dtypes import StringDType
from numpy.typing import NDArray

from lambdahat._core.check import describe, require
from lambdahat._core.progress import report
from lambdahat._core.storage import bounded_stream
from lambdahat.graphs.structure import Chunk

SLOTS = 1 << 10  # at first; a power of two, so that a mask gives the slot
PIECE = 1 << 14  # names hashed again at once when the table grows


class NameTable:
    """Numbers names as they come, a few thousand at a time.

    A name takes 16 bytes, including its text up to 15 bytes, and one to three slots of 4 bytes in a
    table of open addressing. The hash is Python's and differs from run to run; the numbers do not.
    """

    # Written by hand because reading must not take twice the memory of the graph. Two million
    # edges between 400,000 names, peak over graph: 1.48 here; 2.12 with a dict; 2.11 with
    # pandas.Index, or 2.79 if pandas is not imported yet (and twice the time).

    def __init__(self) -> None:
        self._count = 0
        self._text: NDArray[Any] = np.empty(0, dtype=StringDType())
        self._slots = np.full(SLOTS, -1, dtype=np.int32)

    def __len__(self) -> int:
        return self._count

    @property
    def names(self) -> NDArray[Any]:
        """The names by number, (n,)."""
        return self._text[: self._count]

    def numbers(self, names: Collection[str]) -> NDArray[np.int32]:
        """The number of each distinct name, (k,); new names are numbered in order."""
        text = np.array(list(names), dtype=StringDType())
        hashes = _hashes(names)
        numbers = np.full(len(text), -1, dtype=np.int32)
        mask = len(self._slots) - 1
        left, slots = np.arange(len(text)), hashes & mask
        while len(left):  # linear probing
            held = self._slots[slots]
            taken = held >= 0
            left, slots, held = left[taken], slots[taken], held[taken]
            same = self._text[held] == text[left]
            numbers[left[same]] = held[same]
            left, slots = left[~same], (slots[~same] + 1) & mask
        new = np.flatnonzero(numbers < 0)
        added = np.arange(self._count, self._count + len(new), dtype=np.int32)
        self._reserve(self._count + len(new))
        self._text[added], numbers[new] = text[new], added
        self._count += len(new)
        self._insert(added, hashes[new])
        return numbers

    def close(self) -> None:
        """Free all but the names: none is looked up any more."""
        self._text, self._slots = self.names.copy(), np.empty(0, dtype=np.int32)

    def _insert(self, numbers: NDArray[np.int32], hashes: NDArray[np.int64]) -> None:
        mask = len(self._slots) - 1
        left, slots = numbers, hashes & mask
        while len(left):
            free = self._slots[slots] < 0
            self._slots[slots[free]] = left[free]  # where several want one slot, the last gets it
            out = self._slots[slots] != left
            left, slots = left[out], (slots[out] + 1) & mask

    def _reserve(self, count: int) -> None:
        """Room for that many names, and slots of which a third stay free."""
        if count > len(self._text):
            longer = np.empty(max(count, len(self._text) * 5 // 4), dtype=self._text.dtype)
            longer[: self._count] = self.names
            self._text = longer
        if 3 * count > 2 * len(self._slots):
            self._slots = np.full(1 << (3 * count // 2).bit_length(), -1, dtype=np.int32)
            for first in range(0, self._count, PIECE):
                part = self.names[first : first + PIECE]
                numbers = np.arange(first, first + len(part), dtype=np.int32)
                self._insert(numbers, _hashes(part.tolist()))


def _hashes(names: Collection[str]) -> NDArray[np.int64]:
    return np.fromiter(map(hash, names), dtype=np.int64, count=len(names))


CHUNK_ROWS = 1 << 12
MOST_DIGITS = 30  # of the number of a node; 64 bits hold 19
COMMENTS = ("#", "%", "//")
PACKED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
DATA = re.compile(r"\{.*\}$")
QUOTED = re.compile(r'"([^"]*)"|(\S+)')
WORDS = (
    "from|to|source|target|src|dst|tgt|node|vertex|start|end|head|tail|user|person|id|name|label"
)
HEADER = re.compile(
    rf"({WORDS})([ _-]?(node|vertex|id|name|label))*[ _-]?(\d*|[ab])", re.IGNORECASE
)
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
MARKET_FIELDS = ("real", "double", "integer", "unsigned-integer", "pattern")
MARKET_SIGNS = {"general": 0, "symmetric": 1, "skew-symmetric": -1}
LONG_LINE = 1 << 12
GML_TOKEN = re.compile(r'"[^"]*"|\[|\]|[^\s\[\]"]+')


def open_bytes(path: Path) -> IO[bytes]:
    """Open a binary file, packed or not; one that unpacks to far more than its size is refused."""
    opener: Any = PACKED.get(path.suffix)
    return path.open("rb") if opener is None else bounded_stream(opener(path, "rb"), path)


def open_text(path: Path) -> IO[str]:
    r"""Open a text file, packed or not; bytes that are not UTF-8 are read as \xNN."""
    return io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", errors="backslashreplace")


@dataclass(frozen=True)
class _Layout:
    """The layout of an edge list, read off its first two rows: separator and columns."""

    separator: str | None
    header: bool
    numbered: bool
    heavy: bool
    wide: int
    data: bool = False  # a third column of dicts, as networkx writes them

    @property
    def needed(self) -> int:
        return 3 if self.heavy else 2


def edge_list(path: Path, weighted: bool) -> tuple[Iterator[Chunk], NameTable]:
    """Chunks (from, to, weight or None) of an edge list, and its names, filled as they are read.

    Nodes that are not numbers are numbered 0, 1, … as they come. A header is left out: a first row
    of words above numbers or above a column of weights, or of words such as "source" and "target".
    In a third column of dicts, as ``networkx.write_edgelist`` writes it, "weight" is the weight, by
    default 1.
    """
    table = NameTable()
    return _chunks(path, _layout(path, weighted), table), table


def _layout(path: Path, weighted: bool) -> _Layout:
    """The layout of an edge list, from its first two rows."""
    with open_text(path) as stream:
        head = list(itertools.islice(_rows(stream), 2))
    require(bool(head), "the file", "hold edges", f"{path.name}, without a row of data")
    data = any(DATA.search(row) for row in head)
    last = DATA.sub("", head[-1]).strip()
    # the one that splits a row into two numbers, else the one least likely in names
    splits = (mark for mark in (None, ";", ",") if _numbers(_cells(last, mark)[:2]))
    separator = next(splits, next((mark for mark in ("\t", ";", ",") if mark in last), None))
    cells = [_data_cells(row, separator) if data else _cells(row, separator) for row in head]
    header = _is_header(cells[0], cells[-1])
    first = cells[1] if header else cells[0]
    wide = len(first)
    expected = "hold two nodes and perhaps a weight"
    cure = "a missing column, or another separator than spaces, tabs, commas, semicolons?"
    require(wide >= 2, "a row of the file", expected, describe(head[-1]), cure)
    known = wide == 2 or (wide == 3 and (data or _number(first[2]))) or not weighted
    cure = (
        "write weights with a decimal point, or pass weighted=False to take the first two columns"
    )
    require(known, "a row of the file", expected, describe(head[-1]), cure)
    return _Layout(separator, header, _numbers(first[:2]), weighted and wide == 3, wide, data)


def _rows(stream: IO[str]) -> Iterator[str]:
    """The rows that are neither empty nor comments."""
    for line in stream:
        text = line.strip()
        if text and not text.startswith(COMMENTS):
            yield text


def _cells(row: str, separator: str | None) -> list[str]:
    """The cells of a row; those in quotes may hold the separator."""
    if '"' not in row:
        return [cell.strip() for cell in row.split(separator)]
    if separator is None:
        return [quoted or plain for quoted, plain in QUOTED.findall(row)]
    return [
        cell.strip() for cell in next(csv.reader([row], delimiter=separator, skipinitialspace=True))
    ]


def _data_cells(row: str, separator: str | None) -> list[str]:
    """Two nodes and a dict, in which the separator may occur."""
    data = DATA.search(row)
    ends = _cells(DATA.sub("", row).rstrip().rstrip(separator), separator)
    return [*ends, data.group()] if data else ends


def _is_header(first: list[str], second: list[str]) -> bool:
    # an edge, or at least no column has its name there
    if any(_number(cell) for cell in first[:2]):
        return False
    if _numbers(second[:2]):
        return True
    above_weights = len(first) == len(second) == 3 and not _number(first[2]) and _number(second[2])
    named = [[HEADER.fullmatch(cell) is not None for cell in row[:2]] for row in (first, second)]
    # "node1, node2" above "node2, node3" is an edge
    return above_weights or (sum(named[0]) == 2 and not any(named[1]))


def _number(text: str) -> bool:
    return NUMBER.fullmatch(text) is not None


def _numbers(cells: list[str]) -> bool:
    """Whether two cells are whole numbers, in any notation: 7, -7, +7, 7.0, 7e3."""
    return len(cells) == 2 and all(_number(cell) and float(cell).is_integer() for cell in cells)


def _whole(text: str) -> int:
    """The number of a node in any notation, without rounding digits away."""
    text = text.strip().strip('"')
    # a Fraction writes 1e99999999 out in full
    value = Decimal(text) if _number(text) else Decimal("NaN")
    if value.is_finite() and value.adjusted() <= MOST_DIGITS and value == value.to_integral_value():
        return int(value)
    raise ValueError(f"the node {describe(text)}, which is no whole number as those before it are")


def _chunks(path: Path, layout: _Layout, table: NameTable) -> Iterator[Chunk]:
    """The rows as arrays, with an error that says which row is wrong."""
    number: Any = np.int64 if layout.numbered else np.int32
    kind = [("u", number), ("v", number), ("w", np.float64)][: layout.needed]
    read, done = _numbers_of if layout.numbered else _names_of, 0
    with open_text(path) as stream:
        rows = _rows(stream)
        if layout.header:
            next(rows)
        for part in _batches(rows):
            try:
                edges = read(part, kind, layout, table)
            except ValueError as error:
                raise ValueError(
                    f"{path.name} must hold"
                    f" {'two nodes and a weight' if layout.heavy else 'two nodes'} in every row,"
                    f" got another row after {done:,} rows: {error}"
                ) from None
            done += len(edges)
            report("edges read", done)
            yield edges["u"].copy(), edges["v"].copy(), edges["w"].copy() if layout.heavy else None
    table.close()


def _batches(rows: Iterator[str]) -> Iterator[Iterator[str]]:
    """The rows in runs; a run is an iterator, so that no list of its lines is made."""
    for first in rows:
        yield itertools.chain([first], itertools.islice(rows, CHUNK_ROWS - 1))


def _numbers_of(rows: Iterator[str], kind: Any, layout: _Layout, table: NameTable) -> Any:
    if layout.data:
        edges = []
        for row in rows:
            cells = _data_cells(row, layout.separator)
            if len(cells) != 3:
                raise ValueError(describe(row))
            ends = _whole(cells[0]), _whole(cells[1])
            edges.append((*ends, _weight(cells[2])) if layout.heavy else ends)
        return np.array(edges, dtype=kind)
    lines = list(rows)
    columns = None if layout.wide == len(kind) else range(len(kind))
    form: dict[str, Any] = {"delimiter": layout.separator, "quotechar": '"', "usecols": columns}
    read = partial(np.loadtxt, lines, dtype=kind, comments=None, ndmin=1, **form)
    try:
        return read()
    except ValueError:
        if not any(mark in line for line in lines for mark in ".eE"):
            raise
        return read(converters={0: _whole, 1: _whole})  # 1e3 and 2.0, which int64 refuses


def _names_of(rows: Iterator[str], kind: Any, layout: _Layout, table: NameTable) -> Any:
    """Number names by ``table``; a dict, fast but large, is kept only for the rows at hand."""
    needed, local = layout.needed, dict[str, int]()

    def edges() -> Iterator[tuple[float, ...]]:
        for row in rows:
            cells = (
                _data_cells(row, layout.separator) if layout.data else _cells(row, layout.separator)
            )
            fits = len(cells) == needed if layout.wide == needed else len(cells) >= needed
            if not fits or not cells[0] or not cells[1]:
                raise ValueError(describe(row))
            ends = local.setdefault(cells[0], len(local)), local.setdefault(cells[1], len(local))
            if layout.heavy:
                yield (*ends, _weight(cells[2]) if layout.data else float(cells[2]))
            else:
                yield ends

    made = np.fromiter(edges(), dtype=kind)
    numbers = table.numbers(local)
    made["u"], made["v"] = numbers[made["u"]], numbers[made["v"]]
    return made


def _weight(data: str) -> float:
    """The weight in a dict as Python writes it."""
    try:
        return float(ast.literal_eval(data).get("weight", 1.0))
    # the last two if nested deeply
    except (SyntaxError, TypeError, AttributeError, RecursionError, MemoryError) as error:
        raise ValueError(f"{describe(data)} ({error})") from None


@dataclass(frozen=True)
class MarketHeader:
    """The header of a Matrix Market file; ``entries`` are those in the file."""

    rows: int
    columns: int
    entries: int
    dense: bool
    pattern: bool
    sign: int  # of the entries on the other side of the diagonal, 0 where they are in the file


def market_header(path: Path) -> MarketHeader:
    """The first lines of a Matrix Market file.

    SciPy's reader is not used: it allocates what the header says, and damaged files can end the
    process.
    """
    with open_text(path) as stream:
        banner, rows = stream.readline(LONG_LINE).lower().split(), _rows(stream)
        sizes = next(rows, "").split()
    begins = banner[:2] == ["%%matrixmarket", "matrix"] and len(banner) == 5
    expected = "begin with %%MatrixMarket matrix and three words"
    require(begins, path.name, expected, describe(" ".join(banner)))
    layout, field, symmetry = banner[2:]
    known = (
        layout in ("coordinate", "array") and field in MARKET_FIELDS and symmetry in MARKET_SIGNS
    )
    fine = "complex" not in banner and "hermitian" not in banner
    require(fine, "the matrix", "be real", "a complex one")
    dense = layout == "array"
    fine = known and not (dense and field == "pattern")
    require(fine, path.name, "be a Matrix Market file of a known kind", describe(" ".join(banner)))
    whole = len(sizes) == 3 - dense and all(re.fullmatch("[0-9]{1,18}", size) for size in sizes)
    expected = f"say its {'two' if dense else 'three'} sizes in whole numbers"
    require(whole, path.name, expected, describe(" ".join(sizes)))
    (height, width, *given), sign = [int(size) for size in sizes], MARKET_SIGNS[symmetry]
    if dense:
        given = [height * width if sign == 0 else height * (height + sign) // 2]
    return MarketHeader(height, width, given[0], dense, field == "pattern", sign)


def market_entries(path: Path, header: MarketHeader) -> Iterator[Chunk]:
    """Yield (row, column, weight or None) of the entries, on both sides of the diagonal."""
    if header.dense:
        values = [chunk["w"] for chunk in _market_rows(path, header, [("w", np.float64)])]
        # row by row above is column by column below
        lower = np.triu_indices(header.rows, (1 - header.sign) // 2)
        places = (
            np.indices((header.columns, header.rows)).reshape(2, -1) if header.sign == 0 else lower
        )
        w = np.concatenate([np.empty(0), *values])
        yield from _both_sides(places[1][w != 0], places[0][w != 0], w[w != 0], header.sign)
        return
    kind: list[tuple[str, Any]] = [("u", np.int64), ("v", np.int64), ("w", np.float64)]
    for chunk in _market_rows(path, header, kind[: 3 - header.pattern]):
        u, v = chunk["u"] - 1, chunk["v"] - 1
        inside = min(u.min(), v.min()) >= 0 and u.max() < header.rows and v.max() < header.columns
        require(bool(inside), path.name, f"have rows and columns 1 to {header.rows:,}", "another")
        yield from _both_sides(u, v, None if header.pattern else chunk["w"].copy(), header.sign)


def _market_rows(path: Path, header: MarketHeader, kind: list[tuple[str, Any]]) -> Iterator[Any]:
    """The rows below the header as structured arrays: as many as it says."""
    done = 0
    with open_text(path) as stream:
        stream.readline()
        rows = _rows(stream)
        next(rows)
        for part in _batches(rows):
            try:
                chunk = np.loadtxt(part, dtype=kind, comments=None, ndmin=1)
            except ValueError as error:
                raise ValueError(
                    f"{path.name} must hold {len(kind)} numbers in every row, got another row after"
                    f" {done:,} rows: {error}"
                ) from None
            done += len(chunk)
            report("entries read", done)
            yield chunk
    fine = done == header.entries
    require(fine, path.name, f"hold {header.entries:,} entries, as its header says", f"{done:,}")


def _both_sides(u: Any, v: Any, w: Any, sign: int) -> Iterator[Chunk]:
    """The entries with their mirror images if symmetric (``sign`` 1) or skew-symmetric (−1)."""
    yield u, v, w
    other = u != v
    if sign and other.any():
        yield v[other], u[other], None if w is None else sign * w[other]


def gml(path: Path) -> tuple[list[str], Chunk, bool]:
    """The nodes' labels in the order of the file, the edges, and whether they are directed.

    An edge's "weight", or else "value", is its weight. networkx's reader refuses repeated edges,
    unquoted labels and text beyond ASCII, which files in use have.
    """
    with open_text(path) as stream:
        items = _gml_items(iter(GML_TOKEN.findall(re.sub(r"(?m)^[^\S\n]*#.*$", "", stream.read()))))
    graphs = [value for key, value in items if key == "graph" and isinstance(value, list)]
    require(len(graphs) == 1, "the file", "hold one GML graph", f"{path.name} with {len(graphs)}")
    nodes = _records(graphs[0], "node", "id")
    edges = _records(graphs[0], "edge", "source", "target")
    place = {node["id"]: i for i, node in enumerate(nodes)}
    fine = len(place) == len(nodes)
    require(fine, "every GML node", "have an id of its own", f"{len(nodes)} with {len(place)} ids")
    ends = [[place.get(edge[key], -1) for edge in edges] for key in ("source", "target")]
    known = all(i >= 0 for side in ends for i in side)
    require(known, "every GML edge", "join nodes of the file", "one that names another")
    u, v = (np.array(side, dtype=np.int64) for side in ends)
    labels = [str(node.get("label", node["id"])) for node in nodes]
    return labels, (u, v, _gml_weights(edges)), dict(graphs[0]).get("directed") == "1"


def _records(items: list[tuple[str, Any]], key: str, *fields: str) -> list[dict[str, Any]]:
    """The records in brackets after every ``key``."""
    values = [value for name, value in items if name == key]
    plain = [value for value in values if not isinstance(value, list)]
    require(not plain, f"every GML {key}", "stand in brackets", f"{key} {''.join(plain[:1])}")
    records = [dict(value) for value in values]
    whole = all(field in record for record in records for field in fields)
    expected = f"have {'an ' if len(fields) == 1 else ''}{' and '.join(fields)}"
    require(whole, f"every GML {key}", expected, "one without")
    return records


def _gml_weights(edges: list[dict[str, Any]]) -> NDArray[np.float64] | None:
    """The attribute that any edge has; an edge without it has weight 1."""
    key = next((key for key in ("weight", "value") if any(key in edge for edge in edges)), None)
    if key is None:
        return None
    try:
        return np.array([float(edge.get(key, 1.0)) for edge in edges])
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the weights must be numbers, got {error}; take {key!r} out of the file"
        ) from None


def _gml_items(tokens: Iterator[str]) -> list[tuple[str, Any]]:
    """key value pairs up to a closing bracket; a value in brackets is such a list itself."""
    items: list[tuple[str, Any]] = []
    for key in tokens:
        if key == "]":
            break
        value = next(tokens, "]")
        require(value != "]", "GML", "hold a value for every key", f"none for {key!r}")
        items.append((key, _gml_items(tokens) if value == "[" else value.strip('"')))
    return items
