"""Stochastic gradient Hamiltonian Monte Carlo."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, Self

from lambdahat._core.check import require_number
from lambdahat.sampling.kernels.kernel import Evaluate, Info, Kernel, State, Streams, register


@register("sghmc")
@dataclass(frozen=True)
class SGHMC(Kernel):
    """Stochastic gradient Hamiltonian Monte Carlo (Chen, Fox and Guestrin 2014, Eq. 15).

    v ← (1 − α)v − (ε/2)·∇U + √(αε)·ξ, w ← w + v, with friction α. At α = 1 it is SGLD of the same
    ε.
    """

    friction: float = 0.1

    inertial: ClassVar[bool] = True
    increments: ClassVar[bool] = True
    held: ClassVar[int] = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number(self.friction, "friction", "(0, 1]")

    def with_time_step(
        self, step: float, friction: float, trace: float = 0.0, parameters: int = 1
    ) -> Self:
        return dataclasses.replace(
            self, step_size=2 * step**2, friction=-math.expm1(-friction * step)
        )

    @property
    def damping(self) -> float:
        return -math.log1p(-self.friction) / self.time_step

    @property
    def virial_excess(self) -> float:
        """Around a minimum a direction of curvature a has the variance 1/[a(1 − εa/(8 − 4α))]."""
        return self.step_size / (8 - 4 * self.friction)

    @property
    def is_unadjusted_mala(self) -> bool:  # type: ignore[override]
        return self.friction == 1

    def step(self, state: State, evaluate: Evaluate, rng: Streams) -> tuple[State, Info]:
        push, factor, info = self.observe(state, evaluate)
        velocity = state.memory["velocity"].mul_(1 - self.friction)
        velocity.add_(self.scaled(push), alpha=-self.step_size / 2 * factor)
        velocity.add_(self.noise(state, rng), alpha=math.sqrt(self.friction * self.step_size))
        state.position.add_(velocity)
        state.steps += 1
        return state, info
