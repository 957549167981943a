"""Chains over many processes: each rank runs its share of them, and every rank gets what all of
them showed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lambdahat.problem import Problem
from lambdahat.sampling.kernels import Kernel
from lambdahat.sampling.mass import KroneckerScale
from lambdahat.sampling.runners import Ground, Plan, Record, Runner
from lambdahat.sampling.workers import ForkedRunner


class SpreadRunner:
    """Chains of which this rank's ``runner`` advances those numbered ``own``; what they show is
    gathered.

    A rank without a chain of its own runs the first once more, which nobody sees.
    """

    def __init__(
        self, problem: Problem, runner: Runner | ForkedRunner, own: Sequence[int], chains: int
    ) -> None:
        self._problem, self._runner, self._own, self.chains = (
            problem,
            runner,
            list(own),
            tuple(range(chains)),
        )

    @property
    def ground(self) -> Ground:
        """What the chains of this rank stand on: all data."""
        return self._runner.ground

    @property
    def kernel(self) -> Kernel:
        """The kernel of all chains."""
        return self._runner.kernel

    @property
    def own(self) -> tuple[Tensor, tuple[int, ...]]:
        """Where the chains of this rank are, and their numbers."""
        return self._runner.positions[: len(self._own)], tuple(self._own)

    @property
    def bounded(self) -> Tensor:
        """How often each chain was pulled back."""
        return self.gathered(self._runner.bounded)

    @property
    def steps(self) -> int:
        """Steps of each chain since all were last put at the centre."""
        return self._runner.steps

    @property
    def gradients_spent(self) -> int:
        """Gradients of each chain so far."""
        return self._runner.gradients_spent

    @property
    def batch_size(self) -> int:
        """Samples in the batch of a step."""
        return self._runner.batch_size

    def advance(self, draws: int, look: bool = True) -> Record:
        """As ``Runner.advance``, on all ranks at once: one all-reduce of what all draws showed."""
        return self._gathered_record(self._runner.advance(draws, look))

    def noise(self, batches: int) -> Record:
        """As ``Runner.noise``, on all ranks at once."""
        return self._gathered_record(self._runner.noise(batches))

    def forces(self) -> Record:
        """As ``Runner.forces``, on all ranks at once."""
        return self._gathered_record(self._runner.forces())

    def _gathered_record(self, record: Record) -> Record:
        """What all chains showed, from what those of this rank did."""
        flat = torch.cat(
            [values.reshape(len(values), -1).double() for values in record.values()], dim=1
        )
        whole = self.gathered(flat.to(self._problem.device)).cpu()
        parts = whole.split([values[0].numel() for values in record.values()], dim=1)
        named = zip(record.items(), parts, strict=True)
        return {
            name: part.reshape(-1, *values.shape[1:]).to(values.dtype)
            for (name, values), part in named
        }

    def skip(self, steps: int) -> None:
        """Steps that nothing is recorded of."""
        self._runner.skip(steps)

    def retune(self, kernel: Kernel) -> None:
        """Go on with other settings from where the chains are."""
        self._runner.retune(kernel)

    def restart(self, chains: Sequence[int] | None = None) -> None:
        """Put the chains of these numbers, or all, back to the centre."""
        self._runner.restart(chains)

    def resize(self, batch_size: int, accumulate: int) -> None:
        """Go on with batches of another size."""
        self._runner.resize(batch_size, accumulate)

    def close(self) -> None:
        """Close the runner of this rank."""
        self._runner.close()

    def gathered(self, rows: Tensor) -> Tensor:
        """The rows of all chains, from those of this rank's."""
        what = f"{type(self.kernel).__name__} chains at step {self.steps}"
        return self._problem.ranks.gather(rows[: len(self._own)], self._own, len(self.chains), what)


def require_same_run(problem: Problem, kernel: Kernel, chains: int, plan: Plan) -> None:
    """Raise where the ranks are not about to sample the same."""
    settings: dict[str, Any] = {
        field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)
    }
    settings["observables"], settings["averages"] = sorted(plan.observables), sorted(plan.averages)
    shown = {field.name: getattr(kernel, field.name) for field in dataclasses.fields(kernel)}
    if isinstance(kernel.scale, KroneckerScale):
        shown |= {f"scale {index}": tensor for index, tensor in enumerate(kernel.scale.tensors)} | {
            "scale": "Kronecker"
        }
    tensors = [value for value in shown.values() if isinstance(value, Tensor)]
    numbers = {name: value for name, value in shown.items() if not isinstance(value, Tensor)}
    facts = {
        "seed": plan.seed,
        "chains": chains,
        "options": f"{settings}",
        "kernel": f"{type(kernel).__name__} {numbers}",
        "the kernel's tensors": tensors,
    }
    problem.ranks.agree("sampling", facts, problem.device)
