"""The evidence of a model by Laplace's method, and the Bayesian information criterion.

What is exponentiated is n·L, L being the problem's mean loss over its n samples. It is a
log-likelihood only where the loss is a negative log-likelihood: cross-entropy is one,
``gaussian_nll`` lacks its constant ½ log 2π, and "mse" is a likelihood of no noise that was
measured. For noise of variance σ² take the loss (f − y)²/(2σ²) + ½ log 2πσ².
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lambdahat._core.check import require_choice, require_count, require_positive
from lambdahat.estimators import DEFAULT_DEPTH, eigenpairs
from lambdahat.krylov import lanczos
from lambdahat.operators.base import LinearOperator
from lambdahat.operators.curvature import hessian
from lambdahat.problem import Problem, require_problem
from lambdahat.results import Array, Estimate, Result, Status
from lambdahat.singular.dimensions import shifted_logdet
from lambdahat.singular.eigenvalues import DEFAULT_PROBES, SHARES, Whole, eigenvalues, tail


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


@dataclass(frozen=True)
class _Curvature:
    """``gain`` = log det(I + H/z), the smallest eigenvalue kept of a truncated one, and all of
    them where known.
    """

    gain: Estimate
    cutoff: float | None = None
    whole: Whole | None = None


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
    if top is not None:
        require_count(
            top, "top", 1, problem.num_parameters, "there are no more eigenvalues than parameters"
        )
    operator, samples, size = hessian(problem), problem.num_terms, problem.num_parameters
    offset = problem.vector if centre == "zero" else torch.zeros_like(problem.vector)
    curvature = _curvature(operator, precision / samples, top, depth, probes, seed)
    gradient = samples * problem.gradient() + precision * offset
    decrement = _decrement(operator, gradient, samples, precision, curvature.whole, depth)
    pull = 0.5 * precision * float(offset.double().square().sum())
    fit = Estimate(-samples * problem.loss())
    prior = Estimate(0.5 * size * math.log(precision / (2 * math.pi)) - pull)
    gain = curvature.gain
    logdet = dataclasses.replace(gain, value=float(gain) + size * math.log(precision))
    occam = dataclasses.replace(
        gain, value=-0.5 * float(gain) - pull, stderr=0.5 * float(gain.stderr)
    )
    moving = gain.status is not Status.INDEFINITE and float(decrement) > max(
        1.0, float(occam.stderr)
    )
    status = Status.NOT_STATIONARY if moving else gain.status
    cost = operator.matvecs
    energy = dataclasses.replace(occam, value=-float(fit) - float(occam), cost=cost, status=status)
    return LaplaceEvidence(
        energy,
        fit,
        prior,
        occam,
        logdet,
        decrement,
        precision,
        centre,
        top,
        curvature.cutoff,
        cost,
        status,
    )


def bic(problem: Problem) -> Estimate:
    """BIC = n·L(w*) + (d/2)·ln n, with d the number of parameters (Schwarz 1978): the free energy
    of a regular model.

    Half of the convention that multiplies by 2. F − BIC stays bounded as n grows where the Hessian
    has full rank; a singular model has a smaller free energy, with λ in place of d/2.
    """
    require_problem(problem)
    penalty = 0.5 * problem.num_parameters * math.log(problem.num_terms)
    return Estimate(problem.num_terms * problem.loss() + penalty)


def _curvature(
    operator: LinearOperator, z: float, top: int | None, depth: int | None, probes: int, seed: int
) -> _Curvature:
    """log det(I + H/z), of every eigenvalue or of the largest alone."""
    steps = DEFAULT_DEPTH if depth is None else require_count(depth, "depth")
    if top is not None and operator.dim > require_count(probes, "probes") * steps:
        pairs = eigenpairs(operator, top, seed=seed)
        values, residuals = pairs.values.numpy(), pairs.residuals.numpy()
        return _Curvature(
            _truncated(values, residuals, z, pairs.cost, pairs.status), float(values[-1])
        )
    found = eigenvalues(operator, depth, probes, seed)
    whole = found if isinstance(found, Whole) else None
    if whole is not None and top is not None:
        kept = whole.values[::-1][:top]
        gain = _truncated(kept, np.zeros_like(kept), z, whole.cost, Status.CONVERGED)
        return _Curvature(gain, float(kept[-1]), whole)
    gain = shifted_logdet(found, z, _floor(found.least, z))
    indefinite = found.least <= -max(z, found.resolution)
    return _Curvature(
        dataclasses.replace(gain, status=Status.INDEFINITE) if indefinite else gain, None, whole
    )


def _truncated(values: Array, residuals: Array, z: float, cost: int, status: Status) -> Estimate:
    """Σ log(1 + λ/z) over eigenvalues in descending order; the error is what their residuals
    allow.
    """
    least = float(values[-1])
    kept = np.maximum(values, _floor(least, z))
    status = Status.INDEFINITE if least <= -z else status
    return Estimate(
        float(np.log1p(kept / z).sum()), float((residuals / (kept + z)).sum()), cost, status
    )


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
