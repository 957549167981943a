"""Every copy of a repeated eigenvalue is returned unasked, against dense diagonalisation by
NumPy.
"""

from __future__ import annotations

import math
from functools import cache

import networkx
import numpy as np
import pytest
import torch
from torch import nn

import lambdahat as lh
from lambdahat.estimators import _eigenpairs as eigen
from lambdahat.krylov import Krylov, restart
from lambdahat.krylov.lanczos import random_vector
from lambdahat.krylov.restart import Wanted, chance_to_miss
from tests.cases import with_eigenvalues

D = torch.float64


def symmetric(order, seed):
    draw = torch.randn(order, order, generator=torch.Generator().manual_seed(seed), dtype=D)
    return (draw + draw.T) / (2 * order) ** 0.5


def laplacian(graph):
    return torch.as_tensor(networkx.laplacian_matrix(graph).toarray(), dtype=D)


MATRICES = {
    "identity ⊗ A": torch.kron(torch.eye(10, dtype=D), symmetric(12, 0)),
    "A ⊗ identity": torch.kron(symmetric(40, 1), torch.eye(4, dtype=D)),
    "A ⊗ A": torch.kron(symmetric(14, 2), symmetric(14, 2)),
    "Kronecker sum": torch.kron(symmetric(13, 3), torch.eye(13, dtype=D))
    + torch.kron(torch.eye(13, dtype=D), symmetric(13, 3)),
    "equal blocks": torch.block_diag(*[symmetric(60, 4)] * 3, symmetric(30, 5)),
    "torus": laplacian(networkx.grid_2d_graph(12, 12, periodic=True)),
    "hypercube": laplacian(networkx.hypercube_graph(8)),
    "cycle": laplacian(networkx.cycle_graph(150)),
    "complete": laplacian(networkx.complete_graph(130)),
    "stars": laplacian(networkx.disjoint_union_all([networkx.star_graph(20)] * 7)),
    "one double outlier": with_eigenvalues([7.0, 7.0, 6.0, 5.0, 4.0, *np.linspace(-1, 1, 300)]),
    "double third": with_eigenvalues([7.0, 6.0, 5.0, 5.0, *np.linspace(-1, 1, 300)]),
    "nearly double": with_eigenvalues(
        [7.0, 7.0 - 1e-12, 6.0, 6.0 + 3e-10, 4.0, *np.linspace(-1, 1, 300)]
    ),
    "many of one": with_eigenvalues([3.0] * 25 + [2.0] * 25 + [1.0] + [0.0] * 250),
}


@cache
def eigenvalues(name):
    return np.linalg.eigvalsh(MATRICES[name].numpy())[::-1]


def expected(values, which, k):
    if which == "magnitude":
        return np.sort(np.abs(values))[::-1][:k]
    if which == "both":
        return np.concatenate([values[:k], values[-k:]])
    return values[:k] if which == "largest" else values[::-1][:k]


# The smallest are the largest of −A, and those of largest magnitude are found at both ends.
ONE_END = ["A ⊗ A", "Kronecker sum", "torus", "complete", "double third", "many of one"]


@pytest.mark.parametrize(
    ("name", "which"),
    [(name, which) for which in ("largest", "both") for name in MATRICES]
    + [(name, which) for which in ("smallest", "magnitude") for name in ONE_END],
)
def test_every_copy_is_returned(name, which):
    matrix = MATRICES[name]
    for seed, k in enumerate((10, 5)):
        found = lh.eigenpairs(lh.operator(matrix), k, which, seed=seed)
        values = (
            found.values.abs().sort(descending=True).values
            if which == "magnitude"
            else found.values
        )
        truth = expected(eigenvalues(name), which, k)
        largest = np.abs(eigenvalues(name)).max()
        assert np.abs(values.numpy() - truth).max() <= 2e-6 * largest
        assert found.status is lh.Status.CONVERGED
        assert torch.allclose(
            found.vectors.T @ found.vectors, torch.eye(len(found), dtype=D), atol=1e-10
        )
        true = (matrix @ found.vectors - found.vectors * found.values).norm(dim=0)
        assert bool((true <= 1.5 * found.residuals).all())


def test_the_last_layer_of_a_regression_with_ten_outputs():
    """The Hessian is I ⊗ 2·E[xxᵀ]/10: each eigenvalue ten times."""
    x = torch.randn(200, 12, generator=torch.Generator().manual_seed(0))
    problem = lh.Problem(nn.Linear(12, 10, bias=False), "mse", (x, torch.zeros(200, 10)))
    truth = np.linalg.eigvalsh(2 / 10 * (x.double().T @ x.double() / 200).numpy())[::-1]
    for seed in range(5):
        found = lh.eigenpairs(lh.hessian(problem), 15, tol=1e-5, seed=seed)
        assert np.allclose(found.values[:10], truth[0], rtol=2e-5)
        assert np.allclose(found.values[10:], truth[1], rtol=2e-5)
        assert found.status is lh.Status.CONVERGED


@pytest.mark.parametrize("tol", [1e-2, 1e-4, 1e-9])
def test_one_double_eigenvalue_is_found_from_any_seed(tol):
    """One missing copy, at the least of the values that matter and near the rest, is the hardest
    to see.
    """
    values = torch.cat(
        [torch.tensor([3.0, 2.5, 2.0, 1.4, 1.4, 1.2], dtype=D), torch.linspace(-1, 1, 394, dtype=D)]
    )
    matrix = lh.operator(torch.diag(values))
    for seed in range(60):
        found = lh.eigenpairs(matrix, 5, tol=tol, seed=seed)
        assert abs(float(found.values[4]) - 1.4) <= tol * 3.0


@pytest.mark.parametrize("tol", [1e-2, 1e-3, 1e-4])
def test_loose_tolerances_end_the_search(tol):
    """Forty values four times each: a start that finds nothing new is the last."""
    for seed in range(3):
        values = -np.sort(-np.repeat(np.random.default_rng(seed).normal(size=40), 4))
        found = lh.eigenpairs(lh.operator(with_eigenvalues(values)), 10, tol=tol, seed=seed)
        assert found.status is lh.Status.CONVERGED
        assert found.cost < len(values)
        assert np.abs(found.values.numpy() - values[:10]).max() <= tol * np.abs(values).max()


def test_the_search_costs_few_products_where_nothing_is_repeated(monkeypatch):
    """Spectra of networks, with gaps and without: the products that the search for copies adds."""
    bulk = 0.02 * torch.randn(1500, generator=torch.Generator().manual_seed(0), dtype=D)
    spectra = {
        "ten outliers": (torch.cat([torch.linspace(10, 1, 10, dtype=D), bulk]), 3),
        "outliers down to the bulk": (torch.cat([torch.logspace(1, -1, 30, dtype=D), bulk]), 10),
        "power law": (10 * torch.arange(1, 1500, dtype=D) ** -1.0, 10),
        "semicircle": (torch.cos(math.pi * (torch.arange(600, dtype=D) + 0.5) / 600), 60),
    }
    for name, (values, most) in spectra.items():
        matrix = lh.operator(torch.diag(values))
        whole = lh.eigenpairs(matrix, 10)
        with monkeypatch.context() as patch:
            patch.setattr(restart, "missing", lambda *_: False)
            alone = lh.eigenpairs(matrix, 10)
        assert 0 < whole.cost - alone.cost <= most, name
        assert whole.status is lh.Status.CONVERGED


@pytest.mark.parametrize(
    ("values", "which", "k", "tol"),
    [
        (np.repeat([0.0, *np.linspace(0.02, 1, 100)], [100, *[1] * 100]), "smallest", 50, 0.03),
        (np.arange(300) % 10, "largest", 10, 0.3),
        (np.arange(120) % 6, "magnitude", 40, 0.3),
        (np.append(np.zeros(400), np.random.default_rng(0).normal(size=15)), "smallest", 80, 0.3),
    ],
)
def test_a_copy_that_moves_no_value_by_the_tolerance_is_followed_by_others(values, which, k, tol):
    """Each copy moves the wanted values on by one place, all copies together by far more."""
    found = lh.eigenpairs(np.diag(values.astype(float)), k, which, tol)
    errors = found.values.numpy() - expected(np.sort(values.astype(float))[::-1], which, k)
    assert found.status is lh.Status.CONVERGED
    assert np.abs(errors).max() <= tol * np.abs(values).max()


def test_one_eigenvalue_needs_no_search():
    """Copies of a single eigenvalue would change nothing."""
    matrix = lh.operator(with_eigenvalues([5.0, 5.0, *np.linspace(-1, 1, 300)]))
    assert lh.eigenpairs(matrix, 1).cost <= 12
    assert lh.spectral_norm(matrix).value == pytest.approx(5.0, rel=1e-3)


def test_a_budget_that_ends_the_search_is_said():
    matrix = lh.operator(with_eigenvalues([9.0, 8.0, 7.0, 6.0, 5.0, *np.linspace(-1, 1, 300)]))
    enough = lh.eigenpairs(matrix, 5).cost
    assert lh.eigenpairs(matrix, 5, max_matvecs=enough).status is lh.Status.CONVERGED
    short = lh.eigenpairs(matrix, 5, max_matvecs=enough - 1)
    assert short.status is lh.Status.NOT_CONVERGED
    assert short.cost == enough - 1
    assert bool(short.converged.all())


def test_memory_for_a_few_vectors_is_enough(monkeypatch):
    values = torch.cat(
        [torch.tensor([5.0] * 6 + [4.0] * 3 + [3.0], dtype=D), torch.linspace(-1, 1, 290, dtype=D)]
    )
    matrix, most = with_eigenvalues(values), []
    original = eigen.thick_restart_lanczos

    def spy(*args, **settings):
        most.append(settings["capacity"])
        return original(*args, **settings)

    monkeypatch.setattr(eigen, "thick_restart_lanczos", spy)
    found = lh.eigenpairs(lh.operator(matrix), 10, max_memory=20 * 300 * 8)
    assert most == [19]
    assert np.allclose(found.values, values[:10], atol=1e-5)


def test_the_chance_to_miss_is_that_of_random_starts():
    """The bound on the mass at a point, against the least overlap that Lanczos notices, over
    many starts.
    """
    values = np.append(np.linspace(-1, 1, 200), 2.0)
    rng = np.random.default_rng(0)
    for _ in range(20):
        start = rng.standard_normal(201)
        start[-1] = 0.0  # as if there were none at 2
        basis, alpha, beta = [start / np.linalg.norm(start)], [], []
        for _ in range(8):
            w = values * basis[-1]
            alpha.append(float(w @ basis[-1]))
            for vector in basis + basis:
                w = w - vector * (vector @ w)
            beta.append(float(np.linalg.norm(w)))
            basis.append(w / beta[-1])
        chance = chance_to_miss(alpha, beta, 2.0, 201)
        mass = chance**2 * np.pi / 2 / 201
        # the polynomials of the measure without an atom at 2 bound what one could hide there
        powers = np.polynomial.polynomial.polyvander(values, 8)
        gram = powers.T @ (basis[0][:, None] ** 2 * powers)
        point = np.polynomial.polynomial.polyvander(np.array([2.0]), 8)[0]
        assert mass == pytest.approx(1 / (point @ np.linalg.solve(gram, point)), rel=1e-4)


@pytest.mark.parametrize("capacity", [40, 12])
def test_what_a_start_may_hide_follows_from_the_ritz_pairs_through_restarts(capacity):
    """v·z = (v·q)Π_i Σ_j c_j(z_i·x_j)/(y − θ_j) for an eigenvector v of eigenvalue y."""
    values = torch.cat([torch.linspace(-1, 1, 200, dtype=D), torch.tensor([1.3], dtype=D)])
    operator, wanted = lh.operator(torch.diag(values)), Wanted("largest")
    start = random_vector(operator, 0, "start")
    start[-1] = 1e-10
    state = Krylov(operator, start, capacity)
    while state.products < 20:
        if state.size == capacity:
            restart._Projection.of(state, wanted, 3).restart(lock=False, room=False)
        state.extend()
    pairs = restart._Projection.of(state, wanted, 3)
    assert (capacity == 12) == bool(state.cycles)
    assert float(pairs.values.max()) < 1.2  # the eigenvalue 1.3 has not been seen
    chance = pairs.chance(1, 1.3)
    if capacity == 40:
        alpha, beta = (part[: state.size].tolist() for part in (state.alpha, state.beta))
        assert chance == pytest.approx(chance_to_miss(alpha, beta, 1.3, 201), rel=1e-6)
    vector, poles = torch.eye(201, dtype=D)[-1], pairs.couplings / (1.3 - pairs.values)
    seen = math.sqrt(1 + float(poles.square().sum())) * float(vector @ state.rows[state.size])
    overlap = chance * math.sqrt(math.pi / 2 / 201) * seen
    assert float(start[-1]) == pytest.approx(abs(overlap), rel=1e-5)


@pytest.mark.parametrize(
    ("which", "values", "ends"),
    [
        ("largest", [5.0, 4.0, 3.0], [(1, 3.1, 3.975)]),
        ("smallest", [-2.0, 1.0, 3.0], [(-1, -2.9, -1.025)]),
        ("magnitude", [5.0, -4.0, 3.0], [(1, 3.1, 4.975), (-1, 3.1, 3.975)]),
        ("both", [5.0, 4.0, -1.0, -2.0], [(1, 4.1, 4.975), (-1, 1.1, 1.975)]),
        ("largest", [5.0, 5.05], [(1, 5.1, math.inf)]),
        ("largest", [5.0], [(1, 5.1, math.inf)]),
    ],
)
def test_where_eigenvalues_that_are_missing_matter(which, values, ends):
    found = Wanted(which).ends(torch.tensor(values, dtype=D), len(values), 0.1)
    assert [(end.sign, end.cut, end.copies) for end in found] == [pytest.approx(e) for e in ends]
