"""Free sums against closed forms, identities of free probability, and matrices that are added."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lambdahat as lh
from lambdahat.randommatrix import (
    Additive,
    FreeSum,
    MarchenkoPastur,
    Semicircle,
    edge_fluctuation,
    free_sum,
)
from tests.cases import with_eigenvalues
from tests.randommatrix.distances import distance, rigidity

LAWS = [
    Semicircle(0.7),
    MarchenkoPastur(2.0, 0.5),
    MarchenkoPastur(2.0, 1.0),
    MarchenkoPastur(0.5, 3.0),
]
each_law = pytest.mark.parametrize("law", LAWS, ids=repr)
COUNT = 400


def gauss(law) -> tuple[np.ndarray, np.ndarray]:
    """A Gauss–Chebyshev rule for the law's density, without the atom: exponentially good off the
    real axis.
    """
    angle = np.arange(1, COUNT + 1) * math.pi / (COUNT + 1)
    low, high = law.edges
    nodes = (low + high) / 2 - (high - low) / 2 * np.cos(angle)
    return nodes, law.density(nodes) * (high - low) / 2 * np.sin(angle) * math.pi / (COUNT + 1)


def integral(found: FreeSum, function) -> np.ndarray:
    """∫f of the whole sum, interval by interval, and its atoms; f may have rows."""
    total = sum(mass * function(np.array([place]))[..., 0] for place, mass in found.atoms)
    for low, high in found.edges:
        middle, half = (low + high) / 2, (high - low) / 2
        angle = (np.arange(2000) + 0.5) * math.pi / 2000
        x = middle - half * np.cos(angle)
        total += (
            (function(x) * found.density(x) * half * np.sin(angle)).sum(axis=-1) * math.pi / 2000
        )
    return np.asarray(total)


@each_law
def test_of_one_point_is_the_law_shifted(law):
    low, high = law.edges
    found, x = free_sum(1.5, law), np.linspace(low - 0.4, high + 0.4, 401)
    assert found.edges == (pytest.approx((low + 1.5, high + 1.5), abs=1e-12),)
    assert np.allclose(found.density(x + 1.5), law.density(x), rtol=1e-10, atol=1e-12)
    assert np.allclose(found.cdf(x + 1.5), law.cdf(x), atol=1e-13)
    assert np.allclose(found.stieltjes(x + 1.5), law.stieltjes(x), rtol=1e-8)
    assert found.atoms == (((1.5, pytest.approx(law.atom)),) if law.atom else ())
    assert found.edge_slope == pytest.approx(law.edge_slope)
    assert found.moment(3) == pytest.approx(
        sum(math.comb(3, k) * 1.5 ** (3 - k) * law.moment(k) for k in range(4))
    )


def test_two_semicircles_are_one():
    x, whole = np.linspace(-2.9, 2.9, 201), Semicircle(math.hypot(0.8, 1.1))
    nodes, weights = gauss(Semicircle(0.8))
    found = free_sum(nodes, Semicircle(1.1), weights)
    assert np.allclose(found.density(x), whole.density(x), atol=1e-4)
    inner = np.abs(x) < 2.4
    assert np.allclose(found.density(x)[inner], whole.density(x)[inner], atol=1e-10)
    assert found.edges[0] == pytest.approx(whole.edges, abs=1e-4)
    assert found.edge_slope == pytest.approx(whole.edge_slope, rel=1e-2)


@pytest.mark.parametrize(("first", "second"), [(0.3, 0.5), (0.5, 4.0)])
def test_two_laws_of_marchenko_and_pastur_with_one_jump_are_one(first, second):
    """Free Poisson laws of jump J = qσ² and rate 1/q: rates add."""
    jump, rate = 1.4, 1 / first + 1 / second
    nodes, weights = gauss(MarchenkoPastur(jump / first, first))
    found = free_sum(nodes, MarchenkoPastur(jump / second, second), weights)
    whole = MarchenkoPastur(jump * rate, 1 / rate)
    low, high = whole.edges
    x = np.linspace(low + 0.2 * (high - low), high - 0.2 * (high - low), 101)
    assert np.allclose(found.density(x), whole.density(x), rtol=1e-8)
    assert np.allclose(found.cdf(x), whole.cdf(x), atol=1e-6)
    assert (found.edges[0][0], found.edges[-1][1]) == pytest.approx((low, high), rel=1e-3)


@each_law
def test_mass_and_moments_are_the_free_cumulant_sums(law):
    found = free_sum([-2.0, 0.3, 0.5, 4.0], law, [0.1, 0.5, 0.2, 0.2])
    assert sum(found.masses) + sum(mass for _, mass in found.atoms) == pytest.approx(1.0, abs=1e-13)
    powers = integral(found, lambda x: x ** np.arange(7)[:, None])
    assert powers == pytest.approx([found.moment(order) for order in range(7)], rel=3e-5)
    mean, bare = 0.1 * -2.0 + 0.5 * 0.3 + 0.2 * 0.5 + 0.2 * 4.0, found.weights @ found.nodes**2
    assert found.moment(1) == pytest.approx(mean + law.moment(1))
    spread = bare - mean**2 + law.moment(2) - law.moment(1) ** 2
    assert found.moment(2) - found.moment(1) ** 2 == pytest.approx(spread)


@pytest.mark.parametrize("half", [0.2, 0.99, 1.01, 3.0])
def test_two_points_and_a_semicircle_split_where_the_closed_form_says(half):
    """(u² + a²)s² = (u² − a²)² at the edges x = u + s²u/(u² − a²); apart for a > s."""
    found, scale = free_sum([-half, half], Semicircle(1.0)), 1.0
    squares = (
        2 * half**2 + scale**2 + np.array([1, -1]) * scale * math.sqrt(8 * half**2 + scale**2)
    ) / 2
    u = np.sqrt(squares[squares > 0])
    exact = np.abs(u + scale**2 * u / (u**2 - half**2))
    assert len(found.edges) == (2 if half > 1 else 1)
    assert np.allclose(np.sort(np.ravel(found.edges)), np.sort([*exact, *-exact]), atol=1e-9)
    assert found.masses == pytest.approx([1 / len(found.edges)] * len(found.edges))


def test_a_cusp_is_seen_where_two_halves_touch():
    """a = s: S³ ∝ x at 0, so that ρ grows as |x|^⅓."""
    found = free_sum([-1.0, 1.0], Semicircle(1.0))
    small, large = found.density([1e-9, 1e-6])
    assert large / small == pytest.approx(10.0, rel=1e-3)


@each_law
@pytest.mark.parametrize("seed", range(3))
def test_cdf_density_and_transform_agree(law, seed):
    rng = np.random.default_rng(seed)
    found = free_sum(rng.normal(scale=3.0, size=30), law, rng.dirichlet(np.full(30, 0.3)))
    for low, high in found.edges:
        x = np.linspace(low, high, 9)[1:-1]
        step = 1e-3 * (high - low)
        assert np.allclose(
            (found.cdf(x + step) - found.cdf(x - step)) / (2 * step), found.density(x), rtol=1e-3
        )
    beyond = found.edges[-1][1] + 1.0
    whole = integral(found, lambda x: 1 / (beyond - x))
    assert complex(found.stieltjes(beyond)) == pytest.approx(whole, rel=1e-3)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=12),
    st.floats(1e-3, 1e3),
    st.sampled_from([None, 0.05, 1.0, 7.0]),
)
def test_any_spectrum_gives_a_distribution(nodes, size, ratio):
    law = Semicircle(size) if ratio is None else MarchenkoPastur(size, ratio)
    found = free_sum(nodes, law)
    ends = np.ravel(found.edges)
    assert (np.diff(ends) > 0).all()
    assert sum(found.masses) + sum(mass for _, mass in found.atoms) == pytest.approx(1.0, abs=1e-9)
    x = np.linspace(ends[0] - 1, ends[-1] + 1, 60)
    assert (np.diff(found.cdf(x)) > -1e-9).all()
    omega = found._secular.preimage(x)
    back = omega + found.law.r_transform(
        (found.weights / (omega[:, None] - found.nodes)).sum(axis=1)
    )
    assert np.allclose(back, x, atol=1e-6 * np.abs(ends).max())
    assert (omega.imag >= 0).all()


@pytest.mark.parametrize("spike", [1.2, 5.0, -2.0])
def test_a_spike_on_a_semicircle_is_the_classical_one(spike):
    scale = 0.9
    (outlier,) = free_sum(0.0, Semicircle(scale), spikes=[0.5, spike, -0.8]).outliers
    assert outlier.spike == spike
    assert outlier.value == pytest.approx(spike + scale**2 / spike)
    assert outlier.overlap == pytest.approx(1 - scale**2 / spike**2)


def test_the_additive_model_is_the_outside_of_a_free_sum():
    """The other implementation, which knows no density: outer edges, outliers, overlaps,
    Tracy–Widom units.
    """
    nodes, weights, spikes = (
        np.array([-1.0, 0.2, 2.0]),
        np.array([0.2, 0.5, 0.3]),
        np.array([5.0, -4.0]),
    )
    found, model = (
        free_sum(nodes, Semicircle(0.6), weights, spikes),
        Additive(0.6, nodes, weights, dimension=100),
    )
    assert (found.edges[0][0], found.edges[-1][1]) == pytest.approx(model.edges)
    assert [outlier.value for outlier in found.outliers] == pytest.approx(model.outlier(spikes))
    assert [outlier.overlap for outlier in found.outliers] == pytest.approx(model.overlap(spikes))
    assert edge_fluctuation(found, 100)[1] == pytest.approx(model.edge_scales[1])


def test_a_spike_on_marchenko_and_pastur_moves_by_their_r_transform():
    law = MarchenkoPastur(2.0, 0.5)
    first, second = free_sum(0.0, law, spikes=[4.0, -3.0, 1.5]).outliers
    assert (first.spike, second.spike) == (4.0, -3.0)
    for outlier in (first, second):
        assert outlier.value == pytest.approx(
            outlier.spike + complex(law.r_transform(1 / outlier.spike)).real
        )
        assert complex(law.stieltjes(outlier.value)) == pytest.approx(1 / outlier.spike)  # Eq. 5.22
        assert outlier.overlap == pytest.approx(1 - 0.5 * 2.0**2 / (outlier.spike - 0.5 * 2.0) ** 2)


def test_a_spike_of_vanishing_weight_is_the_limit_of_a_small_one():
    law, spike = MarchenkoPastur(1.0, 0.5), 6.0
    (outlier,) = free_sum([0.0, 1.0], law, spikes=spike).outliers
    lump = free_sum([0.0, 1.0, spike], law, [0.5, 0.5, 1e-8])
    assert len(lump.edges) == 2
    assert np.mean(lump.edges[1]) == pytest.approx(outlier.value, abs=1e-5)
    assert lump.masses[1] == pytest.approx(1e-8, rel=1e-5)


SIZE = 500


@pytest.mark.parametrize(
    "law", [Semicircle(0.7), MarchenkoPastur(1.0, 0.5), MarchenkoPastur(0.5, 2.5)], ids=repr
)
def test_sums_of_matrices_follow_the_free_sum(law):
    """Bulk to O(1/P), and the mean outlier and overlap of several matrices within their standard
    errors.
    """
    bulk = np.sort(
        np.concatenate(
            [np.zeros(SIZE // 2), np.linspace(0.5, 3, SIZE // 4), np.full(SIZE // 4, -3.0)]
        )
    )
    spike = 9.0
    found = free_sum(bulk, law, spikes=[spike])
    (outlier,) = found.outliers
    known = torch.diag(torch.as_tensor(np.append(bulk[:-1], spike)))
    tops, overlaps, errors = [], [], []
    for seed in range(8):
        values, vectors = torch.linalg.eigh(known + law.sample(SIZE, seed))
        tops.append(float(values[-1]))
        overlaps.append(float(vectors[-1, -1]) ** 2)
        errors.append(distance(values[:-1].numpy(), found.cdf))
    assert np.median(errors) < rigidity(SIZE)
    for seen, exact in ((tops, outlier.value), (overlaps, outlier.overlap)):
        error = np.std(seen, ddof=1) / math.sqrt(len(seen))
        assert abs(np.mean(seen) - exact) < 4 * error + 2 / SIZE * abs(exact)


@pytest.mark.slow
@pytest.mark.parametrize("law", [Semicircle(1.0), MarchenkoPastur(1.0, 2.0)], ids=repr)
def test_sums_of_large_matrices_follow_the_free_sum(law):
    size, spike = 4000, 8.0
    bulk = np.repeat([-2.0, 0.0, 3.0], [1000, 2000, 1000])
    found = free_sum(bulk, law, spikes=[spike])
    known = torch.diag(torch.as_tensor(np.append(bulk[:-1], spike)))
    values = torch.linalg.eigvalsh(known + law.sample(size)).numpy()
    assert distance(values[:-1], found.cdf) < rigidity(size)
    assert values[-1] == pytest.approx(found.outliers[0].value, abs=5 / math.sqrt(size))


def test_a_measured_spectrum_brings_its_outliers_as_spikes():
    values = np.concatenate([np.linspace(-1, 1, 398), [-7.0, 9.0]])
    measured = lh.spectrum(lh.operator(with_eigenvalues(values)), depth=60, probes=3)
    noise = Semicircle(1.5)
    found = free_sum(measured, noise)
    exact = free_sum(values[:-2], noise, spikes=[-7.0, 9.0])
    assert [outlier.spike for outlier in found.outliers] == pytest.approx([9.0, -7.0], abs=1e-6)
    assert found.edges[0] == pytest.approx(exact.edges[0], rel=0.02)
    assert [o.value for o in found.outliers] == pytest.approx(
        [o.value for o in exact.outliers], rel=0.01
    )
    x = np.linspace(-3, 3, 7)
    assert np.allclose(found.density(x), exact.density(x), atol=0.005)


def test_a_spectrum_known_to_its_last_eigenvalue_is_bulk():
    measured = lh.spectrum(
        lh.operator(torch.diag(torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64))), depth=3
    )
    found = free_sum(measured, Semicircle(0.1))
    assert found.spikes == ()
    assert len(found.edges) == 3


def test_equal_eigenvalues_share_one_node():
    found = free_sum([2.0, 1.0, 2.0, 3.0], Semicircle(1.0), [1.0, 1.0, 1.0, 0.0])
    assert found.nodes.tolist() == [1.0, 2.0]
    assert found.weights == pytest.approx([1 / 3, 2 / 3])


S = Semicircle(1.0)
MISUSES = {
    "no law": (
        lambda: free_sum([1.0], 1.0),
        TypeError,
        "law must be a Semicircle or MarchenkoPastur, got 1.0",
    ),
    "no eigenvalues": (
        lambda: free_sum([], S),
        ValueError,
        r"spectrum must hold eigenvalues \(n,\)",
    ),
    "a matrix": (
        lambda: free_sum(np.eye(2), S),
        ValueError,
        r"spectrum must hold eigenvalues \(n,\), got ndarray of",
    ),
    "NaN": (lambda: free_sum([math.nan], S), ValueError, "spectrum must be finite"),
    "short weights": (
        lambda: free_sum([1.0, 2.0], S, [1.0]),
        ValueError,
        r"weights must have shape \(2,\)",
    ),
    "negative weights": (
        lambda: free_sum([1.0, 2.0], S, [1.0, -1.0]),
        ValueError,
        "weights must be .*none negative",
    ),
    "weights of 0": (lambda: free_sum([1.0], S, [0.0]), ValueError, "weights must .*not all 0"),
    "infinite spike": (
        lambda: free_sum([1.0], S, spikes=math.inf),
        ValueError,
        "spikes must be finite",
    ),
    "density of NaN": (
        lambda: free_sum([1.0], S).density(math.nan),
        ValueError,
        "x must be finite",
    ),
    "half a moment": (
        lambda: free_sum([1.0], S).moment(0.5),
        TypeError,
        "order must be an integer",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_named_with_its_cure(name):
    call, error, pattern = MISUSES[name]
    with pytest.raises(error, match=pattern):
        call()
