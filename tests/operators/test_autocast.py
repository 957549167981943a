"""An operator is one matrix under ``torch.autocast`` too."""

from __future__ import annotations

import pytest
import torch

import lambdahat as lh


def problem():
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 6, generator=rng), torch.randint(0, 3, (40,), generator=rng)
    return lh.Problem(lh.models.mlp([6, 8, 3], "tanh"), "cross_entropy", (x, y))


@pytest.mark.parametrize("make", [lh.hessian, lh.ggn, lh.fisher, lambda p: lh.operator(torch.diag(torch.rand(83)))])
def test_products_and_estimates_do_not_depend_on_autocast(make):
    torch.manual_seed(0)
    given = problem()
    A = make(given)
    v = torch.randn(A.dim)
    plain, top = A @ v, lh.eigenpairs(A, 3).values
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(A @ v, plain)
        assert torch.equal(lh.eigenpairs(A, 3).values, top)
        torch.manual_seed(0)
        assert torch.allclose(make(given) @ v, plain, rtol=1e-6) or make is not lh.hessian
