"""What an operator leaves behind."""

import gc

import pytest
import torch
from torch import nn

import lambdahat as lh


def activations() -> int:
    """Live tensors of the size that only activations below have."""
    gc.collect()
    return sum(
        type(found) is torch.Tensor and found.numel() == 7 * 5 * 12 * 12
        for found in gc.get_objects()
    )


@pytest.mark.parametrize("make", [lh.hessian, lh.ggn])
def test_a_dropped_operator_leaves_no_graph(make):
    # a graph whose saved outputs hold their own nodes is a cycle in C++, which Python's collector
    # cannot see
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 5, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(5, 5, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(5 * 12 * 12, 3),
    )
    problem = lh.Problem(
        model, "cross_entropy", (torch.randn(7, 1, 12, 12), torch.randint(0, 3, (7,)))
    )
    before = activations()
    for _ in range(3):
        operator = make(problem)
        operator @ torch.ones(problem.num_parameters)
        del operator
    assert activations() == before
