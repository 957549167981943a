"""Optimisers and regularizers by name, with their options checked."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lambdahat._core.check import require, require_choice, require_like
from lambdahat.optim.adaptive import Gadam, GadamAuto, GadamX, Padam, PadamW
from lambdahat.optim.averaging import ASGD, SWA
from lambdahat.optim.exact_ngd import ExactNGD
from lambdahat.optim.kfac import KFAC
from lambdahat.optim.lanczos_newton import LanczosNewton
from lambdahat.optim.ngd import NGD
from lambdahat.optim.regularizers import (
    L1,
    L2,
    Metric,
    SelectiveL2,
    StoppedL2,
    StoppedThenSelectiveL2,
)
from lambdahat.optim.spectral_sgd import SpectralSGD

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "asgd": ASGD,
    "swa": SWA,
    "ngd": NGD,
    "exact-ngd": ExactNGD,
    "kfac": KFAC,
    "lanczos-newton": LanczosNewton,
    "spectral-sgd": SpectralSGD,
    "padam": Padam,
    "padamw": PadamW,
    "gadam": Gadam,
    "gadamx": GadamX,
    "gadam-auto": GadamAuto,
}

REGULARIZERS: dict[str, Callable[..., Any]] = {
    "l1": L1,
    "l2": L2,
    "metric": Metric,
    "selective-l2": SelectiveL2,
    "stopped-l2": StoppedL2,
    "stopped-selective-l2": StoppedThenSelectiveL2,
}


def make_optimizer(name: str, model: nn.Module, **options: Any) -> Optimizer:
    """The optimiser ``name`` of ``OPTIMIZERS`` for all parameters of ``model`` that require a
    gradient.

    >>> type(make_optimizer("gadam", nn.Linear(2, 1), lr=0.01)).__name__
    'Gadam'
    """
    kind = OPTIMIZERS[require_choice(name, "name", OPTIMIZERS)]
    require_options(kind, name, options)
    trained: Any = model if kind is KFAC else [p for p in model.parameters() if p.requires_grad]
    return kind(trained, **options)


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
    """Raise unless the options are those that ``kind`` takes after its ``first`` arguments, and
    all it needs.
    """
    known = dict(list(inspect.signature(kind).parameters.items())[first:])
    names = ", ".join(known)
    for option, value in options.items():
        require(option in known, f"options of {name!r}", f"be among {names}", option)
        require_like(value, known[option].default, option, str(known[option].annotation))
        if option == "lr":
            require(value != math.inf, option, "be a finite number", "inf")
    missing = [
        key
        for key, value in known.items()
        if value.default is inspect.Parameter.empty and key not in options
    ]
    require(
        not missing,
        f"options of {name!r}",
        f"include {', '.join(missing)}",
        ", ".join(options) or "none",
    )
