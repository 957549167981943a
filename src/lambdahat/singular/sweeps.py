"""λ̂ over step sizes and temperatures: what the choice of either does to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from lambdahat._core.check import require, require_count, require_positive
from lambdahat._core.progress import report
from lambdahat._core.rng import derived_seed
from lambdahat.problem import Problem, require_problem
from lambdahat.results import Array, Chains, Estimate, LearningCoefficient, Result, Status
from lambdahat.sampling.estimand import inverse_temperature
from lambdahat.sampling.kernels import SGLD
from lambdahat.sampling.running import sample
from lambdahat.singular.coefficient import llc
from lambdahat.singular.stretches import mean_energy

LADDER = (1 / 16, 1 / 4, 1.0, 4.0, 16.0)  # of the calibrated step size
COLDER = (1 / 16, 1 / 4, 1.0)  # of n/log n, where there are no batches
RUNAWAY = 1e3  # energies per parameter beyond any equilibrium: there E[(w − w*)·∇U] = P


@dataclass(frozen=True)
class Sweep(Result):
    """λ̂ of SGLD at every step size ε and temperature nβ of a grid: ``values``, ``stderr``,
    ``acceptance``, (nβ, ε).

    ``statuses`` are those of the chains; of a cell that is DIVERGED there is no value.
    ``temperatures`` name the ``nbetas``. ``chosen`` is the (ε, nβ) that ``llc`` settled on, and
    ``coefficient`` what it found there. All are at one ``localization`` γ. ``cost`` counts
    gradients, those of ``llc`` not among them.
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
        """The inverse temperature at which ``llc`` found its ``coefficient``, at the sweep's
        ``localization``.
        """
        return self.chosen[1]

    def __getitem__(self, place: tuple[int, int]) -> Estimate:
        """The estimate at (nβ, ε), by their numbers in the grid."""
        row, column = place
        return Estimate(
            float(self.values[place]), float(self.stderr[place]), status=self.statuses[row][column]
        )


def sweep(
    problem: Problem,
    step_sizes: Sequence[float] | None = None,
    nbetas: Sequence[float | str] | None = None,
    chains: int = 2,
    draws: int = 500,
    seed: int = 0,
    *,
    burn_in: int | None = None,
    coefficient: LearningCoefficient | None = None,
    mode: str = "auto",
) -> Sweep:
    """λ̂ by SGLD at every step size and temperature, beside the point that ``llc`` chose.

    ``coefficient`` is what ``llc(problem, kernel="sgld")`` found; without it, it is computed. Its
    localization and batch size hold in the whole grid. ``step_sizes`` are by default 1/16 to 16
    times its own. ``nbetas`` are numbers or names, by default B/log B and n/log n with their
    geometric mean, or 1/16 to 1 times n/log n where a step sees all data. ``burn_in`` is by default
    as long as the draws, since the smallest steps need it.
    """
    require_problem(problem)
    require_count(draws, "draws", least=4)
    found = (
        llc(problem, seed=seed, kernel="sgld", mode=mode) if coefficient is None else coefficient
    )
    _require_chains(found)
    assert found.chains is not None
    batch = found.chains.batch_size
    steps = _steps(step_sizes, found.step_size)
    levels = _levels(nbetas, problem.num_terms, batch)
    runs = []
    for row, (nbeta, _) in enumerate(levels):
        for column, step in enumerate(steps):
            report("sweep", row * len(steps) + column, len(levels) * len(steps))
            runs.append(
                sample(
                    problem,
                    SGLD(step, nbeta, found.localization),
                    chains,
                    draws,
                    derived_seed(seed, "sweep", row, column),
                    burn_in=draws if burn_in is None else burn_in,
                    batch_size=batch,
                    mode=mode,
                )
            )
    report("sweep", len(runs), len(runs))
    shape = len(levels), len(steps)
    cells = [cell(run, problem.num_parameters) for run in runs]
    statuses = [each.status for each in cells]
    return Sweep(
        steps,
        np.array([nbeta for nbeta, _ in levels]),
        tuple(name for _, name in levels),
        np.array([float(each) for each in cells]).reshape(shape),
        np.array([float(each.stderr) for each in cells]).reshape(shape),
        np.array([run.diagnostics.acceptance for run in runs]).reshape(shape),
        tuple(tuple(statuses[i : i + shape[1]]) for i in range(0, len(statuses), shape[1])),
        (found.step_size, found.nbeta),
        Estimate(found.value, found.stderr, found.cost, found.status, found.dof),
        found.localization,
        batch,
        sum(run.cost for run in runs),
    )


def cell(chains: Chains, num_parameters: int) -> Estimate:
    """λ̂ of chains; DIVERGED and without a value too where the energies have left all bounds but
    are finite yet.
    """
    found = mean_energy(chains)
    gone = not abs(float(found)) < RUNAWAY * num_parameters
    if gone or chains.status is Status.DIVERGED:
        return Estimate(math.nan, math.nan, chains.cost, Status.DIVERGED)
    return found


def _steps(step_sizes: Sequence[float] | None, chosen: float) -> Array:
    if step_sizes is None:
        return chosen * np.array(LADDER)
    found = sorted({require_positive(step, "step_sizes") for step in step_sizes})
    require(bool(found), "step_sizes", "hold at least one number", "none")
    return np.array(found)


def _levels(
    nbetas: Sequence[float | str] | None, samples: int, batch: int
) -> list[tuple[float, str]]:
    """The temperatures with their names, hottest first."""
    if nbetas is not None:
        require(len(nbetas) > 0, "nbetas", "hold at least one number or name", "none")
        return sorted(inverse_temperature(nbeta, samples, batch) for nbeta in nbetas)
    cold = inverse_temperature("n/log n", samples, batch)
    if batch == samples:
        return [
            (factor * cold[0], cold[1] if factor == 1 else f"{factor:.3g} of it")
            for factor in COLDER
        ]
    hot = inverse_temperature("batch", samples, batch)
    return [hot, (math.sqrt(hot[0] * cold[0]), "their geometric mean"), cold]


def _require_chains(coefficient: LearningCoefficient) -> None:
    known = isinstance(coefficient, LearningCoefficient) and coefficient.chains is not None
    require(
        known,
        "coefficient",
        "be what llc found, with its chains",
        coefficient,
        "leave it out",
        TypeError,
    )
    assert coefficient.chains is not None
    kernel = coefficient.chains.kernel
    require(
        kernel == "SGLD",
        "coefficient",
        "come from SGLD, whose step size is swept",
        kernel,
        'call llc(problem, kernel="sgld")',
    )
