"""Entropic spectra and the divergences between them."""

from dataclasses import replace

import networkx as nx
import numpy as np
import pytest

from lambdahat.graphs import Similarity, graph, similarity, spectrum
from lambdahat.graphs.similarities import Response
from lambdahat.graphs.spectra import eigenvalues
from lambdahat.maxent import fit
from lambdahat.results import Result
from tests.graphs.made import planted


def random_graph(n, p, seed, name=None):
    return graph(nx.gnp_random_graph(n, p, seed=seed), name=name)


@pytest.fixture(scope="module")
def family():
    """Three Erdős–Rényi graphs and two rings."""
    made = [random_graph(300, 0.05, seed, f"er {seed}") for seed in range(3)]
    rings = [
        graph(nx.watts_strogatz_graph(300, 4, 0.05, seed=s), name=f"ring {s}") for s in range(2)
    ]
    return similarity([*made, *rings], moments=40)


def test_the_density_has_the_moments_of_the_eigenvalues():
    one = planted(9)
    found = spectrum(one, 30)
    exact = np.polynomial.chebyshev.chebvander(eigenvalues(one) - 1, 30).mean(axis=0)
    assert np.allclose(found.density.moments(30, "chebyshev"), exact, atol=2e-4)
    assert found.density.integral() == pytest.approx(1.0, abs=1e-8)
    assert found.status.ok


def test_the_semicircle_of_a_dense_random_graph():
    """The normalised Laplacian of G(n, p) has variance (1 − p)/(np) about 1, and the
    semicircle's fourth moment 2σ⁴.
    """
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
    assert first.density.symmetric_kl(second.density, numeric=True) == pytest.approx(
        matrix[0, 3], rel=1e-6
    )


def test_errors_of_divergences_are_those_of_repetition():
    one, other = random_graph(1500, 0.01, 0), random_graph(1500, 0.02, 1)
    found = [similarity([one, other], 20, probes=40, seed=seed) for seed in range(16)]
    values = np.array([f.divergences[0, 1] for f in found])
    predicted = np.mean([f.stderr[0, 1] for f in found])
    assert 0.5 < values.std(ddof=1) / predicted < 2.0


def test_response_is_the_derivative():
    """dα = −(C + vI)⁻¹dμ and the moments move by C(C + vI)⁻¹dμ, against two fits of moved
    moments.
    """
    one = spectrum(random_graph(200, 0.1, 0), 6)
    moments, penalty = one.moments.values, 1e-3
    density = fit(moments, bounds=one.moments.bounds, penalty=penalty)
    response = Response.of(replace(one, density=density))
    for k in range(1, 7):
        step = 1e-5 * np.eye(7)[k]
        up, down = (
            fit(moments + sign * step, bounds=density.bounds, penalty=penalty) for sign in (1, -1)
        )
        assert np.allclose(
            (up.coefficients - down.coefficients)[1:] / 2e-5, -response.inverse[:, k - 1], rtol=1e-3
        )
        assert np.allclose(
            (up.matched - down.matched)[1:] / 2e-5, response.kept[:, k - 1], rtol=1e-3, atol=1e-5
        )


@pytest.mark.parametrize("moments", [20, 60])
def test_readings_of_one_graph_differ_by_the_floor(moments):
    """Probes alone tell them apart; before one penalty was taken for all, D was a hundred times
    the floor at times.
    """
    one = random_graph(1200, 0.01, 0)
    found = similarity([spectrum(one, moments, probes=40, seed=seed) for seed in range(5)], moments)
    assert len({s.density.penalty for s in found.spectra}) == 1
    pairs = np.triu_indices(5, 1)
    divergences, floors, stderr = (
        part[pairs] for part in (found.divergences, found.floors, found.stderr)
    )
    assert 0.5 < divergences.mean() / floors.mean() < 2.5
    assert (divergences < floors + 4 * stderr).all()


def test_one_penalty_lets_all_match():
    """Atoms need coefficients of thousands, which a penalty that is fine for a path would not
    let them have.
    """
    atoms, path = graph(nx.disjoint_union_all([nx.complete_graph(4)] * 5)), graph(nx.path_graph(60))
    found = similarity([atoms, path, random_graph(60, 0.2, 0)], 40)
    assert len({s.density.penalty for s in found.spectra}) == 1
    assert found.status.ok


def test_exact_moments_have_no_floor(family):
    assert not family.floors.any()


def test_spectra_keep_their_moments_and_names_are_told_apart():
    one = spectrum(random_graph(60, 0.2, 0), 10)
    found = similarity([one, one, random_graph(60, 0.2, 1, "other")], 10)
    assert found.names == ("graph 1", "graph 2", "other")
    assert found.divergences[0, 1] == 0
    assert found.spectra[0].moments is one.moments
    assert np.abs(found.spectra[0].density.residuals).max() <= 1e-3


def test_saved_and_loaded(family, tmp_path):
    again = Result.load(family.save(tmp_path / "similarity"))
    assert isinstance(again, Similarity)
    assert again.names == family.names
    assert np.array_equal(again.divergences, family.divergences)
    assert again.spectra[2].density.evaluate([1.0]) == family.spectra[2].density.evaluate([1.0])
