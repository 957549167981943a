"""The gradients of all chains on the one batch of a problem: its operations alone, in the end."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lambdahat as lh
from lambdahat.sampling.backends import chain_runner
from lambdahat.sampling.backends.chain_runner import Together
from lambdahat.singular.exact import deep_linear_problem


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_runner, "NOTED", 2)


def places(problem: lh.Problem, chains: int, seed: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return problem.vector + 0.1 * torch.randn(
        chains, problem.num_parameters, generator=rng, dtype=problem.dtype
    )


def test_the_operations_give_the_same_bits_for_any_number_of_chains() -> None:
    problem = deep_linear_problem((3, 2, 3, 2), 1, 1000)
    gradients = Together(problem)
    for seed in range(10):
        at = places(problem, 4 if seed % 2 else 3, seed)
        for ours, plain in zip(
            gradients.only_batch(at), gradients.one_batch(at, problem.batches.first()), strict=True
        ):
            assert torch.equal(ours, plain)
    assert [line.replaces for line in gradients._lines.values()] == [True, True]


def test_the_gradients_are_the_callers_to_change() -> None:
    problem = deep_linear_problem((3, 2, 3, 2), 1, 1000)
    gradients = Together(problem)
    for _ in range(5):
        at = places(problem, 4, 0)
        kept = at.clone()
        losses, slopes = gradients.only_batch(at)
        exact = [problem.gradient(row) for row in at]
        assert torch.allclose(slopes, torch.stack(exact), rtol=1e-12, atol=1e-14)
        losses.zero_()
        slopes.zero_()
        assert torch.equal(at, kept)
