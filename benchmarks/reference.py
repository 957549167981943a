"""Exact answers in float64 that use neither lambdahat nor a peer: what "error" means in estimates.py."""

from __future__ import annotations

import copy

import numpy as np
import torch
from problems import LOSS, Case
from scipy.sparse.linalg import LinearOperator, eigsh
from torch.func import functional_call, jacrev, vmap


def double(case: Case) -> Case:
    batches = [(x.double(), y) for x, y in case.batches]
    return Case(case.name, copy.deepcopy(case.model).double(), batches)


def trace(case: Case, chunk: int = 16) -> float:
    """tr H of a ReLU network, which is tr GGN = (1/n) Σ_samples Σ_ij (diag p − p pᵀ)_ij ⟨∂f_i, ∂f_j⟩.

    The identity holds because such a network is linear in each single weight wherever it is differentiable.
    """
    case = double(case)
    params = {name: p.detach() for name, p in case.model.named_parameters()}

    def one(x):
        jacobian = jacrev(lambda p: functional_call(case.model, p, (x[None],))[0])(params)
        gram = sum(j.flatten(1) @ j.flatten(1).T for j in jacobian.values())
        p = functional_call(case.model, params, (x[None],))[0].softmax(0)
        return ((p.diag() - p.outer(p)) * gram).sum()

    parts = [vmap(one)(piece).sum() for x, _ in case.batches for piece in x.split(chunk)]
    return sum(part.item() for part in parts) / case.num_samples


def top_eigenvalues(case: Case, k: int) -> torch.Tensor:
    """ARPACK to machine precision on a plain double-backward product, largest first."""
    case = double(case)
    params = case.parameters

    def product(v):
        v = torch.as_tensor(np.ravel(v), device=params[0].device)
        total = torch.zeros_like(v)
        for x, y in case.batches:
            grads = torch.autograd.grad(LOSS(case.model(x), y), params, create_graph=True)
            flat = torch.cat([g.reshape(-1) for g in grads])
            columns = torch.autograd.grad(flat, params, v)
            total += torch.cat([c.reshape(-1) for c in columns]) * (len(y) / case.num_samples)
        return total.cpu().numpy()

    size = case.num_parameters
    values = eigsh(LinearOperator((size, size), product, dtype=np.float64), k=k, which="LA", return_eigenvectors=False)
    return torch.as_tensor(np.sort(values)[::-1].copy())
