"""Which way of running the chains is fastest here: together, one by one, in processes, or in a CUDA graph."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from lambdahat._check import require, require_choice
from lambdahat.batches import rng_untouched
from lambdahat.problem import Problem
from lambdahat.sampling.cuda_graphs import GraphRunner
from lambdahat.sampling.gradients import OneByOne, Together
from lambdahat.sampling.kernels import Kernel
from lambdahat.sampling.runners import Ground, Plan, Runner
from lambdahat.sampling.unfolded import has_unfoldable
from lambdahat.sampling.workers import ForkedRunner, processes_available

MODES = ("auto", "batched", "sequential", "processes", "graph")
SMALL = 2_000_000  # multiply-adds of a gradient (P × samples) up to which "batched" is taken untimed
TIMED_STEPS = 4
MEMORY = 'The chains do not fit into memory together: mode="sequential" needs least, a larger accumulate less.'

AnyRunner = Runner | ForkedRunner
Failure = (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError, IndexError)


def make_runner(problem: Problem, kernel: Kernel, chains: int, plan: Plan, mode: str = "auto") -> tuple[AnyRunner, str]:
    """A runner in the mode asked for, or in the fastest, and the mode's name.

    Small problems run "batched" and are not timed, so that their numbers depend on the seed alone; beyond, the modes
    that work are timed once over a few steps. Modes differ in rounding only.
    """
    require_choice(mode, "mode", MODES)
    makers = _makers(Ground(problem, plan, kernel.exact), kernel, chains)
    if mode != "auto":
        require(mode in makers, "mode", f"be one of {', '.join(makers)} for this problem and kernel", repr(mode),
                _why_not(mode))  # fmt: skip
        return makers[mode](), mode
    if "graph" in makers and not plan.looks:
        runner = _working(makers["graph"])
        if runner is not None:
            return runner, "graph"
    samples = problem.num_samples if kernel.exact else min(plan.batch_size or 512, problem.num_samples)
    if problem.num_parameters * samples <= SMALL or problem.device.type == "cuda":
        runner = _working(makers["batched"]) if "batched" in makers else None
        return (runner, "batched") if runner is not None else (makers["sequential"](), "sequential")
    return _fastest(makers)


def _makers(ground: Ground, kernel: Kernel, chains: int) -> dict[str, Callable[[], AnyRunner]]:
    """The modes that the problem and kernel leave open."""
    problem, source, numbers = ground.problem, ground.source, range(chains)
    found: dict[str, Callable[[], AnyRunner]] = {
        "sequential": lambda: Runner(ground, kernel, numbers, OneByOne(problem))
    }
    if source is None or source.shared or source.by_sample:
        found["batched"] = lambda: Runner(ground, kernel, numbers, Together(problem))
        if problem.device.type == "cuda" and source is not None and source.by_sample and not ground.plan.looks:
            found["graph"] = lambda: GraphRunner(ground, kernel, numbers, Together(problem, has_unfoldable(problem)))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = min(chains, cores)
    if processes_available(problem) and processes > 1:
        found["processes"] = lambda: ForkedRunner(ground, kernel, numbers, processes)
    return found


def _why_not(mode: str) -> str:
    return {
        "graph": "a CUDA graph needs a CUDA problem, a kernel that never rejects, and nothing looked at draw by draw",
        "processes": "processes need fork, several cores and chains, and a CPU problem before CUDA is used",
        "batched": "chains can share a call only where batches can be drawn sample by sample",
    }.get(mode, "")


def _working(make: Callable[[], AnyRunner]) -> AnyRunner | None:
    """The runner, or None where the model cannot be mapped or captured."""
    try:
        with rng_untouched():
            make().skip(1)
            return make()
    except torch.OutOfMemoryError as error:
        error.add_note(MEMORY)
        raise
    except Failure:
        return None


def _fastest(makers: dict[str, Callable[[], AnyRunner]]) -> tuple[AnyRunner, str]:
    """The mode whose steps take least time."""
    times: dict[str, float] = {}
    for name, make in makers.items():
        runner = None
        try:
            runner = make()
            runner.skip(1)
            start = time.perf_counter()
            runner.skip(TIMED_STEPS)
            times[name] = time.perf_counter() - start
        except torch.OutOfMemoryError as error:
            error.add_note(MEMORY)
            raise
        except Failure:
            if name == "sequential":
                raise
        finally:
            if runner is not None:
                runner.close()
    best = min(times, key=lambda name: times[name])
    return makers[best](), best
