"""On a CUDA device: bases on the host and in half the bytes, fused attention, budgets by what
the allocator says.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import lambdahat as lh
from lambdahat._core.rng import generator
from lambdahat.sampling import sgld
from tests.language import causal, padded, seeded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WIDTH = 2000
ROW = 4 * (WIDTH * (WIDTH + 1) + 2 * (WIDTH + 1))


def wide(memory: int | None = None) -> lh.Problem:
    """Four million parameters, vectors of 16 MB."""
    model = (
        seeded(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)))
        .float()
        .cuda()
    )
    x = torch.randn(64, WIDTH, generator=generator(0, "wide")).cuda()
    return lh.Problem(model, "cross_entropy", (x, torch.arange(64).cuda() % 2), memory=memory)


@pytest.mark.parametrize("basis", ["host", "half"])
def test_spectrum_is_the_same_wherever_the_basis_is(basis):
    problem = wide()
    plain, other = (
        lh.spectrum(lh.hessian(problem), 40, basis=place) for place in ("device", basis)
    )
    assert np.allclose(other.nodes.max(), plain.nodes.max(), rtol=1e-4)
    assert other.trace.value == pytest.approx(
        plain.trace.value, rel=1e-3, abs=1e-3 * plain.nodes.max()
    )


def test_eigenpairs_with_the_basis_on_the_host():
    H = lh.hessian(wide())
    here, there = (
        lh.eigenpairs(H, 3, tol=1e-4, basis=place, max_memory=16 * ROW)
        for place in ("device", "host")
    )
    assert torch.allclose(here.values, there.values, rtol=1e-3)


WORK = {
    "spectrum": lambda p: lh.spectrum(lh.hessian(p), 40),
    "trace": lambda p: lh.trace(lh.hessian(p), max_matvecs=20),
    "eigenpairs": lambda p: lh.eigenpairs(lh.hessian(p), 3, max_matvecs=30),
    "sample": lambda p: lh.sample(p, sgld(1e-6, 1.0), chains=4, draws=2, batch_size=32),
}


@pytest.mark.parametrize("work", WORK)
def test_the_allocator_stays_within_the_budget(work):
    budget = 36 * ROW
    problem = wide(budget)
    # the libraries' own workspaces
    lh.hessian(problem) @ torch.ones(problem.num_parameters, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    WORK[work](problem)
    assert torch.cuda.max_memory_allocated() - before <= budget


@pytest.mark.parametrize("work", WORK)
def test_what_is_done_leaves_no_memory(work):
    """Graphs, records and chains die with what made them, and later ones find the libraries'
    workspaces there.
    """
    problem, left = wide(), []
    for _ in range(3):
        WORK[work](problem)
        torch.cuda.synchronize()
        left.append(torch.cuda.memory_allocated())
    assert left[2] <= left[0] + 2**20


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_fused_attention_gives_the_products_of_plain_attention(mode):
    fused, plain = (causal(attn_implementation=kind).float().cuda() for kind in ("sdpa", "eager"))
    columns = {name: value.cuda() for name, value in padded().items()}
    v = torch.randn(sum(p.numel() for p in fused.parameters()), generator=generator(0, "v")).cuda()
    products = [
        lh.hessian(lh.Problem(m, "cross_entropy", columns), mode=mode) @ v for m in (fused, plain)
    ]
    assert torch.allclose(products[0], products[1], rtol=1e-3, atol=1e-4)
