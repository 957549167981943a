"""Exact answers, dense and in float64."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lambdahat.problem import Problem
from lambdahat.problem.batches import Batch, take


def dense_hessian(problem: Problem) -> Tensor:
    """∂²L/∂θ² (P, P), one row at a time by plain autograd.

    Not by ``torch.func.hessian``: on torch 2.13 its nested vmap gives rows of batch-norm (train)
    and layer-norm weights that finite differences contradict.
    """
    theta = problem.vector.requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        loss = sum(
            weight * problem.batch_loss(problem.named(theta), batch)
            for weight, batch in problem.weighted()
        )
    (slope,) = torch.autograd.grad(loss, theta, create_graph=True)
    return torch.stack(
        [torch.autograd.grad(s, theta, retain_graph=True, materialize_grads=True)[0] for s in slope]
    )


def jacobians(problem: Problem) -> Iterator[tuple[float, Batch, Tensor, Tensor]]:
    """For each batch its weight, itself, the output z (B, C) and the Jacobian (B, C, P), row by
    row.
    """
    theta = problem.vector.requires_grad_()
    for weight, batch in problem.weighted():
        with sdpa_kernel(SDPBackend.MATH):
            z = problem.output(problem.named(theta), batch)
        rows = [torch.autograd.grad(e, theta, retain_graph=True)[0] for e in z.flatten()]
        yield weight, batch, z.detach(), torch.stack(rows).reshape(*z.shape, -1)


def dense_ggn(problem: Problem) -> Tensor:
    """Σ_b w_b Jᵀ (∂²L_b/∂z²) J, everything dense."""
    total = torch.zeros(problem.num_parameters, problem.num_parameters, dtype=torch.float64)
    for weight, batch, z, jacobian in jacobians(problem):
        flat = torch.autograd.functional.hessian(
            lambda z, batch=batch: problem.output_loss(z, batch), z
        )
        curvature = flat.reshape(z.numel(), z.numel())
        j = jacobian.reshape(z.numel(), -1)
        total += weight * j.T @ curvature @ j
    return total


def dense_second_moment(problem: Problem) -> Tensor:
    """(1/n) Σ_i g_i g_iᵀ with g_i by autograd of each sample alone."""
    theta = problem.vector.requires_grad_()
    total = torch.zeros(problem.num_parameters, problem.num_parameters, dtype=torch.float64)
    for weight, batch in problem.weighted():
        for i in range(batch.size):
            loss = problem.batch_loss(problem.named(theta), take(batch, torch.tensor([i])))
            (g,) = torch.autograd.grad(loss, theta)
            total += weight / batch.size * torch.outer(g, g)
    return total


def per_sample(problem: Problem, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient (n, P) of every sample's own loss and its Hessian times the columns of (P,
    k), as (n, P, k).
    """
    theta = problem.vector.requires_grad_()
    gradients, products = [], []
    for single in (
        take(batch, torch.tensor([i])) for batch in problem.batches for i in range(batch.size)
    ):
        with sdpa_kernel(SDPBackend.MATH):
            (slope,) = torch.autograd.grad(
                problem.batch_loss(problem.named(theta), single), theta, create_graph=True
            )
        columns = [torch.autograd.grad(slope, theta, v, retain_graph=True)[0] for v in vectors.T]
        gradients.append(slope.detach())
        products.append(torch.stack(columns, dim=1))
    return torch.stack(gradients), torch.stack(products)
