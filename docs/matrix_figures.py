"""Figures of the page on random matrices, which ``figures.py`` draws: laws beside matrices, and
what Lanczos sees.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import lambdahat as lh
from lambdahat._core.rng import generator
from lambdahat.randommatrix import (
    Additive,
    FreeSum,
    Law,
    MarchenkoPastur,
    Multiplicative,
    Semicircle,
    free_sum,
)
from lambdahat.report.style import AMBER, BLUE, GREEN, GREY, VERMILION, new_figure, tidy

LARGE = 4000
SMALL = "small"


def histogram(axes: Any, values: Any, bins: int = 40, **options: Any) -> None:
    """Eigenvalues as an area of 1."""
    axes.hist(
        values,
        bins=bins,
        density=True,
        **{"color": GREY, "alpha": 0.35, "label": "eigenvalues", **options},
    )


def stems(axes: Any, spectrum: lh.Spectrum, log: bool = False) -> None:
    """Ritz values and weights on an axis of their own, since weights add up to 1 and no area
    does.
    """
    right, bottom = axes.twinx(), 1e-5 if log else 0.0
    right.vlines(spectrum.nodes[0], bottom, spectrum.weights[0], color=VERMILION, linewidth=1.1)
    if log:
        right.set_yscale("log")
    right.set_ylim(bottom, (5.0 if log else 1.6) * spectrum.weights[0].max())
    right.tick_params(colors=VERMILION, labelsize=7)
    right.spines[["top"]].set_visible(False)
    right.set_ylabel("weight", color=VERMILION, fontsize=SMALL)
    axes.set(xlabel="eigenvalue", ylabel="density")
    axes.plot(
        [], [], color=VERMILION, linewidth=1.1, label=f"Lanczos, m = {spectrum.nodes.shape[1]}"
    )


def ensemble(axes: Any, law: Law, size: int, name: str) -> None:
    """One matrix of the law: its histogram, the law, the stems of one probe."""
    matrix = law.sample(size)
    histogram(axes, np.linalg.eigvalsh(matrix.numpy()), 20 if size < 1000 else 60)
    low, high = law.edges
    x = np.linspace(low - 0.05, high + 0.05, 400)
    axes.plot(x, law.density(x), color=BLUE, linewidth=1.3, label="law")
    stems(axes, lh.spectrum(lh.operator(matrix), depth=30))
    axes.set_title(f"{name}, P = {size:,}", fontsize="medium")


def ensembles() -> Any:
    """Semicircle and Marchenko–Pastur, T = 2P, at two sizes (Figures 4.3 and 4.5)."""
    figure = new_figure(9.0, 6.0)
    rows = (
        ("Wigner, Theorem 9", Semicircle(1.0)),
        ("covariance, T = 2P, Theorem 10", MarchenkoPastur(1.0, 0.5)),
    )
    for row, (name, law) in enumerate(rows):
        for column, size in enumerate((225, LARGE)):
            axes = tidy(figure.add_subplot(2, 2, 2 * row + column + 1))
            ensemble(axes, law, size, name)
    axes.legend(frameon=False, fontsize=SMALL)
    return axes


def known_spectrum() -> tuple[Any, Any]:
    """470 eigenvalues in [0, 15], 20 in [0, 60], 10 in [−10, 0] and 500 at 0, in a random basis
    (§4.5.2).
    """
    rng = generator(0, "known spectrum")
    parts = ((470, 0, 15), (20, 0, 60), (10, -10, 0))
    draws = [
        low + (high - low) * torch.rand(n, generator=rng, dtype=torch.float64)
        for n, low, high in parts
    ]
    values = torch.cat([*draws, torch.zeros(500, dtype=torch.float64)])
    basis = torch.linalg.qr(torch.randn(1000, 1000, generator=rng, dtype=torch.float64)).Q
    return values.numpy(), (basis * values) @ basis.T


def beside(
    axes: Any, values: Any, matrix: Any, name: str, depth: int = 30, log: bool = False
) -> None:
    """Eigenvalues and one probe's Ritz values; at m = 30 also the diagonal, which shows neither
    support nor shape.
    """
    histogram(axes, values, 70 if log else 40)
    stems(axes, lh.spectrum(lh.operator((matrix + matrix.T) / 2), depth=depth), log)
    axes.set_yscale("log")
    axes.set_title(name, fontsize="medium")
    if depth == 30:
        histogram(axes, matrix.diagonal().numpy(), 12, color=AMBER, alpha=0.8, label="diagonal")


def lanczos_and_diagonals() -> Any:
    """A half null space, diagonals, and a known spectrum at m = 5, 15, 30 (Figures 4.4 and 4.6)."""
    figure = new_figure(11.5, 6.0)
    panels = [tidy(figure.add_subplot(2, 3, place)) for place in range(1, 7)]
    ensemble(panels[0], MarchenkoPastur(1.0, 2.0), LARGE, "covariance, T = P/2, Theorem 10")
    panels[0].set_ylim(0, 1.5)
    for axes, law, name in (
        (panels[1], MarchenkoPastur(1.0, 0.5), "covariance"),
        (panels[2], Semicircle(1.0), "Wigner"),
    ):
        matrix = law.sample(500)
        beside(axes, np.linalg.eigvalsh(matrix.numpy()), matrix, f"{name}, P = 500")
    values, matrix = known_spectrum()
    for axes, depth in zip(panels[3:], (5, 15, 30), strict=True):
        beside(axes, values, matrix, f"known spectrum, m = {depth}", depth, log=True)
    for axes in (panels[0], panels[2], panels[5]):
        axes.legend(frameon=False, fontsize=7)
    return panels[0]


SIZE, NOISE = 1000, 400.0  # P and Pσ²
BATCHES = ((100, AMBER), (1600, BLUE))


def noisy(spike: float, batch: float, seed: int = 0, size: int = SIZE) -> Any:
    """Eigenvalues of a spike and symmetric noise of scale √(Pσ²/b)."""
    matrix = Semicircle((NOISE / batch) ** 0.5).sample(size, seed)
    matrix[0, 0] += spike
    return torch.linalg.eigvalsh(matrix).numpy()


def sampled(spike: float, batch: int, seed: int = 0, size: int = SIZE) -> Any:
    """Eigenvalues of the covariance of b samples, of which one direction has variance ``spike``,
    the others 1.
    """
    draw = torch.randn(size, batch, generator=generator(seed, "sampled"), dtype=torch.float64)
    draw[0] *= spike**0.5
    small = draw.T @ draw if batch < size else draw @ draw.T
    return torch.linalg.eigvalsh(small / batch).numpy()


def regime(
    axes: Any, theory: FreeSum | Law, outlier: float | None, values: Any, batch: int, colour: str
) -> None:
    """The bulk at one batch size, as drawn and as the law says, and the largest eigenvalue where
    it stands apart.
    """
    edges = theory.edges if isinstance(theory, Law) else theory.edges[0]
    share = 1.0 - (theory.atom if isinstance(theory, Law) else 0.0)
    bulk = values[values < edges[1] * 1.1]
    axes.hist(bulk, bins=40, density=True, color=colour, alpha=0.3)
    x = np.linspace(*edges, 300)
    density = theory.density(x) / share
    axes.plot(x, density, color=colour, linewidth=1.3, label=f"b = {batch:,}")
    if outlier is not None:
        axes.vlines(outlier, 0, 0.6 * density.max(), color=colour, linewidth=1.3)
        axes.plot(values[-1], 0.6 * density.max(), "o", color=colour, markersize=4)


def additive_row(panels: list[Any]) -> None:
    """Figure 5.1: a semicircle that shrinks, a spike of 6 beyond it, one of 1 that it hides at
    first.
    """
    for axes, spike in zip(panels, (6.0, 1.0), strict=False):
        for batch, colour in BATCHES:
            theory = free_sum(0.0, Semicircle((NOISE / batch) ** 0.5), spikes=[spike])
            seen = theory.outliers[0].value if theory.outliers else None
            regime(axes, theory, seen, noisy(spike, batch), batch, colour)
        axes.set_title(f"semicircle (Theorem 14), λ₁ = {spike:g}", fontsize="medium")
    grid, points = np.geomspace(16, 20000, 200), (25, 100, 400, 1600, 6400)
    for spike, colour in ((6.0, VERMILION), (1.0, GREEN)):
        curve = [float(Additive((NOISE / b) ** 0.5).outlier(spike)) for b in grid]
        tops = [[noisy(spike, b, seed, 400)[-1] for seed in range(5)] for b in points]
        draw_largest(panels[2], grid, curve, points, tops, colour, f"λ₁ = {spike:g}")


def multiplicative_row(panels: list[Any]) -> None:
    """Figure 5.3: covariances of b samples, P = 1,000, with one direction of variance 9, or 2."""
    for axes, spike in zip(panels, (9.0, 2.0), strict=False):
        for batch, colour in ((500, AMBER), (8000, BLUE)):
            law, model = (
                MarchenkoPastur(1.0, SIZE / batch),
                Multiplicative([1.0], [float(SIZE)], batch),
            )
            seen = float(model.outlier(spike)) if bool(model.stands_apart(spike)) else None
            regime(axes, law, seen, sampled(spike, batch), batch, colour)
        axes.set_title(f"Marchenko–Pastur (Theorem 16), ℓ₁ = {spike:g}", fontsize="medium")
    grid, points = np.geomspace(20, 20000, 200), (32, 128, 512, 2048, 8192)
    for spike, colour in ((9.0, VERMILION), (2.0, GREEN)):
        curve = [float(Multiplicative([1.0], [400.0], b).outlier(spike)) for b in grid]
        tops = [[sampled(spike, b, seed, 400)[-1] for seed in range(5)] for b in points]
        draw_largest(panels[2], grid, curve, points, tops, colour, f"ℓ₁ = {spike:g}")


def draw_largest(
    axes: Any, grid: Any, curve: Any, points: Any, tops: Any, colour: str, name: str
) -> None:
    """The largest eigenvalue over the batch size: the limit, and matrices of P = 400 with their
    spread.
    """
    axes.loglog(grid, curve, color=colour, label=name)
    means, spreads = np.mean(tops, axis=1), np.std(tops, axis=1, ddof=1)
    axes.errorbar(points, means, yerr=spreads, fmt="o", color=colour, markersize=3, capsize=2)


def batch_regimes() -> Any:
    """The bulk shrinks as the batch grows; the largest eigenvalue follows it until it stands
    apart (5.1 and 5.3).
    """
    figure = new_figure(11.5, 6.0)
    panels = [tidy(figure.add_subplot(2, 3, place)) for place in range(1, 7)]
    additive_row(panels[:3])
    multiplicative_row(panels[3:])
    for axes in panels:
        axes.legend(frameon=False, fontsize=SMALL)
        axes.set(xlabel="eigenvalue", ylabel="density")
    for axes in (panels[2], panels[5]):
        axes.set_title("largest eigenvalue, P = 400", fontsize="medium")
        axes.set(xlabel="batch size b", ylabel="λ₁ of the batch")
    return panels[0]
