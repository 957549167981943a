"""The loss of every sample by itself, at any parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lambdahat._core.check import require
from lambdahat.operators.linearise import twice_differentiable
from lambdahat.problem import Problem
from lambdahat.problem.batches import Batch, rows_of, take
from lambdahat.problem.evaluators import Parameters

CHUNK = 256

Way = Callable[[Any, Parameters, Batch], Tensor]


class SampleLosses:
    """θ ↦ ℓ_1(θ) … ℓ_n(θ), (n,), with L = (1/n) Σ ℓ_i; refused where the loss is no such mean.

    Where the loss is one of the model's output, the model sees whole batches and only the loss is
    taken sample by sample; else the loss of a batch of one is mapped over the samples, in a loop
    where it cannot be.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        # functions, for methods would hold this object, and its problem, in a cycle
        kind = type(self)
        ways: list[Way] = [kind._by_output] if problem.loss_function else []
        ways += [kind._mapped, kind._looped]
        parameters, batch = problem.named(problem.vector), problem.batches.first()
        with torch.no_grad():
            whole = problem.batch_loss(parameters, batch).double()
        self._way = next(
            (way for way in ways if self._agrees(way, parameters, batch, whole)), kind._looped
        )
        parts = self._tried(self._way, parameters, batch)
        right = parts is not None and bool(
            (parts.double().mean() - whole).abs() <= 1e-4 * (1e-3 + whole.abs())
        )
        sizes = torch.tensor(problem.batches.sizes, dtype=torch.float64)
        even = torch.allclose(
            torch.tensor(problem.weights).double(), sizes / sizes.sum(), rtol=1e-6
        )
        require(
            right and even and problem.norm != "train",
            "the problem's loss",
            "be a mean over the samples",
            'one whose samples depend on each other or count unequally (norm="train", ignored'
            " targets)",
            "this reading needs the loss of each sample by itself",
            TypeError,
        )

    @torch.no_grad()
    def __call__(self, theta: Tensor) -> Tensor:
        parameters = self.problem.named(theta)
        return torch.cat([self._way(self, parameters, batch) for batch in self.problem.batches])

    def _agrees(self, way: Way, parameters: Parameters, batch: Batch, whole: Tensor) -> bool:
        parts = self._tried(way, parameters, batch)
        if parts is None or parts.shape != (batch.size,):
            return False
        return bool((parts.double().mean() - whole).abs() <= 1e-4 * (1e-3 + whole.abs()))

    def _tried(self, way: Way, parameters: Parameters, batch: Batch) -> Tensor | None:
        try:
            with torch.no_grad():
                return way(self, parameters, batch)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
            return None

    def _by_output(self, parameters: Parameters, batch: Batch) -> Tensor:
        output, target = self.problem.output(parameters, batch), self.problem.target(batch)
        loss = self.problem.loss_function
        assert loss is not None
        return torch.vmap(lambda z, y: loss.value(z.unsqueeze(0), y.unsqueeze(0)))(output, target)

    def _mapped(self, parameters: Parameters, batch: Batch) -> Tensor:
        columns, single = rows_of(batch)
        if not any(column.numel() for column in columns):  # no data: the samples are alike
            return self.problem.batch_loss(parameters, batch).reshape(()).expand(batch.size)
        one = torch.vmap(
            lambda *rows: self.problem.batch_loss(parameters, single(*rows)), chunk_size=CHUNK
        )
        with twice_differentiable(), torch.no_grad():  # fused attention has no rule for vmap
            return one(*columns)

    def _looped(self, parameters: Parameters, batch: Batch) -> Tensor:
        rows = torch.arange(batch.size, device=self.problem.device)
        return torch.stack(
            [
                self.problem.batch_loss(parameters, take(batch, row)).reshape(())
                for row in rows.split(1)
            ]
        )
