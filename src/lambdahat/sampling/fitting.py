"""Whether chains fit into memory together, recorded or not, and in how many pieces a batch must go
through one by one.

What a run takes, in vectors (P,) of C chains: ``kernel.vectors`` for each chain; what it shares,
among it the centre; the passes over batches, of all chains or of one; the probe of the acceptance;
and a copy of the chains' state where a step is recorded. What the recording itself takes at most is
what the step takes, for its warm-up is given back before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lambdahat._core.check import require
from lambdahat.problem import Problem
from lambdahat.problem.batches import free_memory, take
from lambdahat.problem.checkpointing import recomputing
from lambdahat.problem.memory import PASS, LiveBytes, rows_within
from lambdahat.sampling.diagnostics import is_probed, probed_alone
from lambdahat.sampling.hamiltonian import HMC
from lambdahat.sampling.kernels import Kernel
from lambdahat.sampling.runners import Plan

SHARE = 0.5  # of the free memory, where the problem has no budget
# of a budget, for chains together: what a mapped pass takes is not measured but made of those of
# chains
SLACK = 0.8
# vectors that chains share: θ, the centre of the run, of its state, of the probe and of the probe's
# state
COMMON = 5


@dataclass(frozen=True)
class Demand:
    """What a run of ``chains`` chains of a kernel, with batches of ``samples``, takes by its
    plan.
    """

    problem: Problem
    kernel: Kernel
    chains: int
    samples: int
    plan: Plan

    def together_fits(self, recorded: bool = False) -> bool:
        """Whether all chains in one call, and as a CUDA graph where ``recorded``, fit into
        memory.
        """
        memory = self.problem.memory
        room = SHARE * free_memory(self.problem.device) if memory is None else SLACK * memory
        return self.together(recorded) <= room

    def together(self, recorded: bool = False) -> float:
        """The bytes that all chains in one call take."""
        copied = self._each - 1 if recorded else 0  # all but the gradient
        passes = self.chains * _gradient_bytes(self.problem, self.samples)
        return passes + self._row * (self._held + self.chains * copied)

    def one_by_one(self) -> float:
        """The bytes that chains take whose passes come one by one."""
        # pieces are no larger, and the probe sees whole batches
        largest = self.problem.batches.first().size
        return _measured(self.problem, largest, self.problem.recomputes) + self._row * self._held

    def require_one_by_one(self) -> None:
        """Raise where the problem's budget does not hold the chains, not even one by one."""
        memory = self.problem.memory
        if memory is not None:
            needed = self.one_by_one()
            require(
                needed <= memory,
                "memory",
                f"be at least {needed:,.0f} bytes for {self.chains} chains of"
                f" {type(self.kernel).__name__}",
                f"{memory:,}",
                "raise it, or run fewer chains",
            )

    @property
    def _row(self) -> int:
        return self.problem.num_parameters * max(self.problem.dtype.itemsize, 4)

    @property
    def _held(self) -> int:
        """Vectors of all chains beside their passes."""
        probed = 1 if probed_alone(self.problem) else self.chains
        return COMMON + self.chains * self._each + probed * self._probe

    @property
    def _each(self) -> int:
        """Vectors of a chain."""
        kernel, plan = self.kernel, self.plan
        summed = len(self.problem.batches) > 1 if kernel.exact else plan.accumulate > 1
        return kernel.vectors(plan.forces) + summed + (plan.bound is not None)

    @property
    def _probe(self) -> int:
        """Vectors of a chain that is probed: it is taken from the others, and its gradients of
        batches are summed.
        """
        if not is_probed(self.kernel):
            return 0
        return (
            1
            + HMC.held
            + self.kernel.vectors(forces=True)
            - self.kernel.held
            + (len(self.problem.batches) > 1)
        )


def pieces_within(problem: Problem, samples: int) -> int:
    """Into how many pieces a batch must be cut so that a chain's pass over one stays within the
    budget; 1 without.
    """
    if problem.memory is None:
        return 1
    # as chains one by one do
    again, most = problem.recomputes, min(samples, problem.batches.first().size)
    one, room = _measured(problem, 1, again), PASS * problem.memory
    rows = (
        rows_within(lambda count: _measured(problem, count, again), most, room, one)
        if one < room
        else 1
    )
    return -(-samples // rows)


def _gradient_bytes(problem: Problem, samples: int) -> float:
    """What a gradient on so many samples takes at most: measured on one and two, and on a line
    through both.
    """
    counts = (1, 2)[: min(samples, problem.batches.first().size)]
    peaks = [_measured(problem, count, again=False) for count in counts]
    return peaks[0] + (samples - 1) * max(peaks[-1] - peaks[0], 0.0)


@torch.enable_grad()
def _measured(problem: Problem, samples: int, again: bool) -> float:
    """What a gradient on the first samples takes at most; ``again`` runs the parts again that
    the model checkpoints.
    """
    leaves = {
        name: tensor.detach().requires_grad_()
        for name, tensor in problem.named(problem.vector).items()
    }
    few = take(problem.batches.first(), torch.arange(samples, device=problem.device))
    with LiveBytes() as seen, recomputing(again):
        torch.autograd.grad(
            problem.batch_loss(leaves, few), list(leaves.values()), allow_unused=True
        )
    return float(seen.peak)
