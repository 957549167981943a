"""Losses and gradients of several chains: all in one call, or chain by chain."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
from torch import Tensor

from lambdahat.problem import Problem
from lambdahat.problem.batches import Batch
from lambdahat.problem.checkpointing import recomputing
from lambdahat.problem.evaluators import Parameters
from lambdahat.sampling.minibatches import Minibatches
from lambdahat.sampling.recorded import Recorded
from lambdahat.sampling.unfolded import UnfoldedConvolutions

LossAndGradient = tuple[Tensor, Tensor]


class Together:
    """All chains in one call: the losses are mapped (``torch.vmap``), so that matrix products
    become batched ones.

    With ``unfold`` convolutions become matrix products, too.
    """

    def __init__(self, problem: Problem, unfold: bool = False) -> None:
        self.problem = problem
        self._convolutions = UnfoldedConvolutions if unfold else nullcontext
        # a record that held it would keep the problem until the collector comes
        own = weakref.proxy(self)
        self.only_batch = Recorded(
            lambda positions: own.one_batch(positions, problem.batches.first())
        )

    def one_batch(self, positions: Tensor, batch: Batch) -> LossAndGradient:
        """Losses (chains,) and gradients (chains, P) on one batch for all."""
        return self._differentiated(
            lambda leaves: self.problem.batch_loss(leaves, batch).reshape(()), positions
        )

    def own_batches(self, positions: Tensor, source: Minibatches, index: Tensor) -> LossAndGradient:
        """The same with a batch for each chain."""

        def loss(leaves: Parameters, *own: Tensor) -> Tensor:
            return self.problem.batch_loss(leaves, source.assembled(own)).reshape(())

        return self._differentiated(loss, positions, *source.gathered(index))

    @torch.enable_grad()
    def _differentiated(
        self, loss: Callable[..., Tensor], positions: Tensor, *parts: Tensor
    ) -> LossAndGradient:
        """One backward pass through the sum: the chains do not touch each other."""
        leaves = {
            name: tensor.detach().requires_grad_()
            for name, tensor in self.problem.named(positions).items()
        }
        with self._convolutions():
            losses = torch.vmap(loss)(leaves, *parts)
        gradients = torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True)
        if (
            len(gradients) == 1
            and gradients[0] is not None
            and gradients[0].dtype == positions.dtype
        ):
            return losses.detach(), gradients[0].reshape(positions.shape)
        flat = torch.empty_like(positions)
        for place, gradient in zip(self.problem.space.split(flat), gradients, strict=True):
            place.copy_(gradient) if gradient is not None else place.zero_()
        return losses.detach(), flat


class OneByOne:
    """Chain after chain, each by a plain backward pass: for models that cannot be mapped, or
    gain nothing by it.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._gradients = problem.vector.new_empty(0)

    def only_batch(self, positions: Tensor) -> LossAndGradient:
        """The same as ``one_batch`` on the first batch of the problem."""
        return self.one_batch(positions, self.problem.batches.first())

    def one_batch(self, positions: Tensor, batch: Batch) -> LossAndGradient:
        """Losses (chains,) and gradients (chains, P) on one batch for all."""
        return self._each(positions, [batch] * len(positions))

    def own_batches(self, positions: Tensor, source: Minibatches, index: Tensor) -> LossAndGradient:
        """The same with a batch for each chain."""
        return self._each(positions, (source.batch(row) for row in index))

    def _each(self, positions: Tensor, batches: Iterable[Batch]) -> LossAndGradient:
        """The gradients are in memory that the next call uses again: fresh memory costs as much
        as a pass over it.
        """
        if self._gradients.shape != positions.shape:
            self._gradients = torch.empty_like(positions)
        triples = zip(positions, batches, self._gradients, strict=True)
        return torch.stack(
            [self._single(theta, batch, out) for theta, batch, out in triples]
        ), self._gradients

    @torch.enable_grad()
    def _single(self, theta: Tensor, batch: Batch, out: Tensor) -> Tensor:
        """The loss of one chain; its gradient goes to ``out``."""
        leaves = {
            name: tensor.detach().requires_grad_()
            for name, tensor in self.problem.named(theta).items()
        }
        with recomputing(self.problem.recomputes):
            loss = self.problem.batch_loss(leaves, batch)
        gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        for place, gradient in zip(self.problem.space.split(out), gradients, strict=True):
            place.copy_(gradient)
        return loss.detach().reshape(())


def full_data(gradients: Together | OneByOne, positions: Tensor) -> LossAndGradient:
    """Losses and gradients over the whole data."""
    if len(gradients.problem.batches) == 1:
        loss, gradient = gradients.only_batch(positions)
        return loss.double(), gradient
    losses, total = torch.zeros(len(positions), dtype=torch.float64, device=positions.device), None
    for weight, batch in gradients.problem.weighted():
        loss, gradient = gradients.one_batch(positions, batch)
        losses = losses + weight * loss.double()
        total = weight * gradient if total is None else total.add_(gradient, alpha=weight)
    assert total is not None
    return losses, total


def on_batches(
    gradients: Together | OneByOne,
    positions: Tensor,
    source: Minibatches,
    index: Tensor,
    parts: int = 1,
) -> LossAndGradient:
    """Losses and gradients on the batches drawn, in ``parts`` pieces one after the other where
    memory is short.
    """
    if source.whole and parts == 1 and len(gradients.problem.batches) == 1:
        return gradients.only_batch(positions)  # without a copy of the data
    losses, total = None, None
    for piece in index.chunk(parts, dim=1):
        if source.shared:
            loss, gradient = gradients.one_batch(positions, source.batch(piece[0]))
        else:
            loss, gradient = gradients.own_batches(positions, source, piece)
        if parts == 1:
            return loss, gradient
        share = piece.shape[1] / index.shape[1]
        losses = share * loss if losses is None else losses + share * loss
        total = share * gradient if total is None else total.add_(gradient, alpha=share)
    assert losses is not None
    assert total is not None
    return losses, total
