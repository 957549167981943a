"""Convolutional networks with and without weight decay, batch norm in both modes (Figures 4–7, flatness paper)."""

from __future__ import annotations

from dataclasses import dataclass

from lambdahat.experiments.charts import Chart, Series
from lambdahat.experiments.claims import Claim
from lambdahat.experiments.experiment import Cell, Experiment, Row, Rows, Scale, settings_of
from lambdahat.experiments.flatness.runs import curvature_problem, descend, ends, measured, titled
from lambdahat.experiments.image_sets import images, modes_of, network
from lambdahat.experiments.papers import FLATNESS
from lambdahat.experiments.readings import decades, errors, gap, logs, over_seeds, stems
from lambdahat.experiments.reproduction import Table
from lambdahat.experiments.statistics import Reading, paired_difference

NAMES = {
    "accuracy": "validation accuracy, %",
    "training accuracy": "training accuracy, %",
    "norm": "weight norm",
    "largest": "λ₁",
    "frobenius": "mean squared eigenvalue tr(H²)/P",
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
class Config(Scale):
    """One scale: networks, each with the side its images are pooled to and its rate; ``decay`` is set against none.

    The Hessian is over ``samples`` images.
    """

    networks: tuple[tuple[str, int, float], ...]
    samples: int
    depth: int
    decay: float = 5e-4
    augmented: bool = False
    precision: str = "float32"


def cells(config: Config) -> list[Cell]:
    """Network × weight decay × seed."""
    base = settings_of(config, "networks", "decay", "seeds")
    return [
        {**base, "network": name, "side": side, "rate": rate, "decay": decay, "seed": seed}
        for name, side, rate in config.networks
        for decay in (0.0, config.decay)
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
    without, decayed = _pair(rows)
    better = gap(decayed, without, "accuracy")
    found = [_claim(name, "validation accuracy rises with weight decay", "accuracy", "", better, unit=" points")]
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


def _pair(rows: Rows) -> tuple[Rows, Rows]:
    """The rows without and those with weight decay."""
    low, high = sorted(rows.distinct("decay"))
    return rows.where(decay=low), rows.where(decay=high)


def _magnified(name: str, rows: Rows) -> list[Claim]:
    """The ratio of decayed to plain in evaluation mode over that in training mode."""
    found = []
    for column in SHARPNESS:
        rises = {}
        for mode in ("eval", "train"):
            without, decayed = (logs(part.where(mode=mode), column) for part in _pair(rows))
            rises[mode] = {seed: decayed[seed] - without[seed] for seed in decayed if seed in without}
        reading = paired_difference(rises["eval"], rises["train"])
        sentence = f"{NAMES[column]} rises more in evaluation than in training mode"
        found.append(_claim(name, sentence, "mode", "", reading, unit=" decades"))
    return found


def _claim(
    name: str, sentence: str, column: str, mode: str, reading: Reading, direction: str = "above", unit: str = ""
) -> Claim:
    family = name if name in FIGURES else name.split("-")[0]
    printed = PUBLISHED.get((family, column, mode), "massively magnified" if column == "mode" else "it does")
    return Claim(f"{name}: {sentence}", f"§4, {FIGURES[family]}", printed, reading, direction, unit=unit)


def tables(rows: Rows) -> list[Table]:
    """A table for each network and mode of its batch norm: without and with weight decay, and the ratio."""
    out = []
    for name in rows.distinct("network"):
        for mode in rows.where(network=name).distinct("mode"):
            part = rows.where(network=name, mode=mode)
            without, decayed = _pair(part)
            lines = []
            for column, words in NAMES.items():
                ratio = 10 ** decades(decayed, without, column).value
                lines.append(
                    (words, str(over_seeds(without, column)), str(over_seeds(decayed, column)), f"{ratio:.3g}×")
                )
            title = f"{name}, {part[0]['parameters']:,} parameters, Hessian in {mode} mode"
            header = ("", *(f"weight decay {half[0]['decay']:g}" for half in (without, decayed)), "ratio")
            out.append(Table(title, header, tuple(lines)))
    return out


def charts(rows: Rows) -> list[Chart]:
    """λ₁ and tr(H²)/P of all networks, with and without weight decay; then the spectra of the first seed."""
    decays = sorted(rows.distinct("decay"))
    out = [
        Chart(titled(NAMES[column]), "network", NAMES[column], tuple(_bars(rows, column, decay) for decay in decays),
              y_log=True, source="Figures 4–7")
        for column in SHARPNESS
    ]  # fmt: skip
    for name in rows.distinct("network"):
        for mode in rows.where(network=name).distinct("mode"):
            part = rows.where(network=name, mode=mode, seed=0)
            spectra = tuple(stems(f"decay {row['decay']:g}", row) for row in part)
            family = name if name in FIGURES else name.split("-")[0]
            out.append(Chart(f"Spectrum, {name}, {mode} mode", "eigenvalue", "weight", spectra, y_log=True,
                             source=FIGURES[family]))  # fmt: skip
    return out


def _bars(rows: Rows, column: str, decay: float) -> Series:
    places = [(name, mode) for name in rows.distinct("network") for mode in rows.where(network=name).distinct("mode")]
    readings = [over_seeds(rows.where(network=name, mode=mode, decay=decay), column) for name, mode in places]
    labels = [f"{name}, {mode}" for name, mode in places]
    return Series(f"decay {decay:g}", labels, [reading.value for reading in readings], errors(readings), "points")


EXPERIMENT = Experiment(
    "cnn-decay",
    "Weight decay makes convolutional networks sharper and better",
    FLATNESS,
    "§4, Figures 4–7",
    {
        "smoke": Config("digits", 96, 64, 2, 2, (("WideResNet-10×1", 4, 0.1),), samples=32, depth=6, batch=32),
        "cpu": Config("cifar10", 1000, 1000, 40, 3,
                      (("LeNet-5", 28, 0.03), ("PreResNet-11", 8, 0.1), ("WideResNet-10×1", 8, 0.1)),
                      samples=256, depth=30, decay=5e-3, batch=32),
        "paper": Config("cifar10", 45_000, 5_000, 30, 3,
                        (("All-CNN", 0, 0.03), ("PreResNet-164", 0, 0.1), ("WideResNet-28×10", 0, 0.1)),
                        samples=1024, depth=100, augmented=True, precision="bfloat16"),
    },
    cells,
    run,
    claims,
    tables,
    charts,
    (
        "CIFAR-10 in place of CIFAR-100, which cannot be had here; 30 epochs of the paper's 300 at its scale.",
        "On a CPU: LeNet-5 in place of the nine-layer network, small residual networks, 1,000 images of 8 × 8.",
        "There weight decay is 5e-3, for over so few steps 5e-4 would shorten the weights by a few per cent at most.",
        "Learning rate 0.1 for residual networks, of the paper's grid; it states 0.03 for the nine-layer one alone.",
        "The Hessian is that of the first training images, not cropped or flipped; in training mode in their batches.",
        "The paper's Frobenius norm is read as tr(H²)/P.",
    ),
)  # fmt: skip
