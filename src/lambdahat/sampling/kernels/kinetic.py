"""Underdamped (kinetic) Langevin dynamics."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, Self

from lambdahat._core.check import require, require_number
from lambdahat.sampling.kernels.kernel import Evaluate, Info, Kernel, State, Streams, register


@register("kinetic")
@dataclass(frozen=True)
class Kinetic(Kernel):
    """Underdamped (kinetic) Langevin dynamics by the BAOAB splitting, one gradient per step.

    With time step h = ``step_size``, friction ξ and c = exp(−ξh), a step is::

        v ← v − h·Sᵀ∇U(w);   w ← w + (h/2)·Sv;   v ← c·v + √(1 − c²)·N(0, I);   w ← w + (h/2)·Sv

    A direction of curvature a relaxes in about 1/(h√a) steps, where overdamped dynamics need
    1/(h²a). For a Gaussian posterior the positions have the exact covariance at every stable step,
    h < 2/√(largest curvature); elsewhere the bias is O(h²). Gradient noise of covariance V adds
    about hV/(2ξ) to the temperature of each direction, linear in h. With infinite friction it is
    the overdamped scheme of Leimkuhler and Matthews with ε = h².

    Args:
        step_size: The time step h.
        nbeta: The inverse temperature nβ.
        localization: The localization γ.
        scale: A preconditioner S; the mass is (S·Sᵀ)⁻¹.
        friction: The friction ξ per unit of time; by default 2√γ, which damps the flattest
            direction critically (the mean γ where it differs between parameters; 1 for γ = 0).

    References:
        Leimkuhler & Matthews (2013), "Rational construction of stochastic numerical methods for
        molecular sampling".
    """

    friction: float | None = None

    inertial: ClassVar[bool] = True
    held: ClassVar[int] = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.friction is not None and self.friction != math.inf:
            require_number(self.friction, "friction")
            require(self.friction > 0, "friction", "be above 0", repr(self.friction))

    @property
    def damping(self) -> float:
        """The friction ξ that is used."""
        if self.friction is not None:
            return float(self.friction)
        mean = self.gamma()
        return 2 * math.sqrt(mean) if self.scale is None and mean > 0 else 1.0 if mean <= 0 else 2.0

    @property
    def time_step(self) -> float:
        return self.step_size

    def with_time_step(
        self, step: float, friction: float, trace: float = 0.0, parameters: int = 1
    ) -> Self:
        return dataclasses.replace(self, step_size=step, friction=friction)

    def step(self, state: State, evaluate: Evaluate, rng: Streams) -> tuple[State, Info]:
        push, factor, info = self.observe(state, evaluate)
        length, kept = self.step_size, math.exp(-self.damping * self.step_size)
        buffer, spread = state.memory["buffer"], math.sqrt(1 - kept**2)
        velocity = state.memory["velocity"].add_(push, alpha=-length * factor)
        if self.scale is None:
            state.position.add_(velocity, alpha=length / 2)
            velocity.mul_(kept).add_(rng.normal_(buffer), alpha=spread)
            state.position.add_(velocity, alpha=length / 2)
        else:  # both halves of the way in one product with S
            way = velocity.clone()
            velocity.mul_(kept).add_(rng.normal_(buffer), alpha=spread)
            state.position.add_(self.scaled(way.add_(velocity)), alpha=length / 2)
        state.steps += 1
        return state, info
