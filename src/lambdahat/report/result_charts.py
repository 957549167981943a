"""Charts and tables of any result, by its type."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from lambdahat._check import describe
from lambdahat.experiments.reproduction import Table
from lambdahat.graphs import Clusters, GraphSpectrum, ModelChoice, Similarity
from lambdahat.randommatrix import Advice
from lambdahat.report.chain_charts import chain_charts, chain_tables
from lambdahat.report.coefficient_charts import (
    curve_charts,
    free_energy_charts,
    sweep_charts,
    temperature_charts,
    trajectory_charts,
    verification_charts,
    volume_charts,
)
from lambdahat.report.run_charts import (
    advice_charts,
    choice_charts,
    cluster_charts,
    graph_charts,
    run_charts,
    similarity_charts,
)
from lambdahat.report.spectral_charts import (
    density_charts,
    eigenpair_charts,
    landscape_charts,
    listed,
    moment_charts,
    spectrum_charts,
)
from lambdahat.results import Chains, Density, Eigenpairs, Estimate, Landscape, LearningCoefficient, Moments, Spectrum
from lambdahat.results.charts import Chart, Series
from lambdahat.singular.curves import CoefficientCurve, Trajectory
from lambdahat.singular.free_energies import FreeEnergy
from lambdahat.singular.sweeps import Sweep
from lambdahat.singular.temperatures import TemperatureRegression
from lambdahat.singular.verification import Verification
from lambdahat.singular.volumes import VolumeScaling
from lambdahat.training.runs import Run

BINS = 60


def charts_of(result: Any) -> list[Chart]:
    """The charts of a result; none for a number, or for a kind that is not known."""
    if isinstance(result, Mapping):
        parts = [(name, charts_of(part)) for name, part in result.items()]
        return [dataclasses.replace(one, title=f"{name}: {one.title}") for name, found in parts for one in found]
    make = next((make for kind, make in CHARTS.items() if isinstance(result, kind)), None)
    return [] if make is None else make(result)


def tables_of(result: Any) -> list[Table]:
    """The tables that go with a result's charts."""
    if isinstance(result, Chains | LearningCoefficient):
        return chain_tables(result)
    if isinstance(result, Advice | Verification | CoefficientCurve):
        return [records_table("Numbers", result.table())]
    return []


def fields_table(result: Any) -> Table:
    """The fields of a result of an unknown kind, or the items of a mapping: arrays by their shape."""
    fields: Mapping[str, Any] = {}
    if isinstance(result, Mapping):
        fields = result
    elif dataclasses.is_dataclass(result):
        fields = {one.name: getattr(result, one.name) for one in dataclasses.fields(result)}
    else:
        fields = {"value": result}
    rows = tuple((str(name), value if isinstance(value, str) else describe(value)) for name, value in fields.items())
    return Table(type(result).__name__, ("field", "value"), rows)


def records_table(title: str, records: list[dict[str, Any]]) -> Table:
    """Records as a table, numbers with six digits."""
    header = tuple(dict.fromkeys(key for record in records for key in record))
    return Table(title, header, tuple(tuple(_cell(record.get(key)) for key in header) for record in records))


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _estimate_charts(estimate: Estimate) -> list[Chart]:
    """A histogram where the estimate is of many elements; a single number is a card, not a chart."""
    if not isinstance(estimate.value, Tensor):
        return []
    values = estimate.value.detach().cpu().double().flatten().numpy()
    finite = values[np.isfinite(values)]
    counts, edges = np.histogram(finite, bins=BINS)
    series = Series("elements", listed((edges[1:] + edges[:-1]) / 2), listed(counts), style="bars")
    return [Chart(f"{values.size:,} elements", "value of the element", "elements", (series,), y_log=True)]


CHARTS: dict[type, Callable[[Any], list[Chart]]] = {
    Spectrum: spectrum_charts,
    Density: density_charts,
    Eigenpairs: eigenpair_charts,
    Moments: moment_charts,
    Landscape: landscape_charts,
    Chains: chain_charts,
    LearningCoefficient: chain_charts,
    CoefficientCurve: curve_charts,
    Sweep: sweep_charts,
    VolumeScaling: volume_charts,
    TemperatureRegression: temperature_charts,
    FreeEnergy: free_energy_charts,
    Trajectory: trajectory_charts,
    Verification: verification_charts,
    Run: run_charts,
    GraphSpectrum: graph_charts,
    Clusters: cluster_charts,
    Similarity: similarity_charts,
    Advice: advice_charts,
    ModelChoice: choice_charts,
    Estimate: _estimate_charts,
}
