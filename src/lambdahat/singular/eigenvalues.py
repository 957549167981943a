"""The eigenvalues of an operator: every one where that takes no more products than a quadrature,
else a quadrature.

The error of what is read off a quadrature here has two parts: that of the probes, and what the
depth has left unsettled. The second cannot be left to a status alone, for the functions read turn
at λ ≈ z, often far below what Lanczos resolves near 0.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import hessenberg
from torch import Tensor

from lambdahat._core.check import require_count
from lambdahat.estimators import DEFAULT_DEPTH, spectrum
from lambdahat.krylov import BREAKDOWN, require_finite, require_symmetric
from lambdahat.operators.base import LinearOperator
from lambdahat.results import Array, Estimate, Spectrum, Status

DEFAULT_PROBES = 10
SHARES = (1 / 2, 5 / 8, 3 / 4, 7 / 8)


@dataclass(frozen=True)
class Whole:
    """Every eigenvalue, ``values`` (P,) ascending, and ``vectors`` (P, P), in float64: all readings
    are exact.

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

    def total(self, function: Callable[[Array], Array], scale: float) -> Estimate:
        """Σ_i f(λ_i)."""
        return Estimate(float(function(self.values).sum()), cost=self.cost)

    def outside(self, low: float, high: float) -> Estimate:
        """How many eigenvalues lie outside [low, high]."""
        return Estimate(float(((self.values < low) | (self.values > high)).sum()), cost=self.cost)


@dataclass(frozen=True)
class Sampled:
    """The eigenvalues as a Lanczos quadrature shows them.

    A node θ of residual r stands for eigenvalues between its neighbours (Chebyshev, Markov and
    Stieltjes; Szegő, Theorem 3.41.1) and near it, taken here as within r: its ``reach``.
    """

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

        A node next to 0 that reaches it stands for eigenvalues of either sign up to |θ| + r. One
        lighter than a single eigenvalue has no say.
        """
        nodes, residuals = self.spectrum.nodes, self.spectrum.residuals
        heavy = self.spectrum.weights * self.dim >= 1
        at_zero = self._beside(0.0) & heavy & (np.abs(nodes) <= residuals)
        return max(
            self.resolution, (1 + 1e-9) * float(((np.abs(nodes) + residuals) * at_zero).max())
        )

    @cached_property
    def reach(self) -> tuple[Array, Array]:
        """The ends of what each node stands for, (probes, depth) each."""
        nodes, residuals = self.spectrum.nodes, self.spectrum.residuals
        edge = np.full((len(nodes), 1), np.inf)
        before, after = np.hstack([-edge, nodes[:, :-1]]), np.hstack([nodes[:, 1:], edge])
        return np.maximum(before, nodes - residuals), np.minimum(after, nodes + residuals)

    def total(self, function: Callable[[Array], Array], scale: float) -> Estimate:
        """Σ_i f(λ_i) for an f that increases, is smooth on the ``scale`` of z, and has no other
        kink than at 0.

        Where the nodes next to 0 are farther from it than z and reach back, f has turned inside
        their reach. They then count by the middle of its range there, and half the range over √3
        adds to the error. So does what ``tail`` makes of the rules of less depth.
        """
        found = self.spectrum
        distance = np.abs(found.nodes) - scale
        unsure = self._beside(0.0) & (distance > 0) & (distance < found.residuals)
        low, high = (function(end) for end in self.reach)
        plain = found.expectation(function, self.dim)
        estimate = found.expectation(
            lambda nodes: np.where(unsure, (low + high) / 2, function(nodes)), self.dim
        )
        slack = self._mean(np.where(unsure, (high - low) / 2, 0.0)) / math.sqrt(3)
        distances = [
            float(rule.expectation(function, self.dim)) - float(plain) for rule in self._shorter
        ]
        return self._with_error(estimate, math.hypot(slack, tail(distances)))

    def outside(self, low: float, high: float) -> Estimate:
        """How many eigenvalues lie outside [low, high]; nodes whose reach holds an edge count
        half.
        """
        found, (left, right) = self.spectrum, self.reach
        unsure = ((left < low) & (low < right)) | ((left < high) & (high < right))
        reading = np.where(unsure, 0.5, (found.nodes < low) | (found.nodes > high))
        estimate = found.expectation(lambda _: reading, self.dim)
        # all of them or none, without the rounding of a mean
        if np.ptp(reading[found.weights > 0]) == 0:
            estimate = dataclasses.replace(
                estimate, value=self.dim * float(reading[0, 0]), stderr=0.0
            )
        return self._with_error(estimate, self._mean(np.where(unsure, 0.5, 0.0)) / math.sqrt(3))

    def _with_error(self, estimate: Estimate, unsettled: float) -> Estimate:
        """The estimate with the error of its quadrature added; QUADRATURE where that is the
        larger part.
        """
        probes = float(estimate.stderr)
        larger = estimate.status.ok and unsettled > max(probes, 1e-12 * abs(float(estimate)))
        status = Status.QUADRATURE if larger else estimate.status
        return dataclasses.replace(estimate, stderr=math.hypot(probes, unsettled), status=status)

    def _mean(self, readings: Array) -> float:
        """P times the mean of readings (probes, depth) under the measure."""
        return self.dim * float((self.spectrum.weights * readings).sum(axis=1).mean())

    def _beside(self, edge: float) -> NDArray[np.bool_]:
        """The last node of each probe up to ``edge`` and the first beyond it, (probes, depth)."""
        nodes = self.spectrum.nodes
        below = np.where(nodes <= edge, nodes, -np.inf).max(axis=1, keepdims=True)
        above = np.where(nodes > edge, nodes, np.inf).min(axis=1, keepdims=True)
        beside: NDArray[np.bool_] = (nodes == below) | (nodes == above)
        return beside

    @cached_property
    def _shorter(self) -> list[Spectrum]:
        """The quadratures of ``SHARES`` of the depth."""
        found, depth = self.spectrum, self.spectrum.nodes.shape[1]
        matrices = [_jacobi(*rule) for rule in zip(found.nodes, found.weights, strict=True)]

        def leading(steps: int) -> Spectrum:
            pairs = [np.linalg.eigh(matrix[:steps, :steps]) for matrix in matrices]
            nodes, weights = (
                np.stack([p.eigenvalues for p in pairs]),
                np.stack([p.eigenvectors[0] ** 2 for p in pairs]),
            )
            return dataclasses.replace(
                found, nodes=nodes, weights=weights, residuals=np.zeros_like(nodes)
            )

        return [leading(max(1, int(share * depth))) for share in SHARES]


def eigenvalues(
    operator: LinearOperator, depth: int | None, probes: int, seed: int
) -> Whole | Sampled:
    """Every eigenvalue where P ≤ probes·depth, which takes no more products; else a quadrature
    of that cost.
    """
    operator = require_symmetric(operator, "the effective dimension")
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


def _jacobi(nodes: Array, weights: Array) -> Array:
    """The Lanczos matrix T (m, m) behind a Gauss rule.

    Householder's reduction of the arrow matrix [[0, √wᵀ], [√w, diag θ]] to tridiagonal form (Boley
    and Golub 1987).
    """
    count = len(nodes)
    arrow = np.zeros((count + 1, count + 1))
    arrow[0, 1:] = arrow[1:, 0] = np.sqrt(weights)
    arrow[1:, 1:] = np.diag(nodes)
    reduced: Array = hessenberg(arrow)[1:, 1:]
    return (reduced + reduced.T) / 2


def tail(distances: Sequence[float]) -> float:
    """What is left of the error of a rule, from how far the rules of each of ``SHARES`` of its
    depth are from it.

    If each quarter of the depth shrinks the error e by one factor, (e + b)² = (e + a)·e with a and
    b the distances of half and of three quarters: e = b²/(a − 2b), and a at most. Distances that do
    not shrink, as where the sign of a node near a kink is an accident of the depth, stand for it by
    their mean.
    """
    sizes = np.abs(distances)
    one_sided = bool((np.asarray(distances) >= 0).all() or (np.asarray(distances) <= 0).all())
    if not (one_sided and (np.diff(sizes) <= 0).all()):
        return float(sizes.mean())
    a, b = float(sizes[0]), float(sizes[2])
    return min(a, b**2 / (a - 2 * b)) if a > 2 * b else a
