"""Tune and run HMC on the whole data: its step, mass, burn-in and length."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lambdahat._core.check import require
from lambdahat._core.progress import report
from lambdahat.operators.curvature import hessian
from lambdahat.problem import Problem
from lambdahat.sampling._sample import (
    AnyRunner,
    Collector,
    SamplingRequest,
    SamplingRun,
    in_pieces,
    make_runner,
)
from lambdahat.sampling.backends.chain_runner import ChainPlan, Readings
from lambdahat.sampling.diagnostics import read
from lambdahat.sampling.kernels import HMC
from lambdahat.sampling.kernels.hmc import FEWEST

# gradients at which the search for the step begins anew, the last its end
WARM_UP = (500, 1200, 2000)
COOLING = 1200  # gradients of the warm-up in which the chains cool to the temperature asked for
INITIAL_NBETA = 1e-3  # nβ at the start of the warm-up, as a part of the nβ asked for
TARGET_ACCEPTANCE = 0.96  # the mean over trajectories
LONGEST = 100  # leapfrog steps
LONGEST_IN_WIDTHS = 1.5  # trajectory, in standard deviations of the localization
LARGEST_MASS = 500  # parameters up to which the Hessian is tried as mass
# gradients after the warm-up from which the acceptance of each chain is read, and the acceptance
# below which a chain counts as stuck
RESCUE = 300, 0.7
GATE = 500, 0.1  # gradients of a trial of that mass, and how far the virial may be from P
# gradients of a chain after which HMC computes its standard error
CHECKS = (500, 1000, 2000, 4000, 8000, 16000, 32000)
TRAJECTORIES = 200  # default burn-in where HMC's step size is given
LEAST_GRADIENTS = 400  # gradients of a chain of HMC that a limit must leave
FEWEST_TRAJECTORIES = 8  # to be drawn
UNLIMITED = 1 << 62
WEIGHTED_DISTANCE = "Σγ(w − w*)²"  # observed where γ differs between parameters


@dataclass(frozen=True)
class WarmUpEffort:
    """A ``share`` of the gradients of the full warm-up, and the ``longest`` trajectory."""

    share: float = 1.0
    longest: int = LONGEST

    @classmethod
    def within(cls, gradients: int | None, parameters: int) -> WarmUpEffort:
        """Half of so many gradients of a chain, besides the last trajectory of each part; by
        default the full warm-up.
        """
        if gradients is None:
            return cls()
        once = WARM_UP[-1] + 2 * RESCUE[0]
        full = 2 * once + GATE[0] if parameters <= LARGEST_MASS else once
        return cls(min(1.0, gradients / (2 * full)), max(min(LONGEST, gradients // 40), FEWEST))

    def gradients(self, full: int) -> int:
        """The gradients of a part that takes ``full`` in the full warm-up."""
        return int(self.share * full)


def tune(
    runner: AnyRunner, problem: Problem, kernel: HMC, effort: WarmUpEffort
) -> tuple[HMC, dict[str, str]]:
    """Warm the runner's chains up and find step size and mass (``kernel`` gives nβ and γ); also the
    reasons.

    The chains start at w*, at a temperature where the loss hardly counts, and are cooled to the one
    asked for: so they spread along flat valleys before the walls close in. A chain that got stuck
    in a narrow place, where it rejects, is put back to w*. The step size is adapted by dual
    averaging (Hoffman and Gelman 2014) to an acceptance of 0.96. For up to 200 parameters whose
    curvatures are far apart, nβ|H| + γ at w* is tried as mass first; it is kept if (w − w*)·∇U
    averages P to 10 % after its warm-up, as it does under the posterior.
    """
    spent, heated = effort.gradients(WARM_UP[-1]), effort.gradients(COOLING)
    reasons = {
        "kernel": "HMC: the whole data is cheap, and accepting and rejecting leaves no bias of the"
        " step",
        "step_size": f"dual averaging to an acceptance of {TARGET_ACCEPTANCE}",
        "burn_in": f"{spent} gradients a chain, cooled from {INITIAL_NBETA:g} of nβ during the"
        f" first {heated}",
    }
    scale = _hessian_scale(problem, kernel)
    if scale is not None:
        scaled = _warm_up(runner, dataclasses.replace(kernel, scale=scale), 0.5, effort)
        parts = _draw_for_gradients(runner, effort.gradients(GATE[0]))
        virials = [float(part["virial"].mean()) for part in parts]
        if abs(sum(virials) / len(virials) / problem.num_parameters - 1) < GATE[1]:
            why = "(nβ|H| + γ)⁻¹ at the centre: P = E[(w − w*)·∇U] holds with it"
            return scaled, {**reasons, "scale": why}
    plain = _warm_up(runner, kernel, 0.1 * _width(kernel), effort)
    return plain, {**reasons, "scale": "none: the mass is the identity"}


def _width(kernel: HMC) -> float:
    """The standard deviation of a parameter under the localization alone."""
    return 1.0 / math.sqrt(kernel.gamma() or 1e-12)


def _hessian_scale(problem: Problem, kernel: HMC) -> Tensor | None:
    """S = (nβ|H| + γ)^−½ where most directions are curved, unequally; else None."""
    gamma = kernel.gamma()
    if problem.num_parameters > LARGEST_MASS or kernel.nbeta == 0:
        return None
    values, vectors = torch.linalg.eigh(hessian(problem).dense().double())
    stiffness = kernel.nbeta * values.abs() + gamma
    curved = kernel.nbeta * values.abs() > gamma
    if float(curved.double().mean()) < 0.5 or not bool(torch.isfinite(stiffness).all()):
        return None
    if float(stiffness.max() / stiffness[curved].min()) <= 100:
        return None
    root: Tensor = (vectors * stiffness.rsqrt()) @ vectors.T
    return root.to(problem.dtype)


def _warm_up(runner: AnyRunner, kernel: HMC, length: float, effort: WarmUpEffort) -> HMC:
    """Adapt the step size while the chains cool, by dual averaging (Hoffman and Gelman 2014,
    §3.2.1), and return the kernel with it.

    Chains that hardly move afterwards are put back to the centre and warm up again.
    """
    runner.retune(kernel)
    runner.restart()
    before, share, total = runner.gradients_spent, effort.share, effort.gradients(WARM_UP[-1])
    for stage, end in enumerate(WARM_UP):
        length *= 1.0 if stage == 0 else 0.5
        goal, average, miss, count = math.log(5 * length), math.log(length), 0.0, 0
        while (spent := runner.gradients_spent - before) < share * end:
            report("warm-up", spent, total)
            heat = INITIAL_NBETA ** max(0.0, 1.0 - math.ceil(spent / share / 100) * 100 / COOLING)
            runner.retune(_with_length(kernel, length, heat * kernel.nbeta, effort.longest))
            acceptance = float(runner.advance(1, observe=False)["acceptance"].mean())
            count += 1
            miss += (TARGET_ACCEPTANCE - acceptance - miss) / (count + 10)
            now = goal - math.sqrt(count) / 0.05 * miss
            average += count**-0.75 * (now - average)  # later steps count more
            length = math.exp(min(now, 60.0))
        length = math.exp(min(average, 60.0))
    report("warm-up", total, total)
    kernel = _with_length(kernel, length, kernel.nbeta, effort.longest)
    runner.retune(kernel)
    gradients, least = effort.gradients(RESCUE[0]), RESCUE[1]
    parts = [part["acceptance"] for part in _draw_for_gradients(runner, gradients)]
    stuck = (torch.cat(parts, dim=1).mean(dim=1) < least).tolist()
    if any(stuck):
        runner.restart([chain for chain, still in zip(runner.chains, stuck, strict=True) if still])
        for _ in _draw_for_gradients(runner, gradients):
            pass
    return kernel


def _draw_for_gradients(runner: AnyRunner, gradients: int) -> Iterator[Readings]:
    """Draws, one at a time, until so many gradients are spent."""
    end = runner.gradients_spent + gradients
    while runner.gradients_spent < end:
        yield runner.advance(1, observe=False)


def _with_length(kernel: HMC, length: float, nbeta: float, most: int) -> HMC:
    """The kernel with another step length, and trajectories as long as γ is wide, or ``most``."""
    width = 1.0 if kernel.scale is not None else _width(kernel)
    longest = int(min(max(LONGEST_IN_WIDTHS * width / length, FEWEST), most))
    return dataclasses.replace(kernel, step_size=length**2, nbeta=nbeta, leapfrog=longest)


def require_warm_up(request: SamplingRequest, cure: str = "") -> None:
    """Raise where the gradients of a chain do not hold the warm-up of HMC."""
    enough = request.limit is None or request.limit >= LEAST_GRADIENTS
    chains, cure = request.chains, f"its warm-up counts{cure}"
    expected = f"be at least {LEAST_GRADIENTS * chains} for {chains} chains of HMC"
    require(enough, "max_gradients", expected, request.max_gradients, cure)


def draw_by_trajectories(
    problem: Problem, kernel: HMC, request: SamplingRequest, plan: ChainPlan
) -> SamplingRun:
    """Draw chains of HMC or MALA on the whole data."""
    require_warm_up(request)
    gamma, centre = kernel.localization, problem.vector
    if isinstance(gamma, Tensor):
        observables = dict(plan.observables)
        observables[WEIGHTED_DISTANCE] = lambda theta: (gamma * (theta - centre).square()).sum()
        plan = dataclasses.replace(plan, observables=observables)
    runner, mode = make_runner(problem, kernel, request.chains, plan, request.mode)
    reasons: dict[str, str] = {}
    limit, burn_in = request.limit, request.burn_in or 0

    def trajectories_left() -> int:
        """The number of trajectories that the gradients left to a chain are sure to allow."""
        if limit is None:
            return UNLIMITED
        return (limit - runner.gradients_spent) // (kernel.leapfrog + 1)

    try:
        # Tune what was not given, and burn in.
        if request.tuned:
            effort = WarmUpEffort.within(limit, problem.num_parameters)
            kernel, reasons = tune(runner, problem, kernel, effort)
        elif request.burn_in is None:
            burn_in = min(TRAJECTORIES, trajectories_left() // 2)
        fits = max(trajectories_left() - FEWEST_TRAJECTORIES, 0)
        expected = f"be {fits} trajectories at most with these max_gradients"
        require(burn_in <= fits, "burn_in", expected, burn_in, "raise them")
        for piece in in_pieces("burn-in", burn_in):
            runner.skip(piece)
        # Draw as many as were asked for, or until the error is small enough, as the gradients last.
        collector = Collector(runner, mode, request.watch)
        before, going, spent = runner.gradients_spent, True, False
        if request.draws is not None:
            missing = request.draws
            while going and (count := min(missing, trajectories_left())):
                going = collector.draw(count)
                missing -= count
            chains = collector.chains(reasons)
            reading, spent = read(chains, problem.num_parameters), going and missing > 0
        else:
            most = min(CHECKS[-1], UNLIMITED if limit is None else limit - before)
            if limit is None:
                most = max(min(most, CHECKS[-1] + WARM_UP[-1] - before), 200)
            # gradients of a trajectory, about
            pace = max(kernel.leapfrog / max(math.log(kernel.leapfrog / 3), 1.0), 1.0)
            for check in CHECKS:
                goal = min(check, most)
                while going and (left := goal - (runner.gradients_spent - before)) > 0:
                    count = max(int(left / pace), FEWEST_TRAJECTORIES)
                    count = min(count, trajectories_left())
                    going = count > 0 and collector.draw(count)
                chains = collector.chains(reasons)
                reading = read(chains, problem.num_parameters)
                # an error from few draws must be so much smaller, as where the virial explains
                # nearly all of the energy
                spent = not request.is_met(reading, request.share(chains))
                if not spent or goal < check or not going:
                    break
            reasons["draws"] = f"{request.goal}, up to {most} gradients a chain"
            chains = dataclasses.replace(chains, reasons=reasons)
    finally:
        runner.close()
    observed = dict(chains.observables)
    ties = observed.pop(WEIGHTED_DISTANCE, None)
    chains = dataclasses.replace(chains, observables=observed)
    full = reading if request.baseline == "both" else None
    return SamplingRun(chains, reading, spent, full, ties)


def trajectory_gradients(request: SamplingRequest, parameters: int) -> tuple[int, int]:
    """The fewest and the most gradients of a chain of HMC: warm-ups, one or two, and then
    trajectories until the error is small enough.
    """
    limit, tuned = request.limit, request.tuned
    effort = WarmUpEffort.within(limit, parameters)
    rescue, gate = effort.gradients(RESCUE[0]), effort.gradients(GATE[0])
    once = effort.gradients(WARM_UP[-1]) + rescue
    warm = (once, 2 * (once + rescue) + gate + effort.longest) if tuned else (0, 0)
    longest = effort.longest if tuned else HMC.leapfrog
    if request.draws is not None:
        default = 0 if tuned else TRAJECTORIES
        burn_in = default if request.burn_in is None else request.burn_in
        trajectories = request.draws + burn_in
        fewest, most = warm[0] + trajectories, warm[1] + (longest + 1) * trajectories
    else:
        fewest = warm[0] + CHECKS[0]
        most = max(CHECKS[-1] + warm[0], warm[1]) + FEWEST_TRAJECTORIES * LONGEST
    return (fewest, most) if limit is None else (min(fewest, limit - longest - 1), min(most, limit))
