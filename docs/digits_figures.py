"""Figures measured on a small network, trained on the digits that come with the package."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

import lambdahat as lh
from lambdahat.report.style import AMBER, BLUE, GREEN, GREY, VERMILION, new_axes, new_figure, tidy

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
    return lh.Problem(
        train(lh.models.mlp([64, 32, 10], activation)),
        "cross_entropy",
        lh.data.digits_split(seed=0)[0],
    )


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
    return lh.plot(
        lh.landscape(
            problem, pairs, distance=0.5, points=41, held_out=lh.data.digits_split(seed=0)[1]
        )
    )


def landscape_plane() -> Any:
    """The loss on a plane of two filter-normalised directions."""
    problem, held_out = digits_problem(), lh.data.digits_split(seed=0)[1]
    return lh.plot(
        lh.landscape(problem, ["filter", "filter"], distance=0.8, points=41, held_out=held_out)
    )


def trace_methods() -> Any:
    """Real and reported error of each method against the products it may make, over seeds, on a
    tanh network.
    """
    dense = lh.hessian(digits_problem("tanh")).dense()
    matrix = lh.operator(((dense + dense.T) / 2).numpy())
    hidden = lh.operator(matrix.to_scipy())  # known by its products only
    exact, budgets = float(lh.trace(matrix)), (16, 32, 64, 128, 256)
    axes = new_axes()
    for method, colour, mark in (
        ("hutchinson", AMBER, "o"),
        ("hutch++", BLUE, "s"),
        ("xtrace", GREEN, "^"),
    ):
        runs = [
            [lh.trace(hidden, 1e-9, method, n, seed=seed) for seed in range(SEEDS)] for n in budgets
        ]
        real = [math.sqrt(np.mean([(float(e) - exact) ** 2 for e in row])) / exact for row in runs]
        told = [math.sqrt(np.mean([float(e.stderr) ** 2 for e in row])) / exact for row in runs]
        axes.loglog(budgets, real, color=colour, marker=mark, label=f"{method}: error")
        axes.loglog(
            budgets, told, color=colour, linestyle="--", linewidth=1, label=f"{method}: reported"
        )
    axes.set_xticks(budgets, [str(n) for n in budgets])
    axes.minorticks_off()
    axes.set_xlabel("products with the Hessian")
    axes.set_ylabel("root mean square, relative to the trace")
    axes.legend(frameon=False, fontsize="small")
    axes.set_title(
        f"Trace of a trained network's Hessian, P = {matrix.dim:,}, {SEEDS} seeds",
        fontsize="medium",
    )
    return axes


def trace_layers() -> Any:
    """Each layer's share of the trace, Hessian and Gauss–Newton, for a smooth activation."""
    problem = digits_problem("tanh")
    axes, width = new_axes(3.2), 0.38
    bars = (
        (-0.5, "Hessian", lh.hessian(problem), BLUE),
        (0.5, "Gauss–Newton", lh.ggn(problem), AMBER),
    )
    for shift, name, operator, colour in bars:
        layers = lh.trace_per_layer(operator)
        where = np.arange(len(layers)) + shift * width
        axes.bar(where, [float(e) for e in layers.values()], width, color=colour, label=name)
    axes.set_xticks(range(len(layers)), [f"layer {name}" for name in layers])
    axes.set_ylabel("trace of the layer's block")
    axes.legend(frameon=False, fontsize="small")
    axes.set_title("Traces by layer of a tanh network, exact", fontsize="medium")
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
    axes.loglog(
        at,
        float(told) * factor,
        color=BLUE,
        label="σ²/b with σ² from lh.variance, and its 95 % interval",
    )
    error = [2 * float(m.std()) / math.sqrt(len(m)) for m in measured]
    axes.errorbar(
        sizes,
        [float(m.mean()) for m in measured],
        yerr=error,
        fmt="o",
        color=VERMILION,
        capsize=3,
        label=f"measured on {v.shape[1]} random batches of each size, ± 2 s.e.",
    )
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("batch size B")
    axes.set_ylabel("variance of an element of H")
    axes.legend(frameon=False, fontsize="small", loc="lower left")
    axes.set_title(
        f"Hessian of a mini-batch against that of all {total:,} samples", fontsize="medium"
    )
    return axes


def sharpness() -> Any:
    """One layer times c, the next over c: the function stays, plain sharpness does not."""
    problem = digits_problem()
    theta, scales = problem.space.unflatten(problem.vector), np.geomspace(0.25, 4, 9)
    readings: dict[str, list[float]] = {}
    for c in scales.tolist():
        scaled = {
            "0.weight": c * theta["0.weight"],
            "0.bias": c * theta["0.bias"],
            "2.weight": theta["2.weight"] / c,
        }
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
        'norm="train", batches of 128': lh.Problem(
            model, "cross_entropy", data, norm="train", batch_size=128
        ),
    }
    figure = new_figure(9.6, 3.6)
    axes: Any = None
    for place, (name, problem) in enumerate(problems.items(), start=1):
        axes = tidy(figure.add_subplot(1, 2, place, sharex=axes, sharey=axes))
        lh.plot(lh.spectrum(lh.hessian(problem), depth=100, seed=0), axes)
        axes.set_title(name, fontsize="medium")
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
    return lh.plot(lh.singular.sweep(digits_problem(), draws=100))


def mini_batch_spectra() -> Any:
    """λ₁ of ten batches of each size, and what the three models predict of it."""
    problem = lh.Problem(
        train(lh.models.mlp([64, 32, 10]), 30), "cross_entropy", lh.data.digits_split(seed=0)[0]
    )
    hessian = lh.hessian(problem)
    pairs, spectrum = lh.eigenpairs(hessian, k=10), lh.spectrum(hessian, depth=80)
    element, along = (
        lh.variance(problem).hessian_variance,
        lh.randommatrix.directional_variance(problem, pairs),
    )
    sizes = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
    noises = {"additive": element, "multiplicative": element, "directional": along}
    predictions = [
        lh.randommatrix.predict(spectrum, noise, size, problem.num_samples, model)
        for model, noise in noises.items()
        for size in sizes
    ]
    measured = [lh.randommatrix.batch_eigenpairs(problem, size) for size in sizes]
    return lh.plot(lh.randommatrix.BatchComparison(tuple(predictions), tuple(measured)))
