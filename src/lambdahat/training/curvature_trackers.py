"""Trackers of curvature: trace, spectrum, leading eigenpairs, learning rate times sharpness."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lambdahat import krylov
from lambdahat._core import check
from lambdahat._measure import without_vectors
from lambdahat.estimators import basis_capacity, eigenpairs, gradient_overlap, spectrum, trace
from lambdahat.estimators.sequential import MINIMUM
from lambdahat.operators.base import LinearOperator
from lambdahat.operators.curvature import hessian
from lambdahat.operators.exact import MAX_ROUNDS
from lambdahat.problem import Problem
from lambdahat.results import Eigenpairs, Estimate, Status
from lambdahat.training.step_rules import PreconditionedCurvature, step_rule
from lambdahat.training.trackers import SampledTracker, TrackerReading, register, with_errors

# of a random vector in a warm start: a direction that was not there last time is found all the same
ADMIXTURE = 0.1
PATIENCE = 3  # products over which the values must stand still
ROOM = 48  # basis vectors at least
# the tolerance at which copies of repeated eigenvalues are told apart from their neighbours
COPIES_TOLERANCE = 1e-5
LOOK = 4  # steps between looks on a GPU, each a synchronisation


def leading_pairs(
    operator: LinearOperator,
    k: int = 1,
    which: str = "largest",
    *,
    warm: Tensor | None = None,
    tol: float = 1e-3,
    max_matvecs: int = 200,
    seed: int = 0,
) -> Eigenpairs:
    """k extreme eigenpairs by Lanczos from the sum of the columns of ``warm`` and a tenth of a
    random vector.

    ``which`` and ``tol`` are those of ``lh.eigenpairs``: a pair has converged when min(r, r²/gap) ≤
    tol·max|θ|. In a Krylov space of exact eigenvectors k products would do; the better ``warm`` (P,
    k) still fits, the fewer it takes. The basis holds 4k or 48 vectors, whichever is more, and is
    restarted from the wanted half of its Ritz vectors (Wu and Simon 2000). A few products more look
    for further copies of repeated eigenvalues, as in ``lh.eigenpairs``, which takes over where
    there are some.
    """
    operator = krylov.require_symmetric(operator, "leading_pairs")
    check.require_choice(which, "which", ("largest", "smallest", "magnitude", "both"))
    check.require_count(k, "k", 1, operator.dim, "an operator of order P has P eigenvalues")
    check.require_positive(tol, "tol")
    count, wanted = min(2 * k if which == "both" else k, operator.dim), krylov.Wanted(which)
    most = check.require_count(max_matvecs, "max_matvecs", least=count)
    room = min(max(4 * count, ROOM), basis_capacity(operator, count), most, operator.dim)
    state = krylov.Krylov(operator, _start(operator, warm, seed), room)
    starts, settled = 0, _Convergence(tol, count)
    every = LOOK if operator.device.type == "cuda" else 1
    while True:
        state.extend()
        spent = state.products >= most or state.size == operator.dim
        if not spent and state.size < room and state.size % every:
            continue
        broke = state.broke_down() and not spent
        if broke and state.size < count:
            starts += 1
            state.start_again(krylov.random_vector(operator, seed, "leading pairs", starts))
            continue
        if spent or broke or settled.look(state, wanted):
            pairs = _extract(state, wanted, count, tol)
            sure = not pairs.status.ok or state.size == operator.dim
            copies = not sure and _copies(state, wanted, count, tol, seed, most)
            pairs, left = replace(pairs, cost=state.products), most - state.products
            if not copies:
                return pairs
            if left < count:
                return replace(pairs, status=Status.NOT_CONVERGED)
            again = eigenpairs(operator, k, which, min(tol, COPIES_TOLERANCE), left, seed=seed)
            return replace(again, cost=again.cost + state.products)
        if state.size == room:
            _restart(state, wanted, count)


def _copies(
    state: krylov.Krylov, wanted: krylov.Wanted, count: int, tol: float, seed: int, most: int
) -> bool:
    """Whether further copies of the eigenvalues would, or might, change the wanted ones."""
    values = state.ritz()[0]
    ends = wanted.ends(values, count, max(tol * float(values.abs().max()), state.noise()))
    start = krylov.random_vector(state.operator, seed, "copies of leading pairs")
    points = [(end.sign, end.copies) for end in ends if math.isfinite(end.copies)]
    return krylov.missing(state, points, start, most) is not False


def _restart(state: krylov.Krylov, wanted: krylov.Wanted, count: int) -> None:
    """Keep the wanted Ritz vectors and enough of the next to fill half of the rest."""
    values, weights, couplings = state.ritz()
    keep = wanted.select(values, count + (state.size - count) // 2)
    older, newer = keep[keep < state.origin], keep[keep >= state.origin]
    keep = torch.cat([older, newer])
    state.restart(values[keep], weights[:, keep], couplings[keep], len(older))


class _Convergence:
    """Whether the wanted Ritz values are accurate, and have been the same for some products.

    A warm start can be near an eigenvector that is no longer the leading one, with a residual that
    looks as if it were: what is missing then grows from the random part, and moves the values.
    """

    def __init__(self, tol: float, count: int) -> None:
        self.tol, self.count = tol, count
        self.seen: list[tuple[int, Tensor]] = []

    def look(self, state: krylov.Krylov, wanted: krylov.Wanted) -> bool:
        values = state.ritz()[0]
        now, scale = values[wanted.select(values, self.count)], float(values.abs().max())
        earlier = [old for cost, old in self.seen if cost <= state.products - PATIENCE]
        before = [old for old in earlier if len(old) == self.count]
        self.seen.append((state.products, now))
        if not before or not bool(_accurate(state, wanted, self.count, self.tol).all()):
            return False
        return float((now - before[-1]).abs().max()) <= self.tol * scale


def _start(operator: LinearOperator, warm: Tensor | None, seed: int) -> Tensor:
    """The start vector (P,): random, or last time's vectors with a little of it."""
    drawn = krylov.random_vector(operator, seed, "leading pairs", 0)
    if warm is None:
        return drawn
    check.require_shape(warm, (operator.dim, "k"), "warm")
    mixed = warm.to(drawn).sum(dim=1)
    length: Tensor = torch.linalg.vector_norm(mixed)
    return mixed / length.clamp_min(1e-30) + ADMIXTURE * drawn


def _accurate(state: krylov.Krylov, wanted: krylov.Wanted, count: int, tol: float) -> Tensor:
    """Which of the wanted Ritz values (count,) are accurate to ``tol``, or to rounding."""
    values, _, couplings = state.ritz()
    errors = krylov.value_errors(values, couplings.abs())[wanted.select(values, count)]
    target = max(tol * float(values.abs().max()), state.noise())
    reached = torch.zeros(count, dtype=torch.bool)
    reached[: len(errors)] = errors <= target
    return reached


def _extract(state: krylov.Krylov, wanted: krylov.Wanted, count: int, tol: float) -> Eigenpairs:
    """The wanted Ritz pairs; all of them exact where the space is the whole."""
    values, weights, couplings = state.ritz()
    chosen, whole = wanted.select(values, count), state.size == state.operator.dim
    vectors = state.combine(weights[:, chosen])
    noise = max(state.noise(), state.rounding * float(values.abs().max()))
    residuals = torch.hypot(
        couplings[chosen], torch.tensor(krylov.ROUNDING * noise, dtype=torch.float64)
    )
    reached = torch.ones(count, dtype=torch.bool) if whole else _accurate(state, wanted, count, tol)
    status = Status.CONVERGED if bool(reached.all()) else Status.NOT_CONVERGED
    parts = values[chosen], vectors.T, residuals, reached[: len(chosen)]
    return Eigenpairs(*parts, state.products, status, wanted.which)


MAX_MATVECS = 200


@register()
class TraceTracker(SampledTracker):
    """Column ``trace``: tr H to ``tol`` at 95 % confidence, for many networks in closed form."""

    name = "trace"
    columns = with_errors("trace")

    def __init__(self, *, tol: float = 0.05, max_matvecs: int = MAX_MATVECS, **common: Any) -> None:
        super().__init__(**common)
        self.tol = check.require_positive(tol, "tol")
        self.max_matvecs = check.require_count(max_matvecs, "max_matvecs", least=2)

    def _read(self, sample: Problem, optimizer: Any) -> TrackerReading:
        estimate = trace(hessian(sample), self.tol, max_matvecs=self.max_matvecs, seed=self.seed)
        return TrackerReading({"trace": estimate}, estimate.cost, estimate.status, estimate)

    def _bounds(self, sample: Problem) -> tuple[int, int]:
        operator = hessian(sample)
        if not operator.exact.trace_by:
            return min(MINIMUM, operator.dim), self.max_matvecs
        return 0, 0 if operator.exact.trace_by == "closed form" else MAX_ROUNDS + self.max_matvecs


class _WarmTracker(SampledTracker):
    """Eigenpairs to ``tol`` by Lanczos, started from the vectors of the last measurement."""

    def __init__(self, *, tol: float = 1e-3, max_matvecs: int = MAX_MATVECS, **common: Any) -> None:
        super().__init__(**common)
        self.tol = check.require_positive(tol, "tol")
        self.max_matvecs = check.require_count(max_matvecs, "max_matvecs", least=2)
        self._vectors: Tensor | None = None

    def _pairs(self, operator: LinearOperator, k: int = 1, which: str = "largest") -> Eigenpairs:
        limits = {"tol": self.tol, "max_matvecs": self.max_matvecs, "seed": self.seed}
        pairs = leading_pairs(operator, k, which, warm=self._vectors, **limits)  # type: ignore[arg-type]
        # as it comes back from disk, for sums round by layout
        self._vectors = pairs.vectors.contiguous()
        return pairs

    def state_dict(self) -> dict[str, Any]:
        return {"vectors": self._vectors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vectors = state["vectors"]
        fits = vectors is None or (isinstance(vectors, Tensor) and vectors.ndim == 2)
        expected, cure = "be a tensor (P, k), or None", "load what state_dict gave"
        check.require(fits, "state['vectors']", expected, check.describe(vectors), cure)
        self._vectors = vectors


@register("degeneracy")
class SpectrumTracker(_WarmTracker):
    """The spectrum by Lanczos quadrature of ``depth``, from the same random probe every time.

    Columns ``spectrum_largest`` and ``spectrum_smallest`` (to ``tol``, from last time's two Ritz
    vectors: a random probe of small depth would miss them), ``spectrum_trace``,
    ``spectrum_degeneracy`` (share of eigenvalues at zero, appendix of "Flatness is a False Friend")
    and ``spectrum_negative`` (share below zero). Column ``spectrum`` has the nodes of the
    quadrature with their weights.
    """

    name = "spectrum"
    columns = with_errors(
        *(f"spectrum_{part}" for part in ("largest", "smallest", "trace", "degeneracy", "negative"))
    )

    def __init__(self, *, depth: int = 40, **common: Any) -> None:
        super().__init__(**common)
        self.depth = check.require_count(depth, "depth")

    def _read(self, sample: Problem, optimizer: Any) -> TrackerReading:
        operator = hessian(sample)
        ends = self._pairs(operator, 1, "both")
        density = spectrum(operator, min(self.depth, operator.dim), seed=self.seed)
        (largest, _), *_, (smallest, _) = ends
        parts = (largest, smallest, density.trace, density.degeneracy(), density.negative_mass)
        values = dict(zip(self.columns[::2], parts, strict=True))
        cost, shares = ends.cost + density.cost, density.weights / len(density.weights)
        pairs = zip(density.nodes.flat, shares.flat, strict=True)
        nodes = [[float(f"{part:.6g}") for part in pair] for pair in pairs]
        return TrackerReading(values, cost, ends.status, density, distributions={"spectrum": nodes})

    def _bounds(self, sample: Problem) -> tuple[int, int]:
        depth, dim = min(self.depth, sample.num_parameters), sample.num_parameters
        return min(2, dim), depth + min(self.max_matvecs, dim)


@register("overlap", "drift")
class TopTracker(_WarmTracker):
    """The ``k`` largest eigenvalues of the Hessian and how their vectors change, by Lanczos started
    from the previous ones.

    Columns ``top_1`` … ``top_k``; ``top_overlap``, the share of ‖∇L‖² in their span (Eq. 5.34,
    spectral thesis), for one gradient more; ``top_drift`` = 1 − ‖UᵀU'‖²_F/k, U' the vectors of the
    measurement before: 0 where the span has not moved, 1 where it is orthogonal to what it was.
    """

    name = "top"

    def __init__(self, *, k: int = 5, **common: Any) -> None:
        super().__init__(**common)
        cure = "each pair takes a product: raise max_matvecs"
        self.k = check.require_count(k, "k", 1, self.max_matvecs, cure)

    @property
    def columns(self) -> tuple[str, ...]:
        values = (f"top_{i}" for i in range(1, self.k + 1))
        return (*with_errors(*values, "top_overlap"), "top_drift")

    def _read(self, sample: Problem, optimizer: Any) -> TrackerReading:
        operator, before = hessian(sample), self._vectors
        pairs = self._pairs(operator, min(self.k, operator.dim))
        values: dict[str, Any] = {f"top_{i}": value for i, (value, _) in enumerate(pairs, start=1)}
        values["top_overlap"] = _share(sample, pairs)
        values["top_drift"] = math.nan if before is None else subspace_drift(before, pairs.vectors)
        return TrackerReading(values, pairs.cost + 1, pairs.status, without_vectors(pairs))

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
    share = float(cosines.square().sum()) / max(before.shape[1], now.shape[1])
    return min(max(1.0 - share, 0.0), 1.0)


def _share(sample: Problem, pairs: Eigenpairs) -> Estimate:
    """The share of ‖g‖² in the span of the pairs; NaN if the gradient is 0."""
    try:
        overlap = gradient_overlap(sample, pairs)
    except ValueError:
        return Estimate(math.nan, math.nan)
    error = float((2 * overlap.cosines.abs() * overlap.errors).sum())
    return Estimate(float(overlap.squared.sum()), error)


@register()
class EdgeTracker(_WarmTracker):
    """The learning rate times the sharpness, and the threshold at which steps become unstable (edge
    of stability).

    Column ``edge`` is λ₁(A½(H + W)A½), A = diag(α/d): α·λ₁(H) for SGD, α·λ₁(D^−½HD^−½) for adaptive
    optimisers, with D from their state, W the coupled weight decay. ``edge_threshold`` is 2 without
    momentum, 2(1 + β) with; see ``step_rules``. A run is at the edge where they meet (Cohen et al.
    2021, 2022).
    """

    name = "edge"
    columns = (*with_errors("edge"), "edge_threshold")

    def _read(self, sample: Problem, optimizer: Any) -> TrackerReading:
        rule = step_rule(sample, optimizer)
        pairs = self._pairs(PreconditionedCurvature(hessian(sample), rule))
        value, error = float(pairs.values[0]), float(pairs.residuals[0])
        edge = Estimate(value, error, pairs.cost, pairs.status)
        values: dict[str, Any] = {"edge": edge, "edge_threshold": rule.threshold}
        return TrackerReading(values, pairs.cost, pairs.status, edge)

    def _bounds(self, sample: Problem) -> tuple[int, int]:
        return 1, min(self.max_matvecs, sample.num_parameters)
