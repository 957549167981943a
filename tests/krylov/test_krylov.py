"""Lanczos, power iteration and conjugate gradients against dense linear algebra."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lambdahat._core.progress import progress
from lambdahat.krylov import (
    Basis,
    Krylov,
    conjugate_gradients,
    inverse,
    lanczos,
    random_vector,
    simultaneous_power_iteration,
    value_errors,
)
from lambdahat.operators import identity, operator
from tests.cases import with_eigenvalues


def test_lanczos_factorises_the_operator():
    matrix = with_eigenvalues(torch.linspace(-2, 3, 60))
    A = operator(matrix)
    state = lanczos(A, random_vector(A, 0, "t"), 25)
    Q, T = (
        state.basis,
        torch.diag(state.alpha) + torch.diag(state.beta, 1) + torch.diag(state.beta, -1),
    )
    assert A.matvecs == state.products == 25
    assert torch.allclose(Q.T @ Q, torch.eye(25, dtype=torch.float64), atol=1e-13)
    rest = matrix @ Q - Q @ T
    assert float(rest[:, :-1].abs().max()) < 1e-13
    assert float(rest[:, -1].norm()) == pytest.approx(state.residual, rel=1e-10)


def test_float32_basis_stays_orthogonal_to_the_rounding_of_float32():
    scale = torch.logspace(0, -6, 20_000)  # the leading entries dominate, as in networks
    A = operator(torch.sparse.spdiags(scale, torch.tensor([0]), (20_000, 20_000)), symmetric=True)
    state = lanczos(A, random_vector(A, 0, "t"), 40)
    gram = state.basis.double().T @ state.basis.double()
    assert state.basis.dtype == torch.float32
    assert float((gram - torch.eye(40)).abs().max()) < 1e-6
    assert state.noise < 1e-6


def test_basis_stays_semi_orthogonal_where_couplings_alternate():
    """A vector that is left alone at a small coupling has overlaps that the next ones blow up."""
    count, depth = 120, 100
    couplings = torch.full((count - 1,), 0.05, dtype=torch.float64)
    couplings[::2] = 0.5
    inner = torch.linspace(-0.1, 0.1, count, dtype=torch.float64).diag()
    inner += couplings.diag(1) + couplings.diag(-1)
    rng = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(count, count, generator=rng, dtype=torch.float64)).Q
    matrix = turn @ inner @ turn.T
    state = lanczos(operator((matrix + matrix.T) / 2), turn[:, 0], depth)
    gram = state.basis.T @ state.basis
    assert float((gram - torch.eye(depth)).abs().max()) < 0.1 * 2**-26  # a tenth of √ε


def test_invariant_subspace_ends_lanczos_early():
    A = operator(with_eigenvalues([4.0] * 5 + [1.0] * 10 + [-2.0] * 5))
    state = lanczos(A, random_vector(A, 0, "t"), 20)
    assert A.matvecs == len(state.alpha) == 3
    assert torch.allclose(
        state.ritz()[0], torch.tensor([-2.0, 1.0, 4.0], dtype=torch.float64), atol=1e-12
    )


def test_ritz_of_a_shorter_run_is_a_shorter_run():
    A = operator(with_eigenvalues(torch.linspace(0, 1, 30)))
    start = random_vector(A, 0, "t")
    for long, short in zip(lanczos(A, start, 12).ritz(7), lanczos(A, start, 7).ritz(), strict=True):
        assert torch.allclose(long, short, atol=1e-14)


def test_thick_restart_keeps_the_decomposition():
    matrix = with_eigenvalues(torch.linspace(-1, 2, 50))
    A = operator(matrix)
    state = Krylov(A, random_vector(A, 0, "t"), 20)
    for _ in range(20):
        state.extend()
    values, weights, couplings = state.ritz()
    state.restart(values[10:], weights[:, 10:], couplings[10:], 0)
    for _ in range(5):
        state.extend()
    Q, T = state.rows[:15].T, state.projected()
    rest = matrix @ Q - Q @ T
    assert torch.allclose(Q.T @ Q, torch.eye(15, dtype=torch.float64), atol=1e-12)
    assert float(rest[:, :-1].abs().max()) < 1e-12
    assert float(rest[:, -1].norm()) == pytest.approx(float(state.beta[14]), rel=1e-9)


def test_value_errors_bound_the_truth():
    A = operator(with_eigenvalues(torch.linspace(0, 1, 40) ** 3))
    exact = torch.linalg.eigvalsh(A.dense())
    values, _, residuals = lanczos(A, random_vector(A, 0, "t"), 20).ritz()
    distance = (values[:, None] - exact[None]).abs().amin(1)
    assert bool((distance <= residuals + 1e-14).all())
    top = value_errors(values, residuals)[-3:]
    assert bool((distance[-3:] <= 2 * top + 1e-14).all())
    assert bool((top <= residuals[-3:]).all())


def test_progress_counts_every_product():
    A, seen = operator(with_eigenvalues(torch.linspace(0, 1, 20))), []
    with progress(lambda *args: seen.append(args)):
        lanczos(A, random_vector(A, 0, "t"), 4, "name", (8, 12))
    assert seen == [("name", done, 12) for done in (9, 10, 11, 12)]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_products_that_are_not_finite_are_named(bad):
    A = operator(torch.eye(8))
    A.matrix[3, 3] = bad
    with pytest.raises(ValueError, match="product of the operator must be finite"):
        lanczos(A, random_vector(A, 0, "t"), 4)


def test_power_iteration_stands_still_at_negative_eigenvalues():
    A = operator(with_eigenvalues([-8.0, 5.0, -3.0] + [0.1] * 30))
    found = simultaneous_power_iteration(A, 3, tol=1e-8, max_matvecs=3000, seed=0)
    assert torch.allclose(
        found.values, torch.tensor([-8.0, 5.0, -3.0], dtype=torch.float64), atol=1e-6
    )
    true = (A @ found.vectors - found.vectors * found.values).norm(dim=0)
    assert torch.allclose(true, found.residuals, atol=1e-12)
    assert found.products < 200


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.integers(1, 4), st.integers(0, 10**6), st.floats(0.01, 10.0))
def test_conjugate_gradients_solve(dim, columns, seed, least):
    draw = torch.Generator().manual_seed(seed)
    matrix = with_eigenvalues(least + torch.rand(dim, generator=draw), seed)
    rhs = torch.randn(dim, columns, generator=draw, dtype=torch.float64)
    found = conjugate_gradients(operator(matrix, psd=True), rhs, tol=1e-10)
    assert bool(found.converged.all())
    assert torch.allclose(matrix @ found.solution, rhs, atol=1e-8)


def test_conjugate_gradients_take_as_many_products_as_there_are_distinct_eigenvalues():
    A = operator(with_eigenvalues([1.0] * 20 + [3.0] * 20 + [10.0] * 20))
    found = conjugate_gradients(A, torch.ones(60, dtype=torch.float64), tol=1e-10)
    assert found.cost == A.matvecs == 3 + 1  # one for the true residual


def test_a_perfect_preconditioner_needs_one_product():
    matrix = with_eigenvalues(torch.logspace(-3, 3, 30))
    A, P = operator(matrix), operator(torch.linalg.inv(matrix), symmetric=None)
    found = conjugate_gradients(A, torch.ones(30, dtype=torch.float64), tol=1e-6, preconditioner=P)
    assert found.cost <= 2


def test_a_zero_right_hand_side_costs_nothing():
    found = conjugate_gradients(operator(torch.eye(3)), torch.zeros(3))
    assert found.cost == 0
    assert float(found.solution.abs().sum()) == 0


def test_inverse_is_the_damped_inverse():
    matrix = with_eigenvalues(torch.linspace(0, 5, 25))
    A = operator(matrix, psd=True)
    wanted = torch.linalg.inv(matrix + 0.3 * torch.eye(25, dtype=torch.float64))
    B = inverse(A, damping=0.3, tol=1e-12)
    assert B.symmetric
    assert B.psd
    assert torch.allclose(B.dense(), wanted, atol=1e-10)
    assert B.matvecs == 25
    assert A.matvecs > 25


def test_inverse_of_identity_is_identity():
    A = operator(torch.eye(5))
    assert torch.allclose(inverse(identity(A)).dense(), torch.eye(5))


def test_inverse_refuses_negative_curvature_and_too_small_budgets():
    A = operator(with_eigenvalues([-1.0, 2.0, 3.0]))
    with pytest.raises(ValueError, match=r"positive definite.*raise damping"):
        inverse(A) @ torch.ones(3, dtype=torch.float64)
    hard = operator(with_eigenvalues(torch.logspace(-6, 0, 50)))
    with pytest.raises(ValueError, match="raise max_matvecs"):
        inverse(hard, max_matvecs=5) @ torch.ones(50, dtype=torch.float64)
    with pytest.raises(ValueError, match="damping must be"):
        inverse(A, damping=-1.0)


def test_asymmetric_operators_are_refused():
    A = operator(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
    for call in (
        lambda: lanczos(A, torch.ones(2), 1),
        lambda: conjugate_gradients(A, torch.ones(2)),
        lambda: inverse(A),
    ):
        with pytest.raises(ValueError, match="must be symmetric"):
            call()
    with pytest.raises(TypeError, match="operator must be an operator or a matrix"):
        inverse("eye")  # type: ignore[arg-type]


@pytest.mark.gpu
def test_lanczos_agrees_between_devices():
    matrix = with_eigenvalues(torch.cat([torch.linspace(0, 1, 100), torch.tensor([5.0])]))
    here, there = operator(matrix), operator(matrix.cuda())
    start = random_vector(here, 0, "t")
    first, second = lanczos(here, start, 40).ritz(), lanczos(there, start.cuda(), 40).ritz()
    for one, other in zip(first, second, strict=True):
        assert torch.allclose(one, other, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_default_tolerance_of_an_inverse_is_within_reach_of_its_dtype(dtype):
    values = torch.linspace(1.0, 100.0, 300, dtype=dtype)
    A, rhs = operator(torch.diag(values), psd=True), torch.ones(300, dtype=dtype)
    found = inverse(A) @ rhs
    torch.testing.assert_close(
        found, rhs / values, rtol=1e-3 if dtype == torch.float32 else 1e-7, atol=0.0
    )


def test_the_residual_of_conjugate_gradients_is_the_true_one():
    values = torch.logspace(0, 5, 400, dtype=torch.float32)
    A, rhs = operator(torch.diag(values), psd=True), torch.ones(400)
    before = A.matvecs
    found = conjugate_gradients(A, rhs, tol=1e-7)
    assert found.cost == A.matvecs - before
    true = (rhs.double() - values.double() * found.solution.double()).norm() / rhs.double().norm()
    assert float(found.residuals) == pytest.approx(float(true), rel=0.3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_end_of_a_krylov_space_is_seen_at_a_step_that_is_not_orthogonalised(dtype):
    values = torch.cat(
        [torch.zeros(150), torch.linspace(2.0, 18.0, 17), torch.full((3,), -1.0)]
    ).double()
    matrix = operator(with_eigenvalues(values).to(dtype))
    for seed in range(30):
        ritz, _, _ = lanczos(matrix, random_vector(matrix, seed, "end"), 30).ritz()
        assert -1.001 <= float(ritz.min())
        assert float(ritz.max()) <= 18.001


@pytest.mark.parametrize("name", ["even", "outliers", "decades", "repeated"])
def test_half_of_the_steps_keep_all_vectors_semi_orthogonal(name, monkeypatch):
    """In float64; the basis to a tenth of √ε, and T that of QᵀAQ to the product of two of them."""
    values = {
        "even": torch.linspace(0.1, 1, 600, dtype=torch.float64),
        "outliers": torch.cat([torch.tensor([100.0, 30.0, 5.0]), torch.linspace(0, 0.1, 597)]),
        "decades": torch.logspace(-6, 2, 600, dtype=torch.float64),
        "repeated": torch.cat([torch.full((50,), 3.0), torch.linspace(-1, 1, 550)]),
    }[name].double()
    calls, orthogonalise = [], Basis.orthogonalise
    monkeypatch.setattr(
        Basis, "orthogonalise", lambda *each: (calls.append(1), orthogonalise(*each))[1]
    )
    A = operator(torch.diag(values))
    run = lanczos(A, random_vector(A, 0, "semi"), 150)
    root = torch.finfo(torch.float64).eps ** 0.5
    gram = run.basis.T @ run.basis - torch.eye(150, dtype=torch.float64)
    assert float(gram.abs().max()) < 0.1 * root
    assert len(calls) <= 0.6 * 150
    tridiagonal = torch.diag(run.alpha) + torch.diag(run.beta, 1) + torch.diag(run.beta, -1)
    off = run.basis.T @ (values[:, None] * run.basis) - tridiagonal
    assert float(off.abs().max()) < 0.1 * root * float(values.abs().max())


@pytest.mark.parametrize("rate", [2, 3, 5, 10])
@pytest.mark.parametrize("floor", [0.0, 1e-3])
def test_spectra_that_decay_fast_keep_the_basis_orthogonal(rate, floor):
    """β shrinks from step to step, so that overlaps left alone grow ever faster."""
    values = torch.exp(-torch.arange(400, dtype=torch.float64) / rate) + floor
    A = operator(torch.diag(values))
    for seed in range(6):
        run = lanczos(A, random_vector(A, seed, "decay"), 300)
        ritz, _, _ = run.ritz()
        assert float(ritz.min()) > -1e-12
        assert float(ritz.max()) < float(values[0]) + 1e-12
        gram = run.basis.T @ run.basis
        gram.diagonal().sub_(1)
        assert float(gram.abs().max()) < 2 * torch.finfo(torch.float64).eps ** 0.5


def test_parts_of_a_random_vector_have_streams_of_their_own(monkeypatch):
    """The first is the one stream of a small vector, and threads change nothing."""
    op, small = (operator(torch.eye(n, dtype=torch.float64)) for n in (96, 40))
    monkeypatch.setattr(sys.modules[Krylov.__module__], "DRAWN", 40)
    found, first = random_vector(op, 3, "start"), random_vector(small, 3, "start")
    assert torch.equal(found, random_vector(op, 3, "start"))
    torch.testing.assert_close(found[:40] / found[:40].norm(), first)
    parts = [part / part.norm() for part in (found[:40], found[40:80], torch.cat([found[80:]] * 3))]
    overlaps = [float(parts[0] @ parts[1]), float(parts[1][:16] @ parts[2][:16])]
    assert max(map(abs, overlaps)) < 0.5
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(found, random_vector(op, 3, "start"))
    finally:
        torch.set_num_threads(threads)
