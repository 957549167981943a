"""Training curves of stochastic Lanczos steps against SGD and Adam (§4.3.1, Table 4.4, Figure
4.2b).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lambdahat.experiments.curvature.trained import end_row, epoch_rows, train
from lambdahat.experiments.kit.cells import Cell, Row, Rows, Scale, curve, over_seeds, settings_of
from lambdahat.experiments.kit.claims import Claim, Table, mean_of, paired_difference
from lambdahat.experiments.kit.experiment import SPECTRAL, Experiment, Size, subject
from lambdahat.experiments.kit.training import images, network
from lambdahat.results.charts import Chart

RATES = (1.0, 0.1, 0.01, 0.001, 0.0001)
RATIO = 10.0  # δ/α
CURVATURES = {"ggn": "Gauss–Newton", "absolute_hessian": "absolute Hessian"}
SAME_FLAT_RATE = 0.01  # of SGD: over 1 − 0.9 of its momentum it is α/δ
SIMILAR = 2.0  # points of training error
METHODS = ("Lanczos", "SGD", "Adam")


@dataclass(frozen=True)
class Config(Scale):
    """One scale: the rates of SGD and Adam among which the best is taken."""

    network: str
    sgd: tuple[float, ...]
    adam: tuple[float, ...]
    side: int = 0
    pairs: int = 20
    schedule: str = "flat"


def cells(config: Config) -> list[Cell]:
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
    """Alike at all rates, and faster per step than SGD and Adam at their best; and, of ours,
    than SGD at one rate.
    """
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
        found.append(
            Claim(
                f"{what}: all rates from 1 to 10⁻⁴ with δ = 10α train alike (range of the last"
                f" training errors, below {SIMILAR:g} points)",
                "§4.3.1, Figure 4.2b",
                f"almost identical ({theirs_were})",
                mean_of(list(spread.values())),
                "below",
                SIMILAR,
                unit=" points",
            )
        )
        ours = _best(rows, "Lanczos", name).where(kind="end")
        alike = rows.where(kind="end", optimizer="SGD", rate=SAME_FLAT_RATE)
        found.append(
            Claim(
                f"{what}: it converges faster per step than SGD at α = {SAME_FLAT_RATE:g}, whose"
                " rate along flat directions is the same (chosen after the results)",
                "Table 4.4",
                "none: Figure 4.2b names no rate",
                paired_difference(alike.paired("along"), ours.paired("along")),
                unit=" points",
                own=True,
            )
        )
        for other in ("SGD", "Adam"):
            theirs = _best(rows, other).where(kind="end")
            reading = paired_difference(theirs.paired("along"), ours.paired("along"))
            found.append(
                Claim(
                    f"{what}: it converges faster per step than {other} at its best rate (mean"
                    " training error along the way)",
                    "§4.3.1, Figure 4.2b",
                    f"{other} significantly slower ({theirs_were})",
                    reading,
                    unit=" points",
                )
            )
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
                readings = [
                    str(over_seeds(chosen, key)) for key in ("along", "training error", "error")
                ]
                lines.append((label, f"{rate:g}", *readings, str(sum(chosen.values("diverged")))))
    header = (
        "optimiser",
        "rate",
        "training error along the way, %",
        "at the end, %",
        "validation error, %",
        "runs diverged",
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
        out.append(
            Chart(
                f"Lanczos, {words}, δ = 10α",
                "epoch",
                "training error, %",
                series,
                source="Figure 4.2b",
            )
        )
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


EXPERIMENT = Experiment(
    "second-order-curves",
    "Stochastic Lanczos steps against SGD and Adam",
    SPECTRAL,
    "§4.3.1, Table 4.4, Figure 4.2b",
    {
        "smoke": Config(
            "digits", 100, 100, 2, 2, "MLP-8", (0.01, 0.1), (3e-3, 1e-2), batch=50, pairs=5
        ),
        "cpu": Config(
            "mnist",
            2000,
            1000,
            8,
            5,
            "MLP-100",
            (0.01, 0.03, 0.1, 0.3),
            (1e-3, 3e-3, 1e-2, 3e-2),
            side=14,
        ),
        "paper": Config(
            "cifar10", 10_000, 5_000, 10, 2, "VGG-16", (0.003, 0.01, 0.03), (1e-4, 3e-4, 1e-3)
        ),
    },
    cells,
    run,
    claims,
    tables,
    charts,
    (
        (
            "20 Lanczos steps on a batch of its own, as large as the gradient's, before every step;"
            " no momentum."
        ),
        (
            "SGD has momentum 0.9; all rates are constant; the best rate is that of least mean"
            " training error."
        ),
        (
            "SGD at 0.01, of the example code in Table 4.4, was compared after SGD at its best rate"
            " had come out faster."
        ),
        (
            "The cost is not compared: a step of Lanczos is 20 products, about 40 gradients, as the"
            " thesis says."
        ),
        (
            "CIFAR-10 for CIFAR-100, 10 epochs of 10,000 images; on a CPU a perceptron and 14 × 14"
            " images of MNIST."
        ),
    ),
    size=(
        "VGG-16 on CIFAR-100, batches of 128, 20 Lanczos steps; epochs and seeds are not in the"
        " text."
    ),
    sizes=(Size("VGG-16", "cifar100"),),
)
