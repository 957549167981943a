"""What §5.8 of the spectral thesis says of damping and batch sizes, as code."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from lambdahat.experiments.frontiers import Frontier, described, near
from lambdahat.experiments.rate_claims import WITHIN, far_from, kept, smaller
from lambdahat.experiments.rate_rules import RateRule
from lambdahat.experiments.reproduction import FAILS, HOLDS, OPEN, Verdict
from lambdahat.experiments.scaling_runs import ScalingRuns

NAMES = {"adam": "Adam's ε", "kfac": "KFAC's δ"}
FIGURES = {"adam": "Figures 5.11, 5.12", "kfac": "Figures 5.13, 5.14"}
Expected = Callable[[RateRule, str], Tensor]


def judge(
    frontiers: Sequence[Frontier], rules: Sequence[RateRule], scaling: Sequence[ScalingRuns], expected: Expected
) -> tuple[Verdict, ...]:
    """The verdict on every claim; ``expected(rule, optimizer)`` are the rule's dampings (sizes,)."""
    found = []
    for frontier in frontiers:
        rule = next(rule for rule in rules if rule.network == frontier.network)
        found += [_inverse(frontier), _predicted(frontier, expected(rule, frontier.optimizer))]
    for runs in scaling:
        far = far_from(runs)
        at, reference = runs.batch_sizes.index(far), runs.batch_sizes.index(runs.reference)
        inverse, constant = runs.rules.index("inverse"), runs.rules.index("constant")
        where = f"{runs.network}, {NAMES[runs.optimizer]}, B = {far} from {runs.reference}"
        source, errors = FIGURES[runs.optimizer], runs.validation_error
        found += [
            Verdict(f"{where}: damping ∝ 1/B keeps the validation error", source,
                    *kept(errors[inverse, reference], errors[inverse, at])),
            Verdict(f"{where}: damping ∝ 1/B generalises better than constant damping", source,
                    *smaller(errors[inverse, at], errors[constant, at], 100, "%")),
        ]  # fmt: skip
    return tuple(found)


def _inverse(frontier: Frontier) -> Verdict:
    slope = frontier.slope()
    middle = len(frontier.batch_sizes) // 2
    halves = [frontier.batch_sizes[: middle + 1], frontier.batch_sizes[middle:]]
    parts = [described(frontier.slope(sizes[0], sizes[-1]), sizes) for sizes in halves]
    claim = f"{frontier.network}, {NAMES[frontier.optimizer]}: the least damping is proportional to 1/B"
    figures = "; ".join([described(slope, frontier.batch_sizes), *parts])
    return Verdict(claim, f"Eq. 5.36, {FIGURES[frontier.optimizer]}", near(*slope, -1.0), figures)


def _predicted(frontier: Frontier, expected: Tensor) -> Verdict:
    """The ratio of the least damping to the rule's, at every batch size."""
    logs = (frontier.edges / expected[:, None]).log()
    fine = logs.isfinite().all(1)
    claim = f"{frontier.network}, {NAMES[frontier.optimizer]}: the least damping is the rule's, within a factor 2"
    if not bool(fine.any()):
        return Verdict(claim, "Eq. 5.36", OPEN, "no edge was found")
    ratios = logs[fine].mean(1).exp()
    low, high = float(ratios.min()), float(ratios.max())
    inside = max(abs(math.log(low)), abs(math.log(high))) <= math.log(WITHIN)
    figures = f"least damping over the rule's: from {low:.2g} to {high:.2g} over batch sizes"
    return Verdict(claim, "Eq. 5.36", HOLDS if inside else FAILS, figures)
