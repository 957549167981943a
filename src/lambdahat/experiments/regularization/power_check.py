"""The simultaneous power method against the whole Hessian (§5.2, Figure 5.2 of the
regularization thesis).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lambdahat._core.rng import derived_seed, generator
from lambdahat.data.catalogue import load
from lambdahat.estimators import eigenpairs, power_iteration
from lambdahat.experiments.kit.cells import Cell, Row, Rows, grid, settings_of
from lambdahat.experiments.kit.claims import Claim, Table, mean_of, paired_difference
from lambdahat.experiments.kit.experiment import REGULARIZATION, Experiment, Size, sentences
from lambdahat.models.perceptrons import mlp
from lambdahat.operators.curvature import hessian
from lambdahat.problem import Problem
from lambdahat.results.charts import Chart, Series

DIGITS = 5  # the first five, "to decrease the difficulty"
CENTRE = 10  # pixels along a side
PRINTED = 2.146e-5
EXACT = 1e-3  # relative distance called a match


@dataclass(frozen=True)
class PowerCheckScale:
    """One scale: images, training, and the k eigenvalues to find."""

    data: str
    training: int
    epochs: int
    seeds: int
    k: int = 15
    tol: float = 1e-6
    products: int = 100_000
    rate: float = 0.1
    batch: int = 64


def cells(config: PowerCheckScale) -> list[Cell]:
    """A cell for each seed."""
    return grid(settings_of(config, "seeds"), seed=range(config.seeds))


def run(cell: Cell, device: str) -> list[Row]:
    """A row for each place: the eigenvalue from the dense matrix, and what the power method
    gives there.
    """
    x, y = (tensor.to(device) for tensor in _data(cell))
    model = mlp(
        [x.shape[1], 10, DIGITS], "relu", seed=derived_seed(cell["seed"], "power check")
    ).to(x)
    _train(model, x, y, cell)
    operator = hessian(Problem(model, "cross_entropy", (x, y)))
    values = torch.linalg.eigvalsh(operator.dense().double()).cpu()
    exact = values[values.abs().argsort(descending=True)][: cell["k"]]
    found = power_iteration(
        operator, cell["k"], tol=cell["tol"], max_matvecs=cell["products"], seed=cell["seed"]
    )
    lanczos = eigenpairs(operator, cell["k"], "magnitude", seed=cell["seed"])
    gap = float((found.values.cpu() - exact).norm())
    whole = {
        "parameters": operator.dim,
        "distance": gap,
        "relative": gap / float(exact.norm()),
        "power products": found.cost,
        "lanczos products": lanczos.cost,
        "accuracy": float((model(x).argmax(1) == y).double().mean()),
    }
    return [
        {"place": place + 1, "exact": float(exact[place]), "power": float(found.values[place])}
        | whole
        for place in range(cell["k"])
    ]


def _data(cell: Cell) -> tuple[Tensor, Tensor]:
    """The middle of images of the first five digits, as rows of float64 in [0, 1]."""
    x, y = (
        load("digits") if cell["data"] == "digits" else load(cell["data"], normalization="unit")
    ).train
    if cell["data"] == "mnist":
        edge = (x.shape[-1] - CENTRE) // 2
        x = x[..., edge : edge + CENTRE, edge : edge + CENTRE]
    x, y = x.flatten(1).double()[y < DIGITS], y[y < DIGITS]
    kept = torch.randperm(len(x), generator=generator(0, "images"))[: cell["training"]]
    return x[kept] / x.max(), y[kept]


def _train(model: nn.Module, x: Tensor, y: Tensor, cell: Cell) -> None:
    """SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=cell["rate"])
    rng = generator(cell["seed"], "order of batches")
    for _ in range(cell["epochs"]):
        for rows in torch.randperm(len(x), generator=rng).to(x.device).split(cell["batch"]):
            optimizer.zero_grad()
            cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()


def claims(rows: Rows) -> Iterator[Claim]:
    """The eigenvalues match; and, beyond the thesis, what they cost."""
    firsts = rows.where(place=1)
    relative = mean_of(list(firsts.paired("relative").values()))
    spared = paired_difference(firsts.paired("power products"), firsts.paired("lanczos products"))
    sentence = (
        "the power method finds the eigenvalues of the whole Hessian (relative distance below"
        " 0.001)"
    )
    yield Claim(sentence, "§5.2", f"distance {PRINTED:g}", relative, "below", EXACT)
    sentence = "Lanczos needs fewer products than the power method"
    yield Claim(sentence, "here", "not compared", spared, own=True)


def tables(rows: Rows) -> list[Table]:
    """Seed by seed."""
    lines = tuple(
        (
            str(row["seed"]),
            f"{row['distance']:.3g}",
            f"{row['relative']:.2g}",
            f"{row['power products']:,}",
            f"{row['lanczos products']:,}",
            f"{row['accuracy']:.3f}",
        )
        for row in rows.where(place=1)
    )
    header = (
        "seed",
        f"distance [{PRINTED:g}]",
        "relative",
        "products, power",
        "products, Lanczos",
        "accuracy",
    )
    title = (
        f"Top {len(rows.distinct('place'))} eigenvalues, {rows[0]['data']},"
        f" {rows[0]['parameters']:,} parameters"
    )
    return [Table(title, header, lines)]


def charts(rows: Rows) -> list[Chart]:
    """Figure 5.2, for the first seed."""
    part = rows.where(seed=0)
    places = [str(place) for place in part.values("place")]
    series = (
        Series("dense matrix", places, part.values("exact"), style="bars"),
        Series("power method", places, part.values("power"), style="bars"),
    )
    return [
        Chart(
            "Top eigenvalues of the Hessian, seed 0",
            "place",
            "eigenvalue",
            series,
            source="Figure 5.2",
        )
    ]


EXPERIMENT = Experiment(
    "power-method",
    "The simultaneous power method finds the eigenvalues of the whole Hessian",
    REGULARIZATION,
    "§5.2, Figure 5.2",
    {
        "smoke": PowerCheckScale("digits", 200, 20, 3, k=5, products=20_000),
        "cpu": PowerCheckScale("mnist", 2000, 40, 5, products=15_000),
        "paper": PowerCheckScale("mnist", 30_596, 50, 10),
    },
    cells,
    run,
    claims,
    tables,
    charts,
    sentences("""
        ReLU and biases in the network of 100, 10 and 5 units, trained by SGD (rate 0.1, batches of
          64).
        Eigenvalues are ordered by magnitude, as a power method finds them; values are Rayleigh–Ritz
          values.
        The other side is torch.linalg.eigvalsh of the dense Hessian, not a power method on it; all
          in float64.
        The method stops when Σ(Q − Q_prev)² ≤ 1e-6 for successive Q (as printed, Q_prev is never
          refreshed).
    """),
    size=(
        "a 100-10-5 network on the centre 10 × 10 pixels of MNIST's digits 0 to 4, 15 eigenvalues;"
        " the number of images (MNIST has 30,596 of these digits), epochs and runs are not in the"
        " text."
    ),
    sizes=(Size(data="mnist", samples=30_596),),
)
