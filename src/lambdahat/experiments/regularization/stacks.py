"""Many small networks trained at once: rules × seeds, with parameters stacked and the forward
pass under ``vmap``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from lambdahat._core.device import Replay, side_stream
from lambdahat.optim.regularizers import READINGS, BatchProduct, Product, Rule

Losses = Callable[[Tensor, Tensor], Tensor]
ABSOLUTE = READINGS[1]
NEGLIGIBLE = 1e-5  # of the largest: from here on Lanczos has found all there is to find in float32
# of the iteration for the sign of T: eigenvalues from 1e-5 of the largest on get theirs
SQUARINGS = 30


@dataclass(frozen=True)
class Member:
    """A rule from one initialisation regime: where it starts, how fast it learns, and what it
    adds (None: SGD).
    """

    rule: Rule | None
    models: Sequence[nn.Module]
    learning_rate: float


class Stack:
    """R members × S seeds of one architecture; every parameter is held as (R·S, *shape).

    One step is θ ← θ − α∇L − term(θ), Table 4.1 of the regularization thesis. Networks do not mix:
    the gradient of the sum of all losses is each network's own, and so is its product Hθ.
    """

    def __init__(self, members: Sequence[Member], device: torch.device | str = "cpu") -> None:
        self.members, self.seeds = list(members), len(members[0].models)
        self.template = copy.deepcopy(members[0].models[0]).to(device)
        models = [model for member in members for model in member.models]
        self.names = [name for name, _ in self.template.named_parameters()]
        by_name = [dict(model.named_parameters()) for model in models]
        self.stacked = [
            torch.stack([named[name].detach() for named in by_name]).to(device).requires_grad_()
            for name in self.names
        ]
        rates = torch.tensor(
            [member.learning_rate for member in members for _ in member.models], device=device
        )
        self.rates = [rates.view(-1, *[1] * (tensor.ndim - 1)) for tensor in self.stacked]
        rules = [member.rule for member in members if member.rule is not None]
        self.curved = any(rule.needs_product for rule in rules)
        self.depth = max((vars(rule)["depth"] for rule in rules if _absolute(rule)), default=0)
        self._stops = [vars(rule)["tau"] for rule in rules if "tau" in vars(rule)]
        place = torch.device(device)
        self._replay = Replay(place, side_stream(place))
        self._batches: dict[tuple[torch.Size, torch.Size], tuple[Tensor, Tensor]] = {}

    def outputs(self, x: Tensor) -> Tensor:
        """The networks on the inputs (S, n, …) of their seeds: (R·S, n, outputs)."""

        def one(parameters: list[Tensor], inputs: Tensor) -> Tensor:
            leaves = dict(zip(self.names, parameters, strict=True))
            return functional_call(self.template, leaves, (inputs,))  # type: ignore[no-any-return]

        everywhere = x.expand(len(self.members), *x.shape).flatten(0, 1)
        found: Tensor = vmap(one, randomness="different")(self.stacked, everywhere)
        return found

    def step(self, x: Tensor, y: Tensor, losses: Losses, number: int) -> None:
        """One step on the batch x (S, B, …), y (S, B); ``losses`` gives (R·S,) from outputs and
        targets.

        On a GPU the step is replayed from a CUDA graph, one for each shape of a batch and each part
        of training that rules with a stop divide it into.
        """
        if not x.is_cuda:
            self._advance(x, y, losses, number)
            return
        shapes = x.shape, y.shape
        if shapes not in self._batches:
            self._batches[shapes] = x.clone(), y.clone()
        held = self._batches[shapes]
        for place, given in zip(held, (x, y), strict=True):
            place.copy_(given)
        passed = tuple(number >= stop for stop in self._stops)
        self._replay((*shapes, passed), lambda: self._advance(*held, losses, number))

    def _advance(self, x: Tensor, y: Tensor, losses: Losses, number: int) -> None:
        loss = losses(self.outputs(x), y.expand(len(self.members), *y.shape).flatten(0, 1)).sum()
        graph = torch.autograd.grad(loss, self.stacked, create_graph=self.curved)
        held = [tensor.detach() for tensor in self.stacked]
        product = BatchProduct(self.stacked, [graph])
        curvature = product(held) if self.curved else []
        absolute = absolute_products(product, held, self.depth) if self.depth else []
        with torch.no_grad():
            terms = [
                self._terms(index, held, curvature, absolute, number)
                for index in range(len(self.members))
            ]
            for tensor, rate, grad, *added in zip(
                self.stacked, self.rates, graph, *terms, strict=True
            ):
                tensor.sub_(rate * grad + torch.cat(added))

    def _terms(
        self,
        index: int,
        held: list[Tensor],
        curvature: list[Tensor],
        absolute: list[Tensor],
        number: int,
    ) -> list[Tensor]:
        """What one member's rule subtracts, seed by seed: layers' maxima are those of one
        network.
        """
        rows = slice(index * self.seeds, (index + 1) * self.seeds)
        own, rule = [tensor[rows] for tensor in held], self.members[index].rule
        if rule is None:
            return [torch.zeros_like(tensor) for tensor in own]
        source = absolute if _absolute(rule) else curvature if rule.needs_product else []
        curved = [tensor[rows] for tensor in source]
        found: list[Tensor] = vmap(lambda own, curved: rule.term(own, curved, number))(own, curved)
        return found

    def per_member(self, values: Tensor) -> Tensor:
        """(R·S, …) as (R, S, …)."""
        return values.detach().reshape(len(self.members), self.seeds, *values.shape[1:])

    def norms(self) -> Tensor:
        """‖θ‖₂ of every network, (R, S)."""
        squares = torch.stack(
            [tensor.detach().flatten(1).double().square().sum(1) for tensor in self.stacked]
        )
        return self.per_member(squares.sum(0).sqrt())

    def network(self, member: int, seed: int) -> nn.Module:
        """One of the networks, as a model of its own."""
        model = copy.deepcopy(self.template)
        with torch.no_grad():
            for parameter, tensor in zip(model.parameters(), self.stacked, strict=True):
                parameter.copy_(tensor[member * self.seeds + seed])
        return model


def absolute_products(product: Product, vectors: list[Tensor], depth: int) -> list[Tensor]:
    """|H|v of every network, for vectors (N, *shape) and a product that does not mix networks.

    ``depth`` Lanczos steps that start at v give ‖v‖·Q|T|e₁. The recurrence is not reorthogonalised,
    which functions of a matrix do not need (Musco, Musco & Sidford, 2018), and |T| = T·sign(T) is
    found by matrix products alone, so that a CUDA graph can record all of it.
    """
    count = len(vectors[0])
    flat = torch.cat([vector.reshape(count, -1) for vector in vectors], 1)
    length = flat.norm(dim=1, keepdim=True)
    basis = [flat / length.clamp_min(torch.finfo(flat.dtype).tiny)]
    before, beta = torch.zeros_like(flat), torch.zeros_like(length)
    matrix = torch.zeros(count, depth, depth, dtype=torch.float64, device=flat.device)
    largest = torch.zeros_like(length)
    for step in range(depth):
        grown = torch.cat(
            [part.reshape(count, -1) for part in product(_shaped(basis[-1], vectors))], 1
        )
        alpha = (grown * basis[-1]).sum(1, keepdim=True)
        matrix[:, step, step] = alpha[:, 0]
        if step == depth - 1:
            break
        grown = grown - alpha * basis[-1] - beta * before
        before, beta = basis[-1], grown.norm(dim=1, keepdim=True)
        largest = torch.maximum(largest, torch.maximum(alpha.abs(), beta))
        beta = torch.where(beta > NEGLIGIBLE * largest, beta, 0)  # else the next vector is rounding
        basis.append(torch.where(beta > 0, grown / beta, 0))
        matrix[:, step, step + 1] = matrix[:, step + 1, step] = beta[:, 0]
    weights = (matrix @ _sign(matrix))[:, :, 0].to(flat)
    return _shaped(length * torch.stack(basis, 2).matmul(weights.unsqueeze(2)).squeeze(2), vectors)


def _sign(matrix: Tensor) -> Tensor:
    """The sign of symmetric matrices (N, d, d) by Newton and Schulz: X ← X(3 − X²)/2; 0 stays 0."""
    size = matrix.abs().sum(2).amax(1)[:, None, None]
    sign = matrix / torch.where(size > 0, size, 1)
    for _ in range(SQUARINGS):
        sign = 1.5 * sign - 0.5 * sign @ sign @ sign
    return sign


def _shaped(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor[0].numel() for tensor in like], 1)
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _absolute(rule: Rule) -> bool:
    return vars(rule).get("reading") == ABSOLUTE
