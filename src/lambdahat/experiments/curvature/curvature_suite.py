"""Spectra of a trained network, its diagonal, and the loss along Ritz vectors (§§4.2 and 4.6)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lambdahat.estimators import landscape, quadrature
from lambdahat.experiments import kit
from lambdahat.experiments.kit import Cell, Chart, Claim, Row, Rows, Series, Table, short, training
from lambdahat.krylov import Lanczos, lanczos, random_vector
from lambdahat.operators.base import LinearOperator
from lambdahat.operators.curvature import fisher, ggn, gradient_covariance, hessian
from lambdahat.problem import Problem
from lambdahat.randommatrix.bulk import continuous_region
from lambdahat.results import Spectrum

NAMES = {"hessian": "Hessian", "ggn": "Gauss–Newton matrix", "covariance": "gradient covariance"}
DIRECTIONS = {
    "largest": "the largest",
    "smallest": "the smallest",
    "flattest": "the smallest in magnitude",
}
FACTOR = math.log10(2)
CLOSE = 0.1  # of λ₁: "quite closely resembles"
SAME_LARGEST = 1e-3  # of λ₁ between two random vectors
SAME_MASS = 0.02
THEIRS = "VGG-16, CIFAR-100"


def claims(rows: Rows) -> Iterator[kit.Claim]:
    """Two similar matrices, a dissimilar diagonal, consistent probes, and lines of the loss."""
    part, unmet = training.learnt_rows(rows)
    for claim in [*_matrix_claims(part), *_line_claims(part)]:
        sentence = f"{kit.subject(rows)}: {claim.sentence}"
        printed = claim.published if claim.general else f"{claim.published} ({THEIRS})"
        yield replace(claim, sentence=sentence, published=printed, unmet=unmet)


def _spectra(rows: Rows, name: str, probe: int = 0) -> Rows:
    return rows.where(kind="spectrum", curvature=name, probe=probe)


def _matrix_claims(rows: Rows) -> Iterator[Claim]:
    claim = kit.ClaimTexts(f"""
        outliers: the Gauss–Newton matrix has the outliers of the Hessian (mean relative difference
          of the largest four, below {CLOSE:g}) | §4.6.1, Figure 4.7 | quite closely
          | below {CLOSE:g}
        negative: the Hessian has mass below 0, more than 1 % | §4.6.1 | 37 % | above 0.01
        rest: without the Ritz value of most weight less than 1 % of the Hessian's mass is left
          below 0 | §4.6.1 | 0.05 % | below 0.01
        covariance: λ₁ of the gradient covariance is that of the Hessian, within a factor 2
          | §4.1.1 | close | within | decades
        diagonal: the diagonal misses λ₁: its largest element is less than half of it
          | §4.6.1, Figure 4.7 | about 3 of 6.88 | below | decades
        spurious: more elements of the diagonal are beyond the bulk than eigenvalues (difference of
          their numbers) | §4.6.1, Figure 4.7 | many spurious
        extremes: two random vectors give the same extremes (difference over λ₁, below
          {SAME_LARGEST:g}) | Figure 4.8 | 6.8885 and 6.8891 | below {SAME_LARGEST:g}
        mass: two random vectors give the same mass at 0 (within {SAME_MASS:g})
          | Figure 4.8 | unchanged | within {SAME_MASS:g} of 0
    """)
    full, near, noise = (_spectra(rows, name) for name in NAMES)
    flat, second = rows.where(kind="diagonal"), _spectra(rows, "hessian", 1)
    tops = {row["seed"]: np.array(row["top"]) for row in near}
    apart = [float(np.abs(tops[row["seed"]] / np.array(row["top"]) - 1).mean()) for row in full]
    yield claim("outliers", kit.mean_of(apart))
    yield claim("negative", kit.over_seeds(full, "negative"))
    yield claim("rest", kit.over_seeds(full, "negative rest"))
    # said of networks, after Jastrzębski et al. (2020)
    reading = kit.decades(noise, full, "largest")
    yield claim("covariance", reading, margin=FACTOR, general=True)
    yield claim("diagonal", kit.decades(flat, near, "largest"), bound=-FACTOR)
    reading = kit.paired_difference(flat.paired("beyond"), flat.paired("eigenvalues beyond"))
    yield claim("spurious", reading)
    others, ends = {row["seed"]: row for row in second}, []
    for row in full:
        other = others[row["seed"]]
        gaps = (abs(row[key] - other[key]) for key in ("largest", "smallest"))
        ends.append(max(gaps) / row["largest"])
    yield claim("extremes", kit.mean_of(ends))
    yield claim("mass", kit.gap(full, second, "at zero"))


def excess(row: Row) -> float:
    """log₁₀ of the ratio of mean changes of held-out and training loss along a line."""
    middle = len(row["offsets"]) // 2
    changes = [np.abs(np.array(row[part]) - row[part][middle]).mean() for part in ("test", "train")]
    return float(math.log10(max(changes[0], 1e-12) / max(changes[1], 1e-12)))


def _line_claims(rows: Rows) -> Iterator[Claim]:
    claim = kit.ClaimTexts("""
        sharp: along the sharpest direction training and test loss change alike (within a factor 2)
          | Table 4.3 | similar | within | decades
        flat: along a flat direction training and test loss change less alike (distance of the ratio
          from 1) | Table 4.3 | not necessarily flat | above | decades
    """)
    lines = rows.where(kind="line")
    sharp, flat = (
        {row["seed"]: excess(row) for row in lines.where(direction=name)}
        for name in ("largest", "flattest")
    )
    yield claim("sharp", kit.mean_of(list(sharp.values())), margin=FACTOR)
    distances = [{seed: abs(value) for seed, value in part.items()} for part in (flat, sharp)]
    yield claim("flat", kit.paired_difference(*distances))


def tables(rows: Rows) -> Iterator[Table]:
    """The spectra, the diagonal, and the lines."""
    rows, _ = training.learnt_rows(rows)
    columns = {
        "largest": "largest",
        "smallest": "smallest",
        "negative": "mass below 0",
        "negative rest": "without its heaviest Ritz value",
        "at zero": "mass at 0",
    }
    of = {words: _spectra(rows, name) for name, words in NAMES.items()}
    first = rows.where(kind="spectrum")[0]
    title = f"{first['network']}, {first['parameters']:,} parameters"
    yield kit.means_table(title, "matrix", of, columns)
    flat = rows.where(kind="diagonal")
    header = "largest element | edge of the bulk | eigenvalues beyond | elements beyond"
    diagonal = kit.means(flat, "largest", "edge", "eigenvalues beyond", "beyond")
    yield kit.table("The diagonal of the Gauss–Newton matrix", header, [diagonal])
    changes = []
    for name, words in DIRECTIONS.items():
        part = rows.where(kind="line", direction=name)
        ratio = kit.mean_of([excess(row) for row in part])
        changes.append((words, kit.over_seeds(part, "value"), ratio))
    header = "direction of | Ritz value | log₁₀ test over training"
    yield kit.table("Mean change of the loss within 1 of the solution", header, changes)


def charts(rows: Rows) -> Iterator[Chart]:
    """Stem plots of the first seed that has learnt, the diagonal among them, and the lines."""
    rows, _ = training.learnt_rows(rows)
    first = rows.where(seed=rows[0]["seed"])
    flat = first.where(kind="diagonal")[0]
    shown = [kit.stems(words, _spectra(first, name)[0]) for name, words in NAMES.items()]
    label = "diagonal of the Gauss–Newton matrix"
    diagonal = Series(label, flat["centres"], flat["shares"], style="step")
    pair = (_spectra(first, "hessian", probe)[0] for probe in (0, 1))
    probes = [kit.stems(f"random vector {row['probe'] + 1}", row) for row in pair]
    for title, axis, series, source in (
        ("Spectra", "weight", shown, "Tables 4.1 and 4.2, Figure 4.7"),
        ("Ritz values and the diagonal", "share", [diagonal, shown[1], shown[0]], "Figure 4.7"),
        ("Two random vectors, Hessian", "weight", probes, "Figure 4.8"),
    ):
        yield Chart(title, "eigenvalue", axis, tuple(series), y_log=True, source=source)
    for name, words in DIRECTIONS.items():
        row = first.where(kind="line", direction=name)[0]
        losses = tuple(Series(part, row["offsets"], row[part]) for part in ("train", "test"))
        title = f"Loss along the Ritz vector of {words} value"
        yield Chart(title, "offset", "loss", losses, source="Table 4.3")


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


def run(cell: Cell, device: str) -> list[Row]:
    """Train; then a row per spectrum, one for the diagonal, one per line of the landscape."""
    model, data = training.model_and_images(cell, device)
    training.train_by_sgd(model, data, cell, DECAY)
    problem = training.curvature_problem(model, data, cell)
    common = {"parameters": problem.num_parameters, **training.final_row(model, data)}
    rows, shapes = [], {}
    for name, make in CURVATURES.items():
        for probe in range(PROBES if name == "hessian" else 1):
            operator = make(problem)
            start = random_vector(operator, cell["seed"], "suite", name, probe)
            depth, task = min(cell["depth"], operator.dim), f"{name}, random vector {probe + 1}"
            steps = lanczos(operator, start, depth, task)
            shape = quadrature(operator, [steps])
            row = {"kind": "spectrum", "curvature": name, "probe": probe}
            rows.append({**row, **common, **_shape_row(shape)})
            if probe == 0:
                shapes[name] = shape
            if (name, probe) == ("hessian", 0):
                rows += _lines(problem, data, steps)
            del steps  # a basis of VGG-16 takes 6 GB
    rows.append({"kind": "diagonal", **_diagonal_row(problem, shapes["ggn"], cell["seed"])})
    return rows


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
    diagonal = fisher(problem, kind="monte_carlo", seed=seed).known_diagonal()
    assert diagonal is not None
    values, edge = diagonal.double().cpu().numpy(), continuous_region(shape)[1]
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


def _lines(problem: Problem, data: training.Images, steps: Lanczos) -> list[Row]:
    """Both losses along the Ritz vectors of the largest, the smallest and the smallest |θ|."""
    values, rows = steps.ritz()[0], []
    places = values.argmax(), values.argmin(), values.abs().argmin()
    for name, place in zip(DIRECTIONS, map(int, places), strict=True):
        line = landscape(problem, ritz_vector(steps, place), 1.0, POINTS, data.held_out)
        assert line.held_out is not None
        row = {"kind": "line", "direction": name, "value": float(values[place])}
        # along a flat direction the loss changes in its last digits
        losses = {"train": short(line.loss, 7), "test": short(line.held_out, 7)}
        rows.append({**row, "offsets": short(line.offsets), **losses})
    return rows


def ritz_vector(steps: Lanczos, place: int) -> Tensor:
    """The unit Ritz vector (P,) of the Ritz value at ``place`` in ascending order."""
    turn = torch.linalg.eigh(steps.tridiagonal).eigenvectors
    vector = steps.basis @ turn[:, place].to(steps.basis)
    return torch.nn.functional.normalize(vector, dim=0)


# curvature is over ``samples`` training images, by ``depth`` Lanczos steps
SMOKE = kit.image_setting("digits", 400, 300, epochs=8, batch=32, samples=400, depth=30)
CPU = kit.image_setting("mnist", 4000, 2000, epochs=6, samples=1000, depth=60)
PAPER = kit.image_setting("cifar100", 45_000, 5_000, epochs=34, samples=512, depth=100)
SMOKE |= {"network": "MLP-16", "rate": 0.03, "precision": "float32"}
CPU |= {"network": "LeNet-5", "rate": 0.03, "precision": "float32"}
PAPER |= {"network": "VGG-16", "rate": 0.05, "precision": "bfloat16", "augmented": True}
EXPERIMENT = kit.Experiment(
    "curvature-suite",
    "Hessian, Gauss–Newton matrix and gradient covariance of a trained network, and the loss along"
    " their directions",
    kit.SPECTRAL,
    "§§4.2 and 4.6, Tables 4.1–4.3, Figures 4.7 and 4.8",
    {
        "smoke": kit.grid(SMOKE, seed=range(3)),
        "cpu": kit.grid(CPU, seed=range(6)),
        "paper": kit.grid(PAPER, seed=range(6)),
    },
    *(run, claims, tables, charts),
    kit.sentences("""
        At paper scale 34 epochs of 300 on 45,000 images, and 512 of them for the curvature.
        On a CPU LeNet-5 and images of MNIST.
        SGD with momentum 0.9, weight decay 5e-4 and the linear schedule; curvature without the
          decay term.
        Networks that have not learnt are left out, and fewer than three others are not judged: at
          rate 0.05, without batch norm, VGG-16 may stay at chance. The rule came after the runs.
        The bulk ends where weights fall below κ/P, κ = 5; beyond it P times the weight counts
          eigenvalues.
        The diagonal is that of the Gauss–Newton matrix with one label drawn from the network for
          each image.
    """),
    "VGG-16 on CIFAR-100, 100 epochs in §4.2 and 300 in Figure 4.8, rate 0.05, 100 Lanczos"
    " steps, one run.",
    (kit.Size("VGG-16", "cifar100", epochs=300),),
)
