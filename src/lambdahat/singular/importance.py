"""Logistic regression's λ̂ by importance sampling: a reference that shares nothing with the
chains it judges.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lambdahat._core.check import require_count, require_positive
from lambdahat._core.rng import generator
from lambdahat.results import Estimate, Status

TAILS = 10.0  # degrees of freedom of the proposal: its tails are heavier than the posterior's
FEWEST = 300  # effective draws below which the answer is not to be trusted
ELEMENTS = 4_000_000  # draws × samples at a time


def logistic_minimum(x: Tensor, y: Tensor, iterations: int = 50) -> Tensor:
    """The w of least mean logistic loss, by Newton's method: x (n, d), y (n,) of 0 and 1,
    float64.
    """
    w = torch.zeros(x.shape[1], dtype=x.dtype)
    for _ in range(iterations):
        p = (x @ w).sigmoid()
        w = w - torch.linalg.solve(_curvature(x, p), x.T @ (p - y) / len(y))
    return w


def _curvature(x: Tensor, p: Tensor) -> Tensor:
    """The Hessian of the mean loss, (d, d)."""
    return (x * (p * (1 - p)).unsqueeze(1)).T @ x / len(x)


def logistic_expectation(
    x: Tensor,
    y: Tensor,
    centre: Tensor,
    nbeta: float,
    localization: float,
    draws: int = 20_000,
    seed: int = 0,
) -> Estimate:
    """nβ·E[L(w) − L(w*)] under exp(−nβ·L(w) − (γ/2)‖w − w*‖²), L the mean logistic loss and w* =
    ``centre``.

    Draws of a Student-t around w* with precision nβH + γ, H the Hessian there, are weighted to the
    posterior, and the weighted mean is taken of e − c·((w − w*)·∇U − d), where e = nβ(L − L*) and c
    is the regression coefficient: under the posterior (w − w*)·∇U averages d (Stein), and near a
    minimum it is nearly a multiple of e. The error is that of a ratio of means. ``cost`` counts
    losses over the data.
    """
    require_positive(nbeta, "nbeta")
    require_positive(localization, "localization")
    require_count(draws, "draws", least=100)
    x, y, centre = x.double(), y.double(), centre.double()
    size = len(centre)
    identity = torch.eye(size, dtype=torch.float64)
    precision = nbeta * _curvature(x, (x @ centre).sigmoid()) + localization * identity
    rng = generator(seed, "importance")
    normal = torch.randn(draws, size, generator=rng, dtype=torch.float64)
    chi = _chi_square(draws, rng) / TAILS
    root = torch.linalg.cholesky(precision)
    away = torch.linalg.solve_triangular(root.T, (normal / chi.sqrt().unsqueeze(1)).T, upper=True).T
    energies, work = _energies(x, y, centre, away, nbeta)
    tie = localization * away.square().sum(1)
    proposal = -0.5 * (TAILS + size) * torch.log1p((away @ root).square().sum(1) / TAILS)
    weights = torch.softmax(-energies - 0.5 * tie - proposal, dim=0)
    return _weighted(weights, energies, work + tie - size)


def _chi_square(draws: int, rng: torch.Generator) -> Tensor:
    return torch.randn(draws, int(TAILS), generator=rng, dtype=torch.float64).square().sum(1)


def _energies(
    x: Tensor, y: Tensor, centre: Tensor, away: Tensor, nbeta: float
) -> tuple[Tensor, Tensor]:
    """nβ(L − L*) and (w − w*)·nβ∇L of each draw."""
    start = x @ centre
    lowest = torch.nn.functional.softplus(start) - y * start
    energies, work = [], []
    for part in away.split(max(ELEMENTS // len(x), 1)):
        change = part @ x.T
        logits = start + change
        loss = torch.nn.functional.softplus(logits) - y * logits
        energies.append(nbeta * (loss - lowest).mean(dim=1))
        work.append(nbeta * ((logits.sigmoid() - y) * change).mean(dim=1))
    return torch.cat(energies), torch.cat(work)


def _weighted(weights: Tensor, energies: Tensor, control: Tensor) -> Estimate:
    """The weighted mean of the energies, less their part along a control whose mean is 0."""
    centred = control - weights @ control
    slope = (weights * centred) @ energies / ((weights * centred) @ centred)
    values = energies - slope * control
    mean = float(weights @ values)
    stderr = math.sqrt(float(weights.square() @ (values - mean).square()))
    status = Status.CONVERGED if 1 / float(weights.square().sum()) >= FEWEST else Status.FEW_WEIGHTS
    return Estimate(mean, stderr, len(weights), status)
