"""``lambdahat init``: write a module with a factory that the other commands take."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from lambdahat.cli.exits import InputError, exit_codes

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
    images = torch.randn(64, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(64) % 10
    # norm="eval" uses the running statistics of batch norm; batch_size is what fits in memory
    return lh.Problem(model, "cross_entropy", (images, labels), batch_size=32, norm="eval")
""",
    "transformers": """def make_problem() -> lh.Problem:
    from transformers import GPT2Config, GPT2LMHeadModel

    # HERE: your model, such as AutoModelForCausalLM.from_pretrained("gpt2")
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).eval()
    # HERE: your text, as batches of a tokenizer's output with labels
    tokens = torch.randint(64, (16, 32), generator=torch.Generator().manual_seed(0))
    batches = [{"input_ids": part, "labels": part} for part in tokens.split(8)]
    return lh.Problem(model, "model", batches, count="tokens")
""",
}


class ProblemKind(StrEnum):
    """What kind of model the factory is for."""

    plain = "plain"
    images = "images"
    transformers = "transformers"


def init(
    file: Annotated[Path, typer.Argument(help="Python file to write.")] = Path("problem.py"),
    kind: Annotated[
        ProblemKind,
        typer.Option(
            help="plain, images (such as a torchvision model) or transformers (Hugging Face)."
        ),
    ] = ProblemKind.plain,
) -> None:
    """Write a file with a problem that can be measured at once, to fill in your own model."""
    from lambdahat.results import write_atomically

    with exit_codes():
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
        text = HEAD.format(module=module) + BODIES[kind.value]
        write_atomically(file, text.encode())
    print(
        f"written to {file}; now: lambdahat measure {module}:make_problem --what trace,eigenpairs"
    )
