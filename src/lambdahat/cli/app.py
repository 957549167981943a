"""The command and its arguments; what each command does is in the module of its name.

The arguments of commands for models, data and graphs are in ``model_commands``, ``data_commands``,
``graph_commands``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lambdahat.cli.data_commands import data_commands
from lambdahat.cli.exits import EXIT_CODES, OK, exit_codes, require_writable
from lambdahat.cli.graph_commands import graph_commands
from lambdahat.cli.model_commands import advise, compare, landscape, measure
from lambdahat.cli.new_problem import init
from lambdahat.cli.options import Json, Kept, Quiet, Seed, out_option
from lambdahat.cli.watch import watch

app = typer.Typer(
    name="lambdahat",
    help="Curvature and degeneracy of PyTorch models, with error bars.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
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


app.command(epilog=EXIT_CODES)(init)
app.command(epilog=EXIT_CODES)(measure)
app.command(epilog=EXIT_CODES)(compare)
app.command(epilog=EXIT_CODES)(landscape)
TRAINING = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(epilog=EXIT_CODES, context_settings=TRAINING)
def train(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="Network name; an unknown name lists all.")],
    data: Annotated[str, typer.Option(help="Data set name, as in `lambdahat data list`.")],
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training data.")] = 10,
    optimizer: Annotated[
        str, typer.Option(help="Optimiser name; pass its options as --name value.")
    ] = "sgd",
    lr: Annotated[
        float | None, typer.Option(help="Learning rate.", show_default="the optimiser's")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Batch size.")] = 128,
    schedule: Annotated[
        str | None, typer.Option(help='Such as cosine or "step:milestones=(60,120),factor=0.2".')
    ] = None,
    regularizer: Annotated[
        list[str] | None, typer.Option(help='Such as "l2:rate=1e-4"; repeatable.')
    ] = None,
    averaging: Annotated[
        str | None, typer.Option(help='Such as "average:start=161" or "ema:unit=step".')
    ] = None,
    lookahead: Annotated[
        int | None,
        typer.Option(min=1, help="Wrap the optimiser in Lookahead with this many steps."),
    ] = None,
    early_stopping: Annotated[
        int | None, typer.Option(min=1, help="Stop after this many epochs without improvement.")
    ] = None,
    precision: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    accumulate: Annotated[int, typer.Option(min=1, help="Batches per optimiser step.")] = 1,
    clip: Annotated[
        float | None, typer.Option(help="Clip the gradient norm to this value.")
    ] = None,
    augment: Annotated[bool, typer.Option("--augment", help="Random crops and flips.")] = False,
    curvature_samples: Annotated[
        int | None,
        typer.Option(min=1, help="Samples for curvature measurements.", show_default="batch size"),
    ] = None,
    track: Annotated[
        str, typer.Option(help="Quantities to track, comma-separated: llc, trace, spectrum, …")
    ] = "",
    track_every: Annotated[
        int, typer.Option(min=1, help="Epochs (or steps) between measurements.")
    ] = 1,
    track_unit: Annotated[str, typer.Option(help="epoch or step.")] = "epoch",
    track_samples: Annotated[
        int | None, typer.Option(min=2, help="Samples to measure on.", show_default="1000")
    ] = None,
    model_option: Annotated[
        list[str] | None, typer.Option(help='Such as "widths=(64,32)".')
    ] = None,
    data_option: Annotated[
        list[str] | None, typer.Option(help='Such as "normalization=standard".')
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Train on the first N samples.", show_default="all")
    ] = None,
    log: Annotated[
        str, typer.Option(help="Loggers, comma-separated: csv, tensorboard, wandb, mlflow.")
    ] = "",
    out: Annotated[
        Path | None, out_option("Folder of the run: metrics, checkpoints, measurements.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in --out.")] = False,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Epochs between checkpoints.")] = 1,
    checkpoint_steps: Annotated[
        int | None, typer.Option(min=1, help="Also checkpoint every N steps.")
    ] = None,
    keep: Annotated[
        int, typer.Option(min=1, help="Newest checkpoints to keep, in addition to the best.")
    ] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    device: Annotated[str, typer.Option(help='Such as "cpu" or "cuda".')] = "cpu",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a network and track its curvature; --resume continues an interrupted run."""
    from lambdahat.cli.train import TrainingPlan, extra_options, key_values, run_train
    from lambdahat.training.checkpoints import Recipe

    kept = "the same command with --resume goes on" if out else "pass --out to keep checkpoints"
    with exit_codes(kept):
        require_writable(out)
        options = {**({} if lr is None else {"lr": lr}), **extra_options(context.args)}
        loggers = [name.strip() for name in log.split(",") if name.strip()]
        loop = {
            "batch_size": batch_size,
            "early_stopping": early_stopping,
            "precision": precision,
            "clip": clip,
            "accumulate": accumulate,
            "curvature_samples": curvature_samples,
            "loggers": loggers,
            "resume": resume,
            "keep": keep,
            "checkpoint_every": checkpoint_every,
            "checkpoint_steps": checkpoint_steps,
        }
        plan = TrainingPlan(
            optimizer,
            options,
            epochs,
            loop,
            schedule,
            regularizer or (),
            averaging,
            lookahead,
            track,
            track_every,
            track_unit,
            track_samples,
            augment,
            device,
        )
        settings, free = plan.document()
        recipe = Recipe(
            model,
            data,
            model_options=key_values(model_option or ()),
            data_options=key_values(data_option or ()),
            seed=seed,
            samples=samples,
            settings=settings,
            free=free,
        )
        code = run_train(recipe, plan, out, as_json, quiet)
    raise typer.Exit(code)


app.command(epilog=EXIT_CODES)(watch)
app.command(epilog=EXIT_CODES)(advise)


@app.command(epilog=EXIT_CODES)
def verify(
    case: Annotated[str, typer.Option(help="Only cases whose names match this glob.")] = "*",
    quick: Annotated[bool, typer.Option("--quick", help="One case per family.")] = False,
    seed: Seed = 0,
    out: Kept = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check the learning coefficient at default settings against cases with exact answers."""
    from lambdahat.cli.verifications import run_verify

    kept = (
        "finished cases are kept; the same command resumes"
        if out
        else "pass --out to keep finished cases"
    )
    with exit_codes(kept):
        require_writable(out)
        code = run_verify(case, seed, quick, out, as_json, quiet)
    raise typer.Exit(code)


@app.command(epilog=EXIT_CODES)
def reproduce(
    experiments: Annotated[
        list[str] | None, typer.Argument(help="Experiment names; --list describes all.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All experiments.")] = False,
    listed: Annotated[
        bool, typer.Option("--list", help="List the experiments and their number of cells.")
    ] = False,
    scale: Annotated[
        str,
        typer.Option(
            help="smoke: seconds; cpu: at most 15 minutes on two cores; paper: for a GPU."
        ),
    ] = "cpu",
    jobs: Annotated[
        int,
        typer.Option(
            min=1, help="Cells to run in parallel; a remote cluster uses all its workers."
        ),
    ] = 1,
    backend: Annotated[
        str, typer.Option(help="Where cells run: loky (this machine), dask or ray.")
    ] = "loky",
    address: Annotated[
        str | None,
        typer.Option(
            help="Address of a dask or ray cluster, or auto (ray).",
            show_default="start one locally",
        ),
    ] = None,
    only: Annotated[
        str | None, typer.Option(help='Only cells with these settings, such as "alpha=0.1 seed=3".')
    ] = None,
    device: Annotated[str, typer.Option(help='"cpu" or "cuda".')] = "cpu",
    resume: Annotated[
        bool, typer.Option("--resume/--fresh", help="Keep finished cells, or start over.")
    ] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Forecast the remaining time from a few epochs.")
    ] = False,
    out: Annotated[Path, out_option("Folder for rows, tables and page.")] = Path("reproductions"),
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Reproduce published experiments and report which claims hold."""
    from lambdahat.cli.reproduce import (
        ExperimentChoices,
        list_experiments,
        run_forecast,
        run_reproduce,
        select_names,
    )

    with exit_codes(f"finished cells are kept in {out}, and the same command goes on"):
        if listed:
            list_experiments()
            raise typer.Exit(OK)
        choices = ExperimentChoices(out, scale, jobs, backend, address, only, device, resume)
        names = select_names(experiments, everything)
        if dry_run:
            raise typer.Exit(run_forecast(names, choices, as_json, quiet))
        require_writable(out)
        code = run_reproduce(names, choices, as_json, quiet)
    raise typer.Exit(code)


@app.command(epilog=EXIT_CODES)
def bench(
    peers: Annotated[
        bool, typer.Option("--peers", help="Also time the other installed libraries.")
    ] = False,
    device: Annotated[str, typer.Option(help='"cpu" or "cuda".')] = "cpu",
    only: Annotated[
        str, typer.Option(help="Glob over families; one without a match lists them.")
    ] = "*",
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny sizes, to check that it runs.")
    ] = False,
    rounds: Annotated[
        int, typer.Option(min=1, help="Interleaved rounds; medians are reported.")
    ] = 9,
    against: Annotated[
        Path | None, typer.Option(help="Reference bench.json; exit with 1 if slower.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="Relative slowdown that counts as slower.")
    ] = 0.15,
    out: Annotated[Path | None, out_option("Folder for tables, figure and bench.json.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Benchmark time, error and memory, in units of a gradient and against other libraries."""
    from lambdahat.bench.plans import Plan
    from lambdahat.cli.bench_command import run_bench

    with exit_codes("finished tasks are kept" if out else ""):
        require_writable(out)
        code = run_bench(
            Plan(device, peers, quick, rounds), only, out, against, tolerance, as_json, quiet
        )
    raise typer.Exit(code)


@app.command(epilog=EXIT_CODES)
def report(
    folders: Annotated[
        list[Path], typer.Argument(help="Folders with experiment rows or saved results.")
    ],
    out: Annotated[Path, out_option("The page to write.")] = Path("report.html"),
    quiet: Quiet = False,
) -> None:
    """Build one self-contained HTML page from stored experiments and measurements."""
    from lambdahat.cli.reproduce import run_report

    with exit_codes():
        require_writable(out, file=True)
        code = run_report(folders, out, quiet)
    raise typer.Exit(code)


@app.command(epilog=EXIT_CODES)
def demo(
    out: Annotated[Path, out_option("Folder for figures, tables and results.")] = Path(
        "lambdahat-demo"
    ),
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Compare SGD and NGD on handwritten digits, test the NGD paper's claims, and write a page."""
    from lambdahat.cli.demo import run_demo

    with exit_codes("finished results are kept"):
        require_writable(out)
        code = run_demo(out, seed, quiet)
    raise typer.Exit(code)


app.add_typer(data_commands, name="data", epilog=EXIT_CODES)
app.add_typer(graph_commands, name="graph", epilog=EXIT_CODES)
