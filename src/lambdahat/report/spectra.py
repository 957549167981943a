"""Figures of spectra: stems, smoothed densities, eigenvalue bars."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lambdahat.maxent import MaxentDensity
from lambdahat.report.style import AMBER, BLUE, GREY, counted, title
from lambdahat.results import Array, Density, Eigenpairs, Moments, Spectrum, Status, student_quantile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MERGE = 1e-5  # share of the spectrum's width within which Ritz values of different probes are one eigenvalue
DECADES = 12  # a weight further below the largest is rounding
LEVEL = 0.95


def draw_spectrum(spectrum: Spectrum, axes: Axes) -> None:
    """Stems at the Ritz values, their weights averaged over probes, on a logarithmic axis."""
    probes, depth = spectrum.nodes.shape
    nodes, weights = pooled(spectrum)
    floor = max(float(weights[weights > 0].min()) / 3, float(weights.max()) * 10.0**-DECADES)
    axes.set_yscale("log")
    axes.vlines(nodes, floor, np.maximum(weights, floor), color=BLUE, linewidth=1.1)
    axes.plot(nodes, weights, "o", color=BLUE, markersize=3.5, linestyle="none")
    axes.axhline(1.0 / spectrum.dim, color=GREY, linewidth=0.9, linestyle="--", label="one eigenvalue, 1/P")
    axes.set_ylim(floor, 2.0)
    axes.set_xlabel("eigenvalue λ")
    axes.set_ylabel("share of eigenvalues")
    axes.legend(loc="upper right", frameon=False, fontsize="small")
    title(axes, f"Ritz values, P = {spectrum.dim:,} ({counted(probes, 'probe')}, depth {depth})", spectrum.status)


def pooled(spectrum: Spectrum) -> tuple[Array, Array]:
    """Nodes and weights of all probes as one measure; converged nodes, the same for every probe, are merged."""
    probes = len(spectrum.nodes)
    order = np.argsort(spectrum.nodes, axis=None)
    nodes, weights = spectrum.nodes.ravel()[order], spectrum.weights.ravel()[order] / probes
    if probes == 1:
        return nodes, weights
    step = MERGE * (nodes[-1] - nodes[0])
    starts = [0]
    for i, node in enumerate(nodes):
        if node - nodes[starts[-1]] > step:
            starts.append(i)
    sums = np.add.reduceat(weights, starts)
    means = np.add.reduceat(weights * nodes, starts) / np.where(sums > 0, sums, 1.0)
    return np.where(sums > 0, means, nodes[starts]), sums


def draw_density(density: Density, axes: Axes) -> None:
    """The density on a logarithmic axis, with its pointwise 95 % band."""
    positive = density.values[density.values > 0]
    floor = lowest_peak(density.values) / 30 if positive.size else 1.0
    half = student_quantile(LEVEL, np.inf) * density.stderr
    axes.set_yscale("log")
    low, high = np.maximum(density.values - half, floor), np.maximum(density.values + half, floor)
    if density.stderr.any():
        axes.fill_between(density.grid, low, high, color=BLUE, alpha=0.25, linewidth=0, label="95 % interval")
    axes.plot(density.grid, np.maximum(density.values, floor / 100), color=BLUE, linewidth=1.4)
    axes.set_ylim(bottom=floor)
    axes.margins(x=0.01)
    axes.set_xlabel("eigenvalue λ")
    axes.set_ylabel("density of eigenvalues, per unit λ")
    if density.stderr.any():
        axes.legend(loc="upper right", frameon=False, fontsize="small")
    if isinstance(density, MaxentDensity):
        how, status = f" of maximum entropy, {len(density.coefficients) - 1} moments", density.status
    else:
        how, status = (
            f", smoothed by a Gaussian of width {density.width:.2g}" if density.width else "",
            Status.CONVERGED,
        )
    title(axes, f"Spectral density{how}", status)


def lowest_peak(values: Array) -> float:
    """The height of the lowest local maximum that is not rounding, so that an axis can show every peak."""
    padded = np.concatenate([[-np.inf], values, [-np.inf]])
    peaks = values[(values >= padded[:-2]) & (values >= padded[2:]) & (values > values.max() * 10.0**-DECADES)]
    return float(peaks.min())


def draw_eigenpairs(pairs: Eigenpairs, axes: Axes) -> None:
    """Bars of the eigenvalues, each with its residual, within which an eigenvalue lies; unconverged ones in amber."""
    from matplotlib.ticker import MaxNLocator

    values, residuals = pairs.values.cpu().double().numpy(), pairs.residuals.cpu().double().numpy()
    rank, done = np.arange(1, len(values) + 1), pairs.converged.cpu().numpy().astype(bool)
    for mask, colour, label in ((done, BLUE, "converged"), (~done, AMBER, "not converged")):
        if mask.any():
            axes.bar(rank[mask], values[mask], color=colour, width=0.7, label=label)
    axes.errorbar(rank, values, yerr=residuals, fmt="none", ecolor="black", elinewidth=1, capsize=3,
                  label=f"± residual (largest {residuals.max():.1g})")  # fmt: skip
    axes.axhline(0.0, color="black", linewidth=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True, min_n_ticks=1))
    axes.set_xlim(0.3, len(values) + 0.7)
    axes.set_xlabel("rank")
    axes.set_ylabel("eigenvalue λ")
    axes.legend(frameon=False, fontsize="small")
    title(axes, counted(len(values), "eigenvalue"), pairs.status)


def draw_moments(moments: Moments, axes: Axes) -> None:
    """Each moment with its 95 % interval, by order."""
    from matplotlib.ticker import MaxNLocator

    half = student_quantile(LEVEL, max(moments.probes - 1, 1)) * moments.stderr
    axes.errorbar(range(len(moments)), moments.values, yerr=half, fmt="o", color=BLUE, markersize=4, capsize=3,
                  elinewidth=1, label="95 % interval")  # fmt: skip
    axes.axhline(0.0, color=GREY, linewidth=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("order k")
    axes.set_ylabel({"power": "tr Aᵏ / P", "chebyshev": "tr T_k(A) / P"}.get(moments.basis, "tr P_k(A) / P"))
    axes.legend(frameon=False, fontsize="small")
    low, high = moments.bounds
    mapped = "" if moments.basis == "power" else f" of A mapped from [{low:.3g}, {high:.3g}] to [−1, 1]"
    title(axes, f"{moments.basis.capitalize()} moments{mapped} ({counted(moments.probes, 'probe')})", moments.status)
