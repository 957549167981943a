"""Lanczos quadrature and moments against dense answers, and their error bars against many seeds."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.polynomial import chebyshev, legendre

from lambdahat._core.progress import progress
from lambdahat.estimators import moments, spectrum, trace_function
from lambdahat.estimators._spectrum import spectral_bounds
from lambdahat.krylov import random_vector
from lambdahat.operators import operator
from lambdahat.results import Result
from tests.cases import Products, with_eigenvalues

D = torch.float64
INDEFINITE = torch.cat([torch.linspace(-1, 1, 70, dtype=D), torch.tensor([4.0, 3.0], dtype=D)])
POSITIVE = torch.logspace(-1, 1, 80, dtype=D)


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 40), st.integers(1, 8), st.integers(0, 10**6))
def test_moments_are_exact_to_the_degree_of_the_quadrature(dim, depth, seed):
    depth = min(depth, dim)
    values = 2 * torch.rand(dim, generator=torch.Generator().manual_seed(seed), dtype=D) - 0.5
    matrix = with_eigenvalues(values, seed)
    A = operator(matrix)
    found = spectrum(A, depth, probes=2, seed=seed)
    for probe in range(2):
        z = random_vector(A, seed, "sphere", probe)
        power = z
        for order in range(2 * depth):
            rule = float((found.weights[probe] * found.nodes[probe] ** order).sum())
            assert rule == pytest.approx(float(z @ power), rel=1e-9, abs=1e-9 * 1.5**order)
            power = matrix @ power


def test_full_depth_finds_every_eigenvalue():
    matrix = with_eigenvalues(INDEFINITE[::3])
    A = operator(matrix)
    found = spectrum(A, A.dim)
    assert np.allclose(found.nodes[0], torch.linalg.eigvalsh(matrix).numpy(), atol=1e-9)
    assert found.residuals.max() < 1e-8
    assert found.cost == A.matvecs == A.dim


def test_default_depth_fits_small_operators():
    assert spectrum(operator(torch.eye(3) * torch.arange(1.0, 4.0))).nodes.shape == (1, 3)
    one = spectrum(operator([[2.0]]))
    assert one.nodes.tolist() == [[2.0]]
    assert (one.trace.value, one.trace.stderr) == (2.0, 0.0)


def test_early_end_is_filled_with_weightless_nodes():
    values = [5.0] * 3 + [1.0] * 30 + [0.0] * 30
    found = spectrum(operator(with_eigenvalues(values), psd=True), 10, probes=3)
    assert found.nodes.shape == (3, 3)
    assert found.psd
    assert np.allclose(found.weights.sum(1), 1.0)
    assert np.allclose(found.nodes, [[0.0, 1.0, 5.0]] * 3, atol=1e-12)
    assert found.degeneracy().value == pytest.approx(30 / 63, abs=4 * found.degeneracy().stderr)
    zero = spectrum(operator(torch.zeros(20, 20)), 5)
    assert zero.nodes.tolist() == [[0.0]]
    assert zero.frobenius.value == 0.0


@pytest.mark.parametrize("probe", ["sphere", "rademacher"])
def test_intervals_of_moments_cover_where_one_eigenvalue_makes_them(probe):
    """Squares of single normal numbers: ten of them show too small a spread as a rule."""
    values = torch.zeros(200, dtype=torch.float64)
    values[0] = 1.0
    A = operator(with_eigenvalues(values))
    inside = []
    for seed in range(200):
        low, high = moments(A, 1, probes=10, probe=probe, seed=seed)[1].interval()
        inside.append(low <= 1 / 200 <= high)
    assert np.mean(inside) >= 0.89


@pytest.mark.parametrize("exponent", [-1000, -500, 500, 1000])
def test_errors_of_moments_scale_where_their_squares_leave_the_range(exponent):
    matrix = with_eigenvalues(INDEFINITE)
    alone, scaled = (
        moments(operator(torch.ldexp(matrix, torch.tensor(e))), 1)[1] for e in (0, exponent)
    )
    assert scaled.stderr == pytest.approx(np.ldexp(alone.stderr, exponent), rel=1e-12)
    assert scaled.value == pytest.approx(np.ldexp(alone.value, exponent), rel=1e-12)


@pytest.mark.parametrize("rank", [0, 1, 2, 5, 80])
def test_degeneracy_is_the_share_of_zeros_where_all_values_are_resolved(rank):
    """The node next to that at zero is an eigenvalue, unless zero is hidden in a bulk."""
    values = torch.zeros(80, dtype=torch.float64)
    values[:rank] = torch.arange(1.0, rank + 1) * (-1) ** torch.arange(rank)
    A = operator(with_eigenvalues(values))
    inside = []
    for seed in range(40):
        found = spectrum(A, seed=seed).degeneracy()
        low, high = found.interval()
        inside.append(low - 1e-12 <= 1 - rank / 80 <= high + 1e-12)
    assert np.mean(inside) >= 0.85
    assert found.value < 1 or rank == 0


@pytest.mark.parametrize("psd", [True, False])
@pytest.mark.parametrize("depth", [20, 60, 100, 130])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_null_space_that_lanczos_finds_again_counts_once_and_whole(sign, depth, psd):
    """Where the other values have converged, rounding brings 0 back, with no weight."""
    values = torch.cat([torch.zeros(200), torch.linspace(0.5, 1.5, 100)]).double()
    A = operator(torch.diag(sign * values), psd=psd and sign > 0)
    for seed in range(6):
        found = spectrum(A, depth, 2, seed=seed).degeneracy()
        assert abs(float(found) - 2 / 3) <= 4 * float(found.stderr)
        assert 0.01 < float(found.stderr) < 0.05


def test_error_of_the_moments_is_true():
    """Var(zᵀAz) = 2/(P+2)·(tr A²/P − (tr A/P)²) for z on the unit sphere, and one probe knows
    it.
    """
    A = operator(with_eigenvalues(INDEFINITE))
    runs = [spectrum(A, 8, seed=seed).mean for seed in range(300)]
    values, errors = np.array([r.value for r in runs]), np.array([r.stderr for r in runs])
    exact = float(INDEFINITE.mean())
    variance = 2 / (A.dim + 2) * (float((INDEFINITE**2).mean()) - exact**2)
    assert values.var() == pytest.approx(variance, rel=0.3)
    assert (errors**2).mean() == pytest.approx(variance, rel=0.1)
    inside = np.mean([r.interval()[0] <= exact <= r.interval()[1] for r in runs])
    assert 0.90 <= inside <= 0.99


def test_resolution_is_the_rounding_of_the_dtype():
    matrix = with_eigenvalues(torch.cat([torch.tensor([10.0], dtype=D), torch.zeros(60, dtype=D)]))
    fine, coarse = (
        spectrum(operator(matrix), 20).resolution,
        spectrum(operator(matrix.float()), 20).resolution,
    )
    assert 1e-15 < fine < 1e-12
    assert 1e-6 < coarse < 1e-3
    assert spectrum(operator(matrix.float()), 20).negative_mass.value == 0.0


def test_progress_is_per_product():
    seen = []
    with progress(lambda *args: seen.append(args)):
        spectrum(operator(with_eigenvalues(INDEFINITE)), 3, probes=2)
    assert seen == [("spectrum", done, 6) for done in range(1, 7)]


def test_spectra_survive_the_disk(tmp_path):
    found = spectrum(operator(with_eigenvalues(INDEFINITE)), 5, probes=2)
    back = Result.load(found.save(tmp_path / "s"))
    assert np.array_equal(found.nodes, back.nodes)
    assert back.cost == 10


def test_trace_function_of_any_function():
    matrix = with_eigenvalues(INDEFINITE)
    found = trace_function(operator(matrix), np.exp, depth=25, probes=20)
    exact = float(torch.linalg.eigvalsh(matrix).exp().sum())
    assert abs(found.value - exact) <= 3 * found.stderr
    assert 0 < found.stderr < 0.2 * exact
    linear = trace_function(operator(matrix), lambda x: 2.0 * x, depth=5, probes=3)
    assert linear.value == pytest.approx(
        2 * spectrum(operator(matrix), 5, 3).trace.value, rel=1e-12
    )
    constant = trace_function(operator(matrix), np.ones_like, depth=5)
    assert (constant.value, constant.stderr) == (pytest.approx(72.0), pytest.approx(0.0, abs=1e-6))
    with pytest.raises(ValueError, match="function must be element-wise and finite"):
        trace_function(operator(matrix), np.sqrt, depth=5)


BASES = {
    "power": lambda x, k: x**k,
    "chebyshev": lambda x, k: chebyshev.chebval(x, [0] * k + [1]),
    "legendre": lambda x, k: legendre.legval(x, [0] * k + [1]),
}


@pytest.mark.parametrize("count", [1, 2, 7, 30])
@pytest.mark.parametrize("basis", BASES)
def test_moments_of_each_probe_are_exact(basis, count):
    matrix = with_eigenvalues(INDEFINITE)
    A = operator(matrix)
    found = moments(A, count, basis, probes=3, seed=5, bounds=(-1.5, 4.5))
    values, vectors = torch.linalg.eigh(matrix)
    x = ((values - 1.5) / 3).numpy()
    z = torch.stack([random_vector(A, 5, "sphere", probe) for probe in range(3)], dim=1)
    weights = ((vectors.T @ z) ** 2).numpy()
    rows = np.array([(BASES[basis](x, k)[:, None] * weights).sum(0) for k in range(count + 1)])
    assert np.allclose(found.values, rows.mean(1), atol=1e-11)
    assert np.allclose(found.covariance, np.cov(rows) / 3, atol=1e-12)
    skewness = scipy.stats.skew(rows[1:], axis=1)
    widened = np.sqrt(np.diag(found.covariance)[1:]) * (1 + 2 * skewness**2 / 3)
    assert np.allclose(found.stderr[1:], widened, atol=1e-9)
    assert found.cost == A.matvecs == 3 * ((count + 1) // 2)
    assert found.values[0] == pytest.approx(1.0, abs=1e-14)


@pytest.mark.parametrize("probe", ["gaussian", "rademacher", "orthogonal"])
def test_moments_are_of_a_positive_measure_with_every_kind_of_probe(probe):
    A = operator(with_eigenvalues(INDEFINITE))
    found = moments(A, 12, "chebyshev", probes=20, seed=1, bounds=(-1.5, 4.5), probe=probe)
    exact = chebyshev.chebvander((INDEFINITE.numpy() - 1.5) / 3, 12).mean(0)
    assert found.values[0] == pytest.approx(1.0, abs=1e-14)
    toeplitz = found.values[np.abs(np.subtract.outer(range(13), range(13)))]
    assert np.linalg.eigvalsh(toeplitz)[0] > 0
    assert np.abs(found.values - exact)[1:].max() <= 4 * found.stderr[1:].max()


def test_gaussian_probes_divided_by_their_length_are_those_of_the_sphere():
    A = operator(with_eigenvalues(INDEFINITE))
    first, second = (moments(A, 5, probes=4, probe=kind) for kind in ("gaussian", "sphere"))
    assert np.array_equal(first.values, second.values)


def test_error_of_orthogonal_probes_is_true_and_vanishes_for_all_of_them():
    A = operator(with_eigenvalues(INDEFINITE))
    exact = float(INDEFINITE.mean())
    runs = [moments(A, 1, probes=40, seed=seed, probe="orthogonal")[1] for seed in range(200)]
    values, errors = np.array([run.value for run in runs]), np.array([run.stderr for run in runs])
    assert values.var() == pytest.approx((errors**2).mean(), rel=0.25)
    # of one probe on the sphere; errors are widened for the skewness of what was drawn
    alone = 2 / (A.dim + 2) * (float((INDEFINITE**2).mean()) - exact**2)
    assert (errors**2).mean() == pytest.approx(alone / 40 * (A.dim - 40) / (A.dim - 1), rel=0.15)
    every = moments(A, 1, probes=A.dim, probe="orthogonal")[1]
    assert every.value == pytest.approx(exact, abs=1e-12)
    assert every.stderr == 0.0


@pytest.mark.parametrize("probe", ["sphere", "rademacher"])
def test_the_number_of_probes_keeps_the_error_asked_for(probe):
    A = operator(with_eigenvalues(INDEFINITE))
    found = moments(A, 10, "chebyshev", tol=0.05, probe=probe)
    assert found.probes == int(np.ceil((5 if probe == "sphere" else 3) / (A.dim * 0.05**2)))
    assert found.stderr.max() <= 0.05


def test_a_tolerance_of_powers_is_relative():
    """Eq. 2.34: powers of a positive definite A, whose ends are known, and of one that is not
    diagonally dominant.
    """
    near = operator(torch.diag(torch.linspace(1.0, 2.0, 300, dtype=torch.float64)), psd=True)
    found = moments(near, 2, tol=0.01)
    assert found.probes == int(np.ceil(5 / (1 + 299 / 2.0**4) / 0.01**2))
    assert (found.stderr[1:] <= 0.01 * found.values[1:]).all()
    hidden = operator(with_eigenvalues(POSITIVE), psd=True)
    assert moments(hidden, 2, tol=0.1).probes == 500


def test_one_orthogonal_probe_of_one_dimension_is_exact():
    found = moments(operator([[3.0]]), 4, probe="orthogonal", probes=1)
    assert found.values.tolist() == [1.0, 3.0, 9.0, 27.0, 81.0]
    assert not found.stderr.any()


def test_moments_estimate_the_trace_within_their_errors():
    matrix = with_eigenvalues(INDEFINITE)
    found = moments(operator(matrix), 4, probes=80)
    assert (found.basis, found.bounds) == ("power", (-1.0, 1.0))
    for order in range(1, 5):
        exact = float((INDEFINITE**order).mean())
        assert abs(found[order].value - exact) <= 4 * found[order].stderr


@pytest.mark.parametrize(
    "values", [INDEFINITE, POSITIVE, torch.full((30,), 2.0), torch.zeros(30), torch.ones(1)]
)
@pytest.mark.parametrize("basis", ["chebyshev", "legendre"])
def test_automatic_bounds_hold_the_spectrum(values, basis):
    A = operator(with_eigenvalues(values))
    (low, high), cost = spectral_bounds(A)
    assert low < float(values.min())
    assert float(values.max()) < high
    found = moments(A, 20, basis, probes=4)
    assert found.bounds == (low, high)
    # a product of zeros is tried at another scale
    assert found.cost == 4 * 10 + cost + (not values.any())
    assert np.abs(found.values).max() <= 1 + 1e-9


def test_a_psd_operator_is_bounded_below_by_zero():
    A = operator(with_eigenvalues(torch.cat([torch.zeros(40), torch.ones(5)])), psd=True)
    assert spectral_bounds(A)[0][0] == 0.0


def test_wrong_bounds_are_found():
    A = operator(with_eigenvalues(INDEFINITE))
    with pytest.raises(ValueError, match="bounds must hold the whole spectrum"):
        moments(A, 30, "chebyshev", bounds=(-1.0, 2.0))


def test_float32_probe_blocks_do_not_change_the_answer(monkeypatch):
    A = operator(with_eigenvalues(INDEFINITE).float())
    whole = moments(A, 9, "chebyshev", probes=10, bounds=(-1.5, 4.5))
    monkeypatch.setattr("lambdahat.estimators.probes.BLOCK_COLUMNS", 3)
    pieces = moments(A, 9, "chebyshev", probes=10, bounds=(-1.5, 4.5))
    assert np.allclose(whole.values, pieces.values, atol=1e-6)


def test_moments_survive_the_disk(tmp_path):
    found = moments(operator(with_eigenvalues(INDEFINITE)), 3, "legendre", probes=4)
    back = Result.load(found.save(tmp_path / "m"))
    assert np.array_equal(back.covariance, found.covariance)
    assert (back.basis, back.bounds) == ("legendre", found.bounds)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda A: spectrum(A, 73),
            r"depth must be an integer in \[1, 72\], got 73; .* op.dense\(\) is exact",
        ),
        (lambda A: spectrum(A, 0), "depth must be"),
        (lambda A: spectrum(A, 5, probes=0), "probes must be"),
        (lambda A: spectrum(A, 5, seed=-1), "seed must be"),
        (lambda A: moments(A, 0), "count must be"),
        (lambda A: moments(A, 3, probe="cauchy"), "probe must be one of"),
        (lambda A: moments(A, 3, probe="orthogonal", probes=1000), "no more can be orthogonal"),
        (lambda A: moments(A, 3, probes=5, tol=0.1), "tol must come without probes"),
        (lambda A: moments(A, 3, bounds=("a", "b")), "bounds must be two finite numbers"),
        (lambda A: moments(A, 3, bounds=7.0), "bounds must be two finite numbers"),
        (lambda A: moments(A, 3, tol=0.1), "tol must come with bounds"),
        (lambda A: moments(A, 3, probes=1), "probes must be an integer of at least 2"),
        (
            lambda A: moments(A, 3, "hermite"),
            "basis must be one of 'power', 'chebyshev', 'legendre'",
        ),
        (lambda A: moments(A, 3, bounds=(1.0, 0.0)), "bounds must be two finite numbers"),
        (lambda A: moments(A, 9999, probes=2), "moments must be finite"),
    ],
)
def test_misuse_is_named(call, text):
    with pytest.raises(ValueError, match=text):
        call(operator(with_eigenvalues(INDEFINITE)))


def test_too_little_memory_is_named_before_any_product(monkeypatch):
    A = operator(with_eigenvalues(INDEFINITE))
    monkeypatch.setattr("lambdahat.operators.base.free_memory", lambda device: 1000)
    with pytest.raises(ValueError, match="depth must fit into the free memory"):
        spectrum(A, 10)
    assert A.matvecs == 0


@pytest.mark.parametrize(
    "call", [spectrum, lambda A: moments(A, 2), lambda A: trace_function(A, np.exp)]
)
def test_asymmetric_operators_are_refused(call):
    with pytest.raises(ValueError, match="must be symmetric"):
        call(operator(torch.triu(torch.ones(4, 4))))


def unseen(values: torch.Tensor, extra: list[float], seed: int = 0) -> torch.Tensor:
    """Eigenvalues ``values``, and ``extra`` ones with vectors orthogonal to the start of the run
    for the bounds.
    """
    P = len(values) + len(extra)
    start = random_vector(operator(torch.eye(P, dtype=D)), seed, "bounds")
    draw = torch.randn(P, P, generator=torch.Generator().manual_seed(seed), dtype=D)
    # the first column is the start
    turn = torch.linalg.qr(torch.cat([start[:, None], draw[:, 1:]], dim=1)).Q
    mixed = turn[:, : len(values)] @ torch.linalg.qr(draw[: len(values), : len(values)]).Q
    vectors = torch.cat([mixed, turn[:, len(values) :]], dim=1)
    matrix = (vectors * torch.cat([values, torch.tensor(extra, dtype=D)])) @ vectors.T
    return (matrix + matrix.T) / 2


# and the steps of the run for the bounds, for rounding shows it what is far away in the end
UNSEEN = {
    "one just above": ([1.06], 30),
    "one just below": ([-1.06], 30),
    "one far above": ([40.0], 4),
    "one far below": ([-7.0], 4),
    "a cluster above the edge": ([1.03, 1.04, 1.041, 1.0415, 1.05], 30),
    "one at each end": ([-1.1, 1.2], 30),
    "so far above that the recurrence overflows": ([1e10], 2),
}


@pytest.mark.parametrize("basis", ["chebyshev", "legendre"])
@pytest.mark.parametrize("name", UNSEEN)
def test_own_bounds_that_prove_wrong_are_widened(name, basis, monkeypatch):
    """Eigenvalues that the run for the bounds cannot see: the bounds hold them in the end, and
    each product counts.
    """
    outside, steps = UNSEEN[name]
    monkeypatch.setattr("lambdahat.estimators._spectrum.BOUNDS_DEPTH", steps)
    matrix = unseen(torch.linspace(-1, 1, 200, dtype=D), outside)
    values = torch.linalg.eigvalsh(matrix).numpy()
    low, high = spectral_bounds(operator(matrix))[0]
    assert not low <= values[0] <= values[-1] <= high  # else this shows nothing
    A = operator(matrix)
    found = moments(A, 60, basis, probes=30)
    low, high = found.bounds
    assert low - 1e-6 <= values[0] <= values[-1] <= high + 1e-6
    assert found.cost == A.matvecs > steps + 30 * 30
    table = (chebyshev.chebvander if basis == "chebyshev" else legendre.legvander)(
        (2 * values - low - high) / (high - low), 60
    )
    assert (np.abs(found.values - table.mean(axis=0)) <= 6 * found.stderr + 1e-9).all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("outside", [[1.06], [-1.5]])
def test_given_bounds_are_refused_with_the_value_outside(outside, seed):
    matrix = with_eigenvalues(
        torch.cat([torch.linspace(-1, 1, 200, dtype=D), torch.tensor(outside, dtype=D)])
    )
    with pytest.raises(
        ValueError, match=r"bounds must hold the whole spectrum, got .* Ritz value of"
    ) as error:
        moments(operator(matrix), 60, "chebyshev", probes=10, seed=seed, bounds=(-1.01, 1.01))
    assert float(str(error.value).split("Ritz value of ")[1].split(";")[0]) == pytest.approx(
        outside[0], rel=0.05
    )


@pytest.mark.parametrize("dtype", [torch.float32, D])
@pytest.mark.parametrize("count", [1, 2, 3, 40, 151])
def test_bounds_at_the_very_ends_are_taken(dtype, count):
    matrix = with_eigenvalues(
        torch.cat([torch.linspace(-1, 1, 60, dtype=D) ** 5, torch.ones(20, dtype=D)])
    ).to(dtype)
    found = moments(operator(matrix), count, "chebyshev", probes=5, bounds=(-1.0, 1.0))
    assert found.bounds == (-1.0, 1.0)


def test_an_operator_that_grows_is_no_matrix():
    """Each product is half as large again as the last: no bounds would ever hold its spectrum."""

    class Growing(Products):
        def _apply(self, block):
            self.matrix = 1.5 * self.matrix
            return super()._apply(block)

    with pytest.raises(
        ValueError, match="the operator of moments must be one symmetric matrix at every product"
    ):
        moments(Growing(with_eigenvalues(POSITIVE)), 40, "chebyshev", probes=2)
