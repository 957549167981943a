"""Every registered kernel keeps the contract, and so does one that is added by one file."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import lambdahat as lh
from lambdahat.sampling.kernels import KERNELS
from tests.sampling.kernels.contract import CONTRACT, check_stationary

TOY = Path(__file__).with_name("toy_kernel.py")


@pytest.fixture
def toy():
    """The registry with one more kernel, as importing its file makes it."""
    names = set(KERNELS)
    spec = importlib.util.spec_from_file_location("toy_kernel", TOY)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for name in set(KERNELS) - names:
        del KERNELS[name]


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", sorted(KERNELS))
def test_every_kernel_keeps_the_contract(name, check):
    check(name)


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_a_new_kernel_is_one_file(toy, check):
    check("toy")


def test_llc_takes_a_new_kernel_by_its_name(toy):
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    model = torch.nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    problem = lh.Problem(model, "mse", (x, torch.zeros(200, 1)))
    found = lh.llc(problem, kernel="toy", localization=1e-3, max_gradients=16000)
    assert found.chains.kernel == "Toy"
    assert abs(float(found) - 1.5) < 4 * float(found.stderr)  # a regular model: d/2
    assert float(found.stderr) < 0.3


def test_the_contract_sees_a_kernel_at_the_wrong_temperature(toy):
    class Hot(toy.Toy):
        def noise(self, state, rng):
            return 1.1 * super().noise(state, rng)

    KERNELS["hot"] = Hot
    with pytest.raises(AssertionError, match="hot"):
        check_stationary("hot")
