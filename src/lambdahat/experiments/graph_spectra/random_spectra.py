"""Entropic spectra of the semicircle and of random graphs by moments (Figures 3.1 to 3.3)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.polynomial.chebyshev import chebvander

from lambdahat._core.rng import derived_seed
from lambdahat.experiments.graph_spectra.graph_subjects import first_moments
from lambdahat.experiments.kit.cells import Cell, Row, Rows, curve, decades, means
from lambdahat.experiments.kit.claims import (
    Claim,
    Claims,
    Reading,
    Table,
    mean_of,
    paired_difference,
)
from lambdahat.experiments.kit.experiment import SPECTRAL, Experiment, sentences
from lambdahat.graphs.random_models import Model
from lambdahat.graphs.spectra import BOUNDS, TOLERANCE, components, eigenvalues, probed_moments
from lambdahat.maxent import MaxentDensity, fit
from lambdahat.results import Array
from lambdahat.results.charts import Chart, Series, short

SEMICIRCLE = "semicircle"
ER, BA, TREE = "Erdős–Rényi, np = 5", "Barabási–Albert, r = 5", "Barabási–Albert, r = 1"
MODELS = {ER: ("erdos_renyi", 5.0), BA: ("barabasi_albert", 5.0), TREE: ("barabasi_albert", 1.0)}
QUADRATURE = 100_000  # Gauss–Chebyshev points under the semicircle
BINS = (50, 500)
PLACES = 250  # of a curve that is drawn
DRAWN = (5, 30)  # moments of Figure 3.2a
KERNEL = 0.05  # width of the kernel of Theorem 2
HISTOGRAM_ROW, KERNEL_ROW = 0, -1  # in place of a number of moments


@dataclass(frozen=True)
class SpectraScale:
    """Nodes and seeds of the random graphs; ``moments`` of their spectra and the semicircle's."""

    nodes: int
    seeds: int
    moments: tuple[int, ...] = (3, 30, 60, 100)
    semicircle: tuple[int, ...] = (3, 5, 10, 15, 20, 25, 30)
    probes: int = 100


def cells(config: SpectraScale) -> list[Cell]:
    """The semicircle; and random graph × seed, of which the first is drawn."""
    base = {"nodes": config.nodes, "probes": config.probes, "orders": list(config.moments)}
    graphs = [
        {**base, "graph": name, "seed": seed} for name in MODELS for seed in range(config.seeds)
    ]
    return [{"graph": SEMICIRCLE, "orders": list(config.semicircle), "seed": 0}, *graphs]


def run(cell: Cell, device: str) -> list[Row]:
    """The density's distance from the truth by number of moments; curves of the first seed."""
    if cell["graph"] == SEMICIRCLE:
        return [_semicircle(count) for count in cell["orders"]]
    kind, parameter = MODELS[cell["graph"]]
    share = parameter / cell["nodes"] if kind == "erdos_renyi" else parameter
    graph = Model(kind, cell["nodes"]).draw(share, derived_seed(cell["seed"], "random graph"))
    values = eigenvalues(graph)
    measured = probed_moments(
        graph, max(cell["orders"]), cell["probes"], cell["seed"], components(graph)
    )
    rows = [
        _distances_to_truth(fit(first_moments(measured, count), tol=TOLERANCE), values, cell)
        for count in cell["orders"]
    ]
    return [*rows, _kernel_growth(values)] + ([_histogram(values)] if cell["seed"] == 0 else [])


def _semicircle(count: int) -> Row:
    """KL(semicircle‖p), p with its exact moments on [0, 1], centre and radius ½ (§3.5.1)."""
    angles = (np.arange(QUADRATURE) + 0.5) * np.pi / QUADRATURE
    x, weights = np.cos(angles), 2 * np.sin(angles) ** 2 / QUADRATURE
    truth = 4 / np.pi * np.sin(angles)  # of λ = (1 + x)/2
    density = fit(np.r_[1.0, (weights @ chebvander(x, count))[1:]], bounds=(0.0, 1.0))
    row: Row = {
        "moments": count,
        "kl": float(weights @ np.log(truth / density.evaluate((1 + x) / 2))),
    }
    if count in DRAWN:
        row |= _curve(density)
    return row


def _distances_to_truth(density: MaxentDensity, values: Array, cell: Cell) -> Row:
    """Total variation to the histogram at both bin counts, and the mass beyond the eigenvalues."""
    count = len(density.coefficients) - 1
    row: Row = {"moments": count, "status": density.status.name}
    for bins in BINS:
        edges = np.linspace(*BOUNDS, bins + 1)
        seen = np.histogram(values, edges)[0] / len(values)
        row[f"off {bins}"] = float(np.abs(np.diff(density.cumulative(edges)) - seen).sum() / 2)
    zeros = values < 1e-9
    below, upto = density.cumulative([float(values[~zeros][0]), float(values[-1])])
    row["outside"] = float(1 - upto + abs(below - zeros.mean()))
    return row | (_curve(density) if cell["seed"] == 0 else {})


def _curve(density: MaxentDensity) -> Row:
    low, high = density.bounds
    places = np.linspace(low + 1e-3, high - 1e-3, PLACES)
    return {"places": short(places), "density": short(density.evaluate(places))}


def _histogram(values: Array) -> Row:
    """The histograms of the figures, as densities."""
    row: Row = {"moments": HISTOGRAM_ROW}
    for bins in BINS:
        heights, edges = np.histogram(values, bins, BOUNDS, density=True)
        row |= {
            f"centres {bins}": short((edges[1:] + edges[:-1]) / 2),
            f"heights {bins}": short(heights),
        }
    return row


def _kernel_growth(values: Array) -> Row:
    """⟨(λ + u)^m⟩/⟨λ^m⟩ − 1 for m = 2 and 10: a Gaussian kernel raises moments (Theorem 2)."""
    row: Row = {"moments": KERNEL_ROW}
    for order in (2, 10):
        spread = [
            math.comb(order, j) * KERNEL**j * _even(j) * float((values ** (order - j)).mean())
            for j in range(2, order + 1, 2)
        ]
        row[f"bias {order}"] = sum(spread) / float((values**order).mean())
    return row


def _even(order: int) -> float:
    """⟨u^j⟩ of a standard normal u, j even: (j − 1)!!"""
    return float(math.prod(range(1, order, 2)))


def claims(rows: Rows) -> list[Claim]:
    """The semicircle's divergence, the fit of random graphs, and what a kernel does to moments."""
    circle = rows.where(graph=SEMICIRCLE)
    few, many = min(circle.values("moments")), max(circle.values("moments"))
    values = [row["kl"] for row in sorted(circle, key=lambda row: row["moments"])]
    worst = Reading(max(b - a for a, b in pairwise(values)), 0.0)
    sentence = (
        f"the divergence from the semicircle falls with the moments, {few} to {many} (largest rise)"
    )
    found = [Claim(sentence, "§3.5.1, Figure 3.2b", "it falls", worst, "below", 0.0)]
    for name, figure in ((ER, "3.1"), (BA, "3.3"), (TREE, "3.3")):
        found += _graph_claims(rows.where(graph=name), name, figure)
    middle = sorted(rows.where(graph=ER)[0]["orders"])[1]
    off = f"off {BINS[1]}"
    plain = rows.where(graph=ER, moments=middle)
    for name in (TREE, BA):
        words = f"{name}, needs more moments: with {middle} it is further off than Erdős–Rényi"
        reading = decades(rows.where(graph=name, moments=middle), plain, off)
        found.append(Claim(words, "§3.5.2", "many more", reading, unit=" decades"))
    return [*found, *_kernel_claims(rows.where(moments=KERNEL_ROW))]


def _kernel_claims(rows: Rows) -> list[Claim]:
    second, tenth = rows.paired("bias 2"), rows.paired("bias 10")
    found = Claims()
    sentence = f"a kernel of width {KERNEL:g} raises the second moment (share)"
    found.add(sentence, "Theorem 2", "biased upwards", mean_of(list(second.values())))
    sentence = f"a kernel of width {KERNEL:g} raises the tenth moment by a larger share"
    published = "more for higher moments"
    found.add(sentence, "Theorem 2", published, paired_difference(tenth, second))
    return found


def _graph_claims(rows: Rows, name: str, figure: str) -> list[Claim]:
    orders = sorted(rows[0]["orders"])
    first, last = (rows.where(moments=order) for order in (orders[0], orders[-1]))
    place = f"§3.5, Figure {figure}"
    sentence = (
        f"{name}: {orders[-1]} moments are nearer to the histogram than {orders[0]} ({BINS[0]}"
        " bins)"
    )
    reading = decades(first, last, f"off {BINS[0]}")
    near = Claim(sentence, place, "successively", reading, unit=" decades")
    if name == TREE:  # its spectrum fills the interval: there is no outside
        return [near]
    words = (
        f"{name}: less mass lies outside of the spectrum with {orders[-1]} moments than with"
        f" {orders[0]}"
    )
    return [near, Claim(words, place, "less", decades(first, last, "outside"), unit=" decades")]


def tables(rows: Rows) -> list[Table]:
    """Divergences of the semicircle, and how far random graphs' densities are off."""
    circle = rows.where(graph=SEMICIRCLE)
    out = [
        Table(
            "KL(semicircle‖p), exact moments",
            ("moments", "divergence"),
            tuple((str(row["moments"]), f"{row['kl']:.3g}") for row in circle),
        )
    ]
    columns = (*(f"off {bins}" for bins in BINS), "outside")
    for name in MODELS:
        part = rows.where(graph=name)
        lines = tuple(
            (str(order), *means(part.where(moments=order), *columns)) for order in part[0]["orders"]
        )
        header = (
            "moments",
            *(f"off in total variation, {bins} bins" for bins in BINS),
            "mass outside of the spectrum",
        )
        out.append(Table(f"{name}, n = {part[0]['nodes']:,}", header, lines))
    return out


def charts(rows: Rows) -> list[Chart]:
    """Figure 3.2, then Figures 3.1 and 3.3."""
    circle = rows.where(graph=SEMICIRCLE)
    drawn = [row for row in circle if "places" in row]
    places = np.linspace(0.0, 1.0, PLACES)
    truth = Series("semicircle", short(places), short(8 / np.pi * np.sqrt(places * (1 - places))))
    fits = [Series(f"{row['moments']} moments", row["places"], row["density"]) for row in drawn]
    falling = Series("KL(semicircle‖p)", circle.values("moments"), circle.values("kl"))
    out = []
    title = "The semicircle and its entropic spectra"
    out.append(Chart(title, "λ", "density", (truth, *fits), source="Figure 3.2a"))
    title = "Divergence from the semicircle"
    source = "Figure 3.2b"
    out.append(Chart(title, "moments", "divergence", (falling,), y_log=True, source=source))
    for name in MODELS:
        out += _graph_charts(rows.where(graph=name), name)
    return out


def _graph_charts(rows: Rows, name: str) -> list[Chart]:
    source = "Figure 3.1" if name == ER else "Figure 3.3"
    (seen,) = rows.where(moments=HISTOGRAM_ROW)
    bins = BINS[1] if name == ER else BINS[0]
    bars = Series("eigenvalues", seen[f"centres {bins}"], seen[f"heights {bins}"], style="step")
    fits = [
        Series(f"{row['moments']} moments", row["places"], row["density"])
        for row in rows.where(seed=0)
        if "places" in row
    ]
    off = tuple(
        curve(
            f"{bins} bins",
            Rows(row for row in rows if row["moments"] > 0),
            f"off {bins}",
            "moments",
        )
        for bins in BINS
    )
    out = []
    title = f"Spectrum of {name}, n = {seen['nodes']:,}"
    caption = f"Histogram of all eigenvalues in {bins} bins."
    out.append(Chart(title, "λ", "density", (bars, *fits), source=source, caption=caption))
    title = f"Distance from the histogram: {name}"
    out.append(Chart(title, "moments", "total variation", off, y_log=True, source=source))
    return out


EXPERIMENT = Experiment(
    "graph-spectra",
    "Entropic spectra of the semicircle and of random graphs",
    SPECTRAL,
    "§3.5, Figures 3.1–3.3",
    {
        "smoke": SpectraScale(120, 2, (3, 12, 24), (3, 5, 10), probes=20),
        "cpu": SpectraScale(5000, 5),
        "paper": SpectraScale(5000, 10),
    },
    *(cells, run, claims, tables, charts),
    sentences("""
        Barabási–Albert: a new node brings 5 edges, or 1, which gives the sharp peak of the text; it
          has no number.
        That it needs many more moments is judged at both; the second was added after the results
          were seen.
        Moments come from 100 probes without their share in the known null space (graphs.spectrum).
        Theorem 2 is read off all eigenvalues, with a Gaussian kernel; its binomial is over m, not
          r.
    """),
    size=(
        "Erdős–Rényi (p = 0.001) and Barabási–Albert graphs of n = 5,000, 3 to 100 moments; draws"
        " are not said."
    ),
)
