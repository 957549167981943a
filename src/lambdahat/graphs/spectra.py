"""The entropic graph spectrum: maximum entropy given moments of the normalised Laplacian."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray
from torch import Tensor

from lambdahat._core.check import require, require_count, require_type
from lambdahat._core.progress import report
from lambdahat._core.rng import generator
from lambdahat._core.storage import Result, Status
from lambdahat.graphs.structure import Graph, csr_tensor, symmetric_components
from lambdahat.maxent import MaxentDensity, fit
from lambdahat.results import Array, Moments

BOUNDS = (0.0, 2.0)  # hold the spectrum of every normalised Laplacian
EXACT_NODES = 1000
DEFAULT_PROBES = 100
# from here on the blocks are float32: the probes' own error is far above its rounding
SINGLE_NODES = 50_000
COLUMNS = 16  # probes drawn together
# of a block: a small graph's is wider, for a call costs as much as a product there
ELEMENTS = 1 << 18
RUN = 4096  # rows that stay in the cache

Draw = Callable[[int, torch.Generator], Tensor]  # of so many probes (n, columns)


@dataclass(frozen=True)
class Partition:
    """Disjoint groups of nodes: ``labels`` (n,) from 0 on; ``exact`` if they are the components.

    The unit vectors u_C ∝ √d on C and 0 elsewhere, the columns of Q, are orthonormal. Those of
    components span the null space of the normalised Laplacian; those of clusters come near the
    eigenspace of its small eigenvalues.
    """

    labels: NDArray[np.int32]
    exact: bool

    @property
    def count(self) -> int:
        """The number of groups."""
        return int(self.labels.max()) + 1


def components(graph: Graph) -> Partition:
    """The connected components."""
    return Partition(graph.components, True)


def exact_moments(values: Array, count: int) -> Moments:
    """tr T_k(L − I)/n for k = 0 … ``count`` from all eigenvalues (n,), without error."""
    table = np.polynomial.chebyshev.chebvander(values - 1.0, count).mean(axis=0)
    errors, size = (np.zeros(count + 1), np.zeros((count + 1, count + 1))), len(values)
    return Moments(table, *errors, "chebyshev", BOUNDS, size, size)


def eigenvalues(graph: Graph) -> Array:
    """All eigenvalues of the normalised Laplacian, ascending (n,), by a dense decomposition."""
    values = torch.linalg.eigvalsh(graph.normalized_laplacian().dense()).numpy()
    return np.asarray(values.clip(*BOUNDS), dtype=np.float64)


def probed_moments(
    graph: Graph, count: int, probes: int, seed: int, partition: Partition
) -> Moments:
    """tr T_k(L − I)/n for k = 0 … ``count`` from random probes (Algorithm 6, spectral thesis).

    With Q of the partition, tr φ(L) = tr QᵀφQ + tr (I − QQᵀ)φ(I − QQᵀ). Gaussian probes without
    their part in Q give the second term. For components the first is known: L is 0 there. For any
    other partition a quarter of the probes (at least 4) give it, Qs with random signs s, with a
    small error if few edges join the groups. Both terms are positive measures of known mass, and so
    is their sum.

    The recurrence runs on D^{−1/2}WD^{−1/2} = −(L − I); T_{2k} = 2T_k² − 1 and T_{2k+1} =
    2T_kT_{k+1} − T_1 give two moments per product.
    """
    require_count(count, "moments", least=2)
    require_count(probes, "probes", 8, cure="the standard error comes from their spread")
    dtype = torch.float32 if len(graph) >= SINGLE_NODES else torch.float64
    single = dtype == torch.float32
    matrix = csr_tensor(graph.normalized(np.float32 if single else np.float64), dtype)
    frame = _Frame(graph, partition, dtype)
    signs = np.where(np.arange(count + 1) % 2, -1.0, 1.0)
    share, n = partition.count / len(graph), len(graph)
    first = coarse_probes(partition, probes)
    values, covariance = np.zeros(count + 1), np.zeros((count + 1, count + 1))
    if partition.exact:
        values += share * signs
    for total, offset, weight, draw in (
        (first, 0, share, frame.coarse),
        (probes - first, first, 1 - share, frame.rest),
    ):
        if total and weight > 0.5 / n:
            readings = _readings(matrix, draw, count, total, seed, (offset, probes)) * signs
            values += weight * readings.mean(axis=0)
            # not by numpy: its BLAS has threads of its own, which spin on while torch wants the
            # cores for the next call
            covariance += weight**2 * torch.cov(torch.as_tensor(readings.T)).numpy() / total
    stderr, cost = np.sqrt(np.diag(covariance).clip(0.0)), probes * ((count + 1) // 2)
    return Moments(values, stderr, covariance, "chebyshev", BOUNDS, probes, cost)


def coarse_probes(partition: Partition, probes: int) -> int:
    """The number of probes of the groups' own part: a quarter, and at least 4 for a spread."""
    return 0 if partition.exact else max(4, probes // 4)


def degrees_of_freedom(moments: Moments, partition: Partition) -> float:
    """Degrees of freedom of the moments' errors: of the part with the fewest probes."""
    if not moments.stderr.any():
        return math.inf
    first = coarse_probes(partition, moments.probes)
    return float(min(count for count in (first, moments.probes - first) if count) - 1)


class _Frame:
    """The vectors Q of a partition, √(d/vol) on each group, and probes within and orthogonal."""

    def __init__(self, graph: Graph, partition: Partition, dtype: torch.dtype) -> None:
        degrees = np.where(graph.degrees > 0, graph.degrees, 1.0)
        volumes = np.bincount(partition.labels, degrees)
        entries = np.sqrt(degrees / volumes[partition.labels])
        self.entries = torch.as_tensor(entries).to(dtype)[:, None]
        self.labels = torch.as_tensor(partition.labels.astype(np.int64))
        self.count = partition.count

    def coarse(self, columns: int, rng: torch.Generator) -> Tensor:
        """Qs for random signs s, (n, columns)."""
        signs = torch.randint(0, 2, (self.count, columns), generator=rng).to(self.entries.dtype)
        return signs.mul_(2).sub_(1)[self.labels] * self.entries

    def rest(self, columns: int, rng: torch.Generator) -> Tensor:
        """(I − QQᵀ)z for Gaussian z, (n, columns)."""
        block = torch.randn(len(self.labels), columns, generator=rng, dtype=self.entries.dtype)
        inside = torch.zeros(self.count, columns, dtype=block.dtype)
        whole = block, self.labels, self.entries
        parts = list(zip(*(part.split(RUN) for part in whole), strict=True))
        for rows, labels, entries in parts:
            inside.index_add_(0, labels, rows * entries)
        for rows, labels, entries in parts:
            rows.sub_(inside[labels].mul_(entries))
        return block


def _readings(
    matrix: Tensor, draw: Draw, count: int, probes: int, seed: int, place: tuple[int, int]
) -> Array:
    """zᵀT_k(B)z/zᵀz (probes, count + 1) by blocks; ``place`` is (probes before, of all)."""
    before, total = place
    width = COLUMNS * max(1, ELEMENTS // (COLUMNS * len(matrix)))
    found = []
    for first in range(0, probes, width):
        last = min(first + width, probes)
        parts = []
        for column in range(first, last, COLUMNS):
            rng = generator(seed, "graph probes", before, column // COLUMNS)
            parts.append(draw(min(COLUMNS, last - column), rng))
        moments = _paired_moments(
            matrix, parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), count
        )
        found.append(moments / moments[:, :1])
        report("moments", before + last, total)
    return np.asarray(torch.cat(found).numpy())


def _paired_moments(matrix: Tensor, start: Tensor, count: int) -> Tensor:
    """zᵀT_k(B)z (b, count + 1) in float64 for the columns z of ``start`` (n, b), which is used up.

    Products of two blocks are formed and added a run of rows at a time: float32 sums stay exact to
    rounding and take hardly any memory.
    """
    (n, columns), most = start.shape, count + count % 2
    run = max(1, ELEMENTS // columns)
    products = start.new_empty(min(run, n), columns)
    sums = start.new_empty(most + 1, -(-n // run), columns)

    def dots(order: int, x: Tensor, y: Tensor) -> None:
        for some, others, total in zip(x.split(run), y.split(run), sums[order], strict=True):
            torch.sum(torch.mul(some, others, out=products[: len(some)]), dim=0, out=total)

    before, now = start, matrix @ start
    dots(0, before, before)
    dots(1, before, now)
    dots(2, now, now)
    for order in range(3, most, 2):
        torch.addmm(before, matrix, now, beta=-1, alpha=2, out=before)
        before, now = now, before
        dots(order, before, now)
        dots(order + 1, now, now)
    moments = sums.sum(dim=1, dtype=torch.float64)
    for parity in (0, 1):
        moments[2 + parity :: 2].mul_(2).sub_(moments[parity])
    return moments[: count + 1].T


TOLERANCE = 1e-4


@dataclass(frozen=True)
class GraphSpectrum(Result):
    """The spectral ``density`` of a graph on [0, 2], and the ``moments`` it came from."""

    density: MaxentDensity
    moments: Moments
    nodes: int
    edges: int
    name: str = "graph"

    @property
    def status(self) -> Status:
        """The status of the density."""
        return self.density.status

    @property
    def cost(self) -> int:
        """Products with the normalised Laplacian."""
        return self.moments.cost


def spectrum(
    graph: Graph,
    moments: int = 100,
    probes: int | None = None,
    seed: int = 0,
    tol: float = TOLERANCE,
) -> GraphSpectrum:
    """The spectrum of the normalised Laplacian as a smooth density (Algorithm 4, spectral thesis).

    Its Chebyshev moments are exact for graphs of up to 1,000 nodes, by a dense decomposition, and
    come from 100 random ``probes`` beyond, ⌈moments/2⌉ products each; given ``probes`` are used for
    any graph. The density of maximum entropy matches them to ``tol``, or to a hundredth of their
    error if that is more. Atoms become peaks of width π/moments in arccos(1 − λ), and their height
    depends on ``tol``: compare only spectra of equal ``moments`` and ``tol``.
    """
    require_graph(graph)
    require_count(moments, "moments", least=2)
    measured = graph_moments(graph, moments, probes, seed, components(graph))
    return GraphSpectrum(fit(measured, tol=tol), measured, len(graph), graph.num_edges, graph.name)


def graph_moments(
    graph: Graph, count: int, probes: int | None, seed: int, partition: Partition
) -> Moments:
    """Chebyshev moments as ``probes`` says: exact for small graphs where it is None."""
    if probes is None and len(graph) <= EXACT_NODES:
        return exact_moments(eigenvalues(graph), count)
    probes = DEFAULT_PROBES if probes is None else probes
    return probed_moments(graph, count, probes, seed, partition)


def require_graph(graph: object) -> None:
    """Refuse what is no ``Graph``."""
    cure = "make one with lh.graphs.graph(source)"
    require_type(graph, Graph, "graph", "be a lambdahat graph", cure)


STEPS = 40
STARTS = 16
EDGES = 1 << 16  # whose ends are compared at once: a few MiB, whatever the graph
APART = 0.5  # of the mean length: independent directions differ by √2


def walk_partition(graph: Graph, seed: int) -> Partition:
    """The components of the graph without the edges whose ends a lazy random walk separates.

    Y = (½(I + D⁻¹W))^40 R/√d for Gaussian R (n, 16) is nearly constant on a cluster that the walk
    hardly leaves. An edge is cut if ‖Y_i − Y_j‖ is above half of the mean of ‖Y_i‖ and ‖Y_j‖. Any
    partition gives unbiased moments; a good one gives precise ones.
    """
    normal = csr_tensor(graph.normalized(np.float32), torch.float32)
    block = torch.randn(len(graph), STARTS, generator=generator(seed, "walk"), dtype=torch.float32)
    for _ in range(STEPS):
        block = torch.addmm(block, normal, block, beta=0.5, alpha=0.5)
    del normal
    scale = 1.0 / np.sqrt(np.where(graph.degrees > 0, graph.degrees, 1.0))
    places = block.mul_(torch.as_tensor(scale.astype(np.float32))[:, None]).numpy()
    labels = symmetric_components(_near(graph.adjacency, places))
    count = int(labels.max()) + 1
    whole = count == int(graph.components.max()) + 1
    return Partition(graph.components if whole else labels, whole)


def _near(adjacency: Any, places: NDArray[np.float32]) -> Any:
    """The edges whose ends the places (n, starts) do not tell apart, some at a time."""
    indptr, indices = adjacency.indptr, adjacency.indices
    lengths = np.sqrt(np.einsum("ij,ij->i", places, places))
    ends, columns, size = np.zeros_like(indptr), np.empty_like(indices), 0
    for first in range(0, len(indices), EDGES):
        j = indices[first : first + EDGES]
        i = np.searchsorted(indptr, np.arange(first, first + len(j)), side="right") - 1
        apart = np.linalg.norm(places[i] - places[j], axis=1)
        near = apart < APART / 2 * (lengths[i] + lengths[j])
        np.add.at(ends, i[near] + 1, 1)
        columns[size : size + int(near.sum())] = j[near]
        size += int(near.sum())
    np.cumsum(ends, out=ends)
    entries = np.ones(size, dtype=bool), columns[:size], ends
    return scipy.sparse.csr_array(entries, shape=adjacency.shape)


@dataclass(frozen=True)
class EdgePerturbation(Result):
    """Weyl's ``bound`` on every eigenvalue's move (Eq. 3.14); ``first_order`` is Eq. 3.13."""

    bound: float
    first_order: float


def edge_perturbation(graph: Graph, first: int, second: int) -> EdgePerturbation:
    """How far a new edge of weight 1 between two nodes can move the eigenvalues of L_norm.

    ``bound`` is ‖L' − L‖₂, exact, in time and memory linear in the two nodes' neighbours.
    ``first_order`` is |s_1/2d_1 + s_2/2d_2 − 2/√(d_1d_2)| with s_i = Σ_{g~i} 1/√(d_id_g): Eq. 3.13
    with the factors 1/2d of its proof, which its print omits (without them Corollary 3.1 fails).
    Its terms may cancel, so that for very unequal degrees it is no bound.
    """
    require_graph(graph)
    for name, node in (("first", first), ("second", second)):
        require_count(node, name, 0, len(graph) - 1)
    degrees = graph.degrees
    apart = first != second and graph.adjacency[first, second] == 0
    require(apart, "second", "be another node, without an edge to first yet", str(second))
    alone = degrees[first] == 0 or degrees[second] == 0
    cure = "its eigenvalue 0 can become up to 2"
    require(not alone, "first and second", "have an edge each", "an isolated node", cure)
    terms = []
    for node in (first, second):
        near, weights = _row(graph, node)
        share = float((weights / np.sqrt(degrees[near])).sum())
        terms.append(share / (2 * degrees[node] ** 1.5))
    middle = 2 / np.sqrt(degrees[first] * degrees[second])
    return EdgePerturbation(_norm_of_change(graph, first, second), float(abs(sum(terms) - middle)))


def _norm_of_change(graph: Graph, first: int, second: int) -> float:
    """‖L' − L‖₂, where L' − L = −Σ_i (e_i c_iᵀ + c_i e_iᵀ) over the two nodes has rank 4 at most.

    c_i is the change of row i of D^{−1/2}WD^{−1/2}, its diagonal halved, the new entry in c_1 only.
    With (e_1 e_2 c_1 c_2) = QR the norm is that of R(0 I; I 0)Rᵀ, 4 × 4.
    """
    touched = [first, second], _row(graph, first)[0], _row(graph, second)[0]
    nodes = np.unique(np.concatenate(touched))
    columns = np.zeros((len(nodes), 4))
    for i, node in enumerate((first, second)):
        near, weights = _row(graph, node)
        degree = graph.degrees[near]
        raised = degree + np.isin(near, (first, second))  # a loop
        before, after = graph.degrees[node], graph.degrees[node] + 1
        change = weights / np.sqrt(after * raised) - weights / np.sqrt(before * degree)
        columns[np.searchsorted(nodes, node), i] = 1.0
        columns[np.searchsorted(nodes, near), 2 + i] = np.where(near == node, change / 2, change)
    product = (graph.degrees[[first, second]] + 1).prod()
    columns[np.searchsorted(nodes, second), 2] = 1 / np.sqrt(product)
    factor = np.asarray(np.linalg.qr(columns, mode="r"))
    swap = np.roll(np.eye(4), 2, axis=0)
    return float(np.abs(np.linalg.eigvalsh(factor @ swap @ factor.T)).max())


def _row(graph: Graph, node: int) -> tuple[Any, Array]:
    """The neighbours of a node and the weights of its edges."""
    part = slice(*graph.adjacency.indptr[node : node + 2])
    return graph.adjacency.indices[part], graph.adjacency.data[part].astype(np.float64)
