"""One point of the mini-batch experiment: full-data curvature, its noise over samples, the
batches' own extremes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from lambdahat._core.progress import report
from lambdahat._core.rng import derived_seed, generator
from lambdahat.estimators import eigenpairs, spectrum, variance
from lambdahat.experiments.minibatch.eigen_subjects import Effort, Subject
from lambdahat.experiments.minibatch.points import CLAIMED_SIZE, BatchCell, CurvaturePoint
from lambdahat.krylov import lanczos, random_vector
from lambdahat.operators.base import LinearOperator
from lambdahat.operators.curvature import ggn, hessian
from lambdahat.problem import Problem
from lambdahat.randommatrix.batch_curvature import BatchEigenvalues
from lambdahat.randommatrix.directions import directional_variance
from lambdahat.results import Eigenpairs

OPERATORS = {"hessian": hessian, "ggn": ggn}
SPECTRA = 4  # batches whose whole spectrum is seen


def measure_point(
    subject: Subject, epoch: int, problem: Problem, seed: int, spectra: int = SPECTRA
) -> Iterator[CurvaturePoint]:
    """A network at one epoch through Hessian and GGN, without predictions; the whole spectrum of
    so many batches.
    """
    effort, stream = subject.effort, derived_seed(seed, subject.network, epoch)
    samples = None if effort.samples is None else min(effort.samples, problem.num_samples)
    elements = variance(problem, effort.probes, stream, samples)
    size = min(CLAIMED_SIZE, problem.num_samples)
    batches = [problem.subsample(size, derived_seed(stream, "spectra", i)) for i in range(spectra)]
    for name in subject.operators:
        operator = OPERATORS[name]
        element = elements.hessian_variance if name == "hessian" else elements.ggn_variance
        assert element is not None
        pairs = _pairs(operator(problem), effort, name == "hessian", stream)
        whole, *parts = (
            spectrum(operator(each), effort.depth, seed=stream) for each in (problem, *batches)
        )
        along = directional_variance(problem, pairs, name, effort.probes, samples, stream)
        cells = tuple(
            BatchCell(
                batch_extremes(
                    problem, name, size, effort.batches, effort.steps, pairs.vectors[:, 0], stream
                )
            )
            for size in subject.batch_sizes
        )
        yield CurvaturePoint(
            subject.network,
            epoch,
            name,
            problem.num_samples,
            problem.loss(),
            element,
            along,
            _without_vectors(pairs),
            cells,
            size,
            whole,
            tuple(parts),
        )


def batch_extremes(
    problem: Problem, operator: str, size: int, batches: int, steps: int, vector: Tensor, seed: int
) -> BatchEigenvalues:
    """Largest and smallest eigenvalue of each of several random batches, and the overlap with the
    full data's φ₁.

    By ``steps`` of Lanczos, whatever the residual: a loose tolerance may be met by the second
    eigenvalue before the start has grown towards the first, and a fixed number costs what was
    planned.
    """
    found = []
    for i in range(batches):
        chosen = torch.randperm(problem.num_samples, generator=generator(seed, "batch", size, i))[
            :size
        ]
        part = problem.subset(chosen, min(size, max(problem.batches.sizes)))
        found.append(_extremes(OPERATORS[operator](part), steps, vector, seed))
        report(f"{operator}, batches of {size}", i + 1, batches)
    columns = np.array(found).T[:, :, None]
    return BatchEigenvalues(
        size,
        problem.num_samples,
        problem.num_parameters,
        operator,
        columns[0],
        columns[1],
        columns[2],
        batches * steps,
    )


def _extremes(
    operator: LinearOperator, steps: int, vector: Tensor, seed: int
) -> tuple[float, float, float]:
    """λ'₁, λ'_P and |φ̂₁ᵀφ₁|², φ̂₁ = Qs the leading Ritz vector."""
    run = lanczos(operator, random_vector(operator, seed, "batch start"), min(steps, operator.dim))
    matrix = torch.diag(run.alpha) + torch.diag(run.beta, 1) + torch.diag(run.beta, -1)
    values, weights = torch.linalg.eigh(matrix)
    shadow = (run.basis.T @ vector.to(run.basis)).double().cpu()
    return float(values[-1]), float(values[0]), min(float(weights[:, -1] @ shadow) ** 2, 1.0)


def _pairs(operator: LinearOperator, effort: Effort, indefinite: bool, seed: int) -> Eigenpairs:
    """The full data's largest eigenpairs, descending, and the smallest of an indefinite operator
    after them.

    Both ends are searched to the same number of pairs: a lone smallest one would end the search too
    early.
    """
    found = eigenpairs(
        operator, effort.pairs, "both" if indefinite else "largest", effort.tol, seed=seed
    )
    kept = [*range(effort.pairs), len(found) - 1] if indefinite else list(range(effort.pairs))
    return Eigenpairs(
        found.values[kept],
        found.vectors[:, kept],
        found.residuals[kept],
        found.converged[kept],
        found.cost,
        found.status,
    )


def _without_vectors(pairs: Eigenpairs) -> Eigenpairs:
    """The same for a file: the vectors of a large network are gigabytes, and nothing further
    needs them.
    """
    return Eigenpairs(
        pairs.values,
        pairs.vectors[:, :0].cpu(),
        pairs.residuals,
        pairs.converged,
        pairs.cost,
        pairs.status,
    )
