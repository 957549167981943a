"""Matrices of §4.5 of the spectral thesis: random ones with a limit law, and one like a
network's Hessian.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lambdahat._core.rng import generator
from lambdahat.randommatrix.laws import Law, MarchenkoPastur, Semicircle

WIGNER = "Wigner"
LAWS: dict[str, Law] = {
    WIGNER: Semicircle(1.0),
    "covariance, T = 2P": MarchenkoPastur(1.0, 0.5),
    "covariance, T = P/2": MarchenkoPastur(1.0, 2.0),
}
KNOWN = "known spectrum"
# of the eigenvalues, uniform on an interval
SHARES = ((0.47, 0.0, 15.0), (0.02, 0.0, 60.0), (0.01, -10.0, 0.0))


def known_values(size: int, seed: int) -> Tensor:
    """Eigenvalues (P,) of §4.5.2: 470 on [0, 15], 20 on [0, 60] and 10 on [−10, 0] of 1,000, the
    others 0.
    """
    rng = generator(seed, "known spectrum")
    parts = [
        low + (high - low) * torch.rand(round(share * size), generator=rng, dtype=torch.float64)
        for share, low, high in SHARES
    ]
    values = torch.cat(parts)
    return torch.cat([values, torch.zeros(size - len(values), dtype=torch.float64)])


def known_matrix(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """The eigenvalues and the matrix (P, P) with these in a random basis."""
    values = known_values(size, seed)
    draw = torch.randn(size, size, generator=generator(seed, "basis"), dtype=torch.float64)
    basis = torch.linalg.qr(draw).Q
    return values, _symmetric((basis * values) @ basis.T)


def law_matrix(name: str, size: int, seed: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """The eigenvalues and a random matrix (P, P) of one of ``LAWS``, the eigenvalues found on
    ``device``.
    """
    matrix = _wigner(size, seed) if name == WIGNER else _symmetric(LAWS[name].sample(size, seed))
    return torch.linalg.eigvalsh(matrix.to(device)).cpu(), matrix


def _wigner(size: int, seed: int) -> Tensor:
    """All elements of variance 1/P, as in the thesis; the law's own sample has 2/P on the
    diagonal.
    """
    draw: Tensor = torch.randn(size, size, generator=generator(seed, "wigner"), dtype=torch.float64)
    return draw.triu().add(draw.triu(1).T).div(math.sqrt(size))


def unit_start(size: int, seed: int, *names: object) -> Tensor:
    """A start vector (P,), uniform on the sphere."""
    draw = torch.randn(size, generator=generator(seed, "start", *names), dtype=torch.float64)
    return torch.nn.functional.normalize(draw, dim=0)


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.T) / 2
