"""Closed forms against each other and against quadrature that shares nothing with them."""

from __future__ import annotations

import math
from itertools import combinations_with_replacement, pairwise, permutations, product

import numpy as np
import pytest
import torch
from scipy import integrate

from lambdahat._core.rng import generator
from lambdahat.problem import Problem
from lambdahat.results import Result, Status
from lambdahat.singular import exact
from lambdahat.singular.exact import Coefficient
from tests.oracles import dense_hessian

NBETA = 1e6 / math.log(1e6)


def test_reduced_rank_and_deep_linear_agree_on_all_shapes_up_to_eight():
    shapes = [
        (*widths, r) for widths in product(range(1, 9), repeat=3) for r in range(min(widths) + 1)
    ]
    assert len(shapes) == 1808
    for m, h, n, r in shapes:
        assert exact.reduced_rank(m, h, n, r) == exact.deep_linear((m, h, n), r), (m, h, n, r)


@pytest.mark.parametrize(
    ("widths", "rank", "value", "multiplicity"),
    [
        ((5, 3, 5), 0, 6.5, 2),
        ((5, 4, 5), 0, 8.0, 1),
        ((2, 2, 2, 2), 0, 1.5, 3),
        ((1, 1, 1), 0, 0.5, 2),
        ((1, 1, 1, 1), 0, 0.5, 3),
        ((1, 1, 1), 1, 0.5, 1),
        ((3, 4), 0, 6.0, 1),
        ((3, 4), 2, 6.0, 1),
    ],
)
def test_known_coefficients(widths, rank, value, multiplicity):
    assert exact.deep_linear(widths, rank) == Coefficient(value, multiplicity)


def test_scalar_chains_are_normal_crossings():
    for depth in range(2, 7):
        assert exact.deep_linear((1,) * (depth + 1), 0) == exact.normal_crossing([1] * depth)


def test_widths_may_be_permuted_where_theory_says_so():
    for widths in combinations_with_replacement(range(1, 6), 4):
        assert len({exact.deep_linear(order, 0) for order in permutations(widths)}) == 1
        for rank in range(min(widths) + 1):
            first, *hidden, last = widths
            ends = ((first, last), (last, first))
            orders = [
                (left, *inner, right) for left, right in ends for inner in permutations(hidden)
            ]
            assert len({exact.deep_linear(order, rank) for order in orders}) == 1
    assert exact.deep_linear((2, 3, 4), 1) != exact.deep_linear(
        (2, 4, 3), 1
    )  # with a rank the ends are not the middle


def test_limits_of_linear_networks():
    for m, n in product(range(1, 6), repeat=2):
        for rank in range(min(m, n) + 1):
            assert exact.reduced_rank(m, m + n, n, rank) == exact.regular(
                m * n
            )  # wide: any matrix, regularly
        assert exact.reduced_rank(m, min(m, n), n, min(m, n)) == exact.regular(
            m * n
        )  # full rank: no singularity
    for r in range(
        1, 4
    ):  # the true rank through a layer just as wide: the manifold of rank-r matrices
        assert exact.deep_linear((6, r, 5), r) == exact.regular(r * (6 + 5 - r))


def test_no_coefficient_exceeds_that_of_the_narrowest_pair_of_layers():
    for widths in combinations_with_replacement(range(1, 6), 4):
        least, next_least = sorted(widths)[:2]
        assert (
            0 < exact.deep_linear(widths, 0).value <= least * next_least / 2
        )  # one layer at 0, and the rest free
        assert exact.deep_linear((*widths, sum(widths)), 0) == exact.deep_linear(
            widths, 0
        )  # a wide layer changes nothing


def test_normal_crossing_and_regular():
    assert exact.normal_crossing([1, 2, 2]) == Coefficient(0.25, 2)
    assert exact.normal_crossing([3, 0]) == Coefficient(1 / 6, 1)
    assert exact.normal_crossing([1]) == exact.regular(1) == Coefficient(0.5)
    assert str(exact.normal_crossing([2, 2])) == "0.25 (multiplicity 2)"


def test_a_coefficient_saves_and_loads(tmp_path):
    value = exact.reduced_rank(5, 3, 5, 0)
    assert Result.load(value.save(tmp_path / "value")) == value
    assert float(value) == 6.5


def test_quadratic_expectation_and_variance_of_the_posterior_by_quadrature():
    h, nbeta, gamma = 0.3, 50.0, 4.0

    def moment(power):
        def integrand(w):
            return (nbeta * h * w * w / 2) ** power * math.exp(
                -nbeta * h * w * w / 2 - gamma * w * w / 2
            )

        return integrate.quad(integrand, -np.inf, np.inf, epsabs=0, epsrel=1e-12)[0]

    mean = moment(1) / moment(0)
    assert exact.quadratic([h], nbeta, gamma) == pytest.approx(mean, rel=1e-10)
    assert exact.quadratic_variance([h], nbeta, gamma) == pytest.approx(
        moment(2) / moment(0) - mean**2, rel=1e-10
    )
    assert exact.quadratic([1.0, 5.0, 7.0], 100.0, 0.0) == 1.5
    assert exact.quadratic([1.0, 5.0, 0.0], 100.0, 1e-12) == pytest.approx(1.0)


def test_quadratic_expectation_at_a_finite_step_is_that_of_the_recursion():
    h, nbeta, gamma, step = np.array([0.5, 2.0, 8.0]), 30.0, 5.0, 0.009
    a = nbeta * h + gamma
    variance = np.zeros(3)
    for _ in range(5000):  # Var w ← (1 − εa/2)² Var w + ε
        variance = (1 - step * a / 2) ** 2 * variance + step
    assert exact.quadratic(h, nbeta, gamma, step) == pytest.approx(
        0.5 * nbeta * (h * variance).sum(), rel=1e-12
    )
    squares = 0.5 * ((nbeta * h * variance) ** 2).sum()
    assert exact.quadratic_variance(h, nbeta, gamma, step) == pytest.approx(squares, rel=1e-12)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_one_crossing_exponent_without_localization_is_a_gamma_integral(k):
    assert exact.crossing_expectation([k], 1e4, 0.0) == 1 / (2 * k)
    assert exact.crossing_expectation([k], 1e30, 1e-3) == pytest.approx(1 / (2 * k), rel=1e-6)


@pytest.mark.parametrize(
    ("k", "nbeta", "gamma"), [(1, 100.0, 100.0), (2, 1e4, 1.0), (3, 70.0, 9.0), (5, 1e6, 0.1)]
)
def test_one_dimensional_crossings_by_quad(k, nbeta, gamma):
    def moment(power):
        def integrand(w):
            return (nbeta * w ** (2 * k)) ** power * math.exp(
                -nbeta * w ** (2 * k) - gamma / 2 * w * w
            )

        end = min(nbeta ** (-0.5 / k) * 50 ** (0.5 / k), 10 / math.sqrt(gamma))
        return integrate.quad(integrand, 0, end, epsabs=0, epsrel=1e-12, limit=400)[0]

    assert exact.crossing_expectation([k], nbeta, gamma) == pytest.approx(
        moment(1) / moment(0), rel=1e-10
    )
    if k == 1:
        assert exact.crossing_expectation([1], nbeta, gamma) == pytest.approx(
            exact.quadratic([2.0], nbeta, gamma)
        )


@pytest.mark.parametrize(
    ("k", "nbeta", "gamma"), [(1, 100.0, 1.0), (1, NBETA, 1.0), (1, 1e8, 1e-2), (2, 1e5, 3.0)]
)
def test_two_dimensional_crossings_with_one_coordinate_integrated_by_hand(k, nbeta, gamma):
    """K = w₁²·w₂^{2k}: given w₂, w₁ is Gaussian of precision p = 2nβ·w₂^{2k} + γ; the rest is one
    integral by quad.
    """

    def moment(power):
        def integrand(u):  # w₂ = e^u
            stiffness = 2 * nbeta * math.exp(2 * k * u)
            p = stiffness + gamma
            return (
                math.exp(u - gamma / 2 * math.exp(2 * u))
                / math.sqrt(p)
                * (stiffness / (2 * p)) ** power
            )

        pieces = np.linspace(-45, math.log(9 / math.sqrt(gamma)), 12)
        parts = (
            integrate.quad(integrand, *span, epsabs=0, epsrel=1e-12, limit=200)
            for span in pairwise(pieces)
        )
        return sum(value for value, _ in parts)

    assert exact.crossing_expectation([1, k], nbeta, gamma) == pytest.approx(
        moment(1) / moment(0), rel=1e-10
    )
    assert exact.crossing_expectation([k, 0, 1], nbeta, gamma) == pytest.approx(
        moment(1) / moment(0), rel=1e-10
    )


def test_three_dimensional_crossings_by_a_plain_sum():
    """Trapezoidal in ln|w| on a grid of three dimensions, all of it spelt out."""
    nbeta, gamma = 300.0, 2.0
    u = np.arange(-24.0, 2.0, 0.2)
    w = np.exp(u)
    product_ = (w[:, None, None] * w[None, :, None] * w[None, None, :]) ** 2
    prior = np.exp(u - gamma / 2 * w * w)
    weight = (
        prior[:, None, None]
        * prior[None, :, None]
        * prior[None, None, :]
        * np.exp(-nbeta * product_)
    )
    truth = nbeta * (weight * product_).sum() / weight.sum()
    assert exact.crossing_expectation([1, 1, 1], nbeta, gamma) == pytest.approx(truth, rel=1e-8)


def test_crossings_depend_on_one_number_and_approach_the_coefficient():
    value = exact.crossing_expectation([1, 2], 1e4, 3.0)
    assert exact.crossing_expectation([1, 2], 1e4 * 7.0**3, 21.0) == pytest.approx(value, rel=1e-12)
    for exponents in ([1, 1], [2, 2], [1, 1, 1]):
        truth = exact.normal_crossing(exponents)
        gaps = []
        for nbeta in (1e6, 1e12, 1e24):
            gap = truth.value - exact.crossing_expectation(exponents, nbeta, 1.0)
            gaps.append(
                gap * math.log(nbeta) / (truth.multiplicity - 1)
            )  # → 1, by terms of 1/ln(nβ)
        assert abs(gaps[2] - 1) < abs(gaps[1] - 1) < abs(gaps[0] - 1) < 0.6


@pytest.mark.parametrize(
    ("widths", "gamma"), [((1, 1, 1), 1.0), ((1, 1, 1, 1), 1.0), ((1, 1, 1), 100.0)]
)
def test_the_reference_on_scalar_chains_is_the_crossing_by_quadrature(widths, gamma):
    found = exact.deep_linear_reference(widths, 0, NBETA, gamma, sweeps=400)
    truth = exact.crossing_expectation([1] * (len(widths) - 1), NBETA / 2, gamma)  # L = ½·∏ w_i²
    assert found.status is Status.CONVERGED
    assert abs(found.value - truth) < 3 * found.stderr < 0.01


def _one_hidden_unit(m, n, nbeta, gamma):
    """L = ½‖u‖²‖v‖², u ∈ ℝᵐ, v ∈ ℝⁿ: given r = ‖v‖, u is Gaussian of precision nβr² + γ; one
    integral over ln r.
    """

    def moment(power):
        def integrand(s):
            r2 = math.exp(2 * s)
            p = nbeta * r2 + gamma
            return (
                math.exp(n * s - gamma / 2 * r2) * p ** (-m / 2) * (m / 2 * nbeta * r2 / p) ** power
            )

        return integrate.quad(
            integrand, -20, 3, epsabs=0, epsrel=1e-11, limit=500, points=[-6, -3, 0]
        )[0]

    return moment(1) / moment(0)


def _scalar_of_rank_one(nbeta, gamma):
    """L = ½(ab − 1)² at (1, 1): given b, a is Gaussian; one integral over b, both signs."""

    def parts(b):
        p = nbeta * b * b + gamma
        mean = (nbeta * b + gamma) / p
        misfit = mean * b - 1
        density = math.exp(
            -0.5 * (nbeta * misfit**2 + gamma * (mean - 1) ** 2 + gamma * (b - 1) ** 2)
        ) / math.sqrt(p)
        return density, 0.5 * nbeta * (misfit**2 + b * b / p)

    def whole(function):
        return integrate.quad(
            function, -8, 8, epsabs=0, epsrel=1e-10, limit=500, points=[-1, -0.1, 0, 0.1, 1]
        )[0]

    return whole(lambda b: math.prod(parts(b))) / whole(lambda b: parts(b)[0])


@pytest.mark.parametrize(
    ("widths", "rank", "nbeta", "gamma", "truth"),
    [
        ((3, 1, 2), 0, 2000.0, 1.0, _one_hidden_unit(3, 2, 2000.0, 1.0)),
        ((4, 1, 4), 0, 500.0, 5.0, _one_hidden_unit(4, 4, 500.0, 5.0)),
        ((1, 1, 1), 1, 20.0, 1.0, _scalar_of_rank_one(20.0, 1.0)),
        ((1, 1, 1), 1, 5.0, 0.3, _scalar_of_rank_one(5.0, 0.3)),
    ],
)
def test_the_reference_against_one_dimensional_integrals(widths, rank, nbeta, gamma, truth):
    found = exact.deep_linear_reference(widths, rank, nbeta, gamma, sweeps=400, seed=1)
    assert found.status is Status.CONVERGED
    assert abs(found.value - truth) < 3 * found.stderr < 0.05 * truth


def test_the_reference_of_one_layer_is_the_quadratic_formula_exactly():
    found = exact.deep_linear_reference((2, 3), 1, 40.0, 10.0, sweeps=16, chains=4)
    assert found.value == pytest.approx(exact.quadratic([1.0] * 6, 40.0, 10.0), rel=1e-12)
    assert found.stderr < 1e-12


def test_the_reference_tends_to_the_coefficient_and_localization_lowers_it():
    weak = exact.deep_linear_reference((5, 4, 5), 0, NBETA, 1.0, sweeps=200)
    strong = exact.deep_linear_reference((5, 4, 5), 0, NBETA, 100.0, sweeps=200)
    assert weak.value == pytest.approx(exact.deep_linear((5, 4, 5), 0).value, rel=0.01)
    assert strong.value < 0.9 * weak.value


def test_the_symmetry_moves_leave_the_loss_and_the_posterior_alone(monkeypatch):
    """With and without them the answer is the same; they are what makes a true rank mix."""
    with_moves = exact.deep_linear_reference((2, 2, 3), 1, 30.0, 2.0, sweeps=200, chains=256)
    monkeypatch.setattr("lambdahat.singular.exact.GAUGE_MOVES", 0)
    without = exact.deep_linear_reference((2, 2, 3), 1, 30.0, 2.0, sweeps=300, chains=256, seed=1)
    assert with_moves.status is without.status is Status.CONVERGED
    assert (
        abs(with_moves.value - without.value)
        < 3 * math.hypot(with_moves.stderr, without.stderr)
        < 0.01
    )
    stuck = exact.deep_linear_reference((3, 2, 3), 1, NBETA, 1.0, sweeps=100)
    assert stuck.status is Status.NOT_MIXED


PROBLEMS = {
    "quadratic": (lambda: exact.quadratic_problem([1.0, 4.0, 0.0], 50), 3),
    "crossing": (lambda: exact.crossing_problem([1, 3, 0], 50), 3),
    "reduced rank": (lambda: exact.deep_linear_problem((3, 2, 4), 1, 50), 14),
    "deep linear": (lambda: exact.deep_linear_problem((2, 2, 2, 2), 0, 50), 12),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_problems_stand_at_a_minimum_of_zero_loss_and_map_and_differentiate(name):
    make, parameters = PROBLEMS[name]
    problem = make()
    assert isinstance(problem, Problem)
    assert (problem.num_parameters, problem.num_samples, problem.dtype) == (
        parameters,
        50,
        torch.float64,
    )
    assert problem.loss() == 0
    assert not problem.gradient().any()
    points = problem.vector + torch.randn(
        5, parameters, generator=generator(0, name), dtype=torch.float64
    )
    batch = problem.batches.first()

    def loss(theta):
        return problem.batch_loss(problem.named(theta), batch)

    gradients, losses = torch.func.vmap(torch.func.grad_and_value(loss))(points)
    torch.testing.assert_close(
        losses, torch.tensor([problem.loss(point) for point in points], dtype=torch.float64)
    )
    torch.testing.assert_close(
        gradients, torch.stack([problem.gradient(point) for point in points])
    )
    assert (losses > 0).all()
    at_zero = torch.func.vmap(torch.func.grad(loss))(
        torch.zeros(3, parameters, dtype=torch.float64)
    )
    assert at_zero.isfinite().all()


def test_problems_have_the_losses_they_say():
    theta = torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64)
    assert exact.quadratic_problem([1.0, 4.0, 0.0], 1).loss(theta) == 0.5 * (4 + 36)
    assert exact.crossing_problem([1, 3, 0], 1).loss(theta) == 2.0**2 * 3.0**6
    problem = exact.deep_linear_problem((2, 1, 2), 1, 1)
    low, high = torch.tensor([[2.0, 3.0]]), torch.tensor([[5.0], [7.0]])
    misfit = high @ low - torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    assert problem.loss(torch.cat([low.flatten(), high.flatten()]).double()) == 0.5 * float(
        misfit.square().sum()
    )
    assert problem.space.shapes == ((1, 2), (2, 1))


def test_the_hessian_at_the_singular_point_has_the_rank_of_the_regular_part():
    widths, rank = (4, 3, 5), 2
    values = torch.linalg.eigvalsh(dense_hessian(exact.deep_linear_problem(widths, rank, 1)))
    assert int((values.abs() > 1e-12).sum()) == rank * (4 + 5) - rank**2
    assert values.min() > -1e-12


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: exact.regular(0), ValueError, "dimension"),
        (lambda: exact.normal_crossing([]), TypeError, "exponents"),
        (lambda: exact.normal_crossing([0, 0]), ValueError, "exponents"),
        (lambda: exact.normal_crossing([1.5]), TypeError, "exponents"),
        (lambda: exact.deep_linear([3], 0), TypeError, "widths"),
        (lambda: exact.deep_linear([3, 0], 0), ValueError, "widths"),
        (lambda: exact.reduced_rank(3, 2, 3, 3), ValueError, "rank"),
        (
            lambda: exact.quadratic([1.0, 2.0], 10.0, 0.0, 0.2),
            ValueError,
            "step_size must be below 4/",
        ),
        (lambda: exact.quadratic([1.0, -2.0], 10.0, 1.0), ValueError, "localization"),
        (lambda: exact.quadratic([1.0], 0.0, 1.0), ValueError, "nbeta"),
        (lambda: exact.quadratic([], 1.0, 1.0), ValueError, "eigenvalues"),
        (lambda: exact.crossing_expectation([1, 1], 10.0, 0.0), ValueError, "localization"),
        (lambda: exact.deep_linear_reference([2, 2], 0, 10.0, 0.0), ValueError, "localization"),
        (lambda: exact.deep_linear_reference([2, 2], 0, 10.0, 1.0, sweeps=2), ValueError, "sweeps"),
    ],
)
def test_bad_arguments_are_named(call, error, text):
    with pytest.raises(error, match=text):
        call()
