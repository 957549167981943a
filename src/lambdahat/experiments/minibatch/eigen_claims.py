"""What the spectral thesis says a mini-batch does to curvature, as code."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from lambdahat.experiments.claims import Claim
from lambdahat.experiments.experiment import Rows
from lambdahat.experiments.minibatch.eigen_rows import Batches, Point, groups_of
from lambdahat.experiments.minibatch.points import CLAIMED_SIZE
from lambdahat.experiments.statistics import Reading, mean_of, paired_difference

CLOSE = math.log(1.1)  # of a mean that counts as predicted
MARGIN = 0.2  # of a slope that counts as the one claimed
SURE = 2.0  # standard errors by which a batch shows more
UNKNOWN = Reading(math.nan, math.nan, math.nan, 0)
THEOREMS = {"additive": "Theorem 14", "multiplicative": "Theorem 16"}

Points = Sequence[Point]


def claims(rows: Rows) -> list[Claim]:
    """Every claim, network by network: at the last epoch where it is about one point of training."""
    makers: tuple[Callable[[Points], Iterable[Claim]], ...] = (
        _larger, _within, _mean, _better, _slope, _variance_grows, _broadens, _overlap,
    )  # fmt: skip
    groups = groups_of(rows)
    return [claim for make in makers for group in groups for claim in make(group)]


def distance(batches: Batches, model: str, what: str = "largest") -> float:
    """Prediction − mean of the batches, in standard deviations between batches; NaN where they do not differ."""
    deviation = batches.deviation(what)
    return (batches.told(model, what).value - batches.mean(what).value) / deviation if deviation > 0 else math.nan


def share_within(batches: Iterable[Batches], model: str, end: str, times: float, ruler: str) -> float:
    """Share of batches no farther from the prediction than ``times`` standard deviations.

    ``ruler`` says whose: "predicted", the spread that the model predicts, or "measured", that between the batches.
    """
    inside = [
        np.abs(each.values(end) - each.told(model, end).value)
        <= times * (each.spread(model, end) if ruler == "predicted" else each.deviation(end))
        for each in batches
    ]
    return float(np.concatenate(inside).mean())


def excess_slope(point: Point) -> Reading:
    """Slope of log(λ'₁ − λ₁) on log b, weighted by the errors of the means; sizes without a clear excess are left out.

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


def near_claimed(point: Point) -> Batches:
    """The batch size nearest the thesis's."""
    return min(point.batches, key=lambda batches: abs(math.log(batches.size / CLAIMED_SIZE)))


def _at(point: Point, text: str) -> str:
    return f"{point.name}: at epoch {point['epoch']} {text}"


def _larger(points: Points) -> Iterator[Claim]:
    """Figures 5.2 and 5.4: extremal eigenvalues are significantly increased."""
    point, batches = points[-1], near_claimed(points[-1])
    ratio = mean_of((batches.values("largest") / point["full largest"]).tolist())
    text = f"the largest eigenvalue of a batch of {batches.size} exceeds the full data's"
    yield Claim(_at(point, text), "§5.5, Figures 5.2, 5.4", "larger", ratio, bound=1.0, unit=" times")


def _within(points: Points) -> Iterator[Claim]:
    """§5.6: both noise processes give results within one standard deviation."""
    for model in points[-1].models:
        source = "this work" if model == "directional" else "§5.6, Figure 5.6"
        yield _near(points, model, "largest", "λ'₁", source)


def _overlap(points: Points) -> Iterator[Claim]:
    """Theorem 17: |φ̂₁ᵀφ₁|² = 1 − Pσ²/(bλ₁²)."""
    for model in points[-1].models:
        source = "Theorem 17, Eq. 6.2" if model == "additive" else "this work"
        yield _near(points, model, "overlaps", "overlap (φ̂₁ᵀφ₁)²", source)


def _near(points: Points, model: str, what: str, words: str, source: str) -> Claim:
    """A claim for most epochs and sizes: at one of them ten batches tell too little."""
    far = [abs(distance(batches, model, what)) for point in points for batches in point.batches]
    text = f"the {model} model's {words} lies within one standard deviation of the batches' mean at most epochs and B"
    return Claim(f"{points[0].name}: {text}", source, "within 1 sd", _share(far), bound=0.5, unit=" of them")


def _share(far: Sequence[float]) -> Reading:
    """The share of distances up to 1; its error is that of the share after one more inside and one more outside."""
    known = [value for value in far if math.isfinite(value)]
    if not known:
        return UNKNOWN
    inside, count = sum(value <= 1 for value in known), len(known)
    smooth = (inside + 1) / (count + 2)
    return Reading(inside / count, math.sqrt(smooth * (1 - smooth) / count), count - 1, count)


def _mean(points: Points) -> Iterator[Claim]:
    """Theorems 14 and 16 as equations for the mean over batches: ln(predicted/measured), mean over batch sizes."""
    point = points[-1]
    for model in point.models:
        found = [(each.told(model, "largest"), each.mean("largest")) for each in point.batches]
        known = [(told, mean) for told, mean in found if told.value > 0 and mean.value > 0]
        logs = [math.log(told.value / mean.value) for told, mean in known]
        errors = [math.hypot(told.stderr / told.value, mean.stderr / mean.value) for told, mean in known]
        dof = sum(mean.dof for _, mean in known)
        reading = Reading(sum(logs) / len(logs), math.hypot(*errors) / len(logs), dof) if known else UNKNOWN
        text = f"the {model} model's λ'₁ is the mean over batches within 10 %, on average over their sizes"
        yield Claim(_at(point, text), THEOREMS.get(model, "this work"), "equal", reading, "within", 0.0, CLOSE,
                    " = ln(predicted/measured)")  # fmt: skip


def _better(points: Points) -> Iterator[Claim]:
    """§5.6: the multiplicative noise process gives a better fit; |ln(predicted/measured)| over epochs and sizes."""
    for better, than, source in (("multiplicative", "additive", "§5.6, Figure 5.6"),
                                 ("directional", "multiplicative", "this work")):  # fmt: skip
        if {better, than} <= set(points[0].models):
            gap = paired_difference(_misses(points, than), _misses(points, better))
            text = f"{points[0].name}: the {better} model fits λ'₁ better than the {than}, over epochs and sizes"
            yield Claim(text, source, "better", gap, unit=" in |ln(predicted/measured)|")


def _misses(points: Points, model: str) -> dict[tuple[int, int], float]:
    """|ln(predicted/measured)| of λ'₁ at each epoch and batch size."""
    found = {}
    for point in points:
        for batches in point.batches:
            told, mean = batches.told(model, "largest").value, batches.mean("largest").value
            if told > 0 and mean > 0:
                found[point["epoch"], batches.size] = abs(math.log(told / mean))
    return found


def _slope(points: Points) -> Iterator[Claim]:
    """Theorem 14: what a batch adds to an outlier falls as 1/b."""
    yield Claim(_at(points[-1], "λ'₁ − λ₁ falls as b^(−1)"), "Theorem 14", "slope −1", excess_slope(points[-1]),
                "within", -1.0, MARGIN)  # fmt: skip


def _variance_grows(points: Points) -> Iterator[Claim]:
    """Figure 5.5: the variance of curvature grows through training."""
    first, last = points[0], points[-1]
    if len(points) > 1 and first["variance"] > 0:
        ratio = last["variance"] / first["variance"]
        relative = [each["variance error"] / each["variance"] for each in (first, last)]
        reading = Reading(math.log(ratio), math.hypot(*relative))
        text = f"σ² grows from epoch {first['epoch']} to {last['epoch']}"
        yield Claim(f"{first.name}: {text}", "§5.6, Figure 5.5", "grows", reading, unit=" = ln of the ratio")


def _broadens(points: Points) -> Iterator[Claim]:
    """Figures 5.2 and 5.4: the bulk of a batch's spectrum is wider than that of the full data, over all epochs."""
    ratios = [
        math.log(width / point["width"])
        for point in points
        for width in point["batch widths"]
        if width > 0 and point["width"] > 0
    ]
    text = f"{points[0].name}: the bulk of a batch of {points[0]['width size']} is wider than the full data's"
    yield Claim(text, "§5.5, Figures 5.2, 5.4", "wider", mean_of(ratios), unit=" = ln of the ratio")
