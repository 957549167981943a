"""Log-determinants of squared-exponential kernels over nine condition numbers (Table 2.1)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.polynomial.chebyshev import chebvander
from torch import Tensor

from lambdahat._core.rng import generator
from lambdahat.estimators import logdet, moments
from lambdahat.experiments.kit.cells import Cell, Row, Rows, curve, decades, over_seeds
from lambdahat.experiments.kit.claims import Claim, Claims, Reading, Table, TableLines, split_header
from lambdahat.experiments.kit.experiment import SPECTRAL, Experiment, sentences
from lambdahat.maxent import fit
from lambdahat.operators.base import LinearOperator
from lambdahat.operators.kernel_matrix import kernel_matrix
from lambdahat.results import Array, Moments
from lambdahat.results.charts import Chart, Series

NOISE, DIMENSIONS, SCALE = 1e-8, 6, 0.2  # SCALE: deviation of the inputs
CLOSE = 0.02  # of log κ
POINTS, JITTER = 10_000, 1e-8  # of the thesis's code
MEME, GRIDDED = "MEMe", "MEMe on 10⁴ points"
CHEBYSHEV, LANCZOS = "Chebyshev", "Lanczos"
OURS = {method: f"{method}, preconditioned" for method in ("maxent", "chebyshev", "slq")}
METHODS = (MEME, GRIDDED, CHEBYSHEV, LANCZOS, *OURS.values())
TABLE = "Table 2.1"
LEAST = 0.5  # of the printed decades between two methods, which ours are to reach


@dataclass(frozen=True)
class Printed:
    """A row of Table 2.1: condition number, length scale, and the errors of three methods."""

    condition: float
    length: float
    errors: dict[str, float]


PRINTED = tuple(
    Printed(condition, length, {MEME: meme, CHEBYSHEV: chebyshev, LANCZOS: lanczos})
    for condition, length, meme, chebyshev, lanczos in (
        (3.0e1, 0.05, 0.0014, 0.0037, 0.0024),
        (1.1e3, 0.15, 0.0522, 0.0104, 0.0024),
        (1.0e5, 0.25, 0.0387, 0.0795, 0.0072),
        (2.4e6, 0.35, 0.0263, 0.2302, 0.0196),
        (8.3e7, 0.45, 0.0284, 0.3439, 0.0502),
        (4.2e8, 0.55, 0.0256, 0.4089, 0.0646),
        (4.3e9, 0.65, 0.00048, 0.5049, 0.0838),
        (1.4e10, 0.75, 0.0086, 0.5049, 0.1050),
        (4.2e10, 0.85, 0.0177, 0.5358, 0.1199),
    )
)
CONDITIONS = tuple(row.condition for row in PRINTED)


@dataclass(frozen=True)
class KernelScale:
    """How many points and draws of them; ``rank`` is that of the preconditioner."""

    size: int
    draws: int
    conditions: tuple[float, ...] = CONDITIONS
    rank: int = 500
    moments: int = 30
    probes: int = 50


def cells(config: KernelScale) -> list[Cell]:
    """Condition number × draw."""
    base = {
        "size": config.size,
        "rank": config.rank,
        "moments": config.moments,
        "probes": config.probes,
    }
    return [
        {**base, "condition": one, "seed": seed}
        for one in config.conditions
        for seed in range(config.draws)
    ]


def run(cell: Cell, device: str) -> list[Row]:
    """A row for each method: its relative error (Eq. 2.39), and the products it took."""
    rng = generator(cell["seed"], "inputs")
    points = SCALE * torch.randn(cell["size"], DIMENSIONS, generator=rng, dtype=torch.float64)
    kernel, values, length = match_kernel(points, cell["condition"])
    exact = float(values.log().sum())
    common = {"length": length, "reached": float(values[-1] / values[0]), "exact": exact}
    rows = []
    for method in METHODS:
        found, cost, held = _estimate(kernel, method, cell, exact)
        rows.append(
            {
                "method": method,
                "error": abs(found - exact) / abs(exact),
                "products": cost,
                "held": held,
            }
        )
    return [{**common, **row} for row in rows]


def match_kernel(points: Tensor, condition: float) -> tuple[LinearOperator, Tensor, float]:
    """The kernel matrix of the nearest condition number, its eigenvalues, its length scale."""
    low, high = 0.02, 2.0
    for _ in range(14):
        length = math.sqrt(low * high)
        kernel = kernel_matrix(points, length_scale=length, noise=NOISE)
        values = torch.linalg.eigvalsh(kernel.dense())
        reached = float(values[-1] / values[0])
        if reached > 0 and abs(math.log(reached / condition)) < CLOSE:
            break
        low, high = (length, high) if 0 < reached < condition else (low, length)
    return kernel, values, length


def _estimate(
    kernel: LinearOperator, method: str, cell: Cell, exact: float
) -> tuple[float, int, bool | None]:
    """log det, the products, and whether its 95 % interval held the truth, where it has one."""
    if method in (MEME, GRIDDED):
        top = float(kernel.dense().abs().sum(dim=1).max())  # λ_u of Algorithm 3
        found = moments(
            kernel,
            cell["moments"],
            "chebyshev",
            cell["probes"],
            cell["seed"],
            (0.0, top),
            "rademacher",
        )
        density: Callable[[Moments], float] = _exactly if method == MEME else _grid_mean_log
        return kernel.dim * density(found), found.cost, None
    estimate = logdet(kernel, seed=cell["seed"], **_options(method, cell))
    low, high = estimate.interval()
    return float(estimate), estimate.cost, bool(low <= exact <= high)


def _options(method: str, cell: Cell) -> dict[str, Any]:
    """What ``logdet`` is called with: at most 1,500 products for 30 moments and 50 probes."""
    count, probes = cell["moments"], cell["probes"]
    plain = {"precondition": "none", "probes": probes}
    ours = {"probes": probes, "rank": cell["rank"], "depth": count // 2}
    return {
        CHEBYSHEV: plain | {"method": "chebyshev", "depth": count // 2},
        LANCZOS: plain | {"method": "slq", "depth": count},
        OURS["maxent"]: ours | {"method": "maxent"},
        OURS["chebyshev"]: ours | {"method": "chebyshev"},
        OURS["slq"]: ours | {"method": "slq", "depth": count + count // 3, "probes": probes // 2},
    }[method]


def _exactly(found: Moments) -> float:
    return float(fit(found).expectation(np.log))


def _grid_mean_log(found: Moments) -> float:
    """⟨log λ⟩ under the discrete density of maximum entropy at the middles of 10⁴ equal cells of
    [0, λ_u].

    The thesis integrates on a grid of 10⁻⁴ and adds 10⁻⁸ to the Hessian's diagonal (§2.4).
    """
    places = (np.arange(POINTS) + 0.5) / POINTS
    masses = grid_masses(found.values, places)
    return float(masses @ np.log(found.bounds[1] * places)) / float(masses.sum())


def grid_masses(values: Array, places: Array) -> Array:
    """Masses (n,) ∝ exp(−Σα_kT_k) at ``places`` in [0, 1] with the Chebyshev moments ``values`` (m
    + 1,).

    Newton's method with backtracking on the dual log Σexp(−Σα_kT_k) + Σα_kμ_k, k ≥ 1.
    """
    table: Array = chebvander(2 * places - 1, len(values) - 1)[:, 1:].astype(np.float64)
    wanted, alpha = values[1:], np.zeros(len(values) - 1)
    value, masses = _dual(alpha, table, wanted)
    for _ in range(200):
        means = masses @ table
        if np.abs(means - wanted).max() < 1e-7:
            break
        hessian = (table.T * masses) @ table - np.outer(means, means) + JITTER * np.eye(len(alpha))
        step, length = np.linalg.solve(hessian, means - wanted), 1.0
        slope = float((means - wanted) @ step)
        while length > 1e-10:
            after, moved = _dual(alpha + length * step, table, wanted)
            if after <= value - 1e-4 * length * slope:
                break
            length /= 2
        else:
            break
        alpha, value, masses = alpha + length * step, after, moved
    return masses


def _dual(alpha: Array, table: Array, wanted: Array) -> tuple[float, Array]:
    exponent = -(table @ alpha)
    most = float(exponent.max())
    weights = np.exp(exponent - most)
    total = float(weights.sum())
    return most + math.log(total) + float(alpha @ wanted), weights / total


def claims(rows: Rows) -> list[Claim]:
    """Which method errs least at low and at high condition numbers, and the printed errors."""
    found = Claims()
    for printed in PRINTED:
        part = rows.where(condition=printed.condition)
        if not len(part):
            continue
        found += [_ordering(part, printed, other) for other in (CHEBYSHEV, LANCZOS)]
    last = rows.where(condition=max(rows.values("condition")))
    sentence = "MEMe errs less than a tenth of Chebyshev at the largest κ"
    reading = decades(last.where(method=CHEBYSHEV), last.where(method=MEME), "error")
    found.add(sentence, "§2.6.1", "orders of magnitude", reading, bound=1.0, unit=" decades")
    worst = max(rows.where(method=OURS["maxent"]).values("error"))
    sentence = (
        "maximum entropy with a preconditioner errs by less than 2 % everywhere (largest error)"
    )
    published = "MEMe alone: 5.2 %"
    found.add(sentence, "this work", published, Reading(worst, 0.0), "below", 0.02, own=True)
    return found


def _ordering(rows: Rows, printed: Printed, other: str) -> Claim:
    """Whether MEMe or another method errs less, by at least half of the printed decades."""
    mine, theirs = printed.errors[MEME], printed.errors[other]
    told = math.log10(theirs / mine)
    reading = decades(rows.where(method=other), rows.where(method=MEME), "error")
    better, least = told > 0, LEAST * told
    sentence = (
        f"MEMe errs {'less' if better else 'more'} than {other} at κ = {printed.condition:.1e}"
    )
    text = f"{sentence}, by {abs(least):.2f} decades or more"
    published = f"{mine:g} against {theirs:g}"
    unit = " decades (above 0: MEMe errs less)"
    return Claim(text, TABLE, published, reading, "above" if better else "below", least, unit=unit)


def tables(rows: Rows) -> list[Table]:
    """Table 2.1 with the printed errors behind ours, and what our own settings add."""
    kept = [printed for printed in PRINTED if len(rows.where(condition=printed.condition))]
    header = (
        *split_header(f"κ | length scale [thesis] | {MEME} [thesis]"),
        GRIDDED,
        *split_header(f"{CHEBYSHEV} [thesis] | {LANCZOS} [thesis]"),
    )
    lines, mine = TableLines(), []
    for printed in kept:
        part = rows.where(condition=printed.condition)
        cells = {method: over_seeds(part.where(method=method), "error") for method in METHODS}
        shown = {
            name: f"{_spread(cells[name])} [{error:g}]" for name, error in printed.errors.items()
        }
        length = f"{over_seeds(part, 'length').value:.3f} [{printed.length:g}]"
        lines.add(
            f"{printed.condition:.1e}",
            length,
            shown[MEME],
            _spread(cells[GRIDDED]),
            shown[CHEBYSHEV],
            shown[LANCZOS],
        )
        worst = max(part.where(method=OURS["maxent"]).values("error"))
        mine.append(
            (
                f"{printed.condition:.1e}",
                *(_spread(cells[name]) for name in OURS.values()),
                f"{worst:.4f}",
            )
        )
    costs = {name: max(rows.where(method=name).values("products")) for name in METHODS}
    held = {name: rows.where(method=name).values("held") for name in METHODS[2:]}
    coverage = tuple(
        (name, f"{costs[name]:,}", f"{np.mean(held[name]):.0%}" if name in held else "no interval")
        for name in METHODS
    )
    size = rows[0]["size"]
    out = []
    title = f"Relative error of log det, kernel matrices of {size:,} points"
    out.append(Table(title, header, tuple(lines)))
    title = "The same with a preconditioner"
    out.append(Table(title, ("κ", *OURS.values(), f"{OURS['maxent']}, largest"), tuple(mine)))
    title = "Products, and 95 % intervals that held the truth"
    out.append(Table(title, ("method", "products", "held"), coverage))
    return out


def _spread(reading: Reading) -> str:
    tail = f" ± {reading.stderr:.4f}" if math.isfinite(reading.stderr) else ""
    return f"{reading.value:.4f}{tail}"


def charts(rows: Rows) -> list[Chart]:
    """Errors over κ: those of the table, and ours."""
    kept = [printed for printed in PRINTED if len(rows.where(condition=printed.condition))]
    series = []
    for method in METHODS:
        if method in (CHEBYSHEV, LANCZOS, MEME):
            series.append(curve(method, rows.where(method=method), "error", "condition"))
            theirs = [printed.errors[method] for printed in kept]
            label = f"{method}, thesis"
            places = [p.condition for p in kept]
            series.append(Series(label, places, theirs, style="points", published=True))
    mine = tuple(curve(name, rows.where(method=name), "error", "condition") for name in METHODS[3:])
    words = ("condition number", "relative error of log det")
    return [
        Chart(
            "Log-determinants of kernel matrices",
            *words,
            tuple(series),
            x_log=True,
            y_log=True,
            source=TABLE,
        ),
        Chart(
            "With a preconditioner",
            *words,
            mine,
            x_log=True,
            y_log=True,
            source="not in the thesis",
            caption="At most 1,500 products each.",
        ),
    ]


EXPERIMENT = Experiment(
    "logdet-kernels",
    "Log-determinants of kernel matrices by maximum entropy, Chebyshev and Lanczos",
    SPECTRAL,
    "§2.6.1, Table 2.1",
    {
        "smoke": KernelScale(100, 2, CONDITIONS[::8], rank=50, moments=16, probes=12),
        "cpu": KernelScale(1000, 6),
        "paper": KernelScale(1000, 20),
    },
    *(cells, run, claims, tables, charts),
    sentences(f"""
        The scale of the inputs is not given: they are N(0, 0.2²), and the length scale is chosen
          for the row's κ.
        MEMe is Algorithm 3: moments on [0, λ_u], λ_u the largest absolute row sum, 50 probes of ±1,
          matched to 1e-8.
        On 10⁴ points the same is solved on a grid, as the thesis did.
        One method errs less than another if by {LEAST:g} of the printed decades or more: set after
          the results.
        Chebyshev has degree 30 and Lanczos 30 steps, each with 50 probes and without a
          preconditioner.
    """),
    size=(
        "squared-exponential kernels of 1,000 Gaussian inputs in six dimensions, 30 moments; draws"
        " and the scale of the inputs are not in the text."
    ),
)
