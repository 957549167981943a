"""Kernels that accept and reject, on the whole data: MALA, and HMC with several leapfrog steps. They have no bias."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lambdahat._check import require_count
from lambdahat.sampling.kernels import Evaluate, Info, Kernel, Localization, State
from lambdahat.sampling.streams import Streams

GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class HMC(Kernel):
    """Hamiltonian Monte Carlo with mass S⁻² (Duane et al. 1987; Neal 2011): leapfrog steps of length √ε, then accepted
    with probability min(1, exp(−ΔH)).

    With ``leapfrog`` 1 it is MALA, whose proposal is an SGLD step of the same ε. Above 1 the number of steps runs
    quasi-randomly over 1 … 2·leapfrog − 1, the same for all chains, so that no direction's period is met each time
    (as in ChEES-HMC, Hoffman, Radul and Sountsov 2021).
    """

    leapfrog: int = 10

    exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count(self.leapfrog, "leapfrog")

    def trajectory(self, step: int) -> int:
        """The number of leapfrog steps of the ``step``-th step."""
        return 1 + int((2 * self.leapfrog - 1) * ((step + 1) * GOLDEN % 1.0))

    def step(self, state: State, evaluate: Evaluate, rng: Streams) -> tuple[State, Info]:
        evaluations = self._prepared(state, evaluate)
        start, loss, force = state.position, state.memory["loss"], state.memory["force"]
        momentum = rng.normal_(torch.empty_like(start))
        energy = self._energy(state, loss, momentum)
        count, length = self.trajectory(state.steps), math.sqrt(self.step_size)
        moved = State(start.clone(), state.centre)
        now, there = loss, force
        for _ in range(count):
            momentum = momentum.sub(self.scaled(there), alpha=length / 2)
            moved.position.add_(self.scaled(momentum), alpha=length)
            now, gradient = evaluate(moved.position)
            there = self._force_at(moved, gradient)
            momentum = momentum.sub(self.scaled(there), alpha=length / 2)
        rise = self._energy(moved, now, momentum) - energy
        acceptance = torch.exp(-rise.clamp(min=0.0)).nan_to_num(nan=0.0)
        accepted = rng.uniform(max(loss.numel(), 1), energy.dtype).view_as(energy) < acceptance
        chosen = accepted.unsqueeze(-1)
        state.position = torch.where(chosen, moved.position, start)
        state.memory["force"] = torch.where(chosen, there, force)
        state.memory["loss"] = torch.where(accepted, now, loss)
        state.steps += 1
        square = self.scaled(state.memory["force"]).square().sum(-1)
        distance = torch.linalg.vector_norm(state.position - state.centre, dim=-1)
        return state, Info(state.memory["loss"], distance, square, acceptance, count + evaluations)

    def _force_at(self, state: State, gradient: Tensor) -> Tensor:
        force, factor = self.force(state.position - state.centre, gradient)
        return force.mul_(factor)

    def _prepared(self, state: State, evaluate: Evaluate) -> int:
        """The loss and force where the chains are; 1 if they had to be evaluated."""
        if "loss" in state.memory:
            return 0
        loss, gradient = evaluate(state.position)
        state.memory["loss"], state.memory["force"] = loss.clone(), self._force_at(state, gradient).clone()
        return 1

    def _energy(self, state: State, loss: Tensor, momentum: Tensor) -> Tensor:
        """H = U(w) + ½‖p‖² in float64, p the momentum in the coordinates S⁻¹w."""
        away = (state.position - state.centre).double()
        gamma = self.localization if isinstance(self.localization, Tensor) else float(self.localization)  # type: ignore[arg-type]
        tie = 0.5 * (gamma * away.square()).sum(-1)
        return self.nbeta * loss.double() + tie + 0.5 * momentum.double().square().sum(-1)


def mala(step_size: float, nbeta: float, localization: Localization = 0.0, scale: Tensor | None = None) -> HMC:
    """The Metropolis-adjusted Langevin algorithm (Roberts and Tweedie 1996): SGLD's step on all data, then a test."""
    return HMC(step_size, nbeta, localization, scale, leapfrog=1)
