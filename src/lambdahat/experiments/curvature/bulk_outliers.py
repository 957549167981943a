"""Bulk and outliers: a spiked random matrix beside a trained network (§6.2, Figure 6.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from lambdahat._core.rng import derived_seed
from lambdahat.estimators import eigenpairs, spectrum
from lambdahat.experiments.kit.cells import (
    Cell,
    Row,
    Rows,
    Scale,
    means,
    over_seeds,
    settings_of,
    stems,
)
from lambdahat.experiments.kit.claims import (
    Claim,
    Claims,
    Table,
    TableLines,
    mean_of,
    paired_difference,
    split_header,
)
from lambdahat.experiments.kit.experiment import SPECTRAL, Experiment, Size, sentences, subject
from lambdahat.experiments.kit.training import (
    Images,
    Watch,
    curvature_problem,
    final_row,
    images,
    network,
    train_by_sgd,
)
from lambdahat.operators import operator
from lambdahat.operators.curvature import hessian
from lambdahat.problem import Problem
from lambdahat.randommatrix import Additive, Semicircle, TracyWidom, edge_fluctuation, fit_bulk
from lambdahat.randommatrix.bulk import KAPPA
from lambdahat.results import Spectrum
from lambdahat.results.charts import Chart, Series, short

SPIKES = (4.0, 3.0, 2.5)  # in units of the noise, whose bulk ends at 2 and hides spikes below 1
HIDDEN = 0.5
PAIRS = 20
DECAY = 5e-4
FACTOR = math.log10(2)
EDGE = 1.0
THEIRS = "VGG-16, CIFAR-100"


@dataclass(frozen=True)
class BulkScale(Scale):
    """One scale: spiked matrices of ``size``, and networks with ``samples`` images per Hessian."""

    network: str
    samples: int
    depth: int
    size: int
    matrices: int
    side: int = 0
    rate: float = 0.03
    augmented: bool = False
    precision: str = "float32"


def cells(config: BulkScale) -> list[Cell]:
    """Matrices, then networks, seed by seed."""
    base = settings_of(config, "size", "matrices", "seeds")
    matrix = {"part": "matrix", "size": config.size, "depth": config.depth}
    found: list[Cell] = [{**matrix, "seed": seed} for seed in range(config.matrices)]
    return found + [{"part": "network", **base, "seed": seed} for seed in range(config.seeds)]


def run(cell: Cell, device: str) -> list[Row]:
    """One row of a matrix, or two of a network: half of the way, and at the end."""
    return [_matrix_row(cell, device)] if cell["part"] == "matrix" else _network_rows(cell, device)


def _matrix_row(cell: Cell, device: str) -> Row:
    """Wigner noise with three spikes beyond its bulk and one below the threshold."""
    size, strengths = cell["size"], (*SPIKES, HIDDEN)
    noise = Semicircle(1.0)
    matrix = noise.sample(size, derived_seed(cell["seed"], "spiked"))
    for place, strength in enumerate(strengths):
        matrix[place, place] += strength
    values, vectors = torch.linalg.eigh(matrix.to(device))
    values, overlaps = values.flip(0).cpu(), vectors.flip(1)[: len(strengths)].square().cpu()
    centre, scale = edge_fluctuation(noise, size)
    shape = spectrum(operator(matrix.to(device)), depth=min(cell["depth"], size), seed=cell["seed"])
    fit = fit_bulk(shape)
    model, apart = Additive(1.0), range(len(SPIKES))
    return {
        "outliers": _above(shape),
        "edge": float(fit.upper),
        "last of the bulk": (float(values[len(SPIKES)]) - centre) / scale,
        "values": short(values[: len(SPIKES)]),
        "told values": short(model.outlier(np.array(SPIKES))),
        "overlaps": [float(overlaps[i, i]) for i in apart],
        "told": short(model.overlap(np.array(SPIKES))),
        "hidden": float(overlaps[-1].max()),
        **_stems_of(shape),
    }


def _above(shape: Spectrum) -> int:
    """The outliers above the bulk."""
    fit = fit_bulk(shape)
    return sum(float(value) > float(fit.upper) for value in fit.outliers)


def _stems_of(shape: Spectrum) -> Row:
    order = np.argsort(shape.nodes[0])
    return {
        "nodes": short(shape.nodes[0][order]),
        "weights": short(shape.weights[0][order]),
        "dim": shape.dim,
    }


def _network_rows(cell: Cell, device: str) -> list[Row]:
    found = images(cell, device)
    model = network(cell["network"], found, cell["seed"])
    problem, other = curvature_problem(model, found, cell), _held_out(model, found, cell)
    watch = Watch(lambda: _reading(problem, other, cell), max(1, cell["epochs"] // 2))
    train_by_sgd(model, found, cell, DECAY, [watch])
    quality, last = final_row(model, found), watch.rows[-1]["epoch"]
    return [
        {
            **row,
            **(quality if row["epoch"] == last else {}),
            "last": row["epoch"] == last,
            "classes": found.classes,
        }
        for row in watch.rows
    ]


def _held_out(model: torch.nn.Module, found: Images, cell: Cell) -> Problem:
    """The same loss on images that were not trained on, which stand for the true loss."""
    swapped = Images(found.held_out, found.training, found.classes)
    return curvature_problem(model, swapped, cell)


def _reading(problem: Problem, other: Problem, cell: Cell) -> Row:
    """Bulk, outliers, and how much of each leading eigenvector the held-out ones span."""
    curvature = hessian(problem)
    shape = spectrum(curvature, depth=min(cell["depth"], curvature.dim), seed=cell["seed"])
    fit = fit_bulk(shape)
    pairs, true = (
        eigenpairs(op, PAIRS, tol=1e-2, seed=cell["seed"]) for op in (curvature, hessian(other))
    )
    held = (true.vectors.T @ pairs.vectors).square().sum(0)
    return {
        "outliers": _above(shape),
        "below": len(fit.outliers) - _above(shape),
        "edge": float(fit.upper),
        "edge stderr": float(fit.upper.stderr),
        "weight edge": fit.weight_edges[1],
        "largest": float(shape.nodes.max()),
        "kept": short(held),
        "values": short(pairs.values),
        **_stems_of(shape),
    }


def claims(rows: Rows) -> list[Claim]:
    """Of the spiked model, then of networks."""
    return [
        *_matrix_claims(rows.where(part="matrix")),
        *_network_claims(rows.where(part="network")),
    ]


def _matrix_claims(rows: Rows) -> list[Claim]:
    misses = [
        max(abs(a - b) for a, b in zip(row["overlaps"], row["told"], strict=True)) for row in rows
    ]
    law = TracyWidom()
    found = Claims()
    sentence = "spiked matrix: its three outliers are seen as such, and no other"
    source = "Figure 6.1a"
    reading = over_seeds(rows, "outliers")
    found.add(sentence, source, "three", reading, "within", len(SPIKES), 0.1, general=True)
    sentence = (
        "spiked matrix: the last eigenvalue of the bulk has the mean of the Tracy–Widom law,"
        f" {law.mean:.3f}, in units of its fluctuation, within {EDGE:g}"
    )
    source = "Tracy and Widom (1994)"
    published = "none: Figure 6.1a shows such a region without figures"
    reading = over_seeds(rows, "last of the bulk")
    found.add(sentence, source, published, reading, "within", law.mean, EDGE, own=True)
    sentence = (
        "spiked matrix: outliers' eigenvectors lie in the cone of Theorem 17 (miss of the"
        " squared cosine, below 0.1)"
    )
    published = "1 − σ²P/(Bλ²)"
    found.add(sentence, "Theorem 17", published, mean_of(misses), "below", 0.1, general=True)
    sentence = (
        "spiked matrix: in the bulk all information is lost (squared cosine of a hidden spike,"
        " below 0.1)"
    )
    found.add(sentence, "§6.2.1", "0", over_seeds(rows, "hidden"), "below", 0.1, general=True)
    return found


def _network_claims(rows: Rows) -> list[Claim]:
    half, what = rows.where(last=False), subject(rows)
    classes = half[0]["classes"]
    ratios = [
        math.log10(row["weight edge"] / row["edge"])
        for row in half
        if row["weight edge"] > 0 < row["edge"]
    ]
    sharp, flat = ({row["seed"]: row["kept"][place] for row in half} for place in (0, -1))
    found = Claims()
    sentence = f"{what}: several outliers stand apart from the bulk (their number)"
    source = "Figure 6.1b"
    found.add(sentence, source, f"several ({THEIRS})", over_seeds(half, "outliers"), bound=1.0)
    sentence = f"{what}: no more outliers than classes, {classes}"
    reading = over_seeds(half, "outliers")
    found.add(sentence, "§6.4.1", "at most the classes", reading, "below", classes + 0.5)
    sentence = (
        f"{what}: the bulk ends where weights fall below κ/P, κ = 5, within a factor 2 of the"
        " fitted edge"
    )
    source = "Figure 6.1b"
    published = f"an approximate threshold ({THEIRS})"
    found.add(sentence, source, published, mean_of(ratios), "within", 0.0, FACTOR, " decades")
    sentence = (
        f"{what}: held-out images keep more of the sharpest eigenvector than of number {PAIRS}"
        f" (share within their leading {PAIRS})"
    )
    source = "§6.2.1, Theorem 17"
    found.add(sentence, source, "sharp directions retain more", paired_difference(sharp, flat))
    return found


def tables(rows: Rows) -> list[Table]:
    """Spikes as told and as found; the networks' bulks."""
    return [_spike_table(rows.where(part="matrix")), _network_table(rows.where(part="network"))]


def _spike_table(rows: Rows) -> Table:
    lines, told = TableLines(), rows[0]
    for place, spike in enumerate(SPIKES):
        value, overlap = (
            str(mean_of([row[key][place] for row in rows])) for key in ("values", "overlaps")
        )
        lines.add(
            f"{spike:g}",
            f"{told['told values'][place]:.4g}",
            value,
            f"{told['told'][place]:.4g}",
            overlap,
        )
    header = ("spike", "eigenvalue told", "found", "squared cosine told", "found")
    return Table(f"Spikes in Wigner noise, P = {told['size']:,}", header, tuple(lines))


def _network_table(rows: Rows) -> Table:
    lines = []
    for epoch in rows.distinct("epoch"):
        part = rows.where(epoch=epoch)
        keys = ("largest", "edge", "weight edge", "outliers", "below")
        kept = [str(mean_of([row["kept"][place] for row in part])) for place in (0, -1)]
        lines.append((str(epoch), *means(part, *keys), *kept))
    header = split_header(
        "epoch | λ₁ | edge of the bulk | edge by κ/P | outliers above | below 0 | "
        f"of φ₁ in the held-out top | of φ_{PAIRS}"
    )
    return Table(f"{rows[0]['network']}, {rows[0]['dim']:,} parameters", header, tuple(lines))


def charts(rows: Rows) -> list[Chart]:
    """Both spectra, and how much of each eigenvector is kept."""
    matrix, net = (
        rows.where(part="matrix", seed=0)[0],
        rows.where(part="network", seed=0, last=False)[0],
    )
    kept = rows.where(part="network", last=False)
    readings = [mean_of([row["kept"][place] for row in kept]) for place in range(PAIRS)]
    out = [
        Chart(
            title,
            "eigenvalue",
            "weight",
            (stems("Ritz values", row),),
            y_log=True,
            source=source,
            lines=(("κ/P, κ = 5", KAPPA / row["dim"]),),
        )
        for title, row, source in (
            ("Spiked matrix", matrix, "Figure 6.1a"),
            (f"Hessian of {net['network']}, epoch {net['epoch']}", net, "Figure 6.1b"),
        )
    ]
    errors = [r.stderr if math.isfinite(r.stderr) else None for r in readings]
    shares = Series(
        "trained network", list(range(1, PAIRS + 1)), [r.value for r in readings], errors, "points"
    )
    title = f"Share of an eigenvector in the leading {PAIRS} of held-out images"
    return [
        *out,
        Chart(title, "eigenvector, sharpest first", "share", (shares,), source="Theorem 17"),
    ]


# data set, training and held-out samples, epochs, seeds
SMOKE = ("digits", 400, 300, 6, 3)
PAPER = ("cifar10", 45_000, 5_000, 30, 3)
EXPERIMENT = Experiment(
    "bulk-outliers",
    "Bulk and outliers of a spiked matrix and of a trained network",
    SPECTRAL,
    "§6.2, Figure 6.1",
    {
        "smoke": BulkScale(*SMOKE, "MLP-16", samples=300, depth=40, size=200, matrices=4, batch=32),
        "cpu": BulkScale(
            "mnist", 4000, 2000, 6, 5, "LeNet-5", samples=1000, depth=60, size=1000, matrices=20
        ),
        "paper": BulkScale(
            *PAPER,
            "VGG-16",
            samples=1000,
            depth=80,
            size=2000,
            matrices=50,
            rate=0.05,
            augmented=True,
            precision="bfloat16",
        ),
    },
    *(cells, run, claims, tables, charts),
    sentences(f"""
        The spiked matrix: Wigner noise of scale 1 with spikes 4, 3, 2.5, and 0.5 below the
          threshold 1.
        The network is measured half-way, as in the figure, before the rate falls; CIFAR-10 in place
          of CIFAR-100.
        Held-out images stand for the true loss; kept is what lies in the span of their {PAIRS}
          leading ones.
        On a CPU LeNet-5 and images of MNIST.
    """),
    size=(
        "VGG-16 on CIFAR-100 at epoch 150 (Figure 6.1b), and a hypothetical spectrum (Figure 6.1a)."
    ),
    sizes=(Size("VGG-16", "cifar100", epochs=150),),
)
