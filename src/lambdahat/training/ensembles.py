"""Many members of one small network trained at once, their parameters stacked."""

from __future__ import annotations

import copy
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.utils._pytree import tree_leaves, tree_map

from lambdahat._core.check import describe, require, require_choice, require_count, require_type
from lambdahat._core.device import Replay
from lambdahat._core.progress import report
from lambdahat.optim import ngd
from lambdahat.optim.online_fisher import Smoothing
from lambdahat.problem import Problem
from lambdahat.problem.batches import Batch, concatenate
from lambdahat.results import Array, Result, Status
from lambdahat.training.feeding import epoch_order
from lambdahat.training.stepping import count_hits

RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU)
STATISTICS = (nn.modules.batchnorm._BatchNorm,)


class StackedModel:
    """S models of one structure as one function of stacked tensors (S, …), with the loss of a
    problem.

    With ``one_by_one`` the members are differentiated one after another, not in one mapped call, in
    which convolutions become grouped ones: those are slow on a GPU, and a captured step has no
    launches to save.
    """

    def __init__(
        self, models: Sequence[nn.Module], problem: Problem, one_by_one: bool = False
    ) -> None:
        states = [model.state_dict().items() for model in models]
        forms = [{name: (tensor.shape, tensor.dtype) for name, tensor in state} for state in states]
        expected = "give the same tensors for every seed"
        came = "models that differ in names, shapes or dtypes"
        require(all(form == forms[0] for form in forms), "make_model", expected, came)
        self._require_plain(models[0])
        self.members, self.device, self.one_by_one = len(models), problem.device, one_by_one
        self._base = models[0]
        self._evaluate = problem._evaluate
        self.parameters: dict[str, Tensor] = {}
        self.fixed: dict[str, Tensor] = {}
        for name, tensor in self._base.named_parameters():
            values = torch.stack([model.get_parameter(name).detach() for model in models])
            (self.parameters if tensor.requires_grad else self.fixed)[name] = values
        for name, _ in self._base.named_buffers():
            self.fixed[name] = torch.stack([model.get_buffer(name) for model in models])
        self._gradient = grad_and_value(self._loss, has_aux=True)

    @staticmethod
    def _require_plain(model: nn.Module) -> None:
        for name, layer in model.named_modules():
            what = f"{type(layer).__name__} {name!r}"
            if isinstance(layer, RANDOM) and getattr(layer, "p", 1.0) > 0:
                raise ValueError(
                    f"make_model must give models that draw nothing in training, got {what}; train"
                    " such members one by one with fit"
                )
            expected = "give models without batch normalisation"
            cure = "use layer or group norm, or train one by one with fit"
            require(not isinstance(layer, STATISTICS), "make_model", expected, what, cure)

    def _loss(self, parameters: Any, fixed: Any, data: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The mean loss of one member on a batch, its correct predictions, and their number."""
        args, kwargs, target = self._evaluate.split(Batch(data, 0))
        output = functional_call(self._base, ({**parameters, **fixed},), args, kwargs)
        output = self._evaluate.read(output)
        loss = self._evaluate.loss
        return loss.value(output, target), count_hits(loss, output, target, self.device)

    def gradients(self, data: Any, shared: bool) -> tuple[dict[str, Tensor], Tensor]:
        """Gradients by name (S, …), and loss, targets met and targets counted, (3, S)."""
        gradients, (loss, (met, counted)) = self._map(self._gradient, data, shared)
        return gradients, torch.stack([loss.double(), met.double(), counted.double()])

    @torch.no_grad()
    def losses(self, data: Any) -> Tensor:
        """The mean loss of every member on data of its own, (S,)."""
        loss: Tensor = self._map(self._loss, data, shared=False)[0]
        return loss

    def _map(self, function: Any, data: Any, shared: bool) -> Any:
        """A function of parameters, fixed tensors and data for all members, its outputs stacked."""
        if not self.one_by_one:
            mapped = vmap(function, in_dims=(0, 0, None if shared else 0))
            return mapped(self.parameters, self.fixed, data)
        outputs = []
        for member in range(self.members):
            one = partial(tree_map, itemgetter(member))
            own = one((self.parameters, self.fixed))
            outputs.append(function(*own, data if shared else one(data)))
        return tree_map(lambda *parts: torch.stack(parts), *outputs)

    @torch.no_grad()
    def evaluate(self, batches: list[Any]) -> NDArray[np.float64]:
        """Loss and accuracy over batches, (2, S)."""
        sums, size = torch.zeros(3, self.members, dtype=torch.float64, device=self.device), 0
        for data in batches:
            count = len(tree_leaves(data)[0])
            loss, (met, counted) = self._map(self._loss, data, shared=True)
            sums += torch.stack([loss.double() * count, met.double(), counted.double()])
            size += count
        return _means(sums, size)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the members by name, on the CPU, in the order of a state dict."""
        every, names = {**self.parameters, **self.fixed}, self._base.state_dict()
        return {name: every[name].detach().cpu() for name in names if name in every}


class StackedDescent:
    """SGD or NGD of stacked parameters, in place; a setting is a number or one per member."""

    def __init__(
        self, parameters: dict[str, Tensor], optimizer: str, settings: dict[str, Any]
    ) -> None:
        self._parameters, self._natural = list(parameters.values()), optimizer == "ngd"
        self._names, self._settings = list(parameters), settings
        self._fishers: list[ngd.AxisFishers] = [{} for _ in self._parameters]
        moving = np.any(settings["momentum"])
        self._momentum = [torch.zeros_like(p) for p in self._parameters] if moving else None
        self.count = 0

    @property
    def due(self) -> bool:
        """Whether the next step updates the estimates of NGD."""
        return self._natural and ngd.updating(self.count, self._settings["period"])

    def step(self, named: dict[str, Tensor], now: bool) -> None:
        """One step of all members along their gradients; ``now`` updates the estimates of NGD."""
        gradients, parameters = [named[name] for name in self._names], self._parameters
        lr, decay = self._by_member("lr"), self._by_member("weight_decay")
        if np.any(self._settings["weight_decay"]):
            if self._settings.get("decoupled"):
                for parameter in parameters:
                    parameter.mul_(1.0 - _wide(lr * decay, parameter))
            else:
                pairs = zip(gradients, parameters, strict=True)
                gradients = [torch.addcmul(gradient, _wide(decay, p), p) for gradient, p in pairs]
        factors = [torch.ones_like(lr)] * len(gradients)
        if self._natural:
            directions = ngd.natural_gradients(self._fishers, gradients, self._rule(), now)
            gradients, factors = directions.tensors, list(directions.factors.split(len(lr)))
        self._move(gradients, factors, lr)

    def _move(self, gradients: list[Tensor], factors: list[Tensor], lr: Tensor) -> None:
        moves = zip(self._parameters, gradients, factors, strict=True)
        for index, (parameter, gradient, factor) in enumerate(moves):
            if self._momentum is None:
                parameter.addcmul_(gradient, _wide(factor * lr, parameter), value=-1)
            else:
                buffer = self._momentum[index].mul_(_wide(self._by_member("momentum"), parameter))
                buffer.addcmul_(gradient, _wide(factor, buffer))
                parameter.addcmul_(buffer, _wide(lr, parameter), value=-1)

    def _rule(self) -> ngd.Preconditioning:
        alpha, epsilon = (
            self._by_member(name) if isinstance(value, tuple) else float(value)
            for name, value in ((name, self._settings[name]) for name in ("alpha", "epsilon"))
        )
        smoothing = Smoothing(alpha, self._settings["eta"], self._settings["delta"], epsilon)
        return ngd.Preconditioning(smoothing, self._settings["rank"], self._settings["rescale"])

    def _by_member(self, name: str) -> Tensor:
        """A setting as (S,) in float64, sent to the device once."""
        known = self.__dict__.setdefault("_sent", {})
        if name not in known:
            like, value = self._parameters[0], self._settings[name]
            values = value if isinstance(value, tuple) else (value,) * len(like)
            known[name] = torch.tensor(values, dtype=torch.float64, device=like.device)
        return known[name]  # type: ignore[no-any-return]


class StackedStep:
    """Epochs of stacked members over data on the device; on a GPU a step is one replayed graph."""

    def __init__(self, model: StackedModel, descent: StackedDescent, columns: Any) -> None:
        self.model, self.descent, self._columns = model, descent, columns
        self._replay = Replay(model.device)
        self._sums = torch.zeros(3, model.members, dtype=torch.float64, device=model.device)
        self._indices: dict[tuple[int, ...], Tensor] = {}

    def epoch(self, orders: Tensor, batch_size: int) -> NDArray[np.float64]:
        """One pass in the given orders, (S, n) or (1, n); mean loss and accuracy, (2, S)."""
        self._sums.zero_()
        for part in orders.split(batch_size, dim=1):
            fresh = part.clone(memory_format=torch.contiguous_format)
            indices = self._indices.setdefault(tuple(part.shape), fresh)
            indices.copy_(part)
            now = self.descent.due
            self._replay((part.shape[1], now), partial(self._step, indices, now))
            self.descent.count += 1
        return _means(self._sums, orders.shape[1])

    @torch.no_grad()
    def _step(self, indices: Tensor, now: bool) -> None:
        shared = indices.shape[0] == 1
        at = indices[0] if shared else indices
        data = tree_map(lambda leaf: leaf[at] if isinstance(leaf, Tensor) else leaf, self._columns)
        gradients, sums = self.model.gradients(data, shared)
        sums[0] *= indices.shape[1]
        self._sums += sums
        self.descent.step(gradients, now)


def _wide(values: Tensor, like: Tensor) -> Tensor:
    """(S,) for broadcasting with (S, …), in its dtype."""
    return values.to(like.dtype).view(-1, *[1] * (like.ndim - 1))


def _means(sums: Tensor, size: int) -> NDArray[np.float64]:
    loss, met, counted = sums.cpu().numpy()
    with np.errstate(invalid="ignore"):
        return np.stack([loss / size, met / np.where(counted > 0, counted, np.nan)])


DEFAULTS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.0, "weight_decay": 0.0},
    "ngd": {
        name: parameter.default
        for name, parameter in signature(ngd.NGD).parameters.items()
        if name not in ("params", "lr")
    },
}
BY_MEMBER = ("lr", "momentum", "weight_decay", "alpha")


@dataclass(frozen=True)
class Ensemble(Result):
    """Members trained by ``fit_many``: curves (S, epochs) and stacked tensors (S, …) by name.

    ``loss`` and ``accuracy`` are means over the batches of an epoch, NaN where there are none;
    ``settings`` holds numbers, or a tuple of one for each member.
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
    """Train ``make_model(seed)`` for all seeds at once, by "sgd" or "ngd", with the same results as
    alone.

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
    models = [_build(make_model, seed, device) for seed in seeds]
    problem = Problem(models[0], loss, data, device=device)
    if problem.norm != "eval" or problem.loss_function is None:
        raise ValueError(f"loss must be one of the model's output, got {describe(loss)}")
    stacked = StackedModel(models, problem)
    descent = StackedDescent(stacked.parameters, optimizer, values)
    stepped = StackedStep(stacked, descent, concatenate([batch.data for batch in problem.batches]))
    held_out = None
    if validation is not None:
        held_out = [batch.data for batch in problem.on(validation).batches]
    curves = np.full((4, len(seeds), epochs), math.nan)
    for epoch in range(epochs):
        own = seeds[:1] if order == "shared" else seeds
        orders = torch.stack([epoch_order(seed, epoch, problem.num_samples) for seed in own])
        curves[:2, :, epoch] = stepped.epoch(orders.to(problem.device), batch_size)
        if held_out is not None:
            curves[2:, :, epoch] = stacked.evaluate(held_out)
        report("members", epoch + 1, epochs)
    status = Status.CONVERGED if np.isfinite(curves[0]).all() else Status.TRAINING_DIVERGED
    result: tuple[Any, ...] = (seeds, values, *curves, stacked.tensors(), status)
    return Ensemble(*result)


def _settings(optimizer: str, given: dict[str, Any]) -> dict[str, Any]:
    known = {"lr": None, **DEFAULTS[optimizer]}
    names = ", ".join(known)
    for name in given:
        require(name in known, f"the settings of {optimizer!r}", f"be among {names}", name)
    values = {**known, **given}
    return {name: _tuple(value) if name in BY_MEMBER else value for name, value in values.items()}


def _tuple(value: Any) -> Any:
    """A sequence, array or tensor of numbers as a tuple, all else as it is."""
    if isinstance(value, Tensor | np.ndarray):
        value = value.tolist()
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _members(seeds: Any, values: dict[str, Any]) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Seeds and settings, checked, that agree on the number of members."""
    if not isinstance(seeds, Sequence) or isinstance(seeds, str) or not len(seeds):
        raise TypeError(
            f"seeds must be a sequence of at least one seed, got {describe(seeds)}; such as"
            " range(10)"
        )
    members_seeds = tuple(require_count(seed, "seeds", least=0) for seed in seeds)
    lengths = {name: len(value) for name, value in values.items() if isinstance(value, tuple)}
    members = max([len(members_seeds), *lengths.values()])
    members_seeds = members_seeds * members if len(members_seeds) == 1 else members_seeds
    expected = f"be one or {members}, as many as there are values"
    require(len(members_seeds) == members, "seeds", expected, str(len(members_seeds)))
    for name, length in lengths.items():
        expected = f"have one value or {members}, one for each member"
        require(length == members, name, expected, str(length))
    for member in range(members):
        pairs = values.items()
        own = {key: value[member] if isinstance(value, tuple) else value for key, value in pairs}
        for name in BY_MEMBER:
            number = "be a number, or one for each member"
            require_type(own.get(name, 0.0), numbers.Real, name, number)
        ngd.require_settings({**DEFAULTS["ngd"], **own})
    return members_seeds, values


def _build(
    make_model: Callable[[int], nn.Module], seed: int, device: torch.device | str | None
) -> nn.Module:
    if not callable(make_model) or isinstance(make_model, nn.Module):
        raise TypeError(
            "make_model must be a function of a seed that gives a model, got"
            f" {describe(make_model)}; such as lambda seed: mlp([64, 32, 10], seed=seed)"
        )
    model = make_model(seed)
    require_type(model, nn.Module, "make_model", "return a torch.nn.Module")
    return copy.deepcopy(model).to(device)
