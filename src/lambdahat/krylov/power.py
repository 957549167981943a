"""Simultaneous power iteration: the method of the regularization thesis."""

from __future__ import annotations

import torch
from torch import Tensor

from lambdahat._precision import full_precision
from lambdahat._progress import report
from lambdahat.krylov.lanczos import random_vector, require_finite
from lambdahat.krylov.restart import ROUNDING, RitzPairs
from lambdahat.operators.base import LinearOperator


def simultaneous_power_iteration(
    operator: LinearOperator, k: int, *, tol: float, max_matvecs: int, seed: int
) -> RitzPairs:
    """The k eigenpairs of largest magnitude: Q, R = QR(A Q) until the Ritz pairs on Q have small residuals.

    Algorithm 1 of "Generalizing Regularization of Neural Networks to Correlated Parameter Spaces", which stops when
    successive Q differ little. That says nothing about the values where Q turns slowly, so this stops when
    ‖Av − θv‖ ≤ tol·max|θ|, or rounding, for all Ritz pairs; the residuals cost no product.
    """
    draws = [random_vector(operator, seed, "power_iteration", column) for column in range(k)]
    basis = torch.linalg.qr(torch.stack(draws, dim=1)).Q
    products = 0
    while True:
        image = (operator @ basis).to(basis.dtype)
        products += k
        report("power_iteration", products, max_matvecs)
        require_finite(image)
        pairs = _rayleigh_ritz(operator, basis, image, products)
        if float(pairs.errors.max()) <= max(tol * pairs.scale, pairs.noise) or products + k > max_matvecs:
            return pairs
        basis = torch.linalg.qr(image).Q


@full_precision()
def _rayleigh_ritz(operator: LinearOperator, basis: Tensor, image: Tensor, products: int) -> RitzPairs:
    """Ritz pairs on an orthonormal ``basis`` (P, k) with known ``image`` A·basis, by descending magnitude."""
    gram = (basis.double().T @ image.double()).cpu()
    values, weights = torch.linalg.eigh((gram + gram.T) / 2)
    order = values.abs().argsort(descending=True, stable=True)
    values, weights = values[order], weights[:, order]
    turn = weights.to(basis)
    vectors = basis @ turn
    gone = (image @ turn).double() - vectors.double() * values.to(vectors.device)
    scale = float(values.abs().max())
    noise = ROUNDING * float(torch.finfo(operator.dtype).eps) * scale
    residuals = gone.norm(dim=0).cpu()
    return RitzPairs(values, vectors, residuals.clamp_min(noise), residuals, noise, scale, products)
