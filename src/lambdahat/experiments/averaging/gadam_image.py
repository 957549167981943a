"""Six optimisers on images, with and without averages of their iterates (Tables 7.2 and 7.3, spectral thesis).

The solutions' sharpness stands beside their accuracy (Figures 7.14 to 7.17).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from lambdahat.estimators.spectra import spectrum
from lambdahat.experiments.averaging.recipes import BASES, recipe
from lambdahat.experiments.averaging.runs import (
    Task,
    change,
    decades,
    gap,
    image_task,
    mean,
    size_of,
    train,
)
from lambdahat.experiments.charts import Chart, Series
from lambdahat.experiments.claims import Claim
from lambdahat.experiments.experiment import Cell, Experiment, Row, Rows, Scale, settings_of
from lambdahat.experiments.flatness.runs import curvature_problem
from lambdahat.experiments.image_sets import Images
from lambdahat.experiments.papers import SPECTRAL
from lambdahat.experiments.readings import curve, errors, over_seeds
from lambdahat.experiments.reproduction import Table
from lambdahat.experiments.statistics import Reading
from lambdahat.operators.curvature import hessian

OPTIMIZERS = ("SGD", "SWA", "AdamW", "Gadam", "PadamW", "GadamX")
# Rate and weight decay of each base optimiser, by the first word of the network's name (the thesis's code)
SETTINGS: dict[str, dict[str, tuple[float, float]]] = {
    "VGG": {"SGD": (0.1, 5e-4), "AdamW": (5e-4, 0.25), "PadamW": (0.1, 2.5e-3)},
    "PreResNet": {"SGD": (0.1, 5e-4), "AdamW": (1e-3, 0.1), "PadamW": (0.1, 2.5e-3)},
}
SHORT = {"AdamW": 1e-3}  # of small networks over few steps
PRINTED_ON = ("CIFAR-100", "CIFAR-10")
# Test accuracy on CIFAR-100 (Table 7.2) and CIFAR-10 (Table 7.3)
PRINTED: dict[tuple[str, str], tuple[float, float]] = {
    ("VGG", "SGD"): (74.15, 94.14), ("VGG", "SWA"): (74.57, 94.69), ("VGG", "AdamW"): (73.26, 93.90),
    ("VGG", "PadamW"): (74.56, 94.13), ("VGG", "Gadam"): (75.73, 94.62), ("VGG", "GadamX"): (76.85, 94.88),
    ("PreResNet", "SGD"): (77.22, 95.40), ("PreResNet", "SWA"): (77.92, 95.55), ("PreResNet", "AdamW"): (75.47, 94.69),
    ("PreResNet", "PadamW"): (77.30, 95.28), ("PreResNet", "Gadam"): (77.37, 95.27),
    ("PreResNet", "GadamX"): (77.90, 95.95),
}  # fmt: skip


@dataclass(frozen=True)
class Config(Scale):
    """One scale: networks, each with the side its images are pooled to; the Hessian is over ``samples`` images.

    ``quick`` takes the rates of ``SHORT``.
    """

    networks: tuple[str, ...]
    samples: int
    depth: int
    side: int = 0
    augmented: bool = False
    quick: bool = False


def family(network: str) -> str:
    """The first word of a network's name: "VGG" of "VGG-16-BN"."""
    return network.split("-")[0]


def tuned(network: str, optimizer: str, quick: bool = False) -> tuple[float, float]:
    """Rate and weight decay of an optimiser, which are its base's."""
    base = BASES.get(optimizer, optimizer)
    rate, decay = SETTINGS[family(network)][base]
    return (SHORT.get(base, rate) if quick else rate), decay


def cells(config: Config) -> list[Cell]:
    """Network × optimiser × seed."""
    base = settings_of(config, "networks", "quick", "seeds")
    return [
        {**base, "network": name, **recipe(optimizer, *tuned(name, optimizer, config.quick), config.epochs),
         "seed": seed}
        for name in config.networks
        for optimizer in OPTIMIZERS
        for seed in range(config.seeds)
    ]  # fmt: skip


def run(cell: Cell, device: str) -> list[Row]:
    """A row for each epoch, and one of the end with the sharpness of what the optimiser hands back."""
    task = image_task(cell, device)
    trained = train(cell, task)
    return [*trained.rows, {**trained.end, **size_of(task), **sharpness(trained.solution, task, cell)}]


def sharpness(model: nn.Module, task: Task, cell: Cell) -> Row:
    """λ₁ of the loss on the first training images, by ``depth`` Lanczos steps with batch norm in evaluation mode."""
    first = next(iter(task.problem.batches)).data
    curvature = hessian(curvature_problem(model, Images(first, first, 0), cell))
    largest = spectrum(curvature, depth=min(cell["depth"], curvature.dim), seed=cell["seed"]).extremes[1]
    return {"largest": float(largest), "largest residual": float(largest.stderr)}


def claims(rows: Rows) -> list[Claim]:
    """Averages help each base, Gadam beats SGD, GadamX beats all; and Gadam's solutions are the sharper ones."""
    ends = rows.where(kind="end")
    of = {name: ends.where(optimizer=name) for name in OPTIMIZERS}
    where = "Tables 7.2 and 7.3"
    found = [
        Claim(f"{name} is above {base}", f"§7.8.1, {where}", printed_gap(name, base),
              gap(of[name], of[base], "accuracy"), unit=" points")
        for name, base in (("SWA", "SGD"), ("Gadam", "AdamW"), ("GadamX", "PadamW"), ("Gadam", "SGD"),
                           ("Gadam", "PadamW"), ("SGD", "AdamW"))
    ]  # fmt: skip
    rival, reading = against_best(of, "GadamX")
    found.append(Claim(f"GadamX is above all others (here above {rival}, the best of them)", f"§7.8.1, {where}",
                       "strongest test performance by a considerable margin", reading, unit=" points"))  # fmt: skip
    found.append(Claim("the average is above the iterates where averaging begins", "§7.8.1", "it is",
                       change(ends.where(optimizer=("SWA", "Gadam", "GadamX")), "accuracy", "before"),
                       unit=" points"))  # fmt: skip
    found += [
        Claim("Gadam's λ₁ is above SGD's", "§7.9, Figures 7.14, 7.15 and 7.17", "35 to 40 times",
              decades(of["Gadam"], of["SGD"], "largest"), unit=" decades"),
        Claim("Gadam's weight norm is above SGD's", "§7.9, Figure 7.16", "always higher",
              gap(of["Gadam"], of["SGD"], "solution norm")),
    ]  # fmt: skip
    return found


def printed_gap(upper: str, lower: str) -> str:
    """The differences of two optimisers in Tables 7.2 and 7.3, network by network."""
    shown = [
        f"{PRINTED[kind, upper][i] - PRINTED[kind, lower][i]:+.2f}" for kind in SETTINGS for i in range(len(PRINTED_ON))
    ]
    return ", ".join(shown)


def against_best(of: dict[str, Rows], name: str) -> tuple[str, Reading]:
    """The best of the others by its mean, and how far ``name`` is above it."""
    others = {other: mean(part, "accuracy").value for other, part in of.items() if other != name}
    rival = max(others, key=others.__getitem__)
    return rival, gap(of[name], of[rival], "accuracy")


def tables(rows: Rows) -> list[Table]:
    """A table for each network: accuracy, norm and sharpness of each optimiser beside the printed accuracies."""
    out = []
    ends = rows.where(kind="end")
    for name in ends.distinct("network"):
        part = ends.where(network=name)
        lines = []
        for optimizer in OPTIMIZERS:
            mine = part.where(optimizer=optimizer)
            printed = PRINTED[family(name), optimizer]
            lines.append((optimizer, *(str(over_seeds(mine, column)) for column in
                                       ("accuracy", "iterate accuracy", "training accuracy", "solution norm",
                                        "largest")), *(f"{value:.2f}" for value in printed)))  # fmt: skip
        header = ("optimiser", "accuracy, %", "of the iterate", "in training", "‖θ‖", "λ₁",
                  *(f"thesis, {data}" for data in PRINTED_ON))  # fmt: skip
        out.append(Table(f"{name}, {part[0]['parameters']:,} parameters, {part[0]['data']}", header, tuple(lines)))
    return out


def charts(rows: Rows) -> list[Chart]:
    """Error over epochs, the accuracies beside the printed ones, sharpness against accuracy."""
    out = []
    for name in rows.distinct("network"):
        part = rows.where(network=name, kind="epoch")
        series = tuple(curve(optimizer, part.where(optimizer=optimizer), "accuracy") for optimizer in OPTIMIZERS)
        out.append(Chart(f"Accuracy on held-out images, {name}", "epoch", "accuracy, %", series,
                         source="Figures 7.8 and 7.9", caption="Of the average from when there is one."))  # fmt: skip
        ends = rows.where(network=name, kind="end")
        readings = [over_seeds(ends.where(optimizer=optimizer), "accuracy") for optimizer in OPTIMIZERS]
        printed = [PRINTED[family(name), optimizer][1] for optimizer in OPTIMIZERS]
        out.append(Chart(f"Accuracy at the end, {name}", "optimiser", "accuracy, %", (
            Series("ours", OPTIMIZERS, [reading.value for reading in readings], errors(readings), "points"),
            Series("thesis, CIFAR-10", OPTIMIZERS, printed, style="points", published=True),
        ), source="Table 7.3"))  # fmt: skip
    sharp = [Series(optimizer, rows.where(kind="end", optimizer=optimizer).values("largest"),
                    rows.where(kind="end", optimizer=optimizer).values("accuracy"), style="points")
             for optimizer in OPTIMIZERS]  # fmt: skip
    out.append(Chart("Sharpness against accuracy", "λ₁", "accuracy, %", tuple(sharp), x_log=True,
                     source="Figures 7.14–7.17"))  # fmt: skip
    return out


EXPERIMENT = Experiment(
    "gadam-image",
    "Gadam and GadamX on images: averages of adaptive iterates generalise",
    SPECTRAL,
    "§§7.8.1 and 7.9, Tables 7.2 and 7.3, Figures 7.8, 7.9 and 7.14–7.17",
    {
        "smoke": Config("digits", 96, 64, 4, 2, ("VGG-4×4-BN",), samples=32, depth=4, batch=32, quick=True),
        "cpu": Config("cifar10", 2000, 3000, 25, 3, ("VGG-4×16-BN", "PreResNet-11"), samples=256, depth=15, side=8,
                      batch=64, quick=True),
        "paper": Config("cifar10", 10_000, 10_000, 30, 3, ("VGG-16-BN", "PreResNet-20"), samples=512, depth=20,
                        augmented=True),
    },
    cells,
    run,
    claims,
    tables,
    charts,
    (
        "CIFAR-10 alone, for CIFAR-100 cannot be had here; 10,000 of its images and 30 epochs of the thesis's 300.",
        "PreResNet-20 in place of PreResNet-110, and no ResNeXt-29. On a CPU 2,000 images of 8 × 8 and small networks.",
        "Rates and weight decays are those of the thesis's code (github.com/diegogranziol/Gadam) for CIFAR-100.",
        "On a CPU AdamW's rate is 1e-3, for over so few steps 5e-4 goes not far enough.",
        "Averages begin after the share 161/300 of the epochs and take one iterate per epoch.",
        "Accuracy is that of images held out of the training part. A claim is read over both networks and all seeds.",
        "The text has Gadam above SGD and Padam in all cases; Table 7.3 has both above it on PreResNet-110.",
    ),
)  # fmt: skip
