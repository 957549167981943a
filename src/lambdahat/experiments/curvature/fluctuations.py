"""When is the spectrum of curvature noise a semicircle? Theorem 13, over the matrix's size."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lambdahat._core.rng import derived_seed
from lambdahat.experiments.kit.cells import Cell, Row, Rows, curve, over_seeds
from lambdahat.experiments.kit.claims import Claim, Claims, Reading, Table, mean_of, slope
from lambdahat.experiments.kit.experiment import SPECTRAL, Experiment, sentences
from lambdahat.randommatrix import Semicircle
from lambdahat.results import Array
from lambdahat.results.charts import Chart, Series, short

NORMAL, BOUNDED, UNEVEN = "independent, normal", "independent, bounded", "independent, uneven rows"
WIDE, NARROW = "samples, P/b = 1", "samples, P/b = 1/50"
MET, UNMET = (NORMAL, BOUNDED), (UNEVEN, WIDE)
NEAR, APART, EDGE = 0.01, 0.02, 0.05


@dataclass(frozen=True)
class NoiseScale:
    """Matrices P × P of these ``sizes``."""

    seeds: int
    sizes: tuple[int, ...] = (50, 100, 200, 400)


def cells(config: NoiseScale) -> list[Cell]:
    """Kind of noise × size × seed."""
    return [
        {"noise": kind, "size": size, "seed": seed}
        for kind in (*MET, *UNMET, NARROW)
        for size in config.sizes
        for seed in range(config.seeds)
    ]


def run(cell: Cell, device: str) -> list[Row]:
    """Eigenvalues over σ_ε: the Kolmogorov distance from the semicircle, and the largest."""
    rng = np.random.default_rng(
        derived_seed(cell["seed"], "fluctuations", cell["noise"], cell["size"])
    )
    noise = _noise(cell["noise"], cell["size"], rng)
    values = np.sort(np.linalg.eigvalsh(noise)) / math.sqrt(np.square(noise).sum() / len(noise))
    told, ranks = Semicircle(1.0).cdf(values), np.arange(len(values) + 1) / len(values)
    distance = float(np.maximum(np.abs(told - ranks[:-1]), np.abs(told - ranks[1:])).max())
    first = {"values": short(values)} if cell["seed"] == 0 and cell["size"] >= 100 else {}
    return [{"distance": distance, "largest": float(values[-1]), **first}]


def _noise(kind: str, size: int, rng: np.random.Generator) -> Array:
    """A symmetric noise matrix; "samples" are those of linear regression, with Hessians xxᵀ."""
    if kind in (WIDE, NARROW):
        batch = size if kind == WIDE else 50 * size
        inputs = rng.standard_normal((batch, size))
        return np.asarray(inputs.T @ inputs / batch - np.eye(size))
    draw = (
        rng.uniform(-1, 1, (size, size)) if kind == BOUNDED else rng.standard_normal((size, size))
    )
    half = np.triu(draw) + np.triu(draw, 1).T
    # breaks condition (ii)
    rows = np.where(np.arange(size) % 2 == 0, 0.1, 1.9) if kind == UNEVEN else np.ones(size)
    return np.asarray(half * np.sqrt(np.outer(rows, rows)))


def claims(rows: Rows) -> list[Claim]:
    """The distance vanishes where the conditions are met; n counts matrices, or seeds."""
    largest = max(rows.values("size"))
    found = Claims()
    for kind in MET:
        part = rows.where(noise=kind)
        end = part.where(size=largest)
        sentence = f"{kind}: the distance from the semicircle falls with P (exponent)"
        found.add(sentence, "Theorem 13", "to 0", _exponent(part), "below")
        sentence = f"{kind}: at P = {largest} it is below {NEAR:g}"
        found.add(sentence, "Theorem 13", "0", over_seeds(end, "distance"), "below", NEAR)
        sentence = f"{kind}: the spectrum ends at 2σ_ε, within {EDGE:.0%} at P = {largest}"
        found.add(sentence, "Theorem 13", "2", over_seeds(end, "largest"), "within", 2.0, 2 * EDGE)
    for kind, why in (
        (UNEVEN, "condition (ii) is broken"),
        (WIDE, "elements depend on each other"),
    ):
        sentence = f"{kind}: {why}, and at P = {largest} the distance is above {APART:g}"
        reading = over_seeds(rows.where(noise=kind, size=largest), "distance")
        found.add(sentence, "here", "not covered by Theorem 13", reading, "above", APART, own=True)
    near = mean_of([math.log10(row["distance"]) for row in rows.where(noise=NARROW, size=largest)])
    wide = mean_of([math.log10(row["distance"]) for row in rows.where(noise=WIDE, size=largest)])
    gap = Reading(
        near.value - wide.value,
        math.hypot(near.stderr, wide.stderr),
        near.dof + wide.dof,
        near.count,
    )
    sentence = "samples: many more of them than P bring the semicircle nearer"
    published = "not covered by Theorem 13"
    found.add(sentence, "here", published, gap, "below", unit=" decades", own=True)
    return found


def _exponent(rows: Rows) -> Reading:
    """The slope of log₁₀ of the distance over log₁₀ of P, seed by seed."""
    parts = [rows.where(seed=seed) for seed in rows.distinct("seed")]
    return mean_of([_slope(part) for part in parts])


def _slope(rows: Rows) -> float:
    sizes, distances = (np.log10(rows.values(name)).tolist() for name in ("size", "distance"))
    return slope(sizes, distances).value if len(sizes) > 2 else math.nan


def tables(rows: Rows) -> list[Table]:
    """Distances by kind and size."""
    sizes = rows.distinct("size")
    lines = tuple(
        (kind, *(str(over_seeds(rows.where(noise=kind, size=size), "distance")) for size in sizes))
        for kind in rows.distinct("noise")
    )
    title = "Greatest distance from the semicircle's distribution"
    return [Table(title, ("noise", *(f"P = {n}" for n in sizes)), lines)]


def charts(rows: Rows) -> list[Chart]:
    """Distance over P, and the spectra of the first matrices beside the semicircle."""
    series = tuple(
        curve(kind, rows.where(noise=kind), "distance", "size") for kind in rows.distinct("noise")
    )
    title = "Distance from the semicircle"
    out = [Chart(title, "P", "distance", series, x_log=True, y_log=True, source="Theorem 13")]
    drawn = [row for row in rows if row.get("values")]
    place = np.linspace(-2, 2, 81)
    law = Series("semicircle", short(place), short(Semicircle(1.0).cdf(place)), published=True)
    for row in drawn:
        if row["size"] == max(other["size"] for other in drawn):
            shares = (np.arange(len(row["values"])) + 1) / len(row["values"])
            ours = Series("eigenvalues", row["values"], short(shares), style="step")
            title = f"Distribution, {row['noise']}"
            out.append(Chart(title, "eigenvalue over σ_ε", "share below", (ours, law)))
    return out


EXPERIMENT = Experiment(
    "fluctuation-spectrum",
    "The spectrum of curvature noise and the semicircle",
    SPECTRAL,
    "§5.2, Theorem 13",
    {
        "smoke": NoiseScale(2, (30, 60, 120)),
        "cpu": NoiseScale(10),
        "paper": NoiseScale(20, (50, 100, 200, 400, 800)),
    },
    *(cells, run, claims, tables, charts),
    sentences(f"""
        σ_ε² is that of the matrix itself, tr(ε²)/P.
        Independent elements meet the conditions; rows of variance 0.1 and 1.9 by turns break
          condition (ii).
        Of linear regression a sample's Hessian is xxᵀ, whose elements depend on each other.
        The noise of b such samples is a shifted Marchenko–Pastur law, near a semicircle for P ≪ b
          alone.
        Near is a distance of {NEAR:g}, apart one of {APART:g}: set before any run.
    """),
    size="no experiment: a theorem, of any noise that meets its conditions.",
)
