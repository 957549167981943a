"""Which way of running the chains is fastest here: together, one by one, in processes, or in a
CUDA graph.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from lambdahat._core.check import require, require_choice
from lambdahat.problem import Problem
from lambdahat.problem.batches import rng_untouched
from lambdahat.sampling.cuda_graphs import GraphRunner
from lambdahat.sampling.fitting import Demand, pieces_within
from lambdahat.sampling.gradients import OneByOne, Together
from lambdahat.sampling.kernels import Kernel
from lambdahat.sampling.runners import Ground, Plan, Runner
from lambdahat.sampling.spread import SpreadRunner, require_same_run
from lambdahat.sampling.unfolded import has_unfoldable
from lambdahat.sampling.workers import ForkedRunner, processes_available

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


def make_runner(
    problem: Problem, kernel: Kernel, chains: int, plan: Plan, mode: str = "auto"
) -> tuple[AnyRunner, str]:
    """A runner in the mode asked for, or in the fastest, and the mode's name.

    Small problems run "batched" and are not timed, so that their numbers depend on the seed alone;
    beyond, the modes that work are timed once over a few steps. Modes differ in rounding only. On
    many processes each rank runs its share of the chains, on all data.
    """
    require_choice(mode, "mode", MODES)
    ranks = problem.ranks
    if ranks.size == 1:
        return _made(problem, kernel, range(chains), plan, mode)
    require_same_run(problem, kernel, chains, plan)
    own = range(chains)[ranks.rank :: ranks.size]
    runner, found = _made(problem.alone(), kernel, own or range(1), plan, mode)
    slowest = int(ranks.least(MODES.index(found), "the mode of the chains", problem.device))
    return SpreadRunner(problem, runner, own, chains), MODES[slowest]


def _made(
    problem: Problem, kernel: Kernel, numbers: Sequence[int], plan: Plan, mode: str
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
    makers = _makers(Ground(problem, plan, kernel.exact), kernel, numbers)
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
        runner = _working(makers["batched"]) if "batched" in makers else None
        return (runner, "batched") if runner is not None else (makers["sequential"](), "sequential")
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


def _makers(ground: Ground, kernel: Kernel, numbers: Sequence[int]) -> Makers:
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


def _working(make: Callable[[], Runner | ForkedRunner]) -> Runner | ForkedRunner | None:
    """The runner, or None where the model cannot be mapped or captured."""
    try:
        with rng_untouched():
            make().skip(1)
            return make()
    except Failure:  # running out of memory is one, and one by one the chains may fit
        return None


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
