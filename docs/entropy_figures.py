"""Figures of maximum entropy and of the spectra of graphs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import torch

import lambdahat as lh
from lambdahat import graphs
from lambdahat.experiments import Store
from lambdahat.experiments.graph_spectra.likeness import similarity_of
from lambdahat.report.style import AMBER, BLUE, GREY, VERMILION, new_figure, tidy

RUNS = Path(__file__).parents[1] / "benchmarks" / "results" / "reproductions"


def maximum_entropy() -> Any:
    """The semicircle from its exact moments, the divergence over the number of moments, and what
    a kernel does.
    """
    figure = new_figure(11.0, 3.5)
    left, middle, right = (tidy(figure.add_subplot(1, 3, place)) for place in (1, 2, 3))
    x = np.linspace(-1, 1, 2001)
    true = 2 / math.pi * np.sqrt(1 - x**2)
    counts = range(2, 62, 2)
    fits = {count: lh.maxent.fit([1.0, 0.0, -0.5] + [0.0] * (count - 2)) for count in counts}
    left.plot(x, true, color=GREY, linewidth=3, alpha=0.5, label="semicircle")
    for count, colour in ((4, AMBER), (30, BLUE)):
        left.plot(x, fits[count].evaluate(x), color=colour, linewidth=1.2, label=f"{count} moments")
    left.set_xlabel("λ")
    left.set_ylabel("density")
    entropy = math.log(math.pi) - 0.5
    middle.semilogy(
        counts,
        [fits[count].entropy() - entropy for count in counts],
        color=BLUE,
        marker="o",
        markersize=3,
    )
    middle.axhline(3e-5, color=GREY, linewidth=0.9, linestyle="--", label="3e-5")
    middle.set_xlabel("moments")
    middle.set_ylabel("KL(semicircle‖p)")
    orders = np.arange(1, 13)
    spectrum = lh.spectrum(lh.operator(np.diag(np.linspace(0.5, 1.5, 400))), depth=30, probes=4)
    exact = np.array([float(spectrum.moment(k)) for k in range(13)])
    for width, colour in ((0.05, AMBER), (0.15, VERMILION)):
        kernel = spectrum.density(np.linspace(-1, 3, 4001), width=width).moments(12)
        right.semilogy(
            orders[1:],
            (kernel / exact - 1)[2:],
            color=colour,
            marker="o",
            markersize=3,
            label=f"Gaussian kernel, σ = {width}",
        )
    kept = np.abs(spectrum.density(smoothing="maxent", moments=12).moments(12) / exact - 1)
    right.semilogy(
        orders[1:],
        np.maximum(kept[2:], 1e-12),
        color=BLUE,
        marker="o",
        markersize=3,
        label="maxent",
    )
    right.set_xlabel("order of the moment")
    right.set_ylabel("relative error of the moment")
    for axes in (left, middle, right):
        axes.legend(frameon=False, fontsize="small")
    return left


def classical_entropy() -> Any:
    """Figure 2.1 of the spectral thesis on other matrices, from the stored run of ``reproduce
    logdet-moments``.
    """
    rows = Store(RUNS, "logdet-moments", "cpu").rows()
    names = rows.distinct("matrix")
    figure = new_figure(11.4, 5.6)
    for column, name in enumerate(names, start=1):
        part = rows.where(matrix=name)
        kinds = (("BMxnt", VERMILION, "o-", 50), ("MEMe", BLUE, "o-", 50), ("MEMe", BLUE, ":", 0))
        for line, quantity in enumerate(("entropy", "error")):
            axes = tidy(figure.add_subplot(2, len(names), line * len(names) + column))
            for by, colour, style, probes in kinds if quantity == "error" else kinds[:2]:
                means = part.where(by=by, probes=probes).paired(quantity, by="moments")
                label = f"{by}, exact moments" if probes == 0 else by
                axes.plot(
                    list(means),
                    list(means.values()),
                    style,
                    color=colour,
                    markersize=3,
                    label=label,
                )
            axes.set_ylabel("entropy" if quantity == "entropy" else "relative error of log det")
            if quantity == "error":
                axes.set_yscale("log")
                axes.set_xlabel("moments")
            else:
                axes.set_title(part[0]["data"], fontsize="medium")
            if column == 1:
                axes.legend(frameon=False, fontsize="small")
    return axes


def graph_clusters() -> Any:
    """The spectrum of a graph of 60 planted clusters, and the gap behind them."""
    sizes = np.random.default_rng(0).integers(20, 41, 60)
    made = networkx.random_partition_graph(
        [int(size) for size in sizes], 0.5, 1.0 / sizes.sum(), seed=0
    )
    return lh.plot(graphs.clusters(graphs.graph(made, name="60 planted clusters"), 80))


def graph_spectra() -> Any:
    """Figures 3.1 and 3.3 of the spectral thesis: entropic spectra of random graphs over all of
    their eigenvalues.
    """
    figure, nodes = new_figure(8.4, 3.4), 2000
    random = {
        "Erdős–Rényi, np = 5": networkx.fast_gnp_random_graph(nodes, 5 / nodes, seed=0),
        "Barabási–Albert, r = 5": networkx.barabasi_albert_graph(nodes, 5, seed=0),
    }
    places = np.linspace(1e-3, 1.999, 2000)
    for column, (name, made) in enumerate(random.items(), start=1):
        graph, axes = graphs.graph(made), tidy(figure.add_subplot(1, 2, column))
        values = torch.linalg.eigvalsh(graph.normalized_laplacian().dense()).numpy()
        axes.hist(
            values, 80, range=(0, 2), density=True, color=GREY, alpha=0.4, label="all eigenvalues"
        )
        for moments, colour in ((3, AMBER), (30, VERMILION), (100, BLUE)):
            density = graphs.spectrum(graph, moments, probes=100).density
            axes.plot(
                places,
                density.evaluate(places),
                color=colour,
                linewidth=1.2,
                label=f"{moments} moments",
            )
        axes.set(xlabel="λ", title=f"{name}, n = {nodes:,}", ylim=(0, 2.2))
    axes.legend(frameon=False, fontsize="small")
    return axes


def graph_similarity() -> Any:
    """Divergences between real graphs, from the stored run of ``reproduce graph-similarity``."""
    return lh.plot(similarity_of(Store(RUNS, "graph-similarity", "cpu").rows()))
