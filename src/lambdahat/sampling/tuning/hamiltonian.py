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
from lambdahat.sampling._sample import Collector, burn
from lambdahat.sampling.backends import AnyRunner, make_runner
from lambdahat.sampling.backends.chain_runner import ChainPlan, Record
from lambdahat.sampling.diagnostics import RHAT, read
from lambdahat.sampling.kernels import HMC, Kernel
from lambdahat.sampling.kernels.hmc import FEWEST
from lambdahat.sampling.tuning import Drawn, SamplingRequest

# gradients at which the search for the step begins anew, the last its end
WARM_UP = (500, 1200, 2000)
HEATED = 1200  # gradients of the warm-up above the temperature asked for
HEAT = 1e-3  # nβ at the start of the warm-up, as a part of the nβ asked for
TARGET = 0.96  # acceptance, the mean over trajectories
LONGEST = 100  # leapfrog steps
TURN = 1.5  # and no trajectory longer than this, in standard deviations of the localization
DENSE = 500  # parameters up to which the Hessian is tried as mass
# gradients of a look at the chains after it, and the acceptance below which one counts as stuck
RESCUE = 300, 0.7
GATE = 500, 0.1  # gradients of a trial of that mass, and how far the virial may be from P
# gradients of a chain after which HMC looks at its error
CHECKS = (500, 1000, 2000, 4000, 8000, 16000, 32000)
TRAJECTORIES = 200  # thrown away where HMC's step size is given
LEAST = 400  # gradients of a chain of HMC that a limit must leave
FEWEST_TRAJECTORIES = 8  # to be drawn
UNLIMITED = 1 << 62
TIE = "Σγ(w − w*)²"  # observed where γ differs between parameters


@dataclass(frozen=True)
class WarmedUp:
    """A kernel ready to draw, and why it is this one."""

    kernel: HMC
    reasons: dict[str, str]


@dataclass(frozen=True)
class WarmUpEffort:
    """What the warm-up may take: a ``share`` of the gradients of the full one, and the
    ``longest`` trajectory.
    """

    share: float = 1.0
    longest: int = LONGEST

    @classmethod
    def within(cls, gradients: int, parameters: int) -> WarmUpEffort:
        """Half of so many gradients of a chain at most, besides the last trajectory of each of
        up to seven parts.
        """
        once = WARM_UP[-1] + 2 * RESCUE[0]
        full = 2 * once + GATE[0] if parameters <= DENSE else once
        return cls(min(1.0, gradients / (2 * full)), max(min(LONGEST, gradients // 40), FEWEST))

    def gradients(self, full: int) -> int:
        """Of a part that takes ``full`` in the full warm-up."""
        return int(self.share * full)


def tune(runner: AnyRunner, problem: Problem, kernel: HMC, effort: WarmUpEffort) -> WarmedUp:
    """Warm the runner's chains up and find step size and mass (``kernel`` gives nβ and γ).

    The chains start at w*, at a temperature where the loss hardly counts, and are cooled to the one
    asked for: so they spread along flat valleys before the walls close in. A chain that got stuck
    in a narrow place, where it rejects, is put back to w*. The step size is adapted by dual
    averaging (Hoffman and Gelman 2014) to an acceptance of 0.96. For up to 200 parameters whose
    curvatures are far apart, nβ|H| + γ at w* is tried as mass first; it is kept if (w − w*)·∇U
    averages P to 10 % after its warm-up, as it does under the posterior.
    """
    scale = _hessian_scale(problem, kernel)
    if scale is not None:
        fitted = dataclasses.replace(kernel, scale=scale)
        found = _warm_up(runner, fitted, 0.5, effort)
        if _settled(runner, problem.num_parameters, effort):
            return WarmedUp(
                found,
                _reasons("(nβ|H| + γ)⁻¹ at the centre: P = E[(w − w*)·∇U] holds with it", effort),
            )
    width = 1.0 / math.sqrt(_mean(kernel.localization) or 1e-12)
    found = _warm_up(runner, kernel, 0.1 * width, effort)
    return WarmedUp(found, _reasons("none: the mass is the identity", effort))


def _reasons(scale: str, effort: WarmUpEffort) -> dict[str, str]:
    spent = f"{effort.gradients(WARM_UP[-1])} gradients a chain"
    return {
        "kernel": (
            "HMC: the whole data is cheap, and accepting and rejecting leaves no bias of the step"
        ),
        "step_size": f"dual averaging to an acceptance of {TARGET}",
        "burn_in": (
            f"{spent}, cooled from {HEAT:g} of nβ during the first {effort.gradients(HEATED)}"
        ),
        "scale": scale,
    }


def _mean(localization: object) -> float:
    return float(localization.mean()) if isinstance(localization, Tensor) else float(localization)  # type: ignore[arg-type]


def _hessian_scale(problem: Problem, kernel: HMC) -> Tensor | None:
    """S = (nβ|H| + γ)^−½ where most directions are curved, unequally; else None."""
    count, gamma = problem.num_parameters, _mean(kernel.localization)
    if count > DENSE or kernel.nbeta == 0:
        return None
    values, vectors = torch.linalg.eigh(hessian(problem).dense().double())
    stiffness = kernel.nbeta * values.abs() + gamma
    curved = kernel.nbeta * values.abs() > gamma
    uneven = float(stiffness.max() / stiffness[curved].min()) > 100 if bool(curved.any()) else False
    if (
        not uneven
        or float(curved.double().mean()) < 0.5
        or not bool(torch.isfinite(stiffness).all())
    ):
        return None
    root: Tensor = (vectors * stiffness.rsqrt()) @ vectors.T
    return root.to(problem.dtype)


def _warm_up(runner: AnyRunner, kernel: HMC, length: float, effort: WarmUpEffort) -> HMC:
    """Adapt the step size while the chains cool, and return the kernel with it."""
    runner.retune(kernel)
    runner.restart()
    spent_before, share, end_of_all = (
        runner.gradients_spent,
        effort.share,
        effort.gradients(WARM_UP[-1]),
    )
    for stage, end in enumerate(WARM_UP):
        adapt = _DualAveraging(length * (1.0 if stage == 0 else 0.5))
        while (spent := runner.gradients_spent - spent_before) < share * end:
            report("warm-up", spent, end_of_all)
            heat = HEAT ** max(0.0, 1.0 - math.ceil(spent / share / 100) * 100 / HEATED)
            runner.retune(_with_length(kernel, adapt.length, heat * kernel.nbeta, effort.longest))
            adapt.see(float(runner.advance(1, look=False)["acceptance"].mean()))
        length = adapt.settled
    report("warm-up", end_of_all, end_of_all)
    found = _with_length(kernel, length, kernel.nbeta, effort.longest)
    runner.retune(found)
    _rescue(runner, effort)
    return found


def _rescue(runner: AnyRunner, effort: WarmUpEffort) -> None:
    """Put chains that hardly move back to the centre, and let them warm up again."""
    gradients, least = effort.gradients(RESCUE[0]), RESCUE[1]
    parts = [part["acceptance"] for part in _draw_for_gradients(runner, gradients)]
    stuck = (torch.cat(parts, dim=1).mean(dim=1) < least).tolist()
    if any(stuck):
        runner.restart([chain for chain, still in zip(runner.chains, stuck, strict=True) if still])
        for _ in _draw_for_gradients(runner, gradients):
            pass


def _draw_for_gradients(runner: AnyRunner, gradients: int) -> Iterator[Record]:
    """Draws, one at a time, until so many gradients are spent."""
    end = runner.gradients_spent + gradients
    while runner.gradients_spent < end:
        yield runner.advance(1, look=False)


def _with_length(kernel: HMC, length: float, nbeta: float, most: int) -> HMC:
    """The kernel with steps of another length, and trajectories as long as the localization is
    wide, or ``most``.
    """
    width = (
        1.0 if kernel.scale is not None else 1.0 / math.sqrt(_mean(kernel.localization) or 1e-12)
    )
    longest = int(min(max(TURN * width / length, FEWEST), most))
    return dataclasses.replace(kernel, step_size=length**2, nbeta=nbeta, leapfrog=longest)


class _DualAveraging:
    """The length of a step whose acceptance averages ``TARGET`` (Hoffman and Gelman 2014,
    §3.2.1, their constants).
    """

    def __init__(self, length: float) -> None:
        self._goal, self._count, self._miss, self._settled = (
            math.log(5 * length),
            0,
            0.0,
            math.log(length),
        )
        self.length = length

    def see(self, acceptance: float) -> None:
        """Adapt to one trajectory's acceptance."""
        self._count += 1
        self._miss += (TARGET - acceptance - self._miss) / (self._count + 10)
        now = self._goal - math.sqrt(self._count) / 0.05 * self._miss
        self._settled += self._count**-0.75 * (now - self._settled)
        self.length = math.exp(min(now, 60.0))

    @property
    def settled(self) -> float:
        """The average over the steps so far, later ones counting more."""
        return math.exp(min(self._settled, 60.0))


def _settled(runner: AnyRunner, count: int, effort: WarmUpEffort) -> bool:
    """Whether (w − w*)·∇U averages the number of parameters, as it must under the posterior."""
    gradients, share = effort.gradients(GATE[0]), GATE[1]
    virials = [float(part["virial"].mean()) for part in _draw_for_gradients(runner, gradients)]
    return abs(sum(virials) / len(virials) / count - 1) < share


def require_warm_up(limit: int | None, wanted: SamplingRequest, cure: str = "") -> None:
    """Raise where the gradients of a chain do not hold the warm-up of HMC."""
    enough = limit is None or limit >= LEAST
    require(
        enough,
        "max_gradients",
        f"be at least {LEAST * wanted.chains} for {wanted.chains} chains of HMC",
        wanted.max_gradients,
        f"its warm-up counts{cure}",
    )


def draw_by_trajectories(
    problem: Problem, kernel: HMC, wanted: SamplingRequest, plan: ChainPlan
) -> Drawn:
    """Draw chains of HMC or MALA on the whole data."""
    limit = None if wanted.max_gradients is None else wanted.max_gradients // wanted.chains
    require_warm_up(limit, wanted)
    gamma = kernel.localization
    if isinstance(gamma, Tensor):
        plan = _with_ties(problem, gamma, plan)
    runner, mode = make_runner(problem, kernel, wanted.chains, plan, wanted.mode)
    try:
        found = _without_ties(_trajectories(runner, mode, problem, kernel, wanted, plan, limit))
    finally:
        runner.close()
    return dataclasses.replace(found, full=found.reading if wanted.baseline == "both" else None)


def _with_ties(problem: Problem, gamma: Tensor, plan: ChainPlan) -> ChainPlan:
    """Add Σγ_i(w_i − w*_i)² to the observables of the plan."""
    centre = problem.vector

    def tie(theta: Tensor) -> Tensor:
        return (gamma * (theta - centre).square()).sum()

    return dataclasses.replace(plan, observables={**plan.observables, TIE: tie})


def _without_ties(found: Drawn) -> Drawn:
    """Move the localization energies from the observables of the chains to ``ties``."""
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
    wanted: SamplingRequest,
    plan: ChainPlan,
    limit: int | None,
) -> Drawn:
    """Tune, then draw until the error is small enough or the gradients are spent, ``limit`` of a
    chain if given.
    """
    kernel, reasons = _tune_and_burn_in(runner, problem, kernel, wanted, limit)
    before = runner.gradients_spent
    collector = Collector(runner, problem, kernel, plan, mode, wanted.watch)
    if wanted.draws is not None:
        short = _draw_trajectories(collector, wanted.draws, limit)
        chains = collector.chains(reasons)
        return Drawn(chains, read(chains, problem.num_parameters), spent=short)
    if limit is None:
        most = max(min(CHECKS[-1], CHECKS[-1] + WARM_UP[-1] - before), 200)
    else:
        most = min(CHECKS[-1], limit - before)
    # gradients of a trajectory, about
    pace = max(kernel.leapfrog / max(math.log(kernel.leapfrog / 3), 1.0), 1.0)
    going = True
    for check in CHECKS:
        goal = min(check, most)
        while going and (left := goal - (runner.gradients_spent - before)) > 0:
            count = min(
                max(int(left / pace), FEWEST_TRAJECTORIES),
                _trajectories_left(runner, kernel, limit),
            )
            going = count > 0 and collector.draw(count)
        chains = collector.chains(reasons)
        reading = read(chains, problem.num_parameters)
        apart = chains.diagnostics.rhat > RHAT
        if (wanted.reached(reading) and not apart) or goal < check or not going:
            break
    reasons["draws"] = f"{wanted.goal}, up to {most} gradients a chain"
    chains = dataclasses.replace(chains, reasons=reasons)
    return Drawn(chains, reading, spent=apart or wanted.missed(reading))


def _tune_and_burn_in(
    runner: AnyRunner, problem: Problem, kernel: HMC, wanted: SamplingRequest, limit: int | None
) -> tuple[HMC, dict[str, str]]:
    """Tune the settings that were not given, burn in, and return the kernel with the reasons."""
    reasons: dict[str, str] = {}
    given = wanted.burn_in or 0
    if wanted.step_size is None and not isinstance(wanted.kernel, Kernel):
        effort = (
            WarmUpEffort() if limit is None else WarmUpEffort.within(limit, problem.num_parameters)
        )
        found = tune(runner, problem, kernel, effort)
        kernel, reasons = found.kernel, dict(found.reasons)
    elif wanted.burn_in is None:
        given = (
            TRAJECTORIES
            if limit is None
            else min(TRAJECTORIES, _trajectories_left(runner, kernel, limit) // 2)
        )
    fits = max(_trajectories_left(runner, kernel, limit) - FEWEST_TRAJECTORIES, 0)
    require(
        given <= fits,
        "burn_in",
        f"be {fits} trajectories at most with these max_gradients",
        given,
        "raise them",
    )
    burn(runner, given)
    return kernel, reasons


def _trajectories_left(runner: AnyRunner, kernel: HMC, limit: int | None) -> int:
    """The number of trajectories that the gradients left to a chain allow for certain."""
    return UNLIMITED if limit is None else (limit - runner.gradients_spent) // (kernel.leapfrog + 1)


def _draw_trajectories(collector: Collector, draws: int, limit: int | None) -> bool:
    """Draw this many trajectories; return True if the gradients did not suffice."""
    assert isinstance(collector.kernel, HMC)
    left, going = draws, True
    while (
        left
        and going
        and (count := min(left, _trajectories_left(collector.runner, collector.kernel, limit)))
    ):
        going = collector.draw(count)
        left -= count
    return going and left > 0
