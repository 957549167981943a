"""The commands that look at a model: ``init``, ``measure``, ``compare``, ``landscape``, ``advise``.

Here are their arguments, and the files that ``init`` writes; what the others do is in
``measurements``, ``lines`` and ``advise``.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from lambdahat._core.check import require_choice
from lambdahat.cli.exits import InputError
from lambdahat.cli.options import (
    Checkpoint,
    Curvature,
    CurvatureChoice,
    Depth,
    DryRun,
    Factory,
    Json,
    Kept,
    Out,
    ProblemChoices,
    Quiet,
    SamplingChoices,
    complete,
    known_names,
    out_option,
    with_groups,
    words,
)

HEAD = '''"""The problem for `lambdahat measure {module}:make_problem`.

Put your own model, weights and data in place of the lines marked with HERE.
"""

import torch

import lambdahat as lh


'''
BODIES = {
    "plain": """def make_problem() -> lh.Problem:
    (x, y), _ = lh.data.digits_split(seed=0)  # HERE: your training data, inputs and targets
    model = lh.models.mlp([64, 16, 10], seed=0)  # HERE: your torch.nn.Module
    train(model, x, y)  # HERE: or model.load_state_dict(torch.load("weights.pt"))
    # losses: "cross_entropy", "mse", "bce_with_logits", …, or a function of outputs and targets
    return lh.Problem(model, "cross_entropy", (x, y))


def train(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(300):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
""",
    "images": """def make_problem() -> lh.Problem:
    # HERE: your model, such as torchvision.models.resnet18(num_classes=10)
    model = lh.models.preresnet(11, classes=10, seed=0)
    # HERE: its weights: model.load_state_dict(torch.load("weights.pt", map_location="cpu"))
    # HERE: your data, a Dataset, a DataLoader (without shuffling) or tensors
    images = torch.randn(32, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(32) % 10
    # norm="eval" uses the running statistics of batch norm; batch_size is what fits in memory
    return lh.Problem(model, "cross_entropy", (images, labels), batch_size=16, norm="eval")
""",
    "transformers": """def make_problem() -> lh.Problem:
    from transformers import GPT2Config, GPT2LMHeadModel

    # HERE: your model, such as AutoModelForCausalLM.from_pretrained("gpt2")
    small = {"n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    ids = {"bos_token_id": None, "eos_token_id": None}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=10, **small, **ids))
    # HERE: your text, as batches of a tokenizer's output with labels
    steps = torch.arange(16) * torch.arange(1, 10)[:, None]
    tokens = (steps + torch.arange(9)[:, None]) % 10
    batches = [{"input_ids": part, "labels": part} for part in tokens.split(3)]
    train(model, batches)  # HERE: leave this out for trained weights
    return lh.Problem(model.eval(), "model", batches, count="tokens")


def train(model: torch.nn.Module, batches: list) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(50):
        for batch in batches:
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
""",
}


class ProblemKind(StrEnum):
    """What kind of model the factory is for."""

    plain = "plain"
    images = "images"
    transformers = "transformers"


PROBLEM_CHOICES, SAMPLING_CHOICES = ProblemChoices(), SamplingChoices()


def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Python file to write.")] = Path(
        "problem.py"
    ),
    kind: Annotated[
        ProblemKind,
        typer.Option(
            metavar="NAME", help="plain, images (torchvision) or transformers (Hugging Face)."
        ),
    ] = ProblemKind.plain,
) -> None:
    """Write a problem that can be measured at once. Put your own model and data in its place."""
    from lambdahat._core.storage import write_atomically

    module = file.stem
    if file.suffix != ".py" or not module.isidentifier():
        raise InputError(
            f"FILE must be a Python module such as problem.py, got {str(file)!r}; use letters,"
            " digits and underscores"
        )
    if file.exists():
        raise InputError(f"FILE must be a new file, got {file}, which exists; name another")
    if not file.parent.is_dir():
        raise InputError(f"FILE must lie in a folder that exists, got {file}; make it first")
    write_atomically(file, (HEAD.format(module=module) + BODIES[kind.value]).encode())
    place = "" if file.parent == Path() else f"cd {file.parent} && "
    print(f"written to {file}; now: {place}lambdahat measure {module}:make_problem")


@with_groups
def measure(
    factory: Factory,
    what: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Quantities, such as llc,trace; an unknown name lists all.",
            autocompletion=complete("quantity"),
        ),
    ] = "trace,eigenpairs,spectrum",
    curvature: Curvature = CurvatureChoice.hessian,
    depth: Depth = 100,
    probes: Annotated[
        int, typer.Option(min=1, metavar="N", help="Random probes of the spectrum.")
    ] = 1,
    top: Annotated[int, typer.Option(min=1, metavar="N", help="Number of eigenpairs.")] = 10,
    vectors: Annotated[bool, typer.Option("--vectors", help="Also keep the eigenvectors.")] = False,
    checkpoint: Checkpoint = None,
    choices: ProblemChoices = PROBLEM_CHOICES,
    sampling: SamplingChoices = SAMPLING_CHOICES,
    out: Kept = None,
    as_json: Json = False,
    dry_run: DryRun = False,
    quiet: Quiet = False,
) -> int:
    """Measure curvature and the learning coefficient, with errors."""
    names = _split_names(what, known_names("quantity"))
    from lambdahat._quantities import MeasureSettings
    from lambdahat.cli.measurements import run_measure

    settings = MeasureSettings(curvature, depth, probes, top, choices.seed, sampling.given())
    return run_measure(
        factory, checkpoint, choices, names, settings, out, vectors, as_json, dry_run, quiet
    )


@with_groups
def compare(
    factory: Factory,
    checkpoints: Annotated[
        list[str],
        typer.Argument(
            metavar="CHECKPOINTS...",
            help="Two or more: FILE or NAME=FILE; NAME=FILE,FILE,… for seeds.",
        ),
    ],
    what: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Comma-separated; an unknown name lists all.",
            autocompletion=complete("quantity", "eigenvalues", "loss"),
        ),
    ] = "llc,trace,eigenvalues,loss",
    curvature: Curvature = CurvatureChoice.hessian,
    top: Annotated[int, typer.Option(min=1, metavar="N", help="Number of eigenvalues.")] = 3,
    choices: ProblemChoices = PROBLEM_CHOICES,
    sampling: SamplingChoices = SAMPLING_CHOICES,
    out: Annotated[
        Path | None, out_option("Folder for the comparison, its table and its figure.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Compare checkpoints at the same nβ and γ, with errors."""
    names = _split_names(what, (*known_names("quantity"), "eigenvalues", "loss"))
    from lambdahat.cli.measurements import run_compare

    question = {
        "what": names,
        "curvature": curvature,
        "top": top,
        "seed": choices.seed,
        "sampling": sampling.given(),
    }
    return run_compare(factory, checkpoints, choices, question, out, as_json, quiet)


@with_groups
def landscape(
    factory: Factory,
    along: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Of largest, smallest, smallest-magnitude, random and filter.",
            autocompletion=words("largest", "smallest", "smallest-magnitude", "random", "filter"),
        ),
    ] = "largest,smallest,smallest-magnitude",
    plane: Annotated[
        bool, typer.Option("--plane", help="Plane of the first two directions instead of lines.")
    ] = False,
    towards: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Line to this checkpoint instead of --along."),
    ] = None,
    distance: Annotated[
        float, typer.Option(metavar="X", help="Distance along each direction.")
    ] = 1.0,
    points: Annotated[
        int, typer.Option(min=3, metavar="N", help="Points along each direction.")
    ] = 21,
    curvature: Curvature = CurvatureChoice.hessian,
    depth: Depth = 100,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Recompute batch-norm statistics at every point.")
    ] = False,
    checkpoint: Checkpoint = None,
    held_out: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel="Problem",
            help='module:function with held-out data; "test" of a run.',
        ),
    ] = None,
    choices: ProblemChoices = PROBLEM_CHOICES,
    out: Out = None,
    as_json: Json = False,
    dry_run: DryRun = False,
    quiet: Quiet = False,
) -> int:
    """Draw the loss along Ritz vectors or random directions."""
    from lambdahat.cli.lines import Lines, run_landscape

    names = tuple(name.strip() for name in along.split(",") if name.strip())
    lines = Lines(names, plane, refresh, distance, points, curvature, depth, choices.seed, towards)
    return run_landscape(
        factory, checkpoint, choices, lines, held_out, out, as_json, dry_run, quiet
    )


@with_groups
def advise(
    factory: Factory,
    optimizer: Annotated[
        str, typer.Option(metavar="NAME", help="Optimiser; an unknown name lists all.")
    ] = "sgd",
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Current batch size.", show_default="128, or all data"
        ),
    ] = None,
    new_batch_size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Batch size to move to.")
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(metavar="X", help="Learning rate in use at --batch-size.")
    ] = None,
    momentum: Annotated[
        float | None,
        typer.Option(metavar="X", help="Of sgd, momentum, nesterov.", show_default="0, 0.9, 0.9"),
    ] = None,
    batches: Annotated[
        int | None,
        typer.Option(
            min=2, metavar="N", help="Batches to measure per size.", show_default="10 to 30"
        ),
    ] = None,
    variance_samples: Annotated[
        int | None,
        typer.Option(
            min=2, metavar="N", help="Samples for variances.", show_default="at most 1,024"
        ),
    ] = None,
    steps: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Find the largest stable rate by N steps of training."
        ),
    ] = 0,
    factor: Annotated[
        float | None,
        typer.Option(metavar="X", help="With --steps: a loss below X times the first is stable."),
    ] = None,
    checkpoint: Checkpoint = None,
    choices: ProblemChoices = PROBLEM_CHOICES,
    out: Annotated[
        Path | None, out_option("Folder for the result, its tables and its figure.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Recommend learning rate, batch size and damping, with reasons."""
    from lambdahat.cli.advise import run_advise

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
        "seed": choices.seed,
    }
    return run_advise(factory, checkpoint, choices, question, out, as_json, quiet)


def _split_names(what: str, known: tuple[str, ...]) -> list[str]:
    """The names in a comma-separated text; an unknown one is refused."""
    names = [name.strip() for name in what.split(",") if name.strip()]
    for name in names:
        require_choice(name, "what", known)
    return names
