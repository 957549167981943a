"""Rows: Chebyshev moments and cluster counts of graphs, beside SciPy's products and eigenvalues
and networkx's.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

import numpy as np
import torch
from numpy.polynomial.chebyshev import chebvander
from scipy.sparse.linalg import eigsh

from lambdahat._core.rng import generator
from lambdahat.bench.limits import Limit
from lambdahat.bench.plans import Plan, rows
from lambdahat.bench.records import OURS, UNIT, BenchRow
from lambdahat.bench.timing import Maker, Run
from lambdahat.experiments.graph_spectra.graph_subjects import planted_graph
from lambdahat.graphs.cluster_counts import clusters
from lambdahat.graphs.read import graph
from lambdahat.graphs.spectra import COLUMNS, components, probed_moments
from lambdahat.graphs.structure import Graph, csr_tensor
from lambdahat.results import Array

MOMENTS, PROBES, DENSE = 100, 96, 3000
# eigenvalues that a peer computes beyond the clusters, to see the gap
CLUSTER_MOMENTS, BEYOND = 80, 10


def graph_rows(plan: Plan) -> Iterator[list[BenchRow]]:
    """Moments of a small torus, where all eigenvalues can be had, and a large one; a count of
    clusters; on the CPU.
    """
    for side in (12, 16) if plan.quick else (45, 200):
        yield _torus_rows(plan, side)
    yield _cluster_rows(plan, 9 if plan.quick else 240)


def _torus_rows(plan: Plan, side: int) -> list[BenchRow]:
    """The error is the largest of all moments', against those of the known spectrum; a moment is
    at most 1.
    """
    one = graph(torus(side))
    exact = torus_moments(side, MOMENTS)
    matrix = csr_tensor(one.normalized(), torch.float64)
    block = torch.randn(
        len(one), COLUMNS, generator=generator(0, "bench vector"), dtype=torch.float64
    )
    makers: dict[str, Maker] = {UNIT: lambda: lambda: matrix @ block}
    makers[OURS] = lambda: lambda: probed_moments(one, MOMENTS, PROBES, 0, components(one)).values
    if plan.peers:
        makers["SciPy"] = lambda: lambda: _recurrence(one)
        if len(one) <= DENSE:
            makers["networkx"] = lambda: _all_eigenvalues(one)

    def error(found: Array) -> float:
        return float(np.abs(found - exact).max())

    least = Limit() if plan.quick else Limit(PROBES / COLUMNS * MOMENTS / 2, "its products")
    notes = {"SciPy": f"{PROBES} probes, one product a moment", "networkx": "all eigenvalues"}
    timed = plan.timed(makers)
    return rows(
        f"{MOMENTS} graph moments",
        f"torus, n = {len(one):,}",
        timed,
        least=least,
        error=error,
        accuracy=0.05,
        unit=f"product with {COLUMNS} vectors",
        notes=notes,
    )


def _cluster_rows(plan: Plan, count: int) -> list[BenchRow]:
    """How many clusters a graph of ``count`` planted ones has (Table 3.2, spectral thesis)."""
    one = planted_graph(count, 0.1, 0)
    matrix = csr_tensor(one.normalized(), torch.float64)
    block = torch.randn(
        len(one), COLUMNS, generator=generator(0, "bench vector"), dtype=torch.float64
    )
    makers: dict[str, Maker] = {UNIT: lambda: lambda: matrix @ block}
    makers[OURS] = lambda: lambda: float(clusters(one, CLUSTER_MOMENTS))
    if plan.peers:
        makers["SciPy"] = lambda: lambda: _largest_gap(one, count + BEYOND)

    def error(found: float) -> float:
        return abs(found / count - 1)

    notes = {"SciPy": f"eigsh, {count + BEYOND} eigenvalues, a number it was told"}
    return rows(
        "cluster count",
        f"{count} clusters, n = {len(one):,}",
        plan.timed(makers),
        error=error,
        accuracy=0.05,
        unit=f"product with {COLUMNS} vectors",
        notes=notes,
    )


def _largest_gap(one: Graph, many: int) -> float:
    """The number of the smallest eigenvalues λ of the Laplacian below the largest gap in
    arccos(1 − λ).
    """
    start = generator(0, "bench vector")
    values = eigsh(
        one.normalized(),
        many,
        which="LA",
        v0=torch.randn(len(one), generator=start).double().numpy(),
    )[0]
    return float(np.argmax(np.diff(np.arccos(np.clip(np.sort(values)[::-1], -1, 1)))) + 1)


def torus(side: int) -> Array:
    """The edges (2·side², 2) of a square grid that closes on itself."""
    numbers = np.arange(side * side).reshape(side, side)
    pairs = [
        np.stack([numbers.ravel(), np.roll(numbers, -1, axis).ravel()], axis=1) for axis in (0, 1)
    ]
    return np.concatenate(pairs)


def torus_moments(side: int, count: int) -> Array:
    """tr T_k(L − I)/n for k = 0 … count: the eigenvalues of L are 1 − (cos a + cos b)/2."""
    waves = np.cos(2 * np.pi * np.arange(side) / side)
    values = -(waves[:, None] + waves) / 2
    return np.asarray(chebvander(values.ravel(), count).mean(axis=0))


def _recurrence(one: Graph) -> Array:
    """T_{k+1} = 2BT_k − T_{k−1} on a block of random signs, B = −D^{−½}WD^{−½}, in SciPy and
    numpy.
    """
    signs = np.random.default_rng(0).choice((-1.0, 1.0), (len(one), PROBES))
    matrix = -one.normalized()
    before, now = signs, matrix @ signs
    found = [1.0, float((signs * now).mean())]
    for _ in range(MOMENTS - 1):
        before, now = now, 2 * (matrix @ now) - before
        found.append(float((signs * now).mean()))
    return np.array(found)


def _all_eigenvalues(one: Graph) -> Run:
    networkx = import_module("networkx")
    made = networkx.from_scipy_sparse_array(one.adjacency)

    def run() -> Array:
        values = networkx.normalized_laplacian_spectrum(made).real
        return np.asarray(chebvander(values - 1, MOMENTS).mean(axis=0))

    return run
