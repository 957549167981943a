"""Kernels that accept and reject, on the whole data: MALA, and HMC with several leapfrog steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lambdahat._core.check import require_count, require_number
from lambdahat.sampling.kernels.kernel import (
    Evaluate,
    Info,
    Kernel,
    Localization,
    State,
    Streams,
    register,
)

RUN = 1 << 18  # entries of a row that are widened together
FEWEST = 3  # leapfrog steps of the shortest trajectory
GOLDEN, ROOT = (math.sqrt(5) - 1) / 2, math.sqrt(2)


@register("hmc")
@dataclass(frozen=True)
class HMC(Kernel):
    """Hamiltonian Monte Carlo with mass S⁻² (Duane et al. 1987; Neal 2011): leapfrog steps of
    length √ε, then accepted with probability min(1, exp(−ΔH)).

    With ``leapfrog`` 1 and ``jitter`` 1 it is MALA, whose proposal is an SGLD step of the same ε.
    Else trajectories differ: the number of steps is log-uniform on 3 … ``leapfrog`` and their
    length on [``jitter``·√ε, √ε], both from quasi-random sequences that all chains share. Short
    ones refresh the energy, long ones move along flat directions, small steps enter narrow places,
    and no direction's period is met each time (with 1 it can be: that direction then never mixes).

    If forces are requested, the loss, the virial and the spread are also averaged over each
    trajectory, every point i with the weight a_i = min(1, exp(H_0 − H_i)) it would be accepted
    with, and 1 − a_i on the start: each i-step kernel leaves the posterior as it is, so that the
    mean is correct and its variance lower (Nishimura and Dunson 2020).
    """

    leapfrog: int = 10
    jitter: float = 0.1

    exact: ClassVar[bool] = True
    held: ClassVar[int] = 11

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count(self.leapfrog, "leapfrog")
        require_number(self.jitter, "jitter", "(0, 1]")

    def trajectory(self, step: int) -> tuple[int, float]:
        """The number of leapfrog steps of the ``step``-th trajectory and the length of each."""
        fewest = min(FEWEST, self.leapfrog)
        count = int(fewest * ((self.leapfrog + 1) / fewest) ** ((step + 1) * GOLDEN % 1.0))
        return count, math.sqrt(self.step_size) * self.jitter ** ((step + 1) * ROOT % 1.0)

    def step(self, state: State, evaluate: Evaluate, rng: Streams) -> tuple[State, Info]:
        evaluations = self._prepare(state, evaluate)
        loss, force = state.memory["loss"], state.memory["force"]
        start = _Point(state.position, state.position - state.centre, loss, force)
        momentum = rng.normal_(torch.empty_like(start.position))
        energy = self._energy(start, momentum)
        count, length = self.trajectory(state.steps)
        now, first = start, start.readings() if state.forces else None
        sums: Any = 0.0  # of the readings less their first values, and of the acceptances
        acceptances: Any = 0.0
        for _ in range(count):
            momentum = momentum.sub(self.scaled_force(now.force), alpha=length / 2)
            position = now.position.add(self.scaled(momentum), alpha=length)
            now = self._evaluate(position, state.centre, evaluate)
            momentum.sub_(self.scaled_force(now.force), alpha=length / 2)
            # min(1, exp(−ΔH)), 0 where it is not a number
            fall = (energy - self._energy(now, momentum)).clamp(max=0.0)
            acceptance = torch.exp(fall).nan_to_num(nan=0.0)
            if first is not None:
                change = (now.readings() - first) * acceptance
                sums = sums + torch.where(acceptance > 0, change, 0.0)
                acceptances = acceptances + acceptance
        accepted = rng.uniform(max(energy.numel(), 1), energy.dtype).view_as(energy) < acceptance
        state.position = torch.where(accepted.unsqueeze(-1), now.position, start.position)
        state.memory["force"] = torch.where(accepted.unsqueeze(-1), now.force, start.force)
        state.memory["loss"] = torch.where(accepted, now.loss, start.loss)
        state.steps += 1
        distance = torch.linalg.vector_norm(state.position - state.centre, dim=-1)
        info = Info(state.memory["loss"], distance, acceptance, count + evaluations)
        if first is not None:
            square = self.scaled_force(state.memory["force"]).square().sum(-1)
            loss, virial, spread = first + sums / count
            info = info._replace(force_square=square, virial=virial, recycled=loss, spread=spread)
            info = info._replace(acceptance=acceptances / count)
        return state, info

    def _prepare(self, state: State, evaluate: Evaluate) -> int:
        """The loss and force where the chains are; 1 if they had to be evaluated.

        Not part of ``step``, which would hold the point evaluated here to its end.
        """
        if "loss" in state.memory:
            return 0
        point = self._evaluate(state.position, state.centre, evaluate)
        state.memory["loss"], state.memory["force"] = point.loss.clone(), point.force.clone()
        return 1

    def _evaluate(self, position: Tensor, centre: Tensor, evaluate: Evaluate) -> _Point:
        loss, gradient = evaluate(position)
        away = position - centre
        force, factor = self.force(away, gradient)
        return _Point(position, away, loss, force.mul_(factor))

    def _energy(self, point: _Point, momentum: Tensor) -> Tensor:
        """H = U(w) + ½‖p‖² in float64, p the momentum in the coordinates S⁻¹w."""
        gamma: Any = self.localization
        kinetic = 0.5 * (_squares(point.away, gamma) + _squares(momentum))
        return self.nbeta * point.loss.double() + kinetic


class _Point(NamedTuple):
    """A place on a trajectory, w − w*, and the loss and ∇U there."""

    position: Tensor
    away: Tensor
    loss: Tensor
    force: Tensor

    def readings(self) -> Tensor:
        """The loss, the virial and the spread, in float64."""
        virial = torch.linalg.vecdot(self.away, self.force).double()
        spread = _squares(self.away) * (virial - self.away.shape[-1] - 2)
        return torch.stack([self.loss.double(), virial, spread])


def _squares(vectors: Tensor, weights: Tensor | float = 1.0) -> Tensor:
    """Σ w_i·v_i² of each row in float64, run by run: whole copies would be most of a step."""
    parts = []
    for start in range(0, vectors.shape[-1], RUN):
        run = vectors[..., start : start + RUN].double()
        weighted = weights[start : start + RUN] * run if isinstance(weights, Tensor) else run
        parts.append(torch.linalg.vecdot(weighted, run))
    total = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
    return total if isinstance(weights, Tensor) else weights * total


@register("mala")
def mala(
    step_size: float, nbeta: float, localization: Localization = 0.0, scale: Tensor | None = None
) -> HMC:
    """The Metropolis-adjusted Langevin algorithm (Roberts and Tweedie 1996), on the whole data."""
    return HMC(step_size, nbeta, localization, scale, leapfrog=1, jitter=1.0)
