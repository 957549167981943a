"""``verify``: the learning coefficient at default settings against cases whose answer is known."""

from __future__ import annotations

import math
import re
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from lambdahat._core.check import require, require_count
from lambdahat._core.progress import track
from lambdahat._core.rng import derived_seed
from lambdahat._core.storage import Damaged, digest
from lambdahat.problem import Problem
from lambdahat.results import Estimate, Result, student_quantile
from lambdahat.sampling.diagnostics import combined_degrees
from lambdahat.singular._llc import llc

TOLERANCE = 0.15  # the largest error that passes: this share of λ, or of 1 where λ is smaller
LEVEL, FARTHEST = 0.95, 0.999  # of the interval that should hold the truth, and of that which must


@dataclass(frozen=True)
class KnownCase:
    """A problem whose λ̂ is known: ``truth(nbeta, localization)``, ``asymptotic`` as n → ∞."""

    name: str
    make: Callable[[], Problem]
    truth: Callable[[float, float], Estimate]
    asymptotic: float | None = None


@dataclass(frozen=True)
class CheckedCase(Result):
    """What ``llc`` found of one case, and the truth at the same nβ and γ, which has an error of its
    own if sampled.

    ``asymptotic`` is λ as n → ∞, NaN where it is not known. ``estimate.cost`` counts gradients.
    ``problem`` is a digest of the case's problem, empty in results of early versions.
    """

    case: str
    estimate: Estimate
    truth: Estimate
    asymptotic: float
    nbeta: float
    localization: float
    seconds: float
    seed: int
    problem: str = ""

    @property
    def relative_error(self) -> float:
        """(estimate − truth)/|truth|."""
        truth = float(self.truth)
        difference = float(self.estimate) - truth
        return difference / abs(truth) if truth else math.copysign(math.inf, difference)

    @property
    def stderr(self) -> float:
        """The standard error of the difference."""
        return math.hypot(float(self.estimate.stderr), float(self.truth.stderr))

    @property
    def dof(self) -> float:
        """The degrees of freedom of that error (Welch 1947)."""
        parts = self.estimate, self.truth
        errors = np.array([float(part.stderr) for part in parts])
        return combined_degrees(errors, np.array([part.dof for part in parts]))

    @property
    def deviation(self) -> float:
        """The difference in standard errors."""
        difference = float(self.estimate) - float(self.truth)
        return difference / self.stderr if self.stderr else (0.0 if difference == 0 else math.inf)

    def covers(self, level: float = LEVEL) -> bool:
        """Whether the interval of ``level`` holds the truth."""
        return abs(self.deviation) <= student_quantile(level, self.dof)

    @property
    def verdict(self) -> str:
        """ "agrees": the 95 % interval holds the truth; "near": the 99.9 % interval does, as should
        one case in twenty.

        "fails": neither, or the estimate is off by more than 15 % of λ, or by more than 0.15 if
        λ < 1, however wide its interval. ``llc`` scales its tolerance in the same way.
        """
        truth = float(self.truth)
        off = abs(float(self.estimate) - truth) / max(abs(truth), 1.0)
        if not (self.covers(FARTHEST) and off <= TOLERANCE):
            return "fails"
        return "agrees" if self.covers() else "near"


@dataclass(frozen=True)
class Verification(Result):
    """The comparisons of all cases, in order."""

    rows: tuple[CheckedCase, ...]
    seed: int
    quick: bool

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def median_error(self) -> float:
        """The median of |relative error|."""
        return float(np.median([abs(row.relative_error) for row in self.rows]))

    @property
    def worst_error(self) -> float:
        """The largest |relative error|."""
        return max(abs(row.relative_error) for row in self.rows)

    @property
    def covered(self) -> int:
        """How many 95 % intervals hold the truth."""
        return sum(row.covers() for row in self.rows)

    @property
    def failed(self) -> tuple[str, ...]:
        """The cases that fail."""
        return tuple(row.case for row in self.rows if row.verdict == "fails")

    def table(self) -> list[dict[str, Any]]:
        """One row per case."""
        return [
            {
                "case": row.case,
                "value": float(row.estimate),
                "stderr": float(row.estimate.stderr),
                "dof": row.estimate.dof,
                "nbeta": row.nbeta,
                "localization": row.localization,
                "truth": float(row.truth),
                "truth_stderr": float(row.truth.stderr),
                "asymptotic": row.asymptotic,
                "relative_error": row.relative_error,
                "deviation": row.deviation,
                "gradients": row.estimate.cost,
                "seconds": row.seconds,
                "status": row.estimate.status.name,
                "verdict": row.verdict,
            }
            for row in self.rows
        ]


def verify(
    cases: Sequence[KnownCase] | None = None,
    seed: int = 0,
    quick: bool = False,
    folder: str | Path | None = None,
) -> Verification:
    """Compare ``llc(problem)`` at its defaults with the exact answer of every case.

    ``cases`` are by default those of ``lambdahat.singular.known_cases``; ``quick`` takes one of
    each family. A case has the same seed whichever run beside it. With ``folder`` every finished
    case is written there at once, and a later call runs only what is missing.
    """
    require_count(seed, "seed", least=0)
    if cases is None:
        from lambdahat.singular.known_cases import suite

        cases = suite(quick)
    chosen = list(cases)
    require(bool(chosen), "cases", "hold at least one case", "none")
    names = [case.name for case in chosen]
    apart = len({_file_name(name) for name in names}) == len(names)
    require(apart, "cases", "have names that differ", names)
    rows = []
    for case in track("verify", chosen):
        path = None if folder is None else Path(folder) / "cases" / _file_name(case.name)
        row = None if path is None else _load_comparison(path, seed, case)
        if row is None:
            row = compare(case, seed)
            if path is not None:
                row.save(path)
        rows.append(row)
    verification = Verification(tuple(rows), seed, quick)
    if folder is not None:
        verification.save(Path(folder) / "verification.json")
    return verification


def compare(case: KnownCase, seed: int = 0) -> CheckedCase:
    """Run one case."""
    start, problem = time.perf_counter(), case.make()
    result = llc(problem, seed=derived_seed(seed, case.name))
    seconds = time.perf_counter() - start
    assert not isinstance(result.localization, Tensor)  # llc finds one number for all parameters
    truth = case.truth(result.nbeta, result.localization)
    estimate = Estimate(result.value, result.stderr, result.cost, result.status, result.dof)
    asymptotic = math.nan if case.asymptotic is None else case.asymptotic
    settings = result.nbeta, result.localization, seconds, seed
    return CheckedCase(case.name, estimate, truth, asymptotic, *settings, _mark(problem))


def _mark(problem: Problem) -> str:
    """A digest of all that a problem is made of."""
    parts = [value for name, value in problem.identity().items() if name != "behaviour"]
    return digest(repr(parts).encode())[:32]


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.,-]+", "_", name) + ".json"


def _load_comparison(path: Path, seed: int, case: KnownCase) -> CheckedCase | None:
    """The comparison that an earlier run of the same seed and problem has left."""
    if not path.is_file():
        return None
    try:
        row = CheckedCase.load(path)
    except Damaged as error:
        warnings.warn(f"{error}: running {case.name} again", RuntimeWarning, stacklevel=3)
        return None
    expected, got = f"hold cases of this run, with seed = {seed}", f"{path} with seed = {row.seed}"
    cure = "choose another folder, or delete this one"
    require(row.seed == seed, "folder", expected, got, cure)
    # another problem of the same name has not been run
    return row if row.problem == _mark(case.make()) else None
