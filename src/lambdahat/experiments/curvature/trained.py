"""Networks trained by an optimiser of chapters 4 and 6 of the spectral thesis: which, how, and
what is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lambdahat.data.augmentation import augment
from lambdahat.estimators import eigenpairs
from lambdahat.experiments.kit.cells import Cell, Row
from lambdahat.experiments.kit.training import Images, curvature_problem
from lambdahat.operators.curvature import hessian
from lambdahat.optim.kfac import KFAC
from lambdahat.optim.lanczos_newton import LanczosNewton
from lambdahat.optim.schedules import flat, linear_decay
from lambdahat.problem import Problem
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
    """``fit`` in place by the cell's optimiser; None where so little damping left KFAC with
    nothing to invert.
    """
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


def thinned(rows: list[Row], count: int = 15) -> list[Row]:
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
