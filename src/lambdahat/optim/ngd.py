"""NGD: the online natural gradient of the NGD paper, as an optimiser."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lambdahat._core.check import require_count, require_number, require_positive
from lambdahat._core.device import Replay, multiply_stacks
from lambdahat.optim.descent import (
    evaluate,
    group_settings,
    require_dense,
    require_real,
    restore_dtypes,
)
from lambdahat.optim.online_fisher import (
    OnlineFisher,
    Seen,
    Smoothing,
    default_rank,
    power_of,
    precondition,
    start,
    update,
)
from lambdahat.optim.registry import register_optimizer

FIRST_UPDATES = 10
TINY = 1e-60  # for gradients of zeros

AxisFishers = dict[int, OnlineFisher]


class Preconditioning(NamedTuple):
    """How gradients are preconditioned: smoothing, rank (None: min(⌈d/2⌉, 80)), norm kept."""

    smoothing: Smoothing
    rank: int | None
    rescale: bool


class Directions(NamedTuple):
    """The preconditioned stacks: ``tensors``, each (S, *shape), times ``factors``, with squared
    norms ``powers``.

    The last two are in float64, for all members of all stacks one after the other.
    """

    tensors: list[Tensor]
    factors: Tensor
    powers: Tensor


def updating(step: int, period: int) -> bool:
    """Whether step t = 0, 1, … updates the estimates: the first ten do, then one in ``period``."""
    return step < FIRST_UPDATES or step % period == 0


def natural_gradients(
    stacks: Sequence[AxisFishers],
    gradients: Sequence[Tensor],
    rule: Preconditioning,
    update_now: bool,
) -> Directions:
    """The preconditioned gradients (S, *shape) of several stacks, and an update of all estimates
    where it is due.

    The first call starts the estimates, one for each axis longer than 1. An update sees the
    gradient as the axes before it left it, and changes what later calls do.
    """
    tensors, seen = list(gradients), []
    before = power = _powers(tensors)
    gain, sizes = torch.ones_like(before), [len(tensor) for tensor in tensors]
    last = max(tensor.ndim for tensor in tensors) - 2
    for axis in range(last + 1):
        for index, tensor in enumerate(tensors):
            if tensor.ndim <= axis + 1 or tensor.shape[axis + 1] == 1 or not tensor.numel():
                continue
            rows, fishers = _rows(tensor, axis), stacks[index]
            if axis not in fishers:
                scaled = rows * gain.split(sizes)[index].sqrt()[:, None, None].to(rows.dtype)
                rank = default_rank(rows.shape[-1], rule.rank)
                on_cpu = rows.device.type == "cpu"
                fishers[axis] = start(scaled, rank, rule.smoothing, on_cpu)
            inner = multiply_stacks(fishers[axis].basis, rows.mT)
            if update_now:
                met = (scalar.split(sizes)[index] for scalar in (power, gain))
                joint = multiply_stacks(inner, rows)
                seen.append(Seen(fishers[axis], joint, rows.shape[1], *met))
            natural = precondition(fishers[axis], rows, inner, tensor is not gradients[index])
            tensors[index] = _from_rows(natural, axis, tensor)
        if update_now or axis == last:  # between axes only an update asks for the norms
            power = _powers(tensors)
            gain = (before + TINY) / (power + TINY) if rule.rescale else gain
    if seen:
        update(seen, rule.smoothing)
    return Directions(tensors, gain.sqrt(), gain * power)


def _powers(stacks: list[Tensor]) -> Tensor:
    """The squared norms of all members of all stacks, in float64."""
    if stacks[0].device.type == "cpu":  # cheaper than a norm
        members = [member.reshape(-1) for stack in stacks for member in stack.unbind()]
        return torch.stack([torch.dot(member, member) for member in members]).double()
    return torch.cat([power_of(stack) for stack in stacks])


def _rows(tensor: Tensor, axis: int) -> Tensor:
    """A stack (S, *shape) as (S, N, d), d the length of ``axis``; a view for the outer axes."""
    if tensor.ndim == 3:
        return tensor if axis else tensor.mT
    stack, size = tensor.shape[0], tensor.shape[axis + 1]
    if axis == tensor.ndim - 2:
        return tensor.reshape(stack, -1, size)
    if axis == 0:
        return tensor.reshape(stack, size, -1).mT
    return tensor.movedim(axis + 1, -1).reshape(stack, -1, size)


def _from_rows(rows: Tensor, axis: int, like: Tensor) -> Tensor:
    """The inverse of ``_rows``."""
    if like.ndim == 3:
        return rows if axis else rows.mT
    if axis == like.ndim - 2:
        return rows.reshape(like.shape)
    if axis == 0:
        return rows.mT.reshape(like.shape)
    return rows.reshape(like.movedim(axis + 1, -1).shape).movedim(-1, axis + 1)


# on a CPU smaller tensors of one shape are worth a copy into a stack: calls cost more than numbers
SMALL = 4096
FIELDS = ("basis", "shared", "weights", "rest")
# what a captured step holds as constants
RULE = ("alpha", "rank", "eta", "delta", "epsilon", "rescale")
CONSTANTS = (*RULE, "momentum", "weight_decay", "decoupled")


@register_optimizer("ngd")
class NGD(Optimizer):
    """SGD on gradients multiplied by an online estimate of (F + κI)⁻¹, κ = (α/d)·max(tr F, ε) (Eqs.
    5–7, NGD paper).

    Povey, Zhang and Khudanpur's (2015) estimate, one for each axis of length d of each tensor,
    applied in turn; the other axes are its samples. ``alpha`` smooths: as it grows NGD becomes SGD.
    ``rank`` (by default min(⌈d/2⌉, 80)) is that of the estimate's low-rank part, ``eta`` the weight
    of the newest gradient in it, ``period`` the steps between updates after the first ten,
    ``delta`` and ``epsilon`` its relative and absolute floors. ``rescale`` keeps each tensor's
    gradient norm. ``weight_decay`` is added to the gradient, or with ``decoupled`` shrinks the
    weights by lr·weight_decay.

    No step waits for the device. On a GPU, steps are captured in CUDA graphs after the first few.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        alpha: float = 4.0,
        rank: int | None = None,
        period: int = 4,
        eta: float = 0.1,
        delta: float = 5e-4,
        epsilon: float = 1e-10,
        rescale: bool = True,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        decoupled: bool = False,
    ) -> None:
        self._groups: list[_Group] = []
        super().__init__(params, group_settings(locals(), "lr", "period", *CONSTANTS))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._groups = []

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own settings."""
        require_settings({**self.defaults, **param_group})
        super().add_param_group(param_group)
        require_real(self.param_groups[-1]["params"])

    @property
    def update_norm(self) -> Tensor:
        """‖F_s⁻¹∇L‖ of the last step, without momentum and rate; 0 before the first."""
        powers = [batch.power for group in self._groups for batch in group.batches]
        return torch.cat(powers).sum().sqrt() if powers else torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; ``closure`` recomputes the loss and its gradients first."""
        loss = evaluate(closure)
        for index, settings in enumerate(self.param_groups):
            if index == len(self._groups):
                self._groups.append(_Group([], self))
            active = [parameter for parameter in settings["params"] if parameter.grad is not None]
            require_dense(parameter.grad for parameter in active)
            if not self._groups[index].fits(active):
                self._groups[index] = _Group(active, self)
            for batch in self._groups[index].batches:
                batch.step(settings)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state bit for bit; also one from another kind of device."""
        super().load_state_dict(state_dict)
        restore_dtypes(self, state_dict, cast="momentum_buffer")
        self._groups = []


def require_settings(settings: dict[str, Any]) -> None:
    """Raise unless the settings of a parameter group make sense."""
    for name in ("lr", "alpha", "weight_decay"):
        if not (name == "lr" and isinstance(settings[name], Tensor)):
            require_number(settings[name], name, "[0, inf)")
    require_number(settings["momentum"], "momentum", "[0, 1)")
    require_number(settings["eta"], "eta", "(0, 1)")
    require_number(settings["delta"], "delta", "(0, 1)")
    require_positive(settings["epsilon"], "epsilon")
    require_count(settings["period"], "period")
    if settings["rank"] is not None:
        require_count(settings["rank"], "rank", cure="leave it out for min(⌈d/2⌉, 80)")


class _Stack:
    """Parameters of one shape and their estimates, which the optimiser's state shares by views."""

    def __init__(self, parameters: list[Tensor], states: list[dict[str, Any]]) -> None:
        self.parameters, self.states = parameters, states
        self.fishers: AxisFishers = {}
        first = parameters[0]
        self.dtype = torch.promote_types(first.dtype, torch.float32)
        shape = (len(parameters), *first.shape)
        # a captured step reads its gradients from a fixed place
        cuda = first.device.type == "cuda"
        self.gradient = torch.empty(shape, dtype=self.dtype, device=first.device) if cuda else None
        self.places = [] if self.gradient is None else list(self.gradient.unbind())
        for axis in range(first.ndim):
            if f"axis{axis}_basis" in states[0]:
                keys = [f"axis{axis}_{field}" for field in FIELDS]
                parts = (torch.stack([state[key] for state in states]) for key in keys)
                self.fishers[axis] = OnlineFisher(*parts).with_diagonal(first.device.type == "cpu")
        self.share()

    def share(self) -> None:
        """Let the optimiser's state see the tensors of the stack."""
        for axis, fisher in self.fishers.items():
            for field in FIELDS:
                for state, view in zip(self.states, getattr(fisher, field).unbind(), strict=True):
                    state[f"axis{axis}_{field}"] = view

    def gather(self) -> Tensor:
        """The gradients (S, *shape)."""
        if self.gradient is not None:
            return self.gradient
        gradients: list[Any] = [parameter.grad for parameter in self.parameters]
        found = gradients[0].unsqueeze(0) if len(gradients) == 1 else torch.stack(gradients)
        return found.to(self.dtype)


class _Batch:
    """Parameters of one group and age that have gradients; equal shapes are stacked."""

    def __init__(self, parameters: list[Tensor], optimizer: NGD) -> None:
        device = parameters[0].device
        kinds: dict[Any, list[Tensor]] = {}
        for parameter in parameters:
            alone = device.type == "cpu" and parameter.numel() > SMALL
            kind = id(parameter) if alone else (parameter.shape, parameter.dtype)
            kinds.setdefault(kind, []).append(parameter)
        self.stacks = [
            _Stack(members, [optimizer.state[p] for p in members]) for members in kinds.values()
        ]
        self.parameters = [parameter for stack in self.stacks for parameter in stack.parameters]
        self.states = [state for stack in self.stacks for state in stack.states]
        self.power = torch.zeros(len(parameters), dtype=torch.float64, device=device)
        self.places = [place for stack in self.stacks for place in stack.places]
        self._lr, self._replay = torch.zeros((), dtype=torch.float64, device=device), Replay(device)
        self._rate = 0.0  # what _lr holds, unless a tensor was copied there

    def step(self, settings: dict[str, Any]) -> None:
        """One step of all its parameters."""
        age = self.states[0]["step"]
        now = updating(age, settings["period"])
        if self.places:
            gradients: list[Any] = [parameter.grad for parameter in self.parameters]
            torch._foreach_copy_(self.places, gradients)
        # captured steps read the rate from there; a number that has not changed is there already
        lr = settings["lr"]
        if isinstance(lr, Tensor):
            self._lr.copy_(lr)
            self._rate = math.nan
        elif lr != self._rate:
            self._lr.fill_(lr)
            self._rate = lr
        if age:
            fixed = tuple(settings[name] for name in CONSTANTS)
            self._replay((now, fixed), lambda: self._work(settings, now))
            # a replayed graph changes tensors behind autograd's back
            for parameter in self.parameters:
                torch.autograd.graph.increment_version(parameter)
        else:
            self._work(settings, now)
            for stack in self.stacks:
                stack.share()
        for state in self.states:
            state["step"] = age + 1

    def _work(self, settings: dict[str, Any], now: bool) -> None:
        gradients, decay = [stack.gather() for stack in self.stacks], settings["weight_decay"]
        if decay and settings["decoupled"]:
            torch._foreach_mul_(self.parameters, 1.0 - decay * self._lr)
        elif decay:
            for index, stack in enumerate(self.stacks):
                parts = list(gradients[index].unbind())
                decayed = torch._foreach_add(parts, stack.parameters, alpha=decay)
                gradients[index] = torch.stack(decayed)
        fishers = [stack.fishers for stack in self.stacks]
        floors = settings["delta"], settings["epsilon"]
        smoothing = Smoothing(float(settings["alpha"]), settings["eta"], *floors)
        rule = Preconditioning(smoothing, settings["rank"], settings["rescale"])
        found = natural_gradients(fishers, gradients, rule, now)
        self.power.copy_(found.powers)
        tensors = [tensor for stack in found.tensors for tensor in stack.unbind()]
        # θ ← θ − lr·m, with m ← momentum·m + factor·direction
        factors, momentum, dtype = found.factors, settings["momentum"], self.stacks[0].dtype
        if not momentum:
            steps = list((factors * self._lr).to(dtype).unbind())
            torch._foreach_addcmul_(self.parameters, tensors, steps, value=-1)
            return
        for state, parameter in zip(self.states, self.parameters, strict=True):
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [state["momentum_buffer"] for state in self.states]
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_addcmul_(buffers, tensors, list(factors.to(dtype).unbind()))
        rates = [self._lr.to(dtype)] * len(buffers)
        torch._foreach_addcmul_(self.parameters, buffers, rates, value=-1)


class _Group:
    """The parameters of a group that have gradients, by age, device and dtype."""

    def __init__(self, parameters: list[Tensor], optimizer: NGD) -> None:
        self.parameters = parameters
        self._places = [parameter.data_ptr() for parameter in parameters]
        kinds: dict[Any, list[Tensor]] = {}
        for parameter in parameters:
            age = optimizer.state[parameter].setdefault("step", 0)
            kinds.setdefault((age, parameter.device, parameter.dtype), []).append(parameter)
        self.batches = [_Batch(members, optimizer) for members in kinds.values()]

    def fits(self, parameters: list[Tensor]) -> bool:
        """Whether these are the parameters that were stacked, where they were."""
        if len(parameters) != len(self.parameters):
            return False
        pairs = zip(parameters, self.parameters, self._places, strict=True)
        return all(one is other and one.data_ptr() == place for one, other, place in pairs)
