"""How much faster an optimiser moves along flat directions than along sharp ones (Eq. 6.1,
spectral thesis).
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lambdahat._core.check import require, require_count
from lambdahat._core.progress import report
from lambdahat._core.rng import generator
from lambdahat._core.storage import Result
from lambdahat.estimators import eigenpairs as extreme_eigenpairs
from lambdahat.operators.curvature import hessian
from lambdahat.problem import Problem, require_problem
from lambdahat.results import Eigenpairs, Estimate

FIRST_MOMENTS = ("exp_avg", "momentum_buffer")  # torch's names for what momentum keeps
SMALL = 1e-8  # of the gradient's norm: Adam's second moment must not see the probe


@dataclass(frozen=True)
class RateRatio(Result):
    """R_est-curv = α_flat/α_sharp with its parts, read off an optimiser's own steps.

    ``sharp`` (k,) are the rates along the eigenvectors of ``curvatures`` (k,), ``flat`` the mean
    over directions orthogonal to them, with its error; ``ratio`` is that mean over the rate along
    the sharpest. ``nonlinearity`` is ‖s(u + v) − s(u) − s(v)‖/‖s(u) + s(v)‖ of the steps s for a
    sharp and a flat gradient together: where it is not near 0 the optimiser has no one
    preconditioner, and the rates are those of gradients along one direction each.
    """

    ratio: Estimate
    flat: Estimate
    sharp: Tensor
    curvatures: Tensor
    nonlinearity: float

    def __str__(self) -> str:
        flat, sharp = float(self.flat), float(self.sharp[0])
        return f"{self.ratio}: {flat:.4g} along flat directions, {sharp:.4g} along the sharpest"


def rate_ratio(
    problem: Problem,
    optimizer: Optimizer,
    eigenpairs: Eigenpairs | None = None,
    flat: int | Tensor = 8,
    *,
    gradient: Tensor | None = None,
    backward: Callable[[], object] | None = None,
    seed: int = 0,
) -> RateRatio:
    """The estimated-curvature learning-rate ratio of any ``torch.optim.Optimizer`` at the problem's
    point.

    An optimiser that steps by −αB⁻¹g moves at the rate φᵀ(αB⁻¹)φ along a unit vector φ. It is
    measured: from the optimiser's present state, a step with gradient +tφ less one with −tφ, over
    2t, t small. The preconditioner is the optimiser's state; momentum is put to 0 first and
    multiplies all rates alike. ``eigenpairs`` are sharp directions, the sharpest first (default:
    the largest eigenvalue of the Hessian), ``flat`` the number of random directions orthogonal to
    them, or directions (P, k).

    An optimiser without a state takes its first step with the problem's gradient before. One that
    has ``observe`` is shown the problem when ``due``. One that listens to backward passes, as KFAC
    does for the empirical Fisher, gets one from ``backward()`` ahead of each step. Where steps
    depend on the gradient as a whole, as with NGD's ``rescale``, pass a ``gradient`` (P,) about
    which to probe. Parameters, gradients and state are put back at the end.
    """
    require_problem(problem)
    require(
        isinstance(optimizer, Optimizer) and not isinstance(optimizer, torch.optim.LBFGS),
        "optimizer",
        "be a torch.optim.Optimizer that steps without a closure",
        optimizer,
        error=TypeError,
    )
    pairs = extreme_eigenpairs(hessian(problem), 1, seed=seed) if eigenpairs is None else eigenpairs
    directions = _flat_directions(problem, pairs, flat, seed)
    with _Probe(problem, optimizer, gradient, backward).begun() as probe:
        sharp, rates = probe.rates(pairs.vectors), probe.rates(directions)
        nonlinearity = probe.nonlinearity(pairs.vectors[:, 0], directions[:, 0])
    return _result(sharp, rates, pairs, nonlinearity)


def _result(sharp: Tensor, rates: Tensor, pairs: Eigenpairs, nonlinearity: float) -> RateRatio:
    several = len(rates) > 1
    error = float(rates.std() / math.sqrt(len(rates))) if several else math.nan
    flat = Estimate(float(rates.mean()), error, dof=max(len(rates) - 1, 1))
    first = float(sharp[0])
    require(
        first != 0,
        "optimizer",
        "move along the sharpest direction",
        "a step of 0",
        "raise its learning rate",
    )
    ratio = Estimate(float(flat) / first, abs(error / first), dof=flat.dof)
    return RateRatio(ratio, flat, sharp, pairs.values.double(), nonlinearity)


def _flat_directions(problem: Problem, pairs: Eigenpairs, flat: int | Tensor, seed: int) -> Tensor:
    """Unit vectors (P, k), random ones orthogonal to the sharp ones."""
    size, sharp = problem.num_parameters, pairs.vectors.to(problem.device, torch.float64)
    require(sharp.shape[0] == size, "eigenpairs", f"have vectors of length {size}", pairs.vectors)
    if isinstance(flat, Tensor):
        given = flat.reshape(len(flat), -1).to(problem.device, torch.float64)
        require(len(flat) == size, "flat", f"have shape ({size}, k)", flat)
        return nn.functional.normalize(given, dim=0)
    require_count(flat, "flat", 1)
    require(
        sharp.shape[1] < size,
        "eigenpairs",
        f"leave flat directions, fewer than {size}",
        pairs.vectors,
    )
    draws: Tensor = torch.randn(
        size, flat, generator=generator(seed, "flat directions"), dtype=torch.float64
    )
    draws = draws.to(problem.device)
    for _ in range(2):
        draws = draws - sharp @ (sharp.T @ draws)
    return nn.functional.normalize(draws, dim=0)


class _Probe:
    """Steps of an optimiser from one state, with gradients of our choice, at parameters that are 0.

    At 0 a step is read without the rounding of a difference, and weight decay is still.
    """

    def __init__(
        self,
        problem: Problem,
        optimizer: Optimizer,
        base: Tensor | None,
        backward: Callable[[], object] | None,
    ) -> None:
        self.problem, self.optimizer, self.backward = problem, optimizer, backward
        self.parameters = _matched(problem, optimizer)
        self.point = [p.detach().clone() for p in self.parameters]
        self.gradient = problem.gradient()
        if base is not None:
            fits = isinstance(base, Tensor) and base.shape == self.gradient.shape
            require(fits, "gradient", f"be a tensor of shape ({problem.num_parameters},)", base)
        self.base = torch.zeros_like(self.gradient) if base is None else base.to(self.gradient)
        self.snapshot: dict[str, Any] = {}
        self.reach = math.nan

    @contextmanager
    def begun(self) -> Iterator[_Probe]:
        """The optimiser at work on a copy of its state; everything is put back at the end."""
        nested = list(_optimizers(self.optimizer))
        before = [(each, dict(vars(each))) for each in nested]
        everything = [p for group in self.optimizer.param_groups for p in group["params"]]
        kept = [(p, p.grad, p.detach().clone()) for p in everything]
        try:
            for each in nested:  # hooks after a step, such as averages, are not for probes
                each._optimizer_step_post_hooks = OrderedDict()
            self.snapshot = self._prepared()
            still = self._step(self.base)
            size = float(self.gradient.double().norm()) or 1.0
            rounding = float(torch.finfo(self.gradient.dtype).eps) ** 0.5
            self.reach = size * (SMALL if not bool(still.any()) else rounding)
            yield self
        finally:
            for each, attributes in before:
                vars(each).clear()
                vars(each).update(attributes)
            with torch.no_grad():
                for p, grad, value in kept:
                    p.copy_(value)
                    p.grad = grad

    def rates(self, vectors: Tensor) -> Tensor:
        """φᵀ(αB⁻¹)φ for unit vectors φ (P, k), in float64."""
        found = []
        for vector in vectors.T:
            found.append(-float(vector.double() @ self._response(vector)))
            report("rate ratio", len(found), vectors.shape[1])
        return torch.tensor(found, dtype=torch.float64)

    def nonlinearity(self, first: Tensor, second: Tensor) -> float:
        """How far the response to two directions is from the sum of the two responses."""
        apart = self._response(first) + self._response(second)
        together = self._response(first.double() + second.double())
        return float(
            (together - apart).norm() / apart.norm().clamp_min(torch.finfo(torch.float64).tiny)
        )

    def _response(self, vector: Tensor) -> Tensor:
        """The derivative of the step (P,) along a change of the gradient."""
        move = (self.reach * vector.double()).to(self.gradient)
        return (self._step(self.base + move) - self._step(self.base - move)) / (2 * self.reach)

    def _prepared(self) -> dict[str, Any]:
        """The state to probe from: with an observation, a first step taken, and no momentum."""
        optimizer = self.optimizer
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        self._observe()
        if not any(optimizer.state_dict()["state"].values()):
            self._advance(self.gradient)
            self._return()
            self._observe()
        saved: dict[str, Any] = copy.deepcopy(optimizer.state_dict())
        for entry in saved["state"].values():
            for name in FIRST_MOMENTS:
                if isinstance(entry.get(name), Tensor):
                    entry[name].zero_()
        return saved

    def _step(self, gradient: Tensor) -> Tensor:
        """The step (P,) in float64 that the optimiser makes of a gradient (P,)."""
        self.optimizer.load_state_dict(copy.deepcopy(self.snapshot))
        self._observe()
        self._advance(gradient, from_zero=True)
        moved = torch.cat([p.detach().double().reshape(-1) for p in self.parameters])
        self._return()
        return moved.to(self.gradient.device)

    def _observe(self) -> None:
        if getattr(self.optimizer, "due", False):
            self.optimizer.observe(self.problem)  # type: ignore[attr-defined]

    def _advance(self, gradient: Tensor, from_zero: bool = False) -> None:
        if self.backward is not None:
            self.optimizer.zero_grad()
            with torch.enable_grad():
                self.backward()
        with torch.no_grad():
            for p, part in zip(self.parameters, self.problem.space.split(gradient), strict=True):
                p.grad = part.to(p.device, p.dtype, copy=True)
                if from_zero:
                    p.zero_()
        self.optimizer.step()

    def _return(self) -> None:
        """Back to the point, where observations and backward passes belong."""
        with torch.no_grad():
            for p, value in zip(self.parameters, self.point, strict=True):
                p.copy_(value)


def _matched(problem: Problem, optimizer: Optimizer) -> list[Tensor]:
    """The optimiser's own parameters in the order of the problem's vector."""
    source = problem.source
    named = dict(source.named_parameters()) if isinstance(source, nn.Module) else source
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [
        name for name in problem.space.names if name not in named or id(named[name]) not in held
    ]
    require(
        not missing,
        "optimizer",
        "hold the parameters of the problem",
        f"none for {', '.join(missing[:3])}",
        "make both of the same model",
    )
    return [named[name] for name in problem.space.names]


def _optimizers(optimizer: Optimizer) -> Iterator[Optimizer]:
    """An optimiser and those that it wraps."""
    yield optimizer
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer):
            yield from _optimizers(value)
