"""Training curves of stochastic Lanczos steps, SGD and Adam (§4.3.1, Table 4.4, Figure 4.2b).

Also the training runs over dampings that ``adaptive_damping`` and ``adaptive_batch_norm`` judge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lambdahat.estimators import eigenpairs
from lambdahat.experiments import kit
from lambdahat.experiments.kit import Cell, Chart, Claim, Row, Rows, Table, training
from lambdahat.operators.curvature import hessian
from lambdahat.optim.kfac import KFAC
from lambdahat.optim.lanczos_newton import LanczosNewton
from lambdahat.optim.schedules import flat, linear_decay
from lambdahat.problem import Problem
from lambdahat.training import Run

MOMENTUM = 0.9
SHARPNESS_TOLERANCE = 1e-2
SCHEDULES = {"linear": linear_decay, "flat": flat}


def _make_optimizer(model: nn.Module, cell: Cell) -> Optimizer:
    name, rate, damping = cell["optimizer"], cell["rate"], cell.get("damping", 0.0)
    weights, decay = model.parameters(), cell.get("decay", 0.0)
    if name == "SGD":
        return torch.optim.SGD(weights, rate, MOMENTUM, weight_decay=decay)
    if name == "Adam":
        return torch.optim.Adam(weights, rate, eps=damping)
    if name == "AdamW":
        return torch.optim.AdamW(weights, rate, eps=damping, weight_decay=decay)
    if name == "KFAC":
        return KFAC(model, rate, damping, momentum=MOMENTUM)
    settings = {"curvature": cell["curvature"], "seed": cell["seed"]}
    return LanczosNewton(weights, rate, damping, cell["pairs"], **settings)


def train(model: nn.Module, data: training.Images, cell: Cell) -> Run | None:
    """``fit`` by the cell's optimiser, in place; None if KFAC's factors became singular."""
    problem = Problem(model, "cross_entropy", data.training)
    optimizer = _make_optimizer(model, cell)
    schedule = SCHEDULES[cell["schedule"]](optimizer, cell["epochs"])
    try:
        return training.train(problem, cell, optimizer, schedule, data.held_out)
    except (RuntimeError, ValueError) as error:
        if any(word in str(error) for word in ("finite", "cholesky", "linalg")):
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


def sharpness(model: nn.Module, data: training.Images, cell: Cell) -> float:
    """λ₁ of the Hessian over ``samples`` training images; NaN where it is not finite."""
    try:
        curvature = hessian(training.curvature_problem(model, data, cell))
        pairs = eigenpairs(curvature, 1, tol=SHARPNESS_TOLERANCE, seed=cell["seed"])
    except (ValueError, RuntimeError, ArithmeticError):
        return math.nan
    return float(pairs.values[0])


SETTING = ("optimizer", "rate", "damping", "decay")
Key = tuple[Any, ...]  # the values of the first of these


def damped(optimizer: str, rate: float, damping: float = 0.0, decay: float = 0.0) -> Cell:
    """An optimiser with its rate α, damping δ and decoupled weight decay γ (for SGD: L2)."""
    return {"optimizer": optimizer, "rate": rate, "damping": damping, "decay": decay}


def damped_cells(
    images: Cell, network: str, samples: int, settings: Sequence[Cell], seeds: int
) -> list[Cell]:
    """Setting × seed; λ₁ is over ``samples`` images, if any."""
    base = {"precision": "float32", "schedule": "linear", **images}
    base |= {"network": network, "samples": samples}
    return kit.grid(base, setting=settings, seed=range(seeds))


def damped_run(cell: Cell, device: str) -> list[Row]:
    """Rows of some epochs, and one for the end with λ₁."""
    model, data = training.model_and_images(cell, device)
    history = train(model, data, cell)
    rows = epoch_rows(history, data.classes)
    end = end_row(history, rows, cell["epochs"], data.classes)
    if cell["samples"] and not end["diverged"]:
        end["largest"] = sharpness(model, data, cell)
    return [*({"kind": "epoch", **row} for row in thin(rows)), {"kind": "end", **end}]


def at(rows: Rows, key: Key, kind: str = "end") -> Rows:
    """The rows of one of the settings of ``keys``."""
    return rows.where(kind=kind, **dict(zip(SETTING, key, strict=False)))


def keys(rows: Rows, count: int) -> list[Key]:
    """The settings by the first ``count`` parts of SETTING, in the order of the grid."""
    return list(dict.fromkeys(tuple(row[name] for name in SETTING[:count]) for row in rows))


def error_charts(
    rows: Rows, count: int, label: Callable[[Key], str], title: str, source: str
) -> Iterator[Chart]:
    """Training and validation error over epochs, a curve for each setting of ``keys``."""
    for column, words in (("training error", "Training error"), ("error", "Validation error")):
        parts = {label(key): at(rows, key, "epoch") for key in keys(rows, count)}
        series = kit.curves(parts, column)
        yield Chart(f"{words}{title}", "epoch", f"{column}, %", series, source=source)


def setting_line(rows: Rows, key: Key) -> tuple[str, ...]:
    """The line of a table: a setting, its errors and λ₁, and how many runs diverged."""
    part = at(rows, key)
    readings = kit.means(part, "training error", "error", "largest")
    diverged = str(sum(part.values("diverged")))
    return (key[0], *(f"{value:g}" for value in key[1:]), *readings, diverged)


DAMPED_NOTES = kit.sentences("""
    The linear schedule (α₀ to half of the epochs, then down to α₀/100). SGD and KFAC have momentum
      0.9.
    A run that diverged has the error of a network that guesses, and no λ₁.
    Dampings are tuned by the same validation error that is then compared, as in the thesis.
    Training errors that are 0 on both sides are not compared.
    A run matches SGD if its error is at most 0.25 points higher: set after the runs, where it had
      been 1 point.
""")

RATES = (1.0, 0.1, 0.01, 0.001, 0.0001)
RATIO = 10.0  # δ/α
CURVATURES = {"ggn": "Gauss–Newton", "absolute_hessian": "absolute Hessian"}
SAME_FLAT_RATE = 0.01  # of SGD: over 1 − 0.9 of its momentum it is α/δ
SIMILAR = 2.0  # points of training error
METHODS = ("Lanczos", "SGD", "Adam")


def cells(base: Cell, sgd: Iterable[float], adam: Iterable[float], seeds: int) -> list[Cell]:
    """Optimiser and rate × seed; of SGD and Adam the best of several rates is taken."""
    values = [("Lanczos", rate, RATIO * rate, name) for name in CURVATURES for rate in RATES]
    values += [("SGD", rate, 0.0, "") for rate in sgd]
    values += [("Adam", rate, 1e-8, "") for rate in adam]
    names = "optimizer", "rate", "damping", "curvature"
    settings = [dict(zip(names, each, strict=True)) for each in values]
    return kit.grid({"schedule": "flat", **base}, setting=settings, seed=range(seeds))


def run(cell: Cell, device: str) -> list[Row]:
    """A row for every epoch, and one for the whole with the mean training error along the way."""
    model, data = training.model_and_images(cell, device)
    history = train(model, data, cell)
    rows = epoch_rows(history, data.classes)
    end = end_row(history, rows, cell["epochs"], data.classes)
    missing = cell["epochs"] - len(rows)
    along = sum(row["training error"] for row in rows) + missing * end["training error"]
    kept = [{"kind": "epoch", **row} for row in rows]
    return [*kept, {"kind": "end", **end, "along": along / cell["epochs"]}]


def best_rate(rows: Rows, optimizer: str, curvature: str = "") -> float:
    """The rate of least mean training error along the way."""
    part = rows.where(kind="end", optimizer=optimizer, curvature=curvature)
    means = {rate: kit.over_seeds(each, "along").value for rate, each in part.groups("rate")}
    return float(min(means, key=means.__getitem__))


def _best(rows: Rows, optimizer: str, curvature: str = "") -> Rows:
    rate = best_rate(rows, optimizer, curvature)
    return rows.where(optimizer=optimizer, curvature=curvature, rate=rate)


CLAIMS = kit.ClaimTexts(f"""
    alike: {{what}}: all rates from 1 to 10⁻⁴ with δ = 10α train alike (range of the last training
      errors, below {SIMILAR:g} points) | §4.3.1, Figure 4.2b
      | almost identical (VGG-16, CIFAR-100) | below {SIMILAR:g} | points
    same: {{what}}: it converges faster per step than SGD at α = {SAME_FLAT_RATE:g}, whose rate
      along flat directions is the same (chosen after the results)
      | Table 4.4 | none: Figure 4.2b names no rate | above | points | ours
    tuned: {{what}}: it converges faster per step than {{other}} at its best rate (mean training
      error along the way) | §4.3.1, Figure 4.2b
      | {{other}} significantly slower (VGG-16, CIFAR-100) | above | points
""")


def claims(rows: Rows) -> Iterator[Claim]:
    """Alike at all rates, faster per step than tuned SGD and Adam; ours: than SGD at one rate."""
    ends = rows.where(kind="end")
    for name, words in CURVATURES.items():
        claim = partial(CLAIMS, what=f"{kit.subject(rows)}: Lanczos, {words}")
        part = ends.where(optimizer="Lanczos", curvature=name)
        errors = (each.values("training error") for _, each in part.groups("seed"))
        yield claim("alike", kit.mean_of([max(values) - min(values) for values in errors]))
        ours = _best(rows, "Lanczos", name).where(kind="end")
        alike = ends.where(optimizer="SGD", rate=SAME_FLAT_RATE)
        yield claim("same", kit.gap(alike, ours, "along"))
        for other in ("SGD", "Adam"):
            rival = _best(rows, other).where(kind="end")
            yield claim("tuned", kit.gap(rival, ours, "along"), other=other)


def tables(rows: Rows) -> Iterator[Table]:
    """Every optimiser and rate."""
    part, lines = rows.where(kind="end"), []
    for optimizer in METHODS:
        for (curvature, rate), each in part.where(optimizer=optimizer).groups("curvature", "rate"):
            label = f"{optimizer}, {CURVATURES[curvature]}" if curvature else optimizer
            readings = kit.means(each, "along", "training error", "error")
            lines.append((label, f"{rate:g}", *readings, str(sum(each.values("diverged")))))
    header = (
        "optimiser | rate | training error along the way, % | at the end, % | "
        "validation error, % | runs diverged"
    )
    yield kit.table(f"{part[0]['network']}, {part[0]['data']}", header, lines)


def charts(rows: Rows) -> Iterator[Chart]:
    """Training error over epochs: every rate of Lanczos, and the best of each optimiser."""
    part, axes = rows.where(kind="epoch"), ("epoch", "training error, %")
    for name, words in CURVATURES.items():
        chosen = part.where(optimizer="Lanczos", curvature=name)
        series = kit.curves(chosen.by("rate", "α = {:g}"), "training error")
        yield Chart(f"Lanczos, {words}, δ = 10α", *axes, series, source="Figure 4.2b")
    best = [(f"Lanczos, {words}", "Lanczos", name) for name, words in CURVATURES.items()]
    parts = {}
    for words, optimizer, name in (*best, ("SGD", "SGD", ""), ("Adam", "Adam", "")):
        label = f"{words}, α = {best_rate(rows, optimizer, name):g}"
        parts[label] = _best(rows, optimizer, name).where(kind="epoch")
    series = kit.curves(parts, "training error")
    yield Chart("The best of each", *axes, series, source="Figure 4.2b")


SMOKE = kit.setting("digits", 100, 100, epochs=2, batch=50, side=0, network="MLP-8", pairs=5)
CPU = kit.setting("mnist", 2000, 1000, epochs=8, side=14, network="MLP-100", pairs=20)
PAPER = kit.setting("cifar100", 10_000, 5_000, epochs=10, side=0, network="VGG-16", pairs=20)
EXPERIMENT = kit.Experiment(
    "second-order-curves",
    "Stochastic Lanczos steps against SGD and Adam",
    kit.SPECTRAL,
    "§4.3.1, Table 4.4, Figure 4.2b",
    {
        "smoke": cells(SMOKE, (0.01, 0.1), (3e-3, 1e-2), seeds=2),
        "cpu": cells(CPU, (0.01, 0.03, 0.1, 0.3), (1e-3, 3e-3, 1e-2, 3e-2), seeds=5),
        "paper": cells(PAPER, (0.003, 0.01, 0.03), (1e-4, 3e-4, 1e-3), seeds=2),
    },
    *(run, claims, tables, charts),
    kit.sentences("""
        Before every step, 20 Lanczos steps on a separate batch, as large as the gradient's; no
          momentum.
        SGD has momentum 0.9; all rates are constant; the best rate is that of least mean training
          error.
        SGD at 0.01, as in the example code of Table 4.4, was added after SGD at its best rate had
          turned out faster.
        The cost is not compared: a step of Lanczos is 20 products, about 40 gradients, as the
          thesis says.
        At paper scale 10 epochs of 10,000 images of CIFAR-100; on a CPU a perceptron and 14 × 14
          images of MNIST.
    """),
    "VGG-16 on CIFAR-100, batches of 128, 20 Lanczos steps; epochs and seeds are not in the text.",
    (kit.Size("VGG-16", "cifar100"),),
)
