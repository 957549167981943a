"""Chains over several processes: forked workers, or the ranks of a process group."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from lambdahat._core.check import require
from lambdahat.problem import Problem
from lambdahat.sampling.backends.chain_runner import (
    ChainPlan,
    ChainSetup,
    OneByOne,
    Readings,
    Runner,
)
from lambdahat.sampling.kernels import Kernel, KroneckerScale


def ending_with(parent: int) -> Callable[[], None]:
    """A function that makes the process in which it is called end soon after its ``parent`` has
    ended, even by SIGKILL.

    A thread checks who the parent is: when a process ends, its children get another one, on Linux
    and on macOS. The signal that Linux can send instead comes when the thread that started the
    child ends, which may be earlier. The function is defined inside another so that it is pickled
    by value: then a child that has not yet imported torch is watched, too.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)  # nobody is left to tell

    def begin() -> None:
        name = f"end with {parent}"
        if not any(thread.name == name for thread in threading.enumerate()):
            threading.Thread(target=watch, name=name, daemon=True).start()

    return begin


class ForkedRunner:
    """Runners in child processes, each with its share of the chains; they answer over pipes.

    The interface is that of ``Runner``; all processes work at the same time.
    """

    def __init__(
        self, setup: ChainSetup, kernel: Kernel, chains: Sequence[int], processes: int
    ) -> None:
        self.setup, self.kernel = setup, kernel
        self.chains = self.own = tuple(chains)
        shares = [share for share in (self.chains[i::processes] for i in range(processes)) if share]
        places = [self.chains.index(chain) for share in shares for chain in share]
        self._order = torch.tensor(places).argsort()
        context = multiprocessing.get_context("fork")
        self._pipes, self._children = [], []
        for share in shares:
            ours, theirs = context.Pipe()
            ends = theirs, ours, os.getpid()
            child = context.Process(target=_serve, args=(*ends, setup, kernel, share), daemon=True)
            # Python 3.12 warns of threads; the child takes one only, its own
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                child.start()
            theirs.close()
            self._pipes.append(ours)
            self._children.append(child)

    def __getattr__(self, name: str) -> Any:
        """What the runners have by this name; a method is called in all of them."""
        if name.startswith("_"):  # of their own alone
            raise AttributeError(name)
        if callable(getattr(Runner, name, None)):
            return partial(self._joined, name)
        return self._joined(name)

    def _joined(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Rows in the order of the chains; a number, the same in all processes, once."""
        parts = self._all(name, *arguments, **options)
        if isinstance(parts[0], dict):
            return {key: torch.cat([part[key] for part in parts])[self._order] for key in parts[0]}
        return torch.cat(parts)[self._order] if isinstance(parts[0], Tensor) else parts[0]

    def gather(self, rows: Tensor) -> Tensor:
        return rows

    def retune(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._all("retune", kernel)

    def close(self) -> None:
        """End the worker processes."""
        for pipe in self._pipes:
            pipe.close()
        for child in self._children:
            child.join(timeout=1)
            if child.is_alive():  # amid a step, which nobody waits for any more
                child.kill()
                child.join()
        self._pipes, self._children = [], []

    def __del__(self) -> None:
        self.close()

    def _all(self, name: str, *arguments: Any, **options: Any) -> list[Any]:
        """Ask every process, then collect, so that they work at the same time."""
        try:
            for pipe in self._pipes:
                pipe.send((name, arguments, options))
            replies = [pipe.recv() for pipe in self._pipes]
        except (EOFError, OSError) as error:
            for child in self._children:
                child.join(timeout=0.2)
            codes = [child.exitcode for child in self._children if child.exitcode is not None]
            raise RuntimeError(
                f"a sampling process ended (exit code {', '.join(map(str, codes))}), perhaps killed"
                ' for memory; mode="sequential" needs least'
            ) from error
        what, cure = "sampling in processes", 'mode="sequential" shows where'
        for fine, answer in replies:
            require(fine, what, "succeed", str(answer), cure, RuntimeError)
        return [answer for _, answer in replies]


def _serve(
    pipe: Connection, other: Connection, parent: int, setup: ChainSetup, kernel: Kernel, chains: Any
) -> None:
    """The child: answer until the parent closes the pipe or is gone."""
    other.close()
    ending_with(parent)()
    # Ctrl-C is for the parent, which then closes the pipe
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    runner: Runner | None = None
    with suppress(EOFError, OSError):
        while True:
            name, arguments, options = pipe.recv()
            try:
                if runner is None:
                    runner = Runner(setup, kernel, chains, OneByOne(setup.problem))
                member = getattr(runner, name)
                answer = True, member(*arguments, **options) if callable(member) else member
            except Exception:
                answer = False, traceback.format_exc(limit=-3)
            pipe.send(answer)


class SpreadRunner:
    """Chains of which this rank's ``runner`` advances those numbered ``own``; their readings are
    gathered on every rank.

    All else is that of the rank's runner. A rank without a chain of its own runs the first once
    more, and its readings are not used.
    """

    def __init__(
        self, problem: Problem, runner: Runner | ForkedRunner, own: Sequence[int], chains: int
    ) -> None:
        self._problem, self._runner = problem, runner
        self.chains, self.own = tuple(range(chains)), tuple(own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    @property
    def positions(self) -> Tensor:
        return self._runner.positions[: len(self.own)]

    @property
    def bounded(self) -> Tensor:
        return self.gather(self._runner.bounded)

    def advance(self, draws: int, observe: bool = True) -> Readings:
        return self._gather(self._runner.advance(draws, observe))

    def noise(self, batches: int) -> Readings:
        return self._gather(self._runner.noise(batches))

    def forces(self) -> Readings:
        return self._gather(self._runner.forces())

    def _gather(self, readings: Readings) -> Readings:
        """The readings of all chains from those of this rank, by one all-reduce."""
        rows = [values.reshape(len(values), -1).double() for values in readings.values()]
        whole = self.gather(torch.cat(rows, dim=1).to(self._problem.device)).cpu()
        parts = whole.split([values[0].numel() for values in readings.values()], dim=1)
        return {
            name: part.reshape(-1, *values.shape[1:]).to(values.dtype)
            for (name, values), part in zip(readings.items(), parts, strict=True)
        }

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all chains, from those of this rank's."""
        what = f"{type(self.kernel).__name__} chains at step {self.steps}"
        return self._problem.ranks.gather(rows[: len(self.own)], self.own, len(self.chains), what)


def require_same_run(problem: Problem, kernel: Kernel, chains: int, plan: ChainPlan) -> None:
    """Raise where the ranks are about to sample with different settings."""
    settings: dict[str, Any] = {
        field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)
    }
    settings["observables"], settings["averages"] = sorted(plan.observables), sorted(plan.averages)
    shown = {field.name: getattr(kernel, field.name) for field in dataclasses.fields(kernel)}
    tensors = [value for value in shown.values() if isinstance(value, Tensor)]
    if isinstance(kernel.scale, KroneckerScale):
        tensors += kernel.scale.tensors
        shown["scale"] = "Kronecker"
    numbers = {name: value for name, value in shown.items() if not isinstance(value, Tensor)}
    facts = {
        "seed": plan.seed,
        "chains": chains,
        "options": f"{settings}",
        "kernel": f"{type(kernel).__name__} {numbers}",
        "the kernel's tensors": tensors,
    }
    problem.ranks.agree("sampling", facts, problem.device)
