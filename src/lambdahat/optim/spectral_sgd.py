"""SGD whose learning rate and momentum come from the spectrum of the curvature."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from lambdahat._core.check import require_choice, require_count
from lambdahat._core.rng import derived_seed
from lambdahat.estimators import spectrum
from lambdahat.operators.curvature import ggn, hessian
from lambdahat.optim import descent
from lambdahat.optim.registry import register_optimizer
from lambdahat.problem import Problem
from lambdahat.results import Spectrum

CURVATURES = {"hessian": hessian, "ggn": ggn}
NULL_MASS = 0.5


@register_optimizer("spectral-sgd")
class SpectralSGD(descent.ObservingDescent):
    """SSGDM, and SSGDMN with ``nesterov=True``: SGD at the optimal rate and momentum of the local
    quadratic model.

    Eq. 4.3 of the spectral thesis as corrected, from the extremes λ₁ and λ_P of a Lanczos spectrum
    of ``depth`` steps: heavy ball α = 4/(√λ₁ + √λ_P)², ρ = ((√λ₁ − √λ_P)/(√λ₁ + √λ_P))²; Nesterov α
    = 1/λ₁, ρ = (√λ₁ − √λ_P)/(√λ₁ + √λ_P).

    ``observe(problem)`` measures them, on a batch as large as those of the gradient, whenever
    ``due``: before the first step and then every ``every`` steps (None: only then). A group's "lr"
    multiplies the measured rate, so that schedulers and warm-up work as usual; "rate" and
    "momentum" hold what was measured. Weight decay and momentum are those of ``torch.optim.SGD``.
    """

    OWN = ("depth", "curvature", "seed")

    def __init__(
        self,
        params: Iterable[Any],
        every: int | None = None,
        lr: float = 1.0,
        *,
        nesterov: bool = False,
        depth: int = 20,
        curvature: str = "hessian",
        weight_decay: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.depth = require_count(depth, "depth")
        self.curvature = require_choice(curvature, "curvature", CURVATURES)
        self.seed = require_count(seed, "seed", least=0)
        nesterov = bool(nesterov)
        names = ("lr", "nesterov", "every", "weight_decay")
        own = {"rate": 0.0, "momentum": 0.0, "step": 0, "observed": -1}
        super().__init__(params, descent.group_settings(locals(), *names, **own))

    def check_group(self, group: dict[str, Any]) -> None:
        if group["every"] is not None:
            require_count(group["every"], "every")

    def observe(self, problem: Problem) -> None:
        """Measure the spectrum on a problem of the same model, and set rate and momentum."""
        self.require_same_point(problem)
        first = self.param_groups[0]
        operator = CURVATURES[self.curvature](problem)
        depth = min(self.depth, problem.num_parameters)
        seed = derived_seed(self.seed, "spectral sgd", first["step"])
        low, high = curvature_range(spectrum(operator, depth, seed=seed))
        for group in self.param_groups:
            group["rate"], group["momentum"] = best_rate_and_momentum(low, high, group["nesterov"])
        first["observed"] = first["step"]

    def rate(self, group: dict[str, Any]) -> float:
        return float(group["lr"] * group["rate"])

    def directions(self) -> descent.Directions:
        """The gradients."""
        descent.require_observation(self.param_groups[0]["observed"] >= 0)
        return self.gradients()


def curvature_range(found: Spectrum) -> tuple[float, float]:
    """λ_P and λ₁, the smallest and largest positive Ritz value after the null space is left out.

    §4.3.2 of the spectral thesis: a Ritz value with more than half of the spectral mass stands for
    the null space and is removed, unless no other is positive. The formulas are for convex
    functions, so Ritz values below zero, or that rounding cannot tell from it, do not count either.
    """
    nodes, weights = found.nodes[0], found.weights[0]
    heaviest = int(np.argmax(weights))
    # a Krylov space that ended early has nodes of weight 0
    kept = (nodes > found.resolution) & (weights > 0)
    if weights[heaviest] > NULL_MASS and kept.sum() > kept[heaviest]:
        kept[heaviest] = False
    if not kept.any():
        raise ValueError(
            "the curvature must have a positive eigenvalue beside its null space, got Ritz values"
            f" from {nodes.min():.3g} to {nodes.max():.3g}; observe a larger batch"
        )
    return float(nodes[kept].min()), float(nodes[kept].max())


def best_rate_and_momentum(low: float, high: float, nesterov: bool) -> tuple[float, float]:
    """α and ρ of Eq. 4.3 for curvature in [low, high]."""
    small, large = math.sqrt(low), math.sqrt(high)
    ratio = (large - small) / (large + small)
    return (1.0 / high, ratio) if nesterov else (4.0 / (large + small) ** 2, ratio**2)
