"""The deep linear network with exponential loss, exactly in float64 (§2 of the flatness paper).

L(w) = exp(X·w₁w₂⋯w_d) has gradient X·L·∇h and Hessian L·(X²·∇h∇hᵀ + X·∂²h), h = ∏w_i. The paper
prints the first term alone (Eq. 2), which has rank 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from scipy.optimize import brentq
from torch import Tensor

from lambdahat._core.rng import generator
from lambdahat.experiments.kit.cells import Cell, Row, Rows, decades, gap, over_seeds
from lambdahat.experiments.kit.claims import Claim, Reading, Table
from lambdahat.experiments.kit.experiment import FLATNESS, Experiment, sentences
from lambdahat.operators.curvature import hessian
from lambdahat.problem import Problem
from lambdahat.results.charts import Chart, Series

STRETCHES = (1.0, 1e1, 1e2, 1e3)  # α of w₂ → αw₂, w₃ → w₃/α
DECAYS = (1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 5e-2, 0.1, 0.2, 0.3, 0.4)
SMALL = 0.2  # the trace 3s³μ rises with μ while s³ > 4/3, that is μ < 0.29
EXACT = 1e-9


@dataclass(frozen=True)
class DeepLinearToyScale:
    """Points drawn, and depths of the product."""

    seeds: int
    depths: tuple[int, ...] = (2, 3, 4, 5)


def cells(config: DeepLinearToyScale) -> list[Cell]:
    """Depth × seed; rescaled points are those of depth 3; and one cell of minimisers under
    weight decay.
    """
    drawn = [
        {"kind": "point", "depth": d, "seed": seed}
        for d in config.depths
        for seed in range(config.seeds)
    ]
    scaled = [{"kind": "rescaled", "depth": 3, "seed": seed} for seed in range(config.seeds)]
    return [*drawn, *scaled, {"kind": "minimiser", "depth": 3, "seed": 0}]


def run(cell: Cell, device: str) -> list[Row]:
    """At drawn weights, along a rescaling that leaves the loss alone, or at the minimisers under
    weight decay.
    """
    if cell["kind"] == "minimiser":
        return [_minimiser(decay) for decay in DECAYS]
    draws = torch.randn(
        cell["depth"] + 1,
        dtype=torch.float64,
        generator=generator(cell["seed"], "toy", cell["depth"]),
    )
    weights, x = draws[:-1], float(draws[-1])
    if cell["kind"] == "point":
        return [_described(weights, x)]
    rows = []
    for scale in STRETCHES:
        moved = weights * torch.tensor([1.0, scale, 1 / scale], dtype=torch.float64)
        rows.append({"scale": scale, **_described(moved, x)})
    return rows


def toy_problem(weights: Tensor, x: float) -> Problem:
    """exp(X·∏w_i) as a problem without data."""
    return Problem.from_function(lambda params: (x * params["w"].prod()).exp(), {"w": weights})


def printed_hessian(weights: Tensor, x: float) -> Tensor:
    """Eq. 2 with X² where it prints |X|: L·X²·∇h∇hᵀ, without ∂²h."""
    slopes = others(weights)
    return float(torch.exp(x * weights.prod())) * x**2 * torch.outer(slopes, slopes)


def others(weights: Tensor) -> Tensor:
    """∇h: the product of all weights but one, (d,)."""
    count = len(weights)
    return torch.stack([torch.cat([weights[:i], weights[i + 1 :]]).prod() for i in range(count)])


def _described(weights: Tensor, x: float) -> Row:
    problem = toy_problem(weights, x)
    curvature, gradient = hessian(problem).dense().double(), problem.gradient()
    values, printed = torch.linalg.eigvalsh(curvature), printed_hessian(weights, x)
    size = float(gradient.norm())
    return {
        "loss": problem.loss(),
        "gradient": size,
        "trace": float(values.sum()),
        "largest": float(values[-1]),
        "rank": rank_of(values),
        "printed rank": rank_of(torch.linalg.eigvalsh(printed)),
        "trace error": abs(float(printed.trace() / values.sum()) - 1),
        "gap": abs(float(values[-1] / values.sum()) - 1),
        "alignment": float(gradient[-1].abs()) / size,
    }


def rank_of(values: Tensor) -> int:
    """How many eigenvalues are not 0 to rounding."""
    return int((values.abs() > EXACT * values.abs().max()).sum())


def _minimiser(decay: float) -> Row:
    """The minimum of exp(w₁w₂w₃) + (μ/2)‖w‖² at |w_i| = s: s·exp(−s³) = μ, the larger root."""
    peak = 3 ** (-1 / 3)  # where s·exp(−s³) is largest
    size = brentq(lambda s: s * math.exp(-(s**3)) - decay, peak, 10.0, xtol=1e-14)
    weights = torch.tensor([-size, size, size], dtype=torch.float64)
    return {"decay": decay, "norm": math.sqrt(3) * size, **_described(weights, 1.0)}


def claims(rows: Rows) -> Iterator[Claim]:
    """Rank, trace and λ₁ of §2, what a rescaling does, and what weight decay does."""
    yield from _rank_claims(rows.where(kind="point"))
    yield from _rescaling_claims(rows.where(kind="rescaled"))
    yield from _decay_claims(rows.where(kind="minimiser"))


def _rank_claims(rows: Rows) -> Iterator[Claim]:
    three = rows.where(depth=3)
    longer = gap(rows.where(depth=max(rows.values("depth"))), three, "rank")
    sentence = "the Hessian of three weights has rank 1"
    yield Claim(sentence, "§2, Eq. 3", "1", over_seeds(three, "rank"), "within", 1.0, 0.5)
    sentence = "a longer product has no higher rank (their difference)"
    yield Claim(sentence, "§2", "0", longer, "within", 0.0, 0.5)
    sentence = "λ₁ is the trace (relative difference, at worst)"
    yield Claim(sentence, "§2, Eq. 3", "0", _worst(three, "gap"), "within", 0.0, 0.01)
    sentence = "the trace is X²·L·Σ(w_iw_j)² (relative difference, at worst)"
    printed = "none: it prints |X| for X²"
    reading = _worst(three, "trace error")
    yield Claim(sentence, "§2, Eq. 3 mended", printed, reading, "within", 0.0, EXACT, own=True)


def _worst(rows: Rows, name: str) -> Reading:
    """The largest of all draws: what is said of every point falls with one, and exact figures
    have no error.
    """
    return Reading(max(rows.values(name)), 0.0)


def _rescaling_claims(rows: Rows) -> Iterator[Claim]:
    start, end = rows.where(scale=STRETCHES[0]), rows.where(scale=STRETCHES[-1])
    how = "w₂ → 1000·w₂, w₃ → w₃/1000"
    sentence = f"{how} leaves the loss"
    reading = decades(end, start, "loss")
    yield Claim(sentence, "§2", "unchanged", reading, "within", 0.0, EXACT, " decades")
    sentence = f"{how} raises the gradient norm"
    yield Claim(sentence, "§2", "without bound", decades(end, start, "gradient"), unit=" decades")
    sentence = f"{how} raises the trace"
    yield Claim(sentence, "§2", "without bound", decades(end, start, "trace"), unit=" decades")
    sentence = f"{how} turns the gradient towards w₃ (|cosine|)"
    printed = "completely aligned"
    yield Claim(sentence, "§2", printed, over_seeds(end, "alignment"), "within", 1.0, 0.01)


def _decay_claims(rows: Rows) -> Iterator[Claim]:
    """The smallest rise from one weight decay to the next: exact, so it has no error."""
    for column, words in (("trace", "the trace"), ("largest", "λ₁")):
        values = [row[column] for row in rows if row["decay"] <= SMALL]
        least = Reading(min(b - a for a, b in pairwise(values)), 0.0)
        sentence = f"{words} at the minimum rises with weight decay up to {SMALL:g} (smallest rise)"
        yield Claim(sentence, "§2", "it rises", least)


def tables(rows: Rows) -> Iterator[Table]:
    """Ranks by depth, and the minimisers."""
    points, lines = rows.where(kind="point"), []
    for depth in points.distinct("depth"):
        part = points.where(depth=depth)
        lines.append(
            (str(depth), *(str(over_seeds(part, name)) for name in ("rank", "printed rank", "gap")))
        )
    header = ("weights", "rank of the Hessian", "rank of Eq. 2", "|λ₁/tr − 1|")
    ranks = Table("Rank of the Hessian of exp(X·∏w_i)", header, tuple(lines))
    columns = ("decay", "norm", "loss", "trace", "largest", "rank")
    found = tuple(
        tuple(f"{row[name]:.4g}" for name in columns) for row in rows.where(kind="minimiser")
    )
    yield ranks
    yield Table(
        "Minima of exp(w₁w₂w₃) + (μ/2)‖w‖²", ("μ", "‖w‖", "loss", "trace", "λ₁", "rank"), found
    )


def charts(rows: Rows) -> Iterator[Chart]:
    """Curvature at the minimum over weight decay, and what a rescaling does."""
    minima, scaled = rows.where(kind="minimiser"), rows.where(kind="rescaled", seed=0)
    names = (("trace", "trace"), ("largest", "λ₁"))
    rising = tuple(
        Series(words, minima.values("decay"), minima.values(name)) for name, words in names
    )
    moved = (*names, ("gradient", "gradient norm"), ("loss", "loss"))
    stretched = tuple(
        Series(words, scaled.values("scale"), scaled.values(name)) for name, words in moved
    )
    caption = "The printed argument is one for small loss: beyond μ = 0.29 the trace falls again."
    title = "Curvature at the minimum"
    label = "eigenvalue"
    yield Chart(
        title, "weight decay μ", label, rising, x_log=True, y_log=True, source="§2", caption=caption
    )
    title = "One function, many sharpnesses"
    yield Chart(
        title, "α in w₂ → αw₂, w₃ → w₃/α", "value", stretched, x_log=True, y_log=True, source="§2"
    )


EXPERIMENT = Experiment(
    "deep-linear-toy",
    "A product of weights under the exponential loss: rank, rescaling, weight decay",
    FLATNESS,
    "§2",
    {
        "smoke": DeepLinearToyScale(5),
        "cpu": DeepLinearToyScale(50),
        "paper": DeepLinearToyScale(200),
    },
    cells,
    run,
    claims,
    tables,
    charts,
    sentences("""
        L is read as exp(X·w₁w₂w₃): the gradient that the paper prints has the factor X.
        Its Hessian is printed with |X| for X² and without ∂²h; the trace does not miss ∂²h, rank
          and λ₁ do.
    """),
    size="no runs: a product of three weights on paper.",
)
