"""Known spectra as Lanczos and as diagonals show them (§4.5, Figures 4.3–4.6)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.stats import wasserstein_distance
from torch import Tensor

from lambdahat.experiments.curvature.lanczos_theorems import (
    KNOWN,
    LAWS,
    WIGNER,
    known_matrix,
    law_matrix,
    unit_start,
)
from lambdahat.experiments.kit.cells import Cell, Row, Rows, decades, errors, means, over_seeds
from lambdahat.experiments.kit.claims import (
    Claim,
    Claims,
    Reading,
    Table,
    mean_of,
    paired_difference,
    split_header,
)
from lambdahat.experiments.kit.experiment import SPECTRAL, Experiment, sentences
from lambdahat.krylov import lanczos
from lambdahat.operators import operator
from lambdahat.results import Array
from lambdahat.results.charts import Chart, Series, short

DEPTH = 30
DEPTHS = {KNOWN: (5, 15, DEPTH)}
WIDE, HALF = list(LAWS)[1:]
EDGE = 15.0  # eigenvalues of the known spectrum beyond it are its outliers
NEAR = 0.01  # of the width: an outlier is found by a Ritz value as near
SUPPORT = 0.05
BINS = 40
SOURCES = {
    WIGNER: "Figures 4.3, 4.4d",
    WIDE: "Figures 4.5, 4.4c",
    HALF: "Figure 4.4a, b",
    KNOWN: "Figure 4.6",
}


@dataclass(frozen=True)
class DensityScale:
    """One scale: the sizes P of random matrices, that of the known spectrum, and seeds at each."""

    sizes: tuple[int, ...]
    known: int
    seeds: int


def cells(config: DensityScale) -> list[Cell]:
    """Matrix × size × seed."""
    places = [(name, size) for name in LAWS for size in config.sizes] + [(KNOWN, config.known)]
    return [
        {"matrix": name, "size": size, "seed": seed}
        for name, size in places
        for seed in range(config.seeds)
    ]


def run(cell: Cell, device: str) -> list[Row]:
    """A row per Lanczos depth and one for the diagonal; the first seed's also hold the curves."""
    name, size, seed = cell["matrix"], cell["size"], cell["seed"]
    values, matrix = (
        known_matrix(size, seed) if name == KNOWN else law_matrix(name, size, seed, device)
    )
    exact, first = values.numpy(), seed == 0
    start = unit_start(size, seed, "density").to(device)
    depths = DEPTHS.get(name, (DEPTH,))
    krylov = lanczos(operator(matrix.to(device)), start, max(depths))
    rows = []
    for depth in depths:
        nodes, weights, _ = (part.numpy() for part in krylov.ritz(depth))
        row = {"method": "Lanczos", "depth": depth, **_distances(exact, nodes, weights)}
        if first:
            row |= {"nodes": short(nodes), "weights": short(weights)}
        rows.append(row)
    rows.append(_diagonal_row(exact, matrix.diagonal(), cell, first))
    return rows


def _diagonal_row(exact: Array, diagonal: Tensor, cell: Cell, first: bool) -> Row:
    """The diagonal as if it were the spectrum, with the moments that the thesis derives for it."""
    found = diagonal.numpy()
    row = {
        "method": "diagonal",
        "depth": 0,
        **_distances(exact, found, np.full(len(found), 1 / len(found))),
        "largest": float(found.max()),
        "smallest": float(found.min()),
        "variance": float(found.var()),
        "second ratio": float((exact**2).mean() / (found**2).mean()) / cell["size"],
    }
    if first:
        low, high = float(exact.min()), float(exact.max())
        edges = np.linspace(low, high, BINS + 1)
        row |= {
            "centres": short((edges[1:] + edges[:-1]) / 2),
            "shares": short(np.histogram(exact, edges)[0] / len(exact)),
            "diagonal shares": short(np.histogram(found, edges)[0] / len(exact)),
        }
    return row


def _distances(exact: Array, nodes: Array, weights: Array) -> Row:
    """Relative distances of a discrete spectrum to the exact one, its mass at 0, its outliers."""
    low, high = float(exact.min()), float(exact.max())
    width = high - low
    apart = exact[exact > EDGE]
    seen = [bool(np.abs(nodes - value).min() <= NEAR * width) for value in apart]
    return {
        "distance": float(wasserstein_distance(exact, nodes, v_weights=weights)) / width,
        "support": max(abs(high - float(nodes.max())), abs(float(nodes.min()) - low)) / width,
        "at zero": float(weights[np.abs(nodes) == np.abs(nodes).min()].sum()),
        "outliers": len(apart),
        "found": sum(seen),
    }


def claims(rows: Rows) -> list[Claim]:
    """Support and shape by Lanczos, not by the diagonal; then what is said of each matrix."""
    found = Claims()
    for name in rows.distinct("matrix"):
        part = _largest(rows, name)
        source, seen, flat = SOURCES[name], part.where(depth=DEPTH), part.where(method="diagonal")
        sentence = (
            f"{name}: {DEPTH} Lanczos steps capture the support (error of its ends, below"
            f" {SUPPORT:g} widths)"
        )
        found.add(sentence, source, "impressively", over_seeds(seen, "support"), "below", SUPPORT)
        sentence = (
            f"{name}: the diagonal misses the support (error of its ends, above {SUPPORT:g} widths)"
        )
        found.add(sentence, "§4.5.1", "fails", over_seeds(flat, "support"), bound=SUPPORT)
        sentence = (
            f"{name}: the diagonal is farther from the spectrum than Lanczos (ratio of distances)"
        )
        published = "nearly indistinguishable by Lanczos"
        found.add(sentence, "§4.5.1", published, decades(flat, seen, "distance"), unit=" decades")
    return [*found, *_law_claims(rows), *_known_claims(rows.where(matrix=KNOWN))]


def _largest(rows: Rows, name: str) -> Rows:
    part = rows.where(matrix=name)
    return part.where(size=max(part.values("size")))


def _law_claims(rows: Rows) -> list[Claim]:
    found = Claims()
    for name in (WIGNER, WIDE):
        part = rows.where(matrix=name, depth=DEPTH)
        small, large = min(part.values("size")), max(part.values("size"))
        sentence = (
            f"{name}: one random vector shows more of the larger matrix (distance at P ="
            f" {small:,} over {large:,})"
        )
        source = "Figures 4.3, 4.5"
        found.add(sentence, source, "smoother", _ratio(part, small, large), unit=" decades")
    half = _largest(rows, HALF).where(depth=DEPTH)
    second = over_seeds(_largest(rows, WIGNER).where(method="diagonal"), "second ratio")
    chi = _largest(rows, WIDE).where(method="diagonal")
    scaled = mean_of([value * chi[0]["size"] for value in chi.values("variance")])  # T/2 = P
    sentence = "T = P/2: half of the eigenvalues are at 0, by the weight of the Ritz value there"
    reading = over_seeds(half, "at zero")
    found.add(sentence, "Figure 4.4", "faithfully captured", reading, "within", 0.5, 0.02)
    sentence = (
        "Wigner: the mean squared eigenvalue is P times that of the diagonal (their ratio over P)"
    )
    found.add(sentence, "Eq. 4.18", "1", second, "within", 1.0, 0.1)
    sentence = "T = 2P: diagonal elements have the variance 2/T (T/2 times it)"
    found.add(sentence, "§4.5.1", "1", scaled, "within", 1.0, 0.1)
    return found


def _ratio(rows: Rows, small: int, large: int) -> Reading:
    """log₁₀ of the ratio of distances at two sizes, seed by seed."""
    ends = [
        {
            seed: math.log10(value)
            for seed, value in rows.where(size=size).paired("distance").items()
        }
        for size in (small, large)
    ]
    return paired_difference(ends[0], ends[1])


def _known_claims(rows: Rows) -> list[Claim]:
    few, many, flat = rows.where(depth=5), rows.where(depth=DEPTH), rows.where(method="diagonal")
    missed = {seed: 1 - value for seed, value in _shares(few).items()}
    found = Claims()
    sentence = "known spectrum, m = 5: the mass at 0 is learnt, within 0.05"
    found.add(sentence, "Figure 4.6b", "half", over_seeds(few, "at zero"), "within", 0.5, 0.05)
    sentence = (
        "known spectrum, m = 5: largest and smallest eigenvalue are learnt (error below"
        f" {SUPPORT:g} widths)"
    )
    found.add(sentence, "Figure 4.6b", "learnt", over_seeds(few, "support"), "below", SUPPORT)
    sentence = "known spectrum, m = 5: some outliers are missed (share)"
    found.add(sentence, "Figure 4.6b", "some", mean_of(list(missed.values())), bound=0.0)
    sentence = f"known spectrum: m = {DEPTH} finds more of the outliers than m = 5 (share)"
    source = "Figure 4.6d"
    found.add(sentence, source, "accurately", paired_difference(_shares(many), _shares(few)))
    sentence = f"known spectrum: m = {DEPTH} is nearer the spectrum than m = 5"
    source = "Figure 4.6d"
    found.add(sentence, source, "accurately", decades(few, many, "distance"), unit=" decades")
    sentence = "known spectrum: the diagonal has nothing near 0 (its smallest element)"
    found.add(sentence, "Figure 4.6c", "3.3", over_seeds(flat, "smallest"), bound=1.0)
    sentence = "known spectrum: the diagonal has no outliers (its largest element)"
    found.add(sentence, "Figure 4.6c", "5.3", over_seeds(flat, "largest"), "below", EDGE)
    return found


def _shares(rows: Rows) -> dict[int, float]:
    return {row["seed"]: row["found"] / max(row["outliers"], 1) for row in rows}


def tables(rows: Rows) -> list[Table]:
    """Distances for every matrix, size and method."""
    lines = []
    for name in rows.distinct("matrix"):
        for size in rows.where(matrix=name).distinct("size"):
            part = rows.where(matrix=name, size=size)
            for method, depth in [("Lanczos", depth) for depth in DEPTHS.get(name, (DEPTH,))] + [
                ("diagonal", 0)
            ]:
                chosen = part.where(method=method, depth=depth)
                label = f"Lanczos, m = {depth}" if depth else method
                readings = means(chosen, "distance", "support", "at zero")
                lines.append((name, f"{size:,}", label, *readings))
    header = split_header(
        "matrix | P | spectrum by | distance to the eigenvalues | error of the ends | "
        "mass nearest 0"
    )
    return [Table("In widths of the spectrum; distance: Wasserstein's", header, tuple(lines))]


def charts(rows: Rows) -> list[Chart]:
    """Eigenvalues, Ritz values and diagonal of the first seed, and the distances over P."""
    out = []
    for row in rows.where(method="diagonal", seed=0):
        name, size = row["matrix"], row["size"]
        series = []
        series.append(Series("eigenvalues", row["centres"], row["shares"], style="step"))
        series.append(Series("diagonal", row["centres"], row["diagonal shares"], style="step"))
        series += [
            Series(f"Lanczos, m = {ritz['depth']}", ritz["nodes"], ritz["weights"], style="stems")
            for ritz in rows.where(matrix=name, size=size, seed=0, method="Lanczos")
        ]
        title = f"{name}, P = {size:,}"
        curves = tuple(series)
        source = SOURCES[name]
        out.append(
            Chart(title, "eigenvalue", "share", curves, source=source, y_log=name in (HALF, KNOWN))
        )
    series = []
    for name in LAWS:
        for method in ("Lanczos", "diagonal"):
            part = rows.where(matrix=name, method=method)
            sizes = part.distinct("size")
            readings = [over_seeds(part.where(size=size), "distance") for size in sizes]
            series.append(
                Series(f"{name}, {method}", sizes, [r.value for r in readings], errors(readings))
            )
    title = "Distance to the eigenvalues"
    axis = "distance, in widths"
    out.append(Chart(title, "P", axis, tuple(series), x_log=True, y_log=True, source="§4.5"))
    return out


EXPERIMENT = Experiment(
    "lanczos-densities",
    "Spectra of random and known matrices, by Lanczos and by the diagonal",
    SPECTRAL,
    "§4.5, Figures 4.3–4.6",
    {
        "smoke": DensityScale((60, 225), 300, 3),
        "cpu": DensityScale((225, 2000), 1000, 20),
        "paper": DensityScale((225, 10_000), 1000, 5),
    },
    *(cells, run, claims, tables, charts),
    sentences(f"""
        One start vector, uniform on the sphere, 30 steps; matrices are scaled to a limit law.
        The distance is Wasserstein's, between the eigenvalues and the Ritz values with their
          weights.
        Outliers of the known spectrum are above {EDGE:g}, found if a Ritz value is within
          {NEAR:.0%} of the width.
    """),
    size=(
        "matrices of P = 225 and 10,000, one of 1,000 with a known spectrum, 30 Lanczos steps;"
        " draws are not said."
    ),
)
