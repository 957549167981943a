"""Steps from fixed places, as a CUDA graph replays them: the same bits as plain ones; what
changes is not captured.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from lambdahat import optim
from lambdahat.problem import Problem
from lambdahat.training.feeding import Feed
from lambdahat.training.stepping import (
    CapturedGradients,
    Stepper,
    Tally,
    TrainingSubject,
    joint_norm,
)
from tests.training.small_runs import TRAIN, plain, same


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 10))


OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adam": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "ngd": lambda model: optim.NGD(model.parameters(), lr=0.1, momentum=0.9),
}


def stepper(
    model: nn.Module, kind: str, captured: bool, accumulate: int = 1, loss="cross_entropy"
) -> Stepper:
    problem, optimizer = Problem(model, loss, TRAIN), OPTIMIZERS[kind](model)
    rules = [optim.L2(0.01)]
    found = Stepper(
        TrainingSubject(problem),
        optimizer,
        Feed(problem, 64, accumulate, seed=0),
        precision="float32",
        clip=0.5,
        regularizers=rules,
        curvature_samples=None,
    )
    assert found.captured is None, "on a CPU nothing is captured"
    if captured:
        found.captured = CapturedGradients(found.subject, found.parameters, joint_norm)
    return found


def epochs(run: Stepper, count: int = 3) -> Tally:
    """Three epochs of 300 samples in batches of 64, the last of 44, at a learning rate that
    falls.
    """
    tally, step = Tally(torch.device("cpu")), 0
    schedule = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.9)
    run.subject.model.train()
    for epoch in range(count):
        for group in run.feed.epoch(epoch):
            run(group, step, tally)
            schedule.step()
            step += 1
    return tally


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_from_fixed_places_have_the_same_bits(kind, accumulate):
    runs = [stepper(normed(), kind, captured, accumulate) for captured in (False, True)]
    tallies = [epochs(run) for run in runs]
    assert len(runs[1].captured._forms) == 2, "whole steps and the short last one"
    assert same(*(run.subject.model.state_dict() for run in runs))
    assert torch.equal(tallies[0].sums, tallies[1].sums)


def test_a_parameter_that_the_loss_does_not_reach_has_no_gradient():
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(64, 10), nn.Linear(3, 3)

        def forward(self, x):
            return self.used(x)

    runs = [stepper(Spare(), "sgd", True), stepper(Spare(), "sgd", False)]
    runs[1].subject.model.load_state_dict(runs[0].subject.model.state_dict())
    for run in runs:
        epochs(run, 1)
    assert same(*(run.subject.model.state_dict() for run in runs))
    runs[0].captured(next(iter(runs[0].feed.epoch(0))))
    assert runs[0].subject.model.spare.weight.grad is None


class Counting(nn.Module):
    """Passes that depend on how many there were, which a replay would not count."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self._passes = nn.Linear(64, 10), 0

    def forward(self, x):
        self._passes += self.training
        return self.inner(x) / (1 + self._passes)


class Replacing(nn.Module):
    """A buffer that every pass puts another tensor in place of, which a replay would not do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 10)
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.inner(x - self.mean)


class Skipping(nn.Module):
    """Stochastic depth by Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 10)

    def forward(self, x):
        return self.inner(x) * (1.0 + (self.training and random.random() < 0.5))


def hooked() -> nn.Module:
    model = plain()
    model[0].register_forward_hook(lambda *_: None)
    return model


def tensor_hooked() -> nn.Module:
    model = plain()
    model[0].weight.register_hook(lambda gradient: gradient)
    return model


CHANGING = {
    "dropout": lambda: nn.Sequential(nn.Linear(64, 10), nn.Dropout(0.5)),
    "a counter": Counting,
    "another buffer": Replacing,
    "a draw of Python": Skipping,
    "a forward hook": hooked,
    "a tensor's hook": tensor_hooked,
}


@pytest.mark.parametrize("kind", CHANGING)
def test_what_a_replay_would_not_repeat_is_not_captured(kind):
    run = stepper(CHANGING[kind](), "sgd", True)
    run.subject.model.train()
    groups = list(run.feed.epoch(0))
    run.captured(groups[0])
    assert run.captured(groups[1]) is None
    assert run.captured._forms == {}


@pytest.mark.parametrize(
    "name", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]
)
def test_hooks_on_all_modules_stop_the_capture(name):
    run = stepper(plain(), "sgd", True)
    groups = list(run.feed.epoch(0))
    assert run.captured(groups[0]) is not None
    handle = getattr(nn.modules.module, f"register_module_{name}")(lambda *_: None)
    try:
        assert run.captured(groups[1]) is None
    finally:
        handle.remove()


def test_a_loss_of_the_users_own_is_not_captured():
    run = stepper(
        plain(),
        "sgd",
        True,
        loss=lambda output, target: nn.functional.cross_entropy(output, target),
    )
    assert run.captured(next(iter(run.feed.epoch(0)))) is None


def test_tensors_that_moved_are_seen():
    """A graph reads the memory that it was captured on: parameters put elsewhere need another."""
    run = stepper(plain(), "sgd", True)
    groups = list(run.feed.epoch(0))
    run.captured(groups[0])
    first = run.parameters[0]
    first.data = first.data * 0.0
    run.captured(groups[1])
    assert len(run.captured._forms) == 2
    expected = Problem(run.subject.model, "cross_entropy", TRAIN).on(groups[1][0].data).gradient()
    assert torch.allclose(
        torch.cat([p.grad.reshape(-1) for p in run.parameters]), expected, atol=1e-6
    )


def test_batches_of_many_shapes_are_not_captured():
    run = stepper(plain(), "sgd", True)
    data = [batch.data for group in run.feed.epoch(0) for batch in group]
    sizes = [5, 6, 7, 8]
    batches = [
        type(next(iter(run.feed.epoch(0)))[0])(tuple(part[:size] for part in data[0]), size)
        for size in sizes
    ]
    assert all(run.captured([batch]) is not None for batch in batches)
    assert run.captured(next(iter(run.feed.epoch(0)))) is None
