"""The number of clusters of a graph: eigenvalues of its Laplacian below the widest gap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.cluster.vq import kmeans2
from scipy.special import ndtr

from lambdahat._core.check import require, require_count, require_number, require_positive
from lambdahat._core.rng import derived_seed, generator
from lambdahat._core.storage import Result, Status
from lambdahat.estimators import eigenpairs, spectrum
from lambdahat.graphs import spectra
from lambdahat.graphs.structure import Graph, csr_tensor
from lambdahat.maxent import MaxentDensity, fit
from lambdahat.operators.matrix import Matrix
from lambdahat.results import Array, Estimate, Moments, Spectrum

STARTS = 5


def cluster_labels(graph: Graph, count: int, seed: int = 0) -> NDArray[np.int64]:
    """The cluster 0 … ``count`` − 1 of each node, (n,), by spectral clustering (Ng et al. 2001).

    The rows of the first ``count`` eigenvectors of L_norm, made unit vectors, are grouped by
    k-means, the best of five starts. As many clusters as components are the components.
    """
    require_count(count, "count", 1, len(graph))
    if count == int(graph.components.max()) + 1:
        return graph.components.astype(np.int64)
    adjacency = Matrix(csr_tensor(graph.normalized(), torch.float64), symmetric=True, psd=False)
    vectors = eigenpairs(adjacency, count, "largest", seed=seed).vectors.numpy()
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    rows = vectors / np.where(lengths > 0, lengths, 1.0)
    best, least = np.zeros(len(graph), dtype=np.int64), np.inf
    for start in range(STARTS):
        rng = np.random.default_rng(derived_seed(seed, "k-means", start))
        centres, labels = kmeans2(rows, count, minit="++", rng=rng, missing="warn")
        spread = float(((rows - centres[labels]) ** 2).sum())
        if spread < least:
            best, least = labels.astype(np.int64), spread
    return best


TOLERANCE = 1e-5
POINTS = 40  # of the grid in arccos(1 − λ), for each of its cells π/moments
SPILL = 0.25  # eigenvalues that may lie in a gap
SHARE = 0.001  # or this share of those below it
CELLS = 2.0  # the narrowest gap that a density resolves, in cells of π/moments
# mean of the first spacing at a semicircle's edge, over radius · n^(−2/3) (Tracy–Widom, GOE)
EDGE_SPACING = 1.03
# of these spacings: the widest nontrivial gap of 114 random graphs without clusters
STANDS_OUT = 2.3
WIDEST = 0.5  # a gap of half of [0, 1] stands out in the smallest graph
# weights go with this power of the width: the most likely on 408 planted partitions, clear and
# blurred
SHARPNESS = 3.0
HEADLINE = 0.5  # below it the likeliest count is less likely than all others together
LEAST_WEIGHT = 0.01  # below it a gap is no rival
NORMAL_95 = 1.959  # rounded down, so that the interval holds its ends
EXTRA_COLUMNS = 8  # of the block that counts eigenvalues, beyond those expected
GROWTH = 1e6  # of an eigenvector below the gap beside those above, in that block
RESCALED = 16  # orders after which the block is scaled
BLOCK_ELEMENTS = 1 << 25  # of the block: 256 MiB
# up to which no clusters but the components is confirmed by all eigenvalues, not the least
CONFIRMED_NODES = 2500
MOST_LEAST = 256  # of the least eigenvalues that are computed to confirm it
BEYOND = 8  # eigenvalues to see behind the edge of the bulk
LEAST_ACCURACY = 1e-6  # of these eigenvalues
SHOWN = 4  # gaps that are named where none stands out


@dataclass(frozen=True)
class Gap(Result):
    """A gap in a spectrum: its middle or minimum λ* = ``cut``, the ``count`` of eigenvalues below,
    its ends.

    ``weight`` is how likely this gap, among all, is the one that ends the clusters' eigenvalues; 0
    for a gap that is no rival of the widest.
    """

    cut: float
    count: float
    low: float
    high: float
    weight: float = 0.0

    @property
    def width(self) -> float:
        """The width in λ up to 1: eigenvalues beyond do not indicate clusters."""
        return max(min(self.high, 1.0) - self.low, 0.0)

    @property
    def angle(self) -> float:
        """The width in arccos(1 − λ): in this variable m moments resolve π/m everywhere."""
        return math.acos(1 - self.high) - math.acos(1 - self.low)


@dataclass(frozen=True)
class Clusters(Estimate):
    """The number of clusters, unrounded, with its standard error; NaN with NO_GAP if none.

    ``cut`` is λ*. ``gaps`` are the gaps that stand out, the likeliest first (the one behind the
    eigenvalue 0 of a connected graph only if its weight is at least ½): the first gave the count,
    the others indicate finer or coarser clusters. Those with a weight are ``rivals``, and the
    standard error covers the choice among them. ``components`` is the exact number of connected
    components, isolated nodes included; it is a lower bound of the count, with an infinite standard
    error and the status UNRESOLVED, if eigenvalues could not confirm that there are no other
    clusters. ``labels`` (n,) are the clusters of the nodes, if requested. A graph without edges has
    no ``spectrum``: each node is a cluster.
    """

    cut: float = math.nan
    gaps: tuple[Gap, ...] = ()
    components: int = 0
    spectrum: spectra.GraphSpectrum | None = None
    labels: NDArray[np.int64] | None = field(default=None)

    @property
    def rounded(self) -> int:
        """The nearest whole number."""
        fine = math.isfinite(float(self.value))
        require(fine, "the count", "be known", "none", self.status.value)
        return round(float(self.value))

    @property
    def rivals(self) -> dict[int, float]:
        """The plausible counts and their weights, which sum to 1, the reported count first."""
        return {round(gap.count): gap.weight for gap in self.gaps if gap.weight > 0}

    def __str__(self) -> str:
        text = super().__str__()
        if len(self.rivals) < 2:
            return text
        shown = ", ".join(
            f"{count} ({weight:.0%})" for count, weight in list(self.rivals.items())[:4]
        )
        return f"{text}; {shown}"


def clusters(
    graph: Graph,
    moments: int = 100,
    probes: int | None = None,
    seed: int = 0,
    cut: float | None = None,
    labels: bool = False,
) -> Clusters:
    """Count the clusters of a graph: eigenvalues of its normalised Laplacian below the widest gap.

    Graphs of up to 1,000 nodes are counted exactly, by all their eigenvalues, unless ``probes`` is
    given. For others the count is n∫₀^{λ*} p(λ) dλ, with λ* in a gap of the entropic spectrum
    (Algorithm 5, spectral thesis). A gap there holds less than ¼ eigenvalue, or 0.1 % of those
    below, and is at least 2π/``moments`` wide in arccos(1 − λ). Without ``probes`` the eigenvalues
    below λ* are then counted by a filtered block of vectors, if that is no more expensive than the
    moments were.

    Clusters with many links between them may have a narrower gap. If no gap is resolved except the
    one behind the connected components, eigenvalues decide: all of them up to 2,500 nodes, and
    beyond that those below the edge 1 − R of the bulk, R = 2√(Σ(1 − λ)²/n) over the others, if the
    density shows more there than the components. If these are over 256, or take over 256 MiB, the
    components are a lower bound, ``UNRESOLVED``.

    Algorithm 5 takes the first minimum, which with many moments is the one behind the eigenvalue 0
    of the components. Every connected graph has that gap, so it gives the count only if no other
    gap exceeds those of random graphs without clusters: 2.3 spacings s = 1.03·R·n^(−2/3), the mean
    first spacing at the edge of a semicircle of radius R = 2√(tr (I − L)²/n). The weight of a gap
    is proportional to the third power of its width in λ, at most 2.3 s for the gap behind 0. The
    status is ``NO_GAP`` if no gap is wider than 2.3 s, and ``RIVAL_GAPS`` if the first has a weight
    below ½; the first is then never the count 1 of a connected graph.

    The probes are split by the clusters that a random walk suggests (``probed_moments``), which
    removes most of their error without bias.

    Args:
        graph: The graph; isolated nodes count as clusters (see ``Graph``).
        moments: Chebyshev moments of the spectrum.
        probes: Random probes; by default none (exact) up to 1,000 nodes, and 100 beyond.
        seed: The seed of the probes.
        cut: λ*, to set it by hand.
        labels: Whether to add each node's cluster, by spectral clustering.

    Returns:
        The count. Its error bar joins that of the probes, carried through the density, the change
        from ¾ of the moments to all, and the spread of the counts among rival gaps.
    """
    spectra.require_graph(graph)
    require_count(moments, "moments", least=8)
    if cut is not None:
        require_number(cut, "cut", "(0, 2)", "the spectrum lies there; None finds a gap")
    count = int(graph.components.max()) + 1
    if count == len(graph):  # all eigenvalues are 0: there is no density to look for a gap in
        own = graph.components.astype(np.int64) if labels else None
        return Clusters(float(count), 0.0, cut=float(cut or 1.0), components=count, labels=own)
    result, values, confirmed = _weighed_gaps(graph, moments, probes, seed, count, cut is not None)
    gaps = result.gaps
    if cut is None and not (gaps and gaps[0].weight):
        return result
    unclear = cut is None and gaps[0].weight < HEADLINE
    status = Status.RIVAL_GAPS if unclear else Status.CONVERGED
    result = replace(result, status=status, cut=gaps[0].cut if cut is None else float(cut))
    if values is None:
        result = _count_by_density(graph, result, seed, refine=probes is None and cut is None)
    else:
        result = replace(result, value=float((values <= result.cut).sum()), stderr=0.0)
    if cut is None:
        result = replace(result, stderr=math.hypot(result.stderr, _choice_error(result.gaps)))
    if not confirmed:
        result = replace(result, value=float(count), stderr=math.inf, status=Status.UNRESOLVED)
    if not labels:
        return result
    return replace(result, labels=cluster_labels(graph, max(1, result.rounded), seed))


def _weighed_gaps(
    graph: Graph, moments: int, probes: int | None, seed: int, components: int, by_hand: bool
) -> tuple[Clusters, Array | None, bool]:
    """The weighed gaps without a count, the eigenvalues if computed, and whether they confirm them.

    Eigenvalues are computed where moments show the components alone. They confirm nothing if too
    many would have been needed.
    """
    nodes, values, cell = len(graph), None, math.pi / moments
    if probes is None and nodes <= spectra.EXACT_NODES:
        partition, values = spectra.components(graph), spectra.eigenvalues(graph)
        measured = spectra.exact_moments(values, moments)
    else:
        partition = spectra.walk_partition(graph, seed)
        measured = spectra.graph_moments(graph, moments, probes, seed, partition)
    density = fit(measured, tol=TOLERANCE)
    square = (float(measured.values[2]) + 1) / 2  # tr (I − L)²/n, of T₂(x) = 2x² − 1
    least = min(WIDEST, STANDS_OUT * edge_spacing(square, nodes, components))
    if values is None:
        gaps = find_gaps(density, nodes, components)
        resolved = [gap for gap in gaps if gap.angle >= CELLS * cell]
        gaps = weigh(resolved, components, least, cell)
    else:
        gaps = weigh(eigenvalue_gaps(values, components, nodes), components, least)
    cost, confirmed = measured.cost, True
    if values is None and not by_hand and _alone(gaps, components):
        # a gap behind many clusters may be narrower than the moments resolve
        if nodes <= CONFIRMED_NODES:
            values, more = spectra.eigenvalues(graph), nodes
        else:
            values, more, confirmed = least_eigenvalues(graph, density, components, seed)
        if values is not None:
            gaps = weigh(eigenvalue_gaps(values, components, nodes), components, least)
        confirmed, cost = confirmed or not _alone(gaps, components), cost + more
    dof = spectra.degrees_of_freedom(measured, partition) if values is None else math.inf
    spectrum = spectra.GraphSpectrum(density, measured, nodes, graph.num_edges, graph.name)
    unknown = Clusters(
        math.nan, math.nan, cost, Status.NO_GAP, dof, math.nan, gaps, components, spectrum
    )
    return unknown, values, confirmed


def _count_by_density(graph: Graph, result: Clusters, seed: int, refine: bool) -> Clusters:
    """n∫₀^{λ*} p dλ with its error; ``refine`` counts eigenvalues if that is affordable."""
    assert result.spectrum is not None
    density, moments = result.spectrum.density, result.spectrum.moments
    share, spread = _mass_below(density, moments, result.cut)
    part = first_moments(moments, 3 * (len(moments) - 1) // 4)
    fewer, _ = _mass_below(fit(part, tol=TOLERANCE), part, result.cut)
    value, error = len(graph) * share, len(graph) * math.hypot(spread, share - fewer)
    status = Status.joint((density.status, result.status))
    gaps, exact = result.gaps, None
    if refine:
        exact = eigenvalues_below(graph, gaps[0], value + 3 * error, seed, moments.cost)
    if exact is None:
        return replace(result, value=value, stderr=error, status=status)
    count, cost = float(exact[0]), result.cost + exact[1]
    gaps = (replace(gaps[0], count=count), *gaps[1:])
    return replace(
        result, value=count, stderr=0.0, status=status, cost=cost, dof=math.inf, gaps=gaps
    )


def first_moments(moments: Moments, count: int) -> Moments:
    """Moments 0 … ``count`` alone."""
    kept = slice(count + 1)
    numbers = {name: getattr(moments, name)[kept] for name in ("values", "stderr")}
    return replace(moments, **numbers, covariance=moments.covariance[kept, kept])


def _alone(gaps: Sequence[Gap], components: int) -> bool:
    """Whether no gap has a weight but the one behind the connected components."""
    return all(abs(gap.count - components) < 0.5 for gap in gaps if gap.weight)


def least_eigenvalues(
    graph: Graph, density: MaxentDensity, components: int, seed: int
) -> tuple[Array | None, int, bool]:
    """The least eigenvalues up to the edge of the bulk, their cost, and whether none is missing.

    The edge is 1 − R, R = 2√(Σ(1 − λ)²/n) over the eigenvalues beyond it, the radius of a
    semicircle with their mean square. The density predicts how many lie below. None if those are
    the zeros of the components alone, or more than can be computed.
    """
    nodes, mass, squares = len(graph), density.weights * density.values, (1 - density.grid) ** 2
    below, beyond = np.cumsum(mass), squares @ mass - np.cumsum(squares * mass)
    radii = 2 * np.sqrt(beyond.clip(0.0) / (1 - below).clip(1e-12))
    expected = nodes * float(below[np.argmax(1 - density.grid <= radii)])
    if expected < components + 0.5:
        return None, 0, True
    wanted = math.ceil(1.1 * expected) + BEYOND
    if wanted > min(MOST_LEAST, BLOCK_ELEMENTS // (4 * nodes)):
        return None, 0, False
    pairs = eigenpairs(graph.normalized_laplacian(), wanted, "smallest", LEAST_ACCURACY, seed=seed)
    values = np.asarray(pairs.values.numpy().clip(*spectra.BOUNDS), dtype=np.float64)
    rest = nodes * float(squares @ mass) - np.cumsum((1 - values) ** 2)
    edges = 1 - 2 * np.sqrt(rest.clip(0.0) / (nodes - np.arange(1, wanted + 1)))
    return values, pairs.cost, pairs.status.ok and int((values >= edges).sum()) >= BEYOND // 2


def eigenvalues_below(
    graph: Graph, gap: Gap, most: float, seed: int, budget: int
) -> tuple[int, int] | None:
    """The number of eigenvalues below a gap, by a filtered random block, and the products it took.

    A Chebyshev polynomial of L that is at most 1 above the gap and ``GROWTH`` below takes a block
    of more than ``most`` vectors to the eigenspace below. Ritz values are never smaller than their
    eigenvalues, so the count is never too high. None if it would take more than ``budget`` products
    or too much memory, or if more than ``most`` eigenvalues fill the block.
    """
    columns = math.ceil(1.1 * most) + EXTRA_COLUMNS
    half = (2.0 - gap.high) / 2
    degree = math.ceil(math.acosh(GROWTH) / math.acosh(1 + (gap.high - gap.low) / half))
    if (
        columns > len(graph) // 2
        or columns * (degree + 1) > budget
        or columns * len(graph) > BLOCK_ELEMENTS
    ):
        return None
    matrix = csr_tensor(graph.normalized(), torch.float64)
    block = torch.randn(
        len(graph), columns, generator=generator(seed, "filtered block"), dtype=torch.float64
    )
    # (L − centre)/half = −(B − shift)/half with B = I − L; the sign does not matter
    shift = 1 - (2.0 + gap.high) / 2
    before, now = block, torch.addmm(block, matrix, block, beta=-shift, alpha=1.0).div_(half)
    for order in range(2, degree + 1):
        image = torch.addmm(now, matrix, now, beta=-shift, alpha=1.0).mul_(2 / half).sub_(before)
        before, now = now, image
        if order % RESCALED == 0:  # the recurrence is linear: both may be scaled
            size = now.abs().max()
            before, now = before / size, now / size
    basis = torch.linalg.qr(now).Q
    ritz = 1 - torch.linalg.eigvalsh(basis.T @ (matrix @ basis))
    below = int((ritz < (gap.low + gap.high) / 2).sum())
    return (below, columns * (degree + 1)) if below < columns else None


def edge_spacing(square: float, nodes: int, components: int) -> float:
    """The eigenvalue spacing at a random graph's edge, 1.03·R·n^(−2/3) with R = 2√(tr (I − L)²/n).

    The eigenvalues 0 of the components are taken out of ``square`` = tr (I − L)²/n.
    """
    rest = max(nodes - components, 1)
    radius = min(1.0, 2 * math.sqrt(max(nodes * square - components, 0.0) / rest))
    return float(EDGE_SPACING * radius * rest ** (-2 / 3))


def weigh(
    gaps: Sequence[Gap], components: int, least: float, resolution: float = 0.0
) -> tuple[Gap, ...]:
    """Weigh the gaps; return those that stand out or rival, the likeliest first.

    Graphs without clusters too have the gap behind the zeros of the components. Its width counts as
    ``least``, the smallest width that stands out, or as its own if the graph is connected and it is
    narrower. Other gaps of less than a third of ``least`` are no rivals. A density with
    ``resolution`` in arccos(1 − λ) hides gaps of that width, which counts like ``least``. The one
    cluster of a connected graph comes first only if its weight is at least ½.
    """
    others = [gap for gap in gaps if abs(gap.count - components) >= 0.5]
    widest = max(others, key=lambda gap: gap.width, default=None)
    believed = least
    if widest is not None:
        hidden = resolution * math.sin(math.acos(1 - (widest.low + widest.high) / 2))
        believed = max(least, hidden)
    wide = []
    for gap in gaps:
        if abs(gap.count - components) < 0.5:
            wide.append(believed if components > 1 else min(gap.width, believed))
        else:
            wide.append(gap.width if gap.width >= least / 3 else 0.0)
    if not any(width >= least for width in wide):
        return tuple(sorted(gaps, key=lambda gap: -gap.width)[:SHOWN])
    total = sum(width**SHARPNESS for width in wide)
    weights = [width**SHARPNESS / total for width in wide]
    kept = sum(weight for weight in weights if weight >= LEAST_WEIGHT)
    weights = [weight / kept if weight >= LEAST_WEIGHT else 0.0 for weight in weights]
    weighed = [replace(gap, weight=weight) for gap, weight in zip(gaps, weights, strict=True)]
    shown = sorted(
        (gap for gap in weighed if gap.weight or gap.width >= least),
        key=lambda gap: (-gap.weight, -gap.width),
    )
    first = shown[0]
    # so that there is another
    if components == 1 and abs(first.count - 1) < 0.5 and first.weight < HEADLINE:
        shown[:2] = shown[1::-1]
    return tuple(shown)


def _choice_error(gaps: Sequence[Gap]) -> float:
    """The standard error of choosing the first of the weighed gaps.

    The root mean square distance of the others' counts, widened to hold 95 % of the weight.
    """
    apart = sorted((abs(gap.count - gaps[0].count), gap.weight) for gap in gaps)
    square = sum(weight * distance**2 for distance, weight in apart)
    reached = np.cumsum([weight for _, weight in apart])
    reach = apart[int(np.searchsorted(reached, 0.95))][0]
    return max(math.sqrt(square), reach / NORMAL_95)


def eigenvalue_gaps(values: Array, components: int, nodes: int) -> list[Gap]:
    """The gaps between the smallest eigenvalues that ``find_gaps`` would find in a density."""
    most = min(max(nodes // 2, components), len(values) - 1)
    return [
        Gap((low + high) / 2, float(count), low, high)
        for count, (low, high) in enumerate(pairwise(values[: most + 1].tolist()), start=1)
        if low < min(high, 1.0)
    ]


def find_gaps(density: MaxentDensity, nodes: int, components: int) -> tuple[Gap, ...]:
    """The gaps below λ = 1, the widest in arccos(1 − λ) first.

    They lie behind at most half of the eigenvalues, or behind those 0 of the components.
    """
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
    kept: list[Gap] = []
    # of ripples of one gap the widest speaks for all
    for gap in sorted((_gap(places, counts, i) for i in lowest), key=lambda gap: -gap.angle):
        if not any(
            other.low <= gap.cut <= other.high or gap.low <= other.cut <= gap.high for other in kept
        ):
            kept.append(gap)
    return tuple(kept)


def _gap(places: Array, counts: Array, lowest: int) -> Gap:
    """The stretch around a minimum in which hardly an eigenvalue lies."""
    spill = max(SPILL, SHARE * counts[lowest])
    inside = np.abs(counts - counts[lowest]) <= spill
    low = lowest - int(np.argmin(inside[lowest::-1])) + 1
    beyond = inside[lowest:]
    high = lowest + (int(np.argmin(beyond)) if not beyond.all() else len(beyond)) - 1
    ends = float(places[low]), float(places[high])
    return Gap(float(places[lowest]), float(counts[lowest]), *ends)


def _mass_below(density: MaxentDensity, moments: Moments, cut: float) -> tuple[float, float]:
    """∫₀^cut p dλ, corrected to first order for unmatched moments, and its standard error.

    The error joins that of the moments with the correction, which near atoms is half of the truth.
    """
    slope = density.sensitivity(lambda places: (places <= cut).astype(np.float64))
    variance = float(slope @ moments.covariance[1:, 1:] @ slope)
    lacking = float(slope @ density.residuals[1:])
    below = float(density.cumulative([cut])[0]) + lacking
    return below, math.hypot(math.sqrt(max(variance, 0.0)), lacking)


GRID = 2000
WIDTH = 0.02


def smoothed_lanczos_clusters(
    graph: Graph, depth: int = 80, probes: int = 100, width: float = WIDTH, seed: int = 0
) -> Estimate:
    """The number of clusters by Algorithm 5 on a Lanczos spectrum, smoothed by Gaussians.

    λ* is the first minimum of the smoothed density, and the count is the whole mass below it. The
    error bar is that of the probes.
    """
    spectra.require_graph(graph)
    require_count(depth, "depth", 2, len(graph))
    require_positive(width, "width")
    return smoothed_count(spectrum(graph.normalized_laplacian(), depth, probes, seed), width)


def smoothed_count(spectrum: Spectrum, width: float = WIDTH) -> Estimate:
    """How many eigenvalues a spectrum has below the first minimum of its smoothed density."""
    places = np.linspace(0.0, 2.0, GRID)
    density = smooth_density(spectrum, places, width)
    lowest = np.flatnonzero((density[1:-1] < density[:-2]) & (density[1:-1] <= density[2:])) + 1
    if not len(lowest):
        return Estimate(math.nan, math.nan, spectrum.cost, Status.NO_GAP)
    cut = float(places[lowest[0]])
    return spectrum.expectation(lambda nodes: ndtr((cut - nodes) / width), spectrum.dim)


def smooth_density(spectrum: Spectrum, places: Array, width: float) -> Array:
    """The density Σ_i w_i k(λ − λ_i) at ``places`` (Eq. 3.6), averaged over the probes."""
    nodes, weights = spectrum.nodes.ravel(), spectrum.weights.ravel() / len(spectrum.nodes)
    total = np.zeros(len(places))
    for part in np.array_split(np.arange(len(nodes)), max(1, len(nodes) // 1000)):
        apart = (places[:, None] - nodes[part]) / width
        total += np.exp(-0.5 * apart**2) @ weights[part]
    return total / (width * math.sqrt(2 * math.pi))
