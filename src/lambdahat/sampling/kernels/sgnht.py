"""The stochastic gradient Nosé–Hoover thermostat."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from lambdahat._core.check import require, require_number
from lambdahat.sampling.kernels.kernel import Evaluate, Info, Kernel, State, Streams, register


@register("sgnht")
@dataclass(frozen=True)
class SGNHT(Kernel):
    """The stochastic gradient Nosé–Hoover thermostat (Ding et al. 2014), with η = ε/2 in their
    notation.

    v ← (1 − α)v − (ε/2)·∇U + √(aε)·ξ, w ← w + v, α ← α + (1 − α/2)·‖v‖²/P − ε/2: the friction α of
    each chain starts at ``friction`` (by default the ``diffusion`` a) and settles near a + (ε/4)·V,
    with V the mean variance of ∇U over batches. That takes hundreds of steps, in which chains are
    too hot or too cold, unless it starts there. The factor 1 − α/2 is not in the paper. These steps
    give a direction of curvature c the variance (1 − α/2)·E[v²]/(cε/2) at any stable step, so the
    paper's thermostat leaves the positions too cold by α/2.
    """

    diffusion: float = 0.1
    friction: float | None = None

    inertial: ClassVar[bool] = True
    increments: ClassVar[bool] = True
    held: ClassVar[int] = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number(self.diffusion, "diffusion", "(0, 1]")
        if self.friction is not None:
            require_number(self.friction, "friction", "(0, 1]")
        expected = "be left out: the thermostat knows one temperature only"
        require(self.scale is None, "scale", expected, self.scale)

    def with_time_step(
        self, step: float, friction: float, trace: float = 0.0, parameters: int = 1
    ) -> Self:
        diffusion = -math.expm1(-friction * step)
        # the friction starts where the noise of batches will hold it
        start = min(diffusion + self.absorbed_friction(step, trace, parameters), 1.0)
        return dataclasses.replace(self, step_size=2 * step**2, diffusion=diffusion, friction=start)

    def absorbed_friction(self, step: float, trace: float, parameters: int) -> float:
        return step**2 * trace / (2 * parameters)

    def noise_bias(
        self, trace: float, share: float, degree: float, energy: float, parameters: int
    ) -> float:
        """As for other kernels, but the thermostat cools all directions alike until their mean
        temperature is right, and so removes the share of the directions that the data determine.
        """
        step = self.time_step
        friction = self.diffusion + self.absorbed_friction(step, trace, parameters)
        free = min(max(share - 2 * energy / parameters, 0.0), 1.0)
        return 2 / degree * step**2 / (4 * friction) * trace * free

    def init(self, theta: Tensor, centre: Tensor | None = None) -> State:
        state = super().init(theta, centre)
        start = self.diffusion if self.friction is None else self.friction
        state.memory["friction"] = torch.full_like(state.position[..., :1], start)
        return state

    def resume(self, state: State, step_size: float) -> None:
        super().resume(state, step_size)
        state.memory["friction"].fill_(self.diffusion if self.friction is None else self.friction)

    def step(self, state: State, evaluate: Evaluate, rng: Streams) -> tuple[State, Info]:
        push, factor, info = self.observe(state, evaluate)
        velocity, friction = state.memory["velocity"], state.memory["friction"]
        velocity.mul_(1 - friction).add_(push, alpha=-self.step_size / 2 * factor)
        velocity.add_(self.noise(state, rng), alpha=math.sqrt(self.diffusion * self.step_size))
        state.position.add_(velocity)
        heat = velocity.square().mean(-1, keepdim=True)
        friction.add_((1 - friction / 2) * heat - self.step_size / 2)
        state.steps += 1
        return state, info
