"""Random graphs by networkx: Erdős–Rényi, Watts–Strogatz, Barabási–Albert."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lambdahat._core.check import require, require_choice, require_count
from lambdahat._core.rng import derived_seed
from lambdahat.graphs.sources import graph
from lambdahat.graphs.structure import Graph

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
            require(
                self.neighbours % 2 == 0,
                "neighbours",
                "be even, as many on either side",
                str(self.neighbours),
            )

    @property
    def whole(self) -> bool:
        """Whether the parameter is a whole number."""
        return self.kind == "barabasi_albert"

    def range(self, mean_degree: float) -> tuple[float, float]:
        """The least and the largest parameter worth a look for a graph of this mean degree."""
        if self.kind == "watts_strogatz":
            return 0.0, 1.0
        if self.kind == "barabasi_albert":
            return 1.0, float(self.size - 1) if mean_degree > self.size / 8 else max(
                8.0, 4 * mean_degree
            )
        share = mean_degree / (self.size - 1)
        return (0.001, 0.999) if share > 0.1 else (share / 8, min(1.0, 8 * share))

    def draw(self, parameter: float, seed: int) -> Graph:
        """One graph; the same seed makes graphs of near parameters alike."""
        import networkx as nx

        number = derived_seed(seed, self.kind) % 2**32
        if self.kind == "watts_strogatz":
            made = nx.watts_strogatz_graph(
                self.size, self.neighbours, float(np.clip(parameter, 0, 1)), seed=number
            )
        elif self.kind == "barabasi_albert":
            made = nx.barabasi_albert_graph(self.size, round(parameter), seed=number)
        else:
            make = nx.fast_gnp_random_graph if parameter < SPARSE else nx.gnp_random_graph
            made = make(self.size, parameter, seed=number)
        return graph(made, name=f"{self.kind}({self.size}, {parameter:.4g})")
