"""Extreme eigenpairs: thick-restart Lanczos, in bounded memory and with repeated eigenvalues, and
simultaneous power iteration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lambdahat._core.device import full_precision
from lambdahat._core.progress import report
from lambdahat.krylov.lanczos import BREAKDOWN, Krylov, dot, norm, random_vector, require_finite
from lambdahat.operators.base import LinearOperator

# with a tolerance above this one values must stay for some more steps: a start that hardly sees φ₁
# converges to λ₂ first
RELIABLE_TOL = 1e-5
CONFIRMING_STEPS = 8
# products whose effect on the values their errors must have foretold
WITNESSED_STEPS = 4
ROUNDING = 8.0  # the residual that rounding leaves, in roundings of the spectral scale
MISSED = 1e-3  # probability with which a search may overlook one missing copy of an eigenvalue


@dataclass(frozen=True)
class Limits:
    """Where an eigenvalue that has not been found would change the answer.

    One below ``low_cut`` or above ``high_cut`` would replace a wanted one. A Krylov space leaves
    out copies of its eigenvalues, so those beyond the cuts lie below ``low`` or above ``high``.
    """

    low_cut: float = -math.inf
    high_cut: float = math.inf
    low: float = -math.inf
    high: float = math.inf

    @property
    def empty(self) -> bool:
        """True when no copy of a wanted value would change the answer."""
        return math.isinf(self.low) and math.isinf(self.high)

    @classmethod
    def beyond(
        cls, top: Tensor, bottom: Tensor, cuts: tuple[float, float], target: float
    ) -> Limits:
        """For values wanted because they are large or small: those beyond a cut may have copies."""
        high_cut, above = cls._end(top, cuts[1], target)
        low_cut, below = cls._end(-bottom, -cuts[0], target)
        return cls(-low_cut, high_cut, -below, above)

    @staticmethod
    def _end(values: Tensor, cut: float, target: float) -> tuple[float, float]:
        clear = values[values > cut + target]
        return (cut, float(clear.min()) - target) if len(clear) else (math.inf, math.inf)


@dataclass(frozen=True)
class Wanted:
    """Which Ritz values are wanted: "largest", "smallest", "magnitude" or "both" ends."""

    which: str

    def select(self, values: Tensor, count: int) -> Tensor:
        """The indices of the ``count`` most wanted values, in output order; "both" takes half of
        each end, rounded up.
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
        """The ``count`` most wanted values, without signs for "magnitude"."""
        chosen = values[self.select(values, count)]
        return chosen.abs() if self.which == "magnitude" else chosen

    def limits(self, values: Tensor, count: int, target: float) -> Limits:
        """Where a missing eigenvalue would change the wanted values, known to ``target``."""
        chosen, half = values[self.select(values, count)], (count + 1) // 2
        if self.which == "magnitude":
            cut = float(chosen.abs().min()) + target
            return Limits.beyond(chosen, chosen, (-cut, cut), target)
        none = chosen[:0]
        top = {"largest": chosen, "both": chosen[:half]}.get(self.which, none)
        bottom = {"smallest": chosen, "both": chosen[-half:]}.get(self.which, none)
        low = float(bottom.max()) - target if len(bottom) else -math.inf
        high = float(top.min()) + target if len(top) else math.inf
        return Limits.beyond(top, bottom, (low, high), target)


@dataclass(frozen=True)
class RitzPairs:
    """Approximate eigenpairs: ``values`` (k,), ``vectors`` (P, k), ``residuals`` (k,), ``errors``
    of the values (k,).

    ``errors`` estimates |θ − λ| by min(r, r²/gap); ``noise`` is the rounding of the values that no
    further product removes; ``scale`` is the largest |Ritz value| seen; ``complete`` is False when
    the products ran out before missing copies of the eigenvalues were ruled out.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    errors: Tensor
    noise: float
    scale: float
    products: int
    complete: bool = True


def thick_restart_lanczos(
    operator: LinearOperator,
    wanted: Wanted,
    k: int,
    *,
    tol: float,
    max_matvecs: int,
    capacity: int,
    seed: int,
    task: str = "eigenpairs",
    place: str = "device",
) -> RitzPairs:
    """The ``k`` most ``wanted`` eigenpairs, to a relative accuracy ``tol`` of the values.

    Thick-restart Lanczos (Wu and Simon 2000), which is Krylov–Schur for symmetric matrices: at most
    ``capacity`` + 1 vectors are stored. The wanted pairs have converged when min(r, r²/gap) ≤
    max(tol·max|θ|, rounding) for all of them; with ``tol`` above 1e-5 the values must then stay for
    eight more products, or a third as many as they took, unless they reach 1e-5 before.

    A Krylov space holds one vector of each eigenspace. So a few more products from a random vector
    in its orthogonal complement look for further copies of the eigenvalues (see ``misses``). Only
    if there are some, or if the Krylov space ends, does Lanczos go on from random vectors beside
    what was found, until one of them finds no more.
    """
    state = Krylov(operator, random_vector(operator, seed, task, 0), capacity, place)
    starts, look, cuda, copies = 0, 0, operator.device.type == "cuda", False
    settled = _Settled(wanted, k, tol)
    while True:
        state.extend()
        report(task, state.products, max_matvecs)
        must = state.size == capacity or state.products >= max_matvecs or state.size >= look
        broke = (must or not cuda) and state.broke_down()
        if not (must or broke):
            continue
        pairs = _Projection.of(state, wanted, k)
        settled.note(pairs)
        several = copies or broke or state.origin > 0
        if pairs.resolved(tol) and (several or settled.confirms(pairs)):
            if pairs.complete(tol):
                return pairs.extract()
            if not several:
                copies = misses(
                    state, pairs.limits(tol), random_vector(operator, seed, task, 1), max_matvecs
                )
                if not copies:
                    return pairs.extract()
        if state.products >= max_matvecs:
            return pairs.extract(complete=False)
        # a start that found nothing new goes on until it rules out more, or it would never be the
        # last
        again = broke or (
            several and pairs.exhausted(tol if pairs.improved(tol) else min(tol, RELIABLE_TOL))
        )
        if again or state.size == capacity:
            pairs.restart(lock=again and not broke, room=state.size < capacity)
        if again:
            starts += 1  # the first sees the copies that the search has seen
            state.start_again(random_vector(operator, seed, task, starts))
        look = state.size + max(4 if cuda else 1, state.size // 16)


def misses(state: Krylov, limits: Limits, start: Tensor, max_matvecs: int) -> bool:
    """Whether there are eigenvalues beyond the cuts in the complement of a decomposition.

    Lanczos without reorthogonalisation on the operator projected to the complement. True when a
    Ritz value lies beyond a cut, or the products run out. False when an eigenvalue beyond
    ``limits`` would have gone unnoticed with a probability of at most ``MISSED``.
    """
    basis, operator, count = state.basis, state.operator, state.size
    w = start.to(basis.device, basis.dtype)
    for _ in range(2):
        basis.orthogonalise(w, count)
    vector, before = w / norm(w).to(basis.dtype), torch.zeros_like(w)
    alpha: list[float] = []
    beta: list[float] = []
    while state.products < max_matvecs:
        w = (operator @ vector).to(basis.dtype)
        state.products += 1
        require_finite(w)
        alpha.append(float(dot(w, vector)))
        w.sub_(alpha[-1] * vector)
        if beta:
            w.sub_(beta[-1] * before)
        basis.orthogonalise(w, count)
        beta.append(float(norm(w)))
        values = _tridiagonal_values(alpha, beta)
        if float(values[0]) < limits.low_cut or float(values[-1]) > limits.high_cut:
            return True
        small = BREAKDOWN * state.rounding * float(values.abs().max())
        ended = count + len(alpha) == operator.dim or beta[-1] <= small
        if ended or chance_to_miss(alpha, beta, limits, operator.dim - count) <= MISSED:
            return False
        before, vector = vector, w / beta[-1]
    return True


def chance_to_miss(alpha: list[float], beta: list[float], limits: Limits, dim: int) -> float:
    """The probability that a random start in ``dim`` dimensions hides an eigenvalue beyond
    ``limits``.

    The coefficients fix moments of the start's spectral measure, whose mass at x is at most
    1/Σp_j(x)², p_j its orthonormal polynomials (Christoffel function; Akhiezer 1965, §2.5). An
    eigenvector's squared overlap with a random vector is t/dim, t about χ²₁, and below that mass
    with a probability of at most √(2·dim/(π·Σp_j²)).
    """
    values = _tridiagonal_values(alpha, beta)
    if float(values[0]) <= limits.low or float(values[-1]) >= limits.high:
        return 1.0
    ends = (end for end in (limits.low, limits.high) if math.isfinite(end))
    mass = max((_largest_mass(alpha, beta, end) for end in ends), default=0.0)
    return min(1.0, math.sqrt(2 * dim * mass / math.pi))


def _largest_mass(alpha: list[float], beta: list[float], point: float) -> float:
    """1/Σp_j(point)² over the orthonormal polynomials of degree 0 to the number of steps."""
    before, last, total = 0.0, 1.0, 1.0
    for j, (diagonal, coupling) in enumerate(zip(alpha, beta, strict=True)):
        step = (point - diagonal) * last - (beta[j - 1] * before if j else 0.0)
        if abs(step) >= 1e100 * coupling:  # a Krylov space that has ended, or nearly
            return 0.0
        before, last = last, step / coupling
        total += last**2
    return 1.0 / total


def _tridiagonal_values(alpha: list[float], beta: list[float]) -> Tensor:
    """The Ritz values of a run, ascending."""
    off = torch.diag(torch.tensor(beta[: len(alpha) - 1], dtype=torch.float64), 1)
    values: Tensor = torch.linalg.eigvalsh(
        torch.diag(torch.tensor(alpha, dtype=torch.float64)) + off + off.T
    )
    return values


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

    def resolved(self, tol: float) -> bool:
        """True when all wanted values have converged."""
        if self.state.size == self.state.operator.dim:
            return True
        chosen = self.wanted.select(self.values, self.k)
        return len(chosen) >= self.k and bool((self.errors[chosen] <= self.target(tol)).all())

    def accurate(self, tol: float) -> bool:
        """True when the wanted values and the newest start's best one have converged."""
        newest = self.values[self.state.origin :]
        if len(newest) == 0 or not self.resolved(tol):
            return False
        best = self.state.origin + self.wanted.select(newest, 1)
        # gaps to the first few values of a new start may be those of mixtures; residuals are sure
        young = self.state.kept <= self.state.origin and len(newest) < CONFIRMING_STEPS
        sure = self.couplings[best].abs() if young and self.state.origin > 0 else self.errors[best]
        return bool((sure <= self.target(tol)).all())

    def target(self, tol: float) -> float:
        return max(tol * self.scale, self.noise)

    def limits(self, tol: float) -> Limits:
        """Where a missing eigenvalue would change the wanted ones by more than the tolerance: half
        of it is for the missing one, half for those that are known.
        """
        return self.wanted.limits(self.values, self.k, self.target(tol) / 2)

    def complete(self, tol: float) -> bool:
        """True when no copy of a repeated eigenvalue can be missing among the wanted ones.

        Copies do not matter to a single eigenvalue, or where all wanted ones are equal. Otherwise a
        later start must have ruled out more, or have converged to nothing better.
        """
        state, origin = self.state, self.state.origin
        limits = self.limits(tol)
        if limits.empty or state.size == state.operator.dim:
            return True
        if origin == 0 or state.size == origin:
            return False
        if state.kept <= origin:  # else the newest start is no longer tridiagonal
            alpha, beta = (part[origin : state.size].tolist() for part in (state.alpha, state.beta))
            if chance_to_miss(alpha, beta, limits, state.operator.dim - origin) <= MISSED:
                return True
        return not self.improved(tol) and self.exhausted(min(tol, RELIABLE_TOL))

    def improved(self, tol: float) -> bool:
        """True when the newest start changed the wanted values, or there were too few."""
        older = self.values[: self.state.origin]
        if len(older) < self.k:
            return True
        changes = self.wanted.best(self.values, self.k) - self.wanted.best(older, self.k)
        return bool((changes.abs() > self.target(tol)).any())

    def exhausted(self, tol: float) -> bool:
        """True when the wanted pairs' residuals have converged, so that they can be locked."""
        left = self.couplings[self.wanted.select(self.values, self.k)].abs().max()
        return self.accurate(tol) and float(left) <= max(0.1 * tol * self.scale, self.noise)

    def extract(self, complete: bool = True) -> RitzPairs:
        chosen = self.wanted.select(self.values, self.k)
        vectors = self.state.combine(self.weights[:, chosen])
        floor = torch.tensor(max(ROUNDING * self.noise, self.state.slack), dtype=torch.float64)
        residuals, values = torch.hypot(self.couplings[chosen], floor), self.values[chosen]
        facts = self.noise, self.scale, self.state.products, complete
        return RitzPairs(values, vectors.T, residuals, self.errors[chosen], *facts)

    def restart(self, lock: bool, room: bool) -> None:
        """Keep the wanted pairs and, unless locked, the next best in half of the room."""
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
    """Whether values that look converged may be believed.

    Their gaps are those to other Ritz values, which a young Krylov space does not see truly: of a
    spectrum with one huge eigenvalue, or two near ones, it shows a mixture far from anything else.
    """

    def __init__(self, wanted: Wanted, k: int, tol: float) -> None:
        self._wanted, self._k, self._tol = wanted, k, tol
        # products, values and their estimated errors at each look
        self._looks: list[tuple[int, Tensor, Tensor]] = []
        self._values: Tensor | None = None
        self._since = 0

    def note(self, pairs: _Projection) -> None:
        """Keep a look at the run."""
        chosen = self._wanted.select(pairs.values, self._k)
        if len(chosen) == self._k:
            values = self._wanted.best(pairs.values, self._k)
            self._looks.append((pairs.state.products, values, pairs.errors[chosen]))

    def confirms(self, pairs: _Projection) -> bool:
        """To be asked whenever the pairs look finished.

        Residuals within a tight tolerance prove it. Else the errors must have been right about the
        change of the values in the last four products. With a loose tolerance, or where no search
        for copies follows that would see what a mixture hides, values must stay for more products.
        """
        if pairs.state.size == pairs.state.operator.dim:
            return True
        chosen, target = self._wanted.select(pairs.values, self._k), pairs.target(self._tol)
        loose = self._tol > RELIABLE_TOL
        if not loose and bool((pairs.couplings[chosen].abs() <= target).all()):
            return True
        if not self._foretold(pairs):
            return False
        searched = loose or not pairs.limits(self._tol).empty
        if searched and pairs.accurate(min(self._tol, RELIABLE_TOL)):
            return True
        values, products = self._wanted.best(pairs.values, self._k), pairs.state.products
        off = None if self._values is None else (values - self._values).abs()
        if off is None or bool((off > target).any()):
            self._values, self._since = values, products
        return products - self._since >= max(CONFIRMING_STEPS, self._since // 3)

    def _foretold(self, pairs: _Projection) -> bool:
        """Whether the values have changed by no more than their errors said."""
        before = [look for look in self._looks if look[0] <= pairs.state.products - WITNESSED_STEPS]
        if not before:
            return False
        _, values, errors = before[-1]
        moved = (self._wanted.best(pairs.values, self._k) - values).abs()
        return bool((moved <= errors + pairs.target(self._tol)).all())


def value_errors(values: Tensor, residuals: Tensor) -> Tensor:
    """min(r, r²/gap): how far Ritz values (m,) in ascending order are from eigenvalues (Parlett
    1998, Theorem 11.7.1).

    The gap is to the nearest other Ritz value, less that value's own residual.
    """
    if len(values) < 2:
        return residuals.clone()
    distance = (values[:, None] - values[None, :]).abs() - residuals[None, :]
    gap = distance.fill_diagonal_(math.inf).amin(dim=1).clamp_min(0.0)
    return torch.where(gap > residuals, residuals**2 / gap.clamp_min(1e-300), residuals)


# vectors for each pair: the basis, its image, and what a QR decomposition or the Ritz vectors take
HELD = 5
ROWS = 1 << 16


def simultaneous_power_iteration(
    operator: LinearOperator,
    k: int,
    *,
    tol: float,
    max_matvecs: int,
    seed: int,
    columns: int | None = None,
) -> RitzPairs:
    """The k eigenpairs of largest magnitude: Q, R = QR(A Q) until residuals on Q are small.

    Algorithm 1 of "Generalizing Regularization of Neural Networks to Correlated Parameter Spaces",
    which stops when successive Q differ little. That says nothing about the values where Q turns
    slowly, so this stops when ‖Av − θv‖ ≤ tol·max|θ|, or rounding, for all Ritz pairs; the
    residuals cost no product. At most ``columns`` columns are multiplied at once. It holds
    ``HELD``·k vectors.
    """
    starts = [random_vector(operator, seed, "power_iteration", column) for column in range(k)]
    image, products, step = torch.stack(starts, dim=1), 0, columns or k
    del starts
    while True:
        basis = torch.linalg.qr(image).Q
        for part, product in zip(basis.split(step, 1), image.split(step, 1), strict=True):
            product.copy_(operator @ part)
        products += k
        report("power_iteration", products, max_matvecs)
        require_finite(image)
        pairs = _rayleigh_ritz(operator, basis, image, products)
        done = float(pairs.errors.max()) <= max(tol * pairs.scale, pairs.noise)
        if done or products + k > max_matvecs:
            return pairs
        del pairs, basis


@full_precision()
def _rayleigh_ritz(
    operator: LinearOperator, basis: Tensor, image: Tensor, products: int
) -> RitzPairs:
    """Ritz pairs on a ``basis`` (P, k) with known ``image``, by descending magnitude."""
    # the copies in float64 are of a few rows at a time
    rows = [slice(i, i + ROWS) for i in range(0, len(basis), ROWS)]
    gram = sum(basis[part].double().T @ image[part].double() for part in rows).cpu()  # type: ignore[union-attr]
    values, weights = torch.linalg.eigh((gram + gram.T) / 2)
    order = values.abs().argsort(descending=True, stable=True)
    values, turn = values[order], weights[:, order].to(basis)
    vectors, moved = basis @ turn, values.to(basis.device)
    squares = torch.zeros_like(moved)
    for part in rows:
        gone = (image[part] @ turn).double() - vectors[part].double() * moved
        squares += gone.square().sum(dim=0)
    scale = float(values.abs().max())
    noise = ROUNDING * float(torch.finfo(operator.dtype).eps) * scale
    residuals = squares.sqrt().cpu()
    return RitzPairs(values, vectors, residuals.clamp_min(noise), residuals, noise, scale, products)
