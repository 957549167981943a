"""The optimisers of the Gadam chapter by name, each with its schedule, as the thesis's own code
sets them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lambdahat._core.check import require_choice
from lambdahat.experiments.kit.cells import Cell, settings_of
from lambdahat.optim.averaged_descent import SWA, Averaged
from lambdahat.optim.gadam import Gadam, GadamX
from lambdahat.optim.lookahead import Lookahead
from lambdahat.optim.padam import Padam, PadamW
from lambdahat.optim.schedules import make_schedule

MOMENTUM = 0.9
AVERAGED_FROM = 161 / 300  # of the epochs
LOOKAHEAD, AUTO = "+LH", "-Auto"
BASES = {
    "SWA": "SGD",
    "ASGD": "SGD",
    "Adam-IA": "Adam",
    "Padam-IA": "Padam",
    "Gadam": "AdamW",
    "GadamX": "PadamW",
}
FULL = "float32"
FINAL = {"linear": 0.01, "averaging": 0.5}  # last rate over first, as in the thesis's code


def averages(name: str) -> bool:
    """Whether the optimiser of a name ends with the average of its iterates."""
    return name.removesuffix(LOOKAHEAD).removesuffix(AUTO) in BASES


def shared_settings(config: Any, *varied: str) -> Cell:
    """The fields that all cells share; ``precision`` only where it is another than float32, as
    stored cells have it.
    """
    base = settings_of(config, *varied)
    return {name: value for name, value in base.items() if (name, value) != ("precision", FULL)}


def recipe(
    optimizer: str,
    rate: float,
    decay: float,
    epochs: int,
    schedule: str = "",
    first: int | None = None,
    every: int = 0,
) -> Cell:
    """The part of a cell that says how to train.

    ``schedule`` is by default the thesis's: a straight line down to a hundredth (Eq. 12, flatness
    paper), or with averages to a half, constant from then on (Eq. 13). Averages begin after epoch
    ``first``, by default the share 161/300, and take an iterate every ``every`` steps, once per
    epoch where that is 0.
    """
    named = schedule or ("averaging" if averages(optimizer) else "linear")
    start = max(1, round(AVERAGED_FROM * epochs)) if first is None else first
    return {
        "optimizer": optimizer,
        "rate": rate,
        "decay": decay,
        "epochs": epochs,
        "schedule": named,
        "first": start,
        "every": every,
    }


def make_optimizer(cell: Cell, parameters: Iterable[Tensor], steps: int) -> Optimizer:
    """The optimiser of a cell; an epoch has so many ``steps``. "+LH" wraps Lookahead around it.

    "-Auto" waits for ``patience`` epochs without a better validation loss before it averages, and
    as long again before it stops (§7.8.7). Of ``eps`` and ``power`` (p of Padam) a cell may have
    its own.
    """
    name: str = cell["optimizer"]
    if name.endswith(LOOKAHEAD):
        base = make_optimizer(
            {**cell, "optimizer": name.removesuffix(LOOKAHEAD)}, parameters, steps
        )
        return Lookahead(base, centralize=cell.get("centralize", False))
    plain = name.removesuffix(AUTO)
    makers = {"SGD": _sgd, "Adam": _adam, "AdamW": _adam, "Padam": _padam, "PadamW": _padam}
    base_name = BASES.get(plain, plain)
    require_choice(base_name, "optimizer", makers)
    when: dict[str, Any] = {"average_every": cell["every"] or steps}
    when |= (
        {"patience": cell["patience"]}
        if name.endswith(AUTO)
        else {"average_start": cell["first"] * steps}
    )
    if plain in ("Gadam", "GadamX"):
        make = Gadam if plain == "Gadam" else GadamX
        return make(
            parameters, cell["rate"], eps=cell.get("eps", 1e-8), weight_decay=cell["decay"], **when
        )
    if plain == "SWA":
        return SWA(parameters, cell["rate"], MOMENTUM, cell["decay"], **when)
    made = makers[base_name](base_name, cell, parameters)
    return Averaged(made, **when) if plain in BASES else made


def _sgd(name: str, cell: Cell, parameters: Iterable[Tensor]) -> Optimizer:
    momentum = cell.get("momentum", MOMENTUM)
    return torch.optim.SGD(parameters, cell["rate"], momentum, weight_decay=cell["decay"])


def _adam(name: str, cell: Cell, parameters: Iterable[Tensor]) -> Optimizer:
    make = torch.optim.AdamW if name == "AdamW" else torch.optim.Adam
    return make(parameters, cell["rate"], eps=cell.get("eps", 1e-8), weight_decay=cell["decay"])


def _padam(name: str, cell: Cell, parameters: Iterable[Tensor]) -> Optimizer:
    make = PadamW if name == "PadamW" else Padam
    return make(parameters, cell["rate"], weight_decay=cell["decay"], p=cell.get("power", 0.125))


def schedule_of(cell: Cell, optimizer: Optimizer) -> LRScheduler:
    """The cell's schedule of the rate, once per epoch; ``ratio`` and ``milestones`` where it has
    its own.
    """
    name = cell["schedule"]
    settings: dict[str, Any] = {}
    if name in FINAL:
        settings["ratio"] = cell.get("ratio", FINAL[name])
    if name == "averaging":
        settings["averaging_start"] = cell["first"]
    if name == "step" and "milestones" in cell:
        settings["milestones"] = tuple(cell["milestones"])
    return make_schedule(name, optimizer, cell["epochs"], **settings)
