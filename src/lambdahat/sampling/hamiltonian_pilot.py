"""Full-data sampling with no settings to give: HMC that finds its own step, mass, burn-in and
length.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lambdahat._core.progress import report
from lambdahat.operators.curvature import hessian
from lambdahat.problem import Problem
from lambdahat.sampling.hamiltonian import FEWEST, HMC
from lambdahat.sampling.modes import AnyRunner
from lambdahat.sampling.runners import Record

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


@dataclass(frozen=True)
class WarmedUp:
    """A kernel ready to draw, and why it is this one."""

    kernel: HMC
    reasons: dict[str, str]


@dataclass(frozen=True)
class Effort:
    """What the warm-up may take: a ``share`` of the gradients of the full one, and the
    ``longest`` trajectory.
    """

    share: float = 1.0
    longest: int = LONGEST

    @classmethod
    def within(cls, gradients: int, parameters: int) -> Effort:
        """Half of so many gradients of a chain at most, besides the last trajectory of each of
        up to seven parts.
        """
        once = WARM_UP[-1] + 2 * RESCUE[0]
        full = 2 * once + GATE[0] if parameters <= DENSE else once
        return cls(min(1.0, gradients / (2 * full)), max(min(LONGEST, gradients // 40), FEWEST))

    def gradients(self, full: int) -> int:
        """Of a part that takes ``full`` in the full warm-up."""
        return int(self.share * full)


def tune(runner: AnyRunner, problem: Problem, kernel: HMC, effort: Effort) -> WarmedUp:
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
        found = _warmed_up(runner, fitted, 0.5, effort)
        if _settled(runner, problem.num_parameters, effort):
            return WarmedUp(
                found,
                _reasons("(nβ|H| + γ)⁻¹ at the centre: P = E[(w − w*)·∇U] holds with it", effort),
            )
    width = 1.0 / math.sqrt(_mean(kernel.localization) or 1e-12)
    found = _warmed_up(runner, kernel, 0.1 * width, effort)
    return WarmedUp(found, _reasons("none: the mass is the identity", effort))


def _reasons(scale: str, effort: Effort) -> dict[str, str]:
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


def _warmed_up(runner: AnyRunner, kernel: HMC, length: float, effort: Effort) -> HMC:
    """The kernel with the step size it needs, the chains left where they are at its end."""
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


def _rescue(runner: AnyRunner, effort: Effort) -> None:
    """Put chains that hardly move back to the centre, and give them time there."""
    gradients, least = effort.gradients(RESCUE[0]), RESCUE[1]
    parts = [part["acceptance"] for part in _for_gradients(runner, gradients)]
    stuck = (torch.cat(parts, dim=1).mean(dim=1) < least).tolist()
    if any(stuck):
        runner.restart([chain for chain, still in zip(runner.chains, stuck, strict=True) if still])
        for _ in _for_gradients(runner, gradients):
            pass


def _for_gradients(runner: AnyRunner, gradients: int) -> Iterator[Record]:
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


def _settled(runner: AnyRunner, count: int, effort: Effort) -> bool:
    """Whether (w − w*)·∇U averages the number of parameters, as it must under the posterior."""
    gradients, share = effort.gradients(GATE[0]), GATE[1]
    virials = [float(part["virial"].mean()) for part in _for_gradients(runner, gradients)]
    return abs(sum(virials) / len(virials) / count - 1) < share
