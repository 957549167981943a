"""The semicircle and Marchenko–Pastur laws against closed forms, quadrature, SciPy and matrices
of their ensembles.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.integrate import quad

from lambdahat.randommatrix import MarchenkoPastur, Semicircle
from lambdahat.randommatrix.free_sums import cumulants_of, moments_of
from tests.randommatrix.distances import distance, rigidity

LAWS = [
    Semicircle(1.0),
    Semicircle(0.3),
    MarchenkoPastur(),
    MarchenkoPastur(2.0, 0.5),
    MarchenkoPastur(0.7, 3.0),
    MarchenkoPastur(1e-3, 0.02),
]
Z = np.array([0.4 + 0.3j, -1.0 - 0.2j, 5.0 + 1e-3j, 0.1 + 2.0j])
each_law = pytest.mark.parametrize("law", LAWS, ids=repr)


def integral(law, function):
    """∫f·ρ by an angle that takes the square roots off both edges, and the atom's share."""
    low, high = law.edges
    middle, half = (low + high) / 2, (high - low) / 2

    def at(angle):
        x = middle - half * math.cos(angle)
        return function(x) * float(law.density(x)) * half * math.sin(angle)

    return quad(at, 0, math.pi, epsabs=1e-13, epsrel=1e-12, limit=400)[0] + law.atom * function(0.0)


@each_law
def test_mass_is_one_and_moments_are_integrals(law):
    size = max(law.edges)
    for order in range(9):
        assert law.moment(order) / size**order == pytest.approx(
            integral(law, lambda x, k=order: (x / size) ** k), abs=1e-9
        )


def test_moments_are_catalan_and_narayana_numbers():
    assert [Semicircle(2.0).moment(k) / 2.0**k for k in range(11)] == [
        1,
        0,
        1,
        0,
        2,
        0,
        5,
        0,
        14,
        0,
        42,
    ]
    assert [MarchenkoPastur().moment(k) for k in range(6)] == [1, 1, 2, 5, 14, 42]
    q = 0.25
    assert MarchenkoPastur(3.0, q).moment(4) == pytest.approx(81 * (1 + 6 * q + 6 * q**2 + q**3))


@each_law
def test_cdf_is_the_integral_of_the_density(law):
    low, high = law.edges
    for share in (0.1, 0.35, 0.5, 0.9):
        x, step = low + share * (high - low), 1e-5 * (high - low)
        rise = (law.cdf(x + step) - law.cdf(x - step)) / (2 * step)
        assert rise == pytest.approx(float(law.density(x)), rel=1e-6)
    assert law.cdf([high, high + 1]) == pytest.approx(1.0)
    assert law.cdf(-1e-9 + min(low, 0.0)) == pytest.approx(0.0, abs=1e-12)
    if low > 1e-9:
        assert law.cdf([0.0, low]) == pytest.approx(law.atom)
    assert (law.density([low - 0.1, high + 0.1]) == 0).all()


def test_semicircle_is_scipys():
    x, other = np.linspace(-1, 1, 51), stats.semicircular(scale=0.8)
    assert np.allclose(Semicircle(0.4).density(x), other.pdf(x))
    assert np.allclose(Semicircle(0.4).cdf(x), other.cdf(x))


def test_a_square_matrix_has_a_density_that_grows_without_bound_at_zero():
    law = MarchenkoPastur(2.0, 1.0)
    assert law.density(0.0) == math.inf
    assert law.density(1e-12) == pytest.approx(math.sqrt(8.0) / (4 * math.pi * 1e-6))
    assert law.cdf(0.0) == 0


@each_law
def test_stieltjes_transform_is_the_integral(law):
    size = max(law.edges)
    for z in Z:
        real = integral(law, lambda x, z=z: (1 / (z - x / size)).real)
        imaginary = integral(law, lambda x, z=z: (1 / (z - x / size)).imag)
        assert complex(law.stieltjes(z * size)) * size == pytest.approx(
            complex(real, imaginary), rel=1e-7
        )


@each_law
def test_stieltjes_transform_on_the_axis_is_the_limit_from_above(law):
    low, high = law.edges
    x = np.linspace(low - 0.3, high + 0.4, 38)
    assert np.allclose(law.stieltjes(x), law.stieltjes(x + 1e-13j * high), rtol=1e-4)
    assert np.allclose(law.stieltjes(x).imag, -math.pi * law.density(x), atol=1e-12 / high)
    far = 1e9 * high
    assert complex(law.stieltjes(far)) == pytest.approx(1 / far + law.moment(1) / far**2, rel=1e-15)


def test_stieltjes_transform_sees_the_atom_to_full_precision():
    law, z = MarchenkoPastur(0.7, 3.0), 1e-12j
    assert complex(law.stieltjes(z) * z) == pytest.approx(2 / 3, abs=1e-11)


@each_law
def test_r_transform_inverts_the_stieltjes_transform_and_has_the_cumulants_as_its_series(law):
    size = max(law.edges)
    w = np.array([0.05, 0.08 - 0.05j, -0.1, -0.2 - 0.1j]) / size
    assert np.allclose(law.stieltjes(law.r_transform(w) + 1 / w) / w, 1, rtol=1e-9)
    series = sum(law.free_cumulant(k) * w ** (k - 1) for k in range(1, 60))
    assert np.allclose(law.r_transform(w), series, rtol=1e-10)
    slopes = (law.r_integral(w * (1 + 1e-6)) - law.r_integral(w * (1 - 1e-6))) / (2e-6 * w)
    assert np.allclose(slopes, law.r_transform(w), rtol=1e-6)


@each_law
def test_cumulants_belong_to_the_moments(law):
    moments = np.array([law.moment(k) for k in range(9)])
    cumulants = np.array([0.0, *(law.free_cumulant(k) for k in range(1, 9))])
    assert (
        np.abs(cumulants_of(moments) - cumulants) <= 1e-11 * np.abs(law.edges[1]) ** np.arange(9)
    ).all()
    assert np.allclose(moments_of(cumulants), moments, rtol=1e-12)


@each_law
def test_partial_fractions_are_the_r_transform_of_a_spectrum(law):
    rng = np.random.default_rng(0)
    nodes, weights = np.sort(rng.normal(size=12)), rng.dirichlet(np.ones(12))
    shift, residues, poles = law.partial_fractions(nodes, weights)
    bare = (weights / (Z[:, None] - nodes)).sum(axis=1)
    assert np.allclose(
        shift + (residues / (Z[:, None] - poles)).sum(axis=1), law.r_transform(bare), rtol=1e-10
    )
    assert (residues > 0).all()
    assert residues.sum() == pytest.approx(law.free_cumulant(2))


def eigenvalues(law, size, seed=0):
    return np.linalg.eigvalsh(law.sample(size, seed).numpy())


@pytest.mark.parametrize(
    "law", [Semicircle(0.3), MarchenkoPastur(2.0, 0.5), MarchenkoPastur(0.7, 3.0)], ids=repr
)
def test_matrices_of_the_ensemble_follow_the_law_to_one_in_their_size(law):
    size = 600
    assert distance(eigenvalues(law, size), law.cdf) < rigidity(size)


@pytest.mark.slow
@pytest.mark.parametrize(
    "law", [Semicircle(1.0), MarchenkoPastur(1.0, 0.5), MarchenkoPastur(1.0, 2.0)], ids=repr
)
def test_large_matrices_follow_the_law_to_one_in_their_size(law):
    size = 4000
    assert distance(eigenvalues(law, size), law.cdf) < rigidity(size)


def test_samples_have_the_exact_moments_of_their_ensemble():
    """E tr M²/P = s²(1 + 1/P) with variance 4s⁴(P + 1)/P³, and σ⁴(1 + q + 1/T); tr M/P has
    variance 2σ⁴/(PT).
    """
    size, count, scale = 40, 200, 0.3
    squares = (
        np.array(
            [float(Semicircle(scale).sample(size, seed).square().sum()) for seed in range(count)]
        )
        / size
    )
    error = scale**2 * math.sqrt(4 * (size + 1) / size**3 / count)
    assert abs(squares.mean() - scale**2 * (1 + 1 / size)) < 3.5 * error
    assert squares.std(ddof=1) == pytest.approx(
        error * math.sqrt(count), rel=3.5 / math.sqrt(2 * count)
    )
    law, columns = MarchenkoPastur(2.0, 0.5), 80
    made = [law.sample(size, seed) for seed in range(count)]
    means = np.array([float(matrix.trace()) for matrix in made]) / size
    squares = np.array([float(matrix.square().sum()) for matrix in made]) / size
    assert abs(means.mean() - 2.0) < 3.5 * math.sqrt(2 * 4.0 / (size * columns * count))
    assert abs(squares.mean() - 4 * (1.5 + 1 / columns)) < 3.5 * squares.std() / math.sqrt(count)


def test_samples_are_symmetric_and_depend_on_the_seed_only():
    for law in (Semicircle(1.0), MarchenkoPastur(1.0, 3.0)):
        matrix = law.sample(10, 3)
        assert matrix.dtype == torch.float64
        assert torch.equal(matrix, matrix.T)
        assert torch.equal(matrix, law.sample(10, 3))
        assert not torch.equal(matrix, law.sample(10, 4))
    assert torch.linalg.matrix_rank(MarchenkoPastur(1.0, 3.0).sample(30)) == 10


MISUSES = {
    "no noise": (lambda: Semicircle(0.0), ValueError, "scale must be a finite number above 0"),
    "a scale as text": (lambda: Semicircle("1"), TypeError, "scale must be a number"),
    "negative variance": (
        lambda: MarchenkoPastur(-1.0),
        ValueError,
        "variance must be a finite number above 0",
    ),
    "no ratio": (lambda: MarchenkoPastur(ratio=0.0), ValueError, "ratio must .*P/T"),
    "half an order": (lambda: Semicircle(1.0).moment(1.5), TypeError, "order must be an integer"),
    "cumulant of order 0": (
        lambda: MarchenkoPastur().free_cumulant(0),
        ValueError,
        "order must be an integer of at l",
    ),
    "no dimension": (
        lambda: Semicircle(1.0).sample(0),
        ValueError,
        "dimension must be an integer of at least 1",
    ),
    "no column": (
        lambda: MarchenkoPastur(1.0, 9.0).sample(3),
        ValueError,
        "dimension must be at least ratio/2",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_named_with_its_cure(name):
    call, error, pattern = MISUSES[name]
    with pytest.raises(error, match=pattern):
        call()
