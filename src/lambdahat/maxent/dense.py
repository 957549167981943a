"""Products and factors of dense matrices of a few hundred columns, by torch, on numpy's arrays.

numpy's and SciPy's BLAS have threads of their own, which spin for up to a tenth of a second after a
call and take the core that torch's next operation waits for. torch's LAPACK shares the threads of
its other operations.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lambdahat.maxent.bases import Array


def product(first: Array, second: Array) -> Array:
    """``first`` @ ``second``, of matrices and vectors."""
    return np.asarray((_tensor(first) @ _tensor(second)).numpy())


def triangle(rows: Array) -> Array:
    """Upper triangular R (m, m) with RᵀR = AᵀA for ``rows`` A (N, m), N ≥ m, by QR."""
    return np.asarray(torch.linalg.qr(_tensor(rows), mode="r").R.numpy())


def solve_triangle(factor: Array, right: Array, transposed: bool = False) -> Array:
    """R⁻¹b, or R⁻ᵀb, for ``factor`` R (m, m) upper triangular and ``right`` b (m,) or (m, k).

    Where R is singular it is not finite.
    """
    matrix, columns = _tensor(factor), _tensor(right if right.ndim == 2 else right[:, None])
    found = torch.linalg.solve_triangular(
        matrix.T if transposed else matrix, columns, upper=not transposed
    )
    return np.asarray(found.reshape(right.shape).numpy())


def least_squares(rows: Array, right: Array, cutoff: float) -> Array:
    """The shortest x that minimises ‖Ax − b‖ for ``rows`` A (N, m), N > m, and ``right`` b (N,).

    By the singular values of A's triangle R; those below ``cutoff`` times the largest count as 0.
    The last column of the triangle of (A, b) is Qᵀb. LAPACK's own driver for this ends torch with
    an internal error where b has a NaN.
    """
    joint = _tensor(triangle(np.column_stack([rows, right])))
    left, values, back = torch.linalg.svd(joint[:-1, :-1])
    kept = values > cutoff * values[0]
    return np.asarray((back[kept].T @ ((left.T @ joint[:-1, -1])[kept] / values[kept])).numpy())


def _tensor(array: Array) -> Tensor:
    """The same memory as a tensor, or a copy of what torch refuses or warns of: read-only,
    reversed, not float64.
    """
    return torch.from_numpy(np.require(array, np.float64, ("C", "W")))
