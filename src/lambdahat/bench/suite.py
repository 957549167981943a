"""``run``: every family of rows, in one process, reported as each finishes."""

from __future__ import annotations

import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from fnmatch import fnmatch
from functools import partial
from importlib import import_module
from typing import Any

import torch

from lambdahat._core.check import require
from lambdahat._core.progress import report
from lambdahat.bench import rows as families
from lambdahat.bench.chain_rows import chain_rows, devinterp
from lambdahat.bench.peers import PEERS, VERSIONS, installed_version
from lambdahat.bench.plans import Plan
from lambdahat.bench.records import BenchResult, BenchRow

Family = Callable[[Plan], Iterator[list[BenchRow]]]
FAMILIES: dict[str, Family] = {
    "products": families.product_rows,
    "estimates": families.estimate_rows,
    "networks": families.network_rows,
    "chains": chain_rows,
    "optimizers": families.optimizer_rows,
    "determinants": families.determinant_rows,
    "graphs": families.graph_rows,
}
ON_CPU = ("determinants", "graphs")


def run(
    plan: Plan, only: str = "*", watch: Callable[[BenchResult], None] | None = None
) -> BenchResult:
    """All rows of the families that the glob ``only`` matches; ``watch`` sees the result after each
    task.

    Peers draw from the global generator and warn; both are confined to this call, and TF32 is off
    inside it.
    """
    chosen = {name: family for name, family in FAMILIES.items() if fnmatch(name, only)}
    if plan.gpu:  # where these have nothing to do
        chosen = {name: family for name, family in chosen.items() if name not in ON_CPU}
    require(bool(chosen), "only", f"match a family of rows: {', '.join(FAMILIES)}", repr(only))
    about, found = describe_run(plan), list[BenchRow]()
    if plan.peers:
        # import the peers first, so that no import counts as a task's memory or time
        loads = [peer.load for peer in PEERS]
        loads += [partial(devinterp, "slt.sampler"), partial(import_module, "linear_operator")]
        for load in loads:
            with suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                load()
    with _restore_flags(plan):
        about |= {"flops/s": plan.rates.flops, "bytes/s": plan.rates.bytes}
        for number, (name, family) in enumerate(chosen.items()):
            report(f"bench: {name}", number, len(chosen))
            for rows in family(plan):
                found += rows
                if watch is not None:
                    watch(BenchResult(tuple(found), about))
        report("bench", len(chosen), len(chosen))
    return BenchResult(tuple(found), about)


def describe_run(plan: Plan) -> dict[str, Any]:
    """The machine, the versions and the sizes."""
    chip = torch.cuda.get_device_name() if plan.gpu else platform.processor() or platform.machine()
    packages = {peer.name: peer.package for peer in PEERS} | VERSIONS
    versions = {name: installed_version(package) for name, package in packages.items()}
    sizes = {"samples": plan.samples, "batch size": plan.batch_size, "hidden width": plan.width}
    return {
        **asdict(plan),
        "chip": chip,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": " ".join(sys.argv[1:]),
        **sizes,
        "versions": versions if plan.peers else {},
    }


@contextmanager
def _restore_flags(plan: Plan) -> Iterator[None]:
    """Nothing global stays changed. cuDNN searches for the fastest convolution, for everyone."""
    flags: tuple[Any, ...] = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [flag.allow_tf32 for flag in flags], torch.backends.cudnn.benchmark
    devices = [torch.cuda.current_device()] if plan.gpu else []
    with torch.random.fork_rng(devices), warnings.catch_warnings():
        if plan.peers:
            warnings.simplefilter("ignore")
        try:
            for flag in flags:
                flag.allow_tf32 = False
            torch.backends.cudnn.benchmark = True
            yield
        finally:
            for flag, value in zip(flags, before[0], strict=True):
                flag.allow_tf32 = value
            torch.backends.cudnn.benchmark = before[1]
