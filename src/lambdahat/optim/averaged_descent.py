"""Any optimiser with an average of its iterates: SWA, and ASGD with its average within reach."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from lambdahat.optim.owned_averages import HasAverage, OwnsAverage, averaging_settings
from lambdahat.optim.wrapping import Wrapper


class Averaged(OwnsAverage, Wrapper):
    """``base`` with its iterates averaged from step ``average_start`` on, every ``average_every``
    steps.

    The average is read, started and stopped as ``Gadam``'s is; the steps are ``base``'s.
    """

    OWN = ("average",)

    def __init__(
        self,
        base: Optimizer,
        *,
        average_start: int | None = None,
        average_every: int = 1,
        patience: int | None = None,
    ) -> None:
        super().__init__(base, averaging_settings(average_start, average_every, patience))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.base.step(closure)
        self._advance_average()
        return loss


class SWA(Averaged):
    """Stochastic weight averaging: SGD whose iterates are averaged (Izmailov et al., 2018); with
    ``patience`` SWA-Auto.

    Give it the rate of ``schedules.averaging_decay``, which is constant once averaging has begun.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = False,
        average_start: int | None = None,
        average_every: int = 1,
        patience: int | None = None,
    ) -> None:
        base = torch.optim.SGD(params, lr, momentum, weight_decay=weight_decay, nesterov=nesterov)
        super().__init__(
            base, average_start=average_start, average_every=average_every, patience=patience
        )


class ASGD(HasAverage, torch.optim.ASGD):
    """``torch.optim.ASGD`` (Polyak and Juditsky, 1992), whose average can be read as ``Gadam``'s
    is.

    Its rate is α/(1 + λαt)^a with λ ``lambd`` and a ``alpha``; the average holds the iterates from
    step ``t0`` + 2 on.
    """

    AVERAGE = "ax"

    @property
    def averaging(self) -> bool:
        """Whether an average has begun: its weight of the next iterate is below 1."""
        known = [
            self.state[p]
            for group in self.param_groups
            for p in group["params"][:1]
            if p in self.state
        ]
        return any(float(state["mu"]) < 1 for state in known if state)
