"""Kernel matrices against scikit-learn's, formed and in blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lambdahat._core.rng import generator
from lambdahat.operators.kernel_matrix import kernel_matrix
from tests.operators.contract import OperatorContract

POINTS = torch.randn(40, 3, generator=generator(0, "kernels"), dtype=torch.float64)
KINDS = ("squared_exponential", "exponential", "matern12", "matern32", "matern52")


def foreign(kind, points, length_scale):
    from sklearn.gaussian_process.kernels import RBF, Matern

    order = {"exponential": 0.5, "matern12": 0.5, "matern32": 1.5, "matern52": 2.5}
    kernel = (
        RBF(length_scale) if kind == "squared_exponential" else Matern(length_scale, nu=order[kind])
    )
    return torch.as_tensor(kernel(points.numpy()))


class TestFormed(OperatorContract):
    @pytest.fixture(params=KINDS)
    def kind(self, request):
        return request.param

    @pytest.fixture
    def operator(self, kind):
        return kernel_matrix(POINTS, kind, 0.7, noise=0.1, variance=2.0)

    @pytest.fixture
    def dense(self, kind):
        return 2.0 * foreign(kind, POINTS, 0.7) + 0.1 * torch.eye(40, dtype=torch.float64)


class TestBlocked(TestFormed):
    """Rows in blocks of 7, of which the last is shorter."""

    @pytest.fixture
    def operator(self, kind):
        return kernel_matrix(POINTS, kind, 0.7, noise=0.1, variance=2.0, memory=3 * 7 * 40 * 8)

    def test_rows_at_a_time(self, operator):
        assert operator.rows == 7
        assert operator.known_squares() is None


class TestSingle(TestFormed):
    tolerance = 1e-5

    @pytest.fixture
    def operator(self, kind):
        return kernel_matrix(POINTS.float(), kind, 0.7, noise=0.1, variance=2.0)


def test_one_length_scale_a_dimension():
    scales = [0.5, 1.0, 2.0]
    found = kernel_matrix(POINTS, "matern32", scales).dense()
    assert torch.allclose(found, foreign("matern32", POINTS, scales), atol=1e-12)


def test_columns_squares_and_bounds_are_those_of_the_matrix():
    K = kernel_matrix(POINTS, noise=0.05, variance=1.5)
    dense = K.dense()
    before = K.matvecs
    assert torch.allclose(K.columns([3, 17]), dense[:, [3, 17]], atol=1e-14)
    assert K.matvecs - before == 2
    assert K.known_squares() == pytest.approx(float(dense.square().sum()), rel=1e-12)
    low, high = K.known_bounds()
    values = torch.linalg.eigvalsh(dense)
    assert low <= float(values[0]) * (1 + 1e-9)
    assert float(values[-1]) <= high


def test_near_duplicates_keep_their_digits():
    """Points 1e-9 apart at a distance of 1e3 from the origin: inner products would lose them."""
    points = torch.tensor([[1e3], [1e3 + 1e-9], [1e3 + 2e-9]], dtype=torch.float64)
    apart = (points - points.T).abs()
    found = kernel_matrix(points, "exponential", length_scale=1e-9).dense()
    assert torch.allclose(found, torch.exp(-apart / 1e-9), rtol=1e-6)


def test_integers_and_lists_are_points():
    assert kernel_matrix([[0], [1]], "exponential").dense()[0, 1] == pytest.approx(np.exp(-1.0))
    assert kernel_matrix(np.zeros((2, 1), np.float32)).dtype is torch.float32


MISUSES = {
    "kind unknown": (
        lambda: kernel_matrix(POINTS, "cubic"),
        ValueError,
        "kind must be one of 'squared_exponential'",
    ),
    "one dimension": (
        lambda: kernel_matrix([1.0, 2.0]),
        ValueError,
        r"shape \(n, d\).*pass points\[:, None\]",
    ),
    "no points": (lambda: kernel_matrix(np.zeros((0, 2))), ValueError, "not be empty"),
    "NaN": (lambda: kernel_matrix([[np.nan]]), ValueError, "points must hold finite numbers only"),
    "words": (lambda: kernel_matrix([["a"]]), TypeError, "points must be an array of numbers"),
    "complex": (lambda: kernel_matrix(np.ones((2, 1), complex)), TypeError, "points must be real"),
    "length scale of 0": (
        lambda: kernel_matrix(POINTS, length_scale=0),
        ValueError,
        "length_scale must be a finite",
    ),
    "two length scales": (
        lambda: kernel_matrix(POINTS, length_scale=[1.0, 2.0]),
        ValueError,
        "or 3 of them",
    ),
    "negative noise": (
        lambda: kernel_matrix(POINTS, noise=-1.0),
        ValueError,
        "noise must be a finite number of",
    ),
    "no variance": (lambda: kernel_matrix(POINTS, variance=0.0), ValueError, "variance must be"),
    "no memory": (lambda: kernel_matrix(POINTS, memory=0), ValueError, "memory must be"),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_names_the_argument(misuse):
    call, error, text = MISUSES[misuse]
    with pytest.raises(error, match=text):
        call()
