"""``llc``: the learning coefficient at a point, with an error bar and nothing to tune.

``llc`` fixes nβ and calls ``draw``, which fixes γ and picks the kernel. ``draw_by_steps`` or, for
HMC, ``draw_by_trajectories`` (both in ``sampling/tuning/``) tunes what was not given, burns in, and
draws until the error is small enough. The last reading of the chains becomes λ̂, with its status
and its sensitivity to γ and nβ.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lambdahat._core.check import (
    describe,
    message,
    require,
    require_choice,
    require_count,
    require_positive,
)
from lambdahat._core.device import default_context
from lambdahat.estimators.quantities import Forecast, Work, quantity
from lambdahat.krylov import lanczos, random_vector
from lambdahat.operators.curvature import hessian
from lambdahat.problem import Problem, require_problem
from lambdahat.results import Array, Estimate, LearningCoefficient, Sensitivity, Status
from lambdahat.sampling._sample import (
    EFFECTIVE,
    MODES,
    TOL,
    SamplingRequest,
    SamplingRun,
    Watch,
    place,
)
from lambdahat.sampling.backends.chain_runner import ChainPlan
from lambdahat.sampling.backends.minibatches import DEFAULT_BATCH, can_draw_samples, default_batch
from lambdahat.sampling.diagnostics import blocked_error, degrees_of_freedom
from lambdahat.sampling.kernels import HMC, KERNELS, Kernel, Localization
from lambdahat.sampling.tuning.hamiltonian import (
    draw_by_trajectories,
    require_warm_up,
    trajectory_gradients,
)
from lambdahat.sampling.tuning.unadjusted import FULL, draw_by_steps, require_enough, step_gradients

# chains count as not mixed where their distance from the centre changes by more than so many
# standard errors, and by more than this part of its mean
DISTANCE_DRIFT = 4.0, 0.5
# the centre is no minimum where nβ(L − L*) is below −0.1 λ̂ in more than 1 % of the draws
BELOW_CENTRE = 0.1, 0.01
# nor where a line search along the gradient there would lower nβL by more than this part of λ̂
DESCENT_GAIN = 0.1
NAMES = ("n/log n", "batch")
DENSE_HESSIAN = 300  # parameters up to which the whole Hessian is diagonalised
# parameters beyond which no data set determines most directions, and no spectrum is computed
LARGEST_SPECTRUM = 1_000_000
# parameters up to which the Lanczos quadrature is fine: 2 probes of depth 30 on 2P samples or all
FINE_QUADRATURE = 8192
COARSE_QUADRATURE = 1, 20, 2048  # probes, depth and samples of the quadrature beyond
FIXED_POINT_ROUNDS = 3  # of the iteration that finds the localization
WEAKEST_LOCALIZATION = 128  # factor below P/‖w*‖² at which the localization stops falling
# parameters up to which HMC is the default on the whole data, and without data
HMC_PARAMETERS = {True: 15, False: 500}
PIECE_SAMPLES = 8192  # samples of the whole data that go through a large model at once
NAMES_ELSEWHERE = {  # of settings, in devinterp
    "lr": "step_size",
    "epsilon": "step_size",
    "n_beta": "nbeta",
    "gamma": "localization",
    "num_chains": "chains",
    "num_draws": "draws",
    "num_burnin_steps": "burn_in",
    "bounding_box_size": "bound",
    "gradient_accumulation_steps": "accumulate",
    "beta": "nbeta, which is n·β,",
}


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
    """Estimate the local learning coefficient λ̂ = nβ·(E[L(w)] − L(w*)) at the problem's parameters
    w* (Lau et al. 2023).

    The expectation is under exp(−nβ·L(w) − (γ/2)‖w − w*‖²). The estimand is fixed before sampling:
    nβ = n/ln n, and γ by a rule of the problem alone (P/‖w*‖², less if the data determine most
    directions). Settings that are not given are tuned in a pilot run; ``chains.reasons`` explains
    each.

    Args:
        problem: The problem, at w*; ``problem.restrict("layers.0.*")`` for some parameters.
        chains: Number of chains.
        seed: Seed of all randomness.
        draws: Number of draws per chain; by default as many as the tolerance requires.
        burn_in: Steps (trajectories for HMC) that follow the pilot and are discarded.
        batch_size: Samples per step; by default all data where that is cheap, else chosen by cost.
        nbeta: "n/log n", "batch" (B/ln B, as in devinterp) or a number.
        localization: γ as a number, a tensor (P,), or numbers by name or glob of parameters.
        step_size: Step size of the kernel (of SGLD if no kernel is named), reduced if chains
            diverge. If given, ``value`` is the plain mean over the draws, and ``stderr`` includes
            the known part of its bias; otherwise the bias is measured and subtracted.
        kernel: "kinetic", "sgld", "rmsprop_sgld", "sghmc", "sgnht", "hmc", "mala", or a kernel with
            its own settings.
        tol: Standard error relative to the value to draw for; by default 3 % of max(λ̂, 1).
        max_gradients: Limit on the gradients of all chains, pilots included.
        mode: How chains run: "auto", "batched", "sequential", "processes" or "graph".
        watch: Called with nβ(L − L*) of the draws so far, (chains, draws); True ends the sampling.
        **options: Those of ``sample``: shared_batches, accumulate, baseline, bound, observables,
            averages, keep_parameters. With baseline "full" the value is computed from losses over
            the whole data, one pass per draw, which ``cost`` does not count; with "both" it is the
            paired one, and ``full`` has the other.

    Returns:
        λ̂ with its standard error, a status, γ, nβ, and its sensitivity to both.

    Raises:
        ValueError: If a setting is out of range, or ``max_gradients`` does not hold a pilot.
    """
    require_problem(problem)
    if nbeta == "batch" and not batch_size:
        batch_size = _own_batch_size(problem)
    if isinstance(kernel, Kernel):
        inverse, temperature = kernel.nbeta, "given by the kernel"
    else:
        inverse, temperature = inverse_temperature(nbeta, problem.num_terms, batch_size)
    run = draw(
        problem,
        inverse,
        chains=chains,
        seed=seed,
        draws=draws,
        burn_in=burn_in,
        batch_size=batch_size,
        localization=localization,
        step_size=step_size,
        kernel=kernel,
        tol=tol,
        max_gradients=max_gradients,
        mode=mode,
        watch=watch,
        **options,
    )
    posterior, reading, terms = run.chains, run.reading, problem.num_terms
    dof = degrees_of_freedom(posterior)
    wbic = full = None
    if math.isclose(posterior.nbeta, terms / math.log(max(terms, 2)), rel_tol=1e-6):
        # n·E[L(w)] = n·L(w*) + (n/nβ)·λ̂ (Watanabe 2013)
        ratio = terms / posterior.nbeta
        mean = terms * posterior.initial_loss + ratio * reading.value
        wbic = Estimate(mean, ratio * reading.stderr, posterior.cost, dof=dof)
    if run.full is not None:
        full = Estimate(run.full.value, run.full.stderr, posterior.cost, dof=dof)
    return LearningCoefficient(
        reading.value,
        reading.stderr,
        posterior.cost,
        _status(problem, run, draws is not None),
        dof,
        per_chain=reading.per_chain,
        wbic=wbic,
        nbeta=posterior.nbeta,
        temperature=temperature,
        localization=posterior.localization,
        step_size=posterior.step_size,
        initial_loss=posterior.initial_loss,
        chains=posterior,
        rhat=posterior.diagnostics.rhat,
        ess=posterior.diagnostics.ess_bulk,
        raw=reading.raw,
        discretisation_bias=reading.bias,
        sensitivity=_sensitivity(run),
        full=full,
    )


def draw(problem: Problem, nbeta: float, /, **settings: Any) -> SamplingRun:
    """Sample the kernel that suits the problem; a pilot run tunes the settings that are not given.

    What is estimated, nβ and γ, is fixed before the first step. Problems of up to 15 parameters, or
    500 without data, are sampled by HMC on the whole data, which has no bias; larger ones by
    kinetic Langevin dynamics, on the whole data where that is cheap, else on mini-batches.
    ``settings`` are those of ``llc``; a kernel among them must have this nβ.
    """
    require_problem(problem)
    batch_size, kernel = settings.get("batch_size"), settings.get("kernel")
    if batch_size is not None:
        require_count(batch_size, "batch_size", 1, problem.num_samples)
    if isinstance(kernel, Kernel):
        same, got = math.isclose(kernel.nbeta, nbeta, rel_tol=1e-6), f"one at {kernel.nbeta:.6g}"
        cure = 'give its name, such as "hmc", and its settings apart'
        require(same, "kernel", f"have nbeta = {nbeta:.6g}", got, cure)
    request, plan = read_settings(settings)
    frozen = problem.at(problem.vector)
    cheap, joined = whole_is_cheap(frozen), frozen
    # the number of batches would be most of the cost
    tiny = frozen.num_parameters * frozen.num_samples <= FULL["cpu"]
    if frozen.has_data and cheap and tiny and len(frozen.batches) > 1 and frozen.ranks.size == 1:
        joined = frozen.subset(range(frozen.num_samples), frozen.num_samples)
    step_size, reasons = request.step_size, {}
    kernel = request.kernel or default_kernel(frozen, step_size, batch_size)
    whole = kernel == "kinetic" and batch_size is None and step_size is None and cheap
    if not isinstance(kernel, Kernel):
        gamma = request.localization
        if gamma is None:
            gamma, reasons["localization"] = default_localization(joined, nbeta)
        kernel = KERNELS[kernel](1e-4 if step_size is None else step_size, nbeta, gamma)
    kernel = place(kernel, frozen)
    if whole:
        pieces = 1 if tiny else -(-joined.num_samples // PIECE_SAMPLES)
        pieces = max(plan.accumulate, pieces)
        plan = dataclasses.replace(plan, batch_size=joined.num_samples, accumulate=pieces)
    if isinstance(kernel, HMC):
        run = draw_by_trajectories(joined, kernel, request, plan)
    else:  # an exact kernel sees the whole data anyway
        beside = not kernel.exact and request.baseline != "paired"
        plan = dataclasses.replace(plan, full_losses=beside)
        start = joined if whole or kernel.exact else frozen
        run = draw_by_steps(start, kernel, request, plan, whole)
    chains = dataclasses.replace(run.chains, reasons={**reasons, **run.chains.reasons})
    reading, full = run.reading.rounded(chains.rounding), run.full
    full = None if full is None else full.rounded(chains.rounding)
    return dataclasses.replace(run, chains=chains, reading=reading, full=full)


def read_settings(given: Mapping[str, Any]) -> tuple[SamplingRequest, ChainPlan]:
    """The settings of ``llc``; errors have a cure for those with another name elsewhere."""
    known = {field.name for field in dataclasses.fields(SamplingRequest) if field.init}
    own = {field.name for field in dataclasses.fields(ChainPlan)}
    own -= {"thin", "full_losses", "forces"}  # of sample alone
    unknown = sorted(set(given) - known - own)
    if unknown:
        ours = [
            f"{NAMES_ELSEWHERE[name]} for {name}" for name in unknown if name in NAMES_ELSEWHERE
        ]
        names = sorted({*known, "nbeta"} - {"watch"})
        cure = f"there are {', '.join(names)}; thin is sample's"
        cure = f"write {', '.join(ours)}" if ours else cure
        raise TypeError(message("options", "be those of llc and sample", ", ".join(unknown), cure))
    options = {name: given[name] for name in own if given.get(name) is not None}
    request = SamplingRequest(**{name: given[name] for name in given if name in known})
    return request, ChainPlan(forces=True, **options)


def default_kernel(problem: Problem, step_size: float | None, batch_size: int | None) -> str:
    """The kernel of a problem where none is asked for; a step size that is given is SGLD's."""
    if step_size is not None:
        return "sgld"
    whole = batch_size is None or batch_size == problem.num_samples
    small = problem.num_parameters <= HMC_PARAMETERS[problem.has_data]
    return "hmc" if whole and small and whole_is_cheap(problem) else "kinetic"


def whole_is_cheap(problem: Problem) -> bool:
    """Whether a gradient of the whole data, in memory, costs little more than of a batch."""
    if not problem.has_data:
        return True
    return (
        problem.num_parameters * problem.num_samples <= FULL.get(problem.device.type, FULL["cpu"])
        and problem.norm != "train"
        and problem.batches.in_memory
        and problem.memory is None
    )


def inverse_temperature(
    nbeta: Any, num_samples: int, batch_size: int | None = None
) -> tuple[float, str]:
    """Return nβ and where it comes from.

    Args:
        nbeta: "n/log n" (β = 1/ln n, Watanabe 2013), "batch" (B/ln B, as devinterp), or a number.
        num_samples: The number of samples n.
        batch_size: The batch size B, for "batch".

    >>> inverse_temperature("n/log n", 1000)
    (144.76482730108395, 'n/log n, n = 1000')
    """
    choices = f"be a number or one of {', '.join(map(repr, NAMES))}"
    if isinstance(nbeta, str):
        if nbeta not in NAMES:
            raise ValueError(message("nbeta", choices, describe(nbeta)))
        size, letter = (num_samples, "n") if nbeta == "n/log n" else (batch_size or 0, "B")
        expected = "be a number for so little data, fewer than 3 samples"
        got = f"{nbeta!r} with {letter} = {size}"
        cure = "for a loss without data give num_samples to from_function, or a number here"
        require(size > 2, "nbeta", expected, got, cure)
        name = nbeta if letter == "n" else "B/log B"
        return size / math.log(size), f"{name}, {letter} = {size}"
    if not isinstance(nbeta, int | float) or isinstance(nbeta, bool):
        raise TypeError(message("nbeta", choices, describe(nbeta)))
    return require_positive(nbeta, "nbeta"), "given"


def _own_batch_size(problem: Problem) -> int:
    """The default B of nβ = B/ln B: that of the problem's own batches where samples cannot be drawn
    one by one.
    """
    sizes = problem.batches.sizes
    default = sizes[0] if problem.norm == "train" else DEFAULT_BATCH
    size = min(default, problem.num_samples)
    if size in sizes or can_draw_samples(problem):
        return size
    alike = len(set(sizes[:-1])) <= 1 and sizes[-1] <= sizes[0]
    expected = (
        "be a number, or 'n/log n', for batches of several sizes that cannot be drawn sample by"
        " sample (uneven token counts, streamed data)"
    )
    got = f"'batch' with batches of {min(sizes)} to {max(sizes)} samples"
    require(alike, "nbeta", expected, got, "give the problem batches of one size")
    return sizes[0]


def default_localization(problem: Problem, nbeta: float) -> tuple[float, str]:
    """Return the localization γ of a problem at its parameters w*, and the reason in words.

    The scale is γ₀ = P/‖w*‖² (1 where w* = 0): under the localization alone a parameter moves as
    far as parameters are large. Where the data determine most directions, so strong a tie would
    bias λ̂. The share of the parameters that the localization decides is β(γ) = (1/P) Σ_i
    γ/(nβ|h_i| + γ), with h_i the eigenvalues of the Hessian at w*, and γ = γ₀·β², by three rounds
    of fixed-point iteration from γ₀. For a network β is near 1 and γ = γ₀; for a regular model γ
    falls to γ₀/128, which takes less than 1 % off λ̂ = d/2 unless the parameters are small against
    their own posterior. The factor β² is rounded to a power of two, so that it is the same in every
    precision and on every device.

    γ depends on the problem and nβ alone: not on seed, budget, batch size, number of chains or
    device. It is equivariant: if all parameters are rescaled by c, γ is by 1/c², and λ̂ stays as it
    is.
    """
    square = float(problem.vector.double().square().sum())
    scale = problem.num_parameters / square if square > 0 else 1.0
    reason = "P/‖w*‖²" if square > 0 else "1, for w* = 0"
    spectrum = None if problem.num_parameters > LARGEST_SPECTRUM else _hessian_spectrum(problem)
    if spectrum is None:
        return scale, reason
    values, weights = spectrum
    stiffness, gamma = nbeta * np.abs(values), scale
    for _ in range(FIXED_POINT_ROUNDS):
        gamma = scale * float((weights * gamma / (stiffness + gamma)).sum()) ** 2
        gamma = max(gamma, scale / WEAKEST_LOCALIZATION)
    halvings = max(round(math.log2(scale / gamma)), 0)
    if halvings:
        decided = 1 - float((weights * gamma / (stiffness + gamma)).sum())
        known = f"the data determine {decided:.0%} of the directions at w*"
        reason += f", divided by {2**halvings}: {known}"
    return scale / 2**halvings, reason


def _hessian_spectrum(problem: Problem) -> tuple[Array, Array] | None:
    """Eigenvalues of the Hessian at w* with weights that sum to 1; None if there is no finite one.

    All eigenvalues of a small problem, else a Lanczos quadrature on some of the data. Neither the
    probes nor the samples depend on a caller's seed.
    """
    size, samples = problem.num_parameters, problem.num_samples
    try:
        if size <= DENSE_HESSIAN:
            values = torch.linalg.eigvalsh(hessian(problem).dense().double()).cpu().numpy()
            return (values, np.full(size, 1 / size)) if np.isfinite(values).all() else None
        probes, depth, few = (
            (2, 30, max(2 * size, COARSE_QUADRATURE[2]))
            if size <= FINE_QUADRATURE
            else COARSE_QUADRATURE
        )
        few = min(few, samples)
        part = problem
        if few < samples and problem.has_data and problem.norm != "train":
            part = problem.subsample(few, 0, few)
        operator = hessian(part)
        place = "device" if problem.memory is None else "host"
        nodes, weights = [], []
        for probe in range(probes):
            start = random_vector(operator, 0, "localization", probe)
            values, shares, _ = lanczos(operator, start, depth, place=place).ritz()
            nodes.append(values.numpy())
            weights.append(shares.numpy() / probes)
    except torch.OutOfMemoryError:
        raise
    # a loss that can be differentiated once, or is not finite
    except (RuntimeError, ValueError, FloatingPointError):
        return None
    whole = np.concatenate(nodes)
    return (whole, np.concatenate(weights)) if np.isfinite(whole).all() else None


def _status(problem: Problem, run: SamplingRun, fixed: bool) -> Status:
    """The most serious reason not to trust λ̂, or CONVERGED.

    If ``fixed``, a number of draws that was given may leave fewer effective ones, over all chains,
    than a standard error can be trusted with; else sampling goes on until there are enough.
    """
    chains, reading = run.chains, run.reading
    if chains.status in (Status.DIVERGED, Status.NOT_MOVING, Status.REJECTED):
        return chains.status
    if chains.rounding > TOL[0] * max(abs(reading.value), TOL[1]):
        return Status.PRECISION_LIMIT
    if _below_centre(problem, run):
        return Status.NOT_A_MINIMUM
    if chains.status is Status.BOUNDED:
        return chains.status
    if reading.bias > 0.25 * abs(reading.value):
        return Status.STEP_BIAS
    # flat directions are still filling where the distance from the centre changes grossly
    change, (errors, part) = chains.diagnostics.distance_drift, DISTANCE_DRIFT
    gross = max(errors * float(change.stderr), part * float(chains.diagnostics.distance.mean()))
    drifted_away = abs(float(change)) > gross
    if chains.diagnostics.rhat > 1.1 or reading.drifting or reading.unsettled or drifted_away:
        return Status.NOT_MIXED
    if run.spent:
        return Status.GRADIENTS_SPENT
    few = fixed and chains.diagnostics.ess_mean < EFFECTIVE
    return Status.NOT_MIXED if few else Status.CONVERGED


def _below_centre(problem: Problem, run: SamplingRun) -> bool:
    """Whether the chains, or a line search along the gradient, met lower loss than at w*."""
    chains, reading = run.chains, run.reading
    if reading.value + 2 * reading.stderr < 0:
        return True
    noise = math.sqrt(chains.noise.get("energy", 0.0))
    deep = chains.energies < -BELOW_CENTRE[0] * abs(reading.value) - 4 * noise - chains.rounding
    if float(deep.mean()) > BELOW_CENTRE[1]:
        return True
    windows = chains.energies[:, : chains.energies.shape[1] // 25 * 25].reshape(len(chains), -1, 25)
    if windows.size and len(chains) > 1:
        means = windows.transpose(1, 0, 2).reshape(windows.shape[1], -1)
        # neighbours in a window are alike
        errors = means.std(axis=1, ddof=1) / math.sqrt(means.shape[1] / 5)
        least = 1e-6 * abs(reading.value) + chains.rounding
        if bool((means.mean(axis=1) < -4 * errors - least).any()):
            return True
    # an exact line search along the gradient gains ‖g‖⁴/(2|gᵀHg|) if the loss is quadratic
    theta = problem.vector
    gradient = problem.gradient(theta)
    square = float(gradient.double().square().sum())
    if square == 0:
        return False
    step = 1e-3 * (1.0 + float(theta.norm()) / math.sqrt(len(theta))) / math.sqrt(square)
    change = problem.gradient(theta + step * gradient) - gradient
    curvature = abs(float((change.double() * gradient.double()).sum())) / step
    gain = square**2 / (2 * curvature) if curvature > 0 else math.inf
    return chains.nbeta * gain > DESCENT_GAIN * abs(reading.value)


def _sensitivity(run: SamplingRun) -> Sensitivity:
    """How λ̂ changes with ln γ and ln nβ, from covariances of the draws under the posterior p.

    With e = nβ(L − L*), dλ̂/d ln nβ = E[e] − Var(e) and dλ̂/d ln γ = −½·Cov(e, Σγ_i(w_i − w*_i)²).
    By Stein's identity the second is −½·(E[u] − Cov(e, u)) with u = (w − w*)·nβ∇L, which fluctuates
    much less: the distance of flat directions, of which the loss knows nothing, drops out. It is
    used where a step sees the whole data: the noise of a batch, which e and u share, cancels in the
    first form alone. In Var(e) it is measured and taken off.
    """
    chains = run.chains
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
    heated = abs((mean - 2 * variance) * run.reading.bias / mean) if mean > 0 else 0.0
    temperature = Estimate(float(spread.mean()), math.hypot(blocked_error(spread), unsure, heated))
    gamma, ties = chains.localization, run.ties  # Σγ_i(w_i − w*_i)² of the draws
    if not isinstance(gamma, Tensor):
        ties = gamma * chains.distances**2
    elif ties is None and chains.virials is not None and chains.work is not None:
        ties = chains.virials - chains.work
    shares = None
    if chains.work is not None and not noise:
        shares = -0.5 * (chains.work - centred * (chains.work - chains.work.mean()))
    elif ties is not None:
        shares = -0.5 * centred * (ties - ties.mean())
    slope = unknown if shares is None else Estimate(float(shares.mean()), blocked_error(shares))
    return Sensitivity(slope, temperature)


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise where settings of ``llc`` are unknown, out of range, or leave no gradients for a kernel
    it may choose.

    For those who take settings long before they sample. What depends on the problem is checked with
    the problem.
    """
    given = dict(settings)
    inverse_temperature(given.pop("nbeta", "n/log n"), 1000, 512)
    request, plan = read_settings(given)
    require_choice(request.mode, "mode", MODES)
    kernel = request.kernel
    fixed = not request.tuned or kernel is not None or plan.batch_size is not None
    exact = kernel in ("hmc", "mala") or isinstance(kernel, HMC)
    if exact or not fixed:
        cure = '; or name another kernel, such as "kinetic": small problems are sampled by HMC'
        require_warm_up(request, "" if fixed else cure)
    if not exact and request.limit is not None:
        require_enough(request)


# of P numbers that a chain holds: position, gradient, noise and what the kernel remembers
CHAIN_VECTORS = 6


def chain_work(problem: Problem, given: Mapping[str, Any], runs: tuple[int, int] = (1, 1)) -> Work:
    """The gradients of ``runs`` (fewest, most) runs of chains, on batches or on all data."""
    request, plan = read_settings({name: given[name] for name in given if name != "nbeta"})
    chains, samples, parameters = request.chains, problem.num_samples, problem.num_parameters
    kernel = request.kernel or default_kernel(problem, request.step_size, plan.batch_size)
    if kernel in ("hmc", "mala"):
        fewest, most = trajectory_gradients(request, parameters)
    else:
        fewest, most = step_gradients(request)
        free = kernel == "kinetic" and request.step_size is None and plan.batch_size is None
        if not (free and whole_is_cheap(problem)):
            samples = min(plan.batch_size or default_batch(problem), samples)
    held = CHAIN_VECTORS * chains * parameters * problem.vector.element_size()
    return Work(runs[0] * chains * fewest, runs[1] * chains * most, held, "gradients", samples)


def forecast_runs(fewest: int = 1, most: int = 1) -> Forecast:
    """The forecast of ``fewest`` to ``most`` runs of chains."""
    return lambda problem, _, settings: chain_work(problem, settings.sampling, (fewest, most))


quantity("llc", lambda problem, _, settings: llc(problem, seed=settings.seed, **settings.sampling))(
    forecast_runs()
)
