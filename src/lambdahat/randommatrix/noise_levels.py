"""The measurements behind the advice: the curvature of all data, its variance over samples, and λ₁
of mini-batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from lambdahat._core.progress import report
from lambdahat._core.storage import Result, Status
from lambdahat.estimators._eigenpairs import eigenpairs
from lambdahat.estimators._trace import trace
from lambdahat.estimators._variance import variance
from lambdahat.operators.base import LinearOperator
from lambdahat.problem import Problem
from lambdahat.problem.network import NORMS
from lambdahat.randommatrix.batch_curvature import (
    CURVATURES,
    PROBES,
    BatchEigenvalues,
    DirectionalVariance,
    along_pairs,
    batch_eigenpairs,
)
from lambdahat.randommatrix.predictions import predict
from lambdahat.randommatrix.rate_limits import differ, propagate
from lambdahat.randommatrix.spikes import effective_batch
from lambdahat.results import Eigenpairs, Estimate

MOST_SAMPLES = 1024
BATCHES = (10, 30)  # fewest and most by default; between them as many as hold all data once
TOL = 1e-4
FLAT = 1e-3  # of the largest eigenvalue
TRACE_TOL = 0.05
TOP = 10  # eigenvectors whose couplings are measured one by one
# parameters up to which these are all eigenvectors, and the limit of second moments is exact
WHOLE = 12
# of λ₁: what the curvature along φ₁ may change over a step on a quadratic, by rounding
CONSTANT = 1e-3


@dataclass(frozen=True)
class BatchView(Result):
    """λ₁ of batches of one size B of N: ``measured``, its mean, and ``predicted`` by each model.

    ``spread`` is the standard deviation between batches. ``sharpness`` is E λ₁²/E λ₁ over batches;
    a few batches may miss rare samples, which makes it too small. ``overlap`` is the mean |φ̂₁ᵀφ₁|²
    of a batch's sharpest direction with that of all data, ``effective`` is b = B/(1 − B/N). If all
    data have no curvature of their own, ``overlap`` is NaN and nothing is predicted.
    """

    batch_size: int
    effective: float
    measured: Estimate
    spread: float
    sharpness: Estimate
    overlap: Estimate
    predicted: Mapping[str, Estimate]

    def strays(self, model: str) -> bool:
        """Whether a prediction and the measured mean differ significantly."""
        return differ(self.measured, self.predicted[model])


@dataclass(frozen=True)
class BatchLevels(Result):
    """λ₁ of single batches, for batch norm in training mode."""

    operator: str
    parameters: int
    population: int
    views: tuple[BatchView, ...]
    cost: int = 0
    status: Status = Status.CONVERGED

    def view(self, batch_size: int) -> BatchView:
        """The measurements on batches of that size."""
        return next(view for view in self.views if view.batch_size == batch_size)


@dataclass(frozen=True)
class NoiseLevels(Result):
    """Measured λ₁ and λ_P of the full data, and the variance of the per-sample curvature.

    ``variance`` is σ² per element, ``directions`` have λ_j and τ_j² = mean_i‖(H_i − H̄)φ_j‖² of the
    sharpest eigenvectors, ``trace`` is tr H̄. If the noise were the same in all directions, τ²
    would be Pσ². ``gradient`` is ‖ḡ‖²/P and ``gradient_variance`` σ_g², per element. ``operator``
    names H, "hessian" or "ggn", whose ``smallest`` is only known to be 0 or more. ``quadratic``
    says that H is the same a step away, as for linear regression, ``normalized`` that the model has
    normalisation layers. ``cost`` counts passes over the data.
    """

    operator: str
    parameters: int
    population: int
    largest: Estimate
    smallest: Estimate
    variance: Estimate
    directions: DirectionalVariance
    trace: Estimate
    gradient: Estimate
    gradient_variance: Estimate
    views: tuple[BatchView, ...]
    cost: int = 0
    status: Status = Status.CONVERGED
    quadratic: bool = False
    normalized: bool = False

    @property
    def complete(self) -> bool:
        """Whether the known directions are all directions."""
        return len(self.directions) == self.parameters

    @property
    def tau2(self) -> Estimate:
        """τ² of the sharpest direction."""
        return _entries(self.directions.tau2)[0]

    @property
    def finite(self) -> float:
        """N/(N − 1): the factor on τ²/b for batches drawn without replacement."""
        return self.population / (self.population - 1)

    def flatter(self) -> dict[str, tuple[Estimate, Estimate]]:
        """λ_j and τ_j² of other directions: eigenvectors, and the mean of the rest.

        Both must be significantly above 0. An eigenvalue counts from TOL of the largest on, its
        accuracy. All λ_j add up to tr H̄, and all τ_j² to P²σ². The rest counts if no eigenvalue is
        below 0.
        """
        values, noises = _entries(self.directions.eigenvalues), _entries(self.directions.tau2)
        pairs = {
            f"eigenvector {j + 1}": (values[j], noises[j])
            for j in range(1, len(values))
            if float(values[j]) > TOL * float(self.largest)
        }
        left, order = self.parameters - len(values), self.parameters
        if left > 0 and float(self.smallest) >= -FLAT * float(self.largest):

            def mean(total: float, *known: float) -> float:
                return (total - sum(known)) / left

            def rest(element: float, *known: float) -> float:
                return (order**2 * element - sum(known)) / left

            curvature = propagate(mean, self.trace, *values)
            pairs["the mean of the rest"] = curvature, propagate(rest, self.variance, *noises)
        positive = (name for name in pairs if all(one.interval()[0] > 0 for one in pairs[name]))
        return {name: pairs[name] for name in positive}

    def view(self, batch_size: int) -> BatchView:
        """The measurements on batches of that size."""
        return next(view for view in self.views if view.batch_size == batch_size)

    def excess(self, batch_size: int) -> Estimate:
        """The measured excess of the sharpness of batches over λ₁ of all data."""
        sharpness = self.view(batch_size).sharpness
        return propagate(lambda seen, true: seen - true, sharpness, self.largest)

    def expected_excess(self, effective: float) -> Estimate:
        """τ²/(bλ₁): the excess by the variance over samples, E‖H_batch φ₁‖² = λ₁² + τ²/b."""

        def excess(noise: float, true: float) -> float:
            return self.finite * noise / (effective * true)

        return propagate(excess, self.tau2, self.largest)


def noise_levels(
    problem: Problem,
    operator: str,
    batch_sizes: Sequence[int],
    batches: int | None,
    samples: int | None,
    seed: int,
) -> NoiseLevels:
    """Measure ``batches`` batches of each size, and ``samples`` samples one by one."""
    total, order = problem.num_samples, problem.num_parameters
    count = min(total, MOST_SAMPLES) if samples is None else samples
    matrix = CURVATURES[operator](problem)
    top, smallest = _ends(matrix, operator == "ggn", seed)
    total_curvature = trace(matrix, TRACE_TOL, seed=seed)
    spread = variance(problem, seed=seed, samples=count)
    element = spread.hessian_variance if operator == "hessian" else spread.ggn_variance
    assert element is not None
    along = along_pairs(problem, top, operator, PROBES, count, seed, refuse_foreign=False)
    views = []
    passes = float(top.cost + smallest.cost + total_curvature.cost + spread.cost + along.cost)
    for size in batch_sizes:
        number = _count(batches, size, total)
        pairs = batch_eigenpairs(problem, size, number, 1, seed, operator, top)
        predicted = {
            "additive": predict(top, element, size, total, "additive").largest,
            "directional": predict(top, along, size, total, "directional").largest,
        }
        views.append(_view(pairs, predicted))
        passes += pairs.cost * size / total
        report("advice", len(views), len(batch_sizes))
    layers = problem.source.modules() if isinstance(problem.source, torch.nn.Module) else ()
    ends = _entries(along.eigenvalues)[0], replace(smallest, cost=0)
    gradient = Estimate(float(spread.gradient_mean_norm) ** 2 / order), spread.gradient_variance
    measured = NoiseLevels(
        operator, order, total, *ends, element, along, total_curvature, *gradient, tuple(views)
    )
    return replace(
        measured,
        cost=math.ceil(passes),
        status=Status.joint((top.status, smallest.status)),
        quadratic=_is_quadratic(problem, operator, top),
        # layers before which the length of weights does not matter
        normalized=any(isinstance(layer, NORMS) for layer in layers),
    )


def _is_quadratic(problem: Problem, operator: str, top: Eigenpairs) -> bool:
    """Whether Hφ₁ is the same after a gradient step and a step along φ₁."""
    largest, vector = float(top.values[0]), top.vectors[:, 0].to(problem.device, problem.dtype)
    if not largest > 0:
        return False
    theta = problem.vector
    across = math.sqrt(2 * abs(problem.loss()) / largest)
    away = theta - 2 / largest * problem.gradient() + across * vector
    if not bool(torch.isfinite(away).all()):
        return False
    here, there = (CURVATURES[operator](problem.at(place)) @ vector for place in (theta, away))
    return bool(torch.linalg.vector_norm(there - here) <= CONSTANT * largest)


def batch_levels(
    problem: Problem, batch_sizes: Sequence[int], batches: int | None, seed: int
) -> BatchLevels:
    """Measure λ₁ of the Hessian of ``batches`` batches of each size, and nothing else."""
    total, measured = problem.num_samples, []
    for size in batch_sizes:
        measured.append(batch_eigenpairs(problem, size, _count(batches, size, total), 1, seed))
        report("advice", len(measured), len(batch_sizes))
    passes = math.ceil(sum(each.cost * each.batch_size / total for each in measured))
    status = Status.joint(each.status for each in measured)
    views = tuple(_view(each, {}) for each in measured)
    return BatchLevels("hessian", problem.num_parameters, total, views, passes, status)


def _ends(matrix: LinearOperator, psd: bool, seed: int) -> tuple[Eigenpairs, Estimate]:
    """The sharpest eigenpairs and the smallest eigenvalue, which is only bounded for a GGN."""
    count = matrix.dim if matrix.dim <= WHOLE else TOP
    top = eigenpairs(matrix, count, "largest", TOL, seed=seed)
    if psd:
        return top, Estimate(0.0, math.inf)
    low = eigenpairs(matrix, 1, "smallest", TOL, seed=seed)
    return top, Estimate(float(low.values[0]), float(low.residuals[0]), low.cost, low.status)


def _count(batches: int | None, size: int, total: int) -> int:
    """The number of batches: 1 for all data; by default as many as hold all data once."""
    if size == total:
        return 1
    return min(max(total // size, BATCHES[0]), BATCHES[1]) if batches is None else batches


def _entries(estimate: Estimate) -> list[Estimate]:
    """Several estimates one by one."""
    values = torch.as_tensor(estimate.value).tolist()
    errors = torch.as_tensor(estimate.stderr).tolist()
    return [Estimate(value, error) for value, error in zip(values, errors, strict=True)]


def _view(pairs: BatchEigenvalues, predicted: Mapping[str, Estimate]) -> BatchView:
    """All data has no spread; of batches, the sharpness and its error by the delta method."""
    b = effective_batch(pairs.batch_size, pairs.population)
    values = np.asarray(pairs.largest[:, 0], dtype=np.float64)
    if math.isinf(b):
        exact = Estimate(float(values[0]))
        overlap = Estimate(math.nan if pairs.overlaps is None else 1.0)
        return BatchView(pairs.batch_size, b, exact, 0.0, exact, overlap, predicted)
    mean, spread = float(values.mean()), float(values.std(ddof=1))
    sharpness = mean + spread**2 / mean
    error = float((values**2 - sharpness * values).std(ddof=1)) / abs(mean) / math.sqrt(len(values))
    seen = Estimate(sharpness, error, pairs.cost, pairs.status, len(values) - 1)
    overlap = Estimate(math.nan, math.nan) if pairs.overlaps is None else pairs.mean("overlaps")
    return BatchView(pairs.batch_size, b, pairs.mean(), spread, seen, overlap, predicted)
