"""Stochastic gradient Langevin dynamics."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from lambdahat.sampling.kernels.kernel import Evaluate, Info, Kernel, State, Streams, register


@register("sgld")
@dataclass(frozen=True)
class SGLD(Kernel):
    """Stochastic gradient Langevin dynamics (Welling and Teh 2011): w ← w − (ε/2)·∇U + √ε·ξ."""

    bias_formula: ClassVar[str] = "steps"
    is_unadjusted_mala: ClassVar[bool] = True

    def step(self, state: State, evaluate: Evaluate, rng: Streams) -> tuple[State, Info]:
        push, factor, info = self.observe(state, evaluate)
        state.position.add_(self.scaled(push), alpha=-self.step_size / 2 * factor)
        state.position.add_(self.noise(state, rng), alpha=math.sqrt(self.step_size))
        state.steps += 1
        return state, info
