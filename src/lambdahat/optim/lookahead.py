"""Lookahead around any optimiser, with gradient centralisation where asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lambdahat._core.check import require, require_count
from lambdahat.optim.wrapping import Wrapper


class Lookahead(Wrapper):
    """k steps of ``base``, then θ ← φ + α(θ − φ), φ the weights before them (Zhang et al., 2019).

    α = 1 is ``base``. Around an optimiser that averages its iterates it rests once averaging has
    begun, so that ``Lookahead(Gadam(…))`` is the spectral thesis's Gadam + LH (§7.8.5).
    ``centralize`` first takes the mean over all axes but the first from every gradient of more than
    one axis (Yong et al., 2020; §7.10.1).
    """

    OWN = ("slow",)

    def __init__(
        self, base: Optimizer, k: int = 5, alpha: float = 0.5, *, centralize: bool = False
    ) -> None:
        require_count(k, "k")
        require(0 < alpha <= 1, "alpha", "lie in (0, 1]", repr(alpha))
        settings = {
            "lookahead_k": k,
            "lookahead_alpha": alpha,
            "lookahead_step": 0,
            "centralize": centralize,
        }
        super().__init__(base, settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is None:
            self._centralize()
        for group in self.param_groups:
            if group["lookahead_step"] % group["lookahead_k"] == 0 and not self._resting:
                for p in group["params"]:
                    self.state[p]["slow"] = p.detach().clone()
        loss = self.base.step(None if closure is None else self._centralized(closure))
        for group in self.param_groups:
            group["lookahead_step"] += 1
            if (
                group["lookahead_step"] % group["lookahead_k"] == 0
                and group["params"]
                and not self._resting
            ):
                slow = [self.state[p]["slow"] for p in group["params"]]
                torch._foreach_lerp_(group["params"], slow, 1 - group["lookahead_alpha"])
        return loss

    @property
    def _resting(self) -> bool:
        return bool(getattr(self.base, "averaging", False))

    def _centralized(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            loss = closure()
            self._centralize()
            return loss

        return evaluate

    @torch.no_grad()
    def _centralize(self) -> None:
        for group in self.param_groups:
            if group["centralize"]:
                grads: list[Tensor] = [
                    p.grad for p in group["params"] if p.grad is not None and p.grad.dim() > 1
                ]
                for grad in grads:
                    grad.sub_(grad.mean(dim=tuple(range(1, grad.dim())), keepdim=True))
