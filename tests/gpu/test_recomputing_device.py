"""Checkpointed models on a CUDA device, where a backward pass runs in a thread of its own."""

from __future__ import annotations

import pytest
import torch

import lambdahat as lh
from tests.problem.test_checkpointing import Deep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def problem(reentrant: bool | None) -> lh.Problem:
    torch.manual_seed(0)
    model = Deep(reentrant, depth=8, width=32).double().cuda()
    return lh.Problem(
        model, "cross_entropy", (torch.randn(4000, 5).double(), torch.arange(4000) % 3)
    )


def peak(make, found: lh.Problem) -> int:
    v = torch.ones(found.num_parameters, dtype=torch.float64, device="cuda")
    make(found) @ v  # what libraries allocate for themselves
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    make(found) @ v
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("make", [lh.hessian, lh.ggn])
def test_the_same_product_in_less_memory(make, reentrant):
    plain, saving = problem(None), problem(reentrant)
    v = torch.randn(plain.num_parameters, dtype=torch.float64, device="cuda")
    operator = make(saving)
    assert torch.allclose(operator @ v, make(plain) @ v, atol=1e-9)
    assert operator.mode == "forward"
    assert torch.allclose(saving.gradient(), plain.gradient(), atol=1e-12)
    del operator
    assert peak(make, saving) < 0.6 * peak(make, plain)
