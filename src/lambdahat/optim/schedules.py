"""Learning-rate schedules of the papers, as factories of torch's schedulers.

Each returns a ``LambdaLR``: the rate is a closed form of the epoch t = 0, 1, …, so a resumed one
has the same bits. Call its ``step()`` once per epoch; to change the rate every batch, count
``epochs`` in batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from lambdahat._core import check
from lambdahat.optim.registry import require_options


def linear_decay(optimizer: Optimizer, epochs: int, ratio: float = 0.01) -> LRScheduler:
    """α₀ for half of the epochs T, then linearly to α₀r at 0.9·T (Eq. 12, flatness paper)."""
    check.require_count(epochs, "epochs")
    return _piecewise(optimizer, epochs, ratio)


def averaging_decay(
    optimizer: Optimizer, epochs: int, averaging_start: int, ratio: float = 0.5
) -> LRScheduler:
    """The same towards the start T_avg of iterate averaging, then constant at α_avg = α₀·``ratio``
    (Eq. 13).

    The paper prints t/T in the second line; the rate is continuous only with t/T_avg, as here.
    """
    check.require_count(epochs, "epochs")
    check.require_count(averaging_start, "averaging_start", most=epochs)
    return _piecewise(optimizer, averaging_start, ratio)


def step_decay(
    optimizer: Optimizer,
    epochs: int,
    milestones: tuple[int, ...] | None = None,
    factor: float = 0.1,
) -> LRScheduler:
    """α₀ times ``factor`` at each milestone; by default 1/2 and 3/4 (§7.7.2, spectral thesis)."""
    check.require_count(epochs, "epochs")
    check.require_positive(factor, "factor")
    marks = (epochs // 2, 3 * epochs // 4) if milestones is None else tuple(milestones)
    for mark in marks:
        check.require_count(mark, "milestones", least=0)
    return LambdaLR(optimizer, lambda t: factor ** sum(t >= mark for mark in marks))


def cosine(optimizer: Optimizer, epochs: int, ratio: float = 0.0) -> LRScheduler:
    """α₀·[r + (1 − r)·½(1 + cos(πt/T))], constant after T (Loshchilov and Hutter, 2017)."""
    check.require_count(epochs, "epochs")
    low = check.require_number(ratio, "ratio", "[0, 1]")
    return LambdaLR(
        optimizer, lambda t: low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(t / epochs, 1.0)))
    )


def flat(optimizer: Optimizer, epochs: int) -> LRScheduler:
    """α₀ throughout."""
    check.require_count(epochs, "epochs")
    return LambdaLR(optimizer, lambda t: 1.0)


def inverse_sqrt(optimizer: Optimizer, epochs: int) -> LRScheduler:
    """α₀·(t + 1)^(−1/2), the rate of the regret bounds (§7.2, spectral thesis)."""
    check.require_count(epochs, "epochs")
    return LambdaLR(optimizer, lambda t: (t + 1) ** -0.5)


SCHEDULES: dict[str, Callable[..., LRScheduler]] = {
    "flat": flat,
    "linear": linear_decay,
    "averaging": averaging_decay,
    "step": step_decay,
    "cosine": cosine,
    "inverse-sqrt": inverse_sqrt,
}


def make_schedule(name: str, optimizer: Optimizer, epochs: int, **settings: Any) -> LRScheduler:
    """A schedule by its name in ``SCHEDULES``, with the ``settings`` of its factory."""
    make = SCHEDULES[check.require_choice(name, "name", SCHEDULES)]
    require_options(make, name, settings, first=2)
    return make(optimizer, epochs, **settings)


def _piecewise(optimizer: Optimizer, epochs: int, ratio: float) -> LRScheduler:
    low = check.require_number(ratio, "ratio", "[0, 1]")
    return LambdaLR(
        optimizer, lambda t: 1 - (1 - low) * min(max((t / epochs - 0.5) / 0.4, 0.0), 1.0)
    )
