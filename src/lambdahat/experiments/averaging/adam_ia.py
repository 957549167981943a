"""Adam with averages against Gadam: decoupled weight decay (§7.4, Figures 7.1, 7.2, 7.5, 7.6)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lambdahat.experiments.averaging.averaged_training import (
    FULL,
    change,
    decades,
    gap,
    image_task,
    pairs,
    recipe,
    shared_settings,
    size_of,
    train,
    unlearnt,
    unready,
)
from lambdahat.experiments.kit.cells import Cell, Row, Rows, Scale, curve, means
from lambdahat.experiments.kit.claims import Claim, Claims, Reading, Table, paired_difference
from lambdahat.experiments.kit.experiment import SPECTRAL, Experiment, Size, sentences
from lambdahat.results.charts import Chart, Series

WITH, WITHOUT = "with batch norm", "without batch norm"
AVERAGED = ("SWA", "Adam-IA", "Gadam", "GadamX")
SLOW = "SWA, low rate"
COMPARABLE = 0.1  # decades
LOW = 0.05  # of the first rate, where the others average at a half


@dataclass(frozen=True)
class AdamScale(Scale):
    """One scale: a network with batch norm and the same without, Adam's rate, and weight decays.

    ``coupled`` is added to the gradients of SGD and Adam, ``decoupled`` and ``partial`` shrink the
    weights of AdamW and GadamX.
    """

    network: str
    adam_rate: float
    side: int = 0
    augmented: bool = False
    precision: str = FULL
    coupled: float = 5e-4
    decoupled: float = 0.25
    partial: float = 2.5e-3
    rate: float = 0.1


def cells(config: AdamScale) -> list[Cell]:
    """Runs with averages and scheduled AdamW with batch norm; two of them also without it."""
    base = shared_settings(
        config, "network", "adam_rate", "coupled", "decoupled", "partial", "rate", "seeds"
    )
    settings = {
        "SWA": (config.rate, config.coupled),
        "Adam-IA": (config.adam_rate, config.coupled),
        "Gadam": (config.adam_rate, config.decoupled),
        "GadamX": (config.rate, config.partial),
        "AdamW": (config.adam_rate, config.decoupled),
    }
    plans = {name: recipe(name, *settings[name], config.epochs) for name in settings}
    plans[SLOW] = {**plans["SWA"], "ratio": LOW}
    grid = [(WITH, f"{config.network}-BN", name) for name in plans]
    grid += [(WITHOUT, config.network, name) for name in ("Gadam", "AdamW")]
    return [
        {**base, "norm layers": norm, "network": network, "run": name, **plans[name], "seed": seed}
        for norm, network, name in grid
        for seed in range(config.seeds)
    ]


def run(cell: Cell, device: str) -> list[Row]:
    """A row per epoch and one of the end, with norms before and during averaging."""
    task = image_task(cell, device)
    trained = train(cell, task)
    begun = [row for row in trained.rows if row["epoch"] >= cell["first"]] or trained.rows[-1:]
    row = {
        **trained.end,
        **size_of(task),
        "norm before": begun[0]["norm"],
        "max norm before": begun[0]["max norm"],
        "iterate norm": sum(each["norm"] for each in begun) / len(begun),
        "at start": begun[0]["iterate accuracy"],
    }
    return [*trained.rows, {**row, "gain": row["accuracy"] - row["before"]}]


def claims(rows: Rows) -> list[Claim]:
    """Effects of decoupled decay and batch norm on averages, and of averages on norms."""
    ends = rows.where(kind="end")
    of = {
        name: ends.where(run=name, **{"norm layers": WITH}) for name in (*AVERAGED, "AdamW", SLOW)
    }
    bare = {name: ends.where(run=name, **{"norm layers": WITHOUT}) for name in ("Gadam", "AdamW")}
    return _decay_claims(of) + _norm_layer_claims(ends, of, bare) + _weight_claims(ends, of)


def _decay_claims(of: dict[str, Rows]) -> list[Claim]:
    """Figure 7.1."""
    where = "§7.4, Figure 7.1"
    both = unready(of["Adam-IA"], of["SWA"])
    found = Claims()
    sentence = "where averaging begins Adam's iterates are above SGD's"
    reading = gap(of["Adam-IA"], of["SWA"], "at start")
    unmet = unlearnt(of["Adam-IA"], of["SWA"])
    found.add(sentence, where, "they perform better", reading, unit=" points", unmet=unmet)
    sentence = "Adam gains less from averaging than SGD"
    reading = gap(of["Adam-IA"], of["SWA"], "gain")
    found.add(sentence, where, "much worse", reading, "below", unit=" points", unmet=both)
    sentence = "Adam-IA ends below SGD with averages"
    reading = gap(of["Adam-IA"], of["SWA"], "accuracy")
    found.add(sentence, where, "much worse", reading, "below", unit=" points", unmet=both)
    sentence = "Gadam ends above Adam-IA"
    published = "decoupled weight decay fixes this"
    reading = gap(of["Gadam"], of["Adam-IA"], "accuracy")
    unmet = unready(of["Gadam"], of["Adam-IA"])
    found.add(sentence, where, published, reading, unit=" points", unmet=unmet)
    sentence = "decoupled weight decay keeps ‖θ‖_∞ smaller (where averaging begins)"
    published = "much stronger weight reduction"
    reading = decades(of["Gadam"], of["Adam-IA"], "max norm before")
    unmet = unlearnt(of["Gadam"], of["Adam-IA"])
    found.add(
        sentence, "§7.4, Figure 7.1b", published, reading, "below", unit=" decades", unmet=unmet
    )
    return found


def _norm_layer_claims(ends: Rows, of: dict[str, Rows], bare: dict[str, Rows]) -> list[Claim]:
    """Figure 7.2."""
    parts = (of["Gadam"], of["AdamW"], *bare.values())
    found = Claims()
    sentence = "Gadam gains more over scheduled AdamW with batch norm than without"
    source = "§7.4.1, Figure 7.2a"
    published = "much larger"
    found.add(sentence, source, published, margins(ends), unit=" points", unmet=unready(*parts))
    sentence = "Gadam's effective rate α/‖θ‖² is above that of scheduled AdamW at the end"
    published = "stays high, where the other vanishes"
    reading = decades(of["Gadam"], of["AdamW"], "effective rate")
    unmet = unlearnt(of["Gadam"], of["AdamW"])
    found.add(sentence, "§7.4.1, Figure 7.2b", published, reading, unit=" decades", unmet=unmet)
    return found


def _weight_claims(ends: Rows, of: dict[str, Rows]) -> list[Claim]:
    """Figures 7.5 and 7.6."""
    averaged = ends.where(run=AVERAGED, **{"norm layers": WITH})
    parts = [of[name] for name in AVERAGED]
    found = Claims()
    sentence = "the average's ‖θ‖ is below the mean of its iterates', over four optimisers"
    source = "Theorem 20, Figures 7.5 and 7.6"
    reading = change(averaged, "average norm", "iterate norm")
    found.add(sentence, source, "always", reading, "below", unmet=unlearnt(*parts))
    sentence = "the average is above the last iterate, over four optimisers"
    source = "§7.5.6, Figure 7.5"
    reading = change(averaged, "accuracy", "iterate accuracy")
    found.add(sentence, source, "it surpasses", reading, unit=" points", unmet=unready(*parts))
    sentence = "averaging at a high rate shortens the weights more than at a low one"
    published = "only then significant"
    reading = falls(of["SWA"], of[SLOW])
    unmet = unready(of["SWA"], of[SLOW])
    found.add(sentence, "§7.5.6", published, reading, unit=" decades", unmet=unmet)
    found.add(
        "Gadam's ‖θ‖ is in the end within a quarter of that of SWA",
        "§7.5.6, Figure 7.6",
        "comparable to SGD/SWA eventually",
        decades(of["Gadam"], of["SWA"], "average norm"),
        "within",
        0.0,
        COMPARABLE,
        " decades",
        unlearnt(of["Gadam"], of["SWA"]),
    )
    return found


def margins(ends: Rows) -> Reading:
    """(Gadam − AdamW) with batch norm less the same without, seed by seed."""
    found = []
    for norm in (WITH, WITHOUT):
        part = ends.where(**{"norm layers": norm})
        upper, lower = (part.where(run=name).paired("accuracy") for name in ("Gadam", "AdamW"))
        found.append({seed: upper[seed] - lower[seed] for seed in upper if seed in lower})
    return paired_difference(*found)


def falls(upper: Rows, lower: Rows) -> Reading:
    """log₁₀ of how much further the norm falls, 1 − ‖θ̄‖/mean‖θ‖, in one run than in another."""
    logs = []
    for part in (upper, lower):
        mean, iterate = pairs(part, "average norm"), pairs(part, "iterate norm")
        shares = {key: 1 - mean[key] / iterate[key] for key in mean}
        logs.append(
            {key: math.log10(share) if share > 0 else math.nan for key, share in shares.items()}
        )
    return paired_difference(*logs)


COLUMNS = {
    "accuracy": "accuracy, %",
    "before": "where averaging begins",
    "iterate accuracy": "last iterate",
    "max norm before": "‖θ‖_∞ there",
    "norm": "‖θ‖, last iterate",
    "average norm": "‖θ‖, average",
    "effective rate": "α/‖θ‖²",
}


def tables(rows: Rows) -> list[Table]:
    """Each optimiser, with batch norm and without."""
    out = []
    ends = rows.where(kind="end")
    for norm in ends.distinct("norm layers"):
        part = ends.where(**{"norm layers": norm})
        lines = [(name, *means(part.where(run=name), *COLUMNS)) for name in part.distinct("run")]
        title = (
            f"{part[0]['network']} {norm}, {part[0]['parameters']:,} parameters, {part[0]['data']}"
        )
        out.append(Table(title, ("run", *COLUMNS.values()), tuple(lines)))
    return out


def charts(rows: Rows) -> list[Chart]:
    """Accuracy of iterates and averages, norms and the effective rate over epochs."""
    epochs = rows.where(kind="epoch")
    part = epochs.where(**{"norm layers": WITH})
    of = {name: part.where(run=name) for name in part.distinct("run")}
    out = [
        _both(
            "Accuracy of iterates and averages",
            "accuracy, %",
            of,
            ("SWA", "Adam-IA", "Gadam"),
            "iterate accuracy",
            "accuracy",
            "Figure 7.1a",
        ),
        _chart(
            "Largest weight of the iterates",
            "‖θ‖_∞",
            of,
            ("Adam-IA", "Gadam"),
            "max norm",
            "Figure 7.1b",
        ),
        _margin_chart(epochs),
        _chart(
            "Effective rate",
            "α/‖θ‖²",
            of,
            ("Gadam", "AdamW"),
            "effective rate",
            "Figure 7.2b",
            log=True,
        ),
        _both(
            "Weight norm of iterates and averages",
            "‖θ‖",
            of,
            AVERAGED,
            "norm",
            "average norm",
            "Figures 7.5 and 7.6",
        ),
    ]
    return out


def _chart(
    title: str,
    label: str,
    of: dict[str, Rows],
    names: tuple[str, ...],
    column: str,
    source: str,
    log: bool = False,
) -> Chart:
    series = tuple(curve(name, of[name], column) for name in names)
    return Chart(title, "epoch", label, series, y_log=log, source=source)


def _both(
    title: str,
    label: str,
    of: dict[str, Rows],
    names: tuple[str, ...],
    iterate: str,
    average: str,
    source: str,
) -> Chart:
    """Iterates of each optimiser, and their averages from when there are any."""
    series: list[Series] = []
    for name in names:
        averaged = of[name].where(averaged=True)
        series += [
            curve(f"{name}, iterates", of[name], iterate),
            curve(f"{name}, average", averaged, average),
        ]
    return Chart(title, "epoch", label, tuple(series), source=source)


def _margin_chart(epochs: Rows) -> Chart:
    """Gadam and scheduled AdamW, with batch norm and without."""
    series = tuple(
        curve(f"{name} {norm}", epochs.where(run=name, **{"norm layers": norm}), "accuracy")
        for norm in (WITH, WITHOUT)
        for name in ("Gadam", "AdamW")
    )
    return Chart(
        "With batch norm and without", "epoch", "accuracy, %", series, source="Figure 7.2a"
    )


EXPERIMENT = Experiment(
    "adam-ia",
    "Averages of Adam's iterates with coupled and with decoupled weight decay",
    SPECTRAL,
    "§7.4, Figures 7.1, 7.2, 7.5 and 7.6",
    {
        "smoke": AdamScale("digits", 96, 64, 4, 2, "VGG-4×4", 3e-3, batch=32),
        "cpu": AdamScale("cifar10", 2000, 4000, 30, 6, "VGG-4×16", 1e-3, side=8, batch=64),
        "paper": AdamScale(
            "cifar100", 45_000, 5_000, 34, 3, "VGG-16", 5e-4, augmented=True, precision="bfloat16"
        ),
    },
    *(cells, run, claims, tables, charts),
    sentences("""
        At paper scale 34 epochs of the thesis's 300 on 45,000 images of CIFAR-100; on a CPU
          CIFAR-10.
        All figures are of VGG-16, on a CPU of a small network of its kind; Figure 7.1 is of
          PreResNet-110.
        Adam's weight decay, 5e-4 in the gradient, is the default of the thesis's code; Gadam's 0.25
          is decoupled.
        Averages begin after the share 161/300 of the epochs, one iterate per epoch.
        The norm of an average is set against the mean norm of the iterates in it; ‖θ‖ is that of
          all parameters.
        That it is smaller is Jensen's inequality and cannot fail; the ratio of effective rates is
          mostly
        that of the schedules' last rates, 50. What counts as comparable, a quarter, was set after
          the results.
        Averages count as begun too soon if their iterates gain over 1 point more: a rule made after
          the results.
        On a GPU networks train with bfloat16 in their forward passes.
    """),
    size=(
        "PreResNet-110 (Figure 7.1) and VGG-16 with and without batch norm (Figures 7.2, 7.5 and"
        " 7.6) on CIFAR-100; epochs are not in the text."
    ),
    sizes=(
        Size("PreResNet-110", "cifar100"),
        Size("VGG-16", "cifar100"),
        Size("VGG-16-BN", "cifar100"),
    ),
)
