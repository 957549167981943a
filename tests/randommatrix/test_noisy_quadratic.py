"""Iterates of a noisy quadratic and their averages: exact laws against closed forms and
simulation.
"""

import math

import numpy as np
import pytest

from lambdahat.randommatrix import (
    IterateLaw,
    NoisyQuadratic,
    average_loss_bound,
    crossing_steps,
    final_loss_bound,
    matching_rate,
)

CURVATURES = np.array([0.05, 0.5, 2.0, 10.0, 15.0])  # αλ from 0.005 to 1.5
RATE, DECAY = 0.1, 0.9
QUADRATIC = NoisyQuadratic(CURVATURES, RATE, [1.0, 2.0, 0.5, 1.0, 3.0], [3.0, -1.0, 2.0, 5.0, 1.0])
KINDS = ("final", "average", "ema")


def law_of(quadratic, kind, steps):
    return {
        "final": lambda: quadratic.final(steps),
        "average": lambda: quadratic.average(steps),
        "ema": lambda: quadratic.ema(steps, DECAY),
    }[kind]()


def closed_form(kind, n):
    """Mean and variance by the sums that the module's docstring states, term by term."""
    phi, sigma, w0 = QUADRATIC.contraction, QUADRATIC.noise, QUADRATIC.start
    k = np.arange(1, n + 1)[:, None]
    if kind == "final":
        limit = RATE * sigma / (CURVATURES * (2 - RATE * CURVATURES))
        return phi**n * w0, limit * (1 - phi ** (2 * n))
    if kind == "average":
        mean = w0 * phi * (1 - phi**n) / (n * RATE * CURVATURES)
        return mean, sigma / (CURVATURES * n) ** 2 * ((1 - phi**k) ** 2).sum(0)
    apart = phi - DECAY
    mean = w0 * (DECAY**n + (1 - DECAY) * phi * (phi**n - DECAY**n) / apart)
    return mean, RATE**2 * sigma * (1 - DECAY) ** 2 * (((phi**k - DECAY**k) / apart) ** 2).sum(0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [1, 2, 7, 100])
def test_laws_are_their_closed_forms(kind, steps):
    law = law_of(QUADRATIC, kind, steps)
    mean, variance = closed_form(kind, steps)
    np.testing.assert_allclose(law.mean, mean, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(law.variance, variance, rtol=1e-9)


def test_limits_are_those_of_the_facts():
    n, phi = 1_000_000, QUADRATIC.contraction
    limit = RATE * QUADRATIC.noise / (CURVATURES * (2 - RATE * CURVATURES))
    np.testing.assert_allclose(QUADRATIC.final(n).variance, limit, rtol=1e-9)
    np.testing.assert_allclose(QUADRATIC.stationary_variance, limit)
    np.testing.assert_allclose(
        QUADRATIC.average(n).variance, QUADRATIC.noise / (CURVATURES**2 * n), rtol=1e-3
    )
    ema = limit * (1 - DECAY) * (1 + DECAY * phi) / ((1 + DECAY) * (1 - DECAY * phi))
    np.testing.assert_allclose(QUADRATIC.ema(n, DECAY).variance, ema, rtol=1e-9)
    np.testing.assert_allclose(QUADRATIC.stationary_ema_variance(DECAY), ema)


STEPS, REPLICAS = 40, 20_000


@pytest.fixture(scope="module")
def simulated():
    return QUADRATIC.simulate(STEPS, REPLICAS, DECAY, seed=0)


def scores(law, points):
    """How far simulated means and variances are from a law's, in standard errors."""
    means = (points.mean(0) - law.mean) / np.sqrt(law.variance / REPLICAS)
    variances = (points.var(0) / law.variance - 1) / math.sqrt(2 / REPLICAS)
    return np.abs(means), np.abs(variances)


@pytest.mark.parametrize("kind", KINDS)
def test_simulation_agrees_with_the_laws_and_not_with_the_printed_ones(simulated, kind):
    points = getattr(simulated, kind)
    means, variances = scores(law_of(QUADRATIC, kind, STEPS), points)
    assert max(means.max(), variances.max()) < 4
    # where nαλ is small or αλ near 1 the printed final iterate happens to be right
    between = slice(1, 3)
    assert scores(QUADRATIC.printed(kind, STEPS, DECAY), points)[1][between].min() > 20


def test_the_printed_laws_are_as_printed():
    phi, scale, n = 0.8, 0.1 / 2.0, 12
    quadratic = NoisyQuadratic([2.0], 0.1, 1.0, 3.0)
    final, average, ema = (quadratic.printed(kind, n, 0.5) for kind in KINDS)
    assert final.mean[0] == pytest.approx(phi**n * 3)
    assert final.variance[0] == pytest.approx(scale * (1 - phi ** (n - 2)))
    assert average.mean[0] == pytest.approx((1 - phi ** (n - 2)) * 3 / (n * 0.2))
    assert average.variance[0] == pytest.approx(scale / n)
    assert ema.mean[0] == pytest.approx(
        0.5 * 3 * phi ** (n + 1) * (1 - (0.5 / phi) ** (n - 1)) / (phi - 0.5)
    )
    assert ema.variance[0] == pytest.approx(0.5 / 1.5 * scale * (1 - phi ** (n - 2)))


def test_flat_directions_are_random_walks():
    law, n = NoisyQuadratic([0.0], 0.1, 4.0, 1.0), 50
    assert law.final(n).variance[0] == pytest.approx(n * 0.01 * 4)
    assert law.average(n).variance[0] == pytest.approx(0.01 * 4 * (n + 1) * (2 * n + 1) / (6 * n))
    assert law.average(n).mean[0] == 1.0
    assert law.final(n).loss == 0.0


def test_averages_reduce_to_the_iterate():
    for kind in ("average", "ema"):
        law = QUADRATIC.average(1) if kind == "average" else QUADRATIC.ema(30, 0.0)
        same = QUADRATIC.final(1 if kind == "average" else 30)
        np.testing.assert_allclose(law.mean, same.mean)
        np.testing.assert_allclose(law.variance, same.variance)


def test_the_average_with_its_start_is_another_weighting():
    n = 9
    with_start, without = QUADRATIC.average(n, with_start=True), QUADRATIC.average(n)
    np.testing.assert_allclose(with_start.mean, (QUADRATIC.start + n * without.mean) / (n + 1))
    np.testing.assert_allclose(with_start.variance, without.variance * (n / (n + 1)) ** 2)


def test_norms_of_theorem_18(simulated):
    for kind in KINDS:
        law, points = law_of(QUADRATIC, kind, STEPS), getattr(simulated, kind)
        squares = (points**2).sum(1)
        assert abs(squares.mean() - law.squared_norm) < 4 * squares.std() / math.sqrt(REPLICAS)
    wide = NoisyQuadratic(np.linspace(0.5, 5, 400), RATE, 1.0, 0.1).simulate(60, 500, seed=1)
    law = NoisyQuadratic(np.linspace(0.5, 5, 400), RATE, 1.0, 0.1).final(60)
    norms = np.linalg.norm(wide.final, axis=1)
    assert norms.mean() == pytest.approx(math.sqrt(law.squared_norm), rel=0.01)
    assert norms.std() == pytest.approx(law.norm_spread, rel=0.15)


def test_the_average_is_shorter_than_its_iterates(simulated):
    """Theorem 20, for any law of the iterates: the gap is their spread about the average."""
    squares = [QUADRATIC.final(t).squared_norm for t in range(1, STEPS + 1)]
    assert QUADRATIC.average(STEPS).squared_norm < np.mean(squares)
    iterates = np.stack([simulated.final[0], simulated.average[0], simulated.ema[0]])
    centre = iterates.mean(0)
    gap = (iterates**2).sum(1).mean() - (centre**2).sum()
    assert gap == pytest.approx(((iterates - centre) ** 2).sum(1).mean())


def test_losses_of_equation_7_26():
    n = 100_000
    limit = RATE / 4 * (QUADRATIC.noise / (1 - RATE * CURVATURES / 2)).sum()
    assert QUADRATIC.final(n).loss == pytest.approx(limit)
    still = NoisyQuadratic(CURVATURES, RATE, QUADRATIC.noise)
    bound = (QUADRATIC.noise / CURVATURES).sum() / (2 * n + 2)
    assert still.average(n, with_start=True).loss == pytest.approx(bound, rel=0.01)


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("steps", [1, 10, 1000])
def test_bounds_hold_for_preconditioned_descent(power, steps):
    """Eqs. 7.38–7.40: B = Hᵖ is SGD, Adam as the thesis models it, and Newton's method."""
    curvatures, start = np.geomspace(1e-3, 10, 30), np.ones(30)
    rate = 0.9 / 10 ** (1 - power) / curvatures**power
    quadratic = NoisyQuadratic(curvatures, rate, 0.1, start)
    assert quadratic.average(steps, with_start=True).loss <= average_loss_bound(quadratic, steps)
    assert quadratic.final(10**7).loss <= final_loss_bound(quadratic)
    printed = 0.25 * (rate * 0.1).sum()  # §7.6: below what it is to bound
    assert quadratic.final(10**7).loss > printed


def test_bounds_are_those_printed_for_sgd_and_adam():
    n, alpha, curvatures, start = 10_000, 0.05, np.array([1.0, 4.0]), np.array([0.3, 0.2])
    noise = (0.1 / curvatures).sum() / (n + 1)
    sgd = noise + (start**2 / curvatures).sum() / ((n + 1) * alpha) ** 2
    assert average_loss_bound(NoisyQuadratic(curvatures, alpha, 0.1, start), n) == pytest.approx(
        sgd
    )
    adam = noise + (start**2).sum() / ((n + 1) * alpha) ** 2
    assert average_loss_bound(
        NoisyQuadratic(curvatures, alpha / curvatures**0.5, 0.1, start), n
    ) == pytest.approx(adam)


def test_the_matching_rate_solves_equation_7_27():
    curvatures, noise, n = np.array([0.5, 1.0, 8.0]), np.array([1.0, 2.0, 3.0]), 30
    rate = matching_rate(curvatures, n, noise)
    assert (rate * noise / (2 - rate * curvatures)).sum() == pytest.approx(
        (noise / curvatures).sum() / (n + 1)
    )
    # Eq. 7.28 is right for one curvature
    assert matching_rate([3.0], 10) == pytest.approx(2 / (12 * 3.0))
    rates = [matching_rate(curvatures, n) for n in (10**4, 10**5)]
    assert math.log10(rates[0] / rates[1]) == pytest.approx(1, abs=1e-3)


def test_the_printed_matching_rate_may_be_unstable():
    curvatures, n = np.array([0.01, 10.0]), 10
    assert 2 / (2 + n) * (1 / curvatures).mean() > 2 / 10.0 > matching_rate(curvatures, n)


def test_averaging_wins_from_the_crossing_on():
    quadratic = NoisyQuadratic([0.5, 2.0, 10.0], RATE, 1.0, [3.0, -1.0, 2.0])
    wins = [quadratic.average(n).loss < quadratic.final(n).loss for n in range(2, 400)]
    last_loss = max(n for n, won in enumerate(wins, start=2) if not won)
    assert crossing_steps(quadratic) == last_loss + 1
    assert crossing_steps(NoisyQuadratic([1.0, 0.0], RATE)) == 2


def test_a_law_is_saved_and_loaded(tmp_path):
    law = QUADRATIC.final(3)
    loaded = IterateLaw.load(law.save(tmp_path / "law"))
    np.testing.assert_array_equal(loaded.mean, law.mean)
    assert loaded.loss == law.loss


def test_simulations_are_seeded():
    first, again, other = (QUADRATIC.simulate(3, 5, seed=seed).final for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: NoisyQuadratic([-1.0], 0.1), "curvatures must be a list of numbers of at least 0"),
        (lambda: NoisyQuadratic(1.0, 0.1), "curvatures must be a list"),
        (lambda: NoisyQuadratic([1.0], 2.0), r"rate must lie in \(0, 2/λ\).*the iterates run away"),
        (lambda: NoisyQuadratic([1.0, 2.0], [0.1]), "rate must be a finite number, or 2 of them"),
        (lambda: NoisyQuadratic([1.0], 0.1, -1.0), "noise must be a variance, at least 0"),
        (
            lambda: NoisyQuadratic([1.0], 0.1, start=math.nan),
            "start must be a finite number, or 1 of them, got nan",
        ),
        (lambda: QUADRATIC.ema(3, 1.0), r"decay must lie in \[0, 1\), got 1.0"),
        (lambda: QUADRATIC.final(0), "steps must be an integer of at least 1, got 0"),
        (lambda: QUADRATIC.printed("last", 3), "kind must be one of 'final', 'average', 'ema'"),
        (
            lambda: NoisyQuadratic([0.0], 0.1).printed("final", 3),
            "curvatures must be above 0 for the printed laws",
        ),
        (lambda: matching_rate([0.0, 1.0], 3), "curvatures must be above 0"),
        (lambda: matching_rate([], 3), "curvatures must be one or more numbers, got none"),
        (lambda: QUADRATIC.ema(3, "a"), "decay must be a number in .* got 'a'"),
        (
            lambda: crossing_steps(NoisyQuadratic([1.0], 0.1, 0.0)),
            "noise must be above 0 in a direction that bends",
        ),
    ],
)
def test_misuse(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()
