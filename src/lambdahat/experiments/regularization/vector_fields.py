"""Where L2 and Metric regularization push two parameters (Figure 1.1 of the regularization
thesis).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.func import hessian, vmap

from lambdahat.experiments import kit
from lambdahat.experiments.kit import Cell, Chart, Claim, Heat, Reading, Row, Rows, Series, Table
from lambdahat.optim.regularizers import L2, Metric

TEACHER = (1.0, 1.0)
UNEVEN = 4.0  # one parameter this many times the other
FIELDS = ("L2", "Metric")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"identity": lambda x: x, "tanh": torch.tanh}
CLAIMS = kit.ClaimTexts("""
    L2: {activation}: L2 points towards the origin everywhere (smallest cosine) | Figure 1.1 |
      always | within 1e-9 of 1
    Metric: {activation}: Metric does not point towards the origin everywhere (smallest cosine) |
      Figure 1.1 | not always | below 0.9
    uneven: {activation}: of two uneven parameters Metric moves the larger by a smaller share of
      itself (share of points) | §1 | very little | above 0.9
""")


def cells(points: int) -> list[Cell]:
    """A cell for each activation of the one hidden unit: [−2, 2]² in ``points`` × ``points``."""
    return kit.grid({"points": points, "extent": 2.0, "samples": 101}, activation=ACTIVATIONS)


def run(cell: Cell, device: str) -> list[Row]:
    """A row for each point: loss, and the terms that L2 and Metric subtract at rate 1."""
    across = torch.linspace(-cell["extent"], cell["extent"], cell["points"], dtype=torch.float64)
    grid = torch.cartesian_prod(across, across)
    loss = _loss(cell)
    losses, curvatures = vmap(loss)(grid), vmap(hessian(loss))(grid)
    products = (curvatures @ grid.unsqueeze(2)).squeeze(2)
    pulls, shrinks = Metric(1.0).term([grid], [products], 0)[0], L2(1.0).term([grid], [], 0)[0]
    columns = zip(*(part.tolist() for part in (grid, losses, -shrinks, -pulls)), strict=True)
    return [
        {"first": first, "second": second, "loss": value, "L2": shrink, "Metric": pull}
        for (first, second), value, shrink, pull in columns
    ]


def _loss(cell: Cell) -> Callable[[Tensor], Tensor]:
    """½ mean (f(x, θ) − f(x, θ*))², f = θ₂·σ(θ₁x), over x spread evenly on [−√3, √3]."""
    x = torch.linspace(-math.sqrt(3), math.sqrt(3), cell["samples"], dtype=torch.float64)
    bend = ACTIVATIONS[cell["activation"]]
    targets = TEACHER[1] * bend(TEACHER[0] * x)
    return lambda theta: 0.5 * (theta[1] * bend(theta[0] * x) - targets).square().mean()


def claims(rows: Rows) -> Iterator[Claim]:
    """The thesis's reading of its figure, as shares of the points; a grid is not random."""
    for activation, part in rows.groups("activation"):
        points, steps = _fields(part)
        for name in FIELDS:
            least = float(_cosines(points, steps[name]).min())
            yield CLAIMS(name, Reading(least, 0.0), activation=activation)
        uneven = Reading(_uneven(points, steps["Metric"]), 0.0)
        yield CLAIMS("uneven", uneven, activation=activation)


def _fields(rows: Rows) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Points (n, 2) but for the origin, and the steps there."""
    kept = [row for row in rows if row["first"] ** 2 + row["second"] ** 2 > 1e-12]
    points = np.array([[row["first"], row["second"]] for row in kept])
    return points, {name: np.array([row[name] for row in kept]) for name in FIELDS}


def _cosines(points: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """The cosines between the steps and the direction to the origin, without steps of length 0."""
    lengths = np.linalg.norm(steps, axis=1)
    moving = lengths > 1e-12
    products, scale = -(points * steps).sum(1), lengths * np.linalg.norm(points, axis=1)
    cosines: np.ndarray = products[moving] / scale[moving]
    return cosines


def _uneven(points: np.ndarray, steps: np.ndarray) -> float:
    """The share of uneven points where the larger parameter changes less, relative to itself."""
    sizes = np.abs(points)
    uneven = (sizes.max(1) >= UNEVEN * sizes.min(1)) & (sizes.min(1) > 1e-12)
    shares = np.abs(steps[uneven]) / sizes[uneven]
    larger = sizes[uneven].argmax(1)
    each = np.arange(len(larger))
    return float((shares[each, larger] < shares[each, 1 - larger]).mean())


def tables(rows: Rows) -> list[Table]:
    """The share of inward steps of each field, and the mean cosine."""
    lines = []
    for activation, part in rows.groups("activation"):
        points, steps = _fields(part)
        for name in FIELDS:
            cosines = _cosines(points, steps[name])
            shares = f"{(cosines < 0).mean():.1%}", f"{_uneven(points, steps[name]):.1%}"
            lines.append((activation, name, f"{cosines.mean():.3f}", *shares))
    header = "activation | field | mean cosine | outward | larger parameter spared"
    return [kit.table("Steps against the way to the origin", header, lines)]


def charts(rows: Rows) -> Iterator[Chart]:
    """The loss as a surface, and the two fields as arrows."""
    for activation, part in rows.groups("activation"):
        across = part.distinct("first")
        losses = np.array(part.values("loss")).reshape(len(across), -1).T
        heat = Heat(across, part.distinct("second"), losses.tolist(), "loss")
        yield Chart(f"Loss, {activation}", "θ₁", "θ₂", heat=heat, surface=True, source="Figure 1.1")
        for name in FIELDS:
            yield _arrows(part, name, activation, across[1] - across[0])


def _arrows(rows: Rows, name: str, activation: str, gap: float) -> Chart:
    """Every arrow a stroke that ends in a mark; lengths are relative to the longest."""
    points = np.array([[row["first"], row["second"]] for row in rows])
    steps = np.array([row[name] for row in rows])
    tips = points + 1.5 * gap * steps / np.linalg.norm(steps, axis=1).max()
    x: list[float] = []
    y: list[float | None] = []
    for (x_start, y_start), (x_tip, y_tip) in zip(points.tolist(), tips.tolist(), strict=True):
        x += [x_start, x_tip, x_tip]
        y += [y_start, y_tip, None]  # None ends the stroke
    marks = Series("tip", tips[:, 0].tolist(), tips[:, 1].tolist(), style="points")
    series = Series("step", x, y), marks
    caption = "Strokes run from a point to its mark, the longest 1.5 steps of the grid."
    return Chart(f"{name}, {activation}", "θ₁", "θ₂", series, source="Figure 1.1", caption=caption)


EXPERIMENT = kit.Experiment(
    "vector-fields",
    "Metric regularization follows the landscape, L2 points to the origin",
    kit.REGULARIZATION,
    "§1, Figure 1.1",
    {"smoke": cells(9), "cpu": cells(17), "paper": cells(33)},
    *(run, claims, tables, charts),
    kit.sentences("""
        f(x) = θ₂σ(θ₁x), σ the identity or tanh: Figure 1.2 names none; the teacher has θ = (1, 1).
        Metric's step is −Hθ with the Hessian of the loss as it is.
        A parameter counts as larger than another if it is at least 4 times as large.
    """),
    size="Figure 1.1 has a two-parameter model; its points and samples are not in the text.",
)
