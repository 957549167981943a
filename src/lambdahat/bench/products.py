"""Rows: a repeated Hessian– and GGN–vector product, and one with a block of vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from lambdahat._core.rng import generator
from lambdahat.bench import exact
from lambdahat.bench.plans import Plan, rows
from lambdahat.bench.problems import Case
from lambdahat.bench.records import OURS, UNIT, BenchRow
from lambdahat.bench.timing import Maker, Run
from lambdahat.operators.curvature import ggn, hessian

COLUMNS = 8
WORKS = {"hvp": "HVP", "ggn": "GGN product", "block": f"HVP, block of {COLUMNS}"}


def product_rows(plan: Plan) -> Iterator[list[BenchRow]]:
    """Each product on each network."""
    networks = ("mlp", "lenet5") if plan.quick or not plan.gpu else ("mlp", "lenet5", "vgg16")
    for name in networks:
        for work in WORKS:
            if not (work == "block" and name == "vgg16"):
                yield _measured(plan, plan.case(name), work)


def _measured(plan: Plan, case: Case, work: str) -> list[BenchRow]:
    block = work == "block"
    shape = (case.num_parameters, COLUMNS) if block else (case.num_parameters,)
    v = torch.randn(shape, generator=generator(0, "bench vector")).to(case.device)
    operator = {"hvp": hessian, "ggn": ggn, "block": hessian}[work]
    makers: dict[str, Maker] = {UNIT: lambda: case.gradient}
    makers[OURS] = lambda: partial(operator(case.problem()).__matmul__, v)
    for peer in plan.able(work):
        makers[peer.name] = partial(_applied, getattr(peer, work), case, v)
    timed = plan.timed(makers, long=case.name == "vgg16")
    kind = "GGN product" if work == "ggn" else "HVP"
    least = plan.limit(WORKS[work], case, COLUMNS if block else 1, kind)
    error = _error(case, work, v[:, 0] if block else v)
    return rows(WORKS[work], case.name, timed, least=least, error=error, accuracy=1e-3)


def _applied(make: Callable[[Case], Callable[[Tensor], Tensor]], case: Case, v: Tensor) -> Run:
    return partial(make(case), v)


def _error(case: Case, work: str, v: Tensor) -> Callable[[Tensor], float]:
    """The relative error of a product, or of a block's first column, against double backward in
    float64.
    """
    reference = exact.gauss_newton_product if work == "ggn" else exact.product
    truth = reference(exact.double(case), v.double())

    def error(found: Tensor) -> float:
        first = found[:, 0] if found.ndim == 2 else found
        return float((first.double() - truth).norm() / truth.norm())

    return error
