"""How fast Lanczos and power iteration find an extreme eigenvalue; what Ritz values cannot be
(§4.4, spectral thesis).

Three misprints are mended. The angle θ₁ of Theorem 4 is that of the start vector to the
eigenvector, not of a Ritz vector. Its bound of the smallest Ritz value is the first one applied to
−H. Table 4.5 belongs to the exponent 2(m − 1), m − 1 products being what Lanczos has made after m
steps with m vectors, and to λ_P = 0; the 2m − 1 of Theorem 5 gives other digits.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lambdahat._core.check import require, require_choice, require_count


def lanczos_bound(
    eigenvalues: ArrayLike, overlap: float, steps: int, which: str = "largest"
) -> float:
    """A bound of the extreme Ritz value after ``steps`` = m of Lanczos (Theorem 4, Kaniel–Paige).

    λ₁ ≥ θ₁ ≥ λ₁ − (λ₁ − λ_P) tan²∠(v, φ₁) / c_{m−1}(1 + 2ρ₁)², ρ₁ = (λ₁ − λ₂)/(λ₂ − λ_P), c_k the
    Chebyshev polynomial. ``overlap`` is |vᵀφ₁| for the unit start v: about 1/√P for a random one.
    For which="smallest" it is the upper bound of the smallest Ritz value, and ``overlap`` that with
    its eigenvector.
    """
    sign = 1.0 if require_choice(which, "which", ("largest", "smallest")) == "largest" else -1.0
    first, second, last = _ends(sign * _values(eigenvalues))
    require_count(steps, "steps")
    term = _chebyshev_term(first, second, last, steps - 1)
    return sign * (first - (first - last) * _squared_tangent(overlap) * term)


def power_bound(eigenvalues: ArrayLike, overlap: float, products: int) -> float:
    """A lower bound of vᵀHv/vᵀv after ``products`` = m steps v ← Hv (Theorem 5, spectral thesis).

    λ₁ − (λ₁ − λ_P) tan²∠(v, φ₁) (μ/λ₁)^{2m} with μ = max_{j>1}|λ_j|. For a λ₁ > 0 of largest
    magnitude.
    """
    values = _values(eigenvalues)
    first, _, last = _ends(values)
    rest = float(np.abs(np.delete(values, values.argmax())).max())
    expected = "have a largest one above all other magnitudes"
    got = f"{first:.6g} and {rest:.6g}"
    require(first > rest, "eigenvalues", expected, got, "power iteration finds no other")
    require_count(products, "products", least=0)
    return first - (first - last) * _squared_tangent(overlap) * (rest / first) ** (2 * products)


def convergence_terms(ratio: float, steps: int) -> tuple[float, float]:
    """L and R of Table 4.5: the factors of (λ₁ − λ_P) tan²θ₁ for Lanczos and power iteration.

    L = 1/c_{m−1}(2λ₁/λ₂ − 1)² and R = (λ₂/λ₁)^{2(m−1)} for ``ratio`` = λ₁/λ₂ and λ_P = 0: both have
    the same m vectors of the Krylov space to choose from.

    >>> "%.1e %.1e" % convergence_terms(1.5, 5)
    '1.1e-04 3.9e-02'
    """
    require(ratio > 1, "ratio", "be above 1, λ₁/λ₂", repr(ratio))
    require_count(steps, "steps")
    return _chebyshev_term(ratio, 1.0, 0.0, steps - 1), ratio ** (-2.0 * (steps - 1))


def excludes_top_pairs(eigenvalues: ArrayLike, steps: int) -> bool:
    """Whether the mean eigenvalue proves that m Ritz values are not the m largest (Theorem 8).

    The smallest Ritz value is at most vᵀHv, of mean tr H/P for a random start; if that is below λ_m
    the Ritz values cannot be λ₁ … λ_m. The theorem asks for Σ_{j≤m} λ_j < Σ_{j>m} λ_j instead,
    which its proof does not support. If this is False they are others all the same, for any start
    outside the span of m eigenvectors: only the mean does not prove it.
    """
    values = np.sort(_values(eigenvalues))[::-1]
    require_count(steps, "steps", 1, len(values))
    return bool(values.mean() < values[steps - 1])


def _values(eigenvalues: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(eigenvalues, dtype=np.float64)
    fine = values.ndim == 1 and len(values) > 1 and bool(np.isfinite(values).all())
    require(fine, "eigenvalues", "be a list of two finite numbers or more", values)
    return values


def _ends(values: NDArray[np.float64]) -> tuple[float, float, float]:
    """λ₁, λ₂ and λ_P."""
    order = np.sort(values)
    return float(order[-1]), float(order[-2]), float(order[0])


def _squared_tangent(overlap: float) -> float:
    fine = 0 < overlap <= 1
    require(fine, "overlap", "lie in (0, 1], the cosine of start and eigenvector", repr(overlap))
    return 1.0 / overlap**2 - 1.0


def _chebyshev_term(first: float, second: float, last: float, order: int) -> float:
    """1/c_order(1 + 2ρ)², as 1/cosh² of the growing argument, which cannot overflow."""
    if second == last:  # two eigenvalues, which two steps find
        return 1.0 if order == 0 else 0.0
    growth = order * math.acosh(1.0 + 2.0 * (first - second) / (second - last))
    return (2.0 * math.exp(-growth) / (1.0 + math.exp(-2.0 * growth))) ** 2
