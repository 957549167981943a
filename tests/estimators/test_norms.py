from __future__ import annotations

import pytest
import torch

from lambdahat.estimators.norms import frobenius_norm
from lambdahat.results import Status
from tests.cases import Products, spectra, with_eigenvalues

MATRICES = spectra()


@pytest.mark.parametrize("tol", [0.01, 0.1])
@pytest.mark.parametrize("name", ["flat", "decaying", "network", "indefinite", "no trace"])
def test_value_lies_within_its_error_and_cost_is_counted(name: str, tol: float) -> None:
    near = Products(MATRICES[name])
    found = frobenius_norm(near, tol=tol)
    truth = float(near.matrix.norm())
    assert found.cost == near.matvecs < 300
    assert found.status is Status.CONVERGED
    assert 0 < found.stderr < tol * truth
    assert abs(found.value - truth) < 4 * found.stderr


def test_outliers_are_deflated() -> None:
    """Without deflation ‖Az‖² has a relative spread of 0.6, and 1 % would take thousands of products."""
    assert frobenius_norm(Products(MATRICES["network"])).cost <= 50


def test_dense_where_probes_would_cost_more_or_the_operator_is_small() -> None:
    for size in (9, 80):
        matrix = MATRICES["indefinite"][:size, :size]
        found = frobenius_norm(Products(matrix), tol=1e-5)
        assert found.value == pytest.approx(float(matrix.norm()), rel=1e-12)
        assert found.stderr == 0.0


@pytest.mark.parametrize("limit", [2, 5, 30])
def test_budget_is_kept_and_its_end_is_said(limit: int) -> None:
    found = frobenius_norm(Products(MATRICES["power law"]), tol=1e-6, max_matvecs=limit)
    assert found.cost <= limit
    assert found.status is Status.BUDGET_SPENT


def test_matrices_that_are_not_symmetric_low_rank_or_zero() -> None:
    upper = torch.triu(MATRICES["indefinite"])
    found = frobenius_norm(Products(upper, symmetric=False), tol=0.05)
    assert abs(found.value - float(upper.norm())) < 4 * found.stderr
    low = frobenius_norm(Products(with_eigenvalues([3.0, 4.0, *[0.0] * 98])), tol=1e-6)
    assert low.value == pytest.approx(5.0, rel=1e-9)
    assert frobenius_norm(Products(torch.zeros(60, 60))).value == 0.0


def test_products_that_are_not_finite_are_named() -> None:
    with pytest.raises(ValueError, match="the operator must give finite products"):
        frobenius_norm(Products(MATRICES["flat"] * torch.nan))
