"""A trace of a function gives the function's own numbers, or is not used."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lambdahat as lh
from lambdahat.sampling.backends import chain_runner
from lambdahat.sampling.backends.chain_runner import Together, TracedFunction
from lambdahat.singular.exact import deep_linear_problem


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_runner, "TRACE_AFTER", 2)


def places(problem: lh.Problem, chains: int, seed: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return problem.vector + 0.1 * torch.randn(
        chains, problem.num_parameters, generator=rng, dtype=problem.dtype
    )


def counted(calls: list[int]) -> TracedFunction:
    def function(positions: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(len(positions))
        return positions.square().sum(-1), 2 * positions

    return TracedFunction(function)


def test_the_trace_gives_the_same_bits_as_the_function() -> None:
    problem = deep_linear_problem((3, 2, 3, 2), 1, 1000)
    gradients = Together(problem)
    for seed in range(5):
        at = places(problem, 4, seed)
        for ours, plain in zip(
            gradients.only_batch(at), gradients.one_batch(at, problem.batches.first()), strict=True
        ):
            assert torch.equal(ours, plain)
    assert gradients.only_batch._trace is not None


def test_once_traced_the_function_is_called_no_more() -> None:
    calls: list[int] = []
    function = counted(calls)
    for _ in range(6):
        function(torch.ones(3, 2))
    assert len(calls) == 3  # twice, and once to trace


def test_another_number_of_chains_is_not_answered_by_the_trace() -> None:
    function = counted([])
    for _ in range(3):
        function(torch.ones(3, 2))
    losses, gradients = function(torch.ones(5, 2))
    assert losses.shape == (5,)
    assert gradients.shape == (5, 2)


def test_what_cannot_be_traced_is_called() -> None:
    def function(positions: Tensor) -> tuple[Tensor, Tensor]:
        scale = float(positions.sum())  # a number that a trace does not have
        return scale * positions.sum(-1), scale * torch.ones_like(positions)

    traced = TracedFunction(function)
    for value in (1.0, 2.0, 3.0, 4.0):
        losses, _ = traced(torch.full((2, 2), value))
        assert losses[0] == 4 * value * 2 * value


def test_what_answers_otherwise_the_next_time_is_called() -> None:
    calls: list[int] = []

    def function(positions: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return positions.sum(-1) + len(calls), positions

    traced = TracedFunction(function)
    seen = [float(traced(torch.zeros(1, 1))[0]) for _ in range(5)]
    assert seen == [1.0, 2.0, 4.0, 5.0, 6.0]  # the third call was the trace's
