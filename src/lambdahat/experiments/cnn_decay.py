"""Convolutional networks with and without weight decay, batch norm in both modes (Figures 4–7, flatness paper)."""

from __future__ import annotations

from dataclasses import dataclass

from lambdahat.experiments.charts import Chart, Series
from lambdahat.experiments.claims import Claim
from lambdahat.experiments.experiment import Cell, Experiment, Row, Rows
from lambdahat.experiments.flatness_runs import (
    PAPER,
    curvature_problem,
    decades,
    descend,
    ends,
    errors,
    gap,
    images,
    logs,
    measured,
    modes_of,
    network,
    over_seeds,
    stems,
)
from lambdahat.experiments.reproduction import Table
from lambdahat.experiments.statistics import paired_difference

DECAYS = (0.0, 5e-4)
NAMES = {
    "accuracy": "validation accuracy, %",
    "training accuracy": "training accuracy, %",
    "norm": "weight norm",
    "largest": "largest eigenvalue",
    "frobenius": "tr(H²)/P",
}
SHARPNESS = ("largest", "frobenius")
FIGURES = {"All-CNN": "Figure 4", "LeNet-5": "Figure 4", "PreResNet": "Figure 5", "WideResNet": "Figures 6 and 7"}
# Printed for CIFAR-100, by the first word of the network's name, quantity and mode of the batch norm
PUBLISHED = {
    ("All-CNN", "frobenius", "eval"): "0.01 to 0.02",
    ("LeNet-5", "frobenius", "eval"): "0.01 to 0.02",
    ("All-CNN", "excess", "eval"): "1.89 to 1.57",
    ("LeNet-5", "excess", "eval"): "1.89 to 1.57",
    ("PreResNet", "accuracy", ""): "73.12 to 77.36",
    ("PreResNet", "frobenius", "train"): "5e-5 to 3e-3",
    ("WideResNet", "accuracy", ""): "more than 5 points",
    ("WideResNet", "largest", "train"): "almost 30×",
    ("WideResNet", "frobenius", "train"): "2.3e-7 to 1e-4",
    ("WideResNet", "largest", "eval"): "nearly 1000×",
    ("WideResNet", "frobenius", "eval"): "9.8e-12 to 4.9e-5",
}


@dataclass(frozen=True)
class Config:
    """One scale: each network with the side to which its images are pooled; the Hessian is over ``samples`` images."""

    data: str
    training: int
    held_out: int
    epochs: int
    seeds: int
    networks: tuple[tuple[str, int], ...]
    samples: int
    depth: int
    rate: float = 0.03
    batch: int = 128
    augmented: bool = False
    precision: str = "float32"


def cells(config: Config) -> list[Cell]:
    """Network × weight decay × seed."""
    base = {
        "data": config.data, "training": config.training, "held_out": config.held_out, "epochs": config.epochs,
        "rate": config.rate, "batch": config.batch, "samples": config.samples, "depth": config.depth,
        "augmented": config.augmented, "precision": config.precision,
    }  # fmt: skip
    return [
        {**base, "network": name, "side": side, "decay": decay, "seed": seed}
        for name, side in config.networks
        for decay in DECAYS
        for seed in range(config.seeds)
    ]


def run(cell: Cell, device: str) -> list[Row]:
    """A row for each mode of the batch norm: how well the network does, and its Hessian in that mode."""
    found = images(cell, device)
    model = network(cell["network"], found, cell["seed"])
    descend(model, found, cell, cell["decay"])
    quality = ends(model, found)
    quality["excess"] = quality["validation loss"] - quality["loss"]
    return [
        {"mode": mode, **quality, **measured(curvature_problem(model, found, cell, mode), cell)}
        for mode in modes_of(model)
    ]


def claims(rows: Rows) -> list[Claim]:
    """For each network: better and sharper with weight decay; with batch norm also which mode shows it more."""
    found = []
    for name in rows.distinct("network"):
        part = rows.where(network=name)
        found += _rises(name, part)
        if len(part.distinct("mode")) > 1:
            found += _magnified(name, part)
    return found


def _rises(name: str, rows: Rows) -> list[Claim]:
    without, decayed = (rows.where(decay=decay) for decay in DECAYS)
    found = [_claim(name, "validation accuracy rises with weight decay", "accuracy", "", gap(decayed, without, "accuracy"),
                    unit=" points")]  # fmt: skip
    for mode in rows.distinct("mode"):
        tail = f" (batch norm in {mode} mode)" if len(rows.distinct("mode")) > 1 else ""
        for column in SHARPNESS:
            reading = decades(decayed.where(mode=mode), without.where(mode=mode), column)
            found.append(_claim(name, f"{NAMES[column]} rises with weight decay{tail}", column, mode, reading,
                                unit=" decades"))  # fmt: skip
    if len(rows.distinct("mode")) == 1:
        found.append(_claim(name, "validation less training loss falls with weight decay", "excess", "eval",
                            gap(decayed, without, "excess"), "below"))  # fmt: skip
    return found


def _magnified(name: str, rows: Rows) -> list[Claim]:
    """The ratio of decayed to plain in evaluation mode over that in training mode."""
    found = []
    for column in SHARPNESS:
        rises = {}
        for mode in ("eval", "train"):
            without, decayed = (logs(rows.where(decay=decay, mode=mode), column) for decay in DECAYS)
            rises[mode] = {seed: decayed[seed] - without[seed] for seed in decayed if seed in without}
        reading = paired_difference(rises["eval"], rises["train"])
        found.append(_claim(name, f"{NAMES[column]} rises more in evaluation than in training mode", "mode", "", reading,
                            unit=" decades"))  # fmt: skip
    return found


def _claim(network: str, sentence: str, column: str, mode: str, reading, direction="above", unit="") -> Claim:  # type: ignore[no-untyped-def]
    family = network if network in FIGURES else network.split("-")[0]
    printed = PUBLISHED.get((family, column, mode), "massively magnified" if column == "mode" else "it does")
    return Claim(f"{network}: {sentence}", f"§4, {FIGURES[family]}", printed, reading, direction, unit=unit)
