"""The command's arguments; what each command does is in the module of its name."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from lambdahat.cli.exits import EXIT_CODES, OK, exit_codes
from lambdahat.cli.graph_commands import graph_commands
from lambdahat.cli.options import Json, Out, Quiet, Seed

app = typer.Typer(
    name="lambdahat",
    help="Curvature and degeneracy of PyTorch models, with error bars.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Curvature(StrEnum):
    """The matrices that can be measured."""

    hessian = "hessian"
    ggn = "ggn"
    fisher = "fisher"
    empirical_fisher = "empirical_fisher"
    covariance = "covariance"


class Norm(StrEnum):
    """How normalisation layers are evaluated."""

    eval = "eval"
    train = "train"
    frozen = "frozen"


class Dtype(StrEnum):
    """The precision of the model."""

    float32 = "float32"
    float64 = "float64"
    bfloat16 = "bfloat16"


Factory = Annotated[
    str, typer.Argument(help="package.module:function that returns a lambdahat.Problem, or the folder of a run.")
]
Checkpoint = Annotated[
    Path | None, typer.Option(help="Weights to measure at: a state dict, a run folder, or best or averaged of the run.")
]
CurvatureOption = Annotated[Curvature, typer.Option(help="Which matrix.")]
Depth = Annotated[int, typer.Option(min=1, help="Lanczos steps, each one product.")]
Samples = Annotated[
    int | None, typer.Option(min=1, help="Measure on this many samples, drawn without replacement.", show_default="all")
]
Device = Annotated[str | None, typer.Option(help='For example "cuda" or "cpu".', show_default="the model's")]
DtypeOption = Annotated[Dtype | None, typer.Option(help="Precision of the model.", show_default="the model's")]
NormOption = Annotated[
    Norm | None,
    typer.Option(
        help="Normalisation layers: running statistics, those of each batch, or running with their weights held.",
        show_default="the factory's",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Make one product, predict the cost, and stop.")]
LLC = "For llc; what is not given is found"
Chains = Annotated[int | None, typer.Option(min=1, rich_help_panel=LLC, help="Chains.", show_default="4")]
Draws = Annotated[int | None, typer.Option(min=1, rich_help_panel=LLC, help="Draws of each chain.")]
BurnIn = Annotated[int | None, typer.Option(min=0, rich_help_panel=LLC, help="Steps before the first draw.")]
BatchSize = Annotated[int | None, typer.Option(min=1, rich_help_panel=LLC, help="Samples that a step of SGLD sees.")]
Nbeta = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=LLC, show_default="n/log n",
        help='Inverse temperature: "n/log n", "batch" (B/log B, as in devinterp) or a number.',
    ),
]  # fmt: skip
Localization = Annotated[float | None, typer.Option(min=0, rich_help_panel=LLC, help="γ, which ties chains to w*.")]
StepSize = Annotated[float | None, typer.Option(min=0, rich_help_panel=LLC, help="ε of the kernel.")]
KernelOption = Annotated[
    str | None, typer.Option(rich_help_panel=LLC, help="sgld, hmc, mala, rmsprop_sgld, sghmc or sgnht.")
]
Tol = Annotated[
    float | None,
    typer.Option(rich_help_panel=LLC, help="Standard error to reach, as a part of the value.", show_default="0.03"),
]
MaxGradients = Annotated[
    int | None, typer.Option(min=100, rich_help_panel=LLC, help="The most gradients, over all chains.")
]


def _print_version(wanted: bool) -> None:
    if wanted:
        from lambdahat import __version__

        print(f"lambdahat {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Curvature and degeneracy of PyTorch models, with error bars."""


@app.command(epilog=EXIT_CODES)
def measure(
    factory: Factory,
    checkpoint: Checkpoint = None,
    what: Annotated[
        str, typer.Option(help="Quantities, separated by commas; a name that is not known lists them all.")
    ] = "trace,eigenpairs,spectrum",
    curvature: CurvatureOption = Curvature.hessian,
    depth: Depth = 100,
    probes: Annotated[int, typer.Option(min=1, help="Random starts of the spectrum.")] = 1,
    top: Annotated[int, typer.Option(min=1, help="How many eigenpairs.")] = 10,
    samples: Samples = None,
    seed: Seed = 0,
    device: Device = None,
    dtype: DtypeOption = None,
    norm: NormOption = None,
    out: Out = None,
    vectors: Annotated[bool, typer.Option("--vectors", help="Keep the eigenvectors too.")] = False,
    chains: Chains = None,
    draws: Draws = None,
    burn_in: BurnIn = None,
    batch_size: BatchSize = None,
    nbeta: Nbeta = None,
    localization: Localization = None,
    step_size: StepSize = None,
    kernel: KernelOption = None,
    tol: Tol = None,
    max_gradients: MaxGradients = None,
    as_json: Json = False,
    dry_run: DryRun = False,
    quiet: Quiet = False,
) -> None:
    """Measure a model: trace, norms, eigenpairs, spectrum, learning coefficient and more, each with its error."""
    from lambdahat.cli.loading import Choices
    from lambdahat.cli.measurements import run_measure
    from lambdahat.measuring import Settings

    kept = "finished results are kept; the same command resumes" if out else "pass --out to keep finished results"
    with exit_codes("" if dry_run else kept):
        choices = Choices(checkpoint, device, dtype and dtype.value, norm and norm.value, samples, seed)
        given = {
            "chains": chains, "draws": draws, "burn_in": burn_in, "batch_size": batch_size, "nbeta": number(nbeta),
            "localization": localization, "step_size": step_size, "kernel": kernel, "tol": tol,
            "max_gradients": max_gradients,
        }  # fmt: skip
        sampling = {name: value for name, value in given.items() if value is not None}
        settings = Settings(curvature.value, depth, probes, top, seed, sampling)
        names = [name.strip() for name in what.split(",") if name.strip()]
        code = run_measure(factory, choices, names, settings, out, vectors, as_json, dry_run, quiet)
    raise typer.Exit(code)


def number(text: str | None) -> str | float | None:
    """A number where the text is one."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


@app.command(epilog=EXIT_CODES)
def landscape(
    factory: Factory,
    checkpoint: Checkpoint = None,
    along: Annotated[
        str,
        typer.Option(help="largest, smallest, smallest-magnitude, random, filter; separated by commas."),
    ] = "largest,smallest,smallest-magnitude",
    plane: Annotated[bool, typer.Option("--plane", help="The plane of the first two directions, not lines.")] = False,
    towards: Annotated[
        Path | None, typer.Option(help="The line to this other checkpoint, offsets 0 to 1, in place of --along.")
    ] = None,
    distance: Annotated[float, typer.Option(help="How far to go, in lengths of the direction.")] = 1.0,
    points: Annotated[int, typer.Option(min=3, help="Points along each direction.")] = 21,
    held_out: Annotated[
        str | None,
        typer.Option(help='package.module:function that returns held-out data or a Problem; "test" of a run.'),
    ] = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Recompute batch-norm statistics over the training data at every point.")
    ] = False,
    curvature: CurvatureOption = Curvature.hessian,
    depth: Depth = 100,
    samples: Samples = None,
    seed: Seed = 0,
    device: Device = None,
    dtype: DtypeOption = None,
    norm: NormOption = None,
    out: Out = None,
    as_json: Json = False,
    dry_run: DryRun = False,
    quiet: Quiet = False,
) -> None:
    """The loss along Ritz vectors of the curvature, or random directions, on training and held-out data."""
    from lambdahat.cli.lines import Lines, run_landscape
    from lambdahat.cli.loading import Choices

    with exit_codes():
        choices = Choices(checkpoint, device, dtype and dtype.value, norm and norm.value, samples, seed)
        names = [name.strip() for name in along.split(",") if name.strip()]
        lines = Lines(tuple(names), plane, refresh, distance, points, curvature.value, depth, seed, towards)
        code = run_landscape(factory, choices, lines, held_out, out, as_json, dry_run, quiet)
    raise typer.Exit(code)


TRAINING = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(epilog=EXIT_CODES, context_settings=TRAINING)
def train(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="A network by name; one that is not known lists them all.")],
    data: Annotated[str, typer.Option(help="A data set by name; `lambdahat data list` lists them.")],
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training data.")] = 10,
    optimizer: Annotated[str, typer.Option(help="An optimiser by name. Its options follow as --name value.")] = "sgd",
    lr: Annotated[float | None, typer.Option(help="Learning rate.", show_default="the optimiser's")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of a batch.")] = 128,
    schedule: Annotated[
        str | None, typer.Option(help='Such as cosine or "step:milestones=(60,120),factor=0.2".')
    ] = None,
    regularizer: Annotated[
        list[str] | None, typer.Option(help='Such as "l2:rate=1e-4"; may be given several times.')
    ] = None,
    averaging: Annotated[str | None, typer.Option(help='Such as "average:start=161" or "ema:unit=step".')] = None,
    lookahead: Annotated[int | None, typer.Option(min=1, help="Lookahead every so many steps.")] = None,
    early_stopping: Annotated[int | None, typer.Option(min=1, help="Patience in epochs.")] = None,
    precision: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    accumulate: Annotated[int, typer.Option(min=1, help="Batches of a step.")] = 1,
    clip: Annotated[float | None, typer.Option(help="Largest norm of a gradient.")] = None,
    augment: Annotated[bool, typer.Option("--augment", help="Random crops and flips.")] = False,
    curvature_samples: Annotated[
        int | None, typer.Option(min=1, help="For optimisers that measure curvature.", show_default="as a step has")
    ] = None,
    track: Annotated[str, typer.Option(help="Measure along the way: llc, trace, spectrum, …, by commas.")] = "",
    track_every: Annotated[int, typer.Option(min=1, help="Epochs (or steps) between measurements.")] = 1,
    track_unit: Annotated[str, typer.Option(help="epoch or step.")] = "epoch",
    track_samples: Annotated[int | None, typer.Option(min=2, help="Measure on so many.", show_default="1000")] = None,
    model_option: Annotated[list[str] | None, typer.Option(help='Such as "widths=(64,32)".')] = None,
    data_option: Annotated[list[str] | None, typer.Option(help='Such as "normalization=standard".')] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Train on the first so many.", show_default="all")] = None,
    log: Annotated[str, typer.Option(help="Also to tensorboard, wandb.")] = "",
    out: Annotated[Path | None, typer.Option(help="Folder of the run: metrics, checkpoints, measurements.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Epochs between checkpoints.")] = 1,
    checkpoint_steps: Annotated[int | None, typer.Option(min=1, help="Also every so many steps.")] = None,
    keep: Annotated[int, typer.Option(min=1, help="Newest checkpoints to keep, beside the best.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Decides initial weights, data order and all else.")] = 0,
    device: Annotated[str, typer.Option(help='Such as "cpu" or "cuda".')] = "cpu",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a network, measure it along the way, and never lose the run: a killed one goes on with --resume."""
    from lambdahat.cli.train import Plan, extra_options, key_values, run_train
    from lambdahat.training.folders import Recipe

    kept = "the same command with --resume goes on" if out else "pass --out to keep checkpoints"
    with exit_codes(kept):
        options = {**({} if lr is None else {"lr": lr}), **extra_options(context.args)}
        loggers = [name.strip() for name in log.split(",") if name.strip()]
        loop = {
            "batch_size": batch_size, "early_stopping": early_stopping, "precision": precision, "clip": clip,
            "accumulate": accumulate, "curvature_samples": curvature_samples, "loggers": loggers, "resume": resume,
            "keep": keep, "checkpoint_every": checkpoint_every, "checkpoint_steps": checkpoint_steps,
        }  # fmt: skip
        plan = Plan(optimizer, options, epochs, loop, schedule, regularizer or (), averaging, lookahead, track,
                    track_every, track_unit, track_samples, augment, device)  # fmt: skip
        settings, free = plan.document()
        recipe = Recipe(model, data, model_options=key_values(model_option or ()),
                        data_options=key_values(data_option or ()), seed=seed, samples=samples, settings=settings,
                        free=free)  # fmt: skip
        code = run_train(recipe, plan, out, as_json, quiet)
    raise typer.Exit(code)


@app.command(epilog=EXIT_CODES)
def advise(
    factory: Factory,
    checkpoint: Checkpoint = None,
    optimizer: Annotated[str, typer.Option(help="One that is not known lists them all.")] = "sgd",
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples of a batch.", show_default="128, or all data if fewer")
    ] = None,
    new_batch_size: Annotated[
        int | None, typer.Option(min=1, help="A batch size to move to.", show_default="none")
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="In use at --batch-size.", show_default="the usual one, where one is needed")
    ] = None,
    momentum: Annotated[
        float | None, typer.Option(help="Of sgd, momentum and nesterov.", show_default="0, 0.9 and 0.9")
    ] = None,
    batches: Annotated[
        int | None, typer.Option(min=2, help="Batches of each size to measure.", show_default="10 to 30")
    ] = None,
    variance_samples: Annotated[
        int | None, typer.Option(min=2, help="Samples to measure one by one.", show_default="at most 1,024")
    ] = None,
    steps: Annotated[int, typer.Option(min=0, help="Also find the largest stable rate by training so many steps.")] = 0,
    factor: Annotated[
        float | None,
        typer.Option(
            help="With --steps: a run is stable if its loss ends below so many times the first.",
            show_default="judged by the noise of small steps",
        ),
    ] = None,
    samples: Samples = None,
    seed: Seed = 0,
    device: Device = None,
    dtype: DtypeOption = None,
    norm: NormOption = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the result, its tables and its figure.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """How large a step, how large a batch: learning rate, its scaling and damping, with the reasons."""
    from lambdahat.cli.advise import run_advise
    from lambdahat.cli.loading import Choices

    with exit_codes():
        choices = Choices(checkpoint, device, dtype and dtype.value, norm and norm.value, samples, seed)
        question = {
            "optimizer": optimizer, "batch_size": batch_size, "new_batch_size": new_batch_size,
            "learning_rate": learning_rate, "momentum": momentum, "batches": batches, "samples": variance_samples,
            "steps": steps, "factor": factor, "seed": seed,
        }  # fmt: skip
        code = run_advise(factory, choices, question, out, as_json, quiet)
    raise typer.Exit(code)


@app.command(epilog=EXIT_CODES)
def verify(
    case: Annotated[str, typer.Option(help="Only the cases whose names this glob matches.")] = "*",
    quick: Annotated[bool, typer.Option("--quick", help="One case of each family.")] = False,
    seed: Seed = 0,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """The learning coefficient at default settings against cases whose exact answer is known."""
    from lambdahat.cli.verifications import run_verify

    kept = "finished cases are kept; the same command resumes" if out else "pass --out to keep finished cases"
    with exit_codes(kept):
        code = run_verify(case, seed, quick, out, as_json, quiet)
    raise typer.Exit(code)


@app.command(epilog=EXIT_CODES)
def reproduce(
    experiments: Annotated[
        list[str] | None, typer.Argument(help="Published experiments by name; --list describes them all.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All experiments.")] = False,
    listed: Annotated[
        bool, typer.Option("--list", help="List the experiments and how many cells each scale has.")
    ] = False,
    scale: Annotated[
        str, typer.Option(help="smoke: seconds; cpu: at most 15 minutes on two cores; paper: for a GPU.")
    ] = "cpu",
    jobs: Annotated[
        int, typer.Option(min=1, help="Cells that run at once; a cluster at an address runs all it can.")
    ] = 1,
    backend: Annotated[str, typer.Option(help="Where cells run: loky (this machine), dask or ray.")] = "loky",
    address: Annotated[
        str | None, typer.Option(help="Of a dask or ray cluster; auto: ray's own here.", show_default="a new one here")
    ] = None,
    only: Annotated[
        str | None, typer.Option(help='Only cells whose settings hold these words: "alpha=0.1 seed=3".')
    ] = None,
    device: Annotated[str, typer.Option(help='"cpu" or "cuda".')] = "cpu",
    resume: Annotated[
        bool, typer.Option("--resume/--fresh", help="Go on with the finished cells, or throw them away.")
    ] = True,
    out: Annotated[Path, typer.Option(help="Folder for the rows, the tables and the page.")] = Path("reproductions"),
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run published experiments, and say which of their claims hold here."""
    from lambdahat.cli.reproduce import Choices, asked_for, list_experiments, run_reproduce

    with exit_codes(f"finished cells are kept in {out}, and the same command goes on"):
        if listed:
            list_experiments()
            raise typer.Exit(OK)
        choices = Choices(out, scale, jobs, backend, address, only, device, resume)
        code = run_reproduce(asked_for(experiments, everything), choices, as_json, quiet)
    raise typer.Exit(code)


@app.command(epilog=EXIT_CODES)
def bench(
    peers: Annotated[bool, typer.Option("--peers", help="Time the other libraries that are installed too.")] = False,
    device: Annotated[str, typer.Option(help='"cpu" or "cuda".')] = "cpu",
    only: Annotated[str, typer.Option(help="Families of rows, a glob; one that matches none lists them.")] = "*",
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes: shows that it runs, times mean nothing.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds, of which the medians are taken.")] = 9,
    against: Annotated[Path | None, typer.Option(help="A bench.json on record: what is slower exits with 1.")] = None,
    tolerance: Annotated[float, typer.Option(help="What counts as slower than on record.")] = 0.15,
    out: Annotated[Path | None, typer.Option(help="Folder for bench.json, after each task, table and figure.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """What everything costs in gradients, and beside the peers: times, errors, memory, and how far from the limit."""
    from lambdahat.bench.plans import Plan
    from lambdahat.cli.bench import run_bench

    with exit_codes("finished tasks are kept" if out else ""):
        code = run_bench(Plan(device, peers, quick, rounds), only, out, against, tolerance, as_json, quiet)
    raise typer.Exit(code)


@app.command(epilog=EXIT_CODES)
def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders with the rows of experiments, or with saved results.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    quiet: Quiet = False,
) -> None:
    """Build the page from what experiments and measurements have stored: one HTML file that opens offline."""
    from lambdahat.cli.reproduce import run_report

    with exit_codes():
        code = run_report(folders, out, quiet)
    raise typer.Exit(code)


@app.command(epilog=EXIT_CODES)
def demo(
    out: Annotated[Path, typer.Option(help="Folder for figures, tables and results.")] = Path("lambdahat-demo"),
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """SGD against NGD on handwritten digits: train, measure, judge the NGD paper's claims, and write a page."""
    from lambdahat.cli.demo import run_demo

    with exit_codes("finished results are kept"):
        code = run_demo(out, seed, quiet)
    raise typer.Exit(code)


data_commands = typer.Typer(help="The data sets: what there is, fetching it, checking it.", no_args_is_help=True)
app.add_typer(data_commands, name="data", epilog=EXIT_CODES)
Names = Annotated[list[str] | None, typer.Argument(help="Data sets.", show_default="all that are here")]
DataFolder = Annotated[
    Path | None,
    typer.Option(help="The folder of the files.", show_default="LAMBDAHAT_DATA, else the cache of the user"),
]


@data_commands.command("list", epilog=EXIT_CODES)
def list_data(as_json: Json = False) -> None:
    """Every data set, and where its files are."""
    from lambdahat.cli.datasets import run_list

    with exit_codes():
        code = run_list(as_json)
    raise typer.Exit(code)


@data_commands.command("fetch", epilog=EXIT_CODES)
def fetch_data(
    names: Annotated[list[str], typer.Argument(help="Data sets; a name that is not known lists them all.")],
    folder: DataFolder = None,
    mirror: Annotated[str | None, typer.Option(help="An address below which the files are.")] = None,
    quiet: Quiet = False,
) -> None:
    """Bring data sets from the usual mirrors, verified; a broken download continues where it stopped."""
    from lambdahat.cli.datasets import run_fetch

    with exit_codes("what has come is kept; the same command continues"):
        code = run_fetch(names, folder, mirror, quiet)
    raise typer.Exit(code)


@data_commands.command("check", epilog=EXIT_CODES)
def check_data(names: Names = None, folder: DataFolder = None, as_json: Json = False, quiet: Quiet = False) -> None:
    """Compare the files with their published checksums; where there is none, say so and compare the size if known."""
    from lambdahat.cli.datasets import run_check

    with exit_codes():
        code = run_check(names or [], folder, as_json, quiet)
    raise typer.Exit(code)


app.add_typer(graph_commands, name="graph", epilog=EXIT_CODES)
