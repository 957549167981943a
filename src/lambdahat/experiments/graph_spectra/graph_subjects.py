"""The graphs of chapter 3, real, generated or planted, and their numbers of clusters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import networkx as nx
import numpy as np
from scipy.sparse.csgraph import breadth_first_order

from lambdahat._core.rng import derived_seed
from lambdahat.estimators import lanczos_runs, moments, quadrature
from lambdahat.experiments.kit.cells import Row
from lambdahat.experiments.kit.store import outside_file
from lambdahat.graphs.cluster_counts import (
    CELLS,
    POINTS,
    TOLERANCE,
    clusters,
    find_gaps,
    first_moments,
    smoothed_count,
)
from lambdahat.graphs.random_models import Model
from lambdahat.graphs.read import graph
from lambdahat.graphs.spectra import BOUNDS
from lambdahat.graphs.structure import Graph
from lambdahat.maxent import MaxentDensity, fit
from lambdahat.results import Moments, Spectrum

NODES = 5000  # of a stand-in
PARTS = 3  # into which a road network is cut
LINKS, DEGREE = 20, 20  # of the mixed graphs: edges out of a cluster, mean degree in it


@dataclass(frozen=True)
class GraphSubject:
    """A real graph: its file, and behind it those of the nearest graph; its ``kind``.

    SNAP's large graphs are connected, and so of the nearest the largest component is taken, or a
    ``part`` of it.
    """

    files: tuple[str, ...]
    kind: str
    part: int | None = None


SUBJECTS = {
    **{
        name: GraphSubject((name,), "collaboration")
        for name in ("ca-AstroPh", "ca-CondMat", "ca-GrQc", "ca-HepPh", "ca-HepTh")
    },
    **{
        name: GraphSubject((name, "luxembourg_osm"), "road", part)
        for part, name in enumerate(("roadNet-CA", "roadNet-PA", "roadNet-TX"))
    },
    "soc-brightkite": GraphSubject(("soc-brightkite",), "social"),
    "gemsec-deezer-RO": GraphSubject(("gemsec-deezer-RO_edges",), "social"),
    "Email": GraphSubject(("email-Eu-core",), "e-mail"),
    "NetScience": GraphSubject(("netscience",), "collaboration"),
    "DBLP": GraphSubject(("com-dblp.ungraph", "ca-CondMat"), "collaboration"),
    "Amazon": GraphSubject(("com-amazon.ungraph", "ca-HepTh"), "collaboration"),
    "YouTube": GraphSubject(("com-youtube.ungraph", "soc-brightkite"), "social"),
}


def real_graph(name: str, nodes: int = 0) -> tuple[Graph, str]:
    """A graph of ``SUBJECTS`` with its description; with ``nodes`` a generated one of that size."""
    subject = SUBJECTS[name]
    for file in () if nodes else subject.files:
        path = outside_file("graphs", file)
        if path is not None:
            whole, named = graph(path), file == subject.files[0]
            return (whole, file) if named else largest_component(whole, file, subject.part)
    made = STAND_INS[subject.kind](nodes or NODES, derived_seed(0, "stand-in", name) % 2**32)
    return made, f"made {subject.kind} graph"


def stand_in(name: str, data: str) -> str:
    """Why the measured graph is not the one of ``SUBJECTS``; empty if it is."""
    return "" if data == SUBJECTS[name].files[0] else f"measured on another graph, {data}"


def largest_component(whole: Graph, name: str, part: int | None) -> tuple[Graph, str]:
    """The largest component, or one of three ``part``s of it by distance, and its name."""
    largest = np.bincount(whole.components).argmax()
    start = int(np.flatnonzero(whole.components == largest)[0])
    kept = breadth_first_order(whole.adjacency, start, directed=False, return_predecessors=False)
    words = f"largest component of {name}"
    if part is not None:
        kept, name = np.array_split(kept, PARTS)[part], f"{name}, part {part + 1}"
        words = name
    kept = np.sort(kept)
    return Graph.of(whole.adjacency[kept][:, kept], name), words


def collaboration(nodes: int, seed: int) -> Graph:
    """Cliques of 2 to 6 neighbouring authors, one paper for every three nodes."""
    rng = np.random.default_rng(seed)
    pairs = []
    for _ in range(nodes // 3):
        count, first = int(rng.integers(2, 7)), int(rng.integers(0, nodes))
        team = (first + rng.choice(20, count, replace=False)) % nodes
        pairs.append(team[np.stack(np.triu_indices(count, 1), axis=1)])
    return graph(np.concatenate(pairs))


def road(nodes: int, seed: int) -> Graph:
    """A square grid without a third of its edges."""
    side = max(4, round(nodes**0.5))
    made = nx.convert_node_labels_to_integers(nx.grid_2d_graph(side, side))
    edges = np.array(made.edges)
    kept = np.random.default_rng(seed).random(len(edges)) > 1 / 3
    return graph(edges[kept])


def social(nodes: int, seed: int) -> Graph:
    """Preferential attachment with triangles (Holme and Kim 2002)."""
    return graph(nx.powerlaw_cluster_graph(nodes, 4, 0.3, seed=seed))


def mail(nodes: int, seed: int) -> Graph:
    """One crowd and 19 nodes that write to nobody: 20 components, as the Email graph has."""
    made = nx.barabasi_albert_graph(nodes - 19, 10, seed=seed)
    made.add_nodes_from(range(nodes - 19, nodes))
    return graph(made)


STAND_INS: dict[str, Callable[[int, int], Graph]] = {
    "collaboration": collaboration,
    "road": road,
    "social": social,
    "e-mail": mail,
}


def planted_graph(count: int, outside: float, seed: int) -> Graph:
    """Clusters of 20 to 40 nodes, 30 on average as in Table 3.2, inner edges with probability ½,
    and ``outside`` edges out of a node on average.
    """
    sizes = np.random.default_rng(derived_seed(seed, "sizes of clusters")).integers(20, 41, count)
    rest = 30 * count - int(sizes[:-1].sum())
    sizes[-1] = rest if 20 <= rest <= 40 else sizes[-1]
    number, share = derived_seed(seed, "planted clusters") % 2**32, outside / int(sizes.sum())
    return graph(nx.random_partition_graph(sizes.tolist(), 0.5, share, seed=number))


def mixed_graph(nodes: int, count: int, least: int, most: int, seed: int) -> Graph:
    """Clusters of ``least`` to ``most`` nodes: the three random models in turn, joined by a few
    edges. §3.7.1.1: mean degree 20, and 20 edges out of each cluster on average.
    """
    rng = np.random.default_rng(derived_seed(seed, "mixed graph"))
    sizes = rng.integers(least, most + 1, count)
    while sizes.sum() != nodes:
        step = int(np.sign(nodes - sizes.sum()))
        chosen = np.unique(rng.integers(0, count, min(count, abs(nodes - int(sizes.sum())))))
        sizes[chosen] = np.clip(sizes[chosen] + step, least, most)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    parts = [
        _edges(i, int(size), derived_seed(seed, "cluster", i)) + starts[i]
        for i, size in enumerate(sizes)
    ]
    between = rng.integers(0, nodes, (count * LINKS // 2, 2))
    return graph(np.concatenate([*parts, between]))


def _edges(index: int, nodes: int, seed: int) -> np.ndarray:
    """The edges (m, 2) of one cluster; which model it has follows from its place."""
    models = (
        (Model("erdos_renyi", nodes), DEGREE / nodes),
        (Model("watts_strogatz", nodes, DEGREE), 0.5),
        (Model("barabasi_albert", nodes), DEGREE / 2),
    )
    model, parameter = models[index % len(models)]
    drawn = model.draw(parameter, seed).adjacency.tocoo()
    upper = drawn.row < drawn.col
    return np.stack([drawn.row[upper], drawn.col[upper]], axis=1).astype(np.int64)


EGS, FIRST, LANCZOS, OURS = "EGS", "EGS, first minimum", "Lanczos", "ours"


def counts(graph: Graph, orders: Sequence[int], probes: int, seed: int) -> Iterator[Row]:
    """For each number of moments, or of Lanczos steps, what each method counts.

    "EGS" is Algorithm 5 with plain probes and λ* in the widest gap, "EGS, first minimum" the same
    at its first minimum, "Lanczos" the thesis's baseline, and "ours" is ``graphs.clusters``.
    """
    measured = plain_moments(graph, max(orders), probes, seed)
    spectra = lanczos_spectra(graph, orders, probes, seed)
    for order, spectrum in zip(orders, spectra, strict=True):
        yield from density_counts(fit(first_moments(measured, order), tol=TOLERANCE), graph)
        yield {"method": LANCZOS, "moments": order, "found": float(smoothed_count(spectrum))}
        count = clusters(graph, order, probes, seed)
        figures = {"found": float(count), "cut": count.cut, "stderr": float(count.stderr)}
        yield {"method": OURS, "moments": order, **figures}


def density_counts(density: MaxentDensity, graph: Graph) -> Iterator[Row]:
    """The counts of an entropic density at its widest gap and at its first minimum."""
    order = len(density.coefficients) - 1
    both = {EGS: gap_count(density, graph), FIRST: first_count(density, len(graph))}
    for method, (count, cut) in both.items():
        yield {"method": method, "moments": order, "found": count, "cut": cut}


def plain_moments(graph: Graph, count: int, probes: int, seed: int) -> Moments:
    """Chebyshev moments of the normalised Laplacian from random vectors alone (Algorithm 6)."""
    return moments(graph.normalized_laplacian(), count, "chebyshev", probes, seed, BOUNDS)


def lanczos_spectra(graph: Graph, depths: Sequence[int], probes: int, seed: int) -> list[Spectrum]:
    """The spectrum at each number of steps, of one run a probe."""
    operator = graph.normalized_laplacian()
    runs = lanczos_runs(operator, min(max(depths), len(graph)), probes, seed, "spectrum")
    return [quadrature(operator, runs, depth) for depth in depths]


def gap_count(density: MaxentDensity, graph: Graph) -> tuple[float, float]:
    """n∫₀^{λ*} p dλ and λ*, in the widest credible gap below 1 in arccos(1 − λ); NaN if none."""
    gaps = find_gaps(density, len(graph), int(graph.components.max()) + 1)
    if not gaps or gaps[0].angle < CELLS * math.pi / (len(density.coefficients) - 1):
        return math.nan, math.nan
    return gaps[0].count, gaps[0].cut


def first_count(density: MaxentDensity, nodes: int) -> tuple[float, float]:
    """n∫₀^{λ*} p dλ and λ*, the first minimum of p (Algorithm 5); NaN where p has none below 1."""
    cells = len(density.coefficients) - 1
    places = 1 - np.cos(np.linspace(0.0, math.pi / 2, POINTS * cells // 2 + 1))
    height = density.evaluate(places)
    lowest = np.flatnonzero((height[1:-1] < height[:-2]) & (height[1:-1] <= height[2:])) + 1
    if not len(lowest):
        return math.nan, math.nan
    cut = float(places[lowest[0]])
    return nodes * float(density.cumulative([cut])[0]), cut
