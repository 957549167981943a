"""Many averages of one run: steps never read an average, so that one run serves every start and
frequency.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lambdahat._core.check import require, require_count
from lambdahat.optim.averaging import refresh_batch_norm
from lambdahat.problem import Problem


class Plan(NamedTuple):
    """Average the iterates after steps ``start``, ``start + every``, …"""

    start: int
    every: int

    def due(self, step: int) -> bool:
        """Whether the iterate after so many steps is one of them."""
        return step >= max(self.start, 1) and (step - self.start) % self.every == 0


class Averages:
    """A tracker for ``fit`` that keeps θ̄ ← θ̄ + (θ − θ̄)/(n + 1) for each plan, as ``Gadam``
    keeps its own.
    """

    name, unit, every = "averages", "step", 1

    def __init__(self, plans: Sequence[Plan]) -> None:
        for plan in plans:
            require_count(plan.start, "start", least=0)
            require_count(plan.every, "every")
        self.plans = list(dict.fromkeys(plans))
        self.counts = dict.fromkeys(self.plans, 0)
        self._means: dict[Plan, list[Tensor]] = {}

    @torch.no_grad()
    def measure(
        self, problem: Problem, optimizer: Any = None, epoch: int = 0, step: int = 0
    ) -> dict[str, float]:
        """Add the iterate to the averages whose turn it is; nothing goes into the run's rows."""
        params = [p for group in optimizer.param_groups for p in group["params"]]
        for plan in self.plans:
            if not plan.due(step):
                continue
            if self.counts[plan] == 0:
                self._means[plan] = [p.detach().clone() for p in params]
            else:
                torch._foreach_lerp_(self._means[plan], params, 1 / (self.counts[plan] + 1))
            self.counts[plan] += 1
        return {}

    def model(self, plan: Plan, like: nn.Module, batches: Iterable[Any]) -> nn.Module:
        """A copy of the network with the average of a plan, its batch norm renewed from
        ``batches``.
        """
        require(
            self.counts.get(plan, 0) > 0,
            "plan",
            "have averaged an iterate",
            plan,
            "train for longer",
        )
        twin = copy.deepcopy(like)
        with torch.no_grad():
            for parameter, mean in zip(twin.parameters(), self._means[plan], strict=True):
                parameter.copy_(mean)
            refresh_batch_norm(twin, batches)
        return twin
