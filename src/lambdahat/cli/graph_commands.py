"""The arguments of ``lambdahat graph``; what each command does is in ``graphs``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lambdahat.cli.exits import EXIT_CODES, exit_codes
from lambdahat.cli.options import Json, Out, Quiet, Seed

graph_commands = typer.Typer(help="The spectrum of a graph: its density, clusters, likeness, random model.",
                             no_args_is_help=True)  # fmt: skip
READING = "How files are read"
GraphFiles = Annotated[list[Path], typer.Argument(help="Edge lists (SNAP, CSV), .gml, .mtx or .npz, also packed.")]
Format = Annotated[
    str | None, typer.Option(rich_help_panel=READING, help="edges, gml, mtx or npz.", show_default="by suffix")
]
Unweighted = Annotated[
    bool, typer.Option("--unweighted", rich_help_panel=READING, help="Give every edge the weight 1.")
]
Loops = Annotated[str, typer.Option(rich_help_panel=READING, help="drop or keep.")]
Duplicates = Annotated[str, typer.Option(rich_help_panel=READING, help="Listed again: max, sum, mean or refuse.")]
Directed = Annotated[
    str, typer.Option(rich_help_panel=READING, help="Two directions: max, sum, mean, mutual or refuse.")
]
MomentCount = Annotated[int, typer.Option(min=8, help="Chebyshev moments.")]
GraphProbes = Annotated[
    int | None, typer.Option(min=8, help="Random probes.", show_default="exact up to 1,000 nodes, else 100")
]


@graph_commands.command("spectrum", epilog=EXIT_CODES)
def graph_spectrum(
    files: GraphFiles,
    moments: MomentCount = 100,
    probes: GraphProbes = None,
    format: Format = None,
    unweighted: Unweighted = False,
    loops: Loops = "drop",
    duplicates: Duplicates = "max",
    directed: Directed = "max",
    seed: Seed = 0,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """The density of eigenvalues of the normalised Laplacian, of maximum entropy."""
    from lambdahat.cli.graphs import Reading, Shown, run_spectrum

    with exit_codes():
        reading = Reading(format, not unweighted, loops, duplicates, directed)
        code = run_spectrum(files, reading, moments, probes, seed, Shown(out, as_json, quiet))
    raise typer.Exit(code)


@graph_commands.command("clusters", epilog=EXIT_CODES)
def graph_clusters(
    files: GraphFiles,
    moments: MomentCount = 100,
    probes: GraphProbes = None,
    cut: Annotated[float | None, typer.Option(help="Count below this λ*.", show_default="the widest gap")] = None,
    labels: Annotated[bool, typer.Option("--labels", help="Each node's cluster too, by spectral clustering.")] = False,
    format: Format = None,
    unweighted: Unweighted = False,
    loops: Loops = "drop",
    duplicates: Duplicates = "max",
    directed: Directed = "max",
    seed: Seed = 0,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """How many clusters: the eigenvalues before the widest gap, with an error, or none where there is no gap."""
    from lambdahat.cli.graphs import Reading, Shown, run_clusters

    with exit_codes():
        reading = Reading(format, not unweighted, loops, duplicates, directed)
        code = run_clusters(files, reading, moments, probes, seed, cut, labels, Shown(out, as_json, quiet))
    raise typer.Exit(code)


@graph_commands.command("compare", epilog=EXIT_CODES)
def graph_compare(
    files: GraphFiles,
    moments: MomentCount = 100,
    probes: GraphProbes = None,
    format: Format = None,
    unweighted: Unweighted = False,
    loops: Loops = "drop",
    duplicates: Duplicates = "max",
    directed: Directed = "max",
    seed: Seed = 0,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """How alike graphs are: the divergence between every two spectra, as a table, a heat map and a tree."""
    from lambdahat.cli.graphs import Reading, Shown, run_compare

    with exit_codes():
        reading = Reading(format, not unweighted, loops, duplicates, directed)
        code = run_compare(files, reading, moments, probes, seed, Shown(out, as_json, quiet))
    raise typer.Exit(code)


@graph_commands.command("fit", epilog=EXIT_CODES)
def graph_fit(
    files: GraphFiles,
    model: Annotated[
        str | None,
        typer.Option(help="erdos_renyi, watts_strogatz or barabasi_albert.", show_default="all, the nearest first"),
    ] = None,
    moments: Annotated[
        int | None, typer.Option(min=8, help="Chebyshev moments.", show_default="20 with --model, else 30")
    ] = None,
    draws: Annotated[
        int | None,
        typer.Option(min=2, help="Random graphs for each parameter tried.", show_default="10 with --model, else 5"),
    ] = None,
    size: Annotated[
        int | None, typer.Option(min=4, help="Nodes of the random graphs.", show_default="the graph's, at most 1,000")
    ] = None,
    format: Format = None,
    unweighted: Unweighted = False,
    loops: Loops = "drop",
    duplicates: Duplicates = "max",
    directed: Directed = "max",
    seed: Seed = 0,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Which random graph model is nearest, and its parameter."""
    from lambdahat.cli.graphs import Reading, Shown, run_fit

    with exit_codes():
        reading = Reading(format, not unweighted, loops, duplicates, directed)
        code = run_fit(files, reading, model, moments, draws, size, seed, Shown(out, as_json, quiet))
    raise typer.Exit(code)
