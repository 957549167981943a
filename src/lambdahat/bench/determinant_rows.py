"""Rows: the log-determinant of a sparse matrix, beside SuperLU and linear_operator's stochastic
quadrature.

Neither stochastic method is told an accuracy: both are given the fewest probes and steps of a
ladder that come near enough to the truth, which only who has it can choose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.sparse.linalg import splu
from torch import Tensor

from lambdahat._core.rng import generator
from lambdahat.bench.limits import Limit
from lambdahat.bench.plans import Plan, rows
from lambdahat.bench.records import OURS, UNIT, BenchRow
from lambdahat.bench.timing import Maker, Run
from lambdahat.estimators import logdet
from lambdahat.experiments.logdets.logdet_moments import laplacian
from lambdahat.operators.matrix import operator

SHIFT = 0.05


class Effort(NamedTuple):
    """Of a stochastic quadrature."""

    probes: int
    depth: int


@dataclass(frozen=True)
class Cube:
    """The Laplacian of a cube of points, an accuracy, and the efforts that are tried for it, the
    least first.
    """

    side: int
    accuracy: float
    ladder: tuple[Effort, ...]


SMALL = Cube(32, 1e-2, (Effort(2, 10), Effort(5, 10), Effort(10, 20), Effort(20, 40)))
LARGE = Cube(100, 2e-4, (Effort(3, 30),))  # beyond n = 10⁵ a factorisation takes minutes


def determinant_rows(plan: Plan) -> Iterator[list[BenchRow]]:
    """log det of a cube's Laplacian plus 0.05: one that the peers can take, and one of a million
    rows.
    """
    yield _cube_rows(plan, replace(SMALL, side=8) if plan.quick else SMALL, plan.peers)
    yield _cube_rows(plan, replace(LARGE, side=10) if plan.quick else LARGE, False)


def _cube_rows(plan: Plan, cube: Cube, peers: bool) -> list[BenchRow]:
    """The unit is one product with a vector, on the CPU."""
    matrix, values = laplacian((cube.side,) * 3, SHIFT)
    exact = float(np.log(values).sum())
    ours = operator(matrix, psd=True)
    v = torch.randn(ours.dim, generator=generator(0, "bench vector"), dtype=torch.float64)
    makers: dict[str, Maker] = {UNIT: lambda: lambda: ours @ v}
    notes = {"SciPy": "SuperLU, exact"}

    def error(found: Any) -> float:
        return abs(float(found) / exact - 1)

    def chosen(name: str, estimate: Callable[[Effort], Any]) -> Run:
        """The first effort that is near enough."""
        for effort in cube.ladder:
            if error(estimate(effort)) <= cube.accuracy:
                break
        notes[name] = f"{effort.probes} probes, depth {effort.depth}"
        return partial(estimate, effort)

    def mine(effort: Effort) -> Any:
        return logdet(operator(matrix, psd=True), depth=effort.depth, probes=effort.probes)

    makers[OURS] = lambda: chosen(OURS, mine)
    if peers:
        makers["SciPy"] = lambda: lambda: _factorised(matrix)
        makers["linear_operator"] = lambda: chosen("linear_operator", _quadrature(matrix))
    timed = plan.timed(makers)
    effort = cube.ladder[0]  # the least that could do
    least = Limit() if plan.quick else Limit(effort.depth * effort.probes, "its products")
    work = f"log-determinant to {100 * cube.accuracy:g} %"
    # few probes of a small matrix vary by more
    accuracy = max(cube.accuracy, 0.01) if plan.quick else cube.accuracy
    return rows(
        work,
        f"Laplacian, n = {cube.side**3:,}",
        timed,
        least=least,
        error=error,
        accuracy=accuracy,
        unit="product",
        notes=notes,
    )


def _factorised(matrix: Any) -> float:
    """Σ log|u_ii| of SuperLU with the ordering for symmetric matrices."""
    found = splu(matrix.tocsc(), permc_spec="MMD_AT_PLUS_A", options={"SymmetricMode": True})
    return float(np.log(np.abs(found.U.diagonal())).sum())


def _quadrature(matrix: Any) -> Callable[[Effort], float]:
    """GPyTorch's, from conjugate gradients."""
    linear = import_module("linear_operator")
    settings = linear.settings
    sparse = torch.sparse_csr_tensor(
        torch.as_tensor(matrix.indptr),
        torch.as_tensor(matrix.indices),
        torch.as_tensor(matrix.data),
        matrix.shape,
    )

    class Sparse(linear.LinearOperator):  # type: ignore[misc,name-defined]
        def _matmul(self, rhs: Tensor) -> Tensor:
            return sparse @ rhs

        def _size(self) -> torch.Size:
            return torch.Size(matrix.shape)

        def _transpose_nonbatch(self) -> Any:
            return self

    def estimate(effort: Effort) -> float:
        torch.manual_seed(0)
        steps = (
            settings.max_lanczos_quadrature_iterations(effort.depth),
            settings.max_cg_iterations(effort.depth),
        )
        with settings.num_trace_samples(effort.probes), steps[0], steps[1]:
            return float(Sparse(torch.empty(0, dtype=torch.float64)).logdet())

    return estimate
