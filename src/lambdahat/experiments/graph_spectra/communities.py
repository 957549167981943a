"""Numbers of clusters in large real graphs over the number of moments (Table 3.3, Figure 3.7)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lambdahat.experiments.graph_spectra.graph_subjects import (
    EGS,
    FIRST,
    first_count,
    first_moments,
    gap_count,
    lanczos_spectra,
    plain_moments,
    real_graph,
    stand_in,
)
from lambdahat.experiments.kit.cells import Cell, Row, Rows, curve
from lambdahat.experiments.kit.claims import (
    MISSING,
    Claim,
    Claims,
    Reading,
    Table,
    TableLines,
    mean_of,
    split_header,
)
from lambdahat.experiments.kit.experiment import SPECTRAL, Experiment, sentences
from lambdahat.graphs.cluster_counts import TOLERANCE, WIDTH, smoothed
from lambdahat.graphs.structure import Graph
from lambdahat.maxent import MaxentDensity, fit
from lambdahat.results.charts import Chart, Series, short

MOMENTS = (40, 70, 100)
PRINTED = {
    "DBLP": (22_150.0, 8_468.0, 8_313.0),
    "Amazon": (23_510.0, 11_460.0, 12_010.0),
    "YouTube": (4_023.0, 13_060.0, 19_000.0),
}
SETTLED = 0.1  # share by which a count may change from 70 to 100 moments
PLACES = 200  # of a curve
LANCZOS_PROBES = 5  # of the figure
PLACE = "§3.7.1.3, Table 3.3"
LAST = "over the last step in moments"
UNIT = " over estimates of this graph"


@dataclass(frozen=True)
class CommunityScale:
    """Seeds and probes; ``nodes`` of made graphs, 0 for the real ones."""

    seeds: int
    moments: tuple[int, ...] = MOMENTS
    probes: int = 100
    nodes: int = 0


def cells(config: CommunityScale) -> list[Cell]:
    """Graph × seed of the probes."""
    base = {"orders": list(config.moments), "probes": config.probes, "nodes": config.nodes}
    return [
        {**base, "graph": name, "seed": seed} for name in PRINTED for seed in range(config.seeds)
    ]


def run(cell: Cell, device: str) -> list[Row]:
    """Counts over the moments; the first seed also has the densities of Figure 3.7."""
    graph, data = real_graph(cell["graph"], cell["nodes"])
    orders = cell["orders"]
    common = {
        "data": data,
        "size": len(graph),
        "edges": graph.num_edges,
        "components": int(graph.components.max()) + 1,
    }
    measured, rows = plain_moments(graph, max(orders), cell["probes"], cell["seed"]), []
    for order in orders:
        density = fit(first_moments(measured, order), tol=TOLERANCE)
        for method, (found, cut) in (
            (FIRST, first_count(density, len(graph))),
            (EGS, gap_count(density, graph)),
        ):
            rows.append({"method": method, "moments": order, "found": found, "cut": cut})
    if cell["seed"] == 0:
        rows[-1] |= _curves(graph, density, max(orders))
    return [{**common, **row} for row in rows]


def _curves(graph: Graph, density: MaxentDensity, depth: int) -> Row:
    """The entropic density and smoothed Lanczos on [0, 1]."""
    places = 1 - np.cos(np.linspace(1e-3, math.pi / 2, PLACES))
    (spectrum,) = lanczos_spectra(graph, [min(depth, len(graph))], LANCZOS_PROBES, 0)
    return {
        "places": short(places),
        "density": short(density.evaluate(places)),
        "smoothed": short(smoothed(spectrum, places, WIDTH)),
    }


def claims(rows: Rows) -> list[Claim]:
    """DBLP and Amazon settle, YouTube does not; of a graph that stands for one of them our own
    claim is that it does.

    A graph is one graph, whatever the probes: n counts estimates of it.
    """
    found = Claims()
    for name, printed in PRINTED.items():
        part = rows.where(graph=name, method=FIRST)
        data, settles = part[0]["data"], name != "YouTube"
        change = f"{abs(printed[2] / printed[1] - 1):.1%}"
        words = f"the count changes by {'less' if settles else 'more'} than {SETTLED:.0%} {LAST}"
        found.add(
            f"{name}: {words}",
            PLACE,
            change,
            _change(part),
            "below" if settles else "above",
            SETTLED,
            unit=UNIT,
            unmet=stand_in(name, data),
            barrier=MISSING,
        )
        if stand_in(name, data):
            sentence = f"{data}: the count settles, changing by less than {SETTLED:.0%} {LAST}"
            published = "no such graph"
            reading = _change(part)
            found.add(
                sentence, "this work", published, reading, "below", SETTLED, unit=UNIT, own=True
            )
    return found


def _change(rows: Rows) -> Reading:
    """|N/N' − 1| from the last but one to the last number of moments, mean over the seeds."""
    before, after = sorted(rows.distinct("moments"))[-2:]
    early, late = (rows.where(moments=order).paired("found") for order in (before, after))
    return mean_of([abs(late[seed] / early[seed] - 1) for seed in late if seed in early])


def tables(rows: Rows) -> list[Table]:
    """Table 3.3: counts by the first minimum, and by the widest gap."""
    orders = sorted(rows.distinct("moments"))
    out = []
    for method in (FIRST, EGS):
        lines = TableLines()
        for name, printed in PRINTED.items():
            part = rows.where(graph=name, method=method)
            shown = dict(zip(MOMENTS, printed, strict=True))
            cells = [
                _count(part.where(moments=order), shown.get(order) if method == FIRST else None)
                for order in orders
            ]
            first = part[0]
            lines.add(
                f"{name}: {first['data']}", f"{first['size']:,}", f"{first['components']:,}", *cells
            )
        tail = " [thesis]" if method == FIRST else ""
        header = (
            *split_header("graph: data | nodes | components"),
            *(f"{order} moments{tail}" for order in orders),
        )
        title = "Clusters by the first minimum" if method == FIRST else "Clusters by the widest gap"
        out.append(Table(title, header, tuple(lines)))
    return out


def _count(rows: Rows, printed: float | None) -> str:
    found = [value for value in rows.values("found") if math.isfinite(value)]
    ours = str(mean_of(found)) if found else "no gap"
    return ours if printed is None else f"{ours} [{printed:,.0f}]"


def charts(rows: Rows) -> list[Chart]:
    """Counts over moments, and the densities."""
    out = []
    for name, printed in PRINTED.items():
        part = rows.where(graph=name)
        ours = curve("first minimum", part.where(method=FIRST), "found", "moments")
        theirs = Series(
            "first minimum, thesis", list(MOMENTS), list(printed), style="points", published=True
        )
        data = f"Data: {part[0]['data']}."
        out.append(
            Chart(
                f"{name}: number of clusters",
                "moments",
                "clusters",
                (ours, theirs),
                y_log=True,
                source="Table 3.3",
                caption=f"{data} The thesis's graph is larger.",
            )
        )
        (drawn,) = [row for row in part if "places" in row]
        lines = (
            Series(f"EGS, {drawn['moments']} moments", drawn["places"], drawn["density"]),
            Series(f"Lanczos, width {WIDTH:g}", drawn["places"], drawn["smoothed"]),
        )
        title = f"{name}: spectral density"
        out.append(
            Chart(title, "λ", "density", lines, y_log=True, source="Figure 3.7", caption=data)
        )
    return out


EXPERIMENT = Experiment(
    "graph-communities",
    "Numbers of clusters in large real graphs",
    SPECTRAL,
    "§3.7.1.3, Table 3.3, Figure 3.7",
    {
        "smoke": CommunityScale(2, (12, 18, 24), 10, 150),
        "cpu": CommunityScale(5),
        "paper": CommunityScale(10),
    },
    *(cells, run, claims, tables, charts),
    sentences("""
        DBLP, Amazon and YouTube are com-dblp, com-amazon and com-youtube.ungraph.* in
          <LAMBDAHAT_DATA>/graphs.
        Without them the largest components of ca-CondMat, ca-HepTh and soc-brightkite, or else made
          graphs.
        A claim about a named graph is not judged on another; whether the count of that settles is a
          claim of ours.
        The seeds are of the probes: n counts estimates of one graph.
        No graph at hand is one of products bought together; a second collaboration graph stands for
          Amazon.
        λ* is the first minimum, at its word (Algorithm 5); the widest gap is counted beside it.
    """),
    size="DBLP (317,080 nodes), Amazon (334,863) and YouTube (1,134,890).",
)
