"""Draws at one temperature as weighted draws at another."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from lambdahat._core.check import require, require_positive
from lambdahat.results import Array, Chains, Estimate, Result, Status
from lambdahat.singular.stretches import in_stretches, jackknife

ENOUGH = 100.0  # effective draws below which the weights count as those of a few


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
        """The mean at ``nbeta`` of what each draw showed, (chains, draws), with its standard
        error.
        """
        shown = np.asarray(values, dtype=np.float64)
        require(
            shown.shape == self.weights.shape, "values", f"have shape {self.weights.shape}", shown
        )
        kept = self.weights.sum(axis=1) > 0
        weights, weighted = self.weights[kept], self.weights[kept] * shown[kept]
        (found,) = jackknife(_ratio, [in_stretches(weights), in_stretches(weighted)])
        return dataclasses.replace(found, status=self.status)


def reweighted(chains: Chains, nbeta: float) -> Reweighting:
    """The weights exp(−(nβ' − nβ)·(L_n(w) − L_n(w*))), divided by their sum, that take draws from
    nβ to nβ'.

    They need the loss of every draw over the whole data: chains of an exact kernel, or
    baseline="full". The way down in temperature is short: with energies nβ(L − L*) that follow a
    gamma distribution of shape λ and r = nβ'/nβ, the share of effective draws is ((2r − 1)/r²)^λ,
    at r = ln n = 7 only 0.27^λ.
    """
    target = require_positive(nbeta, "nbeta")
    diverged = chains.diagnostics.diverged
    require(
        not diverged.all(),
        "chains",
        "have draws of finite loss",
        "only diverged chains",
        chains.status.value,
    )
    exponents = -(target / chains.nbeta - 1) * chains.full_energies
    exponents = np.where(diverged[:, None], -np.inf, exponents)
    weights = np.exp(exponents - exponents.max())
    weights = weights / weights.sum()
    ess = 1.0 / float((weights**2).sum())
    status = chains.status if ess >= ENOUGH else Status.FEW_WEIGHTS
    return Reweighting(weights, target, chains.nbeta, ess, status)


def _ratio(weight: Array, weighted: Array) -> Array:
    return np.asarray([weighted / weight])
