"""Rows: a training step of NGD and KFAC beside one of SGD, and KFAC's inverse from scratch
beside curvlinops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lambdahat._core.rng import generator
from lambdahat.bench import exact
from lambdahat.bench.limits import Limit
from lambdahat.bench.plans import Plan, rows
from lambdahat.bench.records import OURS, UNIT, BenchRow
from lambdahat.bench.timing import Maker, Run
from lambdahat.models import mlp
from lambdahat.operators.kronecker import kfac
from lambdahat.optim import KFAC, NGD
from lambdahat.problem import Problem
from lambdahat.training.ensembles import DEFAULTS, StackedDescent, StackedModel, Stepped

BATCH, STEPS, DAMPING = 128, 40, 1e-2  # 40 steps are whole periods of NGD's 4 and KFAC's 10
SGD = "SGD step"
# in SGD steps, on two CPU cores
GOALS = {"NGD step": 2.2, "KFAC step": 2.5, "KFAC step, rank 32": 2.5}

Optimizers = dict[str, Callable[[nn.Module], Any]]


def optimizer_rows(plan: Plan) -> Iterator[list[BenchRow]]:
    """Whole training steps, forward and backward included, of the perceptron on batches of 128;
    then the inverse.
    """
    sizes = [784, plan.width, plan.width, 10]
    makers: dict[str, Maker] = {
        SGD: lambda: _steps(sizes, lambda m: torch.optim.SGD(m.parameters(), lr=0.01), plan)
    }
    for name, make in _optimizers(plan).items():
        makers[name] = partial(_steps, sizes, make, plan)
    timed = {
        name: replace(one, seconds=one.seconds / _count(plan))
        for name, one in plan.timed(makers, SGD).items()
    }
    for name in _optimizers(plan):
        least = Limit() if plan.gpu or plan.quick else Limit(GOALS[name], "our goal")
        yield rows(
            name,
            "mlp, batch 128",
            {UNIT: timed[SGD], OURS: timed[name]},
            least=least,
            unit="SGD step",
        )
    yield _inverse_rows(plan)
    if plan.gpu:
        yield _stacked_rows(plan, sizes)


def _count(plan: Plan) -> int:
    """Steps of a run."""
    return 4 if plan.quick else STEPS


def _optimizers(plan: Plan) -> Optimizers:
    rank = 4 if plan.quick else 80
    return {
        "NGD step": lambda m: NGD(m.parameters(), lr=0.01, rank=rank, period=4),
        "KFAC step": lambda m: KFAC(m, lr=0.01, damping=DAMPING, inverse_every=10),
        "KFAC step, rank 32": lambda m: KFAC(
            m, lr=0.01, damping=DAMPING, inverse_every=10, rank=32
        ),
    }


def _steps(sizes: list[int], make: Callable[[nn.Module], Any], plan: Plan) -> Run:
    """A function that takes 40 steps; its first call leaves the optimiser's first, denser
    updates behind.
    """
    rng = generator(0, "bench batch")
    x = torch.rand(BATCH, sizes[0], generator=rng).to(plan.device)
    y = torch.randint(0, sizes[-1], (BATCH,), generator=rng).to(plan.device)
    model = mlp(sizes).to(plan.device)
    optimizer = make(model)

    def run() -> None:
        for _ in range(_count(plan)):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()

    return run


def _inverse_rows(plan: Plan) -> list[BenchRow]:
    """(K + δI)⁻¹∇L with the exact Fisher's factors, from scratch."""
    case = plan.case("mlp")
    gradient = case.gradient()
    truth = exact.kronecker_solution(case, gradient, DAMPING)

    def ours() -> Tensor:
        found: Tensor = kfac(case.problem()).inverse(DAMPING) @ gradient
        return found

    def error(found: Tensor) -> float:
        return float((found.double() - truth).norm() / truth.norm())

    makers: dict[str, Maker] = {UNIT: lambda: case.gradient, OURS: lambda: ours}
    for peer in plan.able("kfac"):
        makers[peer.name] = partial(partial, peer.kfac, case, gradient, DAMPING)
    return rows("KFAC, factors and inverse", "mlp", plan.timed(makers), error=error, accuracy=1e-2)


def _stacked_rows(plan: Plan, sizes: list[int]) -> list[BenchRow]:
    """Ten seeds of NGD trained together, as ``fit_many`` does, over one: 40 steps with their
    data, in a CUDA graph.
    """
    makers: dict[str, Maker] = {
        UNIT: partial(_stacked, 1, sizes, plan.device),
        OURS: partial(_stacked, 10, sizes, plan.device),
    }
    timed = {
        name: replace(one, seconds=one.seconds / STEPS) for name, one in plan.timed(makers).items()
    }
    return rows(
        "NGD step of ten seeds",
        "mlp, batch 128",
        timed,
        least=Limit(2.0, "our goal"),
        unit="step of one seed",
    )


def _stacked(members: int, sizes: list[int], device: str) -> Run:
    rng = generator(0, "bench batch")
    x = torch.rand(STEPS * BATCH, sizes[0], generator=rng).to(device)
    data = x, torch.randint(0, sizes[-1], (len(x),), generator=rng).to(device)
    models = [mlp(sizes, seed=seed).to(device) for seed in range(members)]
    stacked = StackedModel(models, Problem(models[0], "cross_entropy", data))
    descent = StackedDescent(
        stacked.parameters, "ngd", {**DEFAULTS["ngd"], "lr": 0.01, "rank": min(80, sizes[1] // 2)}
    )
    stepped = Stepped(stacked, descent, data)
    orders = torch.stack([torch.randperm(len(x), generator=rng) for _ in range(members)]).to(device)
    return lambda: stepped.epoch(orders, BATCH)
