"""Mini-batch sampling with no settings to give: SGLD whose pilot finds batch and step size, localization, burn-in."""

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
from lambdahat.sampling.budgets import Steps
from lambdahat.sampling.diagnostics import standard_error
from lambdahat.sampling.kernels import SGLD, Kernel
from lambdahat.sampling.minibatches import DEFAULT_BATCH
from lambdahat.sampling.modes import SMALL, AnyRunner
from lambdahat.sampling.runners import Record
from lambdahat.sampling.running import burn

WINDOWS, WINDOW, MOST_WINDOWS = 12, 25, 36
AGAIN = 4  # windows of a search that has a step size to begin from
SHORTEST_WINDOW = 5
STEP_BIAS = 0.10  # of λ̂, before it is taken off
RELAXATION = 4.0  # γ is this over ε·burn-in: flat directions then relax in half the burn-in
WEAKEST = 1.0
SHORTEST = 200  # steps that γ reckons with if the burn-in is shorter
STRONGER = 150, 200  # steps thrown away and recorded at 2γ
SETTLED = 8  # and at least the burn-in over this is thrown away
BATCHES = (128, DEFAULT_BATCH, 2048)
LOOKS = 16, 8  # gradients at rest on batches of the first two sizes
STEP_PRICE = 1024  # samples that a step counts as besides those of its batch, for steps are limited too
POWERS, POWER_SAMPLES = 10, 512
REDUCTIONS = 30


@dataclass(frozen=True)
class Search:
    """What the search for a step size begins from, None for nothing, and the ``bias`` that it aims at."""

    hint: float | None = None
    bias: float = STEP_BIAS


@dataclass(frozen=True)
class Tuned:
    """A kernel ready to draw, why it is this one, and (γ, λ̂) at a stronger localization."""

    kernel: SGLD
    reasons: dict[str, str]
    stronger: tuple[float, Estimate] | None = None


@dataclass(frozen=True)
class Lengths:
    """Steps of the pilot's parts: in full, or shorter where so many steps must do."""

    window: int = WINDOW
    most_windows: int = MOST_WINDOWS
    looks: tuple[int, int] = LOOKS
    stronger: tuple[int, int] = STRONGER

    @classmethod
    def within(cls, steps: int, burn_in: int) -> Lengths:
        """A pilot of so many steps at most.

        At 2γ, ‖w − w*‖² of flat directions relaxes within 1/(2εγ) steps, an eighth of the burn-in: no fewer are thrown
        away before it is read, or a flat loss would seem to hold the chains.
        """
        share = min(1.0, steps / _length(WINDOW, LOOKS, STRONGER))
        looks = max(int(share * LOOKS[0]), 4), max(int(share * LOOKS[1]), 4)
        stronger = max(int(share * STRONGER[0]), burn_in // SETTLED), int(share * STRONGER[1])
        left = steps - sum(looks) - sum(stronger)
        window = max(min(WINDOW, left // (WINDOWS + AGAIN)), SHORTEST_WINDOW)
        return cls(window, min(MOST_WINDOWS, left // window), looks, stronger)


def _length(window: int, looks: tuple[int, ...], stronger: tuple[int, ...]) -> int:
    return (WINDOWS + AGAIN) * window + sum(looks) + sum(stronger)


SHORTEST_PILOT = _length(SHORTEST_WINDOW, (4, 4), (30, 40))


def tune(
    runner: AnyRunner,
    problem: Problem,
    kernel: SGLD,
    steps: Steps,
    fixed: tuple[bool, bool, bool],
    seed: int,
    search: Search,
) -> Tuned:
    """Find ε, the batch size and γ while the chains burn in (``fixed`` says which of the three are given).

    ε is the largest whose bias is 10 % of λ̂, as ``estimation`` measures it: ε = 4·0.1·E[u]/E[G], looked at after each
    of twelve windows of 25 steps. Then the noise of the batches is measured and their size chosen
    (``_with_batches``). γ is as weak as lets flat directions, which relax in 2/(εγ) steps, relax in half the burn-in:
    4/(ε·burn-in), not below 1 and rounded up to 1, 2, 5, 10, …. If even at 2γ the loss holds most directions, it is
    made 20 times weaker. Where the steps are few, all parts are shorter.
    """
    step_given, tie_given, batch_given = fixed
    reasons = {"kernel": "SGLD: a step on a batch costs less than one on the whole data"}
    lengths, before = Lengths.within(steps.pilot, steps.burn_in), runner.gradients_spent
    if not step_given:
        pilot = _Pilot(runner, problem, kernel, steps.burn_in, tie_given, search.bias, lengths)
        kernel = pilot.search(_first(problem, kernel, seed) if search.hint is None else search.hint,
                              WINDOWS if search.hint is None else AGAIN)  # fmt: skip
        reasons["step_size"] = (
            f"the largest whose bias, which is measured and taken off, is {search.bias:.0%} of the value"
        )
        if not batch_given:
            kernel, reasons["batch_size"] = pilot.with_batches(kernel)
    gamma = _weakest(kernel.step_size, steps.burn_in)
    stronger = None
    if not tie_given:
        strong, held = _at_stronger(runner, kernel, 2 * gamma, problem.num_parameters, lengths)
        stronger = 2 * gamma, strong
        reasons["localization"] = (
            f"as weak as lets flat directions relax in the burn-in: {RELAXATION:g}/(ε·{steps.burn_in})"
        )
        if held:
            gamma = max(WEAKEST, gamma / 20)
            reasons["localization"] = "weak: the loss itself holds most directions"
        kernel = dataclasses.replace(kernel, localization=gamma)
    runner.retune(kernel)
    spent = runner.gradients_spent - before
    burn(runner, steps.burn_in if steps.given else max(steps.burn_in - spent, steps.after_pilot))
    return Tuned(kernel, reasons, stronger)


def stable(runner: AnyRunner, problem: Problem, kernel: Kernel, most: int) -> tuple[Kernel, str]:
    """A kernel whose step size is given, made smaller until chains stay finite and its steps do not rule them.

    Also a note on what was done, empty where nothing was. The chains are left at the centre. Refused where so many
    steps, ``most``, or thirty reductions do not find one.
    """
    given, note, calm = kernel.step_size, "", False
    window = max(min(WINDOW, most // (2 * REDUCTIONS)), SHORTEST_WINDOW)
    for _ in range(max(min(REDUCTIONS, most // (2 * window)), 1)):
        runner.retune(kernel)
        record = runner.advance(2 * window, look=False)
        runner.restart()
        away = _ran_away(record, problem.num_parameters, kernel.localization)
        calm = not away and not _heated(record, problem.num_parameters, kernel)
        if calm:
            break
        kernel = dataclasses.replace(kernel, step_size=kernel.step_size / 4)
        note = f"{given:.3g} made the chains diverge, so it was reduced"
    require(calm, "step_size", "let the chains stay around the centre",
            f"{given:.3g}, at which they diverge, as at {4 * kernel.step_size:.2g}",
            "leave it out to have it found, raise localization or max_gradients, or train further")  # fmt: skip
    return kernel, note


def _heated(record: Record, parameters: int, kernel: Kernel) -> bool:
    """Whether the steps of an SGLD chain add more than half of its energy, or of what a regular model has."""
    if not isinstance(kernel, SGLD):
        return False
    late = {name: values[:, values.shape[1] // 2 :] for name, values in record.items()}
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


class _Pilot:
    """The search for ε and the batch size, the chains left where it ends."""

    def __init__(
        self,
        runner: AnyRunner,
        problem: Problem,
        kernel: SGLD,
        burn_in: int,
        tie_given: bool,
        bias: float,
        lengths: Lengths,
    ) -> None:
        self._runner, self._problem, self._kernel = runner, problem, kernel
        self._burn_in, self._tie_given, self._bias, self._lengths = burn_in, tie_given, bias, lengths
        self._tried, self._heats = 0, [math.nan]

    def search(self, step: float, windows: int) -> SGLD:
        """The kernel with the step size after so many windows in which no chain ran away."""
        good, parameters = 0, self._problem.num_parameters
        while good < windows:
            report("pilot", good, windows)
            self._tried += 1
            require(self._tried <= self._lengths.most_windows, "step_size", "be found by the pilot",
                    f"chains that diverge even at {step:.2g}",
                    "the loss may not be bounded below around this point: give localization, or train further; "
                    "or the gradients are too few: raise max_gradients")  # fmt: skip
            kernel = self._with_step(step)
            self._runner.retune(kernel)
            record = self._runner.advance(self._lengths.window, look=False)
            if _ran_away(record, parameters, kernel.localization):
                self._runner.restart()
                good, step = 0, step / 4
                continue
            good += 1
            work, heat = float(record["work"].mean()), float(record["heat"].mean())
            self._heats.append(heat)
            if work > 0 and heat > 0:
                step = min(max(4 * self._bias * work / heat, step / 4), 2 * step)
        report("pilot", windows, windows)
        return dataclasses.replace(self._kernel, step_size=step)

    def _with_step(self, step: float) -> SGLD:
        gamma = self._kernel.localization if self._tie_given else _weakest(step, self._burn_in)
        return dataclasses.replace(self._kernel, step_size=step, localization=gamma)

    def with_batches(self, kernel: SGLD) -> tuple[SGLD, str]:
        """The kernel with a step for the batch size that is chosen, and why it is this one.

        E[G] = F + N/B: what the steps add by themselves, and by the noise of batches of B. With ε ∝ 1/E[G] an effective
        draw takes steps ∝ F + N/B, each at the price of B + 1,024 samples: of 128, 512 and 2,048 (or all data) the
        cheapest is taken, which is 128 up to N/F = 64 and 2,048 from 1,024 on. N comes from chains at rest, from E[G]
        there on batches of 128 and of 512; F + N/512 is the mean over the last windows.
        """
        runner, samples = self._runner, self._problem.num_samples
        small, middle, _ = BATCHES
        size = runner.batch_size
        if runner.ground.source is None or not runner.ground.source.by_sample or size == samples:
            why = "all of the data" if size == samples else "that of the problem's own batches"
            return kernel, f"{size}: {why}"
        runner.retune(dataclasses.replace(self._with_step(kernel.step_size), step_size=0.0))
        accumulate = runner.ground.plan.accumulate
        heats = []
        for count, batch in zip(self._lengths.looks, (small, middle), strict=True):
            runner.resize(batch, accumulate)
            heats.append(float(runner.advance(count, look=False)["heat"].mean()))
        noise = max((heats[0] - heats[1]) / (1 / small - 1 / middle), 0.0)
        moving = sum(self._heats[-AGAIN:]) / AGAIN
        force = max(moving - noise / middle, 0.0)
        sizes = sorted({min(batch, samples) for batch in BATCHES})
        chosen = min(sizes, key=lambda batch: (STEP_PRICE + batch) * (force + noise / batch))
        share = noise / chosen / (force + noise / chosen) if noise > 0 else 0.0
        if chosen != middle:
            small_enough = self._problem.num_parameters * chosen <= SMALL  # else the memory of a batch of 512 must do
            runner.resize(chosen, accumulate if small_enough else accumulate * -(-chosen // DEFAULT_BATCH))
            step = kernel.step_size * moving / (force + noise / chosen) if force + noise > 0 else kernel.step_size
            kernel = self.search(min(step, 4 * kernel.step_size), AGAIN)
        tried = ", ".join(map(str, sizes))
        return kernel, f"{chosen}, the cheapest of {tried}: its noise makes {share:.0%} of the steps' bias"


def _first(problem: Problem, kernel: SGLD, seed: int) -> float:
    """A small step size to begin from."""
    return 0.1 / (kernel.nbeta * _curvature(problem, seed))


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


def _at_stronger(
    runner: AnyRunner, kernel: SGLD, gamma: float, parameters: int, lengths: Lengths
) -> tuple[Estimate, bool]:
    """λ̂ at a stronger localization, and whether the loss holds most directions there (γr² well below P)."""
    runner.retune(dataclasses.replace(kernel, localization=gamma))
    thrown, kept = lengths.stronger
    burn(runner, thrown)
    record = runner.advance(kept, look=False)
    energies = (kernel.nbeta * (record["loss"] - record["centre"])).numpy()
    held = gamma * float(record["distance"].square().mean()) <= 0.4 * parameters
    return Estimate(float(energies.mean()), standard_error(energies)), held
