"""Averages of iterates: IterateAverage, SWA, ASGD, Lookahead, any optimiser with an average."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from lambdahat._core.check import describe, require, require_choice, require_count, require_number
from lambdahat.optim.registry import register_optimizer

KINDS = ("average", "ema")
UNITS = ("epoch", "step")


class IterateAverage:
    """The mean (``kind="average"``) or exponential moving average (``"ema"``) of a model's
    iterates.

    Call ``update()`` once per ``unit`` (an epoch or a step); calls number ``start``, ``start +
    every``, … are averaged. The mean is θ̄ ← θ̄ + (θ − θ̄)/(n + 1), the other θ̄ ← ρθ̄ + (1 − ρ)θ
    with ρ = ``decay``; both begin at the first iterate averaged (``torch.optim.swa_utils``). The
    spectral thesis averages once per epoch from epoch 161 on.
    """

    def __init__(
        self,
        model: nn.Module,
        kind: str = "average",
        *,
        unit: str = "epoch",
        start: int = 1,
        every: int = 1,
        decay: float = 0.999,
    ) -> None:
        self.kind = require_choice(kind, "kind", KINDS)
        self.unit = require_choice(unit, "unit", UNITS)
        self.start, self.every = require_count(start, "start"), require_count(every, "every")
        require_number(decay, "decay", "[0, 1)")
        self.calls, self._live = 0, model
        rule = get_ema_multi_avg_fn(decay) if kind == "ema" else None
        self._averaged = AveragedModel(model, multi_avg_fn=rule)
        self._averaged.requires_grad_(False)

    @property
    def count(self) -> int:
        """The number of averaged iterates."""
        return max(0, (self.calls - self.start) // self.every + 1)

    @property
    def model(self) -> nn.Module:
        """The averaged model, a copy; before the first average the model itself."""
        return self._averaged.module if self.count else self._live

    def update(self) -> None:
        """Count a unit, and average the model's weights if they are due."""
        self.calls += 1
        if self.calls >= self.start and (self.calls - self.start) % self.every == 0:
            self._averaged.update_parameters(self._live)

    def refresh_batch_norm(self, batches: Iterable[Any], limit: int | None = None) -> None:
        """Recompute batch-norm statistics for the averaged weights (§7.3.1)."""
        refresh_batch_norm(self.model, batches, limit)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls, "averaged": self._averaged.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._averaged.load_state_dict(state["averaged"])
        self.calls = int(state["calls"])


def refresh_batch_norm(model: nn.Module, batches: Iterable[Any], limit: int | None = None) -> None:
    """Recompute the batch-norm statistics of ``model`` from the first ``limit`` batches, by default
    all; a batch is x or (x, …).

    If passing all the data would double the cost of an epoch, a sample suffices (§7.3.1, spectral
    thesis).
    """
    if limit is not None:
        require_count(limit, "limit")
    update_bn(islice(batches, limit), model)


def averaging_settings(
    average_start: int | None, average_every: int, patience: int | None
) -> dict[str, Any]:
    """The entries of ``OwnsAverage`` in a parameter group: checked settings, and counts."""
    if average_start is not None:
        cure = "None waits for start_averaging()"
        require_count(average_start, "average_start", least=0, cure=cure)
    require_count(average_every, "average_every")
    if patience is not None:
        require_count(patience, "patience")
    counts = {"average_step": 0, "averaged": 0, "best": None, "waited": 0, "stopped": False}
    settings = {"average_start": average_start, "average_every": average_every}
    return {**settings, "patience": patience, **counts}


class HasAverage(Optimizer):
    """Reads the averages that an optimiser keeps in its state, under the key ``AVERAGE``."""

    AVERAGE = "average"

    @property
    def averaged_parameters(self) -> list[Tensor]:
        """The averages in the parameters' order; a parameter without one stands for itself."""
        params = [p for group in self.param_groups for p in group["params"]]
        return [self.state.get(p, {}).get(self.AVERAGE, p.detach()) for p in params]

    @contextmanager
    def average(self) -> Iterator[None]:
        """The averaged weights replace the parameters inside the block.

        Running statistics of batch norm are not touched: see ``averaged_model``.
        """
        params = [p for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            own = [p.clone() for p in params]
            torch._foreach_copy_(params, self.averaged_parameters)
        versions = [p._version for p in params]
        try:
            yield
            if versions != [p._version for p in params]:
                raise RuntimeError(
                    "the parameters must stay as they are inside `with optimizer.average()`, got a"
                    " change in place; step or load weights outside of it"
                )
        finally:
            with torch.no_grad():
                torch._foreach_copy_(params, own)

    def averaged_model(
        self, model: nn.Module, batches: Iterable[Any] | None = None, limit: int | None = None
    ) -> nn.Module:
        """A copy of ``model`` with averaged weights, its batch norm renewed on ``batches``."""
        known = [p for group in self.param_groups for p in group["params"]]
        average = {id(p): mean for p, mean in zip(known, self.averaged_parameters, strict=True)}
        if not any(id(p) in average for p in model.parameters()):
            raise ValueError(f"model must hold this optimiser's parameters, got {describe(model)}")
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
        """A later group joins the present count: its average begins at the next iterate."""
        if self.param_groups and isinstance(param_group, dict):
            first = self.param_groups[0]  # without the settings while the optimiser is being made
            for name in first.keys() & set(SHARED):
                param_group.setdefault(name, first[name])
        super().add_param_group(param_group)

    @property
    def averaging(self) -> bool:
        """Whether an average has begun."""
        return any(group["averaged"] > 0 for group in self.param_groups)

    @property
    def stopped(self) -> bool:
        """Whether ``patience`` epochs have passed without a new best since averaging began."""
        return bool(self.param_groups[0]["stopped"])

    def start_averaging(self) -> None:
        """Begin now, with the present iterate as the first."""
        for group in self.param_groups:
            if group["averaged"] == 0:
                group["average_start"] = group["average_step"]
                self._add_iterate(group)

    def record(self, value: float) -> None:
        """Record an epoch's validation loss, of ``average()`` once there is one; NaN is no best."""
        group = self.param_groups[0]
        patience, best, value = group["patience"], group["best"], float(value)
        expected = "be given to the optimiser for record() to act on"
        require(patience is not None, "patience", expected, "None")
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
            begun = start is not None and past >= max(start, 1)
            if begun and (past - start) % group["average_every"] == 0:
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


class Wrapper(Optimizer):
    """An optimiser around ``base``: one set of parameter groups, one state dict, ``base``'s other
    names shine through.

    Schedulers, gradient scalers and checkpoints see an ordinary optimiser. ``OWN`` names what the
    wrapper itself keeps per parameter; in ``state_dict`` that stands beside ``base``'s.
    """

    OWN: tuple[str, ...] = ()
    base: Optimizer

    def __init__(self, base: Optimizer, settings: dict[str, Any]) -> None:
        expected = "be an optimiser"
        cure = f"{type(self).__name__}(torch.optim.SGD(…))"
        require(isinstance(base, Optimizer), "base", expected, describe(base), cure, TypeError)
        own = sorted(settings.keys() & base.defaults.keys())
        expected, came = f"have no {', '.join(own[:1])} of its own", f"a {type(base).__name__}"
        require(not own, "base", expected, came, "set it there alone")
        self.base = base
        super().__init__(base.param_groups, {**base.defaults, **settings})
        self.param_groups = base.param_groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if any(param_group is group for group in self.base.param_groups):  # at construction
            super().add_param_group(param_group)
            return
        self.base.add_param_group(param_group)
        for name, value in self.defaults.items():
            param_group.setdefault(name, value)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and what else ``base`` clears with them."""
        self.base.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        saved = self.base.state_dict()
        state = dict(saved["state"])
        for index, p in enumerate(p for group in self.param_groups for p in group["params"]):
            if self.state.get(p):
                state[index] = {**state.get(index, {}), **self.state[p]}
        return {**saved, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        own: dict[int, dict[str, Any]] = {}
        rest: dict[Any, Any] = {}
        for index, entry in state_dict["state"].items():
            mine = {name: entry[name] for name in self.OWN if name in entry}
            theirs = {name: value for name, value in entry.items() if name not in mine}
            if mine:
                own[index] = mine
            if theirs or not mine:
                rest[index] = theirs
        self.base.load_state_dict({**state_dict, "state": rest})
        self.param_groups = self.base.param_groups
        self.state = defaultdict(dict)
        params = [p for group in self.param_groups for p in group["params"]]
        for index, mine in own.items():
            p = params[index]
            for name, value in mine.items():
                self.state[p][name] = value.detach().to(p.device, p.dtype, copy=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "base" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.base, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "base": self.base}


class Lookahead(Wrapper):
    """k steps of ``base``, then θ ← φ + α(θ − φ), φ the weights before them (Zhang et al., 2019).

    α = 1 is ``base``. Around an optimiser that averages its iterates it does nothing once averaging
    has begun, so that ``Lookahead(Gadam(…))`` is the spectral thesis's Gadam + LH (§7.8.5).
    ``centralize`` first takes the mean over all axes but the first from every gradient of more than
    one axis (Yong et al., 2020; §7.10.1).
    """

    OWN = ("slow",)

    def __init__(
        self, base: Optimizer, k: int = 5, alpha: float = 0.5, *, centralize: bool = False
    ) -> None:
        require_count(k, "k")
        require_number(alpha, "alpha", "(0, 1]")
        own = {"lookahead_k": k, "lookahead_alpha": alpha, "lookahead_step": 0}
        super().__init__(base, {**own, "centralize": centralize})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is None:
            self._centralize()
        for group in self.param_groups:
            if group["lookahead_step"] % group["lookahead_k"] == 0 and not self._base_averages:
                for p in group["params"]:
                    self.state[p]["slow"] = p.detach().clone()
        loss = self.base.step(None if closure is None else self._centralizing_closure(closure))
        for group in self.param_groups:
            group["lookahead_step"] += 1
            due = group["lookahead_step"] % group["lookahead_k"] == 0
            if due and group["params"] and not self._base_averages:
                slow = [self.state[p]["slow"] for p in group["params"]]
                torch._foreach_lerp_(group["params"], slow, 1 - group["lookahead_alpha"])
        return loss

    @property
    def _base_averages(self) -> bool:
        return bool(getattr(self.base, "averaging", False))

    def _centralizing_closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            loss = closure()
            self._centralize()
            return loss

        return evaluate

    @torch.no_grad()
    def _centralize(self) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["centralize"] else ():
                if p.grad is not None and p.grad.dim() > 1:
                    p.grad.sub_(p.grad.mean(dim=tuple(range(1, p.grad.dim())), keepdim=True))


class Averaged(OwnsAverage, Wrapper):
    """``base`` with its iterates averaged from step ``average_start`` on, as ``Gadam`` does."""

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


@register_optimizer("swa")
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
        own = {"average_start": average_start, "average_every": average_every}
        base = torch.optim.SGD(params, lr, momentum, weight_decay=weight_decay, nesterov=nesterov)
        super().__init__(base, **own, patience=patience)  # type: ignore[arg-type]


@register_optimizer("asgd")
class ASGD(HasAverage, torch.optim.ASGD):
    """``torch.optim.ASGD`` (Polyak and Juditsky, 1992), with its average exposed as in ``Gadam``.

    Its rate is α/(1 + λαt)^a with λ ``lambd`` and a ``alpha``; the average holds the iterates from
    step ``t0`` + 2 on.
    """

    AVERAGE = "ax"

    @property
    def averaging(self) -> bool:
        """Whether an average has begun: its weight of the next iterate is below 1."""
        params = (p for group in self.param_groups for p in group["params"])
        return any(float(self.state[p]["mu"]) < 1 for p in params if self.state.get(p))
