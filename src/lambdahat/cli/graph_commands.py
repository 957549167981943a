"""The arguments of ``lambdahat graph``; what each command does is in ``graphs``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from lambdahat.cli.exits import EXIT_CODES, exit_codes
from lambdahat.cli.options import Output, Seed, with_groups

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
class Reading:
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


READ, SHOWN = Reading(), Output()


@graph_commands.command("spectrum", epilog=EXIT_CODES)
@with_groups
def graph_spectrum(
    files: GraphFiles,
    moments: MomentCount = 100,
    probes: GraphProbes = None,
    reading: Reading = READ,
    seed: Seed = 0,
    output: Output = SHOWN,
) -> None:
    """Maximum-entropy spectral density of the normalised Laplacian."""
    from lambdahat.cli.graphs import run_spectrum

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
    reading: Reading = READ,
    seed: Seed = 0,
    output: Output = SHOWN,
) -> None:
    """Number of clusters: eigenvalues below the widest gap, with an error and rival counts."""
    from lambdahat.cli.graphs import run_clusters

    with exit_codes():
        code = run_clusters(files, reading, moments, probes, seed, cut, labels, output)
    raise typer.Exit(code)


@graph_commands.command("compare", epilog=EXIT_CODES)
@with_groups
def graph_compare(
    files: GraphFiles,
    moments: MomentCount = 100,
    probes: GraphProbes = None,
    reading: Reading = READ,
    seed: Seed = 0,
    output: Output = SHOWN,
) -> None:
    """Divergence between the spectra of each pair of graphs: table, heat map and tree."""
    from lambdahat.cli.graphs import run_compare

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
    reading: Reading = READ,
    seed: Seed = 0,
    output: Output = SHOWN,
) -> None:
    """Fit the closest random-graph model and its parameter."""
    from lambdahat.cli.graphs import run_fit

    with exit_codes():
        code = run_fit(files, reading, model, moments, draws, size, seed, output)
    raise typer.Exit(code)
