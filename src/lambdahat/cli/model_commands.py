"""The arguments of the commands that look at a model: ``measure``, ``compare``, ``landscape`` and
``advise``.

What each command does is in ``measurements``, ``lines`` and ``advise``.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from lambdahat.cli.exits import exit_codes
from lambdahat.cli.options import Json, Kept, Out, Quiet, Seed, out_option


class CurvatureChoice(StrEnum):
    """The matrices that can be measured."""

    hessian = "hessian"
    ggn = "ggn"
    fisher = "fisher"
    empirical_fisher = "empirical_fisher"
    covariance = "covariance"


class NormChoice(StrEnum):
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
    str,
    typer.Argument(
        help="package.module:function that returns a lambdahat.Problem, or a run folder."
    ),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(help="Weights: a state-dict file, a run folder, or best or averaged of the run."),
]
CurvatureOption = Annotated[CurvatureChoice, typer.Option(help="Curvature matrix.")]
Depth = Annotated[int, typer.Option(min=1, help="Lanczos steps (one product each).")]
Samples = Annotated[
    int | None,
    typer.Option(min=1, help="Measure on a random subset of N samples.", show_default="all"),
]
Device = Annotated[
    str | None, typer.Option(help='For example "cuda" or "cpu".', show_default="the model's")
]
DtypeOption = Annotated[
    Dtype | None, typer.Option(help="Precision of the model.", show_default="the model's")
]
NormOption = Annotated[
    NormChoice | None,
    typer.Option(
        help=(
            "Normalisation layers: running statistics (eval), batch statistics (train), or running"
            " statistics with fixed weights (frozen)."
        ),
        show_default="the factory's",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Time one product, predict the cost, and stop.")
]
LLC = "Sampling (llc, wbic, …); options not given are tuned"
Chains = Annotated[
    int | None, typer.Option(min=1, rich_help_panel=LLC, help="Number of chains.", show_default="4")
]
Draws = Annotated[int | None, typer.Option(min=1, rich_help_panel=LLC, help="Draws per chain.")]
BurnIn = Annotated[
    int | None, typer.Option(min=0, rich_help_panel=LLC, help="Burn-in steps per chain.")
]
BatchSize = Annotated[
    int | None, typer.Option(min=1, rich_help_panel=LLC, help="Batch size of a step.")
]
Nbeta = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=LLC,
        show_default="n/log n",
        help='Inverse temperature: "n/log n", "batch" (B/log B, as in devinterp) or a number.',
    ),
]
Localization = Annotated[
    float | None,
    typer.Option(
        min=0,
        rich_help_panel=LLC,
        show_default="by rule",
        help="Localization strength γ; the centre of llc_curve.",
    ),
]
StepSize = Annotated[
    float | None, typer.Option(min=0, rich_help_panel=LLC, help="Step size: ε, or h for kinetic.")
]
KernelOption = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=LLC, help="kinetic, sgld, hmc, mala, rmsprop_sgld, sghmc or sgnht."
    ),
]
Tol = Annotated[
    float | None,
    typer.Option(
        rich_help_panel=LLC, help="Relative standard error to reach.", show_default="0.03"
    ),
]
MaxGradients = Annotated[
    int | None,
    typer.Option(min=100, rich_help_panel=LLC, help="Maximum number of gradients over all chains."),
]


def measure(
    factory: Factory,
    checkpoint: Checkpoint = None,
    what: Annotated[
        str,
        typer.Option(
            help="Quantities, comma-separated, such as llc, or llc_curve for λ̂ over γ; "
            "an unknown name lists all."
        ),
    ] = "trace,eigenpairs,spectrum",
    curvature: CurvatureOption = CurvatureChoice.hessian,
    depth: Depth = 100,
    probes: Annotated[int, typer.Option(min=1, help="Random probes of the spectrum.")] = 1,
    top: Annotated[int, typer.Option(min=1, help="Number of eigenpairs.")] = 10,
    samples: Samples = None,
    seed: Seed = 0,
    device: Device = None,
    dtype: DtypeOption = None,
    norm: NormOption = None,
    out: Kept = None,
    vectors: Annotated[bool, typer.Option("--vectors", help="Also keep the eigenvectors.")] = False,
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
    """Measure trace, norms, eigenpairs, spectrum, learning coefficient and more, with errors."""
    from lambdahat._quantities import MeasureSettings
    from lambdahat.cli.loading import ProblemChoices
    from lambdahat.cli.measurements import run_measure

    kept = (
        "finished results are kept; the same command resumes"
        if out
        else "pass --out to keep finished results"
    )
    with exit_codes("" if dry_run else kept):
        choices = ProblemChoices(
            checkpoint, device, dtype and dtype.value, norm and norm.value, samples, seed
        )
        given = {
            "chains": chains,
            "draws": draws,
            "burn_in": burn_in,
            "batch_size": batch_size,
            "nbeta": _number(nbeta),
            "localization": localization,
            "step_size": step_size,
            "kernel": kernel,
            "tol": tol,
            "max_gradients": max_gradients,
        }
        sampling = {name: value for name, value in given.items() if value is not None}
        settings = MeasureSettings(curvature.value, depth, probes, top, seed, sampling)
        names = [name.strip() for name in what.split(",") if name.strip()]
        code = run_measure(factory, choices, names, settings, out, vectors, as_json, dry_run, quiet)
    raise typer.Exit(code)


def compare(
    factory: Factory,
    checkpoints: Annotated[
        list[str],
        typer.Argument(
            help="Two or more checkpoints: FILE or NAME=FILE; NAME=FILE,FILE,… for several seeds."
        ),
    ],
    what: Annotated[
        str, typer.Option(help="Quantities, comma-separated; an unknown name lists all.")
    ] = "llc,trace,eigenvalues,loss",
    curvature: CurvatureOption = CurvatureChoice.hessian,
    top: Annotated[int, typer.Option(min=1, help="Number of eigenvalues.")] = 3,
    samples: Samples = None,
    seed: Seed = 0,
    device: Device = None,
    dtype: DtypeOption = None,
    norm: NormOption = None,
    out: Annotated[
        Path | None, out_option("Folder for the comparison, its table and its figure.")
    ] = None,
    chains: Chains = None,
    draws: Draws = None,
    burn_in: BurnIn = None,
    batch_size: BatchSize = None,
    nbeta: Nbeta = None,
    localization: Localization = None,
    tol: Tol = None,
    max_gradients: MaxGradients = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare checkpoints of one model: the same quantities, at the same nβ and γ, with errors."""
    from lambdahat.cli.loading import ProblemChoices
    from lambdahat.cli.measurements import run_compare

    with exit_codes():
        choices = ProblemChoices(
            None, device, dtype and dtype.value, norm and norm.value, samples, seed
        )
        given = {
            "chains": chains,
            "draws": draws,
            "burn_in": burn_in,
            "batch_size": batch_size,
            "nbeta": _number(nbeta),
            "localization": localization,
            "tol": tol,
            "max_gradients": max_gradients,
        }
        question = {
            "what": [name.strip() for name in what.split(",") if name.strip()],
            "curvature": curvature.value,
            "top": top,
            "seed": seed,
            "sampling": {name: value for name, value in given.items() if value is not None},
        }
        code = run_compare(factory, checkpoints, choices, question, out, as_json, quiet)
    raise typer.Exit(code)


def landscape(
    factory: Factory,
    checkpoint: Checkpoint = None,
    along: Annotated[
        str,
        typer.Option(
            help="Comma-separated: largest, smallest, smallest-magnitude, random, filter."
        ),
    ] = "largest,smallest,smallest-magnitude",
    plane: Annotated[
        bool, typer.Option("--plane", help="Plane of the first two directions instead of lines.")
    ] = False,
    towards: Annotated[
        Path | None,
        typer.Option(help="Line to this checkpoint, offsets 0 to 1, instead of --along."),
    ] = None,
    distance: Annotated[
        float, typer.Option(help="Distance along each direction, in units of its norm.")
    ] = 1.0,
    points: Annotated[int, typer.Option(min=3, help="Points along each direction.")] = 21,
    held_out: Annotated[
        str | None,
        typer.Option(
            help='package.module:function that returns held-out data or a Problem; "test" of a run.'
        ),
    ] = None,
    refresh: Annotated[
        bool,
        typer.Option(
            "--refresh",
            help="Recompute batch-norm statistics over the training data at every point.",
        ),
    ] = False,
    curvature: CurvatureOption = CurvatureChoice.hessian,
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
    """Loss along Ritz vectors or random directions, on training and held-out data."""
    from lambdahat.cli.lines import Lines, run_landscape
    from lambdahat.cli.loading import ProblemChoices

    with exit_codes():
        choices = ProblemChoices(
            checkpoint, device, dtype and dtype.value, norm and norm.value, samples, seed
        )
        names = [name.strip() for name in along.split(",") if name.strip()]
        lines = Lines(
            tuple(names), plane, refresh, distance, points, curvature.value, depth, seed, towards
        )
        code = run_landscape(factory, choices, lines, held_out, out, as_json, dry_run, quiet)
    raise typer.Exit(code)


def advise(
    factory: Factory,
    checkpoint: Checkpoint = None,
    optimizer: Annotated[
        str, typer.Option(help="Optimiser name; an unknown name lists all.")
    ] = "sgd",
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Current batch size.", show_default="128, or all data if fewer"),
    ] = None,
    new_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Batch size to move to.", show_default="none")
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(help="Rate in use at --batch-size.", show_default="a common one if needed"),
    ] = None,
    momentum: Annotated[
        float | None,
        typer.Option(help="Momentum of sgd, momentum and nesterov.", show_default="0, 0.9 and 0.9"),
    ] = None,
    batches: Annotated[
        int | None,
        typer.Option(min=2, help="Batches to measure per size.", show_default="10 to 30"),
    ] = None,
    variance_samples: Annotated[
        int | None,
        typer.Option(min=2, help="Samples for per-sample variances.", show_default="at most 1,024"),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=0, help="Also find the largest stable rate by training N steps.")
    ] = 0,
    factor: Annotated[
        float | None,
        typer.Option(
            help="With --steps: stable means a final loss below this multiple of the first.",
            show_default="from the noise of small steps",
        ),
    ] = None,
    samples: Samples = None,
    seed: Seed = 0,
    device: Device = None,
    dtype: DtypeOption = None,
    norm: NormOption = None,
    out: Annotated[
        Path | None, out_option("Folder for the result, its tables and its figure.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Recommend learning rate, batch size and damping from curvature, with reasons."""
    from lambdahat.cli.advise import run_advise
    from lambdahat.cli.loading import ProblemChoices

    with exit_codes():
        choices = ProblemChoices(
            checkpoint, device, dtype and dtype.value, norm and norm.value, samples, seed
        )
        question = {
            "optimizer": optimizer,
            "batch_size": batch_size,
            "new_batch_size": new_batch_size,
            "learning_rate": learning_rate,
            "momentum": momentum,
            "batches": batches,
            "samples": variance_samples,
            "steps": steps,
            "factor": factor,
            "seed": seed,
        }
        code = run_advise(factory, choices, question, out, as_json, quiet)
    raise typer.Exit(code)


def _number(text: str | None) -> str | float | None:
    """A number where the text is one."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text
