"""Spectra of a trained network, its diagonal, and the loss along Ritz vectors (§§4.2 and 4.6)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lambdahat.estimators import landscape, quadrature
from lambdahat.experiments.kit.cells import (
    Cell,
    Row,
    Rows,
    Scale,
    decades,
    gap,
    means,
    over_seeds,
    settings_of,
    stems,
)
from lambdahat.experiments.kit.claims import (
    Claim,
    Claims,
    Table,
    mean_of,
    paired_difference,
    split_header,
)
from lambdahat.experiments.kit.experiment import SPECTRAL, Experiment, Size, sentences, subject
from lambdahat.experiments.kit.training import (
    Images,
    curvature_problem,
    final_row,
    images,
    network,
    train_by_sgd,
)
from lambdahat.krylov import Lanczos, lanczos, random_vector
from lambdahat.operators.base import LinearOperator
from lambdahat.operators.curvature import fisher, ggn, gradient_covariance, hessian
from lambdahat.problem import Problem
from lambdahat.randommatrix.bulk import continuous_region
from lambdahat.results import Spectrum
from lambdahat.results.charts import Chart, Series, short

NAMES = {"hessian": "Hessian", "ggn": "Gauss–Newton matrix", "covariance": "gradient covariance"}
DIRECTIONS = {
    "largest": "the largest",
    "smallest": "the smallest",
    "flattest": "the smallest in magnitude",
}
FACTOR = math.log10(2)
CLOSE = 0.1  # of λ₁: "quite closely resembles"
SAME = 1e-3  # of λ₁ between two random vectors
SAME_MASS = 0.02
THEIRS = "VGG-16, CIFAR-100"


def claims(rows: Rows) -> list[Claim]:
    """Two similar matrices, a dissimilar diagonal, consistent probes, and lines of the loss."""
    found = [
        *_matrix_claims(rows),
        *_diagonal_claims(rows),
        *_probe_claims(rows),
        *_line_claims(rows),
    ]
    return [
        replace(
            claim,
            sentence=f"{subject(rows)}: {claim.sentence}",
            published=f"{claim.published} ({THEIRS})",
        )
        for claim in found
    ]


def _spectra(rows: Rows, name: str, probe: int = 0) -> Rows:
    return rows.where(kind="spectrum", curvature=name, probe=probe)


def _matrix_claims(rows: Rows) -> list[Claim]:
    full, near, noise = (_spectra(rows, name) for name in NAMES)
    tops = {row["seed"]: np.array(row["top"]) for row in near}
    apart = [float(np.abs(tops[row["seed"]] / np.array(row["top"]) - 1).mean()) for row in full]
    found = Claims()
    sentence = (
        "the Gauss–Newton matrix has the outliers of the Hessian (mean relative difference of"
        f" the largest four, below {CLOSE:g})"
    )
    found.add(sentence, "§4.6.1, Figure 4.7", "quite closely", mean_of(apart), "below", CLOSE)
    sentence = "the Hessian has mass below 0, more than 1 %"
    found.add(sentence, "§4.6.1", "37 %", over_seeds(full, "negative"), bound=0.01)
    sentence = (
        "without the Ritz value of most weight less than 1 % of the Hessian's mass is left below 0"
    )
    found.add(sentence, "§4.6.1", "0.05 %", over_seeds(full, "negative rest"), "below", 0.01)
    sentence = "λ₁ of the gradient covariance is that of the Hessian, within a factor 2"
    reading = decades(noise, full, "largest")
    found.add(sentence, "§4.1.1", "close", reading, "within", 0.0, FACTOR, " decades")
    return found


def _diagonal_claims(rows: Rows) -> list[Claim]:
    flat, near = rows.where(kind="diagonal"), _spectra(rows, "ggn")
    found = Claims()
    sentence = "the diagonal misses λ₁: its largest element is less than half of it"
    source = "§4.6.1, Figure 4.7"
    reading = decades(flat, near, "largest")
    found.add(sentence, source, "about 3 of 6.88", reading, "below", -FACTOR, unit=" decades")
    sentence = (
        "more elements of the diagonal are beyond the bulk than eigenvalues (difference of"
        " their numbers)"
    )
    reading = paired_difference(flat.paired("beyond"), flat.paired("eigenvalues beyond"))
    found.add(sentence, "§4.6.1, Figure 4.7", "many spurious", reading)
    return found


def _probe_claims(rows: Rows) -> list[Claim]:
    first, second = (_spectra(rows, "hessian", probe) for probe in (0, 1))
    ends, both = [], {row["seed"]: row for row in second}
    for row in first:
        other = both[row["seed"]]
        ends.append(
            max(abs(row[key] - other[key]) for key in ("largest", "smallest")) / row["largest"]
        )
    found = Claims()
    sentence = f"two random vectors give the same extremes (difference over λ₁, below {SAME:g})"
    found.add(sentence, "Figure 4.8", "6.8885 and 6.8891", mean_of(ends), "below", SAME)
    sentence = f"two random vectors give the same mass at 0 (within {SAME_MASS:g})"
    reading = gap(first, second, "at zero")
    found.add(sentence, "Figure 4.8", "unchanged", reading, "within", 0.0, SAME_MASS)
    return found


def excess(row: Row) -> float:
    """log₁₀ of the ratio of mean changes of held-out and training loss along a line."""
    middle = len(row["offsets"]) // 2
    changes = [np.abs(np.array(row[part]) - row[part][middle]).mean() for part in ("test", "train")]
    return float(math.log10(max(changes[0], 1e-12) / max(changes[1], 1e-12)))


def _line_claims(rows: Rows) -> list[Claim]:
    lines = {name: rows.where(kind="line", direction=name) for name in DIRECTIONS}
    sharp, flat = (
        {row["seed"]: excess(row) for row in lines[name]} for name in ("largest", "flattest")
    )
    distances = [{seed: abs(value) for seed, value in part.items()} for part in (flat, sharp)]
    found = Claims()
    sentence = (
        "along the sharpest direction training and test loss change alike (within a factor 2)"
    )
    reading = mean_of(list(sharp.values()))
    found.add(sentence, "Table 4.3", "similar", reading, "within", 0.0, FACTOR, " decades")
    sentence = (
        "along a flat direction training and test loss change less alike (distance of the ratio"
        " from 1)"
    )
    published = "not necessarily flat"
    found.add(sentence, "Table 4.3", published, paired_difference(*distances), unit=" decades")
    return found


def tables(rows: Rows) -> list[Table]:
    """The spectra, the diagonal, and the lines."""
    lines = []
    for name, words in NAMES.items():
        part = _spectra(rows, name)
        keys = ("largest", "smallest", "negative", "negative rest", "at zero")
        lines.append((words, *means(part, *keys)))
    header = split_header(
        "matrix | largest | smallest | mass below 0 | without its heaviest Ritz value | mass at 0"
    )
    first = rows.where(kind="spectrum")[0]
    title = f"{first['network']}, {first['parameters']:,} parameters"
    flat = rows.where(kind="diagonal")
    diagonal = tuple(means(flat, "largest", "edge", "eigenvalues beyond", "beyond"))
    out = []
    out.append(Table(title, header, tuple(lines)))
    columns = ("largest element", "edge of the bulk", "eigenvalues beyond", "elements beyond")
    out.append(Table("The diagonal of the Gauss–Newton matrix", columns, (diagonal,)))
    heading = "Mean change of the loss within 1 of the solution"
    named = ("direction of", "Ritz value", "log₁₀ test over training")
    out.append(Table(heading, named, tuple(_line_row(rows, name) for name in DIRECTIONS)))
    return out


def _line_row(rows: Rows, name: str) -> tuple[str, str, str]:
    part = rows.where(kind="line", direction=name)
    return (
        DIRECTIONS[name],
        str(over_seeds(part, "value")),
        str(mean_of([excess(row) for row in part])),
    )


def charts(rows: Rows) -> list[Chart]:
    """Stem plots of the first seed, the diagonal among them, and the lines."""
    first = rows.where(seed=0)
    flat = first.where(kind="diagonal")[0]
    shown = [stems(words, _spectra(first, name)[0]) for name, words in NAMES.items()]
    diagonal = Series(
        "diagonal of the Gauss–Newton matrix", flat["centres"], flat["shares"], style="step"
    )
    probes = tuple(
        stems(f"random vector {probe + 1}", _spectra(first, "hessian", probe)[0])
        for probe in (0, 1)
    )
    out = []
    source = "Tables 4.1 and 4.2, Figure 4.7"
    out.append(Chart("Spectra", "eigenvalue", "weight", tuple(shown), y_log=True, source=source))
    title = "Ritz values and the diagonal"
    curves = (diagonal, shown[1], shown[0])
    out.append(Chart(title, "eigenvalue", "share", curves, y_log=True, source="Figure 4.7"))
    title = "Two random vectors, Hessian"
    out.append(Chart(title, "eigenvalue", "weight", probes, y_log=True, source="Figure 4.8"))
    for name, words in DIRECTIONS.items():
        row = first.where(kind="line", direction=name)[0]
        series = tuple(Series(part, row["offsets"], row[part]) for part in ("train", "test"))
        title = f"Loss along the Ritz vector of {words} value"
        out.append(Chart(title, "offset", "loss", series, source="Table 4.3"))
    return out


CURVATURES: dict[str, Callable[[Problem], LinearOperator]] = {
    "hessian": hessian,
    "ggn": ggn,
    "covariance": gradient_covariance,
}
DECAY = 5e-4
PROBES = 2
SHARP = 4  # the largest Ritz values that are compared
POINTS = 21
BINS = 60


@dataclass(frozen=True)
class SuiteScale(Scale):
    """One scale; curvature is over ``samples`` training images by ``depth`` Lanczos steps."""

    network: str
    samples: int
    depth: int
    side: int = 0
    rate: float = 0.03
    augmented: bool = False
    precision: str = "float32"


def cells(config: SuiteScale) -> list[Cell]:
    """Seed by seed."""
    base = settings_of(config, "seeds")
    return [{**base, "seed": seed} for seed in range(config.seeds)]


def run(cell: Cell, device: str) -> list[Row]:
    """Train; then a row per spectrum, one for the diagonal, one per line of the landscape."""
    found = images(cell, device)
    model = network(cell["network"], found, cell["seed"])
    train_by_sgd(model, found, cell, DECAY)
    problem = curvature_problem(model, found, cell)
    common = {"parameters": problem.num_parameters, **final_row(model, found)}
    rows, spectra = [], {}
    for name, make in CURVATURES.items():
        for probe in range(PROBES if name == "hessian" else 1):
            operator = make(problem)
            start = random_vector(operator, cell["seed"], "suite", name, probe)
            steps = lanczos(
                operator,
                start,
                min(cell["depth"], operator.dim),
                f"{name}, random vector {probe + 1}",
            )
            shape = quadrature(operator, [steps])
            rows.append(
                {
                    "kind": "spectrum",
                    "curvature": name,
                    "probe": probe,
                    **common,
                    **_shape_row(shape),
                }
            )
            if probe == 0:
                spectra[name] = steps, shape
    rows.append({"kind": "diagonal", **_diagonal_row(problem, spectra["ggn"][1], cell["seed"])})
    return rows + _lines(problem, found, spectra["hessian"][0])


def _shape_row(shape: Spectrum) -> Row:
    """Extremes, negative mass with and without its heaviest Ritz value, mass at 0, Ritz values."""
    order = np.argsort(shape.nodes[0])
    nodes, weights = shape.nodes[0][order], shape.weights[0][order]
    negative = weights[nodes < 0]
    return {
        "largest": float(nodes[-1]),
        "smallest": float(nodes[0]),
        "top": short(nodes[::-1][:SHARP]),
        "negative": float(negative.sum()),
        "negative rest": float(negative.sum() - negative.max(initial=0.0)),
        "at zero": float(shape.degeneracy()),
        "nodes": short(nodes),
        "weights": short(weights),
    }


def _diagonal_row(problem: Problem, shape: Spectrum, seed: int) -> Row:
    """The Gauss–Newton diagonal, from labels that the network draws, beside the Ritz values."""
    drawn = fisher(problem, kind="monte_carlo", seed=seed).known_diagonal()
    assert drawn is not None
    values, edge = drawn.double().cpu().numpy(), continuous_region(shape)[1]
    beyond = shape.weights[0][shape.nodes[0] > edge].sum() * shape.dim
    edges = np.linspace(0.0, max(float(shape.nodes.max()), float(values.max())), BINS + 1)
    return {
        "largest": float(values.max()),
        "edge": edge,
        "beyond": int((values > edge).sum()),
        "eigenvalues beyond": float(beyond),
        "centres": short((edges[1:] + edges[:-1]) / 2),
        "shares": short(np.histogram(values, edges)[0] / len(values)),
    }


def _lines(problem: Problem, found: Images, steps: Lanczos) -> list[Row]:
    """Both losses along the Ritz vectors of the largest, the smallest and the smallest |θ|."""
    values = steps.ritz()[0]
    places = {
        "largest": int(values.argmax()),
        "smallest": int(values.argmin()),
        "flattest": int(values.abs().argmin()),
    }
    rows = []
    for name, place in places.items():
        line = landscape(problem, ritz_vector(steps, place), 1.0, POINTS, found.held_out)
        assert line.held_out is not None
        rows.append(
            {
                "kind": "line",
                "direction": name,
                "value": float(values[place]),
                "offsets": short(line.offsets),
                "train": _fine(line.loss),
                "test": _fine(line.held_out),
            }
        )
    return rows


def _fine(values: Any) -> list[float]:
    """Seven digits: along a flat direction the loss changes in its last ones."""
    return [float(f"{float(value):.7g}") for value in values]


def ritz_vector(steps: Lanczos, place: int) -> Tensor:
    """The unit Ritz vector (P,) of the Ritz value at ``place`` in ascending order."""
    off = steps.beta
    turn = torch.linalg.eigh(
        torch.diag(steps.alpha) + torch.diag(off, 1) + torch.diag(off, -1)
    ).eigenvectors
    vector = steps.basis @ turn[:, place].to(steps.basis)
    return torch.nn.functional.normalize(vector, dim=0)


# data set, training and held-out samples, epochs, seeds
PAPER = ("cifar10", 45_000, 5_000, 60, 3)
EXPERIMENT = Experiment(
    "curvature-suite",
    "Hessian, Gauss–Newton matrix and gradient covariance of a trained network, and the loss along"
    " their directions",
    SPECTRAL,
    "§§4.2 and 4.6, Tables 4.1–4.3, Figures 4.7 and 4.8",
    {
        "smoke": SuiteScale("digits", 400, 300, 8, 3, "MLP-16", samples=400, depth=30, batch=32),
        "cpu": SuiteScale("mnist", 4000, 2000, 6, 6, "LeNet-5", samples=1000, depth=60),
        "paper": SuiteScale(
            *PAPER,
            "VGG-16",
            samples=5000,
            depth=100,
            rate=0.05,
            augmented=True,
            precision="bfloat16",
        ),
    },
    *(cells, run, claims, tables, charts),
    sentences("""
        CIFAR-10 in place of CIFAR-100, 60 epochs of 300, and 5,000 images for the curvature at
          paper scale.
        On a CPU LeNet-5 and images of MNIST.
        SGD with momentum 0.9, weight decay 5e-4 and the linear schedule; curvature without the
          decay term.
        The bulk ends where weights fall below κ/P, κ = 5; beyond it P times the weight counts
          eigenvalues.
        The diagonal is that of the Gauss–Newton matrix with one label drawn from the network for
          each image.
    """),
    size=(
        "VGG-16 on CIFAR-100, 100 epochs in §4.2 and 300 in Figure 4.8, rate 0.05, 100 Lanczos"
        " steps, one run."
    ),
    sizes=(Size("VGG-16", "cifar100", epochs=300),),
)
