"""Extreme eigenvalues of mini-batch curvature (§§5.5 and 5.6, Theorem 17).

Each network was trained once, so that a claim is about that network and its batches, which were
drawn independently: n counts batches, by their number among those of each epoch and size. What is
said of several epochs or sizes is first averaged over them, batch by batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from lambdahat.experiments.kit.cells import Cell, Row, Rows
from lambdahat.experiments.kit.claims import (
    Claim,
    Reading,
    Table,
    TableLines,
    mean_of,
    paired_difference,
    split_header,
)
from lambdahat.experiments.kit.experiment import SPECTRAL, Experiment, Size, sentences
from lambdahat.experiments.minibatch.batch_points import (
    CLAIMED_SIZE,
    SCALES,
    BatchSubject,
    PointEffort,
    SizeBatches,
    TrainingPoint,
    groups_of,
    load_split,
    measure_point,
    rows_of,
    training_stops,
)
from lambdahat.results.charts import Chart, Series

CLOSE = math.log(1.1)  # of a mean that counts as predicted, and by which a fit is to be better
MARGIN = 0.2  # of a slope that counts as the one claimed
SURE = 2.0  # standard errors by which a batch shows more
# of normal batches, within one deviation of what is one deviation off
AT_ONE = float(norm.cdf(2) - norm.cdf(0))
LEARNT = 0.9  # of the loss of guessing
UNKNOWN = Reading(math.nan, math.nan, math.nan, 0)
THEOREMS = {"additive": "Theorem 14", "multiplicative": "Theorem 16"}
OURS = "directional"  # the model that is not the thesis's

Points = Sequence[TrainingPoint]


def claims(rows: Rows) -> list[Claim]:
    """Every claim, network by network, at the last epoch unless it compares epochs."""
    makers: tuple[Callable[[Points], Iterable[Claim]], ...] = (
        _larger,
        _within,
        _mean,
        _better,
        _slope,
        _variance_grows,
        _broadens,
        _overlap,
    )
    groups = groups_of(rows)
    return [claim for make in makers for group in groups for claim in make(group)]


def has_learnt(point: TrainingPoint) -> bool:
    """Whether the loss is below that of guessing among the classes, by a tenth."""
    classes = 100 if point.row.get("data") == "cifar100" else 10
    return bool(point["loss"] < LEARNT * math.log(classes))


def unlearnt(points: Points) -> str:
    """Why a network counts as untrained: its last loss is near guessing; "" if below it."""
    last = points[-1]
    return (
        ""
        if has_learnt(last)
        else f"its loss at epoch {last['epoch']} is {last['loss']:.3g}, near guessing"
    )


def share_within(
    batches: Iterable[SizeBatches], model: str, end: str, times: float, ruler: str
) -> float:
    """Share of batches no farther from the prediction than ``times`` standard deviations.

    ``ruler`` says whose: "predicted", the spread that the model predicts, or "measured", that
    between the batches.
    """
    return float(
        np.concatenate([_inside(each, model, end, times, ruler) for each in batches]).mean()
    )


def _inside(
    batches: SizeBatches, model: str, what: str, times: float, ruler: str
) -> NDArray[np.bool_]:
    width = batches.spread(model, what) if ruler == "predicted" else batches.deviation(what)
    found: NDArray[np.bool_] = (
        np.abs(batches.values(what) - batches.prediction(model, what).value) <= times * width
    )
    return found


def excess_slope(point: TrainingPoint) -> Reading:
    """Slope of log(λ'₁ − λ₁) on log b, weighted by the errors of the means; sizes without a clear
    excess are left out.

    Theorem 14 gives −1 while λ₁ is an outlier.
    """
    seen = []
    for batches in point.batches:
        mean = batches.mean("largest")
        excess = mean.value - point["full largest"]
        if excess > SURE * mean.stderr > 0:
            seen.append((math.log(batches.effective), math.log(excess), excess / mean.stderr))
    if len(seen) < 3:
        return UNKNOWN
    x, y, weight = np.array(seen).T
    coefficients, covariance = np.polyfit(x, y, 1, w=weight, cov="unscaled")
    misfit = float((((np.polyval(coefficients, x) - y) * weight) ** 2).sum()) / (len(seen) - 2)
    error = math.sqrt(covariance[0, 0] * max(misfit, 1.0))
    return Reading(float(coefficients[0]), error, len(seen) - 2, len(seen))


def near_claimed(point: TrainingPoint) -> SizeBatches:
    """The batch size nearest the thesis's."""
    return min(point.batches, key=lambda batches: abs(math.log(batches.size / CLAIMED_SIZE)))


def _at(point: TrainingPoint, text: str) -> str:
    return f"{point.name}: at epoch {point['epoch']} {text}"


def _larger(points: Points) -> Iterator[Claim]:
    """Figures 5.2 and 5.4: extremal eigenvalues are significantly increased."""
    point, batches = points[-1], near_claimed(points[-1])
    ratio = mean_of((batches.values("largest") / point["full largest"]).tolist())
    text = (
        f"the largest eigenvalue of this network's batches of {batches.size} exceeds the full"
        " data's"
    )
    sentence = _at(point, text)
    source = "§5.5, Figures 5.2, 5.4"
    yield Claim(sentence, source, "larger", ratio, bound=1.0, unit=" times", unmet=unlearnt(points))


def _within(points: Points) -> Iterator[Claim]:
    """§5.6: both noise processes give results within one standard deviation."""
    for model in points[-1].models:
        yield _near(points, model, "largest", "λ'₁", "§5.6, Figure 5.6", model == OURS)


def _overlap(points: Points) -> Iterator[Claim]:
    """Theorem 17: |φ̂₁ᵀφ₁|² = 1 − Pσ²/(bλ₁²)."""
    for model in points[-1].models:
        yield _near(
            points,
            model,
            "overlaps",
            "overlap (φ̂₁ᵀφ₁)²",
            "Theorem 17, Eq. 6.2",
            model != "additive",
        )


def _near(points: Points, model: str, what: str, words: str, source: str, own: bool) -> Claim:
    """Batches within one deviation of a prediction: over AT_ONE if it is within one of the mean."""
    reading = mean_of(
        _by_batch(
            points, lambda each: _inside(each, model, what, 1, "measured").astype(float), what
        )
    )
    text = (
        f"the {model} model's {words} is within one standard deviation of this network's batches,"
        " over epochs and B"
    )
    sentence = f"{points[0].name}: {text}"
    place = "this work" if own else source
    unmet = unlearnt(points)
    return Claim(
        sentence, place, "within 1 sd", reading, bound=AT_ONE, unit=" of them", unmet=unmet, own=own
    )


def _by_batch(
    points: Points, value: Callable[[SizeBatches], NDArray[np.float64]], what: str
) -> list[float]:
    """A value per batch, its mean over epochs and sizes, without sizes whose batches agree."""
    every = [
        batches for point in points for batches in point.batches if batches.deviation(what) > 0
    ]
    fewest = min((len(batches.rows) for batches in every), default=0)
    found = np.array([value(batches)[:fewest] for batches in every])
    return [float(number) for number in found.mean(0)] if every else []


def _mean(points: Points) -> Iterator[Claim]:
    """Theorems 14 and 16 for the mean over batches: ln(predicted/measured), mean over sizes."""
    point = points[-1]
    for model in point.models:
        text = (
            f"the {model} model's λ'₁ is the mean of this network's batches within 10 %, on average"
            " over their sizes"
        )
        yield Claim(
            _at(point, text),
            THEOREMS.get(model, "this work"),
            "equal",
            _mean_ratio(point, model),
            "within",
            0.0,
            CLOSE,
            " = ln(predicted/measured)",
            unlearnt(points),
            model == OURS,
        )


def _mean_ratio(point: TrainingPoint, model: str) -> Reading:
    """The mean of ln(predicted/measured) over sizes.

    The batches of different sizes are different draws, while the error of the prediction is one and
    the same for all. Degrees of freedom as Welch's.
    """
    found = [(each.prediction(model, "largest"), each.mean("largest")) for each in point.batches]
    known = [(told, mean) for told, mean in found if told.value > 0 and mean.value > 0]
    if not known:
        return UNKNOWN
    logs = [math.log(told.value / mean.value) for told, mean in known]
    squares = [(mean.stderr / mean.value / len(known)) ** 2 for _, mean in known]
    common = sum(told.stderr / told.value for told, _ in known) / len(known)
    weights = sum(square**2 / mean.dof for square, (_, mean) in zip(squares, known, strict=True))
    total = sum(squares) + common**2
    dof = total**2 / weights if weights else math.inf
    return Reading(
        sum(logs) / len(logs), math.sqrt(total), dof, min(mean.count for _, mean in known)
    )


def _better(points: Points) -> Iterator[Claim]:
    """§5.6: multiplicative noise fits better, by |ln(predicted/measured)| of single batches."""
    for better, than in (("multiplicative", "additive"), (OURS, "multiplicative")):
        if {better, than} <= set(points[0].models):
            gap = paired_difference(_misses(points, than), _misses(points, better))
            text = (
                f"the {better} model fits λ'₁ of this network's batches better than the {than}, by"
                " 10 % or more"
            )
            own = better == OURS
            sentence = f"{points[0].name}: {text}, over epochs and B"
            source = "this work" if own else "§5.6, Figure 5.6"
            unit = " in |ln(predicted/measured)|"
            unmet = unlearnt(points)
            yield Claim(
                sentence, source, "better", gap, bound=CLOSE, unit=unit, unmet=unmet, own=own
            )


def _misses(points: Points, model: str) -> dict[int, float]:
    """|ln(predicted/measured)| of λ'₁ for each batch, its mean over epochs and sizes."""

    def missed(batches: SizeBatches) -> NDArray[np.float64]:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.abs(
                np.log(batches.prediction(model, "largest").value / batches.values("largest"))
            )

    return dict(enumerate(_by_batch(points, missed, "largest")))


def _slope(points: Points) -> Iterator[Claim]:
    """Theorem 14: what a batch adds to an outlier falls as 1/b."""
    text = "λ'₁ − λ₁ of this network's batches falls as b^(−1)"
    sentence = _at(points[-1], text)
    reading = excess_slope(points[-1])
    unit = " over the means of batch sizes"
    unmet = unlearnt(points)
    yield Claim(sentence, "Theorem 14", "slope −1", reading, "within", -1.0, MARGIN, unit, unmet)


def _variance_grows(points: Points) -> Iterator[Claim]:
    """Figure 5.5: the variance of curvature grows through training."""
    first, last = points[0], points[-1]
    if len(points) > 1 and first["variance"] > 0:
        ratio = last["variance"] / first["variance"]
        relative = [each["variance error"] / each["variance"] for each in (first, last)]
        reading = Reading(math.log(ratio), math.hypot(*relative))
        text = f"σ² grows from epoch {first['epoch']} to {last['epoch']} of this one run"
        sentence = f"{first.name}: {text}"
        source = "§5.6, Figure 5.5"
        unit = " = ln of the ratio"
        yield Claim(sentence, source, "grows", reading, unit=unit, unmet=unlearnt(points))


def _broadens(points: Points) -> Iterator[Claim]:
    """Figures 5.2, 5.4: a batch's bulk is wider than the full data's, mean over epochs."""
    found = [
        [
            math.log(width / point["width"]) if width > 0 else math.nan
            for width in point["batch widths"]
        ]
        for point in points
        if point["width"] > 0
    ]
    ratios = [float(np.mean(batch)) for batch in zip(*found, strict=True)]
    size = points[0]["width size"]
    text = (
        f"{points[0].name}: the bulk of this network's batches of {size} is wider than the full"
        " data's, over epochs"
    )
    source = "§5.5, Figures 5.2, 5.4"
    reading = mean_of(ratios)
    yield Claim(text, source, "wider", reading, unit=" = ln of the ratio", unmet=unlearnt(points))


Groups = Sequence[Sequence[TrainingPoint]]


def tables(rows: Rows) -> list[Table]:
    """Shares within one and two deviations, λ'₁ and overlaps by batch size, variances, bulks."""
    groups = groups_of(rows)
    return [*_shares(groups), *_by_size(groups), _through_training(groups), _bulks(groups)]


def _shares(groups: Groups) -> Iterator[Table]:
    header = split_header(
        "network, operator | model | 1 sd predicted | 2 sd | 1 sd measured | 2 sd  | "
        "predicted/measured"
    )
    for end, what in (("largest", "λ'₁"), ("smallest", "λ'_P")):
        lines = []
        for group in groups:
            if end == "smallest" and not any(point["indefinite"] for point in group):
                continue  # 0 for every batch
            every = [batches for point in group for batches in point.batches]
            lines += [
                (group[0].name, model, *_share(every, model, end)) for model in group[0].models
            ]
        if lines:
            title = (
                f"Share of batches whose {what} lies within one and two standard deviations of the"
                " prediction"
            )
            yield Table(title, header, tuple(lines))


def _share(every: Sequence[SizeBatches], model: str, end: str) -> tuple[str, ...]:
    rulers = [(ruler, times) for ruler in ("predicted", "measured") for times in (1, 2)]
    shares = [f"{share_within(every, model, end, times, ruler):.0%}" for ruler, times in rulers]
    ratios = [each.prediction(model, end).value / each.mean(end).value for each in every]
    # a model that is never below 0 has no λ'_P to compare
    return (*shares, f"{min(ratios):.2f} … {max(ratios):.2f}" if max(ratios) > 0 else "none")


def _by_size(groups: Groups) -> Iterator[Table]:
    """λ'₁ and overlap over batch sizes at the last epoch, a table for each network."""
    for network in dict.fromkeys(group[0]["network"] for group in groups):
        last = [group[-1] for group in groups if group[0]["network"] == network]
        models = last[0].models
        header = (
            *split_header("epoch, operator | B | λ₁ | λ'₁ of batches"),
            *models,
            "overlap of batches",
            *(f"{model} " for model in models),
        )
        lines = tuple(
            _size_line(point, batches, models) for point in last for batches in point.batches
        )
        yield Table(
            f"{network}: mean ± sd over batches, prediction ± spread of one batch", header, lines
        )


def _size_line(point: TrainingPoint, batches: SizeBatches, models: list[str]) -> tuple[str, ...]:
    return (
        f"{point['epoch']}, {point['operator']}",
        f"{batches.size:,}",
        f"{point['full largest']:.3g}",
        f"{batches.mean('largest').value:.3g} ± {batches.deviation('largest'):.2g}",
        *(
            f"{batches.prediction(m, 'largest').value:.3g} ± {batches.spread(m, 'largest'):.2g}"
            for m in models
        ),
        f"{batches.mean('overlaps').value:.2f} ± {batches.deviation('overlaps'):.2f}",
        *(f"{batches.prediction(m, 'overlaps').value:.2f}" for m in models),
    )


def _through_training(groups: Groups) -> Table:
    header = ("network, operator", "epoch", "loss", "σ²", "τ²/(Pσ²)", "λ₁", "λ_P", "P", "N")
    lines = tuple(
        (
            p.name,
            str(p["epoch"]),
            f"{p['loss']:.3g}",
            _text(p["variance"], p["variance error"]),
            f"{p['anisotropy']:.3g}",
            f"{p['full largest']:.3g}",
            f"{p['full smallest']:.2g}",
            f"{p['parameters']:,}",
            f"{p['population']:,}",
        )
        for group in groups
        for p in group
    )
    title = "Per-element variance and extreme eigenvalues of the full data through training"
    return Table(title, header, lines)


def _bulks(groups: Groups) -> Table:
    """Bulk and outliers of the full data, bulks of batches, last epoch (Figures 5.2, 5.4, 6.1)."""
    lines = TableLines()
    for point in (group[-1] for group in groups):
        edges = " … ".join(
            _text(*edge) for edge in zip(point["bulk"], point["bulk errors"], strict=True)
        )
        apart = ", ".join(f"{value:.3g}" for value in point["outliers"]) or "none surely"
        width = mean_of(point["batch widths"])
        lines.add(
            point.name,
            str(point["epoch"]),
            f"{point['width']:.3g}",
            _text(width.value, width.stderr),
            edges,
            apart,
        )
    header = split_header(
        f"network, operator | epoch | width | width, B = {groups[0][-1]['width size']} | "
        "fitted bulk | outliers"
    )
    title = (
        "Width of the bulk (Ritz weights of 5/P or more), of a batch's bulk; bulk fitted to the"
        " full data, outliers"
    )
    return Table(title, header, tuple(lines))


def _text(value: float, error: float) -> str:
    return f"{value:.3g} ± {error:.1g}" if error > 0 else f"{value:.3g}"


def charts(rows: Rows) -> list[Chart]:
    """λ'₁, overlaps and two spectra by network and operator; σ² through training for all."""
    groups = groups_of(rows)
    out = [chart for group in groups for chart in _point_charts(group[-1])]
    variances = tuple(
        Series(
            group[0].name,
            [p["epoch"] for p in group],
            [p["variance"] for p in group],
            [p["variance error"] for p in group],
        )
        for group in groups
    )
    title = "Variance of an element of the curvature"
    out.append(Chart(title, "epoch", "σ²", variances, y_log=True, source="Figure 5.5"))
    return out


def _point_charts(point: TrainingPoint) -> list[Chart]:
    where = f"{point.name}, epoch {point['epoch']}"
    ends = (
        ("largest", "λ'₁", "Figure 5.6", (("full data", float(point["full largest"])),)),
        ("overlaps", "(φ̂₁ᵀφ₁)²", "Theorem 17", ()),
    )
    out = [
        Chart(
            f"{where}: {label} of a batch",
            "batch size B",
            label,
            _over_sizes(point, what),
            x_log=True,
            y_log=what == "largest",
            source=source,
            lines=lines,
            caption=(
                "Batches: mean and standard deviation between them; models: spread or error of the"
                " prediction."
            ),
        )
        for what, label, source, lines in ends
    ]
    spectra = (
        Series(
            f"batch of {point['width size']}",
            point["batch nodes"],
            point["batch weights"],
            style="stems",
        ),
        Series("full data", point["nodes"], point["weights"], style="stems"),
    )
    axis = "share of eigenvalues"
    place = "Figures 5.2, 5.4, 6.1"
    out.append(Chart(f"{where}: spectrum", "eigenvalue", axis, spectra, y_log=True, source=place))
    return out


def _over_sizes(point: TrainingPoint, what: str) -> tuple[Series, ...]:
    sizes = [batches.size for batches in point.batches]
    heights = [each.mean(what).value for each in point.batches]
    seen = Series(
        "batches", sizes, heights, [each.deviation(what) for each in point.batches], "points"
    )
    told = [
        Series(
            model,
            sizes,
            [each.prediction(model, what).value for each in point.batches],
            [
                each.spread(model, what)
                if what == "largest"
                else each.prediction(model, what).stderr
                for each in point.batches
            ],
        )
        for model in point.models
    ]
    return (seen, *told)


@dataclass(frozen=True)
class EigenScale:
    """The networks of a scale, and the ``root`` of the seeds of starts, samples and batches."""

    subjects: tuple[BatchSubject, ...]
    root: int = 0


def cells(config: EigenScale) -> list[Cell]:
    """A cell per network, epoch and operator; training again costs little beside measuring."""
    return [
        {
            "network": subject.network,
            "epoch": epoch,
            "operator": operator,
            "root": config.root,
            **settings_of(subject),
        }
        for subject in config.subjects
        for epoch in subject.epochs
        for operator in subject.operators
    ]


def settings_of(subject: BatchSubject) -> dict[str, Any]:
    """A subject as flat settings; ``noise_samples`` are the effort's."""
    found: dict[str, Any] = asdict(subject) | asdict(subject.effort)
    del found["effort"], found["operators"]
    if subject.measured is None:  # as in stored cells
        del found["measured"]
    return found | {"samples": subject.samples, "noise_samples": subject.effort.samples}


def subject_of(cell: Cell) -> BatchSubject:
    """The subject of a cell, with its operator alone."""
    return subject_through(cell, (cell["operator"],))


def subject_through(cell: Cell, operators: tuple[str, ...]) -> BatchSubject:
    """The subject of a cell with these operators."""
    effort = PointEffort(
        **{field.name: cell[field.name] for field in fields(PointEffort)}
        | {"samples": cell["noise_samples"]}
    )
    names = {field.name for field in fields(BatchSubject)} - {"effort", "operators"}
    settings = {name: cell[name] for name in names if name in cell} | {
        name: tuple(cell[name]) for name in ("epochs", "batch_sizes")
    }
    return BatchSubject(**settings, effort=effort, operators=operators)


def run(cell: Cell, device: str) -> list[Row]:
    """A row for the full data, and one for every batch, with the models' predictions."""
    subject = subject_of(cell)
    upto = replace(
        subject, epochs=tuple(epoch for epoch in subject.epochs if epoch <= cell["epoch"])
    )
    *_, (epoch, problem) = training_stops(upto, load_split(subject.data), cell["root"], device)
    return rows_of(
        [point.with_predictions() for point in measure_point(subject, epoch, problem, cell["root"])]
    )


ASSUMPTIONS = sentences("""
    At paper scale VGG-16 alone, trained on 45,000 images of CIFAR-100 for 34 of 300 epochs; SGD
      with momentum 0.9, no weight decay, no augmentation; on a GPU convolutions train in TF32.
    There the full data are 4,000 of the training images, from which the batches are drawn.
    The cells of the Hessian and the GGN train the network anew; on a GPU the two runs differ by
      rounding.
    Each network is trained once: a claim is about this network, and n counts its batches, not
      networks.
    Batches are drawn without replacement from the full data, ten of each size unless the scale says
      fewer.
    What is said of several epochs and sizes is first averaged over them, batch by batch; four
      batches have a bulk.
    σ² is Algorithm 8 with its 1/N put in and ‖H̄v‖² in place of (vᵀH̄v)².
    Theorem 16 is read as the spiked covariance with the measured spectrum as population, in
      consistent units.
    “Within one standard deviation” is of the batches' own spread, as the error bars of Figure 5.6
      are.
    It holds if more than 48 % of the batches are within one of the prediction, as where it is one
      from their mean.
    A better fit is one by 10 % or more in λ'₁; the thesis gives no number.
    Predictions are judged as made; the error of their σ² or τ² counts where a model's λ'₁ is to be
      the mean.
    A batch's eigenvalues come from a fixed number of Lanczos steps, which see a bulk's edge a
      little inside.
    That λ'₁ exceeds λ₁, equals a model's and falls as 1/b is judged at the last epoch, the first at
      B = 128.
    A network whose last loss is above 0.9·ln C, that of guessing among C classes, tests nothing.
    The directional model is ours: τ² = mean_i‖(H_i − H̄)φ‖² along each eigenvector in place of Pσ².
    That n counts batches, the 48 % and these 10 % were decided after the results were seen.
    Figure 5.6 has training by KFAC too, which eigenvalues-through-training has; here is SGD's half.
""")

EXPERIMENT = Experiment(
    "batch-eigenvalues",
    "What a mini-batch shows of the full data's curvature, predicted and measured",
    SPECTRAL,
    "§§5.5 and 5.6, Theorem 17, Figures 5.2, 5.4, 5.5 and 5.6 (SGD)",
    {scale: EigenScale(subjects) for scale, subjects in SCALES.items()},
    *(cells, run, claims, tables, charts),
    ASSUMPTIONS,
    size=(
        "VGG-16 on CIFAR-100, 45,000 training images, 300 epochs, batches of 128, 10 batches;"
        " Figure 5.2 at epoch 200, Figure 5.4 at epoch 25."
    ),
    sizes=(Size("VGG-16", "cifar100", 45_000, 300),),
)
