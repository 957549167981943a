"""Effective dimensions that the curvature shows, to hold the learning coefficient against."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from lambdahat._core.check import require, require_positive
from lambdahat.operators.base import LinearOperator
from lambdahat.operators.curvature import hessian
from lambdahat.operators.matrix import OperatorLike, as_operator
from lambdahat.problem import Problem
from lambdahat.results import Estimate, Result, Spectrum, Status
from lambdahat.singular.eigenvalues import DEFAULT_PROBES, Sampled, Whole, eigenvalues

Source = Problem | LinearOperator | Spectrum


@dataclass(frozen=True)
class EffectiveDimensions(Result):
    """How many directions the data determine, counted in four ways, at the curvature ``z`` of the
    prior.

    ``parameters`` is P. ``rank`` counts the eigenvalues beyond ±``threshold``, ``negative`` those
    of them below 0. ``n_eff`` is Σ λ/(λ + z), and ``logdet`` is log det(I + H/z) = Σ log(1 + λ/z),
    which grows by n_eff for each unit of −ln z. In these two a negative eigenvalue counts as 0: it
    holds no parameter in place. ``cost`` counts products.
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
    source = _read_source(source)
    curvature = _prior_curvature(source, z)
    asked = None if threshold is None else require_positive(threshold, "threshold")
    found = _eigenvalues(source, depth, probes, seed)
    limit = found.zero if asked is None else asked
    rank, negative = found.outside(-limit, limit), found.outside(-limit, math.inf)
    n_eff, logdet = _n_eff(found, curvature), shifted_logdet(found, curvature)
    status = first_problem(n_eff, logdet, rank, negative)
    parameters = Estimate(float(found.dim))
    return EffectiveDimensions(
        parameters, rank, n_eff, logdet, negative, curvature, limit, found.cost, status
    )


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
    source = _read_source(source)
    return _n_eff(_eigenvalues(source, depth, probes, seed), require_positive(z, "z"))


def shifted_logdet(found: Whole | Sampled, z: float, least: float = 0.0) -> Estimate:
    """log det(I + A/z) = Σ log(1 + λ/z), with an eigenvalue below ``least`` > −z taken as that."""
    return _resolved(
        found.total(lambda values: np.log1p(np.maximum(values, least) / z), z), found, z
    )


def first_problem(*parts: Estimate) -> Status:
    """The first status that is not CONVERGED."""
    return next((part.status for part in parts if not part.status.ok), Status.CONVERGED)


def _n_eff(found: Whole | Sampled, z: float) -> Estimate:
    positive = found.total(
        lambda values: np.maximum(values, 0.0) / (np.maximum(values, 0.0) + z), z
    )
    return _resolved(positive, found, z)


def _resolved(estimate: Estimate, found: Whole | Sampled, z: float) -> Estimate:
    """PRECISION_LIMIT where rounding alone could make an eigenvalue of 0 count."""
    return (
        dataclasses.replace(estimate, status=Status.PRECISION_LIMIT)
        if found.resolution >= z
        else estimate
    )


def _eigenvalues(source: Source, depth: int | None, probes: int, seed: int) -> Whole | Sampled:
    if isinstance(source, Spectrum):
        return Sampled(source)
    return eigenvalues(
        hessian(source) if isinstance(source, Problem) else source, depth, probes, seed
    )


def _prior_curvature(source: Source, z: float | None) -> float:
    if z is not None:
        return require_positive(z, "z")
    require(
        isinstance(source, Problem),
        "z",
        f"be given for a {type(source).__name__}",
        "None",
        "1/n is the curvature of a unit Gaussian prior beside the mean loss over n samples",
    )
    assert isinstance(source, Problem)
    return 1.0 / source.num_terms


def _read_source(source: Source | OperatorLike) -> Source:
    """The problem, the spectrum or the operator; a matrix as an operator."""
    if isinstance(source, Problem | LinearOperator | Spectrum):
        return source
    expected, cure = (
        "be a Problem, an operator, a matrix or a Spectrum",
        "wrap a model with lh.Problem(model, loss, data)",
    )
    return as_operator(source, "source", expected, cure)
