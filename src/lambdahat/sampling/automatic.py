"""Chains with no settings to give: what is not given is found by a pilot, and the result says why."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lambdahat._check import describe, require, require_choice, require_count, require_positive
from lambdahat.problem import Problem, require_problem
from lambdahat.results import Chains, Estimate
from lambdahat.sampling import hamiltonian_pilot, langevin_pilot
from lambdahat.sampling.diagnostics import RHAT
from lambdahat.sampling.estimation import Reading, read
from lambdahat.sampling.hamiltonian import HMC, mala
from lambdahat.sampling.kernels import SGHMC, SGLD, SGNHT, Kernel, Localization, RMSpropSGLD
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
STEPS = 4000  # of a chain of SGLD at most; half of them as a rule
BURN_SHARE = 0.55


@dataclass(frozen=True)
class Drawn:
    """Chains, λ̂ read off them, and (γ, λ̂) at a stronger localization where that was sampled on the way."""

    chains: Chains
    reading: Reading
    stronger: tuple[float, Estimate] | None = None
    spent: bool = False


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
    step_hint: float | None = None
    step_bias: float = langevin_pilot.STEP_BIAS
    tol: float | None = None
    max_gradients: int | None = None
    mode: str = "auto"
    watch: Watch | None = None

    def __post_init__(self) -> None:
        require_count(self.chains, "chains")
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
    *,
    seed: int = 0,
    batch_size: int | None = None,
    shared_batches: bool = False,
    accumulate: int = 1,
    baseline: str = "paired",
    bound: float | None = None,
    observables: Mapping[str, Observable] | None = None,
    averages: Mapping[str, Observable] | None = None,
    keep_parameters: bool = False,
    **request: Any,
) -> Drawn:
    """Chains of the kernel that suits the problem, with settings found by a pilot where they are not given.

    Where the whole data is cheap, HMC, which has no bias (``hamiltonian_pilot``); else SGLD (``langevin_pilot``).
    """
    require_problem(problem)
    if batch_size is not None:
        require_count(batch_size, "batch_size", 1, problem.num_samples)
    require_choice(baseline, "baseline", ("paired", "full", "both"))
    require_count(accumulate, "accumulate")
    if bound is not None:
        require_positive(bound, "bound")
    require_functions(observables, "observables")
    require_functions(averages, "averages")
    known = {field.name for field in dataclasses.fields(Request)}
    unknown = ", ".join(sorted(set(request) - known))
    require(not unknown, "options", "be those of llc and sample", unknown, "thin is not among them", TypeError)
    wanted = Request(nbeta, **request)
    plan = Plan(seed, batch_size, shared_batches, accumulate, 1, bound, baseline != "paired", True, keep_parameters,
                dict(observables or {}), dict(averages or {}))  # fmt: skip
    frozen = problem.at(problem.vector)
    kernel = _kernel(frozen, wanted)
    if isinstance(kernel, HMC):
        return _by_trajectories(frozen, kernel, wanted, plan)
    return _by_steps(frozen, kernel, wanted, plan)


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
    budget = (wanted.max_gradients or wanted.chains * (CHECKS[-1] + hamiltonian_pilot.WARM_UP[-1])) // wanted.chains
    spent, tried = 0, []
    while True:
        runner, mode = make_runner(problem, kernel, wanted.chains, plan, wanted.mode)
        try:
            found = _trajectories(runner, mode, problem, kernel, wanted, plan, budget)
        finally:
            runner.close()
        found = dataclasses.replace(found, chains=dataclasses.replace(found.chains, cost=found.chains.cost + spent))
        spent = found.chains.cost
        diagnostics, reading = found.chains.diagnostics, found.reading
        apart = diagnostics.rhat > RHAT or diagnostics.acceptance < 0.5
        mixed = not apart and reading.stderr <= USELESS * abs(reading.value)
        still = not (found.chains.distances > 0).any()
        gamma = kernel.localization
        if mixed or still or not free or not isinstance(gamma, float):
            return found
        tried.append(found)
        if gamma >= STRONGEST or wanted.watch is not None:
            best = min(tried, key=lambda one: one.chains.diagnostics.rhat)
            reasons = {**best.chains.reasons, "localization": "the best of 1, 10, 100, …: the chains mix at none"}
            return dataclasses.replace(best, chains=dataclasses.replace(best.chains, cost=spent, reasons=reasons))
        kernel = dataclasses.replace(kernel, localization=10 * gamma)


def _trajectories(
    runner: AnyRunner, mode: str, problem: Problem, kernel: HMC, wanted: Request, plan: Plan, budget: int
) -> Drawn:
    """Tune, then draw until the error is small enough or the budget spent."""
    reasons: dict[str, str] = {}
    free = wanted.localization is None and not isinstance(wanted.kernel, Kernel)
    if wanted.step_size is None and not isinstance(wanted.kernel, Kernel):
        share = min(1.0, budget / (2 * hamiltonian_pilot.WARM_UP[-1]))
        tuned = hamiltonian_pilot.tune(runner, problem, kernel, share)
        kernel, reasons = tuned.kernel, dict(tuned.reasons)
        burn(runner, wanted.burn_in or 0)
    else:
        burn(runner, TRAJECTORIES if wanted.burn_in is None else wanted.burn_in)
    if free:
        reasons["localization"] = "the weakest of 1, 10, 100, … at which the chains mix"
    before = runner.gradients_spent
    collector = Collector(runner, problem, kernel, plan, mode, wanted.watch)
    if wanted.draws is not None:
        collector.draw(wanted.draws)
        chains = collector.chains(before, reasons)
        return Drawn(chains, read(chains, problem.num_parameters, False))
    pace = max(kernel.leapfrog / max(math.log(kernel.leapfrog / 3), 1.0), 1.0)  # gradients of a trajectory, about
    going = True
    for check in CHECKS:
        goal = min(check, max(budget - before, 200))
        while going and (left := goal - (runner.gradients_spent - before)) > 0:
            going = collector.draw(max(int(left / pace), 8))
        chains = collector.chains(before, reasons)
        reading = read(chains, problem.num_parameters, False)
        apart = chains.diagnostics.rhat > RHAT
        if (reading.stderr <= wanted.goal * abs(reading.value) and not apart) or goal < check or not going:
            break
        if free and check >= HOPELESS[0] and chains.diagnostics.rhat > HOPELESS[1]:
            break  # a stronger localization will be tried
    most = max(min(CHECKS[-1], budget - before), 200)
    reasons["draws"] = f"until the standard error is {wanted.goal:.3g} of the value, up to {most} gradients a chain"
    chains = dataclasses.replace(chains, reasons=reasons)
    return Drawn(chains, reading, spent=wanted.missed(reading))


def _by_steps(problem: Problem, kernel: Kernel, wanted: Request, plan: Plan) -> Drawn:
    """SGLD and its kin; a step size that diverges is made smaller."""
    runner, mode = make_runner(problem, kernel, wanted.chains, plan, wanted.mode)
    notes: dict[str, str] = {}
    try:
        if kernel.step_size > 0 and (wanted.step_size is not None or isinstance(wanted.kernel, Kernel)):
            kernel, note = langevin_pilot.stable(runner, problem, kernel)
            notes = {"step_size": note} if note else {}
        return _steps(runner, mode, problem, kernel, wanted, plan, notes)
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
) -> Drawn:
    """Tune what is to be found, then draw until the error is small enough or the budget spent."""
    most = (wanted.max_gradients or wanted.chains * STEPS) // wanted.chains
    burn_in = int(BURN_SHARE * most / 2) if wanted.burn_in is None else wanted.burn_in
    draws = max(most // 2 - burn_in, 8) if wanted.draws is None else wanted.draws
    reasons, stronger, searched = dict(notes), None, False
    ready = isinstance(wanted.kernel, Kernel) or not isinstance(kernel, SGLD)
    if not ready and (wanted.step_size is None or wanted.localization is None) and kernel.step_size > 0:
        assert isinstance(kernel, SGLD)
        searched = wanted.step_size is None
        fixed = (not searched, wanted.localization is not None)
        tuned = langevin_pilot.tune(
            runner, problem, kernel, burn_in, fixed, plan.seed, wanted.step_hint, wanted.step_bias
        )
        kernel, stronger = tuned.kernel, tuned.stronger
        reasons = {**tuned.reasons, **reasons}
    else:
        runner.retune(kernel)
        burn(runner, burn_in)
    before = runner.gradients_spent
    collector = Collector(runner, problem, kernel, plan, mode, wanted.watch)
    going = collector.draw(draws)
    chains = collector.chains(before, reasons)
    reading = read(chains, problem.num_parameters, searched)
    while wanted.draws is None and going and runner.gradients_spent + draws <= most:
        if reading.drifting:
            collector.forget()
            before = runner.gradients_spent
        elif reading.stderr <= wanted.goal * abs(reading.value) or chains.diagnostics.diverged.any():
            break
        going = collector.draw(draws)
        chains = collector.chains(before, reasons)
        reading = read(chains, problem.num_parameters, searched)
    if wanted.draws is None:
        reasons["draws"] = f"until the standard error is {wanted.goal:.3g} of the value, up to {most} steps a chain"
    if plan.batch_size is None:
        reasons["batch_size"] = f"{chains.batch_size}: larger ones allow larger steps, at the same cost in samples"
    chains = dataclasses.replace(chains, reasons=reasons)
    return Drawn(chains, reading, stronger, wanted.missed(reading))
