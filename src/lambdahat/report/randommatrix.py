"""Figures of what batches show of a spectrum, predicted and measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lambdahat.randommatrix.batch_curvature import BatchEigenvalues
from lambdahat.randommatrix.comparison import BatchComparison
from lambdahat.randommatrix.predictions import BatchPrediction
from lambdahat.report.style import AMBER, BLUE, GREEN, GREY, VERMILION, title, value_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"additive": AMBER, "multiplicative": GREEN, "directional": BLUE}


def draw_batch_comparison(found: BatchComparison, axes: Axes) -> None:
    """λ₁ of every measured batch over batch size, and each model's mean with a band of one standard deviation."""
    for model in found.models:
        predictions = found.of(model)
        sizes = [each.batch_size for each in predictions]
        means = np.array([float(each.largest) for each in predictions])
        widths = np.array([np.hypot(each.spread, float(each.largest.stderr)) for each in predictions])
        colour = COLOURS[model]
        axes.plot(sizes, means, color=colour, linewidth=1.6, label=f"{model}: {_share(found, model)} within 1 sd")
        axes.fill_between(sizes, means - widths, means + widths, color=colour, alpha=0.15, linewidth=0)
    for measured in found.measured:
        where = np.full(len(measured), measured.batch_size)
        axes.plot(where, measured.largest[:, 0], ".", color=GREY, markersize=4)
    full = max(float(each.full) for each in found.predictions[0].outliers)
    axes.axhline(full, color=VERMILION, linewidth=1.0, linestyle="--", label=f"all the data: {full:.4g}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("batch size")
    axes.set_ylabel("largest eigenvalue")
    axes.legend(frameon=False, fontsize="small")
    title(axes, f"{len(found.measured[0])} batches of each size", found.measured[0].status)


def _share(found: BatchComparison, model: str) -> str:
    return f"{float(found.within(model)):.0%}"


def draw_batch_prediction(found: BatchPrediction, axes: Axes) -> None:
    """Each eigenvalue of all the data and where a batch shows it, beside the noisy bulk."""
    low, high = (float(edge) for edge in found.edges)
    axes.axvspan(low, high, color=AMBER, alpha=0.25, linewidth=0, label="bulk of a batch")
    full = [float(each.full) for each in found.outliers]
    seen = [float(each.batch) for each in found.outliers]
    overlaps = [float(each.overlap) for each in found.outliers]
    spreads = [each.spread for each in found.outliers]
    axes.errorbar(seen, overlaps, xerr=spreads, fmt="o", color=BLUE, markersize=4, label="a batch, ± 1 sd")
    axes.plot(full, np.ones(len(full)), "|", color=VERMILION, markersize=10, label="all the data")
    axes.set_ylim(-0.05, 1.1)
    axes.set_xlabel("eigenvalue")
    axes.set_ylabel("overlap of the eigenvectors, |φ̂ᵀφ|²")
    axes.legend(frameon=False, fontsize="small")
    axes.set_title(f"batch of {found.batch_size:,}, {found.model}: λ₁ {value_text(found.largest)}", fontsize="medium")


def draw_batches(found: BatchEigenvalues, axes: Axes) -> None:
    """The largest and smallest eigenvalues of every batch."""
    batches = np.arange(1, len(found) + 1)
    for values, colour, label in ((found.largest, BLUE, "largest"), (found.smallest, AMBER, "smallest")):
        axes.plot(batches, values[:, 0], "o", color=colour, markersize=4, label=label)
        axes.plot(batches, values[:, 1:], ".", color=colour, markersize=3)
        axes.axhline(values[:, 0].mean(), color=colour, linewidth=0.8, linestyle="--")
    axes.set_xlabel("batch")
    axes.set_ylabel("eigenvalue")
    axes.legend(frameon=False, fontsize="small")
    title(axes, f"batches of {found.batch_size:,} of {found.population:,} samples, {found.operator}", found.status)
