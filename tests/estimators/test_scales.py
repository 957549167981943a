"""Every estimator gives c times (for log det, plus P·log c) the same answer for c·A, for all c
that the dtype holds.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

import lambdahat as lh
from tests.cases import Products, with_eigenvalues

D = torch.float64
INDEFINITE = with_eigenvalues(
    torch.cat([torch.tensor([9.0, -7, 5, -3, 2], dtype=D), torch.linspace(-1, 1, 195)])
)
POSITIVE = with_eigenvalues(
    torch.cat([torch.tensor([9.0, 7, 5, 3, 2], dtype=D), torch.linspace(0.5, 1, 195)])
)
SMALL = with_eigenvalues(torch.linspace(-1, 2, 40))
# The ends of the range, where squares of entries just under- or overflow, and where fourth powers
# do.
SCALES = [
    *[(torch.float32, c) for c in (1e-36, 1e-22, 1e-9, 1e12, 1e35)],
    *[(torch.float64, c) for c in (1e-305, 1e-170, 1e-80, 1e80, 1e300)],
]


def linear(estimate):
    """Value and standard error, both of which scale with A."""
    return [torch.as_tensor(part, dtype=D).flatten() for part in (estimate.value, estimate.stderr)]


def shown(spectrum):
    low, high = spectrum.extremes
    outliers = torch.tensor([float(one) for one in spectrum.outliers()], dtype=D)
    ends = torch.tensor([float(low), float(high)], dtype=D)  # their residuals are rounding
    parts = [linear(one) for one in (spectrum.trace, spectrum.frobenius, spectrum.mean)]
    density = spectrum.density()
    support = torch.tensor([density.grid[0], density.grid[-1], density.width], dtype=D)
    return [outliers, support, ends, *(part for pair in parts for part in pair)]


LINEAR = {
    "trace": lambda A: linear(lh.trace(A, tol=0.1)),
    "xtrace": lambda A: linear(lh.trace(A, tol=0.1, method="xtrace")),
    "hutch++": lambda A: linear(lh.trace(A, tol=0.1, method="hutch++")),
    "hutchinson": lambda A: linear(lh.trace(A, tol=0.3, method="hutchinson")),
    "diagonal": lambda A: linear(lh.diagonal(A, probes=30)),
    "frobenius norm": lambda A: linear(lh.frobenius_norm(A, tol=0.05)),
    "spectral norm": lambda A: linear(lh.spectral_norm(A)),
    "eigenpairs": lambda A: [lh.eigenpairs(A, 5).values],
    "both ends": lambda A: [lh.eigenpairs(A, 3, "both", tol=1e-4).values],
    "power iteration": lambda A: [lh.power_iteration(A, 2).values],
    "spectrum": lambda A: shown(lh.spectrum(A, depth=20, probes=2)),
}
STATUSES = {
    "trace": lambda A: lh.trace(A, tol=0.1).status,
    "frobenius norm": lambda A: lh.frobenius_norm(A, tol=0.05).status,
    "eigenpairs": lambda A: lh.eigenpairs(A, 5).status,
    "power iteration": lambda A: lh.power_iteration(A, 2).status,
}  # that of logdet is compared with its value


def close(found, truth, dtype):
    """To rounding, which iterations magnify, relative to the largest of each part."""
    rel = 2e-4 if dtype == torch.float32 else 1e-10
    for one, other in zip(found, truth, strict=True):
        top = float(other.abs().max())
        assert float((one - other).abs().max()) <= rel * top, (one, other)


@cache
def unscaled(name, dtype):
    """What an estimator says of A itself."""
    return LINEAR[name](Products(INDEFINITE.to(dtype)))


@pytest.mark.parametrize(("dtype", "c"), SCALES)
@pytest.mark.parametrize("name", LINEAR)
def test_linear_estimators(name, dtype, c):
    found = LINEAR[name](Products((INDEFINITE * c).to(dtype)))
    close([part / c for part in found], unscaled(name, dtype), dtype)


@pytest.mark.parametrize(("dtype", "c"), SCALES)
def test_small_operators_by_all_their_columns(dtype, c):
    A = Products((SMALL * c).to(dtype))
    values = np.linalg.eigvalsh(SMALL.numpy())
    assert lh.frobenius_norm(A, tol=1e-6).value / c == pytest.approx(
        np.linalg.norm(values), rel=1e-5
    )
    assert np.allclose(lh.eigenpairs(A, 40).values.numpy() / c, values[::-1], atol=1e-5)
    assert lh.trace(A, tol=1e-6).value / c == pytest.approx(values.sum(), rel=1e-5)


@cache
def unscaled_status(name, dtype):
    """How an estimator ends on A itself."""
    return STATUSES[name](Products(POSITIVE.to(dtype)))


@pytest.mark.parametrize(("dtype", "c"), SCALES)
@pytest.mark.parametrize("name", STATUSES)
def test_the_status_is_the_same(name, dtype, c):
    assert STATUSES[name](Products((POSITIVE * c).to(dtype))) is unscaled_status(name, dtype)


@cache
def log_determinant(wrap, method, dtype, c=1.0):
    """log det of c·A."""
    return lh.logdet(
        wrap((POSITIVE * c).to(dtype)), method, depth=None if method == "exact" else 25
    )


# matrices and products are each scaled in one place, whatever the method is
ENDS = [SCALES[0], SCALES[4], SCALES[5], SCALES[9]]
ALL_SCALES = [(Products, "maxent"), (lh.operator, "slq")]


@pytest.mark.parametrize(
    ("wrap", "method", "dtype", "c"),
    [
        (wrap, method, *scale)
        for wrap in (Products, lh.operator)
        for method in ("slq", "maxent", "chebyshev", "exact")
        for scale in (SCALES if (wrap, method) in ALL_SCALES else ENDS)
    ],
)
def test_log_determinants(wrap, method, dtype, c):
    truth, found = log_determinant(wrap, method, dtype), log_determinant(wrap, method, dtype, c)
    slack = 1e-3 if dtype == torch.float32 else 1e-9
    assert float(found) - 200 * math.log(c) == pytest.approx(
        float(truth), abs=slack * (1 + truth.stderr)
    )
    assert found.stderr == pytest.approx(truth.stderr, rel=1e-2, abs=1e-9)
    assert found.status is truth.status


@pytest.mark.parametrize("c", [2.0**-520, 2.0**-300, 1.0, 2.0**300, 2.0**520])
@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_moments_of_a_spectrum(order, c):
    """c to the order times the moment, or an error where float64 does not hold that: never 0,
    infinity or NaN.
    """
    truth = lh.spectrum(Products(INDEFINITE), depth=20, probes=2).moment(order)
    spectrum = lh.spectrum(Products(INDEFINITE * c), depth=20, probes=2)
    if -1000 < order * math.log2(c) < 1000:
        found = spectrum.moment(order)
        assert float(found) / c**order == pytest.approx(float(truth), rel=1e-9)
        assert float(found.stderr) / c**order == pytest.approx(float(truth.stderr), rel=1e-6)
    else:
        with pytest.raises(
            ValueError, match=rf"order must .* got {order}, whose moment is about 1e[+-][34]"
        ):
            spectrum.moment(order)


def test_a_moment_that_float64_holds_though_squares_leave_it():
    """Two eigenvalues of 10^160 with a weight of 10^-30 each: the second moment is 2·10^290."""
    nodes, weights = np.array([[1.0, 1e160]]), np.array([[1.0, 2e-30]])
    found = lh.Spectrum(nodes, weights, np.zeros((1, 2)), dim=100).moment(2)
    assert float(found) == pytest.approx(2e290, rel=1e-12)
    # 2/(P + 2) times the variance of squares, E[λ⁴] − E[λ²]²: by integers, for no float holds the
    # first
    fourth, factor = 2 * 10**610, 2 / 102
    assert float(found.stderr) == pytest.approx(
        math.isqrt(fourth) * math.sqrt(factor / (1 - factor)), rel=1e-9
    )


@pytest.mark.parametrize("c", [1e-200, 1e200])
def test_powers_that_float64_does_not_hold_are_refused(c):
    with pytest.raises(ValueError, match=r"the moments must .* order 2"):
        lh.moments(Products(INDEFINITE * c), 4, probes=5)


@pytest.mark.parametrize(("dtype", "c"), SCALES)
@pytest.mark.parametrize("basis", ["chebyshev", "legendre"])
@pytest.mark.parametrize("bounds", [None, (-8.0, 10.0)])
def test_moments_of_the_mapped_operator(basis, bounds, dtype, c):
    within = None if bounds is None else (c * bounds[0], c * bounds[1])
    truth = lh.moments(Products(INDEFINITE.to(dtype)), 8, basis, probes=5, bounds=bounds)
    found = lh.moments(Products((INDEFINITE * c).to(dtype)), 8, basis, probes=5, bounds=within)
    close([torch.as_tensor(found.values)], [torch.as_tensor(truth.values)], dtype)
    close([torch.tensor(found.bounds, dtype=D) / c], [torch.tensor(truth.bounds, dtype=D)], dtype)


@pytest.mark.parametrize("c", [1e-30, 1e-9, 1e-3, 1e3, 1e9, 1e30])
def test_powers_of_the_operator_itself(c):
    truth = lh.moments(Products(INDEFINITE), 4, probes=5).values
    found = lh.moments(Products(INDEFINITE * c), 4, probes=5).values
    assert np.allclose(found / c ** np.arange(5), truth, rtol=1e-10)


@pytest.mark.parametrize(("dtype", "c"), SCALES)
def test_traces_of_functions_and_densities_of_maximum_entropy(dtype, c):
    truth, found = (
        lh.trace_function(
            Products((POSITIVE * k).to(dtype)), lambda x, k=k: np.sqrt(x / k), depth=20
        )
        for k in (1.0, c)
    )
    assert float(found) == pytest.approx(float(truth), rel=1e-4)
    assert found.status is truth.status
    plain, scaled = (
        lh.spectrum(Products((POSITIVE * k).to(dtype)), 20, 2).density(smoothing="maxent")
        for k in (1.0, c)
    )
    assert scaled.expectation(lambda x: x / c) == pytest.approx(
        plain.expectation(lambda x: x), rel=1e-4
    )
    assert scaled.status is plain.status


def test_no_product_is_added_where_the_scale_is_ordinary():
    for name, estimate in LINEAR.items():
        costs = []
        for c in (1.0, 1e-22):
            A = Products((INDEFINITE * c).float())
            estimate(A)
            costs.append(A.matvecs)
        assert costs[0] == costs[1], name


def test_a_saturated_classifier():
    """Logits of about ±28 leave second derivatives of e⁻⁵⁶, whose squares are below float32."""
    x = 1 + 0.1 * torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    model = nn.Linear(8, 2, bias=False)
    with torch.no_grad():
        model.weight[0], model.weight[1] = 3.5, -3.5
    problem = lh.Problem(model, "cross_entropy", (x, torch.zeros(len(x), dtype=torch.long)))
    values = np.linalg.eigvalsh(lh.hessian(problem).dense().double().numpy())[::-1]
    assert values[0] < 1e-20
    found = lh.eigenpairs(lh.hessian(problem), 3)
    assert np.allclose(found.values.numpy() / values[0], values[:3] / values[0], atol=1e-3)
    assert lh.frobenius_norm(lh.hessian(problem)).value == pytest.approx(
        np.linalg.norm(values), rel=0.03
    )
    assert lh.trace(lh.hessian(problem)).value == pytest.approx(values.sum(), rel=0.03)
