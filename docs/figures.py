"""Draw the figures of the documentation: ``python docs/figures.py [folder]``.

Everything is measured here, on a small network trained on the digits that come with the package, with fixed seeds;
but for the coverage of intervals, which ``benchmarks/coverage.py`` measures, and the ground-truth suite, of which
``lambdahat verify`` has left a result.
"""

from __future__ import annotations

import io
import json
import math
import runpy
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import torch
from PIL import Image
from torch import nn

import lambdahat as lh
from lambdahat import graphs
from lambdahat.experiments import Store, find
from lambdahat.experiments.graph_spectra.likeness import similarity_of
from lambdahat.report.chart_figures import draw
from lambdahat.report.style import AMBER, BLUE, GREEN, GREY, VERMILION, new_axes, new_figure, tidy

FOLDER = Path(__file__).parent / "figures"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
DPI = 100
COLOURS = 128
SEEDS = 10


def train(model: nn.Module, steps: int = 200, rate: float = 0.01) -> nn.Module:
    """Adam on all training digits at once."""
    (x, y), _ = lh.data.digits_split(seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


@cache
def digits_problem(activation: str = "relu") -> lh.Problem:
    """The trained network of the quickstart on its training data."""
    return lh.Problem(train(lh.models.mlp([64, 32, 10], activation)), "cross_entropy", lh.data.digits_split(seed=0)[0])


def matrices(name: str) -> Callable[[], Any]:
    """A figure of ``matrix_figures.py`` beside this file."""
    return lambda: runpy.run_path(str(Path(__file__).with_name("matrix_figures.py")))[name]()


def spectrum() -> Any:
    """The stem plot of one probe."""
    return lh.plot(lh.spectrum(lh.hessian(digits_problem()), depth=100, seed=0))


def density() -> Any:
    """The smoothed density with its band, from several probes."""
    return lh.plot(lh.spectrum(lh.hessian(digits_problem()), depth=80, probes=10, seed=0).density())


def eigenpairs() -> Any:
    """The largest eigenvalues as bars."""
    return lh.plot(lh.eigenpairs(lh.hessian(digits_problem()), k=15, seed=0))


def landscape_line() -> Any:
    """The loss along the sharpest direction, with the parabola that its curvature predicts."""
    problem = digits_problem()
    pairs = lh.eigenpairs(lh.hessian(problem), k=1, seed=0)
    return lh.plot(lh.landscape(problem, pairs, distance=0.5, points=41, held_out=lh.data.digits_split(seed=0)[1]))


def landscape_plane() -> Any:
    """The loss on a plane of two filter-normalised directions."""
    problem, held_out = digits_problem(), lh.data.digits_split(seed=0)[1]
    return lh.plot(lh.landscape(problem, ["filter", "filter"], distance=0.8, points=41, held_out=held_out))


def trace_methods() -> Any:
    """Real and reported error of each method against the products it may make, over seeds, on a tanh network."""
    dense = lh.hessian(digits_problem("tanh")).dense()
    matrix = lh.operator(((dense + dense.T) / 2).numpy())
    hidden = lh.operator(matrix.to_scipy())  # known by its products only
    exact, budgets = float(lh.trace(matrix)), (16, 32, 64, 128, 256)
    axes = new_axes()
    for method, colour, mark in (("hutchinson", AMBER, "o"), ("hutch++", BLUE, "s"), ("xtrace", GREEN, "^")):
        runs = [[lh.trace(hidden, 1e-9, method, n, seed=seed) for seed in range(SEEDS)] for n in budgets]
        real = [math.sqrt(np.mean([(float(e) - exact) ** 2 for e in row])) / exact for row in runs]
        told = [math.sqrt(np.mean([float(e.stderr) ** 2 for e in row])) / exact for row in runs]
        axes.loglog(budgets, real, color=colour, marker=mark, label=f"{method}: error")
        axes.loglog(budgets, told, color=colour, linestyle="--", linewidth=1, label=f"{method}: reported")
    axes.set_xticks(budgets, [str(n) for n in budgets])
    axes.minorticks_off()
    axes.set_xlabel("products with the Hessian")
    axes.set_ylabel("root mean square, relative to the trace")
    axes.legend(frameon=False, fontsize="small")
    axes.set_title(f"Trace of a trained network's Hessian, P = {matrix.dim:,}, {SEEDS} seeds", fontsize="medium")
    return axes


def trace_layers() -> Any:
    """Each layer's share of the trace, Hessian and Gauss–Newton, for a smooth activation."""
    problem = digits_problem("tanh")
    axes, width = new_axes(3.2), 0.38
    bars = (-0.5, "Hessian", lh.hessian(problem), BLUE), (0.5, "Gauss–Newton", lh.ggn(problem), AMBER)
    for shift, name, operator, colour in bars:
        layers = lh.trace_per_layer(operator, tol=0.05, seed=0)
        half = [float(e.interval(0.95)[1]) - float(e) for e in layers.values()]
        where = np.arange(len(layers)) + shift * width
        axes.bar(where, [float(e) for e in layers.values()], width, yerr=half, capsize=4, color=colour, label=name)
    axes.set_xticks(range(len(layers)), [f"layer {name}" for name in layers])
    axes.set_ylabel("trace of the layer's block")
    axes.legend(frameon=False, fontsize="small")
    axes.set_title("Traces by layer of a tanh network, with 95 % intervals", fontsize="medium")
    return axes


def variance() -> Any:
    """What mini-batches do to a product, and what ``lh.variance`` says of it."""
    problem = digits_problem()
    total, whole = problem.num_samples, lh.hessian(problem)
    rng = torch.Generator().manual_seed(0)
    v = torch.randn(problem.num_parameters, 64, generator=rng)
    v = v / v.norm(dim=0)
    mean, sizes = whole @ v, (16, 32, 64, 128, 256, 512, 1024)
    measured = []
    for size in sizes:
        batches = [problem.subsample(size, seed=seed) for seed in range(v.shape[1])]
        shifts = [lh.hessian(batch) @ v[:, i] - mean[:, i] for i, batch in enumerate(batches)]
        measured.append(torch.stack(shifts).square().sum(dim=1).double() / problem.num_parameters)
    told = lh.variance(problem, probes=32, seed=0).hessian_variance
    at = np.geomspace(12, 1300, 100)
    factor = (1 - at / total) / at * total / (total - 1)
    low, high = told.interval(0.95)
    axes = new_axes()
    axes.fill_between(at, low * factor, high * factor, color=BLUE, alpha=0.25, linewidth=0)
    axes.loglog(at, float(told) * factor, color=BLUE, label="σ²/b with σ² from lh.variance, and its 95 % interval")
    error = [2 * float(m.std()) / math.sqrt(len(m)) for m in measured]
    axes.errorbar(sizes, [float(m.mean()) for m in measured], yerr=error, fmt="o", color=VERMILION, capsize=3,
                  label=f"measured on {v.shape[1]} random batches of each size, ± 2 s.e.")  # fmt: skip
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("batch size B")
    axes.set_ylabel("variance of an element of H")
    axes.legend(frameon=False, fontsize="small", loc="lower left")
    axes.set_title(f"Hessian of a mini-batch against that of all {total:,} samples", fontsize="medium")
    return axes


def sharpness() -> Any:
    """One layer times c, the next over c: the function stays, plain sharpness does not."""
    problem = digits_problem()
    theta, scales = problem.space.unflatten(problem.vector), np.geomspace(0.25, 4, 9)
    readings: dict[str, list[float]] = {}
    for c in scales.tolist():
        scaled = {"0.weight": c * theta["0.weight"], "0.bias": c * theta["0.bias"], "2.weight": theta["2.weight"] / c}
        there = problem.at(scaled)
        found = {
            r"$\lambda_{\max}(H)$": float(lh.spectral_norm(lh.hessian(there))),
            r"$\mathrm{tr}\,H$": float(lh.trace(lh.hessian(there))),
            r"adaptive, $\lambda_{\max}(THT)$": float(lh.sharpness(there, steps=0).curvature),
            "relative sharpness": float(lh.relative_sharpness(there, tol=0.01).total),
            "Fisher–Rao norm": float(lh.fisher_rao_norm(there)),
        }
        for name, value in found.items():
            readings.setdefault(name, []).append(value)
    axes, middle = new_axes(), len(scales) // 2
    looks = (VERMILION, "o-"), (AMBER, "s-"), (BLUE, "o-"), (GREEN, "^--"), (GREY, "x:")
    for (name, values), (colour, look) in zip(readings.items(), looks, strict=True):
        axes.loglog(scales, np.array(values) / values[middle], look, color=colour, label=name)
    axes.set_xticks([0.25, 0.5, 1, 2, 4], ["¼", "½", "1", "2", "4"])
    axes.set_yticks([1, 3, 10], ["1", "3", "10"])
    axes.minorticks_off()
    axes.set_xlabel("c: first layer times c, second layer over c")
    axes.set_ylabel("value over that at c = 1")
    axes.legend(frameon=False, fontsize="small")
    axes.set_title("Sharpness of one function in several parametrisations", fontsize="medium")
    return axes


def batch_norm() -> Any:
    """The spectrum of one network with batch norm in its two modes."""
    data = lh.data.digits_split(seed=0)[0]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10)
        model = train(nn.Sequential(*layers), steps=60)
    problems = {
        'norm="eval"': lh.Problem(model, "cross_entropy", data).refresh_statistics(),
        'norm="train", batches of 128': lh.Problem(model, "cross_entropy", data, norm="train", batch_size=128),
    }
    figure = new_figure(6.4, 5.2)
    axes: Any = None
    for place, (name, problem) in enumerate(problems.items(), start=1):
        axes = tidy(figure.add_subplot(2, 1, place, sharex=axes, sharey=axes))
        lh.plot(lh.spectrum(lh.hessian(problem), depth=100, seed=0), axes)
        axes.set_title(name, fontsize="medium")
        if place == 1:
            axes.set_xlabel("")
    return axes


def coverage() -> Any:
    """How often intervals hold the truth, from what ``benchmarks/coverage.py`` measured."""
    stored = json.loads((RESULTS / "coverage.json").read_text(encoding="utf-8"))
    seeds = stored["setting"]["seeds"]
    axes = new_axes(3.4)
    axes.axvspan(90, 99, color=GREEN, alpha=0.12, linewidth=0, label="90 to 99 %, what is asked")
    axes.axvline(95, color=GREY, linewidth=1, linestyle="--")
    looks = {"trace of H": (BLUE, "o"), "Frobenius norm of H": (VERMILION, "s"), "log det(GGN + δI)": (AMBER, "^")}
    networks = list(dict.fromkeys(row["network"] for row in stored["rows"]))
    for place, (estimate, (colour, mark)) in enumerate(looks.items()):
        rows = [row for row in stored["rows"] if row["estimate"] == estimate]
        share = np.array([row["coverage"] for row in rows])
        error = 100 * np.sqrt(share * (1 - share) / seeds)
        where = np.array([networks.index(row["network"]) for row in rows]) + 0.2 * (place - 1)
        axes.errorbar(100 * share, where, xerr=error, fmt=mark, color=colour, capsize=3, label=estimate)
    axes.set_yticks(range(len(networks)), networks)
    axes.set_ylim(len(networks) - 0.5, -0.5)
    axes.set_xlim(86, 101)
    axes.set_xlabel("intervals that hold the exact answer, %")
    axes.legend(frameon=False, fontsize="small", loc="upper left")
    axes.set_title(f"95 % intervals over {seeds} seeds, ± 1 s.e.", fontsize="medium")
    return axes


@cache
def digits_coefficient() -> lh.LearningCoefficient:
    """The learning coefficient of the quickstart's network, at all defaults."""
    return lh.llc(digits_problem())


def llc() -> Any:
    """Traces, running mean, distance and diagnostics of its chains."""
    return lh.plot(digits_coefficient())


def llc_sweep() -> Any:
    """Its learning coefficient over step sizes and temperatures, with the chosen point."""
    return lh.plot(lh.singular.sweep(digits_problem(), coefficient=digits_coefficient(), draws=100))


def volume_scaling() -> Any:
    """V(ε) of w₁²w₂² and its slope."""
    crossing = lh.singular.exact.crossing_problem([1, 1], num_samples=1000)
    return lh.plot(lh.singular.volume_scaling(crossing, multiplicity=2, levels=40))


def verification() -> Any:
    """Every case of the ground-truth suite, from the stored result of one run."""
    return lh.plot(lh.singular.Verification.load(RESULTS / "verification.json"))


def averaging() -> Any:
    """Left, the variance of iterate, moving average and average on a noisy quadratic; right, the schedules."""
    figure = new_figure(8.4, 3.6)
    axes = tidy(figure.add_subplot(1, 2, 1))
    rate, curvature, replicas, steps, decay = 0.1, 1.0, 4000, 1000, 0.9
    rng = torch.Generator().manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.zeros(replicas, dtype=torch.float64))])
    optimizer = lh.optim.SWA(model, lr=rate, momentum=0.0, average_start=101)
    moving = lh.optim.IterateAverage(model, "ema", unit="step", decay=decay)
    marks: dict[str, list[tuple[int, float]]] = {"iterate": [], f"EMA, ρ = {decay}": [], "average": []}
    for step in range(1, 100 + steps + 1):  # the first hundred steps forget the start
        model[0].grad = curvature * model[0].detach() + torch.randn(replicas, generator=rng, dtype=torch.float64)
        optimizer.step()
        moving.update()
        n = step - 100
        if n in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000):
            points = (model[0].detach(), moving.model[0].detach(), optimizer.averaged_parameters[0])
            for kept, point in zip(marks.values(), points, strict=True):
                kept.append((n, float(point.square().mean())))
    phi = 1 - rate * curvature
    final = rate / (curvature * (2 - rate * curvature))
    n = np.geomspace(1, steps, 200)
    whole = 1 / (curvature**2 * n) * (1 - 2 * phi * (1 - phi**n) / (n * (1 - phi**2)))
    ema = final * (1 - decay) * (1 + decay * phi) / ((1 + decay) * (1 - decay * phi))
    for (name, kept), line, colour in zip(marks.items(), (final, ema, whole), (GREY, AMBER, BLUE), strict=True):
        axes.loglog(n, np.broadcast_to(line, n.shape), color=colour)
        axes.loglog(*zip(*kept, strict=True), "o", color=colour, markersize=4, label=name)
    axes.set_xlabel("iterates n")
    axes.set_ylabel("variance around the minimum")
    axes.legend(frameon=False, fontsize="small")
    _schedules(tidy(figure.add_subplot(1, 2, 2)))
    return axes


def _schedules(axes: Any, epochs: int = 200) -> None:
    """The rate of every schedule over the epochs."""
    colours = {
        "flat": GREY,
        "linear": BLUE,
        "averaging": GREEN,
        "step": VERMILION,
        "cosine": AMBER,
        "inverse-sqrt": "k",
    }
    for name, colour in colours.items():
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        settings = {"averaging_start": 160} if name == "averaging" else {}
        schedule = lh.optim.make_schedule(name, optimizer, epochs, **settings)
        rates = []
        for _ in range(epochs):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        axes.plot(rates, color=colour, label=name)
    axes.set_xlabel("epoch")
    axes.set_ylabel("rate / first rate")
    axes.legend(frameon=False, fontsize="small")


def edge_of_stability() -> Any:
    """Learning rate times sharpness along full-batch gradient descent, plain and with momentum, and the loss."""
    (x, y), _ = lh.data.digits_split(seed=0)
    x, y = x[:1000], nn.functional.one_hot(y[:1000], 10).float()
    figure = new_figure(8.4, 3.6)
    left, right = (tidy(figure.add_subplot(1, 2, place)) for place in (1, 2))
    for (rate, momentum), colour in zip(((0.5, 0.0), (1.0, 0.0), (0.5, 0.5)), (BLUE, VERMILION, GREEN), strict=True):
        model = lh.models.mlp([64, 32, 32, 10], "tanh")
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
        problem = lh.Problem(model, "mse", (x, y))
        with lh.training.tracking(problem, [lh.training.make_tracker("edge", 20, "step")], optimizer) as track:
            for step in range(1500):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                track.step(**({"loss": float(loss.detach())} if step % 20 == 19 else {}))
        label = f"α = {rate}" + (f", β = {momentum}" if momentum else "")
        left.plot(*track.run.column("edge"), color=colour, label=label)
        left.plot(*track.run.column("edge_threshold"), color=colour, linestyle="--", linewidth=0.9)
        right.semilogy(*track.run.column("loss"), color=colour, label=label)
    left.set_ylabel("learning rate × sharpness, α·λ₁")
    right.set_ylabel("training loss")
    for axes in (left, right):
        axes.set_xlabel("step")
    left.set_ylim(bottom=0)
    left.legend(frameon=False, fontsize="small", loc="lower right")
    return left


def training() -> Any:
    """The run of the training page."""
    train, test = lh.data.digits_split(seed=0)
    model = lh.models.mlp([64, 32, 10])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = lh.training.fit(
        lh.Problem(model, "cross_entropy", train), optimizer, 20, schedule=lh.optim.schedules.cosine(optimizer, 20),
        validation=test, trackers=lh.training.make_trackers("trace", every=2),
    )  # fmt: skip
    return lh.plot(run)


def regularizers() -> Any:
    """The norms under the rules on XOR beside the thesis's, from the stored run of ``reproduce xor``."""
    figure = new_figure(11.0, 3.8)
    charts = find("xor").charts(Store(RESULTS / "reproductions", "xor", "cpu").rows())
    norms = [chart for chart in charts if chart.title.startswith("Norm at the end")]
    for place, chart in enumerate(norms, start=1):
        axes = draw(chart, tidy(figure.add_subplot(1, len(norms), place)))
        axes.tick_params(axis="x", labelrotation=35)
        axes.set(xlabel="", ylim=(3, 60))
        axes.legend(frameon=False, fontsize="small", loc="upper center", ncols=2)
    return axes


def maximum_entropy() -> Any:
    """The semicircle from its exact moments, the divergence over the number of moments, and what a kernel does."""
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
    middle.semilogy(counts, [fits[count].entropy() - entropy for count in counts], color=BLUE, marker="o", markersize=3)
    middle.axhline(3e-5, color=GREY, linewidth=0.9, linestyle="--", label="3e-5")
    middle.set_xlabel("moments")
    middle.set_ylabel("KL(semicircle‖p)")
    orders = np.arange(1, 13)
    spectrum = lh.spectrum(lh.operator(np.diag(np.linspace(0.5, 1.5, 400))), depth=30, probes=4)
    exact = np.array([float(spectrum.moment(k)) for k in range(13)])
    for width, colour in ((0.05, AMBER), (0.15, VERMILION)):
        kernel = spectrum.density(np.linspace(-1, 3, 4001), width=width).moments(12)
        right.semilogy(orders[1:], (kernel / exact - 1)[2:], color=colour, marker="o", markersize=3,
                       label=f"Gaussian kernel, σ = {width}")  # fmt: skip
    kept = np.abs(spectrum.density(smoothing="maxent", moments=12).moments(12) / exact - 1)
    right.semilogy(orders[1:], np.maximum(kept[2:], 1e-12), color=BLUE, marker="o", markersize=3, label="maxent")
    right.set_xlabel("order of the moment")
    right.set_ylabel("relative error of the moment")
    for axes in (left, middle, right):
        axes.legend(frameon=False, fontsize="small")
    return left


def classical_entropy() -> Any:
    """Figure 2.1 of the spectral thesis on other matrices, from the stored run of ``reproduce logdet-moments``."""
    rows = Store(RESULTS / "reproductions", "logdet-moments", "cpu").rows()
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
                axes.plot(list(means), list(means.values()), style, color=colour, markersize=3, label=label)
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
    made = networkx.random_partition_graph([int(size) for size in sizes], 0.5, 1.0 / sizes.sum(), seed=0)
    return lh.plot(graphs.clusters(graphs.graph(made, name="60 planted clusters"), 80))


def graph_spectra() -> Any:
    """Figures 3.1 and 3.3 of the spectral thesis: entropic spectra of random graphs over all of their eigenvalues."""
    figure, nodes = new_figure(8.4, 3.4), 2000
    random = {
        "Erdős–Rényi, np = 5": networkx.fast_gnp_random_graph(nodes, 5 / nodes, seed=0),
        "Barabási–Albert, r = 5": networkx.barabasi_albert_graph(nodes, 5, seed=0),
    }
    places = np.linspace(1e-3, 1.999, 2000)
    for column, (name, made) in enumerate(random.items(), start=1):
        graph, axes = graphs.graph(made), tidy(figure.add_subplot(1, 2, column))
        values = torch.linalg.eigvalsh(graph.normalized_laplacian().dense()).numpy()
        axes.hist(values, 80, range=(0, 2), density=True, color=GREY, alpha=0.4, label="all eigenvalues")
        for moments, colour in ((3, AMBER), (30, VERMILION), (100, BLUE)):
            density = graphs.spectrum(graph, moments, probes=100).density
            axes.plot(places, density.evaluate(places), color=colour, linewidth=1.2, label=f"{moments} moments")
        axes.set(xlabel="λ", title=f"{name}, n = {nodes:,}", ylim=(0, 2.2))
    axes.legend(frameon=False, fontsize="small")
    return axes


def graph_similarity() -> Any:
    """Divergences between real graphs, from the stored run of ``reproduce graph-similarity``."""
    return lh.plot(similarity_of(Store(RESULTS / "reproductions", "graph-similarity", "cpu").rows()))


def rates(name: str) -> Callable[[], Any]:
    """A figure of ``rate_figures.py``."""
    return lambda: runpy.run_path(str(Path(__file__).with_name("rate_figures.py")))[name]()


def mini_batch_spectra() -> Any:
    """λ₁ of ten batches of each size, and what the three models predict of it."""
    problem = lh.Problem(train(lh.models.mlp([64, 32, 10]), 30), "cross_entropy", lh.data.digits_split(seed=0)[0])
    hessian = lh.hessian(problem)
    pairs, spectrum = lh.eigenpairs(hessian, k=10), lh.spectrum(hessian, depth=80)
    element, along = lh.variance(problem).hessian_variance, lh.randommatrix.directional_variance(problem, pairs)
    sizes = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
    noises = {"additive": element, "multiplicative": element, "directional": along}
    predictions = [
        lh.randommatrix.predict(spectrum, noise, size, problem.num_samples, model)
        for model, noise in noises.items()
        for size in sizes
    ]
    measured = [lh.randommatrix.batch_eigenpairs(problem, size) for size in sizes]
    return lh.plot(lh.randommatrix.BatchComparison(tuple(predictions), tuple(measured)))


def spikes() -> Any:
    """Where outliers of simulated matrices of order 600 appear, and how well their vectors, against both models."""
    figure, rng, order, samples = new_figure(8.0, 3.6), np.random.default_rng(0), 600, 300
    seen, overlap = (tidy(figure.add_subplot(1, 2, place)) for place in (1, 2))
    wide = np.linspace(0.2, 6.0, 200)
    flat = lh.randommatrix.Multiplicative([1.0], [order], samples)
    models = (("additive", lh.randommatrix.Additive(1.0), wide, AMBER), ("multiplicative", flat, 1 + wide, GREEN))
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


FIGURES: dict[str, Callable[[], Any]] = {
    "random-matrices": matrices("ensembles"),
    "lanczos-and-diagonals": matrices("lanczos_and_diagonals"),
    "batch-regimes": matrices("batch_regimes"),
    "maximum-entropy": maximum_entropy,
    "classical-entropy": classical_entropy,
    "spectrum": spectrum,
    "density": density,
    "eigenpairs": eigenpairs,
    "landscape-line": landscape_line,
    "landscape-plane": landscape_plane,
    "trace-methods": trace_methods,
    "trace-layers": trace_layers,
    "coverage": coverage,
    "variance": variance,
    "sharpness": sharpness,
    "batch-norm": batch_norm,
    "llc": llc,
    "llc-sweep": llc_sweep,
    "volume-scaling": volume_scaling,
    "edge-of-stability": edge_of_stability,
    "averaging": averaging,
    "training": training,
    "verification": verification,
    "regularizers": regularizers,
    "graph-clusters": graph_clusters,
    "graph-spectra": graph_spectra,
    "graph-similarity": graph_similarity,
    "batch-and-step": lambda: runpy.run_path(str(Path(__file__).with_name("advice_figures.py")))["batch_and_step"](),
    "noisy-quadratic": lambda: runpy.run_path(str(Path(__file__).with_name("bulk_figures.py")))["noisy_quadratic"](),
    "bulk": lambda: runpy.run_path(str(Path(__file__).with_name("bulk_figures.py")))["bulk"](digits_problem()),
    "mini-batch-spectra": mini_batch_spectra,
    "spikes": spikes,
    "stable-rates": rates("stable_rates"),
    "lanczos-opt": rates("lanczos_opt"),
}


def save(drawn: Any, path: Path) -> None:
    """Write a figure as a PNG of few colours, a third of the size: lines and text need no more."""
    buffer = io.BytesIO()
    drawn.figure.savefig(buffer, dpi=DPI, metadata={"Software": None})
    Image.open(buffer).convert("RGB").quantize(COLOURS).save(path, optimize=True)


def main(folder: Path) -> None:
    """Draw every figure into a folder."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    for name, made in FIGURES.items():
        save(made(), folder / f"{name}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
