"""Do entropic graph spectra show what chapter 3 of the spectral thesis says, and what do they cost beside other tools?

Each part prints a table and, with ``--json FOLDER``, writes it there. Parts: ``figures`` (3.1 to 3.3), ``parameters``
(Table 3.1a), ``models`` (3.1b), ``clusters`` (Table 3.2), ``large`` (the two synthetic graphs of §3.7.1.1: minutes to
make), ``real`` (Email, NetScience and the small graphs of Newman), ``heatmap`` (Figure 3.4 on the graphs at hand),
``speed`` (eigsh, eigh, networkx), ``scaling`` (time over edges) and ``reading`` (millions of edges). Random graphs are
made by networkx.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import torch
from scipy.sparse.linalg import eigsh
from timing import _cell

from lambdahat import graphs
from lambdahat.graphs.block_moments import EXACT_NODES, SINGLE_NODES, components, eigenvalues, probed_moments
from lambdahat.graphs.walks import walk_partition
from lambdahat.maxent import fit

DATA = Path(__file__).parents[2] / "shared" / "data" / "graphs"
COLLABORATIONS = ("ca-AstroPh", "ca-CondMat", "ca-GrQc", "ca-HepPh", "ca-HepTh")
OTHERS = ("luxembourg_osm", "soc-brightkite", "gemsec-deezer-RO_edges")
EGS = {9: 9.7e-3, 30: 6.4e-3, 90: 5.8e-3, 240: 3.5e-3}  # Table 3.2
LANCZOS = {9: 3.2e-3, 30: 1.4e-2, 90: 1.8e-2, 240: 2.89e-2}
PRINTED = {("erdos_renyi", 50): 0.600, ("erdos_renyi", 100): 0.598, ("erdos_renyi", 150): 0.604,
           ("watts_strogatz", 50): 0.468, ("watts_strogatz", 100): 0.454, ("watts_strogatz", 150): 0.414,
           ("barabasi_albert", 50): 18.936, ("barabasi_albert", 100): 40.239,
           ("barabasi_albert", 150): 58.428}  # fmt: skip

Row = dict[str, Any]


def load(folder: Path, name: str) -> graphs.Graph:
    """One of the real graphs, by the stem of its file."""
    (path,) = folder.glob(f"{name}.*")
    return graphs.graph(path)


def chosen(args: argparse.Namespace, quick: Iterable[int], all_: Iterable[int]) -> list[int]:
    """The sizes to run: those of ``--only``, where given."""
    return [size for size in (quick if args.quick else all_) if args.only in (None, size)]


def figures(args: argparse.Namespace) -> Iterator[Row]:
    """How far the density is from the truth: KL for the semicircle, from the histogram for random graphs."""
    from numpy.polynomial.chebyshev import chebvander

    grid = np.cos((np.arange(200_000) + 0.5) * np.pi / 200_000)  # Gauss–Chebyshev points
    weights = 2 * (1 - grid**2) / 200_000  # times the semicircle 2/π √(1 − x²)
    truth = 2 / np.pi * np.sqrt(1 - grid**2)
    for count in (3, 5, 10, 20, 30):
        density = fit(np.r_[1.0, (weights @ chebvander(grid, count))[1:]])
        kl = float(weights @ np.log(truth / density.evaluate(grid)))
        yield {"graph": "semicircle, analytic moments", "moments": count, "KL": kl}
    nodes = 1000 if args.quick else 5000
    random = {
        f"Erdős–Rényi n = {nodes}, np = 5": nx.fast_gnp_random_graph(nodes, 5 / nodes, seed=args.seed),
        f"Barabási–Albert n = {nodes}, r = 5": nx.barabasi_albert_graph(nodes, 5, seed=args.seed),
    }
    for name, made in random.items():
        one = graphs.graph(made)
        values = eigenvalues(one)
        for count in (3, 30, 60, 100):
            density = graphs.spectrum(one, count, probes=100, seed=args.seed).density
            bins = np.linspace(0, 2, 51)
            masses = np.diff(density.cumulative(bins))
            seen = np.histogram(values, bins)[0] / len(values)
            off = float(np.abs(masses - seen).sum() / 2)
            yield {"graph": name, "moments": count, "off in total variation, 50 bins": off}


def parameters(args: argparse.Namespace) -> Iterator[Row]:
    """Table 3.1a: the parameter found for a fresh graph, mean and spread over repetitions."""
    repeats = 2 if args.quick else args.repeats
    truths: dict[str, Callable[[int], float]] = {
        "erdos_renyi": lambda n: 0.6, "watts_strogatz": lambda n: 0.4, "barabasi_albert": lambda n: 0.4 * n,
    }  # fmt: skip
    for size in chosen(args, (50,), (50, 100, 150)):
        for model, truth in truths.items():
            found = [
                graphs.fit_model(_made(model, size, truth(size), 1000 + r), model, draws=args.draws, seed=r)
                for r in range(repeats)
            ]
            values = np.array([float(f) for f in found])
            spread = float(values.std(ddof=1))
            yield {"model": model, "n": size, "graphs": repeats, "truth": truth(size),
                   "mean": float(values.mean()), "spread": spread, "error of the mean": spread / repeats**0.5,
                   "predicted spread": float(np.mean([f.stderr for f in found])),
                   "off": float(abs(values.mean() - truth(size))), "thesis": PRINTED[model, size],
                   "thesis off": abs(PRINTED[model, size] - truth(size))}  # fmt: skip


def _made(model: str, size: int, parameter: float, seed: int) -> graphs.Graph:
    """A graph as §3.6.1 makes it: k = 10 neighbours for Watts–Strogatz."""
    if model == "erdos_renyi":
        return graphs.graph(nx.gnp_random_graph(size, parameter, seed=seed))
    if model == "watts_strogatz":
        return graphs.graph(nx.watts_strogatz_graph(size, 10, parameter, seed=seed))
    return graphs.graph(nx.barabasi_albert_graph(size, round(parameter), seed=seed))


def models(args: argparse.Namespace) -> Iterator[Row]:
    """Table 3.1b: which model a Barabási–Albert graph of 5,000 nodes, and three real graphs, look like; 0 to 3."""
    nodes, size = (1000, 200) if args.quick else (5000, 1000)
    for number in chosen(args, (0,), range(4)):
        if number == 0:
            one = graphs.graph(nx.barabasi_albert_graph(nodes, 5, seed=args.seed), name=f"BA, n = {nodes}, r = 5")
        else:
            one = load(args.data, ("soc-brightkite", "ca-GrQc", "gemsec-deezer-RO_edges")[number - 1])
        found = graphs.which_model(one, draws=2 if args.quick else 3, size=size, seed=args.seed)
        for place in found.fits:
            yield {"graph": one.name, "model": place.model, "parameter": float(place), "stderr": float(place.stderr),
                   "divergence": place.divergence, "typical": place.typical}  # fmt: skip


def planted(count: int, seed: int, outside: float) -> graphs.Graph:
    """``nx.random_partition_graph``: ``count`` clusters of 20 to 40 nodes, inner edges with probability ½."""
    sizes = np.random.default_rng(seed).integers(20, 41, count)
    sizes[-1] += 30 * count - sizes.sum() if 20 <= sizes[-1] + 30 * count - sizes.sum() <= 40 else 0
    made = nx.random_partition_graph([int(s) for s in sizes], 0.5, outside / sizes.sum(), seed=seed)
    return graphs.graph(made)


def clusters(args: argparse.Namespace) -> Iterator[Row]:
    """Table 3.2: the fractional error of the count from 80 moments and 100 probes, over several graphs."""
    repeats = 2 if args.quick else args.repeats
    for outside in (0.1, 1.0):
        for count in chosen(args, (9, 30), (9, 30, 90, 240)):
            ours, default, lanczos = [], [], []
            for seed in range(repeats):
                one = planted(count, seed, outside)
                ours.append(float(graphs.clusters(one, 80, probes=100, seed=seed)) / count - 1)
                default.append(float(graphs.clusters(one, 80, seed=seed)) / count - 1)
                if seed < args.lanczos:
                    lanczos.append(float(graphs.smoothed_lanczos_clusters(one, 80, 100, seed=seed)) / count - 1)
            yield {"links out of a node": outside, "clusters": count, "graphs": repeats,
                   "ours, 100 probes": _mean_abs(ours), "worst": float(np.abs(ours).max()),
                   "ours, default": _mean_abs(default), "smoothed Lanczos": _mean_abs(lanczos),
                   "graphs of it": len(lanczos), "thesis EGS": EGS[count],
                   "thesis Lanczos": LANCZOS[count]}  # fmt: skip


def _mean_abs(errors: list[float]) -> float:
    return float(np.mean(np.abs(errors))) if errors else float("nan")


def mixed(nodes: int, count: int, least: int, most: int, seed: int, links: int = 20) -> graphs.Graph:
    """Clusters of all three random models in turn, mean degree 20, with ``links`` edges out of each on average."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(least, most + 1, count)
    while sizes.sum() != nodes:
        step = int(np.sign(nodes - sizes.sum()))
        chosen = rng.integers(0, count, min(count, abs(nodes - int(sizes.sum()))))
        sizes[np.unique(chosen)] = np.clip(sizes[np.unique(chosen)] + step, least, most)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    makers: list[Callable[[int, int], nx.Graph]] = [
        lambda n, s: nx.fast_gnp_random_graph(n, 20 / n, seed=s),
        lambda n, s: nx.watts_strogatz_graph(n, 20, 0.5, seed=s),
        lambda n, s: nx.barabasi_albert_graph(n, 10, seed=s),
    ]
    parts = [np.array(makers[i % 3](int(n), seed * count + i).edges) + starts[i] for i, n in enumerate(sizes)]
    between = rng.integers(0, nodes, (count * links // 2, 2))
    return graphs.graph(np.concatenate([*parts, between]))


def large(args: argparse.Namespace) -> Iterator[Row]:
    """§3.7.1.1: 201,600 nodes in 305 clusters of 500–1000, and 404,420 in 1,355 of 200–400."""
    sizes = {20: (13_219, 500, 1000)} if args.quick else {305: (201_600, 500, 1000), 1355: (404_420, 200, 400)}
    for count in chosen(args, sizes, sizes):
        nodes, least, most = sizes[count]
        start = time.process_time()
        one = mixed(nodes, count, least, most, args.seed)
        made = time.process_time() - start
        for moments in (40, 80, 120):
            start = time.process_time()
            found = graphs.clusters(one, moments, probes=100, seed=args.seed)
            yield {"nodes": len(one), "edges": one.num_edges, "clusters": count, "moments": moments,
                   "found": float(found), "stderr": float(found.stderr), "off": float(found) / count - 1,
                   "CPU seconds": time.process_time() - start, "CPU seconds to make": made}  # fmt: skip


def real(args: argparse.Namespace) -> Iterator[Row]:
    """Email, NetScience and others against their eigenvalues: the count below λ*, and the widest gap of all."""
    names = ("email-Eu-core", "netscience", "karate", "football", "polbooks")
    for name in names[:1] if args.quick else names:
        one = load(args.data, name) if name != "email-Eu-core" else graphs.graph(args.data / "email-Eu-core.txt.gz")
        values = eigenvalues(one)
        angles = np.arccos(np.clip(1 - values, -1, 1))
        low = np.flatnonzero(values[1:] <= 1)
        widest = int(low[np.argmax(np.diff(angles)[low])]) + 1
        for probes in (None, 100) if len(one) <= EXACT_NODES else (100,):
            found = graphs.clusters(one, 100, probes, args.seed)
            yield {"graph": name, "nodes": len(one), "isolated": int((one.degrees == 0).sum()),
                   "probes": probes or "exact", "found": float(found),
                   "stderr": float(found.stderr), "eigenvalues below λ*": int((values <= found.cut).sum()),
                   "widest gap of the eigenvalues after": widest, "components": found.components}  # fmt: skip


def heatmap(args: argparse.Namespace) -> Iterator[Row]:
    """Figure 3.4: divergences between collaboration, road and social graphs; the result goes into the folder."""
    names = (
        (*COLLABORATIONS[2:3], *COLLABORATIONS[4:], "gemsec-deezer-RO_edges") if args.quick else COLLABORATIONS + OTHERS
    )
    found = graphs.similarity([load(args.data, name) for name in names], 100, seed=args.seed)
    for name, line in zip(found.names, found.divergences, strict=True):
        yield {"graph": name} | dict(zip(found.names, map(float, line), strict=True))
    group = [name for name in found.names if name in COLLABORATIONS]
    yield {"graph": "collaborations nearer to each other than to all else", found.names[0]: str(found.apart(group))}
    if args.json is not None:
        replace(found, spectra=()).save(args.json / "graphs-similarity.json")  # docs/figures.py draws it


def speed(args: argparse.Namespace) -> Iterator[Row]:
    """Seconds for a spectrum and a cluster count by us and by what a user would take instead."""
    road = load(args.data, "luxembourg_osm")
    yield _timed("100 moments, 100 probes", road, "ours", lambda: probed_moments(road, 100, 100, 0, components(road)))
    yield _timed("entropic spectrum, 100 moments", road, "ours", lambda: graphs.spectrum(road, 100))
    count = 30 if args.quick else 240
    one = planted(count, 0, 0.1)
    work = f"count of {count} clusters"
    matrix = one.normalized()
    start = np.random.default_rng(0).standard_normal(len(one))
    yield _timed(work, one, "ours", lambda: float(graphs.clusters(one, 80)))
    yield _timed(work, one, f"eigsh, {count + 10} largest of I − L",
                 lambda: _gap_count(1 - eigsh(matrix, count + 10, which="LA", v0=start)[0]))  # fmt: skip
    yield _timed(
        work, one, "eigh, all (numpy)", lambda: _gap_count(np.linalg.eigvalsh(np.eye(len(one)) - matrix.toarray()))
    )
    made = nx.from_scipy_sparse_array(one.adjacency)
    yield _timed(work, one, "networkx.normalized_laplacian_spectrum",
                 lambda: _gap_count(np.sort(nx.normalized_laplacian_spectrum(made).real)))  # fmt: skip
    yield _timed(work, one, "smoothed Lanczos, 100 probes × 80",
                 lambda: float(graphs.smoothed_lanczos_clusters(one, 80, 100)))  # fmt: skip


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
    return {"work": work, "nodes": len(one), "edges": one.num_edges, "by": by, "seconds": seconds} | answer


def scaling(args: argparse.Namespace) -> Iterator[Row]:
    """CPU seconds of 50 moments from 16 probes over the edges, mean degree 10, the fitted exponent, and memory.

    Neighbours are numbered near each other, as road and web graphs are; or anywhere, where every edge misses the cache
    once the vectors have outgrown it.
    """
    for kind in ("near", "anywhere"):
        edges, seconds = [], []
        for nodes in (2_000, 4_000, 8_000) if args.quick else (200_000, 400_000, 800_000, 1_600_000):
            rng = np.random.default_rng(nodes)
            first = rng.integers(0, nodes, 5 * nodes)
            away = rng.integers(1, 500 if kind == "near" else nodes, 5 * nodes)
            one = graphs.graph(np.stack([first, (first + away) % nodes], axis=1))
            del first, away
            where = components(one)
            times = [_seconds(lambda one=one, where=where: probed_moments(one, 50, 16, 0, where)) for _ in range(3)]
            moments = _peak(lambda one=one, where=where: probed_moments(one, 50, 16, 0, where))[1]
            walk = _peak(lambda one=one: walk_partition(one, 0))[1]
            edges.append(one.num_edges)
            seconds.append(min(times))
            block = 16 * (4 if nodes >= SINGLE_NODES else 8) * len(one)
            yield {"neighbours": kind, "nodes": len(one), "edges": one.num_edges, "CPU seconds": seconds[-1],
                   "graph, MiB": _size(one), "peak of moments, MiB": moments, "peak of the walk, MiB": walk,
                   "a block of 16 vectors, MiB": block / 2**20}  # fmt: skip
        slope = float(np.polyfit(np.log(edges), np.log(seconds), 1)[0])
        yield {"neighbours": kind, "nodes": "exponent", "CPU seconds": slope}


def _peak(call: Callable[[], Any]) -> tuple[Any, float]:
    """What the call returns, and by how many MiB the memory of the process rose meanwhile (Linux only)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before goes back, so that its use anew shows
    Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back to what is held now
    before = _memory("VmRSS")
    found = call()
    return found, _memory("VmHWM") - before


def _memory(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def _size(one: graphs.Graph) -> float:
    """The graph itself in MiB."""
    kept = one.adjacency
    return float(kept.data.nbytes + kept.indices.nbytes + kept.indptr.nbytes) / 2**20


def _seconds(call: Callable[[], Any]) -> float:
    """Of the processor, not of the clock: with one thread the same, and other programs do not count."""
    start = time.process_time()
    call()
    return time.process_time() - start


def reading(args: argparse.Namespace) -> Iterator[Row]:
    """Edges from text, ten million plain, two million with weights, names: CPU seconds, and memory beside it."""
    for kind, rows in (("plain", 10_000_000), ("weights", 2_000_000), ("names", 2_000_000)):
        count = rows // 50 if args.quick else rows
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "edges.txt"
            _write_edges(path, kind, count)
            start = time.process_time()
            one, peak = _peak(lambda path=path: graphs.graph(path))
            yield {"edges listed": count, "kind": kind, "edges": one.num_edges,
                   "CPU seconds": time.process_time() - start, "graph, MiB": _size(one), "peak grew by, MiB": peak,
                   "times the graph": peak / _size(one), "file, MiB": path.stat().st_size / 2**20}  # fmt: skip


def _write_edges(path: Path, kind: str, count: int) -> None:
    rng = np.random.default_rng(0)
    line = {"plain": "{}\t{}\n", "weights": "{}\t{}\t{}.5\n", "names": "node{}\tnode{}\n"}[kind]
    with path.open("w") as stream:
        for first in range(0, count, 100_000):
            pairs = rng.integers(0, count // 5, (min(100_000, count - first), 2)).tolist()
            stream.write("".join(line.format(u, v, u % 7) for u, v in pairs))


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "figures": figures, "parameters": parameters, "models": models, "clusters": clusters, "real": real,
    "heatmap": heatmap, "speed": speed, "scaling": scaling, "reading": reading, "large": large,
}  # fmt: skip


def show(title: str, table: list[Row], path: Path | None) -> None:
    """Print a table; with a path, write it as JSON."""
    columns = list(dict.fromkeys(key for row in table for key in row))
    cells = [columns, *([_cell(row.get(column)) for column in columns] for row in table)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(f"\n{title}")
    for line in cells:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip(), flush=True)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"title": title, "rows": table}, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="which parts; all but `large` and `reading` by default")
    parser.add_argument("--data", type=Path, default=DATA, help="the folder of real graphs")
    parser.add_argument("--json", type=Path, help="write each part to this folder")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--draws", type=int, default=10, help="random graphs for each parameter tried")
    parser.add_argument("--lanczos", type=int, default=2, help="how many graphs of `clusters` the slow baseline sees")
    parser.add_argument("--only", type=int, help="this size only, of parts that go over several")
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
