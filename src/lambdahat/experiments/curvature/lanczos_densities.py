"""Known spectra estimated by Lanczos and by the diagonal (§4.5, Figures 4.3–4.6)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.stats import wasserstein_distance

from lambdahat.experiments import kit
from lambdahat.experiments.curvature import lanczos_theorems as matrices
from lambdahat.experiments.curvature.lanczos_theorems import KNOWN, LAWS, WIGNER
from lambdahat.experiments.kit import Cell, Chart, Claims, Row, Rows, Series, Table, short
from lambdahat.krylov import lanczos
from lambdahat.operators import operator
from lambdahat.results import Array

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
    seeds = range(config.seeds)
    laws = kit.grid({}, matrix=LAWS, size=config.sizes, seed=seeds)
    return laws + kit.grid({"matrix": KNOWN, "size": config.known}, seed=seeds)


def run(cell: Cell, device: str) -> list[Row]:
    """A row per Lanczos depth and one for the diagonal; the first seed's also hold the curves."""
    name, size, seed = cell["matrix"], cell["size"], cell["seed"]
    if name == KNOWN:
        values, matrix = matrices.known_matrix(size, seed)
    else:
        values, matrix = matrices.law_matrix(name, size, seed, device)
    exact, first = values.numpy(), seed == 0
    start = matrices.unit_start(size, seed, "density").to(device)
    depths = DEPTHS.get(name, (DEPTH,))
    krylov = lanczos(operator(matrix.to(device)), start, max(depths))
    rows = []
    for depth in depths:
        nodes, weights, _ = (part.numpy() for part in krylov.ritz(depth))
        row = {"method": "Lanczos", "depth": depth, **_distances(exact, nodes, weights)}
        rows.append(row | ({"nodes": short(nodes), "weights": short(weights)} if first else {}))
    return [*rows, _diagonal_row(exact, matrix.diagonal().numpy(), cell, first)]


def _diagonal_row(exact: Array, diagonal: Array, cell: Cell, first: bool) -> Row:
    """The diagonal as if it were the spectrum, with the moments that the thesis derives for it."""
    row = {
        "method": "diagonal",
        "depth": 0,
        **_distances(exact, diagonal, np.full(len(diagonal), 1 / len(diagonal))),
        "largest": float(diagonal.max()),
        "smallest": float(diagonal.min()),
        "variance": float(diagonal.var()),
        "second ratio": float((exact**2).mean() / (diagonal**2).mean()) / cell["size"],
    }
    if first:
        edges = np.linspace(float(exact.min()), float(exact.max()), BINS + 1)
        row["centres"] = short((edges[1:] + edges[:-1]) / 2)
        for key, values in (("shares", exact), ("diagonal shares", diagonal)):
            row[key] = short(np.histogram(values, edges)[0] / len(exact))
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


def claims(rows: Rows) -> Claims:
    """Support and shape by Lanczos, not by the diagonal; then what is said of each matrix."""
    found = Claims()
    for name, part in rows.groups("matrix"):
        part = part.where(size=max(part.values("size")))
        seen, flat = part.where(depth=DEPTH), part.where(method="diagonal")
        text = kit.claim_texts(f"""
            support: {name}: {DEPTH} Lanczos steps capture the support (error of its ends, below
              {SUPPORT:g} widths) | {SOURCES[name]} | impressively
            misses: {name}: the diagonal misses the support (error of its ends, above {SUPPORT:g}
              widths) | §4.5.1 | fails
            farther: {name}: the diagonal is farther from the spectrum than Lanczos (ratio of
              distances) | §4.5.1 | nearly indistinguishable by Lanczos
        """)
        found.add(*text["support"], kit.over_seeds(seen, "support"), "below", SUPPORT)
        found.add(*text["misses"], kit.over_seeds(flat, "support"), bound=SUPPORT)
        found.add(*text["farther"], kit.decades(flat, seen, "distance"), unit=" decades")
    _add_laws(found, rows)
    _add_known(found, rows.where(matrix=KNOWN))
    return found


def _largest(rows: Rows, name: str) -> Rows:
    part = rows.where(matrix=name)
    return part.where(size=max(part.values("size")))


def _add_laws(found: Claims, rows: Rows) -> None:
    text = kit.claim_texts("""
        half: T = P/2: half of the eigenvalues are at 0, by the weight of the Ritz value there
          | Figure 4.4 | faithfully captured
        second: Wigner: the mean squared eigenvalue is P times that of the diagonal (their ratio
          over P) | Eq. 4.18 | 1
        variance: T = 2P: diagonal elements have the variance 2/T (T/2 times it) | §4.5.1 | 1
    """)
    for name in (WIGNER, WIDE):
        part = rows.where(matrix=name, depth=DEPTH)
        small, large = min(part.values("size")), max(part.values("size"))
        words = f"(distance at P = {small:,} over {large:,})"
        sentence = f"{name}: one random vector shows more of the larger matrix {words}"
        reading = kit.decades(part.where(size=small), part.where(size=large), "distance")
        found.add(sentence, "Figures 4.3, 4.5", "smoother", reading, unit=" decades")
    half = _largest(rows, HALF).where(depth=DEPTH)
    found.add(*text["half"], kit.over_seeds(half, "at zero"), "within", 0.5, 0.02)
    second = kit.over_seeds(_largest(rows, WIGNER).where(method="diagonal"), "second ratio")
    found.add(*text["second"], second, "within", 1.0, 0.1)
    chi = _largest(rows, WIDE).where(method="diagonal")
    scaled = kit.mean_of([value * chi[0]["size"] for value in chi.values("variance")])  # T/2 = P
    found.add(*text["variance"], scaled, "within", 1.0, 0.1)


def _add_known(found: Claims, rows: Rows) -> None:
    text = kit.claim_texts(f"""
        mass: known spectrum, m = 5: the mass at 0 is learnt, within 0.05 | Figure 4.6b | half
        ends: known spectrum, m = 5: largest and smallest eigenvalue are learnt (error below
          {SUPPORT:g} widths) | Figure 4.6b | learnt
        missed: known spectrum, m = 5: some outliers are missed (share) | Figure 4.6b | some
        more: known spectrum: m = {DEPTH} finds more of the outliers than m = 5 (share)
          | Figure 4.6d | accurately
        nearer: known spectrum: m = {DEPTH} is nearer the spectrum than m = 5
          | Figure 4.6d | accurately
        zero: known spectrum: the diagonal has nothing near 0 (its smallest element)
          | Figure 4.6c | 3.3
        none: known spectrum: the diagonal has no outliers (its largest element)
          | Figure 4.6c | 5.3
    """)
    few, many, flat = rows.where(depth=5), rows.where(depth=DEPTH), rows.where(method="diagonal")
    found.add(*text["mass"], kit.over_seeds(few, "at zero"), "within", 0.5, 0.05)
    found.add(*text["ends"], kit.over_seeds(few, "support"), "below", SUPPORT)
    both = (few, many)
    shares, more = (
        {row["seed"]: row["found"] / max(row["outliers"], 1) for row in part} for part in both
    )
    found.add(*text["missed"], kit.mean_of([1 - share for share in shares.values()]))
    found.add(*text["more"], kit.paired_difference(more, shares))
    found.add(*text["nearer"], kit.decades(few, many, "distance"), unit=" decades")
    found.add(*text["zero"], kit.over_seeds(flat, "smallest"), bound=1.0)
    found.add(*text["none"], kit.over_seeds(flat, "largest"), "below", EDGE)


def tables(rows: Rows) -> Iterator[Table]:
    """Distances for every matrix, size and method."""
    lines = kit.TableLines()
    for (name, size), part in rows.groups("matrix", "size"):
        for depth in (*DEPTHS.get(name, (DEPTH,)), 0):
            label = f"Lanczos, m = {depth}" if depth else "diagonal"
            readings = kit.means(part.where(depth=depth), "distance", "support", "at zero")
            lines.add(name, f"{size:,}", label, *readings)
    header = kit.split_header(
        "matrix | P | spectrum by | distance to the eigenvalues | error of the ends | "
        "mass nearest 0"
    )
    yield Table("In widths of the spectrum; distance: Wasserstein's", header, tuple(lines))


def charts(rows: Rows) -> Iterator[Chart]:
    """Eigenvalues, Ritz values and diagonal of the first seed, and the distances over P."""
    for row in rows.where(method="diagonal", seed=0):
        name, size = row["matrix"], row["size"]
        shares = {"eigenvalues": row["shares"], "diagonal": row["diagonal shares"]}
        x = row["centres"]
        series = [Series(label, x, values, style="step") for label, values in shares.items()]
        lanczos_rows = rows.where(matrix=name, size=size, seed=0, method="Lanczos")
        series += [kit.stems(f"Lanczos, m = {ritz['depth']}", ritz) for ritz in lanczos_rows]
        title, axes, log = f"{name}, P = {size:,}", ("eigenvalue", "share"), name in (HALF, KNOWN)
        yield Chart(title, *axes, tuple(series), source=SOURCES[name], y_log=log)
    distances = tuple(
        kit.curve(f"{name}, {method}", rows.where(matrix=name, method=method), "distance", "size")
        for name in LAWS
        for method in ("Lanczos", "diagonal")
    )
    title, axes = "Distance to the eigenvalues", ("P", "distance, in widths")
    yield Chart(title, *axes, distances, x_log=True, y_log=True, source="§4.5")


EXPERIMENT = kit.Experiment(
    "lanczos-densities",
    "Spectra of random and known matrices, by Lanczos and by the diagonal",
    kit.SPECTRAL,
    "§4.5, Figures 4.3–4.6",
    {
        "smoke": DensityScale((60, 225), 300, 3),
        "cpu": DensityScale((225, 2000), 1000, 20),
        "paper": DensityScale((225, 10_000), 1000, 5),
    },
    *(cells, run, claims, tables, charts),
    kit.sentences(f"""
        One start vector, uniform on the sphere, 30 steps; matrices are scaled to a limit law.
        The distance is Wasserstein's, between the eigenvalues and the Ritz values with their
          weights.
        Outliers of the known spectrum are above {EDGE:g}, found if a Ritz value is within
          {NEAR:.0%} of the width.
    """),
    "matrices of P = 225 and 10,000, one of 1,000 with a known spectrum, 30 Lanczos steps;"
    " draws are not said.",
)
