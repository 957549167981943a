"""The command's arguments; what each command does is in the module of its name."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from lambdahat.cli.exits import EXIT_CODES, exit_codes

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
    str, typer.Argument(help="package.module:function; called without arguments, it returns a lambdahat.Problem.")
]
Checkpoint = Annotated[
    Path | None, typer.Option(help="Weights to measure at: a state dict, .safetensors or saved by torch.save.")
]
CurvatureOption = Annotated[Curvature, typer.Option(help="Which matrix.")]
Depth = Annotated[int, typer.Option(min=1, help="Lanczos steps, each one product.")]
Seed = Annotated[int, typer.Option(min=0, help="Decides all random probes and subsamples.")]
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
Out = Annotated[Path | None, typer.Option(help="Folder for results, tables and figures; a killed run resumes from it.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
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
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bars and no table.")]


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
        str | None, typer.Option(help="package.module:function that returns held-out data, or a Problem on it.")
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
def demo(
    out: Annotated[Path, typer.Option(help="Folder for figures, tables and results.")] = Path("lambdahat-demo"),
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Train a small network on handwritten digits, measure it, and write figures and tables: under a minute."""
    from lambdahat.cli.demo import run_demo

    with exit_codes("finished results are kept"):
        code = run_demo(out, seed, quiet)
    raise typer.Exit(code)
