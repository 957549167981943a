"""LanczosOPT on 1,000 images with softmax regression, seed by seed: Figures 6.2 and 6.4 of the
spectral thesis.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from lambdahat.experiments.kit.cells import Cell, Row
from lambdahat.experiments.kit.experiment import SPECTRAL, Experiment, Size
from lambdahat.experiments.minibatch.lanczos import RATE, SCALES, Scale, rows_at
from lambdahat.experiments.minibatch.lanczos_claims import charts, claims, tables


@dataclass(frozen=True)
class Config:
    """A scale of the experiment, and how many of its seeds a cell trains ``together``."""

    setting: Scale
    together: int = 1


def cells(config: Config) -> list[Cell]:
    """A cell for each group of seeds, each with all dampings, all η, and gradient descent."""
    groups = config.setting.seeds // config.together
    return [
        asdict(replace(config.setting, seeds=config.together)) | {"group": group}
        for group in range(groups)
    ]


def run(cell: Cell, device: str) -> list[Row]:
    """A row for each run and look."""
    first = cell["group"] * cell["seeds"]
    return [
        row | {"seed": first + row["seed"]}
        for row in rows_at(setting_of(cell), cell["group"], device)
    ]


def setting_of(cell: Cell) -> Scale:
    """The settings that a cell holds."""
    settings: dict[str, Any] = {field.name: cell[field.name] for field in fields(Scale)}
    return Scale(**settings | {"dampings": tuple(cell["dampings"])})


EXPERIMENT = Experiment(
    "lanczos-opt",
    "Less damping and less movement in sharp directions harm the test error",
    SPECTRAL,
    "§6.4, Figures 6.2 and 6.4",
    {
        "smoke": Config(SCALES["smoke"]),
        "cpu": Config(replace(SCALES["cpu"], seeds=6)),
        "paper": Config(SCALES["paper"], together=5),
    },
    cells,
    run,
    claims,
    tables,
    charts,
    (
        f"Full-batch steps at α = {RATE:g}, 500 at paper scale: the thesis does not say how many.",
        "1,000 training images of MNIST drawn anew for each seed; pixels in [0, 1].",
        "Weights and biases are uniform on ±1/√inputs at the start.",
        (
            "50 Lanczos steps from a random vector: at every step at paper scale, every ten at cpu"
            " scale."
        ),
        "The dampings are ours: those of the figures are not in the text.",
        "GD takes the same α; it is Eq. 6.6 with η = 0 and δ = 1.",
        (
            "“As δ falls” is judged over all dampings, and as a claim of ours over those that fit"
            " the training data."
        ),
        "n counts seeds: draws of 1,000 images with a start each.",
    ),
    size=(
        "logistic regression on 1,000 images of MNIST, 10,000 test images, α = 0.01, 50 Lanczos"
        " steps; steps of training and seeds are not in the text."
    ),
    sizes=(Size(data="mnist", samples=1000),),
)
