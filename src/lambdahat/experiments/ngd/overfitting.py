"""λ̂, Tr H, WBIC and G_n against validation loss while a network overfits (Figures 7 and 8 of the NGD paper).

The paper had WBIC alone, because no library gave it G_n, the Bayes generalisation loss E[F_{n+1}] − F_n (Eq. 28). Here
G_n is sampled at β = 1 and read on the held-out images.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lambdahat.experiments.charts import Chart
from lambdahat.experiments.claims import Claim
from lambdahat.experiments.experiment import Cell, Experiment, Row, Rows
from lambdahat.experiments.ngd.claims import (
    ASSUMED,
    NAMES,
    RUN,
    SMALLER,
    beside_plots,
    curve,
    grouped,
    minima_table,
)
from lambdahat.experiments.ngd.epochs import along, over_epochs
from lambdahat.experiments.ngd.training import Net, Setting, grid, subject_of, trained
from lambdahat.experiments.ngd.vs_sgd import SMALL, TINY, WHOLE
from lambdahat.experiments.papers import NGD
from lambdahat.experiments.reproduction import Table
from lambdahat.experiments.statistics import Reading, correlation, mean_of

MEASURES = {  # column: words, where the paper has it, and of which optimisers
    "llc_batch": ("λ̂ at nβ = B/ln B", "Figure 7", ("sgd", "ngd")),
    "llc": ("λ̂ at nβ = n/ln n", "Figure 7", ("sgd", "ngd")),
    "trace": ("Tr H", "Figure 7", ("sgd", "ngd")),
    "wbic": ("WBIC", "Figure 8", ("ngd",)),
    "g_n": ("G_n", "A.3, which lacked it", ("ngd",)),
}


@dataclass(frozen=True)
class Config:
    """One scale: few images for long, so that the validation loss rises again."""

    setting: Setting
    net: Net
    points: int
    seeds: int


def cells(config: Config) -> list[Cell]:
    """Seeds."""
    found = grid(config.setting, [config.setting.data], [config.net], config.seeds)
    return [{**cell, "points": config.points} for cell in found]


def run(cell: Cell, device: str) -> list[Row]:
    """A row for each optimiser and each of ``points`` equally spaced epochs, with G_n."""
    subject = subject_of(cell, device)
    start = subject.problem.vector.clone()
    ways = [trained(subject, optimizer, start) for optimizer in ("sgd", "ngd")]
    return [row for way in ways for row in along(subject, way, cell["points"], bayes=True)]


def claims(rows: Rows) -> list[Claim]:
    """Each quantity grows with the validation loss once the model overfits: mean rank correlation over runs."""
    found = []
    for column, (words, source, optimizers) in MEASURES.items():
        for optimizer in ("sgd", "ngd"):
            reading = with_validation(rows.where(optimizer=optimizer), column)
            said = "increases" if optimizer in optimizers and column != "g_n" else "not shown"
            found.append(Claim(f"{words} of {NAMES[optimizer]} grows with the validation loss while overfitting",
                               source, said, reading))  # fmt: skip
    return found


def with_validation(rows: Rows, column: str) -> Reading:
    """Spearman's ρ between a column and the validation loss after its least, averaged over runs.

    A run has none with fewer than four points from there on.
    """
    return mean_of([correlation(part.values("validation_loss"), part.values(column)).value for part in _late(rows)])


def _late(rows: Rows) -> Iterator[Rows]:
    """Of each run the points from the least validation loss on."""
    for part in grouped(rows, lambda row: str([row[key] for key in RUN])).values():
        losses = part.values("validation_loss")
        yield part[losses.index(min(losses)) :]


def tables(rows: Rows) -> list[Table]:
    """All quantities over epochs, and where no minimum was."""
    columns = ("loss", "validation_loss", *MEASURES)
    lines = []
    for optimizer in ("sgd", "ngd"):
        for place in rows.distinct("part"):
            here = rows.where(optimizer=optimizer, part=place)
            means = (str(mean_of(here.values(column))) for column in columns)
            lines.append((NAMES[optimizer], f"{mean_of(here.values('epoch')).value:.4g}", *means))
    header = ("by", "epoch", "training loss", "validation loss", *(words for words, *_ in MEASURES.values()))
    return [Table("Overfitting, mean ± standard error over seeds", header, tuple(lines)), minima_table(rows)]


def charts(rows: Rows) -> list[Chart]:
    """The validation loss and every quantity over epochs; then WBIC and G_n against the validation loss."""
    out = [over_epochs("Validation loss", rows, "validation_loss", "validation loss", "Figure 8")]
    for column, (words, source, _) in MEASURES.items():
        out.append(over_epochs(words, rows, column, words, source))
    for column in ("wbic", "g_n"):
        series = []
        for optimizer in ("sgd", "ngd"):
            part = rows.where(optimizer=optimizer)
            means = [[mean_of(part.where(part=place).values(name)).value for place in part.distinct("part")]
                     for name in ("validation_loss", column)]  # fmt: skip
            series.append(replace(curve(NAMES[optimizer], part, "part", column), x=means[0], y=means[1]))
        words, source, _ = MEASURES[column]
        out.append(Chart(f"{words} against validation loss", "validation loss", words, tuple(series), source=source))
    return beside_plots(out)


EXPERIMENT = Experiment(
    "ngd-overfitting",
    "λ̂, Tr H and WBIC grow while a network overfits",
    NGD,
    "Figures 7 and 8",
    {
        "smoke": Config(replace(TINY, training=100, epochs=20), ("ffnn", 1, 8), 2, 1),
        "cpu": Config(replace(SMALL, data="fashion-mnist", training=1024, epochs=400), ("ffnn", 1, 64), 8, 4),
        "paper": Config(replace(WHOLE, data="fashion-mnist", epochs=200), ("ffnn", 2, 256), 20, 5),
    },
    cells,
    run,
    claims,
    tables,
    charts,
    (*ASSUMED, SMALLER, "Which network Figures 7 and 8 show, and for how many epochs, the text does not say.",
     "G_n by chains at β = 1 with the same γ, read on the held-out images.",
     "Overfitting is from the epoch of least validation loss on."),
)  # fmt: skip
