"""The natural gradient with the whole Fisher matrix, for small models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lambdahat._core import check
from lambdahat._core.rng import derived_seed
from lambdahat.estimators import trace
from lambdahat.krylov import conjugate_gradients
from lambdahat.operators.base import LinearOperator
from lambdahat.operators.curvature import fisher as fisher_of
from lambdahat.operators.matrix import identity
from lambdahat.optim import descent
from lambdahat.optim.registry import register_optimizer
from lambdahat.problem import Problem

FISHERS = ("exact", "monte_carlo", "empirical")
SOLVERS = ("dense", "cg")
MOST_PARAMETERS = 20_000
RAISE = "raise alpha"


@register_optimizer("exact-ngd")
class ExactNGD(descent.ObservingDescent):
    """θ ← θ − lr·(F + κI)⁻¹∇L with F the Fisher matrix of all d parameters, κ = (α/d)·max(tr F, ε).

    Eqs. 5–7 of the NGD paper, nothing approximated and no norm restored. ``fisher`` is the kind of
    ``lh.fisher``. ``solver``: "dense" factors the matrix, by d products and d³/3 operations, and
    keeps d² numbers; "cg" keeps none and solves each step by conjugate gradients to relative
    residual ``tol``. F comes from ``observe(problem)``, whenever ``due``: before the first step and
    then every ``every`` steps; with "cg", which keeps no matrix, before each. As α grows this
    becomes SGD at rate lr/κ. α and the solver are read from the first parameter group.
    """

    OWN = ("fisher", "solver", "tol", "max_matvecs", "seed", "update_norm")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        alpha: float = 0.1,
        epsilon: float = 1e-10,
        fisher: str = "exact",
        solver: str = "dense",
        every: int = 1,
        tol: float | None = None,
        max_matvecs: int | None = None,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.fisher = check.require_choice(fisher, "fisher", FISHERS)
        self.solver = check.require_choice(solver, "solver", SOLVERS)
        if solver != "dense" and every != 1:
            raise ValueError(
                f'every must be 1 with solver="cg", got {check.describe(every)}; it keeps no matrix'
            )
        self.tol, self.max_matvecs = tol, max_matvecs
        self.seed = check.require_count(seed, "seed", least=0)
        self._operator: LinearOperator | None = None
        names = ("lr", "alpha", "epsilon", "every", "momentum", "weight_decay")
        settings = descent.group_settings(locals(), *names, step=0, observed=-1, damping=0.0)
        super().__init__(params, settings)
        self.update_norm: Tensor | None = None

    def check_group(self, group: dict[str, Any]) -> None:
        check.require_number(group["alpha"], "alpha", "[0, inf)")
        check.require_positive(group["epsilon"], "epsilon")
        check.require_count(group["every"], "every")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._operator = None

    @property
    def due(self) -> bool:
        """Whether the Fisher matrix must be measured again before the next step."""
        return (self.solver == "cg" and self._operator is None) or super().due

    @property
    def damping(self) -> float:
        """κ of the last observation."""
        return float(self.param_groups[0]["damping"])

    def observe(self, problem: Problem) -> None:
        """Measure the Fisher matrix on a problem of the same model and parameters."""
        parameters, places = self.require_same_point(problem), list(map(id, self.all_parameters()))
        group, size = self.param_groups[0], problem.num_parameters
        seed = derived_seed(self.seed, "exact ngd", group["step"])
        operator = fisher_of(problem, self.fisher, seed=seed)
        if self.solver == "dense":
            expected = f'be "cg" beyond {MOST_PARAMETERS} parameters'
            came = f'"dense" for {size}'
            check.require(size <= MOST_PARAMETERS, "solver", expected, came, "or use NGD")
            matrix = operator.dense().double()
            group["damping"] = _damping(float(matrix.trace()), size, group)
            matrix.diagonal().add_(group["damping"])
            factor, failed = torch.linalg.cholesky_ex(matrix)
            if failed:
                raise ValueError(
                    "F + κI must be positive definite, got a singular one at κ ="
                    f" {group['damping']:.3g}; {RAISE}"
                )
            self.state[self.all_parameters()[0]]["factor"] = factor
        else:
            group["damping"] = _damping(float(trace(operator, seed=seed)), size, group)
            self._operator = operator
        group["observed"] = group["step"]
        group["order"] = [places.index(id(parameter)) for parameter in parameters]

    def directions(self) -> descent.Directions:
        """(F + κI)⁻¹ times the gradients, which are 0 where there are none."""
        descent.require_observation(not self.due, "this step")
        found, parameters = self.gradients(), self.all_parameters()
        order = self.param_groups[0].get("order")  # of the matrix
        parameters = [parameters[place] for place in order] if order else parameters
        parts = [found[p] if p in found else torch.zeros_like(p) for p in parameters]
        whole = torch.cat([part.reshape(-1) for part in parts])
        step = self._solve(whole).to(whole)
        self.update_norm = torch.linalg.vector_norm(step)
        steps = zip(parameters, step.split([p.numel() for p in parameters]), strict=True)
        return {p: part.view_as(p) for p, part in steps if p in found}

    def _solve(self, gradient: Tensor) -> Tensor:
        if self.solver == "dense":
            factor = self.state[self.all_parameters()[0]]["factor"]
            return torch.cholesky_solve(gradient.to(factor).unsqueeze(1), factor).squeeze(1)
        operator = self._operator
        assert operator is not None
        damped = operator + self.damping * identity(operator) if self.damping else operator
        right = gradient.to(operator.device)
        solution = conjugate_gradients(damped, right, self.tol, self.max_matvecs)
        came = f"curvature {solution.curvature:.3g}"
        check.require(solution.curvature > 0, "F + κI", "be positive definite", came, RAISE)
        return solution.solution


def _damping(mass: float, size: int, group: dict[str, Any]) -> float:
    """κ = (α/d)·max(tr F, ε), Eq. 7 of the NGD paper."""
    return float(group["alpha"] / size * max(mass, group["epsilon"]))
