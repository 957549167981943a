"""Training curves of stochastic Lanczos steps, SGD and Adam (§4.3.1, Table 4.4, Figure 4.2b)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lambdahat.data.splits import augment
from lambdahat.estimators import eigenpairs
from lambdahat.experiments.kit.cells import (
    Cell,
    Row,
    Rows,
    Scale,
    curve,
    means,
    over_seeds,
    settings_of,
)
from lambdahat.experiments.kit.claims import Claim, Table, mean_of, paired_difference, split_header
from lambdahat.experiments.kit.experiment import SPECTRAL, Experiment, Size, sentences, subject
from lambdahat.experiments.kit.training import Images, curvature_problem, images, network
from lambdahat.operators.curvature import hessian
from lambdahat.optim.kfac import KFAC
from lambdahat.optim.lanczos_newton import LanczosNewton
from lambdahat.optim.schedules import flat, linear_decay
from lambdahat.problem import Problem
from lambdahat.results.charts import Chart
from lambdahat.training import Run, fit

MOMENTUM = 0.9
SHARPNESS_TOLERANCE = 1e-2


def _sgd(model: nn.Module, cell: Cell) -> Optimizer:
    return torch.optim.SGD(
        model.parameters(), cell["rate"], MOMENTUM, weight_decay=cell.get("decay", 0.0)
    )


def _adam(model: nn.Module, cell: Cell) -> Optimizer:
    return torch.optim.Adam(model.parameters(), cell["rate"], eps=cell["damping"])


def _adamw(model: nn.Module, cell: Cell) -> Optimizer:
    return torch.optim.AdamW(
        model.parameters(), cell["rate"], eps=cell["damping"], weight_decay=cell["decay"]
    )


def _kfac(model: nn.Module, cell: Cell) -> Optimizer:
    return KFAC(model, cell["rate"], cell["damping"], momentum=MOMENTUM)


def _lanczos(model: nn.Module, cell: Cell) -> Optimizer:
    return LanczosNewton(
        model.parameters(),
        cell["rate"],
        cell["damping"],
        cell["pairs"],
        curvature=cell["curvature"],
        seed=cell["seed"],
    )


MAKERS: dict[str, Callable[[nn.Module, Cell], Optimizer]] = {
    "SGD": _sgd,
    "Adam": _adam,
    "AdamW": _adamw,
    "KFAC": _kfac,
    "Lanczos": _lanczos,
}
SCHEDULES: dict[str, Callable[[Optimizer, int], Any]] = {"linear": linear_decay, "flat": flat}


def train(model: nn.Module, found: Images, cell: Cell) -> Run | None:
    """``fit`` by the cell's optimiser, in place; None if KFAC's factors became singular."""
    problem = Problem(model, "cross_entropy", found.training)
    optimizer = MAKERS[cell["optimizer"]](model, cell)
    schedule = SCHEDULES[cell["schedule"]](optimizer, cell["epochs"])
    try:
        return fit(
            problem,
            optimizer,
            cell["epochs"],
            batch_size=cell["batch"],
            schedule=schedule,
            seed=cell["seed"],
            validation=found.held_out,
            augment=augment if cell.get("augmented") else None,
            precision=cell.get("precision", "float32"),
        )
    except (RuntimeError, ValueError) as error:
        if "finite" in str(error) or "cholesky" in str(error) or "linalg" in str(error):
            return None
        raise
    finally:
        if isinstance(optimizer, KFAC):
            optimizer.close()


def epoch_rows(run: Run | None, classes: int) -> list[Row]:
    """Errors in per cent after every epoch; a run that diverged ends with the error of guessing."""
    guess = 100 * (1 - 1 / classes)
    rows: list[Row] = []
    for row in () if run is None else run.epochs:
        known = "validation_accuracy" in row and math.isfinite(row["loss"])
        rows.append(
            {
                "epoch": row["epoch"],
                "training error": 100 * (1 - row["accuracy"]) if known else guess,
                "error": 100 * (1 - row["validation_accuracy"]) if known else guess,
            }
        )
    return rows


def thin(rows: list[Row], count: int = 15) -> list[Row]:
    """About ``count`` rows, evenly: the first, the last, and what a curve needs between them."""
    every = max(1, math.ceil(len(rows) / count))
    return [row for place, row in enumerate(rows) if place % every == 0 or place == len(rows) - 1]


def end_row(run: Run | None, rows: list[Row], epochs: int, classes: int) -> Row:
    """The last errors, the best held-out one, and whether training went wrong."""
    guess = 100 * (1 - 1 / classes)
    wrong = run is None or run.ended == "diverged" or len(rows) < epochs
    last = {"training error": guess, "error": guess} if wrong else rows[-1]
    best = min((row["error"] for row in rows), default=guess)
    return {**last, "epoch": epochs, "best error": best, "diverged": wrong}


def sharpness(model: nn.Module, found: Images, cell: Cell) -> float:
    """λ₁ of the Hessian over ``samples`` training images; NaN where it is not finite."""
    try:
        pairs = eigenpairs(
            hessian(curvature_problem(model, found, cell)),
            1,
            tol=SHARPNESS_TOLERANCE,
            seed=cell["seed"],
        )
    except (ValueError, RuntimeError, ArithmeticError):
        return math.nan
    return float(pairs.values[0])


RATES = (1.0, 0.1, 0.01, 0.001, 0.0001)
RATIO = 10.0  # δ/α
CURVATURES = {"ggn": "Gauss–Newton", "absolute_hessian": "absolute Hessian"}
SAME_FLAT_RATE = 0.01  # of SGD: over 1 − 0.9 of its momentum it is α/δ
SIMILAR = 2.0  # points of training error
METHODS = ("Lanczos", "SGD", "Adam")


@dataclass(frozen=True)
class OrderScale(Scale):
    """One scale: the rates of SGD and Adam among which the best is taken."""

    network: str
    sgd: tuple[float, ...]
    adam: tuple[float, ...]
    side: int = 0
    pairs: int = 20
    schedule: str = "flat"


def cells(config: OrderScale) -> list[Cell]:
    """Optimiser and rate × seed."""
    base = settings_of(config, "sgd", "adam", "seeds")
    runs: list[Cell] = [
        {"optimizer": "Lanczos", "rate": rate, "damping": RATIO * rate, "curvature": name}
        for name in CURVATURES
        for rate in RATES
    ]
    runs += [
        {"optimizer": "SGD", "rate": rate, "damping": 0.0, "curvature": ""} for rate in config.sgd
    ]
    runs += [
        {"optimizer": "Adam", "rate": rate, "damping": 1e-8, "curvature": ""}
        for rate in config.adam
    ]
    return [{**base, **one, "seed": seed} for one in runs for seed in range(config.seeds)]


def run(cell: Cell, device: str) -> list[Row]:
    """A row for every epoch, and one for the whole with the mean training error along the way."""
    found = images(cell, device)
    history = train(network(cell["network"], found, cell["seed"]), found, cell)
    rows = epoch_rows(history, found.classes)
    end = end_row(history, rows, cell["epochs"], found.classes)
    missing = cell["epochs"] - len(rows)
    along = sum(row["training error"] for row in rows) + missing * end["training error"]
    kept = [{"kind": "epoch", **row} for row in rows]
    return [*kept, {"kind": "end", **end, "along": along / cell["epochs"]}]


def best_rate(rows: Rows, optimizer: str, curvature: str = "") -> float:
    """The rate of least mean training error along the way."""
    part = rows.where(kind="end", optimizer=optimizer, curvature=curvature)
    return float(
        min(
            part.distinct("rate"), key=lambda rate: over_seeds(part.where(rate=rate), "along").value
        )
    )


def _best(rows: Rows, optimizer: str, curvature: str = "") -> Rows:
    return rows.where(
        optimizer=optimizer, curvature=curvature, rate=best_rate(rows, optimizer, curvature)
    )


def claims(rows: Rows) -> list[Claim]:
    """Alike at all rates, faster per step than tuned SGD and Adam; ours: than SGD at one rate."""
    found, theirs_were = [], "VGG-16, CIFAR-100"
    for name, words in CURVATURES.items():
        part, what = (
            rows.where(kind="end", optimizer="Lanczos", curvature=name),
            f"{subject(rows)}: Lanczos, {words}",
        )
        spread = {
            seed: _range(part.where(seed=seed).values("training error"))
            for seed in part.distinct("seed")
        }
        sentence = (
            f"{what}: all rates from 1 to 10⁻⁴ with δ = 10α train alike (range of the last"
            f" training errors, below {SIMILAR:g} points)"
        )
        source = "§4.3.1, Figure 4.2b"
        published = f"almost identical ({theirs_were})"
        value = mean_of(list(spread.values()))
        found.append(Claim(sentence, source, published, value, "below", SIMILAR, unit=" points"))
        ours = _best(rows, "Lanczos", name).where(kind="end")
        alike = rows.where(kind="end", optimizer="SGD", rate=SAME_FLAT_RATE)
        sentence = (
            f"{what}: it converges faster per step than SGD at α = {SAME_FLAT_RATE:g}, whose"
            " rate along flat directions is the same (chosen after the results)"
        )
        published = "none: Figure 4.2b names no rate"
        value = paired_difference(alike.paired("along"), ours.paired("along"))
        found.append(Claim(sentence, "Table 4.4", published, value, unit=" points", own=True))
        for other in ("SGD", "Adam"):
            theirs = _best(rows, other).where(kind="end")
            reading = paired_difference(theirs.paired("along"), ours.paired("along"))
            sentence = (
                f"{what}: it converges faster per step than {other} at its best rate (mean"
                " training error along the way)"
            )
            published = f"{other} significantly slower ({theirs_were})"
            found.append(Claim(sentence, "§4.3.1, Figure 4.2b", published, reading, unit=" points"))
    return found


def _range(values: Sequence[float]) -> float:
    return max(values) - min(values)


def tables(rows: Rows) -> list[Table]:
    """Every optimiser and rate."""
    part, lines = rows.where(kind="end"), []
    for optimizer in METHODS:
        for curvature in part.where(optimizer=optimizer).distinct("curvature"):
            for rate in part.where(optimizer=optimizer, curvature=curvature).distinct("rate"):
                chosen = part.where(optimizer=optimizer, curvature=curvature, rate=rate)
                label = f"{optimizer}, {CURVATURES[curvature]}" if curvature else optimizer
                readings = means(chosen, "along", "training error", "error")
                lines.append((label, f"{rate:g}", *readings, str(sum(chosen.values("diverged")))))
    header = split_header(
        "optimiser | rate | training error along the way, % | at the end, % | "
        "validation error, % | runs diverged"
    )
    return [Table(f"{part[0]['network']}, {part[0]['data']}", header, tuple(lines))]


def charts(rows: Rows) -> list[Chart]:
    """Training error over epochs: every rate of Lanczos, and the best of each optimiser."""
    part = rows.where(kind="epoch")
    out = []
    for name, words in CURVATURES.items():
        chosen = part.where(optimizer="Lanczos", curvature=name)
        series = tuple(
            curve(f"α = {rate:g}", chosen.where(rate=rate), "training error") for rate in RATES
        )
        title = f"Lanczos, {words}, δ = 10α"
        out.append(Chart(title, "epoch", "training error, %", series, source="Figure 4.2b"))
    best = [
        curve(
            f"Lanczos, {words}, α = {best_rate(rows, 'Lanczos', name):g}",
            _best(rows, "Lanczos", name).where(kind="epoch"),
            "training error",
        )
        for name, words in CURVATURES.items()
    ]
    best += [
        curve(
            f"{name}, α = {best_rate(rows, name):g}",
            _best(rows, name).where(kind="epoch"),
            "training error",
        )
        for name in ("SGD", "Adam")
    ]
    out.append(
        Chart("The best of each", "epoch", "training error, %", tuple(best), source="Figure 4.2b")
    )
    return out


# data set, training and held-out samples, epochs, seeds
CPU = ("mnist", 2000, 1000, 8, 5)
EXPERIMENT = Experiment(
    "second-order-curves",
    "Stochastic Lanczos steps against SGD and Adam",
    SPECTRAL,
    "§4.3.1, Table 4.4, Figure 4.2b",
    {
        "smoke": OrderScale(
            "digits", 100, 100, 2, 2, "MLP-8", (0.01, 0.1), (3e-3, 1e-2), batch=50, pairs=5
        ),
        "cpu": OrderScale(
            *CPU, "MLP-100", (0.01, 0.03, 0.1, 0.3), (1e-3, 3e-3, 1e-2, 3e-2), side=14
        ),
        "paper": OrderScale(
            "cifar10", 10_000, 5_000, 10, 2, "VGG-16", (0.003, 0.01, 0.03), (1e-4, 3e-4, 1e-3)
        ),
    },
    *(cells, run, claims, tables, charts),
    sentences("""
        20 Lanczos steps on a batch of its own, as large as the gradient's, before every step; no
          momentum.
        SGD has momentum 0.9; all rates are constant; the best rate is that of least mean training
          error.
        SGD at 0.01, of the example code in Table 4.4, was compared after SGD at its best rate had
          come out faster.
        The cost is not compared: a step of Lanczos is 20 products, about 40 gradients, as the
          thesis says.
        CIFAR-10 for CIFAR-100, 10 epochs of 10,000 images; on a CPU a perceptron and 14 × 14 images
          of MNIST.
    """),
    size=(
        "VGG-16 on CIFAR-100, batches of 128, 20 Lanczos steps; epochs and seeds are not in the"
        " text."
    ),
    sizes=(Size("VGG-16", "cifar100"),),
)
