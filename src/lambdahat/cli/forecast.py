"""What a measurement would cost, from one measured product."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lambdahat.estimators.eigen import basis_capacity, default_budget, is_small
from lambdahat.estimators.sequential import LARGEST_DEFAULT, MINIMUM
from lambdahat.estimators.variances import COPIES, PROBES, samples_at_once
from lambdahat.krylov import random_vector
from lambdahat.measuring import CURVATURES, Settings
from lambdahat.operators.base import LinearOperator
from lambdahat.operators.closed_form import MAX_ROUNDS, MIN_ROUNDS
from lambdahat.operators.curvature import MANY_FACTORS, Curvature, GaussNewton, Hessian
from lambdahat.operators.output_factors import samples_separate
from lambdahat.problem import Problem

HEADER = ("quantity", "products", "time", "memory for vectors")


@dataclass(frozen=True)
class Forecast:
    """Products, seconds and bytes that one quantity takes, between ``fewest`` and ``most`` products."""

    quantity: str
    fewest: int
    most: int
    seconds_fewest: float
    seconds_most: float
    vectors_bytes: int

    def row(self) -> tuple[str, str, str, str]:
        """In words."""
        if self.most == 0:
            return self.quantity, "0, closed form", "a few gradients", size(self.vectors_bytes)
        products = f"{self.fewest:,}" if self.fewest == self.most else f"{self.fewest:,} to {self.most:,}"
        low, high = duration(self.seconds_fewest), duration(self.seconds_most)
        return self.quantity, products, low if low == high else f"{low} to {high}", size(self.vectors_bytes)


Plan = Callable[[LinearOperator, Settings], tuple[int, int, int]]
"""(operator, settings) -> the fewest and the most products, and how many vectors are held at once."""


def _sampled(operator: LinearOperator, settings: Settings) -> tuple[int, int, int]:
    """A pilot at least, and then until the tolerance or the default limit."""
    return min(MINIMUM, operator.dim), min(2 * operator.dim, LARGEST_DEFAULT), min(operator.dim, 256)


def _closed_form(operator: LinearOperator, settings: Settings) -> tuple[int, int, int]:
    """None where the structure gives the answer, as that of a ReLU network's Hessian does."""
    near = _near(operator)
    if near is not None and near.factors is not None:
        return 0, 0, 2
    return 0, *_sampled(operator, settings)[1:]


def _trace(operator: LinearOperator, settings: Settings) -> tuple[int, int, int]:
    """Where a network has many classes, rounds of sampled targets, each about a product; else the closed form."""
    near = _near(operator)
    loss = None if near is None else near.problem.loss_function
    many = near is not None and (near.factors is None or near.factors.count > MANY_FACTORS)
    if many and near is not None and loss is not None and loss.likelihood and samples_separate(near.problem):
        return MIN_ROUNDS, MAX_ROUNDS, 2
    return _closed_form(operator, settings)


def _near(operator: LinearOperator) -> GaussNewton | None:
    """The Gauss–Newton matrix that an operator is or, being a Hessian without curved outputs, equals."""
    if isinstance(operator, Hessian) and not operator.curved_because():
        operator = operator.control() or operator
    return operator if isinstance(operator, GaussNewton) else None


def _pairs(count: int | None = None) -> Plan:
    def plan(operator: LinearOperator, settings: Settings) -> tuple[int, int, int]:
        pairs = min(count or settings.top, operator.dim)
        if is_small(operator, pairs):
            return operator.dim, operator.dim, operator.dim
        return pairs, default_budget(pairs), basis_capacity(operator, pairs) + 1

    return plan


def _lanczos(operator: LinearOperator, settings: Settings) -> tuple[int, int, int]:
    depth = min(settings.depth, operator.dim)
    return depth * settings.probes, depth * settings.probes, depth + 1


def _variance(operator: LinearOperator, settings: Settings) -> tuple[int, int, int]:
    """Passes over the data: two of gradients, and each probe's Hessian and Gauss–Newton products."""
    assert isinstance(operator, Curvature)
    rounds = min(PROBES, operator.dim)
    passes = 2 + rounds * (1 if operator.problem.loss_function is None else 2)
    return passes, passes, COPIES * samples_at_once(operator.problem.vector)


def _sharpness(operator: LinearOperator, settings: Settings) -> tuple[int, int, int]:
    """One eigenpair, and the gradients of the ascent."""
    fewest, most, vectors = _pairs(1)(operator, settings)
    return fewest, most + 50, vectors


def _by_weight(operator: LinearOperator, settings: Settings) -> tuple[int, int, int]:
    """Two traces of each weight."""
    weights = 1 if operator.space is None else sum(len(shape) > 1 for shape in operator.space.shapes)
    _, most, vectors = _sampled(operator, settings)
    return 0, 2 * weights * most, vectors


PLANS: dict[str, Plan] = {
    "trace": _trace,
    "frobenius": _sampled,
    "diagonal": _closed_form,
    "spectral_norm": _pairs(1),
    "eigenpairs": _pairs(),
    "gradient_overlap": _pairs(),
    "spectrum": _lanczos,
    "variance": _variance,
    "sharpness": _sharpness,
    "relative_sharpness": _by_weight,
    "fisher_rao": lambda *_: (1, 1, 2),
}


@dataclass(frozen=True)
class OneProduct:
    """What setting up an operator and making one product took; ``graph_bytes`` stay in use between products."""

    setup_seconds: float
    seconds: float
    graph_bytes: int

    def __str__(self) -> str:
        return (
            f"one product took {duration(self.seconds)}, setting up {duration(self.setup_seconds)}; "
            f"graphs kept between products: {size(self.graph_bytes)}"
        )


def one_product(operator: LinearOperator, seed: int = 0) -> OneProduct:
    """Set the operator up, make one product, and take the time of each."""
    vector = random_vector(operator, seed, "forecast").to(operator.dtype)
    start = time.perf_counter()
    graphs = operator.kept_batches * operator.graph_bytes if isinstance(operator, Curvature) else 0
    ready = time.perf_counter()
    operator @ vector
    if operator.device.type == "cuda":
        torch.cuda.synchronize(operator.device)
    return OneProduct(ready - start, time.perf_counter() - ready, graphs)


def forecast(problem: Problem, what: Sequence[str], settings: Settings) -> tuple[OneProduct, list[Forecast]]:
    """One product of the operator, and what each quantity would take at that price."""
    operator = CURVATURES[settings.curvature](problem)
    first = one_product(operator, settings.seed)
    item = torch.empty(0, dtype=operator.dtype).element_size()
    rows = []
    for name in what:
        fewest, most, vectors = PLANS[name](operator, settings)
        times = first.seconds * fewest, first.seconds * most
        rows.append(Forecast(name, fewest, most, *times, vectors * operator.dim * item))
    return first, rows


def as_document(first: OneProduct, rows: Sequence[Forecast]) -> dict[str, Any]:
    """For --json."""
    return {**asdict(first), "forecast": [asdict(row) for row in rows]}


def duration(seconds: float) -> str:
    """Seconds in words: "12 ms", "3.4 s", "5 min", "2.1 h"."""
    for limit, unit, factor in ((1.0, "ms", 1e3), (120.0, "s", 1.0), (7200.0, "min", 1 / 60)):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds / 3600:.3g} h"


def size(count: float) -> str:
    """Bytes in words: "3.2 MB"."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
