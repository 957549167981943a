"""Readings of chains: errors of functions of means, losses of single samples, other temperatures.

The learning coefficient restricted to part of the data is ``llc(problem.subset(indices))``: as in
the data-refined coefficient of Wang et al. (2024, "Differentiation and specialization of attention
heads via the refined local learning coefficient"), the loss on that part is both what the chain
samples and what is averaged, and n is its size. The centre need not be a minimum of it, and then
the status says NOT_A_MINIMUM.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from lambdahat._core.check import require, require_positive, require_shape
from lambdahat.problem import Problem, require_problem
from lambdahat.results import Array, Chains, Estimate, Result, Status
from lambdahat.sampling.backends.minibatches import SampleLosses
from lambdahat.sampling.diagnostics import degrees_of_freedom, standard_error, step_bias

STRETCHES = 20
Statistic = Callable[..., Array]
ENOUGH = 100.0  # effective draws below which the weights count as those of a few


def finite_chains(chains: Chains, got: str = "only diverged chains") -> NDArray[np.bool_]:
    """Which chains did not diverge; an error where none is left."""
    kept = ~chains.diagnostics.diverged
    cure = chains.status.value
    require(bool(kept.any()), "chains", "have draws of finite loss", got, cure)
    return kept


def sample_losses(problem: Problem, indices: Tensor | Sequence[int] | None = None) -> SampleLosses:
    """θ ↦ the loss of every sample, or of those at ``indices`` in the data's order: an observable
    for ``sample``.

    ``sample(problem, kernel, observables={"losses": sample_losses(problem, range(10))})`` records
    (chains, draws, 10).
    """
    require_problem(problem)
    frozen = problem.at(problem.vector)
    return SampleLosses(frozen if indices is None else frozen.subset(indices))


def jackknife(statistic: Statistic, stretches: Sequence[Array]) -> list[Estimate]:
    """Readings of means, each (…), as estimates, from the means over stretches of chains, each
    (chains, stretches, …).

    With θ the reading of all N stretches and θ_b that without stretch b, the values θ + (N − 1)(θ −
    θ_b) have the mean that is corrected for bias to first order (Quenouille 1956), and the standard
    error of that mean is that of the estimate (Tukey 1958), here with the correlation of
    neighbouring stretches and the spread of the chains in it. Stretches count alike: where their
    lengths differ, give sums over them and let the statistic divide.
    """
    shape = stretches[0].shape[:2]
    count = math.prod(shape)
    totals = [part.sum(axis=(0, 1)) for part in stretches]
    whole = statistic(*[total / count for total in totals])
    if count == 1:
        return [Estimate(float(value), math.nan) for value in whole]
    without = []
    for place in np.ndindex(*shape):
        rest = (total - part[place] for total, part in zip(totals, stretches, strict=True))
        without.append(statistic(*(part / (count - 1) for part in rest)))
    pseudo = whole + (count - 1) * (whole - np.stack(without))
    estimates = []
    for value, column in zip(pseudo.mean(axis=0), pseudo.T, strict=True):
        # so few stretches tell their correlation badly; a negative one, which would lower the
        # error, is not believed
        values = column.reshape(shape)
        error = np.fmax(standard_error(values), values.std(ddof=1) / math.sqrt(count))
        estimates.append(Estimate(float(value), float(error), dof=count - 1))
    return estimates


def join_stretches(means: Sequence[Array], lengths: Sequence[int]) -> list[Array]:
    """Means over stretches of such lengths, each (chains, stretches, …), as sums over some twenty
    of about one length.

    First come the lengths themselves, (chains, stretches): the ratio of any other to it is a mean
    again.
    """
    counts = np.asarray(lengths, dtype=np.float64)
    middles = (counts.cumsum() - counts / 2) / counts.sum()
    starts = np.unique(np.floor(middles * min(STRETCHES, len(counts))), return_index=True)[1]
    weights = counts * (len(starts) / counts.sum())
    sums = [
        np.add.reduceat(np.moveaxis(np.moveaxis(part, 1, -1) * weights, -1, 1), starts, axis=1)
        for part in means
    ]
    return [np.tile(np.add.reduceat(weights, starts), (len(means[0]), 1)), *sums]


def in_stretches(values: Array) -> Array:
    """Sums over some twenty stretches of values (chains, draws, …), scaled to their mean."""
    draws = values.shape[1]
    parts = np.array_split(values, min(STRETCHES, draws), axis=1)
    return np.stack([part.sum(axis=1) * (len(parts) / draws) for part in parts], axis=1)


def mean_energy(chains: Chains) -> Estimate:
    """nβ·E[L − L*] over the chains that did not diverge.

    From the means over trajectories where there are any, then the losses of the whole data, else
    the paired ones. What steps add is taken off where ``llc`` measured it, with its uncertainty in
    the error. SGLD chains that recorded forces show it themselves: then all of it is in the error.
    Otherwise nothing is known of it.
    """
    energies = chains.energies if chains.full_losses is None else chains.full_energies
    if chains.recycled_losses is not None:
        energies = chains.nbeta * (chains.recycled_losses - chains.initial_loss)
    fine = ~chains.diagnostics.diverged
    if not fine.any():
        return Estimate(math.nan, math.nan, chains.cost, chains.status)
    bias = step_bias(chains) or Estimate(0.0, 0.0)
    error = math.hypot(standard_error(energies[fine]), float(bias.stderr), chains.rounding)
    mean = float(energies[fine].mean()) - float(bias)
    return Estimate(mean, error, chains.cost, chains.status, degrees_of_freedom(chains))


@dataclass(frozen=True)
class Reweighting(Result):
    """Draws of chains at ``from_nbeta`` as draws at ``nbeta``: their ``weights``, (chains, draws),
    sum to 1.

    ``ess`` is 1/Σw² (Kish 1965): as many independent draws at ``nbeta`` would have the same error,
    were the draws of the chains independent. Below 100 the status is FEW_WEIGHTS. Diverged chains
    have weight 0.
    """

    weights: Array
    nbeta: float
    from_nbeta: float
    ess: float
    status: Status = Status.CONVERGED

    def mean(self, values: ArrayLike) -> Estimate:
        """The mean at ``nbeta`` of values of each draw, (chains, draws), with its error."""
        shown = np.asarray(values, dtype=np.float64)
        require_shape(shown, self.weights.shape, "values")
        kept = self.weights.sum(axis=1) > 0
        weights, weighted = self.weights[kept], self.weights[kept] * shown[kept]
        (mean,) = jackknife(
            lambda weight, part: np.asarray([part / weight]),
            [in_stretches(weights), in_stretches(weighted)],
        )
        return dataclasses.replace(mean, status=self.status)


def reweighted(chains: Chains, nbeta: float) -> Reweighting:
    """Normalised weights exp(−(nβ' − nβ)·(L_n(w) − L_n(w*))) that turn draws at nβ into draws at
    nβ'.

    They need the loss of every draw over the whole data: chains of an exact kernel, or
    baseline="full". The way down in temperature is short: with energies nβ(L − L*) that follow a
    gamma distribution of shape λ and r = nβ'/nβ, the share of effective draws is ((2r − 1)/r²)^λ,
    at r = ln n = 7 only 0.27^λ.
    """
    target, kept = require_positive(nbeta, "nbeta"), finite_chains(chains)
    exponents = -(target / chains.nbeta - 1) * chains.full_energies
    exponents = np.where(kept[:, None], exponents, -np.inf)
    weights: Array = scipy.special.softmax(exponents)
    ess = 1.0 / float((weights**2).sum())
    status = chains.status if ess >= ENOUGH else Status.FEW_WEIGHTS
    return Reweighting(weights, target, chains.nbeta, ess, status)
