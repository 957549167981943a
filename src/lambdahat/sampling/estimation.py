"""λ̂ and its standard error from chains."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from lambdahat.results import Array, Chains, Estimate
from lambdahat.sampling.diagnostics import drift, standard_error

DEGREES = (1.0, 8.0)  # between which the degree of the loss around the centre is taken to lie
FLOOR = 0.002  # no error is less than this part of the value
CONTROL = 3.0, 1.03  # the virial's z-score and split R̂ up to which it is used as control variate
BLOCKS = 4  # of each chain: the errors have one degree of freedom less than there are


@dataclass(frozen=True)
class Reading:
    """λ̂ with its error: ``raw`` is the plain mean of nβ(L − L*), ``value`` what is left without
    the bias of the steps.

    ``settled`` is E[(w − w*)·∇U]/P, less what the steps add: 1 when all directions have relaxed,
    NaN where unknown.
    """

    value: float
    stderr: float
    per_chain: Array
    raw: float
    bias: float = 0.0
    settled: float = math.nan
    unsettled: bool = False
    drifting: bool = False
    controlled: bool = False


def read(chains: Chains, parameters: int, full: bool = False) -> Reading:
    """λ̂ from the chains of any kernel, from the losses over the whole data if ``full``, else
    from the paired ones.
    """
    seen = chains.full_energies if full else chains.energies
    energies = np.where(np.isfinite(seen), seen, np.nan)
    kept = energies[~np.isnan(energies).any(axis=1)]
    if len(kept) == 0:
        return Reading(math.nan, math.nan, energies.mean(axis=1), math.nan)
    if not (chains.distances > 0).any():  # what is left then is rounding
        return Reading(0.0, 0.0, np.zeros(len(chains)), 0.0)
    if chains.recycled_losses is not None and chains.virials is not None:
        return _from_trajectories(chains, parameters)
    if chains.step_bias is not None or has_step_bias(chains):
        return _from_steps(chains, seen, parameters)
    value = float(kept.mean())
    return Reading(value, blocked_error(kept), energies.mean(axis=1), value)


def _from_trajectories(chains: Chains, parameters: int) -> Reading:
    """From HMC: energies averaged over trajectories, with the virial as control variate where it
    has settled.

    Under the posterior E[(w − w*)·∇U] = P (Stein), and for a loss of one degree around the centre
    the energy is a multiple of the virial but for the localization: e − c·((w − w*)·∇U − P) then
    has hardly any variance. c is the regression coefficient of block means. While flat directions
    still spread, the mean of the virial is not P, though the energy may have settled: then it is
    left out.
    """
    assert chains.recycled_losses is not None
    assert chains.virials is not None
    energies = chains.nbeta * (chains.recycled_losses - chains.centre_losses)
    excess = chains.virials - parameters
    settled = 1.0 + float(excess.mean()) / parameters
    energies, use = _controlled(energies, excess, chains.distances)
    value = float(energies.mean())
    error = _largest_error(energies, energies)
    raw, change = float(chains.energies.mean()), drift(energies)
    drifting = abs(float(change)) > max(4 * float(change.stderr), 0.1 * abs(value))
    stderr = math.hypot(error, FLOOR * value)
    return Reading(
        value,
        stderr,
        energies.mean(axis=1),
        raw,
        settled=settled,
        drifting=drifting,
        controlled=use,
    )


def _controlled(energies: Array, excess: Array, distances: Array) -> tuple[Array, bool]:
    """The energies less their regression on the virial's excess over P, where that has settled
    at 0; and whether.
    """
    error = standard_error(excess)
    score = float(excess.mean()) / error if error > 0 else math.inf
    most, apart = CONTROL
    if abs(score) >= most or max(_split_rhat(distances**2), _split_rhat(excess)) >= apart:
        return energies, False
    blocks, covariates = _blocks(energies, 8).ravel(), _blocks(excess, 8).ravel()
    covariates = covariates - covariates.mean()
    return energies - float(
        covariates @ (blocks - blocks.mean()) / (covariates @ covariates)
    ) * excess, True


def has_step_bias(chains: Chains) -> bool:
    """Whether the chains show what their steps add: those of SGLD that recorded work and heat."""
    return chains.kernel == "SGLD" and chains.heat is not None and chains.work is not None


def shown_bias(chains: Chains) -> Estimate:
    """What steps add to the mean energy: as measured by two step sizes, else what the chains of
    SGLD show themselves.

    In the second case nothing is taken off: the value is 0 and all of the bias is in the error.
    """
    if chains.step_bias is not None:
        return chains.step_bias
    assert chains.work is not None
    assert chains.heat is not None
    fine = np.isfinite(chains.energies).all(axis=1)
    raw = float(chains.energies[fine].mean())
    found = step_shares(
        chains.step_size, chains.localization, chains.work[fine], chains.heat[fine], raw
    )
    return Estimate(0.0, max(found.bias, (found.whole - found.bias) / 2))


class StepShares(NamedTuple):
    """What steps add on average: all of it, and what is left in the loss."""

    whole: float
    bias: float


def loss_degree(work: Array, raw: float) -> float:
    """The degree q of the loss around the centre, by E[(w − w*)·nβ∇L] = q·E[nβ(L − L*)]; 2 where
    it is not known.
    """
    mean = float(work.mean())
    return float(np.clip(mean / raw, *DEGREES)) if raw > 0 and mean > 0 else 2.0


def step_shares(
    step_size: float, localization: float | Tensor, work: Array, heat: Array, raw: float
) -> StepShares:
    """What the finite, noisy steps of SGLD add to the mean ``raw`` of nβ(L − L*).

    A step is w' = w − (ε/2)F + √ε·ξ with F = ∇U + ζ, ζ the noise of the batch of covariance Σ. With
    r² = ‖w − w*‖², u = (w − w*)·nβ∇L (``work``) and G = nβ∇L·∇U (``heat``) on batches, E[r'²] =
    E[r²] gives E[u] + γE[r²] = P + (ε/4)E‖F‖², where exact steps would give P, and ‖F‖² = G + γ(w −
    w*)·F. So u is too large by

        (ε/4)E[G] + γ·((ε/4)E[(w − w*)·F] − c),  c what the steps add to E[r²].

    Around a minimum of Hessian A of U, E[(w − w*)·F] is P and each direction of r² gains (ε/4)(1 +
    Σ_ii/a_i): the bracket is −(ε/4)·tr(ΣA⁻¹). So much of the noise goes into the localization and
    not into the loss. As A⁻¹ is the covariance of w − w*, tr(ΣA⁻¹) is V = E[Var(u | w)], the
    variance of u over batches, but for what the steps add to that covariance, about the share
    b/raw. A loss of degree q around the centre has u = q·nβ(L − L*), so that

        b = ε(E[G] − γV(1 − b/raw))/(4q),

    which is solved for b: exact to first order in ε for a quadratic with any γ. V is S(0) of S(k),
    half the mean square by which u differs between draws k apart, taken as 2S(1) − S(2). Of a γ for
    each parameter the smallest counts.
    """
    unit = step_size / (4 * loss_degree(work, raw))
    whole = unit * float(heat.mean())
    if work.shape[1] < 3:
        return StepShares(whole, whole)
    near, far = (0.5 * float(np.square(work[:, lag:] - work[:, :-lag]).mean()) for lag in (1, 2))
    tie = float(localization.min()) if isinstance(localization, Tensor) else localization
    pull = unit * tie * (2 * near - far)
    if not 0 < pull < raw or whole <= 0:
        return StepShares(whole, whole)
    kept = min(max((whole - pull) / (1 - pull / raw) / whole, 0.0), 1.0)
    return StepShares(whole, whole * kept)


def _from_steps(chains: Chains, energies: Array, parameters: int) -> Reading:
    """From kernels that never reject: what the steps add is taken off, and its uncertainty goes
    into the error.
    """
    fine = np.isfinite(energies).all(axis=1)
    raw, bias = float(energies[fine].mean()), shown_bias(chains)
    kept, controlled = energies[fine], False
    whole = bool((chains.centre_losses == chains.initial_loss).all())
    if chains.kernel == "Kinetic" and whole and chains.virials is not None:
        kept, controlled = _controlled(
            kept, chains.virials[fine] - parameters, chains.distances[fine]
        )
    value = float(kept.mean()) - float(bias)
    change = drift(kept)
    drifting = abs(float(change)) > max(3 * float(change.stderr), 0.05 * abs(value))
    squares = blocked_error(kept) ** 2 + float(bias.stderr) ** 2
    squares += (float(change) / 2) ** 2 if drifting else 0.0
    settled, its_error = _settled(chains, fine, parameters)
    unsettled = abs(1 - settled) > 3 * its_error
    squares += ((1 - settled) * value) ** 2 if unsettled and chains.step_size > 0 else 0.0
    added = abs(float(bias)) if float(bias) else float(bias.stderr)
    return Reading(
        value,
        math.sqrt(squares),
        energies.mean(axis=1) - float(bias),
        raw,
        added,
        settled,
        abs(1 - settled) > max(0.1, 3 * its_error),
        drifting,
        controlled,
    )


def _settled(chains: Chains, fine: Any, parameters: int) -> tuple[float, float]:
    """E[(w − w*)·∇U]/P, less what the steps add, with its error: 1 when all directions have
    relaxed.
    """
    if chains.virials is None or chains.kernel not in ("SGLD", "Kinetic"):
        return math.nan, math.nan
    balance = chains.virials[fine]
    if chains.kernel == "SGLD":
        assert chains.forces is not None
        balance = balance - chains.step_size / 4 * chains.forces[fine]
    else:
        balance = balance - chains.noise.get("heat", 0.0)
    return float(balance.mean()) / parameters, blocked_error(balance) / parameters


def degrees_of_freedom(chains: Chains) -> float:
    """Those of the errors that are read off chains."""
    return BLOCKS * len(chains) - 1.0


def combined_degrees(errors: Array, degrees: Array) -> float:
    """The degrees of freedom of the root of a sum of squared independent ``errors`` (Welch
    1947).
    """
    squares = np.square(errors)
    shares = float((squares**2 / degrees).sum())
    return float(squares.sum()) ** 2 / shares if shares > 0 else math.inf


def _block_error(values: Array, count: int) -> float:
    """The standard error of the mean from ``count`` blocks of each chain."""
    blocks = _blocks(values, count)
    return float(blocks.std(ddof=1)) / math.sqrt(blocks.size)


def _largest_error(values: Array, draws: Array) -> float:
    """The largest of three standard errors: by autocorrelation, and by 2 and 4 blocks of each
    chain.

    The sum of autocorrelations is truncated where noise hides them, and so misses slow directions
    that long blocks still show. An error from fewer than eight blocks is too noisy to use.
    """
    counts = [count for count in (2, 4) if count * len(draws) >= 8]
    return max([standard_error(values), *(_block_error(draws, count) for count in counts)])


def blocked_error(values: Array) -> float:
    """The standard error of the mean from blocks of √draws, in which the white noise of batches
    hides nothing slow.
    """
    count = values.shape[1] // max(math.isqrt(values.shape[1]), 1)
    return _largest_error(_blocks(values, count) if count >= 8 else values, values)


def _blocks(values: Array, count: int) -> Array:
    """Means of ``count`` equal blocks of each chain's last draws, (chains, count)."""
    size = values.shape[1] // count
    if size == 0:
        return values
    means: Array = (
        values[:, values.shape[1] - size * count :].reshape(len(values), count, size).mean(axis=2)
    )
    return means


def _split_rhat(values: Array) -> float:
    """√(1 + variance between half chains over the variance within)."""
    half = values.shape[1] // 2
    parts = np.concatenate([values[:, :half], values[:, half : 2 * half]])
    within = float(parts.var(axis=1, ddof=1).mean())
    return math.sqrt(1 + float(parts.mean(axis=1).var(ddof=1)) / within) if within > 0 else math.inf
