"""Many copies of one small network trained at once: seeds × settings, every parameter held as
(S, R, …).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.functional import cross_entropy

from lambdahat._core.check import require, require_choice
from lambdahat._core.device import Replay
from lambdahat._core.progress import report
from lambdahat._core.rng import generator

Pair = tuple[Tensor, Tensor]
Parameters = dict[str, Tensor]

MOMENTUM = 0.9
BETAS = 0.9, 0.999
OPTIMIZERS = ("sgd", "momentum", "adam")
PARTS = 10  # of a run, whose mean losses are kept
CHUNK = 1 << 15  # networks × samples evaluated at a time


@dataclass(frozen=True)
class Settings:
    """One optimiser at many settings: rates (S, R), and for Adam ε (S, R)."""

    optimizer: str
    rates: Tensor
    epsilon: Tensor | None = None


class Rule:
    """SGD, SGD with momentum 0.9 or Adam, as torch has them, on stacked parameters; every cell
    has a rate and an ε.
    """

    def __init__(self, parameters: Sequence[Tensor], settings: Settings) -> None:
        require_choice(settings.optimizer, "optimizer", OPTIMIZERS)
        self.kind, self.parameters = settings.optimizer, list(parameters)
        like = self.parameters[0]
        self.rates = settings.rates.to(like)
        self.epsilon = (
            torch.full_like(self.rates, 1e-8)
            if settings.epsilon is None
            else settings.epsilon.to(like)
        )
        self.first = [torch.zeros_like(p) for p in self.parameters] if self.kind != "sgd" else []
        self.second = [torch.zeros_like(p) for p in self.parameters] if self.kind == "adam" else []
        # powers βᵗ live on the device, where a recorded step can change them
        self.powers = torch.ones(2, dtype=torch.float64, device=like.device)
        self.betas = torch.tensor(BETAS, dtype=torch.float64, device=like.device)

    def step(self, gradients: Sequence[Tensor]) -> None:
        """One step of every cell."""
        self.powers.mul_(self.betas)
        for index, (parameter, gradient) in enumerate(zip(self.parameters, gradients, strict=True)):
            parameter.addcmul_(
                self._direction(index, gradient), _wide(self.rates, parameter), value=-1
            )

    def _direction(self, index: int, gradient: Tensor) -> Tensor:
        if self.kind == "sgd":
            return gradient
        first = self.first[index]
        if self.kind == "momentum":
            return first.mul_(MOMENTUM).add_(gradient)
        second = self.second[index]
        first.lerp_(gradient, 1 - BETAS[0])
        second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        corrections = (1 - self.powers).to(first.dtype)
        return (first / corrections[0]) / (
            (second / corrections[1]).sqrt() + _wide(self.epsilon, second)
        )


class Cells:
    """A network of every seed, in as many copies as there are settings, on one training set.

    All copies of a seed start from its network and read the same batches: settings are compared
    like with like.
    """

    def __init__(self, models: Sequence[nn.Module], data: Pair, settings: Settings) -> None:
        x, y = data
        wanted = len(settings.rates)
        require(
            len(models) == wanted, "models", f"be {wanted}, one for each seed", str(len(models))
        )
        self.model, self.x, self.y = models[0], x, y
        copies = settings.rates.shape[1]
        self.start = {
            name: torch.stack(
                [dict(model.named_parameters())[name].detach() for model in models]
            ).to(x.device)
            for name, _ in self.model.named_parameters()
        }
        self.parameters = {
            name: tensor.unsqueeze(1).repeat(1, copies, *[1] * (tensor.ndim - 1))
            for name, tensor in self.start.items()
        }
        self.rule = Rule(list(self.parameters.values()), settings)
        self._gradients = vmap(vmap(grad_and_value(self._loss), in_dims=(0, None, None)))
        self._judge = vmap(vmap(self._judged, in_dims=(0, None, None)), in_dims=(0, None, None))

    def _loss(self, parameters: Parameters, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(functional_call(self.model, parameters, (x,)), y)

    def _judged(self, parameters: Parameters, x: Tensor, y: Tensor) -> Tensor:
        """Sums of losses and of wrong answers, (2,)."""
        logits = functional_call(self.model, parameters, (x,))
        wrong = (logits.argmax(-1) != y).sum()
        return torch.stack([cross_entropy(logits, y, reduction="sum").double(), wrong.double()])

    def train(self, batch_size: int, steps: int, seed: int, task: str) -> Tensor:
        """``steps`` steps on batches drawn without replacement, each seed in an order of its own.

        Returns the mean loss of the batches, as they were met, in each tenth of the run: (10, S,
        R), on the CPU.
        """
        require(
            batch_size <= len(self.x),
            "batch_size",
            f"be at most {len(self.x)}, the samples there are",
            str(batch_size),
        )
        seeds = len(self.rule.rates)
        indices = torch.zeros(seeds, batch_size, dtype=torch.int64, device=self.x.device)
        replay, ends = (
            Replay(self.x.device),
            {steps * part // PARTS for part in range(1, PARTS + 1)},
        )
        total, before, means = torch.zeros_like(self.rule.rates), 0, []

        @torch.no_grad()
        def step() -> None:
            gradients, losses = self._gradients(self.parameters, self.x[indices], self.y[indices])
            total.add_(losses)
            self.rule.step([gradients[name] for name in self.parameters])

        for number, drawn in enumerate(
            _batches(seeds, len(self.x), batch_size, steps, seed, self.x.device)
        ):
            indices.copy_(drawn)
            replay("step", step)
            if number + 1 in ends:
                means.append(total.cpu() / (number + 1 - before))
                total.zero_()
                before = number + 1
                report(task, number + 1, steps)
        return torch.stack(means)

    @torch.no_grad()
    def judged(self, data: Pair) -> tuple[Tensor, Tensor]:
        """Mean loss and share of wrong answers over data, (S, R) each on the CPU; NaN where the
        loss is not finite.
        """
        x, y = data
        size = max(1, CHUNK // self.rule.rates.numel())
        parts = [
            self._judge(self.parameters, *part)
            for part in zip(x.split(size), y.split(size), strict=True)
        ]
        loss, wrong = (torch.stack(parts).sum(0) / len(x)).cpu().unbind(-1)
        return loss.where(loss.isfinite(), torch.nan), wrong.where(loss.isfinite(), torch.nan)

    def distances(self) -> Tensor:
        """‖θ − θ₀‖₂ of every copy, (S, R)."""
        moved = [self.parameters[name] - start.unsqueeze(1) for name, start in self.start.items()]
        return (
            torch.stack([part.double().flatten(2).square().sum(2) for part in moved])
            .sum(0)
            .sqrt()
            .cpu()
        )


def _batches(
    seeds: int, samples: int, batch_size: int, steps: int, seed: int, device: torch.device
) -> Iterator[Tensor]:
    """Indices (S, B), step by step; what is left of an epoch after its whole batches is not
    used.
    """
    whole, done = samples // batch_size, 0
    for epoch in range(-(-steps // whole)):
        orders = [
            torch.randperm(samples, generator=generator(seed, "order", s, epoch))
            for s in range(seeds)
        ]
        drawn = torch.stack(orders)[:, : whole * batch_size].to(device)
        yield from drawn.split(batch_size, dim=1)[: steps - done]
        done += whole


def _wide(values: Tensor, like: Tensor) -> Tensor:
    """(S, R) for broadcasting with (S, R, …)."""
    return values.view(*values.shape, *[1] * (like.ndim - 2))
