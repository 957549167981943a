"""What §5.6 of the spectral thesis says of curvature through training by SGD and KFAC, as code;
n counts seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from lambdahat.experiments.kit.cells import Rows
from lambdahat.experiments.kit.claims import Claim, mean_of, paired_difference
from lambdahat.experiments.minibatch.eigen_claims import CLOSE, LEARNT, OURS, near_claimed
from lambdahat.experiments.minibatch.eigen_rows import Batches, Point
from lambdahat.experiments.minibatch.evolution_rows import (
    Courses,
    courses_of,
    distance,
    excess,
    miss,
)

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
    return [*own, *_compared(every)]


def unlearnt(courses: Courses) -> str:
    """Why these are no trained networks: of how many seeds the last loss is that of guessing.
    Empty where of none.
    """
    losses = [points[-1]["loss"] for points in courses.seeds.values()]
    missed = sum(not loss < LEARNT for loss in losses)
    return (
        f"by {courses.optimizer} {missed} of {len(losses)} seeds end near guessing"
        if missed
        else ""
    )


def _text(courses: Courses, text: str) -> str:
    return f"{courses.name}, {courses.optimizer}: {text}"


def _span(courses: Courses) -> str:
    return f"from epoch {courses.epochs[0]} to {courses.epochs[-1]}"


def _grows(courses: Courses) -> Iterator[Claim]:
    """Figures 5.5 and 5.6: the variance of curvature grows through training."""
    ratios = courses.by_seed(lambda points: _log(points[-1], points[0], "variance"))
    yield Claim(
        _text(courses, f"σ² grows {_span(courses)}"),
        "§5.6, Figures 5.5, 5.6",
        "grows",
        mean_of(list(ratios.values())),
        unit=LOG,
        unmet=unlearnt(courses),
    )


def _log(upper: Point, lower: Point, name: str) -> float:
    return math.log(upper[name] / lower[name]) if upper[name] > 0 and lower[name] > 0 else math.nan


def _larger(courses: Courses) -> Iterator[Claim]:
    """Figures 5.2, 5.4 and 5.6: batches have larger extremal eigenvalues."""
    size = near_claimed(courses.first[-1]).size
    ratios = courses.by_seed(lambda points: _excess_ratio(points[-1]))
    text = f"at epoch {courses.epochs[-1]} the mean λ₁ of batches of {size} exceeds the full data's"
    yield Claim(
        _text(courses, text),
        "§5.5, Figures 5.2, 5.4, 5.6",
        "larger",
        mean_of(list(ratios.values())),
        unit=LOG,
        unmet=unlearnt(courses),
    )


def _excess_ratio(point: Point) -> float:
    return math.log(near_claimed(point).mean("largest").value / point["full largest"])


def _diverges(courses: Courses) -> Iterator[Claim]:
    """§5.6: the batches' extremal eigenvalues are expected to diverge from the full data's
    during training.
    """
    moved = courses.by_seed(lambda points: excess(points[-1]) - excess(points[0]))
    text = (
        f"the mean λ₁ of batches of {near_claimed(courses.first[-1]).size} moves away from the full"
        " data's"
    )
    yield Claim(
        _text(courses, f"{text} {_span(courses)}"),
        "§5.6, Figure 5.6",
        "diverges",
        mean_of(list(moved.values())),
        unit=" = λ'₁ − λ₁ at the end less that at the start, over seeds",
        unmet=unlearnt(courses),
    )


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
    points: Sequence[Point], model: str, measure: Callable[[Batches, str], float]
) -> float:
    """How far a model is from the batches of the thesis's size, mean over the epochs where that
    can be told.
    """
    return mean_of([abs(measure(near_claimed(point), model)) for point in points]).value


def _compared(every: Sequence[Courses]) -> Iterator[Claim]:
    """KFAC's curvature against SGD's at the last epoch, from the same starts; the thesis draws
    both, without words.
    """
    by_place = {(courses.name, courses.optimizer): courses for courses in every}
    for (name, optimizer), ours in by_place.items():
        other = by_place.get((name, "SGD"))
        if optimizer != "KFAC" or other is None:
            continue
        for what, column in (("λ₁ of the full data", "full largest"), ("σ²", "variance")):
            upper, lower = (each.by_seed(partial(_last, column=column)) for each in (ours, other))
            text = f"{name}: at epoch {ours.epochs[-1]} KFAC's {what} is larger than SGD's"
            yield Claim(
                text,
                "this work",
                "larger",
                paired_difference(upper, lower),
                unit=LOG,
                unmet=unlearnt(other) or unlearnt(ours),
                own=True,
            )


def _last(points: Sequence[Point], column: str) -> float:
    value = float(points[-1][column])
    return math.log(value) if value > 0 else math.nan
