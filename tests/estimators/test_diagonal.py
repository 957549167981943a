from __future__ import annotations

import pytest
import torch

from lambdahat.estimators import diagonal
from lambdahat.estimators._diagonal import dense_diagonal
from lambdahat.operators import operator
from tests.cases import Products, spectra, with_eigenvalues

MATRICES = spectra()
FLAT = MATRICES["flat"]


def test_exact_where_known_and_by_products() -> None:
    found = diagonal(operator(FLAT))
    assert torch.equal(found.value, FLAT.diagonal())
    assert (float(found.stderr.max()), found.cost) == (0.0, 0)
    near = Products(FLAT)
    torch.testing.assert_close(dense_diagonal(near), FLAT.diagonal())
    assert near.matvecs == 300


def test_sampled_elements_lie_within_their_errors() -> None:
    near = Products(FLAT)
    found = diagonal(near, tol=0.1)
    assert found.cost == near.matvecs < 150
    assert float(found.stderr.norm()) <= 0.1 * float(FLAT.diagonal().norm()) * 1.05
    low, high = found.interval(0.95)
    inside = int(((low <= FLAT.diagonal()) & (FLAT.diagonal() <= high)).sum())
    # 300 nearly independent elements: 285 ± 3.8 expected.
    assert 269 <= inside <= 299


def test_probes_fix_the_cost_and_give_the_sample_error() -> None:
    near = Products(FLAT)
    found = diagonal(near, probes=40)
    assert found.cost == near.matvecs == 40
    assert found.dof == 39
    spread = (FLAT.square().sum(dim=1) - FLAT.diagonal().square()).sqrt() / 40**0.5
    assert float((found.stderr / spread).mean()) == pytest.approx(1.0, abs=0.03)


def test_control_variate() -> None:
    network = MATRICES["network"]
    near = Products(network + with_eigenvalues(torch.linspace(-1, 1, 300)), near=operator(network))
    found = diagonal(near, tol=0.1)
    assert found.cost == near.matvecs + near.near.matvecs == 32
    assert float((found.value - near.matrix.diagonal()).norm()) < 0.2 * float(
        near.matrix.diagonal().norm()
    )


@pytest.mark.parametrize("size", [9, 80])
def test_dense_where_probes_would_cost_more(size: int) -> None:
    matrix = MATRICES["network"][:size, :size]
    found = diagonal(Products(matrix), tol=1e-3)
    torch.testing.assert_close(found.value, matrix.diagonal())
    assert float(found.stderr.max()) == 0.0


def test_misuse_is_named() -> None:
    with pytest.raises(
        ValueError,
        match="probes must be an integer of at least 2, got 1; one probe shows no spread",
    ):
        diagonal(Products(FLAT), probes=1)
    with pytest.raises(ValueError, match="tol must be a finite number above 0"):
        diagonal(Products(FLAT), tol=0.0)
    with pytest.raises(ValueError, match="the operator must give finite products"):
        diagonal(Products(FLAT * torch.nan))
