"""The least damping of KFAC and Adam over batch sizes, cell by cell: §5.8 of the spectral
thesis.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from lambdahat.experiments.kit.cells import Cell, Row
from lambdahat.experiments.kit.experiment import SPECTRAL, Experiment, Size
from lambdahat.experiments.minibatch.damping import (
    ASSUMPTIONS,
    LEAST,
    OPTIMIZERS,
    SCALES,
    scaled_runs,
)
from lambdahat.experiments.minibatch.damping_claims import claims
from lambdahat.experiments.minibatch.damping_tables import charts, tables
from lambdahat.experiments.minibatch.rate_rows import edge_rows, rule_rows, scaling_rows
from lambdahat.experiments.minibatch.rate_rules import rule_at, start_of
from lambdahat.experiments.minibatch.rate_subjects import Subject, prepared, subject_of


@dataclass(frozen=True)
class Config:
    """The networks of a scale, and the ``root`` that the seeds of their starts, samples and
    batches derive from.
    """

    subjects: tuple[Subject, ...]
    root: int = 0


def cells(config: Config) -> list[Cell]:
    """For each network: an optimiser's least damping at one batch size, the rule, and an
    optimiser's scaled runs.
    """
    found: list[Cell] = []
    for subject in config.subjects:
        whole = asdict(subject) | {"root": config.root}
        found += [
            {
                "part": "edge",
                "optimizer": optimizer,
                "batch_size": size,
                **whole,
                "batch_sizes": (size,),
            }
            for optimizer in OPTIMIZERS
            for size in subject.batch_sizes
        ]
        found.append({"part": "rule", **whole})
        found += [{"part": "scaling", "optimizer": optimizer, **whole} for optimizer in OPTIMIZERS]
    return found


def run(cell: Cell, device: str) -> list[Row]:
    """The least damping, the rule, or the scaled runs, as ``part`` says."""
    ground, root = prepared(subject_of(cell), {}, cell["root"], device), cell["root"]
    if cell["part"] == "rule":
        return rule_rows(rule_at(ground, start_of(ground), "at the start", root))
    if cell["part"] == "scaling":
        return scaling_rows(scaled_runs(ground, cell["optimizer"], root))
    return edge_rows(LEAST[cell["optimizer"]](ground, root))


EXPERIMENT = Experiment(
    "damping",
    "The least damping of KFAC and Adam over batch sizes",
    SPECTRAL,
    "§5.8, Figures 5.11–5.14",
    {scale: Config(subjects) for scale, subjects in SCALES.items()},
    cells,
    run,
    claims,
    tables,
    charts,
    ASSUMPTIONS,
    size=(
        "VGG-16 without batch norm on CIFAR-100, 45,000 training images, 300 epochs by KFAC and"
        " Adam at α = 1; seeds are not in the text."
    ),
    sizes=(Size("VGG-16", "cifar100", 45_000, 300),),
)
