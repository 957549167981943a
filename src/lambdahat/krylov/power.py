"""Simultaneous power iteration: the method of the regularization thesis."""

from __future__ import annotations

import torch
from torch import Tensor

from lambdahat._core.precision import full_precision
from lambdahat._core.progress import report
from lambdahat.krylov.lanczos import random_vector, require_finite
from lambdahat.krylov.restart import ROUNDING, RitzPairs
from lambdahat.operators.base import LinearOperator

# vectors for each pair: the basis, its image, and what a QR decomposition or the Ritz vectors take
HELD = 5
ROWS = 1 << 16


def simultaneous_power_iteration(
    operator: LinearOperator,
    k: int,
    *,
    tol: float,
    max_matvecs: int,
    seed: int,
    columns: int | None = None,
) -> RitzPairs:
    """The k eigenpairs of largest magnitude: Q, R = QR(A Q) until the Ritz pairs on Q have small
    residuals.

    Algorithm 1 of "Generalizing Regularization of Neural Networks to Correlated Parameter Spaces",
    which stops when successive Q differ little. That says nothing about the values where Q turns
    slowly, so this stops when ‖Av − θv‖ ≤ tol·max|θ|, or rounding, for all Ritz pairs; the
    residuals cost no product. At most ``columns`` columns are multiplied at once. It holds
    ``HELD``·k vectors.
    """
    image = torch.stack(
        [random_vector(operator, seed, "power_iteration", column) for column in range(k)], dim=1
    )
    products = 0
    while True:
        basis = torch.linalg.qr(image).Q
        for part, product in zip(
            basis.split(columns or k, dim=1), image.split(columns or k, dim=1), strict=True
        ):
            product.copy_(operator @ part)
        products += k
        report("power_iteration", products, max_matvecs)
        require_finite(image)
        pairs = _rayleigh_ritz(operator, basis, image, products)
        if (
            float(pairs.errors.max()) <= max(tol * pairs.scale, pairs.noise)
            or products + k > max_matvecs
        ):
            return pairs
        del pairs, basis


@full_precision()
def _rayleigh_ritz(
    operator: LinearOperator, basis: Tensor, image: Tensor, products: int
) -> RitzPairs:
    """Ritz pairs on an orthonormal ``basis`` (P, k) with known ``image`` A·basis, by descending
    magnitude.
    """
    rows = range(0, len(basis), ROWS)  # the copies in float64 are of a few rows at a time
    gram = sum(basis[i : i + ROWS].double().T @ image[i : i + ROWS].double() for i in rows).cpu()  # type: ignore[union-attr]
    values, weights = torch.linalg.eigh((gram + gram.T) / 2)
    order = values.abs().argsort(descending=True, stable=True)
    values, weights = values[order], weights[:, order]
    turn = weights.to(basis)
    vectors = basis @ turn
    squares = torch.zeros_like(values, device=vectors.device)
    for i in rows:
        gone = (image[i : i + ROWS] @ turn).double() - vectors[i : i + ROWS].double() * values.to(
            vectors.device
        )
        squares += gone.square().sum(dim=0)
    scale = float(values.abs().max())
    noise = ROUNDING * float(torch.finfo(operator.dtype).eps) * scale
    residuals = squares.sqrt().cpu()
    return RitzPairs(values, vectors, residuals.clamp_min(noise), residuals, noise, scale, products)
