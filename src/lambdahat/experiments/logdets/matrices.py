"""Sparse matrices whose log-determinant is known: Laplacians of grids, and the stiffness matrix
bcsstk16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse
import torch

from lambdahat._core.rng import generator
from lambdahat.estimators import logdet
from lambdahat.experiments.kit.store import outside_file
from lambdahat.operators.matrix import Matrix, operator
from lambdahat.results import Array

STIFFNESS = "bcsstk16"
STAND_IN = (30, 31)  # sides of the grid in place of bcsstk16
DECADES = 9  # over which its diagonal entries spread


@dataclass(frozen=True)
class Known:
    """A positive definite matrix, its log-determinant, its eigenvalues (n,) where asked for, and
    where it is from.
    """

    operator: Matrix
    log_determinant: float
    eigenvalues: Callable[[], Array]
    data: str


def laplacian(sides: tuple[int, ...], shift: float = 0.0) -> tuple[Any, Array]:
    """−Δ on a grid with fixed ends plus ``shift``, as CSR (n, n), and its eigenvalues Σ_i (2 − 2cos
    πk_i/(s_i + 1)).

    >>> laplacian((2,), 1.0)[0].toarray()
    array([[ 3., -1.],
           [-1.,  3.]])
    """
    matrix, values = scipy.sparse.csr_array((1, 1)), np.zeros(1)
    for side in sides:
        ones = np.ones(side)
        line = scipy.sparse.diags_array([-ones[1:], 2 * ones, -ones[1:]], offsets=[-1, 0, 1])
        modes = 2 - 2 * np.cos(np.pi * np.arange(1, side + 1) / (side + 1))
        matrix = scipy.sparse.kron(matrix, scipy.sparse.eye_array(side)) + scipy.sparse.kron(
            scipy.sparse.eye_array(matrix.shape[0]), line
        )
        values = (values[:, None] + modes).ravel()
    return (matrix + shift * scipy.sparse.eye_array(len(values))).tocsr(), values + shift


def grid(sides: tuple[int, ...]) -> Known:
    """The Laplacian of a grid."""
    matrix, values = laplacian(sides)
    found = _operator(matrix)
    return Known(
        found, float(np.log(values).sum()), lambda: values, f"{' × '.join(map(str, sides))} grid"
    )


def stiffness(scaled: bool) -> Known:
    """bcsstk16, or with its diagonal ``scaled`` to 1; without the file a grid of entries over
    nine decades.
    """
    path = outside_file("matrices", f"{STIFFNESS}_full")
    found = _operator(
        _uneven() if path is None else scipy.sparse.load_npz(path).tocsr().astype(np.float64)
    )
    if scaled:
        found = found.rescaled(found.known_diagonal().rsqrt())
    words = (
        STIFFNESS if path is not None else f"grid over {DECADES} decades for {STIFFNESS} (no file)"
    )
    exact = float(logdet(found, "exact"))
    return Known(
        found, exact, partial(_dense_eigenvalues, found), words + (", scaled" if scaled else "")
    )


def _operator(matrix: Any) -> Matrix:
    found = operator(matrix, psd=True)
    assert isinstance(found, Matrix)
    return found


def _dense_eigenvalues(found: Matrix) -> Array:
    return np.asarray(np.linalg.eigvalsh(found.dense().numpy()))


def _uneven() -> Any:
    """S(−Δ)S with the squares of S spread evenly over nine decades."""
    matrix, values = laplacian(STAND_IN)
    powers = torch.rand(
        len(values), generator=generator(0, "uneven grid"), dtype=torch.float64
    ).numpy()
    scale = scipy.sparse.diags_array(10 ** (DECADES / 2 * powers))
    return (scale @ matrix @ scale).tocsr()
