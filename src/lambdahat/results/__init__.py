"""Frozen results: each carries its error bar, its cost and a status, and saves to and loads from
disk.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from lambdahat._core.check import require, require_choice, require_count, require_positive
from lambdahat._core.storage import Result as Result
from lambdahat._core.storage import Status as Status
from lambdahat._core.storage import write_atomically as write_atomically
from lambdahat.maxent import Density as Density
from lambdahat.maxent import MaxentDensity, fit
from lambdahat.maxent.bases import polynomials, to_unit

Array = NDArray[np.float64]
# a node is resolved when its residual is below this part of the distance to its neighbours
ALONE = 0.1
AT_ONCE = 1 << 20  # readings of nodes that a density holds at a time
ONE = 10.83  # the 99.9 % quantile of χ²₁: more than one eigenvalue's weight beyond it


@dataclass(frozen=True)
class Estimate(Result):
    """A value with its standard error.

    ``value`` is a float, or a tensor for estimates of a whole vector such as a diagonal. ``stderr``
    is the standard deviation of the estimator over its own randomness (0 when the value is exact),
    ``dof`` the degrees of freedom with which it is known, and ``cost`` the matrix–vector products
    spent. An estimate that is only a lower bound, by an unknown margin, has an infinite ``stderr``
    and prints as "at least".

    >>> low, high = Estimate(10.0, 1.0).interval(0.95)
    >>> round(low, 2), round(high, 2)
    (8.04, 11.96)
    """

    value: float | Tensor
    stderr: float | Tensor = 0.0
    cost: int = 0
    status: Status = Status.CONVERGED
    dof: float = math.inf

    def interval(self, level: float = 0.95) -> tuple[Any, Any]:
        """The two-sided confidence interval, by Student's t with ``dof`` degrees of freedom."""
        require(0 < level < 1, "level", "lie in (0, 1)", repr(level))
        half = student_quantile(level, self.dof) * self.stderr
        return self.value - half, self.value + half

    def __float__(self) -> float:
        return float(self.value)

    def __format__(self, spec: str) -> str:
        """The value alone in a given format; without one, the value with its error."""
        return format(float(self), spec) if spec else str(self)

    def __str__(self) -> str:
        if isinstance(self.value, Tensor):
            return f"Estimate of shape {tuple(self.value.shape)}"
        error = float(self.stderr)
        text = f"{self.value:.6g}" if error in (0, math.inf) else f"{self.value:.6g} ± {error:.2g}"
        text = f"at least {text}" if error == math.inf else text
        return text if self.status.ok else f"{text} [{self.status.name}: {self.status.value}]"


def student_quantile(level: float, dof: float) -> float:
    """Half-width of a two-sided ``level`` interval in standard errors."""
    tail = 0.5 + level / 2
    return float(scipy.special.ndtri(tail) if math.isinf(dof) else scipy.special.stdtrit(dof, tail))


# student_quantile(0.95, math.inf), without loading scipy.special when the library is imported
NORMAL_QUANTILE = 1.959963984540054


@dataclass(frozen=True)
class Eigenpairs(Result):
    """k eigenpairs: ``values`` (k,) float64, orthonormal ``vectors`` (P, k), ``residuals`` ‖Av −
    λv‖ (k,).

    An eigenvalue of the operator lies within ``residuals[i]`` of ``values[i]``; ``converged`` says
    which pairs reached the tolerance, and ``which`` which end of the spectrum they are of, as
    ``lh.eigenpairs`` takes it.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    converged: Tensor
    cost: int = 0
    status: Status = Status.CONVERGED
    which: str = "largest"

    def __len__(self) -> int:
        return int(self.values.numel())

    def __getitem__(self, place: int) -> tuple[Estimate, Tensor]:
        """The eigenvalue at a place, counted from 0, and its vector."""
        value, residual = float(self.values[place]), float(self.residuals[place])
        return Estimate(value, residual), self.vectors[:, place]

    def __iter__(self) -> Iterator[tuple[Estimate, Tensor]]:
        for value, residual, vector in zip(
            self.values, self.residuals, self.vectors.T, strict=True
        ):
            yield Estimate(float(value), float(residual)), vector


def stand_alone(nodes: Array, residuals: Array) -> NDArray[np.bool_]:
    """Whether each of ascending nodes is resolved: its residual is small beside the distance to
    its neighbours.
    """
    gaps = np.diff(nodes, prepend=-np.inf, append=np.inf)
    return np.asarray(residuals <= ALONE * np.minimum(gaps[:-1], gaps[1:]))


@dataclass(frozen=True)
class Spectrum(Result):
    """A spectral density as Gauss quadrature: Ritz ``nodes`` and ``weights``, each (probes, depth).

    Each row is the measure μ_z = Σ_j w_j δ(θ_j) that one probe, uniform on the sphere, sees of the
    operator; rows sum to 1, and Σ_j w_j θ_j^k = zᵀAᵏz exactly for k ≤ 2·depth − 1. Averaged over
    probes they estimate the spectral measure, so that ``moment(k)`` is tr(Aᵏ)/P. For such a probe
    Var(zᵀf(A)z) = 2/(P+2)·(tr f²/P − (tr f/P)²): the standard error of every reading below comes
    from this identity, evaluated at the measured spectrum, and so is available for a single probe
    too. ``residuals`` bound the distance of each node to an eigenvalue. The rounding inside a model
    moves the mean eigenvalue by about ``rounding``, and the largest by the part
    ``relative_rounding`` of it: moments, and what is computed from them, include it in their error.
    """

    nodes: Array
    weights: Array
    residuals: Array
    dim: int
    psd: bool = False
    resolution: float = 0.0
    cost: int = 0
    status: Status = Status.CONVERGED
    rounding: float = 0.0
    relative_rounding: float = 0.0

    def expectation(self, function: Callable[[Array], Array], scale: float = 1.0) -> Estimate:
        """scale · tr f(A)/P for an element-wise ``function``, with its standard error."""
        readings = np.asarray(function(self.nodes), dtype=np.float64)
        # squares of very small or large readings leave the range
        size = float(np.abs(readings).max()) or 1.0
        size = size if math.isfinite(size) else 1.0
        readings, scale = readings / size, scale * size
        probes = len(self.nodes)
        mean = float((self.weights * readings).sum() / probes)
        squares = (readings - mean) ** 2
        factor = 2.0 / (self.dim + 2) / probes
        # the mean is fitted too
        variance = float((self.weights * squares).sum() / probes) / (1 - factor)
        spread = float((self.weights * (squares - variance) ** 2).sum() / probes) * factor
        even = spread <= 1e-12 * variance**2 or self.dim == 1
        dof = math.inf if even else max(2.0 * variance**2 / spread, 1.0)
        error = abs(scale) * math.sqrt(factor * variance)
        return Estimate(scale * mean, error, self.cost, self.status, dof)

    def rounded(self, function: Callable[[Array], Array], scale: float = 1.0) -> Estimate:
        """The same for a smooth function, with the effect of the rounding of the model in the
        error.
        """
        estimate = self.expectation(function, scale)
        if self.rounding == 0 == self.relative_rounding:
            return estimate
        moved = self.rounding + self.relative_rounding * np.abs(self.nodes)
        with np.errstate(all="ignore"):
            here, sides = function(self.nodes), (self.nodes + moved, self.nodes - moved)
            changes = [np.abs(function(side) - here) for side in sides]
        known = np.fmax(*changes)  # one side may be outside of where the function is defined
        change = float((self.weights * np.nan_to_num(known, posinf=0.0)).sum())
        error = abs(scale) * change / len(self.nodes)
        total, dof = math.hypot(float(estimate.stderr), error), estimate.dof
        if float(estimate.stderr) > 1e-60 * total:
            dof *= (total / float(estimate.stderr)) ** 4
        return dataclasses.replace(estimate, stderr=total, dof=dof)

    def moment(self, order: int) -> Estimate:
        """tr(Aᵏ)/P for k = ``order``; raises an error if it is too large or too small for
        float64.
        """
        require_count(order, "order", least=0)
        if order < 2:
            return self.rounded(lambda nodes: nodes**order)
        exponent = int(np.frexp(np.abs(self.nodes).max())[1])  # powers of two change no digit
        unit = self.rounded(lambda nodes: np.ldexp(nodes, -exponent) ** order)
        size = max(abs(float(unit)), float(unit.stderr))
        if size == 0:
            return unit
        power = order * exponent + math.log2(size)
        got = f"{order}, whose moment is about 1e{power * math.log10(2):+.0f}"
        cure = "divide the operator by its size first"
        require(-1022 <= power < 1024, "order", "be that of a moment that float64 holds", got, cure)
        value, stderr = (
            math.ldexp(float(part), order * exponent) for part in (unit.value, unit.stderr)
        )
        return dataclasses.replace(unit, value=value, stderr=stderr)

    @property
    def trace(self) -> Estimate:
        """tr A."""
        return self.rounded(lambda nodes: nodes, self.dim)

    @property
    def mean(self) -> Estimate:
        """The mean eigenvalue, tr A / P."""
        return self.moment(1)

    @property
    def frobenius(self) -> Estimate:
        """‖A‖_F = √(tr A²)."""
        size = float(np.abs(self.nodes).max()) or 1.0
        square = self.rounded(lambda nodes: (nodes / size) ** 2, self.dim)
        root = math.sqrt(max(float(square), 0.0))
        stderr = float(square.stderr) / (2 * root) if root else 0.0
        return dataclasses.replace(square, value=size * root, stderr=size * stderr)

    @property
    def extremes(self) -> tuple[Estimate, Estimate]:
        """The smallest and the largest Ritz value; the error is the residual: an eigenvalue lies
        within it.
        """
        low, high = np.unravel_index([self.nodes.argmin(), self.nodes.argmax()], self.nodes.shape)
        ends = ((low[0], high[0]), (low[1], high[1]))
        return tuple(  # type: ignore[return-value]
            Estimate(float(self.nodes[end]), float(self.residuals[end]), self.cost, self.status)
            for end in ends
        )

    @property
    def spectral_norm(self) -> Estimate:
        """The largest |Ritz value|. Up to rounding ‖A‖₂ is no less.

        The error is the residual: some eigenvalue is that near, but one that the probes hardly see
        may be larger.
        """
        low, high = self.extremes
        best = low if abs(float(low)) > abs(float(high)) else high
        return dataclasses.replace(best, value=abs(float(best)))

    @property
    def negative_mass(self) -> Estimate:
        """Share of eigenvalues below zero by more than rounding.

        The nodes that ``degeneracy`` takes for the cluster at zero do not count where their
        residual reaches zero: such a node holds much of the mass, and its sign is an accident of
        the depth. The error is that of the probes; it does not include what a finite depth misses
        of a step function.
        """
        unknown = (self._nearest_zero() > 0) & (np.abs(self.nodes) <= self.residuals)
        return self.expectation(
            lambda nodes: ((nodes < -self.resolution) & ~unknown).astype(np.float64)
        )

    def degeneracy(self, merge: int | None = None) -> Estimate:
        """Share of eigenvalues at zero: the mass of the ``merge`` Ritz values nearest 0.

        Appendix of "Flatness is a False Friend": one for a positive semi-definite operator, two for
        a Hessian, whose zero cluster Lanczos splits in two (both defaults). Without ``merge`` a
        Ritz value that is resolved, as an eigenvalue other than 0, does not count. The error is
        that of the probes; it does not include eigenvalues that the depth does not tell from 0.
        """
        at_zero = self._nearest_zero(merge)
        return self.expectation(lambda _: at_zero)

    def _nearest_zero(self, merge: int | None = None) -> Array:
        """1 at the ``merge`` nodes nearest 0 of each probe, else 0, (probes, depth).

        Nodes within the resolution of 0 count as one: where the Krylov space has ended but for
        rounding, it finds 0 several times, all but once with no weight.
        """
        default = min(1 if self.psd else 2, self.nodes.shape[1])
        count = default if merge is None else require_count(merge, "merge", 1, self.nodes.shape[1])
        at_zero = np.zeros_like(self.nodes)
        for row, nodes, weights, residuals in zip(
            at_zero, self.nodes, self.weights, self.residuals, strict=True
        ):
            places = np.flatnonzero(weights > 0)
            places = places[np.argsort(nodes[places])]
            sizes = np.abs(nodes[places])
            known = int((sizes <= self.resolution).sum())
            chosen = np.argsort(sizes, kind="stable")[: count + max(known - 1, 0)]
            row[places[chosen]] = 1.0
            if merge is None:
                alone = stand_alone(nodes[places], residuals[places])
                row[places[alone & (residuals[places] < ALONE * sizes)]] = 0.0
        return at_zero

    def outliers(self) -> tuple[Estimate, ...]:
        """Eigenvalues that stand alone beyond the bulk at either end, largest magnitude first.

        Going inward from each end of the first probe's nodes, a node counts while it is resolved
        (its residual is below a tenth of the distance to its neighbours) and carries no more weight
        than one eigenvalue can: w·P ≤ 10.8, the 99.9 % quantile of χ²₁.
        """
        there = self.weights[0] > 0  # a probe whose Krylov space ended early has nodes of weight 0
        order = np.argsort(self.nodes[0][there])
        parts = (self.nodes, self.weights, self.residuals)
        nodes, weights, residuals = (part[0][there][order] for part in parts)
        alone = stand_alone(nodes, residuals) & (weights * self.dim <= ONE)
        below = len(alone) if alone.all() else int(np.argmin(alone))
        above = 0 if alone.all() else int(np.argmin(alone[::-1]))
        chosen = [*range(below), *range(len(nodes) - above, len(nodes))]
        values = [
            Estimate(float(nodes[i]), float(residuals[i]), self.cost, self.status) for i in chosen
        ]
        return tuple(sorted(values, key=lambda estimate: -abs(float(estimate))))

    def density(
        self,
        grid: ArrayLike | None = None,
        smoothing: str = "gaussian",
        width: float | None = None,
        moments: int | None = None,
    ) -> Density:
        """The smoothed density on ``grid`` (by default 1,000 points over the support), its error
        from the probes.

        With "gaussian" each node becomes a Gaussian of standard deviation ``width`` (default: 0.5 %
        of the support), which adds width² to the second moment and more to higher ones (Theorem 2
        of the spectral thesis). With "maxent" it is the density of maximum entropy with the
        spectrum's first ``moments`` Chebyshev moments (default: the depth, at most 100): it keeps
        them all, and has a grid of its own.
        """
        require_choice(smoothing, "smoothing", ("gaussian", "maxent"))
        if smoothing == "maxent":
            fits = grid is None and width is None
            expected = "be None with smoothing='maxent'"
            require(fits, "grid and width", expected, "others", "call density.evaluate(points)")
            return self._maximum_entropy(moments)
        require(moments is None, "moments", "come with smoothing='maxent'", repr(moments))
        low, high = float(self.nodes.min()), float(self.nodes.max())
        support = (high - low) or abs(high) or 1.0
        width = 0.005 * support if width is None else require_positive(width, "width")
        even = np.linspace(low - 5 * width, high + 5 * width, 1000)
        points = even if grid is None else np.asarray(grid, np.float64)
        expected = "be a 1-D array of at least two points"
        require(points.ndim == 1 and points.size > 1, "grid", expected, points)
        norm = 1.0 / (width * math.sqrt(2 * math.pi))
        rows = max(1, AT_ONCE // self.nodes.size)
        pieces = (points[start : start + rows] for start in range(0, len(points), rows))
        parts = [self._heights(piece, width, norm) for piece in pieces]
        values, errors = (np.concatenate(each) for each in zip(*parts, strict=True))
        return Density(points, values, errors, width)

    def _heights(self, points: Array, width: float, norm: float) -> tuple[Array, Array]:
        """The density of Gaussians at some points and its standard error, as ``expectation`` has
        it at each.
        """
        probes = len(self.nodes)
        readings = norm * np.exp(-0.5 * ((points[:, None, None] - self.nodes) / width) ** 2)
        size = readings.max((1, 2))
        size[(size == 0) | ~np.isfinite(size)] = 1.0
        readings /= size[:, None, None]
        means = (self.weights * readings).sum((1, 2)) / probes
        factor = 2.0 / (self.dim + 2) / probes
        squares = (readings - means[:, None, None]) ** 2
        variances = (self.weights * squares).sum((1, 2)) / probes / (1 - factor)
        return size * means, size * np.sqrt(factor * variances)

    def _maximum_entropy(self, moments: int | None) -> MaxentDensity:
        """From the moments of all probes, on the support and 1 % more; their covariance by the
        identity above.
        """
        probes, depth = self.nodes.shape
        most = max(1, 2 * depth - 1)  # what the rule knows of each probe's measure
        count = min(depth, 100, most)
        if moments is not None:
            count = require_count(moments, "moments", 1, most)
        low = float((self.nodes - self.residuals).min())
        high = float((self.nodes + self.residuals).max())
        margin = 0.01 * (high - low) or 1e-3 * abs(high) or 1.0
        bounds = (max(low - margin, 0.0) if self.psd and high > 0 else low - margin, high + margin)
        weights = self.weights.ravel() / probes
        features = polynomials("chebyshev", to_unit(self.nodes.ravel(), bounds), count)
        values = weights @ features
        products = (features.T * weights) @ features - np.outer(values, values)
        covariance = 2.0 / (self.dim + 2) / probes * products
        errors = np.sqrt(np.diag(covariance).clip(0.0))
        return fit(Moments(values, errors, covariance, "chebyshev", bounds, probes))


@dataclass(frozen=True)
class Moments(Result):
    """Spectral moments tr φ_k(A)/P for k = 0 … count: ``values``, ``stderr`` (count + 1,) and their
    ``covariance``, whose diagonal has the squares of ``stderr`` before these are widened for the
    skewness of what single probes show.

    ``basis`` names φ: "power", "chebyshev" or "legendre", of the operator mapped from ``bounds`` to
    [−1, 1].
    """

    values: Array
    stderr: Array
    covariance: Array
    basis: str
    bounds: tuple[float, float]
    probes: int
    cost: int = 0
    status: Status = Status.CONVERGED

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, order: int) -> Estimate:
        """The moment of one order, with its standard error."""
        value, error = float(self.values[order]), float(self.stderr[order])
        return Estimate(value, error, self.cost, self.status, self.probes - 1)


@dataclass(frozen=True)
class Landscape(Result):
    """Loss on a line or plane through parameter space: ``offsets`` (points,) along each of 1 or 2
    directions.

    ``loss`` and ``held_out`` have one axis per direction, (points,) or (points, points).
    ``curvature`` holds vᵀHv for each direction v, one offset long, when it is known, so that a
    figure can draw the parabola it predicts. ``cost`` counts passes over the data: one a point, and
    one for each of these products.
    """

    offsets: Array
    loss: Array
    held_out: Array | None = None
    labels: tuple[str, ...] = ()
    curvature: tuple[float, ...] = ()
    cost: int = 0
    status: Status = Status.CONVERGED


@dataclass(frozen=True)
class Variance(Result):
    """Variance over samples of an element of the gradient, the Hessian and the Gauss–Newton matrix.

    ``hessian_mean`` and ``ggn_mean`` are the mean eigenvalues tr H̄/P and tr Ḡ/P; the Gauss–Newton
    fields are None where the problem is one function. ``cost`` counts passes over the data.
    """

    gradient_mean_norm: Estimate
    gradient_variance: Estimate
    hessian_mean: Estimate
    hessian_variance: Estimate
    parameter_l2: Estimate
    parameter_linf: Estimate
    ggn_mean: Estimate | None = None
    ggn_variance: Estimate | None = None
    cost: int = 0
    status: Status = Status.CONVERGED


@dataclass(frozen=True)
class Diagnostics(Result):
    """Convergence diagnostics of chains, from nβ(L − L*) of their draws.

    ``rhat`` is the rank-normalised split R̂ and ``ess_bulk``, ``ess_tail``, ``ess_mean`` the
    effective sample sizes (Vehtari et al. 2021), over all chains. ``drift`` is the change from the
    first to the last third of the draws, with its error, ``distance`` the mean ‖w − w*‖ of each
    chain, and ``distance_drift`` its change, which can go on where the loss has settled.
    ``acceptance`` is that of the chain; for SGLD, which never rejects, that of MALA steps from its
    draws; NaN for kernels whose steps are others. ``diverged`` and ``bounded`` (how often) are by
    chain.
    """

    rhat: float
    ess_bulk: float
    ess_tail: float
    ess_mean: float
    drift: Estimate
    distance: Array
    acceptance: float
    diverged: NDArray[np.bool_]
    bounded: NDArray[np.int64]
    distance_drift: Estimate = field(default_factory=lambda: Estimate(math.nan, math.nan))

    @property
    def wandering(self) -> str:
        """How the distance from w* still changes, where it does by over 10 % and four standard
        errors; else empty.
        """
        change, mean = float(self.distance_drift), float(self.distance.mean())
        clear = abs(change) > max(4 * float(self.distance_drift.stderr), 0.1 * mean)
        if not clear:
            return ""
        verb = "grew" if change > 0 else "fell"
        return f"‖w − w*‖ {verb} by {abs(change) / mean:.0%} of its mean while drawing"


@dataclass(frozen=True)
class Chains(Result):
    """Draws of several chains from exp(−nβ·L(w) − ½Σγ_i(w_i − w*_i)²), one row per chain, one
    column per draw.

    ``losses`` are those on the batches of the chain, ``centre_losses`` those of the centre w* on
    the same batches, ``full_losses`` those on the whole data. ``forces`` holds ‖∇U‖², ``virials``
    (w − w*)·∇U, ``work`` and ``heat`` (w − w*)·nβ∇L and nβ∇L·∇U; of HMC the means over its
    trajectories: ``recycled_losses``, ``virials`` and ``spreads`` ‖w − w*‖²((w − w*)·∇U − P − 2),
    whose mean under the posterior is 0. ``observables`` are (chains, draws, …), ``averages``
    (chains, stretches, …) over the numbers of draws in ``stretches``, ``parameters`` (chains,
    draws, P). All but ``losses`` and ``centre_losses`` are kept on request. ``burn_in`` counts
    steps of the kernel, trajectories of HMC: those of a chain between w* and its first draw, a
    pilot's among them. ``cost`` counts the gradients of all chains, pilots and burn-in included: of
    batches of ``batch_size`` samples, or of the whole data. ``step_bias`` is the bias of the mean
    energy from finite, noisy steps, if it was measured; λ̂ has it subtracted. ``noise`` has the
    variances over batches, averaged over the positions of the chains: of nβ(L − L*) ("energy"), the
    total of nβ∇L ("trace"), and the effect of the latter on the virial ("heat"); "dof" are the
    degrees of freedom of these variances. ``rounding`` is the error of nβ(L − L*) over the whole
    data from the precision of the loss, which does not average out. Where ``reasons`` has a mass,
    ``step_size``, ``forces``, ``heat`` and the "trace" are in its coordinates.
    """

    axes: ClassVar[tuple[str, ...]] = ("chain", "draw")

    losses: Array
    centre_losses: Array
    distances: Array
    acceptances: Array
    kernel: str
    step_size: float
    nbeta: float
    localization: float | Tensor
    initial_loss: float
    num_samples: int
    batch_size: int
    burn_in: int
    thin: int
    mode: str
    diagnostics: Diagnostics
    full_losses: Array | None = None
    recycled_losses: Array | None = None
    spreads: Array | None = None
    forces: Array | None = None
    virials: Array | None = None
    work: Array | None = None
    heat: Array | None = None
    observables: Mapping[str, Array] = field(default_factory=dict)
    averages: Mapping[str, Array] = field(default_factory=dict)
    stretches: tuple[int, ...] = ()
    parameters: Tensor | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)
    cost: int = 0
    status: Status = Status.CONVERGED
    step_bias: Estimate | None = None
    noise: Mapping[str, float] = field(default_factory=dict)
    rounding: float = 0.0

    def __len__(self) -> int:
        return len(self.losses)

    @property
    def energies(self) -> Array:
        """nβ·(L(w) − L(w*)) of every draw, both on the same batch: their mean is λ̂."""
        with np.errstate(over="ignore"):  # chains that ran away
            return self.nbeta * (self.losses - self.centre_losses)

    @property
    def on_whole_data(self) -> bool:
        """Whether every step saw the whole data, each sample once."""
        # The loss at w* tells a resample of n samples from the data, but not where it is the same
        # for all samples, as in a model that fits them exactly.
        alike = bool((self.centre_losses == self.initial_loss).all())
        return self.batch_size == self.num_samples and alike

    @property
    def full_energies(self) -> Array:
        """nβ·(L(w) − L(w*)) of every draw over the whole data."""
        known = self.full_losses is None and self.on_whole_data
        losses = self.losses if known else self.full_losses
        expected, cure = "have losses over the whole data", 'sample with baseline="full" or "both"'
        require(losses is not None, "full_energies", expected, "chains sampled without them", cure)
        return self.nbeta * (np.asarray(losses) - self.initial_loss)

    def to_arviz(self) -> Any:
        """The draws as an xarray ``DataTree`` with groups posterior and sample_stats, as ArviZ
        takes it.
        """
        import xarray

        dims = ("chain", "draw")
        stats_ = {"energy": self.energies, "loss": self.losses, "distance": self.distances}
        stats_["acceptance_rate"] = self.acceptances
        posterior: dict[str, Any] = {"learning_coefficient": (dims, self.energies)}
        if self.parameters is not None:
            posterior["parameters"] = ((*dims, "parameter"), self.parameters.numpy())
        for name, values in self.observables.items():
            own = (f"{name}_dim_{i}" for i in range(values.ndim - 2))
            posterior[name] = (*dims, *own), values
        groups = {"posterior": posterior}
        groups["sample_stats"] = {name: (dims, values) for name, values in stats_.items()}
        sets = {name: xarray.Dataset(group) for name, group in groups.items()}
        return xarray.DataTree.from_dict(sets)


@dataclass(frozen=True)
class Sensitivity(Result):
    """How a learning coefficient depends on its two settings: dλ̂/d ln γ (``localization``) and
    dλ̂/d ln nβ (``nbeta``).

    Doubling γ changes λ̂ by about 0.69 times the first. Where both are small against λ̂, it is a
    property of the loss rather than of the settings.
    """

    localization: Estimate
    nbeta: Estimate

    def __str__(self) -> str:
        return f"dλ̂/d ln γ = {self.localization}, dλ̂/d ln nβ = {self.nbeta}"


@dataclass(frozen=True)
class LearningCoefficient(Estimate):
    """λ̂ = nβ·(E[L(w)] − L(w*)) under the posterior localised at w*, with its standard error
    (``value``, ``stderr``).

    ``raw`` is the plain mean over the draws, and ``discretisation_bias`` the bias from finite,
    noisy steps; ``stderr`` combines the error of the chains and, in quadrature, the remaining bias.
    ``sensitivity`` says how λ̂ changes with γ and nβ. ``full`` is λ̂ from the losses of the draws
    over the whole data, beside the paired one, with baseline="both" (with "full", ``value`` is
    that). ``temperature`` says which nβ was used, and ``chains.reasons`` how each setting was
    chosen. ``wbic`` is n·E[L(w)], None at other temperatures than n/ln n. ``cost`` counts gradients
    of batches.
    """

    per_chain: Array = field(default_factory=lambda: np.zeros(0))
    wbic: Estimate | None = None
    nbeta: float = math.nan
    temperature: str = ""
    localization: float | Tensor = 0.0
    step_size: float = math.nan
    initial_loss: float = math.nan
    chains: Chains | None = None
    rhat: float = math.nan
    ess: float = math.nan
    raw: float = math.nan
    discretisation_bias: float = 0.0
    sensitivity: Sensitivity | None = None
    full: Estimate | None = None

    def __str__(self) -> str:
        tie = f"{self.localization:.4g}" if isinstance(self.localization, float) else "by parameter"
        wandering = "" if self.chains is None else self.chains.diagnostics.wandering
        text = f"{super().__str__()} at nβ = {self.nbeta:.5g} ({self.temperature}), γ = {tie}"
        return f"{text}; {wandering}" if wandering else text
