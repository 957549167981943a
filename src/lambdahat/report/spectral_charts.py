"""Charts of estimates, spectra, landscapes, and of the spectra of mini-batches and graphs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lambdahat import results
from lambdahat.graphs import Clusters, GraphSpectrum, ModelChoice, Similarity
from lambdahat.maxent import MaxentDensity
from lambdahat.randommatrix import BatchComparison, BatchEigenvalues, BatchPrediction, BulkFit
from lambdahat.results.charts import (
    INTERVAL,
    Chart,
    Heat,
    Series,
    charts_of,
    count_text,
    half_width,
    headline_of,
    histogram,
    numbers,
    numpy_of,
    settings_text,
    value_text,
    with_status,
)

EIGENVALUE, SHARE = "eigenvalue λ", "share of eigenvalues"
PER_UNIT = "density of eigenvalues, per unit λ"
LAPLACIAN = "eigenvalue λ of the normalised Laplacian"
LEVEL = 0.95
POINTS = 500  # of a density
# share of the spectrum's width within which Ritz values of different probes are one eigenvalue
MERGE = 1e-5
DECADES = 12  # a weight further below the largest is rounding
FAINT = 1e-4  # of the weight of one eigenvalue: less is not drawn inside of a bulk
GRAPH_DECADES = 6  # shown of a graph's density
RATIO = 30.0  # a loss that varies by more than this factor has levels spaced by ratio
RANKS = {  # what the bars of eigenvalues are counted by
    "largest": "rank",
    "smallest": "rank from the smallest",
    "magnitude": "rank by magnitude",
    "both": "rank",
}
MODELS = {"additive": "amber", "multiplicative": "green", "directional": "blue"}


@charts_of.register
def _(estimate: results.Estimate) -> list[Chart]:
    """A point with its 95 % interval, or a histogram where the estimate is of many elements."""
    if isinstance(estimate.value, Tensor):
        values = numpy_of(estimate.value).ravel()
        typical = float(np.median(numpy_of(estimate.stderr)))
        error = "Exact" if typical == 0 else f"Median standard error {typical:.2g}"
        title = with_status(f"{values.size:,} elements", estimate.status)
        return [histogram(values, title, caption=f"{error}.")]
    title = with_status(value_text(estimate) + settings_text(estimate, ", "), estimate.status)
    return [interval_chart(title, estimate)]


def interval_chart(title: str, estimate: results.Estimate) -> Chart:
    """One number with its 95 % interval."""
    half = half_width(estimate)
    known = 0 < half < math.inf
    look: Any = {"band": INTERVAL, "statuses": [estimate.status.name]}
    point = Series("value", [0], [float(estimate)], [half] if known else None, "points", **look)
    return Chart(title, "", "value", (point,), x_names=("",), horizontal=True)


@charts_of.register
def _(spectrum: results.Spectrum) -> list[Chart]:
    """Stems at the Ritz values on a logarithmic axis, and on the page the smoothed density."""
    probes, depth = spectrum.nodes.shape
    nodes, weights = pool_probes(spectrum)
    kept = weights > weights.max() * 10.0**-DECADES
    look: Any = {"style": "stems", "statuses": [spectrum.status.name] * int(kept.sum())}
    series = Series("Ritz values", numbers(nodes[kept]), numbers(weights[kept]), **look)
    title = with_status("Ritz values", spectrum.status)
    look = {"caption": f"P = {spectrum.dim:,}, {count_text(probes, 'probe')}, depth {depth}."}
    look["y_range"] = float(weights[kept].min()) / 3, 2.0
    look["lines"] = (("one eigenvalue, 1/P", 1 / spectrum.dim),)
    stems = Chart(title, EIGENVALUE, SHARE, (series,), y_log=True, **look)
    over = f"{INTERVAL} over {count_text(probes, 'probe')}"
    return [stems, dataclasses.replace(density_chart(spectrum.density(), over), page_only=True)]


def pool_probes(spectrum: results.Spectrum) -> tuple[results.Array, results.Array]:
    """Nodes and weights of all probes as one measure; equal converged nodes are merged."""
    probes = len(spectrum.nodes)
    order = np.argsort(spectrum.nodes, axis=None)
    nodes, weights = spectrum.nodes.ravel()[order], spectrum.weights.ravel()[order] / probes
    if probes == 1:
        return nodes, weights
    step = MERGE * (nodes[-1] - nodes[0])
    starts = [0]
    for i, node in enumerate(nodes):
        if node - nodes[starts[-1]] > step:
            starts.append(i)
    sums = np.add.reduceat(weights, starts)
    means = np.add.reduceat(weights * nodes, starts) / np.where(sums > 0, sums, 1.0)
    return np.where(sums > 0, means, nodes[starts]), sums


@charts_of.register
def _(fit: BulkFit) -> list[Chart]:
    """The Ritz values as a whole and at the bulk, what lies beyond its edges in another colour, and
    on the page how sure it is of every candidate.
    """
    edges = float(fit.lower), float(fit.upper)
    title = with_status(count_text(len(fit.outliers), "outlier"), fit.status)
    widths = numbers(fit.residuals) if fit.residuals.any() else None
    values, sure = numbers(fit.candidates), numbers(fit.confidences)
    points = Series("candidates", values, sure, None, "points", x_error=widths, colour="vermilion")
    look: Any = {"x_bands": (("edges of the bulk", *edges),)}
    level = (f"level {fit.level:g}", fit.level)
    label = "confidence that it is no part of the bulk"
    doubts = Chart(title, EIGENVALUE, label, (points,), lines=(level,), **look)
    if not fit.nodes.size:  # fitted before these were kept
        return [doubts]
    measured = results.Spectrum(fit.nodes, fit.weights, np.zeros_like(fit.nodes), fit.dim)
    nodes, weights = pool_probes(measured)
    beyond = (nodes < edges[0]) | (nodes > edges[1])
    # far below one eigenvalue's weight 1/P there is rounding alone
    kept = (weights > FAINT / fit.dim) | (beyond & (weights > 0))
    series = [
        Series(name, numbers(nodes[part]), numbers(weights[part]), style="stems", colour=colour)
        for name, colour, part in (
            ("bulk", "blue", kept & ~beyond),
            ("outliers", "vermilion", kept & beyond),
        )
        if part.any()
    ]
    caption = f"P = {fit.dim:,}, bulk from {value_text(fit.lower)} to {value_text(fit.upper)}."
    look |= {"y_log": True, "y_range": (float(weights[kept].min()) / 3, 2.0)}
    look["lines"] = (("one eigenvalue, 1/P", 1 / fit.dim),)
    room = edges[1] - edges[0]
    near = {"x_range": (edges[0] - 0.2 * room, edges[1] + room), "caption": caption}
    return [
        Chart(title, EIGENVALUE, SHARE, tuple(series), **look),
        Chart("Edges of the bulk", EIGENVALUE, SHARE, tuple(series), **look | near),
        dataclasses.replace(doubts, page_only=True),
    ]


@headline_of.register
def _(fit: BulkFit, name: str) -> str:
    ends = f"from {value_text(fit.lower)} to {value_text(fit.upper)}"
    return f"The bulk lies {ends}, with {count_text(len(fit.outliers), 'outlier')}"


@charts_of.register
def _(density: results.Density) -> list[Chart]:
    return [density_chart(density)]


def density_chart(density: results.Density, band: str = INTERVAL) -> Chart:
    """The density on a logarithmic axis with its pointwise interval, cut below every peak."""
    grid, values, errors = _thin(density)
    status = results.Status.CONVERGED
    floor = _lowest_peak(density.values) / 30 if (density.values > 0).any() else 0.0
    half = numbers(results.NORMAL_QUANTILE * errors) if errors.any() else None
    how = f"Smoothed by a Gaussian of width {density.width:.2g}." if density.width else ""
    if isinstance(density, MaxentDensity):
        how = f"Of maximum entropy, {len(density.coefficients) - 1} moments."
        status = density.status
    shown = [value if value >= floor / 30 else None for value in numbers(values)]
    series = (Series("density", numbers(grid), shown, half, band=f"pointwise {band}"),)
    title, ends = with_status("Spectral density", status), (floor or None, None)
    return Chart(title, EIGENVALUE, PER_UNIT, series, y_log=True, y_range=ends, caption=how)


def _thin(density: results.Density) -> tuple[results.Array, results.Array, results.Array]:
    """At most some hundred points, every peak among them."""
    values = density.values
    if len(values) <= POINTS:
        return density.grid, values, density.stderr
    turning = _peaks(values) | _peaks(-values, math.inf)
    kept = turning | (np.arange(len(values)) % math.ceil(len(values) / POINTS) == 0)
    return density.grid[kept], values[kept], density.stderr[kept]


def _lowest_peak(values: results.Array) -> float:
    """The height of the lowest local maximum above rounding, so that the axis shows every peak."""
    tall = values > values.max() * 10.0**-DECADES
    return float(values[_peaks(values) & tall].min())


def _peaks(values: results.Array, beyond: float = -math.inf) -> NDArray[np.bool_]:
    """Where a value is at least both of its neighbours; ``beyond`` both ends lies this one."""
    padded = np.concatenate([[beyond], values, [beyond]])
    return (values >= padded[:-2]) & (values >= padded[2:])


@charts_of.register
def _(pairs: results.Eigenpairs) -> list[Chart]:
    """Bars of the eigenvalues with their residuals; hollow where they did not converge."""
    values, residuals = numpy_of(pairs.values), numpy_of(pairs.residuals)
    bad = results.Status.NOT_CONVERGED.name
    statuses = ["" if done else bad for done in numpy_of(pairs.converged).astype(bool)]
    band = f"± residual, within which an eigenvalue lies (largest {residuals.max():.1g})"
    look: Any = {"band": band, "statuses": statuses}
    ranks: list[Any] = list(range(1, len(values) + 1))
    label, caption = RANKS.get(pairs.which, "rank"), ""
    half, order = (len(values) + 1) // 2, len(pairs.vectors)
    if pairs.which == "both" and len(values) < order:
        # the lower half is counted from the last eigenvalue, λ_P
        ends = [f"P−{left}" if left else "P" for left in reversed(range(len(values) - half))]
        ranks, caption = [*map(str, ranks[:half]), *ends], f"P = {order:,}."
    bars = Series("eigenvalues", ranks, numbers(values), numbers(residuals), "bars", **look)
    title = with_status(count_text(len(values), "eigenvalue"), pairs.status)
    return [Chart(title, label, EIGENVALUE, (bars,), lines=(("", 0.0),), caption=caption)]


@headline_of.register
def _(pairs: results.Eigenpairs, name: str) -> str:
    estimates = [estimate for estimate, _ in pairs]
    top = max(estimates, key=lambda one: abs(float(one)))
    text = f"The eigenvalue of largest magnitude is {value_text(top)}"
    if len(estimates) == 1:
        return text
    return f"{text}; the last of {len(estimates)} is {float(estimates[-1]):.4g}"


@headline_of.register
def _(spectrum: results.Spectrum, name: str) -> str:
    low, high = spectrum.extremes
    below = 100 * float(spectrum.negative_mass)
    return f"Eigenvalues from {float(low):.4g} to {float(high):.4g}, {below:.1f} % of them negative"


@headline_of.register
def _(landscape: results.Landscape, name: str) -> str:
    loss, offsets = landscape.loss, landscape.offsets
    highest, reach = f"{float(loss[np.isfinite(loss)].max()):.4g}", float(np.abs(offsets).max())
    if loss.ndim == 1 and offsets.min() * offsets.max() >= 0:  # as from one checkpoint to another
        ends = " to ".join(
            f"{float(loss[i]):.4g} at offset {float(offsets[i]):.3g}" for i in (0, -1)
        )
        return f"The loss goes from {ends}, and is {highest} at most"
    centre = (int(np.abs(offsets).argmin()),) * loss.ndim
    ends = f"from {float(loss[centre]):.4g} at the centre to {highest}"
    return f"The loss goes {ends} within a distance of {reach:.3g}"


@charts_of.register
def _(moments: results.Moments) -> list[Chart]:
    """Each moment with its 95 % interval, by order."""
    half = results.student_quantile(LEVEL, max(moments.probes - 1, 1)) * moments.stderr
    symbols = {"power": "tr Aᵏ / P", "chebyshev": "tr T_k(A) / P"}
    symbol = symbols.get(moments.basis, "tr P_k(A) / P")
    low, high = moments.bounds
    ends = f"[{low:.3g}, {high:.3g}]"
    mapped = "" if moments.basis == "power" else f"A mapped from {ends} to [−1, 1]."
    values, orders = numbers(moments.values), list(range(len(moments)))
    look: Any = {"band": f"{INTERVAL} over {count_text(moments.probes, 'probe')}"}
    look["statuses"] = [moments.status.name] * len(moments)
    series = Series(symbol, orders, values, numbers(half), "points", **look)
    title = with_status(f"{moments.basis.capitalize()} moments", moments.status)
    return [Chart(title, "order k", symbol, (series,), lines=(("", 0.0),), caption=mapped)]


@charts_of.register
def _(landscape: results.Landscape) -> list[Chart]:
    """A line as curves with the parabola that its curvature predicts; a plane as contours and as
    a surface.
    """
    return [_line(landscape)] if landscape.loss.ndim == 1 else _plane(landscape)


def _direction(landscape: results.Landscape, index: int) -> str:
    name = landscape.labels[index] if index < len(landscape.labels) else f"direction {index + 1}"
    return f"offset along {name}"


def _line(landscape: results.Landscape) -> Chart:
    offsets = numbers(landscape.offsets)
    losses = {"training": landscape.loss}
    if landscape.held_out is not None:
        losses["held out"] = landscape.held_out
    series = [Series(name, offsets, numbers(loss)) for name, loss in losses.items()]
    finite = np.concatenate(list(losses.values()))
    finite = finite[np.isfinite(finite)]
    low, high = float(finite.min()), float(finite.max())
    # the parabola may leave the frame: the loss sets the scale
    room = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
    title, across = with_status("Loss along a line", landscape.status), _direction(landscape, 0)
    curves = (*series, *_parabola(landscape))
    return Chart(title, across, "loss, mean per sample", curves, y_range=(low - room, high + room))


def _parabola(landscape: results.Landscape) -> list[Series]:
    """L(0) + g·t + ½·vᵀHv·t², the slope g taken from the two points beside the centre."""
    offsets, loss = landscape.offsets, landscape.loss
    centre = int(np.abs(offsets).argmin())
    if not landscape.curvature or offsets[centre] != 0 or not 0 < centre < len(offsets) - 1:
        return []
    slope = (loss[centre + 1] - loss[centre - 1]) / (offsets[centre + 1] - offsets[centre - 1])
    fine = np.linspace(offsets[0], offsets[-1], 121)
    values = loss[centre] + slope * fine + 0.5 * landscape.curvature[0] * fine**2
    name = f"parabola, vᵀHv = {landscape.curvature[0]:.3g}"
    return [Series(name, numbers(fine), numbers(values), colour="muted", dashed=True)]


def _plane(landscape: results.Landscape) -> list[Chart]:
    across, up = (_direction(landscape, place) for place in (0, 1))
    offsets, loss = numbers(landscape.offsets), landscape.loss
    finite = loss[np.isfinite(loss)]
    wide = bool(finite.size and 0 < finite.min() < finite.max() / RATIO)
    # loss[i, j] lies at offset i of the first direction, which is drawn across
    values, beside = [numbers(line) for line in loss.T], landscape.held_out
    held_out = None if beside is None else [numbers(line) for line in beside.T]
    heat = Heat(offsets, offsets, values, "loss, mean per sample", wide, held_out, "held out")
    centre = Series("centre", [0.0], [0.0], style="points", mark="cross", colour="vermilion")
    title = with_status("Training loss on a plane", landscape.status)
    return [
        Chart(title, across, up, (centre,), heat=heat),
        Chart(f"{title}, surface", across, up, heat=heat, surface=True, page_only=True),
    ]


@charts_of.register
def _(comparison: BatchComparison) -> list[Chart]:
    """λ₁ of every measured batch over batch size, and each model's mean with a band of one
    standard deviation.
    """
    series = []
    for model in comparison.models:
        predictions = comparison.of(model)
        half = [math.hypot(each.spread, float(each.largest.stderr)) for each in predictions]
        name = f"{model}: {float(comparison.within(model)):.0%} within 1 sd"
        sizes = [each.batch_size for each in predictions]
        means = [float(each.largest) for each in predictions]
        look: Any = {"colour": MODELS.get(model, ""), "band": "one standard deviation of a batch"}
        series.append(Series(name, sizes, means, half, **look))
    x = [each.batch_size for each in comparison.measured for _ in each.largest]
    y = [value for each in comparison.measured for value in numbers(each.largest[:, 0])]
    series.append(Series("batches, measured", x, y, style="points", colour="muted"))
    full = max(float(each.full) for each in comparison.predictions[0].outliers)
    first = comparison.measured[0]
    title = with_status(f"{len(first)} batches of each size", first.status)
    look = {"x_log": True, "y_log": True}
    lines = ((f"all the data: {full:.4g}", full),)
    return [Chart(title, "batch size", "largest eigenvalue", tuple(series), lines=lines, **look)]


@charts_of.register
def _(prediction: BatchPrediction) -> list[Chart]:
    """Each eigenvalue of all the data and where a batch shows it, beside the noisy bulk."""
    low, high = (float(edge) for edge in prediction.edges)
    outliers = prediction.outliers
    x, y = [float(each.batch) for each in outliers], [float(each.overlap) for each in outliers]
    spreads = [each.spread for each in outliers]
    batch = Series("a batch, ± 1 sd", x, y, style="points", x_error=spreads)
    full = [float(each.full) for each in outliers]
    whole = Series("all the data", full, [1.0] * len(full), style="points", mark="tick")
    title = f"λ₁ of a batch: {value_text(prediction.largest)}"
    look: Any = {"x_bands": (("bulk of a batch", low, high),), "y_range": (-0.05, 1.1)}
    look["caption"] = f"Batches of {prediction.batch_size:,}, {prediction.model} noise."
    overlap = "overlap of the eigenvectors, |φ̂ᵀφ|²"
    return [Chart(title, "eigenvalue", overlap, (batch, whole), **look)]


@charts_of.register
def _(batches: BatchEigenvalues) -> list[Chart]:
    """The largest and smallest eigenvalues of every batch."""
    places = list(range(1, len(batches) + 1))
    series, lines = [], []
    for name, colour in (("largest", "blue"), ("smallest", "amber")):
        values = getattr(batches, name)
        for rank, column in enumerate(values.T):
            look: Any = {"style": "points", "colour": colour, "legend": rank == 0}
            series.append(Series(name, places, numbers(column), **look))
        lines.append((f"mean of the {name}", float(values[:, 0].mean())))
    title = with_status(f"Eigenvalues of batches, {batches.operator}", batches.status)
    caption = f"Batches of {batches.batch_size:,} of {batches.population:,} samples."
    return [Chart(title, "batch", "eigenvalue", tuple(series), lines=tuple(lines), caption=caption)]


@charts_of.register
def _(graph: GraphSpectrum) -> list[Chart]:
    """The density over [0, 2] on a logarithmic axis."""
    places = 1 - np.cos(np.linspace(0.0, math.pi, POINTS + 101))
    values = graph.density.evaluate(places)
    floor = float(values.max()) * 10.0**-GRAPH_DECADES
    shown = [value if value > floor / 100 else None for value in numbers(values)]
    series = Series("density", numbers(places), shown)
    counts = {"node": graph.nodes, "edge": graph.edges, "moment": len(graph.moments) - 1}
    sizes = [count_text(count, name) for name, count in counts.items()]
    look: Any = {"y_range": (floor, 2 * float(values.max())), "x_range": (-0.05, 2.05)}
    title, caption = with_status(f"Spectrum of {graph.name}", graph.status), f"{', '.join(sizes)}."
    return [Chart(title, LAPLACIAN, PER_UNIT, (series,), y_log=True, caption=caption, **look)]


@charts_of.register
def _(clusters: Clusters) -> list[Chart]:
    """The density, the gap shaded and its minimum λ* marked, on an axis that shows small
    eigenvalues.
    """
    if clusters.spectrum is None:
        title = with_status(f"{value_text(clusters)} clusters", clusters.status)
        return [interval_chart(title, clusters)]
    (chart,) = charts_of(clusters.spectrum)
    known = math.isfinite(clusters.cut)
    count = f"{value_text(clusters)} clusters" if known else "no gap"
    ends = [(gap.low, gap.high) for gap in clusters.gaps if gap.low <= clusters.cut <= gap.high]
    cut = ((f"λ* = {clusters.cut:.3g}", clusters.cut),) if known else ()
    title = with_status(f"{clusters.spectrum.name}: {count}", clusters.status)
    look: Any = {"x_range": (0.0, 2.0), "x_root": True, "x_lines": cut}
    look["x_bands"] = tuple(("gap", *pair) for pair in ends[:1])
    return [dataclasses.replace(chart, title=title, **look)]


@charts_of.register
def _(similarity: Similarity) -> list[Chart]:
    """The divergences as a map, similar graphs beside each other, and the tree of clusters."""
    order = similarity.order()
    names = [similarity.names[place] for place in order]
    values = [numbers(line) for line in similarity.divergences[np.ix_(order, order)]]
    heat = Heat(names, names, values, "divergence", log=True)
    title = with_status("Symmetric KL divergence between spectra", similarity.status)
    return [Chart(title, "graph", "graph", heat=heat), _tree(similarity)]


def _tree(similarity: Similarity) -> Chart:
    """The dendrogram of average linkage; a joint lies at the mean divergence of its branches."""
    from scipy.cluster.hierarchy import dendrogram

    tree = dendrogram(similarity.tree(), labels=list(similarity.names), no_plot=True)
    heights = [height for joint in tree["dcoord"] for height in joint if height > 0]
    floor = min(heights, default=1.0) / 3  # a logarithmic axis has no zero, where the leaves are
    x: list[float] = []
    y: list[float | None] = []
    for places, joint in zip(tree["icoord"], tree["dcoord"], strict=True):
        x += [(place - 5) / 10 for place in places] + [0.0]  # SciPy puts leaf i at 10·i + 5
        y += [max(float(height), floor) for height in joint] + [None]
    series = (Series("average linkage", x[:-1], y[:-1], style="segments", colour="muted"),)
    look: Any = {"y_log": True, "horizontal": True, "x_names": tuple(tree["ivl"])}
    look["y_range"] = floor, 1.5 * max(heights, default=1.0)
    return Chart("Tree of the graphs", "graph", "mean divergence", series, **look)


@charts_of.register
def _(choice: ModelChoice) -> list[Chart]:
    """The divergence left by every model at its nearest parameter."""
    texts = [value_text(one).removesuffix(" (exact)") for one in choice.fits]
    labels = [f"{one.parameter} = {text}" for one, text in zip(choice.fits, texts, strict=True)]
    values = [one.divergence for one in choice.fits]
    bars = Series("divergence", list(range(len(values))), values, style="bars", texts=labels)
    title, names = f"{choice.name}: nearest to {choice.best}", [one.model for one in choice.fits]
    look: Any = {"x_names": tuple(names), "y_range": (0.0, 1.5 * max(values))}
    label = "symmetric KL divergence of the spectra"
    return [Chart(title, "", label, (bars,), horizontal=True, **look)]
