"""The NGD paper in miniature, which ``lambdahat demo`` runs: SGD against NGD on 8 × 8 digits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lambdahat.estimators import spectrum
from lambdahat.experiments.kit.cells import Cell, Row, Rows
from lambdahat.experiments.kit.claims import Claim, Table
from lambdahat.experiments.kit.experiment import NGD, Experiment, notes
from lambdahat.experiments.ngd.claims import (
    ASSUMED,
    NAMES,
    QUANTITIES,
    TITLES,
    form_claims,
    minima_table,
    points_table,
)
from lambdahat.experiments.ngd.epochs import along, over_epochs
from lambdahat.experiments.ngd.measuring import measured
from lambdahat.experiments.ngd.training import (
    Point,
    Setting,
    Subject,
    at_equal_loss,
    grid,
    subject_of,
    trained,
)
from lambdahat.operators.curvature import hessian
from lambdahat.results.charts import Chart, Series

WIDTH = 32


@dataclass(frozen=True)
class DigitsScale:
    """One scale; ``first`` is the first of the seeds."""

    setting: Setting
    points: int
    depth: int
    seeds: int
    first: int = 0


def cells(config: DigitsScale) -> list[Cell]:
    """Seeds."""
    base = grid(config.setting, ["digits"], [("ffnn", 1, WIDTH)], config.seeds)
    more = {"points": config.points, "depth": config.depth}
    return [{**cell, **more, "seed": config.first + cell["seed"]} for cell in base]


def run(cell: Cell, device: str) -> list[Row]:
    """Rows of both optimisers over epochs, with the spectrum of the Hessian, and at equal
    training loss.
    """
    subject = subject_of(cell, device)
    start = subject.problem.vector.clone()
    ways = [trained(subject, optimizer, start) for optimizer in ("sgd", "ngd")]
    rows = []
    for way, level in zip(ways, at_equal_loss(ways), strict=True):
        found = along(subject, way, cell["points"])
        rows += [
            {**row, **_spectrum(subject, way.at(row["epoch"]), cell["depth"])} for row in found
        ]
        rows[-1]["at"] = "end"
        equal = found[-1] if level is way.end else measured(subject, level)
        rows.append({"optimizer": way.optimizer, **equal, "at": "equal loss"})
    return rows


def _spectrum(subject: Subject, point: Point, depth: int) -> Row:
    """Ritz values of the Hessian and their weights, from one random vector."""
    found = spectrum(hessian(subject.problem.at(point.vector)), depth=depth, seed=subject.seed)
    rounded = (
        [float(f"{value:.4g}") for value in part[0]] for part in (found.nodes, found.weights)
    )
    return dict(zip(("nodes", "weights"), rounded, strict=True))


def claims(rows: Rows) -> list[Claim]:
    """Every form of the paper's claim; all ours, for the paper has no run on these images."""
    return [replace(claim, own=True) for claim in form_claims(rows)]


def tables(rows: Rows) -> Iterator[Table]:
    """What was measured at the end and at equal training loss, and where no minimum was."""
    places = rows.where(at=["end", "equal loss"])
    yield points_table(places, "SGD and NGD on digits, mean ± standard error over seeds")
    yield minima_table(places)


def charts(rows: Rows) -> list[Chart]:
    """Losses, λ̂, Tr H and WBIC over epochs; the spectra of the first seed."""
    way = rows.where(at=["on the way", "end"])
    names = {"loss": "training loss", "validation_loss": "validation loss", **QUANTITIES}
    out = [
        over_epochs(f"{TITLES[column]} over epochs", way, column, words, "")
        for column, words in names.items()
    ]
    first = way.where(seed=min(rows.values("seed")))
    for optimizer in ("sgd", "ngd"):
        stems = tuple(
            Series(f"epoch {row['epoch']:.3g}", row["nodes"], row["weights"], style="stems")
            for row in first.where(optimizer=optimizer)
        )
        caption = "Ritz values and weights of Lanczos steps from one random vector, first seed."
        title = f"Spectrum of the Hessian, {NAMES[optimizer]}"
        out.append(Chart(title, "eigenvalue", "weight", stems, y_log=True, caption=caption))
    return out


SETTING = Setting(
    "digits", 1400, 350, 40, rate=0.1, batch=64, chains=2, draws=120, burn_in=100, sampled_batch=256
)

EXPERIMENT = Experiment(
    "ngd-digits",
    "SGD against NGD on 8 × 8 digits: the NGD paper in miniature",
    NGD,
    "Figures 1 and 2, in miniature",
    {
        "smoke": DigitsScale(
            replace(
                SETTING,
                training=200,
                epochs=4,
                draws=8,
                burn_in=8,
                sampled_batch=50,
                step_size=3e-4,
            ),
            2,
            10,
            1,
        ),
        "cpu": DigitsScale(SETTING, 3, 40, 4),
        "paper": DigitsScale(
            replace(SETTING, epochs=100, chains=4, draws=500, burn_in=500), 10, 100, 10
        ),
    },
    cells,
    run,
    claims,
    tables,
    charts,
    (
        *ASSUMED,
        *notes("""
            8 × 8 digits in place of MNIST, one hidden layer of 32, rate 0.1 and batches of 64: a
              demonstration.
        """),
    ),
    size="nothing of this: a demonstration, whose claims are ours.",
)
