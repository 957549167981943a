"""Log-determinants of positive definite operators, with one error bar for the probes and the
truncation together.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import scipy
import torch
from numpy.polynomial import chebyshev

from lambdahat._core.check import (
    require,
    require_choice,
    require_count,
    require_interval,
    require_positive,
)
from lambdahat._core.device import default_context
from lambdahat._core.rng import generator
from lambdahat.estimators._spectrum import (
    DEFAULT_DEPTH,
    GaussLimit,
    basis_for,
    bounded_away,
    lanczos_runs,
    limit_of,
    moments_within,
    quadrature,
    rounding,
    rule_of,
    spectral_ends,
    without_basis,
)
from lambdahat.estimators.estimator_registry import estimator
from lambdahat.estimators.preconditioning import (
    Outliers,
    Preconditioned,
    deflate,
    outliers,
    preconditioned,
    require_precondition,
)
from lambdahat.estimators.sequential import LARGEST_DEFAULT, LEVEL, SMALL
from lambdahat.krylov import (
    BREAKDOWN,
    Basis,
    Lanczos,
    basis_bytes,
    lanczos,
    random_vector,
    require_finite,
    require_symmetric,
    working_dtype,
)
from lambdahat.maxent import MaxentDensity, fit
from lambdahat.maxent.bases import Bounds, to_unit
from lambdahat.operators.base import LinearOperator, Normalised
from lambdahat.operators.matrix import Matrix, OperatorLike
from lambdahat.operators.rounding import MANY, rounding_of
from lambdahat.problem.batches import free_memory
from lambdahat.results import Array, Estimate, Moments, Spectrum, Status, student_quantile

CURE = "add a shift: operator + delta * identity(operator)"
EPSILON = float(np.finfo(np.float64).eps)
# the error of log det for each eigenvalue up to which it is called one of rounding alone
SURE = 0.05
SOLVES = 8  # random vectors that show how long the rows of an inverse are
FACTOR_ENTRY = 2 * (8 + 4)  # bytes of an entry and its mirror image, each a number and an index


def exact_logdet(operator: LinearOperator, scale: float = 1.0) -> Estimate:
    """By Cholesky, or for a sparse matrix by LU without exchanges.

    Their pivots are all positive exactly if A is positive definite. The standard error is the
    first-order effect of rounding: in the factorisation or, unless the entries are stored, in the
    products, √(tr A⁻²) times ε‖A‖ or times the rounding inside a model. Errors quote eigenvalues
    times ``scale``.
    """
    if isinstance(operator, Matrix) and operator.matrix.layout != torch.strided:
        return _sum_of_logs(*_sparse_pivots(operator, scale))
    _require_room(3 * 8 * operator.dim**2, operator)
    before, matrix = operator.matvecs, operator.dense().double()
    require_finite(matrix)
    matrix = (matrix + matrix.T) / 2
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if int(failed):
        least = min(float(torch.linalg.eigvalsh(matrix)[0]), 0.0)
        require_positive_eigenvalue(scale * least, "eigenvalue")
    noise = 0.0
    if isinstance(operator, Matrix):

        def solve(z: Array) -> Array:
            right = torch.as_tensor(z, device=factor.device)
            return np.asarray(torch.cholesky_solve(right, factor).cpu())

        error = _factor_rounding(matrix.diagonal().cpu().numpy(), solve)
    else:
        size = float(torch.linalg.matrix_norm(matrix, math.inf))
        size *= float(torch.finfo(operator.dtype).eps)
        inverse, model = torch.cholesky_inverse(factor), rounding_of(operator, MANY)
        noise = 0.0 if model is None else model.random.error
        largest = inverse.abs().max()  # squares of the entries may leave the range
        error = max(size, noise) * float(largest * torch.linalg.matrix_norm(inverse / largest))
    pivots = factor.diagonal().square().cpu().numpy()
    return _sum_of_logs(pivots, error, operator.matvecs - before, noise)


def require_positive_eigenvalue(least: float, kind: str, after: str = "") -> None:
    """Raise where an eigenvalue is known not to be positive."""
    expected = "be positive definite"
    require(least > 0, "the operator of logdet", expected, f"the {kind} {least:.3g}{after}", CURE)


def _factor_rounding(diagonal: Array, solve: Callable[[Array], Array]) -> float:
    """What the rounding of a factorisation does to log det: ε‖DA⁻¹D‖_F, D² the diagonal of A.

    It factorises A + E with |e_ij| of about ε√(a_ii a_jj), whatever the scale of the rows (Higham
    2002, Theorem 10.5), and log det changes by tr A⁻¹E. The norm is that of a few random vectors.
    """
    root = np.sqrt(diagonal)[:, None]
    signs = torch.randint(0, 2, (len(root), SOLVES), generator=generator(0, "rounding"))
    images = root * solve(root * (2.0 * signs.numpy() - 1.0))
    return EPSILON * float(np.linalg.norm(images)) / math.sqrt(SOLVES)


def _sum_of_logs(pivots: Array, error: float, cost: int = 0, noise: float = 0.0) -> Estimate:
    """Σ log of the pivots; PRECISION_LIMIT if rounding may decide their sign or sum."""
    least, largest, logs = float(pivots.min()), float(pivots.max()), np.log(pivots)
    # roundings of one sign add up
    error = math.hypot(error, EPSILON * (len(logs) / 2 + float(np.abs(logs).sum())))
    fine = least > max(BREAKDOWN * EPSILON * largest, noise) and error <= SURE * len(pivots)
    status = Status.CONVERGED if fine else Status.PRECISION_LIMIT
    return Estimate(float(logs.sum()), error, cost, status)


def _sparse_pivots(operator: Matrix, scale: float) -> tuple[Array, float]:
    """The pivots of SuperLU in symmetric mode, and the error of log det by rounding."""
    from scipy.sparse.linalg import splu

    entries = operator.matrix.to_sparse_coo().coalesce().cpu()
    places, values = entries.indices().numpy(), entries.values().double().numpy()
    matrix = scipy.sparse.csc_array((values, places), shape=operator.shape)
    if FACTOR_ENTRY * operator.dim**2 // 2 > free_memory(torch.device("cpu")):
        _require_room(FACTOR_ENTRY * _envelope(matrix), operator)
    mode = {"SymmetricMode": True}
    try:
        factors = splu(matrix, "MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options=mode)
    except RuntimeError:  # a pivot of exactly 0
        require_positive_eigenvalue(0.0, "pivot")
        raise
    pivots = factors.U.diagonal()
    kept = bool((factors.perm_r == factors.perm_c).all())
    require_positive_eigenvalue(scale * float(pivots.min()) if kept else 0.0, "pivot")
    return np.asarray(pivots), _factor_rounding(matrix.diagonal(), factors.solve)


def _envelope(matrix: scipy.sparse.csc_array) -> int:
    """An upper bound of the entries of the Cholesky factor: the envelope in Cuthill–McKee order.

    SuperLU's own order, minimum degree, rarely fills more, and is known only once it has run.
    """
    place = np.empty(matrix.shape[0], dtype=np.int64)
    place[scipy.sparse.csgraph.reverse_cuthill_mckee(matrix.tocsr(), symmetric_mode=True)] = (
        np.arange(matrix.shape[0])
    )
    entries = matrix.tocoo()
    rows = np.arange(matrix.shape[0])
    first = rows.copy()
    np.minimum.at(first, place[entries.row], place[entries.col])
    return int((rows - first + 1).sum())


def _require_room(need: int, operator: LinearOperator) -> None:
    sparse = isinstance(operator, Matrix) and operator.matrix.layout != torch.strided
    bound = operator.budget() is not None and not sparse
    if bound:
        free = operator.room(1.0)
    else:
        free = free_memory(torch.device("cpu") if sparse else operator.device)
    where = "what is left of the problem's memory" if bound else "the free memory"
    expected = f"fit into {where}, {free:,.0f} bytes"
    got = f"'exact', which {'may need' if sparse else 'needs'} {need:,}"
    require(need <= free, "method", expected, got, 'call logdet(operator, "slq")')


METHODS = ("slq", "maxent", "chebyshev", "exact")
MOMENT_DEPTH = 25
DEFAULT_PROBES = 10
WORTH_MORE = (Status.QUADRATURE, Status.POSITIVITY)  # which more products may still change
# of what is free, for the basis of a run that ``tol`` asks to be longer than the default
MEMORY_SHARE = 0.5
PILOT = 27  # steps of the first run that ``tol`` takes at least
ENOUGH = 2e-4  # the ``tol`` at which a call that gives none ends before its 10 probes of 100 steps
DEFLATIONS = 4  # runs at most: each finds one copy of a repeated eigenvalue


@estimator(torch.logdet, depth=30, precondition="none")
@default_context()
def logdet(
    operator: OperatorLike,
    method: str = "slq",
    depth: int | None = None,
    probes: int | None = None,
    seed: int = 0,
    precondition: str = "auto",
    rank: int | None = None,
    bounds: tuple[float, float] | None = None,
    tol: float | None = None,
    max_matvecs: int | None = None,
) -> Estimate:
    """Estimate the log-determinant log det A = tr log A of a positive definite operator.

    "slq" is stochastic Lanczos quadrature, "maxent" the expectation of log λ under the
    maximum-entropy density with 2·``depth`` Chebyshev moments (MEMe, Algorithm 3 of the spectral
    thesis), "chebyshev" the Chebyshev series of log to that degree (Han, Malioutov and Shin 2015).
    Each makes ``depth`` products for each of ``probes`` probes, and the last two up to 30 more for
    the bounds; "slq" without either makes fewer if the 95 % interval is within 0.02 % sooner, as
    ``tol=2e-4`` would. "exact" is a Cholesky factorisation in float64, sparse if the matrix is; it
    replaces the others if P is at most 100 and neither ``depth`` nor ``tol`` is given. If the
    spectrum has only a few distinct values, Lanczos quadrature is exact on each probe and replaces
    "maxent" and "chebyshev".

    The standard error combines those of the probes and of the truncation in quadrature; the status
    is QUADRATURE if the second is larger. A positive lower bound of the spectrum bounds the
    truncation from both sides. Without one, the truncation error is extrapolated from its decrease
    with depth, and does not include an eigenvalue near 0 that no product reveals: the status is
    POSITIVITY if no Ritz value at the lower end has converged above 0 either. A non-positive
    eigenvalue raises an error that names it.

    Args:
        operator: The operator, or a dense or sparse matrix.
        method: "slq", "maxent", "chebyshev" or "exact".
        depth: Products for each probe; by default at most 100 for "slq" and 25 for the others.
        probes: The number of probes, by default 10, for "slq" at most.
        seed: The seed of the probes.
        precondition: "jacobi", "cholesky", "none" or "auto", as in ``preconditioned``: the
            determinant of P is exact, and only that of P^{−½}AP^{−½} is estimated. "auto" also
            moves isolated eigenvalues into the bulk if a first, additional run shows that they make
            much of the error.
        rank: The rank of a Cholesky factor.
        bounds: An interval that holds the spectrum of A itself, checked against Ritz values; by
            default the lower end is what is known (Gershgorin's circles, a kernel matrix's noise).
        tol: The accuracy, in place of ``depth`` and ``probes``: the 95 % interval has half-width at
            most tol·max(|log det A|, ‖log A‖_F), the norm being that of the estimated part.
        max_matvecs: The most products to spend on ``tol``, by default 4000; BUDGET_SPENT if they do
            not suffice. If P products cost less, the exact determinant is computed.

    Returns:
        The estimate with its standard error, its cost in products and a status.

    Raises:
        ValueError: If A is not positive definite or ``bounds`` do not hold its spectrum; the
            message has the value.
    """
    require_choice(method, "method", METHODS)
    operator = require_symmetric(operator, "logdet")
    depth = None if depth is None else require_count(depth, "depth")
    if probes is not None:
        probes = require_count(probes, "probes", 2 if method in ("maxent", "chebyshev") else 1)
    require_precondition(precondition, rank, operator.dim)
    bounds = None if bounds is None else require_interval(bounds, "bounds", least=0.0)
    limit = LARGEST_DEFAULT
    if tol is None:
        cure = "depth · probes is the cost"
        require(max_matvecs is None, "max_matvecs", "come with tol", repr(max_matvecs), cure)
    else:
        require_positive(tol, "tol")
        got, alone = f"depth={depth!r} and probes={probes!r}", depth is None and probes is None
        require(alone, "tol", "come without depth and probes, which it sets", got)
    if max_matvecs is not None:
        limit = require_count(max_matvecs, "max_matvecs", least=2)
    plain = Preconditioned(operator, operator)
    task = _Task(plain, bounds, depth, probes, seed, precondition != "none")
    return _estimate(task, method, precondition, rank, tol, limit)


def _estimate(
    task: _Task, method: str, precondition: str, rank: int | None, tol: float | None, limit: int
) -> Estimate:
    """log det by a method; an operator of extreme scale is brought to ordinary scale first."""
    operator, bounds = task.ready.original, task.bounds
    small = operator.dim <= (DEFAULT_DEPTH if tol is None else SMALL)
    if method == "exact" or (task.depth is None and small):
        return _exact(task)
    unit = Normalised(operator)
    unit.settle()
    if unit.exponent and isinstance(operator, Matrix) and operator.dtype != torch.float64:
        # scaled in float32, small entries beside large ones would lose their digits
        wide = Matrix(operator.matrix.double(), symmetric=True, psd=operator.psd)
        inner = dataclasses.replace(task, ready=Preconditioned(wide, wide))
        found = _estimate(inner, method, precondition, rank, tol, limit)
        return dataclasses.replace(found, cost=found.cost + unit.matvecs + unit.repeated)
    if unit.exponent:  # squares of such entries leave the dtype
        half = unit.exponent // 2
        factor = 2.0 ** (-2 * half)
        root = torch.full((operator.dim,), 2.0**-half, dtype=operator.dtype, device=operator.device)
        scaled = operator.rescaled(root) if isinstance(operator, Matrix) else factor * operator
        within = None if bounds is None else (bounds[0] * factor, bounds[1] * factor)
        ready = Preconditioned(scaled, scaled)
        inner = dataclasses.replace(task, ready=ready, bounds=within, scale=task.scale / factor)
        found = _estimate(inner, method, precondition, rank, tol, limit)
        value = float(found) + operator.dim * 2 * half * math.log(2.0)
        cost = found.cost + unit.matvecs + unit.repeated
        return dataclasses.replace(found, value=value, cost=cost)
    ready = preconditioned(operator, precondition, rank, task.scale)
    ready = dataclasses.replace(ready, cost=ready.cost + unit.matvecs + unit.repeated)
    if bounds is not None and ready.name:
        ready = dataclasses.replace(ready, cost=ready.cost + _check_bounds(task))
    task = dataclasses.replace(task, ready=ready)
    if tol is None and method == "slq" and task.depth is None and task.probes is None:
        return _slq_to(task, ENOUGH, (DEFAULT_PROBES + DEFLATIONS) * DEFAULT_DEPTH, DEFAULT_PROBES)
    if tol is None:
        return _ESTIMATES[method](task).estimate()
    left = max(limit - ready.cost, 2)
    if method == "slq":
        return _slq_to(task, tol, left)
    return _moments_to(_ESTIMATES[method], task, tol, left)


@dataclasses.dataclass(frozen=True)
class _Task:
    """What every method works on; ``bounds`` are of A itself.

    ``deflate`` allows moving outliers; ``apart`` are known outliers left in their place;
    ``positive`` says that a longer run has seen the least eigenvalue above 0. Errors quote numbers
    times ``scale``, which makes them those of the operator that was given.
    """

    ready: Preconditioned
    bounds: Bounds | None
    depth: int | None
    probes: int | None
    seed: int
    deflate: bool
    apart: Outliers | None = None
    positive: bool = False
    scale: float = 1.0

    @property
    def inner(self) -> LinearOperator:
        """The operator whose log-determinant is estimated."""
        return self.ready.operator

    @property
    def known(self) -> Bounds:
        """What is known of both ends of its spectrum."""
        return self.ready.bounds if self.bounds is None else self.ready.inside(self.bounds)

    @property
    def count(self) -> int:
        """The number of probes."""
        return DEFAULT_PROBES if self.probes is None else self.probes

    def look(self, low: float, high: float, noise: float) -> None:
        """Refuse Ritz values that are not positive, or not within the bounds."""
        _require_positive(low, self.ready, self.scale)
        if self.bounds is not None:
            left, right = self.ready.inside(self.bounds)
            scaled = " at most" if self.ready.name else ""
            self.require_bounds(low >= left - noise, low * self.ready.largest, scaled)
            scaled = scaled and " at least"
            self.require_bounds(high <= right + noise, high * self.ready.least, scaled)

    def require_bounds(self, fine: bool, value: float, kind: str = "") -> None:
        """Raise unless the bounds are ``fine``, with the Ritz value that they do not hold."""
        assert self.bounds is not None
        given = self.bounds[0] * self.scale, self.bounds[1] * self.scale
        got = f"{given} and a Ritz value of{kind} {value * self.scale:.6g}"
        expected = "hold the whole spectrum of A"
        require(fine, "bounds", expected, got, "pass wider bounds, or leave them out")


def _check_bounds(task: _Task) -> int:
    """Refuse bounds that Ritz values of A lie outside of; the products spent."""
    assert task.bounds is not None
    ends = spectral_ends(task.ready.original, task.seed)
    noise = rounding(task.ready.original, [ends.run])
    task.require_bounds(ends.low >= task.bounds[0] - noise, ends.low)
    task.require_bounds(ends.high <= task.bounds[1] + noise, ends.high)
    return ends.cost


def _exact(task: _Task, spent: int = 0) -> Estimate:
    if task.bounds is not None:
        spent += _check_bounds(task)
    found = exact_logdet(task.ready.original, task.scale)
    return dataclasses.replace(found, cost=found.cost + spent)


@dataclasses.dataclass(frozen=True)
class _Reading:
    """log det of the operator within a task; truncation may change each log λ by ±``unsure``.

    ``rough`` is the same for rounding. ``found`` has the error of the probes alone; ``size`` is
    ‖log‖_F of the operator.
    """

    task: _Task
    found: Estimate
    size: float
    unsure: float
    rough: float = 0.0

    def bias(self) -> float:
        """What truncation and rounding add to the standard error.

        A bound counts as a uniform distribution, of standard deviation bound/√3; 1.96/√3 > 1.
        """
        return self.task.inner.dim * math.hypot(self.unsure, self.rough) / math.sqrt(3.0)

    @property
    def nothing(self) -> float:
        """A negligible error: the rounding of the entries makes as much."""
        inner = self.task.inner
        return inner.dim * max(1e-9, 8 * float(torch.finfo(inner.dtype).eps))

    def allowed(self, tol: float) -> float:
        """The half-width of the 95 % interval that ``tol`` asks for."""
        value = abs(float(self.found) + self.task.ready.logdet)
        return max(tol * max(value, self.size), 2 * self.nothing)

    def estimate(self, reached: bool = False) -> Estimate:
        """log det A with its whole error, of Satterthwaite's degrees of freedom.

        QUADRATURE if truncation is the largest part, unless the error has ``reached`` what was
        asked.
        """
        found, inner, ready = self.found, self.task.inner, self.task.ready
        noise, total = float(found.stderr), math.hypot(float(found.stderr), self.bias())
        few = noise > 1e-60 * total and math.isfinite(found.dof)
        dof = found.dof * (total / noise) ** 4 if few else math.inf
        status = found.status
        bias, rest = (inner.dim * part / math.sqrt(3.0) for part in (self.unsure, self.rough))
        if status in (Status.CONVERGED, Status.POSITIVITY) and not reached:
            if bias > max(noise, rest, self.nothing):
                status = Status.QUADRATURE
            elif rest > max(noise, bias, 1e3 * self.nothing):
                status = Status.PRECISION_LIMIT
        return Estimate(float(found) + ready.logdet, total, found.cost + ready.cost, status, dof)


def _slq(task: _Task) -> _Reading:
    """Gauss rules of log, corrected for what more depth would still change."""
    steps = min(DEFAULT_DEPTH, task.inner.dim) if task.depth is None else task.depth
    store = _store(task, steps)
    for probe in range(DEFLATIONS):
        pilot = _pilot(task, steps, store, probe=probe)
        apart = outliers(task.inner, pilot)
        if apart is None or not task.deflate or probe == DEFLATIONS - 1:
            break
        # a probe that chose what is moved is not used again
        task = dataclasses.replace(task, ready=deflate(task.ready, pilot, apart))
    task, runs = dataclasses.replace(task, apart=apart), [without_basis(pilot)]
    if task.count > 1:
        others = task.count - 1
        runs += lanczos_runs(task.inner, steps, others, task.seed, "logdet", store, probe + 1)
    return _read_runs(task, runs)


def _slq_to(task: _Task, tol: float, limit: int, most: int | None = None) -> Estimate:
    """As few and as short runs as make the 95 % interval as narrow as ``tol`` asks for.

    The first run goes on until the truncation takes at most a share of the interval, and for at
    least 27 steps, which show outliers and whether the least eigenvalue is above 0. The number of
    the others follows from the variance of one, 2‖log A − p(A)‖²_F, by its own Gauss rule. Runs
    that prove too short are dropped for longer ones, unless there are to be ``most`` probes of the
    default depth, whose result stands whether or not it is as narrow.
    """
    inner, quantile, first = task.inner, student_quantile(LEVEL, math.inf), task.ready.cost
    before, probe, cap, share, deflations = inner.matvecs, 0, DEFAULT_DEPTH, 0.6, DEFLATIONS

    def enough(run: Lanczos) -> bool:
        reading = _read_runs(task, [run])
        if quantile * reading.bias() <= share * reading.allowed(tol):
            lengths.append(len(run.alpha))
        return bool(lengths) and len(run.alpha) >= PILOT

    store = _store(task, min(cap, inner.dim, max(1, limit)))
    while True:
        lengths: list[int] = []
        steps = min(cap, inner.dim, max(1, limit - inner.matvecs + before))
        if steps >= len(store.rows):
            del store  # before there are two
            store = _store(task, steps)
        pilot = _pilot(task, steps, store, enough, probe)
        probe = probe + 1
        depth = min([*lengths, len(pilot.alpha)])
        apart = outliers(task.inner, pilot)
        if apart is not None and task.deflate and deflations:
            task = dataclasses.replace(task, ready=deflate(task.ready, pilot, apart))
            deflations = deflations - 1
            continue
        longer = most is None or depth < len(pilot.alpha)
        task = dataclasses.replace(task, apart=apart, positive=longer and bounded_away(pilot))
        runs = [without_basis(pilot.leading(depth))]
        while True:
            reading, spent = _read_runs(task, runs), first + inner.matvecs - before
            found, allowed, left = reading.estimate(), reading.allowed(tol), limit - spent + first
            narrow = float(found.stderr) * student_quantile(LEVEL, found.dof) <= allowed
            if narrow and (len(runs) > 1 or depth < 8):
                return dataclasses.replace(reading.estimate(reached=True), cost=spent)
            noise, bias = float(reading.found.stderr), quantile * reading.bias()
            if most is None and bias > 0.9 * allowed:
                break
            room = math.sqrt(max(allowed**2 - bias**2, (0.1 * allowed) ** 2))
            quotient = student_quantile(LEVEL, reading.found.dof)
            wanted = math.ceil(1.1 * len(runs) * (quotient * noise / room) ** 2)
            missing = max(1, wanted - len(runs))
            if most is not None:
                missing = min(missing, most - len(runs))
                if missing <= 0:
                    return dataclasses.replace(found, cost=spent)
            elif missing * depth >= inner.dim <= left:
                return _exact(task, spent)
            if depth > left:
                return dataclasses.replace(found, cost=spent, status=Status.BUDGET_SPENT)
            count = min(missing, 3 * len(runs), left // depth)
            runs += lanczos_runs(task.inner, depth, count, task.seed, "logdet", store, probe)
            probe += count
        # deeper runs, where rounding is not what stops, and where they can be afforded and kept
        if 2 * depth >= inner.dim <= left:
            return _exact(task, spent)
        cap, share = 2 * depth if depth == cap else cap, share / 2
        room = inner.room(MEMORY_SHARE) / basis_bytes(1, inner.dim, working_dtype(inner), "device")
        if left < depth or cap > max(room, DEFAULT_DEPTH) or reading.rough > reading.unsure:
            status = found.status if reading.rough > reading.unsure else Status.BUDGET_SPENT
            return dataclasses.replace(found, cost=spent, status=status)


def _moments_to(
    method: Callable[[_Task], _Reading], task: _Task, tol: float, limit: int
) -> Estimate:
    """``method`` with more depth or probes until the 95 % interval is as narrow as ``tol`` asks."""
    depth, probes, spent = max(min(MOMENT_DEPTH // 2, limit // 6), 1), 6, 0
    while True:
        reading = method(dataclasses.replace(task, depth=min(depth, task.inner.dim), probes=probes))
        found = reading.estimate()
        spent += found.cost - task.ready.cost
        width = float(found.stderr) * student_quantile(LEVEL, found.dof)
        allowed = reading.allowed(tol)
        if width <= allowed:
            return dataclasses.replace(reading.estimate(reached=True), cost=task.ready.cost + spent)
        noise, bias = 2.2 * float(reading.found.stderr) / allowed, 2.2 * reading.bias() / allowed
        depth = math.ceil(1.5 * depth) if bias > 0.6 else depth
        wanted = max(probes + 1, math.ceil(1.1 * probes * (noise / 0.7) ** 2))
        probes = min(4 * probes, wanted) if noise > 0.7 else probes + 1
        worth = found.status.ok or found.status in WORTH_MORE
        if depth * wanted >= task.inner.dim <= limit - spent:
            return _exact(task, task.ready.cost + spent)
        if spent + depth * probes > limit or not worth:
            status = Status.BUDGET_SPENT if worth else found.status
            return dataclasses.replace(found, cost=task.ready.cost + spent, status=status)


def _store(task: _Task, steps: int) -> Basis:
    """Room for the basis of one run, which the next writes over."""
    require_count(steps, "depth", 1, task.inner.dim, "at this size op.dense() is exact")
    return basis_for(task.inner, steps, "auto")


def _pilot(
    task: _Task,
    steps: int,
    store: Basis,
    enough: Callable[[Lanczos], bool] | None = None,
    probe: int = 0,
) -> Lanczos:
    """The run of the first probe, with its basis."""
    start = random_vector(task.inner, task.seed, "sphere", probe)
    return lanczos(task.inner, start, steps, "logdet", (0, task.count * steps), store, enough)


def _read_runs(task: _Task, runs: list[Lanczos]) -> _Reading:
    """log det of the operator within from one run for each probe, all of the same depth."""
    inner, measure, noise = task.inner, quadrature(task.inner, runs), rounding(task.inner, runs)
    least = float(measure.nodes.min())
    task.look(least, float(measure.nodes.max()), noise)
    known = task.known[0]
    polynomial, mean = _control(task.ready, measure)
    found = measure.expectation(lambda nodes: np.log(nodes) - polynomial(nodes), inner.dim)
    short = quadrature(inner, runs, max(1, measure.nodes.shape[1] // 2))
    half = short.expectation(lambda nodes: np.log(nodes) - polynomial(nodes), inner.dim)
    # few nodes see too little of log² near 0: at most as much again as the second half of the depth
    # has added
    variance = float(found.stderr) ** 2
    variance += max(0.0, variance - float(half.stderr) ** 2)
    # and probes that happen to miss an eigenvalue that stands out see too little of what it adds
    variance = max(variance, 0.0 if task.apart is None else 2.0 / len(runs) * task.apart.squares())
    limit = limit_of(runs, known if known > 0 else noise, known > 0)
    value = float(found) + inner.dim * (mean + limit.value - limit.gauss)
    status = Status.CONVERGED
    if least <= noise:
        status = Status.PRECISION_LIMIT
    elif known <= 0 and not task.positive and not all(bounded_away(run) for run in runs):
        status = Status.POSITIVITY
    # each product errs by the noise of the operator, which changes log λ by noise/λ
    rough = noise * float((measure.weights / measure.nodes).sum() / len(runs))
    squares = float((measure.weights * np.log(measure.nodes) ** 2).sum())
    size = math.sqrt(inner.dim * squares / len(runs))
    found = dataclasses.replace(found, value=value, stderr=math.sqrt(variance), status=status)
    return _Reading(task, found, size, limit.distance(limit.value), rough)


def _control(ready: Preconditioned, measure: Spectrum) -> tuple[Callable[[Array], Array], float]:
    """The polynomial nearest to log under the measure with an exactly known mean, and that mean.

    tr A and tr A² are free if the entries are stored; subtracting the polynomial lowers the
    variance.
    """
    trace, squares = ready.moments
    exact = [value / ready.operator.dim for value in (trace, squares) if value is not None]
    exact = exact if trace is not None and measure.nodes.shape[1] > len(exact) else []
    root, nodes = np.sqrt(measure.weights.ravel() / len(measure.nodes)), measure.nodes.ravel()
    scale = float(nodes.max())
    design = np.stack([(nodes / scale) ** k for k in range(len(exact) + 1)], axis=1)
    found = np.linalg.lstsq(root[:, None] * design, root * np.log(nodes), rcond=None)[0]
    slopes = [float(c) / scale ** (k + 1) for k, c in enumerate(found[1:])]
    mean = float(sum(slope * value for slope, value in zip(slopes, exact, strict=True)))

    def polynomial(x: Array) -> Array:
        return np.asarray(sum(c * x ** (k + 1) for k, c in enumerate(slopes)) + np.zeros_like(x))

    return polynomial, mean


def _maxent(task: _Task) -> _Reading:
    """Algorithm 3: moments, density, expectation of log λ; truncation by the Gauss rules."""
    task, ends = _interval(task)
    if ends is None:
        return _slq(task)
    inner = task.inner
    found, ends = _measure_moments(task, ends)
    density = fit(found)
    slopes = density.sensitivity(np.log)
    means = density.moments(len(found) + 1, "chebyshev")
    change, stderr = _known_moments_correction(inner, found, slopes, means)
    value = density.expectation(np.log)
    # moments are matched to a tolerance only
    unmatched = float(np.abs(slopes * density.residuals[1:]).sum())
    unsure = _limit(density, len(found), ends).distance(value) + unmatched
    status = density.status if density.status is not Status.CONVERGED else ends.status
    return _moment_reading(task, ends, found.cost, value + change, stderr, unsure, status)


def _chebyshev(task: _Task) -> _Reading:
    """Σ_k c_kμ_k with log λ = c_0 + Σ_k c_kT_k, c_k = 2(−1)^{k+1}ρᵏ/k, ρ = (√b − √a)/(√b + √a).

    The truncation is at most 2Σ_{k>m}ρᵏ/k per eigenvalue if [a, b] holds the spectrum. If a is only
    a guess at the lower end, or that is more than the noise, the Gauss rules of the density with
    the same moments bound it.
    """
    task, ends = _interval(task)
    if ends is None:
        return _slq(task)
    inner = task.inner
    found, ends = _measure_moments(task, ends)
    orders = np.arange(1, len(found))
    a, b = math.sqrt(ends.guess), math.sqrt(ends.interval[1])
    rho = (b - a) / (b + a)
    series = np.append(2 * math.log((a + b) / 2), -2.0 * (-rho) ** orders / orders)
    series = _change_interval(series, (ends.guess, ends.interval[1]), ends.interval)
    means = np.append(found.values, found.values[-2:])
    change, stderr = _known_moments_correction(inner, found, series[1:], means)
    value = float(series @ found.values)
    rest = 2.0 * (-math.log1p(-rho) - float((rho**orders / orders).sum()))
    bound = rest if ends.guess == ends.interval[0] else math.inf
    if bound <= stderr:
        unsure = bound
    else:
        unsure = min(bound, _limit(fit(found), len(found), ends).distance(value))
    return _moment_reading(task, ends, found.cost, value + change, stderr, unsure, ends.status)


def _moment_reading(
    task: _Task, ends: _Ends, cost: int, mean: float, error: float, unsure: float, status: Status
) -> _Reading:
    """The reading of a mean of log λ from moments."""
    dim, dof = task.inner.dim, float(task.count - 1)
    estimate = Estimate(dim * mean, dim * error, cost + ends.cost, status, dof)
    return _Reading(task, estimate, ends.size, unsure + ends.missed)


def _change_interval(series: Array, first: Bounds, second: Bounds) -> Array:
    """The Chebyshev series (m + 1,) on ``first`` as coefficients on the interval ``second``."""
    if first == second:
        return series
    nodes = chebyshev.chebpts1(len(series))
    places = (second[0] + second[1]) / 2 + nodes * (second[1] - second[0]) / 2
    readings = chebyshev.chebval(to_unit(places, first), series)
    table = chebyshev.chebvander(nodes, len(series) - 1)  # orthogonal on the nodes
    return np.asarray(table.T @ readings / (table**2).sum(axis=0))


def _limit(density: MaxentDensity, count: int, ends: _Ends) -> GaussLimit:
    """The limit of the Gauss rules that all measures with the moments of ``density`` share."""
    if ends.sure:
        low = ends.interval[0]
    else:
        low = BREAKDOWN * float(np.finfo(np.float64).eps) * ends.interval[1]
    return limit_of([rule_of(density, count // 2)], low, ends.sure)


def _known_moments_correction(
    inner: LinearOperator, found: Moments, slopes: Array, means: Array
) -> tuple[float, float]:
    """The change of Σ_k slopes_k μ_k by exactly known first moments, and its standard error.

    They are control variates: their weights fit Σ_k slopes_k T_k by T_1 and T_2 under the moments
    ``means`` (m + 3,), with T_jT_k = (T_{j+k} + T_{|j−k|})/2. They are left out if the variance
    does not fall.
    """
    exact = _first_moments(inner, found.bounds)
    used, orders = np.arange(1, len(exact) + 1), np.arange(1, len(found))
    products = (means[used[:, None] + orders] + means[np.abs(used[:, None] - orders)]) / 2
    joint = products - np.outer(means[used], means[orders])
    if exact:
        weights = np.linalg.lstsq(joint[:, : len(exact)], joint @ slopes, rcond=None)[0]
    else:
        weights = np.zeros(0)
    left, covariance = slopes.copy(), found.covariance[1:, 1:]
    left[: len(exact)] -= weights
    before, after = (max(0.0, float(part @ covariance @ part)) for part in (slopes, left))
    change = float(weights @ (np.asarray(exact) - found.values[used]))
    return (change, math.sqrt(after)) if after < before else (0.0, math.sqrt(before))


def _first_moments(inner: LinearOperator, bounds: Bounds) -> list[float]:
    """The first one or two Chebyshev moments on ``bounds``, as far as tr A and tr A² are known."""
    middle, half = (bounds[0] + bounds[1]) / 2, (bounds[1] - bounds[0]) / 2
    trace, squares = inner.known_trace(), inner.known_squares()
    if trace is None:
        return []
    first = (trace / inner.dim - middle) / half
    if squares is None:
        return [first]
    second = (squares / inner.dim - 2 * middle * trace / inner.dim + middle**2) / half**2
    return [first, 2 * second - 1]


def _measure_moments(task: _Task, ends: _Ends) -> tuple[Moments, _Ends]:
    """2·depth Chebyshev moments with rounding in their error, by ``depth`` products per probe.

    An interval that they prove too narrow is widened, unless the caller gave it.
    """
    inner, count = task.inner, 2 * (MOMENT_DEPTH if task.depth is None else task.depth)

    def refuse(value: float | None) -> None:
        if task.bounds is not None and not task.ready.name:
            task.require_bounds(False, ends.interval[1] if value is None else value)
        _require_positive(math.inf if value is None else value, task.ready, task.scale)

    how = inner, count, "chebyshev", task.count, task.seed
    found = moments_within(*how, ends.interval, refuse, least=0.0)
    low, high = bounds = found.bounds
    size = float(torch.finfo(inner.dtype).eps) * max(map(abs, bounds)) / (high - low)
    covariance = found.covariance + np.diag((4 * size * np.arange(len(found))) ** 2)
    found = dataclasses.replace(found, covariance=covariance, stderr=np.sqrt(np.diag(covariance)))
    return found, dataclasses.replace(ends, interval=bounds, guess=max(ends.guess, low))


@dataclasses.dataclass(frozen=True)
class _Ends:
    """An ``interval`` that holds the spectrum, whether its lower end is ``sure``, and its cost.

    If the lower end is not sure, it is 0. ``guess`` is where the spectrum seems to begin, ``size``
    about ‖log‖_F. ``missed`` is what outliers that were not moved change in the mean of log λ: no
    polynomial of low degree and no smooth density follows the logarithm there.
    """

    interval: Bounds
    guess: float
    sure: bool
    size: float
    missed: float
    cost: int
    status: Status = Status.CONVERGED


def _interval(task: _Task) -> tuple[_Task, _Ends | None]:
    """The ends of the spectrum by what is known and by Lanczos, after moving outliers.

    None if the Krylov space ends first, so that the spectrum has only a few values.
    """
    for deflations in range(DEFLATIONS + 1):
        ends = spectral_ends(task.inner, task.seed)
        task.look(ends.low, ends.high, rounding(task.inner, [ends.run]))
        apart = None if ends.whole else outliers(task.inner, ends.run)
        # these are the ends of what is left
        if apart is None or not task.deflate or deflations == DEFLATIONS:
            break
        task = dataclasses.replace(task, ready=deflate(task.ready, ends.run, apart))
    if ends.whole:
        return dataclasses.replace(task, depth=len(ends.run.alpha)), None
    known, (nodes, weights, _) = task.known, ends.run.ritz()
    size = math.sqrt(task.inner.dim * float(weights @ nodes.log().square()))
    missed = 0.0 if apart is None else apart.change() / task.inner.dim
    if task.bounds is not None and not task.ready.name:
        return task, _Ends(task.bounds, task.bounds[0], True, size, missed, ends.cost)
    margin = 0.01 * (ends.high - ends.low)
    high = min(known[1], ends.high + ends.high_residual + margin + 1e-3 * ends.high)
    settled = ends.low_residual < 0.5 * ends.low
    seen = ends.low - ends.low_residual if settled else 0.0
    if known[0] > 0:
        # an interval too short for the rounding of the dtype holds nothing
        low = min(known[0], 0.9 * high)
        guess = max(low, min(seen, 0.9 * high))
        return task, _Ends((low, high), guess, True, size, missed, ends.cost)
    status = Status.CONVERGED if ends.low_residual < ends.low else Status.POSITIVITY
    return task, _Ends((0.0, high), seen or 0.1 * ends.low, False, size, missed, ends.cost, status)


def _require_positive(least: float, ready: Preconditioned, scale: float) -> None:
    """Raise if a Ritz value is not positive, quoting that of A itself if a few products show it."""
    if least > 0:
        return
    plain = spectral_ends(ready.original).low if ready.name else least
    if plain <= 0:
        require_positive_eigenvalue(plain * scale, "Ritz value")
    after = f" after {ready.name}" if ready.name else ""
    require_positive_eigenvalue(least if after else least * scale, "Ritz value", after)


_ESTIMATES = {"slq": _slq, "maxent": _maxent, "chebyshev": _chebyshev}
