"""Curvature of full data and batches through training by SGD and KFAC, over seeds (Figure 5.6).

A cell trains one network by one optimiser from one seed and stops to measure. Both optimisers begin
at the same parameters, which the cell of SGD measures for both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
from torch import nn
from torch.optim import Optimizer

from lambdahat.experiments import kit
from lambdahat.experiments.kit.cells import Cell, Row, Rows
from lambdahat.experiments.minibatch import batch_eigenvalues, batch_points
from lambdahat.experiments.minibatch.batch_eigenvalues import (
    CLOSE,
    OURS,
    batches_near_claim,
    has_learnt,
)
from lambdahat.experiments.minibatch.batch_points import (
    EFFORT,
    HESSIAN_ONLY,
    MEASURED,
    CurvaturePoint,
    SizeBatches,
    TrainingPoint,
    sgd,
    subject,
)
from lambdahat.optim.kfac import KFAC

OPTIMIZERS = ("SGD", "KFAC")


def rows_of(points: Sequence[CurvaturePoint]) -> list[Row]:
    """A row per point and one per batch size there, which keeps a store of many runs small.

    Each number has six digits, far beyond the spread of batches.
    """
    rows = [row for point in points for row in (batch_points.point_row(point), *_sizes(point))]
    return list(json.loads(json.dumps(rows), parse_float=lambda text: float(f"{float(text):.6g}")))


def _sizes(point: CurvaturePoint) -> Iterator[Row]:
    """A row per batch size: the eigenvalues of its batches as lists, and all predictions."""
    for _, group in groupby(batch_points.batch_rows(point), key=lambda row: row["batch_size"]):
        rows = list(group)
        seen = {what: [row[what] for row in rows] for what in MEASURED}
        yield {name: value for name, value in rows[0].items() if name != "batch"} | seen


def _single(rows: Rows) -> Rows:
    """The same with a row for each batch; predictions stay with the first."""
    singles: list[Row] = []
    for row in rows:
        if row["part"] != "batch":
            singles.append(row)
            continue
        keys = ("network", "epoch", "operator", "part", "batch_size")
        shared = {name: row[name] for name in keys}
        singles += [
            {
                **(shared if batch else row),
                "batch": batch,
                **dict(zip(MEASURED, values, strict=True)),
            }
            for batch, values in enumerate(zip(*(row[what] for what in MEASURED), strict=True))
        ]
    return Rows(singles)


@dataclass(frozen=True)
class Courses:
    """The runs of one network and optimiser through one operator: points by seed and epoch."""

    optimizer: str
    seeds: dict[int, list[TrainingPoint]]

    @property
    def first(self) -> list[TrainingPoint]:
        """The points of one seed."""
        return next(iter(self.seeds.values()))

    @property
    def name(self) -> str:
        """Network and operator."""
        return self.first[0].name

    @property
    def epochs(self) -> list[int]:
        return [point["epoch"] for point in self.first]

    @property
    def models(self) -> list[str]:
        return self.first[0].models

    def by_seed(self, value: Callable[[list[TrainingPoint]], float]) -> dict[int, float]:
        """A number for each seed, of its points."""
        return {seed: value(points) for seed, points in self.seeds.items()}

    def at(self, epoch: int) -> list[TrainingPoint]:
        """The points of all seeds at one epoch."""
        every = (point for points in self.seeds.values() for point in points)
        return [point for point in every if point["epoch"] == epoch]


def courses_of(rows: Rows) -> list[Courses]:
    """By network and operator, SGD's and then KFAC's; both begin with the start they share.

    Runs whose start is not among the rows are left out.
    """
    starts: dict[tuple[str, str, int], TrainingPoint] = {}
    paths: dict[tuple[str, str, str], dict[int, list[TrainingPoint]]] = {}
    for optimizer in OPTIMIZERS:
        for seed in rows.distinct("seed"):
            part = _single(rows.where(optimizer=optimizer, seed=seed))
            for point in batch_points.points_of(part):
                place = (point["network"], point["operator"])
                if point["epoch"] == 0:
                    starts[(*place, seed)] = point
                elif (*place, seed) in starts:
                    begun = [starts[(*place, seed)]]
                    paths.setdefault((*place, optimizer), {}).setdefault(seed, begun).append(point)
    networks = rows.distinct("network")
    places = sorted(paths, key=lambda place: (networks.index(place[0]), place[1] == "ggn"))
    return [Courses(place[2], paths[place]) for place in places]


def excess(point: TrainingPoint) -> float:
    """λ'₁ − λ₁: what batches show beyond the full data, on average."""
    return batches_near_claim(point).mean("largest").value - float(point["full largest"])


def misses(points: Sequence[TrainingPoint], model: str) -> tuple[float, float]:
    """How far a model is from the mean of the batches of the thesis's size, mean over epochs: in
    their standard deviations, and as |ln(predicted/mean)|.
    """
    far, logs = [], []
    for batches in map(batches_near_claim, points):
        predicted, mean = batches.prediction(model, "largest").value, batches.mean("largest").value
        spread, known = batches.deviation("largest"), predicted > 0 and mean > 0
        far.append(abs(predicted - mean) / spread if spread > 0 else math.nan)
        logs.append(abs(math.log(predicted / mean)) if known else math.nan)
    return kit.mean_of(far).value, kit.mean_of(logs).value


CLAIMS = kit.ClaimTexts("""
    grows: {runs.name}, {runs.optimizer}: σ² grows from epoch {start} to {end}
      | §5.6, Figures 5.5, 5.6 | grows | above | = ln of the ratio, over seeds
    larger: {runs.name}, {runs.optimizer}: at epoch {end} the mean λ₁ of batches of {size} exceeds
      the full data's | §5.5, Figures 5.2, 5.4, 5.6 | larger | above | = ln of the ratio, over seeds
    diverges: {runs.name}, {runs.optimizer}: the mean λ₁ of batches of {size} moves away from the
      full data's from epoch {start} to {end} | §5.6, Figure 5.6 | diverges | above
      | = λ'₁ − λ₁ at the end less that at the start, over seeds
    within: {runs.name}, {runs.optimizer}: the {model} model's λ'₁ is within one standard deviation
      of the mean of batches, over epochs | {source} | within 1 sd | below 1
      | standard deviations away, over seeds
    better: {runs.name}, {runs.optimizer}: the {model} model fits the mean λ'₁ of batches better
      than the {other}, by 10 % or more, over epochs | {source} | better | above
      | in |ln(predicted/measured)|, over seeds
    KFAC: {runs.name}: at epoch {end} KFAC's {what} is larger than SGD's
      | this work | larger | above | = ln of the ratio, over seeds | ours
""")
ORDER = ("grows", "larger", "diverges", "within", "better", "KFAC")


def claims(rows: Rows) -> list[kit.Claim]:
    """Every claim, network by network, of each optimiser; and KFAC's courses against SGD's."""
    every = courses_of(rows)
    pairs = [pair for courses in every for pair in _claims(courses, every)]
    return [claim for _, claim in sorted(pairs, key=lambda pair: ORDER.index(pair[0]))]


def _claims(courses: Courses, every: Sequence[Courses]) -> Iterator[tuple[str, kit.Claim]]:
    """The claims of one network, operator and optimiser, each with its key; those of our model,
    and what is said of KFAC against SGD, are ours: the thesis draws both without comment.
    """
    epochs, size = courses.epochs, batches_near_claim(courses.first[-1]).size
    shared = {"runs": courses, "start": epochs[0], "end": epochs[-1], "size": size}

    def claim(key: str, reading: kit.Reading, **values: Any) -> tuple[str, kit.Claim]:
        if "model" in values:
            values["own"] = values["model"] == OURS
            values["source"] = "this work" if values["own"] else "§5.6, Figure 5.6"
        return key, CLAIMS(key, reading, **{"unmet": untrained_reason(courses), **shared, **values})

    def over_seeds(value: Callable[[list[TrainingPoint]], float]) -> kit.Reading:
        return kit.mean_of(list(courses.by_seed(value).values()))

    def ratio(point: TrainingPoint) -> float:
        return batches_near_claim(point).mean("largest").value / float(point["full largest"])

    yield claim("grows", over_seeds(lambda points: _log(points, "variance", ratio=True)))
    yield claim("larger", over_seeds(lambda points: math.log(ratio(points[-1]))))
    yield claim("diverges", over_seeds(lambda points: excess(points[-1]) - excess(points[0])))
    logs = {}
    for model in courses.models:
        missed = {seed: misses(points, model) for seed, points in courses.seeds.items()}
        yield claim("within", kit.mean_of([far for far, _ in missed.values()]), model=model)
        logs[model] = {seed: log for seed, (_, log) in missed.items()}
    for better, than in (("multiplicative", "additive"), (OURS, "multiplicative")):
        gap = kit.paired_difference(logs[than], logs[better])
        yield claim("better", gap, model=better, other=than, bound=CLOSE)
    same = [each for each in every if (each.name, each.optimizer) == (courses.name, "SGD")]
    for other in same if courses.optimizer == "KFAC" else ():
        unmet = untrained_reason(other) or untrained_reason(courses)
        for what, column in (("λ₁ of the full data", "full largest"), ("σ²", "variance")):
            sides = (each.by_seed(partial(_log, column=column)) for each in (courses, other))
            yield claim("KFAC", kit.paired_difference(*sides), what=what, unmet=unmet)


def untrained_reason(courses: Courses) -> str:
    """Why a claim is not judged: some seeds end near the loss of guessing; "" if none does."""
    ends = [points[-1] for points in courses.seeds.values()]
    missed = sum(not has_learnt(point) for point in ends)
    near = f"by {courses.optimizer} {missed} of {len(ends)} seeds end near guessing"
    return near if missed else ""


def _log(points: Sequence[TrainingPoint], column: str, ratio: bool = False) -> float:
    """ln of a column at the last point, or of its ratio to that at the first."""
    last, first = float(points[-1][column]), float(points[0][column]) if ratio else 1.0
    return math.log(last / first) if last > 0 and first > 0 else math.nan


START = "network, operator | optimiser"


def tables(rows: Rows) -> Iterator[kit.Table]:
    """The full data, batches and predictions through training; shares within deviations."""
    every = courses_of(rows)
    stops = [(courses, epoch, courses.at(epoch)) for courses in every for epoch in courses.epochs]
    columns = ("loss", "variance", "anisotropy", "full largest", "full smallest")
    lines = []
    for courses, epoch, points in stops:
        loss, spread, *rest = (_mean(point[column] for point in points) for column in columns)
        error = float(np.mean([point["variance error"] / point["variance"] for point in points]))
        start = (courses.name, courses.optimizer, epoch)
        lines.append((*start, loss, spread, f"{error:.0%}", *rest))
    seeds = max((len(courses.seeds) for courses in every), default=0)
    title = f"The full data through training: mean ± standard deviation over {seeds} seeds"
    header = f"{START} | epoch | loss | σ² | error of one | τ²/(Pσ²) | λ₁ | λ_P"
    yield kit.table(title, header, lines)
    for size in sorted({batches.size for courses in every for batches in courses.first[0].batches}):
        models, lines = every[0].models, []
        for courses, epoch, points in stops:
            of_size = _of_size(points, size)
            if of_size:
                spread = f"{np.mean([each.deviation('largest') for each in of_size]):.2g}"
                predicted = [
                    [each.prediction(m, "largest").value for each in of_size] for m in models
                ]
                largest, smallest = (
                    _mean(each.mean(end).value for each in of_size)
                    for end in ("largest", "smallest")
                )
                full = _mean(point["full largest"] for point in points)
                start = (courses.name, courses.optimizer, epoch)
                lines.append((*start, full, largest, spread, *map(_mean, predicted), smallest))
        title = f"Batches of {size} through training: mean of them and prediction, ± standard"
        names = f"λ₁ | λ'₁ of batches | sd between them | {' | '.join(models)} | λ'_P of batches"
        yield kit.table(f"{title} deviation over seeds", f"{START} | epoch | {names}", lines)
    lines = []
    for courses in every:
        points = [point for seed in courses.seeds.values() for point in seed]
        for size in [batches.size for batches in points[0].batches]:
            of_size, start = _of_size(points, size), (courses.name, courses.optimizer, size)
            shares = (
                batch_eigenvalues.share_cells(of_size, model, "largest") for model in courses.models
            )
            lines += [(*start, *share) for share in shares]
    title = "Share of batches whose λ'₁ lies within one and two standard deviations of the"
    header = f"{START} | B | {batch_eigenvalues.SHARES}"
    yield kit.table(f"{title} prediction, all seeds and epochs", header, lines)


def _of_size(points: Sequence[TrainingPoint], size: int) -> list[SizeBatches]:
    return [batches for point in points for batches in point.batches if batches.size == size]


def _mean(values: Iterable[float]) -> str:
    terms = [float(value) for value in values]
    mean, spread = float(np.mean(terms)), float(np.std(terms, ddof=1)) if len(terms) > 1 else 0.0
    return f"{mean:.3g} ± {spread:.1g}" if spread > 0 else f"{mean:.3g}"


def charts(rows: Rows) -> Iterator[kit.Chart]:
    """λ₁ of full data, batches and predictions through each training, and σ of both."""
    every = courses_of(rows)
    yield from map(_largest, every)
    caption = "Mean and standard error over seeds."
    for name in dict.fromkeys(courses.name for courses in every):
        same = [courses for courses in every if courses.name == name]
        both = tuple(
            _series(each, each.optimizer, lambda p: math.sqrt(max(p["variance"], 0.0)))
            for each in same
        )
        labels = (f"{name}: standard deviation of an element of the curvature", "epoch", "σ", both)
        yield kit.Chart(*labels, y_log=True, source="Figures 5.5, 5.6", caption=caption)


def _largest(courses: Courses) -> kit.Chart:
    def value_series(name: str, value: Callable[[SizeBatches], float]) -> kit.Series:
        return _series(courses, name, lambda point: value(batches_near_claim(point)))

    full = _series(courses, "full data", lambda point: float(point["full largest"]))
    size = batches_near_claim(courses.first[0]).size
    seen = value_series(f"batches of {size}", lambda batches: batches.mean("largest").value)
    between = value_series("", lambda batches: batches.deviation("largest")).y
    series = [full, replace(seen, error=between)]
    for model in courses.models:

        def prediction(batches: SizeBatches, model: str = model) -> float:
            return batches.prediction(model, "largest").value

        series.append(value_series(model, prediction))
    title = f"{courses.name}: λ₁ through training by {courses.optimizer}"
    caption = (
        "Means over seeds with their standard error; of batches the standard deviation between"
        " them."
    )
    labels = (title, "epoch", "λ₁", tuple(series))
    return kit.Chart(*labels, y_log=True, source="Figure 5.6", caption=caption)


def _series(courses: Courses, name: str, value: Callable[[TrainingPoint], float]) -> kit.Series:
    every = [[value(point) for point in courses.at(epoch)] for epoch in courses.epochs]
    readings = [kit.mean_of(values) for values in every]
    errors = [reading.stderr if math.isfinite(reading.stderr) else 0.0 for reading in readings]
    return kit.Series(name, courses.epochs, [reading.value for reading in readings], errors)


def cells(
    subjects: Iterable[Cell], seeds: int, kfac_rate: float = 0.003, **more: Any
) -> list[Cell]:
    """Network × optimiser × seed; KFAC's do not measure the start again.

    SGD takes a network's own rate, KFAC ``kfac_rate`` and ``more`` settings.
    """
    own: Cell = {"rate": kfac_rate, "optimizer": "KFAC", "damping": 0.1, **more}
    grid = []
    for plain in subjects:
        later = {"epochs": tuple(epoch for epoch in plain["epochs"] if epoch > 0)}
        for seed in range(seeds):
            grid.append({"optimizer": "SGD", **plain, "seed": seed})
            grid.append({**plain, **later, "seed": seed, **own})
    return grid


def run(cell: Cell, device: str) -> list[Row]:
    """At each stop and operator a row for the full data and one per batch size."""
    make, seed, rows = sgd, cell["seed"], []
    if cell["optimizer"] == "KFAC":
        make = partial(kfac, damping=cell["damping"], inverse_every=cell.get("inverse_every", 10))
    split = batch_points.load_split(cell["data"])
    for epoch, problem in batch_points.training_stops(cell, split, seed, device, make):
        points = batch_points.measure_point(cell, epoch, problem, seed, spectra=0)
        rows += rows_of([point.with_predictions() for point in points])
    return rows


def kfac(model: nn.Module, rate: float, damping: float, inverse_every: int = 10) -> Optimizer:
    """KFAC of the empirical Fisher with momentum 0.9, no decay."""
    return KFAC(model, rate, damping, inverse_every=inverse_every, momentum=batch_points.MOMENTUM)


SIZES = (128, 512)
PLAIN = EFFORT | {"pairs": 3, "tol": 1e-3, "steps": 15, "depth": 30, "probes": 4}
PLAIN |= {"noise_samples": 256}
CONVOLUTIONS = PLAIN | {"tol": 1e-2, "steps": 10, "depth": 16, "noise_samples": 128}
QUICK = CONVOLUTIONS | {"pairs": 2, "batches": 3, "depth": 10, "probes": 2, "noise_samples": 32}
MNIST = ("mnist", (0, 1, 10), 0.02, 4000)
LENET = ("LeNet-5", "lenet5", "cifar10")
VGG = ("VGG-16", "vgg16", "cifar100", (0, 10, 34), 0.02, 45_000, {"dropout": 0.0})
TINY = ("digits", (0, 5), 0.1, 300), ("digits", (0, 1, 5), 0.1, 300)
SCALES = {
    "smoke": cells(
        (
            subject("softmax", "softmax", *TINY[0], {}, (64,), QUICK, HESSIAN_ONLY),
            subject("MLP 6", "mlp", *TINY[1], {"widths": (6,)}, (64,), QUICK),
        ),
        seeds=2,
        kfac_rate=0.03,
    ),
    "cpu": cells(
        (
            subject("softmax", "softmax", *MNIST, {}, SIZES, PLAIN, HESSIAN_ONLY),
            subject("MLP 32", "mlp", *MNIST, {"widths": (32,)}, SIZES, PLAIN),
            subject("MLP 64-64", "mlp", *MNIST, {"widths": (64, 64)}, SIZES, PLAIN),
            subject(*LENET, (0, 8, 20), 0.02, 1000, {}, (128,), CONVOLUTIONS),
        ),
        seeds=5,
    ),
    "paper": cells(
        (subject(*VGG, (128,), CONVOLUTIONS, HESSIAN_ONLY, chunk=500, measured=2_000),),
        seeds=4,
        inverse_every=100,
    ),
}

ASSUMPTIONS = kit.sentences("""
    At paper scale VGG-16 alone, by its Hessian, trained on 45,000 images of CIFAR-100 for 34 of 300
      epochs, without augmentation; on a GPU convolutions train in TF32.
    At that scale the full data are 2,000 of the training images, and KFAC's inverses are computed
      every 100 steps; at other scales the data are CIFAR-10, and the inverses are computed every
      10.
    n counts seeds: each has its own images, start and order of batches, which SGD and KFAC of a
      seed share.
    The start is measured once, for both. SGD and KFAC have momentum 0.9, batches of 128 and no
      weight decay.
    The thesis gives no settings for Figure 5.6: KFAC has α = 0.003, δ = 0.1 and the empirical
      Fisher.
    These settings were chosen so that the training loss falls about as fast as with SGD; curvature
      had been seen only at α = 0.01.
    Ten batches of each size are drawn without replacement at every stop; LeNet-5 on a CPU and
      VGG-16 have B = 128.
    σ² is that of Algorithm 8 with the missing factor 1/N, and with ‖H̄v‖² in place of (vᵀH̄v)².
    Theorem 16 is read as the spiked covariance with the measured spectrum as population, in
      consistent units.
    “Within one standard deviation”: |predicted − mean of ten batches|/(their deviation), mean over
      epochs, is < 1.
    A fit counts as better if the mean λ'₁ of ten batches is closer by 10 % or more, as in
      batch-eigenvalues.
    The claim that the λ₁ of batches moves away from that of the full data is read as λ'₁ − λ₁ being
      larger at the last stop than at the start.
    A batch's eigenvalues come from 15 Lanczos steps, of convolutions on a CPU and of VGG-16 from
      10.
    So few steps determine λ'₁ well if it is separated, but place λ'_P far inside: it is in the
      tables, and no claim is judged by it.
    A network is not judged if one of its seeds ends with a loss above 0.9·ln C, where ln C is the
      loss of guessing among C classes.
    The directional model is ours, and so are comparisons of KFAC with SGD, of which the text says
      nothing.
""")

EXPERIMENT = kit.Experiment(
    "eigenvalues-through-training",
    "Variance and largest eigenvalue of full data and batches through training by SGD and KFAC",
    kit.SPECTRAL,
    "§5.6, Figures 5.5 and 5.6",
    SCALES,
    *(run, claims, tables, charts),
    ASSUMPTIONS,
    size=(
        "VGG-16 on CIFAR-100, 45,000 images, 300 epochs by SGD and KFAC, 10 batches of 128; seeds"
        " are not said."
    ),
    sizes=(kit.Size("VGG-16", "cifar100", 45_000, 300),),
)
