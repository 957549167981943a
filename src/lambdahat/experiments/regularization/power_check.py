"""The simultaneous power method against the whole Hessian (§5.2, Figure 5.2 of the
regularization thesis).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lambdahat._core.rng import derived_seed, generator
from lambdahat.data.catalogue import load
from lambdahat.estimators import eigenpairs, power_iteration
from lambdahat.experiments import kit
from lambdahat.experiments.kit import Cell, Chart, Claim, Row, Rows, Series, Table
from lambdahat.models.perceptrons import mlp
from lambdahat.operators.curvature import hessian
from lambdahat.problem import Problem

DIGITS = 5  # the first five, "to decrease the difficulty"
CENTRE = 10  # pixels along a side
PRINTED = 2.146e-5
CLAIMS = kit.ClaimTexts("""
    exact: the power method finds the eigenvalues of the whole Hessian (relative distance below
      0.001) | §5.2 | distance {printed:g} | below 0.001
    cost: Lanczos needs fewer products than the power method | here | not compared | | | ours
""")


def cells(
    data: str, training: int, epochs: int, seeds: int, k: int = 15, products: int = 100_000
) -> list[Cell]:
    """A cell for each seed, with the k eigenvalues to find by at most so many ``products``."""
    base = {"data": data, "training": training, "epochs": epochs, "batch": 64, "rate": 0.1}
    return kit.grid(base | {"k": k, "tol": 1e-6, "products": products}, seed=range(seeds))


def run(cell: Cell, device: str) -> list[Row]:
    """A row for each place: the eigenvalue from the dense matrix, and that of the power method."""
    x, y = (tensor.to(device) for tensor in _data(cell))
    seed, count = cell["seed"], cell["k"]
    model = mlp([x.shape[1], 10, DIGITS], "relu", seed=derived_seed(seed, "power check")).to(x)
    # by SGD, in an order of batches that the seed decides
    optimizer = torch.optim.SGD(model.parameters(), lr=cell["rate"])
    rng = generator(cell["seed"], "order of batches")
    for _ in range(cell["epochs"]):
        for rows in torch.randperm(len(x), generator=rng).to(x.device).split(cell["batch"]):
            optimizer.zero_grad()
            cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    operator = hessian(Problem(model, "cross_entropy", (x, y)))
    values = torch.linalg.eigvalsh(operator.dense().double()).cpu()
    exact = values[values.abs().argsort(descending=True)][:count]
    limits = {"tol": cell["tol"], "max_matvecs": cell["products"]}
    result = power_iteration(operator, count, **limits, seed=seed)
    lanczos = eigenpairs(operator, count, "magnitude", seed=seed)
    gap = float((result.values.cpu() - exact).norm())
    whole = {
        "parameters": operator.dim,
        "distance": gap,
        "relative": gap / float(exact.norm()),
        "power products": result.cost,
        "lanczos products": lanczos.cost,
        "accuracy": float((model(x).argmax(1) == y).double().mean()),
    }
    pairs = enumerate(zip(exact.tolist(), result.values.tolist(), strict=True), 1)
    return [{"place": place, "exact": one, "power": other} | whole for place, (one, other) in pairs]


def _data(cell: Cell) -> tuple[Tensor, Tensor]:
    """The middle of images of the first five digits, as rows of float64 in [0, 1]."""
    options: dict[str, Any] = {} if cell["data"] == "digits" else {"normalization": "unit"}
    x, y = load(cell["data"], **options).train
    if cell["data"] == "mnist":
        edge = (x.shape[-1] - CENTRE) // 2
        x = x[..., edge : edge + CENTRE, edge : edge + CENTRE]
    x, y = x.flatten(1).double()[y < DIGITS], y[y < DIGITS]
    kept = torch.randperm(len(x), generator=generator(0, "images"))[: cell["training"]]
    return x[kept] / x.max(), y[kept]


def claims(rows: Rows) -> Iterator[Claim]:
    """The eigenvalues match; and, beyond the thesis, what they cost."""
    firsts = rows.where(place=1)
    yield CLAIMS("exact", kit.over_seeds(firsts, "relative"), printed=PRINTED)
    products = (firsts.paired(f"{name} products") for name in ("power", "lanczos"))
    yield CLAIMS("cost", kit.paired_difference(*products))


def tables(rows: Rows) -> list[Table]:
    """Seed by seed."""
    line = "{seed} | {distance:.3g} | {relative:.2g} | {power products:,} | {lanczos products:,}"
    lines = [f"{line} | {{accuracy:.3f}}".format(**row).split(" | ") for row in rows.where(place=1)]
    names = "relative | products, power | products, Lanczos | accuracy"
    size = f"{rows[0]['data']}, {rows[0]['parameters']:,} parameters"
    title = f"Top {len(rows.distinct('place'))} eigenvalues, {size}"
    return [kit.table(title, f"seed | distance [{PRINTED:g}] | {names}", lines)]


def charts(rows: Rows) -> list[Chart]:
    """Figure 5.2, for the first seed."""
    part = rows.where(seed=0)
    places = [str(place) for place in part.values("place")]
    names = {"dense matrix": "exact", "power method": "power"}.items()
    series = [Series(label, places, part.values(name), style="bars") for label, name in names]
    title, axes = "Top eigenvalues of the Hessian, seed 0", ("place", "eigenvalue")
    return [Chart(title, *axes, tuple(series), source="Figure 5.2")]


EXPERIMENT = kit.Experiment(
    "power-method",
    "The simultaneous power method finds the eigenvalues of the whole Hessian",
    kit.REGULARIZATION,
    "§5.2, Figure 5.2",
    {
        "smoke": cells("digits", 200, epochs=20, seeds=3, k=5, products=20_000),
        "cpu": cells("mnist", 2000, epochs=40, seeds=5, products=15_000),
        "paper": cells("mnist", 30_596, epochs=50, seeds=10),
    },
    *(run, claims, tables, charts),
    kit.sentences("""
        The network of 100, 10 and 5 units has ReLU activations and biases, and is trained by SGD
          (rate 0.1, batches of 64).
        Eigenvalues are ordered by magnitude, as a power method finds them; values are Rayleigh–Ritz
          values.
        The reference is torch.linalg.eigvalsh of the dense Hessian, not a power method on it; all
          computations are in float64.
        The method stops when Σ(Q − Q_prev)² ≤ 1e-6 for successive Q (as printed, Q_prev is never
          refreshed).
    """),
    size=(
        "a 100-10-5 network on the centre 10 × 10 pixels of MNIST's digits 0 to 4, 15 eigenvalues;"
        " the number of images (MNIST has 30,596 of these digits), epochs and runs are not in the"
        " text."
    ),
    sizes=(kit.Size(data="mnist", samples=30_596),),
)
