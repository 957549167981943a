"""How often does graphs.clusters find the planted number of clusters, and how often does its error
bar contain it?

    python benchmarks/cluster_counts.py [--seeds 10]

Clear: planted partitions of 2 to 40 clusters, whose eigengap behind the planted count is at least
three times the widest of all other gaps but that behind 0, by NumPy's dense decomposition. Blurred:
clusters of random sizes, mean degree 5 to 20, up to 60 % of the edges between clusters, clear or
not. None: random graphs without clusters. Prints, and writes to
benchmarks/results/cluster-counts.json, how many counts were correct and how many 95 % intervals
contained the planted one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import numpy as np

from lambdahat.graphs import clusters, graph

COUNTS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 30, 40)
SETTINGS = ((40, 0.4, 0.01), (25, 0.6, 0.01))  # size, p inside, p outside
CLEAR = 3.0
RECORD = Path(__file__).parent / "results" / "cluster-counts.json"


def clear(seeds: int) -> Iterator[tuple[str, nx.Graph, int]]:
    """Planted partitions whose eigengap is clear."""
    for size, inside, outside in SETTINGS:
        for count in COUNTS:
            for seed in range(seeds):
                made = nx.planted_partition_graph(count, size, inside, outside, seed=1000 + seed)
                if eigengap_is_clear(made, count):
                    yield f"clear, {size} nodes each, p = {inside:g}, q = {outside:g}", made, count


def eigengap_is_clear(made: nx.Graph, count: int) -> bool:
    adjacency = nx.to_numpy_array(made)
    degrees = adjacency.sum(axis=1)
    if not nx.is_connected(made):
        return False
    values = np.linalg.eigvalsh(np.eye(len(made)) - adjacency / np.sqrt(np.outer(degrees, degrees)))
    gaps = np.diff(values[: len(values) // 2 + 1])
    others = np.delete(gaps, [0, count - 1])
    return bool(gaps[count - 1] >= CLEAR * others.max())


def blurred(seeds: int) -> Iterator[tuple[str, nx.Graph, int]]:
    """Clusters of random sizes, degrees and mixing."""
    rng = np.random.default_rng(1)
    for seed in range(20 * seeds):
        made, count = blurred_graph(rng, 1000 + seed)
        if made is not None:
            yield "blurred", made, count


def blurred_graph(rng: np.random.Generator, seed: int) -> tuple[nx.Graph | None, int]:
    """A graph and its number of clusters; None where that drawn is too large, or not connected."""
    count, size = int(rng.integers(2, 25)), int(rng.integers(12, 45))
    degree, mixing = rng.uniform(5, 20), rng.uniform(0.02, 0.6)
    outside = degree * mixing / (size * (count - 1))
    if count * size > 700 or outside > 1:
        return None, count
    sizes = [int(s) for s in rng.integers(max(6, size // 2), size * 3 // 2, count)]
    made = nx.random_partition_graph(
        sizes, min(1, degree * (1 - mixing) / (size - 1)), outside, seed=seed
    )
    return (made if nx.is_connected(made) else None), count


def unclustered(seeds: int) -> Iterator[tuple[str, nx.Graph, int]]:
    """Random graphs: Erdős–Rényi, Barabási–Albert, regular."""
    rng = np.random.default_rng(2)
    for seed in range(5 * seeds):
        nodes, half = int(rng.integers(60, 900)), int(rng.integers(3, 10))
        kind = seed % 3
        if kind == 0:
            made = nx.gnp_random_graph(nodes, 2 * half / nodes, seed=seed)
        elif kind == 1:
            made = nx.barabasi_albert_graph(nodes, half, seed=seed)
        else:
            made = nx.random_regular_graph(2 * half, nodes, seed=seed)
        if nx.is_connected(made):
            yield "none", made, 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=10)
    seeds = parser.parse_args().seeds
    rows: dict[str, list[tuple[bool, bool, bool]]] = {}
    for make in (clear, blurred, unclustered):
        for name, made, count in make(seeds):
            found = clusters(graph(made))
            value, (low, high) = float(found), found.interval()
            known = bool(np.isfinite(value))
            held = known and bool(low - 1e-9 <= count <= high + 1e-9)
            rows.setdefault(name, []).append(
                (known and found.rounded == count, held, found.status.ok)
            )
    record = {}
    for name, results in rows.items():
        right, held, ok = (int(sum(column)) for column in zip(*results, strict=True))
        sure = sum(right for right, _, fine in results if fine)
        record[name] = {
            "graphs": len(results),
            "right": right,
            "held": held,
            "converged": ok,
            "converged right": sure,
        }
        print(
            f"{name}: right {right} of {len(results)}, held by the 95 % interval {held}; "
            f"CONVERGED {ok}, of which right {sure}"
        )
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
