"""Exact answers of singular learning theory: learning coefficients in closed form, and what λ̂
is at finite nβ, γ, ε.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from lambdahat._core.check import require, require_count, require_positive
from lambdahat.problem import Problem
from lambdahat.results import Array, Result
from lambdahat.singular.crossings import checked_exponents
from lambdahat.singular.crossings import crossing_expectation as crossing_expectation
from lambdahat.singular.crossings import crossing_problem as crossing_problem
from lambdahat.singular.linear_networks import checked_widths
from lambdahat.singular.linear_networks import deep_linear_problem as deep_linear_problem
from lambdahat.singular.linear_networks import deep_linear_reference as deep_linear_reference


@dataclass(frozen=True)
class Coefficient(Result):
    """A learning coefficient λ, known exactly, and its multiplicity m: V(ε) ∝ ε^λ·(−ln ε)^{m−1} as
    ε → 0.

    The free energy is nβ·L* + λ·ln(nβ) − (m − 1)·ln ln(nβ) + O(1), so that nβ·E[L − L*] is near λ −
    (m − 1)/ln(nβ).

    >>> float(reduced_rank(5, 3, 5, rank=0))
    6.5
    """

    value: float
    multiplicity: int = 1

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        return f"{self.value:g} (multiplicity {self.multiplicity})"


def regular(dimension: int) -> Coefficient:
    """λ = d/2: the loss is a positive definite quadratic form of d parameters near its minimum."""
    return Coefficient(require_count(dimension, "dimension") / 2)


def normal_crossing(exponents: Sequence[int]) -> Coefficient:
    """λ = 1/(2·max k_i) of K = ∏ w_i^{2k_i} at 0; the multiplicity is how many i reach the maximum
    (Watanabe 2009).

    >>> print(normal_crossing([1, 2, 2]))
    0.25 (multiplicity 2)
    """
    checked = checked_exponents(exponents)
    return Coefficient(1 / (2 * max(checked)), checked.count(max(checked)))


def reduced_rank(inputs: int, hidden: int, outputs: int, rank: int) -> Coefficient:
    """λ of y = BAx, A (hidden, inputs) and B (outputs, hidden), when the true BA has rank ``rank``.

    Aoyagi and Watanabe (2005), their four cases. The multiplicity is that of the two-layer
    ``deep_linear``.
    """
    m, h, n = checked_widths((inputs, hidden, outputs), rank)
    r = rank
    if m + h < n + r:
        value = (h * m - h * r + n * r) / 2
    elif n + h < m + r:
        value = (h * n - h * r + m * r) / 2
    elif m + n < h + r:
        value = m * n / 2
    else:
        parity = (m + h + n + r) % 2
        value = (-((h + r) ** 2) - m**2 - n**2 + 2 * (h + r) * (m + n) + 2 * m * n + parity) / 8
    return Coefficient(value, deep_linear((m, h, n), rank).multiplicity)


def deep_linear(widths: Sequence[int], rank: int) -> Coefficient:
    """λ of a deep linear network of ``widths`` (H_0, …, H_L) whose true map has rank r (Aoyagi
    2024).

    With M_s = H_s − r and S the bottleneck, ℓ + 1 of the smallest M_s (see ``_bottleneck``), a = ΣS
    − (⌈ΣS/ℓ⌉ − 1)·ℓ: λ = (r(H_0 + H_L) − r²)/2 + a(ℓ − a)/(4ℓ) − (ℓ(ℓ − 1)/4)·(ΣS/ℓ)² + ½·Σ_{i<j∈S}
    M_i·M_j, m = a(ℓ − a) + 1. It is the smallest λ of all true parameters, that of
    ``deep_linear_problem``'s w*.
    """
    widths = checked_widths(widths, rank)
    tight = _bottleneck([width - rank for width in widths])
    l, total = len(tight) - 1, sum(tight)
    a = total - (math.ceil(total / l) - 1) * l
    ends = rank * (widths[0] + widths[-1] - rank)
    pairs = sum(first * second for first, second in combinations(tight, 2))
    times_4l = 2 * l * (ends + pairs) + a * (l - a) - (l - 1) * total**2
    return Coefficient(times_4l / (4 * l), a * (l - a) + 1)


def _bottleneck(excess: list[int]) -> list[int]:
    """The ℓ + 1 smallest with max S < min(rest), ΣS ≥ ℓ·max S and ΣS < ℓ·min(rest); exactly one
    ℓ ≥ 1 has all three.
    """
    ordered = sorted(excess)
    for l in range(1, len(ordered)):
        chosen, total = ordered[: l + 1], sum(ordered[: l + 1])
        rest = ordered[l + 1] if l + 1 < len(ordered) else math.inf
        if chosen[-1] < rest and l * chosen[-1] <= total < l * rest:
            return chosen
    raise AssertionError(f"no bottleneck in {excess}")


def quadratic(
    eigenvalues: Sequence[float], nbeta: float, localization: float, step_size: float = 0.0
) -> float:
    """E[λ̂] = ½·Σ nβh_i / [a_i(1 − εa_i/4)], a_i = nβh_i + γ: full-batch SGLD of step ε on L = ½·Σ
    h_i·w_i², w* = 0.

    ``step_size`` 0 is the posterior itself. Without γ and ε this is d/2: the formula separates the
    bias of each.
    """
    return float(0.5 * _ratios(eigenvalues, nbeta, localization, step_size).sum())


def quadratic_variance(
    eigenvalues: Sequence[float], nbeta: float, localization: float, step_size: float = 0.0
) -> float:
    """Var[nβ(L − L*)] = ½·Σ (nβh_i / [a_i(1 − εa_i/4)])² of one draw in the setting of
    ``quadratic``.
    """
    return float(0.5 * np.square(_ratios(eigenvalues, nbeta, localization, step_size)).sum())


def _ratios(
    eigenvalues: Sequence[float], nbeta: float, localization: float, step_size: float
) -> Array:
    """nβh_i·Var(w_i): w ← (1 − εa/2)·w + √ε·N(0, 1) has the stationary variance 1/[a(1 − εa/4)]."""
    h = _checked_eigenvalues(eigenvalues)
    require(localization >= 0, "localization", "be at least 0", repr(localization))
    require(step_size >= 0, "step_size", "be at least 0", repr(step_size))
    a = require_positive(nbeta, "nbeta") * h + localization
    require(
        bool((a > 0).all()),
        "localization",
        "exceed −nβ·h of every eigenvalue h",
        f"{localization!r} with a smallest eigenvalue of {h.min():g}",
        "raise it",
    )
    require(
        bool((step_size * a < 4).all()),
        "step_size",
        f"be below 4/(nβ·h + γ) = {4 / a.max():.4g}",
        repr(step_size),
        "the chain diverges",
    )
    return np.asarray(nbeta * h / (a * (1 - step_size * a / 4)))


def _checked_eigenvalues(eigenvalues: Sequence[float]) -> Array:
    values = np.asarray(eigenvalues, dtype=np.float64)
    fine = values.ndim == 1 and values.size > 0 and bool(np.isfinite(values).all())
    require(fine, "eigenvalues", "be a list of finite numbers", eigenvalues)
    return values


def quadratic_problem(eigenvalues: Sequence[float], num_samples: int) -> Problem:
    """The loss L = ½·Σ h_i·w_i² of ``num_samples`` samples at w = 0, in float64."""
    h = torch.from_numpy(_checked_eigenvalues(eigenvalues))

    def loss(parameters: Mapping[str, Tensor]) -> Tensor:
        w = parameters["w"]
        return 0.5 * (h * w * w).sum()

    return Problem.from_function(loss, {"w": torch.zeros_like(h)}, num_samples=num_samples)
