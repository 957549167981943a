"""Whether chains can be believed: mixing, effective sample size, drift, acceptance, divergence."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lambdahat._core.rng import derived_seed
from lambdahat.problem import Problem
from lambdahat.results import Array, Diagnostics, Estimate, Status
from lambdahat.sampling.gradients import OneByOne, full_data
from lambdahat.sampling.hamiltonian import HMC
from lambdahat.sampling.kernels import SGHMC, SGLD, Kernel
from lambdahat.sampling.streams import Streams

PROBE_SAMPLES = 2048
ALONE = 10_000_000  # parameters from which chains are probed one by one
AXES = {"chain_axis": 0, "draw_axis": 1}
RHAT = 1.05  # above it the chains count as not mixed
HUGE = 1e30  # energies beyond are on their way to infinity, and their squares need not be finite


def diagnose(
    energies: Array, distances: Array, acceptance: float, bounded: NDArray[np.int64]
) -> Diagnostics:
    """The diagnostics of energies nβ(L − L*), (chains, draws), over the chains that did not
    diverge.
    """
    diverged = np.logical_not((np.abs(energies) < HUGE).all(axis=1))
    kept = energies[~diverged]
    moving = kept.size > 0 and bool(np.ptp(kept) > 0)
    rhat, bulk, tail, mean = _mixing(kept) if moving and kept.shape[1] >= 4 else (math.nan,) * 4
    return Diagnostics(
        rhat,
        bulk,
        tail,
        mean,
        drift(kept),
        distances.mean(axis=1),
        acceptance,
        diverged,
        bounded,
        drift(distances[~diverged]),
    )


def _mixing(energies: Array) -> tuple[float, float, float, float]:
    from arviz_stats.base import array_stats  # type: ignore[attr-defined]

    half = energies.shape[1] // 2
    pair = (
        np.concatenate([energies[:, :half], energies[:, half : 2 * half]])
        if len(energies) == 1
        else energies
    )
    rhat = float(array_stats.rhat(pair, **AXES))
    return rhat, _ess(energies, "bulk"), _ess(energies, "tail"), _ess(energies, "mean")


def _ess(values: Array, method: str) -> float:
    """The effective sample size for the bulk, the 5 and 95 % quantiles ("tail") or the mean."""
    from arviz_stats.base import array_stats  # type: ignore[attr-defined]

    return float(
        array_stats.ess(
            values, method=method, prob=(0.05, 0.95) if method == "tail" else None, **AXES
        )
    )


def drift(energies: Array) -> Estimate:
    """Mean of the last third of the draws less that of the first, with the standard error over
    chains and blocks.
    """
    chains, draws = energies.shape
    if chains == 0 or draws < 6:
        return Estimate(math.nan, math.nan)
    third = draws // 3
    first, last = energies[:, :third], energies[:, -third:]
    change = last.mean() - first.mean()
    error = math.hypot(standard_error(first), standard_error(last))
    return Estimate(float(change), error)


def standard_error(values: Array) -> float:
    """The standard error of the mean of all values, (chains, draws), autocorrelation and spread
    of chains included.
    """
    if values.size < 2 or np.ptp(values) == 0:
        return 0.0
    if values.shape[1] < 4:
        return (
            float(values.mean(axis=1).std(ddof=1) / math.sqrt(len(values)))
            if len(values) > 1
            else math.nan
        )
    return float(values.std(ddof=1)) / math.sqrt(_ess(values, "mean"))


def verdict(diagnostics: Diagnostics, moved: bool) -> Status:
    """What stands in the way of using the draws."""
    if diagnostics.diverged.any():
        return Status.DIVERGED
    if not moved:
        return Status.REJECTED if diagnostics.acceptance < 0.01 else Status.NOT_MOVING
    if diagnostics.bounded.any():
        return Status.BOUNDED
    change = diagnostics.drift
    drifting = float(change.stderr) > 0 and abs(float(change)) > 4 * float(change.stderr)
    if (diagnostics.rhat > RHAT) or drifting:
        return Status.NOT_MIXED
    return Status.CONVERGED


def is_probed(kernel: Kernel) -> bool:
    """Whether a kernel takes the steps of MALA but never rejects, so that its acceptance is a
    question.
    """
    return isinstance(kernel, SGLD) or (isinstance(kernel, SGHMC) and kernel.friction == 1)


def probed_alone(problem: Problem) -> bool:
    """Whether the acceptance of chains is probed one by one: a step of MALA takes a dozen
    vectors of a chain.
    """
    return problem.memory is not None or problem.num_parameters > ALONE


class AcceptanceProbe:
    """The mean probability that a MALA step of the kernel's ε would be accepted, from where the
    chains are.

    For SGLD, which never rejects, it tells how far its steps are from right: near 1 when ε is small
    enough. It is taken on up to 2,048 samples, always the same; the noise of batches is not in it.
    Kernels with a velocity or a metric of their own take other steps: ``unknown`` says so, and the
    acceptance is NaN.
    """

    def __init__(self, problem: Problem, kernel: Kernel, seed: int) -> None:
        told = f"not known: {type(kernel).__name__} does not take the steps of MALA"
        self.unknown = "" if is_probed(kernel) else told
        few = problem.num_samples > PROBE_SAMPLES and problem.norm != "train"
        alone = problem.alone()  # each rank looks at its own chains
        self._problem = alone.subsample(PROBE_SAMPLES, seed, PROBE_SAMPLES) if few else alone
        self._alone = probed_alone(problem)
        self._gradients = OneByOne(self._problem)
        self._seed, self._centre = (
            seed,
            problem.vector.to(torch.promote_types(problem.dtype, torch.float32)),
        )
        self._seen: list[float] = []
        self._kernel = HMC(
            kernel.step_size,
            kernel.nbeta,
            kernel.localization,
            kernel.scale,
            leapfrog=1,
            jitter=1.0,
        )

    def look(
        self,
        positions: Tensor,
        chains: Sequence[int] | None = None,
        gathered: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """One probe of every chain.

        Where other processes have the rest, ``chains`` are the numbers of those here, and
        ``gathered`` adds the others.
        """
        numbers = range(len(positions)) if chains is None else chains
        found = torch.full(
            (len(positions),), math.nan, dtype=torch.float64, device=positions.device
        )
        # row by row, for of all at once it would take two vectors of every chain
        places = (
            []
            if self.unknown
            else [i for i, row in enumerate(positions) if bool(row.isfinite().all())]
        )
        together = 1 if self._alone else max(len(places), 1)
        for some in (places[i : i + together] for i in range(0, len(places), together)):
            found[some] = self._acceptance(positions[some], [numbers[i] for i in some]).double()
        seen = found if gathered is None else gathered(found)
        if bool(torch.isfinite(seen).any()):
            self._seen.append(float(seen.nanmean()))

    def _acceptance(self, positions: Tensor, numbers: Sequence[int]) -> Tensor:
        """Of one step from each position, those of the chains of these numbers."""
        rng = Streams(derived_seed(self._seed, "probe", len(self._seen)), numbers, positions.device)
        state = self._kernel.init(positions, self._centre)
        _, info = self._kernel.step(state, lambda at: full_data(self._gradients, at), rng)
        assert info.acceptance is not None
        return info.acceptance

    @property
    def acceptance(self) -> float:
        """The mean over all looks, NaN before the first."""
        return float(np.mean(self._seen)) if self._seen else math.nan
