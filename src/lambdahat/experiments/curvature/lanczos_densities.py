"""Known spectra estimated by Lanczos and by the diagonal (§4.5, Figures 4.3–4.6)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np
from scipy.stats import wasserstein_distance

from lambdahat.experiments import kit
from lambdahat.experiments.curvature import lanczos_theorems as matrices
from lambdahat.experiments.curvature.lanczos_theorems import KNOWN, LAWS, WIGNER
from lambdahat.experiments.kit import Cell, Chart, Claim, Row, Rows, Series, Table, short
from lambdahat.krylov import lanczos
from lambdahat.operators import operator
from lambdahat.results import Array

DEPTH = 30
FEW = 5
DEPTHS = {KNOWN: (FEW, 15, DEPTH)}
TOGETHER = 65
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


def cells(sizes: Iterable[int], known: int, seeds: int, few: int = 0) -> list[Cell]:
    """Random matrix × size × seed; then, of size ``known``, the known spectrum × seed.

    ``few`` seeds in all, TOGETHER in a cell, take the few Lanczos steps of Figure 4.6b.
    """
    laws = kit.grid({}, matrix=LAWS, size=sizes, seed=range(seeds))
    more = list(range(seeds, few))
    groups = [more[start : start + TOGETHER] for start in range(0, len(more), TOGETHER)]
    spectrum = {"matrix": KNOWN, "size": known}
    all_steps = kit.grid(spectrum, seed=range(seeds))
    return laws + all_steps + kit.grid({**spectrum, "steps": FEW}, seeds=groups)


def run(cell: Cell, device: str) -> list[Row]:
    """A row per Lanczos depth and one for the diagonal; the first seed's also hold the curves."""
    if "seeds" in cell:
        return [_few_steps(cell, seed, device) for seed in cell["seeds"]]
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


def _few_steps(cell: Cell, seed: int, device: str) -> Row:
    """What the cell's few Lanczos steps see of the known spectrum, at one seed."""
    values, matrix = matrices.known_matrix(cell["size"], seed)
    start, depth = matrices.unit_start(cell["size"], seed, "density").to(device), cell["steps"]
    krylov = lanczos(operator(matrix.to(device)), start, depth)
    nodes, weights, _ = (part.numpy() for part in krylov.ritz(depth))
    seen = _distances(values.numpy(), nodes, weights)
    return {"seed": seed, "method": "Lanczos", "depth": depth, **seen}


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


CLAIMS = kit.ClaimTexts(f"""
    support: {{name}}: {DEPTH} Lanczos steps capture the support (error of its ends, below
      {SUPPORT:g} widths) | {{source}} | impressively | below {SUPPORT:g}
    misses: {{name}}: the diagonal misses the support (error of its ends, above {SUPPORT:g} widths)
      | §4.5.1 | fails | above {SUPPORT:g}
    farther: {{name}}: the diagonal is farther from the spectrum than Lanczos (ratio of distances)
      | §4.5.1 | nearly indistinguishable by Lanczos | above | decades
    larger: {{name}}: one random vector shows more of the larger matrix (distance at P = {{small:,}}
      over {{large:,}}) | Figures 4.3, 4.5 | smoother | above | decades
    half: T = P/2: half of the eigenvalues are at 0, by the weight of the Ritz value there
      | Figure 4.4 | faithfully captured | within 0.02 of 0.5
    second: Wigner: the mean squared eigenvalue is P times that of the diagonal (their ratio over P)
      | Eq. 4.18 | 1 | within 0.1 of 1
    variance: T = 2P: diagonal elements have the variance 2/T (T/2 times it)
      | §4.5.1 | 1 | within 0.1 of 1
    mass: known spectrum, m = 5: the mass at 0 is learnt, within 0.05
      | Figure 4.6b | half | within 0.05 of 0.5
    ends: known spectrum, m = 5: largest and smallest eigenvalue are learnt (error below {SUPPORT:g}
      widths) | Figure 4.6b | learnt | below {SUPPORT:g}
    missed: known spectrum, m = 5: some outliers are missed (share) | Figure 4.6b | some
    more: known spectrum: m = {DEPTH} finds more of the outliers than m = 5 (share)
      | Figure 4.6d | accurately
    nearer: known spectrum: m = {DEPTH} is nearer the spectrum than m = 5
      | Figure 4.6d | accurately | above | decades
    zero: known spectrum: the diagonal has nothing near 0 (its smallest element)
      | Figure 4.6c | 3.3 | above 1
    none: known spectrum: the diagonal has no outliers (its largest element)
      | Figure 4.6c | 5.3 | below {EDGE:g}
""")


def claims(rows: Rows) -> Iterator[Claim]:
    """Support and shape by Lanczos, not by the diagonal; then what is said of each matrix."""
    for name, part in rows.groups("matrix"):
        claim = partial(CLAIMS, name=name, source=SOURCES[name])
        part = part.where(size=max(part.values("size")))
        seen, flat = part.where(depth=DEPTH), part.where(method="diagonal")
        yield claim("support", kit.over_seeds(seen, "support"))
        yield claim("misses", kit.over_seeds(flat, "support"))
        yield claim("farther", kit.decades(flat, seen, "distance"))
    yield from _law_claims(rows)
    yield from _known_claims(rows.where(matrix=KNOWN))


def _largest(rows: Rows, name: str) -> Rows:
    part = rows.where(matrix=name)
    return part.where(size=max(part.values("size")))


def _law_claims(rows: Rows) -> Iterator[Claim]:
    for name in (WIGNER, WIDE):
        part = rows.where(matrix=name, depth=DEPTH)
        small, large = min(part.values("size")), max(part.values("size"))
        reading = kit.decades(part.where(size=small), part.where(size=large), "distance")
        yield CLAIMS("larger", reading, name=name, small=small, large=large)
    half = _largest(rows, HALF).where(depth=DEPTH)
    yield CLAIMS("half", kit.over_seeds(half, "at zero"))
    second = kit.over_seeds(_largest(rows, WIGNER).where(method="diagonal"), "second ratio")
    yield CLAIMS("second", second)
    chi = _largest(rows, WIDE).where(method="diagonal")
    scaled = kit.mean_of([value * chi[0]["size"] for value in chi.values("variance")])  # T/2 = P
    yield CLAIMS("variance", scaled)


def _known_claims(rows: Rows) -> Iterator[Claim]:
    few, many, flat = rows.where(depth=FEW), rows.where(depth=DEPTH), rows.where(method="diagonal")
    yield CLAIMS("mass", kit.over_seeds(few, "at zero"))
    yield CLAIMS("ends", kit.over_seeds(few, "support"))
    both = (few, many)
    shares, more = (
        {row["seed"]: row["found"] / max(row["outliers"], 1) for row in part} for part in both
    )
    yield CLAIMS("missed", kit.mean_of([1 - share for share in shares.values()]))
    yield CLAIMS("more", kit.paired_difference(more, shares))
    yield CLAIMS("nearer", kit.decades(few, many, "distance"))
    yield CLAIMS("zero", kit.over_seeds(flat, "smallest"))
    yield CLAIMS("none", kit.over_seeds(flat, "largest"))


def tables(rows: Rows) -> Iterator[Table]:
    """Distances for every matrix, size and method."""
    parts = {
        (name, f"{size:,}", f"Lanczos, m = {depth}" if depth else "diagonal"): part
        for (name, size), every in rows.groups("matrix", "size")
        for depth in (*DEPTHS.get(name, (DEPTH,)), 0)
        if len(part := every.where(depth=depth))
    }
    columns = {
        "distance": "distance to the eigenvalues",
        "support": "error of the ends",
        "at zero": "mass nearest 0",
    }
    title = "In widths of the spectrum; distance: Wasserstein's"
    yield kit.means_table(title, "matrix | P | spectrum by", parts, columns)


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
    parts = {
        f"{name}, {method}": rows.where(matrix=name, method=method)
        for name in LAWS
        for method in ("Lanczos", "diagonal")
    }
    title, axes = "Distance to the eigenvalues", ("P", "distance, in widths")
    distances = kit.curves(parts, "distance", "size")
    yield Chart(title, *axes, distances, x_log=True, y_log=True, source="§4.5")


EXPERIMENT = kit.Experiment(
    "lanczos-densities",
    "Spectra of random and known matrices, by Lanczos and by the diagonal",
    kit.SPECTRAL,
    "§4.5, Figures 4.3–4.6",
    {
        "smoke": cells((60, 225), known=300, seeds=3),
        "cpu": cells((225, 2000), known=1000, seeds=20, few=800),
        "paper": cells((225, 10_000), known=1000, seeds=5),
    },
    *(run, claims, tables, charts),
    kit.sentences(f"""
        One start vector, uniform on the sphere, 30 steps; matrices are scaled to a limit law.
        The distance is Wasserstein's, between the eigenvalues and the Ritz values with their
          weights.
        Outliers of the known spectrum are above {EDGE:g}, found if a Ritz value is within
          {NEAR:.0%} of the width.
        At cpu scale claims about {FEW} Lanczos steps of the known spectrum have 800 seeds: 20 had
          left the mass at 0 undecided, and 795 were planned from them.
    """),
    "matrices of P = 225 and 10,000, one of 1,000 with a known spectrum, 30 Lanczos steps;"
    " draws are not said.",
)
