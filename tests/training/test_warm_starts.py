"""Leading eigenpairs from the vectors of last time, against dense diagonalisation."""

import pytest
import torch

import lambdahat as lh
from lambdahat.training import curvature_trackers
from lambdahat.training.curvature_trackers import leading_pairs
from tests.cases import spectra, with_eigenvalues

TOL = 1e-3


def extremes(matrix, k, which):
    values = torch.linalg.eigvalsh(matrix).flip(0)
    if which == "both":
        return torch.cat([values[:k], values[-k:]])
    return {
        "largest": values,
        "smallest": values.flip(0),
        "magnitude": values[values.abs().argsort(descending=True)],
    }[which][:k]


def turned(matrix, angle, seed=0):
    """The matrix in a basis turned by a small random rotation."""
    size = len(matrix)
    draw = torch.randn(
        size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    turn = torch.linalg.matrix_exp(angle * (draw - draw.T) / (2 * size) ** 0.5)
    return turn @ matrix @ turn.T


@pytest.mark.parametrize("which", ["largest", "smallest", "magnitude", "both"])
@pytest.mark.parametrize("kind", ["network", "decaying", "power law", "indefinite"])
def test_cold_values_are_those_of_the_dense_matrix(kind, which):
    matrix = spectra(150)[kind]
    found = leading_pairs(lh.operator(matrix), 2, which, tol=TOL)
    exact = extremes(matrix, 2, which)
    assert found.status.ok
    assert float((found.values - exact).abs().max()) <= 3 * TOL * float(
        torch.linalg.matrix_norm(matrix, 2)
    )
    eye = torch.eye(len(found), dtype=torch.float64)
    assert torch.allclose(found.vectors.T @ found.vectors, eye, atol=1e-8)


def test_residuals_are_those_of_the_vectors():
    matrix = spectra(150)["network"]
    found = leading_pairs(lh.operator(matrix), 3)
    true = (matrix @ found.vectors - found.vectors * found.values).norm(dim=0)
    assert torch.allclose(true, found.residuals, rtol=1e-4, atol=1e-9 * float(found.values[0]))


@pytest.mark.parametrize(("k", "which"), [(1, "largest"), (5, "largest"), (1, "both")])
def test_a_warm_start_takes_fewer_products_and_is_as_accurate(k, which):
    before = spectra(200)["network"]
    warm = leading_pairs(lh.operator(before), k, which).vectors
    cold_cost = warm_cost = 0
    for seed in range(5):
        after = turned(before, 0.05, seed)
        operator = lh.operator(after)
        cold = leading_pairs(operator, k, which, tol=TOL, seed=seed)
        counted = operator.matvecs
        found = leading_pairs(operator, k, which, warm=warm, tol=TOL, seed=seed)
        assert (cold.cost, found.cost) == (counted, operator.matvecs - counted)
        exact = extremes(after, k, which)
        assert float((found.values - exact).abs().max()) <= 3 * TOL * float(exact.abs().max())
        cold_cost, warm_cost = cold_cost + cold.cost, warm_cost + found.cost
    # several pairs are checked for copies at each call
    assert warm_cost < (0.85 if k == 1 else 0.95) * cold_cost


def test_a_new_leading_direction_is_found_though_the_warm_start_is_another_eigenvector():
    """What a warm start must not do: hold on to the eigenvector that has been overtaken."""
    values = torch.cat([torch.tensor([10.0, 9.0]), torch.linspace(0, 1, 198)])
    matrix = with_eigenvalues(values)
    pairs = torch.linalg.eigh(matrix).eigenvectors
    overtaken = pairs[:, -2:-1]  # exactly orthogonal to the leading one
    found = leading_pairs(lh.operator(matrix), 1, warm=overtaken, tol=TOL)
    assert float(found.values[0]) == pytest.approx(10.0, rel=TOL)


def test_repeated_eigenvalues_alone_end_a_krylov_space_and_are_found():
    found = leading_pairs(lh.operator(3.0 * torch.eye(20, dtype=torch.float64)), 3)
    assert found.status.ok
    assert torch.allclose(found.values, torch.full((3,), 3.0, dtype=torch.float64))
    assert torch.allclose(
        found.vectors.T @ found.vectors, torch.eye(3, dtype=torch.float64), atol=1e-10
    )


def test_of_zero_everything_is_zero():
    found = leading_pairs(lh.operator(torch.zeros(5, 5, dtype=torch.float64)), 1)
    assert float(found.values[0]) == 0.0


def test_all_of_a_small_matrix():
    matrix = with_eigenvalues([3.0, 1.0, -2.0])
    found = leading_pairs(lh.operator(matrix), 2, "both")
    assert torch.allclose(found.values, torch.tensor([3.0, 1.0, -2.0], dtype=torch.float64))
    assert found.status.ok


@pytest.mark.parametrize("which", ["largest", "both"])
def test_a_basis_that_is_full_is_restarted(which, monkeypatch):
    """An edge of a dense bulk takes more products than the basis has room for."""
    monkeypatch.setattr(curvature_trackers, "ROOM", 12)
    matrix = spectra(300)["flat"]
    operator = lh.operator(matrix)
    found = leading_pairs(operator, 2, which, tol=1e-5, max_matvecs=400)
    assert found.status.ok
    assert 20 < found.cost == operator.matvecs <= 400
    exact = extremes(matrix, 2, which)
    assert float((found.values - exact).abs().max()) <= 3e-5 * float(
        torch.linalg.matrix_norm(matrix, 2)
    )
    true = (matrix @ found.vectors - found.vectors * found.values).norm(dim=0)
    assert torch.allclose(true, found.residuals, rtol=1e-3, atol=1e-9)


def test_too_few_products_are_said_to_be():
    found = leading_pairs(lh.operator(spectra(200)["flat"]), 3, max_matvecs=5, tol=1e-6)
    assert found.status is lh.Status.NOT_CONVERGED
    assert found.cost == 5


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"k": 0}, "k must be an integer in"),
        ({"which": "top"}, "which must be one of"),
        ({"tol": 0.0}, "tol must be a finite number above 0"),
        ({"k": 3, "max_matvecs": 2}, "max_matvecs must be an integer of at least 3"),
        ({"warm": torch.ones(4, 1)}, r"warm must have shape \(20, k\)"),
        ({"warm": torch.ones(20)}, r"warm must have shape \(20, k\)"),
    ],
)
def test_misuse(wrong, message):
    with pytest.raises(ValueError, match=message):
        leading_pairs(lh.operator(torch.eye(20)), **wrong)


@pytest.mark.parametrize("seed", range(5))
def test_copies_of_repeated_eigenvalues_are_found(seed):
    """I ⊗ A, as the last layer of a squared loss has it: each eigenvalue four times."""
    values = torch.linspace(0.1, 1.0, 40).repeat_interleave(4).double()
    draw = torch.randn(160, 160, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    turn = torch.linalg.qr(draw).Q
    operator = lh.operator(turn @ torch.diag(values) @ turn.T)
    found = leading_pairs(operator, 6, tol=TOL, seed=seed, max_matvecs=1000)
    exact = values.flip(0)[:6]
    assert found.status.ok
    assert found.cost == operator.matvecs
    assert float((found.values - exact).abs().max()) <= 3 * TOL
    warm = leading_pairs(operator, 6, warm=found.vectors, tol=TOL, seed=seed, max_matvecs=1000)
    assert float((warm.values - exact).abs().max()) <= 3 * TOL
    few = leading_pairs(operator, 6, tol=TOL, seed=seed, max_matvecs=40)
    assert not few.status.ok or float((few.values - exact).abs().max()) <= 3 * TOL


@pytest.mark.parametrize("seed", range(4))
def test_a_copy_that_is_new_is_found_beside_vectors_that_have_not_changed(seed):
    """Last time's vectors still are eigenvectors, and a second copy of a larger eigenvalue has
    come up.
    """
    basis, bulk = spectra(300)["flat"], torch.linspace(-1, 1, 295, dtype=torch.float64)
    vectors = torch.linalg.eigh(basis).eigenvectors
    before, now = (
        torch.cat([torch.tensor(top, dtype=torch.float64), bulk])
        for top in ([5, 4, 3, 0, 0], [5, 4, 3, 5, 4])
    )
    warm = leading_pairs(lh.operator((vectors * before) @ vectors.T), 3, tol=TOL).vectors
    found = leading_pairs(
        lh.operator((vectors * now) @ vectors.T), 3, warm=warm, tol=TOL, seed=seed
    )
    assert torch.allclose(
        found.values, torch.tensor([5.0, 5.0, 4.0], dtype=torch.float64), atol=5 * TOL
    )
    assert found.status is lh.Status.CONVERGED
