"""SGLD preconditioned by running squares of the gradient."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from lambdahat._core.check import require, require_number, require_positive
from lambdahat.sampling.kernels.kernel import Evaluate, Info, Kernel, State, Streams, register


@register("rmsprop_sgld")
@dataclass(frozen=True)
class RMSpropSGLD(Kernel):
    """SGLD preconditioned by running gradient squares (Li et al. 2016), as in devinterp.

    V ← aV + (1 − a)(∇L)², G = 1/(√V + e); w ← w − (ε/2)·G∇U + √(εG)·ξ. V starts at 1 without bias
    correction, and the Γ term of the paper, the divergence of G, is left out. With ``decay`` a = 1,
    V stays and the chain is unbiased.
    """

    decay: float = 0.99
    epsilon: float = 0.1

    bias_formula: ClassVar[str] = "none"
    held: ClassVar[int] = 6
    frozen: ClassVar[Mapping[str, Any]] = {"decay": 1.0}  # the metric as the burn-in left it

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number(self.decay, "decay", "(0, 1]")
        require_positive(self.epsilon, "epsilon")
        require(self.scale is None, "scale", "be left out: RMSprop-SGLD finds its own", self.scale)

    @property
    def time_step(self) -> float:
        return math.sqrt(self.step_size / self.epsilon)

    def with_time_step(
        self, step: float, friction: float, trace: float = 0.0, parameters: int = 1
    ) -> Self:
        # the metric is at most 1/epsilon
        return dataclasses.replace(self, step_size=self.epsilon * step**2)

    def init(self, theta: Tensor, centre: Tensor | None = None) -> State:
        state = super().init(theta, centre)
        state.memory["squares"] = torch.ones_like(state.position)
        return state

    def step(self, state: State, evaluate: Evaluate, rng: Streams) -> tuple[State, Info]:
        loss, gradient = evaluate(state.position)
        squares = (
            state.memory["squares"]
            .mul_(self.decay)
            .addcmul_(gradient, gradient, value=1 - self.decay)
        )
        away = torch.sub(state.position, state.centre, out=state.memory["buffer"])
        force, factor = self.force(away, gradient)
        metric = squares.sqrt().add_(self.epsilon).reciprocal_()
        info = Info(loss, torch.linalg.vector_norm(away, dim=-1), None, 1)
        if state.forces:
            square = factor**2 * (force.square() * metric).sum(-1)
            info = self.with_work(info._replace(force_square=square), away, force, factor)
        state.position.addcmul_(force, metric, value=-self.step_size / 2 * factor)
        state.position.addcmul_(
            self.noise(state, rng), metric.sqrt_(), value=math.sqrt(self.step_size)
        )
        state.steps += 1
        return state, info
