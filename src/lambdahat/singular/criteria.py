"""What Bayesian statistics says of a solution at β = 1: WAIC, functional variance, Bayes and
Gibbs losses, G_n.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lambdahat._core.check import require, require_count
from lambdahat.problem import Problem, require_problem
from lambdahat.results import Array, Chains, Estimate, Result, Status
from lambdahat.sampling.per_sample import SampleLosses
from lambdahat.singular.reweighting import reweighted
from lambdahat.singular.stretches import STRETCHES, in_stretches, jackknife, joined
from lambdahat.singular.tempered import tempered


@dataclass(frozen=True)
class BayesCriteria(Result):
    """Readings of the posterior at β = 1 over n samples, ℓ_i(w) = −log p(x_i|w), E over its draws.

    ``bayes_training_loss`` T = −(1/n) Σ log E[p(x_i|w)], ``gibbs_training_loss`` (1/n) Σ E[ℓ_i],
    ``functional_variance`` V = Σ Var[ℓ_i], ``waic`` T + V/n and ``singular_fluctuation`` ν = V/2
    belong to the data at hand: their errors are those of the finite number of draws.

    ``bayes_generalisation_loss`` −E_x log E[p(x|w)] and ``gibbs_generalisation_loss`` E_x E[ℓ(x,
    w)] are means over the held-out samples; their errors hold the draws' and that of so many
    samples. ``g_n`` is E[F_{n+1}] − F_n, F_n the free energy, which is −E_x log E[p(x|w)] too: the
    Bayes generalisation loss where there are held-out data, else the WAIC with the error of n
    samples added; ``g_n_from`` tells which. ``g_n_draws_error`` is the part of its error that more
    draws would take away.

    ``how`` is "own chains" (sampled at nβ = n) or "reweighted" (from chains at another nβ); ``ess``
    is the effective number of draws of the chains, or of their weights. ``cost`` counts gradients.
    """

    waic: Estimate
    functional_variance: Estimate
    singular_fluctuation: Estimate
    bayes_training_loss: Estimate
    gibbs_training_loss: Estimate
    g_n: Estimate
    g_n_from: str
    g_n_draws_error: float
    how: str
    ess: float
    chains: Chains
    bayes_generalisation_loss: Estimate | None = None
    gibbs_generalisation_loss: Estimate | None = None
    cost: int = 0
    status: Status = Status.CONVERGED


def bayes_criteria(
    problem: Problem, held_out: Any = None, chains: int | Chains = 4, seed: int = 0, **settings: Any
) -> BayesCriteria:
    """WAIC, functional variance, Bayes and Gibbs losses and G_n of the posterior around the
    problem's parameters w*.

    The loss is read as ℓ(x, w) = −log p(x|w). A constant missing from it shifts the losses alike; a
    factor, such as that of "mse", which is the likelihood of a Gaussian with variance ½ for each
    output, is another temperature. The localization γ is the prior, N(w*, γ⁻¹): where it is not
    weak against nβ times the curvature, V is too small and WAIC too near the training loss, for the
    prior has seen the data.

    ``held_out`` is other data, or a problem of the same model on them. ``chains`` is a number, to
    sample at nβ = n with ``settings`` as for ``llc``, or chains already there with ``parameters``
    (``keep_parameters=True``): those at another temperature are reweighted, which fails for all but
    the smallest λ and then says FEW_WEIGHTS.

    At another β, WAIC is T + βV/n and ν = βV/2; E[G_n − L(w₀)] is ((λ − ν)/β + ν)/n and the Gibbs
    loss has (λ/β + ν)/n (Watanabe 2009, "Algebraic geometry and statistical learning theory",
    chapter 6; WAIC: Watanabe 2010, "Asymptotic equivalence of Bayes cross validation and widely
    applicable information criterion"). G_n: Eq. 28, the NGD paper.
    """
    require_problem(problem)
    frozen = problem.at(problem.vector)
    sets = [_Rises(frozen)]
    if held_out is not None:
        sets.append(_Rises(_elsewhere(frozen, held_out), "held_out"))
    if isinstance(chains, Chains):
        require(not settings, "settings", "be left out where chains are given", ", ".join(settings))
        return _of_draws(frozen, sets, chains)
    require_count(chains, "chains")
    averages = {f"rises {number}": rises for number, rises in enumerate(sets)}
    nbeta = float(frozen.num_samples)
    found = tempered(frozen, nbeta, chains=chains, seed=seed, averages=averages, **settings).chains
    kept = _kept(found)
    sums = joined([found.averages[name][kept] for name in averages], found.stretches)
    lean = dataclasses.replace(found, averages={}, stretches=())
    return _criteria(sets, sums, lean, "own chains", lean.diagnostics.ess_bulk, lean.status)


class _Rises:
    """θ ↦ [exp(−δ), δ, δ²] of every sample, (3, n), δ = ℓ(θ) − ℓ(w*): small numbers, so that
    nothing underflows.
    """

    def __init__(self, problem: Problem, name: str = "problem") -> None:
        require(
            problem.has_data,
            name,
            "have data",
            "a loss without any",
            "WAIC and its kin compare samples",
        )
        self._losses = SampleLosses(problem)
        self._centre = self._losses(problem.vector).double()

    @property
    def centre(self) -> Array:
        """ℓ(w*) of every sample, (n,)."""
        return self._centre.cpu().numpy()

    def __call__(self, theta: Tensor) -> Tensor:
        rises = self._losses(theta).double() - self._centre
        return torch.stack([torch.exp(-rises), rises, rises.square()])


def _elsewhere(problem: Problem, held_out: Any) -> Problem:
    """The problem on the held-out data, at the same parameters."""
    if not isinstance(held_out, Problem):
        return problem.on(held_out)
    require(
        held_out.space == problem.space,
        "held_out",
        "have the problem's parameters",
        held_out,
        "pass the data alone, or problem.on(data)",
    )
    return held_out.at(problem.vector)


def _kept(chains: Chains) -> NDArray[np.bool_]:
    """Which chains did not diverge; an error where none is left."""
    kept = ~chains.diagnostics.diverged
    require(
        bool(kept.any()),
        "chains",
        "have draws of finite loss",
        "only diverged chains",
        chains.status.value,
    )
    return kept


def _of_draws(problem: Problem, sets: Sequence[_Rises], chains: Chains) -> BayesCriteria:
    """The criteria from the parameters of draws, weighted where they were drawn at another
    temperature.
    """
    parameters, count = chains.parameters, problem.num_samples
    require(
        parameters is not None,
        "chains",
        "hold the parameters of their draws",
        "chains without",
        "sample with keep_parameters=True, or pass the number of chains",
    )
    assert parameters is not None
    ours = parameters.shape[-1] == problem.num_parameters and chains.num_samples == count
    require(
        ours,
        "chains",
        f"be of a problem with {problem.num_parameters} parameters and {count} samples",
        f"{parameters.shape[-1]} parameters, {chains.num_samples} samples",
    )
    own = math.isclose(chains.nbeta, count, rel_tol=1e-9)
    ess, status, weights = chains.diagnostics.ess_bulk, chains.status, np.ones(chains.losses.shape)
    if not own:
        weighting = reweighted(chains, count)
        ess, status, weights = (
            weighting.ess,
            weighting.status,
            weighting.weights * weighting.weights.size,
        )
    kept = _kept(chains)
    sums = _weighted_sums(problem, sets, parameters[torch.from_numpy(kept)], weights[kept])
    return _criteria(sets, sums, chains, "own chains" if own else "reweighted", ess, status)


def _weighted_sums(
    problem: Problem, sets: Sequence[_Rises], parameters: Tensor, weights: Array
) -> list[Array]:
    """Of stretches the weights, (chains, stretches), and what they weigh, (chains, stretches, 3,
    n), both as sums.
    """
    draws = weights.shape[1]
    cuts = np.array_split(np.arange(draws), min(STRETCHES, draws))

    def total(rises: _Rises, chain: int, cut: Any) -> Array:
        parts = (
            float(weights[chain, i]) * rises(parameters[chain, i].to(problem.device)) for i in cut
        )
        mean = torch.stack(list(parts)).sum(0) * (len(cuts) / draws)
        return np.asarray(mean.cpu().numpy(), dtype=np.float64)

    rows = range(len(weights))
    seen = [
        np.stack([np.stack([total(rises, row, cut) for cut in cuts]) for row in rows])
        for rises in sets
    ]
    return [in_stretches(weights), *seen]


def _criteria(
    sets: Sequence[_Rises],
    sums: Sequence[Array],
    chains: Chains,
    how: str,
    ess: float,
    status: Status,
) -> BayesCriteria:
    """All readings, with the jackknife over stretches for the errors."""
    centres = [rises.centre for rises in sets]

    def by_sample(weight: Array, *parts: Array) -> list[tuple[Array, Array, Array]]:
        return [
            _by_sample(part / weight, centre) for part, centre in zip(parts, centres, strict=True)
        ]

    def readings(*pooled: Array) -> Array:
        (bayes, gibbs, variance), *elsewhere = by_sample(*pooled)
        others = [row.mean() for part in elsewhere for row in part[:2]]
        return np.asarray(
            [bayes.mean(), gibbs.mean(), variance.sum(), (bayes + variance).mean(), *others]
        )

    bayes, gibbs, variance, waic, *others = (
        dataclasses.replace(estimate, cost=chains.cost, status=status)
        for estimate in jackknife(readings, sums)
    )
    train, *held_out = by_sample(*[part.mean(axis=(0, 1)) for part in sums])
    losses = [
        _over_samples(loss, row)
        for loss, row in zip(others, held_out[0][:2] if held_out else (), strict=True)
    ]
    return BayesCriteria(
        waic=waic,
        functional_variance=variance,
        singular_fluctuation=_halved(variance),
        bayes_training_loss=bayes,
        gibbs_training_loss=gibbs,
        g_n=losses[0] if losses else _over_samples(waic, train[0] + train[2]),
        g_n_from="held-out data" if losses else "WAIC",
        g_n_draws_error=float((others[0] if losses else waic).stderr),
        how=how,
        ess=ess,
        chains=chains,
        bayes_generalisation_loss=losses[0] if losses else None,
        gibbs_generalisation_loss=losses[1] if losses else None,
        cost=chains.cost,
        status=status,
    )


def _by_sample(means: Array, centre: Array) -> tuple[Array, Array, Array]:
    """−log E[p], E[ℓ] and Var[ℓ] of every sample from E[exp(−δ)], E[δ], E[δ²]."""
    likelihood, rise, square = means
    return centre - np.log(likelihood), centre + rise, square - rise**2


def _over_samples(estimate: Estimate, by_sample: Array) -> Estimate:
    """The estimate as one of the mean over all samples there could be: the error of so many is
    added.
    """
    count = len(by_sample)
    among = float(by_sample.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan
    within = float(estimate.stderr)
    error = math.hypot(within, among)
    freedom = within**4 / estimate.dof + among**4 / max(count - 1, 1)  # Welch and Satterthwaite
    dof = error**4 / freedom if freedom > 0 else math.inf
    return dataclasses.replace(estimate, stderr=error, dof=dof)


def _halved(estimate: Estimate) -> Estimate:
    return dataclasses.replace(
        estimate, value=float(estimate) / 2, stderr=float(estimate.stderr) / 2
    )
