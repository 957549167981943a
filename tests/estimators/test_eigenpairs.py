"""Eigenpairs against dense ones: every end, repeated and clustered values, memory and products
bounded.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lambdahat.estimators import _eigenpairs as eigen
from lambdahat.estimators import eigenpairs, power_iteration, spectral_norm
from lambdahat.estimators._eigenpairs import WHICH
from lambdahat.operators import operator
from lambdahat.results import Status
from tests.cases import with_eigenvalues

D = torch.float64


def uniform(count, seed=1):
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=D)


SPECTRA = {
    "indefinite": 4 * uniform(300) - 2,
    "network": torch.cat([torch.logspace(1, -1, 12, dtype=D), 0.02 * (uniform(500) - 0.3)]),
    "clustered": torch.cat([5 + 1e-4 * uniform(5), uniform(250)]),
    "repeated": torch.cat([torch.tensor([5.0, 5, 5, 4, 4, 3], dtype=D), uniform(250)]),
    "few values": torch.tensor([5.0] * 3 + [4.0] * 2 + [3.0] + [1.0] * 150 + [-1.0] * 150, dtype=D),
    "identity": torch.ones(250, dtype=D),
    "zero": torch.zeros(250, dtype=D),
    "small": torch.linspace(-3, 2, 40, dtype=D),
}


def wanted(values, which, k):
    down = values.sort(descending=True).values
    if which == "magnitude":
        return down[down.abs().argsort(descending=True)][:k]
    if which == "both":
        return down if 2 * k >= len(down) else torch.cat([down[:k], down[-k:]])
    return down[:k] if which == "largest" else down.flip(0)[:k]


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("name", SPECTRA)
def test_ten_values_within_1e8_of_dense(name, which):
    matrix = with_eigenvalues(SPECTRA[name])
    A = operator(matrix)
    found = eigenpairs(A, 10, which, tol=1e-9)
    exact = wanted(torch.linalg.eigvalsh(matrix), which, 10)
    one, other = (
        (found.values.abs(), exact.abs()) if which == "magnitude" else (found.values, exact)
    )
    scale = max(float(exact.abs().max()), 1e-300)
    assert float((one - other).abs().max()) <= 1e-8 * scale
    assert found.status is Status.CONVERGED
    assert bool(found.converged.all())
    assert found.cost == A.matvecs
    gram = found.vectors.T @ found.vectors
    assert torch.allclose(gram, torch.eye(len(found), dtype=D), atol=1e-12)
    true = (matrix @ found.vectors - found.vectors * found.values).norm(dim=0)
    assert bool((true <= 1.5 * found.residuals + 1e-15 * scale).all())


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 30), st.integers(0, 10**6), st.sampled_from(WHICH), st.data())
def test_any_small_matrix(dim, seed, which, data):
    k = data.draw(st.integers(1, dim))
    matrix = with_eigenvalues(2 * uniform(dim, seed) - 1, seed)
    found = eigenpairs(operator(matrix), k, which)
    exact = wanted(torch.linalg.eigvalsh(matrix), which, k)
    assert torch.allclose(
        found.values.abs() if which == "magnitude" else found.values,
        exact.abs() if which == "magnitude" else exact,
        atol=1e-12,
    )


def test_lanczos_finds_every_value_of_a_small_matrix_too(monkeypatch):
    monkeypatch.setattr(eigen, "DENSE_BELOW", 0)
    for values in ([2.0] * 12, [3.0] * 3 + [1.0] * 9, torch.linspace(-1, 1, 12)):
        matrix = with_eigenvalues(values)
        found = eigenpairs(operator(matrix), 5)
        assert torch.allclose(found.values, torch.linalg.eigvalsh(matrix).flip(0)[:5], atol=1e-8)


def test_few_products_on_a_spectrum_with_outliers():
    A = operator(with_eigenvalues(SPECTRA["network"]))
    assert eigenpairs(A, 10, tol=1e-6).cost <= 30
    assert spectral_norm(A).cost <= 10


def test_tolerance_is_relative_accuracy_of_the_values():
    matrix = with_eigenvalues(SPECTRA["network"])
    exact = torch.linalg.eigvalsh(matrix).flip(0)[:10]
    costs = []
    for tol in (1e-3, 1e-6, 1e-10):
        found = eigenpairs(operator(matrix), 10, tol=tol)
        assert float((found.values - exact).abs().max()) <= tol * float(exact[0])
        costs.append(found.cost)
    assert costs == sorted(costs)


@pytest.mark.parametrize("tol", [1e-2, 1e-3, 1e-4])
def test_a_loose_tolerance_is_no_other_eigenvalue(tol):
    """Many values near 0, as networks have: after a few steps the residuals of wrong values are
    already small.
    """
    for seed in range(12):
        rng = torch.Generator().manual_seed(seed)
        values = 0.05 * torch.randn(1000, generator=rng, dtype=torch.float64)
        values[:9] = torch.tensor([11.86, 10.14, 8.0, 6.0, 4.0, 3.0, 2.0, 1.5, 1.0])
        values[-1] = -0.6
        matrix = operator(torch.diag(values))
        for which, truth in (("largest", 11.86), ("smallest", -0.6)):
            found = eigenpairs(matrix, k=1, which=which, tol=tol, seed=seed)
            assert float(found.values[0]) == pytest.approx(truth, abs=tol * 11.86)
            assert found.cost <= 25


@pytest.mark.parametrize(
    ("values", "k", "tol"),
    [
        (torch.logspace(-8, 0, 200, dtype=D), 3, 1e-6),
        (torch.logspace(-8, 0, 150, dtype=D), 10, 1e-6),
        (torch.logspace(-12, 0, 150, dtype=D), 5, 1e-6),
        (torch.logspace(-2, 0, 1000, dtype=D), 10, 1e-2),
        (torch.linspace(0, 1, 600, dtype=D) ** 2, 10, 0.1),
        (torch.arange(600, dtype=D).remainder(6) / 5, 5, 0.1),
    ],
)
@pytest.mark.parametrize("which", ["smallest", "both"])
def test_values_closer_than_the_tolerance_are_within_it(values, k, tol, which):
    """All wanted values lie within two tolerances of one another, and others between them."""
    found = eigenpairs(operator(torch.diag(values)), k, which, tol)
    errors = (found.values - wanted(values, which, k)).abs()
    assert found.status is Status.CONVERGED
    assert float(errors.max()) <= tol * float(values.max())


def test_restart_respects_memory_and_still_converges():
    matrix = with_eigenvalues(4 * uniform(400) - 2)
    row = 400 * 8
    A, seen = operator(matrix), []
    original = eigen.thick_restart_lanczos

    def spy(*args, **kwargs):
        seen.append(kwargs["capacity"])
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eigen, "thick_restart_lanczos", spy)
        found = eigenpairs(A, 5, tol=1e-9, max_memory=24 * row)
    assert (seen[0] + 1) * row <= 24 * row
    assert found.cost > 24  # it had to restart
    assert torch.allclose(found.values, torch.linalg.eigvalsh(matrix).flip(0)[:5], atol=1e-8)
    with pytest.raises(ValueError, match="max_memory must hold 9 vectors"):
        eigenpairs(A, 5, max_memory=8 * row)


@pytest.mark.parametrize("which", WHICH)
def test_restart_finds_repeated_values(which):
    values = torch.tensor(
        [5.0] * 4 + [4.0] * 3 + [2.0, 1.5, 1.2] + [-1.0] * 4 + [0.0] * 200, dtype=D
    )
    matrix = with_eigenvalues(values)
    k = 3 if which == "both" else 6
    found = eigenpairs(operator(matrix), k, which, max_memory=12 * 8 * len(values))
    assert torch.allclose(found.values, wanted(values, which, k), atol=1e-8)


def test_budget_spent_says_which_pairs_are_good():
    A = operator(with_eigenvalues(SPECTRA["network"]))
    found = eigenpairs(A, 10, tol=1e-10, max_matvecs=14)
    assert found.status is Status.NOT_CONVERGED
    assert found.cost == A.matvecs == 14
    assert 0 < int(found.converged.sum()) < 10


def test_float32_stops_at_its_rounding_and_says_so():
    matrix = with_eigenvalues(SPECTRA["network"])
    exact = torch.linalg.eigvalsh(matrix).flip(0)[:10]
    fine = eigenpairs(operator(matrix.float()), 10, tol=1e-5)
    assert fine.status is Status.CONVERGED
    assert fine.vectors.dtype == torch.float32
    assert fine.values.dtype == D
    found = eigenpairs(operator(matrix.float()), 10, tol=1e-12)
    assert found.status is Status.PRECISION_LIMIT
    assert found.cost < 60
    assert not bool(found.converged.any())
    assert float((found.values - exact).abs().max()) <= 2e-6 * float(exact[0])


def test_same_seed_same_answer_other_seed_same_values():
    A = operator(with_eigenvalues(SPECTRA["indefinite"]))
    first, again, other = (eigenpairs(A, 4, tol=1e-9, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.vectors, again.vectors)
    assert torch.allclose(first.values, other.values, atol=1e-8)


def test_residuals_of_a_dense_decomposition_grow_with_its_order():
    draw = torch.randn(450, 450, generator=torch.Generator().manual_seed(0), dtype=D)
    matrix = draw + draw.T
    found = eigenpairs(operator(matrix), 450)
    vectors = found.vectors.numpy().astype(np.longdouble)
    rest = matrix.numpy().astype(np.longdouble) @ vectors - vectors * found.values.numpy()
    assert (np.sqrt((rest**2).sum(axis=0)) <= found.residuals.numpy()).all()


def test_negation_swaps_the_ends():
    A = operator(with_eigenvalues(SPECTRA["indefinite"]))
    assert torch.allclose(
        eigenpairs(A, 5, "smallest").values, -eigenpairs(-A, 5, "largest").values, atol=1e-12
    )


def test_order_one():
    found = eigenpairs(operator([[-3.0]]), 1)
    assert found.values.tolist() == [-3.0]
    assert spectral_norm(operator([[-3.0]])).value == 3.0


def test_power_iteration_agrees_with_lanczos():
    A = operator(with_eigenvalues([9.0, -7.0, 5.0, 3.0] + [0.2] * 196))
    slow, fast = power_iteration(A, 4, tol=1e-6), eigenpairs(A, 4, "magnitude")
    assert slow.status is Status.CONVERGED
    assert torch.allclose(slow.values, fast.values, atol=1e-5)
    assert bool(((slow.values - fast.values).abs() <= slow.residuals + 1e-9).all())
    assert fast.cost < slow.cost


def test_the_tolerance_of_power_iteration_is_on_the_eigenvalues():
    """Neighbouring |λ| make the basis turn slowly, so that successive bases differ little far
    from the eigenvalues.
    """
    rng = torch.Generator().manual_seed(3)
    for gap in (0.1, 0.03, 0.01):
        values = torch.cat(
            [1 - gap * torch.arange(9, dtype=D), 0.1 * torch.randn(290, generator=rng, dtype=D)]
        )
        matrix = with_eigenvalues(values)
        for tol, seed in ((1e-1, 0), (1e-2, 1), (1e-3, 2)):
            found = power_iteration(operator(matrix), 5, tol=tol, seed=seed, max_matvecs=20_000)
            true = (matrix @ found.vectors - found.vectors * found.values).norm(dim=0)
            assert torch.allclose(true, found.residuals, rtol=1e-6, atol=1e-12)
            distance = (found.values[:, None] - values[None]).abs().amin(dim=1)
            assert bool((distance <= found.residuals).all())
            assert found.status is Status.CONVERGED
            assert float(true.max()) <= tol
            exact = values.sort(descending=True).values[:5]
            assert float((found.values - exact).abs().max()) <= tol
            assert torch.equal(
                found.converged, found.residuals <= tol * float(found.values.abs().max())
            )


def test_power_iteration_that_runs_out_says_so():
    A = operator(with_eigenvalues([5.0, 4.999, 1.0] + [0.5] * 30))
    found = power_iteration(A, 2, tol=1e-12, max_matvecs=20)
    assert found.status is Status.NOT_CONVERGED
    assert found.cost == 20


def test_spectral_norm_is_the_larger_end():
    matrix = with_eigenvalues(torch.cat([torch.tensor([-6.0, 5.0], dtype=D), uniform(200)]))
    norm = spectral_norm(operator(matrix), tol=1e-6)
    assert abs(norm.value - 6.0) <= 6e-6
    assert abs(norm.value - 6.0) <= norm.stderr


def test_results_survive_the_disk(tmp_path):
    found = eigenpairs(operator(with_eigenvalues(SPECTRA["small"])), 3)
    back = type(found).load(found.save(tmp_path / "pairs"))
    for field in dataclasses.fields(found):
        one, other = getattr(found, field.name), getattr(back, field.name)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"k": 0}, ValueError, "k must be an integer in"),
        ({"k": 41}, ValueError, "k must be an integer in .1, 40.*P eigenvalues"),
        ({"k": 2.5}, TypeError, "k must be"),
        ({"which": "LM"}, ValueError, "which must be one of 'largest'"),
        ({"tol": -1.0}, ValueError, "tol must be"),
        ({"max_matvecs": 0}, ValueError, "max_matvecs"),
        ({"max_matvecs": 5, "k": 10}, ValueError, "max_matvecs must be at least 10"),
        ({"max_matvecs": 20, "max_memory": 100.0}, ValueError, "max_memory must hold"),
    ],
)
def test_misuse_is_named(arguments, error, text):
    A = operator(with_eigenvalues(SPECTRA["small"]))
    with pytest.raises(error, match=text):
        eigenpairs(A, **arguments)


@pytest.mark.parametrize("call", [eigenpairs, power_iteration, spectral_norm])
def test_asymmetric_operators_are_refused(call):
    with pytest.raises(ValueError, match="must be symmetric"):
        call(operator(torch.triu(torch.ones(4, 4))))
    with pytest.raises(ValueError, match="must be symmetric"):
        call(torch.triu(torch.ones(4, 4)))
    with pytest.raises(TypeError, match="operator must be an operator or a matrix"):
        call("eye")


def test_small_operators_give_all_pairs_by_default():
    assert eigenpairs(torch.diag(torch.tensor([3.0, 1.0, 2.0]))).values.tolist() == [3.0, 2.0, 1.0]


HIDDEN = {  # values that look like one far from all others, after a few products
    "under one": (torch.cat([torch.tensor([1e6], dtype=D), torch.linspace(0, 1, 149, dtype=D)]), 1),
    "under two": (torch.cat([torch.tensor([1e8, 1e4, 1], dtype=D), 1e-3 * uniform(147)]), 3),
    "near": (torch.cat([1 - torch.tensor([0, 1e-9, 1e-5], dtype=D), 0.5 * uniform(147)]), 1),
}


@pytest.mark.parametrize(
    ("name", "which"),
    [
        ("under one", "smallest"),
        ("under two", "magnitude"),
        ("under two", "smallest"),
        ("near", "largest"),
        ("near", "magnitude"),
    ],
)
def test_a_mixture_of_eigenvalues_is_not_taken_for_one(name, which):
    values, k = HIDDEN[name]
    matrix = with_eigenvalues(values)
    exact = wanted(torch.linalg.eigvalsh(matrix), which, k)
    for seed in range(3):
        pairs = eigenpairs(operator(matrix), k, which, tol=1e-10, seed=seed)
        assert pairs.status is Status.CONVERGED
        assert float((pairs.values - exact).abs().max()) < 2e-10 * float(values.max())


@pytest.mark.parametrize("k", [1, 2])
def test_a_cluster_wider_than_the_tolerance_is_resolved(k):
    """The mean of a cluster looks like an eigenvalue, with r²/gap far below the tolerance, until
    the Krylov space tells its members apart.
    """
    for seed in range(40):
        rng = torch.Generator().manual_seed(seed)
        count, tol = 2 + seed % 3, (1e-4, 1e-6, 1e-8)[seed % 3]
        width = tol * 10 ** (0.5 + 2 * float(torch.rand(1, generator=rng)))
        cluster = 1 - width * torch.rand(count, generator=rng, dtype=D)
        values = torch.cat([cluster, 0.1 + 0.4 * torch.rand(200, generator=rng, dtype=D)])
        found = eigenpairs(operator(torch.diag(values)), k, tol=tol, seed=seed)
        assert found.status is Status.CONVERGED
        assert float((found.values - wanted(values, "largest", k)).abs().max()) <= tol


@pytest.mark.parametrize("memory", [None, 30])
def test_an_eigenvalue_beside_a_mixture_of_two_is_found(memory):
    """Where one Ritz value stands for two eigenvalues, no eigenvalue of the complement lies near
    them: the second is seen in the coupling alone.
    """
    for seed in range(40):
        rng = torch.Generator().manual_seed(seed)
        tol, places = (1e-3, 1e-5)[seed % 2], 3 * torch.rand(12, generator=rng, dtype=D)
        values = torch.cat([-places.sqrt(), 0.1 * torch.rand(140, generator=rng, dtype=D)])
        values[1:4] = values[0] + tol * 3 * torch.randn(3, generator=rng, dtype=D)
        budget = None if memory is None else memory * 8 * len(values)
        found = eigenpairs(
            operator(torch.diag(values)), 8, "smallest", tol, max_memory=budget, seed=seed
        )
        scale = float(values.abs().max())
        assert found.status is Status.CONVERGED
        errors = (found.values - wanted(values, "smallest", 8)).abs()
        assert float(errors.max()) <= tol * scale
