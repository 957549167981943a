"""What a batch shows of known eigenvalues, under a model of its noise: the numbers behind
``predict``.

A noise model holds the ``inputs`` that a prediction depends on with their ``errors``, and reads
everything off for given inputs and a given u = 1/b, so that errors and the dependence on the batch
are differences of one function.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lambdahat._core.check import require
from lambdahat.randommatrix.bulk import bulk_within
from lambdahat.randommatrix.directions import DirectionalVariance
from lambdahat.randommatrix.mixing import Mixed, independent_noise, mix, sampled_noise
from lambdahat.randommatrix.spikes import Additive, Multiplicative, SpikedModel
from lambdahat.randommatrix.tracy_widom import TracyWidom
from lambdahat.results import Array, Eigenpairs, Estimate, Spectrum

MOST_SPIKES = 20
TINY = 1e-300

Mask = NDArray[np.bool_]


class Reading(NamedTuple):
    """One prediction: of each known eigenvalue, of the bulk, and of the extremes (smallest,
    largest).

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


class NoiseModel(ABC):
    """A model of a batch's noise, as a function of its inputs and of u = 1/b."""

    inputs: Array
    errors: Array
    eigenvalues: Array
    eigenvalue_errors: Array
    dof: float = math.inf

    @abstractmethod
    def read(self, inputs: Array, inverse_batch: float) -> Reading:
        """Everything, at given inputs."""


@dataclass(frozen=True)
class View:
    """A measured spectrum as eigenvalues known one by one (k,) with errors, and a bulk of
    ``counts`` at ``nodes``.

    ``trace_error`` is the relative error of the trace, which is that of the bulk.
    """

    dimension: int
    eigenvalues: Array
    errors: Array
    nodes: Array
    counts: Array
    trace_error: float = 0.0


def view_of(spectrum: Spectrum | Eigenpairs) -> View:
    """The k pairs and a bulk at 0; or the outliers of a spectrum, its ends among them, and a bulk
    of all else.

    The theory is one of few eigenvalues beside many: at most a tenth of the spectrum, or 20, the
    farthest out, are few.
    """
    if isinstance(spectrum, Eigenpairs):
        order = spectrum.vectors.shape[0]
        values, errors = (
            spectrum.values.double().cpu().numpy(),
            spectrum.residuals.double().cpu().numpy(),
        )
        return View(order, values, errors, np.zeros(1), np.array([max(order - len(values), 1.0)]))
    found = {float(each): float(each.stderr) for each in (*_ends(spectrum), *spectrum.outliers())}
    nodes, counts = bulk_within(spectrum, list(found))
    centre = float(np.average(spectrum.nodes, weights=spectrum.weights))
    counts = counts / max(counts.sum(), TINY) * max(spectrum.dim - len(found), 0)
    ranked = sorted(found, key=lambda value: -abs(value - centre))
    few = max(2, min(spectrum.dim // 10, MOST_SPIKES))
    chosen, rest = sorted(ranked[:few], reverse=True), ranked[few:]
    nodes, counts = np.append(nodes, rest), np.append(counts, np.ones(len(rest)))
    if not counts.sum() > 0:
        nodes, counts = np.array([centre]), np.ones(1)
    errors = np.array([found[value] for value in chosen])
    return View(
        spectrum.dim,
        np.array(chosen),
        errors,
        nodes,
        counts,
        _trace_error(spectrum, chosen, nodes, counts),
    )


def _trace_error(spectrum: Spectrum, chosen: list[float], nodes: Array, counts: Array) -> float:
    """By Var(zᵀAz) = 2/(P+2)·(tr A²/P − (tr A/P)²) of each probe, A the bulk."""
    size, probes = float(counts.sum()), len(spectrum.nodes)
    mean = float(nodes @ counts) / size
    variance = 2.0 * float((nodes - mean) ** 2 @ counts) / probes
    total = abs(sum(chosen) + mean * size)
    return math.sqrt(variance) / total if total > 0 else 0.0


def _ends(spectrum: Spectrum) -> tuple[Estimate, Estimate]:
    """The first probe's smallest and largest node: another's for the same eigenvalue would count
    it twice.
    """
    there = np.flatnonzero(spectrum.weights[0] > 0)
    nodes, residuals = spectrum.nodes[0][there], spectrum.residuals[0][there]
    low, high = (
        Estimate(float(nodes[i]), float(residuals[i])) for i in (nodes.argmin(), nodes.argmax())
    )
    return low, high


class RandomMatrixNoise(NoiseModel):
    """Additive or multiplicative noise of variance σ² per element on a measured spectrum.

    Eigenvalues that do not stand apart join the bulk; those that do mix among themselves
    (``mixing``). The inputs are offsets of all eigenvalues and of the mixed ones in units of their
    errors, σ², and a factor on tr G, 1 with the trace's relative error.
    """

    def __init__(self, view: View, variance: Estimate, model: str) -> None:
        self.view, self.model, self.dof = view, model, variance.dof
        self.eigenvalues, self.eigenvalue_errors = view.eigenvalues, view.errors
        self.inputs = np.array([0.0, 0.0, float(variance), 1.0])
        doubt = view.trace_error if model == "multiplicative" else 0.0
        self.errors = np.array([float(view.errors.any()), 1.0, float(variance.stderr), doubt])
        self._found: dict[tuple[float, ...], tuple[SpikedModel, Mask, Mixed]] = {}

    def read(self, inputs: Array, inverse_batch: float) -> Reading:
        """Everything, at given inputs."""
        spikes, noise = self.eigenvalues + inputs[0] * self.eigenvalue_errors, inputs[2] / inputs[3]
        spikes = spikes if self.model == "additive" else spikes.clip(0.0)
        # inputs[1] alone moves nothing of what costs
        key = float(inputs[0]), float(noise), inverse_batch
        if key not in self._found:
            self._found[key] = self._mixed(spikes, noise, inverse_batch)
        model, apart, mixed = self._found[key]
        positions, overlaps, spreads = (
            model.outlier(spikes),
            model.overlap(spikes),
            np.zeros_like(spikes),
        )
        some = spikes[apart]
        positions[apart] += mixed.positions - some + inputs[1] * mixed.errors
        overlaps[apart] *= mixed.overlaps
        spreads[apart] = mixed.spreads * np.sqrt(1.0 - model.closeness(some))
        extremes, extreme_spreads = self._extremes(model, positions, spreads, apart)
        return Reading(
            positions,
            overlaps,
            spreads,
            np.array(model.edges),
            extremes,
            extreme_spreads,
            self._onsets(spikes, noise),
        )

    def _mixed(
        self, spikes: Array, noise: float, inverse_batch: float
    ) -> tuple[SpikedModel, Mask, Mixed]:
        """The model, which eigenvalues stand apart, and how these mix."""
        model, apart = self._settled(spikes, noise, inverse_batch)
        some = spikes[apart]
        return (
            model,
            apart,
            mix(some, independent_noise(model.coupling(some[:, None], some[None, :]))),
        )

    def _settled(
        self, spikes: Array, noise: float, inverse_batch: float
    ) -> tuple[SpikedModel, Mask]:
        """The model with what does not stand apart in its bulk, and which eigenvalues do."""
        apart = np.ones(len(spikes), dtype=bool)
        while True:
            model = self._at(spikes[~apart], noise, inverse_batch)
            now = apart & model.stands_apart(spikes)
            if (now == apart).all():
                return model, apart
            apart = now

    def _at(self, drowned: Array, noise: float, inverse_batch: float) -> SpikedModel:
        nodes = np.append(self.view.nodes, drowned)
        counts = np.append(self.view.counts, np.ones_like(drowned))
        if self.model == "additive":
            size = float(counts.sum())
            return Additive(math.sqrt(max(noise, 0.0) * size * inverse_batch), nodes, counts, size)
        per_sample = self._ratio(noise) * inverse_batch
        return Multiplicative(
            nodes.clip(0.0), counts, 1.0 / per_sample if per_sample > 0 else math.inf
        )

    def _ratio(self, noise: float) -> float:
        """c = P²σ²/((tr G)² + tr G²): 1 for Gaussian samples of rank one, whose noise it is."""
        nodes = np.append(self.view.nodes, self.view.eigenvalues).clip(0.0)
        counts = np.append(self.view.counts, np.ones_like(self.view.eigenvalues))
        gaussian = float(nodes @ counts) ** 2 + float(nodes**2 @ counts)
        return max(noise, 0.0) * self.view.dimension**2 / gaussian if gaussian > 0 else 0.0

    def _extremes(
        self, model: SpikedModel, positions: Array, spreads: Array, apart: Mask
    ) -> tuple[Array, Array]:
        """(smallest, largest) and their spreads: an outlier, or the edge with Tracy–Widom
        fluctuations.
        """
        law = TracyWidom()
        values, widths = np.zeros(2), np.zeros(2)
        for side, sign in ((0, -1.0), (1, 1.0)):
            scale = model.edge_scales[side]
            values[side], widths[side] = (
                model.edges[side] + sign * law.mean * scale,
                law.std * scale,
            )
            beyond = apart & (sign * positions > sign * model.edges[side])
            if beyond.any():
                chosen = int(np.argmax(np.where(beyond, sign * positions, -math.inf)))
                values[side], widths[side] = positions[chosen], spreads[chosen]
        if isinstance(model, Multiplicative) and (
            model.nodes[0] == 0 or model.samples < self.view.dimension
        ):
            values[0], widths[0] = 0.0, 0.0  # fewer samples than dimensions leave a null space
        return values, widths

    def _onsets(self, spikes: Array, noise: float) -> Array:
        top = spikes.max(initial=-math.inf)
        if not top > max(float(self.view.nodes.max()), 0.0):
            return np.full(2, math.nan)
        single = self._at(np.zeros(0), noise, 1.0)
        return np.array([float(single.closeness(top)), float(single.relative_shift(top))])


class DirectionalNoise(NoiseModel):
    """Noise measured along k eigenvectors (``directions``).

    Among themselves they mix (``mixing``), by batches drawn of the samples' own matrices. Noise to
    all other directions, as if these were at 0, adds r_m/(bλ_m) by second-order perturbation
    theory; where r_m/b exceeds λ_m² it ends in 2√(r_m/b), as for isotropic noise. The inputs are
    offsets of all λ, of all r and of the mixed positions in units of their errors, a factor on the
    noise among the k, and the bulk's variance.
    """

    def __init__(self, variance: DirectionalVariance, batch_size: int) -> None:
        self.dimension, self.count, self.psd = (
            variance.dimension,
            len(variance),
            variance.operator == "ggn",
        )
        self.eigenvalues, self.eigenvalue_errors = (
            _flat(variance.eigenvalues.value),
            _flat(variance.eigenvalues.stderr),
        )
        self.rest, self.rest_errors = _flat(variance.rest.value), _flat(variance.rest.stderr)
        self.couplings = _flat(variance.couplings.value).reshape(self.count, self.count)
        self.noise = sampled_noise(variance.elements.double().cpu().numpy(), self.count, batch_size)
        total = self.couplings.sum()
        doubt = float(_flat(variance.couplings.stderr).sum() / total) if total > 0 else 0.0
        self.inputs = np.array([0.0, 0.0, 0.0, 1.0, float(variance.bulk)])
        offsets = (float(self.eigenvalue_errors.any()), float(self.rest_errors.any()), 1.0)
        self.errors = np.array([*offsets, doubt, float(variance.bulk.stderr)])
        self._found: dict[tuple[float, ...], Mixed] = {}

    def read(self, inputs: Array, inverse_batch: float) -> Reading:
        """Everything, at given inputs."""
        levels = self.eigenvalues + inputs[0] * self.eigenvalue_errors
        rest = (self.rest + inputs[1] * self.rest_errors).clip(0.0)
        radius = 2.0 * math.sqrt(
            (self.dimension - self.count) * max(inputs[4], 0.0) * inverse_batch
        )
        edges = np.array([0.0 if self.psd else -radius, radius])
        scale = math.sqrt(max(inputs[3], 0.0) * inverse_batch)
        key = float(inputs[0]), scale  # the other inputs do not change how the levels mix
        if key not in self._found:
            self._found[key] = mix(levels, scale * self.noise)
        mixed = self._found[key]
        outward, kept = _to_the_rest(np.abs(levels), rest * inverse_batch)
        positions = (
            mixed.positions + inputs[2] * mixed.errors + np.where(levels < 0, -outward, outward)
        )
        apart = (kept > 0) & ((positions > edges[1]) | (positions < edges[0]))
        overlaps = np.where(apart, kept * mixed.overlaps, 0.0)
        extremes, widths = self._extremes(levels, positions, mixed.spreads, edges)
        onsets = self._onsets(levels, rest, inputs[3] * self.couplings)
        return Reading(positions, overlaps, mixed.spreads, edges, extremes, widths, onsets)

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


def noise_model(
    spectrum: Spectrum | Eigenpairs,
    variance: Estimate | DirectionalVariance,
    model: str,
    batch_size: int,
) -> NoiseModel:
    """The model by its name: "additive", "multiplicative" or "directional"."""
    directional = isinstance(variance, DirectionalVariance)
    require(
        directional == (model == "directional"),
        "variance",
        f"be {'directional_variance(…)' if model == 'directional' else 'a number or an Estimate'}"
        f" for {model!r}",
        type(variance).__name__,
        'model="directional" and directional_variance go together',
        TypeError,
    )
    if isinstance(variance, DirectionalVariance):
        return DirectionalNoise(variance, batch_size)
    if model == "multiplicative":
        require(
            isinstance(spectrum, Spectrum),
            "spectrum",
            "be a Spectrum for multiplicative noise",
            spectrum,
            "its noise is made of all the eigenvalues: take lh.spectrum(lh.ggn(problem))",
            TypeError,
        )
    return RandomMatrixNoise(view_of(spectrum), variance, model)


def _to_the_rest(sizes: Array, noise: Array) -> tuple[Array, Array]:
    """How far |λ| moves outward by noise to directions at 0, and what is left of the overlap."""
    clear = noise < sizes**2
    safe = np.where(clear, sizes, 1.0)
    outward = np.where(clear, noise / safe, 2.0 * np.sqrt(noise) - sizes)
    return outward, np.where(clear, 1.0 - noise / safe**2, 0.0)


def _flat(values: float | torch.Tensor) -> Array:
    return torch.as_tensor(values, dtype=torch.float64).flatten().cpu().numpy()
