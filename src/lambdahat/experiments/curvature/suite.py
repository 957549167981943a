"""The Deep Curvature Suite's example: spectra of a trained network, its diagonal, and the loss
along Ritz vectors.

§4.2 with Tables 4.1–4.3, and §4.6 with Figures 4.7 and 4.8 of the spectral thesis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lambdahat.estimators import landscape, quadrature
from lambdahat.experiments.curvature.suite_claims import charts, claims, tables
from lambdahat.experiments.kit.cells import Cell, Row, Scale, settings_of
from lambdahat.experiments.kit.experiment import SPECTRAL, Experiment, Size
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
from lambdahat.results.charts import short

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
class Config(Scale):
    """One scale; curvature is over ``samples`` training images by ``depth`` Lanczos steps."""

    network: str
    samples: int
    depth: int
    side: int = 0
    rate: float = 0.03
    augmented: bool = False
    precision: str = "float32"


def cells(config: Config) -> list[Cell]:
    """Seed by seed."""
    base = settings_of(config, "seeds")
    return [{**base, "seed": seed} for seed in range(config.seeds)]


def run(cell: Cell, device: str) -> list[Row]:
    """Train; then a row for each spectrum, one for the diagonal, and one for each line of the
    landscape.
    """
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
    """Extremes, negative mass with and without its heaviest Ritz value, mass at 0, and the Ritz
    values.
    """
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
    """The Gauss–Newton diagonal, from labels that the network draws as in the thesis, beside the
    Ritz values.
    """
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
    """The loss on both parts along the Ritz vectors of the largest, the smallest and the
    smallest |θ|.
    """
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


EXPERIMENT = Experiment(
    "curvature-suite",
    "Hessian, Gauss–Newton matrix and gradient covariance of a trained network, and the loss along"
    " their directions",
    SPECTRAL,
    "§§4.2 and 4.6, Tables 4.1–4.3, Figures 4.7 and 4.8",
    {
        "smoke": Config("digits", 400, 300, 8, 3, "MLP-16", samples=400, depth=30, batch=32),
        "cpu": Config("mnist", 4000, 2000, 6, 6, "LeNet-5", samples=1000, depth=60),
        "paper": Config(
            "cifar10",
            45_000,
            5_000,
            60,
            3,
            "VGG-16",
            samples=5000,
            depth=100,
            rate=0.05,
            augmented=True,
            precision="bfloat16",
        ),
    },
    cells,
    run,
    claims,
    tables,
    charts,
    (
        (
            "CIFAR-10 in place of CIFAR-100, 60 epochs of 300, and 5,000 images for the curvature"
            " at paper scale."
        ),
        "On a CPU LeNet-5 and images of MNIST.",
        (
            "SGD with momentum 0.9, weight decay 5e-4 and the linear schedule; curvature without"
            " the decay term."
        ),
        (
            "The bulk ends where weights fall below κ/P, κ = 5; beyond it P times the weight counts"
            " eigenvalues."
        ),
        (
            "The diagonal is that of the Gauss–Newton matrix with one label drawn from the network"
            " for each image."
        ),
    ),
    size=(
        "VGG-16 on CIFAR-100, 100 epochs in §4.2 and 300 in Figure 4.8, rate 0.05, 100 Lanczos"
        " steps, one run."
    ),
    sizes=(Size("VGG-16", "cifar100", epochs=300),),
)
