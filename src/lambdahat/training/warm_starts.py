"""Leading eigenpairs by Lanczos from the vectors of last time: what training turns slowly needs
few products anew.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lambdahat._core.check import require, require_choice, require_count, require_positive
from lambdahat.estimators import basis_capacity, eigenpairs
from lambdahat.krylov import (
    ROUNDING,
    Krylov,
    Wanted,
    misses,
    random_vector,
    require_symmetric,
    value_errors,
)
from lambdahat.operators.base import LinearOperator
from lambdahat.results import Eigenpairs, Status

# of a random vector in a warm start: a direction that was not there last time is found all the same
ADMIXTURE = 0.1
PATIENCE = 3  # products over which the values must stand still
ROOM = 48  # basis vectors at least
# the tolerance at which copies of repeated eigenvalues are told apart from their neighbours
SURE = 1e-5
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
    operator = require_symmetric(operator, "leading_pairs")
    require_choice(which, "which", ("largest", "smallest", "magnitude", "both"))
    require_count(k, "k", 1, operator.dim, "an operator of order P has P eigenvalues")
    require_positive(tol, "tol")
    count, wanted = min(2 * k if which == "both" else k, operator.dim), Wanted(which)
    most = require_count(max_matvecs, "max_matvecs", least=count)
    room = min(max(4 * count, ROOM), basis_capacity(operator, count), most, operator.dim)
    state = Krylov(operator, _start(operator, warm, seed), room)
    starts, settled, every = 0, _Settled(tol, count), LOOK if operator.device.type == "cuda" else 1
    while True:
        state.extend()
        spent = state.products >= most or state.size == operator.dim
        if not spent and state.size < room and state.size % every:
            continue
        broke = state.broke_down() and not spent
        if broke and state.size < count:
            starts += 1
            state.start_again(random_vector(operator, seed, "leading pairs", starts))
            continue
        if spent or broke or settled.look(state, wanted):
            found = _extracted(state, wanted, count, tol)
            sure = not found.status.ok or state.size == operator.dim
            copies = not sure and _copies(state, wanted, count, tol, seed, most)
            found, left = replace(found, cost=state.products), most - state.products
            if not copies:
                return found
            if left < count:
                return replace(found, status=Status.NOT_CONVERGED)
            again = eigenpairs(operator, k, which, min(tol, SURE), left, seed=seed)
            return replace(again, cost=again.cost + state.products)
        if state.size == room:
            _restart(state, wanted, count)


def _copies(state: Krylov, wanted: Wanted, count: int, tol: float, seed: int, most: int) -> bool:
    """Whether further copies of the eigenvalues found would change the wanted ones, or could not
    be ruled out.
    """
    values = state.ritz()[0]
    limits = wanted.limits(values, count, max(tol * float(values.abs().max()), state.noise()))
    start = random_vector(state.operator, seed, "copies of leading pairs")
    return not limits.empty and misses(state, limits, start, most)


def _restart(state: Krylov, wanted: Wanted, count: int) -> None:
    """Keep the wanted Ritz vectors and as many of the next as fill half of the rest; earlier
    starts come first.
    """
    values, weights, couplings = state.ritz()
    keep = wanted.select(values, count + (state.size - count) // 2)
    older, newer = keep[keep < state.origin], keep[keep >= state.origin]
    keep = torch.cat([older, newer])
    state.restart(values[keep], weights[:, keep], couplings[keep], len(older))


class _Settled:
    """Whether the wanted Ritz values are accurate, and have been the same for some products.

    A warm start can be near an eigenvector that is no longer the leading one, with a residual that
    looks as if it were: what is missing then grows from the random part, and moves the values.
    """

    def __init__(self, tol: float, count: int) -> None:
        self.tol, self.count = tol, count
        self.seen: list[tuple[int, Tensor]] = []

    def look(self, state: Krylov, wanted: Wanted) -> bool:
        values = state.ritz()[0]
        now, scale = values[wanted.select(values, self.count)], float(values.abs().max())
        before = [
            old
            for cost, old in self.seen
            if cost <= state.products - PATIENCE and len(old) == self.count
        ]
        self.seen.append((state.products, now))
        if not before or not bool(_reached(state, wanted, self.count, self.tol).all()):
            return False
        return float((now - before[-1]).abs().max()) <= self.tol * scale


def _start(operator: LinearOperator, warm: Tensor | None, seed: int) -> Tensor:
    """The start vector (P,): random, or last time's vectors with a little of it."""
    drawn = random_vector(operator, seed, "leading pairs", 0)
    if warm is None:
        return drawn
    require(
        warm.ndim == 2 and len(warm) == operator.dim,
        "warm",
        f"have shape ({operator.dim}, k)",
        warm,
    )
    mixed = warm.to(drawn).sum(dim=1)
    length: Tensor = torch.linalg.vector_norm(mixed)
    return mixed / length.clamp_min(1e-30) + ADMIXTURE * drawn


def _reached(state: Krylov, wanted: Wanted, count: int, tol: float) -> Tensor:
    """Which of the wanted Ritz values (count,) are accurate to ``tol``, or to rounding."""
    values, _, couplings = state.ritz()
    errors = value_errors(values, couplings.abs())[wanted.select(values, count)]
    target = max(tol * float(values.abs().max()), state.noise())
    reached = torch.zeros(count, dtype=torch.bool)
    reached[: len(errors)] = errors <= target
    return reached


def _extracted(state: Krylov, wanted: Wanted, count: int, tol: float) -> Eigenpairs:
    """The wanted Ritz pairs; all of them exact where the space is the whole."""
    values, weights, couplings = state.ritz()
    chosen, whole = wanted.select(values, count), state.size == state.operator.dim
    vectors = state.combine(weights[:, chosen])
    noise = max(state.noise(), state.rounding * float(values.abs().max()))
    residuals = torch.hypot(couplings[chosen], torch.tensor(ROUNDING * noise, dtype=torch.float64))
    reached = torch.ones(count, dtype=torch.bool) if whole else _reached(state, wanted, count, tol)
    status = Status.CONVERGED if bool(reached.all()) else Status.NOT_CONVERGED
    return Eigenpairs(
        values[chosen], vectors.T, residuals, reached[: len(chosen)], state.products, status
    )
