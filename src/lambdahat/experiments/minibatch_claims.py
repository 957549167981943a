"""What the spectral thesis says a mini-batch does to curvature, as code."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from lambdahat.experiments.minibatch_points import MODELS, BatchCell, CurvaturePoint
from lambdahat.experiments.reproduction import FAILS, HOLDS, OPEN, SURE, Verdict, judged, paired_gap, worst
from lambdahat.results import Estimate, student_quantile

CLAIMED_SIZE = 128  # the batch of Figures 5.2, 5.4 and 5.6
REJECTED = 0.05
CERTAIN = 0.25  # a slope with a larger standard error decides nothing

Points = Sequence[CurvaturePoint]
Cells = list[tuple[CurvaturePoint, BatchCell]]


def judge(points: Points) -> tuple[Verdict, ...]:
    """The verdict on every claim, network by network."""
    claims: tuple[Callable[[Points], Iterable[Verdict]], ...] = (
        _larger, _within, _mean, _better, _slope, _variance_grows, _broadens, _overlap,
    )  # fmt: skip
    networks = dict.fromkeys((point.network, point.operator) for point in points)
    groups = [[p for p in points if (p.network, p.operator) == key] for key in networks]
    return tuple(verdict for claim in claims for group in groups for verdict in claim(group))


def distance(cell: BatchCell, model: str, what: str = "largest") -> tuple[float, float]:
    """|prediction − mean of the batches| in standard deviations between batches, and its standard error."""
    deviation = cell.deviation(what)
    if not deviation > 0:
        return math.nan, math.nan
    predicted, count = cell.predicted(model, what), len(cell.values(what))
    far = abs(float(predicted) - float(cell.mean(what))) / deviation
    relative = float(predicted.stderr) / deviation
    relative = relative if math.isfinite(relative) else 0.0
    return far, math.sqrt(1 / count + relative**2 + far**2 / (2 * (count - 1)))


def share_within(cells: Iterable[BatchCell], model: str, end: str, times: float, ruler: str) -> float:
    """Share of batches no farther from the prediction than ``times`` standard deviations.

    ``ruler`` says whose: "predicted", the spread that the model predicts, or "measured", that between the batches.
    """
    inside = [
        np.abs(cell.values(end) - float(cell.predicted(model, end)))
        <= times * (cell.spread(model, end) if ruler == "predicted" else cell.deviation(end))
        for cell in cells
    ]
    return float(np.concatenate(inside).mean())


def excess_slope(point: CurvaturePoint) -> Estimate:
    """Slope of log(λ'₁ − λ₁) on log b, weighted by the errors of the means; sizes without a clear excess are left out.

    Theorem 14 gives −1 while λ₁ is an outlier.
    """
    rows = []
    for cell in point.cells:
        mean = cell.mean("largest")
        excess, error = float(mean) - point.largest, float(mean.stderr)
        if excess > SURE * error and error > 0:
            rows.append((math.log(cell.effective), math.log(excess), excess / error))
    if len(rows) < 3:
        return Estimate(math.nan, math.nan)
    x, y, weight = np.array(rows).T
    coefficients, covariance = np.polyfit(x, y, 1, w=weight, cov="unscaled")
    misfit = float((((np.polyval(coefficients, x) - y) * weight) ** 2).sum()) / (len(rows) - 2)
    return Estimate(float(coefficients[0]), math.sqrt(covariance[0, 0] * max(misfit, 1.0)), dof=len(rows) - 2)


def _cells(points: Points) -> Cells:
    return [(point, cell) for point in points for cell in point.cells]


def _near_claimed(points: Points) -> Cells:
    """At each point the batch size nearest the thesis's."""
    return [(p, min(p.cells, key=lambda cell: abs(math.log(cell.batch_size / CLAIMED_SIZE)))) for p in points]


def _named(points: Points, text: str) -> str:
    return f"{points[0].network}, {points[0].operator}: {text}"


def _larger(points: Points) -> Iterator[Verdict]:
    """Figures 5.2 and 5.4: extremal eigenvalues are significantly increased."""
    gaps = [
        (float(cell.mean("largest")) - point.largest, float(cell.mean("largest").stderr))
        for point, cell in _near_claimed(points)
    ]
    ratios = ", ".join(
        f"×{float(cell.mean('largest')) / point.largest:.2f} (epoch {point.epoch})"
        for point, cell in _near_claimed(points)
    )
    size = _near_claimed(points)[0][1].batch_size
    text = f"the largest eigenvalue of a batch of {size} exceeds the full data's"
    yield Verdict(_named(points, text), "§5.5, Figures 5.2, 5.4", worst([judged(*gap) for gap in gaps]), ratios)


def _within(points: Points) -> Iterator[Verdict]:
    """§5.6: both noise processes give results within one standard deviation, at B = 128."""
    for model in _models(points):
        source = "this work" if model == "directional" else "§5.6, Figure 5.6"
        yield _judged_near(points, model, "largest", "λ'₁", source)


def _overlap(points: Points) -> Iterator[Verdict]:
    """Theorem 17: |φ̂₁ᵀφ₁|² = 1 − Pσ²/(bλ₁²)."""
    for model in _models(points):
        source = "Theorem 17, Eq. 6.2" if model == "additive" else "this work"
        yield _judged_near(points, model, "overlaps", "overlap (φ̂₁ᵀφ₁)²", source)


def _judged_near(points: Points, model: str, what: str, words: str, source: str) -> Verdict:
    """Whether a prediction lies within one deviation at the thesis's batch size, at every epoch."""
    near = [distance(cell, model, what) for _, cell in _near_claimed(points)]
    lost = [f"{point.epoch}/{cell.batch_size}" for point, cell in _cells(points) if distance(cell, model, what)[0] > 1]
    size, total = _near_claimed(points)[0][1].batch_size, len(_cells(points))
    evidence = f"B = {size}: {', '.join(f'{far:.1f}' for far, _ in near)} sd; all sizes: {total - len(lost)} of {total}"
    evidence += f" within, outside at epoch/B {_few(lost)}" if lost else " within"
    text = f"the {model} model's {words} lies within one standard deviation of the batches' mean"
    return Verdict(_named(points, text), source, worst([_inside(*each) for each in near]), evidence)


def _inside(far: float, error: float) -> str:
    """Whether a distance is at most 1; beyond, only what is surely beyond fails."""
    if far <= 1:
        return HOLDS
    return FAILS if far - 1 > SURE * error else OPEN


def _mean(points: Points) -> Iterator[Verdict]:
    """Theorems 14 and 16 as equations for the mean over batches: a t-test in every cell, at 5 %."""
    cells = [cell for _, cell in _cells(points)]
    for model in _models(points):
        wrong = sum(_rejected(cell, model) for cell in cells)
        ratios = [float(cell.predicted(model, "largest")) / float(cell.mean("largest")) for cell in cells]
        by_chance = float(stats.binom.sf(wrong - 1, len(cells), REJECTED))
        evidence = f"a t-test at 5 % rejects {wrong} of {len(cells)} cells; predicted/measured "
        evidence += f"{min(ratios):.2f} … {max(ratios):.2f}"
        source = {"additive": "Theorem 14", "multiplicative": "Theorem 16"}.get(model, "this work")
        text = f"the {model} model's λ'₁ is the mean over batches, at every size"
        yield Verdict(_named(points, text), source, FAILS if by_chance < REJECTED else HOLDS, evidence)


def _rejected(cell: BatchCell, model: str) -> bool:
    mean, told = cell.mean("largest"), cell.predicted(model, "largest")
    errors = [error for error in (float(mean.stderr), float(told.stderr)) if math.isfinite(error)]
    return abs(float(mean) - float(told)) > student_quantile(1 - REJECTED, mean.dof) * math.hypot(*errors)


def _better(points: Points) -> Iterator[Verdict]:
    """§5.6: the multiplicative noise process gives a better fit."""
    for better, than, source in (("multiplicative", "additive", "§5.6, Figure 5.6"),
                                 ("directional", "multiplicative", "this work")):  # fmt: skip
        if {better, than} <= set(_models(points)):
            misses = {model: _misses(points, model) for model in (better, than)}
            gap, error = paired_gap(misses[better], misses[than])
            evidence = ", ".join(f"{model} {float(value.mean()):.2f}" for model, value in misses.items())
            evidence = f"mean distance in ln λ'₁: {evidence}, difference {gap:+.2g} ± {error:.1g}"
            text = f"the {better} model fits λ'₁ better than the {than}"
            yield Verdict(_named(points, text), source, judged(gap, error), evidence)


def _misses(points: Points, model: str) -> Tensor:
    """|ln(predicted/measured)| of λ'₁, cell by cell."""
    logs = [
        abs(math.log(float(cell.predicted(model, "largest")) / float(cell.mean("largest"))))
        for _, cell in _cells(points)
        if float(cell.mean("largest")) > 0
    ]
    return torch.tensor(logs, dtype=torch.float64)


def _slope(points: Points) -> Iterator[Verdict]:
    """Theorem 14: what a batch adds to an outlier falls as 1/b."""
    slopes = [(point, slope) for point in points if math.isfinite(float(slope := excess_slope(point)))]
    found = []
    for _, slope in slopes:
        far, error = abs(float(slope) + 1), float(slope.stderr)
        found.append(OPEN if error > CERTAIN else HOLDS if far <= SURE * error else FAILS)
    shown = [f"{float(slope):.2f} ± {float(slope.stderr):.2f} (epoch {point.epoch})" for point, slope in slopes]
    evidence = f"log–log slopes {', '.join(shown)}" if shown else "too few sizes with a clear excess"
    verdict = worst(found) if found else OPEN
    yield Verdict(_named(points, "λ'₁ − λ₁ falls as b^(−1)"), "Theorem 14", verdict, evidence)


def _variance_grows(points: Points) -> Iterator[Verdict]:
    """Figure 5.5: the variance of curvature grows through training."""
    first, last = points[0].variance, points[-1].variance
    if len(points) > 1:
        errors = [float(value.stderr) for value in (first, last)]
        evidence = ", ".join(f"{float(p.variance):.3g} (epoch {p.epoch})" for p in points)
        verdict = judged(float(last) - float(first), math.hypot(*errors))
        yield Verdict(_named(points, "σ² grows through training"), "§5.6, Figure 5.5", verdict, f"σ² {evidence}")


def _broadens(points: Points) -> Iterator[Verdict]:
    """Figures 5.2 and 5.4: the bulk of a batch's spectrum is wider than that of the full data."""
    rows = [(point, point.width, point.batch_width) for point in points]
    verdicts = [judged(float(batch) - whole, float(batch.stderr)) for _, whole, batch in rows]
    evidence = ", ".join(
        f"{whole:.3g} → {float(batch):.3g} ± {float(batch.stderr):.1g} (epoch {point.epoch})"
        for point, whole, batch in rows
    )
    text = f"the bulk of a batch of {points[0].batch_size} is wider than the full data's"
    yield Verdict(_named(points, text), "§5.5, Figures 5.2, 5.4", worst(verdicts), f"widths {evidence}")


def _models(points: Points) -> list[str]:
    return [model for model in MODELS if model in points[0].models]


def _few(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:6])} and {len(names) - 6} more"
