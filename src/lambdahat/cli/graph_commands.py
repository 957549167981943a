"""The arguments of ``lambdahat graph``; what each command does is in ``graphs``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from lambdahat.cli.exits import EXIT_CODES, OK, code_of, exit_codes, require_writable, say
from lambdahat.cli.measurements import bars
from lambdahat.cli.options import Output, Seed, with_groups
from lambdahat.cli.printing import print_json, print_table
from lambdahat.graphs import (
    Clusters,
    Graph,
    ModelChoice,
    ModelFit,
    Similarity,
    clusters,
    fit_model,
    graph,
    similarity,
    spectrum,
    which_model,
)
from lambdahat.report.figures import plot, save_figure
from lambdahat.results import Estimate, Result
from lambdahat.results.charts import value_text

graph_commands = typer.Typer(
    help="Spectra of graphs: density, clusters, similarity, random-graph model.",
    no_args_is_help=True,
)
READING = "Reading files"
GraphFiles = Annotated[
    list[Path], typer.Argument(help="Edge lists (SNAP, CSV), .gml, .mtx or .npz, also compressed.")
]
MomentCount = Annotated[int, typer.Option(min=8, help="Chebyshev moments.")]
GraphProbes = Annotated[
    int | None,
    typer.Option(min=8, help="Random probes.", show_default="exact up to 1,000 nodes, else 100"),
]


@dataclass(frozen=True)
class GraphReading:
    """How graph files are read."""

    format: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=READING, help="edges, gml, mtx or npz.", show_default="by suffix"
        ),
    ] = None
    unweighted: Annotated[
        bool,
        typer.Option("--unweighted", rich_help_panel=READING, help="Give every edge the weight 1."),
    ] = False
    loops: Annotated[
        str, typer.Option(rich_help_panel=READING, help="Self-loops: drop or keep.")
    ] = "drop"
    duplicates: Annotated[
        str, typer.Option(rich_help_panel=READING, help="Repeated edges: max, sum, mean or refuse.")
    ] = "max"
    directed: Annotated[
        str,
        typer.Option(
            rich_help_panel=READING, help="Unequal directions: max, sum, mean, mutual or refuse."
        ),
    ] = "max"


READ, SHOWN = GraphReading(), Output()


@graph_commands.command("spectrum", epilog=EXIT_CODES)
@with_groups
def graph_spectrum(
    files: GraphFiles,
    moments: MomentCount = 100,
    probes: GraphProbes = None,
    reading: GraphReading = READ,
    seed: Seed = 0,
    output: Output = SHOWN,
) -> None:
    """Maximum-entropy spectral density of the normalised Laplacian."""

    with exit_codes():
        code = run_spectrum(files, reading, moments, probes, seed, output)
    raise typer.Exit(code)


@graph_commands.command("clusters", epilog=EXIT_CODES)
@with_groups
def graph_clusters(
    files: GraphFiles,
    moments: MomentCount = 100,
    probes: GraphProbes = None,
    cut: Annotated[
        float | None,
        typer.Option(help="Count eigenvalues below this λ*.", show_default="the widest gap"),
    ] = None,
    labels: Annotated[
        bool, typer.Option("--labels", help="Also label the nodes by spectral clustering.")
    ] = False,
    reading: GraphReading = READ,
    seed: Seed = 0,
    output: Output = SHOWN,
) -> None:
    """Number of clusters: eigenvalues below the widest gap, with an error and rival counts."""

    with exit_codes():
        code = run_clusters(files, reading, moments, probes, seed, cut, labels, output)
    raise typer.Exit(code)


@graph_commands.command("compare", epilog=EXIT_CODES)
@with_groups
def graph_compare(
    files: GraphFiles,
    moments: MomentCount = 100,
    probes: GraphProbes = None,
    reading: GraphReading = READ,
    seed: Seed = 0,
    output: Output = SHOWN,
) -> None:
    """Divergence between the spectra of each pair of graphs: table, heat map and tree."""

    with exit_codes():
        code = run_compare(files, reading, moments, probes, seed, output)
    raise typer.Exit(code)


@graph_commands.command("fit", epilog=EXIT_CODES)
@with_groups
def graph_fit(
    files: GraphFiles,
    model: Annotated[
        str | None,
        typer.Option(
            help="erdos_renyi, watts_strogatz or barabasi_albert.",
            show_default="all, closest first",
        ),
    ] = None,
    moments: Annotated[
        int | None,
        typer.Option(min=8, help="Chebyshev moments.", show_default="20 with --model, else 30"),
    ] = None,
    draws: Annotated[
        int | None,
        typer.Option(
            min=2, help="Random graphs per parameter value.", show_default="10 with --model, else 5"
        ),
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(
            min=4, help="Nodes of the random graphs.", show_default="the graph's, at most 1,000"
        ),
    ] = None,
    reading: GraphReading = READ,
    seed: Seed = 0,
    output: Output = SHOWN,
) -> None:
    """Fit the closest random-graph model and its parameter."""

    with exit_codes():
        code = run_fit(files, reading, model, moments, draws, size, seed, output)
    raise typer.Exit(code)


def graphs_of(files: Sequence[Path], reading: GraphReading, output: Output) -> Iterator[Graph]:
    """One graph after the other, named by its file, with a number where two files have one name."""
    require_writable(output.out)
    seen: set[str] = set()
    for file in files:
        with bars(output.quiet):
            one = graph(
                file,
                format=reading.format,
                weighted=not reading.unweighted,
                loops=reading.loops,
                duplicates=reading.duplicates,
                directed=reading.directed,
            )
        name, number = one.name, 1
        while name in seen:
            number += 1
            name = f"{one.name}-{number}"
        seen.add(name)
        yield graph(one, loops="keep", name=name)


def write(output: Output, name: str, result: Result) -> None:
    """The result and its figure into the folder, where one was named."""
    if output.out is None:
        return
    result.save(output.out / f"{name}.json")
    drawn = plot(result)
    save_figure(drawn, output.out / f"{name}.png")


def show(
    output: Output,
    document: Any,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    title: str = "",
) -> None:
    """The table, or the JSON document."""
    if output.as_json:
        print_json(document)
    elif not output.quiet:
        print_table(header, rows, title)
        if output.out is not None:
            print(f"written to {output.out}")


def run_spectrum(
    files: Sequence[Path],
    reading: GraphReading,
    moments: int,
    probes: int | None,
    seed: int,
    output: Output,
) -> int:
    """The entropic spectrum of every file."""
    documents, rows, statuses = [], [], []
    for one in graphs_of(files, reading, output):
        with bars(output.quiet):
            found = spectrum(one, moments, probes, seed)
        write(output, f"spectrum-{one.name}", found)
        statuses.append(found.status)
        about = _about(one)
        low, middle, high = (float(x) for x in found.density.quantile([0.05, 0.5, 0.95]))
        documents.append(
            {
                **about,
                "entropy": found.density.entropy(),
                "quantiles": {"0.05": low, "0.5": middle, "0.95": high},
                "moments": found.moments.values.tolist(),
                "stderr": found.moments.stderr.tolist(),
                "products": found.cost,
                "status": found.status.name,
            }
        )
        rows.append(
            (
                one.name,
                f"{about['nodes']:,}",
                f"{about['edges']:,}",
                f"{about['components']:,}",
                f"{about['isolated']:,}",
                f"{found.density.entropy():.4g}",
                f"{low:.3g}, {middle:.3g}, {high:.3g}",
                f"{found.cost:,}",
                found.status.name,
            )
        )
    header = (
        "graph",
        "nodes",
        "edges",
        "components",
        "isolated",
        "entropy",
        "5, 50, 95 % of λ",
        "products",
        "status",
    )
    show(output, documents, header, rows)
    return code_of(statuses)


def run_clusters(
    files: Sequence[Path],
    reading: GraphReading,
    moments: int,
    probes: int | None,
    seed: int,
    cut: float | None,
    labels: bool,
    output: Output,
) -> int:
    """The number of clusters of every file."""
    documents, rows, found = [], [], []
    for one in graphs_of(files, reading, output):
        with bars(output.quiet):
            result = clusters(one, moments, probes, seed, cut, labels)
        write(output, f"clusters-{one.name}", result)
        found.append((one.name, result))
        documents.append({**_about(one), **_clusters_document(one, result)})
        gap = f"{result.gaps[0].low:.3g} … {result.gaps[0].high:.3g}" if result.gaps else ""
        known = math.isfinite(result.cut)
        rivals = ", ".join(
            f"{count} ({weight:.0%})" for count, weight in list(result.rivals.items())[1:4]
        )
        rows.append(
            (
                one.name,
                f"{len(one):,}",
                value_text(result) if known else "none",
                f"{result.cut:.3g}" if known else "",
                gap,
                rivals,
                f"{result.components:,}",
                f"{result.cost:,}",
                result.status.name,
            )
        )
    header = (
        "graph",
        "nodes",
        "clusters",
        "λ*",
        "gap",
        "rivals",
        "components",
        "products",
        "status",
    )
    show(output, documents, header, rows)
    for name, result in found:
        if not result.status.ok:
            say(f"{name}: {result.status.name}. {result.status.value}")
    return code_of(result.status for _, result in found)


def run_compare(
    files: Sequence[Path],
    reading: GraphReading,
    moments: int,
    probes: int | None,
    seed: int,
    output: Output,
) -> int:
    """The divergences between the files' spectra."""
    compared = list(graphs_of(files, reading, output))
    with bars(output.quiet):
        found = similarity(compared, moments, probes, seed)
    write(output, "similarity", found)
    order = found.order()
    header = ("", *(found.names[i] for i in order))
    rows = [(found.names[i], *(_divergence(found, i, j) for j in order)) for i in order]
    document = {
        "names": found.names,
        "divergences": found.divergences.tolist(),
        "stderr": found.stderr.tolist(),
        "status": found.status.name,
    }
    show(output, document, header, rows, "symmetric KL divergence between spectra")
    return code_of([found.status])


def run_fit(
    files: Sequence[Path],
    reading: GraphReading,
    model: str | None,
    moments: int | None,
    draws: int | None,
    size: int | None,
    seed: int,
    output: Output,
) -> int:
    """Fit one random model to every file, or all models, and name the nearest."""
    given: dict[str, Any] = {"moments": moments, "draws": draws, "size": size, "seed": seed}
    given = {name: value for name, value in given.items() if value is not None}
    documents, rows = [], []
    for one in graphs_of(files, reading, output):
        with bars(output.quiet):
            found = which_model(one, **given) if model is None else fit_model(one, model, **given)
        write(output, f"fit-{one.name}", found)
        for fit in found.fits if isinstance(found, ModelChoice) else (found,):
            documents.append({"name": one.name, **_fit_document(fit)})
            rows.append(
                (
                    one.name,
                    fit.model,
                    f"{fit.parameter} = {value_text(fit)}",
                    f"{fit.divergence:.4g}",
                    f"{fit.typical:.2g}",
                    f"{fit.size:,}",
                    f"{fit.cost:,}",
                )
            )
    header = ("graph", "model", "parameter", "divergence", "typical", "nodes", "graphs drawn")
    show(output, documents, header, rows)
    return OK


def _about(one: Graph) -> dict[str, Any]:
    return {
        "name": one.name,
        "nodes": len(one),
        "edges": one.num_edges,
        "components": int(one.components.max()) + 1,
        "isolated": int((one.degrees == 0).sum()),
    }


def _clusters_document(one: Graph, result: Clusters) -> dict[str, Any]:
    gaps = [
        {"count": gap.count, "cut": gap.cut, "low": gap.low, "high": gap.high, "weight": gap.weight}
        for gap in result.gaps
    ]
    labels = None
    if result.labels is not None:
        names = range(len(one)) if one.names is None else one.names
        labels = {str(name): int(label) for name, label in zip(names, result.labels, strict=True)}
    return {
        "clusters": result.value,
        "stderr": result.stderr,
        "cut": result.cut,
        "gaps": gaps,
        "products": result.cost,
        "status": result.status.name,
        "labels": labels,
    }


def _divergence(found: Similarity, i: int, j: int) -> str:
    if i == j:
        return "0"
    return value_text(
        Estimate(float(found.divergences[i, j]), float(found.stderr[i, j]))
    ).removesuffix(" (exact)")


def _fit_document(fit: ModelFit) -> dict[str, Any]:
    return {
        "model": fit.model,
        "parameter": fit.parameter,
        "value": fit.value,
        "stderr": fit.stderr,
        "divergence": fit.divergence,
        "typical": fit.typical,
        "size": fit.size,
        "neighbours": fit.neighbours,
        "graphs_drawn": fit.cost,
    }
