"""The largest learning rate at which training does not diverge, found by training.

How much faster an optimiser moves along flat directions than along sharp ones (Eq. 6.1,
spectral thesis).
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lambdahat._core import check
from lambdahat._core.progress import report
from lambdahat._core.rng import generator
from lambdahat._core.storage import Result
from lambdahat.estimators._eigenpairs import eigenpairs as extreme_eigenpairs
from lambdahat.operators.curvature import hessian
from lambdahat.problem import Problem, require_problem
from lambdahat.problem.batches import Batch, concatenate, take
from lambdahat.randommatrix.rate_limits import PositiveEstimate
from lambdahat.results import Array, Eigenpairs, Estimate

MakeOptimizer = Callable[[list[Tensor], float], Optimizer]
Parts = list[tuple[float, Batch]]  # a batch in parts, each with its share of the mean
NAMED: dict[str, MakeOptimizer] = {
    "sgd": lambda parameters, rate: torch.optim.SGD(parameters, rate),
    "momentum": lambda parameters, rate: torch.optim.SGD(parameters, rate, momentum=0.9),
    "nesterov": lambda parameters, rate: torch.optim.SGD(
        parameters, rate, momentum=0.9, nesterov=True
    ),
    "adam": lambda parameters, rate: torch.optim.Adam(parameters, rate),
}
# times the first loss; heavy ball at its limit passes (2/(1 − ρ))², 4·10⁴ at ρ = 0.99, and returns
BEYOND_RETURN = 1e8
STRIDE = 4.0
MOST_STRIDES = 30
QUIET = 1 / 4  # of the rate to start with: where the loss added by noise is measured
MARGIN = 2.0
FIRST_MOMENTS = ("exp_avg", "momentum_buffer")  # torch's names for what momentum keeps
SMALL = 1e-8  # of the gradient's norm: Adam's second moment must not see the probe


class NoLimitError(ValueError):
    """The search met no rate at which stability ends."""


@dataclass(frozen=True)
class StableRate(PositiveEstimate):
    """The largest stable learning rate, the geometric mean over ``per_run``, runs in other orders.

    ``stderr`` is of the runs and of the bisection's last interval, in quadrature. ``cost`` counts
    gradients of batches of ``batch_size`` samples. A run is stable if ``steps`` steps end at a loss
    below ``factor`` times the first, or, for None, below what noise explains.
    """

    per_run: Array = field(default_factory=lambda: np.zeros(0))
    batch_size: int = 0
    steps: int = 0
    factor: float | None = 1.0


def largest_stable_rate(
    problem: Problem,
    optimizer: str | MakeOptimizer = "sgd",
    batch_size: int | None = None,
    *,
    steps: int = 100,
    start: float = 0.1,
    tol: float = 0.05,
    runs: int = 3,
    factor: float | None = 1.0,
    seed: int = 0,
) -> StableRate:
    """The largest learning rate at which ``steps`` steps from the problem's point do not diverge.

    A run diverges if the loss of a batch is not finite, or if the loss of all data ends above
    ``factor`` times the first. A network whose units die ends near the loss of guessing, so at the
    start of training a factor below 1 requires that it learns. Near a minimum noise alone raises
    the loss: with None a run diverges if it ends above the first loss by 2·4² times as much as runs
    at a quarter of ``start`` do, (α/start)² of that at rates α below ``start``, which should then
    be near the limit. ``optimizer`` is "sgd", "momentum" or "nesterov" (both 0.9), "adam", or a
    function ``(parameters, rate) -> torch.optim.Optimizer``. ``batch_size`` samples a step
    (default: all) are drawn without replacement, a new order each epoch.

    From ``start`` the rate changes by factors of 4 until one is stable and the next is not, then by
    bisection of its logarithm until the two are within ``tol``. Each of ``runs`` has its own order
    of the data; with all data there is one. On a quadratic a rate above the limit by a part δ lets
    the loss along the sharpest direction grow as e^(4δt): if that direction has a share s of the
    first loss, the limit found is high by up to ln(1/s)/(4·steps).
    """
    require_problem(problem)
    if isinstance(optimizer, str):
        cure = "for others pass a function (parameters, rate) -> torch.optim.Optimizer"
        make = NAMED[check.require_choice(optimizer, "optimizer", NAMED, cure)]
    else:
        known = f"be one of {', '.join(NAMED)}, or a function"
        expected = f"{known} (parameters, rate) -> torch.optim.Optimizer"
        fine = callable(optimizer) and not isinstance(optimizer, Optimizer)
        check.require(fine, "optimizer", expected, check.describe(optimizer), "", TypeError)
        make = optimizer
    total = problem.num_samples
    size, cure = total, "a batch cannot hold more samples than the data"
    if batch_size is not None:
        size = check.require_count(batch_size, "batch_size", 1, total, cure)
    check.require_count(steps, "steps")
    check.require_count(runs, "runs", 2, cure="one run shows no error")
    check.require_positive(start, "start")
    check.require_positive(tol, "tol")
    check.require_positive(1.0 if factor is None else factor, "factor")
    first = problem.loss()
    check.require(math.isfinite(first), "the loss at the start", "be finite", f"{first:.6g}")
    cure = "shift it, for growth is judged by its ratio, or pass factor=None"
    fine = factor is None or first > 0
    check.require(fine, "the loss at the start", "be above 0", f"{first:.6g}", cure)
    work = _Trials(problem, make, size, steps, first, factor, seed)
    brackets: list[tuple[float, float]] = []
    runs = 1 if size == total else runs
    if factor is None:
        work.measure_noise(start, runs)
    for run in range(runs):
        guess = start if not brackets else math.sqrt(brackets[0][0] * brackets[0][1])
        brackets.append(bisect_rate(lambda rate, run=run: work.stable(rate, run), guess, tol))  # type: ignore[misc]
        report("stable rate", run + 1, runs)
    # the geometric mean; a limit is uniform in its last interval, of variance width²/12
    logs = np.array([0.5 * (math.log(low) + math.log(high)) for low, high in brackets])
    width = max(math.log(high / low) for low, high in brackets)
    spread, dof = (float(logs.var(ddof=1)) / runs, runs - 1) if runs > 1 else (0.0, math.inf)
    value, error = float(np.exp(logs.mean())), math.sqrt(spread + width**2 / 12)
    return StableRate(
        value,
        value * error,
        work.gradients,
        dof=dof,
        log_error=error,
        per_run=np.exp(logs),
        batch_size=size,
        steps=steps,
        factor=factor,
    )


def bisect_rate(
    stable: Callable[[float], bool], start: float, tol: float = 0.05
) -> tuple[float, float]:
    """(low, high) with ``low`` stable, ``high`` not and high ≤ (1 + tol)·low.

    By bisection in the logarithm; where stability comes and goes, one of the places where it goes.

    >>> low, high = bisect_rate(lambda rate: rate < 2.0, 0.1, 0.01)
    >>> low < 2.0 <= high <= 1.01 * low
    True
    """
    good = stable(start)
    low = high = start
    for _ in range(MOST_STRIDES):
        low, high = (high, high * STRIDE) if good else (low / STRIDE, low)
        if stable(high if good else low) != good:
            break
    else:
        edge = f"{high:.3g} is stable" if good else f"{low:.3g} diverges"
        expected = "be stable at some rates and not at others"
        cure = "" if good else "near a minimum pass factor=None"
        check.require(False, "the optimiser", expected, f"one that at {edge}", cure, NoLimitError)
    while high > (1 + tol) * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if stable(middle) else (low, middle)
    return low, high


class _Trials:
    """Training runs from one point, each with its learning rate and its order of the data."""

    def __init__(
        self,
        problem: Problem,
        make: MakeOptimizer,
        size: int,
        steps: int,
        first: float,
        factor: float | None,
        seed: int,
    ) -> None:
        self.problem, self.make, self.size, self.steps, self.seed = problem, make, size, steps, seed
        self.first, self.factor = first, factor
        # the loss added by noise at the rate to start with
        self.noise, self.start = 0.0, math.inf
        self.gradients = 0
        # all data as one batch; None if not in memory, or of different lengths
        self._columns: Batch | None = None
        if size < problem.num_samples and problem.batches.in_memory:
            with suppress(RuntimeError, ValueError):  # batches padded to different lengths
                columns = concatenate([batch.data for batch in problem.batches])
                self._columns = Batch(columns, problem.num_samples)

    def measure_noise(self, start: float, runs: int) -> None:
        """Measure how far runs at a small rate end above the first loss; that grows as α²."""
        ends = [self._end(QUIET * start, run) for run in range(runs)]
        rises = [end - self.first for end in ends if math.isfinite(end)]
        self.start, self.noise = start, max([0.0, *rises]) / QUIET**2

    def stable(self, rate: float, run: int) -> bool:
        """Whether training at ``rate`` does not diverge."""
        if self.factor is None:
            allowed = MARGIN * self.noise * min(rate / self.start, 1.0) ** 2
            return self._end(rate, run) <= self.first + allowed
        return self._end(rate, run) < self.factor * self.first

    def _end(self, rate: float, run: int) -> float:
        """The loss of all data after training; NaN where it ran away."""
        begin = self.problem.named(self.problem.vector)
        named = {name: t.detach().clone().requires_grad_() for name, t in begin.items()}
        optimizer = self.make(list(named.values()), rate)
        check.require_type(optimizer, Optimizer, "optimizer", "return a torch.optim.Optimizer")
        scale = abs(self.first) + self.noise or 1.0
        for parts in self._batches(run):
            loss = optimizer.step(lambda parts=parts: self._backward(optimizer, named, parts))  # type: ignore[misc]
            self.gradients += 1
            if not (isinstance(loss, float) and abs(loss) < BEYOND_RETURN * scale):
                return math.nan
        detached = {name: tensor.detach() for name, tensor in named.items()}
        theta = self.problem.space.flatten(detached)
        return self.problem.loss(theta) if bool(torch.isfinite(theta).all()) else math.nan

    def _backward(self, optimizer: Optimizer, named: dict[str, Tensor], parts: Parts) -> float:
        optimizer.zero_grad()
        total = 0.0
        for weight, batch in parts:
            loss = weight * self.problem.batch_loss(named, batch)
            loss.backward()
            total += float(loss.detach())
        return total

    def _batches(self, run: int) -> Iterator[Parts]:
        """The batches of ``steps`` steps: epochs in random order, without incomplete batches."""
        total, each = self.problem.num_samples, self.problem.num_samples // self.size
        for step in range(self.steps):
            if self.size == total:
                yield list(self.problem.weighted())
                continue
            epoch, place = divmod(step, each)
            if place == 0:
                rng = generator(self.seed, "stable rate", run, epoch)
                order = torch.randperm(total, generator=rng)
            indices = order[place * self.size : (place + 1) * self.size]
            if self._columns is not None:
                yield [(1.0, take(self._columns, indices.to(self.problem.device)))]
            else:
                whole = self.size if self.problem.norm == "train" else None
                yield list(self.problem.subset(indices, whole).weighted())


@dataclass(frozen=True)
class RateRatio(Result):
    """R_est-curv = α_flat/α_sharp with its parts, measured from an optimiser's own steps.

    ``sharp`` (k,) are the rates along the eigenvectors of ``curvatures`` (k,), ``flat`` the mean
    over directions orthogonal to them, with its error; ``ratio`` is that mean over the rate along
    the sharpest. ``nonlinearity`` is ‖s(u + v) − s(u) − s(v)‖/‖s(u) + s(v)‖ of the steps s for a
    sharp and a flat gradient together: if it is not near 0 the optimiser has no single
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
    """The estimated-curvature learning-rate ratio of any torch optimiser at the problem's point.

    An optimiser that steps by −αB⁻¹g moves at the rate φᵀ(αB⁻¹)φ along a unit vector φ. It is
    measured: from the optimiser's present state, a step with gradient +tφ less one with −tφ, over
    2t, t small. The preconditioner is the optimiser's state; momentum is set to 0 first and
    multiplies all rates alike. ``eigenpairs`` are sharp directions, the sharpest first (default:
    the largest eigenvalue of the Hessian), ``flat`` the number of random directions orthogonal to
    them, or directions (P, k).

    An optimiser without a state takes its first step with the problem's gradient before. One that
    has ``observe`` observes the problem when ``due``. For one with hooks on backward passes, as
    KFAC has for the empirical Fisher, ``backward()`` is called before each step. If steps depend on
    the gradient as a whole, as with NGD's ``rescale``, pass a ``gradient`` (P,) about which to
    probe. Parameters, gradients and state are restored at the end.
    """
    require_problem(problem)
    fine = isinstance(optimizer, Optimizer) and not isinstance(optimizer, torch.optim.LBFGS)
    expected = "be a torch.optim.Optimizer that steps without a closure"
    check.require(fine, "optimizer", expected, optimizer, error=TypeError)
    pairs = extreme_eigenpairs(hessian(problem), 1, seed=seed) if eigenpairs is None else eigenpairs
    directions = _flat_directions(problem, pairs, flat, seed)
    with _Probe(problem, optimizer, gradient, backward).started() as probe:
        sharp, rates = probe.rates(pairs.vectors), probe.rates(directions)
        nonlinearity = probe.nonlinearity(pairs.vectors[:, 0], directions[:, 0])
    error = float(rates.std() / math.sqrt(len(rates))) if len(rates) > 1 else math.nan
    mean = Estimate(float(rates.mean()), error, dof=max(len(rates) - 1, 1))
    first, expected = float(sharp[0]), "move along the sharpest direction"
    check.require(first != 0, "optimizer", expected, "a step of 0", "raise its learning rate")
    ratio = Estimate(float(mean) / first, abs(error / first), dof=mean.dof)
    return RateRatio(ratio, mean, sharp, pairs.values.double(), nonlinearity)


def _flat_directions(problem: Problem, pairs: Eigenpairs, flat: int | Tensor, seed: int) -> Tensor:
    """Unit vectors (P, k), random ones orthogonal to the sharp ones."""
    size, sharp = problem.num_parameters, pairs.vectors.to(problem.device, torch.float64)
    check.require(
        sharp.shape[0] == size, "eigenpairs", f"have vectors of length {size}", pairs.vectors
    )
    if isinstance(flat, Tensor):
        given = flat.reshape(len(flat), -1).to(problem.device, torch.float64)
        check.require(len(flat) == size, "flat", f"have shape ({size}, k)", flat)
        return nn.functional.normalize(given, dim=0)
    check.require_count(flat, "flat", 1)
    fine = sharp.shape[1] < size
    check.require(fine, "eigenpairs", f"leave flat directions, fewer than {size}", pairs.vectors)
    rng = generator(seed, "flat directions")
    draws = torch.randn(size, flat, generator=rng, dtype=torch.float64).to(problem.device)
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
        # the optimiser's own parameters in the order of the problem's vector
        source = problem.source
        named = dict(source.named_parameters()) if isinstance(source, nn.Module) else source
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        missing = [
            name for name in problem.space.names if name not in named or id(named[name]) not in held
        ]
        expected = "hold the parameters of the problem"
        got = f"none for {', '.join(missing[:3])}"
        check.require(not missing, "optimizer", expected, got, "make both of the same model")
        self.parameters = [named[name] for name in problem.space.names]
        self.point = [p.detach().clone() for p in self.parameters]
        self.gradient = problem.gradient()
        if base is not None:
            fits = isinstance(base, Tensor) and base.shape == self.gradient.shape
            check.require(
                fits, "gradient", f"be a tensor of shape ({problem.num_parameters},)", base
            )
        self.base = torch.zeros_like(self.gradient) if base is None else base.to(self.gradient)
        self.snapshot: dict[str, Any] = {}
        self.reach = math.nan

    @contextmanager
    def started(self) -> Iterator[_Probe]:
        """The optimiser at work on a copy of its state; everything is put back at the end."""
        nested = list(_optimizers(self.optimizer))
        before = [(each, dict(vars(each))) for each in nested]
        everything = [p for group in self.optimizer.param_groups for p in group["params"]]
        kept = [(p, p.grad, p.detach().clone()) for p in everything]
        try:
            for each in nested:  # hooks after a step, such as averages, are not for probes
                each._optimizer_step_post_hooks = OrderedDict()
            self.snapshot = self._prepare()
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
        rates = []
        for vector in vectors.T:
            rates.append(-float(vector.double() @ self._response(vector)))
            report("rate ratio", len(rates), vectors.shape[1])
        return torch.tensor(rates, dtype=torch.float64)

    def nonlinearity(self, first: Tensor, second: Tensor) -> float:
        """How far the response to two directions is from the sum of the two responses."""
        apart = self._response(first) + self._response(second)
        together = self._response(first.double() + second.double())
        size = apart.norm().clamp_min(torch.finfo(torch.float64).tiny)
        return float((together - apart).norm() / size)

    def _response(self, vector: Tensor) -> Tensor:
        """The derivative of the step (P,) along a change of the gradient."""
        move = (self.reach * vector.double()).to(self.gradient)
        return (self._step(self.base + move) - self._step(self.base - move)) / (2 * self.reach)

    def _prepare(self) -> dict[str, Any]:
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


def _optimizers(optimizer: Optimizer) -> Iterator[Optimizer]:
    """An optimiser and those that it wraps."""
    yield optimizer
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer):
            yield from _optimizers(value)
