"""The extreme eigenvalues that single batches show, measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from lambdahat._core.check import require, require_choice, require_count
from lambdahat._core.progress import report
from lambdahat._core.rng import generator
from lambdahat._core.storage import Result, Status
from lambdahat.estimators import eigenpairs
from lambdahat.operators import ggn, hessian
from lambdahat.problem import Problem, require_problem
from lambdahat.results import Array, Eigenpairs, Estimate

CURVATURES = {"hessian": hessian, "ggn": ggn}


@dataclass(frozen=True)
class BatchEigenvalues(Result):
    """Extreme eigenvalues of the curvature of single batches, each array one row a batch.

    ``largest`` (batches, k) falls along a row, ``smallest`` (batches, k) rises. ``overlaps``
    (batches, k) are |φ̂_mᵀφ_m|² of the m-th largest's vector with the full data's, if that was
    given. ``cost`` counts products with the batches' matrices.
    """

    batch_size: int
    population: int
    dimension: int
    operator: str
    largest: Array
    smallest: Array
    overlaps: Array | None = None
    cost: int = 0
    status: Status = Status.CONVERGED

    def __len__(self) -> int:
        return len(self.largest)

    def mean(self, which: str = "largest", rank: int = 0) -> Estimate:
        """The mean over batches, with its standard error; ``which`` is "largest", "smallest" or
        "overlaps".
        """
        readings = self._readings(which)[:, rank]
        error = readings.std(ddof=1) / math.sqrt(len(readings)) if len(readings) > 1 else math.nan
        return Estimate(
            float(readings.mean()), float(error), self.cost, self.status, max(len(readings) - 1, 1)
        )

    def spread(self, which: str = "largest", rank: int = 0) -> float:
        """The standard deviation between batches."""
        readings = self._readings(which)[:, rank]
        return float(readings.std(ddof=1)) if len(readings) > 1 else math.nan

    def _readings(self, which: str) -> Array:
        found = {"largest": self.largest, "smallest": self.smallest, "overlaps": self.overlaps}
        readings = found[require_choice(which, "which", tuple(found))]
        require(
            readings is not None,
            "overlaps",
            "have been measured",
            "None",
            "pass full= to batch_eigenpairs",
        )
        assert readings is not None
        return readings


def batch_eigenpairs(
    problem: Problem,
    batch_size: int,
    batches: int = 10,
    k: int = 1,
    seed: int = 0,
    operator: str = "hessian",
    full: Eigenpairs | None = None,
    tol: float = 1e-3,
) -> BatchEigenvalues:
    """The k largest and k smallest eigenvalues of the Hessian (or "ggn") of each of several random
    batches.

    Batches are drawn without replacement within each, independently of one another and of batches
    of other sizes. ``full`` are the k largest or more eigenpairs of the same operator on all the
    data, for the overlaps; ``tol`` is that of ``lh.eigenpairs``, 1e-3 since batches differ by far
    more.
    """
    require_problem(problem)
    require_count(
        batch_size,
        "batch_size",
        1,
        problem.num_samples,
        "a batch is drawn from the problem's samples",
    )
    require_count(batches, "batches")
    require_count(k, "k", 1, problem.num_parameters)
    require_choice(operator, "operator", tuple(CURVATURES))
    vectors = None if full is None else _reference(problem, full, k)
    found = []
    for i in range(batches):
        pairs = _extremes(_batch(problem, batch_size, seed, i), operator, k, tol, seed)
        found.append((pairs, None if vectors is None else _overlaps(pairs, vectors)))
        report("batch curvature", i + 1, batches)
    every = [pairs for pairs, _ in found]
    return BatchEigenvalues(
        batch_size,
        problem.num_samples,
        problem.num_parameters,
        operator,
        largest=np.stack([pairs.values[:k].cpu().numpy() for pairs in every]),
        smallest=np.stack([pairs.values.flip(0)[:k].cpu().numpy() for pairs in every]),
        overlaps=None
        if vectors is None
        else np.stack([overlap for _, overlap in found if overlap is not None]),
        cost=sum(pairs.cost for pairs in every),
        status=next((pairs.status for pairs in every if not pairs.status.ok), Status.CONVERGED),
    )


def _batch(problem: Problem, batch_size: int, seed: int, i: int) -> Problem:
    """The problem on one random batch, in pieces no larger than its own unless batch-norm must
    see it whole.
    """
    chosen = torch.randperm(
        problem.num_samples, generator=generator(seed, "batch curvature", batch_size, i)
    )
    chosen = chosen[:batch_size]
    most = batch_size if problem.norm == "train" else min(batch_size, max(problem.batches.sizes))
    return problem.subset(chosen, most)


def _extremes(batch: Problem, operator: str, k: int, tol: float, seed: int) -> Eigenpairs:
    """k pairs at each end, in descending order."""
    return eigenpairs(CURVATURES[operator](batch), k, "both", tol=tol, seed=seed)


def _reference(problem: Problem, full: Eigenpairs, k: int) -> torch.Tensor:
    right = (
        isinstance(full, Eigenpairs)
        and full.vectors.shape[0] == problem.num_parameters
        and len(full) >= k
    )
    require(
        right,
        "full",
        f"be {k} eigenpairs or more of order {problem.num_parameters}",
        full,
        "take them of the same problem: lh.eigenpairs(lh.hessian(problem), k)",
    )
    falling = bool((full.values[:k].diff() <= 0).all()) and float(full.values[0]) >= float(
        full.values.max()
    )
    require(
        falling,
        "full",
        "begin with the largest eigenvalues",
        "others",
        'ask for which="largest" or "both"',
    )
    return full.vectors[:, :k]


def _overlaps(pairs: Eigenpairs, vectors: torch.Tensor) -> Array:
    own = pairs.vectors[:, : vectors.shape[1]]
    dots = (own.double() * vectors.to(own.device).double()).sum(dim=0)
    return np.asarray(dots.square().clamp(max=1.0).cpu().numpy())
