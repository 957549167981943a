"""What every registered kernel must do; ``test_contract.py`` runs it over the registry."""

from __future__ import annotations

import copy
import dataclasses
import math

import torch
from torch import Tensor

from lambdahat.sampling import State, Streams
from lambdahat.sampling.kernels import KERNELS, Evaluate, Kernel

CURVATURES = torch.tensor([2.0, 1.0, 0.5], dtype=torch.float64)
NBETA, GAMMA = 2.0, 0.5
STIFFNESS = NBETA * CURVATURES + GAMMA  # the posterior's precision
STEP = 0.2 / math.sqrt(float(STIFFNESS.max()))
CHAINS, STEPS, BLOCKS = 4096, 100, 40


def bowl(position: Tensor) -> tuple[Tensor, Tensor]:
    """L(w) = ½ Σ h_i w_i²."""
    return 0.5 * (CURVATURES * position.square()).sum(-1), CURVATURES * position


def make(name: str) -> Kernel:
    """The kernel at a small time step, with nothing that adapts."""
    kernel = KERNELS[name](STEP**2, NBETA, GAMMA)
    friction = 2 * math.sqrt(float(STIFFNESS.min()))
    kernel = kernel if kernel.exact else kernel.with_time_step(STEP, friction)
    return dataclasses.replace(kernel, **kernel.frozen)


def advance(kernel: Kernel, state: State, rng: Streams, steps: int, loss: Evaluate = bowl) -> State:
    for _ in range(steps):
        state, _ = kernel.step(state, loss, rng)
    return state


def check_stationary(name: str) -> None:
    """Chains that start in a Gaussian posterior stay in it and forget where they began.

    Steps that are not adjusted are off by (h²a)/4 = 1 % of the variance at most.
    """
    kernel = make(name)
    start = torch.randn(CHAINS, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    start = start / STIFFNESS.sqrt()
    state = kernel.init(start, torch.zeros(3, dtype=torch.float64))
    rng, kept = Streams(1, [0]), torch.ones(3)
    for _ in range(BLOCKS):
        state = advance(kernel, state, rng, STEPS)
        kept = (state.position * start).mean(0) * STIFFNESS
        if kept.abs().max() < 0.1:
            break
    assert kept.abs().max() < 0.1, (name, kept)
    end = state.position
    ratio = end.square().mean(0) * STIFFNESS
    error = math.sqrt(2 / CHAINS)
    assert (ratio - 1).abs().max() < 0.015 + 4.5 * error, (name, ratio)
    assert (end.mean(0) * STIFFNESS.sqrt()).abs().max() < 4.5 / math.sqrt(CHAINS), name


def check_alone_and_together(name: str) -> None:
    """A chain draws the same numbers whichever chains run beside it."""
    kernel, centre = make(name), torch.zeros(3, dtype=torch.float64)
    starts = torch.linspace(-1, 1, 9, dtype=torch.float64).reshape(3, 3)
    together = advance(kernel, kernel.init(starts, centre), Streams(3, [0, 1, 2]), 20)
    for chain in range(3):
        state = kernel.init(starts[chain : chain + 1], centre)
        alone = advance(kernel, state, Streams(3, [chain]), 20)
        assert torch.allclose(alone.position[0], together.position[chain], rtol=1e-12), name


def check_explicit_state(name: str) -> None:
    """All that a step depends on is the kernel, the state and the random numbers."""
    kernel, theta = make(name), torch.ones(2, 3, dtype=torch.float64)
    before = dataclasses.asdict(kernel)
    state = advance(kernel, kernel.init(theta), Streams(5, [0, 1]), 7)
    twin = copy.deepcopy(state)
    ends = [advance(kernel, one, Streams(6, [0, 1]), 7) for one in (state, twin)]
    assert torch.equal(ends[0].position, ends[1].position), name
    assert ends[0].steps == ends[1].steps == 14, name
    assert torch.equal(theta, torch.ones_like(theta)), f"{name} writes to what init was given"
    assert dataclasses.asdict(kernel) == before, name


def check_time_step(name: str) -> None:
    """A kernel that is tuned by its time step keeps the one it is given."""
    kernel = make(name)
    if not kernel.exact:
        for step in (0.01, 0.3):
            assert math.isclose(kernel.with_time_step(step, 2.0).time_step, step), name


CONTRACT = (check_stationary, check_alone_and_together, check_explicit_state, check_time_step)
