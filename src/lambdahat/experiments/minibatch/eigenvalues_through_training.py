"""Curvature of full data and batches through training by SGD and KFAC, over seeds (Figure 5.6).

A cell trains one network by one optimiser from one seed and stops to measure. Both optimisers begin
at the same parameters, which the cell of SGD measures for both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import numpy as np
from torch import nn
from torch.optim import Optimizer

from lambdahat.experiments.kit.cells import Cell, Row, Rows
from lambdahat.experiments.kit.claims import Claim, Table, TableLines, mean_of, paired_difference
from lambdahat.experiments.kit.experiment import SPECTRAL, Experiment, Size, sentences
from lambdahat.experiments.minibatch.batch_eigenvalues import (
    CLOSE,
    OURS,
    has_learnt,
    near_claimed,
    settings_of,
    share_within,
    subject_through,
)
from lambdahat.experiments.minibatch.batch_points import (
    MOMENTUM,
    ONE,
    SEEN,
    BatchSubject,
    CurvaturePoint,
    PointEffort,
    SizeBatches,
    TrainingPoint,
    batch_rows,
    load_split,
    measure_point,
    point_row,
    points_of,
    sgd,
    training_stops,
)
from lambdahat.optim.kfac import KFAC
from lambdahat.results.charts import Chart, Series

OPTIMIZERS = ("SGD", "KFAC")


def rows_of(points: Sequence[CurvaturePoint]) -> list[Row]:
    """A row per point and one per batch size there, which keeps a store of many runs small."""
    return [_short(row) for point in points for row in (point_row(point), *_sizes(point))]


def _short(row: Row) -> Row:
    """Six digits of each number, far beyond the spread of batches."""
    return json.loads(json.dumps(row), parse_float=lambda text: float(f"{float(text):.6g}"))  # type: ignore[no-any-return]


def _sizes(point: CurvaturePoint) -> Iterator[Row]:
    """What batches of a size show, batch by batch in lists, and what each model predicts."""
    for _, group in groupby(batch_rows(point), key=lambda row: row["batch_size"]):
        rows = list(group)
        seen = {what: [row[what] for row in rows] for what in SEEN}
        yield {name: value for name, value in rows[0].items() if name != "batch"} | seen


def _single(rows: Rows) -> Rows:
    """The same with a row for each batch; predictions stay with the first."""
    found: list[Row] = []
    for row in rows:
        if row["part"] != "batch":
            found.append(row)
            continue
        shared = {
            name: row[name] for name in ("network", "epoch", "operator", "part", "batch_size")
        }
        found += [
            {**(shared if batch else row), "batch": batch, **dict(zip(SEEN, values, strict=True))}
            for batch, values in enumerate(zip(*(row[what] for what in SEEN), strict=True))
        ]
    return Rows(found)


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
        """Where they were measured."""
        return [point["epoch"] for point in self.first]

    @property
    def models(self) -> list[str]:
        """The models with predictions."""
        return self.first[0].models

    def by_seed(self, value: Callable[[list[TrainingPoint]], float]) -> dict[int, float]:
        """A number for each seed, of its points."""
        return {seed: value(points) for seed, points in self.seeds.items()}

    def at(self, epoch: int) -> list[TrainingPoint]:
        """The points of all seeds at one epoch."""
        return [
            point for points in self.seeds.values() for point in points if point["epoch"] == epoch
        ]


def courses_of(rows: Rows) -> list[Courses]:
    """Network by network and operator by operator, SGD's and then KFAC's; both begin with the start
    they share.

    Runs whose start is not among the rows are left out.
    """
    starts: dict[tuple[str, str, int], TrainingPoint] = {}
    found: dict[tuple[str, str, str], dict[int, list[TrainingPoint]]] = {}
    for optimizer in OPTIMIZERS:
        for seed in rows.distinct("seed"):
            for point in points_of(_single(rows.where(optimizer=optimizer, seed=seed))):
                place = (point["network"], point["operator"])
                if point["epoch"] == 0:
                    starts[(*place, seed)] = point
                elif (*place, seed) in starts:
                    begun = [starts[(*place, seed)]]
                    found.setdefault((*place, optimizer), {}).setdefault(seed, begun).append(point)
    networks = rows.distinct("network")
    places = sorted(found, key=lambda place: (networks.index(place[0]), place[1] == "ggn"))
    return [Courses(place[2], found[place]) for place in places]


def excess(point: TrainingPoint) -> float:
    """λ'₁ − λ₁: what batches show beyond the full data, on average."""
    return near_claimed(point).mean("largest").value - float(point["full largest"])


def distance(batches: SizeBatches, model: str) -> float:
    """|predicted − mean of the batches| over their standard deviation; NaN if that is 0."""
    spread = batches.deviation("largest")
    gap = abs(batches.prediction(model, "largest").value - batches.mean("largest").value)
    return gap / spread if spread > 0 else math.nan


def miss(batches: SizeBatches, model: str) -> float:
    """ln(predicted/mean of the batches)."""
    told, seen = batches.prediction(model, "largest").value, batches.mean("largest").value
    return math.log(told / seen) if told > 0 and seen > 0 else math.nan


LOG = " = ln of the ratio, over seeds"


def claims(rows: Rows) -> list[Claim]:
    """Every claim, network by network, of each optimiser; and KFAC's courses against SGD's."""
    every = courses_of(rows)
    own = [
        claim
        for make in (_grows, _larger, _diverges, _within, _better)
        for each in every
        for claim in make(each)
    ]
    return [*own, *_kfac_claims(every)]


def unlearnt(courses: Courses) -> str:
    """How many seeds end near the loss of guessing, as a reason not to judge; "" if none."""
    ends = [points[-1] for points in courses.seeds.values()]
    missed = sum(not has_learnt(point) for point in ends)
    return (
        f"by {courses.optimizer} {missed} of {len(ends)} seeds end near guessing" if missed else ""
    )


def _text(courses: Courses, text: str) -> str:
    return f"{courses.name}, {courses.optimizer}: {text}"


def _span(courses: Courses) -> str:
    return f"from epoch {courses.epochs[0]} to {courses.epochs[-1]}"


def _grows(courses: Courses) -> Iterator[Claim]:
    """Figures 5.5 and 5.6: the variance of curvature grows through training."""
    ratios = courses.by_seed(lambda points: _log(points[-1], points[0], "variance"))
    sentence = _text(courses, f"σ² grows {_span(courses)}")
    source = "§5.6, Figures 5.5, 5.6"
    reading = mean_of(list(ratios.values()))
    yield Claim(sentence, source, "grows", reading, unit=LOG, unmet=unlearnt(courses))


def _log(upper: TrainingPoint, lower: TrainingPoint, name: str) -> float:
    return math.log(upper[name] / lower[name]) if upper[name] > 0 and lower[name] > 0 else math.nan


def _larger(courses: Courses) -> Iterator[Claim]:
    """Figures 5.2, 5.4 and 5.6: batches have larger extremal eigenvalues."""
    size = near_claimed(courses.first[-1]).size
    ratios = courses.by_seed(lambda points: _excess_ratio(points[-1]))
    text = f"at epoch {courses.epochs[-1]} the mean λ₁ of batches of {size} exceeds the full data's"
    source = "§5.5, Figures 5.2, 5.4, 5.6"
    reading = mean_of(list(ratios.values()))
    yield Claim(_text(courses, text), source, "larger", reading, unit=LOG, unmet=unlearnt(courses))


def _excess_ratio(point: TrainingPoint) -> float:
    return math.log(near_claimed(point).mean("largest").value / point["full largest"])


def _diverges(courses: Courses) -> Iterator[Claim]:
    """§5.6: the batches' extremal eigenvalues diverge from the full data's during training."""
    moved = courses.by_seed(lambda points: excess(points[-1]) - excess(points[0]))
    text = (
        f"the mean λ₁ of batches of {near_claimed(courses.first[-1]).size} moves away from the full"
        " data's"
    )
    sentence = _text(courses, f"{text} {_span(courses)}")
    source = "§5.6, Figure 5.6"
    reading = mean_of(list(moved.values()))
    unit = " = λ'₁ − λ₁ at the end less that at the start, over seeds"
    yield Claim(sentence, source, "diverges", reading, unit=unit, unmet=unlearnt(courses))


def _within(courses: Courses) -> Iterator[Claim]:
    """§5.6: both noise processes give results within one standard deviation."""
    for model in courses.models:
        far = courses.by_seed(partial(_over_epochs, model=model, measure=distance))
        text = (
            f"the {model} model's λ'₁ is within one standard deviation of the mean of batches, over"
            " epochs"
        )
        ours = model == OURS
        yield Claim(
            _text(courses, text),
            "this work" if ours else "§5.6, Figure 5.6",
            "within 1 sd",
            mean_of(list(far.values())),
            "below",
            1.0,
            unit=" standard deviations away, over seeds",
            unmet=unlearnt(courses),
            own=ours,
        )


def _better(courses: Courses) -> Iterator[Claim]:
    """§5.6: the multiplicative noise process gives a better fit."""
    misses = {
        model: courses.by_seed(partial(_over_epochs, model=model, measure=miss))
        for model in courses.models
    }
    for better, than in (("multiplicative", "additive"), (OURS, "multiplicative")):
        text = (
            f"the {better} model fits the mean λ'₁ of batches better than the {than}, by 10 % or"
            " more, over epochs"
        )
        ours = better == OURS
        yield Claim(
            _text(courses, text),
            "this work" if ours else "§5.6, Figure 5.6",
            "better",
            paired_difference(misses[than], misses[better]),
            bound=CLOSE,
            unit=" in |ln(predicted/measured)|, over seeds",
            unmet=unlearnt(courses),
            own=ours,
        )


def _over_epochs(
    points: Sequence[TrainingPoint], model: str, measure: Callable[[SizeBatches, str], float]
) -> float:
    """How far a model is from the batches of the thesis's size, mean over epochs."""
    return mean_of([abs(measure(near_claimed(point), model)) for point in points]).value


def _kfac_claims(every: Sequence[Courses]) -> Iterator[Claim]:
    """KFAC's curvature against SGD's at the last epoch; the thesis draws both without comment."""
    by_place = {(courses.name, courses.optimizer): courses for courses in every}
    for (name, optimizer), ours in by_place.items():
        other = by_place.get((name, "SGD"))
        if optimizer != "KFAC" or other is None:
            continue
        for what, column in (("λ₁ of the full data", "full largest"), ("σ²", "variance")):
            upper, lower = (each.by_seed(partial(_last, column=column)) for each in (ours, other))
            text = f"{name}: at epoch {ours.epochs[-1]} KFAC's {what} is larger than SGD's"
            reading = paired_difference(upper, lower)
            unmet = unlearnt(other) or unlearnt(ours)
            yield Claim(text, "this work", "larger", reading, unit=LOG, unmet=unmet, own=True)


def _last(points: Sequence[TrainingPoint], column: str) -> float:
    value = float(points[-1][column])
    return math.log(value) if value > 0 else math.nan


def tables(rows: Rows) -> list[Table]:
    """The full data, batches and predictions through training; shares within deviations."""
    every = courses_of(rows)
    return [_full(every), *_batches(every), _shares(every)]


def _full(every: Sequence[Courses]) -> Table:
    header = (
        "network, operator",
        "optimiser",
        "epoch",
        "loss",
        "σ²",
        "error of one",
        "τ²/(Pσ²)",
        "λ₁",
        "λ_P",
    )
    lines = []
    for courses, epoch, points in _stops(every):
        shown = [_mean(points, column) for column in ("loss", "variance")]
        error = float(np.mean([point["variance error"] / point["variance"] for point in points]))
        rest = [_mean(points, column) for column in ("anisotropy", "full largest", "full smallest")]
        lines.append((courses.name, courses.optimizer, str(epoch), *shown, f"{error:.0%}", *rest))
    seeds = max((len(courses.seeds) for courses in every), default=0)
    title = f"The full data through training: mean ± standard deviation over {seeds} seeds"
    return Table(title, header, tuple(lines))


def _batches(every: Sequence[Courses]) -> Iterator[Table]:
    """For each batch size λ'₁ and λ'_P of batches beside λ₁ and the predictions, over epochs."""
    for size in sorted({batches.size for courses in every for batches in courses.first[0].batches}):
        models = every[0].models
        header = (
            "network, operator",
            "optimiser",
            "epoch",
            "λ₁",
            "λ'₁ of batches",
            "sd between them",
            *models,
            "λ'_P of batches",
        )
        lines = TableLines()
        for courses, epoch, points in _stops(every):
            found = [
                batches for point in points for batches in point.batches if batches.size == size
            ]
            if found:
                lines.add(
                    courses.name,
                    courses.optimizer,
                    str(epoch),
                    _mean(points, "full largest"),
                    _mean_text([each.mean("largest").value for each in found]),
                    f"{np.mean([each.deviation('largest') for each in found]):.2g}",
                    *(
                        _mean_text([each.prediction(model, "largest").value for each in found])
                        for model in models
                    ),
                    _mean_text([each.mean("smallest").value for each in found]),
                )
        title = (
            f"Batches of {size} through training: mean of them and prediction, ± standard deviation"
            " over seeds"
        )
        yield Table(title, header, tuple(lines))


def _shares(every: Sequence[Courses]) -> Table:
    header = (
        "network, operator",
        "optimiser",
        "B",
        "model",
        "1 sd predicted",
        "2 sd",
        "1 sd measured",
        "2 sd ",
        "predicted/measured",
    )
    lines = []
    for courses in every:
        points = [point for seed in courses.seeds.values() for point in seed]
        for size in [batches.size for batches in points[0].batches]:
            found = [
                batches for point in points for batches in point.batches if batches.size == size
            ]
            lines += [
                (courses.name, courses.optimizer, str(size), model, *_share(found, model))
                for model in courses.models
            ]
    title = (
        "Share of batches whose λ'₁ lies within one and two standard deviations of the prediction,"
        " all seeds and epochs"
    )
    return Table(title, header, tuple(lines))


def _share(found: Sequence[SizeBatches], model: str) -> tuple[str, ...]:
    rulers = [(ruler, times) for ruler in ("predicted", "measured") for times in (1, 2)]
    shares = [
        f"{share_within(found, model, 'largest', times, ruler):.0%}" for ruler, times in rulers
    ]
    ratios = [math.exp(miss(each, model)) for each in found]
    return (*shares, f"{min(ratios):.2f} … {max(ratios):.2f}")


def _stops(every: Sequence[Courses]) -> Iterator[tuple[Courses, int, list[TrainingPoint]]]:
    for courses in every:
        for epoch in courses.epochs:
            yield courses, epoch, courses.at(epoch)


def _mean(points: Sequence[TrainingPoint], column: str) -> str:
    return _mean_text([float(point[column]) for point in points])


def _mean_text(values: Sequence[float]) -> str:
    mean, spread = float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return f"{mean:.3g} ± {spread:.1g}" if spread > 0 else f"{mean:.3g}"


def charts(rows: Rows) -> list[Chart]:
    """λ₁ of full data, batches and predictions through each training, and σ of both."""
    every = courses_of(rows)
    out = [_largest(courses) for courses in every]
    for name in dict.fromkeys(courses.name for courses in every):
        both = tuple(
            _series(
                courses, courses.optimizer, lambda point: math.sqrt(max(point["variance"], 0.0))
            )
            for courses in every
            if courses.name == name
        )
        title = f"{name}: standard deviation of an element of the curvature"
        source = "Figures 5.5, 5.6"
        caption = "Mean and standard error over seeds."
        out.append(Chart(title, "epoch", "σ", both, y_log=True, source=source, caption=caption))
    return out


def _largest(courses: Courses) -> Chart:
    size = near_claimed(courses.first[0]).size
    full = _series(courses, "full data", lambda point: float(point["full largest"]))
    seen = _series(
        courses, f"batches of {size}", lambda point: near_claimed(point).mean("largest").value
    )
    between = _series(courses, "", lambda point: near_claimed(point).deviation("largest")).y
    told = [_prediction_series(courses, model) for model in courses.models]
    caption = (
        "Means over seeds with their standard error; of batches the standard deviation between"
        " them."
    )
    title = f"{courses.name}: λ₁ through training by {courses.optimizer}"
    series = (full, replace(seen, error=between), *told)
    return Chart(title, "epoch", "λ₁", series, y_log=True, source="Figure 5.6", caption=caption)


def _prediction_series(courses: Courses, model: str) -> Series:
    return _series(
        courses, model, lambda point: near_claimed(point).prediction(model, "largest").value
    )


def _series(courses: Courses, name: str, value: Callable[[TrainingPoint], float]) -> Series:
    readings = [mean_of([value(point) for point in courses.at(epoch)]) for epoch in courses.epochs]
    errors = [reading.stderr if math.isfinite(reading.stderr) else 0.0 for reading in readings]
    return Series(name, courses.epochs, [reading.value for reading in readings], errors)


@dataclass(frozen=True)
class CourseScale:
    """Networks, each trained from ``seeds`` starts by SGD at its own rate and by KFAC."""

    subjects: tuple[BatchSubject, ...]
    seeds: int
    kfac_rate: float = 0.003
    damping: float = 0.1
    inverse_every: int = 10


def cells(config: CourseScale) -> list[Cell]:
    """Network × optimiser × seed; KFAC's do not measure the start again."""
    return [
        cell
        for subject in config.subjects
        for seed in range(config.seeds)
        for cell in _pair(config, subject, seed)
    ]


def _pair(config: CourseScale, subject: BatchSubject, seed: int) -> tuple[Cell, Cell]:
    later = tuple(epoch for epoch in subject.epochs if epoch > 0)
    kfac = replace(subject, rate=config.kfac_rate, epochs=later)
    shared = {"operators": subject.operators, "seed": seed}
    own: Cell = {"damping": config.damping}
    if config.inverse_every != 10:  # as in stored cells
        own["inverse_every"] = config.inverse_every
    return (
        {"optimizer": "SGD", **settings_of(subject), **shared},
        {"optimizer": "KFAC", **settings_of(kfac), **shared, **own},
    )


def run(cell: Cell, device: str) -> list[Row]:
    """At each stop and operator a row for the full data and one per batch size."""
    subject = subject_through(cell, tuple(cell["operators"]))
    make = sgd
    if cell["optimizer"] == "KFAC":
        make = partial(kfac, damping=cell["damping"], inverse_every=cell.get("inverse_every", 10))
    rows: list[Row] = []
    for epoch, problem in training_stops(
        subject, load_split(subject.data), cell["seed"], device, make
    ):
        points = measure_point(subject, epoch, problem, cell["seed"], spectra=0)
        rows += rows_of([point.with_predictions() for point in points])
    return rows


def kfac(model: nn.Module, rate: float, damping: float, inverse_every: int = 10) -> Optimizer:
    """KFAC of the empirical Fisher with momentum 0.9, no decay."""
    return KFAC(model, rate, damping, inverse_every=inverse_every, momentum=MOMENTUM)


SIZES = (128, 512)
QUICK = PointEffort(pairs=2, tol=1e-2, batches=3, steps=10, depth=10, probes=2, samples=32)
PLAIN = PointEffort(pairs=3, tol=1e-3, steps=15, depth=30, probes=4, samples=256)
CONVOLUTIONS = PointEffort(pairs=3, tol=1e-2, steps=10, depth=16, probes=4, samples=128)


def _mnist(epochs: tuple[int, ...], samples: int, *hidden: tuple[int, ...]) -> list[BatchSubject]:
    """Softmax regression and perceptrons of these hidden widths on images of MNIST."""
    shared = ("mnist", epochs, 0.02, samples)
    linear = BatchSubject("softmax", "softmax", *shared, {}, SIZES, PLAIN, ONE)
    names = ["MLP " + "-".join(map(str, widths)) for widths in hidden]
    return [linear] + [
        BatchSubject(name, "mlp", *shared, {"widths": widths}, SIZES, PLAIN)
        for name, widths in zip(names, hidden, strict=True)
    ]


LENET, VGG = ("LeNet-5", "lenet5", "cifar10"), ("VGG-16", "vgg16", "cifar100")
TINY = ("digits", (0, 5), 0.1, 300), ("digits", (0, 1, 5), 0.1, 300)
SCALES = {
    "smoke": CourseScale(
        (
            BatchSubject("softmax", "softmax", *TINY[0], {}, (64,), QUICK, ONE),
            BatchSubject("MLP 6", "mlp", *TINY[1], {"widths": (6,)}, (64,), QUICK),
        ),
        seeds=2,
        kfac_rate=0.03,
    ),
    "cpu": CourseScale(
        (
            *_mnist((0, 1, 10), 4000, (32,), (64, 64)),
            BatchSubject(*LENET, (0, 8, 20), 0.02, 1000, {}, (128,), CONVOLUTIONS),
        ),
        seeds=5,
    ),
    "paper": CourseScale(
        (
            BatchSubject(
                *VGG,
                (0, 10, 34),
                0.02,
                45_000,
                {"dropout": 0.0},
                (128,),
                CONVOLUTIONS,
                ONE,
                chunk=500,
                measured=2_000,
            ),
        ),
        seeds=4,
        inverse_every=100,
    ),
}

ASSUMPTIONS = sentences("""
    At paper scale VGG-16 alone, by its Hessian, trained on 45,000 images of CIFAR-100 for 34 of 300
      epochs, without augmentation; on a GPU convolutions train in TF32.
    There the full data are 2,000 of the training images, and KFAC's inverses are computed every 100
      steps; at other scales CIFAR-10, and every 10.
    n counts seeds: each has its own images, start and order of batches, which SGD and KFAC of a
      seed share.
    The start is measured once, for both. SGD and KFAC have momentum 0.9, batches of 128 and no
      weight decay.
    The thesis gives no settings for Figure 5.6: KFAC has α = 0.003, δ = 0.1 and the empirical
      Fisher.
    They were chosen by the training loss, to fall about as fast as SGD's; curvature had been seen
      at α = 0.01 alone.
    Ten batches of each size are drawn without replacement at every stop; LeNet-5 on a CPU and
      VGG-16 have B = 128.
    σ² is Algorithm 8 with its 1/N put in and ‖H̄v‖² in place of (vᵀH̄v)².
    Theorem 16 is read as the spiked covariance with the measured spectrum as population, in
      consistent units.
    “Within one standard deviation”: |predicted − mean of ten batches|/(their deviation), mean over
      epochs, is < 1.
    A better fit is one by 10 % or more in the mean λ'₁ of ten batches, as in batch-eigenvalues.
    That batches' λ₁ moves away from the full data's is read as λ'₁ − λ₁ at the last stop above that
      at the start.
    A batch's eigenvalues come from 15 Lanczos steps, of convolutions on a CPU and of VGG-16 from
      10.
    So few see λ'₁ well where it is apart, but λ'_P far inside: it is in the tables, and nothing is
      judged by it.
    A network of which a seed ends with a loss above 0.9·ln C, that of guessing among C classes,
      tests nothing.
    The directional model is ours, and so are comparisons of KFAC with SGD, of which the text says
      nothing.
""")

EXPERIMENT = Experiment(
    "eigenvalues-through-training",
    "Variance and largest eigenvalue of full data and batches through training by SGD and KFAC",
    SPECTRAL,
    "§5.6, Figures 5.5 and 5.6",
    SCALES,
    *(cells, run, claims, tables, charts),
    ASSUMPTIONS,
    size=(
        "VGG-16 on CIFAR-100, 45,000 images, 300 epochs by SGD and KFAC, 10 batches of 128; seeds"
        " are not said."
    ),
    sizes=(Size("VGG-16", "cifar100", 45_000, 300),),
)
