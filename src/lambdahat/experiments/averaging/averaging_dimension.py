"""The gain of averaging against the number of parameters P (Theorem 18, Figure 7.8d)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch

from lambdahat._core.rng import derived_seed, generator
from lambdahat.experiments import kit
from lambdahat.experiments.averaging import averaged_training as runs
from lambdahat.experiments.averaging.gadam_image import tuned_settings
from lambdahat.experiments.kit import Cell, Chart, Claim, Reading, Row, Rows, Table
from lambdahat.randommatrix import NoisyQuadratic

OPTIMIZERS = ("SGD", "SWA", "GadamX")
Statistic = Callable[[Sequence[float], Sequence[float]], float]
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


def cells(images: Cell, widths: Iterable[int], dimensions: Iterable[int], seeds: int) -> list[Cell]:
    """Width of the network × optimiser × seed, and dimension of the quadratic × seed."""
    tuned = {name: tuned_settings("VGG", name) for name in OPTIMIZERS}
    recipes = [runs.recipe(name, *pair, images["epochs"]) for name, pair in tuned.items()]
    base, names = {"subject": "network", **images}, [f"VGG-4×{width}-BN" for width in widths]
    networks = kit.grid(base, network=names, recipe=recipes, seed=range(seeds))
    quadratic = {"subject": "quadratic"}
    return networks + kit.grid(quadratic, dimension=dimensions, seed=range(seeds))


def run(cell: Cell, device: str) -> list[Row]:
    """The end of a training run, or the distances from the minimum of a noisy quadratic."""
    if cell["subject"] == "quadratic":
        return [quadratic_row(cell)]
    task = runs.image_task(cell, device)
    end = runs.train(cell, task).end
    return [{**end, **runs.size_of(task), "own gain": end["accuracy"] - end["iterate accuracy"]}]


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
    paths = quadratic.simulate(STEPS, replicas=1, seed=derived_seed(seed, "run", size) % 2**31)
    last, mean = (paths.final**2).sum(), (paths.average**2).sum()
    return {
        "kind": "end",
        "final": float(last),
        "average": float(mean),
        "exact final": final.squared_norm,
        "exact average": average.squared_norm,
        "gain": float(last - mean),
        "spread": final.norm_spread,
        "misfit": (math.sqrt(float(last)) - math.sqrt(final.squared_norm)) / final.norm_spread,
    }


def gains(rows: Rows) -> Rows:
    """P and the accuracy that averaging gains, for each width and seed."""
    out = []
    for name, part in rows.where(subject="network").groups("network"):
        sgd, swa, other = (part.where(optimizer=each).paired("accuracy") for each in OPTIMIZERS)
        own = part.where(optimizer=OPTIMIZERS[1:]).paired("own gain")
        means = [kit.mean_of(list(accuracies.values())).value for accuracies in (swa, other)]
        best, ahead = ("SWA", swa) if means[0] >= means[1] else ("GadamX", other)
        common = {"network": name, "parameters": part[0]["parameters"], "best": best}
        for seed in (seed for seed in sgd if seed in ahead and seed in swa):
            gained = {"best gain": ahead[seed] - sgd[seed], "SWA gain": swa[seed] - sgd[seed]}
            out.append({**common, "seed": seed, **gained, "own gain": own[seed]})
    return Rows(out)


def claims(rows: Rows) -> Iterator[Claim]:
    """The gain rises with P: in the quadratic exactly as P, in networks at all; n counts seeds."""
    claim = kit.ClaimTexts("""
        rises: the gain rises with P: {words} (points for each decade)
          | §7.8.2, Figure 7.8d | {printed} | above | points
        ranks: small networks gain least: rank correlation of P and the best gain
          | §7.8.2, Figure 7.8d | | above | | ours
        quadratic: in the noisy quadratic ‖w_n‖² − ‖w_avg‖² rises as P (exponent)
          | Theorem 18 | 1 | within 0.1 of 1
        shell: there ‖w_n‖ lies in a thin shell: its distance from √E‖w_n‖², in deviations
          | Theorem 18 | 0 | within 1 of 0 | (n counts drawn quadratics)
    """)
    places, gained = zip(*PRINTED.values(), strict=True)
    fit = _slope([math.log10(place) for place in places], gained)
    printed = f"near linear in P; {fit:.2f} over the five networks of Tables 7.2 and 7.4"
    best, ends, made = gains(rows), rows.where(subject="network"), rows.where(subject="quadratic")
    names = ends.distinct("network")
    averages: dict[str, dict[str, tuple[str, ...]]] = {
        "best gain": {row["network"]: (row["best"],) for row in best},
        "SWA gain": dict.fromkeys(names, ("SWA",)),
        "own gain": dict.fromkeys(names, OPTIMIZERS[1:]),
    }
    unmet = {column: unmet_in(ends, values) for column, values in averages.items()}
    sizes = _log(best, "parameters")
    for column, words in GAINS.items():
        ours = column != "best gain"
        said = {"words": words, "printed": "" if ours else printed, "own": ours}
        yield claim("rises", slopes(sizes, column), unmet=unmet[column], **said)
    ranks = slopes(sizes, "best gain", lambda x, y: kit.correlation(x, y).value)
    yield claim("ranks", ranks, unmet=unmet["best gain"])
    grown = Rows([{**row, "log gain": math.log10(max(row["gain"], 1e-12))} for row in made])
    yield claim("quadratic", slopes(_log(grown, "dimension"), "log gain"), general=True)
    yield claim("shell", kit.mean_of(made.values("misfit")), general=True)


def unmet_in(ends: Rows, averages: Mapping[str, tuple[str, ...]]) -> str:
    """Why the gains over SGD cannot be compared, or ""; ``averages`` are named by network."""
    for network, names in averages.items():
        part = ends.where(network=network)
        reason = runs.unready(*(part.where(optimizer=name) for name in ("SGD", *names)))
        if reason:
            return f"{network}: {reason}"
    return ""


def _log(rows: Rows, place: str) -> Rows:
    return Rows([{**row, "log size": math.log10(row[place])} for row in rows])


def _slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The least-squares slope; two points suffice."""
    return float(np.polyfit(x, y, 1)[0]) if len(set(x)) > 1 else math.nan


def slopes(rows: Rows, column: str, statistic: Statistic = _slope) -> Reading:
    """The slope of a column over log₁₀ of the size, or another statistic, seed by seed."""
    return kit.by_seed(rows, lambda part: statistic(part.values("log size"), part.values(column)))


def tables(rows: Rows) -> Iterator[Table]:
    """Gains by width, and the quadratic by dimension."""
    ends, gained, made = rows.where(subject="network"), gains(rows), rows.where(subject="quadratic")
    lines = []
    for name, part in gained.groups("network"):
        each = [ends.where(network=name, optimizer=optimizer) for optimizer in OPTIMIZERS]
        accuracies = (str(kit.over_seeds(run, "accuracy")) for run in each)
        lines.append((name, f"{part[0]['parameters']:,}", *accuracies, *kit.means(part, *GAINS)))
    title = f"Networks on {ends[0]['data']}: accuracy in %"
    yield kit.table(title, ("network", "P", *OPTIMIZERS, *GAINS.values()), tuple(lines))
    columns = {"final": "final", "exact final": "its mean"}
    columns |= {"average": "average", "exact average": "its mean"}
    title = f"Noisy quadratic after {STEPS} steps at rate {RATE}: ‖w‖²"
    yield kit.means_table(title, "P", made.by("dimension", "{:,}"), columns)


def charts(rows: Rows) -> Iterator[Chart]:
    """Gain over P beside the printed one, and the quadratic's distances over P."""
    gained, made = gains(rows), rows.where(subject="quadratic")
    printed = kit.printed_points("best average over SGD, thesis", dict(PRINTED.values()))
    series = (*kit.curves(gained, GAINS, "parameters"), printed)
    title, axis = "Gain of averaging against the number of parameters", "points of accuracy"
    yield Chart(title, "P", axis, series, x_log=True, source="Figure 7.8d")
    squares = kit.curves(made, {"final": "last iterate", "average": "average"}, "dimension")
    title = "Squared distance from the minimum of a noisy quadratic"
    yield Chart(title, "P", "‖w‖²", squares, x_log=True, y_log=True, source="Theorem 18")


SMOKE = kit.image_setting("digits", 96, 64, epochs=3, batch=32)
CPU = kit.image_setting("cifar10", 2000, 4000, epochs=20, side=8, batch=64)
PAPER = kit.image_setting("cifar10", 5_000, 10_000, epochs=30, augmented=True)
DIMENSIONS = (10, 100, 1000, 10_000, 100_000)
EXPERIMENT = kit.Experiment(
    "averaging-dimension",
    "The gain of averaging against the number of parameters",
    kit.SPECTRAL,
    "§7.8.2, Theorem 18, Figure 7.8d",
    {
        "smoke": cells(SMOKE, (2, 4), DIMENSIONS[:2], seeds=2),
        "cpu": cells(CPU, (2, 4, 8, 16, 32), DIMENSIONS[:4], seeds=5),
        "paper": cells(PAPER, (4, 8, 16, 32, 64, 128), DIMENSIONS, seeds=3),
    },
    *(run, claims, tables, charts),
    kit.sentences("""
        One small network of several widths on CIFAR-10, so that nothing but P differs.
        The thesis compares networks of different kinds on different data.
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
    "the networks of Tables 7.2 and 7.4: VGG-16, PreResNet-110 and ResNeXt-29 on CIFAR-100, two"
    " on ImageNet 32 × 32. Theorem 18 is of any noisy quadratic.",
    tuple(kit.Size(name, "cifar100") for name in ("VGG-16-BN", "PreResNet-110", "ResNeXt-29")),
)
