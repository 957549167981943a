"""The feed-forward rank bound: its count, its refusals, and a network that breaks it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lambdahat.estimators import RankBound, rank_bound
from lambdahat.operators import hessian
from lambdahat.problem import Problem
from tests.cases import classifier, quadratic


def test_counts_of_a_perceptron() -> None:
    found = rank_bound(classifier((4, 5, 6, 3)))
    assert (found.inputs, found.outputs, found.neurons) == (4, 3, 5 + 6 + 3)
    assert found.bound == 4 * 3 * (14 + 4)
    assert found.parameters == 4 * 5 + 5 + 5 * 6 + 6 + 6 * 3 + 3
    assert found.degeneracy == 0.0  # the bound is above P here
    # the paper's VGG-16
    assert RankBound(577_600, 16_000_000, 1024, 10, 13_416).degeneracy == pytest.approx(0.9639)


def test_the_bound_is_a_claim_that_random_relu_networks_break() -> None:
    problem = classifier((18, 26, 16, 2), samples=300, batch_size=None)
    found = rank_bound(problem)
    assert (found.parameters, found.bound) == (960, 496)
    values = torch.linalg.eigvalsh(hessian(problem).dense()).abs()
    rank = int((values > 1e-10 * values.max()).sum())
    assert rank > 900


def test_other_networks_are_refused_by_name() -> None:
    image = torch.ones(2, 1, 4, 4), torch.tensor([0, 1])
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(18, 2))
    with pytest.raises(ValueError, match="Conv2d"):
        rank_bound(Problem(model, "cross_entropy", image))

    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(3, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x) + self.second(x)

    with pytest.raises(ValueError, match="3 → 4 then 3 → 4"):
        rank_bound(Problem(Skipping(), "cross_entropy", (torch.ones(2, 3), torch.tensor([0, 1]))))
    with pytest.raises(ValueError, match="have a model"):
        rank_bound(quadratic(torch.eye(2)))
