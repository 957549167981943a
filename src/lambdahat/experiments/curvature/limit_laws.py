"""The limit laws of §4.5, Theorems 9 and 10, and the quadrature of Theorem 6, over matrices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from lambdahat._core.rng import derived_seed
from lambdahat.experiments import kit
from lambdahat.experiments.kit import Cell, Chart, Claim, Row, Rows, Table
from lambdahat.krylov import lanczos
from lambdahat.operators import operator
from lambdahat.randommatrix import MarchenkoPastur, Semicircle
from lambdahat.results import Array

NORMAL, SIGNS = "Wigner, normal", "Wigner, ±1"
NARROW, WIDE = "covariance, q = 1/2", "covariance, q = 2"
LAWS = {
    NORMAL: Semicircle(1.0),
    SIGNS: Semicircle(1.0),
    NARROW: MarchenkoPastur(ratio=0.5),
    WIDE: MarchenkoPastur(ratio=2.0),
}
DEPTH = 8  # Lanczos steps, exact up to degree 2m − 1
EXACT, ZERO, CLOSE = 1e-9, 1e-9, 0.05


def cells(seeds: int, sizes: Iterable[int] = (50, 100, 200, 400)) -> list[Cell]:
    """Matrix × size × seed: matrices P × P of these ``sizes``."""
    return kit.grid({}, matrix=LAWS, size=sizes, seed=range(seeds))


def run(cell: Cell, device: str) -> list[Row]:
    """The Kolmogorov distance of the eigenvalues to their law, what lies at 0, and how far the
    Gauss quadrature of DEPTH Lanczos steps is from the moments of the start.
    """
    name, size = cell["matrix"], cell["size"]
    rng = np.random.default_rng(derived_seed(cell["seed"], "limit laws", name, size))
    matrix = _matrix(name, size, rng)
    values, vectors = np.linalg.eigh(matrix)
    null = np.abs(values) < ZERO * values[-1]
    places = np.where(null, 0.0, values)
    law, ranks = LAWS[name].cdf(places), np.arange(size + 1) / size
    left = np.where(null, 0.0, law)  # the law jumps at 0, and so do the eigenvalues
    # from the right: the law less the share of eigenvalues up to each, ties counted
    off = np.maximum(
        np.abs(left - np.where(null, 0.0, ranks[:-1])),
        np.abs(law - np.searchsorted(places, places, side="right") / len(places)),
    )
    draw = rng.standard_normal(size)
    start = np.asarray(draw / np.linalg.norm(draw))
    missed = _quadrature_error(matrix, values, vectors.T @ start, start)
    ends = {"largest": float(values[-1]), "smallest": float(values[~null][0])}
    return [{"distance": float(off.max()), "at zero": float(null.mean()), **ends, "missed": missed}]


def _matrix(name: str, size: int, rng: np.random.Generator) -> Array:
    """Elements of variance 1/P, or XXᵀ/T with T = P/q columns."""
    if name in (NARROW, WIDE):
        columns = round(size / LAWS[name].ratio)  # type: ignore[attr-defined]
        draws = rng.standard_normal((size, columns))
        return np.asarray(draws @ draws.T / columns)
    shape = size, size
    draw = rng.choice([-1.0, 1.0], shape) if name == SIGNS else rng.standard_normal(shape)
    return np.asarray((np.triu(draw) + np.triu(draw, 1).T) / math.sqrt(size))


def _quadrature_error(matrix: Array, values: Array, parts: Array, start: Array) -> float:
    """The largest relative error of a Chebyshev moment vᵀT_k(H)v, k ≤ 2m − 1: polynomials on the
    matrix's range, whose moments are not tiny beside their terms.
    """
    krylov = lanczos(operator(torch.from_numpy(matrix)), torch.from_numpy(start), DEPTH)
    nodes, weights, _ = (part.numpy() for part in krylov.ritz(DEPTH))
    low, high = float(values[0]), float(values[-1])
    degrees = np.eye(2 * DEPTH)

    def moments(at: Array, shares: Array) -> Array:
        scaled = (2 * at - low - high) / (high - low)
        return np.asarray(np.polynomial.chebyshev.chebval(scaled, degrees.T) @ shares)

    return float(np.abs(moments(nodes, weights) - moments(values, parts**2)).max())


def claims(rows: Rows) -> Iterator[Claim]:
    """Convergence to each law, what Eq. 4.16 says for q > 1, and the quadrature."""
    largest = max(rows.values("size"))
    claim = kit.ClaimTexts(f"""
        falls: {{kind}}: the distance from the {{law}} falls with P (exponent)
          | {{source}} | to 0 | below
        zero: covariance, q = 2: a share 1 − 1/q of the eigenvalues is 0 | Theorem 10, Eq. 4.16
          | 0.5 | within 0.001 of 0.5
        printed: covariance, q = 2: the others end at (1 + √(1/q))², the end of ν of 1/q (P =
          {largest:,}) | Eqs. 4.16 and 4.17 | {{printed:.3g}} | within
        mended: covariance, q = 2: they end at (1 + √q)², the end of ν of q (P = {largest:,})
          | Eq. 4.16 mended | none: it prints ν of 1/q | within | | ours
        missed: m Lanczos steps integrate polynomials up to degree 2m − 1 exactly (error of a moment
          of the start, at worst; m = {DEPTH}) | Theorem 6, Eq. 4.7 | a Gauss quadrature
          | below {EXACT:g}
    """)
    for name in LAWS:
        law, source = ("semicircle", "Theorem 9") if name in (NORMAL, SIGNS) else ("", "Theorem 10")
        values = {"kind": name, "law": law or "Marchenko–Pastur law", "source": source}
        yield claim("falls", kit.exponent(rows.where(matrix=name), "distance", "size"), **values)
    wide = rows.where(matrix=WIDE, size=largest)
    yield claim("zero", kit.over_seeds(wide, "at zero"))
    for key, ratio in (("printed", 0.5), ("mended", 2.0)):
        end = MarchenkoPastur(ratio=ratio).edges[1]
        settings = {"bound": end, "margin": CLOSE * end, "printed": end}
        yield claim(key, kit.over_seeds(wide, "largest"), **settings)
    yield claim("missed", kit.Reading(max(rows.values("missed")), 0.0))


def tables(rows: Rows) -> Iterator[Table]:
    """Distances by matrix and size, and the ends of the largest."""
    sizes, lines = rows.distinct("size"), []
    for name, part in rows.groups("matrix"):
        parts = (part.where(size=size) for size in sizes)
        distances = (str(kit.over_seeds(each, "distance")) for each in parts)
        ends = kit.means(part.where(size=max(sizes)), "smallest", "largest")
        lines.append((name, *distances, *ends, "{:.3g} to {:.3g}".format(*LAWS[name].edges)))
    header = ("matrix", *(f"P = {size}" for size in sizes), "smallest", "largest", "law's ends")
    yield kit.table("Greatest distance from the law's distribution", header, tuple(lines))


def charts(rows: Rows) -> Iterator[Chart]:
    """Distance over P."""
    series, source = kit.curves(rows.by("matrix"), "distance", "size"), "Theorems 9 and 10"
    title, axes = "Distance from the limit law", ("P", "distance")
    yield Chart(title, *axes, series, x_log=True, y_log=True, source=source)


EXPERIMENT = kit.Experiment(
    "limit-laws",
    "Random matrices and their limit laws, and the quadrature of Lanczos",
    kit.SPECTRAL,
    "§§4.4 and 4.5, Theorems 6, 9 and 10",
    {
        "smoke": cells(2, (30, 60, 120)),
        "cpu": cells(10),
        "paper": cells(20, (50, 100, 200, 400, 800)),
    },
    *(run, claims, tables, charts),
    kit.sentences(f"""
        The distance is the greatest between the two distribution functions.
        For q = 2 the law is ν of q with the weight 1 − 1/q at 0: ν of 1/q, which Eq. 4.16 prints,
          has the mass 1 by itself.
        Eigenvalues below {ZERO:g} of the largest count as 0.
        Moments are those of Chebyshev polynomials on the matrix's range, up to degree 2m − 1, of
          one normal start.
        Ends are judged within {CLOSE:.0%}: set before any run.
    """),
    "matrices of P = 225 and 10,000, drawn as an illustration; the theorems are of any.",
)
