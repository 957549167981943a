"""Parameters of random graph models, and which model is nearest, by the divergence between entropic spectra."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.optimize import minimize_scalar

from lambdahat._check import require, require_count
from lambdahat._progress import report
from lambdahat._rng import derived_seed
from lambdahat.graphs.block_moments import BOUNDS, components
from lambdahat.graphs.random_models import MODELS, PARAMETERS, Model
from lambdahat.graphs.spectra import graph_moments, require_graph
from lambdahat.graphs.structure import Graph
from lambdahat.maxent import MaxentDensity, fit
from lambdahat.results import Array, Estimate
from lambdahat.storage import Result

TOLERANCE = 0.05  # over n: one graph's moments are about 1/n from the mean of its model
SCAN = 12  # parameters tried over the whole range before the search
AROUND = 4  # parameters on either side for the bootstrap
MODEL_SIZE = 1000


@dataclass(frozen=True)
class ModelFit(Estimate):
    """The parameter (``value``, ``stderr``) of a random graph model nearest to a graph, and the ``divergence`` left.

    ``model`` and ``parameter`` name them, ``size`` is the model's number of nodes, ``neighbours`` the k of
    Watts–Strogatz. ``typical`` is the mean divergence of graphs drawn from the model itself: a ``divergence`` far above
    says that the model did not make the graph. ``cost`` counts the graphs drawn.
    """

    model: str = ""
    parameter: str = ""
    divergence: float = math.nan
    typical: float = math.nan
    size: int = 0
    neighbours: int = 0


@dataclass(frozen=True)
class ModelChoice(Result):
    """How near each model comes to a graph: ``fits``, the nearest first."""

    fits: tuple[ModelFit, ...]
    name: str = "graph"

    @property
    def best(self) -> str:
        """The nearest model's name."""
        return self.fits[0].model


def fit_model(
    graph: Graph,
    model: str,
    moments: int = 20,
    draws: int = 10,
    size: int | None = None,
    neighbours: int | None = None,
    seed: int = 0,
) -> ModelFit:
    """The parameter of "erdos_renyi", "watts_strogatz" or "barabasi_albert" whose spectrum is nearest to the graph's.

    The spectrum of a model is the density of maximum entropy with its moments averaged over ``draws`` graphs of
    ``size`` nodes (the graph's own, at most 1,000); §3.6.1 of the spectral thesis compares with one draw, on a grid
    of 0.001. Every parameter is tried with the same random numbers, so that the divergence is nearly smooth in it: a
    scan of the range, then Brent's method, or for the whole numbers of Barabási–Albert their neighbours. ``neighbours``
    is by default the mean degree, rounded to an even number.

    ``stderr`` is the spread of the same fit over fresh graphs of the model found, a parametric bootstrap.
    """
    require_graph(graph)
    require_count(draws, "draws", least=2)
    return _fit(_moments(graph, moments, seed), _model(graph, model, size, neighbours), graph, draws, seed)


def which_model(graph: Graph, moments: int = 30, draws: int = 5, size: int | None = None, seed: int = 0) -> ModelChoice:
    """Every model's nearest parameter and divergence: which random model a graph looks like (§3.6.2)."""
    require_graph(graph)
    require_count(draws, "draws", least=2)
    target = _moments(graph, moments, seed)
    fits = [_fit(target, _model(graph, kind, size, None), graph, draws, seed) for kind in MODELS]
    return ModelChoice(tuple(sorted(fits, key=lambda one: one.divergence)), graph.name)


def _model(graph: Graph, kind: str, size: int | None, neighbours: int | None) -> Model:
    nodes = min(len(graph), MODEL_SIZE) if size is None else require_count(size, "size", 4)
    degree = 2 * graph.num_edges / len(graph)
    require(kind != "watts_strogatz" or degree >= 1, "the graph", "have a mean degree of at least 1", f"{degree:.3g}")
    near = max(2, 2 * round(degree / 2)) if neighbours is None else neighbours
    return Model(kind, nodes, min(near, nodes - 1) if kind == "watts_strogatz" else 0)


def _moments(graph: Graph, count: int, seed: int) -> tuple[Array, Array]:
    """The Chebyshev moments without the one eigenvalue 0 that every graph has, which tells of its size, and errors."""
    found = graph_moments(graph, count, None, seed, components(graph))
    ends = np.where(np.arange(count + 1) % 2, -1.0, 1.0)
    return (len(graph) * found.values - ends) / (len(graph) - 1), found.stderr


def _density(moments: Array, nodes: int, stderr: Array | None = None) -> MaxentDensity:
    return fit(moments, bounds=BOUNDS, stderr=stderr, tol=TOLERANCE / nodes)


def _fit(moments: tuple[Array, Array], model: Model, graph: Graph, draws: int, seed: int) -> ModelFit:
    values, stderr = moments
    family = _Family(model, len(values) - 1, draws, seed)
    target = _density(values, model.size, stderr)

    @cache
    def divergence(parameter: float) -> float:
        report(f"fit of {model.kind}", divergence.cache_info().misses)
        return target.symmetric_kl(family.density(parameter))

    low, high = model.range(2 * graph.num_edges / len(graph))
    best = (_search_whole if model.whole else _search)(divergence, low, high)
    error, typical = family.spread(best, low, high)
    return ModelFit(
        best, error, family.drawn, model=model.kind, parameter=PARAMETERS[model.kind], divergence=divergence(best),
        typical=typical, size=model.size, neighbours=model.neighbours, dof=draws - 1.0,
    )  # fmt: skip


class _Family:
    """The moments of a model's graphs by parameter."""

    def __init__(self, model: Model, count: int, draws: int, seed: int) -> None:
        self.model, self.count, self.draws, self.seed = model, count, draws, seed
        self.drawn = 0

    def readings(self, parameter: float, purpose: str = "draw") -> Array:
        """The moments of every draw, (draws, count + 1)."""
        self.drawn += self.draws
        seeds = [derived_seed(self.seed, purpose, number) for number in range(self.draws)]
        return np.array([_moments(self.model.draw(parameter, one), self.count, self.seed)[0] for one in seeds])

    def density(self, parameter: float) -> MaxentDensity:
        """The density of maximum entropy with the moments averaged over the draws."""
        return _density(self.readings(parameter).mean(axis=0), self.model.size)

    def spread(self, parameter: float, low: float, high: float) -> tuple[float, float]:
        """The standard deviation of the parameter fitted to fresh graphs of the model, and the mean divergence left.

        A parametric bootstrap: every fresh graph is compared with a few parameters around, its minimum interpolated.
        """
        width = 0.3 * min(parameter - low, high - parameter) or 0.02 * (high - low)
        around = np.arange(-AROUND, AROUND + 1)
        grid = np.unique(np.clip(parameter + (around if self.model.whole else around * width / AROUND), low, high))
        known = [self.density(float(place)) for place in grid]
        fresh = [_density(row, self.model.size) for row in self.readings(parameter, "bootstrap")]
        tables = np.array([[one.symmetric_kl(other) for other in known] for one in fresh])
        found = [_interpolated(grid, table) for table in tables]
        return float(np.std(found, ddof=1)), float(tables.min(axis=1).mean())


def _search(divergence: Callable[[float], float], low: float, high: float) -> float:
    """The minimum over an interval: the best of a scan, then Brent's method between its neighbours."""
    far = low > 0 and high / low > 20
    grid = np.geomspace(low, high, SCAN) if far else np.linspace(low, high, SCAN)
    best = int(np.argmin([divergence(float(p)) for p in grid]))
    ends = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, SCAN - 1)])
    found = minimize_scalar(divergence, bounds=ends, method="bounded", options={"xatol": 1e-3 * (ends[1] - ends[0])})
    return float(found.x) if found.fun <= divergence(float(grid[best])) else float(grid[best])


def _search_whole(divergence: Callable[[float], float], low: float, high: float) -> float:
    """The minimum over whole numbers: a scan, then ever nearer neighbours of the best."""
    step = max(1, math.ceil((high - low) / SCAN))
    best = min(np.arange(low, high + 1, step), key=lambda r: divergence(float(r)))
    while step > 1:
        step = math.ceil(step / 2) if step > 2 else 1
        near = [float(r) for r in (best - step, best, best + step) if low <= r <= high]
        best = min(near, key=divergence)
    while (nearest := min((r for r in (best - 1, best, best + 1) if low <= r <= high), key=divergence)) != best:
        best = nearest
    return float(best)


def _interpolated(grid: Array, table: Array) -> float:
    """Where the parabola through the least of ``table`` and its neighbours has its minimum."""
    best = int(np.argmin(table))
    if not 0 < best < len(grid) - 1:
        return float(grid[best])
    bend, slope, _ = np.polyfit(grid[best - 1 : best + 2] - grid[best], table[best - 1 : best + 2], 2)
    return float(grid[best] - slope / (2 * bend))
