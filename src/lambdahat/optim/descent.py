"""The base of optimisers with a direction of their own and ``torch.optim.SGD``'s momentum."""

from __future__ import annotations

import math
import numbers
from abc import abstractmethod
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from lambdahat._core.check import describe, require
from lambdahat.problem import Problem, require_problem

Directions = dict[Tensor, Tensor]
BLAS = (torch.float32, torch.float64)


class Descent(Optimizer):
    """θ ← θ − lr·b, b ← μ b + d from b = d at first, with a direction d that a subclass makes of
    the gradients.

    With "nesterov" in the group the step is lr·(d + μ b). Weight decay λ is decoupled, θ ← (1 −
    lr·λ)θ − lr·b, where ``decoupled`` says so, else part of the gradient, as in
    ``torch.optim.SGD``. ``param_groups[0]`` counts the steps.
    """

    decoupled = False

    @abstractmethod
    def directions(self) -> Directions:
        """The direction of every parameter that has a gradient."""

    @abstractmethod
    def check_group(self, group: dict[str, Any]) -> None:
        """Refuse wrong settings of a parameter group by name."""

    def rate(self, group: dict[str, Any]) -> float:
        """What a group's direction is multiplied with."""
        return float(group["lr"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        settings = {**self.defaults, **param_group}
        for name in ("lr", "weight_decay"):
            require_nonnegative(settings[name], name)
        require_fraction(settings["momentum"], "momentum")
        self.check_group(settings)
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; ``closure`` recomputes the loss, which is returned, and its gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        directions = self.directions()
        for group in self.param_groups:
            self._move(group, [p for p in group["params"] if p in directions], directions)
        self.param_groups[0]["step"] += 1
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where ``state_dict`` was made, every tensor in the dtype it had."""
        super().load_state_dict(state_dict)
        numbers_of = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for number, parameter in zip(numbers_of, self.all_parameters(), strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor):
                    self.state[parameter][name] = value.to(parameter.device, copy=True)

    def all_parameters(self) -> list[Tensor]:
        """The parameters of all groups, in order."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def gradients(self) -> Directions:
        """The gradients that are there, with the weight decay that is part of them."""
        found = {}
        for group in self.param_groups:
            decay = 0.0 if self.decoupled else group["weight_decay"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    if parameter.grad.is_sparse:
                        raise ValueError(
                            "gradients must be dense, got a sparse one; use sparse=False"
                        )
                    found[parameter] = (
                        parameter.grad.add(parameter, alpha=decay) if decay else parameter.grad
                    )
        return found

    def require_same_point(self, problem: Problem) -> None:
        """Refuse a problem whose vector is not this optimiser's parameters as they are."""
        require_problem(problem)
        parameters = self.all_parameters()
        shapes = tuple(tuple(parameter.shape) for parameter in parameters)
        cure = (
            "make it of the model in training, with the parameters in the order of the optimiser's"
            " groups"
        )
        require(
            problem.space.shapes == shapes,
            "problem",
            f"have parameters of shapes {list(shapes)}",
            describe(list(problem.space.shapes)),
            cure,
        )
        here = torch.cat(
            [
                parameter.detach().to(problem.device, problem.dtype).reshape(-1)
                for parameter in parameters
            ]
        )
        same = torch.equal(here, problem.vector)
        require(same, "problem", "be at the optimiser's present parameters", "other values", cure)

    def _move(
        self, group: dict[str, Any], parameters: list[Tensor], directions: Directions
    ) -> None:
        if not parameters:
            return
        rate, momentum = self.rate(group), group["momentum"]
        steps = [directions[parameter] for parameter in parameters]
        if momentum:
            buffers = self._buffers(parameters, steps, momentum)
            steps = (
                list(torch._foreach_add(steps, buffers, alpha=momentum))
                if group.get("nesterov")
                else buffers
            )
        if self.decoupled and group["weight_decay"]:
            torch._foreach_mul_(parameters, 1.0 - rate * group["weight_decay"])
        torch._foreach_add_(parameters, steps, alpha=-rate)

    def _buffers(
        self, parameters: list[Tensor], steps: list[Tensor], momentum: float
    ) -> list[Tensor]:
        """b ← μ b + d, or d where there is no b yet."""
        begun = [
            (parameter, d)
            for parameter, d in zip(parameters, steps, strict=True)
            if "momentum_buffer" in self.state[parameter]
        ]
        if begun:
            old = [self.state[parameter]["momentum_buffer"] for parameter, _ in begun]
            torch._foreach_mul_(old, momentum)
            torch._foreach_add_(old, [d for _, d in begun])
        for parameter, d in zip(parameters, steps, strict=True):
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = d.clone()
        return [self.state[parameter]["momentum_buffer"] for parameter in parameters]


def total_norm(tensors: list[Tensor]) -> Tensor:
    """The norm of all tensors together; on a CPU by dot products, twice as fast as norms."""
    if (
        not all(tensor.device.type == "cpu" and tensor.dtype in BLAS for tensor in tensors)
        or not tensors
    ):
        return get_total_norm(tensors)
    flat = [tensor.reshape(-1) for tensor in tensors]
    return torch.stack([torch.dot(one, one) for one in flat]).sum().sqrt()


def require_nonnegative(value: Any, name: str) -> None:
    """Raise unless it is a finite number of at least 0."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    require(real, name, "be a number of at least 0", describe(value), "", TypeError)
    require(0 <= value < math.inf, name, "be a finite number of at least 0", repr(value))


def require_fraction(value: Any, name: str) -> None:
    """Raise unless it is a number in [0, 1)."""
    require_nonnegative(value, name)
    require(value < 1, name, "lie in [0, 1)", repr(value))
