"""The Tracy–Widom law against Painlevé's equation, published values, and the largest eigenvalues
of matrices.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.integrate import quad, solve_ivp
from scipy.linalg import eigvalsh
from scipy.special import airy

from lambdahat.randommatrix import (
    MarchenkoPastur,
    Semicircle,
    TracyWidom,
    edge_fluctuation,
    free_sum,
)

LAW = TracyWidom()


def test_moments_are_bornemanns():
    """Bornemann 2010, Table 10: mean, variance, skewness and excess kurtosis of β = 1."""
    mean, variance = -1.2065335745820, 1.607781034581
    assert LAW.mean == pytest.approx(mean, abs=1e-12)
    assert LAW.std**2 == pytest.approx(variance, abs=1e-11)
    nodes, weights = np.polynomial.legendre.leggauss(80)
    x, density = 2 + 11 * nodes, LAW.density(2 + 11 * nodes)
    for order, exact in ((0, 1.0), (3, 0.29346452408), (4, 3.1652429384)):
        found = 11 * weights @ (density * ((x - mean) / math.sqrt(variance)) ** order)
        assert found == pytest.approx(exact, abs=1e-9)


def test_quantiles_are_the_published_ones():
    """Johnstone 2001, Table 1, and the median."""
    for share, exact in (
        (0.01, -3.8954),
        (0.05, -3.1804),
        (0.5, -1.2686),
        (0.9, 0.4501),
        (0.95, 0.9793),
        (0.99, 2.0234),
    ):
        assert LAW.quantile(share) == pytest.approx(exact, abs=2e-4)
        assert LAW.cdf(LAW.quantile(share)) == pytest.approx(share, abs=1e-11)


def test_determinant_is_painlevés_function():
    """F₁(s) = exp(−½∫_s^∞ (q + (x − s)q²)dx), q'' = sq + 2q³, q ~ Ai (Tracy and Widom 1996)."""
    start = 6.0

    def slope(s, y):
        q, dq, square, _, _ = y
        return [dq, s * q + 2 * q**3, -(q**2), -square, -q]

    value, change, _, _ = airy(start)
    tail = quad(lambda x: airy(x)[0] ** 2, start, 20)[0]
    double = quad(lambda x: (x - start) * airy(x)[0] ** 2, start, 20)[0]
    single = quad(lambda x: airy(x)[0], start, 20)[0]
    points = np.linspace(4, -4, 17)
    path = solve_ivp(
        slope,
        (start, -4),
        [value, change, tail, double, single],
        "DOP853",
        points,
        rtol=1e-12,
        atol=1e-16,
    )
    assert np.allclose(LAW.cdf(points), np.exp(-(path.y[3] + path.y[4]) / 2), atol=1e-7)


def test_density_is_the_slope_of_the_distribution():
    x = np.linspace(-6, 5, 23)
    assert np.allclose((LAW.cdf(x + 1e-4) - LAW.cdf(x - 1e-4)) / 2e-4, LAW.density(x), atol=1e-8)


def test_far_tails_are_0_and_1():
    assert LAW.cdf([-math.inf, -50.0, 50.0, math.inf]).tolist() == [0.0, 0.0, 1.0, 1.0]
    assert LAW.density([-50.0, 50.0]).tolist() == [0.0, 0.0]
    grid = np.linspace(-11, 17, 100)
    assert (np.diff(LAW.cdf(grid)) >= -1e-14).all()


def largest(matrix: torch.Tensor) -> float:
    size = len(matrix)
    return float(eigvalsh(matrix.numpy(), subset_by_index=(size - 1, size - 1))[0])


HALVES = free_sum([-1.0, 1.0], Semicircle(0.8))
KNOWN = torch.diag(torch.tensor([-1.0, 1.0], dtype=torch.float64).repeat(40))
CASES = {
    "semicircle": (Semicircle(0.7), Semicircle(0.7).sample),
    "more columns than rows": (MarchenkoPastur(2.0, 0.4), MarchenkoPastur(2.0, 0.4).sample),
    "more rows than columns": (MarchenkoPastur(0.5, 2.5), MarchenkoPastur(0.5, 2.5).sample),
}


@pytest.mark.parametrize("name", CASES)
def test_largest_eigenvalues_follow_the_law(name):
    law, make = CASES[name]
    count = 300
    centre, scale = edge_fluctuation(law, 80)
    tops = (np.array([largest(make(80, seed)) for seed in range(count)]) - centre) / scale
    assert abs(tops.mean() - LAW.mean) < 3.5 * LAW.std / math.sqrt(count)
    assert tops.std(ddof=1) == pytest.approx(LAW.std, rel=3.5 / math.sqrt(2 * count))
    assert stats.kstest(tops, LAW.cdf).pvalue > 1e-3


def test_the_edge_of_a_sum_follows_the_law_where_the_naive_edge_does_not():
    """Without finite-size corrections the centre errs by O(1/P), 0.2 of the scale at P = 80."""
    count = 300
    centre, scale = edge_fluctuation(HALVES, 80)
    noise = Semicircle(0.8)
    tops = (
        np.array([largest(KNOWN + noise.sample(80, seed)) for seed in range(count)]) - centre
    ) / scale
    assert abs(tops.mean() - LAW.mean) < 3.5 * LAW.std / math.sqrt(count) + 80 ** (-1 / 3)
    assert tops.std(ddof=1) == pytest.approx(LAW.std, rel=0.15)
    naive = (largest(KNOWN) + 2 * 0.8 - centre) / scale
    assert naive > 4


@pytest.mark.parametrize(
    "law", [Semicircle(0.7), MarchenkoPastur(2.0, 0.4), MarchenkoPastur(0.5, 2.5)], ids=repr
)
def test_large_matrices_have_the_edge_and_its_slope(law):
    """centre → λ₊ and scale → (Pc)^(−2/3), and the sum with a point has both."""
    size = 10**9
    centre, scale = edge_fluctuation(law, size)
    assert centre == pytest.approx(law.edges[1], rel=1e-8)
    assert scale == pytest.approx((size * law.edge_slope) ** (-2 / 3), rel=1e-8)
    gap = 1e-7 * law.edges[1]
    assert law.density(law.edges[1] - gap) == pytest.approx(
        law.edge_slope * math.sqrt(gap) / math.pi, rel=1e-5
    )
    assert edge_fluctuation(free_sum(3.0, law), size) == pytest.approx(
        (law.edges[1] + 3.0, scale), rel=1e-8
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "law", [Semicircle(1.0), MarchenkoPastur(1.0, 0.5), MarchenkoPastur(1.0, 2.0)], ids=repr
)
def test_a_large_matrix_has_its_largest_eigenvalue_at_the_edge(law):
    """One draw at P = 4,000 lies within TW₁'s central 99.9 %."""
    centre, scale = edge_fluctuation(law, 4000)
    reading = (largest(law.sample(4000)) - centre) / scale
    assert LAW.quantile(5e-4) < reading < LAW.quantile(1 - 5e-4)


MISUSES = {
    "all of the mass": (
        lambda: LAW.quantile(1.0),
        ValueError,
        r"share must lie in \(0, 1\), got 1.0",
    ),
    "NaN": (lambda: LAW.cdf(math.nan), ValueError, "x must be numbers, got NaN"),
    "no law": (
        lambda: edge_fluctuation(1.0, 10),
        TypeError,
        "law must be a Semicircle, MarchenkoPastur or FreeSum",
    ),
    "no size": (
        lambda: edge_fluctuation(Semicircle(1.0), 0),
        ValueError,
        "dimension must be an integer of at least 1",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_named_with_its_cure(name):
    call, error, pattern = MISUSES[name]
    with pytest.raises(error, match=pattern):
        call()
