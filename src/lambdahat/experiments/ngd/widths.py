"""λ̂ of SGD and NGD over widths, one and two hidden layers (Figure 1 of the NGD paper)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lambdahat.experiments.kit.cells import Cell, Rows
from lambdahat.experiments.kit.claims import Claim, Table
from lambdahat.experiments.kit.experiment import NGD, Experiment, Size
from lambdahat.experiments.ngd.claims import (
    ASSUMED,
    NAMES,
    QUANTITIES,
    SMALLER,
    TITLES,
    beside_plots,
    curve,
    form_claims,
    minima_table,
    points_table,
)
from lambdahat.experiments.ngd.training import Setting, grid
from lambdahat.experiments.ngd.vs_sgd import SMALL, TINY, WHOLE, run
from lambdahat.results.charts import Chart

NUMBER = (
    'The one number of the paper, "highest t-value of 1.9^-31" under Figure 1, is read as a p-value'
    " of 1.9·10⁻³¹, the largest over the sizes. A few seeds cannot come near it: it is not judged."
)
HIDDEN = {1: "one hidden layer", 2: "two hidden layers"}
ALPHA = 0.01  # under Figure 1


@dataclass(frozen=True)
class WidthsScale:
    """One scale: every width with one and with two hidden layers."""

    setting: Setting
    widths: tuple[int, ...]
    seeds: int


def cells(config: WidthsScale) -> list[Cell]:
    """Layers × width × seed."""
    nets = [("ffnn", layers, width) for layers in HIDDEN for width in config.widths]
    return grid(config.setting, [config.setting.data], nets, config.seeds)


def claims(rows: Rows) -> list[Claim]:
    """Every form of the claim at every depth and width: the sign differs between widths."""
    return [
        claim
        for layers, words in HIDDEN.items()
        for width in rows.where(layers=layers).distinct("width")
        for claim in form_claims(rows.where(layers=layers, width=width), f"{words} of {width}")
    ]


def tables(rows: Rows) -> Iterator[Table]:
    """What was measured at every size, and where no minimum was."""
    yield points_table(rows, "SGD and NGD over widths, mean ± standard error over seeds")
    yield minima_table(rows)


def charts(rows: Rows) -> list[Chart]:
    """λ̂ over width for each depth, at both temperatures and at equal loss; then Tr H."""
    out = []
    for number, (layers, words) in enumerate(HIDDEN.items()):
        for column in ("llc_batch", "llc", "trace"):
            for at in ("end", "equal loss"):
                part = rows.where(layers=layers, at=at)
                series = tuple(
                    curve(NAMES[optimizer], part.where(optimizer=optimizer), "width", column)
                    for optimizer in ("sgd", "ngd")
                )
                place = "at the end" if at == "end" else "at equal training loss"
                source = f"Figure 1{'ab'[number]}" if at == "end" and column != "trace" else ""
                out.append(
                    Chart(
                        f"{TITLES[column]}, {words}, {place}",
                        "hidden nodes per layer",
                        QUANTITIES[column],
                        series,
                        x_log=True,
                        source=source,
                    )
                )
    return beside_plots(out)


EXPERIMENT = Experiment(
    "ngd-widths",
    "λ̂ of SGD and NGD over widths",
    NGD,
    "Figure 1",
    {
        "smoke": WidthsScale(replace(TINY, alpha=ALPHA), (6,), 1),
        "cpu": WidthsScale(replace(SMALL, alpha=ALPHA), (16, 64, 128), 4),
        "paper": WidthsScale(replace(WHOLE, alpha=ALPHA), (16, 64, 256), 5),
    },
    cells,
    run,
    claims,
    tables,
    charts,
    (*ASSUMED, SMALLER, "Widths and epochs: the text has neither.", NUMBER),
    size=(
        "one and two hidden layers over hidden nodes, rate 0.01, α = 0.01, ε = 10⁻¹⁰, batches of"
        " 128; widths, epochs and seeds are not in the text."
    ),
    sizes=(Size(data="mnist", rate="0.01"), Size(data="fashion-mnist", rate="0.01")),
)
