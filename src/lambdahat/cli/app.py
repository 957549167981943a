"""The command and its arguments; what each command does is in the module that it imports.

The commands that look at a model are in ``model_commands``. Nothing heavy is imported before a
command runs, so that help, completion and misspelt names are answered at once.
"""

from __future__ import annotations

from pathlib import Path

import typer

from lambdahat.cli import options
from lambdahat.cli.exits import EXIT_CODES, OK, output_path, require_writable
from lambdahat.cli.model_commands import advise, compare, init, landscape, measure
from lambdahat.cli.watch import watch

app = options.App(
    name="lambdahat",
    help="Curvature and degeneracy of PyTorch models, with error bars.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
data_commands = options.App(help="List, download and verify data sets.", no_args_is_help=True)
graph_commands = options.App(
    help="Spectra of graphs: density, clusters, similarity, models.", no_args_is_help=True
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from lambdahat import __version__

        print(f"lambdahat {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False,
        "--version",
        callback=_print_version,
        is_eager=True,
        help="Print the version and stop.",
    ),
) -> None:
    """Curvature and degeneracy of PyTorch models, with error bars."""


RESUMES = "finished results are kept; the same command resumes"
app.command()(init)
app.command(kept=(RESUMES, "pass --out to keep finished results"))(measure)
app.command()(compare)
app.command()(landscape)


@app.command(
    kept=("the same command with --resume goes on", "pass --out to keep checkpoints"),
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def train(
    *,
    context: typer.Context,
    recipe: options.RecipeChoices,
    choices: options.TrainingChoices,
    output: options.Output = options.out_option("Folder for metrics, checkpoints, results."),
) -> int:
    """Train a network and track its curvature. Options not listed go to the optimiser."""
    require_writable(output.out)
    options.require_known("model", recipe.model, "--model")
    options.require_known("data set", recipe.data, "--data")
    options.require_known("optimizer", choices.optimizer, "--optimizer")
    from lambdahat.cli.train import run_train

    return run_train(recipe, choices, context.args, output)


app.command()(watch)
app.command()(advise)


@app.command(
    kept=("finished cases are kept; the same command resumes", "pass --out to keep finished cases")
)
def verify(
    case: str = options.option("Only cases with such names.", "*", "GLOB"),
    quick: bool = options.option("One case per family.", False),
    seed: int = options.SEED,
    output: options.Output = options.KEPT,
) -> int:
    """Check the learning coefficient against exact answers. All settings are at their defaults."""
    require_writable(output.out)
    from lambdahat.cli.verifications import run_verify

    return run_verify(case, seed, quick, output)


@app.command(kept="finished cells are kept in {out}, and the same command goes on")
def reproduce(
    *,
    experiments: list[str] | None = options.argument(
        "Experiment names; --list describes all.", None, "EXPERIMENTS...", complete="experiment"
    ),
    everything: bool = options.option("All experiments.", False, "", "--all"),
    listed: bool = options.option(
        "List the experiments and their number of cells.", False, "", "--list"
    ),
    choices: options.SweepChoices,
    dry_run: bool = options.option("Forecast the remaining time from a few epochs.", False),
    out: Path = options.out_option("Folder for rows, tables and page.", Path("reproductions")),
    as_json: bool = options.JSON,
    quiet: bool = options.QUIET,
) -> int:
    """Reproduce published experiments and report which claims hold."""
    if not (dry_run or listed):
        require_writable(out)
    for name in experiments or ():
        options.require_known("experiment", name, "EXPERIMENT", "--list describes them")
    from lambdahat.cli.reproduce import list_experiments, run_forecast, run_reproduce, select_names

    if listed:
        list_experiments()
        return OK
    names = select_names(experiments, everything)
    if dry_run:
        return run_forecast(names, out, choices, as_json, quiet)
    return run_reproduce(names, out, choices, as_json, quiet)


@app.command(kept=("finished tasks are kept", ""))
def bench(
    peers: bool = options.option("Also time the other installed libraries.", False),
    device: str = options.option("cpu or cuda.", "cpu", complete=options.DEVICES),
    only: str = options.option("Only such families; one without a match lists all.", "*", "GLOB"),
    quick: bool = options.option("Tiny sizes, to check that it runs.", False),
    rounds: int = options.option("Interleaved rounds; medians are reported.", 9, min=1),
    against: Path | None = options.option("Reference bench.json; exit with 1 if slower."),
    tolerance: float = options.option("Relative slowdown that counts as slower.", 0.15),
    output: options.Output = options.out_option("Folder for tables, figure and bench.json."),
) -> int:
    """Benchmark time, error and memory. The unit is a gradient; --peers adds other libraries."""
    require_writable(output.out)
    from lambdahat.bench.plans import Plan
    from lambdahat.cli.bench_command import run_bench

    return run_bench(Plan(device, peers, quick, rounds), only, against, tolerance, output)


@app.command()
def report(
    folders: list[Path] = options.argument(
        "Folders with experiment rows or saved results.", ..., "FOLDERS..."
    ),
    out: Path = options.out_option("The page to write.", Path("report.html")),
    quiet: bool = options.QUIET,
) -> int:
    """Write one HTML page of stored experiments and measurements."""
    require_writable(out, file=True)
    from lambdahat.cli.reproduce import run_report

    return run_report(folders, out, quiet)


@app.command(kept="finished results are kept")
def demo(
    out: Path = options.out_option(
        "Folder for figures, tables and results.", Path("lambdahat-demo")
    ),
    seed: int = options.SEED,
    quiet: bool = options.QUIET,
) -> int:
    """Compare SGD and NGD on digits. Test the NGD paper's claims and write a page of results."""
    require_writable(out)
    from lambdahat.cli.reproduce import run_demo

    return run_demo(out, seed, quiet)


DATA_FOLDER = options.option(
    "Data folder.", None, "PATH", shown="LAMBDAHAT_DATA, else the user's", parser=output_path
)


@data_commands.command("list")
def list_data(as_json: bool = options.JSON) -> int:
    """List every data set and the location of its files."""
    from lambdahat.cli.data_commands import run_list

    return run_list(as_json)


@data_commands.command("fetch", kept="what has come is kept; the same command continues")
def fetch_data(
    names: list[str] = options.argument(
        "Data set names; an unknown name lists all.", ..., "NAMES...", complete="data set"
    ),
    folder: Path | None = DATA_FOLDER,
    mirror: str | None = options.option("Base URL of another mirror.", None, "URL"),
    quiet: bool = options.QUIET,
) -> int:
    """Download and verify data sets; an interrupted download resumes."""
    for name in names:
        options.require_known("data set", name, "data set")
    from lambdahat.cli.data_commands import run_fetch

    return run_fetch(names, folder, mirror, quiet)


@data_commands.command("check")
def check_data(
    names: list[str] | None = options.argument(
        "Data set names.", None, "NAMES...", shown="all present", complete="data set"
    ),
    folder: Path | None = DATA_FOLDER,
    as_json: bool = options.JSON,
    quiet: bool = options.QUIET,
) -> int:
    """Compare files with their published checksums.

    If none is published, only the size is compared.
    """
    for name in names or ():
        options.require_known("data set", name, "data set")
    from lambdahat.cli.data_commands import run_check

    return run_check(names or [], folder, as_json, quiet)


GRAPHS = options.argument(
    "Edge lists (SNAP, CSV), .gml, .mtx or .npz, also compressed.", ..., "FILES..."
)
MOMENTS = options.option("Chebyshev moments.", 100, min=8)
PROBES = options.option("Random probes.", shown="exact up to 1,000 nodes, else 100", min=8)


@graph_commands.command("spectrum")
def graph_spectrum(
    *,
    files: list[Path] = GRAPHS,
    moments: int = MOMENTS,
    probes: int | None = PROBES,
    seed: int = options.SEED,
    reading: options.GraphReading,
    output: options.Output,
) -> int:
    """Maximum-entropy spectral density of the normalised Laplacian."""
    from lambdahat.cli.graph_commands import run_spectrum

    return run_spectrum(files, reading, output, moments=moments, probes=probes, seed=seed)


@graph_commands.command("clusters")
def graph_clusters(
    *,
    files: list[Path] = GRAPHS,
    moments: int = MOMENTS,
    probes: int | None = PROBES,
    cut: float | None = options.option("Count eigenvalues below this λ*.", shown="the widest gap"),
    labels: bool = options.option("Also label the nodes by spectral clustering.", False),
    seed: int = options.SEED,
    reading: options.GraphReading,
    output: options.Output,
) -> int:
    """Number of clusters, with an error. Counts eigenvalues below the widest gap."""
    from lambdahat.cli.graph_commands import run_clusters

    question = {"moments": moments, "probes": probes, "seed": seed, "cut": cut, "labels": labels}
    return run_clusters(files, reading, output, **question)


@graph_commands.command("compare")
def graph_compare(
    *,
    files: list[Path] = GRAPHS,
    moments: int = MOMENTS,
    probes: int | None = PROBES,
    seed: int = options.SEED,
    reading: options.GraphReading,
    output: options.Output,
) -> int:
    """Divergence between the spectra of each pair of graphs."""
    from lambdahat.cli.graph_commands import run_similarity

    return run_similarity(files, reading, output, moments=moments, probes=probes, seed=seed)


@graph_commands.command("fit")
def graph_fit(
    *,
    files: list[Path] = GRAPHS,
    model: str | None = options.option(
        "erdos_renyi, watts_strogatz or barabasi_albert.",
        shown="all",
        complete=("erdos_renyi", "watts_strogatz", "barabasi_albert"),
    ),
    moments: int | None = options.option(
        "Chebyshev moments.", shown="20 with --model, else 30", min=8
    ),
    draws: int | None = options.option("Graphs per value.", shown="10 with --model, else 5", min=2),
    size: int | None = options.option(
        "Nodes per graph.", shown="the graph's, at most 1,000", min=4
    ),
    seed: int = options.SEED,
    reading: options.GraphReading,
    output: options.Output,
) -> int:
    """Fit the closest random-graph model and its parameter."""
    from lambdahat.cli.graph_commands import run_fit

    question = {"moments": moments, "draws": draws, "size": size, "seed": seed}
    return run_fit(files, reading, output, model, **question)


app.add_typer(data_commands, name="data")
app.add_typer(graph_commands, name="graph")
