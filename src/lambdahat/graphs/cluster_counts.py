"""How many clusters a graph has: the eigenvalues of its normalised Laplacian before the widest gap."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from lambdahat._check import describe, require, require_count
from lambdahat.graphs.block_moments import EXACT_NODES, components, degrees_of_freedom
from lambdahat.graphs.labelling import cluster_labels
from lambdahat.graphs.spectra import GraphSpectrum, graph_moments, require_graph
from lambdahat.graphs.structure import Graph
from lambdahat.graphs.walks import walk_partition
from lambdahat.maxent import MaxentDensity, fit
from lambdahat.results import Array, Estimate, Moments
from lambdahat.storage import Result, Status

TOLERANCE = 1e-5
POINTS = 40  # of the grid in arccos(1 − λ), for each of its cells π/moments
SPILL = 0.25  # eigenvalues that may lie in a gap
SHARE = 0.001  # or this share of those below it
CELLS = 2.0  # the narrowest gap, in cells of π/moments


@dataclass(frozen=True)
class Gap(Result):
    """A gap in a spectrum: its minimum λ* = ``cut``, the ``count`` of eigenvalues below, its ends ``low``, ``high``.

    ``width`` is arccos(1 − high) − arccos(1 − low): in this variable m moments resolve π/m everywhere.
    """

    cut: float
    count: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """The width in arccos(1 − λ)."""
        return math.acos(1 - self.high) - math.acos(1 - self.low)


@dataclass(frozen=True)
class Clusters(Estimate):
    """The number of clusters, unrounded, with its standard error; NaN with the status NO_GAP where there is no gap.

    ``cut`` is λ*, ``gaps`` are all gaps found, the widest first: that one gave the count, the others tell of finer
    or coarser clusters. ``components`` is the exact number of connected components, isolated nodes included.
    ``labels`` (n,) are the nodes' clusters where they were asked for. A graph without edges has no ``spectrum``: its
    eigenvalues are all 0, and each node is a cluster.
    """

    cut: float = math.nan
    gaps: tuple[Gap, ...] = ()
    components: int = 0
    spectrum: GraphSpectrum | None = None
    labels: NDArray[np.int64] | None = field(default=None)

    @property
    def rounded(self) -> int:
        """The nearest whole number."""
        require(math.isfinite(float(self.value)), "the count", "be known", "none", self.status.value)
        return round(float(self.value))


def clusters(
    graph: Graph,
    moments: int = 100,
    probes: int | None = None,
    seed: int = 0,
    cut: float | None = None,
    labels: bool = False,
) -> Clusters:
    """The number of clusters n∫₀^{λ*} p(λ) dλ, λ* a minimum of the entropic spectrum (Algorithm 5, spectral thesis).

    Algorithm 5 takes the first minimum. At the resolution of many moments that is the one behind the eigenvalue 0 of
    the connected components, so here λ* lies in the widest gap below 1, measured in arccos(1 − λ); all gaps are in the
    result. A gap is where fewer than ¼ eigenvalue, or 0.1 % of those below, is found; one narrower than
    2π/``moments`` is not believed. ``cut`` sets λ* by hand. The error bar joins that of the probes, carried through
    the density, and the change from ¾ of the moments to all. Isolated nodes count as clusters (see ``Graph``).

    The probes are split by a random walk's guess at the clusters (``probed_moments``), which takes most of their error
    away and biases nothing. ``labels=True`` adds each node's cluster by spectral clustering.
    """
    require_graph(graph)
    require_count(moments, "moments", least=8)
    real = isinstance(cut, numbers.Real) and not isinstance(cut, bool)
    require(cut is None or real, "cut", "be a number in (0, 2), or None", describe(cut), error=TypeError)
    require(cut is None or 0 < cut < 2, "cut", "lie in (0, 2), where the spectrum does", repr(cut))
    count = int(graph.components.max()) + 1
    if count == len(graph):  # all eigenvalues are 0: there is no density to look for a gap in
        return Clusters(float(count), 0.0, cut=float(cut or 1.0), components=count,
                        labels=graph.components.astype(np.int64) if labels else None)  # fmt: skip
    small = probes is None and len(graph) <= EXACT_NODES
    partition = components(graph) if small else walk_partition(graph, seed)
    found = graph_moments(graph, moments, probes, seed, partition)
    density = fit(found, tol=TOLERANCE)
    spectrum = GraphSpectrum(density, found, len(graph), graph.num_edges, graph.name)
    gaps = find_gaps(density, len(graph), count)
    base = Clusters(math.nan, math.nan, found.cost, Status.NO_GAP, degrees_of_freedom(found, partition), gaps=gaps,
                    components=count, spectrum=spectrum)  # fmt: skip
    if cut is None and (not gaps or gaps[0].width < CELLS * math.pi / moments):
        return base
    place = gaps[0].cut if cut is None else float(cut)
    share, spread = _mass_below(density, found, place)
    fewer, _ = _mass_below(*_fewer(found), place)
    error = math.hypot(spread, share - fewer)
    result = replace(base, value=len(graph) * share, stderr=len(graph) * error, status=density.status, cut=place)
    if not labels:
        return result
    return replace(result, labels=cluster_labels(graph, max(1, result.rounded), seed))


def find_gaps(density: MaxentDensity, nodes: int, components: int) -> tuple[Gap, ...]:
    """The gaps below λ = 1, the widest first, behind at most half of the eigenvalues, or those 0 of the components."""
    cells = len(density.coefficients) - 1
    angles = np.linspace(0.0, math.pi, POINTS * cells + 1)
    places = 1 - np.cos(angles)
    counts = nodes * density.cumulative(places)
    with np.errstate(divide="ignore"):
        height = density._logarithm(places) + np.log(np.sin(angles))
    inner = np.arange(1, len(angles) - 1)
    lowest = inner[(height[1:-1] < height[:-2]) & (height[1:-1] <= height[2:])]
    most = max(nodes / 2, components) + 0.5
    lowest = lowest[(places[lowest] <= 1.0) & (counts[lowest] <= most)]
    found = sorted((_gap(places, counts, i) for i in lowest), key=lambda gap: -gap.width)
    kept: list[Gap] = []
    for gap in found:  # ripples of one gap: the widest speaks for all
        if not any(other.low <= gap.cut <= other.high or gap.low <= other.cut <= gap.high for other in kept):
            kept.append(gap)
    return tuple(kept)


def _gap(places: Array, counts: Array, lowest: int) -> Gap:
    """The stretch around a minimum in which hardly an eigenvalue lies."""
    spill = max(SPILL, SHARE * counts[lowest])
    inside = np.abs(counts - counts[lowest]) <= spill
    low = lowest - int(np.argmin(inside[lowest::-1])) + 1
    beyond = inside[lowest:]
    high = lowest + (int(np.argmin(beyond)) if not beyond.all() else len(beyond)) - 1
    return Gap(float(places[lowest]), float(counts[lowest]), float(places[low]), float(places[high]))


def _mass_below(density: MaxentDensity, moments: Moments, cut: float) -> tuple[float, float]:
    """∫₀^cut p dλ, corrected to first order for what p lacks of its moments, and its standard error.

    That is what the moments' errors make of it, joined with the correction: near atoms it takes half of the lack away.
    """
    slope = density.sensitivity(lambda places: (places <= cut).astype(np.float64))
    variance = float(slope @ moments.covariance[1:, 1:] @ slope)
    lacking = float(slope @ density.residuals[1:])
    return float(density.cumulative([cut])[0]) + lacking, math.hypot(math.sqrt(max(variance, 0.0)), lacking)


def _fewer(moments: Moments) -> tuple[MaxentDensity, Moments]:
    """The density of ¾ of the moments, and these."""
    kept = 3 * (len(moments) - 1) // 4 + 1
    part = replace(moments, values=moments.values[:kept], stderr=moments.stderr[:kept],
                   covariance=moments.covariance[:kept, :kept])  # fmt: skip
    return fit(part, tol=TOLERANCE), part
