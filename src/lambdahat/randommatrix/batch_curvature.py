"""The curvature of single batches, and how much that of samples differs along eigenvectors.

The noise of a batch is not isotropic: it is large where the curvature is. What moves an eigenvalue
λ_m of the mean matrix M̄ is its noise to the other eigenvectors. To second order, with
v_jm = Var_i(φ_jᵀM_iφ_m),

    E λ'_m = λ_m + (1/b) Σ_{j≠m} v_jm/(λ_m − λ_j),   Var λ'_m = v_mm/b,
    E|φ̂ᵀφ|² = 1 − (1/b) Σ_{j≠m} v_jm/(λ_m − λ_j)²

up to terms of order 1/b². For isotropic noise, v = σ², and a bulk at 0 this is Theorem 14 of the
spectral thesis. Among k known eigenvectors v_jm is measured; of all the others only the sum, τ_m² −
Σ_{j≤k} v_jm, with τ_m² = mean_i ‖(M_i − M̄)φ_m‖².
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lambdahat._core.check import message, require, require_choice, require_count
from lambdahat._core.progress import report
from lambdahat._core.rng import generator
from lambdahat._core.storage import Result, Status
from lambdahat.estimators._eigenpairs import eigenpairs
from lambdahat.estimators._variance import PerSample, require_own_losses, spread_of
from lambdahat.estimators.sequential import standard_error
from lambdahat.operators import ggn, hessian
from lambdahat.problem import Problem, require_problem
from lambdahat.problem.batches import Batch
from lambdahat.results import Array, Eigenpairs, Estimate

CURVATURES = {"hessian": hessian, "ggn": ggn}
PROBES = 4
KEPT = 4096
# how far a sample outside a subset may deviate, in units of the largest deviation within it
FARTHEST = 20.0


@dataclass(frozen=True)
class BatchEigenvalues(Result):
    """Extreme eigenvalues of the curvature of single batches, one row per batch.

    ``largest`` (batches, k) falls along a row, ``smallest`` (batches, k) rises. ``overlaps``
    (batches, k) are |φ̂_mᵀφ_m|² of the m-th largest's vector with the full data's, if that was
    given. ``cost`` counts products with the batches' matrices.
    """

    batch_size: int
    population: int
    dimension: int
    operator: str
    largest: Array
    smallest: Array
    overlaps: Array | None = None
    cost: int = 0
    status: Status = Status.CONVERGED

    def __len__(self) -> int:
        return len(self.largest)

    def mean(self, which: str = "largest", rank: int = 0) -> Estimate:
        """The mean over batches of "largest", "smallest" or "overlaps", with its standard error."""
        readings = self._readings(which)[:, rank]
        error, dof = self.spread(which, rank) / math.sqrt(len(readings)), max(len(readings) - 1, 1)
        return Estimate(float(readings.mean()), error, self.cost, self.status, dof)

    def spread(self, which: str = "largest", rank: int = 0) -> float:
        """The standard deviation between batches."""
        readings = self._readings(which)[:, rank]
        return float(readings.std(ddof=1)) if len(readings) > 1 else math.nan

    def _readings(self, which: str) -> Array:
        require_choice(which, "which", ("largest", "smallest", "overlaps"))
        readings: Array | None = getattr(self, which)
        if readings is None:
            cure = "pass full= to batch_eigenpairs"
            raise ValueError(message("overlaps", "have been measured", "None", cure))
        return readings


def batch_eigenpairs(
    problem: Problem,
    batch_size: int,
    batches: int = 10,
    k: int = 1,
    seed: int = 0,
    operator: str = "hessian",
    full: Eigenpairs | None = None,
    tol: float = 1e-3,
) -> BatchEigenvalues:
    """The k largest and smallest eigenvalues of the Hessian (or "ggn") of several random batches.

    Batches are drawn without replacement within each, independently of one another and of batches
    of other sizes. ``full`` are the k largest or more eigenpairs of the same operator on all the
    data, for the overlaps; ``tol`` is that of ``lh.eigenpairs``, 1e-3 since batches differ by far
    more.
    """
    require_problem(problem)
    total, cure = problem.num_samples, "a batch is drawn from the problem's samples"
    require_count(batch_size, "batch_size", 1, total, cure)
    require_count(batches, "batches")
    require_count(k, "k", 1, problem.num_parameters)
    require_choice(operator, "operator", tuple(CURVATURES))
    vectors = None if full is None else _reference(problem, full, k)
    # only batch norm in training mode needs a batch in one piece
    most = batch_size if problem.norm == "train" else min(batch_size, max(problem.batches.sizes))
    every, overlaps = [], []
    for i in range(batches):
        rng = generator(seed, "batch curvature", batch_size, i)
        batch = problem.subset(torch.randperm(total, generator=rng)[:batch_size], most)
        pairs = eigenpairs(CURVATURES[operator](batch), k, "both", tol=tol, seed=seed)
        every.append(pairs)
        if vectors is not None:
            own = pairs.vectors[:, :k].double()
            dots = (own * vectors.to(own.device).double()).sum(dim=0)
            overlaps.append(dots.square().clamp(max=1.0).cpu().numpy())
        report("batch curvature", i + 1, batches)
    return BatchEigenvalues(
        batch_size,
        total,
        problem.num_parameters,
        operator,
        largest=np.stack([pairs.values[:k].cpu().numpy() for pairs in every]),
        smallest=np.stack([pairs.values.flip(0)[:k].cpu().numpy() for pairs in every]),
        overlaps=np.stack(overlaps) if overlaps else None,
        cost=sum(pairs.cost for pairs in every),
        status=Status.joint(pairs.status for pairs in every),
    )


def _reference(problem: Problem, full: Eigenpairs, k: int) -> torch.Tensor:
    """The k leading vectors of ``full``, which must be the largest pairs of this problem."""
    right = isinstance(full, Eigenpairs) and len(full.vectors) == problem.num_parameters
    right = right and len(full) >= k
    expected = f"be {k} eigenpairs or more of order {problem.num_parameters}"
    cure = "take them of the same problem: lh.eigenpairs(lh.hessian(problem), k)"
    require(right, "full", expected, full, cure)
    falling = bool((full.values[:k].diff() <= 0).all())
    falling = falling and float(full.values[0]) >= float(full.values.max())
    expected = "begin with the largest eigenvalues"
    require(falling, "full", expected, "others", 'ask for which="largest" or "both"')
    return full.vectors[:, :k]


@dataclass(frozen=True)
class DirectionalVariance(Result):
    """The variance over samples of the curvature along k eigenvectors of its mean.

    ``eigenvalues`` (k,) with their residuals as errors; ``tau2`` (k,) is mean_i ‖(M_i − M̄)φ_m‖²,
    ``couplings`` (k, k) Var_i(φ_jᵀM_iφ_m). ``elements`` (n, k(k+1)/2) are the upper triangles of
    Φᵀ(M_i − M̄)Φ, row by row, of all or 4,096 samples. ``bulk`` is the variance of one element of
    M_i between directions orthogonal to all of them. Errors are 0 if all samples were used: the
    data set is the population. ``cost`` counts passes over the data.
    """

    eigenvalues: Estimate
    tau2: Estimate
    couplings: Estimate
    elements: Tensor
    bulk: Estimate
    dimension: int
    population: int
    operator: str
    cost: int = 0

    def __len__(self) -> int:
        return int(torch.as_tensor(self.tau2.value).numel())

    @property
    def omega2(self) -> Estimate:
        """ω² = Var_i(φᵀM_iφ) of each eigenvector, (k,)."""
        value, error = torch.as_tensor(self.couplings.value), torch.as_tensor(self.couplings.stderr)
        return Estimate(value.diagonal().clone(), error.diagonal().clone())

    @property
    def rest(self) -> Estimate:
        """τ_m² − Σ_j v_jm (k,): the noise that couples each eigenvector to all but the k."""
        left = torch.as_tensor(self.tau2.value) - torch.as_tensor(self.couplings.value).sum(dim=0)
        return Estimate(left.clamp(min=0.0), self.tau2.stderr)


def directional_variance(
    problem: Problem,
    eigenpairs: Eigenpairs,
    operator: str = "hessian",
    probes: int = PROBES,
    samples: int | None = None,
    seed: int = 0,
) -> DirectionalVariance:
    """τ², ω² and couplings of eigenvectors of the Hessian (or "ggn"), and the bulk's variance.

    One pass of per-sample products for each eigenvector and each of the ``probes`` (random vectors
    orthogonal to them); with ``samples``, over a random subset. M̄φ = λφ is taken from the
    eigenpairs, so that a subset's own mean adds no bias. k² numbers a sample are kept meanwhile.
    """
    require_problem(problem)
    require_choice(operator, "operator", tuple(CURVATURES))
    require_count(probes, "probes")
    order, cure = problem.num_parameters, "take lh.eigenpairs(lh.hessian(problem))"
    fits = isinstance(eigenpairs, Eigenpairs) and len(eigenpairs.vectors) == order
    expected = f"be Eigenpairs of order {order}"
    require(fits, "eigenpairs", expected, eigenpairs, cure, TypeError)
    require_own_losses(problem)
    known = operator == "hessian" or problem.loss_function is not None
    require(known, "operator", 'be "hessian" for a problem made of one function', repr(operator))
    if samples is None:
        count = problem.num_samples
    else:
        count = require_count(samples, "samples", 2, problem.num_samples)
    return along_pairs(problem, eigenpairs, operator, probes, count, seed, refuse_foreign=True)


def along_pairs(
    problem: Problem,
    eigenpairs: Eigenpairs,
    operator: str,
    probes: int,
    count: int,
    seed: int,
    refuse_foreign: bool,
) -> DirectionalVariance:
    """``directional_variance`` without checks; ``refuse_foreign`` pairs of another problem."""
    total = problem.num_samples
    work = PerSample(problem)
    batches: Iterable[Batch] = problem.batches
    if count < total:
        order = torch.randperm(total, generator=generator(seed, "directional samples"))
        batches = problem.batches.subset(order[:count].sort().values)

    def products(vector: Tensor) -> Iterable[Tensor]:
        """M_i v of every sample, in blocks (chunk, P)."""
        derivative = work.derivatives(vector)[operator]
        for batch in batches:
            yield from work.rows(batch, derivative)

    vectors = eigenpairs.vectors.to(problem.device, problem.dtype)
    rows = len(eigenpairs) + probes
    left = math.sqrt((1.0 - count / total) / count)
    tau2, couplings = [], []
    for m, (value, _) in enumerate(eigenpairs):
        check, blocks = refuse_foreign and count == total, products(vectors[:, m])
        lengths, along, drift = _deviations(blocks, value, vectors, m, check)
        known = _mean(lengths, left)
        error = torch.hypot(torch.as_tensor(known.stderr), _unseen_variance(lengths, drift, total))
        tau2.append((torch.as_tensor(known.value), error))
        couplings.append(along)
        report("directional variance", m + 1, rows)
    between = torch.stack(couplings, dim=2)
    bulk = _bulk_variance(products, problem, vectors, probes, seed)
    report("directional variance", rows, rows)
    eigenvalues = Estimate(eigenpairs.values.clone(), eigenpairs.residuals.clone())
    values, errors = (torch.stack(part, dim=-1) for part in zip(*tau2, strict=True))
    noise = Estimate(values, errors)
    spreads, elements = _mean(between.square(), left), _keep_some(between, seed)
    sizes, cost = (problem.num_parameters, total), math.ceil(work.products / total)
    return DirectionalVariance(eigenvalues, noise, spreads, elements, bulk, *sizes, operator, cost)


def _deviations(
    blocks: Iterable[Tensor], eigenvalue: Estimate, vectors: Tensor, m: int, check: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """‖(M_i − M̄)φ_m‖² (n,), φ_jᵀ(M_i − M̄)φ_m (n, k), and the mean of (M_i − M̄)φ_m (P,)."""
    mean_product = float(eigenvalue) * vectors[:, m]
    lengths, along, drift = [], [], torch.zeros_like(mean_product, dtype=torch.float64)
    for rows in blocks:
        apart = rows - mean_product
        lengths.append(apart.square().sum(dim=1, dtype=torch.float64).cpu())
        along.append((apart @ vectors.to(apart.dtype)).double().cpu())
        drift += apart.sum(dim=0, dtype=torch.float64)
    squares = torch.cat(lengths)
    drift /= len(squares)
    if check:
        # Over all samples the mean of M_iφ is λφ, if the pair is this problem's. Products round by
        # eps of their parts, however small they are: p(1 − p) by eps of p.
        size = float(torch.linalg.vector_norm(drift))
        allowed = 2 * float(eigenvalue.stderr) + 0.05 * math.sqrt(float(squares.mean()))
        fine = size <= allowed + 10 * torch.finfo(vectors.dtype).eps
        expected, got = "be of this problem's operator", f"a residual of {size:.3g}"
        cure = "compute them from the same problem, at the same parameters"
        require(fine, "eigenpairs", expected, got, cure)
    return squares, torch.cat(along), drift


def _unseen_variance(squares: Tensor, drift: Tensor, total: int) -> Tensor:
    """The possible contribution to τ² of samples outside a subset.

    Over all samples (M_i − M̄)φ has the mean 0. If that of the n drawn, ``drift``, exceeds twice
    what chance explains, a few of the others differ from all that were seen: one sample that alone
    made up for the drift d would have ‖(M_i − M̄)φ‖ = N‖d‖, and adds its share of the square to τ².
    Unless the drift exceeds four times what chance explains, that sample is taken to be at most
    ``FARTHEST`` times as far as the farthest seen.
    """
    count = len(squares)
    chance = (squares.mean() * (1 / count - 1 / total)).clamp(min=0.0)
    size = drift.square().sum().cpu()
    likely, certain = (total**2 * (size - z**2 * chance).clamp(min=0.0) for z in (2, 4))
    return likely.minimum(FARTHEST**2 * squares.max()).maximum(certain) / total * (count < total)


def _bulk_variance(
    products: Callable[[Tensor], Iterable[Tensor]],
    problem: Problem,
    vectors: Tensor,
    probes: int,
    seed: int,
) -> Estimate:
    """(1/P_⊥²)·mean_i ‖Π(M_i − M̄)Π‖²_F by random unit vectors, Π the projection beyond Φ."""
    order = problem.num_parameters - vectors.shape[1]
    if order == 0:
        return Estimate(0.0)
    basis = vectors.double()
    readings = []
    for i in range(probes):
        rng = generator(seed, "directional variance", i)
        probe = torch.randn(len(basis), dtype=torch.float64, generator=rng)
        probe = _outside(probe.to(basis.device)[None], basis)[0]
        probe = (probe / torch.linalg.vector_norm(probe)).to(vectors.dtype)
        outside = ([_outside(rows.double(), basis)] for rows in products(probe))
        readings.append(float(spread_of(outside).unbiased(problem.num_samples)) / order)
    values = torch.tensor(readings, dtype=torch.float64)
    error = float(values.std()) / math.sqrt(probes) if probes > 1 else math.nan
    return Estimate(float(values.mean()), error, dof=max(probes - 1, 1))


def _outside(rows: Tensor, basis: Tensor) -> Tensor:
    return rows - (rows @ basis) @ basis.T


def _mean(readings: Tensor, error_factor: float) -> Estimate:
    """Mean over samples, with the error of a subset drawn without replacement."""
    error = standard_error(readings) * math.sqrt(len(readings)) * error_factor
    return Estimate(readings.mean(dim=0), error)


def _keep_some(between: Tensor, seed: int) -> Tensor:
    """Upper triangles of (n, k, k), of at most 4,096 samples, rescaled to the variance of all."""
    rows, columns = torch.triu_indices(between.shape[1], between.shape[1])
    upper = between[:, rows, columns]
    if len(upper) <= KEPT:
        return upper
    order = torch.randperm(len(upper), generator=generator(seed, "directional elements"))
    some = upper[order[:KEPT]]
    return some * (upper.square().mean() / some.square().mean()).sqrt()
