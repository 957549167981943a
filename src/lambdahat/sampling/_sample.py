"""``sample``: chains of a kernel on a problem, and the mode in which they run."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lambdahat._core.check import (
    describe,
    require,
    require_choice,
    require_count,
    require_positive,
    require_shape,
    require_type,
)
from lambdahat._core.device import default_context
from lambdahat._core.progress import report
from lambdahat.problem import Problem, require_problem
from lambdahat.problem.batches import free_memory, rng_untouched, take
from lambdahat.problem.checkpointing import recomputing
from lambdahat.problem.distributed import in_a_group
from lambdahat.problem.memory import PASS, LiveBytes, rows_within
from lambdahat.problem.network import matcher
from lambdahat.problem.problem import Space
from lambdahat.results import Array, Chains, Estimate
from lambdahat.sampling.backends.chain_runner import (
    ChainPlan,
    ChainSetup,
    GraphRunner,
    Observable,
    OneByOne,
    Readings,
    Runner,
    Together,
    has_unfoldable,
)
from lambdahat.sampling.backends.minibatches import Minibatches, default_batch
from lambdahat.sampling.backends.workers import ForkedRunner, SpreadRunner, require_same_run
from lambdahat.sampling.diagnostics import (
    RHAT,
    AcceptanceProbe,
    ChainReading,
    degrees_of_freedom,
    diagnose,
    probed_alone,
    verdict,
)
from lambdahat.sampling.kernels import HMC, KERNELS, Kernel, KroneckerScale, Localization
from lambdahat.sampling.kernels.kernel import require_localization

PIECES = 20  # into which burn-in and draws are cut, to report progress in between
MOST_SEGMENTS = 40  # of a chain, whose averages are kept
OBSERVABLE, AVERAGE = "observable ", "average "  # with which a runner's names of them begin
PROBES = 5  # of the acceptance, during a call of ``draw``
BASELINES = ("paired", "full", "both")
TOL = 0.03, 1.0  # default tolerance, relative to the value or to the second number, if larger
EFFECTIVE = 50  # effective draws per chain before which no standard error is trusted
LEAST_EFFORT = 0.25  # share of the usual draws that even the loosest tolerance takes
SHARE = 0.5  # of the free memory, where the problem has no budget
# of a budget, for chains in one call: a mapped pass is not measured, but estimated from the passes
# of its chains
SLACK = 0.8
# vectors that chains share: θ, the centre of the run, of its state, of the probe and of the probe's
# state
COMMON = 5
MODES = ("auto", "batched", "sequential", "processes", "graph")
# multiply-adds of a gradient (P × samples) up to which "batched" is taken untimed
SMALL = 2_000_000
TIMED_STEPS, ROUNDS = 2, 3  # the best of a few rounds counts: another process may disturb one
MEMORY = (
    "Even one by one the chains do not fit into memory: a larger accumulate or a smaller batch_size"
    " needs less."
)
WHY_NOT = {
    "graph": "a CUDA graph needs a CUDA problem, a kernel that never rejects, and nothing looked at"
    " draw by draw",
    "processes": "processes need fork, several cores and chains, a CPU problem, and no CUDA or"
    " process group",
    "batched": "chains can share a call only where batches can be drawn sample by sample",
}
LARGE = 20_000_000  # parameters beyond which chains gain nothing from sharing a call
AnyRunner = Runner | ForkedRunner | SpreadRunner
Makers = dict[str, Callable[[], Runner | ForkedRunner]]
Failure = (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError, IndexError)
Watch = Callable[[np.ndarray[Any, Any]], Any]


@default_context()
def sample(
    problem: Problem,
    kernel: Kernel,
    chains: int = 4,
    draws: int = 500,
    seed: int = 0,
    *,
    burn_in: int = 0,
    thin: int = 1,
    batch_size: int | None = None,
    shared_batches: bool = False,
    accumulate: int = 1,
    baseline: str = "paired",
    observables: Mapping[str, Observable] | None = None,
    averages: Mapping[str, Observable] | None = None,
    forces: bool = False,
    keep_parameters: bool = False,
    bound: float | None = None,
    mode: str = "auto",
    watch: Watch | None = None,
) -> Chains:
    """Sample exp(−nβ·L(w) − ½Σγ_i(w_i − w*_i)²) around the problem's parameters w*, with
    ``kernel``.

    Every chain starts at w*, takes ``burn_in`` steps that are discarded and then ``draws`` ×
    ``thin`` steps, of which every ``thin``-th is a draw. A step uses ``batch_size`` random samples
    (512 by default; exact kernels use all), separately for each chain unless ``shared_batches``, in
    ``accumulate`` pieces if memory is short. Every loss is paired with the loss at w* on the same
    batch; ``baseline`` "full" or "both" also evaluates the loss of every draw on the whole data,
    which is another pass and not in ``cost``.

    ``observables`` are functions of the flat parameters, recorded for every draw; of ``averages``
    only the means over about twenty segments of each chain are kept, whatever the number of draws;
    ``keep_parameters`` keeps the draws. ``forces`` records ‖∇U‖² and the virial (w − w*)·∇U, which
    reveal step-size bias and incomplete relaxation. Chains farther than ``bound`` from w* are
    pulled back, which the status reports. ``mode`` is "batched", "sequential", "processes", "graph"
    or "auto", the fastest. ``watch`` is called with nβ(L − L*) of the draws so far, (chains,
    draws), about twenty times; sampling stops if it returns True.
    """
    require_problem(problem)
    expected = "be a kernel such as lh.sampling.sgld(...)"
    cure = "lambdahat.sampling has kinetic, sgld, rmsprop_sgld, sgnht, sghmc, mala and hmc"
    require_type(kernel, Kernel, "kernel", expected, cure)
    for name, value, least in (("chains", chains, 1), ("draws", draws, 1), ("burn_in", burn_in, 0)):
        require_count(value, name, least)
    require_choice(baseline, "baseline", BASELINES)
    if batch_size is not None:
        require_count(batch_size, "batch_size", 1, problem.num_samples)
    require_type(watch, Callable | None, "watch", "be a function of the energies so far")
    readings = baseline != "paired", forces, keep_parameters, observables or {}, averages or {}
    plan = ChainPlan(seed, batch_size, shared_batches, accumulate, thin, bound, *readings)
    frozen = problem.at(problem.vector)
    runner, mode = make_runner(frozen, place(kernel, frozen), chains, plan, mode)
    try:
        for piece in in_pieces("burn-in", burn_in):
            runner.skip(piece)
        collector = Collector(runner, mode, watch)
        collector.draw(draws)
        return collector.chains()
    finally:
        runner.close()


def in_pieces(task: str, steps: int) -> Iterator[int]:
    """Cut ``steps`` into about twenty pieces and report the progress of ``task`` before each."""
    size = max(-(-steps // PIECES), 1)
    for done in range(0, steps, size):
        report(task, done, steps)
        yield min(size, steps - done)
    if steps:
        report(task, steps, steps)


def make_runner(
    problem: Problem,
    kernel: Kernel,
    chains: int | Sequence[int],
    plan: ChainPlan,
    mode: str = "auto",
) -> tuple[AnyRunner, str]:
    """A runner of so many chains, or those of these numbers, and the mode in which it runs them.

    "auto" takes "sequential" where the chains do not fit into memory together, and no CUDA graph
    where they do but a captured one does not. Small problems run "batched" and are not timed, so
    that their numbers depend on the seed alone; beyond, the modes that work are timed once over a
    few steps. Modes differ in rounding only. On many processes each rank runs its share of the
    chains, on all data.
    """
    require_choice(mode, "mode", MODES)
    if not isinstance(chains, Sequence):  # an integer, perhaps NumPy's
        if problem.ranks.size > 1:
            return _spread(problem, kernel, chains, plan, mode)
        chains = range(chains)
    most, memory = problem.num_samples, problem.memory
    samples = most if kernel.exact else min(plan.batch_size or default_batch(problem), most)
    pieces = plan.accumulate
    if memory is not None and not kernel.exact:
        plan = dataclasses.replace(plan, accumulate=max(pieces, pieces_within(problem, samples)))
    # Steps on all data in one piece draw no batches: L(w*) is then the same number at every step.
    one_piece = samples == most and plan.accumulate == len(problem.batches) == 1
    whole = kernel.exact or one_piece or not problem.has_data
    at_once = max(problem.batches.sizes) if whole else -(-samples // pieces)
    demand = Demand(problem, kernel, len(chains), at_once, plan)
    if memory is not None:
        needed, name = demand.one_by_one(), type(kernel).__name__
        expected = f"be at least {needed:,.0f} bytes for {len(chains)} chains of {name}"
        cure = "raise it, or run fewer chains"
        require(needed <= memory, "memory", expected, f"{memory:,}", cure)
    # steps smaller than the rounding of half precision would be lost
    vector, loss = problem.vector, problem.loss()
    centre = vector.to(torch.promote_types(vector.dtype, torch.float32))
    drawing = plan.batch_size, plan.shared_batches, plan.seed
    source = None if whole else Minibatches(problem, *drawing)
    with torch.no_grad():
        first = problem.batch_loss(problem.named(vector), problem.batches.first())
    rounding = abs(loss) * torch.finfo(first.dtype).eps
    setup = ChainSetup(problem, plan, centre, loss, rounding, source)
    small = problem.num_parameters * samples <= SMALL and memory is None
    # the modes that the problem and the kernel leave open
    makers: Makers = {"sequential": lambda: Runner(setup, kernel, chains, OneByOne(problem))}
    if source is None or source.shared or source.by_sample:
        makers["batched"] = lambda: Runner(setup, kernel, chains, Together(problem))
        fixed = problem.batches.in_memory and problem.norm != "train"  # the same at every replay
        capturable = source.by_sample if source is not None else fixed and not kernel.exact
        if problem.device.type == "cuda" and capturable and not plan.observes:
            makers["graph"] = lambda: GraphRunner(
                setup, kernel, chains, Together(problem, has_unfoldable(problem))
            )
    own_cores = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if own_cores else os.cpu_count() or 1
    processes, timed = min(len(chains), cores), not small and problem.device.type != "cuda"
    if processes > 1 and (timed or mode != "auto") and processes_available(problem):
        makers["processes"] = lambda: ForkedRunner(setup, kernel, chains, processes)
    if mode != "auto":
        expected = f"be one of {', '.join(makers)} for this problem and kernel"
        require(mode in makers, "mode", expected, repr(mode), WHY_NOT.get(mode, ""))
        if memory is not None and mode in ("batched", "graph"):
            needed = demand.together(captured=mode == "graph")
            expected = f"fit into the problem's memory, {memory:,} bytes"
            got, cure = f"{mode!r}, which needs {needed:,.0f}", 'mode="auto" takes one that fits'
            require(needed <= memory, "mode", expected, got, cure)
        return makers[mode](), mode
    if not small and (problem.num_parameters > LARGE or not demand.together_fits()):
        return makers["sequential"](), "sequential"
    if "graph" in makers and (small or demand.together_fits(captured=True)):
        # a model that cannot be mapped or captured fails in the making
        with suppress(*Failure), rng_untouched():
            return makers["graph"](), "graph"
    if timed:
        return _fastest(makers)
    if "batched" in makers:
        # a model that cannot be mapped fails at the first step; running out of memory is a failure
        # too, and one by one the chains may fit
        with suppress(*Failure), rng_untouched():
            makers["batched"]().skip(1)
            return makers["batched"](), "batched"
    return makers["sequential"](), "sequential"


def _spread(
    problem: Problem, kernel: Kernel, chains: int, plan: ChainPlan, mode: str
) -> tuple[SpreadRunner, str]:
    """A runner of this rank's share of the chains, and the slowest mode of any rank."""
    ranks = problem.ranks
    require_same_run(problem, kernel, chains, plan)
    own = range(chains)[ranks.rank :: ranks.size]
    runner, taken = make_runner(problem.alone(), kernel, own or range(1), plan, mode)
    assert not isinstance(runner, SpreadRunner)
    slowest = int(ranks.least(MODES.index(taken), "the mode of the chains", problem.device))
    return SpreadRunner(problem, runner, own, chains), MODES[slowest]


def processes_available(problem: Problem) -> bool:
    """Whether forking is possible: on a system that has it, not once CUDA or a process group, whose
    threads a child would lack, is in use, not within a daemon of a pool.
    """
    free = hasattr(os, "fork") and not multiprocessing.current_process().daemon and not in_a_group()
    return free and problem.device.type == "cpu" and not torch.cuda.is_initialized()


def _fastest(makers: Makers) -> tuple[Runner | ForkedRunner, str]:
    """The mode whose steps take least time."""
    times: dict[str, float] = {}
    for name, make in makers.items():
        runner = None
        try:
            runner = make()
            runner.skip(1)
            rounds = []
            for _ in range(ROUNDS):
                start = time.perf_counter()
                runner.skip(TIMED_STEPS)
                rounds.append(time.perf_counter() - start)
            times[name] = min(rounds)
        except Failure as error:
            if name == "sequential":
                if isinstance(error, torch.OutOfMemoryError):
                    error.add_note(MEMORY)
                raise
        finally:
            if runner is not None:
                runner.close()
    best = min(times, key=lambda name: times[name])
    return makers[best](), best


@dataclass(frozen=True)
class Demand:
    """The memory that ``chains`` chains of a kernel take with batches of ``samples``."""

    problem: Problem
    kernel: Kernel
    chains: int
    samples: int
    plan: ChainPlan

    def together_fits(self, captured: bool = False) -> bool:
        """Whether all chains in one call, or in one CUDA graph, fit into memory."""
        memory = self.problem.memory
        room = SHARE * free_memory(self.problem.device) if memory is None else SLACK * memory
        return self.together(captured) <= room

    def together(self, captured: bool = False) -> float:
        """The bytes that all chains in one call take."""
        copied = self._each - 1 if captured else 0  # all but the gradient
        # a gradient is measured on one and two samples, and is on a line through both
        counts = (1, 2)[: min(self.samples, self.problem.batches.first().size)]
        peaks = [_gradient_peak(self.problem, count, again=False) for count in counts]
        passes = peaks[0] + (self.samples - 1) * max(peaks[-1] - peaks[0], 0.0)
        return self.chains * passes + self._row * (self._held + self.chains * copied)

    def one_by_one(self) -> float:
        """The bytes that chains take whose passes come one by one."""
        # pieces are no larger, and the probe sees whole batches
        largest, again = self.problem.batches.first().size, self.problem.recomputes
        return _gradient_peak(self.problem, largest, again) + self._row * self._held

    @property
    def _row(self) -> int:
        return self.problem.num_parameters * max(self.problem.dtype.itemsize, 4)

    @property
    def _each(self) -> int:
        """Vectors of a chain."""
        kernel, plan = self.kernel, self.plan
        summed = len(self.problem.batches) > 1 if kernel.exact else plan.accumulate > 1
        return kernel.vectors(plan.forces) + summed + (plan.bound is not None)

    @property
    def _held(self) -> int:
        """Vectors of all chains beside their passes."""
        kernel, probe = self.kernel, 0
        if kernel.is_unadjusted_mala:
            # a chain that is probed is taken from the others, its gradients of batches are summed
            own = kernel.vectors(forces=True) - kernel.held
            probe = 1 + HMC.held + own + (len(self.problem.batches) > 1)
        probed = 1 if probed_alone(self.problem) else self.chains
        return COMMON + self.chains * self._each + probed * probe


def pieces_within(problem: Problem, samples: int) -> int:
    """The number of pieces into which a batch is cut, so that a pass stays within the budget."""
    if problem.memory is None:
        return 1
    # as chains one by one do
    again, most = problem.recomputes, min(samples, problem.batches.first().size)
    one, room, rows = _gradient_peak(problem, 1, again), PASS * problem.memory, 1
    if one < room:
        rows = rows_within(lambda count: _gradient_peak(problem, count, again), most, room, one)
    return -(-samples // rows)


@torch.enable_grad()
def _gradient_peak(problem: Problem, samples: int, again: bool) -> float:
    """Bytes of a gradient on the first samples; ``again`` recomputes what is checkpointed."""
    named = problem.named(problem.vector)
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in named.items()}
    few = take(problem.batches.first(), torch.arange(samples, device=problem.device))
    with LiveBytes() as seen, recomputing(again):
        loss = problem.batch_loss(leaves, few)
        torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return float(seen.peak)


@dataclass
class Collector:
    """Collects the draws of a runner and makes ``Chains`` of them.

    ``dataclasses.replace(collector)`` begins anew: all earlier steps then count as burn-in.
    """

    runner: AnyRunner
    mode: str
    watch: Watch | None = None
    _parts: list[Readings] = field(init=False, default_factory=list)
    _segments: list[tuple[int, Readings]] = field(init=False, default_factory=list)
    _probe: AcceptanceProbe | None = field(init=False, default=None)

    def draw(self, draws: int) -> bool:
        """Take ``draws`` more; False if the caller's ``watch`` ends the sampling."""
        runner, kernel, setup = self.runner, self.runner.kernel, self.runner.setup
        if self._probe is None and kernel.is_unadjusted_mala:
            self._probe = AcceptanceProbe(setup.problem, kernel, setup.plan.seed)
        pieces = len(range(0, draws, -(-draws // PIECES)))
        for number, piece in enumerate(in_pieces("sample", draws)):
            readings = runner.advance(piece)
            means = {
                name: readings.pop(name) for name in list(readings) if name.startswith(AVERAGE)
            }
            self._parts.append(readings)
            if means:
                self._add_segment(piece, means)
            if self._probe is not None and number % max(pieces // PROBES, 1) == 0:
                self._probe.probe(runner.positions, runner.own, runner.gather)
            if self.watch is not None:
                rises = torch.cat([part["loss"] - part["centre"] for part in self._parts], 1)
                if self.watch((kernel.nbeta * rises).numpy()):
                    return False
        return True

    def _add_segment(self, draws: int, means: Readings) -> None:
        """Keep averages over a segment; many segments are joined two by two, to bound memory."""
        self._segments.append((draws, means))
        if len(self._segments) > MOST_SEGMENTS:
            *pairs, last = self._segments  # an odd number
            self._segments = [last]
            for (first, one), (second, other) in zip(pairs[::2], pairs[1::2], strict=True):
                count = first + second
                both = {name: (first * one[name] + second * other[name]) / count for name in one}
                self._segments.insert(-1, (count, both))

    def chains(self, reasons: Mapping[str, str] | None = None) -> Chains:
        """The chains so far, with their diagnostics and status."""
        parts, runner, setup = self._parts, self.runner, self.runner.setup
        kernel, plan = runner.kernel, setup.plan
        readings = {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}
        arrays = {name: values.numpy() for name, values in readings.items() if name != "parameters"}
        reasons, acceptance = dict(reasons or {}), math.nan
        if kernel.exact:
            acceptance = float(arrays["acceptance"].mean())
        elif self._probe is not None:
            acceptance = self._probe.acceptance
        else:
            name = type(kernel).__name__
            reasons["acceptance"] = f"not known: {name} does not take the steps of MALA"
        bounded = runner.bounded.cpu().numpy()
        with np.errstate(over="ignore", invalid="ignore"):  # chains that run away
            energies: Array = kernel.nbeta * (arrays["loss"] - arrays["centre"])
        diagnostics = diagnose(energies, arrays["distance"], acceptance, bounded)
        # the losses of batches are rounded each in its own way, and the mean is not
        alike = plan.full_losses or runner.batch_size == setup.problem.num_samples
        return Chains(
            losses=arrays["loss"],
            centre_losses=arrays["centre"],
            distances=arrays["distance"],
            acceptances=arrays["acceptance"],
            kernel=type(kernel).__name__,
            step_size=kernel.step_size,
            nbeta=kernel.nbeta,
            localization=kernel.localization,  # type: ignore[arg-type]
            initial_loss=setup.centre_loss,
            rounding=kernel.nbeta * setup.rounding if alike else 0.0,
            num_samples=setup.problem.num_samples,
            batch_size=runner.batch_size,
            burn_in=runner.steps - plan.thin * energies.shape[1],
            thin=plan.thin,
            mode=self.mode,
            diagnostics=diagnostics,
            full_losses=arrays.get("full"),
            recycled_losses=arrays.get("recycled"),
            spreads=arrays.get("spread"),
            forces=arrays.get("force"),
            virials=arrays.get("virial"),
            work=arrays.get("work"),
            heat=arrays.get("heat"),
            observables={name: arrays[OBSERVABLE + name] for name in plan.observables},
            averages={
                name: np.concatenate(
                    [part[AVERAGE + name].numpy() for _, part in self._segments], axis=1
                )
                for name in plan.averages
            },
            stretches=tuple(length for length, _ in self._segments),
            parameters=readings.get("parameters"),
            reasons=reasons,
            cost=runner.gradients_spent * len(bounded),
            status=verdict(diagnostics, moved=bool((arrays["distance"] > 0).any())),
        )


def place(kernel: Kernel, problem: Problem) -> Kernel:
    """The kernel with its localization and scale, unless numbers, on the problem's device."""
    gamma, scale = kernel.localization, kernel.scale
    count, vector = problem.num_parameters, problem.vector
    by_parameter = isinstance(gamma, Mapping | Tensor)
    gamma = localization_tensor(gamma, problem.space, vector) if by_parameter else float(gamma)  # type: ignore[arg-type]
    if scale is not None:
        shape = scale.values.shape if isinstance(scale, KroneckerScale) else scale.shape
        fits = shape in ((count,), (count, count))
        require(fits, "scale", f"have shape ({count},) or ({count}, {count})", scale)
        scale = scale.to(vector.to(torch.promote_types(vector.dtype, torch.float32)))
    return dataclasses.replace(kernel, localization=gamma, scale=scale)


def localization_tensor(localization: Localization, space: Space, like: Tensor) -> float | Tensor:
    """γ as a number, or as a vector (P,) where it differs between parameters.

    A key of a mapping is the name of a parameter or of a layer, or a glob of either.
    """
    require_localization(localization)
    if isinstance(localization, Tensor):
        require_shape(localization, (space.size,), "localization")
        return localization.to(like)
    if not isinstance(localization, Mapping):
        return float(localization)
    gamma = torch.zeros_like(like)
    for pattern, value in localization.items():
        match = matcher(pattern)
        names = [name for name in space.names if match(name) or match(name.rpartition(".")[0])]
        some = ", ".join(space.names[:6]) + (", …" if len(space.names) > 6 else "")
        expected = f"name parameters, layers or globs of them among {some}"
        require(bool(names), "localization", expected, repr(pattern))
        for name in names:
            gamma[space.slices[name]] = float(value)
    return gamma


@dataclass(frozen=True)
class SamplingRun:
    """Chains and λ̂ read off them; ``spent`` says that the gradients ran out before the tolerance
    was reached.

    ``full`` is λ̂ from the losses over the whole data beside the paired one, where both were asked
    for, and ``ties`` Σγ_i(w_i − w*_i)² of the draws, (chains, draws), where γ differs between
    parameters.
    """

    chains: Chains
    reading: ChainReading
    spent: bool = False
    full: ChainReading | None = None
    ties: Array | None = None

    @property
    def estimate(self) -> Estimate:
        """λ̂ with its error, without the noise and bias that the kernel allows to remove."""
        chains, reading = self.chains, self.reading
        dof = degrees_of_freedom(chains)
        return Estimate(reading.value, reading.stderr, chains.cost, chains.status, dof)


@dataclass(frozen=True)
class SamplingRequest:
    """The settings of ``llc`` that a caller gave; those that are None are tuned in a pilot run.

    ``limit`` is the number of gradients that each chain may take, ``tuned`` says whether a pilot
    tunes the step size, and ``effort`` is the share of the usual draws before a standard error is
    trusted: less for a loose tolerance.
    """

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
    limit: int | None = field(init=False, default=None)
    tuned: bool = field(init=False, default=True)
    effort: float = field(init=False, default=1.0)

    def __post_init__(self) -> None:
        require_count(self.chains, "chains")
        require_choice(self.baseline, "baseline", BASELINES)
        for name, least in (("draws", 8), ("burn_in", 0), ("max_gradients", 100)):
            if getattr(self, name) is not None:
                require_count(getattr(self, name), name, least)
        step = self.step_size
        if step is not None:
            fine = isinstance(step, int | float) and not isinstance(step, bool) and step >= 0
            require(fine, "step_size", "be a number of at least 0", describe(step))
        if self.tol is not None:
            require_positive(self.tol, "tol")
        names = sorted(KERNELS, key=lambda name: name != "kinetic")  # the default first
        if isinstance(self.kernel, str):
            require_choice(self.kernel, "kernel", names)
        elif self.kernel is not None:
            expected = f"be one of {', '.join(names)}, or a kernel"
            require_type(self.kernel, Kernel, "kernel", expected)
            others = {"step_size": self.step_size, "localization": self.localization}
            given = ", ".join(name for name, value in others.items() if value is not None)
            expected = "be a name where the settings are given apart"
            got, cure = f"a kernel and {given}", "set them in the kernel"
            require(not given, "kernel", expected, got, cure)
        derived: dict[str, Any] = {"tuned": step is None and not isinstance(self.kernel, Kernel)}
        if self.max_gradients is not None:
            derived["limit"] = self.max_gradients // self.chains
        if self.tol is not None:
            derived["effort"] = min(max(TOL[0] / self.tol, LEAST_EFFORT), 1.0)
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @property
    def goal(self) -> str:
        """The tolerance in words."""
        tol = TOL[0] if self.tol is None else self.tol
        return f"until the standard error is {tol:.3g} of the value"

    def share(self, chains: Chains) -> float:
        """The share that there is of the effective draws from which on a standard error is trusted,
        1 at most; 0 for chains that have not mixed.
        """
        if np.ptp(chains.energies) == 0:  # a constant loss: nothing fluctuates to be underrated
            return 1.0
        if chains.diagnostics.rhat > RHAT:
            return 0.0
        return min(1.0, chains.diagnostics.ess_mean / (self.effort * EFFECTIVE * len(chains)))

    def is_met(self, reading: ChainReading, share: float = 1.0) -> bool:
        """Whether the standard error is within a ``share`` of the tolerance, and settled."""
        tol, least = TOL if self.tol is None else (self.tol, 0.0)
        allowed = share * tol * max(abs(reading.value), least)
        return reading.stderr <= allowed and not (reading.drifting or reading.unsettled)
