"""Where the Gauss rules of the logarithm go as their depth grows, and what holds them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy.sparse
import torch

from lambdahat.krylov import Lanczos, lanczos
from lambdahat.maxent import MaxentDensity
from lambdahat.operators.matrix import operator

SMALL = 0.05


@dataclass(frozen=True)
class Limit:
    """Where the Gauss rules of log go as the depth grows: the last rule, the best guess, and what holds the limit."""

    gauss: float
    value: float
    low: float
    high: float

    def distance(self, guess: float) -> float:
        """How far the limit may be from a guess."""
        return max(guess - self.low, self.high - guess, 0.0)


def limit_of(runs: list[Lanczos], low: float) -> Limit:
    """The limit of the mean Gauss rule of log over the runs, per eigenvalue.

    The rules fall with the depth, and the Gauss–Radau rule with a node at a lower bound ``low`` of the spectrum stays
    below the limit (Golub and Meurant 2010, §6): these two hold it, whatever the spectrum. Where they are at most 1
    apart and the last quarter of the depth changed the rule by no more than 0.05, and by at most half of what the
    quarter before did, the limit is taken to lie as far on as their geometric series says (Aitken), and within twice
    that, or above the Gauss–Radau rule with a node where the smallest Ritz values lead to. That node also stands in for
    a bound that is not known.
    """
    depth = max(len(run.alpha) for run in runs)
    half, most, gauss = (float(np.mean([_rule(run, m) for run in runs])) for m in (depth // 2, 3 * depth // 4, depth))
    seen = min(_carried_on(run) for run in runs)
    gap, likely = (float(np.mean([_gap(run, end) for run in runs])) for end in (low if low > 0 else seen, seen))
    before, last = half - most, most - gauss
    if abs(last) <= 1e-12 * max(1.0, abs(gauss)):
        return Limit(gauss, gauss, gauss - abs(last), gauss)
    further = last * last / (before - last) if before > last > 0 else math.inf
    settled = last <= SMALL and 2 * last <= before and gap <= 1
    value = gauss - min(further, gap / 2)
    if settled:
        gap = min(gap, max(2 * further, likely))
    return Limit(gauss, value, gauss - gap, gauss)


def _rule(run: Lanczos, depth: int) -> float:
    """zᵀlog(A)z by the Gauss rule of the first ``depth`` steps."""
    nodes, weights, _ = run.ritz(max(1, depth))
    return float(weights @ nodes.log())


def _carried_on(run: Lanczos) -> float:
    """The smallest Ritz value less its residual; one that still falls, carried on as far as over its second half."""
    nodes, _, residuals = run.ritz()
    least, before = float(nodes[0]), float(run.ritz(max(1, len(nodes) // 2))[0][0])
    return max(least - float(residuals[0]), least * least / max(before, least))


def _gap(run: Lanczos, low: float) -> float:
    """The Gauss rule of log less the Gauss–Radau rule with a node at ``low``: what is not known of zᵀlog(A)z."""
    nodes, weights, _ = run.ritz()
    low = min(low, float(nodes[0]))
    if run.residual == 0.0 or low == float(nodes[0]):
        return 0.0
    others, masses = run.radau(low)
    return max(0.0, float(weights @ nodes.log()) - float(masses @ others.clamp_min(low).log()))


def rule_of(density: MaxentDensity, depth: int) -> Lanczos:
    """The Gauss rule with ``depth`` nodes of a density: that of every measure with its first 2·depth moments."""
    mass = density.weights * density.values
    line = operator(scipy.sparse.diags_array(density.grid).tocsr())
    return lanczos(line, torch.as_tensor(np.sqrt(mass)), min(depth, len(mass)), "bias")
