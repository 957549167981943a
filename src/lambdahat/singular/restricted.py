"""Part of the data: the losses of single samples along a chain.

The learning coefficient restricted to part of the data is ``llc(problem.subset(indices))``: as in
the data-refined coefficient of Wang et al. (2024, "Differentiation and specialization of attention
heads via the refined local learning coefficient"), the loss on that part is both what the chain
samples and what is averaged, and n is its size. The centre need not be a minimum of it, and then
the status says NOT_A_MINIMUM.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lambdahat.problem import Problem, require_problem
from lambdahat.sampling.per_sample import SampleLosses


def sample_losses(problem: Problem, indices: Tensor | Sequence[int] | None = None) -> SampleLosses:
    """θ ↦ the loss of every sample, or of those at ``indices`` in the data's order: an observable
    for ``sample``.

    ``sample(problem, kernel, observables={"losses": sample_losses(problem, range(10))})`` records
    (chains, draws, 10).
    """
    require_problem(problem)
    frozen = problem.at(problem.vector)
    return SampleLosses(frozen if indices is None else frozen.subset(indices))
