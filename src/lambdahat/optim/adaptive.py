"""Adaptive optimisers: Padam, PadamW and Gadam (chapters 6 and 7, spectral thesis)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lambdahat._core import check
from lambdahat.optim.averaging import OwnsAverage, averaging_settings
from lambdahat.optim.descent import evaluate, group_settings, require_dense, require_real
from lambdahat.optim.registry import register_optimizer

FORMS = ("adamw", "coded", "printed")
# torch's own names, so that tools that read Adam's state read this one
MOMENTS = ("exp_avg", "exp_avg_sq")


@register_optimizer("padam")
class Padam(Optimizer):
    """θ ← θ − α·m̂/(√v̂ + ε)^{2p} with m̂, v̂ bias-corrected as in Adam (Chen and Gu, 2018; p = ½
    is Adam).

    ``weight_decay`` is added to the gradient, or with ``decoupled=True`` shrinks θ by 1 − αλ before
    the step (Loshchilov and Hutter, 2019). ``amsgrad`` divides by the largest v so far. ``form``
    chooses where the bias correction sits in the Gadam chapter of the spectral thesis:

    - ``"adamw"``: as above; p = ½ is torch's Adam(W);
    - ``"coded"``: α·√(1−β₂ᵗ)/(1−β₁ᵗ)·m/(√v + ε)^{2p}, as in the thesis's code;
    - ``"printed"``: Algorithm 9, gᵗ/(1−β₁ᵗ) and gᵗ²/(1−β₂ᵗ) inside the recursions and α·m/(v +
      ε)^p.

    ``capturable=True`` keeps the step count on the device, for a step captured in a CUDA graph.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> weight.grad = torch.tensor([1.0, -4.0])
    >>> Padam([weight], lr=0.1, p=0.5).step()
    >>> weight.detach()
    tensor([0.9000, 1.1000])
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.1,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        p: float = 0.125,
        amsgrad: bool = True,
        decoupled: bool = False,
        form: str = "adamw",
        capturable: bool = False,
    ) -> None:
        names = ("lr", "betas", "eps", "weight_decay", "p", "amsgrad", "decoupled", "form")
        super().__init__(params, group_settings(locals(), *names, capturable=capturable))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        group = {**self.defaults, **param_group}
        lr, betas = group["lr"], group["betas"]
        if isinstance(lr, Tensor):
            expected = "be a number, or one tensor with capturable=True"
            check.require(group["capturable"] and lr.numel() == 1, "lr", expected, lr)
        else:
            check.require_number(lr, "lr", "[0, inf)")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {check.describe(betas)}")
        check.require_number(group["eps"], "eps", "[0, inf)")
        check.require_number(group["weight_decay"], "weight_decay", "[0, inf)")
        power = check.require_positive(group["p"], "p", "SGD with momentum is the limit p → 0")
        check.require(power <= 0.5, "p", "lie in (0, ½]", repr(power), "Adam is p = ½")
        check.require_choice(group["form"], "form", FORMS)
        super().add_param_group(param_group)
        require_real(self.param_groups[-1]["params"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self._advance(closure)

    def _advance(self, closure: Callable[[], Any] | None) -> Any:
        """One step of every group, and the closure's loss."""
        loss = evaluate(closure)
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            require_dense(p.grad for p in params)
            captured = params[0].is_cuda and torch.cuda.is_current_stream_capturing()
            if captured and not group["capturable"]:
                raise ValueError("capturable must be True for a step in a CUDA graph, got False")
            for p in params:
                self._begin(p, group)
            self._update(params, group)
        return loss

    def _begin(self, p: Tensor, group: dict[str, Any]) -> None:
        """The state of a parameter seen for the first time."""
        state = self.state[p]
        if "step" in state:
            return
        place = p.device if group["capturable"] else "cpu"
        state["step"] = torch.zeros((), dtype=torch.float32, device=place)
        for name in (*MOMENTS, *(["max_exp_avg_sq"] if group["amsgrad"] else [])):
            state[name] = torch.zeros_like(p)

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        grads = [p.grad for p in params if p.grad is not None]
        steps, m, v = ([self.state[p][name] for p in params] for name in ("step", *MOMENTS))
        lr, (beta1, beta2), printed = group["lr"], group["betas"], group["form"] == "printed"
        torch._foreach_add_(steps, 1)
        # item: they are on the host
        counts = steps if group["capturable"] else [step.item() for step in steps]
        first, second = [1 - beta1**t for t in counts], [1 - beta2**t for t in counts]
        if group["weight_decay"] and group["decoupled"]:
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        elif group["weight_decay"]:
            grads = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
        torch._foreach_lerp_(m, torch._foreach_div(grads, first) if printed else grads, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        scaled = torch._foreach_div(grads, second) if printed else grads
        torch._foreach_addcmul_(v, grads, scaled, 1 - beta2)
        if group["amsgrad"]:
            largest = [self.state[p]["max_exp_avg_sq"] for p in params]
            torch._foreach_maximum_(largest, v)
            v = largest
        below = _denominators(v, second, group)
        if group["form"] == "adamw":
            sizes = [-lr / c for c in first]
        elif printed:
            sizes = [-lr] * len(first)
        else:
            sizes = [-lr * d**0.5 / c for c, d in zip(first, second, strict=True)]
        if group["capturable"]:  # addcdiv takes no tensors as factors
            torch._foreach_addcdiv_(params, m, torch._foreach_div(below, sizes))
        else:
            torch._foreach_addcdiv_(params, m, below, sizes)


@register_optimizer("padamw")
class PadamW(Padam):
    """``Padam`` with decoupled weight decay: θ ← (1 − αλ)θ − α·m̂/(√v̂ + ε)^{2p} (§7.8)."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.1,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 3e-4,
        *,
        p: float = 0.125,
        amsgrad: bool = True,
        form: str = "adamw",
        capturable: bool = False,
    ) -> None:
        own = group_settings(locals(), "p", "amsgrad", "form", "capturable")
        super().__init__(params, lr, betas, eps, weight_decay, decoupled=True, **own)


def _denominators(v: list[Tensor], second: list[Any], group: dict[str, Any]) -> list[Tensor]:
    """(√v̂ + ε)^{2p}, (√v + ε)^{2p} or (v + ε)^p, as ``form`` says; ``second`` holds 1 − β₂ᵗ."""
    if group["form"] == "printed":
        below, exponent = torch._foreach_add(v, group["eps"]), group["p"]
    else:
        below, exponent = torch._foreach_sqrt(v), 2 * group["p"]
        if group["form"] == "adamw":
            torch._foreach_div_(below, [c**0.5 for c in second])
        torch._foreach_add_(below, group["eps"])
    if exponent != 1:
        torch._foreach_pow_(below, exponent)
    return list(below)


@register_optimizer("gadam")
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


@register_optimizer("gadamx")
class GadamX(Gadam):
    """``Gadam`` with partially adaptive steps (p = 0.125) and AMSGrad; p = ½ is AdamW."""

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
        names = ("average_start", "average_every", "patience", "p", "amsgrad", "form")
        own = group_settings(locals(), *names)
        super().__init__(params, lr, betas, eps, weight_decay, **own)


@register_optimizer("gadam-auto")
class GadamAuto(Gadam):
    """``Gadam`` that decides when to start averaging and when to stop, at a constant rate (§7.8.7,
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
