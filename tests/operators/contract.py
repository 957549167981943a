"""What every operator promises; a test class inherits this and says what its operator and dense
matrix are.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lambdahat._core.rng import generator
from lambdahat.operators import LinearOperator


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm().clamp_min(1e-300))


class OperatorContract:
    """Subclasses give fixtures ``operator`` and ``dense`` and, where rounding allows less,
    ``tolerance``.
    """

    tolerance = 1e-9

    def block(self, operator: LinearOperator, columns: int = 5) -> Tensor:
        rng = generator(3, "contract")
        return torch.randn(operator.dim, columns, generator=rng, dtype=torch.float64).to(
            operator.dtype
        )

    def test_product_is_the_dense_matrix(self, operator: LinearOperator, dense: Tensor) -> None:
        assert relative(operator.dense().double(), dense) <= self.tolerance

    def test_vector_product(self, operator: LinearOperator, dense: Tensor) -> None:
        v = self.block(operator, 1)[:, 0]
        assert (operator @ v).shape == v.shape
        assert relative((operator @ v).double(), dense @ v.double()) <= self.tolerance

    def test_block_is_its_columns(self, operator: LinearOperator) -> None:
        block = self.block(operator)
        columns = torch.stack([operator @ column for column in block.T], dim=1)
        assert relative(operator @ block, columns) <= self.tolerance

    def test_left_product(self, operator: LinearOperator, dense: Tensor) -> None:
        rows = self.block(operator).T.contiguous()
        found = rows @ operator
        assert found.shape == rows.shape
        assert relative(found.double(), rows.double() @ dense) <= self.tolerance
        assert relative((rows[0] @ operator).double(), rows[0].double() @ dense) <= self.tolerance
        from_numpy = rows.cpu().numpy() @ operator if operator.device.type == "cpu" else found
        assert relative(from_numpy, found) <= self.tolerance

    def test_products_with_tensors_shaped_like_the_parameters(
        self, operator: LinearOperator
    ) -> None:
        if operator.space is None:
            pytest.skip("no names")
        block = self.block(operator, 2)
        vector = operator.space.unflatten(block[:, 0].contiguous())
        found = operator @ vector
        assert list(found) == list(operator.space.names)
        assert relative(operator.space.flatten(found), operator @ block[:, 0]) <= self.tolerance
        listed = operator @ list(vector.values())
        assert isinstance(listed, list)
        assert [part.shape for part in listed] == [part.shape for part in vector.values()]
        columns = tuple(part.movedim(0, -1) for part in operator.space.split(block.T.contiguous()))
        several = operator @ columns
        assert [part.shape for part in several] == [part.shape for part in columns]
        whole = torch.cat([part.reshape(-1, 2) for part in several])
        assert relative(whole, operator @ block) <= self.tolerance
        rows = operator.space.split(block.T.contiguous())
        left = torch.cat([part.reshape(2, -1) for part in rows @ operator], dim=1)
        assert relative(left, block.T.contiguous() @ operator) <= self.tolerance

    def test_linear(self, operator: LinearOperator) -> None:
        block = self.block(operator, 2)
        u, v = block.T
        assert (
            relative(operator @ (2 * u - 3 * v), 2 * (operator @ u) - 3 * (operator @ v))
            <= 10 * self.tolerance
        )

    def test_same_at_every_product(self, operator: LinearOperator) -> None:
        v = self.block(operator, 1)[:, 0]
        assert torch.equal(operator @ v, operator @ v)

    def test_declared_symmetric(self, operator: LinearOperator) -> None:
        block = self.block(operator)
        gram = block.T @ (operator @ block)
        asymmetry = relative(gram, gram.T)
        assert asymmetry <= 10 * self.tolerance if operator.symmetric else asymmetry > 1e-3

    def test_declared_psd(self, operator: LinearOperator, dense: Tensor) -> None:
        if not operator.symmetric:
            pytest.skip("not symmetric")
        values = torch.linalg.eigvalsh((dense + dense.T) / 2)
        if operator.psd:
            assert float(values[0]) >= -1e-10 * float(values[-1])

    def test_counts_products(self, operator: LinearOperator) -> None:
        before = operator.matvecs
        _ = operator @ self.block(operator, 3)
        _ = operator @ self.block(operator, 1)[:, 0]
        assert operator.matvecs - before == 4

    def test_restriction_is_the_submatrix(self, operator: LinearOperator, dense: Tensor) -> None:
        chosen = torch.arange(0, operator.dim, 3)
        block = self.block(operator)[chosen]
        expected = dense[chosen][:, chosen] @ block.double()
        assert relative((operator.restrict(chosen) @ block).double(), expected) <= self.tolerance

    def test_restriction_by_name(self, operator: LinearOperator, dense: Tensor) -> None:
        if operator.space is None:
            pytest.skip("no names")
        name = operator.space.names[-1]
        where = operator.space.slices[name]
        part = operator.restrict(name)
        assert part.space is not None
        assert part.space.names == (name,)
        assert relative(part.dense().double(), dense[where, where]) <= self.tolerance

    def test_block_diagonal(self, operator: LinearOperator, dense: Tensor) -> None:
        if operator.space is None:
            pytest.skip("no names")
        mask = torch.zeros_like(dense)
        for names in operator.space.layers().values():
            where = operator.space.indices(names)
            mask[where.unsqueeze(1), where] = 1.0
        block = self.block(operator)
        found = operator.block_diagonal() @ block
        assert relative(found.double(), (dense * mask) @ block.double()) <= self.tolerance

    def test_known_diagonal_and_trace(self, operator: LinearOperator, dense: Tensor) -> None:
        diagonal, trace = operator.known_diagonal(), operator.known_trace()
        if diagonal is not None:
            assert relative(diagonal.double(), dense.diagonal()) <= max(1e-10, self.tolerance)
        if trace is not None:
            scale = float(dense.diagonal().abs().sum())
            assert abs(trace - float(dense.trace())) <= max(1e-10, self.tolerance) * scale

    def test_known_squares_and_bounds(self, operator: LinearOperator, dense: Tensor) -> None:
        squares, (low, high) = operator.known_squares(), operator.known_bounds()
        if squares is not None:
            assert (
                abs(squares - float((dense @ dense).trace()))
                <= max(1e-10, self.tolerance) * squares
            )
        if operator.symmetric:
            values = torch.linalg.eigvalsh((dense + dense.T) / 2)
            slack = max(1e-10, self.tolerance) * float(values.abs().max())
            assert low - slack <= float(values[0])
            assert float(values[-1]) <= high + slack

    def test_columns(self, operator: LinearOperator, dense: Tensor) -> None:
        before, chosen = operator.matvecs, [operator.dim - 1, 0]
        assert relative(operator.columns(chosen).double(), dense[:, chosen]) <= self.tolerance
        assert operator.matvecs - before in (0, 2)  # those that are read are no products

    def test_scipy(self, operator: LinearOperator, dense: Tensor) -> None:
        v = self.block(operator, 2)
        product = operator.to_scipy() @ v.numpy()
        exact = (dense @ v.double()).numpy()
        assert np.linalg.norm(product - exact) <= 10 * self.tolerance * np.linalg.norm(exact)

    def test_refuses_the_wrong_length(self, operator: LinearOperator) -> None:
        with pytest.raises(ValueError, match=rf"have shape \({operator.dim},\)"):
            _ = operator @ torch.zeros(operator.dim + 1, dtype=operator.dtype)
