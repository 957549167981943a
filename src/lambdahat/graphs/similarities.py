"""Similarity of graphs: the symmetric KL divergence between their entropic spectra."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform

from lambdahat._core.check import require
from lambdahat._core.progress import report
from lambdahat._core.storage import Result, Status
from lambdahat.graphs.spectra import TOLERANCE, GraphSpectrum, spectrum
from lambdahat.graphs.structure import Graph
from lambdahat.maxent import MaxentDensity, fit
from lambdahat.maxent.bases import polynomials, product, solve_triangle, to_unit, triangle
from lambdahat.maxent.maxent_fit import SHARE
from lambdahat.results import Array

SMALLEST = 1e-14  # keeps the covariance of a density of atoms from being singular


@dataclass(frozen=True)
class Similarity(Result):
    """``divergences`` (k, k) between k graphs by ``names``, with their standard errors.

    ``floors`` (k, k) is the mean divergence of two measurements of one spectrum with the errors of
    the two graphs' moments: divergences are never negative, so noise only adds. One that is not
    above its floor shows no difference.
    """

    names: tuple[str, ...]
    divergences: Array
    stderr: Array
    spectra: tuple[GraphSpectrum, ...]
    floors: Array = field(default_factory=lambda: np.zeros((0, 0)))

    @property
    def status(self) -> Status:
        """The status of the first spectrum that did not converge."""
        return Status.joint(one.status for one in self.spectra)

    def tree(self) -> Array:
        """Average-linkage clustering of the graphs, as ``scipy.cluster.hierarchy`` has it."""
        return np.asarray(linkage(squareform(self.divergences, checks=False), "average"))

    def order(self) -> list[int]:
        """An order that puts similar graphs next to each other."""
        return [int(i) for i in leaves_list(self.tree())]

    def apart(self, group: Sequence[str]) -> bool:
        """Whether every graph of ``group`` is nearer to the group than to any other graph."""
        unknown = [name for name in group if name not in self.names]
        fine = not unknown and len(group) > 1
        require(fine, "group", f"hold at least two of {', '.join(self.names)}", repr(group))
        inside = np.array([name in group for name in self.names])
        within = np.where(inside[:, None] & inside, self.divergences, 0.0).max(axis=1)
        outside = np.where(inside, np.inf, self.divergences).min(axis=1)
        return bool((within < outside)[inside].all())


def similarity(
    graphs: Sequence[Graph | GraphSpectrum],
    moments: int = 100,
    probes: int | None = None,
    seed: int = 0,
    tol: float = TOLERANCE,
) -> Similarity:
    """Compare the spectra of each pair of graphs by their symmetric KL divergence.

    It is ½(KL(p‖q) + KL(q‖p)), Eq. 3.12 of the spectral thesis.

    ``spectrum`` makes the spectra of graphs, with the same settings for all. How high the peaks of
    a density are depends on where its solver stopped, so all are then fitted with one penalty: the
    largest with which all match their moments to ``tol``, or a larger one if the solver needs it.
    """
    require(len(graphs) >= 2, "graphs", "hold at least two", f"{len(graphs)}")
    spectra: list[GraphSpectrum] = []
    for number, one in enumerate(graphs, start=1):
        if isinstance(one, Graph):
            one = spectrum(one, moments, probes, seed, tol)
        spectra.append(one)
        report("graphs", number, len(graphs))
    spectra = _with_one_penalty(spectra, tol)
    responses = [Response.of(one) for one in spectra]
    size = len(spectra)
    divergences, stderr, floors = (np.zeros((size, size)) for _ in range(3))
    for i in range(size):
        for j in range(i):
            p, q = spectra[i].density, spectra[j].density
            divergences[i, j] = divergences[j, i] = p.symmetric_kl(q)
            floor, spread = _noise(responses[i], responses[j])
            first = responses[i].error(q), responses[j].error(p)
            stderr[i, j] = stderr[j, i] = math.hypot(*first, spread)
            floors[i, j] = floors[j, i] = floor
    names = [one.name for one in spectra]
    distinct = tuple(
        name if names.count(name) == 1 else f"{name} {names[: i + 1].count(name)}"
        for i, name in enumerate(names)
    )
    return Similarity(distinct, divergences, stderr, tuple(spectra), floors)


def _with_one_penalty(spectra: list[GraphSpectrum], tol: float) -> list[GraphSpectrum]:
    """The spectra fitted with one penalty, the least that any of them needs."""
    needed = []
    for one in spectra:
        allowed = np.maximum(tol, SHARE * one.density.errors[1:])
        # without one, the v whose mismatch v|α_k| is the tolerance of ``fit``
        own = allowed / np.maximum(1.0, np.abs(one.density.coefficients[1:]))
        needed.append(one.density.penalty or float(own.min()))
    penalty = min(needed)
    while True:
        fitted = [
            replace(one, density=fit(one.moments, tol=tol, penalty=penalty)) for one in spectra
        ]
        reached = max(one.density.penalty for one in fitted)
        if reached <= penalty:
            return fitted
        penalty = reached


@dataclass(frozen=True)
class Response:
    """How a density p of maximum entropy answers to its moments μ.

    With C = Cov_p(T) and the penalty v, dα = −(C + vI)⁻¹dμ, and its own moments move by
    C(C + vI)⁻¹dμ. ``inverse`` is (C + vI)⁻¹ (m, m), ``kept`` is C(C + vI)⁻¹, ``noise`` the
    covariance of μ.
    """

    density: MaxentDensity
    inverse: Array
    kept: Array
    noise: Array

    @classmethod
    def of(cls, spectrum: GraphSpectrum) -> Response:
        """By QR, so that C is not formed."""
        density = spectrum.density
        count, penalty = len(density.coefficients) - 1, density.penalty + SMALLEST
        features = polynomials("chebyshev", to_unit(density.grid, density.bounds), count)[:, 1:]
        mass = density.weights * density.values
        rows = np.sqrt(mass)[:, None] * (features - product(mass, features))
        factor = triangle(np.vstack([rows, math.sqrt(penalty) * np.eye(count)]))
        half = solve_triangle(factor, np.eye(count))
        inverse, noise = product(half, half.T), spectrum.moments.covariance[1:, 1:]
        return cls(density, inverse, np.eye(count) - penalty * inverse, noise)

    def error(self, other: MaxentDensity) -> float:
        """The standard error of D = ½(α − β)·(μ_q − μ_p) over the moments of p, to first order.

        dD = −½((C + vI)⁻¹(μ_q − μ_p) + C(C + vI)⁻¹(α − β))·dμ.
        """
        mine, count = self.density, len(self.noise)
        apart = mine.coefficients[1:] - np.pad(other.coefficients, (0, count))[1 : count + 1]
        between = (other.moments(count, "chebyshev") - mine.matched)[1:]
        slope = -0.5 * (self.inverse @ between + self.kept @ apart)
        return math.sqrt(max(float(slope @ self.noise @ slope), 0.0))


def _noise(first: Response, second: Response) -> tuple[float, float]:
    """Mean and standard deviation of D between two measurements of one spectrum.

    D is ½ΔᵀMΔ with Δ of covariance Σ, M = (C + vI)⁻¹C(C + vI)⁻¹: mean ½tr MΣ, variance ½tr (MΣ)².
    """
    if len(first.noise) != len(second.noise):
        return 0.0, 0.0
    parts = [product(product(one.inverse, one.kept), one.noise) for one in (first, second)]
    together = parts[0] + parts[1]
    variance = max(0.0, float((together * together.T).sum()) / 2)
    return float(np.trace(together)) / 2, math.sqrt(variance)
