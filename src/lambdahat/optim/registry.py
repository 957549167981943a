"""Optimisers and regularizers by name, with their options checked."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from lambdahat._core.check import did_you_mean, require, require_choice, require_like

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
}
REGULARIZERS: dict[str, Callable[..., Any]] = {}

Kind = TypeVar("Kind", bound=Callable[..., Any])


def register_optimizer(name: str) -> Callable[[Kind], Kind]:
    """Register an optimiser class under a name, for ``make_optimizer`` and the command line.

    Its first argument takes parameters, or the model if the class says ``takes_model = True``.
    The contract tests run over everything that is registered.
    """
    return partial(_register, OPTIMIZERS, name)


def register_regularizer(name: str) -> Callable[[Kind], Kind]:
    """Register a regularizer under a name, for ``make_regularizer`` and the command line."""
    return partial(_register, REGULARIZERS, name)


def _register(registry: dict[str, Any], name: str, kind: Kind) -> Kind:
    require(name not in registry, "name", "not be taken", repr(name))
    registry[name] = kind
    return kind


def make_optimizer(name: str, model: nn.Module, **options: Any) -> Optimizer:
    """The optimiser ``name`` of ``OPTIMIZERS`` for all parameters of ``model`` that require a
    gradient.

    >>> type(make_optimizer("gadam", nn.Linear(2, 1), lr=0.01)).__name__
    'Gadam'
    """
    kind = OPTIMIZERS[require_choice(name, "name", OPTIMIZERS)]
    require_options(kind, name, options)
    if getattr(kind, "takes_model", False):
        return kind(model, **options)  # type: ignore[arg-type]
    return kind([p for p in model.parameters() if p.requires_grad], **options)


def make_regularizer(name: str, **options: Any) -> Any:
    """The regularizer ``name`` of ``REGULARIZERS``.

    >>> make_regularizer("l2", rate=0.1).rate
    0.1
    """
    kind = REGULARIZERS[require_choice(name, "name", REGULARIZERS)]
    require_options(kind, name, options, first=0)
    return kind(**options)


def require_options(
    kind: Callable[..., Any], name: str, options: Mapping[str, Any], first: int = 1
) -> None:
    """Raise unless ``options`` are what ``kind`` takes after ``first`` arguments, and complete."""
    known = dict(list(inspect.signature(kind).parameters.items())[first:])
    names = ", ".join(known) or "none"
    for option, value in options.items():
        near = did_you_mean(option, known)
        require(option in known, f"options of {name!r}", f"be among {names}", option, near)
        require_like(value, known[option].default, option, str(known[option].annotation))
        if option == "lr":
            require(value != math.inf, option, "be a finite number", "inf")
    required = [key for key, value in known.items() if value.default is inspect.Parameter.empty]
    missing = [key for key in required if key not in options]
    came = ", ".join(options) or "none"
    require(not missing, f"options of {name!r}", f"include {', '.join(missing)}", came)
