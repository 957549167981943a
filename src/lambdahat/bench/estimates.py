"""Rows: the trace to one per cent, the ten largest eigenvalues, and a density, each from a fresh
start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lambdahat.bench import exact
from lambdahat.bench.limits import Limit
from lambdahat.bench.peers import Peer, Traced
from lambdahat.bench.plans import Plan, rows
from lambdahat.bench.problems import Case
from lambdahat.bench.records import OURS, UNIT, BenchRow
from lambdahat.bench.timing import Maker, Run, Timed
from lambdahat.estimators import eigenpairs, spectrum, trace
from lambdahat.operators.curvature import hessian

TOP, ACCURACY = 10, 0.01
PROBES = 16  # of a trace whose error falls as 1/√probes: its time is scaled to the accuracy
# products of a trace whose error falls faster: the first that is accurate is timed
LADDER = (8, 16, 32, 64, 128)
# Lanczos steps for each eigenvalue, likewise, and what is accurate in float32
STEPS, NEAR = (2, 3, 4, 6, 8), 1e-5


def estimate_rows(plan: Plan) -> Iterator[list[BenchRow]]:
    """Traces, eigenvalues and densities; those of LeNet-5 without peers, which take minutes
    there on a CPU.
    """
    for name in ("mlp", "lenet5", "tanh"):
        yield trace_rows(plan, plan.case(name))
    for name in ("mlp",) if plan.quick else ("mlp", "lenet5"):
        alone = name == "lenet5" and not plan.gpu
        truth = exact.top_eigenvalues(plan.case(name), 3 if plan.quick else TOP)
        yield _eigenvalue_rows(plan, plan.case(name), truth, alone)
        yield _density_rows(plan, plan.case(name), float(truth[0]), alone)
    if plan.gpu and not plan.quick:
        yield _density_rows(plan, plan.case("vgg16"), math.nan, alone=True)
        with _tf32():
            found = _density_rows(
                plan, replace(plan.case("vgg16"), name="vgg16, TF32"), math.nan, alone=True
            )
        yield found


def trace_rows(plan: Plan, case: Case) -> list[BenchRow]:
    """tr H with a standard error of one per cent, which is a 95 % interval of 1.96 per cent either
    side.

    A peer does not know when to stop. Where it samples, its time of a few probes is scaled to a
    standard error of one per cent. Else it is given 8, 16, 32, … products until the answer is
    within one per cent of the truth, and only the last run counts: nobody without the truth would
    be as quick.
    """
    truth = exact.trace(case)
    makers: dict[str, Maker] = {UNIT: lambda: case.gradient}
    makers[OURS] = lambda: (
        lambda: Traced(float(trace(hessian(case.problem()), tol=1.96 * ACCURACY)))
    )
    notes: dict[str, str] = {}
    for peer in plan.able("trace"):
        makers[peer.name] = partial(_peer_trace, peer, case, truth, notes, plan.quick)
    timed = plan.timed(makers)
    timed |= {
        name: _scaled(name, one, truth, notes) for name, one in timed.items() if _sampled(one)
    }

    def error(found: Traced) -> float:
        return ACCURACY if found.stderr else abs(found.value / truth - 1)

    work = f"trace to {ACCURACY * 100:.0f} %"
    # an answer three standard errors off would be a fault, one would not
    return rows(
        work,
        case.name,
        timed,
        least=plan.limit(work, case),
        error=error,
        accuracy=3 * ACCURACY,
        notes=notes,
    )


def _sampled(one: Timed) -> bool:
    return isinstance(one.value, Traced) and bool(one.value.stderr)


def _scaled(name: str, one: Timed, truth: float, notes: dict[str, str]) -> Timed:
    """The time of as many probes as bring the standard error to the accuracy."""
    factor = max((one.value.stderr / (ACCURACY * abs(truth))) ** 2, 1 / PROBES)
    notes[name] = f"{PROBES} probes timed, scaled to {math.ceil(factor * PROBES):,}"
    return replace(one, seconds=one.seconds * factor, cost=one.cost * factor)


def _peer_trace(
    peer: Peer, case: Case, truth: float, notes: dict[str, str], quick: bool
) -> Callable[[], Traced]:
    if peer.exact_trace:
        return partial(peer.trace, case, 0)
    for products in LADDER[:3] if quick else LADDER:
        found = peer.trace(case, products)
        if found.stderr is not None:
            return partial(peer.trace, case, PROBES)
        if abs(found.value / truth - 1) <= ACCURACY:
            break
    else:
        notes[peer.name] = f"{products} products, not within {ACCURACY:.0%} yet"
        return partial(peer.trace, case, products)
    notes[peer.name] = f"{products} products"
    return partial(peer.trace, case, products)


def _eigenvalue_rows(plan: Plan, case: Case, truth: Tensor, alone: bool) -> list[BenchRow]:
    top = len(truth)

    def ours() -> Tensor:
        # a residual of 1e-7 of the largest gives each to about 1e-6
        return torch.as_tensor(eigenpairs(hessian(case.problem()), k=top, tol=1e-7).values)

    def error(found: Tensor) -> float:
        return float((found.cpu().double() / truth - 1).abs().max())

    notes: dict[str, str] = {}

    def peers_own(peer: Peer) -> Callable[[], Tensor]:
        """A peer that does not know when to stop is given few steps, then more, until it is near
        the truth.
        """
        if not peer.steps_given:
            return partial(peer.top_eigenvalues, case, top)
        for steps in STEPS:
            run = partial(peer.top_eigenvalues, case, top, steps * top)
            if error(run()) <= NEAR:
                break
        notes[peer.name] = f"{steps * top} steps"
        return run

    timed = _against(plan, case, "top_eigenvalues", ours, alone, peers_own)
    work = f"top-{top} eigenvalues"
    return rows(
        work,
        case.name,
        timed,
        least=plan.limit(work, case),
        error=error,
        accuracy=1e-4,
        notes=notes,
    )


def _density_rows(plan: Plan, case: Case, truth: float, alone: bool) -> list[BenchRow]:
    """One probe. The error is that of the upper end, against λ₁: what else the probe shows is
    chance.
    """
    depth = 20 if plan.quick else 100

    def ours() -> tuple[Tensor, Tensor]:
        found = spectrum(hessian(case.problem()), depth=depth, probes=1, seed=0)
        return torch.as_tensor(found.nodes).flatten(), torch.as_tensor(found.weights).flatten()

    def error(found: tuple[Tensor, Tensor]) -> float:
        points, masses = (part.cpu().double() for part in found)
        return abs(float(points[masses > 0].max()) / truth - 1)

    timed = _against(
        plan, case, "density", ours, alone, lambda peer: partial(peer.density, case, depth)
    )
    work = f"density, depth {depth}"
    least = plan.limit(work, case, depth, "HVP")
    if torch.backends.cudnn.allow_tf32:  # the rates of the machine are those of float32
        least = Limit(least.units, least.why)
    return rows(work, case.name, timed, least=least, error=error)


@contextmanager
def _tf32() -> Iterator[None]:
    """Products of matrices and convolutions inside may round to TF32; outside, in the benchmark,
    none does.
    """
    flags: tuple[Any, ...] = torch.backends.cuda.matmul, torch.backends.cudnn
    for flag in flags:
        flag.allow_tf32 = True
    try:
        yield
    finally:
        for flag in flags:
            flag.allow_tf32 = False


def _against(
    plan: Plan, case: Case, method: str, ours: Run, alone: bool, peers_own: Callable[[Peer], Run]
) -> dict[str, Timed]:
    """Ours and, unless ``alone``, the peers that have the method."""
    makers: dict[str, Maker] = {UNIT: lambda: case.gradient, OURS: lambda: ours}
    for peer in [] if alone else plan.able(method):
        makers[peer.name] = partial(peers_own, peer)
    return plan.timed(makers)
