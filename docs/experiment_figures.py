"""The figures of experiments-ngd.md and experiments-flatness.md, from the stored runs of
``lambdahat reproduce``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lambdahat.experiments import Reading, Rows, Store
from lambdahat.experiments.flatness.softmax_decay import DECAYS, MAIN, PUBLISHED
from lambdahat.experiments.kit.cells import Row
from lambdahat.experiments.kit.claims import mean_of
from lambdahat.experiments.ngd.ngd_claims import INTERPOLATED, SOUND, unmet
from lambdahat.experiments.ngd.ngd_runs import status_of
from lambdahat.report.style import AMBER, BLUE, GREY, PURPLE, VERMILION, new_figure, tidy

RUNS = Path(__file__).parents[1] / "benchmarks" / "results" / "reproductions"
FROM_THE_START = ("ngd-widths", "ngd-vs-sgd", "ngd-digits")
TEMPERATURES = {"llc_batch": "λ̂ at nβ = B/ln B", "llc": "λ̂ at nβ = n/ln n"}


def rows_of(name: str, scale: str = "cpu") -> Rows:
    """The rows of a stored run."""
    return Store(RUNS, name, scale).rows()


def pairs(at: str) -> Iterator[tuple[Row, Row]]:
    """(SGD, NGD) of the same start, images and batches, at the end or at equal training loss, of
    all three sweeps.
    """
    for name in FROM_THE_START:
        rows = rows_of(name).where(at=at)
        keys = ("data", "network", "layers", "width", "seed")
        for first in rows.where(optimizer="sgd"):
            (second,) = rows.where(optimizer="ngd", **{key: first[key] for key in keys})
            yield first, second


def sound(pair: tuple[Row, Row], column: str) -> bool:
    """Whether both readings of a pair can be trusted."""
    return all(row[status_of(column)] in SOUND for row in pair)


def ngd_pairs() -> Any:
    """λ̂ of NGD against λ̂ of SGD at equal training loss, at both temperatures; hollow where
    NOT_A_MINIMUM or NOT_MIXED.
    """
    figure = new_figure(8.6, 4.0)
    for place, (column, words) in enumerate(TEMPERATURES.items(), start=1):
        axes = tidy(figure.add_subplot(1, 2, place))
        found = list(pairs("equal loss"))
        for kept, face, name in ((True, BLUE, "converged"), (False, "none", "not converged")):
            part = [pair for pair in found if sound(pair, column) is kept]
            x, y = ([pair[side][column] for pair in part] for side in (0, 1))
            axes.plot(
                x,
                y,
                "o",
                color=BLUE,
                markerfacecolor=face,
                markersize=5,
                label=f"{name}, {len(part)} pairs",
            )
        every = [row[column] for pair in found for row in pair]
        axes.axline((0, 0), slope=1, color=GREY, linewidth=0.9)
        margin = 0.05 * (max(every) - min(every))
        limits = (min(every) - margin, max(every) + margin)
        axes.set(xlim=limits, ylim=limits, xlabel=f"SGD, {words}", ylabel="NGD")
        axes.legend(frameon=False, fontsize="small", loc="upper left")
    return axes


def overfitting() -> Any:
    """All quantities of a run that overfits, over epochs, relative to where the validation loss is
    least.

    From the dashed line on the networks interpolate. λ̂ has no point where half of the runs or more
    are NOT_A_MINIMUM or NOT_MIXED.
    """
    figure = new_figure(8.6, 3.8)
    measures = {
        "validation_loss": ("validation loss", GREY),
        "wbic": ("WBIC", AMBER),
        "llc_batch": ("λ̂, B/ln B", BLUE),
        "llc": ("λ̂, n/ln n", PURPLE),
        "trace": ("Tr H", VERMILION),
    }
    for place, (optimizer, title) in enumerate({"sgd": "SGD", "ngd": "NGD"}.items(), start=1):
        axes = tidy(figure.add_subplot(1, 2, place))
        rows = rows_of("ngd-overfitting", "paper").where(optimizer=optimizer)
        parts = [rows.where(part=part) for part in rows.distinct("part")]
        epochs = [mean_of(part.values("epoch")).value for part in parts]
        validation = [mean_of(part.values("validation_loss")).value for part in parts]
        least = validation.index(min(validation))
        for column, (name, colour) in measures.items():
            means = [mean_of(part.values(column)).value for part in parts]
            shown = [
                mean / means[least] if not unmet({"": part}, column) else math.nan
                for mean, part in zip(means, parts, strict=True)
            ]
            width = 2.4 if column == "validation_loss" else 1.4
            axes.semilogy(epochs, shown, ".-", color=colour, linewidth=width, label=name)
        solved = [
            epoch
            for epoch, part in zip(epochs, parts, strict=True)
            if mean_of(part.values("loss")).value <= INTERPOLATED
        ]
        if solved:
            axes.axvline(
                solved[0], color="black", linestyle="--", linewidth=0.9, label="interpolates"
            )
        axes.set(
            title=title, xlabel="epoch", ylabel="relative to least validation loss", ylim=(0.4, 2.2)
        )
        axes.set_yticks([0.5, 0.7, 1, 1.4, 2], ["0.5", "0.7", "1", "1.4", "2"])
        axes.minorticks_off()
    axes.legend(frameon=False, fontsize="small")
    return axes


def flatness() -> Any:
    """Softmax regression beside the paper's figures, and how much weight decay and Gadam sharpen
    small networks.
    """
    figure = new_figure(12.0, 3.8)
    rows = rows_of("softmax-decay", "paper").where(variant=MAIN)
    _softmax(tidy(figure.add_subplot(1, 3, 1)), rows, "accuracy", "validation accuracy, %")
    axes = tidy(figure.add_subplot(1, 3, 2))
    _softmax(axes, rows, "mean", "mean eigenvalue")
    for place, decay in enumerate(DECAYS):
        single = [one_vector(row) for row in rows.where(decay=decay)]
        label = "one random vector, 10 seeds" if place == 0 else None
        axes.plot([place] * len(single), single, "_", color=AMBER, markersize=14, label=label)
    axes.legend(frameon=False, fontsize="small", loc="upper left")
    return _sharper(tidy(figure.add_subplot(1, 3, 3)))


def one_vector(row: Row) -> float:
    """vᵀHv of the Lanczos run's first vector: Σ weight·Ritz value."""
    return math.fsum(
        node * weight for node, weight in zip(row["nodes"], row["weights"], strict=True)
    )


def _softmax(axes: Any, rows: Rows, column: str, words: str) -> None:
    readings = [mean_of(rows.where(decay=decay).values(column)) for decay in DECAYS]
    axes.errorbar(
        range(3),
        [reading.value for reading in readings],
        [2 * reading.stderr for reading in readings],
        fmt="o-",
        color=BLUE,
        label="ours ± 2 standard errors",
    )
    axes.plot(
        range(3),
        [PUBLISHED[column][decay] for decay in DECAYS],
        "D",
        color=VERMILION,
        label="paper",
    )
    axes.set_xticks(range(3), [f"{decay:g}" for decay in DECAYS])
    axes.set(xlabel="weight decay", ylabel=words, xlim=(-0.4, 2.4))
    axes.legend(frameon=False, fontsize="small")


def _sharper(axes: Any) -> Any:
    """log₁₀ of the ratio of λ₁, seed by seed, in both modes of batch norm."""
    rows, places = rows_of("cnn-decay"), []
    for network in ("LeNet-5", "PreResNet-11", "WideResNet-10×1"):
        part, short = rows.where(network=network), network.split("-")[0]
        places.append((f"{short}\ndecay", part.where(decay=0.005), part.where(decay=0.0)))
    gadam = rows_of("gadam-sharpness")
    places.append(
        ("WideResNet\nGadam", gadam.where(optimizer="Gadam"), gadam.where(optimizer="SGD"))
    )
    for shift, (mode, colour) in zip(
        (-0.2, 0.2), {"train": AMBER, "eval": BLUE}.items(), strict=True
    ):
        for place, (_, high, low) in enumerate(places):
            if len(high.where(mode=mode)):
                reading = _decades(high.where(mode=mode), low.where(mode=mode))
                axes.bar(
                    place + shift,
                    reading.value,
                    0.36,
                    yerr=2 * reading.stderr,
                    color=colour,
                    ecolor=GREY,
                    label=f"batch norm, {mode} mode" if place == 1 else None,
                )
    axes.set_xticks(range(len(places)), [name for name, *_ in places], fontsize="small")
    axes.set(ylabel="increase of λ₁, decades", ylim=(0, 3.1))
    axes.legend(frameon=False, fontsize="small", loc="upper left")
    return axes


def _decades(high: Rows, low: Rows) -> Reading:
    above, below = high.paired("largest"), low.paired("largest")
    return mean_of([math.log10(above[seed] / below[seed]) for seed in above])
