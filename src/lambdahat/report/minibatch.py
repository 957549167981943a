"""Figures of what a mini-batch does to curvature: predicted against measured over batch sizes and through training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from lambdahat.experiments.minibatch.eigenvalues import BatchEigenvaluesResult
from lambdahat.experiments.minibatch.points import MODELS, CurvaturePoint, continuous_region
from lambdahat.report.spectra import pooled
from lambdahat.report.style import AMBER, BLUE, GREEN, GREY, VERMILION, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"additive": VERMILION, "multiplicative": GREEN, "directional": BLUE}


def draw_batch_eigenvalues(result: BatchEigenvaluesResult) -> Figure:
    """A column for each network at its last epoch: λ'₁, overlaps, variances through training, bulk of the spectrum."""
    networks = list(dict.fromkeys(point.network for point in result.points))
    rows = (draw_largest, draw_overlaps, draw_variances, draw_bulk)
    figure = new_figure(4.2 * len(networks) + 0.6, 3.1 * len(rows))
    for column, network in enumerate(networks, start=1):
        points = [point for point in result.points if point.network == network]
        for row, draw in enumerate(rows):
            axes = tidy(figure.add_subplot(len(rows), len(networks), row * len(networks) + column))
            draw(points, axes)
            if row == 0:
                last = points[-1]
                axes.set_title(f"{network}, P = {last.parameters:,}, N = {last.samples:,}", fontsize="medium")
    figure.suptitle("What a batch shows of the full data's curvature", fontsize="medium")
    return figure


def draw_first(result: BatchEigenvaluesResult, axes: Axes) -> None:
    """λ'₁ over batch sizes of the first network."""
    network = result.points[0].network
    draw_largest([point for point in result.points if point.network == network], axes)
    axes.set_title(f"{network}: largest eigenvalue of a batch", fontsize="medium")


def draw_largest(points: Sequence[CurvaturePoint], axes: Axes) -> None:
    """λ'₁ of the Hessian of every batch over B at the last epoch, each model's prediction with its spread, and λ₁."""
    point = _last(points, "hessian")
    sizes = [cell.batch_size for cell in point.cells]
    for cell in point.cells:
        seen = cell.values("largest")
        shown = axes.plot([cell.batch_size] * len(seen), seen, "o", color=GREY, markersize=2.5)
    shown[0].set_label("batches")
    for model in (model for model in MODELS if model in point.models):
        middle = np.array([float(cell.predicted(model, "largest")) for cell in point.cells])
        half = np.array([cell.spread(model, "largest") for cell in point.cells])
        axes.plot(sizes, middle, color=COLOURS[model], linewidth=1.2, label=model)
        axes.fill_between(sizes, middle - half, middle + half, color=COLOURS[model], alpha=0.15, linewidth=0)
    axes.axhline(point.largest, color="black", linewidth=0.8, linestyle="--", label="full data")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("batch size B")
    axes.set_ylabel(f"λ'₁ of the Hessian, epoch {point.epoch}")
    axes.legend(frameon=False, fontsize="x-small")


def draw_overlaps(points: Sequence[CurvaturePoint], axes: Axes) -> None:
    """|φ̂₁ᵀφ₁|² over B: mean and deviation over batches, and the models (Theorem 17)."""
    point = _last(points, "hessian")
    sizes = [cell.batch_size for cell in point.cells]
    axes.errorbar(sizes, [float(cell.mean("overlaps")) for cell in point.cells],
                  yerr=[cell.deviation("overlaps") for cell in point.cells], fmt="o", color=GREY, markersize=3.5,
                  linewidth=1, label="batches")  # fmt: skip
    for model in (model for model in MODELS if model in point.models):
        told = [float(cell.predicted(model, "overlaps")) for cell in point.cells]
        axes.plot(sizes, told, color=COLOURS[model], linewidth=1.2, label=model)
    axes.set_xscale("log", base=2)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlabel("batch size B")
    axes.set_ylabel(f"|φ̂₁ᵀφ₁|², epoch {point.epoch}")
    axes.legend(frameon=False, fontsize="x-small", loc="lower right")


def draw_variances(points: Sequence[CurvaturePoint], axes: Axes) -> None:
    """σ² of an element of the Hessian and of the GGN over epochs (Figure 5.5)."""
    for operator, colour in (("hessian", BLUE), ("ggn", AMBER)):
        rows = [point for point in points if point.operator == operator]
        if not rows:
            continue
        axes.errorbar([p.epoch for p in rows], [float(p.variance) for p in rows],
                      yerr=[float(p.variance.stderr) for p in rows], fmt="o-", color=colour, markersize=3.5,
                      linewidth=1, label={"hessian": "Hessian", "ggn": "GGN"}[operator])  # fmt: skip
    axes.set_yscale("log")
    axes.set_xlabel("epoch")
    axes.set_ylabel("σ² per element")
    axes.legend(frameon=False, fontsize="x-small")


def draw_bulk(points: Sequence[CurvaturePoint], axes: Axes) -> None:
    """Ritz values of the full data and of one batch at the last epoch, with the bulk of each (Figures 5.2, 6.1)."""
    point = _last(points, "hessian")
    shown = (
        (point.batch_spectra[0], AMBER, f"B = {point.batch_size}"),
        (point.spectrum, BLUE, "full data"),
    )
    axes.set_yscale("log")
    for spectrum, colour, label in shown:
        nodes, weights = pooled(spectrum)
        kept = weights > 1e-3 / spectrum.dim
        axes.vlines(nodes[kept], 1e-3 / spectrum.dim, weights[kept], color=colour, linewidth=1, label=label)
        axes.axvspan(*continuous_region(spectrum), color=colour, alpha=0.12, linewidth=0)
    axes.axhline(1.0 / point.parameters, color=GREY, linewidth=0.8, linestyle="--", label="one eigenvalue, 1/P")
    axes.set_xlabel("eigenvalue λ; shaded: the bulk, weights of 5/P or more")
    axes.set_ylabel("share of eigenvalues")
    axes.legend(frameon=False, fontsize="x-small", loc="upper right")


def _last(points: Sequence[CurvaturePoint], operator: str) -> CurvaturePoint:
    return [point for point in points if point.operator == operator][-1]
