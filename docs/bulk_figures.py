"""The figures of the pages on averaging and on shrinkage, which ``figures.py`` draws."""

from __future__ import annotations

from typing import Any

import numpy as np

import lambdahat as lh
from lambdahat.randommatrix import NoisyQuadratic, crossing_steps, fit_bulk, matching_rate
from lambdahat.report.style import AMBER, BLUE, GREY, VERMILION, new_figure, tidy


def noisy_quadratic() -> Any:
    """Left, the expected loss of iterate, average and moving average; right, the rate at which decay does as well."""
    curvatures, figure = np.geomspace(0.05, 10, 20), new_figure(8.4, 3.6)
    quadratic = NoisyQuadratic(curvatures, rate=0.05, noise=1.0, start=1.0)
    axes, decay = tidy(figure.add_subplot(1, 2, 1)), 0.98
    steps = np.unique(np.geomspace(2, 20_000, 60).astype(int))
    marks = (3, 10, 30, 100, 300, 1000, 3000)
    runs = [quadratic.simulate(n, 20, decay) for n in marks]
    laws = {"final": quadratic.final, "average": quadratic.average, "ema": lambda n: quadratic.ema(n, decay)}
    names = {"final": "final iterate", "average": "average", "ema": f"EMA, ρ = {decay}"}
    for (kind, law), colour in zip(laws.items(), (GREY, BLUE, AMBER), strict=True):
        axes.loglog(steps, [law(int(n)).loss for n in steps], color=colour, label=names[kind])
        found = [0.5 * (curvatures * getattr(run, kind) ** 2).sum(1).mean() for run in runs]
        axes.loglog(marks, found, "o", color=colour, markersize=4)
        printed = [quadratic.printed(kind, int(n), decay).loss for n in steps]
        axes.loglog(steps, printed, ":", color=colour, linewidth=1)
    axes.axvline(crossing_steps(quadratic), color="0.7", linewidth=0.8)
    axes.set(xlabel="steps n", ylabel="expected loss", title="points: simulated; dotted: as printed")
    axes.legend(frameon=False, fontsize="small")
    right = tidy(figure.add_subplot(1, 2, 2))
    counts = np.unique(np.geomspace(1, 10_000, 60).astype(int))
    right.loglog(counts, [matching_rate(curvatures, int(n)) for n in counts], color=BLUE, label="exact")
    right.loglog(counts, 2 / (2 + counts) * (1 / curvatures).mean(), ":", color=VERMILION, label="Eq. 7.28")
    right.axhline(2 / curvatures.max(), color=GREY, linewidth=0.8, label="2/λ₁, where descent ends")
    right.set(xlabel="iterates in the average", ylabel="rate", title="Below it the last iterate is better")
    right.legend(frameon=False, fontsize="small")
    return axes


def bulk(problem: lh.Problem) -> Any:
    """The Ritz values of a trained network with the bulk's edges and the outliers, near 0 and as a whole."""
    found = lh.spectrum(lh.hessian(problem), depth=100, seed=0)
    fit, figure = fit_bulk(found), new_figure(8.4, 3.6)
    apart = np.array([float(outlier) for outlier in fit.outliers])
    nodes, weights = found.nodes[0], found.weights[0]
    out = np.isin(nodes, apart)
    for place in (1, 2):
        axes = tidy(figure.add_subplot(1, 2, place))
        axes.axvspan(float(fit.lower), float(fit.upper), color=BLUE, alpha=0.12, linewidth=0)
        for chosen, colour, name in ((~out, BLUE, "bulk"), (out, VERMILION, "outliers")):
            axes.vlines(nodes[chosen], 1e-7, weights[chosen], color=colour, linewidth=0.8)
            axes.plot(nodes[chosen], weights[chosen], "o", color=colour, markersize=3, label=name)
        axes.axhline(5 / found.dim, color=GREY, linestyle="--", linewidth=0.8, label="κ/P, κ = 5")
        axes.set(yscale="log", ylim=(1e-7, 1.5), xlabel="eigenvalue", ylabel="weight")
    axes.set_xlim(-0.01, 0.12)
    axes.legend(frameon=False, fontsize="small")
    return axes
