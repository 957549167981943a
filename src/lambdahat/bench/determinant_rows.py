"""Rows: the log-determinant of a sparse matrix, beside SuperLU and linear_operator's stochastic quadrature."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import splu
from torch import Tensor

from lambdahat._rng import generator
from lambdahat.bench.limits import Limit
from lambdahat.bench.plans import Plan, rows
from lambdahat.bench.records import OURS, UNIT, BenchRow
from lambdahat.bench.timing import Maker, Run
from lambdahat.estimators.determinants import logdet
from lambdahat.experiments.logdets.matrices import laplacian
from lambdahat.operators.matrix import operator

SHIFT = 0.05


@dataclass(frozen=True)
class Cube:
    """The Laplacian of a cube of points, and what its log-determinant to an accuracy takes."""

    side: int
    depth: int
    probes: int
    accuracy: float


SMALL, LARGE = Cube(32, 10, 2, 1e-2), Cube(100, 30, 3, 2e-4)  # beyond n = 10⁵ a factorisation takes minutes


def determinant_rows(plan: Plan) -> Iterator[list[BenchRow]]:
    """log det of a cube's Laplacian plus 0.05: one that the peers can take, and one of a million rows."""
    yield _cube_rows(plan, replace(SMALL, side=8) if plan.quick else SMALL, plan.peers)
    yield _cube_rows(plan, replace(LARGE, side=10) if plan.quick else LARGE, False)


def _cube_rows(plan: Plan, cube: Cube, peers: bool) -> list[BenchRow]:
    """The unit is one product with a vector, on the CPU."""
    matrix, values = laplacian((cube.side,) * 3, SHIFT)
    exact = float(np.log(values).sum())
    ours = operator(matrix, psd=True)
    v = torch.randn(ours.dim, generator=generator(0, "bench vector"), dtype=torch.float64)
    makers: dict[str, Maker] = {UNIT: lambda: lambda: ours @ v}
    makers[OURS] = lambda: lambda: logdet(operator(matrix, psd=True), depth=cube.depth, probes=cube.probes)
    if peers:
        makers["SciPy"] = lambda: lambda: _factorised(matrix)
        makers["linear_operator"] = lambda: _quadrature(matrix)
    timed = plan.timed(makers)

    def error(found: Any) -> float:
        return abs(float(found) / exact - 1)

    least = Limit() if plan.quick else Limit(cube.depth * cube.probes, "its products")
    notes = {"SciPy": "SuperLU, exact", "linear_operator": "10 probes, depth 20, its defaults"}
    work = f"log-determinant to {100 * cube.accuracy:g} %"
    accuracy = max(cube.accuracy, 0.01) if plan.quick else cube.accuracy  # few probes of a small matrix vary by more
    return rows(work, f"Laplacian, n = {cube.side**3:,}", timed, least=least, error=error, accuracy=accuracy,
                unit="product", notes=notes)  # fmt: skip


def _factorised(matrix: Any) -> float:
    """Σ log|u_ii| of SuperLU with the ordering for symmetric matrices."""
    found = splu(matrix.tocsc(), permc_spec="MMD_AT_PLUS_A", options={"SymmetricMode": True})
    return float(np.log(np.abs(found.U.diagonal())).sum())


def _quadrature(matrix: Any) -> Run:
    """GPyTorch's, from conjugate gradients."""
    linear = import_module("linear_operator")
    sparse = torch.sparse_csr_tensor(
        torch.as_tensor(matrix.indptr), torch.as_tensor(matrix.indices), torch.as_tensor(matrix.data), matrix.shape
    )

    class Sparse(linear.LinearOperator):  # type: ignore[misc,name-defined]
        def _matmul(self, rhs: Tensor) -> Tensor:
            return sparse @ rhs

        def _size(self) -> torch.Size:
            return torch.Size(matrix.shape)

        def _transpose_nonbatch(self) -> Any:
            return self

    return lambda: float(Sparse(torch.empty(0, dtype=torch.float64)).logdet())
