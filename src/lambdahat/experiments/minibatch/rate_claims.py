"""What §5.7 and §5.8.1 of the spectral thesis say of learning rates and batch sizes, as code."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from scipy.stats import spearmanr
from torch import Tensor

from lambdahat.experiments.kit.cells import Rows
from lambdahat.experiments.kit.claims import Claim, Reading, mean_of, paired_difference
from lambdahat.experiments.minibatch.frontiers import FEWEST, MARGIN, Frontier
from lambdahat.experiments.minibatch.rate_rows import frontiers_of, rules_of, scaling_of
from lambdahat.experiments.minibatch.rate_rules import HELD, RateRule
from lambdahat.experiments.minibatch.scaling_runs import ScalingRuns

AWAY = 4.0  # times the threshold, where the rate should no longer depend on the batch
LEAST = 16  # the batch size from which the thesis speaks
FACTOR = 8  # of the reference batch size, 1,024 against 128
SAME = 1.5  # percent of validation error that do not count: the thesis's own from B = 128 to 1,024
# percent of validation error of the run that is scaled, above which there is little to keep
LOST = 50.0
CHANCE = 0.9  # the error of a network that guesses among ten classes, as one that diverged does
GUESSED = math.log(10)  # its loss
FALL = 0.9  # of the first loss, below which a network has learnt
UNKNOWN = Reading(math.nan, math.nan, math.nan, 0)
NAMES = {"sgd": "SGD", "momentum": "SGD with momentum", "adam": "Adam"}


def claims(rows: Rows) -> list[Claim]:
    """Every claim, for each network that it is made of; n counts starts."""
    return claims_of(frontiers_of(rows), rules_of(rows), scaling_of(rows))


def claims_of(
    frontiers: Sequence[Frontier], rules: Sequence[RateRule], scaling: Sequence[ScalingRuns]
) -> list[Claim]:
    """The same of what the rows hold."""
    found: list[Claim] = []
    for frontier in frontiers:
        own = [rule for rule in rules if rule.network == frontier.network]
        if frontier.optimizer not in HELD:
            found.append(_square_root(frontier))
        elif own:
            found += [*_proportional(frontier, own[0]), _constant(frontier, own[0])]
            found += [_predicted(frontier, rule) for rule in own]
    for runs in scaling:
        found += _linear_claims(runs) if runs.optimizer == "momentum" else [_adam_rule(runs)]
        found += [
            _later(runs, each)
            for each in frontiers
            if runs.optimizer == "momentum" and _edge_of(runs, each)
        ]
    return found


def _proportional(frontier: Frontier, rule: RateRule) -> list[Claim]:
    """The slope up to the rule's threshold; where that leaves too few sizes, also up to where the
    edges stop growing.

    The second was chosen after the results were seen, and so were the steady edges made a form of
    the claim: both are ours.
    """
    threshold = rule.turning(frontier.optimizer)
    sentence = (
        f"{name_of(frontier)}: up to a threshold the largest stable rate is proportional to B"
    )
    slope = frontier.slope(high=threshold)
    few = _too_few(slope, f"up to the rule's threshold, {threshold:.3g}")
    unit = "" if few else f" up to the rule's threshold, B = {threshold:.3g}"
    found = [
        Claim(
            sentence, "§5.7", "slope 1", slope, "within", 1.0, MARGIN, unit, few, _steady(frontier)
        )
    ]
    end, _ = frontier.turning()
    slope = frontier.slope(high=end)
    if few and math.isfinite(slope.value):
        sentence = (
            f"{name_of(frontier)}: up to where it stops growing the largest stable rate is"
            " proportional to B"
        )
        unit = f" up to B = {end:.3g}, chosen after the results"
        found.append(
            Claim(sentence, "after §5.7", "slope 1", slope, "within", 1.0, MARGIN, unit, own=True)
        )
    return found


def _too_few(slope: Reading, where: str) -> str:
    return (
        ""
        if math.isfinite(slope.value)
        else f"fewer than {FEWEST} batch sizes with a rate lie {where}"
    )


def _steady(frontier: Frontier) -> bool:
    """Whether the edge is that of steady runs; the thesis asks what trains."""
    return frontier.criterion == "steady"


def _constant(frontier: Frontier, rule: RateRule) -> Claim:
    start = AWAY * rule.turning(frontier.optimizer)
    slope = frontier.slope(low=start)
    sentence = (
        f"{name_of(frontier)}: beyond the threshold (from four times the rule's) it no longer grows"
    )
    few = _too_few(slope, f"from four times the rule's threshold on, {start:.3g}")
    return Claim(
        sentence, "§5.7", "slope 0", slope, "within", 0.0, MARGIN, "", few, _steady(frontier)
    )


def _predicted(frontier: Frontier, rule: RateRule) -> Claim:
    """Ours: Eq. 5.34 guarantees a fall of the loss below 2/λ₁, and the thesis calls it
    pessimistic.
    """
    limit = "2/λ₁" if frontier.optimizer == "sgd" else "the momentum-aware limit"
    sentence = (
        f"{name_of(frontier)}: the largest stable rate is {limit} of a batch ({rule.point}), within"
        " a factor 2"
    )
    expected = dict(zip(rule.batch_sizes, rule.rates(frontier.optimizer).tolist(), strict=True))
    return replace(factor_claim(sentence, "after Eq. 5.34", frontier, expected), own=True)


def factor_claim(
    sentence: str, source: str, frontier: Frontier, expected: Mapping[int, float]
) -> Claim:
    """That edges are as expected by batch size, within a factor 2 at every one: log₂ of the
    worst ratio.
    """
    found = [
        (size, mean_of((edges / expected[size]).log2().tolist()))
        for size, edges in zip(frontier.batch_sizes, frontier.edges, strict=True)
        if expected.get(size, 0.0) > 0
    ]
    known = [(size, reading) for size, reading in found if math.isfinite(reading.value)]
    if not known:
        return Claim(sentence, source, "ratio 1", UNKNOWN, "within", 0.0, 1.0)
    size, worst = max(known, key=lambda item: abs(item[1].value))
    return Claim(
        sentence,
        source,
        "ratio 1",
        worst,
        "within",
        0.0,
        1.0,
        f" = log₂ of the ratio at B = {size}",
    )


def _square_root(frontier: Frontier) -> Claim:
    sentence = f"{name_of(frontier)}, small ε: from B = {LEAST} the largest stable rate grows as √B"
    slope = frontier.slope(low=LEAST)
    return Claim(sentence, "§5.8.1, Figure 5.15", "slope 0.5", slope, "within", 0.5, MARGIN)


def _linear_claims(runs: ScalingRuns) -> list[Claim]:
    """Figures 5.7a and 5.8a and the text between them."""
    far = far_from(runs)
    where = f"{runs.network}, momentum, B = {far} from {runs.reference}"
    distances = [
        _by_seed(runs.distance[runs.rules.index(rule), runs.batch_sizes.index(far)])
        for rule in ("linear", "square root")
    ]
    return [
        kept_claim(
            f"{where}: linear scaling keeps the validation error",
            "Figure 5.7a",
            "1.5 % more",
            runs,
            "linear",
        ),
        better_claim(
            f"{where}: linear scaling generalises better than the square root",
            "§5.7.0.2",
            "35.65 against 38.92 %",
            runs,
            "linear",
            "square root",
        ),
        Claim(
            f"{where}: linear scaling ends further from the start than the square root",
            "§5.7.0.2",
            "145.76 against 67.44",
            paired_difference(*distances),
            unmet=unlearnt(runs),
        ),
        Claim(
            f"{runs.network}, momentum, linear scaling: the further from the start, the lower the"
            " error",
            "Figure 5.8a",
            "error falls",
            _linked(runs),
            "below",
            unit=" = rank correlation",
            unmet=unlearnt(runs),
        ),
    ]


def _adam_rule(runs: ScalingRuns) -> Claim:
    where = f"{runs.network}, Adam, B = {far_from(runs)} from {runs.reference}"
    sentence = f"{where}: the square root generalises better than linear scaling"
    return better_claim(
        sentence, "§5.8.1, Figure 5.16", "linear “fails completely”", runs, "square root", "linear"
    )


def _later(runs: ScalingRuns, frontier: Frontier) -> Claim:
    """Figure 5.7b: rates that lower the loss at first become unstable later. A run that diverged
    has a guess's loss.
    """
    sentence = (
        f"{runs.network}, momentum: a rate that trains in the steps of the search is unstable later"
    )
    bound, source, published = FALL * GUESSED, "§5.7.0.1, Figure 5.7b", "unstable later"
    found = _nearest_below(runs, frontier)
    if found is None:
        return Claim(
            sentence,
            source,
            published,
            UNKNOWN,
            bound=bound,
            unmet="no run has a rate below the edge",
        )
    row, place = found
    losses = runs.training_loss[row, place].nan_to_num(GUESSED, GUESSED).tolist()
    size, rate = runs.batch_sizes[place], float(runs.values[row, place])
    where = (
        f"{rate:.2g} at B = {size}, {rate / frontier.at(size):.0%} of the edge, after {runs.epochs}"
        " epochs"
    )
    unit = f" = training loss at rate {where}; {bound:.3g} is near guessing"
    return Claim(sentence, source, published, mean_of(losses), bound=bound, unit=unit)


def _nearest_below(runs: ScalingRuns, frontier: Frontier) -> tuple[int, int] | None:
    """Rule and size of the run whose rate is nearest below the edge of every start.

    Of batch sizes up to the reference, at which the epochs have more steps than the search.
    """
    sizes = [
        size for size in runs.batch_sizes if size <= runs.reference and size in frontier.batch_sizes
    ]
    least = {size: frontier.edges[frontier.batch_sizes.index(size)].min() for size in sizes}
    shares = [
        (
            float(runs.values[row, runs.batch_sizes.index(size)] / least[size]),
            row,
            runs.batch_sizes.index(size),
        )
        for row in range(len(runs.rules))
        for size in sizes
    ]
    below = [item for item in shares if item[0] < 1]
    return max(below)[1:] if below else None


def _edge_of(runs: ScalingRuns, frontier: Frontier) -> bool:
    same = (frontier.network, frontier.optimizer) == (runs.network, runs.optimizer)
    return same and not _steady(frontier)


def kept_claim(sentence: str, source: str, published: str, runs: ScalingRuns, rule: str) -> Claim:
    """That far from the reference a rule has the same validation error, or at most 1.5 % more."""
    gap = paired_difference(
        errors_of(runs, rule, far_from(runs)), errors_of(runs, rule, runs.reference)
    )
    return Claim(sentence, source, published, gap, "below", SAME, unit=" %", unmet=unlearnt(runs))


def better_claim(
    sentence: str, source: str, published: str, runs: ScalingRuns, better: str, worse: str
) -> Claim:
    """That far from the reference one rule has a lower validation error than another."""
    gap = paired_difference(
        errors_of(runs, worse, far_from(runs)), errors_of(runs, better, far_from(runs))
    )
    return Claim(sentence, source, published, gap, unit=" %", unmet=unlearnt(runs))


def unlearnt(runs: ScalingRuns) -> str:
    """Why runs say nothing of scaling: that which is scaled errs on more than half itself. Empty
    where it does not.
    """
    base = mean_of(
        [value for rule in runs.rules for value in errors_of(runs, rule, runs.reference).values()]
    ).value
    return (
        ""
        if base <= LOST
        else f"the run at B = {runs.reference} that is scaled errs on {base:.0f} %"
    )


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
    """The slope of the rule's own rates up to its threshold; NaN if too few batch sizes lie
    there.
    """
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
