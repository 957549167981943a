"""Small problems that the tests share, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lambdahat._rng import generator
from lambdahat.models import mlp
from lambdahat.operators import LinearOperator
from lambdahat.problem import Problem
from lambdahat.space import Space


def classifier(
    sizes: Sequence[int] = (4, 5, 3),
    activation: str = "relu",
    samples: int = 20,
    batch_size: int | None = 7,
    seed: int = 0,
) -> Problem:
    """An MLP with cross-entropy on Gaussian inputs and random labels."""
    rng = generator(seed, "classifier")
    x = torch.randn(samples, sizes[0], generator=rng, dtype=torch.float64)
    y = torch.randint(0, sizes[-1], (samples,), generator=rng)
    return Problem(mlp(sizes, activation, seed).double(), "cross_entropy", (x, y), batch_size=batch_size)


def quadratic(matrix: Tensor, slope: Tensor | None = None, theta: Tensor | None = None) -> Problem:
    """L(θ) = ½θᵀAθ + bᵀθ with no data, at θ = 0 unless told."""
    at = torch.zeros(len(matrix), dtype=matrix.dtype) if theta is None else theta
    linear = torch.zeros_like(at) if slope is None else slope
    return Problem.from_function(lambda p: 0.5 * p["theta"] @ matrix @ p["theta"] + linear @ p["theta"], {"theta": at})


def with_eigenvalues(values: Tensor | Sequence[float], seed: int = 0) -> Tensor:
    """A dense symmetric matrix with the given spectrum, in a random basis."""
    spectrum = torch.as_tensor(values, dtype=torch.float64)
    draw = torch.randn(len(spectrum), len(spectrum), generator=generator(seed, "basis"), dtype=torch.float64)
    turn = torch.linalg.qr(draw).Q
    matrix = turn @ torch.diag(spectrum) @ turn.T
    return (matrix + matrix.T) / 2


class Products(LinearOperator):
    """A matrix known by its products only, so that nothing about it is exact; ``near`` is its control variate."""

    def __init__(
        self, matrix: Tensor, near: LinearOperator | None = None, symmetric: bool = True, space: Space | None = None
    ) -> None:
        super().__init__(len(matrix), matrix.dtype, matrix.device, symmetric=symmetric, space=space)
        self.matrix, self.near = matrix, near

    def _apply(self, block: Tensor) -> Tensor:
        return self.matrix @ block

    def control(self) -> LinearOperator | None:
        return self.near


def spectra(size: int = 300) -> dict[str, Tensor]:
    """Dense matrices with the kinds of spectra that estimators meet; "network" is like a trained network's Hessian."""
    rng = generator(0, "spectra")
    index = torch.arange(1.0, size + 1, dtype=torch.float64)
    normal = torch.randn(size, 2 * size, generator=rng, dtype=torch.float64)
    bulk = torch.randn(size, generator=rng, dtype=torch.float64).exp()
    network = torch.cat([bulk[: size // 3], -0.3 * bulk[size // 3 : size // 2], 1e-3 * bulk[size // 2 :]])
    network[:10] = torch.linspace(50, 500, 10, dtype=torch.float64)
    balanced = torch.randn(size, generator=rng, dtype=torch.float64)
    balanced[:10] = torch.tensor([40.0, -40.0] * 5, dtype=torch.float64)
    symmetric = (normal[:, :size] + normal[:, :size].T) / (2 * size) ** 0.5
    return {
        "flat": normal @ normal.T / (2 * size),
        "decaying": with_eigenvalues(0.9**index),
        "power law": with_eigenvalues(1 / index),
        "network": with_eigenvalues(network),
        "indefinite": symmetric + 0.5 * torch.eye(size, dtype=torch.float64),
        "no trace": with_eigenvalues(balanced - balanced.mean()),
    }
