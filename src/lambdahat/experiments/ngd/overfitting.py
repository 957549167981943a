"""λ̂, Tr H, WBIC and G_n against validation loss while a network overfits (Figures 7 and 8 of the
NGD paper).

The paper had WBIC alone, because no library gave it G_n, the Bayes generalisation loss E[F_{n+1}] −
F_n (Eq. 28). Here G_n is sampled at β = 1 and read on the held-out images.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from lambdahat.experiments import kit
from lambdahat.experiments.kit import Cell, Chart, Claim, Reading, Row, Rows, Size, Table
from lambdahat.experiments.ngd import ngd_claims as ngd
from lambdahat.experiments.ngd import ngd_runs as runs

LEAST_POINTS = 4  # points of a run from its least validation loss on, for a slope over them
MEASURES = {  # column: words, where the paper has it, and of which optimisers
    "llc_batch": ("λ̂ at nβ = B/ln B", "Figure 7", ("sgd", "ngd")),
    "llc": ("λ̂ at nβ = n/ln n", "Figure 7", ("sgd", "ngd")),
    "trace": ("Tr H", "Figure 7", ("sgd", "ngd")),
    "wbic": ("WBIC", "Figure 8", ("ngd",)),
    "g_n": ("G_n", "", ()),
}


def run(cell: Cell, device: str) -> list[Row]:
    """A row for each optimiser, or each ``measured``, and each of ``points`` equally spaced epochs.

    Cells of chains with a fixed length have G_n too.
    """
    subject, names = runs.subject_of(cell, device), cell.get("measured", ("sgd", "ngd"))
    points, bayes = cell["points"], "tol" not in cell
    ways = [way for way in runs.train_both(subject) if way.optimizer in names]
    return [row for way in ways for row in runs.measure_along(subject, way, points, bayes)]


def claims(rows: Rows) -> Iterator[Claim]:
    """Each quantity grows with the validation loss once the model overfits."""
    for column, (words, source, optimizers) in _measures(rows).items():
        for optimizer in ("sgd", "ngd"):
            part, name = rows.where(optimizer=optimizer), optimizer.upper()
            own = optimizer not in optimizers
            sentence = f"{words} of {name} grows with the validation loss while overfitting"
            said = (ngd.HERE, "not shown") if own else (source, "increases")
            reading, reason = with_validation(part, column), _unmet_reason(part, name, column)
            yield Claim(sentence, *said, reading, unit=" % per %", unmet=reason, own=own)


def _measures(rows: Rows) -> dict[str, tuple[str, str, tuple[str, ...]]]:
    """Those of MEASURES that the rows have."""
    return {column: measure for column, measure in MEASURES.items() if rows.values(column)}


def with_validation(rows: Rows, column: str) -> Reading:
    """The slope of ln of a column over ln of the validation loss after its least, averaged over
    runs; a run has none with fewer than LEAST_POINTS points from there on that do not interpolate.
    """
    slopes = []
    for part in _late(rows):
        if len(part) >= LEAST_POINTS:
            x, y = (
                [math.log(value) if value > 0 else math.nan for value in part.values(name)]
                for name in ("validation_loss", column)
            )
            slopes.append(kit.slope(x, y).value)
    return kit.mean_of(slopes)


def _late(rows: Rows, interpolated: bool = False) -> list[Rows]:
    """The points of each run from its least validation loss on, that do not interpolate."""
    parts = []
    for _, part in rows.groups("seed"):
        # an epoch that two cells of a seed have measured counts once
        by_epoch = {row["epoch"]: row for row in sorted(part, key=lambda row: row["epoch"])}
        points = Rows(by_epoch.values())
        losses = points.values("validation_loss")
        late = points[losses.index(min(losses)) :]
        parts.append(Rows(row for row in late if interpolated or row["loss"] > ngd.INTERPOLATED))
    return parts


def _unmet_reason(rows: Rows, name: str, column: str) -> str:
    """Why overfitting cannot be judged: too few points of half of the runs, or no minima."""
    late, whole = _late(rows), _late(rows, interpolated=True)
    short = sum(len(part) < LEAST_POINTS for part in late)
    if 2 * short < len(late):
        return ngd.unmet({name: Rows([row for part in late for row in part])}, column)
    if 2 * sum(len(part) >= LEAST_POINTS for part in whole) > len(whole):
        why = f"{name} interpolates before {LEAST_POINTS} points of rising validation loss"
        return f"{why} in {short} of {len(late)}"
    why = f"the validation loss of {name} does not rise over {LEAST_POINTS} points"
    return f"{why} in {short} of {len(late)} runs"


def tables(rows: Rows) -> Iterator[Table]:
    """All quantities over epochs, and the statuses of λ̂."""
    measures = _measures(rows)
    lines = [
        (name, *ngd.epoch_line(here, ("loss", "validation_loss", *measures)))
        for name, part in ngd.by_optimizer(rows).items()
        for _, here in sorted(part.groups("epoch"), key=lambda group: group[0])
    ]
    words = (words for words, *_ in measures.values())
    header = ("by", "epoch", "training loss", "validation loss", *words)
    yield kit.table("Overfitting, mean ± standard error over seeds", header, lines)
    yield ngd.status_table(rows)


def charts(rows: Rows) -> Iterator[Chart]:
    """Every quantity over epochs; then WBIC and G_n against the validation loss."""
    axis = "validation loss"
    yield ngd.over_epochs("Validation loss", rows, "validation_loss", axis, "Figure 8")
    for column, (words, source, _) in _measures(rows).items():
        yield ngd.over_epochs(ngd.TITLES[column], rows, column, words, source)
    for column in ("wbic", "g_n") if rows.values("g_n") else ("wbic",):
        series = []
        for name, every in ngd.by_optimizer(rows).items():
            parts = [part for _, part in sorted(every.groups("epoch"), key=lambda pair: pair[0])]
            x = [kit.over_seeds(part, "validation_loss").value for part in parts]
            means = [kit.over_seeds(part, column) for part in parts]
            series.append(kit.reading_series(name, x, means))
        title = f"{ngd.TITLES[column]} against validation loss"
        words, source, _ = MEASURES[column]
        yield Chart(title, axis, words, tuple(series), source=source)


# few images for long, so that the validation loss rises again
_TINY = runs.TINY | {"training": 100, "epochs": 20}
_FEW = runs.SMALL | {"data": "fashion-mnist", "training": 1024, "epochs": 400}
_LONG = runs.WHOLE | {"data": "fashion-mnist", "epochs": 200}
_NGD_ALONE = _LONG | {"epochs": 150}

_OVERFITTING_NOTES = kit.sentences(f"""
    The text does not say which network Figures 7 and 8 show, nor for how many epochs.
    G_n comes from chains at β = 1 with the same γ, evaluated on the held-out images.
    Overfitting begins at the epoch of the lowest validation loss. Growth is the slope of the
      logarithms from there on, by seed.
    Points with a training loss below {ngd.INTERPOLATED:.3f}, 1 % of the loss of guessing, are left
      out: where a network interpolates, Tr H and λ̂ go to 0 with the loss, whatever the validation
      loss does.
    G_n is not sampled at paper scale.
    At paper scale only γ = 100, and 8 points per run, one every 25 epochs, where 10 had been
      planned: reduced before the run to save time. Of NGD's too few were left before it
      interpolates: 12 in its first 150 epochs are planned.
""")


OVERFITTING = ngd.ngd_experiment(
    "ngd-overfitting",
    "λ̂, Tr H and WBIC grow while a network overfits",
    "Figures 7 and 8",
    {
        "smoke": runs.run_cells(_TINY, [("ffnn", 1, 8)], 1, points=2),
        "cpu": runs.run_cells(_FEW, [("ffnn", 1, 64)], 4, points=8),
        "paper": [
            *runs.run_cells(_LONG, [("ffnn", 2, 256)], 5, points=8),
            *runs.run_cells(_NGD_ALONE, [("ffnn", 2, 256)], 5, points=12, measured=["ngd"]),
        ],
    },
    *(run, claims, tables, charts),
    (ngd.SMALLER, *_OVERFITTING_NOTES),
    "Fashion-MNIST, rate 0.01, α = 0.1, ε = 10⁻¹⁰, batches of 128; network, epochs and seeds are"
    " not in the text.",
    (Size(data="fashion-mnist", rate="0.01"),),
)
