"""Edges from text: lists separated by spaces, tabs or commas (SNAP, CSV), and GML."""

from __future__ import annotations

import bz2
import gzip
import itertools
import lzma
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from lambdahat._check import require
from lambdahat._progress import report
from lambdahat.graphs.edges import Chunk

CHUNK_ROWS = 1 << 20
COMMENTS = ("#", "%", "//")
PACKED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
GML_TOKEN = re.compile(r'"[^"]*"|\[|\]|[^\s\[\]"]+')


def open_text(path: Path) -> IO[str]:
    """A text file, packed or not."""
    opener: Any = PACKED.get(path.suffix, open)
    return opener(path, "rt", encoding="utf-8", errors="replace")  # type: ignore[no-any-return]


def edge_list(path: Path, weighted: bool) -> Iterator[Chunk]:
    """Chunks of a million rows (from, to, weight or None); names that are not numbers come as text.

    A first row that is no edge, such as the header of a CSV file, is left out if the second is one.
    """
    with open_text(path) as stream:
        head = list(itertools.islice(_rows(stream), 2))
    require(bool(head), "the file", "hold edges", f"{path.name}, without a row of data")
    separator = next((mark for mark in (",", ";") if mark in head[0]), None)
    cells = [[cell.strip().strip('"') for cell in row.split(separator)] for row in head]
    header = len(cells) > 1 and not _numbers(cells[0][:2]) and _numbers(cells[1][:2])
    first = cells[1] if header else cells[0]
    wide = len(first)
    require(wide >= 2, "a row of the file", "hold two nodes and perhaps a weight", repr(head[-1]),
            "a missing column, or another separator than spaces, tabs, commas, semicolons?")  # fmt: skip
    known = wide == 2 or (wide == 3 and (first[2] == "{}" or _number(first[2]))) or not weighted
    require(known, "a row of the file", "hold two nodes and perhaps a weight", repr(head[-1]),
            "pass weighted=False to take the first two columns")  # fmt: skip
    heavy = weighted and wide == 3 and first[2] != "{}"
    with open_text(path) as stream:
        rows = _rows(stream)
        if header:
            next(rows)
        yield from _parsed(rows, path, separator, _numbers(first[:2]), heavy, wide)


def _rows(stream: IO[str]) -> Iterator[str]:
    """The rows that are neither empty nor comments."""
    for line in stream:
        text = line.strip()
        if text and not text.startswith(COMMENTS):
            yield text


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _numbers(cells: list[str]) -> bool:
    return len(cells) == 2 and all(re.fullmatch(r"\d+", cell) for cell in cells)


def _parsed(
    rows: Iterator[str], path: Path, separator: str | None, integers: bool, heavy: bool, wide: int
) -> Iterator[Chunk]:
    """The rows as arrays, with an error that says which row is wrong."""
    kind: Any = [("u", np.int64), ("v", np.int64)] if integers else [("u", "U64"), ("v", "U64")]
    kind = [*kind, ("w", np.float64)] if heavy else kind
    done = 0
    for part in _batches(rows):
        try:
            table = np.loadtxt(part, dtype=kind, delimiter=separator, comments=None, quotechar='"', ndmin=1,
                               usecols=None if wide == len(kind) else range(len(kind)))  # fmt: skip
        except ValueError as error:
            raise ValueError(f"{path.name} must hold {'two nodes and a weight' if heavy else 'two nodes'} in every "
                             f"row, got another row after {done:,} rows: {error}") from None  # fmt: skip
        done += len(table)
        report("edges read", done)
        yield table["u"].copy(), table["v"].copy(), table["w"].copy() if heavy else None


def _batches(rows: Iterator[str]) -> Iterator[Iterator[str]]:
    """The rows in runs of a million; a run is an iterator, so that no list of its lines is made."""
    for first in rows:
        yield itertools.chain([first], itertools.islice(rows, CHUNK_ROWS - 1))


def gml(path: Path) -> tuple[list[str], Chunk, bool]:
    """The nodes' labels in the order of the file, the edges by place in it, and whether they are directed.

    An edge's "weight", or else "value", is its weight.
    """
    with open_text(path) as stream:
        items = _gml_items(iter(GML_TOKEN.findall(re.sub(r"(?m)^\s*#.*$", "", stream.read()))))
    graphs = [value for key, value in items if key == "graph" and isinstance(value, list)]
    require(len(graphs) == 1, "the file", "hold one GML graph", f"{path.name} with {len(graphs)}")
    nodes = [dict(value) for key, value in graphs[0] if key == "node"]
    edges = [dict(value) for key, value in graphs[0] if key == "edge"]
    require(all("id" in node for node in nodes), "every GML node", "have an id", path.name)
    require(all("source" in e and "target" in e for e in edges), "every GML edge", "have source and target", path.name)
    place = {node["id"]: i for i, node in enumerate(nodes)}
    ends = [[place.get(edge[key], -1) for edge in edges] for key in ("source", "target")]
    known = all(i >= 0 for side in ends for i in side)
    require(known, "every GML edge", "join nodes of the file", "one that names another")
    key = next((key for key in ("weight", "value") if edges and key in edges[0]), None)
    weights = None if key is None else np.array([float(edge.get(key, 1.0)) for edge in edges])
    u, v = (np.array(side, dtype=np.int64) for side in ends)
    labels = [str(node.get("label", node["id"])) for node in nodes]
    return labels, (u, v, weights), dict(graphs[0]).get("directed") == "1"


def _gml_items(tokens: Iterator[str]) -> list[tuple[str, Any]]:
    """key value pairs up to a closing bracket; a value in brackets is such a list itself."""
    items: list[tuple[str, Any]] = []
    for key in tokens:
        if key == "]":
            break
        value = next(tokens, None)
        require(value is not None and value != "]", "GML", "hold a value for every key", f"none for {key!r}")
        assert value is not None
        items.append((key, _gml_items(tokens) if value == "[" else value.strip('"')))
    return items
