"""Normal crossings K(w) = ∏ w_i^{2k_i}: the local form of every analytic loss, and its exact
finite expectations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import mul

import numpy as np
import torch
from torch import Tensor

from lambdahat._core.check import require, require_count, require_positive
from lambdahat.problem import Problem
from lambdahat.results import Array

# In s = ln|w| every factor is analytic in the strip |Im s| < π/4, so that the trapezoidal rule of
# step h is exact up to exp(−2π·(π/4)/h) = 1e-20 here.
STEP = 0.1
TAIL = 42.0  # e^−42 = 6e-19: what lies farther out than this many e-foldings is below rounding


def checked_exponents(exponents: Sequence[int]) -> tuple[int, ...]:
    """The k_i as integers, at least one above 0; a k_i of 0 is a dead parameter."""
    some = isinstance(exponents, Sequence) and len(exponents) > 0
    require(
        some,
        "exponents",
        "be a list of integers k_i, for K = ∏ w_i^{2k_i}",
        exponents,
        error=TypeError,
    )
    checked = tuple(require_count(k, "exponents", least=0) for k in exponents)
    require(
        max(checked) > 0,
        "exponents",
        "have one above 0",
        checked,
        "a K that is constant has nothing to learn",
    )
    return checked


def crossing_expectation(exponents: Sequence[int], nbeta: float, localization: float) -> float:
    """nβ·E[K] under p(w) ∝ exp(−nβ·K(w) − (γ/2)‖w‖²), K = ∏ w_i^{2k_i}: what λ̂ is at this
    temperature, exactly.

    K depends on s = Σ k_i·ln|w_i| alone, whose density under the Gaussian is a convolution of
    one-dimensional ones; both that and the last integral over s are done by the trapezoidal rule,
    which converges exponentially here. As nβ → ∞ the value tends to λ = 1/(2·max k_i), by no more
    than 1/ln(nβ) when the multiplicity is above 1. Without localization the integral exists for one
    exponent only, and is 1/(2k).
    """
    active = [k for k in checked_exponents(exponents) if k]
    require_positive(nbeta, "nbeta")
    if localization == 0 and len(active) == 1:
        return 1.0 / (2 * active[0])
    require_positive(
        localization,
        "localization",
        "several exponents need it: without it the posterior has no mass",
    )
    # in units of the Gaussian's own width the constant in front of K is nβ·γ^{−Σk}
    log_scale = math.log(nbeta) - sum(active) * math.log(localization)
    # beyond it the Gaussian is below e^{−2·TAIL}
    tops = [k * 0.5 * math.log(4 * TAIL) for k in active]
    bottom = -0.5 * max(log_scale, 0.0) - TAIL * max(active) - sum(tops)
    density = _density(active[0], bottom, tops[0])
    for k, top in zip(active[1:], tops[1:], strict=True):
        density = _convolved(density, _density(k, bottom, top))
    start = len(active) * _index(bottom)
    energy = np.exp(np.minimum(log_scale + 2 * STEP * (start + np.arange(len(density))), 700.0))
    weight = density * np.exp(-energy)
    return float((weight * energy).sum() / weight.sum())


def _index(position: float) -> int:
    """The last grid point at or below a position; all grids share the points STEP·i."""
    return math.floor(position / STEP)


def _density(k: int, bottom: float, top: float) -> Array:
    """The density of k·ln|w| for standard normal w, without its constant, on the grid from
    ``bottom`` to ``top``.
    """
    s = STEP * np.arange(_index(bottom), _index(top) + 2)
    return np.asarray(np.exp(s / k - 0.5 * np.exp(2 * s / k)))


def _convolved(first: Array, second: Array) -> Array:
    """The density of a sum: all terms are positive, so that sums lose no digits (an FFT would,
    in the tail).
    """
    full = np.convolve(first, second)
    return np.asarray(full / full.max())


def crossing_problem(exponents: Sequence[int], num_samples: int) -> Problem:
    """The loss K(w) = ∏ w_i^{2k_i} of ``num_samples`` samples at its singular point w = 0, in
    float64.
    """
    active = {i: k for i, k in enumerate(checked_exponents(exponents)) if k}

    def loss(parameters: Mapping[str, Tensor]) -> Tensor:
        w = parameters["w"]
        root = reduce(mul, (w[i] if k == 1 else w[i] ** k for i, k in active.items()))
        return root * root

    return Problem.from_function(
        loss, {"w": torch.zeros(len(exponents), dtype=torch.float64)}, num_samples=num_samples
    )
