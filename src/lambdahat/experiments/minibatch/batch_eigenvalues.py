"""Extreme eigenvalues of mini-batch curvature (§§5.5 and 5.6, Theorem 17).

Each network was trained once, so that a claim is about that network and its batches, which were
drawn independently: n counts batches, by their number among those of each epoch and size. What is
said of several epochs or sizes is first averaged over them, batch by batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from lambdahat.experiments import kit
from lambdahat.experiments.kit.cells import Cell, Row, Rows
from lambdahat.experiments.minibatch import batch_points
from lambdahat.randommatrix import effective_batch

CLOSE = math.log(1.1)  # of a mean that counts as predicted, and by which a fit is to be better
CLEAR_EXCESS = 2.0  # standard errors by which a batch shows more
# of normal batches, within one deviation of what is one deviation off
AT_ONE = float(norm.cdf(2) - norm.cdf(0))
LEARNT = 0.9  # of the loss of guessing

THEOREMS = {"additive": "Theorem 14", "multiplicative": "Theorem 16"}
OURS = "directional"  # the model that is not the thesis's

Points = Sequence[batch_points.TrainingPoint]

CLAIMS = kit.ClaimTexts("""
    larger: {last.name}: at epoch {last[epoch]} the largest eigenvalue of this network's batches of
      {size} exceeds the full data's | §5.5, Figures 5.2, 5.4 | larger | above 1 | times
    within: {last.name}: the {model} model's λ'₁ is within one standard deviation of this network's
      batches, over epochs and B | {source} | within 1 sd | above | of them
    mean: {last.name}: at epoch {last[epoch]} the {model} model's λ'₁ is the mean of this network's
      batches within 10 %, on average over their sizes
      | {source} | equal | within | = ln(predicted/measured)
    better: {last.name}: the {model} model fits λ'₁ of this network's batches better than the
      {other}, by 10 % or more, over epochs and B
      | {source} | better | above | in |ln(predicted/measured)|
    slope: {last.name}: at epoch {last[epoch]} λ'₁ − λ₁ of this network's batches falls as b^(−1)
      | Theorem 14 | slope −1 | within 0.2 of -1 | over the means of batch sizes
    grows: {last.name}: σ² grows from epoch {first[epoch]} to {last[epoch]} of this one run
      | §5.6, Figure 5.5 | grows | above | = ln of the ratio
    wider: {last.name}: the bulk of this network's batches of {size} is wider than the full data's,
      over epochs | §5.5, Figures 5.2, 5.4 | wider | above | = ln of the ratio
    overlap: {last.name}: the {model} model's overlap (φ̂₁ᵀφ₁)² is within one standard deviation of
      this network's batches, over epochs and B | {source} | within 1 sd | above | of them
""")
ORDER = ("larger", "within", "mean", "better", "slope", "grows", "wider", "overlap")


def claims(rows: Rows) -> list[kit.Claim]:
    """Every claim, network by network, at the last epoch unless it compares epochs."""
    pairs = [pair for group in batch_points.groups_of(rows) for pair in _claims(group)]
    return [claim for _, claim in sorted(pairs, key=lambda pair: ORDER.index(pair[0]))]


def _claims(points: Points) -> Iterator[tuple[str, kit.Claim]]:
    """The claims of one network and operator, each with its key; those of our model are ours."""
    first, last, unmet = points[0], points[-1], untrained_reason(points)
    models = last.models

    def claim(key: str, reading: kit.Reading, source: str = "", **values: Any) -> Any:
        own = values.setdefault("own", values.get("model") == OURS)
        values["source"] = "this work" if own else source
        return key, CLAIMS(key, reading, first=first, last=last, unmet=unmet, **values)

    batches = batches_near_claim(last)
    ratios = batches.values("largest") / last["full largest"]
    yield claim("larger", kit.mean_of(ratios.tolist()), size=batches.size)
    for model in models:
        near, far = (_share_within_one(points, model, what) for what in ("largest", "overlaps"))
        yield claim("within", near, "§5.6, Figure 5.6", model=model, bound=AT_ONE)
        theorem, mean = THEOREMS.get(model, ""), _mean_ratio(last, model)
        yield claim("mean", mean, theorem, model=model, margin=CLOSE)
        own = {"own": model != "additive", "bound": AT_ONE}
        yield claim("overlap", far, "Theorem 17, Eq. 6.2", model=model, **own)
    for better, than in (("multiplicative", "additive"), (OURS, "multiplicative")):
        if {better, than} <= set(models):
            gap = kit.paired_difference(_misses(points, than), _misses(points, better))
            names = {"model": better, "other": than}
            yield claim("better", gap, "§5.6, Figure 5.6", bound=CLOSE, **names)
    yield claim("slope", excess_slope(last))
    if len(points) > 1 and first["variance"] > 0:
        ratio = math.log(last["variance"] / first["variance"])
        errors = [each["variance error"] / each["variance"] for each in (first, last)]
        yield claim("grows", kit.Reading(ratio, math.hypot(*errors)))
    wide = [point for point in points if point["width"] > 0]
    with np.errstate(divide="ignore"):
        widths = [np.log(np.array(point["batch widths"]) / point["width"]) for point in wide]
    means = [float(np.mean(batch)) for batch in zip(*widths, strict=True)]
    yield claim("wider", kit.mean_of(means), size=first["width size"])


def has_learnt(point: batch_points.TrainingPoint) -> bool:
    """Whether the loss is below that of guessing among the classes, by a tenth."""
    classes = 100 if point.row.get("data") == "cifar100" else 10
    return bool(point["loss"] < LEARNT * math.log(classes))


def untrained_reason(points: Points) -> str:
    """Why a network counts as untrained: its last loss is near guessing; "" if below it."""
    last = points[-1]
    near = f"its loss at epoch {last['epoch']} is {last['loss']:.3g}, near guessing"
    return "" if has_learnt(last) else near


def share_within(
    batches: Iterable[batch_points.SizeBatches], model: str, end: str, times: float, ruler: str
) -> float:
    """Share of batches no farther from the prediction than ``times`` standard deviations.

    ``ruler`` says whose: "predicted", the spread that the model predicts, or "measured", that
    between the batches.
    """
    inside = [_inside(each, model, end, times, ruler) for each in batches]
    return float(np.concatenate(inside).mean())


def _inside(
    batches: batch_points.SizeBatches, model: str, what: str, times: float, ruler: str
) -> NDArray[np.bool_]:
    width = batches.spread(model, what) if ruler == "predicted" else batches.deviation(what)
    miss = np.abs(batches.values(what) - batches.prediction(model, what).value)
    return np.asarray(miss <= times * width)


def excess_slope(point: batch_points.TrainingPoint) -> kit.Reading:
    """Slope of log(λ'₁ − λ₁) on log b over the sizes with a clear excess, weighted by its errors.

    Theorem 14 gives −1 while λ₁ is an outlier.
    """
    seen = []
    for batches in point.batches:
        mean, size = batches.mean("largest"), effective_batch(batches.size, point["population"])
        excess = mean.value - point["full largest"]
        if excess > CLEAR_EXCESS * mean.stderr > 0:
            seen.append((math.log(size), math.log(excess), excess / mean.stderr))
    if len(seen) < 3:
        return kit.UNKNOWN
    x, y, weight = np.array(seen).T
    coefficients, covariance = np.polyfit(x, y, 1, w=weight, cov="unscaled")
    misfit = float((((np.polyval(coefficients, x) - y) * weight) ** 2).sum()) / (len(seen) - 2)
    error = math.sqrt(covariance[0, 0] * max(misfit, 1.0))
    return kit.Reading(float(coefficients[0]), error, len(seen) - 2, len(seen))


def batches_near_claim(point: batch_points.TrainingPoint) -> batch_points.SizeBatches:
    """The batch size nearest the thesis's."""
    return min(
        point.batches, key=lambda batches: abs(math.log(batches.size / batch_points.CLAIMED_SIZE))
    )


def _share_within_one(points: Points, model: str, what: str) -> kit.Reading:
    """Share of batches within one deviation of a prediction: over AT_ONE if it is within one of
    the mean.
    """

    def inside(batches: batch_points.SizeBatches) -> NDArray[np.float64]:
        return _inside(batches, model, what, 1, "measured").astype(float)

    return kit.mean_of(_by_batch(points, inside, what))


def _by_batch(
    points: Points, value: Callable[[batch_points.SizeBatches], NDArray[np.float64]], what: str
) -> list[float]:
    """A value per batch, its mean over epochs and sizes, without sizes whose batches agree."""
    every = [
        batches for point in points for batches in point.batches if batches.deviation(what) > 0
    ]
    fewest = min((len(batches.rows) for batches in every), default=0)
    values = np.array([value(batches)[:fewest] for batches in every])
    return [float(number) for number in values.mean(0)] if every else []


def _mean_ratio(point: batch_points.TrainingPoint, model: str) -> kit.Reading:
    """The mean of ln(predicted/measured) over sizes.

    The batches of different sizes are different draws, while the error of the prediction is one and
    the same for all. Degrees of freedom as Welch's.
    """
    pairs = [(each.prediction(model, "largest"), each.mean("largest")) for each in point.batches]
    known = [
        (predicted, mean) for predicted, mean in pairs if predicted.value > 0 and mean.value > 0
    ]
    if not known:
        return kit.UNKNOWN
    logs = [math.log(predicted.value / mean.value) for predicted, mean in known]
    squares = [(mean.stderr / mean.value / len(known)) ** 2 for _, mean in known]
    common = sum(predicted.stderr / predicted.value for predicted, _ in known) / len(known)
    weights = sum(square**2 / mean.dof for square, (_, mean) in zip(squares, known, strict=True))
    total = sum(squares) + common**2
    dof = total**2 / weights if weights else math.inf
    count = min(mean.count for _, mean in known)
    return kit.Reading(sum(logs) / len(logs), math.sqrt(total), dof, count)


def _misses(points: Points, model: str) -> dict[int, float]:
    """|ln(predicted/measured)| of λ'₁ for each batch, its mean over epochs and sizes."""

    def log_errors(batches: batch_points.SizeBatches) -> NDArray[np.float64]:
        predicted = batches.prediction(model, "largest").value
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.abs(np.log(predicted / batches.values("largest")))

    return dict(enumerate(_by_batch(points, log_errors, "largest")))


SHARES = "model | 1 sd predicted | 2 sd | 1 sd measured | 2 sd  | predicted/measured"


def tables(rows: Rows) -> Iterator[kit.Table]:
    """Shares within one and two deviations, λ'₁ and overlaps by batch size, variances, bulks."""
    groups = batch_points.groups_of(rows)
    for end, what in (("largest", "λ'₁"), ("smallest", "λ'_P")):
        # λ'_P is 0 for every batch of a definite operator
        shown = [g for g in groups if end == "largest" or any(point["indefinite"] for point in g)]
        lines = []
        for group in shown:
            every = [batches for point in group for batches in point.batches]
            models = group[0].models
            lines += [(group[0].name, *share_cells(every, model, end)) for model in models]
        if lines:
            title = f"Share of batches whose {what} lies within one and two standard deviations of"
            yield kit.table(f"{title} the prediction", f"network, operator | {SHARES}", lines)
    yield from _by_size(groups)
    columns = {"loss": ".3g", "variance": "", "anisotropy": ".3g", "full largest": ".3g"}
    columns |= {"full smallest": ".2g", "parameters": ",", "population": ","}
    lines = []
    for point in (point for group in groups for point in group):
        texts = {name: format(point[name], form) for name, form in columns.items()}
        texts["variance"] = _text(point["variance"], point["variance error"])
        lines.append((point.name, point["epoch"], *texts.values()))
    title = "Per-element variance and extreme eigenvalues of the full data through training"
    header = "network, operator | epoch | loss | σ² | τ²/(Pσ²) | λ₁ | λ_P | P | N"
    yield kit.table(title, header, lines)
    yield _bulks(groups)


def share_cells(every: Sequence[batch_points.SizeBatches], model: str, end: str) -> tuple[str, ...]:
    """The model and the shares of batches within one and two deviations, as in ``SHARES``."""
    rulers = [(times, ruler) for ruler in ("predicted", "measured") for times in (1, 2)]
    shares = [f"{share_within(every, model, end, *ruler):.0%}" for ruler in rulers]
    ratios = [each.prediction(model, end).value / each.mean(end).value for each in every]
    # a model that is never below 0 has no λ'_P to compare
    span = f"{min(ratios):.2f} … {max(ratios):.2f}" if max(ratios) > 0 else "none"
    return (model, *shares, span)


def _by_size(groups: Sequence[Points]) -> Iterator[kit.Table]:
    """λ'₁ and overlap over batch sizes at the last epoch, a table for each network."""
    for network in dict.fromkeys(group[0]["network"] for group in groups):
        last = [group[-1] for group in groups if group[0]["network"] == network]
        models, lines = last[0].models, []
        for point in last:
            lines += [_size_line(point, batches, models) for batches in point.batches]
        header = ("epoch, operator", "B", "λ₁", "λ'₁ of batches", *models, "overlap of batches")
        title = f"{network}: mean ± sd over batches, prediction ± spread of one batch"
        yield kit.table(title, (*header, *(f"{model} " for model in models)), lines)


def _size_line(
    point: batch_points.TrainingPoint, batches: batch_points.SizeBatches, models: list[str]
) -> tuple[str, ...]:
    values = [batches.mean("largest"), *(batches.prediction(m, "largest") for m in models)]
    spreads = [batches.deviation("largest"), *(batches.spread(m, "largest") for m in models)]
    return (
        f"{point['epoch']}, {point['operator']}",
        f"{batches.size:,}",
        f"{point['full largest']:.3g}",
        *(f"{a.value:.3g} ± {spread:.2g}" for a, spread in zip(values, spreads, strict=True)),
        f"{batches.mean('overlaps').value:.2f} ± {batches.deviation('overlaps'):.2f}",
        *(f"{batches.prediction(m, 'overlaps').value:.2f}" for m in models),
    )


def _bulks(groups: Sequence[Points]) -> kit.Table:
    """Bulk and outliers of the full data, bulks of batches, last epoch (Figures 5.2, 5.4, 6.1)."""
    lines = []
    for point in (group[-1] for group in groups):
        edges = zip(point["bulk"], point["bulk errors"], strict=True)
        bulk = " … ".join(_text(*edge) for edge in edges)
        apart = ", ".join(f"{value:.3g}" for value in point["outliers"]) or "none surely"
        width = kit.mean_of(point["batch widths"])
        widths = f"{point['width']:.3g}", _text(width.value, width.stderr)
        lines.append((point.name, point["epoch"], *widths, bulk, apart))
    widths_of = f"width | width, B = {groups[0][-1]['width size']}"
    title = "Width of the bulk (Ritz weights of 5/P or more), of a batch's bulk; bulk fitted to the"
    header = f"network, operator | epoch | {widths_of} | fitted bulk | outliers"
    return kit.table(f"{title} full data, outliers", header, lines)


def _text(value: float, error: float) -> str:
    return f"{value:.3g} ± {error:.1g}" if error > 0 else f"{value:.3g}"


def charts(rows: Rows) -> Iterator[kit.Chart]:
    """λ'₁, overlaps and two spectra by network and operator; σ² through training for all."""
    groups = batch_points.groups_of(rows)
    for point in (group[-1] for group in groups):
        yield from _point_charts(point)
    variances = []
    for group in groups:
        names = ("epoch", "variance", "variance error")
        epochs, values, errors = ([point[name] for point in group] for name in names)
        band = "± standard error over samples"
        variances.append(kit.Series(group[0].name, epochs, values, errors, band=band))
    title = "Variance of an element of the curvature"
    yield kit.Chart(title, "epoch", "σ²", tuple(variances), y_log=True, source="Figure 5.5")


def _point_charts(point: batch_points.TrainingPoint) -> Iterator[kit.Chart]:
    where = f"{point.name}, epoch {point['epoch']}"
    full = (("full data", float(point["full largest"])),)
    caption = (
        "Batches: mean and standard deviation between them; models: spread or error of the"
        " prediction."
    )
    for what, label, source, lines in (
        ("largest", "λ'₁", "Figure 5.6", full),
        ("overlaps", "(φ̂₁ᵀφ₁)²", "Theorem 17", ()),
    ):
        labels, series = (f"{where}: {label} of a batch", "batch size B"), _over_sizes(point, what)
        more: dict[str, Any] = {"source": source, "lines": lines, "caption": caption}
        yield kit.Chart(*labels, label, series, x_log=True, y_log=what == "largest", **more)
    name = f"batch of {point['width size']}"
    spectra = (
        kit.Series(name, point["batch nodes"], point["batch weights"], style="stems"),
        kit.Series("full data", point["nodes"], point["weights"], style="stems"),
    )
    labels, source = ("eigenvalue", "share of eigenvalues"), "Figures 5.2, 5.4, 6.1"
    yield kit.Chart(f"{where}: spectrum", *labels, spectra, y_log=True, source=source)


def _over_sizes(point: batch_points.TrainingPoint, what: str) -> tuple[kit.Series, ...]:
    batches = point.batches
    sizes, heights = [each.size for each in batches], [each.mean(what).value for each in batches]
    between = [each.deviation(what) for each in batches]
    series = [kit.Series("batches", sizes, heights, between, "points")]
    for model in point.models:
        predicted = [each.prediction(model, what) for each in batches]
        errors = [reading.stderr for reading in predicted]
        if what == "largest":
            errors = [each.spread(model, what) for each in batches]
        series.append(kit.Series(model, sizes, [reading.value for reading in predicted], errors))
    return tuple(series)


def cells(subjects: Iterable[Cell]) -> list[Cell]:
    """A cell per network, epoch and operator; training again costs little beside measuring."""
    grid = []
    for subject in subjects:
        base = {"network": subject["network"], "root": 0, **subject}
        grid += kit.grid(base, epoch=subject["epochs"], operator=base.pop("operators"))
    return grid


def run(cell: Cell, device: str) -> list[Row]:
    """A row for the full data, and one for every batch, with the models' predictions."""
    before = [epoch for epoch in cell["epochs"] if epoch <= cell["epoch"]]
    own, root = {**cell, "epochs": before, "operators": [cell["operator"]]}, cell["root"]
    split = batch_points.load_split(cell["data"])
    *_, (epoch, problem) = batch_points.training_stops(own, split, root, device)
    points = batch_points.measure_point(own, epoch, problem, root)
    return batch_points.rows_of([point.with_predictions() for point in points])


ASSUMPTIONS = kit.sentences("""
    At paper scale VGG-16 alone, trained on 45,000 images of CIFAR-100 for 34 of 300 epochs; SGD
      with momentum 0.9, no weight decay, no augmentation; on a GPU convolutions train in TF32.
    At that scale the full data are 4,000 of the training images, from which the batches are drawn.
    The cells of the Hessian and the GGN train the network anew; on a GPU the two runs differ by
      rounding.
    Each network is trained once: a claim is about this network, and n counts its batches, not
      networks.
    Batches are drawn without replacement from the full data, ten of each size unless the scale says
      fewer.
    Claims about several epochs and sizes are judged on averages over them, batch by batch; the bulk
      is computed for four batches.
    σ² is that of Algorithm 8 with the missing factor 1/N, and with ‖H̄v‖² in place of (vᵀH̄v)².
    Theorem 16 is read as the spiked covariance with the measured spectrum as population, in
      consistent units.
    “Within one standard deviation” is of the batches' own spread, as the error bars of Figure 5.6
      are.
    Such a claim holds if more than 48 % of the batches are within one standard deviation of the
      prediction, the share at which the prediction is one standard deviation from their mean.
    A fit counts as better if λ'₁ is closer by 10 % or more; the thesis gives no number.
    Predictions are judged without their own error, except where the mean λ'₁ is predicted: there
      the error of σ² or τ² counts.
    A batch's eigenvalues come from a fixed number of Lanczos steps, which place the edge of a bulk
      slightly too far inside.
    That λ'₁ exceeds λ₁, equals a model's and falls as 1/b is judged at the last epoch, the first at
      B = 128.
    A network whose final loss is above 0.9·ln C, where ln C is the loss of guessing among C
      classes, is not judged.
    The directional model is ours: τ² = mean_i‖(H_i − H̄)φ‖² along each eigenvector in place of Pσ².
    That n counts batches, the 48 % and the 10 % were decided after the results had been seen.
    Figure 5.6 also shows training by KFAC, which is in eigenvalues-through-training; this
      experiment has the half with SGD.
""")

EXPERIMENT = kit.Experiment(
    "batch-eigenvalues",
    "What a mini-batch shows of the full data's curvature, predicted and measured",
    kit.SPECTRAL,
    "§§5.5 and 5.6, Theorem 17, Figures 5.2, 5.4, 5.5 and 5.6 (SGD)",
    {scale: cells(subjects) for scale, subjects in batch_points.SCALES.items()},
    *(run, claims, tables, charts),
    ASSUMPTIONS,
    size=(
        "VGG-16 on CIFAR-100, 45,000 training images, 300 epochs, batches of 128, 10 batches;"
        " Figure 5.2 at epoch 200, Figure 5.4 at epoch 25."
    ),
    sizes=(kit.Size("VGG-16", "cifar100", 45_000, 300),),
)
