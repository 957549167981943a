"""What entropic spectra are compared with: Lanczos smoothed by a kernel (Ubaru et al. 2017; Lin
et al. 2016).
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import ndtr

from lambdahat._core.check import require_count, require_positive
from lambdahat._core.storage import Status
from lambdahat.estimators import spectrum
from lambdahat.graphs.spectra import require_graph
from lambdahat.graphs.structure import Graph
from lambdahat.results import Array, Estimate, Spectrum

POINTS = 2000
WIDTH = 0.02


def smoothed_lanczos_clusters(
    graph: Graph, depth: int = 80, probes: int = 100, width: float = WIDTH, seed: int = 0
) -> Estimate:
    """The number of clusters by Algorithm 5 on a spectrum by Lanczos, each Ritz value a Gaussian of
    ``width``.

    λ* is the first minimum of the smoothed density, and the count all of its mass below, what the
    kernel spread to negative λ included. One product a step and probe. The error bar is that of the
    probes.
    """
    require_graph(graph)
    require_count(depth, "depth", 2, len(graph))
    require_positive(width, "width")
    return smoothed_count(spectrum(graph.normalized_laplacian(), depth, probes, seed), width)


def smoothed_count(found: Spectrum, width: float = WIDTH) -> Estimate:
    """How many eigenvalues a spectrum has below the first minimum of its smoothed density."""
    cut = _first_minimum(found, width)
    if cut is None:
        return Estimate(math.nan, math.nan, found.cost, Status.NO_GAP)
    return found.expectation(lambda nodes: ndtr((cut - nodes) / width), found.dim)


def _first_minimum(found: Spectrum, width: float) -> float | None:
    places = np.linspace(0.0, 2.0, POINTS)
    density = smoothed(found, places, width)
    lowest = np.flatnonzero((density[1:-1] < density[:-2]) & (density[1:-1] <= density[2:])) + 1
    return float(places[lowest[0]]) if len(lowest) else None


def smoothed(found: Spectrum, places: Array, width: float) -> Array:
    """The density Σ_i w_i k(λ − λ_i) at ``places`` (Eq. 3.6), averaged over the probes."""
    nodes, weights = found.nodes.ravel(), found.weights.ravel() / len(found.nodes)
    total = np.zeros(len(places))
    for part in np.array_split(np.arange(len(nodes)), max(1, len(nodes) // 1000)):
        apart = (places[:, None] - nodes[part]) / width
        total += np.exp(-0.5 * apart**2) @ weights[part]
    return total / (width * math.sqrt(2 * math.pi))
