"""The largest stable learning rate on a noisy quadratic, with momentum, and errors carried through
a formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lambdahat._core.check import require_number, require_positive
from lambdahat.results import Array, Estimate, student_quantile

LEAST_RATE = 1e-6  # of the limit with all data, where the search for the limit with noise ends
RATES = 40  # at which stability is looked at between the two, before bisection
BISECTIONS = 14
LEAST_ERROR = 1e-3
FARTHEST = 300.0  # of an interval's ends, as logarithms: floats end at 709


@dataclass(frozen=True)
class PositiveEstimate(Estimate):
    """An estimate of a positive number with an interval on a logarithmic scale.

    ``log_error`` is the standard error of ln value, known with ``dof`` degrees of freedom;
    ``doubt`` are further ones, downwards and upwards, for what the model leaves out. ``stderr``
    joins them, in units of the value.
    """

    log_error: float = 0.0
    doubt: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def of(cls, estimate: Estimate, doubt: tuple[float, float] = (0.0, 0.0)) -> PositiveEstimate:
        """A positive estimate; the error of its logarithm is the relative error, at least 0.1 %."""
        value = float(estimate)
        error = max(float(estimate.stderr) / value, LEAST_ERROR)
        whole = value * math.hypot(error, sum(doubt) / 2)
        return cls(value, whole, estimate.cost, estimate.status, estimate.dof, error, doubt)

    def interval(self, level: float = 0.95) -> tuple[Any, Any]:
        """The two-sided interval, value·exp(∓ …)."""
        require_number(level, "level", "(0, 1)")
        known = student_quantile(level, self.dof) * self.log_error
        normal = student_quantile(level, math.inf)
        down, up = (math.hypot(known, normal * part) for part in self.doubt)
        value = float(self)
        return value * math.exp(-min(down, FARTHEST)), value * math.exp(min(up, FARTHEST))


def stability_limit(
    curvature: float, excess: float = 0.0, momentum: float = 0.0, nesterov: bool = False
) -> float:
    """The largest learning rate α at which E‖x‖² does not grow along a direction of curvature λ.

    Each step sees the curvature h of its own batch, with E h = λ and E‖(H_batch − H̄)φ‖² =
    λ·``excess``: what a batch adds to the largest eigenvalue, τ²/(bλ), for λ' = λ + τ²/(bλ). With
    x_{t+1} = x_t − αh_t x_t + ρ(x_t − x_{t−1}) the second moments are stationary at

        α = 2(1 + ρ)/(λ + excess·(1 + ρ)/(1 − ρ)),

    which is 2/λ' without momentum (Eq. 5.34, spectral thesis) and 2(1 + ρ)/λ with all data. If the
    excess dominates, with small batches, it is 2(1 − ρ)/excess: momentum then lowers the limit.
    Nesterov's, where x_{t+1} = (1 − αh_t)(x_t + ρ(x_t − x_{t−1})), is the positive root u = αλ of

        (1 + k)D·u² + ((1 + k)(1 + ρ) − 2D)·u = 2(1 − ρ²),    D = ρ(1 + 2ρ), k = excess/λ,

    and 2(1 + ρ)/((1 + 2ρ)λ) with all data.

    >>> stability_limit(4.0), stability_limit(4.0, 1.0), stability_limit(4.0, momentum=0.5)
    (0.5, 0.4, 0.75)
    """
    require_positive(curvature, "curvature", "a direction that bends down has no stable rate")
    require_number(momentum, "momentum", "[0, 1)")
    noise = max(require_number(excess, "excess", "[-inf, inf]"), 0.0)
    if not (nesterov and momentum > 0):
        return 2 * (1 + momentum) / (curvature + noise * (1 + momentum) / (1 - momentum))
    grown, lead = 1 + noise / curvature, momentum * (1 + 2 * momentum)
    half = (grown * (1 + momentum) - 2 * lead) / 2
    square = grown * lead
    return (math.sqrt(half**2 + 2 * square * (1 - momentum**2)) - half) / square / curvature


def allowed_excess(
    rate: float, curvature: float, momentum: float = 0.0, nesterov: bool = False
) -> float:
    """The excess at which ``stability_limit`` is ``rate``; below 0 where it is lower without any.

    >>> allowed_excess(0.4, 4.0), allowed_excess(0.6, 4.0, 0.5)
    (1.0, 0.3333333333333333)
    """
    require_number(momentum, "momentum", "[0, 1)")
    if not nesterov:
        return (2 * (1 + momentum) / rate - curvature) * (1 - momentum) / (1 + momentum)
    u, lead = rate * curvature, momentum * (1 + 2 * momentum)
    growth = (2 * (1 - momentum**2) + 2 * lead * u) / (lead * u**2 + (1 + momentum) * u)
    return curvature * (growth - 1)


def limit_of(
    curvature: Estimate, excess: Estimate, momentum: float = 0.0, nesterov: bool = False
) -> Estimate:
    """``stability_limit`` of measured numbers; a negative excess counts as 0."""

    def limit(true: float, more: float) -> float:
        return stability_limit(true, more, momentum, nesterov)

    # differences must not reach across the bound at 0
    inside = replace(excess, value=max(float(excess), 0.5 * float(excess.stderr)))
    value = limit(float(curvature), float(excess))
    return replace(propagate(limit, curvature, inside), value=value)


def coupled_limit(
    curvatures: Array,
    deviations: Array,
    share: float,
    momentum: float = 0.0,
    nesterov: bool = False,
) -> float:
    """The largest learning rate at which E xxᵀ does not grow in a space of coupled eigenvectors.

    ``curvatures`` (k,) are the eigenvalues, ``deviations`` (n, k, k) those of each sample's matrix
    from diag λ, and ``share`` is the part of their variance that is left in the mean of a batch. X
    ↦ E[A X Aᵀ] over batches, A a step, maps positive matrices to positive ones, so that its
    spectral radius is below 1 if and only if X = E[A X Aᵀ] + I has a positive definite solution.

    >>> limit = coupled_limit(np.array([4.0]), np.array([[[2.0]], [[-2.0]]]), 1.0)
    >>> float(round(limit, 3))  # 2/(4 + 2²/4)
    0.4
    """
    order = len(curvatures)
    products = np.einsum("nij,nkl->ikjl", deviations, deviations)
    noise = products.reshape(order**2, order**2) / len(deviations) * share
    highest = stability_limit(float(curvatures.max()), 0.0, momentum, nesterov)
    if not noise.any():
        return highest
    eye = np.eye(order)

    def stable(rate: float) -> bool:
        step = eye - rate * np.diag(curvatures)
        if momentum == 0:
            moments = np.kron(step, step) + rate**2 * noise
        else:
            seen = here = np.hstack([eye, 0 * eye])
            ahead = np.hstack([step + momentum * eye, -momentum * eye])
            if nesterov:
                seen = np.hstack([(1 + momentum) * eye, -momentum * eye])
                ahead = step @ seen
            whole, into = np.vstack([ahead, here]), np.vstack([eye, 0 * eye])
            driven = rate**2 * np.kron(into, into) @ noise @ np.kron(seen, seen)
            moments = np.kron(whole, whole) + driven
        size = math.isqrt(len(moments))
        try:
            flat = np.linalg.solve(np.eye(len(moments)) - moments, np.eye(size).ravel())
        except np.linalg.LinAlgError:
            return False
        fixed = flat.reshape(size, size)
        return bool(np.isfinite(fixed).all() and np.linalg.eigvalsh((fixed + fixed.T) / 2)[0] > 0)

    rates = np.geomspace(LEAST_RATE, 1.0, RATES) * highest
    low = high = float(rates[0])
    for rate in rates[1:]:
        high = float(rate)
        if not stable(high):
            break
        low = high
    for _ in range(BISECTIONS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if stable(middle) else (low, middle)
    return high if high >= highest * (1 - 1e-9) else math.sqrt(low * high)


def propagate(function: Callable[..., float], *inputs: Estimate) -> Estimate:
    """``function`` of estimates with independent errors, √Σ(∂f/∂x_i·s_i)², by central differences.

    The differences are over ± half an error, the degrees of freedom Welch and Satterthwaite's.
    """
    values = [float(each) for each in inputs]
    parts = []
    for i, each in enumerate(inputs):
        step, before, after = 0.5 * float(each.stderr), values[:i], values[i + 1 :]
        ends = [function(*before, values[i] + sign * step, *after) for sign in (1, -1)]
        parts.append((ends[0] - ends[1]) ** 2 if step else 0.0)
    variance, cost = sum(parts), sum(each.cost for each in inputs)
    slack = sum(part**2 / each.dof for part, each in zip(parts, inputs, strict=True) if part)
    dof = variance**2 / slack if slack > 0 else math.inf
    return Estimate(function(*values), math.sqrt(variance), cost, dof=dof)


def differ(first: Estimate, second: Estimate) -> bool:
    """Whether two estimates differ for sure: the 95 % interval of their difference leaves out 0."""
    low, high = propagate(lambda x, y: x - y, first, second).interval()
    return bool(low > 0 or high < 0)
