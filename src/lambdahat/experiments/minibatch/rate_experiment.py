"""Stable learning rates over batch sizes, cell by cell: §5.7 and §5.8.1 of the spectral thesis."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from lambdahat.experiments.kit.cells import Cell, Row
from lambdahat.experiments.kit.experiment import SPECTRAL, Experiment, Size
from lambdahat.experiments.minibatch.rate_claims import claims
from lambdahat.experiments.minibatch.rate_rows import edge_rows, rule_rows, scaling_rows
from lambdahat.experiments.minibatch.rate_subjects import Subject, prepared, subject_of
from lambdahat.experiments.minibatch.rate_tables import charts, tables
from lambdahat.experiments.minibatch.rates import (
    ASSUMPTIONS,
    POINTS,
    SCALED_OPTIMIZERS,
    SCALES,
    SEARCHES,
    rule_of,
    scaled_runs,
    stable_rates,
)


@dataclass(frozen=True)
class Config:
    """The networks of a scale, and the ``root`` that the seeds of their starts, samples and
    batches derive from.
    """

    subjects: tuple[Subject, ...]
    root: int = 0


def cells(config: Config) -> list[Cell]:
    """For each network: the edges of an optimiser at one batch size, the rule at one point, an
    optimiser's scaled runs.

    All seeds of a network are in one cell, for they train together.
    """
    found: list[Cell] = []
    for subject in config.subjects:
        whole = asdict(subject) | {"root": config.root}
        for optimizer in dict.fromkeys(optimizer for optimizer, _ in SEARCHES):
            found += [
                {
                    "part": "edge",
                    "optimizer": optimizer,
                    "batch_size": size,
                    **whole,
                    "batch_sizes": (size,),
                }
                for size in subject.batch_sizes
            ]
        found += [{"part": "rule", "point": point, **whole} for point in POINTS]
        if subject.epochs:
            found += [
                {"part": "scaling", "optimizer": optimizer, **whole}
                for optimizer in SCALED_OPTIMIZERS
            ]
    return found


def run(cell: Cell, device: str) -> list[Row]:
    """The edges by every criterion, the rule, or the scaled runs, as ``part`` says."""
    ground, root = prepared(subject_of(cell), {}, cell["root"], device), cell["root"]
    if cell["part"] == "rule":
        return rule_rows(rule_of(ground, cell["point"], root))
    if cell["part"] == "scaling":
        return scaling_rows(scaled_runs(ground, cell["optimizer"], root))
    criteria = [criterion for optimizer, criterion in SEARCHES if optimizer == cell["optimizer"]]
    found = (stable_rates(ground, cell["optimizer"], root, criterion) for criterion in criteria)
    return [row for frontier in found for row in edge_rows(frontier)]


EXPERIMENT = Experiment(
    "stable-rates",
    "The largest stable learning rate over batch sizes, and what comes of scaling it",
    SPECTRAL,
    "§§5.7 and 5.8.1, Figures 5.7a, 5.7b, 5.8a, 5.15 and 5.16",
    {scale: Config(subjects) for scale, subjects in SCALES.items()},
    cells,
    run,
    claims,
    tables,
    charts,
    ASSUMPTIONS,
    size=(
        "VGG-16 without batch norm on CIFAR-100, 45,000 training images, 300 epochs, batches of 128"
        " to 4,096; seeds are not in the text."
    ),
    sizes=(Size("VGG-16", "cifar100", 45_000, 300),),
)
