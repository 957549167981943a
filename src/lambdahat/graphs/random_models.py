"""Random graph models: draw one, fit its parameter, and choose among them by entropic spectra."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.optimize import minimize_scalar

from lambdahat._core.check import describe, require, require_choice, require_count
from lambdahat._core.progress import report
from lambdahat._core.rng import derived_seed
from lambdahat._core.storage import Result
from lambdahat.graphs.read import graph
from lambdahat.graphs.spectra import BOUNDS, components, graph_moments, require_graph
from lambdahat.graphs.structure import Graph
from lambdahat.maxent import MaxentDensity, fit
from lambdahat.results import Array, Estimate

MODELS = ("erdos_renyi", "watts_strogatz", "barabasi_albert")
PARAMETERS = {"erdos_renyi": "p", "watts_strogatz": "p", "barabasi_albert": "r"}
SPARSE = 0.2  # below this share of edges networkx's fast generator is the faster


@dataclass(frozen=True)
class Model:
    """A random graph of ``size`` nodes by one parameter; ``neighbours`` is k of Watts–Strogatz.

    erdos_renyi: every edge with probability p. watts_strogatz: a ring of k neighbours (even), every
    edge rewired with probability p. barabasi_albert: every new node brings r edges.
    """

    kind: str
    size: int
    neighbours: int = 0

    def __post_init__(self) -> None:
        require_choice(self.kind, "model", MODELS)
        require_count(self.size, "size", least=4)
        if self.kind == "watts_strogatz":
            require_count(self.neighbours, "neighbours", 2, self.size - 1)
            fine = self.neighbours % 2 == 0
            require(fine, "neighbours", "be even, as many on either side", str(self.neighbours))

    @property
    def whole(self) -> bool:
        """Whether the parameter is a whole number."""
        return self.kind == "barabasi_albert"

    def range(self, mean_degree: float) -> tuple[float, float]:
        """The least and the largest parameter worth a look for a graph of this mean degree."""
        if self.kind == "watts_strogatz":
            return 0.0, 1.0
        if self.kind == "barabasi_albert":
            dense = mean_degree > self.size / 8
            return 1.0, float(self.size - 1) if dense else max(8.0, 4 * mean_degree)
        share = mean_degree / (self.size - 1)
        return (0.001, 0.999) if share > 0.1 else (share / 8, min(1.0, 8 * share))

    def draw(self, parameter: float, seed: int) -> Graph:
        """One graph; the same seed makes graphs of near parameters alike."""
        import networkx as nx

        number = derived_seed(seed, self.kind) % 2**32
        if self.kind == "watts_strogatz":
            share = float(np.clip(parameter, 0, 1))
            made = nx.watts_strogatz_graph(self.size, self.neighbours, share, seed=number)
        elif self.kind == "barabasi_albert":
            made = nx.barabasi_albert_graph(self.size, round(parameter), seed=number)
        else:
            make = nx.fast_gnp_random_graph if parameter < SPARSE else nx.gnp_random_graph
            made = make(self.size, parameter, seed=number)
        return graph(made, name=f"{self.kind}({self.size}, {parameter:.4g})")


TOLERANCE = 0.05  # over n: one graph's moments are about 1/n from the mean of its model
SCAN = 12  # parameters tried over the whole range before the search
BOOTSTRAP = 20  # fresh graphs: their spread is known to a sixth
AROUND = 4  # parameters on either side for the bootstrap
LEAST = 0.005  # of the range: the narrowest that is looked at on either side
MODEL_SIZE = 1000


@dataclass(frozen=True)
class ModelFit(Estimate):
    """The fitted parameter (``value``, ``stderr``) of a random-graph model, and its ``divergence``.

    ``model`` and ``parameter`` name them, ``size`` is the model's number of nodes, ``neighbours``
    the k of Watts–Strogatz. ``typical`` is the mean divergence of graphs drawn from the model
    itself: a ``divergence`` far above says that the model did not make the graph. ``cost`` counts
    the graphs drawn.
    """

    model: str = ""
    parameter: str = ""
    divergence: float = math.nan
    typical: float = math.nan
    size: int = 0
    neighbours: int = 0


@dataclass(frozen=True)
class ModelChoice(Result):
    """The fits of all models to a graph, the closest first: ``fits``."""

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
    """Fit the parameter of a random-graph model, the one whose spectrum is closest to the graph's.

    ``model`` is "erdos_renyi", "watts_strogatz" or "barabasi_albert". Its spectrum is the density
    of maximum entropy with moments averaged over ``draws`` graphs of ``size`` nodes (the graph's
    own, at most 1,000); §3.6.1 of the spectral thesis compares with one draw, on a grid of 0.001.
    Every parameter is tried with the same random numbers, so that the divergence is nearly smooth
    in it: a scan of the range, then Brent's method. The whole numbers of Barabási–Albert are tried
    one by one near the minimum, and the value is the minimum of the parabola through the best
    three. ``neighbours`` is the k of "watts_strogatz", by default the mean degree, rounded to an
    even number.

    ``stderr`` is the spread of the same fit over 20 fresh graphs of the fitted model, a parametric
    bootstrap.
    """
    _require(graph, moments, draws)
    chosen = _model(graph, model, size, neighbours)
    return _fit(_moments(graph, moments, seed), chosen, graph, draws, seed)


def which_model(
    graph: Graph, moments: int = 30, draws: int = 5, size: int | None = None, seed: int = 0
) -> ModelChoice:
    """Fit every random-graph model and rank them by divergence (§3.6.2)."""
    _require(graph, moments, draws)
    target = _moments(graph, moments, seed)
    fits = [_fit(target, _model(graph, kind, size, None), graph, draws, seed) for kind in MODELS]
    return ModelChoice(tuple(sorted(fits, key=lambda one: one.divergence)), graph.name)


def _require(graph: Graph, moments: int, draws: int) -> None:
    require_graph(graph)
    require_count(moments, "moments", least=2)
    require_count(draws, "draws", least=2)
    enough = len(graph) >= 4 and graph.num_edges > 0
    require(enough, "the graph", "have at least 4 nodes and an edge", repr(graph))


def _model(graph: Graph, kind: str, size: int | None, neighbours: int | None) -> Model:
    nodes = min(len(graph), MODEL_SIZE) if size is None else require_count(size, "size", 4)
    if kind != "watts_strogatz":
        fine = neighbours is None
        require(fine, "neighbours", "be None but for watts_strogatz", describe(neighbours))
        return Model(kind, nodes)
    if neighbours is None:  # the mean degree, rounded to an even number
        degree = 2 * graph.num_edges / len(graph)
        neighbours = min(max(2, 2 * round(degree / 2)), nodes - 1 - (nodes - 1) % 2)
    return Model(kind, nodes, neighbours)


def _moments(graph: Graph, count: int, seed: int) -> tuple[Array, Array]:
    """Chebyshev moments and errors without the one eigenvalue 0 that every graph has."""
    moments = graph_moments(graph, count, None, seed, components(graph))
    ends = np.where(np.arange(count + 1) % 2, -1.0, 1.0)
    return (len(graph) * moments.values - ends) / (len(graph) - 1), moments.stderr


def _fit(
    moments: tuple[Array, Array], model: Model, graph: Graph, draws: int, seed: int
) -> ModelFit:
    values, stderr = moments
    # The penalty of the graph's density, which its models' must share: it decides how high peaks
    # are. A density found without one has moments that v = tol/max|α_k| would leave as near.
    tol = TOLERANCE / model.size
    plain = fit(values, bounds=BOUNDS, stderr=stderr, tol=tol)
    penalty = plain.penalty or tol / max(1.0, float(np.abs(plain.coefficients[1:]).max()))
    family = _Family(model, len(values) - 1, draws, seed, penalty)
    target = family.fit_density(values)

    @cache
    def divergence(parameter: float) -> float:
        report(f"fit of {model.kind}", divergence.cache_info().misses)
        return target.symmetric_kl(family.density(parameter))

    low, high = model.range(2 * graph.num_edges / len(graph))
    best = (_search_whole if model.whole else _search)(divergence, low, high)
    error, typical = family.spread(best, low, high)
    value = best
    if model.whole:
        around = np.array([r for r in (best - 1, best, best + 1) if low <= r <= high])
        value = _interpolate(around, np.array([divergence(float(r)) for r in around]))
    return ModelFit(
        value,
        error,
        family.drawn,
        dof=BOOTSTRAP - 1.0,
        model=model.kind,
        parameter=PARAMETERS[model.kind],
        divergence=divergence(best),
        typical=typical,
        size=model.size,
        neighbours=model.neighbours,
    )


class _Family:
    """The densities of a model's graphs by parameter."""

    def __init__(self, model: Model, count: int, draws: int, seed: int, penalty: float) -> None:
        self.model, self.count, self.draws = model, count, draws
        self.seed, self.penalty, self.drawn = seed, penalty, 0
        self.known: dict[float, MaxentDensity] = {}

    def readings(self, parameter: float, purpose: str, graphs: int) -> Array:
        """The moments of fresh graphs, (graphs, count + 1)."""
        self.drawn += graphs
        seeds = [derived_seed(self.seed, purpose, number) for number in range(graphs)]
        made = (self.model.draw(parameter, one) for one in seeds)
        return np.array([_moments(one, self.count, self.seed)[0] for one in made])

    def density(self, parameter: float) -> MaxentDensity:
        """The density of maximum entropy with the moments averaged over the draws."""
        if parameter not in self.known:
            mean = self.readings(parameter, "draw", self.draws).mean(axis=0)
            self.known[parameter] = self.fit_density(mean)
        return self.known[parameter]

    def fit_density(self, moments: Array) -> MaxentDensity:
        """The density of maximum entropy with these moments and the penalty of all."""
        return fit(moments, bounds=BOUNDS, penalty=self.penalty)

    def spread(self, parameter: float, low: float, high: float) -> tuple[float, float]:
        """The standard deviation of the parameter over fresh graphs, and their mean divergence.

        Near an end of the range, where graphs hardly differ (no edge of a ring rewired), the spread
        of graphs a little inside counts too, if it is larger.
        """
        error, typical = self._bootstrap(parameter, low, high)
        least = LEAST * (high - low)
        near = min(parameter - low, high - parameter) < max(2 * error, 4 * least)
        if near and not self.model.whole:
            inward = 1.0 if parameter - low < high - parameter else -1.0
            inside = parameter + inward * max(error, least)
            error = max(error, self._bootstrap(inside, low, high)[0])
        return error, typical

    def _bootstrap(self, parameter: float, low: float, high: float) -> tuple[float, float]:
        """Compare every fresh graph with a few parameters around, and interpolate its minimum.

        The grid is widened until no minimum sits at its end, except at the end of the range: there
        the error is that of a uniform position in a cell of the grid. The mean of the draws that
        all are compared with adds a share of 1/draws of the variance.
        """
        fresh = [self.fit_density(row) for row in self.readings(parameter, "bootstrap", BOOTSTRAP)]
        near = 0.3 * min(parameter - low, high - parameter)
        width = 1.0 if self.model.whole else max(near, LEAST * (high - low))
        while True:
            step = width if self.model.whole else width / AROUND
            grid = np.unique(np.clip(parameter + step * np.arange(-AROUND, AROUND + 1), low, high))
            tables = np.array(
                [[one.symmetric_kl(self.density(float(place))) for place in grid] for one in fresh]
            )
            best = tables.argmin(axis=1)
            cut = ((best == 0) & (grid[0] > low)) | ((best == len(grid) - 1) & (grid[-1] < high))
            if not cut.any():
                break
            width *= 2
        minima = [_interpolate(grid, table) for table in tables]
        outer = np.where(best == 0, grid[1] - grid[0], 0.0)
        outer += np.where(best == len(grid) - 1, grid[-1] - grid[-2], 0.0)
        variance = (1 + 1 / self.draws) * float(np.var(minima, ddof=1))
        variance += float((outer**2).mean() / 12)
        return math.sqrt(variance), float(tables.min(axis=1).mean())


def _search(divergence: Callable[[float], float], low: float, high: float) -> float:
    """Minimise over an interval: a scan, then Brent's method around the best point."""
    far = low > 0 and high / low > 20
    grid = np.geomspace(low, high, SCAN) if far else np.linspace(low, high, SCAN)
    best = int(np.argmin([divergence(float(p)) for p in grid]))
    ends = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, SCAN - 1)])
    precision = {"xatol": 1e-3 * (ends[1] - ends[0])}
    inner = minimize_scalar(divergence, bounds=ends, method="bounded", options=precision)
    return float(inner.x) if inner.fun <= divergence(float(grid[best])) else float(grid[best])


def _search_whole(divergence: Callable[[float], float], low: float, high: float) -> float:
    """The minimum over whole numbers: a scan, then ever nearer neighbours of the best."""
    step = max(1, math.ceil((high - low) / SCAN))
    best = min(np.arange(low, high + 1, step), key=lambda r: divergence(float(r)))
    while step > 1:
        step = math.ceil(step / 2) if step > 2 else 1
        near = [float(r) for r in (best - step, best, best + step) if low <= r <= high]
        best = min(near, key=divergence)
    while (
        nearest := min((r for r in (best - 1, best, best + 1) if low <= r <= high), key=divergence)
    ) != best:
        best = nearest
    return float(best)


def _interpolate(grid: Array, table: Array) -> float:
    """Where the parabola through the least of ``table`` and its neighbours has its minimum."""
    best = int(np.argmin(table))
    if not 0 < best < len(grid) - 1:
        return float(grid[best])
    near = slice(best - 1, best + 2)
    bend, slope, _ = np.polyfit(grid[near] - grid[best], table[near], 2)
    return float(grid[best] - slope / (2 * bend))
