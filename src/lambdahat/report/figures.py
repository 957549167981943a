"""``plot``: a figure of any result, from the result alone."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from lambdahat._check import require
from lambdahat.bench.records import BenchResult
from lambdahat.graphs import Clusters, GraphSpectrum, ModelChoice, Similarity
from lambdahat.measurements import Measurement
from lambdahat.randommatrix import Advice, BatchComparison, BatchEigenvalues, BatchPrediction
from lambdahat.report.advices import draw_advice, draw_advice_figure
from lambdahat.report.bench import bench_axes, draw_bench
from lambdahat.report.chains import draw_chains, draw_running, has_chains, settings_text
from lambdahat.report.coefficients import (
    draw_curve,
    draw_free_energy,
    draw_sweep,
    draw_sweep_figure,
    draw_temperatures,
    draw_trajectory,
    draw_verification,
    draw_volumes,
    verification_axes,
)
from lambdahat.report.graphs import (
    draw_choice,
    draw_clusters,
    draw_graph_spectrum,
    draw_similarity,
    draw_similarity_figure,
)
from lambdahat.report.landscapes import draw_landscape
from lambdahat.report.randommatrix import draw_batch_comparison, draw_batch_prediction, draw_batches
from lambdahat.report.spectra import draw_density, draw_eigenpairs, draw_moments, draw_spectrum
from lambdahat.report.style import BLUE, GREY, new_axes, new_figure, tidy, title, value_text
from lambdahat.report.training import draw_run, draw_run_figure
from lambdahat.results import (
    Chains,
    Density,
    Eigenpairs,
    Estimate,
    Landscape,
    LearningCoefficient,
    Moments,
    Result,
    Spectrum,
)
from lambdahat.singular.curves import CoefficientCurve, Trajectory
from lambdahat.singular.free_energies import FreeEnergy
from lambdahat.singular.sweeps import Sweep
from lambdahat.singular.temperatures import TemperatureRegression
from lambdahat.singular.verification import Verification
from lambdahat.singular.volumes import VolumeScaling
from lambdahat.storage import write_atomically
from lambdahat.training.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def save_figure(drawn: Any, path: Path, dpi: int = 150) -> None:
    """Write a figure, or the one that axes are in, whole or not at all."""
    buffer = io.BytesIO()
    getattr(drawn, "figure", drawn).savefig(buffer, dpi=dpi, format=path.suffix.removeprefix("."))
    write_atomically(path, buffer.getvalue())


def plot(result: Result, ax: Axes | None = None) -> Any:
    """Draw any result and return its ``Axes``; what has several panels is returned as a ``Figure``.

    Those are ``Measurement``, ``Chains``, ``LearningCoefficient``, ``Sweep``, ``Run``, ``Similarity`` and
    ``Advice``.
    With ``ax`` all but the first draw the panel that tells most: the running λ̂ with its band, λ̂ over step sizes, the
    loss over epochs, the rates.

    Without ``ax`` the figure is a new one outside pyplot, so no display is needed and no global setting changes:
    ``plot(result).figure.savefig("figure.png")``. A plane ``Landscape`` becomes a surface on three-dimensional axes
    (``figure.add_subplot(projection="3d")``).
    """
    if isinstance(result, Measurement):
        require(ax is None, "ax", "be None for a Measurement, which is a figure of its own", ax,
                "draw one of its results: plot(measurement['spectrum'], ax)")  # fmt: skip
        return _draw_measurement(result)
    draw = _draw_group if estimates_in(result) else _drawer(result)
    known = ", ".join(kind.__name__ for kind in _DRAWERS)
    require(draw is not None, "result", f"be one of {known}, Measurement", type(result).__name__, error=TypeError)
    assert draw is not None
    if ax is None and (panels := _figure_of(result)) is not None:
        return panels(result)
    axes = _axes_for(result) if ax is None else ax
    draw(result, axes)
    return axes


def is_number(result: Any) -> bool:
    """Whether a result is one number with its error and nothing more, which a table shows better than a figure."""
    plain = isinstance(result, Estimate) and not isinstance(result, Clusters)
    return plain and not isinstance(result.value, Tensor) and not has_chains(result)


def _axes_for(result: Result) -> Axes:
    """New axes of the size that suits the result."""
    if isinstance(result, BenchResult):
        return bench_axes(result)
    return (
        verification_axes(result) if isinstance(result, Verification) else new_axes(1.8 if is_number(result) else 4.0)
    )


def _figure_of(result: Any) -> Callable[[Any], Figure] | None:
    """What draws a result as a figure of several panels."""
    if isinstance(result, Chains) or has_chains(result):
        return draw_chains
    if isinstance(result, Similarity):
        return draw_similarity_figure
    if isinstance(result, Advice):
        return draw_advice_figure
    if isinstance(result, Run):
        return draw_run_figure
    return draw_sweep_figure if isinstance(result, Sweep) else None


def _drawer(result: Any) -> Callable[[Any, Axes], None] | None:
    return next((draw for kind, draw in _DRAWERS.items() if isinstance(result, kind)), None)


def _draw_estimate(estimate: Estimate, axes: Axes) -> None:
    if isinstance(estimate.value, Tensor):
        _draw_elements(estimate, axes)
    else:
        _draw_scalar(estimate, axes)


def _draw_scalar(estimate: Estimate, axes: Axes) -> None:
    """A point with its 95 % interval."""
    value, (low, high) = float(estimate), estimate.interval(0.95)
    known = estimate.stderr > 0 and math.isfinite(high)
    axes.errorbar(value, 0.0, xerr=[[value - low], [high - value]] if known else None, fmt="o", color=BLUE, capsize=4,
                  label="95 % interval" if known else "value")  # fmt: skip
    axes.set_yticks([])
    axes.set_ylim(-1, 1)
    axes.set_xlabel("value")
    axes.legend(frameon=False, fontsize="small", loc="upper right")
    title(axes, value_text(estimate) + settings_text(estimate, ", "), estimate.status)


def _draw_coefficient(coefficient: LearningCoefficient, axes: Axes) -> None:
    """The running λ̂, or where the chains were not kept the value with its interval."""
    draw_running(coefficient, axes) if has_chains(coefficient) else _draw_scalar(coefficient, axes)


def _draw_elements(estimate: Estimate, axes: Axes) -> None:
    """A histogram of the elements on a logarithmic count axis; the elements' typical standard error in the title."""
    assert isinstance(estimate.value, Tensor)
    values = estimate.value.detach().cpu().double().flatten().numpy()
    axes.hist(values, bins=60, color=BLUE)
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.7)
    axes.axvline(0.0, color=GREY, linewidth=0.8, linestyle="--")
    axes.set_xlabel("value of the element")
    axes.set_ylabel("elements")
    errors = estimate.stderr.detach().cpu().double().numpy() if isinstance(estimate.stderr, Tensor) else estimate.stderr
    typical = float(np.median(errors))
    error = "exact" if typical == 0 else f"median standard error {typical:.2g}"
    title(axes, f"{values.size:,} elements, {error}", estimate.status)


def _draw_measurement(measurement: Measurement) -> Figure:
    """A grid: one panel for every result that is more than a number, and one that lists the numbers."""
    numbers, panels = _sorted_out(measurement.results)
    require(bool(numbers or panels), "result", "hold at least one result", "an empty Measurement")
    count = len(panels) + bool(numbers)
    columns = min(count, 2 if count <= 4 else 3 if count <= 6 else 4)
    rows = math.ceil(count / columns)
    figure = new_figure(5.6 * columns, 3.9 * rows)
    for place, (name, result) in enumerate(panels, start=1):
        axes = tidy(figure.add_subplot(rows, columns, place))
        plot(result, axes)
        axes.set_title(f"{name}: {axes.get_title()}", fontsize="medium")
    if numbers:
        _list_numbers(numbers, figure.add_subplot(rows, columns, count))
    about = measurement.about
    if "loss" in about and "parameters" in about:
        figure.suptitle(f"{about['parameters']:,} parameters, {about['samples']:,} samples, {about['loss']}")
    return figure


def _sorted_out(results: Mapping[str, Any]) -> tuple[list[tuple[str, Estimate]], list[tuple[str, Any]]]:
    """Scalars, and what deserves a panel, by name; mappings are opened."""
    numbers, panels = [], []
    for name, result in _leaves(results):
        if is_number(result) or has_chains(result):
            numbers.append((name, result))
        if not is_number(result) and _drawer(result) is not None:
            panels.append((name, result))
    return numbers, panels


def _leaves(results: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, result in results.items():
        parts = estimates_in(result)
        if parts:
            yield from _leaves(parts, f"{prefix}{name}.")
        else:
            yield prefix + name, result


def estimates_in(result: Any) -> Mapping[str, Any]:
    """The named parts of a mapping, or of a result that is a group of estimates; empty for all else."""
    if isinstance(result, Mapping):
        return result
    if not dataclasses.is_dataclass(result) or _drawer(result) is not None:
        return {}
    fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    return {name: value for name, value in fields.items() if isinstance(value, Estimate | Mapping)}


def _draw_group(group: Any, axes: Axes) -> None:
    """Estimates of different kinds, which no common axis would serve: a list."""
    _list_numbers([(name, part) for name, part in _leaves(estimates_in(group)) if is_number(part)], axes)


def _list_numbers(numbers: list[tuple[str, Estimate]], axes: Axes) -> None:
    axes.set_axis_off()
    axes.set_title("value ± error", fontsize="medium")
    cells = []
    for name, one in numbers:
        text = value_text(one)
        cells.append([name, text if one.status.ok else f"{text} [{one.status.name}]"])
        if at := settings_text(one):
            cells.append([f"{name}, measured at", at])
    table = axes.table(cells, cellLoc="left", edges="horizontal", loc="upper center", colWidths=[0.42, 0.58])
    table.auto_set_font_size(False)
    table.set_fontsize(9)
    table.scale(1.0, 1.35)


_DRAWERS: dict[type, Callable[[Any, Axes], None]] = {
    Spectrum: draw_spectrum,
    Density: draw_density,
    Eigenpairs: draw_eigenpairs,
    Moments: draw_moments,
    Landscape: draw_landscape,
    Chains: draw_running,
    LearningCoefficient: _draw_coefficient,
    CoefficientCurve: draw_curve,
    Sweep: draw_sweep,
    VolumeScaling: draw_volumes,
    TemperatureRegression: draw_temperatures,
    FreeEnergy: draw_free_energy,
    Trajectory: draw_trajectory,
    Verification: draw_verification,
    BenchResult: draw_bench,
    Run: draw_run,
    BatchPrediction: draw_batch_prediction,
    BatchEigenvalues: draw_batches,
    BatchComparison: draw_batch_comparison,
    GraphSpectrum: draw_graph_spectrum,
    Clusters: draw_clusters,
    Similarity: draw_similarity,
    Advice: draw_advice,
    ModelChoice: draw_choice,
    Estimate: _draw_estimate,
}
