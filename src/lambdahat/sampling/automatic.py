"""Chains with no settings to give: what is not given is found by a pilot, and the result says
why.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
from torch import Tensor

from lambdahat._core.check import describe, require, require_choice, require_count, require_positive
from lambdahat.problem import Problem, require_problem
from lambdahat.results import Array, Chains
from lambdahat.sampling import hamiltonian_pilot, unadjusted
from lambdahat.sampling.diagnostics import RHAT
from lambdahat.sampling.estimand import default_localization, inverse_temperature
from lambdahat.sampling.estimation import Reading, read
from lambdahat.sampling.hamiltonian import HMC, mala
from lambdahat.sampling.hamiltonian_pilot import Effort
from lambdahat.sampling.kernels import (
    SGHMC,
    SGLD,
    SGNHT,
    Kernel,
    Kinetic,
    Localization,
    RMSpropSGLD,
)
from lambdahat.sampling.modes import MODES, AnyRunner, make_runner
from lambdahat.sampling.runners import Observable, Plan
from lambdahat.sampling.running import Collector, Watch, burn, place, require_functions
from lambdahat.sampling.unadjusted import FULL, NOISE_LOOKS, Coarse, Lengths, Pilot

KERNELS: dict[str, Any] = {
    "kinetic": Kinetic,
    "sgld": SGLD,
    "rmsprop_sgld": RMSpropSGLD,
    "sghmc": SGHMC,
    "sgnht": SGNHT,
    "hmc": HMC,
    "mala": mala,
}
# parameters up to which HMC is the default on the whole data, and without data
ADJUSTED = {True: 15, False: 500}
# gradients of a chain after which HMC looks at its error
CHECKS = (500, 1000, 2000, 4000, 8000, 16000, 32000)
PIECE = 8192  # samples of the whole data that go through a large model at once
TOL = 0.03, 1.0  # standard error to draw for, of a value that counts as no less than the second
# rounds, and effective draws per chain, before which no standard error is trusted
FEWEST_ROUNDS, EFFECTIVE = 4, 50
LEAST_EFFORT = 0.25  # of those rounds and effective draws, where the tolerance is loose
TRAJECTORIES = 200  # thrown away where HMC's step size is given
LEAST = 400  # gradients of a chain of HMC that a limit must leave
FEWEST_TRAJECTORIES = 8  # to be drawn
UNLIMITED = 1 << 62
ELSEWHERE = {
    "lr": "step_size",
    "epsilon": "step_size",
    "n_beta": "nbeta",
    "gamma": "localization",
    "num_chains": "chains",
    "num_draws": "draws",
    "num_burnin_steps": "burn_in",
}
TIE = "Σγ(w − w*)²"  # observed where γ differs between parameters


@dataclass(frozen=True)
class Drawn:
    """Chains and λ̂ read off them; ``spent`` says that the gradients ran out before the tolerance
    was reached.

    ``full`` is λ̂ from the losses over the whole data beside the paired one, where both were asked
    for, and ``ties`` Σγ_i(w_i − w*_i)² of the draws, (chains, draws), where γ differs between
    parameters.
    """

    chains: Chains
    reading: Reading
    spent: bool = False
    full: Reading | None = None
    ties: Array | None = None


@dataclass(frozen=True)
class Request:
    """What a caller fixed of a run; None is to be found."""

    nbeta: float
    chains: int = 4
    draws: int | None = None
    burn_in: int | None = None
    localization: Localization | None = None
    step_size: float | None = None
    kernel: str | Kernel | None = None
    tol: float | None = None
    max_gradients: int | None = None
    mode: str = "auto"
    watch: Watch | None = None
    baseline: str = "paired"

    def __post_init__(self) -> None:
        require_count(self.chains, "chains")
        require_choice(self.baseline, "baseline", ("paired", "full", "both"))
        for name, least in (("draws", 8), ("burn_in", 0), ("max_gradients", 100)):
            if getattr(self, name) is not None:
                require_count(getattr(self, name), name, least)
        if self.step_size is not None:
            number = isinstance(self.step_size, int | float) and not isinstance(
                self.step_size, bool
            )
            require(
                number and self.step_size >= 0,
                "step_size",
                "be a number of at least 0",
                describe(self.step_size),
            )
        if self.tol is not None:
            require_positive(self.tol, "tol")
        if isinstance(self.kernel, str):
            require_choice(self.kernel, "kernel", KERNELS)
        elif self.kernel is not None:
            require(
                isinstance(self.kernel, Kernel),
                "kernel",
                f"be one of {', '.join(KERNELS)}, or a kernel",
                self.kernel,
                "",
                TypeError,
            )
            others = {"step_size": self.step_size, "localization": self.localization}
            given = ", ".join(name for name, value in others.items() if value is not None)
            require(
                not given,
                "kernel",
                "be a name where the settings are given apart",
                f"a kernel and {given}",
                "set them in the kernel",
            )

    def reached(self, reading: Reading) -> bool:
        """Whether the standard error is within the tolerance."""
        if self.tol is not None:
            return reading.stderr <= self.tol * abs(reading.value)
        return reading.stderr <= TOL[0] * max(abs(reading.value), TOL[1])

    @property
    def effort(self) -> float:
        """The share of the usual draws before a standard error is trusted: less for a loose
        tolerance.
        """
        return 1.0 if self.tol is None else min(max(TOL[0] / self.tol, LEAST_EFFORT), 1.0)

    @property
    def goal(self) -> str:
        """The tolerance in words."""
        return (
            f"until the standard error is {TOL[0] if self.tol is None else self.tol:.3g} of the"
            " value"
        )

    def missed(self, reading: Reading) -> bool:
        """Whether the standard error is beyond the tolerance, where draws were to be taken until
        it is not.
        """
        return self.draws is None and not self.reached(reading)


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise where settings of ``llc`` are unknown, out of range, or leave no gradients for a kernel
    it may choose.

    For those who take settings long before they sample. What depends on the problem is checked with
    the problem.
    """
    given = dict(settings)
    inverse_temperature(given.pop("nbeta", "n/log n"), 1000, 512)
    given.pop("seed", None)
    apart = set(signature(drawn).parameters) - {"problem", "nbeta", "seed", "request"}
    own = {name: given.pop(name) for name in apart if name in given}
    if own.get("batch_size") is not None:
        require_count(own["batch_size"], "batch_size")
    require_count(own.get("accumulate", 1), "accumulate")
    if own.get("bound") is not None:
        require_positive(own["bound"], "bound")
    wanted = _request(1.0, given)
    require_choice(wanted.mode, "mode", MODES)
    if wanted.max_gradients is None:
        return
    limit, kernel = wanted.max_gradients // wanted.chains, wanted.kernel
    fixed = kernel is not None or wanted.step_size is not None or own.get("batch_size") is not None
    if not fixed or kernel in ("hmc", "mala") or isinstance(kernel, HMC):
        cure = (
            ""
            if fixed
            else '; or name another kernel, such as "kinetic": small problems are sampled by HMC'
        )
        _require_warm_up(limit, wanted, cure)
    if not (kernel in ("hmc", "mala") or isinstance(kernel, HMC)):
        tuned = not (isinstance(kernel, Kernel) or wanted.step_size is not None)
        unadjusted.require_enough(limit, wanted.chains, wanted.burn_in, wanted.draws, tuned)


def _request(nbeta: float, given: Mapping[str, Any]) -> Request:
    known = {field.name for field in dataclasses.fields(Request)}
    unknown = sorted(set(given) - known)
    require(
        not unknown,
        "options",
        "be those of llc and sample",
        ", ".join(unknown),
        _cure(unknown, known),
        TypeError,
    )
    return Request(nbeta, **given)


def _require_warm_up(limit: int | None, wanted: Request, cure: str = "") -> None:
    """Raise where the gradients of a chain do not hold the warm-up of HMC."""
    enough = limit is None or limit >= LEAST
    require(
        enough,
        "max_gradients",
        f"be at least {LEAST * wanted.chains} for {wanted.chains} chains of HMC",
        wanted.max_gradients,
        f"its warm-up counts{cure}",
    )


def drawn(
    problem: Problem,
    nbeta: float,
    /,
    *,
    seed: int = 0,
    batch_size: int | None = None,
    shared_batches: bool = False,
    accumulate: int = 1,
    bound: float | None = None,
    observables: Mapping[str, Observable] | None = None,
    averages: Mapping[str, Observable] | None = None,
    keep_parameters: bool = False,
    **request: Any,
) -> Drawn:
    """Chains of the kernel that suits the problem, with settings found by a pilot where they are
    not given.

    What is estimated, nβ and γ, is fixed before the first step (``estimand``). Problems of up to 15
    parameters, or 500 without data, are sampled by HMC on the whole data, which has no bias
    (``hamiltonian_pilot``); larger ones by kinetic Langevin dynamics, on the whole data where that
    is cheap, else on mini-batches (``unadjusted``).
    """
    require_problem(problem)
    if batch_size is not None:
        require_count(batch_size, "batch_size", 1, problem.num_samples)
    require_count(accumulate, "accumulate")
    if bound is not None:
        require_positive(bound, "bound")
    require_functions(observables, "observables")
    require_functions(averages, "averages")
    wanted = _request(nbeta, request)
    frozen = problem.at(problem.vector)
    joined = frozen  # the whole data as one batch, where a step sees it
    if frozen.has_data and whole_is_cheap(frozen) and _in_pieces(frozen):
        joined = frozen.subset(range(frozen.num_samples), frozen.num_samples)
    reasons = {}
    if wanted.localization is None and not isinstance(wanted.kernel, Kernel):
        gamma, reasons["localization"] = default_localization(joined, nbeta)
        wanted = dataclasses.replace(wanted, localization=gamma)
    name = wanted.kernel or default_kernel(frozen, wanted.step_size, batch_size)
    kernel = place(_made(name, wanted), frozen)
    whole = (
        name == "kinetic"
        and batch_size is None
        and wanted.step_size is None
        and whole_is_cheap(frozen)
    )
    if whole or kernel.exact:
        frozen = joined
    if whole and not kernel.exact:
        batch_size = frozen.num_samples
        small = frozen.num_parameters * batch_size <= FULL["cpu"]
        accumulate = accumulate if small else max(accumulate, -(-batch_size // PIECE))
    # an exact kernel sees the whole data anyway
    beside = not kernel.exact and wanted.baseline != "paired"
    plan = Plan(
        seed,
        batch_size,
        shared_batches,
        accumulate,
        1,
        bound,
        beside,
        True,
        keep_parameters,
        dict(observables or {}),
        dict(averages or {}),
    )
    if isinstance(kernel, HMC):
        found = _by_trajectories(frozen, kernel, wanted, plan)
    else:
        found = _by_steps(frozen, kernel, wanted, plan, whole)
    chains = dataclasses.replace(found.chains, reasons={**reasons, **found.chains.reasons})
    return dataclasses.replace(found, chains=chains)


def _cure(unknown: list[str], known: set[str]) -> str:
    """Our words for options that other libraries have, or else all that there are."""
    ours = [f"{ELSEWHERE[name]} for {name}" for name in unknown if name in ELSEWHERE]
    return (
        f"write {', '.join(ours)}"
        if ours
        else f"there are {', '.join(sorted(known - {'watch'}))}; thin is sample's"
    )


def whole_is_cheap(problem: Problem) -> bool:
    """Whether a gradient of the whole data costs little more than one of a batch, and the data
    are in memory.
    """
    if not problem.has_data:
        return True
    return (
        problem.num_parameters * problem.num_samples <= FULL.get(problem.device.type, FULL["cpu"])
        and problem.norm != "train"
        and problem.batches.in_memory
        and problem.memory is None
    )


def _in_pieces(problem: Problem) -> bool:
    """Whether the whole data is small, yet in several batches: their number would be most of the
    cost.
    """
    small = problem.num_parameters * problem.num_samples <= FULL["cpu"]
    return small and len(problem.batches) > 1 and problem.ranks.size == 1


def default_kernel(problem: Problem, step_size: float | None, batch_size: int | None) -> str:
    """The kernel of a problem where none is asked for; a step size that is given is SGLD's."""
    if step_size is not None:
        return "sgld"
    whole = batch_size is None or batch_size == problem.num_samples
    return (
        "hmc"
        if whole
        and problem.num_parameters <= ADJUSTED[problem.has_data]
        and whole_is_cheap(problem)
        else "kinetic"
    )


def _made(name: str | Kernel, wanted: Request) -> Kernel:
    """The kernel with what is known of its settings."""
    if isinstance(name, Kernel):
        return name
    step = 1e-4 if wanted.step_size is None else wanted.step_size
    made: Kernel = KERNELS[name](step, wanted.nbeta, wanted.localization)
    return made


def _by_trajectories(problem: Problem, kernel: HMC, wanted: Request, plan: Plan) -> Drawn:
    """HMC and MALA, on the whole data."""
    limit = None if wanted.max_gradients is None else wanted.max_gradients // wanted.chains
    _require_warm_up(limit, wanted)
    gamma = kernel.localization
    if isinstance(gamma, Tensor):
        plan = _with_ties(problem, gamma, plan)
    runner, mode = make_runner(problem, kernel, wanted.chains, plan, wanted.mode)
    try:
        found = _without_ties(_trajectories(runner, mode, problem, kernel, wanted, plan, limit))
    finally:
        runner.close()
    return dataclasses.replace(found, full=found.reading if wanted.baseline == "both" else None)


def _with_ties(problem: Problem, gamma: Tensor, plan: Plan) -> Plan:
    """The plan with Σγ_i(w_i − w*_i)² among what is observed."""
    centre = problem.vector

    def tie(theta: Tensor) -> Tensor:
        return (gamma * (theta - centre).square()).sum()

    return dataclasses.replace(plan, observables={**plan.observables, TIE: tie})


def _without_ties(found: Drawn) -> Drawn:
    """The same, what was observed for ourselves taken out of the chains."""
    seen = dict(found.chains.observables)
    ties = seen.pop(TIE, None)
    return dataclasses.replace(
        found, ties=ties, chains=dataclasses.replace(found.chains, observables=seen)
    )


def _trajectories(
    runner: AnyRunner,
    mode: str,
    problem: Problem,
    kernel: HMC,
    wanted: Request,
    plan: Plan,
    limit: int | None,
) -> Drawn:
    """Tune, then draw until the error is small enough or the gradients are spent, ``limit`` of a
    chain if given.
    """
    kernel, reasons = _ready(runner, problem, kernel, wanted, limit)
    before = runner.gradients_spent
    collector = Collector(runner, problem, kernel, plan, mode, wanted.watch)
    if wanted.draws is not None:
        short = _so_many(collector, wanted.draws, limit)
        chains = collector.chains(reasons)
        return Drawn(chains, read(chains, problem.num_parameters), spent=short)
    if limit is None:
        most = max(min(CHECKS[-1], CHECKS[-1] + hamiltonian_pilot.WARM_UP[-1] - before), 200)
    else:
        most = min(CHECKS[-1], limit - before)
    # gradients of a trajectory, about
    pace = max(kernel.leapfrog / max(math.log(kernel.leapfrog / 3), 1.0), 1.0)
    going = True
    for check in CHECKS:
        goal = min(check, most)
        while going and (left := goal - (runner.gradients_spent - before)) > 0:
            count = min(max(int(left / pace), FEWEST_TRAJECTORIES), _fitting(runner, kernel, limit))
            going = count > 0 and collector.draw(count)
        chains = collector.chains(reasons)
        reading = read(chains, problem.num_parameters)
        apart = chains.diagnostics.rhat > RHAT
        if (wanted.reached(reading) and not apart) or goal < check or not going:
            break
    reasons["draws"] = f"{wanted.goal}, up to {most} gradients a chain"
    chains = dataclasses.replace(chains, reasons=reasons)
    return Drawn(chains, reading, spent=apart or wanted.missed(reading))


def _ready(
    runner: AnyRunner, problem: Problem, kernel: HMC, wanted: Request, limit: int | None
) -> tuple[HMC, dict[str, str]]:
    """The kernel with what was to be found, and why; the chains burnt in."""
    reasons: dict[str, str] = {}
    given = wanted.burn_in or 0
    if wanted.step_size is None and not isinstance(wanted.kernel, Kernel):
        effort = Effort() if limit is None else Effort.within(limit, problem.num_parameters)
        found = hamiltonian_pilot.tune(runner, problem, kernel, effort)
        kernel, reasons = found.kernel, dict(found.reasons)
    elif wanted.burn_in is None:
        given = (
            TRAJECTORIES
            if limit is None
            else min(TRAJECTORIES, _fitting(runner, kernel, limit) // 2)
        )
    fits = max(_fitting(runner, kernel, limit) - FEWEST_TRAJECTORIES, 0)
    require(
        given <= fits,
        "burn_in",
        f"be {fits} trajectories at most with these max_gradients",
        given,
        "raise them",
    )
    burn(runner, given)
    return kernel, reasons


def _fitting(runner: AnyRunner, kernel: HMC, limit: int | None) -> int:
    """How many trajectories the gradients left to a chain surely allow."""
    return UNLIMITED if limit is None else (limit - runner.gradients_spent) // (kernel.leapfrog + 1)


def _so_many(collector: Collector, draws: int, limit: int | None) -> bool:
    """Draw so many trajectories; True if the gradients did not suffice."""
    assert isinstance(collector.kernel, HMC)
    left, going = draws, True
    while (
        left and going and (count := min(left, _fitting(collector.runner, collector.kernel, limit)))
    ):
        going = collector.draw(count)
        left -= count
    return going and left > 0


def _by_steps(problem: Problem, kernel: Kernel, wanted: Request, plan: Plan, whole: bool) -> Drawn:
    """Kernels that never reject: tune what is not given, burn in, draw until the error is small
    enough.
    """
    limit = None if wanted.max_gradients is None else wanted.max_gradients // wanted.chains
    given = isinstance(wanted.kernel, Kernel) or wanted.step_size is not None
    unadjusted.require_enough(limit, wanted.chains, wanted.burn_in, wanted.draws, tuned=not given)
    lengths = Lengths.of(limit, wanted.burn_in, wanted.draws, tuned=not given)
    runner, mode = make_runner(problem, kernel, wanted.chains, plan, wanted.mode)
    try:
        coarse: Coarse | None = None
        if given:
            reasons: dict[str, str] = {}
            if kernel.step_size > 0:
                kernel, note = unadjusted.stable(runner, problem, kernel, lengths.trials)
                reasons = {"step_size": note} if note else {}
            runner.retune(kernel)
            burn(runner, lengths.burn_in)
        else:
            pilot = Pilot(
                runner,
                problem,
                kernel,
                lengths,
                plan.seed,
                wanted.burn_in,
                wanted.draws,
                wanted.effort,
            )
            tuned = pilot.tune(plan.batch_size is not None and not whole)
            kernel, reasons, coarse, lengths = (
                tuned.kernel,
                dict(tuned.reasons),
                tuned.coarse,
                tuned.lengths,
            )
        return _rounds(runner, mode, problem, kernel, wanted, plan, reasons, lengths, coarse)
    finally:
        runner.close()


def _rounds(
    runner: AnyRunner,
    mode: str,
    problem: Problem,
    kernel: Kernel,
    wanted: Request,
    plan: Plan,
    reasons: dict[str, str],
    lengths: Lengths,
    coarse: Coarse | None,
) -> Drawn:
    """Draw in rounds, the noise of batches measured after each, until the tolerance is met or
    the steps are taken.
    """
    collector, full = (
        Collector(runner, problem, kernel, plan, mode, wanted.watch),
        wanted.baseline == "full",
    )
    looks: list[dict[str, float]] = []
    for count in unadjusted.rounds(lengths, runner):
        going = collector.draw(count)
        if kernel.step_size > 0:
            noise = runner.noise(NOISE_LOOKS)
            looks.append({name: float(values.mean()) for name, values in noise.items()})
        chains = _with_bias(
            collector.chains(reasons), kernel, coarse, looks, problem.num_parameters
        )
        reading = read(chains, problem.num_parameters, full)
        if wanted.draws is not None or not going or chains.diagnostics.diverged.any():
            break
        if reading.drifting and runner.gradients_spent < lengths.most // 2:
            collector.forget()
            looks.clear()
            continue
        if _trusted(chains, reading, wanted, lengths) and not wanted.missed(reading):
            break
    if wanted.draws is None:
        reasons["draws"] = f"{wanted.goal}, up to {lengths.most} steps a chain"
    chains = dataclasses.replace(chains, reasons={**chains.reasons, **reasons})
    beside = read(chains, problem.num_parameters, True) if wanted.baseline == "both" else None
    short = wanted.draws is None and not _trusted(chains, reading, wanted, lengths)
    return Drawn(chains, reading, short or wanted.missed(reading), beside)


def _trusted(chains: Chains, reading: Reading, wanted: Request, lengths: Lengths) -> bool:
    """Whether the draws are many and mixed enough for their standard error to be believed."""
    if np.ptp(chains.energies) == 0:  # a constant loss: nothing fluctuates that could be underrated
        return True
    if chains.diagnostics.rhat > RHAT or reading.drifting or reading.unsettled:
        return False
    effective = chains.diagnostics.ess_mean >= wanted.effort * EFFECTIVE * len(chains)
    return effective and len(chains.energies[0]) >= FEWEST_ROUNDS * lengths.round


def _with_bias(
    chains: Chains,
    kernel: Kernel,
    coarse: Coarse | None,
    looks: list[dict[str, float]],
    parameters: int,
) -> Chains:
    """The chains with what is known of the noise of batches and, where the step was found, of
    the bias of steps.
    """
    if not looks:
        return chains
    noise = {name: float(np.mean([look[name] for look in looks])) for name in looks[0]}
    noise["dof"] = len(looks) * len(chains) * (NOISE_LOOKS - 1.0)
    if isinstance(kernel, Kinetic):
        noise["heat"] = kernel.step_size / (2 * kernel.damping) * noise["trace"]
    fine = ~chains.diagnostics.diverged
    if coarse is None or not fine.any() or chains.work is None:
        return dataclasses.replace(chains, noise=noise)
    record = {
        name: getattr(chains, name)[fine]
        for name in ("work", "heat")
        if getattr(chains, name) is not None
    }
    bias = unadjusted.bias_of_steps(
        kernel, chains.energies[fine], record, noise, coarse, parameters
    )
    return dataclasses.replace(chains, noise=noise, step_bias=bias)
