"""Data and models for the tests of ``Problem``, and the same loss and gradient by torch alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from lambdahat._core.rng import generator
from lambdahat.problem import Problem

N, D, C = 11, 4, 3
RNG = generator(0, "test problem")
X = torch.randn(N, D, generator=RNG, dtype=torch.float64)
Y = torch.randint(0, C, (N,), generator=RNG)
Z = torch.randn(N, C, generator=RNG, dtype=torch.float64)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return make().double()


def mlp() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, C)))


def batchnorm() -> nn.Module:
    """With dropout, batch-norm of odd statistics and a frozen parameter, in train mode."""
    model = seeded(
        lambda: nn.Sequential(
            nn.Linear(D, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, C)
        )
    )
    model[1].running_mean += 0.3
    model[1].running_var *= 2.0
    model[0].bias.requires_grad_(False)
    return model.train()


def plain(
    model: nn.Module, loss: Callable[[Any, Any], Tensor], x: Any, y: Any
) -> tuple[float, Tensor]:
    """Loss and gradient of one whole batch, by torch alone."""
    chosen = [p for p in model.parameters() if p.requires_grad]
    value = loss(model(x), y)
    grads = torch.autograd.grad(value, chosen)
    return float(value.detach()), parameters_to_vector(grads)


def agrees(problem: Problem, expected: tuple[float, Tensor]) -> None:
    assert problem.loss() == pytest.approx(expected[0], rel=1e-12)
    assert torch.allclose(problem.gradient(), expected[1], rtol=1e-11, atol=1e-13)
