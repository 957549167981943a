"""The registry of the estimators of an operator, which the contract tests iterate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Estimator:
    """A public estimator ``function(operator, **settings)``, and what it is tested against.

    ``exact`` gives the answer from the dense matrix (P, P), ``read`` the value of a result with its
    standard error. With ``settings`` it samples a matrix of order 300 that is known by its products
    only.
    """

    function: Callable[..., Any]
    exact: Callable[[Tensor], Tensor]
    read: Callable[[Any], tuple[Any, Any]]
    settings: Mapping[str, Any]


ESTIMATORS: dict[str, Estimator] = {}


def _value(estimate: Any) -> tuple[Any, Any]:
    return estimate.value, estimate.stderr


def estimator(
    exact: Callable[[Tensor], Tensor],
    read: Callable[[Any], tuple[Any, Any]] = _value,
    **settings: Any,
) -> Callable[[Function], Function]:
    """Register the decorated estimator, so that ``tests/estimators`` holds it to the contract."""

    def register(function: Function) -> Function:
        ESTIMATORS[function.__name__] = Estimator(function, exact, read, settings)
        return function

    return register
