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
    Record,
    Runner,
    Together,
    has_unfoldable,
)
from lambdahat.sampling.backends.workers import ForkedRunner, SpreadRunner, require_same_run
from lambdahat.sampling.diagnostics import probed_alone
from lambdahat.sampling.kernels import HMC, Kernel

SHARE = 0.5  # of the free memory, where the problem has no budget
# of a budget, for chains together: what a mapped pass takes is not measured but made of those of
# chains
SLACK = 0.8
# vectors that chains share: θ, the centre of the run, of its state, of the probe and of the probe's
# state
COMMON = 5
ROOM = 512
MODES = ("auto", "batched", "sequential", "processes", "graph")
# multiply-adds of a gradient (P × samples) up to which "batched" is taken untimed
SMALL = 2_000_000
TIMED_STEPS, ROUNDS = 2, 3  # the best of a few rounds counts: another process may disturb one
MEMORY = (
    "Even one by one the chains do not fit into memory: a larger accumulate or a smaller batch_size"
    " needs less."
)
LARGE = 20_000_000  # parameters beyond which chains gain nothing from sharing a call
AnyRunner = Runner | ForkedRunner | SpreadRunner
Makers = dict[str, Callable[[], Runner | ForkedRunner]]
Failure = (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError, IndexError)


@dataclass(frozen=True)
class Demand:
    """What a run of ``chains`` chains of a kernel, with batches of ``samples``, takes by its
    plan.
    """

    problem: Problem
    kernel: Kernel
    chains: int
    samples: int
    plan: ChainPlan

    def together_fits(self, recorded: bool = False) -> bool:
        """Whether all chains in one call, and as a CUDA graph where ``recorded``, fit into
        memory.
        """
        memory = self.problem.memory
        room = SHARE * free_memory(self.problem.device) if memory is None else SLACK * memory
        return self.together(recorded) <= room

    def together(self, recorded: bool = False) -> float:
        """The bytes that all chains in one call take."""
        copied = self._each - 1 if recorded else 0  # all but the gradient
        passes = self.chains * _gradient_bytes(self.problem, self.samples)
        return passes + self._row * (self._held + self.chains * copied)

    def one_by_one(self) -> float:
        """The bytes that chains take whose passes come one by one."""
        # pieces are no larger, and the probe sees whole batches
        largest = self.problem.batches.first().size
        return (
            _gradient_peak(self.problem, largest, self.problem.recomputes) + self._row * self._held
        )

    def require_one_by_one(self) -> None:
        """Raise where the problem's budget does not hold the chains, not even one by one."""
        memory = self.problem.memory
        if memory is not None:
            needed = self.one_by_one()
            require(
                needed <= memory,
                "memory",
                f"be at least {needed:,.0f} bytes for {self.chains} chains of"
                f" {type(self.kernel).__name__}",
                f"{memory:,}",
                "raise it, or run fewer chains",
            )

    @property
    def _row(self) -> int:
        return self.problem.num_parameters * max(self.problem.dtype.itemsize, 4)

    @property
    def _held(self) -> int:
        """Vectors of all chains beside their passes."""
        probed = 1 if probed_alone(self.problem) else self.chains
        return COMMON + self.chains * self._each + probed * self._probe

    @property
    def _each(self) -> int:
        """Vectors of a chain."""
        kernel, plan = self.kernel, self.plan
        summed = len(self.problem.batches) > 1 if kernel.exact else plan.accumulate > 1
        return kernel.vectors(plan.forces) + summed + (plan.bound is not None)

    @property
    def _probe(self) -> int:
        """Vectors of a chain that is probed: it is taken from the others, and its gradients of
        batches are summed.
        """
        if not self.kernel.is_unadjusted_mala:
            return 0
        return (
            1
            + HMC.held
            + self.kernel.vectors(forces=True)
            - self.kernel.held
            + (len(self.problem.batches) > 1)
        )


def pieces_within(problem: Problem, samples: int) -> int:
    """Into how many pieces a batch must be cut so that a chain's pass over one stays within the
    budget; 1 without.
    """
    if problem.memory is None:
        return 1
    # as chains one by one do
    again, most = problem.recomputes, min(samples, problem.batches.first().size)
    one, room = _gradient_peak(problem, 1, again), PASS * problem.memory
    rows = (
        rows_within(lambda count: _gradient_peak(problem, count, again), most, room, one)
        if one < room
        else 1
    )
    return -(-samples // rows)


def _gradient_bytes(problem: Problem, samples: int) -> float:
    """What a gradient on so many samples takes at most: measured on one and two, and on a line
    through both.
    """
    counts = (1, 2)[: min(samples, problem.batches.first().size)]
    peaks = [_gradient_peak(problem, count, again=False) for count in counts]
    return peaks[0] + (samples - 1) * max(peaks[-1] - peaks[0], 0.0)


@torch.enable_grad()
def _gradient_peak(problem: Problem, samples: int, again: bool) -> float:
    """What a gradient on the first samples takes at most; ``again`` runs the parts again that
    the model checkpoints.
    """
    leaves = {
        name: tensor.detach().requires_grad_()
        for name, tensor in problem.named(problem.vector).items()
    }
    few = take(problem.batches.first(), torch.arange(samples, device=problem.device))
    with LiveBytes() as seen, recomputing(again):
        torch.autograd.grad(
            problem.batch_loss(leaves, few), list(leaves.values()), allow_unused=True
        )
    return float(seen.peak)


class GraphRunner(Runner):
    """A runner whose steps are replays of one captured step; the traces are written on the
    device.
    """

    def __init__(
        self,
        ground: ChainSetup,
        kernel: Kernel,
        chains: Sequence[int],
        gradients: Together | OneByOne,
    ) -> None:
        super().__init__(ground, kernel, chains, gradients)
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
        assert self._graph is not None
        for start in range(0, steps, self._room):
            self._place.zero_()
            for _ in range(min(self._room, steps - start)):
                self._graph.replay()
        self._count(steps)

    def advance(self, draws: int, look: bool = True) -> Record:
        parts = []
        while draws > 0:
            now = min(draws, self._room // self.plan.thin)
            parts.append(self._replayed(now))
            draws -= now
        names = parts[0].keys()
        return {name: torch.cat([part[name] for part in parts], dim=1) for name in names}

    def _replayed(self, draws: int) -> Record:
        assert self._graph is not None
        self._place.zero_()
        for _ in range(draws * self.plan.thin):
            self._graph.replay()
        self._count(draws * self.plan.thin)
        last = slice(self.plan.thin - 1, draws * self.plan.thin, self.plan.thin)
        return dict(zip(self.traces, self._traces[:, :, last].cpu(), strict=True))

    def _count(self, steps: int) -> None:
        self.gradients_spent += steps
        self.state.steps += steps

    def _recorded_step(self) -> None:
        values = torch.stack([value.double() for value in self._step()])
        self._traces.index_copy_(2, self._place, values.unsqueeze(2))
        self._place.add_(1)

    def _capture(self) -> None:
        with repeated():
            self._captured()

    def _captured(self) -> None:
        """Record one step; the steps that warm up and record leave no mark on state, traces or
        random numbers.
        """
        before = [tensor.clone() for tensor in self._tensors()]
        streams = self.rng.generators + ([] if self.source is None else self.source.generators)
        marks = [stream.get_state() for stream in streams]
        spent, steps = self.gradients_spent, self.state.steps
        self._place.zero_()
        self._graph = None  # and its memory, before the next takes as much
        side = side_stream(self.problem.device)
        with beside(self.problem.device, side):
            for _ in range(3):
                self._recorded_step()
        fresh = self._tensors()[len(before) :]  # what the kernel made at its first step
        self._graph = torch.cuda.CUDAGraph()
        for stream in streams:
            self._graph.register_generator_state(stream)
        with torch.cuda.graph(self._graph, stream=side):
            self._recorded_step()
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
    problem: Problem, kernel: Kernel, chains: int, plan: ChainPlan, mode: str = "auto"
) -> tuple[AnyRunner, str]:
    """A runner in the mode asked for, or in the fastest, and the mode's name.

    Small problems run "batched" and are not timed, so that their numbers depend on the seed alone;
    beyond, the modes that work are timed once over a few steps. Modes differ in rounding only. On
    many processes each rank runs its share of the chains, on all data.
    """
    require_choice(mode, "mode", MODES)
    ranks = problem.ranks
    if ranks.size == 1:
        return _make_runner(problem, kernel, range(chains), plan, mode)
    require_same_run(problem, kernel, chains, plan)
    own = range(chains)[ranks.rank :: ranks.size]
    runner, found = _make_runner(problem.alone(), kernel, own or range(1), plan, mode)
    slowest = int(ranks.least(MODES.index(found), "the mode of the chains", problem.device))
    return SpreadRunner(problem, runner, own, chains), MODES[slowest]


def _make_runner(
    problem: Problem, kernel: Kernel, numbers: Sequence[int], plan: ChainPlan, mode: str
) -> tuple[Runner | ForkedRunner, str]:
    """A runner of the chains of these numbers in this process.

    By itself it takes one mode only, "sequential", where the chains do not fit into memory
    together, and records nothing where they do but a record does not.
    """
    samples = (
        problem.num_samples if kernel.exact else min(plan.batch_size or 512, problem.num_samples)
    )
    at_once = max(problem.batches.sizes) if kernel.exact else -(-samples // plan.accumulate)
    if problem.memory is not None and not kernel.exact:
        plan = replace(plan, accumulate=max(plan.accumulate, pieces_within(problem, samples)))
    demand = Demand(problem, kernel, len(numbers), at_once, plan)
    demand.require_one_by_one()
    makers = _makers(ChainSetup(problem, plan, kernel.exact), kernel, numbers)
    if mode != "auto":
        require(
            mode in makers,
            "mode",
            f"be one of {', '.join(makers)} for this problem and kernel",
            repr(mode),
            _why_not(mode),
        )
        _require_room(demand, mode)
        return makers[mode](), mode
    small = problem.num_parameters * samples <= SMALL and problem.memory is None
    if not small and (problem.num_parameters > LARGE or not demand.together_fits()):
        return makers["sequential"](), "sequential"
    if "graph" in makers and (small or demand.together_fits(recorded=True)):
        # a model that cannot be mapped or captured fails in the making
        with suppress(*Failure), rng_untouched():
            return makers["graph"](), "graph"
    if small or problem.device.type == "cuda":
        if "batched" in makers:
            # a model that cannot be mapped fails at the first step; running out of memory is a
            # failure too, and one by one the chains may fit
            with suppress(*Failure), rng_untouched():
                makers["batched"]().skip(1)
                return makers["batched"](), "batched"
        return makers["sequential"](), "sequential"
    return _fastest(makers)


def _require_room(demand: Demand, mode: str) -> None:
    """Raise where the mode asked for takes more than the problem's budget."""
    memory = demand.problem.memory
    if memory is not None and mode in ("batched", "graph"):
        needed = demand.together(recorded=mode == "graph")
        require(
            needed <= memory,
            "mode",
            f"fit into the problem's memory, {memory:,} bytes",
            f"{mode!r}, which needs {needed:,.0f}",
            'mode="auto" takes one that fits',
        )


def processes_available(problem: Problem) -> bool:
    """Whether forking is possible: on a system that has it, not once CUDA or a process group, whose
    threads a child would lack, is in use, not within a daemon of a pool.
    """
    free = hasattr(os, "fork") and not multiprocessing.current_process().daemon and not in_a_group()
    return free and problem.device.type == "cpu" and not torch.cuda.is_initialized()


def _makers(ground: ChainSetup, kernel: Kernel, numbers: Sequence[int]) -> Makers:
    """The modes that the problem and kernel leave open."""
    problem, source = ground.problem, ground.source
    found: Makers = {"sequential": lambda: Runner(ground, kernel, numbers, OneByOne(problem))}
    if source is None or source.shared or source.by_sample:
        found["batched"] = lambda: Runner(ground, kernel, numbers, Together(problem))
        if (
            problem.device.type == "cuda"
            and source is not None
            and source.by_sample
            and not ground.plan.looks
        ):
            found["graph"] = lambda: GraphRunner(
                ground, kernel, numbers, Together(problem, has_unfoldable(problem))
            )
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    processes = min(len(numbers), cores)
    if processes_available(problem) and processes > 1:
        found["processes"] = lambda: ForkedRunner(ground, kernel, numbers, processes)
    return found


def _why_not(mode: str) -> str:
    return {
        "graph": (
            "a CUDA graph needs a CUDA problem, a kernel that never rejects, and nothing looked at"
            " draw by draw"
        ),
        "processes": (
            "processes need fork, several cores and chains, a CPU problem, and no CUDA or process"
            " group"
        ),
        "batched": "chains can share a call only where batches can be drawn sample by sample",
    }.get(mode, "")


def _fastest(makers: Makers) -> tuple[Runner | ForkedRunner, str]:
    """The mode whose steps take least time."""
    times: dict[str, float] = {}
    for name, make in makers.items():
        runner = None
        try:
            runner = make()
            runner.skip(1)
            times[name] = min(_seconds(runner) for _ in range(ROUNDS))
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


def _seconds(runner: Runner | ForkedRunner) -> float:
    start = time.perf_counter()
    runner.skip(TIMED_STEPS)
    return time.perf_counter() - start
