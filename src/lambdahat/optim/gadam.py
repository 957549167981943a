"""Gadam: adaptive steps, decoupled weight decay and iterate averaging (chapter 7, spectral
thesis).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from lambdahat.optim.owned_averages import OwnsAverage, averaging_settings
from lambdahat.optim.padam import PadamW


class Gadam(OwnsAverage, PadamW):
    """AdamW whose iterates are averaged from step ``average_start`` on, every ``average_every``
    steps (Algorithm 9).

    Steps ignore the average; read it with ``average()``, ``averaged_parameters`` or
    ``averaged_model``. Once per epoch from epoch 161 on, as in the thesis, is ``average_start=161 *
    n, average_every=n`` with n steps in an epoch. ``average_start=None`` waits for
    ``start_averaging()`` or, with a ``patience``, for ``record``. ``p``, ``amsgrad`` and ``form``
    are those of ``Padam``; with no averaging this is torch's AdamW.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        average_start: int | None = None,
        average_every: int = 1,
        patience: int | None = None,
        p: float = 0.5,
        amsgrad: bool = False,
        form: str = "adamw",
    ) -> None:
        settings = averaging_settings(average_start, average_every, patience)
        super().__init__(params, lr, betas, eps, weight_decay, p=p, amsgrad=amsgrad, form=form)
        self.defaults.update(settings)
        for group in self.param_groups:
            for name, value in settings.items():
                group.setdefault(name, value)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self._advance(closure)
        self._advance_average()
        return loss


class GadamX(Gadam):
    """``Gadam`` with partially adaptive steps: p = 0.125 and AMSGrad; p = ½ is torch's AdamW
    with ``amsgrad``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 3e-4,
        *,
        average_start: int | None = None,
        average_every: int = 1,
        patience: int | None = None,
        p: float = 0.125,
        amsgrad: bool = True,
        form: str = "adamw",
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            average_start=average_start,
            average_every=average_every,
            patience=patience,
            p=p,
            amsgrad=amsgrad,
            form=form,
        )


class GadamAuto(Gadam):
    """``Gadam`` that finds by itself when to average and when to stop, at a constant rate (§7.8.7,
    spectral thesis).

    After each epoch give ``record`` the validation loss, of ``average()`` once ``averaging`` is
    true. ``patience`` epochs without a new best start the averaging; as many more without one set
    ``stopped``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        average_every: int = 1,
        patience: int = 10,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, average_every=average_every, patience=patience
        )
