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
from lambdahat.cli.model_commands import advise, landscape, measure
from lambdahat.cli.options import Json, Kept, Quiet, Seed, out_option

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


app.command(epilog=EXIT_CODES)(measure)
app.command(epilog=EXIT_CODES)(landscape)
TRAINING = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(epilog=EXIT_CODES, context_settings=TRAINING)
def train(
    context: typer.Context,
    model: Annotated[
        str, typer.Option(help="A network by name; one that is not known lists them all.")
    ],
    data: Annotated[
        str, typer.Option(help="A data set by name; `lambdahat data list` lists them.")
    ],
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training data.")] = 10,
    optimizer: Annotated[
        str, typer.Option(help="An optimiser by name. Its options follow as --name value.")
    ] = "sgd",
    lr: Annotated[
        float | None, typer.Option(help="Learning rate.", show_default="the optimiser's")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of a batch.")] = 128,
    schedule: Annotated[
        str | None, typer.Option(help='Such as cosine or "step:milestones=(60,120),factor=0.2".')
    ] = None,
    regularizer: Annotated[
        list[str] | None, typer.Option(help='Such as "l2:rate=1e-4"; may be given several times.')
    ] = None,
    averaging: Annotated[
        str | None, typer.Option(help='Such as "average:start=161" or "ema:unit=step".')
    ] = None,
    lookahead: Annotated[
        int | None, typer.Option(min=1, help="Lookahead every so many steps.")
    ] = None,
    early_stopping: Annotated[int | None, typer.Option(min=1, help="Patience in epochs.")] = None,
    precision: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    accumulate: Annotated[int, typer.Option(min=1, help="Batches of a step.")] = 1,
    clip: Annotated[float | None, typer.Option(help="Largest norm of a gradient.")] = None,
    augment: Annotated[bool, typer.Option("--augment", help="Random crops and flips.")] = False,
    curvature_samples: Annotated[
        int | None,
        typer.Option(
            min=1, help="For optimisers that measure curvature.", show_default="as a step has"
        ),
    ] = None,
    track: Annotated[
        str, typer.Option(help="Measure along the way: llc, trace, spectrum, …, by commas.")
    ] = "",
    track_every: Annotated[
        int, typer.Option(min=1, help="Epochs (or steps) between measurements.")
    ] = 1,
    track_unit: Annotated[str, typer.Option(help="epoch or step.")] = "epoch",
    track_samples: Annotated[
        int | None, typer.Option(min=2, help="Measure on so many.", show_default="1000")
    ] = None,
    model_option: Annotated[
        list[str] | None, typer.Option(help='Such as "widths=(64,32)".')
    ] = None,
    data_option: Annotated[
        list[str] | None, typer.Option(help='Such as "normalization=standard".')
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Train on the first so many.", show_default="all")
    ] = None,
    log: Annotated[str, typer.Option(help="Also to tensorboard, wandb.")] = "",
    out: Annotated[
        Path | None, out_option("Folder of the run: metrics, checkpoints, measurements.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Epochs between checkpoints.")] = 1,
    checkpoint_steps: Annotated[
        int | None, typer.Option(min=1, help="Also every so many steps.")
    ] = None,
    keep: Annotated[
        int, typer.Option(min=1, help="Newest checkpoints to keep, beside the best.")
    ] = 2,
    seed: Annotated[
        int, typer.Option(min=0, help="Decides initial weights, data order and all else.")
    ] = 0,
    device: Annotated[str, typer.Option(help='Such as "cpu" or "cuda".')] = "cpu",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a network, measure it along the way, and never lose the run: a killed one goes on
    with --resume.
    """
    from lambdahat.cli.train import Plan, extra_options, key_values, run_train
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
        plan = Plan(
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


app.command(epilog=EXIT_CODES)(advise)


@app.command(epilog=EXIT_CODES)
def verify(
    case: Annotated[str, typer.Option(help="Only the cases whose names this glob matches.")] = "*",
    quick: Annotated[bool, typer.Option("--quick", help="One case of each family.")] = False,
    seed: Seed = 0,
    out: Kept = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """The learning coefficient at default settings against cases whose exact answer is known."""
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
        list[str] | None,
        typer.Argument(help="Published experiments by name; --list describes them all."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All experiments.")] = False,
    listed: Annotated[
        bool, typer.Option("--list", help="List the experiments and how many cells each scale has.")
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
            min=1, help="Cells that run at once; a cluster at an address runs all it can."
        ),
    ] = 1,
    backend: Annotated[
        str, typer.Option(help="Where cells run: loky (this machine), dask or ray.")
    ] = "loky",
    address: Annotated[
        str | None,
        typer.Option(
            help="Of a dask or ray cluster; auto: ray's own here.", show_default="a new one here"
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(help='Only cells whose settings hold these words: "alpha=0.1 seed=3".'),
    ] = None,
    device: Annotated[str, typer.Option(help='"cpu" or "cuda".')] = "cpu",
    resume: Annotated[
        bool,
        typer.Option("--resume/--fresh", help="Go on with the finished cells, or throw them away."),
    ] = True,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Forecast the time of the cells that are left from a few epochs of some.",
        ),
    ] = False,
    out: Annotated[Path, out_option("Folder for the rows, the tables and the page.")] = Path(
        "reproductions"
    ),
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run published experiments, and say which of their claims hold here."""
    from lambdahat.cli.reproduce import (
        Choices,
        asked_for,
        list_experiments,
        run_forecast,
        run_reproduce,
    )

    with exit_codes(f"finished cells are kept in {out}, and the same command goes on"):
        if listed:
            list_experiments()
            raise typer.Exit(OK)
        choices = Choices(out, scale, jobs, backend, address, only, device, resume)
        names = asked_for(experiments, everything)
        if dry_run:
            raise typer.Exit(run_forecast(names, choices, as_json, quiet))
        require_writable(out)
        code = run_reproduce(names, choices, as_json, quiet)
    raise typer.Exit(code)


@app.command(epilog=EXIT_CODES)
def bench(
    peers: Annotated[
        bool, typer.Option("--peers", help="Time the other libraries that are installed too.")
    ] = False,
    device: Annotated[str, typer.Option(help='"cpu" or "cuda".')] = "cpu",
    only: Annotated[
        str, typer.Option(help="Families of rows, a glob; one that matches none lists them.")
    ] = "*",
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny sizes: shows that it runs, times mean nothing.")
    ] = False,
    rounds: Annotated[
        int, typer.Option(min=1, help="Interleaved rounds, of which the medians are taken.")
    ] = 9,
    against: Annotated[
        Path | None, typer.Option(help="A bench.json on record: what is slower exits with 1.")
    ] = None,
    tolerance: Annotated[float, typer.Option(help="What counts as slower than on record.")] = 0.15,
    out: Annotated[
        Path | None, out_option("Folder for tables, a figure and bench.json, kept up to date.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """What everything costs in gradients, and beside the peers: times, errors, memory, and how
    far from the limit.
    """
    from lambdahat.bench.plans import Plan
    from lambdahat.cli.bench import run_bench

    with exit_codes("finished tasks are kept" if out else ""):
        require_writable(out)
        code = run_bench(
            Plan(device, peers, quick, rounds), only, out, against, tolerance, as_json, quiet
        )
    raise typer.Exit(code)


@app.command(epilog=EXIT_CODES)
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(help="Folders with the rows of experiments, or with saved results."),
    ],
    out: Annotated[Path, out_option("The page to write.")] = Path("report.html"),
    quiet: Quiet = False,
) -> None:
    """Build the page from what experiments and measurements have stored: one HTML file that
    opens offline.
    """
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
    """SGD against NGD on handwritten digits: train, measure, judge the NGD paper's claims, and
    write a page.
    """
    from lambdahat.cli.demo import run_demo

    with exit_codes("finished results are kept"):
        require_writable(out)
        code = run_demo(out, seed, quiet)
    raise typer.Exit(code)


app.add_typer(data_commands, name="data", epilog=EXIT_CODES)
app.add_typer(graph_commands, name="graph", epilog=EXIT_CODES)
