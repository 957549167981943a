"""How chains run: together, one by one, in processes, or in a CUDA graph."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lambdahat._core.check import require, require_choice
from lambdahat._core.device import beside, side_stream
from lambdahat.operators.linearise import repeated
from lambdahat.problem import Problem
from lambdahat.problem.batches import free_memory, rng_untouched, take
from lambdahat.problem.checkpointing import recomputing
from lambdahat.problem.distributed import in_a_group
from lambdahat.problem.memory import PASS, LiveBytes, rows_within
from lambdahat.sampling.backends.chain_runner import (
    ChainPlan,
    ChainSetup,
    OneByOne,
    Readings,
    Runner,
    Together,
    has_unfoldable,
)
from lambdahat.sampling.backends.minibatches import Minibatches, default_batch
from lambdahat.sampling.backends.workers import ForkedRunner, SpreadRunner, require_same_run
from lambdahat.sampling.diagnostics import probed_alone
from lambdahat.sampling.kernels import HMC, Kernel

SHARE = 0.5  # of the free memory, where the problem has no budget
# of a budget, for chains in one call: a mapped pass is not measured, but estimated from the passes
# of its chains
SLACK = 0.8
# vectors that chains share: θ, the centre of the run, of its state, of the probe and of the probe's
# state
COMMON = 5
ROOM = 512  # steps whose traces are kept on the device before they are read
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


class GraphRunner(Runner):
    """A runner whose steps replay one captured step; traces are written on the device."""

    def __init__(
        self,
        setup: ChainSetup,
        kernel: Kernel,
        chains: Sequence[int],
        gradients: Together | OneByOne,
    ) -> None:
        super().__init__(setup, kernel, chains, gradients)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._room = max(ROOM, self.plan.thin)
        shape = (len(self.traces), len(self.chains), self._room)
        self._traces = torch.zeros(shape, dtype=torch.float64, device=self.problem.device)
        self._place = torch.zeros(1, dtype=torch.int64, device=self.problem.device)
        self._capture()

    def retune(self, kernel: Kernel) -> None:
        super().retune(kernel)
        self._capture()

    def restart(self, chains: Sequence[int] | None = None) -> None:
        super().restart(chains)
        self._capture()

    def resize(self, batch_size: int, accumulate: int) -> None:
        super().resize(batch_size, accumulate)
        self._capture()

    def skip(self, steps: int) -> None:
        for start in range(0, steps, self._room):
            self._replay(min(self._room, steps - start))

    def advance(self, draws: int, observe: bool = True) -> Readings:
        parts, thin = [], self.plan.thin
        while draws > 0:
            now = min(draws, self._room // thin)
            self._replay(now * thin)
            parts.append(self._traces[:, :, thin - 1 : now * thin : thin].cpu())
            draws -= now
        return dict(zip(self.traces, torch.cat(parts, dim=2), strict=True))

    def _replay(self, steps: int) -> None:
        """Take steps, whose traces are written from the beginning."""
        assert self._graph is not None
        self._place.zero_()
        for _ in range(steps):
            self._graph.replay()
        self.gradients_spent += steps
        self.state.steps += steps

    def _step_into_traces(self) -> None:
        values = torch.stack([value.double() for value in self._step()])
        self._traces.index_copy_(2, self._place, values.unsqueeze(2))
        self._place.add_(1)

    @repeated()
    def _capture(self) -> None:
        """Capture one step; state, traces and random numbers stay as they were."""
        before = [tensor.clone() for tensor in self._tensors()]
        streams = self.rng.generators + ([] if self.source is None else self.source.generators)
        marks = [stream.get_state() for stream in streams]
        spent, steps = self.gradients_spent, self.state.steps
        self._place.zero_()
        self._graph = None  # and its memory, before the next takes as much
        side = side_stream(self.problem.device)
        with beside(self.problem.device, side):
            for _ in range(3):
                self._step_into_traces()
        fresh = self._tensors()[len(before) :]  # what the kernel made at its first step
        self._graph = torch.cuda.CUDAGraph()
        for stream in streams:
            self._graph.register_generator_state(stream)
        with torch.cuda.graph(self._graph, stream=side):
            self._step_into_traces()
        for tensor, value in zip(self._tensors(), before, strict=False):
            tensor.copy_(value)
        for tensor in fresh:
            tensor.zero_()
        for stream, mark in zip(streams, marks, strict=True):
            stream.set_state(mark)
        self.gradients_spent, self.state.steps = spent, steps

    def _tensors(self) -> list[Tensor]:
        return [self.state.position, self.bounded, *self.state.memory.values()]


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
        plan = replace(plan, accumulate=max(pieces, pieces_within(problem, samples)))
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
    setup = ChainSetup(problem, plan, centre, loss, source)
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
