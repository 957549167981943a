"""Matrices that are there: every kind against its dense form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from scipy.sparse.linalg import LinearOperator as ScipyOperator
from scipy.sparse.linalg import aslinearoperator
from torch import Tensor

from lambdahat.operators import LinearOperator, operator
from lambdahat.operators.matrix import FromScipy
from tests.cases import with_eigenvalues
from tests.operators.contract import OperatorContract, relative


def banded() -> Tensor:
    """A sparse symmetric matrix with an empty row."""
    matrix = with_eigenvalues(torch.linspace(-1, 4, 23))
    matrix = matrix.tril(2).triu(-2)
    matrix[:, 5] = matrix[5] = 0.0
    return matrix


def duplicates(matrix: Tensor) -> scipy.sparse.coo_array:
    """Every entry given as two halves."""
    rows, columns = matrix.nonzero(as_tuple=True)
    values = matrix[rows, columns].numpy() / 2
    index = np.tile(rows.numpy(), 2), np.tile(columns.numpy(), 2)
    return scipy.sparse.coo_array((np.tile(values, 2), index), shape=tuple(matrix.shape))


def uncoalesced(matrix: Tensor) -> Tensor:
    given = duplicates(matrix)
    index = torch.as_tensor(np.stack([given.row, given.col]).astype(np.int64))
    return torch.sparse_coo_tensor(index, torch.as_tensor(given.data), given.shape)


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "dense": lambda m: m,
    "transposed view": lambda m: m.T,
    "list": lambda m: m.tolist(),
    "numpy": lambda m: m.numpy(),
    "numpy, Fortran order": lambda m: np.asfortranarray(m.numpy()),
    "numpy, read only": lambda m: np.broadcast_to(m.numpy(), m.shape),
    "torch COO": lambda m: m.to_sparse_coo(),
    "torch COO with duplicates": uncoalesced,
    "torch CSR": lambda m: m.to_sparse_csr(),
    "torch CSC": lambda m: m.to_sparse_csc(),
    "scipy CSR array": lambda m: scipy.sparse.csr_array(m.numpy()),
    "scipy CSC matrix": lambda m: scipy.sparse.csc_matrix(m.numpy()),
    "scipy COO with duplicates": duplicates,
    "scipy DIA": lambda m: scipy.sparse.dia_array(m.numpy()),
    "scipy operator": lambda m: aslinearoperator(m.numpy()),
    "scipy operator without matmat": lambda m: ScipyOperator(m.shape, matvec=lambda v: m.numpy() @ v, dtype=np.float64),
}


class TestForms(OperatorContract):
    tolerance = 1e-13

    @pytest.fixture(params=list(FORMS))
    @classmethod
    def operator(cls, request: pytest.FixtureRequest) -> LinearOperator:
        return operator(FORMS[request.param](banded()))

    @pytest.fixture
    @classmethod
    def dense(cls) -> Tensor:
        return banded()

    def test_what_is_declared(self, operator: LinearOperator) -> None:
        assert operator.symmetric
        assert not operator.psd
        assert operator.matvecs == 0
        assert operator.dtype == torch.float64
        assert (operator.known_trace() is None) == isinstance(operator, FromScipy)


class TestGeneral(OperatorContract):
    """Not symmetric, and said to be so."""

    tolerance = 1e-13

    @pytest.fixture(params=["dense", "torch CSR", "scipy CSR array", "scipy operator"])
    @classmethod
    def operator(cls, request: pytest.FixtureRequest) -> LinearOperator:
        return operator(FORMS[request.param](banded().triu()), symmetric=False)

    @pytest.fixture
    @classmethod
    def dense(cls) -> Tensor:
        return banded().triu()


@pytest.mark.parametrize("form", [name for name in FORMS if "operator" not in name])
def test_asymmetry_is_found(form: str) -> None:
    assert not operator(FORMS[form](banded().triu())).symmetric
    with pytest.raises(ValueError, match="matrix must be symmetric as declared"):
        operator(FORMS[form](banded().triu()), symmetric=True)


def csr(rows: list[int], columns: list[int], values: list[float]) -> Tensor:
    return torch.sparse_csr_tensor(torch.tensor(rows), torch.tensor(columns), torch.tensor(values), size=(3, 3))


@pytest.mark.filterwarnings("ignore:Sparse")
def test_symmetry_of_compressed_rows() -> None:
    rows, sorted_columns = [0, 2, 4, 5], [0, 1, 0, 1, 2]
    assert operator(csr(rows, sorted_columns, [1.0, 2.0, 2.0, 3.0, 4.0])).symmetric
    assert not operator(csr(rows, sorted_columns, [1.0, 2.0, 5.0, 3.0, 4.0])).symmetric  # its entries are not
    assert not operator(csr(rows, [0, 1, 1, 2, 0], [1.0, 2.0, 3.0, 4.0, 5.0])).symmetric  # its pattern is not
    unsorted = scipy.sparse.csr_array(([2.0, 1.0, 3.0, 2.0, 4.0], [1, 0, 1, 0, 2], rows), shape=(3, 3))
    assert operator(unsorted).symmetric


@pytest.mark.parametrize("form", ["dense", "numpy", "torch COO", "torch CSR", "scipy CSR array", "scipy operator"])
def test_float32_stays_and_is_summed_as_such(form: str) -> None:
    A = operator(FORMS[form](banded().float()))
    assert A.dtype == (A @ torch.ones(23)).dtype == torch.float32
    assert relative(A.dense().double(), banded()) < 1e-6


@pytest.mark.parametrize(
    ("matrix", "dtype"),
    [
        ([[1, 2], [2, 1]], torch.float64),
        (np.array([[1, 2], [2, 1]], dtype=np.int32), torch.float64),
        (torch.tensor([[1, 2], [2, 1]]), torch.float64),
        (torch.tensor([[1, 2], [2, 1]]).half(), torch.float32),
        (torch.tensor([[1, 2], [2, 1]]).bfloat16(), torch.float32),
        (scipy.sparse.csr_array([[1, 2], [2, 1]]), torch.float64),
        (aslinearoperator(np.array([[1, 2], [2, 1]])), torch.float64),
    ],
)
def test_other_numbers_become_floating_point(matrix: Any, dtype: torch.dtype) -> None:
    A = operator(matrix)
    assert A.dtype == dtype
    assert torch.equal(A.dense().double(), torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=torch.float64))


def test_an_operator_is_left_as_it_is() -> None:
    A = operator(banded())
    assert operator(A) is A


def test_there_and_back_through_scipy() -> None:
    A = operator(operator(banded()).to_scipy())
    assert relative(A.dense(), banded()) < 1e-14


def test_empty_sparse_matrices() -> None:
    for matrix in (torch.zeros(4, 4).to_sparse(), torch.zeros(4, 4).to_sparse_csr(), scipy.sparse.csr_array((4, 4))):
        A = operator(matrix)
        assert A.symmetric
        assert A.known_trace() == 0.0
        assert torch.equal(A.dense(), torch.zeros(4, 4, dtype=A.dtype))


@pytest.mark.parametrize("make", [torch.clone, Tensor.to_sparse_coo, Tensor.to_sparse_csr, scipy.sparse.csr_array])
def test_the_diagonal_is_that_of_products_also_after_a_change_in_place(make: Callable[[Tensor], Any]) -> None:
    matrix = make(banded())
    found = operator(matrix)
    before = found.known_diagonal()
    (matrix if isinstance(matrix, Tensor) else matrix.data).__imul__(2.0)
    assert torch.equal(found.known_diagonal(), (found @ torch.eye(found.dim, dtype=found.dtype)).diagonal())
    assert torch.equal(before, banded().diagonal())


def test_gradients_are_not_tracked() -> None:
    matrix = banded().requires_grad_()
    assert not (operator(matrix) @ torch.ones(23, dtype=torch.float64)).requires_grad


COMPLEX = np.array([[1.0, 1j], [-1j, 1.0]])


@pytest.mark.parametrize(
    ("matrix", "options", "error", "message"),
    [
        (torch.zeros(2, 3), {}, ValueError, r"matrix must be square and not empty, got shape \(2, 3\)"),
        (torch.zeros(0, 0), {}, ValueError, "be square and not empty"),
        (torch.zeros(4), {}, ValueError, "be square and not empty"),
        (scipy.sparse.csr_array((2, 3)), {}, ValueError, "be square and not empty"),
        (aslinearoperator(np.zeros((2, 3))), {}, ValueError, "be square and not empty"),
        (torch.tensor([[1.0, float("nan")], [0.0, 1.0]]), {}, ValueError, "hold finite numbers only"),
        (scipy.sparse.csr_array([[np.inf, 0], [0, 1.0]]), {}, ValueError, "hold finite numbers only"),
        (torch.tensor(COMPLEX), {}, ValueError, "matrix must be real"),
        (COMPLEX, {}, ValueError, "matrix must be real"),
        (scipy.sparse.csr_array(COMPLEX), {}, ValueError, "matrix must be real"),
        (aslinearoperator(COMPLEX), {}, ValueError, "matrix must be real"),
        (torch.ones(2, 2, dtype=torch.bool), {}, ValueError, "matrix must be real"),
        (
            aslinearoperator(np.array([[1.0, 2.0], [0.0, 1.0]])),
            {},
            ValueError,
            "matrix must be symmetric, got .* pass symmetric=False",
        ),
        (torch.tensor([[1.0, 2.0], [0.0, 1.0]]), {"psd": True}, ValueError, "matrix must be symmetric to be positive"),
        (torch.eye(2), {"psd": True, "symmetric": False}, ValueError, "matrix must be symmetric to be positive"),
        ("matrix", {}, TypeError, "matrix must be a square array of numbers"),
    ],
)
def test_misuse_is_named(matrix: Any, options: dict[str, bool], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        operator(matrix, **options)


def test_products_of_a_scipy_operator_are_the_callers_own() -> None:
    kept = np.ones((3, 1))
    A = operator(
        ScipyOperator((3, 3), matvec=lambda v: v, matmat=lambda block: kept, dtype=np.float64), symmetric=False
    )
    (A @ torch.ones(3, dtype=torch.float64)).zero_()
    assert (kept == 1).all()
