"""Many members of one small network trained at once, their parameters stacked."""

from __future__ import annotations

import copy
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lambdahat._core.check import describe, require, require_choice, require_count
from lambdahat._core.progress import report
from lambdahat.optim.ngd import require_settings
from lambdahat.problem import Problem
from lambdahat.problem.batches import concatenate
from lambdahat.results import Array, Result, Status
from lambdahat.training.feeding import epoch_order
from lambdahat.training.stacked_steps import StackedDescent, StackedModel, Stepped

DEFAULTS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.0, "weight_decay": 0.0},
    "ngd": {
        "momentum": 0.0,
        "weight_decay": 0.0,
        "decoupled": False,
        "alpha": 4.0,
        "rank": None,
        "period": 4,
        "eta": 0.1,
        "delta": 5e-4,
        "epsilon": 1e-10,
        "rescale": True,
    },
}
BY_MEMBER = ("lr", "momentum", "weight_decay", "alpha")


@dataclass(frozen=True)
class Ensemble(Result):
    """Members trained by ``fit_many``: curves (S, epochs), NaN where there is none, and stacked
    tensors (S, …) by name.

    ``loss`` and ``accuracy`` are means over the batches of an epoch, as they were met; ``settings``
    holds numbers, or a tuple of one for each member.
    """

    seeds: tuple[int, ...]
    settings: Mapping[str, Any]
    loss: Array
    accuracy: Array
    validation_loss: Array
    validation_accuracy: Array
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    status: Status = Status.CONVERGED

    def __len__(self) -> int:
        return len(self.seeds)

    def state_dict(self, member: int) -> dict[str, Tensor]:
        """The state dict of one member, for ``model.load_state_dict``."""
        require_count(member, "member", least=0, most=len(self) - 1)
        return {name: tensor[member].clone() for name, tensor in self.tensors.items()}


def fit_many(
    make_model: Callable[[int], nn.Module],
    data: Any,
    *,
    seeds: Sequence[int],
    lr: float | Sequence[float],
    epochs: int,
    loss: Any = "cross_entropy",
    optimizer: str = "sgd",
    batch_size: int = 128,
    order: str = "own",
    validation: Any = None,
    device: torch.device | str | None = None,
    **settings: Any,
) -> Ensemble:
    """Train ``make_model(seed)`` for every seed at once, by "sgd" or "ngd", each as it would be
    trained alone.

    ``settings`` are the optimiser's own: momentum and weight_decay; for "ngd" also what
    ``optim.NGD`` takes. ``lr``, ``momentum``, ``weight_decay`` and ``alpha`` may be sequences of
    one value for each member; a single seed is then used for all. ``data`` and ``loss`` are as for
    ``Problem``. Each epoch sees the samples in the order that ``fit`` with the member's seed would
    give them; order="shared" gives all members that of the first. ``validation`` data are evaluated
    after every epoch. On a GPU whole steps are replayed from CUDA graphs.

    Stacking is for small networks, where one alone leaves the machine idle. Layers that draw random
    numbers or keep running statistics in training are refused.
    """
    require_choice(optimizer, "optimizer", tuple(DEFAULTS))
    require_choice(order, "order", ("own", "shared"))
    require_count(epochs, "epochs")
    require_count(batch_size, "batch_size")
    seeds, values = _members(seeds, _settings(optimizer, {"lr": lr, **settings}))
    models = [_made(make_model, seed, device) for seed in seeds]
    problem = Problem(models[0], loss, data, device=device)
    require(
        problem.norm == "eval" and problem.loss_function is not None,
        "loss",
        "be one of the model's output",
        loss,
    )
    stacked = StackedModel(models, problem)
    descent = StackedDescent(stacked.parameters, optimizer, values)
    stepped = Stepped(stacked, descent, concatenate([batch.data for batch in problem.batches]))
    held_out = (
        None if validation is None else [batch.data for batch in problem.on(validation).batches]
    )
    curves = np.full((4, len(seeds), epochs), math.nan)
    for epoch in range(epochs):
        orders = torch.stack(
            [epoch_order(seed, epoch, problem.num_samples) for seed in seeds[: _orders(order)]]
        )
        curves[:2, :, epoch] = stepped.epoch(orders.to(problem.device), batch_size)
        if held_out is not None:
            curves[2:, :, epoch] = stacked.evaluate(held_out)
        report("members", epoch + 1, epochs)
    status = Status.CONVERGED if np.isfinite(curves[0]).all() else Status.TRAINING_DIVERGED
    loss_, accuracy, held_out_loss, held_out_accuracy = curves
    return Ensemble(
        seeds, values, loss_, accuracy, held_out_loss, held_out_accuracy, stacked.tensors(), status
    )


def _orders(order: str) -> int | None:
    return 1 if order == "shared" else None


def _settings(optimizer: str, given: dict[str, Any]) -> dict[str, Any]:
    known = {"lr": None, **DEFAULTS[optimizer]}
    for name in given:
        require(
            name in known, f"the settings of {optimizer!r}", f"be among {', '.join(known)}", name
        )
    values = {**known, **given}
    return {name: _tuple(value) if name in BY_MEMBER else value for name, value in values.items()}


def _tuple(value: Any) -> Any:
    """A sequence, array or tensor of numbers as a tuple, all else as it is."""
    if isinstance(value, Tensor | np.ndarray):
        value = value.tolist()
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _members(seeds: Any, values: dict[str, Any]) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Seeds and settings that agree on how many members there are, each member's settings
    checked.
    """
    fine = isinstance(seeds, Sequence) and not isinstance(seeds, str) and len(seeds) > 0
    require(
        fine,
        "seeds",
        "be a sequence of at least one seed",
        describe(seeds),
        "such as range(10)",
        TypeError,
    )
    found = tuple(require_count(seed, "seeds", least=0) for seed in seeds)
    lengths = {name: len(value) for name, value in values.items() if isinstance(value, tuple)}
    members = max([len(found), *lengths.values()])
    found = found * members if len(found) == 1 else found
    require(
        len(found) == members,
        "seeds",
        f"be one or {members}, as many as there are values",
        str(len(found)),
    )
    for name, length in lengths.items():
        require(
            length == members,
            name,
            f"have one value or {members}, one for each member",
            str(length),
        )
    for member in range(members):
        own = {
            name: value[member] if isinstance(value, tuple) else value
            for name, value in values.items()
        }
        for name in BY_MEMBER:
            real = name not in own or isinstance(own[name], numbers.Real)
            require(
                real,
                name,
                "be a number, or one for each member",
                describe(own.get(name)),
                "",
                TypeError,
            )
        require_settings({**DEFAULTS["ngd"], **own})
    return found, values


def _made(
    make_model: Callable[[int], nn.Module], seed: int, device: torch.device | str | None
) -> nn.Module:
    fine = callable(make_model) and not isinstance(make_model, nn.Module)
    require(
        fine,
        "make_model",
        "be a function of a seed that gives a model",
        describe(make_model),
        "such as lambda seed: mlp([64, 32, 10], seed=seed)",
        TypeError,
    )
    model = make_model(seed)
    require(
        isinstance(model, nn.Module),
        "make_model",
        "return a torch.nn.Module",
        model,
        error=TypeError,
    )
    return copy.deepcopy(model).to(device)
