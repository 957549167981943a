"""What a measurement would take: its forecast work, at the measured price of one unit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lambdahat._quantities import CURVATURES, QUANTITIES, MeasureSettings
from lambdahat.krylov import random_vector
from lambdahat.operators.base import LinearOperator
from lambdahat.operators.curvature import Curvature
from lambdahat.problem import Problem

HEADER = ("quantity", "products", "time", "memory for vectors")


@dataclass(frozen=True)
class CostForecast:
    """Products, seconds and bytes that one quantity takes, between ``fewest`` and ``most``
    products.

    Of chains it is gradients, over all of them, and ``unit`` says so.
    """

    quantity: str
    fewest: int
    most: int
    seconds_fewest: float
    seconds_most: float
    vectors_bytes: int
    unit: str = "products"

    def row(self) -> tuple[str, str, str, str]:
        """In words."""
        if self.most == 0:
            return self.quantity, "0, closed form", "a few gradients", size(self.vectors_bytes)
        products = (
            f"{self.fewest:,}" if self.fewest == self.most else f"{self.fewest:,} to {self.most:,}"
        )
        products += "" if self.unit == "products" else f" {self.unit}"
        low, high = duration(self.seconds_fewest), duration(self.seconds_most)
        return (
            self.quantity,
            products,
            low if low == high else f"{low} to {high}",
            size(self.vectors_bytes),
        )


@dataclass(frozen=True)
class OneProduct:
    """The seconds of setting up an operator and of one product; ``graph_bytes`` stay in use."""

    setup_seconds: float
    seconds: float
    graph_bytes: int

    def __str__(self) -> str:
        return (
            f"one product took {duration(self.seconds)}, setting up {duration(self.setup_seconds)};"
            f" graphs kept between products: {size(self.graph_bytes)}"
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


def forecast(
    problem: Problem, what: Sequence[str], settings: MeasureSettings
) -> tuple[OneProduct, list[CostForecast]]:
    """One product of the operator, and what each quantity would take at that price."""
    operator = CURVATURES[settings.curvature](problem)
    first = one_product(operator, settings.seed)
    rows = []
    for name in what:
        work = QUANTITIES[name].work(problem, operator, settings)
        if work.unit == "products":
            price = first.seconds
        elif work.unit == "gradients":
            price = _one_gradient(problem, work.samples, settings.seed)
        else:
            start = time.perf_counter()
            problem.loss()
            price = time.perf_counter() - start
        low, high = price * work.fewest, price * work.most
        rows.append(
            CostForecast(name, work.fewest, work.most, low, high, work.vectors_bytes, work.unit)
        )
    return first, rows


def _one_gradient(problem: Problem, samples: int, seed: int) -> float:
    """Seconds of a gradient on so many samples, the second of two."""
    part = (
        problem.subsample(samples, seed)
        if samples < problem.num_samples and problem.norm != "train"
        else problem
    )
    for _ in range(2):
        start = time.perf_counter()
        float(part.gradient().norm())  # a number, so that a GPU has finished
    return time.perf_counter() - start


def as_document(first: OneProduct, rows: Sequence[CostForecast]) -> dict[str, Any]:
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
