"""A kernel as a user would add it: the scheme of Leimkuhler and Matthews (2013), overdamped.

w ← w − (ε/2)·∇U(w) + √ε·(ξ_k + ξ_{k+1})/2 has the exact variance on a Gaussian.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lambdahat.sampling.kernels import Evaluate, Info, Kernel, State, Streams, register


@register("toy")
@dataclass(frozen=True)
class Toy(Kernel):
    """Overdamped Langevin dynamics with averaged noise."""

    def step(self, state: State, evaluate: Evaluate, rng: Streams) -> tuple[State, Info]:
        push, factor, info = self.observe(state, evaluate)
        state.position.add_(self.scaled(push), alpha=-self.step_size / 2 * factor)
        noise = self.noise(state, rng).clone()
        before = state.memory.get("noise", noise)
        state.position.add_(noise + before, alpha=math.sqrt(self.step_size) / 2)
        state.memory["noise"] = noise
        state.steps += 1
        return state, info
