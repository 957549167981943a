"""``llc``: the learning coefficient at a point, with an error bar and nothing to tune."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor

from lambdahat._core.check import require
from lambdahat._core.device import default_context
from lambdahat.problem import Problem, require_problem
from lambdahat.results import Array, Chains, Estimate, LearningCoefficient, Sensitivity, Status
from lambdahat.sampling.automatic import Drawn, drawn
from lambdahat.sampling.estimand import inverse_temperature
from lambdahat.sampling.estimation import blocked_error, degrees_of_freedom
from lambdahat.sampling.kernels import Kernel, Localization
from lambdahat.sampling.minibatches import DEFAULT_BATCH, drawn_by_sample
from lambdahat.sampling.running import Watch

# errors, and part of the mean, by which the distance changes where chains count as not mixed
WANDERED = 4.0, 0.5
# draws lower than the centre by this part of λ̂, and the share of them that no minimum shows
BELOW = 0.1, 0.01
# of λ̂: what a line search along the gradient at the centre may gain in nβL at a minimum
DESCENT = 0.1


@default_context()
def llc(
    problem: Problem,
    chains: int = 4,
    seed: int = 0,
    *,
    draws: int | None = None,
    burn_in: int | None = None,
    batch_size: int | None = None,
    nbeta: str | float = "n/log n",
    localization: Localization | None = None,
    step_size: float | None = None,
    kernel: str | Kernel | None = None,
    tol: float | None = None,
    max_gradients: int | None = None,
    mode: str = "auto",
    watch: Watch | None = None,
    **options: Any,
) -> LearningCoefficient:
    """The local learning coefficient λ̂ = nβ·(E[L(w)] − L(w*)) at the problem's parameters w* (Lau
    et al. 2023).

    The expectation is under exp(−nβ·L(w) − (γ/2)‖w − w*‖²). What is estimated is fixed before the
    first step: nβ = n/ln n and γ, by a rule of the problem alone (P/‖w*‖², less where the data
    determine most directions). How it is estimated is found by a pilot: kernel, step size, batch
    size, burn-in and number of draws; ``chains.reasons`` says why each is what it is. What is given
    is taken as it is.

    Args:
        problem: The problem, at the parameters w* to be measured;
            ``problem.restrict("layers.0.*")`` for some of them.
        chains: Number of chains.
        seed: Seed of all randomness.
        draws: Number of draws per chain; by default as many as the tolerance takes.
        burn_in: Steps (trajectories for HMC) that follow the pilot and are thrown away.
        batch_size: Samples per step; by default the whole data where that is cheap, else chosen by
            cost.
        nbeta: "n/log n", "batch" (B/ln B, as in devinterp) or a number.
        localization: γ as a number, a tensor (P,), or numbers by name or glob of parameters.
        step_size: Step size of the kernel (of SGLD if no kernel is named). One that makes chains
            diverge is reduced, and the result says so. With a step size that was given, ``value``
            is the plain mean over the draws and what is known of its bias is part of ``stderr``;
            with one that was found, the bias is measured and taken off.
        kernel: "kinetic", "sgld", "rmsprop_sgld", "sghmc", "sgnht", "hmc", "mala", or a kernel with
            its own settings.
        tol: Standard error relative to the value to draw for; by default 3 % of max(λ̂, 1).
        max_gradients: Limit on the gradients of all chains, pilots included.
        mode: How chains run: "auto", "batched", "sequential", "processes" or "graph".
        watch: A function of nβ(L − L*) of the draws so far, (chains, draws), that ends the sampling
            by returning True.
        **options: Those of ``sample``: shared_batches, accumulate, baseline, bound, observables,
            averages, keep_parameters. With baseline "full" the value is read off losses over the
            whole data, a pass for each draw that ``cost`` does not count; with "both" it is the
            paired one, and ``full`` has the other.

    Returns:
        λ̂ with its standard error, a status, γ, nβ, and its sensitivity to both.

    Raises:
        ValueError: If a setting is out of range, or if ``max_gradients`` does not hold a pilot; the
            message says what would do.
    """
    given: dict[str, Any] = {
        "chains": chains,
        "seed": seed,
        "draws": draws,
        "burn_in": burn_in,
        "batch_size": batch_size,
        "nbeta": nbeta,
        "localization": localization,
        "step_size": step_size,
        "kernel": kernel,
        "tol": tol,
        "max_gradients": max_gradients,
        "mode": mode,
        "watch": watch,
    }
    return _estimated(problem, **given, **options)


def _estimated(
    problem: Problem, /, *, nbeta: str | float = "n/log n", **settings: Any
) -> LearningCoefficient:
    """``llc`` with its settings as one mapping."""
    require_problem(problem)
    kernel = settings.get("kernel")
    own = problem.batches.sizes[0] if problem.norm == "train" else DEFAULT_BATCH
    batch = settings.get("batch_size") or min(own, problem.num_samples)
    if nbeta == "batch":
        if settings.get("batch_size") is None:
            batch = _batch_of_temperature(problem, batch)
        settings["batch_size"] = batch  # the temperature is decided by it
    if isinstance(kernel, Kernel):
        value, name = kernel.nbeta, "given by the kernel"
    else:
        value, name = inverse_temperature(nbeta, problem.num_terms, batch)
    return coefficient(problem, drawn(problem, value, **settings), name)


def _batch_of_temperature(problem: Problem, default: int) -> int:
    """The B of B/ln B where none is given: of the problem's own batches where samples cannot be
    drawn one by one.
    """
    sizes = problem.batches.sizes
    if default in sizes or drawn_by_sample(problem):
        return default
    alike = len(set(sizes[:-1])) <= 1 and sizes[-1] <= sizes[0]
    require(
        alike,
        "nbeta",
        "be a number, or 'n/log n', for batches of several sizes that cannot be drawn sample by "
        "sample (uneven token counts, streamed data)",
        f"'batch' with batches of {min(sizes)} to {max(sizes)} samples",
        "give the problem batches of one size",
    )
    return sizes[0]


def coefficient(problem: Problem, found: Drawn, temperature: str) -> LearningCoefficient:
    """The result of chains that have been drawn."""
    chains, reading = found.chains, found.reading
    at_wbic = math.isclose(
        chains.nbeta, problem.num_terms / math.log(max(problem.num_terms, 2)), rel_tol=1e-6
    )
    return LearningCoefficient(
        reading.value,
        reading.stderr,
        chains.cost,
        _status(problem, found),
        degrees_of_freedom(chains),
        per_chain=reading.per_chain,
        wbic=_wbic(chains, problem.num_terms, reading.value, reading.stderr) if at_wbic else None,
        nbeta=chains.nbeta,
        temperature=temperature,
        localization=chains.localization,
        step_size=chains.step_size,
        initial_loss=chains.initial_loss,
        chains=chains,
        rhat=chains.diagnostics.rhat,
        ess=chains.diagnostics.ess_bulk,
        raw=reading.raw,
        discretisation_bias=reading.bias,
        sensitivity=_sensitivity(found),
        full=_full(found),
    )


def _full(found: Drawn) -> Estimate | None:
    """λ̂ from the losses over the whole data, where both were asked for."""
    if found.full is None:
        return None
    return Estimate(
        found.full.value, found.full.stderr, found.chains.cost, dof=degrees_of_freedom(found.chains)
    )


def _wbic(chains: Chains, count: int, value: float, error: float) -> Estimate:
    """n·E[L(w)] = n·L(w*) + (n/nβ)·λ̂ (Watanabe 2013)."""
    ratio = count / chains.nbeta
    whole = count * chains.initial_loss + ratio * value
    return Estimate(whole, ratio * error, chains.cost, dof=degrees_of_freedom(chains))


def _sensitivity(found: Drawn) -> Sensitivity:
    """How λ̂ changes with ln γ and ln nβ, from covariances of the draws under the posterior p.

    With e = nβ(L − L*), dλ̂/d ln nβ = E[e] − Var(e) and dλ̂/d ln γ = −½·Cov(e, Σγ_i(w_i − w*_i)²).
    By Stein's identity the second is −½·(E[u] − Cov(e, u)) with u = (w − w*)·nβ∇L, which fluctuates
    much less: the distance of flat directions, of which the loss knows nothing, drops out. It is
    used where a step sees the whole data: the noise of a batch, which e and u share, cancels in the
    first form alone. In Var(e) it is measured and taken off.
    """
    chains = found.chains
    unknown = Estimate(math.nan, math.nan)
    energies = chains.energies
    if not np.isfinite(energies).all() or energies.size < 4:
        return Sensitivity(unknown, unknown)
    centred, noise = energies - energies.mean(), chains.noise.get("energy", 0.0)
    spread = energies - centred**2 + noise
    unsure = noise * math.sqrt(2 / chains.noise["dof"]) if noise else 0.0
    mean, variance = float(energies.mean()), float((centred**2).mean()) - noise
    # Steps that add a share δ to the temperature add δ·E[e] − 2δ·Var(e) to the difference of the
    # two.
    heated = abs((mean - 2 * variance) * found.reading.bias / mean) if mean > 0 else 0.0
    temperature = Estimate(float(spread.mean()), math.hypot(blocked_error(spread), unsure, heated))
    shares, ties = None, _ties(found)
    if chains.work is not None and not noise:
        shares = -0.5 * (chains.work - centred * (chains.work - chains.work.mean()))
    elif ties is not None:
        shares = -0.5 * centred * (ties - ties.mean())
    slope = unknown if shares is None else Estimate(float(shares.mean()), blocked_error(shares))
    return Sensitivity(slope, temperature)


def _ties(found: Drawn) -> Array | None:
    """Σγ_i(w_i − w*_i)² of every draw, (chains, draws), or None where it is not known."""
    chains, gamma = found.chains, found.chains.localization
    if not isinstance(gamma, Tensor):
        return gamma * chains.distances**2
    if found.ties is not None:
        return found.ties
    return None if chains.virials is None or chains.work is None else chains.virials - chains.work


def _status(problem: Problem, found: Drawn) -> Status:
    """What stands in the way of believing λ̂, the worst first."""
    chains, reading = found.chains, found.reading
    if chains.status in (Status.DIVERGED, Status.NOT_MOVING, Status.REJECTED):
        return chains.status
    if _below_centre(problem, found):
        return Status.NOT_A_MINIMUM
    if chains.status is Status.BOUNDED:
        return chains.status
    if reading.bias > 0.25 * abs(reading.value):
        return Status.STEP_BIAS
    if chains.diagnostics.rhat > 1.1 or reading.drifting or reading.unsettled or _wandered(chains):
        return Status.NOT_MIXED
    return Status.GRADIENTS_SPENT if found.spent else Status.CONVERGED


def _wandered(chains: Chains) -> bool:
    """Whether the distance from the centre changed grossly while drawing: flat directions were
    still filling.
    """
    change, (errors, part) = chains.diagnostics.distance_drift, WANDERED
    return abs(float(change)) > max(
        errors * float(change.stderr), part * float(chains.diagnostics.distance.mean())
    )


def _below_centre(problem: Problem, found: Drawn) -> bool:
    """Whether lower loss was found than at the centre: by the chains on average, for a while, or
    along the gradient.
    """
    chains, reading = found.chains, found.reading
    if reading.value + 2 * reading.stderr < 0:
        return True
    noise = math.sqrt(chains.noise.get("energy", 0.0))
    deep = chains.energies < -BELOW[0] * abs(reading.value) - 4 * noise
    if float(deep.mean()) > BELOW[1]:
        return True
    windows = chains.energies[:, : chains.energies.shape[1] // 25 * 25].reshape(len(chains), -1, 25)
    if windows.size and len(chains) > 1:
        means = windows.transpose(1, 0, 2).reshape(windows.shape[1], -1)
        # neighbours in a window are alike
        errors = means.std(axis=1, ddof=1) / math.sqrt(means.shape[1] / 5)
        if bool((means.mean(axis=1) < -4 * errors - 1e-6 * abs(reading.value)).any()):
            return True
    return chains.nbeta * _descent(problem) > DESCENT * abs(reading.value)


def _descent(problem: Problem) -> float:
    """What an exact line search along the gradient gains if the loss is quadratic:
    ‖g‖⁴/(2|gᵀHg|).
    """
    theta = problem.vector
    gradient = problem.gradient(theta)
    square = float(gradient.double().square().sum())
    if square == 0:
        return 0.0
    step = 1e-3 * (1.0 + float(theta.norm()) / math.sqrt(len(theta))) / math.sqrt(square)
    ahead = problem.gradient(theta + step * gradient)
    curvature = abs(float(((ahead - gradient).double() * gradient.double()).sum())) / step
    return square**2 / (2 * curvature) if curvature > 0 else math.inf
