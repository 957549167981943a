"""What a batch of B samples will show of a spectrum known from all the data."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lambdahat._core.check import require, require_choice
from lambdahat._core.storage import Result
from lambdahat.randommatrix.batch_readings import NoiseModel, Reading, noise_model
from lambdahat.randommatrix.directions import DirectionalVariance
from lambdahat.randommatrix.spikes import effective_batch
from lambdahat.results import Array, Eigenpairs, Estimate, Spectrum

MODELS = ("additive", "multiplicative", "directional")
NEGLIGIBLE = 0.1  # of the largest eigenvalue


@dataclass(frozen=True)
class PredictedOutlier(Result):
    """One eigenvalue of all the data and what a batch shows of it.

    ``batch`` is the mean over batches of the eigenvalue, the edge of the bulk where it drowns;
    ``spread`` its standard deviation between batches; ``overlap`` |φ̂ᵀφ|², 0 where it drowns.
    """

    full: Estimate
    batch: Estimate
    overlap: Estimate
    spread: float


@dataclass(frozen=True)
class BatchPrediction(Result):
    """The extreme eigenvalues of the curvature of a random batch, predicted.

    The errors of ``largest``, ``smallest``, ``edges`` (lower, upper end of the noisy bulk), of the
    ``outliers`` and the rest come from those of the spectrum and of the variance. How far a single
    batch strays from the mean is another matter: ``spread`` is the standard deviation of
    ``largest`` between batches, ``smallest_spread`` that of ``smallest``. ``separates_at`` is the
    batch size above which λ₁ stands apart from the noise, ``signal_at`` that at which noise adds as
    much as λ₁ itself; ``exponent`` is e in λ'₁ ∝ B^(−e) here, and ``regime`` all this in words.
    """

    batch_size: int
    population: int | None
    effective: float
    model: str
    largest: Estimate
    smallest: Estimate
    spread: float
    smallest_spread: float
    edges: tuple[Estimate, Estimate]
    outliers: tuple[PredictedOutlier, ...]
    separates_at: Estimate
    signal_at: Estimate
    exponent: Estimate
    regime: str

    @property
    def overlaps(self) -> tuple[Estimate, ...]:
        """|φ̂ᵀφ|² of each of the outliers."""
        return tuple(outlier.overlap for outlier in self.outliers)


def predict(
    spectrum: Spectrum | Eigenpairs,
    variance: Estimate | float | DirectionalVariance,
    batch_size: int,
    population: int | None = None,
    model: str | None = None,
) -> BatchPrediction:
    """The extreme eigenvalues, bulk edges and overlaps that batches of ``batch_size`` samples show.

    ``spectrum`` is that of all the data (with ``Eigenpairs`` the rest of it is taken to be 0),
    ``population`` its number of samples N: b = B/(1 − B/N), without it b = B. ``variance`` is σ² of
    one element over samples, such as ``lh.variance(problem).hessian_variance``. ``model`` is one of

    - "additive" (the default): isotropic symmetric noise, Theorems 14 and 17 of the spectral
      thesis, with the measured bulk of the spectrum in place of 0;
    - "multiplicative": a sample covariance of the measured spectrum, for positive semi-definite
      curvature (negative eigenvalues count as 0); its b is divided by c = P²σ²/((tr G)² + tr G²), 1
      for Gaussian samples of rank one;
    - "directional" (the default for a ``DirectionalVariance``): noise measured along the
      eigenvectors.
    """
    _require_inputs(spectrum, variance)
    directional = isinstance(variance, DirectionalVariance)
    chosen = require_choice(
        model or ("directional" if directional else "additive"), "model", MODELS
    )
    effective = effective_batch(batch_size, population)
    given = (
        variance
        if isinstance(variance, DirectionalVariance | Estimate)
        else Estimate(float(variance))
    )
    noise = noise_model(spectrum, given, chosen, batch_size)
    inverse = 0.0 if math.isinf(effective) else 1.0 / effective

    here, (low, high) = _Read(noise, inverse), _beside(noise, inverse, batch_size)
    edges, (smallest, largest) = here.measure(lambda r: r.edges), here.measure(lambda r: r.extremes)
    onsets = here.measure(lambda r: _batch_of(r.onsets, population))
    exponent = _exponent(low, here, high, batch_size)
    reading = here.base
    return BatchPrediction(
        int(batch_size),
        population,
        effective,
        chosen,
        largest,
        smallest,
        float(reading.extreme_spreads[1]),
        float(reading.extreme_spreads[0]),
        (edges[0], edges[1]),
        _outliers(here),
        onsets[0],
        onsets[1],
        exponent,
        _regime(noise, reading, exponent),
    )


class _Read:
    """Readings at one u = 1/b: at the inputs, and with each of them half an error more and less."""

    def __init__(self, noise: NoiseModel, inverse: float) -> None:
        self.noise, self.inverse = noise, inverse
        self.base = noise.read(noise.inputs, inverse)
        self.known = bool(np.isfinite(noise.errors).all())
        steps = [step for step in np.diag(noise.errors) / 2 if step.any()] if self.known else []
        self.ends = [
            (noise.read(noise.inputs + s, inverse), noise.read(noise.inputs - s, inverse))
            for s in steps
        ]

    def measure(self, read: Callable[[Reading], Array]) -> list[Estimate]:
        """Values with their errors √Σ_i(∂f/∂x_i·s_i)²; NaN where an input's error is unknown."""
        return self.propagate(
            read(self.base), [(read(more), read(less)) for more, less in self.ends]
        )

    def propagate(self, values: Array, ends: list[tuple[Array, Array]]) -> list[Estimate]:
        """Values with the errors that their changes at the ends make."""
        variance = sum(((more - less) ** 2 for more, less in ends), np.zeros_like(values))
        errors = np.sqrt(variance) if self.known else np.full_like(values, math.nan)
        return [
            Estimate(float(v), float(e), dof=self.noise.dof)
            for v, e in zip(values, errors, strict=True)
        ]


def _beside(noise: NoiseModel, inverse: float, batch_size: int) -> tuple[_Read, _Read]:
    """Readings at slightly larger and smaller batches."""
    step = 1e-3 / batch_size
    return _Read(noise, max(inverse - step, 0.0)), _Read(noise, inverse + step)


def _exponent(low: _Read, here: _Read, high: _Read, batch_size: int) -> Estimate:
    """−d log λ'₁/d log B = (1/B)·(dλ'₁/du)/λ'₁ with u = 1/b = 1/B − 1/N."""
    width = batch_size * (high.inverse - low.inverse)

    def slope(readings: tuple[Reading, Reading, Reading]) -> Array:
        less, middle, more = (float(reading.extremes[1]) for reading in readings)
        return np.array([(more - less) / width / middle if middle else math.nan])

    ends = [
        (slope((a[0], b[0], c[0])), slope((a[1], b[1], c[1])))
        for a, b, c in zip(low.ends, here.ends, high.ends, strict=True)
    ]
    return here.propagate(slope((low.base, here.base, high.base)), ends)[0]


def _outliers(here: _Read) -> tuple[PredictedOutlier, ...]:
    noise = here.noise
    full = [
        Estimate(float(v), float(e))
        for v, e in zip(noise.eigenvalues, noise.eigenvalue_errors, strict=True)
    ]
    seen, overlaps = here.measure(lambda r: r.positions), here.measure(lambda r: r.overlaps)
    spreads = (float(spread) for spread in here.base.spreads)
    return tuple(
        PredictedOutlier(*parts) for parts in zip(full, seen, overlaps, spreads, strict=True)
    )


def _batch_of(effective: Array, population: int | None) -> Array:
    """B of an effective b: b/(1 + b/N)."""
    return (
        effective if population is None else np.asarray(effective / (1.0 + effective / population))
    )


def _regime(noise: NoiseModel, reading: Reading, exponent: Estimate) -> str:
    """Which of the three regimes of Figure 5.1 of the spectral thesis it is, in words."""
    top = int(np.argmax(noise.eigenvalues))
    seen, true = float(reading.extremes[1]), float(noise.eigenvalues[top])
    if true <= 0:
        return f"no curvature upwards: λ₁ = {true:.4g} of all data, and a batch shows {seen:.4g}"
    falls = f"it falls as B^-{float(exponent):.2f}"
    if reading.overlaps[top] <= 0:
        return f"noise: λ₁ = {true:.4g} drowns in the noise, whose edge a batch shows; {falls}"
    added = (seen - true) / true
    if added <= NEGLIGIBLE:
        return f"signal: noise adds {added:.1%} to λ₁ = {true:.4g}; larger batches change little"
    return f"between: λ₁ = {true:.4g} stands apart and noise adds {added:.0%}; {falls}"


def _require_inputs(spectrum: object, variance: object) -> None:
    require(
        isinstance(spectrum, Spectrum | Eigenpairs),
        "spectrum",
        "be a Spectrum or Eigenpairs",
        spectrum,
        "take lh.spectrum(lh.hessian(problem)) or lh.eigenpairs(lh.hessian(problem))",
        TypeError,
    )
    known = isinstance(variance, Estimate | DirectionalVariance | numbers.Real) and not isinstance(
        variance, bool
    )
    require(
        known,
        "variance",
        "be a number, an Estimate or a DirectionalVariance",
        variance,
        "take lh.variance(problem).hessian_variance",
        TypeError,
    )
    if not isinstance(variance, DirectionalVariance):
        value = float(variance)  # type: ignore[arg-type]
        require(0 <= value < math.inf, "variance", "be finite and at least 0", repr(value))
