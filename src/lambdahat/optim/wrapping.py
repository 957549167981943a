"""What every optimiser that holds another one shares."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch.optim import Optimizer

from lambdahat._core.check import require


class Wrapper(Optimizer):
    """An optimiser around ``base``: one set of parameter groups, one state dict, ``base``'s other
    names shine through.

    Schedulers, gradient scalers and checkpoints see an ordinary optimiser. ``OWN`` names what the
    wrapper itself keeps per parameter; in ``state_dict`` that stands beside ``base``'s.
    """

    OWN: tuple[str, ...] = ()
    base: Optimizer

    def __init__(self, base: Optimizer, settings: dict[str, Any]) -> None:
        made = isinstance(base, Optimizer)
        require(
            made,
            "base",
            "be an optimiser",
            base,
            f"{type(self).__name__}(torch.optim.SGD(…))",
            TypeError,
        )
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
            self.state[p] = {
                name: value.detach().to(p.device, p.dtype, copy=True)
                for name, value in mine.items()
            }

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "base" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.base, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "base": self.base}
