"""What §5.7 and §5.8.1 of the spectral thesis say of learning rates and batch sizes, as code."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from scipy.stats import spearmanr
from torch import Tensor

from lambdahat.experiments.claims import Claim
from lambdahat.experiments.experiment import Rows
from lambdahat.experiments.minibatch.frontiers import FEWEST, MARGIN, Frontier
from lambdahat.experiments.minibatch.rate_rows import frontiers_of, rules_of, scaling_of
from lambdahat.experiments.minibatch.rate_rules import HELD, RateRule
from lambdahat.experiments.minibatch.scaling_runs import ScalingRuns
from lambdahat.experiments.statistics import Reading, mean_of, paired_difference

AWAY = 4.0  # times the threshold, where the rate should no longer depend on the batch
LEAST = 16  # the batch size from which the thesis speaks
FACTOR = 8  # of the reference batch size, 1,024 against 128
SAME = 1.0  # percent of validation error that do not count
LOST = 50.0  # percent of validation error of the run that is scaled, above which there is little to keep
CHANCE = 0.9  # the error of a network that guesses among ten classes, as one that diverged does
UNKNOWN = Reading(math.nan, math.nan, math.nan, 0)
NAMES = {"sgd": "SGD", "momentum": "SGD with momentum", "adam": "Adam"}


def claims(rows: Rows) -> list[Claim]:
    """Every claim, for each network that it is made of."""
    return claims_of(frontiers_of(rows), rules_of(rows), scaling_of(rows))


def claims_of(frontiers: Sequence[Frontier], rules: Sequence[RateRule], scaling: Sequence[ScalingRuns]) -> list[Claim]:
    """The same of what the rows hold."""
    found: list[Claim] = []
    for frontier in frontiers:
        own = [rule for rule in rules if rule.network == frontier.network]
        if frontier.optimizer not in HELD:
            found.append(_square_root(frontier))
        elif own:
            found += [_proportional(frontier, own[0]), _constant(frontier, own[0])]
            found += [_predicted(frontier, rule) for rule in own]
    for runs in scaling:
        found += _linear_claims(runs) if runs.optimizer == "momentum" else [_adam_rule(runs)]
    return found


def _proportional(frontier: Frontier, rule: RateRule) -> Claim:
    slope, where = _growth(frontier, rule.turning(frontier.optimizer))
    sentence = f"{name_of(frontier)}: up to a threshold the largest stable rate is proportional to B"
    return Claim(sentence, "§5.7", "slope 1", slope, "within", 1.0, MARGIN, where)


def _growth(frontier: Frontier, threshold: float) -> tuple[Reading, str]:
    """The slope up to the rule's threshold, and in words up to where.

    Where that leaves too few batch sizes, up to the end of growth that the edges themselves show.
    """
    slope = frontier.slope(high=threshold)
    if math.isfinite(slope.value):
        return slope, f" up to the rule's threshold, B = {threshold:.3g}"
    end, _ = frontier.turning()
    slope = frontier.slope(high=end)
    if math.isfinite(slope.value):
        why = f"as too few sizes lie below the rule's threshold, {threshold:.3g}"
        return slope, f" up to the measured end of growth, B = {end:.3g}, {why}"
    measured = f", or to the measured end of growth, {end:.3g}" if math.isfinite(end) else ""
    return slope, f": too few batch sizes have a rate up to the rule's threshold, B = {threshold:.3g}{measured}"


def _constant(frontier: Frontier, rule: RateRule) -> Claim:
    slope = frontier.slope(low=AWAY * rule.turning(frontier.optimizer))
    sentence = f"{name_of(frontier)}: beyond the threshold (from four times the rule's) it no longer grows"
    return Claim(sentence, "§5.7", "slope 0", slope, "within", 0.0, MARGIN)


def _predicted(frontier: Frontier, rule: RateRule) -> Claim:
    limit = "2/λ₁" if frontier.optimizer == "sgd" else "the momentum-aware limit"
    sentence = f"{name_of(frontier)}: the largest stable rate is {limit} of a batch ({rule.point}), within a factor 2"
    expected = dict(zip(rule.batch_sizes, rule.rates(frontier.optimizer).tolist(), strict=True))
    return factor_claim(sentence, "Eq. 5.34", frontier, expected)


def factor_claim(sentence: str, source: str, frontier: Frontier, expected: Mapping[int, float]) -> Claim:
    """That edges are as expected by batch size, within a factor 2 at every one: log₂ of the worst ratio."""
    found = [
        (size, mean_of((edges / expected[size]).log2().tolist()))
        for size, edges in zip(frontier.batch_sizes, frontier.edges, strict=True)
        if expected.get(size, 0.0) > 0
    ]
    known = [(size, reading) for size, reading in found if math.isfinite(reading.value)]
    if not known:
        return Claim(sentence, source, "ratio 1", UNKNOWN, "within", 0.0, 1.0)
    size, worst = max(known, key=lambda item: abs(item[1].value))
    return Claim(sentence, source, "ratio 1", worst, "within", 0.0, 1.0, f" = log₂ of the ratio at B = {size}")


def _square_root(frontier: Frontier) -> Claim:
    sentence = f"{name_of(frontier)}, small ε: from B = {LEAST} the largest stable rate grows as √B"
    slope = frontier.slope(low=LEAST)
    return Claim(sentence, "§5.8.1, Figure 5.15", "slope 0.5", slope, "within", 0.5, MARGIN)


def _linear_claims(runs: ScalingRuns) -> list[Claim]:
    """Figures 5.7 and 5.8 and the text between them."""
    far = far_from(runs)
    where = f"{runs.network}, momentum, B = {far} from {runs.reference}"
    distances = [_by_seed(runs.distance[runs.rules.index(rule), runs.batch_sizes.index(far)])
                 for rule in ("linear", "square root")]  # fmt: skip
    return [
        kept_claim(f"{where}: linear scaling keeps the validation error", "Figure 5.7", runs, "linear"),
        better_claim(f"{where}: linear scaling generalises better than the square root", "§5.7.0.2", runs, "linear",
                     "square root"),
        Claim(f"{where}: linear scaling ends further from the start than the square root", "§5.7.0.2", "further",
              paired_difference(*distances)),
        Claim(f"{runs.network}, momentum, linear scaling: the further from the start, the lower the error",
              "Figure 5.8", "error falls", _linked(runs), "below", unit=" = rank correlation"),
    ]  # fmt: skip


def _adam_rule(runs: ScalingRuns) -> Claim:
    where = f"{runs.network}, Adam, B = {far_from(runs)} from {runs.reference}"
    sentence = f"{where}: the square root generalises better than linear scaling"
    return better_claim(sentence, "§5.8.1, Figures 5.15, 5.16", runs, "square root", "linear")


def kept_claim(sentence: str, source: str, runs: ScalingRuns, rule: str) -> Claim:
    """That far from the reference a rule has the same validation error, or at most 1 % more."""
    gap = paired_difference(errors_of(runs, rule, far_from(runs)), errors_of(runs, rule, runs.reference))
    known, unit = _if_learnt(runs, gap)
    return Claim(sentence, source, "no more", known, "below", SAME, unit=unit)


def better_claim(sentence: str, source: str, runs: ScalingRuns, better: str, worse: str) -> Claim:
    """That far from the reference one rule has a lower validation error than another."""
    gap = paired_difference(errors_of(runs, worse, far_from(runs)), errors_of(runs, better, far_from(runs)))
    known, unit = _if_learnt(runs, gap)
    return Claim(sentence, source, "lower error", known, unit=unit)


def _if_learnt(runs: ScalingRuns, gap: Reading) -> tuple[Reading, str]:
    """A gap in percent with its unit; not known where the run that is scaled has itself learnt too little."""
    base = mean_of([value for rule in runs.rules for value in errors_of(runs, rule, runs.reference).values()]).value
    if base <= LOST:
        return gap, " %"
    return UNKNOWN, f": the run at B = {runs.reference} that is scaled errs on {base:.0f} %"


def errors_of(runs: ScalingRuns, rule: str, size: int) -> dict[int, float]:
    """Validation errors in percent, seed by seed; a network that diverged guesses."""
    values = runs.validation_error[runs.rules.index(rule), runs.batch_sizes.index(size)]
    return _by_seed(100 * values.nan_to_num(CHANCE))


def far_from(runs: ScalingRuns) -> int:
    """The largest batch size up to eight times the reference."""
    return max(size for size in runs.batch_sizes if size <= FACTOR * runs.reference)


def _by_seed(values: Tensor) -> dict[int, float]:
    return dict(enumerate(values.tolist()))


def _linked(runs: ScalingRuns) -> Reading:
    """Spearman's rank correlation of distance and error over batch sizes, seed by seed."""
    linear, found = runs.rules.index("linear"), []
    for far, wrong in zip(runs.distance[linear].T, runs.validation_error[linear].T, strict=True):
        fine = far.isfinite() & wrong.isfinite()
        if int(fine.sum()) >= FEWEST:
            found.append(float(spearmanr(far[fine], wrong[fine]).statistic))
    return mean_of(found)


def rule_slope(rule: RateRule, optimizer: str) -> float:
    """The slope of the rule's own rates up to its threshold; NaN if too few batch sizes lie there."""
    inside = torch.tensor([size <= rule.turning(optimizer) for size in rule.batch_sizes])
    if int(inside.sum()) < FEWEST:
        return math.nan
    x = torch.tensor(rule.batch_sizes, dtype=torch.float64)[inside].log()
    x, y = x - x.mean(), rule.rates(optimizer)[inside].log()
    return float((x * y).sum() / x.square().sum())


def name_of(frontier: Frontier) -> str:
    """Network, optimiser and criterion in words."""
    steady = ", steady" if frontier.criterion == "steady" else ""
    return f"{frontier.network}, {NAMES[frontier.optimizer]}{steady}"
