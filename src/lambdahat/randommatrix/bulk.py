"""The bulk of a measured spectrum and the eigenvalues that stand apart from it (Figure 6.1,
spectral thesis).

A random probe gives one eigenvalue the weight χ²₁/P. Lanczos resolves an eigenvalue that stands
alone: its residual is small beside the distance to its neighbours. The nodes of a continuous bulk
are not resolved, and carry many eigenvalues each, unless the depth is so large, or P so small, that
the bulk's own last eigenvalues are resolved too; then only the gap tells. An eigenvalue is called
an outlier when the gap between it, or one further in, and the bulk is too wide for the bulk's own
spacing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from numpy.typing import NDArray
from scipy import special

from lambdahat._core.check import require, require_number, require_positive, require_type
from lambdahat._core.storage import Result, Status
from lambdahat.results import ALONE, ONE, Array, Estimate, Spectrum, stand_alone

# eigenvalues that a node of the bulk stands for, at least (Figure 6.1, spectral thesis)
KAPPA = 5.0
CLUSTER = 30.0  # most eigenvalues that a candidate may stand for, when nearly equal
GHOST = 1e-3  # of an eigenvalue's weight: one in forty weighs less
EDGE_NODES = 4  # nodes whose distances give the spacing at the edge
WORTH_NAMING = 0.5
# the largest of a bulk's eigenvalues is 1.21 ± 1.27 Airy units within the edge, and its distance to
# the second 2.06
MEAN_DEPTH, SPREAD = 1.2065 / 2.056, 1.268 / 2.056
TAIL = 0.1
UNITS = 1.5  # how far a Gauss rule's nodes leave the edge open, in their own unit
UNKNOWN_UNIT = 1.3  # the unit itself comes from a few nodes: measured on random matrices


@dataclass(frozen=True)
class BulkFit(Result):
    """``lower`` and ``upper`` edge of the bulk, and ``candidates`` (k,) for outliers, descending.

    ``confidences`` (k,) are the probabilities that a candidate is no part of the bulk, ``masses``
    (k,) how many eigenvalues each weighs as (χ²₁ over probes for one) and ``residuals`` (k,) how
    near an eigenvalue is. The errors of the edges are those of the limit law's edge: the
    fluctuation of one matrix's last eigenvalue, and what the spacing of the nodes leaves open.
    ``weight_edges`` are those of ``continuous_region``, the rule of Figure 6.1. The status is
    NO_OUTLIER if no candidate reaches ``level``, and NO_EDGE if the outliers are spaced like the
    tail of a power law or an exponential: then their confidences, which rest on a square-root edge,
    are too high. ``nodes`` and ``weights`` (probes, depth) are those of the spectrum, of order
    ``dim``.
    """

    lower: Estimate
    upper: Estimate
    candidates: Array
    confidences: Array
    masses: Array
    residuals: Array
    weight_edges: tuple[float, float]
    level: float
    status: Status = Status.CONVERGED
    nodes: Array = field(default_factory=lambda: np.zeros((0, 0)))
    weights: Array = field(default_factory=lambda: np.zeros((0, 0)))
    dim: int = 0

    @property
    def outliers(self) -> tuple[Estimate, ...]:
        """The candidates of at least ``level`` confidence, largest first."""
        chosen = np.flatnonzero(self.confidences >= self.level)
        return tuple(Estimate(float(self.candidates[i]), float(self.residuals[i])) for i in chosen)

    def __str__(self) -> str:
        apart = f"{len(self.outliers)} outlier" + "s" * (len(self.outliers) != 1)
        return f"bulk from {self.lower} to {self.upper}, {apart}"


def fit_bulk(spectrum: Spectrum, level: float = 0.95, kappa: float = KAPPA) -> BulkFit:
    """Bulk edges and outliers of a ``lh.Spectrum``, computed per probe and then combined.

    Going inward from an end, nodes that are resolved and weigh no more than a few eigenvalues (P·w
    ≤ 30) are candidates as long as half of the weight is further in. Candidate i is apart with
    confidence 1 − k·exp(−g/s), k their number, g its gap to the next node and s the bulk's spacing
    at that edge, d/c^⅔ for c eigenvalues within d of a square-root edge: spacings of independent
    eigenvalues are exponential, and those of random matrices have lighter tails. Candidates beyond
    one that is apart are apart too. Over several probes confidences are averaged.
    """
    cure = "take it with lh.spectrum(lh.hessian(problem))"
    require_type(spectrum, Spectrum, "spectrum", "be a Spectrum", cure)
    require_number(level, "level", "(0, 1)")
    require_positive(kappa, "kappa")
    rows = [_Row.of(spectrum, row) for row in range(len(spectrum.nodes))]
    fewest = min(len(row.nodes) for row in rows)
    require(fewest > 1, "spectrum", "have two nodes or more", repr(fewest), "raise depth")
    ends = {sign: [row.end(sign, level) for row in rows] for sign in (1, -1)}
    merged = _merge([end for sign in (1, -1) for end in ends[sign]], len(rows))
    status, regions = Status.NO_OUTLIER, continuous_region(spectrum, kappa)
    if bool((merged[1] >= level).any()):
        tails = [float(np.mean([end.tail for end in probes])) for probes in ends.values()]
        status = Status.NO_EDGE if max(tails) > TAIL else Status.CONVERGED
    edges, measure = (_edge(ends[-1]), _edge(ends[1])), (spectrum.nodes, spectrum.weights)
    return BulkFit(*edges, *merged, regions, level, status, *measure, spectrum.dim)


def continuous_region(spectrum: Spectrum, kappa: float = KAPPA) -> tuple[float, float]:
    """The Ritz values from the heaviest outward to where the weight first drops below κ/P (§5.5).

    Beyond it a weight may exceed κ/P by chance: one eigenvalue's is χ²₁/P. The mean over probes.
    """
    regions = []
    for nodes, masses in zip(spectrum.nodes, spectrum.weights * spectrum.dim, strict=True):
        order = np.argsort(nodes)
        heavy, centre = masses[order] >= kappa, int(np.argmax(masses[order]))
        low, high = (
            len(outward) - 1 if outward.all() else max(int(np.argmin(outward)) - 1, 0)
            for outward in (heavy[centre::-1], heavy[centre:])
        )
        regions.append((nodes[order][centre - low], nodes[order][centre + high]))
    lower, upper = np.mean(regions, axis=0)
    return float(lower), float(upper)


def bulk_within(spectrum: Spectrum, apart: Array | Sequence[float]) -> tuple[Array, Array]:
    """Nodes and weights of all probes inside of the first probe's nodes ``apart``, if any.

    Other probes see the same eigenvalues at other nodes, so the bulk ends half-way to the first
    probe's next node.
    """
    nodes, weights, first = spectrum.nodes.ravel(), spectrum.weights.ravel(), spectrum.nodes[0]
    inner = first[(spectrum.weights[0] > 0) & ~np.isin(first, apart)]
    if not inner.size:
        return np.zeros(0), np.zeros(0)
    out, low, high = np.asarray(apart), float(inner.min()), float(inner.max())
    below, above = out[out < low].max(initial=-math.inf), out[out > high].min(initial=math.inf)
    kept = (weights > 0) & ((low + below) / 2 < nodes) & (nodes < (high + above) / 2)
    return nodes[kept], weights[kept]


@dataclass(frozen=True)
class _End:
    """One end of one probe: the candidates with masses and confidences, and the edge."""

    values: Array
    residuals: Array
    masses: Array
    confidences: Array
    edge: float
    error: float
    tail: float  # the probability of outliers as far out as these, were they the tail of the bulk


@dataclass(frozen=True)
class _Row:
    """The nodes of one probe in ascending order."""

    nodes: Array
    weights: Array
    residuals: Array
    resolved: NDArray[np.bool_]
    dim: int

    @classmethod
    def of(cls, spectrum: Spectrum, row: int) -> _Row:
        # a Krylov space that ended early has nodes of weight 0
        there = np.flatnonzero(spectrum.weights[row] > 0)
        order = there[np.argsort(spectrum.nodes[row][there])]
        parts = (spectrum.nodes, spectrum.weights, spectrum.residuals)
        nodes, weights, residuals = (part[row][order] for part in parts)
        # an unresolved node of no weight is on its way to an eigenvalue elsewhere
        kept = stand_alone(nodes, residuals) | (spectrum.dim * weights >= GHOST)
        nodes, weights, residuals = nodes[kept], weights[kept], residuals[kept]
        return cls(nodes, weights, residuals, stand_alone(nodes, residuals), spectrum.dim)

    def end(self, sign: int, level: float) -> _End:
        """The upper end for ``sign`` 1, else the lower."""
        inward = slice(None, None, -sign)
        x, masses = sign * self.nodes[inward], self.dim * self.weights[inward]
        resolved, residuals = self.resolved[inward], self.residuals[inward]
        counts = np.where(resolved & (masses <= ONE), 1.0, masses)
        stops = _candidates(x, masses, residuals)
        starts, most = [0, *stops][: len(stops)], len(stops)
        further = range(stops[-1] + 1 if stops else 0, len(x))[:EDGE_NODES]
        near = [_spacing(x[i:], counts[i:], residuals[i]) for i in [*stops, *further]]
        # over a few: an outlier that is not seen as one would widen the spacing that its neighbour
        # is held to
        spacings = [float(np.median(near[k : k + EDGE_NODES + 1])) for k in range(most)]
        gaps = [x[stop - 1] - x[stop] for stop in stops]
        doubts = np.minimum(most * np.exp(-np.array(gaps) / np.array(spacings)), 1.0)
        confidences = 1.0 - np.minimum.accumulate(doubts[::-1])[::-1]
        first = [0, *stops][int((confidences >= level).sum())]
        edge, error = _beyond(x[first:], counts[first:], residuals[first], bool(resolved[first]))
        groups = [slice(start, stop) for start, stop in zip(starts, stops, strict=True)]
        means = [sign * float(np.average(x[group], weights=masses[group])) for group in groups]
        widths = np.array([float(residuals[group].max() + np.ptp(x[group])) for group in groups])
        weights = np.array([float(masses[group].sum()) for group in groups])
        tail = _tail(x, counts, first)
        return _End(np.array(means), widths, weights, confidences, sign * edge, error, tail)


def _candidates(x: Array, masses: Array, residuals: Array) -> list[int]:
    """Where, going inward, candidates end: nodes or clusters, much narrower than the next gap.

    They end with the first that is not, or that has less than half of the weight further in.
    """
    stops: list[int] = []
    start, stop = 0, 1
    half = masses.sum() / 2
    while stop < len(x) and masses[:stop].sum() <= half and masses[start:stop].sum() <= CLUSTER:
        width = x[start] - x[stop - 1] + residuals[start:stop].max()
        outside = x[start - 1] - x[start] if start else math.inf
        if width <= ALONE * min(x[stop - 1] - x[stop], outside):
            stops.append(stop)
            start = stop
        stop += 1
    return stops


def _spacing(x: Array, counts: Array, residual: float) -> float:
    """The spacing of eigenvalues at a square-root edge above descending nodes ``x`` of ``counts``.

    c eigenvalues within d of such an edge give the first spacing the scale d/c^⅔; the median over a
    few nodes. One node alone, such as the null space of a matrix of low rank, is as wide as its
    ``residual``.
    """
    if len(x) == 1:
        return residual
    near = slice(1, 1 + EDGE_NODES)
    between = np.cumsum((counts[:-1] + counts[1:]) / 2)[:EDGE_NODES]
    distances = x[0] - x[near]
    return float(np.median(distances / np.maximum(between, 1.0) ** (2 / 3)))


def _tail(x: Array, counts: Array, first: int) -> float:
    """The probability that the ``first`` nodes are so far out if they are the tail of the rest.

    Of a power law j·ln(x_j/x_{j+1}), with x from the centre, are independent and exponential (Rényi
    1953), and nearly so of an exponential law: their means over the outliers, and over as many
    eigenvalues further in or a few, have the ratio F.
    """
    middle = int(np.searchsorted(np.cumsum(counts), counts.sum() / 2))
    numbers = np.maximum((counts[:middle] + counts[1 : middle + 1]) / 2, 1.0)
    fewest = max(float(numbers[:first].sum()), EDGE_NODES)
    enough = np.flatnonzero(np.cumsum(numbers[first:]) >= fewest)
    if first == 0 or len(enough) == 0 or first + enough[0] + 1 >= middle:
        return 0.0
    last = first + int(enough[0]) + 1
    ratios = (x[:last] - x[middle]) / (x[1 : last + 1] - x[middle])
    steps = np.cumsum(counts)[:last] * np.log(ratios)
    numbers = numbers[:last]
    out, inside = float(numbers[:first].sum()), float(numbers[first:].sum())
    ratio = (steps[:first].sum() / out) / (steps[first:].sum() / inside)
    return float(special.fdtrc(2 * out, 2 * inside, ratio))


def _beyond(x: Array, counts: Array, residual: float, resolved: bool) -> tuple[float, float]:
    """The edge of a bulk whose nodes from the outermost on are ``x``, and its standard error.

    Nodes of a Gauss rule approach a square-root edge as 1, 4, 9, … of a unit: the edge is one
    beyond the first, by the unit's median over a few nodes. Beyond a resolved eigenvalue the edge
    follows from that eigenvalue's law.
    """
    if resolved or len(x) == 1:
        unit = residual if counts[0] > ONE else _spacing(x, counts, residual)
        return float(x[0] + MEAN_DEPTH * unit), UNKNOWN_UNIT * SPREAD * unit
    places = np.arange(2, 2 + EDGE_NODES) ** 2 - 1.0
    distances = x[0] - x[1 : 1 + EDGE_NODES]
    unit = float(np.median(distances / places[: len(distances)]))
    return float(x[0]) + unit, UNKNOWN_UNIT * UNITS * unit


def _edge(ends: list[_End]) -> Estimate:
    """The mean over probes; they share the matrix, so only their own scatter averages out."""
    values = np.array([end.edge for end in ends])
    scatter = float(values.var(ddof=1)) / len(values) if len(values) > 1 else 0.0
    error = math.sqrt(scatter + float(np.mean([end.error**2 for end in ends])))
    return Estimate(float(values.mean()), error, dof=EDGE_NODES)


def _merge(ends: list[_End], probes: int) -> tuple[Array, Array, Array, Array]:
    """Candidates, confidences, masses and residuals, merged over probes within residuals."""
    tables = [np.stack([e.values, e.confidences, e.masses, e.residuals]) for e in ends]
    columns = np.concatenate(tables, axis=1)
    columns = columns[:, np.argsort(-columns[0], kind="stable")]
    steps = columns[0][:-1] - columns[0][1:] > columns[3][:-1] + columns[3][1:]
    label = np.concatenate([[0], np.cumsum(steps)]) if columns.shape[1] else np.zeros(0)
    out = []
    for _, members in groupby(range(columns.shape[1]), key=lambda i: label[i]):
        group = columns[:, list(members)]
        best = int(group[3].argmin())
        confidence = min(float(group[1].sum()) / probes, 1.0)
        if confidence >= WORTH_NAMING:
            out.append((group[0][best], confidence, group[2].sum() / probes, group[3][best]))
    table = np.array(out).reshape(-1, 4)
    return table[:, 0], table[:, 1], table[:, 2], table[:, 3]
