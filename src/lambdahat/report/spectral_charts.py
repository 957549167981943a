"""Charts of spectra and landscapes: Ritz values, densities, eigenvalues, moments, the loss on lines and planes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lambdahat.maxent import MaxentDensity
from lambdahat.report.landscapes import direction_label
from lambdahat.report.spectra import DECADES, LEVEL, lowest_peak, pooled
from lambdahat.report.style import counted
from lambdahat.results import Array, Density, Eigenpairs, Landscape, Moments, Spectrum, student_quantile
from lambdahat.results.charts import Chart, Heat, Series

EIGENVALUE, SHARE, PER_UNIT = "eigenvalue λ", "share of eigenvalues", "density of eigenvalues, per unit λ"
INTERVAL = "Bands and bars: 95 % intervals."
POINTS = 500  # of a density


def spectrum_charts(spectrum: Spectrum) -> list[Chart]:
    """Stems at the Ritz values on a logarithmic axis, and the smoothed density."""
    probes, depth = spectrum.nodes.shape
    nodes, weights = pooled(spectrum)
    kept = weights > weights.max() * 10.0**-DECADES
    series = Series("Ritz values", listed(nodes[kept]), listed(weights[kept]), style="stems")
    stems = Chart(
        "Ritz values", EIGENVALUE, SHARE, (series,), y_log=True, lines=(("one eigenvalue, 1/P", 1 / spectrum.dim),),
        caption=f"P = {spectrum.dim:,}, {counted(probes, 'probe')}, depth {depth}.",
    )  # fmt: skip
    return [stems, *density_charts(spectrum.density())]


def density_charts(density: Density) -> list[Chart]:
    """The density on a logarithmic axis, with its pointwise interval; what lies below every peak is cut off."""
    grid, values, errors = _thinned(density)
    floor = lowest_peak(density.values) / 30 if (density.values > 0).any() else 0.0
    shown = [value if value >= floor else None for value in listed(values)]
    half = listed(student_quantile(LEVEL, math.inf) * errors) if errors.any() else None
    if isinstance(density, MaxentDensity):
        how = f"Of maximum entropy, {len(density.coefficients) - 1} moments."
    else:
        how = f"Smoothed by a Gaussian of width {density.width:.2g}." if density.width else ""
    series = Series("density", listed(grid), shown, half)
    caption = " ".join(filter(None, (how, INTERVAL if half else "")))
    return [Chart("Spectral density", EIGENVALUE, PER_UNIT, (series,), y_log=True, caption=caption)]


def _thinned(density: Density) -> tuple[Array, Array, Array]:
    """At most some hundred points, every peak among them."""
    values = density.values
    if len(values) <= POINTS:
        return density.grid, values, density.stderr
    padded = np.concatenate([[-np.inf], values, [-np.inf]])
    turning = ((values >= padded[:-2]) & (values >= padded[2:])) | ((values <= padded[:-2]) & (values <= padded[2:]))
    kept = turning | (np.arange(len(values)) % math.ceil(len(values) / POINTS) == 0)
    return density.grid[kept], values[kept], density.stderr[kept]


def eigenpair_charts(pairs: Eigenpairs) -> list[Chart]:
    """Bars of the eigenvalues with their residuals, converged and not."""
    values, residuals = pairs.values.cpu().double().numpy(), pairs.residuals.cpu().double().numpy()
    rank, done = np.arange(1, len(values) + 1), pairs.converged.cpu().numpy().astype(bool)
    groups = ((done, "converged"), (~done, "not converged"))
    series = tuple(
        Series(name, [str(i) for i in rank[mask]], listed(values[mask]), listed(residuals[mask]), "bars")
        for mask, name in groups
        if mask.any()
    )
    caption = f"Bars: ± residual, within which an eigenvalue lies (largest {residuals.max():.1g})."
    return [Chart(counted(len(values), "eigenvalue"), "rank", EIGENVALUE, series, caption=caption)]


def moment_charts(moments: Moments) -> list[Chart]:
    """Each moment with its 95 % interval, by order."""
    half = student_quantile(LEVEL, max(moments.probes - 1, 1)) * moments.stderr
    symbol = {"power": "tr Aᵏ / P", "chebyshev": "tr T_k(A) / P"}.get(moments.basis, "tr P_k(A) / P")
    low, high = moments.bounds
    mapped = "" if moments.basis == "power" else f"A mapped from [{low:.3g}, {high:.3g}] to [−1, 1]. "
    series = Series(symbol, list(range(len(moments))), listed(moments.values), listed(half), "points")
    return [Chart(f"{moments.basis.capitalize()} moments", "order k", symbol, (series,), caption=mapped + INTERVAL)]


def landscape_charts(landscape: Landscape) -> list[Chart]:
    """A line as curves with the parabola its curvature predicts; a plane as a surface and as contours."""
    return _line(landscape) if landscape.loss.ndim == 1 else _plane(landscape)


def _line(landscape: Landscape) -> list[Chart]:
    offsets = listed(landscape.offsets)
    series = [Series("training", offsets, listed(landscape.loss))]
    if landscape.held_out is not None:
        series.append(Series("held out", offsets, listed(landscape.held_out)))
    series += _parabola(landscape)
    return [Chart("Loss along a line", direction_label(landscape, 0), "loss, mean per sample", tuple(series))]


def _parabola(landscape: Landscape) -> list[Series]:
    """L(0) + g·t + ½·vᵀHv·t² as far as it stays in the frame of the loss; g is from the points beside the centre."""
    offsets, loss = landscape.offsets, landscape.loss
    centre = int(np.abs(offsets).argmin())
    if not landscape.curvature or offsets[centre] != 0 or not 0 < centre < len(offsets) - 1:
        return []
    slope = (loss[centre + 1] - loss[centre - 1]) / (offsets[centre + 1] - offsets[centre - 1])
    fine = np.linspace(offsets[0], offsets[-1], 121)
    values = loss[centre] + slope * fine + 0.5 * landscape.curvature[0] * fine**2
    low, high = float(np.nanmin(loss)), float(np.nanmax(loss))
    room = 0.06 * (high - low)
    shown = [value if low - room <= value <= high + room else None for value in listed(values)]
    return [Series(f"parabola, vᵀHv = {landscape.curvature[0]:.3g}", listed(fine), shown)]


def _plane(landscape: Landscape) -> list[Chart]:
    across, up = (direction_label(landscape, place).removeprefix("offset along ") for place in (0, 1))
    offsets = listed(landscape.offsets)
    planes = {"training": landscape.loss} | ({} if landscape.held_out is None else {"held out": landscape.held_out})
    charts = []
    for name, loss in planes.items():
        # loss[i, j] lies at offset i of the first direction, which is drawn across
        heat = Heat(offsets, offsets, [listed(line) for line in loss.T], "loss")
        charts.append(Chart(f"Loss on a plane, {name}", across, up, heat=heat, surface=True))
        charts.append(Chart(f"Contours of the loss, {name}", across, up, heat=heat))
    return charts


def listed(values: Any) -> list[float]:
    """An array as plain numbers."""
    return [float(value) for value in values]
