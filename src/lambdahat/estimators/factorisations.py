"""Exact log-determinants: Cholesky of a dense matrix, LU of a sparse one, where they fit into
the memory.
"""

from __future__ import annotations

import math

import numpy as np
import scipy.sparse
import torch
from scipy.sparse.csgraph import reverse_cuthill_mckee

from lambdahat._core.check import require
from lambdahat.krylov import BREAKDOWN, require_finite
from lambdahat.operators.base import LinearOperator
from lambdahat.operators.matrix import Matrix
from lambdahat.operators.rounding import MANY, rounding_of
from lambdahat.problem.batches import free_memory
from lambdahat.results import Array, Estimate, Status

CURE = "add a shift: operator + delta * identity(operator)"
EPSILON = float(np.finfo(np.float64).eps)
# the error of log det for each eigenvalue up to which it is called one of rounding alone
SURE = 0.05
FACTOR_ENTRY = 2 * (8 + 4)  # bytes of an entry and its mirror image, each a number and an index


def exact_logdet(operator: LinearOperator, scale: float = 1.0) -> Estimate:
    """By Cholesky, or LU without exchanges for a sparse matrix, whose pivots are positive exactly
    for positive A.

    The standard error is what the rounding of its products makes of it, to first order, where the
    entries are not there: √(tr A⁻²) times ε‖A‖, or times the rounding inside a model. Errors quote
    eigenvalues times ``scale``.
    """
    if isinstance(operator, Matrix) and operator.matrix.layout != torch.strided:
        return _of_pivots(_sparse_pivots(operator, scale))
    _require_room(3 * 8 * operator.dim**2, operator)
    before, matrix = operator.matvecs, operator.dense().double()
    require_finite(matrix)
    matrix = (matrix + matrix.T) / 2
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if int(failed):
        require_positive_eigenvalue(
            scale * min(float(torch.linalg.eigvalsh(matrix)[0]), 0.0), "eigenvalue"
        )
    error = noise = 0.0
    if not isinstance(operator, Matrix):
        size = float(torch.linalg.matrix_norm(matrix, math.inf)) * float(
            torch.finfo(operator.dtype).eps
        )
        inverse, model = torch.cholesky_inverse(factor), rounding_of(operator, MANY)
        noise = 0.0 if model is None else model.random.error
        largest = inverse.abs().max()  # squares of the entries may leave the range
        error = max(size, noise) * float(largest * torch.linalg.matrix_norm(inverse / largest))
    return _of_pivots(
        factor.diagonal().square().cpu().numpy(), error, operator.matvecs - before, noise
    )


def require_positive_eigenvalue(least: float, kind: str, after: str = "") -> None:
    """Raise where an eigenvalue is known not to be positive."""
    require(
        least > 0,
        "the operator of logdet",
        "be positive definite",
        f"the {kind} {least:.3g}{after}",
        CURE,
    )


def _of_pivots(pivots: Array, error: float = 0.0, cost: int = 0, noise: float = 0.0) -> Estimate:
    """Σ log of the pivots; PRECISION_LIMIT where the least may be rounding of 0, or rounding
    moves them all by much.
    """
    least, largest = float(pivots.min()), float(pivots.max())
    fine = least > max(BREAKDOWN * EPSILON * largest, noise) and error <= SURE * len(pivots)
    status = Status.CONVERGED if fine else Status.PRECISION_LIMIT
    return Estimate(float(np.log(pivots).sum()), error, cost, status)


def _sparse_pivots(operator: Matrix, scale: float) -> Array:
    """The pivots of SuperLU in symmetric mode."""
    from scipy.sparse.linalg import splu

    entries = operator.matrix.to_sparse_coo().coalesce().cpu()
    places, values = entries.indices().numpy(), entries.values().double().numpy()
    matrix = scipy.sparse.csc_array((values, places), shape=operator.shape)
    if FACTOR_ENTRY * operator.dim**2 // 2 > free_memory(torch.device("cpu")):
        _require_room(FACTOR_ENTRY * _envelope(matrix), operator)
    try:
        factors = splu(
            matrix,
            permc_spec="MMD_AT_PLUS_A",
            diag_pivot_thresh=0.0,
            options={"SymmetricMode": True},
        )
    except RuntimeError:  # a pivot of exactly 0
        require_positive_eigenvalue(0.0, "pivot")
        raise
    pivots = factors.U.diagonal()
    kept = bool((factors.perm_r == factors.perm_c).all())
    require_positive_eigenvalue(scale * float(pivots.min()) if kept else 0.0, "pivot")
    return np.asarray(pivots)


def _envelope(matrix: scipy.sparse.csc_array) -> int:
    """Entries of the Cholesky factor at most, in the order of Cuthill and McKee: it stays within
    the envelope.

    SuperLU's own order, minimum degree, fills no more as a rule, and is not known before it has
    run.
    """
    place = np.empty(matrix.shape[0], dtype=np.int64)
    place[reverse_cuthill_mckee(matrix.tocsr(), symmetric_mode=True)] = np.arange(matrix.shape[0])
    entries = matrix.tocoo()
    rows = np.arange(matrix.shape[0])
    first = rows.copy()
    np.minimum.at(first, place[entries.row], place[entries.col])
    return int((rows - first + 1).sum())


def _require_room(need: int, operator: LinearOperator) -> None:
    sparse = isinstance(operator, Matrix) and operator.matrix.layout != torch.strided
    bound = operator.budget() is not None and not sparse
    free = (
        operator.room(1.0)
        if bound
        else free_memory(torch.device("cpu") if sparse else operator.device)
    )
    where = "what is left of the problem's memory" if bound else "the free memory"
    require(
        need <= free,
        "method",
        f"fit into {where}, {free:,.0f} bytes",
        f"'exact', which {'may need' if sparse else 'needs'} {need:,}",
        'call logdet(operator, "slq")',
    )
