"""What the spectral thesis says a mini-batch does to curvature, as code.

Each network was trained once, so that a claim is about that network and its batches, which were
drawn independently: n counts batches, by their number among those of each epoch and size. What is
said of several epochs or sizes is first averaged over them, batch by batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from lambdahat.experiments.kit.cells import Rows
from lambdahat.experiments.kit.claims import Claim, Reading, mean_of, paired_difference
from lambdahat.experiments.minibatch.eigen_rows import Batches, Point, groups_of
from lambdahat.experiments.minibatch.points import CLAIMED_SIZE

CLOSE = math.log(1.1)  # of a mean that counts as predicted, and by which a fit is to be better
MARGIN = 0.2  # of a slope that counts as the one claimed
SURE = 2.0  # standard errors by which a batch shows more
# of normal batches, within one deviation of what is one deviation off
AT_ONE = float(norm.cdf(2) - norm.cdf(0))
LEARNT = 0.9 * math.log(10)  # a loss below that of guessing among ten classes
UNKNOWN = Reading(math.nan, math.nan, math.nan, 0)
THEOREMS = {"additive": "Theorem 14", "multiplicative": "Theorem 16"}
OURS = "directional"  # the model that is not the thesis's

Points = Sequence[Point]


def claims(rows: Rows) -> list[Claim]:
    """Every claim, network by network: at the last epoch where it is about one point of
    training.
    """
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


def unlearnt(points: Points) -> str:
    """Why a network is no trained one: its last loss is near that of guessing. Empty where it is
    below it.
    """
    loss = points[-1]["loss"]
    return (
        ""
        if loss < LEARNT
        else f"its loss at epoch {points[-1]['epoch']} is {loss:.3g}, near guessing"
    )


def share_within(
    batches: Iterable[Batches], model: str, end: str, times: float, ruler: str
) -> float:
    """Share of batches no farther from the prediction than ``times`` standard deviations.

    ``ruler`` says whose: "predicted", the spread that the model predicts, or "measured", that
    between the batches.
    """
    return float(
        np.concatenate([_inside(each, model, end, times, ruler) for each in batches]).mean()
    )


def _inside(batches: Batches, model: str, what: str, times: float, ruler: str) -> NDArray[np.bool_]:
    width = batches.spread(model, what) if ruler == "predicted" else batches.deviation(what)
    found: NDArray[np.bool_] = (
        np.abs(batches.values(what) - batches.told(model, what).value) <= times * width
    )
    return found


def excess_slope(point: Point) -> Reading:
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


def near_claimed(point: Point) -> Batches:
    """The batch size nearest the thesis's."""
    return min(point.batches, key=lambda batches: abs(math.log(batches.size / CLAIMED_SIZE)))


def _at(point: Point, text: str) -> str:
    return f"{point.name}: at epoch {point['epoch']} {text}"


def _larger(points: Points) -> Iterator[Claim]:
    """Figures 5.2 and 5.4: extremal eigenvalues are significantly increased."""
    point, batches = points[-1], near_claimed(points[-1])
    ratio = mean_of((batches.values("largest") / point["full largest"]).tolist())
    text = (
        f"the largest eigenvalue of this network's batches of {batches.size} exceeds the full"
        " data's"
    )
    yield Claim(
        _at(point, text),
        "§5.5, Figures 5.2, 5.4",
        "larger",
        ratio,
        bound=1.0,
        unit=" times",
        unmet=unlearnt(points),
    )


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
    """Batches within one deviation of a prediction: more than AT_ONE of them if it is within one
    of their mean.
    """
    reading = mean_of(
        _by_batch(
            points, lambda each: _inside(each, model, what, 1, "measured").astype(float), what
        )
    )
    text = (
        f"the {model} model's {words} is within one standard deviation of this network's batches,"
        " over epochs and B"
    )
    return Claim(
        f"{points[0].name}: {text}",
        "this work" if own else source,
        "within 1 sd",
        reading,
        bound=AT_ONE,
        unit=" of them",
        unmet=unlearnt(points),
        own=own,
    )


def _by_batch(
    points: Points, value: Callable[[Batches], NDArray[np.float64]], what: str
) -> list[float]:
    """A value for each batch, its mean over epochs and sizes; those whose batches do not differ
    are left out.
    """
    every = [
        batches for point in points for batches in point.batches if batches.deviation(what) > 0
    ]
    fewest = min((len(batches.rows) for batches in every), default=0)
    found = np.array([value(batches)[:fewest] for batches in every])
    return [float(number) for number in found.mean(0)] if every else []


def _mean(points: Points) -> Iterator[Claim]:
    """Theorems 14 and 16 as equations for the mean over batches: ln(predicted/measured), mean
    over batch sizes.
    """
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


def _mean_ratio(point: Point, model: str) -> Reading:
    """The mean of ln(predicted/measured) over sizes.

    The batches of different sizes are different draws, while the error of the prediction is one and
    the same for all. Degrees of freedom as Welch's.
    """
    found = [(each.told(model, "largest"), each.mean("largest")) for each in point.batches]
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
    """§5.6: the multiplicative noise process gives a better fit; |ln(predicted/measured)| of
    single batches.
    """
    for better, than in (("multiplicative", "additive"), (OURS, "multiplicative")):
        if {better, than} <= set(points[0].models):
            gap = paired_difference(_misses(points, than), _misses(points, better))
            text = (
                f"the {better} model fits λ'₁ of this network's batches better than the {than}, by"
                " 10 % or more"
            )
            own = better == OURS
            yield Claim(
                f"{points[0].name}: {text}, over epochs and B",
                "this work" if own else "§5.6, Figure 5.6",
                "better",
                gap,
                bound=CLOSE,
                unit=" in |ln(predicted/measured)|",
                unmet=unlearnt(points),
                own=own,
            )


def _misses(points: Points, model: str) -> dict[int, float]:
    """|ln(predicted/measured)| of λ'₁ for each batch, its mean over epochs and sizes."""

    def missed(batches: Batches) -> NDArray[np.float64]:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.abs(np.log(batches.told(model, "largest").value / batches.values("largest")))

    return dict(enumerate(_by_batch(points, missed, "largest")))


def _slope(points: Points) -> Iterator[Claim]:
    """Theorem 14: what a batch adds to an outlier falls as 1/b."""
    text = "λ'₁ − λ₁ of this network's batches falls as b^(−1)"
    yield Claim(
        _at(points[-1], text),
        "Theorem 14",
        "slope −1",
        excess_slope(points[-1]),
        "within",
        -1.0,
        MARGIN,
        " over the means of batch sizes",
        unlearnt(points),
    )


def _variance_grows(points: Points) -> Iterator[Claim]:
    """Figure 5.5: the variance of curvature grows through training."""
    first, last = points[0], points[-1]
    if len(points) > 1 and first["variance"] > 0:
        ratio = last["variance"] / first["variance"]
        relative = [each["variance error"] / each["variance"] for each in (first, last)]
        reading = Reading(math.log(ratio), math.hypot(*relative))
        text = f"σ² grows from epoch {first['epoch']} to {last['epoch']} of this one run"
        yield Claim(
            f"{first.name}: {text}",
            "§5.6, Figure 5.5",
            "grows",
            reading,
            unit=" = ln of the ratio",
            unmet=unlearnt(points),
        )


def _broadens(points: Points) -> Iterator[Claim]:
    """Figures 5.2 and 5.4: the bulk of a batch's spectrum is wider than that of the full data,
    mean over epochs.
    """
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
    yield Claim(
        text,
        "§5.5, Figures 5.2, 5.4",
        "wider",
        mean_of(ratios),
        unit=" = ln of the ratio",
        unmet=unlearnt(points),
    )
