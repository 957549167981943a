"""Convergence bounds of Lanczos and power iteration, and what Ritz values cannot be."""

import numpy as np
import pytest
import torch

import lambdahat as lh
from lambdahat.krylov import lanczos, random_vector
from lambdahat.randommatrix import convergence_terms, excludes_top_pairs, lanczos_bound, power_bound
from tests.cases import with_eigenvalues

STEPS = (5, 10, 15, 20)
TABLE_4_5 = {  # L/R as printed
    1.5: ((1.1e-4, 3.9e-2), (2e-10, 6.8e-4), (3.9e-16, 1.2e-5), (7.4e-22, 2.0e-7)),
    1.1: ((2.7e-2, 4.7e-1), (5.5e-5, 1.8e-1), (1.1e-7, 6.9e-2), (2.1e-10, 2.7e-2)),
    1.01: ((5.6e-1, 9.2e-1), (1.0e-1, 8.4e-1), (1.5e-2, 7.6e-1), (2.0e-3, 6.9e-1)),
}


def two_digits(value):
    return float(f"{value:.1e}")


@pytest.mark.parametrize("ratio", TABLE_4_5)
def test_table_4_5_is_reproduced_to_its_digits(ratio):
    for steps, (left, right) in zip(STEPS, TABLE_4_5[ratio], strict=True):
        terms = convergence_terms(ratio, steps)
        assert two_digits(terms[0]) == pytest.approx(left, rel=1e-9)
        assert two_digits(terms[1]) == pytest.approx(right, rel=1e-9)
        assert terms[0] < terms[1]


def test_the_exponent_of_theorem_5_is_not_that_of_the_table():
    assert two_digits(1.5 ** -(2 * 5 - 1)) != TABLE_4_5[1.5][0][1]


@pytest.mark.parametrize(
    "values", [np.linspace(0, 1, 60), np.r_[np.linspace(-1, 1, 59), 1.3], 0.8 ** np.arange(60)]
)
@pytest.mark.parametrize("seed", range(3))
def test_lanczos_and_power_iteration_stay_within_their_bounds(values, seed):
    matrix = with_eigenvalues(values, seed)
    exact, vectors = torch.linalg.eigh(matrix)
    operator = lh.operator(matrix)
    start = random_vector(operator, seed, "test")
    run, power = lanczos(operator, start, 20), start
    low, high = (float(abs(start @ vectors[:, end])) for end in (0, -1))
    for steps in range(1, 21):
        ritz = run.ritz(steps)[0]
        slack = 1e-12
        assert lanczos_bound(values, high, steps) - slack <= ritz[-1] <= exact[-1] + slack
        assert exact[0] - slack <= ritz[0] <= lanczos_bound(values, low, steps, "smallest") + slack
        quotient = float(power @ matrix @ power / (power @ power))
        if values.min() >= 0:
            assert power_bound(values, high, steps - 1) - slack <= quotient <= ritz[-1] + slack
        power = matrix @ power


def test_the_bound_is_met_where_there_are_two_eigenvalues():
    values = [1.0, 0.0]
    assert lanczos_bound(values, 0.6, 1) == pytest.approx(1 - (1 / 0.36 - 1))
    assert lanczos_bound(values, 0.6, 2) == 1.0
    assert power_bound([2.0, 1.0], 0.5**0.5, 0) == pytest.approx(1.0)


def test_shift_and_negate_learns_nothing_new():
    """Theorem 7: from the same start, −H + μI has the Ritz values μ − θ, with the same weights
    and vectors.
    """
    matrix, shift = with_eigenvalues(np.r_[np.linspace(-1, 1, 80), 5.0]), 7.5
    operator = lh.operator(matrix)
    turned = lh.operator(shift * torch.eye(81, dtype=torch.float64) - matrix)
    start = random_vector(operator, 0, "test")
    plain, other = (lanczos(each, start, 15) for each in (operator, turned))
    theta, weights, _ = plain.ritz()
    moved, moved_weights, _ = other.ritz()
    torch.testing.assert_close(moved.flip(0), shift - theta, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(moved_weights.flip(0), weights, rtol=1e-6, atol=1e-10)
    overlaps = plain.basis.T @ other.basis
    torch.testing.assert_close(
        overlaps.abs(), torch.eye(15, dtype=torch.float64), rtol=0, atol=1e-6
    )


def test_ritz_values_are_not_the_top_eigenvalues():
    """Theorem 8: the least of m Ritz values is at most vᵀHv, far below λ_m."""
    values = np.r_[np.linspace(10, 20, 10), np.zeros(190)]
    assert excludes_top_pairs(values, 10)
    operator = lh.operator(with_eigenvalues(values))
    for seed in range(3):
        start = random_vector(operator, seed, "test")
        nodes = lanczos(operator, start, 8).ritz()[0]
        assert nodes[0] <= float(start @ (operator @ start)) + 1e-12 < np.sort(values)[-8]


def test_the_condition_of_theorem_8_does_not_give_its_proof():
    """The printed condition holds, and the trace of its shifted matrix, said to be negative, is
    positive.
    """
    values, m = np.r_[100.0, 1.0, np.full(113, 0.9)], 2
    assert values[:m].sum() < values[m:].sum()
    assert (values - (values[m - 1] + values[m]) / 2).sum() > 0
    assert not excludes_top_pairs(values, m)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: lanczos_bound([1.0], 0.5, 3),
            "eigenvalues must be a list of two finite numbers or more",
        ),
        (lambda: lanczos_bound([1.0, np.nan], 0.5, 3), "eigenvalues must be a list of two finite"),
        (lambda: lanczos_bound([1.0, 2.0], 0.0, 3), r"overlap must lie in \(0, 1\]"),
        (
            lambda: lanczos_bound([1.0, 2.0], 0.5, 0),
            r"steps must be an integer of at least 1, got 0",
        ),
        (
            lambda: lanczos_bound([1.0, 2.0], 0.5, 3, "top"),
            "which must be one of 'largest', 'smallest'",
        ),
        (
            lambda: power_bound([1.0, -2.0], 0.5, 3),
            "eigenvalues must have a largest one above all other magnitudes",
        ),
        (lambda: convergence_terms(1.0, 5), "ratio must be above 1"),
        (lambda: excludes_top_pairs([1.0, 2.0], 3), r"steps must be an integer in \[1, 2\]"),
    ],
)
def test_misuse(call, message):
    with pytest.raises(ValueError, match=message):
        call()
