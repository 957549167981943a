"""What §5.7 and §5.8.1 of the spectral thesis say of learning rates and batch sizes, as code."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from scipy.stats import spearmanr
from torch import Tensor

from lambdahat.experiments.frontiers import FEWEST, Frontier, described, near
from lambdahat.experiments.rate_rules import HELD, RateRule
from lambdahat.experiments.reproduction import FAILS, HOLDS, OPEN, SURE, Verdict, judged, paired_gap
from lambdahat.experiments.scaling_runs import ScalingRuns

AWAY = 4.0  # times the threshold, where the rate should no longer depend on the batch
WITHIN = 2.0  # the factor within which a rate counts as predicted
LEAST = 16  # the batch size from which the thesis speaks
FACTOR = 8  # of the reference batch size, 1,024 against 128
SAME = 0.01  # a difference of validation errors that does not count


def judge(
    frontiers: Sequence[Frontier], rules: Sequence[RateRule], scaling: Sequence[ScalingRuns]
) -> tuple[Verdict, ...]:
    """The verdict on every claim, for each network that it is made of."""
    found: list[Verdict] = []
    for frontier in frontiers:
        if frontier.optimizer in HELD:
            own = [rule for rule in rules if rule.network == frontier.network]
            found += [_proportional(frontier, own[0]), _constant(frontier, own[0])]
            found += [_predicted(frontier, rule) for rule in own]
        else:
            found.append(_square_root(frontier))
    for runs in scaling:
        found += _linear_claims(runs) if runs.optimizer == "momentum" else [_adam_rule(runs)]
    return tuple(found)


def _proportional(frontier: Frontier, rule: RateRule) -> Verdict:
    """The slope up to the rule's threshold, or over the smallest batches where that lies below them."""
    turning = rule.turning(frontier.optimizer)
    sizes = [size for size in frontier.batch_sizes if size <= turning]
    few = len(sizes) < FEWEST
    slope = frontier.slope(high=turning)
    expected = _slope(frontier.batch_sizes, rule.rates(frontier.optimizer), turning)
    tail = "" if few else f"; the rule itself {expected:+.2f}"
    fitted, spread = frontier.turning()
    seen = f"B = {turning:.3g} by the rule, {fitted:.3g} (± {100 * spread:.0f} %) by the edges themselves"
    figures = f"threshold {seen}; {described(slope, sizes)}{tail}"
    claim = f"{_name(frontier)}: up to a threshold the largest stable rate is proportional to B"
    return Verdict(claim, "§5.7", OPEN if few else near(*slope, 1.0), figures)


def _constant(frontier: Frontier, rule: RateRule) -> Verdict:
    turning = AWAY * rule.turning(frontier.optimizer)
    sizes = [size for size in frontier.batch_sizes if size >= turning]
    slope = frontier.slope(low=turning)
    claim = f"{_name(frontier)}: beyond the threshold (from four times it) it no longer grows"
    return Verdict(claim, "§5.7", near(*slope, 0.0), described(slope, sizes))


def _predicted(frontier: Frontier, rule: RateRule) -> Verdict:
    """The ratio of the edge to the rule's rate at every batch size, its geometric mean and range."""
    logs = (frontier.edges / rule.rates(frontier.optimizer)[:, None]).log()
    fine = logs.isfinite().all(1)
    means = logs[fine].mean(0)  # over batch sizes, seed by seed
    mean, stderr = float(means.mean()), float(means.std()) / math.sqrt(len(means))
    ratios = logs[fine].mean(1).exp()
    if not bool(fine.any()):
        return Verdict(_rule_claim(frontier, rule), "Eq. 5.34", OPEN, "no edge was found")
    span = f"from {float(ratios.min()):.2f} to {float(ratios.max()):.2f} over batch sizes"
    figures = f"stable rate over the rule's: {math.exp(mean):.2f} (± {100 * stderr:.0f} %), {span}"
    inside = all(abs(math.log(float(ratio))) <= math.log(WITHIN) for ratio in ratios)
    sure = near(mean, stderr, 0.0, math.log(WITHIN))
    return Verdict(_rule_claim(frontier, rule), "Eq. 5.34", HOLDS if inside and sure == HOLDS else FAILS, figures)


def _rule_claim(frontier: Frontier, rule: RateRule) -> str:
    limit = "2/λ₁" if frontier.optimizer == "sgd" else "the momentum-aware limit"
    return f"{_name(frontier)}: the largest stable rate is {limit} of a batch ({rule.point}), within a factor 2"


def _square_root(frontier: Frontier) -> Verdict:
    sizes = [size for size in frontier.batch_sizes if size >= LEAST] or list(frontier.batch_sizes)
    slope, whole = frontier.slope(low=sizes[0]), frontier.slope()
    figures = f"{described(slope, sizes)}; {described(whole, frontier.batch_sizes)}"
    claim = f"{_name(frontier)}, small ε: the largest stable rate grows as √B"
    return Verdict(claim, "§5.8.1, Figure 5.15", near(*slope, 0.5), figures)


def _linear_claims(runs: ScalingRuns) -> list[Verdict]:
    """Figures 5.7 and 5.8 and the text between them."""
    far = far_from(runs)
    linear, root = runs.rules.index("linear"), runs.rules.index("square root")
    errors, distances = runs.validation_error, runs.distance
    at = runs.batch_sizes.index(far)
    where = f"{runs.network}, momentum, B = {far} from {runs.reference}"
    return [
        Verdict(f"{where}: linear scaling keeps the validation error", "Figure 5.7",
                *kept(errors[linear, runs.batch_sizes.index(runs.reference)], errors[linear, at])),
        Verdict(f"{where}: linear scaling generalises better than the square root", "§5.7.0.2",
                *smaller(errors[linear, at], errors[root, at], 100, "%")),
        Verdict(f"{where}: linear scaling ends further from the start", "§5.7.0.2",
                *smaller(distances[root, at], distances[linear, at], 1, "")),
        Verdict(f"{runs.network}, momentum, linear scaling: the further from the start, the lower the error",
                "Figure 5.8", *_linked(distances[linear], errors[linear])),
    ]  # fmt: skip


def _adam_rule(runs: ScalingRuns) -> Verdict:
    far = far_from(runs)
    at = runs.batch_sizes.index(far)
    linear, root = runs.rules.index("linear"), runs.rules.index("square root")
    claim = f"{runs.network}, Adam, B = {far} from {runs.reference}: the square root works where linear scaling fails"
    return Verdict(claim, "§5.8.1, Figures 5.15, 5.16",
                   *smaller(runs.validation_error[root, at], runs.validation_error[linear, at], 100, "%"))  # fmt: skip


def far_from(runs: ScalingRuns) -> int:
    """The largest batch size up to eight times the reference."""
    return max(size for size in runs.batch_sizes if size <= FACTOR * runs.reference)


def kept(before: Tensor, after: Tensor) -> tuple[str, str]:
    gap, stderr = paired_gap(before, after)
    lost = int((~after.isfinite()).sum())
    figures = f"{100 * gap:+.2f} ± {100 * stderr:.2f} %" + (f", {lost} of {len(after)} runs diverged" if lost else "")
    if lost > len(after) / 2:
        return FAILS, figures
    worse = gap - SAME
    return (HOLDS if worse + SURE * stderr < 0 else FAILS if worse - SURE * stderr > 0 else OPEN), figures


def smaller(lower: Tensor, upper: Tensor, unit: float, sign: str) -> tuple[str, str]:
    """The claim that ``lower`` is below ``upper``; runs that diverged count as the largest of all."""
    lost_low, lost_high = int((~lower.isfinite()).sum()), int((~upper.isfinite()).sum())
    if lost_low or lost_high:
        figures = f"{lost_low} and {lost_high} of {len(lower)} runs diverged"
        return (HOLDS if lost_high > lost_low else FAILS if lost_low > lost_high else OPEN), figures
    gap, stderr = paired_gap(lower, upper)
    ends = f"{unit * float(lower.mean()):.3g} against {unit * float(upper.mean()):.3g} {sign}".strip()
    return judged(gap, stderr), f"{ends}, difference {unit * gap:+.2g} ± {unit * stderr:.1g}"


def _linked(distances: Tensor, errors: Tensor) -> tuple[str, str]:
    """Spearman's rank correlation over batch sizes, seed by seed."""
    found = []
    for far, wrong in zip(distances.T, errors.T, strict=True):
        fine = far.isfinite() & wrong.isfinite()
        if int(fine.sum()) >= FEWEST:
            found.append(float(spearmanr(far[fine], wrong[fine]).statistic))
    ranks = torch.tensor(found, dtype=torch.float64)
    gap, stderr = paired_gap(ranks, torch.zeros_like(ranks))
    return judged(gap, stderr), f"rank correlation of distance and error {-gap:+.2f} ± {stderr:.2f}"


def _slope(sizes: Sequence[int], rates: Tensor, high: float) -> float:
    """The rule's own slope over the same batch sizes."""
    inside = torch.tensor([size <= high for size in sizes])
    if int(inside.sum()) < FEWEST:
        return math.nan
    x, y = torch.tensor(sizes, dtype=torch.float64)[inside].log(), rates[inside].log()
    x = x - x.mean()
    return float((x * y).sum() / x.square().sum())


def _name(frontier: Frontier) -> str:
    names = {"sgd": "SGD", "momentum": "SGD with momentum", "adam": "Adam"}
    steady = ", steady" if frontier.criterion == "steady" else ""
    return f"{frontier.network}, {names[frontier.optimizer]}{steady}"
