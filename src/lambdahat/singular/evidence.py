"""The evidence of a model by Laplace's method, the Bayesian information criterion, and effective
dimensions that the curvature shows.

What is exponentiated is n·L, L being the problem's mean loss over its n samples. It is a
log-likelihood only where the loss is a negative log-likelihood: cross-entropy is one,
``gaussian_nll`` lacks its constant ½ log 2π, and "mse" is a likelihood of no noise that was
measured. For noise of variance σ² take the loss (f − y)²/(2σ²) + ½ log 2πσ².

The error of what is read off a quadrature here has two parts: that of the probes, and what the
depth has left unsettled. The second cannot be left to a status alone, for the functions read turn
at λ ≈ z, often far below what Lanczos resolves near 0.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from lambdahat._core.check import require, require_choice, require_count, require_positive
from lambdahat.estimators._eigenpairs import eigenpairs
from lambdahat.estimators._spectrum import DEFAULT_DEPTH, spectrum
from lambdahat.estimators.quantities import MeasureSettings, Work, products, quantity
from lambdahat.krylov import BREAKDOWN, lanczos, require_finite, require_symmetric
from lambdahat.operators.base import LinearOperator
from lambdahat.operators.curvature import hessian
from lambdahat.operators.matrix import OperatorLike, as_operator
from lambdahat.problem import Problem, require_problem
from lambdahat.results import Array, Estimate, Result, Spectrum, Status

DEFAULT_PROBES = 10
SHARES = (1 / 2, 5 / 8, 3 / 4, 7 / 8)
Source = Problem | LinearOperator | Spectrum


@dataclass(frozen=True)
class Eigenvalues(ABC):
    """The P = ``dim`` eigenvalues of an operator, each known or as a quadrature shows them.

    ``least`` is the smallest, or the smallest Ritz value, below which up to rounding the smallest
    may lie; ``resolution`` is the size below which an eigenvalue is rounding. ``cost`` counts
    products.
    """

    dim: int
    least: float
    resolution: float
    cost: int

    @property
    def zero(self) -> float:
        """The size below which an eigenvalue cannot be distinguished from 0."""
        return self.resolution

    @abstractmethod
    def total(self, function: Callable[[Array], Array], scale: float) -> Estimate:
        """Σ_i f(λ_i) for an f that increases, is smooth on the ``scale`` of z, and has no other
        kink than at 0.
        """

    @abstractmethod
    def outside(self, low: float, high: float) -> Estimate:
        """How many eigenvalues lie outside [low, high]."""

    def n_eff(self, z: float) -> Estimate:
        """Σ λ/(λ + z), with a negative eigenvalue as 0."""
        return self._total(
            lambda values: np.maximum(values, 0.0) / (np.maximum(values, 0.0) + z), z
        )

    def logdet(self, z: float, least: float = 0.0) -> Estimate:
        """log det(I + A/z) = Σ log(1 + λ/z), an eigenvalue below ``least`` > −z taken as that."""
        return self._total(lambda values: np.log1p(np.maximum(values, least) / z), z)

    def _total(self, function: Callable[[Array], Array], z: float) -> Estimate:
        """Σ f(λ); PRECISION_LIMIT where rounding alone could make an eigenvalue of 0 count."""
        total, rounding = self.total(function, z), self.resolution >= z
        return dataclasses.replace(total, status=Status.PRECISION_LIMIT) if rounding else total


@dataclass(frozen=True)
class Whole(Eigenvalues):
    """Every eigenvalue, ``values`` (P,) ascending, and ``vectors`` (P, P), in float64: all readings
    are exact.
    """

    values: Array
    vectors: Tensor

    def total(self, function: Callable[[Array], Array], scale: float) -> Estimate:
        return Estimate(float(function(self.values).sum()), cost=self.cost)

    def outside(self, low: float, high: float) -> Estimate:
        return Estimate(float(((self.values < low) | (self.values > high)).sum()), cost=self.cost)


@dataclass(frozen=True)
class Sampled(Eigenvalues):
    """The eigenvalues as a Lanczos quadrature shows them.

    A node θ of residual r stands for eigenvalues between its neighbours (Chebyshev, Markov and
    Stieltjes; Szegő, Theorem 3.41.1) and near it, taken here as within r: its ``reach``.
    """

    spectrum: Spectrum

    @property
    def zero(self) -> float:
        """The size below which an eigenvalue cannot be distinguished from 0.

        A node next to 0 that reaches it stands for eigenvalues of either sign up to |θ| + r. One
        lighter than a single eigenvalue has no say.
        """
        nodes, residuals = self.spectrum.nodes, self.spectrum.residuals
        heavy = self.spectrum.weights * self.dim >= 1
        at_zero = self._beside_zero() & heavy & (np.abs(nodes) <= residuals)
        reach = float(((np.abs(nodes) + residuals) * at_zero).max())
        return max(self.resolution, (1 + 1e-9) * reach)

    @cached_property
    def reach(self) -> tuple[Array, Array]:
        """The ends of what each node stands for, (probes, depth) each."""
        nodes, residuals = self.spectrum.nodes, self.spectrum.residuals
        edge = np.full((len(nodes), 1), np.inf)
        before, after = np.hstack([-edge, nodes[:, :-1]]), np.hstack([nodes[:, 1:], edge])
        return np.maximum(before, nodes - residuals), np.minimum(after, nodes + residuals)

    def total(self, function: Callable[[Array], Array], scale: float) -> Estimate:
        """Σ_i f(λ_i).

        Where the nodes next to 0 are farther from it than z and reach back, f has turned inside
        their reach. They then count by the middle of its range there, and half the range over √3
        adds to the error. So does what ``tail`` makes of the rules of less depth.
        """
        quadrature = self.spectrum
        distance = np.abs(quadrature.nodes) - scale
        unsure = self._beside_zero() & (distance > 0) & (distance < quadrature.residuals)
        low, high = (function(end) for end in self.reach)
        plain = quadrature.expectation(function, self.dim)
        estimate = quadrature.expectation(
            lambda nodes: np.where(unsure, (low + high) / 2, function(nodes)), self.dim
        )
        slack = self._mean(np.where(unsure, (high - low) / 2, 0.0)) / math.sqrt(3)
        shorter = [float(rule.expectation(function, self.dim)) for rule in self._shorter]
        distances = [value - float(plain) for value in shorter]
        return self._with_error(estimate, math.hypot(slack, tail(distances)))

    def outside(self, low: float, high: float) -> Estimate:
        """How many eigenvalues lie outside [low, high]; unsure nodes count half."""
        quadrature, (left, right) = self.spectrum, self.reach
        unsure = ((left < low) & (low < right)) | ((left < high) & (high < right))
        reading = np.where(unsure, 0.5, (quadrature.nodes < low) | (quadrature.nodes > high))
        estimate = quadrature.expectation(lambda _: reading, self.dim)
        # all of them or none, without the rounding of a mean
        if np.ptp(reading[quadrature.weights > 0]) == 0:
            count = self.dim * float(reading[0, 0])
            estimate = dataclasses.replace(estimate, value=count, stderr=0.0)
        return self._with_error(estimate, self._mean(np.where(unsure, 0.5, 0.0)) / math.sqrt(3))

    def _with_error(self, estimate: Estimate, unsettled: float) -> Estimate:
        """Add the error of the quadrature; QUADRATURE where that is the larger part."""
        probes = float(estimate.stderr)
        larger = estimate.status.ok and unsettled > max(probes, 1e-12 * abs(float(estimate)))
        status = Status.QUADRATURE if larger else estimate.status
        return dataclasses.replace(estimate, stderr=math.hypot(probes, unsettled), status=status)

    def _mean(self, readings: Array) -> float:
        """P times the mean of readings (probes, depth) under the measure."""
        return self.dim * float((self.spectrum.weights * readings).sum(axis=1).mean())

    def _beside_zero(self) -> NDArray[np.bool_]:
        """The last node of each probe up to 0 and the first beyond it, (probes, depth)."""
        nodes = self.spectrum.nodes
        below = np.where(nodes <= 0, nodes, -np.inf).max(axis=1, keepdims=True)
        above = np.where(nodes > 0, nodes, np.inf).min(axis=1, keepdims=True)
        beside: NDArray[np.bool_] = (nodes == below) | (nodes == above)
        return beside

    @cached_property
    def _shorter(self) -> list[Spectrum]:
        """The quadratures of ``SHARES`` of the depth."""
        whole, depth = self.spectrum, self.spectrum.nodes.shape[1]
        matrices = [_jacobi(*rule) for rule in zip(whole.nodes, whole.weights, strict=True)]
        rules = []
        for steps in (max(1, int(share * depth)) for share in SHARES):
            pairs = [np.linalg.eigh(matrix[:steps, :steps]) for matrix in matrices]
            nodes = np.stack([pair.eigenvalues for pair in pairs])
            weights = np.stack([pair.eigenvectors[0] ** 2 for pair in pairs])
            zeros = np.zeros_like(nodes)
            rule = dataclasses.replace(whole, nodes=nodes, weights=weights, residuals=zeros)
            rules.append(rule)
        return rules


def eigenvalues(source: Source, depth: int | None, probes: int, seed: int) -> Eigenvalues:
    """Every eigenvalue where P ≤ probes·depth, else a quadrature of that many products."""
    if not isinstance(source, Spectrum):
        operator = hessian(source) if isinstance(source, Problem) else source
        operator = require_symmetric(operator, "the effective dimension")
        require_count(probes, "probes")
        steps = DEFAULT_DEPTH if depth is None else require_count(depth, "depth")
        if operator.dim <= probes * steps:
            before, matrix = operator.matvecs, operator.dense()
            require_finite(matrix)
            matrix = matrix.double()
            asymmetry = float(torch.linalg.matrix_norm(matrix - matrix.T, 2) / 2)
            known, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
            values, eps = known.cpu().numpy(), float(torch.finfo(operator.dtype).eps)
            resolution = max(BREAKDOWN * eps * float(np.abs(values).max()), asymmetry)
            facts = operator.dim, float(values[0]), resolution, operator.matvecs - before
            return Whole(*facts, values, vectors)
        source = spectrum(operator, steps, probes, seed)
    least = float(source.nodes.min())
    return Sampled(source.dim, least, source.resolution, source.cost, source)


def _jacobi(nodes: Array, weights: Array) -> Array:
    """The Lanczos matrix T (m, m) behind a Gauss rule.

    Householder's reduction of the arrow matrix [[0, √wᵀ], [√w, diag θ]] to tridiagonal form (Boley
    and Golub 1987).
    """
    count = len(nodes)
    arrow = np.zeros((count + 1, count + 1))
    arrow[0, 1:] = arrow[1:, 0] = np.sqrt(weights)
    arrow[1:, 1:] = np.diag(nodes)
    reduced: Array = scipy.linalg.hessenberg(arrow)[1:, 1:]
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


@dataclass(frozen=True)
class EffectiveDimensions(Result):
    """Number of directions determined by the data, by four definitions, at the prior curvature
    ``z``.

    ``parameters`` is P. ``rank`` counts the eigenvalues beyond ±``threshold``, ``negative`` those
    of them below 0. ``n_eff`` is Σ λ/(λ + z), and ``logdet`` is log det(I + H/z) = Σ log(1 + λ/z),
    which grows by n_eff for each unit of −ln z. In these two a negative eigenvalue counts as 0,
    since it constrains no parameter. ``cost`` counts products.
    """

    parameters: Estimate
    rank: Estimate
    n_eff: Estimate
    logdet: Estimate
    negative: Estimate
    z: float
    threshold: float
    cost: int = 0
    status: Status = Status.CONVERGED


def effective_dimensions(
    source: Source | OperatorLike,
    z: float | None = None,
    threshold: float | None = None,
    depth: int | None = None,
    probes: int = DEFAULT_PROBES,
    seed: int = 0,
) -> EffectiveDimensions:
    """Parameter count, rank, N_eff and log-determinant of the Hessian of a problem, or of an
    operator or a spectrum.

    ``z`` is the curvature of the prior in units of the mean loss: a Gaussian prior of precision γ
    adds γ to nH, so z = γ/n. The default for a problem is γ = 1, z = 1/n; an operator or a spectrum
    has no n, and needs z. ``threshold`` is by default the size below which an eigenvalue cannot be
    told from 0: the rounding of the products, and in a quadrature the reach of the nodes next to 0.

    All is exact, by P products, where P ≤ ``probes``·``depth`` (depth is 100 by default). Otherwise
    it is read off one stochastic Lanczos quadrature of that many products, or off the spectrum
    given. PRECISION_LIMIT says that z is below rounding.
    """
    if not isinstance(source, Problem | LinearOperator | Spectrum):
        expected = "be a Problem, an operator, a matrix or a Spectrum"
        cure = "wrap a model with lh.Problem(model, loss, data)"
        source = as_operator(source, "source", expected, cure)
    if z is None and isinstance(source, Problem):
        z = 1.0 / source.num_terms
    expected = f"be given for a {type(source).__name__}"
    cure = "1/n is the curvature of a unit Gaussian prior beside the mean loss over n samples"
    require(z is not None, "z", expected, "None", cure)
    curvature = require_positive(z, "z")
    asked = None if threshold is None else require_positive(threshold, "threshold")
    eigs = eigenvalues(source, depth, probes, seed)
    limit = eigs.zero if asked is None else asked
    rank, negative = eigs.outside(-limit, limit), eigs.outside(-limit, math.inf)
    n_eff, logdet = eigs.n_eff(curvature), eigs.logdet(curvature)
    status = Status.joint(part.status for part in (n_eff, logdet, rank, negative))
    parts = Estimate(float(eigs.dim)), rank, n_eff, logdet, negative
    return EffectiveDimensions(*parts, curvature, limit, eigs.cost, status)


def effective_dimension(
    source: Source | OperatorLike,
    z: float,
    depth: int | None = None,
    probes: int = DEFAULT_PROBES,
    seed: int = 0,
) -> Estimate:
    """N_eff(z) = Σ_i λ_i/(λ_i + z), the directions whose curvature exceeds z, with a negative λ_i
    as 0.

    MacKay's number of well-determined parameters ("Bayesian interpolation", 1992), applied to
    networks by Maddox, Benton and Wilson ("Rethinking parameter counting", 2020). With z = γ/n, the
    Hessian being that of the mean loss over n samples, it belongs to the Gaussian prior of
    precision γ. ``depth`` and ``probes`` are those of ``effective_dimensions``.
    """
    return effective_dimensions(source, require_positive(z, "z"), None, depth, probes, seed).n_eff


@dataclass(frozen=True)
class LaplaceEvidence(Result):
    """``free_energy`` F = −log Z and its parts, in nats: F = −``log_likelihood`` −
    ``occam_factor``.

    ``log_likelihood`` is −nL(w*), ``log_prior`` the log density of the prior at w*, ``logdet`` log
    det(nH + γI), and ``occam_factor`` the logarithm of MacKay's: log_prior + (P/2) log 2π − ½
    logdet. ``decrement`` is ½gᵀ(nH + γI)⁻¹g with g the gradient of nL − log prior: 0 at a
    stationary point, and elsewhere what the linear term adds to log Z, so that F − decrement is the
    integral of the whole second-order expansion.

    ``top`` is the number of eigenvalues kept, ``cutoff`` the smallest of them: all others are taken
    as 0, which leaves their directions at the prior. Both are None where the whole curvature
    counts. ``cost`` counts products.
    """

    free_energy: Estimate
    log_likelihood: Estimate
    log_prior: Estimate
    occam_factor: Estimate
    logdet: Estimate
    decrement: Estimate
    prior_precision: float
    centre: str
    top: int | None = None
    cutoff: float | None = None
    cost: int = 0
    status: Status = Status.CONVERGED


def laplace_evidence(
    problem: Problem,
    prior_precision: float = 1.0,
    centre: str = "theta",
    top: int | None = None,
    seed: int = 0,
    depth: int | None = None,
    probes: int = DEFAULT_PROBES,
) -> LaplaceEvidence:
    """−log ∫ exp(−nL(w))·N(w; m, I/γ) dw by Laplace's method at the problem's parameters w* (MacKay
    1992).

        F = nL(w*) − log N(w*; m, I/γ) − (P/2) log 2π + ½ log det(nH + γI)

    γ is ``prior_precision``; ``centre`` "theta" puts m at w*, "zero" at 0. With ``top`` = k the
    determinant is that of the k largest eigenvalues, ½ Σ_{i≤k} log(nλ_i/γ + 1), and the rest of the
    spectrum stays at the prior.

    Exact, by P products, where P ≤ ``probes``·``depth`` (depth is 100 by default); else by a
    stochastic Lanczos quadrature of that many products, or by Lanczos for the ``top`` pairs.
    INDEFINITE: nH + γI is not positive definite, and negative eigenvalues count as 0; of a
    truncated spectrum only the part that is kept can show it. NOT_STATIONARY: the decrement exceeds
    one nat and the standard error.
    """
    require_problem(problem)
    precision = require_positive(prior_precision, "prior_precision")
    require_choice(centre, "centre", ("theta", "zero"))
    operator, samples, size = hessian(problem), problem.num_terms, problem.num_parameters
    if top is not None:
        require_count(top, "top", 1, size, "there are no more eigenvalues than parameters")
    offset = problem.vector if centre == "zero" else torch.zeros_like(problem.vector)
    gain, cutoff, whole = _curvature(operator, precision / samples, top, depth, probes, seed)
    gradient = samples * problem.gradient() + precision * offset
    decrement = _decrement(operator, gradient, samples, precision, whole, depth)
    pull = 0.5 * precision * float(offset.double().square().sum())
    fit = Estimate(-samples * problem.loss())
    prior = Estimate(0.5 * size * math.log(precision / (2 * math.pi)) - pull)
    logdet = dataclasses.replace(gain, value=float(gain) + size * math.log(precision))
    error = 0.5 * float(gain.stderr)
    occam = dataclasses.replace(gain, value=-0.5 * float(gain) - pull, stderr=error)
    moving = gain.status is not Status.INDEFINITE and float(decrement) > max(1.0, error)
    status = Status.NOT_STATIONARY if moving else gain.status
    cost = operator.matvecs
    energy = dataclasses.replace(occam, value=-float(fit) - float(occam), cost=cost, status=status)
    parts = energy, fit, prior, occam, logdet, decrement
    return LaplaceEvidence(*parts, precision, centre, top, cutoff, cost, status)


def bic(problem: Problem) -> Estimate:
    """BIC = n·L(w*) + (d/2)·ln n, with d the number of parameters (Schwarz 1978): the free energy
    of a regular model.

    This is half of the value in the convention that multiplies by 2. F − BIC stays bounded as n
    grows where the Hessian has full rank; a singular model has a smaller free energy, with λ in
    place of d/2.
    """
    require_problem(problem)
    penalty = 0.5 * problem.num_parameters * math.log(problem.num_terms)
    return Estimate(problem.num_terms * problem.loss() + penalty)


def _curvature(
    operator: LinearOperator, z: float, top: int | None, depth: int | None, probes: int, seed: int
) -> tuple[Estimate, float | None, Whole | None]:
    """log det(I + H/z), of all eigenvalues or the ``top``; the smallest kept; all if known."""
    steps = DEFAULT_DEPTH if depth is None else require_count(depth, "depth")
    if top is not None and operator.dim > require_count(probes, "probes") * steps:
        pairs = eigenpairs(operator, top, seed=seed)
        values, residuals = pairs.values.numpy(), pairs.residuals.numpy()
        gain = _truncated_logdet(values, residuals, z, pairs.cost, pairs.status)
        return gain, float(values[-1]), None
    eigs = eigenvalues(operator, depth, probes, seed)
    whole = eigs if isinstance(eigs, Whole) else None
    if whole is not None and top is not None:
        kept = whole.values[::-1][:top]
        gain = _truncated_logdet(kept, np.zeros_like(kept), z, whole.cost, Status.CONVERGED)
        return gain, float(kept[-1]), whole
    gain = eigs.logdet(z, _floor(eigs.least, z))
    if eigs.least <= -max(z, eigs.resolution):
        gain = dataclasses.replace(gain, status=Status.INDEFINITE)
    return gain, None, whole


def _truncated_logdet(
    values: Array, residuals: Array, z: float, cost: int, status: Status
) -> Estimate:
    """Σ log(1 + λ/z) over descending eigenvalues; the error is that of the residuals."""
    least = float(values[-1])
    kept = np.maximum(values, _floor(least, z))
    total, error = float(np.log1p(kept / z).sum()), float((residuals / (kept + z)).sum())
    return Estimate(total, error, cost, Status.INDEFINITE if least <= -z else status)


def _floor(least: float, z: float) -> float:
    """What eigenvalues are raised to: themselves where all are above −z, else 0."""
    return least if least > -z else 0.0


def _decrement(
    operator: LinearOperator,
    gradient: Tensor,
    samples: int,
    precision: float,
    whole: Whole | None,
    depth: int | None,
) -> Estimate:
    """½gᵀ(nH + γI)⁻¹g, in the eigenbasis where that is known, else by Gauss quadrature: Lanczos
    from g.

    The error of the quadrature is what the depth has left unsettled.
    """
    size = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
    if size == 0.0:
        return Estimate(0.0)

    def half_inverse(values: Array, weights: Array) -> float:
        raised = np.maximum(values, _floor(float(values[0]), precision / samples))
        return 0.5 * float((weights / (samples * raised + precision)).sum())

    if whole is not None:
        overlaps = whole.vectors.T @ gradient.to(whole.vectors)
        return Estimate(half_inverse(whole.values, overlaps.square().cpu().numpy()))
    steps = min(DEFAULT_DEPTH if depth is None else depth, operator.dim)
    run = lanczos(operator, gradient.to(operator.dtype), steps, "laplace_evidence")
    rules = [run.ritz(max(1, int(share * steps))) for share in (*SHARES, 1)]
    *shorter, full = (
        half_inverse(nodes.numpy(), size**2 * weights.numpy()) for nodes, weights, _ in rules
    )
    return Estimate(full, tail([value - full for value in shorter]), run.products)


@quantity(
    "effective_dimensions",
    lambda problem, _, settings: effective_dimensions(problem, seed=settings.seed),
)
@quantity(
    "laplace_evidence", lambda problem, _, settings: laplace_evidence(problem, seed=settings.seed)
)
def eigenvalues_work(problem: Problem, operator: LinearOperator, settings: MeasureSettings) -> Work:
    """All eigenvalues where P is small, else a quadrature and a Krylov space of the gradient."""
    if operator.dim <= DEFAULT_PROBES * DEFAULT_DEPTH:
        return products(operator, operator.dim, operator.dim, operator.dim)
    most = (DEFAULT_PROBES + 1) * DEFAULT_DEPTH
    return products(operator, DEFAULT_PROBES * DEFAULT_DEPTH, most, DEFAULT_DEPTH + 1)


@quantity("bic", lambda problem, *_: bic(problem))
def bic_work(problem: Problem, operator: LinearOperator, settings: MeasureSettings) -> Work:
    """No products."""
    return products(operator, 0, 0, 1)
