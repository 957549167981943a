"""The deep linear network with exponential loss, exactly in float64 (§2 of the flatness paper).

L(w) = exp(X·w₁w₂⋯w_d) has gradient X·L·∇h and Hessian L·(X²·∇h∇hᵀ + X·∂²h), h = ∏w_i. The paper
prints the first term alone (Eq. 2), which has rank 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from scipy.optimize import brentq
from torch import Tensor

from lambdahat._core.rng import generator
from lambdahat.experiments import kit
from lambdahat.experiments.kit import Cell, Chart, Claim, Reading, Row, Rows, Series, Table
from lambdahat.operators.curvature import hessian
from lambdahat.problem import Problem

STRETCHES = (1.0, 1e1, 1e2, 1e3)  # α of w₂ → αw₂, w₃ → w₃/α
DECAYS = (1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 5e-2, 0.1, 0.2, 0.3, 0.4)
SMALL = 0.2  # the trace 3s³μ rises with μ while s³ > 4/3, that is μ < 0.29
EXACT = 1e-9


def cells(seeds: int) -> list[Cell]:
    """Depth × seed; rescalings of the points of depth 3; the minimisers under weight decay."""
    points = kit.grid({"kind": "point"}, depth=(2, 3, 4, 5), seed=range(seeds))
    rescaled = kit.grid({"kind": "rescaled"}, depth=[3], seed=range(seeds))
    return [*points, *rescaled, {"kind": "minimiser", "depth": 3, "seed": 0}]


def run(cell: Cell, device: str) -> list[Row]:
    """Curvature at random weights, along a rescaling that keeps the loss, or at the minimisers."""
    if cell["kind"] == "minimiser":
        return [_minimiser(decay) for decay in DECAYS]
    depth = cell["depth"]
    rng = generator(cell["seed"], "toy", depth)
    draws = torch.randn(depth + 1, dtype=torch.float64, generator=rng)
    weights, x = draws[:-1], float(draws[-1])
    if cell["kind"] == "point":
        return [_describe(weights, x)]
    rows = []
    for scale in STRETCHES:
        factors = torch.tensor([1.0, scale, 1 / scale], dtype=torch.float64)
        rows.append({"scale": scale, **_describe(weights * factors, x)})
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


def _describe(weights: Tensor, x: float) -> Row:
    problem = toy_problem(weights, x)
    curvature, gradient = hessian(problem).dense().double(), problem.gradient()
    values, printed = torch.linalg.eigvalsh(curvature), printed_hessian(weights, x)
    size = float(gradient.norm())
    return {
        "loss": problem.loss(),
        "gradient": size,
        "trace": float(values.sum()),
        "largest": float(values[-1]),
        "rank": _rank(values),
        "printed rank": _rank(torch.linalg.eigvalsh(printed)),
        "trace error": abs(float(printed.trace() / values.sum()) - 1),
        "gap": abs(float(values[-1] / values.sum()) - 1),
        "alignment": float(gradient[-1].abs()) / size,
    }


def _rank(values: Tensor) -> int:
    """The number of eigenvalues that are not 0 up to rounding."""
    return int((values.abs() > EXACT * values.abs().max()).sum())


def _minimiser(decay: float) -> Row:
    """The minimum of exp(w₁w₂w₃) + (μ/2)‖w‖² at |w_i| = s: s·exp(−s³) = μ, the larger root."""
    peak = 3 ** (-1 / 3)  # where s·exp(−s³) is largest
    size = brentq(lambda s: s * math.exp(-(s**3)) - decay, peak, 10.0, xtol=1e-14)
    weights = torch.tensor([-size, size, size], dtype=torch.float64)
    return {"decay": decay, "norm": math.sqrt(3) * size, **_describe(weights, 1.0)}


def claims(rows: Rows) -> Iterator[Claim]:
    """Rank, trace and λ₁ of §2, what a rescaling does, and what weight decay does."""
    points, rescaled = rows.where(kind="point"), rows.where(kind="rescaled")
    three, longest = points.where(depth=3), points.where(depth=max(points.values("depth")))
    start, end = rescaled.where(scale=STRETCHES[0]), rescaled.where(scale=STRETCHES[-1])
    how, rises = "w₂ → 1000·w₂, w₃ → w₃/1000", f"rises with weight decay up to {SMALL:g}"
    claim = kit.ClaimTexts(f"""
        rank: the Hessian of three weights has rank 1 | §2, Eq. 3 | 1 | within 0.5 of 1
        longer: a longer product has no higher rank (their difference) | §2 | 0 | within 0.5 of 0
        gap: λ₁ is the trace (relative difference, at worst) | §2, Eq. 3 | 0 | within 0.01 of 0
        trace error: the trace is X²·L·Σ(w_iw_j)² (relative difference, at worst)
          | §2, Eq. 3 mended | none: it prints |X| for X² | within {EXACT:g} of 0 | | ours
        loss: {how} leaves the loss | §2 | unchanged | within {EXACT:g} of 0 | decades
        gradient: {how} raises the gradient norm | §2 | without bound | above | decades
        trace: {how} raises the trace | §2 | without bound | above | decades
        turn: {how} turns the gradient towards w₃ (|cosine|)
          | §2 | completely aligned | within 0.01 of 1
        decayed trace: the trace at the minimum {rises} (smallest rise) | §2 | it rises
        decayed largest: λ₁ at the minimum {rises} (smallest rise) | §2 | it rises
    """)
    yield claim("rank", kit.over_seeds(three, "rank"))
    yield claim("longer", kit.gap(longest, three, "rank"))
    # what is said of every point falls with one, and exact figures have no error
    for name in ("gap", "trace error"):
        yield claim(name, Reading(max(three.values(name)), 0.0))
    for name in ("loss", "gradient", "trace"):
        yield claim(name, kit.decades(end, start, name))
    yield claim("turn", kit.over_seeds(end, "alignment"))
    for name in ("trace", "largest"):
        values = [row[name] for row in rows.where(kind="minimiser") if row["decay"] <= SMALL]
        least = min(after - before for before, after in pairwise(values))
        yield claim(f"decayed {name}", Reading(least, 0.0))


def tables(rows: Rows) -> Iterator[Table]:
    """Ranks by depth, and the minimisers."""
    title, depths = "Rank of the Hessian of exp(X·∏w_i)", rows.where(kind="point").by("depth")
    shown = {"rank": "rank of the Hessian", "printed rank": "rank of Eq. 2", "gap": "|λ₁/tr − 1|"}
    yield kit.means_table(title, "weights", depths, shown)
    columns = ("decay", "norm", "loss", "trace", "largest", "rank")
    lines = [[f"{row[name]:.4g}" for name in columns] for row in rows.where(kind="minimiser")]
    title, symbols = "Minima of exp(w₁w₂w₃) + (μ/2)‖w‖²", "μ | ‖w‖ | loss | trace | λ₁ | rank"
    yield kit.table(title, symbols, lines)


def charts(rows: Rows) -> Iterator[Chart]:
    """Curvature at the minimum over weight decay, and what a rescaling does."""
    minima, rescaled = rows.where(kind="minimiser"), rows.where(kind="rescaled", seed=0)
    names = {"trace": "trace", "largest": "λ₁", "gradient": "gradient norm", "loss": "loss"}

    def series(part: Rows, x: str, *shown: str) -> tuple[Series, ...]:
        return tuple(Series(names[name], part.values(x), part.values(name)) for name in shown)

    caption = "The printed argument is one for small loss: beyond μ = 0.29 the trace falls again."
    title, axes = "Curvature at the minimum", ("weight decay μ", "eigenvalue")
    curves = series(minima, "decay", "trace", "largest")
    yield Chart(title, *axes, curves, x_log=True, y_log=True, source="§2", caption=caption)
    title, axes = "One function, many sharpnesses", ("α in w₂ → αw₂, w₃ → w₃/α", "value")
    curves = series(rescaled, "scale", *names)
    yield Chart(title, *axes, curves, x_log=True, y_log=True, source="§2")


EXPERIMENT = kit.Experiment(
    "deep-linear-toy",
    "A product of weights under the exponential loss: rank, rescaling, weight decay",
    kit.FLATNESS,
    "§2",
    {"smoke": cells(5), "cpu": cells(50), "paper": cells(200)},
    *(run, claims, tables, charts),
    kit.sentences("""
        L is read as exp(X·w₁w₂w₃), because the gradient that the paper prints has the factor X.
        The Hessian is printed with |X| in place of X² and without ∂²h; this changes the rank and
          λ₁, but not the trace.
    """),
    "no runs: a product of three weights on paper.",
)
