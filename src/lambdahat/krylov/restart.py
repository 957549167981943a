"""Thick-restart Lanczos: extreme eigenpairs in bounded memory, repeated eigenvalues included."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lambdahat._progress import report
from lambdahat.krylov.lanczos import Krylov, random_vector
from lambdahat.operators.base import LinearOperator

SURE = 1e-5  # a looser tolerance must hold for some more steps: a start that hardly sees φ₁ converges to λ₂ first
CONFIRMING = 8
ROUNDING = 8.0  # the residual that rounding leaves, in roundings of the spectral scale


@dataclass(frozen=True)
class Wanted:
    """Which Ritz values are wanted: "largest", "smallest", "magnitude" or "both" ends."""

    which: str

    def select(self, values: Tensor, count: int) -> Tensor:
        """The indices of the ``count`` most wanted values, or of all if there are fewer, in output order.

        "both" takes half of an even count from each end, and one more for an odd one.
        """
        if self.which == "smallest":
            return values.argsort(stable=True)[:count]
        if self.which == "magnitude":
            return values.abs().argsort(descending=True, stable=True)[:count]
        order, half = values.argsort(descending=True, stable=True), (count + 1) // 2
        if self.which == "largest":
            return order[:count]
        return order if len(order) <= 2 * half else torch.cat([order[:half], order[-half:]])

    def best(self, values: Tensor, count: int) -> Tensor:
        """The ``count`` most wanted values as they are compared: signs do not matter to "magnitude"."""
        chosen = values[self.select(values, count)]
        return chosen.abs() if self.which == "magnitude" else chosen


@dataclass(frozen=True)
class RitzPairs:
    """Approximate eigenpairs: ``values`` (k,), ``vectors`` (P, k), ``residuals`` (k,), ``errors`` of the values (k,).

    ``errors`` estimates |θ − λ| by min(r, r²/gap); ``noise`` is the rounding of the values that no further product
    removes; ``scale`` is the largest |Ritz value| seen.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    errors: Tensor
    noise: float
    scale: float
    products: int


def thick_restart_lanczos(
    operator: LinearOperator, wanted: Wanted, k: int, *, tol: float, max_matvecs: int, capacity: int, seed: int,
    repeated: bool = False, task: str = "eigenpairs", place: str = "device",
) -> RitzPairs:  # fmt: skip
    """The ``k`` most ``wanted`` eigenpairs, to a relative accuracy ``tol`` of the values.

    Thick-restart Lanczos (Wu and Simon 2000), which is Krylov–Schur for symmetric matrices: at most ``capacity`` + 1
    vectors are stored. Stops when min(r, r²/gap) ≤ max(tol·max|θ|, rounding) for all wanted pairs, or when
    ``max_matvecs`` products are spent; with ``tol`` above 1e-5 the values must then stay for eight more products, or a
    third as many as they took, unless they reach 1e-5 before. After an invariant subspace it goes on from a random
    vector, until one such start finds nothing better: this is how repeated eigenvalues are found. ``repeated`` asks for
    such a start in any case.
    """
    state = Krylov(operator, random_vector(operator, seed, task, 0), capacity, place)
    starts, look, cuda = 0, 0, operator.device.type == "cuda"
    settled = _Settled(wanted, k, tol)
    while True:
        state.extend()
        report(task, state.products, max_matvecs)
        must = state.size == capacity or state.products >= max_matvecs or state.size >= look
        broke = (must or not cuda) and state.broke_down()
        if not (must or broke):
            continue
        pairs = _Projection.of(state, wanted, k)
        doubt = broke or repeated or state.origin > 0
        if state.products >= max_matvecs or (pairs.finished(tol, doubt) and (doubt or settled.confirms(pairs))):
            return pairs.extract()
        again = broke or (doubt and pairs.exhausted(tol))
        if again or state.size == capacity:
            pairs.restart(lock=again and not broke, room=state.size < capacity)
        if again:
            starts += 1
            state.start_again(random_vector(operator, seed, task, starts))
        look = state.size + max(4 if cuda else 1, state.size // 16)


@dataclass(frozen=True)
class _Projection:
    """The Ritz pairs of a decomposition at one moment, and what to do next."""

    state: Krylov
    wanted: Wanted
    k: int
    values: Tensor
    weights: Tensor
    couplings: Tensor
    errors: Tensor

    @classmethod
    def of(cls, state: Krylov, wanted: Wanted, k: int) -> _Projection:
        values, weights, couplings = state.ritz()
        errors = torch.empty_like(values)
        for part in (slice(0, state.origin), slice(state.origin, state.size)):
            errors[part] = value_errors(values[part], couplings[part].abs())
        return cls(state, wanted, k, values, weights, couplings, errors)

    @property
    def noise(self) -> float:
        return max(self.state.noise(), self.state.rounding * self.scale)

    @property
    def scale(self) -> float:
        return float(self.values.abs().max())

    def accurate(self, tol: float) -> bool:
        """True when the wanted values have converged, and so has the best value of the newest start."""
        newest = self.values[self.state.origin :]
        if len(self.values) < self.k or len(newest) == 0:
            return False
        chosen = torch.cat([self.wanted.select(self.values, self.k), self.state.origin + self.wanted.select(newest, 1)])
        return bool((self.errors[chosen] <= self.target(tol)).all())

    def target(self, tol: float) -> float:
        return max(tol * self.scale, self.noise)

    def finished(self, tol: float, doubt: bool) -> bool:
        """True when the wanted pairs are accurate, and no copy of a repeated eigenvalue can be missing.

        The best value of the newest start bounds all that the earlier ones left out, copies of their eigenvalues
        among them. One start alone is enough where there is no ``doubt``.
        """
        if self.state.size == self.state.operator.dim:
            return True
        if not self.accurate(tol):
            return False
        older = self.values[: self.state.origin]
        if not doubt or len(older) < self.k:
            return not doubt
        changes = self.wanted.best(self.values, self.k) - self.wanted.best(older, self.k)
        return bool((changes.abs() <= self.target(tol)).all())

    def exhausted(self, tol: float) -> bool:
        """True when the wanted pairs have converged to their residuals, so that they can be locked for a new start."""
        left = self.couplings[self.wanted.select(self.values, self.k)].abs().max()
        return self.accurate(tol) and float(left) <= max(0.1 * tol * self.scale, self.noise)

    def extract(self) -> RitzPairs:
        chosen = self.wanted.select(self.values, self.k)
        vectors = self.state.combine(self.weights[:, chosen])
        floor = torch.tensor(max(ROUNDING * self.noise, self.state.slack), dtype=torch.float64)
        residuals = torch.hypot(self.couplings[chosen], floor)
        return RitzPairs(self.values[chosen], vectors.T, residuals, self.errors[chosen], self.noise, self.scale,
                         self.state.products)  # fmt: skip

    def restart(self, lock: bool, room: bool) -> None:
        """Keep the wanted pairs and, unless they are to be locked, the next of the newest start in half of the room."""
        if room and not lock:
            return
        origin = self.state.origin
        chosen = self.wanted.select(self.values, self.k)
        older, newer = chosen[chosen < origin], chosen[chosen >= origin]
        couplings = self.couplings
        if lock:
            self.state.slack = max(self.state.slack, float(couplings[chosen].abs().max()))
            couplings = torch.zeros_like(couplings)
        else:
            spare = (self.state.size - len(chosen)) // 2
            newer = origin + self.wanted.select(self.values[origin:], len(newer) + spare)
        keep = torch.cat([older, newer])
        self.state.restart(self.values[keep], self.weights[:, keep], couplings[keep], len(older))


class _Settled:
    """Whether values that look converged at a loose tolerance have stayed where they are for some more products."""

    def __init__(self, wanted: Wanted, k: int, tol: float) -> None:
        self._wanted, self._k, self._tol = wanted, k, tol
        self._values: Tensor | None = None
        self._since = 0

    def confirms(self, pairs: _Projection) -> bool:
        """To be asked whenever the pairs look finished."""
        if pairs.state.size == pairs.state.operator.dim or pairs.accurate(min(self._tol, SURE)):
            return True
        values, products = self._wanted.best(pairs.values, self._k), pairs.state.products
        if self._values is None or bool(((values - self._values).abs() > pairs.target(self._tol)).any()):
            self._values, self._since = values, products
        return products - self._since >= max(CONFIRMING, self._since // 3)


def value_errors(values: Tensor, residuals: Tensor) -> Tensor:
    """min(r, r²/gap): how far Ritz values (m,) in ascending order are from eigenvalues (Parlett 1998, Theorem 11.7.1).

    The gap is to the nearest other Ritz value, less that value's own residual.
    """
    if len(values) < 2:
        return residuals.clone()
    distance = (values[:, None] - values[None, :]).abs() - residuals[None, :]
    gap = distance.fill_diagonal_(math.inf).amin(dim=1).clamp_min(0.0)
    return torch.where(gap > residuals, residuals**2 / gap.clamp_min(1e-300), residuals)
