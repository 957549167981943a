"""A mass that follows the curvature of each tensor of parameters, by a Kronecker product."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_SIDE = 1024  # of a tensor seen as a matrix: longer ones are not rotated


@dataclass(frozen=True)
class KroneckerScale:
    """S of a mass (S·Sᵀ)⁻¹ that is block-diagonal over tensors: the block of one is (Q₁ ⊗
    Q₂)·diag(s).

    A tensor is seen as a matrix with a row for each entry of its first dimension; Q₁ rotates the
    rows and Q₂ the columns (None: not rotated). ``values`` are the s of all tensors, flat. Vectors
    are (…, P).
    """

    shapes: tuple[tuple[int, int], ...]
    rows: tuple[Tensor | None, ...]
    columns: tuple[Tensor | None, ...]
    values: Tensor

    def times(self, vectors: Tensor) -> Tensor:
        """S v."""
        return self._rotated(vectors * self.values, back=True)

    def transposed(self, vectors: Tensor) -> Tensor:
        """Sᵀ v."""
        return self._rotated(vectors, back=False).mul_(self.values)

    def solve(self, vectors: Tensor) -> Tensor:
        """S⁻¹ v."""
        return self._rotated(vectors, back=False).div_(self.values)

    @property
    def tensors(self) -> list[Tensor]:
        """What it is made of."""
        return [self.values, *(q for q in (*self.rows, *self.columns) if q is not None)]

    def to(self, like: Tensor) -> KroneckerScale:
        """The same on another device, in another precision."""
        rows, columns = (
            [None if q is None else q.to(like) for q in side] for side in (self.rows, self.columns)
        )
        return KroneckerScale(self.shapes, tuple(rows), tuple(columns), self.values.to(like))

    def _rotated(self, vectors: Tensor, back: bool) -> Tensor:
        rotated = torch.empty_like(vectors)
        begin = 0
        for (height, width), left, right in zip(self.shapes, self.rows, self.columns, strict=True):
            part = slice(begin, begin := begin + height * width)
            block = vectors[..., part].unflatten(-1, (height, width))
            if left is not None:
                block = (left if back else left.T) @ block
            if right is not None:
                block = block @ (right.T if back else right)
            rotated[..., part] = block.flatten(-2)
        return rotated

    @property
    def products(self) -> int:
        """Multiplications of one application to a vector, for the forecast of its cost."""
        pairs = zip(self.shapes, self.rows, self.columns, strict=True)
        return sum(
            h * w * ((left is not None) * h + (right is not None) * w)
            for (h, w), left, right in pairs
        )


class CurvatureMoments:
    """Row and column curvature of each tensor, averaged over places where chains have been.

    At equilibrium the mean Hessian of nβL is E[f·gᵀ] with f = nβ∇L and g = ∇U, by integration by
    parts. With f and g seen as matrices F and G, the mean of F·Gᵀ is the Hessian summed over
    columns, that of Fᵀ·G over rows. Where f and g come from independent batches, their noise
    averages out.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], like: Tensor) -> None:
        self.shapes = tuple(
            (shape[0], math.prod(shape[1:])) if shape else (1, 1) for shape in shapes
        )
        self._sides = [
            (_square(h, like) if w > 1 else None, _square(w, like)) for h, w in self.shapes
        ]
        self._totals = torch.zeros(len(self.shapes), dtype=torch.float64)
        self._count, self._like = 0, like

    def add(self, data: Tensor, force: Tensor) -> None:
        """Count nβ∇L and ∇U, (vectors, P) each."""
        self._count += len(data)
        begin = 0
        for index, ((height, width), (rows, columns)) in enumerate(
            zip(self.shapes, self._sides, strict=True)
        ):
            part = slice(begin, begin := begin + height * width)
            first, second = (
                vectors[:, part].unflatten(-1, (height, width)) for vectors in (data, force)
            )
            self._totals[index] += float((first * second).sum())
            if rows is not None:
                rows += torch.einsum("kiw,kjw->ij", first, second)
            if columns is not None:
                columns += torch.einsum("khi,khj->ij", first, second)

    def scale(self, localization: float) -> KroneckerScale:
        """S with (S·Sᵀ)⁻¹ about nβH + γ, tensor by tensor.

        A tensor's Hessian is taken for the Kronecker product of its two sums over its trace. Their
        eigenvalues are drawn towards their mean by how few vectors there were.
        """
        rows, columns, values = [], [], []
        for (height, width), (over, along), summed in zip(
            self.shapes, self._sides, self._totals, strict=True
        ):
            trace = max(float(summed) / self._count, 0.0)
            left, ups = self._side(over, height, width, trace)
            right, downs = self._side(along, width, height, trace)
            # clamped eigenvalues may come to more than the trace
            total = max(float(ups.sum()), float(downs.sum()))
            product = torch.outer(ups, downs) / (total if total > 0 else 1.0)
            rows.append(left)
            columns.append(right)
            values.append((product + localization).rsqrt().flatten())
        return KroneckerScale(self.shapes, tuple(rows), tuple(columns), torch.cat(values))

    @property
    def finite(self) -> bool:
        """Whether all forces were finite."""
        return bool(self._totals.isfinite().all())

    def _side(
        self, total: Tensor | None, size: int, others: int, trace: float
    ) -> tuple[Tensor | None, Tensor]:
        """Eigenvectors and eigenvalues of one side of a tensor; None and their mean where it is
        not rotated.
        """
        mean = trace / max(size, 1)
        if total is None:
            return None, torch.full((size,), mean, dtype=self._like.dtype, device=self._like.device)
        found, vectors = torch.linalg.eigh((total + total.T) / (2 * self._count))
        seen = self._count * others
        share = seen / (seen + size)
        return vectors, share * found.clamp_min(0) + (1 - share) * mean


def _square(size: int, like: Tensor) -> Tensor | None:
    if size > LARGEST_SIDE or size <= 1:
        return None
    return torch.zeros(size, size, dtype=like.dtype, device=like.device)
