"""The Kolmogorov distance of eigenvalues from a law: the largest difference of their
distribution functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

ROUNDING = 1e-9  # eigenvalues nearer to 0 are 0


def distance(eigenvalues: np.ndarray, cdf: Callable[[np.ndarray], np.ndarray]) -> float:
    """sup_x |F_P(x) − F(x)| of eigenvalues (P,) in equal shares, both sides of every step looked
    at.
    """
    cleaned = np.where(np.abs(eigenvalues) < ROUNDING, 0.0, eigenvalues)
    places, counts = np.unique(cleaned, return_counts=True)
    shares = counts.cumsum() / counts.sum()
    below = cdf(np.nextafter(places, -np.inf))
    return float(
        max(
            np.abs(shares - cdf(places)).max(), np.abs(shares - counts / counts.sum() - below).max()
        )
    )


def rigidity(size: int) -> float:
    """Four standard deviations of a count of real symmetric noise, over P: √(2 ln P)/π (O'Rourke
    2010).

    Eigenvalues repel; P independent draws would lie 0.87/√P from their law.
    """
    return 4 * math.sqrt(2 * math.log(size)) / math.pi / size
