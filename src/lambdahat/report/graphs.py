"""Figures of graphs: entropic spectra, gaps, heat maps of divergences with their tree, fits of random models."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from lambdahat.graphs.cluster_counts import Clusters
from lambdahat.graphs.divergences import Similarity
from lambdahat.graphs.model_fits import ModelChoice
from lambdahat.graphs.spectra import GraphSpectrum
from lambdahat.report.style import AMBER, BLUE, GREY, VERMILION, counted, new_figure, title, value_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 2000
DECADES = 6


def draw_graph_spectrum(found: GraphSpectrum, axes: Axes) -> None:
    """The density over [0, 2] on a logarithmic axis."""
    _density(found, axes)
    axes.set_ylabel("density of eigenvalues, per unit λ")
    size = f"{counted(found.nodes, 'node')}, {counted(found.edges, 'edge')}"
    moments = len(found.moments) - 1
    title(axes, f"{found.name}: {size}, {counted(moments, 'moment')}", found.status)


def _density(found: GraphSpectrum, axes: Axes) -> None:
    places = 1 - np.cos(np.linspace(0.0, math.pi, POINTS))
    values = found.density.evaluate(places)
    axes.set_yscale("log")
    axes.plot(places, np.maximum(values, values.max() * 10.0 ** -(DECADES + 2)), color=BLUE, linewidth=1.4)
    axes.set_ylim(values.max() * 10.0**-DECADES, 2 * values.max())
    axes.set_xlabel("eigenvalue λ of the normalised Laplacian")


def draw_clusters(found: Clusters, axes: Axes) -> None:
    """The density, the gap shaded and its minimum λ* marked, on a square-root axis that shows small eigenvalues."""
    spectrum = found.spectrum
    if spectrum is None:
        axes.set_axis_off()
        title(axes, f"{value_text(found)} clusters", found.status)
        return
    _density(spectrum, axes)
    axes.set_xscale("function", functions=(lambda x: np.sqrt(np.maximum(x, 0)), lambda y: y**2))
    axes.set_xlim(0, 2)
    axes.set_xticks([0.01, 0.1, 0.5, 1.0, 1.5, 2.0], ["0.01", "0.1", "0.5", "1", "1.5", "2"])
    if math.isfinite(found.cut):
        inside = [gap for gap in found.gaps if gap.low <= found.cut <= gap.high]
        if inside:
            axes.axvspan(inside[0].low, inside[0].high, color=AMBER, alpha=0.25, linewidth=0, label="gap")
        axes.axvline(found.cut, color=VERMILION, linewidth=1.2, linestyle="--", label=f"λ* = {found.cut:.3g}")
        axes.legend(frameon=False, fontsize="small")
    axes.set_ylabel("density of eigenvalues, per unit λ")
    count = f"{value_text(found)} clusters" if math.isfinite(found.cut) else "no gap"
    title(axes, f"{spectrum.name}: {count} of {counted(spectrum.nodes, 'node')}", found.status)


def draw_similarity(found: Similarity, axes: Axes) -> None:
    """The divergences as a heat map, like graphs beside each other."""
    order = found.order()
    shades = _coloured(found, order)
    axes.imshow(shades, cmap="viridis_r")
    names = [found.names[i] for i in order]
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize="small")
    axes.set_yticks(range(len(names)), names, fontsize="small")
    axes.grid(visible=False)
    values = found.divergences[np.ix_(order, order)]
    middle = float(np.median(shades))
    for (i, j), value in np.ndenumerate(values):
        dark = shades[i, j] > middle
        axes.text(j, i, f"{value:.2g}", ha="center", va="center", fontsize=7, color="white" if dark else "black")
    title(axes, "Symmetric KL divergence between spectra", found.status)


def _coloured(found: Similarity, order: list[int]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """log₁₀ of the divergences, with the diagonal at the least of them."""
    values = found.divergences[np.ix_(order, order)]
    least = values[values > 0].min() if (values > 0).any() else 1.0
    return np.log10(np.maximum(values, least))


def draw_similarity_figure(found: Similarity) -> Figure:
    """The heat map and the tree."""
    from scipy.cluster.hierarchy import dendrogram

    side = max(3.6, 0.5 * len(found.names) + 1.6)
    figure = new_figure(side + 3.4, side)
    left, right = figure.subplots(1, 2, width_ratios=[side, 2.6])
    draw_similarity(found, left)
    drawn = dendrogram(found.tree(), labels=list(found.names), orientation="right", ax=right, no_plot=False,
                       color_threshold=0, above_threshold_color=GREY)  # fmt: skip
    right.set_yticklabels(drawn["ivl"], fontsize="small")
    right.spines[["top", "right", "left"]].set_visible(False)
    right.set_xscale("symlog", linthresh=float(found.tree()[0, 2]) or 1.0)
    right.set_xlabel("mean divergence")
    return figure


def draw_choice(found: ModelChoice, axes: Axes) -> None:
    """The divergence left by every model at its nearest parameter."""
    names = [one.model for one in found.fits]
    axes.barh(names[::-1], [one.divergence for one in found.fits][::-1], color=BLUE, height=0.6)
    for place, one in enumerate(reversed(found.fits)):
        axes.text(one.divergence, place, f"  {one.parameter} = {value_text(one).removesuffix(' (exact)')}", va="center",
                  fontsize="small")  # fmt: skip
    axes.set_xlim(right=1.5 * max(one.divergence for one in found.fits))
    axes.set_xlabel("symmetric KL divergence of the spectra")
    axes.set_title(f"{found.name}: nearest to {found.best}", fontsize="medium")
