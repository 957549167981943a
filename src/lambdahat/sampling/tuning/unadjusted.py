"""Tune and run the kernels that never reject: time step, batch size, burn-in, bias of the steps.

Every such kernel is tuned by one number, the time step h, in which a direction of curvature a
oscillates or relaxes and which must stay below 2/√(largest curvature of U). The curvature is
measured where the chains go, not only at w*. The bias that is left is measured by two time steps, h
and 2h: the burn-in ends with draws at 2h, the rest are at h.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from lambdahat.sampling._sample import Collector, SamplingRequest, SamplingRun, burn
from lambdahat.sampling.backends import SMALL, AnyRunner, make_runner
from lambdahat.sampling.backends.chain_runner import ChainPlan, Record
from lambdahat.sampling.backends.minibatches import DEFAULT_BATCH
from lambdahat.sampling.diagnostics import (
    RHAT,
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
NEAR = 0.7, 1.3  # how far what the noise adds may be from what it may add, when it has settled
NOISE_LOOKS = 4  # gradients at rest by which the noise of batches is measured, once per round
# gradients at most besides the steps: looks at the noise and timed steps
EXTRA = (4 + COOLINGS) * NOISE_LOOKS + 6
POWERS, POWER_SAMPLES, POWER_CHAINS = 8, 1024, 2
REDUCTIONS = 12
# parameters beyond which batches larger than 512 go through in pieces of that size
LARGE = 1_000_000
STEP_PRICE = 1024  # samples that a step of a small problem counts as, besides its own
BATCHES = (128, DEFAULT_BATCH, 2048, 8192, 32768)
# parameters × samples up to which a step sees the whole data
FULL = {"cpu": 30_000_000, "cuda": 300_000_000}
# of the burn-in, the coarse draws and a round each, and steps that are no fewer
RELAXATIONS, SHORTEST = 12, 100
MASS_LOOKS = 8  # times that the forces on the chains are measured
# parameters of the largest tensor and relaxation time in steps above which a mass is tried
MASS_SIZE, SLOW = 200, 15
MASS_GAIN = 1.25  # least speed-up for which it is kept
# standard deviation of what a bias formula leaves out, of λ̂; and without a formula
TRUSTED, UNTRUSTED = 0.01, 0.15
# rounds, and effective draws per chain, before which no standard error is trusted
FEWEST_ROUNDS, EFFECTIVE = 4, 50


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
        self._totals = torch.zeros(len(self.shapes), dtype=torch.float64)
        self._count, self._like = 0, like

    def add(self, data: Tensor, force: Tensor) -> None:
        """Count nβ∇L and ∇U, (vectors, P) each."""
        self._count += len(data)
        begin = 0
        sides = zip(self.shapes, self._sides, strict=True)
        for index, (shape, (rows, columns)) in enumerate(sides):
            part = slice(begin, begin := begin + math.prod(shape))
            first, second = (vectors[:, part].unflatten(-1, shape) for vectors in (data, force))
            self._totals[index] += float((first * second).sum())
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
            self.shapes, self._sides, self._totals, strict=True
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

    @property
    def finite(self) -> bool:
        """Whether all forces were finite."""
        return bool(self._totals.isfinite().all())

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


@dataclass(frozen=True)
class Lengths:
    """Steps of a chain: ``most`` in all, of pilot, burn-in, coarse draws and a round of draws."""

    most: int
    pilot: int
    burn_in: int
    coarse: int
    round: int

    @classmethod
    def of(cls, limit: int | None, burn_in: int | None, draws: int | None, tuned: bool) -> Lengths:
        """Split the steps of a chain; a burn-in and draws that were given come on top."""
        free = STEPS + (draws or 0) if limit is None else limit - (burn_in or 0)
        pilot = min(int(PILOT * free), LONGEST_PILOT) if tuned else 0
        coarse = int(COARSE * free) if tuned else 0
        thrown = int(BURN * free) if burn_in is None else burn_in
        turn = max(int(ROUND * free), FEWEST_DRAWS) if draws is None else draws
        return cls(free + (burn_in or 0), pilot, thrown, coarse, turn)

    def shorten(
        self, relaxation: float, burn_in: int | None, draws: int | None, effort: float = 1.0
    ) -> Lengths:
        """No longer than a dozen times the steps in which the chains relax, except for what was
        given.

        Of the draws, only a share of ``effort``, which is less than 1 for a tolerance that few
        draws meet.
        """
        enough = max(RELAXATIONS * relaxation, SHORTEST)
        few = max(int(effort * enough), FEWEST_DRAWS)
        return dataclasses.replace(
            self,
            burn_in=min(self.burn_in, int(enough)) if burn_in is None else self.burn_in,
            coarse=min(self.coarse, few),
            round=min(self.round, few) if draws is None else self.round,
        )

    @property
    def trials(self) -> int:
        """Steps that trials of a given step size may take."""
        return min(self.most - self.burn_in - self.round - NOISE_LOOKS, self.most // 2)


def require_enough(
    limit: int | None, chains: int, burn_in: int | None, draws: int | None, tuned: bool
) -> None:
    """Raise where ``limit`` gradients per chain do not hold pilot, burn-in and draws."""
    if limit is None:
        return
    share = (PILOT + COARSE if tuned else 0.0) + (BURN if burn_in is None else 0.0)
    least = max(FEWEST_STEPS, math.ceil(((draws or 0) + EXTRA) / (1 - share))) + (burn_in or 0)
    expected, cure = f"be at least {least * chains} for {chains} chains", "pilot, burn-in and draws"
    require(limit >= least, "max_gradients", expected, limit * chains, f"{cure} all count")


@dataclass(frozen=True)
class Coarse:
    """Draws at twice the time step, their kernel, and the noise of batches there."""

    kernel: Kernel
    energies: Array
    record: Mapping[str, Array]
    noise: Mapping[str, float]


def _mean_noise(runner: AnyRunner) -> dict[str, float]:
    """What batches add by chance (``Runner.noise``), the mean over the chains."""
    return {name: float(values.mean()) for name, values in runner.noise(NOISE_LOOKS).items()}


class StepPilot:
    """Finds the time step and the batch size of a run, and burns the chains in."""

    def __init__(
        self,
        runner: AnyRunner,
        problem: Problem,
        kernel: Kernel,
        lengths: Lengths,
        seed: int,
        wanted: SamplingRequest,
    ) -> None:
        self.runner, self.problem, self.kernel, self.lengths = runner, problem, kernel, lengths
        self._given = wanted.burn_in, wanted.draws, wanted.effort
        # curvatures along the way are measured on some of the data
        few = min(POWER_SAMPLES, problem.num_samples)
        whole = problem.norm == "train" or not problem.has_data or few == problem.num_samples
        self._part = problem.alone() if whole else problem.alone().subsample(few, seed, few)
        self._seed, self._looks, self._largest = seed, 0, 0.0
        self._reductions, self._friction, self._trace = 0, 1.0, 0.0
        self._moments: CurvatureMoments | None = None
        source = runner.ground.source
        self._by_sample = source is not None and source.by_sample

    def tune(self, batch_given: bool) -> tuple[Kernel, dict[str, str], Coarse]:
        """Find time step and batch size, burn in, and draw at twice the step.

        The pilot runs in windows that double. After each, the largest curvature of U is measured
        where chains are, by power iteration, and the step follows it. A window in which a chain
        leaves all bounds is repeated from w* with half the step.

        Returns the kernel ready to draw, its reasons, and the draws at twice its step; ``lengths``
        are those of what follows.
        """
        self._look(self.problem.vector.unsqueeze(0))
        tie = self._tie
        self._friction = 2 * (tie * self._largest) ** 0.25 if tie else math.sqrt(self._largest) / 4
        step, energy = self._windows(self.lengths.pilot)
        step, why = self._against_noise(step, energy, batch_given)
        relaxation = self._relaxation(step)
        step, why, mass = self._with_mass(step, why)
        name = type(self.kernel).__name__
        reasons = {"kernel": f"{name}: one gradient per step", "step_size": why}
        if mass:
            reasons["mass"] = mass
        if self._whole:
            why = "all of the data"
        elif batch_given:
            why = "given"
        else:
            own = "that of the problem's own batches"
            why = "an effective draw is cheapest" if self._by_sample else own
        reasons["batch_size"] = f"{self.runner.batch_size}: {why}"
        # a mass shortens the relaxation in a quadratic valley, but not that along a curved one: no
        # shorter runs with it
        self.lengths = self.lengths.shorten(max(relaxation, self._relaxation(step)), *self._given)
        steps = max(self.lengths.burn_in, 1)
        while True:
            kernel, twice = self._at(step).frozen, self._at(2 * step)
            self.runner.retune(twice)
            burn(self.runner, steps)
            self.runner.retune(twice.frozen)
            coarse = self._draw_coarse(twice)
            if coarse is not None:
                self.runner.retune(kernel)
                return kernel, reasons, coarse
            step, steps = self._halve_step(step), max(min(steps, self._left // 2), 1)

    @property
    def _left(self) -> int:
        """The steps that are left to a chain besides a round of draws."""
        used = self.lengths.round + self.runner.gradients_spent + 2 * NOISE_LOOKS
        return self.lengths.most - used

    @property
    def _spare(self) -> int:
        """The steps that cooling may take: half of what is not needed later."""
        needed = self.lengths.burn_in + self.lengths.coarse + COOLINGS * NOISE_LOOKS
        return (self._left - needed) // 2

    def _relaxation(self, step: float) -> float:
        """Steps in which a direction of the mean curvature relaxes."""
        rate = self._friction / 2
        return 1 / (step * rate) if self.kernel.inertial else 2 / (step * rate) ** 2

    def _at(self, step: float) -> Kernel:
        absorbed = self.kernel.absorbed_friction(step, self._trace, self.problem.num_parameters)
        return self.kernel.with_time_step(step, self._friction, absorbed)

    @property
    def _tie(self) -> float:
        """The mean localization in the coordinates in which the chain moves."""
        mean, scale = self.kernel.gamma(), self.kernel.scale
        if isinstance(scale, KroneckerScale):
            return mean * float(scale.values.square().mean())
        return mean if scale is None else min(mean, 1.0)

    def _windows(self, steps: int) -> tuple[float, float]:
        """Pilot windows; the step after them and the mean energy in the last."""
        done, window, last = 0, max(steps // 16, 4), None
        step = self._largest_step()
        while done < steps:
            report("pilot", done, steps)
            self.runner.retune(self._at(step))
            window = min(window, steps - done)
            record = self._advance(window, 2 * (done + window) >= steps)
            done += window
            if _has_escaped(record, self.problem.num_parameters, self.kernel):
                step, self._moments = self._halve_step(step), None
                continue
            last = record
            self._look(self.runner.own[0][:POWER_CHAINS])
            step = self._largest_step()
            window *= 2
        report("pilot", steps, steps)
        return step, math.nan if last is None else self._settle(last)

    def _largest_step(self) -> float:
        return STABLE / math.sqrt(self._largest) / float(2**self._reductions)

    def _halve_step(self, step: float) -> float:
        """Return half the step and start again from w*."""
        self._reductions += 1
        got = f"chains that diverge even at a time step of {step:.2g}"
        cure = "the loss may not be bounded below around this point: raise localization, or train"
        fine = self._reductions <= REDUCTIONS
        require(fine, "step_size", "be found by the pilot", got, f"{cure} further")
        self.runner.restart()
        return step / 2

    def _look(self, positions: Tensor) -> None:
        """Measure the largest curvature of U at these positions; keep the largest seen."""
        kernel, part, scaled = self.kernel, self._part, self.kernel.scale is not None
        tie = kernel.gamma(torch.max)
        for theta in positions:
            self._looks += 1
            size = 0.0
            # a few power iterations, in absolute value and in the coordinates S⁻¹w
            try:
                operator = hessian(part.at(theta.to(part.vector)))
                rng = generator(self._seed, "curvature", self._looks)
                vector = torch.randn(operator.dim, generator=rng).to(theta)
                for _ in range(POWERS):
                    norm = float(vector.norm())
                    if norm == 0 or not math.isfinite(norm):
                        break
                    unit = kernel.scaled(vector / norm)
                    vector = kernel.nbeta * (operator @ unit.to(operator.dtype)).to(unit)
                    if scaled:
                        vector = kernel.scaled_force(vector.add_(unit, alpha=tie))
                    size = float(vector.norm())
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # a loss that can be differentiated only once
                continue
            seen = size if scaled else size + tie
            if math.isfinite(seen):
                self._largest = max(self._largest, seen)
        ranks, what = self.problem.ranks, "the curvature along the chains"
        self._largest = -ranks.least(-self._largest, what, self.problem.device)
        require(self._largest > 0, "localization", "be above 0 where the loss is flat", repr(tie))

    def _against_noise(self, step: float, energy: float, batch_given: bool) -> tuple[float, str]:
        """The step at which the noise of batches adds 6 % of the energy, if that is smaller; and
        the batch size.

        The pilot windows may be much hotter than the draws will be. The chains therefore run on at
        the reduced step, and energy, noise and friction are measured again until the step agrees
        with them.
        """
        stable = f"{STABLE:g}/√({self._largest:.3g}), the largest curvature met"
        if self._whole or not math.isfinite(energy):
            return step, stable
        order = 1 if self.kernel.inertial else 2
        largest = step
        for cooled in range(COOLINGS + 1):
            excess = self._excess(step, energy)
            if not batch_given and self._by_sample and excess * (largest / step) ** order > 1:
                size, now = self._cheapest(excess * (largest / step) ** order, order)
                excess, self._trace = excess * now / size, self._trace * now / size
                self._resize(size)
                if self._whole:
                    return largest, stable
            right = excess <= NEAR[1] and (excess >= NEAR[0] or step == largest)
            step = min(step / excess ** (1 / order), largest) if excess > 0 else largest
            if (right and cooled) or cooled == COOLINGS or step == largest:
                break
            pilot = self.lengths.pilot
            length = int(min(max(pilot / 4, 3 * self._relaxation(step)), pilot))
            energy = self._cool(step, min(length, self._spare))
            if not math.isfinite(energy):
                break
        if step == largest:
            return step, stable
        return step, f"the noise of batches adds about {NOISE_BIAS:.0%} of the value"

    def _excess(self, step: float, energy: float) -> float:
        """Ratio of the bias from mini-batch noise to the bias allowed, at this step."""
        parameters = self.problem.num_parameters
        self._trace = _mean_noise(self.runner)["trace"]
        added = self._at(step).noise_bias(self._trace, 1.0, 2.0, energy, parameters)
        excess = added / (NOISE_BIAS * max(abs(energy), 0.5))
        absorbed = self.kernel.absorbed_friction(step, self._trace, parameters)
        if absorbed:
            excess = max(excess, math.sqrt(absorbed / ABSORBED))
        return excess

    def _cool(self, step: float, steps: int) -> float:
        """Run at this step, update the friction; the mean energy, NaN if steps are too few."""
        if steps < 2 * FEWEST_DRAWS:
            return math.nan
        report("tuning", 0, steps)
        self.runner.retune(self._at(step))
        record = self._advance(steps, self.kernel.scale is None)
        report("tuning", steps, steps)
        if _has_escaped(record, self.problem.num_parameters, self.kernel):
            self.runner.restart()
            self._moments = None
            return math.nan
        return self._settle(record)

    def _advance(self, steps: int, forces: bool) -> Record:
        """Advance the chains; measure the forces on them a few times on the way, for a mass."""
        if not (forces and self._may_have_mass and steps >= 4 * MASS_LOOKS):
            return self.runner.advance(steps, look=False)
        vector, records = self.runner.ground.centre, []  # no less than float32
        self._moments = CurvatureMoments(self.problem.space.shapes, vector)
        for look in range(MASS_LOOKS):
            until = steps * (look + 1) // MASS_LOOKS
            records.append(self.runner.advance(until - steps * look // MASS_LOOKS, look=False))
            seen = {name: values.to(vector) for name, values in self.runner.forces().items()}
            self._moments.add(seen["first"], seen["second"] + seen["tie"])
        return {name: torch.cat([record[name] for record in records], dim=1) for name in records[0]}

    def _settle(self, record: Record) -> float:
        """The mean energy of the later half of a record; the friction is set by the distance there.

        The mean square distance r² that chains reach is P over the harmonic mean a of the
        curvatures: the friction 2√a damps such a direction critically. It is 2√γ where most
        directions are flat, as in networks, and larger in regular models.
        """
        half = record["loss"].shape[1] // 2
        late = {name: values[:, half:] for name, values in record.items()}
        energy = self.kernel.nbeta * float((late["loss"] - late["centre"]).mean())
        # no posterior around a minimum has so much energy
        heat = max(energy / (self.problem.num_parameters / 2), 1.0)
        squares, scale = 0.0, self.kernel.scale  # of the distance, where the chains move
        if scale is None:
            squares = float(late["distance"].square().mean()) / heat
        elif isinstance(scale, KroneckerScale):
            away = scale.solve(self.runner.own[0] - self.runner.ground.centre)
            rows = self.runner.gather(away.square().sum(-1, keepdim=True).double())
            squares = float(rows.mean()) / heat
        if squares > 0:
            fitting = 2 * math.sqrt(self.problem.num_parameters / squares)
            least, most = 2 * math.sqrt(self._tie), 2 * math.sqrt(self._largest)
            self._friction = min(max(fitting, least), most)
        return energy / heat

    @property
    def _may_have_mass(self) -> bool:
        """Whether a mass is tried: for large tensors, tied to w*, that fit into memory."""
        problem, free = self.problem, isinstance(self.kernel, Kinetic) and self.kernel.scale is None
        large = max((math.prod(shape) for shape in problem.space.shapes), default=0) > MASS_SIZE
        fits = problem.num_parameters <= LARGE and problem.memory is None
        return free and self._tie > 0 and large and fits

    def _with_mass(self, step: float, why: str) -> tuple[float, str, str]:
        """Try a Kronecker mass and keep it where chains relax in fewer steps, counting what a step
        costs more.

        Returns the step, why it is what it is, and what there is to say about the mass; "" where
        none was tried.
        """
        before, steps = self._relaxation(step), min(self.lengths.pilot // 2, self._spare // 2)
        moments = self._moments
        if moments is None or not moments.finite or steps < 2 * FEWEST_DRAWS:
            return step, why, ""
        if before < SLOW or not self._may_have_mass:
            return step, why, ""
        scale = moments.scale(self.kernel.gamma())
        kept = self.kernel, self._largest, self._friction, self._reductions
        self.kernel, self._largest = dataclasses.replace(self.kernel, scale=scale), 0.0
        self._look(self.runner.own[0][:POWER_CHAINS])
        self._friction = 2 * (self._tie * self._largest) ** 0.25
        energy = self._cool(self._largest_step(), steps)
        if math.isfinite(energy):
            self._look(self.runner.own[0][:POWER_CHAINS])
            new, reason = self._against_noise(self._largest_step(), energy, batch_given=True)
            passes = 3 * self.runner.batch_size * self.problem.num_parameters
            cost = 1 + 2 * scale.products / passes
            ranks, gain = self.problem.ranks, before / (self._relaxation(new) * cost)
            gain = ranks.least(gain, "what a mass gains", self.problem.device)
            if gain >= MASS_GAIN:
                mass = f"Kronecker products, with which chains relax {gain:.1f} times as fast"
                return new, reason, mass
        self.kernel, self._largest, self._friction, self._reductions = kept
        return step, why, "none: Kronecker products do not help"

    def _cheapest(self, excess: float, order: int) -> tuple[int, int]:
        """The batch size whose steps cover a unit of time at the least cost, by two timed sizes;
        and the present one.

        Small problems are not timed, so that their numbers depend on the seed alone: a step then
        counts as its samples and 1,024 more.
        """
        runner, samples, now = self.runner, self.problem.num_samples, self.runner.batch_size
        sizes = sorted({min(size, samples) for size in (*BATCHES, samples) if size >= now})
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
                piece = DEFAULT_BATCH
            elif parameters * size <= SMALL:
                piece = size
            elif self.problem.device.type == "cuda":
                piece = 16 * DEFAULT_BATCH
            self.runner.resize(size, self.runner.ground.plan.accumulate * -(-size // piece))

    @property
    def _whole(self) -> bool:
        source, problem = self.runner.ground.source, self.problem
        all_samples = source is None or self.runner.batch_size == problem.num_samples
        return all_samples or not problem.has_data

    def _draw_coarse(self, kernel: Kernel) -> Coarse | None:
        """Draws of a kernel of twice the time step, possibly none; None if a chain diverges."""
        count = min(self.lengths.coarse, self._left)
        if count < FEWEST_DRAWS:
            return Coarse(kernel, np.empty((0, 0)), {}, {})
        record = self.runner.advance(count, look=False)
        if _has_escaped(record, self.problem.num_parameters, kernel):
            return None
        energies = (kernel.nbeta * (record["loss"] - record["centre"])).numpy()
        seen: dict[str, Array] = {
            name: record[name].numpy() for name in ("work", "heat") if name in record
        }
        return Coarse(kernel, energies, seen, _mean_noise(self.runner))


def explained_bias(
    kernel: Kernel,
    energies: Array,
    record: Mapping[str, Array],
    trace: float,
    share: float,
    parameters: int,
) -> tuple[float, float]:
    """What first-order theory says that finite, noisy steps add to the mean energy, NaN if there is
    no formula; and the standard deviation of what it leaves out.

    It is trusted to a quarter of itself. How much of the noise heats the loss and not the
    localization is known between two bounds only: ``share``, which is right if V does not depend on
    w, and 1.
    """
    raw = float(energies.mean())
    if kernel.bias_formula == "none":
        return math.nan, UNTRUSTED * abs(raw)
    if kernel.bias_formula == "steps":
        gamma: Any = kernel.localization
        value = step_shares(kernel.step_size, gamma, record["work"], record["heat"], raw).bias
        return value, 0.25 * abs(value) + TRUSTED * abs(raw)
    degree = loss_degree(record["work"], raw)
    least, most = (kernel.noise_bias(trace, part, degree, raw, parameters) for part in (share, 1.0))
    value = (least + most) / 2
    return value, 0.25 * abs(value) + (most - least) / 2 + TRUSTED * abs(raw)


def bias_of_steps(
    kernel: Kernel,
    energies: Array,
    record: Mapping[str, Array],
    noise: Mapping[str, float],
    coarse: Coarse | None,
    parameters: int,
) -> Estimate:
    """What finite, noisy steps add to the mean of ``energies``, with its standard error.

    A formula explains part of it (``explained_bias``). What it leaves, b at h and (1 + f)·b at 2h,
    has mean 0 and the formula's doubt as standard deviation a priori. The draws at 2h measure it:
    with D the difference of the two means, each less what the formula explains, u·D is taken off, f
    = 1 where noise is most of the bias, else 3. The value's error is then (1 + u)·ε₁ − u·ε₂ + (1 −
    f·u)·b, with ε₁ and ε₂ the errors of the means at h and 2h, and u is chosen so that its variance
    is least. Where D contradicts the prior by more than two standard deviations, half of the
    contradiction goes into the error.
    """
    raw, trace = float(energies.mean()), noise["trace"]
    # the share of the noise that heats the loss; the rest heats the localization
    share = min(max(1 - noise["tied"] / trace, 0.0), 1.0) if trace > 0 else 1.0
    explained, prior = explained_bias(kernel, energies, record, trace, share, parameters)
    known = math.isfinite(explained)
    formula = explained if known else 0.0
    if coarse is None or coarse.energies.size == 0:
        return Estimate(formula, prior)
    linear = kernel.inertial and abs(formula) > 0.005 * abs(raw)
    factor = 1.0 if linear else 3.0
    # the share is taken from all draws at h: the few looks at 2h would make it noisier, and it is
    # the same there
    there, _ = explained_bias(
        coarse.kernel, coarse.energies, coarse.record, coarse.noise["trace"], share, parameters
    )
    difference = float(coarse.energies.mean()) - (there if known else 0.0) - (raw - formula)
    fine, rough = blocked_error(energies) ** 2, blocked_error(coarse.energies) ** 2
    total = fine + rough + (factor * prior) ** 2
    weight = max((factor * prior**2 - fine) / total, 0.0) if total > 0 else 0.0
    squares = (2 * weight + weight**2) * fine + weight**2 * rough
    squares += ((1 - factor * weight) * prior) ** 2
    if difference**2 > 4 * total:
        squares += (difference / (2 * factor)) ** 2
    return Estimate(formula + weight * difference, math.sqrt(squares))


def reduce_step_size(
    runner: AnyRunner, problem: Problem, kernel: Kernel, most: int
) -> tuple[Kernel, str]:
    """A kernel whose step size is given, reduced until chains stay finite and the steps do not rule
    them.

    Also a note on what was done, empty where nothing was. The chains are left at the centre.
    Refused where so many steps, ``most``, or thirty reductions do not find one.
    """
    given, note, calm, tries = kernel.step_size, "", False, 30
    window = max(min(25, most // (2 * tries)), 5)
    for _ in range(max(min(tries, most // (2 * window)), 1)):
        runner.retune(kernel)
        record = runner.advance(2 * window, look=False)
        runner.restart()
        away = _has_escaped(record, problem.num_parameters, kernel)
        calm = not away and not _is_heated(record, problem.num_parameters, kernel)
        if calm:
            break
        kernel = dataclasses.replace(kernel, step_size=kernel.step_size / 4)
        note = f"{given:.3g} made the chains diverge, so it was reduced"
    got = f"{given:.3g}, at which they diverge, as at {4 * kernel.step_size:.2g}"
    cure = "leave it out to have it found, raise localization or max_gradients, or train further"
    require(calm, "step_size", "let the chains stay around the centre", got, cure)
    return kernel, note


def _is_heated(record: Record, parameters: int, kernel: Kernel) -> bool:
    """Whether SGLD's steps add more than half of its energy, or of a regular model's."""
    if kernel.bias_formula != "steps":
        return False
    late = {name: values[:, values.shape[1] // 2 :] for name, values in record.items()}
    energy = kernel.nbeta * float((late["loss"] - late["centre"]).mean())
    most = max(abs(energy), parameters / 2)  # a regular model's λ
    return kernel.step_size / 8 * float(late["heat"].mean()) > 0.5 * most


def _has_escaped(record: Record, parameters: int, kernel: Kernel) -> bool:
    """Whether a chain is not finite, or ten times farther out than the localization allows."""
    squares = record["distance"].square()
    room = 10 * parameters / (kernel.gamma(torch.min) or 1e-12) + 10 * squares[:, :1]
    return not bool(torch.isfinite(record["loss"]).all()) or bool((squares > room).any())


def draw_by_steps(
    problem: Problem, kernel: Kernel, wanted: SamplingRequest, plan: ChainPlan, whole: bool
) -> SamplingRun:
    """Draw chains of a kernel that never rejects, tuned, burnt in, to the tolerance asked for."""
    limit, tuned, coarse = wanted.limit, wanted.tuned, None
    require_enough(limit, wanted.chains, wanted.burn_in, wanted.draws, tuned)
    lengths = Lengths.of(limit, wanted.burn_in, wanted.draws, tuned)
    runner, mode = make_runner(problem, kernel, wanted.chains, plan, wanted.mode)
    try:
        if tuned:
            pilot = StepPilot(runner, problem, kernel, lengths, plan.seed, wanted)
            kernel, reasons, coarse = pilot.tune(plan.batch_size is not None and not whole)
            lengths = pilot.lengths
        else:
            reasons = {}
            if kernel.step_size > 0:
                kernel, note = reduce_step_size(runner, problem, kernel, lengths.trials)
                reasons = {"step_size": note} if note else {}
            runner.retune(kernel)
            burn(runner, lengths.burn_in)
        collector = Collector(runner, problem, kernel, plan, mode, wanted.watch)
        return _draw_in_rounds(collector, wanted, reasons, lengths, coarse)
    finally:
        runner.close()


def _draw_in_rounds(
    collector: Collector,
    wanted: SamplingRequest,
    reasons: dict[str, str],
    lengths: Lengths,
    coarse: Coarse | None,
) -> SamplingRun:
    """Draw in rounds until the tolerance is met or the steps are taken."""
    runner, kernel = collector.runner, collector.kernel
    parameters = collector.problem.num_parameters
    looks: list[dict[str, float]] = []
    least = -math.inf  # at least one round
    while (left := lengths.most - runner.gradients_spent - NOISE_LOOKS) >= least:
        least = max(lengths.round // 2, FEWEST_DRAWS)
        going = collector.draw(max(min(lengths.round, left), FEWEST_DRAWS))
        if kernel.step_size > 0:
            looks.append(_mean_noise(runner))
        chains = collector.chains(reasons)
        if looks:
            means = {name: float(np.mean([look[name] for look in looks])) for name in looks[0]}
            means["dof"] = len(looks) * len(chains) * (NOISE_LOOKS - 1.0)
            if isinstance(kernel, Kinetic):
                means["heat"] = kernel.step_size / (2 * kernel.damping) * means["trace"]
            chains = dataclasses.replace(chains, noise=means)
            fine = ~chains.diagnostics.diverged
            if coarse is not None and fine.any() and chains.work is not None:
                energies, record = chains.energies[fine], {"work": chains.work[fine]}
                if chains.heat is not None:
                    record["heat"] = chains.heat[fine]
                bias = bias_of_steps(kernel, energies, record, means, coarse, parameters)
                chains = dataclasses.replace(chains, step_bias=bias)
        reading = read(chains, parameters, wanted.baseline == "full")
        if wanted.draws is not None or not going or chains.diagnostics.diverged.any():
            break
        if reading.drifting and runner.gradients_spent < lengths.most // 2:
            collector.forget()
            looks.clear()
            continue
        if _is_trusted(chains, reading, wanted, lengths) and not wanted.missed(reading):
            break
    if wanted.draws is None:
        reasons["draws"] = f"{wanted.goal}, up to {lengths.most} steps a chain"
    chains = dataclasses.replace(chains, reasons={**chains.reasons, **reasons})
    full = read(chains, parameters, True) if wanted.baseline == "both" else None
    short = wanted.draws is None and not _is_trusted(chains, reading, wanted, lengths)
    return SamplingRun(chains, reading, short or wanted.missed(reading), full)


def _is_trusted(
    chains: Chains, reading: ChainReading, wanted: SamplingRequest, lengths: Lengths
) -> bool:
    """Whether the draws are many and mixed enough for their standard error to be believed."""
    if np.ptp(chains.energies) == 0:  # a constant loss: nothing fluctuates that could be underrated
        return True
    if chains.diagnostics.rhat > RHAT or reading.drifting or reading.unsettled:
        return False
    effective = chains.diagnostics.ess_mean >= wanted.effort * EFFECTIVE * len(chains)
    return effective and len(chains.energies[0]) >= FEWEST_ROUNDS * lengths.round
