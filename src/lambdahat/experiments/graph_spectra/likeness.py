"""Divergences between the spectra of real graphs of three kinds (Figure 3.4)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lambdahat.experiments.graph_spectra.graph_subjects import SUBJECTS, real_graph, stand_in
from lambdahat.experiments.kit.cells import Cell, Row, Rows, over_seeds
from lambdahat.experiments.kit.claims import MISSING, Claim, Claims, Table, mean_of
from lambdahat.experiments.kit.experiment import SPECTRAL, Experiment, sentences
from lambdahat.graphs.similarities import Similarity, similarity
from lambdahat.graphs.structure import Graph
from lambdahat.results.charts import Chart, Heat

COLLABORATIONS = ("ca-AstroPh", "ca-CondMat", "ca-GrQc", "ca-HepPh", "ca-HepTh")
ROADS = ("roadNet-CA", "roadNet-PA", "roadNet-TX")
SOCIAL = ("soc-brightkite", "gemsec-deezer-RO")
KINDS = {  # and those that they are or stand for in the thesis
    "collaboration graphs": (COLLABORATIONS, "citation networks"),
    "road graphs": (ROADS, "road networks"),
    "social graphs": (SOCIAL, "biological networks"),
}
PLACE = "§3.6.3, Figure 3.4"
UNIT = " decades over estimates of these graphs"


@dataclass(frozen=True)
class LikenessScale:
    """Moments, seeds of the probes, and the ``nodes`` of made graphs; 0 for the real ones."""

    seeds: int
    moments: int = 100
    nodes: int = 0


def cells(config: LikenessScale) -> list[Cell]:
    """A cell for each seed: the spectra of all graphs share one penalty."""
    return [
        {"moments": config.moments, "nodes": config.nodes, "seed": seed}
        for seed in range(config.seeds)
    ]


def run(cell: Cell, device: str) -> list[Row]:
    """The divergence of every two graphs, its error over the probes, and its noise floor."""
    names = (*COLLABORATIONS, *ROADS, *SOCIAL)
    found = [real_graph(name, cell["nodes"]) for name in names]
    named = [
        Graph(graph.adjacency, graph.names, name)
        for name, (graph, _) in zip(names, found, strict=True)
    ]
    near = similarity(named, cell["moments"], seed=cell["seed"])
    places = {name: (data, len(graph)) for name, (graph, data) in zip(names, found, strict=True)}
    return [
        {
            "one": a,
            "other": b,
            "divergence": near.divergences[i, j],
            "stderr": near.stderr[i, j],
            "floor": near.floors[i, j],
            "data": places[a][0],
            "size": places[a][1],
            "status": near.status.name,
        }
        for i, a in enumerate(near.names)
        for j, b in enumerate(near.names)
        if i != j
    ]


def claims(rows: Rows) -> list[Claim]:
    """Graphs of one kind are nearer to each other than to others; the graphs are fixed, and n
    counts estimates.

    The thesis's claim is of its eleven graphs; of those at hand all is a claim of ours.
    """
    found, unmet = Claims(), _unlike(rows)
    for words, (group, thesis) in KINDS.items():
        sentence = f"{thesis}: divergences within are much smaller than those to other kinds"
        reading = mean_of(_parting(rows, group, max, min))
        found.append(
            Claim(sentence, PLACE, "much smaller", reading, unit=UNIT, unmet=unmet, barrier=MISSING)
        )
        for of, bound, inner, outer in (("largest", 0.0, max, min), ("mean", 1.0, _mean, _mean)):
            less = "below the smallest" if of == "largest" else "less than a tenth of the mean"
            sentence = f"{words}: the {of} divergence within is {less} to all others"
            published = "other graphs"
            reading = mean_of(_parting(rows, group, inner, outer))
            found.add(sentence, "this work", published, reading, bound=bound, unit=UNIT, own=True)
    known = rows.where(one=COLLABORATIONS + ROADS, other=COLLABORATIONS + ROADS)
    return found + [
        Claim(
            f"{words}: the largest divergence within is below the smallest to {others}",
            "this work",
            "chosen after the results",
            mean_of(_parting(known, group, max, min)),
            unit=UNIT,
            own=True,
        )
        for words, group, others in (
            ("collaboration graphs", COLLABORATIONS, "roads"),
            ("road graphs", ROADS, "collaboration graphs"),
        )
    ]


def _unlike(rows: Rows) -> str:
    """Why these are not the thesis's graphs: no gene networks, and substitutes for its roads."""
    data = {name: rows.where(one=name)[0]["data"] for name in COLLABORATIONS + ROADS}
    taken = sorted(
        {found.partition(",")[0] for name, found in data.items() if stand_in(name, found)}
    )
    other = f", and in place of others are {', '.join(taken)}" if taken else ""
    return f"its gene networks are not at hand{other}"


Reduction = Callable[[Sequence[float]], float]


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def _parting(
    rows: Rows, group: Sequence[str], within: Reduction, outside: Reduction
) -> list[float]:
    """log₁₀ of outer over inner divergence, each reduced as said, for every seed."""
    out = []
    for seed in rows.distinct("seed"):
        part = rows.where(seed=seed, one=group)
        inner = [row["divergence"] for row in part if row["other"] in group]
        outer = [row["divergence"] for row in part if row["other"] not in group]
        out.append(math.log10(outside(outer) / within(inner)))
    return out


def similarity_of(rows: Rows) -> Similarity:
    """The mean over seeds as a result for ``lh.plot``, with the errors over one seed's probes."""
    names = rows.distinct("one")
    tables = {
        column: np.zeros((len(names), len(names))) for column in ("divergence", "stderr", "floor")
    }
    for i, a in enumerate(names):
        for j, b in enumerate(names):
            if i != j:
                for column, table in tables.items():
                    table[i, j] = over_seeds(rows.where(one=a, other=b), column).value
    labels = tuple(_label(rows.where(one=name)[0]) for name in names)
    return Similarity(labels, tables["divergence"], tables["stderr"], (), tables["floor"])


def _label(row: Row) -> str:
    """The graph that was measured, whatever it stands for."""
    return f"{row['one']} (made)" if row["data"].startswith("made") else str(row["data"])


def tables(rows: Rows) -> list[Table]:
    """What each graph is, and the divergences."""
    first = rows.where(seed=rows[0]["seed"])
    graphs = {row["one"]: row for row in first}
    about = tuple(
        (name, SUBJECTS[name].kind, row["data"], f"{row['size']:,}") for name, row in graphs.items()
    )
    found = similarity_of(rows)
    lines = tuple(
        (name, *(f"{value:.3g}" if i != j else "" for j, value in enumerate(found.divergences[i])))
        for i, name in enumerate(found.names)
    )
    count, moments = len(rows.distinct("seed")), rows[0]["moments"]
    out = []
    title = "The graphs of Figure 3.4, and what was taken for them"
    out.append(Table(title, ("graph", "kind", "data", "nodes"), about))
    title = f"Symmetric divergences, {moments} moments, mean of {count} seeds"
    out.append(Table(title, ("graph", *found.names), lines))
    return out


def charts(rows: Rows) -> list[Chart]:
    """The heat map of Figure 3.4, in decades."""
    found = similarity_of(rows)
    values = [
        [math.log10(value) if value > 0 else None for value in line] for line in found.divergences
    ]
    heat = Heat(list(found.names), list(found.names), values, "log₁₀ divergence")
    title = "Divergence between entropic spectra"
    caption = "Collaboration graphs first, then roads, then social networks."
    return [Chart(title, "graph", "graph", heat=heat, source="Figure 3.4", caption=caption)]


EXPERIMENT = Experiment(
    "graph-similarity",
    "Graphs of one kind have like spectra",
    SPECTRAL,
    "§3.6.3, Figure 3.4",
    {"smoke": LikenessScale(2, 16, 150), "cpu": LikenessScale(5), "paper": LikenessScale(10)},
    *(cells, run, claims, tables, charts),
    sentences("""
        The five collaboration graphs are the thesis's, read from <LAMBDAHAT_DATA>/graphs.
        Luxembourg's roads in three parts, cut by distance, stand for those of three states where
          their files lack.
        Two social networks stand for the three gene networks; what is said of human and mouse genes
          is not tested.
        The thesis's claim needs its gene and road networks, and is not judged; that of the graphs
          at hand is ours.
        The seeds are of the probes: n counts estimates of the same graphs.
        Collaborations against roads alone was asked after the stricter form had failed.
        Where no file is there, made graphs of each kind take their place, and the table says so.
        All spectra are fitted with one penalty; divergences depend on it and on the number of
          moments.
    """),
    size="3 biological, 5 citation and 3 road networks of SNAP, 100 moments.",
)
