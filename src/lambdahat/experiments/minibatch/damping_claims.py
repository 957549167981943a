"""What §5.8 of the spectral thesis says of damping and batch sizes, as code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lambdahat.experiments.kit.cells import Rows
from lambdahat.experiments.kit.claims import Claim
from lambdahat.experiments.minibatch.frontiers import MARGIN, Frontier
from lambdahat.experiments.minibatch.rate_claims import (
    better_claim,
    factor_claim,
    far_from,
    kept_claim,
)
from lambdahat.experiments.minibatch.rate_rows import frontiers_of, rules_of, scaling_of
from lambdahat.experiments.minibatch.rate_rules import RateRule
from lambdahat.experiments.minibatch.scaling_runs import ScalingRuns
from lambdahat.experiments.minibatch.stacked_networks import BETAS
from lambdahat.randommatrix import stability_limit

RATE = 1.0
NAMES = {"adam": "Adam's ε", "kfac": "KFAC's δ"}
FIGURES = {"adam": "Figures 5.11, 5.12", "kfac": "Figures 5.13, 5.14"}


def claims(rows: Rows) -> list[Claim]:
    """Every claim, for each network and optimiser."""
    return claims_of(frontiers_of(rows), rules_of(rows), scaling_of(rows))


def claims_of(
    frontiers: Sequence[Frontier], rules: Sequence[RateRule], scaling: Sequence[ScalingRuns]
) -> list[Claim]:
    """The same of what the rows hold."""
    found = []
    for frontier in frontiers:
        where, figures = (
            f"{frontier.network}, {NAMES[frontier.optimizer]}",
            FIGURES[frontier.optimizer],
        )
        found.append(
            Claim(
                f"{where}: the least damping is proportional to 1/B",
                f"Eq. 5.36, {figures}",
                "slope −1",
                frontier.slope(),
                "within",
                -1.0,
                MARGIN,
            )
        )
        for rule in (rule for rule in rules if rule.network == frontier.network):
            found += _rule_claims(where, frontier, rule)
    for runs in scaling:
        where = (
            f"{runs.network}, {NAMES[runs.optimizer]}, B = {far_from(runs)} from {runs.reference}"
        )
        better = f"{where}: damping ∝ 1/B generalises better than constant damping"
        found += [
            kept_claim(
                f"{where}: damping ∝ 1/B keeps the validation error",
                FIGURES[runs.optimizer],
                "good agreement with theory",
                runs,
                "inverse",
            ),
            replace(
                better_claim(better, "this work", "not shown", runs, "inverse", "constant"),
                own=True,
            ),
        ]
    return found


def _rule_claims(where: str, frontier: Frontier, rule: RateRule) -> list[Claim]:
    """That the least damping is Eq. 5.36's, and that of our rule, which takes what batches add
    to λ₁ instead of Pσ².
    """
    kind = "heavy ball's at rate α/ε" if frontier.optimizer == "adam" else "α(λ₁(B) − λ₁)/2"
    sentence = f"{where}: the least damping is {kind}, λ₁(B) of batches, within a factor 2"
    expected = by_size(rule, expected_damping(rule, frontier.optimizer))
    found = [replace(factor_claim(sentence, "after Eq. 5.36", frontier, expected), own=True)]
    if "additive" in rule.predicted:
        sentence = f"{where}: the least damping is αPσ²/(2bλ₁), within a factor 2"
        found.append(
            factor_claim(
                sentence, "Eq. 5.36", frontier, by_size(rule, rule.dampings(RATE, "additive"))
            )
        )
    return found


def expected_damping(rule: RateRule, optimizer: str) -> Tensor:
    """The least damping (sizes,) from what batches add to λ₁: α/2 times that for KFAC, which is not
    Eq. 5.36.

    For Adam's ε that of heavy ball at rate (1 − β₁)/ε. At the large ε that α = 1 needs, √v̂ is
    small beside it and Adam is SGD with averaged momentum.
    """
    if optimizer == "kfac":
        return rule.dampings(RATE)
    beta = BETAS[0]
    limits = [stability_limit(rule.full, float(value), beta) for value in rule.excess()]
    return RATE * (1 - beta) / torch.tensor(limits, dtype=torch.float64)


def by_size(rule: RateRule, dampings: Tensor) -> dict[int, float]:
    """Dampings (sizes,) of a rule by its batch sizes."""
    return dict(zip(rule.batch_sizes, dampings.tolist(), strict=True))
