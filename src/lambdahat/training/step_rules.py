"""How far an optimiser's steps are from instability: its rates and preconditioner as a diagonal,
and its threshold.

A step θ ← θ − α·D⁻¹g on a quadratic with Hessian H is stable while λ₁(A½ H A½) < 2, A =
diag(α_i/d_i). Momentum moves the threshold (Cohen et al. 2021, Eq. 1; 2022, §2):

    heavy ball, b ← βb + (1 − τ)g:     2(1 + β)/(1 − τ)
    Nesterov:                          2(1 + β)/(1 + 2β)
    averaged, m ← β₁m + (1 − β₁)g:     2(1 + β₁)/(1 − β₁), 38 at β₁ = 0.9
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, RMSprop

from lambdahat._core.check import describe, require
from lambdahat.operators.base import LinearOperator
from lambdahat.optim.adaptive import Padam
from lambdahat.optim.spectral_sgd import SpectralSGD
from lambdahat.problem import Problem

Group = Mapping[str, Any]


@dataclass(frozen=True)
class StepRule:
    """The linearised step: ``rates`` α_i/d_i (P,), 0 where nothing moves; ``decay`` (P,)."""

    rates: Tensor
    decay: Tensor
    threshold: float


class PreconditionedCurvature(LinearOperator):
    """A½ (H + W) A½, W the coupled weight decay: its top eigenvalue is lr times sharpness."""

    def __init__(self, inner: LinearOperator, rule: StepRule) -> None:
        super().__init__(
            inner.dim, inner.dtype, inner.device, symmetric=inner.symmetric, psd=inner.psd
        )
        self.inner = inner
        self.root = rule.rates.sqrt().to(inner.device, inner.dtype)[:, None]
        self.decay = rule.decay.to(inner.device, inner.dtype)[:, None]

    def _apply(self, block: Tensor) -> Tensor:
        scaled = self.root * block
        moved: Tensor = (self.inner @ scaled) + self.decay * scaled
        return self.root * moved


def step_rule(problem: Problem, optimizer: Any) -> StepRule:
    """The rule of an optimiser in its present state, in the order of the problem's vector."""
    base = innermost(optimizer)
    family = _family(base)
    rates = torch.zeros(problem.num_parameters, dtype=torch.float64)
    decay, places = torch.zeros_like(rates), _places(problem, base)
    thresholds, held = [], 0
    for group in base.param_groups:
        if group.get("maximize", False):
            raise ValueError("optimizer must minimise, got a group with maximize=True")
        thresholds.append(family.threshold(group))
        for parameter in group["params"]:
            where = places.get(id(parameter))
            if where is None:
                continue
            held += 1
            size = family.scale(group, base.state.get(parameter, {})).double().cpu()
            rates[where] = (learning_rate(base, group) / size).expand(parameter.shape).reshape(-1)
            decay[where] = 0.0 if family.decoupled(group) else float(group.get("weight_decay", 0.0))
    cure = "make the problem of the model that is trained"
    require(held != 0, "optimizer", "hold parameters of the problem", "none of them", cure)
    return StepRule(rates, decay, min(thresholds))


def innermost(optimizer: Any) -> Any:
    """The optimiser within wrappers such as Lookahead (``base``)."""
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {describe(optimizer)}; the tracker"
            " needs its learning rate"
        )
    while hasattr(optimizer, "base"):
        optimizer = optimizer.base
    return optimizer


def learning_rate(optimizer: Any, group: Group) -> float:
    """α of a group; an optimiser that measures its own gives it by ``rate(group)``."""
    own = getattr(optimizer, "rate", None)
    return float(own(group) if callable(own) else group["lr"])


def _places(problem: Problem, optimizer: Any) -> dict[int, slice]:
    """The place of each optimiser parameter in the problem's vector, by identity or by shape."""
    slices = problem.space.slices
    if problem.model is not None:
        named = dict(problem.model.named_parameters())
        return {id(named[name]): where for name, where in slices.items() if name in named}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if [tuple(parameter.shape) for parameter in held] != list(problem.space.shapes):
        raise ValueError(
            "optimizer must hold the problem's parameters, in their order, got"
            f" {', '.join(str(tuple(parameter.shape)) for parameter in held[:4])}"
        )
    return {id(parameter): where for parameter, where in zip(held, slices.values(), strict=True)}


@dataclass(frozen=True)
class _Family:
    """Optimisers of one form: the diagonal d of a parameter, the threshold, decoupled decay."""

    scale: Callable[[Group, Mapping[str, Any]], Tensor]
    threshold: Callable[[Group], float]
    decoupled: Callable[[Group], bool]


def _family(optimizer: Any) -> _Family:
    for kind, family in _FAMILIES.items():
        if isinstance(optimizer, kind):
            return family
    raise TypeError(
        "optimizer must be SGD, Adam, AdamW, RMSprop, Padam or one of their kin, got"
        f" {type(optimizer).__name__}; for others no diagonal preconditioner is known"
    )


def _sgd_limit(group: Group) -> float:
    beta = float(group.get("momentum", 0.0))
    if group.get("nesterov", False):
        return 2 * (1 + beta) / (1 + 2 * beta)
    return 2 * (1 + beta) / (1 - (float(group.get("dampening", 0.0)) if beta else 0.0))


def _adam_limit(group: Group) -> float:
    beta = float(group["betas"][0])
    return 2 * (1 + beta) / (1 - beta)


def _adam_scale(group: Group, state: Mapping[str, Any]) -> Tensor:
    """(1 − β₁ᵗ)·(√v̂ + ε)^{2p}: with it m, not m̂, is the momentum (Cohen et al. 2022)."""
    moment, first, second = _moments(group, state)
    root: Tensor = (moment / second).sqrt() + float(group["eps"])
    return first * root.pow(2 * float(group.get("p", 0.5)))


def _padam_scale(group: Group, state: Mapping[str, Any]) -> Tensor:
    """The same, or as the other two forms of ``Padam`` place the corrections."""
    if group["form"] == "adamw":
        return _adam_scale(group, state)
    moment, first, second = _moments(group, state)
    power, eps = float(group["p"]), float(group["eps"])
    scale: Tensor = (moment + eps).pow(power)
    if group["form"] == "coded":
        scale = (moment.sqrt() + eps).pow(2 * power) / second**0.5
    return first * scale


def _moments(group: Group, state: Mapping[str, Any]) -> tuple[Tensor, float, float]:
    """The second moment that divides, and the two corrections 1 − βᵗ."""
    moment = _entry(state, "max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq")
    first, second = (1 - float(beta) ** float(_entry(state, "step")) for beta in group["betas"])
    return moment.double(), first, second


def _rmsprop_scale(group: Group, state: Mapping[str, Any]) -> Tensor:
    square: Tensor = _entry(state, "square_avg").double()
    if group.get("centered"):
        square = square - _entry(state, "grad_avg").double().square()
    return square.clamp_min(0.0).sqrt() + float(group["eps"])


def _entry(state: Mapping[str, Any], key: str) -> Any:
    cure = "its preconditioner is not known yet"
    require(key in state, "optimizer", "have taken a step", "one without state", cure)
    return state[key]


_PLAIN = _Family(lambda *_: torch.ones((), dtype=torch.float64), _sgd_limit, lambda _: False)
_FAMILIES: dict[type, _Family] = {  # the narrower class first
    SGD: _PLAIN,
    SpectralSGD: _PLAIN,
    AdamW: _Family(_adam_scale, _adam_limit, lambda group: True),
    Adam: _Family(
        _adam_scale, _adam_limit, lambda group: bool(group.get("decoupled_weight_decay"))
    ),
    Padam: _Family(_padam_scale, _adam_limit, lambda group: bool(group["decoupled"])),
    RMSprop: _Family(_rmsprop_scale, _sgd_limit, lambda group: False),
}
