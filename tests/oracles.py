"""Exact answers, dense and in float64."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import grad, hessian

from lambdahat.batches import take
from lambdahat.problem import Problem


def dense_hessian(problem: Problem) -> Tensor:
    """∂²L/∂θ² (P, P), by torch.func over each batch."""
    return sum(
        weight * hessian(lambda theta, batch=batch: problem.batch_loss(problem.named(theta), batch))(problem.vector)
        for weight, batch in problem.weighted()
    )


def per_sample(problem: Problem) -> tuple[Tensor, Tensor]:
    """The gradient (n, P) and the Hessian (n, P, P) of every sample's own loss, one sample at a time."""
    singles = [take(batch, torch.tensor([i])) for batch in problem.batches for i in range(batch.size)]

    def loss(theta: Tensor, single: object) -> Tensor:
        return problem.batch_loss(problem.named(theta), single)

    gradients = [grad(loss)(problem.vector, single) for single in singles]
    hessians = [hessian(loss)(problem.vector, single) for single in singles]
    return torch.stack(gradients), torch.stack(hessians)
