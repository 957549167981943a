"""Random probe vectors: Rademacher, Gaussian, or uniform on the sphere, and how many of them an
error needs.

All have mean 0 and covariance I, so that E[zᵀAz] = tr A (Hutchinson 1990).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lambdahat._core.check import require, require_choice, require_count, require_positive
from lambdahat._core.rng import generator
from lambdahat.operators.base import LinearOperator

KINDS = ("rademacher", "gaussian", "sphere")
FOURTH_MOMENTS = {"rademacher": 1.0, "gaussian": 3.0, "sphere": 3.0, "orthogonal": 3.0}
BLOCK_COLUMNS = 64
BLOCK_ELEMENTS = 2**26
COLUMN = 3.0  # vectors for each column of a block: itself, its product, and what is made of both


def block_columns(operator: LinearOperator, each: float = COLUMN, held: float = 0.0) -> int:
    """Columns to multiply at once: at most 64, fewer if they would fill the memory or its budget.

    In a budget each column takes ``each`` vectors (P,) beside what its product does, and ``held``
    vectors are there already.
    """
    most, budget = max(1, min(BLOCK_COLUMNS, BLOCK_ELEMENTS // operator.dim)), operator.budget()
    if budget is None:
        return most
    left, column = _left_and_column(operator, each, held)
    expected = (
        f"hold {column:,.0f} bytes for one column of {operator.dim:,} numbers at a time, "
        "beside graphs and what is kept"
    )
    got = f"{budget:,}, of which {max(left, 0.0):,.0f} are left"
    require(left >= column, "memory", expected, got, "raise it, or choose fewer parameters")
    return int(min(most, left // column))


def crowded(
    operator: LinearOperator, columns: int, each: float = COLUMN, held: float = 0.0
) -> bool:
    """Whether so many columns at once exceed the problem's memory budget, if it has one."""
    if operator.budget() is None:
        return False
    left, column = _left_and_column(operator, each, held)
    return left < columns * column


def _left_and_column(operator: LinearOperator, each: float, held: float) -> tuple[float, float]:
    """The bytes left in the budget, and those that one column takes."""
    vector = operator.dim * torch.promote_types(operator.dtype, torch.float32).itemsize
    return operator.room(1.0) - held * vector, each * vector + operator.column_bytes()


def block_sizes(
    count: int, operator: LinearOperator, each: float = COLUMN, held: float = 0.0
) -> list[int]:
    """``count`` columns cut into blocks."""
    step = block_columns(operator, each, held)
    return [min(step, count - start) for start in range(0, count, step)]


class Probes:
    """A stream of probes for one operator: ``draw(k)`` gives the next k as a block (P, k).

    Column j of the stream depends on ``(seed, name, j)`` only, however it is cut into blocks, and
    on no dtype or device: it is drawn on the CPU, column after column, and then moved.
    """

    def __init__(self, operator: LinearOperator, kind: str, seed: int, name: str) -> None:
        self.kind = require_choice(kind, "probe", KINDS)
        self.dim, self.device = operator.dim, operator.device
        self.dtype = torch.promote_types(operator.dtype, torch.float32)
        self._stream = generator(seed, name, kind)

    def draw(self, count: int) -> Tensor:
        """The next ``count`` probes, (P, count)."""
        block = torch.empty(self.dim, count, dtype=self.dtype, device=self.device)
        for column in block.T:
            if self.kind == "rademacher":
                column.copy_(self._signs())
            else:
                column.copy_(torch.randn(self.dim, dtype=torch.float32, generator=self._stream))
        if self.kind == "sphere":
            block *= self.dim**0.5 / torch.linalg.vector_norm(block, dim=0)
        return block

    def _signs(self) -> Tensor:
        """±1 from the bits of random bytes: fewer draws and a smaller transfer than floats."""
        size = (-(-self.dim // 8),)
        octets = torch.randint(0, 256, size, dtype=torch.uint8, generator=self._stream)
        places = torch.arange(8, dtype=torch.uint8, device=self.device)
        bits = (octets.to(self.device)[:, None] >> places) & 1
        return bits.reshape(-1)[: self.dim].to(self.dtype).mul_(2).sub_(1)


def probes_for(tol: float, dim: int, kind: str = "sphere", condition: float | None = None) -> int:
    """The number of probes that give tr φ(A)/P, |φ| ≤ 1, a standard error of at most ``tol``.

    Lemma 1 of the spectral thesis: Var(uᵀHu) ≤ (2 + m₄)·tr H² for a probe u whose elements have
    variance 1 and fourth moment m₄ (1 for Rademacher, 3 for Gaussian), and tr φ(A)² ≤ P. With the
    ``condition`` number κ of a positive definite A it is for tr A itself, to a relative ``tol``:
    Var/mean² ≤ (2 + m₄)/(1 + (P − 1)/κ²) (Eq. 2.34).

    >>> probes_for(0.01, 1000), probes_for(0.01, 1000, "rademacher")
    (50, 30)
    """
    require_positive(tol, "tol")
    require_count(dim, "dim")
    variance = 2 + FOURTH_MOMENTS[require_choice(kind, "kind", tuple(FOURTH_MOMENTS))]
    if condition is None:
        return max(2, math.ceil(variance / (dim * tol**2)))
    require(condition >= 1, "condition", "be at least 1", repr(condition))
    return max(2, math.ceil(variance / (1 + (dim - 1) / condition**2) / tol**2))


def unit_blocks(
    operator: LinearOperator, control: LinearOperator | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """The identity in blocks (where, I[:, where]) that fit beside what ``control`` keeps too."""
    step = block_columns(operator if control is None else operator - control, held=1)
    for start in range(0, operator.dim, step):
        where = slice(start, min(start + step, operator.dim))
        width = where.stop - start
        block = torch.zeros(operator.dim, width, dtype=operator.dtype, device=operator.device)
        block[where].fill_diagonal_(1.0)
        yield where, block


def column_dots(first: Tensor, second: Tensor) -> Tensor:
    """xⱼᵀyⱼ of the columns of two blocks (P, k), summed in float64: a tensor (k,) on the CPU."""
    return (first * second.to(first.dtype)).sum(dim=0, dtype=torch.float64).cpu()
