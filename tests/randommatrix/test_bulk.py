"""Bulk edges and outliers of spectra that are known: Wigner and Wishart matrices with
eigenvalues put beside them.
"""

import numpy as np
import pytest
import scipy.sparse
from scipy.linalg import eigvalsh_tridiagonal

import lambdahat as lh
from lambdahat._core.rng import generator
from lambdahat.randommatrix import BulkFit, fit_bulk
from lambdahat.randommatrix.bulk import bulk_within, continuous_region
from lambdahat.randommatrix.predictions import view_of
from lambdahat.results import Spectrum, Status

SEEDS = 8


def wigner(size, rng):
    """The eigenvalues of a Gaussian orthogonal matrix with edges ±2, from its tridiagonal form
    (Dumitriu, Edelman).
    """
    below = np.sqrt(rng.chisquare(np.arange(size - 1, 0, -1)) / size)
    return eigvalsh_tridiagonal(rng.normal(0, np.sqrt(2 / size), size), below)


def wishart(size, rng, ratio=0.25):
    """Those of a sample covariance with edges (1 ± √ratio)², likewise."""
    samples = int(size / ratio)
    first = np.sqrt(rng.chisquare(samples - np.arange(size)))
    second = np.sqrt(rng.chisquare(np.arange(size - 1, 0, -1)))
    diagonal = first**2
    diagonal[1:] += second**2
    return eigvalsh_tridiagonal(diagonal / samples, first[:-1] * second / samples)


def seen(values, depth, probes=1, seed=0):
    return lh.spectrum(
        lh.operator(scipy.sparse.diags(values).tocsr()), depth=depth, probes=probes, seed=seed
    )


CASES = {
    "Wigner, its edge resolved": (wigner, 300, 60, (-2.0, 2.0), [2.3, 3.0, 5.0, -2.6]),
    "Wigner, its edge partly resolved": (wigner, 1000, 100, (-2.0, 2.0), [2.3, 3.0, 5.0, -2.6]),
    "Wigner, its edge unresolved": (wigner, 2000, 40, (-2.0, 2.0), [2.3, 3.0, 5.0, -2.6]),
    "Wishart": (wishart, 600, 60, (0.25, 2.25), [2.7, 3.0, 8.0]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("spiked", [True, False])
def test_outliers_are_counted_and_edges_found(case, spiked):
    draw, size, depth, edges, spikes = CASES[case]
    spikes = spikes if spiked else []
    counts, scores, edgeless = [], [], 0
    for seed in range(SEEDS):
        rng = np.random.default_rng(generator(seed, "bulk").initial_seed())
        found = fit_bulk(seen(np.r_[draw(size, rng), spikes], depth, seed=seed))
        counts.append(len(found.outliers))
        assert (found.status is Status.NO_OUTLIER) == (not found.outliers)
        edgeless += spiked and found.status is Status.NO_EDGE
        if counts[-1] == len(spikes):
            values = sorted(float(each) for each in found.outliers)
            np.testing.assert_allclose(values, sorted(spikes), atol=1e-3)
        ends = zip((found.lower, found.upper), edges, strict=True)
        scores += [(float(end) - true) / float(end.stderr) for end, true in ends]
    assert np.mean(np.array(counts) == len(spikes)) >= 0.85, counts
    assert edgeless <= 2  # one outlier alone at an end is told from a tail by one gap
    # 16 of them: 1 ± 0.18 if their errors were known
    assert np.sqrt(np.mean(np.square(scores))) < 1.6, scores


TAILS = {
    "Laplace": lambda rng: rng.laplace(size=5000),
    "Pareto": lambda rng: rng.pareto(1.0, size=5000),
    "lognormal": lambda rng: np.exp(2 * rng.normal(size=5000)),
}


@pytest.mark.parametrize("law", TAILS)
def test_a_bulk_without_an_edge_is_told(law):
    """Independent eigenvalues of heavy tails have no edge and no outliers: if any are called so,
    the status says it.
    """
    told = []
    for seed in range(100, 120):
        found = fit_bulk(seen(TAILS[law](np.random.default_rng(seed)), 100, seed=seed))
        told.append(found.status in (Status.NO_EDGE, Status.NO_OUTLIER))
    assert sum(told) >= 10


def test_several_probes_agree_on_outliers():
    spikes = [3.0, 2.6]
    values = np.r_[wigner(500, np.random.default_rng(0)), spikes]
    found = fit_bulk(seen(values, 60, probes=6))
    np.testing.assert_allclose([float(each) for each in found.outliers], spikes, atol=1e-3)
    assert (found.confidences > 0.99).all()
    np.testing.assert_array_less(abs(np.log(found.masses)), np.log(6))  # χ²₆/6 each


def test_all_eigenvalues_of_a_small_matrix():
    values = np.r_[np.linspace(-1, 1, 40), 1.5]
    found = fit_bulk(seen(values, 41))
    assert [round(float(each), 6) for each in found.outliers] == [1.5]
    assert float(found.upper) == pytest.approx(1.0, abs=0.06)


def test_a_gap_within_the_spacing_is_none():
    found = fit_bulk(seen(np.linspace(-1, 1, 60), 60))
    assert found.outliers == ()
    assert found.status is Status.NO_OUTLIER


def test_outliers_further_out_lend_no_width_to_the_bulk():
    values = np.r_[np.linspace(-1, 1, 400), 1.2, 100.0, 1000.0]
    found = fit_bulk(seen(values, 80))
    assert [round(float(each), 6) for each in found.outliers] == [1000.0, 100.0, 1.2]


def test_the_rule_of_figure_6_1_ends_where_weights_first_drop():
    """κ/P = 0.05; the heavy node at 3 stands beyond a light one."""
    nodes = np.array([[-1.0, -0.5, 0.0, 1.0, 2.0, 3.0]])
    weights = np.array([[0.01, 0.1, 0.6, 0.1, 0.04, 0.15]])
    one = Spectrum(nodes, weights, np.full((1, 6), 0.5), 100)
    assert fit_bulk(one).weight_edges == continuous_region(one) == (-0.5, 1.0)
    assert fit_bulk(one, kappa=0.5).weight_edges == (-1.0, 3.0)
    two = Spectrum(
        np.concatenate([nodes, nodes + 1]), weights.repeat(2, 0), np.full((2, 6), 0.5), 100
    )
    assert continuous_region(two) == (0.0, 1.5)


def test_each_eigenvalue_counts_once_whatever_the_probes():
    """Three outliers of a hundred eigenvalues, by probes whose nodes for them differ in the last
    digits.
    """
    values = np.r_[np.linspace(-1, 1, 97), 6.0, -3.0, 4.0]
    for seed in range(5):
        spectrum = seen(values, 40, probes=3, seed=seed)
        view = view_of(spectrum)
        assert np.allclose(
            view.eigenvalues, sorted({round(x, 6) for x in view.eigenvalues}, reverse=True)
        )
        assert np.isclose(len(view.eigenvalues) + view.counts.sum(), 100)
        bulk, _ = bulk_within(spectrum, view.eigenvalues)
        assert np.abs(bulk).max() <= 1 + 1e-9


def test_the_bulk_of_a_matrix_of_low_rank_is_its_null_space():
    values = np.r_[np.zeros(200), np.linspace(1, 4, 10)]
    found = fit_bulk(seen(values, 60))
    np.testing.assert_allclose(
        sorted(float(each) for each in found.outliers), values[200:], atol=1e-8
    )
    assert float(found.lower) == pytest.approx(0, abs=1e-6)
    assert float(found.upper) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("width", [0.0, 1e-6, 1e-4, 1e-3])
def test_outliers_that_are_nearly_equal_are_all_apart(width):
    values = np.r_[wigner(1000, np.random.default_rng(1)), 3 + width * np.arange(9)]
    found = fit_bulk(seen(values, 50))
    assert len(found.outliers) >= 1
    assert all(abs(float(each) - 3) < 0.01 for each in found.outliers)
    assert float(found.upper) == pytest.approx(2, abs=0.05)
    if width == 0:
        assert len(found.outliers) == 1


def test_padding_of_a_krylov_space_that_ended_is_ignored():
    values = np.r_[np.repeat(np.linspace(-1, 1, 30), 4), 5.0]
    spectrum = seen(values, 60)
    assert (spectrum.weights == 0).any() or spectrum.nodes.shape[1] < 60
    assert [round(float(each), 6) for each in fit_bulk(spectrum).outliers] == [5.0]


def test_it_is_saved_and_loaded(tmp_path):
    found = fit_bulk(seen(np.r_[np.linspace(-1, 1, 100), 3.0], 40))
    loaded = BulkFit.load(found.save(tmp_path / "bulk"))
    assert str(loaded) == str(found)
    assert "1 outlier" in str(found)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s: fit_bulk(s.nodes), TypeError, "spectrum must be a Spectrum.*lh.spectrum"),
        (lambda s: fit_bulk(s, level=1.0), ValueError, r"level must lie in \(0, 1\), got 1.0"),
        (lambda s: fit_bulk(s, kappa=0.0), ValueError, "kappa must be a finite number above 0"),
        (
            lambda s: fit_bulk(seen(np.arange(9.0), 1)),
            ValueError,
            "spectrum must have two nodes or more.*raise depth",
        ),
    ],
)
def test_misuse(call, error, message):
    with pytest.raises(error, match=message):
        call(seen(np.arange(20.0), 10))
