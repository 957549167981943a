"""λ̂ as a function of its settings, and along training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lambdahat._core.check import (
    describe,
    message,
    require,
    require_choice,
    require_count,
    require_positive,
)
from lambdahat._core.progress import report, track
from lambdahat._core.rng import derived_seed
from lambdahat.estimators.quantities import MeasureSettings, Work, quantity
from lambdahat.operators.base import LinearOperator
from lambdahat.problem import Problem, require_problem
from lambdahat.results import Array, Chains, Estimate, LearningCoefficient, Result, Status
from lambdahat.results.measurement import localization_value
from lambdahat.sampling._sample import sample
from lambdahat.sampling.kernels import SGLD, Kernel
from lambdahat.singular._llc import (
    NAMES,
    chain_work,
    default_localization,
    forecast_runs,
    inverse_temperature,
    llc,
)
from lambdahat.singular.observables import mean_energy

LADDER = (1 / 16, 1 / 4, 1.0, 4.0, 16.0)  # the default grid of γ, in units of its centre
Checkpoint = Tensor | Mapping[str, Tensor]
SWEEP_CHAINS, SWEEP_DRAWS = 2, 500  # of every point of a sweep
STEP_LADDER = (1 / 16, 1 / 4, 1.0, 4.0, 16.0)  # of the calibrated step size
COLDER = (1 / 16, 1 / 4, 1.0)  # of n/log n, where there are no batches
RUNAWAY = 1e3  # energies per parameter beyond any equilibrium: there E[(w − w*)·∇U] = P


class _Coefficients:
    """λ̂ and its errors of several results of ``llc``."""

    results: tuple[LearningCoefficient, ...]

    def __len__(self) -> int:
        return len(self.results)

    @property
    def values(self) -> Array:
        """λ̂ of each result."""
        return np.array([float(result) for result in self.results])

    @property
    def stderr(self) -> Array:
        """The standard error of each λ̂."""
        return np.array([float(result.stderr) for result in self.results])


@dataclass(frozen=True)
class CoefficientCurve(_Coefficients, Result):
    """λ̂ on a grid of one of its settings, the other setting fixed.

    Attributes:
        axis: "localization" or "nbeta", the setting that changes.
        grid: Its values, in ascending order.
        results: The estimate at each.
        fixed: The value of the other setting.
        default: The default of ``llc`` on this axis: γ by its rule, or n/ln n (NaN if there are too
            few data for one).
    """

    axis: str
    grid: Array
    results: tuple[LearningCoefficient, ...]
    fixed: float | Tensor
    default: float = math.nan

    def __post_init__(self) -> None:
        _require_one(self.results, "nbeta" if self.axis == "localization" else "localization")

    @property
    def statuses(self) -> tuple[Status, ...]:
        """The status at each point."""
        return tuple(result.status for result in self.results)

    @property
    def status(self) -> Status:
        """The first status that is not CONVERGED, if any."""
        return Status.joint(self.statuses)

    @property
    def slopes(self) -> tuple[Estimate, ...]:
        """dλ̂/d ln γ or dλ̂/d ln nβ at each point, from the draws there (``sensitivity``)."""
        unknown = Estimate(math.nan, math.nan)
        slopes = [result.sensitivity for result in self.results]
        return tuple(unknown if one is None else getattr(one, self.axis) for one in slopes)

    @property
    def cost(self) -> int:
        """The gradients of all points."""
        return sum(result.cost for result in self.results)

    def table(self) -> list[dict[str, Any]]:
        """One row per point: both settings, λ̂, its slope along the axis, cost and status."""
        return [
            {
                "localization": localization_value(result.localization),
                "nbeta": result.nbeta,
                "value": float(result),
                "stderr": float(result.stderr),
                "slope": float(slope),
                "slope_stderr": float(slope.stderr),
                "cost": result.cost,
                "status": result.status.name,
            }
            for result, slope in zip(self.results, self.slopes, strict=True)
        ]


@dataclass(frozen=True)
class Trajectory(_Coefficients, Result):
    """λ̂ at each checkpoint: ``labels`` (steps or epochs, as numbers) and the ``results`` there.

    All results are at one ``nbeta`` and one ``localization``; results at different settings are not
    comparable and are refused.
    """

    labels: Array
    results: tuple[LearningCoefficient, ...]

    def __post_init__(self) -> None:
        for name in ("localization", "nbeta"):
            _require_one(self.results, name)

    @property
    def nbeta(self) -> float:
        """The inverse temperature of all results."""
        return self.results[0].nbeta

    @property
    def localization(self) -> float | Tensor:
        """The localization γ of all results."""
        return self.results[0].localization


def llc_curve(
    problem: Problem,
    localizations: Sequence[float] | None = None,
    nbetas: Sequence[float | str] | None = None,
    **settings: Any,
) -> CoefficientCurve:
    """Estimate λ̂ on a grid of localizations γ, or on a grid of inverse temperatures nβ.

    λ̂(γ, nβ) is defined for given settings. Where the curve is flat, λ̂ is a property of the loss
    alone; where it is not, quote γ and nβ with the value. Each point is ``llc`` with the same other
    settings, seed included, so that the errors of neighbouring points are correlated.

    Args:
        problem: The problem, at the parameters of interest.
        localizations: The values of γ. By default 1/16, 1/4, 1, 4 and 16 times the γ that ``llc``
            takes: the rule's, or the ``localization`` among the settings.
        nbetas: The values of nβ, in place of ``localizations``: numbers, "n/log n" or "batch". γ is
            the same at all of them: the ``localization`` among the settings, or the rule's at n/ln
            n.
        settings: Other settings of ``llc``.

    Returns:
        The results in ascending order of the setting, with the slope of the curve at each point.

    Raises:
        ValueError: If both lists are given, or one is empty, holds duplicates or numbers that are
            not positive, or if the setting on the axis is also given by itself.
    """
    require_problem(problem)
    axis, given = ("localization", localizations) if nbetas is None else ("nbeta", nbetas)
    one = localizations is None or nbetas is None
    expected, cure = "be left out where localizations are given", "vary one setting at a time"
    require(one, "nbetas", expected, "both", cure)
    value, kernel = settings.get(axis), settings.get("kernel")
    free = given is None or value is None
    require(free, axis, f"be left out where {axis}s are given", value)
    if isinstance(kernel, Kernel):
        expected = "be a name, since a kernel has its own nbeta and localization"
        cure = 'give a name such as "hmc", and its settings apart'
        raise TypeError(message("kernel", expected, kernel, cure))
    if nbetas is not None:
        return _over_nbeta(problem, nbetas, settings)
    return _over_localization(problem, localizations, settings)


def _over_localization(
    problem: Problem, localizations: Sequence[float] | None, settings: Mapping[str, Any]
) -> CoefficientCurve:
    centre: LearningCoefficient | None = None
    if localizations is None:
        if settings.get("localization") is not None:
            require_positive(settings["localization"], "localization", "it is the grid's centre")
        report("curve", 0, len(LADDER))
        centre = llc(problem, **settings)  # first: it finds γ
        grid = [factor * float(centre.localization) for factor in LADDER]
    else:
        given = _as_list(localizations, "localizations")
        grid = [require_positive(one, "localizations") for one in given]
        _require_distinct(grid, "localizations", grid)
        grid.sort()
    results = [
        centre
        if centre is not None and gamma == centre.localization
        else llc(problem, **{**settings, "localization": gamma})
        for gamma in track("curve", grid)
    ]
    nbeta = results[0].nbeta
    if centre is None or settings.get("localization") is not None:
        rule, _ = default_localization(problem, nbeta)
    else:
        rule = float(centre.localization)
    return CoefficientCurve("localization", np.array(grid), tuple(results), nbeta, rule)


def _over_nbeta(problem: Problem, nbetas: Any, settings: Mapping[str, Any]) -> CoefficientCurve:
    count, batch = problem.num_terms, settings.get("batch_size")
    default = inverse_temperature("n/log n", count, count)[0] if count > 2 else math.nan
    named = {"n/log n": default}
    if isinstance(batch, int) and batch > 2:
        named["batch"] = inverse_temperature("batch", count, batch)[0]
    grid = _as_list(nbetas, "nbetas")
    for one in grid:  # refuse what is no inverse temperature before any sampling
        if isinstance(one, str):
            inverse_temperature(require_choice(one, "nbetas", NAMES), count, batch or count)
        else:
            require_positive(one, "nbetas")
    values = [named.get(one, math.nan) if isinstance(one, str) else one for one in grid]
    _require_distinct(values, "nbetas", grid)
    gamma = settings.get("localization")
    if gamma is None:
        expected = "be given for so little data, fewer than 3 samples"
        cure = "its rule needs n/log n: pass a number"
        require(count > 2, "localization", expected, f"none with n = {count}", cure)
        gamma, _ = default_localization(problem, default)
    shared = {**settings, "localization": gamma}
    results = [llc(problem, **{**shared, "nbeta": one}) for one in track("curve", grid)]
    results.sort(key=lambda result: result.nbeta)
    places = np.array([result.nbeta for result in results])
    return CoefficientCurve("nbeta", places, tuple(results), results[0].localization, default)


def _as_list(values: Any, name: str) -> list[Any]:
    """The entries of a list, an array or a tensor; at least one."""
    plain = values.tolist() if isinstance(values, Tensor | np.ndarray) else values
    several = isinstance(plain, Iterable) and not isinstance(plain, str | Mapping)
    require(several, name, "be a list of numbers", describe(values), error=TypeError)
    numbers = list(plain)
    require(bool(numbers), name, "hold at least one number", "none")
    return numbers


def _require_distinct(values: Sequence[float], name: str, given: Sequence[Any]) -> None:
    known = [value for value in values if not math.isnan(value)]
    named = [value for value in given if isinstance(value, str)]
    distinct = len(set(known)) == len(known) and len(set(named)) == len(named)
    require(distinct, name, "hold different values", given, "leave out the duplicates")


def _require_one(results: Sequence[LearningCoefficient], name: str) -> None:
    """Refuse results whose ``localization`` or ``nbeta`` differ: their λ̂ do not compare."""
    settings = [torch.as_tensor(getattr(result, name), dtype=torch.float64) for result in results]
    first = settings[0]
    seen = ", ".join(dict.fromkeys(str(localization_value(one)) for one in settings))
    same = all(
        one.shape == first.shape and bool(torch.isclose(one, first, 1e-6, 0.0, True).all())
        for one in settings
    )
    require(same, name, "be the same for all results", seen, "λ̂ depends on it: give it to llc")


def llc_along(
    problem: Problem,
    checkpoints: Mapping[float, Checkpoint] | Sequence[Checkpoint],
    **settings: Any,
) -> Trajectory:
    """λ̂ of the problem at each checkpoint: flat vectors, or state dicts, by step or in order.

    All points are at one nβ and one γ, so that they can be compared: those given, else those of the
    first checkpoint by the rule of ``llc``; the result has both. ``settings`` are those of ``llc``.
    """
    require_problem(problem)
    steps = dict(checkpoints) if isinstance(checkpoints, Mapping) else dict(enumerate(checkpoints))
    require(len(steps) > 0, "checkpoints", "hold at least one", "none")
    results: list[LearningCoefficient] = []
    for step, checkpoint in track("checkpoints", steps.items()):
        results.append(llc(_at(problem, checkpoint, step), **settings))
        if not isinstance(settings.get("kernel"), Kernel):
            settings["localization"] = results[0].localization
    return Trajectory(np.array([float(step) for step in steps]), tuple(results))


def _at(problem: Problem, checkpoint: Checkpoint, step: float) -> Problem:
    """The problem at a checkpoint, with the buffers and held parameters of a state dict."""
    if isinstance(checkpoint, Tensor):
        return problem.at(checkpoint)
    missing = ", ".join([name for name in problem.space.names if name not in checkpoint][:3])
    expected, got = "hold the problem's parameters", f"one without {missing}"
    require(not missing, f"checkpoints[{step}]", expected, got)
    known = {*problem.space.names, *problem.held_names}  # a tied parameter has other names, too
    return problem.at({name: tensor for name, tensor in checkpoint.items() if name in known})


@dataclass(frozen=True)
class Sweep(Result):
    """λ̂ of SGLD at every step size ε and temperature nβ of a grid: ``values``, ``stderr``,
    ``acceptance``, (nβ, ε).

    ``statuses`` are those of the chains; a cell that is DIVERGED has no value. ``temperatures``
    name the ``nbetas``. ``chosen`` is the (ε, nβ) that ``llc`` chose, and ``coefficient`` its
    estimate there. All are at one ``localization`` γ. ``cost`` counts gradients, those of ``llc``
    not among them.
    """

    step_sizes: Array
    nbetas: Array
    temperatures: tuple[str, ...]
    values: Array
    stderr: Array
    acceptance: Array
    statuses: tuple[tuple[Status, ...], ...]
    chosen: tuple[float, float]
    coefficient: Estimate
    localization: float | Tensor
    batch_size: int
    cost: int = 0

    @property
    def nbeta(self) -> float:
        """The inverse temperature at which ``llc`` found its ``coefficient``."""
        return self.chosen[1]

    def __getitem__(self, place: tuple[int, int]) -> Estimate:
        """The estimate at (nβ, ε), by their numbers in the grid."""
        row, column = place
        value, error = float(self.values[place]), float(self.stderr[place])
        return Estimate(value, error, status=self.statuses[row][column])


def sweep(
    problem: Problem,
    step_sizes: Sequence[float] | None = None,
    nbetas: Sequence[float | str] | None = None,
    chains: int = SWEEP_CHAINS,
    draws: int = SWEEP_DRAWS,
    seed: int = 0,
    *,
    burn_in: int | None = None,
    coefficient: LearningCoefficient | None = None,
    mode: str = "auto",
) -> Sweep:
    """λ̂ by SGLD on a grid of step sizes and temperatures, with the point that ``llc`` chooses.

    ``coefficient`` is what ``llc(problem, kernel="sgld")`` found; without it, it is computed. Its
    localization and batch size hold in the whole grid. ``step_sizes`` are by default 1/16 to 16
    times its own. ``nbetas`` are numbers or names, by default B/log B and n/log n with their
    geometric mean, or 1/16 to 1 times n/log n where a step sees all data. ``burn_in`` is by default
    as long as the draws, since the smallest steps need it.
    """
    require_problem(problem)
    require_count(draws, "draws", least=4)
    result = coefficient
    if result is None:
        result = llc(problem, seed=seed, kernel="sgld", mode=mode)
    expected, known = "be what llc found, with its chains", isinstance(result, LearningCoefficient)
    chosen = result.chains if known else None
    if chosen is None:
        raise TypeError(message("coefficient", expected, result, "leave it out"))
    expected, cure = "come from SGLD, whose step size is swept", 'call llc(problem, kernel="sgld")'
    require(chosen.kernel == "SGLD", "coefficient", expected, chosen.kernel, cure)
    steps = result.step_size * np.array(STEP_LADDER)
    if step_sizes is not None:
        steps = np.array(sorted({require_positive(step, "step_sizes") for step in step_sizes}))
    require(len(steps) > 0, "step_sizes", "hold at least one number", "none")
    levels = _levels(nbetas, problem.num_terms, chosen.batch_size)
    options: dict[str, Any] = {"batch_size": chosen.batch_size, "mode": mode}
    options["burn_in"] = draws if burn_in is None else burn_in
    shape = len(levels), len(steps)
    runs: list[Chains] = []
    for row, column in track("sweep", list(np.ndindex(shape))):
        kernel = SGLD(float(steps[column]), levels[row][0], result.localization)
        own = derived_seed(seed, "sweep", row, column)
        runs.append(sample(problem, kernel, chains, draws, own, **options))
    cells = [cell(run, problem.num_parameters) for run in runs]
    statuses = [each.status for each in cells]
    return Sweep(
        step_sizes=steps,
        nbetas=np.array([nbeta for nbeta, _ in levels]),
        temperatures=tuple(name for _, name in levels),
        values=np.array([float(each) for each in cells]).reshape(shape),
        stderr=np.array([float(each.stderr) for each in cells]).reshape(shape),
        acceptance=np.array([run.diagnostics.acceptance for run in runs]).reshape(shape),
        statuses=tuple(
            tuple(statuses[i : i + shape[1]]) for i in range(0, len(statuses), shape[1])
        ),
        chosen=(result.step_size, result.nbeta),
        coefficient=Estimate(result.value, result.stderr, result.cost, result.status, result.dof),
        localization=result.localization,
        batch_size=chosen.batch_size,
        cost=sum(run.cost for run in runs),
    )


def cell(chains: Chains, num_parameters: int) -> Estimate:
    """λ̂ of chains; DIVERGED without a value also where energies left all bounds."""
    energy = mean_energy(chains)
    gone = not abs(float(energy)) < RUNAWAY * num_parameters
    if gone or chains.status is Status.DIVERGED:
        return Estimate(math.nan, math.nan, chains.cost, Status.DIVERGED)
    return energy


def _levels(
    nbetas: Sequence[float | str] | None, samples: int, batch: int
) -> list[tuple[float, str]]:
    """The temperatures with their names, hottest first."""
    if nbetas is not None:
        require(len(nbetas) > 0, "nbetas", "hold at least one number or name", "none")
        return sorted(inverse_temperature(nbeta, samples, batch) for nbeta in nbetas)
    cold = inverse_temperature("n/log n", samples, batch)
    if batch == samples:
        names = [cold[1] if factor == 1 else f"{factor:.3g} of it" for factor in COLDER]
        return [(factor * cold[0], name) for factor, name in zip(COLDER, names, strict=True)]
    hot = inverse_temperature("batch", samples, batch)
    return [hot, (math.sqrt(hot[0] * cold[0]), "their geometric mean"), cold]


quantity(
    "llc_curve",
    lambda problem, _, settings: llc_curve(problem, seed=settings.seed, **settings.sampling),
)(forecast_runs(len(LADDER), len(LADDER)))


def _measure_sweep(problem: Problem, _: LinearOperator, settings: MeasureSettings) -> Sweep:
    """The grid around what SGLD finds; chains, draws and burn-in are those of its points, too."""
    given = settings.sampling
    grid = {name: given[name] for name in ("chains", "draws", "burn_in") if name in given}
    coefficient = llc(problem, seed=settings.seed, **{**given, "kernel": "sgld"})
    return sweep(problem, seed=settings.seed, coefficient=coefficient, **grid)


@quantity("sweep", _measure_sweep)
def sweep_work(problem: Problem, operator: LinearOperator, settings: MeasureSettings) -> Work:
    """SGLD at one point, and then the points of the grid."""
    given, points = settings.sampling, len(STEP_LADDER) * len(COLDER)
    chains, draws = int(given.get("chains", SWEEP_CHAINS)), int(given.get("draws", SWEEP_DRAWS))
    grid = points * chains * (draws + int(given.get("burn_in", draws)))
    first = chain_work(problem, {**given, "kernel": "sgld"})
    return replace(first, fewest=first.fewest + grid, most=first.most + grid)
