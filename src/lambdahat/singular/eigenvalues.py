"""The eigenvalues of an operator: every one where that takes no more products than a quadrature, else a quadrature."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.linalg import hessenberg
from torch import Tensor

from lambdahat._check import require_count
from lambdahat.estimators.spectra import DEFAULT_DEPTH, spectrum
from lambdahat.krylov import BREAKDOWN, require_finite, require_symmetric
from lambdahat.operators.base import LinearOperator
from lambdahat.results import Array, Estimate, Spectrum, Status

DEFAULT_PROBES = 10


@dataclass(frozen=True)
class Whole:
    """Every eigenvalue, ``values`` (P,) ascending, and ``vectors`` (P, P), in float64: all readings are exact.

    ``resolution`` is the size below which an eigenvalue is rounding.
    """

    values: Array
    vectors: Tensor
    resolution: float
    cost: int

    @property
    def dim(self) -> int:
        """P."""
        return len(self.values)

    @property
    def least(self) -> float:
        """The smallest eigenvalue."""
        return float(self.values[0])

    @property
    def zero(self) -> float:
        """The size below which an eigenvalue cannot be told from 0."""
        return self.resolution

    def total(self, function: Callable[[Array], Array]) -> Estimate:
        """Σ_i f(λ_i)."""
        return Estimate(float(function(self.values).sum()), cost=self.cost)

    def outside(self, low: float, high: float) -> Estimate:
        """How many eigenvalues lie outside [low, high]."""
        return self.total(lambda values: ((values < low) | (values > high)).astype(np.float64))


@dataclass(frozen=True)
class Sampled:
    """The eigenvalues as a Lanczos quadrature shows them: readings have the error of its probes."""

    spectrum: Spectrum

    @property
    def dim(self) -> int:
        """P."""
        return self.spectrum.dim

    @property
    def cost(self) -> int:
        """The products that the spectrum took."""
        return self.spectrum.cost

    @property
    def resolution(self) -> float:
        """The size below which an eigenvalue is rounding."""
        return self.spectrum.resolution

    @property
    def least(self) -> float:
        """The smallest Ritz value; up to rounding the smallest eigenvalue is no larger."""
        return float(self.spectrum.nodes.min())

    @property
    def zero(self) -> float:
        """The size below which an eigenvalue cannot be told from 0.

        A node next to 0 whose residual r reaches it stands for eigenvalues on both sides: |θ| + r. A node lighter than
        one eigenvalue has no say.
        """
        found = self.spectrum
        distance, heavy = np.abs(found.nodes), found.weights * self.dim >= 1
        at_zero = self._beside(0.0) & heavy & (distance <= found.residuals)
        return max(self.resolution, float(((distance + found.residuals) * at_zero).max()))

    def total(self, function: Callable[[Array], Array]) -> Estimate:
        """Σ_i f(λ_i); QUADRATURE when the rule of three quarters of the depth differs by more than the error."""
        full = self.spectrum.expectation(function, self.dim)
        short = self._shorter.expectation(function, self.dim)
        unsettled = abs(float(full) - float(short)) > max(float(full.stderr), 1e-12 * abs(float(full)))
        return dataclasses.replace(full, status=Status.QUADRATURE) if full.status.ok and unsettled else full

    def outside(self, low: float, high: float) -> Estimate:
        """How many eigenvalues lie outside [low, high].

        The mass that a Gauss rule gives to one side of an edge is right but for the two nodes beside the edge
        (Chebyshev, Markov and Stieltjes; Szegő, Theorem 3.41.1), and for those only where their residuals reach it. The
        masses m of these count half, and add m/√12 to the error of the probes; QUADRATURE when that is the larger part.
        """
        found = self.spectrum
        unsure = np.zeros(found.nodes.shape, dtype=bool)
        for edge in (low, high):
            unsure |= self._beside(edge) & (np.abs(found.nodes - edge) <= found.residuals)
        reading = np.where(unsure, 0.5, (found.nodes < low) | (found.nodes > high))
        estimate = found.expectation(lambda _: reading, self.dim)
        slack = self.dim * float((found.weights * unsure).sum(axis=1).mean()) / math.sqrt(12)
        status = Status.QUADRATURE if slack > float(estimate.stderr) and found.status.ok else found.status
        return dataclasses.replace(estimate, stderr=math.hypot(float(estimate.stderr), slack), status=status)

    def _beside(self, edge: float) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """The last node of each probe up to ``edge`` and the first beyond it, (probes, depth)."""
        nodes = self.spectrum.nodes
        below = np.where(nodes <= edge, nodes, -np.inf).max(axis=1, keepdims=True)
        above = np.where(nodes > edge, nodes, np.inf).min(axis=1, keepdims=True)
        return (nodes == below) | (nodes == above)

    @property
    def _shorter(self) -> Spectrum:
        """The Gauss rules of three quarters of the depth."""
        found = self.spectrum
        rules = [_leading_rule(*rule) for rule in zip(found.nodes, found.weights, strict=True)]
        nodes, weights = (np.stack(part) for part in zip(*rules, strict=True))
        return dataclasses.replace(found, nodes=nodes, weights=weights, residuals=np.zeros_like(nodes))


def eigenvalues(operator: LinearOperator, depth: int | None, probes: int, seed: int) -> Whole | Sampled:
    """Every eigenvalue where P ≤ probes·depth, which takes no more products; else a quadrature of that cost."""
    require_symmetric(operator, "the effective dimension")
    require_count(probes, "probes")
    steps = DEFAULT_DEPTH if depth is None else require_count(depth, "depth")
    if operator.dim <= probes * steps:
        return _diagonalise(operator)
    return Sampled(spectrum(operator, steps, probes, seed))


def _diagonalise(operator: LinearOperator) -> Whole:
    """All eigenpairs of the dense matrix, by P products."""
    before, matrix = operator.matvecs, operator.dense()
    require_finite(matrix)
    matrix = matrix.double()
    asymmetry = float(torch.linalg.matrix_norm(matrix - matrix.T, 2) / 2)
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    rounding = BREAKDOWN * float(torch.finfo(operator.dtype).eps) * float(values.abs().max())
    return Whole(values.cpu().numpy(), vectors, max(rounding, asymmetry), operator.matvecs - before)


def _leading_rule(nodes: Array, weights: Array) -> tuple[Array, Array]:
    """The Gauss rule of the leading three quarters of the Lanczos steps behind a Gauss rule.

    Householder's reduction of the arrow matrix [[0, √wᵀ], [√w, diag θ]] to tridiagonal form gives the Jacobi matrix
    of the measure (Boley and Golub 1987).
    """
    count = len(nodes)
    arrow = np.zeros((count + 1, count + 1))
    arrow[0, 1:] = arrow[1:, 0] = np.sqrt(weights)
    arrow[1:, 1:] = np.diag(nodes)
    steps = max(1, 3 * count // 4)
    jacobi = hessenberg(arrow)[1 : steps + 1, 1 : steps + 1]
    values, vectors = np.linalg.eigh((jacobi + jacobi.T) / 2)
    return values, vectors[0] ** 2
