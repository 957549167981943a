"""Krylov bases kept elsewhere or in fewer bits: the same Ritz values, no ghosts, in less memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import lambdahat as lh
from lambdahat._core.rng import generator
from lambdahat.krylov import basis_bytes, chosen_place, lanczos
from lambdahat.krylov.lanczos import Basis
from lambdahat.operators.base import LinearOperator
from lambdahat.problem.memory import LiveBytes

P, DEPTH = 3000, 90
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def diagonal(values: torch.Tensor) -> LinearOperator:
    class Diagonal(LinearOperator):
        def _apply(self, block: torch.Tensor) -> torch.Tensor:
            return values[:, None] * block

    return Diagonal(len(values), values.dtype, CPU)


def spiked(dtype: torch.dtype) -> tuple[LinearOperator, torch.Tensor]:
    """A few large eigenvalues over a bulk, which Lanczos finds again and again once it loses
    orthogonality; a start.
    """
    values = torch.cat(
        [torch.linspace(0, 1, P - 5), torch.tensor([10.0, 20.0, 40.0, 80.0, 160.0])]
    ).to(dtype)
    return diagonal(values), torch.randn(P, generator=generator(0, "start"), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("place", ["device", "host", "half"])
def test_every_eigenvalue_is_found_once(place, dtype):
    operator, start = spiked(dtype)
    run = lanczos(operator, start, DEPTH, place=place)
    nodes, weights, _ = run.ritz()
    # eigenvectors of one coordinate are the worst case
    rounded = place == "half" and dtype == torch.float32
    close = 1e-2 if rounded else 1e-3
    assert torch.allclose(
        nodes[nodes > 1.5], torch.tensor([10.0, 20, 40, 80, 160]).double(), rtol=1e-5, atol=close
    )
    assert run.noise < 0.2
    expected = (start * (operator @ start)).double().sum() / start.double().square().sum()
    assert float(weights @ nodes) == pytest.approx(float(expected), rel=1e-5)


def test_ghosts_appear_where_nothing_is_made_orthogonal():
    """What the test above is able to see."""
    operator, start = spiked(torch.float32)
    q, before, beta = start / start.norm(), torch.zeros(P), 0.0
    diagonal, off = [], []
    for _ in range(DEPTH):
        w = operator @ q - beta * before
        diagonal.append(float(w @ q))
        w = w - diagonal[-1] * q
        beta = float(w.norm())
        off.append(beta)
        before, q = q, w / beta
    matrix = np.diag(diagonal) + np.diag(off[:-1], 1) + np.diag(off[:-1], -1)
    assert (np.linalg.eigvalsh(matrix) > 150).sum() > 1


def test_half_the_bytes_are_half_the_bytes():
    peaks = {}
    for place in ("device", "half"):
        with LiveBytes() as seen:
            lanczos(diagonal(torch.linspace(0, 1, 100_000)), torch.ones(100_000), 30, place=place)
        peaks[place] = seen.peak
    assert peaks["half"] < 0.75 * peaks["device"]


@pytest.mark.parametrize("place", ["device", "host"])
def test_eigenpairs_restart_wherever_the_basis_is(place):
    operator, _ = spiked(torch.float64)
    found = lh.eigenpairs(operator, 4, basis=place, max_memory=14 * P * 8, tol=1e-10)
    assert torch.allclose(found.values, torch.tensor([160.0, 80.0, 40.0, 20.0]).double(), rtol=1e-9)
    assert found.status.ok
    assert torch.allclose(operator @ found.vectors, found.values * found.vectors, atol=1e-4)


@pytest.mark.parametrize("basis", ["auto", "device", "host", "half"])
def test_spectrum_is_the_same_wherever_the_basis_is(basis):
    operator, _ = spiked(torch.float32)
    plain, other = lh.spectrum(operator, 30), lh.spectrum(operator, 30, basis=basis)
    assert np.allclose(other.nodes, plain.nodes, rtol=1e-4, atol=2e-3)
    assert np.allclose(other.weights, plain.weights, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize(
    ("room", "device", "place"),
    [
        (2560, CPU, "device"),
        (2559, CPU, "half"),
        (10, CPU, "half"),
        (700, CUDA, "half"),
        (699, CUDA, "host"),
    ],
)
def test_auto_takes_the_first_place_that_fits(room, device, place):
    assert basis_bytes(10, 25, torch.float32, "device") == 10 * 64 * 4  # rows start alike, every 64
    assert chosen_place(10, 25, torch.float32, device, room, "auto") == place
    assert chosen_place(10, 25, torch.float32, device, room, "host") == (
        "device" if device == CPU else "host"
    )


@pytest.mark.parametrize("dim", [25, 64, 1001])
def test_rows_on_the_device_start_alike(dim):
    """cuDNN searches for kernels anew at each alignment of a tangent, which takes seconds on
    VGG-16.
    """
    basis = Basis(8, dim, torch.float32, CPU)
    assert len({basis[j].data_ptr() % 256 for j in range(8)}) == 1
    assert basis.rows.shape == (8, dim)
    assert all(basis[j].is_contiguous() for j in range(8))
