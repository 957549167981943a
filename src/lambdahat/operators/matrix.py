"""Matrices that are there: dense, sparse, or anything that SciPy or ``linear_operator`` can
multiply with.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Sequence
from functools import cached_property, reduce
from typing import Any, Protocol

import numpy as np
import scipy
import torch
from torch import Tensor

from lambdahat._core.check import describe, message, require
from lambdahat._core.rng import generator
from lambdahat.operators.base import Identity, LinearOperator, Scaled, Sum, read_array

SYMMETRY_CHECK_COLUMNS = 8
# how far rounding, as the linearity of the products shows it, may leave uᵀAv from vᵀAu
SYMMETRY_NOISE = 20.0
# of ‖A‖_F: entries that were rounded to float32 on either side of the diagonal
SYMMETRY_SHARE = 4e-7
# up to which a sparse product is SciPy's, in one thread
FEW_THREADS, FEW_ENTRIES = 4, 500_000


class _Shaped(Protocol):
    @property
    def shape(self) -> Any: ...


OperatorLike = LinearOperator | Tensor | _Shaped | Sequence[Sequence[float]]
"""What every function of an operator takes: an operator or a matrix, as ``operator`` reads it."""


class Matrix(LinearOperator):
    """A dense or sparse torch matrix."""

    def __init__(self, matrix: Tensor, *, symmetric: bool, psd: bool) -> None:
        super().__init__(matrix.shape[0], matrix.dtype, matrix.device, symmetric=symmetric, psd=psd)
        self.matrix = matrix

    def _apply(self, block: Tensor) -> Tensor:
        if block.shape[1] != 1:
            return self.matrix @ block
        column = block[:, 0]
        if _is_host_csr(self.matrix):
            # SciPy's product runs in one thread, where it takes a quarter of torch's time: 0.21
            # against 0.79 ms for 33,000 rows of 7 entries, 12 against 58 ms for a million. NumPy
            # knows no graphs.
            values = self.matrix.values()
            few = torch.get_num_threads() <= FEW_THREADS or len(values) <= FEW_ENTRIES
            graphs = torch.is_grad_enabled() and (values.requires_grad or column.requires_grad)
            if few and not graphs:
                return torch.from_numpy(self._csr @ column.detach().numpy())[:, None]
        # of a sparse matrix and a matrix of one column torch's product takes twice as long
        return (self.matrix @ column)[:, None]

    @cached_property
    def _csr(self) -> Any:
        """SciPy's view of a sparse matrix, whose checks take longer than a small product."""
        return _as_scipy(self.matrix)

    def _apply_adjoint(self, block: Tensor) -> Tensor:
        return self._apply(block) if self.symmetric else self.matrix.mT @ block

    def known_diagonal(self) -> Tensor:
        if self.matrix.layout == torch.strided:
            return self.matrix.diagonal().clone()
        if _is_host_csr(self.matrix):
            return torch.as_tensor(self._csr.diagonal())
        (rows, columns), values = self._entries()
        on = rows == columns
        diagonal = torch.zeros(self.dim, dtype=self.dtype, device=self.device)
        return diagonal.index_add_(0, rows[on], values[on])

    def _entries(self) -> tuple[Tensor, Tensor]:
        """Indices (2, N) and values (N,) of a sparse matrix."""
        entries = self.matrix.to_sparse_coo().coalesce()
        return entries.indices(), entries.values()

    def known_squares(self) -> float | None:
        values = _values(self.matrix).double().flatten()
        return float(torch.dot(values, values)) if self.symmetric else None

    def known_bounds(self) -> tuple[float, float]:
        """Gershgorin's circles: each eigenvalue lies within Σ_{j≠i}|a_ij| of some a_ii."""
        if not self.symmetric:
            return super().known_bounds()
        diagonal = self.known_diagonal().double()
        radius = self._absolute_row_sums() - diagonal.abs()
        low, high = float((diagonal - radius).min()), float((diagonal + radius).max())
        return max(low, 0.0) if self.psd else low, high

    def columns(self, indices: Sequence[int]) -> Tensor:
        """A[:, indices] (P, k), read off a dense matrix without a product."""
        if self.matrix.layout != torch.strided:
            return super().columns(indices)
        return self.matrix[:, list(indices)].clone()

    def rescaled(self, scale: Tensor) -> Matrix:
        """D A D with D = diag(``scale``), formed."""
        facts = {"symmetric": self.symmetric, "psd": self.psd}
        if self.matrix.layout == torch.strided:
            return Matrix(scale[:, None] * self.matrix * scale, **facts)
        indices, values = self._entries()
        values = values * scale[indices[0]] * scale[indices[1]]
        scaled = torch.sparse_coo_tensor(indices, values, self.shape, check_invariants=True)
        scaled = scaled.coalesce()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            csr = self.matrix.layout == torch.sparse_csr
            return Matrix(scaled.to_sparse_csr() if csr else scaled, **facts)

    def _absolute_row_sums(self) -> Tensor:
        """Σ_j |a_ij| (P,)."""
        if self.matrix.layout == torch.strided:
            return self.matrix.abs().sum(dim=1, dtype=torch.float64)
        if _is_host_csr(self.matrix):
            starts, found = self._csr.indptr[:-1], np.zeros(self.dim)
            filled = np.diff(self._csr.indptr) > 0
            absolute = np.abs(self._csr.data)
            found[filled] = np.add.reduceat(absolute, starts[filled], dtype=np.float64)
            return torch.from_numpy(found)
        indices, values = self._entries()
        sums = torch.zeros(self.dim, dtype=torch.float64, device=self.device)
        return sums.index_add_(0, indices[0], values.abs().double())

    def dense(self) -> Tensor:
        return self.matrix.to_dense().clone()


class FromScipy(LinearOperator):
    """A ``scipy.sparse.linalg.LinearOperator``, on the CPU."""

    def __init__(self, inner: Any, *, symmetric: bool, psd: bool) -> None:
        single = inner.dtype is not None and np.dtype(inner.dtype) == np.float32
        dtype = torch.float32 if single else torch.float64
        super().__init__(inner.shape[0], dtype, torch.device("cpu"), symmetric=symmetric, psd=psd)
        self.inner = inner

    def _apply(self, block: Tensor) -> Tensor:
        # it may hand out its own
        return torch.as_tensor(self.inner.matmat(block.numpy())).to(self.dtype, copy=True)

    def _apply_adjoint(self, block: Tensor) -> Tensor:
        if self.symmetric:
            return self._apply(block)
        return torch.as_tensor(self.inner.rmatmat(block.numpy())).to(self.dtype, copy=True)


class FromTorchOperator(LinearOperator):
    """A ``linear_operator.LinearOperator`` of GPyTorch, known by products and its diagonal."""

    def __init__(self, inner: Any, *, symmetric: bool, psd: bool) -> None:
        dtype = inner.dtype if inner.dtype in (torch.float32, torch.float64) else torch.float32
        super().__init__(inner.shape[-1], dtype, inner.device, symmetric=symmetric, psd=psd)
        self.inner = inner

    @torch.no_grad()
    def _apply(self, block: Tensor) -> Tensor:
        return _evaluate(self.inner @ block.to(self.inner.dtype)).to(self.dtype, copy=True)

    @torch.no_grad()
    def known_diagonal(self) -> Tensor:
        return _evaluate(self.inner.diagonal(dim1=-1, dim2=-2)).detach().to(self.dtype, copy=True)

    @torch.no_grad()
    def columns(self, indices: Sequence[int]) -> Tensor:
        self.matvecs += len(indices)
        found = self.inner[:, torch.as_tensor(indices, device=self.device)]
        return _evaluate(found).to(self.dtype, copy=True)

    @torch.no_grad()
    def dense(self) -> Tensor:
        return self.inner.to_dense().to(self.dtype, copy=True)  # type: ignore[no-any-return]


def operator(matrix: Any, *, symmetric: bool | None = None, psd: bool = False) -> LinearOperator:
    """Wrap a matrix as an operator.

    Dense and sparse torch tensors, NumPy arrays and nested lists, SciPy's sparse matrices and
    ``LinearOperator``, and the operators of ``linear_operator`` and GPyTorch. Functions that take
    an operator take all of these directly.

    Args:
        matrix: The matrix.
        symmetric: Checked if the entries are available. If only products are, symmetry is assumed,
            and checked on random vectors up to the rounding of the products.
        psd: The caller's promise that the matrix is positive semi-definite.

    Raises:
        ValueError: If the matrix is not square, real and finite, or not symmetric where it has to
            be.
        TypeError: If it is not a matrix.

    >>> A = operator([[2.0, 1.0], [1.0, 3.0]])
    >>> A @ torch.tensor([1.0, 0.0])
    tensor([2., 1.], dtype=torch.float64)
    """
    if isinstance(matrix, LinearOperator):
        return matrix
    module = sys.modules.get("linear_operator")  # imported already if the matrix is one of its
    if module is not None and isinstance(matrix, module.LinearOperator):
        return _from_torch_operator(matrix, symmetric, psd)
    array = isinstance(matrix, Tensor | np.ndarray)
    if not array and hasattr(matrix, "shape") and hasattr(matrix, "matvec"):
        return _from_scipy_operator(matrix, symmetric, psd)
    tensor = _as_tensor(matrix)
    _require_square(tensor)
    largest = _largest(tensor)
    require(math.isfinite(largest), "matrix", "hold finite numbers only", "NaN or infinity")
    if symmetric is None or symmetric:
        found = _asymmetry(tensor) <= 1e-5 * largest
        fits = found or symmetric is None
        require(fits, "matrix", "be symmetric as declared", "an asymmetric one")
        symmetric = found
    _require_psd_fits(psd, symmetric)
    return Matrix(tensor, symmetric=symmetric, psd=psd)


def as_operator(
    given: Any,
    name: str = "operator",
    expected: str = "be an operator or a matrix",
    cure: str = "for a problem call lh.hessian(problem)",
) -> LinearOperator:
    """The operator that a function was given, or the matrix that it was given as one."""
    if isinstance(given, LinearOperator):
        return given
    try:
        return operator(given)
    except TypeError as error:
        if isinstance(given, np.ndarray):  # a matrix, whose dtype is what is wrong
            raise
        raise TypeError(f"{name} must {expected}, got {describe(given)}; {cure}") from error


def identity(like: OperatorLike) -> Identity:
    """The identity with another operator's order, dtype, device and names."""
    like = as_operator(like)
    return Identity(like.dim, like.dtype, like.device, like.space)


def _from_scipy_operator(matrix: Any, symmetric: bool | None, psd: bool) -> LinearOperator:
    """SciPy's ``LinearOperator``, or anything with ``shape`` and ``matvec``."""
    from scipy.sparse.linalg import aslinearoperator

    given = aslinearoperator(matrix)
    _require_square(given)
    _require_real(given.dtype)
    _require_psd_fits(psd, symmetric is not False)
    result = FromScipy(given, symmetric=symmetric is not False, psd=psd)
    if result.symmetric:
        _require_symmetric_products(result)
    return result


def _from_torch_operator(matrix: Any, symmetric: bool | None, psd: bool) -> LinearOperator:
    """Entries, diagonals, sums and multiples as our own; the rest by its products."""
    from linear_operator import operators as kinds

    _require_square(matrix)
    require(not matrix.dtype.is_complex, "matrix", "be real", str(matrix.dtype))
    size, dtype, device = matrix.shape[-1], matrix.dtype, matrix.device
    # a kernel of GPyTorch between two sets of inputs
    if hasattr(matrix, "kernel") and hasattr(matrix, "x1"):
        alike = matrix.x1.shape == matrix.x2.shape and bool((matrix.x1 == matrix.x2).all())
        return _from_torch_operator(matrix.evaluate_kernel(), symmetric, psd=psd or alike)
    if isinstance(matrix, kinds.DenseLinearOperator):
        return operator(matrix.to_dense(), symmetric=symmetric, psd=psd)
    if isinstance(matrix, kinds.IdentityLinearOperator):
        return Identity(size, dtype, device)
    if isinstance(matrix, kinds.DiagLinearOperator):
        values = matrix.diagonal(dim1=-1, dim2=-2).detach()
        if isinstance(matrix, kinds.ConstantDiagLinearOperator):
            return Scaled(Identity(size, dtype, device), float(values[0]))
        places = torch.arange(size, device=device).expand(2, -1)
        return operator(torch.sparse_coo_tensor(places, values, (size, size)).coalesce(), psd=psd)
    if isinstance(matrix, kinds.SumLinearOperator) and symmetric is None:
        return reduce(Sum, (_from_torch_operator(part, None, False) for part in matrix.linear_ops))
    if isinstance(matrix, kinds.ConstantMulLinearOperator) and symmetric is None:
        inner = _from_torch_operator(matrix.base_linear_op, None, False)
        return Scaled(inner, float(matrix.expanded_constant))
    _require_psd_fits(psd, symmetric is not False)
    squares = kinds.RootLinearOperator, kinds.LowRankRootLinearOperator
    psd = psd or isinstance(matrix, squares)
    result = FromTorchOperator(matrix, symmetric=symmetric is not False, psd=psd)
    if result.symmetric:
        _require_symmetric_products(result)
    return result


def _evaluate(product: Any) -> Tensor:
    """The entries of what ``linear_operator`` may have left to be computed."""
    return product if isinstance(product, Tensor) else product.to_dense()


def _as_tensor(matrix: Any) -> Tensor:
    if scipy.sparse.issparse(matrix):
        _require_real(matrix.dtype)
        csr = matrix.tocsr()
        csr.sum_duplicates()
        single = csr.data.dtype == np.float32
        data = torch.as_tensor(csr.data if single else csr.data.astype(np.float64))
        # half the memory traffic where they fit
        kind = np.int32 if max(csr.nnz, csr.shape[1]) < 2**31 else np.int64
        parts = torch.as_tensor(csr.indptr.astype(kind)), torch.as_tensor(csr.indices.astype(kind))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            return torch.sparse_csr_tensor(*parts, data, size=csr.shape, check_invariants=True)
    try:
        tensor = read_array(matrix, "matrix").detach()
    except TypeError as error:
        got, cure = describe(matrix), "for a problem call lh.hessian(problem)"
        if isinstance(matrix, np.ndarray):
            got = f"{got} and dtype {matrix.dtype}"
            cure = "array.astype(float) makes one of real numbers"
        raise TypeError(message("matrix", "be a square array of numbers", got, cure)) from error
    tensor = tensor.coalesce() if tensor.layout == torch.sparse_coo else tensor
    real = tensor.dtype != torch.bool and not tensor.is_complex()
    require(real, "matrix", "be real", str(tensor.dtype))
    if tensor.is_floating_point() and tensor.dtype in (torch.float32, torch.float64):
        return tensor
    return tensor.to(torch.float32 if tensor.is_floating_point() else torch.float64)


def _require_real(dtype: Any) -> None:
    complex_ = dtype is not None and np.issubdtype(dtype, np.complexfloating)
    require(not complex_, "matrix", "be real", str(dtype))


def _require_psd_fits(psd: bool, symmetric: bool) -> None:
    expected, got = "be symmetric to be positive semi-definite", "one that is not"
    require(symmetric or not psd, "matrix", expected, got, "pass psd=False")


def _require_square(matrix: Any) -> None:
    shape = tuple(matrix.shape)
    square = len(shape) == 2 and shape[0] == shape[1] and shape[0] > 0
    require(square, "matrix", "be square and not empty", f"shape {shape}")


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


def _as_scipy(matrix: Tensor) -> Any:
    """A sparse CSR matrix on the host as SciPy's, sharing memory."""
    parts = (matrix.values(), matrix.col_indices(), matrix.crow_indices())
    return scipy.sparse.csr_array(
        tuple(part.detach().numpy() for part in parts), shape=matrix.shape
    )


def _asymmetry(matrix: Tensor) -> float:
    """max |A − Aᵀ|."""
    if matrix.layout == torch.strided:
        return float((matrix - matrix.T).abs().max())
    if _is_host_csr(matrix):
        csr = _as_scipy(matrix)
        other = csr.tocsc()
        # of a symmetric pattern with sorted indices the columns are the rows, and the difference
        # that of the entries
        same = np.array_equal(csr.indptr, other.indptr)
        same = same and np.array_equal(csr.indices, other.indices)
        if same and np.array_equal(csr.data, other.data):
            return 0.0
        off = csr.data - other.data if same else (csr - csr.T).data
        return float(np.abs(off).max(initial=0.0))
    difference = (matrix.to_sparse_coo() - matrix.to_sparse_coo().T).coalesce().values()
    return float(difference.abs().max()) if difference.numel() else 0.0


def _require_symmetric_products(result: LinearOperator) -> None:
    """uᵀ(Av) = vᵀ(Au) on random vectors, to the rounding of the products, which are not counted.

    How far A(u + v) is from Au + Av shows that rounding. An asymmetry of δ in one entry shows as
    δ·(u_iv_j − u_jv_i), which for one of 28 pairs is 0.5·δ or more.
    """
    rng, shape = generator(0, "symmetry"), (result.dim, SYMMETRY_CHECK_COLUMNS)
    block = torch.randn(*shape, generator=rng, dtype=torch.float64).to(result.device, result.dtype)
    together = block.sum(dim=1, dtype=torch.float64).to(result.dtype)
    images = (result @ torch.cat([block, together[:, None]], dim=1)).double()
    result.matvecs = 0
    block = block.double()
    gram = block.T @ images[:, :-1]
    unlinear = float((block.T @ (images[:, :-1].sum(dim=1) - images[:, -1])).abs().max())
    size = math.sqrt(float(images[:, :-1].square().sum(dim=0).mean()))  # E‖Au‖² is ‖A‖²_F
    off = float((gram - gram.T).abs().max())
    alike = off <= SYMMETRY_NOISE * unlinear + SYMMETRY_SHARE * size
    got = f"uᵀAv and vᵀAu that differ by {off:.2g}"
    cure = "pass symmetric=False: lh.operator(A, symmetric=False)"
    require(alike, "matrix", "be symmetric", got, cure)
