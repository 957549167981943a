"""SGD with rate and momentum from the spectrum, against weight averaging (§4.3.2, Figure 4.2a)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lambdahat.experiments import kit
from lambdahat.experiments.kit import Cell, Chart, Claim, Row, Rows, Table, training
from lambdahat.optim.averaging import SWA, Averaged
from lambdahat.optim.schedules import averaging_decay
from lambdahat.optim.spectral_sgd import SpectralSGD
from lambdahat.problem import Problem
from lambdahat.training import Run

METHODS = {"SWA": "SWA, rate by hand", "SSGDM": "SSGDM, heavy ball", "SSGDMN": "SSGDMN, Nesterov"}
AVERAGED_FROM = 160 / 180  # of the epochs
MEASURED = 9  # times
DEPTH = 20
DECAY = 3e-4
WELL = 2.0  # points of validation error


def cells(images: Cell, network: str, seeds: int, rate: float = 0.05) -> list[Cell]:
    """Method × seed; ``rate`` is the baseline's."""
    base = images | {"network": network, "rate": rate, "precision": "float32"}
    return kit.grid(base, method=METHODS, seed=range(seeds))


def run(cell: Cell, device: str) -> list[Row]:
    """A row per epoch: error of the iterate and of the average, rate and momentum."""
    model, data = training.model_and_images(cell, device)
    problem = Problem(model, "cross_entropy", data.training)
    optimizer, schedule = _optimizer(model, cell)

    def rate_and_momentum() -> Row:
        group = optimizer.param_groups[0]  # "lr" multiplies a rate that is measured
        rate = group["lr"] * group.get("rate", 1.0)
        return {"rate": float(rate), "momentum": float(group["momentum"])}

    watch = training.Watch(rate_and_momentum, every=1)
    history = training.train(problem, cell, optimizer, schedule, data.held_out, [watch])
    rates = {row["epoch"]: row for row in watch.rows}
    return _rows(history, rates, cell["epochs"], 100 * (1 - 1 / data.classes))


def _optimizer(model: nn.Module, cell: Cell) -> tuple[Optimizer, Any]:
    steps = math.ceil(cell["training"] / cell["batch"])
    first = max(1, round(AVERAGED_FROM * cell["epochs"]))
    when = {"average_start": first * steps, "average_every": steps}
    if cell["method"] == "SWA":
        plain = SWA(model.parameters(), cell["rate"], 0.9, DECAY, **when)
        return plain, averaging_decay(plain, cell["epochs"], first)
    every = max(1, round(cell["epochs"] / MEASURED)) * steps
    nesterov, seed = cell["method"] == "SSGDMN", cell["seed"]
    settings: dict[str, Any] = {"depth": DEPTH, "weight_decay": DECAY, "seed": seed}
    base = SpectralSGD(model.parameters(), every, nesterov=nesterov, **settings)
    return Averaged(base, **when), None


def _rows(history: Run, rates: Mapping[int, Row], epochs: int, guess: float) -> list[Row]:
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
                "last": row["epoch"] == epochs,
                **rates.get(row["epoch"], {}),
            }
        )
    if history.ended == "diverged":
        rows[-1] |= {"epoch": epochs, "average error": guess, "last": True, "diverged": True}
    return rows


def claims(rows: Rows) -> Iterator[Claim]:
    """The Nesterov variant beside the baseline, the other behind it, and its falling rate."""
    what, paper = kit.subject(rows), "(PreResNet-110, CIFAR-100)"
    claim = kit.ClaimTexts(f"""
        well: {what}: SSGDMN performs well against SWA (error of the average, within {WELL:g}
          points) | Figure 4.2a | performs well {paper} | within {WELL:g} of 0 | points
        worse: {what}: SSGDM does not perform as well as {{other}} (error of the average)
          | §4.3.2 | not as well {paper} | above | points
        rate: {what}: SSGDM learns to lower the rate (decades over the training)
          | §4.3.2 | drops at regular intervals {paper} | below | decades
    """)
    last = {name: rows.where(method=name, last=True) for name in METHODS}
    yield claim("well", kit.gap(last["SSGDMN"], last["SWA"], "average error"))
    for other in ("SSGDMN", "SWA"):
        reading = kit.gap(last["SSGDM"], last[other], "average error")
        yield claim("worse", reading, other=other)
    yield claim("rate", kit.by_seed(rows.where(method="SSGDM"), _slope))


def _slope(rows: Rows) -> float:
    """log₁₀ of the rate against the share of the training."""
    part = [row for row in rows if row.get("rate")]
    epochs = [row["epoch"] / row["epochs"] for row in part]
    return kit.slope(epochs, [math.log10(row["rate"]) for row in part]).value


def tables(rows: Rows) -> Iterator[Table]:
    """The last errors, and the first and last rate and momentum."""
    lines = []
    for name, words in METHODS.items():
        part = rows.where(method=name)
        last, names = part.where(last=True), ("rate", "momentum")
        ends = zip(kit.means(part.where(epoch=1), *names), kit.means(last, *names), strict=True)
        spans = (f"{before} → {after}" for before, after in ends)
        lines.append((words, *kit.means(last, "error", "average error"), *spans))
    header = ("method", "error of the iterate, %", "error of the average, %", "rate", "momentum")
    yield kit.table(f"{rows[0]['network']}, {rows[0]['data']}", header, lines)


def charts(rows: Rows) -> Iterator[Chart]:
    """Errors of iterates and averages, rates and momenta over epochs."""
    of = rows.by("method", METHODS)
    series = kit.curves(of, "error")
    series += kit.curves(rows.by("method", [*METHODS]), {"average error": "average"})
    yield Chart("Validation error", "epoch", "error, %", series, source="Figure 4.2a")
    for column in ("rate", "momentum"):
        title, log = f"The {column} in use", column == "rate"
        yield Chart(title, "epoch", column, kit.curves(of, column), y_log=log, source="§4.3.2")


SMOKE = kit.image_setting("digits", 150, 200, epochs=9, batch=50)
CPU = kit.image_setting("mnist", 1000, 2000, epochs=36, side=8, batch=64)
PAPER = kit.image_setting("cifar100", 45_000, 5_000, epochs=36, augmented=True)
EXPERIMENT = kit.Experiment(
    "spectral-sgd",
    "Rate and momentum from the spectrum, against averaging with a rate by hand",
    kit.SPECTRAL,
    "§4.3.2, Figure 4.2a",
    {
        "smoke": cells(SMOKE, "MLP-16", seeds=2),
        "cpu": cells(CPU, "WideResNet-10×1", seeds=5),
        "paper": cells(PAPER, "PreResNet-110", seeds=3, rate=0.1),
    },
    *(run, claims, tables, charts),
    kit.sentences("""
        Eq. 4.3 with its misprints corrected; Ritz values below 0 are ignored; the measured rate is
          used without a factor.
        Measured nine times in the training, averages over the last ninth, as 20 of 180 epochs and
          from epoch 161.
        The baseline falls to half of its rate where averaging begins (Eq. 13, flatness paper).
          Weight decay 3e-4.
        At paper scale 36 epochs of the thesis's 180; on a CPU a small WideResNet and 8 × 8 images
          of MNIST.
    """),
    "PreResNet-110 on CIFAR-100, 180 epochs, rates learnt every 20 epochs by 20 Lanczos steps"
    " on batches of 128.",
    (kit.Size("PreResNet-110", "cifar100", epochs=180),),
)
