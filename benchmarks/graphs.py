"""What do entropic graph spectra cost, beside other tools and as graphs grow?

What chapter 3 of the spectral thesis shows with them is in ``lambdahat reproduce graph-spectra``,
``graph-models``, ``graph-similarity``, ``graph-clusters`` and ``graph-communities``. Each part here
prints a table and, with ``--json FOLDER``, writes it there: ``speed`` (eigsh, eigh, networkx),
``scaling`` (time over edges), ``large`` (the two synthetic graphs of §3.7.1.1: minutes to make) and
``reading`` (millions of edges).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import torch
from scipy.sparse.linalg import eigsh
from timing import _cell

from lambdahat import graphs
from lambdahat.experiments.graph_spectra.graph_subjects import mixed_graph, planted_graph
from lambdahat.graphs.spectra import SINGLE_NODES, components, probed_moments, walk_partition

DATA = Path(__file__).parents[2] / "shared" / "data" / "graphs"

Row = dict[str, Any]


def load(folder: Path, name: str) -> graphs.Graph:
    """One of the real graphs, by the stem of its file."""
    (path,) = folder.glob(f"{name}.*")
    return graphs.graph(path)


def large(args: argparse.Namespace) -> Iterator[Row]:
    """§3.7.1.1: 201,600 nodes in 305 clusters of 500–1000, and 404,420 in 1,355 of 200–400."""
    sizes = (
        {20: (13_219, 500, 1000)}
        if args.quick
        else {305: (201_600, 500, 1000), 1355: (404_420, 200, 400)}
    )
    for count, (nodes, least, most) in sizes.items():
        if args.only not in (None, count):
            continue
        start = time.process_time()
        one = mixed_graph(nodes, count, least, most, args.seed)
        made = time.process_time() - start
        for moments in (40, 80, 120):
            start = time.process_time()
            found = graphs.clusters(one, moments, probes=100, seed=args.seed)
            yield {
                "nodes": len(one),
                "edges": one.num_edges,
                "clusters": count,
                "moments": moments,
                "found": float(found),
                "stderr": float(found.stderr),
                "off": float(found) / count - 1,
                "CPU seconds": time.process_time() - start,
                "CPU seconds to make": made,
            }


def speed(args: argparse.Namespace) -> Iterator[Row]:
    """Seconds for a spectrum and a cluster count by us and by what a user would take instead."""
    road = load(args.data, "luxembourg_osm")
    yield _timed(
        "100 moments, 100 probes",
        road,
        "ours",
        lambda: probed_moments(road, 100, 100, 0, components(road)),
    )
    yield _timed("entropic spectrum, 100 moments", road, "ours", lambda: graphs.spectrum(road, 100))
    count = 30 if args.quick else 240
    one = planted_graph(count, 0.1, 0)
    work = f"count of {count} clusters"
    matrix = one.normalized()
    start = np.random.default_rng(0).standard_normal(len(one))
    yield _timed(work, one, "ours", lambda: float(graphs.clusters(one, 80)))
    yield _timed(
        work,
        one,
        f"eigsh, {count + 10} largest of I − L",
        lambda: _gap_count(1 - eigsh(matrix, count + 10, which="LA", v0=start)[0]),
    )
    yield _timed(
        work,
        one,
        "eigh, all (numpy)",
        lambda: _gap_count(np.linalg.eigvalsh(np.eye(len(one)) - matrix.toarray())),
    )
    made = nx.from_scipy_sparse_array(one.adjacency)
    yield _timed(
        work,
        one,
        "networkx.normalized_laplacian_spectrum",
        lambda: _gap_count(np.sort(nx.normalized_laplacian_spectrum(made).real)),
    )
    yield _timed(
        work,
        one,
        "smoothed Lanczos, 100 probes × 80",
        lambda: float(graphs.smoothed_lanczos_clusters(one, 80, 100)),
    )


def _gap_count(values: np.ndarray) -> float:
    values = np.sort(values)
    angles = np.arccos(np.clip(1 - values, -1, 1))
    low = np.flatnonzero(values[1:] <= 1)
    return float(low[np.argmax(np.diff(angles)[low])] + 1)


def _timed(work: str, one: graphs.Graph, by: str, call: Callable[[], Any]) -> Row:
    start = time.perf_counter()
    found = call()
    seconds = time.perf_counter() - start
    answer = {"answer": found} if isinstance(found, float) else {}
    return {
        "work": work,
        "nodes": len(one),
        "edges": one.num_edges,
        "by": by,
        "seconds": seconds,
    } | answer


def scaling(args: argparse.Namespace) -> Iterator[Row]:
    """CPU seconds of 50 moments from 16 probes over the edges, mean degree 10, the fitted exponent,
    and memory.

    Neighbours are numbered near each other, as road and web graphs are; or anywhere, where every
    edge misses the cache once the vectors have outgrown it.
    """
    for kind in ("near", "anywhere"):
        edges, seconds = [], []
        for nodes in (
            (2_000, 4_000, 8_000) if args.quick else (200_000, 400_000, 800_000, 1_600_000)
        ):
            rng = np.random.default_rng(nodes)
            first = rng.integers(0, nodes, 5 * nodes)
            away = rng.integers(1, 500 if kind == "near" else nodes, 5 * nodes)
            one = graphs.graph(np.stack([first, (first + away) % nodes], axis=1))
            del first, away
            where = components(one)
            times = [
                _seconds(lambda one=one, where=where: probed_moments(one, 50, 16, 0, where))
                for _ in range(3)
            ]
            moments = _peak(lambda one=one, where=where: probed_moments(one, 50, 16, 0, where))[1]
            walk = _peak(lambda one=one: walk_partition(one, 0))[1]
            edges.append(one.num_edges)
            seconds.append(min(times))
            block = 16 * (4 if nodes >= SINGLE_NODES else 8) * len(one)
            yield {
                "neighbours": kind,
                "nodes": len(one),
                "edges": one.num_edges,
                "CPU seconds": seconds[-1],
                "graph, MiB": _size(one),
                "peak of moments, MiB": moments,
                "peak of the walk, MiB": walk,
                "a block of 16 vectors, MiB": block / 2**20,
            }
        slope = float(np.polyfit(np.log(edges), np.log(seconds), 1)[0])
        yield {"neighbours": kind, "nodes": "exponent", "CPU seconds": slope}


def _peak(call: Callable[[], Any]) -> tuple[Any, float]:
    """What the call returns, and by how many MiB the memory of the process rose meanwhile (Linux
    only).
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before goes back, so that its use anew shows
    # sets the high-water mark back to what is held now
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS")
    found = call()
    return found, _memory("VmHWM") - before


def _memory(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def _size(one: graphs.Graph) -> float:
    """The matrix of the graph in MiB."""
    kept = one.adjacency
    return float(kept.data.nbytes + kept.indices.nbytes + kept.indptr.nbytes) / 2**20


def _seconds(call: Callable[[], Any]) -> float:
    """Of the processor, not of the clock: with one thread the same, and other programs do not
    count.
    """
    start = time.process_time()
    call()
    return time.process_time() - start


def reading(args: argparse.Namespace) -> Iterator[Row]:
    """Edges from text, ten million plain, two million with weights, names: CPU seconds, and memory
    beside it.

    The graph is its matrix and what it keeps of names: numbers of 8 bytes where those in the file
    have gaps, and 16 bytes for a text of at most 15. "times its matrix" leaves the names out.
    """
    for kind, rows in (("plain", 10_000_000), ("weights", 2_000_000), ("names", 2_000_000)):
        count = rows // 50 if args.quick else rows
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "edges.txt"
            _write_edges(path, kind, count)
            start = time.process_time()
            one, peak = _peak(lambda path=path: graphs.graph(path))
            seconds = time.process_time() - start
            names = 0.0 if one.names is None else one.names.nbytes / 2**20
            size = _size(one) + names
            yield {
                "edges listed": count,
                "kind": kind,
                "edges": one.num_edges,
                "CPU seconds": seconds,
                "graph, MiB": size,
                "names in it, MiB": names,
                "peak grew by, MiB": peak,
                "times the graph": peak / size,
                "times its matrix": peak / _size(one),
                "file, MiB": path.stat().st_size / 2**20,
            }


def _write_edges(path: Path, kind: str, count: int) -> None:
    rng = np.random.default_rng(0)
    line = {"plain": "{}\t{}\n", "weights": "{}\t{}\t{}.5\n", "names": "node{}\tnode{}\n"}[kind]
    with path.open("w") as stream:
        for first in range(0, count, 100_000):
            pairs = rng.integers(0, count // 5, (min(100_000, count - first), 2)).tolist()
            stream.write("".join(line.format(u, v, u % 7) for u, v in pairs))


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "speed": speed,
    "scaling": scaling,
    "reading": reading,
    "large": large,
}


def show(title: str, table: list[Row], path: Path | None) -> None:
    """Print a table; with a path, write it as JSON."""
    columns = list(dict.fromkeys(key for row in table for key in row))
    cells = [columns, *([_cell(row.get(column)) for column in columns] for row in table)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(f"\n{title}")
    for line in cells:
        print(
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip(),
            flush=True,
        )
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps({"title": title, "rows": table}, indent=1, ensure_ascii=False) + "\n"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", help="which parts; all but `large` and `reading` by default"
    )
    parser.add_argument("--data", type=Path, default=DATA, help="the folder of real graphs")
    parser.add_argument("--json", type=Path, help="write each part to this folder")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs")
    parser.add_argument("--only", type=int, help="this number of clusters only, of `large`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        parser.error(f"parts are {', '.join(PARTS)}; got {', '.join(unknown)}")
    for name in args.parts or [part for part in PARTS if part not in ("large", "reading")]:
        table = list(PARTS[name](args))
        title = f"{name}: {(PARTS[name].__doc__ or '').strip().splitlines()[0]}"
        part = name if args.only is None else f"{name}-{args.only}"
        show(title, table, None if args.json is None else args.json / f"graphs-{part}.json")


if __name__ == "__main__":
    main()
