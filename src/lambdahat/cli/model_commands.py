"""The commands that look at a model: ``init``, ``measure``, ``compare``, ``landscape``, ``advise``.

Here are their arguments, and the files that ``init`` writes; what the others do is in
``measurements``, ``lines`` and ``advise``.
"""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path

from lambdahat._core.check import require_choice
from lambdahat.cli import options
from lambdahat.cli.exits import InputError

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


ProblemKind = StrEnum("ProblemKind", "plain images transformers")


def init(
    file: Path = options.argument("Python file to write.", Path("problem.py"), "FILE"),
    kind: ProblemKind = options.option(
        "plain, images (torchvision) or transformers (Hugging Face).", ProblemKind.plain
    ),
) -> None:
    """Write a problem that can be measured at once. Adapt it to your own model and data."""
    from lambdahat._core.storage import write_atomically

    module = file.stem
    if file.suffix != ".py" or not module.isidentifier():
        cure = f"got {str(file)!r}; use letters, digits and underscores"
        raise InputError(f"FILE must be a Python module such as problem.py, {cure}")
    if file.exists():
        raise InputError(f"FILE must be a new file, got {file}, which exists; name another")
    if not file.parent.is_dir():
        raise InputError(f"FILE must lie in a folder that exists, got {file}; make it first")
    write_atomically(file, (HEAD.format(module=module) + BODIES[kind]).encode())
    place = "" if file.parent == Path() else f"cd {file.parent} && "
    print(f"written to {file}; now: {place}lambdahat measure {module}:make_problem")


def measure(
    *,
    factory: str = options.FACTORY,
    what: str = options.option(
        "Quantities, such as llc,trace; an unknown name lists all.",
        "trace,eigenpairs,spectrum",
        "NAMES",
        complete="quantity",
    ),
    curvature: options.CurvatureChoice = options.CURVATURE,
    depth: int = options.DEPTH,
    probes: int = options.option("Random probes of the spectrum.", 1, min=1),
    top: int = options.option("Number of eigenpairs.", 10, min=1),
    vectors: bool = options.option("Also keep the eigenvectors.", False),
    checkpoint: Path | None = options.CHECKPOINT,
    choices: options.ProblemChoices,
    sampling: options.SamplingChoices,
    output: options.Output = options.KEPT,
    dry_run: bool = options.DRY_RUN,
) -> int:
    """Measure curvature and the learning coefficient, with errors."""
    names = _split_names(what, options.known_names("quantity"))
    from lambdahat.cli.measurements import run_measure
    from lambdahat.estimators.quantities import MeasureSettings

    settings = MeasureSettings(curvature, depth, probes, top, choices.seed, sampling.given())
    question = (names, settings, vectors)
    return run_measure(factory, checkpoint, choices, *question, output, dry_run)


COMPARED = options.names_completion("quantity", "eigenvalues", "loss")


def compare(
    *,
    factory: str = options.FACTORY,
    checkpoints: list[str] = options.argument(
        "Two or more: FILE or NAME=FILE; NAME=FILE,FILE,… for seeds.", ..., "CHECKPOINTS..."
    ),
    what: str = options.option(
        "Comma-separated; an unknown name lists all.",
        "llc,trace,eigenvalues,loss",
        "NAMES",
        complete=COMPARED,
    ),
    curvature: options.CurvatureChoice = options.CURVATURE,
    top: int = options.option("Number of eigenvalues.", 3, min=1),
    choices: options.ProblemChoices,
    sampling: options.SamplingChoices,
    output: options.Output = options.out_option(
        "Folder for the comparison, its table and its figure."
    ),
) -> int:
    """Compare checkpoints at the same nβ and γ, with errors."""
    names = _split_names(what, (*options.known_names("quantity"), "eigenvalues", "loss"))
    from lambdahat.cli.measurements import run_compare

    question = {"curvature": curvature, "top": top, "seed": choices.seed, "what": names}
    question["sampling"] = sampling.given()
    return run_compare(factory, checkpoints, choices, output, **question)


def landscape(
    *,
    factory: str = options.FACTORY,
    lines: options.Lines,
    checkpoint: Path | None = options.CHECKPOINT,
    held_out: str | None = options.option(
        'module:function with held-out data; "test" of a run.', panel=options.PROBLEM
    ),
    choices: options.ProblemChoices,
    output: options.Output,
    dry_run: bool = options.DRY_RUN,
) -> int:
    """Draw the loss along Ritz vectors or random directions."""
    from lambdahat.cli.lines import run_landscape

    return run_landscape(factory, checkpoint, choices, lines, held_out, output, dry_run)


@options.option_group
class AdviceChoices:
    """The optimiser that advice is for, and how much is measured."""

    optimizer: str = options.option("Optimiser; an unknown name lists all.", "sgd")
    batch_size: int | None = options.option("Current batch size.", shown="128, or all data", min=1)
    new_batch_size: int | None = options.option("Batch size to move to.", min=1)
    learning_rate: float | None = options.option("Learning rate in use at --batch-size.")
    momentum: float | None = options.option("Of sgd, momentum, nesterov.", shown="0, 0.9, 0.9")
    batches: int | None = options.option("Batches to measure per size.", shown="10 to 30", min=2)
    variance_samples: int | None = options.option(
        "Samples for variances.", shown="at most 1,024", min=2
    )
    steps: int = options.option("Find the largest stable rate by N steps of training.", 0, min=0)
    factor: float | None = options.option("With --steps: a loss below X times the first is stable.")


def advise(
    *,
    factory: str = options.FACTORY,
    question: AdviceChoices,
    checkpoint: Path | None = options.CHECKPOINT,
    choices: options.ProblemChoices,
    output: options.Output = options.out_option(
        "Folder for the result, its tables and its figure."
    ),
) -> int:
    """Recommend learning rate, batch size and damping, with reasons."""
    from lambdahat.cli.advise import run_advise

    asked = asdict(question) | {"seed": choices.seed}
    asked["samples"] = asked.pop("variance_samples")
    return run_advise(factory, checkpoint, choices, output, **asked)


def _split_names(what: str, known: tuple[str, ...]) -> list[str]:
    """The names in a text, with commas or spaces between them; an unknown one is refused."""
    names = what.replace(",", " ").split()
    for name in names:
        require_choice(name, "what", known)
    return names
