"""SGD with rate and momentum from the spectrum, against weight averaging (§4.3.2, Figure 4.2a)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lambdahat.data.splits import augment
from lambdahat.experiments.kit.cells import (
    Cell,
    Row,
    Rows,
    Scale,
    curve,
    gap,
    means,
    over_seeds,
    settings_of,
)
from lambdahat.experiments.kit.claims import Claim, Claims, Table, mean_of, slope
from lambdahat.experiments.kit.experiment import SPECTRAL, Experiment, Size, sentences, subject
from lambdahat.experiments.kit.training import images, network
from lambdahat.optim.averaging import SWA, Averaged
from lambdahat.optim.schedules import averaging_decay
from lambdahat.optim.spectral_sgd import SpectralSGD
from lambdahat.problem import Problem
from lambdahat.results.charts import Chart
from lambdahat.training import Run, fit

METHODS = {"SWA": "SWA, rate by hand", "SSGDM": "SSGDM, heavy ball", "SSGDMN": "SSGDMN, Nesterov"}
AVERAGED_FROM = 160 / 180  # of the epochs
MEASURED = 9  # times
DEPTH = 20
DECAY = 3e-4
WELL = 2.0  # points of validation error


@dataclass(frozen=True)
class SpectralScale(Scale):
    """One scale; ``rate`` is the baseline's."""

    network: str
    side: int = 0
    rate: float = 0.05
    augmented: bool = False
    precision: str = "float32"


def cells(config: SpectralScale) -> list[Cell]:
    """Method × seed."""
    base = settings_of(config, "seeds")
    return [
        {**base, "method": method, "seed": seed}
        for method in METHODS
        for seed in range(config.seeds)
    ]


class SpectralRates:
    """A tracker of the rate and the momentum in use."""

    name, unit, every = "rates", "epoch", 1

    def measure(
        self, problem: Problem, optimizer: Any = None, epoch: int = 0, step: int = 0
    ) -> dict[str, float]:
        """Those of the first group; a measured rate is beside "lr", which multiplies it."""
        group = optimizer.param_groups[0]
        return {
            "rate": float(group["lr"] * group.get("rate", 1.0)),
            "momentum": float(group["momentum"]),
        }


def run(cell: Cell, device: str) -> list[Row]:
    """A row per epoch: error of the iterate and of the average, rate and momentum."""
    found = images(cell, device)
    model = network(cell["network"], found, cell["seed"])
    optimizer, schedule = _optimizer(model, cell)
    history = fit(
        Problem(model, "cross_entropy", found.training),
        optimizer,
        cell["epochs"],
        batch_size=cell["batch"],
        schedule=schedule,
        validation=found.held_out,
        trackers=[SpectralRates()],
        seed=cell["seed"],
        augment=augment if cell["augmented"] else None,
        precision=cell["precision"],
    )
    return _rows(history, cell["epochs"], 100 * (1 - 1 / found.classes))


def _optimizer(model: nn.Module, cell: Cell) -> tuple[Optimizer, Any]:
    steps = math.ceil(cell["training"] / cell["batch"])
    first = max(1, round(AVERAGED_FROM * cell["epochs"]))
    start = first * steps
    if cell["method"] == "SWA":
        plain = SWA(
            model.parameters(), cell["rate"], 0.9, DECAY, average_start=start, average_every=steps
        )
        return plain, averaging_decay(plain, cell["epochs"], first)
    every = max(1, round(cell["epochs"] / MEASURED)) * steps
    base = SpectralSGD(
        model.parameters(),
        every,
        nesterov=cell["method"] == "SSGDMN",
        depth=DEPTH,
        weight_decay=DECAY,
        seed=cell["seed"],
    )
    return Averaged(base, average_start=start, average_every=steps), None


def _rows(history: Run, epochs: int, guess: float) -> list[Row]:
    """Errors in per cent; a run that diverged ends with that of guessing."""
    rows: list[Row] = []
    for row in history.epochs:
        known = "validation_accuracy" in row
        average = row.get("average_validation_accuracy")
        rows.append(
            {
                "epoch": row["epoch"],
                "error": 100 * (1 - row["validation_accuracy"]) if known else guess,
                "average error": None if average is None else 100 * (1 - average),
                "rate": row.get("rate"),
                "momentum": row.get("momentum"),
                "last": row["epoch"] == epochs,
            }
        )
    if history.ended == "diverged":
        rows[-1] |= {"epoch": epochs, "average error": guess, "last": True, "diverged": True}
    return rows


def claims(rows: Rows) -> list[Claim]:
    """The Nesterov variant beside the baseline, the other behind it, and its falling rate."""
    last, what = {name: rows.where(method=name, last=True) for name in METHODS}, subject(rows)
    theirs = "(PreResNet-110, CIFAR-100)"
    found = Claims()
    sentence = (
        f"{what}: SSGDMN performs well against SWA (error of the average, within {WELL:g} points)"
    )
    published = f"performs well {theirs}"
    reading = gap(last["SSGDMN"], last["SWA"], "average error")
    found.add(sentence, "Figure 4.2a", published, reading, "within", 0.0, WELL, " points")
    sentence = f"{what}: SSGDM does not perform as well as SSGDMN (error of the average)"
    reading = gap(last["SSGDM"], last["SSGDMN"], "average error")
    found.add(sentence, "§4.3.2", f"not as well {theirs}", reading, unit=" points")
    sentence = f"{what}: SSGDM does not perform as well as SWA (error of the average)"
    reading = gap(last["SSGDM"], last["SWA"], "average error")
    found.add(sentence, "§4.3.2", f"not as well {theirs}", reading, unit=" points")
    sentence = f"{what}: SSGDM learns to lower the rate (decades over the training)"
    published = f"drops at regular intervals {theirs}"
    reading = mean_of(_slopes(rows.where(method="SSGDM")))
    found.add(sentence, "§4.3.2", published, reading, "below", unit=" decades")
    return found


def _slopes(rows: Rows) -> list[float]:
    """log₁₀ of the rate against the share of the training, seed by seed."""
    found = []
    for seed in rows.distinct("seed"):
        part = [row for row in rows.where(seed=seed) if row.get("rate")]
        epochs = [row["epoch"] / row["epochs"] for row in part]
        found.append(slope(epochs, [math.log10(row["rate"]) for row in part]).value)
    return found


def tables(rows: Rows) -> list[Table]:
    """The last errors, and the first and last rate and momentum."""
    lines = []
    for name, words in METHODS.items():
        part = rows.where(method=name)
        last, first = part.where(last=True), part.where(epoch=1)
        readings = means(last, "error", "average error")
        spans = [
            f"{over_seeds(first, key)} → {over_seeds(last, key)}" for key in ("rate", "momentum")
        ]
        lines.append((words, *readings, *spans))
    header = ("method", "error of the iterate, %", "error of the average, %", "rate", "momentum")
    return [Table(f"{rows[0]['network']}, {rows[0]['data']}", header, tuple(lines))]


def charts(rows: Rows) -> list[Chart]:
    """Errors of iterates and averages, rates and momenta over epochs."""
    series = [curve(words, rows.where(method=name), "error") for name, words in METHODS.items()]
    series += [
        curve(f"{name}, average", rows.where(method=name), "average error") for name in METHODS
    ]
    out = [Chart("Validation error", "epoch", "error, %", tuple(series), source="Figure 4.2a")]
    for column in ("rate", "momentum"):
        lines = tuple(
            curve(words, rows.where(method=name), column) for name, words in METHODS.items()
        )
        title = f"The {column} in use"
        out.append(Chart(title, "epoch", column, lines, y_log=column == "rate", source="§4.3.2"))
    return out


EXPERIMENT = Experiment(
    "spectral-sgd",
    "Rate and momentum from the spectrum, against averaging with a rate by hand",
    SPECTRAL,
    "§4.3.2, Figure 4.2a",
    {
        "smoke": SpectralScale("digits", 150, 200, 9, 2, "MLP-16", batch=50),
        "cpu": SpectralScale("mnist", 1000, 2000, 36, 5, "WideResNet-10×1", side=8, batch=64),
        "paper": SpectralScale(
            "cifar10", 45_000, 5_000, 36, 3, "PreResNet-110", augmented=True, rate=0.1
        ),
    },
    *(cells, run, claims, tables, charts),
    sentences("""
        Eq. 4.3 with its misprints mended; Ritz values below 0 do not count; no factor beside the
          measured rate.
        Measured nine times in the training, averages over the last ninth, as 20 of 180 epochs and
          from epoch 161.
        The baseline falls to half of its rate where averaging begins (Eq. 13, flatness paper).
          Weight decay 3e-4.
        CIFAR-10 in place of CIFAR-100 and 36 epochs of 180; on a CPU a small WideResNet and 8 × 8
          images of MNIST.
    """),
    size=(
        "PreResNet-110 on CIFAR-100, 180 epochs, rates learnt every 20 epochs by 20 Lanczos steps"
        " on batches of 128."
    ),
    sizes=(Size("PreResNet-110", "cifar100", epochs=180),),
)
