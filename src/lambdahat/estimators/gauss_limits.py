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
    """Where the Gauss rules of log go as the depth grows: the last rule, the best guess, and
    what holds the limit.
    """

    gauss: float
    value: float
    low: float
    high: float

    def distance(self, guess: float) -> float:
        """How far the limit may be from a guess."""
        return max(guess - self.low, self.high - guess, 0.0)


def limit_of(runs: list[Lanczos], low: float, sure: bool) -> Limit:
    """The limit of the mean Gauss rule of log over the runs, per eigenvalue.

    The rules fall with the depth, and the Gauss–Radau rule with a node at a lower bound ``low`` > 0
    of the spectrum stays below the limit (Golub and Meurant 2010, §6): these two hold it, whatever
    the spectrum. How the rules of the four quarters of the depth fall says more. Where the last
    changed the mean by at most 0.05, and by half of what the one before did, they fall
    geometrically: the limit lies as far on as Aitken's series says, and within twice that. Else
    they fall as a power of the depth at best, whose doublings are such a series. That series, and
    the Gauss–Radau rule with a node where the smallest Ritz values lead to, widen both.

    Where ``low`` is not ``sure`` to be a bound, as the rounding of the dtype is not, nothing holds
    the limit from below. Then rules have settled only where the smallest Ritz values have, and else
    the limit is taken to lie within twice what both series and that rule say.
    """
    depth = max(len(run.alpha) for run in runs)
    quarter, half, most, gauss = (
        float(np.mean([_rule(run, k * depth // 4) for run in runs])) for k in (1, 2, 3, 4)
    )
    seen = min(_carried_on(run) for run in runs)
    gap, likely = (
        float(np.mean([_gap(run, end) for run in runs])) for end in (low, max(low, seen))
    )
    before, last = half - most, most - gauss
    if gap == 0 or (depth >= 4 and abs(last) <= 1e-12 * max(1.0, abs(gauss))):
        return Limit(gauss, gauss, gauss - abs(last) * (gap > 0), gauss)
    geometric, doubled = _beyond(before, last), _beyond(quarter - half, half - gauss)
    if (
        last <= SMALL
        and 2 * last <= before
        and gap <= 1
        and (sure or all(bounded_away(run) for run in runs))
    ):
        reach = min(gap, max(2 * geometric, doubled, likely))
        return Limit(gauss, gauss - min(geometric, reach / 2), gauss - reach, gauss)
    if sure:
        return Limit(gauss, gauss - min(geometric, gap / 2), gauss - gap, gauss)
    reach = min(gap, 2 * max(geometric, doubled, likely))
    return Limit(gauss, gauss - min(doubled, 2 * likely, reach / 2), gauss - reach, gauss)


def bounded_away(run: Lanczos) -> bool:
    """Whether the smallest Ritz value is above its residual: the eigenvalue next to it is then
    above 0.
    """
    nodes, _, residuals = run.ritz()
    return float(nodes[0]) > float(residuals[0])


def _beyond(before: float, last: float) -> float:
    """What a geometric series with two terms known, the ``last`` and the one ``before``, still
    adds (Aitken).
    """
    return last * last / (before - last) if before > last > 0 else math.inf


def _rule(run: Lanczos, depth: int) -> float:
    """zᵀlog(A)z by the Gauss rule of the first ``depth`` steps."""
    nodes, weights, _ = run.ritz(max(1, depth))
    return float(weights @ nodes.log())


def _carried_on(run: Lanczos) -> float:
    """The smallest Ritz value less its residual; one that still falls, carried on as far as over
    its second half.
    """
    nodes, _, residuals = run.ritz()
    least, before = float(nodes[0]), float(run.ritz(max(1, len(nodes) // 2))[0][0])
    return max(least - float(residuals[0]), least * least / max(before, least))


def _gap(run: Lanczos, low: float) -> float:
    """The Gauss rule of log less the Gauss–Radau rule with a node at ``low``: what is not known of
    zᵀlog(A)z.

    Nothing where the Krylov space is whole, or the node of the Gauss rule already sits at ``low``
    to rounding.
    """
    nodes, weights, _ = run.ritz()
    rounding = float(torch.finfo(run.basis.dtype).eps) * float(nodes[-1])
    whole = len(nodes) == len(run.basis) or run.residual <= rounding
    if whole or float(nodes[0]) - low <= rounding:
        return 0.0
    others, masses = run.radau(low)
    return max(0.0, float(weights @ nodes.log()) - float(masses @ others.clamp_min(low).log()))


def rule_of(density: MaxentDensity, depth: int) -> Lanczos:
    """The Gauss rule with ``depth`` nodes of a density: that of every measure with its first
    2·depth moments.
    """
    mass = density.weights * density.values
    line = operator(scipy.sparse.diags_array(density.grid).tocsr())
    return lanczos(line, torch.as_tensor(np.sqrt(mass)), min(depth, len(mass)), "bias")
