"""λ̂, Tr H, WBIC and G_n against validation loss while a network overfits (Figures 7 and 8 of the
NGD paper).

The paper had WBIC alone, because no library gave it G_n, the Bayes generalisation loss E[F_{n+1}] −
F_n (Eq. 28). Here G_n is sampled at β = 1 and read on the held-out images.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lambdahat.experiments.kit.cells import Cell, Row, Rows
from lambdahat.experiments.kit.claims import Claim, Reading, Table, mean_of, slope
from lambdahat.experiments.kit.experiment import NGD, Experiment, Size, notes
from lambdahat.experiments.ngd.claims import (
    ASSUMED,
    HERE,
    NAMES,
    RUN,
    SMALLER,
    TITLES,
    beside_plots,
    curve,
    grouped,
    minima_table,
)
from lambdahat.experiments.ngd.epochs import along, over_epochs
from lambdahat.experiments.ngd.preconditions import INTERPOLATED, unmet
from lambdahat.experiments.ngd.training import Net, Setting, grid, subject_of, trained
from lambdahat.experiments.ngd.vs_sgd import SMALL, TINY, WHOLE
from lambdahat.results.charts import Chart

LEAST = 4  # points of a run from its least validation loss on, for a slope over them
MEASURES = {  # column: words, where the paper has it, and of which optimisers
    "llc_batch": ("λ̂ at nβ = B/ln B", "Figure 7", ("sgd", "ngd")),
    "llc": ("λ̂ at nβ = n/ln n", "Figure 7", ("sgd", "ngd")),
    "trace": ("Tr H", "Figure 7", ("sgd", "ngd")),
    "wbic": ("WBIC", "Figure 8", ("ngd",)),
    "g_n": ("G_n", "", ()),
}


@dataclass(frozen=True)
class OverfittingScale:
    """One scale: few images for long, so that the validation loss rises again."""

    setting: Setting
    net: Net
    points: int
    seeds: int


def cells(config: OverfittingScale) -> list[Cell]:
    """Seeds."""
    found = grid(config.setting, [config.setting.data], [config.net], config.seeds)
    return [{**cell, "points": config.points} for cell in found]


def run(cell: Cell, device: str) -> list[Row]:
    """A row for each optimiser and each of ``points`` equally spaced epochs, with G_n."""
    subject = subject_of(cell, device)
    start = subject.problem.vector.clone()
    ways = [trained(subject, optimizer, start) for optimizer in ("sgd", "ngd")]
    return [row for way in ways for row in along(subject, way, cell["points"], "tol" not in cell)]


def claims(rows: Rows) -> Iterator[Claim]:
    """Each quantity grows with the validation loss once the model overfits; what the paper does
    not show is ours.
    """
    for column, (words, source, optimizers) in _measures(rows).items():
        for optimizer in ("sgd", "ngd"):
            part, name, own = (
                rows.where(optimizer=optimizer),
                NAMES[optimizer],
                optimizer not in optimizers,
            )
            yield Claim(
                f"{words} of {name} grows with the validation loss while overfitting",
                HERE if own else source,
                "not shown" if own else "increases",
                with_validation(part, column),
                unit=" % per %",
                unmet=_unmet(part, name, column),
                own=own,
            )


def _measures(rows: Rows) -> dict[str, tuple[str, str, tuple[str, ...]]]:
    """Those of MEASURES that the rows have."""
    return {column: told for column, told in MEASURES.items() if rows.values(column)}


def with_validation(rows: Rows, column: str) -> Reading:
    """The slope of ln of a column over ln of the validation loss after its least, averaged over
    runs.

    A run has none with fewer than LEAST points from there on that do not interpolate.
    """
    slopes = [
        slope(_logs(part, "validation_loss"), _logs(part, column)).value
        for part in _late(rows)
        if len(part) >= LEAST
    ]
    return mean_of(slopes)


def _logs(rows: Rows, column: str) -> list[float]:
    return [math.log(value) if value > 0 else math.nan for value in rows.values(column)]


def _late(rows: Rows, interpolated: bool = False) -> list[Rows]:
    """Of each run the points from the least validation loss on, but for those that interpolate
    unless asked for.
    """
    parts = []
    for part in grouped(rows, lambda row: str([row[key] for key in RUN])).values():
        losses = part.values("validation_loss")
        late = part[losses.index(min(losses)) :]
        parts.append(Rows(row for row in late if interpolated or row["loss"] > INTERPOLATED))
    return parts


def _unmet(rows: Rows, name: str, column: str) -> str:
    """Half or more of the runs do not overfit or interpolate soon, or the points while they
    overfit are not minima.
    """
    late, whole = _late(rows), _late(rows, interpolated=True)
    short = sum(len(part) < LEAST for part in late)
    if 2 * short >= len(late):
        rising = sum(len(part) >= LEAST for part in whole)
        if 2 * rising > len(whole):
            return (
                f"{name} interpolates before {LEAST} points of rising validation loss in {short} of"
                f" {len(late)}"
            )
        return (
            f"the validation loss of {name} does not rise over {LEAST} points in {short} of"
            f" {len(late)} runs"
        )
    return unmet({name: Rows([row for part in late for row in part])}, column)


def tables(rows: Rows) -> Iterator[Table]:
    """All quantities over epochs, and where no minimum was."""
    measures = _measures(rows)
    columns = ("loss", "validation_loss", *measures)
    lines = []
    for optimizer in ("sgd", "ngd"):
        for place in rows.distinct("part"):
            here = rows.where(optimizer=optimizer, part=place)
            means = (str(mean_of(here.values(column))) for column in columns)
            lines.append((NAMES[optimizer], f"{mean_of(here.values('epoch')).value:.4g}", *means))
    header = (
        "by",
        "epoch",
        "training loss",
        "validation loss",
        *(words for words, *_ in measures.values()),
    )
    yield Table("Overfitting, mean ± standard error over seeds", header, tuple(lines))
    yield minima_table(rows)


def charts(rows: Rows) -> list[Chart]:
    """The validation loss and every quantity over epochs; then WBIC and G_n against the
    validation loss.
    """
    out = [over_epochs("Validation loss", rows, "validation_loss", "validation loss", "Figure 8")]
    for column, (words, source, _) in _measures(rows).items():
        out.append(over_epochs(TITLES[column], rows, column, words, source))
    for column in ("wbic", "g_n") if rows.values("g_n") else ("wbic",):
        series = []
        for optimizer in ("sgd", "ngd"):
            part = rows.where(optimizer=optimizer)
            means = [
                [
                    mean_of(part.where(part=place).values(name)).value
                    for place in part.distinct("part")
                ]
                for name in ("validation_loss", column)
            ]
            series.append(
                replace(curve(NAMES[optimizer], part, "part", column), x=means[0], y=means[1])
            )
        words, source, _ = MEASURES[column]
        out.append(
            Chart(
                f"{TITLES[column]} against validation loss",
                "validation loss",
                words,
                tuple(series),
                source=source,
            )
        )
    return beside_plots(out)


EXPERIMENT = Experiment(
    "ngd-overfitting",
    "λ̂, Tr H and WBIC grow while a network overfits",
    NGD,
    "Figures 7 and 8",
    {
        "smoke": OverfittingScale(replace(TINY, training=100, epochs=20), ("ffnn", 1, 8), 2, 1),
        "cpu": OverfittingScale(
            replace(SMALL, data="fashion-mnist", training=1024, epochs=400), ("ffnn", 1, 64), 8, 4
        ),
        "paper": OverfittingScale(
            replace(WHOLE, data="fashion-mnist", epochs=200), ("ffnn", 2, 256), 8, 5
        ),
    },
    cells,
    run,
    claims,
    tables,
    charts,
    (
        *ASSUMED,
        SMALLER,
        *notes(f"""
            Which network Figures 7 and 8 show, and for how many epochs, the text does not say.
            G_n by chains at β = 1 with the same γ, read on the held-out images.
            Overfitting is from the epoch of least validation loss on. Growth is the slope of
              logarithms there, by seed.
            Points with a training loss below {INTERPOLATED:.3f}, 1 % of chance's, are left out:
              where a network interpolates, Tr H and λ̂ go to 0 with the loss, whatever the
              validation loss does.
            G_n is not sampled at paper scale.
            At paper scale γ = 100 alone, and 8 points of a run, one in 25 epochs, where 10 had been
              planned: cut before the run to save time.
        """),
    ),
    size=(
        "Fashion-MNIST, rate 0.01, α = 0.1, ε = 10⁻¹⁰, batches of 128; network, epochs and seeds"
        " are not in the text."
    ),
    sizes=(Size(data="fashion-mnist", rate="0.01"),),
)
