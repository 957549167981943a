"""Many small networks trained at once: rules × seeds, with parameters stacked and the forward pass under ``vmap``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from lambdahat.optim.products import BatchProduct
from lambdahat.optim.regularizers import Rule

Losses = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Member:
    """A rule from one initialisation regime: where it starts, how fast it learns, and what it adds (None: SGD)."""

    rule: Rule | None
    models: Sequence[nn.Module]
    learning_rate: float


class Stack:
    """R members × S seeds of one architecture; every parameter is held as (R·S, *shape).

    One step is θ ← θ − α∇L − term(θ), Table 4.1 of the regularization thesis. Networks do not mix: the gradient of
    the sum of all losses is each network's own, and so is its product Hθ.
    """

    def __init__(self, members: Sequence[Member], device: torch.device | str = "cpu") -> None:
        self.members, self.seeds = list(members), len(members[0].models)
        self.template = copy.deepcopy(members[0].models[0]).to(device)
        models = [model for member in members for model in member.models]
        self.names = [name for name, _ in self.template.named_parameters()]
        by_name = [dict(model.named_parameters()) for model in models]
        self.stacked = [
            torch.stack([named[name].detach() for named in by_name]).to(device).requires_grad_() for name in self.names
        ]
        rates = torch.tensor([member.learning_rate for member in members for _ in member.models], device=device)
        self.rates = [rates.view(-1, *[1] * (tensor.ndim - 1)) for tensor in self.stacked]
        self.curved = any(member.rule is not None and member.rule.needs_product for member in members)

    def outputs(self, x: Tensor) -> Tensor:
        """The networks on the inputs (S, n, …) of their seeds: (R·S, n, outputs)."""

        def one(parameters: list[Tensor], inputs: Tensor) -> Tensor:
            return functional_call(self.template, dict(zip(self.names, parameters, strict=True)), (inputs,))  # type: ignore[no-any-return]

        everywhere = x.expand(len(self.members), *x.shape).flatten(0, 1)
        found: Tensor = vmap(one, randomness="different")(self.stacked, everywhere)
        return found

    def step(self, x: Tensor, y: Tensor, losses: Losses, number: int) -> None:
        """One step on the batch x (S, B, …), y (S, B); ``losses`` gives (R·S,) from outputs and targets."""
        loss = losses(self.outputs(x), y.expand(len(self.members), *y.shape).flatten(0, 1)).sum()
        graph = torch.autograd.grad(loss, self.stacked, create_graph=self.curved)
        held = [tensor.detach() for tensor in self.stacked]
        curvature = BatchProduct(self.stacked, [graph])(held) if self.curved else []
        with torch.no_grad():
            terms = [self._terms(index, held, curvature, number) for index in range(len(self.members))]
            for tensor, rate, grad, *added in zip(self.stacked, self.rates, graph, *terms, strict=True):
                tensor.sub_(rate * grad + torch.cat(added))

    def _terms(self, index: int, held: list[Tensor], curvature: list[Tensor], number: int) -> list[Tensor]:
        """What one member's rule subtracts, seed by seed: layers' maxima are those of one network."""
        rows = slice(index * self.seeds, (index + 1) * self.seeds)
        own, rule = [tensor[rows] for tensor in held], self.members[index].rule
        if rule is None:
            return [torch.zeros_like(tensor) for tensor in own]
        curved = [tensor[rows] for tensor in curvature] if rule.needs_product else []
        found: list[Tensor] = vmap(lambda own, curved: rule.term(own, curved, number))(own, curved)
        return found

    def per_member(self, values: Tensor) -> Tensor:
        """(R·S, …) as (R, S, …)."""
        return values.detach().reshape(len(self.members), self.seeds, *values.shape[1:])

    def norms(self) -> Tensor:
        """‖θ‖₂ of every network, (R, S)."""
        squares = torch.stack([tensor.detach().flatten(1).double().square().sum(1) for tensor in self.stacked])
        return self.per_member(squares.sum(0).sqrt())

    def network(self, member: int, seed: int) -> nn.Module:
        """One of the networks, as a model of its own."""
        model = copy.deepcopy(self.template)
        with torch.no_grad():
            for parameter, tensor in zip(model.parameters(), self.stacked, strict=True):
                parameter.copy_(tensor[member * self.seeds + seed])
        return model
