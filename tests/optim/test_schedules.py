"""Schedules against their equations, epoch by epoch."""

import math

import pytest
import torch

from lambdahat.optim import make_schedule, schedules


def rates(make, epochs, lr=0.5):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=lr)
    schedule = make(optimizer)
    seen = []
    for _ in range(epochs):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return seen


def eq12(t, total, low):
    share = t / total
    if share <= 0.5:
        return 1.0
    return 1 - (1 - low) * (share - 0.5) / 0.4 if share <= 0.9 else low


CASES = {
    "linear": ({}, lambda t: eq12(t, 40, 0.01)),
    "averaging": ({"averaging_start": 20}, lambda t: eq12(t, 20, 0.5)),
    "step": ({}, lambda t: 0.1 ** ((t >= 20) + (t >= 30))),
    "cosine": ({"ratio": 0.2}, lambda t: 0.2 + 0.8 * math.cos(math.pi * t / 80) ** 2),
    "flat": ({}, lambda t: 1.0),
    "inverse-sqrt": ({}, lambda t: 1 / math.sqrt(t + 1)),
}


@pytest.mark.parametrize("name", CASES)
def test_every_epoch_has_the_rate_of_the_equation(name):
    settings, factor = CASES[name]
    found = rates(lambda optimizer: make_schedule(name, optimizer, 40, **settings), 40)
    assert found == pytest.approx([0.5 * factor(t) for t in range(40)], rel=1e-12)


def test_every_schedule_is_tested():
    assert set(CASES) == set(schedules.SCHEDULES)


def test_milestones_and_groups():
    a, b = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [a], "lr": 1.0}, {"params": [b], "lr": 0.1}])
    schedule = schedules.step_decay(optimizer, 10, milestones=(2,), factor=0.5)
    for _ in range(3):
        optimizer.step()
        schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5, 0.05])


def test_rates_stay_where_they_end():
    assert rates(lambda optimizer: schedules.cosine(optimizer, 5), 8)[5:] == [0.0, 0.0, 0.0]
