"""Numbers of clusters as chapter 3 counts them, by the first minimum of a spectrum, and as
lambdahat does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from lambdahat.estimators import lanczos_runs, moments, quadrature
from lambdahat.experiments.kit.cells import Row
from lambdahat.graphs.block_moments import BOUNDS
from lambdahat.graphs.cluster_counts import CELLS, POINTS, TOLERANCE, clusters, find_gaps
from lambdahat.graphs.lanczos_baseline import smoothed_count
from lambdahat.graphs.structure import Graph
from lambdahat.maxent import MaxentDensity, fit
from lambdahat.results import Moments, Spectrum

EGS, FIRST, LANCZOS, OURS = "EGS", "EGS, first minimum", "Lanczos", "ours"


def counts(graph: Graph, orders: Sequence[int], probes: int, seed: int) -> Iterator[Row]:
    """For each number of moments, or of Lanczos steps, what each method counts.

    "EGS" is Algorithm 5 with plain probes and λ* in the widest gap, "EGS, first minimum" the same
    at its first minimum, "Lanczos" the thesis's baseline, and "ours" is ``graphs.clusters``.
    """
    measured, spectra = (
        plain_moments(graph, max(orders), probes, seed),
        lanczos_spectra(graph, orders, probes, seed),
    )
    for order, spectrum in zip(orders, spectra, strict=True):
        density = fit(first_moments(measured, order), tol=TOLERANCE)
        for method, (found, cut) in (
            (EGS, gap_count(density, graph)),
            (FIRST, first_count(density, len(graph))),
        ):
            yield {"method": method, "moments": order, "found": found, "cut": cut}
        yield {"method": LANCZOS, "moments": order, "found": float(smoothed_count(spectrum))}
        mine = clusters(graph, order, probes, seed)
        yield {
            "method": OURS,
            "moments": order,
            "found": float(mine),
            "cut": mine.cut,
            "stderr": float(mine.stderr),
        }


def plain_moments(graph: Graph, count: int, probes: int, seed: int) -> Moments:
    """Chebyshev moments of the normalised Laplacian from random vectors alone (Algorithm 6)."""
    return moments(graph.normalized_laplacian(), count, "chebyshev", probes, seed, BOUNDS)


def first_moments(found: Moments, count: int) -> Moments:
    """The first of them, 0 … ``count``."""
    kept = slice(count + 1)
    return replace(
        found,
        values=found.values[kept],
        stderr=found.stderr[kept],
        covariance=found.covariance[kept, kept],
    )


def lanczos_spectra(graph: Graph, depths: Sequence[int], probes: int, seed: int) -> list[Spectrum]:
    """The spectrum at each number of steps, of one run a probe."""
    operator = graph.normalized_laplacian()
    runs = lanczos_runs(operator, min(max(depths), len(graph)), probes, seed, "spectrum")
    return [quadrature(operator, runs, depth) for depth in depths]


def gap_count(density: MaxentDensity, graph: Graph) -> tuple[float, float]:
    """n∫₀^{λ*} p dλ and λ*, in the gap below 1 that is widest in arccos(1 − λ); NaN where none
    is believed.
    """
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
