"""Extreme eigenpairs and the spectral norm."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lambdahat._core.check import require, require_choice, require_count, require_positive
from lambdahat._core.device import default_context
from lambdahat._core.rng import generator
from lambdahat.estimators.estimator_registry import estimator
from lambdahat.estimators.quantities import MeasureSettings, Work, products, quantity
from lambdahat.krylov import (
    ROUNDING,
    RitzPairs,
    Wanted,
    basis_bytes,
    require_finite,
    require_symmetric,
    simultaneous_power_iteration,
    thick_restart_lanczos,
    working_dtype,
)
from lambdahat.krylov.restart import HELD
from lambdahat.operators.base import LinearOperator, Normalised
from lambdahat.operators.matrix import OperatorLike
from lambdahat.operators.rounding import errors_of
from lambdahat.problem import Problem
from lambdahat.results import Eigenpairs, Estimate, Status

DENSE_BELOW = 100
MEMORY_SHARE = 0.25
# vectors beside the basis: the newest product, what it is made from, and room to work in
WORKING = 4

WHICH = ("largest", "smallest", "magnitude", "both")
ARPACK = {  # the words of SciPy's eigsh
    "LA": "which='largest' is ARPACK's 'LA'",
    "LM": "which='magnitude' is ARPACK's 'LM'",
    "SA": "which='smallest' is ARPACK's 'SA'",
    "BE": "which='both' with half of k is ARPACK's 'BE', for it gives k at each end",
    "SM": (
        "which='smallest' is the same for a positive semi-definite operator; eigenvalues inside a"
        " spectrum are not for Lanczos: scipy.sparse.linalg.eigsh(operator.to_scipy(), k,"
        " which='SM') finds some"
    ),
}


def _largest(matrix: Tensor) -> Tensor:
    largest: Tensor = torch.linalg.eigvalsh(matrix).flip(0)[:3]
    return largest


def _pairs(pairs: Eigenpairs) -> tuple[Tensor, Tensor]:
    return pairs.values, pairs.residuals


@estimator(_largest, _pairs, k=3)
@default_context()
def eigenpairs(
    operator: OperatorLike,
    k: int | None = None,
    which: str = "largest",
    tol: float = 1e-6,
    max_matvecs: int | None = None,
    max_memory: float | None = None,
    seed: int = 0,
    basis: str = "device",
) -> Eigenpairs:
    """Compute ``k`` extreme eigenpairs (by default 10, or all of fewer), with residuals, by
    thick-restart Lanczos.

    ``which`` is "largest" (values in descending order), "smallest" (ascending), "magnitude"
    (descending |λ|) or "both": k at each end, in descending order. ``tol`` is the accuracy of the
    values relative to the largest |λ|: a pair has converged when min(r, r²/gap) ≤ tol·max|θ|, with
    r its residual and gap the distance to its neighbour. ``max_memory`` bounds the bytes of the
    basis (default: what the problem's ``memory`` leaves for vectors, or a quarter of the free
    memory); ``basis`` "host" keeps it in host memory. Very small operators are diagonalised
    densely.

    The residuals combine those of the Lanczos recurrence, the rounding observed in the products
    and, for a model below float64, the rounding inside the model, for which one combination of the
    vectors is also multiplied in float64, on at most 4,096 samples, which ``cost`` does not count.
    The status is PRECISION_LIMIT if rounding keeps the values from reaching ``tol``.

    Clustered eigenvalues are told apart where the tolerance asks for it, and repeated ones are
    returned with their multiplicity: a few more products, from a random vector orthogonal to the
    Krylov space, search for those that are missing, and Lanczos continues orthogonally to the known
    pairs if any are found. A missing eigenvalue goes unnoticed with a probability of at most 0.1 %.
    If ``max_matvecs`` ends that search, the status is NOT_CONVERGED.
    """
    operator = require_symmetric(operator, "eigenpairs")
    k = min(10, operator.dim) if k is None else k
    require_count(k, "k", 1, operator.dim, "an operator of order P has P eigenvalues")
    cure = ARPACK.get(which.upper(), "") if isinstance(which, str) else ""
    require_choice(which, "which", WHICH, cure)
    require_positive(tol, "tol")
    require_choice(basis, "basis", ("device", "host"))
    count = min(2 * k if which == "both" else k, operator.dim)
    budget = default_budget(count)
    if max_matvecs is not None:
        budget = require_count(max_matvecs, "max_matvecs")
    if is_small(operator, count) and budget >= operator.dim:
        pairs, exponent = _diagonalise(operator, Wanted(which), count)
        return _result(operator, pairs, count, tol, which, exponent)
    require(budget >= count, "max_matvecs", f"be at least {count}, one for each pair", repr(budget))
    if operator.device.type == "cpu" and operator.budget() is not None:
        basis = "device"  # the host's memory is no other
    if basis == "host" and max_memory is None:
        max_memory = operator.free_memory(torch.device("cpu")) * MEMORY_SHARE
    capacity = basis_capacity(operator, count, max_memory)
    unit = Normalised(operator)
    lanczos = partial(thick_restart_lanczos, unit, Wanted(which), count, tol=tol, seed=seed)
    pairs = lanczos(max_matvecs=budget, capacity=capacity, place=basis)
    pairs = replace(pairs, products=pairs.products + unit.repeated)
    return _result(operator, pairs, count, tol, which, unit.exponent)


@estimator(_largest, _pairs, k=3)
@default_context()
def power_iteration(
    operator: OperatorLike,
    k: int = 10,
    tol: float = 1e-3,
    max_matvecs: int | None = None,
    seed: int = 0,
) -> Eigenpairs:
    """Compute the k eigenpairs of largest magnitude by simultaneous power iteration.

    They are in descending order of |λ|.

    Algorithm 1 of the regularization thesis, Q, R = QR(AQ), with Rayleigh–Ritz values and another
    stopping rule: successive Q also differ little where neighbouring |λ| are close and Q turns
    slowly. Here a pair has converged when its residual ‖Av − λv‖ is at most ``tol``·max|λ|, so that
    an eigenvalue lies that close. It need not be one of the k largest if others are hardly smaller,
    or if all are nearly equal: the value may then be off by several ``tol``. ``max_matvecs``
    defaults to 500 products a pair. ``eigenpairs`` needs far fewer, and rules larger ones out.
    """
    operator = require_symmetric(operator, "power_iteration")
    require_count(k, "k", 1, operator.dim, "an operator of order P has P eigenvalues")
    require_positive(tol, "tol")
    budget = 500 * k if max_matvecs is None else require_count(max_matvecs, "max_matvecs", least=k)
    columns = None
    if operator.budget() is not None:
        vector = operator.dim * working_dtype(operator).itemsize
        room, column = operator.room(1.0) - HELD * k * vector, vector + operator.column_bytes()
        expected = (
            f"hold {HELD * k} vectors, {HELD * k * vector:,} bytes, for {k} pairs and a product"
        )
        got = f"{operator.budget():,}, of which {operator.room(1.0):,.0f} are left for them"
        require(room >= column, "memory", expected, got, "raise it, or ask for fewer pairs")
        columns = int(room // column)
    unit = Normalised(operator)
    pairs = simultaneous_power_iteration(
        unit, k, tol=tol, max_matvecs=budget, seed=seed, columns=columns
    )
    pairs = replace(pairs, products=pairs.products + unit.repeated)
    return _result(operator, pairs, k, tol, "magnitude", unit.exponent)


@estimator(lambda matrix: torch.linalg.matrix_norm(matrix, 2))
def spectral_norm(
    operator: OperatorLike,
    tol: float = 1e-3,
    max_matvecs: int | None = None,
    max_memory: float | None = None,
    seed: int = 0,
) -> Estimate:
    """Estimate the spectral norm ‖A‖₂ = max|λ| to a relative ``tol``, by Lanczos.

    The error is the bound by the residual.
    """
    pairs = eigenpairs(operator, 1, "magnitude", tol, max_matvecs, max_memory, seed)
    value, error = abs(float(pairs.values[0])), float(pairs.residuals[0])
    return Estimate(value, error, pairs.cost, pairs.status)


def _result(
    operator: LinearOperator,
    pairs: RitzPairs,
    count: int,
    tol: float,
    which: str,
    exponent: int = 0,
) -> Eigenpairs:
    """The public result, times 2ᵉ, with a status that says which values reached ``tol``."""
    target = tol * pairs.scale
    shift, residual = (math.ldexp(part, -exponent) for part in _rounding(operator, pairs))
    noise = max(pairs.noise, shift)
    reached = pairs.errors <= max(target, noise)
    if len(pairs.values) < count or not bool(reached.all()) or not pairs.complete:
        status = Status.NOT_CONVERGED
    else:
        status = Status.PRECISION_LIMIT if noise > target else Status.CONVERGED
    converged = reached & (noise <= target)
    joined = torch.hypot(pairs.residuals, torch.tensor(residual, dtype=torch.float64))
    scale = torch.tensor(exponent)
    values, residuals = torch.ldexp(pairs.values, scale), torch.ldexp(joined, scale)
    parts = values, pairs.vectors, residuals, converged
    return Eigenpairs(*parts, pairs.products, status, which)


def _rounding(operator: LinearOperator, pairs: RitzPairs) -> tuple[float, float]:
    """How far rounding inside the model moves the values, and how much it adds to the residuals.

    Measured on one product with a combination of the vectors: half of it is the leading one, half
    the others with random signs, so that ‖Ew‖² averages ‖Ev‖² over both.
    """
    vectors, count = pairs.vectors, len(pairs.values)
    signs = torch.randint(0, 2, (count,), generator=generator(0, "rounding"))
    signs = signs.mul_(2).sub_(1).to(vectors)
    leading = int(pairs.values.abs().argmax())
    weights = signs * (1.0 if count == 1 else math.sqrt(0.5 / (count - 1)))
    weights[leading] = 1.0 if count == 1 else math.sqrt(0.5)
    mixture = vectors @ weights
    error = errors_of(operator, mixture)
    if error is None:
        return 0.0, 0.0
    share = 1.0 if count == 1 else 2.0
    residual = math.sqrt(share) * float(error.norm())
    size = float(torch.linalg.vector_norm((vectors * pairs.values.to(vectors)) @ weights))
    first_order = share * abs(float(mixture.double() @ error))
    second_order = residual**2 / size if size > 0 else 0.0
    return max(first_order, second_order), residual


def _diagonalise(operator: LinearOperator, wanted: Wanted, count: int) -> tuple[RitzPairs, int]:
    """Eigenpairs of 2⁻ᵉA from the dense matrix in float64, and e; 2⁻ᵉA has entries of order 1."""
    before, matrix = operator.matvecs, operator.dense()
    require_finite(matrix)
    exponent = math.frexp(float(matrix.abs().max()))[1]
    matrix = torch.ldexp(matrix.double(), torch.tensor(-exponent, device=matrix.device))
    asymmetry = float(torch.linalg.matrix_norm(matrix - matrix.T) / 2)
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    values = values.cpu()
    chosen = wanted.select(values, count)
    scale = float(values.abs().max())
    noise = max(asymmetry, float(torch.finfo(operator.dtype).eps) * scale)
    kept, values = vectors[:, chosen.to(vectors.device)], values[chosen]
    left = torch.linalg.vector_norm(matrix @ kept - kept * values.to(kept.device), dim=0).cpu()
    residuals = torch.hypot(left, torch.tensor(ROUNDING * noise, dtype=torch.float64))
    errors, cost = torch.zeros_like(residuals), operator.matvecs - before
    kept = kept.to(working_dtype(operator))
    return RitzPairs(values, kept, residuals, errors, noise, scale, cost), exponent


def default_budget(count: int) -> int:
    """The default largest number of products for ``count`` pairs."""
    return 1000 + 50 * count


def is_small(operator: LinearOperator, count: int) -> bool:
    """Whether all eigenpairs cost little more than ``count``."""
    return operator.dim <= max(DENSE_BELOW, 2 * count)


def basis_capacity(operator: LinearOperator, count: int, max_memory: float | None = None) -> int:
    """The number of basis vectors: enough to avoid most restarts, within ``max_memory``."""
    row = operator.dim * torch.finfo(working_dtype(operator)).bits // 8
    if max_memory is not None:
        allowed = require_positive(max_memory, "max_memory")
    else:
        allowed = operator.room(MEMORY_SHARE)
        if operator.budget() is not None:
            row = basis_bytes(1, operator.dim, working_dtype(operator), "device")
            allowed -= (count + WORKING) * row
    least, most = min(count + 3, operator.dim), min(max(4 * count, 200), operator.dim)
    rows = int(min(allowed // row, most + 1))
    name = "max_memory" if max_memory is not None or operator.budget() is None else "memory"
    expected = f"hold {least + 1} vectors, {(least + 1) * row:,} bytes, for {count} pairs"
    got = f"{allowed:,.0f} bytes for them"
    require(rows > least, name, expected, got, "raise it, or ask for fewer pairs")
    return rows - 1


def _top(_: Problem, operator: LinearOperator, settings: MeasureSettings) -> Eigenpairs:
    """The leading eigenpairs; P are all that there are."""
    return eigenpairs(operator, min(settings.top, operator.dim), seed=settings.seed)


@quantity("eigenpairs", _top)
def pairs_work(problem: Problem, operator: LinearOperator, settings: MeasureSettings) -> Work:
    """A product for each pair at least; the dense matrix where that is cheaper."""
    pairs = min(settings.top, operator.dim)
    if is_small(operator, pairs):
        return products(operator, operator.dim, operator.dim, operator.dim)
    return products(operator, pairs, default_budget(pairs), basis_capacity(operator, pairs) + 1)


@quantity("spectral_norm", lambda _, matrix, settings: spectral_norm(matrix, seed=settings.seed))
def norm_work(problem: Problem, operator: LinearOperator, settings: MeasureSettings) -> Work:
    """One eigenpair."""
    return pairs_work(problem, operator, replace(settings, top=1))
