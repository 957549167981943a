"""Predictions of the spectrum of a batch of B samples from that of all the data.

Second-order perturbation theory fails where the curvature along one eigenvector varies from batch
to batch by more than its distance to the next: then they change places. Noise between k known
eigenvectors is a k × k matrix, so its effect is found by drawing it: Gaussian, or batches of the
samples' own matrices if these were measured.

A noise model holds the ``inputs`` of a prediction with their ``errors``, and reads everything off
for given inputs and a given u = 1/b, so that errors and the dependence on the batch are differences
of one function.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lambdahat._core.check import require, require_choice, require_positive, require_type
from lambdahat._core.rng import generator
from lambdahat._core.storage import Result
from lambdahat.randommatrix.batch_curvature import BatchEigenvalues, DirectionalVariance
from lambdahat.randommatrix.bulk import bulk_within
from lambdahat.randommatrix.free_sums import TracyWidom
from lambdahat.randommatrix.spikes import Additive, Multiplicative, SpikedModel, effective_batch
from lambdahat.results import Array, Eigenpairs, Estimate, Spectrum

# Gaussian draws, each of which is used with both signs: what is odd in the noise then cancels
PAIRS = 256
DRAWS = 512
MOST_SPIKES = 20
TINY = 1e-300
Mask = NDArray[np.bool_]
MODELS = ("additive", "multiplicative", "directional")
NEGLIGIBLE = 0.1  # of the largest eigenvalue


class MixedLevels(NamedTuple):
    """For each level (k,): mean position and its error, mean |φ̂_mᵀφ_m|², and spread."""

    positions: Array
    errors: Array
    overlaps: Array
    spreads: Array


def mix(levels: Array, noise: Array) -> MixedLevels:
    """The eigenvalues of diag(levels) + noise (draws, k, k), matched by rank."""
    if not len(levels):
        return MixedLevels(levels, levels, levels, levels)
    ranks = np.argsort(-levels, kind="stable")
    values, vectors = np.linalg.eigh(np.diag(levels) + noise)
    values, vectors = values[:, ::-1], vectors[:, :, ::-1]
    positions, errors, overlaps, spreads = (np.empty_like(levels) for _ in range(4))
    positions[ranks] = values.mean(axis=0)
    # the mean of what is linear in the noise is 0 exactly
    curved = values - levels[ranks] - noise[:, ranks, ranks]
    errors[ranks] = curved.std(axis=0) / math.sqrt(len(noise))
    overlaps[ranks] = (vectors[:, ranks, np.arange(len(levels))] ** 2).mean(axis=0)
    spreads[ranks] = values.std(axis=0)
    return MixedLevels(positions, errors, overlaps, spreads)


def independent_noise(variances: Array) -> Array:
    """Draws (2·PAIRS, k, k) of symmetric noise with ``variances`` (k, k), twice on the diagonal."""
    order = len(variances)
    drawn = np.triu(_normal(order * order).reshape(PAIRS, order, order))
    off, scale = np.triu(drawn, 1), np.sqrt(variances)
    noise = (off + off.transpose(0, 2, 1) + math.sqrt(2.0) * (drawn - off)) * scale
    return np.concatenate([noise, -noise])


def sampled_noise(elements: Array, order: int, batch_size: int) -> Array:
    """√B times the mean deviation of batches of B samples, (DRAWS, k, k), from ``elements`` (n, q).

    Those are the upper triangles, row by row, q = k(k+1)/2, of each sample's deviation from the
    mean. Batches are drawn with replacement, and Gaussian beyond B = n; the caller corrects for
    replacement by scaling with 1/√b.
    """
    count = len(elements)
    rng = generator(0, "mixing batches", batch_size)
    if batch_size > count:
        weights = torch.randn(DRAWS, count, dtype=torch.float64, generator=rng) / math.sqrt(count)
    else:
        chosen = torch.randint(count, (DRAWS, batch_size), generator=rng)
        weights = torch.zeros(DRAWS, count, dtype=torch.float64)
        share = torch.full(chosen.shape, 1.0 / math.sqrt(batch_size), dtype=torch.float64)
        weights.scatter_add_(1, chosen, share)
    drawn = weights.numpy() @ elements
    drawn = drawn - drawn.mean(axis=0)  # the mean over all batches is known: 0
    rows, columns = np.triu_indices(order)
    noise = np.zeros((DRAWS, order, order))
    noise[:, rows, columns] = drawn
    noise[:, columns, rows] = drawn
    return noise


@cache
def _normal(count: int) -> Array:
    drawn = torch.randn(PAIRS, count, dtype=torch.float64, generator=generator(0, "mixing", count))
    return drawn.numpy()


class NoiseReading(NamedTuple):
    """One prediction: for each known eigenvalue, the bulk, and the extremes (smallest, largest).

    ``onsets`` are the effective batches at which λ₁ leaves the bulk, and at which noise adds as
    much as λ₁ itself.
    """

    positions: Array
    overlaps: Array
    spreads: Array
    edges: Array
    extremes: Array
    extreme_spreads: Array
    onsets: Array


@dataclass(frozen=True)
class View:
    """A measured spectrum: eigenvalues known one by one (k,), a bulk of ``counts`` at ``nodes``.

    ``trace_error`` is the relative error of the trace, which is that of the bulk.
    """

    dimension: int
    eigenvalues: Array
    errors: Array
    nodes: Array
    counts: Array
    trace_error: float = 0.0


def view_of(spectrum: Spectrum | Eigenpairs) -> View:
    """The k pairs and a bulk at 0; or the outliers of a spectrum with its ends, and a bulk.

    The theory is one of few eigenvalues beside many: at most a tenth of the spectrum, or 20, the
    farthest out, are few.
    """
    if isinstance(spectrum, Eigenpairs):
        order = spectrum.vectors.shape[0]
        values = spectrum.values.double().cpu().numpy()
        errors = spectrum.residuals.double().cpu().numpy()
        return View(order, values, errors, np.zeros(1), np.array([max(order - len(values), 1.0)]))
    # the ends are the first probe's; those of others would count an eigenvalue twice
    there = np.flatnonzero(spectrum.weights[0] > 0)
    first, residuals = spectrum.nodes[0][there], spectrum.residuals[0][there]
    known = {float(first[i]): float(residuals[i]) for i in (first.argmin(), first.argmax())}
    known |= {float(each): float(each.stderr) for each in spectrum.outliers()}
    nodes, counts = bulk_within(spectrum, list(known))
    centre = float(np.average(spectrum.nodes, weights=spectrum.weights))
    counts = counts / max(counts.sum(), TINY) * max(spectrum.dim - len(known), 0)
    ranked = sorted(known, key=lambda value: -abs(value - centre))
    few = max(2, min(spectrum.dim // 10, MOST_SPIKES))
    chosen, rest = sorted(ranked[:few], reverse=True), ranked[few:]
    nodes, counts = np.append(nodes, rest), np.append(counts, np.ones(len(rest)))
    if not counts.sum() > 0:
        nodes, counts = np.array([centre]), np.ones(1)
    errors = np.array([known[value] for value in chosen])
    # of the trace, by Var(zᵀAz) = 2/(P+2)·(tr A²/P − (tr A/P)²) of each probe, A the bulk
    size = float(counts.sum())
    mean = float(nodes @ counts) / size
    variance = 2.0 * float((nodes - mean) ** 2 @ counts) / len(spectrum.nodes)
    total = abs(sum(chosen) + mean * size)
    error = math.sqrt(variance) / total if total > 0 else 0.0
    return View(spectrum.dim, np.array(chosen), errors, nodes, counts, error)


class RandomMatrixNoise:
    """Additive or multiplicative noise of variance σ² per element on a measured spectrum.

    Eigenvalues that do not stand apart join the bulk; those that do mix among themselves. The
    inputs are offsets of all eigenvalues and of the mixed ones in units of their errors, σ², and a
    factor on tr G, 1 with the trace's relative error.
    """

    def __init__(self, view: View, variance: Estimate, model: str) -> None:
        self.view, self.model, self.dof = view, model, variance.dof
        self.eigenvalues, self.eigenvalue_errors = view.eigenvalues, view.errors
        self.inputs = np.array([0.0, 0.0, float(variance), 1.0])
        doubt = view.trace_error if model == "multiplicative" else 0.0
        self.errors = np.array([float(view.errors.any()), 1.0, float(variance.stderr), doubt])
        self._mixed: dict[tuple[float, ...], tuple[SpikedModel, Mask, MixedLevels]] = {}

    def read(self, inputs: Array, inverse_batch: float) -> NoiseReading:
        """Everything, at given inputs."""
        spikes, noise = self.eigenvalues + inputs[0] * self.eigenvalue_errors, inputs[2] / inputs[3]
        spikes = spikes if self.model == "additive" else spikes.clip(0.0)
        # inputs[1] alone moves nothing of what costs
        key = float(inputs[0]), float(noise), inverse_batch
        if key not in self._mixed:
            self._mixed[key] = self._mix_levels(spikes, noise, inverse_batch)
        model, apart, mixed = self._mixed[key]
        positions = model.outlier(spikes)
        overlaps = model.overlap(spikes)
        spreads = np.zeros_like(spikes)
        some = spikes[apart]
        positions[apart] += mixed.positions - some + inputs[1] * mixed.errors
        overlaps[apart] *= mixed.overlaps
        spreads[apart] = mixed.spreads * np.sqrt(1.0 - model.closeness(some))
        extremes = self._extremes(model, positions, spreads, apart)
        edges, onsets = np.array(model.edges), self._onsets(spikes, noise)
        return NoiseReading(positions, overlaps, spreads, edges, *extremes, onsets)

    def _mix_levels(
        self, spikes: Array, noise: float, inverse_batch: float
    ) -> tuple[SpikedModel, Mask, MixedLevels]:
        """The model with the drowned eigenvalues in its bulk, the others, and how these mix."""
        apart, settled = np.ones(len(spikes), dtype=bool), False
        while not settled:
            model = self._at(spikes[~apart], noise, inverse_batch)
            now = apart & model.stands_apart(spikes)
            apart, settled = now, bool((now == apart).all())
        some = spikes[apart]
        variances = model.coupling(some[:, None], some[None, :])
        return model, apart, mix(some, independent_noise(variances))

    def _at(self, drowned: Array, noise: float, inverse_batch: float) -> SpikedModel:
        nodes = np.append(self.view.nodes, drowned)
        counts = np.append(self.view.counts, np.ones_like(drowned))
        if self.model == "additive":
            size = float(counts.sum())
            return Additive(math.sqrt(max(noise, 0.0) * size * inverse_batch), nodes, counts, size)
        # c = P²σ²/((tr G)² + tr G²): 1 for Gaussian samples of rank one, whose noise it is
        every = np.append(self.view.nodes, self.view.eigenvalues).clip(0.0)
        number = np.append(self.view.counts, np.ones_like(self.view.eigenvalues))
        gaussian = float(every @ number) ** 2 + float(every**2 @ number)
        ratio = max(noise, 0.0) * self.view.dimension**2 / gaussian if gaussian > 0 else 0.0
        per_sample = ratio * inverse_batch
        samples = 1.0 / per_sample if per_sample > 0 else math.inf
        return Multiplicative(nodes.clip(0.0), counts, samples)

    def _extremes(
        self, model: SpikedModel, positions: Array, spreads: Array, apart: Mask
    ) -> tuple[Array, Array]:
        """(smallest, largest) and their spreads: an outlier, or the edge with Tracy–Widom noise."""
        law = TracyWidom()
        values, widths = np.zeros(2), np.zeros(2)
        for side, sign in ((0, -1.0), (1, 1.0)):
            scale = model.edge_scales[side]
            values[side] = model.edges[side] + sign * law.mean * scale
            widths[side] = law.std * scale
            beyond = apart & (sign * positions > sign * model.edges[side])
            if beyond.any():
                chosen = int(np.argmax(np.where(beyond, sign * positions, -math.inf)))
                values[side], widths[side] = positions[chosen], spreads[chosen]
        fewer = isinstance(model, Multiplicative) and model.samples < self.view.dimension
        if fewer or (isinstance(model, Multiplicative) and model.nodes[0] == 0):
            values[0], widths[0] = 0.0, 0.0  # a null space
        return values, widths

    def _onsets(self, spikes: Array, noise: float) -> Array:
        top = spikes.max(initial=-math.inf)
        if not top > max(float(self.view.nodes.max()), 0.0):
            return np.full(2, math.nan)
        single = self._at(np.zeros(0), noise, 1.0)
        return np.array([float(single.closeness(top)), float(single.relative_shift(top))])


class DirectionalNoise:
    """Noise measured along k eigenvectors.

    Among themselves they mix, by batches drawn of the samples' own matrices. Noise to all other
    directions, as if these were at 0, adds r_m/(bλ_m) by second-order perturbation theory; where
    r_m/b exceeds λ_m² it ends in 2√(r_m/b), as for isotropic noise. The inputs are offsets of all
    λ, of all r and of the mixed positions in units of their errors, a factor on the noise among the
    k, and the bulk's variance.
    """

    def __init__(self, variance: DirectionalVariance, batch_size: int) -> None:
        self.dimension, self.count, self.dof = variance.dimension, len(variance), math.inf
        self.psd = variance.operator == "ggn"
        self.eigenvalues = _flat(variance.eigenvalues.value)
        self.eigenvalue_errors = _flat(variance.eigenvalues.stderr)
        self.rest, self.rest_errors = _flat(variance.rest.value), _flat(variance.rest.stderr)
        self.couplings = _flat(variance.couplings.value).reshape(self.count, self.count)
        self.noise = sampled_noise(variance.elements.double().cpu().numpy(), self.count, batch_size)
        total = self.couplings.sum()
        doubt = float(_flat(variance.couplings.stderr).sum() / total) if total > 0 else 0.0
        self.inputs = np.array([0.0, 0.0, 0.0, 1.0, float(variance.bulk)])
        offsets = (float(self.eigenvalue_errors.any()), float(self.rest_errors.any()), 1.0)
        self.errors = np.array([*offsets, doubt, float(variance.bulk.stderr)])
        self._mixed: dict[tuple[float, ...], MixedLevels] = {}

    def read(self, inputs: Array, inverse_batch: float) -> NoiseReading:
        """Everything, at given inputs."""
        levels = self.eigenvalues + inputs[0] * self.eigenvalue_errors
        rest = (self.rest + inputs[1] * self.rest_errors).clip(0.0)
        others = self.dimension - self.count
        radius = 2.0 * math.sqrt(others * max(inputs[4], 0.0) * inverse_batch)
        edges = np.array([0.0 if self.psd else -radius, radius])
        scale = math.sqrt(max(inputs[3], 0.0) * inverse_batch)
        key = float(inputs[0]), scale  # the other inputs do not change how the levels mix
        if key not in self._mixed:
            self._mixed[key] = mix(levels, scale * self.noise)
        mixed = self._mixed[key]
        # noise to directions at 0 moves |λ| outward, and leaves 1 − noise/λ² of the overlap
        sizes, noise = np.abs(levels), rest * inverse_batch
        clear = noise < sizes**2
        safe = np.where(clear, sizes, 1.0)
        outward = np.where(clear, noise / safe, 2.0 * np.sqrt(noise) - sizes)
        kept = np.where(clear, 1.0 - noise / safe**2, 0.0)
        outward = np.where(levels < 0, -outward, outward)
        positions = mixed.positions + inputs[2] * mixed.errors + outward
        apart = (kept > 0) & ((positions > edges[1]) | (positions < edges[0]))
        overlaps = np.where(apart, kept * mixed.overlaps, 0.0)
        extremes, widths = self._extremes(levels, positions, mixed.spreads, edges)
        onsets = self._onsets(levels, rest, inputs[3] * self.couplings)
        return NoiseReading(positions, overlaps, mixed.spreads, edges, extremes, widths, onsets)

    def _extremes(
        self, levels: Array, positions: Array, spreads: Array, edges: Array
    ) -> tuple[Array, Array]:
        """(smallest, largest): an eigenvalue beyond the bulk's edge, or that edge."""
        law, unit = TracyWidom(), edges[1] / 2 * max(self.dimension - self.count, 1) ** (-2 / 3)
        values, widths = edges + law.mean * unit * np.array([-1.0, 1.0]), np.full(2, law.std * unit)
        for side, sign in ((0, -1.0), (1, 1.0)):
            outward = np.where(sign * levels > 0, sign * positions, -math.inf)
            chosen = int(outward.argmax())
            if outward[chosen] > sign * edges[side]:
                values[side], widths[side] = positions[chosen], spreads[chosen]
        if self.psd:
            values[0], widths[0] = 0.0, 0.0
        return values, widths

    def _onsets(self, levels: Array, rest: Array, couplings: Array) -> Array:
        top = int(levels.argmax())
        level = float(levels[top])
        gaps = np.delete(level - levels, top)
        if level <= 0 or (gaps == 0).any():
            return np.full(2, math.nan)
        others = np.delete(couplings[:, top], top)
        closeness = float(rest[top] / level**2 + (others / gaps**2).sum())
        return np.array([closeness, float(rest[top] / level + (others / gaps).sum()) / level])


NoiseModel = RandomMatrixNoise | DirectionalNoise


def noise_model(
    spectrum: Spectrum | Eigenpairs,
    variance: Estimate | DirectionalVariance,
    model: str,
    batch_size: int,
) -> NoiseModel:
    """The model by its name: "additive", "multiplicative" or "directional"."""
    directional = isinstance(variance, DirectionalVariance)
    fine = directional == (model == "directional")
    expected = (
        f"be {'directional_variance(…)' if model == 'directional' else 'a number or an Estimate'}"
        f" for {model!r}"
    )
    cure = 'model="directional" and directional_variance go together'
    require(fine, "variance", expected, type(variance).__name__, cure, TypeError)
    if isinstance(variance, DirectionalVariance):
        return DirectionalNoise(variance, batch_size)
    if model == "multiplicative":
        expected = "be a Spectrum for multiplicative noise"
        cure = "its noise is made of all the eigenvalues: take lh.spectrum(lh.ggn(problem))"
        require_type(spectrum, Spectrum, "spectrum", expected, cure)
    return RandomMatrixNoise(view_of(spectrum), variance, model)


def _flat(values: float | torch.Tensor) -> Array:
    return torch.as_tensor(values, dtype=torch.float64).flatten().cpu().numpy()


@dataclass(frozen=True)
class PredictedOutlier(Result):
    """An eigenvalue of the full data and its predicted counterpart in a batch.

    ``batch`` is the mean of the eigenvalue over batches, or the edge of the bulk if it is hidden
    there; ``spread`` its standard deviation between batches; ``overlap`` |φ̂ᵀφ|², 0 where it is
    hidden.
    """

    full: Estimate
    batch: Estimate
    overlap: Estimate
    spread: float


@dataclass(frozen=True)
class BatchPrediction(Result):
    """Predicted extreme eigenvalues of the curvature of a random batch.

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
    """Predict extreme eigenvalues, bulk edges and overlaps of batches of ``batch_size`` samples.

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
    cure = "take lh.spectrum(lh.hessian(problem)) or lh.eigenpairs(lh.hessian(problem))"
    require_type(spectrum, Spectrum | Eigenpairs, "spectrum", "be a Spectrum or Eigenpairs", cure)
    expected = "be a number, an Estimate or a DirectionalVariance"
    cure = "take lh.variance(problem).hessian_variance"
    real = isinstance(variance, Estimate | DirectionalVariance | numbers.Real)
    fine = real and not isinstance(variance, bool)
    require(fine, "variance", expected, variance, cure, TypeError)
    default = "additive"
    if isinstance(variance, DirectionalVariance):
        default = "directional"
    else:
        value = float(variance)
        require(0 <= value < math.inf, "variance", "be finite and at least 0", repr(value))
        variance = variance if isinstance(variance, Estimate) else Estimate(value)
    chosen = require_choice(model or default, "model", MODELS)
    effective = effective_batch(batch_size, population)
    noise = noise_model(spectrum, variance, chosen, batch_size)
    inverse = 0.0 if math.isinf(effective) else 1.0 / effective
    step, here = 1e-3 / batch_size, _Read(noise, inverse)
    beside = _Read(noise, max(inverse - step, 0.0)), _Read(noise, inverse + step)
    low, high = here.measure(lambda r: r.edges)
    smallest, largest = here.measure(lambda r: r.extremes)

    def batches(reading: NoiseReading) -> Array:
        """B of the effective b of the onsets: b/(1 + b/N)."""
        b = reading.onsets
        return b if population is None else np.asarray(b / (1.0 + b / population))

    outliers = zip(
        map(Estimate, noise.eigenvalues.tolist(), noise.eigenvalue_errors.tolist()),
        here.measure(lambda r: r.positions),
        here.measure(lambda r: r.overlaps),
        here.base.spreads.tolist(),
        strict=True,
    )
    exponent = _exponent(beside[0], here, beside[1], batch_size)
    least, most = (float(width) for width in here.base.extreme_spreads)
    separates_at, signal_at = here.measure(batches)
    return BatchPrediction(
        batch_size=int(batch_size),
        population=population,
        effective=effective,
        model=chosen,
        largest=largest,
        smallest=smallest,
        spread=most,
        smallest_spread=least,
        edges=(low, high),
        outliers=tuple(PredictedOutlier(*parts) for parts in outliers),
        separates_at=separates_at,
        signal_at=signal_at,
        exponent=exponent,
        regime=_regime(noise, here.base, exponent),
    )


class _Read:
    """Readings at one u = 1/b: at the inputs, and with each of them half an error more and less."""

    def __init__(self, noise: NoiseModel, inverse: float) -> None:
        self.noise, self.inverse = noise, inverse
        self.base = noise.read(noise.inputs, inverse)
        self.known = bool(np.isfinite(noise.errors).all())
        self.ends = []
        for step in np.diag(noise.errors) / 2 if self.known else []:
            if step.any():
                pair = (noise.inputs + step, noise.inputs - step)
                self.ends.append((noise.read(pair[0], inverse), noise.read(pair[1], inverse)))

    def measure(self, read: Callable[[NoiseReading], Array]) -> list[Estimate]:
        """Values with their errors √Σ_i(∂f/∂x_i·s_i)²; NaN where an input's error is unknown."""
        ends = [(read(more), read(less)) for more, less in self.ends]
        return self.propagate(read(self.base), ends)

    def propagate(self, values: Array, ends: list[tuple[Array, Array]]) -> list[Estimate]:
        """Values with the errors that their changes at the ends make."""
        variance = sum(((more - less) ** 2 for more, less in ends), np.zeros_like(values))
        errors = np.sqrt(variance) if self.known else np.full_like(values, math.nan)
        pairs = zip(values, errors, strict=True)
        return [Estimate(float(v), float(e), dof=self.noise.dof) for v, e in pairs]


def _exponent(low: _Read, here: _Read, high: _Read, batch_size: int) -> Estimate:
    """−d log λ'₁/d log B = (1/B)·(dλ'₁/du)/λ'₁ with u = 1/b = 1/B − 1/N."""
    width = batch_size * (high.inverse - low.inverse)

    def slope(readings: tuple[NoiseReading, NoiseReading, NoiseReading]) -> Array:
        less, middle, more = (float(reading.extremes[1]) for reading in readings)
        return np.array([(more - less) / width / middle if middle else math.nan])

    ends = [
        (slope((a[0], b[0], c[0])), slope((a[1], b[1], c[1])))
        for a, b, c in zip(low.ends, here.ends, high.ends, strict=True)
    ]
    return here.propagate(slope((low.base, here.base, high.base)), ends)[0]


def _regime(noise: NoiseModel, reading: NoiseReading, exponent: Estimate) -> str:
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


@dataclass(frozen=True)
class BatchComparison(Result):
    """Predictions of one or more models, and measurements on batches of the same sizes."""

    predictions: tuple[BatchPrediction, ...]
    measured: tuple[BatchEigenvalues, ...]

    def __post_init__(self) -> None:
        known = {each.batch_size for each in self.measured}
        for model in self.models:
            sizes = {each.batch_size for each in self.predictions if each.model == model}
            missing = sorted(sizes ^ known)
            expected = f"be of the batch sizes that were measured, for {model!r}"
            require(not missing, "predictions", expected, f"others: {missing}")

    @property
    def models(self) -> tuple[str, ...]:
        """The names of the models, in the order of the predictions."""
        return tuple(dict.fromkeys(each.model for each in self.predictions))

    def of(self, model: str) -> tuple[BatchPrediction, ...]:
        """One model's predictions, by rising batch size."""
        require_choice(model, "model", self.models)
        own = (each for each in self.predictions if each.model == model)
        return tuple(sorted(own, key=lambda each: each.batch_size))

    def scores(self, model: str, which: str = "largest") -> Array:
        """(λ − predicted)/√(spread² + stderr²) of every measured batch, "largest" or "smallest".

        A batch of all data, for which an exact prediction has neither, is left out.
        """
        require_choice(which, "which", ("largest", "smallest"))
        by_size = {each.batch_size: each for each in self.of(model)}
        scores = []
        for measured in self.measured:
            prediction = by_size[measured.batch_size]
            expected, spread = prediction.largest, prediction.spread
            if which == "smallest":
                expected, spread = prediction.smallest, prediction.smallest_spread
            values = getattr(measured, which)[:, 0]
            width = math.hypot(spread, float(expected.stderr))
            if width > 0:
                scores.append((values - float(expected)) / width)
        need = "hold batches smaller than the data"
        require(bool(scores), "measured", need, "none", "all data has no noise to score")
        return np.concatenate(scores)

    def within(self, model: str, deviations: float = 1.0, which: str = "largest") -> Estimate:
        """The share of batches within so many predicted standard deviations: ideally 0.68 for 1."""
        inside = np.abs(self.scores(model, which)) <= require_positive(deviations, "deviations")
        share = float(inside.mean())
        variance = max(share * (1 - share), 1 / (4 * inside.size)) / inside.size
        return Estimate(share, math.sqrt(variance))
