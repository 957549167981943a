"""Learning rates over batch sizes with batch normalisation: Figures 5.7c, 5.8b, 5.9 and 5.10 of
the spectral thesis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lambdahat.experiments.averaging.networks import network, parameters_of
from lambdahat.experiments.kit.cells import Cell, Row, Scale, settings_of
from lambdahat.experiments.kit.experiment import SPECTRAL, Experiment, Size
from lambdahat.experiments.kit.training import final_row, images, train_by_sgd
from lambdahat.experiments.minibatch.batch_norm_claims import OSCILLATES, claims
from lambdahat.experiments.minibatch.batch_norm_tables import charts, tables
from lambdahat.experiments.minibatch.rate_claims import FALL, LOST, SAME
from lambdahat.experiments.minibatch.rates import RULES


@dataclass(frozen=True)
class Subject:
    """A network with weight decay ``decay``, trained at the rate ``base``·B/128 for all ``sizes``
    B.

    128 is the scale's ``batch``. ``compared`` has the sizes of other rules, "square root" and
    "constant". All ``rates`` are tried at B = 128. ``seeds``, unless 0, is instead of the scale's.
    """

    network: str
    decay: float
    base: float
    sizes: tuple[int, ...]
    compared: tuple[tuple[str, tuple[int, ...]], ...] = ()
    rates: tuple[float, ...] = ()
    seeds: int = 0


@dataclass(frozen=True)
class Config(Scale):
    """One scale; ``batch`` is the batch size that rates are scaled from."""

    subjects: tuple[Subject, ...]
    side: int = 0
    augmented: bool = False


def cells(config: Config) -> list[Cell]:
    """Network × rule × batch size × seed, and network × rate × seed at the reference.

    At the reference all rules are the same: its cell is that of the linear rule.
    """
    base = settings_of(config, "subjects", "batch", "seeds") | {"reference": config.batch}
    found: list[Cell] = []
    for subject in config.subjects:
        plans = [("linear", size) for size in subject.sizes]
        plans += [(rule, size) for rule, sizes in subject.compared for size in sizes]
        runs = [
            (rule, size, subject.base * (size / config.batch) ** RULES[rule])
            for rule, size in plans
        ]
        runs += [("search", config.batch, rate) for rate in subject.rates]
        own = base | {"network": subject.network, "decay": subject.decay}
        found += [
            {**own, "rule": rule, "batch": size, "rate": rate, "seed": seed}
            for rule, size, rate in runs
            for seed in range(subject.seeds or config.seeds)
        ]
    return found


def run(cell: Cell, device: str) -> list[Row]:
    """A row for each epoch, and one for the end with both losses in evaluation mode."""
    found = images(cell, device)
    model = network(cell["network"], found.shape, found.classes, cell["seed"]).to(device)
    trained = train_by_sgd(model, found, cell, cell["decay"])
    guess = 100 * (1 - 1 / found.classes)
    rows = [_epoch(row, guess) for row in trained.epochs]
    end = {
        **rows[-1],
        **trajectory(rows, cell["epochs"]),
        "parameters": parameters_of(model),
        "kind": "end",
    }
    if not end["diverged"]:
        last = final_row(model, found)
        end |= {"training loss": last["loss"], "training error": 100 - last["training accuracy"]}
    return [*rows, end]


def _epoch(row: Mapping[str, Any], guess: float) -> Row:
    """An epoch in our words, errors in per cent. A network that diverged errs as one that
    guesses, and is nowhere.
    """
    figures = {
        "training loss": row["loss"],
        "validation loss": row.get("validation_loss"),
        "distance": row["distance"],
    }
    lost = any(value is None or not math.isfinite(value) for value in figures.values())
    wrong = {"training error": row["accuracy"], "error": row.get("validation_accuracy")}
    return {
        "kind": "epoch",
        "epoch": row["epoch"],
        "rate now": row["learning_rate"],
        "diverged": lost,
        **(dict.fromkeys(figures) if lost else figures),
        **(
            dict.fromkeys(wrong, guess)
            if lost
            else {name: 100 * (1 - value) for name, value in wrong.items()}
        ),
    }


def trajectory(rows: Sequence[Row], epochs: int) -> Row:
    """The validation error "before" the rate is reduced, its mean change from epoch to epoch after
    a quarter of the run, at the full rate ("oscillation"), and the "least" over all epochs.
    """
    errors = [row["error"] for row in rows]
    full = epochs // 2 + 1  # epochs of which t/T ≤ ½, from t = 0
    changes = [
        abs(after - before) for before, after in pairwise(errors[:full][max(0, epochs // 4 - 1) :])
    ]
    oscillation = sum(changes) / len(changes) if changes else None
    return {"before": errors[:full][-1], "oscillation": oscillation, "least": min(errors)}


ASSUMPTIONS = (
    (
        "CIFAR-10 in place of CIFAR-100 and ImageNet-32: 16,384 images at 8 × 8 (cpu), 10,240 at 32"
        " × 32 (paper)."
    ),
    "8 epochs (cpu) and 20 (paper) of the thesis's 300, by its schedule, Eq. 5.37.",
    "Crops and flips, which the thesis has, at paper alone. Momentum is 0.9.",
    (
        "On a CPU a small network stands for VGG-16, and WideResNet-10×1 for 28×10; on a GPU"
        " PreResNet-20 does."
    ),
    (
        "All batches are whole: the number of images is a multiple of 2,048. Rate times steps is"
        " the same at every B."
    ),
    (
        "The thesis does not print α₀ of VGG-16BN: 0.1 (cpu) and 0.05 (paper) here. Others are"
        " tried on a CPU."
    ),
    (
        "Images, epochs and rates of cpu were chosen by trial runs from seeds 0 and 1: that at B ="
        " 128 was to learn."
    ),
    "The rules on what is judged were set after those, and before the other runs.",
    (
        "VGG-16 without batch norm has α₀ = 0.02, where the thesis has 0.01 and 300 epochs; γ is"
        " the same as with it."
    ),
    (
        "Validation images stand for the thesis's test images too. n counts seeds: start, images"
        " and batches."
    ),
    (
        f"An error is kept if it changes by at most {SAME:g} %, as the thesis's own does from B ="
        " 128 to 1,024."
    ),
    f"Nothing is judged of scaling where the run at B = 128 errs on more than {LOST:g} % itself.",
    (
        f"Of “unstable” runs nothing is judged where the largest B errs on at most {SAME:g} % more"
        " than B = 128."
    ),
    (
        f"A run oscillates if its error changes {OSCILLATES:g} times as much per epoch as that at B"
        " = 128."
    ),
    "That is read from the end of the first quarter of the run on, as long as the rate is full.",
    "The similar solutions, of which distance and error are compared, are those up to B = 1,024.",
    (
        f"A run does not train if its loss ends above {FALL:g} of a guess's. One that diverged errs"
        " as a guess does."
    ),
    "Other rules with batch norm, and the cost of α ∝ B with and without it, are claims of ours.",
)

LARGE = ("square root", (1024, 2048)), ("constant", (1024, 2048))
FAR = ("square root", (1024,)), ("constant", (1024,))
LONG = (32, 128, 256, 512, 1024, 2048)
SHORT = (128, 512, 1024, 2048)
FEW = (128, 512, 2048)
TINY = (16, 32, 64, 128, 256)
FAR_TINY = ("square root", (128,)), ("constant", (128,))

EXPERIMENT = Experiment(
    "batch-norm-rates",
    "Learning rates scaled with the batch size, with batch normalisation",
    SPECTRAL,
    "§5.7, Figures 5.7c, 5.8b, 5.9 and 5.10",
    {
        "smoke": Config(
            "digits",
            256,
            128,
            4,
            2,
            (
                Subject("VGG-4×4-BN", 5e-4, 0.1, TINY, FAR_TINY, (10.0,)),
                Subject("WideResNet-10×1", 5e-5, 0.1, TINY[::2], seeds=1),
                Subject("VGG-4×4", 5e-4, 0.1, (16, *TINY[2:]), FAR_TINY[:1], (10.0,)),
            ),
            batch=16,
        ),
        "cpu": Config(
            "cifar10",
            16_384,
            4096,
            8,
            5,
            (
                Subject("VGG-4×16-BN", 5e-4, 0.1, (64, *LONG[1:]), LARGE, (0.3, 1.0, 3.0)),
                Subject("VGG-4×16", 5e-4, 0.1, (64, *SHORT), FAR[:1], (0.3, 1.0)),
                Subject("WideResNet-10×1", 5e-4, 0.1, FEW, seeds=3),
                Subject("WideResNet-10×1", 5e-5, 0.1, FEW, seeds=3),
            ),
            side=8,
        ),
        "paper": Config(
            "cifar10",
            10_240,
            4096,
            20,
            3,
            (
                Subject("VGG-16-BN", 5e-4, 0.05, LONG, FAR),
                Subject("PreResNet-20", 5e-4, 0.1, LONG, FAR),
                Subject("PreResNet-20", 5e-5, 0.1, SHORT),
                Subject("VGG-16", 5e-4, 0.02, (32, *SHORT), FAR[:1]),
            ),
            augmented=True,
        ),
    },
    cells,
    run,
    claims,
    tables,
    charts,
    ASSUMPTIONS,
    size=(
        "VGG-16 with and without batch norm and WideResNet-28×10 on CIFAR-100 (45,000 training"
        " images), WideResNet-28×10 on ImageNet-32 (a million), 300 epochs; seeds are not in the"
        " text."
    ),
    sizes=(
        Size("VGG-16-BN", "cifar100", 45_000, 300),
        Size("VGG-16", "cifar100", 45_000, 300),
        Size("WideResNet-28×10", "cifar100", 45_000, 300),
        Size("WideResNet-28×10", "imagenet32", 1_000_000, 300),
    ),
)
