"""Curvature and what batches show of it through training by SGD and by KFAC, over seeds: Figure
5.6, spectral thesis.

A cell trains one network by one optimiser from one seed and stops to measure. Both optimisers begin
at the same parameters, which the cell of SGD measures for both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from torch import nn
from torch.optim import Optimizer

from lambdahat.experiments.kit.cells import Cell, Row
from lambdahat.experiments.kit.experiment import SPECTRAL, Experiment, Size
from lambdahat.experiments.minibatch.eigen_experiment import settings_of, subject_through
from lambdahat.experiments.minibatch.eigen_measuring import measure_point
from lambdahat.experiments.minibatch.eigen_subjects import (
    MOMENTUM,
    ONE,
    Effort,
    Subject,
    load_split,
    sgd,
    training_stops,
)
from lambdahat.experiments.minibatch.evolution_claims import claims
from lambdahat.experiments.minibatch.evolution_rows import rows_of
from lambdahat.experiments.minibatch.evolution_tables import charts, tables
from lambdahat.optim.kfac import KFAC


@dataclass(frozen=True)
class Config:
    """The networks of a scale, each trained from ``seeds`` starts by SGD at its own rate and by
    KFAC at these.
    """

    subjects: tuple[Subject, ...]
    seeds: int
    kfac_rate: float = 0.003
    damping: float = 0.1


def cells(config: Config) -> list[Cell]:
    """Network × optimiser × seed; KFAC's do not measure the start again."""
    return [
        cell
        for subject in config.subjects
        for seed in range(config.seeds)
        for cell in _pair(config, subject, seed)
    ]


def _pair(config: Config, subject: Subject, seed: int) -> tuple[Cell, Cell]:
    later = tuple(epoch for epoch in subject.epochs if epoch > 0)
    kfac = replace(subject, rate=config.kfac_rate, epochs=later)
    shared = {"operators": subject.operators, "seed": seed}
    return (
        {"optimizer": "SGD", **settings_of(subject), **shared},
        {"optimizer": "KFAC", **settings_of(kfac), **shared, "damping": config.damping},
    )


def run(cell: Cell, device: str) -> list[Row]:
    """At each stop and for each operator a row for the full data, and one with predictions for
    each batch size.
    """
    subject = subject_through(cell, tuple(cell["operators"]))
    make = sgd if cell["optimizer"] == "SGD" else partial(kfac, damping=cell["damping"])
    rows: list[Row] = []
    for epoch, problem in training_stops(
        subject, load_split(subject.data), cell["seed"], device, make
    ):
        points = measure_point(subject, epoch, problem, cell["seed"], spectra=0)
        rows += rows_of([point.predicted() for point in points])
    return rows


def kfac(model: nn.Module, rate: float, damping: float) -> Optimizer:
    """KFAC of the empirical Fisher with momentum 0.9, no decay."""
    return KFAC(model, rate, damping, momentum=MOMENTUM)


SIZES = (128, 512)
QUICK = Effort(pairs=2, tol=1e-2, batches=3, steps=10, depth=10, probes=2, samples=32)
PLAIN = Effort(pairs=3, tol=1e-3, steps=15, depth=30, probes=4, samples=256)
CONVOLUTIONS = Effort(pairs=3, tol=1e-2, steps=10, depth=16, probes=4, samples=128)
SCALES = {
    "smoke": Config(
        (
            Subject("softmax", "softmax", "digits", (0, 5), 0.1, 300, {}, (64,), QUICK, ONE),
            Subject("MLP 6", "mlp", "digits", (0, 1, 5), 0.1, 300, {"widths": (6,)}, (64,), QUICK),
        ),
        seeds=2,
        kfac_rate=0.03,
    ),
    "cpu": Config(
        (
            Subject("softmax", "softmax", "mnist", (0, 1, 10), 0.02, 4000, {}, SIZES, PLAIN, ONE),
            Subject(
                "MLP 32", "mlp", "mnist", (0, 1, 10), 0.02, 4000, {"widths": (32,)}, SIZES, PLAIN
            ),
            Subject(
                "MLP 64-64",
                "mlp",
                "mnist",
                (0, 1, 10),
                0.02,
                4000,
                {"widths": (64, 64)},
                SIZES,
                PLAIN,
            ),
            Subject(
                "LeNet-5", "lenet5", "cifar10", (0, 8, 20), 0.02, 1000, {}, (128,), CONVOLUTIONS
            ),
        ),
        seeds=5,
    ),
    "paper": Config(
        (
            Subject("softmax", "softmax", "mnist", (0, 2, 20), 0.02, 10_000, {}, SIZES, PLAIN, ONE),
            Subject(
                "MLP 128",
                "mlp",
                "mnist",
                (0, 2, 20),
                0.02,
                10_000,
                {"widths": (128,)},
                SIZES,
                PLAIN,
            ),
            Subject(
                "MLP 256-128",
                "mlp",
                "mnist",
                (0, 2, 20),
                0.02,
                10_000,
                {"widths": (256, 128)},
                SIZES,
                PLAIN,
            ),
            Subject("LeNet-5", "lenet5", "cifar10", (0, 3, 10), 0.02, 5000, {}, SIZES, PLAIN),
            Subject(
                "VGG-16",
                "vgg16",
                "cifar10",
                (0, 10, 40),
                0.01,
                2000,
                {"dropout": 0.0},
                (128,),
                CONVOLUTIONS,
                ONE,
                chunk=1000,
            ),
        ),
        seeds=3,
    ),
}

ASSUMPTIONS = (
    (
        "CIFAR-10 in place of CIFAR-100, which cannot be had here, and VGG-16 at the scale paper"
        " alone, by its Hessian."
    ),
    (
        "n counts seeds: each has its own images, start and order of batches, which SGD and KFAC of"
        " a seed share."
    ),
    (
        "The start is measured once, for both. SGD and KFAC have momentum 0.9, batches of 128 and"
        " no weight decay."
    ),
    (
        "The thesis gives no settings for Figure 5.6: KFAC has α = 0.003, δ = 0.1 and the empirical"
        " Fisher."
    ),
    (
        "They were chosen by the training loss, to fall about as fast as SGD's; curvature had been"
        " seen at α = 0.01 alone."
    ),
    (
        "Ten batches of each size are drawn without replacement at every stop; LeNet-5 on a CPU and"
        " VGG-16 have B = 128."
    ),
    "σ² is Algorithm 8 with its 1/N put in and ‖H̄v‖² in place of (vᵀH̄v)².",
    (
        "Theorem 16 is read as the spiked covariance with the measured spectrum as population, in"
        " consistent units."
    ),
    (
        "“Within one standard deviation”: |predicted − mean of ten batches|/(their deviation), mean"
        " over epochs, is < 1."
    ),
    "A better fit is one by 10 % or more in the mean λ'₁ of ten batches, as in batch-eigenvalues.",
    (
        "That batches' λ₁ moves away from the full data's is read as λ'₁ − λ₁ at the last stop"
        " above that at the start."
    ),
    (
        "A batch's eigenvalues come from 15 Lanczos steps, of convolutions on a CPU and of VGG-16"
        " from 10."
    ),
    (
        "So few see λ'₁ well where it is apart, but λ'_P far inside: it is in the tables, and"
        " nothing is judged by it."
    ),
    "A network of which a seed ends with a loss above 0.9·ln 10, that of guessing, tests nothing.",
    (
        "The directional model is ours, and so are comparisons of KFAC with SGD, of which the text"
        " says nothing."
    ),
)

EXPERIMENT = Experiment(
    "eigenvalues-through-training",
    "Variance and largest eigenvalue of full data and batches through training by SGD and KFAC",
    SPECTRAL,
    "§5.6, Figures 5.5 and 5.6",
    SCALES,
    cells,
    run,
    claims,
    tables,
    charts,
    ASSUMPTIONS,
    size=(
        "VGG-16 on CIFAR-100, 45,000 images, 300 epochs by SGD and KFAC, 10 batches of 128; seeds"
        " are not said."
    ),
    sizes=(Size("VGG-16", "cifar100", 45_000, 300),),
)
