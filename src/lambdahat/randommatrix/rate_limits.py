"""The largest stable learning rate on a noisy quadratic, with momentum, and errors carried through a formula."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import replace

from lambdahat._check import describe, require, require_positive
from lambdahat.results import Estimate


def stability_limit(curvature: float, excess: float = 0.0, momentum: float = 0.0, nesterov: bool = False) -> float:
    """The largest learning rate α at which E‖x‖² does not grow along a direction of mean curvature λ.

    Each step sees the curvature h of its own batch, with E h = λ and E‖(H_batch − H̄)φ‖² = λ·``excess``: what a batch
    adds to the largest eigenvalue, τ²/(bλ), for λ' = λ + τ²/(bλ). With x_{t+1} = x_t − αh_t x_t + ρ(x_t − x_{t−1}) the
    second moments are stationary at

        α = 2(1 + ρ)/(λ + excess·(1 + ρ)/(1 − ρ)),

    which is 2/λ' without momentum (Eq. 5.34, spectral thesis) and 2(1 + ρ)/λ with all data. Where the excess dominates,
    with small batches, it is 2(1 − ρ)/excess: momentum then lowers the limit. Nesterov's, where
    x_{t+1} = (1 − αh_t)(x_t + ρ(x_t − x_{t−1})), is the positive root u = αλ of

        (1 + k)D·u² + ((1 + k)(1 + ρ) − 2D)·u = 2(1 − ρ²),    D = ρ(1 + 2ρ), k = excess/λ,

    and 2(1 + ρ)/((1 + 2ρ)λ) with all data.

    >>> stability_limit(4.0), stability_limit(4.0, 1.0), stability_limit(4.0, momentum=0.5)
    (0.5, 0.4, 0.75)
    """
    require_positive(curvature, "curvature", "a direction that bends down has no stable rate")
    require_momentum(momentum)
    require(_is_real(excess), "excess", "be a number", describe(excess), "", TypeError)
    require(not math.isnan(excess), "excess", "be a number", repr(excess))
    noise = max(excess, 0.0)
    if not (nesterov and momentum > 0):
        return 2 * (1 + momentum) / (curvature + noise * (1 + momentum) / (1 - momentum))
    grown, lead = 1 + noise / curvature, momentum * (1 + 2 * momentum)
    half = (grown * (1 + momentum) - 2 * lead) / 2
    square = grown * lead
    return (math.sqrt(half**2 + 2 * square * (1 - momentum**2)) - half) / square / curvature


def allowed_excess(rate: float, curvature: float, momentum: float = 0.0, nesterov: bool = False) -> float:
    """The excess at which ``stability_limit`` is ``rate``; below 0 where it is lower without any.

    >>> allowed_excess(0.4, 4.0), allowed_excess(0.6, 4.0, 0.5)
    (1.0, 0.3333333333333333)
    """
    require_momentum(momentum)
    if not nesterov:
        return (2 * (1 + momentum) / rate - curvature) * (1 - momentum) / (1 + momentum)
    u, lead = rate * curvature, momentum * (1 + 2 * momentum)
    return curvature * ((2 * (1 - momentum**2) + 2 * lead * u) / (lead * u**2 + (1 + momentum) * u) - 1)


def limit_of(curvature: Estimate, excess: Estimate, momentum: float = 0.0, nesterov: bool = False) -> Estimate:
    """``stability_limit`` of measured numbers. An excess that came out below 0 counts as 0, its error as above 0."""
    half = 0.5 * float(excess.stderr)
    inside = replace(excess, value=max(float(excess), half))  # so that differences do not reach across the bound at 0
    limit = propagated(lambda true, more: stability_limit(true, more, momentum, nesterov), curvature, inside)
    return replace(limit, value=stability_limit(float(curvature), float(excess), momentum, nesterov))


def require_momentum(momentum: object) -> float:
    """A number in [0, 1)."""
    require(_is_real(momentum), "momentum", "be a number in [0, 1)", describe(momentum), "", TypeError)
    require(0 <= momentum < 1, "momentum", "lie in [0, 1)", repr(momentum))  # type: ignore[operator]
    return float(momentum)  # type: ignore[arg-type]


def _is_real(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def propagated(function: Callable[..., float], *inputs: Estimate) -> Estimate:
    """``function`` of estimates with independent errors: √Σ(∂f/∂x_i·s_i)², by differences over ± half an error.

    The degrees of freedom are Welch and Satterthwaite's.
    """
    values = [float(each) for each in inputs]
    parts = []
    for i, each in enumerate(inputs):
        step = 0.5 * float(each.stderr)
        ends = [function(*values[:i], values[i] + sign * step, *values[i + 1 :]) for sign in (1, -1)]
        parts.append((ends[0] - ends[1]) ** 2 if step else 0.0)
    variance = sum(parts)
    slack = sum(part**2 / each.dof for part, each in zip(parts, inputs, strict=True) if part)
    dof = variance**2 / slack if slack > 0 else math.inf
    return Estimate(function(*values), math.sqrt(variance), sum(each.cost for each in inputs), dof=dof)


def differ(first: Estimate, second: Estimate) -> bool:
    """Whether two estimates differ for sure: the 95 % interval of their difference leaves out 0."""
    low, high = propagated(lambda x, y: x - y, first, second).interval()
    return bool(low > 0 or high < 0)
