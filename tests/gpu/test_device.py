"""The same numbers on a GPU: products, captured CUDA graphs and estimates against the CPU's
dense float64 matrices.
"""

from __future__ import annotations

import pytest
import torch

import lambdahat as lh
from lambdahat.operators.base import Identity
from lambdahat.problem import Problem
from tests.cases import NETWORKS, network
from tests.operators.contract import relative
from tests.oracles import dense_ggn, dense_hessian

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(params=list(NETWORKS))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def on_gpu(name: str) -> Problem:
    return network(name, device="cuda")


def test_hessian_and_its_captured_graph(name: str) -> None:
    operator, exact = lh.hessian(on_gpu(name)), dense_hessian(network(name))
    single = torch.stack(
        [operator @ e for e in torch.eye(operator.dim, device="cuda", dtype=torch.float64)[:9]]
    )
    assert operator._products.replays[1] is not None, "small problems replay a CUDA graph"
    assert relative(single.cpu(), exact[:9]) < 1e-9
    assert relative(operator.dense().cpu(), exact) < 1e-9


def test_uncaptured_products_agree(name: str) -> None:
    exact = dense_hessian(network(name))
    forward = lh.hessian(on_gpu(name), mode="forward")
    assert relative(forward.dense().cpu(), exact) < 1e-9


def test_gauss_newton(name: str) -> None:
    operator, exact = lh.ggn(on_gpu(name)), dense_ggn(network(name))
    assert relative(operator.dense().cpu(), exact) < 1e-9
    assert operator.known_trace() == pytest.approx(float(exact.trace()), rel=1e-9)
    assert relative(operator.known_diagonal().cpu(), exact.diagonal()) < 1e-9


def test_products_follow_each_other_through_one_graph() -> None:
    """A replay must not hand out the buffer that the next replay fills."""
    operator = lh.hessian(on_gpu("mlp"))
    u, v = torch.randn(2, operator.dim, device="cuda", dtype=torch.float64)
    first = operator @ u
    kept = first.clone()
    _ = operator @ v
    assert torch.equal(first, kept)


def test_estimates_do_not_depend_on_the_device(name: str) -> None:
    here, there = lh.hessian(network(name)), lh.hessian(on_gpu(name))
    assert float(lh.trace(there)) == pytest.approx(float(lh.trace(here)), rel=1e-6)
    assert float(lh.frobenius_norm(there)) == pytest.approx(
        float(lh.frobenius_norm(here)), rel=1e-6
    )
    ours, theirs = lh.eigenpairs(there, 3).values.cpu(), lh.eigenpairs(here, 3).values
    assert torch.allclose(ours, theirs, rtol=1e-6)
    spectra = lh.spectrum(there, depth=8), lh.spectrum(here, depth=8)
    assert spectra[0].nodes == pytest.approx(spectra[1].nodes, rel=1e-6, abs=1e-9)


def test_bfloat16_model() -> None:
    problem = network("mlp", device="cuda", dtype=torch.bfloat16)
    exact = dense_hessian(network("mlp"))
    assert relative(lh.hessian(problem).dense().double().cpu(), exact) < 0.05


def test_an_operators_device_has_its_index() -> None:
    operator = Identity(3, torch.float32, "cuda")
    assert operator.device == torch.empty(0, device="cuda").device
    assert bool((operator @ torch.ones(3, device="cuda")).all())
