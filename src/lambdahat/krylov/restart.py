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

ROUNDING = 8.0  # the residual that rounding leaves, in roundings of the spectral scale
MISSED = 1e-3  # probability with which an eigenvalue may be overlooked
CLEAR = 0.75  # of the tolerance, beyond the least wanted value: copies of such values matter
LOCKED = 0.1  # of the tolerance: residuals with which pairs are locked


@dataclass(frozen=True)
class End:
    """An end of the spectrum at which eigenvalues are wanted, in values times ``sign``, −1 for the
    lower end.

    An eigenvalue that has not been found changes the wanted ones by more than the tolerance if it
    lies beyond ``cut``. The wanted values whose copies would lie there are those beyond ``copies``,
    which is infinite if there are none.
    """

    sign: int
    cut: float
    copies: float = math.inf

    @classmethod
    def of(cls, sign: int, wanted: Tensor, least: float, target: float) -> End:
        """For ``wanted`` values of this end, and the ``least`` of all that are wanted, known to
        ``target``.
        """
        clear = wanted[wanted > least + CLEAR * target]
        copies = float(clear.min()) - (1 - CLEAR) * target if len(clear) else math.inf
        return cls(sign, least + target, copies)

    @property
    def gap(self) -> tuple[float, ...]:
        """The ends of the interval in which only values lie that are no copies."""
        return (self.cut,) if math.isinf(self.copies) else (self.cut, self.copies)


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

    def ends(self, values: Tensor, count: int, target: float) -> tuple[End, ...]:
        """The ends at which an eigenvalue that has not been found would change the wanted values,
        known to ``target``.
        """
        chosen, half = values[self.select(values, count)], (count + 1) // 2
        if self.which == "magnitude":
            least = float(chosen.abs().min())
            return tuple(End.of(sign, sign * chosen, least, target) for sign in (1, -1))
        whole = {"largest": (1, chosen), "smallest": (-1, -chosen)}
        both = (1, chosen[:half]), (-1, -chosen[-half:])
        sides = both if self.which == "both" else (whole[self.which],)
        return tuple(End.of(sign, side, float(side.min()), target) for sign, side in sides)


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
    max(tol·max|θ|, rounding) for all of them, and when a random start would hide an eigenvalue
    that replaces one of them with a probability of at most ``MISSED``.

    The gap is that to another Ritz value, of which a young Krylov space shows too few: the mean of
    a cluster looks like one eigenvalue. And a Krylov space holds one vector of each eigenspace. So
    products from a random vector in its orthogonal complement look for what is missing. If the
    next eigenvalue is too near for that, Lanczos goes on until its own start would hide nothing but
    copies, and the search is for these. Only if there are some, or if the Krylov space ends, does
    Lanczos go on from random vectors beside what was found, until one of them finds no more.
    """
    state = Krylov(operator, random_vector(operator, seed, task, 0), capacity, place)
    starts, look, cuda = 0, 0, operator.device.type == "cuda"
    copies = tried = False
    while True:
        state.extend()
        report(task, state.products, max_matvecs)
        must = state.size == capacity or state.products >= max_matvecs or state.size >= look
        broke = (must or not cuda) and state.broke_down()
        if not (must or broke):
            continue
        pairs = _Projection.of(state, wanted, k)
        several = copies or broke or state.origin > 0
        if pairs.resolved(tol):
            if pairs.complete(tol):
                return pairs.extract()
            points, most = pairs.search(tol, first=not tried), max_matvecs
            if points and not several:
                if not tried:
                    most = min(most, 2 * state.products)
                found = missing(state, points, random_vector(operator, seed, task, 1), most)
                if found is False:
                    return pairs.extract()
                copies, tried = found is True, True
        if state.products >= max_matvecs:
            return pairs.extract(complete=False)
        again = broke or (several and pairs.exhausted(tol))
        if again or state.size == capacity:
            pairs.restart(lock=again and not broke, room=state.size < capacity)
        if again:
            starts += 1  # the first sees the copies that the search has seen
            state.start_again(random_vector(operator, seed, task, starts))
        look = state.size + max(4 if cuda else 1, state.size // 16)


def missing(
    state: Krylov, points: list[tuple[int, float]], start: Tensor, max_matvecs: int
) -> bool | None:
    """Whether eigenvalues beyond one of the ``points``, each a sign and a value, were missed.

    For q the next vector of the decomposition AX = XΘ + qcᵀ, and B the operator projected to the
    complement of X, as many eigenvalues lie beyond x as Ritz values, and as eigenvalues of
    B + Σ_j c_j²/(x − θ_j)·qqᵀ (Schur complement). None if the products do not suffice to tell.
    """
    values, _, couplings = state.ritz()
    answers = []
    for sign, point in points:
        energy = float((couplings**2 / _apart(point, sign * values)).sum())
        answers.append(_misses(state, sign, point, energy, start, max_matvecs))
        if answers[-1] is not False:
            return answers[-1]
    return False


def _misses(
    state: Krylov, sign: int, point: float, energy: float, start: Tensor, max_matvecs: int
) -> bool | None:
    """Whether B + ``energy``·qqᵀ has eigenvalues beyond a point; see ``missing``.

    Lanczos without reorthogonalisation. True when a Ritz value lies there, False when an eigenvalue
    would have gone unnoticed with a probability of at most ``MISSED``.
    """
    basis, operator, count = state.basis, state.operator, state.size
    w, residual = start.to(basis.device, basis.dtype), basis[count]
    for _ in range(2):
        basis.orthogonalise(w, count)
    vector, before = w / norm(w).to(basis.dtype), torch.zeros_like(w)
    alpha: list[float] = []
    beta: list[float] = []
    while state.products < max_matvecs:
        w = sign * (operator @ vector).to(basis.dtype)
        state.products += 1
        require_finite(w)
        w.add_(residual, alpha=energy * float(dot(residual, vector)))
        alpha.append(float(dot(w, vector)))
        w.sub_(alpha[-1] * vector)
        if beta:
            w.sub_(beta[-1] * before)
        basis.orthogonalise(w, count)
        beta.append(float(norm(w)))
        values = _tridiagonal_values(alpha, beta)
        if float(values[-1]) > point:
            return True
        small = BREAKDOWN * state.rounding * float(values.abs().max())
        ended = count + len(alpha) == operator.dim or beta[-1] <= small
        if ended or chance_to_miss(alpha, beta, point, operator.dim - count) <= MISSED:
            return False
        before, vector = vector, w / beta[-1]
    return None


def _apart(point: float, values: Tensor) -> Tensor:
    """``point`` − ``values``, but not 0."""
    gaps = point - values
    return torch.where(gaps == 0, torch.finfo(gaps.dtype).tiny, gaps)


def chance_to_miss(alpha: list[float], beta: list[float], point: float, dim: int) -> float:
    """The probability that a random start in ``dim`` dimensions hides an eigenvalue beyond
    ``point``.

    The coefficients fix moments of the start's spectral measure, whose mass at x is at most
    1/Σp_j(x)², p_j its orthonormal polynomials (Christoffel function; Akhiezer 1965, §2.5).
    """
    before, last, total = 0.0, 1.0, 1.0
    for j, (diagonal, coupling) in enumerate(zip(alpha, beta, strict=True)):
        step = (point - diagonal) * last - (beta[j - 1] * before if j else 0.0)
        if abs(step) >= 1e100 * coupling:  # a Krylov space that has ended, or nearly
            return 0.0
        before, last = last, step / coupling
        total += last**2
    return chance_of_overlap(1.0 / total, dim)


def chance_of_overlap(mass: float, dim: int) -> float:
    """The probability that a random unit vector has a squared overlap of at most ``mass``.

    It is t/dim, t about χ²₁, and below that mass with a probability of at most √(2·dim·mass/π).
    """
    return min(1.0, math.sqrt(2 * dim * mass / math.pi))


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

    def target(self, tol: float) -> float:
        return max(tol * self.scale, self.noise)

    def ends(self, tol: float) -> tuple[End, ...]:
        """Where a missing eigenvalue would change the wanted ones by more than the tolerance."""
        return self.wanted.ends(self.values, self.k, self.target(tol))

    def copies(self, tol: float) -> list[tuple[int, float]]:
        """The ends at which copies of eigenvalues matter, and beyond which value."""
        ends = self.ends(tol)
        return [(end.sign, end.copies) for end in ends if math.isfinite(end.copies)]

    def search(self, tol: float, first: bool) -> list[tuple[int, float]]:
        """Beyond which values to look for missing eigenvalues, none if it is too early.

        At ``first`` for all that matter. If that took too long, only for copies, once nothing else
        can be missing. As many eigenvalues as Ritz values θ_j beyond x are those values up to
        Σ_j c_j²/(θ_j − x), which half of the tolerance is for.
        """
        points = self.copies(tol)
        if first and points:
            points = [(end.sign, end.cut) for end in self.ends(tol)]
        elif not self.likely(tol):
            return []
        for sign, point in points:
            beyond = (sign * self.values - point).clamp_min(0.0)
            energies = self.couplings**2 / torch.where(beyond > 0, beyond, math.inf)
            if float(energies.sum()) > self.target(tol) / 2:
                return []
        return points

    def chance(self, sign: int, point: float) -> float:
        """The probability that the newest start hides an eigenvalue at a ``point``.

        An eigenvector v of eigenvalue y has the overlaps v·x_j = (v·q)c_j/(y − θ_j) with the Ritz
        vectors, and so v·z = (v·q)Σ_j c_j(z·x_j)/(y − θ_j) with the first vector z of this cycle,
        which is the q of the cycle before. Without restarts this is the bound of
        ``chance_to_miss``.
        """
        state, new = self.state, slice(self.state.origin, self.state.size)
        overlap = 1.0
        for values, start in [*state.cycles, (self.values[new], self._start)]:
            overlap *= float((start / _apart(point, sign * values)).sum())
        rest = self.couplings[new] / _apart(point, sign * self.values[new])
        mass = overlap**2 / (1 + float(rest.square().sum()))
        return chance_of_overlap(mass, state.operator.dim - state.origin)

    @property
    def _start(self) -> Tensor:
        """c_j(z·x_j) of the newest start's Ritz vectors with the first vector z of the cycle."""
        state = self.state
        return (self.couplings * self.weights[max(state.origin, state.kept)])[state.origin :]

    def likely(self, tol: float) -> bool:
        """True when no eigenvalue but a copy can be missing among the wanted ones."""
        return all(
            self.chance(end.sign, point) <= MISSED
            for end in self.ends(tol)
            if end.cut < end.copies
            for point in end.gap
        )

    def complete(self, tol: float) -> bool:
        """True when no eigenvalue can be missing among the wanted ones, not even a copy.

        Copies do not matter to a single eigenvalue, or where all wanted ones are equal. Otherwise a
        later start must have ruled them out.
        """
        state, copies = self.state, self.copies(tol)
        if state.size == state.operator.dim:
            return True
        if state.origin == 0:
            return not copies and self.likely(tol)
        ruled_out = (self.chance(*at) <= MISSED and not self.beyond(*at) for at in copies)
        return state.size > state.origin and all(ruled_out)

    def beyond(self, sign: int, point: float) -> bool:
        """True when the newest start has found a value beyond a point."""
        return bool((sign * self.values[self.state.origin :] > point).any())

    def exhausted(self, tol: float) -> bool:
        """True when the newest start has found what it can, so that its pairs can be locked."""
        if not self.resolved(tol):
            return False
        first = self.state.origin == 0
        found = self.likely(tol) if first else any(self.beyond(*at) for at in self.copies(tol))
        left = self.couplings[self.wanted.select(self.values, self.k)].abs().max()
        return found and float(left) <= max(LOCKED * tol * self.scale, self.noise)

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
            self.state.cycles.append((self.values[origin:], self._start))
        keep = torch.cat([older, newer])
        self.state.restart(self.values[keep], self.weights[:, keep], couplings[keep], len(older))


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
