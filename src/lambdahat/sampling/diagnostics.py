"""Whether chains can be believed, and λ̂ with its standard error from them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lambdahat._core.rng import derived_seed
from lambdahat.problem import Problem
from lambdahat.results import Array, Chains, Diagnostics, Estimate, Status
from lambdahat.sampling.backends.chain_runner import OneByOne, full_data
from lambdahat.sampling.kernels import HMC, Kernel, Streams

PROBE_SAMPLES = 2048
PROBED_ALONE = 10_000_000  # parameters from which chains are probed one by one
AXES = {"chain_axis": 0, "draw_axis": 1}
RHAT = 1.05  # above it the chains count as not mixed
HUGE = 1e30  # energies beyond are on their way to infinity, and their squares need not be finite
DEGREE_RANGE = (1.0, 8.0)  # to which the estimated degree of the loss around the centre is clipped
LEAST_RELATIVE_ERROR = 0.002  # of a value from trajectories
# the z-scores of the virial and of the spread, and the split R̂, up to which the virial is used as
# control variate
CONTROL_LIMITS = 3.0, 1.5, 1.03
BLOCKS = 4  # of each chain: the errors have one degree of freedom less than there are


def diagnose(
    energies: Array, distances: Array, acceptance: float, bounded: NDArray[np.int64]
) -> Diagnostics:
    """The diagnostics of energies nβ(L − L*), (chains, draws), of chains that did not diverge."""
    diverged = np.logical_not((np.abs(energies) < HUGE).all(axis=1))
    kept = energies[~diverged]
    moving = kept.size > 0 and bool(np.ptp(kept) > 0)
    rhat = bulk = tail = mean = math.nan
    if moving and kept.shape[1] >= 4:
        from arviz_stats.base import array_stats  # type: ignore[attr-defined]

        with np.errstate(divide="ignore", invalid="ignore"):  # chains that stand still
            rhat = float(array_stats.rhat(_halves(kept) if len(kept) == 1 else kept, **AXES))
        bulk, tail, mean = (_ess(kept, kind) for kind in ("bulk", "tail", "mean"))
    seen = drift(kept), distances.mean(axis=1), acceptance, diverged, bounded
    return Diagnostics(rhat, bulk, tail, mean, *seen, drift(distances[~diverged]))


def _ess(values: Array, method: str) -> float:
    """The effective sample size for the bulk, the 5 and 95 % quantiles ("tail") or the mean."""
    from arviz_stats.base import array_stats  # type: ignore[attr-defined]

    prob = (0.05, 0.95) if method == "tail" else None
    # ArviZ takes values that differ by less than 1e-15 for equal ones
    spread = float(np.ptp(values))
    scaled = np.ldexp(values, -math.frexp(spread)[1]) if 0 < spread < math.inf else values
    return float(array_stats.ess(scaled, method=method, prob=prob, **AXES))


def drift(energies: Array) -> Estimate:
    """Mean of the last third of the draws less that of the first, with its standard error."""
    chains, draws = energies.shape
    if chains == 0 or draws < 6:
        return Estimate(math.nan, math.nan)
    third = draws // 3
    first, last = energies[:, :third], energies[:, -third:]
    change = last.mean() - first.mean()
    error = math.hypot(standard_error(first), standard_error(last))
    return Estimate(float(change), error)


def standard_error(values: Array) -> float:
    """Standard error of the mean of all values, (chains, draws), with autocorrelation."""
    if values.size < 2 or np.ptp(values) == 0:
        return 0.0
    if values.shape[1] >= 4:
        return float(values.std(ddof=1)) / math.sqrt(_ess(values, "mean"))
    if len(values) == 1:
        return math.nan
    return float(values.mean(axis=1).std(ddof=1) / math.sqrt(len(values)))


def verdict(diagnostics: Diagnostics, moved: bool) -> Status:
    """What stands in the way of using the draws."""
    if diagnostics.diverged.any():
        return Status.DIVERGED
    if not moved:
        return Status.REJECTED if diagnostics.acceptance < 0.01 else Status.NOT_MOVING
    if diagnostics.bounded.any():
        return Status.BOUNDED
    change = diagnostics.drift
    drifting = float(change.stderr) > 0 and abs(float(change)) > 4 * float(change.stderr)
    if (diagnostics.rhat > RHAT) or drifting:
        return Status.NOT_MIXED
    return Status.CONVERGED


def probed_alone(problem: Problem) -> bool:
    """Whether chains are probed one by one: a MALA step takes a dozen vectors (P,) per chain."""
    return problem.memory is not None or problem.num_parameters > PROBED_ALONE


class AcceptanceProbe:
    """The mean probability that a MALA step of the kernel's ε would be accepted, from where the
    chains are.

    For SGLD, which never rejects, it tells how far its steps are from right: near 1 when ε is small
    enough. It is taken on up to 2,048 samples, always the same; the noise of batches is not in it.
    """

    def __init__(self, problem: Problem, kernel: Kernel, seed: int) -> None:
        few = problem.num_samples > PROBE_SAMPLES and problem.norm != "train"
        self._problem = problem.subsample(PROBE_SAMPLES, seed, PROBE_SAMPLES) if few else problem
        self._alone, self._gradients = probed_alone(problem), OneByOne(self._problem)
        self._centre = problem.vector.to(torch.promote_types(problem.dtype, torch.float32))
        self._seed, self._seen = seed, list[float]()
        settings = kernel.step_size, kernel.nbeta, kernel.localization, kernel.scale
        self._mala = HMC(*settings, leapfrog=1, jitter=1.0)

    def probe(
        self, positions: Tensor, chains: Sequence[int], gather: Callable[[Tensor], Tensor]
    ) -> None:
        """One probe of every chain: ``chains`` are the numbers of those at these positions, and
        ``gather`` adds those of other processes.
        """
        seed = derived_seed(self._seed, "probe", len(self._seen))
        probed = positions.new_full((len(positions),), math.nan, dtype=torch.float64)
        # row by row, for of all at once it would take two vectors of every chain
        places = [i for i, row in enumerate(positions) if bool(row.isfinite().all())]
        together = 1 if self._alone else max(len(places), 1)
        for some in (places[i : i + together] for i in range(0, len(places), together)):
            rng = Streams(seed, [chains[i] for i in some], positions.device)
            probed[some] = self._acceptance(positions[some], rng).double()
        seen = gather(probed)
        if bool(torch.isfinite(seen).any()):
            self._seen.append(float(seen.nanmean()))

    def _acceptance(self, positions: Tensor, rng: Streams) -> Tensor:
        """The acceptance of one step from each position; all else of the step is freed."""
        state = self._mala.init(positions, self._centre)
        _, info = self._mala.step(state, lambda at: full_data(self._gradients, at), rng)
        assert info.acceptance is not None
        return info.acceptance

    @property
    def acceptance(self) -> float:
        """The mean over all probes, NaN before the first."""
        return float(np.mean(self._seen)) if self._seen else math.nan


@dataclass(frozen=True)
class ChainReading:
    """λ̂ with its error: ``raw`` is the plain mean of nβ(L − L*), ``value`` what is left without
    the bias of the steps. ``unsettled`` says that directions are seen that have not relaxed.
    """

    value: float
    stderr: float
    per_chain: Array
    raw: float
    bias: float = 0.0
    unsettled: bool = False
    drifting: bool = False

    def rounded(self, rounding: float) -> ChainReading:
        """With the error from rounding of the losses added, unless no chain moved."""
        error = math.hypot(self.stderr, rounding) if self.stderr else 0.0
        return dataclasses.replace(self, stderr=error)


def read(chains: Chains, parameters: int, full: bool = False) -> ChainReading:
    """λ̂ from the chains of any kernel; from the losses over the whole data if ``full``."""
    seen = chains.full_energies if full else chains.energies
    fine = np.isfinite(seen).all(axis=1)
    kept, means = seen[fine], seen.mean(axis=1)
    per_chain = np.where(fine, means, np.nan)
    if len(kept) == 0:
        return ChainReading(math.nan, math.nan, per_chain, math.nan)
    if not (chains.distances > 0).any():  # what is left then is rounding
        return ChainReading(0.0, 0.0, np.zeros(len(chains)), 0.0)
    if chains.recycled_losses is not None and chains.virials is not None:
        return _from_trajectories(chains, parameters)
    raw, bias = float(kept.mean()), step_bias(chains)
    if bias is None:
        return ChainReading(raw, blocked_error(kept), per_chain, raw)
    # A kernel that never rejects: the bias of its steps is taken off.
    if chains.kernel == "Kinetic" and chains.on_whole_data and chains.virials is not None:
        excess = chains.virials[fine] - parameters
        kept = _subtract_virial(kept, excess, chains.distances[fine])
    value = float(kept.mean()) - float(bias)
    change = drift(kept)
    drifting = abs(float(change)) > max(3 * float(change.stderr), 0.05 * abs(value))
    squares = blocked_error(kept) ** 2 + float(bias.stderr) ** 2
    squares += (float(change) / 2) ** 2 if drifting else 0.0
    # E[(w − w*)·∇U]/P, less what the steps add: 1 when all directions have relaxed
    settled = settled_error = math.nan
    if chains.virials is not None and chains.kernel in ("SGLD", "Kinetic"):
        heat: float | Array = chains.noise.get("heat", 0.0)
        if chains.kernel == "SGLD":
            assert chains.forces is not None
            heat = chains.step_size / 4 * chains.forces[fine]
        balance = chains.virials[fine] - heat
        settled = float(balance.mean()) / parameters
        settled_error = blocked_error(balance) / parameters
    if abs(1 - settled) > 3 * settled_error and chains.step_size > 0:
        squares += ((1 - settled) * value) ** 2
    added = abs(float(bias)) if float(bias) else float(bias.stderr)
    unsettled = abs(1 - settled) > max(0.1, 3 * settled_error)
    error, per_chain = math.sqrt(squares), means - float(bias)
    return ChainReading(value, error, per_chain, raw, added, unsettled, drifting)


def _from_trajectories(chains: Chains, parameters: int) -> ChainReading:
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
    energies = _subtract_virial(energies, excess, chains.distances, chains.spreads)
    value = float(energies.mean())
    error = math.hypot(blocked_error(energies, grouped=False), LEAST_RELATIVE_ERROR * value)
    raw, change = float(chains.energies.mean()), drift(energies)
    drifting = abs(float(change)) > max(4 * float(change.stderr), 0.1 * abs(value))
    miss = abs(float(excess.mean()))
    unsettled = miss > max(0.1 * parameters, 3 * blocked_error(excess))
    return ChainReading(value, error, energies.mean(axis=1), raw, 0.0, unsettled, drifting)


def _subtract_virial(
    energies: Array, excess: Array, distances: Array, spreads: Array | None = None
) -> Array:
    """The energies less their regression on the virial's excess over P, if that has settled: if
    its mean is near 0, and √(1 + variance between half chains over that within) near 1.

    Stein's identity must also hold for the field r²(w − w*), r = ‖w − w*‖, whose divergence is
    (P + 2)r²: so the ``spreads`` r²(excess − 2) have the mean 0. Chains that have not reached the
    ends of long arms miss it by far, where the virial alone looks right within the noise of the
    draws near w*.
    """
    squares, (*limits, apart) = distances**2, CONTROL_LIMITS
    spreads = squares * (excess - 2) if spreads is None else spreads
    for misses, most in zip((excess, spreads), limits, strict=True):
        error = standard_error(misses)
        if not (error > 0 and abs(float(misses.mean()) / error) < most):
            return energies
    for values in (squares, excess):
        parts = _halves(values)
        within = float(parts.var(axis=1, ddof=1).mean())
        between = float(parts.mean(axis=1).var(ddof=1))
        if not (within > 0 and math.sqrt(1 + between / within) < apart):
            return energies
    blocks, covariates = _blocks(energies, 8).ravel(), _blocks(excess, 8).ravel()
    covariates = covariates - covariates.mean()
    slope = float(covariates @ (blocks - blocks.mean()) / (covariates @ covariates))
    return energies - slope * excess


def step_bias(chains: Chains) -> Estimate | None:
    """What steps add to the mean energy: as measured by two step sizes, else what the chains of
    SGLD that recorded work and heat show themselves; None for other chains.

    In the second case nothing is taken off: the value is 0 and all of the bias is in the error.
    """
    work, heat = chains.work, chains.heat
    if chains.step_bias is not None or chains.kernel != "SGLD" or work is None or heat is None:
        return chains.step_bias
    fine = np.isfinite(chains.energies).all(axis=1)
    raw = float(chains.energies[fine].mean())
    whole, left = step_shares(chains.step_size, chains.localization, work[fine], heat[fine], raw)
    return Estimate(0.0, max(left, (whole - left) / 2))


def loss_degree(work: Array, raw: float) -> float:
    """The degree q of the loss around w*: E[(w − w*)·nβ∇L] = q·E[nβ(L − L*)]; 2 if unknown."""
    mean = float(work.mean())
    return float(np.clip(mean / raw, *DEGREE_RANGE)) if raw > 0 and mean > 0 else 2.0


def step_shares(
    step_size: float, localization: float | Tensor, work: Array, heat: Array, raw: float
) -> tuple[float, float]:
    """What the finite, noisy steps of SGLD add to the mean ``raw`` of nβ(L − L*): all of it, and
    what is left in the loss.

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
        return whole, whole
    near, far = (0.5 * float(np.square(work[:, lag:] - work[:, :-lag]).mean()) for lag in (1, 2))
    tie = float(localization.min()) if isinstance(localization, Tensor) else localization
    pull = unit * tie * (2 * near - far)
    if not 0 < pull < raw or whole <= 0:
        return whole, whole
    return whole, whole * min(max((whole - pull) / (1 - pull / raw) / whole, 0.0), 1.0)


def degrees_of_freedom(chains: Chains) -> float:
    """The degrees of freedom of the standard errors that are computed from chains."""
    return BLOCKS * len(chains) - 1.0


def combined_degrees(errors: Array, degrees: Array) -> float:
    """Degrees of freedom of the root of a sum of squared independent errors (Welch 1947)."""
    squares = np.square(errors)
    shares = float((squares**2 / degrees).sum())
    return float(squares.sum()) ** 2 / shares if shares > 0 else math.inf


def blocked_error(values: Array, grouped: bool = True) -> float:
    """Standard error of the mean: the largest of three, by autocorrelation and by the spread of 2
    and of 4 blocks of each chain.

    The sum of autocorrelations is truncated where noise hides them, and so misses slow directions
    that long blocks still show. If ``grouped``, it is of means of √draws neighbours each, in which
    batch noise hides nothing slow. An error from fewer than eight blocks is too noisy to use.
    """
    draws = values.shape[1]
    groups = draws // max(math.isqrt(draws), 1) if grouped else 0
    errors = [standard_error(_blocks(values, groups) if groups >= 8 else values)]
    for count in (2, 4):
        if count * len(values) >= 8:
            blocks = _blocks(values, count)
            errors.append(float(blocks.std(ddof=1)) / math.sqrt(blocks.size))
    return max(errors)


def _blocks(values: Array, count: int) -> Array:
    """Means of ``count`` equal blocks of each chain's last draws, (chains, count)."""
    size = values.shape[1] // count
    if size == 0:
        return values
    last = values[:, values.shape[1] - size * count :]
    means: Array = last.reshape(len(values), count, size).mean(axis=2)
    return means


def _halves(values: Array) -> Array:
    """The halves of each chain as chains."""
    half = values.shape[1] // 2
    return np.concatenate([values[:, :half], values[:, half : 2 * half]])
