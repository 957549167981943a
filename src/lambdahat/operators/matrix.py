"""Matrices that are there: dense, sparse, or anything SciPy can multiply with."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from lambdahat._check import describe, require
from lambdahat._rng import generator
from lambdahat.operators.base import LinearOperator

SYMMETRY_CHECK_COLUMNS = 4


class Matrix(LinearOperator):
    """A dense or sparse torch matrix."""

    def __init__(self, matrix: Tensor, *, symmetric: bool, psd: bool) -> None:
        super().__init__(matrix.shape[0], matrix.dtype, matrix.device, symmetric=symmetric, psd=psd)
        self.matrix = matrix

    def _apply(self, block: Tensor) -> Tensor:
        if block.shape[1] == 1:  # a sparse product with a matrix of one column takes twice as long
            return (self.matrix @ block[:, 0])[:, None]
        return self.matrix @ block

    def _apply_adjoint(self, block: Tensor) -> Tensor:
        return self._apply(block) if self.symmetric else self.matrix.mT @ block

    def known_diagonal(self) -> Tensor:
        if self.matrix.layout == torch.strided:
            return self.matrix.diagonal().clone()
        if _is_host_csr(self.matrix):
            return torch.as_tensor(_as_scipy(self.matrix).diagonal())
        entries = self.matrix.to_sparse_coo().coalesce()
        rows, columns = entries.indices()
        on = rows == columns
        return torch.zeros(self.dim, dtype=self.dtype, device=self.device).index_add_(0, rows[on], entries.values()[on])

    def known_squares(self) -> float | None:
        values = _values(self.matrix).double()
        return float((values * values).sum()) if self.symmetric else None

    def known_bounds(self) -> tuple[float, float]:
        """Gershgorin's circles: each eigenvalue lies within Σ_{j≠i}|a_ij| of some a_ii."""
        if not self.symmetric:
            return super().known_bounds()
        diagonal = self.known_diagonal().double()
        radius = self._absolute_row_sums() - diagonal.abs()
        low, high = float((diagonal - radius).min()), float((diagonal + radius).max())
        return max(low, 0.0) if self.psd else low, high

    def columns(self, indices: Sequence[int]) -> Tensor:
        if self.matrix.layout != torch.strided:
            return super().columns(indices)
        self.matvecs += len(indices)
        return self.matrix[:, list(indices)].clone()

    def rescaled(self, scale: Tensor) -> Matrix:
        """D A D with D = diag(``scale``), formed."""
        if self.matrix.layout == torch.strided:
            return Matrix(scale[:, None] * self.matrix * scale, symmetric=self.symmetric, psd=self.psd)
        entries = self.matrix.to_sparse_coo().coalesce()
        rows, columns = entries.indices()
        values = entries.values() * scale[rows] * scale[columns]
        scaled = torch.sparse_coo_tensor(entries.indices(), values, self.shape, check_invariants=True).coalesce()
        csr = self.matrix.layout == torch.sparse_csr
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            return Matrix(scaled.to_sparse_csr() if csr else scaled, symmetric=self.symmetric, psd=self.psd)

    def _absolute_row_sums(self) -> Tensor:
        """Σ_j |a_ij| (P,)."""
        if self.matrix.layout == torch.strided:
            return self.matrix.abs().sum(dim=1, dtype=torch.float64)
        if _is_host_csr(self.matrix):
            return torch.as_tensor(_as_scipy(self.matrix, self.matrix.values().abs().double()) @ np.ones(self.dim))
        entries = self.matrix.to_sparse_coo().coalesce()
        sums = torch.zeros(self.dim, dtype=torch.float64, device=self.device)
        return sums.index_add_(0, entries.indices()[0], entries.values().abs().double())

    def dense(self) -> Tensor:
        return self.matrix.to_dense().clone()


class FromScipy(LinearOperator):
    """A ``scipy.sparse.linalg.LinearOperator``, on the CPU."""

    def __init__(self, inner: Any, *, symmetric: bool, psd: bool) -> None:
        kind = np.float32 if inner.dtype is not None and np.dtype(inner.dtype) == np.float32 else np.float64
        dtype = torch.float32 if kind is np.float32 else torch.float64
        super().__init__(inner.shape[0], dtype, torch.device("cpu"), symmetric=symmetric, psd=psd)
        self.inner = inner

    def _apply(self, block: Tensor) -> Tensor:
        return torch.as_tensor(self.inner.matmat(block.numpy())).to(self.dtype, copy=True)  # it may hand out its own

    def _apply_adjoint(self, block: Tensor) -> Tensor:
        if self.symmetric:
            return self._apply(block)
        return torch.as_tensor(self.inner.rmatmat(block.numpy())).to(self.dtype, copy=True)


def operator(matrix: Any, *, symmetric: bool | None = None, psd: bool = False) -> LinearOperator:
    """A dense or sparse matrix, a numpy array or a SciPy matrix or ``LinearOperator`` as an operator.

    ``symmetric`` is checked where the entries are there, and assumed (with a check on a few random products) where
    only products are. ``psd=True`` is the caller's promise.

    >>> A = operator([[2.0, 1.0], [1.0, 3.0]])
    >>> A @ torch.tensor([1.0, 0.0])
    tensor([2., 1.], dtype=torch.float64)
    """
    if isinstance(matrix, LinearOperator):
        return matrix
    if _is_scipy_operator(matrix):
        _require_square(matrix)
        _require_real(matrix.dtype)
        _require_psd_fits(psd, symmetric is not False)
        result = FromScipy(matrix, symmetric=True if symmetric is None else symmetric, psd=psd)
        if result.symmetric:
            _require_symmetric_products(result)
        return result
    tensor = _as_tensor(matrix)
    _require_square(tensor)
    largest = _largest(tensor)
    require(math.isfinite(largest), "matrix", "hold finite numbers only", "NaN or infinity")
    if symmetric is None or symmetric:
        found = _asymmetry(tensor) <= 1e-5 * largest
        require(found or symmetric is None, "matrix", "be symmetric as declared", "an asymmetric one")
        symmetric = found
    _require_psd_fits(psd, symmetric)
    return Matrix(tensor, symmetric=symmetric, psd=psd)


def _as_tensor(matrix: Any) -> Tensor:
    if scipy.sparse.issparse(matrix):
        _require_real(matrix.dtype)
        csr = matrix.tocsr()
        csr.sum_duplicates()
        data = torch.as_tensor(csr.data if csr.data.dtype == np.float32 else csr.data.astype(np.float64))
        kind = np.int32 if max(csr.nnz, csr.shape[1]) < 2**31 else np.int64  # half the memory traffic where they fit
        parts = torch.as_tensor(csr.indptr.astype(kind)), torch.as_tensor(csr.indices.astype(kind))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            return torch.sparse_csr_tensor(*parts, data, size=csr.shape, check_invariants=True)
    try:
        array = matrix if isinstance(matrix, Tensor) else np.require(matrix, requirements="W")
        tensor = torch.as_tensor(array).detach()
    except (TypeError, ValueError) as error:
        raise TypeError(f"matrix must be a square array of numbers, got {describe(matrix)}; "
                        "for a problem call lh.hessian(problem)") from error  # fmt: skip
    tensor = tensor.coalesce() if tensor.layout == torch.sparse_coo else tensor
    require(tensor.dtype != torch.bool and not tensor.is_complex(), "matrix", "be real", str(tensor.dtype))
    if tensor.is_floating_point() and tensor.dtype in (torch.float32, torch.float64):
        return tensor
    return tensor.to(torch.float32 if tensor.is_floating_point() else torch.float64)


def _require_real(dtype: Any) -> None:
    complex_ = dtype is not None and np.issubdtype(dtype, np.complexfloating)
    require(not complex_, "matrix", "be real", str(dtype))


def _require_psd_fits(psd: bool, symmetric: bool) -> None:
    fits = symmetric or not psd
    require(fits, "matrix", "be symmetric to be positive semi-definite", "one that is not", "pass psd=False")


def _is_scipy_operator(matrix: Any) -> bool:
    from scipy.sparse.linalg import LinearOperator as ScipyOperator

    return isinstance(matrix, ScipyOperator)


def _require_square(matrix: Any) -> None:
    shape = tuple(matrix.shape)
    require(
        len(shape) == 2 and shape[0] == shape[1] and shape[0] > 0, "matrix", "be square and not empty", f"shape {shape}"
    )


def _values(matrix: Tensor) -> Tensor:
    return matrix if matrix.layout == torch.strided else matrix.values()


def _largest(matrix: Tensor) -> float:
    """max |a_ij|; NaN or infinity where an entry is."""
    values = _values(matrix)
    if not values.numel():
        return 0.0
    low, high = values.aminmax()
    return float(torch.maximum(-low, high))


def _is_host_csr(matrix: Tensor) -> bool:
    """Whether SciPy, many times faster than torch at this, can look at the entries."""
    return matrix.layout == torch.sparse_csr and matrix.device.type == "cpu"


def _as_scipy(matrix: Tensor, values: Tensor | None = None) -> Any:
    """A sparse torch matrix on the host as SciPy's, of the same memory; with other ``values`` where they are given."""
    parts = (matrix.values() if values is None else values, matrix.col_indices(), matrix.crow_indices())
    return scipy.sparse.csr_array(tuple(part.numpy() for part in parts), shape=matrix.shape)


def _asymmetry(matrix: Tensor) -> float:
    """max |A − Aᵀ|."""
    if matrix.layout == torch.strided:
        return float((matrix - matrix.T).abs().max())
    if _is_host_csr(matrix):
        csr = _as_scipy(matrix)
        other = csr.tocsc()
        # of a symmetric pattern with sorted indices the columns are the rows, and the difference that of the entries
        same = np.array_equal(csr.indptr, other.indptr) and np.array_equal(csr.indices, other.indices)
        off = csr.data - other.data if same else (csr - csr.T).data
        return float(np.abs(off).max(initial=0.0))
    difference = (matrix.to_sparse_coo() - matrix.to_sparse_coo().T).coalesce().values()
    return float(difference.abs().max()) if difference.numel() else 0.0


def _require_symmetric_products(result: LinearOperator) -> None:
    """uᵀ(Av) = vᵀ(Au) on a few random vectors; the products made are not counted."""
    block = torch.randn(result.dim, SYMMETRY_CHECK_COLUMNS, generator=generator(0, "symmetry"), dtype=result.dtype)
    gram = block.T @ (result @ block)
    result.matvecs = 0
    off = float((gram - gram.T).abs().max())
    alike = off <= 1e-4 * float(gram.abs().max()) + 1e-300
    require(alike, "matrix", "be symmetric", f"uᵀAv and vᵀAu that differ by {off:.2g}", "pass symmetric=False")
