"""Chebyshev moments of the normalised Laplacian by blocks of probes: one sparse product for two
moments of a probe.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lambdahat._core.check import require_count
from lambdahat._core.progress import report
from lambdahat._core.rng import generator
from lambdahat.graphs.structure import Graph, csr_tensor
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
    """Disjoint groups of nodes: ``labels`` (n,) from 0 on. ``exact`` says that they are the
    connected components.

    The unit vectors u_C ∝ √d on C and 0 elsewhere, the columns of Q, are orthonormal. Those of
    components span the null space of the normalised Laplacian; those of any partition into clusters
    come near its small eigenvalues' space.
    """

    labels: NDArray[np.int32]
    exact: bool

    @property
    def count(self) -> int:
        """How many groups there are."""
        return int(self.labels.max()) + 1


def components(graph: Graph) -> Partition:
    """The connected components."""
    return Partition(graph.components, True)


def exact_moments(values: Array, count: int) -> Moments:
    """tr T_k(L − I)/n for k = 0 … ``count`` from all eigenvalues (n,), without error."""
    table = np.polynomial.chebyshev.chebvander(values - 1.0, count).mean(axis=0)
    zeros = np.zeros(count + 1)
    return Moments(
        table,
        zeros,
        np.zeros((count + 1, count + 1)),
        "chebyshev",
        BOUNDS,
        len(values),
        len(values),
    )


def eigenvalues(graph: Graph) -> Array:
    """All eigenvalues of the normalised Laplacian, ascending (n,), by a dense decomposition."""
    values = torch.linalg.eigvalsh(graph.normalized_laplacian().dense()).numpy()
    return np.asarray(values.clip(*BOUNDS), dtype=np.float64)


def probed_moments(
    graph: Graph, count: int, probes: int, seed: int, partition: Partition
) -> Moments:
    """tr T_k(L − I)/n for k = 0 … ``count`` from random probes, split by a partition (Algorithm 6,
    spectral thesis).

    With Q of the partition, tr φ(L) = tr QᵀφQ + tr (I − QQᵀ)φ(I − QQᵀ). The second part is read off
    Gaussian probes without their share in Q. For components the first is known: L is 0 there. For
    any other partition it is read off a quarter of the probes (at least 4), Qs with random signs s:
    between clusters that few edges join φ is small, and so is their error. Both parts are positive
    measures of known mass, so the moments are those of a positive measure.

    The recurrence runs on D^{−1/2}WD^{−1/2} = −(L − I), and T_{2k} = 2T_k² − 1, T_{2k+1} =
    2T_kT_{k+1} − T_1 give two moments a product.
    """
    require_count(count, "moments", least=2)
    require_count(probes, "probes", 8, cure="the standard error comes from their spread")
    dtype = torch.float32 if len(graph) >= SINGLE_NODES else torch.float64
    matrix = csr_tensor(
        graph.normalized(np.float32 if dtype == torch.float32 else np.float64), dtype
    )
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
    stderr = np.sqrt(np.diag(covariance).clip(0.0))
    return Moments(
        values, stderr, covariance, "chebyshev", BOUNDS, probes, probes * ((count + 1) // 2)
    )


def coarse_probes(partition: Partition, probes: int) -> int:
    """How many of the probes read the part of the groups themselves: a quarter, and at least 4
    to know their spread.
    """
    return 0 if partition.exact else max(4, probes // 4)


def degrees_of_freedom(moments: Moments, partition: Partition) -> float:
    """With which the moments' errors are known: those of the part read off the fewest probes;
    infinite for exact.
    """
    if not moments.stderr.any():
        return math.inf
    first = coarse_probes(partition, moments.probes)
    return float(min(count for count in (first, moments.probes - first) if count) - 1)


class _Frame:
    """The vectors Q of a partition, √(d/vol) on each group, and probes in their span or
    orthogonal to it.
    """

    def __init__(self, graph: Graph, partition: Partition, dtype: torch.dtype) -> None:
        degrees = np.where(graph.degrees > 0, graph.degrees, 1.0)
        volumes = np.bincount(partition.labels, degrees)
        self.entries = torch.as_tensor(np.sqrt(degrees / volumes[partition.labels])).to(dtype)[
            :, None
        ]
        self.labels, self.count = (
            torch.as_tensor(partition.labels.astype(np.int64)),
            partition.count,
        )

    def coarse(self, columns: int, rng: torch.Generator) -> Tensor:
        """Qs for random signs s, (n, columns)."""
        signs = (
            torch.randint(0, 2, (self.count, columns), generator=rng)
            .to(self.entries.dtype)
            .mul_(2)
            .sub_(1)
        )
        return signs[self.labels] * self.entries

    def rest(self, columns: int, rng: torch.Generator) -> Tensor:
        """(I − QQᵀ)z for Gaussian z, (n, columns)."""
        block = torch.randn(len(self.labels), columns, generator=rng, dtype=self.entries.dtype)
        inside = torch.zeros(self.count, columns, dtype=block.dtype)
        parts = list(
            zip(block.split(RUN), self.labels.split(RUN), self.entries.split(RUN), strict=True)
        )
        for rows, labels, entries in parts:
            inside.index_add_(0, labels, rows * entries)
        for rows, labels, entries in parts:
            rows.sub_(inside[labels].mul_(entries))
        return block


def _readings(
    matrix: Tensor, draw: Draw, count: int, probes: int, seed: int, place: tuple[int, int]
) -> Array:
    """zᵀT_k(B)z/zᵀz (probes, count + 1), a block of probes at a time; ``place`` is (probes
    before, of all).
    """
    before, total = place
    width = COLUMNS * max(1, ELEMENTS // (COLUMNS * len(matrix)))
    found = []
    for first in range(0, probes, width):
        last = min(first + width, probes)
        parts = [
            draw(
                min(COLUMNS, last - column),
                generator(seed, "graph probes", before, column // COLUMNS),
            )
            for column in range(first, last, COLUMNS)
        ]
        moments = _paired(matrix, parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), count)
        found.append(moments / moments[:, :1])
        report("moments", before + last, total)
    return np.asarray(torch.cat(found).numpy())


def _paired(matrix: Tensor, start: Tensor, count: int) -> Tensor:
    """zᵀT_k(B)z (b, count + 1) in float64 for the columns z of ``start`` (n, b), which is used up.

    The products of two blocks are formed a run of rows at a time, which ``torch.sum`` adds in a
    tree: float32 ones are exact to its rounding, and take no memory to speak of.
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
    found = sums.sum(dim=1, dtype=torch.float64)
    for parity in (0, 1):
        found[2 + parity :: 2].mul_(2).sub_(found[parity])
    return found[: count + 1].T
