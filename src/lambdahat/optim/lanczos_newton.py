"""Second-order steps from a few Ritz pairs of a curvature batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lambdahat._core.check import describe, require_choice, require_count, require_positive
from lambdahat.krylov import Lanczos, lanczos, random_vector
from lambdahat.operators.curvature import ggn, hessian
from lambdahat.optim.descent import Descent, Directions, total_norm
from lambdahat.optim.registry import register_optimizer
from lambdahat.problem import Problem

CURVATURES = {"absolute_hessian": hessian, "ggn": ggn}


@register_optimizer("lanczos-newton")
class LanczosNewton(Descent):
    """Stochastic Lanczos steps: w ← w − α [Σ_i φ_i φ_iᵀg / (η|λ_i| + δ) + (g − Σ_i φ_i φ_iᵀg) / δ].

    Eq. 6.6 of the spectral thesis (LanczosOPT): (λ_i, φ_i) are the Ritz pairs of ``pairs`` Lanczos
    steps from a random vector on the Hessian, of which the absolute values count (Dauphin et al.
    2014), or on the Gauss–Newton matrix ("ggn"); the rest of the space steps at α/δ. ``eta`` above
    1 shortens the steps in the sharp directions alone: LOPT[η], §6.4.1.

    The pairs come from ``observe(problem)``, on a curvature batch of one's own choice, whenever
    ``due``: before the first step and then every ``every`` steps. An observation costs ``pairs``
    products and keeps ``pairs`` vectors. Momentum and weight decay are those of
    ``torch.optim.SGD``, so that with no pairs this is SGD at rate lr/δ.
    """

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
        settings = {
            "lr": lr,
            "damping": damping,
            "eta": eta,
            "every": every,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "step": 0,
            "observed": -1,
        }
        super().__init__(params, settings)
        self.update_norm: Tensor | None = None

    def check_group(self, group: dict[str, Any]) -> None:
        require_positive(group["damping"], "damping")
        require_positive(group["eta"], "eta")
        require_count(group["every"], "every")

    @property
    def due(self) -> bool:
        """Whether new Ritz pairs are wanted before the next step."""
        group = self.param_groups[0]
        seen = group["observed"] >= 0
        return self.pairs > 0 and not (seen and group["step"] - group["observed"] < group["every"])

    def observe(self, problem: Problem) -> None:
        """Measure the Ritz pairs on a problem of the same model and parameters."""
        self.require_same_point(problem)
        if self.pairs > problem.num_parameters:
            raise ValueError(
                f"pairs must lie in [0, {problem.num_parameters}], got {describe(self.pairs)}"
            )
        group = self.param_groups[0]
        if self.pairs > 0:
            operator = CURVATURES[self.curvature](problem)
            start = random_vector(operator, self.seed, "lanczos newton", group["step"])
            run = lanczos(operator, start, self.pairs, "lanczos newton")
            values, vectors = _ritz_pairs(run)
            parameters = self.all_parameters()
            for parameter, part in zip(parameters, problem.space.split(vectors), strict=True):
                self.state[parameter]["ritz_vectors"] = part.flatten(1).to(
                    parameter.device, parameter.dtype, copy=True
                )
            self.state[parameters[0]]["ritz_values"] = values.to(parameters[0].device)
        group["observed"] = group["step"]

    def directions(self) -> Directions:
        """The preconditioned gradients."""
        found = self.gradients()
        group = self.param_groups[0]
        if self.pairs != 0 and group["observed"] < 0:
            raise RuntimeError(
                "observe(problem) must be called before the first step, got no observation; if"
                " optimizer.due: optimizer.observe(problem)"
            )
        steps = (
            self._preconditioned(found, group["eta"], group["damping"])
            if self.pairs
            else {parameter: gradient / group["damping"] for parameter, gradient in found.items()}
        )
        self.update_norm = total_norm(list(steps.values()))
        return steps

    def _preconditioned(self, gradients: Directions, eta: float, damping: float) -> Directions:
        """Σ_i φ_i φ_iᵀg / (η|λ_i| + δ) + (g − Σ_i φ_i φ_iᵀg) / δ.

        What is left of g is projected twice: Ritz vectors are orthogonal to about √ε, and 1/δ would
        amplify that.
        """
        values = self.state[self.all_parameters()[0]]["ritz_values"]
        rest, inside = {p: g.reshape(-1) for p, g in gradients.items()}, torch.zeros_like(values)
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
            steps[parameter] = (
                left.div_(damping).add_(gains.to(vectors) @ vectors).view_as(parameter)
            )
        return steps


def _ritz_pairs(run: Lanczos) -> tuple[Tensor, Tensor]:
    """|λ| (m,) in float64 and the vectors φ (m, P), all that the run gave."""
    off = run.beta
    values, turn = torch.linalg.eigh(
        torch.diag(run.alpha) + torch.diag(off, 1) + torch.diag(off, -1)
    )
    return values.abs(), turn.T.to(run.basis) @ run.basis.T
