"""An example of every kind of result, and the numbers that its figures must show."""

from __future__ import annotations

import collections.abc
import dataclasses
import importlib
import pkgutil
import re
import typing
from functools import cache
from typing import Any

import networkx as nx
import numpy as np
import torch

import lambdahat
from lambdahat._core.rng import generator
from lambdahat.graphs import clusters, graph, similarity, spectrum, which_model
from lambdahat.problem import Problem
from lambdahat.randommatrix import BatchComparison, BatchEigenvalues, advise, fit_bulk, predict
from lambdahat.results import Eigenpairs, Estimate, Result, Status
from lambdahat.results.measurement import Comparison, Measurement
from tests.bench.test_records import joined, record
from tests.graphs.made import cliques
from tests.report.test_chains import a_coefficient, some_chains
from tests.report.test_coefficients import (
    a_curve,
    a_free_energy,
    a_regression,
    a_scaling,
    a_sweep,
    a_trajectory,
    a_verification,
)
from tests.report.test_figures import RESULTS
from tests.report.test_training import run as a_run


def _graphs():
    return [graph(nx.gnp_random_graph(40, p, seed=0), name=f"p = {p}") for p in (0.1, 0.12, 0.4)]


def _advice(optimizer="momentum"):
    rows = torch.randn(40, 3, generator=generator(0, "rows"), dtype=torch.float64)
    start = {"theta": torch.ones(3, dtype=torch.float64)}
    return advise(
        Problem.from_function(lambda p, x: (x @ p["theta"]).square().mean(), start, rows),
        optimizer,
        4,
        16,
    )


def _predicted(size):
    values = torch.tensor([3.0, -2.0], dtype=torch.float64)
    vectors = torch.eye(100, 2, dtype=torch.float64)
    return predict(
        Eigenpairs(values, vectors, torch.zeros(2), torch.tensor([True, True])), 1e-3, size, 200
    )


def a_bulk_with_outliers():
    """The spectrum of a symmetric matrix of order 300 with the eigenvalues 5 and -4 added."""
    noise = torch.randn(300, 300, generator=generator(0, "bulk"), dtype=torch.float64)
    matrix = (noise + noise.T) / 600**0.5
    matrix[0, 0] += 5.0
    matrix[1, 1] -= 4.0
    return lambdahat.spectrum(matrix, depth=50, seed=0)


def _batches(size, largest):
    largest = np.array(largest, dtype=np.float64)[:, None]
    return BatchEigenvalues(size, 200, 100, "hessian", largest, -2 * largest)


def _bench():
    tasks = (
        record(limit=1.1, broken=float("nan")),
        record(work="trace", ours=3.0, peer=9.0, quick=1.5),
    )
    return joined(*tasks, record(work="eigenpairs", ours=30.0, peer=100.0))


# the example, and the numbers that both its figures must hold
KINDS: dict[str, tuple[Any, Any]] = {
    "spectrum": (lambda: RESULTS["spectrum"], lambda r: [*r.nodes[0], *r.weights[0]]),
    "probes": (
        lambda: RESULTS["probes"],
        lambda r: [r.nodes[0, 0], r.nodes[2, 2], r.weights[0, 3]],
    ),
    "density": (lambda: RESULTS["density"], lambda r: r.values[150:250]),
    "maxent": (
        lambda: RESULTS["spectrum"].density(smoothing="maxent", moments=4),
        lambda r: [r.values.max()],
    ),
    "eigenpairs": (lambda: RESULTS["eigenpairs"], lambda r: r.values.tolist()),
    "line": (lambda: RESULTS["line"], lambda r: [*r.loss, *r.held_out, r.curvature[0]]),
    "plane": (lambda: RESULTS["plane"], lambda r: [r.loss.min(), r.loss.max()]),
    "moments": (lambda: RESULTS["moments"], lambda r: r.values),
    "elements": (lambda: RESULTS["elements"], lambda r: np.histogram(r.value.numpy(), 60)[0]),
    "scalar": (lambda: RESULTS["scalar"], lambda r: [103.2]),
    "exact": (lambda: RESULTS["exact"], lambda r: [103.2]),
    "chains": (some_chains, lambda r: [r.energies.mean(), *r.energies[:, 7], *r.distances[:, 9]]),
    "HMC": (
        lambda: some_chains(kernel="HMC"),
        lambda r: [r.energies.mean(), r.acceptances[1, :8].mean()],
    ),
    "coefficient": (
        a_coefficient,
        lambda r: [r.value, r.chains.energies[1].mean(), *r.chains.distances[2, 5:8]],
    ),
    "without chains": (lambda: dataclasses.replace(a_coefficient(), chains=None), lambda r: [1.9]),
    "lost chains": (lambda: some_chains(lost=(0, 1, 2)), lambda r: r.energies[:, 4]),
    "a lost chain": (
        lambda: some_chains(lost=(1,)),
        lambda r: [r.energies[[0, 2]].mean(), r.energies[1, 60]],
    ),
    "many chains": (
        lambda: some_chains(12, thin=5),
        lambda r: [r.energies.mean(), *r.energies[:, 3]],
    ),
    "comparison": (
        lambda: Comparison(
            {
                "trace": {
                    "SGD": (Estimate(4.1, 0.1),),
                    "NGD": (Estimate(6.5, 0.2, 0, Status.NOT_MIXED),),
                }
            }
        ),
        lambda r: [4.1, 6.5],
    ),
    "curve": (a_curve, lambda r: [*r.grid, *r.values, r.default]),
    "curve over nβ": (lambda: a_curve("nbeta"), lambda r: [*r.grid, *r.values, r.default]),
    "sweep": (
        a_sweep,
        lambda r: [*r.step_sizes, *r.values[0], *r.values[1, :2], *r.acceptance[0], *r.chosen[:1]],
    ),
    "volumes": (a_scaling, lambda r: [*r.levels, *r.volumes]),
    "temperatures": (a_regression, lambda r: [*(1 / r.betas), *(r.losses - 700.0)]),
    "trajectory": (a_trajectory, lambda r: [*r.labels, *r.values]),
    "free energy": (a_free_energy, lambda r: [*r.nbetas, *r.energies, 210.0]),
    "verification": (a_verification, lambda r: [100 * row.relative_error for row in r.rows]),
    "run": (
        a_run,
        lambda r: [row[key] for row in r.history for key in ("loss", "accuracy", "norm", "trace")],
    ),
    "graph": (
        lambda: spectrum(_graphs()[0], 20),
        lambda r: [r.density.evaluate(np.array([1.0]))[0]],
    ),
    "clusters": (lambda: clusters(cliques([8, 8, 8]), 40), lambda r: [r.cut, float(r)]),
    "similarity": (lambda: similarity(_graphs(), 10), lambda r: r.divergences.ravel()),
    "choice": (
        lambda: which_model(_graphs()[0], moments=6, draws=2),
        lambda r: [one.divergence for one in r.fits],
    ),
    "advice": (
        _advice,
        lambda r: [*(float(view.measured) for view in r.levels.views), float(r.levels.largest)],
    ),
    "advice on damping": (
        lambda: _advice("adam"),
        lambda r: [float(r["least epsilon", size]) for size in (4, 16)],
    ),
    "batch prediction": (
        lambda: _predicted(10),
        lambda r: [
            part
            for one in r.outliers
            for part in (float(one.batch), float(one.overlap), float(one.full))
        ],
    ),
    "bulk": (lambda: fit_bulk(a_bulk_with_outliers()), lambda r: r.candidates),
    "batch eigenvalues": (
        lambda: _batches(10, [3.0, 4.0, 3.5]),
        lambda r: [*r.largest[:, 0], *r.smallest[:, 0]],
    ),
    "batch comparison": (
        lambda: BatchComparison(
            (_predicted(10), _predicted(40)),
            (_batches(10, [3.0, 3.1, 9.0]), _batches(40, [3.0, 3.2, 3.3])),
        ),
        lambda r: [
            *(float(one.largest) for one in r.predictions),
            *r.measured[0].largest[:, 0],
            3.2,
            3.3,
        ],
    ),
    "bench": (_bench, lambda r: [2.0, 4.0, 1.1, 3.0, 9.0, 1.5, 30.0, 100.0]),
    "measurement": (
        lambda: Measurement(
            {
                "trace": Estimate(103.2, 1.3),
                "parts": {"a": Estimate(2.5)},
                "eigenpairs": RESULTS["eigenpairs"],
            },
            {"parameters": 100, "samples": 7, "loss": "cross_entropy"},
        ),
        lambda r: [103.2, 2.5, 3.0, 2.0, -1.0],
    ),
    "mapping": (
        lambda: {"layer 1": RESULTS["eigenpairs"], "layer 2": Estimate(1.25, 0.1)},
        lambda r: [3.0, 2.0, -1.0, 1.25],
    ),
}


@cache
def made(name):
    """The example of a kind, made once; of a result class of the library its sample."""
    return KINDS[name][0]() if name in KINDS else sample(kinds_of_library()[name], [100.5])


def numbers_of(name):
    """The numbers that the figures of an example must show."""
    return (
        [float(value) for value in KINDS[name][1](made(name))]
        if name in KINDS
        else list(_numbers(made(name)))
    )


@cache
def kinds_of_library():
    """Every result class of the library by name."""
    for module in pkgutil.walk_packages(lambdahat.__path__, "lambdahat."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found, todo = {}, [Result]
    while todo:
        kinds = [
            kind for kind in todo.pop().__subclasses__() if kind.__module__.startswith("lambdahat.")
        ]
        found |= {kind.__name__: kind for kind in kinds}
        todo += kinds
    return found


def sample(kind, counter):
    """A result whose fields are made up from their annotations, every number another."""
    hints = typing.get_type_hints(kind)
    values = {field.name: _value(hints[field.name], counter) for field in dataclasses.fields(kind)}
    return kind(**values | ({"stderr": 0.25} if issubclass(kind, Estimate) else {}))


def _value(hint, counter):
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    counter[0] += 1.5
    number = counter[0]
    plain = {
        Estimate: lambda: Estimate(number, 0.25, 3),
        bool: lambda: True,
        int: lambda: int(number),
        float: lambda: number,
        str: lambda: f"text {number}",
        torch.Tensor: lambda: torch.tensor([number, number + 0.25]),
        Status: lambda: Status.CONVERGED,
    }
    if hint in plain:
        return plain[hint]()
    if isinstance(hint, type) and issubclass(hint, Result):
        return next((made(name) for name in KINDS if type(made(name)) is hint), None) or sample(
            hint, counter
        )
    if origin is np.ndarray:
        return np.array([number, number + 0.25])
    if origin is tuple:
        return tuple(_value(part, counter) for part in parts if part is not Ellipsis)
    if origin in (dict, collections.abc.Mapping):
        return {"key": _value(parts[1], counter)}
    return _value(parts[0], counter) if parts else "anything"  # of a union its first part


def _numbers(result):
    """The numbers that a sample holds; of a part with a figure of its own the first."""
    kinds = {type(made(name)): numbers for name, (_, numbers) in reversed(KINDS.items())}
    if isinstance(result, Estimate):
        yield float(result)
        return
    parts = (
        result
        if isinstance(result, dict)
        else vars(result)
        if dataclasses.is_dataclass(result)
        else {}
    )
    for name, value in parts.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield from [] if name == "cost" else [float(value)]
        elif isinstance(value, torch.Tensor | np.ndarray):
            yield from (float(each) for each in value)
        elif isinstance(value, Estimate | dict) or type(value) not in kinds:
            yield from _numbers(dict(enumerate(value)) if isinstance(value, tuple) else value)
        else:
            yield next(iter(kinds[type(value)](value)))


def numbers_in(text):
    """The numbers that a text holds."""
    return [
        float(found.replace("−", "-"))
        for found in re.findall(r"[-−]?\d+\.?\d*(?:e[-+]?\d+)?", text)
    ]
