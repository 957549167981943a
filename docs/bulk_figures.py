"""The figures of the pages on averaging, on shrinkage and on spikes, which ``figures.py`` draws."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

import lambdahat as lh
from lambdahat.randommatrix import NoisyQuadratic, crossing_steps, fit_bulk, matching_rate
from lambdahat.randommatrix.bulk import KAPPA
from lambdahat.report.style import AMBER, BLUE, GREEN, GREY, VERMILION, new_figure, tidy

VGG = Path(__file__).parents[1] / "benchmarks" / "results" / "vgg16-spectrum.json"
LEVELS = {"hessian": 0.9, "ggn": 0.95}  # the Hessian's candidates are 0.91 and 0.94 sure


def noisy_quadratic() -> Any:
    """Left, the expected loss of iterate, average and moving average; right, the learning rate at
    which the last iterate does as well as the average.
    """
    curvatures, figure = np.geomspace(0.05, 10, 20), new_figure(8.4, 3.6)
    quadratic = NoisyQuadratic(curvatures, rate=0.05, noise=1.0, start=1.0)
    axes, decay = tidy(figure.add_subplot(1, 2, 1)), 0.98
    steps = np.unique(np.geomspace(2, 20_000, 60).astype(int))
    marks = (3, 10, 30, 100, 300, 1000, 3000)
    runs = [quadratic.simulate(n, 20, decay) for n in marks]
    laws = {
        "final": quadratic.final,
        "average": quadratic.average,
        "ema": lambda n: quadratic.ema(n, decay),
    }
    names = {"final": "final iterate", "average": "average", "ema": f"EMA, ρ = {decay}"}
    for (kind, law), colour in zip(laws.items(), (GREY, BLUE, AMBER), strict=True):
        axes.loglog(steps, [law(int(n)).loss for n in steps], color=colour, label=names[kind])
        found = [0.5 * (curvatures * getattr(run, kind) ** 2).sum(1).mean() for run in runs]
        axes.loglog(marks, found, "o", color=colour, markersize=4)
        printed = [quadratic.printed(kind, int(n), decay).loss for n in steps]
        axes.loglog(steps, printed, ":", color=colour, linewidth=1)
    axes.axvline(crossing_steps(quadratic), color="0.7", linewidth=0.8)
    axes.set(xlabel="steps n", ylabel="expected loss")
    axes.set_title("points: simulated; dotted: as published", fontsize="medium")
    axes.legend(frameon=False, fontsize="small")
    right = tidy(figure.add_subplot(1, 2, 2))
    counts = np.unique(np.geomspace(1, 10_000, 60).astype(int))
    right.loglog(
        counts, [matching_rate(curvatures, int(n)) for n in counts], color=BLUE, label="exact"
    )
    right.loglog(
        counts, 2 / (2 + counts) * (1 / curvatures).mean(), ":", color=VERMILION, label="Eq. 7.28"
    )
    right.axhline(
        2 / curvatures.max(), color=GREY, linewidth=0.8, label="2/λ₁, the stability limit"
    )
    right.set(xlabel="iterates in the average", ylabel="learning rate")
    right.set_title("Rate at which decay matches the average", fontsize="medium")
    right.legend(frameon=False, fontsize="small")
    return axes


def beyond(fit: lh.randommatrix.BulkFit, nodes: Any) -> Any:
    """Which nodes lie outside of the bulk."""
    return (nodes < float(fit.lower)) | (nodes > float(fit.upper))


def bulk(problem: lh.Problem) -> Any:
    """The Ritz values of a trained network with the bulk's edges and the outliers, as a whole and
    near 0.
    """
    return lh.plot(fit_bulk(lh.spectrum(lh.hessian(problem), depth=100, seed=0)))


def draw_law(axes: Any) -> None:
    """The density of a spiked random matrix: semicircle, the fluctuation of its edge, three
    outliers.
    """
    law, spikes = lh.randommatrix.Semicircle(1.0), np.array([4.0, 3.0, 2.5])
    x = np.linspace(*law.edges, 400)
    axes.fill_between(x, law.density(x), color=BLUE, alpha=0.3, linewidth=0, label="bulk")
    centre, scale = lh.randommatrix.edge_fluctuation(law, 500)
    axes.axvspan(
        centre - 3 * scale,
        centre + scale,
        color=AMBER,
        alpha=0.5,
        linewidth=0,
        label="Tracy–Widom, P = 500",
    )
    seen = lh.randommatrix.Additive(1.0).outlier(spikes)
    axes.vlines(seen, 0, 0.12, color=VERMILION, linewidth=1.2)
    axes.plot(seen, np.full(3, 0.12), "o", color=VERMILION, markersize=3, label="outliers")
    axes.set(xlabel="eigenvalue", ylabel="density", title="spiked matrix", ylim=(0, 0.55))
    axes.legend(frameon=False, fontsize="small", loc="upper left")


def draw_stems(axes: Any, row: dict[str, Any]) -> None:
    """Ritz values and weights of one measured spectrum, with its bulk and outliers at the level
    of its operator.
    """
    nodes, weights, residuals = (
        np.array([row[name]]) for name in ("nodes", "weights", "residuals")
    )
    found = lh.Spectrum(nodes, weights, residuals, row["dim"])
    fit = fit_bulk(found, LEVELS[row["operator"]])
    out = beyond(fit, nodes[0])
    edge, error = float(fit.upper), float(fit.upper.stderr)
    axes.axvspan(float(fit.lower), edge, color=BLUE, alpha=0.12, linewidth=0)
    axes.axvspan(
        edge - error, edge + error, color=AMBER, alpha=0.5, linewidth=0, label="edge ± error"
    )
    for chosen, colour, name in (
        (~out, BLUE, "bulk"),
        (out, VERMILION, f"outliers, {fit.level:.0%}"),
    ):
        axes.vlines(nodes[0][chosen], 1e-12, weights[0][chosen], color=colour, linewidth=0.9)
        axes.plot(nodes[0][chosen], weights[0][chosen], "o", color=colour, markersize=3, label=name)
    axes.axhline(KAPPA / row["dim"], color=GREY, linestyle="--", linewidth=0.8, label="κ/P, κ = 5")
    name = {"hessian": "Hessian", "ggn": "Gauss–Newton"}[row["operator"]]
    axes.set(
        yscale="log", ylim=(1e-12, 3), xlabel="eigenvalue", ylabel="weight", title=f"VGG-16, {name}"
    )
    axes.legend(frameon=False, fontsize="small", loc="upper right")


def vgg() -> Any:
    """Figure 6.1: a spiked random matrix, and the spectra of VGG-16 after 30 epochs."""
    rows = [row for row in json.loads(VGG.read_text(encoding="utf-8")) if row["epoch"] == 30]
    figure = new_figure(11.0, 3.6)
    draw_law(tidy(figure.add_subplot(1, 3, 1)))
    for place, row in enumerate(rows, start=2):
        draw_stems(tidy(figure.add_subplot(1, 3, place)), row)
    return figure


def spikes() -> Any:
    """Where outliers of simulated matrices of order 600 appear, and how well their vectors,
    against both models.
    """
    figure, rng, order, samples = new_figure(8.0, 3.6), np.random.default_rng(0), 600, 300
    seen, overlap = (tidy(figure.add_subplot(1, 2, place)) for place in (1, 2))
    wide = np.linspace(0.2, 6.0, 200)
    flat = lh.randommatrix.Multiplicative([1.0], [order], samples)
    models = (
        ("additive", lh.randommatrix.Additive(1.0), wide, AMBER),
        ("multiplicative", flat, 1 + wide, GREEN),
    )
    for name, model, strengths, colour in models:
        seen.plot(strengths, model.outlier(strengths), color=colour, label=name)
        overlap.plot(strengths, model.overlap(strengths), color=colour)
        for strength in strengths[::18]:
            draw = rng.standard_normal((order, order if name == "additive" else samples))
            if name == "additive":
                matrix = (draw + draw.T) / math.sqrt(2 * order)
                matrix[0, 0] += strength
            else:
                draw[0] *= math.sqrt(strength)
                matrix = draw @ draw.T / samples
            values, vectors = np.linalg.eigh(matrix)
            seen.plot(strength, values[-1], "o", color=colour, markersize=3)
            overlap.plot(strength, vectors[0, -1] ** 2, "o", color=colour, markersize=3)
    seen.set_ylabel("largest eigenvalue seen")
    overlap.set_ylabel("overlap of its vector, |φ̂ᵀφ|²")
    for axes in (seen, overlap):
        axes.set_xlabel("true eigenvalue")
    seen.legend(frameon=False, fontsize="small")
    return figure
