"""Maximum entropy against closed forms: densities whose moments are known, their entropies and
divergences.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.polynomial import chebyshev, legendre
from scipy import stats

from lambdahat import maxent
from lambdahat.estimators import moments, spectrum
from lambdahat.maxent.bases import chebyshev_table, least_squares, legendre_in_chebyshev, product
from lambdahat.operators import operator
from lambdahat.report.figures import plot
from lambdahat.results import Density, Result, Status
from tests.cases import with_eigenvalues

SEMICIRCLE = stats.semicircular
RNG = np.random.default_rng(0)


def semicircle(count: int) -> np.ndarray:
    """Chebyshev moments of 2/π·√(1 − x²): 1, 0, −½, 0, 0, …"""
    values = np.zeros(count + 1)
    values[0], values[2] = 1.0, -0.5
    return values


def of_samples(samples: np.ndarray, count: int) -> np.ndarray:
    return chebyshev.chebvander(samples, count).mean(axis=0)


def test_semicircle_divergence_falls_to_3e_5_by_30_moments():
    """KL(semicircle‖p_m) = S(p_m) − S(semicircle), for log p_m is a polynomial whose moments
    both have.
    """
    exact = math.log(math.pi) - 0.5
    divergences = []
    for count in range(2, 31, 2):
        found = maxent.fit(semicircle(count))
        assert found.status is Status.CONVERGED
        divergence = found.weights @ (
            SEMICIRCLE.pdf(found.grid) * (SEMICIRCLE.logpdf(found.grid) - np.log(found.values))
        )
        assert divergence == pytest.approx(found.entropy() - exact, abs=1e-7)
        divergences.append(divergence)
    assert (np.diff(divergences) < 0).all()
    assert divergences[-1] < 3e-5


def test_two_hundred_moments_of_a_semicircle():
    found = maxent.fit(semicircle(200))
    assert found.status is Status.CONVERGED
    assert np.abs(found.residuals).max() <= 1e-8
    inside = np.abs(found.grid) < 0.9
    assert np.allclose(found.values[inside], SEMICIRCLE.pdf(found.grid[inside]), rtol=1e-2)
    assert found.evaluate([-1.5, 1.5]).tolist() == [0.0, 0.0]


def test_two_hundred_noisy_moments_with_an_atom():
    """A third of the eigenvalues is one value, and there are gaps: nearly atoms, and matched
    within their errors.
    """
    values = np.concatenate([RNG.uniform(-0.8, 0.5, 2000), np.full(1000, 0.1)])
    found = maxent.fit(of_samples(values, 200), stderr=np.append(0.0, np.full(200, 1e-3)))
    assert found.status is Status.CONVERGED
    assert np.abs(found.residuals).max() <= 1e-3
    assert found.integrate(0.05, 0.15) == pytest.approx(
        np.mean(np.abs(values - 0.1) < 0.05), abs=0.01
    )


def test_an_exponential_polynomial_is_found_again():
    """The density of maximum entropy with the moments of exp(polynomial) is that density."""
    alpha = np.array([0.0, 1.0, -2.0, 0.5, 1.5])
    x, w = legendre.leggauss(200)
    density = np.exp(-chebyshev.chebval(x, alpha))
    mass = w * density / (w @ density)
    found = maxent.fit(mass @ chebyshev.chebvander(x, 4), tol=1e-12)
    assert np.allclose(found.coefficients[1:], alpha[1:], atol=1e-9)
    assert found.coefficients[0] == pytest.approx(math.log(w @ density) - 1, abs=1e-9)
    assert np.allclose(found.evaluate(x), density / (w @ density), rtol=1e-9)


def test_one_moment_is_an_exponential_and_two_a_gaussian():
    rate, high = 3.0, 2.0
    mean = 1 / rate - high / math.expm1(rate * high)
    found = maxent.fit([1.0, mean - 1.0], "power", (0.0, high))
    expected = rate * np.exp(-rate * found.grid) / -math.expm1(-rate * high)
    assert np.allclose(found.values, expected, rtol=1e-7)
    narrow = maxent.fit([1.0, 0.0, 0.01], "power")
    assert np.allclose(narrow.values, stats.norm.pdf(narrow.grid, scale=0.1), atol=1e-6)


@pytest.mark.parametrize("basis", ["power", "legendre"])
def test_the_basis_does_not_change_the_density(basis):
    samples = RNG.beta(2, 4, 3000) * 2 - 1
    table = {"power": np.polynomial.polynomial.polyvander, "legendre": legendre.legvander}[basis]
    first = maxent.fit(of_samples(samples, 8), bounds=(2.0, 5.0))
    second = maxent.fit(table(samples, 8).mean(axis=0), basis, (2.0, 5.0))
    assert np.allclose(first.coefficients, second.coefficients, atol=1e-4)
    assert first.symmetric_kl(second) <= 1e-9


def test_legendre_tables_are_inverse():
    assert np.allclose(
        chebyshev_table("legendre", 60) @ legendre_in_chebyshev(60), np.eye(61), atol=1e-12
    )


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12))
def test_entropy_never_grows_with_a_moment(seed, count):
    rng = np.random.default_rng(seed)
    samples = np.concatenate([rng.beta(*rng.uniform(1, 6, 2), 300), rng.uniform(0, 1, 100)]) * 2 - 1
    values = of_samples(samples, count + 1)
    less, more = (maxent.fit(values[:k]) for k in (count + 1, count + 2))
    assert less.status is more.status is Status.CONVERGED
    assert more.entropy() <= less.entropy() + 1e-7
    # and the difference is the divergence, for both share the moments of the smaller one
    assert less.entropy() - more.entropy() == pytest.approx(more.kl(less), abs=1e-6)


def test_closed_forms_agree_with_quadrature():
    first = maxent.fit(of_samples(RNG.beta(2, 5, 2000) * 2 - 1, 10), bounds=(0.0, 3.0))
    second = maxent.fit(of_samples(RNG.beta(3, 2, 2000) * 2 - 1, 6), bounds=(0.0, 3.0))
    assert first.entropy() == pytest.approx(Density.entropy(first), abs=1e-10)
    assert first.kl(second) == pytest.approx(first.kl(second, numeric=True), abs=1e-9)
    assert second.kl(first) == pytest.approx(second.kl(first, numeric=True), abs=1e-9)
    assert first.symmetric_kl(second) == pytest.approx(
        first.symmetric_kl(second, numeric=True), abs=1e-9
    )
    assert first.symmetric_kl(second) == pytest.approx(
        (first.kl(second) + second.kl(first)) / 2, abs=1e-9
    )
    assert first.kl(first) == 0.0
    uniform = maxent.fit([1.0, 0.0], bounds=(0.0, 3.0))
    assert uniform.entropy() == pytest.approx(math.log(3.0), abs=1e-9)
    assert first.kl(uniform) == pytest.approx(uniform.entropy() - first.entropy(), abs=1e-9)


def test_divergence_on_other_bounds_is_by_quadrature():
    narrow = maxent.fit([1.0, 0.0], bounds=(0.0, 1.0))
    wide = maxent.fit([1.0, 0.0], bounds=(0.0, 2.0))
    assert narrow.kl(wide) == pytest.approx(math.log(2.0), abs=1e-9)
    assert wide.kl(narrow) == math.inf


def test_density_integrals_and_quantiles():
    found = maxent.fit(semicircle(60), bounds=(-2.0, 2.0))
    wigner = stats.semicircular(scale=2.0)
    assert found.integral() == pytest.approx(1.0, abs=1e-12)
    assert found.integrate(-2.0, 0.0) == pytest.approx(0.5, abs=1e-8)
    assert found.integrate(-1.0, 1.0) == pytest.approx(wigner.cdf(1.0) - wigner.cdf(-1.0), abs=1e-3)
    levels = np.array([0.0, 0.05, 0.5, 0.9, 1.0])
    assert np.allclose(found.quantile(levels), wigner.ppf(levels), atol=2e-3)
    assert np.allclose(found.cumulative(found.quantile(levels)), levels, atol=1e-9)
    catalan = [1, 0, 1, 0, 2, 0, 5]  # of radius 2
    assert np.allclose(found.moments(6), catalan, atol=1e-7)
    assert found.expectation(np.cos) == pytest.approx(wigner.expect(np.cos), abs=1e-7)


def test_relative_entropy_to_the_truth_is_zero():
    """With the true density as prior its own moments change nothing; a flat prior is no prior."""
    prior = stats.beta(2, 5, loc=-1, scale=2)

    def floored(x):
        return prior.pdf(x) + 1e-12

    x, w = legendre.leggauss(400)
    values = (w * floored(x) / (w @ floored(x))) @ chebyshev.chebvander(x, 6)
    found = maxent.fit(values, prior=floored)
    assert found.relative_entropy() == pytest.approx(0.0, abs=1e-9)
    assert np.allclose(found.values, prior.pdf(found.grid), atol=1e-6)
    assert found.entropy() == pytest.approx(prior.entropy(), abs=1e-6)
    flat, none = maxent.fit(values, prior=np.ones_like), maxent.fit(values)
    assert np.allclose(flat.evaluate(x), none.evaluate(x), rtol=1e-8)
    assert flat.entropy() == pytest.approx(none.entropy(), abs=1e-9)
    assert flat.relative_entropy() == pytest.approx(none.entropy() - math.log(2.0), abs=1e-9)


def test_relative_entropy_is_the_least_divergence_from_the_prior():
    """Of all densities with given moments the one found has the least KL to the prior; a density
    is a prior too.
    """
    prior = maxent.fit(of_samples(RNG.beta(4, 2, 2000) * 2 - 1, 5))
    found = maxent.fit([1.0, -0.3], prior=prior)
    other = maxent.fit([1.0, -0.3])
    assert found.matched[1] == pytest.approx(-0.3, abs=1e-8)
    assert found.kl(prior) == pytest.approx(-found.relative_entropy(), abs=1e-6)
    assert found.kl(prior) < other.kl(prior)


def test_a_log_prior_resolves_many_decades():
    """q₀ = 1/λ on [1e-9, 1]: the mean of log λ is that of a log-uniform density where the
    moments say so.
    """
    low, decades = 1e-9, 9 * math.log(10.0)
    t, w = legendre.leggauss(2000)
    values = np.exp(np.log(low) + (t + 1) / 2 * decades)
    x = (values - (1 + low) / 2) / ((1 - low) / 2)
    found = maxent.fit(
        (w / 2) @ chebyshev.chebvander(x, 10), bounds=(low, 1.0), prior=lambda v: 1 / v
    )
    assert found.expectation(np.log) == pytest.approx(-decades / 2, rel=1e-6)
    assert found.relative_entropy() == pytest.approx(0.0, abs=1e-7)


def test_errors_of_the_moments_become_errors_of_the_density():
    """Densities fitted to moments drawn around the truth scatter as the error bar says."""
    errors = np.append(0.0, np.full(6, 1e-3))
    truth = maxent.fit(semicircle(6), stderr=errors)
    places = np.array([-0.7, 0.0, 0.4])
    draws = [
        maxent.fit(truth.targets + errors * RNG.standard_normal(7)).evaluate(places)
        for _ in range(200)
    ]
    promised = np.interp(places, truth.grid, truth.stderr)
    assert np.allclose(np.std(draws, axis=0), promised, rtol=0.2)


def test_sensitivity_is_the_derivative():
    values = of_samples(RNG.beta(2, 3, 1000) * 2 - 1, 5)
    slope = maxent.fit(values, tol=1e-12).sensitivity(np.exp)
    for k in range(1, 6):
        step = np.eye(6)[k] * 1e-5
        up, down = (
            maxent.fit(values + sign * step, tol=1e-12).expectation(np.exp) for sign in (1, -1)
        )
        assert slope[k - 1] == pytest.approx((up - down) / 2e-5, rel=1e-3, abs=1e-6)


def test_least_squares_share_what_columns_have_in_common():
    """Of all solutions the shortest: a column given twice has half of its coefficient in each
    place.
    """
    column, other = RNG.standard_normal((2, 40))
    rows = np.stack([column, other, column * (1 + 1e-15)], axis=1)
    assert least_squares(rows, 3 * column - other, 1e-13) == pytest.approx(
        [1.5, -1, 1.5], abs=1e-12
    )


def test_products_take_arrays_as_numpy_does():
    """Read-only, reversed or of single precision: torch by itself warns of the first and refuses
    the others.
    """
    matrix, vector = RNG.standard_normal((6, 4)), np.arange(4.0)
    fixed = matrix.copy()
    fixed.flags.writeable = False
    expected = pytest.approx((matrix * vector).sum(axis=1), abs=1e-14)
    assert product(fixed, vector) == expected
    assert product(matrix[:, ::-1], vector[::-1]) == expected
    assert product(matrix, vector.astype(np.float32)) == expected


def test_moments_of_a_matrix_give_its_density():
    eigenvalues = torch.cat([torch.linspace(0, 1, 300), torch.linspace(2, 2.5, 100)]).double()
    A = operator(with_eigenvalues(eigenvalues))
    found = maxent.fit(moments(A, 30, "legendre", probes=30, seed=1))
    assert found.status is Status.CONVERGED
    assert found.stderr.max() > 0
    assert found.integrate(-0.5, 1.5) == pytest.approx(0.75, abs=0.02)
    assert found.integrate(1.3, 1.7) < 0.01


def test_spectrum_smoothed_by_maximum_entropy_keeps_its_moments():
    """Theorem 2 (spectral thesis): a Gaussian kernel adds Σ_j C(m, 2j) E[u^2j] ⟨λ^(m−2j)⟩ to
    moment m; this none.
    """
    A = operator(with_eigenvalues(torch.linspace(1, 3, 200).double()))
    found = spectrum(A, depth=20, probes=4)
    exact = [float(found.moment(k)) for k in range(7)]
    smooth = found.density(smoothing="maxent", moments=12)
    assert smooth.status is Status.CONVERGED
    assert np.allclose(smooth.moments(6), exact, rtol=1e-5)
    width = 0.3
    kernel = found.density(np.linspace(-2, 6, 4001), width=width)
    for m in range(1, 7):
        gaussian = [width ** (2 * j) * math.prod(range(1, 2 * j, 2)) for j in range(m // 2 + 1)]
        bias = sum(
            math.comb(m, 2 * j) * gaussian[j] * exact[m - 2 * j] for j in range(1, m // 2 + 1)
        )
        assert kernel.moments(6)[m] == pytest.approx(exact[m] + bias, rel=1e-6)
    assert kernel.moments(6)[6] > 1.2 * exact[6]


def test_the_classical_algorithm_agrees_on_few_moments_and_stops_short_on_many():
    values = of_samples(RNG.beta(2, 3, 3000) * 2 - 1, 12)
    classical = maxent.fit_classical(values[:2], sweeps=5000, tol=1e-6)
    ours = maxent.fit(values[:2])
    assert classical.status is Status.CONVERGED
    assert classical.entropy() == pytest.approx(ours.entropy(), abs=1e-4)
    late = maxent.fit_classical(values, sweeps=300)
    assert late.status is Status.MISMATCH
    assert maxent.fit(values).entropy() < late.entropy()


def test_moments_of_atoms_are_said_not_to_match():
    """Moments of three atoms to order 20 belong to no density."""
    found = maxent.fit(of_samples(np.array([-0.7, 0.1, 0.6]), 20), tol=1e-10)
    assert found.status is Status.MISMATCH
    assert found.penalty > 0
    shares = [found.integrate(a - 0.05, a + 0.05) for a in (-0.7, 0.1, 0.6)]
    assert np.allclose(shares, 1 / 3, atol=1e-3)


@pytest.mark.parametrize("place", [-1.0, 1.0])
def test_an_atom_at_an_end_has_a_distribution(place):
    """The grid there is finer than the digits of λ."""
    found = maxent.fit(of_samples(np.array([place]), 20), bounds=(2.0, 4.0))
    end = 3.0 + place
    assert found.integrate(2.0, 4.0) == pytest.approx(1.0, abs=1e-12)
    assert np.allclose(found.quantile([0.1, 0.5, 0.9]), end, atol=1e-6)
    assert found.integrate(max(2.0, end - 1e-3), min(4.0, end + 1e-3)) == pytest.approx(
        1.0, abs=1e-6
    )


def test_cumulative_mass_is_that_of_the_density():
    """Against the integral of an exponential, the density of maximum entropy with one moment."""
    rate, high = 3.0, 2.0
    mean = 1 / rate - high / math.expm1(rate * high)
    found = maxent.fit([1.0, mean - 1.0], "power", (0.0, high), tol=1e-12)
    exact = np.expm1(-rate * found.grid) / math.expm1(-rate * high)
    assert np.allclose(found.cumulative(found.grid), exact, atol=1e-11)


def test_a_given_penalty_is_the_one_taken():
    """The minimum of F + ½v‖α‖² has the mismatch vα, wherever plain Newton would have stopped."""
    values = of_samples(RNG.beta(2, 3, 500) * 2 - 1, 12)
    for penalty in (1e-2, 3e-5, 1e-7):
        found = maxent.fit(values, penalty=penalty)
        assert found.penalty == penalty
        assert np.allclose(-found.residuals[1:], penalty * found.coefficients[1:], atol=1e-9)
    assert maxent.fit(values, penalty=0).penalty == 0
    assert maxent.fit(values, penalty=1e-12).symmetric_kl(maxent.fit(values)) < 1e-6


def test_density_on_a_grid_has_the_same_readings():
    grid = np.linspace(-6, 6, 4001)
    found = Density(grid, stats.norm.pdf(grid), np.zeros_like(grid))
    shifted = Density(grid, stats.norm.pdf(grid, 0.5), np.zeros_like(grid))
    assert found.entropy() == pytest.approx(0.5 * math.log(2 * math.pi * math.e), abs=1e-6)
    assert found.kl(shifted) == pytest.approx(0.125, abs=1e-6)
    assert found.symmetric_kl(shifted) == pytest.approx(0.125, abs=1e-6)
    assert np.allclose(
        found.quantile([0.1, 0.5, 0.975]), stats.norm.ppf([0.1, 0.5, 0.975]), atol=1e-5
    )
    assert np.allclose(found.moments(4), [1, 0, 1, 0, 3], atol=1e-5)
    assert found.evaluate(7.0) == 0.0
    assert maxent.fit([1.0, 0.0], bounds=(-5.0, 5.0)).symmetric_kl(found) > 0


def test_densities_survive_the_disk_and_are_drawn(tmp_path):
    found = maxent.fit(semicircle(6), prior=lambda x: 2 + x)
    back = Result.load(found.save(tmp_path / "d"))
    assert isinstance(back, maxent.MaxentDensity)
    assert np.array_equal(back.evaluate(found.grid), found.evaluate(found.grid))
    axes = plot(back)
    assert axes.get_title() == "Spectral density"
    assert axes.texts[0].get_text().startswith("Of maximum entropy, 6 moments.")


MISUSES = {
    "moments beyond 1": (
        lambda: maxent.fit([1.0, 0.2, -1.2]),
        "-1.2 as Chebyshev moment 2, where .* allow",
    ),
    "moments that exclude each other": (
        lambda: maxent.fit([1.0, 0.9, -0.9]),
        (
            r"-0\.9 as Chebyshev moment 2, where those below it allow \[0\.62, 1\]; pass bounds"
            r" that hold the spectrum"
        ),
    ),
    "a spectrum beyond the bounds": (
        lambda: maxent.fit([1.0, 0.0, 2.0], "power"),
        "positive measure on the bounds.*power moments lose",
    ),
    "mixed normalisation": (
        lambda: maxent.fit([0.9, 0.0]),
        "moments must begin with φ_0 = 1, got 0.9; divide",
    ),
    "no moments": (lambda: maxent.fit([1.0]), "moments must be a 1-D array"),
    "NaN": (lambda: maxent.fit([1.0, math.nan]), "moments must be finite"),
    "basis unknown": (lambda: maxent.fit([1.0, 0.0], "hermite"), "basis must be one of"),
    "bounds backwards": (
        lambda: maxent.fit([1.0, 0.0], bounds=(1.0, 0.0)),
        "bounds must be two finite numbers",
    ),
    "bounds of one number": (
        lambda: maxent.fit([1.0, 0.0], bounds=3),
        "bounds must be two finite numbers",
    ),
    "no bounds": (lambda: maxent.fit([1.0, 0.0], bounds=None), "bounds must be two finite numbers"),
    "bounds of words": (
        lambda: maxent.fit([1.0, 0.0], bounds=("a", "b")),
        "bounds must be two finite numbers",
    ),
    "a negative penalty": (
        lambda: maxent.fit([1.0, 0.0], penalty=-1.0),
        "penalty must be a finite number above 0",
    ),
    "errors of another length": (
        lambda: maxent.fit([1.0, 0.0], stderr=[0.1]),
        "stderr must be 2 numbers",
    ),
    "a prior that is 0": (
        lambda: maxent.fit([1.0, 0.0], prior=lambda x: np.maximum(x, 0)),
        "prior must be element-",
    ),
    "no tolerance": (
        lambda: maxent.fit([1.0, 0.0], tol=0.0),
        "tol must be a finite number above 0",
    ),
    "levels beyond 1": (
        lambda: maxent.fit([1.0, 0.0]).quantile([1.5]),
        r"levels must lie in \[0, 1\]",
    ),
    "low above high": (
        lambda: maxent.fit([1.0, 0.0]).integrate(1.0, 0.0),
        "low must be at most high",
    ),
    "no sweeps": (lambda: maxent.fit_classical([1.0, 0.0], sweeps=0), "sweeps must be"),
    "width with maxent": (
        lambda: spectrum(operator(torch.eye(3)), 1).density(smoothing="maxent", width=0.1),
        "grid and width must be None",
    ),
    "moments without maxent": (
        lambda: spectrum(operator(torch.eye(3)), 1).density(moments=4),
        "moments must come",
    ),
    "more moments than the depth knows": (
        lambda: spectrum(operator(torch.diag(torch.arange(9.0))), 4).density(
            smoothing="maxent", moments=9
        ),
        r"moments must be an integer in \[1, 7\]",
    ),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_names_the_argument(misuse):
    call, text = MISUSES[misuse]
    with pytest.raises(ValueError, match=text):
        call()


@pytest.mark.parametrize("moments", ["abc", None, [1.0, 1j], [[1.0], [0.0, 1.0]]])
def test_moments_that_are_no_numbers_are_refused(moments):
    with pytest.raises(TypeError, match="moments must be a 1-D array of real numbers"):
        maxent.fit(moments)


@pytest.mark.parametrize("reading", ["kl", "symmetric_kl"])
def test_a_divergence_to_no_density_is_refused(reading):
    for found in (maxent.fit([1.0, 0.0]), Density(np.arange(3.0), np.full(3, 0.5), np.zeros(3))):
        with pytest.raises(TypeError, match="other must be a Density, got 3"):
            getattr(found, reading)(3)
