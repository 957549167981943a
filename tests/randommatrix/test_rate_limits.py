"""Limits of stability against the second moments of the recursion itself, and errors carried
through formulas.
"""

import math

import numpy as np
import pytest
from scipy.optimize import brentq

from lambdahat.randommatrix.rate_limits import (
    allowed_excess,
    differ,
    limit_of,
    propagate,
    stability_limit,
)
from lambdahat.results import Estimate

MOMENTA = (0.0, 0.3, 0.9)
EXCESSES = (0.0, 0.1, 1.0, 30.0)
CURVATURE = 2.5


def growth(step, old, noise):
    """Spectral radius of the moments' recursion for x' = A·x + B·y, y' = x, with A = step, B = old,
    both random.

    ``noise`` is (Var A, Cov(A, B), Var B). The state is (E x², E xy, E y²).
    """
    var_a, cov, var_b = noise
    matrix = np.array(
        [
            [step**2 + var_a, 2 * (step * old + cov), old**2 + var_b],
            [step, old, 0.0],
            [1.0, 0.0, 0.0],
        ]
    )
    return np.abs(np.linalg.eigvals(matrix)).max()


def heavy_ball(rate, variance, rho):
    return growth(1 + rho - rate * CURVATURE, -rho, (rate**2 * variance, 0.0, 0.0))


def nesterov(rate, variance, rho):
    keep, noise = 1 - rate * CURVATURE, rate**2 * variance
    return growth(
        keep * (1 + rho),
        -keep * rho,
        (noise * (1 + rho) ** 2, -noise * rho * (1 + rho), noise * rho**2),
    )


@pytest.mark.parametrize("rho", MOMENTA)
@pytest.mark.parametrize("excess", EXCESSES)
@pytest.mark.parametrize("method", [heavy_ball, nesterov])
def test_the_second_moment_begins_to_grow_at_the_limit(method, excess, rho):
    limit = stability_limit(CURVATURE, excess, rho, nesterov=method is nesterov)
    variance = CURVATURE * excess
    assert method(0.98 * limit, variance, rho) < 1 < method(1.02 * limit, variance, rho)
    assert all(method(part * limit, variance, rho) < 1 for part in np.linspace(0.01, 0.95, 40))
    found = brentq(lambda rate: method(rate, variance, rho) - 1, 0.9 * limit, 1.1 * limit)
    assert math.isclose(found, limit, rel_tol=1e-6)


@pytest.mark.parametrize("rho", MOMENTA)
def test_without_noise_the_limits_are_the_textbook_ones(rho):
    assert math.isclose(stability_limit(4.0, momentum=rho), 2 * (1 + rho) / 4)
    assert math.isclose(
        stability_limit(4.0, momentum=rho, nesterov=True), 2 * (1 + rho) / (1 + 2 * rho) / 4
    )


def test_without_momentum_the_limit_is_that_of_the_batch_eigenvalue():
    assert stability_limit(4.0, 3.0) == stability_limit(4.0, 3.0, nesterov=True) == 2 / 7


def test_an_eigenvalue_below_the_mean_adds_no_stability():
    assert stability_limit(4.0, -0.1, 0.5) == stability_limit(4.0, 0.0, 0.5)


def test_errors_of_a_linear_formula_add_in_quadrature():
    found = propagate(lambda x, y: 3 * x - y, Estimate(1.0, 0.1, 5), Estimate(2.0, 0.4, 7))
    assert float(found) == 1.0
    assert math.isclose(float(found.stderr), 0.5)
    assert found.cost == 12
    assert found.dof == math.inf


def test_errors_of_a_quotient_are_those_of_simulation():
    rng = np.random.default_rng(0)
    draws = rng.normal(3.0, 0.05, 200_000) / rng.normal(2.0, 0.04, 200_000)
    found = propagate(lambda x, y: x / y, Estimate(3.0, 0.05), Estimate(2.0, 0.04))
    assert math.isclose(float(found.stderr), draws.std(), rel_tol=0.02)


def test_degrees_of_freedom_are_those_of_the_part_that_carries_the_error():
    assert propagate(
        lambda x, y: x + y, Estimate(1.0, 0.0), Estimate(1.0, 0.1, dof=4)
    ).dof == pytest.approx(4)
    both = propagate(lambda x, y: x + y, Estimate(1.0, 0.1, dof=4), Estimate(1.0, 0.1, dof=4))
    assert both.dof == pytest.approx(8)


def test_an_unknown_error_stays_unknown():
    assert math.isnan(float(propagate(lambda x: 2 * x, Estimate(1.0, math.nan)).stderr))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
def test_an_excess_below_0_keeps_its_error(momentum, nesterov):
    found = limit_of(Estimate(4.0), Estimate(-0.2, 0.05), momentum, nesterov)
    assert float(found) == stability_limit(4.0, 0.0, momentum, nesterov)
    one_more = stability_limit(4.0, 0.05, momentum, nesterov)
    assert math.isclose(float(found.stderr), float(found) - one_more, rel_tol=0.05)


def test_a_limit_has_the_errors_of_curvature_and_excess():
    found = limit_of(Estimate(4.0, 0.03), Estimate(1.0, 0.04))
    assert math.isclose(float(found.stderr), 0.05 * 2 / 25, rel_tol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((1.0, 0.0, "0.9"), r"momentum must be a number in \[0, 1\), got '0.9'"),
        ((1.0, "a"), "excess must be a number, got 'a'"),
        ((1.0, math.nan), "excess must be a number, got nan"),
        ((0.0,), "curvature must be a finite number above 0, got 0.0; a direction that bends down"),
        ((-1.0,), "curvature must be a finite number above 0"),
        ((1.0, 0.0, 1.0), r"momentum must lie in \[0, 1\), got 1.0"),
        ((1.0, 0.0, -0.1), r"momentum must lie in \[0, 1\)"),
    ],
)
def test_misuse(arguments, text):
    with pytest.raises((ValueError, TypeError), match=text):
        stability_limit(*arguments)


@pytest.mark.parametrize("rho", MOMENTA)
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("excess", EXCESSES)
def test_the_allowed_excess_inverts_the_limit(rho, nesterov, excess):
    limit = stability_limit(CURVATURE, excess, rho, nesterov)
    assert math.isclose(
        allowed_excess(limit, CURVATURE, rho, nesterov), excess, rel_tol=1e-9, abs_tol=1e-9
    )


@pytest.mark.parametrize(
    ("second", "sure"),
    [
        (Estimate(1.0), True),
        (Estimate(0.1), False),
        (Estimate(0.5, 0.1), True),
        (Estimate(0.5, 0.2, dof=1), False),
        (Estimate(-0.5, 0.1), True),
        (Estimate(5.0, math.nan), False),
    ],
)
def test_estimates_differ_where_their_interval_says_so(second, sure):
    assert differ(Estimate(0.0, 0.1), second) == sure
