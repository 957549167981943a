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
from lambdahat.experiments.kit.experiment import NGD, Experiment, Size, sentences
from lambdahat.experiments.ngd.epochs import along, epoch_line, over_epochs
from lambdahat.experiments.ngd.ngd_claims import (
    ASSUMED,
    HERE,
    INTERPOLATED,
    NAMES,
    RUN,
    SMALLER,
    TITLES,
    beside_plots,
    by_group,
    by_optimizer,
    curve,
    minima_table,
    unmet,
)
from lambdahat.experiments.ngd.ngd_runs import (
    SMALL,
    TINY,
    WHOLE,
    Net,
    NgdSetting,
    run_cells,
    subject_of,
    train_both,
)
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

    setting: NgdSetting
    net: Net
    points: int
    seeds: int


def cells(scale: OverfittingScale) -> list[Cell]:
    """Seeds."""
    data, nets = [scale.setting.data], [scale.net]
    return run_cells(scale.setting, data, nets, scale.seeds, points=scale.points)


def run(cell: Cell, device: str) -> list[Row]:
    """A row for each optimiser and each of ``points`` equally spaced epochs, with G_n."""
    subject = subject_of(cell, device)
    ways, bayes = train_both(subject), "tol" not in cell
    return [row for way in ways for row in along(subject, way, cell["points"], bayes)]


def claims(rows: Rows) -> Iterator[Claim]:
    """Each quantity grows with the validation loss once the model overfits; what the paper does
    not show is ours.
    """
    for column, (words, source, optimizers) in _measures(rows).items():
        for optimizer in ("sgd", "ngd"):
            part, name = rows.where(optimizer=optimizer), NAMES[optimizer]
            own = optimizer not in optimizers
            sentence = f"{words} of {name} grows with the validation loss while overfitting"
            said = (HERE, "not shown") if own else (source, "increases")
            reading, reason = with_validation(part, column), _unmet(part, name, column)
            yield Claim(sentence, *said, reading, unit=" % per %", unmet=reason, own=own)


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
    for part in by_group(rows, lambda row: str([row[key] for key in RUN])).values():
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
    if 2 * short < len(late):
        return unmet({name: Rows([row for part in late for row in part])}, column)
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


def tables(rows: Rows) -> Iterator[Table]:
    """All quantities over epochs, and where no minimum was."""
    measures = _measures(rows)
    columns = ("loss", "validation_loss", *measures)
    lines = [
        (name, *epoch_line(part.where(part=place), columns))
        for name, part in by_optimizer(rows).items()
        for place in rows.distinct("part")
    ]
    words = (words for words, *_ in measures.values())
    header = ("by", "epoch", "training loss", "validation loss", *words)
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
        for name, part in by_optimizer(rows).items():
            x, y = (
                [mean_of(part.where(part=at).values(one)).value for at in part.distinct("part")]
                for one in ("validation_loss", column)
            )
            series.append(replace(curve(name, part, "part", column), x=x, y=y))
        title = f"{TITLES[column]} against validation loss"
        words, source, _ = MEASURES[column]
        out.append(Chart(title, "validation loss", words, tuple(series), source=source))
    return beside_plots(out)


_FEW = replace(SMALL, data="fashion-mnist", training=1024, epochs=400)
_LONG = replace(WHOLE, data="fashion-mnist", epochs=200)

_OVERFITTING_NOTES = sentences(f"""
    Which network Figures 7 and 8 show, and for how many epochs, the text does not say.
    G_n by chains at β = 1 with the same γ, read on the held-out images.
    Overfitting is from the epoch of least validation loss on. Growth is the slope of logarithms
      there, by seed.
    Points with a training loss below {INTERPOLATED:.3f}, 1 % of chance's, are left out: where a
      network interpolates, Tr H and λ̂ go to 0 with the loss, whatever the validation loss does.
    G_n is not sampled at paper scale.
    At paper scale γ = 100 alone, and 8 points of a run, one in 25 epochs, where 10 had been
      planned: cut before the run to save time.
""")
OVERFITTING = Experiment(
    "ngd-overfitting",
    "λ̂, Tr H and WBIC grow while a network overfits",
    NGD,
    "Figures 7 and 8",
    {
        "smoke": OverfittingScale(replace(TINY, training=100, epochs=20), ("ffnn", 1, 8), 2, 1),
        "cpu": OverfittingScale(_FEW, ("ffnn", 1, 64), 8, 4),
        "paper": OverfittingScale(_LONG, ("ffnn", 2, 256), 8, 5),
    },
    cells,
    run,
    claims,
    tables,
    charts,
    (*ASSUMED, SMALLER, *_OVERFITTING_NOTES),
    "Fashion-MNIST, rate 0.01, α = 0.1, ε = 10⁻¹⁰, batches of 128; network, epochs and seeds are"
    " not in the text.",
    (Size(data="fashion-mnist", rate="0.01"),),
)
