"""Simultaneous power iteration: the method of the regularization thesis."""

from __future__ import annotations

import torch
from torch import Tensor

from lambdahat._precision import full_precision
from lambdahat._progress import report
from lambdahat.krylov.lanczos import random_vector, require_finite
from lambdahat.krylov.restart import RitzPairs
from lambdahat.operators.base import LinearOperator


def simultaneous_power_iteration(
    operator: LinearOperator, k: int, *, tol: float, max_matvecs: int, seed: int
) -> RitzPairs:
    """The k eigenpairs of largest magnitude: Q, R = QR(A Q) until Q stands still.

    Algorithm 1 of "Generalizing Regularization of Neural Networks to Correlated Parameter Spaces", which stops when
    Σ(Q − Q_prev)² ≤ tol for successive Q (as printed, Q_prev is never refreshed). The sign of each column is matched
    to its predecessor, for those of negative eigenvalues flip at every step. The values are Rayleigh quotients on the
    last Q, not diag R, and the residuals are true ones: both come from products already made. ``errors`` are the
    squared changes of the columns.
    """
    draws = [random_vector(operator, seed, "power_iteration", column) for column in range(k)]
    basis = torch.linalg.qr(torch.stack(draws, dim=1)).Q
    products = 0
    while True:
        image = (operator @ basis).to(basis.dtype)
        products += k
        report("power_iteration", products, max_matvecs)
        require_finite(image)
        following = torch.linalg.qr(image).Q
        following = following * torch.where((following * basis).sum(0) < 0, -1.0, 1.0).to(basis.dtype)
        changes = ((following - basis).double() ** 2).sum(0).cpu()
        if float(changes.sum()) <= tol or products + k > max_matvecs:
            return _rayleigh_ritz(operator, basis, image, changes, products)
        basis = following


@full_precision()
def _rayleigh_ritz(operator: LinearOperator, basis: Tensor, image: Tensor, changes: Tensor, products: int) -> RitzPairs:
    """Ritz pairs on an orthonormal ``basis`` (P, k) with known ``image`` A·basis, by descending magnitude."""
    gram = (basis.double().T @ image.double()).cpu()
    values, weights = torch.linalg.eigh((gram + gram.T) / 2)
    order = values.abs().argsort(descending=True, stable=True)
    values, weights = values[order], weights[:, order]
    turn = weights.to(basis)
    vectors = basis @ turn
    gone = (image @ turn).double() - vectors.double() * values.to(vectors.device)
    scale = float(values.abs().max())
    noise = float(torch.finfo(operator.dtype).eps) * scale
    return RitzPairs(values, vectors, gone.norm(dim=0).cpu(), changes, noise, scale, products)
