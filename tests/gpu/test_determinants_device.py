"""Kernel matrices and log-determinants on a CUDA device agree with those on the CPU."""

from __future__ import annotations

import pytest
import torch

from lambdahat._core.rng import generator
from lambdahat.estimators import logdet
from lambdahat.operators import operator
from lambdahat.operators.kernel_matrix import kernel_matrix
from tests.cases import with_eigenvalues

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
POINTS = torch.randn(300, 3, generator=generator(0, "device"), dtype=torch.float64)


@pytest.mark.parametrize("memory", [2**29, 3 * 70 * 300 * 8])
@pytest.mark.parametrize("kind", ["squared_exponential", "exponential", "matern32", "matern52"])
def test_kernel_products(kind, memory):
    here, there = (
        kernel_matrix(p, kind, 0.8, 1e-3, memory=memory) for p in (POINTS, POINTS.cuda())
    )
    block = torch.randn(300, 4, generator=generator(1, "device"), dtype=torch.float64)
    assert torch.allclose((there @ block.cuda()).cpu(), here @ block, atol=1e-10)
    assert torch.allclose(there.columns([5, 9]).cpu(), here.columns([5, 9]), atol=1e-12)


@pytest.mark.parametrize("method", ["slq", "maxent", "chebyshev", "exact"])
def test_logdet(method):
    options = {} if method == "exact" else {"depth": 20, "probes": 8}
    matrix = with_eigenvalues(torch.logspace(-2, 1, 200))
    here, there = (logdet(operator(m), method, **options) for m in (matrix, matrix.cuda()))
    assert there.value == pytest.approx(here.value, rel=1e-6)
    exact = float(torch.logdet(kernel_matrix(POINTS, noise=1e-3).dense()))
    found = logdet(kernel_matrix(POINTS.cuda(), noise=1e-3), method, **options)
    assert abs(found.value - exact) <= 4 * found.stderr + 1e-6 * abs(exact)
