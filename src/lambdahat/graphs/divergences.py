"""How alike graphs are: the symmetric Kullback–Leibler divergence between their entropic spectra."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.linalg import qr, solve_triangular
from scipy.spatial.distance import squareform

from lambdahat._check import require
from lambdahat._progress import report
from lambdahat.graphs.spectra import TOLERANCE, GraphSpectrum, spectrum
from lambdahat.graphs.structure import Graph
from lambdahat.maxent import MaxentDensity
from lambdahat.results import Array
from lambdahat.storage import Result, Status


@dataclass(frozen=True)
class Similarity(Result):
    """``divergences`` (k, k), symmetric, between k graphs by ``names``, with their standard errors over the probes."""

    names: tuple[str, ...]
    divergences: Array
    stderr: Array
    spectra: tuple[GraphSpectrum, ...]

    @property
    def status(self) -> Status:
        """That of the first spectrum that did not converge."""
        return next((one.status for one in self.spectra if not one.status.ok), Status.CONVERGED)

    def tree(self) -> Array:
        """The graphs joined two by two, nearest first (average linkage), as ``scipy.cluster.hierarchy`` has it."""
        return np.asarray(linkage(squareform(self.divergences, checks=False), "average"))

    def order(self) -> list[int]:
        """An order in which like graphs stand together."""
        return [int(i) for i in leaves_list(self.tree())]

    def apart(self, group: Sequence[str]) -> bool:
        """Whether every graph of ``group`` is nearer to all others of it than to any graph outside."""
        unknown = [name for name in group if name not in self.names]
        require(not unknown and len(group) > 1, "group", f"hold at least two of {', '.join(self.names)}", repr(group))
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
    """½(KL(p‖q) + KL(q‖p)) between the spectra of every two graphs, in closed form (Eq. 3.12, spectral thesis).

    Spectra are taken as they are; those of graphs are made by ``spectrum`` with the same settings for all.
    """
    require(len(graphs) >= 2, "graphs", "hold at least two", f"{len(graphs)}")
    found: list[GraphSpectrum] = []
    for number, one in enumerate(graphs, start=1):
        found.append(one if isinstance(one, GraphSpectrum) else spectrum(one, moments, probes, seed, tol))
        report("graphs", number, len(graphs))
    size = len(found)
    divergences, stderr = np.zeros((size, size)), np.zeros((size, size))
    for i in range(size):
        for j in range(i):
            divergences[i, j] = divergences[j, i] = found[i].density.symmetric_kl(found[j].density)
            stderr[i, j] = stderr[j, i] = divergence_error(found[i], found[j])
    names = _distinct([one.name for one in found])
    return Similarity(names, divergences, stderr, tuple(found))


def divergence_error(first: GraphSpectrum, second: GraphSpectrum) -> float:
    """The standard error of the divergence from that of both graphs' moments, to first order."""
    return float(np.hypot(_one_sided(first, second), _one_sided(second, first)))


def _one_sided(one: GraphSpectrum, other: GraphSpectrum) -> float:
    """D = ½(α − β)·(μ_q − μ_p) and dα = −Cov_p(T)⁻¹dμ_p give dD/dμ_p = −½(α − β) − ½Cov_p(T)⁻¹(μ_q − μ_p)."""
    if not one.moments.stderr.any():
        return 0.0
    p, q = one.density, other.density
    count = min(len(p.coefficients), len(q.coefficients)) - 1
    apart = (p.coefficients[: count + 1] - q.coefficients[: count + 1])[1:]
    slope = -0.5 * (apart + solve_covariance(p, (q.matched[: count + 1] - p.matched[: count + 1])[1:]))
    variance = float(slope @ one.moments.covariance[1 : count + 1, 1 : count + 1] @ slope)
    return math.sqrt(max(variance, 0.0))


def solve_covariance(density: MaxentDensity, right: Array) -> Array:
    """Cov(T_1 … T_m)⁻¹ ``right`` under a density of maximum entropy, by QR."""
    count = len(right)
    features = np.polynomial.chebyshev.chebvander(_unit(density), count)[:, 1:]
    mass = density.weights * density.values
    rows = np.sqrt(mass)[:, None] * (features - mass @ features)
    rows = np.vstack([rows, np.sqrt(density.penalty + 1e-14) * np.eye(count)])
    (factor,) = qr(rows, mode="r", check_finite=False)
    triangle = factor[:count]
    return np.asarray(solve_triangular(triangle, solve_triangular(triangle, right, trans="T")))


def _unit(density: MaxentDensity) -> Array:
    low, high = density.bounds
    return (2 * density.grid - low - high) / (high - low)


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """The names, with a number where two are the same."""
    return tuple(
        name if names.count(name) == 1 else f"{name} {list(names)[: i + 1].count(name)}" for i, name in enumerate(names)
    )
