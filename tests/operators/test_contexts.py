"""An operator is one matrix under ``torch.autocast`` and in inference mode too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import lambdahat as lh


def problem():
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 6, generator=rng), torch.randint(0, 3, (40,), generator=rng)
    return lh.Problem(lh.models.mlp([6, 8, 3], "tanh"), "cross_entropy", (x, y))


@pytest.mark.parametrize(
    "make", [lh.hessian, lh.ggn, lh.fisher, lambda p: lh.operator(torch.diag(torch.rand(83)))]
)
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


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_number_is_the_same_in_every_context(context):
    """Operators, estimates and factors that are made inside are those made outside, to the bit."""
    given = problem()

    def numbers() -> list[float]:
        hessian, ggn = lh.hessian(given), lh.ggn(given)
        v = torch.ones(given.num_parameters)
        found = [lh.trace(hessian), lh.trace(ggn, method="hutchinson"), lh.frobenius_norm(ggn)]
        found += [
            lh.fisher_rao_norm(given),
            lh.logdet(ggn + 0.1 * lh.identity(ggn)),
            lh.variance(given).gradient_mean_norm,
        ]
        values = [float(value) for value in found] + lh.eigenpairs(ggn, k=2).values.tolist()
        return [
            *values,
            float((hessian @ v).norm()),
            float((v @ ggn).norm()),
            lh.kfac(given).logdet(0.01),
            float(lh.ekfac(given).dense().norm()),
        ]

    outside = numbers()
    assert min(map(abs, outside)) > 0
    with CONTEXTS[context]():
        assert numbers() == outside
