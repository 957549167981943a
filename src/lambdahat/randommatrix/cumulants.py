"""Moments and free cumulants of one law, each from the other (Speicher 1994)."""

from __future__ import annotations

import numpy as np

from lambdahat.results import Array


def moments_of(cumulants: Array) -> Array:
    """m_0 … m_k from κ_0 … κ_k (κ_0 is not used): m_n = Σ_{s=1}^{n} κ_s·[z^{n−s}] M(z)^s with
    M(z) = Σ_n m_n zⁿ.
    """
    moments = np.zeros(len(cumulants))
    moments[0] = 1.0
    for n in range(1, len(cumulants)):
        moments[n] = _by_parts(cumulants, moments, n) + cumulants[n]
    return moments


def cumulants_of(moments: Array) -> Array:
    """κ_0 = 0, κ_1 … κ_k from m_0 … m_k, by the same relation."""
    cumulants = np.zeros(len(moments))
    for n in range(1, len(moments)):
        cumulants[n] = moments[n] - _by_parts(cumulants, moments, n)
    return cumulants


def _by_parts(cumulants: Array, moments: Array, n: int) -> float:
    """Σ_{s=1}^{n−1} κ_s·[z^{n−s}] M(z)^s: everything but κ_n, whose factor is 1."""
    total, power = 0.0, np.eye(1, n + 1)[0]
    for s in range(1, n):
        power = np.convolve(power, moments[: n + 1])[: n + 1]
        total += cumulants[s] * power[n - s]
    return float(total)
