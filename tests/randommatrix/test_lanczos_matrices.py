"""Lanczos sees the spectra of random matrices, their diagonals do not (spectral thesis, Figures 4.3
to 4.6).

Distances are Wasserstein's, in standard deviations of the spectrum: Kolmogorov's would be ½ for a
Ritz value that is a hair beside a null space of that share.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from scipy.stats import wasserstein_distance

import lambdahat as lh
from lambdahat._core.rng import generator
from lambdahat.randommatrix import MarchenkoPastur, Semicircle
from tests.cases import with_eigenvalues

ENSEMBLES = {
    "Wigner": Semicircle(1.0),
    "covariance, T = 2P": MarchenkoPastur(1.0, 0.5),
    "covariance, T = P/2": MarchenkoPastur(1.0, 2.0),
}
each_ensemble = pytest.mark.parametrize("name", ENSEMBLES)


def distance(values: np.ndarray, nodes: np.ndarray, weights: np.ndarray | None = None) -> float:
    return float(wasserstein_distance(values, nodes, None, weights) / values.std())


@cache
def readings(name: str, size: int = 600, depth: int = 30):
    """Eigenvalues, diagonal, Ritz values and weights of one probe."""
    matrix = ENSEMBLES[name].sample(size)
    spectrum = lh.spectrum(lh.operator(matrix), depth=depth)
    return (
        np.linalg.eigvalsh(matrix.numpy()),
        matrix.diagonal().numpy(),
        spectrum.nodes[0],
        spectrum.weights[0],
    )


@each_ensemble
def test_thirty_steps_capture_support_and_shape(name):
    """One probe moves each share by √(2/P) of its spread, and 30 nodes stand about 1/30 of the
    width apart.
    """
    values, _, nodes, weights = readings(name)
    width = values[-1] - values[0]
    assert nodes.min() == pytest.approx(values[0], abs=0.02 * width)
    assert nodes.max() == pytest.approx(values[-1], abs=0.02 * width)
    assert distance(values, nodes, weights) < 0.1


@each_ensemble
def test_the_rule_and_the_law_part_the_mass_alike(name):
    """Between its steps a Gauss rule is right about the measure it sees (Chebyshev, Markov and
    Stieltjes).
    """
    values, _, nodes, weights = readings(name)
    order = np.argsort(nodes)
    middle = weights[order].cumsum() - weights[order] / 2
    bulk = np.abs(nodes[order]) > 1e-6
    expected = ENSEMBLES[name].cdf(nodes[order][bulk])
    assert np.abs(middle[bulk] - expected).max() < 3 * np.sqrt(2 / len(values)) / 2


def test_a_null_space_is_one_node_with_its_share():
    _, _, nodes, weights = readings("covariance, T = P/2")
    nearest = np.abs(nodes).argmin()
    assert abs(nodes[nearest]) < 1e-9
    assert weights[nearest] == pytest.approx(0.5, abs=3 * np.sqrt(2 / 600) / 2)
    assert np.sort(np.abs(nodes))[1] > 0.5 * ENSEMBLES["covariance, T = P/2"].edges[0]


@each_ensemble
def test_the_diagonal_shows_neither_support_nor_shape(name):
    """Its variance is 1/P of the spectrum's, up to a factor (Eq. 4.18)."""
    values, diagonal, nodes, weights = readings(name)
    assert diagonal.std() < 0.1 * values.std()
    assert distance(values, diagonal) > 0.7
    assert distance(values, diagonal) > 8 * distance(values, nodes, weights)


@each_ensemble
def test_ritz_values_are_not_the_largest_eigenvalues(name):
    values, _, nodes, _ = readings(name)
    assert np.sort(nodes)[0] < np.sort(values)[-30]
    assert (np.abs(np.sort(nodes) - np.sort(values)[-30:]) > 0.1).sum() > 20


@cache
def network() -> tuple[np.ndarray, torch.Tensor]:
    """470 eigenvalues in [0, 15], 20 in [0, 60], 10 in [−10, 0], 500 at 0, in a random basis
    (§4.5.2).
    """
    rng = generator(0, "known spectrum")
    parts = [(470, 0, 15), (20, 0, 60), (10, -10, 0)]
    draws = [
        low + (high - low) * torch.rand(n, generator=rng, dtype=torch.float64)
        for n, low, high in parts
    ]
    values = torch.cat([*draws, torch.zeros(500, dtype=torch.float64)]).sort().values
    return values.numpy(), with_eigenvalues(values)


def test_a_networks_spectrum_comes_out_step_by_step():
    values, matrix = network()
    found = {}
    for depth in (5, 15, 30, 60):
        spectrum = lh.spectrum(lh.operator(matrix), depth=depth)
        found[depth] = distance(values, spectrum.nodes[0], spectrum.weights[0]), spectrum
    gaps = [found[depth][0] for depth in (5, 15, 30, 60)]
    assert gaps == sorted(gaps, reverse=True)
    five, thirty = found[5][1], found[30][1]
    near = np.abs(five.nodes[0]).argmin()
    assert abs(five.nodes[0][near]) < 1.5
    assert five.weights[0][near] == pytest.approx(0.5, abs=0.15)
    assert len(five.outliers()) < len(thirty.outliers())
    for estimate, exact in zip(thirty.extremes, (values[0], values[-1]), strict=True):
        assert float(estimate) == pytest.approx(exact, abs=1e-3 * 60)


def test_a_networks_diagonal_has_no_outlier_and_no_null_space():
    values, matrix = network()
    diagonal = matrix.diagonal().numpy()
    assert 2 < diagonal.min() < values.mean() < diagonal.max() < 7
    assert values[-1] > 50
    assert values[0] < -8
    assert distance(values, diagonal) > 0.5
