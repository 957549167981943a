"""Entropic spectra and the divergences between them."""

import networkx as nx
import numpy as np
import pytest

from lambdahat.graphs import Similarity, graph, similarity, spectrum
from lambdahat.graphs.block_moments import eigenvalues
from lambdahat.graphs.divergences import solve_covariance
from lambdahat.results import Result
from tests.graphs.made import planted


def random_graph(n, p, seed, name=None):
    return graph(nx.gnp_random_graph(n, p, seed=seed), name=name)


@pytest.fixture(scope="module")
def family():
    """Three Erdős–Rényi graphs and two rings."""
    made = [random_graph(300, 0.05, seed, f"er {seed}") for seed in range(3)]
    rings = [graph(nx.watts_strogatz_graph(300, 4, 0.05, seed=s), name=f"ring {s}") for s in range(2)]
    return similarity([*made, *rings], moments=40)


def test_the_density_has_the_moments_of_the_eigenvalues():
    one = planted(9)
    found = spectrum(one, 30)
    exact = np.polynomial.chebyshev.chebvander(eigenvalues(one) - 1, 30).mean(axis=0)
    assert np.allclose(found.density.moments(30, "chebyshev"), exact, atol=2e-4)
    assert found.density.integral() == pytest.approx(1.0, abs=1e-8)
    assert found.status.ok


def test_the_semicircle_of_a_dense_random_graph():
    """The normalised Laplacian of G(n, p) has variance (1 − p)/(np) about 1, and the semicircle's fourth moment 2σ⁴."""
    n, p = 800, 0.3
    density = spectrum(random_graph(n, p, 0), 30).density
    variance = density.expectation(lambda x: (x - 1) ** 2)
    assert variance == pytest.approx((1 - p) / (n * p) + 1 / n, rel=0.05)
    bulk = density.integrate(1 - 2.2 * variance**0.5, 1 + 2.2 * variance**0.5)
    assert bulk > 0.99


def test_like_graphs_are_near(family):
    assert family.apart(["er 0", "er 1", "er 2"])
    assert family.apart(["ring 0", "ring 1"])
    assert not family.apart(["er 0", "ring 0"])
    order = family.order()
    assert sorted(order) == [0, 1, 2, 3, 4]
    assert {order.index(i) for i in (3, 4)} in ({0, 1}, {3, 4})
    assert family.tree().shape == (4, 4)


def test_a_divergence_is_symmetric_positive_and_zero_to_itself(family):
    matrix = family.divergences
    assert np.array_equal(matrix, matrix.T)
    assert not np.diag(matrix).any()
    assert (matrix[~np.eye(5, dtype=bool)] > 0).all()
    assert not family.stderr.any()  # exact moments
    first, second = family.spectra[0], family.spectra[3]
    assert first.density.symmetric_kl(second.density, numeric=True) == pytest.approx(matrix[0, 3], rel=1e-6)


def test_errors_of_divergences_are_those_of_repetition():
    one, other = random_graph(1500, 0.01, 0), random_graph(1500, 0.02, 1)
    found = [similarity([one, other], 20, probes=40, seed=seed) for seed in range(16)]
    values = np.array([f.divergences[0, 1] for f in found])
    predicted = np.mean([f.stderr[0, 1] for f in found])
    assert 0.5 < values.std(ddof=1) / predicted < 2.0


def test_covariance_solve_inverts_the_covariance():
    density = spectrum(random_graph(200, 0.1, 0), 6).density
    x, mass = density.grid - 1, density.weights * density.values
    features = np.polynomial.chebyshev.chebvander(x, 6)[:, 1:]
    centred = features - mass @ features
    covariance = (mass[:, None] * centred).T @ centred + density.penalty * np.eye(6)
    right = np.arange(1.0, 7.0)
    assert np.allclose(covariance @ solve_covariance(density, right), right, rtol=1e-5)


def test_spectra_are_taken_as_they_are_and_names_told_apart():
    one = spectrum(random_graph(60, 0.2, 0), 10)
    found = similarity([one, one, random_graph(60, 0.2, 1, "other")], 10)
    assert found.names == ("graph 1", "graph 2", "other")
    assert found.divergences[0, 1] == 0
    assert found.spectra[0] is one


def test_saved_and_loaded(family, tmp_path):
    again = Result.load(family.save(tmp_path / "similarity"))
    assert isinstance(again, Similarity)
    assert again.names == family.names
    assert np.array_equal(again.divergences, family.divergences)
    assert again.spectra[2].density.evaluate([1.0]) == family.spectra[2].density.evaluate([1.0])
