"""The quantities of ``lh.measure``: their registry, their settings, and the units of their cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lambdahat._core.check import describe, require, require_choice, require_count
from lambdahat.operators.base import LinearOperator
from lambdahat.operators.curvature import fisher, ggn, gradient_covariance, hessian
from lambdahat.problem import Problem

CURVATURES: dict[str, Callable[[Problem], LinearOperator]] = {
    "hessian": hessian,
    "ggn": ggn,
    "fisher": fisher,
    "empirical_fisher": lambda problem: fisher(problem, "empirical"),
    "covariance": gradient_covariance,
}


SAMPLING = (
    "chains",
    "draws",
    "burn_in",
    "batch_size",
    "nbeta",
    "localization",
    "step_size",
    "kernel",
    "tol",
    "max_gradients",
)


@dataclass(frozen=True)
class MeasureSettings:
    """What decides the numbers, beside the problem: ``depth`` and ``probes`` of the spectrum,
    ``top`` eigenpairs.

    ``sampling`` holds settings of ``llc`` by name, as it takes them, in numbers and text so that
    they can be stored; other quantities that need chains take them too.
    """

    curvature: str = "hessian"
    depth: int = 100
    probes: int = 1
    top: int = 10
    seed: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_choice(self.curvature, "curvature", CURVATURES)
        for name in ("depth", "probes", "top"):
            require_count(getattr(self, name), name)
        require_count(self.seed, "seed", least=0)
        for name, value in self.sampling.items():
            require_choice(name, "sampling", SAMPLING, "these are settings of llc")
            parts = value.values() if isinstance(value, Mapping) else [value]
            plain = all(isinstance(part, int | float | str) for part in parts)
            expected, got = "be a number, a text, or a dict of names to numbers", describe(value)
            require(plain, f"sampling[{name!r}]", expected, got, "call lh.llc for more", TypeError)


@dataclass(frozen=True)
class Work:
    """What a quantity costs: ``fewest`` to ``most`` units of work, and memory for its vectors.

    ``unit`` is "products" with the operator, "gradients" on ``samples`` samples each, or "losses"
    over all data.
    """

    fewest: int
    most: int
    vectors_bytes: int
    unit: str = "products"
    samples: int = 0


Compute = Callable[[Problem, LinearOperator, MeasureSettings], Any]
Forecast = Callable[[Problem, LinearOperator, MeasureSettings], Work]


@dataclass(frozen=True)
class MeasuredQuantity:
    """Something that can be measured: ``compute`` gives the result, ``work`` forecasts its cost."""

    compute: Compute
    work: Forecast

    def __call__(
        self, problem: Problem, operator: LinearOperator, settings: MeasureSettings
    ) -> Any:
        return self.compute(problem, operator, settings)


QUANTITIES: dict[str, MeasuredQuantity] = {}


def quantity(name: str, compute: Compute) -> Callable[[Forecast], Forecast]:
    """Register what ``compute`` measures; the decorated function forecasts its cost.

    Both take the problem, the curvature operator and the settings. ``lh.measure``, the command line
    and ``--dry-run`` know every registered quantity.
    """

    def register(work: Forecast) -> Forecast:
        QUANTITIES[name] = MeasuredQuantity(compute, work)
        return work

    return register


def products(operator: LinearOperator, fewest: int, most: int, vectors: int) -> Work:
    """The work of ``fewest`` to ``most`` products, with ``vectors`` vectors in memory at once."""
    return Work(fewest, most, vectors * operator.dim * operator.dtype.itemsize)
