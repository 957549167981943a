"""The base of optimisers with a direction of their own and ``torch.optim.SGD``'s momentum."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from lambdahat._core.check import describe, require, require_number
from lambdahat.problem import Problem, require_problem

Directions = dict[Tensor, Tensor]
Group = dict[str, Any]
BLAS = (torch.float32, torch.float64)


class Descent(Optimizer):
    """θ ← θ − lr·b, b ← μ b + d from b = d at first, with a direction d that a subclass makes of
    the gradients.

    With "nesterov" in the group the step is lr·(d + μ b). Weight decay λ is decoupled, θ ← (1 −
    lr·λ)θ − lr·b, where ``decoupled`` says so, else part of the gradient, as in
    ``torch.optim.SGD``. ``param_groups[0]`` counts the steps.
    """

    decoupled = False
    OWN: tuple[str, ...] = ()  # a subclass's own attributes, which copies and pickles take along

    @abstractmethod
    def directions(self) -> Directions:
        """The direction of every parameter that has a gradient."""

    @abstractmethod
    def check_group(self, group: dict[str, Any]) -> None:
        """Refuse wrong settings of a parameter group by name."""

    def rate(self, group: dict[str, Any]) -> float:
        """The learning rate of a group."""
        return float(group["lr"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        settings = {**self.defaults, **param_group}
        for name in ("lr", "weight_decay"):
            require_number(settings[name], name, "[0, inf)")
        require_number(settings["momentum"], "momentum", "[0, 1)")
        self.check_group(settings)
        super().add_param_group(param_group)
        require_real(self.param_groups[-1]["params"])

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {name: getattr(self, name) for name in self.OWN}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; ``closure`` recomputes the loss, which is returned, and its gradients."""
        loss = evaluate(closure)
        directions = self.directions()
        for group in self.param_groups:
            self._move(group, [p for p in group["params"] if p in directions], directions)
        self.param_groups[0]["step"] += 1
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where ``state_dict`` was made, every tensor in the dtype it had."""
        super().load_state_dict(state_dict)
        restore_dtypes(self, state_dict)

    def all_parameters(self) -> list[Tensor]:
        """The parameters of all groups, in order."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def gradients(self) -> Directions:
        """The gradients that are there, with the weight decay that is part of them."""
        found = {}
        for group in self.param_groups:
            decay = 0.0 if self.decoupled else group["weight_decay"]
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is not None:
                    require_dense([gradient])
                    found[parameter] = gradient.add(parameter, alpha=decay) if decay else gradient
        return found

    def require_same_point(self, problem: Problem) -> list[Tensor]:
        """The parameters in the order of the problem's vector; refuse a problem whose vector is not
        these parameters as they are.

        Those of the problem's own model may be in groups in any order; others have the problem's.
        """
        require_problem(problem)
        parameters, source = self.all_parameters(), problem.source
        named = source if isinstance(source, dict) else dict(source.named_parameters())
        own = [named[name] for name in problem.space.names if name in named]
        if set(map(id, own)) == set(map(id, parameters)):
            parameters = own
        shapes, theirs = [tuple(p.shape) for p in parameters], list(problem.space.shapes)
        cure = (
            "make it of the model in training, with the parameters in the order of the optimiser's"
            " groups"
        )
        expected = f"have parameters of shapes {shapes}"
        require(theirs == shapes, "problem", expected, describe(theirs), cure)
        flat = [parameter.detach().reshape(-1) for parameter in parameters]
        here = torch.cat([part.to(problem.device, problem.dtype) for part in flat])
        same = torch.equal(here, problem.vector)
        require(same, "problem", "be at the optimiser's present parameters", "other values", cure)
        return parameters

    def _move(self, group: Group, parameters: list[Tensor], directions: Directions) -> None:
        if not parameters:
            return
        rate, momentum = self.rate(group), group["momentum"]
        steps = [directions[parameter] for parameter in parameters]
        if momentum:
            buffers = self._buffers(parameters, steps, momentum)
            ahead = group.get("nesterov")
            steps = list(torch._foreach_add(steps, buffers, alpha=momentum)) if ahead else buffers
        if self.decoupled and group["weight_decay"]:
            torch._foreach_mul_(parameters, 1.0 - rate * group["weight_decay"])
        torch._foreach_add_(parameters, steps, alpha=-rate)

    def _buffers(
        self, parameters: list[Tensor], steps: list[Tensor], momentum: float
    ) -> list[Tensor]:
        """b ← μ b + d, or d where there is no b yet."""
        states = [self.state[parameter] for parameter in parameters]
        pairs = [
            (state["momentum_buffer"], direction)
            for state, direction in zip(states, steps, strict=True)
            if "momentum_buffer" in state
        ]
        if pairs:
            old, new = map(list, zip(*pairs, strict=True))
            torch._foreach_mul_(old, momentum)
            torch._foreach_add_(old, new)
        for state, direction in zip(states, steps, strict=True):
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = direction.clone()
        return [state["momentum_buffer"] for state in states]


class ObservingDescent(Descent):
    """A descent whose direction comes from ``observe(problem)``, every ``every`` steps."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; a problem of them all must be observed before the next step."""
        super().add_param_group(param_group)
        self.param_groups[0]["observed"] = -1

    @abstractmethod
    def observe(self, problem: Problem) -> None:
        """Measure curvature on a problem of the same model and parameters."""

    @property
    def due(self) -> bool:
        """Whether curvature is wanted anew before the next step."""
        group = self.param_groups[0]
        if group["observed"] < 0 or group["every"] is None:
            return bool(group["observed"] < 0)
        return bool(group["step"] - group["observed"] >= group["every"])


def require_observation(fine: bool, before: str = "the first step") -> None:
    """Raise unless what a step needs has been observed."""
    if not fine:
        raise RuntimeError(
            f"observe(problem) must be called before {before}, got no observation; if"
            " optimizer.due: optimizer.observe(problem)"
        )


def require_dense(gradients: Iterable[Tensor | None]) -> None:
    """Raise unless all gradients that are there are dense."""
    dense = not any(each is not None and each.is_sparse for each in gradients)
    cure = "use sparse=False in the embedding, or torch.optim.SparseAdam"
    require(dense, "gradients", "be dense", "a sparse one", cure)


def require_real(parameters: Iterable[Tensor]) -> None:
    """Raise unless all parameters are real numbers."""
    other = next((each.dtype for each in parameters if not each.is_floating_point()), None)
    cure = "optimise torch.view_as_real of complex ones"
    require(other is None, "params", "be real floating point", str(other), cure)


def group_settings(arguments: Mapping[str, Any], *names: str, **own: Any) -> Group:
    """The named arguments of a constructor and what the optimiser itself keeps in a group."""
    return {name: arguments[name] for name in names} | own


def restore_dtypes(optimizer: Optimizer, state_dict: Mapping[str, Any], cast: str = "") -> None:
    """Put back loaded tensors in the dtype they had, for torch casts them to the parameter's.

    The one named ``cast`` stays as torch has it.
    """
    saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    mine = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for index, parameter in zip(saved, mine, strict=True):
        for name, value in state_dict["state"].get(index, {}).items():
            if isinstance(value, Tensor) and name != cast:
                optimizer.state[parameter][name] = value.to(parameter.device, copy=True)


def evaluate(closure: Callable[[], Any] | None) -> Any:
    """The loss that the closure of a step computes, with its gradients; None without one."""
    with torch.enable_grad():
        return None if closure is None else closure()


def total_norm(tensors: list[Tensor]) -> Tensor:
    """The norm of all tensors together; on a CPU by dot products, twice as fast as norms."""
    fast = all(tensor.device.type == "cpu" and tensor.dtype in BLAS for tensor in tensors)
    if not fast or not tensors:
        return get_total_norm(tensors)
    flat = [tensor.reshape(-1) for tensor in tensors]
    return torch.stack([torch.dot(one, one) for one in flat]).sum().sqrt()
