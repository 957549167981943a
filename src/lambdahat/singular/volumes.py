"""Volume scaling: how fast the set of nearly optimal parameters shrinks with its level, V(ε) ∝
ε^λ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lambdahat._core.check import require, require_count, require_positive
from lambdahat._core.progress import report
from lambdahat._core.rng import generator
from lambdahat.estimators.quantities import MeasureSettings, Work, quantity
from lambdahat.operators.base import LinearOperator
from lambdahat.problem import Problem, require_problem
from lambdahat.problem.batches import Batch, free_memory
from lambdahat.problem.memory import PASS
from lambdahat.results import Array, Estimate, Result, Status

SAMPLES, LEVELS = 2048, 60  # points and halvings
KINDS = 3  # of moves
POPULATIONS = 8  # runs beside each other: their spread is the error
HELD = 4  # copies of the points in float64: they, their trials, what was dropped, and steps
TRIALS, TRIALS_PER_PARAMETER = 6, 1  # of each kind of move at each level
EASY, HARD = 0.7, 0.02  # the acceptance of moves too short, and too long, to be tried again
FIT_LEVELS = 4  # the fewest levels that show a slope
CHUNK = 1 << 22  # numbers that one mapped call may hold


@dataclass(frozen=True)
class VolumeScaling(Result):
    """V(ε), the fraction of a ball of ``radius`` around w* where L − L* < ε, down to tiny
    fractions.

    ``log_volumes`` (levels,) are the same for all populations, ``log_levels`` (populations, levels)
    the ε at which each population reached them. ``coefficient`` is the slope λ at the
    ``multiplicity`` asked for, ``slope`` reads it at any. ``cost`` counts losses over the whole
    data.
    """

    coefficient: Estimate
    log_volumes: Array
    log_levels: Array
    multiplicity: int
    radius: float
    cost: int
    status: Status

    @property
    def levels(self) -> Array:
        """ε of each level, (levels,), the geometric mean over populations."""
        return np.asarray(np.exp(self.log_levels.mean(axis=0)))

    @property
    def volumes(self) -> Array:
        """V(ε) of each level, (levels,)."""
        return np.asarray(np.exp(self.log_volumes))

    @property
    def stderr(self) -> Array:
        """The standard error of ln V at each of ``levels``, (levels,)."""
        error = self.log_levels.std(axis=0, ddof=1) / math.sqrt(len(self.log_levels))
        return np.asarray(error * float(self.coefficient))

    def slope(self, multiplicity: int = 1) -> Estimate:
        """λ of ln V = λ·ln ε + (m − 1)·ln ln(ε₀/ε) + c over the lower half of the levels, ε₀ the
        largest excess seen.

        m is given, not fitted: over levels that can be sampled ln ln(ε₀/ε) is so nearly straight in
        ln ε that no data tell it from a slope. Taking m = 1 where it is larger lowers λ by about (m
        − 1)/ln(ε₀/ε).
        """
        require_count(multiplicity, "multiplicity")
        return _slope(self.log_volumes, self.log_levels, multiplicity, self.cost, self.status)


def volume_scaling(
    problem: Problem,
    radius: float = 1.0,
    samples: int = SAMPLES,
    levels: int = LEVELS,
    multiplicity: int = 1,
    seed: int = 0,
) -> VolumeScaling:
    """λ = lim ε·d ln V/dε at the problem's parameters, with V(ε) the volume where L − L* < ε (Eqs.
    14–16, NGD paper).

    Nested sampling: points uniform in the ball of ``radius`` are halved ``levels`` times, each time
    at the median of their excess loss, the lower half doubled and moved on by Metropolis steps
    inside the level set, whose lengths follow from the level before. The order statistics of N
    uniform points give each halving the exact mean of its ln V. ``samples`` points are dealt to 8
    populations, whose spread is the standard error. Where the level sets are thin and curved,
    points hardly move along them, and λ comes out too high unless a population has several times
    more points than there are levels. For small models: every evaluation is a pass over the data,
    and it takes λ·ln(ε₀/ε)/ln 2 levels to reach ε.

    NOT_A_MINIMUM says that points of lower loss were met, PRECISION_LIMIT that the rounding of the
    loss left too few levels, NOT_ASYMPTOTIC that the slope still changes along those used.
    """
    require_problem(problem)
    require_positive(radius, "radius")
    size = require_count(samples, "samples", least=16 * POPULATIONS) // POPULATIONS
    size -= size % 2
    require_count(levels, "levels", least=4 * FIT_LEVELS)
    require_count(multiplicity, "multiplicity")
    need, budget = HELD * POPULATIONS * size * problem.num_parameters * 8, problem.memory
    room = free_memory(problem.device) if budget is None else int((1 - PASS) * budget)
    name, got = "samples" if budget is None else "memory", f"{room:,} bytes for them"
    expected = f"leave room for {POPULATIONS * size:,} points, {need:,} bytes"
    require(need <= room, name, expected, got, "lower samples, or choose fewer parameters")
    cloud = _Cloud(problem, radius, size, seed)
    # the largest finite excess of each population
    largest = cloud.excess.masked_fill(cloud.excess.isinf(), 0.0).max(dim=1).values
    log_volumes, log_levels = [-1.0 / size], [largest]
    for level in range(1, levels + 1):
        thresholds = cloud.halve()
        if not bool((thresholds > cloud.floor).all()):
            break
        log_volumes.append(
            log_volumes[-1]
            + float(scipy.special.digamma(size // 2 + 1) - scipy.special.digamma(size + 1))
        )
        log_levels.append(thresholds)
        cloud.move(thresholds)
        report("volume scaling", level, levels)
    volumes, tiny = np.array(log_volumes), torch.finfo(torch.float64).tiny
    seen = torch.stack(log_levels, dim=1).clamp_min(tiny).log().cpu().numpy()
    status, cost = _verdict(volumes, seen, multiplicity), cloud.calls
    if cloud.lowest < -cloud.floor:
        status = Status.NOT_A_MINIMUM
    slope = _slope(volumes, seen, multiplicity, cost, status)
    return VolumeScaling(slope, volumes, seen, multiplicity, radius, cost, status)


def _slope(
    log_volumes: Array, log_levels: Array, multiplicity: int, cost: int, status: Status
) -> Estimate:
    """λ over the lower half of the levels, its error from the populations."""
    dof = len(log_levels) - 1
    half = log_volumes.size // 2
    if log_volumes.size - half < FIT_LEVELS:
        return Estimate(math.nan, math.nan, cost, status, dof)
    inverse = _inverse_slopes(log_volumes, log_levels, multiplicity, slice(half, None))
    value = 1 / float(inverse.mean())
    error = float(inverse.std(ddof=1)) / math.sqrt(dof + 1) * value**2
    return Estimate(value, error, cost, status, dof)


def _inverse_slopes(
    log_volumes: Array, log_levels: Array, multiplicity: int, window: slice
) -> Array:
    """1/λ of each population, by least squares of ln ε on ln V − (m − 1)·ln ln(ε₀/ε)."""
    depth = log_levels[:, :1].mean() - log_levels[:, window]
    known = log_volumes[window] - (multiplicity - 1) * np.log(depth)
    known = known - known.mean(axis=1, keepdims=True)
    return np.asarray((known * log_levels[:, window]).sum(axis=1) / np.square(known).sum(axis=1))


def _verdict(log_volumes: Array, log_levels: Array, multiplicity: int) -> Status:
    """Whether there are levels enough, and their halves agree to 5 % or within their noise."""
    size = log_volumes.size
    if size < 4 * FIT_LEVELS:
        return Status.PRECISION_LIMIT
    upper, lower = (
        _inverse_slopes(log_volumes, log_levels, multiplicity, window)
        for window in (slice(size // 2, 3 * size // 4), slice(3 * size // 4, None))
    )
    change = lower - upper
    noise = float(change.std(ddof=1)) / math.sqrt(len(change))
    settled = abs(float(change.mean())) < max(4 * noise, 0.05 * float(lower.mean()))
    return Status.CONVERGED if settled else Status.NOT_ASYMPTOTIC


class _Window:
    """Lengths to propose: log-uniform between nearly always and hardly ever accepted."""

    def __init__(self, longest: float) -> None:
        self.longest = math.log(longest)
        self.low, self.high = self.longest - 2.0, self.longest
        self._seen: list[tuple[Tensor, Tensor]] = []

    def draw(self, uniform: Tensor) -> Tensor:
        """Lengths of the shape of ``uniform``."""
        return (self.low + (self.high - self.low) * uniform).exp()

    def learn(self, lengths: Tensor, accepted: Tensor) -> None:
        """Remember what became of the proposals."""
        self._seen.append((lengths.flatten().log(), accepted.flatten()))

    def adapt(self) -> None:
        """Set the bounds for the next level, with a margin for its narrower sets."""
        lengths = torch.cat([length for length, _ in self._seen]).sort()
        accepted = torch.cat([accept for _, accept in self._seen])[lengths.indices].double()
        count = torch.arange(1, len(accepted) + 1, device=accepted.device)
        below = accepted.cumsum(0) / count
        above = accepted.flip(0).cumsum(0).div(count).flip(0)
        easy, hard = (below > EASY).nonzero(), (above < HARD).nonzero()
        low = float(lengths.values[easy[-1]]) if len(easy) else self.low - 1.0
        high = float(lengths.values[hard[0]]) if len(hard) else self.high + 1.0
        self.low, self.high = min(low, high) - 1.0, min(max(low, high), self.longest)
        self._seen = []


class _Cloud:
    """Populations of points (populations, size, P), offsets from w*, uniform in level sets."""

    def __init__(self, problem: Problem, radius: float, size: int, seed: int) -> None:
        self.problem, self.centre, self.baseline = problem, problem.vector, problem.loss()
        self.radius, self.rng, self.device = radius, generator(seed, "volumes"), problem.device
        self.calls, self._maps, dim = 0, True, problem.num_parameters
        shape = POPULATIONS, size
        directions = torch.nn.functional.normalize(self._normal(*shape, dim), dim=-1)
        lengths: Tensor = radius * self._uniform(*shape, 1) ** (1 / dim)
        self.points = self.dropped = lengths * directions
        self.excess = self.measure(self.points.flatten(0, 1)).view(shape)
        self.lowest = float(self.excess.min())
        # the excess that rounding of the loss or of w* makes by itself
        real = torch.finfo(self.centre.dtype)
        shaken = float(self.measure(self.centre * real.eps * self._normal(8, dim)).abs().max())
        self.floor = max(32 * real.eps * abs(self.baseline), 32 * shaken, real.tiny)
        self.proposals = (self._along_axes, self._anywhere, self._between_dropped)
        self.windows = [_Window(2 * radius), _Window(2 * radius), _Window(2.0)]

    @torch.no_grad()
    def measure(self, offsets: Tensor) -> Tensor:
        """L(w* + offset) − L(w*) of many offsets (K, P), NaN as ∞."""
        if len(offsets) == 0:
            return torch.zeros(0, dtype=torch.float64, device=offsets.device)
        self.calls += len(offsets)
        points = self.centre + offsets.to(self.centre)
        total = torch.zeros(len(points), dtype=torch.float64, device=points.device)
        for weight, batch in self.problem.weighted():
            total += weight * self._losses(points, batch).double()
        return (total - self.baseline).nan_to_num(nan=math.inf, posinf=math.inf)

    def _losses(self, points: Tensor, batch: Batch) -> Tensor:
        """The loss of a batch at every point, by ``vmap`` if possible."""

        def loss(theta: Tensor) -> Tensor:
            return self.problem.batch_loss(self.problem.named(theta), batch).reshape(())

        if self._maps:
            held = sum(leaf.numel() for leaf in tree_leaves(batch.data) if isinstance(leaf, Tensor))
            chunk = max(1, CHUNK // (held + self.problem.num_parameters))
            try:
                return torch.cat([torch.vmap(loss)(part) for part in points.split(chunk)])
            except RuntimeError:  # an operation that vmap does not take
                self._maps = False
        return torch.stack([loss(theta) for theta in points])

    def halve(self) -> Tensor:
        """Keep the lower half of each population, twice; return the new levels."""
        ordered = self.excess.sort(dim=1)
        half = self.excess.shape[1] // 2
        rows = torch.arange(POPULATIONS, device=self.device).unsqueeze(-1)
        keep = ordered.indices[:, :half].repeat(1, 2)
        self.dropped = self.points[rows, ordered.indices[:, half:]]
        self.points, self.excess = self.points[rows, keep], self.excess[rows, keep]
        return ordered.values[:, half]

    def move(self, thresholds: Tensor) -> None:
        """Metropolis steps of many lengths within the level sets, of each kind in turn.

        Points move whose trial lies in the ball and below the level; outside no loss is computed.
        """
        for _ in range(TRIALS + TRIALS_PER_PARAMETER * self.points.shape[-1]):
            for propose, window in zip(self.proposals, self.windows, strict=True):
                lengths = window.draw(self._uniform(*self.excess.shape, 1))
                trial = self.points + lengths * propose()
                accepted = trial.square().sum(-1) < self.radius**2
                measured = self.measure(trial[accepted])
                below = measured < thresholds.unsqueeze(-1).expand_as(accepted)[accepted]
                accepted[accepted.clone()] = below
                self.points[accepted], self.excess[accepted] = trial[accepted], measured[below]
                window.learn(lengths, accepted)
        for window in self.windows:
            window.adapt()
        self.lowest = min(self.lowest, float(self.excess.min()))

    def _along_axes(self) -> Tensor:
        """A coordinate for each point, up or down."""
        shape = *self.excess.shape, 1
        axis = torch.randint(self.points.shape[-1], shape, generator=self.rng).to(self.device)
        signs = (self._uniform(*shape) - 0.5).sign()
        return torch.zeros_like(self.points).scatter_(2, axis, signs)

    def _anywhere(self) -> Tensor:
        """A direction uniform on the sphere."""
        return torch.nn.functional.normalize(self._normal(*self.points.shape), dim=-1)

    def _between_dropped(self) -> Tensor:
        """The difference of two points just left out, as long and thin as the level set."""
        pool = self.dropped.flatten(0, 1)
        pick, apart = (
            torch.randint(low, len(pool), self.excess.shape, generator=self.rng) for low in (0, 1)
        )
        return pool[pick.to(self.device)] - pool[((pick + apart) % len(pool)).to(self.device)]

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.rng, dtype=torch.float64).to(self.device)

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.rng, dtype=torch.float64).to(self.device)


@quantity(
    "volume_scaling", lambda problem, _, settings: volume_scaling(problem, seed=settings.seed)
)
def volume_work(problem: Problem, operator: LinearOperator, settings: MeasureSettings) -> Work:
    """The losses of a volume scaling that loses no level to rounding and no point to the ball."""
    moves = KINDS * (TRIALS + TRIALS_PER_PARAMETER * problem.num_parameters)
    most = LEVELS * SAMPLES * moves
    return Work(most // 4, most, 2 * SAMPLES * problem.num_parameters * 8, "losses")
