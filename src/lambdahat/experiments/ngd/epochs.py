"""λ̂ and Tr H of SGD and NGD over epochs (Figure 2 of the NGD paper)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from lambdahat._core.progress import report
from lambdahat.experiments.kit.cells import Cell, Row, Rows
from lambdahat.experiments.kit.claims import Claim, Table, mean_of, paired_difference
from lambdahat.experiments.kit.experiment import NGD, Experiment, Size, notes
from lambdahat.experiments.ngd.claims import (
    ASSUMED,
    NAMES,
    QUANTITIES,
    SMALLER,
    TITLES,
    beside_plots,
    by_optimizer,
    curve,
    group_of,
    grouped,
    log_ratio,
    minima_table,
)
from lambdahat.experiments.ngd.measuring import measured
from lambdahat.experiments.ngd.preconditions import unmet
from lambdahat.experiments.ngd.training import Net, Setting, Subject, Way, grid, subject_of, trained
from lambdahat.experiments.ngd.vs_sgd import SMALL, TINY, WHOLE
from lambdahat.results.charts import Chart

LEVEL = 0.1  # by which part a level quantity may still change in the last third of training


@dataclass(frozen=True)
class EpochsScale:
    """One scale: data sets, networks, and how many points of a run to measure."""

    setting: Setting
    data: tuple[str, ...]
    nets: tuple[Net, ...]
    points: int
    seeds: int


def cells(config: EpochsScale) -> list[Cell]:
    """Data set × network × seed."""
    found = grid(config.setting, config.data, config.nets, config.seeds)
    return [{**cell, "points": config.points} for cell in found]


def run(cell: Cell, device: str) -> list[Row]:
    """A row for each optimiser and each of ``points`` equally spaced epochs."""
    subject = subject_of(cell, device)
    start = subject.problem.vector.clone()
    ways = [trained(subject, optimizer, start) for optimizer in ("sgd", "ngd")]
    return [row for way in ways for row in along(subject, way, cell["points"])]


def along(subject: Subject, way: Way, points: int, bayes: bool = False) -> list[Row]:
    """Rows at the 1st, …, last of so many equal parts of a run; ``part`` counts them."""
    rows = []
    for part in range(1, points + 1):
        point = way.at(part / points * way.end.epoch)
        found = {
            "optimizer": way.optimizer,
            "at": "on the way",
            "part": part,
            "diverged": way.diverged,
        }
        rows.append(found | measured(subject, point, bayes))
        report(f"measuring {NAMES[way.optimizer]}", part, points)
    return rows


def claims(rows: Rows) -> list[Claim]:
    """NGD above SGD at the end and over the epochs; λ̂ level at last while Tr H goes on falling."""
    return [
        claim
        for group, part in grouped(rows).items()
        for claim in [*_higher(part, group), *_late(part, group)]
    ]


def _higher(rows: Rows, group: str) -> Iterator[Claim]:
    end = rows.where(part=max(rows.values("part")))
    for column, source in (
        ("llc_batch", "Figure 2a"),
        ("llc", "Figure 2a, Eq. 19"),
        ("trace", "Figure 2b"),
    ):
        for part, words in ((end, "at the end"), (rows, "as a mean over the epochs")):
            gap = paired_difference(
                *(part.where(optimizer=name).paired(column) for name in ("ngd", "sgd"))
            )
            minima = unmet(by_optimizer(part), column)
            sentence = f"{group}: {QUANTITIES[column]} is higher for NGD {words}"
            yield Claim(sentence, source, "NGD higher", gap, unmet=minima)


def _late(rows: Rows, group: str) -> Iterator[Claim]:
    last = max(rows.values("part"))
    end, before = rows.where(part=last), rows.where(part=last - max(last // 3, 1))
    for name, part in by_optimizer(Rows([*before, *end])).items():
        early, late = part.where(part=before.distinct("part")), part.where(part=last)
        words = (
            f"{group}: λ̂ of {name} at nβ = B/ln B is level in the last third, within {LEVEL:.0%}"
            " (log-ratio)"
        )
        printed = "plateau"
        reading = log_ratio(late, early, "llc_batch")
        reason = unmet({name: part}, "llc_batch")
        yield Claim(words, "§3.1", printed, reading, "within", 0.0, math.log1p(LEVEL), unmet=reason)
        words = f"{group}: Tr H of {name} still falls in the last third (log-ratio)"
        printed = "continues to decrease"
        reading = log_ratio(late, early, "trace")
        yield Claim(words, "§3.1", printed, reading, "below", unmet=unmet({name: part}))


def tables(rows: Rows) -> Iterator[Table]:
    """Losses, λ̂ and Tr H over epochs, and where no minimum was."""
    columns = ("loss", "validation_loss", "llc_batch", "llc", "trace")
    lines = []
    for group, part in grouped(
        rows, lambda row: f"{group_of(row)}, {NAMES[row['optimizer']]}"
    ).items():
        for place in part.distinct("part"):
            here = part.where(part=place)
            means = (str(mean_of(here.values(column))) for column in columns)
            lines.append((group, f"{mean_of(here.values('epoch')).value:.4g}", *means))
    header = (
        "run",
        "epoch",
        "training loss",
        "validation loss",
        "λ̂ (B/ln B)",
        "λ̂ (n/ln n)",
        "Tr H",
    )
    yield Table("Over epochs, mean ± standard error over seeds", header, tuple(lines))
    yield minima_table(rows)


def charts(rows: Rows) -> list[Chart]:
    """λ̂ at both temperatures, Tr H and the training loss over epochs."""
    names = {**QUANTITIES, "loss": "training loss"}
    sources = {"llc_batch": "Figure 2a", "llc": "Figure 2a", "trace": "Figure 2b", "loss": ""}
    return beside_plots(
        [
            over_epochs(f"{TITLES[column]}, {group}", part, column, names[column], source)
            for group, part in grouped(rows).items()
            for column, source in sources.items()
        ]
    )


def over_epochs(title: str, rows: Rows, column: str, words: str, source: str) -> Chart:
    """A column of SGD and NGD over epochs."""
    series = tuple(
        curve(NAMES[name], rows.where(optimizer=name), "epoch", column) for name in ("sgd", "ngd")
    )
    return Chart(title, "epoch", words, series, source=source)


EXPERIMENT = Experiment(
    "ngd-epochs",
    "λ̂ and Tr H of SGD and NGD over epochs",
    NGD,
    "§3.1, Figure 2",
    {
        "smoke": EpochsScale(TINY, ("digits",), (("ffnn", 1, 8),), 2, 1),
        "cpu": EpochsScale(SMALL, ("mnist",), (("ffnn", 1, 64),), 7, 5),
        "paper": EpochsScale(WHOLE, ("mnist",), (("ffnn", 2, 256),), 6, 5),
    },
    cells,
    run,
    claims,
    tables,
    charts,
    (
        *ASSUMED,
        SMALLER,
        *notes("""
            Which network Figure 2 shows, and for how many epochs, the text does not say.
            The comparison over all epochs, which the captions of Figure 2 make, was added after the
              cpu runs were seen.
            At paper scale γ = 100 alone, and MNIST alone: Fashion-MNIST was dropped before the run
              to save time.
        """),
    ),
    size=(
        "rate 0.01, α = 0.1, ε = 10⁻¹⁰, batches of 128; network, data set, epochs and seeds are not"
        " in the text."
    ),
    sizes=(Size(data="mnist", rate="0.01"), Size(data="fashion-mnist", rate="0.01")),
)
