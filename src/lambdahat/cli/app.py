"""The command and its arguments; what each command does is in the module that it imports.

The commands that look at a model are in ``model_commands``. Nothing heavy is imported before a
command runs, so that help, completion and misspelt names are answered at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lambdahat.cli.exits import EXIT_CODES, OK, output_path, require_writable
from lambdahat.cli.model_commands import advise, compare, init, landscape, measure
from lambdahat.cli.options import (
    App,
    GraphReading,
    Json,
    Kept,
    Output,
    Quiet,
    RecipeChoices,
    Seed,
    TrainingChoices,
    complete,
    out_option,
    require_known,
    with_groups,
    words,
)
from lambdahat.cli.watch import watch

app = App(
    name="lambdahat",
    help="Curvature and degeneracy of PyTorch models, with error bars.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
data_commands = App(help="List, download and verify data sets.", no_args_is_help=True)
graph_commands = App(
    help="Spectra of graphs: density, clusters, similarity, models.", no_args_is_help=True
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from lambdahat import __version__

        print(f"lambdahat {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and stop."
        ),
    ] = False,
) -> None:
    """Curvature and degeneracy of PyTorch models, with error bars."""


RESUMES = "finished results are kept; the same command resumes"
app.command()(init)
app.command(kept=(RESUMES, "pass --out to keep finished results"))(measure)
app.command()(compare)
app.command()(landscape)


TRAINING = TrainingChoices()


@app.command(
    kept=("the same command with --resume goes on", "pass --out to keep checkpoints"),
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
@with_groups
def train(
    context: typer.Context,
    recipe: RecipeChoices,
    choices: TrainingChoices = TRAINING,
    out: Annotated[Path | None, out_option("Folder for metrics, checkpoints, results.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Train a network and track its curvature. Options not listed go to the optimiser."""
    require_writable(out)
    require_known("model", recipe.model, "--model")
    require_known("data set", recipe.data, "--data")
    require_known("optimizer", choices.optimizer, "--optimizer")
    from lambdahat.cli.train import run_train

    return run_train(recipe, choices, context.args, out, as_json, quiet)


app.command()(watch)
app.command()(advise)


@app.command(
    kept=("finished cases are kept; the same command resumes", "pass --out to keep finished cases")
)
def verify(
    case: Annotated[str, typer.Option(metavar="GLOB", help="Only cases with such names.")] = "*",
    quick: Annotated[bool, typer.Option("--quick", help="One case per family.")] = False,
    seed: Seed = 0,
    out: Kept = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Check the learning coefficient against exact answers. It runs at its default settings."""
    require_writable(out)
    from lambdahat.cli.verifications import run_verify

    return run_verify(case, seed, quick, out, as_json, quiet)


@app.command(kept="finished cells are kept in {out}, and the same command goes on")
def reproduce(
    experiments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="EXPERIMENTS...",
            help="Experiment names; --list describes all.",
            autocompletion=complete("experiment"),
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All experiments.")] = False,
    listed: Annotated[
        bool, typer.Option("--list", help="List the experiments and their number of cells.")
    ] = False,
    scale: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="smoke (seconds), cpu (15 minutes on two cores) or paper (a GPU).",
            autocompletion=words("smoke", "cpu", "paper"),
        ),
    ] = "cpu",
    jobs: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Cells in parallel; a cluster uses all its workers."),
    ] = 1,
    backend: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Where cells run: loky (this machine), dask or ray.",
            autocompletion=words("loky", "dask", "ray"),
        ),
    ] = "loky",
    address: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Dask or ray cluster, or auto (ray).", show_default="a local one"
        ),
    ] = None,
    only: Annotated[
        str | None, typer.Option(metavar="TEXT", help='Only cells such as "alpha=0.1 seed=3".')
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="cpu or cuda.", autocompletion=words("cpu", "cuda"))
    ] = "cpu",
    resume: Annotated[
        bool, typer.Option("--resume/--fresh", help="Keep finished cells, or start over.")
    ] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Forecast the remaining time from a few epochs.")
    ] = False,
    out: Annotated[Path, out_option("Folder for rows, tables and page.")] = Path("reproductions"),
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Reproduce published experiments and report which claims hold."""
    if not (dry_run or listed):
        require_writable(out)
    for name in experiments or ():
        require_known("experiment", name, "EXPERIMENT", "--list describes them")
    from lambdahat.cli.reproduce import (
        ExperimentChoices,
        list_experiments,
        run_forecast,
        run_reproduce,
        select_names,
    )

    if listed:
        list_experiments()
        return OK
    choices = ExperimentChoices(out, scale, jobs, backend, address, only, device, resume)
    names = select_names(experiments, everything)
    if dry_run:
        return run_forecast(names, choices, as_json, quiet)
    return run_reproduce(names, choices, as_json, quiet)


@app.command(kept=("finished tasks are kept", ""))
def bench(
    peers: Annotated[
        bool, typer.Option("--peers", help="Also time the other installed libraries.")
    ] = False,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="cpu or cuda.", autocompletion=words("cpu", "cuda"))
    ] = "cpu",
    only: Annotated[
        str, typer.Option(metavar="GLOB", help="Only such families; one without a match lists all.")
    ] = "*",
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny sizes, to check that it runs.")
    ] = False,
    rounds: Annotated[
        int, typer.Option(min=1, metavar="N", help="Interleaved rounds; medians are reported.")
    ] = 9,
    against: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Reference bench.json; exit with 1 if slower."),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(metavar="X", help="Relative slowdown that counts as slower.")
    ] = 0.15,
    out: Annotated[Path | None, out_option("Folder for tables, figure and bench.json.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Benchmark time, error and memory. The unit is a gradient; --peers adds other libraries."""
    require_writable(out)
    from lambdahat.bench.plans import Plan
    from lambdahat.cli.bench_command import run_bench

    return run_bench(
        Plan(device, peers, quick, rounds), only, out, against, tolerance, as_json, quiet
    )


@app.command()
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDERS...", help="Folders with experiment rows or saved results."),
    ],
    out: Annotated[Path, out_option("The page to write.")] = Path("report.html"),
    quiet: Quiet = False,
) -> int:
    """Write one HTML page of stored experiments and measurements."""
    require_writable(out, file=True)
    from lambdahat.cli.reproduce import run_report

    return run_report(folders, out, quiet)


@app.command(kept="finished results are kept")
def demo(
    out: Annotated[Path, out_option("Folder for figures, tables and results.")] = Path(
        "lambdahat-demo"
    ),
    seed: Seed = 0,
    quiet: Quiet = False,
) -> int:
    """Compare SGD and NGD on digits. Tests the NGD paper's claims and writes a page of them."""
    require_writable(out)
    from lambdahat.cli.reproduce import run_demo

    return run_demo(out, seed, quiet)


DataFolder = Annotated[
    Path | None,
    typer.Option(
        parser=output_path,
        metavar="PATH",
        help="Data folder.",
        show_default="LAMBDAHAT_DATA, else the user's",
    ),
]


@data_commands.command("list")
def list_data(as_json: Json = False) -> int:
    """List every data set and the location of its files."""
    from lambdahat.cli.data_commands import run_list

    return run_list(as_json)


@data_commands.command("fetch", kept="what has come is kept; the same command continues")
def fetch_data(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAMES...",
            help="Data set names; an unknown name lists all.",
            autocompletion=complete("data set"),
        ),
    ],
    folder: DataFolder = None,
    mirror: Annotated[
        str | None, typer.Option(metavar="URL", help="Base URL of another mirror.")
    ] = None,
    quiet: Quiet = False,
) -> int:
    """Download and verify data sets; an interrupted download resumes."""
    for name in names:
        require_known("data set", name, "data set")
    from lambdahat.cli.data_commands import run_fetch

    return run_fetch(names, folder, mirror, quiet)


@data_commands.command("check")
def check_data(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAMES...",
            help="Data set names.",
            show_default="all present",
            autocompletion=complete("data set"),
        ),
    ] = None,
    folder: DataFolder = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Compare files with their published checksums.

    If none is published, only the size is compared.
    """
    for name in names or ():
        require_known("data set", name, "data set")
    from lambdahat.cli.data_commands import run_check

    return run_check(names or [], folder, as_json, quiet)


GraphFiles = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILES...", help="Edge lists (SNAP, CSV), .gml, .mtx or .npz, also compressed."
    ),
]
MomentCount = Annotated[int, typer.Option(min=8, metavar="N", help="Chebyshev moments.")]
GraphProbes = Annotated[
    int | None,
    typer.Option(
        min=8, metavar="N", help="Random probes.", show_default="exact up to 1,000 nodes, else 100"
    ),
]
READ, SHOWN = GraphReading(), Output()


@graph_commands.command("spectrum")
@with_groups
def graph_spectrum(
    files: GraphFiles,
    moments: MomentCount = 100,
    probes: GraphProbes = None,
    seed: Seed = 0,
    reading: GraphReading = READ,
    output: Output = SHOWN,
) -> int:
    """Maximum-entropy spectral density of the normalised Laplacian."""
    from lambdahat.cli.graph_commands import run_spectrum

    return run_spectrum(files, reading, moments, probes, seed, output)


@graph_commands.command("clusters")
@with_groups
def graph_clusters(
    files: GraphFiles,
    moments: MomentCount = 100,
    probes: GraphProbes = None,
    cut: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Count eigenvalues below this λ*.", show_default="the widest gap"
        ),
    ] = None,
    labels: Annotated[
        bool, typer.Option("--labels", help="Also label the nodes by spectral clustering.")
    ] = False,
    seed: Seed = 0,
    reading: GraphReading = READ,
    output: Output = SHOWN,
) -> int:
    """Number of clusters, with an error. Counts eigenvalues below the widest gap."""
    from lambdahat.cli.graph_commands import run_clusters

    return run_clusters(files, reading, moments, probes, seed, cut, labels, output)


@graph_commands.command("compare")
@with_groups
def graph_compare(
    files: GraphFiles,
    moments: MomentCount = 100,
    probes: GraphProbes = None,
    seed: Seed = 0,
    reading: GraphReading = READ,
    output: Output = SHOWN,
) -> int:
    """Divergence between the spectra of each pair of graphs."""
    from lambdahat.cli.graph_commands import run_similarity

    return run_similarity(files, reading, moments, probes, seed, output)


@graph_commands.command("fit")
@with_groups
def graph_fit(
    files: GraphFiles,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="erdos_renyi, watts_strogatz or barabasi_albert.",
            show_default="all",
            autocompletion=words("erdos_renyi", "watts_strogatz", "barabasi_albert"),
        ),
    ] = None,
    moments: Annotated[
        int | None,
        typer.Option(
            min=8, metavar="N", help="Chebyshev moments.", show_default="20 with --model, else 30"
        ),
    ] = None,
    draws: Annotated[
        int | None,
        typer.Option(
            min=2, metavar="N", help="Graphs per value.", show_default="10 with --model, else 5"
        ),
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(
            min=4, metavar="N", help="Nodes per graph.", show_default="the graph's, at most 1,000"
        ),
    ] = None,
    seed: Seed = 0,
    reading: GraphReading = READ,
    output: Output = SHOWN,
) -> int:
    """Fit the closest random-graph model and its parameter."""
    from lambdahat.cli.graph_commands import run_fit

    return run_fit(files, reading, model, moments, draws, size, seed, output)


app.add_typer(data_commands, name="data")
app.add_typer(graph_commands, name="graph")
