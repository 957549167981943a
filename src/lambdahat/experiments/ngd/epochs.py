"""λ̂ and Tr H of SGD and NGD over epochs (ngd-epochs, Figure 2 of the NGD paper), and in miniature
on 8 × 8 digits, which ``lambdahat demo`` runs (ngd-digits).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lambdahat._core.progress import report
from lambdahat.estimators._spectrum import spectrum
from lambdahat.experiments.kit.cells import Cell, Row, Rows, stems
from lambdahat.experiments.kit.claims import Claim, Table, mean_of, paired_difference
from lambdahat.experiments.kit.experiment import NGD, Experiment, Size, sentences
from lambdahat.experiments.ngd.ngd_claims import (
    ASSUMED,
    HEADINGS,
    NAMES,
    QUANTITIES,
    SMALLER,
    TITLES,
    beside_plots,
    by_group,
    by_optimizer,
    curves,
    form_claims,
    group_of,
    log_ratio,
    means,
    minima_table,
    points_table,
    unmet,
)
from lambdahat.experiments.ngd.ngd_runs import (
    SMALL,
    TINY,
    WHOLE,
    Net,
    NgdSetting,
    NgdSubject,
    RunPoint,
    Way,
    at_equal_loss,
    measure,
    run_cells,
    subject_of,
    train_both,
)
from lambdahat.operators.curvature import hessian
from lambdahat.results.charts import Chart, short

LEVEL = 0.1  # by which part a level quantity may still change in the last third of training


@dataclass(frozen=True)
class EpochsScale:
    """One scale: data sets, networks, and how many points of a run to measure."""

    setting: NgdSetting
    data: tuple[str, ...]
    nets: tuple[Net, ...]
    points: int
    seeds: int


def cells(scale: EpochsScale) -> list[Cell]:
    """Data set × network × seed."""
    return run_cells(scale.setting, scale.data, scale.nets, scale.seeds, points=scale.points)


def run(cell: Cell, device: str) -> list[Row]:
    """A row for each optimiser and each of ``points`` equally spaced epochs."""
    subject = subject_of(cell, device)
    ways = train_both(subject)
    return [row for way in ways for row in along(subject, way, cell["points"])]


def along(subject: NgdSubject, way: Way, points: int, bayes: bool = False) -> list[Row]:
    """Rows at the 1st, …, last of so many equal parts of a run; ``part`` counts them."""
    rows = []
    for part in range(1, points + 1):
        point = way.at(part / points * way.end.epoch)
        place = {"at": "on the way", "part": part, "diverged": way.diverged}
        rows.append({"optimizer": way.optimizer, **place, **measure(subject, point, bayes)})
        report(f"measuring {NAMES[way.optimizer]}", part, points)
    return rows


def claims(rows: Rows) -> Iterator[Claim]:
    """NGD above SGD at the end and over the epochs; λ̂ level at last while Tr H goes on falling."""
    for group, part in by_group(rows).items():
        yield from _higher(part, group)
        yield from _late(part, group)


def _higher(rows: Rows, group: str) -> Iterator[Claim]:
    end = rows.where(part=max(rows.values("part")))
    sources = {"llc_batch": "Figure 2a", "llc": "Figure 2a, Eq. 19", "trace": "Figure 2b"}
    for column, source in sources.items():
        for part, words in ((end, "at the end"), (rows, "as a mean over the epochs")):
            sgd, ngd = (half.paired(column) for half in by_optimizer(part).values())
            sentence = f"{group}: {QUANTITIES[column]} is higher for NGD {words}"
            reading, reason = paired_difference(ngd, sgd), unmet(by_optimizer(part), column)
            yield Claim(sentence, source, "NGD higher", reading, unmet=reason)


def _late(rows: Rows, group: str) -> Iterator[Claim]:
    last = max(rows.values("part"))
    end, before = rows.where(part=last), rows.where(part=last - max(last // 3, 1))
    for name, part in by_optimizer(Rows([*before, *end])).items():
        early, late = part.where(part=before.distinct("part")), part.where(part=last)
        sentence = (
            f"{group}: λ̂ of {name} at nβ = B/ln B is level in the last third, within {LEVEL:.0%}"
            " (log-ratio)"
        )
        reading, reason = log_ratio(late, early, "llc_batch"), unmet({name: part}, "llc_batch")
        bounds = "within", 0.0, math.log1p(LEVEL)
        yield Claim(sentence, "§3.1", "plateau", reading, *bounds, unmet=reason)
        sentence = f"{group}: Tr H of {name} still falls in the last third (log-ratio)"
        reading, reason = log_ratio(late, early, "trace"), unmet({name: part})
        yield Claim(sentence, "§3.1", "continues to decrease", reading, "below", unmet=reason)


def tables(rows: Rows) -> Iterator[Table]:
    """Losses, λ̂ and Tr H over epochs, and where no minimum was."""
    columns = ("loss", "validation_loss", "llc_batch", "llc", "trace")
    runs = by_group(rows, lambda row: f"{group_of(row)}, {NAMES[row['optimizer']]}")
    lines = [
        (run, *epoch_line(part.where(part=place), columns))
        for run, part in runs.items()
        for place in part.distinct("part")
    ]
    header = ("run", "epoch", *(HEADINGS[column] for column in columns))
    yield Table("Over epochs, mean ± standard error over seeds", header, tuple(lines))
    yield minima_table(rows)


def epoch_line(rows: Rows, columns: tuple[str, ...]) -> tuple[str, ...]:
    """The epoch of a part of the runs, and the means of some columns there."""
    return f"{mean_of(rows.values('epoch')).value:.4g}", *means(rows, columns)


def charts(rows: Rows) -> list[Chart]:
    """λ̂ at both temperatures, Tr H and the training loss over epochs."""
    names = {**QUANTITIES, "loss": "training loss"}
    sources = {"llc_batch": "Figure 2a", "llc": "Figure 2a", "trace": "Figure 2b", "loss": ""}
    return beside_plots(
        [
            over_epochs(f"{TITLES[column]}, {group}", part, column, names[column], source)
            for group, part in by_group(rows).items()
            for column, source in sources.items()
        ]
    )


def over_epochs(title: str, rows: Rows, column: str, words: str, source: str) -> Chart:
    """A column of SGD and NGD over epochs."""
    return Chart(title, "epoch", words, curves(rows, "epoch", column), source=source)


_EPOCHS_NOTES = sentences("""
    Which network Figure 2 shows, and for how many epochs, the text does not say.
    The comparison over all epochs, which the captions of Figure 2 make, was added after the cpu
      runs were seen.
    At paper scale γ = 100 alone, and MNIST alone: Fashion-MNIST was dropped before the run to
      save time.
""")
EPOCHS = Experiment(
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
    (*ASSUMED, SMALLER, *_EPOCHS_NOTES),
    "rate 0.01, α = 0.1, ε = 10⁻¹⁰, batches of 128; network, data set, epochs and seeds are not in"
    " the text.",
    (Size(data="mnist", rate="0.01"), Size(data="fashion-mnist", rate="0.01")),
)


@dataclass(frozen=True)
class DigitsScale:
    """One scale of the miniature: ``depth`` is that of the spectra, ``first`` the first seed."""

    setting: NgdSetting
    points: int
    depth: int
    seeds: int
    first: int = 0


def digits_cells(scale: DigitsScale) -> list[Cell]:
    """Seeds."""
    more = {"points": scale.points, "depth": scale.depth}
    found = run_cells(scale.setting, ["digits"], [("ffnn", 1, 32)], scale.seeds, **more)
    return [{**cell, "seed": scale.first + cell["seed"]} for cell in found]


def digits_run(cell: Cell, device: str) -> list[Row]:
    """Rows of both optimisers over epochs, with the spectrum of the Hessian, and at equal
    training loss.
    """
    subject = subject_of(cell, device)
    ways = train_both(subject)
    rows = []
    for way, level in zip(ways, at_equal_loss(ways), strict=True):
        found = along(subject, way, cell["points"])
        rows += [
            {**row, **_spectrum(subject, way.at(row["epoch"]), cell["depth"])} for row in found
        ]
        rows[-1]["at"] = "end"
        equal = found[-1] if level is way.end else measure(subject, level)
        rows.append({"optimizer": way.optimizer, **equal, "at": "equal loss"})
    return rows


def _spectrum(subject: NgdSubject, point: RunPoint, depth: int) -> Row:
    """Ritz values of the Hessian and their weights, from one random vector."""
    found = spectrum(hessian(subject.problem.at(point.vector)), depth=depth, seed=subject.seed)
    return {"nodes": short(found.nodes[0]), "weights": short(found.weights[0])}


def digits_claims(rows: Rows) -> list[Claim]:
    """Every form of the paper's claim; all ours, for the paper has no run on these images."""
    return [replace(claim, own=True) for claim in form_claims(rows)]


def digits_tables(rows: Rows) -> Iterator[Table]:
    """What was measured at the end and at equal training loss, and where no minimum was."""
    places = rows.where(at=["end", "equal loss"])
    yield points_table(places, "SGD and NGD on digits, mean ± standard error over seeds")
    yield minima_table(places)


def digits_charts(rows: Rows) -> Iterator[Chart]:
    """Losses, λ̂, Tr H and WBIC over epochs; the spectra of the first seed."""
    way = rows.where(at=["on the way", "end"])
    names = {"loss": "training loss", "validation_loss": "validation loss", **QUANTITIES}
    for column, words in names.items():
        yield over_epochs(f"{TITLES[column]} over epochs", way, column, words, "")
    caption = "Ritz values and weights of Lanczos steps from one random vector, first seed."
    for name, part in by_optimizer(way.where(seed=min(rows.values("seed")))).items():
        series = tuple(stems(f"epoch {row['epoch']:.3g}", row) for row in part)
        title = f"Spectrum of the Hessian, {name}"
        yield Chart(title, "eigenvalue", "weight", series, y_log=True, caption=caption)


_DIGITS = NgdSetting(
    "digits", 1400, 350, 40, rate=0.1, batch=64, chains=2, draws=120, burn_in=100, sampled_batch=256
)
_FEW = replace(TINY, held_out=350, epochs=4, rate=0.1, batch=64, draws=8, burn_in=8)
_MINIATURE = (
    "8 × 8 digits in place of MNIST, one hidden layer of 32, rate 0.1 and batches of 64: a"
    " demonstration."
)

DIGITS = Experiment(
    "ngd-digits",
    "SGD against NGD on 8 × 8 digits: the NGD paper in miniature",
    NGD,
    "Figures 1 and 2, in miniature",
    {
        "smoke": DigitsScale(_FEW, 2, 10, 1),
        "cpu": DigitsScale(_DIGITS, 3, 40, 4),
        "paper": DigitsScale(
            replace(_DIGITS, epochs=100, chains=4, draws=500, burn_in=500), 10, 100, 10
        ),
    },
    digits_cells,
    digits_run,
    digits_claims,
    digits_tables,
    digits_charts,
    (*ASSUMED, _MINIATURE),
    size="nothing of this: a demonstration, whose claims are ours.",
)
