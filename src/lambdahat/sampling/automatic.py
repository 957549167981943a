"""Chains with no settings to give: what is not given is found by a pilot, and the result says why."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lambdahat._check import describe, require, require_choice, require_count, require_positive
from lambdahat.problem import Problem, require_problem
from lambdahat.results import Array, Chains, Estimate
from lambdahat.sampling import hamiltonian_pilot, langevin_pilot
from lambdahat.sampling.budgets import Steps, dealt
from lambdahat.sampling.diagnostics import RHAT
from lambdahat.sampling.estimation import Reading, read
from lambdahat.sampling.hamiltonian import HMC, mala
from lambdahat.sampling.hamiltonian_pilot import Effort
from lambdahat.sampling.kernels import SGHMC, SGLD, SGNHT, Kernel, Localization, RMSpropSGLD
from lambdahat.sampling.langevin_pilot import SETTLED, SHORTEST_PILOT, Search
from lambdahat.sampling.modes import AnyRunner, make_runner
from lambdahat.sampling.runners import Observable, Plan
from lambdahat.sampling.running import Collector, Watch, burn, place, require_functions

KERNELS: dict[str, Any] = {
    "sgld": SGLD, "rmsprop_sgld": RMSpropSGLD, "sghmc": SGHMC, "sgnht": SGNHT, "hmc": HMC, "mala": mala,
}  # fmt: skip
EXACT_SAMPLES, EXACT_WORK = 2048, 1_000_000  # samples, and parameters × samples, up to which the whole data is cheap
CHECKS = (2000, 4000, 8000, 16000)  # gradients of a chain after which HMC looks whether the error is small enough
HOPELESS = 4000, 1.3  # gradients of a chain after which chains that far apart (R̂) are given up
STRONGEST = 1e4
TOL, USELESS = 0.03, 0.1  # relative standard errors: to draw for, and to be called unfinished
TRAJECTORIES = 200  # thrown away where HMC's step size is given
LEAST = 400  # gradients of a chain of HMC that a limit must leave
FEWEST_TRAJECTORIES = 8  # to be drawn
UNLIMITED = 1 << 62
ANOTHER = 0.25  # of a limit: what must be left for a stronger localization to be tried
ELSEWHERE = {"lr": "step_size", "epsilon": "step_size", "n_beta": "nbeta", "gamma": "localization",
             "num_chains": "chains", "num_draws": "draws", "num_burnin_steps": "burn_in"}  # fmt: skip
TIE = "Σγ(w − w*)²"  # observed where γ differs between parameters


@dataclass(frozen=True)
class Drawn:
    """Chains, λ̂ read off them, and (γ, λ̂) at a stronger localization where that was sampled on the way.

    ``full`` is λ̂ from the losses over the whole data beside the paired one, where both were asked for, and ``ties``
    Σγ_i(w_i − w*_i)² of the draws, (chains, draws), where γ differs between parameters.
    """

    chains: Chains
    reading: Reading
    stronger: tuple[float, Estimate] | None = None
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
            number = isinstance(self.step_size, int | float) and not isinstance(self.step_size, bool)
            require(number and self.step_size >= 0, "step_size", "be a number of at least 0", describe(self.step_size))
        if self.tol is not None:
            require_positive(self.tol, "tol")
        if isinstance(self.kernel, str):
            require_choice(self.kernel, "kernel", KERNELS)
        elif self.kernel is not None:
            require(isinstance(self.kernel, Kernel), "kernel", f"be one of {', '.join(KERNELS)}, or a kernel",
                    self.kernel, "", TypeError)  # fmt: skip
            others = {"step_size": self.step_size, "localization": self.localization}
            given = ", ".join(name for name, value in others.items() if value is not None)
            require(not given, "kernel", "be a name where the settings are given apart", f"a kernel and {given}",
                    "set them in the kernel")  # fmt: skip
        finds = self.kernel in (None, "sgld", "hmc") or isinstance(self.kernel, Kernel) or self.step_size is not None
        require(finds, "step_size", f"be given for kernel {self.kernel!r}", "None", "sgld and hmc find their own")

    @property
    def goal(self) -> float:
        """The relative standard error to draw for."""
        return TOL if self.tol is None else self.tol

    def missed(self, reading: Reading) -> bool:
        """Whether the error is beyond what was asked for, or where nothing was, beyond what is of use."""
        return self.draws is None and reading.stderr > (USELESS if self.tol is None else self.tol) * abs(reading.value)


def drawn(
    problem: Problem,
    nbeta: float,
    search: Search | None = None,
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
    """Chains of the kernel that suits the problem, with settings found by a pilot where they are not given.

    Where the whole data is cheap, HMC, which has no bias (``hamiltonian_pilot``); else SGLD (``langevin_pilot``).
    ``search`` is what readings of several runs know of the step size.
    """
    require_problem(problem)
    if batch_size is not None:
        require_count(batch_size, "batch_size", 1, problem.num_samples)
    require_count(accumulate, "accumulate")
    if bound is not None:
        require_positive(bound, "bound")
    require_functions(observables, "observables")
    require_functions(averages, "averages")
    known = {field.name for field in dataclasses.fields(Request)}
    unknown = sorted(set(request) - known)
    require(not unknown, "options", "be those of llc and sample", ", ".join(unknown), _cure(unknown, known), TypeError)
    wanted = Request(nbeta, **request)
    frozen = problem.at(problem.vector)
    kernel = _kernel(frozen, wanted)
    beside = not kernel.exact and wanted.baseline != "paired"  # an exact kernel sees the whole data anyway
    plan = Plan(seed, batch_size, shared_batches, accumulate, 1, bound, beside, True, keep_parameters,
                dict(observables or {}), dict(averages or {}))  # fmt: skip
    if isinstance(kernel, HMC):
        return _by_trajectories(frozen, kernel, wanted, plan)
    return _by_steps(frozen, kernel, wanted, plan, search or Search())


def _cure(unknown: list[str], known: set[str]) -> str:
    """Our words for options that other libraries have, or else all that there are."""
    ours = [f"{ELSEWHERE[name]} for {name}" for name in unknown if name in ELSEWHERE]
    return f"write {', '.join(ours)}" if ours else f"there are {', '.join(sorted(known - {'watch'}))}; thin is sample's"


def _kernel(problem: Problem, wanted: Request) -> Kernel:
    """The kernel with what is known of its settings."""
    if isinstance(wanted.kernel, Kernel):
        return place(wanted.kernel, problem)
    samples = problem.num_samples if problem.has_data else 1
    cheap = samples <= EXACT_SAMPLES and problem.num_parameters * samples <= EXACT_WORK
    name = wanted.kernel or ("hmc" if cheap and wanted.step_size is None else "sgld")
    gamma = 1.0 if wanted.localization is None else wanted.localization
    step = 1e-4 if wanted.step_size is None else wanted.step_size
    made: Kernel = KERNELS[name](step, wanted.nbeta, gamma)
    return place(made, problem)


def _by_trajectories(problem: Problem, kernel: HMC, wanted: Request, plan: Plan) -> Drawn:
    """HMC; where γ is free it is 1, and ten times that while the chains do not mix."""
    free = wanted.localization is None and not isinstance(wanted.kernel, Kernel) and wanted.draws is None
    limit = None if wanted.max_gradients is None else wanted.max_gradients // wanted.chains
    require(limit is None or limit >= LEAST, "max_gradients",
            f"be at least {LEAST * wanted.chains} for {wanted.chains} chains of HMC", wanted.max_gradients,
            "its warm-up counts")  # fmt: skip
    gamma = kernel.localization
    if isinstance(gamma, Tensor):
        plan = _with_ties(problem, gamma, plan)
    spent, tried = 0, []
    while True:
        left = None if limit is None else limit - spent // wanted.chains
        runner, mode = make_runner(problem, kernel, wanted.chains, plan, wanted.mode)
        try:
            found = _without_ties(_trajectories(runner, mode, problem, kernel, wanted, plan, left))
        finally:
            runner.close()
        chains = dataclasses.replace(found.chains, cost=found.chains.cost + spent)
        found = dataclasses.replace(found, chains=chains, full=found.reading if wanted.baseline == "both" else None)
        spent = found.chains.cost
        diagnostics, reading = found.chains.diagnostics, found.reading
        apart = diagnostics.rhat > RHAT or diagnostics.acceptance < 0.5
        mixed = not apart and reading.stderr <= USELESS * abs(reading.value)
        still = not (found.chains.distances > 0).any()
        gamma = kernel.localization
        if mixed or still or not free or not isinstance(gamma, float):
            return found
        tried.append(found)
        over = limit is not None and limit - spent // wanted.chains < max(LEAST, ANOTHER * limit)
        if gamma >= STRONGEST or wanted.watch is not None or over:
            best = min(tried, key=lambda one: one.chains.diagnostics.rhat)
            why = "the gradients are spent" if over else "the chains mix at none"
            reasons = {**best.chains.reasons, "localization": f"the best of 1, 10, 100, …: {why}"}
            return dataclasses.replace(best, chains=dataclasses.replace(best.chains, cost=spent, reasons=reasons))
        kernel = dataclasses.replace(kernel, localization=10 * gamma)


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
    return dataclasses.replace(found, ties=ties, chains=dataclasses.replace(found.chains, observables=seen))


def _trajectories(
    runner: AnyRunner, mode: str, problem: Problem, kernel: HMC, wanted: Request, plan: Plan, limit: int | None
) -> Drawn:
    """Tune, then draw until the error is small enough or the gradients are spent, ``limit`` of a chain if given."""
    kernel, reasons = _ready(runner, problem, kernel, wanted, limit)
    before = runner.gradients_spent
    collector = Collector(runner, problem, kernel, plan, mode, wanted.watch)
    if wanted.draws is not None:
        short = _so_many(collector, wanted.draws, limit)
        chains = collector.chains(reasons)
        return Drawn(chains, read(chains, problem.num_parameters), spent=short)
    free = wanted.localization is None and not isinstance(wanted.kernel, Kernel)
    if limit is None:
        most = max(min(CHECKS[-1], CHECKS[-1] + hamiltonian_pilot.WARM_UP[-1] - before), 200)
    else:
        most = min(CHECKS[-1], limit - before)
    pace = max(kernel.leapfrog / max(math.log(kernel.leapfrog / 3), 1.0), 1.0)  # gradients of a trajectory, about
    going = True
    for check in CHECKS:
        goal = min(check, most)
        while going and (left := goal - (runner.gradients_spent - before)) > 0:
            count = min(max(int(left / pace), FEWEST_TRAJECTORIES), _fitting(runner, kernel, limit))
            going = count > 0 and collector.draw(count)
        chains = collector.chains(reasons)
        reading = read(chains, problem.num_parameters)
        apart = chains.diagnostics.rhat > RHAT
        if (reading.stderr <= wanted.goal * abs(reading.value) and not apart) or goal < check or not going:
            break
        if free and check >= HOPELESS[0] and chains.diagnostics.rhat > HOPELESS[1]:
            break  # a stronger localization will be tried
    reasons["draws"] = f"until the standard error is {wanted.goal:.3g} of the value, up to {most} gradients a chain"
    chains = dataclasses.replace(chains, reasons=reasons)
    return Drawn(chains, reading, spent=wanted.missed(reading))


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
        given = TRAJECTORIES if limit is None else min(TRAJECTORIES, _fitting(runner, kernel, limit) // 2)
    fits = max(_fitting(runner, kernel, limit) - FEWEST_TRAJECTORIES, 0)
    require(given <= fits, "burn_in", f"be {fits} trajectories at most with these max_gradients", given, "raise them")
    burn(runner, given)
    if wanted.localization is None and not isinstance(wanted.kernel, Kernel):
        reasons["localization"] = "the weakest of 1, 10, 100, … at which the chains mix"
    return kernel, reasons


def _fitting(runner: AnyRunner, kernel: HMC, limit: int | None) -> int:
    """How many trajectories the gradients left to a chain surely allow."""
    return UNLIMITED if limit is None else (limit - runner.gradients_spent) // (kernel.leapfrog + 1)


def _so_many(collector: Collector, draws: int, limit: int | None) -> bool:
    """Draw so many trajectories; True if the gradients did not suffice."""
    assert isinstance(collector.kernel, HMC)
    left, going = draws, True
    while left and going and (count := min(left, _fitting(collector.runner, collector.kernel, limit))):
        going = collector.draw(count)
        left -= count
    return going and left > 0


def _by_steps(problem: Problem, kernel: Kernel, wanted: Request, plan: Plan, search: Search) -> Drawn:
    """SGLD and its kin; a step size that diverges is made smaller."""
    ready = isinstance(wanted.kernel, Kernel) or not isinstance(kernel, SGLD) or kernel.step_size == 0
    finds = not ready and (wanted.step_size is None or wanted.localization is None)
    checks = kernel.step_size > 0 and (wanted.step_size is not None or isinstance(wanted.kernel, Kernel))
    shortest = SHORTEST_PILOT + (wanted.burn_in or 0) // SETTLED if finds else 0
    steps = dealt(wanted.chains, wanted.burn_in, wanted.draws, wanted.max_gradients,
                  shortest + (4 * langevin_pilot.SHORTEST_WINDOW if checks else 0))  # fmt: skip
    runner, mode = make_runner(problem, kernel, wanted.chains, plan, wanted.mode)
    notes: dict[str, str] = {}
    try:
        if checks:
            kernel, note = langevin_pilot.stable(runner, problem, kernel, steps.pilot - shortest)
            notes = {"step_size": note} if note else {}
            steps = dataclasses.replace(steps, pilot=steps.pilot - runner.gradients_spent)
        return _steps(runner, mode, problem, kernel, wanted, plan, notes, steps, search if finds else None)
    finally:
        runner.close()


def _steps(
    runner: AnyRunner,
    mode: str,
    problem: Problem,
    kernel: Kernel,
    wanted: Request,
    plan: Plan,
    notes: Mapping[str, str],
    steps: Steps,
    search: Search | None,
) -> Drawn:
    """Tune what is to be found, then draw until the error is small enough or the steps are taken."""
    reasons, stronger, count = dict(notes), None, problem.num_parameters
    if search is not None:
        assert isinstance(kernel, SGLD)
        fixed = wanted.step_size is not None, wanted.localization is not None, plan.batch_size is not None
        tuned = langevin_pilot.tune(runner, problem, kernel, steps, fixed, plan.seed, search)
        kernel, stronger = tuned.kernel, tuned.stronger
        reasons = {**tuned.reasons, **reasons}
    else:
        runner.retune(kernel)
        burn(runner, steps.burn_in)
    corrected, full = search is not None and wanted.step_size is None, wanted.baseline == "full"
    collector = Collector(runner, problem, kernel, plan, mode, wanted.watch)
    going = collector.draw(steps.round)
    chains = collector.chains(reasons, corrected)
    reading = read(chains, count, full)
    while wanted.draws is None and going and runner.gradients_spent + steps.round <= steps.most:
        if reading.drifting:
            collector.forget()
        elif reading.stderr <= wanted.goal * abs(reading.value) or chains.diagnostics.diverged.any():
            break
        going = collector.draw(steps.round)
        chains = collector.chains(reasons, corrected)
        reading = read(chains, count, full)
    if wanted.draws is None:
        reasons["draws"] = (
            f"until the standard error is {wanted.goal:.3g} of the value, up to {steps.most} steps a chain"
        )
    if plan.batch_size is None:
        reasons.setdefault("batch_size", f"{chains.batch_size}: it is chosen where the step size is")
    chains = dataclasses.replace(chains, reasons={**chains.reasons, **reasons})
    beside = read(chains, count, True) if wanted.baseline == "both" else None
    return Drawn(chains, reading, stronger, wanted.missed(reading), beside)
