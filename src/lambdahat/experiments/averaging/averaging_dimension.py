"""What averaging gains against the number of parameters P (Theorem 18, Figure 7.8d)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lambdahat._core.rng import derived_seed, generator
from lambdahat.experiments.averaging.averaged_training import (
    image_task,
    recipe,
    size_of,
    train,
    unready,
)
from lambdahat.experiments.averaging.gadam_image import tuned_settings
from lambdahat.experiments.kit.cells import (
    Cell,
    Row,
    Rows,
    Scale,
    errors,
    means,
    over_seeds,
    settings_of,
)
from lambdahat.experiments.kit.claims import (
    Claim,
    Claims,
    Reading,
    Table,
    TableLines,
    correlation,
    mean_of,
)
from lambdahat.experiments.kit.experiment import SPECTRAL, Experiment, Size, sentences
from lambdahat.randommatrix import NoisyQuadratic
from lambdahat.results.charts import Chart, Series

OPTIMIZERS = ("SGD", "SWA", "GadamX")
GAINS = {
    "best gain": "best average over SGD",
    "SWA gain": "SWA over SGD",
    "own gain": "average over last iterate",
}
CURVATURE = (0.5, 2.0)  # of the quadratic
RATE = 0.1
STEPS = 1000
# Best optimiser with averages over SGD on networks of P parameters, from Tables 7.2 (CIFAR-100) and
# 7.4 (top 1)
PRINTED = {
    "PreResNet-110": (1_169_972, 0.70),
    "VGG-16": (15_299_748, 2.70),
    "ResNeXt-29": (34_518_948, 1.80),
    "PreResNet-110, ImageNet": (1_401_272, 0.70),
    "WRN-28-10, ImageNet": (37_123_880, 1.71),
}


@dataclass(frozen=True)
class DimensionScale(Scale):
    """One scale: ``widths`` of the small network and ``dimensions`` of the quadratic."""

    widths: tuple[int, ...]
    dimensions: tuple[int, ...]
    side: int = 0
    augmented: bool = False


def cells(config: DimensionScale) -> list[Cell]:
    """Width × optimiser × seed, and dimension × seed."""
    base = settings_of(config, "widths", "dimensions", "seeds")
    networks = [
        {
            "subject": "network",
            **base,
            "network": f"VGG-4×{width}-BN",
            **recipe(name, *tuned_settings("VGG", name), config.epochs),
            "seed": seed,
        }
        for width in config.widths
        for name in OPTIMIZERS
        for seed in range(config.seeds)
    ]
    quadratics = [
        {"subject": "quadratic", "dimension": size, "seed": seed}
        for size in config.dimensions
        for seed in range(config.seeds)
    ]
    return networks + quadratics


def run(cell: Cell, device: str) -> list[Row]:
    """The end of a training run, or the distances from the minimum of a noisy quadratic."""
    if cell["subject"] == "quadratic":
        return [quadratic_row(cell)]
    task = image_task(cell, device)
    end = train(cell, task).end
    return [{**end, **size_of(task), "own gain": end["accuracy"] - end["iterate accuracy"]}]


def quadratic_row(cell: Cell) -> Row:
    """‖w_n‖² and ‖w_avg‖² of one simulated run of ``STEPS`` steps, and their exact means.

    Curvatures are uniform on ``CURVATURE``, noise and the start of unit variance in every
    direction.
    """
    size, seed = cell["dimension"], cell["seed"]
    rng = generator(seed, "curvatures", size)
    low, high = CURVATURE
    curvatures = low + (high - low) * torch.rand(size, generator=rng, dtype=torch.float64)
    start = torch.randn(size, generator=rng, dtype=torch.float64)
    quadratic = NoisyQuadratic(curvatures.numpy(), RATE, 1.0, start.numpy())
    final, average = quadratic.final(STEPS), quadratic.average(STEPS)
    found = quadratic.simulate(STEPS, replicas=1, seed=derived_seed(seed, "run", size) % 2**31)
    return {
        "kind": "end",
        "final": float((found.final**2).sum()),
        "average": float((found.average**2).sum()),
        "exact final": final.squared_norm,
        "exact average": average.squared_norm,
        "gain": float((found.final**2).sum() - (found.average**2).sum()),
        "spread": final.norm_spread,
        "misfit": (
            (math.sqrt(float((found.final**2).sum())) - math.sqrt(final.squared_norm))
            / final.norm_spread
        ),
    }


def gains(rows: Rows) -> Rows:
    """P and the accuracy that averaging gains, for each width and seed."""
    ends = rows.where(subject="network")
    out = []
    for name in ends.distinct("network"):
        found = {each: ends.where(network=name, optimizer=each) for each in OPTIMIZERS}
        sgd, swa, other = (found[each].paired("accuracy") for each in OPTIMIZERS)
        own = ends.where(network=name, optimizer=OPTIMIZERS[1:]).paired("own gain")
        first = mean_of(list(swa.values())).value >= mean_of(list(other.values())).value
        ahead = swa if first else other
        parameters = ends.where(network=name)[0]["parameters"]
        out += [
            {
                "network": name,
                "parameters": parameters,
                "seed": seed,
                "best": OPTIMIZERS[1 if first else 2],
                "best gain": ahead[seed] - sgd[seed],
                "SWA gain": swa[seed] - sgd[seed],
                "own gain": own[seed],
            }
            for seed in sgd
            if seed in ahead and seed in swa
        ]
    return Rows(out)


def claims(rows: Rows) -> list[Claim]:
    """The gain rises with P: in the quadratic exactly as P, in networks at all; n counts seeds."""
    found, ends = gains(rows), rows.where(subject="network")
    sizes, where = _log(found, "parameters"), "§7.8.2, Figure 7.8d"
    best = unmet_in(ends, {row["network"]: (row["best"],) for row in found})
    swa = unmet_in(ends, dict.fromkeys(ends.distinct("network"), ("SWA",)))
    all_of_them = unmet_in(ends, dict.fromkeys(ends.distinct("network"), OPTIMIZERS[1:]))
    made = rows.where(subject="quadratic")
    grown = Rows([{**row, "log gain": math.log10(max(row["gain"], 1e-12))} for row in made])
    words = {
        column: f"the gain rises with P: {name} (points for each decade)"
        for column, name in GAINS.items()
    }
    said = Claims()
    sentence = words["best gain"]
    published = f"near linear in P; {_printed_slope()}"
    said.add(sentence, where, published, slopes(sizes, "best gain"), unit=" points", unmet=best)
    reading = slopes(sizes, "SWA gain")
    said.add(words["SWA gain"], where, "", reading, unit=" points", unmet=swa, own=True)
    reading = slopes(sizes, "own gain")
    said.add(words["own gain"], where, "", reading, unit=" points", unmet=all_of_them, own=True)
    sentence = "small networks gain least: rank correlation of P and the best gain"
    said.add(sentence, where, "", ranks(sizes, "best gain"), unmet=best, own=True)
    sentence = "in the noisy quadratic ‖w_n‖² − ‖w_avg‖² rises as P (exponent)"
    reading = slopes(_log(grown, "dimension"), "log gain")
    said.add(sentence, "Theorem 18", "1", reading, "within", 1.0, 0.1, general=True)
    sentence = "there ‖w_n‖ lies in a thin shell: its distance from √E‖w_n‖², in deviations"
    reading = mean_of(made.values("misfit"))
    unit = " (n counts drawn quadratics)"
    said.add(sentence, "Theorem 18", "0", reading, "within", 0.0, 1.0, unit, general=True)
    return said


def unmet_in(ends: Rows, averages: Mapping[str, tuple[str, ...]]) -> str:
    """Why the gains over SGD cannot be read, of the averages named for each network."""
    for network, names in averages.items():
        part = ends.where(network=network)
        reason = unready(*(part.where(optimizer=name) for name in ("SGD", *names)))
        if reason:
            return f"{network}: {reason}"
    return ""


def _log(rows: Rows, place: str) -> Rows:
    return Rows([{**row, "log size": math.log10(row[place])} for row in rows])


def slopes(rows: Rows, column: str) -> Reading:
    """The slope of a column over log₁₀ of the size, seed by seed."""
    parts = [rows.where(seed=seed) for seed in rows.distinct("seed")]
    return mean_of([_slope(part.values("log size"), part.values(column)) for part in parts])


def ranks(rows: Rows, column: str) -> Reading:
    """The same for the rank correlation."""
    parts = [rows.where(seed=seed) for seed in rows.distinct("seed")]
    return mean_of(
        [correlation(part.values("log size"), part.values(column)).value for part in parts]
    )


def _slope(x: Sequence[float], y: Sequence[float]) -> float:
    """By least squares; of two points too."""
    return float(np.polyfit(x, y, 1)[0]) if len(set(x)) > 1 else math.nan


def _printed_slope() -> str:
    sizes, found = zip(*PRINTED.values(), strict=True)
    fit = _slope([math.log10(size) for size in sizes], found)
    return f"{fit:.2f} over the five networks of Tables 7.2 and 7.4"


def tables(rows: Rows) -> list[Table]:
    """Gains by width, and the quadratic by dimension."""
    ends, found, made = rows.where(subject="network"), gains(rows), rows.where(subject="quadratic")
    lines = TableLines()
    for name in found.distinct("network"):
        part = found.where(network=name)
        accuracies = (
            over_seeds(ends.where(network=name, optimizer=each), "accuracy") for each in OPTIMIZERS
        )
        lines.add(
            name,
            f"{part[0]['parameters']:,}",
            *(str(reading) for reading in accuracies),
            *means(part, *GAINS),
        )
    columns = ("final", "exact final", "average", "exact average")
    squares = tuple(
        (f"{size:,}", *means(made.where(dimension=size), *columns))
        for size in made.distinct("dimension")
    )
    out = []
    title = f"Networks on {ends[0]['data']}: accuracy in %"
    out.append(Table(title, ("network", "P", *OPTIMIZERS, *GAINS.values()), tuple(lines)))
    title = f"Noisy quadratic after {STEPS} steps at rate {RATE}: ‖w‖²"
    out.append(Table(title, ("P", "final", "its mean", "average", "its mean"), squares))
    return out


def charts(rows: Rows) -> list[Chart]:
    """Gain over P beside the printed one, and the quadratic's distances over P."""
    found, made = gains(rows), rows.where(subject="quadratic")
    series = [_over(found, "parameters", column, words) for column, words in GAINS.items()]
    label = "best average over SGD, thesis"
    places = [size for size, _ in PRINTED.values()]
    heights = [gain for _, gain in PRINTED.values()]
    series.append(Series(label, places, heights, style="points", published=True))
    squares = tuple(
        _over(made, "dimension", column, words)
        for column, words in (("final", "last iterate"), ("average", "average"))
    )
    out = []
    title = "Gain of averaging against the number of parameters"
    axis = "points of accuracy"
    out.append(Chart(title, "P", axis, tuple(series), x_log=True, source="Figure 7.8d"))
    title = "Squared distance from the minimum of a noisy quadratic"
    out.append(Chart(title, "P", "‖w‖²", squares, x_log=True, y_log=True, source="Theorem 18"))
    return out


def _over(rows: Rows, place: str, column: str, words: str) -> Series:
    places = sorted(rows.distinct(place))
    readings: list[Reading] = [over_seeds(rows.where(**{place: each}), column) for each in places]
    return Series(words, places, [reading.value for reading in readings], errors(readings))


# data set, training and held-out samples, epochs, seeds
CPU = ("cifar10", 2000, 4000, 20, 5)
PAPER = ("cifar10", 5_000, 10_000, 30, 3)
EXPERIMENT = Experiment(
    "averaging-dimension",
    "The gain of averaging against the number of parameters",
    SPECTRAL,
    "§7.8.2, Theorem 18, Figure 7.8d",
    {
        "smoke": DimensionScale("digits", 96, 64, 3, 2, (2, 4), (10, 100), batch=32),
        "cpu": DimensionScale(*CPU, (2, 4, 8, 16, 32), (10, 100, 1000, 10_000), side=8, batch=64),
        "paper": DimensionScale(
            *PAPER, (4, 8, 16, 32, 64, 128), (10, 100, 1000, 10_000, 100_000), augmented=True
        ),
    },
    *(cells, run, claims, tables, charts),
    sentences("""
        One small network of several widths on CIFAR-10, so that nothing but P differs.
        The thesis sets networks of different kinds and on different data against each other.
        The caption of Figure 7.8d has the gain over the base optimiser, its text that over SGD:
          here it is over SGD.
        Slopes are taken seed by seed, for the widths share a seed's images; at first all points
          were one line.
        Printed points: the best average less SGD in Tables 7.2 and 7.4, at this library's parameter
          counts.
        The quadratic has curvatures between 0.5 and 2, unit noise and a random start.
        The variance of its average is printed too small by the factor αλ; that the gain rises as P
          is the same.
    """),
    size=(
        "the networks of Tables 7.2 and 7.4: VGG-16, PreResNet-110 and ResNeXt-29 on CIFAR-100, two"
        " on ImageNet 32 × 32. Theorem 18 is of any noisy quadratic."
    ),
    sizes=(
        Size("VGG-16-BN", "cifar100"),
        Size("PreResNet-110", "cifar100"),
        Size("ResNeXt-29", "cifar100"),
    ),
)
