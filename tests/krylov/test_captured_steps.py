"""Lanczos steps whose number is on the device, as a CUDA graph replays them, against plain ones."""

from __future__ import annotations

import pytest
import torch

import lambdahat as lh
from lambdahat._core.rng import generator
from lambdahat.krylov import Krylov, Wanted, lanczos, random_vector
from lambdahat.krylov.lanczos import CapturedSteps
from lambdahat.krylov.restart import thick_restart_lanczos
from lambdahat.operators.base import LinearOperator


def symmetric(
    dim: int = 60, dtype: torch.dtype = torch.float64
) -> tuple[LinearOperator, torch.Tensor]:
    turn = torch.linalg.qr(
        torch.randn(dim, dim, generator=generator(0, "turn"), dtype=torch.float64)
    ).Q
    values = torch.cat(
        [
            torch.linspace(-1, 1, dim - 3, dtype=torch.float64),
            torch.tensor([3.0, 5.0, 8.0]).double(),
        ]
    )
    matrix = (turn * values) @ turn.T
    return lh.operator(((matrix + matrix.T) / 2).to(dtype)), values


@pytest.fixture
def always_captured(monkeypatch):
    """Every decomposition takes its steps from fixed places, here run as they are; gives the
    list of them.
    """
    made = []

    def of(basis, operator, scalars):
        made.append(
            CapturedSteps(
                basis, lambda v: operator._apply(v[:, None])[:, 0], operator.dtype, scalars, None
            )
        )
        return made[-1]

    monkeypatch.setattr(CapturedSteps, "of", of)
    return made


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_steps_from_fixed_places_are_plain_steps(always_captured, monkeypatch, dtype, tol):
    operator, values = symmetric(dtype=dtype)
    start = random_vector(operator, 0, "start")
    taken = lanczos(operator, start, 30)
    assert len(always_captured) == 1
    assert operator.matvecs == taken.products == 30
    monkeypatch.setattr(CapturedSteps, "of", lambda *_: None)
    plain = lanczos(operator, start, 30)
    assert torch.allclose(taken.alpha, plain.alpha, atol=100 * tol)
    assert torch.allclose(taken.beta, plain.beta, atol=100 * tol)
    gram = taken.basis.T @ taken.basis
    assert torch.allclose(gram, torch.eye(30, dtype=dtype), atol=10 * tol)
    assert taken.ritz()[0][-1] == pytest.approx(float(values[-1]), rel=10 * tol)


def test_restarts_and_repeated_eigenvalues(always_captured):
    """The step after a restart is plain, and rows that a restart left behind are no part of the
    basis.
    """
    dim = 60
    turn = torch.linalg.qr(
        torch.randn(dim, dim, generator=generator(1, "turn"), dtype=torch.float64)
    ).Q
    values = torch.cat([torch.linspace(0, 1, dim - 4), torch.tensor([4.0, 4.0, 4.0, 6.0])]).double()
    matrix = (turn * values) @ turn.T
    operator = lh.operator((matrix + matrix.T) / 2)
    found = thick_restart_lanczos(
        operator, Wanted("largest"), 4, tol=1e-8, max_matvecs=400, capacity=20, seed=0
    )
    assert torch.allclose(found.values, torch.tensor([6.0, 4.0, 4.0, 4.0]).double(), atol=1e-8)
    assert found.products > 20, "there was a restart"
    residual = matrix @ found.vectors - found.vectors * found.values
    assert float(residual.norm()) < 1e-6


def test_an_invariant_subspace_ends_the_run(always_captured):
    operator = lh.operator(
        torch.diag(torch.tensor([1.0, 2.0, 3.0, *[0.0] * 17], dtype=torch.float64))
    )
    start = torch.zeros(20, dtype=torch.float64)
    start[:3] = 1.0
    taken = lanczos(operator, start, 20)
    assert len(taken.alpha) == 3
    assert torch.allclose(taken.ritz()[0], torch.tensor([1.0, 2.0, 3.0]).double())


def test_fresh_memory_does_not_matter(always_captured):
    operator, _ = symmetric(20)
    state = Krylov(operator, random_vector(operator, 0, "start"), 18)
    state.basis.rows[1:] = float("nan")
    steps = CapturedSteps(
        state.basis,
        lambda v: operator @ v,
        operator.dtype,
        (state.alpha, state.beta, state.drift),
        None,
    )
    for number in range(5):
        steps.step(number)
    assert bool(torch.isfinite(state.alpha[:5]).all())
    assert bool((state.beta[:5] > 0).all())


def test_nothing_is_captured_on_a_cpu():
    operator, _ = symmetric(20)
    assert Krylov(operator, random_vector(operator, 0, "start"), 18).captured is None
