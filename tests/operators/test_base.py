"""The algebra of operators, on random small matrices and on curvature."""

from __future__ import annotations

import fractions
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lambdahat.krylov import inverse
from lambdahat.operators import LinearOperator, ggn, hessian, identity, operator
from lambdahat.operators.base import BlockDiagonal, Identity, Product
from lambdahat.problem.problem import Space
from lambdahat.results import Estimate
from tests.cases import Products, network, quadratic, with_eigenvalues
from tests.operators.contract import OperatorContract, relative
from tests.oracles import dense_ggn, dense_hessian

SPACE = Space(("a.weight", "a.bias", "b[0]"), ((2, 2), (2,), (1,)))


@st.composite
def matrices(draw: st.DrawFn, psd: bool = False) -> Tensor:
    """Symmetric 7 × 7 matrices of small integers: exact in floating point, and singular now and
    then.
    """
    entries = draw(st.lists(st.integers(-4, 4), min_size=49, max_size=49))
    matrix = torch.tensor(entries, dtype=torch.float64).reshape(7, 7)
    return matrix @ matrix.T if psd else matrix + matrix.T


numbers = st.one_of(
    st.integers(-3, 3),
    st.floats(-5, 5),
    st.sampled_from([np.float64(1.5), np.float32(-2.0), np.int64(3)]),
)


def named(matrix: Tensor, psd: bool = False) -> LinearOperator:
    """With names, and with diagonal and trace known."""
    result = operator(matrix, psd=psd)
    result.space = SPACE
    return result


def check(found: LinearOperator, dense: Tensor, known: bool = True) -> None:
    """The operator is the matrix, and what it declares and knows of it is true."""
    scale = float(dense.abs().max()) + 1.0
    assert torch.allclose(found.dense(), dense, rtol=1e-12, atol=1e-12 * scale)
    assert found.shape == tuple(dense.shape)
    if found.symmetric:
        assert torch.allclose(dense, dense.T, atol=1e-12 * scale)
    if found.psd:
        assert float(torch.linalg.eigvalsh(dense)[0]) >= -1e-10 * scale
    diagonal, trace = found.known_diagonal(), found.known_trace()
    assert (diagonal is not None, trace is not None) == (known, known)
    if diagonal is not None and trace is not None:
        assert torch.allclose(diagonal, dense.diagonal(), atol=1e-12 * scale)
        assert trace == pytest.approx(float(dense.trace()), abs=1e-11 * scale)


class TestAlgebra:
    """Exact identities on random matrices."""

    @given(matrices(), matrices())
    @settings(max_examples=25, deadline=None)
    def test_sum_and_difference(self, a: Tensor, b: Tensor) -> None:
        check(named(a) + named(b), a + b)
        check(named(a) - operator(b), a - b)
        check(named(a) - named(a), torch.zeros(7, 7, dtype=torch.float64))
        check(Products(a) + named(b), a + b, known=False)

    @given(matrices(psd=True), matrices(psd=True), numbers)
    @settings(max_examples=25, deadline=None)
    def test_declarations_of_positive_operators(self, a: Tensor, b: Tensor, c: float) -> None:
        first, second = named(a, psd=True), named(b, psd=True)
        assert (first + second).psd
        assert not (first - second).psd
        assert (c * first).psd == (c >= 0)
        for found, dense in (
            (first + second, a + b),
            (c * first, float(c) * a),
            (first @ first, a @ a),
        ):
            check(found, dense, known=not isinstance(found, Product))
        assert (first @ first).psd
        assert not (first @ second).symmetric

    @given(matrices(), numbers)
    @settings(max_examples=25, deadline=None)
    def test_scale_shift_and_negation(self, a: Tensor, c: float) -> None:
        eye = torch.eye(7, dtype=torch.float64)
        A = named(a)
        for found in (c * A, A * c):
            check(found, float(c) * a)
        check(-A, -a)
        check(A + c * identity(A), a + float(c) * eye)
        check(A - c * identity(A), a - float(c) * eye)
        if abs(c) > 1e-3:
            check(A / c, a / float(c))

    @given(matrices(), matrices())
    @settings(max_examples=25, deadline=None)
    def test_product(self, a: Tensor, b: Tensor) -> None:
        check(named(a) @ named(b), a @ b, known=False)
        A = named(a)
        square = A @ A
        assert square.symmetric
        assert square.psd
        check(square, a @ a, known=False)
        check((A @ named(b)) @ A, a @ b @ a, known=False)

    @given(matrices(), st.permutations(range(7)), st.integers(1, 7))
    @settings(max_examples=25, deadline=None)
    def test_restriction_keeps_the_order_asked_for(
        self, a: Tensor, order: list[int], count: int
    ) -> None:
        where = order[:count]
        for which in (where, torch.tensor(where), np.array(where)):
            check(named(a).restrict(which), a[where][:, where])
        again = named(a).restrict(where).restrict([count - 1])
        check(again, a[where[-1:]][:, where[-1:]])

    @given(matrices(), matrices(), numbers)
    @settings(max_examples=25, deadline=None)
    def test_restriction_and_blocks_by_name(self, a: Tensor, b: Tensor, c: float) -> None:
        found, dense = named(a) + c * operator(b), a + float(c) * b
        part = found.restrict("a.*")
        assert part.space == SPACE.subspace(["a.weight", "a.bias"])
        check(part, dense[:6, :6])
        check(found.restrict(lambda name: name == "b[0]"), dense[6:, 6:])
        mask = torch.zeros(7, 7, dtype=torch.float64)
        mask[:6, :6] = mask[6, 6] = 1
        check(found.block_diagonal(), dense * mask)
        one = torch.zeros(7, 7, dtype=torch.float64)
        one[4:6, 4:6] = 1
        check(found.block_diagonal({"bias": "a.bias"}), dense * one)

    @given(matrices(), matrices(), st.integers(0, 2**31))
    @settings(max_examples=15, deadline=None)
    def test_products_distribute(self, a: Tensor, b: Tensor, seed: int) -> None:
        v = torch.randn(7, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        A, B = named(a), named(b)
        assert torch.allclose((A + B) @ v, A @ v + B @ v)
        assert torch.allclose((A @ B) @ v, A @ (B @ v))
        assert torch.equal(A @ v[:, 0], (A @ v[:, :1])[:, 0])
        assert torch.equal(A @ v.numpy(), A @ v)


def test_identity() -> None:
    A = named(torch.eye(7, dtype=torch.float64))
    eye = identity(A)
    assert (eye.dim, eye.dtype, eye.space, eye.psd) == (7, torch.float64, SPACE, True)
    check(eye, torch.eye(7, dtype=torch.float64))
    v = torch.ones(7, dtype=torch.float64)
    image = eye @ v
    image.add_(1)  # a product is the caller's own
    assert torch.equal(v, torch.ones(7, dtype=torch.float64))
    assert Identity(3).dtype == torch.float32


def test_mixed_precision_is_promoted() -> None:
    a = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    total = operator(a) + operator(a.double())
    assert total.dtype == (total @ torch.ones(2)).dtype == torch.float64
    assert (operator(a) @ operator(a.double())).dtype == torch.float64
    assert (operator(a) @ torch.ones(2, dtype=torch.float64)).dtype == torch.float32


def test_products_are_counted_where_they_are_made() -> None:
    first, second = (Products(with_eigenvalues([1.0, 2.0, 3.0], seed)) for seed in range(2))
    total = first @ second + 2 * first
    _ = total @ torch.ones(3, 4, dtype=torch.float64)
    assert (total.matvecs, first.matvecs, second.matvecs) == (4, 8, 4)
    assert (total @ torch.zeros(3, 0, dtype=torch.float64)).shape == (3, 0)
    assert total.matvecs == 4


def test_what_is_near_passes_through_the_algebra() -> None:
    near = operator(with_eigenvalues([1.0, 2.0, 4.0]))
    A = Products(with_eigenvalues([1.0, 2.0, 3.0]), near=near)
    found = (3 * A + identity(A)).control()
    assert found is not None
    assert found.known_trace() == pytest.approx(24.0)
    assert (Products(near.matrix) + A).control() is None
    assert (A @ A).control() is None


def test_sampled_trace_is_scaled() -> None:
    class Sampled(Products):
        def sampled_trace(self, tol: float, seed: int, limit: int | None = None) -> Estimate:
            return Estimate(5.0, 0.5, dof=7)

    found = (-2 * Sampled(torch.eye(2))).sampled_trace(0.1, 0)
    assert (found.value, found.stderr, found.dof) == (-10.0, 1.0, 7)
    assert (2 * Products(torch.eye(2))).sampled_trace(0.1, 0) is None


def test_scipy_solves_with_it() -> None:
    from scipy.sparse.linalg import cg, eigsh

    matrix = with_eigenvalues([1.0, 2.0, 3.0, 5.0, 9.0])
    there = operator(matrix).to_scipy()
    assert eigsh(there, k=1, return_eigenvectors=False)[0] == pytest.approx(9.0)
    solution, status = cg(there, np.ones(5), rtol=1e-12)
    assert status == 0
    assert np.allclose(matrix.numpy() @ solution, 1.0)
    general = operator(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
    with pytest.raises(NotImplementedError):
        general.to_scipy().rmatvec(np.ones(2))


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (
            lambda A: A @ torch.zeros(3),
            ValueError,
            r"the right-hand side of @ must have shape \(7,\) or \(7, k\)",
        ),
        (lambda A: A @ torch.zeros(7, dtype=torch.long), ValueError, "be real floating point"),
        (lambda A: A @ torch.zeros(7, 2, 2), ValueError, "must have shape"),
        (
            lambda A: A + operator(torch.eye(3)),
            ValueError,
            r"the operators of \+ must have the same order, got 7 and 3",
        ),
        (
            lambda A: A @ operator(torch.eye(3)),
            ValueError,
            "the operators of @ must have the same order",
        ),
        (lambda A: A + 1, TypeError, "must be an operator, got 1; add 1 .* lh.identity"),
        (lambda A: A - torch.eye(7), TypeError, "must be an operator.*lh.operator"),
        (lambda A: A * torch.eye(7), TypeError, "factor of an operator must be one real number"),
        (lambda A: A * float("nan"), ValueError, "the factor must be finite"),
        (lambda A: A / 0, ValueError, "the divisor must not be 0"),
        (lambda A: A / A, TypeError, "divisor of an operator must be one real number"),
        (lambda A: A.restrict([0, 0]), ValueError, "which must hold each index once"),
        (lambda A: A.restrict([7]), ValueError, r"which must hold indices in \[0, 6\]"),
        (lambda A: A.restrict([-1]), ValueError, r"which must hold indices in \[0, 6\]"),
        (lambda A: A.restrict([]), ValueError, "which must be names or a non-empty 1-D list"),
        (lambda A: A.restrict(torch.ones(7, dtype=torch.bool)), ValueError, "mask.nonzero"),
        (lambda A: A.restrict("c.*"), ValueError, "parameters must match at least one of a.weight"),
        (
            lambda A: A.block_diagonal({"x": "a.*", "y": "a.bias"}),
            ValueError,
            "blocks must not overlap",
        ),
        (
            lambda A: operator(torch.eye(3)).restrict("a"),
            ValueError,
            "the operator must have named parameters",
        ),
    ],
)
def test_misuse_is_named(act: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        act(named(torch.eye(7, dtype=torch.float64)))  # type: ignore[operator]


def test_numpy_numbers_multiply_from_the_left() -> None:
    A = named(torch.eye(7, dtype=torch.float64))
    assert isinstance(np.float64(2.0) * A, LinearOperator)
    check(np.float64(2.0) * A, 2 * torch.eye(7, dtype=torch.float64))


def test_repr_says_what_it_is() -> None:
    assert repr(identity(operator(torch.eye(2)))) == "Identity(2 × 2, psd, float32, cpu)"
    assert (
        repr(operator(torch.tensor([[1.0, 2.0], [0.0, 1.0]])))
        == "Matrix(2 × 2, general, float32, cpu)"
    )


COMBINED = {
    "sum": (lambda H, G: H + G, lambda h, g: h + g),
    "difference": (lambda H, G: H - 0.5 * G, lambda h, g: h - 0.5 * g),
    "scaled": (lambda H, G: -0.5 * H, lambda h, g: -0.5 * h),
    "damped": (
        lambda H, G: G + 0.1 * identity(G),
        lambda h, g: g + 0.1 * torch.eye(len(g)).double(),
    ),
    "product": (lambda H, G: H @ G, lambda h, g: h @ g),
    "square": (lambda H, G: H @ H, lambda h, g: h @ h),
    "restricted": (lambda H, G: H.restrict(range(3, 40)), lambda h, g: h[3:40, 3:40]),
    "restricted by name": (
        lambda H, G: (H + G).restrict("2.*"),
        lambda h, g: (h + g)[30:65, 30:65],
    ),
}


class TestCombined(OperatorContract):
    """The contract for what the algebra makes of curvature operators."""

    @pytest.fixture(scope="class", params=list(COMBINED))
    @classmethod
    def case(cls, request: pytest.FixtureRequest) -> str:
        return request.param

    @pytest.fixture(scope="class")
    @classmethod
    def operator(cls, case: str) -> LinearOperator:
        problem = network("mlp")
        return COMBINED[case][0](hessian(problem), ggn(problem))

    @pytest.fixture(scope="class")
    @classmethod
    def dense(cls, case: str) -> Tensor:
        problem = network("mlp")
        return COMBINED[case][1](dense_hessian(problem), dense_ggn(problem))


class TestBlockDiagonal(OperatorContract):
    @pytest.fixture(scope="class")
    @classmethod
    def operator(cls) -> LinearOperator:
        return hessian(network("batch-norm")).block_diagonal()

    @pytest.fixture(scope="class")
    @classmethod
    def dense(cls) -> Tensor:
        dense = dense_hessian(network("batch-norm"))
        mask = torch.zeros_like(dense)
        start = 0
        for layer in (40, 8, 51):  # convolution, batch-norm, linear: weights and biases
            mask[start : start + layer, start : start + layer] = 1
            start += layer
        assert start == len(dense)
        return dense * mask


class TestInverse(OperatorContract):
    @pytest.fixture(scope="class")
    @classmethod
    def operator(cls) -> LinearOperator:
        return inverse(ggn(network("mlp")), damping=0.1, tol=1e-13)

    @pytest.fixture(scope="class")
    @classmethod
    def dense(cls) -> Tensor:
        ggn_ = dense_ggn(network("mlp"))
        return torch.linalg.inv(ggn_ + 0.1 * torch.eye(len(ggn_), dtype=torch.float64))


def test_blocks_cost_their_own_products_only() -> None:
    H = hessian(network("mlp"))
    blocks = H.block_diagonal()
    assert isinstance(blocks, BlockDiagonal)
    assert list(blocks.blocks) == ["0", "2", "4"]
    blocks.dense()
    assert {name: part.matvecs for name, part in blocks.blocks.items()} == {
        "0": 30,
        "2": 35,
        "4": 18,
    }
    assert H.matvecs == 0


def test_names_that_look_like_globs() -> None:
    problem = quadratic(with_eigenvalues([1.0, 2.0]))
    H = hessian(problem)
    assert relative(H.block_diagonal().dense(), with_eigenvalues([1.0, 2.0])) < 1e-12
    odd = Space(("w[0]", "w[1]"), ((1,), (1,)))
    A = Products(with_eigenvalues([1.0, 2.0]), space=odd)
    assert relative(A.block_diagonal().dense(), torch.diag(A.matrix.diagonal())) < 1e-12


@pytest.mark.parametrize("kind", ["reversed", "big-endian", "longdouble", "read-only", "sparse"])
def test_arrays_of_every_layout_are_read(kind: str) -> None:
    matrix = np.diag([1.0, 2.0, 4.0]) + 0.5
    op, block = operator(matrix), np.arange(6.0).reshape(3, 2)
    read_only = block.copy()
    read_only.setflags(write=False)
    rows = {
        "reversed": block[::-1].copy()[::-1],
        "big-endian": block.astype(">f8"),
        "longdouble": block.astype(np.longdouble),
        "read-only": read_only,
        "sparse": scipy.sparse.csr_array(block),
    }[kind]
    assert np.allclose((op @ rows).numpy(), matrix @ block)
    assert np.allclose((rows.T @ op).numpy(), block.T @ matrix)
    assert np.allclose(op.to_scipy() @ block[::-1], matrix @ block[::-1])
    if kind != "sparse":
        form = {"reversed": matrix[::-1].copy()[::-1], "big-endian": matrix.astype(">f8")}.get(
            kind, matrix
        )
        assert np.allclose(
            operator(form.astype(np.longdouble) if kind == "longdouble" else form).dense(), matrix
        )


FACTORS = [2, np.float32(2.0), np.array(2.0), torch.tensor(2.0), fractions.Fraction(2)]


@pytest.mark.parametrize("factor", FACTORS, ids=repr)
def test_factors_are_numbers_of_every_kind(factor: Any) -> None:
    op = operator(np.diag([1.0, 2.0]))
    for scaled in (factor * op, op * factor, op / (1 / factor)):
        assert torch.equal(scaled.dense(), 2.0 * op.dense())
