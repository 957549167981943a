"""Losses that lead samplers astray: each must give a true value or the status that says what is
wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import lambdahat as lh
from lambdahat.results import Status

BUDGET = 12_000


def problem(
    loss: Callable[[Tensor], Tensor], centre: list[float], samples: int = 100_000
) -> lh.Problem:
    """A loss of one vector w, in float64."""
    start = torch.tensor(centre, dtype=torch.float64)
    return lh.Problem.from_function(lambda p: loss(p["w"]), {"w": start}, num_samples=samples)


NO_MINIMUM = {
    "a cubic valley": (lambda w: w[0] ** 2 + w[1] ** 3, [0.0, 0.0]),
    "a cubic": (lambda w: w[0] ** 3, [0.0]),
    "a saddle": (lambda w: w[0] ** 2 - w[1] ** 2, [0.0, 0.0]),
    "a saddle between two minima": (lambda w: w[0] ** 2 - w[1] ** 2 + w[1] ** 4, [0.0, 0.0]),
    "a maximum": (lambda w: -(w**2).sum(), [0.0, 0.0, 0.0]),
    "a maximum between minima": (lambda w: -(w**2).sum() + (w**4).sum(), [0.0, 0.0, 0.0]),
    "a slope": (lambda w: w.sum(), [1.0, 1.0]),
    "an exponential slope": (lambda w: torch.exp(-w.sum()), [1.0, 1.0]),
    "a logarithm that ends in NaN": (lambda w: torch.log(w[0]) + w[1] ** 2, [1.0, 0.0]),
    "a point beside the minimum": (lambda w: (w**2).sum(), [0.3, 0.0]),
}


@pytest.mark.parametrize("name", NO_MINIMUM)
def test_what_is_no_minimum_is_called_so(name):
    loss, centre = NO_MINIMUM[name]
    found = lh.llc(problem(loss, centre), max_gradients=4000)
    assert found.status is Status.NOT_A_MINIMUM


VALUES = {
    "a minimum beside a logarithmic wall": (
        lambda w: w[0] - torch.log(w[0]) + w[1] ** 2,
        [1.0, 0.0],
        1.0,
    ),
    "a constant": (lambda w: 0.0 * w.sum(), [0.0, 0.0, 1.0], 0.0),
    "a curved valley": (lambda w: (1 - w[0]) ** 2 + 100 * (w[1] - w[0] ** 2) ** 2, [1.0, 1.0], 1.0),
    "absolute values": (lambda w: w.abs().sum(), [0.0, 0.0], 2.0),
    "a large scale": (lambda w: 1e12 * (w**2).sum(), [0.0, 0.0], 1.0),
    "small parameters": (lambda w: ((w / 1e-6 - 1) ** 2).sum(), [1e-6, 1e-6], 1.0),
    "periodic wells": (lambda w: (1 - torch.cos(w)).sum(), [0.0, 0.0], 1.0),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_minimum_in_an_awkward_place_has_its_value(name):
    """The data decide in all of them, or nothing does: λ is d/2, the degree of the loss, or 0."""
    loss, centre, truth = VALUES[name]
    found = lh.llc(problem(loss, centre), max_gradients=BUDGET)
    assert abs(float(found) - truth) <= 4 * float(found.stderr) + 0.01 * truth


def test_an_infinite_wall_is_not_converged():
    wall = torch.tensor(math.inf, dtype=torch.float64)
    found = lh.llc(
        problem(lambda w: torch.where(w[0] > 1e-3, wall, w[0] ** 2) + w[1] ** 2, [0.0, 0.0]),
        max_gradients=BUDGET,
    )
    assert not found.status.ok


def test_a_scale_too_small_to_count_gives_what_is_left_of_it():
    found = lh.llc(problem(lambda w: 1e-12 * (w**2).sum(), [0.0, 0.0]), max_gradients=BUDGET)
    curvature = found.nbeta * 2e-12
    truth = curvature / (curvature + found.localization)
    assert abs(float(found) - truth) <= 4 * float(found.stderr) < truth


@pytest.mark.parametrize(
    ("size", "rotated"),
    [
        (300, False),
        pytest.param(300, True, marks=pytest.mark.slow),
        pytest.param(3000, False, marks=pytest.mark.slow),
    ],
)
def test_a_condition_number_of_a_million_is_true_or_not_mixed(size, rotated):
    curvatures = torch.from_numpy(np.geomspace(1.0, 1e-6, size))
    turn = None
    if rotated:
        rng = torch.Generator().manual_seed(0)
        turn = torch.linalg.qr(torch.randn(size, size, generator=rng, dtype=torch.float64)).Q

    def loss(w: Tensor) -> Tensor:
        return 0.5 * (curvatures * (w if turn is None else turn @ w) ** 2).sum()

    found = lh.llc(problem(loss, [0.0] * size), max_gradients=BUDGET)
    stiffness = found.nbeta * curvatures
    truth = 0.5 * float((stiffness / (stiffness + found.localization)).sum())
    true = abs(float(found) - truth) <= 4 * float(found.stderr)
    assert true if found.status.ok else found.status in (Status.NOT_MIXED, Status.GRADIENTS_SPENT)


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_two_parameters_whose_product_counts(noise):
    """y = abx on 20,000 samples: λ = ½ where the slope is not 0, whatever the seed."""
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(20_000, 1, generator=rng)
    y = x + noise * torch.randn(20_000, 1, generator=rng)
    root = math.sqrt(float((x * y).sum() / (x * x).sum()))
    both = lh.Problem.from_function(
        lambda p, batch: 0.5 * (p["w"][0] * p["w"][1] * batch[0] - batch[1]).square().mean(),
        {"w": torch.tensor([root, root])},
        (x, y),
    )
    for seed in (0, 1):
        found = lh.llc(both, seed=seed, max_gradients=BUDGET // 4)
        assert abs(float(found) - 0.5) <= 4 * float(found.stderr)
        assert float(found.stderr) < 0.15
