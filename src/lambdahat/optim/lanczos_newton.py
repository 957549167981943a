"""Second-order steps from a few Ritz pairs of a curvature batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lambdahat._core.check import describe, require_choice, require_count, require_positive
from lambdahat.krylov import lanczos, random_vector
from lambdahat.operators.curvature import ggn, hessian
from lambdahat.optim import descent
from lambdahat.optim.registry import register_optimizer
from lambdahat.problem import Problem

CURVATURES = {"absolute_hessian": hessian, "ggn": ggn}


@register_optimizer("lanczos-newton")
class LanczosNewton(descent.ObservingDescent):
    """Stochastic Lanczos steps: w ← w − α [Σ_i φ_i φ_iᵀg / (η|λ_i| + δ) + (g − Σ_i φ_i φ_iᵀg) / δ].

    Eq. 6.6 of the spectral thesis (LanczosOPT): (λ_i, φ_i) are the Ritz pairs of ``pairs`` Lanczos
    steps from a random vector on the Hessian, of which the absolute values count (Dauphin et al.
    2014), or on the Gauss–Newton matrix ("ggn"); the rest of the space steps at α/δ. ``eta`` above
    1 shortens the steps in the sharp directions alone: LOPT[η], §6.4.1.

    The pairs come from ``observe(problem)``, on a curvature batch of your choice, whenever ``due``:
    before the first step and then every ``every`` steps. An observation costs ``pairs`` products
    and keeps ``pairs`` vectors. Momentum and weight decay are those of ``torch.optim.SGD``, so that
    with no pairs this is SGD at rate lr/δ.
    """

    OWN = ("pairs", "curvature", "seed", "update_norm")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        damping: float,
        pairs: int = 20,
        *,
        curvature: str = "absolute_hessian",
        every: int = 1,
        eta: float = 1.0,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.pairs = require_count(pairs, "pairs", least=0)
        self.curvature = require_choice(curvature, "curvature", CURVATURES)
        self.seed = require_count(seed, "seed", least=0)
        names = ("lr", "damping", "eta", "every", "momentum", "weight_decay")
        super().__init__(params, descent.group_settings(locals(), *names, step=0, observed=-1))
        self.update_norm: Tensor | None = None

    def check_group(self, group: dict[str, Any]) -> None:
        require_positive(group["damping"], "damping")
        require_positive(group["eta"], "eta")
        require_count(group["every"], "every")

    @property
    def due(self) -> bool:
        """Whether Ritz pairs must be measured again before the next step."""
        return self.pairs > 0 and super().due

    def observe(self, problem: Problem) -> None:
        """Measure the Ritz pairs on a problem of the same model and parameters."""
        parameters = self.require_same_point(problem)
        if self.pairs > problem.num_parameters:
            raise ValueError(
                f"pairs must lie in [0, {problem.num_parameters}], got {describe(self.pairs)}"
            )
        group = self.param_groups[0]
        if self.pairs > 0:
            operator = CURVATURES[self.curvature](problem)
            start = random_vector(operator, self.seed, "lanczos newton", group["step"])
            run = lanczos(operator, start, self.pairs, "lanczos newton")
            values, turn = torch.linalg.eigh(run.tridiagonal)
            vectors = turn.T.to(run.basis) @ run.basis.T
            for parameter, part in zip(parameters, problem.space.split(vectors), strict=True):
                own = part.flatten(1).to(parameter.device, parameter.dtype, copy=True)
                self.state[parameter]["ritz_vectors"] = own
            first = self.all_parameters()[0]
            self.state[first]["ritz_values"] = values.abs().to(first.device)
        group["observed"] = group["step"]

    def directions(self) -> descent.Directions:
        """The preconditioned gradients."""
        found = self.gradients()
        group = self.param_groups[0]
        descent.require_observation(self.pairs == 0 or group["observed"] >= 0)
        if self.pairs:
            steps = self._precondition(found, group["eta"], group["damping"])
        else:
            steps = {parameter: g / group["damping"] for parameter, g in found.items()}
        self.update_norm = descent.total_norm(list(steps.values()))
        return steps

    def _precondition(
        self, gradients: descent.Directions, eta: float, damping: float
    ) -> descent.Directions:
        """Σ_i φ_i φ_iᵀg / (η|λ_i| + δ) + (g − Σ_i φ_i φ_iᵀg) / δ."""
        values = self.state[self.all_parameters()[0]]["ritz_values"]
        rest, inside = {p: g.reshape(-1) for p, g in gradients.items()}, torch.zeros_like(values)
        # twice: Ritz vectors are orthogonal to about √ε, which 1/δ would amplify
        for _ in range(2):
            overlaps = torch.zeros_like(values)
            for parameter, left in rest.items():
                overlaps += (self.state[parameter]["ritz_vectors"] @ left).to(values)
            inside += overlaps
            for parameter, left in rest.items():
                vectors = self.state[parameter]["ritz_vectors"]
                rest[parameter] = left - overlaps.to(vectors) @ vectors
        gains = inside / (eta * values + damping)
        steps = {}
        for parameter, left in rest.items():
            vectors = self.state[parameter]["ritz_vectors"]
            step = left.div_(damping).add_(gains.to(vectors) @ vectors)
            steps[parameter] = step.view_as(parameter)
        return steps
