"""Mini-batch sampling with no settings to give: SGLD whose pilot finds step size, localization and burn-in."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch

from lambdahat._check import require
from lambdahat._progress import report
from lambdahat._rng import generator
from lambdahat.operators.curvature import hessian
from lambdahat.problem import Problem
from lambdahat.results import Estimate
from lambdahat.sampling.diagnostics import standard_error
from lambdahat.sampling.kernels import SGLD, Kernel
from lambdahat.sampling.modes import AnyRunner
from lambdahat.sampling.runners import Record
from lambdahat.sampling.running import burn

WINDOWS, WINDOW, MOST_WINDOWS = 12, 25, 36
STEP_BIAS = 0.10  # of λ̂, before it is taken off
RELAXATION = 4.0  # γ is this over ε·burn-in: flat directions then relax in half the burn-in
WEAKEST = 1.0
SHORTEST = 200  # steps that γ reckons with if the burn-in is shorter
STRONGER = 150, 200  # steps thrown away and recorded at 2γ
POWERS, POWER_SAMPLES = 10, 512
REDUCTIONS = 30


@dataclass(frozen=True)
class Tuned:
    """A kernel ready to draw, why it is this one, and (γ, λ̂) at a stronger localization."""

    kernel: SGLD
    reasons: dict[str, str]
    stronger: tuple[float, Estimate] | None = None


def tune(
    runner: AnyRunner,
    problem: Problem,
    kernel: SGLD,
    burn_in: int,
    fixed: tuple[bool, bool],
    seed: int,
    hint: float | None = None,
    step_bias: float = STEP_BIAS,
) -> Tuned:
    """Find ε and γ while the chains burn in (``fixed`` says which of the two the kernel brings).

    ε is the largest whose bias is 10 % of λ̂, as ``estimation`` measures it: ε = 4·0.1·E[u]/E[G], looked at after each
    of twelve windows of 25 steps. γ is as weak as lets flat directions, which relax in 2/(εγ) steps, relax in half the
    burn-in: 4/(ε·burn-in), not below 1 and rounded up to 1, 2, 5, 10, …. If even at 2γ the loss holds most directions,
    it is made 20 times weaker. ``hint`` is a step size to begin from, as of a checkpoint before: then four windows do.
    ``step_bias`` is another bias to aim at, where it is not taken off.
    """
    step_given, tie_given = fixed
    reasons = {"kernel": "SGLD: a step on a batch costs less than one on the whole data"}
    if not step_given:
        kernel = _searched(runner, problem, kernel, burn_in, tie_given, seed, hint, step_bias)
        reasons["step_size"] = (
            f"the largest whose bias, which is measured and taken off, is {step_bias:.0%} of the value"
        )
    if tie_given:
        runner.retune(kernel)
        burn(runner, max(burn_in - (0 if step_given else WINDOWS * WINDOW), burn_in // 5))
        return Tuned(kernel, reasons)
    gamma = _weakest(kernel.step_size, burn_in)
    stronger, held = _at_stronger(runner, kernel, 2 * gamma, problem.num_parameters)
    reasons["localization"] = f"as weak as lets flat directions relax in the burn-in: {RELAXATION:g}/(ε·{burn_in})"
    if held:
        gamma = max(WEAKEST, gamma / 20)
        reasons["localization"] = "weak: the loss itself holds most directions"
    kernel = dataclasses.replace(kernel, localization=gamma)
    runner.retune(kernel)
    used = (0 if step_given else WINDOWS * WINDOW) + sum(STRONGER)
    burn(runner, max(burn_in - used, burn_in // 3))
    return Tuned(kernel, reasons, (2 * _weakest(kernel.step_size, burn_in), stronger))


def stable(runner: AnyRunner, problem: Problem, kernel: Kernel) -> tuple[Kernel, str]:
    """A kernel whose step size is given, made smaller until chains stay finite and its steps do not rule them.

    Also a note on what was done, empty where nothing was. The chains are left at the centre.
    """
    given, note = kernel.step_size, ""
    for _ in range(REDUCTIONS):
        runner.retune(kernel)
        record = runner.advance(2 * WINDOW)
        runner.restart()
        if not _ran_away(record, problem.num_parameters, kernel.localization) and not _heated(
            record, problem.num_parameters, kernel
        ):
            break
        kernel = dataclasses.replace(kernel, step_size=kernel.step_size / 4)
        note = f"{given:.3g} made the chains diverge, so it was reduced"
    runner.retune(kernel)
    return kernel, note


def _heated(record: Record, parameters: int, kernel: Kernel) -> bool:
    """Whether the steps of an SGLD chain add more than half of its energy, or of what a regular model has."""
    if not isinstance(kernel, SGLD):
        return False
    late = {name: values[:, WINDOW:] for name, values in record.items()}
    energy = kernel.nbeta * float((late["loss"] - late["centre"]).mean())
    most = max(abs(energy), parameters / 2)  # a regular model's λ
    return kernel.step_size / 8 * float(late["heat"].mean()) > 0.5 * most


def _weakest(step_size: float, burn_in: int) -> float:
    """γ from the burn-in, raised to 1, 2 or 5 times a power of ten, so that runs can be compared."""
    if step_size == 0:
        return WEAKEST
    least = max(WEAKEST, RELAXATION / (step_size * max(burn_in, SHORTEST)))
    power = 10.0 ** math.floor(math.log10(least))
    return next(round_ * power for round_ in (1.0, 2.0, 5.0, 10.0) if round_ * power >= least * (1 - 1e-9))


def _searched(
    runner: AnyRunner,
    problem: Problem,
    kernel: SGLD,
    burn_in: int,
    tie_given: bool,
    seed: int,
    hint: float | None,
    step_bias: float,
) -> SGLD:
    """The kernel with the step size that the pilot finds, the chains left where it ends."""
    step = 0.1 / (kernel.nbeta * _curvature(problem, seed)) if hint is None else hint
    windows = WINDOWS if hint is None else WINDOWS // 3
    good, tried = 0, 0
    while good < windows:
        report("pilot", good, windows)
        tried += 1
        require(tried <= MOST_WINDOWS, "step_size", "be found by the pilot", f"chains that diverge even at {step:.2g}",
                "the loss may not be bounded below around this point: give localization, or train further")  # fmt: skip
        gamma = kernel.localization if tie_given else _weakest(step, burn_in)
        runner.retune(dataclasses.replace(kernel, step_size=step, localization=gamma))
        record = runner.advance(WINDOW)
        if _ran_away(record, problem.num_parameters, gamma):
            runner.restart()
            good, step = 0, step / 4
            continue
        good += 1
        work, heat = float(record["work"].mean()), float(record["heat"].mean())
        if work > 0 and heat > 0:
            step = min(max(4 * step_bias * work / heat, step / 4), 2 * step)
    report("pilot", windows, windows)
    return dataclasses.replace(kernel, step_size=step)


def _curvature(problem: Problem, seed: int) -> float:
    """About the largest eigenvalue of the Hessian, by a few power iterations on some of the data; 1 where it is 0."""
    few = min(POWER_SAMPLES, problem.num_samples)
    part = problem if problem.norm == "train" else problem.subsample(few, seed, few)
    operator = hessian(part)
    vector = torch.randn(operator.dim, generator=generator(seed, "curvature")).to(operator.device, operator.dtype)
    size = 0.0
    for _ in range(POWERS):
        norm = float(vector.norm())
        if norm == 0 or not math.isfinite(norm):
            break
        vector = operator @ (vector / norm)
        size = float(vector.norm())
    return size if size > 0 and math.isfinite(size) else 1.0


def _ran_away(record: Record, parameters: int, gamma: object) -> bool:
    """Whether a chain is not finite, or ten times as far out as the localization lets it be."""
    weakest = float(gamma.min()) if isinstance(gamma, torch.Tensor) else float(gamma)  # type: ignore[arg-type]
    squares = record["distance"].square()
    room = 10 * parameters / max(weakest, 1e-12) + 10 * squares[:, :1]
    return not bool(torch.isfinite(record["loss"]).all()) or bool((squares > room).any())


def _at_stronger(runner: AnyRunner, kernel: SGLD, gamma: float, parameters: int) -> tuple[Estimate, bool]:
    """λ̂ at a stronger localization, and whether the loss holds most directions there (γr² well below P)."""
    runner.retune(dataclasses.replace(kernel, localization=gamma))
    thrown, kept = STRONGER
    burn(runner, thrown)
    record = runner.advance(kept)
    energies = (kernel.nbeta * (record["loss"] - record["centre"])).numpy()
    held = gamma * float(record["distance"].square().mean()) <= 0.4 * parameters
    return Estimate(float(energies.mean()), standard_error(energies)), held
