"""Matrices that are there: every kind against its dense form."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import linear_operator
import numpy as np
import pytest
import scipy.sparse
import torch
from linear_operator import operators as lazy
from scipy.sparse.linalg import LinearOperator as ScipyOperator
from scipy.sparse.linalg import aslinearoperator
from torch import Tensor

import lambdahat as lh
from lambdahat._core.rng import generator
from lambdahat.operators import LinearOperator, identity, operator
from lambdahat.operators.matrix import FromScipy, FromTorchOperator
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
    "linear_operator, dense": lambda m: linear_operator.to_linear_operator(m),
    "linear_operator, sum": lambda m: (
        lazy.DenseLinearOperator(m - torch.eye(len(m), dtype=m.dtype))
        + lazy.DiagLinearOperator(m.new_ones(len(m)))
    ),
    "linear_operator, by blocks": lambda m: lazy.InterpolatedLinearOperator(m),
    "scipy operator without matmat": lambda m: ScipyOperator(
        m.shape, matvec=lambda v: m.numpy() @ v, dtype=np.float64
    ),
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
        assert operator.known_trace() in (None, pytest.approx(float(banded().trace())))


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


# those are refused
@pytest.mark.parametrize("form", [name for name in FORMS if "operator" not in name])
def test_asymmetry_is_found(form: str) -> None:
    assert not operator(FORMS[form](banded().triu())).symmetric
    with pytest.raises(ValueError, match="matrix must be symmetric as declared"):
        operator(FORMS[form](banded().triu()), symmetric=True)


def csr(rows: list[int], columns: list[int], values: list[float]) -> Tensor:
    return torch.sparse_csr_tensor(
        torch.tensor(rows), torch.tensor(columns), torch.tensor(values), size=(3, 3)
    )


@pytest.mark.filterwarnings("ignore:Sparse")
def test_symmetry_of_compressed_rows() -> None:
    rows, sorted_columns = [0, 2, 4, 5], [0, 1, 0, 1, 2]
    assert operator(csr(rows, sorted_columns, [1.0, 2.0, 2.0, 3.0, 4.0])).symmetric
    # its entries are not
    assert not operator(csr(rows, sorted_columns, [1.0, 2.0, 5.0, 3.0, 4.0])).symmetric
    # its pattern is not
    assert not operator(csr(rows, [0, 1, 1, 2, 0], [1.0, 2.0, 3.0, 4.0, 5.0])).symmetric
    unsorted = scipy.sparse.csr_array(
        ([2.0, 1.0, 3.0, 2.0, 4.0], [1, 0, 1, 0, 2], rows), shape=(3, 3)
    )
    assert operator(unsorted).symmetric


@pytest.mark.parametrize(
    "form", ["dense", "numpy", "torch COO", "torch CSR", "scipy CSR array", "scipy operator"]
)
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
    assert torch.equal(
        A.dense().double(), torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=torch.float64)
    )


def test_an_operator_is_left_as_it_is() -> None:
    A = operator(banded())
    assert operator(A) is A


@pytest.mark.parametrize("threads", [1, 64])  # SciPy's product in few threads, torch's in many
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sparse_products_in_few_and_in_many_threads(
    monkeypatch: pytest.MonkeyPatch, threads: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr("lambdahat.operators.matrix.FEW_ENTRIES", 0)
    dense = with_eigenvalues(torch.linspace(-1, 3, 30)).to(dtype)
    dense[dense.abs() < 0.05] = 0
    held = operator(dense.to_sparse_csr())
    vector = torch.randn(30, 3, generator=generator(0, "strided"), dtype=torch.float64).to(dtype)[
        :, 1
    ]
    product = held @ vector
    assert product.dtype == dtype
    torch.testing.assert_close(product, dense @ vector)
    first, again = product.clone(), held @ (2 * vector)
    assert torch.equal(product, first), "a product must own its memory"
    torch.testing.assert_close(again, 2 * first)


def test_sparse_products_stay_differentiable() -> None:
    dense = with_eigenvalues(torch.linspace(1, 2, 6))
    vector = torch.ones(6, dtype=torch.float64, requires_grad=True)
    (operator(dense.to_sparse_csr()) @ vector).sum().backward()
    torch.testing.assert_close(vector.grad, dense.sum(dim=0))


def test_there_and_back_through_scipy() -> None:
    A = operator(operator(banded()).to_scipy())
    assert relative(A.dense(), banded()) < 1e-14


def test_empty_sparse_matrices() -> None:
    for matrix in (
        torch.zeros(4, 4).to_sparse(),
        torch.zeros(4, 4).to_sparse_csr(),
        scipy.sparse.csr_array((4, 4)),
    ):
        A = operator(matrix)
        assert A.symmetric
        assert A.known_trace() == 0.0
        assert torch.equal(A.dense(), torch.zeros(4, 4, dtype=A.dtype))


@pytest.mark.parametrize(
    "make", [torch.clone, Tensor.to_sparse_coo, Tensor.to_sparse_csr, scipy.sparse.csr_array]
)
def test_the_diagonal_is_that_of_products_also_after_a_change_in_place(
    make: Callable[[Tensor], Any],
) -> None:
    matrix = make(banded())
    found = operator(matrix)
    before = found.known_diagonal()
    (matrix if isinstance(matrix, Tensor) else matrix.data).__imul__(2.0)
    assert torch.equal(
        found.known_diagonal(), (found @ torch.eye(found.dim, dtype=found.dtype)).diagonal()
    )
    assert torch.equal(before, banded().diagonal())


def test_gradients_are_not_tracked() -> None:
    matrix = banded().requires_grad_()
    assert not (operator(matrix) @ torch.ones(23, dtype=torch.float64)).requires_grad


COMPLEX = np.array([[1.0, 1j], [-1j, 1.0]])


@pytest.mark.parametrize(
    ("matrix", "options", "error", "message"),
    [
        (
            torch.zeros(2, 3),
            {},
            ValueError,
            r"matrix must be square and not empty, got shape \(2, 3\)",
        ),
        (torch.zeros(0, 0), {}, ValueError, "be square and not empty"),
        (torch.zeros(4), {}, ValueError, "be square and not empty"),
        (scipy.sparse.csr_array((2, 3)), {}, ValueError, "be square and not empty"),
        (aslinearoperator(np.zeros((2, 3))), {}, ValueError, "be square and not empty"),
        (
            torch.tensor([[1.0, float("nan")], [0.0, 1.0]]),
            {},
            ValueError,
            "hold finite numbers only",
        ),
        (
            scipy.sparse.csr_array([[np.inf, 0], [0, 1.0]]),
            {},
            ValueError,
            "hold finite numbers only",
        ),
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
        (
            torch.tensor([[1.0, 2.0], [0.0, 1.0]]),
            {"psd": True},
            ValueError,
            "matrix must be symmetric to be positive",
        ),
        (
            torch.eye(2),
            {"psd": True, "symmetric": False},
            ValueError,
            "matrix must be symmetric to be positive",
        ),
        ("matrix", {}, TypeError, "matrix must be a square array of numbers"),
    ],
)
def test_misuse_is_named(
    matrix: Any, options: dict[str, bool], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        operator(matrix, **options)


def test_products_of_a_scipy_operator_are_the_callers_own() -> None:
    kept = np.ones((3, 1))
    A = operator(
        ScipyOperator((3, 3), matvec=lambda v: v, matmat=lambda block: kept, dtype=np.float64),
        symmetric=False,
    )
    (A @ torch.ones(3, dtype=torch.float64)).zero_()
    assert (kept == 1).all()


CALLS: dict[str, Callable[[Any], Any]] = {
    "trace": lambda a: lh.trace(a),
    "diagonal": lambda a: lh.diagonal(a).value,
    "frobenius_norm": lambda a: lh.frobenius_norm(a),
    "spectral_norm": lambda a: lh.spectral_norm(a),
    "eigenpairs": lambda a: lh.eigenpairs(a, k=3).values,
    "power_iteration": lambda a: lh.power_iteration(a, k=1).values,
    "spectrum": lambda a: lh.spectrum(a, depth=8).nodes,
    "moments": lambda a: lh.moments(a, 4, bounds=(-10.0, 10.0)).values,
    "trace_function": lambda a: lh.trace_function(a, np.exp, depth=10),
    "logdet": lambda a: lh.logdet(a),
    "inverse": lambda a: lh.inverse(a) @ torch.ones(23, dtype=torch.float64),
    "identity": lambda a: lh.identity(a).dense(),
    "effective_dimensions": lambda a: lh.singular.effective_dimensions(a, z=0.1).n_eff,
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("form", FORMS)
def test_functions_of_an_operator_take_matrices(call: str, form: str) -> None:
    """The same number from the matrix as from the operator made of its dense form."""
    found = np.asarray(CALLS[call](FORMS[form](shifted())), dtype=float)
    assert found == pytest.approx(of_the_operator(call), rel=1e-8, abs=1e-8)


def shifted() -> Tensor:
    return banded() + 6 * torch.eye(23, dtype=torch.float64)


@cache
def of_the_operator(call: str) -> np.ndarray:
    return np.asarray(CALLS[call](operator(shifted())), dtype=float)


def test_what_is_no_matrix_is_named() -> None:
    for call in CALLS.values():
        with pytest.raises(TypeError, match=r"must be .*operator.* matrix.*, got"):
            call("words")
        with pytest.raises(ValueError, match="be square and not empty"):
            call(np.ones((3, 4)))


def gaussians(size: int = 300) -> Tensor:
    draw = torch.randn(size, size, generator=generator(0, "entries"), dtype=torch.float64)
    return (draw + draw.T) / 2


SYMMETRIC: dict[str, Tensor] = {
    "random entries": gaussians(),
    "eigenvalues 1 to 300": with_eigenvalues(torch.linspace(1, 300, 300)),
    "the identity": torch.eye(300, dtype=torch.float64),
    "rounded to float32": gaussians().float().double().triu() + gaussians().double().tril(-1),
}


@pytest.mark.parametrize("name", SYMMETRIC)
@pytest.mark.parametrize("place", [(7, 250), (299, 0), (100, 101)])
def test_one_asymmetric_entry_of_many_is_found(name: str, place: tuple[int, int]) -> None:
    matrix = SYMMETRIC[name].clone()
    assert operator(aslinearoperator(matrix.numpy())).symmetric
    assert operator(lazy.InterpolatedLinearOperator(matrix)).symmetric
    matrix[place] += 1e-3
    for form in ("scipy operator", "scipy operator without matmat", "linear_operator, by blocks"):
        with pytest.raises(
            ValueError, match=r"matrix must be symmetric, got uᵀAv and vᵀAu.*symmetric=False"
        ):
            operator(FORMS[form](matrix))


def test_symmetry_is_judged_by_the_rounding_of_the_products() -> None:
    """A solver that stops early, and products in float32, are symmetric as far as they tell."""
    matrix = with_eigenvalues(torch.logspace(0, 3, 120)).numpy()
    factor = np.linalg.inv(matrix)

    def solve(b: np.ndarray) -> np.ndarray:
        x = factor @ b
        return x * (1 + 1e-6 * np.sin(1e9 * x / np.abs(x).max()))

    assert operator(ScipyOperator((120, 120), matvec=solve, dtype=np.float64)).symmetric
    rough = ScipyOperator(
        (120, 120), matvec=lambda b: matrix.astype(np.float32) @ b.astype(np.float32), dtype=float
    )
    assert operator(rough).symmetric
    assert operator(aslinearoperator(gaussians(1000).float().numpy())).symmetric


def test_structures_of_linear_operator_stay_known() -> None:
    values = torch.linspace(1, 3, 40, dtype=torch.float64)
    matrix = with_eigenvalues(values)
    noisy = lazy.AddedDiagLinearOperator(
        lazy.DenseLinearOperator(matrix),
        lazy.ConstantDiagLinearOperator(torch.tensor([0.5], dtype=torch.float64), 40),
    )
    found = operator(noisy)
    assert found.known_squares() == pytest.approx(float((values + 0.5).square().sum()))
    assert float(lh.logdet(noisy)) == pytest.approx(float((values + 0.5).log().sum()))
    doubled = operator(2.0 * lazy.DenseLinearOperator(matrix))
    assert relative(doubled.dense(), 2 * matrix) < 1e-14
    root = operator(lazy.RootLinearOperator(matrix))
    assert root.psd
    assert relative(root.dense(), matrix @ matrix) < 1e-13
    toeplitz = operator(lazy.ToeplitzLinearOperator(torch.tensor([2.0, -1.0, 0.0, 0.0])))
    assert isinstance(toeplitz, FromTorchOperator)
    assert toeplitz.dense().trace() == 8
    with pytest.raises(ValueError, match="be square and not empty"):
        operator(lazy.DenseLinearOperator(torch.ones(5, 3, 3)))
    with pytest.raises(ValueError, match="be symmetric"):
        operator(lazy.TriangularLinearOperator(matrix.tril()))


def test_products_of_linear_operator_track_no_gradient() -> None:
    matrix = banded().requires_grad_()
    found = operator(lazy.InterpolatedLinearOperator(matrix))
    assert not (found @ torch.ones(23, dtype=torch.float64)).requires_grad
    assert not found.known_diagonal().requires_grad


def test_the_identity_of_a_matrix() -> None:
    assert torch.equal(identity(np.eye(3)).dense(), torch.eye(3, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bounds_of_sparse_rows_and_one_view_of_them(dtype, monkeypatch):
    """Rows without entries too; SciPy checks its view once, not at every product."""
    dense = torch.zeros(7, 7, dtype=dtype)
    dense[0, 3] = dense[3, 0] = -2.0
    dense[3, 3], dense[5, 5], dense[5, 6], dense[6, 5] = 1.5, -4.0, 0.5, 0.5
    sparse, views, make = operator(dense.to_sparse_csr()), [], scipy.sparse.csr_array
    monkeypatch.setattr(scipy.sparse, "csr_array", lambda *a, **k: views.append(0) or make(*a, **k))
    assert sparse.known_bounds() == operator(dense).known_bounds() == (-4.5, 3.5)
    v = torch.arange(7, dtype=dtype)
    for _ in range(5):
        assert torch.equal(sparse @ v, dense @ v)
    assert len(views) == 1
