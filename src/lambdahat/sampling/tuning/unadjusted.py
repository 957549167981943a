"""Tune and run the kernels that never reject: time step, batch size, burn-in, bias of the steps.

Every such kernel is tuned by one number, the time step h, in which a direction of curvature a
oscillates or relaxes and which must stay below 2/√(largest curvature of U). The curvature is
measured where the chains go, not only at w*. The bias that is left is measured by two time steps, h
and 2h: the burn-in ends with draws at 2h, the rest are at h.

``draw_by_steps`` goes from start to end: a pilot (``StepPilot.tune``) or, where the step size is
given, trials of it (``reduce_step_size``); the burn-in; and rounds of draws, each followed by a
reading of λ̂ less the bias of the steps (``bias_of_steps``).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lambdahat._core.check import require
from lambdahat._core.progress import report
from lambdahat._core.rng import generator
from lambdahat.operators.curvature import hessian
from lambdahat.problem import Problem
from lambdahat.results import Array, Chains, Estimate
from lambdahat.sampling._sample import (
    LEAST_EFFORT,
    SMALL,
    AnyRunner,
    Collector,
    SamplingRequest,
    SamplingRun,
    in_pieces,
    make_runner,
)
from lambdahat.sampling.backends.chain_runner import ChainPlan, Readings
from lambdahat.sampling.backends.minibatches import DEFAULT_BATCH, LARGE, default_batch
from lambdahat.sampling.diagnostics import (
    ChainReading,
    blocked_error,
    loss_degree,
    read,
    step_shares,
)
from lambdahat.sampling.kernels import Kernel, Kinetic, KroneckerScale

LARGEST_SIDE = 1024  # of a tensor seen as a matrix: longer ones are not rotated
STEPS = 12000  # default maximum number of steps per chain
FEWEST_STEPS = 100  # steps per chain that a limit must leave
# shares of the steps; what is left is drawn in rounds
PILOT, BURN, COARSE, ROUND = 0.12, 0.2, 0.1, 0.1
LONGEST_PILOT = 600
FEWEST_DRAWS = 8
# h·√(largest curvature) of the draws; twice that in the burn-in, where 2 is the limit of stability
STABLE = 0.6
NOISE_BIAS = 0.06  # of λ̂: what the noise of batches may add before it is taken off
ABSORBED = 0.05  # friction per step that a thermostat may take on for the noise of batches
COOLINGS = 3  # times at most that chains cool and the noise of batches is measured again
# ratios of the bias from noise to the allowed bias between which the step size has settled
SETTLED_RATIO = 0.7, 1.3
NOISE_GRADIENTS = 4  # gradients at one position, once per round, that measure the noise of batches
# maximum number of gradients besides the steps: measurements of the noise, and timed steps
EXTRA = (4 + COOLINGS) * NOISE_GRADIENTS + 6
POWERS, POWER_SAMPLES, POWER_CHAINS = 8, 1024, 2
MOST_HALVINGS = 12  # of the step
STEP_PRICE = 1024  # samples that a step of a small problem counts as, besides its own
BATCH_FACTORS = (1, 4, 16, 64)  # of the batch size, among which the cheapest is chosen
# parameters × samples up to which a step sees the whole data
FULL = {"cpu": 30_000_000, "cuda": 300_000_000}
# of the burn-in, the coarse draws and a round each, and steps that are no fewer
RELAXATIONS, SHORTEST = 12, 100
FORCE_MEASUREMENTS = 8  # times that the forces on the chains are measured
# parameters of the largest tensor and relaxation time in steps above which a mass is tried
MASS_SIZE, SLOW_RELAXATION = 200, 15
MASS_GAIN = 1.25  # least speed-up for which it is kept
# prior standard deviation of the bias as a part of λ̂: left after a bias formula, and without one
BIAS_PRIOR, BIAS_PRIOR_WITHOUT_FORMULA = 0.01, 0.15
FEWEST_ROUNDS = 4  # before which no standard error is trusted


def draw_by_steps(
    problem: Problem, kernel: Kernel, request: SamplingRequest, plan: ChainPlan, whole: bool
) -> SamplingRun:
    """Draw chains of a kernel that never rejects, tuned, burnt in, to the tolerance asked for."""
    if request.limit is not None:
        require_enough(request)
    lengths, parameters, coarse = Lengths.of(request), problem.num_parameters, None
    runner, mode = make_runner(problem, kernel, request.chains, plan, request.mode)
    try:
        if request.tuned:
            pilot = StepPilot(runner, problem, kernel, lengths, request)
            kernel, reasons, coarse = pilot.tune(plan.batch_size is not None and not whole)
            lengths = pilot.lengths
        else:
            reasons = {}
            if kernel.step_size > 0:
                trials = lengths.most - lengths.burn_in - lengths.round - NOISE_GRADIENTS
                trials = min(trials, lengths.most // 2)
                kernel, note = reduce_step_size(runner, trials)
                reasons = {"step_size": note} if note else {}
            runner.retune(kernel)
            for piece in in_pieces("burn-in", lengths.burn_in):
                runner.skip(piece)
        # Draw in rounds until the tolerance is met or the steps are taken; at least one round.
        collector = Collector(runner, mode, request.watch)
        noise: list[Readings] = []
        least = -math.inf
        while (left := lengths.most - runner.gradients_spent - NOISE_GRADIENTS) >= least:
            least = max(lengths.round // 2, FEWEST_DRAWS)
            going = collector.draw(max(min(lengths.round, left), FEWEST_DRAWS))
            if kernel.step_size > 0:
                noise.append(runner.noise(NOISE_GRADIENTS))
            chains = collector.chains(reasons)
            if noise:
                means = _mean_noise(*noise)
                means["dof"] = len(noise) * request.chains * (NOISE_GRADIENTS - 1.0)
                if isinstance(kernel, Kinetic):
                    means["heat"] = kernel.step_size / (2 * kernel.damping) * means["trace"]
                chains = dataclasses.replace(chains, noise=means)
            fine, bias = ~chains.diagnostics.diverged, chains.step_bias
            if noise and fine.any():
                seen = {"work": chains.work, "heat": chains.heat, "virial": chains.virials}
                readings = {
                    name: values[fine] for name, values in seen.items() if values is not None
                }
                draws = Draws(kernel, chains.energies[fine], readings, chains.noise)
                if request.tuned:
                    bias = bias_of_steps(draws, coarse, parameters)
                elif kernel.bias_formula != "steps":  # chains of SGLD show theirs, see step_bias
                    bias = bias_of_given_steps(draws, parameters)
                chains = dataclasses.replace(chains, step_bias=bias)
            reading = read(chains, parameters, request.baseline == "full")
            if request.draws is not None or not going or chains.diagnostics.diverged.any():
                break
            if reading.drifting and runner.gradients_spent < lengths.most // 2:
                collector, noise = dataclasses.replace(collector), []  # what was drawn is burn-in
            elif _is_enough(chains, reading, request, lengths):
                break
    finally:
        runner.close()
    spent = False
    if request.draws is None:
        reasons["draws"] = f"{request.goal}, up to {lengths.most} steps a chain"
        spent = not _is_enough(chains, reading, request, lengths)
    chains = dataclasses.replace(chains, reasons={**chains.reasons, **reasons})
    full = read(chains, parameters, True) if request.baseline == "both" else None
    return SamplingRun(chains, reading, spent, full)


def _is_enough(
    chains: Chains, reading: ChainReading, request: SamplingRequest, lengths: Lengths
) -> bool:
    """Whether the error is within the tolerance, by draws enough to trust it."""
    rounds = chains.energies.shape[1] >= FEWEST_ROUNDS * lengths.round
    enough = rounds or np.ptp(chains.energies) == 0  # a constant loss needs no more
    return enough and request.share(chains) == 1 and request.is_met(reading)


@dataclass(frozen=True)
class Lengths:
    """Steps of a chain: ``most`` in all, of pilot, burn-in, coarse draws and a round of draws."""

    most: int
    pilot: int
    burn_in: int
    coarse: int
    round: int

    @classmethod
    def of(cls, request: SamplingRequest) -> Lengths:
        """Divide the steps of a chain; a burn-in and draws that are given come on top."""
        burn_in, draws, tuned = request.burn_in, request.draws, request.tuned
        free = STEPS + (draws or 0) if request.limit is None else request.limit - (burn_in or 0)
        pilot = min(int(PILOT * free), LONGEST_PILOT) if tuned else 0
        coarse = int(COARSE * free) if tuned else 0
        discarded = int(BURN * free) if burn_in is None else burn_in
        draws_per_round = max(int(ROUND * free), FEWEST_DRAWS) if draws is None else draws
        return cls(free + (burn_in or 0), pilot, discarded, coarse, draws_per_round)

    def shorten(self, request: SamplingRequest, relaxation: float, effort: float) -> Lengths:
        """Cut each part that was not given to a dozen relaxation times of the chains.

        Draws are cut to a share ``effort`` of that, which is less than 1 for a loose tolerance.
        """
        enough = max(RELAXATIONS * relaxation, SHORTEST)
        few = max(int(effort * enough), FEWEST_DRAWS)
        return dataclasses.replace(
            self,
            burn_in=min(self.burn_in, int(enough)) if request.burn_in is None else self.burn_in,
            coarse=min(self.coarse, few),
            round=min(self.round, few) if request.draws is None else self.round,
        )


def require_enough(request: SamplingRequest) -> None:
    """Raise where a limit on the gradients does not hold pilot, burn-in and draws."""
    assert request.limit is not None
    burn_in, draws, chains = request.burn_in, request.draws or 0, request.chains
    share = (PILOT + COARSE if request.tuned else 0.0) + (BURN if burn_in is None else 0.0)
    least = max(FEWEST_STEPS, math.ceil((draws + EXTRA) / (1 - share))) + (burn_in or 0)
    expected, cure = f"be at least {least * chains} for {chains} chains", "pilot, burn-in and draws"
    got = request.limit * chains
    require(request.limit >= least, "max_gradients", expected, got, f"{cure} all count")


def step_gradients(request: SamplingRequest) -> tuple[int, int]:
    """The fewest and the most gradients of a chain that never rejects: a pilot or trials of the
    step that is given, the burn-in and the draws.
    """
    least = lengths = Lengths.of(request)
    if request.tuned:
        least = lengths.shorten(request, 0.0, 1.0 if request.tol is None else LEAST_EFFORT)
    fewest = least.pilot + least.burn_in + least.coarse + least.round
    return fewest, lengths.most + EXTRA if request.limit is None else request.limit


@dataclass
class StepPilot:
    """Finds the time step and the batch size of a run, and burns the chains in.

    ``lengths`` are those of what follows the pilot, once it is done.
    """

    runner: AnyRunner
    problem: Problem
    kernel: Kernel
    lengths: Lengths
    request: SamplingRequest
    _measured: int = 0  # curvatures so far
    _largest: float = 0.0  # of these curvatures
    _halvings: int = 0  # of the step, after chains that diverged
    _friction: float = 1.0
    _trace: float = 0.0  # total variance of ∇U over batches
    _moments: CurvatureMoments | None = None

    @cached_property
    def _subsample(self) -> Problem:
        """The problem on the samples on which curvatures along the way are measured."""
        problem = self.runner.setup.problem  # each rank looks at its own chains
        few = at_once = POWER_SAMPLES
        if problem.num_parameters > LARGE:
            # A product of all 1,024 samples would cost more than the steps between two of them.
            few, at_once = min(few, 2 * self.runner.batch_size), default_batch(problem)
        if problem.norm == "train" or not problem.has_data or few >= problem.num_samples:
            return problem
        return problem.subsample(few, self.runner.setup.plan.seed, min(few, at_once))

    def tune(self, batch_given: bool) -> tuple[Kernel, dict[str, str], Draws | None]:
        """Find time step and batch size, burn in, and draw at twice the step.

        Returns the kernel ready to draw, its reasons, and the draws at twice its step, if any.
        """
        runner, problem, request = self.runner, self.problem, self.request
        step, why = self._measure_curvature(problem.vector.unsqueeze(0))
        tie = self._mean_localization
        self._friction = 2 * (tie * self._largest) ** 0.25 if tie else math.sqrt(self._largest) / 4
        # The pilot runs in windows that double. After each, the largest curvature of U is measured
        # where chains are, and the step follows it. A window in which a chain leaves all bounds is
        # repeated from w* with half the step.
        steps, done, last = self.lengths.pilot, 0, None
        window = max(steps // 16, 4)
        while done < steps:
            report("pilot", done, steps)
            runner.retune(self._kernel_at(step))
            window = min(window, steps - done)
            seen = self._advance(window, forces=2 * (done + window) >= steps)
            done += window
            if _has_escaped(seen, problem.num_parameters, self.kernel):
                step, self._moments = self._halve_step(step), None
                continue
            last = seen
            step, why = self._measure_curvature(runner.positions[:POWER_CHAINS])
            window *= 2
        report("pilot", steps, steps)
        energy = math.nan if last is None else self._settle(last)
        # Smaller steps or larger batches where the noise of batches heats the chains; then a mass.
        name = type(self.kernel).__name__
        reasons = {"kernel": f"{name}: one gradient per step", "step_size": why}
        if runner.batch_size < problem.num_samples and math.isfinite(energy):
            step, reasons["step_size"] = self._against_noise(step, why, energy, batch_given)
        relaxation = self._relaxation(step)
        if self._moments is not None:
            step = self._with_mass(step, reasons)
        own = "that of the problem's own batches"
        source = runner.setup.source
        if source is not None and source.by_sample:
            own = "an effective draw is cheapest"
        whole = runner.batch_size == problem.num_samples
        why = "all of the data" if whole else "given" if batch_given else own
        reasons["batch_size"] = f"{runner.batch_size}: {why}"
        # A mass shortens the relaxation in a quadratic valley, but not that along a curved one: no
        # shorter runs with it.
        relaxation = max(relaxation, self._relaxation(step))
        self.lengths = self.lengths.shorten(request, relaxation, request.effort)
        kernel, coarse = self._burn_in(step)
        return kernel, reasons, coarse

    def _burn_in(self, step: float) -> tuple[Kernel, Draws | None]:
        """Burn in and draw at twice the step; again from w* with half the step if a chain diverges.

        Returns the kernel ready to draw, and the draws at twice its step, if any.
        """
        runner, problem = self.runner, self.problem
        burn_in = max(self.lengths.burn_in, 1)
        while True:
            rough = self._kernel_at(2 * step)
            runner.retune(rough)
            for piece in in_pieces("burn-in", burn_in):
                runner.skip(piece)
            runner.retune(dataclasses.replace(rough, **rough.frozen))
            count, coarse = min(self.lengths.coarse, self._steps_left), None
            if count >= FEWEST_DRAWS:
                seen = runner.advance(count, observe=False)
                if _has_escaped(seen, problem.num_parameters, rough):
                    step = self._halve_step(step)
                    burn_in = max(min(burn_in, self._steps_left // 2), 1)
                    continue
                readings: dict[str, Array] = {name: part.numpy() for name, part in seen.items()}
                energies = rough.nbeta * (readings["loss"] - readings["centre"])
                noise = _mean_noise(runner.noise(NOISE_GRADIENTS))
                coarse = Draws(rough, energies, readings, noise)
            kernel = self._kernel_at(step)
            kernel = dataclasses.replace(kernel, **kernel.frozen)
            runner.retune(kernel)
            return kernel, coarse

    @property
    def _steps_left(self) -> int:
        """The steps that are left to a chain besides a round of draws."""
        used = self.lengths.round + self.runner.gradients_spent + 2 * NOISE_GRADIENTS
        return self.lengths.most - used

    @property
    def _spare_steps(self) -> int:
        """The steps that cooling may take: half of what is not needed later."""
        needed = self.lengths.burn_in + self.lengths.coarse + COOLINGS * NOISE_GRADIENTS
        return (self._steps_left - needed) // 2

    def _relaxation(self, step: float) -> float:
        """Steps in which a direction of the mean curvature relaxes."""
        rate = self._friction / 2
        return 1 / (step * rate) if self.kernel.inertial else 2 / (step * rate) ** 2

    def _kernel_at(self, step: float) -> Kernel:
        """The kernel with this time step, and the friction and the noise measured so far."""
        noise = self._trace, self.problem.num_parameters
        return self.kernel.with_time_step(step, self._friction, *noise)

    @property
    def _mean_localization(self) -> float:
        """The mean localization in the coordinates in which the chain moves."""
        mean, scale = self.kernel.gamma(), self.kernel.scale
        if isinstance(scale, KroneckerScale):
            return mean * float(scale.values.square().mean())
        return mean if scale is None else min(mean, 1.0)

    def _halve_step(self, step: float) -> float:
        """Return half the step and start again from w*."""
        self._halvings += 1
        got = f"chains that diverge even at a time step of {step:.2g}"
        cure = "the loss may not be bounded below around this point: raise localization, or train"
        fine = self._halvings <= MOST_HALVINGS
        require(fine, "step_size", "be found by the pilot", got, f"{cure} further")
        self.runner.restart()
        return step / 2

    def _measure_curvature(self, positions: Tensor) -> tuple[float, str]:
        """Measure the largest curvature of U at these positions, by power iteration.

        Returns the time step that is stable at the largest curvature so far, and the reason.
        """
        kernel, part, scaled = self.kernel, self._subsample, self.kernel.scale is not None
        gamma = kernel.gamma(torch.max)
        for theta in positions:
            self._measured += 1
            size = 0.0
            # a few iterations, in absolute value and in the coordinates S⁻¹w
            try:
                operator = hessian(part.at(theta.to(part.vector)))
                rng = generator(self.runner.setup.plan.seed, "curvature", self._measured)
                vector = torch.randn(operator.dim, generator=rng).to(theta)
                for _ in range(POWERS):
                    norm = float(vector.norm())
                    if norm == 0 or not math.isfinite(norm):
                        break
                    unit = kernel.scaled(vector / norm)
                    vector = kernel.nbeta * (operator @ unit.to(operator.dtype)).to(unit)
                    if scaled:
                        vector = kernel.scaled_force(vector.add_(unit, alpha=gamma))
                    size = float(vector.norm())
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # a loss that can be differentiated only once
                continue
            curvature = size if scaled else size + gamma
            if math.isfinite(curvature):
                self._largest = max(self._largest, curvature)
        ranks, what = self.problem.ranks, "the curvature along the chains"
        self._largest = -ranks.least(-self._largest, what, self.problem.device)
        positive = self._largest > 0
        require(positive, "localization", "be above 0 where the loss is flat", repr(gamma))
        why = f"{STABLE:g}/√({self._largest:.3g}), the largest curvature met"
        return STABLE / math.sqrt(self._largest) / float(2**self._halvings), why

    def _against_noise(
        self, largest: float, why: str, energy: float, batch_given: bool
    ) -> tuple[float, str]:
        """The step at which the noise of batches adds 6 % of the energy, ``largest`` at most, and
        the reason; also sets the batch size.

        The pilot windows may be much hotter than the draws will be. The chains therefore run on at
        the reduced step, and energy, noise and friction are measured again until the step agrees
        with them.
        """
        runner, parameters = self.runner, self.problem.num_parameters
        order = 1 if self.kernel.inertial else 2
        source, step = runner.setup.source, largest
        choose_batch = not batch_given and source is not None and source.by_sample
        for cooled in range(COOLINGS + 1):
            # the bias from the noise of batches over the bias allowed, at this step
            self._trace = _mean_noise(runner.noise(NOISE_GRADIENTS))["trace"]
            kernel = self._kernel_at(step)
            added = kernel.noise_bias(self._trace, 1.0, 2.0, energy, parameters)
            excess = added / (NOISE_BIAS * max(abs(energy), 0.5))
            absorbed = kernel.absorbed_friction(step, self._trace, parameters)
            if absorbed:
                excess = max(excess, math.sqrt(absorbed / ABSORBED))
            at_largest = excess * (largest / step) ** order
            if choose_batch and at_largest > 1:
                size, now = self._cheapest(at_largest, order)
                excess, self._trace = excess * now / size, self._trace * now / size
                self._resize(size)
                if size == self.problem.num_samples:
                    return largest, why
            low, high = SETTLED_RATIO
            settled = excess <= high and (excess >= low or step == largest)
            step = min(step / excess ** (1 / order), largest) if excess > 0 else largest
            if (settled and cooled) or cooled == COOLINGS or step == largest:
                break
            pilot = self.lengths.pilot
            length = int(min(max(pilot / 4, 3 * self._relaxation(step)), pilot))
            energy = self._cool(step, min(length, self._spare_steps))
            if not math.isfinite(energy):
                break
        if step == largest:
            return step, why
        return step, f"the noise of batches adds about {NOISE_BIAS:.0%} of the value"

    def _cool(self, step: float, steps: int) -> float:
        """Run at this step, update the friction; the mean energy, NaN if steps are too few."""
        if steps < 2 * FEWEST_DRAWS:
            return math.nan
        report("tuning", 0, steps)
        self.runner.retune(self._kernel_at(step))
        readings = self._advance(steps, forces=True)
        report("tuning", steps, steps)
        if _has_escaped(readings, self.problem.num_parameters, self.kernel):
            self.runner.restart()
            self._moments = None
            return math.nan
        return self._settle(readings)

    def _advance(self, steps: int, forces: bool) -> Readings:
        """Advance the chains; measure the ``forces`` on them a few times on the way where a mass
        may be tried: for large tensors, tied to w*, that fit into memory.
        """
        runner, problem, kernel = self.runner, self.problem, self.kernel
        plain = isinstance(kernel, Kinetic) and kernel.scale is None and problem.memory is None
        large = max((math.prod(shape) for shape in problem.space.shapes), default=0) > MASS_SIZE
        fits = problem.num_parameters <= LARGE and steps >= 4 * FORCE_MEASUREMENTS
        if not (forces and plain and large and fits and self._mean_localization > 0):
            return runner.advance(steps, observe=False)
        vector, parts = runner.setup.centre, []  # no less than float32
        self._moments = CurvatureMoments(problem.space.shapes, vector)
        for number in range(FORCE_MEASUREMENTS):
            until = steps * (number + 1) // FORCE_MEASUREMENTS
            parts.append(
                runner.advance(until - steps * number // FORCE_MEASUREMENTS, observe=False)
            )
            seen = {name: values.to(vector) for name, values in runner.forces().items()}
            self._moments.add(seen["first"], seen["second"] + seen["tie"])
        return {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}

    def _settle(self, readings: Readings) -> float:
        """The mean energy of the later half of the draws; the distance there sets the friction.

        The mean square distance r² that chains reach is P over the harmonic mean a of the
        curvatures: the friction 2√a damps such a direction critically. It is 2√γ where most
        directions are flat, as in networks, and larger in regular models.
        """
        half = readings["loss"].shape[1] // 2
        late = {name: values[:, half:] for name, values in readings.items()}
        energy = self.kernel.nbeta * float((late["loss"] - late["centre"]).mean())
        # no posterior around a minimum has so much energy
        heat = max(energy / (self.problem.num_parameters / 2), 1.0)
        squares, scale = 0.0, self.kernel.scale  # of the distance, where the chains move
        if scale is None:
            squares = float(late["distance"].square().mean()) / heat
        elif isinstance(scale, KroneckerScale):
            away = scale.solve(self.runner.positions - self.runner.setup.centre)
            rows = self.runner.gather(away.square().sum(-1, keepdim=True).double())
            squares = float(rows.mean()) / heat
        if squares > 0:
            fitting = 2 * math.sqrt(self.problem.num_parameters / squares)
            least = 2 * math.sqrt(self._mean_localization)
            self._friction = min(max(fitting, least), 2 * math.sqrt(self._largest))
        return energy / heat

    def _with_mass(self, step: float, reasons: dict[str, str]) -> float:
        """Try a Kronecker mass and keep it where chains relax in fewer steps, counting what a step
        costs more; returns the step, and adds to the reasons.
        """
        moments, runner, problem = self._moments, self.runner, self.problem
        before, steps = self._relaxation(step), min(self.lengths.pilot // 2, self._spare_steps // 2)
        enough = steps >= 2 * FEWEST_DRAWS and before >= SLOW_RELAXATION
        if moments is None or not bool(moments.totals.isfinite().all()) or not enough:
            return step
        scale = moments.scale(self.kernel.gamma())
        kept = self.kernel, self._largest, self._friction, self._halvings
        self.kernel, self._largest = dataclasses.replace(self.kernel, scale=scale), 0.0
        stable, _ = self._measure_curvature(runner.positions[:POWER_CHAINS])
        self._friction = 2 * (self._mean_localization * self._largest) ** 0.25
        energy = self._cool(stable, steps)
        if math.isfinite(energy):
            new, why = self._measure_curvature(runner.positions[:POWER_CHAINS])
            if runner.batch_size < problem.num_samples:
                new, why = self._against_noise(new, why, energy, batch_given=True)
            passes = 3 * runner.batch_size * problem.num_parameters
            cost = 1 + 2 * scale.products / passes
            gain = before / (self._relaxation(new) * cost)
            gain = problem.ranks.least(gain, "what a mass gains", problem.device)
            if gain >= MASS_GAIN:
                reasons["step_size"] = why
                text = f"Kronecker products, with which chains relax {gain:.1f} times as fast"
                reasons["mass"] = text
                return new
        self.kernel, self._largest, self._friction, self._halvings = kept
        reasons["mass"] = "none: Kronecker products do not help"
        return step

    def _cheapest(self, excess: float, order: int) -> tuple[int, int]:
        """The batch size whose steps cover a unit of time at the least cost, by two timed sizes;
        and the present one.

        Small problems are not timed, so that their numbers depend on the seed alone: a step then
        counts as its samples and 1,024 more.
        """
        runner, samples, now = self.runner, self.problem.num_samples, self.runner.batch_size
        sizes = sorted({*(min(factor * now, samples) for factor in BATCH_FACTORS), samples})
        larger = min(4 * now, samples)
        if larger == now:
            return now, now
        if self.problem.num_parameters * samples <= FULL["cpu"]:
            price, slope = float(STEP_PRICE + now), 1.0
        else:
            times = []
            for size in (now, larger):
                self._resize(size)
                runner.skip(1)
                start = time.perf_counter()
                runner.skip(2)
                times.append(time.perf_counter() - start)
            self._resize(now)
            price, slope = times[0], max(times[1] - times[0], 0.05 * times[0]) / (larger - now)

        def cost(size: int) -> float:
            slower = max(excess * now / size, 1.0) if size < samples else 1.0
            return (price + slope * (size - now)) * math.pow(slower, 1 / order)

        best, ranks = min(sizes, key=cost), self.problem.ranks
        return int(ranks.least(best, "the batch size", self.problem.device)), now

    def _resize(self, size: int) -> None:
        """Go on with batches of this size, in pieces whose passes fit into memory."""
        if size != self.runner.batch_size:
            parameters, piece = self.problem.num_parameters, 4 * DEFAULT_BATCH
            if self.problem.memory is not None or parameters > LARGE:
                piece = default_batch(self.problem)
            elif parameters * size <= SMALL:
                piece = size
            elif self.problem.device.type == "cuda":
                piece = 16 * DEFAULT_BATCH
            self.runner.resize(size, self.runner.setup.plan.accumulate * -(-size // piece))


class CurvatureMoments:
    """Row and column curvature of each tensor, averaged over places where chains have been.

    At equilibrium the mean Hessian of nβL is E[f·gᵀ] with f = nβ∇L and g = ∇U, by integration by
    parts. With f and g seen as matrices F and G, the mean of F·Gᵀ is the Hessian summed over
    columns, that of Fᵀ·G over rows. Where f and g come from independent batches, their noise
    averages out.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], like: Tensor) -> None:
        matrices = ((shape[0], math.prod(shape[1:])) if shape else (1, 1) for shape in shapes)
        self.shapes = tuple(matrices)

        def square(size: int) -> Tensor | None:
            return like.new_zeros(size, size) if 1 < size <= LARGEST_SIDE else None

        self._sides = [(square(h) if w > 1 else None, square(w)) for h, w in self.shapes]
        self.totals = torch.zeros(len(self.shapes), dtype=torch.float64)
        self._count, self._like = 0, like

    def add(self, data: Tensor, force: Tensor) -> None:
        """Count nβ∇L and ∇U, (vectors, P) each."""
        self._count += len(data)
        begin = 0
        sides = zip(self.shapes, self._sides, strict=True)
        for index, (shape, (rows, columns)) in enumerate(sides):
            part = slice(begin, begin := begin + math.prod(shape))
            first, second = (vectors[:, part].unflatten(-1, shape) for vectors in (data, force))
            self.totals[index] += float((first * second).sum())
            if rows is not None:
                rows += torch.einsum("kiw,kjw->ij", first, second)
            if columns is not None:
                columns += torch.einsum("khi,khj->ij", first, second)

    def scale(self, localization: float) -> KroneckerScale:
        """S with (S·Sᵀ)⁻¹ about nβH + γ, tensor by tensor.

        A tensor's Hessian is taken for the Kronecker product of its two sums over its trace. Their
        eigenvalues are drawn towards their mean by how few vectors there were.
        """
        rows, columns, values = [], [], []
        for (height, width), (over, along), summed in zip(
            self.shapes, self._sides, self.totals, strict=True
        ):
            trace = max(float(summed) / self._count, 0.0)
            left, ups = self._side(over, height, width, trace)
            right, downs = self._side(along, width, height, trace)
            # clamped eigenvalues may come to more than the trace
            total = max(float(ups.sum()), float(downs.sum()))
            product = torch.outer(ups, downs) / (total if total > 0 else 1.0)
            rows.append(left)
            columns.append(right)
            values.append((product + localization).rsqrt().flatten())
        return KroneckerScale(self.shapes, tuple(rows), tuple(columns), torch.cat(values))

    def _side(
        self, total: Tensor | None, size: int, others: int, trace: float
    ) -> tuple[Tensor | None, Tensor]:
        """Eigenvectors and eigenvalues of a side of a tensor; None and their mean unrotated."""
        mean = trace / max(size, 1)
        if total is None:
            return None, self._like.new_full((size,), mean)
        values, vectors = torch.linalg.eigh((total + total.T) / (2 * self._count))
        seen = self._count * others
        share = seen / (seen + size)
        return vectors, share * values.clamp_min(0) + (1 - share) * mean


def _mean_noise(*rounds: Readings) -> dict[str, float]:
    """The noise of batches (``Runner.noise``), averaged over the chains and several rounds."""
    return {
        name: float(np.mean([float(noise[name].mean()) for noise in rounds])) for name in rounds[0]
    }


def _has_escaped(readings: Readings, parameters: int, kernel: Kernel) -> bool:
    """Whether a chain is not finite, or ten times farther out than the localization allows."""
    squares = readings["distance"].square()
    room = 10 * parameters / (kernel.gamma(torch.min) or 1e-12) + 10 * squares[:, :1]
    return not bool(torch.isfinite(readings["loss"]).all()) or bool((squares > room).any())


def reduce_step_size(runner: AnyRunner, most: int) -> tuple[Kernel, str]:
    """A kernel whose step size is given, reduced until chains stay finite and, for SGLD, steps add
    no more than half of their energy, or of a regular model's.

    Also a note on what was done, empty where nothing was. The chains are left at the centre.
    Refused where so many steps, ``most``, or thirty reductions do not find one.
    """
    kernel, parameters = runner.kernel, runner.setup.problem.num_parameters
    given, note, calm, tries = kernel.step_size, "", False, 30
    window = max(min(25, most // (2 * tries)), 5)
    for _ in range(max(min(tries, most // (2 * window)), 1)):
        runner.retune(kernel)
        readings = runner.advance(2 * window, observe=False)
        runner.restart()
        calm = not _has_escaped(readings, parameters, kernel)
        if calm and kernel.bias_formula == "steps":
            loss, centre, heat = (readings[name][:, window:] for name in ("loss", "centre", "heat"))
            energy = kernel.nbeta * float((loss - centre).mean())
            allowed = 0.5 * max(abs(energy), parameters / 2)  # a regular model's λ is P/2
            calm = not kernel.step_size / 8 * float(heat.mean()) > allowed
        if calm:
            break
        kernel = dataclasses.replace(kernel, step_size=kernel.step_size / 4)
        note = f"{given:.3g} made the chains diverge, so it was reduced"
    got = f"{given:.3g}, at which they diverge, as at {4 * kernel.step_size:.2g}"
    cure = "leave it out to have it found, raise localization or max_gradients, or train further"
    require(calm, "step_size", "let the chains stay around the centre", got, cure)
    return kernel, note


@dataclass(frozen=True)
class Draws:
    """What shows the bias of a kernel's steps: energies, work, heat and virial of its draws, and
    the noise of batches there.
    """

    kernel: Kernel
    energies: Array
    readings: Mapping[str, Array]
    noise: Mapping[str, float]

    @property
    def raw(self) -> float:
        """The mean energy."""
        return float(self.energies.mean())

    @property
    def share(self) -> float:
        """The share of the noise that heats the loss; the rest heats the localization."""
        trace = self.noise["trace"]
        return min(max(1 - self.noise["tied"] / trace, 0.0), 1.0) if trace > 0 else 1.0


def bias_of_given_steps(draws: Draws, parameters: int) -> Estimate:
    """What steps of a given size add to the mean energy, as far as it is known: nothing is
    subtracted, so that the value is 0 and all of it is in the error.

    Where no formula explains it, it is the excess of the virial over its mean P under the
    posterior, if that is clear of noise: a loss of degree q has 1/q of it.
    """
    if draws.kernel.bias_formula == "none":
        virial, degree = draws.readings["virial"], loss_degree(draws.readings["work"], draws.raw)
        excess = float(virial.mean()) - parameters
        return Estimate(0.0, excess / degree if excess > 2 * blocked_error(virial) else 0.0)
    added, doubt = explained_bias(draws, draws.share, parameters)
    return Estimate(0.0, math.hypot(added, doubt))


def bias_of_steps(draws: Draws, coarse: Draws | None, parameters: int) -> Estimate:
    """What finite, noisy steps add to the mean energy of ``draws``, with its standard error.

    A formula explains part of it (``explained_bias``). What it leaves, b at h and (1 + f)·b at 2h,
    has mean 0 and the formula's doubt as standard deviation a priori. The draws at 2h measure it:
    with D the difference of the two means, each less what the formula explains, u·D is taken off, f
    = 1 where noise is most of the bias, else 3. The value's error is then (1 + u)·ε₁ − u·ε₂ + (1 −
    f·u)·b, with ε₁ and ε₂ the errors of the means at h and 2h, and u is chosen so that its variance
    is least. Where D contradicts the prior by more than two standard deviations, half of the
    contradiction goes into the error.
    """
    raw = draws.raw
    explained, prior = explained_bias(draws, draws.share, parameters)
    known = math.isfinite(explained)
    formula = explained if known else 0.0
    if coarse is None:
        return Estimate(formula, prior)
    linear = draws.kernel.inertial and abs(formula) > 0.005 * abs(raw)
    factor = 1.0 if linear else 3.0
    # the share is taken from all draws at h: the few measurements at 2h would make it noisier, and
    # it is the same there
    there, _ = explained_bias(coarse, draws.share, parameters)
    difference = coarse.raw - (there if known else 0.0) - (raw - formula)
    fine, rough = (blocked_error(part.energies) ** 2 for part in (draws, coarse))
    total = fine + rough + (factor * prior) ** 2
    weight = max((factor * prior**2 - fine) / total, 0.0) if total > 0 else 0.0
    squares = (2 * weight + weight**2) * fine + weight**2 * rough
    squares += ((1 - factor * weight) * prior) ** 2
    if difference**2 > 4 * total:
        squares += (difference / (2 * factor)) ** 2
    return Estimate(formula + weight * difference, math.sqrt(squares))


def explained_bias(draws: Draws, share: float, parameters: int) -> tuple[float, float]:
    """What first-order theory says that finite, noisy steps add to the mean energy, NaN if there is
    no formula; and the standard deviation of what it leaves out.

    It is trusted to a quarter of itself. How much of the noise heats the loss and not the
    localization is known between two bounds only: ``share``, which is right if V does not depend on
    w, and 1.
    """
    kernel, raw = draws.kernel, draws.raw
    if kernel.bias_formula == "none":
        return math.nan, BIAS_PRIOR_WITHOUT_FORMULA * abs(raw)
    if kernel.bias_formula == "steps":
        gamma: Any = kernel.localization
        work, heat = draws.readings["work"], draws.readings["heat"]
        _, value = step_shares(kernel.step_size, gamma, work, heat, raw)
        return value, 0.25 * abs(value) + BIAS_PRIOR * abs(raw)
    trace, degree = draws.noise["trace"], loss_degree(draws.readings["work"], raw)
    least, most = (kernel.noise_bias(trace, part, degree, raw, parameters) for part in (share, 1.0))
    value = (least + most) / 2
    if kernel.virial_excess:
        value += kernel.virial_excess * (float(draws.readings["heat"].mean()) - trace) / degree
    return value, 0.25 * abs(value) + (most - least) / 2 + BIAS_PRIOR * abs(raw)
