"""When is the spectrum of curvature noise a semicircle? Theorem 13, over the matrix's size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

from lambdahat._core.rng import derived_seed
from lambdahat.experiments import kit
from lambdahat.experiments.kit import Cell, Chart, Claim, Reading, Row, Rows, Series, Table, short
from lambdahat.randommatrix import Semicircle
from lambdahat.results import Array

NORMAL, BOUNDED, UNEVEN = "independent, normal", "independent, bounded", "independent, uneven rows"
WIDE, NARROW = "samples, P/b = 1", "samples, P/b = 1/50"
MET, UNMET = (NORMAL, BOUNDED), (UNEVEN, WIDE)
NEAR, APART, EDGE = 0.01, 0.02, 0.05


def cells(seeds: int, sizes: Iterable[int] = (50, 100, 200, 400)) -> list[Cell]:
    """Kind of noise × size × seed: matrices P × P of these ``sizes``."""
    return kit.grid({}, noise=(*MET, *UNMET, NARROW), size=sizes, seed=range(seeds))


def run(cell: Cell, device: str) -> list[Row]:
    """Eigenvalues over σ_ε: the Kolmogorov distance from the semicircle, and the largest."""
    seed = derived_seed(cell["seed"], "fluctuations", cell["noise"], cell["size"])
    noise = _noise(cell["noise"], cell["size"], np.random.default_rng(seed))
    values = np.sort(np.linalg.eigvalsh(noise)) / math.sqrt(np.square(noise).sum() / len(noise))
    law, ranks = Semicircle(1.0).cdf(values), np.arange(len(values) + 1) / len(values)
    distance = float(np.maximum(np.abs(law - ranks[:-1]), np.abs(law - ranks[1:])).max())
    first = {"values": short(values)} if cell["seed"] == 0 and cell["size"] >= 100 else {}
    return [{"distance": distance, "largest": float(values[-1]), **first}]


def _noise(kind: str, size: int, rng: np.random.Generator) -> Array:
    """A symmetric noise matrix; "samples" are those of linear regression, with Hessians xxᵀ."""
    if kind in (WIDE, NARROW):
        batch = size if kind == WIDE else 50 * size
        inputs = rng.standard_normal((batch, size))
        return np.asarray(inputs.T @ inputs / batch - np.eye(size))
    shape = size, size
    draw = rng.uniform(-1, 1, shape) if kind == BOUNDED else rng.standard_normal(shape)
    half = np.triu(draw) + np.triu(draw, 1).T
    # breaks condition (ii)
    rows = np.where(np.arange(size) % 2 == 0, 0.1, 1.9) if kind == UNEVEN else np.ones(size)
    return np.asarray(half * np.sqrt(np.outer(rows, rows)))


def claims(rows: Rows) -> Iterator[Claim]:
    """The distance vanishes where the conditions are met; n counts matrices, or seeds."""
    largest = max(rows.values("size"))
    claim = kit.ClaimTexts(f"""
        falls: {{kind}}: the distance from the semicircle falls with P (exponent)
          | Theorem 13 | to 0 | below
        near: {{kind}}: at P = {largest} it is below {NEAR:g} | Theorem 13 | 0 | below {NEAR:g}
        end: {{kind}}: the spectrum ends at 2σ_ε, within {EDGE:.0%} at P = {largest}
          | Theorem 13 | 2 | within {2 * EDGE:g} of 2
        apart: {{kind}}: {{reason}}, and at P = {largest} the distance is above {APART:g}
          | here | not covered by Theorem 13 | above {APART:g} | | ours
        samples: samples: many more of them than P bring the semicircle nearer
          | here | not covered by Theorem 13 | below | decades | ours
    """)
    for kind in MET:
        part, end = rows.where(noise=kind), rows.where(noise=kind, size=largest)
        yield claim("falls", kit.exponent(part, "distance", "size"), kind=kind)
        yield claim("near", kit.over_seeds(end, "distance"), kind=kind)
        yield claim("end", kit.over_seeds(end, "largest"), kind=kind)
    why = {UNEVEN: "condition (ii) is broken", WIDE: "elements depend on each other"}
    for kind, reason in why.items():
        reading = kit.over_seeds(rows.where(noise=kind, size=largest), "distance")
        yield claim("apart", reading, kind=kind, reason=reason)
    near, wide = (
        kit.mean_of(list(kit.logs(rows.where(noise=kind, size=largest), "distance").values()))
        for kind in (NARROW, WIDE)
    )
    error, dof = math.hypot(near.stderr, wide.stderr), near.dof + wide.dof
    yield claim("samples", Reading(near.value - wide.value, error, dof, near.count))


def tables(rows: Rows) -> Iterator[Table]:
    """Distances by kind and size."""
    sizes, lines = rows.distinct("size"), []
    for kind, part in rows.groups("noise"):
        parts = (part.where(size=size) for size in sizes)
        lines.append((kind, *(str(kit.over_seeds(each, "distance")) for each in parts)))
    title = "Greatest distance from the semicircle's distribution"
    yield kit.table(title, ("noise", *(f"P = {n}" for n in sizes)), tuple(lines))


def charts(rows: Rows) -> Iterator[Chart]:
    """Distance over P, and the spectra of the first matrices beside the semicircle."""
    title, series = "Distance from the semicircle", kit.curves(rows.by("noise"), "distance", "size")
    yield Chart(title, "P", "distance", series, x_log=True, y_log=True, source="Theorem 13")
    shown = Rows(row for row in rows if row.get("values"))
    place = np.linspace(-2, 2, 81)
    law = Series("semicircle", short(place), short(Semicircle(1.0).cdf(place)), published=True)
    for row in shown.where(size=max(shown.values("size"), default=0)):
        shares = (np.arange(len(row["values"])) + 1) / len(row["values"])
        ours = Series("eigenvalues", row["values"], short(shares), style="step")
        title = f"Distribution, {row['noise']}"
        yield Chart(title, "eigenvalue over σ_ε", "share below", (ours, law))


EXPERIMENT = kit.Experiment(
    "fluctuation-spectrum",
    "The spectrum of curvature noise and the semicircle",
    kit.SPECTRAL,
    "§5.2, Theorem 13",
    {
        "smoke": cells(2, (30, 60, 120)),
        "cpu": cells(10),
        "paper": cells(20, (50, 100, 200, 400, 800)),
    },
    *(run, claims, tables, charts),
    kit.sentences(f"""
        σ_ε² is that of the matrix itself, tr(ε²)/P.
        Independent elements meet the conditions; rows of variance 0.1 and 1.9 by turns break
          condition (ii).
        For linear regression the Hessian of a sample is xxᵀ, whose elements depend on each other.
        The noise of b such samples is a shifted Marchenko–Pastur law, near a semicircle for P ≪ b
          alone.
        Two spectra count as near at a distance below {NEAR:g} and as apart above {APART:g}; both
          were set before any run.
    """),
    "no experiment: a theorem, of any noise that meets its conditions.",
)
