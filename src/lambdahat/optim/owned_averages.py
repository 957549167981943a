"""Optimisers that own an average of their iterates: how it is kept, started, stopped and read."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lambdahat._core.check import require, require_count
from lambdahat.optim.averaging import refresh_batch_norm


def averaging_settings(
    average_start: int | None, average_every: int, patience: int | None
) -> dict[str, Any]:
    """What ``OwnsAverage`` keeps in a parameter group: the settings, checked, and the counts."""
    if average_start is not None:
        require_count(
            average_start, "average_start", least=0, cure="None waits for start_averaging()"
        )
    require_count(average_every, "average_every")
    if patience is not None:
        require_count(patience, "patience")
    return {
        "average_start": average_start,
        "average_every": average_every,
        "average_step": 0,
        "averaged": 0,
        "patience": patience,
        "best": None,
        "waited": 0,
        "stopped": False,
    }


class HasAverage(Optimizer):
    """Reads the averages that an optimiser keeps in its state, under the key ``AVERAGE``."""

    AVERAGE = "average"

    @property
    def averaged_parameters(self) -> list[Tensor]:
        """The averages in the parameters' order; a parameter without one stands for itself."""
        params = [p for group in self.param_groups for p in group["params"]]
        return [
            self.state[p].get(self.AVERAGE, p.detach()) if p in self.state else p.detach()
            for p in params
        ]

    @contextmanager
    def average(self) -> Iterator[None]:
        """The averaged weights stand in the parameters inside the block; afterwards the iterates
        are back, bit for bit.

        Running statistics of batch norm are not touched: see ``averaged_model``.
        """
        params = [p for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            own = [p.clone() for p in params]
            torch._foreach_copy_(params, self.averaged_parameters)
        versions = [p._version for p in params]
        try:
            yield
            unchanged = versions == [p._version for p in params]
            require(
                unchanged,
                "the parameters",
                "stay as they are inside `with optimizer.average()`",
                "a change in place",
                "step or load weights outside of it",
                RuntimeError,
            )
        finally:
            with torch.no_grad():
                torch._foreach_copy_(params, own)

    def averaged_model(
        self, model: nn.Module, batches: Iterable[Any] | None = None, limit: int | None = None
    ) -> nn.Module:
        """A copy of ``model`` with the averaged weights; ``batches``, at most ``limit``, renew
        its batch norm.
        """
        known = [p for group in self.param_groups for p in group["params"]]
        average = {id(p): mean for p, mean in zip(known, self.averaged_parameters, strict=True)}
        require(
            any(id(p) in average for p in model.parameters()),
            "model",
            "hold this optimiser's parameters",
            model,
        )
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                q.copy_(average.get(id(p), p))
        if batches is not None:
            refresh_batch_norm(twin, batches, limit)
        return twin


SHARED = ("average_step", "average_start", "best", "waited", "stopped")


class OwnsAverage(HasAverage):
    """Keeps θ̄ ← θ̄ + (θ − θ̄)/(n + 1) over the iterates after step ``average_start`` and every
    ``average_every``-th on.

    Averages and counts are part of ``state_dict``. With a ``patience`` the caller hands each
    epoch's validation loss to ``record``: so many epochs without a new best start the averaging,
    and as many after that set ``stopped`` (§7.8.7, spectral thesis).
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """A group that comes later takes part in the count so far: its average begins at the
        next iterate due.
        """
        if self.param_groups and isinstance(param_group, dict):
            for name in SHARED:
                param_group.setdefault(name, self.param_groups[0][name])
        super().add_param_group(param_group)

    @property
    def averaging(self) -> bool:
        """Whether an average has begun."""
        return any(group["averaged"] > 0 for group in self.param_groups)

    @property
    def stopped(self) -> bool:
        """Whether ``record`` has seen ``patience`` epochs without a new best since averaging
        began.
        """
        return bool(self.param_groups[0]["stopped"])

    def start_averaging(self) -> None:
        """Begin now, with the present iterate as the first."""
        for group in self.param_groups:
            if group["averaged"] == 0:
                group["average_start"] = group["average_step"]
                self._add_iterate(group)

    def record(self, value: float) -> None:
        """Take an epoch's validation loss, of ``average()`` once averaging has begun; NaN is no
        new best.
        """
        group = self.param_groups[0]
        patience, best, value = group["patience"], group["best"], float(value)
        require(
            patience is not None,
            "patience",
            "be given to the optimiser for record() to act on",
            None,
        )
        better = not math.isnan(value) and (best is None or value < best)
        waited = 0 if better else group["waited"] + 1
        news = {"best": value if better else best, "waited": waited, "stopped": group["stopped"]}
        if waited >= patience and not self.averaging:
            self.start_averaging()
            # from here on it is the average that is judged
            news = {"best": None, "waited": 0, "stopped": False}
        elif waited >= patience:
            news["stopped"] = True
        for each in self.param_groups:
            each.update(news)

    def _advance_average(self) -> None:
        """Count a step and, where it is due, add the iterate."""
        for group in self.param_groups:
            group["average_step"] += 1
            start, past = group["average_start"], group["average_step"]
            if (
                start is not None
                and past >= max(start, 1)
                and (past - start) % group["average_every"] == 0
            ):
                self._add_iterate(group)

    @torch.no_grad()
    def _add_iterate(self, group: dict[str, Any]) -> None:
        params = group["params"]
        if group["averaged"] == 0:
            for p in params:
                self.state[p][self.AVERAGE] = p.detach().clone()
        elif params:
            means = [self.state[p][self.AVERAGE] for p in params]
            torch._foreach_lerp_(means, params, 1 / (group["averaged"] + 1))
        group["averaged"] += 1
