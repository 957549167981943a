"""Trackers of the curvature: trace, spectrum, leading eigenpairs, and the learning rate times
the sharpness.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lambdahat._core.check import require, require_count, require_positive
from lambdahat._measure import without_vectors
from lambdahat.estimators import gradient_overlap, spectrum, trace
from lambdahat.estimators.sequential import MINIMUM
from lambdahat.operators.base import LinearOperator
from lambdahat.operators.curvature import hessian
from lambdahat.operators.exact.closed_form import MAX_ROUNDS
from lambdahat.problem import Problem
from lambdahat.results import Eigenpairs, Estimate
from lambdahat.training.measuring_base import Reading, SampledTracker, with_errors
from lambdahat.training.step_rules import Stepped, step_rule
from lambdahat.training.warm_starts import leading_pairs

MOST = 200


class TraceTracker(SampledTracker):
    """tr H to ``tol`` at 95 % confidence: column ``trace``. In closed form, without products,
    for many networks.
    """

    name = "trace"

    def __init__(self, *, tol: float = 0.05, max_matvecs: int = MOST, **common: Any) -> None:
        super().__init__(**common)
        self.tol = require_positive(tol, "tol")
        self.max_matvecs = require_count(max_matvecs, "max_matvecs", least=2)

    @property
    def columns(self) -> tuple[str, ...]:
        return with_errors("trace")

    def _read(self, sample: Problem, optimizer: Any) -> Reading:
        found = trace(hessian(sample), self.tol, max_matvecs=self.max_matvecs, seed=self.seed)
        return Reading({"trace": found}, found.cost, found.status, found)

    def _bounds(self, sample: Problem) -> tuple[int, int]:
        operator = hessian(sample)
        if not operator.trace_by:
            return min(MINIMUM, operator.dim), self.max_matvecs
        return 0, 0 if operator.trace_by == "closed form" else MAX_ROUNDS + self.max_matvecs


class _WarmTracker(SampledTracker):
    """Eigenpairs to ``tol`` within ``max_matvecs`` products, by Lanczos from the vectors of the
    last measurement.
    """

    def __init__(self, *, tol: float = 1e-3, max_matvecs: int = MOST, **common: Any) -> None:
        super().__init__(**common)
        self.tol = require_positive(tol, "tol")
        self.max_matvecs = require_count(max_matvecs, "max_matvecs", least=2)
        self._vectors: Tensor | None = None

    def _pairs(self, operator: LinearOperator, k: int = 1, which: str = "largest") -> Eigenpairs:
        found = leading_pairs(
            operator,
            k,
            which,
            warm=self._vectors,
            tol=self.tol,
            max_matvecs=self.max_matvecs,
            seed=self.seed,
        )
        # as it comes back from disk, for sums round by layout
        self._vectors = found.vectors.contiguous()
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"vectors": self._vectors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        found = state["vectors"]
        fits = found is None or (isinstance(found, Tensor) and found.ndim == 2)
        require(
            fits,
            "state['vectors']",
            "be a tensor (P, k), or None",
            found,
            "load what state_dict gave",
        )
        self._vectors = found


class SpectrumTracker(_WarmTracker):
    """The spectrum by Lanczos quadrature of ``depth``, from the same random probe every time.

    Columns ``spectrum_largest`` and ``spectrum_smallest`` (to ``tol``, from last time's two Ritz
    vectors: a random probe of small depth would miss them), ``spectrum_trace``,
    ``spectrum_degeneracy`` (share of eigenvalues at zero, appendix of "Flatness is a False Friend")
    and ``spectrum_negative`` (share below zero).
    """

    name = "spectrum"

    def __init__(self, *, depth: int = 40, **common: Any) -> None:
        super().__init__(**common)
        self.depth = require_count(depth, "depth")

    @property
    def columns(self) -> tuple[str, ...]:
        names = ("largest", "smallest", "trace", "degeneracy", "negative")
        return with_errors(*(f"spectrum_{name}" for name in names))

    def _read(self, sample: Problem, optimizer: Any) -> Reading:
        operator = hessian(sample)
        ends = self._pairs(operator, 1, "both")
        found = spectrum(operator, min(self.depth, operator.dim), seed=self.seed)
        (largest, _), *_, (smallest, _) = ends
        values = {
            "spectrum_largest": largest,
            "spectrum_smallest": smallest,
            "spectrum_trace": found.trace,
            "spectrum_degeneracy": found.degeneracy(),
            "spectrum_negative": found.negative_mass,
        }
        return Reading(values, ends.cost + found.cost, ends.status, found)

    def _bounds(self, sample: Problem) -> tuple[int, int]:
        depth, dim = min(self.depth, sample.num_parameters), sample.num_parameters
        return min(2, dim), depth + min(self.max_matvecs, dim)


class TopTracker(_WarmTracker):
    """The ``k`` largest eigenvalues of the Hessian and what becomes of their vectors, by Lanczos
    from last time's.

    Columns ``top_1`` … ``top_k``; ``top_overlap``, the share of ‖∇L‖² in their span (Eq. 5.34,
    spectral thesis), for one gradient more; ``top_drift`` = 1 − ‖UᵀU'‖²_F/k, U' the vectors of the
    measurement before: 0 where the span has not moved, 1 where it is orthogonal to what it was.
    """

    name = "top"

    def __init__(self, *, k: int = 5, **common: Any) -> None:
        super().__init__(**common)
        self.k = require_count(
            k, "k", 1, self.max_matvecs, "each pair takes a product: raise max_matvecs"
        )

    @property
    def columns(self) -> tuple[str, ...]:
        values = (f"top_{i}" for i in range(1, self.k + 1))
        return (*with_errors(*values, "top_overlap"), "top_drift")

    def _read(self, sample: Problem, optimizer: Any) -> Reading:
        operator, before = hessian(sample), self._vectors
        pairs = self._pairs(operator, min(self.k, operator.dim))
        values: dict[str, float | Estimate] = {
            f"top_{i}": value for i, (value, _) in enumerate(pairs, start=1)
        }
        values["top_overlap"] = _share(sample, pairs)
        values["top_drift"] = math.nan if before is None else subspace_drift(before, pairs.vectors)
        return Reading(values, pairs.cost + 1, pairs.status, without_vectors(pairs))

    def _bounds(self, sample: Problem) -> tuple[int, int]:
        dim = sample.num_parameters
        return min(self.k, dim) + 1, min(self.max_matvecs, dim) + 1


def subspace_drift(before: Tensor, now: Tensor) -> float:
    """1 − ‖UᵀV‖²_F/k of two orthonormal bases (P, k): one less the mean squared cosine of their
    principal angles.

    >>> import torch
    >>> subspace_drift(torch.eye(3)[:, :2], torch.eye(3)[:, 1:])
    0.5
    """
    cosines = before.double().T.to(now.device) @ now.double()
    return min(
        max(1.0 - float(cosines.square().sum()) / max(before.shape[1], now.shape[1]), 0.0), 1.0
    )


def _share(sample: Problem, pairs: Eigenpairs) -> Estimate:
    """The share of ‖g‖² in the span of the pairs; NaN where the gradient is 0 and has no
    direction.
    """
    try:
        overlap = gradient_overlap(sample, pairs)
    except ValueError:
        return Estimate(math.nan, math.nan)
    return Estimate(
        float(overlap.squared.sum()), float((2 * overlap.cosines.abs() * overlap.errors).sum())
    )


class EdgeTracker(_WarmTracker):
    """The learning rate times the sharpness, and the threshold at which steps become unstable (edge
    of stability).

    Column ``edge`` is λ₁(A½(H + W)A½), A = diag(α/d): α·λ₁(H) for SGD, α·λ₁(D^−½HD^−½) for adaptive
    optimisers, with D from their state, W the coupled weight decay. ``edge_threshold`` is 2 without
    momentum, 2(1 + β) with; see ``step_rules``. A run is at the edge where they meet (Cohen et al.
    2021, 2022).
    """

    name = "edge"

    @property
    def columns(self) -> tuple[str, ...]:
        return (*with_errors("edge"), "edge_threshold")

    def _read(self, sample: Problem, optimizer: Any) -> Reading:
        rule = step_rule(sample, optimizer)
        pairs = self._pairs(Stepped(hessian(sample), rule))
        found = Estimate(
            float(pairs.values[0]), float(pairs.residuals[0]), pairs.cost, pairs.status
        )
        return Reading(
            {"edge": found, "edge_threshold": rule.threshold}, pairs.cost, pairs.status, found
        )

    def _bounds(self, sample: Problem) -> tuple[int, int]:
        return 1, min(self.max_matvecs, sample.num_parameters)
